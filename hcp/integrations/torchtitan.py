"""torchtitan: packed attention under context parallelism, with a degree for each micro-batch.

    spec = model_registry("8B", attn_backend="varlen", converters=[PackedContextParallel.Config()])
    config = ContextParallelTrainer.Config(
        model_spec=spec, context_parallel=hcp.Config(max_seqlen_per_dp_cp_rank=16_384), ...
    )
    config.build().train()

torchtitan loads, shards parameters over all ranks, clips, steps and logs as always. In between, the
documents of a step are planned over these ranks, and each micro-batch's handler reaches attention
in the place of attention masks. Importing this file imports torchtitan.
"""

# B rows of the loader, T tokens on this rank, N heads, H head size

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import hcp
from hcp.config import rows_up_to
from hcp.expect import expect_choice

TESTED = ("0.3.0",)
"""Versions of torchtitan that this file has been tested with; others are refused."""


def _check_version() -> None:
    wanted = " or ".join(TESTED)
    try:
        version = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"torchtitan is not installed, expected {wanted}: pip install torchtitan=={TESTED[-1]}"
        ) from None
    if version not in TESTED:
        raise ImportError(
            f"torchtitan is {version}, expected {wanted}, with which hcp.integrations.torchtitan "
            f"was tested: pip install torchtitan=={TESTED[-1]}"
        )


_check_version()

from torchtitan.components.dataloader import DataloaderExhaustedError  # noqa: E402
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper  # noqa: E402
from torchtitan.components.validate import Validator  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.models.common.attention import (  # noqa: E402
    BaseAttention,
    FlexAttention,
    GQAttention,
    VarlenAttention,
)
from torchtitan.models.common.decoder import Decoder  # noqa: E402
from torchtitan.protocols.model import ModelConfigConverter  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

Batch = tuple[dict[str, Tensor], Tensor]
"""What torchtitan's loaders give: {"input", "positions"} and labels, each (B, seq_len)."""


# ---- the model -----------------------------------------------------------------------------------


class PackedAttention(Module):
    """Attention of one rank's rows over whole documents, wherever their other rows are.

    Takes the place of `VarlenAttention` and `FlexAttention`. `attention_masks` is the micro-batch's
    `hcp.ContextParallelHandler`, as `ContextParallelTrainer` gives it to the model.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        window_size: tuple[int, int] = (-1, 0)
        """(left, right), tokens seen before and after a query, -1 being no limit, as for
        `VarlenAttention`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.window_size = config.window_size

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: hcp.ContextParallelHandler,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """q (1, T, N, H), k and v (1, T, G, H) with N a multiple of G; returns (1, T, N, H).

        Rows beyond the handler's are fillers: they attend to nothing and get 0.
        """
        if not isinstance(attention_masks, hcp.ContextParallelHandler):
            raise ValueError(
                f"attention_masks is a {type(attention_masks).__name__}, expected a "
                "ContextParallelHandler: train with hcp.integrations.torchtitan."
                "ContextParallelTrainer"
            )
        rows = attention_masks.rows
        out = attention_masks.attention(
            *(x.squeeze(0)[:rows] for x in (q_BLNH, k_BLNH, v_BLNH)),
            causal=self.window_size[1] == 0,
            window_size=self.window_size,
            softmax_scale=scale,
        )
        fillers = q_BLNH.shape[1] - rows
        return nn.functional.pad(out, (0, 0, 0, 0, 0, fillers)).unsqueeze(0)


