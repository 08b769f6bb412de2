"""Samples whose fields are not one row per token, and what every rank must have of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hcp

FIELDS: dict[str, str | hcp.Payload] = {
    "advantage": "sequence",
    "shape": "sequence",
    "whole": hcp.Payload(),
    "first": hcp.Payload("first", tokens="marked"),
    "pixels": hcp.Payload("even", units="grid", tokens="marked"),
    "grid": hcp.Payload(per_unit_of="pixels"),
    "frames": hcp.Payload("tokens", tokens=lambda sample: sample["taker"].long()),
    "taker": hcp.Payload("whole"),
    "clips": hcp.Payload("even", tokens="in_clip"),
}


def sample(sequence: int, length: int) -> dict[str, Tensor]:
    """A sequence with images of 2, 4 and 6 rows, 2 for each image token, and frames of any
    tokens."""
    draw = torch.Generator().manual_seed(31 * sequence + length)
    marked = torch.rand(length, generator=draw) < 0.4
    tokens = int(marked.sum())
    grid = [2 * min(1 + i % 3, tokens - i) for i in range(0, tokens, 3)]
    grid += [2] * (tokens - sum(grid) // 2)
    taker = torch.randint(length, (int(torch.randint(9, (), generator=draw)),), generator=draw)
    rows = 1000 * sequence + torch.arange(2 * tokens)
    in_clip = torch.arange(length) < length // 4 * 3  # 3 tokens for each clip
    return {
        "row": 1000 * sequence + torch.arange(length),
        "marked": marked,
        "in_clip": in_clip,
        "clips": 1000 * sequence + torch.arange(length // 4),
        "advantage": torch.tensor(sequence + 0.5, dtype=torch.float64),
        "shape": torch.tensor([[sequence, length]]),
        "whole": torch.full((sequence % 3, 2), sequence).to(torch.bfloat16),
        "first": rows[:tokens],
        "pixels": torch.stack((rows, -rows), 1),
        "grid": torch.tensor(grid, dtype=torch.int64),
        "frames": (1000 * sequence + torch.arange(len(taker))).int(),
        "taker": taker.sort().values,
    }


def spans_of(cp: hcp.ContextParallelHandler) -> list[tuple[int, int]]:
    """(sequence, token) of each local row."""
    return [(s, token) for s, start, n in cp.layout.spans for token in range(start, start + n)]


def check_values(cp: hcp.ContextParallelHandler, local: hcp.LocalBatch, whole: Any) -> None:
    """What every rank has of each field, against the samples themselves."""
    held = [whole[s] for s in cp.layout.sequences]
    assert local.advantage.tolist() == [s["advantage"].item() for s in held]
    assert local.shape.tolist() == [s["shape"].tolist() for s in held]
    assert local.whole.tolist() == [row for s in held for row in s["whole"].tolist()]
    assert cp.payloads["whole"].cu_seqlens.diff().tolist() == [len(s["whole"]) for s in held]
    first = held if cp.group.rank == 0 else []
    assert local.first.tolist() == [row for s in first for row in s["first"].tolist()]
    own = spans_of(cp)
    frames = [
        int(row)
        for s, token in own
        for row in whole[s]["frames"][whole[s]["taker"] == token].tolist()
    ]
    assert local.frames.tolist() == frames
    each = cp.sequences.repeat(local.advantage)
    assert each.tolist() == [s + 0.5 for s, _ in own] + [0.0] * cp.layout.padding


def check_results(cp: hcp.ContextParallelHandler, local: hcp.LocalBatch, whole: Any) -> None:
    """Results of payloads reach the tokens that take their rows, and gradients come back."""
    wanted = [
        (s, int(whole[s]["marked"][:token].sum()))
        for s, token in spans_of(cp)
        if whole[s]["marked"][token]
    ]
    taking = [i for i, (s, token) in enumerate(spans_of(cp)) if whole[s]["marked"][token]]
    assert cp.payloads["pixels"].token_rows.tolist() == taking
    pairs = local.pixels[:, 0].double().view(-1, 2).requires_grad_()
    mine = cp.payloads["pixels"].to_tokens(pairs.sum(1))
    assert mine.tolist() == [4000.0 / 2 * s + 4 * i + 1 for s, i in wanted]
    (mine * 3).sum().backward()
    assert pairs.grad is not None
    assert bool((pairs.grad == 3).all())
    clips = cp.payloads["clips"].to_tokens(local.clips.repeat_interleave(3))
    assert clips.tolist() == [
        1000 * s + token // 3 for s, token in spans_of(cp) if whole[s]["in_clip"][token]
    ]
    alone = cp.payloads["first"].to_tokens(local.first)
    assert alone.tolist() == [1000 * s + i for s, i in wanted]
    assert alone.dtype == local.first.dtype


def check_step(
    groups: Any,
    lengths: Any,
    sources: Any,
    *,
    masked: bool = False,
    device: str = "cpu",
    **limits: Any,
) -> list[Any]:
    """Dispatch a step and check each field of each micro-batch; return what came as units."""
    rank = groups.transport.rank
    masks = [hcp.Mask.full(n) if i % 2 else hcp.Mask.chunked(n, 3) for i, n in enumerate(lengths)]
    limits |= {"masks": masks} if masked else {}
    plan = hcp.plan(lengths, ranks=groups.transport.size, max_tokens_per_rank=24, **limits)
    whole = [sample(i, n) for i, n in enumerate(lengths)]
    mine = [whole[i] for i, source in enumerate(sources) if source == rank]
    own = [{name: value.to(device) for name, value in fields.items()} for fields in mine]
    units = []
    for cp, local in hcp.dispatch(plan, own, sources, groups, fields=FIELDS):
        check_values(cp, local, whole)
        check_results(cp, local, whole)
        bounds = cp.payloads["pixels"].cu_units
        assert bounds.diff().tolist() == local.grid.tolist()
        assert int(bounds[-1]) == len(local.pixels)
        units.append((cp.layout.first_rank, local.pixels[:, 0].tolist(), local.grid.tolist()))
    return units
