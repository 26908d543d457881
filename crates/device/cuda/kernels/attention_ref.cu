// Plain attention of any head size, window and position by the integer model of the k16 step: what the fast kernels are
// checked against. Grid: (rows, heads); 256 threads, thread c < d owning column c. K and V in pages (common.cuh).
// q, o: [rows][heads][d]. sequence[row], position[row] (-1: a row of padding, left alone); table: [sequences][most] pages.
#include "k16.cuh"
extern "C" __global__ void __launch_bounds__(256) attention_ref(const bf* q, const u8* pool, bf* o, const int* sequence,
    const int* position, const int* table, int most, int hq, int hkv, int d, int tile, int window, float scale) {
  __shared__ float S[128];
  __shared__ bf P[128];
  let_next_start();
  wait_for_previous();
  const int row = blockIdx.x, h = blockIdx.y, hk = h / (hq / hkv), t = threadIdx.x, p = position[row];
  if (p < 0) return;
  const bf* qr = q + ((size_t)row * hq + h) * d;
  const int* pages = table + (size_t)sequence[row] * most;
  const int lo = window > 0 ? max(0, p + 1 - window) : 0, hi = p + 1;
  const size_t pair = 2 * (size_t)hkv * PAGE(d);
  auto kpage = [&](int j) { return pool + pages[j >> 6] * pair + (size_t)hk * PAGE(d); };
  float Mt = -INF, Lt = 0, Ot = 0;
  for (int from = lo; from < hi;) {
    const int end = min(hi, (from / 512 + 1) * 512);
    float M = -INF;
    u32 acc = 0, L = 0;
    for (int first = from; first < end;) {
      const int stop = min(end, (first / tile + 1) * tile), base = first / 16 * 16, n = (stop - base + 15) / 16 * 16;
      __syncthreads();
      for (int i = t; i < n; i += 256) {
        int j = base + i;
        float s = -INF;
        if (j >= first && j < stop) {
          const u8* page = kpage(j);
          u32 c = 0;
          for (int k = 0; k < d; k += 16) {
            bf a[16], b[16];
            for (int e = 0; e < 16; e++) { a[e] = k + e < d ? qr[k + e] : 0; b[e] = k + e < d ? *(const bf*)(page + in_page(j & 63, k + e)) : 0; }
            c = k16_step(a, b, c);
          }
          s = __uint_as_float(c);
        }
        S[i] = s;
      }
      __syncthreads();
      float T = -INF;
      for (int i = 0; i < n; i++) if (base + i >= first && base + i < stop) T = S[i] > T ? S[i] : T;
      float N = rint_(T * scale);
      N = N > M ? N : M;
      if (N > M) {
        float a = ex2(M - N);
        acc = __float_as_uint(__uint_as_float(acc) * a);
        L = __float_as_uint(__uint_as_float(L) * a);
        M = N;
      }
      for (int i = t; i < n; i += 256) P[i] = base + i >= first && base + i < stop ? tobf(ex2(fmaf(S[i], scale, -M))) : 0;
      __syncthreads();
      for (int i = 0; i < n; i += 16) {
        bf v[16], one[16];
        for (int e = 0; e < 16; e++) {
          int j = base + i + e;
          v[e] = t < d && j >= first && j < stop ? *(const bf*)(kpage(j) + (size_t)hkv * PAGE(d) + in_page(j & 63, t)) : 0;
          one[e] = 0x3f80;
        }
        acc = k16_step(P + i, v, acc);
        L = k16_step(P + i, one, L);
      }
      first = stop;
    }
    if (!(M > -INF && M < INF)) { M = 0; L = acc = 0x7fffffff; }
    float N = fmaxf(Mt, M), a = ex2(Mt - N), b = ex2(M - N);
    Ot = fmaf(__uint_as_float(acc), b, Ot * a);
    Lt = fmaf(__uint_as_float(L), b, Lt * a);
    Mt = N;
    from = end;
  }
  if (t < d) o[((size_t)row * hq + h) * d + t] = tobf(Ot * __fdiv_rn(1.f, Lt));
}
