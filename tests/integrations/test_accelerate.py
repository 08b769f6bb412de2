"""Dynamic context parallelism in a loop of one's own with Accelerate, on gloo ranks."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
from argparse import Namespace
from unittest import mock

import pytest
import torch
from support.finetuning import TRAINING, VALIDATION, Model, as_torchrun, documents, fsdp_on_cpus
from support.ranks import run_ranks, try_ranks

import hcp

pytest.importorskip("accelerate", reason="pip install '.[accelerate]'")


def train(rank, size, folder, config):
    from accelerate import Accelerator

    from hcp.integrations.accelerate import ContextParallel

    as_torchrun(size)
    accelerator = Accelerator(cpu=True)
    parallel = ContextParallel(accelerator, config)
    given = parallel.train_loader(documents(TRAINING), global_batch_size=8)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, given)
    assert loader is given
    accelerator.register_for_checkpointing(loader)
    losses, gradient, rows = [], None, []

    def one_step(step):
        nonlocal gradient
        total = torch.zeros((), dtype=torch.float64)
        for cp, local in parallel.micro_batches(model, step):
            loss = cp.loss(model(cp, local), local.loss_mask, grad_reduce="mean")
            accelerator.backward(loss)
            total += loss.detach()
            rows.append(cp.rows)
        if gradient is None:
            gradient = accelerator.unwrap_model(model).qkv.weight.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(total, "mean").item())

    for epoch in range(7):
        loader.set_epoch(epoch)
        for i, step in enumerate(loader):
            one_step(step)
            if (epoch, i) == (2, 0):
                accelerator.save_state(str(folder))
    straight, losses = losses, []
    accelerator.load_state(str(folder))
    for step in loader:  # what was left of epoch 2
        one_step(step)
    assert losses == straight[7:9]
    return straight[:20], gradient, evaluate(parallel, model), rows


def evaluate(parallel, model):
    with torch.no_grad(), parallel.eval_layout(model) as groups:
        metrics = hcp.Metrics(groups)
        for cp, local in parallel.eval_loader(documents(VALIDATION, 1), global_batch_size=4):
            metrics.add_sum("loss", *cp.loss_sum(model(cp, local), local.loss_mask))
        return metrics.reduce()["loss"]


@pytest.mark.parametrize(
    "config",
    [
        hcp.Config(max_seqlen_per_dp_cp_rank=34, eval_context_parallel_size=3),
        hcp.Config(
            max_seqlen_per_dp_cp_rank=34,
            sequence_packing_scheduler="static_cp",
            cp_comm_type="all_gather",
        ),
        hcp.Config(
            max_seqlen_per_dp_cp_rank=34,
            eval_context_parallel_size=3,
            cp_comm_type="a2a+p2p",
            hierarchical_context_parallel_sizes=(2, 2),
        ),
    ],
    ids=["dynamic", "static", "levels"],
)
def test_a_prepared_loop_trains_as_on_one_rank(config, tmp_path):
    alone = run_ranks(1, train, tmp_path / "1", hcp.Config(max_seqlen_per_dp_cp_rank=128))[0]
    three = run_ranks(3, train, tmp_path / "3", config)
    for losses, gradient, evaluation, _ in three:
        assert losses == pytest.approx(alone[0], abs=1e-9)
        assert (gradient - alone[1]).abs().max() < 1e-12
        assert evaluation.count == alone[2].count == sum(VALIDATION) - len(VALIDATION)
        assert evaluation.mean == pytest.approx(alone[2].mean, abs=1e-9)
    assert len(alone[0]) == 20
    assert 0 in itertools.chain(*(rows for *_, rows in three)), "no rank was without rows"


def train_sharded(rank, size, config, cp_size=1, reshards=True):
    """Losses of two epochs under Accelerate's FSDP2, and how many parameters a rank holds."""
    from accelerate import Accelerator, ParallelismConfig, PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    from hcp.integrations.accelerate import ContextParallel

    as_torchrun(size)
    PartialState(cpu=True)
    with fsdp_on_cpus():
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="NO_WRAP", reshard_after_forward=reshards
        )
        parallelism = None if cp_size == 1 else ParallelismConfig(cp_size=cp_size)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=parallelism)
        parallel = ContextParallel(accelerator, config)
        assert parallel.groups.size("cp") == cp_size
        model = Model()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        held = sum(p.to_local().numel() for p in model.parameters())
        losses = []
        for epoch in range(2):
            loader = parallel.train_loader(documents(TRAINING), global_batch_size=8)
            loader.set_epoch(epoch)
            for step in loader:
                assert step.plan.sync == "micro_batch"  # ranks wait in every layer
                if parallel.config.sequence_packing_scheduler == "static_cp":
                    groups = itertools.chain(*step.plan.micro_batches)
                    assert {group.degree for group in groups} == {cp_size}
                total = torch.zeros((), dtype=torch.float64)
                for cp, local in parallel.micro_batches(model, step):
                    loss = cp.loss(model(cp, local), local.loss_mask, grad_reduce="mean")
                    accelerator.backward(loss)
                    total += loss.detach()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(accelerator.reduce(total, "mean").item())
        evaluation = evaluate(parallel, model)
        if cp_size > 1:
            cut = accelerator.maybe_context_parallel(buffers=[torch.zeros(2)])
            with pytest.raises(ValueError, match="would cut sequences that hcp has cut"), cut:
                pass
            assert ContextParallel(accelerator, config).groups.size("cp") == cp_size
    return losses, evaluation.mean, held


