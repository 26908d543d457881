"""Writes wgmma.h: inline wrappers of wgmma.mma_async m64nNk16 bf16 -> f32 for the N used here.

d: N/2 accumulators a thread; A from shared memory (ss) or registers (rs); TB = 1 reads B as [K][N] (N contiguous).
"""
def fn(n, rs):
    k = n // 2
    regs = ",".join(f"%{i}" for i in range(k))
    outs = ",".join(f'"+f"(d[{i}])' for i in range(k))
    if rs:
        a, ia, nxt = "{%%%d,%%%d,%%%d,%%%d}" % (k, k + 1, k + 2, k + 3), '"r"(a[0]),"r"(a[1]),"r"(a[2]),"r"(a[3])', k + 4
        sig, imm = "const u32 (&a)[4]", "p,1,1,%%%d" % (nxt + 2)
    else:
        a, ia, nxt = f"%{k}", '"l"(a)', k + 1
        sig, imm = "u64 a", "p,1,1,0,%%%d" % (nxt + 2)
    return (f"template<int TB> __device__ __forceinline__ void wg_{'rs' if rs else 'ss'}(float (&d)[{k}],{sig},u64 b,int acc){{"
            f'asm volatile("{{.reg .pred p; setp.ne.b32 p,%{nxt+1},0; wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 '
            f'{{{regs}}},{a},%{nxt},{imm};}}":{outs}:{ia},"l"(b),"r"(acc),"n"(TB));}}\n')
with open("wgmma.h", "w") as f:
    f.write('''#pragma once
// Written by gen_wgmma.py.
typedef unsigned int u32; typedef unsigned long long u64; typedef unsigned short bf;
__device__ __forceinline__ u32 sm(const void*p){return (u32)__cvta_generic_to_shared(p);}
__device__ __forceinline__ void wg_fence(){asm volatile("wgmma.fence.sync.aligned;":::"memory");}
__device__ __forceinline__ void wg_commit(){asm volatile("wgmma.commit_group.sync.aligned;":::"memory");}
template<int N> __device__ __forceinline__ void wg_wait(){asm volatile("wgmma.wait_group.sync.aligned %0;"::"n"(N):"memory");}
// Shared-memory matrix descriptor. mode: 0 = no swizzle, 1 = 128-byte swizzle. lbo, sbo in bytes.
__device__ __forceinline__ u64 wg_desc(u32 addr,u32 lbo,u32 sbo,u32 mode){
  return (u64)((addr&0x3ffff)>>4)|((u64)(lbo>>4)<<16)|((u64)(sbo>>4)<<32)|((u64)mode<<62);}
__device__ __forceinline__ void async_fence(){asm volatile("fence.proxy.async.shared::cta;":::"memory");}
__device__ __forceinline__ void mma16816(float (&d)[4],const u32 (&a)[4],u32 b0,u32 b1){
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
  :"+f"(d[0]),"+f"(d[1]),"+f"(d[2]),"+f"(d[3]):"r"(a[0]),"r"(a[1]),"r"(a[2]),"r"(a[3]),"r"(b0),"r"(b1));}
''')
    for n in (8, 16, 32, 64, 128, 256):
        f.write(fn(n, False)); f.write(fn(n, True))
