"""Writes wgmma.cuh: wrappers of wgmma.mma_async m64nNk16 bf16 -> f32, for the N that the kernels use.

A thread has N/2 accumulators d; A comes from shared memory (ss) or registers (rs); TB = 1 reads B as [K][N] (N contiguous).
"""
HEAD = """#pragma once
// Written by gen_wgmma.py.
#include "common.cuh"
__device__ __forceinline__ void wg_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wg_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wg_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }
__device__ __forceinline__ void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Descriptor of a matrix in shared memory. mode: 0 = no swizzle, 1 = 128-byte swizzle. lbo, sbo in bytes.
__device__ __forceinline__ u64 wg_desc(u32 at, u32 lbo, u32 sbo, u32 mode) {
  return (u64)((at & 0x3ffff) >> 4) | ((u64)(lbo >> 4) << 16) | ((u64)(sbo >> 4) << 32) | ((u64)mode << 62); }
"""


def fn(n, rs):
    k = n // 2
    regs = ",".join(f"%{i}" for i in range(k))
    outs = ",".join(f'"+f"(d[{i}])' for i in range(k))
    if rs:
        a, inputs, nxt = "{%%%d,%%%d,%%%d,%%%d}" % (k, k + 1, k + 2, k + 3), '"r"(a[0]),"r"(a[1]),"r"(a[2]),"r"(a[3])', k + 4
        sig, imm = "const u32 (&a)[4]", "p,1,1,%%%d" % (nxt + 2)
    else:
        a, inputs, nxt = f"%{k}", '"l"(a)', k + 1
        sig, imm = "u64 a", "p,1,1,0,%%%d" % (nxt + 2)
    return (f"template <int TB> __device__ __forceinline__ void wg_{'rs' if rs else 'ss'}(float (&d)[{k}], {sig}, u64 b, int acc) {{ "
            f'asm volatile("{{.reg .pred p; setp.ne.b32 p,%{nxt+1},0; wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 '
            f'{{{regs}}},{a},%{nxt},{imm};}}":{outs}:{inputs},"l"(b),"r"(acc),"n"(TB)); }}\n')


with open("wgmma.cuh", "w") as f:
    f.write(HEAD)
    for n in (32, 40, 48, 64, 80, 112, 128, 256):
        f.write(fn(n, False))
        if n in (64, 128, 256):
            f.write(fn(n, True))
