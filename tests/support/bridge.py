"""Megatron-Bridge's real `pretrain` on this rank, on a CPU: `python -m support.bridge OVERRIDES`.

`python -m support.bridge FILE.py` runs a script of your own instead.

The configuration is that of a toy model. An override is Bridge's own, such as
`train.train_iters=2`; one that ends in .yaml is a file for Bridge to merge. The word `dynamic` asks
for dynamic CP. Two packages that need
a GPU are imported by Bridge whether or not it uses them, and so are some services; empty modules
take their places. Rank 0 prints what happened as one line of JSON, after `REPORT`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import json
import logging
import runpy
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from support import tensorboard_writer
from support.older_python import complete_typing
from support.ranks import run_module

ROWS = 16
"""The length of each sample."""

ABSENT = (
    *("modelopt", "nvidia_resiliency_ext", "fla", "causal_conv1d", "mamba_ssm", "nvdlfw_inspect"),
    *("flashinfer", "fast_hadamard_transform", "nvtx", "multistorageclient", "webdataset"),
    *(
        "megatron.energon",
        "wandb",
        "mlflow",
        "comet_ml",
        "diffusers",
        "qwen_vl_utils",
        "open_clip",
        "nemo_run",
    ),
)
"""Packages that Bridge imports, and that the toy model does not call."""


_FIRST = (
    *("datasets", "peft", "transformers"),
    *(
        f"megatron.core.{name}"
        for name in (
            *("models.gpt.gpt_model", "extensions.transformer_engine", "transformer.moe.moe_layer"),
            *("distributed", "optimizer", "pipeline_parallel"),
        )
    ),
)
"""Modules that look for the absent packages, and do without."""


@dataclass(frozen=True)
class Trained:
    steps: list[float]
    """The loss of each training step."""
    evaluations: list[float]
    """Of the validation set as often as it was evaluated, and last of the test set."""
    layouts: list[list[int]]
    """CP and DP sizes inside each evaluation."""
    after: list[int]
    """The CP size at the end of each step."""
    events: list[str]
    """Bridge's events in order, without those of single steps."""
    seen: list[list[int]]
    """The first tokens of each sample that the ranks of a CP group evaluated, sorted."""
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    """What hcp wrote to TensorBoard of each step."""


def run(ranks: int, *overrides: str, folder: Path) -> Trained:
    done = run_module("support.bridge", *overrides, folder=folder, ranks=ranks)
    assert done.code == 0, done.err[-4000:]
    line = next(each for each in done.out.splitlines() if each.startswith("REPORT"))
    return replace(
        Trained(**json.loads(line.removeprefix("REPORT"))),
        metrics=tensorboard_writer.scalars(done.out),
    )


# ---- packages that are not there -----------------------------------------------------------------


class _Empty(types.ModuleType):
    """A module that has whatever one asks for: classes, or objects that can be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {}) if name[:1].isupper() else mock.MagicMock(name=name)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty module for each of some packages, and for every module in them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if any(f"{name}.".startswith(f"{each}.") for each in self._names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _Empty(spec.name)
        vars(module).update(__path__=[], __version__="1.0")
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def without_gpu_packages() -> None:
    """Let Bridge import what is not installed. Megatron-Core itself first looks for what is."""
    for name in _FIRST:
        importlib.import_module(name)
    names = (*ABSENT, "transformer_engine", "transformer_engine_torch")
    absent = tuple(name for name in names if importlib.util.find_spec(name) is None)
    sys.meta_path.append(_Finder(absent))


@contextlib.contextmanager
def bridge_on_cpu() -> Iterator[None]:
    """Return a context inside which Bridge's `pretrain` runs on the CPU, over Gloo."""
    from megatron.bridge.training import eval as evaluation
    from megatron.bridge.training import initialize, setup, train

    from hcp.integrations.megatron import megatron_on_cpu

    barrier = dist.barrier
    counts = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    cuda: dict[str, Any] = {
        "memory_stats": lambda *args, **options: {},
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda *args: None,
        **{name: (lambda *args, **options: 0) for name in counts},
    }
    on_any = functools.partial(setup.initialize_megatron, allow_no_cuda=True)
    patches = (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.object(setup, "initialize_megatron", on_any),
        mock.patch.object(initialize, "compile_helpers"),  # they are in the wheel
        mock.patch.object(setup, "set_jit_fusion_options"),
        mock.patch.object(dist, "barrier", lambda group=None, device_ids=None: barrier(group)),
        # A function of modelopt, which is absent: no distillation.
        mock.patch.object(evaluation, _SHAPES, return_value=None),
        mock.patch.object(train, _SHAPES, return_value=None),
    )
    with contextlib.ExitStack() as stack:
        for each in (*patches, megatron_on_cpu()):
            stack.enter_context(each)
        yield


