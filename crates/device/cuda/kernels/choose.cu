// Section 11 of NUMERICS.md, all but grammars: the token after a row of logits; beside it single logits that were asked for.
// A cluster of 8 blocks holds a row in shared memory, block after block and thread after thread a range of ids.
//
// Why this is what `numerics::sample` chooses, which sorts:
// - Its order is by z, then by id, and all z that are equal have equal weights. So the tokens that top-k and then top-p leave
//   are those with z above some value and, of those with just that value, the first few by id: a "cut". The value is found
//   by its digits, from sums over the tokens with each digit; the few by one division.
// - d = z - max, x = d / T and the first digit, trunc(-22 x), are each monotone in z, as rounding is, so a smaller first
//   digit means a larger z. The digits after it are those of the bits of z, as an integer that grows with z.
// - Where x < -23 the weight is 0 by definition. Such tokens come last in the order and can't be drawn, so none is counted:
//   a top-k that reaches them excludes nobody that matters.
// - Sums are of integers, below 2^53, by whatever order; the product with top_p is the same one in f64.
// - At temperature 0 the caller asks for top-k 1 at temperature 1, which leaves the first by that order.
#include "hopper.cuh"
#include "math.cuh"
#define BLOCKS 8
#define THREADS 512
#define BINS 512
struct Ask {
  int row, score;  // of the logits; a token whose logit is wanted, or -1
  u32 chooses, top_k;  // 0: keep all
  float temperature, top_p;
  u32 least, r[2];  // only weights above `least` are drawn, by these bits
  float repetition, presence, frequency;
  int from, count;  // in the list of changes
  int pad[2];
};
// A token with a bias or a history: 0 if it is in neither prompt nor output, else 1 + how often it is in the output.
struct Change { int id; float bias; u32 seen; };
struct Cut { u32 key, ties; };  // greater keys stay, and of equal ones the first so many
struct Level { u64 count, weight, counts_before, weights_before, weights; };

// Greater is earlier in the order; no logit's is 0.
__device__ __forceinline__ u32 key_of(float z) {
  if (z == 0.f) z = 0.f;
  u32 b = __float_as_uint(z);
  return (b >> 31) ? ~b : b | 0x80000000u;
}
__device__ __forceinline__ float logit_of(u32 key) { return __uint_as_float((key >> 31) ? key & 0x7fffffff : ~key); }
__device__ __forceinline__ float scaled(float z, float max, float temperature) { return __fdiv_rn(z == max ? 0.f : z - max, temperature); }
__device__ __forceinline__ u64 weight_of(float x) { return x < -23.f ? 0 : __float2ull_rz(exp_(x) * 4294967296.f); }
__device__ __forceinline__ int bin_of(float x) { return (int)(x * -22.f); }

