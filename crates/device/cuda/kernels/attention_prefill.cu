// Attention of runs of queries, causal, with WIN limited to a window, head_dim HD, over keys and values in pages (common.cuh). Bits are the contract's:
// absolute tiles of KT keys, chunks of 512 merged in ascending order.
// A unit is 64 positions of two query heads of one KV head (heads 2), or NC * 64 positions of one (heads 1); each of NC warpgroups
// takes 64 rows. Blocks stay: two producers run ahead of them into the units to come, the queries of the next unit arrive while
// this one's last tile is computed, and PV of a tile runs while the next one's softmax is computed, across units too.
// Grid: at most as many blocks as units. items: {pos0, begin, end, row of `begin` in q and o, sequence}: of the positions from pos0, a
// multiple of a unit's, those in [begin, end) are queries. table: [sequences][most] pages.
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
#ifndef ST
#define ST 2    // stages
#endif
#ifndef CH
#define CH 512  // keys a chunk; more than any context: one sum over all of them, which only the vendor family may give
#endif
constexpr int TC = CH / KT, TB = KT * HD * 2, QB = 64 * HD * 2, OB = 64 * HD * 4;
constexpr int REGISTERS = NC == 1 ? 248 : 232;  // of a consumer; 40 of a producer
// dynamic shared memory: 1280 + NC * QB + 2 * ST * TB + NC * OB
__device__ __forceinline__ int img(int rows, int row, int d) { return (d >> 6) * rows * 128 + row * 128 + ((((d >> 3) & 7) ^ (row & 7)) << 4) + (d & 7) * 2; }
// Sixteen bytes, or zeros.
__device__ __forceinline__ void copy16(u32 dst, const void* src, bool there) { asm volatile("cp.async.cg.shared::cta.global [%0],[%1],16,%2;" :: "r"(dst), "l"(src), "r"(there ? 16 : 0) : "memory"); }
__device__ __forceinline__ void copied() { asm volatile("cp.async.wait_all;" ::: "memory"); }

