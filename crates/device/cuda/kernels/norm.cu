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
// The same for rows of at most G times 1024 elements, multiples of eight: they stay in registers, and the weights, which no
// kernel writes, are read before the kernel before has ended.
template <int G> __device__ __forceinline__ void held(bf* x, const bf* b, const float* w, bf* y, int n, float eps, float* lanes) {
  alignas(16) bf v[G][8];
  float4 ws[G][2];
#pragma unroll
  for (int g = 0; g < G; g++) {
    const int i = g * 1024 + threadIdx.x * 8;
    if (y && i < n) { ws[g][0] = *(const float4*)(w + i); ws[g][1] = *(const float4*)(w + i + 4); }
  }
  wait_for_previous();
#pragma unroll
  for (int g = 0; g < G; g++) {
    const int i = g * 1024 + threadIdx.x * 8;
    uint4 row = {0, 0, 0, 0};
    if (i < n) row = *(const uint4*)(x + i);
    *(uint4*)v[g] = row;
  }
  if (b) {
    alignas(16) bf add[G][8];
#pragma unroll
    for (int g = 0; g < G; g++) {
      const int i = g * 1024 + threadIdx.x * 8;
      uint4 row = {0, 0, 0, 0};
      if (i < n) row = *(const uint4*)(b + i);
      *(uint4*)add[g] = row;
    }
#pragma unroll
    for (int g = 0; g < G; g++) {
      const int i = g * 1024 + threadIdx.x * 8;
#pragma unroll
      for (int e = 0; e < 8; e++) v[g][e] = tobf(f32(v[g][e]) + f32(add[g][e]));
      if (i < n) *(uint4*)(x + i) = *(uint4*)v[g];
    }
  }
  if (!y) return;
  float acc = 0;
#pragma unroll
  for (int g = 0; g < G; g++)
#pragma unroll
    for (int e = 0; e < 8; e++) acc = fmaf(f32(v[g][e]), f32(v[g][e]), acc);  // past the end +0, which changes nothing
  float ss = tree(acc, lanes), r = __fdiv_rn(1.f, __fsqrt_rn(__fdiv_rn(ss, (float)n) + eps));
#pragma unroll
  for (int g = 0; g < G; g++) {
    const int i = g * 1024 + threadIdx.x * 8;
    const float wv[8] = {ws[g][0].x, ws[g][0].y, ws[g][0].z, ws[g][0].w, ws[g][1].x, ws[g][1].y, ws[g][1].z, ws[g][1].w};
#pragma unroll
    for (int e = 0; e < 8; e++) v[g][e] = tobf((f32(v[g][e]) * r) * wv[e]);
    if (i < n) *(uint4*)(y + i) = *(uint4*)v[g];
  }
}
// b, w and y may be null: without y nothing is normalised.
extern "C" __global__ void __launch_bounds__(128) norm_rows(bf* h, const bf* b, const float* w, bf* y, int n, float eps) {
  __shared__ float lanes[128];
  let_next_start();
  const size_t at = (size_t)blockIdx.x * n;
  bf *x = h + at, *to = y ? y + at : y;
  const bf* branch = b ? b + at : b;
  if (n % 8 == 0 && n <= 2048) held<2>(x, branch, w, to, n, eps, lanes);
  else if (n % 8 == 0 && n <= 4096) held<4>(x, branch, w, to, n, eps, lanes);
  else if (n % 8 == 0 && n <= 6144) held<6>(x, branch, w, to, n, eps, lanes);
  else {
    wait_for_previous();
    if (n % 8 == 0) run<true>(x, branch, w, to, n, eps, lanes);
    else run<false>(x, branch, w, to, n, eps, lanes);
  }
}
