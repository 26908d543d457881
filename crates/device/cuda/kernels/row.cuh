#pragma once
// A row of logits in the shared memory of a cluster of 8 blocks, block after block a range of ids, and what its threads
// tell each other. A step by one thread a token, or by every thread over `each` tokens that follow one another (an odd
// number, so that no bank serves two threads of a warp).
#include "hopper.cuh"
#include "math.cuh"
#include "order.cuh"
#define BLOCKS 8
#define THREADS 512
#define WARPS (THREADS / 32)
#define BINS 512
#define LISTED 256  // tokens in a list at most

__device__ __forceinline__ void all_blocks() { asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory"); }
// A word at this place of another block's shared memory.
__device__ __forceinline__ u32 far32(const void* p, int block) {
  u32 at, v;
  asm volatile("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(at) : "r"(sm(p)), "r"(block));
  asm volatile("ld.shared::cluster.u32 %0,[%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ u64 far64(const u64* p, int block) {
  u32 at;
  u64 v;
  asm volatile("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(at) : "r"(sm(p)), "r"(block));
  asm volatile("ld.shared::cluster.u64 %0,[%1];" : "=l"(v) : "r"(at) : "memory");
  return v;
}

// Tokens and weights of a thread's bin, of those before it, and all weights.
struct Level { u64 count, weight, counts_before, weights_before, weights; };
// Greater keys stay, and of equal ones the first so many by id; `weight` is that of the greater ones.
struct Cut { u32 key, ties; u64 weight; };

struct Shared {
  // A weight's low 16 bits and the rest are summed apart: a block has fewer than 2^16 tokens, so 32 bits hold each sum.
  u32 bins[2][3][BINS];
  u64 part[2][WARPS];
  u64 sent[4];
  u64 peaks[THREADS / 8], firsts[TOP];
  u64 list[LISTED], all[LISTED], weights[LISTED];
  u64 floor, top;
  Level found;
  Cut cut;
  u32 listed, bad;
  int bin;
};

// f over all threads of the block, for every thread.
template <class F> __device__ __forceinline__ u64 block_all(u64 v, F f, Shared& s) {
  for (int o = 16; o; o >>= 1) v = f(v, __shfl_xor_sync(~0u, v, o));
  __syncthreads();
  if ((threadIdx.x & 31) == 0) s.part[0][threadIdx.x >> 5] = v;
  __syncthreads();
  v = s.part[0][threadIdx.x & (WARPS - 1)];
  for (int o = WARPS / 2; o; o >>= 1) v = f(v, __shfl_xor_sync(~0u, v, o));
  return v;
}
// Sums of a and b over the threads before this one, and over all.
struct Sums { u64 a, b, all_a, all_b; };
__device__ __forceinline__ Sums before(u64 a, u64 b, Shared& s) {
  const int l = threadIdx.x & 31, w = threadIdx.x >> 5;
  u64 x = a, y = b;
  for (int o = 1; o < 32; o <<= 1) {
    const u64 p = __shfl_up_sync(~0u, x, o), q = __shfl_up_sync(~0u, y, o);
    if (l >= o) { x += p; y += q; }
  }
  __syncthreads();
  if (l == 31) { s.part[0][w] = x; s.part[1][w] = y; }
  __syncthreads();
  Sums sums{x - a, y - b, 0, 0};
#pragma unroll
  for (int i = 0; i < WARPS; i++) {
    const u64 p = s.part[0][i], q = s.part[1][i];
    if (i < w) { sums.a += p; sums.b += q; }
    sums.all_a += p;
    sums.all_b += q;
  }
  return sums;
}
// Into `all`, for this block: every block's list. Gives how many there are; if more than there is room for, only that.
__device__ __forceinline__ u32 collect(Shared& s) {
  u32 total = 0;
  for (int b = 0; b < BLOCKS; b++) {
    const u32 n = far32(&s.listed, b);
    if (total + n <= LISTED) for (u32 i = threadIdx.x; i < n; i += THREADS) s.all[total + i] = far64(&s.list[i], b);
    total += n;
  }
  __syncthreads();
  return total;
}
