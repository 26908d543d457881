// A synthetic matrix where it is needed (crates/model/src/weights.rs, Recipe): element 4 g + i is bf16((sum of the bytes of word i of
// Philox4x32-10 - 510) * factor), key (seed), counter (g, 0, tensor, 0x53594e54). Grid: any; 256 threads. n below 2^32.
#include "common.cuh"
extern "C" __global__ void __launch_bounds__(256) synthetic(bf* out, u32 n, u32 seed0, u32 seed1, u32 tensor, float factor) {
  let_next_start();
  wait_for_previous();
  for (u64 g = (u64)blockIdx.x * 256 + threadIdx.x; 4 * g < n; g += (u64)gridDim.x * 256) {
    u32 c[4] = {(u32)g, 0, tensor, 0x53594e54u}, k0 = seed0, k1 = seed1;
#pragma unroll
    for (int r = 0; r < 10; r++) {
      u32 h0 = __umulhi(0xD2511F53u, c[0]), l0 = 0xD2511F53u * c[0], h1 = __umulhi(0xCD9E8D57u, c[2]), l1 = 0xCD9E8D57u * c[2];
      c[0] = h1 ^ c[1] ^ k0; c[1] = l1; c[2] = h0 ^ c[3] ^ k1; c[3] = l0;
      k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int sum = (int)((c[i] & 255) + (c[i] >> 8 & 255) + (c[i] >> 16 & 255) + (c[i] >> 24)) - 510;
      if (4 * g + i < n) out[4 * g + i] = tobf((float)sum * factor);
    }
  }
}
