// Products for few tokens: up to 8 NT, by chains on mma.sync. y = x . W^T + bias; W: [n][k], x: [m][k], k a multiple of 8.
// A block takes R rows of W at a time; one thread streams W and x by tensor maps (boxes of 64 columns, 128-byte swizzle)
// through a ring that never stops between tiles. What lies past n, k or m arrives as +0 and changes no bit.
// Grid: at most as many blocks as tiles, 32 WN + 32 threads; 1024 + NS SB + 16 NS bytes of dynamic shared memory. bf16 to yb, or f32 to yf where given.
#include "hopper.cuh"
#include "math.cuh"
#ifndef NT
#define NT 1  // groups of 8 tokens
#endif
#ifndef WN
#define WN 4  // warps that compute, each 16 rows
#endif
#ifndef GATED
#define GATED 0  // W: N gates, then N ups, of which a tile has as many of each; y = bf16(bf16(act(gate)) up), to yb
#endif
constexpr int BX = 4 /* boxes a stage */, R = WN * 16, SB = BX * (R + 8 * NT) * 128, NS = 212 * 1024 / SB;
extern "C" __global__ void __launch_bounds__(WN * 32 + 32, 1) linear_mma(const __grid_constant__ TMap mW, const __grid_constant__ TMap mX,
    const float* bias, bf* yb, float* yf, int N, int K, int M
#if GATED
    , int act
#endif
    ) {
  extern __shared__ u8 raw[];
  const u32 base = (sm(raw) + 1023) & ~1023u, full = base + NS * SB, empty = full + 8 * NS;
  const int w = threadIdx.x >> 5, l = threadIdx.x & 31, RT = GATED ? R / 2 : R, tiles = (N + RT - 1) / RT, nst = (K + 64 * BX - 1) / (64 * BX);
  if (threadIdx.x == 0) {
    for (int i = 0; i < NS; i++) { mb_init(full + 8 * i, 1); mb_init(empty + 8 * i, WN); }
    mb_fence();
  }
  __syncthreads();
  let_next_start();
  if (w == WN) {
    if (l == 0) {
      const u64 once = evict_first(), often = evict_last();
      const int mine = blockIdx.x < tiles ? ((tiles - 1 - blockIdx.x) / gridDim.x + 1) * nst : 0, head = min(mine, NS);
      // A stage of this block's, counted on: its tile, its place along K and its slot.
      struct Stage { int t, s, sl, round; };
      auto next = [&](Stage& at) {
        if (++at.sl == NS) { at.sl = 0; at.round++; }
        if (++at.s == nst) { at.s = 0; at.t += gridDim.x; }
      };
      auto weights = [&](const Stage& at) {
        mb_expect(full + 8 * at.sl, SB);
        for (int b = 0; b < BX; b++)
          for (int h = 0; h < R / RT; h++) tma(base + at.sl * SB + (b * R + h * RT) * 128, &mW, (at.s * BX + b) * 64, h * N + at.t * RT, full + 8 * at.sl, once);
      };
      auto inputs = [&](const Stage& at) {
        for (int b = 0; b < BX; b++) tma(base + at.sl * SB + BX * R * 128 + b * NT * 1024, &mX, (at.s * BX + b) * 64, 0, full + 8 * at.sl, often);
      };
      const Stage first{(int)blockIdx.x, 0, 0, 0};
      Stage at = first, in = first;
      for (int it = 0; it < head; it++, next(at)) weights(at);  // they do not depend on the kernel before
      wait_for_previous();
      for (int it = 0; it < head; it++, next(in)) inputs(in);
      for (int it = head; it < mine; it++, next(at)) { mb_wait(empty + 8 * at.sl, (at.round - 1) & 1); weights(at); inputs(at); }
    }
    return;
  }
  const int r = GATED ? w * 8 + (l & 7) + ((l >> 3) & 1) * RT : w * 16 + (l & 7) + ((l >> 3) & 1) * 8, hi = l >> 4, g = l >> 2, q = l & 3;
  int sl = 0, round = 0;
  for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
    float d[NT][4];
#pragma unroll
    for (int i = 0; i < NT; i++)
      for (int e = 0; e < 4; e++) d[i][e] = 0;
    for (int s = 0; s < nst; s++) {
      const u32 st = base + sl * SB;
      mb_wait(full + 8 * sl, round & 1);
#pragma unroll
      for (int b = 0; b < BX; b++) {
        u32 A[4][4], B[NT][2][4];
#pragma unroll
        for (int kk = 0; kk < 4; kk++) ldmatrix(A[kk], st + b * R * 128 + r * 128 + (((kk * 2 + hi) ^ (r & 7)) << 4));
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int h = 0; h < 2; h++) ldmatrix(B[n][h], st + BX * R * 128 + b * NT * 1024 + n * 1024 + (l & 7) * 128 + (((h * 4 + (l >> 3)) ^ (l & 7)) << 4));
#pragma unroll
        for (int kk = 0; kk < 4; kk++)
#pragma unroll
          for (int n = 0; n < NT; n++) mma16816(d[n], A[kk], B[n][kk >> 1][(kk & 1) * 2], B[n][kk >> 1][(kk & 1) * 2 + 1]);
      }
      mb_give_back(empty + 8 * sl, l == 0);
      if (++sl == NS) { sl = 0; round++; }
    }
#if GATED
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int tok = n * 8 + q * 2 + e, row = t * RT + w * 8 + g;
        if (tok < M && row < N) yb[(size_t)tok * N + row] = times(activated(tobf(d[n][e]), act), tobf(d[n][e + 2]));
      }
#else
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        int tok = n * 8 + q * 2 + (e & 1), row = t * R + w * 16 + g + (e >> 1) * 8;
        if (tok < M && row < N) {
          float y = d[n][e];
          if (bias) y = y + bias[row];
          if (yf) yf[(size_t)tok * N + row] = y; else yb[(size_t)tok * N + row] = tobf(y);
        }
      }
#endif
  }
}
