"""A user's script as type checkers see it: mypy (and pyright) check it, nobody runs it.

`assert_type` holds what they infer. Each `type: ignore` marks a mistake that they must find: mypy
reports one that it does not need.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Literal, Unpack, assert_type

from torch import Tensor, nn

import hcp
from hcp.attention.options import AttentionOptions
from hcp.planning.plan import Group, lower_bound
from hcp.planning.report import Report
from hcp.rebinding.rebind import Audit


def plans(lengths: list[int], counted: Tensor) -> None:
    plan = hcp.plan(lengths, ranks=8, max_tokens_per_rank=4096, sync="micro_batch", degrees="pow2")
    assert_type(plan, hcp.Plan)
    assert_type(hcp.plan(counted, ranks=8, max_tokens_per_rank=4096), hcp.Plan)
    assert_type(lower_bound(lengths, ranks=8, max_tokens_per_rank=4096), int)
    assert_type(plan.report(), Report)
    assert_type(plan.micro_batches[0][0], Group)
    assert_type(hcp.CostModel.preset("gpt-1b-h200"), hcp.CostModel)
    hcp.plan(lengths, ranks=8, max_tokens_per_rank=4096, sync="steps")  # type: ignore[arg-type]
    hcp.plan(lengths, ranks=8, max_tokens_per_rank=4096, degrees="odd")  # type: ignore[arg-type]
    hcp.CostModel.preset("gpt-2b")  # type: ignore[arg-type]


def steps(model: nn.Module, samples: list[dict[str, Tensor]]) -> None:
    groups = hcp.build_process_groups(cp=1, transport="nccl")
    assert_type(groups, hcp.ProcessGroups)
    lengths, sources, own = hcp.gather_lengths(samples, groups)
    assert_type((lengths, sources), tuple[list[int], list[int]])
    plan = hcp.plan(lengths, ranks=groups.size("dp_cp"), max_tokens_per_rank=4096)
    step = hcp.dispatch(plan, own, sources, groups, comm_types=["p2p", "auto"])
    assert_type(step, hcp.Step)
    for cp, local in step:
        assert_type((cp, local), tuple[hcp.ContextParallelHandler, hcp.LocalBatch])
        x = local["tokens"]
        assert_type(x, Tensor)
        assert_type(cp.attention(x, x, x, comm_type="all_gather"), Tensor)
        assert_type(cp.attention(x, x, x, return_lse=True), tuple[Tensor, Tensor])
        assert_type(cp.loss(x, x, grad_reduce="mean"), Tensor)
        cp.loss(x, x, grad_reduce="average")  # type: ignore[arg-type]
        assert_type(attend(cp, x, comm_type="auto", mask="tree"), Tensor)
        assert_type(cp.scan.halo(x, 3), Tensor)
        assert_type(cp.group.global_ranks, list[int])
        cp.attention(x, x, x, comm_type="ring")  # type: ignore[call-overload]
        cp.attention(x, x, x, is_causal=True)  # type: ignore[call-overload]
        attend(cp, x, dropout=0.1)  # type: ignore[call-arg]
        cp.halo(x, 3)  # type: ignore[attr-defined]
        hcp.CoreAttention(softcap="30")  # type: ignore[arg-type]
    hcp.dispatch(plan, own, sources, groups, comm_types=["ring"])  # type: ignore[list-item]
    hcp.build_process_groups(transport="nvlink")  # type: ignore[arg-type]


def attend(
    cp: hcp.ContextParallelHandler, x: Tensor, **options: Unpack[AttentionOptions]
) -> Tensor:
    return cp.attention(x, x, x, **options)


def options(parser: argparse.ArgumentParser) -> None:
    config = hcp.Config.from_args(hcp.add_arguments(parser).parse_args())
    assert_type(config, hcp.Config)
    assert_type(config.comm_type(0), Literal["p2p", "all_gather", "a2a", "a2a+p2p", "auto"])
    assert_type(config.plan([5], ranks=2), hcp.Plan)
    hcp.Config(4096, sync="auto", cp_comm_type=("p2p", "a2a"))
    hcp.Config(4096, sync="never")  # type: ignore[arg-type]
    hcp.Config(4096, sequence_packing_scheduler="static")  # type: ignore[arg-type]


def evaluates(model: nn.Module, train: hcp.ProcessGroups, evaluate: Callable[[], None]) -> None:
    groups = train.with_context_parallel(2)
    assert_type(groups, hcp.ProcessGroups)
    with hcp.eval_cp_context(model, train, groups):
        evaluate()
    assert_type(hcp.audit(model, train, groups), Audit)


def is_late(error: hcp.HcpError) -> bool:
    assert_type(error.message, str)
    if error.code == "rank-too-late":  # type: ignore[comparison-overlap]
        return False
    return error.code == "rank-late"
