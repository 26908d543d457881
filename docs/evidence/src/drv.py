"""The CUDA driver through ctypes, in PyTorch's primary context: load cubins, launch kernels on torch's current stream."""
import ctypes as C
import torch

torch.cuda.init(); torch.zeros(1, device="cuda")
cu = C.CDLL("libcuda.so.1")


def ck(r, what=""):
    if r:
        s = C.c_char_p(); cu.cuGetErrorString(r, C.byref(s))
        raise RuntimeError(f"{what}: {r} {s.value}")


class _Attr(C.Structure):
    _fields_ = [("id", C.c_uint), ("pad", C.c_uint), ("val", C.c_uint * 16)]


class _Cfg(C.Structure):
    _fields_ = [(n, C.c_uint) for n in ("gx", "gy", "gz", "bx", "by", "bz", "smem")] + [
        ("stream", C.c_void_p), ("attrs", C.POINTER(_Attr)), ("n", C.c_uint)]


class TMap:
    """Tensor map of a row-major bf16 matrix: boxes of 64 columns by `rows` rows, 128-byte swizzle, zero fill."""

    def __init__(self, t, rows):
        raw = C.create_string_buffer(256); off = -C.addressof(raw) % 64; self.raw = raw; self.buf = (C.c_char * 128).from_buffer(raw, off)
        dims, strides, box, one = (C.c_uint64 * 2)(t.shape[1], t.shape[0]), (C.c_uint64 * 1)(t.stride(0) * 2), (C.c_uint32 * 2)(64, rows), (C.c_uint32 * 2)(1, 1)
        ck(cu.cuTensorMapEncodeTiled(C.byref(self.buf), 9, 2, C.c_void_p(t.data_ptr()), dims, strides, box, one, 0, 3, 3, 0), "tensor map")


class Kernel:
    def __init__(self, h, name): self.h, self.name = h, name

    def regs(self):
        v = C.c_int(); out = []
        for a in (4, 3, 1):  # registers, local bytes, static shared bytes
            ck(cu.cuFuncGetAttribute(C.byref(v), a, self.h)); out.append(v.value)
        return out

    def __call__(self, grid, block, *args, smem=0, pdl=False, cluster=0):
        """args: tensors (their address), ints (32-bit), floats (f32)."""
        if smem > 48000: ck(cu.cuFuncSetAttribute(self.h, 8, smem), "smem")
        g = tuple(grid) + (1,) * (3 - len(grid)); keep = []
        for a in args:
            if isinstance(a, torch.Tensor): keep.append(C.c_uint64(a.data_ptr()))
            elif isinstance(a, TMap): keep.append(a.buf)
            elif isinstance(a, float): keep.append(C.c_float(a))
            else: keep.append(C.c_int(a))
        ptr = (C.c_void_p * len(keep))(*[C.cast(C.byref(k), C.c_void_p) for k in keep])
        at = (_Attr * 2)(); n = 0
        if pdl: at[n].id = 6; at[n].val[0] = 1; n += 1
        if cluster > 8: ck(cu.cuFuncSetAttribute(self.h, 14, 1), "cluster of more than 8")
        if cluster: at[n].id = 4; at[n].val[0] = cluster; at[n].val[1] = 1; at[n].val[2] = 1; n += 1
        cfg = _Cfg(g[0], g[1], g[2], block, 1, 1, smem, torch.cuda.current_stream().cuda_stream, at, n)
        ck(cu.cuLaunchKernelEx(C.byref(cfg), self.h, ptr, None), self.name)


class Module:
    def __init__(self, path):
        self.m = C.c_void_p(); data = open(path, "rb").read(); ck(cu.cuModuleLoadData(C.byref(self.m), data), path)

    def __getattr__(self, name):
        h = C.c_void_p(); ck(cu.cuModuleGetFunction(C.byref(h), self.m, name.encode()), name)
        k = Kernel(h, name); setattr(self, name, k); return k


def graph_us(fns, reps=5, loops=1):
    """Median over `reps` replays of a graph holding every call of `fns`, `loops` times over: microseconds a call."""
    s = torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        for f in fns[:2]: f()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for _ in range(loops):
            for f in fns: f()
    g.replay(); torch.cuda.synchronize(); ts = []
    for _ in range(reps):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b) * 1e3 / (len(fns) * loops))
    ts.sort(); return ts[len(ts) // 2]
