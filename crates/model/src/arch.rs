//! Architectures as data: how each names its tensors, in GGUF and in safetensors, and what its files leave unsaid.

use crate::config::{Activation, Arch};

/// A tensor's place in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    AttnNorm,
    Q,
    K,
    V,
    O,
    QBias,
    KBias,
    VBias,
    QNorm,
    KNorm,
    PostAttnNorm,
    FfnNorm,
    Gate,
    Up,
    Down,
    PostFfnNorm,
}

/// One tensor every layer has.
pub(crate) struct LayerTensor {
    pub role: Role,
    /// Between `blk.N.` and `.weight` or `.bias`.
    pub gguf: &'static str,
    /// Between `model.layers.N.` and `.weight` or `.bias`.
    pub hf: &'static str,
}

const fn tensor(role: Role, gguf: &'static str, hf: &'static str) -> LayerTensor {
    LayerTensor { role, gguf, hf }
}

/// A class of `transformers` that is this architecture.
pub(crate) struct HfClass {
    /// `architectures[0]` of config.json.
    pub name: &'static str,
    /// `model_type` of config.json.
    pub model_type: &'static str,
    /// The decoder of a multimodal model: its configuration lies in `text_config`, with a `model_type` of its own.
    pub text_model_type: Option<&'static str>,
    /// Where its decoder's tensors may lie, in order.
    pub places: &'static [HfNames],
    /// Tensors that are no part of the decoder: what their names start with.
    pub ignored: &'static [&'static str],
}

/// The names of a decoder's tensors in safetensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HfNames {
    /// Before `embed_tokens`, `layers` and `norm`.
    pub model: &'static str,
    pub lm_head: &'static str,
}

const PLAIN: &[HfNames] = &[HfNames {
    model: "model.",
    lm_head: "lm_head.weight",
}];

const fn causal(name: &'static str, model_type: &'static str) -> HfClass {
    HfClass {
        name,
        model_type,
        text_model_type: None,
        places: PLAIN,
        ignored: &[],
    }
}

/// What is particular to one architecture.
pub(crate) struct ArchSpec {
    pub arch: Arch,
    /// GGUF's `general.architecture`, and the prefix of its keys.
    pub gguf: &'static str,
    pub hf: &'static [HfClass],
    pub activation: Activation,
    /// GGUF stores the rows of q and k for RoPE pairs (2i, 2i+1) instead of (i, i + d/2).
    pub gguf_interleaves_qk: bool,
    /// safetensors store norm weights as w and mean 1 + w; GGUF stores the sum.
    pub hf_norms_from_one: bool,
    /// The embedding is multiplied by the root of its width.
    pub scales_embedding: bool,
    pub layer: &'static [LayerTensor],
}

