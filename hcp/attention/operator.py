"""Attention of a layer, differentiable, for compilers as well as without them.

What it computes is in ``hcp.attention.layer``, how keys and gradients travel in
``hcp.attention.key_transfer``.

T rows on this rank, H query heads, G key-value heads, D head size, E head size of values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hcp.attention.kernels import Choice, families
from hcp.attention.key_transfer import NO_TURN, Turn
from hcp.attention.layer import backward, empty_result, forward, run_of
from hcp.exchange.agreement import LayerName
from hcp.exchange.tables import Schedule, kernel_of, schedule_of
from hcp.ops import register_shapes


class Layer(NamedTuple):
    """How a layer attends: its schedule, as a tensor for compiled models and as it was read."""

    words: Tensor
    schedule: Schedule
    choice: Choice

    @classmethod
    def of(cls, words: Tensor) -> Layer:
        _expect_words(words)
        family, softcap = kernel_of(words)
        named = families()
        if not 0 <= family < len(named):
            raise ValueError(f"words names kernel {family}, expected 0 to {len(named) - 1}")
        return cls(words, schedule_of(words), Choice(named[family], softcap))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    layer: Layer,
    scale: float,
    turn: Turn | None,
    number: int,
    name: LayerName = None,
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's rows over the whole sequences: (T, H, D), (T, G, D), (T, G, E) to
    (T, H, E), under the schedule of the layer; and its log-sum-exp (T, H), sinks included.

    With ``turn``, of queries and keys that `ops.rotate` turns, in fewer passes: keys are turned on
    their way into what is sent, and summed gradients are turned back before they are rounded.

    ``number``: of the call in its handler. ``name``: what its caller names the layer by.

    Differentiable once, see :meth:`hcp.ContextParallelHandler.attention`.
    """
    if _watched(query, key, value):
        words = layer.words
        return operator(query, key, value, sinks, words, scale, turn, number=number, name=name)
    # What is no tensor in one argument: autograd looks at each.
    how = layer, scale, turn, number, name
    out, lse = _Attention.apply(query, key, value, sinks, how)  # type: ignore[no-untyped-call]
    return out, lse


def operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    words: Tensor,
    scale: float,
    turn: Turn | None = None,
    *,
    number: int = 0,
    name: LayerName = None,
) -> tuple[Tensor, Tensor]:
    """As ``attention``, for compilers: all that it depends on is in tensors and numbers. A call
    without a number gets the handler's next when it is run."""
    given = query, key, value, sinks, words, scale
    out, lse, *_ = torch.ops.hcp.attention(*given, *(turn or NO_TURN), number, _said(name))
    return out, lse


def _said(name: LayerName) -> str:
    """As operators take it."""
    return "" if name is None else str(name)


_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def _watched(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a compiler, a mode or a kind of tensor is there that must see an operator."""
    return (
        type(query) not in _PLAIN
        or type(key) not in _PLAIN
        or type(value) not in _PLAIN
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.compiler.is_compiling()
    )


class _Attention(torch.autograd.Function):
    """The operator without its dispatch, which would take longer than all else in here."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        how: tuple[Layer, float, Turn | None, int, LayerName],
    ) -> tuple[Tensor, Tensor]:
        layer, scale, turn, number, name = how
        call = number, name
        given = query, key, value, sinks
        with torch._C._AutoDispatchBelowAutograd():
            run = run_of(layer.schedule, *given, scale, layer.choice, turn is not None, *call)
            out, lse, query, key = forward(run, *given, turn, *call)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.given = run, layer.words, scale, turn, call
        ctx.set_materialize_grads(False)  # most calls do not use the log-sum-exp
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        run, words, scale, turn, call = ctx.given
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        given = grad_out, grad_lse, query, key, value, sinks, out, lse
        if torch.is_grad_enabled() or _watched(query, key, value):  # no second derivative
            number, name = torch.tensor([call[0]], device="cpu"), call[1]
            *grads, grad_sinks = torch.ops.hcp.attention_backward(
                *given, words, number, scale, *(turn or NO_TURN), _said(name)
            )
            return *grads, None if sinks is None else grad_sinks, None
        with torch._C._AutoDispatchBelowAutograd():
            return *backward(run, *given, turn, *call), None


# ---- operators -----------------------------------------------------------------------------------


def _expect_words(words: Tensor) -> None:
    if words.dtype != torch.int64 or words.dim() != 1 or words.device.type != "cpu":
        raise ValueError(
            f"words is {words.dtype} of shape {tuple(words.shape)} on {words.device}, expected the "
            "int64 (words,) of a schedule, on cpu"
        )
    if len(words) < 2:
        raise ValueError(f"words has {len(words)} items, expected those of a schedule")


def _expect_tensors(**given: Tensor | None) -> None:
    """A schema lets None through where it asks for a tensor."""
    for name, tensor in given.items():
        if tensor is None:
            raise ValueError(f"{name} is None, expected a tensor")


def _expect_like(
    name: str,
    tensor: Tensor | None,
    like: Tensor,
    sizes: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
) -> None:
    if tensor is None:
        return
    if tuple(tensor.shape) != sizes or tensor.device != like.device or tensor.dtype not in dtypes:
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}, expected "
            f"{' or '.join(map(str, dtypes))} of shape {sizes} on {like.device}"
        )


