"""FSDP2's gathers of weights: of each layer once in a step, in place of once in each micro-batch.

A gather is of all ranks, so that a rank without rows gathers as often as the others. Only fewer
gathers for all help it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def without_reduction(accelerator: Any, model: nn.Module) -> Iterator[None]:
    """Return a context for a micro-batch that is not the last of its step, under Accelerate.

    No gradients are reduced. Where the Accelerator's FSDP2 does not reshard after forward, weights
    also stay gathered after backward: the end of each forward has room for all of them anyway.
    """
    plugin = getattr(getattr(accelerator, "state", None), "fsdp_plugin", None)
    version = getattr(plugin, "fsdp_version", 1)
    stays = version == 2 and getattr(plugin, "reshard_after_forward", True) is False
    with accelerator.no_sync(model), weights_stay([model] if stays else []):
        yield


@contextlib.contextmanager
def weights_stay(models: Iterable[nn.Module]) -> Iterator[None]:
    """Return a context in which FSDP2 leaves weights gathered after a backward. The next backward
    outside of it reshards them."""
    from torch.distributed.fsdp import FSDPModule

    inside = [m for model in models for m in model.modules() if isinstance(m, FSDPModule)]
    for module in inside:
        module.set_reshard_after_backward(False, recurse=False)
    try:
        yield
    finally:
        for module in inside:
            module.set_reshard_after_backward(True, recurse=False)
