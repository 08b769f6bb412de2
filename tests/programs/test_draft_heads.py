"""Draft heads beside a trunk are those of each document alone, under any plan.

The references make every row and every step explicit, with dense masks, on one document at a time.
They share the weights and nothing else with hcp, and shift by slices what hcp rolls.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from support.examples import example
from support.ranks import run_ranks
from torch import Tensor
from torch.nn import functional as F

import hcp

heads = example("draft_heads")

STEP = 3
"""Of the training, by which blocks lie differently."""
DOCUMENTS = [37, 1, 5, 64, 2, 18, 29, 6]
PACKS = [[37], [1, 5, 64], [2, 18], [29, 6]]
"""The documents as four sequences, of which two have a border inside."""


# ---- one document alone --------------------------------------------------------------------------


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate halves of heads, as complex numbers. x: (n, H, D)."""
    half = x.shape[2] // 2
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turns = torch.polar(torch.ones(()).double(), torch.outer(positions.double(), frequencies))
    both = torch.complex(x[..., :half], x[..., half:]) * turns[:, None]
    return torch.cat((both.real, both.imag), 2)


def softmax_over(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """One dense softmax, (queries, width)."""
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def trunk_alone(trunk: Any, tokens: Tensor) -> list[Tensor]:
    x, places = trunk.embedding(tokens), torch.arange(len(tokens))
    causal = places[:, None] >= places
    hidden = []
    for layer in trunk.layers:
        q, k, v = layer.qkv(layer.norms[0](x)).unbind(1)
        out = softmax_over(turned(q, places), turned(k, places), v, causal)
        x = x + layer.out(out)
        x = x + layer.mlp(layer.norms[1](x))
        hidden.append(x)
    return hidden


def eagle_alone(models: Any, features: list[Tensor], sample: dict[str, Tensor]) -> Tensor:
    """The sum of losses. Step s has the rows t that have a token t + s + 2, which it predicts; its
    query stands at t + s and sees the trunk's keys up to t."""
    eagle, trunk = models.eagle, models.trunk
    after, mask = sample["labels"], sample["loss_mask"]
    taught = trunk.logits(features[-1]).softmax(-1).detach()
    state = eagle.fuse(torch.cat(features, 1))
    made: list[tuple[Tensor, Tensor, Tensor, int]] = []  # keys, values, their rows, their step
    total = torch.zeros((), dtype=torch.float64)
    for step in range(min(heads.STEPS, len(after))):
        rows = torch.arange(len(after) - step)
        token = trunk.embedding(after[step:])
        given = torch.cat((eagle.norms[0](token), eagle.norms[1](state[: len(rows)])), 1)
        q, k, v = eagle.qkv(given).unbind(1)
        made.append((turned(k, rows + step), v, rows, step))
        seen = torch.cat(
            [(r <= rows[:, None]) if s == 0 else (r == rows[:, None]) for _, _, r, s in made],
            1,
        )
        keys, values = (torch.cat([each[i] for each in made]) for i in (0, 1))
        out = softmax_over(turned(q, rows + step), keys, values, seen)
        state = state[: len(rows)] + eagle.out(out)
        state = state + eagle.mlp(eagle.norms[2](state))
        logits = eagle.head(eagle.norms[3](state))
        ahead = slice(step + 1, None)
        losses = -(taught[ahead] * logits[: len(rows) - 1].log_softmax(-1)).sum(1)
        total = total + heads.DECAY**step * (losses * mask[ahead]).sum()
    return total


def dflash_alone(models: Any, features: list[Tensor], sample: dict[str, Tensor]) -> Tensor:
    """The sum of losses, each block computed by itself."""
    head, tokens, mask = models.dflash, sample["tokens"], sample["loss_mask"]
    fused = head.fuse(torch.cat(features, 1))
    total = torch.zeros((), dtype=torch.float64)
    size = heads.BLOCK
    for turn in range(heads.ROUNDS):
        first = 1 + (STEP + turn * size // heads.ROUNDS) % size
        for start in range(first, len(tokens) - size + 1, size):
            places = torch.arange(start, start + size)
            x = torch.cat((models.trunk.embedding(tokens[start])[None], head.masked.expand(3, -1)))
            for layer in head.layers:
                own = layer.norms[0](x)
                q = turned(layer.query(own)[:, 0], places)
                k, v = layer.key_value(torch.cat((fused[:start], own))).unbind(1)
                everything = torch.ones(size, start + size, dtype=torch.bool)
                out = softmax_over(q, turned(k, torch.arange(start + size)), v, everything)
                x = x + layer.out(out)
                x = x + layer.mlp(layer.norms[1](x))
            logits = head.head(head.norm(x)).log_softmax(-1)
            for i in range(1, size):
                loss = -logits[i, tokens[start + i]] * mask[start + i - 1]
                total = total + heads.DECAY ** (i - 1) * loss / heads.ROUNDS
    return total


# ---- what both train -----------------------------------------------------------------------------


@cache
def made(live: bool) -> Any:
    torch.manual_seed(2)
    parts = (kind().double() for kind in (heads.Trunk, heads.Eagle, heads.DFlash))
    models = heads.Models(*parts)
    models.trunk.requires_grad_(live)
    return models


def samples() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(4)
    return [
        {
            "tokens": torch.randint(heads.VOCABULARY, (n,), generator=draw),
            "labels": torch.randint(heads.VOCABULARY, (n,), generator=draw),
            "loss_mask": (torch.rand(n, generator=draw) < 0.8).double(),
        }
        for n in DOCUMENTS
    ]


def gradients(models: Any) -> list[Tensor]:
    found = [p.grad for model in models for p in model.parameters() if p.requires_grad]
    return [torch.zeros(()) if grad is None else grad for grad in found]


@cache
def alone(live: bool) -> tuple[float, list[Tensor]]:
    """Loss and gradients of all documents, each by itself."""
    models, given = copy.deepcopy(made(live)), samples()
    total = torch.zeros((), dtype=torch.float64)
    for sample in given:
        # In a stream of tokens the label of a token is the next one; here drawn apart, so that a
        # label that comes from the wrong row shows.
        features = trunk_alone(models.trunk, sample["tokens"])
        total = total + eagle_alone(models, features, sample)
        total = total + dflash_alone(models, features, sample)
        if live:
            logits = models.trunk.logits(features[-1])
            losses = F.cross_entropy(logits, sample["labels"], reduction="none")
            total = total + (losses * sample["loss_mask"]).sum()
    loss = total / sum(sample["loss_mask"].sum() for sample in given)
    loss.backward()
    return loss.item(), gradients(models)


def joined(packs: Sequence[Sequence[int]]) -> list[dict[str, Tensor]]:
    """The samples as packs, with each token's place in its block."""
    each = iter(samples())
    found = []
    for lengths in packs:
        own = list(itertools.islice(each, len(lengths)))
        sample = {name: torch.cat([s[name] for s in own]) for name in own[0]}
        found.append(sample | {"places": heads.places_of(lengths, STEP)})
    return found


def trained(
    groups: Any, packs: Sequence[Sequence[int]], live: bool, **options: Any
) -> tuple[float, list[Tensor], list[tuple[int, int]]]:
    """This rank's share of loss and gradients, and its degree and rows in each micro-batch."""
    rank, ranks = groups.transport.rank, groups.transport.size
    models = copy.deepcopy(made(live))
    lengths, sources, own = hcp.gather_lengths(joined(packs)[rank::ranks], groups)
    order = [i for r in range(ranks) for i in range(r, len(packs), ranks)]
    masks = heads.masks_of([packs[i] for i in order], STEP)
    plan = hcp.plan(lengths, masks=masks, ranks=ranks, **options)
    total, seen = 0.0, []
    for cp, local in hcp.dispatch(plan, own, sources, groups):
        loss = heads.loss_of(models, cp, local, live)
        loss.backward()
        total += loss.item()
        seen.append((cp.degree, cp.rows))
    return total, gradients(models), seen


def compare(found: list[Any], live: bool) -> list[tuple[int, int]]:
    expected, by_parameter = alone(live)
    assert sum(loss for loss, _, _ in found) == pytest.approx(expected, abs=1e-10)
    assert len(by_parameter) == len(found[0][1])
    for i, want in enumerate(by_parameter):
        got = sum((grads[i] for _, grads, _ in found), torch.zeros(()).double())
        assert float((got - want).abs().max()) < 1e-10
    return [each for _, _, seen in found for each in seen]


EACH = [[n] for n in DOCUMENTS]


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    """The example makes angles and masks of the default dtype."""
    torch.set_default_dtype(torch.float64)
    made(False), made(True)  # before ranks, which are threads, ask for them at once
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("live", [False, True], ids=["frozen", "live"])
@pytest.mark.parametrize("packs", [EACH, PACKS], ids=["each", "packed"])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_heads_of_every_document_are_those_of_it_alone(
    degree: int, packs: list[list[int]], live: bool
) -> None:
    options = {"max_tokens_per_rank": 200, "min_degree": degree, "max_degree": degree}
    found = hcp.loopback(degree, lambda groups: trained(groups, packs, live, **options))
    assert {each for each, rows in compare(found, live) if rows} == {degree}


@pytest.mark.parametrize("live", [False, True], ids=["frozen", "live"])
def test_heads_are_the_same_where_a_plan_has_several_degrees(live: bool) -> None:
    found = hcp.loopback(4, lambda groups: trained(groups, EACH, live, max_tokens_per_rank=40))
    assert {degree for degree, _ in compare(found, live)} == {1, 2, 4}


@pytest.mark.parametrize("live", [False, True], ids=["frozen", "live"])
def test_a_rank_may_have_no_rows(live: bool) -> None:
    options = {"max_tokens_per_rank": 200, "min_degree": 3, "max_degree": 3}
    found = hcp.loopback(4, lambda groups: trained(groups, PACKS, live, **options))
    assert {degree for degree, _ in compare(found, live)} == {0, 3}


def test_the_references_see_each_part_of_the_heads() -> None:
    """Every parameter of the heads has a gradient, so that a part left out would show."""
    _, by_parameter = alone(True)
    assert all(float(grad.abs().max()) > 1e-6 for grad in by_parameter)


def gloo(rank: int, size: int, live: bool) -> list[float]:
    torch.set_default_dtype(torch.float64)
    try:
        losses: list[float] = example("draft_heads").train(steps=3, live=live)
        return losses
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("live", [False, True], ids=["frozen", "live"])
def test_the_example_has_the_losses_of_one_rank(live: bool) -> None:
    (losses,) = run_ranks(1, gloo, live)
    for found in run_ranks(2, gloo, live):
        assert found == pytest.approx(losses, abs=1e-10)
