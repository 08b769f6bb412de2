"""A Mamba mixer of the real Megatron-Core without the kernels for GPUs that it imports.

mamba_ssm and causal_conv1d cannot be installed on a CPU. Their scan is replaced here by the
state-space recurrence, written as one masked square matrix for each sequence
(https://arxiv.org/abs/2405.21060, section 6). It is slow, simple and differentiable.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import itertools
import sys
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class GatedNorm(torch.nn.Module):
    """Replaces the class of mamba_ssm, which needs Triton."""

    def __init__(
        self,
        size: int,
        eps: float,
        group_size: int,
        norm_before_gate: bool,
        device: Any,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        grouped = x.unflatten(-1, (-1, self.group_size))
        scale = (grouped.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (grouped * scale).flatten(-2) * self.weight


def slow_scan(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    activation: str,
    headdim: int,
    ngroups: int,
    seq_idx: Tensor | None,
    norm_before_gate: bool = True,
    **options: Any,
) -> Tensor:
    """Scan (1, S, z | x | B | C | dt), and return (1, S, heads * headdim).

    Each sequence of seq_idx is scanned by itself. If it is None, all rows are one sequence."""
    edges = zxbcdt.new_zeros(0) if seq_idx is None else seq_idx[0].diff().nonzero()[:, 0] + 1
    ends = [0, *edges.long().tolist(), zxbcdt.shape[1]]
    parts = [
        scan_one(row, conv1d_weight, conv1d_bias, dt_bias, A, D, headdim, ngroups)
        for row in zxbcdt[0].split([b - a for a, b in itertools.pairwise(ends)])
    ]
    return torch.cat(parts)[None]


def slow_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor,
    dt_bias: Tensor,
    dt_softplus: bool,
    seq_idx: Tensor | None = None,
    return_final_states: bool = False,
) -> Any:
    """Scan x (1, S, H, P), each sequence of seq_idx by itself, by steps (1, S, H) and groups (1, S,
    G, N), and return its like; with `return_final_states` also the state at the end of all rows,
    (1, H, P, N)."""
    assert dt_softplus
    steps = F.softplus(dt[0] + dt_bias)
    sizes = [x.shape[1]]
    if seq_idx is not None:
        sizes = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
    parts = zip(*(y.split(sizes) for y in (x[0], steps, B[0], C[0])), strict=True)
    each = x.shape[2] // B.shape[2]
    outs = [
        attend(own, step, A, b.repeat_interleave(each, 1), c.repeat_interleave(each, 1), D)
        for own, step, b, c in parts
    ]
    out = torch.cat(outs)[None].to(x.dtype)
    if not return_final_states:
        return out
    later = ((steps * A).sum(0) - (steps * A).cumsum(0)).exp() * steps
    b = B[0].repeat_interleave(each, 1)
    return out, torch.einsum("sh,shp,shn->hpn", later, x[0].to(later.dtype), b.to(later.dtype))[
        None
    ]


def attend(x: Tensor, step: Tensor, A: Tensor, b: Tensor, c: Tensor, D: Tensor) -> Tensor:
    """One sequence as a masked square matrix."""
    decay = (step * A).cumsum(0)  # (L, heads)
    gap = decay[:, None] - decay[None]
    seen = torch.ones(len(x), len(x)).tril()[..., None] > 0
    mix = torch.einsum("thn,shn->tsh", c, b) * gap.masked_fill(~seen, -torch.inf).exp()
    return torch.einsum("tsh,sh,shp->thp", mix, step.to(mix.dtype), x) + D[:, None] * x


def scan_one(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    size: int,
    groups: int,
) -> Tensor:
    heads = len(dt_bias)
    inner = heads * size
    state = (weight.shape[0] - inner) // (2 * groups)
    z, mixed, dt = rows.split([inner, weight.shape[0], heads], 1)
    padded = F.pad(mixed.T[None], (weight.shape[1] - 1, 0))
    mixed = F.silu(F.conv1d(padded, weight[:, None].to(padded.dtype), bias, groups=len(weight)))
    x, b, c = mixed[0].T.split([inner, groups * state, groups * state], 1)
    x = x.unflatten(1, (heads, size))
    b, c = (
        part.unflatten(1, (groups, state)).repeat_interleave(heads // groups, 1) for part in (b, c)
    )
    y = attend(x, F.softplus(dt + dt_bias), A, b, c, D)
    return (y.flatten(1) * F.silu(z)).to(rows.dtype)


def stand_in_for_kernels() -> None:
    """Replace the kernels, so that Megatron's mixer, imported after this, trains on a CPU."""

    def module(name: str, **contents: Any) -> None:
        made = types.ModuleType(name)
        made.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(made).update(contents)
        sys.modules[name] = made

    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", "causal_conv1d"):
        module(name, __path__=[], causal_conv1d_fn=None, causal_conv1d_update=None)
    kernels = "mamba_ssm.ops.triton"
    module(f"{kernels}.selective_state_update", selective_state_update=None)
    module(f"{kernels}.layernorm_gated", RMSNorm=GatedNorm)
    scans = dict(
        mamba_chunk_scan_combined=slow_chunk_scan, mamba_split_conv1d_scan_combined=slow_scan
    )
    module(f"{kernels}.ssd_combined", **scans)
    module("causal_conv1d.causal_conv1d_varlen", causal_conv1d_varlen_states=None)
    if importlib.util.find_spec("triton") is None:
        own = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"
        names = ("tensor_get_slice_after", "tensor_masked_update", "tensor_merge")
        module(own, **dict.fromkeys(names))
    if importlib.util.find_spec("einops") is None:
        module("einops", rearrange=rearrange, repeat=None)
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer

    mamba_context_parallel.HAVE_EINOPS = mamba_mixer.HAVE_EINOPS = True
    mamba_mixer._check_mamba_sequence_packing_support = lambda **options: (True, None)


def rearrange(x: Tensor, pattern: str, **sizes: int) -> Tensor:
    """Rearrange by those patterns of einops that the mixer uses in training."""
    if pattern in ("l b d -> b l d", "b l d -> l b d"):
        return x.transpose(0, 1)
    assert pattern == "d 1 w -> d w", pattern
    return x[:, 0]
