"""What an exchange between ranks cannot be part of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_transformed(*tensors: Tensor) -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is at work."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or _any_dual(tensors)


def _any_dual(tensors: Sequence[Tensor]) -> bool:
    if forward_ad._current_level < 0:  # outside of it there are no tangents
        return False
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)  # type: ignore[no-untyped-call]


def refuse_transforms(name: str, *tensors: Tensor) -> None:
    """Raise NotImplementedError under torch.func and forward-mode differentiation.

    A transform would call an exchange with other shapes, or another number of times, than the peers
    do; and forward mode would lose the tangents.
    """
    if torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"cp.{name} is called under a transform of torch.func (grad, vmap, jvp, ...), expected "
            "none: ranks exchange rows in it; use torch.autograd.grad or backward()"
        )
    if _any_dual(tensors):
        raise NotImplementedError(
            f"cp.{name} is called with dual tensors, expected plain ones: it has no forward-mode "
            "derivative; use torch.autograd.grad or backward()"
        )
