"""Pass a micro-batch to a model, and compute its loss."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from transformers import masking_utils

from hcp._words import GradReduce
from hcp.integrations.barrier import warn_of_the_barrier
from hcp.integrations.columns import AXES, IGNORED
from hcp.integrations.linear_cross_entropy import linear_cross_entropy as losses_of_hidden
from hcp.integrations.transformers.image_samples import OF_AXES, has_axes
from hcp.integrations.transformers.loss_function import LossFunction, check_whole_logits
from hcp.integrations.transformers.routers import record_routers, router_aux_loss
from hcp.integrations.transformers.trained_positions import warn_of_positions
from hcp.step.dispatch import LocalBatch
from hcp.step.handler import ContextParallelHandler
from hcp.step.loss import check_grad_reduce


def model_inputs(cp: ContextParallelHandler, local: LocalBatch) -> dict[str, Any]:
    """Return the arguments of a model with hcp attention: `model(**model_inputs(cp, local))`.

    `local.input_ids`: (T,). Models of Transformers cannot compute zero rows, so a rank without rows
    gets one that stands in. No other row sees it, and `causal_lm_losses` leaves it out.
    `local.rope_positions`, (T, 3), if there is one: the positions of three axes.
    """
    positions = cp.at_least_one_row(cp.position_ids).unsqueeze(0)
    if AXES in local:
        axes = cp.at_least_one_row(local[AXES]).T.unsqueeze(1)
        positions = torch.cat([positions.unsqueeze(0), axes])
    return {
        "input_ids": cp.at_least_one_row(local.input_ids).unsqueeze(0),
        "position_ids": positions,
        "use_cache": False,
        "cp": cp,
    }


def causal_lm_outputs(
    model: nn.Module,
    cp: ContextParallelHandler,
    local: LocalBatch,
    inputs: Mapping[str, Any] | None = None,
) -> Any:
    """Return what the model returns. Its logits are (1, T, vocabulary) of this rank's rows, or
    (1, 1, vocabulary) of a row that stands in. `inputs`: the model's arguments, by default
    `model_inputs`."""
    if isinstance(model, FSDPModule):
        warn_of_the_barrier(model, cp.plan)
    whole: Any = _unwrapped(model)
    if AXES not in local:
        most = getattr(whole.config.get_text_config(), "max_position_embeddings", None)
        if isinstance(most, int) and max(cp.layout.lengths, default=0) > most:
            warn_of_positions(whole.config, cp)
    elif not has_axes(whole):
        raise ValueError(
            f"the samples have {AXES!r}, positions of three axes, expected a model of one of "
            f"{sorted(OF_AXES)}: give {type(model).__name__} the position_ids that count tokens"
        )
    _wrap_search()
    _here.skips_search = not whole.config.sub_configs  # parts such as an encoder search as before
    try:
        return model(**(model_inputs(cp, local) if inputs is None else inputs))
    finally:
        _here.skips_search = False


_here = threading.local()


@functools.cache
def _wrap_search() -> None:
    """Let Transformers not look for packed documents in the position ids of a model that is called
    with a handler, once in a process: the layout says where they lie. The host would wait for all
    that a GPU has to do, which then is idle until the next kernels are there."""
    search: Any = getattr(masking_utils, "find_packed_sequence_indices", None)
    if search is None:
        return

    @functools.wraps(search)
    def searched(position_ids: Tensor) -> Tensor | None:
        if not torch.compiler.is_compiling() and getattr(_here, "skips_search", False):
            return None
        found: Tensor | None = search(position_ids)
        return found

    masking_utils.find_packed_sequence_indices = searched


def causal_lm_losses(
    model: nn.Module,
    cp: ContextParallelHandler,
    local: LocalBatch,
    inputs: Mapping[str, Any] | None = None,
    *,
    linear_cross_entropy: bool = False,
) -> Tensor:
    """Return the cross-entropy of each row of this rank, (T,), float32 or wider. `inputs`: see
    `causal_lm_outputs`.

    `linear_cross_entropy`: compute it of the head's inputs, in chunks, so that the logits of all
    rows are never in memory. Raises ImportError without a library that does, and ValueError for a
    model whose head is no `torch.nn.Linear`, or that changes what its head returns.
    """
    if not linear_cross_entropy:
        logits = causal_lm_outputs(model, cp, local, inputs).logits[0, : cp.rows]
        return losses_of(logits, local.labels)
    return _losses_by_the_head(model, cp, local, inputs, local.labels, summed=False)


def _summed_losses(
    model: nn.Module,
    cp: ContextParallelHandler,
    local: LocalBatch,
    inputs: Mapping[str, Any] | None,
) -> Tensor:
    """The losses of `causal_lm_losses` by the head, all of them in the first row: (T,). `loss_mask`
    says which rows count. Liger computes a sum's gradients without its logits a second time."""
    labels = local.labels.masked_fill(~local.loss_mask, IGNORED)
    total = _losses_by_the_head(model, cp, local, inputs, labels, summed=True)
    return F.pad(total, (0, cp.rows - len(total)))


def _losses_by_the_head(
    model: nn.Module,
    cp: ContextParallelHandler,
    local: LocalBatch,
    inputs: Mapping[str, Any] | None,
    labels: Tensor,
    *,
    summed: bool,
) -> Tensor:
    """The head's losses of its rows (T,), or their sum (1,); without rows (0,)."""
    with _losses_for_logits(model, cp.at_least_one_row(labels, IGNORED), summed) as made:
        found: Tensor = causal_lm_outputs(model, cp, local, inputs).logits[0, : cp.rows, 0]
    (losses,) = made
    # FSDP2 rounds what each module returns to its policy's output_dtype, and the root may widen
    # what the head rounded. The losses are those before, and the graph still has what FSDP2 put
    # hooks on: its gradient is zero.
    return torch.where(torch.ones_like(found, dtype=torch.bool), losses[0, : cp.rows, 0], found)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, without DDP or an engine around it."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # type: ignore[assignment]
    return model


