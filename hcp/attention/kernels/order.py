"""The order in which "auto" asks libraries for a kernel: the fastest first.

It goes by the keys that a query sees on average, half a sequence's length under a causal mask. The
order is that of NVIDIA H100s with torch 2.11, flash-attn-4 4.0.0b36 and nvidia-cudnn-frontend
1.32.0 on cuDNN 9.19, in bfloat16 with heads of 128; ``benchmarks/bench_attention_kernels.py``
measures it anew. Which head sizes and dtypes a library takes, its kernel says itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from hcp.attention.kernels import KernelCall

LONG = "flash_attn_4", "flash_attn_3", "cudnn", "torch", "flash_attn"
MIDDLE = "cudnn", "flash_attn_4", "flash_attn_3", "torch", "flash_attn"
SHORT = "torch", "cudnn", "flash_attn_4", "flash_attn_3", "flash_attn"
"""Orders of families. "flash_attn" has torch's kernels, which lack only soft-capping."""

LEAST_KEYS = {False: (750.0, 100.0), True: (190.0, 190.0)}
"""By direction, backward being True: the least keys of LONG, and those of MIDDLE."""


def order_of(call: KernelCall) -> Sequence[str]:
    """Families, the fastest for a call first."""
    long, middle = LEAST_KEYS[call.backward]
    keys = call.launch.pairs_of_a_query
    return LONG if keys >= long else MIDDLE if keys >= middle else SHORT
