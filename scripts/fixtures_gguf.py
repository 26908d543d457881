#!/usr/bin/env python3
"""Writes model-gguf.bin beside model.safetensors of bf16 checkpoints, as converters do, with the package `gguf`'s own names.

    python3 scripts/fixtures_gguf.py crates/audit/tests/fixtures/{llama3,qwen2,qwen3,gemma3}-bf16

Needs gguf (0.19), numpy and nothing that knows safetensors: the file is read here. Matrices stay BF16, vectors become
F32, Gemma's norms become 1 + w, Llama's q and k get the row order of interleaved RoPE.
"""
import json
import math
import struct
import sys

import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map

ARCHS = {"llama": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2, "qwen3": MODEL_ARCH.QWEN3, "gemma3_text": MODEL_ARCH.GEMMA3}


def tensors(path):
    data = open(path, "rb").read()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    for name, t in sorted(header.items()):
        if name != "__metadata__":
            assert t["dtype"] == "BF16"
            start, end = (8 + length + at for at in t["data_offsets"])
            yield name, np.frombuffer(data[start:end], dtype="<u2").reshape(t["shape"])


def widened(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def interleaved(w, heads):
    rows, cols = w.shape
    return w.reshape(heads, 2, rows // heads // 2, cols).swapaxes(1, 2).reshape(rows, cols)


def rope_divisors(rope, d):
    """Llama 3's scaling as divisors of the plain frequencies."""
    out = []
    for i in range(0, d, 2):
        frequency = 1.0 / rope["rope_theta"] ** (i / d)
        wavelength = 2 * math.pi / frequency
        context, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
        if wavelength < context / high:
            out.append(1.0)
        elif wavelength > context / low:
            out.append(rope["factor"])
        else:
            smooth = (context / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(out, dtype=np.float32)


def write(folder):
    c = json.load(open(f"{folder}/config.json"))
    kind = c["model_type"]
    d = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    names = get_tensor_name_map(ARCHS[kind], c["num_hidden_layers"])
    w = GGUFWriter(f"{folder}/model-gguf.bin", kind.removesuffix("_text"))
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_block_count(c["num_hidden_layers"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_key_length(d)
    w.add_value_length(d)
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_vocab_size(c["vocab_size"])
    rope = c["rope_parameters"]
    if kind == "gemma3_text":
        w.add_sliding_window(c["sliding_window"])
        w.add_sliding_window_pattern(c["layer_types"].index("full_attention") + 1)
        w.add_float32("gemma3.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
        w.add_rope_scaling_factor(rope["factor"])
        w.add_string("gemma3.rope.scaling.type", rope["rope_type"])
    w.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "llama3":
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        w.add_tensor("rope_freqs.weight", rope_divisors(rope, d))
    for name, bits in tensors(f"{folder}/model.safetensors"):
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new, name
        if bits.ndim == 1:
            values = widened(bits)
            w.add_tensor(new, values + np.float32(1) if kind == "gemma3_text" else values)
            continue
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = c["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            bits = interleaved(bits, heads)
        w.add_tensor(new, np.ascontiguousarray(bits).view(np.uint8), raw_dtype=GGMLQuantizationType.BF16)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    print(f"{folder}/model-gguf.bin")


for folder in sys.argv[1:]:
    write(folder)
