"""Is this plan right? Code of its own, slow and plain: it shares nothing with the planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hcp.errors import HcpError
from hcp.plan import Plan


def check_plan(plan: Plan | Mapping[str, Any], lengths: Sequence[int] | None = None) -> None:
    """Prove that a plan can be run, or raise HcpError that says what is wrong and where.

    ``plan``: a plan or its plain data. ``lengths``: what it should be a plan of. Checked: every
    token of every sequence is computed once; no rank ever holds more rows than it may, alignment
    included, nor more bytes; each group is an allowed interval of ranks, of a degree that each of
    its sequences allows; groups that run side by side share no rank; a pipeline gets a count of
    micro-batches that it takes; and all ranks can follow their own order without waiting in a
    circle.
    """
    data = plan.to_dict() if isinstance(plan, Plan) else plan
    planned = list(data["lengths"])
    if lengths is not None and planned != list(lengths):
        raise HcpError(f"the plan is for {len(planned)} lengths that differ from those given")
    batches = [[dict(group) for group in batch["groups"]] for batch in data["micro_batches"]]
    _check_groups(data, batches)
    _check_tokens(planned, batches)
    _check_memory(data, planned, batches)
    _check_bytes(data, planned, batches)
    _check_bounds(data, batches)
    _check_count(data, planned, batches)
    _check_order(data["ranks"], batches)


Batches = list[list[dict[str, Any]]]


def _check_groups(data: Mapping[str, Any], batches: Batches) -> None:
    least, most = data.get("min_degree", 1), data.get("max_degree", data["ranks"])
    node = data.get("ranks_per_node") or 0
    for place, first, degree in _places(batches):
        if not least <= degree <= most:
            raise HcpError(f"{place} has degree {degree}, expected {least} to {most}")
        if first < 0 or first + degree > data["ranks"]:
            raise HcpError(f"{place} reaches rank {first + degree - 1} of {data['ranks']}")
        if data.get("degrees") == "pow2" and (bin(degree).count("1") != 1 or first % degree):
            raise HcpError(f"{place} has degree {degree} at rank {first}, expected a power of two")
        nodes = {rank // node for rank in range(first, first + degree)} if node else {0}
        whole = node and degree % node == 0 and first % node == 0
        if len(nodes) > 1 and not whole:
            raise HcpError(f"{place} spans nodes {sorted(nodes)} without taking whole ones")


def _places(batches: Batches) -> list[tuple[str, int, int]]:
    return [
        (f"micro_batches[{m}].groups[{g}]", group["first_rank"], group["degree"])
        for m, groups in enumerate(batches)
        for g, group in enumerate(groups)
    ]


def _check_tokens(lengths: list[int], batches: Batches) -> None:
    computed = dict.fromkeys(range(len(lengths)), 0)
    for m, groups in enumerate(batches):
        for g, group in enumerate(groups):
            for s in group["sequences"]:
                if s not in computed:
                    raise HcpError(f"micro_batches[{m}].groups[{g}] has sequence {s}, unknown")
                spans = [
                    span
                    for j in range(group["degree"])
                    for span in _spans(lengths[s], group["degree"], j)
                ]
                if _gaps(spans, lengths[s]):
                    raise HcpError(f"sequence {s} misses tokens in micro_batches[{m}].groups[{g}]")
                computed[s] += 1
    wrong = {s: count for s, count in computed.items() if count != 1}
    if wrong:
        s, count = next(iter(wrong.items()))
        raise HcpError(f"sequence {s} is computed {count} times, expected once")


def _spans(length: int, degree: int, j: int) -> list[tuple[int, int]]:
    """What rank j of a group holds of a sequence: chunks j and 2 d - 1 - j."""
    return [
        (k * length // (2 * degree), (k + 1) * length // (2 * degree))
        for k in (j, 2 * degree - 1 - j)
    ]


def _gaps(spans: list[tuple[int, int]], length: int) -> bool:
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            return True
        end = stop
    return end != length


def _check_memory(data: Mapping[str, Any], lengths: list[int], batches: Batches) -> None:
    alignment = max(1, data.get("alignment") or 1)
    for m, groups in enumerate(batches):
        for g, group in enumerate(groups):
            for j in range(group["degree"]):
                rows = sum(
                    stop - start
                    for s in group["sequences"]
                    for start, stop in _spans(lengths[s], group["degree"], j)
                )
                padded = -(-rows // alignment) * alignment
                if padded > data["max_tokens_per_rank"]:
                    raise HcpError(
                        f"rank {group['first_rank'] + j} holds {padded} rows in "
                        f"micro_batches[{m}].groups[{g}], "
                        f"expected <= {data['max_tokens_per_rank']}"
                    )


def _check_bytes(data: Mapping[str, Any], lengths: list[int], batches: Batches) -> None:
    memory = data.get("memory") or {}
    limit, padding = memory.get("limit", 0), max(1, data.get("alignment") or 1) - 1
    row = memory.get("activation", 0) + memory.get("logit", 0)
    for m, groups in enumerate(batches):
        for g, group in enumerate(groups):
            degree, tokens = group["degree"], [lengths[s] for s in group["sequences"]]
            rows = padding + sum(
                max(
                    sum(stop - start for start, stop in _spans(n, degree, j)) for j in range(degree)
                )
                for n in tokens
            )
            needed = rows * row + (sum(tokens) * memory.get("gathered", 0) if degree > 1 else 0)
            if 0 < limit < needed:
                raise HcpError(
                    f"micro_batches[{m}].groups[{g}] needs {needed} bytes on a rank, "
                    f"expected <= {limit}"
                )


def _check_bounds(data: Mapping[str, Any], batches: Batches) -> None:
    least, most = data.get("min_degrees"), data.get("max_degrees")
    for m, groups in enumerate(batches):
        for g, group in enumerate(groups):
            for s in group["sequences"]:
                low, high = least[s] if least else 1, most[s] if most else data["ranks"]
                if not low <= group["degree"] <= high:
                    raise HcpError(
                        f"micro_batches[{m}].groups[{g}] gives sequence {s} {group['degree']} "
                        f"ranks, expected {low} to {high}"
                    )


def _check_count(data: Mapping[str, Any], lengths: list[int], batches: Batches) -> None:
    multiple = 1
    if (data.get("virtual_stages") or 1) > 1:
        multiple = data.get("micro_batch_group") or data["pipeline_stages"]
    if len(batches) % multiple:
        raise HcpError(f"{len(batches)} micro-batches, expected a multiple of {multiple}")
    empty = [m for m, groups in enumerate(batches) if not groups]
    needed = range(max(len(lengths), len(batches) - multiple + 1), len(batches))
    if empty and not (set(empty) <= set(needed) and len(lengths) < len(batches)):
        raise HcpError(f"micro_batches[{empty[0]}] has no groups, expected some")


def _check_order(ranks: int, batches: Batches) -> None:
    """Each rank runs its groups in the order of the micro-batches. A group starts when it is next
    on all its ranks; when none can, ranks wait in a circle."""
    queues: list[list[int]] = [[] for _ in range(ranks)]
    members: dict[int, range] = {}
    for groups in batches:
        used: set[int] = set()
        for group in groups:
            span = range(group["first_rank"], group["first_rank"] + group["degree"])
            if used & set(span):
                raise HcpError(f"ranks {sorted(used & set(span))} are in two groups at once")
            used |= set(span)
            for rank in span:
                queues[rank].append(len(members))
            members[len(members)] = span
    heads = [0] * ranks
    ready = [g for g, span in members.items() if _is_next(g, span, queues, heads)]
    done = 0
    while ready:
        ended = ready.pop()
        done += 1
        for rank in members[ended]:
            heads[rank] += 1
        following = {queues[r][heads[r]] for r in members[ended] if heads[r] < len(queues[r])}
        ready += [g for g in following if _is_next(g, members[g], queues, heads)]
    if done != len(members):
        raise HcpError(f"{len(members) - done} groups wait for each other in a circle")


def _is_next(group: int, span: range, queues: list[list[int]], heads: list[int]) -> bool:
    return all(heads[r] < len(queues[r]) and queues[r][heads[r]] == group for r in span)