_SHAPES = "get_tensor_shapes_adjust_fn_for_distillation"


# ---- the run -------------------------------------------------------------------------------------


def megatrons_layers(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(normalization="RMSNorm")


def layers(config: Any) -> Any:
    from hcp.integrations.megatron import hcp_layer_spec

    return hcp_layer_spec(megatrons_layers(config))


@contextlib.contextmanager
def samples_of_many_lengths() -> Iterator[None]:
    """Return a context inside which samples have a loss up to a row of their own only."""
    from megatron.core.datasets.gpt_dataset import GPTDataset

    get = GPTDataset.__getitem__

    def shorter(self: Any, index: int | None) -> dict[str, Any]:
        sample = get(self, index)
        length = 4 + int(sample["tokens"].sum()) % (ROWS - 3)
        return {**sample, "loss_mask": sample["loss_mask"] * (torch.arange(ROWS) < length)}

    with mock.patch.object(GPTDataset, "__getitem__", shorter):
        yield


def configuration() -> Any:
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training import config as bridge

    model = GPTModelProvider(
        **dict(num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4),
        **dict(num_query_groups=2, seq_length=ROWS, vocab_size=96, normalization="RMSNorm"),
        **dict(gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False),
        **dict(position_embedding_type="rope", attention_dropout=0.0, hidden_dropout=0.0),
        **dict(params_dtype=torch.float32, pipeline_dtype=torch.float32, cp_comm_type="p2p"),
        **dict(use_cpu_initialization=True, make_vocab_size_divisible_by=1),
        **dict(gradient_accumulation_fusion=False, cross_entropy_loss_fusion=False),
        **dict(masked_softmax_fusion=False, bias_activation_fusion=False),
        **dict(bias_dropout_fusion=False, calculate_per_token_loss=True),
        transformer_layer_spec=layers,
    )
    return bridge.ConfigContainer(
        model=model,
        train=bridge.TrainingConfig(train_iters=2, global_batch_size=4, micro_batch_size=1),
        validation=bridge.ValidationConfig(eval_iters=2, eval_interval=1),
        optimizer=bridge.OptimizerConfig(
            **dict(optimizer="adam", lr=1e-2, min_lr=1e-2, params_dtype=torch.float32),
            **dict(bf16=False, fp16=False, use_distributed_optimizer=False, clip_grad=1.0),
        ),
        scheduler=bridge.SchedulerConfig(
            **dict(lr_warmup_iters=0, lr_decay_iters=4, lr_decay_style="constant"),
            **dict(start_weight_decay=0.0, end_weight_decay=0.0),
            weight_decay_incr_style="constant",
        ),
        ddp=bridge.DistributedDataParallelConfig(
            **dict(use_distributed_optimizer=False, overlap_grad_reduce=False),
            **dict(overlap_param_gather=False, average_in_collective=False),
            **dict(check_for_nan_in_grad=False, grad_reduce_in_fp32=True),
        ),
        dist=bridge.DistributedInitConfig(distributed_backend="gloo"),
        dataset=bridge.MockGPTDatasetConfig(
            **dict(random_seed=1, seq_length=ROWS, reset_attention_mask=False),
            **dict(reset_position_ids=False, eod_mask_loss=False, data_sharding=False),
            **dict(num_dataset_builder_threads=1, num_workers=0, dataloader_type="single"),
            path_to_cache="cache",
        ),
        logger=bridge.LoggerConfig(log_interval=1, timing_log_level=0),
        tokenizer=bridge.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=95),
        checkpoint=bridge.CheckpointConfig(),
        rng=bridge.RNGConfig(seed=5, inference_rng_tracker=True),
    )


