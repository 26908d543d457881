// y = x . W^T for up to TN tokens by the plain k16 chain on wgmma, weights on the 64-row side. A cluster of CX*CW blocks: CX row tiles
// share x, CW token parts share W; each block loads its part of both and multicasts it to the blocks that need it.
#include "chain_tma.cuh"
#ifndef WG
#define WG 1    // consumer warpgroups, 64 rows each
#endif
#ifndef TN
#define TN 128  // tokens
#endif
#ifndef CX
#define CX 1
#endif
#ifndef CW
#define CW 1
#endif
#ifndef BX
#define BX 2    // boxes of 64 columns a stage
#endif
constexpr int R=WG*64, TC=TN/CW, CL=CX*CW, SB=BX*(R+TC)*128, NS=(220*1024)/SB;
// dynamic shared memory: 1024 + NS*SB + 16*NS. tensor-map boxes: W {64, R/CW}, x {64, TC/CX}
extern "C" __global__ void __launch_bounds__(WG*128+128,1) chain_wg(const __grid_constant__ TMap mW,const __grid_constant__ TMap mX,bf*Y,int N,int K,int M){
  extern __shared__ unsigned char raw[]; const u32 base=(sm(raw)+1023)&~1023u, full=base+NS*SB, empty=full+8*NS;
  const int wg=threadIdx.x>>7,tid=threadIdx.x&127,w=tid>>5,l=tid&31; const int tiles=(N+R-1)/R,nst=K/(64*BX);
  const int rank=blockIdx.x%CL,ix=rank%CX,iw=rank/CX,cl=blockIdx.x/CL,ncl=gridDim.x/CL; const int groups=(tiles+CX-1)/CX;
  if(threadIdx.x==0){ for(int i=0;i<NS;i++){mb_init(full+8*i,1);mb_init(empty+8*i,(CX+CW-1)*WG*4);} asm volatile("fence.mbarrier_init.release.cluster;":::"memory"); }
  if(CL>1) asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;":::"memory"); else __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;");
  const int mine=cl<groups?((groups-1-cl)/ncl+1)*nst:0;
  if(wg==WG){ if(tid==0){ const u64 pf=pol_first(),pl=pol_last(); unsigned short mw=0,mx=0; for(int j=0;j<CW;j++) mw|=1<<(ix+CX*j); for(int i=0;i<CX;i++) mx|=1<<(iw*CX+i);
      auto ww=[&](int i){ int t=(cl+(i/nst)*ncl)*CX+ix,s=i%nst,sl=i%NS; u32 d=base+sl*SB; mb_expect(full+8*sl,SB);
        for(int b=0;b<BX;b++){ u32 dd=d+b*R*128+iw*(R/CW)*128; if(CW>1) tma_mc(dd,&mW,(s*BX+b)*64,t*R+iw*(R/CW),full+8*sl,mw,pf); else tma(dd,&mW,(s*BX+b)*64,t*R,full+8*sl,pf); } };
      auto xx=[&](int i){ int s=i%nst,sl=i%NS; u32 d=base+sl*SB+BX*R*128;
        for(int b=0;b<BX;b++){ u32 dd=d+b*TC*128+ix*(TC/CX)*128; int y=iw*TC+ix*(TC/CX); if(CX>1) tma_mc(dd,&mX,(s*BX+b)*64,y,full+8*sl,mx,pl); else tma(dd,&mX,(s*BX+b)*64,y,full+8*sl,pl); } };
      // A multicast lands in peers' slots and on their barriers; before a slot's first use that needs no wait: bytes may even
      // arrive before the peer's own expect, since the transaction count is signed and the phase cannot end without that arrival.
      int it=0,head=min(mine,NS); for(it=0;it<head;it++) ww(it);
      asm volatile("griddepcontrol.wait;":::"memory"); for(it=0;it<head;it++) xx(it);
      for(;it<mine;it++){ mb_wait_cluster(empty+8*(it%NS),((it/NS)-1)&1); ww(it); xx(it); } } }
  else { const int g=l>>2,q=l&3; int it=0;
    auto give=[&](int i){ u32 e=empty+8*(i%NS); if(CL==1){ if(l==0) mb_arrive(e); }
            else if(l<CX+CW-1){ int peer=l<CX?iw*CX+l:((l-CX)<iw?(l-CX):(l-CX)+1)*CX+ix; u32 ra; asm volatile("mapa.shared::cluster.u32 %0,%1,%2;":"=r"(ra):"r"(e),"r"(peer)); asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _,[%0];"::"r"(ra):"memory"); } };
         
    for(int t0=cl;t0<groups;t0+=ncl){ const int t=t0*CX+ix; float d[TC/2];
      #pragma unroll
      for(int i=0;i<TC/2;i++) d[i]=0;
      for(int s=0;s<nst;s++,it++){ int sl=it%NS; u32 st=base+sl*SB; mb_wait_cluster(full+8*sl,(it/NS)&1); wg_fence();
        #pragma unroll
        for(int b=0;b<BX;b++){ u64 a=wg_desc(st+b*R*128+wg*8192,16,1024,1),x=wg_desc(st+BX*R*128+b*TC*128,16,1024,1);
          #pragma unroll
          for(int kk=0;kk<4;kk++) wg_ss<0>(d,a+kk*2,x+kk*2,1); }
        wg_commit(); 
        wg_wait<1>();   // the previous stage is done: give it back
        if(s>0) give(it-1); }
      wg_wait<0>(); give(it-1);
      #pragma unroll
      for(int i=0;i<TC/2;i++){ int tok=iw*TC+(i>>2)*8+q*2+(i&1),row=t*R+wg*64+w*16+g+((i>>1)&1)*8; if(tok<M&&row<N) Y[(size_t)tok*N+row]=tobf(d[i]); } } }
  if(CL>1) asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;":::"memory");
}
