// y = bf16(bf16(act(gate)) * up). gate_up: [tokens][2 n], gate first. act: 0 silu, 1 gelu_tanh.
#include "math.cuh"
// Four elements a thread; grid: (n / 512, tokens), 128 threads.
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
    for (int e = 0; e < 4; e++) g[e] = times(activated(g[e], act), u[e]);
    *(uint2*)(out + i) = *(uint2*)g;
    return;
  }
  for (int e = i; e < min(i + 4, n); e++) out[e] = times(activated(row[e], act), row[n + e]);
}
// The activation of every bf16, by its bits. Grid: 512 blocks of 128 threads.
extern "C" __global__ void __launch_bounds__(128) activation_table(bf* table, int act) {
  let_next_start();
  wait_for_previous();
  const int i = blockIdx.x * 128 + threadIdx.x;
  table[i] = activated((bf)i, act);
}
// The same as `activation` by that table, for many tokens; n a multiple of 8. 128 KB of dynamic shared memory, 1024 threads, any grid.
extern "C" __global__ void __launch_bounds__(1024, 1) activation_many(const bf* gate_up, bf* y, const bf* table, int n, int tokens) {
  extern __shared__ __align__(16) bf values[];
  let_next_start();
  // No kernel of a step writes the table.
  for (int i = threadIdx.x; i < 8192; i += 1024) ((uint4*)values)[i] = ((const uint4*)table)[i];
  __syncthreads();
  wait_for_previous();
  const u32 groups = n / 8;
  const u64 most = (u64)groups * tokens;
  for (u64 i = (u64)blockIdx.x * 1024 + threadIdx.x; i < most; i += (u64)gridDim.x * 1024) {
    const u32 t = (u32)i / groups, c = (u32)i % groups * 8;
    alignas(16) bf g[8], u[8];
    const bf* row = gate_up + (size_t)t * 2 * n + c;
    *(uint4*)g = *(const uint4*)row;
    *(uint4*)u = *(const uint4*)(row + n);
#pragma unroll
    for (int e = 0; e < 8; e++) g[e] = times(values[g[e]], u[e]);
    *(uint4*)(y + (size_t)t * n + c) = *(uint4*)g;
  }
}
