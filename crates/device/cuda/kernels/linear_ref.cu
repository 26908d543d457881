// Plain products, one thread an output, by the integer model of the k16 step: what the fast ones are checked against.
// y = x . W^T + bias; W: [n][k], x: [tokens][k]; bf16 to yb, or f32 to yf where that is given. Grid: (n / 128, tokens).
#include "k16.cuh"
extern "C" __global__ void __launch_bounds__(128) linear_ref(const bf* x, const bf* w, const float* bias, bf* yb, float* yf, int n, int k) {
  let_next_start();
  wait_for_previous();
  int o = blockIdx.x * 128 + threadIdx.x;
  if (o >= n) return;
  const bf *xr = x + (size_t)blockIdx.y * k, *wr = w + (size_t)o * k;
  u32 acc = 0;
  for (int i = 0; i < k; i += 16) {
    bf a[16], b[16];
    for (int j = 0; j < 16; j++) { a[j] = i + j < k ? xr[i + j] : 0; b[j] = i + j < k ? wr[i + j] : 0; }
    acc = k16_step(a, b, acc);
  }
  float y = __uint_as_float(acc);
  if (bias) y = y + bias[o];
  size_t at = (size_t)blockIdx.y * n + o;
  if (yf) yf[at] = y; else yb[at] = tobf(y);
}