def _turn_of(cos: Tensor | None, sin: Tensor | None, interleaved: bool) -> Turn | None:
    if cos is None and sin is None:
        return None
    if cos is None or sin is None:
        missing, given = ("cos", "sin") if cos is None else ("sin", "cos")
        raise ValueError(f"{missing} is None, expected a tensor as {given} is, or None for both")
    return Turn(cos, sin, interleaved)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    words: Tensor,
    scale: float,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    number: int = 0,
    name: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, log-sum-exp, queries and keys turned (nothing, where they are not), and the number
    of the call."""
    _expect_tensors(query=query, key=key, value=value, words=words)
    layer, turn, given = (
        Layer.of(words),
        _turn_of(cos, sin, interleaved),
        (query, key, value, sinks),
    )
    call = number or next(layer.schedule.numbers), name or None
    run = run_of(layer.schedule, *given, scale, layer.choice, turn is not None, *call)
    out, lse, turned_query, turned_key = forward(run, *given, turn, *call)
    if turn is None:  # an operator must not give back what it was given
        turned_query, turned_key = query.new_empty(0), key.new_empty(0)
    # A compiler takes the fake's strides for true; kernels have their own.
    numbered = torch.tensor([call[0]], device="cpu")
    return out.contiguous(), lse.contiguous(), turned_query, turned_key, numbered


def _attention_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    words: Tensor,
    scale: float,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *call: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shapes = [0 if cos is None else rows.shape for rows in (query, key)]
    turned = query.new_empty(shapes[0]), key.new_empty(shapes[1])
    return *empty_result(query, value), *turned, torch.empty(1, dtype=torch.int64, device="cpu")


def _attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    words: Tensor,
    number: Tensor,
    scale: float,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    name: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For turned queries and keys, the gradients of those that were given."""
    _expect_tensors(
        grad_out=grad_out,
        query=query,
        key=key,
        value=value,
        out=out,
        lse=lse,
        words=words,
    )
    layer, turn = Layer.of(words), _turn_of(cos, sin, interleaved)
    given = query, key, value, sinks
    run = run_of(layer.schedule, *given, scale, layer.choice, turn is not None)
    rows, heads, _ = query.shape
    for what, result in (("out", out), ("grad_out", grad_out)):
        _expect_like(what, result, query, (rows, heads, value.shape[2]), (query.dtype,))
    for what, sums in (("lse", lse), ("grad_lse", grad_lse)):
        _expect_like(what, sums, query, (rows, heads), (torch.float32, torch.float64))
    call = int(number), name or None
    *grads, grad_sinks = backward(run, grad_out, grad_lse, *given, out, lse, turn, *call)
    # A compiler was told of strides: see _attention_backward_fake.
    grad_query, grad_key, grad_value = (grad.contiguous() for grad in grads)
    if grad_sinks is None:  # an operator gives a tensor
        grad_sinks = out.new_empty(0)
    return grad_query, grad_key, grad_value, grad_sinks


def _attention_backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
        out.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, sinks, words, ctx.scale, cos, sin, ctx.interleaved, _, ctx.name = inputs
    out, lse, turned_query, turned_key, number = output
    if cos is not None:
        query, key = turned_query, turned_key
    ctx.save_for_backward(query, key, value, sinks, out, lse, words, number, cos, sin)
    ctx.mark_non_differentiable(turned_query, turned_key, number)
    ctx.set_materialize_grads(False)  # most calls do not use the log-sum-exp


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: None
) -> tuple[Any, ...]:
    query, key, value, sinks, out, lse, words, number, cos, sin = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    given = grad_out, grad_lse, query, key, value, sinks, out, lse, words, number, ctx.scale
    *grads, grad_sinks = torch.ops.hcp.attention_backward(
        *given, cos, sin, ctx.interleaved, ctx.name
    )
    return *grads, None if sinks is None else grad_sinks, *[None] * 7


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _refuse_second_derivative(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    raise NotImplementedError(
        "hcp attention was differentiated twice, expected once: it has no second derivative"
    )


# Registered by hand: torch.library.custom_op would import the compiler at the first eager call.
_ROWS = "Tensor query, Tensor key, Tensor value, Tensor? sinks"
_OPTIONS = "float scale, Tensor? cos=None, Tensor? sin=None, bool interleaved=False"
_SAVED = f"Tensor grad_out, Tensor? grad_lse, {_ROWS}, Tensor out, Tensor lse, Tensor words"
_RESULTS = "Tensor, Tensor, Tensor, Tensor"
for _name, _schema, _run, _shapes, _gradient, _keep in (
    (
        "hcp::attention",
        f'({_ROWS}, Tensor words, {_OPTIONS}, int number=0, str name="") -> ({_RESULTS}, Tensor)',
        _attention,
        _attention_fake,
        _backward,
        _save,
    ),
    (
        "hcp::attention_backward",
        f'({_SAVED}, Tensor number, {_OPTIONS}, str name="") -> ({_RESULTS})',
        _attention_backward,
        _attention_backward_fake,
        _refuse_second_derivative,
        _save_nothing,
    ),
):
    torch.library.define(_name, _schema)
    torch.library.impl(_name, ("cpu", "cuda"), _run)
    register_shapes(_name, _shapes)
    torch.library.register_autograd(_name, _gradient, setup_context=_keep)
