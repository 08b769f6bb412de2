"""Rotary embedding of Transformers' models by hcp: in its attention, or by its kernel before it.

A layer gives its argument `position_embeddings` to its module's function, such as
`apply_rotary_pos_emb`. In a model whose rotation is hcp's, a hook puts marked tables in their
place. For these the function hands queries and keys on unrotated, and attention rotates them. Where
a layer computes with what is rotated, as latent attention does, the function rotates by hcp's
kernel. For all other tables, of any model, it is the module's own.

T rows, D head size, W elements of a row of the tables.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from hcp.attention.rotary import Rotary, firsts_before_seconds, rotate, rotate_by_torch
from hcp.integrations.transformers.indexer import is_indexer
from hcp.integrations.unrotated import Unrotated, once, place_of
from hcp.step.handler import ContextParallelHandler

FUNCTIONS = "apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_emb"
_TABLES = "position_embeddings"

Rotator = Literal["attention", "kernel", "model"]
"""The code that rotates a model's queries and keys: hcp's attention, hcp's kernel before it, or the
model's own."""


class UnknownRotaryError(ValueError):
    """A model's rotary embedding is none that hcp computes."""


# ---- what a function computes --------------------------------------------------------------------


class Form(NamedTuple):
    """How a function reads its tables (..., W), which elements it takes as a pair, and where it has
    the rows."""

    widen: Callable[[Tensor], Tensor]
    """Gives an element for each of those that are rotated."""
    interleaved: bool
    gathered: bool = False
    """Neighbours are pairs, and it brings the first elements of all pairs before the second
    ones."""
    rows_first: bool = False
    """It takes (1, T, heads, D) in place of (1, heads, T, D)."""

    def rotary(self, cos: Tensor, sin: Tensor) -> Rotary:
        return Rotary(self.widen(cos), self.widen(sin), self.interleaved)

    def rotated(
        self, given: Tensor, rotary: Rotary, by: Callable[[Tensor, Rotary], Tensor] = rotate
    ) -> Tensor:
        """The result of the function: rotated rows."""
        rows = given[0] if self.rows_first else given[0].transpose(0, 1)
        if self.gathered:
            rows = firsts_before_seconds(rows, rotary.cos.shape[-1])
        turned = by(rows, rotary)
        return (turned if self.rows_first else turned.transpose(0, 1)).unsqueeze(0)


def _as_given(table: Tensor) -> Tensor:
    return table


def _twice(table: Tensor) -> Tensor:
    return torch.cat([table, table], dim=-1)


def _each_twice(table: Tensor) -> Tensor:
    return table.repeat_interleave(2, dim=-1)


def _first_half_each_twice(table: Tensor) -> Tensor:
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1)


