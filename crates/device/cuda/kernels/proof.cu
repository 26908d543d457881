// For proofs that another product gives the chain's bits. adverse: rows of bf16 whose exponents are wide (2^-20 ... 2^20), whose
// eighths are zeros, or which are ordinary, in turn. differ: sets the flag where words differ. Grids: any; 256 threads.
#include "common.cuh"
extern "C" __global__ void __launch_bounds__(256) adverse(bf* x, u32 n, u32 width, u32 seed) {
  let_next_start();
  wait_for_previous();
  for (u64 i = (u64)blockIdx.x * 256 + threadIdx.x; i < n; i += (u64)gridDim.x * 256) {
    u32 h = (u32)i * 0x9E3779B9u + seed;
    h = (h ^ h >> 16) * 0x85EBCA6Bu; h = (h ^ h >> 13) * 0xC2B2AE35u; h ^= h >> 16;
    u32 kind = (u32)(i / width) % 3, wide = 107 + (h >> 8) % 41, close = 122 + (h >> 8) % 6;
    bf v = (bf)((h & 0x8000) | (kind ? wide : close) << 7 | (h & 127));
    x[i] = kind == 2 && (h >> 16 & 7) == 0 ? 0 : v;
  }
}
extern "C" __global__ void __launch_bounds__(256) differ(const u32* a, const u32* b, u32 n, u32* flag) {
  let_next_start();
  wait_for_previous();
  bool other = false;
  for (u64 i = (u64)blockIdx.x * 256 + threadIdx.x; i < n; i += (u64)gridDim.x * 256) other |= a[i] != b[i];
  if (other) *flag = 1;
}
