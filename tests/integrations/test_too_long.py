"""Samples that all ranks together cannot hold are refused, dropped or cut, and counted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.ranks import RankError, run_ranks, try_ranks

import hcp
from hcp.integrations.loader import DynamicCPDataLoader, EvalDataLoader
from hcp.integrations.too_long import fit_of
from hcp.planning.memory import MemoryModel
from hcp.step.config import Config
from hcp.step.planner import StepPlanner
from hcp.tools.loopback import loopback

LENGTHS = [[9, 25], [24, 40, 2], [26]]
"""Tokens of the samples of each of three ranks, which together hold 24."""
TOO_LONG = 3


def samples_of(rank: int) -> list[dict[str, Any]]:
    return [
        {
            "tokens": torch.arange(length) + 100 * length,
            "loss_mask": torch.ones(length),
            "reward": float(length),
        }
        for length in LENGTHS[rank]
    ]


def dropped(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [sample for sample in samples if len(sample["tokens"]) <= 24]


def cut(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**sample, "tokens": sample["tokens"][:24], "loss_mask": sample["loss_mask"][:24]}
        for sample in samples
    ]


def planner_of(config: Config, ranks: int, fields: Any = None) -> StepPlanner:
    fit = fit_of(config, ranks, 1, fields)
    return StepPlanner.of(config, ranks, fields=fields, fit=fit)


def content(step: hcp.Step) -> tuple[Any, ...]:
    rows = [(local.tokens.tolist(), local.reward.tolist()) for _, local in step]
    return step.plan.to_dict(), step.sources, step.loss_tokens, rows


def as_without_them(rank: int, size: int, way: Any) -> None:
    groups = hcp.build_process_groups()
    fields = {"reward": "sequence"}
    config = Config(8, plan_ahead=1)
    left = (dropped if way == "drop" else cut)(samples_of(rank))
    expected = StepPlanner.of(config, size, fields=fields).step(left, groups)
    planner = planner_of(replace(config, too_long=way), size, fields)
    steps = planner.steps([samples_of(rank), samples_of(rank), []], groups, until_empty=True)
    for step in (planner.step(samples_of(rank), groups), *steps):
        assert content(step) == content(expected)
        assert step.too_long == step.stats().too_long == TOO_LONG
        assert step.stats().metrics()["hcp/too_long"] == TOO_LONG
        back = step.combine(local.tokens for _, local in step)
        assert [x.tolist() for x in back] == [sample["tokens"].tolist() for sample in left]
    assert expected.too_long == 0


@pytest.mark.parametrize("way", ["drop", "cut"])
def test_a_batch_is_that_of_the_samples_that_are_left(way: str) -> None:
    run_ranks(3, as_without_them, way)


def refused_by_default(rank: int, size: int) -> None:
    StepPlanner.of(Config(8), size).step(samples_of(rank), hcp.build_process_groups())


def test_a_sample_that_is_too_long_is_refused_by_default() -> None:
    for outcome in try_ranks(3, refused_by_default):
        assert isinstance(outcome, RankError)
        assert outcome.kind == "ValueError"


def all_dropped(rank: int, size: int) -> None:
    planner = planner_of(Config(8, too_long="drop"), size)
    samples = [{"tokens": torch.arange(25 + rank)}] if rank else []
    with pytest.raises(ValueError, match=r"all 2 samples of the batch have more than 24 tokens"):
        planner.step(samples, hcp.build_process_groups())


def test_a_batch_of_which_nothing_is_left_is_an_error_on_every_rank() -> None:
    run_ranks(3, all_dropped)


def test_the_log_tells_the_sum_each_time_that_it_has_doubled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def steps(groups: Any) -> None:
        planner = planner_of(Config(8, too_long="cut"), 1)
        for _ in range(5):
            planner.step([{"tokens": torch.arange(9)}], groups)

    with caplog.at_level(logging.WARNING, logger="hcp"):
        loopback(1, steps)
    told = [record.getMessage() for record in caplog.records if "too_long" in record.getMessage()]
    assert [message.split()[2] for message in told] == ["1", "2", "4"]
    assert "cut 1 samples so far, which have more than 8 tokens" in told[0]


def test_payloads_are_not_cut() -> None:
    fields = {"pixels": hcp.Payload()}
    with pytest.raises(ValueError, match=r"too_long is 'cut' and fields has payloads \['pixels'\]"):
        fit_of(Config(8, too_long="cut"), 2, 1, fields)
    assert fit_of(Config(8, too_long="drop"), 2, 1, fields)


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match=r"too_long is 'trim', expected one of refuse, drop, cut"):
        Config(8, too_long="trim")  # type: ignore[arg-type]


def lengths_of_a_loader(rank: int, size: int) -> list[list[int]]:
    data = Items({"input_ids": list(range(length))} for length in (40, 3, 24, 26, 5, 9))
    config = Config(8, too_long="drop")
    groups = hcp.build_process_groups()
    loader = DynamicCPDataLoader(data, config, groups, global_batch_size=3, shuffle=False)
    return [list(step.plan.lengths) for step in loader]


def test_a_loader_leaves_samples_out() -> None:
    assert run_ranks(3, lengths_of_a_loader) == [[[3, 24], [5, 9]]] * 3


class Items(list[dict[str, list[int]]]):
    """A dataset."""


def refused_by_a_loader(rank: int, size: int, data: Any) -> None:
    config = Config(8, plan_ahead=0)
    groups = hcp.build_process_groups()
    for _ in DynamicCPDataLoader(data, config, groups, global_batch_size=3, shuffle=False):
        pass


class Stream:
    """A dataset that is read in order."""

    def __init__(self, items: Items) -> None:
        self.items = items

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return iter(self.items)


def test_a_sample_that_is_refused_is_told_of_by_its_place_in_the_dataset() -> None:
    """In the second batch, on the second rank, where others know its length alone."""
    data = Items({"input_ids": list(range(length))} for length in (3, 16, 2, 5, 17, 9))
    limit = "tokens, expected at most 16, which all ranks hold together: the fullest of 2 ranks"
    for dataset, place in ((data, "dataset[4]"), (Stream(data), "stream[4]")):
        said = f"{place}: it has 17 {limit} (max_degree) would hold 9 rows, expected <= 8 (max_seq"
        first, second = try_ranks(2, refused_by_a_loader, dataset)
        assert f"rank 1 failed: ValueError: {said}" in first.message
        assert second.message.startswith(said)
    pack = Items([{"input_ids": list(range(20)), "seq_lengths": [3, 17]}])
    with pytest.raises(
        ValueError, match=r"^dataset\[0\]: document 1 has 17 tokens, expected at mo"
    ):
        refused_by_a_loader_alone(pack)
    unknown = Items([{"input_ids": [1], "idx": [2]}])
    with pytest.raises(ValueError, match=r"^dataset\[0\]: a sample has 'idx', expected only"):
        refused_by_a_loader_alone(unknown)


def refused_by_a_loader_alone(data: Items) -> None:
    def read(groups: Any) -> None:
        config = Config(8, plan_ahead=0)
        list(DynamicCPDataLoader(data, config, groups, global_batch_size=3))

    loopback(1, read)


def test_a_length_that_a_plan_takes_is_no_refusal_though_a_shorter_one_is() -> None:
    """On 4 ranks 12 tokens are 3 on each, and 11 put 4 on one of them."""
    data = Items([{"input_ids": list(range(12))}])
    assert Config(3).longest(4) < 12

    def read(groups: Any) -> list[int]:
        config = Config(3, plan_ahead=0)
        (step,) = DynamicCPDataLoader(data, config, groups, global_batch_size=1)
        return list(step.plan.lengths)

    assert loopback(4, read) == [[12]] * 4


def test_evaluation_counts_samples_that_training_drops() -> None:
    def count(groups: Any) -> int:
        data = Items({"input_ids": list(range(length))} for length in (40, 3))
        loader = EvalDataLoader(
            data, Config(8, too_long="drop", plan_ahead=0), groups, global_batch_size=2
        )
        for _ in loader:
            pass
        return loader.num_samples

    assert loopback(2, count) == [2, 2]


# ---- the longest sequence ------------------------------------------------------------------------


@given(
    ranks=st.integers(1, 9),
    limit=st.integers(4, 20),
    alignment=st.integers(1, 4),
    node=st.sampled_from([None, 2, 4]),
    scheduler=st.sampled_from(["dynamic_cp", "static_cp"]),
    bytes_limit=st.none() | st.integers(100, 400),
)
def test_the_longest_sequence_and_all_shorter_ones_have_a_plan(
    ranks: int, limit: int, alignment: int, node: int | None, scheduler: Any, bytes_limit: Any
) -> None:
    memory = None if bytes_limit is None else MemoryModel(activation=10, limit=bytes_limit)
    config = Config(limit, scheduler, ranks_per_node=node, memory=memory)
    longest = config.longest(ranks, alignment)
    for length in range(1, longest + 1):
        config.plan([length], ranks, alignment=alignment)
    config.validate(ranks=ranks, longest=longest, alignment=alignment)
    with pytest.raises(ValueError, match=r"max_seqlen_per_dp_cp_rank|memory"):
        config.validate(ranks=ranks, longest=longest + 1, alignment=alignment)
    replace(config, too_long="drop").validate(ranks=ranks, longest=longest + 1, alignment=alignment)


def test_ranks_that_hold_no_token_are_refused() -> None:
    with pytest.raises(ValueError, match="max_seqlen_per_dp_cp_rank"):
        Config(4).longest(2, alignment=8)
