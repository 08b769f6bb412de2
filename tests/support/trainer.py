"""A small trainer with tensor, context, data and pipeline parallelism, as Megatron-style ones are.

Layers keep the groups with which they were built, and the sizes and ranks that they derived from
them. hcp.eval_cp_context exists for such layers. Every rank holds the rows of its cp_rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hcp
from hcp.evaluation.metrics import Metric

VOCABULARY, HIDDEN, HEADS = 11, 8, 4

Sample = dict[str, Tensor]
"""The tokens of a sequence, and the mask of their losses."""


@dataclass
class Config:
    context_parallel_size: int
    num_layers: int = 4


@dataclass
class Rows:
    """Packed rows of one rank: each one's token, label, weight of the loss, sequence and place."""

    tokens: Tensor
    labels: Tensor
    weights: Tensor
    sequence: Tensor
    position: Tensor


# ---- collectives with gradients ------------------------------------------------------------------


class _Sum(torch.autograd.Function):
    """Sums over a group forward and does nothing backward, or the reverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, forward: bool) -> Tensor:
        ctx.group, ctx.backward_too = group, not forward
        return _summed(x, group) if forward else x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (_summed(grad, ctx.group) if ctx.backward_too else grad), None, None


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


class _Gather(torch.autograd.Function):
    """Gathers the rows of all ranks of a group. Their numbers may differ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        counts = torch.zeros(group.size(), dtype=torch.int64)
        counts[group.rank()] = len(x)
        ctx.counts = _summed(counts, group).tolist()
        ctx.group = group
        start = sum(ctx.counts[: group.rank()])
        whole = x.new_zeros(sum(ctx.counts), *x.shape[1:])
        whole[start : start + len(x)] = x
        return _summed(whole, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        start = sum(ctx.counts[: ctx.group.rank()])
        return _summed(grad, ctx.group)[start : start + ctx.counts[ctx.group.rank()]], None


# ---- the model -----------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, pgs: hcp.ProcessGroups, dtype: torch.dtype) -> None:
        super().__init__()
        self.cp_group, self.tp_group = pgs.cp, pgs.tp
        self.heads = HEADS // pgs.size("tp")
        width = HIDDEN // pgs.size("tp")
        self.qkv = nn.Linear(HIDDEN, 3 * width, bias=False, dtype=dtype)
        self.proj = nn.Linear(width, HIDDEN, bias=False, dtype=dtype)

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        qkv = self.qkv(_Sum.apply(x, self.tp_group, False))
        q, k, v = qkv.view(len(x), 3, self.heads, -1).unbind(1)
        k, v = _Gather.apply(k, self.cp_group), _Gather.apply(v, self.cp_group)
        sequence = _Gather.apply(rows.sequence, self.cp_group)
        position = _Gather.apply(rows.position, self.cp_group)
        seen = (rows.sequence[:, None] == sequence) & (rows.position[:, None] >= position)
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -1e9).softmax(-1), v)
        whole: Tensor = _Sum.apply(self.proj(out.flatten(1)), self.tp_group, True)
        return x + whole


