// A row of logits: -0 becomes +0, Top-20 by (logit descending, id ascending), log-sum-exp, whether any is NaN. Three kernels,
// PARTS blocks a row for the first two. stride: logits a row in memory; n: those that count. ids, tops: [rows][20].
// keys: [rows][PARTS][20], sums: [rows][PARTS] and wrong: [rows][PARTS] go from one to the next.
#include "hopper.cuh"
#include "math.cuh"
#define TOP 20
#define PARTS 32
#define THREADS 256
// Greater is earlier in the order; 0 is none.
__device__ __forceinline__ u64 key(float x, u32 id) {
  u32 b = __float_as_uint(x);
  b = (b >> 31) ? ~b : b | 0x80000000u;
  return ((u64)b << 32) | (u32)~id;
}
__device__ __forceinline__ float logit(u64 key) {
  u32 b = (u32)(key >> 32);
  return __uint_as_float((b >> 31) ? b & 0x7fffffff : ~b);
}
__device__ __forceinline__ u64 greater(u64 a, u64 b) { return a > b ? a : b; }
// f over all threads of the block, for every thread.
template <class F> __device__ __forceinline__ u64 block_all(u64 v, F f, u64* part) {
  for (int o = 16; o; o >>= 1) v = f(v, __shfl_xor_sync(~0u, v, o));
  __syncthreads();
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = v;
  __syncthreads();
  v = part[threadIdx.x & (THREADS / 32 - 1)];
  for (int o = THREADS / 64; o; o >>= 1) v = f(v, __shfl_xor_sync(~0u, v, o));
  return v;
}
// The elements of part p: [from, to).
__device__ __forceinline__ void range(int n, int p, int& from, int& to) {
  int each = (n + PARTS - 1) / PARTS;
  from = min(n, p * each);
  to = min(n, from + each);
}
// The first 20 of each part. Grid: (PARTS, rows).
extern "C" __global__ void __launch_bounds__(THREADS) logits_parts(float* z, int stride, int n, u64* keys, int* wrong) {
  __shared__ u64 part[THREADS / 32];
  let_next_start();
  wait_for_previous();
  const int t = threadIdx.x;
  float* row = z + (size_t)blockIdx.y * stride;
  const size_t at = (size_t)blockIdx.y * PARTS + blockIdx.x;
  int from, to;
  range(n, blockIdx.x, from, to);
  u64 best = 0, bad = 0;
  for (int i = from + t; i < to; i += THREADS) {
    float x = row[i];
    if (x == 0.f) row[i] = x = 0.f;
    if (x != x) bad = 1;
    best = greater(best, key(x, i));
  }
  bad = block_all(bad, greater, part);
  if (t == 0) wrong[at] = (int)bad;
  if (bad) return;
  for (int k = 0; k < TOP; k++) {
    u64 first = block_all(best, greater, part);
    if (t == 0) keys[at * TOP + k] = first;
    if (best == first && first) {  // its owner looks for its next
      best = 0;
      for (int i = from + t; i < to; i += THREADS) { u64 o = key(row[i], i); if (o < first && o > best) best = o; }
    }
  }
}
// Integer sums of exp(x - m). Grid: (PARTS, rows).
extern "C" __global__ void __launch_bounds__(THREADS) logits_sums(const float* z, int stride, int n, const u64* keys, const int* wrong, u64* sums) {
  __shared__ u64 part[THREADS / 32];
  let_next_start();
  wait_for_previous();
  const int t = threadIdx.x, r = blockIdx.y;
  u64 top = 0, bad = 0;
  if (t < PARTS) { top = keys[((size_t)r * PARTS + t) * TOP]; bad = wrong[r * PARTS + t]; }
  bad = block_all(bad, greater, part);
  if (bad) return;
  const float m = logit(block_all(top, greater, part));
  int from, to;
  range(n, blockIdx.x, from, to);
  u64 sum = 0;
  if (m != INF && m != -INF)
    for (int i = from + t; i < to; i += THREADS) sum += __float2ull_rz(exp_(z[(size_t)r * stride + i] - m) * 1099511627776.f);
  sum = block_all(sum, [](u64 a, u64 b) { return a + b; }, part);
  if (t == 0) sums[r * PARTS + blockIdx.x] = sum;
}
// The first 20 of all parts' and the logarithm. Grid: rows.
extern "C" __global__ void __launch_bounds__(THREADS) logits_pick(const u64* keys, const u64* sums, const int* wrong, int* ids, float* tops, float* lse, int* nan) {
  __shared__ u64 part[THREADS / 32];
  let_next_start();
  wait_for_previous();
  const int t = threadIdx.x, r = blockIdx.x;
  u64 bad = t < PARTS ? wrong[r * PARTS + t] : 0, sum = 0;
  bad = block_all(bad, greater, part);
  if (t == 0) nan[r] = (int)bad;
  if (bad) return;
  if (t < PARTS) sum = sums[r * PARTS + t];
  sum = block_all(sum, [](u64 a, u64 b) { return a + b; }, part);
  u64 mine[(PARTS * TOP + THREADS - 1) / THREADS];
#pragma unroll
  for (int i = 0; i < (PARTS * TOP + THREADS - 1) / THREADS; i++) mine[i] = i * THREADS + t < PARTS * TOP ? keys[(size_t)r * PARTS * TOP + i * THREADS + t] : 0;
  float m = 0;
  for (int k = 0; k < TOP; k++) {
    u64 best = 0;
#pragma unroll
    for (int i = 0; i < (PARTS * TOP + THREADS - 1) / THREADS; i++) best = greater(best, mine[i]);
    best = block_all(best, greater, part);
#pragma unroll
    for (int i = 0; i < (PARTS * TOP + THREADS - 1) / THREADS; i++) if (mine[i] == best) mine[i] = 0;
    if (k == 0) m = logit(best);
    if (t == 0) { ids[r * TOP + k] = best ? (int)~(u32)best : -1; tops[r * TOP + k] = best ? logit(best) : 0.f; }
  }
  if (t == 0) lse[r] = m == INF || m == -INF ? m : m + ln_(__ull2float_rn(sum) * 9.094947017729282379e-13f);
}
