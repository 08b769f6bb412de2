"""Queries and keys that a layer hands to hcp's attention unrotated, with the rotation to come.

Attention rotates them in fewer passes of memory: see :mod:`hcp.attention.rotary`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._pytree import register_pytree_node
from torch.utils.weak import WeakIdKeyDictionary

from hcp.attention.rotary import Rotary
from hcp.step.handler import ContextParallelHandler

RotaryOf = Callable[[ContextParallelHandler], Rotary]
"""Gives the rotation of this rank's rows of a micro-batch."""


@dataclass(frozen=True, slots=True, eq=False)
class Unrotated:
    """Queries or keys that attention is to rotate.

    It has none of a tensor's operations. So a layer that computes with what it takes for rotated
    rows fails, and cannot give a wrong result.
    """

    rows: Tensor
    rotary_of: RotaryOf
    """The same object for the queries and the keys of a call."""


# Code that turns the arguments of a call into others of their kind, such as DTensor's local_map,
# finds the rows.
register_pytree_node(
    Unrotated,
    lambda unrotated: ([unrotated.rows], unrotated.rotary_of),
    lambda rows, rotary_of: Unrotated(next(iter(rows)), rotary_of),
)


def take_rotary(
    query: Tensor | Unrotated, key: Tensor | Unrotated, cp: ContextParallelHandler
) -> tuple[Tensor, Tensor, Rotary | None]:
    """Queries, keys, and what attention is to rotate both by: None for tensors."""
    if isinstance(query, Tensor) and isinstance(key, Tensor):
        return query, key, None
    if isinstance(query, Tensor) or isinstance(key, Tensor) or query.rotary_of is not key.rotary_of:
        kinds = type(query).__name__, type(key).__name__
        raise ValueError(
            f"query is {kinds[0]} and key {kinds[1]}, expected both from one rotation or both "
            "rotated: the layer changes one of them before its attention; switch fused_rope off"
        )
    return query.rows, key.rows, query.rotary_of(cp)


_KEPT = 4
"""Rotations that a micro-batch keeps: the layers of a model share few."""

_made: MutableMapping[object, dict[Hashable, tuple[object, Any]]] = WeakIdKeyDictionary()
"""The rotations of a micro-batch by key, each with what it holds."""

_T = TypeVar("_T")


def once(
    of: ContextParallelHandler | Tensor, key: Hashable, holds: object, make: Callable[[], _T]
) -> _T:
    """Return what ``make`` gives. It is made for the first layer of a micro-batch and kept for the
    others.

    ``of``: the micro-batch's handler, or the positions that all its layers get. ``key``: all else
    that it depends on. ``holds``: an object that must live as long as the key means it: one whose
    identity, or whose memory, the key names. It must not be ``of``, which would never go.
    """
    kept = _made.setdefault(of, {})
    if key not in kept:
        if len(kept) == _KEPT:
            del kept[next(iter(kept))]
        kept[key] = holds, make()
    made: _T = kept[key][1]
    return made


def place_of(tensor: Tensor) -> Hashable:
    """A key that is equal for tensors of the same elements in the same memory, while they live."""
    version = 0 if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, version