/// Every architecture that can be loaded.
pub(crate) const ARCHS: &[ArchSpec] = &[
    ArchSpec {
        arch: Arch::Llama,
        gguf: "llama",
        hf: &[causal("LlamaForCausalLM", "llama")],
        activation: Activation::Silu,
        gguf_interleaves_qk: true,
        hf_norms_from_one: false,
        scales_embedding: false,
        layer: &[
            tensor(Role::AttnNorm, "attn_norm", "input_layernorm"),
            tensor(Role::Q, "attn_q", "self_attn.q_proj"),
            tensor(Role::K, "attn_k", "self_attn.k_proj"),
            tensor(Role::V, "attn_v", "self_attn.v_proj"),
            tensor(Role::O, "attn_output", "self_attn.o_proj"),
            tensor(Role::FfnNorm, "ffn_norm", "post_attention_layernorm"),
            tensor(Role::Gate, "ffn_gate", "mlp.gate_proj"),
            tensor(Role::Up, "ffn_up", "mlp.up_proj"),
            tensor(Role::Down, "ffn_down", "mlp.down_proj"),
        ],
    },
    ArchSpec {
        arch: Arch::Qwen2,
        gguf: "qwen2",
        hf: &[causal("Qwen2ForCausalLM", "qwen2")],
        activation: Activation::Silu,
        gguf_interleaves_qk: false,
        hf_norms_from_one: false,
        scales_embedding: false,
        layer: &[
            tensor(Role::AttnNorm, "attn_norm", "input_layernorm"),
            tensor(Role::Q, "attn_q", "self_attn.q_proj"),
            tensor(Role::QBias, "attn_q", "self_attn.q_proj"),
            tensor(Role::K, "attn_k", "self_attn.k_proj"),
            tensor(Role::KBias, "attn_k", "self_attn.k_proj"),
            tensor(Role::V, "attn_v", "self_attn.v_proj"),
            tensor(Role::VBias, "attn_v", "self_attn.v_proj"),
            tensor(Role::O, "attn_output", "self_attn.o_proj"),
            tensor(Role::FfnNorm, "ffn_norm", "post_attention_layernorm"),
            tensor(Role::Gate, "ffn_gate", "mlp.gate_proj"),
            tensor(Role::Up, "ffn_up", "mlp.up_proj"),
            tensor(Role::Down, "ffn_down", "mlp.down_proj"),
        ],
    },
    ArchSpec {
        arch: Arch::Qwen3,
        gguf: "qwen3",
        hf: &[causal("Qwen3ForCausalLM", "qwen3")],
        activation: Activation::Silu,
        gguf_interleaves_qk: false,
        hf_norms_from_one: false,
        scales_embedding: false,
        layer: &[
            tensor(Role::AttnNorm, "attn_norm", "input_layernorm"),
            tensor(Role::Q, "attn_q", "self_attn.q_proj"),
            tensor(Role::K, "attn_k", "self_attn.k_proj"),
            tensor(Role::V, "attn_v", "self_attn.v_proj"),
            tensor(Role::O, "attn_output", "self_attn.o_proj"),
            tensor(Role::QNorm, "attn_q_norm", "self_attn.q_norm"),
            tensor(Role::KNorm, "attn_k_norm", "self_attn.k_norm"),
            tensor(Role::FfnNorm, "ffn_norm", "post_attention_layernorm"),
            tensor(Role::Gate, "ffn_gate", "mlp.gate_proj"),
            tensor(Role::Up, "ffn_up", "mlp.up_proj"),
            tensor(Role::Down, "ffn_down", "mlp.down_proj"),
        ],
    },
    ArchSpec {
        arch: Arch::Gemma3,
        gguf: "gemma3",
        hf: &[
            causal("Gemma3ForCausalLM", "gemma3_text"),
            HfClass {
                name: "Gemma3ForConditionalGeneration",
                model_type: "gemma3",
                text_model_type: Some("gemma3_text"),
                // As published, and as `transformers` writes it since 4.52.
                places: &[
                    HfNames {
                        model: "language_model.model.",
                        lm_head: "language_model.lm_head.weight",
                    },
                    HfNames {
                        model: "model.language_model.",
                        lm_head: "lm_head.weight",
                    },
                ],
                ignored: &[
                    "vision_tower.",
                    "multi_modal_projector.",
                    "model.vision_tower.",
                    "model.multi_modal_projector.",
                ],
            },
        ],
        activation: Activation::GeluTanh,
        gguf_interleaves_qk: false,
        hf_norms_from_one: true,
        scales_embedding: true,
        layer: &[
            tensor(Role::AttnNorm, "attn_norm", "input_layernorm"),
            tensor(Role::Q, "attn_q", "self_attn.q_proj"),
            tensor(Role::K, "attn_k", "self_attn.k_proj"),
            tensor(Role::V, "attn_v", "self_attn.v_proj"),
            tensor(Role::O, "attn_output", "self_attn.o_proj"),
            tensor(Role::QNorm, "attn_q_norm", "self_attn.q_norm"),
            tensor(Role::KNorm, "attn_k_norm", "self_attn.k_norm"),
            tensor(
                Role::PostAttnNorm,
                "post_attention_norm",
                "post_attention_layernorm",
            ),
            tensor(Role::FfnNorm, "ffn_norm", "pre_feedforward_layernorm"),
            tensor(Role::Gate, "ffn_gate", "mlp.gate_proj"),
            tensor(Role::Up, "ffn_up", "mlp.up_proj"),
            tensor(Role::Down, "ffn_down", "mlp.down_proj"),
            tensor(
                Role::PostFfnNorm,
                "post_ffw_norm",
                "post_feedforward_layernorm",
            ),
        ],
    },
];

/// Which of the name tables a checkpoint follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Naming {
    Gguf,
    Hf(HfNames),
}

impl Naming {
    pub fn embed(self) -> String {
        match self {
            Naming::Gguf => "token_embd.weight".to_string(),
            Naming::Hf(names) => format!("{}embed_tokens.weight", names.model),
        }
    }

    pub fn final_norm(self) -> String {
        match self {
            Naming::Gguf => "output_norm.weight".to_string(),
            Naming::Hf(names) => format!("{}norm.weight", names.model),
        }
    }

    pub fn lm_head(self) -> &'static str {
        match self {
            Naming::Gguf => "output.weight",
            Naming::Hf(names) => names.lm_head,
        }
    }

    pub fn layer(self, layer: usize, tensor: &LayerTensor) -> String {
        let part = match tensor.role {
            Role::QBias | Role::KBias | Role::VBias => "bias",
            _ => "weight",
        };
        match self {
            Naming::Gguf => format!("blk.{layer}.{}.{part}", tensor.gguf),
            Naming::Hf(names) => format!("{}layers.{layer}.{}.{part}", names.model, tensor.hf),
        }
    }
}
