"""Operand classes for single k16 steps: A (64 x 16), B (256 x 16) bf16 patterns, C (64 x 256) f32 patterns."""
import numpy as np
rng = np.random.default_rng(20261129)
u16, u32 = np.uint16, np.uint32


def bf(sign, e, m): return ((sign.astype(u32) << 15) | (e.astype(u32) << 7) | m.astype(u32)).astype(u16)


def ops(shape, elo, ehi, pz=0.0, psub=0.0, pinf=0.0, pnan=0.0):
    """bf16 operands, biased exponent fields uniform in [elo, ehi]."""
    s = rng.integers(0, 2, shape); e = rng.integers(elo, ehi + 1, shape); m = rng.integers(0, 128, shape)
    v = bf(s, e, m); r = rng.random(shape)
    sub = bf(s, np.zeros_like(e), np.maximum(m >> rng.integers(0, 7, shape), 1)); z = bf(s, np.zeros_like(e), np.zeros_like(m))
    v = np.where(r < psub, sub, v); r = rng.random(shape); v = np.where(r < pz, z, v)
    r = rng.random(shape); v = np.where(r < pinf, bf(s, np.full_like(e, 255), np.zeros_like(m)), v)
    r = rng.random(shape); v = np.where(r < pnan, bf(s, np.full_like(e, 255), np.maximum(m, 1)), v)
    return v.astype(u16)


def accs(shape, elo, ehi, pz=0.0, psub=0.0, pinf=0.0, pnan=0.0):
    s = rng.integers(0, 2, shape).astype(u32) << u32(31); e = rng.integers(elo, ehi + 1, shape).astype(u32); m = rng.integers(0, 1 << 23, shape).astype(u32)
    v = s | (e << u32(23)) | m
    sub = s | np.maximum(m >> rng.integers(0, 22, shape).astype(u32), u32(1))
    v = np.where(rng.random(shape) < psub, sub, v); v = np.where(rng.random(shape) < pz, s, v)
    v = np.where(rng.random(shape) < pinf, s | u32(0x7f800000), v); v = np.where(rng.random(shape) < pnan, s | u32(0x7f800000) | np.maximum(m, u32(1)), v)
    return v.astype(u32)


A_, B_, C_ = (64, 16), (256, 16), (64, 256)


def cls(name):
    if name == "normal": return ops(A_, 120, 134), ops(B_, 120, 134), accs(C_, 120, 140)
    if name == "wide": return ops(A_, 1, 254), ops(B_, 1, 254), accs(C_, 1, 254)
    if name == "mid": return ops(A_, 100, 154, pz=.2), ops(B_, 100, 154, pz=.2), accs(C_, 80, 180, pz=.2)
    if name == "sub_a": return ops(A_, 118, 134, psub=.6, pz=.1), ops(B_, 200, 254, pz=.1), accs(C_, 60, 130, pz=.3)
    if name == "sub_all": return ops(A_, 118, 134, psub=1.), ops(B_, 222, 254), accs(C_, 1, 30, pz=.4, psub=.3)
    if name == "sub_both": return ops(A_, 1, 20, psub=.5), ops(B_, 1, 254, psub=.5), accs(C_, 1, 60, pz=.3, psub=.4)
    if name == "sub_result": return ops(A_, 40, 70, pz=.3), ops(B_, 40, 70, pz=.3), accs(C_, 1, 12, pz=.5, psub=.4)
    if name == "sub_c": return ops(A_, 1, 127, pz=.9), ops(B_, 1, 127, pz=.9), accs(C_, 1, 2, psub=.9)
    if name == "over": return ops(A_, 180, 200), ops(B_, 180, 200), accs(C_, 240, 254)
    if name == "over_cancel":
        a, b = ops(A_, 186, 195), ops(B_, 186, 195); a[:, 8:] = a[:, :8] ^ u16(0x8000); b[:, 8:] = b[:, :8]
        a[:, 15] = ops((64,), 120, 192); return a, b, accs(C_, 200, 254, pz=.2)
    if name == "zeros": return ops(A_, 120, 134, pz=.85), ops(B_, 120, 134, pz=.85), accs(C_, 120, 134, pz=.95)
    if name == "all_zero": return ops(A_, 1, 254, pz=1.), ops(B_, 1, 254, pz=.5), accs(C_, 1, 254, pz=.9, psub=.1)
    if name == "zero_huge":
        a, b = ops(A_, 1, 60), ops(B_, 60, 120); a[:, ::2] = bf(rng.integers(0, 2, (64, 8)), np.zeros((64, 8)), np.zeros((64, 8))); b[:, ::2] = ops((256, 8), 200, 254)
        return a, b, accs(C_, 1, 60, pz=.3, psub=.1)
    if name == "cancel":
        a, b = ops(A_, 110, 140), ops(B_, 110, 140); a[:, 8:] = a[:, :8] ^ u16(0x8000); b[:, 8:] = b[:, :8]
        return a, b, accs(C_, 60, 120, pz=.8)
    if name == "few":
        a, b = ops(A_, 90, 164), ops(B_, 90, 164); keep = rng.integers(0, 16, (64, 2)); z = np.zeros_like(a)
        for i in range(64): z[i, keep[i]] = a[i, keep[i]]
        return z, b, accs(C_, 90, 200, pz=.3)
    if name == "gap":  # one large term and terms 20..30 below
        a, b = ops(A_, 110, 113), ops(B_, 120, 127); a[:, 0] = ops((64,), 132, 138); return a, b, accs(C_, 118, 142, pz=.3)
    if name == "inf": return ops(A_, 110, 140, pz=.1, pinf=.03), ops(B_, 110, 140, pz=.05, pinf=.01), accs(C_, 110, 140, pinf=.05)
    if name == "nan": return ops(A_, 110, 140, pz=.1, pnan=.02, pinf=.02), ops(B_, 110, 140, pnan=.005), accs(C_, 110, 140, pinf=.03, pnan=.05)
    if name == "bits": return rng.integers(0, 65536, A_).astype(u16), rng.integers(0, 65536, B_).astype(u16), rng.integers(0, 1 << 32, C_, dtype=np.uint64).astype(u32)
    if name == "tiny_c_big": return ops(A_, 1, 60, psub=.2), ops(B_, 1, 60, psub=.2), accs(C_, 60, 254)
    if name == "edge_min": return ops(A_, 1, 64, psub=.2), ops(B_, 1, 64, psub=.1), accs(C_, 1, 3, psub=.3, pz=.3)
    if name == "edge_e":
        return ops(A_, 50, 56), ops(B_, 50, 56), accs(C_, 1, 2, psub=.5, pz=.5)


NAMES = "normal wide mid sub_a sub_all sub_both sub_result sub_c over over_cancel zeros all_zero zero_huge cancel few gap inf nan bits tiny_c_big edge_min edge_e".split()
