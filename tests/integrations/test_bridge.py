"""The callback for Megatron-Bridge, against Bridge's interface.

A fake has Bridge's event names and configuration. Its loaders shard samples, and its evaluation
counts them, as Bridge's do. Bridge itself needs GPUs, or stubs for its imports."""

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support import trainer
from support.ranks import run_ranks

import hcp
from hcp.integrations.megatron import EvalContextParallel


class Bridge:
    """A training run of Bridge: its model, groups and callbacks."""

    def __init__(self, callback, samples, *, train_cp=1, eval_cp=None, batch=4, micro_batch=1):
        dist = SimpleNamespace(eval_context_parallel_size=eval_cp)
        validation = SimpleNamespace(
            eval_global_batch_size=batch,
            eval_micro_batch_size=micro_batch,
            eval_iters=-(-len(samples) // batch),
        )
        config = SimpleNamespace(dist=dist, validation=validation)
        self.train_pgs = hcp.build_process_groups(cp=train_cp)
        self.model, self.optimizer = trainer.build(self.train_pgs)
        self.state = SimpleNamespace(cfg=config, _train_pgs=None, _eval_pgs=None)
        self.context = SimpleNamespace(state=self.state, model=[self.model])
        self.callback, self.validation, self.samples = callback, validation, samples
        self.loaded = []

    def fire(self, event):
        if self.callback is not None:
            getattr(self.callback, event)(self.context)

    def set_up(self):
        """Groups before loaders, which shard by the data-parallel group of evaluation."""
        if self.callback is not None:
            self.callback.set_up(self.state, self.train_pgs)
        evaluation = self.state._eval_pgs
        group = self.train_pgs.dp if evaluation is None else evaluation.dp
        self.iterator = self.loader(group.rank(), group.size())
        return self

    def loader(self, rank, size):
        """Micro-batches of this data-parallel rank, batch after batch; the last batch is filled up
        with samples without a loss, whose index is -1."""
        batch = self.validation.eval_global_batch_size
        micro_batch = self.validation.eval_micro_batch_size
        indices = [*range(len(self.samples))]
        indices += [-1] * (-len(indices) % batch)
        for first in range(0, len(indices), batch):
            for start in range(first, first + batch, size * micro_batch):
                own = start + rank * micro_batch
                yield indices[own : own + micro_batch]

    @torch.no_grad()
    def evaluate(self, *, time_limit=False, event="eval"):
        """The mean loss, its tokens and the samples that this rank computed. Groups are read from
        the model once the start event is over; a time limit leaves without the end event."""
        self.model.eval()
        self.fire(f"on_{event}_start")
        groups = self.model.pg_collection
        validation = self.validation
        micro_batches = validation.eval_global_batch_size // (
            validation.eval_micro_batch_size * groups.dp.size()
        )
        totals, seen = torch.zeros(2, dtype=torch.float64), []
        for _ in range(validation.eval_iters):
            for _ in range(micro_batches):
                self.fire(f"on_{event}_step_start")
                indices = next(self.iterator)
                rows = self.model.rows(
                    [self.samples[i] for i in indices], [float(i >= 0) for i in indices]
                )
                _, losses = trainer.forward_step(self.model, rows)
                totals += torch.stack([(losses * rows.weights).sum(), rows.weights.sum()])
                seen += [i for i in indices if i >= 0]
                self.fire(f"on_{event}_step_end")
            if time_limit:
                return None
        dist.all_reduce(totals, group=groups.dp_cp)
        self.fire(f"on_{event}_end")
        self.model.train()
        return (totals[0] / totals[1]).item(), int(totals[1]), seen

    def train_step(self):
        self.fire("on_train_step_start")
        trainer.train_step(self.model, self.optimizer, trainer.samples_of(8, seed=9))
        self.fire("on_train_step_end")


# ---- data and counting ---------------------------------------------------------------------------

SAMPLES = 11
"""Samples of a validation set whose last batch of four is uneven."""


def evaluate_under(rank, size, eval_cp, options, event="eval"):
    """The evaluation of a model after a training step."""
    callback = None if eval_cp is None else EvalContextParallel()
    bridge = Bridge(callback, trainer.samples_of(SAMPLES), eval_cp=eval_cp, **options).set_up()
    bridge.fire("on_train_start")
    bridge.train_step()
    mean, tokens, seen = bridge.evaluate(event=event)
    assert bridge.model.cp_size == options.get("train_cp", 1)
    return mean, tokens, seen


@functools.cache
def expected():
    (one,) = run_ranks(1, evaluate_under, None, {})
    return one


@pytest.mark.parametrize("event", ["eval", "test"])
@pytest.mark.parametrize("eval_cp", [None, 1, 2, 4])
def test_every_sample_counts_once_under_every_layout(eval_cp, event):
    mean, tokens, seen = expected()
    assert sorted(seen) == list(range(SAMPLES))
    ranks = run_ranks(4, evaluate_under, eval_cp, {}, event)
    for found in ranks:
        assert found[:2] == (pytest.approx(mean, rel=1e-12), tokens)
    by_rank = [seen for *_, seen in ranks]
    copies = eval_cp or 1  # siblings load the same samples
    assert sorted(itertools.chain(*by_rank)) == sorted([*range(SAMPLES)] * copies)
    for first in range(0, 4, copies):
        assert all(own == by_rank[first] for own in by_rank[first : first + copies])


