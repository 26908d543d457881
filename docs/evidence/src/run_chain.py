"""Chain products beside cuBLAS: bits against chain_ref, microseconds in graph replays with rotated weights.
usage: run_chain.py CUBINDIR OUT.json   cubins: chain_ref, cm_<tag> (mma.sync), cw_<tag> (wgmma)"""
import sys, os, re, json, glob
import torch, torch.nn.functional as F
from drv import Module, TMap, graph_us
D = sys.argv[1]; ref = Module(f"{D}/chain_ref.cubin"); bf = torch.bfloat16; R = {}
SH = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)]
tags = lambda p, **d: [({**d, **{k: int(v) for k, v in re.findall(r"([A-Z]{2})(\d+)", os.path.basename(f))}}, Module(f), os.path.basename(f)[:-6]) for f in sorted(glob.glob(f"{D}/{p}_*.cubin"))]
mm, wgs = tags("cm", WN=4, BX=4, NT=1), tags("cw", WG=1, TN=128, CX=1, CW=1, BX=2)


def ref_out(x, w):
    y = torch.empty(x.shape[0], w.shape[0], dtype=bf, device="cuda"); ref.chain_ref((-(-w.shape[0] // 128), -(-x.shape[0] // 64)), 256, x, w, y, x.shape[0], w.shape[0], x.shape[1]); return y


def bad(a, b): return int((a.view(torch.int16) != b.view(torch.int16)).sum())


for N, K in SH:
    n = max(2, min(12, int(1.2e9 / (N * K * 2)) + 1)); ws = [torch.randn(N, K, device="cuda").mul_(.02).to(bf) for _ in range(n)]
    for M in (1, 8, 32, 64, 128):
        x = torch.randn(M, K, device="cuda").to(bf); y = torch.empty(M, N, dtype=bf, device="cuda"); want = ref_out(x, ws[0]); r = {"floor": round(N * K * 2 / 4.28e6, 1)}; R[f"{N}x{K} M{M}"] = r
        r["cublas"] = [round(graph_us([lambda w=w: F.linear(x, w) for w in ws], loops=2, reps=5), 2), bad(F.linear(x, ws[0]), want)]
        runs = []
        for p, m, nm in mm:
            rows = p["WN"] * 16
            if M > 8 * p["NT"] or (p["NT"] > 1 and M <= 8) or N % rows or K % (64 * p["BX"]): continue
            sb = p["BX"] * (rows + 8 * p["NT"]) * 128; ns = 212 * 1024 // sb; tx = TMap(x, 8 * p["NT"]); tw = [TMap(w, rows) for w in ws]; g = min(132, N // rows)
            runs.append((nm, [lambda pdl, t=t, m=m, p=p, tx=tx, g=g, ns=ns, sb=sb: m.chain_mma((g,), p["WN"] * 32 + 32, t, tx, y, N, K, M, smem=1024 + ns * sb + 16 * ns, pdl=pdl) for t in tw]))
        for p, m, nm in wgs:
            if M > p["TN"] or M * 2 <= p["TN"] or K % (64 * p["BX"]) or M < 32: continue
            rows, tc, cl = p["WG"] * 64, p["TN"] // p["CW"], p["CX"] * p["CW"]; sb = p["BX"] * (rows + tc) * 128; ns = 220 * 1024 // sb
            tx = TMap(x, tc // p["CX"]); tw = [TMap(w, rows // p["CW"]) for w in ws]; g = min(132 // cl * cl, -(-(-(-N // rows)) // p["CX"]) * cl)
            runs.append((nm, [lambda pdl, t=t, m=m, p=p, tx=tx, g=g, ns=ns, sb=sb, cl=cl: m.chain_wg((g,), p["WG"] * 128 + 128, t, tx, y, N, K, M, smem=1024 + ns * sb + 16 * ns, pdl=pdl, cluster=cl if cl > 1 else 0) for t in tw]))
        for nm, fs in runs:
            try:
                y.fill_(float("nan")); fs[0](False); torch.cuda.synchronize(); b = bad(y, want)
                r[nm] = [round(graph_us([lambda f=f: f(False) for f in fs], loops=2, reps=5), 2), round(graph_us([lambda f=f: f(True) for f in fs], loops=2, reps=5), 2), b]
            except RuntimeError as e: r[nm] = str(e)[:60]
        best = sorted((v[0], k) for k, v in r.items() if isinstance(v, list) and k != "cublas" and v[2] == 0)[:2]; bp = sorted((v[1], k) for k, v in r.items() if isinstance(v, list) and k != "cublas" and v[2] == 0)[:1]
        print(N, K, M, "floor", r["floor"], "cublas", r["cublas"], "best", best, "pdl", bp, "bad", {k: v if isinstance(v, str) else v[2] for k, v in r.items() if isinstance(v, str) or (isinstance(v, list) and v[-1] and k != "cublas")}, flush=True)
    del ws
json.dump(R, open(sys.argv[2], "w"), indent=0)
