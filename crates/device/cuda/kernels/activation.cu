// y = bf16(bf16(act(gate)) * up). gate_up: [tokens][2 n], gate first. Grid: (n / 256, tokens). act: 0 silu, 1 gelu_tanh.
#include "math.cuh"
extern "C" __global__ void __launch_bounds__(256) activation(const bf* gate_up, bf* y, int n, int act) {
  let_next_start();
  wait_for_previous();
  int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= n) return;
  const bf* row = gate_up + (size_t)blockIdx.y * 2 * n;
  float g = f32(row[i]);
  bf a = tobf(act ? gelu_tanh(g) : silu(g));
  y[(size_t)blockIdx.y * n + i] = tobf(f32(a) * f32(row[n + i]));
}
