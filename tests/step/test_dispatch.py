"""Rows reach the ranks that compute them, once, or every rank raises the error."""

from __future__ import annotations

import copy
import pickle
import re
from array import array
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.cases import GlooGroups, sequences_of
from support.ranks import RankError, run_ranks, try_ranks
from support.walks import Walk, walk_of

import hcp

LENGTHS = (40, 7, 1, 19, 3, 64)
SOURCES = (0, 2, 2, 1, 0, 1)


def sample(sequence: int, length: int) -> dict[str, torch.Tensor]:
    """Fields of several types and shapes, each row telling where it belongs."""
    token = torch.arange(length)
    row = 1000 * sequence + token
    return {
        "tokens": row,
        "loss_mask": (token < length - 1).float(),
        "half": torch.stack([row, -row], 1).to(torch.bfloat16),
        "flag": token % 2 == 0,
        "byte": (row % 251).to(torch.uint8).reshape(-1, 1, 1).expand(-1, 3, 1),
    }


def expected_rows(cp: hcp.ContextParallelHandler) -> list[tuple[int, int]]:
    """(sequence, token) of each local row."""
    return [
        (sequence, token)
        for sequence, start, rows in cp.layout.spans
        for token in range(start, start + rows)
    ]


def check_dispatch(
    groups: Any, lengths: tuple[int, ...], sources: tuple[int, ...], capacity: int
) -> int:
    """Every field of every local row is the loaded one. Returns the rows checked."""
    plan = hcp.plan(lengths, ranks=groups.transport.size, max_tokens_per_rank=capacity)
    rank = groups.transport.rank
    own = [sample(i, n) for i, n in enumerate(lengths) if sources[i] == rank]
    step = hcp.dispatch(plan, own, sources, groups)
    assert len(step) == len(plan.micro_batches)
    checked = 0
    for cp, local in step:
        rows = expected_rows(cp)
        whole = {s: sample(s, lengths[s]) for s in sequences_of(plan, cp.micro_batch)}
        for name in local:
            value = local[name]
            want = [whole[sequence][name][token] for sequence, token in rows]
            assert value.shape[0] == len(rows) == cp.rows
            if rows:
                assert torch.equal(value, torch.stack(want))
        checked += len(rows)
    assert step.loss_tokens == (sum(lengths) - len(lengths) if lengths else None)
    return checked


@given(st.data())
def test_every_row_of_every_field_arrives_once(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 6))
    lengths = tuple(data.draw(st.lists(st.integers(1, 20 * ranks), max_size=8)))
    sources = tuple(data.draw(st.integers(0, ranks - 1)) for _ in lengths)
    checked = hcp.loopback(ranks, lambda g: check_dispatch(g, lengths, sources, 24))
    assert sum(checked) == sum(lengths)


def gloo_dispatch(rank: int, size: int) -> int:
    return check_dispatch(GlooGroups(), LENGTHS, SOURCES, 32)


def test_rows_of_padding_are_zeros_that_no_loss_counts() -> None:
    lengths, sources = [7, 3, 12, 5], [1, 0, 2, 1]
    plan = hcp.plan(lengths, ranks=3, max_tokens_per_rank=16, min_degree=2, alignment=8)
    whole = [torch.arange(1, n + 1) for n in lengths]

    def check(groups: Any) -> tuple[float, int]:
        own = [whole[s] for s, r in enumerate(sources) if r == groups.transport.rank]
        samples = [{"tokens": x, "loss_mask": torch.ones(len(x))} for x in own]
        total, padding = 0.0, 0
        for cp, local in hcp.dispatch(plan, samples, sources, groups):
            assert cp.rows % 8 == 0
            padding += cp.layout.padding
            behind = slice(cp.rows - cp.layout.padding, cp.rows)
            assert local.tokens[behind].tolist() == [0] * cp.layout.padding
            assert local.loss_mask[behind].tolist() == [0.0] * cp.layout.padding
            losses = local.tokens.double() + 100
            total += float(cp.loss(losses, local.loss_mask, grad_reduce="sum"))
            back = cp.combine(local.tokens)
            held = {s for group in plan.micro_batches[cp.micro_batch] for s in group.sequences}
            loaded = [s for s in sorted(held) if sources[s] == groups.transport.rank]
            assert back.tolist() == [int(t) for s in loaded for t in whole[s]]
        return total, padding

    results = hcp.loopback(3, check)
    assert sum(padding for _, padding in results) == plan.report().padding > 0
    mean = torch.cat(whole).double().mean() + 100
    assert sum(total for total, _ in results) == pytest.approx(float(mean), abs=1e-12)


