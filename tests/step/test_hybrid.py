"""A hybrid model, trained under any plan, equals the same model in plain PyTorch, one sequence at a
time."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import hcp

HEADS, SIZE = 4, 3
WIDTH = HEADS * SIZE
TYPES = ("p2p", "all_gather", "a2a")
LENGTHS = (29, 7, 1, 12, 5, 2)
STEPS = 20

# (first rank, degree, sequences) of every group, for each micro-batch.
PLANS = {
    "degrees 1, 3 and 4": (4, [[(0, 3, [0, 2]), (3, 1, [4])], [(0, 4, [1, 3, 5])]]),
    "degrees 1 and 2": (4, [[(0, 2, [0]), (2, 1, [1]), (3, 1, [2, 4])], [(1, 2, [3, 5])]]),
}


class Hybrid(torch.nn.Module):
    """Attention, window attention with sinks, a scan over whole sequences, and a second head that
    predicts one token further."""

    def __init__(self, comm_type: str) -> None:
        super().__init__()
        self.comm_type = comm_type
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.sinks = torch.nn.Parameter(torch.randn(HEADS))
        self.decay = torch.nn.Linear(WIDTH, WIDTH)
        self.heads = torch.nn.Linear(WIDTH, 2)
        self.double()

    def attend(self, x: Tensor, cp: hcp.ContextParallelHandler, layer: int) -> Tensor:
        qkv = self.layers[layer](x).view(-1, 3, HEADS, SIZE).unbind(1)
        options: dict[str, Any] = {"window_size": (6, 0), "sinks": self.sinks} if layer else {}
        return x + cp.attention(*qkv, comm_type=self.comm_type, **options).flatten(1)

    def scan(self, x: Tensor, cp: hcp.ContextParallelHandler) -> Tensor:
        whole = cp.whole.sequence_to_head(torch.tanh(self.decay(x)).view(-1, HEADS, SIZE))
        sizes = cp.whole.cu_seqlens.diff().tolist()
        states = [part.cumsum(0) for part in whole.split(sizes)] if sizes else [whole]
        return x + 0.1 * cp.whole.head_to_sequence(torch.cat(states), HEADS).flatten(1)

    def forward(self, x: Tensor, target: Tensor, cp: hcp.ContextParallelHandler) -> Tensor:
        for layer in range(2):
            x = self.attend(x, cp, layer)
        scores = self.heads(self.scan(x, cp))
        further = cp.roll_tensor(target)
        return (scores[:, 0] - target).square() + (scores[:, 1] - further).square()


class Plain(Hybrid):
    """Compute without hcp: x (T, WIDTH) is one whole sequence."""

    def attend(self, x: Tensor, cp: None, layer: int) -> Tensor:  # type: ignore[override]
        query, key, value = self.layers[layer](x).view(-1, 3, HEADS, SIZE).unbind(1)
        scores = torch.einsum("thd,shd->hts", query, key) / SIZE**0.5
        behind = torch.arange(len(x))[:, None] - torch.arange(len(x))
        hidden = (behind < 0) | (behind > 6) if layer else behind < 0
        scores = scores.masked_fill(hidden, -torch.inf)
        if layer:  # a sink takes its share, and gives nothing
            sinks = self.sinks[:, None, None].expand(-1, len(x), 1)
            scores = torch.cat([scores, sinks], -1)
        shares = scores.softmax(-1)[..., : len(x)]
        return x + torch.einsum("hts,shd->thd", shares, value).flatten(1)

    def scan(self, x: Tensor, cp: None) -> Tensor:  # type: ignore[override]
        return x + 0.1 * torch.tanh(self.decay(x)).cumsum(0)

    def forward(self, x: Tensor, target: Tensor, cp: None = None) -> Tensor:  # type: ignore[override]
        for layer in range(2):
            x = self.attend(x, cp, layer)
        scores = self.heads(self.scan(x, cp))
        further = torch.cat([target[1:], target.new_zeros(1)])
        return (scores[:, 0] - target).square() + (scores[:, 1] - further).square()


def planned(name: str) -> hcp.Plan:
    ranks, micro_batches = PLANS[name]
    batches = [
        {"groups": [dict(first_rank=f, degree=d, sequences=s) for f, d, s in groups]}
        for groups in micro_batches
    ]
    plan = {"ranks": ranks, "max_tokens_per_rank": 32, "lengths": LENGTHS, "micro_batches": batches}
    return hcp.Plan.from_dict(plan)


def summed(groups: Any, own: list[Tensor]) -> list[Tensor]:
    shares = map(pickle.loads, groups.transport.all_gather_bytes(pickle.dumps(own), "test"))
    return [torch.stack(tensors).sum(0) for tensors in zip(*shares, strict=True)]


def made(kind: type[Hybrid], comm_type: str = "") -> Hybrid:
    """Always with the same weights. Not for loopback's threads, which share a generator."""
    torch.manual_seed(0)
    return kind(comm_type)


def batches() -> Iterator[list[dict[str, Tensor]]]:
    """The samples of each step."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield [
            {
                "x": torch.randn(n, WIDTH, generator=generator, dtype=torch.float64),
                "target": torch.randn(n, generator=generator, dtype=torch.float64),
                "loss_mask": torch.ones(n),
            }
            for n in LENGTHS
        ]


@functools.cache
def train_plain() -> tuple[list[float], list[Tensor]]:
    """Losses of all steps, and the last step's gradients."""
    model = made(Plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        loss = sum(model(s["x"], s["target"]).sum() for s in batch) / sum(LENGTHS)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [p.grad for p in model.parameters() if p.grad is not None]


def train(groups: Any, plan: hcp.Plan, start: Hybrid) -> tuple[list[float], list[Tensor]]:
    """Losses of all steps, and the last step's gradients."""
    model = copy.deepcopy(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    sources = [i % plan.ranks for i in range(len(LENGTHS))]
    losses = []
    for batch in batches():
        own = [s for s, r in zip(batch, sources, strict=True) if r == groups.transport.rank]
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for cp, local in hcp.dispatch(plan, own, sources, groups, comm_types=(model.comm_type,)):
            by_row = model(local.x, local.target, cp)
            loss = cp.loss(by_row, local.loss_mask, grad_reduce="sum")
            loss.backward()
            total += loss.detach()
        parameters = list(model.parameters())
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        total, *grads = summed(groups, [total, *grads])
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        optimizer.step()
        losses.append(float(total))
    return losses, grads


@pytest.mark.parametrize("comm_type", TYPES)
@pytest.mark.parametrize("name", PLANS)
def test_twenty_steps_of_a_hybrid_model_equal_plain_pytorchs(name: str, comm_type: str) -> None:
    model, plan = made(Hybrid, comm_type), planned(name)
    losses, grads = train_plain()
    for own_losses, own_grads in hcp.loopback(plan.ranks, lambda g: train(g, plan, model)):
        assert own_losses == pytest.approx(losses, abs=1e-9)
        assert all((a - b).abs().max() <= 1e-9 for a, b in zip(own_grads, grads, strict=True))
    assert abs(losses[0] - losses[-1]) > 1e-3