class PackedContextParallel(ModelConfigConverter):
    """Puts `PackedAttention` into a model's configuration: one of `converters=` of torchtitan's
    `model_registry`.

    Raises ValueError for models whose attention does more than grouped-query attention that is
    causal, or a sliding window, within each document.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        pass

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Module.Config) -> Module.Config:
        """The same configuration with other inner attention."""
        name = type(model_config).__qualname__
        if not isinstance(model_config, Decoder.Config):
            raise ValueError(f"the model's configuration is {name}, expected that of a Decoder")
        if model_config._owner.get_attention_masks is not Decoder.get_attention_masks:
            raise ValueError(
                f"{name}'s model makes attention masks of its own, expected those of Decoder: "
                "causal within each document"
            )
        for fqn, attention, _, _ in model_config.traverse(BaseAttention.Config):
            attention.inner_attention = _packed(f"{name}.{fqn}", attention)
        return model_config


def _packed(place: str, attention: BaseAttention.Config) -> PackedAttention.Config:
    if type(attention) is not GQAttention.Config:
        raise ValueError(
            f"{place} is {type(attention).__qualname__}, expected GQAttention.Config: "
            "other attention was not tested"
        )
    inner = attention.inner_attention
    if isinstance(inner, VarlenAttention.Config):
        return PackedAttention.Config(window_size=inner.window_size)
    if isinstance(inner, FlexAttention.Config):
        return PackedAttention.Config()
    raise ValueError(
        f"{place}.inner_attention is {type(inner).__qualname__}, expected that of "
        "attn_backend='varlen' or 'flex'"
    )


# ---- documents -----------------------------------------------------------------------------------


def documents_of(inputs: dict[str, Tensor], labels: Tensor) -> list[dict[str, Tensor]]:
    """The documents of a loader's batch, each a sample of `hcp.dispatch`.

    A document starts where `positions` is 0. Raises ValueError for inputs that are not tokens and
    positions, and for positions that do not count up.
    """
    if set(inputs) != {"input", "positions"}:
        raise ValueError(f"the loader gives {sorted(inputs)}, expected input and positions")
    documents = []
    for tokens, positions, targets in zip(
        inputs["input"], inputs["positions"], labels, strict=True
    ):
        starts = (positions == 0).nonzero().flatten().tolist()
        if positions.numel() and starts[:1] != [0]:
            raise ValueError(f"positions begin with {int(positions[0])}, expected 0")
        for start, end in itertools.pairwise([*starts, len(positions)]):
            if int(positions[end - 1]) != end - 1 - start:
                raise ValueError(
                    f"position {int(positions[end - 1])} stands {end - 1 - start} tokens after a "
                    "0, expected positions that count up from 0 in each document"
                )
            documents.append(
                {
                    "tokens": tokens[start:end],
                    "labels": targets[start:end],
                    "loss_mask": (targets[start:end] != IGNORE_INDEX).float(),
                }
            )
    return documents


def _joined(batches: list[Batch]) -> Batch:
    """Batches of one step as one; of none, one without rows."""
    if not batches:
        empty = torch.empty(0, 0, dtype=torch.int64)
        return {"input": empty, "positions": empty}, empty
    inputs = {name: torch.cat([batch[name] for batch, _ in batches]) for name in batches[0][0]}
    return inputs, torch.cat([labels for _, labels in batches])


def _model_inputs(
    cp: hcp.ContextParallelHandler, local: hcp.LocalBatch
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """tokens (1, T), labels (1, T), and the model's keyword arguments.

    torchtitan's layers cannot take 0 rows: a rank without any gets a filler, without a label.
    """
    fillers = int(cp.rows == 0)
    tokens, positions = (
        nn.functional.pad(x, (0, fillers)) for x in (local.tokens, cp.position_ids)
    )
    labels = nn.functional.pad(local.labels, (0, fillers), value=IGNORE_INDEX)
    extra = {"positions": positions.unsqueeze(0), "attention_masks": cp}
    return tokens.unsqueeze(0), labels.unsqueeze(0), extra


# ---- training ------------------------------------------------------------------------------------


class ContextParallelTrainer(Trainer):
    """torchtitan's trainer, whose steps are planned.

    To torchtitan all ranks are data parallel: each loads documents of its own and holds its shard
    of the parameters. Which ranks compute a document is the plan's matter.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        context_parallel: hcp.Config
        """The planner's options, static or dynamic degrees among them. `parallelism.
        context_parallel_degree` stays 1."""

    def __init__(self, config: Config) -> None:
        check_supported(config)
        super().__init__(config)
        self.planner = config.context_parallel
        self.batches_per_step: int = self.gradient_accumulation_steps  # type: ignore[has-type]
        # The batches of a step are planned together: they come as one from batch_generator.
        self.gradient_accumulation_steps = 1
        if config.validator.enable:
            self.validator.use(self.groups, self.planner)

    def init_distributed(self) -> ParallelDims:
        """torchtitan's meshes, and hcp's groups of the same ranks."""
        parallel_dims = super().init_distributed()
        planner, longest = self.config.context_parallel, self.config.training.seq_len
        planner.validate(ranks=parallel_dims.world_size, longest=longest)
        static = planner.sequence_packing_scheduler == "static_cp"
        degree = planner.static_degree(longest, parallel_dims.world_size) if static else 1
        self.groups = hcp.build_process_groups(cp=degree)
        return parallel_dims

    def batch_generator(self, data_iterable: Iterable[Batch]) -> Iterator[Batch]:
        """All batches of a step as one; fewer, or none, once the loader has run out: the step goes
        on with what the other ranks have."""
        batches = super().batch_generator(data_iterable)
        exhausted = False
        while True:
            loaded: list[Batch] = []
            while not exhausted and len(loaded) < self.batches_per_step:
                try:
                    loaded.append(next(batches))
                except DataloaderExhaustedError:
                    exhausted = True
            yield _joined(loaded)

    def forward_backward_step(
        self,
        *,
        input_dict: dict[str, Tensor],
        labels: Tensor,
        global_valid_tokens: Tensor,
    ) -> Tensor:
        """All micro-batches of a step. Returns this rank's part of the mean loss.

        Raises torchtitan's DataloaderExhaustedError on all ranks when none has a document.
        """
        loss = torch.zeros((), device=self.device)
        documents = documents_of(input_dict, labels)
        for cp, local in _dispatch(documents, self.planner, self.groups):
            self.ntokens_seen += cp.rows
            tokens, targets, extra = _model_inputs(cp, local)
            loss += self.fwd_bwd_fn(tokens, targets, global_valid_tokens, extra).detach()
        return loss

    def close(self) -> None:
        """As torchtitan, and without hcp's groups."""
        super().close()
        self.groups.close()


