"""FSDP2's gathers of weights: of each layer once in a step, in place of once in each micro-batch.

A gather is of all ranks, so that a rank without rows gathers as often as the others. Only fewer
gathers for all help it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hcp.step.dispatch import LocalBatch, Step
from hcp.step.handler import ContextParallelHandler

MicroBatches = Iterator[tuple[ContextParallelHandler, LocalBatch]]


def weights_stay(accelerator: Any) -> bool:
    """Whether the Accelerator's FSDP2 does not reshard after forward: its micro-batches are
    those of ``gathered_once``."""
    return getattr(_fsdp2_of(accelerator), "reshard_after_forward", True) is False


def weights_come_later(accelerator: Any) -> bool:
    """Whether rank 0 alone has the weights, until the Accelerator's FSDP2 shards them."""
    return bool(getattr(_fsdp2_of(accelerator), "cpu_ram_efficient_loading", False))


def _fsdp2_of(accelerator: Any) -> Any:
    """The Accelerator's settings of FSDP2. None: it has none, or FSDP 1."""
    plugin = getattr(getattr(accelerator, "state", None), "fsdp_plugin", None)
    return plugin if getattr(plugin, "fsdp_version", 1) == 2 else None


def give_addresses(model: nn.Module) -> None:
    """Give weights on the device meta memory that nobody touches, so that it stays virtual.
    Accelerate tells the weights of an optimizer apart by addresses: on meta there are none, and
    a rank would train one of its weights."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False, remove_duplicate=False):
            if weight.is_meta and id(weight) not in made:  # tied weights stay tied
                empty = torch.empty_like(weight, device="cpu")
                made[id(weight)] = nn.Parameter(empty, weight.requires_grad)
            if weight.is_meta:
                module.register_parameter(name, made[id(weight)])


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 shards the model's weights."""
    return bool(_sharded(model))


def gathered_once(accelerator: Any, model: nn.Module, step: Step) -> MicroBatches:
    """Yield the micro-batches of a step under FSDP2 that does not reshard after forward. Gradients
    are reduced in the last one only.

    Weights stay gathered from one micro-batch to the next: the end of each forward has room for all
    of them anyway. They are resharded after the step, also where a loop leaves it before the last
    backward: what the optimizer then changes would not reach weights that are still gathered.
    """
    modules = _sharded(model)

    @contextlib.contextmanager
    def before_the_last() -> Iterator[None]:
        with accelerator.no_sync(model), _not_resharding(modules):
            yield

    try:
        yield from step.reducing_last(before_the_last)
    finally:
        for module in modules:
            module.reshard()


def _sharded(model: nn.Module) -> list[Any]:
    """The modules whose weights FSDP2 shards."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextlib.contextmanager
def _not_resharding(modules: Sequence[Any]) -> Iterator[None]:
    """Return a context in which FSDP2 leaves weights gathered after a backward. After it each
    module reshards, or not, as before."""
    groups = [group for module in modules for group in parameter_groups(module)]
    before = [group.reshard_after_backward for group in groups]
    for group in groups:
        group.reshard_after_backward = False
    try:
        yield
    finally:
        for group, reshards in zip(groups, before, strict=True):
            group.reshard_after_backward = reshards


def parameter_groups(module: Any) -> list[Any]:
    """FSDP2's groups of a module's own parameters, which alone say what they do."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    one = state._fsdp_param_group  # of older torch: one, or none
    return [] if one is None else [one]
