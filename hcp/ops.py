"""The operators `torch.ops.hcp.*`, with gradients: they gather, merge, sum and rotate rows.

Tables are int64 tensors of shape (records, words) on the CPU, for rows on any device, and
are checked against the rows' sizes before any row is touched. A wrong argument raises RuntimeError
with its name, value and expectation.

The operators of this module pass `torch.library.opcheck` and work inside
`torch.compile(fullgraph=True)`, with any sizes in one graph. Others are hcp's own: those between
ranks (`signal_set`, `stage`, `read`, `stage_and_read`, `exchange_blocks`, `mail`,
`join`, and on CUDA alone `nccl_exchange`) are called by its transports, and those of a layer
(`cut`, `pack_to_send`, `arrive`, `reduce_to_send`, `sum_gradients`, `merge_on`, `merge_last`,
`sum_on`, `place`, `join_blocks`, `call_memory`) inside of its attention.

Legend of shapes: N rows of the input, R rows of the result, C columns, H heads, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hcp._versions import check_version

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that are summed, merged, rotated and cast."""

_LIBRARY = Path(__file__).with_name("_ops.abi3.so")

check_version("torch", torch.__version__, check="Try your build: hcp doctor")
torch.ops.load_library(_LIBRARY)  # type: ignore[no-untyped-call]


