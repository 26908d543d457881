// For every linear shape of five models and many token counts: which cuBLASLt algorithms give the bits of the plain k16 chain?
// y[M][N] = x[M][K] . W[N][K]^T, bf16 in and out, f32 accumulation. Prints CSV:
// model,op,N,K,M,mode,rank,id,tile,stages,splitk,reduction,swizzle,custom,inner,cluster,workspace,mismatches,us
// mode: default (all algorithms allowed) or nosplit (reduction scheme none asked for; rows with splitk != 1 are still listed).
#include <cublasLt.h>
#include <cuda_runtime.h>
#include <cstdio>
#include <cstdlib>
#include <vector>
#include <algorithm>
#include <cstring>
#include "wgmma.h"
#define CK(x) do{auto e=(x); if(e){fprintf(stderr,"%s:%d error %d\n",#x,__LINE__,(int)e); exit(1);}}while(0)

// wide: zeros one in eight, and exponents spread over 2^-20 .. 2^19.
__global__ void fill(bf*p,size_t n,u32 seed,float scale,int wide){ for(size_t i=blockIdx.x*(size_t)blockDim.x+threadIdx.x;i<n;i+=(size_t)gridDim.x*blockDim.x){
  u64 z=(i+1)*0x9e3779b97f4a7c15ull+seed*0xbf58476d1ce4e5b9ull; z=(z^(z>>30))*0xbf58476d1ce4e5b9ull; z=(z^(z>>27))*0x94d049bb133111ebull; z^=z>>31;
  float u=0; for(int j=0;j<4;j++) u+=(float)((z>>(16*j))&0xffff)/65536.f-0.5f; u*=1.732f*scale; if(wide){ u=(z&7)==0?0.f:ldexpf(u,(int)((z>>3)%40)-20); } u32 b=__float_as_uint(u); p[i]=(bf)((b+0x7fff+((b>>16)&1))>>16); } }

#include "chain_ref.cu"
__global__ void diff(const bf*a,const bf*b,size_t n,unsigned long long*c){ unsigned long long k=0; for(size_t i=blockIdx.x*(size_t)blockDim.x+threadIdx.x;i<n;i+=(size_t)gridDim.x*blockDim.x) k+=a[i]!=b[i]; if(k) atomicAdd(c,k); }

