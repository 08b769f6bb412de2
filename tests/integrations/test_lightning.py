"""Dynamic context parallelism in Lightning, the real package on gloo ranks."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from support.finetuning import TRAINING, VALIDATION, Model, as_torchrun, documents
from support.ranks import run_ranks
from support.tensorboard_writer import METRICS

import hcp

pytest.importorskip("lightning", reason="pip install '.[lightning]'")

pytestmark = pytest.mark.timeout(600)


def on_ranks(size, case, *args):
    """Every rank imports Lightning, which takes long where there are few cores."""
    return run_ranks(size, case, *args, timeout=280)


def make_module(groups=None):
    from lightning import LightningModule

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()
            self.groups, self.seen, self.rows = groups, set(), []

        def training_step(self, batch, batch_idx):
            cp, local = batch
            self.rows.append(cp.rows)
            return cp.loss(self.model(cp, local), local.loss_mask, grad_reduce="mean")

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.seen.add(None if self.groups is None else self.groups.size("cp"))
            return self.model(*batch)

        test_step = validation_step

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-2)

    return Module()


def make_watch():
    from lightning import Callback

    class Watch(Callback):
        """The logged values, and the gradients of the first step."""

        def __init__(self):
            self.losses, self.evaluations, self.gradient, self.saved = [], [], None, []

        def on_before_optimizer_step(self, trainer, module, optimizer):
            if self.gradient is None:
                self.gradient = module.model.qkv.weight.grad.clone()

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            found = trainer.callback_metrics
            self.losses.append(found["train_loss"].item())
            assert {name for name in found if name.startswith("hcp/")} == METRICS
            expected = batch.stats().metrics()
            assert {name: found[name].item() for name in METRICS} == pytest.approx(expected)
            assert expected["hcp/sequences"] == len(batch.plan.lengths) > 0

        def on_validation_end(self, trainer, module):
            self.evaluations.append(trainer.callback_metrics["val_loss"].item())

    return Watch()


def make_trainer(size, folder, callbacks, **options):
    from lightning import Trainer

    from hcp.integrations.lightning import ContextParallelStrategy

    options = {"strategy": ContextParallelStrategy(process_group_backend="gloo"), **options}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        accelerator="cpu",
        devices=size,
        callbacks=callbacks,
        default_root_dir=str(folder),
        **quiet
        | {"max_steps": 20, "enable_checkpointing": False, "num_sanity_val_steps": 1}
        | options,
    )


def make_loaders(groups, config, model=None):
    from hcp.integrations.loader import DynamicCPDataLoader, EvalDataLoader, eval_groups

    evaluation = eval_groups(groups, config)
    training = DynamicCPDataLoader(
        documents(TRAINING), config, groups, global_batch_size=8, model=model
    )
    validation = EvalDataLoader(
        documents(VALIDATION, 1), config, evaluation, global_batch_size=4, model=model
    )
    return training, validation, evaluation


def train(rank, size, folder, config):
    from hcp.integrations.lightning import EvalContextParallel

    as_torchrun(size)
    warnings.simplefilter("ignore")
    groups = hcp.build_process_groups()
    training, validation, evaluation = make_loaders(groups, config)
    module, watch = make_module(groups), make_watch()
    callbacks = [EvalContextParallel(groups, evaluation), watch]
    trainer = make_trainer(size, folder, callbacks)
    trainer.fit(module, training, validation)
    assert module.groups is groups
    assert module.seen == {evaluation.size("cp")}
    tested = trainer.test(module, validation, verbose=False)[0]["test_loss"]
    return watch.losses, watch.gradient, watch.evaluations, tested, module.rows


def evaluate_sets(rank, size, folder):
    from hcp.integrations.lightning import EvalContextParallel, EvalDataLoader, eval_groups

    as_torchrun(size)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    groups = hcp.build_process_groups()
    config = hcp.Config(max_seqlen_per_dp_cp_rank=64, eval_context_parallel_size=2)
    evaluation = eval_groups(groups, config)
    sets = [
        EvalDataLoader(documents(lengths, seed), config, evaluation, global_batch_size=4)
        for lengths, seed in ((VALIDATION, 1), (VALIDATION[:2], 2))
    ]
    trainer = make_trainer(size, folder, [EvalContextParallel(groups, evaluation)])
    module = make_module(groups)
    apart = [trainer.test(module, own, verbose=False)[0]["test_loss"] for own in sets]
    trainer.test(module, sets, verbose=False)
    logged = trainer.callback_metrics
    return apart, [logged[name].item() for name in ("test_loss", "test_loss/1")]


def test_each_of_several_evaluation_sets_has_a_mean_of_its_own(tmp_path):
    for apart, together in on_ranks(2, evaluate_sets, tmp_path):
        assert together == pytest.approx(apart, rel=1e-6)
        assert apart[0] != pytest.approx(apart[1], rel=1e-3)


@pytest.mark.parametrize(
    "config",
    [
        hcp.Config(max_seqlen_per_dp_cp_rank=34, eval_context_parallel_size=3),
        hcp.Config(max_seqlen_per_dp_cp_rank=34, sequence_packing_scheduler="static_cp"),
    ],
    ids=["dynamic", "static"],
)
def test_twenty_steps_are_those_of_one_rank(config, tmp_path):
    alone = on_ranks(1, train, tmp_path, hcp.Config(max_seqlen_per_dp_cp_rank=128))[0]
    three = on_ranks(3, train, tmp_path, config)
    assert len(alone[0]) == 20
    for losses, gradient, evaluations, tested, _ in three:
        assert losses == pytest.approx(alone[0], abs=1e-9)
        assert (gradient - alone[1]).abs().max() < 1e-12
        assert evaluations == pytest.approx(alone[2], abs=1e-6)  # Lightning logs float32
        assert tested == pytest.approx(alone[3], abs=1e-6)
    assert 0 in itertools.chain(*(result[-1] for result in three)), "no rank was without rows"


def train_sharded(rank, size, folder, config):
    """Losses and evaluations of six steps under FSDP2, and the parameters that this rank holds."""
    from torch.distributed.fsdp import fully_shard

    from hcp.integrations.lightning import ContextParallelFSDP2Strategy, EvalContextParallel

    as_torchrun(size)
    warnings.simplefilter("ignore")
    groups = hcp.build_process_groups()
    module, watch = make_module(), make_watch()

    def configure_model(module):
        if not hasattr(module, "sharded"):
            module.sharded = fully_shard(module.model, mesh=module.device_mesh["data_parallel"])

    def on_before_optimizer_step(trainer, module, optimizer):
        if watch.gradient is None:
            watch.gradient = module.model.qkv.weight.grad.full_tensor().clone()
            watch.held = sum(p.to_local().numel() for p in module.parameters())

    type(module).configure_model = configure_model
    watch.on_before_optimizer_step = on_before_optimizer_step
    training, validation, evaluation = make_loaders(groups, config, module)
    trainer = make_trainer(
        size,
        folder,
        [EvalContextParallel(groups, evaluation), watch],
        strategy=ContextParallelFSDP2Strategy(process_group_backend="gloo"),
        max_steps=6,
    )
    trainer.fit(module, training, validation)
    assert {step.plan.sync for step in training} == {"micro_batch"}  # ranks wait in every layer
    return watch.losses, watch.gradient, watch.evaluations, watch.held


def test_fsdp2_trains_as_one_rank(tmp_path):
    alone = on_ranks(1, train_sharded, tmp_path, hcp.Config(max_seqlen_per_dp_cp_rank=128))[0]
    config = hcp.Config(max_seqlen_per_dp_cp_rank=50, eval_context_parallel_size=2)
    two = on_ranks(2, train_sharded, tmp_path, config)
    assert len(alone[0]) == 6
    for losses, gradient, evaluations, _ in two:
        assert losses == pytest.approx(alone[0], abs=1e-6)  # Lightning logs float32
        assert (gradient - alone[1]).abs().max() < 1e-12
        assert evaluations == pytest.approx(alone[2], abs=1e-6)
    assert sum(held for *_, held in two) == alone[3]
    assert max(held for *_, held in two) < 0.6 * alone[3]


def test_sizes_that_were_not_tested_under_fsdp2_are_refused():
    from hcp.integrations.lightning import ContextParallelFSDP2Strategy

    with pytest.raises(ValueError, match="tensor_parallel_size is 2, expected none: all ranks"):
        ContextParallelFSDP2Strategy(tensor_parallel_size=2)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(documents(TRAINING))


def resume(rank, size, folder, stream):
    """Eight steps at once; from a checkpoint in the middle of an epoch, the last three."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    as_torchrun(size)
    warnings.simplefilter("ignore")
    groups = hcp.build_process_groups()
    config = hcp.Config(max_seqlen_per_dp_cp_rank=64)
    found = []
    for path in (None, str(folder / "at-5.ckpt")):
        training, _, _ = make_loaders(groups, config)
        if stream:  # Lightning takes a step ahead, as it has no length
            training.dataset = Stream()
        keep = ModelCheckpoint(
            folder, "at-{step}", auto_insert_metric_name=False, every_n_train_steps=5, save_top_k=-1
        )
        watch = make_watch()
        options = {"max_steps": 8, "enable_checkpointing": True}
        trainer = make_trainer(size, folder, [keep, watch], **options)
        trainer.fit(make_module(), training, ckpt_path=path)
        found.append(watch.losses)
    return found


