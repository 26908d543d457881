// x[t] = table[ids[t]], times scale where there is one (rounded to bf16). Grid: tokens; 128 threads.
#include "common.cuh"
extern "C" __global__ void embed(const bf* table, const int* ids, bf* x, int width, int scaled, float scale) {
  let_next_start();
  wait_for_previous();
  const bf* row = table + (size_t)ids[blockIdx.x] * width;
  bf* out = x + (size_t)blockIdx.x * width;
  if (width % 8 == 0) {
    for (int i = threadIdx.x * 8; i < width; i += blockDim.x * 8) {
      alignas(16) bf v[8];
      *(uint4*)v = *(const uint4*)(row + i);
      if (scaled)
        for (int e = 0; e < 8; e++) v[e] = tobf(f32(v[e]) * scale);
      *(uint4*)(out + i) = *(uint4*)v;
    }
    return;
  }
  for (int i = threadIdx.x; i < width; i += blockDim.x) out[i] = scaled ? tobf(f32(row[i]) * scale) : row[i];
}