struct Shape{const char*model,*op;int N,K;};
int main(int argc,char**argv){
  double budget=argc>1?atof(argv[1]):120; int wide=argc>2; // a second argument: wide data, fewer token counts, no times
  cudaEvent_t t0,t1,tb; CK(cudaEventCreate(&t0));CK(cudaEventCreate(&t1));CK(cudaEventCreate(&tb));
  std::vector<Shape> S; auto add=[&](const char*m,int h,int qkv,int o,int f,int v){S.push_back({m,"qkv",qkv,h});S.push_back({m,"o",h,o});S.push_back({m,"gate_up",2*f,h});S.push_back({m,"down",h,f});S.push_back({m,"lm_head",v,h});};
  add("qwen3-8b",4096,6144,4096,12288,151936); add("llama-3.1-8b",4096,6144,4096,14336,128256); add("gemma-3-4b",2560,4096,2048,10240,262208);
  add("qwen3-14b",5120,7168,5120,17408,151936); add("gemma-3-12b",3840,8192,4096,15360,262208);
  std::vector<int> Ms={1,2,4,8,16,24,25,32,48,64,96,128,192,256,320,384,512,768,1024,2048,4096,8192};
  size_t maxW=0,maxX=0,maxY=0; for(auto&s:S){maxW=std::max(maxW,(size_t)s.N*s.K);maxX=std::max(maxX,(size_t)8192*s.K);maxY=std::max(maxY,(size_t)(strcmp(s.op,"lm_head")?8192:1024)*s.N);}
  bf*W,*X,*Y,*R; unsigned long long*cnt; void*ws; size_t wsz=32<<20; CK(cudaMalloc(&W,maxW*2));CK(cudaMalloc(&X,maxX*2));CK(cudaMalloc(&Y,maxY*2));CK(cudaMalloc(&R,maxY*2));CK(cudaMalloc(&cnt,8));CK(cudaMalloc(&ws,wsz));
  fill<<<2048,256>>>(W,maxW,1,0.02f,wide); fill<<<2048,256>>>(X,maxX,2,1.f,wide);
  if(wide) Ms={1,8,24,32,64,128,256,512,2048};
  cublasLtHandle_t lt; CK(cublasLtCreate(&lt)); fprintf(stderr,"cublasLt %zu\n",cublasLtGetVersion());
  printf("model,op,N,K,M,mode,rank,id,tile,stages,splitk,reduction,swizzle,custom,inner,cluster,workspace,mismatches,us\n");
  CK(cudaEventRecord(tb));
  for(auto&s:S){ for(int M:Ms){ if(!strcmp(s.op,"lm_head")&&M>1024) continue;
    CK(cudaEventRecord(t1));CK(cudaEventSynchronize(t1)); float el; CK(cudaEventElapsedTime(&el,tb,t1)); if(el/1e3>budget){fprintf(stderr,"budget spent at %s %s %d\n",s.model,s.op,M); return 0;}
    chain_ref<<<dim3((s.N+127)/128,(M+63)/64),256>>>(X,W,R,M,s.N,s.K);
    cublasLtMatmulDesc_t d; CK(cublasLtMatmulDescCreate(&d,CUBLAS_COMPUTE_32F,CUDA_R_32F)); cublasOperation_t T=CUBLAS_OP_T,Nn=CUBLAS_OP_N;
    CK(cublasLtMatmulDescSetAttribute(d,CUBLASLT_MATMUL_DESC_TRANSA,&T,sizeof T)); CK(cublasLtMatmulDescSetAttribute(d,CUBLASLT_MATMUL_DESC_TRANSB,&Nn,sizeof Nn));
    cublasLtMatrixLayout_t a,b,c; CK(cublasLtMatrixLayoutCreate(&a,CUDA_R_16BF,s.K,s.N,s.K));CK(cublasLtMatrixLayoutCreate(&b,CUDA_R_16BF,s.K,M,s.K));CK(cublasLtMatrixLayoutCreate(&c,CUDA_R_16BF,s.N,M,s.N));
    for(int mode=0;mode<2;mode++){
      cublasLtMatmulPreference_t p; CK(cublasLtMatmulPreferenceCreate(&p)); CK(cublasLtMatmulPreferenceSetAttribute(p,CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,&wsz,sizeof wsz));
      uint32_t mask=CUBLASLT_REDUCTION_SCHEME_NONE; if(mode) CK(cublasLtMatmulPreferenceSetAttribute(p,CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,&mask,sizeof mask));
      cublasLtMatmulHeuristicResult_t h[8]; int n=0; auto st=cublasLtMatmulAlgoGetHeuristic(lt,d,a,b,c,c,p,mode?8:4,h,&n); if(st) n=0;
      for(int r=0;r<n;r++){ int id=-1,tile=-1,stg=-1,sk=-1,red=-1,sw=-1; uint32_t cus=0; uint16_t inn=0,clu=0; size_t o;
        auto get=[&](cublasLtMatmulAlgoConfigAttributes_t k,void*v,size_t z){cublasLtMatmulAlgoConfigGetAttribute(&h[r].algo,k,v,z,&o);};
        get(CUBLASLT_ALGO_CONFIG_ID,&id,4);get(CUBLASLT_ALGO_CONFIG_TILE_ID,&tile,4);get(CUBLASLT_ALGO_CONFIG_STAGES_ID,&stg,4);get(CUBLASLT_ALGO_CONFIG_SPLITK_NUM,&sk,4);get(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,&red,4);
        get(CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING,&sw,4);get(CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION,&cus,4);get(CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID,&inn,2);get(CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID,&clu,2);
        float one=1,zero=0; CK(cudaMemset(Y,0xff,(size_t)M*s.N*2)); CK(cudaMemset(cnt,0,8));
        auto run=[&]{return cublasLtMatmul(lt,d,&one,W,a,X,b,&zero,Y,c,Y,c,&h[r].algo,ws,wsz,0);};
        if(run()){printf("%s,%s,%d,%d,%d,%s,%d,%d,,,,,,,,,,failed,\n",s.model,s.op,s.N,s.K,M,mode?"nosplit":"default",r,id);continue;}
        diff<<<1024,256>>>(Y,R,(size_t)M*s.N,cnt); unsigned long long k; CK(cudaMemcpy(&k,cnt,8,cudaMemcpyDeviceToHost));
        float us=-1; if(!wide&&(r==0||(mode&&k==0))){ int reps=5; run(); CK(cudaEventRecord(t0)); for(int i=0;i<reps;i++) run(); CK(cudaEventRecord(t1)); CK(cudaEventSynchronize(t1)); CK(cudaEventElapsedTime(&us,t0,t1)); us=us*1e3/reps; }
        printf("%s,%s,%d,%d,%d,%s,%d,%d,%d,%d,%d,%d,%d,%u,%u,%u,%zu,%llu,%.1f\n",s.model,s.op,s.N,s.K,M,mode?"nosplit":"default",r,id,tile,stg,sk,red,sw,cus,inn,clu,h[r].workspaceSize,k,us);
      } cublasLtMatmulPreferenceDestroy(p); }
    cublasLtMatrixLayoutDestroy(a);cublasLtMatrixLayoutDestroy(b);cublasLtMatrixLayoutDestroy(c);cublasLtMatmulDescDestroy(d); } }
  CK(cudaDeviceSynchronize()); return 0;
}
