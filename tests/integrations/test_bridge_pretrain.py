"""Megatron-Bridge's real `pretrain` on Gloo ranks, with hcp's callback and layers."""

import functools
import re

import pytest
from support.examples import EXAMPLES
from support.ranks import run_module
from support.tensorboard_writer import check

from hcp._versions import installed
from hcp.integrations.megatron import EvalContextParallel

pytestmark = pytest.mark.skipif(
    installed("megatron-bridge") is None,
    reason="megatron-bridge is not installed: make test-trainer-bridge",
)

EQUAL = dict(rel=0, abs=2e-6)
"""Losses near 4.5 in float32, summed in another order."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bridge")


@functools.cache
def by_one_rank(folder):
    from support.bridge import run

    return run(1, folder=folder)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "train_cp", "eval_cp"), [(2, 2, 1), (4, 1, 2), (4, 2, 4)])
def test_evaluation_and_test_sets_do_not_depend_on_the_eval_layout(
    folder, ranks, train_cp, eval_cp
):
    from support.bridge import run

    expected = by_one_rank(folder)
    assert expected.steps[1] < expected.steps[0] - 0.1
    assert len(expected.evaluations) == 4
    file = folder / f"train-{train_cp}.yaml"
    file.write_text(f"model:\n  context_parallel_size: {train_cp}\n")
    found = run(ranks, str(file), f"dist.eval_context_parallel_size={eval_cp}", folder=folder)
    assert found.steps == pytest.approx(expected.steps, **EQUAL)
    assert found.evaluations == pytest.approx(expected.evaluations, **EQUAL)
    assert found.layouts == [[eval_cp, ranks // eval_cp]] * 4
    assert found.after == [train_cp] * 2
    assert found.events == expected.events
    assert found.seen == expected.seen


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (2, ("linear",)),
        (4, ("dist.eval_context_parallel_size=4",)),
    ],
)
def test_dynamic_cp_has_the_losses_of_one_rank(folder, ranks, overrides):
    from support.bridge import run

    expected = by_one_rank(folder)
    half = "model.max_seqlen_per_dp_cp_rank=8"
    board = ("logger.tensorboard_dir=board", "logger.tensorboard_log_interval=1")
    found = run(ranks, "dynamic", half, *board, *overrides, folder=folder)
    assert found.steps == pytest.approx(expected.steps, **EQUAL)
    assert found.evaluations == pytest.approx(expected.evaluations, **EQUAL)
    assert found.events == expected.events
    assert found.seen == [], "the script's forward step was called"
    assert sorted(found.metrics) == [1, 2]
    for written in found.metrics.values():
        check(written, sequences=4, ranks=ranks)


@pytest.mark.timeout(300)
def test_options_that_do_not_go_with_dynamic_cp_are_refused(folder):
    from support.bridge import run

    with pytest.raises(AssertionError, match=r"model\.calculate_per_token_loss=False does not go"):
        run(1, "dynamic", "model.calculate_per_token_loss=false", folder=folder)


def test_bridge_finds_no_event_that_its_num_epochs_refuses():
    from hcp.integrations.megatron import DynamicContextParallel

    for callback in (EvalContextParallel, DynamicContextParallel):
        assert not hasattr(callback, "on_data_init_start")


@pytest.mark.timeout(300)
def test_the_example_has_the_evaluations_of_one_rank(folder):
    found = []
    for ranks in (1, 2):
        file = str(EXAMPLES / "bridge.py")
        done = run_module("support.bridge", file, folder=folder, ranks=ranks)
        assert done.code == 0, done.err[-4000:]
        lines = re.findall(r"^evaluation under CP (\d): ([\d.]+), now CP (\d)$", done.out, re.M)
        assert len(lines) == 3, done.out
        assert {(cp, after) for cp, _, after in lines} == {(str(ranks), "1")}
        found.append([float(loss) for _, loss, _ in lines])
    assert found[0] == pytest.approx(found[1], **EQUAL)
    assert found[0][1] < found[0][0]