extern "C" __global__ void __launch_bounds__(128 * (NC + 1), 1) attention_prefill(const bf* Q, const u8* pool, bf* O, const int* items, int count,
    const int* table, int most, int HQ, int HKV, int heads, float scale, int window) {
  extern __shared__ u8 raw[];
  u8* base = (u8*)(((size_t)raw + 1023) & ~(size_t)1023);
  const u32 sQ = sm(base), sK = sQ + NC * QB, sV = sK + ST * TB, sO = sV + ST * TB, sB = sO + NC * OB;
  const u32 kf = sB, ke = kf + 8 * ST, vf = ke + 8 * ST, ve = vf + 8 * ST;
  const int wg = threadIdx.x >> 7, tid = threadIdx.x & 127, w = tid >> 5, l = tid & 31, g = l >> 2, q = l & 3;
  if (threadIdx.x == 0) {
    for (int i = 0; i < ST; i++) { mb_init(kf + 8 * i, 1); mb_init(vf + 8 * i, 1); mb_init(ke + 8 * i, NC * 4); mb_init(ve + 8 * i, NC * 4); }
    mb_fence();
  }
  __syncthreads();
  let_next_start();
  wait_for_previous();
  // Units from the longest on, the longest last in the list; back and forth over the blocks, so that all get as much.
  const int units = count * (HQ / heads);
  auto unit = [&](int r) { return r * (int)gridDim.x + (r & 1 ? (int)gridDim.x - 1 - (int)blockIdx.x : (int)blockIdx.x); };
  auto of = [&](int u) { return items + (count - 1 - u / (HQ / heads)) * 5; };
  // The first key that the query at p sees; tiles before the first row's are not loaded.
  auto lo = [&](int p) { return WIN ? max(0, p - window + 1) : 0; };
  if (wg == NC) {  // producers: of keys, of values
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (w < 2 && l == 0) {
      const u32 ring = sK + w * ST * TB, full = sB + w * 16 * ST, empty = full + 8 * ST;
      int i = 0;  // tiles of all units
      for (int r = 0, u; (u = unit(r)) < units; r++) {
        const int* item = of(u);
        const int last = (item[2] - 1) >> 6;
        const int* list = table + (size_t)item[4] * most;
        const int part = u % (HQ / heads) * heads / (HQ / HKV) + w * HKV;
#pragma unroll 1
        for (int p = lo(item[0]) / KT * (KT / 64); p <= last; p += KT / 64, i++) {
          int at[KT / 64];
#pragma unroll
          for (int e = 0; e < KT / 64; e++) at[e] = list[min(p + e, last)];
          const int s = i % ST;
          if (i >= ST) mb_wait(empty + 8 * s, ((i / ST) - 1) & 1);
          const bool lower = KT == 128 && p == last;  // nobody sees the other half
          mb_expect(full + 8 * s, lower ? TB / 2 : TB);
#pragma unroll
          for (int e = 0; e < KT / 64; e++) {
            if (e > 0 && lower) break;
            const u8* src = pool + (size_t)(at[e] * (2 * HKV) + part) * (HD * 128);
#pragma unroll
            for (int b = 0; b < HD / 64; b++) bulk(ring + s * TB + b * KT * 128 + e * 8192, src + b * 8192, 8192, full + 8 * s);
          }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
    auto give = [&](u32 b, int i) { if (l == 0) mb_arrive(b + 8 * (i % ST)); };
    auto meet = [&]() { asm volatile("bar.sync %0,128;" :: "r"(1 + wg) : "memory"); };
    // The unit at hand: this warpgroup's first position, which of its rows are queries (the first, the end), the row of the first
    // in Q and O, head, tile, tiles. The unit after it: n...
    int r0, some, row, h, j, tiles, r = 0, nr0 = 0, nsome = 0, nrow = 0, nh = 0, ntiles = 0;
    bool more;
    auto peek = [&]() {
      const int u = unit(r);
      more = u < units;
      if (more) {
        const int* item = of(u);
        nh = u % (HQ / heads) * heads + (heads > 1 ? wg : 0);
        nr0 = item[0] + (heads > 1 ? 0 : wg * 64);
        nsome = min(max(item[1] - nr0, 0), 64) | min(max(item[2] - nr0, 0), 64) << 8;
        nrow = item[3] - item[1] + nr0;
        ntiles = (item[2] - 1) / KT + 1;
        if (WIN) ntiles |= lo(item[0]) / KT << 16;
      }
    };
    auto within = [&](int some, int x) { return x >= (some & 255) && x < some >> 8; };
    auto fetch = [&]() {  // the next unit's queries, swizzled
#pragma unroll
      for (int i = 0; i < HD / 16; i++) {
        constexpr int step = 1024 / HD;
        const int x0 = tid / (HD / 8), x = x0 + i * step, d = tid % (HD / 8) * 8;
        const bool there = within(nsome, x);
        // img(64, x, d), of a step that is a multiple of four
        copy16(sQ + wg * QB + (img(64, x0, d) ^ (i * step & 4) << 4) + i * step * 128, there ? Q + ((size_t)(nrow + x) * HQ + nh) * HD + d : Q, there);
      }
    };
    auto open = [&]() {  // the next unit becomes the one at hand
      r0 = nr0; some = nsome; row = nrow; h = nh; j = WIN ? ntiles >> 16 : 0; tiles = WIN ? ntiles & 0xffff : ntiles;
      r++;
      peek();
      copied();
      async_fence();
      meet();
    };
    const u64 dQ = wg_desc(sQ + wg * QB, 16, 1024, 1);
    float S[KT / 2], o[HD / 2], L[4], Lt[2] = {0, 0};
    u32 P[KT / 16][4];
    float M[2] = {-INF, -INF}, Mt[2] = {-INF, -INF}, al[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < HD / 2; i++) o[i] = 0;
    for (int i = 0; i < 4; i++) L[i] = 0;
    float4* os = (float4*)(base + (sO - sQ) + wg * OB) + tid;
    // No row sees the second half of tile j, whose weights are +0: steps over them, which would change nothing, are left out.
    auto half = [&]() { return KT == 128 && r0 + 63 < j * KT + 64; };
    auto qk = [&](int i) {
      const int s = i % ST;
      mb_wait(kf + 8 * s, (i / ST) & 1);
      const u64 dK = wg_desc(sK + s * TB, 16, 1024, 1);
      wg_fence();
#pragma unroll
      for (int kk = 0; kk < HD / 16; kk++) wg_ss<0>(S, dQ + (((kk >> 2) * 8192 + (kk & 3) * 32) >> 4), dK + (((kk >> 2) * KT * 128 + (kk & 3) * 32) >> 4), kk > 0);
      wg_commit();
    };
    auto pv = [&](int i, bool first, bool lower) {
      const int s = i % ST;
      mb_wait(vf + 8 * s, (i / ST) & 1);
      const u64 dV = wg_desc(sV + s * TB, KT * 128, 1024, 1);
      auto steps = [&](int n) {
        wg_fence();
#pragma unroll
        for (int kk = 0; kk < KT / 16; kk++) if (kk < n) wg_rs<1>(o, P[kk], dV + ((kk * 2048) >> 4), !(first && kk == 0));
        wg_commit();
      };
      if (KT == 128 && lower) steps(KT / 32); else steps(KT / 16);
    };
    // Softmax of the first `keys` of tile j in S: new maxima, al = 2^(M - M'), S becomes the weights.
    auto soft = [&](bool fresh, bool mask, int keys) {
      const int p0 = r0 + w * 16 + g, p1 = p0 + 8;  // this thread's rows
      if (mask) {
#pragma unroll
        for (int i = 0; i < KT / 2; i++) {
          int key = j * KT + (i >> 2) * 8 + q * 2 + (i & 1), pos = (i & 2) ? p1 : p0;
          if (i < keys / 2 && (key > pos || (WIN && key < lo(pos)))) S[i] = -INF;
        }
      }
      float t0 = fmaxf(S[0], S[1]), t1 = fmaxf(S[2], S[3]);
#pragma unroll
      for (int i = 4; i < KT / 2; i += 4) if (i < keys / 2) { t0 = fmaxf(t0, fmaxf(S[i], S[i + 1])); t1 = fmaxf(t1, fmaxf(S[i + 2], S[i + 3])); }
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
      for (int i = 0; i < KT / 2; i++) S[i] = i < keys / 2 ? ex2(fmaf(S[i], scale, -((i & 2) ? n1 : n0))) : 0.f;
    };
    auto softmax = [&](bool fresh, bool lower) {
      const bool mask = (j + 1) * KT - 1 > r0 || (WIN && j * KT < lo(r0 + 63));
      if (KT == 128 && lower) soft(fresh, true, KT / 2);
      else if (mask) soft(fresh, true, KT);
      else soft(fresh, false, KT);
    };
    auto weights = [&]() {  // S into P, and their sum: the same chain, over a column of ones
#pragma unroll
      for (int kk = 0; kk < KT / 16; kk++)
#pragma unroll
        for (int i = 0; i < 4; i++) P[kk][i] = pack(S[kk * 8 + i * 2], S[kk * 8 + i * 2 + 1]);
#pragma unroll
      for (int kk = 0; kk < KT / 16; kk++) mma16816(L, P[kk], 0x3f803f80u, 0x3f803f80u);
    };
    // The finished chunk (m, o, L), which ends before `stop`, into the total; only: nothing is in it yet.
    auto merge = [&](float m0, float m1, bool only, int stop) {
      const int p0 = r0 + w * 16 + g, p1 = p0 + 8;
      float N0 = fmaxf(Mt[0], m0), N1 = fmaxf(Mt[1], m1), a0 = ex2(Mt[0] - N0), a1 = ex2(Mt[1] - N1), b0 = ex2(m0 - N0), b1 = ex2(m1 - N1);
      const bool s0 = !WIN || lo(p0) < stop, s1 = !WIN || lo(p1) < stop;  // seen: others take no part
      if (s0) { Lt[0] = fmaf(L[0], b0, Lt[0] * a0); Mt[0] = N0; }
      if (s1) { Lt[1] = fmaf(L[2], b1, Lt[1] * a1); Mt[1] = N1; }
#pragma unroll
      for (int i = 0; i < HD / 8; i++) {
        float4 v = only ? make_float4(0, 0, 0, 0) : os[i * 128];
        if (s0) { v.x = fmaf(o[i * 4], b0, v.x * a0); v.y = fmaf(o[i * 4 + 1], b0, v.y * a0); }
        if (s1) { v.z = fmaf(o[i * 4 + 2], b1, v.z * a1); v.w = fmaf(o[i * 4 + 3], b1, v.w * a1); }
        os[i * 128] = v;
      }
      for (int i = 0; i < 4; i++) L[i] = 0;
    };
    // The same of a unit's last chunk, which every query sees, and the results: to rows at `out` and eight rows below, where there are.
    auto finish = [&](float m0, float m1, bool only, bf* out, bool there0, bool there1) {
      float N0 = fmaxf(Mt[0], m0), N1 = fmaxf(Mt[1], m1), a0 = ex2(Mt[0] - N0), a1 = ex2(Mt[1] - N1), b0 = ex2(m0 - N0), b1 = ex2(m1 - N1);
      float f0 = __fdiv_rn(1.f, fmaf(L[0], b0, Lt[0] * a0)), f1 = __fdiv_rn(1.f, fmaf(L[2], b1, Lt[1] * a1));
#pragma unroll
      for (int c = 0; c < HD; c += 32) {
        u32 x[2][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int k = c / 8 + i;
          float4 v = only ? make_float4(0, 0, 0, 0) : os[k * 128];
          x[0][i] = pack(fmaf(o[k * 4], b0, v.x * a0) * f0, fmaf(o[k * 4 + 1], b0, v.y * a0) * f0);
          x[1][i] = pack(fmaf(o[k * 4 + 2], b1, v.z * a1) * f1, fmaf(o[k * 4 + 3], b1, v.w * a1) * f1);
        }
        // A thread has two of every eight columns; transposed over four threads it has eight in a row.
#pragma unroll
        for (int e = 0; e < 2; e++) {
#pragma unroll
          for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
            for (int i = 0; i < 4; i++)
              if (!(i & bit)) {
                const bool up = q & bit;
                const u32 other = __shfl_xor_sync(~0u, up ? x[e][i] : x[e][i | bit], bit);
                if (up) x[e][i] = other; else x[e][i | bit] = other;
              }
          if (e ? there1 : there0) *(uint4*)(out + (size_t)(e * 8) * HQ * HD + c + q * 8) = make_uint4(x[e][0], x[e][1], x[e][2], x[e][3]);
        }
      }
      Mt[0] = Mt[1] = -INF; Lt[0] = Lt[1] = 0;
      for (int i = 0; i < 4; i++) L[i] = 0;
    };
    auto ends = [&]() { return j + 1 == tiles; };
    auto results = [&]() { return O + ((size_t)(row + w * 16 + g) * HQ + h) * HD; };
    peek();
    fetch();
    open();
    int i = 0;  // tiles of all units
    bool lower = half();
    qk(0);
    wg_wait<0>();
    give(ke, 0);
    if (ends() && more) { meet(); fetch(); }
    softmax(true, lower);
    weights();
    bool first = true, only = true;
    // P holds the weights of tile j. Issuing QK of the next before the rescaling and merging of this one, to hide these, was
    // measured and is a fifth slower.
#pragma unroll 1
    while (!ends() || more) {
      const bool last = ends(), was = lower, there0 = within(some, w * 16 + g), there1 = within(some, w * 16 + g + 8);
      bf* out = results();
      if (last) open(); else j++;
      i++;
      lower = half();
      qk(i);
      pv(i - 1, first, was);
      const float m0 = M[0], m1 = M[1];
      const bool edge = last || j % TC == 0;
      wg_wait<1>();
      give(ke, i);
      if (ends() && more) { meet(); fetch(); }  // every warp has read the queries
      softmax(edge, lower);
      wg_wait<0>();
      give(ve, i - 1);
      first = edge;
      if (last) {
        finish(m0, m1, only, out, there0, there1);
        only = true;
      } else if (edge) {
        merge(m0, m1, only, j * KT);
        only = false;
      } else if (__any_sync(~0u, al[0] != 1.f || al[1] != 1.f)) {
#pragma unroll
        for (int e = 0; e < HD / 2; e++) o[e] *= (e & 2) ? al[1] : al[0];
        L[0] *= al[0]; L[1] *= al[0]; L[2] *= al[1]; L[3] *= al[1];
      }
      weights();
    }
    pv(i, first, lower);
    wg_wait<0>();
    finish(M[0], M[1], only, results(), within(some, w * 16 + g), within(some, w * 16 + g + 8));
  }
}
