#pragma once
// Instructions of sm_90: matrix steps from registers, barriers in shared memory, bulk copies.
#include "common.cuh"
__device__ __forceinline__ u32 sm(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// d += A (16 x 16) . B (16 x 8)
__device__ __forceinline__ void mma16816(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)); }
__device__ __forceinline__ void ldmatrix(u32 (&a)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory"); }
__device__ __forceinline__ void ldmatrix_trans(u32 (&a)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory"); }
__device__ __forceinline__ void mb_init(u32 b, u32 n) { asm volatile("mbarrier.init.shared.b64 [%0],%1;" :: "r"(b), "r"(n)); }
__device__ __forceinline__ void mb_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void mb_expect(u32 b, u32 n) { asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" :: "r"(b), "r"(n) : "memory"); }
__device__ __forceinline__ void mb_arrive(u32 b) { asm volatile("mbarrier.arrive.shared.b64 _,[%0];" :: "r"(b) : "memory"); }
// Gives a slot back to the copy engine: what this thread has read from it by ordinary loads (ldmatrix too) has been read. An
// arrival alone does not wait for them: beside a kernel that keeps the load units busy, the engine overtook the last ones.
__device__ __forceinline__ void mb_give_back(u32 b, bool arrives) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  if (arrives) mb_arrive(b);
}
__device__ __forceinline__ void mb_wait(u32 b, u32 phase) {
  asm volatile("{.reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p,[%0],%1; @p bra D; bra W; D:}" :: "r"(b), "r"(phase) : "memory"); }
// n contiguous bytes
__device__ __forceinline__ void bulk(u32 dst, const void* src, u32 n, u32 b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" :: "r"(dst), "l"(src), "r"(n), "r"(b) : "memory"); }
// A box of a matrix; what lies outside the matrix arrives as zeros.
struct alignas(64) TMap { u8 b[128]; };
__device__ __forceinline__ void tma(u32 dst, const TMap* m, int x, int y, u32 bar, u64 policy) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1,{%2,%3}],[%4],%5;"
    :: "r"(dst), "l"(m), "r"(x), "r"(y), "r"(bar), "l"(policy) : "memory"); }
__device__ __forceinline__ u64 evict_first() { u64 p; asm("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(p)); return p; }
__device__ __forceinline__ u64 evict_last() { u64 p; asm("createpolicy.fractional.L2::evict_last.b64 %0,1.0;" : "=l"(p)); return p; }
__device__ __forceinline__ void add(u32* p, u32 v) { asm volatile("red.shared.add.u32 [%0],%1;" :: "r"(sm(p)), "r"(v) : "memory"); }
// Adds 1 and gives what was there.
__device__ __forceinline__ u32 take(u32* p) { u32 v; asm volatile("atom.shared.add.u32 %0,[%1],1;" : "=r"(v) : "r"(sm(p)) : "memory"); return v; }
// What is there, told by others meanwhile.
__device__ __forceinline__ u32 told(u32* p) { u32 v; asm volatile("atom.shared.or.b32 %0,[%1],0;" : "=r"(v) : "r"(sm(p)) : "memory"); return v; }
