"""Decode attention for few sequences (attn_few.cu): bits against the scalar reference, times, stamps of each stage.
usage: run_few.py CUBINDIR OUT.json   cubins: ref.cubin, f_<tag>.cubin (tags like NS6_KR2_TG3), t_<tag>.cubin the same with -DTM"""
import sys, os, re, json, glob, time, ctypes as C
import numpy as np, torch
from drv import Module, graph_us, cu, ck, _Attr, _Cfg
D, OUT = sys.argv[1], sys.argv[2]; sys.argv[2:] = [os.devnull, "-"]
import run_attn as A   # its helpers only
HQ, HKV, bf16 = A.HQ, A.HKV, torch.bfloat16
R = json.load(open(OUT)) if os.path.exists(OUT) else {}
P = dict(KT=128, CH=512, EX=0)
GROUPS = [[1, 2, 63, 64, 65, 127, 128, 129, 192, 255, 256, 257, 320, 321, 384, 511], [512, 513, 1000, 1025], [448, 449, 1024, 1088], [2049, 2112], [4111], [8192], [64, 7000], [8191], [8129]]
KINDS = ["normal", "peaky", "rising", "wide", "zeros"]
def save(): json.dump(R, open(OUT, "w"), indent=1)
def tag(path): d = dict(NS=6, KR=2, BL=2, MS=0, RS=0); d.update({k: int(v) for k, v in re.findall(r"([A-Z]{2})(\d+)", os.path.basename(path))}); return d
def i32(x): return torch.tensor(x, dtype=torch.int32, device="cuda")


