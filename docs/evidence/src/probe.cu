// Probes of the k16 step and of ex2.approx. Every gemm kernel here computes, for one batch (blockIdx.y),
// D[64][256] = C[64][256] continued by the chain over K of A[64][K] . B[256][K], one k16 step per 16 columns ascending.
// zero != 0: C is ignored and the first step uses scale-d = 0 (wgmma) or +0 registers (mma.sync).
#include "wgmma.h"
__device__ inline u32 ld2(const bf*p){return *(const u32*)p;}

// A rows on the 16-row side. grid (16, batches), 128 threads: warp w -> rows 16w.., blockIdx.x -> two n8 column groups.
extern "C" __global__ void g_mma(const bf*A,const bf*B,const float*C,float*D,int K,int zero){
  A+=(size_t)blockIdx.y*64*K; B+=(size_t)blockIdx.y*256*K; C+=(size_t)blockIdx.y*16384; D+=(size_t)blockIdx.y*16384;
  int w=threadIdx.x>>5,l=threadIdx.x&31,g=l>>2,q=l&3;
  for(int t=0;t<2;t++){ int r=w*16+g,c=blockIdx.x*16+t*8; float d[4];
    for(int i=0;i<4;i++) d[i]=zero?0.f:C[(r+(i>>1)*8)*256+c+q*2+(i&1)];
    for(int k=0;k<K;k+=16){ const bf*a=A+(size_t)r*K+k+q*2,*b=B+(size_t)(c+g)*K+k+q*2;
      u32 ar[4]={ld2(a),ld2(a+8*K),ld2(a+8),ld2(a+8*K+8)}; mma16816(d,ar,ld2(b),ld2(b+8)); }
    for(int i=0;i<4;i++) D[(r+(i>>1)*8)*256+c+q*2+(i&1)]=d[i]; }
}
// B rows on the 16-row side. grid (16, batches), 128 threads: blockIdx.x -> 16 rows of B, warp w -> two n8 groups of A rows.
extern "C" __global__ void g_mma_swap(const bf*A,const bf*B,const float*C,float*D,int K,int zero){
  A+=(size_t)blockIdx.y*64*K; B+=(size_t)blockIdx.y*256*K; C+=(size_t)blockIdx.y*16384; D+=(size_t)blockIdx.y*16384;
  int w=threadIdx.x>>5,l=threadIdx.x&31,g=l>>2,q=l&3;
  for(int t=0;t<2;t++){ int c=blockIdx.x*16+g,r=w*16+t*8; float d[4];
    for(int i=0;i<4;i++) d[i]=zero?0.f:C[(r+q*2+(i&1))*256+c+(i>>1)*8];
    for(int k=0;k<K;k+=16){ const bf*a=B+(size_t)c*K+k+q*2,*b=A+(size_t)(r+g)*K+k+q*2;
      u32 ar[4]={ld2(a),ld2(a+8*K),ld2(a+8),ld2(a+8*K+8)}; mma16816(d,ar,ld2(b),ld2(b+8)); }
    for(int i=0;i<4;i++) D[(r+q*2+(i&1))*256+c+(i>>1)*8]=d[i]; }
}
// wgmma m64nNk16, no swizzle. grid (256/N, batches), 128 threads.
template<int N,int RS> __device__ void g_wg(const bf*A,const bf*B,const float*C,float*D,int K,int zero){
  __shared__ __align__(1024) unsigned char sa[2048],sb[N*32];
  A+=(size_t)blockIdx.y*64*K; B+=(size_t)blockIdx.y*256*K; C+=(size_t)blockIdx.y*16384; D+=(size_t)blockIdx.y*16384;
  int tid=threadIdx.x,w=tid>>5,l=tid&31,g=l>>2,q=l&3,c0=blockIdx.x*N; float d[N/2];
  #pragma unroll
  for(int i=0;i<N/2;i++) d[i]=zero?__int_as_float(0x7fc00000):C[(w*16+g+((i>>1)&1)*8)*256+c0+(i>>2)*8+q*2+(i&1)];
  for(int k=0;k<K;k+=16){
    __syncthreads();
    for(int i=tid;i<128;i+=128){int r=i>>1,h=i&1; *(uint4*)(sa+h*1024+(r>>3)*128+(r&7)*16)=*(const uint4*)(A+(size_t)r*K+k+h*8);}
    for(int i=tid;i<N*2;i+=128){int r=i>>1,h=i&1; *(uint4*)(sb+h*N*16+(r>>3)*128+(r&7)*16)=*(const uint4*)(B+(size_t)(c0+r)*K+k+h*8);}
    async_fence(); __syncthreads();
    const bf*a=A+(size_t)(w*16+g)*K+k+q*2; u32 ar[4]={ld2(a),ld2(a+8*K),ld2(a+8),ld2(a+8*K+8)};
    wg_fence(); int acc=!(zero&&k==0);
    if(RS) wg_rs<0>(d,ar,wg_desc(sm(sb),N*16,128,0),acc); else wg_ss<0>(d,wg_desc(sm(sa),1024,128,0),wg_desc(sm(sb),N*16,128,0),acc);
    wg_commit(); wg_wait<0>();
  }
  #pragma unroll
  for(int i=0;i<N/2;i++) D[(w*16+g+((i>>1)&1)*8)*256+c0+(i>>2)*8+q*2+(i&1)]=d[i];
}
#define G(N) extern "C" __global__ void __launch_bounds__(128) g_ss##N(const bf*A,const bf*B,const float*C,float*D,int K,int z){g_wg<N,0>(A,B,C,D,K,z);} \
             extern "C" __global__ void __launch_bounds__(128) g_rs##N(const bf*A,const bf*B,const float*C,float*D,int K,int z){g_wg<N,1>(A,B,C,D,K,z);}
