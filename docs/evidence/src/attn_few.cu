// Attention decode for few sequences: one work unit (sequence, kv head, chunk) a block, all blocks resident; 4 query heads a kv head, head_dim 128,
// tile 128, chunk 512, K and V in pages of 64 keys ([page][HKV] tile images). Same bits as attn_decode.cu. Every block merges its share of the columns.
// The variant to use: NS6_KR2_TG4_WB3_EF1. 8 warps compute, one thread streams pages through a ring. Scores stay in registers; P goes through shared memory.
#include "attn.cuh"
#ifndef NS
#define NS 6    // pages of 16 KB in the ring
#endif
#ifndef KR
#define KR 2    // 2: the first 256 keys wait for the queries in registers, which frees their pages' slots for the next ones
#endif
#ifndef WB
#define WB NS   // pages in flight, at most, while the kernel before may still run; in a resident kernel always
#endif
#ifndef TG
#define TG 0    // the next kernel may start: 0 at once, 1 when the last load is under way, 3 after the wait for the kernel before, 4 after the scores, 5 after P
#endif
#ifndef GT
#define GT 0    // n: loads wait until the block of the kernel before on this multiprocessor has used n pages of V (a hint, and only when `turn` follows its turn)
#endif
#ifndef NK
#define NK 1    // 1: the page that holds the newest key is read only after the kernel before, which may have written it
#endif
#ifndef EF
#define EF 0    // 1: K and V are marked to leave L2 first
#endif
#ifndef QP
#define QP 1    // 1: the queries' lines are brought into L2 ahead
#endif
#ifndef MS
#define MS 0    // partial results travel: 0 as (value, value, value, flag) words in L2 that their reader polls, 1 within a cluster of 16 through distributed shared memory
#endif
#ifndef BL
#define BL 2    // blocks a multiprocessor
#endif
#ifndef RS
#define RS 0    // 1: resident, `calls` calls in one launch, each reading its queries only after every block has finished the call before
#endif
#ifdef TM
#define ST(i) { if(threadIdx.x==32){ u64 t_; asm volatile("mov.u64 %0,%%clock64;":"=l"(t_)::"memory"); u64*p_=tm+((size_t)call*gridDim.x+blockIdx.x)*16; p_[i]=t_; if((i)==0||(i)==2||(i)==3||(i)==14){ asm volatile("mov.u64 %0,%%globaltimer;":"=l"(t_)::"memory"); p_[(i)==0?13:(i)==2?12:(i)==3?1:15]=t_; } } }
#else
#define ST(i)
#endif
constexpr int G=4,LT=64,CH=512,TB=LT*256,SP=CH+8,UN=12,QS=136,VW=G*43,RW=352;   // a head's 128 values are 43 words of three; RW: words a chunk's messages take at most (32 chunks)
__device__ __forceinline__ void st16(void*p,float4 v){asm volatile("{.reg .b64 a,b; .reg .b128 c; mov.b64 a,{%1,%2}; mov.b64 b,{%3,%4}; mov.b128 c,{a,b}; st.relaxed.gpu.global.b128 [%0],c;}"::"l"(p),"f"(v.x),"f"(v.y),"f"(v.z),"f"(v.w):"memory");}
__device__ __forceinline__ float4 ld16(const void*p){float4 v; asm volatile("{.reg .b64 a,b; .reg .b128 c; ld.relaxed.gpu.global.b128 c,[%4]; mov.b128 {a,b},c; mov.b64 {%0,%1},a; mov.b64 {%2,%3},b;}":"=f"(v.x),"=f"(v.y),"=f"(v.z),"=f"(v.w):"l"(p):"memory"); return v;}
__device__ __forceinline__ int ldacq(const int*p){int v; asm volatile("ld.acquire.gpu.global.s32 %0,[%1];":"=r"(v):"l"(p):"memory"); return v;}
__device__ __forceinline__ int ldrel(const int*p){int v; asm volatile("ld.relaxed.gpu.global.s32 %0,[%1];":"=r"(v):"l"(p):"memory"); return v;}
__device__ __forceinline__ void strel(int*p,int v){asm volatile("st.relaxed.gpu.global.s32 [%0],%1;"::"l"(p),"r"(v):"memory");}
__device__ __forceinline__ u32 smid(){u32 v; asm("mov.u32 %0,%%smid;":"=r"(v)); return v;}
__device__ __forceinline__ void ldsm(u32(&a)[4],u32 ad){asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];":"=r"(a[0]),"=r"(a[1]),"=r"(a[2]),"=r"(a[3]):"r"(ad));}
// 2^d, d a whole number or -infinity, at most 0: the bits of ex2(d)
__device__ __forceinline__ float pow2(float d){return __int_as_float((__float_as_int(fmaxf(d,-127.f)+12582912.f)+127)<<23);}
__device__ __forceinline__ void gwait(){asm volatile("griddepcontrol.wait;":::"memory");}
__device__ __forceinline__ void gnext(){asm volatile("griddepcontrol.launch_dependents;":::"memory");}
// dynamic shared memory: 1024 + NS*TB + 16*1024. Launched: 256 threads, thread 0 also issues the loads. Resident: 288, the ninth warp does.
extern "C" __global__ void __launch_bounds__(RS?288:256,BL) attn_few(const bf*Q,const unsigned char*K,const unsigned char*V,bf*O,const int*units,int U,int HQ,int HKV,float scale,float4*msg,int*count,int maxch,
    const u64*ptrs,int calls,   // resident: Q, K, V, O of every call
    int turn   // of consecutive launches: consecutive; 0: no gate
#ifdef TM
,u64*tm
#endif
){
  extern __shared__ unsigned char raw[]; unsigned char*ring=(unsigned char*)(((size_t)raw+1023)&~(size_t)1023);
  float4*mv=(float4*)(ring+NS*TB); bf*sp=(bf*)(mv+RW),*zero=sp+4*SP,*sink=zero+8,*qs=sink+8; float*tx=(float*)(qs+4*QS),*sa=tx+128,*so=sa+16,*sms=so+VW*3; float4*ab=(float4*)(sms+20); int*un=(int*)(sms+8); const u32 full=sm(ab+G*32),empty=full+8*NS,got=empty+8*NS;
  const int w=threadIdx.x>>5,l=threadIdx.x&31,g=l>>2,q=l&3; int call=0;
#if RS
  int it=0;   // loads of the calls before
#else
  const int it=0;
#endif
  ST(0)
  if(!RS&&TG==0) gnext();
  if(blockIdx.x<U&&threadIdx.x<UN) un[threadIdx.x]=units[blockIdx.x*UN+threadIdx.x];   // the plan is older than the kernel before
  if(threadIdx.x==32){ for(int i=0;i<NS;i++){mb_init(full+8*i,1);mb_init(empty+8*i,8);} mb_init(got,1); asm volatile("fence.mbarrier_init.release.cluster;":::"memory"); }
  if(threadIdx.x<8) zero[threadIdx.x]=0;
  __syncthreads();
  if(MS) asm volatile("barrier.cluster.arrive.release;":::"memory");
  if(blockIdx.x>=U){ gnext(); if(GT&&threadIdx.x==0) strel(count+2+smid(),turn); gwait(); if(threadIdx.x==0){ int v=ldacq(count+1); for(int i=0;i<200&&ldacq(count+1)==v;i++) __nanosleep(100); } return; }   // stays until another is done, so that every multiprocessor holds a block of each kernel in flight
  const int seq=un[0],hk=un[1],c=un[2],n=min(CH,un[3]-c*CH),nl=n>0?(n+LT-1)/LT:0,nt=(nl+1)/2,nch=(un[3]+CH-1)/CH;
  const int ww=(VW+nch-1)/nch,per=ww+G;   // words of a block's share; words it needs of a chunk
  const bool nk=NK&&c==nch-1; u64 pol=0; if(EF) asm volatile("createpolicy.fractional.L2::evict_first.b64 %0,1.0;":"=l"(pol));
  auto load=[&](int i){ const int s=(it+i)%NS; if(it+i>=NS) mb_wait(empty+8*s,((it+i)/NS-1)&1); mb_expect(full+8*s,TB);
    const unsigned char*src=(i<nl?K:V)+((size_t)un[4+(i<nl?i:i-nl)]*HKV+hk)*TB;
    if(EF) asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;"::"r"(sm(ring)+s*TB),"l"(src),"r"(TB),"r"(full+8*s),"l"(pol):"memory");
    else bulk(sm(ring)+s*TB,src,TB,full+8*s); };
  auto landed=[&](int i){ mb_wait(full+8*(i%NS),(i/NS)&1); };   // i: counted over all calls
  int held=nk?nl-1:-1;
#if RS
  if(w==8){ if(l==0&&nl>0) for(;call<calls;call++,it+=2*nl){ K=(const unsigned char*)ptrs[call*4+1]; V=(const unsigned char*)ptrs[call*4+2]; held=nk?nl-1:-1;
      auto newest=[&]{ if(call) while(ldacq(count)<U*call); asm volatile("fence.proxy.async.global;":::"memory"); load(nl-1); held=-1; };
      for(int i=0;i<2*nl;i++){ if(held>=0&&(i==12||i==2*nl-1)) newest();   // a page written by the call before comes last of those that can wait here
        if(nk&&i==nl-1) continue;
        const int j=it+i-WB; if(WB<NS&&j>=0&&j!=it+held) landed(j);
        load(i); }
      if(held>=0) newest(); }
    return; }
#else
  // Thread 0: issue loads up to `to`, waiting for slots and for the window. Until the kernel before has ended only what frees without queries, and not the newest page.
  int issued=0; auto pump=[&](int to,int window){ if(threadIdx.x==0) for(;issued<to;issued++){ if(issued==held) continue; const int j=issued-window; if(window<NS&&j>=0&&j!=held) landed(j); load(issued); } __syncwarp(); };
  const int all=2*nl,early=min(nk?all-1:all,NS+2*KR);
  if(nk&&nl<=2*KR){ gwait(); held=-1; }
  if(GT&&turn>1&&threadIdx.x==0) for(int i=0;i<20&&ldrel(count+2+smid())!=turn-1;i++);
  pump(min(WB,early),NS);
#endif
  const int i0=threadIdx.x/per,j0=threadIdx.x%per;
  auto bar=[]{asm volatile("bar.sync 1,256;":::"memory");};
  if(MS&&threadIdx.x==0&&nl>0) mb_expect(got,16*nch*(max(0,min(ww,VW-c*ww))+G));
#if RS
  for(;call<calls;call++,it+=2*nl){
    Q=(const bf*)ptrs[call*4]; O=(bf*)ptrs[call*4+3];
#else
  {
#endif
    const bf*qp=Q+((size_t)seq*HQ+hk*G)*128;
    if(QP&&!RS&&w==6&&l<8) asm volatile("prefetch.global.L2 [%0];"::"l"(qp+l*64));
    u32 kf[2][8][4]; float d[4][4];
    auto ldk=[&](int m,u32(&a)[8][4]){ int key=(m*8+w)*16,t=key/LT; if(t<nl){ landed(it+t); int r=key%LT+(l&7)+((l>>3)&1)*8; u32 base=sm(ring)+(it+t)%NS*TB;
        #pragma unroll
        for(int k=0;k<8;k++) ldsm(a[k],base+(k>>2)*LT*128+r*128+((((k&3)*2+(l>>4))^(r&7))<<4)); } };
    auto done=[&](int m){ __syncwarp(); if(l<2&&m*2+l<nl) mb_arrive(empty+8*((it+m*2+l)%NS)); };
    auto mask=[&](int m){
      #pragma unroll
      for(int i=0;i<2;i++)
        #pragma unroll
        for(int e=0;e<4;e++) if(((m+i)*8+w)*16+g+(e>>1)*8>=n) d[m+i][e]=-INFINITY; };
    if(KR){ ldk(0,kf[0]); done(0);
#if !RS
      pump(min(WB+2,early),WB);
#endif
      ldk(1,kf[1]); done(1); }
#if RS
    ST(2) if(w>=6&&call){ if(l==0) while(ldacq(count)<U*call); __syncwarp(); }
#else
    pump(early,WB); ST(2) gwait(); ST(3) if(TG==3) gnext();
#endif
    if(w>=6){ int t=threadIdx.x-192; *(int4*)(qs+(t>>4)*QS+(t&15)*8)=__ldcg((const int4*)(qp+(t>>4)*128+(t&15)*8)); }
#if !RS
    if(threadIdx.x==0){ if(held>=0&&held<issued) load(held); held=-1; }
#endif
    if(!KR){ ldk(0,kf[0]); done(0); ldk(1,kf[1]); done(1);
#if !RS
      pump(min(all,NS+min(nl,4)),NS);
#endif
    }
    bar();
#if RS
    ST(3)
#endif
    const u32 qa=(l&7)<G?sm(qs+(l&7)*QS+(l>>3)*8):sm(zero); const int qstep=(l&7)<G?64:0; u32 qf[2][4]; ldsm(qf[0],qa);   // 32 dims
    #pragma unroll
    for(int m=0;m<4;m++)
      #pragma unroll
      for(int e=0;e<4;e++) d[m][e]=0;
    { const int t=4+(w>>2),r=(w*16)%LT+(l&7)+((l>>3)&1)*8; if(t<nl) landed(it+t); if(t+2<nl) landed(it+t+2); ST(4)
      const u32 b0=sm(ring)+(it+t)%NS*TB+r*128,b1=sm(ring)+(it+t+2)%NS*TB+r*128;   // the second 256 keys take the registers of the first; what has not been loaded is masked
      #pragma unroll
      for(int k=0;k<8;k++){ const int h=k>>1&1,e=k%2*2; if(!e) ldsm(qf[!h],qa+(k/2+1)%4*qstep); mma16816(d[0],kf[0][k],qf[h][e],qf[h][e+1]); mma16816(d[1],kf[1][k],qf[h][e],qf[h][e+1]);
        const u32 x=(k>>2)*LT*128+((((k&3)*2+(l>>4))^(r&7))<<4); ldsm(kf[0][k],b0+x); ldsm(kf[1][k],b1+x); }
      done(2); done(3); mask(0);
      #pragma unroll
      for(int k=0;k<8;k++){ const int h=k>>1&1,e=k%2*2; if(!e&&k<6) ldsm(qf[!h],qa+(k/2+1)*qstep); mma16816(d[2],kf[0][k],qf[h][e],qf[h][e+1]); mma16816(d[3],kf[1][k],qf[h][e],qf[h][e+1]); }
      mask(2); }
    ST(5)
    // Maxima of this warp's keys: each exchange halves what a lane holds, until it is one (tile, head).
    { const bool hi=q>>1,g0=g&1,g1=g&2; float x[2][2],y[2];
      #pragma unroll
      for(int t=0;t<2;t++)
        #pragma unroll
        for(int h=0;h<2;h++){ float u=fmaxf(d[t][h],d[t][h+2]),v=__shfl_xor_sync(~0u,fmaxf(d[t+2][h],d[t+2][h+2]),2); x[t][h]=hi?v:u; }
      #pragma unroll
      for(int t=0;t<2;t++) y[t]=fmaxf(g0?x[t][1]:x[t][0],__shfl_xor_sync(~0u,g0?x[t][0]:x[t][1],4));
      float z=fmaxf(g1?y[1]:y[0],__shfl_xor_sync(~0u,g1?y[0]:y[1],8)); z=fmaxf(z,__shfl_xor_sync(~0u,z,16));
      if(l<16) tx[(((q&1)*2+g0)*4+hi*2+(g1?1:0))*8+w]=z; }
    bar(); if(!RS&&TG==4) gnext();
#if !RS
    pump(min(all,NS+nl),NS);   // every page of K has been read
#endif
    float N; { const int t=l>>1&3; float4 x=*(const float4*)(tx+l*4); N=fmaxf(fmaxf(x.x,x.y),fmaxf(x.z,x.w)); N=fmaxf(N,__shfl_xor_sync(~0u,N,1)); N=t<nt?rint_(N*scale):-INFINITY;   // lane 8 * head + 2 * tile
      float u=__shfl_up_sync(~0u,N,2); if(t>=1) N=fmaxf(N,u); u=__shfl_up_sync(~0u,N,4); if(t>=2) N=fmaxf(N,u);
      u=__shfl_up_sync(~0u,N,2); if(w==0&&!(l&1)){ sa[t*4+(l>>3)]=pow2((t?u:-INFINITY)-N); if(t==3) sms[(l>>3)*2]=N; } }
    #pragma unroll
    for(int m=0;m<4;m+=2){ u32 p[4];
      #pragma unroll
      for(int i=0;i<4;i++){ int t=m+i/2,e=i%2*2; float n0=__shfl_sync(~0u,N,(q&1)*16+2*t),n1=__shfl_sync(~0u,N,(q&1)*16+8+2*t); p[i]=pack(ex2(fmaf(d[t][e],scale,-n0)),ex2(fmaf(d[t][e+1],scale,-n1))); }
      u32 ad=(l&7)<G?sm(sp+(l&7)*SP+((m+(l>>4))*8+w)*16+((l>>3)&1)*8):sm(sink);
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0],{%1,%2,%3,%4};"::"r"(ad),"r"(p[0]),"r"(p[1]),"r"(p[2]),"r"(p[3]):"memory"); }
    bar(); ST(6) if(!RS&&TG==5) gnext();
    float o[4]={0,0,0,0},L[4]={0,0,0,0}; const u32 ones[4]={0x3f803f80u,0x3f803f80u,0x3f803f80u,0x3f803f80u};
    u32 va[4][4],p[2][4]; const u32 vo=sm(ring)+(w>>2)*LT*128+((l&7)+(l>>4)*8)*128+((((w&3)*2+((l>>3)&1))^(l&7))<<4); const int step=(l&7)<G?64:0;
    u32 pa=(l&7)<G?sm(sp+(l&7)*SP+(l>>3)*8):sm(zero); int s=(it+nl)%NS,ph=((it+nl)/NS)&1;   // the slot of the next page, its phase
    auto ldv=[&](int k,u32 base){ asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];":"=r"(va[k][0]),"=r"(va[k][1]),"=r"(va[k][2]),"=r"(va[k][3]):"r"(base+k*2048)); };
    auto freed=[&]{ __syncwarp(); if(l==0) mb_arrive(empty+8*s); if(++s==NS){ s=0; ph^=1; } };
    if(nl>0){ mb_wait(full+8*s,ph);
      #pragma unroll
      for(int k=0;k<4;k++) ldv(k,vo+s*TB);
      ldsm(p[0],pa); ldsm(p[1],pa+step); freed(); }
    #pragma unroll 1
    for(int j=0;j<nl;j++){ if(j+1<nl) mb_wait(full+8*s,ph);   // a rolled loop: code met for the first time is slow
      if(j&&j%2==0){ float2 x=*(const float2*)(sa+j*2+(q&1)*2); o[0]*=x.x;o[1]*=x.y;o[2]*=x.x;o[3]*=x.y;L[0]*=x.x;L[1]*=x.y;L[2]*=x.x;L[3]*=x.y; }
      const u32 base=vo+s*TB; pa+=2*step;   // after the last page what is read is not used
      #pragma unroll
      for(int k=0;k<4;k++){ mma16816(o,va[k],p[k/2][k%2*2],p[k/2][k%2*2+1]); mma16816(L,ones,p[k/2][k%2*2],p[k/2][k%2*2+1]); ldv(k,base); if(k&1) ldsm(p[k/2],pa+k/2*step); }
      if(j+1<nl) freed();
#if !RS
      pump(min(all,NS+nl+j+1),NS);
      if(TG==1&&threadIdx.x==0&&(j==2||j==nl-1)) gnext();
      if(GT&&threadIdx.x==0&&(j==GT-1||j==nl-1)) strel(count+2+smid(),turn);
#endif
    }
    ST(7)
    if(q<2){
      #pragma unroll
      for(int e=0;e<4;e++) so[(q*2+(e&1))*129+w*16+g+(e>>1)*8]=o[e];
      if(w==0&&g==0){ sms[q*4+1]=L[0]; sms[q*4+3]=L[1]; } }
    bar();
    auto word=[&](int i){ return i<VW?make_float4(so[i*3],so[i*3+1],so[i*3+2],1.f):make_float4(sms[(i-VW)*2],sms[(i-VW)*2+1],0.f,1.f); };
    ST(8)
#define STEP i+=256; if(i>=nch*per) break; r=i/per; j=i%per;
    // Word i of a chunk's message: j = i % per for block i / per. Its reader clears the flag; the next call writes only after this one.
    if(MS){ asm volatile("barrier.cluster.wait.acquire;":::"memory"); if(nl<=0) return;
      for(int i=threadIdx.x,r=i0,j=j0;i<nch*per;){ const int x=j<ww?r*ww+j:VW+j-ww; if(j>=ww||x<VW){ float4 v=word(x); u32 a,b;
        asm volatile("mapa.shared::cluster.u32 %0,%1,%2;":"=r"(a):"r"(sm(mv+c*per+j)),"r"(r)); asm volatile("mapa.shared::cluster.u32 %0,%1,%2;":"=r"(b):"r"(got),"r"(r));
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0],{%1,%2,%3,%4},[%5];"::"r"(a),"f"(v.x),"f"(v.y),"f"(v.z),"f"(v.w),"r"(b):"memory"); } STEP }
      mb_wait(got,0); bar(); }
    else { float4*pt=msg+(size_t)(seq*HKV+hk)*maxch*RW;
      for(int i=threadIdx.x,r=i0,j=j0;i<nch*per;){ const int x=j<ww?r*ww+j:VW+j-ww; if(r!=c&&(j>=ww||x<VW)) st16(pt+c*RW+i,word(x)); STEP }
      for(int i=threadIdx.x,r=i0,j=j0;i<nch*per;){ const int x=j<ww?c*ww+j:VW+j-ww; if(j>=ww||x<VW){
        float4 v; if(r==c) v=word(x); else { float4*p=pt+r*RW+c*per+j; do v=ld16(p); while(v.w==0.f); st16(p,make_float4(0,0,0,0)); }
        mv[i]=v; } STEP }
      ST(9) bar(); }
    ST(10)
    if(w<G){ float2 z=l<nch?((const float2*)(mv+l*per+ww+w))[0]:make_float2(-INFINITY,0.f); float N=z.x,u;   // a lane a chunk (32 at most), a warp a head: the two factors of every merge
      #pragma unroll
      for(int x=1;x<32;x*=2){ u=__shfl_up_sync(~0u,N,x); if(l>=x) N=fmaxf(N,u); }
      u=__shfl_up_sync(~0u,N,1); ab[w*32+l]=make_float4(pow2((l?u:-INFINITY)-N),pow2(z.x-N),z.y,0.f); }
    bar();
    for(int j=threadIdx.x;j<3*ww;j+=256){ const int x=c*ww+j/3,h=x/43,dim=x%43*3+j%3; if(x<VW&&dim<128){ float Lt=0,y=0; const float*vp=(const float*)(mv+j/3)+j%3;
        #pragma unroll 4
        for(int k=0;k<nch;k++){ float4 z=ab[h*32+k]; Lt=fmaf(z.z,z.y,Lt*z.x); y=fmaf(vp[k*per*4],z.y,y*z.x); }
        O[((size_t)seq*HQ+hk*G+h)*128+dim]=(bf)pack(y*(1.f/Lt),0.f); } }
    ST(11)
    if(RS){ bar(); if(threadIdx.x==0){ if(call+1<calls) asm volatile("red.release.gpu.global.add.s32 [%0],1;"::"l"(count):"memory");
        else { int v; asm volatile("atom.acq_rel.gpu.global.add.s32 %0,[%1],1;":"=r"(v):"l"(count):"memory"); if(v==U*calls-1) *count=0; } } }
    else if(threadIdx.x==0) asm volatile("red.relaxed.gpu.global.add.s32 [%0],1;"::"l"(count+1):"memory"); ST(14) }
}
