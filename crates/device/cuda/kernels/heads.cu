// q, k: RMSNorm a head where there is one (not rounded), then RoPE, rounded once. q to qo; k and v into their pages.
// qkv: [tokens][(heads + 2 kv_heads) d]. Some lanes a query head or a pair of k and v; grid: (heads + kv_heads in blocks of 128
// threads, tokens); d even, at most 256. position[t]: a row of cosines and sines.
// slot[t]: page * 64 + place, or -1: k and v of this token are not kept. clear[t]: so many places after it become +0.
// Where k or v of a head has a value that is not finite, k is kept as NaN and v as +0: whoever sees the position gets
// NaN, whoever does not gets nothing of it.
#include "common.cuh"
// RoPE's two results for the pair (i, i + d / 2)
__device__ __forceinline__ void rotate(float a, float b, float c, float s, bf& y0, bf& y1) {
  y0 = tobf(fmaf(a, c, -(b * s)));
  y1 = tobf(fmaf(b, c, a * s));
}
struct Place {
  int place, last;
  u8 *k, *v;
};
// Any width, element by element. x: room for a head.
__device__ __noinline__ void any(const bf* in, const float* w, const float* c, const float* s, bf* out, Place at, int hkv, int d, float eps, float* x) {
  const int l = threadIdx.x & 31, half = d / 2;
  float acc = 0;
  // Lane i / 8: every lane of the 128 that has elements (d <= 256) is a thread of this warp.
  for (int i = l * 8; i < min(l * 8 + 8, d); i++) { float v = f32(in[i]); x[i] = v; acc = fmaf(v, v, acc); }
  if (w) {
    for (int s = 16; s; s >>= 1) acc = acc + __shfl_down_sync(~0u, acc, s);  // lanes past the warp are +0
    acc = __shfl_sync(~0u, acc, 0);
    float r = __fdiv_rn(1.f, __fsqrt_rn(__fdiv_rn(acc, (float)d) + eps));
    for (int i = l * 8; i < min(l * 8 + 8, d); i++) x[i] = (x[i] * r) * w[i];
  }
  __syncwarp();
  if (out) {
    for (int i = l; i < half; i += 32) rotate(x[i], x[i + half], c[i], s[i], out[i], out[i + half]);
    return;
  }
  const bf* value = in + hkv * d;
  bool good = true;
  for (int i = l; i < half; i += 32) {
    bf y0, y1;
    rotate(x[i], x[i + half], c[i], s[i], y0, y1);
    good = good && finite(y0) && finite(y1) && finite(value[i]) && finite(value[i + half]);
  }
  good = __all_sync(~0u, good);
  for (int i = l; i < half; i += 32) {
    bf y0, y1;
    rotate(x[i], x[i + half], c[i], s[i], y0, y1);
    int a = in_page(at.place, i), b = in_page(at.place, i + half);
    *(bf*)(at.k + a) = good ? y0 : 0x7fff;
    *(bf*)(at.k + b) = good ? y1 : 0x7fff;
    *(bf*)(at.v + a) = good ? value[i] : 0;
    *(bf*)(at.v + b) = good ? value[i + half] : 0;
    for (int e = at.place + 1; e <= at.last; e++) {
      a = in_page(e, i), b = in_page(e, i + half);
      *(bf*)(at.k + a) = 0; *(bf*)(at.k + b) = 0; *(bf*)(at.v + a) = 0; *(bf*)(at.v + b) = 0;
    }
  }
}
// Widths that are multiples of sixteen: of P lanes, a power of two, a lane owns eight elements, its partner those half a head away.
__device__ __forceinline__ void wide(const bf* in, const float4 (&ws)[2], bool norms, bool norm, const float4 (&cs)[4], bf* out, bool keep, Place at, int hkv, int d, int P, float eps) {
  const int l = threadIdx.x & (P - 1), lanes = d / 8, i = l * 8;
  const bool mine = keep && l < lanes, upper = l >= lanes / 2;
  alignas(16) bf raw[8], value[8];
  *(uint4*)raw = mine ? *(const uint4*)(in + i) : make_uint4(0, 0, 0, 0);
  *(uint4*)value = mine && !out ? *(const uint4*)(in + hkv * d + i) : make_uint4(0, 0, 0, 0);
  float x[8], acc = 0;
#pragma unroll
  for (int e = 0; e < 8; e++) { x[e] = f32(raw[e]); acc = fmaf(x[e], x[e], acc); }
  if (norms) {  // some head of the warp has one
    for (int s = P / 2; s; s >>= 1) acc = acc + __shfl_down_sync(~0u, acc, s, P);  // lanes past the head are +0, and so is what lies further
    acc = __shfl_sync(~0u, acc, 0, P);
    const float r = __fdiv_rn(1.f, __fsqrt_rn(__fdiv_rn(acc, (float)d) + eps));
    const float w[8] = {ws[0].x, ws[0].y, ws[0].z, ws[0].w, ws[1].x, ws[1].y, ws[1].z, ws[1].w};
#pragma unroll
    for (int e = 0; e < 8; e++) if (norm) x[e] = (x[e] * r) * w[e];
  }
  const float c[8] = {cs[0].x, cs[0].y, cs[0].z, cs[0].w, cs[1].x, cs[1].y, cs[1].z, cs[1].w};
  const float s[8] = {cs[2].x, cs[2].y, cs[2].z, cs[2].w, cs[3].x, cs[3].y, cs[3].z, cs[3].w};
  alignas(16) bf y[8];
  bool good = true;
#pragma unroll
  for (int e = 0; e < 8; e++) {
    const float other = __shfl_sync(~0u, x[e], upper ? l - lanes / 2 : l + lanes / 2, P);
    bf y0, y1;
    rotate(upper ? other : x[e], upper ? x[e] : other, c[e], s[e], y0, y1);
    y[e] = upper ? y1 : y0;
    good = good && (!mine || (finite(y[e]) && finite(value[e])));
  }
  const u32 bad = __ballot_sync(~0u, !good), own = (P == 32 ? ~0u : (1u << P) - 1) << (threadIdx.x & 31 & ~(P - 1));
  if (!mine) return;
  if (out) {
    *(uint4*)(out + i) = *(uint4*)y;
    return;
  }
  const u32 nan = 0x7fff7fffu;
  good = !(bad & own);
  *(uint4*)(at.k + in_page(at.place, i)) = good ? *(uint4*)y : make_uint4(nan, nan, nan, nan);
  *(uint4*)(at.v + in_page(at.place, i)) = good ? *(uint4*)value : make_uint4(0, 0, 0, 0);
  for (int e = at.place + 1; e <= at.last; e++) {
    *(uint4*)(at.k + in_page(e, i)) = make_uint4(0, 0, 0, 0);
    *(uint4*)(at.v + in_page(e, i)) = make_uint4(0, 0, 0, 0);
  }
}
// lanes: of a head, a power of two; 32 unless d is a multiple of 16.
extern "C" __global__ void __launch_bounds__(128) heads(const bf* qkv, bf* qo, u8* pool, const int* slot, const int* clear,
    const int* position, const float* cosines, const float* sines, const float* qw, const float* kw, int hq, int hkv, int d, int lanes, float eps) {
  __shared__ float x[4][256];
  const int first = (blockIdx.x * 128 + threadIdx.x) / lanes, l = threadIdx.x & (lanes - 1), t = blockIdx.y, half = d / 2;
  // Lists, tables and weights are written by no kernel: they are read while the kernel before still runs.
  const bool none = first >= hq + hkv, fast = d % 16 == 0;
  const int h = none ? 0 : first;
  const bool query = h < hq;
  const float* w = query ? qw : kw;
  const float *c = cosines + (size_t)position[t] * half, *s = sines + (size_t)position[t] * half;
  const int at = slot[t], hk = h - hq;
  float4 ws[2] = {}, cs[4] = {};
  if (fast && l * 8 < d) {
    const int i = l * 8 % half;
    if (w) { ws[0] = *(const float4*)(w + l * 8); ws[1] = *(const float4*)(w + l * 8 + 4); }
    cs[0] = *(const float4*)(c + i); cs[1] = *(const float4*)(c + i + 4);
    cs[2] = *(const float4*)(s + i); cs[3] = *(const float4*)(s + i + 4);
  }
  Place place = {at & 63, (at & 63) + clear[t], 0, 0};
  if (!query) {
    place.k = pool + ((size_t)(at >> 6) * 2 * hkv + hk) * PAGE(d);
    place.v = place.k + (size_t)hkv * PAGE(d);
  }
  wait_for_previous();
  // Not before: attention started beside the product before would crowd on the multiprocessors that the product leaves free.
  let_next_start();
  const bool keep = !none && (query || at >= 0);
  const bf* in = qkv + ((size_t)t * (hq + 2 * hkv) + h) * d;
  bf* out = query ? qo + ((size_t)t * hq + h) * d : 0;
  if (fast) wide(in, ws, qw || kw, w != 0, cs, out, keep, place, hkv, d, lanes, eps);
  else if (keep) any(in, w, c, s, out, place, hkv, d, eps, x[threadIdx.x >> 5]);
}
// Sixteen elements of a head: eight, and those half a head behind.
struct Sixteen { uint4 a, b; };
__device__ __forceinline__ Sixteen sixteen(const bf* at, int d) { return {*(const uint4*)at, *(const uint4*)(at + d / 2)}; }
__device__ __forceinline__ void widened(const uint4& v, float (&x)[8]) {
  const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int e = 0; e < 4; e++) { x[e * 2] = f32((bf)w[e]); x[e * 2 + 1] = f32((bf)(w[e] >> 16)); }
}
__device__ __forceinline__ bool finite(const uint4& v) {
  const u32 w[4] = {v.x, v.y, v.z, v.w};
  bool all = true;
#pragma unroll
  for (int e = 0; e < 4; e++) all = all && finite((bf)w[e]) && finite((bf)(w[e] >> 16));
  return all;
}
__device__ __forceinline__ void into(u8* page, int token, int i, int d, const Sixteen& v) {
  *(uint4*)(page + in_page(token, i)) = v.a;
  *(uint4*)(page + in_page(token, i + d / 2)) = v.b;
}
// Elements from i on and from i + d / 2 on, normed where there is a w, and turned.
__device__ __forceinline__ Sixteen turned(const Sixteen& in, const float* w, bool norms, const float (&c)[8], const float (&s)[8], int i, int d, int lanes, float eps) {
  float x[8], y[8];
  widened(in.a, x);
  widened(in.b, y);
  if (norms) {  // some head of the warp has one
    float a = 0, b = 0;
#pragma unroll
    for (int e = 0; e < 8; e++) { a = fmaf(x[e], x[e], a); b = fmaf(y[e], y[e], b); }
    a = a + b;  // the tree's first step; both lanes of a pair get the same sum
    for (int o = lanes / 2; o; o >>= 1) a = a + __shfl_xor_sync(~0u, a, o);
    const float r = __fdiv_rn(1.f, __fsqrt_rn(__fdiv_rn(a, (float)d) + eps));
    if (w) {
#pragma unroll
      for (int k = 0; k < 8; k += 4) {
        const float4 f = *(const float4*)(w + i + k), g = *(const float4*)(w + d / 2 + i + k);
        const float fs[4] = {f.x, f.y, f.z, f.w}, gs[4] = {g.x, g.y, g.z, g.w};
#pragma unroll
        for (int e = 0; e < 4; e++) { x[k + e] = (x[k + e] * r) * fs[e]; y[k + e] = (y[k + e] * r) * gs[e]; }
      }
    }
  }
  u32 lo[4], hi[4];
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const int f = e * 2, g = f + 1;
    lo[e] = pack(fmaf(x[f], c[f], -(y[f] * s[f])), fmaf(x[g], c[g], -(y[g] * s[g])));
    hi[e] = pack(fmaf(y[f], c[f], x[f] * s[f]), fmaf(y[g], c[g], x[g] * s[g]));
  }
  return {make_uint4(lo[0], lo[1], lo[2], lo[3]), make_uint4(hi[0], hi[1], hi[2], hi[3])};
}
// The same as `heads` for many tokens, d = 16, 32, ... 256: of d / 16 lanes a head each owns both elements of its pairs, and has
// two heads under way. Grid: tokens; threads: a multiple of 32, at most 256.
extern "C" __global__ void __launch_bounds__(256, 3) heads_many(const bf* qkv, bf* qo, u8* pool, const int* slot, const int* clear,
    const int* position, const float* cosines, const float* sines, const float* qw, const float* kw, int hq, int hkv, int d, int lanes, float eps) {
  const int group = threadIdx.x / lanes, i = (threadIdx.x & (lanes - 1)) * 8, groups = blockDim.x / lanes, t = blockIdx.x, all = hq + hkv;
  const int at = slot[t];
  const float *cp = cosines + (size_t)position[t] * (d / 2) + i, *sp = sines + (size_t)position[t] * (d / 2) + i;
  float c[8], s[8];
#pragma unroll
  for (int k = 0; k < 8; k += 4) { *(float4*)(c + k) = *(const float4*)(cp + k); *(float4*)(s + k) = *(const float4*)(sp + k); }
  const u32 own = ((1u << lanes) - 1) << (threadIdx.x & 31 & ~(lanes - 1));
  wait_for_previous();
  let_next_start();  // not before: see above
  const bf* in = qkv + (size_t)t * (hq + 2 * hkv) * d + i;
  for (int first = 0; first < all; first += groups * 2) {
    Sixteen y[2], value[2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const int h = min(first + n * groups + group, all - 1);
      y[n] = sixteen(in + h * d, d);
      value[n] = {};
      if (h >= hq) value[n] = sixteen(in + (h + hkv) * d, d);
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const int h = first + n * groups + group;
      const bool query = h < hq;
      y[n] = turned(y[n], query ? qw : kw, qw || kw, c, s, i, d, lanes, eps);
      if (query) {
        bf* out = qo + ((size_t)t * hq + h) * d + i;
        *(uint4*)out = y[n].a;
        *(uint4*)(out + d / 2) = y[n].b;
      }
      if (__all_sync(~0u, query)) continue;
      const u32 bad = __ballot_sync(~0u, !(finite(y[n].a) && finite(y[n].b) && finite(value[n].a) && finite(value[n].b)));
      if (query || h >= all || at < 0) continue;
      if (bad & own) {
        const u32 nan = 0x7fff7fffu;
        y[n].a = y[n].b = make_uint4(nan, nan, nan, nan);
        value[n] = {};
      }
      u8 *k = pool + ((size_t)(at >> 6) * 2 * hkv + (h - hq)) * PAGE(d), *v = k + (size_t)hkv * PAGE(d);
      into(k, at & 63, i, d, y[n]);
      into(v, at & 63, i, d, value[n]);
      for (int e = (at & 63) + 1; e <= (at & 63) + clear[t]; e++) { into(k, e, i, d, {}); into(v, e, i, d, {}); }
    }
  }
}
