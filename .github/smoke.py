"""One plan and one attention layer with an installed hcp: python smoke.py, outside of the tree."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

import hcp

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
groups = hcp.build_process_groups(cp=1)
tokens = [torch.arange(length) for length in (300, 7, 1)]
samples = [{"tokens": t, "loss_mask": torch.ones(len(t))} for t in tokens]
lengths, sources, samples = hcp.gather_lengths(samples, groups)
plan = hcp.plan(lengths, ranks=1, max_tokens_per_rank=1024)

computed = 0
for cp, local in hcp.dispatch(plan, samples, sources, groups):
    starts = [row for row, token in enumerate(local.tokens.tolist()) if token == 0]
    ends = [*starts[1:], len(local.tokens)]
    q, k, v = (torch.randn(len(local.tokens), 2, 16, requires_grad=True) for _ in range(3))
    out = cp.attention(q, k, v)
    out.sum().backward()
    for start, end in zip(starts, ends, strict=True):
        one = (x[start:end].transpose(0, 1) for x in (q, k, v))
        expected = F.scaled_dot_product_attention(*one, is_causal=True).transpose(0, 1)
        torch.testing.assert_close(out[start:end], expected)
    if any(x.grad is None or not x.grad.isfinite().all() for x in (q, k, v)):
        raise SystemExit("gradients are missing or not finite, expected finite ones of q, k and v")
    computed += len(starts)
if computed != len(tokens):
    raise SystemExit(f"{computed} sequences were computed, expected {len(tokens)}")
dist.destroy_process_group()
print(f"hcp {hcp.__version__} works with torch {torch.__version__}")