@pytest.mark.parametrize("reshards", [True, False], ids=["reshards", "stays"])
def test_accelerates_fsdp2_shards_parameters_over_the_domain(reshards):
    """Accelerate takes it on accelerators only; see fsdp_on_cpus."""
    config = hcp.Config(max_seqlen_per_dp_cp_rank=34, eval_context_parallel_size=3)
    alone = run_ranks(1, train_sharded, hcp.Config(max_seqlen_per_dp_cp_rank=128))[0]
    three = run_ranks(3, train_sharded, config, 1, reshards)
    for losses, mean, _ in three:
        assert losses == pytest.approx(alone[0], abs=1e-9)
        assert mean == pytest.approx(alone[1], abs=1e-9)
    assert sum(held for *_, held in three) == alone[2]
    assert max(held for *_, held in three) < alone[2] / 2


def leave_a_step(rank, size):
    """Leave a step of three micro-batches before its last backward, in a loop that goes on."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from hcp.integrations.gathers import gathered_once

    accelerator = Namespace(no_sync=lambda model: contextlib.nullcontext())
    groups, x = hcp.build_process_groups(dp=size), torch.ones(1, 2)
    plan = hcp.plan([4] * 6, ranks=size, max_tokens_per_rank=4)
    samples = [{"tokens": torch.arange(4)} for _ in range(3)]
    for mode in ("break", "raise", "continue"):
        step = hcp.dispatch(plan, samples, [0, 1] * 3, groups)
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        fully_shard(
            model,
            mesh=init_device_mesh("cpu", (size,)),
            reshard_after_forward=False,
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        with contextlib.suppress(ZeroDivisionError):
            for i, _ in enumerate(gathered_once(accelerator, model, step)):
                if i == 1 and mode == "break":
                    break
                if i == 1 and mode == "raise":
                    raise ZeroDivisionError
                if i < 2:
                    model(x).sum().backward()
        optimizer.step()
        steps = 2 if mode == "continue" else 1
        assert model(x).item() == 2 - steps, mode


def test_weights_that_stay_gathered_are_those_of_the_optimizer_after_a_step_is_left():
    run_ranks(2, leave_a_step)


def keep_some_gathered(rank, size):
    """Whether two layers are gathered after each backward of two steps. A user's first layer does
    not reshard after a backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from hcp.integrations.gathers import gathered_once

    accelerator = Namespace(no_sync=lambda model: contextlib.nullcontext())
    mesh, x = init_device_mesh("cpu", (size,)), torch.ones(1, 2)
    groups = hcp.build_process_groups(dp=size)
    plan = hcp.plan([4] * 4, ranks=size, max_tokens_per_rank=4)
    samples = [{"tokens": torch.arange(4)} for _ in range(2)]
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    model[0].set_reshard_after_backward(False)
    gathered = []
    for _ in range(2):
        step = hcp.dispatch(plan, samples, [0, 1] * 2, groups)
        for _ in gathered_once(accelerator, model, step):
            model(x).sum().backward()
            gathered.append([type(layer.weight).__name__ == "Parameter" for layer in model])
        gathered.append([type(layer.weight).__name__ == "Parameter" for layer in model])
    return gathered


