#pragma once
// Elementary functions of NUMERICS.md, section 8, to the bit.
#include "common.cuh"
template <int N> __device__ __forceinline__ float horner(const u32 (&c)[N], float x) {
  float p = __uint_as_float(c[N - 1]);
#pragma unroll
  for (int i = N - 2; i >= 0; i--) p = fmaf(p, x, __uint_as_float(c[i]));
  return p;
}
// p * 2^n in two exact-power factors
__device__ __forceinline__ float scale2(float p, int n) {
  int h = n >> 1;
  return (p * __int_as_float((h + 127) << 23)) * __int_as_float((n - h + 127) << 23);
}
__device__ __forceinline__ float exp_(float x) {
  const u32 C[7] = {0x3f800000, 0x3f800000, 0x3efffffc, 0x3e2aaa47, 0x3d2aadcb, 0x3c091de8, 0x3ab429a9};
  if (x != x) return x;
  x = x < -104.f ? -104.f : x > 89.f ? 89.f : x;
  float n = rint_(x * __uint_as_float(0x3fb8aa3b));
  float r = fmaf(n, -__uint_as_float(0x3f317218), x);
  r = fmaf(n, -__uint_as_float(0xb102e308), r);
  return scale2(horner(C, r), (int)n);
}
__device__ __forceinline__ float ln_(float x) {
  const u32 C[9] = {0x3eaaaaa3, 0xbe800005, 0x3e4cd2a3, 0xbe2aad72, 0x3e11967d, 0xbdfe26d0, 0x3df3d2a7, 0xbdeeb288, 0x3d88e43a};
  if (x != x || x < 0.f) return __int_as_float(0x7fffffff);
  if (x == 0.f) return -INF;
  if (x == INF) return x;
  int e0 = 0;
  if (x < __int_as_float(0x00800000)) { x = x * 8388608.f; e0 = -23; }
  int t = __float_as_int(x) - 0x3f3504f3;
  float e = (float)((t >> 23) + e0), m = __int_as_float((t & 0x7fffff) + 0x3f3504f3);
  float f = m - 1.f;
  float r = fmaf(f * f, fmaf(horner(C, f), f, -0.5f), f);
  return fmaf(e, __uint_as_float(0x3f317218), fmaf(e, __uint_as_float(0xb102e308), r));
}
__device__ __forceinline__ float tanh_(float x) {
  const u32 C[5] = {0xbeaaaaa5, 0x3e08867e, 0xbd5c9134, 0x3cac87e7, 0xbbcd224f};
  float a = __int_as_float(__float_as_int(x) & 0x7fffffff), a2 = a * a;
  float near = fmaf(a2 * horner(C, a2), a, a);
  float far = 1.f - __fdiv_rn(2.f, exp_(a + a) + 1.f);
  float y = a < __uint_as_float(0x3f0ccccd) ? near : far;
  return __int_as_float((__float_as_int(y) & 0x7fffffff) | (__float_as_int(x) & 0x80000000));
}
__device__ __forceinline__ float silu(float x) { return __fdiv_rn(x, 1.f + exp_(-x)); }
__device__ __forceinline__ float gelu_tanh(float x) {
  float u = __uint_as_float(0x3f4c422a) * fmaf(__uint_as_float(0x3d372713) * (x * x), x, x);
  return (0.5f * x) * (1.f + tanh_(u));
}
// A gate's activation, 0 silu, 1 gelu_tanh, and its product with `up`; each rounds.
__device__ __forceinline__ bf activated(bf gate, int act) {
  float g = f32(gate);
  return tobf(act ? gelu_tanh(g) : silu(g));
}
__device__ __forceinline__ bf times(bf a, bf up) { return tobf(f32(a) * f32(up)); }
