"""Rotary embedding of Transformers' models in hcp's attention.

A layer takes cosines and sines out of its argument `position_embeddings` and gives them to its
module's function `apply_rotary_pos_emb`, whose results go to attention. In a model that is fused, a
hook puts marked tables in their place; for these the function hands queries and keys on unrotated.
For all others, of any model, it is the module's own.

T rows, D head size, W elements of a row of the tables.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hcp.attention.rotary import Rotary, rotate_by_torch
from hcp.integrations.rotary import Unrotated, once, place_of
from hcp.integrations.transformers.indexer import is_indexer
from hcp.step.handler import ContextParallelHandler

FUNCTION = "apply_rotary_pos_emb"
_TABLES = "position_embeddings"


class UnknownRotaryError(ValueError):
    """A model's rotary embedding is none that hcp's attention computes."""


# ---- what a function computes --------------------------------------------------------------------


class Form(NamedTuple):
    """How a function reads its tables (..., W), and which elements it takes as a pair."""

    widen: Callable[[Tensor], Tensor]
    """Gives an element for each of those that are rotated."""
    interleaved: bool

    def rotary(self, cos: Tensor, sin: Tensor) -> Rotary:
        return Rotary(self.widen(cos), self.widen(sin), self.interleaved)


def _as_given(table: Tensor) -> Tensor:
    return table


def _twice(table: Tensor) -> Tensor:
    return torch.cat([table, table], dim=-1)


def _each_twice(table: Tensor) -> Tensor:
    return table.repeat_interleave(2, dim=-1)


def _first_half_each_twice(table: Tensor) -> Tensor:
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1)


FORMS = tuple(
    Form(widen, interleaved)
    for widen in (_as_given, _twice, _each_twice, _first_half_each_twice)
    for interleaved in (False, True)
)

_ROUNDING = 1e-5
"""Of float32, in which some functions compute whatever they are given."""

_ROWS, _QUERY_HEADS, _KEY_HEADS = 5, 3, 2


def form_of(
    function: Callable[..., Any],
    head_size: int,
    key_size: int,
    width: int,
    more: tuple[Any, ...] = (),
    options: dict[str, Any] | None = None,
) -> Form:
    """The form of a function (query, key, cos, sin, ...) that gives both rotated, found by random
    inputs (1, heads, T, D) and tables (1, T, W) whose elements are all different.

    Raises UnknownRotaryError for one that computes anything else.
    """
    drawn = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=drawn, dtype=torch.float64)

    query, key = draw(_QUERY_HEADS, _ROWS, head_size), draw(_KEY_HEADS, _ROWS, key_size)
    cos, sin = draw(_ROWS, width), draw(_ROWS, width)
    name = f"{function.__module__}.{function.__name__}"
    try:
        with torch.no_grad():
            found = function(query, key, cos, sin, *more, **(options or {}))
    except Exception as error:
        raise UnknownRotaryError(
            f"{name} does not rotate queries and keys by tables of {width} elements: "
            f"{type(error).__name__}: {error}"
        ) from error
    for form in FORMS:
        if _computes(form, (query, key), (cos, sin), found):
            return form
    raise UnknownRotaryError(f"{name} rotates in a form that hcp does not know")


def _computes(
    form: Form, given: tuple[Tensor, ...], tables: tuple[Tensor, Tensor], found: Any
) -> bool:
    rotary = form.rotary(tables[0][0], tables[1][0])
    if rotary.cos.shape[-1] % 2 or not isinstance(found, tuple) or len(found) != len(given):
        return False
    for rows, result in zip(given, found, strict=True):
        if rotary.cos.shape[-1] > rows.shape[-1] or result.shape != rows.shape:
            return False
        expected = rotate_by_torch(rows[0].transpose(0, 1), rotary).transpose(0, 1)
        if float((result[0] - expected).abs().max()) > _ROUNDING:
            return False
    return True


# ---- the function of a module --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Marked:
    """Cosines or sines (1, T, W) for which a layer's function hands on what it is given. It has
    none of a tensor's operations: a layer that computes with them is not fused."""

    table: Tensor


