// y = bf16(y + bias), for products of the vendor family. Grid: (n / 256, rows).
#include "common.cuh"
extern "C" __global__ void __launch_bounds__(256) add_bias(bf* y, const float* bias, int n) {
  let_next_start();
  wait_for_previous();
  int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= n) return;
  bf* at = y + (size_t)blockIdx.y * n + i;
  *at = tobf(f32(*at) + bias[i]);
}