def losses_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each row, (T,), float32 or wider, of (T, vocabulary), (T,)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels, reduction="none")


def linear_head(model: nn.Module) -> nn.Linear:
    """Return the layer that makes a model's logits. Raises ValueError unless it is a plain one."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise ValueError(
            f"the head of {type(model).__name__} is {type(head).__name__}, expected "
            "torch.nn.Linear: linear_cross_entropy=True multiplies by its weight"
        )
    if "forward" in vars(head):
        raise ValueError(
            f"the head of {type(model).__name__} has a forward that replaces its class's, expected "
            "torch.nn.Linear's: linear_cross_entropy=True multiplies by its weight"
        )
    return head


@contextlib.contextmanager
def _losses_for_logits(model: nn.Module, labels: Tensor, summed: bool) -> Iterator[list[Tensor]]:
    """Inside this context, a model's logits are its rows' losses (1, T, 1), or their sum (1, 1, 1),
    in the type that FSDP2 lets modules return. Yields a list that gets what the head itself
    returns. `labels`: (T,).

    The head computes them itself: its weight is whole while it is called, also under FSDP.
    """
    model = _unwrapped(model)
    head = linear_head(model)
    made: list[Tensor] = []
    returned: list[Tensor] = []

    def forward(hidden: Tensor) -> Tensor:
        rows = losses_of_hidden(hidden[0], head.weight, labels, head.bias, summed=summed)
        losses = rows.reshape(1, -1, 1).clone()  # FSDP2 warns of views
        made[:] = [losses]
        return losses

    def keep(head: nn.Module, given: object, output: Tensor) -> None:
        returned[:] = [output]

    def check(model: nn.Module, given: object, output: Any) -> None:
        same = returned and output.logits is returned[0]
        rounded = same and returned[0].dtype != made[0].dtype
        if not same or not (rounded or returned[0] is made[0]):
            raise _changes(model)

    hooks = head.register_forward_hook(keep), model.register_forward_hook(check, prepend=True)
    head.forward = forward  # type: ignore[assignment, method-assign]
    try:
        with _refusing_other_outputs(head, model):
            yield made
    finally:
        del head.forward
        for hook in hooks:
            hook.remove()


def _changes(model: nn.Module, hook: str = "") -> ValueError:
    return ValueError(
        f"{type(model).__name__} changes what its head returns, such as by a scale or a cap of "
        f"logits, or by a hook{hook}, expected a model that does not: linear_cross_entropy=False"
    )


@contextlib.contextmanager
def _refusing_other_outputs(head: nn.Module, model: nn.Module) -> Iterator[None]:
    """Inside this context, a forward hook that changes what the head returns is refused. Those of
    FSDP2 may round it, so that another tensor does not show a change."""
    hooks = head._forward_hooks
    before = dict(hooks)
    for number, hook in before.items():
        if not getattr(hook, "__module__", "").startswith("torch.distributed."):
            hooks[number] = _Watched(hook, model)
    try:
        yield
    finally:
        for number in before.keys() & hooks.keys():
            hooks[number] = before[number]


class _Watched:
    """A forward hook, in whose place it is called."""

    def __init__(self, hook: Callable[..., Any], model: nn.Module) -> None:
        self.hook, self.model = hook, model

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        output: Tensor = given[-1]
        version = None if output.is_inference() else output._version
        result = self.hook(module, *given)
        if (result is not None and result is not output) or (
            version is not None and output._version != version
        ):
            raise _changes(self.model, f" ({getattr(self.hook, '__qualname__', self.hook)})")
        return result


def causal_lm_loss(
    model: nn.Module,
    cp: ContextParallelHandler,
    local: LocalBatch,
    *,
    grad_reduce: GradReduce | None = None,
    inputs: Mapping[str, Any] | None = None,
    linear_cross_entropy: bool = False,
    router_aux_loss_coef: float = 0.0,
    loss_function: LossFunction | None = None,
) -> Tensor:
    """Return this micro-batch's share of the mean loss over the whole batch, a scalar to call
    `backward` on.

    `grad_reduce`: "mean" if gradients are averaged over the ranks, as DDP and FSDP do, "sum" if
    they are summed; it has to be said, as to `cp.loss`. `inputs`: the model's arguments, by default
    `model_inputs`; `image_inputs` makes others. `linear_cross_entropy`: see `causal_lm_losses`.
    `router_aux_loss_coef`: of the loss that balances experts, a mean over sequences, see
    `router_aux_loss`. `loss_function`: computes the loss in place of the cross entropy.
    """
    check_grad_reduce(grad_reduce)  # before a forward
    watch = record_routers(model) if router_aux_loss_coef else contextlib.nullcontext()
    with watch as routed:
        if loss_function is not None:
            check_whole_logits(linear_cross_entropy)
            outputs = causal_lm_outputs(model, cp, local, inputs)
            loss = loss_function.share(cp, local, outputs, grad_reduce)
        elif linear_cross_entropy and local.loss_mask.dtype == torch.bool:  # each row counts once
            losses = _summed_losses(model, cp, local, inputs)
            loss = cp.loss(losses, torch.ones_like(losses), grad_reduce=grad_reduce)
        else:
            losses = causal_lm_losses(
                model, cp, local, inputs, linear_cross_entropy=linear_cross_entropy
            )
            loss = cp.loss(losses, local.loss_mask, grad_reduce=grad_reduce)
    if routed is None:
        return loss
    return loss + router_aux_loss_coef * router_aux_loss(cp, routed, grad_reduce=grad_reduce)