def _dispatch(
    documents: list[dict[str, Tensor]], config: hcp.Config, groups: hcp.ProcessGroups
) -> hcp.Step:
    lengths, sources, samples = hcp.gather_lengths(documents, groups)
    if not lengths:
        raise DataloaderExhaustedError
    plan = config.plan(lengths, groups.size("dp_cp"))
    return hcp.dispatch(plan, samples, sources, groups, **config.dispatch_options())


def check_supported(config: ContextParallelTrainer.Config) -> None:
    """Refuse, before anything starts, what has not been tested or cannot work."""
    parallelism, planner = config.parallelism, config.context_parallel
    if not isinstance(planner.cp_comm_type, str):
        raise ValueError(
            f"context_parallel.cp_comm_type is {planner.cp_comm_type}, expected one for all layers"
        )
    if planner.eval_context_parallel_size == "auto":
        raise ValueError(
            "context_parallel.eval_context_parallel_size is 'auto', expected an integer: the "
            "lengths of a validation set that is a stream are not known before"
        )
    expect_choice("parallelism.spmd_backend", parallelism.spmd_backend, ("partial_dtensor",))
    if parallelism.context_parallel_degree != 1:
        raise ValueError(
            f"parallelism.context_parallel_degree is {parallelism.context_parallel_degree}, "
            "expected 1: hcp spreads documents over the data-parallel ranks; for one degree for "
            "all give hcp.Config(sequence_packing_scheduler='static_cp', context_parallel_size=...)"
        )
    for name in (
        "tensor_parallel_degree",
        "pipeline_parallel_degree",
        "expert_parallel_degree",
    ):
        if getattr(parallelism, name) != 1:
            raise ValueError(
                f"parallelism.{name} is {getattr(parallelism, name)}, expected 1: not supported "
                "together with hcp in torchtitan"
            )
    if not config.training.disable_cuda_graphs:
        raise ValueError(
            "training.disable_cuda_graphs is False, expected True: rows differ from step to step"
        )
    if config.compile.enable and "model" in config.compile.components:
        raise ValueError(
            "compile.components has 'model', expected compile without it: not tested with hcp"
        )
    if isinstance(config.loss, ChunkedLossWrapper.Config):
        raise ValueError(
            "loss is ChunkedLossWrapper.Config, expected one that takes any number of rows, as "
            "CrossEntropyLoss.Config: chunks of a rank without rows are none"
        )
    _check_model(config)
    if config.validator.enable and not isinstance(
        config.validator, ContextParallelValidator.Config
    ):
        raise ValueError(
            f"validator is {type(config.validator).__qualname__}, expected "
            "ContextParallelValidator.Config"
        )