def test_a_module_that_does_not_reshard_after_a_backward_is_as_before_after_a_step():
    for gathered in run_ranks(2, keep_some_gathered):
        assert gathered == [[True, True], [True, False], [False, False]] * 2


@pytest.mark.parametrize(
    "options",
    [
        {"sequence_packing_scheduler": "static_cp"},
        {"eval_context_parallel_size": 1},
    ],
    ids=["static", "dynamic"],
)
def test_a_parallelism_config_that_asks_for_cp_is_understood(options):
    """Accelerate shards over all ranks of its mesh, and hcp spreads the sequences."""
    alone = run_ranks(1, train_sharded, hcp.Config(max_seqlen_per_dp_cp_rank=128))[0]
    config = hcp.Config(max_seqlen_per_dp_cp_rank=52, **options)
    two = run_ranks(2, train_sharded, config, 2)
    for losses, mean, _ in two:
        assert losses == pytest.approx(alone[0], abs=1e-9)
        assert mean == pytest.approx(alone[1], abs=1e-9)
    assert sum(held for *_, held in two) == alone[2]


def asking_for_cp(size, **says):
    return Namespace(
        **{
            "parallelism_config": Namespace(cp_size=size, sp_size=1, tp_size=1),
            "gradient_accumulation_steps": 1,
            "distributed_type": "DistributedType.FSDP",
            **says,
        }
    )


def test_a_cp_size_that_contradicts_the_configuration_or_comes_too_late_is_refused():
    from hcp.integrations.accelerate import check_accelerator, with_cp_size_of

    config = hcp.Config(8, sequence_packing_scheduler="static_cp", context_parallel_size=4)
    with pytest.raises(ValueError, match="context_parallel_size is 4, expected 2, the cp_size of"):
        with_cp_size_of(asking_for_cp(2), config)
    with pytest.raises(ValueError, match="has prepared a model for its own cp_size 2, expected a"):
        with_cp_size_of(asking_for_cp(2, _cp_context=print), hcp.Config(8))
    asking = asking_for_cp(2)
    asking.parallelism_config.sp_size = 2
    with pytest.raises(ValueError, match=r"parallelism_config\.sp_size is 2, expected 1"):
        check_accelerator(asking, takes_cp=True)


def test_fsdp_1_is_warned_of_once(caplog):
    from hcp.integrations import accelerate as ours

    ours._warn_of_fsdp1.cache_clear()  # of this process, which other tests use
    with caplog.at_level("WARNING", logger="hcp"):
        for version in (2, 1, 1):
            says = Namespace(fsdp_plugin=Namespace(fsdp_version=version))
            ours.check_accelerator(asking_for_cp(1, state=says))
    assert len(caplog.messages) == 1
    assert "shards by FSDP 1, under which hcp was not tested: say fsdp" in caplog.messages[0]


def warn_of_a_barrier(rank, size):
    """What is logged of a loader that knows no model, for one that is sharded by hand."""
    from accelerate import Accelerator
    from torch.distributed.fsdp import fully_shard

    import hcp.integrations.barrier as ours
    from hcp.integrations.accelerate import ContextParallel

    as_torchrun(size)
    ours._warn_of_the_barrier.cache_clear()  # of this process, which other tests use
    parallel = ContextParallel(Accelerator(cpu=True), hcp.Config(max_seqlen_per_dp_cp_rank=64))
    model, messages = fully_shard(Model()), []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("hcp").addHandler(handler)
    for _ in range(2):
        step = next(iter(parallel.train_loader(documents([5, 6]), global_batch_size=2)))
        for _ in parallel.micro_batches(model, step):
            pass
    told = parallel.train_loader(documents([5, 6]), global_batch_size=2, model=model)
    evaluated = parallel.eval_loader(documents([5, 6]), global_batch_size=2, model=model)
    syncs = next(iter(told)).plan.sync, {cp.plan.sync for cp, _ in evaluated}
    logging.getLogger("hcp").removeHandler(handler)
    return messages, syncs


