#!/usr/bin/env python3
"""Times our Hopper prefill attention and cuDNN's alternately, in one process, on the same tensors.

    compare_cudnn.py --library libattention_bench.so [--json FILE] [--filter h128] [--rounds 10]

cuDNN is reached through PyTorch's scaled_dot_product_attention. It gets K concatenated; ours reads
k_nope and v as views of the expansion and k_pe apart. Each launch follows a flush of the L2; the
table gives medians. Where PyTorch or a GPU is missing, the script says so and exits with 3.
"""

import argparse
import ctypes
import json
import math
import statistics
import sys

DEEPSEEK = (128, 64, 128)
GLM = (192, 64, 256)

# name, dims, heads, queries, keys, causal
SHAPES = [
    ("h128_q4096_causal", DEEPSEEK, 128, 4096, 4096, True),
    ("h128_q8192_causal", DEEPSEEK, 128, 8192, 8192, True),
    ("h128_q16384_causal", DEEPSEEK, 128, 16384, 16384, True),
    ("h16_q16384_causal", DEEPSEEK, 16, 16384, 16384, True),
    ("h128_q4096_k16384", DEEPSEEK, 128, 4096, 16384, False),
    ("h128_q2048_k32768", DEEPSEEK, 128, 2048, 32768, False),
    ("h128_q512_k32768", DEEPSEEK, 128, 512, 32768, False),
    ("h16_q8192_k65536", DEEPSEEK, 16, 8192, 65536, False),
    ("h16_q512_k65536", DEEPSEEK, 16, 512, 65536, False),
    ("h16_q128_k65536", DEEPSEEK, 16, 128, 65536, False),
    ("h128_q128_k65536", DEEPSEEK, 128, 128, 65536, False),
    ("glm_h64_q4096_causal", GLM, 64, 4096, 4096, True),
    ("glm_h64_q8192_causal", GLM, 64, 8192, 8192, True),
    ("glm_h64_q4096_k16384", GLM, 64, 4096, 16384, False),
    ("glm_h64_q512_k32768", GLM, 64, 512, 32768, False),
    ("glm_h8_q8192_causal", GLM, 8, 8192, 8192, True),
    ("glm_h8_q4096_k16384", GLM, 8, 4096, 16384, False),
    ("glm_h8_q512_k65536", GLM, 8, 512, 65536, False),
]
UNMASKED = 2**31 - 1
LATENT_WIDTH = 576  # k_pe is the tail of rows this wide


class Attention(ctypes.Structure):
    """MlaBenchAttention of attention_c_entry.cc."""

    _fields_ = (
        [(n, ctypes.c_int32) for n in ("num_heads", "nope_dim", "rope_dim", "v_dim", "fp16")]
        + [("softmax_scale", ctypes.c_float)]
        + [(n, ctypes.c_void_p) for n in ("q", "k_nope", "k_pe", "v")]
        + [(n, ctypes.c_int64) for n in ("q_row", "q_head", "k_row", "k_head", "k_pe_row", "v_row",
                                         "v_head", "q_rows", "k_rows")]
        + [("items", ctypes.c_void_p), ("num_items", ctypes.c_int64)]
        + [("max_q_len", ctypes.c_int32), ("max_k_len", ctypes.c_int32)]
        + [("out", ctypes.c_void_p), ("out_row", ctypes.c_int64), ("out_head", ctypes.c_int64)]
        + [("lse", ctypes.c_void_p), ("lse_row", ctypes.c_int64), ("lse_head", ctypes.c_int64)]
        + [("scratch", ctypes.c_void_p), ("scratch_bytes", ctypes.c_int64)]
        + [("max_blocks", ctypes.c_int32), ("stream", ctypes.c_void_p)]
    )