G(8) G(16) G(32) G(64) G(128) G(256)

// Cycles of R dependent steps, one warp (mma.sync) or one warpgroup (wgmma); out[0] = cycles, waiting after each; out[1] = one group.
extern "C" __global__ void lat_mma(long long*out,float*sink){
  float d[4]={0,0,0,0}; u32 a[4]={0x3f803f80,0x3f813f82,0x3f803f80,0x3f843f80}; u32 b0=0x3f803f80+threadIdx.x,b1=0x3f903f80;
  for(int i=0;i<8;i++) mma16816(d,a,b0,b1);
  long long t=clock64();
  #pragma unroll
  for(int i=0;i<128;i++) mma16816(d,a,b0,b1);
  float s=d[0]+d[1]+d[2]+d[3]; if(s==1.2345f) sink[0]=s; t=clock64()-t;
  // eight independent chains: issue rate of one warp
  float e[8][4]; for(int j=0;j<8;j++)for(int i=0;i<4;i++)e[j][i]=j;
  long long u=clock64();
  #pragma unroll
  for(int i=0;i<32;i++)
    #pragma unroll
    for(int j=0;j<8;j++) mma16816(e[j],a,b0,b1);
  s=0; for(int j=0;j<8;j++)for(int i=0;i<4;i++)s+=e[j][i]; if(s==1.2345f) sink[0]=s; u=clock64()-u;
  if(threadIdx.x==0){out[0]=t;out[1]=u;}
}
template<int N,int RS> __device__ void lat(long long*out,float*sink){
  __shared__ __align__(1024) unsigned char s[2048+N*32];
  for(int i=threadIdx.x;i<(2048+N*32)/4;i+=blockDim.x) ((u32*)s)[i]=0x3f803f80+(i*7&0x3f); async_fence(); __syncthreads();
  float d[N/2]; for(int i=0;i<N/2;i++) d[i]=0; u32 a[4]={0x3f803f80,0x3f813f82,0x3f803f80,0x3f843f80};
  u64 da=wg_desc(sm(s),1024,128,0),db=wg_desc(sm(s+2048),N*16,128,0);
  wg_fence(); if(RS) wg_rs<0>(d,a,db,1); else wg_ss<0>(d,da,db,1); wg_commit(); wg_wait<0>();
  long long t=clock64();
  #pragma unroll 1
  for(int i=0;i<128;i++){wg_fence(); if(RS) wg_rs<0>(d,a,db,1); else wg_ss<0>(d,da,db,1); wg_commit(); wg_wait<0>();}
  t=clock64()-t; __syncthreads(); long long u=clock64(); wg_fence();
  #pragma unroll
  for(int i=0;i<128;i++){ if(RS) wg_rs<0>(d,a,db,1); else wg_ss<0>(d,da,db,1);} wg_commit(); wg_wait<0>();
  u=clock64()-u; float x=0;
  #pragma unroll
  for(int i=0;i<N/2;i++) x+=d[i]; if(x==1.2345f) sink[0]=x; if(threadIdx.x==0){out[0]=t;out[1]=u;}
}
#define L(N) extern "C" __global__ void lat_ss##N(long long*o,float*s){lat<N,0>(o,s);} extern "C" __global__ void lat_rs##N(long long*o,float*s){lat<N,1>(o,s);}
L(8) L(16) L(32) L(64) L(128) L(256)