@pytest.mark.parametrize("ranks", [3, 5])
def test_gloo_ranks_get_their_rows(ranks: int) -> None:
    assert sum(run_ranks(ranks, gloo_dispatch)) == sum(LENGTHS)


# ---- gathering lengths ---------------------------------------------------------------------------


def gather(rank: int, size: int) -> tuple[list[int], list[int], int]:
    own = (sample(0, 3 + i) for i in range(rank))  # a generator, as a loader would be
    lengths, sources, samples = hcp.gather_lengths(own, GlooGroups())
    return lengths, sources, len(samples)


def test_tokens_with_a_dimension_of_the_batch_are_told_which_size_counts() -> None:
    def run(groups: Any) -> None:
        given = [{"tokens": torch.ones(1, n, dtype=torch.long)} for n in (5, 7)]
        plan = hcp.plan([1, 1], ranks=1, max_tokens_per_rank=2)
        list(hcp.dispatch(plan, given, [0, 0], groups))

    with pytest.raises(ValueError, match=r"samples\[1\] has fields .* the sizes after the first"):
        hcp.loopback(1, run)


def test_lengths_are_gathered_by_rank_then_order() -> None:
    for rank, (lengths, sources, loaded) in enumerate(run_ranks(3, gather)):
        assert lengths == [3, 3, 4]
        assert sources == [1, 2, 2]
        assert loaded == rank


def test_more_lengths_than_one_block_holds_are_gathered() -> None:
    def gather_many(groups: Any) -> list[int]:
        own = [{"tokens": torch.zeros(1 + i)} for i in range(900)]
        return hcp.gather_lengths(own, groups)[0]

    assert hcp.loopback(2, gather_many) == [[1 + i for i in range(900)] * 2] * 2


def gather_on_gloo(rank: int, size: int) -> int:
    own = [{"tokens": torch.zeros(1 + i)} for i in range(900 * rank)]
    return len(hcp.gather_lengths(own, GlooGroups())[0])


def test_ranks_with_many_and_with_no_samples_gather_alike() -> None:
    assert run_ranks(3, gather_on_gloo) == [2700] * 3


# ---- one rank's failure is every rank's error ----------------------------------------------------


def failing_loader(rank: int, size: int) -> None:
    def load() -> Iterator[dict[str, torch.Tensor]]:
        yield sample(0, 4)
        if rank == 1:
            raise OSError("shard 7 is unreadable")

    hcp.gather_lengths(load(), GlooGroups())


def test_a_loader_that_fails_is_an_error_on_every_rank() -> None:
    results = try_ranks(3, failing_loader)
    assert [r.kind for r in results] == ["HcpError", "OSError", "HcpError"]
    for rank in (0, 2):
        assert f"rank {rank}: rank 1 failed: OSError: shard 7" in results[rank].message


def differing_lengths(rank: int, size: int) -> None:
    groups = GlooGroups()
    lengths = [5, 6 + rank]
    plan = hcp.plan(lengths, ranks=size, max_tokens_per_rank=8)
    own = [sample(rank, lengths[rank])] if rank < 2 else []
    hcp.dispatch(plan, own, [0, 1], groups)


def test_ranks_with_different_plans_all_hear_it() -> None:
    results = try_ranks(2, differing_lengths)
    for rank, result in enumerate(results):
        assert isinstance(result, RankError)
        assert result.kind == "HcpError"
        words = "plan.lengths[1] differs: 6 on rank 0, 7 on rank 1; "
        assert f"rank {rank}: {words}" in result.message
        assert "give every rank the same lengths" in result.message


