// Attention decode, head_dim 128, one token a sequence, by chunks: work units (sequence, kv head, chunk); the last block to finish a
// (sequence, kv head) merges its chunks in ascending order. K, V: pages of KT keys, [page][HKV] tile images. Same bits as prefill.
// 8 warps compute, one thread streams tiles through a ring that runs ahead across units. -DTM: stamps of each block's stages (run_times.py).
#include "attn.cuh"
#ifndef KT
#define KT 64
#endif
#ifndef LT
#define LT KT   // keys a load and a page: KT or a part of it
#endif
#ifndef TG
#define TG 0    // 1: the next kernel may start once this one's last load is under way, so that its loads come after these
#endif
#ifndef MG
#define MG 0    // 1: every block merges its share of the columns, polling (value, maximum, sum, flag) words: needs all blocks resident, a unit each
#endif
#ifndef ID
#define ID 0    // n: blocks without a unit stay until n others are done, so that every multiprocessor holds one block of each kernel in flight
#endif
#ifndef PF
#define PF 0    // loads of a block's first unit, past its ring, that are fetched into L2 before the kernel before has ended
#endif
#ifndef CH
#define CH 512
#endif
#ifndef EX
#define EX 0
#endif
#ifndef BL
#define BL 2    // blocks a multiprocessor
#endif
#ifndef CL
#define CL 0    // 4, 8, 16: a cluster of CL blocks holds CL chunks of one (sequence, kv head) and merges them through distributed shared
                // memory, going on from the cluster before; one unit a block, CL*ceil(chunks/CL) units a (sequence, kv head)
