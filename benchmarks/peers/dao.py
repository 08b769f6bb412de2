"""FlashAttention's low-level calls, as rings ask for them, computed by a kernel of hcp's choice.

ring-flash-attn and ringmaster call `_flash_attn_forward` and `_flash_attn_backward` of the package
flash_attn (version 2), which computes on Hopper at half the rate of FlashAttention-4. `Calls` has
the same arguments and results over any kernel that hcp finds, so that each ring runs over the
kernel of all contestants. `as_flash_attn` puts them where ring-flash-attn imports them from.

n rows, H heads, D head size; a batch of one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hcp.attention.kernels import Kernel, KernelChoice, Launch, join, kernel_for
from hcp.exchange.tables import Entry

INTERFACE = "flash_attn.flash_attn_interface"


class Calls:
    """The calls over the kernel of a family, "auto" being that of hcp's layers."""

    def __init__(self, device: torch.device, dtype: torch.dtype, family: str) -> None:
        self.kernel: Kernel = kernel_for(device, dtype, KernelChoice(family))
        self._launch = functools.cache(self._made)

    def _made(self, queries: int, keys: int, causal: bool) -> Launch:
        high = keys - queries if causal else keys
        (launch,) = join([Entry(0, queries, 0, keys, -queries, high)], packs=self.kernel.packs)
        return launch

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """(1, n, H, D) to the output (1, n, H, D) and the log-sum-exp (1, H, n)."""
        launch = self._launch(q.shape[1], k.shape[1], causal)
        q, k, v = (x[0].contiguous() for x in (q, k, v))
        out, lse = self.kernel.forward(launch, q, k, v, scale)
        return out[None], lse.t()[None].contiguous()

    def backward(
        self,
        grad: Tensor,
        rows: tuple[Tensor, Tensor, Tensor, Tensor],
        lse: Tensor,
        scale: float,
        causal: bool,
    ) -> tuple[Tensor, ...]:
        """`rows`: q, k, v and the merged output; `lse`: merged, (1, H, n). Returns dq, dk, dv."""
        launch = self._launch(grad.shape[1], rows[1].shape[1], causal)
        q, k, v, out, grad = (x[0].contiguous() for x in (*rows, grad))
        saved = q, k, v, out, lse[0].t().contiguous()
        return tuple(x[None] for x in self.kernel.backward(launch, (grad, None), saved, scale))

    # ---- under FlashAttention-2's names ----

    def low_level(self) -> tuple[Any, Any]:
        """`_flash_attn_forward` and `_flash_attn_backward` of flash_attn 2.7 and later."""

        def _flash_attn_forward(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            dropout_p: float,
            softmax_scale: float,
            causal: bool,
            window_size_left: int = -1,
            window_size_right: int = -1,
            softcap: float = 0.0,
            alibi_slopes: Tensor | None = None,
            return_softmax: bool = False,
        ) -> tuple[Tensor, Tensor, None, None]:
            _expect_plain(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
            return *self.forward(q, k, v, softmax_scale, causal), None, None

        def _flash_attn_backward(
            dout: Tensor,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            out: Tensor,
            softmax_lse: Tensor,
            dq: Tensor,
            dk: Tensor,
            dv: Tensor,
            dropout_p: float,
            softmax_scale: float,
            causal: bool,
            window_size_left: int = -1,
            window_size_right: int = -1,
            softcap: float = 0.0,
            alibi_slopes: Tensor | None = None,
            deterministic: bool = False,
            rng_state: Tensor | None = None,
        ) -> None:
            _expect_plain(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
            rows = q, k, v, out
            grads = self.backward(dout, rows, softmax_lse, softmax_scale, causal)
            for into, grad in zip((dq, dk, dv), grads, strict=True):
                into.copy_(grad)

        return _flash_attn_forward, _flash_attn_backward

    def causal(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention (1, n, H, D) of one sequence that this rank has whole."""
        out: Tensor = _Causal.apply(q, k, v, self, q.shape[-1] ** -0.5)
        return out


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, calls: Calls, scale: float) -> Tensor:
        out, lse = calls.forward(q, k, v, scale, True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.calls, ctx.scale = calls, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *rows, lse = ctx.saved_tensors
        return *ctx.calls.backward(grad, tuple(rows), lse, ctx.scale, True), None, None


def _expect_plain(
    dropout: float, left: int, right: int, softcap: float, slopes: Tensor | None
) -> None:
    if (dropout, left, right, softcap) != (0.0, -1, -1, 0.0) or slopes is not None:
        raise ValueError(
            f"dropout {dropout}, window {left, right}, softcap {softcap} or slopes are asked for, "
            "expected plain causal or full attention"
        )


@contextlib.contextmanager
def as_flash_attn(calls: Calls) -> Iterator[None]:
    """Return a context in which `from flash_attn.flash_attn_interface import _flash_attn_forward`
    finds these calls. Those for packs, which rings import beside them, are refused if called."""

    def refused(*_: Any, **__: Any) -> None:
        raise NotImplementedError("packs are not computed by these calls, expected one sequence")

    module = types.ModuleType(INTERFACE)
    forward, backward = calls.low_level()
    vars(module).update(
        _flash_attn_forward=forward,
        _flash_attn_backward=backward,
        _flash_attn_varlen_forward=refused,
        _flash_attn_varlen_backward=refused,
    )
    put = {INTERFACE: module}
    try:
        importlib.import_module("flash_attn")  # flash-attn-4 has other modules there
    except ImportError:
        put["flash_attn"] = types.ModuleType("flash_attn")
        put["flash_attn"].__path__ = []
    with standing_in(put):
        yield


@contextlib.contextmanager
def standing_in(modules: Mapping[str, types.ModuleType]) -> Iterator[None]:
    """Return a context in which these modules are imported by these names. What others import in it
    stays."""
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)