// P(x) = bf16(ex2.approx.ftz.f32(x)) over all 2^32 patterns: every place where it changes is appended to out as (bits of x, P).
__device__ inline float ex2(float x){float y; asm volatile("ex2.approx.ftz.f32 %0,%1;":"=f"(y):"f"(x)); return y;}
__device__ inline u32 tobf(float y){unsigned short h; asm volatile("cvt.rn.bf16.f32 %0,%1;":"=h"(h):"f"(y)); return h;}
extern "C" __global__ void ex2_scan(uint2*out,u32*count,u32 cap){
  for(u64 i=blockIdx.x*(u64)blockDim.x+threadIdx.x;i<(1ull<<32);i+=(u64)gridDim.x*blockDim.x){
    u32 p=tobf(ex2(__uint_as_float((u32)i))); 
    if(i==0||p!=tobf(ex2(__uint_as_float((u32)i-1)))){u32 k=atomicAdd(count,1); if(k<cap) out[k]=make_uint2((u32)i,p);} }
}
// The f32 result itself on a slice of inputs, for a model of the unit: out[i] = bits of ex2(first + i).
extern "C" __global__ void ex2_dump(u32*out,u32 first,u32 n){ u32 i=blockIdx.x*blockDim.x+threadIdx.x; if(i<n) out[i]=__float_as_uint(ex2(__uint_as_float(first+i))); }
// How often P(x) is not the correctly rounded 2^x, x in [-126, 1): cnt[0]; largest relative error of the f32 result * 2^40: cnt[1].
extern "C" __global__ void ex2_err(u64*cnt){ u64 bad=0,worst=0;
  for(u64 i=blockIdx.x*(u64)blockDim.x+threadIdx.x;i<(1ull<<32);i+=(u64)gridDim.x*blockDim.x){ float x=__uint_as_float((u32)i); if(!(x>=-126.f&&x<1.f)) continue;
    double y=exp2((double)x); float h=ex2(x); double e=fabs((double)h-y)/y*1099511627776.0; if((u64)e>worst)worst=(u64)e;
    u64 b=__double_as_longlong(y); // bf16 keeps 7 of 52 fraction bits
    u64 r=(b+((1ull<<44)-1)+((b>>45)&1))>>45; u32 want=(u32)((((r>>7)-1023+127)<<7)|(r&127)); if(want!=tobf(h))bad++; }
  atomicAdd((unsigned long long*)cnt,bad); atomicMax((unsigned long long*)cnt+1,worst); }
