//! Architectures as data: how each names its tensors, in GGUF and in safetensors.

use crate::config::{Activation, Arch};

/// A tensor's place in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    AttnNorm,
    Q,
    K,
    V,
    O,
    FfnNorm,
    Gate,
    Up,
    Down,
}

/// One tensor every layer has.
pub(crate) struct LayerTensor {
    pub role: Role,
    /// Between `blk.N.` and `.weight`.
    pub gguf: &'static str,
    /// Between `model.layers.N.` and `.weight`.
    pub hf: &'static str,
}

const fn tensor(role: Role, gguf: &'static str, hf: &'static str) -> LayerTensor {
    LayerTensor { role, gguf, hf }
}

/// What is particular to one architecture.
pub(crate) struct ArchSpec {
    pub arch: Arch,
    /// GGUF's `general.architecture`, and the prefix of its keys.
    pub gguf: &'static str,
    /// `architectures[0]` of config.json.
    pub hf: &'static str,
    /// `model_type` of config.json.
    pub hf_model_type: &'static str,
    pub activation: Activation,
    /// GGUF stores the rows of q and k for RoPE pairs (2i, 2i+1) instead of (i, i + d/2).
    pub gguf_interleaves_qk: bool,
    pub layer: &'static [LayerTensor],
}

/// Every architecture that can be loaded.
pub(crate) const ARCHS: &[ArchSpec] = &[ArchSpec {
    arch: Arch::Llama,
    gguf: "llama",
    hf: "LlamaForCausalLM",
    hf_model_type: "llama",
    activation: Activation::Silu,
    gguf_interleaves_qk: true,
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
}];

/// Which of the two name tables a checkpoint follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Naming {
    Gguf,
    Hf,
}

impl Naming {
    pub fn embed(self) -> &'static str {
        match self {
            Naming::Gguf => "token_embd.weight",
            Naming::Hf => "model.embed_tokens.weight",
        }
    }

    pub fn final_norm(self) -> &'static str {
        match self {
            Naming::Gguf => "output_norm.weight",
            Naming::Hf => "model.norm.weight",
        }
    }

    pub fn lm_head(self) -> &'static str {
        match self {
            Naming::Gguf => "output.weight",
            Naming::Hf => "lm_head.weight",
        }
    }

    pub fn layer(self, layer: usize, tensor: &LayerTensor) -> String {
        match self {
            Naming::Gguf => format!("blk.{layer}.{}.weight", tensor.gguf),
            Naming::Hf => format!("model.layers.{layer}.{}.weight", tensor.hf),
        }
    }
}
