#pragma once
// The exact scalar model of one k16 step of sm_90: c + sum of 16 products of bf16, f32 accumulator. NUMERICS.md gives
// it in words, crates/numerics/src/k16.rs as code.
#include "common.cuh"
__device__ inline u32 k16_step(const bf* a, const bf* b, u32 c) {
  int E = -133;
  bool nan = false, pi = false, ni = false;
  for (int k = 0; k < 16; k++) {
    u32 x = a[k], y = b[k];
    int ex = (x >> 7) & 255, ey = (y >> 7) & 255;
    bool zx = !(x & 0x7fff), zy = !(y & 0x7fff);
    if (ex == 255 || ey == 255) {
      if ((ex == 255 && (x & 127)) || (ey == 255 && (y & 127)) || zx || zy) nan = true;
      else if ((x ^ y) & 0x8000) ni = true;
      else pi = true;
      continue;
    }
    if (!zx && !zy) E = max(E, max(ex, 1) + max(ey, 1) - 254);
  }
  int ec = (c >> 23) & 255;
  u32 mc = c & 0x7fffff;
  if (ec == 255) {
    if (mc) nan = true;
    else if (c >> 31) ni = true;
    else pi = true;
  }
  if (nan || (pi && ni)) return 0x7fffffff;
  if (pi) return 0x7f800000;
  if (ni) return 0xff800000;
  if (ec) mc |= 1 << 23;
  if (mc) E = max(E, max(ec, 1) - 127);
  long long s = 0;
  for (int k = 0; k < 16; k++) {
    u32 x = a[k], y = b[k];
    int ex = (x >> 7) & 255, ey = (y >> 7) & 255;
    u32 m = ((x & 127) | (ex ? 128 : 0)) * ((y & 127) | (ey ? 128 : 0));
    if (!m) continue;
    int sh = E - (max(ex, 1) + max(ey, 1) - 254);
    long long t = sh > 31 ? 0 : (m << 11) >> sh;
    s += ((x ^ y) & 0x8000) ? -t : t;
  }
  {
    int sh = E - (max(ec, 1) - 127);
    long long t = sh > 31 ? 0 : (mc << 2) >> sh;
    s += (c >> 31) ? -t : t;
  }
  if (!s) return 0;
  u32 sign = s < 0 ? 0x80000000u : 0;
  u64 u = s < 0 ? -s : s;
  int top = 63 - __clzll(u) + E - 25;  // exponent of the leading bit
  if (top > 127) return sign | 0x7f800000;
  int sh = max(top - 23, -149) - (E - 25);
  u32 m = sh >= 0 ? (sh > 63 ? 0 : (u32)(u >> sh)) : (u32)(u << -sh);
  if (!m) return 0;
  return sign | (top >= -126 ? (u32)((top + 126) << 23) + m : m);
}
