#!/usr/bin/env python3
"""Writes crates/audit/tests/fixtures: tiny random checkpoints of each architecture and the logits of `transformers`.

    python3 scripts/fixtures.py OUTPUT_DIRECTORY

Needs torch and transformers (made with torch 2.11.0 and transformers 5.17.0, on a CPU). Weights are in f32 and in bf16;
logits are computed in float32 with eager attention. An embedding scale is what `transformers` uses when it loads the
checkpoint in its own type: rounded to bf16 for bf16 weights.
"""
import json
import math
import os
import sys

import torch
import transformers
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10_000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
GEMMA = dict(
    SIZES,
    hidden_size=96,
    num_hidden_layers=3,
    num_key_value_heads=1,
    head_dim=32,
    sliding_window=16,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    rope_parameters={
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
)
VISION = dict(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=1,
    image_size=16,
    patch_size=8,
)
BOTH = [torch.float32, torch.bfloat16]
# Name: class, configuration, types of the weights, tokens of the prompt, positions whose logits are kept.
MODELS = {
    "llama": (
        LlamaForCausalLM,
        lambda: LlamaConfig(**SIZES, rms_norm_eps=1e-5, rope_parameters=dict(rope_type="default", rope_theta=10_000.0)),
        BOTH,
        70,
        [0, 1, 63, 64, 69],
    ),
    "llama3": (
        LlamaForCausalLM,
        lambda: LlamaConfig(**SIZES, rms_norm_eps=1e-5, tie_word_embeddings=True, rope_parameters=LLAMA3),
        BOTH,
        100,
        [0, 31, 32, 33, 63, 64, 99],
    ),
    "qwen2": (
        Qwen2ForCausalLM,
        lambda: Qwen2Config(**SIZES, rope_parameters=dict(rope_type="default", rope_theta=1_000_000.0)),
        BOTH,
        70,
        [0, 1, 63, 64, 69],
    ),
    "qwen2-window": (
        Qwen2ForCausalLM,
        lambda: Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=16, max_window_layers=1),
        [torch.bfloat16],
        70,
        [0, 14, 15, 16, 17, 63, 64, 69],
    ),
    "qwen3": (
        Qwen3ForCausalLM,
        lambda: Qwen3Config(**SIZES, head_dim=32, rope_parameters=dict(rope_type="default", rope_theta=1_000_000.0)),
        BOTH,
        70,
        [0, 1, 63, 64, 69],
    ),
    "qwen3-tied": (
        Qwen3ForCausalLM,
        lambda: Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
        [torch.bfloat16],
        70,
        [0, 1, 63, 64, 69],
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        lambda: Gemma3TextConfig(**GEMMA, query_pre_attn_scalar=32),
        BOTH,
        80,
        [0, 14, 15, 16, 17, 31, 32, 63, 64, 79],
    ),
    "gemma3-vision": (
        Gemma3ForConditionalGeneration,
        lambda: Gemma3Config(
            text_config=dict(GEMMA, query_pre_attn_scalar=24),
            vision_config=VISION,
            mm_tokens_per_image=4,
            image_token_index=255,
            boi_token_index=254,
            eoi_token_index=253,
        ),
        [torch.bfloat16],
        80,
        [0, 15, 16, 17, 64, 79],
    ),
}


def randomise(model, generator):
    """Weights of a trained model's size: peaked attention, norms around one, logits that spread."""

    def fill(tensor, deviation, mean=0.0):
        values = torch.randn(tensor.shape, generator=generator) * deviation + mean
        tensor.copy_(values)

    from_one = "Gemma3" in type(model).__name__
    seen = set()
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            if p.data_ptr() in seen:
                continue
            seen.add(p.data_ptr())
            if "norm" in name:
                fill(p, 0.3, 0.0 if from_one else 1.0)
            elif name.endswith(".bias"):
                fill(p, 0.5)
            elif "embed_tokens" in name or "lm_head" in name:
                fill(p, 0.3)
            elif "q_proj" in name:
                fill(p, 2.0 / math.sqrt(p.shape[-1]))
            else:
                fill(p, 1.0 / math.sqrt(p.shape[-1]))


def scale_of(model):
    """The module that scales the embedding, if there is one, and its scale."""
    for module in model.modules():
        if hasattr(module, "embed_scale"):
            return module, module.embed_scale.to(module.weight.dtype).float()
    return None, None


def write(out, name, dtype):
    make, config, _, length, positions = MODELS[name]
    generator = torch.Generator().manual_seed(list(MODELS).index(name))
    torch.manual_seed(0)
    model = make(config()).eval()
    randomise(model, generator)
    ids = torch.randint(0, 250, (length,), generator=generator)
    short = {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]
    folder = os.path.join(out, f"{name}-{short}")
    model.to(dtype).save_pretrained(folder)
    stray = os.path.join(folder, "generation_config.json")
    if os.path.exists(stray):
        os.remove(stray)

    as_stored = make.from_pretrained(folder, dtype="auto")
    assert as_stored.dtype == dtype
    reference = make.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    scaled, plain = scale_of(reference)
    if scaled is not None:
        _, stored = scale_of(as_stored)
        print(f"{name}-{short}: embedding scale {stored.item()!r}; in float32 {plain.item()!r}")
        scaled.embed_scale = stored
    with torch.no_grad():
        logits = reference(input_ids=ids[None]).logits[0]
    assert logits.dtype == torch.float32 and torch.isfinite(logits).all()
    kept = {
        "made_with": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "ids": ids.tolist(),
        "positions": positions,
        "logits": [logits[p].tolist() for p in positions],
    }
    with open(os.path.join(folder, "expected.json"), "w") as f:
        # Nine digits give a float32 back exactly.
        kept["logits"] = [[float(f"{x:.9g}") for x in row] for row in kept["logits"]]
        text = json.dumps(kept)
        f.write(text + "\n")
    size = sum(os.path.getsize(os.path.join(folder, f)) for f in os.listdir(folder))
    print(f"{name}-{short}: {sorted(os.listdir(folder))}, {size} bytes, deviation of logits {logits.std().item():.2f}")


def main():
    out = sys.argv[1]
    for name, (_, _, types, _, _) in MODELS.items():
        for dtype in types:
            write(out, name, dtype)


main()
