"""Attention of a layer as operators of PyTorch, for compilers and whoever else watches operators.

They compute what ``hcp.attention.layer`` does. All that they depend on is in tensors, numbers and
names.

T rows on this rank, H query heads, G key-value heads, D head size, E head size of values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from hcp.attention.kernels import KernelChoice, families
from hcp.attention.layer import backward, empty_result, flat_name, flat_options, forward, layer_of
from hcp.attention.prepared import LayerCall, LayerOptions, prepared_of
from hcp.attention.rotary import Rotary
from hcp.exchange.agreement import LayerName
from hcp.ops import register_shapes


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    options: LayerOptions,
    rotary: Rotary | None,
    number: int = 0,
    name: LayerName = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``layer.attention``. Without a number, a call gets the next of its handler."""
    given = query, key, value, sinks, options.words, *flat_options(options, rotary)
    out, lse, *_ = torch.ops.hcp.attention(*given, number, flat_name(name))
    return out, lse


class Arguments(NamedTuple):
    """What the operator is given. The dispatcher gives it flat, without those at the end that have
    their defaults."""

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None
    words: Tensor
    scale: float
    cos: Tensor | None = None
    sin: Tensor | None = None
    interleaved: bool = False
    family: str = "auto"
    softcap: float = 0.0
    number: int = 0
    name: str = ""


class BackwardArguments(NamedTuple):
    """The same of its backward."""

    grad_out: Tensor
    grad_lse: Tensor | None
    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None
    out: Tensor
    lse: Tensor
    words: Tensor
    number: Tensor
    scale: float
    cos: Tensor | None = None
    sin: Tensor | None = None
    interleaved: bool = False
    family: str = "auto"
    softcap: float = 0.0
    name: str = ""


def _taking(arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a function say that it takes these arguments, one by one, for the operator's schema."""

    def say(run: Callable[..., Any]) -> Callable[..., Any]:
        parameters = [
            inspect.Parameter(
                name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=arguments._field_defaults.get(name, inspect.Parameter.empty),
                annotation=hint,
            )
            for name, hint in get_type_hints(arguments).items()
        ]
        returned = get_type_hints(run)["return"]
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            parameters, return_annotation=returned
        )
        return run

    return say


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


def _call_of(given: Arguments | BackwardArguments, number: int) -> LayerCall:
    if given.family not in families():
        raise ValueError(f"family is {given.family!r}, expected one of {sorted(families())}")
    options = LayerOptions(given.words, given.scale, KernelChoice(given.family, given.softcap))
    rotary = _rotary_of(given.cos, given.sin, given.interleaved)
    prepared = prepared_of(given.words)
    return LayerCall(options, prepared, rotary, number, given.name or None)


def _rotary_of(cos: Tensor | None, sin: Tensor | None, interleaved: bool) -> Rotary | None:
    if cos is None and sin is None:
        return None
    if cos is None or sin is None:
        missing, given = ("cos", "sin") if cos is None else ("sin", "cos")
        raise ValueError(f"{missing} is None, expected a tensor as {given} is, or None for both")
    return Rotary(cos, sin, interleaved)


