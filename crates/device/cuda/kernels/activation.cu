// y = bf16(bf16(act(gate)) * up). gate_up: [tokens][2 n], gate first. Four elements a thread; grid: (n / 512, tokens), 128 threads.
// act: 0 silu, 1 gelu_tanh.
#include "math.cuh"
__device__ __forceinline__ bf gated(bf gate, bf up, int act) {
  float g = f32(gate);
  return tobf(f32(tobf(act ? gelu_tanh(g) : silu(g))) * f32(up));
}
extern "C" __global__ void __launch_bounds__(128) activation(const bf* gate_up, bf* y, int n, int act) {
  let_next_start();
  wait_for_previous();
  const int i = (blockIdx.x * 128 + threadIdx.x) * 4;
  if (i >= n) return;
  const bf* row = gate_up + (size_t)blockIdx.y * 2 * n;
  bf* out = y + (size_t)blockIdx.y * n;
  if (n % 4 == 0) {
    alignas(8) bf g[4], u[4];
    *(uint2*)g = *(const uint2*)(row + i);
    *(uint2*)u = *(const uint2*)(row + n + i);
#pragma unroll
    for (int e = 0; e < 4; e++) g[e] = gated(g[e], u[e], act);
    *(uint2*)(out + i) = *(uint2*)g;
    return;
  }
  for (int e = i; e < min(i + 4, n); e++) out[e] = gated(row[e], row[n + e], act);
}
