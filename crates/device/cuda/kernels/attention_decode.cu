// Attention of one query a sequence, causal, limited to a window where there is one, head_dim HD (64 or 128), by chunks of keys: work units (sequence, kv head,
// chunk); the last block to finish a (sequence, kv head) merges its chunks in ascending order. The contract's bits.
// 8 warps compute, one thread streams tiles of 128 keys through a ring that runs ahead across units. Grid: at most the
// number of units; 288 threads. At most GM (4 or 8) query heads a kv head.
// units: {row, kv head, chunk, keys of the sequence, keys a chunk, 3 unused, its 8 pages} each; without keys it is none. A chunk has 512 keys in the contract;
// the vendor family splits by load, at multiples of 64 up to 512. count: zeros, left as zeros. part: [row][kv head][chunks][group][HD + 8].
#include "hopper.cuh"
#ifndef HD
#define HD 128
#endif
#ifndef BL
#define BL 2  // blocks a multiprocessor
#endif
#ifndef GM
#define GM 4
#endif
constexpr int KT = 128, CH = 512, /* the most keys a chunk */ TB = KT * HD * 2, NT = CH / KT, SP = CH + 8, NS = 196608 / TB / BL, UN = 16, PS = HD + 8;
// dynamic shared memory: 1024 + NS * TB + GM * SP * 6 + GM * NT * 4 + 16 * NS + 64
extern "C" __global__ void __launch_bounds__(288, BL) attention_decode(const bf* Q, const u8* pool, bf* O, const int* units, int U,
    int HQ, int HKV, float scale, int window, float* part, int* count, int maxch) {
  extern __shared__ u8 raw[];
  u8* ring = (u8*)(((size_t)raw + 1023) & ~(size_t)1023);
  float* ss = (float*)(ring + NS * TB);
  bf* sp = (bf*)(ss + GM * SP);
  float* sa = (float*)(sp + GM * SP);
  const u32 full = (sm(sa + GM * NT) + 7) & ~7u, empty = full + 8 * NS;
  int* flag = (int*)(ring + (empty + 8 * NS - sm(ring)));
  const int w = threadIdx.x >> 5, l = threadIdx.x & 31, g = l >> 2, q = l & 3, G = HQ / HKV;
  // The first key seen by the query of a sequence of ln keys; chunks before its own take no part.
  auto first = [&](int ln) { return window > 0 ? max(0, ln - window) : 0; };
  if (threadIdx.x == 0) {
    for (int i = 0; i < NS; i++) { mb_init(full + 8 * i, 1); mb_init(empty + 8 * i, 256); }
    mb_fence();
  }
  __syncthreads();
  let_next_start();
  if (w == 8) {
    if (l == 0) {
      wait_for_previous();  // it may have written the newest key
      const size_t page = HD * 128, value = HKV * page, pair = 2 * value;
      int it = 0;
      for (int u = blockIdx.x; u < U; u += gridDim.x) {
        const int* un = units + u * UN;
        const int hk = un[1], ch = un[4], n = min(ch, un[3] - un[2] * ch), nt = (n + KT - 1) / KT, np = (n + 63) / 64;
        const int lo = first(un[3]) - un[2] * ch, t0 = max(0, lo) / KT;
        if (lo >= ch || un[3] == 0) continue;
        int pg[2 * NT];
#pragma unroll
        for (int t = 0; t < 2 * NT; t++) pg[t] = un[8 + min(t, np - 1)];  // past the last page the last page again: finite
#pragma unroll
        for (int i = 0; i < 2 * NT; i++)
          if (i % NT >= t0 && i % NT < nt) {
            const int s = it % NS;
            if (it >= NS) mb_wait(empty + 8 * s, ((it / NS) - 1) & 1);
            mb_expect(full + 8 * s, TB);
#pragma unroll
            for (int p = 0; p < 2; p++)
#pragma unroll
              for (int b = 0; b < HD / 64; b++)
                bulk(sm(ring) + s * TB + b * KT * 128 + p * 8192, pool + pg[i % NT * 2 + p] * pair + (i < NT ? 0 : value) + hk * page + b * 8192, 8192, full + 8 * s);
            it++;
          }
      }
    }
    return;
  }
  auto bar = [] { asm volatile("bar.sync 1,256;" ::: "memory"); };
  int it = 0, seq = 0, hk = 0, c = 0, ln = 0, ch = CH;
  u32 qf[HD / 16][2];
  auto meta = [&](int u) { if (u < U) { int4 m = *(const int4*)(units + u * UN); seq = m.x; hk = m.y; c = m.z; ln = m.w; ch = units[u * UN + 4]; } };
  auto next = [&](int u) {
    if (u < U) {
      meta(u);
#pragma unroll
      for (int k = 0; k < HD / 16; k++) {
        const bf* p = Q + ((size_t)seq * HQ + hk * G + g) * HD + k * 16 + q * 2;
        qf[k][0] = g < G ? *(const u32*)p : 0;
        qf[k][1] = g < G ? *(const u32*)(p + 8) : 0;
      }
    }
  };
  wait_for_previous();
  next(blockIdx.x);
  for (int u = blockIdx.x; u < U; u += gridDim.x) {
    const int n = min(ch, ln - c * ch), nt = (n + KT - 1) / KT, nch = (ln + ch - 1) / ch;
    const int lo = first(ln) - c * ch, t0 = max(0, lo) / KT, c0 = first(ln) / ch;
    if (lo >= ch || ln == 0) { next(u + gridDim.x); continue; }
    // Scores: 128 keys at a time, 16 a warp; a tile's slot is given back as soon as its keys are done.
#pragma unroll
    for (int m = 0; m < NT; m++) {
      const int key = (m * 8 + w) * 16;
      if (m >= t0 && m < nt) {
        const int i = it + m - t0, s = i % NS, r = key % KT + (l & 7) + ((l >> 3) & 1) * 8;
        mb_wait(full + 8 * s, (i / NS) & 1);
        const u32 base = sm(ring) + s * TB;
        float d[4] = {0, 0, 0, 0};
        u32 a[HD / 16][4];
#pragma unroll
        for (int k = 0; k < HD / 16; k++) ldmatrix(a[k], base + (k >> 2) * KT * 128 + r * 128 + ((((k & 3) * 2 + (l >> 4)) ^ (r & 7)) << 4));
#pragma unroll
        for (int k = 0; k < HD / 16; k++) mma16816(d, a[k], qf[k][0], qf[k][1]);
#pragma unroll
        for (int e = 0; e < 4; e++) { int hd = q * 2 + (e & 1), kk = key + g + (e >> 1) * 8; if (hd < G) ss[hd * SP + kk] = kk < n && kk >= lo ? d[e] : -INF; }
        mb_give_back(empty + 8 * s, true);  // every thread: one arrival a warp costs the same, and tools cannot follow it
      }
    }
    const int cseq = seq, chk = hk, cc = c;
    next(u + gridDim.x);  // the next unit's query loads run beside this one's work
    bar();
    // Maxima of every tile, running, then the weights of this warp's share; 8 / G warps a head.
    const int per = 8 / G, hd = w / per, sub = w % per;
    if (hd < G) {
      float T[NT];
#pragma unroll
      for (int t = 0; t < NT; t++) {
        float v = -INF;
        if (t >= t0 && t < nt) {
#pragma unroll
          for (int i = 0; i < KT / 32; i++) v = fmaxf(v, ss[hd * SP + t * KT + i * 32 + l]);
        }
        T[t] = v;
      }
#pragma unroll
      for (int o = 16; o; o >>= 1)
#pragma unroll
        for (int t = 0; t < NT; t++) T[t] = fmaxf(T[t], __shfl_xor_sync(~0u, T[t], o));
      float M = -INF;
#pragma unroll
      for (int t = 0; t < NT; t++)
        if (t >= t0 && t < nt) {
          float N = fmaxf(M, rint_(T[t] * scale));
          if (sub == 0 && l == 0) sa[hd * NT + t] = ex2(M - N);
          M = N;
          if (t % per == sub) {
#pragma unroll
            for (int i = 0; i < KT / 64; i++) {
              float2 v = *(float2*)&ss[hd * SP + t * KT + i * 64 + l * 2];
              *(u32*)&sp[hd * SP + t * KT + i * 64 + l * 2] = pack(ex2(fmaf(v.x, scale, -N)), ex2(fmaf(v.y, scale, -N)));
            }
          }
        }
      if (sub == 0 && l == 0) ss[GM * SP - 8 + hd] = M;
    }
    bar();
    float o[4] = {0, 0, 0, 0}, L[4] = {0, 0, 0, 0};
    const u32 ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
    const bool mine = w < HD / 16;  // a warp owns 16 columns
    for (int t = t0; t < nt; t++) {
      const int i = it + nt - t0 + t - t0, s = i % NS;
      const u32 base = sm(ring) + s * TB + (w >> 2) * KT * 128;
      mb_wait(full + 8 * s, (i / NS) & 1);
      if (mine) {
        if (t > t0) {
          float a0 = q * 2 < G ? sa[(q * 2) * NT + t] : 1.f, a1 = q * 2 + 1 < G ? sa[(q * 2 + 1) * NT + t] : 1.f;
          o[0] *= a0; o[1] *= a1; o[2] *= a0; o[3] *= a1; L[0] *= a0; L[1] *= a1; L[2] *= a0; L[3] *= a1;
        }
#pragma unroll
        for (int k0 = 0; k0 < KT / 16; k0 += 4) {  // loads of 64 keys, then their products
          u32 a[4][4], b[4][2];
#pragma unroll
          for (int k = 0; k < 4; k++) {
            const int r = (k0 + k) * 16 + (l & 7) + (l >> 4) * 8;
            const bf* pp = &sp[(g & (GM - 1)) * SP + t * KT + (k0 + k) * 16 + q * 2];
            b[k][0] = g < G ? *(const u32*)pp : 0;
            b[k][1] = g < G ? *(const u32*)(pp + 8) : 0;
            ldmatrix_trans(a[k], base + r * 128 + ((((w & 3) * 2 + ((l >> 3) & 1)) ^ (r & 7)) << 4));
          }
#pragma unroll
          for (int k = 0; k < 4; k++) { mma16816(o, a[k], b[k][0], b[k][1]); mma16816(L, ones, b[k][0], b[k][1]); }
        }
      }
      mb_give_back(empty + 8 * s, true);
    }
    it += 2 * (nt - t0);
    if (nch - c0 == 1) {
      if (mine) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          int hd2 = q * 2 + (e & 1);
          // fma(O, 1, +0 * 0) and the same of L: the merge into nothing
          if (hd2 < G) O[((size_t)cseq * HQ + chk * G + hd2) * HD + w * 16 + g + (e >> 1) * 8] = tobf((o[e] + 0.f) * __fdiv_rn(1.f, L[e] + 0.f));
        }
      }
      bar();
    } else {
      float* pt = part + ((size_t)(cseq * HKV + chk) * maxch + cc) * G * PS;
      if (mine) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          int hd2 = q * 2 + (e & 1);
          if (hd2 < G) {
            pt[hd2 * PS + w * 16 + g + (e >> 1) * 8] = o[e];
            if (w == 0 && g == 0 && e < 2) { pt[hd2 * PS + HD] = ss[GM * SP - 8 + hd2]; pt[hd2 * PS + HD + 1] = L[e]; }
          }
        }
      }
      bar();
      if (threadIdx.x == 0) {
        int v;
        asm volatile("atom.acq_rel.gpu.global.add.s32 %0,[%1],1;" : "=r"(v) : "l"(count + cseq * HKV + chk) : "memory");
        *flag = v;
        if (v == nch - c0 - 1) count[cseq * HKV + chk] = 0;
      }
      bar();
      if (*flag == nch - c0 - 1) {
        const float* p0 = part + (size_t)(cseq * HKV + chk) * maxch * G * PS;
        for (int x = threadIdx.x; x < G * (HD / 2); x += 256) {
          const int hd2 = x / (HD / 2), d = x % (HD / 2) * 2;
          float Mt = -INF, Lt = 0, x0 = 0, x1 = 0;
#pragma unroll 16
          for (int k = c0; k < nch; k++) {
            const float* p = p0 + ((size_t)k * G + hd2) * PS;
            float2 ov = __ldcg((const float2*)(p + d)), ml = __ldcg((const float2*)(p + HD));
            float N = fmaxf(Mt, ml.x), a = ex2(Mt - N), b = ex2(ml.x - N);
            Lt = fmaf(ml.y, b, Lt * a); x0 = fmaf(ov.x, b, x0 * a); x1 = fmaf(ov.y, b, x1 * a);
            Mt = N;
          }
          float f = __fdiv_rn(1.f, Lt);
          *(u32*)(O + ((size_t)cseq * HQ + chk * G + hd2) * HD + d) = pack(x0 * f, x1 * f);
        }
      }
      bar();
    }
  }
}
