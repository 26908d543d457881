#pragma once
// Section 11 of NUMERICS.md, all but grammars: the token after a row of logits.
//
// Why this is what `numerics::sample` chooses, which sorts:
// - Its order is by z, then by id, and all z that are equal have equal weights. So the tokens that top-k and then top-p leave
//   are those with z above some value and, of those with just that value, the first few by id: a "cut". The value is found
//   by its digits, from sums over the tokens with each digit; the few by one division.
// - d = z - max, x = d / T and y = trunc(-22 * 512 x) are each monotone in z, as rounding is, so a smaller y means a larger
//   z. The upper digit of y is trunc(-22 x), as multiplying by 512 is exact. The digits after y's two are those of the bits
//   of z, as an integer that grows with z; where only a few tokens share y, each counts those above it instead.
// - Where x < -23 the weight is 0 by definition. Such tokens come last in the order and can't be drawn, so none is counted:
//   a top-k that reaches them excludes nobody that matters.
// - Sums are of integers, below 2^53, by whatever order; the product with top_p is the same one in f64.
// - At temperature 0 the caller asks for top-k 1 at temperature 1, which leaves the first by that order.
#include "row.cuh"
struct Ask {
  int score;  // a token whose logit is wanted, or -1
  u32 chooses, top_k;  // 0: keep all
  float temperature, top_p;
  u32 least, r[2];  // only weights above `least` are drawn, by these bits
  float repetition, presence, frequency;
  int from, count;  // in the list of changes
  int pad[3];
};
// A token with a bias or a history: 0 if it is in neither prompt nor output, else 1 + how often it is in the output.
struct Change { int id; float bias; u32 seen; };

