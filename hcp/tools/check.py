"""Prove a plan by slow and simple code that shares nothing with the planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hcp.errors import HcpError
from hcp.planning.plan import Plan, expect_data


def check_plan(plan: Plan | Mapping[str, Any], lengths: Sequence[int] | None = None) -> None:
    """Prove that a plan can be run.

    Checked: every token of every sequence is computed once. No rank ever holds more rows than it
    may, alignment included, nor more bytes. Each group is an allowed interval of ranks, of a degree
    that each of its sequences allows. Groups that run at the same time share no rank. A pipeline
    gets a number of micro-batches that it can run.

    Args:
        plan: a plan, or its plain data.
        lengths: those that it should be a plan of, in tokens.

    Raises:
        HcpError: the plan breaks a rule; the message has the fault and its place.
    """
    data = plan.to_dict() if isinstance(plan, Plan) else plan
    _check_data(data)
    planned = list(data["lengths"])
    if lengths is not None and planned != list(lengths):
        raise HcpError(
            f"the plan is for {len(planned)} lengths that differ from those given",
            code="plan-invalid",
        )
    batches = [[dict(group) for group in batch["groups"]] for batch in data["micro_batches"]]
    _check_groups(data, batches)
    _check_sequences(len(planned), batches)
    _check_memory(data, planned, batches)
    _check_bytes(data, planned, batches)
    _check_bounds(data, batches)
    _check_count(data, planned, batches)
    _check_apart(batches)


Batches = list[list[dict[str, Any]]]


def _check_data(data: Mapping[str, Any]) -> None:
    """Check that the entries have the right names, types and numbers."""
    try:
        expect_data(data)
    except ValueError as error:
        raise HcpError(str(error), code="plan-invalid") from None


def _check_groups(data: Mapping[str, Any], batches: Batches) -> None:
    least, most = data.get("min_degree") or 1, data.get("max_degree") or data["ranks"]
    node = data.get("ranks_per_node") or 0
    for place, first, degree in _places(batches):
        if not least <= degree <= most:
            raise HcpError(
                f"{place} has degree {degree}, expected {least} to {most}", code="plan-invalid"
            )
        if first + degree > data["ranks"]:
            last = first + degree - 1
            raise HcpError(
                f"{place} reaches rank {last}, expected 0 to {data['ranks'] - 1}",
                code="plan-invalid",
            )
        if data.get("degrees") == "pow2" and (bin(degree).count("1") != 1 or first % degree):
            raise HcpError(
                f"{place} has degree {degree} at rank {first}, expected a power of two",
                code="plan-invalid",
            )
        nodes = {rank // node for rank in range(first, first + degree)} if node else {0}
        whole = node and degree % node == 0 and first % node == 0
        if len(nodes) > 1 and not whole:
            raise HcpError(
                f"{place} spans nodes {sorted(nodes)} without taking whole ones",
                code="plan-invalid",
            )


def _places(batches: Batches) -> list[tuple[str, int, int]]:
    return [
        (f"micro_batches[{m}].groups[{g}]", group["first_rank"], group["degree"])
        for m, groups in enumerate(batches)
        for g, group in enumerate(groups)
    ]


def _check_sequences(count: int, batches: Batches) -> None:
    computed = dict.fromkeys(range(count), 0)
    for m, groups in enumerate(batches):
        for g, group in enumerate(groups):
            for s in group["sequences"]:
                if s not in computed:
                    raise HcpError(
                        f"micro_batches[{m}].groups[{g}] has sequence {s}, unknown",
                        code="plan-invalid",
                    )
                computed[s] += 1
    wrong = {s: times for s, times in computed.items() if times != 1}
    if wrong:
        s, times = next(iter(wrong.items()))
        raise HcpError(
            f"sequence {s} is computed {times} times, expected once", code="plan-invalid"
        )


def _rows(length: int, degree: int, j: int, turn: int = 0) -> int:
    """Return the rows of a sequence on rank j of a group: those of chunks j and 2 d - 1 - j, which
    are rounded as if the sequence began at chunk ``turn``."""
    return sum(
        (k + 1) * length // (2 * degree) - k * length // (2 * degree)
        for k in (turn + j, turn + 2 * degree - 1 - j)
    )


def _turns(lengths: list[int], degree: int) -> list[int]:
    """Return how many sequences before each one of a group leave the same rest of chunks."""
    seen: Counter[int] = Counter()
    turns = []
    for length in lengths:
        rest = length % (2 * degree)
        turns.append(seen[rest] % (2 * degree) if rest else 0)
        seen[rest] += 1
    return turns


def _check_memory(data: Mapping[str, Any], lengths: list[int], batches: Batches) -> None:
    alignment = max(1, data.get("alignment") or 1)
    for m, groups in enumerate(batches):
        for g, group in enumerate(groups):
            held, degree = [lengths[s] for s in group["sequences"]], group["degree"]
            turns = _turns(held, degree)
            for j in range(degree):
                rows = sum(_rows(n, degree, j, turn) for n, turn in zip(held, turns, strict=True))
                padded = -(-rows // alignment) * alignment
                if padded > data["max_tokens_per_rank"]:
                    raise HcpError(
                        f"rank {group['first_rank'] + j} holds {padded} rows in "
                        f"micro_batches[{m}].groups[{g}], "
                        f"expected <= {data['max_tokens_per_rank']}",
                        code="plan-invalid",
                    )


def _check_bytes(data: Mapping[str, Any], lengths: list[int], batches: Batches) -> None:
    memory = data.get("memory") or {}
    limit, padding = memory.get("limit", 0), max(1, data.get("alignment") or 1) - 1
    for m, groups in enumerate(batches):
        for g, group in enumerate(groups):
            degree = group["degree"]
            needed = memory.get("buffer", 0) + _bytes_of(memory, padding, padding, degree)
            for tokens in (lengths[s] for s in group["sequences"]):
                rows = max(_rows(tokens, degree, j) for j in range(degree))
                needed += _bytes_of(memory, rows, tokens, degree)
            if 0 < limit < needed:
                raise HcpError(
                    f"micro_batches[{m}].groups[{g}] needs {needed} bytes on a rank, "
                    f"expected <= {limit}",
                    code="plan-invalid",
                )


def _bytes_of(memory: Mapping[str, int], rows: int, tokens: int, degree: int) -> int:
    row = memory.get("activation", 0) + memory.get("logit", 0)
    buffers = rows * memory.get("attention", 0) + tokens * memory.get("gathered", 0)
    chunks = memory.get("head_chunks", 1)
    return rows * row + (-(-buffers // chunks) if degree > 1 else 0)


def _check_bounds(data: Mapping[str, Any], batches: Batches) -> None:
    least, most = data.get("min_degrees"), data.get("max_degrees")
    for m, groups in enumerate(batches):
        for g, group in enumerate(groups):
            for s in group["sequences"]:
                low, high = least[s] if least else 1, most[s] if most else data["ranks"]
                if not low <= group["degree"] <= high:
                    raise HcpError(
                        f"micro_batches[{m}].groups[{g}] gives sequence {s} {group['degree']} "
                        f"ranks, expected {low} to {high}",
                        code="plan-invalid",
                    )


def _check_count(data: Mapping[str, Any], lengths: list[int], batches: Batches) -> None:
    multiple = 1
    if (data.get("virtual_stages") or 1) > 1:
        multiple = data.get("micro_batch_group") or data.get("pipeline_stages") or 1
    if len(batches) % multiple:
        raise HcpError(
            f"{len(batches)} micro-batches, expected a multiple of {multiple}", code="plan-invalid"
        )
    empty = [m for m, groups in enumerate(batches) if not groups]
    needed = range(max(len(lengths), len(batches) - multiple + 1), len(batches))
    if empty and not (set(empty) <= set(needed) and len(lengths) < len(batches)):
        raise HcpError(
            f"micro_batches[{empty[0]}] has no groups, expected some", code="plan-invalid"
        )


def _check_apart(batches: Batches) -> None:
    for m, groups in enumerate(batches):
        used: set[int] = set()
        for group in groups:
            span = set(range(group["first_rank"], group["first_rank"] + group["degree"]))
            if used & span:
                both = sorted(used & span)
                raise HcpError(
                    f"ranks {both} are in two groups at once, in micro_batches[{m}]",
                    code="plan-invalid",
                )
            used |= span