@pytest.mark.parametrize("stream", [False, True], ids=["dataset", "stream"])
def test_a_checkpoint_goes_on_in_the_middle_of_an_epoch(stream, tmp_path):
    for straight, resumed in on_ranks(2, resume, tmp_path, stream):
        assert len(straight) == 8
        assert resumed == straight[5:]


def log(rank, size, folder):
    """What a module's own log has after steps of several micro-batches and of one, and their mean;
    beside what it gave."""
    from lightning import Callback

    as_torchrun(size)
    warnings.simplefilter("ignore")
    groups = hcp.build_process_groups()
    config = hcp.Config(max_seqlen_per_dp_cp_rank=128)
    training, _, _ = make_loaders(groups, config)
    module, given, logged = make_module(), [], []
    count = itertools.count()

    def training_step(batch, batch_idx):
        cp, local = batch
        given.append(float(next(count)))
        module.log("own", given[-1], on_step=True, on_epoch=True, batch_size=1)
        return cp.loss(module.model(cp, local), local.loss_mask, grad_reduce="mean")

    class Watch(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            found = trainer.callback_metrics["own_step"].item()
            logged.append((len(batch), found, given[-1]))

    module.training_step = training_step
    trainer = make_trainer(size, folder, [Watch()], max_steps=-1, max_epochs=1)
    trainer.fit(module, training)
    return logged, given, trainer.callback_metrics["own_epoch"].item()


def test_what_a_module_logs_is_of_the_last_micro_batch_and_of_the_epoch(tmp_path):
    ((logged, given, mean),) = on_ranks(1, log, tmp_path)
    assert [count > 1 for count, *_ in logged][-2:] == [True, False]
    assert all(found == last for _, found, last in logged)
    assert mean == pytest.approx(sum(given) / len(given))


def refuse(rank, size, folder):
    from hcp.integrations.lightning import EvalContextParallel

    as_torchrun(size)
    warnings.simplefilter("ignore")
    groups = hcp.build_process_groups()
    config = hcp.Config(max_seqlen_per_dp_cp_rank=128)
    training, validation, _ = make_loaders(groups, config)

    def fit(module, loader=training, **options):
        make_trainer(size, folder, [EvalContextParallel(groups)], **options).fit(module, loader)

    with pytest.raises(ValueError, match="accumulate_grad_batches is 2, expected 1: the plan has"):
        fit(make_module(), accumulate_grad_batches=2)
    with pytest.raises(ValueError, match=r"a batch is a \w+, expected an hcp.Step: train on a Dyn"):
        fit(make_module(), torch.utils.data.DataLoader(torch.arange(4)))
    module = make_module()
    module.model.capacity_factor = 1.5
    with pytest.raises(ValueError, match=r"Model\.capacity_factor is 1\.5, expected experts that"):
        fit(module)
    module = make_module()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="automatic_optimization is False, expected True"):
        fit(module)
    module = make_module()
    module.training_step = lambda batch, batch_idx: {"loss": torch.zeros(())}
    with pytest.raises(ValueError, match="training_step gave a dict, expected a tensor"):
        fit(module)
    for name, run in (("val", "validate"), ("test", "test")):
        partly = {f"limit_{name}_batches": 1}
        trainer = make_trainer(size, folder, [EvalContextParallel(groups)], **partly)
        with pytest.raises(ValueError, match=rf"limit_{name}_batches is 1, expected 1\.0"):
            getattr(trainer, run)(make_module(), validation)
    module.validation_step = lambda batch, batch_idx: None
    with pytest.raises(ValueError, match="gave a NoneType, expected a tensor: the loss of each"):
        make_trainer(size, folder, [EvalContextParallel(groups)]).validate(module, validation)


def test_what_would_be_wrong_is_refused(tmp_path):
    on_ranks(1, refuse, tmp_path)


def fail(rank, size, folder):
    """An error inside the eval layout leaves the module in the training layout."""
    from hcp.integrations.lightning import EvalContextParallel

    as_torchrun(size)
    warnings.simplefilter("ignore")
    groups = hcp.build_process_groups()
    config = hcp.Config(max_seqlen_per_dp_cp_rank=64, eval_context_parallel_size=2)
    _, validation, evaluation = make_loaders(groups, config)
    module = make_module(groups)

    def validation_step(batch, batch_idx):
        assert module.groups is evaluation
        raise ZeroDivisionError

    module.validation_step = validation_step
    trainer = make_trainer(size, folder, [EvalContextParallel(groups, evaluation)])
    with pytest.raises(ZeroDivisionError):
        trainer.validate(module, validation)
    assert module.groups is groups


def test_an_error_restores_the_training_layout(tmp_path):
    on_ranks(2, fail, tmp_path)
