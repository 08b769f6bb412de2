"""Compare attention under a plan, on any kind of domain, with one rank and whole sequences.

A case is data, so that it runs in loopback (hypothesis draws it) and on gloo ranks.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hcp
from hcp.exchange import tables
from hcp.exchange.torch_p2p import TorchTransport
from hcp.step.dispatch import Groups
from support.planning import CHEAP_LAUNCHES


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    ranks: int
    capacity: int = 4096
    min_degree: int = 1
    max_degree: int | None = None
    comm_type: Any = "p2p"
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    value_dim: int | None = None
    sinks: bool = False
    lse: bool = False
    """Whether the log-sum-exp is returned, and has a gradient."""
    dtype: str = "float64"
    """float32 for what only float32 shows: sums are in float64 here."""
    backend: str = "torch"
    sharing: bool = False
    """Whether the ranks of loopback read each other's memory."""
    stage_tokens: int = tables.STAGE_TOKENS
    """The number of tokens whose keys arrive in one stage under "all_gather"."""
    seed: int = 0
    alignment: int = 1
    node: int | None = None
    """Ranks of a node."""
    head_chunks: int = 1
    """Chunks of heads in which the fullest rank must compute."""
    sizes: tuple[int, ...] | None = None
    """Sizes of the levels of "a2a+p2p"; None: the largest inner level below the degree."""

    @property
    def comm(self) -> dict[str, Any]:
        """Return the options for hcp.dispatch."""
        if self.comm_type != "a2a+p2p":
            return {"comm_types": (self.comm_type,)}
        return {"comm_types": (self.comm_type,), "hierarchical_context_parallel_sizes": self.levels}

    @property
    def levels(self) -> tuple[int, ...]:
        if self.sizes is not None:
            return self.sizes
        inner = max(d for d in range(1, max(2, self.ranks)) if self.ranks % d == 0)
        return inner, self.ranks // inner

    def plan(self) -> hcp.Plan:
        if self.head_chunks == 1:
            return self._planned(None)
        buffers = hcp.MemoryModel(attention=self.head_chunks, head_chunks=self.head_chunks)
        needed = max(self._planned(buffers).report().rank_bytes) + len(self.lengths)
        return self._planned(replace(buffers, limit=needed))

    def _planned(self, memory: hcp.MemoryModel | None) -> hcp.Plan:
        return hcp.plan(
            self.lengths,
            ranks=self.ranks,
            max_tokens_per_rank=self.capacity,
            min_degree=self.min_degree,
            max_degree=self.max_degree,
            alignment=self.alignment,
            ranks_per_node=self.node,
            memory=memory,
            cost=CHEAP_LAUNCHES,
        )


NAMES = ("query", "key", "value", "grad")
RESULTS = ("out", "lse", "dquery", "dkey", "dvalue")


def whole_sequences(case: Case) -> list[dict[str, Tensor]]:
    """Draw the inputs of every sequence, equal on every rank."""
    generator = torch.Generator().manual_seed(case.seed)
    value_dim = case.value_dim or case.head_dim
    shapes = {
        "query": (case.heads, case.head_dim),
        "key": (case.kv_heads, case.head_dim),
        "value": (case.kv_heads, value_dim),
        "grad": (case.heads, value_dim),
    }

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return [
        {name: draw(length, *shapes[name]).to(getattr(torch, case.dtype)) for name in NAMES}
        | {"grad_lse": draw(length, case.heads), "loss_mask": torch.ones(length)}
        for length in case.lengths
    ]


def sinks_of(case: Case) -> Tensor | None:
    generator = torch.Generator().manual_seed(case.seed + 1)
    return torch.randn(case.heads, generator=generator).double() if case.sinks else None


def whole_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    causal: bool,
    window: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Compute one sequence by the formula: softmax(q k^T / sqrt(D)) v, and the log-sum-exp."""
    groups = query.shape[1] // key.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = q @ k.transpose(1, 2) / math.sqrt(query.shape[2])
    tokens = query.shape[0]
    left, right = (limit if limit >= 0 else tokens for limit in window)
    ahead = torch.arange(tokens) - torch.arange(tokens).unsqueeze(1)  # of the key, of its query
    hidden = (ahead < -left) | (ahead > (0 if causal else right))
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, tokens, 1)], 2)
    weights = scores.softmax(-1)[..., :tokens]
    return (weights @ v).transpose(0, 1), scores.logsumexp(-1).transpose(0, 1)


def differentiate(case: Case, out: Tensor, lse: Tensor, sample: Any) -> None:
    grads = (sample["grad"].to(out.dtype), sample["grad_lse"].to(lse.dtype))
    if case.lse:
        torch.autograd.backward((out, lse), grads)
    else:
        out.backward(grads[0])


def grad_of(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def expected(case: Case) -> tuple[list[tuple[Tensor, ...]], Tensor | None]:
    """Return the results of every sequence and the sinks' gradient, in float64 for any dtype."""
    answers = []
    sinks = sinks_of(case)
    sinks = sinks if sinks is None else sinks.requires_grad_()
    for sample in whole_sequences(case):
        q, k, v = inputs = [sample[name].double().requires_grad_() for name in NAMES[:3]]
        out, lse = whole_attention(q, k, v, sinks, case.causal, case.window)
        differentiate(case, out, lse, sample)
        answers.append((out.detach(), lse.detach(), *map(grad_of, inputs)))
    return answers, None if sinks is None else sinks.grad


