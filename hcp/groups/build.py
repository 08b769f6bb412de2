"""Build the process groups of a job layout.

    train_pgs = hcp.build_process_groups(tp=2, pp=2)         # dp is the rest of the world
    eval_pgs = train_pgs.with_context_parallel(2)            # creates only cp, dp and tp_cp
    train_pgs = hcp.ProcessGroups.from_existing(collection)  # the groups that a trainer has

All of these are collective: every rank of the job calls them, in one order, with equal arguments.
Groups of one role are created in one order on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from hcp._core import Grid
from hcp._validate import expect_size
from hcp._words import TransportName
from hcp.exchange.peer import BUFFER_BYTES
from hcp.groups.absent_ranks import naming_silent_ranks
from hcp.groups.agree import agree_on_layout, tell_others_of_errors
from hcp.groups.alone import initialize_alone
from hcp.groups.create import Creator, timeout_of
from hcp.groups.grids import ROLES, check_levels, data_parallel_size
from hcp.groups.process_groups import CREATED, ProcessGroups


def build_process_groups(
    *,
    tp: int = 1,
    cp: int = 1,
    dp: int | None = None,
    pp: int = 1,
    order: str = "tp-cp-dp-pp",
    hierarchical: Sequence[int] = (),
    parent: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    transport: TransportName = "auto",
    peer_buffer_bytes: int = BUFFER_BYTES,
) -> ProcessGroups:
    """Create the process groups of a job layout. Every rank of the job passes the same sizes.

    A process that no launcher started (`python file.py`, a notebook) becomes a job of one rank if
    torch.distributed is not initialised: NCCL if it has a GPU, else Gloo.

    Args:
        tp: ranks of a tensor-parallel group.
        cp: ranks of a CP group.
        dp: data-parallel ranks, by default the parent's size over tp * cp * pp.
        pp: pipeline stages.
        order: the dimensions; neighbours in the first one have adjacent ranks.
        hierarchical: sizes of the levels of hierarchical CP, the innermost first (Megatron's a2a
            before its p2p). Their product is `cp`, their groups are `hierarchy`.
        parent: the group to divide, by default the whole job. The layout's rank i is its i-th
            lowest rank. Ranks may pass different parents, of one size, that share no rank: each
            gets the layout within its own.
        timeout: of the groups, by default the parent's.
        transport: what carries keys and values, one of TRANSPORTS in hcp.exchange.connect. The
            first rank of each dp_cp group logs the choice of "auto" and its reason (logger "hcp",
            INFO).
        peer_buffer_bytes: the memory of each GPU that "peer" takes; "mixed" takes it twice. A layer
            that exchanges more than half of it computes its heads in chunks.

    Returns:
        The groups, as :class:`hcp.ProcessGroups`.

    Raises:
        HcpError: a launcher started several processes and torch.distributed is not initialised.
        ValueError: the product is not the parent's size, or ranks pass different values.
    """
    initialize_alone("build_process_groups")
    with tell_others_of_errors():
        if parent is not None and not isinstance(parent, dist.ProcessGroup):
            raise ValueError(f"parent is {parent!r}, expected a process group of this rank")
        ranks = sorted(dist.get_process_group_ranks(parent or dist.group.WORLD))
        if dist.get_rank() not in ranks:
            raise ValueError(f"rank {dist.get_rank()} is not in parent, whose ranks are {ranks}")
        expect_size("peer_buffer_bytes", peer_buffer_bytes)
        dp = data_parallel_size(tp, cp, dp, pp, len(ranks))
        grid = Grid(tp=tp, cp=cp, dp=dp, pp=pp, order=order)
        check_levels(hierarchical, cp)
    with naming_silent_ranks("build_process_groups"):
        creator = Creator(
            agree_on_layout(grid, ranks, tuple(hierarchical)),
            backend=None if parent is None else dist.get_backend(parent),
            timeout=timeout or timeout_of(parent or dist.group.WORLD),
        )
        groups = {role: creator.create_role(role, grid) for role in ROLES}
        levels = creator.create_levels(grid, hierarchical)
        duplicate = creator.create_role("transport", grid, "dp_cp")
        connected = creator.connect(duplicate, transport, peer_buffer_bytes)
    level_names = [f"hcp[{i}]" for i in range(len(levels))]
    return ProcessGroups(
        groups,
        dict.fromkeys((*groups, *level_names, "transport"), CREATED),
        connected,
        grid,
        creator,
        None,
        levels,
    )