def load(path):
    library = ctypes.CDLL(path)
    library.mla_bench_attention_scratch_bytes.restype = ctypes.c_int64
    library.mla_bench_attention_scratch_bytes.argtypes = (
        [ctypes.c_int32] * 2 + [ctypes.c_int64] * 2)
    library.mla_bench_attention.argtypes = [ctypes.POINTER(Attention)]
    return library


class Case:
    """One shape: its tensors, a call of ours and a call of cuDNN's."""

    def __init__(self, torch, library, shape, dtype):
        _, (p, rr, v), heads, queries, keys, causal = shape
        self.torch, self.library = torch, library
        device = "cuda"
        self.q = torch.randn(queries, heads, p + rr, device=device, dtype=dtype)
        self.expanded = torch.randn(keys, heads, p + v, device=device, dtype=dtype)
        self.latent = torch.randn(keys, LATENT_WIDTH, device=device, dtype=dtype)
        self.out = torch.empty(queries, heads, v, device=device, dtype=dtype)
        self.lse = torch.empty(heads, queries, device=device, dtype=torch.float32)
        offset = keys - queries if causal else UNMASKED
        self.items = torch.tensor([0, queries, 0, keys, offset, 0], device=device,
                                  dtype=torch.int32)
        scratch_bytes = library.mla_bench_attention_scratch_bytes(heads, v, 1, keys)
        self.scratch = torch.empty(scratch_bytes, device=device, dtype=torch.uint8)

        size = self.expanded.element_size()
        base = self.expanded.data_ptr()
        self.args = Attention(
            num_heads=heads, nope_dim=p, rope_dim=rr, v_dim=v, fp16=dtype == torch.float16,
            softmax_scale=1 / math.sqrt(p + rr), q=self.q.data_ptr(), k_nope=base,
            k_pe=self.latent.data_ptr() + (LATENT_WIDTH - rr) * size, v=base + p * size,
            q_row=self.q.stride(0), q_head=self.q.stride(1), k_row=self.expanded.stride(0),
            k_head=self.expanded.stride(1), k_pe_row=LATENT_WIDTH, v_row=self.expanded.stride(0),
            v_head=self.expanded.stride(1), q_rows=queries, k_rows=keys,
            items=self.items.data_ptr(), num_items=1, max_q_len=queries, max_k_len=keys,
            out=self.out.data_ptr(), out_row=self.out.stride(0), out_head=self.out.stride(1),
            lse=self.lse.data_ptr(), lse_row=1, lse_head=queries, scratch=self.scratch.data_ptr(),
            scratch_bytes=scratch_bytes,
            max_blocks=torch.cuda.get_device_properties(0).multi_processor_count,
            stream=torch.cuda.current_stream().cuda_stream)

        k_pe = self.latent[:, None, -rr:].expand(keys, heads, rr)
        k = torch.cat([self.expanded[..., :p], k_pe], dim=-1)
        self.cudnn_inputs = [x.transpose(0, 1)[None] for x in (self.q, k)]
        self.cudnn_inputs.append(self.expanded[..., p:].contiguous().transpose(0, 1)[None])
        self.causal = causal
        self.rows = torch.randperm(queries, device=device)[:32]  # the same for all that compare
        pairs = queries * (queries + 1) // 2 if causal else queries * keys
        self.flops = 2 * heads * (p + rr + v) * pairs

    def ours(self):
        if self.library.mla_bench_attention(ctypes.byref(self.args)) != 0:
            sys.exit(1)
        return self.out

    def cudnn(self):
        attention = self.torch.nn.attention
        with attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION):
            out = self.torch.nn.functional.scaled_dot_product_attention(
                *self.cudnn_inputs, is_causal=self.causal)
        return out[0].transpose(0, 1)

    def difference(self, call):
        """Relative Frobenius difference to float64 attention on a few heads and rows."""
        torch = self.torch
        q, k, v = (x[0, :2] for x in self.cudnn_inputs)
        rows = self.rows
        scores = (q[:, rows].double() @ k.double().transpose(1, 2)) * self.args.softmax_scale
        if self.causal:
            hidden = torch.arange(k.shape[1], device="cuda")[None, :] > rows[:, None]
            scores.masked_fill_(hidden[None], float("-inf"))
        want = (scores.softmax(-1) @ v.double()).transpose(0, 1)
        got = call()[rows, :2].double()
        return ((got - want).norm() / want.norm()).item()