def differing_memory(rank: int, size: int) -> None:
    memory = hcp.MemoryModel(activation=10, limit=100 + rank)
    plan = hcp.Config(8, memory=memory).plan([5, 6], ranks=size)
    groups = GlooGroups()
    hcp.dispatch(plan, [sample(rank, [5, 6][rank])], [0, 1], groups)


def test_ranks_with_different_memory_models_all_hear_it() -> None:
    for rank, result in enumerate(try_ranks(2, differing_memory)):
        assert isinstance(result, RankError)
        words = "plan.memory.limit differs: 100 on rank 0, 101 on rank 1; "
        assert f"rank {rank}: {words}" in result.message


CHANGES: dict[str, tuple[Any, str]] = {
    "dtype": (
        lambda s: s | {"tokens": s["tokens"].int()},
        "fields.tokens differs: ['int64', []] on",
    ),
    "shape": (lambda s: s | {"tokens": s["tokens"].reshape(-1, 1)}, "['int64', [1]] on rank 1"),
    "name": (
        lambda s: {"ids": s["tokens"], "loss_mask": s["loss_mask"]},
        "fields.byte differs: ['uint8', [3, 1]] on rank 0, nothing on",
    ),
    "length": (lambda s: {k: v[:-1] for k, v in s.items()}, "samples[0] has 4 tokens, expected 5"),
    "ragged": (lambda s: s | {"flag": s["flag"][:-1]}, "expected as many in each"),
    "empty": (lambda s: {}, "samples[0] is empty, expected names and tensors"),
    "a tensor": (lambda s: s["tokens"], "samples[0] is Tensor, expected names and tensors"),
    "sparse": (
        lambda s: s | {"tokens": s["tokens"].to_sparse()},
        "samples[0]['tokens'] is nested, sparse, quantized or without data (torch.sparse_coo)",
    ),
    "compressed": (
        lambda s: s | {"byte": torch.eye(5).to_sparse_csr()},
        "samples[0]['byte'] is nested, sparse, quantized or without data (torch.sparse_csr)",
    ),
    "jagged": (
        lambda s: s | {"tokens": nested(s["tokens"], torch.jagged)},
        "samples[0]['tokens'] is nested, sparse, quantized or without data (torch.jagged)",
    ),
    "nested": (
        lambda s: s | {"tokens": nested(s["tokens"], torch.strided)},
        "samples[0]['tokens'] is nested, sparse, quantized or without data (torch.strided)",
    ),
    "meta": (
        lambda s: s | {"tokens": s["tokens"].to("meta")},
        "samples[0]['tokens'] is nested, sparse, quantized or without data (torch.strided)",
    ),
    "list": (
        lambda s: s | {"tokens": s["tokens"].tolist()},
        "['tokens'] is list [1000, 1001, 1002, 1003, 1004], expected a tensor",
    ),
}


