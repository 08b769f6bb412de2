"""Try an installed hcp: python smoke.py, outside of the tree.

It runs the console command, then plans and computes one attention layer, on a GPU if there is one
and hcp has kernels for it.
"""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

import hcp

said = subprocess.run(
    [Path(sys.executable).with_name("hcp"), "--version"], capture_output=True, text=True, check=True
).stdout
if said != f"hcp {hcp.__version__}\n":
    raise SystemExit(f"hcp --version says {said!r}, expected 'hcp {hcp.__version__}'")

on_gpu = torch.cuda.is_available() and not metadata.version("hcp-torch").endswith("+cpu")
device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
dtype, tolerance = (torch.bfloat16, 2e-2) if on_gpu else (torch.float64, 1e-10)
if on_gpu:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
groups = hcp.build_process_groups(cp=1)
tokens = [torch.arange(length) for length in (300, 7, 1)]
samples = [{"tokens": t, "loss_mask": torch.ones(len(t))} for t in tokens]
lengths, sources, samples = hcp.gather_lengths(samples, groups)
plan = hcp.plan(lengths, ranks=1, max_tokens_per_rank=1024)


def by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of each sequence alone."""
    outs = []
    for start, end in zip(starts, ends, strict=True):
        one = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        outs.append(F.scaled_dot_product_attention(*one, is_causal=True)[0].transpose(0, 1))
    return torch.cat(outs)


computed = 0
for cp, local in hcp.dispatch(plan, samples, sources, groups):
    starts = [row for row, token in enumerate(local.tokens.tolist()) if token == 0]
    ends = [*starts[1:], len(local.tokens)]
    shape = len(local.tokens), 2, 16
    q, k, v, weight = (torch.randn(shape, dtype=dtype, device=device) for _ in range(4))
    results = []
    for attention in (cp.attention, by_torch):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves)
        out.backward(weight)
        results.append((out, *(x.grad for x in leaves)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    computed += len(starts)
if computed != len(tokens):
    raise SystemExit(f"{computed} sequences were computed, expected {len(tokens)}")
dist.destroy_process_group()
where = torch.cuda.get_device_name(device) if on_gpu else "CPU"
print(f"hcp {hcp.__version__} works with torch {torch.__version__} on {where}")