SEEN: list[list[int]] = []


def forward_step(state: Any, data_iterator: Iterator[dict[str, Any]], model: Any) -> Any:
    """A script's own forward step: one sample, cut by the CP group of the model."""
    from megatron.bridge.training.losses import masked_next_token_loss
    from megatron.bridge.training.utils.pg_utils import get_pg_collection
    from megatron.core.packed_seq_params import PackedSeqParams

    batch, cp = next(data_iterator), get_pg_collection([model]).cp
    rank, size = cp.rank(), cp.size()
    if not model.training and rank == 0:
        SEEN.append(batch["tokens"][0, :3].tolist())

    def own(name: str) -> torch.Tensor:
        chunks = batch[name].chunk(2 * size, -1)
        return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], -1)

    bounds = torch.tensor([0, ROWS], dtype=torch.int32)
    packed = PackedSeqParams(
        **dict(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds),
        **dict(max_seqlen_q=ROWS, max_seqlen_kv=ROWS),
    )
    losses = model(
        *(own("tokens"), own("position_ids"), None), labels=own("labels"), packed_seq_params=packed
    )
    mask = own("loss_mask").float()
    return losses, functools.partial(masked_next_token_loss, mask, check_for_nan_in_loss=False)


def watcher(report: Trained) -> Any:
    """A callback of Bridge's that notes what happens, after those of the run."""
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.utils.pg_utils import get_pg_collection

    def started(context: Any) -> None:
        groups = get_pg_collection(context.model)
        report.layouts.append([groups.cp.size(), groups.dp.size()])

    def ended(context: Any) -> None:
        report.evaluations.append(float(context.total_loss_dict["lm loss"]))

    def stepped(context: Any) -> None:
        report.steps.append(float(context.loss_dict["lm loss"]))
        report.after.append(get_pg_collection(context.model).cp.size())

    notes = {"eval_start": started, "test_start": started, "eval_end": ended, "test_end": ended}
    notes["train_step_end"] = stepped

    def noting(event: str, note: Any) -> Any:
        def noted(self: Any, context: Any) -> None:
            report.events.append(event)
            if note is not None:
                note(context)

        return noted

    quiet = ("train_start", "train_end")
    named = {f"on_{event}": noting(event, notes.get(event)) for event in (*notes, *quiet)}
    return type("Watcher", (Callback,), named)()


def train(overrides: list[str]) -> Trained:
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    from hcp.integrations.megatron import DynamicContextParallel, EvalContextParallel

    files = [each for each in overrides if each.endswith(".yaml")]
    given = [each for each in overrides if "=" in each]
    config = process_config_with_overrides(configuration(), files[0] if files else None, given)
    report = Trained([], [], [], [], [], [])
    callbacks = [watcher(report)]
    if "dynamic" in overrides:
        linear = "linear" in overrides
        callbacks.insert(0, DynamicContextParallel(linear_cross_entropy=linear))
        config.model.transformer_layer_spec = megatrons_layers
    elif config.dist.eval_context_parallel_size is not None:
        callbacks.insert(0, EvalContextParallel())
    dist.init_process_group("gloo")
    with samples_of_many_lengths():
        pretrain(config, forward_step, callbacks=callbacks)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, SEEN)
    report.seen.extend(sorted(itertools.chain(*every)))
    return report


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    complete_typing()
    tensorboard_writer.take_place()
    without_gpu_packages()
    with bridge_on_cpu():
        if sys.argv[1:] and sys.argv[1].endswith(".py"):
            runpy.run_path(sys.argv[1], run_name="__main__")
            return
        report = train(sys.argv[1:])
        if dist.get_rank() == 0:
            print("REPORT" + json.dumps(vars(report)), flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
