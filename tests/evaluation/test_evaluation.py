"""Evaluation counts each sample once for any sizes, and gives one mean under every layout."""

import copy
import math
from collections import Counter, deque
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from support.ranks import run_ranks
from torch.utils.data import IterableDataset

import hcp
from hcp._digest import digest_of
from hcp.evaluation.metrics import Metric, Metrics
from hcp.evaluation.plan import EvalBatch, EvalPlan
from hcp.evaluation.seen import Seen
from hcp.integrations.loader import DynamicCPDataLoader, EvalDataLoader


class Loop:
    """The process groups of every rank of a layout, in one process: exchanges happen at the end."""

    def __init__(self, dp, cp):
        self.dp, self.cp = dp, cp
        self.payloads = {}

    def rank(self, rank):
        return LoopRank(self, rank)


class LoopRank:
    roles = ("dp", "cp", "dp_cp")

    def __init__(self, loop, rank):
        self.loop, self.index = loop, rank
        self.transport = self

    def size(self, role):
        return {"dp": self.loop.dp, "cp": self.loop.cp, "dp_cp": self.loop.dp * self.loop.cp}[role]

    def rank(self, role):
        cp = self.loop.cp
        return {"dp": self.index // cp, "cp": self.index % cp, "dp_cp": self.index}[role]


counts = st.integers(0, 60)
sizes = st.integers(1, 6)


@given(counts, sizes, sizes, sizes)
def test_every_sample_has_weight_one_exactly_once_in_equally_many_micro_batches(n, dp, cp, size):
    loop = Loop(dp, cp)
    seen, micro_batches = Counter(), set()
    for rank in range(dp * cp):
        plan = EvalPlan(n, loop.rank(rank), micro_batch_size=size)
        micro_batches.add(plan.num_micro_batches)
        fillers = 0
        for k in range(plan.num_micro_batches):
            indices, weights = plan.indices(k)
            assert len(indices) == len(weights) == size
            assert all(0 <= i < n for i in indices)
            seen.update(i for i, w in zip(indices, weights, strict=True) if w)
            fillers += weights.count(0)
        assert fillers < size * dp
    assert seen == dict.fromkeys(range(n), cp)
    assert micro_batches == {-(-n // (dp * size))}


@given(st.lists(st.integers(0, 1000), max_size=30), st.lists(st.integers(0, 1000), max_size=30))
@example([0, 3], [1, 2])
@example([0, 4, 5], [1, 2, 6])
def test_two_different_choices_of_samples_are_told_apart(a, b):
    one, other = Seen(), Seen()
    one.add(a)
    other.add(b)
    assert (one.to_bytes() == other.to_bytes()) == (sorted(a) == sorted(b))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": -1}, "num_samples is -1, expected an integer >= 0"),
        ({"samples": 3, "micro_batch_size": 0}, "micro_batch_size is 0, expected an integer >= 1"),
        ({"samples": [3]}, "max_tokens_per_rank is missing"),
        ({"samples": [3], "max_tokens_per_rank": 9, "global_batch_size": True}, "size is True"),
        ({"samples": [3], "max_tokens_per_rank": -5}, "max_tokens_per_rank is -5, expected"),
        ({"samples": 3, "global_batch_size": 2}, "global_batch_size is given without lengths"),
        ({"samples": 3, "degree": 2}, "degree is given without lengths, expected it together"),
        ({"samples": 3, "cost": hcp.CostModel()}, "cost is given without lengths"),
        ({"samples": 3, "memory": hcp.MemoryModel()}, "memory is given without lengths"),
    ],
)
def test_a_bad_plan_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        EvalPlan(eval_pgs=Loop(1, 1).rank(0), **arguments)


def test_each_kind_of_plan_has_its_own_way():
    by_count, by_length = (
        EvalPlan(3, Loop(1, 1).rank(0)),
        EvalPlan([3], Loop(1, 1).rank(0), max_tokens_per_rank=9),
    )
    planned = EvalPlan([5, 3, 4], Loop(1, 1).rank(0), max_tokens_per_rank=8, global_batch_size=2)
    for batch in (-1, 2):
        with pytest.raises(ValueError, match=f"batch is {batch}, expected one of 2"):
            planned.plan(batch)
    with pytest.raises(ValueError, match=r"made without lengths, expected them: or use batches"):
        by_count.plan(0)
    with pytest.raises(ValueError, match=r"made with lengths, expected none: or use dispatch"):
        next(by_length.batches([0]))
    with pytest.raises(ValueError, match="micro_batch is 3, expected one of 3"):
        by_count.indices(3)


def test_a_dataset_without_an_entry_says_so_itself():
    class Broken:
        def __getitem__(self, index):
            return {"text": index}["label"]

    with pytest.raises(KeyError, match="label"):
        next(EvalPlan(3, Loop(1, 1).rank(0)).batches(Broken(), check_siblings=False))


class Offsets:
    """Samples found by offsets that lead too far: an IndexError of the dataset's own."""

    def __init__(self, length):
        self.offsets, self.rows, self.length = [0, 9, 1, 2], "abc", length

    def __getitem__(self, index):
        return self.rows[self.offsets[index]]


class Counted(Offsets):
    def __len__(self):
        return self.length


def stream_that_raises():
    yield "a"
    raise IndexError("of its own")


@pytest.mark.parametrize("kind", ["map", "map without a length", "stream"])
def test_an_index_error_of_the_datasets_own_goes_on(kind):
    data = {"map": Counted(4), "map without a length": Offsets(4), "stream": stream_that_raises()}
    batches = EvalPlan(4, Loop(1, 1).rank(0)).batches(data[kind], check_siblings=False)
    assert next(batches).samples == ["a"]
    with pytest.raises(IndexError, match=r"string index out of range|of its own"):
        next(batches)


def test_a_batch_is_a_tuple_that_notes_what_was_read():
    batch = EvalBatch(["a"], torch.ones(1), (3,))
    assert batch.indices == (3,)
    assert batch.read == set()
    assert batch.samples == ["a"]
    assert batch.read == {"samples"}
    assert batch[-2].item() == 1
    assert batch.read == {"samples", "weights"}
    other = batch._replace(samples=["b"])
    assert other.read == set()
    samples, weights, indices = other
    assert (samples, weights.item(), indices) == (["b"], 1, (3,))
    assert other.read == {"samples", "weights", "indices"}


def evaluate_again(rank, size):
    groups = hcp.build_process_groups()
    data = [{"tokens": torch.ones(2)}]
    by_batches = EvalPlan(1, groups)
    by_dispatch = EvalPlan([2], groups, max_tokens_per_rank=2)
    for plan, steps in ((by_batches, by_batches.batches), (by_dispatch, by_dispatch.dispatch)):
        for step in steps(data):
            list(step)
        assert plan.finish() == plan.finish() == 1
        with pytest.raises(hcp.HcpError, match="the plan has been finished, all 1 samples are"):
            next(steps(data))


def test_a_plan_is_of_one_evaluation():
    run_ranks(1, evaluate_again)


class Shards(IterableDataset):
    def __iter__(self):
        return iter("abc")


def test_an_iterable_dataset_of_torch_is_a_stream():
    plan = EvalPlan(3, Loop(1, 1).rank(0))
    batches = plan.batches(Shards(), check_siblings=False)
    assert [samples for samples, _, _ in batches] == [["a"], ["b"], ["c"]]


@dataclass
class Item:
    tokens: torch.Tensor


@pytest.mark.parametrize(
    ("value", "other"),
    [
        ([12, 3], [1, 23]),
        ([[1], 2], [[1, 2]]),
        (["1"], [1]),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (Item(torch.arange(2000)), Item(torch.arange(2000) + (torch.arange(2000) == 999))),
    ],
)
def test_other_samples_have_another_hash(value, other):
    assert digest_of(value) == digest_of(copy.deepcopy(value)) != digest_of(other)


# ---- on ranks ------------------------------------------------------------------------------------


class Stream:
    """An iterable dataset, without a length or random access."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


def samples_of(n):
    generator = torch.Generator().manual_seed(7)
    return [torch.rand(5, generator=generator, dtype=torch.float64) for _ in range(n)]


def evaluate_layouts(rank, size, n, kind):
    """The mean over all tokens of all samples under every layout of the ranks."""
    data = samples_of(n)
    train = hcp.build_process_groups()
    means = []
    for cp in (d for d in range(1, size + 1) if size % d == 0):
        groups = train.with_context_parallel(cp)
        for micro_batch_size in (1, 2, 5):
            plan = EvalPlan(n, groups, micro_batch_size=micro_batch_size)
            metrics = Metrics(groups)
            for batch in plan.batches(Stream(data) if kind == "iterable" else data):
                for sample, weight in zip(batch.samples, batch.weights, strict=True):
                    # This rank's tokens; those of even samples but the first are masked.
                    mine = torch.tensor([i % cp == groups.rank("cp") for i in range(5)])
                    mask = (torch.arange(5) > 0) | (sample[0] > 0.5)
                    metrics.add("loss", sample, (mine & mask) * weight)
            assert plan.finish() == n
            result = metrics.reduce()["loss"] if n else Metric(0, 0)
            means.append((result.mean, result.count))
    return means


@pytest.mark.parametrize("kind", ["map", "iterable"])
@pytest.mark.parametrize("n", [1, 7, 12])
def test_the_mean_does_not_depend_on_the_layout(n, kind):
    kept = [x for s in samples_of(n) for i, x in enumerate(s.tolist()) if i or s[0] > 0.5]
    for means in run_ranks(4, evaluate_layouts, n, kind):
        assert len(means) == 9
        for mean, count in means:
            assert count == len(kept)
            assert math.isclose(mean, math.fsum(kept) / len(kept), rel_tol=1e-14)


def end_early(rank, size, kind):
    groups = hcp.build_process_groups().with_context_parallel(2)
    data = samples_of(9 if rank < 2 else 11)
    plan = EvalPlan(11, groups, micro_batch_size=1)
    for batch in plan.batches(Stream(data) if kind == "iterable" else data):
        assert len(batch.samples) == len(batch.weights) == 1
        dist.barrier()  # nobody waits for a rank that has run out
    with pytest.raises(hcp.HcpError) as caught:
        plan.finish()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_a_dataset_that_ends_early_is_an_error_on_every_rank(kind):
    for rank, text in enumerate(run_ranks(4, end_early, kind)):
        assert text.startswith(f"rank {rank}: the evaluation observed 10 samples, expected each of")


def skip(rank, size, how, pp):
    groups = hcp.build_process_groups(pp=pp)
    plan = EvalPlan(4 * size // pp, groups, micro_batch_size=2)
    for k, batch in enumerate(plan.batches(list(range(4 * size // pp)))):
        if how == "before it looks" and k == 0 and rank == 0:
            continue
        if how == "for what it sees" and batch.samples[0] == 0:
            continue
        if how == "no weights":
            assert batch.samples
        else:
            assert batch.weights.sum() == 2
    try:
        return plan.finish()
    except hcp.HcpError as error:
        return str(error)


@pytest.mark.parametrize("how", ["before it looks", "for what it sees"])
def test_a_batch_that_the_loop_skips_is_an_error_on_every_rank(how):
    for rank, text in enumerate(run_ranks(2, skip, how, 1)):
        assert f"rank {rank}: the evaluation observed 6 samples, expected each of 8" in text
        assert ("2 samples were handed out here in batches whose weights" in text) == (rank == 0)


def test_weights_that_nobody_reads_are_an_error_but_on_a_stage_without_losses():
    for text in run_ranks(2, skip, "no weights", 1):
        assert "the evaluation observed 0 samples, expected each of 8" in text
    assert run_ranks(2, skip, "no weights", 2) == [4, 4]


def break_on_one_rank(rank, size):
    groups = hcp.build_process_groups()
    data = Counted(4) if rank == 1 else list("abcd")
    batches = EvalPlan(4, groups).batches(data)
    with pytest.raises((hcp.HcpError, IndexError)) as caught:
        deque(batches)
    return type(caught.value).__name__, str(caught.value)


def test_a_dataset_that_fails_on_one_rank_ends_the_others_with_its_words():
    (kind, text), (own, _) = run_ranks(2, break_on_one_rank)
    assert (kind, own) == ("HcpError", "IndexError")
    assert "rank 0: rank 1 of dp_cp could not load its samples: IndexError('string index" in text


def load_differently(rank, size):
    groups = hcp.build_process_groups().with_context_parallel(2)
    data = samples_of(4)
    if rank == 1:
        data[0] = data[0].clone()
        data[0][2] += 1e-9
    iterator = EvalPlan(4, groups).batches(data)
    if rank > 1:
        next(iterator)
        return ""
    with pytest.raises(hcp.HcpError) as caught:
        next(iterator)
    return str(caught.value)


def test_cp_siblings_that_load_different_bytes_are_named():
    results = run_ranks(4, load_differently)
    assert "ranks of one CP group loaded different bytes for the samples [0]" in results[0]
    assert "rank 1 has others" in results[0]
    assert "rank 0 has others" in results[1]


def stop_and_go_on(rank, size):
    groups = hcp.build_process_groups()
    data = samples_of(7)
    plan = EvalPlan(7, groups)
    iterator = plan.batches(data)
    for _ in range(2):
        assert next(iterator).weights.tolist() == [1]
    state = plan.state_dict()
    again = EvalPlan(7, groups)
    again.load_state_dict(state)
    rest = [indices for _, _, indices in again.batches(data)]
    assert again.finish() == 7
    with pytest.raises(ValueError, match=r"the state is of an evaluation of .*'num_samples': 7"):
        EvalPlan(8, groups).load_state_dict(state)
    with pytest.raises(ValueError, match=r"the state is of an evaluation of .*'lengths': 0"):
        EvalPlan([5] * 7, groups, max_tokens_per_rank=9).load_state_dict(state)
    with pytest.raises(ValueError, match=r"state\.next is missing, expected next, seen, made_for"):
        again.load_state_dict({})
    made_for = state["made_for"]
    with pytest.raises(ValueError, match=r"'rank': 7.*: each rank goes on with its own"):
        again.load_state_dict(state | {"made_for": made_for | {"rank": 7}})
    older = {name: value for name, value in made_for.items() if name != "rank"}
    EvalPlan(7, groups).load_state_dict(state | {"made_for": older})
    return state["next"], rest


def test_a_plan_goes_on_where_it_was_left():
    # What was handed out and not come back for is evaluated again.
    assert run_ranks(2, stop_and_go_on) == [
        (1, [(2,), (4,), (6,)]),
        (1, [(3,), (5,), (0,)]),
    ]


def dispatch_by_length(rank, size, lengths, skipped=None):
    groups = hcp.build_process_groups()
    data = [
        {"tokens": torch.full((n,), i), "loss_mask": torch.ones(n)} for i, n in enumerate(lengths)
    ]
    plan = EvalPlan(lengths, groups, max_tokens_per_rank=16, global_batch_size=4)
    seen = torch.zeros(len(lengths))
    metrics = Metrics(groups)
    for step in plan.dispatch(data):
        if skipped is not None and step.plan == plan.plan(skipped):
            continue
        for cp, local in step:
            seen += torch.bincount(local.tokens, minlength=len(lengths))
            metrics.add_sum("tokens", *cp.loss_sum(local.tokens.double(), local.loss_mask))
    if skipped is not None:
        with pytest.raises(hcp.HcpError, match=r"observed 8 samples, expected each of 9 exactly"):
            plan.finish()
        return 0
    dist.all_reduce(seen)
    assert seen.tolist() == lengths
    assert plan.finish() == len(lengths)
    result = metrics.reduce()["tokens"]
    assert result.count == sum(lengths)
    return result.mean


def test_with_lengths_the_dynamic_scheduler_spreads_each_sample_once():
    lengths = [40, 3, 1, 17, 9, 30, 2, 2, 5]
    expected = sum(i * n for i, n in enumerate(lengths)) / sum(lengths)
    assert run_ranks(4, dispatch_by_length, lengths) == pytest.approx([expected] * 4, rel=1e-14)
    run_ranks(4, dispatch_by_length, lengths, 2)


def plan_as_training_does(rank, size):
    groups = hcp.build_process_groups()
    memory = hcp.MemoryModel(activation=10, limit=400)
    config = hcp.Config(64, min_dynamic_context_parallel_size=2, ranks_per_node=2, memory=memory)
    samples = [{"tokens": torch.zeros(n)} for n in (5, 9, 17, 4)]
    loader = EvalDataLoader(samples, config, groups, global_batch_size=4, to_sample=lambda s: s)
    (cp,) = (cp for cp, _ in loader)
    assert cp.plan == config.plan(cp.plan.lengths, size)
    return cp.plan.core.ranks_per_node, cp.degree


def test_a_config_plans_evaluation_as_it_plans_training():
    assert run_ranks(4, plan_as_training_does) == [(2, 2)] * 4


class Noise:
    """A dataset that gives another document each time."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"input_ids": torch.randint(9, (5,))}


def load_other_data(rank, size):
    """The error when ranks have different datasets, seeds or places in them."""
    groups, config = hcp.build_process_groups(), hcp.Config(64)
    documents = [{"input_ids": [i, i]} for i in range(8)]
    sharded, uneven = documents[rank::size], documents[: 8 - rank]

    def training(dataset, seed=0):
        return DynamicCPDataLoader(dataset, config, groups, global_batch_size=4, seed=seed)

    def evaluation(dataset):
        return EvalDataLoader(dataset, config, groups, global_batch_size=4)

    moved = training(documents)
    moved.load_state_dict({**moved.state_dict(), "next": rank})
    said = []
    for loader in (
        *(training(sharded), training(uneven), training(documents, seed=rank), moved),
        *(evaluation(sharded), evaluation(uneven)),
    ):
        with pytest.raises(hcp.HcpError) as caught:
            next(iter(loader))
        said.append(str(caught.value))
    torch.manual_seed(rank)
    assert len(list(training(Noise()))) == 1
    with pytest.raises((hcp.HcpError, ValueError), match="input_ids is empty"):
        list(training([{"input_ids": []}, *documents[:3]]))
    return said


def test_loaders_refuse_shards_and_seeds_that_differ_from_rank_to_rank():
    for rank, said in enumerate(run_ranks(2, load_other_data)):
        expected = ("the dataset's first sample", "samples", "seed", "next")
        for text, name in zip(said, (*expected, *expected[:2]), strict=True):
            assert text.startswith(f"rank {rank}: {name} is another on rank 1")
            assert "each is given the whole dataset and the same seed" in text


# ---- metrics -------------------------------------------------------------------------------------


def reduce_metrics(rank, size):
    groups = hcp.build_process_groups(pp=2)
    metrics = Metrics(groups)
    if groups.rank("pp") == 1:
        metrics.add("d", torch.ones(2), torch.zeros(2))
        if groups.rank("dp") == 0:
            metrics.add("a", torch.tensor([1.0, math.nan, 3.0]), torch.tensor([1, 0, 1]))
            metrics.add("b", torch.tensor([2.0**24, 1.0]))
            metrics.add_sum("c", 0.0, 0)
        else:
            metrics.add("a", torch.zeros(3), torch.zeros(3))
            metrics.add("b", torch.zeros(0))
            for _ in range(3000):
                metrics.add_sum("c", 0.1, 1)
    totals = metrics.reduce()
    assert totals["a"] == Metric(4.0, 2.0)
    assert totals["b"] == Metric(2.0**24 + 1, 2.0)
    assert math.isclose(totals["c"].mean, 0.1, rel_tol=1e-13)
    with pytest.warns(RuntimeWarning, match="the metric 'd' has a count of 0 on all ranks"):
        assert math.isnan(totals["d"].mean)
    return sorted(totals)


def test_metrics_are_summed_in_float64_and_known_on_every_stage():
    assert run_ranks(4, reduce_metrics) == [["a", "b", "c", "d"]] * 4


def test_metrics_are_reduced_in_a_loopback():
    def work(groups):
        metrics = hcp.Metrics(groups)
        metrics.add_sum("a", groups.transport.rank + 1.0, 2)
        total = metrics.reduce()["a"]
        metrics.add_sum("late", math.inf if groups.transport.rank else 0.0, 1)
        with pytest.raises(hcp.HcpError, match=r"rank \d: rank 1 of dp_cp added \[inf, 1.0\]"):
            metrics.reduce()
        return total

    assert hcp.loopback(3, lambda groups: work(groups))[0] == Metric(6.0, 6.0)


def add_what_cannot_be_summed(rank, size):
    """On both ranks of the second stage; the first one waits for it."""
    groups, said = hcp.build_process_groups(pp=2), []
    place = groups.rank("dp") if groups.rank("pp") else None
    for wrong in ("infinity", "names"):
        metrics = Metrics(groups)
        if place is not None:
            late = wrong == "infinity" and place == 1
            metrics.add("loss", torch.tensor([math.inf if late else 1.0]))
        if wrong == "names" and place == 0:
            metrics.add_sum("accuracy", 1.0, 1)
        with pytest.raises(hcp.HcpError) as caught:
            metrics.reduce()
        said.append(str(caught.value))
    return said


def test_a_loss_that_is_not_finite_or_has_another_name_is_an_error_on_every_rank_and_stage():
    for rank, (infinity, names) in enumerate(run_ranks(4, add_what_cannot_be_summed)):
        assert infinity == (
            f"rank {rank}: rank 1 of dp_cp added [inf, 1.0] to 'loss', expected finite "
            "[HCP-metrics-differ]"
        )
        assert names.startswith(
            f"rank {rank}: rank 0 of dp_cp added ['accuracy'] and rank 1 did not, expected the same"
        )


# ---- ahead of the step ---------------------------------------------------------------------------


class Read:
    """A dataset of samples of 3 tokens that notes what was read, and fails at one."""

    def __init__(self, broken=None):
        self.indices, self.broken = [], broken

    def __getitem__(self, index):
        self.indices.append(index)
        if index == self.broken:
            raise OSError("disk is gone")
        return {"tokens": torch.full((3,), index), "loss_mask": torch.ones(3)}


def read_before_each_step(rank, size, ahead):
    groups, data = hcp.build_process_groups(), Read()
    plan = EvalPlan([3] * 8, groups, max_tokens_per_rank=16, global_batch_size=2)
    read, seen = [], torch.zeros(8)
    for step in plan.dispatch(data, plan_ahead=ahead):
        read.append(len(data.indices))
        assert 0 <= step.planning.waited <= step.planning.seconds or ahead
        for _, local in step:
            seen += torch.bincount(local.tokens, minlength=8)
    dist.all_reduce(seen)
    assert seen.tolist() == [3] * 8
    assert plan.finish() == 8
    return read


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_the_next_steps_are_read_and_planned_while_one_is_computed(ahead):
    """Each of two ranks loads one sample of each of the four steps."""
    expected = [min(4, 1 + step + ahead) for step in range(4)]
    assert run_ranks(2, read_before_each_step, ahead) == [expected] * 2


def error_of_a_sample(rank, size):
    groups, data = hcp.build_process_groups(), Read(broken=5)
    plan = EvalPlan([3] * 8, groups, max_tokens_per_rank=16, global_batch_size=2)
    steps = plan.dispatch(data)
    for _ in range(2):
        list(next(steps))
    with pytest.raises(OSError if rank == 1 else hcp.HcpError, match="disk is gone"):
        next(steps)
    assert plan.observed == 2
    again = EvalPlan([3] * 2, groups, max_tokens_per_rank=16)  # the lane is as good as new
    for step in again.dispatch(Read()):
        assert len(list(step)) == 1
    assert again.finish() == 2
    return True


def test_an_error_comes_with_its_own_step_on_all_ranks():
    assert run_ranks(2, error_of_a_sample) == [True, True]


def left_early(rank, size):
    groups = hcp.build_process_groups()
    plan = EvalPlan([3] * 8, groups, max_tokens_per_rank=16, global_batch_size=2)
    steps = plan.dispatch(Read())
    list(next(steps))
    next(steps)
    state = plan.state_dict()
    steps.close()
    resumed = EvalPlan([3] * 8, groups, max_tokens_per_rank=16, global_batch_size=2)
    resumed.load_state_dict(state)
    assert sum(len(list(step)) for step in resumed.dispatch(Read())) == 3
    return resumed.finish()


def test_an_evaluation_left_early_resumes_at_the_step_that_was_taken_last():
    assert run_ranks(2, left_early) == [8, 8]