def test_a_loader_that_is_not_told_of_sharded_parameters_is_warned_of_once():
    for messages, syncs in run_ranks(2, warn_of_a_barrier):
        (message,) = messages
        assert "the plan lets ranks wait at the end of a step only" in message
        assert syncs == ("micro_batch", {"micro_batch"})


def ask_for_fsdp_on_a_cpu(rank, size):
    from accelerate import Accelerator, PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    from hcp.integrations.accelerate import ContextParallel

    as_torchrun(size)
    PartialState(cpu=True)
    before = os.environ.pop("ACCELERATE_USE_FSDP", None)
    try:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        with pytest.raises(ValueError, match=r"asks for FSDP and uses MULTI_CPU, expected FSDP"):
            ContextParallel(Accelerator(cpu=True, fsdp_plugin=plugin), hcp.Config(8))
    finally:
        os.environ.pop("ACCELERATE_USE_FSDP", None)
        if before is not None:
            os.environ["ACCELERATE_USE_FSDP"] = before


def test_fsdp_that_accelerate_would_leave_out_is_refused():
    run_ranks(2, ask_for_fsdp_on_a_cpu)


def refuse(rank, size):
    from accelerate import Accelerator

    from hcp.integrations.accelerate import ContextParallel, check_accelerator

    config = hcp.Config(max_seqlen_per_dp_cp_rank=8)
    as_torchrun(size)
    with pytest.raises(ValueError, match="gradient_accumulation_steps is 3, expected 1: the plan"):
        ContextParallel(Accelerator(cpu=True, gradient_accumulation_steps=3), config)
    as_torchrun(size)
    accelerator = Accelerator(cpu=True)
    parallel = ContextParallel(accelerator, config)
    with pytest.raises(
        ValueError, match=r"the dataset is a .*, expected an iterable that starts anew"
    ):
        parallel.train_loader(iter(documents(TRAINING)), global_batch_size=8)
    with pytest.raises(ValueError, match="no batch of 8, expected at least one: lower"):
        parallel.train_loader(documents([5]), global_batch_size=8, drop_last=True)
    loader = parallel.train_loader(documents([5, 6, 7]), global_batch_size=2)
    loader.dataset.append({"input_ids": torch.tensor([5])})
    with pytest.raises(ValueError, match="the dataset has 4 samples, expected 3, as when the loa"):
        next(iter(loader))
    accelerator.gradient_accumulation_steps = 2
    with pytest.raises(ValueError, match="gradient_accumulation_steps is 2, expected 1: the plan"):
        next(parallel.micro_batches(None, None))
    with pytest.raises(ValueError, match="the state has seed 4, expected 0: make the loader"):
        loader.load_state_dict(loader.state_dict() | {"seed": 4})
    with pytest.raises(ValueError, match=r"state\.epoch is missing, expected epoch, next, seed"):
        loader.load_state_dict({})

    class Other:
        gradient_accumulation_steps, distributed_type = 1, "DistributedType.DEEPSPEED"
        parallelism_config = None

    with pytest.raises(ValueError, match="uses DeepSpeed, expected DDP or FSDP: for DeepSpeed"):
        check_accelerator(Other())


def test_deepspeed_that_accelerate_would_leave_out_is_refused(monkeypatch):
    from hcp.integrations.accelerate import check_accelerator

    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match="uses DeepSpeed, expected DDP or FSDP: for DeepSpeed"):
        check_accelerator(asking_for_cp(1, distributed_type="DistributedType.MULTI_CPU"))


