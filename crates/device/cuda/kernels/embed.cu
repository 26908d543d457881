// x[t] = table[ids[t]], times scale where there is one (rounded to bf16). Grid: tokens; 128 threads.
#include "common.cuh"
extern "C" __global__ void embed(const bf* table, const int* ids, bf* x, int width, int scaled, float scale) {
  let_next_start();
  wait_for_previous();
  const bf* row = table + (size_t)ids[blockIdx.x] * width;
  bf* out = x + (size_t)blockIdx.x * width;
  for (int i = threadIdx.x; i < width; i += blockDim.x) out[i] = scaled ? tobf(f32(row[i]) * scale) : row[i];
}
