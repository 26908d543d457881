#pragma once
// The order of tokens in a row of logits.
#include "common.cuh"
#define TOP 20  // tokens that a row's results name

// Greater is earlier in the order; no logit's is 0.
__device__ __forceinline__ u32 key_of(float z) {
  if (z == 0.f) z = 0.f;
  u32 b = __float_as_uint(z);
  return (b >> 31) ? ~b : b | 0x80000000u;
}
__device__ __forceinline__ float logit_of(u32 key) { return __uint_as_float((key >> 31) ? key & 0x7fffffff : ~key); }
__device__ __forceinline__ u64 greater(u64 a, u64 b) { return a > b ? a : b; }
// A token: greater is earlier in the order of logit and id; 0 is none.
__device__ __forceinline__ u64 token_key(u32 key, int id) { return (u64)key << 32 | (u32)~id; }
__device__ __forceinline__ u64 full_key(float z, int id) { return token_key(key_of(z), id); }
// Likewise of a list in which a NaN is the first of all.
__device__ __forceinline__ u64 listed_key(float z, int id) { return token_key(z != z ? ~0u : key_of(z), id); }
// A row's results: 20 ids, 20 logits, log-sum-exp, 1 for NaN, a token chosen, its logit, a single logit.
#define WORDS (2 * TOP + 5)
__device__ __forceinline__ void put(int* out, int place, u64 key) {
  out[place] = key ? (int)~(u32)key : -1;
  out[TOP + place] = key ? __float_as_int(logit_of((u32)(key >> 32))) : 0;
}