def schedule(rank, size, split_batches):
    """The learning rates of four steps, under a schedule that Accelerate has prepared."""
    from accelerate import Accelerator, DataLoaderConfiguration

    from hcp.integrations.accelerate import ContextParallel

    as_torchrun(size)
    options = DataLoaderConfiguration(split_batches=split_batches)
    accelerator = Accelerator(cpu=True, dataloader_config=options)
    parallel = ContextParallel(accelerator, hcp.Config(max_seqlen_per_dp_cp_rank=64))
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda updates: 0.5**updates)
    model, optimizer, rates = accelerator.prepare(model, optimizer, rates)
    used = []
    for step in parallel.train_loader(documents([5] * 4), global_batch_size=1):
        for cp, local in parallel.micro_batches(model, step):
            loss = cp.loss(model(cp, local), local.loss_mask, grad_reduce="mean")
            accelerator.backward(loss)
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        rates.step()
    return used


def test_a_prepared_schedule_steps_once_in_an_update_or_is_refused():
    for size, split_batches in ((1, False), (2, True)):
        for rates in run_ranks(size, schedule, split_batches):
            assert rates == [1.0, 0.5, 0.25, 0.125]
    for error in try_ranks(2, schedule, False):
        assert "a prepared LambdaLR steps 2 times in each update, expected once" in error.message


class Experts(torch.nn.Linear):
    """Experts that say how many tokens one takes, and over how many ranks they are spread."""

    def __init__(self, **says):
        super().__init__(1, 1)
        vars(self).update(says)


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ({"capacity_factor": 1.25, "drop_tokens": False}, []),
        ({"moe_z_loss_coeff": 1e-3}, ["Experts.moe_z_loss_coeff is 0.001, so results depend"]),
        ({"moe_aux_loss_coeff": 0.0, "capacity_factor": None}, []),
        ({"config": Namespace(router_aux_loss_coef=0.1, output_router_logits=False)}, []),
        (
            {"config": Namespace(router_aux_loss_coef=0.1, output_router_logits=True)},
            ["Namespace.output_router_logits is True, so results depend"],
        ),
    ],
)
def test_losses_of_experts_that_depend_on_the_plan_are_warned_of_once(says, expected, caplog):
    from hcp.integrations.experts import check_experts

    model = torch.nn.Sequential(Experts(**says))
    with caplog.at_level("WARNING", logger="hcp"):
        check_experts(model)
        check_experts(model)
    assert len(caplog.messages) == len(expected)
    for message, words in zip(caplog.messages, expected, strict=True):
        assert words in message


def drop_in_a_loop(rank, size):
    from accelerate import Accelerator

    from hcp.integrations.accelerate import ContextParallel

    as_torchrun(size)
    parallel = ContextParallel(Accelerator(cpu=True), hcp.Config(max_seqlen_per_dp_cp_rank=8))
    step = next(iter(parallel.train_loader(documents([5, 6, 7]), global_batch_size=1)))
    for says in ({"capacity_factor": 2.0}, {"config": Namespace(expert_capacity=2.0)}):
        model, holder = Experts(**says), "Experts" if "config" not in says else "Namespace"
        said = rf"{holder}\.\w+ is 2\.0, expected experts that take every token: .* to None, or "
        for _ in range(2):
            with pytest.raises(ValueError, match=said):
                next(parallel.micro_batches(model, step))
        vars(model.config if "config" in says else model).update(drop_tokens=False)
        assert len(list(parallel.micro_batches(model, step))) == 1


def test_experts_that_drop_tokens_are_refused():
    run_ranks(1, drop_in_a_loop)


@pytest.mark.parametrize(
    ("says", "waits"),
    [
        ({}, False),
        ({"ep_size": 1}, False),
        ({"ep_size": 4}, True),
        ({"config": Namespace(expert_model_parallel_size=2)}, True),
        ({"config": Namespace(distributed_config=Namespace(ep_size=2))}, True),
    ],
)
def test_experts_over_ranks_are_waited_for_in_every_layer(says, waits):
    from hcp.integrations.loader import waits_in_layers

    assert waits_in_layers(torch.nn.Sequential(Experts(**says))) == waits


def test_zero_3_is_waited_for_in_every_layer():
    from hcp.integrations.loader import waits_in_layers

    model = torch.nn.Linear(1, 1)
    model.weight.ds_id = 0  # as DeepSpeed marks a parameter that it partitions
    assert waits_in_layers(model)


