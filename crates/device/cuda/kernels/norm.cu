// h = bf16(h + b) where there is a branch b; y = RMSNorm(h) where there is a y. Grid: rows; 128 threads, one a lane.
#include "common.cuh"
// The sum over 128 lanes: lane l becomes l + (l + s), s = 64 ... 1. Every thread gets it.
__device__ __forceinline__ float tree(float acc, float* lanes) {
  int l = threadIdx.x;
  lanes[l] = acc;
  __syncthreads();
  if (l < 64) lanes[l] = lanes[l] + lanes[l + 64];
  __syncthreads();
  if (l < 32) {
    acc = lanes[l] + lanes[l + 32];
    for (int s = 16; s; s >>= 1) acc = acc + __shfl_down_sync(~0u, acc, s);
    if (l == 0) lanes[0] = acc;
  }
  __syncthreads();
  return lanes[0];
}
// Eight elements at once, or one by one where a row is no multiple of eight.
template <bool WIDE> struct Eight {
  bf v[8];
  __device__ __forceinline__ void load(const bf* p, int n) {
    if (WIDE) *(uint4*)v = *(const uint4*)p;
    else for (int i = 0; i < 8; i++) v[i] = i < n ? p[i] : 0;
  }
  __device__ __forceinline__ void store(bf* p, int n) {
    if (WIDE) *(uint4*)p = *(uint4*)v;
    else for (int i = 0; i < n && i < 8; i++) p[i] = v[i];
  }
};
template <bool WIDE> __device__ __forceinline__ void run(bf* x, const bf* b, const float* w, bf* y, int n, float eps, float* lanes) {
  float acc = 0;
  for (int i = threadIdx.x * 8; i < n; i += 1024) {
    alignas(16) Eight<WIDE> v, add;
    v.load(x + i, n - i);
    if (b) {
      add.load(b + i, n - i);
#pragma unroll
      for (int e = 0; e < 8; e++) v.v[e] = tobf(f32(v.v[e]) + f32(add.v[e]));
      v.store(x + i, n - i);
    }
#pragma unroll
    for (int e = 0; e < 8; e++) acc = fmaf(f32(v.v[e]), f32(v.v[e]), acc);  // past the end +0, which changes nothing
  }
  if (!y) return;
  float ss = tree(acc, lanes), r = __fdiv_rn(1.f, __fsqrt_rn(__fdiv_rn(ss, (float)n) + eps));
  for (int i = threadIdx.x * 8; i < n; i += 1024) {
    alignas(16) Eight<WIDE> v;
    v.load(x + i, n - i);
#pragma unroll
    for (int e = 0; e < 8; e++) if (WIDE || i + e < n) v.v[e] = tobf((f32(v.v[e]) * r) * w[i + e]);
    v.store(y + i, n - i);
  }
}
// b, w and y may be null: without y nothing is normalised.
extern "C" __global__ void __launch_bounds__(128) norm_rows(bf* h, const bf* b, const float* w, bf* y, int n, float eps) {
  __shared__ float lanes[128];
  let_next_start();
  wait_for_previous();
  const size_t at = (size_t)blockIdx.x * n;
  if (n % 8 == 0) run<true>(h + at, b ? b + at : b, w, y ? y + at : y, n, eps, lanes);
  else run<false>(h + at, b ? b + at : b, w, y ? y + at : y, n, eps, lanes);
}
