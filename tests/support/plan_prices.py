"""Rows, bytes and times of a plan's groups, slow and obvious: what the core's tables of prices
equal."""

# d ranks of a group, n tokens of a sequence

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from hcp.planning.memory import MemoryModel
from hcp.planning.plan import Group, Plan
from hcp.tools.replay import Machine, Replay


def chunks_of(length: int, degree: int, turn: int = 0) -> list[range]:
    """Return the tokens of each of the 2 d chunks: as wide as those that begin ``turn`` chunks
    later, where the sequence comes again and again."""
    edges = [(turn + k) * length // (2 * degree) for k in range(2 * degree + 1)]
    starts = [edge - edges[0] for edge in edges]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def turns_of(lengths: Sequence[int], degree: int) -> list[int]:
    """Return how many sequences before each one of a group are rounded as it is."""
    rests = [length % (2 * degree) for length in lengths]
    before = [rests[:s].count(rest) for s, rest in enumerate(rests)]
    return [n % (2 * degree) if rest else 0 for n, rest in zip(before, rests, strict=True)]


def rows_held(length: int, degree: int, j: int, turn: int = 0) -> int:
    """Return the rows of rank j if ``degree`` ranks share ``length`` tokens zigzag."""
    chunks = chunks_of(length, degree, turn)
    return len(chunks[j]) + len(chunks[-1 - j])


def rows_of_ranks(lengths: Sequence[int], degree: int) -> list[int]:
    """Return the rows of each rank of a group."""
    turns = turns_of(lengths, degree)
    return [
        sum(rows_held(n, degree, j, turn) for n, turn in zip(lengths, turns, strict=True))
        for j in range(degree)
    ]


def nodes_of(group: Group, ranks_per_node: int) -> int:
    if ranks_per_node == 0:
        return 1
    last = group.first_rank + group.degree - 1
    return last // ranks_per_node - group.first_rank // ranks_per_node + 1


def rows_up_to(longest: int, degree: int) -> int:
    """The most rows of a rank, of any length up to the longest, one after the other."""
    lengths = range(max(0, longest - 2 * degree), longest + 1)
    return max(rows_held(n, degree, j) for n in lengths for j in range(degree))


def bytes_of(memory: MemoryModel, rows: int, tokens: int, degree: int, chunks: int) -> int:
    buffers = (rows * memory.attention + tokens * memory.gathered) * (degree > 1)
    return rows * (memory.activation + memory.logit) - (-buffers // chunks)


def chunks_for(memory: MemoryModel, rows: int, tokens: int, degree: int) -> int:
    """The fewest chunks of heads that fit, one after the other."""
    if memory.limit == 0:
        return 1
    for chunks in range(1, memory.head_chunks):
        if memory.buffer + bytes_of(memory, rows, tokens, degree, chunks) <= memory.limit:
            return chunks
    return memory.head_chunks


def group_times(plan: Plan, group: Group) -> tuple[int, ...]:
    """The end of each sequence of a group, by the cost model's time of each."""
    node, pairs = plan.core.ranks_per_node, plan.pairs
    times = [
        plan.cost.time(plan.lengths[s], group.degree, node, pairs[s] if pairs else None)
        for s in group.sequences
    ]
    ends = [*itertools.accumulate(times, initial=plan.cost.launch)][1:]
    ends[-1] = max(ends[-1], plan.cost.host)
    slowness = list(plan.core.slowness or [1 << 16] * plan.ranks)
    slowest = max(slowness[group.first_rank : group.first_rank + group.degree])
    return tuple(-(-end * slowest // (1 << 16)) for end in ends)


class RankLoad(NamedTuple):
    """Rows and padding of one rank of a group, and the tokens of the group's sequences."""

    rank: int
    rows: int
    padding: int
    tokens: int


def held_by(plan: Plan, group: Group) -> list[RankLoad]:
    alignment = max(1, plan.core.alignment)
    lengths = [plan.lengths[s] for s in group.sequences]
    rows = rows_of_ranks(lengths, group.degree)
    return [
        RankLoad(group.first_rank + j, own, -own % alignment, sum(lengths))
        for j, own in enumerate(rows)
    ]


def bytes_held(memory: MemoryModel, held: RankLoad, degree: int) -> int:
    rows, tokens = held.rows + held.padding, held.tokens + held.padding
    return memory.buffer + bytes_of(memory, rows, tokens, degree, memory.head_chunks)


def measured(
    plan: Plan,
) -> tuple[list[int], list[int], list[int], int, tuple[int, int, int]]:
    """Rows, bytes and busy time of each rank, the last end, and (peak, padding, crossings)."""
    rows, busy = ([0] * plan.ranks for _ in range(2))
    needed = [plan.memory.buffer] * plan.ranks  # which a rank without rows holds, too
    peak = padding = crossings = 0
    for group in (group for batch in plan.micro_batches for group in batch):
        crossings += held_by(plan, group)[0].tokens * (
            nodes_of(group, plan.core.ranks_per_node) - 1
        )
        for held in held_by(plan, group):
            rows[held.rank] += held.rows
            busy[held.rank] += group_times(plan, group)[-1]
            taken = bytes_held(plan.memory, held, group.degree)
            needed[held.rank] = max(needed[held.rank], taken)
            padding += held.padding
            peak = max(peak, held.rows + held.padding)
    ends = [0] * plan.ranks
    for batch in plan.micro_batches:
        if plan.sync == "micro_batch":
            ends = [max(ends)] * plan.ranks
        outside = set(range(plan.ranks))
        for group in batch:
            members = range(group.first_rank, group.first_rank + group.degree)
            end = max(ends[r] for r in members) + group_times(plan, group)[-1]
            ends[members.start : members.stop] = [end] * group.degree
            outside -= set(members)
        for rank in outside if plan.sync == "step" and plan.core.pipeline_stages < 2 else ():
            ends[rank] += idle_launch(plan, rank)
    span = max(ends)
    return rows, needed, busy, span, (peak, padding, crossings)


def idle_launch(plan: Plan, rank: int) -> int:
    slowness, time = plan.core.slowness, max(plan.cost.host, plan.cost.launch)
    return -(-time * slowness[rank] // 65_536) if slowness else time


def replayed(plan: Plan, machine: Machine) -> Replay:
    ranks = range(plan.ranks)
    free, queued = [0.0 for _ in ranks], [0.0 for _ in ranks]
    busy, exposed, starved = ([0.0 for _ in ranks] for _ in range(3))
    for groups in plan.micro_batches:
        if plan.sync == "micro_batch":
            free = [max(free)] * plan.ranks
        busy_ranks = {r for g in groups for r in range(g.first_rank, g.first_rank + g.degree)}
        alone = [Group(r, 1, ()) for r in ranks if r not in busy_ranks]
        for group in [*groups, *alone]:
            members = range(group.first_rank, group.first_rank + group.degree)
            slowest = min(plan.speeds[r] for r in members)
            computed, waited = _times(plan, machine, group)
            computed /= slowest
            begun = max(max(free[r], queued[r]) for r in members)
            by_host = machine.host if group.degree == 1 else machine.host_shared
            told = max(queued[r] for r in members) + by_host
            end = max(begun + computed + waited, told)
            for r in members:
                starved[r] += end - (begun + computed + waited)
                busy[r] += computed + waited
                exposed[r] += waited
                queued[r] += by_host
                free[r] = end
    return Replay(max(free, default=0.0), tuple(busy), tuple(exposed), tuple(starved))


def _times(plan: Plan, machine: Machine, group: Group) -> tuple[float, float]:
    """Return a group's seconds on each of its GPUs: of work, and of waiting for rows that arrive
    after the attention over the rank's own rows has ended."""
    d = group.degree
    work, waited = machine.launch, 0.0
    for s in group.sequences:
        n = plan.lengths[s]
        pairs = plan.pairs[s] if plan.pairs else n * (n + 1) / 2
        attention = machine.pair * pairs / d
        work += attention + machine.token * n / d
        if d > 1:
            work += machine.shared * n / d + machine.step * (d - 1)
            waited += _exposed(machine, _arrival(machine, n, group), attention, d)
    return work, waited


def _exposed(machine: Machine, arrival: float, attention: float, d: int) -> float:
    """Return the part of a sequence's exchange that attention does not hide."""
    if machine.overlap:
        return max(0.0, arrival - (attention - attention / d))
    gradients = arrival / 3  # on their way back, after the last of the backward's attention
    return max(0.0, arrival - gradients - attention / d) + gradients


def _arrival(machine: Machine, tokens: int, group: Group) -> float:
    """Seconds until the slowest rank of a group has all keys and values of a sequence. Links of the
    node and of the network work at once."""
    d, node = group.degree, machine.ranks_per_node
    own = tokens / d
    if not node or group.first_rank // node == (group.first_rank + d - 1) // node:
        return machine.near * (tokens - own)
    last = group.first_rank + d
    inside = [
        min(last, (k + 1) * node) - max(group.first_rank, k * node)
        for k in range(group.first_rank // node, (last - 1) // node + 1)
    ]
    if machine.once:
        return max(max(machine.near * (d - 1), machine.far * (d - k) / k) * own for k in inside)
    return max(max(machine.near * (k - 1), machine.far * (d - k)) * own for k in inside)
