"""Inputs that are not finite, and a check of their results."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

import hcp
from hcp.step.dispatch import Groups
from support.cases import NAMES, Case, grad_of, whole_sequences

NAN, INF = math.nan, math.inf


def alone(query: Tensor, key: Tensor, value: Tensor, window: tuple[int, int]) -> Tensor:
    """Compute one sequence, each query against the keys that it sees and no others."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    left, right = window
    outs = []
    for i, row in enumerate(query):
        seen = slice(0 if left < 0 else max(0, i - left), len(key) if right < 0 else i + right + 1)
        scores = torch.einsum("hd,khd->hk", row, key[seen]) / math.sqrt(query.shape[2])
        outs.append(torch.einsum("hk,khe->he", scores.softmax(-1), value[seen]))
    return torch.stack(outs)


def poisoned(case: Case, name: str, value: float, rows: slice) -> list[dict[str, Tensor]]:
    """Return sequences, the first of which has ``value`` in some rows of a query, key or value."""
    samples = whole_sequences(case)
    samples[0][name][rows] = value
    return samples


def results(groups: Groups, case: Case, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the output and gradients of all sequences, on rank 0."""
    rank, sources = groups.transport.rank, [0] * len(samples)
    cls = hcp.get_cp_handler_cls(case.backend)
    given = samples if rank == 0 else []
    ((cp, local),) = hcp.dispatch(
        case.plan(), given, sources, groups, comm_types=[case.comm_type], handler_cls=cls
    )
    leaves = [local[name].clone().requires_grad_() for name in NAMES[:3]]
    out = cp.attention(*leaves, causal=case.causal, window_size=case.window)
    out.backward(local["grad"])
    found = zip(NAMES, (out.detach(), *map(grad_of, leaves)), strict=True)
    return {name: cp.combine(x).cpu() for name, x in found}


def wanted(case: Case, sample: dict[str, Tensor]) -> dict[str, Tensor]:
    window = case.window[0], 0 if case.causal else case.window[1]
    leaves = [sample[name].double().requires_grad_() for name in NAMES[:3]]
    query, key, value = leaves
    out = alone(query, key, value, window)
    grads = torch.autograd.grad(out, leaves, sample["grad"].double())
    return dict(zip(NAMES, (out.detach(), *grads), strict=True))


POISONS = list(itertools.product(NAMES[:3], (NAN, INF, -INF)))


def expect_nothing_lost(case: Case, rows: slice, device: str = "cpu") -> None:
    """Check that values that are not finite reach all results that they reach on one rank, and no
    result of other sequences.

    ``rows``: those of the first sequence that are not finite."""
    given = [poisoned(case, name, value, rows) for name, value in POISONS]
    found = hcp.loopback(
        case.ranks, lambda g: [results(g, case, samples) for samples in given], device=device
    )[0]
    first = case.lengths[0]
    for poison, samples, got in zip(POISONS, given, found, strict=True):
        must = wanted(case, samples[0])
        for name in NAMES:
            lost = ~must[name].isfinite() & got[name][:first].isfinite()
            assert not lost.any(), (poison, name, lost.nonzero().tolist()[:4])
            assert got[name][first:].isfinite().all(), (poison, name, "of the other sequence")
