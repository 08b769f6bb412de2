"""Attention of a layer as operators of PyTorch, for compilers and whoever else watches operators.

They compute what ``hcp.attention.layer`` does. All that they depend on is in tensors, numbers and
names.

T rows on this rank, H query heads, G key-value heads, D head size, E head size of values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hcp.attention.kernels import Choice, families
from hcp.attention.layer import (
    Layer,
    backward,
    empty_result,
    forward,
    name_of,
    options_of,
    run_of,
)
from hcp.attention.prepared import prepared_of
from hcp.attention.rotary import Rotary
from hcp.exchange.agreement import LayerName
from hcp.ops import register_shapes


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    layer: Layer,
    rotary: Rotary | None,
    number: int = 0,
    name: LayerName = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``layer.attention``. Without a number, a call gets the next of its handler."""
    given = query, key, value, sinks, layer.words, *options_of(layer, rotary)
    out, lse, *_ = torch.ops.hcp.attention(*given, number, name_of(name))
    return out, lse


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


def _layer_of(words: Tensor, scale: float, family: str, softcap: float) -> Layer:
    if family not in families():
        raise ValueError(f"family is {family!r}, expected one of {sorted(families())}")
    return Layer(words, scale, Choice(family, softcap))


def _rotary_of(cos: Tensor | None, sin: Tensor | None, interleaved: bool) -> Rotary | None:
    if cos is None and sin is None:
        return None
    if cos is None or sin is None:
        missing, given = ("cos", "sin") if cos is None else ("sin", "cos")
        raise ValueError(f"{missing} is None, expected a tensor as {given} is, or None for both")
    return Rotary(cos, sin, interleaved)


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
    family: str = "auto",
    softcap: float = 0.0,
    number: int = 0,
    name: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, log-sum-exp, queries and keys rotated (nothing, where they are not), and the number
    of the call."""
    _expect_tensors(query=query, key=key, value=value, words=words)
    layer, rotary = _layer_of(words, scale, family, softcap), _rotary_of(cos, sin, interleaved)
    prepared, given = prepared_of(words), (query, key, value, sinks)
    call = number or next(prepared.numbers), name or None
    run = run_of(prepared, *given, layer, rotary, *call)
    out, lse, rotated_query, rotated_key = forward(run, *given, rotary, *call)
    if rotary is None:  # an operator must not give back what it was given
        rotated_query, rotated_key = query.new_empty(0), key.new_empty(0)
    # A compiler takes the fake's strides for true; kernels have their own.
    numbered = torch.tensor([call[0]], device="cpu")
    return out.contiguous(), lse.contiguous(), rotated_query, rotated_key, numbered


def _attention_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    words: Tensor,
    scale: float,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shapes = [0 if cos is None else rows.shape for rows in (query, key)]
    rotated = query.new_empty(shapes[0]), key.new_empty(shapes[1])
    return *empty_result(query, value), *rotated, torch.empty(1, dtype=torch.int64, device="cpu")


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
    family: str = "auto",
    softcap: float = 0.0,
    name: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the queries and keys that were given, before any rotation."""
    _expect_tensors(
        grad_out=grad_out,
        query=query,
        key=key,
        value=value,
        out=out,
        lse=lse,
        words=words,
    )
    layer, rotary = _layer_of(words, scale, family, softcap), _rotary_of(cos, sin, interleaved)
    given = query, key, value, sinks
    run = run_of(prepared_of(words), *given, layer, rotary)
    rows, heads, _ = query.shape
    for what, result in (("out", out), ("grad_out", grad_out)):
        _expect_like(what, result, query, (rows, heads, value.shape[2]), (query.dtype,))
    for what, sums in (("lse", lse), ("grad_lse", grad_lse)):
        _expect_like(what, sums, query, (rows, heads), (torch.float32, torch.float64))
    call = int(number), name or None
    *grads, grad_sinks = backward(run, grad_out, grad_lse, *given, out, lse, rotary, *call)
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
