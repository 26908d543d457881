"""Attention prototypes: bits against the scalar reference, times beside PyTorch's flash and cuDNN attention.
usage: run_attn.py CUBINDIR OUT.json [what...]   cubins: ref.cubin, p_<tag>.cubin, d_<tag>.cubin, tags like KT64_NC2_CH512_EX0"""
import sys, os, re, json, math, glob
import numpy as np, torch
from drv import Module, graph_us
import run_peers as peers
D = sys.argv[1]; what = sys.argv[3:] or ["model", "prefill", "decode", "peers"]
ref = Module(f"{D}/ref.cubin"); HQ, HKV = 32, 8; scale = float(np.float32(math.log2(math.e) / math.sqrt(128))); R = {}
bf16 = torch.bfloat16


def tag(path):
    d = dict(LT=0, TG=0, PF=0, MG=0, ID=0, KT=64, NC=2, CH=512, EX=0, SU=0, OT=0, ST=4, PP=0, BL=2, RD=0, CL=0); d.update({k: int(v) for k, v in re.findall(r"([A-Z]{2})(\d+)", os.path.basename(path))}); return d


def image(x, kt):
    """[T][H][128] -> [T/kt][H][2][kt][8 chunks, swizzled][8]"""
    t, h, _ = x.shape; v = x.view(t // kt, kt, h, 2, 8, 8).permute(0, 2, 3, 1, 4, 5).contiguous()
    key = torch.arange(kt, device=x.device) & 7; idx = (torch.arange(8, device=x.device)[None, :] ^ key[:, None])
    return torch.gather(v, 4, idx[None, None, None, :, :, None].expand_as(v)).contiguous()


def data(t, kind, seed, hkv=HKV):
    g = torch.Generator(device="cuda"); g.manual_seed(seed); n = lambda *s: torch.randn(*s, device="cuda", generator=g)
    q, k, v = n(t, HQ, 128), n(t, hkv, 128), n(t, hkv, 128)
    if kind == "peaky": q *= 6; k[::37] *= 4
    if kind == "rising": k *= torch.linspace(.1, 8, t, device="cuda")[:, None, None]; q *= 3
    if kind == "wide": v *= torch.exp2(torch.randint(-60, 60, (t, hkv, 1), device="cuda", generator=g).float()); q *= torch.exp2(torch.randint(-6, 5, (t, HQ, 1), device="cuda", generator=g).float())
    if kind == "zeros": q[::3] = 0; k[1::2] = 0; v[::5] = 0; v[::7] *= -0.0
    return q.to(bf16), k.to(bf16), v.to(bf16)


def reference(q, k, v, rows, p):
    r = torch.tensor(rows, dtype=torch.int32, device="cuda"); o = torch.zeros(len(rows), HQ, 128, dtype=bf16, device="cuda"); t = k.shape[0]
    buf = torch.empty(len(rows) * HQ * t, device="cuda"); ref.attn_ref((len(rows), HQ), 128, q, k, v, o, r, HQ, HKV, p["KT"], p["CH"], p["EX"], scale, buf, t); return o


def smem_prefill(p): return 1280 + p["NC"] * 16384 + 2 * p["ST"] * p["KT"] * 256 + (p["NC"] * 32768 if p["OT"] else 0)


def prefill(m, p, q, ki, vi, o):
    t = q.shape[0]; m.attn_prefill((HQ, -(-t // (64 * p["NC"]))), 128 * (p["NC"] + 1), q, ki, vi, o, t, HQ, HKV, scale, smem=smem_prefill(p))


def pimg(x, kt): return image(x, kt).transpose(0, 1).contiguous()


def bad(a, b): return int((a.view(torch.int16) != b.view(torch.int16)).sum())


def f64(q, k, v, rows):
    out = []
    for p in rows:
        kk, vv = k[:p + 1].double().repeat_interleave(HQ // HKV, 1), v[:p + 1].double().repeat_interleave(HQ // HKV, 1)
        s = torch.einsum("hd,jhd->hj", q[p].double(), kk) / math.sqrt(128); out.append(torch.einsum("hj,jhd->hd", torch.softmax(s, 1), vv))
    return torch.stack(out)


def save(): json.dump(R, open(sys.argv[2], "w"), indent=1)


def rel(a, b): return float((a.double() - b).norm() / b.norm())


if "model" in what:
    from classes import cls, NAMES
    pm = Module(f"{D}/probe.cubin"); tot = 0; res = {}
    for n in NAMES:
        w = 0
        for _ in range(2):
            a, b, c = (torch.from_numpy(np.stack(x).view({2: np.int16, 4: np.int32}[x[0].itemsize])).cuda() for x in zip(*[cls(n) for _ in range(48)]))
            for z in (0, 1):
                d1 = torch.zeros(48, 64, 256, device="cuda"); d2 = torch.ones_like(d1); pm.g_mma((16, 48), 128, a, b, c, d1, 16, z); ref.g_model((64, 48), 256, a, b, c, d2, 16, z)
                w += int((d1.view(torch.int32) != d2.view(torch.int32)).sum()); tot += d1.numel()
        res[n] = w
    R["model_mismatches"] = res; R["model_steps"] = tot; print("model:", tot, "steps, mismatches", {k: v for k, v in res.items() if v} or 0)

if "prefill" in what:
    for path in sorted(glob.glob(f"{D}/p_*.cubin")):
        p = tag(path); m = Module(path); nm = os.path.basename(path)[2:-6]; r = {"regs": m.attn_prefill.regs()}; R["p " + nm] = r
        if not p["SU"]:
            for t, kind, rows in ((192 if p["NC"] == 3 else 256, "normal", list(range(0, 192, 5))), (1536, "normal", [0, 1, 63, 64, 65, 127, 128, 255, 256, 257, 511, 512, 513, 1000, 1023, 1024, 1025, 1535]), (1536, "peaky", [5, 1200, 1535]), (1536, "rising", [700, 1535]), (1536, "wide", [1200, 1535]), (1536, "zeros", [0, 3, 1535])):
                if t == 256 and p["NC"] == 3: continue
                q, k, v = data(t, kind, 7); o = torch.full_like(q, float("nan")); t and prefill(m, p, q, pimg(k, p["KT"]), pimg(v, p["KT"]), o)
                rows = rows or list(range(t)); w = reference(q, k, v, rows, p); torch.cuda.synchronize(); r[f"bad {t} {kind}"] = bad(o[rows], w)
                if t == 1536 and kind in ("normal", "peaky"): r["err " + kind] = rel(o[rows], f64(q, k, v, rows))
        q, k, v = data(768, "normal", 7); k[600] = float("inf"); v[200, :, :64] = float("nan"); o = torch.zeros_like(q); rows = [10, 127, 128, 190, 191, 192, 199, 200, 590, 600, 767]
        prefill(m, p, q, pimg(k, p["KT"]), pimg(v, p["KT"]), o); w = reference(q, k, v, rows, p)
        r["nan columns kernel/reference by row"] = {x: [int(o[x].isnan().sum()), int(w[i].isnan().sum())] for i, x in enumerate(rows)}
        for t in (512, 2048, 8192):
            ins = [(q, pimg(k, p["KT"]), pimg(v, p["KT"]), torch.empty_like(q)) for q, k, v in (data(t, "normal", s) for s in range(4))]
            us, again = (graph_us([lambda i=i: prefill(m, p, *i) for i in ins], loops=3) for _ in range(2)); r[f"us {t}"] = [round(us, 1), round(again, 1)]; us = min(us, again); r[f"TF {t}"] = round(2 * 32 * 128 * t * t / us / 1e6, 1)
        print(nm, json.dumps(r), flush=True); save()

if "decode" in what:
    for path in sorted(glob.glob(f"{D}/d_*.cubin")):
        p = tag(path); m = Module(path); lt = p["LT"] or p["KT"]; kt, ch = lt, p["CH"]; nm = os.path.basename(path)[2:-6]; r = {"regs": m.attn_decode.regs()}; R["d " + nm] = r; ns = 196608 // (kt * 256) // p["BL"]
        smem = 1024 + ns * kt * 256 + 4 * (ch + 8) * 6 + 4 * (ch // p["KT"]) * 4 + 16 * ns + 64

        def plan(lens):
            nt = ch // kt; un = -(-(4 + nt) // 4) * 4; u, nx = [], 0
            for s, n in enumerate(lens):
                k = -(-n // kt); pg = list(range(nx, nx + k)); nx += k
                recs = lambda h, c: [s, h, c, n] + pg[c * nt:(c + 1) * nt]
                if p["CL"]: u += [recs(h, c) for h in range(HKV) for c in range(-(-n // (ch * p["CL"])) * p["CL"])]
                else: u += [recs(h, c) for c in range(-(-n // ch)) for h in range(HKV)]
            u = [x + [0] * (un - len(x)) for x in u]
            i = lambda x: torch.tensor(x, dtype=torch.int32, device="cuda"); mc = max(-(-n // ch) for n in lens)
            return dict(units=i(u), U=len(u), np=nx, part=torch.zeros(len(lens) * HKV * mc * 3072, device="cuda"), cnt=torch.zeros(max(len(u), len(lens) * HKV) + 1, dtype=torch.int32, device="cuda"), mc=mc)

        def go(P, q, ki, vi, o, pdl): m.attn_decode((P["U"] if p["CL"] else max(P["U"], 132) if p["ID"] and P["U"] <= 132 else min(132 * p["BL"], P["U"]),), 288, q, ki, vi, o, P["units"], P["U"], HQ, HKV, scale, P["part"], P["cnt"], P["mc"], smem=smem, pdl=pdl, cluster=p["CL"])

        def padimg(k): t = -(-k.shape[0] // kt) * kt; return image(torch.cat([k, torch.zeros(t - k.shape[0], HKV, 128, dtype=bf16, device="cuda")]), kt)
        try:
            lens = [1, 2, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1000, 1024, 1025, 2049, 4111, 9000]
            # Where blocks wait for each other, all must be resident.
            groups = [[n for n in lens if n < 513], [513, 1000, 1025], [2049, 511], [4111], [8192], [64, 7000]] if p["MG"] else [lens]
            for kind in ["normal", "peaky", "rising", "wide", "zeros"] * (not p["RD"]):
                dd = {}
                for lens in groups:
                    P = plan(lens); seqs = [data(n, kind, 11 + n) for n in lens]; q = torch.stack([s[0][-1] for s in seqs]).contiguous(); ki = torch.cat([padimg(s[1]) for s in seqs]); vi = torch.cat([padimg(s[2]) for s in seqs])
                    for again in range(2): o = torch.full_like(q, float("nan")); go(P, q, ki, vi, o, False)
                    torch.cuda.synchronize()
                    want = torch.cat([reference(s[0], s[1], s[2], [n - 1], p) for s, n in zip(seqs, lens)]); dd.update({n: bad(o[i], want[i]) for i, n in enumerate(lens)})
                r["bad " + kind] = sum(dd.values()) and dd
            for n, t in ((1, 8192), (1, 4096)) if p["MG"] else ((1, 8192), (128, 512), (8, 2048), (1, 4096)):
                P = plan([t] * n); L = max(3, min(36, int(4e9 / (n * t * 4096)))); mk = lambda: torch.randn(P["np"], HKV, 2, kt, 64, device="cuda").to(bf16)
                ins = [(torch.randn(n, HQ, 128, device="cuda").to(bf16), mk(), mk(), torch.empty(n, HQ, 128, device="cuda", dtype=bf16)) for _ in range(L)]
                for pdl in (False, True): r[f"us {n}x{t}{' pdl' if pdl else ''}"] = round(graph_us([lambda i=i: go(P, *i, pdl) for i in ins], loops=2, reps=7), 2)
                r[f"floor {n}x{t}"] = round(n * t * 4096 / 4.28e6, 2); del ins
        except RuntimeError as e: r["error"] = str(e)
        print("decode", nm, json.dumps(r), flush=True); save()

if "peers" in what:
    for nm, b in (("flash", peers.B.FLASH_ATTENTION), ("cudnn", peers.B.CUDNN_ATTENTION)):
        for t in (512, 2048, 8192): us = peers.prefill(t, b, True); R[f"peer prefill {nm} {t}"] = [round(us, 1), round(2 * 32 * 128 * t * t / us / 1e6, 1)]
        for n, t in ((1, 8192), (128, 512), (8, 2048)): R[f"peer decode {nm} {n}x{t}"] = round(peers.decode(n, t, b), 2)
    q, k, v = data(1536, "normal", 7); rows = [0, 1, 63, 64, 65, 127, 128, 255, 256, 257, 511, 512, 513, 1000, 1023, 1024, 1025, 1535]
    for kind in ("normal", "peaky"):
        q, k, v = data(1536, kind, 7)
        for nm, b in (("flash", peers.B.FLASH_ATTENTION), ("cudnn", peers.B.CUDNN_ATTENTION)):
            with peers.sdpa_kernel(b): o = peers.F.scaled_dot_product_attention(q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], is_causal=True, enable_gqa=True)[0].transpose(0, 1)
            rr = rows if kind == "normal" else [5, 1200, 1535]; R[f"peer err {nm} {kind}"] = rel(o[rr], f64(q, k, v, rr))
    print({k: v for k, v in R.items() if k.startswith("peer")})
save()
