"""hcp's planner for the packing schedulers of Megatron-LM's branch dev.

`docs/guides/megatron_lm_dev.patch` registers it there. Imports no Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import hcp
from hcp.planning.limits import rows_up_to

Id = TypeVar("Id")


def sample_id_groups(
    samples: Sequence[tuple[Id, int]],
    ranks: int,
    max_tokens_per_rank: int,
    *,
    min_degree: int = 1,
    micro_batch_group: int | None = None,
    max_sequences: int | None = None,
) -> list[list[list[Id]]]:
    """Plan samples, each (id, padded length): for each micro-batch, the ids of each rank of dp_cp.

    Degrees are powers of two, at multiples of themselves, in descending order: those for which
    Megatron has process groups. Every rank has work in every micro-batch. `micro_batch_group`: of
    what the number of micro-batches is a multiple, for interleaved stages. `max_sequences`: the
    most of a group. The same arguments give the same result on every rank.

    Raises ValueError if the ranks, or a sample, do not fit.
    """
    if ranks < 1 or ranks & (ranks - 1):
        raise ValueError(
            f"the dp_cp group has {ranks} ranks, expected a power of two: Megatron's dynamic CP "
            "has process groups for these degrees alone"
        )
    longest = max((length for _, length in samples), default=1)
    if (rows := rows_up_to(longest, ranks)) > max_tokens_per_rank:
        raise ValueError(
            f"rows of {longest} tokens on a rank of {ranks} ({rows}) > max_seqlen_per_dp_cp_rank "
            f"({max_tokens_per_rank}): raise it, use more ranks, or shorten the sequences"
        )
    interleaved = micro_batch_group is not None and micro_batch_group > 1
    stages = {"pipeline_stages": micro_batch_group, "virtual_stages": 2} if interleaved else {}
    plan = hcp.plan(
        [length for _, length in samples],
        ranks=ranks,
        max_tokens_per_rank=max_tokens_per_rank,
        min_degree=min_degree,
        degrees="pow2",
        sync="step" if interleaved else "micro_batch",
        micro_batch_group=micro_batch_group if interleaved else None,
        **stages,  # type: ignore[arg-type]
    )
    made = []
    for batch in plan.micro_batches:
        groups = [(group.degree, list(group.sequences)) for group in batch]
        for _, sequences in groups:
            if max_sequences is not None and len(sequences) > max_sequences:
                raise ValueError(
                    f"a group has {len(sequences)} sequences, expected at most {max_sequences} "
                    "(thd_max_packed_sequences): raise it, or lower max_seqlen_per_dp_cp_rank"
                )
        made.append(_by_rank(widened(groups, ranks), samples))
    return made


def widened(groups: Sequence[tuple[int, list[int]]], ranks: int) -> list[tuple[int, list[int]]]:
    """Double degrees until every rank has work: those of the most sequences on a rank first."""
    found = list(groups)
    if not found:
        raise ValueError("a micro-batch has no sequence, expected one or more")
    while idle := ranks - sum(degree for degree, _ in found):
        fitting = [i for i, (degree, _) in enumerate(found) if degree <= idle]
        chosen = max(fitting, key=lambda i: (len(found[i][1]) / found[i][0], -i))
        degree, sequences = found[chosen]
        found[chosen] = (2 * degree, sequences)
    return sorted(found, key=lambda group: -group[0])


def _by_rank(
    groups: Sequence[tuple[int, list[int]]], samples: Sequence[tuple[Id, int]]
) -> list[list[Id]]:
    return [
        [samples[i][0] for i in sequences] for degree, sequences in groups for _ in range(degree)
    ]
