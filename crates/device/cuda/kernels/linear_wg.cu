// Products for many tokens, by chains on wgmma. y = x . W^T + bias; W: [n][k], x: [m][k], k a multiple of 8. One of them is
// on the side of 64 rows. A block takes tiles of R rows of that one by TN of the other; one thread streams both by tensor maps (boxes of 64 columns, 128-byte
// swizzle) through a ring that never stops between tiles. What lies past n, k or m arrives as +0 and changes no bit.
// Grid: at most the number of tiles, 128 WG + 128 threads; 1024 + NS SB + 16 NS bytes of dynamic shared memory.
#include "hopper.cuh"
#include "wgmma.cuh"
#ifndef WG
#define WG 1  // consumer warpgroups, 64 rows each
#endif
#ifndef TURNED
#define TURNED 0  // the 64 rows are tokens, not rows of W: tiles as narrow as it takes to give every multiprocessor one
#endif
#ifndef TN
#define TN 128  // rows of the other side a tile
#endif
#ifndef BX
#define BX 2  // boxes a stage
#endif
#ifndef HEAD
#define HEAD 0  // logits of at most TN rows: no y, but the first tokens of each row, listed
#endif
#if HEAD
#include "firsts.cuh"
#endif
constexpr int R = WG * 64, SB = BX * (R + TN) * 128, NS = 220 * 1024 / SB, BAND = 8;
extern "C" __global__ void __launch_bounds__(WG * 128 + 128, 1) linear_wg(const __grid_constant__ TMap mW, const __grid_constant__ TMap mX,
    const float* bias, bf* yb, float* yf, int N, int K, int M
#if HEAD
    , u64* list, int room, u32* state
#endif
    ) {
  extern __shared__ u8 raw[];
  const u32 base = (sm(raw) + 1023) & ~1023u, full = base + NS * SB, empty = full + 8 * NS;
  const int wg = threadIdx.x >> 7, tid = threadIdx.x & 127, w = tid >> 5, l = tid & 31;
  const int rows = ((TURNED ? M : N) + R - 1) / R, parts = ((TURNED ? N : M) + TN - 1) / TN, tiles = rows * parts, nst = (K + 64 * BX - 1) / (64 * BX);
  // Tiles in bands of 8 row tiles, so that blocks which run together share both operands in L2.
  auto place = [&](int i, int& r, int& p) {
    int band = i / (BAND * parts), in = i % (BAND * parts), high = min(BAND, rows - band * BAND);
    r = band * BAND + in % high;
    p = in / high;
  };
#if HEAD
  __shared__ u32 made;  // tiles
  if (threadIdx.x == 0) made = 0;
#endif
  if (threadIdx.x == 0) {
    for (int i = 0; i < NS; i++) { mb_init(full + 8 * i, 1); mb_init(empty + 8 * i, WG * 4); }
    mb_fence();
  }
  __syncthreads();
  let_next_start();
  if (wg == WG) {
    if (tid == 0) {
      const u64 once = evict_first(), often = evict_last();
      const int mine = blockIdx.x < tiles ? ((tiles - 1 - blockIdx.x) / gridDim.x + 1) * nst : 0, head = min(mine, NS);
      // A stage of this block's: its tile, its place along K and its slot, counted on. Divisions for each would take longer than a copy.
      struct Stage { int t, s, sl, round, r, p; };
      auto first = [&] {
        Stage at{(int)blockIdx.x, 0, 0, 0, 0, 0};
        if (at.t < tiles) place(at.t, at.r, at.p);
        return at;
      };
      auto next = [&](Stage& at) {
        if (++at.sl == NS) { at.sl = 0; at.round++; }
        if (++at.s == nst) {
          at.s = 0;
          at.t += gridDim.x;
          if (at.t < tiles) place(at.t, at.r, at.p);
        }
      };
      // One side of a stage: the one of 64-row tiles or the other.
      auto load = [&](const Stage& at, bool high, const TMap* m, u64 policy) {
        const u32 to = base + at.sl * SB + (high ? 0 : BX * R * 128), box = (high ? R : TN) * 128;
        for (int b = 0; b < BX; b++) tma(to + b * box, m, (at.s * BX + b) * 64, high ? at.r * R : at.p * TN, full + 8 * at.sl, policy);
      };
      auto weights = [&](const Stage& at) {
        mb_expect(full + 8 * at.sl, SB);
        load(at, !TURNED, &mW, (TURNED ? rows : parts) > 1 ? often : once);
      };
      auto inputs = [&](const Stage& at) { load(at, TURNED, &mX, often); };
      Stage at = first();
      for (int it = 0; it < head; it++, next(at)) weights(at);
      wait_for_previous();
      Stage in = first();
      for (int it = 0; it < head; it++, next(in)) inputs(in);
      for (int it = head; it < mine; it++, next(at)) { mb_wait(empty + 8 * at.sl, (at.round - 1) & 1); weights(at); inputs(at); }
    }
#if HEAD
    if (w == 1) raise(state, M, &made, (tiles - 1 - blockIdx.x) / gridDim.x + 1);
#endif
    return;
  }
  const int g = l >> 2, q = l & 3;
  int sl = 0, round = 0, last = 0;
#if HEAD
  Firsts<TN / 8> firsts{list, state, room, N, M, -1};
#endif
  for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
    int r, p;
    place(t, r, p);
    float d[TN / 2];
#pragma unroll
    for (int i = 0; i < TN / 2; i++) d[i] = 0;
    for (int s = 0; s < nst; s++) {
#if HEAD
      if (s == nst - 1) firsts.look();
#endif
      const u32 st = base + sl * SB;
      mb_wait(full + 8 * sl, round & 1);
      wg_fence();
#pragma unroll
      for (int b = 0; b < BX; b++) {
        const u64 a = wg_desc(st + b * R * 128 + wg * 8192, 16, 1024, 1), x = wg_desc(st + BX * R * 128 + b * TN * 128, 16, 1024, 1);
#pragma unroll
        for (int kk = 0; kk < 4; kk++) wg_ss<0>(d, a + kk * 2, x + kk * 2, 1);
      }
      wg_commit();
      wg_wait<1>();  // the stage before is done: give it back
      if (s > 0 && l == 0) mb_arrive(empty + 8 * last);
      last = sl;
      if (++sl == NS) { sl = 0; round++; }
    }
    wg_wait<0>();
    if (l == 0) mb_arrive(empty + 8 * last);
#if HEAD
    firsts.take(d, r * R + wg * 64 + w * 16);
    if (threadIdx.x == 0) add(&made, 1);
#else
#pragma unroll
    for (int i = 0; i < TN / 2; i++) {
      const int high = r * R + wg * 64 + w * 16 + g + ((i >> 1) & 1) * 8, wide = p * TN + (i >> 2) * 8 + q * 2 + (i & 1);
      const int tok = TURNED ? high : wide, row = TURNED ? wide : high;
      if (tok < M && row < N) {
        float y = d[i];
        if (bias) y = y + bias[row];
        if (yf) yf[(size_t)tok * N + row] = y; else yb[(size_t)tok * N + row] = tobf(y);
      }
    }
#endif
  }
#if HEAD
  firsts.end();
#endif
}
