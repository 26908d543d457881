#pragma once
#include "wgmma.h"
struct alignas(64) TMap { unsigned char b[128]; };
__device__ __forceinline__ void mb_init(u32 b,u32 n){asm volatile("mbarrier.init.shared.b64 [%0],%1;"::"r"(b),"r"(n));}
__device__ __forceinline__ void mb_expect(u32 b,u32 n){asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;"::"r"(b),"r"(n):"memory");}
__device__ __forceinline__ void mb_arrive(u32 b){asm volatile("mbarrier.arrive.shared.b64 _,[%0];"::"r"(b):"memory");}
__device__ __forceinline__ void mb_wait(u32 b,u32 ph){asm volatile("{.reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p,[%0],%1; @p bra D; bra W; D:}"::"r"(b),"r"(ph):"memory");}
__device__ __forceinline__ void mb_wait_cluster(u32 b,u32 ph){asm volatile("{.reg .pred p; W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p,[%0],%1; @p bra D; bra W; D:}"::"r"(b),"r"(ph):"memory");}
__device__ __forceinline__ void tma(u32 dst,const TMap*m,int x,int y,u32 bar,u64 pol){
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1,{%2,%3}],[%4],%5;"::"r"(dst),"l"(m),"r"(x),"r"(y),"r"(bar),"l"(pol):"memory");}
__device__ __forceinline__ void tma_mc(u32 dst,const TMap*m,int x,int y,u32 bar,unsigned short mask,u64 pol){
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0],[%1,{%2,%3}],[%4],%5,%6;"::"r"(dst),"l"(m),"r"(x),"r"(y),"r"(bar),"h"(mask),"l"(pol):"memory");}
__device__ __forceinline__ u64 pol_first(){u64 p; asm("createpolicy.fractional.L2::evict_first.b64 %0,1.0;":"=l"(p)); return p;}
__device__ __forceinline__ u64 pol_last(){u64 p; asm("createpolicy.fractional.L2::evict_last.b64 %0,1.0;":"=l"(p)); return p;}
__device__ __forceinline__ bf tobf(float x){unsigned short h; asm("cvt.rn.bf16.f32 %0,%1;":"=h"(h):"f"(x)); return h;}
