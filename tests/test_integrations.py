"""Trainers' own loops, by their shapes: neither Megatron-LM nor Megatron-Bridge is imported. Which
versions are taken."""

from argparse import Namespace
from importlib import metadata
from types import SimpleNamespace

import pytest
import trainer
from ranks import run_ranks

import hcp
from hcp.integrations.megatron import EvalContextParallel, wrap_evaluate
from hcp.integrations.versions import require


def evaluate_as_megatron_lm_does(rank, size):
    train = hcp.build_process_groups()
    evaluation = train.with_context_parallel(2)
    model, _ = trainer.build(train)
    args = Namespace(data_parallel_size=2, context_parallel_size=1, eval_global_batch_size=4)
    samples = trainer.samples_of(5)

    def evaluate(forward_step_func, data_iterator, model, process_non_loss_data_func=None):
        micro_batches = args.eval_global_batch_size // args.data_parallel_size
        if forward_step_func == "fail":
            raise ZeroDivisionError
        return micro_batches, args.context_parallel_size, trainer.evaluate(model[0], samples, 1)

    wrapped = wrap_evaluate(evaluate, train, evaluation, args, strict=True)
    assert wrapped.__name__ == "evaluate"
    plain, switched = evaluate(None, None, [model]), wrapped(None, None, model=[model])
    assert (plain[:2], switched[:2]) == ((2, 1), (4, 2))
    assert abs(plain[2].mean / switched[2].mean - 1) < 1e-12
    with pytest.raises(ZeroDivisionError):
        wrapped("fail", None, [model])
    assert (args.data_parallel_size, args.context_parallel_size, model.cp_size) == (2, 1, 1)
    with pytest.raises(ValueError, match=r"args\.data_parallel_size is 4, expected .*, 2"):
        wrap_evaluate(evaluate, train, evaluation, Namespace(data_parallel_size=4))
    with pytest.raises(ValueError, match="has the parameters x, expected one called model"):
        wrap_evaluate(lambda x: x, train, evaluation)


def test_a_megatron_lm_style_evaluate_runs_under_the_eval_layout():
    run_ranks(2, evaluate_as_megatron_lm_does)


def run_bridges_events(rank, size):
    train = hcp.build_process_groups()
    evaluation = train.with_context_parallel(2)
    model, _ = trainer.build(train)
    callback = EvalContextParallel(train, evaluation)
    context = SimpleNamespace(state=SimpleNamespace(), model=[model])
    callback.on_data_init_start(context)
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


def test_versions_that_were_not_tested_are_refused_by_name(monkeypatch):
    installed = {"trainer": "2.6.6", "old": "2.5.9", "new": "2.10.0rc1"}

    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    require("trainer", "2.6", "2.6")
    require("trainer", "2.4", "2.9")
    with pytest.raises(ImportError, match=r'old is 2.5.9, expected 2.6 to 2.9.*"old>=2.6,<2.10"'):
        require("old", "2.6", "2.9")
    with pytest.raises(ImportError, match=r'old is 2.5.9, expected 2.6, which .*"old>=2.6,<2.7"'):
        require("old", "2.6", "2.6")
    with pytest.raises(ImportError, match=r"none is not installed, expected 2.6: pip install"):
        require("none", "2.6", "2.6")
    with pytest.raises(ImportError, match=r"new is 2.10.0rc1, expected 2.6 to 2.9, which hcp was"):
        require("new", "2.6", "2.9")
    with pytest.raises(ImportError, match=r"none is not installed, expected 2.6 to 2.9: pip inst"):
        require("none", "2.6", "2.9")


def bridge_from_its_configuration(rank, size):
    train = hcp.build_process_groups()
    model, _ = trainer.build(train)
    dist = SimpleNamespace(eval_context_parallel_size=2)
    state = SimpleNamespace(cfg=SimpleNamespace(dist=dist))
    context = SimpleNamespace(state=state, model=[SimpleNamespace(module=model)])
    callback = EvalContextParallel()
    with pytest.raises(ValueError, match="has no groups, expected on_data_init_start"):
        callback.on_eval_start(context)
    callback.on_data_init_start(context)
    assert (state._eval_pgs.size("cp"), state._eval_pgs.size("dp")) == (2, 1)
    callback.on_eval_start(SimpleNamespace(state=state, model=[model]))
    assert model.cp_size == 2
    callback.on_eval_end(context)
    assert model.cp_size == 1
    dist.eval_context_parallel_size = None
    with pytest.raises(ValueError, match="eval_context_parallel_size is None, expected the"):
        EvalContextParallel().on_data_init_start(context)
    dist.eval_context_parallel_size = 2
    with pytest.raises(ValueError, match="has no pg_collection, expected the groups"):
        EvalContextParallel().on_data_init_start(SimpleNamespace(state=state, model=[object()]))
    with pytest.raises(ValueError, match="go together"):
        EvalContextParallel(train)


def test_bridges_own_option_names_the_layout():
    run_ranks(2, bridge_from_its_configuration)
