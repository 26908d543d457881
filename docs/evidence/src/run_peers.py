"""Attention as shipped in PyTorch (flash, cuDNN), causal prefill and decode, 32/8 heads of 128, in replayed graphs."""
import torch, json
from torch.nn.attention import sdpa_kernel, SDPBackend as B
import torch.nn.functional as F
from drv import graph_us

def prefill(t, backend, gqa):
    ins = []
    for _ in range(4):
        q = torch.randn(1, 32, t, 128, device="cuda", dtype=torch.bfloat16); k = torch.randn(1, 8 if gqa else 32, t, 128, device="cuda", dtype=torch.bfloat16); ins.append((q, k, torch.randn_like(k)))
    def f(i):
        def g():
            with sdpa_kernel(backend): F.scaled_dot_product_attention(*ins[i], is_causal=True, enable_gqa=gqa)
        return g
    return graph_us([f(i) for i in range(4)], loops=3)

def decode(n, t, backend, gqa=True):
    L = max(2, min(36, int(6e9 / (n * t * 4096)))); ins = []
    for _ in range(L):
        q = torch.randn(n, 32, 1, 128, device="cuda", dtype=torch.bfloat16); k = torch.randn(n, 8, t, 128, device="cuda", dtype=torch.bfloat16); ins.append((q, k, torch.randn_like(k)))
    def f(i):
        def g():
            with sdpa_kernel(backend): F.scaled_dot_product_attention(*ins[i], enable_gqa=gqa)
        return g
    return graph_us([f(i) for i in range(L)], loops=2)

if __name__ == "__main__":
    r = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    for nm, b in (("flash", B.FLASH_ATTENTION), ("cudnn", B.CUDNN_ATTENTION)):
        for t in (512, 2048, 8192):
            for gqa in (True, False):
                try: us = prefill(t, b, gqa); r[f"prefill {nm} {t} {'gqa' if gqa else 'mha'}"] = [round(us, 1), round(2 * 2 * 32 * 128 * t * t / 2 / us / 1e6, 1)]
                except Exception as e: r[f"prefill {nm} {t} {gqa}"] = str(e)[:80]
        for n, t in ((1, 8192), (128, 512)):
            try: r[f"decode {nm} {n}x{t}"] = [round(decode(n, t, b), 2), "floor", round(n * t * 4096 / 4.28e6, 2)]
            except Exception as e: r[f"decode {nm} {n}x{t}"] = str(e)[:80]
    print(json.dumps(r, indent=0))