def pack(
    sources: Sequence[Tensor],
    segments: Tensor,
    rows: int,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Rows gathered from several tensors into one, side by side.

    sources: (N, C_i) each, of one dtype (any) and device; elements of a row side by side, rows any
        stride apart.
    segments: (S, 2) of (row, rows); row -1 stands for rows of zeros. Rows may repeat.
    rows: R, the sum of the segments' rows.
    dtype: of the result; None: that of the sources. To another one, elements are cast on the way,
        with the bits of `.to(dtype)`: then both are float64, float32, bfloat16 or float16.

    Returns (R, sum of C_i). The gradient of a source row is the sum over its copies, in float32
    (float64 if the sources or the result are), rounded once to the sources' dtype.
    """
    out: Tensor = torch.ops.hcp.pack.default(list(sources), segments, rows, dtype=dtype)
    return out


def unpack(
    source: Tensor,
    segments: Tensor,
    widths: Sequence[int],
    rows: int,
    *,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Columns of one tensor gathered back into several: undoes `pack` when the segments do.

    source: (N, sum of widths), of any dtype; elements of a row side by side, rows any stride apart.
    segments: (S, 2) of (row, rows); row -1 stands for rows of zeros. Rows may repeat.
    widths: C_i of each result. rows: R, the sum of the segments' rows.
    dtype: of the results, as in `pack`.

    Returns tensors (R, C_i), each contiguous. The gradient of a source row is as in `pack`.
    """
    outs: list[Tensor] = torch.ops.hcp.unpack.default(
        source, segments, list(widths), rows, dtype=dtype
    )
    return outs


def merge(
    outs: Sequence[Tensor], lses: Sequence[Tensor], runs: Tensor, rows: int
) -> tuple[Tensor, Tensor]:
    """Partial results of attention merged by log-sum-exp, once, in float32 (float64 for float64).

        lse = log(sum_p exp(lse_p)),  out = sum_p exp(lse_p - lse) * out_p

    as in memory-efficient attention (Rabe and Staats, https://arxiv.org/abs/2112.05682).

    outs: (N_p, H, D) each, float64, float32, bfloat16 or float16; elements of a head side by side,
        rows and heads any stride apart.
    lses: (N_p, H) each, natural log, float64 for float64 and float32 else, any strides. -inf:
        nothing was attended, and the output is not looked at. +inf outweighs all finite ones;
        several share equally.
    runs: (records, 4) of (row, rows, part, part_row). Runs ascend by row without overlap; records
        of the same row and rows are one run.
    rows: R. Rows that no run names give out 0 and lse -inf.

    Returns out (R, H, D) and lse (R, H). They have no gradient.
    """
    out, lse = torch.ops.hcp.merge.default(list(outs), list(lses), runs, rows)
    return out, lse


def reduce(
    parts: Sequence[Tensor],
    runs: Tensor,
    rows: int,
    columns: int = 1,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Partial rows summed, once, in float32 (float64 if the parts or the result are).

    parts: (N_p, C_c): column c of part p is parts[p * columns + c]; float64, float32, bfloat16 or
        float16; elements of a row side by side, rows any stride apart.
    runs: (records, 4) of (row, rows, part, part_row). Runs ascend by row without overlap; records
        of the same row and rows are one run, summed in their order.
    rows: R. Rows that no run names give 0.
    dtype: of the result, to which sums are rounded as by `.to(dtype)`: float64, float32, bfloat16
        or float16; None: that of the parts.

    Returns (R, sum of C_c): the columns side by side. Gradients are rounded once to the parts'
    dtype.
    """
    out: Tensor = torch.ops.hcp.reduce.default(list(parts), runs, rows, columns, dtype=dtype)
    return out


def rotate(
    t: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, inverse: bool = False
) -> Tensor:
    """Rotary embedding of rows (RoPE, https://arxiv.org/abs/2104.09864), in one pass.

    t: (N, H, D), float64, float32, bfloat16 or float16; elements of a head side by side.
    cos, sin: (N, R), R <= D even, contiguous, float64 for float64 and float32 else: of the angle of
        each of the first R elements of a head in this row; the rest pass. They have no gradient.
    interleaved: pairs are elements (2 i, 2 i + 1) instead of (i, i + R / 2).
    inverse: by the transpose, which turns back what has one angle in each pair.

    Returns (N, H, D), contiguous, computed in float32 (float64 for float64).
    """
    out: Tensor = torch.ops.hcp.rotate.default(t, cos, sin, interleaved, inverse)
    return out


def rotate_pack(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    beside: Sequence[Tensor],
    segments: Tensor,
    rows: int,
    *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate rows as `rotate` does and pack them as `pack` does, in one pass over t.

    beside: (N, C_i) each, packed unturned behind the turned columns.
    segments, rows: as in `pack`, without rows of zeros.

    Returns t turned, (N, H, D), and (R, H * D + sum of C_i).
    """
    turned, packed = torch.ops.hcp.rotate_pack.default(
        t, cos, sin, interleaved, list(beside), segments, rows
    )
    return turned, packed


def reduce_rotated(
    parts: Sequence[Tensor],
    runs: Tensor,
    rows: int,
    columns: int,
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
    rotated: int,
    *,
    interleaved: bool = False,
    inverse: bool = False,
) -> Tensor:
    """`reduce` whose first columns are turned before they are rounded: gradients of rotated rows
    are summed and turned back in one pass.

    cos, sin, interleaved, inverse: as in `rotate`, of the R rows of the result.
    rotated: how many of the columns, which hold whole heads of head_dim elements.
    """
    out: Tensor = torch.ops.hcp.reduce_rotated.default(
        list(parts), runs, rows, columns, cos, sin, head_dim, rotated, interleaved, inverse
    )
    return out


# ---- Shapes without data -------------------------------------------------------------------------


def register_shapes(name: str, shapes: Callable[..., Any]) -> None:
    """Register what an operator gives without data. The shapes of wrong arguments, which no kernel
    is there to refuse, raise ValueError."""

    @functools.wraps(shapes)
    def checked(*args: Any, **options: Any) -> Any:
        try:
            return shapes(*args, **options)
        except (AttributeError, IndexError, TypeError) as error:
            given = ", ".join(map(_brief, args))
            raise ValueError(
                f"{name} is called without data on ({given}), expected what its schema and the "
                f"page docs/reference/kernels.md say: {error}"
            ) from error

    torch.library.register_fake(name, checked)


def _brief(value: object) -> str:
    """A tensor by its dtype and shape."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_brief, value))}]"
    return f"{value!r:.60}"


def _expect_some(name: str, tensors: Sequence[Tensor]) -> None:
    if not tensors:
        raise RuntimeError(f"{name} has 0 tensors, expected >= 1")


def _width(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.shape[1] for tensor in tensors)


def _pack_fake(
    sources: list[Tensor], segments: Tensor, rows: int, *, dtype: torch.dtype | None = None
) -> Tensor:
    _expect_some("sources", sources)
    return sources[0].new_empty(rows, _width(sources), dtype=dtype)


def _pack_backward_fake(
    grad: Tensor,
    segments: Tensor,
    widths: list[int],
    rows: int,
    *,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    return [grad.new_empty(rows, width, dtype=dtype) for width in widths]


def _unpack_fake(
    source: Tensor,
    segments: Tensor,
    widths: list[int],
    rows: int,
    *,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    return [source.new_empty(rows, width, dtype=dtype) for width in widths]


def _unpack_backward_fake(
    grads: list[Tensor], segments: Tensor, rows: int, *, dtype: torch.dtype | None = None
) -> Tensor:
    _expect_some("grads", grads)
    return grads[0].new_empty(rows, _width(grads), dtype=dtype)


def _merge_fake(
    outs: list[Tensor], lses: list[Tensor], runs: Tensor, rows: int
) -> tuple[Tensor, Tensor]:
    _expect_some("outs", outs)
    _expect_some("lses", lses)
    _, heads, head_dim = outs[0].shape
    return outs[0].new_empty(rows, heads, head_dim), lses[0].new_empty(rows, heads)


def _reduce_fake(
    parts: list[Tensor],
    runs: Tensor,
    rows: int,
    columns: int,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    _expect_some("parts", parts)
    return parts[0].new_empty(rows, _width(parts[:columns]), dtype=dtype)


def _reduce_backward_fake(
    grad: Tensor,
    runs: Tensor,
    part_rows: list[int],
    widths: list[int],
    *,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    return [grad.new_empty(rows, width, dtype=dtype) for rows in part_rows for width in widths]


def _rotate_fake(t: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    return t.new_empty(t.shape)


def _rotate_pack_fake(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    beside: list[Tensor],
    segments: Tensor,
    rows: int,
) -> tuple[Tensor, Tensor]:
    _expect_some("beside", beside)
    width = t.shape[1] * t.shape[2] + _width(beside)
    return t.new_empty(t.shape), t.new_empty(rows, width)


def _reduce_rotated_fake(
    parts: list[Tensor], runs: Tensor, rows: int, columns: int, *rotation: Any
) -> Tensor:
    return _reduce_fake(parts, runs, rows, columns)


# ---- Gradients -----------------------------------------------------------------------------------
#
# pack, unpack and reduce are linear: the gradient of each backward operator is its forward
# operator, so derivatives of any order exist. Each is told the dtype of what it is the gradient of,
# which a cast has changed. Incoming gradients may be expanded tensors (of a sum, say), hence
# contiguous().


def _pack_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any) -> None:
    sources, segments, _ = inputs
    ctx.save_for_backward(segments)
    ctx.widths = [source.shape[1] for source in sources]
    ctx.source_rows, ctx.dtype = sources[0].shape[0], sources[0].dtype


def _pack_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (segments,) = ctx.saved_tensors
    grads = torch.ops.hcp.pack_backward(
        grad.contiguous(), segments, ctx.widths, ctx.source_rows, dtype=ctx.dtype
    )
    return grads, None, None


def _pack_backward_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any
) -> None:
    grad, segments, _, _ = inputs
    ctx.save_for_backward(segments)
    ctx.rows, ctx.dtype = grad.shape[0], grad.dtype


def _pack_backward_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    (segments,) = ctx.saved_tensors
    columns = [grad.contiguous() for grad in grads]
    return torch.ops.hcp.pack(columns, segments, ctx.rows, dtype=ctx.dtype), None, None, None


def _unpack_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any
) -> None:
    source, segments, _, _ = inputs
    ctx.save_for_backward(segments)
    ctx.source_rows, ctx.dtype = source.shape[0], source.dtype


def _unpack_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    (segments,) = ctx.saved_tensors
    columns = [grad.contiguous() for grad in grads]
    grad = torch.ops.hcp.unpack_backward(columns, segments, ctx.source_rows, dtype=ctx.dtype)
    return grad, None, None, None


def _unpack_backward_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any
) -> None:
    grads, segments, _ = inputs
    ctx.save_for_backward(segments)
    ctx.widths = [grad.shape[1] for grad in grads]
    ctx.rows, ctx.dtype = grads[0].shape[0], grads[0].dtype


def _unpack_backward_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (segments,) = ctx.saved_tensors
    grads = torch.ops.hcp.unpack(grad.contiguous(), segments, ctx.widths, ctx.rows, dtype=ctx.dtype)
    return grads, None, None


def _reduce_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any
) -> None:
    parts, runs, _, columns = inputs
    ctx.save_for_backward(runs)
    ctx.part_rows = [part.shape[0] for part in parts[::columns]]
    ctx.widths = [part.shape[1] for part in parts[:columns]]
    ctx.dtype = parts[0].dtype


def _reduce_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (runs,) = ctx.saved_tensors
    grads = torch.ops.hcp.reduce_backward(
        grad.contiguous(), runs, ctx.part_rows, ctx.widths, dtype=ctx.dtype
    )
    return grads, None, None, None


def _reduce_backward_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any
) -> None:
    grad, runs, _, widths = inputs
    ctx.save_for_backward(runs)
    ctx.rows, ctx.dtype = grad.shape[0], grad.dtype
    ctx.columns = len(widths)


def _reduce_backward_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    (runs,) = ctx.saved_tensors
    parts = [grad.contiguous() for grad in grads]
    grad = torch.ops.hcp.reduce(parts, runs, ctx.rows, ctx.columns, dtype=ctx.dtype)
    return grad, None, None, None


def _merge_backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    raise NotImplementedError(
        "hcp.ops.merge was differentiated, expected not: it has no gradient. Attention over parts "
        "needs none of it, since its backward takes the merged output and log-sum-exp"
    )


def _refuse_gradients_of(ctx: Any, name: str, first: int) -> None:
    if any(ctx.needs_input_grad[first : first + 2]):
        raise NotImplementedError(
            f"cos or sin of hcp.ops.{name} requires a gradient, expected neither: "
            "rotate by PyTorch's own operators where frequencies are learned"
        )


def _rotate_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _rotate_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    _refuse_gradients_of(ctx, "rotate", 1)
    tables = ctx.saved_tensors
    back = torch.ops.hcp.rotate(grad.contiguous(), *tables, ctx.interleaved, not ctx.inverse)
    return back, None, None, None, None


def _rotate_pack_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    t, cos, sin, ctx.interleaved, beside, segments, _ = inputs
    ctx.save_for_backward(cos, sin, segments)
    ctx.shape, ctx.widths = t.shape, [column.shape[1] for column in beside]


def _rotate_pack_backward(ctx: Any, grad: Tensor, grad_packed: Tensor) -> tuple[Any, ...]:
    _refuse_gradients_of(ctx, "rotate_pack", 1)
    cos, sin, segments = ctx.saved_tensors
    rows, heads, head_dim = ctx.shape
    turned, *beside = torch.ops.hcp.pack_backward(
        grad_packed.contiguous(), segments, [heads * head_dim, *ctx.widths], rows
    )
    total = (grad + turned.view(rows, heads, head_dim)).contiguous()
    back = torch.ops.hcp.rotate(total, cos, sin, ctx.interleaved, True)
    return back, None, None, None, beside, None, None


def _reduce_rotated_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    parts, runs, _, columns, cos, sin, ctx.head_dim, ctx.rotated, *ctx.how = inputs
    ctx.save_for_backward(runs, cos, sin)
    ctx.part_rows = [part.shape[0] for part in parts[::columns]]
    ctx.widths = [part.shape[1] for part in parts[:columns]]


def _reduce_rotated_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    _refuse_gradients_of(ctx, "reduce_rotated", 4)
    runs, cos, sin = ctx.saved_tensors
    interleaved, inverse = ctx.how
    width = sum(ctx.widths[: ctx.rotated])
    shape = grad.shape[0], width // ctx.head_dim, ctx.head_dim
    heads = grad[:, :width].contiguous().view(shape)
    turned = torch.ops.hcp.rotate(heads, cos, sin, interleaved, not inverse).flatten(1)
    both = torch.cat([turned, grad[:, width:]], 1)
    parts = torch.ops.hcp.reduce_backward(both, runs, ctx.part_rows, ctx.widths)
    return parts, *[None] * 9


def _nothing_to_keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


# (operator, shapes without data, gradient, what the gradient needs)
_OPERATORS = (
    ("pack", _pack_fake, _pack_backward, _pack_context),
    ("pack_backward", _pack_backward_fake, _pack_backward_backward, _pack_backward_context),
    ("unpack", _unpack_fake, _unpack_backward, _unpack_context),
    ("unpack_backward", _unpack_backward_fake, _unpack_backward_backward, _unpack_backward_context),
    ("merge", _merge_fake, _merge_backward, _nothing_to_keep),
    ("reduce", _reduce_fake, _reduce_backward, _reduce_context),
    ("reduce_backward", _reduce_backward_fake, _reduce_backward_backward, _reduce_backward_context),
    ("reduce_rotated", _reduce_rotated_fake, _reduce_rotated_backward, _reduce_rotated_context),
    ("rotate", _rotate_fake, _rotate_backward, _rotate_context),
    ("rotate_pack", _rotate_pack_fake, _rotate_pack_backward, _rotate_pack_context),
)

for _name, _fake, _backward, _context in _OPERATORS:
    register_shapes(f"hcp::{_name}", _fake)
    torch.library.register_autograd(f"hcp::{_name}", _backward, setup_context=_context)
