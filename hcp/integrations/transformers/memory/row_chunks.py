"""MLPs and norms in chunks of rows, of which one alone is in memory with all that it makes inside.

T rows, N of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from hcp.integrations.transformers.memory.host import Versions

NAMES = ("mlp", "feed_forward")
"""What models call the MLP of a layer."""

Forward = Callable[[Tensor], Tensor]


def row_wise_of(layer: nn.Module) -> list[nn.Module]:
    """Return the parts of a layer that compute each row by itself and make much inside: its MLP and
    its norms. Raises ValueError where the MLP is not of matrices alone."""
    return [_mlp_of(layer), *_norms_of(layer)]


def norms_outside(model: nn.Module, layers: list[nn.Module]) -> list[nn.Module]:
    """Return the norms of a model that are in none of its layers: the last one, before the head."""
    inside = {part for layer in layers for part in layer.modules()}
    return [part for part in _norms_of(model) if part not in inside]


def _norms_of(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if type(part).__name__.endswith("Norm")]


def _mlp_of(layer: nn.Module) -> nn.Module:
    found = [part for name in NAMES if isinstance(part := getattr(layer, name, None), nn.Module)]
    if not found:
        raise ValueError(
            f"choice.chunk_rows: {type(layer).__name__} has none of {NAMES}, expected an MLP under "
            "one of these names: chunk_rows=0 computes all rows at once"
        )
    mlp = found[0]
    for name, part in mlp.named_modules():
        own = list(part.parameters(recurse=False))
        if own and not isinstance(part, nn.Linear | Conv1D):
            raise ValueError(
                f"choice.chunk_rows: {type(mlp).__name__} has {name or 'parameters of its own'}, a "
                f"{type(part).__name__}, expected layers of torch.nn.Linear: experts see all rows "
                "at once, with chunk_rows=0"
            )
    _expect_no_dropout(mlp)
    return mlp


def _expect_no_dropout(part: nn.Module) -> None:
    for name, inner in part.named_modules():
        for place, dropped in _dropouts_of(name, inner):
            raise ValueError(
                f"choice.chunk_rows: {type(part).__name__}.{place} drops out {dropped}, expected "
                "0: a chunk is computed twice"
            )


def _dropouts_of(name: str, part: nn.Module) -> Iterator[tuple[str, float]]:
    """Where a part drops out elements, and how many: by a module, or by a function to which it
    gives a number of its own (Starcoder2's ``residual_dropout``)."""
    if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
        yield name, part.p
    for own, value in vars(part).items():
        if "dropout" in own and isinstance(value, float) and value > 0:
            yield f"{name}.{own}".lstrip("."), value


class InChunks:
    """A forward of a part, (1, T, ...) to (1, T, ...), in chunks of N rows. ``before``: one that
    the part had of its own already, as Liger's kernels give it."""

    def __init__(self, part: nn.Module, rows: int, before: Forward | None) -> None:
        self.part, self.rows, self.before = part, rows, before

    def __call__(self, hidden: Tensor) -> Tensor:
        forward: Forward = self.before or partial(type(self.part).forward, self.part)
        if hidden.dim() < 3 or hidden.shape[0] != 1 or hidden.shape[1] <= self.rows:
            return forward(hidden)
        if not torch.is_grad_enabled():
            return _by_chunks(forward, hidden, self.rows)
        if self.part.training:
            _expect_no_dropout(self.part)  # of adapters that came after the choice
        held = _Rows.apply(hidden)  # type: ignore[no-untyped-call]
        weights = list(self.part.parameters())
        versions = Versions(weights if held.grad_fn else [*weights, held])
        own = [p for p in weights if p.requires_grad]
        given = held, held.grad_fn, forward, self.rows, versions, *own
        out: Tensor = _Chunks.apply(*given)  # type: ignore[no-untyped-call]
        return out


def _by_chunks(forward: Forward, hidden: Tensor, rows: int) -> Tensor:
    out: Tensor | None = None
    for start in range(0, hidden.shape[1], rows):
        part = forward(hidden[:, start : start + rows])
        if out is None:
            out = part.new_empty(*hidden.shape[:2], *part.shape[2:])
        out[:, start : start + rows] = part
    assert out is not None
    return out


class _Rows(torch.autograd.Function):
    """Saves the rows before anything is computed of them. A checkpoint that stops once it has all
    that was saved then ends before the chunks, which are computed in the backward anyway."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Chunks(torch.autograd.Function):
    """Parameters are inputs, so that each gets one gradient: DDP and FSDP count them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        held: Any,
        forward: Forward,
        rows: int,
        versions: Versions,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.held, ctx.run, ctx.rows, ctx.parameters = held, forward, rows, parameters
        ctx.versions = versions
        ctx.hidden = hidden if held is None else None
        ctx.autocast = _autocast_of(hidden.device.type)
        return _by_chunks(forward, hidden, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.versions.expect_unchanged()
        hidden: Tensor = ctx.hidden if ctx.held is None else ctx.held.saved_tensors[0]
        grad_hidden, sums = torch.zeros_like(hidden), [None] * len(ctx.parameters)
        for start in range(0, hidden.shape[1], ctx.rows):
            chunk = slice(start, start + ctx.rows)
            of_rows, *own = _chunk_back(ctx, hidden[:, chunk], grad[:, chunk])
            if of_rows is not None:  # as it is, unless the part is constant
                grad_hidden[:, chunk] = of_rows
            sums = [_added(total, more) for total, more in zip(sums, own, strict=True)]
        grads = [
            None if total is None else total.to(p.dtype)
            for total, p in zip(sums, ctx.parameters, strict=True)
        ]
        return grad_hidden, None, None, None, None, *grads


def _autocast_of(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """The autocast of the forward, which a backward is not in."""
    if not torch.amp.is_autocast_available(device):
        return nullcontext
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    return lambda: torch.autocast(device, dtype, enabled)


def _chunk_back(ctx: Any, rows: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
    with torch.enable_grad(), ctx.autocast():
        own = rows.detach().requires_grad_()
        out = ctx.run(own)
    return torch.autograd.grad(out, (own, *ctx.parameters), grad, allow_unused=True)


def _added(total: Any, more: Tensor | None) -> Any:
    """Sum in float32 or wider: a parameter's gradient is rounded once."""
    if more is None:
        return total
    wide = more.to(torch.promote_types(more.dtype, torch.float32))
    return wide if total is None else total.add_(wide)
