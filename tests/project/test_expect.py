"""Arguments that are integers: NumPy's are accepted everywhere, bools nowhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hcp
from hcp._validate import expect_size
from hcp.exchange.layout import Layout
from hcp.planning.cost import TimeTable
from hcp.planning.memory import MemoryModel
from hcp.tools.choose import EvalChoice, choose_eval_context_parallel


def choose(**changes: Any) -> EvalChoice:
    request: dict[str, Any] = {"num_samples": 4, "lengths": 4, "ranks": 4, "train_cp": 4}
    return choose_eval_context_parallel(**(request | changes))


ENTRANCES: dict[str, Callable[[Any], Any]] = {
    "max_seqlen_per_dp_cp_rank": lambda four: hcp.Config(four).max_seqlen_per_dp_cp_rank,
    "min_dynamic_context_parallel_size": lambda four: (
        hcp.Config(9, min_dynamic_context_parallel_size=four).min_dynamic_context_parallel_size
    ),
    "context_parallel_size": lambda four: (
        hcp.Config(9, context_parallel_size=four).context_parallel_size
    ),
    "eval_context_parallel_size": lambda four: (
        hcp.Config(9, eval_context_parallel_size=four).eval_context_parallel_size
    ),
    "ranks_per_node": lambda four: hcp.Config(9, ranks_per_node=four).ranks_per_node,
    "window_size": lambda four: hcp.Config(9, window_size=(four, -1)).window(0)[0],
    "hierarchical_context_parallel_sizes": lambda four: hcp.Config(
        9, cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=[2, four]
    ).hierarchical_context_parallel_sizes[1],
    "memory.limit": lambda four: MemoryModel(limit=four).limit,
    "cost.pair": lambda four: hcp.CostModel(pair=four).pair,
    "table.times[0]": lambda four: hcp.CostModel(table=TimeTable((1,), (1,), (four,))).table[2][0],
    "ranks": lambda four: choose(ranks=four).cp,
    "num_samples": lambda four: choose(num_samples=four).cp,
    "micro_batch_size": lambda four: choose(micro_batch_size=four, ranks=4).cp,
    "ranks of a plan": lambda four: hcp.plan([9], ranks=four, max_tokens_per_rank=9).ranks,
    "effort": lambda four: hcp.plan([9], ranks=4, max_tokens_per_rank=9, effort=four).ranks,
    "lengths": lambda four: hcp.plan([four], ranks=1, max_tokens_per_rank=9).lengths[0],
    "rank": lambda four: Layout(hcp.plan([9], ranks=5, max_tokens_per_rank=9), 0, four).rank,
}


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor], ids=lambda kind: kind.__name__)
def test_any_integer_is_taken_and_kept_as_an_int(entrance: str, kind: Callable[[int], Any]) -> None:
    kept = ENTRANCES[entrance](kind(4))
    assert (kept, type(kept)) == (ENTRANCES[entrance](4), int)


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("value", [True, np.True_, 4.0, np.float64(4), "4"], ids=repr)
def test_what_is_no_integer_is_refused_by_name(entrance: str, value: object) -> None:
    name = entrance.partition(" ")[0]
    with pytest.raises(ValueError, match=rf"^{re.escape(name)}(\[0\])? is .*expected"):
        ENTRANCES[entrance](value)


def test_the_least_is_said_with_what_else_may_stand_there() -> None:
    assert expect_size("size", 3, least=3) == 3
    with pytest.raises(ValueError, match=r"^size is 2, expected an integer >= 3 or 'auto'$"):
        expect_size("size", 2, "or 'auto'", least=3)


def test_one_length_is_no_count() -> None:
    def check(groups: Any) -> None:
        plan = hcp.EvalPlan(torch.tensor([7]), groups, max_tokens_per_rank=64)
        assert plan.num_samples == len(plan.lengths or ()) == 1

    hcp.loopback(1, check)