def _handing_on(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, but for marked tables."""
    forms: dict[Any, Form] = {}

    @functools.wraps(function)
    def apply_rotary_pos_emb(*given: Any, **options: Any) -> Any:
        if not any(isinstance(each, _Marked) for each in (*given, *options.values())):
            return function(*given, **options)
        query, key, cos, sin, *more = _arguments(function, given, options)
        sizes = query.shape[-1], key.shape[-1], cos.table.shape[-1]
        asked = *sizes, repr((more, options))
        if asked not in forms:
            forms[asked] = form_of(function, *sizes, tuple(more), options)
        rotary_of = functools.partial(_rotary_of, forms[asked], cos.table, sin.table)
        return Unrotated(query, rotary_of), Unrotated(key, rotary_of)

    vars(apply_rotary_pos_emb)[_MADE_BY_HCP] = True
    return apply_rotary_pos_emb


_MADE_BY_HCP = "_hcp_hands_on"


def _arguments(
    function: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, ...]:
    """query, key, cos, sin and the rest of the positional ones. Takes the four out of options."""
    tensors = (Tensor, Tensor, _Marked, _Marked)
    taken = [*given, *(options.pop(name) for name in ("cos", "sin") if name in options)]
    others = *taken[4:], *options.values()
    fit = len(taken) >= 4 and all(map(isinstance, taken, tensors))
    if not fit or any(isinstance(each, Tensor) for each in others):
        kinds = ", ".join(type(each).__name__ for each in taken)
        raise UnknownRotaryError(
            f"{function.__module__}.{function.__name__} is called with ({kinds}), expected query, "
            "key, cos and sin, and no other tensor"
        )
    return tuple(taken)


def _rotary_of(form: Form, cos: Tensor, sin: Tensor, cp: ContextParallelHandler) -> Rotary:
    def make() -> Rotary:
        rotary = form.rotary(cos[0, : cp.rows], sin[0, : cp.rows])
        return rotary.for_kernels(cos.dtype)

    return once(cp, (form, place_of(cos), place_of(sin)), (cos, sin), make)


# ---- the layers of a model -----------------------------------------------------------------------


class HandTables:
    """A pre-hook of an attention layer: marks its tables where the attention `name` will rotate."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.on = True

    def __call__(
        self, module: Any, positional: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        tables: Any = keywords.get(_TABLES)
        ours = self.on and module.config._attn_implementation == self.name
        if not ours or not _are_tables(tables, keywords.get("cp")):
            return None
        _install(module)
        return positional, keywords | {_TABLES: tuple(map(_Marked, tables))}


def _are_tables(tables: Any, cp: ContextParallelHandler | None) -> bool:
    """Whether these are cosines and sines (1, T, W) of a micro-batch. A compiled model rotates
    itself: its compiler makes one pass of it."""
    if cp is None or not isinstance(tables, tuple) or torch.compiler.is_dynamo_compiling():
        return False
    shape = 1, max(1, cp.rows)
    return len(tables) == 2 and all(
        isinstance(t, Tensor) and t.dim() == 3 and t.shape[:2] == shape for t in tables
    )


def hand_on(model: nn.Module, name: str) -> bool:
    """Let the attention `name` rotate, in every layer that could hand its rotation on. Returns
    whether there is one."""
    layers = list(_layers(model))
    for layer in layers:
        _install(layer)
        hooks = list(_hooks(layer))
        if not hooks:
            hooks = [HandTables(name)]
            layer.register_forward_pre_hook(hooks[0], with_kwargs=True)
        for hook in hooks:
            hook.on = True
    return bool(layers)


def rotate_before(model: nn.Module) -> None:
    """Let every layer rotate by itself."""
    for hook in _hooks(*model.modules()):
        hook.on = False


def is_fused(model: nn.Module) -> bool:
    """Whether hcp's attention rotates for a model."""
    return any(hook.on for hook in _hooks(*model.modules()))


def _hooks(*layers: nn.Module) -> Iterator[HandTables]:
    hooks = (hook for layer in layers for hook in layer._forward_pre_hooks.values())
    return (hook for hook in hooks if isinstance(hook, HandTables))


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        forward = _forward(module)
        code, names = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
        if code is None or FUNCTION not in code.co_names or FUNCTION not in names:
            continue
        if is_indexer(module):  # it scores what it rotates
            continue
        if _TABLES in inspect.signature(forward).parameters and hasattr(module, "config"):
            yield module


def _forward(module: nn.Module) -> Any:
    return inspect.unwrap(type(module).forward)


def _install(layer: nn.Module) -> None:
    """Replace the function in the module of a layer's class, once in a process."""
    names = _forward(layer).__globals__
    if not hasattr(names[FUNCTION], _MADE_BY_HCP):
        names[FUNCTION] = _handing_on(names[FUNCTION])
