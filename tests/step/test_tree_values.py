"""Losses and values of rollouts on trees equal those of each rollout alone, without hcp."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hcp
from hcp.step.dispatch import gather_masks

F64 = torch.float64
VOCABULARY = 11


class Drawn(NamedTuple):
    """Rollouts of every rank together, with what trainers give to each."""

    rollouts: list[Tensor]
    weights: list[Tensor]
    """(tokens,): which rows have a loss."""
    advantages: list[Tensor]
    old: list[Tensor]
    """(tokens,): log-probabilities of the old policy."""


def drawn(seed: int) -> Drawn:
    """Prompts with answers, some of which branch again, some of which are equal."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rollouts = []
    for _ in range(4):
        prompt = torch.randint(VOCABULARY, (rng.choice([1, 2, 9, 40]),), generator=generator)
        turns = [torch.randint(VOCABULARY, (rng.randint(1, 7),), generator=generator) for _ in "ab"]
        for _ in range(rng.randint(1, 4)):
            tail = torch.randint(VOCABULARY, (rng.randint(1, 9),), generator=generator)
            rollouts.append(torch.cat([prompt, *turns[: rng.randint(0, 2)], tail]))
        rollouts.append(rollouts[-1])
    weights = [torch.rand(len(own), generator=generator, dtype=F64) for own in rollouts]
    weights = [own * (torch.arange(len(own)) < len(own) - 1) for own in weights]
    advantages = list(torch.randn(len(rollouts), generator=generator, dtype=F64).unbind())
    old = [-torch.rand(len(own), generator=generator, dtype=F64) for own in rollouts]
    return Drawn(rollouts, weights, advantages, old)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        sizes = {
            "tokens": (VOCABULARY, 8),
            "places": (96, 8),
            "qkv": (8, 24),
            "out": (8, VOCABULARY),
        }
        for name, size in sizes.items():
            made = torch.randn(size, generator=generator, dtype=F64) / 3
            setattr(self, name, torch.nn.Parameter(made))

    def forward(self, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
        x = self.tokens[tokens] + self.places[positions]
        q, k, v = (x @ self.qkv).view(-1, 3, 2, 4).unbind(1)
        return ((x + attend(q, k, v).flatten(1)) @ self.out).log_softmax(-1)

    def alone(self, tokens: Tensor) -> Tensor:
        """The log-probability of each token's successor, (tokens,), 0 of the last."""

        def attend(*qkv: Tensor) -> Tensor:
            q, k, v = (x.transpose(0, 1) for x in qkv)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)

        every = self(tokens, torch.arange(len(tokens)), attend)
        return F.pad(every[:-1].gather(1, tokens[1:, None])[:, 0], (0, 1))


def linear(log_probs: Tensor, weights: Tensor, advantage: Tensor, old: Tensor) -> Tensor:
    return -(log_probs * weights).sum() * advantage