def time_alternately(torch, calls, rounds, flush):
    """Median milliseconds of each call."""
    times = [[] for _ in calls]
    for i in range(rounds + 2):  # two to warm up
        for call, samples in zip(calls, times):
            start = torch.cuda.Event(enable_timing=True)
            stop = torch.cuda.Event(enable_timing=True)
            flush.fill_(i)
            start.record()
            call()
            stop.record()
            stop.synchronize()
            if i >= 2:
                samples.append(start.elapsed_time(stop))
    return [statistics.median(samples) for samples in times]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", required=True, action="append",
                        help="libattention_bench.so; several are compared with one another too")
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--filter", default="", help="only shapes whose name contains this")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    args = parser.parse_args()
    try:
        import torch
        import torch.nn.attention
    except ImportError:
        print("compare_cudnn.py: PyTorch is not installed; nothing to compare with",
              file=sys.stderr)
        return 3
    if not torch.cuda.is_available():
        print("compare_cudnn.py: no GPU", file=sys.stderr)
        return 3

    libraries = [load(path) for path in args.library]
    dtype = getattr(torch, args.dtype)
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    ceiling = None
    results = []
    print(f"{'shape':<24}{'cuDNN':>8}{'ours':>8}  TFLOP/s   ratio   error cuDNN / ours")
    for shape in SHAPES:
        if args.filter not in shape[0]:
            continue
        cases = [Case(torch, libraries[0], shape, dtype)]
        for library in libraries[1:]:
            other = object.__new__(Case)
            other.__dict__.update(cases[0].__dict__, library=library)
            cases.append(other)
        try:
            cudnn_error = cases[0].difference(cases[0].cudnn)
            calls = [cases[0].cudnn]
        except RuntimeError as error:  # cuDNN does not serve the shape
            print(f"{shape[0]}: cuDNN refuses: {str(error).splitlines()[0]}")
            cudnn_error, calls = None, []
        errors = [case.difference(case.ours) for case in cases]
        calls += [case.ours for case in cases]
        calls.append(lambda: torch.matmul(a, a))
        ms = time_alternately(torch, calls, args.rounds, flush)
        ceiling = 2 * 8192**3 / ms.pop() * 1e-9
        flops = cases[0].flops
        cudnn = flops / ms.pop(0) * 1e-9 if cudnn_error is not None else None
        ours = [flops / t * 1e-9 for t in ms]
        ratio = [x / cudnn for x in ours] if cudnn else [float("nan")] * len(ours)
        print(f"{shape[0]:<24}{cudnn or float('nan'):8.1f}"
              + "".join(f"{x:8.1f}" for x in ours) + "           "
              + "".join(f"{x:7.3f}" for x in ratio)
              + f"   {cudnn_error or float('nan'):.2e} / " + " ".join(f"{e:.2e}" for e in errors)
              + f"   cuBLAS {ceiling:.0f}", flush=True)
        results.append({"name": shape[0], "cudnn_tflops": cudnn, "tflops": ours[0],
                        "peer_ratio": ratio[0] if cudnn else None, "rel_err": errors[0],
                        "cudnn_rel_err": cudnn_error, "cublas_tflops": ceiling,
                        "variants_tflops": ours})
        del cases, calls
        torch.cuda.empty_cache()
    if args.json:
        with open(args.json, "w", encoding="utf-8") as out:
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                       "cudnn": torch.backends.cudnn.version(), "dtype": args.dtype,
                       "results": results}, out, indent=1)
            out.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
