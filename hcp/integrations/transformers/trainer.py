"""Transformers' Trainer with dynamic context parallelism."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import trainer as theirs
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerState
from transformers.trainer_pt_utils import get_length_grouped_indices
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize

from hcp._validate import expect_size
from hcp.evaluation.metrics import Metrics
from hcp.groups.process_groups import ProcessGroups
from hcp.integrations.accelerate import check_accelerator, with_barrier_of
from hcp.integrations.columns import causal_lm_samples
from hcp.integrations.gathers import (
    gathered_once,
    weights_stay,
)
from hcp.integrations.linear_cross_entropy import check_linear_cross_entropy
from hcp.integrations.loader import (
    DynamicCPDataLoader,
    EvalDataLoader,
    Order,
    ToSample,
    check_model_config,
    domain,
    eval_groups,
    eval_layout,
    is_stream,
    samples_of,
)
from hcp.integrations.transformers.attention import (
    check_dropout,
    check_model,
    check_softcap,
    register_hcp_attention,
)
from hcp.integrations.transformers.image_samples import image_fields, image_samples
from hcp.integrations.transformers.images import image_inputs, register_for_images
from hcp.integrations.transformers.loss_function import (
    LossFunction,
    check_whole_logits,
    unweighted,
)
from hcp.integrations.transformers.masks import masks_of
from hcp.integrations.transformers.model import (
    causal_lm_loss,
    causal_lm_losses,
    causal_lm_outputs,
    linear_head,
    losses_of,
    model_inputs,
)
from hcp.integrations.transformers.predictions import Predictions
from hcp.integrations.transformers.registration import Registration
from hcp.integrations.transformers.routers import check_routers
from hcp.planning.cost import CostModel
from hcp.step.config import Config
from hcp.step.dispatch import LocalBatch, Step
from hcp.step.fields import tokens_of
from hcp.step.handler import ContextParallelHandler
from hcp.tools.loggers import LogsMeans

_log = logging.getLogger("hcp")


class Trainer(LogsMeans, transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` for causal language models whose sequences are spread over ranks.

    Each of its batches is a global batch, `per_device_train_batch_size` samples for each rank. It
    is planned, dispatched, and computed in the micro-batches of the plan, with one update. The loss
    is the mean over the tokens of the whole batch, under any plan. Evaluation counts each sample
    once, under the layout `cp.eval_context_parallel_size` if that is given.
    """

    def __init__(
        self,
        *positional: Any,
        cp: Config,
        dynamic_cp: bool = True,
        groups: ProcessGroups | None = None,
        cost: CostModel | None = None,
        to_sample: ToSample | None = None,
        images: bool = False,
        fused_rope: bool = True,
        linear_cross_entropy: bool = False,
        router_aux_loss_coef: float = 0.0,
        global_batch_size: int | None = None,
        **keywords: Any,
    ) -> None:
        """`cp`: limits and options, see `hcp.Config`. `dynamic_cp=False`: one degree for all.
        `groups`: by default, all ranks of the job are one domain. `to_sample`: makes a sample of an
        item of the dataset, in place of a collator. `images`: items have pixel values, as
        `image_samples` takes them. `fused_rope`: see `register_hcp_attention`.
        `linear_cross_entropy`: compute losses without the logits of all rows in memory, where no
        predictions are asked for, see `causal_lm_losses`. `router_aux_loss_coef`: of the loss that
        balances experts in training, a mean over sequences, see `router_aux_loss`.
        `global_batch_size`: samples of one update on all ranks, which may be fewer than ranks; by
        default `per_device_train_batch_size` times the ranks. Other arguments
        are those of `transformers.Trainer`; a `compute_loss_func` sees the rows of this rank, see
        `LossFunction`.

        Sets the model's attention to "hcp". Raises ValueError for options of Transformers' that
        would be wrong, or have no effect, if sequences are spread over ranks."""
        collator = keywords.get("data_collator", positional[2] if len(positional) > 2 else None)
        if collator is not None:
            raise ValueError(
                f"data_collator is a {type(collator).__name__}, expected None: samples are packed, "
                "not padded; give to_sample=, which makes a sample of an item"
            )
        check_model_config(cp)
        if global_batch_size is not None:
            global_batch_size = expect_size(
                "global_batch_size", global_batch_size, "(samples of one update on all ranks)"
            )
        super().__init__(*positional, **keywords)
        self.router_aux_loss_coef = self._coefficient_of_routers(router_aux_loss_coef)
        self.global_batch_size = (
            global_batch_size or self.args.train_batch_size * self.args.world_size
        )
        _check(self)
        check_model(self.model)
        check_softcap(self.model, self.args.device, compute_dtype(self.args, self.model))
        check_dropout(self.model)
        register = register_for_images if images else register_hcp_attention
        if images:
            _check_images(self)
        self._registration = Registration(
            self, self.model, partial(register, self.model, fused_rope=fused_rope)
        )
        cp = with_barrier_of(self.accelerator, cp)
        self.cp_config = cp if dynamic_cp else replace(cp, sequence_packing_scheduler="static_cp")
        self.cp_groups = domain(groups, self.args.world_size, self.args.device)
        self.cp_config.validate(ranks=self.cp_groups.size("dp_cp"))
        self.cp_eval_groups = eval_groups(self.cp_groups, cp)
        self.cp_cost, self.images = cost, images
        self._weights_stay = weights_stay(self.accelerator)
        self.linear_cross_entropy = linear_cross_entropy
        if self.router_aux_loss_coef:
            check_routers(self.model)
        if linear_cross_entropy:
            if self._loss_function is not None:
                check_whole_logits(linear_cross_entropy)
            linear_head(self.model)
            check_linear_cross_entropy(self.args.device)
        self.fields = image_fields(self.model) if images else None
        own = partial(image_samples, self.model) if images else causal_lm_samples
        self.to_sample = to_sample or own
        self.add_callback(LoaderPosition())

    def _coefficient_of_routers(self, given: float) -> float:
        return given

    @property
    def compute_loss_func(self) -> Callable[..., Any] | None:
        """A loss function in place of the cross entropy, which trainers of others set, too."""
        made = self._loss_function
        return None if made is None else made.function

    @compute_loss_func.setter
    def compute_loss_func(self, function: Callable[..., Any] | None) -> None:
        self._loss_function = None if function is None else LossFunction(function)

    def _made_samples(self) -> ToSample:
        """What makes the samples of an item."""
        return self.to_sample if self._loss_function is None else unweighted(self.to_sample)

    # ---- training ----

    def get_train_dataloader(self) -> DynamicCPDataLoader:
        if self.train_dataset is None:
            raise ValueError("train_dataset is missing, expected it to train")
        return DynamicCPDataLoader(
            self.train_dataset,
            self.cp_config,
            self.cp_groups,
            global_batch_size=self.global_batch_size,
            seed=self._data_seed,
            drop_last=self.args.dataloader_drop_last,
            load_workers=self.args.dataloader_num_workers,
            cost=self.cp_cost,
            to_sample=self._made_samples(),
            model=self.model,
            masks=partial(masks_of, self.model),
            fields=self.fields,
            shuffle=self.args.train_sampling_strategy == "random",
            order=self._order(),
        )

    @property
    def _data_seed(self) -> int:
        args = self.args
        seed: int = args.seed if args.data_seed is None else args.data_seed
        return seed

    def _order(self) -> Order | None:
        """Return the order of the samples in each epoch if samples of like length go together."""
        if self.args.train_sampling_strategy != "group_by_length" or is_stream(self.train_dataset):
            return None
        column = self.args.length_column_name
        named = column in (getattr(self.train_dataset, "column_names", None) or ())
        lengths = (
            list(self.train_dataset[column])
            if named
            else [self._length_of(item) for item in self.train_dataset]
        )
        batch, seed = self.global_batch_size, self._data_seed

        def order(epoch: int) -> list[int]:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            grouped: list[int] = get_length_grouped_indices(lengths, batch, generator=generator)
            return grouped

        return order

    def _length_of(self, item: Any) -> int:
        """The tokens of an item of the dataset."""
        return sum(tokens_of(samples_of(self.to_sample, item), self.fields or {}))

    def train(self, *positional: Any, **keywords: Any) -> Any:
        with _skipping():
            return super().train(*positional, **keywords)

    def training_step(
        self, model: nn.Module, inputs: Step, num_items_in_batch: object = None
    ) -> Tensor:
        """Run forward and backward of all micro-batches of a step. Gradients are reduced in the
        last one. Returns the mean loss of the whole batch: the Trainer adds up each rank's own
        value where it does not gather them, such as for `train_loss`."""
        model.train()
        if hasattr(self.optimizer, "train"):  # schedule-free optimizers
            self.optimizer.train()
        total = torch.zeros((), device=self.args.device)
        each = (
            gathered_once(self.accelerator, model, inputs)
            if self._weights_stay
            else inputs.reducing_last(partial(self.accelerator.no_sync, model))
        )
        for cp, local in each:
            with self.compute_loss_context_manager():
                loss = causal_lm_loss(
                    *(model, cp, local),
                    grad_reduce="mean",
                    inputs=self._inputs(cp, local),
                    linear_cross_entropy=self.linear_cross_entropy,
                    router_aux_loss_coef=self.router_aux_loss_coef,
                    loss_function=self._loss_function,
                )
            self.accelerator.backward(loss)
            total = total + loss.detach()
        mean: Tensor = self.accelerator.reduce(total, reduction="mean")
        self._means.add(inputs)
        return mean

    def _inputs(self, cp: ContextParallelHandler, local: LocalBatch) -> dict[str, Any]:
        """Return the model's arguments; images are encoded here, outside of the call."""
        return image_inputs(self.model, cp, local) if self.images else model_inputs(cp, local)

    def floating_point_ops(self, inputs: Step) -> int:
        """Return six operations for each parameter and token of this rank, as Transformers
        counts."""
        return 6 * sum(cp.rows for cp, _ in inputs) * int(self.model.num_parameters())

    # ---- evaluation ----

    def get_eval_dataloader(self, eval_dataset: Any = None) -> EvalDataLoader:
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("eval_dataset is missing, expected it to evaluate")
        return self.get_test_dataloader(dataset)

    def get_test_dataloader(self, test_dataset: Any) -> EvalDataLoader:
        return EvalDataLoader(
            test_dataset,
            self.cp_config,
            self.cp_eval_groups,
            global_batch_size=self.args.eval_batch_size * self.args.world_size,
            cost=self.cp_cost,
            to_sample=self._made_samples(),
            model=self.model,
            masks=partial(masks_of, self.model),
            fields=self.fields,
        )

    def _evaluated(
        self, cp: ContextParallelHandler, local: LocalBatch, predicts: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the sum of the losses of this rank's rows, their number and, if predictions are
        asked for, the logits."""
        inputs, own = self._inputs(cp, local), self._loss_function
        if not predicts and own is None:
            linear = self.linear_cross_entropy
            losses = causal_lm_losses(self.model, cp, local, inputs, linear_cross_entropy=linear)
            return *cp.loss_sum(losses, local.loss_mask), None
        if own is not None:
            check_whole_logits(self.linear_cross_entropy)
        outputs = causal_lm_outputs(self.model, cp, local, inputs)
        logits = outputs.logits[0, : cp.rows]
        if own is None:
            return *cp.loss_sum(losses_of(logits, local.labels), local.loss_mask), logits
        total = own(cp, local, outputs, items=1)
        return total, local.loss_mask.sum(), logits if predicts else None

    @torch.no_grad()
    def evaluation_loop(
        self,
        dataloader: EvalDataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Return the mean loss over the tokens of all samples, equal under every layout. If
        predictions are asked for, every rank gets those of all samples."""
        self._registration.run()
        model = self.model
        model.eval()
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()
        only = self.args.prediction_loss_only
        dataloader.places = not (only if prediction_loss_only is None else prediction_loss_only)
        predictions = Predictions(self.accelerator, self.preprocess_logits_for_metrics)
        with eval_layout(model, self.cp_groups, self.cp_eval_groups) as groups:
            metrics = Metrics(groups)
            metrics.add_sum("loss", 0.0, 0)  # of no sample at all
            for cp, local in dataloader:
                with self.accelerator.autocast():
                    total, tokens, logits = self._evaluated(cp, local, dataloader.places)
                if logits is not None:
                    predictions.add(cp, local, logits)
                metrics.add_sum("loss", total, tokens)
            found = {"loss": metrics.reduce()["loss"].mean}
        count, given, labels = dataloader.num_samples, None, None
        if dataloader.places:
            given, labels = predictions.gather(count)
        if self.compute_metrics is not None and dataloader.places:
            more = self.compute_metrics(EvalPrediction(predictions=given, label_ids=labels))
            found |= denumpify_detensorize(more)
        prefixed = {
            name if name.startswith(f"{metric_key_prefix}_") else f"{metric_key_prefix}_{name}": v
            for name, v in found.items()
        }
        return EvalLoopOutput(
            predictions=given, label_ids=labels, metrics=prefixed, num_samples=count
        )


class LoaderPosition(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Keeps the state of hcp's loader in the Trainer's checkpoints, under the name of this class.

    Transformers counts steps, whatever the samples of each: with a smaller global batch it would
    go on at samples that were trained already."""

    def __init__(self) -> None:
        self.loader: DynamicCPDataLoader | None = None

    def state(self) -> dict[str, Any]:
        saved = {} if self.loader is None else {"saved": self.loader.state_dict()}
        return {"args": {}, "attributes": saved}

    def on_train_begin(
        self, args: Any, state: TrainerState, control: Any, *, train_dataloader: Any, **others: Any
    ) -> None:
        """Raises ValueError where a run resumes with other batches than it was saved with."""
        self.loader = train_dataloader
        kept = state.stateful_callbacks.get(type(self).__name__, {"attributes": {}})
        state.stateful_callbacks[type(self).__name__] = self.state()  # as Transformers expects
        if state.global_step and not args.ignore_data_skip:
            _go_on(train_dataloader, kept["attributes"].get("saved"))


def _go_on(loader: DynamicCPDataLoader, saved: Mapping[str, Any] | None) -> None:
    if saved is None:
        _log.warning(
            "hcp: the checkpoint does not say of which batches its steps were, as one of an older "
            "version: that they are of the same dataset, order and size is not checked"
        )
        return
    if is_stream(loader.dataset) and saved["epoch"]:
        raise ValueError(
            f"the checkpoint is of epoch {saved['epoch']} of a stream, expected 0: Transformers "
            "looks for its place in the first one. TrainingArguments(ignore_data_skip=True) begins "
            "the stream anew"
        )
    try:
        loader.load_state_dict(saved)
    except ValueError as error:
        raise ValueError(
            f"resume_from_checkpoint: {error}. batch_size is per_device_train_batch_size times the "
            "ranks; TrainingArguments(ignore_data_skip=True) begins the epoch anew"
        ) from error


@contextlib.contextmanager
def _skipping() -> Iterator[None]:
    """Inside this context, a resumed epoch starts with hcp's loader at its batch. Accelerate would
    make a loader of torch's of it, and reads the start of a stream again."""
    before = theirs.skip_first_batches

    def skip(loader: Any, num_batches: int = 0) -> Any:
        if not isinstance(loader, DynamicCPDataLoader):
            return before(loader, num_batches)
        loader.skip(num_batches)
        return loader

    theirs.skip_first_batches = skip
    try:
        yield
    finally:
        theirs.skip_first_batches = before


def _check(trainer: Trainer) -> None:
    """Refuse options that would be wrong, or have no effect, if sequences are spread over ranks."""
    args = trainer.args
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        expect_size(f"TrainingArguments.{name}", getattr(args, name), "(samples)")
    _expect(
        args,
        "gradient_accumulation_steps",
        1,
        "the plan has the micro-batches of a step: raise per_device_train_batch_size instead",
    )
    _expect(args, "label_smoothing_factor", 0, "hcp computes the plain cross entropy")
    _expect(
        args,
        "average_tokens_across_devices",
        True,
        "the loss is the mean over the tokens of all ranks",
    )
    if trainer.accelerator.split_batches:
        raise ValueError(
            "accelerator_config.split_batches is True, expected False: "
            "per_device_train_batch_size times the ranks is the global batch"
        )
    if "lomo" in args.optim or args.optim.endswith("layerwise"):
        raise ValueError(
            f"TrainingArguments.optim is {str(args.optim.value)!r}, expected an optimizer that "
            "updates after the backward: a step has several, and this one would update in each"
        )
    if args.train_sampling_strategy == "batch_rebalance":
        raise ValueError(
            "TrainingArguments.train_sampling_strategy is 'batch_rebalance', expected 'random', "
            "'sequential' or 'group_by_length': the plan balances ranks itself"
        )
    _expect(args, "batch_eval_metrics", False, "a rank has rows of sequences in a micro-batch")
    _expect(args, "eval_do_concat_batches", True, "hcp gathers the predictions of all samples")
    _expect(args, "include_for_metrics", [], "hcp gathers predictions and labels")
    _expect(
        args, "include_num_input_tokens_seen", "no", "a rank's share of a step has no input_ids"
    )
    _expect(
        args, "auto_find_batch_size", False, "max_seqlen_per_dp_cp_rank limits what a rank holds"
    )
    _expect(args, "torch_compile", False, "compile layers before you give the model")
    _expect(args, "neftune_noise_alpha", None, "its noise shrinks with the rows that a rank packs")
    for name in ("fp16_full_eval", "bf16_full_eval"):
        _expect(args, name, False, "evaluation runs in the types of training")
    if args.n_gpu > 1:
        raise ValueError(
            f"this process has {args.n_gpu} GPUs, expected one: start one process for each, "
            "with torchrun --nproc-per-node"
        )
    if trainer.model_init is not None:
        raise ValueError(
            "model_init was given, expected None: give the model, whose attention hcp sets"
        )
    for name in ("compute_loss", "prediction_step"):
        expected = _after(type(trainer), name)
        if getattr(type(trainer), name) is not getattr(expected, name):
            raise ValueError(
                f"{type(trainer).__name__}.{name} is a method of its own, expected that of "
                f"{expected.__module__.partition('.')[0]}.{expected.__name__}: hcp's does not call "
                "it. For a loss of your own give compute_loss_func=, override training_step, or "
                "write a loop"
            )
    check_accelerator(trainer.accelerator)


def _check_images(trainer: Trainer) -> None:
    """Refuse what images would break, or what would leave them out."""
    name = type(trainer.model).__name__
    if trainer.args.fsdp:
        raise ValueError(
            f"images=True under TrainingArguments.fsdp, expected DDP: {name} encodes images before "
            "its own call, in which FSDP gathers its parameters"
        )
    if "token_type_ids" in inspect.signature(trainer.model.forward).parameters:
        raise ValueError(
            f"{name} takes token_type_ids: tokens of an image see each other both ways, expected a "
            "model whose images are causal; for others write a loop whose plan has their masks"
        )


def _after(cls: type, name: str) -> type:
    """Return the class whose method hcp's Trainer stands for: the next one that has it."""
    order = cls.__mro__
    return next(c for c in order[order.index(Trainer) + 1 :] if name in vars(c))


def compute_dtype(args: Any, model: nn.Module) -> torch.dtype:
    """Return the dtype of attention: autocast's, or the weights' own."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 else next(model.parameters()).dtype


def _expect(args: Any, name: str, expected: object, hint: str) -> None:
    value = getattr(args, name)
    if value != expected:
        raise ValueError(f"TrainingArguments.{name} is {value!r}, expected {expected!r}: {hint}")