def _first_half_twice(table: Tensor) -> Tensor:
    return _twice(table[..., : table.shape[-1] // 2])


FORMS = tuple(
    Form(widen, interleaved, gathered, rows_first)
    for rows_first in (False, True)
    for widen in (_as_given, _twice, _each_twice, _first_half_each_twice, _first_half_twice)
    for interleaved, gathered in ((False, False), (True, False), (False, True))
)

_ROUNDING = 1e-5
"""The tolerance of a comparison: some functions compute in float32 whatever they are given."""

_ROWS, _QUERY_HEADS, _KEY_HEADS = 5, 3, 2


def form_of(
    function: Callable[..., Any],
    head_size: int,
    key_size: int,
    width: int,
    more: tuple[Any, ...] = (),
    options: dict[str, Any] | None = None,
    *,
    complex_table: bool = False,
) -> Form:
    """The form of a function (query, key, cos, sin, ...) that gives both rotated, found by random
    inputs of T rows and tables (1, T, W) whose elements are all different.

    `complex_table`: the function takes cosines and sines as one table of complex numbers.
    Raises UnknownRotaryError for one that computes anything else.
    """
    drawn = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=drawn, dtype=torch.float64)

    cos, sin = draw(_ROWS, width), draw(_ROWS, width)
    tables = (torch.complex(cos, sin),) if complex_table else (cos, sin)
    name, failed = _name(function), []
    for rows_first in (False, True):
        query, key = (
            draw(*((_ROWS, heads) if rows_first else (heads, _ROWS)), size)
            for heads, size in ((_QUERY_HEADS, head_size), (_KEY_HEADS, key_size))
        )
        try:
            with torch.no_grad():
                found = function(query, key, *tables, *more, **(options or {}))
        except Exception as error:
            failed.append(error)
            continue
        for form in FORMS:
            fits = form.rows_first == rows_first
            if fits and _computes(form, (query, key), (cos[0], sin[0]), found):
                return form
    if len(failed) == 2:
        raise UnknownRotaryError(
            f"{name} does not rotate queries and keys by tables of {width} elements: "
            f"{type(failed[0]).__name__}: {failed[0]}"
        ) from failed[0]
    raise UnknownRotaryError(f"{name} rotates in a form that hcp does not know")


def _computes(
    form: Form, given: tuple[Tensor, ...], tables: tuple[Tensor, Tensor], found: Any
) -> bool:
    rotary = form.rotary(*tables)
    if rotary.cos.shape[-1] % 2 or not isinstance(found, tuple) or len(found) != len(given):
        return False
    for rows, result in zip(given, found, strict=True):
        if rotary.cos.shape[-1] > rows.shape[-1] or result.shape != rows.shape:
            return False
        expected = form.rotated(rows, rotary, rotate_by_torch)
        if float((result - expected).abs().max()) > _ROUNDING:
            return False
    return True


# ---- the function of a module --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Marked:
    """Cosines or sines (1, T, W), or complex numbers of both, for which a layer's function leaves
    the rotation to hcp. It has none of a tensor's operations but `to`: a layer that computes with
    them rotates itself."""

    table: Tensor
    rotator: Rotator
    cp: ContextParallelHandler

    def to(self, device: torch.device) -> _Marked:
        return _Marked(self.table.to(device), self.rotator, self.cp)


def _by_hcp(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, but for marked tables."""
    forms: dict[Any, Form] = {}

    @functools.wraps(function)
    def apply_rotary_pos_emb(*given: Any, **options: Any) -> Any:
        if _Marked not in map(type, (*given, *options.values())):
            return function(*given, **options)
        query, key, marked, more = _arguments(function, given, options)
        tables = _parts(marked)
        sizes = query.shape[-1], key.shape[-1], tables[0].shape[-1]
        asked = *sizes, len(marked), repr((more, options))
        if asked not in forms:
            of_numbers = len(marked) == 1
            forms[asked] = form_of(function, *sizes, more, options, complex_table=of_numbers)
        form = forms[asked]
        if marked[0].rotator == "attention":
            return _handed_on(function, form, query, key, tables)
        return _rotated(function, form, (query, key), tables, marked[0].cp)

    vars(apply_rotary_pos_emb)[_MADE_BY_HCP] = True
    return apply_rotary_pos_emb


_MADE_BY_HCP = "_hcp_rotates"


def _arguments(
    function: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Tensor, Tensor, tuple[_Marked, ...], tuple[Any, ...]]:
    """query, key, tables and the rest of the positional ones. Takes tables out of options."""
    taken = [*given, *map(options.pop, filter(options.__contains__, ("cos", "sin")))]
    count = 2 + [*map(type, taken)].count(_Marked)
    tables = taken[2:count]
    kinds = (Tensor, Tensor, _Marked, _Marked)[:count]
    fit = len(taken) >= count and all(map(isinstance, taken, kinds)) and _are_one(tables)
    others = *taken[count:], *options.values()
    if not fit or any(map(isinstance, others, repeat(Tensor))):
        names = ", ".join(type(each).__name__ for each in taken)
        raise UnknownRotaryError(
            f"{_name(function)} is called with ({names}), expected query, key, cos and sin, and no "
            "other tensor"
        )
    return taken[0], taken[1], tuple(tables), tuple(taken[count:])


def _are_one(tables: list[Any]) -> bool:
    """Whether these are cosines and sines, or complex numbers of both."""
    complexes = [each.table.is_complex() for each in tables if isinstance(each, _Marked)]
    return complexes in ([False, False], [True])


def _parts(marked: tuple[_Marked, ...]) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, W)."""
    first, last = marked[0].table[0], marked[-1].table[0]
    return (first.real, first.imag) if first.is_complex() else (first, last)


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__name__}"


def _handed_on(
    function: Callable[..., Any], form: Form, query: Tensor, key: Tensor, tables: Any
) -> tuple[Unrotated, Unrotated]:
    if form.gathered or form.rows_first:
        raise UnknownRotaryError(
            f"{_name(function)} rotates in a form that hcp's attention does not know"
        )
    cos, sin = tables

    def rotary_of(cp: ContextParallelHandler) -> Rotary:
        return _rotary_of(form, cos[: cp.rows], sin[: cp.rows], cp)

    return Unrotated(query, rotary_of), Unrotated(key, rotary_of)


def _rotated(
    function: Callable[..., Any],
    form: Form,
    given: tuple[Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    cp: ContextParallelHandler,
) -> tuple[Tensor, Tensor]:
    rotary = _rotary_of(form, *tables, cp)
    rows = tables[0].shape[0]
    for each in given:
        if each.dim() != 4 or (each.shape[0], each.shape[1 if form.rows_first else 2]) != (1, rows):
            raise UnknownRotaryError(
                f"{_name(function)} is given rows of shape {tuple(each.shape)}, expected one "
                f"sequence of {rows}: those of the tables"
            )
    query, key = given
    return form.rotated(query, rotary), form.rotated(key, rotary)


def _rotary_of(form: Form, cos: Tensor, sin: Tensor, cp: ContextParallelHandler) -> Rotary:
    key = form, place_of(cos), place_of(sin)
    return once(cp, key, (cos, sin), lambda: form.rotary(cos, sin).for_kernels(cos.dtype))


# ---- the layers of a model -----------------------------------------------------------------------


class MarkTables:
    """A pre-hook of an attention layer: marks its tables where its attention is `name`, and
    anything of hcp rotates."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rotator: Rotator = "model"

    def __call__(
        self, module: Any, positional: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        tables: Any = keywords.get(_TABLES)
        cp = keywords.get("cp")
        ours = self.rotator != "model" and module.config._attn_implementation == self.name
        if not ours or cp is None or not _are_tables(tables, cp):
            return None
        _install(module)

        mark = functools.partial(_Marked, rotator=self.rotator, cp=cp)
        given = mark(tables) if isinstance(tables, Tensor) else tuple(map(mark, tables))
        return positional, keywords | {_TABLES: given}


def _are_tables(tables: Any, cp: ContextParallelHandler) -> bool:
    """Whether these are cosines and sines (1, T, W) of a micro-batch, or complex numbers of both.
    A compiled model rotates itself: its compiler makes one pass of it."""
    if torch.compiler.is_dynamo_compiling():
        return False
    if isinstance(tables, Tensor):
        return tables.is_complex() and _is_table(tables, cp)
    pair = isinstance(tables, tuple) and len(tables) == 2
    return pair and all(map(_is_table, tables, repeat(cp)))


def _is_table(table: Any, cp: ContextParallelHandler) -> bool:
    if not isinstance(table, Tensor):
        return False
    return table.dim() == 3 and table.shape[:2] == (1, max(1, cp.rows))


def let_rotate(model: nn.Module, name: str, rotator: Rotator) -> bool:
    """Let hcp's attention or kernel rotate where the attention is `name`, in every layer that could
    leave its rotation to them. Returns whether there is one."""
    layers = list(_layers(model))
    for layer in layers:
        _install(layer)
        hooks = list(_hooks(layer))
        if not hooks:
            hooks = [MarkTables(name)]
            layer.register_forward_pre_hook(hooks[0], with_kwargs=True)
        for hook in hooks:
            hook.rotator = rotator
    return bool(layers)


def let_model_rotate(model: nn.Module) -> None:
    """Let every layer rotate by itself."""
    for hook in _hooks(*model.modules()):
        hook.rotator = "model"


def rotator_of(model: nn.Module) -> Rotator:
    """Say what rotates a model's queries and keys."""
    return next((hook.rotator for hook in _hooks(*model.modules())), "model")


def _hooks(*layers: nn.Module) -> Iterator[MarkTables]:
    hooks = (hook for layer in layers for hook in layer._forward_pre_hooks.values())
    return (hook for hook in hooks if isinstance(hook, MarkTables))


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        forward = _forward(module)
        code = getattr(forward, "__code__", None)
        if code is None or not any(name in code.co_names for name in _functions(forward)):
            continue
        if is_indexer(module):  # it rotates by the tables that its layer gives it
            continue
        if _TABLES in inspect.signature(forward).parameters and hasattr(module, "config"):
            yield module


def _forward(module: nn.Module) -> Any:
    return inspect.unwrap(type(module).forward)


def _functions(forward: Any) -> list[str]:
    """The names of the functions that rotate in the module of a layer's class."""
    return [name for name in FUNCTIONS if name in getattr(forward, "__globals__", {})]


def _install(layer: nn.Module) -> None:
    """Replace the functions in the module of a layer's class, once in a process, and those that
    the layer keeps: functions are pickled by name, which only what the module has can be."""
    forward = _forward(layer)
    names, kept = forward.__globals__, vars(layer).get(_KEPT, {})
    for name in _functions(forward):
        if not hasattr(names[name], _MADE_BY_HCP):
            names[name] = _by_hcp(names[name])
        if isinstance(kept.get(name), FunctionType):
            kept[name] = names[name]


_KEPT = "_hidden_kernels"
"""Functions by name, which layers of older Transformers, such as 5.6, keep for its kernels."""
