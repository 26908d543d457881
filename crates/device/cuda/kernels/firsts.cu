// The first 20 tokens of rows, by (logit descending, id ascending), of the keys that a product listed (firsts.cuh), and
// whether a logit is NaN. Leaves every row's state 0 for the next product. Grid: rows.
#include "firsts.cuh"
#define THREADS 512
#define KEPT 512
extern "C" __global__ void __launch_bounds__(THREADS) firsts(const u64* lists, int room, u32* states, int* results) {
  __shared__ u64 peaks[THREADS / 8], kept[KEPT], part[THREADS / 32], floor;
  __shared__ u32 count;
  let_next_start();
  const int t = threadIdx.x;
  if (t == 0) { floor = 0; count = 0; }
  wait_for_previous();
  const u64* list = lists + (size_t)blockIdx.x * room;
  u32* state = states + blockIdx.x * STATE;
  int* out = results + blockIdx.x * WORDS;
  const u32 n = state[0];
  u64 best = 0;
  for (u32 i = t; i < n; i += THREADS) best = greater(best, list[i]);
  const bool bad = __syncthreads_or((u32)(best >> 32) == ~0u);
  for (int i = t; i < STATE; i += THREADS) state[i] = 0;
  if (t == 0) out[2 * TOP + 1] = bad;
  if (bad) return;
  // The 20th of the firsts of eight threads each, as there are so many, is no earlier than the 20th of all.
  for (int o = 4; o; o >>= 1) best = greater(best, __shfl_xor_sync(~0u, best, o));
  if ((t & 7) == 0) peaks[t >> 3] = best;
  __syncthreads();
  if (t < THREADS / 8) {
    const u64 peak = peaks[t];
    int earlier = 0;
    for (int i = 0; i < THREADS / 8; i++) earlier += peaks[i] > peak;
    if (peak && earlier == TOP - 1) floor = peak;
  }
  __syncthreads();
  const u64 least = floor;
  for (u32 i = t; i < n; i += THREADS) {
    const u64 key = list[i];
    if (key >= least) { const u32 at = take(&count); if (at < KEPT) kept[at] = key; }
  }
  __syncthreads();
  if (count <= KEPT) {
    for (u32 i = t; i < max(count, (u32)TOP); i += THREADS) {
      const u64 key = i < count ? kept[i] : 0;
      u32 place = i;
      if (key) { place = 0; for (u32 j = 0; j < count; j++) place += kept[j] > key; }
      if (place < TOP) put(out, place, key);
    }
    return;
  }
  u64 last = ~(u64)0;
  for (int k = 0; k < TOP; k++) {  // one by one: the first of those behind the last
    best = 0;
    for (u32 i = t; i < n; i += THREADS) { const u64 key = list[i]; if (key < last) best = greater(best, key); }
    for (int o = 16; o; o >>= 1) best = greater(best, __shfl_xor_sync(~0u, best, o));
    __syncthreads();
    if ((t & 31) == 0) part[t >> 5] = best;
    __syncthreads();
    for (int i = 0; i < THREADS / 32; i++) best = greater(best, part[i]);
    if (t == 0) put(out, k, best);
    last = best;
  }
}
