"""The kernel that Transformer Engine's attention computes with, chosen for this process.

"fused" is cuDNN's, "flash" FlashAttention-4. Transformer Engine asks for an unlimited side of a
window by -1, FlashAttention-4 by None. Betas of flash-attn-4 up to its pull request 2490 read a
causal block, (-1, 0), as one without a window. Later ones, such as 4.0.0b36, read it as a window
that has no key: the result is wrong, and there is no error
(https://github.com/NVIDIA/TransformerEngine/issues/3528). So every Transformer Engine up to 2.20.2
needs the mend below with such a beta. It hands None on, which means the same to all betas.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"
VARIABLES = {
    "fused": {"NVTE_FUSED_ATTN": "1", "NVTE_FLASH_ATTN": "0"},
    "flash": {
        "NVTE_FUSED_ATTN": "0",
        "NVTE_FLASH_ATTN": "1",
        "NVTE_FLASH_ATTN_V2": "0",
        "NVTE_FLASH_ATTN_V3": "0",
        "NVTE_FLASH_ATTN_V4": "1",
    },
}
MENDED = ("_flash_attn_fwd_v4", "_flash_attn_bwd_v4")
_chosen = {"kernel": ""}


def select(kernel: str) -> None:
    """Have Transformer Engine choose anew, among this kernel alone, unless it just did."""
    # Its rules would compute by the formula what no kernel takes.
    wanted = {**VARIABLES[kernel], "NVTE_UNFUSED_ATTN": "0"}
    if _chosen["kernel"] == kernel and wanted.items() <= os.environ.items():
        return
    if kernel == "flash":
        mend()
    os.environ.update(wanted)
    known = importlib.import_module(f"{ATTENTION}.dot_product_attention")._attention_backends
    known["backend_selection_requires_update"] = True
    _chosen["kernel"] = kernel


def mend() -> None:
    """Replace -1 by None in what Transformer Engine's context parallelism asks FlashAttention-4."""
    backends = importlib.import_module(f"{ATTENTION}.backends")
    for name in MENDED:
        function = getattr(backends, name, None)
        if function is None:
            raise ImportError(
                "Transformer Engine found no FlashAttention-4 for context parallelism, expected "
                "Transformer Engine 2.20.2 and `pip install --pre flash-attn-4`"
            )
        if not hasattr(function, "mended"):
            setattr(backends, name, _unlimited_by_none(function))


def _unlimited_by_none(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def mended(*positional: Any, **named: Any) -> Any:
        for side in ("window_size_left", "window_size_right"):
            if named.get(side) == -1:
                named[side] = None
        return function(*positional, **named)

    mended.mended = True  # type: ignore[attr-defined]
    return mended
