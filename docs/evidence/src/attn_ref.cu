// Scalar reference of the attention contract (attn.cuh): one block of 128 threads a (row, head). K, V natural: [T][HKV][128].
#include "attn.cuh"
extern "C" __global__ void attn_ref(const bf*Q,const bf*K,const bf*V,bf*O,const int*rows,int HQ,int HKV,int kt,int ch,int ex,float scale,float*Sbuf,int maxT){
  __shared__ bf P[256]; int p=rows[blockIdx.x],h=blockIdx.y,hk=h/(HQ/HKV),t=threadIdx.x,n=p+1; float*S=Sbuf+((size_t)blockIdx.y*gridDim.x+blockIdx.x)*maxT;
  for(int j=t;j<n;j+=128){ u32 c=0; for(int k=0;k<128;k+=16) c=k16_step(Q+((size_t)p*HQ+h)*128+k,1,K+((size_t)j*HKV+hk)*128+k,1,c); S[j]=__uint_as_float(c); }
  __syncthreads(); if(!ch) ch=1<<30;
  float Mt=-INFINITY,Lt=0,Ot=0;
  for(int c0=0;c0<n;c0+=ch){ float M=-INFINITY; u32 o=0,L=0; 
    for(int j0=c0;j0<n&&j0<c0+ch;j0+=kt){ int m=min(kt,n-j0); float T=-INFINITY; for(int i=0;i<m;i++) T=fmaxf(T,S[j0+i]);
      float N=fmaxf(M,rint_(T*scale)),a=ex2(M-N); M=N; o=__float_as_uint(__uint_as_float(o)*a); L=__float_as_uint(__uint_as_float(L)*a);
      __syncthreads();
      for(int i=t;i<kt;i+=128){ float x=i<m?fmaf(S[j0+i],scale,-N):0.f; float y=ex==0?ex2(x):ex==3?ex2poly<3>(x):ex==4?ex2poly<4>(x):ex2poly<5>(x); P[i]=i<m?(bf)pack(y,0.f):0; }
      __syncthreads();
      for(int k=0;k<kt;k+=16){ bf v[16],e[16]; for(int i=0;i<16;i++){ v[i]=j0+k+i<n?V[((size_t)(j0+k+i)*HKV+hk)*128+t]:0; e[i]=0x3f80; } o=k16_step(P+k,1,v,1,o); L=k16_step(P+k,1,e,1,L); } }
    float N=fmaxf(Mt,M),a=ex2(Mt-N),b=ex2(M-N); Ot=fmaf(__uint_as_float(o),b,Ot*a); Lt=fmaf(__uint_as_float(L),b,Lt*a); Mt=N; }
  O[((size_t)blockIdx.x*HQ+h)*128+t]=(bf)pack(Ot*(1.f/Lt),0.f);
}
// The model against the tensor core: same arguments as the kernels of probe.cu. grid (64, batches), 256 threads.
extern "C" __global__ void g_model(const bf*A,const bf*B,const float*C,float*D,int K,int zero){
  A+=(size_t)blockIdx.y*64*K; B+=(size_t)blockIdx.y*256*K; C+=(size_t)blockIdx.y*16384; D+=(size_t)blockIdx.y*16384; int r=blockIdx.x,c=threadIdx.x;
  u32 d=zero?0:__float_as_uint(C[r*256+c]); for(int k=0;k<K;k+=16) d=k16_step(A+(size_t)r*K+k,1,B+(size_t)c*K+k,1,d); D[r*256+c]=__uint_as_float(d); }
