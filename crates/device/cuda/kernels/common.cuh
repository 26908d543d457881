#pragma once
// Types and conversions shared by all kernels. No framework headers: NVRTC compiles these files alone.
// Every floating-point operation is IEEE and rounds once: compile with -fmad=false, never with fast math.
typedef unsigned char u8;
typedef unsigned short bf;  // bits of a bf16
typedef unsigned int u32;
typedef unsigned long long u64;

#define INF __int_as_float(0x7f800000)

__device__ __forceinline__ float f32(bf x) { return __uint_as_float((u32)x << 16); }
// Nearest even; NaN becomes 0x7fff.
__device__ __forceinline__ bf tobf(float x) { bf h; asm("cvt.rn.bf16.f32 %0,%1;" : "=h"(h) : "f"(x)); return h; }
// Two bf16 in a word, lo in the low half.
__device__ __forceinline__ u32 pack(float lo, float hi) { u32 d; asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(hi), "f"(lo)); return d; }
__device__ __forceinline__ float rint_(float x) { float y; asm("cvt.rni.f32.f32 %0,%1;" : "=f"(y) : "f"(x)); return y; }
// Used where the contract rounds the result to bf16, or where x is an integer and the result a power of two.
__device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ bool finite(bf x) { return (x & 0x7f80) != 0x7f80; }

// A kernel starts beside the one before it and waits for all of it before touching anything that another kernel writes
// or reads. Every block must wait, or the kernel after this one could pass the one before.
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Keys and values lie in pages of 64 tokens: [dims / 64][64 tokens][128 bytes], 16-byte groups XORed with token & 7.
// This is the image that ldmatrix and wgmma read with a 128-byte swizzle. A page of one kv head has PAGE(d) bytes;
// a block of the pool is [K, V][kv heads] pages.
#define PAGE(d) (((d) + 63) / 64 * 8192)
__device__ __forceinline__ int in_page(int token, int dim) {
  return (dim >> 6) * 8192 + token * 128 + ((((dim >> 3) & 7) ^ (token & 7)) << 4) + (dim & 7) * 2;
}
