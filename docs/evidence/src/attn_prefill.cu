// Attention prefill, causal, whole prompt from position 0. Q, O: [T][HQ][HD]; K, V: tile images [HKV][T/KT].
// One block = NC consumer warpgroups of 64 query rows each and one producer. PV of tile j-1 runs while tile j's softmax is computed.
#include "attn.cuh"
#ifndef KT
#define KT 64   // keys a tile: the step of the running maximum
#endif
#ifndef NC
#define NC 2    // consumer warpgroups
#endif
#ifndef CH
#define CH 512  // keys a chunk, 0: none
#endif
#ifndef EX
#define EX 0    // 0: ex2.approx, 3, 4, 5: polynomial degree
#endif
#ifndef SU
#define SU 0    // row sums: 0 ones column through mma.sync, 1 lanes over the rounded P
#endif
#ifndef OT
#define OT 0    // running total: 0 registers, 1 shared memory
#endif
#ifndef ST
#define ST 4    // stages
#endif
#ifndef HD
#define HD 128  // head_dim: measured at 128; 64 and 256 compile, for their registers
#endif
#ifndef PP
#define PP 0    // 1: two warpgroups take turns at issuing products (named barriers)
#endif
constexpr int TB=KT*HD*2, QB=64*HD*2, OB=64*HD*4;   // bytes of a tile, of 64 query rows, of their total
// dynamic shared memory: 1280 + NC*QB + 2*ST*TB + (OT ? NC*OB : 0)
__device__ __forceinline__ void bar_sync(int id,int n){asm volatile("bar.sync %0,%1;"::"r"(id),"r"(n):"memory");}
__device__ __forceinline__ void bar_arrive(int id,int n){asm volatile("bar.arrive %0,%1;"::"r"(id),"r"(n):"memory");}

