// q, k: RMSNorm a head where there is one (not rounded), then RoPE, rounded once. q to qo; k and v into their pages.
// qkv: [tokens][(heads + 2 kv_heads) d]. One warp a query head or a pair of k and v; grid: (heads + kv_heads, tokens), 32
// threads; d even, at most 256. position[t]: a row of cosines and sines.
// slot[t]: page * 64 + place, or -1: k and v of this token are not kept. clear[t]: so many places after it become +0.
// Where k or v of a head has a value that is not finite, k is kept as NaN and v as +0: whoever sees the position gets
// NaN, whoever does not gets nothing of it.
#include "common.cuh"
// RoPE's two results for the pair (i, i + d / 2)
__device__ __forceinline__ void rotate(float a, float b, float c, float s, bf& y0, bf& y1) {
  y0 = tobf(fmaf(a, c, -(b * s)));
  y1 = tobf(fmaf(b, c, a * s));
}
extern "C" __global__ void __launch_bounds__(32) heads(const bf* qkv, bf* qo, u8* pool, const int* slot, const int* clear,
    const int* position, const float* cosines, const float* sines, const float* qw, const float* kw, int hq, int hkv, int d, float eps) {
  __shared__ float x[256];
  let_next_start();
  wait_for_previous();
  const int h = blockIdx.x, t = blockIdx.y, l = threadIdx.x, half = d / 2;
  const bf* in = qkv + ((size_t)t * (hq + 2 * hkv) + h) * d;
  const float* w = h < hq ? qw : kw;
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
  const float *c = cosines + (size_t)position[t] * half, *s = sines + (size_t)position[t] * half;
  if (h < hq) {
    bf* out = qo + ((size_t)t * hq + h) * d;
    for (int i = l; i < half; i += 32) rotate(x[i], x[i + half], c[i], s[i], out[i], out[i + half]);
    return;
  }
  const int at = slot[t], place = at & 63, last = place + clear[t], hk = h - hq;
  if (at < 0) return;
  const bf* value = in + hkv * d;
  u8 *kp = pool + ((size_t)(at >> 6) * 2 * hkv + hk) * PAGE(d), *vp = kp + (size_t)hkv * PAGE(d);
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
    int a = in_page(place, i), b = in_page(place, i + half);
    *(bf*)(kp + a) = good ? y0 : 0x7fff;
    *(bf*)(kp + b) = good ? y1 : 0x7fff;
    *(bf*)(vp + a) = good ? value[i] : 0;
    *(bf*)(vp + b) = good ? value[i + half] : 0;
    for (int e = place + 1; e <= last; e++) {
      a = in_page(e, i), b = in_page(e, i + half);
      *(bf*)(kp + a) = 0; *(bf*)(kp + b) = 0; *(bf*)(vp + a) = 0; *(bf*)(vp + b) = 0;
    }
  }
}