def _check_model(config: ContextParallelTrainer.Config) -> None:
    if config.model_spec is None:
        return
    model = config.model_spec.model
    for fqn, attention, _, _ in model.traverse(BaseAttention.Config):
        if not isinstance(attention.inner_attention, PackedAttention.Config):
            raise ValueError(
                f"{fqn}.inner_attention is {type(attention.inner_attention).__qualname__}, "
                "expected PackedAttention.Config: give converters=[PackedContextParallel.Config()] "
                "to model_registry"
            )
    for i, layer in enumerate(model.layers):
        if getattr(layer, "moe", None) is not None:
            raise ValueError(f"layers.{i}.moe is set, expected dense layers: experts not tested")


# ---- validation ----------------------------------------------------------------------------------


class ContextParallelValidator(Validator):
    """torchtitan's validator under the eval layout: every document has the CP degree
    `context_parallel.eval_context_parallel_size`, by default that of training (1 if dynamic).

    Every layout evaluates the same documents, each once: loaders are those of training. `steps=-1`
    ends when all ranks' loaders have; nobody waits for a shorter one.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        pass

    def use(self, groups: hcp.ProcessGroups, config: hcp.Config) -> None:
        """Called by the trainer, with the training layout and the planner's options."""
        size = config.eval_context_parallel_size or groups.size("cp")
        assert isinstance(size, int)
        self.layout = SimpleNamespace(groups=groups)
        self.train_groups = groups
        self.eval_groups = groups.with_context_parallel(size)
        # Without a backward, a rank holds whatever its share of the longest document is.
        limit = max(config.max_seqlen_per_dp_cp_rank, rows_up_to(self.seq_len, size))
        levels = config.dispatch_options(size)["hierarchical_context_parallel_sizes"]
        self.planner = replace(
            config,
            sequence_packing_scheduler="static_cp",
            context_parallel_size=size,
            hierarchical_context_parallel_sizes=levels,
            max_seqlen_per_dp_cp_rank=limit,
        )

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """The mean loss of the validation set, logged by torchtitan."""
        (model,) = model_parts
        model.eval()
        with hcp.eval_cp_context([model, self.layout], self.train_groups, self.eval_groups):
            loss = self.mean_loss(model)
        model.train()
        self.metrics_processor.log_validation(loss=loss, step=step)

    def mean_loss(self, model: nn.Module) -> float:
        """Under the layout that `self.layout` holds."""
        groups = self.layout.groups
        metrics, loaded = hcp.Metrics(groups), 0
        for documents in self._documents():
            try:
                micro_batches = _dispatch(documents, self.planner, groups)
            except DataloaderExhaustedError:
                break
            loaded += sum(micro_batches.plan.lengths)
            for cp, local in micro_batches:
                self._add(metrics, model, cp, local)
        totals = metrics.reduce()
        if not loaded:
            raise hcp.HcpError("the validation loaders gave no document, expected some")
        if totals["tokens"].total != loaded:
            raise hcp.HcpError(
                f"validation computed {totals['tokens'].total:.0f} tokens, expected the {loaded} "
                "that were loaded"
            )
        return totals["loss"].mean

    def _documents(self) -> Iterator[list[dict[str, Tensor]]]:
        """This rank's, batch after batch; none once its loader has ended."""
        loader = self.dl_config.build(
            dp_world_size=self.dp_world_size,
            dp_rank=self.dp_rank,
            tokenizer=self.tokenizer,
            seq_len=self.seq_len,
            local_batch_size=self.local_batch_size,
        )
        batches = iter(loader)
        steps = itertools.count() if self.config.steps == -1 else range(self.config.steps)
        for _ in steps:
            batch = next(batches, None)
            if batch is not None:
                self.metrics_processor.ntokens_since_last_log += batch[1].numel()
            yield [] if batch is None else documents_of(*batch)

    def _add(
        self,
        metrics: hcp.Metrics,
        model: nn.Module,
        cp: hcp.ContextParallelHandler,
        local: hcp.LocalBatch,
    ) -> None:
        tokens, labels, extra = _model_inputs(cp, local)
        with self.validation_context():
            loss, _ = self.loss_fn(model(tokens, **extra), labels)
        metrics.add_sum("loss", loss, (labels != IGNORE_INDEX).sum())
        metrics.add_sum("tokens", cp.rows, 0)