@_taking(Arguments)
def _attention(*flat: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, log-sum-exp, queries and keys rotated (nothing, where they are not), and the number
    of the call."""
    given = Arguments(*flat)
    query, key, value, words = given.query, given.key, given.value, given.words
    _expect_tensors(query=query, key=key, value=value, words=words)
    call, inputs = _call_of(given, given.number), (query, key, value, given.sinks)
    if not call.number:
        call = call._replace(number=next(call.prepared.numbers))
    layer = layer_of(call, inputs)
    out, lse, rotated_query, rotated_key = forward(layer, call, inputs)
    if call.rotary is None:  # an operator must not give back what it was given
        rotated_query, rotated_key = query.new_empty(0), key.new_empty(0)
    # A compiler takes the fake's strides for true; kernels have their own.
    number = torch.tensor([call.number], device="cpu")
    return out.contiguous(), lse.contiguous(), rotated_query, rotated_key, number


def _attention_fake(*flat: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    given = Arguments(*flat)
    rotated = [
        rows.new_empty(0 if given.cos is None else rows.shape) for rows in (given.query, given.key)
    ]
    number = torch.empty(1, dtype=torch.int64, device="cpu")
    return *empty_result(given.query, given.value), rotated[0], rotated[1], number


@_taking(BackwardArguments)
def _attention_backward(*flat: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the queries and keys that were given, before any rotation."""
    given = BackwardArguments(*flat)
    grad_out, grad_lse, query, key, value, sinks, out, lse, words, number, *_ = given
    _expect_tensors(
        grad_out=grad_out,
        query=query,
        key=key,
        value=value,
        out=out,
        lse=lse,
        words=words,
    )
    call = _call_of(given, int(number))
    layer = layer_of(call._replace(number=0), (query, key, value, sinks))
    rows, heads, _ = query.shape
    for what, result in (("out", out), ("grad_out", grad_out)):
        _expect_like(what, result, query, (rows, heads, value.shape[2]), (query.dtype,))
    for what, sums in (("lse", lse), ("grad_lse", grad_lse)):
        _expect_like(what, sums, query, (rows, heads), (torch.float32, torch.float64))
    attended = query, key, value, out, lse
    *grads, grad_sinks = backward(layer, call, attended, sinks, (grad_out, grad_lse))
    # A compiler was told of strides: see _attention_backward_fake.
    grad_query, grad_key, grad_value = (grad.contiguous() for grad in grads)
    if grad_sinks is None:  # an operator gives a tensor
        grad_sinks = out.new_empty(0)
    return grad_query, grad_key, grad_value, grad_sinks


def _attention_backward_fake(*flat: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = BackwardArguments(*flat)
    query, key, value = (x.new_empty(x.shape) for x in (given.query, given.key, given.value))
    sinks = given.out.new_empty(0) if given.sinks is None else torch.empty_like(given.sinks)
    return query, key, value, sinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, sinks, words, ctx.scale, cos, sin, *options, _, name = inputs
    ctx.options = *options, name  # interleaved, family, softcap
    out, lse, rotated_query, rotated_key, number = output
    if cos is not None:
        query, key = rotated_query, rotated_key
    ctx.save_for_backward(query, key, value, sinks, out, lse, words, number, cos, sin)
    ctx.mark_non_differentiable(rotated_query, rotated_key, number)
    ctx.set_materialize_grads(False)  # most calls do not use the log-sum-exp


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: None
) -> tuple[Any, ...]:
    query, key, value, sinks, out, lse, words, number, cos, sin = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    given = grad_out, grad_lse, query, key, value, sinks, out, lse, words, number, ctx.scale
    *grads, grad_sinks = torch.ops.hcp.attention_backward(*given, cos, sin, *ctx.options)
    return *grads, None if sinks is None else grad_sinks, *[None] * 9


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _refuse_second_derivative(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    raise NotImplementedError(
        "hcp attention was differentiated twice, expected once: it has no second derivative"
    )


# Registered by hand: torch.library.custom_op would import the compiler at the first eager call.
for _name, _run, _shapes, _gradient, _keep in (
    ("hcp::attention", _attention, _attention_fake, _backward, _save),
    (
        "hcp::attention_backward",
        _attention_backward,
        _attention_backward_fake,
        _refuse_second_derivative,
        _save_nothing,
    ),
):
    # A call has a number of its own, which is no size that a compiler could make a symbol of.
    _schema = torch.library.infer_schema(_run, mutates_args=()).replace("SymInt", "int")
    torch.library.define(_name, _schema)
    torch.library.impl(_name, ("cpu", "cuda"), _run)
    register_shapes(_name, _shapes)
    torch.library.register_autograd(_name, _gradient, setup_context=_keep)