class Stage(nn.Module):
    """The layers of one pipeline stage."""

    def __init__(
        self, pgs: hcp.ProcessGroups, config: Config, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        self.config = config
        self.pg_collection = pgs
        self.cp_size, self.cp_rank = pgs.size("cp"), pgs.rank("cp")
        stages, self.stage = pgs.size("pp"), pgs.rank("pp")
        self.first, self.last = self.stage == 0, self.stage == stages - 1
        torch.manual_seed(3 + 10 * self.stage + 100 * pgs.rank("tp"))
        self.layers = nn.ModuleList(
            Attention(pgs, dtype) for _ in range(config.num_layers // stages)
        )
        torch.manual_seed(1)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, dtype=dtype) if self.first else None
        self.head = nn.Linear(HIDDEN, VOCABULARY, dtype=dtype) if self.last else None

    def rows(self, samples: Sequence[Sample], weights: Sequence[float] | Tensor) -> Rows:
        """Return this rank's part of packed sequences, by the sizes that the model keeps."""
        parts = []
        for i, (sample, weight) in enumerate(zip(samples, weights, strict=True)):
            n, size, rank = len(sample["tokens"]) - 1, self.cp_size, self.cp_rank
            at = torch.arange(rank * n // size, (rank + 1) * n // size)
            tokens, mask = sample["tokens"], sample["mask"]
            parts.append(
                (tokens[at], tokens[at + 1], mask[at] * weight, torch.full_like(at, i), at)
            )
        return Rows(*(torch.cat(field) for field in zip(*parts, strict=True)))

    def forward(self, x: Tensor | None, rows: Rows) -> Tensor:
        """Run the stage. ``x``: the rows of the stage before, None on the first stage."""
        if self.embedding is not None:
            x = self.embedding(rows.tokens)
        assert x is not None
        for layer in self.layers:
            x = layer(x, rows)
        if self.head is None:
            return x
        return nn.functional.cross_entropy(self.head(x), rows.labels, reduction="none")


def samples_of(n: int, seed: int = 5) -> list[Sample]:
    """Draw sequences of any length. Some masks leave out the first part, and some the whole."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(n):
        length = int(torch.randint(5, 14, (), generator=generator, device="cpu"))
        tokens = torch.randint(0, VOCABULARY, (length,), generator=generator, device="cpu")
        tokens = tokens.to(torch.get_default_device())
        masked = (0, length // 2, length)[i % 3]
        samples.append({"tokens": tokens, "mask": (torch.arange(length) >= masked).double()})
    return samples


# ---- steps ---------------------------------------------------------------------------------------


def _neighbour(pgs: hcp.ProcessGroups, step: int) -> int:
    return pgs.ranks("pp")[pgs.rank("pp") + step]


def forward_step(model: Stage, rows: Rows) -> tuple[Tensor | None, Tensor]:
    """Run a stage. Return the rows that it received, None on the first stage, and its output: the
    losses on the last stage, else the rows that it sent on."""
    pgs = model.pg_collection
    x = None
    if not model.first:
        dtype = next(model.parameters()).dtype
        x = torch.empty(len(rows.tokens), HIDDEN, dtype=dtype)
        dist.recv(x, _neighbour(pgs, -1), group=pgs.pp)
        x.requires_grad_(torch.is_grad_enabled())
    out = model(x, rows)
    if not model.last:
        dist.send(out.detach().contiguous(), _neighbour(pgs, 1), group=pgs.pp)
    return x, out


def train_step(model: Stage, optimizer: torch.optim.Optimizer, samples: Sequence[Sample]) -> None:
    """Update the weights once, on this data-parallel rank's share."""
    pgs = model.pg_collection
    own = samples[pgs.rank("dp") :: pgs.size("dp")]
    rows = model.rows(own, [1.0] * len(own))
    x, out = forward_step(model, rows)
    if model.last:
        (out * rows.weights.to(out.dtype)).sum().backward()
    else:
        grad = torch.empty_like(out)
        dist.recv(grad, _neighbour(pgs, 1), group=pgs.pp)
        out.backward(grad)
    if x is not None:
        assert x.grad is not None
        dist.send(x.grad, _neighbour(pgs, -1), group=pgs.pp)
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=pgs.dp_cp)
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: Stage, samples: Sequence[Sample], micro_batch_size: int) -> Metric:
    """Return the mean loss of the samples, each once, under the model's current layout."""
    pgs = model.pg_collection
    plan, metrics = (
        hcp.EvalPlan(len(samples), pgs, micro_batch_size=micro_batch_size),
        hcp.Metrics(pgs),
    )
    for batch in plan.batches(samples):
        rows = model.rows(batch.samples, batch.weights)
        _, out = forward_step(model, rows)
        if model.last:
            metrics.add("loss", out, rows.weights)
    assert plan.finish() == len(samples)
    return metrics.reduce()["loss"]


def build(
    pgs: hcp.ProcessGroups, dtype: torch.dtype = torch.float64
) -> tuple[Stage, torch.optim.Optimizer]:
    model = Stage(pgs, Config(pgs.size("cp")), dtype)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def fingerprint(model: Stage, optimizer: torch.optim.Optimizer) -> str:
    """Return a hash of all bits of weights and optimizer state."""
    digest = hashlib.sha256()
    state = [*model.state_dict().values()]
    for entry in optimizer.state_dict()["state"].values():
        state += [value for value in entry.values() if isinstance(value, Tensor)]
    for tensor in state:
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


# ---- parity --------------------------------------------------------------------------------------


def compare_layouts(
    rank: int, size: int, sizes: Sequence[int], tp: int, pp: int, *dtypes: str
) -> dict[str, dict[tuple[int, int, int], float]]:
    """Return the distance of losses inside and outside, for each dtype and all pairs of CP sizes.

    Training afterwards must be unchanged, bit for bit."""
    losses: dict[str, dict[tuple[int, int, int], float]] = {dtype: {} for dtype in dtypes}
    for train_cp in sizes:
        train = hcp.build_process_groups(tp=tp, cp=train_cp, pp=pp)
        pairs = [[build(train, getattr(torch, dtype)) for _ in range(2)] for dtype in dtypes]
        for step, eval_cp in enumerate(sizes):
            evaluation = train.with_context_parallel(eval_cp)
            for dtype, pair in zip(dtypes, pairs, strict=True):
                for packed, apart in compare_layout(train, evaluation, pair, eval_cp, step).items():
                    losses[dtype][train_cp, eval_cp, packed] = apart
            evaluation.close()
        train.close()
    return losses


def compare_layout(
    train: hcp.ProcessGroups,
    evaluation: hcp.ProcessGroups,
    pair: Sequence[tuple[Stage, torch.optim.Optimizer]],
    eval_cp: int,
    step: int,
) -> dict[int, float]:
    """Return the distances of one switch, by number of packed samples."""
    data, training = samples_of(7), samples_of(12, seed=9)
    (model, optimizer), (twin, twin_optimizer) = pair
    train_step(model, optimizer, training)
    train_step(twin, twin_optimizer, training)
    losses = {}
    for packed in (1, 3):
        outside = evaluate(model, data, packed)
        with hcp.eval_cp_context(model, train, evaluation, strict=step == 0):
            inside = evaluate(model, data, packed)
            assert model.cp_size == model.config.context_parallel_size == eval_cp
        assert inside.count == outside.count
        losses[packed] = abs(inside.mean / outside.mean - 1)
    same = fingerprint(model, optimizer) == fingerprint(twin, twin_optimizer)
    assert same, f"weights or optimizer differ at step {step}"
    return losses