__device__ __forceinline__ void all_blocks() { asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory"); }
// A word at this place of another block's shared memory.
__device__ __forceinline__ u32 far32(const void* p, int block) {
  u32 at, v;
  asm volatile("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(at) : "r"(sm(p)), "r"(block));
  asm volatile("ld.shared::cluster.u32 %0,[%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ u64 far64(const u64* p, int block) { return far32(p, block) | (u64)far32((const u32*)p + 1, block) << 32; }
__device__ __forceinline__ void add(u32* p, u32 v) { asm volatile("red.shared.add.u32 [%0],%1;" :: "r"(sm(p)), "r"(v) : "memory"); }

struct Shared {
  // A weight's low 16 bits and the rest are summed apart: a block has at most 2^16 tokens, so 32 bits hold each sum.
  u32 bins[2][3][BINS];
  u64 part[THREADS / 32];
  u64 sent[3];
  Level found;
  int bin;
};
// The sum over the threads before this one; `all`: over all.
__device__ u64 before(u64 v, Shared& s, u64& all) {
  const int l = threadIdx.x & 31, w = threadIdx.x >> 5;
  u64 sum = v;
  for (int o = 1; o < 32; o <<= 1) { u64 x = __shfl_up_sync(~0u, sum, o); if (l >= o) sum += x; }
  __syncthreads();
  if (l == 31) s.part[w] = sum;
  __syncthreads();
  u64 first = sum - v;
  all = 0;
  for (int i = 0; i < THREADS / 32; i++) { if (i < w) first += s.part[i]; all += s.part[i]; }
  return first;
}
// Ends a pass that filled `turn`'s bins: this thread's bin over all blocks, and the sums over the bins before it.
__device__ Level gather(Shared& s, int& turn) {
  all_blocks();
  const int t = threadIdx.x;
  u64 count = 0, low = 0, high = 0, counts;
#pragma unroll
  for (int b = 0; b < BLOCKS; b++) {
    count += far32(&s.bins[turn][0][t], b);
    low += far32(&s.bins[turn][1][t], b);
    high += far32(&s.bins[turn][2][t], b);
  }
  turn ^= 1;  // nobody reads these any more
  for (int i = 0; i < 3; i++) s.bins[turn][i][t] = 0;
  Level level{count, low + (high << 16)};
  level.counts_before = before(count, s, counts);
  level.weights_before = before(level.weight, s, level.weights);
  return level;
}
// The bin in which a running sum, of weights or counts, reaches `target`; -1 if none does.
__device__ int reach(Shared& s, const Level& level, bool weights, u64 target, Level& found) {
  const u64 from = weights ? level.weights_before : level.counts_before, here = weights ? level.weight : level.count;
  if (threadIdx.x == 0) s.bin = -1;
  __syncthreads();
  if (from < target && target <= from + here) { s.bin = threadIdx.x; s.found = level; }
  __syncthreads();
  const int bin = s.bin;
  if (bin >= 0) found = s.found;
  __syncthreads();
  return bin;
}
// Adds to bins what follows one another in the same one at once: equal tokens would queue for it.
struct Run {
  int bin;
  u32 count;
  u64 weight;
  __device__ __forceinline__ void add(Shared& s, int turn, int to, u64 w) {
    if (to != bin) { end(s, turn); bin = to; count = 0; weight = 0; }
    count++;
    weight += w;
  }
  __device__ __forceinline__ void end(Shared& s, int turn) {
    if (!count) return;
    ::add(&s.bins[turn][0][bin], count);
    ::add(&s.bins[turn][1][bin], (u32)weight & 0xffff);
    ::add(&s.bins[turn][2][bin], (u32)(weight >> 16));
  }
};
// Grid: (8, asks). each: odd, ids a thread. Dynamic shared memory: 512 each floats.
extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 2) choose(const float* logits, int stride, int n, int each,
    const Ask* asks, const Change* changes, const int* nan, int* ids, float* raws, float* scores) {
  extern __shared__ float z[];
  __shared__ Shared s;
  let_next_start();
  wait_for_previous();
  const Ask a = asks[blockIdx.y];
  const float* row = logits + (size_t)a.row * stride;
  const int t = threadIdx.x, rank = blockIdx.x;
  if (rank == 0 && t == 0 && a.score >= 0) scores[a.row] = row[a.score];
  if (!a.chooses || nan[a.row]) return;
  const int first = rank * THREADS * each, size = max(0, min(n - first, THREADS * each));
#pragma unroll 8
  for (int i = t; i < size; i += THREADS) z[i] = row[first + i];
  for (int i = 0; i < 6; i++) s.bins[i / 3][i % 3][t] = 0;
  __syncthreads();
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
  // Odd strides between threads: no bank serves two of a warp.
  const float* mine = z + t * each;
  const int have = max(0, min(size - t * each, each));
  u32 largest = 0;
  for (int i = 0; i < have; i++) largest = max(largest, key_of(mine[i]));
  for (int o = 16; o; o >>= 1) largest = max(largest, __shfl_xor_sync(~0u, largest, o));
  if ((t & 31) == 0) s.part[t >> 5] = largest;
  __syncthreads();
  for (int i = 0; i < THREADS / 32; i++) largest = max(largest, (u32)s.part[i]);
  if (t == 0) s.sent[0] = largest;
  all_blocks();
  for (int b = 0; b < BLOCKS; b++) largest = max(largest, far32(&s.sent[0], b));
  const float max_ = logit_of(largest), temperature = a.temperature;

  Cut cut{0, 0};
  int turn = 0;
  if (a.top_k || a.top_p < 1.f) {
    Run run{-1, 0, 0};
    for (int i = 0; i < have; i++) {
      const float x = scaled(mine[i], max_, temperature);
      if (x >= -23.f) run.add(s, turn, bin_of(x), weight_of(x));
    }
    run.end(s, turn);
    const Level coarse = gather(s, turn);
    // The cut inside a bin in which the running sum reaches the target, and the weight above it.
    auto inside = [&](int bin, bool weights, u64 target, u64 counts, u64& above) {
      u32 key = 0;
      for (int shift = 24; shift >= 0; shift -= 8) {
        Run run{-1, 0, 0};
        for (int i = 0; i < have; i++) {
          const u32 k = key_of(mine[i]);
          if (((u64)(k ^ key) >> (shift + 8)) != 0) continue;
          const float x = scaled(mine[i], max_, temperature);
          if (x >= -23.f && bin_of(x) == bin) run.add(s, turn, 255 - (k >> shift & 255), weight_of(x));
        }
        run.end(s, turn);
        const Level fine = gather(s, turn);
        Level found{};
        const int digit = reach(s, fine, weights, target - (weights ? above : counts), found);
        counts += found.counts_before;
        above += found.weights_before;
        key |= (u32)(255 - max(digit, 0)) << shift;
      }
      const u64 one = weight_of(scaled(logit_of(key), max_, temperature));
      return Cut{key, (u32)(weights ? (target - above + one - 1) / max(one, (u64)1) : target - counts)};
    };
    u64 total = coarse.weights, above;
    Level found{};
    if (a.top_k) {
      const int bin = reach(s, coarse, false, a.top_k, found);
      if (bin >= 0) {
        above = found.weights_before;
        cut = inside(bin, false, a.top_k, found.counts_before, above);
        total = above + cut.ties * weight_of(scaled(logit_of(cut.key), max_, temperature));
      }
    }
    if (a.top_p < 1.f) {
      const u64 wanted = __double2ull_ru(__dmul_rn((double)a.top_p, __ull2double_rn(total)));
      const int bin = reach(s, coarse, true, wanted, found);
      if (bin >= 0) {
        above = found.weights_before;
        cut = inside(bin, true, wanted, found.counts_before, above);
      }
    }
  }

  // What is left, in order of id.
  auto drawn = [&](float z) { const u64 w = weight_of(scaled(z, max_, temperature)); return w > a.least ? w : 0; };
  const u64 tied = cut.key ? drawn(logit_of(cut.key)) : 0;
  u64 sum = 0, ties = 0, all;
  for (int i = 0; i < have; i++) {
    const u32 k = key_of(mine[i]);
    if (k > cut.key) sum += drawn(mine[i]);
    else if (k == cut.key) ties++;
  }
  u64 earlier = before(ties, s, all);
  if (t == 0) s.sent[1] = all;
  all_blocks();
  for (int b = 0; b < rank; b++) earlier += far64(&s.sent[1], b);
  const u64 room = cut.ties > earlier ? cut.ties - earlier : 0, kept = min(room, ties);
  sum += kept * tied;
  u64 running = before(sum, s, all), total = 0;
  if (t == 0) s.sent[2] = all;
  all_blocks();
  for (int b = 0; b < BLOCKS; b++) {
    const u64 of = far64(&s.sent[2], b);
    if (b < rank) running += of;
    total += of;
  }
  const u64 u = __umul64hi((u64)a.r[1] << 32 | a.r[0], total);
  if (running <= u && u < running + sum) {
    u64 left = kept;
    for (int i = 0; i < have; i++) {
      const u32 k = key_of(mine[i]);
      if (k > cut.key) running += drawn(mine[i]);
      else if (k == cut.key && left) { left--; running += tied; }
      if (running > u) { ids[a.row] = first + t * each + i; raws[a.row] = row[first + t * each + i]; break; }
    }
  }
  all_blocks();  // shared memory is there until all have read it
}
