"""FSDP2's gathers of weights: of each layer once in a step, in place of once in each micro-batch.

A gather is of all ranks, so that a rank without rows gathers as often as the others. Only fewer
gathers for all help it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from hcp.step.dispatch import LocalBatch, Step
from hcp.step.handler import ContextParallelHandler


def micro_batches(
    accelerator: Any, model: nn.Module, step: Step
) -> Iterator[tuple[ContextParallelHandler, LocalBatch]]:
    """Yield the micro-batches of a step under Accelerate. Gradients are reduced in the last one
    only.

    Where the Accelerator's FSDP2 does not reshard after forward, weights also stay gathered from
    one micro-batch to the next: the end of each forward has room for all of them anyway. They are
    resharded after the step, also where a loop leaves it before the last backward: what the
    optimizer then changes would not reach weights that are still gathered.
    """
    modules = _sharded(model) if weights_stay(accelerator) else []

    @contextlib.contextmanager
    def before_the_last() -> Iterator[None]:
        with accelerator.no_sync(model), _weights_stay(modules):
            yield

    try:
        yield from step.reducing_last(before_the_last)
    finally:
        for module in modules:
            module.reshard()


def weights_stay(accelerator: Any) -> bool:
    """Whether the Accelerator's FSDP2 does not reshard after forward."""
    plugin = getattr(getattr(accelerator, "state", None), "fsdp_plugin", None)
    version = getattr(plugin, "fsdp_version", 1)
    return version == 2 and getattr(plugin, "reshard_after_forward", True) is False


def _sharded(model: nn.Module) -> list[Any]:
    """The modules whose weights FSDP2 shards."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextlib.contextmanager
def _weights_stay(modules: Sequence[Any]) -> Iterator[None]:
    """Return a context in which FSDP2 leaves weights gathered after a backward. The next backward
    outside of it reshards them."""
    for module in modules:
        module.set_reshard_after_backward(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_reshard_after_backward(True, recurse=False)