class Plan:
    def __init__(self, lens, clusters):
        u, nx = [], 0
        for s, n in enumerate(lens):
            k = -(-n // 64); pg = list(range(nx, nx + k)); nx += k; nch = -(-n // 512); cs = range(-(-nch // 16) * 16 if clusters else nch)
            u += [[s, h, c, n] + (pg[c * 8:c * 8 + 8] + [0] * 8)[:8] for h in range(HKV) for c in cs] if clusters else [[s, h, c, n] + (pg[c * 8:c * 8 + 8] + [0] * 8)[:8] for c in cs for h in range(HKV)]
        self.units, self.U, self.np, self.mc = i32(u), len(u), nx, max(-(-n // 512) for n in lens)
        self.msg = torch.zeros(len(lens) * HKV * self.mc * 352 * 4, device="cuda"); self.cnt = i32([0] * 200)


class Variant:
    def __init__(self, path):
        self.p = tag(path); self.m = Module(path); self.smem = 1024 + self.p["NS"] * 16384 + 16384; self.tm = "/t_" in path

    def __call__(self, pl, q, k, v, o, pdl, ptrs=None, calls=1, tm=None, turn=0):
        p = self.p; grid = pl.U if p["MS"] or p["RS"] else max(pl.U, 132)
        self.m.attn_few((grid,), 288 if p["RS"] else 256, q, k, v, o, pl.units, pl.U, HQ, HKV, A.scale, pl.msg, pl.cnt, pl.mc, q if ptrs is None else ptrs, calls, turn, *([tm] if self.tm else []), smem=self.smem, pdl=pdl, cluster=16 if p["MS"] else 0)


def padimg(k): t = -(-k.shape[0] // 64) * 64; return A.image(torch.cat([k, torch.zeros(t - k.shape[0], HKV, 128, dtype=bf16, device="cuda")]), 64)
def addr(*t): return torch.tensor([x.data_ptr() for x in t], dtype=torch.int64, device="cuda")


cases, CALLS = [], 3
def finish():
    """Waits; a kernel that does not end ends the run (start it again, it goes on with the next variant)."""
    e = torch.cuda.Event(); e.record(); t = time.time()
    while not e.query():
        if time.time() - t > 2: print("a kernel did not end", flush=True); os._exit(3)
def prepare():
    for lens in GROUPS:
        for kind in KINDS:
            seqs = [A.data(n, kind, 11 + n) for n in lens]; q = torch.stack([s[0][-1] for s in seqs]).contiguous(); want, x = [], q
            for _ in range(CALLS):   # a resident kernel's next call has this one's output for its queries
                w = []
                for i, (s, n) in enumerate(zip(seqs, lens)): s[0][n - 1] = x[i]; w.append(A.reference(s[0], s[1], s[2], [n - 1], P))
                x = torch.cat(w); want.append(x)
            cases.append((lens, kind, q, torch.cat([padimg(s[1]) for s in seqs]), torch.cat([padimg(s[2]) for s in seqs]), want))
    torch.cuda.synchronize()


def check(f):
    out = {}; n = 0
    for lens, kind, q, k, v, want in cases:
        pl = Plan(lens, f.p["MS"])
        if pl.U > 132 * f.p["BL"] and not f.p["MS"]: raise RuntimeError("not all resident")
        if f.p["RS"]:
            o = [torch.full_like(q, float("nan")) for _ in range(CALLS)]; pt = addr(*sum(([([q] + o)[i], k, v, o[i]] for i in range(CALLS)), []))
            for _ in range(2):
                for x in o: x.fill_(float("nan"))
                f(pl, q, k, v, o[0], False, pt, CALLS)
            got = o
        else:
            got = []
            for pdl in (False, True):
                for _ in range(2): o = torch.full_like(q, float("nan")); f(pl, q, k, v, o, pdl, turn=1); f(pl, q, k, v, o, pdl, turn=2)
                got.append(o)
        finish()
        for i, o in enumerate(got):
            b = A.bad(o, want[i] if f.p["RS"] else want[0]); n += o.numel()
            if b: out[f"{kind} {lens}"] = b
        if int(pl.msg.view(torch.int32).view(-1, 4)[:, 3].abs().max()): out[f"flags left {kind} {lens}"] = 1
    return sum(out.values()) and out, n


def inputs(n, t, L):
    pl = Plan([t] * n, False); mk = lambda: torch.randn(pl.np, HKV, 2, 64, 64, device="cuda").to(bf16)
    return [(torch.randn(n, HQ, 128, device="cuda").to(bf16), mk(), mk(), torch.empty(n, HQ, 128, device="cuda", dtype=bf16)) for _ in range(L)]


def chain(ins): return addr(*sum(([ins[i][0] if i == 0 else ins[i - 1][3], ins[i][1], ins[i][2], ins[i][3]] for i in range(len(ins))), []))


def clusters():
    f = Module(sorted(glob.glob(f"{D}/f_*.cubin"))[0]).attn_few; out = {}
    for smem in (1024 + 6 * 16384 + 16384, 220000):
        ck(cu.cuFuncSetAttribute(f.h, 8, smem)); ck(cu.cuFuncSetAttribute(f.h, 14, 1))
        for n in (2, 4, 8, 16):
            at = (_Attr * 1)(); at[0].id = 4; at[0].val[0] = n; at[0].val[1] = at[0].val[2] = 1; cfg = _Cfg(n, 1, 1, 256, 1, 1, smem, None, at, 1); v = C.c_int()
            ck(cu.cuOccupancyMaxActiveClusters(C.byref(v), f.h, C.byref(cfg)), "clusters"); out[f"{smem} bytes, {n} blocks"] = v.value
    return out


def stamps(f, ins, pdl, t):
    pl = Plan([t], False); L = len(ins); tms = torch.zeros(L, 132, 16, dtype=torch.int64, device="cuda")
    if f.p["RS"]: tms = torch.zeros(L, pl.U, 16, dtype=torch.int64, device="cuda"); f(pl, *ins[0], False, chain(ins), L, tms); f(pl, *ins[0], False, chain(ins), L, tms); torch.cuda.synchronize()
    else:
        s = torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(s):
            for i, x in enumerate(ins): f(pl, *x, pdl, tm=tms[i], turn=i + 1)
        torch.cuda.synchronize(); g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            for i, x in enumerate(ins): f(pl, *x, pdl, tm=tms[i], turn=i + 1)
        for _ in range(3): g.replay()
        torch.cuda.synchronize()
    T = tms.cpu().numpy().astype(np.float64)[6:-2]; T = np.where(T == 0, np.nan, T)[:, :pl.U]; end = np.nanmax(T[:, :, 15], 1); out = {}
    m = lambda x: [round(float(np.median([fn(c) for c in x]))) for fn in (np.nanmin, np.nanmedian, np.nanmax)]
    for j, nm in ((2, "before the wait"), (4, "K here"), (5, "scores"), (6, "P"), (7, "PV"), (8, "staged"), (9, "received"), (10, "all received"), (11, "merged"), (14, "end")): out[nm] = m(T[:, :, j] - T[:, :, 3])
    ns = {nm: m(T[1:, :, j] - end[:-1, None]) for j, nm in ((13, "start"), (12, "before the wait"), (1, "wait over"), (15, "end")) if not np.isnan(T[:, :, j]).all()}
    return {"cycles from the wait's end, of blocks the least, median, most": out, "ns from the end of the call before": ns, "period": round(float((end[-1] - end[0]) / 1e3 / (len(end) - 1)), 2)}


if "clusters" not in R: R["clusters at once"] = clusters(); save(); print(R["clusters at once"])
prepare(); print("prepared", len(cases), time.process_time(), flush=True)
vs = {os.path.basename(x)[2:-6]: x for x in sorted(glob.glob(f"{D}/f_*.cubin"), key=lambda x: ("MS" in x, "KR0" in x, x))}; todo = [n for n in vs if n not in R]
for nm in todo:
    R[nm] = {"error": "did not end"}; save(); f = Variant(vs[nm]); r = {"regs": f.m.attn_few.regs()[:2]}
    try: r["bad"], r["outputs compared"] = check(f)
    except RuntimeError as e: r["error"] = str(e); R[nm] = r; save(); print(nm, r, flush=True); torch.cuda.synchronize(); continue   # a lost context ends the run; start it again
    R[nm] = r; save()
todo = [n for n in vs if "error" not in R[n] and not any(k.startswith("us") for k in R[n])]
shapes = ((1, 8192), (1, 4096), (8, 2048))
for n, t in shapes:
    ins = inputs(n, t, 36 if n == 1 else 16); pt = chain(ins)
    for turn in range(4):
        for nm in todo:
            f = Variant(vs[nm]); pl = Plan([t] * n, f.p["MS"])
            if f.p["RS"]:
                if pl.U > 132: continue
                R[nm].setdefault(f"us {n}x{t}", []).append(round(graph_us([lambda: f(pl, *ins[0], False, pt, len(ins))], loops=3, reps=7) / len(ins), 2))
            else:
                for pdl in (False, True): R[nm].setdefault(f"us {n}x{t}" + " pdl" * pdl, []).append(round(graph_us([lambda x=x, i=i: f(pl, *x, pdl, turn=i + 1) for i, x in enumerate(ins)], loops=2, reps=7), 2))
    if n == 1:
        for path in sorted(glob.glob(f"{D}/t_*.cubin")):
            k = f"stamps {t} " + os.path.basename(path)[2:-6]
            if k not in R: R[k] = {"error": "did not end"}; save(); R[k] = stamps(Variant(path), ins[:24], True, t); print(k, json.dumps(R[k]))
    del ins; save()
for nm in todo: print(nm, "|", R[nm].get("error") or R[nm]["bad"], *(f"| {k[3:]} {min(v)}" + (f"-{max(v)}" if max(v) > min(v) else "") for k, v in R[nm].items() if k.startswith("us")))
save()