def compared(
    groups: Groups, case: Case, plan: hcp.Plan | None = None
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (index in RESULTS, found, expected) in float64 for the sequences that this rank loaded,
    by micro-batch, then for the sinks' gradient."""
    plan = plan or case.plan()
    rank = groups.transport.rank
    sources = [(i * 7 + 3) % plan.ranks for i in range(len(case.lengths))]
    samples = [s for s, r in zip(whole_sequences(case), sources, strict=True) if r == rank]
    cls = hcp.get_cp_handler_cls(case.backend)
    step = hcp.dispatch(plan, samples, sources, groups, handler_cls=cls, **case.comm)
    answers, grad_sinks = expected(case)
    sinks = sinks_of(case)
    if sinks is not None:
        sinks = sinks.to(groups.transport.device).requires_grad_()
    for cp, local in step:
        inputs = [local[name].clone().requires_grad_() for name in NAMES[:3]]
        out, lse = cp.attention(
            *inputs,
            causal=case.causal,
            window_size=case.window,
            sinks=sinks,
            return_lse=True,
        )
        differentiate(case, out, lse, local)
        loaded = [i for i in sorted(sequences_of(plan, cp.micro_batch)) if sources[i] == rank]
        for n, computed in enumerate((out.detach(), lse.detach(), *map(grad_of, inputs))):
            back = cp.combine(computed)
            whole = [answers[i][n] for i in loaded]
            back = back.double().cpu()
            want = torch.cat(whole) if whole else back
            assert back.shape == want.shape, (n, back.shape, want.shape)
            assert torch.isfinite(back).all(), (n, case)
            yield n, back, want
    if sinks is not None and grad_sinks is not None:
        yield len(RESULTS), summed(groups, sinks.grad), grad_sinks


def attention_errors(
    groups: Groups, case: Case, plan: hcp.Plan | None = None, *, mean: bool = False
) -> list[float]:
    """Return the largest (or mean) error of each of RESULTS over the sequences that this rank
    loaded, and of the sinks' gradient."""
    worst = [0.0] * (len(RESULTS) + case.sinks)
    for n, found, want in compared(groups, case, plan):
        if found.numel():
            errors = (found - want).abs()
            worst[n] = max(worst[n], float(errors.mean() if mean else errors.max()))
    return worst


def summed(groups: Groups, own: Tensor | None) -> Tensor:
    """Return the sum over all ranks, as a trainer would reduce a gradient."""
    payload = pickle.dumps(own if own is None else own.cpu())
    shares = groups.transport.all_gather_bytes(payload, "test")
    return torch.stack([x for x in map(pickle.loads, shares) if x is not None]).sum(0)


def dispatched(groups: Groups, case: Case) -> hcp.Step:
    """Return the step of a case. Rank 0 loads all of its sequences."""
    plan, rank = case.plan(), groups.transport.rank
    sources = [0] * len(case.lengths)
    samples = whole_sequences(case) if rank == 0 else []
    return hcp.dispatch(plan, samples, sources, groups, **case.comm)


def sequences_of(plan: hcp.Plan, micro_batch: int) -> list[int]:
    return [s for group in plan.micro_batches[micro_batch] for s in group.sequences]


def loopback_error(case: Case, plan: hcp.Plan | None = None, device: str = "cpu") -> float:
    """Return the largest error of all ranks."""
    with staged_by(case.stage_tokens):
        results = hcp.loopback(
            case.ranks,
            lambda groups: attention_errors(groups, case, plan),
            device=device,
            sharing=case.sharing,
        )
    return max(max(errors) for errors in results)


def loopback_rms(case: Case, device: str = "cpu") -> dict[str, float]:
    """Return the root-mean-square error of each of RESULTS over all rows, relative to that of the
    answer, and of the sinks' gradient."""
    names = (*RESULTS, "dsinks")[: len(RESULTS) + case.sinks]

    def squares(groups: Groups) -> Tensor:
        sums = torch.zeros(len(names), 2, dtype=torch.float64)
        for n, found, want in compared(groups, case):
            sums[n] += torch.stack([(found - want).square().sum(), want.square().sum()])
        return sums

    with staged_by(case.stage_tokens):
        sums = sum(hcp.loopback(case.ranks, squares, device=device, sharing=case.sharing))
    assert isinstance(sums, Tensor)
    return {n: float((e / w).sqrt()) for n, (e, w) in zip(names, sums, strict=True)}


@contextmanager
def staged_by(rows: int) -> Iterator[None]:
    """Set the tokens of a stage in schedules, on every rank of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "STAGE_TOKENS", rows)
        yield


# ---- gloo ranks ----------------------------------------------------------------------------------


class GlooGroups:
    """The whole world as a domain. ``seconds``: the timeout of an exchange. It is short if a test
    waits until it ends, and long if a busy machine may be late."""

    def __init__(self, seconds: float = 100) -> None:
        self.transport = TorchTransport(dist.new_group(timeout=timedelta(seconds=seconds)))


def gloo_errors(rank: int, size: int, case: Case) -> list[float]:
    with staged_by(case.stage_tokens):
        return attention_errors(GlooGroups(), case)