// What weights depend on.
struct Scale {
  float max, temperature;
  __device__ __forceinline__ float x(float z) const { return __fdiv_rn(z == max ? 0.f : z - max, temperature); }
  __device__ __forceinline__ u64 weight(float z) const { return weight_at(x(z)); }
  static __device__ __forceinline__ u64 weight_at(float x) { return x < -23.f ? 0 : __float2ull_rz(exp_(x) * 4294967296.f); }
  static __device__ __forceinline__ int y(float x) { return (int)(x * (-22.f * BINS)); }
};
// Adds to bins what follows one another in the same one at once: equal tokens would queue for it.
struct Run {
  int bin;
  u32 count;
  u64 weight;
  __device__ __forceinline__ void put(Shared& s, int turn, int to, u64 w) {
    if (to != bin) { end(s, turn); bin = to; count = 0; weight = 0; }
    count++;
    weight += w;
  }
  __device__ __forceinline__ void end(Shared& s, int turn) {
    if (!count) return;
    add(&s.bins[turn][0][bin], count);
    add(&s.bins[turn][1][bin], (u32)weight & 0xffff);
    add(&s.bins[turn][2][bin], (u32)(weight >> 16));
  }
};
// Ends a pass that filled `turn`'s bins: this thread's bin over all blocks, and the sums over the bins before it.
__device__ __forceinline__ Level gather(Shared& s, int& turn) {
  all_blocks();
  const int t = threadIdx.x;
  u64 count = 0, low = 0, high = 0;
#pragma unroll
  for (int b = 0; b < BLOCKS; b++) {
    count += far32(&s.bins[turn][0][t], b);
    low += far32(&s.bins[turn][1][t], b);
    high += far32(&s.bins[turn][2][t], b);
  }
  turn ^= 1;  // nobody reads these any more
  for (int i = 0; i < 3; i++) s.bins[turn][i][t] = 0;
  const u64 weight = low + (high << 16);
  const Sums sums = before(count, weight, s);
  return Level{count, weight, sums.a, sums.b, sums.all_b};
}
// The bin in which a running sum, of weights or counts, reaches `target`; -1 if none does.
__device__ __forceinline__ int reach(Shared& s, const Level& level, bool weights, u64 target, Level& found) {
  const u64 from = weights ? level.weights_before : level.counts_before, here = weights ? level.weight : level.count;
  if (from < target && target <= from + here) { s.bin = threadIdx.x; s.found = level; }
  __syncthreads();
  const int bin = s.bin;
  if (bin >= 0) found = s.found;
  __syncthreads();
  if (threadIdx.x == 0) s.bin = -1;
  __syncthreads();
  return bin;
}
// The cut at which the running sum reaches `target`, in coarse bin `bin`; `above` is what comes before that.
__device__ Cut cut_inside(Shared& s, int& turn, const float* mine, int have, const Scale& scale, int bin, bool weights, u64 target, Level above) {
  const int t = threadIdx.x;
  u64 counts = above.counts_before, sum = above.weights_before;
  Level found{};
  Run fine{-1, 0, 0};
  for (int i = 0; i < have; i++) {
    const float x = scale.x(mine[i]);
    const int y = Scale::y(x);
    if (x >= -23.f && y / BINS == bin) fine.put(s, turn, y % BINS, Scale::weight_at(x));
  }
  fine.end(s, turn);
  const Level level = gather(s, turn);
  const int all_y = bin * BINS + max(reach(s, level, weights, target - (weights ? sum : counts), found), 0);
  counts += found.counts_before;
  sum += found.weights_before;
  if (found.count <= LISTED) {
    if (t == 0) s.listed = 0;
    __syncthreads();
    for (int i = 0; i < have; i++) {
      const float x = scale.x(mine[i]);
      if (x >= -23.f && Scale::y(x) == all_y) s.list[take(&s.listed)] = key_of(mine[i]);
    }
    all_blocks();
    const u32 n = min(collect(s), (u32)LISTED);
    if (t < n) s.weights[t] = scale.weight(logit_of((u32)s.all[t]));
    __syncthreads();
    if (t < n) {
      const u64 key = s.all[t], one = s.weights[t];
      u64 equal = 0;
      for (u32 i = 0; i < n; i++) {
        if (s.all[i] > key) { counts++; sum += s.weights[i]; }
        equal += s.all[i] == key;
      }
      const u64 from = weights ? sum : counts, each = weights ? one : 1;
      // Several threads write the same.
      if (from < target && target <= from + equal * each) s.cut = Cut{(u32)key, (u32)((target - from + each - 1) / each), sum};
    }
    __syncthreads();
    return s.cut;
  }
  u32 key = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    Run run{-1, 0, 0};
    for (int i = 0; i < have; i++) {
      const u32 k = key_of(mine[i]);
      if (((u64)(k ^ key) >> (shift + 8)) != 0) continue;
      const float x = scale.x(mine[i]);
      if (x >= -23.f && Scale::y(x) == all_y) run.put(s, turn, 255 - (k >> shift & 255), Scale::weight_at(x));
    }
    run.end(s, turn);
    const Level digits = gather(s, turn);
    Level of{};
    const int digit = reach(s, digits, weights, target - (weights ? sum : counts), of);
    counts += of.counts_before;
    sum += of.weights_before;
    key |= (u32)(255 - max(digit, 0)) << shift;
  }
  const u64 one = greater(scale.weight(logit_of(key)), 1);
  return Cut{key, (u32)(weights ? (target - sum + one - 1) / one : target - counts), sum};
}
// Chooses, with the row in shared memory: `z` are this block's `size` logits, from id `first` on. The bins are 0.
__device__ void choose(Shared& s, const Ask& a, const Change* changes, float* z, int first, int size, int each, float max_, const float* row, int* id, float* raw) {
  const int t = threadIdx.x, rank = blockIdx.x;
  const float* mine = z + t * each;
  const int have = max(0, min(size - t * each, each));
  if (a.count) {
    for (int i = a.from + t; i < a.from + a.count; i += THREADS) {
      const Change c = changes[i];
      const int at = c.id - first;
      if (at < 0 || at >= size) continue;
      float x = z[at] + c.bias;
      if (c.seen) x = x > 0.f ? __fdiv_rn(x, a.repetition) : x * a.repetition;
      if (c.seen > 1) x = x - (__uint2float_rn(c.seen - 1) * a.frequency + a.presence);
      z[at] = x;
    }
    __syncthreads();
    u64 largest = 0;
    for (int i = 0; i < have; i++) largest = greater(largest, key_of(mine[i]));
    largest = block_all(largest, greater, s);
    if (t == 0) s.sent[1] = largest;
    all_blocks();
    for (int b = 0; b < BLOCKS; b++) largest = greater(largest, far64(&s.sent[1], b));
    max_ = logit_of((u32)largest);
  }
  const Scale scale{max_, a.temperature};
  Cut cut{0, 0, 0};
  if (a.top_k || a.top_p < 1.f) {
    int turn = 0;
    Run coarse{-1, 0, 0};
    for (int i = 0; i < have; i++) {
      const float x = scale.x(mine[i]);
      if (x >= -23.f) coarse.put(s, turn, Scale::y(x) / BINS, Scale::weight_at(x));
    }
    coarse.end(s, turn);
    const Level level = gather(s, turn);
    u64 total = level.weights;
    Level found{};
    if (a.top_k) {
      const int bin = reach(s, level, false, a.top_k, found);
      if (bin >= 0) {
        cut = cut_inside(s, turn, mine, have, scale, bin, false, a.top_k, found);
        total = cut.weight + cut.ties * scale.weight(logit_of(cut.key));
      }
    }
    if (a.top_p < 1.f) {
      const u64 wanted = __double2ull_ru(__dmul_rn((double)a.top_p, __ull2double_rn(total)));
      const int bin = reach(s, level, true, wanted, found);
      if (bin >= 0) cut = cut_inside(s, turn, mine, have, scale, bin, true, wanted, found);
    }
  }
  // What is left, in order of id.
  auto drawn = [&](float z) { const u64 w = scale.weight(z); return w > a.least ? w : 0; };
  const u64 tied = cut.key ? drawn(logit_of(cut.key)) : 0;
  u64 sum = 0, ties = 0, kept = 0;
  for (int i = 0; i < have; i++) {
    const u32 k = key_of(mine[i]);
    if (k > cut.key) sum += drawn(mine[i]);
    else if (k == cut.key) ties++;
  }
  if (cut.key) {
    const Sums sums = before(ties, 0, s);
    u64 earlier = sums.a;
    if (t == 0) s.sent[2] = sums.all_a;
    all_blocks();
    for (int b = 0; b < rank; b++) earlier += far64(&s.sent[2], b);
    kept = min(cut.ties > earlier ? cut.ties - earlier : (u64)0, ties);
    sum += kept * tied;
  }
  const Sums sums = before(sum, 0, s);
  if (t == 0) s.sent[3] = sums.all_a;
  all_blocks();
  u64 running = sums.a, total = 0;
  for (int b = 0; b < BLOCKS; b++) {
    const u64 of = far64(&s.sent[3], b);
    if (b < rank) running += of;
    total += of;
  }
  const u64 u = __umul64hi((u64)a.r[1] << 32 | a.r[0], total);
  // The warp of the thread that holds it looks at its tokens side by side.
  const u32 hit = __ballot_sync(~0u, running <= u && u < running + sum);
  if (!hit) return;
  const int owner = __ffs(hit) - 1, l = t & 31, from = (t - l + owner) * each, n = min(size - from, each);
  running = __shfl_sync(~0u, running, owner);
  kept = __shfl_sync(~0u, kept, owner);
  for (int i = 0; i < n; i += 32) {
    const bool in = i + l < n;
    const float value = in ? z[from + i + l] : 0.f;
    const u32 k = in ? key_of(value) : 0;
    const u32 tie = __ballot_sync(~0u, in && k == cut.key);
    u64 w = in && k > cut.key ? drawn(value) : 0;
    if (in && k == cut.key && __popc(tie & ((1u << l) - 1)) < kept) w = tied;
    for (int o = 1; o < 32; o <<= 1) { const u64 p = __shfl_up_sync(~0u, w, o); if (l >= o) w += p; }
    const u32 over = __ballot_sync(~0u, in && running + w > u);
    if (over) {
      const int at = first + from + i + __ffs(over) - 1;
      if (l == 0) { *id = at; *raw = row[at]; }
      return;
    }
    running += __shfl_sync(~0u, w, 31);
    const u32 used = __popc(tie);
    kept = kept > used ? kept - used : 0;
  }
}
