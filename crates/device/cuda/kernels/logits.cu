// A row of logits: -0 becomes +0, Top-20 by (logit descending, id ascending), log-sum-exp, whether any is NaN.
// Grid: rows; 1024 threads. stride: logits a row in memory; n: those that count. ids, tops: [rows][20].
#include "math.cuh"
#define TOP 20
#define THREADS 1024
// Greater is earlier in the order; 0 is none.
__device__ __forceinline__ u64 key(float x, u32 id) {
  u32 b = __float_as_uint(x);
  b = (b >> 31) ? ~b : b | 0x80000000u;
  return ((u64)b << 32) | (u32)~id;
}
template <class T, class F> __device__ __forceinline__ T block_all(T v, F f, T* part) {
  for (int o = 16; o; o >>= 1) v = f(v, __shfl_xor_sync(~0u, v, o));
  __syncthreads();
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = v;
  __syncthreads();
  v = part[threadIdx.x & 31];
  for (int o = 16; o; o >>= 1) v = f(v, __shfl_xor_sync(~0u, v, o));
  return v;
}
extern "C" __global__ void __launch_bounds__(THREADS) logits(float* z, int stride, int n, int* ids, float* tops, float* lse, int* nan) {
  __shared__ u64 part[32];
  float* row = z + (size_t)blockIdx.x * stride;
  const int t = threadIdx.x;
  auto greater = [](u64 a, u64 b) { return a > b ? a : b; };
  u64 best = 0, wrong = 0;
  for (int i = t; i < n; i += THREADS) {
    float x = row[i];
    if (x == 0.f) row[i] = x = 0.f;
    if (x != x) wrong = 1;
    best = greater(best, key(x, i));
  }
  wrong = block_all(wrong, greater, part);
  if (t == 0) nan[blockIdx.x] = (int)wrong;
  if (wrong) return;
  float m = 0;
  for (int k = 0; k < TOP; k++) {
    u64 first = block_all(best, greater, part);
    if (!first) {  // fewer logits than places
      if (t == 0) { ids[blockIdx.x * TOP + k] = -1; tops[blockIdx.x * TOP + k] = 0; }
      continue;
    }
    u32 id = ~(u32)first;
    float x = row[id];
    if (k == 0) m = x;
    if (t == 0) { ids[blockIdx.x * TOP + k] = (int)id; tops[blockIdx.x * TOP + k] = x; }
    if (best == first) {  // its owner looks for its next
      best = 0;
      for (int i = t; i < n; i += THREADS) { u64 o = key(row[i], i); if (o < first && o > best) best = o; }
    }
  }
  u64 sum = 0;
  if (m != INF && m != -INF)
    for (int i = t; i < n; i += THREADS) sum += __float2ull_rz(exp_(row[i] - m) * 1099511627776.f);
  sum = block_all(sum, [](u64 a, u64 b) { return a + b; }, part);
  if (t == 0) lse[blockIdx.x] = m == INF || m == -INF ? m : m + ln_(__ull2float_rn(sum) * 9.094947017729282379e-13f);
}