def take_a_rank_for_a_job(rank, size):
    from accelerate import Accelerator

    from hcp.integrations.accelerate import ContextParallel

    as_torchrun(size)
    accelerator, config = Accelerator(), hcp.Config(max_seqlen_per_dp_cp_rank=8)
    if accelerator.num_processes == size:  # 1.11 joins the ranks of a CPU also without cpu=True
        assert ContextParallel(accelerator, config).groups.size("dp_cp") == size
        accelerator = mock.Mock(wraps=accelerator, num_processes=1, parallelism_config=None)
        accelerator.gradient_accumulation_steps = 1
    with pytest.raises(ValueError, match=r"the domain has 2 ranks, expected 1: .*cpu=True to Acc"):
        ContextParallel(accelerator, config)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Accelerate would use the GPUs")
def test_ranks_that_accelerate_does_not_average_over_are_refused():
    run_ranks(2, take_a_rank_for_a_job)


def test_what_accelerate_would_do_beside_hcp_is_refused():
    run_ranks(1, refuse)


def test_accelerates_own_context_parallelism_is_refused_and_can_be_mapped():
    from accelerate import ParallelismConfig
    from accelerate.utils import TorchContextParallelConfig

    from hcp.integrations.accelerate import check_accelerator, config_of

    class Asking:
        gradient_accumulation_steps, distributed_type = 1, "DistributedType.FSDP"
        parallelism_config = ParallelismConfig(
            cp_size=4, cp_handler=TorchContextParallelConfig(cp_comm_strategy="allgather")
        )

    with pytest.raises(ValueError, match=r"cp_size is 4, expected 1: .*config_of\(parallelism_con"):
        check_accelerator(Asking())
    config = config_of(Asking.parallelism_config, max_seqlen_per_dp_cp_rank=64)
    assert config == hcp.Config(
        max_seqlen_per_dp_cp_rank=64,
        sequence_packing_scheduler="static_cp",
        context_parallel_size=4,
        cp_comm_type="all_gather",
    )
    assert {g.degree for g in config.plan([100, 9], 8).micro_batches[0]} == {4}


# ---- the loader ----------------------------------------------------------------------------------


def take(loader, count=None):
    """Rows of each step, on this rank, by content."""
    found = []
    for step in loader:
        found.append(sorted(t for _, local in step for t in local.input_ids.tolist()))
        if len(found) == count:
            break
    return found


def load(rank, size, state=None):
    from hcp.integrations.loader import DynamicCPDataLoader

    loader = DynamicCPDataLoader(
        documents(TRAINING),
        hcp.Config(max_seqlen_per_dp_cp_rank=128),
        hcp.build_process_groups(),
        global_batch_size=4,
        seed=5,
    )
    loader.set_epoch(2)
    if state is not None:
        loader.load_state_dict(state)
        return take(loader), len(loader)
    first = take(loader, 2)
    state = loader.state_dict()
    return first, take(loader), state


def loader_of(**options):
    from hcp.integrations.loader import DynamicCPDataLoader

    return DynamicCPDataLoader(
        documents(TRAINING),
        hcp.Config(max_seqlen_per_dp_cp_rank=128),
        hcp.build_process_groups(),
        global_batch_size=4,
        **options,
    )


def epochs_after(rank, size, used):
    """Steps of epoch 1 by a loader that was never saved, by one that goes on after ``used`` batches
    of epoch 0, and by the saved one itself."""
    fresh, saved, resumed = (loader_of(seed=5) for _ in range(3))
    take(saved, used)
    resumed.load_state_dict(saved.state_dict())
    left = len(take(resumed)) if used < len(saved) else 0
    found = []
    for loader in (fresh, resumed, saved):
        loader.batch_sampler.set_epoch(1)  # as trainers do
        assert loader.state_dict()["next"] == 0
        found.append(take(loader))
    return found, left, len(fresh)


def skipping(rank, size):
    """Batches of epoch 2 after three that are skipped, before its number is set and after."""
    found = []
    for first in ("skip", "set_epoch"):
        loader = loader_of(seed=5)
        calls = {"skip": 3, "set_epoch": 2}
        for name in sorted(calls, key=lambda name: name != first):
            getattr(loader, name)(calls[name])
        found.append(take(loader))
    loader.set_epoch(2)
    return found, take(loader)


