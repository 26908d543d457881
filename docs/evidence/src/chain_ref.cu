#include "wgmma.h"
// The plain chain: 64 x 128 outputs a block, each output one chain of mma.sync steps, K ascending, one rounding to bf16.
extern "C" __global__ void __launch_bounds__(256) chain_ref(const bf*X,const bf*W,bf*Y,int M,int N,int K){
  __shared__ __align__(16) bf xs[64][72],ws[128][72];
  int tid=threadIdx.x,w=tid>>5,l=tid&31,g=l>>2,q=l&3,wm=(w&1)*32,wn=(w>>1)*32; int m0=blockIdx.y*64,n0=blockIdx.x*128;
  float d[2][4][4]; for(int i=0;i<2;i++)for(int j=0;j<4;j++)for(int e=0;e<4;e++)d[i][j][e]=0;
  for(int k=0;k<K;k+=64){ __syncthreads();
    for(int i=tid;i<64*8;i+=256){int r=i>>3,c=(i&7)*8; uint4 v={0,0,0,0}; if(m0+r<M) v=*(const uint4*)(X+(size_t)(m0+r)*K+k+c); *(uint4*)&xs[r][c]=v;}
    for(int i=tid;i<128*8;i+=256){int r=i>>3,c=(i&7)*8; uint4 v={0,0,0,0}; if(n0+r<N) v=*(const uint4*)(W+(size_t)(n0+r)*K+k+c); *(uint4*)&ws[r][c]=v;}
    __syncthreads();
    #pragma unroll
    for(int kk=0;kk<64;kk+=16){ u32 a[2][4],b[4][2];
      #pragma unroll
      for(int i=0;i<2;i++){const bf*p=&xs[wm+i*16+g][kk+q*2]; a[i][0]=*(u32*)p;a[i][1]=*(u32*)(p+8*72);a[i][2]=*(u32*)(p+8);a[i][3]=*(u32*)(p+8*72+8);}
      #pragma unroll
      for(int j=0;j<4;j++){const bf*p=&ws[wn+j*8+g][kk+q*2]; b[j][0]=*(u32*)p;b[j][1]=*(u32*)(p+8);}
      #pragma unroll
      for(int i=0;i<2;i++)
      #pragma unroll
        for(int j=0;j<4;j++) mma16816(d[i][j],a[i],b[j][0],b[j][1]); } }
  for(int i=0;i<2;i++)for(int j=0;j<4;j++)for(int e=0;e<4;e++){ int r=m0+wm+i*16+g+(e>>1)*8,c=n0+wn+j*8+q*2+(e&1); if(r<M&&c<N){ unsigned short h; asm("cvt.rn.bf16.f32 %0,%1;":"=h"(h):"f"(d[i][j][e])); Y[(size_t)r*N+c]=h; } } }