def clipped(log_probs: Tensor, weights: Tensor, advantage: Tensor, old: Tensor) -> Tensor:
    ratio = (log_probs - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -(gain * weights).sum()


def of_paths(log_probs: Tensor, weights: Tensor, advantage: Tensor, old: Tensor) -> Tensor:
    """One ratio of each rollout, as in GSPO."""
    change = ((log_probs - old) * (weights > 0)).sum() / (weights > 0).sum().clamp(min=1)
    ratio = change.exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -gain * weights.sum()


LOSSES = {"linear": linear, "clipped": clipped, "paths": of_paths}


def alone(batch: Drawn, loss: str) -> tuple[Tensor, list[Tensor]]:
    """The loss and its gradients, one rollout after the other."""
    model = Model()
    total = torch.zeros((), dtype=F64)
    for rollout, *others in zip(*batch, strict=True):
        total = total + LOSSES[loss](model.alone(rollout), *others)
    total = total / sum(own.sum() for own in batch.weights)
    total.backward()
    return total.detach(), [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


def samples_of(trees: hcp.Trees, batch: Drawn, own: slice) -> list[dict[str, Tensor]]:
    """A sample of each tree: the weights of rollouts are summed, and so is what multiplies them."""
    weights, advantages = batch.weights[own], batch.advantages[own]
    up = [w * a.clamp(min=0) for w, a in zip(weights, advantages, strict=True)]
    down = [w * a.clamp(max=0) for w, a in zip(weights, advantages, strict=True)]
    counted = [(w > 0).double() for w in weights]
    columns = {
        "input_ids": trees.tokens,
        "labels": [each.clamp(min=0) for each in trees.labels],
        "loss_mask": trees.summed(weights),
        "up": trees.summed(up),
        "down": trees.summed(down),
        "counted": trees.first(counted),
        "old": trees.first(batch.old[own]),
        "advantages": trees.by_tree(advantages),
        "counts": trees.by_tree([each.sum() for each in counted]),
        "sums": trees.by_tree([w.sum() for w in weights]),
    }
    fields = trees.fields()
    return [
        {**fields[i], **{name: column[i] for name, column in columns.items()}}
        for i in range(len(trees))
    ]


RULES = hcp.Trees.RULES | {name: hcp.Payload("whole") for name in ("advantages", "counts", "sums")}


def loss_of(cp: Any, local: Any, log_probs: Tensor, loss: str) -> Tensor:
    """The sum over this rank's rows of what all rollouts make of them."""
    if loss == "linear":
        return -(log_probs * (local.up + local.down)).sum()
    if loss == "clipped":
        ratio = (log_probs - local.old).exp()
        return -(ratio.clamp(max=1.2) * local.up + ratio.clamp(min=0.8) * local.down).sum()
    tree = hcp.TreeValues(cp, local)
    change = tree.sum_over_paths((log_probs - local.old) * local.counted)
    ratio = (change / local.counts.clamp(min=1)).exp()
    gain = torch.minimum(ratio * local.advantages, ratio.clamp(0.8, 1.2) * local.advantages)
    return -(gain * local.sums).sum() / max(cp.degree, 1)


def same_old(batch: Drawn) -> Drawn:
    """Rollouts that share a row have one old policy, hence one log-probability of it."""
    trees = hcp.prefix_trees(batch.rollouts)
    old = trees.by_rollout(trees.first(batch.old))
    return batch._replace(old=old)


def one_mask(batch: Drawn) -> Drawn:
    """Which rows count is the same in all rollouts through a row; weights are a rollout's own."""
    trees = hcp.prefix_trees(batch.rollouts)
    kept = trees.by_rollout(trees.first([(own > 0.3).double() for own in batch.weights]))
    return batch._replace(weights=[(w + 0.1) * k for w, k in zip(batch.weights, kept, strict=True)])


def on_ranks(batch: Drawn, loss: str, ranks: int, degree: int, **options: Any) -> list[Any]:
    def run(groups: Any) -> tuple[Tensor, list[Tensor]]:
        rank, count = groups.transport.rank, len(batch.rollouts)
        own = slice(rank * count // ranks, (rank + 1) * count // ranks)
        trees = hcp.prefix_trees(batch.rollouts[own], **options)
        samples = samples_of(trees, batch, own)
        lengths, sources, samples = hcp.gather_lengths(samples, groups, fields=RULES)
        masks = gather_masks(trees.masks, groups)
        plan = hcp.plan(
            lengths, masks=masks, ranks=ranks, max_tokens_per_rank=130, min_degree=degree
        )
        step = hcp.dispatch(plan, samples, sources, groups, fields=RULES)
        model, total = Model(), torch.zeros((), dtype=F64)
        for cp, local in step:
            every = model(local.input_ids, cp.position_ids, cp.attention)
            share = loss_of(cp, local, every.gather(1, local.labels[:, None])[:, 0], loss)
            share = share / cp.loss_tokens
            share.backward()
            total += share.detach()
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
        return total, grads

    return hcp.loopback(ranks, run)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("ranks", "degree"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 4)])
def test_losses_and_gradients_equal_those_of_rollouts_alone(
    loss: str, ranks: int, degree: int
) -> None:
    for seed in range(2):
        batch = one_mask(same_old(drawn(seed)))
        expected, gradients = alone(batch, loss)
        found = on_ranks(batch, loss, ranks, degree)
        torch.testing.assert_close(sum(total for total, _ in found), expected, rtol=0, atol=1e-10)
        for i, gradient in enumerate(gradients):
            summed = sum(grads[i] for _, grads in found)
            torch.testing.assert_close(summed, gradient, rtol=0, atol=1e-10)


def test_trees_that_are_divided_have_the_same_loss() -> None:
    batch = one_mask(same_old(drawn(5)))
    expected, gradients = alone(batch, "paths")
    longest = max(map(len, batch.rollouts))
    found = on_ranks(batch, "paths", 2, 1, max_tokens=longest + 3, min_shared=2)
    torch.testing.assert_close(sum(total for total, _ in found), expected, rtol=0, atol=1e-10)
    for i, gradient in enumerate(gradients):
        torch.testing.assert_close(sum(g[i] for _, g in found), gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("ranks", "degree"), [(1, 1), (2, 2), (4, 1), (4, 4)])
def test_log_probs_and_values_come_back_to_rollouts_with_gradients(ranks: int, degree: int) -> None:
    batch = drawn(8)
    model = Model()
    expected = [model.alone(own) for own in batch.rollouts]
    factors = [torch.randn(len(own), dtype=F64) for own in batch.rollouts]
    sum((x * y).sum() for x, y in zip(expected, factors, strict=True)).backward()  # type: ignore[union-attr]

    def run(groups: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        rank, count = groups.transport.rank, len(batch.rollouts)
        own = slice(rank * count // ranks, (rank + 1) * count // ranks)
        trees = hcp.prefix_trees(batch.rollouts[own])
        samples = samples_of(trees, batch, own)
        lengths, sources, samples = hcp.gather_lengths(samples, groups, fields=RULES)
        masks = gather_masks(trees.masks, groups)
        plan = hcp.plan(
            lengths, masks=masks, ranks=ranks, max_tokens_per_rank=130, min_degree=degree
        )
        step = hcp.dispatch(plan, samples, sources, groups, fields=RULES)
        mine, rows, ends = Model(), [], []
        for cp, local in step:
            every = mine(local.input_ids, cp.position_ids, cp.attention)
            own_rows = every.gather(1, local.labels[:, None])[:, 0]
            tree = hcp.TreeValues(cp, local)
            sums = tree.sum_over_paths(own_rows.detach() * local.counted)
            assert tree.rollouts == len(local.advantages)
            rows.append(own_rows)
            ends.append(tree.at_ends(torch.stack((sums, local.advantages), 1)))
        back = trees.by_rollout(step.combine(rows))
        at_ends = trees.ends(step.combine(ends))
        loss = sum((x[:-1] * y[:-1]).sum() for x, y in zip(back, factors[own], strict=True))
        loss.backward()  # type: ignore[union-attr]
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in mine.parameters()]
        return [x.detach() for x in back], at_ends, grads

    found = hcp.loopback(ranks, run)
    back = [x for own, _, _ in found for x in own]
    ends = [x for _, own, _ in found for x in own]
    for x, y in zip(back, expected, strict=True):
        torch.testing.assert_close(x[:-1], y[:-1].detach(), rtol=0, atol=1e-10)
    for i, (total, advantage) in enumerate(ends):
        counted = batch.weights[i] > 0
        torch.testing.assert_close(total, (expected[i].detach() * counted).sum())
        assert advantage == batch.advantages[i]
    for i, parameter in enumerate(model.parameters()):
        summed = sum(grads[i] for _, _, grads in found)
        torch.testing.assert_close(summed, parameter.grad, rtol=0, atol=1e-10)


def test_leaves_are_the_adjoint_of_paths() -> None:
    batch = drawn(3)
    trees = hcp.prefix_trees(batch.rollouts)
    samples = samples_of(trees, batch, slice(None))

    def run(groups: Any) -> None:
        own = samples if groups.transport.rank == 0 else []
        lengths, sources, own = hcp.gather_lengths(own, groups, fields=RULES)
        plan = hcp.plan(
            lengths, masks=trees.masks, ranks=3, max_tokens_per_rank=130, min_degree=3, alignment=4
        )
        for cp, local in hcp.dispatch(plan, own, sources, groups, fields=RULES):
            tree = hcp.TreeValues(cp, local)
            x = torch.randn(cp.rows, 2, dtype=F64)
            y = torch.arange(2.0 * tree.rollouts, dtype=F64).view(-1, 2)
            rows = tree.sum_over_leaves(y)
            assert rows.shape == x.shape
            forth = (tree.sum_over_paths(x) * y).sum()
            back = cp.group.sum((rows * x).sum())
            torch.testing.assert_close(forth, back)

    hcp.loopback(3, run)


def test_samples_without_the_fields_of_trees_are_refused() -> None:
    def run(groups: Any) -> None:
        plan = hcp.plan([3], ranks=1, max_tokens_per_rank=4)
        ((cp, local),) = hcp.dispatch(plan, [{"x": torch.ones(3)}], [0], groups)
        with pytest.raises(ValueError, match="the samples have no field 'tree_rows', expected"):
            hcp.TreeValues(cp, local)

    hcp.loopback(1, run)
