"""Writes crates/model/tests/fixtures/quants-gguf.bin with the `gguf` package (0.19, with numpy).

For every tensor type the project reads, random blocks under the type's name and, under NAME.f32, what
gguf.quants.dequantize makes of them. Also metadata of every type, to check the reader against another writer.
"""

import sys

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import GGUFValueType as V
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

ROWS, COLS = 4, 256
# Bytes of a block at which its f16 scales start.
SCALES = {T.Q8_0: [0], T.Q4_0: [0], T.Q5_0: [0], T.Q4_1: [0, 2], T.Q5_1: [0, 2], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208]}

rng = np.random.default_rng(20)
writer = GGUFWriter(sys.argv[1], "none")

for value, kind in [
    (200, V.UINT8), (-100, V.INT8), (60000, V.UINT16), (-30000, V.INT16), (4000000000, V.UINT32), (-2000000000, V.INT32),
    (2**63 + 1, V.UINT64), (-(2**62), V.INT64), (0.1, V.FLOAT32), (0.1, V.FLOAT64), (True, V.BOOL), ("größe\n", V.STRING),
]:
    writer.add_key_value(f"value.{kind.name.lower()}", value, kind)
    if kind != V.STRING:
        writer.add_key_value(f"array.{kind.name.lower()}", [value, value], V.ARRAY, sub_type=kind)
writer.add_array("array.string", ["Ġa", "", "b c"])
writer.add_array("array.nested", [[1, 2], [3]])

for kind in [T.F32, T.F16, T.BF16, *SCALES]:
    if kind == T.F32:
        raw = rng.standard_normal((ROWS, COLS)).astype(np.float32)
        wide = raw
    elif kind == T.F16:
        raw = rng.standard_normal((ROWS, COLS)).astype(np.float16)
        raw[0, :3] = [-0.0, 6e-8, 65504]
        wide = raw.astype(np.float32)
    else:
        length, size = GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 256, (ROWS * COLS // length, size), dtype=np.uint8)
        if kind == T.BF16:
            raw[:, 1] = raw[:, 1] & 0x80 | rng.integers(0x30, 0x48, len(raw), dtype=np.uint8)
        for at in SCALES.get(kind, []):
            # Any finite f16, subnormal ones and zeros of both signs among them.
            d = rng.integers(0, 0x7C00, len(raw), dtype=np.uint16) | rng.integers(0, 2, len(raw), dtype=np.uint16) << 15
            d[:3] = [0, 0x8000, 1]
            raw[:, at : at + 2] = d.view(np.uint8).reshape(-1, 2)
        raw = raw.reshape(ROWS, -1)
        wide = dequantize(raw, kind)
    assert np.isfinite(wide).all()
    writer.add_tensor(kind.name, raw, raw_dtype=kind)
    writer.add_tensor(f"{kind.name}.f32", wide.astype(np.float32))

writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
