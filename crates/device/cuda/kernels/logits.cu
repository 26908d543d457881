// Rows of logits: -0 becomes +0, Top-20 by (logit descending, id ascending), log-sum-exp, whether any is NaN; then, where
// asked, the token after the row and single logits. stride: logits a row in memory; n: those that count; each: see row.cuh;
// summed: whether log-sum-exp is asked.
#include "choose.cuh"
// Grid: (8, rows). Dynamic shared memory: 512 each floats.
extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 2) logits(float* all, int stride, int n, int each, int summed,
    const Ask* asks, const Change* changes, int* results) {
  extern __shared__ float z[];
  __shared__ Shared s;
  let_next_start();
  const int t = threadIdx.x, rank = blockIdx.x, first = rank * THREADS * each, size = max(0, min(n - first, THREADS * each));
  for (int i = 0; i < 6; i++) s.bins[i / 3][i % 3][t] = 0;
  if (t < TOP) s.firsts[t] = 0;
  if (t == 0) { s.listed = 0; s.bad = 0; s.floor = 0; s.top = 0; s.bin = -1; s.cut = Cut{0, 0, 0}; }
  wait_for_previous();
  float* row = all + (size_t)blockIdx.y * stride;
  int* out = results + blockIdx.y * WORDS;
  bool bad = false;
#pragma unroll 8
  for (int i = t; i < size; i += THREADS) {
    float x = row[first + i];
    if (__float_as_uint(x) == 0x80000000u) row[first + i] = x = 0.f;
    if (x != x) bad = true;
    z[i] = x;
  }
  // Eight threads share runs of 8 ids. The 20th of such groups' firsts, as there are so many, is no earlier than the 20th of
  // all tokens; what is not behind it is little more than 20 tokens, unless many of the first share a group.
  u64 best = 0;
  for (int i = t; i < size; i += THREADS) best = greater(best, full_key(z[i], first + i));
  for (int o = 4; o; o >>= 1) best = greater(best, __shfl_xor_sync(~0u, best, o));
  if ((t & 7) == 0) s.peaks[t >> 3] = best;
  if (__syncthreads_or(bad) && t == 0) s.bad = 1;
  if (t < THREADS / 8) {
    const u64 peak = s.peaks[t];
    int earlier = 0;
    for (int i = 0; i < THREADS / 8; i++) earlier += s.peaks[i] > peak;
    if (peak && earlier < TOP) s.firsts[earlier] = peak;
  }
  all_blocks();
  bad = t < BLOCKS && far32(&s.bad, t);
  if (t < BLOCKS * TOP) s.all[t] = far64(&s.firsts[t % TOP], t / TOP);
  if (__syncthreads_or(bad)) {
    if (rank == 0 && t == 0) out[2 * TOP + 1] = 1;
    all_blocks();
    return;
  }
  if (t < BLOCKS * TOP) {
    const u64 peak = s.all[t];
    int earlier = 0;
    for (int i = 0; i < BLOCKS * TOP; i++) earlier += s.all[i] > peak;
    if (earlier == 0) s.top = peak;
    if (earlier == TOP - 1) s.floor = peak;
  }
  __syncthreads();
  const float m = logit_of((u32)(s.top >> 32));
  const u64 floor = s.floor;
  u64 sum = 0;
  const bool sums = summed && m != INF && m != -INF;
  for (int i = t; i < size; i += THREADS) {
    const float x = z[i];
    const u64 key = full_key(x, first + i);
    if (key >= floor) { const u32 at = take(&s.listed); if (at < LISTED) s.list[at] = key; }
    if (sums) sum += __float2ull_rz(exp_(x - m) * 1099511627776.f);
  }
  sum = block_all(sum, [](u64 a, u64 b) { return a + b; }, s);
  if (t == 0) s.sent[0] = sum;
  all_blocks();
  u32 listed = 0;
  for (int b = 0; b < BLOCKS; b++) listed += far32(&s.listed, b);
  if (rank == 0) {
    if (t == 0) {
      sum = 0;
      for (int b = 0; b < BLOCKS; b++) sum += far64(&s.sent[0], b);
      if (summed) out[2 * TOP] = __float_as_int(sums ? m + ln_(__ull2float_rn(sum) * 9.094947017729282379e-13f) : m);
      out[2 * TOP + 1] = 0;
    }
    if (listed <= LISTED) {
      collect(s);
      for (u32 i = t; i < max(listed, (u32)TOP); i += THREADS) {
        const u64 key = i < listed ? s.all[i] : 0;
        u32 place = i;
        if (key) { place = 0; for (u32 j = 0; j < listed; j++) place += s.all[j] > key; }
        if (place < TOP) put(out, place, key);
      }
    }
  }
  if (listed > LISTED) {  // one by one: the first of those behind the last
    u64 last = ~(u64)0;
    for (int k = 0; k < TOP; k++) {
      best = 0;
      for (int i = t; i < size; i += THREADS) { const u64 key = full_key(z[i], first + i); if (key < last) best = greater(best, key); }
      best = block_all(best, greater, s);
      u64* turn = s.peaks + (k & 1);
      if (t == 0) *turn = best;
      all_blocks();
      for (int b = 0; b < BLOCKS; b++) best = greater(best, far64(turn, b));
      if (rank == 0 && t == 0) put(out, k, best);
      last = best;
    }
  }
  if (asks) {
    const Ask a = asks[blockIdx.y];
    if (rank == 0 && t == 0 && a.score >= 0) out[2 * TOP + 4] = __float_as_int(row[a.score]);
    __syncthreads();
    if (a.chooses) choose(s, a, changes, z, first, size, each, m, row, out + 2 * TOP + 2, (float*)out + 2 * TOP + 3);
  }
  all_blocks();  // shared memory is there until all have read it
}
