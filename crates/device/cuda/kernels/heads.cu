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
