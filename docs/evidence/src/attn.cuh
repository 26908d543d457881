#pragma once
// What prefill, decode and the reference share: the layout of K and V, ex2, powers of two, the merge.
//
// Contract under test (per query row and head; keys in absolute chunks of CH, in tiles of KT):
//   s_j = k16 chain over head_dim from +0;  T = max of s_j over the tile's visible keys;  M' = max(M, rint(RN(T * scale)))
//   x_j = fma(s_j, scale, -M');  P_j = bf16(E(x_j)), +0 for hidden keys;  a = 2^(M - M')
//   O = O * a, L = L * a, then the k16 chains continue over the tile's keys: O += P V, L += P 1.
//   A chunk starts from M = -inf, O = L = +0. Chunks merge ascending into (Mt, Ot, Lt) = (-inf, +0, +0):
//   N = max(Mt, M); Ot = fma(O, 2^(M-N), Ot * 2^(Mt-N)), likewise Lt.  out = bf16(Ot * (1 / Lt)).
#include "wgmma.h"
#include "k16.cuh"
__device__ __forceinline__ float ex2(float x){float y; asm volatile("ex2.approx.ftz.f32 %0,%1;":"=f"(y):"f"(x)); return y;}
__device__ __forceinline__ u32 pack(float lo,float hi){u32 d; asm("cvt.rn.bf16x2.f32 %0,%1,%2;":"=r"(d):"f"(hi),"f"(lo)); return d;}
__device__ __forceinline__ float rint_(float x){float y; asm("cvt.rni.f32.f32 %0,%1;":"=f"(y):"f"(x)); return y;}
// Polynomials of degree 3, 4, 5 for 2^f on [-1/2, 1/2]; x is clamped to -126 from below.
template<int D> __device__ __forceinline__ float ex2poly(float x){
  x=fmaxf(x,-126.f); float t=x+12582912.f; float f=x-(t-12582912.f); float p;
  if(D==3) p=fmaf(fmaf(fmaf(0.05550411f,f,0.24022651f),f,0.69314718f),f,1.f);
  if(D==4) p=fmaf(fmaf(fmaf(fmaf(0.009618129f,f,0.05550411f),f,0.24022651f),f,0.69314718f),f,1.f);
  if(D==5) p=fmaf(fmaf(fmaf(fmaf(fmaf(0.0013333558f,f,0.009618129f),f,0.05550411f),f,0.24022651f),f,0.69314718f),f,1.f);
  return __int_as_float(__float_as_int(p)+(__float_as_int(t)<<23)); }
template<int X> __device__ __forceinline__ float expf2(float x){ if constexpr(X==0) return ex2(x); else return ex2poly<X>(x); }
// Tile image of KT keys: [blocks of 64 dims][KT keys][128 bytes], 16-byte chunks XORed with key & 7.
__device__ __forceinline__ int img(int kt,int key,int d){ return (d>>6)*kt*128+key*128+((((d>>3)&7)^(key&7))<<4)+(d&7)*2; }
// mbarriers and bulk copies
__device__ __forceinline__ void mb_init(u32 b,u32 n){asm volatile("mbarrier.init.shared.b64 [%0],%1;"::"r"(b),"r"(n));}
__device__ __forceinline__ void mb_expect(u32 b,u32 n){asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;"::"r"(b),"r"(n):"memory");}
__device__ __forceinline__ void mb_arrive(u32 b){asm volatile("mbarrier.arrive.shared.b64 _,[%0];"::"r"(b):"memory");}
__device__ __forceinline__ void mb_wait(u32 b,u32 ph){asm volatile("{.reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p,[%0],%1; @p bra D; bra W; D:}"::"r"(b),"r"(ph):"memory");}
__device__ __forceinline__ void bulk(u32 dst,const void*src,u32 n,u32 b){asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];"::"r"(dst),"l"(src),"r"(n),"r"(b):"memory");}
__device__ __forceinline__ float bf2f(bf x){return __uint_as_float((u32)x<<16);}
