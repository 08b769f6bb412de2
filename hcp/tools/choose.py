"""Choose the context-parallel size that evaluates fastest, and give the reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from hcp import _core
from hcp._html import table
from hcp._validate import expect_choice, expect_size, plain
from hcp._words import Sync
from hcp.planning.cost import MOVING, CostModel
from hcp.planning.limits import SYNCS, bytes_up_to, divisors, rows_up_to
from hcp.planning.memory import MemoryModel, expect_limiting
from hcp.planning.plan import Plan, plan


@dataclass(frozen=True, slots=True)
class Candidate:
    """The prediction for one CP size. Times are in the cost model's unit."""

    cp: int
    micro_batches: int
    """Micro-batches of each rank, fillers included."""
    fillers: int
    """Samples computed for nothing, over all ranks."""
    time: int
    bubble: int
    """The part of the time in which a stage waits for its neighbours."""
    exchange: int
    """The part of the busiest rank's time in which it exchanges rows with other ranks. It is 0
    under a table or a function, which have no prices for exchanges."""
    rows: int
    """Most rows of one rank in one micro-batch."""
    refusal: str = ""
    """The reason why the size is not admissible, or ""."""


@dataclass(frozen=True, slots=True)
class EvalChoice:
    """The size to evaluate with, and all candidates."""

    cp: int
    why: str
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        lines = [self.why]
        for c in self.candidates:
            note = f"  not admissible: {c.refusal}" if c.refusal else ""
            lines.append(
                f"  cp {c.cp}: time {c.time:,} (bubble {c.bubble:,}, exchange {c.exchange:,}), "
                f"{c.micro_batches} micro-batches, {c.fillers} fillers, {c.rows:,} rows{note}"
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        names = [field.name for field in fields(Candidate)]
        heads = [name.replace("_", " ") for name in names]
        return table(self.why, heads, ([getattr(c, x) for x in names] for c in self.candidates))


def choose_eval_context_parallel(
    num_samples: int,
    lengths: int | Sequence[int],
    *,
    ranks: int,
    train_cp: int,
    cost: CostModel | None = None,
    pipeline_stages: int = 1,
    memory: int | MemoryModel | None = None,
    micro_batch_size: int = 1,
    max_tokens_per_rank: int | None = None,
    global_batch_size: int | None = None,
    ranks_per_node: int | None = None,
    sync: Sync = "step",
    sizes: Sequence[int] | None = None,
) -> EvalChoice:
    """Choose the CP size with which `hcp.EvalPlan` is predicted to finish first.

    Only integers decide, so every rank chooses the same, given the same `cost`. Ties go to the
    training layout, then to the smaller size. No size is chosen that is predicted slower than the
    training layout, unless that does not fit `memory`.

    Without `max_tokens_per_rank` the prediction is for `EvalPlan.batches`. With it, the prediction
    is for `EvalPlan.dispatch` with the CP size as `degree`: the sum of the makespans of the plans
    of all global batches.

    Args:
        num_samples: samples of the evaluation.
        lengths: tokens of each sample, or of all.
        ranks: of the dp x cp domain.
        train_cp: the CP size of training.
        cost: prices, by default those of ``CostModel()``. If it is a function, give all ranks one
            rank's `cost.tabulated`.
        pipeline_stages: stages of the pipeline; 1 with `max_tokens_per_rank`.
        memory: the most that one rank can hold in a micro-batch, in rows (tokens), or in bytes by a
            model.
        micro_batch_size: samples of a micro-batch.
        max_tokens_per_rank: rows that a rank may hold under `EvalPlan.dispatch`. It is raised for a
            sample that needs more; these plans keep to the bytes of `memory` where they can.
        global_batch_size: samples of a plan of `EvalPlan.dispatch`.
        ranks_per_node: a CP group that spans nodes pays the far prices of `cost`.
        sync: that of `hcp.plan` and `hcp.EvalPlan`: "micro_batch" where ranks wait for each other
            in every layer, as under FSDP.
        sizes: those to consider, by default all divisors of `ranks`; restrict them if heads must be
            divisible.

    Returns:
        An :class:`hcp.tools.choose.EvalChoice`, with the reason and all candidates.

    Raises:
        ValueError: nothing fits.
    """
    given = {
        "global_batch_size": global_batch_size,
        "max_tokens_per_rank": max_tokens_per_rank,
        "memory": None if isinstance(memory, MemoryModel) else memory,
    }
    for name, size in given.items():
        if size is not None:
            expect_size(name, size)
    if isinstance(memory, MemoryModel):
        expect_limiting(memory)
    expect_choice("sync", sync, SYNCS)
    ranks, train_cp = expect_size("ranks", ranks), expect_size("train_cp", train_cp)
    pipeline_stages = expect_size("pipeline_stages", pipeline_stages)
    micro_batch_size = expect_size("micro_batch_size", micro_batch_size)
    num_samples = expect_size("num_samples", num_samples, least=0)
    lengths = plain(lengths)
    if not isinstance(lengths, int):
        lengths = lengths.tolist() if hasattr(lengths, "tolist") else list(lengths)
    tokens = [lengths] * num_samples if isinstance(lengths, int) else lengths
    if len(tokens) != num_samples:
        raise ValueError(f"there are {len(tokens)} lengths, expected num_samples = {num_samples}")
    if ranks % train_cp:
        raise ValueError(f"train_cp is {train_cp}, expected a divisor of the {ranks} ranks")
    considered = sorted({*(divisors(ranks) if sizes is None else sizes), train_cp})
    for cp in considered:
        if cp < 1 or ranks % cp:
            raise ValueError(f"sizes has {cp}, expected divisors of the {ranks} ranks")
    evaluation = _Evaluation(tokens, ranks, ranks_per_node or 0, cost or CostModel(), memory, sync)
    if max_tokens_per_rank is None:
        candidates = tuple(
            _predict(evaluation, cp, pipeline_stages, micro_batch_size) for cp in considered
        )
    else:
        if pipeline_stages != 1:
            raise ValueError(
                f"pipeline_stages is {pipeline_stages}, expected 1 with max_tokens_per_rank: a "
                "plan's pipeline runs backwards, too, which an evaluation does not"
            )
        batch = global_batch_size or max(1, len(tokens))
        candidates = tuple(
            _predict_dispatch(evaluation, cp, max_tokens_per_rank, batch) for cp in considered
        )
    fitting = [c for c in candidates if not c.refusal]
    if not fitting:
        raise ValueError(
            "no context-parallel size fits: "
            + "; ".join(f"cp {c.cp}: {c.refusal}" for c in candidates)
        )
    best = min(fitting, key=lambda c: (c.time, c.cp != train_cp, c.cp))
    training = next(c for c in candidates if c.cp == train_cp)
    return EvalChoice(best.cp, _why(best, training), candidates)


class _Evaluation(NamedTuple):
    """What all candidates are predicted for."""

    tokens: Sequence[int]
    """Of each sample."""
    ranks: int
    node: int
    """Ranks of a node, 0 for no borders."""
    cost: CostModel
    memory: int | MemoryModel | None
    sync: Sync


def _predict(given: _Evaluation, cp: int, stages: int, micro_batch_size: int) -> Candidate:
    tokens, ranks, node, cost, memory, sync = given
    dp = ranks // cp
    stride = dp * micro_batch_size
    count = -(-len(tokens) // stride)
    spent = []  # of each data-parallel rank in each micro-batch: (time, exchange)
    held = [(0, 0)]  # rows and bytes of each
    for r in range(dp):
        # Nodes may cut a CP group that would fit into one. A group that is cut pays the far prices,
        # as if each of its ranks were a node.
        node_of_group = 0 if _core.nodes_of(r * cp, cp, node) == 1 else 1
        batches = [
            [
                tokens[i % len(tokens)]
                for i in range((k * dp + r) * micro_batch_size, (k * dp + r + 1) * micro_batch_size)
            ]
            for k in range(count)
        ]
        prices = cp, cost, node_of_group
        spent.append([(_time(b, *prices) // stages, _exchange(b, *prices)) for b in batches])
        for batch in batches:
            rows = sum(rows_up_to(n, cp) for n in batch)
            held.append((rows, _model_of(memory).bytes(rows, sum(batch), cp)))
    if sync == "micro_batch":  # all ranks wait for the slowest one
        spent = [[max(of_ranks) for of_ranks in zip(*spent, strict=True)]]
    slowest = max(_total(of_rank, stages) for of_rank in spent)
    fillers = count * stride - len(tokens)
    rows = max(rows for rows, _ in held)
    return Candidate(cp, count, fillers, *slowest, rows, _refusal(held, memory))


def _total(spent: Sequence[tuple[int, int]], stages: int) -> tuple[int, int, int]:
    """Time, bubble and exchange of one rank's micro-batches."""
    times = [time for time, _ in spent]
    # A pipeline of equal stages: the longest micro-batch is waited for on the way in and out.
    bubble = (stages - 1) * max(times, default=0)
    return sum(times) + bubble, bubble, sum(exchange for _, exchange in spent) // stages


def _predict_dispatch(
    given: _Evaluation, cp: int, max_tokens_per_rank: int, global_batch_size: int
) -> Candidate:
    tokens, ranks, node, cost, memory, sync = given
    longest, model = max(tokens, default=1), _model_of(memory)
    most = max(max_tokens_per_rank, rows_up_to(longest, cp))
    limit = max(model.limit, bytes_up_to(longest, cp, model))
    if not _core.nodes_allow(cp, node):
        return Candidate(
            *(cp, 0, 0, 0, 0, 0, 0),
            refusal=f"its {cp} ranks are neither in one node of {node} nor whole nodes",
        )
    plans = [
        plan(
            tokens[first : first + global_batch_size],
            ranks=ranks,
            max_tokens_per_rank=most,
            min_degree=cp,
            max_degree=cp,
            ranks_per_node=node,
            cost=cost,
            sync=sync,
            memory=replace(model, limit=limit),
        )
        for first in range(0, len(tokens), global_batch_size)
    ]
    reports = [p.report() for p in plans]
    held = [(report.peak_tokens, max(report.rank_bytes)) for report in reports]
    return Candidate(
        cp,
        micro_batches=sum(p.micro_batch_count for p in plans),
        fillers=0,
        time=sum(p.makespan for p in plans),
        bubble=0,
        exchange=sum(_plan_exchange(p, cost, node) for p in plans),
        rows=max((rows for rows, _ in held), default=0),
        refusal=_refusal(held, memory),
    )


def _plan_exchange(made: Plan, cost: CostModel, node: int) -> int:
    by_rank = [0] * made.ranks
    for groups in made.micro_batches:
        for group in groups:
            taken = _exchange([made.lengths[i] for i in group.sequences], group.degree, cost, node)
            for rank in range(group.first_rank, group.first_rank + group.degree):
                by_rank[rank] += taken
    return max(by_rank)


def _model_of(memory: int | MemoryModel | None) -> MemoryModel:
    """The model of bytes. Without one no row has bytes."""
    return memory if isinstance(memory, MemoryModel) else MemoryModel()


def _refusal(held: Iterable[tuple[int, int]], memory: int | MemoryModel | None) -> str:
    """Say what is more than the memory, of the rows and bytes of micro-batches."""
    in_bytes = isinstance(memory, MemoryModel)
    limit = memory.limit if isinstance(memory, MemoryModel) else memory
    most = max((each[in_bytes] for each in held), default=0)
    if limit is None or most <= limit:
        return ""
    return f"a rank would hold {most:,} {'bytes' if in_bytes else 'rows'} > memory ({limit:,})"


def _time(batch: Sequence[int], cp: int, cost: CostModel, node: int) -> int:
    return cost.launched(sum(cost.time(n, cp, node) for n in batch))


def _exchange(batch: Sequence[int], cp: int, cost: CostModel, node: int) -> int:
    """The time that the exchange of rows adds to these sequences."""
    nothing: dict[str, Any] = dict.fromkeys(MOVING, 0)
    free = replace(cost, **nothing)
    return sum(cost.time(n, cp, node) - free.time(n, cp, node) for n in batch)


def _why(best: Candidate, training: Candidate) -> str:
    if best.cp == training.cp:
        return f"cp {best.cp}, the training layout: no admissible size is predicted faster"
    if training.refusal:
        return (
            f"cp {best.cp}: the training layout's cp {training.cp} does not fit: {training.refusal}"
        )
    ratio = training.time / best.time if best.time else 1.0
    return (
        f"cp {best.cp}, predicted {ratio:.2f} times as fast as the training layout's cp "
        f"{training.cp}: fillers {best.fillers} instead of {training.fillers}, bubble "
        f"{best.bubble:,} instead of {training.bubble:,}, exchange {best.exchange:,} instead of "
        f"{training.exchange:,}"
    )
