// Attention of runs of queries, causal, with WIN limited to a window, head_dim HD, over keys and values in pages (common.cuh). Bits are the contract's:
// absolute tiles of KT keys, chunks of 512 merged in ascending order.
// One block is NC warpgroups of 64 query rows each and a producer; it handles the positions [pos0, pos0 + NC * 64), pos0 a
// multiple of NC * 64, of which those in [begin, end) are queries. PV of tile j - 1 runs while tile j's softmax is computed.
// Grid: (heads, items). items: {pos0, begin, end, row of `begin` in q and o, sequence}. table: [sequences][most] pages.
#include "hopper.cuh"
#include "wgmma.cuh"
#ifndef HD
#define HD 128
#endif
#ifndef WIN
#define WIN 0   // 1: a query sees `window` keys at most
#endif
#ifndef KT
#define KT 128  // keys a tile
#endif
#ifndef NC
#define NC 2    // warpgroups
#endif
#ifndef OT
#define OT 1    // the total of merged chunks: 1 in shared memory, 0 in registers
#endif
#ifndef ST
#define ST 2    // stages
#endif
#ifndef CH
#define CH 512  // keys a chunk; more than any context: one sum over all of them, which only the vendor family may give
#endif
constexpr int TC = CH / KT, TB = KT * HD * 2, QB = 64 * HD * 2, OB = 64 * HD * 4;
// dynamic shared memory: 1280 + NC * QB + 2 * ST * TB + (OT ? NC * OB : 0)
__device__ __forceinline__ int img(int rows, int row, int d) { return (d >> 6) * rows * 128 + row * 128 + ((((d >> 3) & 7) ^ (row & 7)) << 4) + (d & 7) * 2; }

