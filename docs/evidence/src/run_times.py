"""When each stage of a decode call happens, in microseconds from its first block's start: least / median / most over blocks, three calls in a chain.
usage: run_times.py CUBIN:LT:BL ...   cubins of attn_decode.cu compiled with -DTM"""
import sys, math
import numpy as np, torch
from drv import Module
HQ,HKV=32,8; scale=float(np.float32(math.log2(math.e)/math.sqrt(128)))
for f,kt,bl in ((x.split(":")[0],int(x.split(":")[1]),int(x.split(":")[2])) for x in sys.argv[1:]):
    m=Module(f); lt=kt; ch=512; KT=128; ns=196608//(lt*256)//bl
    smem=1024+ns*lt*256+4*(ch+8)*6+4*(ch//KT)*4+16*ns+64
    n=8192; nl=ch//lt; un=-(-(4+nl)//4)*4; k=n//lt; pg=list(range(k)); u=[[0,h,c,n]+pg[c*nl:(c+1)*nl] for c in range(n//ch) for h in range(HKV)]; u=[x+[0]*(un-len(x)) for x in u]
    U=len(u); units=torch.tensor(u,dtype=torch.int32,device="cuda"); part=torch.zeros(HKV*16*3072,device="cuda"); cnt=torch.zeros(U+1,dtype=torch.int32,device="cuda")
    L=12; mk=lambda: torch.randn(k,HKV,2,lt,64,device="cuda").to(torch.bfloat16)
    ins=[(torch.randn(1,HQ,128,device="cuda").to(torch.bfloat16),mk(),mk(),torch.empty(1,HQ,128,device="cuda",dtype=torch.bfloat16),torch.zeros(132,16,dtype=torch.int64,device="cuda")) for _ in range(L)]
    for pdl in (False,True):
        def go(i): q,a,b,o,tm=i; m.attn_decode((132,),288,q,a,b,o,units,U,HQ,HKV,scale,part,cnt,16,tm,smem=smem,pdl=pdl)
        s=torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(s):
            for i in ins[:2]: go(i)
        torch.cuda.synchronize(); g=torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            for i in ins: go(i)
        for _ in range(3): g.replay()
        torch.cuda.synchronize()
        T=np.stack([i[4].cpu().numpy() for i in ins]).astype(np.float64)  # call, block, stamp
        T[T==0]=np.nan
        names="start plan prewait wait scores pv partial atomic merged issued".split()
        print(f, "pdl",pdl)
        for c in range(6,9):
            base=np.nanmin(T[c,:,0]); prev=np.nanmax(T[c-1,:,8])
            print(" call",c,"prev end %+.2f"%((prev-base)/1e3)," ".join("%s %.2f/%.2f/%.2f"%(nm,*( (np.nanmin(T[c,:,j])-base)/1e3,(np.nanmedian(T[c,:,j])-base)/1e3,(np.nanmax(T[c,:,j])-base)/1e3)) for j,nm in enumerate(names)))
        print(" per call", (np.nanmax(T[10,:,8])-np.nanmax(T[5,:,8]))/5e3)
