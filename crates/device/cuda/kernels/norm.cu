// h = bf16(h + b) where there is a branch b; y = RMSNorm(h) where there is a y. Grid: rows; 128 threads, one a lane.
#include "common.cuh"
// The sum over 128 lanes: lane l becomes l + (l + s), s = 64 ... 1. Every thread gets it.
__device__ __forceinline__ float tree(float acc, float* lanes) {
  int l = threadIdx.x;
  lanes[l] = acc;
  for (int s = 64; s; s >>= 1) {
    __syncthreads();
    if (l < s) lanes[l] = lanes[l] + lanes[l + s];
  }
  __syncthreads();
  return lanes[0];
}
// b, w and y may be null: without y nothing is normalised.
extern "C" __global__ void __launch_bounds__(128) norm_rows(bf* h, const bf* b, const float* w, bf* y, int n, float eps) {
  __shared__ float lanes[128];
  bf* x = h + (size_t)blockIdx.x * n;
  const bf* add = b + (size_t)blockIdx.x * n;
  float acc = 0;
  for (int i0 = threadIdx.x * 8; i0 < n; i0 += 1024)
    for (int i = i0; i < min(i0 + 8, n); i++) {
      bf v = x[i];
      if (b) x[i] = v = tobf(f32(v) + f32(add[i]));
      acc = fmaf(f32(v), f32(v), acc);
    }
  if (!y) return;
  float ss = tree(acc, lanes), r = __fdiv_rn(1.f, __fsqrt_rn(__fdiv_rn(ss, (float)n) + eps));
  bf* out = y + (size_t)blockIdx.x * n;
  for (int i0 = threadIdx.x * 8; i0 < n; i0 += 1024)
    for (int i = i0; i < min(i0 + 8, n); i++) out[i] = tobf((f32(x[i]) * r) * w[i]);
}
