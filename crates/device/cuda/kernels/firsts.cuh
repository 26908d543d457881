#pragma once
// The first tokens of rows of logits, found while a product makes the logits, so that few of them reach memory. Every block
// tells the largest of each row that it has made. The 20th of what blocks told is a floor: the row's first 20 are not below
// it. Logits that are not go to the row's list, in any order; a tile's a tile late, when a floor is known of its like.
#include "hopper.cuh"
#include "order.cuh"
#define PEAKS 160  // blocks at most
#define STATE (32 + PEAKS)  // words a row: tokens listed, floor, and from 32 on what blocks told; 0 before the first block

__device__ __forceinline__ u32 glance(const u32* p) { u32 v; asm volatile("ld.relaxed.gpu.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ void lift(u32* p, u32 v) { asm volatile("red.relaxed.gpu.global.max.u32 [%0],%1;" :: "l"(p), "r"(v) : "memory"); }
__device__ __forceinline__ u32 claim(u32* p, u32 n) { u32 v; asm volatile("atom.relaxed.gpu.global.add.u32 %0,[%1],%2;" : "=r"(v) : "l"(p), "r"(n) : "memory"); return v; }

// What a warp keeps of its 16 ids by 8 GROUPS rows a tile, laid out as the matrix steps do: z[4 n + e] of thread l is id
// first + l / 4 + e / 2 * 8 of row 8 n + l % 4 * 2 + e % 2.
template <int GROUPS> struct Firsts {
  static constexpr int PAIRS = 2 * GROUPS, WORDS_OF_FLOORS = (GROUPS + 3) / 4;
  u64* list;  // `room` keys a row
  u32* state;
  int room, ids, rows, first;
  float late[4 * GROUPS], floors[WORDS_OF_FLOORS];  // floors of row 32 i + l

  // Of a tile just made. A NaN is not told.
  __device__ __forceinline__ void tell(const float* z, int from) const {
    constexpr int AT_ONCE = PAIRS < 8 ? PAIRS : 8;
    const int l = threadIdx.x & 31, id = from + (l >> 2);
#pragma unroll
    for (int i = 0; i < PAIRS; i += AT_ONCE) {
      float best[AT_ONCE];
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++) {
        const int at = (i + k) / 2 * 4 + (i + k) % 2;
        best[k] = fmaxf(id < ids ? z[at] : -INF, id + 8 < ids ? z[at + 2] : -INF);
      }
      // Over eight lanes; where there are as many pairs left as lanes to go, each half of them goes on with half the pairs.
      int n = AT_ONCE;
#pragma unroll
      for (int o = 16; o >= 4; o >>= 1) {
        const bool halves = n == o / 2;
        if (halves) n /= 2;
#pragma unroll
        for (int k = 0; k < n; k++) {
          const float mine = halves && (l & o) ? best[k + n] : best[k], other = halves && !(l & o) ? best[k + n] : best[k];
          best[k] = fmaxf(mine, __shfl_xor_sync(~0u, other, o));
        }
      }
      const int pair = i + (l >> 2), row = pair / 2 * 8 + (l & 3) * 2 + pair % 2;
      if ((l >> 2) < AT_ONCE && row < rows) lift(state + row * STATE + 32 + blockIdx.x, key_of(best[0]));
    }
  }
  // The floors as they are now.
  __device__ __forceinline__ void look() {
    const int l = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < WORDS_OF_FLOORS; i++) {
      const int row = 32 * i + l;
      const u32 floor = row < rows ? glance(state + row * STATE + 1) : 0;
      floors[i] = floor ? logit_of(floor) : row < rows ? -INF : INF;
    }
  }
  // Lists what of the late tile is not below the floors; NaN never is.
  __device__ __forceinline__ void keep() const {
    const int l = threadIdx.x & 31, id = first + (l >> 2);
    const u32 before = (1u << l) - 1, same = 0x11111111u << (l & 3);
#pragma unroll
    for (int n = 0; n < GROUPS; n++) {
      const float* z = late + 4 * n;
      float floor[2];
      bool any = false;
#pragma unroll
      for (int e = 0; e < 2; e++) {
        floor[e] = __shfl_sync(~0u, floors[n / 4], n % 4 * 8 + (l & 3) * 2 + e);
        any |= !(z[e] < floor[e]) || !(z[e + 2] < floor[e]);
      }
      if (!__any_sync(~0u, any)) continue;
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int row = n * 8 + (l & 3) * 2 + e;
        const bool a = row < rows && id < ids && !(z[e] < floor[e]), b = row < rows && id + 8 < ids && !(z[e + 2] < floor[e]);
        const u32 lows = __ballot_sync(~0u, a) & same, highs = __ballot_sync(~0u, b) & same;
        const u32 mine = __popc(lows), all = mine + __popc(highs);
        u32 place = l < 4 && all ? claim(state + row * STATE, all) : 0;
        place = __shfl_sync(~0u, place, l & 3);
        u64* to = list + (size_t)row * room + place;
        if (a) to[__popc(lows & before)] = listed_key(z[e], id);
        if (b) to[mine + __popc(highs & before)] = listed_key(z[e + 2], id + 8);
      }
    }
  }
  // A tile was made; the one before it, if there is one, is listed by the floors last looked at.
  __device__ __forceinline__ void take(const float* z, int from) {
    tell(z, from);
    if (first >= 0) keep();
    first = from;
#pragma unroll
    for (int i = 0; i < 4 * GROUPS; i++) late[i] = z[i];
  }
  __device__ __forceinline__ void end() {
    if (first < 0) return;
    look();
    keep();
  }
};

// By a warp of each block beside those that compute, until this block has made all its tiles: raises floors, the rarer the
// more is made. Of equal ones of what blocks told one counts: a lower floor is one too.
__device__ __forceinline__ void raise(u32* state, int rows, u32* made, u32 tiles) {
  const int l = threadIdx.x & 31;
  auto progress = [&] { return __shfl_sync(~0u, l == 0 ? told(made) : 0, 0); };  // one for the whole warp
  for (u32 done = progress(); done < tiles; done = progress()) {
    for (int row = blockIdx.x % rows; done && row < rows; row += gridDim.x) {
      u32 peaks[PEAKS / 32], floor = 0;
#pragma unroll
      for (int i = 0; i < PEAKS / 32; i++) peaks[i] = l + 32 * i < gridDim.x ? glance(state + row * STATE + 32 + l + 32 * i) : 0;
      for (int k = 0; k < TOP; k++) {
        floor = 0;
#pragma unroll
        for (int i = 0; i < PEAKS / 32; i++) floor = max(floor, peaks[i]);
        floor = __reduce_max_sync(~0u, floor);
#pragma unroll
        for (int i = 0; i < PEAKS / 32; i++) peaks[i] = peaks[i] == floor ? 0 : peaks[i];
      }
      if (l == 0) lift(state + row * STATE + 1, floor);
    }
    for (u32 i = 0; i <= 2 * done && progress() < tiles; i++) __nanosleep(400);
  }
}