def test_a_smaller_eval_layout_than_training_counts_the_same():
    mean, tokens, _ = expected()
    for found in run_ranks(4, evaluate_under, 1, {"train_cp": 4}):
        assert found[:2] == (pytest.approx(mean, rel=1e-12), tokens)


def test_several_samples_in_a_micro_batch_count_the_same():
    mean, tokens, _ = expected()
    for found in run_ranks(4, evaluate_under, 2, {"batch": 8, "micro_batch": 2}):
        assert found[:2] == (pytest.approx(mean, rel=1e-12), tokens)


def leave_by_time_limit(rank, size):
    """Bridge fires no end event then; training must go on in its own layout all the same."""
    samples = trainer.samples_of(SAMPLES)
    bridge = Bridge(EvalContextParallel(), samples, eval_cp=2).set_up()
    twin = Bridge(None, samples).set_up()
    assert bridge.evaluate(time_limit=True) is None
    assert bridge.model.cp_size == 2
    bridge.train_step()
    twin.train_step()
    assert bridge.model.cp_size == 1
    same = trainer.fingerprint(bridge.model, bridge.optimizer)
    return same == trainer.fingerprint(twin.model, twin.optimizer)


def test_after_a_time_limit_training_goes_on_in_its_own_layout():
    assert run_ranks(2, leave_by_time_limit) == [True, True]


def share_out_unevenly(rank, size):
    train = hcp.build_process_groups()
    given = EvalContextParallel(train, train.with_context_parallel(1))
    for callback in (EvalContextParallel(), given):
        bridge = Bridge(callback, trainer.samples_of(SAMPLES), eval_cp=1, batch=5, micro_batch=2)
        with pytest.raises(
            ValueError,
            match=r"eval_global_batch_size \(5\) % \(eval_micro_batch_size \(2\) x data-parallel"
            r" ranks of evaluation \(2\)\) == 1, expected 0: .* leave samples out",
        ):
            bridge.set_up()


def test_a_batch_that_the_eval_layout_would_not_share_out_whole_is_refused():
    run_ranks(2, share_out_unevenly)


# ---- events and options --------------------------------------------------------------------------


def run_bridges_events(rank, size):
    train = hcp.build_process_groups()
    evaluation = train.with_context_parallel(2)
    model, _ = trainer.build(train)
    callback = EvalContextParallel(train, evaluation)
    context = SimpleNamespace(state=SimpleNamespace(), model=[model])
    callback.set_up(context.state, train)
    assert context.state._eval_pgs is evaluation
    seen = []
    for end in ("eval_end", "test_end", "train_step_start", "checkpoint_save", "train_end"):
        callback.on_train_start(context)
        getattr(callback, "on_test_start" if end == "test_end" else "on_eval_start")(context)
        seen.append((callback.inside, model.cp_size))
        callback.on_eval_step_end(context)
        getattr(callback, f"on_{end}")(context)
        assert (callback.inside, model.cp_size) == (False, 1)
    callback.on_eval_start(context)
    callback.on_eval_start(context)  # an evaluation that never ended
    callback.restore()
    assert model.cp_size == 1
    assert seen == [(True, 2)] * 5


def test_bridges_events_switch_and_every_way_on_restores():
    run_ranks(2, run_bridges_events)


def bridge_from_its_configuration(rank, size):
    train = hcp.build_process_groups()
    model, _ = trainer.build(train)
    dist = SimpleNamespace(eval_context_parallel_size=2)
    state = SimpleNamespace(cfg=SimpleNamespace(dist=dist))
    context = SimpleNamespace(state=state, model=[model])
    callback = EvalContextParallel()
    with pytest.raises(ValueError, match="has no groups, expected Megatron-Bridge's pretrain"):
        callback.on_eval_start(context)
    callback.set_up(state, train)
    assert (state._eval_pgs.size("cp"), state._eval_pgs.size("dp")) == (2, 1)
    callback.on_eval_start(context)
    assert model.cp_size == 2
    callback.on_eval_end(context)
    assert model.cp_size == 1
    dist.eval_context_parallel_size = None
    with pytest.raises(ValueError, match="eval_context_parallel_size is None, expected the"):
        EvalContextParallel().set_up(state, train)
    with pytest.raises(ValueError, match="go together"):
        EvalContextParallel(train)


def test_bridges_own_option_names_the_layout():
    run_ranks(2, bridge_from_its_configuration)


def test_one_callback_of_hcp_takes_part_in_a_run():
    from hcp.integrations.megatron.bridge.bridge_seams import _callback_of

    def manager(*callbacks):
        events = [each.on_eval_start for each in callbacks]
        return SimpleNamespace(list_callbacks=lambda name: [print, *events])

    callback = EvalContextParallel()
    assert _callback_of(None) is None is _callback_of(manager())
    assert _callback_of(manager(callback)) is callback
    with pytest.raises(ValueError, match="callbacks has EvalContextParallel, EvalContextParallel"):
        _callback_of(manager(callback, EvalContextParallel()))