extern "C" __global__ void __launch_bounds__(128*(NC+1),1) attn_prefill(const bf*Q,const unsigned char*K,const unsigned char*V,bf*O,int T,int HQ,int HKV,float scale){
  extern __shared__ unsigned char raw[]; unsigned char*base=(unsigned char*)(((size_t)raw+1023)&~(size_t)1023);
  const u32 sQ=sm(base),sK=sQ+NC*QB,sV=sK+ST*TB,sO=sV+ST*TB,sB=sO+(OT?NC*OB:0);
  const u32 kf=sB,ke=kf+8*ST,vf=ke+8*ST,ve=vf+8*ST;
  const int wg=threadIdx.x>>7,tid=threadIdx.x&127,w=tid>>5,l=tid&31,g=l>>2,q=l&3;
  const int h=blockIdx.x,qb=gridDim.y-1-blockIdx.y,hk=h/(HQ/HKV); const int rows=NC*64,q0=qb*rows;
  if(threadIdx.x==0){ for(int i=0;i<ST;i++){mb_init(kf+8*i,1);mb_init(vf+8*i,1);mb_init(ke+8*i,NC*4);mb_init(ve+8*i,NC*4);} asm volatile("fence.mbarrier_init.release.cluster;":::"memory"); }
  __syncthreads();
  const int last=min(q0+rows,T)-1, ntot=last/KT+1;
  if(wg==NC){ // producer
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if(tid==0){ const unsigned char*k=K+(size_t)hk*(T/KT)*TB,*v=V+(size_t)hk*(T/KT)*TB;
      for(int j=0;j<ntot+1;j++){
        if(j<ntot){ int s=j%ST; if(j>=ST) mb_wait(ke+8*s,((j/ST)-1)&1); mb_expect(kf+8*s,TB); bulk(sK+s*TB,k+(size_t)j*TB,TB,kf+8*s); }
        if(j>0){ int i=j-1,s=i%ST; if(i>=ST) mb_wait(ve+8*s,((i/ST)-1)&1); mb_expect(vf+8*s,TB); bulk(sV+s*TB,v+(size_t)i*TB,TB,vf+8*s); } } }
  } else {
    #if NC<=2
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    #else
    asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    #endif
    const int r0=q0+wg*64; const int n=min(r0+63,T-1)/KT+1; const bool alive=r0<T;
    { // Q tile of this warpgroup, swizzled
      #pragma unroll
      for(int i=0;i<HD/16;i++){ int c=i*128+tid,row=c/(HD/8),d=(c%(HD/8))*8; uint4 v={0,0,0,0}; if(r0+row<T) v=*(const uint4*)(Q+((size_t)(r0+row)*HQ+h)*HD+d); *(uint4*)(base+wg*QB+img(64,row,d))=v; }
      async_fence(); bar_sync(1+wg,128); }
    const u64 dQ=wg_desc(sQ+wg*QB,16,1024,1);
    float S[KT/2],o[HD/2],ot[OT?1:HD/2],L[4],Lt[2]={0,0}; u32 P[KT/16][4]; float M[2]={-INFINITY,-INFINITY},Mt[2]={-INFINITY,-INFINITY}; float al[2]={0,0};
    #pragma unroll
    for(int i=0;i<HD/2;i++) o[i]=0;
    for(int i=0;i<4;i++) L[i]=0;
    if constexpr(!OT){
      #pragma unroll
      for(int i=0;i<HD/2;i++) ot[i]=0; }
    float4*os=(float4*)(base+(sO-sQ)+wg*OB)+tid;
    auto qk=[&](int j){ int s=j%ST; mb_wait(kf+8*s,(j/ST)&1); const u64 dK=wg_desc(sK+s*TB,16,1024,1); wg_fence();
      #pragma unroll
      for(int kk=0;kk<HD/16;kk++){ u64 a=dQ+(((kk>>2)*8192+(kk&3)*32)>>4),b=dK+(((kk>>2)*KT*128+(kk&3)*32)>>4); wg_ss<0>(S,a,b,kk>0); }
      wg_commit(); };
    auto pv=[&](int j,bool first){ int s=j%ST; mb_wait(vf+8*s,(j/ST)&1); const u64 dV=wg_desc(sV+s*TB,KT*128,1024,1); wg_fence();
      #pragma unroll
      for(int kk=0;kk<KT/16;kk++) wg_rs<1>(o,P[kk],dV+((kk*2048)>>4),!(first&&kk==0));
      wg_commit(); };
    // softmax of tile j in S: new maxima, al = 2^(M - M'), S <- E(x)
    auto soft=[&](int j,bool fresh,bool mask){
      if(mask){
        #pragma unroll
        for(int i=0;i<KT/2;i++){ int key=j*KT+(i>>2)*8+q*2+(i&1),row=r0+w*16+g+((i>>1)&1)*8; if(key>row) S[i]=-INFINITY; } }
      float t0=fmaxf(S[0],S[1]),t1=fmaxf(S[2],S[3]);
      #pragma unroll
      for(int i=4;i<KT/2;i+=4){ t0=fmaxf(t0,fmaxf(S[i],S[i+1])); t1=fmaxf(t1,fmaxf(S[i+2],S[i+3])); }
      t0=fmaxf(t0,__shfl_xor_sync(~0u,t0,1)); t1=fmaxf(t1,__shfl_xor_sync(~0u,t1,1)); t0=fmaxf(t0,__shfl_xor_sync(~0u,t0,2)); t1=fmaxf(t1,__shfl_xor_sync(~0u,t1,2));
      float n0=rint_(t0*scale),n1=rint_(t1*scale);
      if(!fresh){ n0=fmaxf(n0,M[0]); n1=fmaxf(n1,M[1]); }
      al[0]=ex2(M[0]-n0); al[1]=ex2(M[1]-n1); M[0]=n0; M[1]=n1;
      #pragma unroll
      for(int i=0;i<KT/2;i++){ float x=fmaf(S[i],scale,-((i&2)?n1:n0)); float y=expf2<EX>(x); if(EX&&mask) y=S[i]==-INFINITY?0.f:y; S[i]=y; } };
    auto topack=[&](){
      #pragma unroll
      for(int kk=0;kk<KT/16;kk++){
        #pragma unroll
        for(int i=0;i<4;i++) P[kk][i]=pack(S[kk*8+i*2],S[kk*8+i*2+1]); } };
    auto addsum=[&](){
      #pragma unroll
      for(int kk=0;kk<KT/16;kk++){
        if(SU==0) mma16816(L,P[kk],0x3f803f80u,0x3f803f80u);
        else {
          #pragma unroll
          for(int i=0;i<4;i++){ int r=(i&1)*2; L[r]+=__uint_as_float(P[kk][i]<<16); L[r+1]+=__uint_as_float(P[kk][i]&0xffff0000u); } } } };
    auto lsum=[&](float(&s)[2]){ if(SU==0){s[0]=L[0];s[1]=L[2];} else {
        #pragma unroll
        for(int r=0;r<2;r++){ float a=L[r*2]+L[r*2+1]; a+=__shfl_xor_sync(~0u,a,1); a+=__shfl_xor_sync(~0u,a,2); s[r]=a; } } };
    auto merge=[&](float m0,float m1,bool only){ // the finished chunk (m, o, L) into the total; only: nothing is in it yet
      float s[2]; lsum(s); float N0=fmaxf(Mt[0],m0),N1=fmaxf(Mt[1],m1),a0=ex2(Mt[0]-N0),a1=ex2(Mt[1]-N1),b0=ex2(m0-N0),b1=ex2(m1-N1);
      Lt[0]=fmaf(s[0],b0,Lt[0]*a0); Lt[1]=fmaf(s[1],b1,Lt[1]*a1); Mt[0]=N0; Mt[1]=N1;
      if constexpr(OT){
        #pragma unroll
        for(int i=0;i<HD/8;i++){ float4 v=only?make_float4(0,0,0,0):os[i*128]; v.x=fmaf(o[i*4],b0,v.x*a0); v.y=fmaf(o[i*4+1],b0,v.y*a0); v.z=fmaf(o[i*4+2],b1,v.z*a1); v.w=fmaf(o[i*4+3],b1,v.w*a1); os[i*128]=v; }
      } else {
        #pragma unroll
        for(int i=0;i<HD/2;i++) ot[i]=fmaf(o[i],(i&2)?b1:b0,ot[i]*((i&2)?a1:a0)); }
      for(int i=0;i<4;i++) L[i]=0; };
    if(alive){
      constexpr int TC=CH?CH/KT:1<<30;
      if(PP&&wg==1) bar_arrive(4,256);   // warpgroup 0 waits on barrier 4 and goes first, warpgroup 1 on 5
      qk(0); wg_wait<0>(); if(l==0) mb_arrive(ke);
      soft(0,true,KT-1>r0); topack(); addsum();
      bool first=true;
      // QK(j) and PV(j-1) are issued together; the softmax of tile j runs beside PV(j-1). Issuing QK(j+1) before the rescaling and
      // merging of tile j instead, to hide these, was measured and is a fifth slower.
      #pragma unroll 1
      for(int j=1;j<n;j++){
        if(PP) bar_sync(4+wg,256);
        qk(j); pv(j-1,first);
        if(PP) bar_arrive(5-wg,256);
        float m0=M[0],m1=M[1]; const bool edge=CH&&(j%TC)==0;
        wg_wait<1>(); if(l==0) mb_arrive(ke+8*(j%ST));
        if((j+1)*KT-1>r0) soft(j,edge,true); else soft(j,edge,false);
        wg_wait<0>(); if(l==0) mb_arrive(ve+8*((j-1)%ST));
        if(CH&&edge){ merge(m0,m1,j==TC); first=true; }
        else { first=false; if(__any_sync(~0u,al[0]!=1.f||al[1]!=1.f)){
            #pragma unroll
            for(int i=0;i<HD/2;i++) o[i]*=(i&2)?al[1]:al[0];
            L[0]*=al[0]; L[1]*=al[0]; L[2]*=al[1]; L[3]*=al[1]; } }
        topack(); addsum();
      }
      if(PP&&wg==0&&n<ntot) bar_arrive(5,256);   // warpgroup 1 has one tile more
      pv(n-1,first); wg_wait<0>(); if(l==0) mb_arrive(ve+8*((n-1)%ST));
      float f0,f1;
      if(CH){ merge(M[0],M[1],n<=TC); f0=1.f/Lt[0]; f1=1.f/Lt[1]; } else { float s[2]; lsum(s); f0=1.f/s[0]; f1=1.f/s[1]; }
      #pragma unroll
      for(int i=0;i<HD/2;i+=2){ float a,b; if(CH==0){a=o[i];b=o[i+1];} else if constexpr(OT){ float4 v=os[(i>>2)*128]; a=(i&2)?v.z:v.x; b=(i&2)?v.w:v.y; } else {a=ot[i];b=ot[i+1];}
        float f=(i&2)?f1:f0; int row=r0+w*16+g+((i>>1)&1)*8; if(row<T) *(u32*)(O+((size_t)row*HQ+h)*HD+(i>>2)*8+q*2)=pack(a*f,b*f); }
    }
    for(int j=alive?n:0;j<ntot;j++){ int k=j%ST; mb_wait(kf+8*k,(j/ST)&1); mb_wait(vf+8*k,(j/ST)&1); if(l==0){ mb_arrive(ke+8*k); mb_arrive(ve+8*k); } }   // tiles only other warpgroups need
  }
}
