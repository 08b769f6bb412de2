"""Dynamic context parallelism with a DeepSpeed engine in a loop of one's own, on gloo ranks."""

from __future__ import annotations

import itertools
import os
from types import SimpleNamespace

import pytest
import torch
from support.finetuning import TRAINING, VALIDATION, Model, as_torchrun, documents
from support.ranks import run_ranks

import hcp

pytest.importorskip("deepspeed", reason="make test-trainers")

pytestmark = pytest.mark.timeout(600)


def engine_of(model, stage):
    import deepspeed

    options = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.5,
    }
    # Without momentum, an update shows a wrong factor of the gradients.
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=options)[0]


def train(rank, size, config, stages):
    """By ZeRO stage: losses of two epochs, the mean loss of an evaluation, rows, how plans sync."""
    from hcp.integrations.deepspeed import (
        DynamicCPDataLoader,
        EvalDataLoader,
        eval_groups,
        eval_layout,
        micro_batches,
    )

    as_torchrun(size)
    os.environ["DS_ACCELERATOR"] = "cpu"
    groups = hcp.build_process_groups()
    evaluation = eval_groups(groups, config)
    found = {}
    for stage in stages:
        engine = engine_of(Model().float(), stage)
        loader = DynamicCPDataLoader(
            documents((*TRAINING[:16], 2)),  # the last step leaves a rank without rows
            config,
            groups,
            global_batch_size=8,
            shuffle=False,
            cost=hcp.CostModel(exchange=10**9),
            model=engine.module,
        )
        losses, rows, syncs = [], [], set()
        for step in itertools.chain(loader, loader):
            total = torch.zeros(())
            for cp, local in micro_batches(engine, step):
                loss = cp.loss(engine(cp, local), local.loss_mask, grad_reduce="mean")
                engine.backward(loss)
                total += loss.detach()
                rows.append(cp.rows)
            engine.step()
            torch.distributed.all_reduce(total)
            losses.append(total.item() / size)
            syncs.add(step.plan.sync)
        with torch.no_grad(), eval_layout(engine.module, groups, evaluation):
            metrics = hcp.Metrics(evaluation)
            for cp, local in EvalDataLoader(
                documents(VALIDATION, 1), config, evaluation, global_batch_size=4
            ):
                metrics.add_sum("loss", *cp.loss_sum(engine(cp, local), local.loss_mask))
            mean = metrics.reduce()["loss"].mean
        found[stage] = losses, mean, rows, syncs, engine.global_steps
        engine.destroy()
    return found


STAGES = (0, 1, 2, 3)


def test_an_engine_of_any_zero_stage_trains_as_one_rank():
    (alone,) = run_ranks(1, train, hcp.Config(max_seqlen_per_dp_cp_rank=128), (0,), timeout=280)
    expected, mean, _, _, updates = alone[0]
    assert len(expected) == updates == 6
    config = hcp.Config(max_seqlen_per_dp_cp_rank=51, eval_context_parallel_size=2)
    results = run_ranks(2, train, config, STAGES, timeout=280)
    for stage in STAGES:
        for found in results:
            losses, evaluated, _, syncs, steps = found[stage]
            assert losses == pytest.approx(expected, rel=1e-5)
            assert evaluated == pytest.approx(mean, rel=1e-5)
            assert syncs == {"micro_batch" if stage == 3 else "step"}  # ZeRO-3 waits in layers
            assert steps == updates
    assert all(0 in rows for _, _, rows, _, _ in results[1].values()), "no rank was without rows"


@pytest.mark.parametrize(
    ("says", "message"),
    [
        ({"pipeline_parallelism": True}, "the engine is one of pipeline stages, expected"),
        ({"gradient_accumulation_steps": lambda: 4}, "gradient_accumulation_steps is 4, expected"),
        ({"managed_gradient_accumulation": lambda: False}, "accumulation is False, expected True"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size is 2, expected 1: hcp spreads"),
        ({"dp_world_size": 3}, "the plan is for 2 ranks, expected 3: those over which the engine"),
    ],
)
def test_what_an_engine_would_do_beside_hcp_is_refused(says, message):
    from hcp.integrations.deepspeed import check_engine

    with pytest.raises(ValueError, match=message):
        check_engine(said_engine(**says), SimpleNamespace(plan=PLAN))


PLAN = hcp.plan([4], ranks=2, max_tokens_per_rank=4)


def said_engine(**says):
    """What an engine says of itself."""
    return SimpleNamespace(
        **{
            "pipeline_parallelism": False,
            "gradient_accumulation_steps": lambda: 1,
            "managed_gradient_accumulation": lambda: True,
            "sequence_parallel_size": 1,
            "dp_world_size": 2,
            **says,
        }
    )


def test_deepspeeds_experts_are_refused_unless_they_take_every_token():
    """Also where an engine goes on from a checkpoint."""
    from deepspeed.moe.sharded_moe import TopKGate

    from hcp.integrations.deepspeed import micro_batches

    class NoRows(list):
        plan = PLAN

    dropping = said_engine(module=torch.nn.Sequential(TopKGate(8, 2)), global_steps=7)
    with pytest.raises(
        ValueError, match=r"TopKGate\.capacity_factor is 1\.0, expected experts that"
    ):
        next(micro_batches(dropping, NoRows()))
    whole = said_engine(module=torch.nn.Sequential(TopKGate(8, 2, drop_tokens=False)))
    assert list(micro_batches(whole, NoRows())) == []