#endif
#ifndef RD
#define RD 0    // 1: only stream the tiles (the practical floor)
#endif
__device__ __forceinline__ void stll(u64*p,float v){asm volatile("st.relaxed.gpu.global.u64 [%0],%1;"::"l"(p),"l"((1ull<<32)|__float_as_uint(v)):"memory");}
__device__ __forceinline__ u64 ldll(const u64*p){u64 v; asm volatile("ld.relaxed.gpu.global.u64 %0,[%1];":"=l"(v):"l"(p):"memory"); return v;}
#ifdef TM
#define ST(i) { if((threadIdx.x&31)==0&&(threadIdx.x>>5)==((i)==1||(i)==9?8:0)){ u64 t_; asm volatile("mov.u64 %0,%%globaltimer;":"=l"(t_)); tm[blockIdx.x*16+(i)]=t_; } }
#else
#define ST(i)
#endif
__device__ __forceinline__ void st16(void*p,float v,float m,float s,u32 f){asm volatile("{.reg .b64 a,b; .reg .b128 c; mov.b64 a,{%1,%2}; mov.b64 b,{%3,%4}; mov.b128 c,{a,b}; st.relaxed.gpu.global.b128 [%0],c;}"::"l"(p),"f"(v),"f"(m),"f"(s),"r"(f):"memory");}
__device__ __forceinline__ void ld16(const void*p,float&v,float&m,float&s,u32&f){asm volatile("{.reg .b64 a,b; .reg .b128 c; ld.relaxed.gpu.global.b128 c,[%4]; mov.b128 {a,b},c; mov.b64 {%0,%1},a; mov.b64 {%2,%3},b;}":"=f"(v),"=f"(m),"=f"(s),"=r"(f):"l"(p):"memory");}
constexpr int TB=LT*256, NT=CH/KT, NL=CH/LT, SP=CH+8, NS=196608/TB/BL, GM=4, UN=(4+NL+3)/4*4;   // UN: ints a unit: sequence, kv head, chunk, length, the pages of its tiles
// dynamic shared memory: 1024 + NS*TB + GM*SP*6 + GM*NT*4 + 16*NS + 64
extern "C" __global__ void __launch_bounds__(288,BL) attn_decode(const bf*Q,const unsigned char*K,const unsigned char*V,bf*O,const int*units,int U,
    int HQ,int HKV,float scale,float*part,int*count,int maxch
#ifdef TM
,u64*tm
#endif
){
  extern __shared__ unsigned char raw[]; unsigned char*ring=(unsigned char*)(((size_t)raw+1023)&~(size_t)1023);
  float*ss=(float*)(ring+NS*TB); bf*sp=(bf*)(ss+GM*SP); float*sa=(float*)(sp+GM*SP); const u32 full=(sm(sa+GM*NT)+7)&~7u,empty=full+8*NS; int*flag=(int*)(ring+(empty+8*NS-sm(ring)));
  const int w=threadIdx.x>>5,l=threadIdx.x&31,g=l>>2,q=l&3,G=HQ/HKV;
  ST(0)
  if(threadIdx.x==0){ for(int i=0;i<NS;i++){mb_init(full+8*i,1);mb_init(empty+8*i,8);} asm volatile("fence.mbarrier_init.release.cluster;":::"memory"); }
  __syncthreads(); if(!TG) asm volatile("griddepcontrol.launch_dependents;");
  constexpr int CLN=CL?CL:1,OPC=CL?GM*128/CLN:1; __shared__ float pm[CL?CL*OPC:1],ml[CL?CL*2:1];   // a block's share of the outputs, from every chunk
  if(CL) asm volatile("barrier.cluster.arrive.relaxed;":::"memory");
  if(ID&&blockIdx.x>=U){ asm volatile("griddepcontrol.launch_dependents; griddepcontrol.wait;":::"memory"); if(threadIdx.x==0){ int v0,v1; asm volatile("ld.relaxed.gpu.global.s32 %0,[%1];":"=r"(v0):"l"(count+U):"memory");
      do{ __nanosleep(100); asm volatile("ld.relaxed.gpu.global.s32 %0,[%1];":"=r"(v1):"l"(count+U):"memory"); }while(v1-v0<ID); } return; }
  if(w==8){ if(l==0){ int it=0;
      for(int u=blockIdx.x;u<U;u+=gridDim.x){ const int*un=units+u*UN; int4 m=*(const int4*)un; int pg[NL]; 
        #pragma unroll
        for(int t=0;t<NL;t++) pg[t]=un[4+t];
        int hk=m.y,n=min(CH,m.w-m.z*CH),nl=n>0?(n+LT-1)/LT:0; ST(1)
        #pragma unroll
        for(int i=0;i<2*NL;i++) if(i%NL<nl){ int s=it%NS; if(PF&&it==NS){
          #pragma unroll
          for(int j=i;j<i+PF;j++) if(j<2*NL&&j%NL<nl) asm volatile("cp.async.bulk.prefetch.L2.global [%0],%1;"::"l"((j<NL?K:V)+((size_t)pg[j%NL]*HKV+hk)*TB),"r"(TB)); }
          if(it>=NS) mb_wait(empty+8*s,((it/NS)-1)&1); mb_expect(full+8*s,TB);
          bulk(sm(ring)+s*TB,(i<NL?K:V)+((size_t)pg[i%NL]*HKV+hk)*TB,TB,full+8*s); it++; } }
      ST(9)
      if(TG==1) asm volatile("griddepcontrol.launch_dependents;"); }
    if(CL) asm volatile("barrier.cluster.wait; barrier.cluster.arrive; barrier.cluster.wait;":::"memory");
    return; }
  auto bar=[]{asm volatile("bar.sync 1,256;":::"memory");};
  int it=0,seq=0,hk=0,c=0,ln=0; u32 qf[8][2];
  auto meta=[&](int u){ if(u<U){ int4 m=*(const int4*)(units+u*UN); seq=m.x;hk=m.y;c=m.z;ln=m.w; } };
  auto next=[&](int u){ if(u<U){ meta(u);
    #pragma unroll
    for(int k=0;k<8;k++){ const bf*p=Q+((size_t)seq*HQ+hk*G+g)*128+k*16+q*2; qf[k][0]=g<G?*(const u32*)p:0; qf[k][1]=g<G?*(const u32*)(p+8):0; } } };
  meta(blockIdx.x); ST(2) asm volatile("griddepcontrol.wait;":::"memory"); ST(3) next(blockIdx.x);   // the plan is older than the kernel before; Q is not
  for(int u=blockIdx.x;u<U;u+=gridDim.x){ const int n=min(CH,ln-c*CH),nt=n>0?(n+KT-1)/KT:0,nl=n>0?(n+LT-1)/LT:0,nch=(ln+CH-1)/CH;
    if(RD){ for(int t=0;t<2*nl;t++){ int i=it+t; mb_wait(full+8*(i%NS),(i/NS)&1); if(l==0) mb_arrive(empty+8*(i%NS)); } it+=2*nl; next(u+gridDim.x); continue; }
    // scores: 128 keys at a time, 16 a warp; a tile's slot is given back as soon as its 128 keys are done
    #pragma unroll
    for(int m=0;m<CH/128;m++){ int key=(m*8+w)*16,t=key/LT; if(t<nl){ int i=it+t,s=i%NS; mb_wait(full+8*s,(i/NS)&1);
        int r=key%LT+(l&7)+((l>>3)&1)*8; u32 base=sm(ring)+s*TB; float d[4]={0,0,0,0}; u32 a[8][4];
        #pragma unroll
        for(int k=0;k<8;k++){ u32 ad=base+(k>>2)*LT*128+r*128+((((k&3)*2+(l>>4))^(r&7))<<4);
          asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];":"=r"(a[k][0]),"=r"(a[k][1]),"=r"(a[k][2]),"=r"(a[k][3]):"r"(ad)); }
        #pragma unroll
        for(int k=0;k<8;k++) mma16816(d,a[k],qf[k][0],qf[k][1]);
        #pragma unroll
        for(int e=0;e<4;e++){ int hd=q*2+(e&1),kk=key+g+(e>>1)*8; if(hd<G) ss[hd*SP+kk]=kk<n?d[e]:-INFINITY; } }
      else if(key<nt*KT){
        #pragma unroll
        for(int e=0;e<4;e++){ int hd=q*2+(e&1); if(hd<G) ss[hd*SP+key+g+(e>>1)*8]=-INFINITY; } }
      __syncwarp(); if(l<128/LT&&m*(128/LT)+l<nl) mb_arrive(empty+8*((it+m*(128/LT)+l)%NS)); }
    ST(4)
    const int cseq=seq,chk=hk,cc=c; next(u+gridDim.x);   // the next unit's query loads run beside this one's work
    bar();
    // maxima of every tile, running, then P for this warp's share; 8/G warps a head
    const int per=8/G,hd=w/per,sub=w%per; if(hd<G){ float T[NT];
      #pragma unroll
      for(int t=0;t<NT;t++){ float v=-INFINITY; if(t<nt){
          #pragma unroll
          for(int i=0;i<KT/32;i++) v=fmaxf(v,ss[hd*SP+t*KT+i*32+l]); } T[t]=v; }
      #pragma unroll
      for(int o=16;o;o>>=1)
        #pragma unroll
        for(int t=0;t<NT;t++) T[t]=fmaxf(T[t],__shfl_xor_sync(~0u,T[t],o));
      float M=-INFINITY;
      #pragma unroll
      for(int t=0;t<NT;t++) if(t<nt){ float N=fmaxf(M,rint_(T[t]*scale)); if(sub==0&&l==0) sa[hd*NT+t]=ex2(M-N); M=N;
          if(t%per==sub){
            #pragma unroll
            for(int i=0;i<KT/64;i++){ float2 v=*(float2*)&ss[hd*SP+t*KT+i*64+l*2]; float x=expf2<EX>(fmaf(v.x,scale,-N)),y=expf2<EX>(fmaf(v.y,scale,-N)); if(EX){ if(v.x==-INFINITY)x=0; if(v.y==-INFINITY)y=0; }
              *(u32*)&sp[hd*SP+t*KT+i*64+l*2]=pack(x,y); } } }
      if(sub==0&&l==0) ss[GM*SP-8+hd]=M; }
    bar();
    float o[4]={0,0,0,0},L[4]={0,0,0,0}; const u32 ones[4]={0x3f803f80u,0x3f803f80u,0x3f803f80u,0x3f803f80u};
    for(int t=0;t<nt;t++){
      if(t){ float a0=q*2<G?sa[(q*2)*NT+t]:1.f,a1=q*2+1<G?sa[(q*2+1)*NT+t]:1.f; o[0]*=a0;o[1]*=a1;o[2]*=a0;o[3]*=a1;L[0]*=a0;L[1]*=a1;L[2]*=a0;L[3]*=a1; }
      #pragma unroll
      for(int pc=0;pc<KT/LT;pc++){ int j=t*(KT/LT)+pc; if(j>=nl) break; int i=it+nl+j,s=i%NS; u32 base=sm(ring)+s*TB+(w>>2)*LT*128;
      mb_wait(full+8*s,(i/NS)&1);
      #pragma unroll
      for(int k0=0;k0<LT/16;k0+=4){ u32 a[4][4],b[4][2];   // loads of 64 keys, then their products
        #pragma unroll
        for(int k=0;k<4;k++){ int r=(k0+k)*16+(l&7)+(l>>4)*8; u32 ad=base+r*128+((((w&3)*2+((l>>3)&1))^(r&7))<<4); const bf*pp=&sp[(g&(GM-1))*SP+j*LT+(k0+k)*16+q*2]; b[k][0]=g<G?*(const u32*)pp:0; b[k][1]=g<G?*(const u32*)(pp+8):0;
          asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];":"=r"(a[k][0]),"=r"(a[k][1]),"=r"(a[k][2]),"=r"(a[k][3]):"r"(ad)); }
        #pragma unroll
        for(int k=0;k<4;k++){ mma16816(o,a[k],b[k][0],b[k][1]); mma16816(L,ones,b[k][0],b[k][1]); } }
      __syncwarp(); if(l==0) mb_arrive(empty+8*s); } }
    it+=2*nl; ST(5)
    if(CL){ u32 rank; asm volatile("mov.u32 %0,%%cluster_ctarank;":"=r"(rank)); asm volatile("barrier.cluster.wait;":::"memory");
      auto put=[](float*p,u32 r,float v){ u32 a; asm volatile("mapa.shared::cluster.u32 %0,%1,%2;":"=r"(a):"r"(sm(p)),"r"(r)); asm volatile("st.shared::cluster.f32 [%0],%1;"::"r"(a),"f"(v):"memory"); };
      if(nt>0){
        #pragma unroll
        for(int e=0;e<4;e++){ int hd2=q*2+(e&1),x=hd2*128+w*16+g+(e>>1)*8; if(hd2<G) put(pm+cc%CLN*OPC+x%OPC,x/OPC,o[e]); }
        if(w==0&&q<2&&g<CL/GM){
          #pragma unroll
          for(int e=0;e<2;e++){ u32 r=(q*2+e)*(CL/GM)+g; put(ml+cc%CLN*2,r,ss[GM*SP-8+q*2+e]); put(ml+cc%CLN*2+1,r,L[e]); } } }
      asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;":::"memory");
      if(threadIdx.x<OPC){ float Mt=-INFINITY,Lt=0,x0=0; const int x=rank*OPC+threadIdx.x,j=cc/CLN,m=min(CLN,nch-j*CLN);
        u64*st=(u64*)part+((size_t)((cseq*HKV+chk)*maxch+j)*512+x)*3;   // state after cluster j, each value beside a flag
        if(j>0){ u64*p=st-512*3,v[3]; do{ v[0]=ldll(p); v[1]=ldll(p+1); v[2]=ldll(p+2); }while(!((v[0]&v[1]&v[2])>>32)); x0=__uint_as_float((u32)v[0]); Mt=__uint_as_float((u32)v[1]); Lt=__uint_as_float((u32)v[2]); p[0]=p[1]=p[2]=0; }
        for(int k=0;k<m;k++){ float mm=ml[k*2],N=fmaxf(Mt,mm),a=ex2(Mt-N),b=ex2(mm-N); Lt=fmaf(ml[k*2+1],b,Lt*a); x0=fmaf(pm[k*OPC+threadIdx.x],b,x0*a); Mt=N; }
        if((j+1)*CLN<nch){ stll(st,x0); stll(st+1,Mt); stll(st+2,Lt); } else O[((size_t)cseq*HQ+chk*G)*128+x]=(bf)pack(x0*(1.f/Lt),0.f); }
      continue; }
    if(MG){ if(TG==2) asm volatile("griddepcontrol.launch_dependents;"); 
      float4*pt=(float4*)part+(size_t)(cseq*HKV+chk)*maxch*512;
      #pragma unroll
      for(int e=0;e<4;e++){ int hd2=q*2+(e&1); if(hd2<G) st16(pt+(size_t)cc*512+hd2*128+w*16+g+(e>>1)*8,o[e],ss[GM*SP-8+hd2],L[e],1u); }
      bar(); float*mv=ss,*mm=ss+GM*SP/3,*ml=mm+GM*SP/3; const int W=(G*128+nch-1)/nch;   // scores are done with
      for(int i=threadIdx.x;i<nch*W;i+=256){ int x=cc*W+i%W; if(x<G*128){ float4*p=pt+(size_t)(i/W)*512+x; float v,m,s; u32 f; do ld16(p,v,m,s,f); while(!f); st16(p,0,0,0,0u); mv[i]=v; mm[i]=m; ml[i]=s; } }
      bar();
      for(int j=threadIdx.x;j<W;j+=256){ int x=cc*W+j; if(x<G*128){ float Mt=-INFINITY,Lt=0,x0=0;
        #pragma unroll 4
        for(int k=0;k<nch;k++){ float m=mm[k*W+j],N=fmaxf(Mt,m),a=ex2(Mt-N),b=ex2(m-N); Lt=fmaf(ml[k*W+j],b,Lt*a); x0=fmaf(mv[k*W+j],b,x0*a); Mt=N; }
        O[((size_t)cseq*HQ+chk*G)*128+x]=(bf)pack(x0*(1.f/Lt),0.f); } }
      if(ID&&threadIdx.x==0) asm volatile("red.relaxed.gpu.global.add.s32 [%0],1;"::"l"(count+U):"memory");
      ST(8)
      continue; }
    if(nch==1){
      #pragma unroll
      for(int e=0;e<4;e++){ int hd2=q*2+(e&1); if(hd2<G) O[((size_t)cseq*HQ+chk*G+hd2)*128+w*16+g+(e>>1)*8]=(bf)pack((o[e]+0.f)*(1.f/(L[e]+0.f)),0.f); }
      bar();
    } else { ST(6) float*pt=part+((size_t)(cseq*HKV+chk)*maxch+cc)*G*136;
      #pragma unroll
      for(int e=0;e<4;e++){ int hd2=q*2+(e&1); if(hd2<G){ pt[hd2*136+w*16+g+(e>>1)*8]=o[e]; if(w==0&&g==0&&e<2){ pt[hd2*136+128]=ss[GM*SP-8+hd2]; pt[hd2*136+129]=L[e]; } } }
      bar(); if(threadIdx.x==0){ int v; asm volatile("atom.acq_rel.gpu.global.add.s32 %0,[%1],1;":"=r"(v):"l"(count+cseq*HKV+chk):"memory"); *flag=v; ST(7) if(v==nch-1) count[cseq*HKV+chk]=0; } bar();
      if(*flag==nch-1){ const float*p0=part+(size_t)(cseq*HKV+chk)*maxch*G*136;
        for(int x=threadIdx.x;x<G*64;x+=256){ int hd2=x>>6,d=(x&63)*2; float Mt=-INFINITY,Lt=0,x0=0,x1=0;
          #pragma unroll 16
          for(int k=0;k<nch;k++){ const float*p=p0+((size_t)k*G+hd2)*136; float2 ov=__ldcg((const float2*)(p+d)),ml=__ldcg((const float2*)(p+128)); float N=fmaxf(Mt,ml.x),a=ex2(Mt-N),b=ex2(ml.x-N); Lt=fmaf(ml.y,b,Lt*a); x0=fmaf(ov.x,b,x0*a); x1=fmaf(ov.y,b,x1*a); Mt=N; }
          float f=1.f/Lt; *(u32*)(O+((size_t)cseq*HQ+chk*G+hd2)*128+d)=pack(x0*f,x1*f); } ST(8) }
      bar(); }
  }
}