def nested(rows: torch.Tensor, layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([rows, rows[:2]], layout=layout)


def change_one_rank(rank: int, size: int, change: str) -> None:
    plan = hcp.plan([5, 5], ranks=size, max_tokens_per_rank=8)
    own = sample(rank, 5)
    if rank == 1:
        own = CHANGES[change][0](own)
    hcp.dispatch(plan, [own], [0, 1], GlooGroups())


@pytest.mark.parametrize("change", CHANGES)
def test_samples_that_differ_on_one_rank_are_an_error_on_all(change: str) -> None:
    results = try_ranks(2, change_one_rank, change)
    for result in results:
        assert isinstance(result, RankError)
        assert CHANGES[change][1] in result.message


def test_a_plan_for_another_domain_is_refused() -> None:
    def call(groups: Any) -> None:
        plan = hcp.plan([5], ranks=3, max_tokens_per_rank=8)
        hcp.dispatch(plan, [sample(0, 5)] if groups.transport.rank == 0 else [], [0], groups)

    with pytest.raises(ValueError, match="the plan is for 3 ranks, expected 2: the domain's"):
        hcp.loopback(2, call)


def test_a_missing_sample_is_refused() -> None:
    def call(groups: Any) -> None:
        plan = hcp.plan([5, 5], ranks=1, max_tokens_per_rank=16)
        hcp.dispatch(plan, [sample(0, 5)], [0, 0], groups)

    with pytest.raises(ValueError, match="samples has 1 items, expected 2: sources says"):
        hcp.loopback(1, call)


@pytest.mark.parametrize("wrong", [4, 1, -1, 2**40, True, 0.0, None], ids=repr)
def test_a_source_outside_the_domain_is_refused(wrong: Any) -> None:
    def call(groups: Any) -> None:
        plan = hcp.plan([5, 3], ranks=1, max_tokens_per_rank=16)
        hcp.dispatch(plan, [sample(0, 5)], [0, wrong], groups)

    message = rf"sources\[1\] is {re.escape(repr(wrong))}, expected 0 to 0"
    with pytest.raises(ValueError, match=message):
        hcp.loopback(1, call)


def test_sources_may_be_an_array_or_a_tensor() -> None:
    def call(groups: Any) -> list[int]:
        plan = hcp.plan([5, 3], ranks=1, max_tokens_per_rank=16)
        own = [sample(0, 5), sample(1, 3)]
        kinds = [array("i", [0, 0]), array("q", [0, 0]), torch.zeros(2, dtype=torch.int32)]
        steps = [hcp.dispatch(plan, own, cast(Any, kind), groups) for kind in kinds]
        return [len(step.own_sequences) for step in steps]

    assert hcp.loopback(1, call) == [[2, 2, 2]]


def test_a_dispatch_makes_no_lists_of_the_whole_plan() -> None:
    """They are a hundred thousand items on a large domain."""

    def call(groups: Any) -> None:
        plan = hcp.plan([5, 3, 9], ranks=1, max_tokens_per_rank=16)
        own = [sample(0, 5), sample(1, 3), sample(2, 9)]
        for cp, _ in hcp.dispatch(plan, own, [0] * 3, groups):
            assert not {"lengths", "micro_batches"} & vars(cp.plan).keys()

    hcp.loopback(1, call)


def test_an_unknown_field_names_those_there_are() -> None:
    local = hcp.LocalBatch({"tokens": torch.zeros(1)})
    with pytest.raises(AttributeError, match=r"no field 'labels', expected one of \['tokens'\]"):
        _ = local.labels


def test_a_field_may_have_any_name() -> None:
    names = ["values", "items", "keys", "copy", "_fields"]
    local = hcp.LocalBatch({name: torch.tensor([i]) for i, name in enumerate(names)})
    assert [int(getattr(local, name)) for name in names[:-1]] == [0, 1, 2, 3]
    assert [int(local[name]) for name in local] == [0, 1, 2, 3, 4]
    assert len(local) == 5


def test_rows_by_name_become_a_dict() -> None:
    fields = {"tokens": torch.arange(3), "loss_mask": torch.ones(3)}
    local = hcp.LocalBatch(fields)
    assert dict(local) == {**local} == fields
    assert list(local.keys()) == ["tokens", "loss_mask"]


# ---- copies --------------------------------------------------------------------------------------


def check_copies(groups: Any) -> None:
    plan = hcp.plan(LENGTHS, ranks=3, max_tokens_per_rank=64)
    own = [sample(i, n) for i, n in enumerate(LENGTHS) if SOURCES[i] == groups.transport.rank]
    step = hcp.dispatch(plan, own, SOURCES, groups)
    cp, local = next(iter(step))
    for made in (copy.copy(cp), copy.deepcopy({"cp": cp})["cp"], copy.deepcopy(step)):
        again, rows = next(iter(made)) if isinstance(made, hcp.Step) else (made, local)
        assert torch.equal(again.combine(rows["tokens"]), cp.combine(local["tokens"]))
    assert copy.deepcopy(local)["tokens"] is not local["tokens"]
    for layout in (pickle.loads(pickle.dumps(cp.layout)), copy.deepcopy(cp.layout)):
        assert (layout.plan, layout.spans) == (cp.layout.plan, cp.layout.spans)
        assert torch.equal(layout.positions, cp.layout.positions)
    assert dict(pickle.loads(pickle.dumps(local))).keys() == dict(local).keys()
    for what in (cp, step, cp.packed_seq_params()):
        with pytest.raises(NotImplementedError, match=r"call hcp\.dispatch there"):
            pickle.dumps(what)


def test_copies_of_a_step_share_its_connections_and_pickles_are_refused() -> None:
    hcp.loopback(3, check_copies)


def other_comm_types(rank: int, size: int) -> None:
    plan = hcp.plan([5, 5], ranks=size, max_tokens_per_rank=8)
    types = ("p2p", "a2a") if rank == 0 else ("a2a", "p2p")
    hcp.dispatch(plan, [sample(rank, 5)], [0, 1], GlooGroups(), comm_types=types)


def test_ranks_with_different_comm_types_all_hear_it() -> None:
    for result in try_ranks(2, other_comm_types):
        assert isinstance(result, RankError)
        assert "comm_types[0] differs: " in result.message


class Unusable(hcp.ContextParallelHandler):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        raise OSError("no such kernel")


# What rank 1 says beside samples, and what rank 0 hears.
OPTIONS: dict[str, tuple[Any, str]] = {
    "a window of text": ({"window_sizes": [(3, "a")]}, "rank 1 failed: "),
    "one number of heads": ({"comm_types": ("auto",), "heads": [4]}, "rank 1 failed: "),
    "a class": ({"handler_cls": Unusable}, "rank 1 failed: OSError: no such kernel"),
    "another mask": ({"loss_mask": "flag"}, "loss_mask differs: loss_mask on rank 0, flag on"),
}


def dispatch_with(rank: int, size: int, what: str) -> None:
    options = OPTIONS[what][0] if rank == 1 else {}
    plan = hcp.plan([5, 5], ranks=size, max_tokens_per_rank=8)
    hcp.dispatch(plan, [sample(rank, 5)], [0, 1], GlooGroups(), **options)


@pytest.mark.parametrize("what", OPTIONS)
def test_an_option_that_is_wrong_on_one_rank_is_an_error_on_all(what: str) -> None:
    heard, raised = try_ranks(2, dispatch_with, what)
    assert isinstance(raised, RankError)
    assert heard.kind == "HcpError"
    assert f"rank 0: {OPTIONS[what][1]}" in heard.message


@pytest.mark.parametrize("rest", [0.0, 9.0])
def test_weights_below_zero_are_refused_whatever_their_sum(rest: float) -> None:
    own = [sample(0, 5), sample(1, 3)]
    own[1]["loss_mask"] = torch.tensor([rest, -0.5, 0.5])

    def call(groups: Any) -> None:
        hcp.dispatch(hcp.plan([5, 3], ranks=1, max_tokens_per_rank=8), own, [0, 0], groups)

    says = r"samples\[1\]\['loss_mask'\] has -0.5, expected weights >= 0: .* use loss_sum"
    with pytest.raises(ValueError, match=says):
        hcp.loopback(1, call)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_mask_that_counts_no_number_is_refused(value: float) -> None:
    own = sample(0, 5)
    own["loss_mask"][2] = value

    def call(groups: Any) -> None:
        hcp.dispatch(hcp.plan([5], ranks=1, max_tokens_per_rank=8), [own], [0], groups)

    with pytest.raises(ValueError, match=rf"samples\[0\]\['loss_mask'\] sums to {value}, expected"):
        hcp.loopback(1, call)


def test_samples_that_require_gradients_are_told_what_carries_them() -> None:
    own = sample(0, 5) | {"image": torch.zeros(5, 3, requires_grad=True)}

    def call(groups: Any) -> None:
        hcp.dispatch(hcp.plan([5], ranks=1, max_tokens_per_rank=8), [own], [0], groups)

    with pytest.raises(
        ValueError, match=r"\['image'\] requires gradients.* carry it by cp.dispatch"
    ):
        hcp.loopback(1, call)


def rank_that_ends(rank: int, size: int) -> None:
    groups = GlooGroups()
    dist.barrier()  # no rank ends while another still connects
    if rank == 1:
        import os

        os._exit(3)
    hcp.gather_lengths([sample(0, 4)], groups)


def test_a_rank_that_ends_is_an_error_on_the_others_within_seconds() -> None:
    results = try_ranks(3, rank_that_ends)
    assert [r.kind for r in results] == ["HcpError", "exited", "HcpError"]
    assert "rank 0: the exchange with ranks [1, 2] failed" in results[0].message


def count_the_calls_of_a_dispatch(groups: Any) -> Walk:
    """Of the second dispatch, each rank having loaded a sample."""
    plan = hcp.plan([64] * 8, ranks=8, max_tokens_per_rank=64, min_degree=8)
    given = [{"tokens": torch.arange(64), "labels": torch.arange(64)}]
    hcp.dispatch(plan, given, range(8), groups)
    return walk_of(lambda: hcp.dispatch(plan, given, range(8), groups))


def test_a_dispatch_takes_few_python_calls() -> None:
    """Room is left: under Python 3.11 it takes 209 beside the loopback's, which are those of its
    waits."""
    for walk in hcp.loopback(8, count_the_calls_of_a_dispatch):
        waits = sum(n for name, n in walk.functions.items() if "loopback.py" in name)
        assert walk.calls - waits <= 230, walk.most()


def dispatch_alone(kernels: tuple[str, ...]) -> None:
    cost = replace(hcp.CostModel(), kernels=kernels)
    plan = hcp.plan([5], ranks=1, max_tokens_per_rank=8, cost=cost)
    hcp.loopback(1, lambda groups: len(hcp.dispatch(plan, [sample(0, 5)], [0], groups)))


def test_prices_of_other_kernels_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    for kernels in ((), ("torch",), ("flash_attn_3", "te_fused"), ("flash_attn_3", "te_fused")):
        dispatch_alone(kernels)
    (warned,) = [record for record in caplog.records if record.name == "hcp"]
    assert warned.levelname == "WARNING"
    assert warned.getMessage().startswith(
        "the plan goes by prices of the attention kernels flash_attn_3, te_fused, and torch "
        "compute attention here: measure prices of these by `hcp calibrate "
    )


def dispatch_masked(weights: list[float]) -> None:
    plan = hcp.plan([5], ranks=1, max_tokens_per_rank=8)
    given = {"tokens": torch.arange(5), "loss_mask": torch.tensor(weights)}
    hcp.loopback(1, lambda groups: len(hcp.dispatch(plan, [given], [0], groups)))


def test_a_batch_without_a_loss_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hcp.step.dispatch._told", set())
    dispatch_masked([0.0, 0, 0, 0, 1])
    assert not caplog.records
    for _ in range(2):
        dispatch_masked([0.0] * 5)
    (warned,) = caplog.records
    assert warned.levelname == "WARNING"
    assert "a loss: 'loss_mask' is 0 for all 5 tokens of its 1 sequences" in warned.getMessage()


@pytest.mark.parametrize("given", [None, torch.nn.Identity()])
def test_what_is_no_group_is_refused_by_name(given: Any) -> None:
    plan = hcp.plan([5], ranks=1, max_tokens_per_rank=8)
    words = (
        r"groups is (None|Identity\(\)), expected hcp.ProcessGroups: hcp.build_process_groups\(\)"
    )
    with pytest.raises(ValueError, match=words):
        hcp.gather_lengths([sample(0, 5)], given)
    with pytest.raises(ValueError, match=words):
        hcp.dispatch(plan, [sample(0, 5)], [0], given)
    with pytest.raises(ValueError, match=f"eval_pgs{words[6:]}"):
        hcp.Metrics(given)
