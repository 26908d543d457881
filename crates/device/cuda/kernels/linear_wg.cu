// Products for many tokens, by chains on wgmma. y = x . W^T + bias; W: [n][k] on the 64-row side, x: [m][k], k a multiple of 8.
// A block takes tiles of R rows of W by TN tokens; one thread streams both by tensor maps (boxes of 64 columns, 128-byte
// swizzle) through a ring that never stops between tiles. What lies past n, k or m arrives as +0 and changes no bit.
// Grid: at most the number of tiles, 128 WG + 128 threads; 1024 + NS SB + 16 NS bytes of dynamic shared memory.
#include "hopper.cuh"
#include "wgmma.cuh"
#ifndef WG
#define WG 1  // consumer warpgroups, 64 rows each
#endif
#ifndef TN
#define TN 128  // tokens a tile
#endif
#ifndef BX
#define BX 2  // boxes a stage
#endif
constexpr int R = WG * 64, SB = BX * (R + TN) * 128, NS = 220 * 1024 / SB, BAND = 8;
extern "C" __global__ void __launch_bounds__(WG * 128 + 128, 1) linear_wg(const __grid_constant__ TMap mW, const __grid_constant__ TMap mX,
    const float* bias, bf* yb, float* yf, int N, int K, int M) {
  extern __shared__ u8 raw[];
  const u32 base = (sm(raw) + 1023) & ~1023u, full = base + NS * SB, empty = full + 8 * NS;
  const int wg = threadIdx.x >> 7, tid = threadIdx.x & 127, w = tid >> 5, l = tid & 31;
  const int rows = (N + R - 1) / R, parts = (M + TN - 1) / TN, tiles = rows * parts, nst = (K + 64 * BX - 1) / (64 * BX);
  // Tiles in bands of 8 row tiles, so that blocks which run together share both operands in L2.
  auto place = [&](int i, int& r, int& p) {
    int band = i / (BAND * parts), in = i % (BAND * parts), high = min(BAND, rows - band * BAND);
    r = band * BAND + in % high;
    p = in / high;
  };
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
      auto weights = [&](int i) {
        int r, p, s = i % nst, sl = i % NS;
        place(blockIdx.x + (i / nst) * gridDim.x, r, p);
        mb_expect(full + 8 * sl, SB);
        for (int b = 0; b < BX; b++) tma(base + sl * SB + b * R * 128, &mW, (s * BX + b) * 64, r * R, full + 8 * sl, parts > 1 ? often : once);
      };
      auto inputs = [&](int i) {
        int r, p, s = i % nst, sl = i % NS;
        place(blockIdx.x + (i / nst) * gridDim.x, r, p);
        for (int b = 0; b < BX; b++) tma(base + sl * SB + BX * R * 128 + b * TN * 128, &mX, (s * BX + b) * 64, p * TN, full + 8 * sl, often);
      };
      int it = 0;
      for (; it < head; it++) weights(it);
      wait_for_previous();
      for (it = 0; it < head; it++) inputs(it);
      for (; it < mine; it++) { mb_wait(empty + 8 * (it % NS), ((it / NS) - 1) & 1); weights(it); inputs(it); }
    }
    return;
  }
  const int g = l >> 2, q = l & 3;
  int it = 0;
  for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
    int r, p;
    place(t, r, p);
    float d[TN / 2];
#pragma unroll
    for (int i = 0; i < TN / 2; i++) d[i] = 0;
    for (int s = 0; s < nst; s++, it++) {
      const int sl = it % NS;
      const u32 st = base + sl * SB;
      mb_wait(full + 8 * sl, (it / NS) & 1);
      wg_fence();
#pragma unroll
      for (int b = 0; b < BX; b++) {
        const u64 a = wg_desc(st + b * R * 128 + wg * 8192, 16, 1024, 1), x = wg_desc(st + BX * R * 128 + b * TN * 128, 16, 1024, 1);
#pragma unroll
        for (int kk = 0; kk < 4; kk++) wg_ss<0>(d, a + kk * 2, x + kk * 2, 1);
      }
      wg_commit();
      wg_wait<1>();  // the stage before is done: give it back
      if (s > 0 && l == 0) mb_arrive(empty + 8 * ((it - 1) % NS));
    }
    wg_wait<0>();
    if (l == 0) mb_arrive(empty + 8 * ((it - 1) % NS));
#pragma unroll
    for (int i = 0; i < TN / 2; i++) {
      int tok = p * TN + (i >> 2) * 8 + q * 2 + (i & 1), row = r * R + wg * 64 + w * 16 + g + ((i >> 1) & 1) * 8;
      if (tok < M && row < N) {
        float y = d[i];
        if (bias) y = y + bias[row];
        if (yf) yf[(size_t)tok * N + row] = y; else yb[(size_t)tok * N + row] = tobf(y);
      }
    }
  }
}