def test_batches_are_skipped_whatever_is_said_first():
    (before, after), whole = run_ranks(1, skipping)[0]
    assert before == after == whole[3:]
    assert len(whole) == 5


@pytest.mark.parametrize("used", [5, 2])
def test_a_place_in_an_epoch_says_nothing_of_the_next_one(used):
    (fresh, resumed, saved), left, length = run_ranks(1, epochs_after, used)[0]
    assert length == 5
    assert left == 5 - used
    assert len(fresh) == 5
    assert resumed == fresh
    assert saved == fresh


def end_of_an_epoch(rank, size):
    """The steps after the last one, and what the logger says."""
    loader, said = loader_of(), []
    loader.load_state_dict(loader.state_dict() | {"next": len(loader)})
    with mock.patch.object(logging.getLogger("hcp"), "warning", lambda *text: said.append(text)):
        found = take(loader)
    return found, [text % tuple(values) for text, *values in said]


def test_an_epoch_without_batches_left_is_told():
    found, said = run_ranks(1, end_of_an_epoch)[0]
    assert found == []
    (text,) = said
    assert text.startswith(
        "hcp: no batch of epoch 0 is left: the loader goes on after 5 of its 5 batches. Call"
    )


def in_order(rank, size, orders):
    return take(loader_of(order=lambda epoch: orders[rank][epoch]))


def test_orders_are_compared_between_ranks_and_with_the_dataset():
    whole = list(range(len(TRAINING)))
    back = whole[::-1]
    (found,) = run_ranks(1, in_order, [[back]])
    assert found == run_ranks(1, in_order, [[back]])[0]
    assert found != run_ranks(1, in_order, [[whole]])[0]
    run_ranks(1, in_order, [[[3] * len(whole)]])  # drawn with replacement
    for error in try_ranks(2, in_order, [[whole], [back]]):
        assert error.kind == "HcpError"
        assert "order is another on rank 1" in error.message
        assert "the same seed or order" in error.message
    for wrong, says in (
        (whole[:-1], rf"gives {len(whole) - 1} indices, expected {len(whole)}, the items"),
        (whole * 2, rf"gives {2 * len(whole)} indices, expected {len(whole)}, the items"),
        ([*whole[:-1], -1], "gives indices from -1 to"),
        ([*whole[:-1], len(whole)], f"gives indices from 0 to {len(whole)}, expected indices"),
    ):
        (error,) = try_ranks(1, in_order, [[wrong]])
        assert error.kind == "ValueError"
        assert re.search(says, error.message), error.message


def test_a_loader_goes_on_where_it_was_under_any_number_of_ranks():
    first, again, state = run_ranks(1, load)[0]
    assert len(again) == 5
    assert again[:2] == first  # a loop that was left starts anew
    for size in (1, 2, 3):
        by_rank = run_ranks(size, load, state)
        rests = [rest for rest, _ in by_rank]
        assert {length for _, length in by_rank} == {5}
        assert [sorted(itertools.chain(*steps)) for steps in zip(*rests, strict=True)] == again[2:]


def test_packed_rows_are_the_documents_they_hold():
    from hcp.integrations.documents import packed_documents

    fields = {"tokens": torch.arange(6), "labels": torch.arange(12).view(6, 2)}
    found = list(packed_documents(fields, torch.tensor([0, 1, 2, 0, 0, 1])))
    assert [d["tokens"].tolist() for d in found] == [[0, 1, 2], [3], [4, 5]]
    assert [d["labels"].tolist() for d in found[1:]] == [[[6, 7]], [[8, 9], [10, 11]]]
    assert list(packed_documents({}, torch.tensor([], dtype=torch.int64))) == []


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([1, 2, 3], "positions begin with 1, expected 0"),
        ([0, 1, 3], "position 3 stands 2 tokens after a 0"),
        ([0, 5, 2], "position 5 stands 1 tokens after a 0"),
    ],
)
def test_positions_that_do_not_count_up_are_refused(positions, message):
    from hcp.integrations.documents import packed_documents

    with pytest.raises(ValueError, match=message):
        list(packed_documents({"tokens": torch.zeros(3)}, torch.tensor(positions)))
