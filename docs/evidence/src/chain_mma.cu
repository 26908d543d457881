// y = x . W^T for up to 8*NT tokens by the plain k16 chain on mma.sync. A block takes R = 16*WN rows at a time, one producer thread
// streams W [N][K] and x [M][K] by tensor maps (boxes of 64 columns, 128-byte swizzle) through a ring that never stops between tiles.
#include "chain_tma.cuh"
#ifndef WN
#define WN 4    // consumer warps, 16 rows each
#endif
#ifndef BX
#define BX 4    // boxes of 64 columns a stage
#endif
#ifndef NT
#define NT 1    // groups of 8 tokens
#endif
constexpr int R=WN*16, SB=BX*(R+8*NT)*128, NS=(212*1024)/SB;
// dynamic shared memory: 1024 + NS*SB + 16*NS
extern "C" __global__ void __launch_bounds__(WN*32+32,1) chain_mma(const __grid_constant__ TMap mW,const __grid_constant__ TMap mX,bf*Y,int N,int K,int M){
  extern __shared__ unsigned char raw[]; const u32 base=(sm(raw)+1023)&~1023u, full=base+NS*SB, empty=full+8*NS;
  const int w=threadIdx.x>>5,l=threadIdx.x&31; const int tiles=N/R,nst=K/(64*BX);
  if(threadIdx.x==0){ for(int i=0;i<NS;i++){mb_init(full+8*i,1);mb_init(empty+8*i,WN);} asm volatile("fence.mbarrier_init.release.cluster;":::"memory"); }
  __syncthreads(); asm volatile("griddepcontrol.launch_dependents;");
  if(w==WN){ if(l==0){ const u64 pf=pol_first(),pl=pol_last(); int it=0; const int mine=blockIdx.x<tiles?((tiles-1-blockIdx.x)/gridDim.x+1)*nst:0;
      auto ww=[&](int i){ int t=blockIdx.x+(i/nst)*gridDim.x,s=i%nst,sl=i%NS; u32 d=base+sl*SB; mb_expect(full+8*sl,SB); for(int b=0;b<BX;b++) tma(d+b*R*128,&mW,(s*BX+b)*64,t*R,full+8*sl,pf); };
      auto xx=[&](int i){ int s=i%nst,sl=i%NS; u32 d=base+sl*SB+BX*R*128; for(int b=0;b<BX;b++) tma(d+b*NT*1024,&mX,(s*BX+b)*64,0,full+8*sl,pl); };
      int head=min(mine,NS); for(it=0;it<head;it++) ww(it);                 // weights do not depend on the kernel before
      asm volatile("griddepcontrol.wait;":::"memory"); for(it=0;it<head;it++) xx(it);
      for(;it<mine;it++){ mb_wait(empty+8*(it%NS),((it/NS)-1)&1); ww(it); xx(it); } } return; }
  int it=0; const int r=w*16+(l&7)+((l>>3)&1)*8,hi=l>>4,g=l>>2,q=l&3;
  for(int t=blockIdx.x;t<tiles;t+=gridDim.x){ float d[NT][4];
    #pragma unroll
    for(int i=0;i<NT;i++)for(int e=0;e<4;e++) d[i][e]=0;
    for(int s=0;s<nst;s++,it++){ int sl=it%NS; u32 st=base+sl*SB; mb_wait(full+8*sl,(it/NS)&1);
      #pragma unroll
      for(int b=0;b<BX;b++){ u32 A[4][4],B[NT][8];
        #pragma unroll
        for(int kk=0;kk<4;kk++) asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];":"=r"(A[kk][0]),"=r"(A[kk][1]),"=r"(A[kk][2]),"=r"(A[kk][3]):"r"(st+b*R*128+r*128+(((kk*2+hi)^(r&7))<<4)));
        #pragma unroll
        for(int n=0;n<NT;n++)
          #pragma unroll
          for(int h=0;h<2;h++) asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];":"=r"(B[n][h*4]),"=r"(B[n][h*4+1]),"=r"(B[n][h*4+2]),"=r"(B[n][h*4+3]):"r"(st+BX*R*128+b*NT*1024+n*1024+(l&7)*128+(((h*4+(l>>3))^(l&7))<<4)));
        #pragma unroll
        for(int kk=0;kk<4;kk++)
          #pragma unroll
          for(int n=0;n<NT;n++) mma16816(d[n],A[kk],B[n][kk*2],B[n][kk*2+1]); }
      __syncwarp(); if(l==0) mb_arrive(empty+8*sl); }
    #pragma unroll
    for(int n=0;n<NT;n++)
      #pragma unroll
      for(int e=0;e<4;e++){ int tok=n*8+q*2+(e&1); if(tok<M) Y[(size_t)tok*N+t*R+w*16+g+(e>>1)*8]=tobf(d[n][e]); } }
}