extern "C" __global__ void __launch_bounds__(128 * (NC + 1), 1) attention_prefill(const bf* Q, const u8* pool, bf* O, const int* items,
    const int* table, int most, int HQ, int HKV, float scale, int window) {
  extern __shared__ u8 raw[];
  u8* base = (u8*)(((size_t)raw + 1023) & ~(size_t)1023);
  const u32 sQ = sm(base), sK = sQ + NC * QB, sV = sK + ST * TB, sO = sV + ST * TB, sB = sO + (OT ? NC * OB : 0);
  const u32 kf = sB, ke = kf + 8 * ST, vf = ke + 8 * ST, ve = vf + 8 * ST;
  const int wg = threadIdx.x >> 7, tid = threadIdx.x & 127, w = tid >> 5, l = tid & 31, g = l >> 2, q = l & 3;
  const int* item = items + (gridDim.y - 1 - blockIdx.y) * 5;  // the longest last in the list, first to run
  const int q0 = item[0], begin = item[1], end = item[2], row0 = item[3], h = blockIdx.x, hk = h / (HQ / HKV);
  const int* pages = table + (size_t)item[4] * most;
  if (threadIdx.x == 0) {
    for (int i = 0; i < ST; i++) { mb_init(kf + 8 * i, 1); mb_init(vf + 8 * i, 1); mb_init(ke + 8 * i, NC * 4); mb_init(ve + 8 * i, NC * 4); }
    mb_fence();
  }
  __syncthreads();
  let_next_start();
  wait_for_previous();
  // The first key that the query at p sees; tiles before the first row's are not loaded.
  auto lo = [&](int p) { return WIN ? max(0, p - window + 1) : 0; };
  const int last = end - 1, ntot = last / KT + 1, j0 = lo(q0) / KT;
  if (wg == NC) {  // producer
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (tid == 0) {
      const size_t page = HD * 128, value = HKV * page, pair = 2 * value;
      const u8* head = pool + hk * page;
      auto load = [&](u32 dst, int j, size_t at, u32 bar) {
        mb_expect(bar, TB);
#pragma unroll
        for (int p = 0; p < KT / 64; p++) {
          // Past the last page the last page again: finite values, whose weights are +0.
          const u8* src = head + pages[min(j * (KT / 64) + p, last >> 6)] * pair + at;
#pragma unroll
          for (int b = 0; b < HD / 64; b++) bulk(dst + b * KT * 128 + p * 8192, src + b * 8192, 8192, bar);
        }
      };
      for (int i = 0; i < ntot - j0 + 1; i++) {
        if (i < ntot - j0) { int s = i % ST; if (i >= ST) mb_wait(ke + 8 * s, ((i / ST) - 1) & 1); load(sK + s * TB, j0 + i, 0, kf + 8 * s); }
        if (i > 0) { int v = i - 1, s = v % ST; if (v >= ST) mb_wait(ve + 8 * s, ((v / ST) - 1) & 1); load(sV + s * TB, j0 + v, value, vf + 8 * s); }
      }
    }
  } else {
#if NC <= 2
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
#else
    asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
#endif
    const int r0 = q0 + wg * 64, n = min(r0 + 63, last) / KT + 1;
    const bool alive = r0 < end && r0 + 64 > begin;
    const int p0 = r0 + w * 16 + g, p1 = p0 + 8;  // this thread's rows
    auto give = [&](u32 b, int j) { if (l == 0) mb_arrive(b + 8 * ((j - j0) % ST)); };
    auto row = [&](int p) { return row0 + p - begin; };
    {  // this warpgroup's queries, swizzled
#pragma unroll
      for (int i = 0; i < HD / 16; i++) {
        int c = i * 128 + tid, r = c / (HD / 8), d = (c % (HD / 8)) * 8, p = r0 + r;
        uint4 v = {0, 0, 0, 0};
        if (p >= begin && p < end) v = *(const uint4*)(Q + ((size_t)row(p) * HQ + h) * HD + d);
        *(uint4*)(base + wg * QB + img(64, r, d)) = v;
      }
      async_fence();
      asm volatile("bar.sync %0,128;" :: "r"(1 + wg) : "memory");
    }
    const u64 dQ = wg_desc(sQ + wg * QB, 16, 1024, 1);
    float S[KT / 2], o[HD / 2], ot[OT ? 1 : HD / 2], L[4], Lt[2] = {0, 0};
    u32 P[KT / 16][4];
    float M[2] = {-INF, -INF}, Mt[2] = {-INF, -INF}, al[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < HD / 2; i++) o[i] = 0;
    for (int i = 0; i < 4; i++) L[i] = 0;
    if constexpr (!OT) {
#pragma unroll
      for (int i = 0; i < HD / 2; i++) ot[i] = 0;
    }
    float4* os = (float4*)(base + (sO - sQ) + wg * OB) + tid;
    auto qk = [&](int j) {
      int i = j - j0, s = i % ST;
      mb_wait(kf + 8 * s, (i / ST) & 1);
      const u64 dK = wg_desc(sK + s * TB, 16, 1024, 1);
      wg_fence();
#pragma unroll
      for (int kk = 0; kk < HD / 16; kk++) wg_ss<0>(S, dQ + (((kk >> 2) * 8192 + (kk & 3) * 32) >> 4), dK + (((kk >> 2) * KT * 128 + (kk & 3) * 32) >> 4), kk > 0);
      wg_commit();
    };
    auto pv = [&](int j, bool first) {
      int i = j - j0, s = i % ST;
      mb_wait(vf + 8 * s, (i / ST) & 1);
      const u64 dV = wg_desc(sV + s * TB, KT * 128, 1024, 1);
      wg_fence();
#pragma unroll
      for (int kk = 0; kk < KT / 16; kk++) wg_rs<1>(o, P[kk], dV + ((kk * 2048) >> 4), !(first && kk == 0));
      wg_commit();
    };
    // Softmax of tile j in S: new maxima, al = 2^(M - M'), S becomes the weights.
    auto soft = [&](int j, bool fresh, bool mask) {
      if (mask) {
#pragma unroll
        for (int i = 0; i < KT / 2; i++) {
          int key = j * KT + (i >> 2) * 8 + q * 2 + (i & 1), pos = (i & 2) ? p1 : p0;
          if (key > pos || (WIN && key < lo(pos))) S[i] = -INF;
        }
      }
      float t0 = fmaxf(S[0], S[1]), t1 = fmaxf(S[2], S[3]);
#pragma unroll
      for (int i = 4; i < KT / 2; i += 4) { t0 = fmaxf(t0, fmaxf(S[i], S[i + 1])); t1 = fmaxf(t1, fmaxf(S[i + 2], S[i + 3])); }
      t0 = fmaxf(t0, __shfl_xor_sync(~0u, t0, 1)); t1 = fmaxf(t1, __shfl_xor_sync(~0u, t1, 1));
      t0 = fmaxf(t0, __shfl_xor_sync(~0u, t0, 2)); t1 = fmaxf(t1, __shfl_xor_sync(~0u, t1, 2));
      float n0 = rint_(t0 * scale), n1 = rint_(t1 * scale);
      if (!fresh) { n0 = fmaxf(n0, M[0]); n1 = fmaxf(n1, M[1]); }
      al[0] = ex2(M[0] - n0); al[1] = ex2(M[1] - n1);
      M[0] = n0; M[1] = n1;
      if (WIN && mask) {  // nothing of this chunk seen yet: every weight is +0
        if (lo(p0) >= (j + 1) * KT) { n0 = 0; al[0] = 1; }
        if (lo(p1) >= (j + 1) * KT) { n1 = 0; al[1] = 1; }
      }
#pragma unroll
      for (int i = 0; i < KT / 2; i++) S[i] = ex2(fmaf(S[i], scale, -((i & 2) ? n1 : n0)));
    };
    auto topack = [&]() {
#pragma unroll
      for (int kk = 0; kk < KT / 16; kk++)
#pragma unroll
        for (int i = 0; i < 4; i++) P[kk][i] = pack(S[kk * 8 + i * 2], S[kk * 8 + i * 2 + 1]);
    };
    auto addsum = [&]() {  // the same chain, over a column of ones
#pragma unroll
      for (int kk = 0; kk < KT / 16; kk++) mma16816(L, P[kk], 0x3f803f80u, 0x3f803f80u);
    };
    // The finished chunk (m, o, L), which ends before `stop`, into the total; only: nothing is in it yet.
    auto merge = [&](float m0, float m1, bool only, int stop) {
      float N0 = fmaxf(Mt[0], m0), N1 = fmaxf(Mt[1], m1), a0 = ex2(Mt[0] - N0), a1 = ex2(Mt[1] - N1), b0 = ex2(m0 - N0), b1 = ex2(m1 - N1);
      const bool s0 = !WIN || lo(p0) < stop, s1 = !WIN || lo(p1) < stop;  // seen: others take no part
      if (s0) { Lt[0] = fmaf(L[0], b0, Lt[0] * a0); Mt[0] = N0; }
      if (s1) { Lt[1] = fmaf(L[2], b1, Lt[1] * a1); Mt[1] = N1; }
      if constexpr (OT) {
#pragma unroll
        for (int i = 0; i < HD / 8; i++) {
          float4 v = only ? make_float4(0, 0, 0, 0) : os[i * 128];
          if (s0) { v.x = fmaf(o[i * 4], b0, v.x * a0); v.y = fmaf(o[i * 4 + 1], b0, v.y * a0); }
          if (s1) { v.z = fmaf(o[i * 4 + 2], b1, v.z * a1); v.w = fmaf(o[i * 4 + 3], b1, v.w * a1); }
          os[i * 128] = v;
        }
      } else {
#pragma unroll
        for (int i = 0; i < HD / 2; i++) if ((i & 2) ? s1 : s0) ot[i] = fmaf(o[i], (i & 2) ? b1 : b0, ot[i] * ((i & 2) ? a1 : a0));
      }
      for (int i = 0; i < 4; i++) L[i] = 0;
    };
    const int jf = alive ? lo(r0) / KT : j0;  // this warpgroup's first tile
    auto skip = [&](int from, int to) {  // tiles that only the other warpgroup needs
      for (int j = from; j < to; j++) {
        int i = j - j0, k = i % ST;
        mb_wait(kf + 8 * k, (i / ST) & 1); mb_wait(vf + 8 * k, (i / ST) & 1);
        if (l == 0) { mb_arrive(ke + 8 * k); mb_arrive(ve + 8 * k); }
      }
    };
    if (alive) {
      if (WIN) skip(j0, jf);
      auto masked = [&](int j) { return (j + 1) * KT - 1 > r0 || (WIN && j * KT < lo(r0 + 63)); };
      qk(jf);
      wg_wait<0>();
      give(ke, jf);
      soft(jf, true, masked(jf));
      topack();
      addsum();
      bool first = true, only = true;
      // Issuing QK(j + 1) before the rescaling and merging of tile j, to hide these, was measured and is a fifth slower.
#pragma unroll 1
      for (int j = jf + 1; j < n; j++) {
        qk(j);
        pv(j - 1, first);
        float m0 = M[0], m1 = M[1];
        const bool edge = j % TC == 0;
        wg_wait<1>();
        give(ke, j);
        if (masked(j)) soft(j, edge, true); else soft(j, edge, false);
        wg_wait<0>();
        give(ve, j - 1);
        if (edge) {
          merge(m0, m1, only, j * KT);
          only = false;
          first = true;
        } else {
          first = false;
          if (__any_sync(~0u, al[0] != 1.f || al[1] != 1.f)) {
#pragma unroll
            for (int i = 0; i < HD / 2; i++) o[i] *= (i & 2) ? al[1] : al[0];
            L[0] *= al[0]; L[1] *= al[0]; L[2] *= al[1]; L[3] *= al[1];
          }
        }
        topack();
        addsum();
      }
      pv(n - 1, first);
      wg_wait<0>();
      give(ve, n - 1);
      merge(M[0], M[1], only, n * KT);
      float f0 = __fdiv_rn(1.f, Lt[0]), f1 = __fdiv_rn(1.f, Lt[1]);
#pragma unroll
      for (int i = 0; i < HD / 2; i += 2) {
        float a, b;
        if constexpr (OT) { float4 v = os[(i >> 2) * 128]; a = (i & 2) ? v.z : v.x; b = (i & 2) ? v.w : v.y; }
        else { a = ot[i]; b = ot[i + 1]; }
        float f = (i & 2) ? f1 : f0;
        int p = (i & 2) ? p1 : p0;
        if (p >= begin && p < end) *(u32*)(O + ((size_t)row(p) * HQ + h) * HD + (i >> 2) * 8 + q * 2) = pack(a * f, b * f);
      }
    }
    skip(alive ? n : j0, ntot);
  }
}
