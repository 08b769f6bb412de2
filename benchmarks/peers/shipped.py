"""Attention that others ship, on a rank's rows of hcp's zigzag layout, which is theirs too.

`context_parallel`: PyTorch's prototype (torch.distributed.tensor.experimental) with its own load
balancing, for one causal sequence. It has no grouped heads: keys are repeated for every query head,
within its time. `ring_flash_attn`: zigzag_ring_flash_attn_varlen_func of the package of this name
(https://github.com/zhuzilin/ring-flash-attention), for sequences that fill their chunks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import hcp

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
MODULES = {
    "context_parallel": "torch.distributed.tensor.experimental",
    "ring_flash_attn": "ring_flash_attn",
}


def obstacle(name: str) -> str | None:
    """Why it cannot be had here."""
    try:
        getattr(importlib.import_module(MODULES[name]), name, None)
    except ImportError as error:
        return str(error)
    return None


def takes(name: str, lengths: Sequence[int]) -> bool:
    return name != "context_parallel" or len(lengths) == 1


@contextmanager
def running(name: str, length: int, ranks: int, device: torch.device) -> Iterator[None]:
    """What `context_parallel` wants around its attention, and the sequence's length."""
    if name != "context_parallel":
        yield
        return
    from torch.distributed.tensor.experimental import context_parallel

    rows = torch.empty(length, device=device)
    mesh = init_device_mesh(device.type, (ranks,))
    with context_parallel(mesh, buffers=[rows], buffer_seq_dims=[0], no_restore_buffers={rows}):
        yield


def attention_of(name: str, cp: hcp.ContextParallelHandler, backend: str) -> Attention:
    return _of_torch(backend) if name == "context_parallel" else _of_ring_flash_attn(cp)


def _of_torch(backend: str) -> Attention:
    kernel = SDPBackend.CUDNN_ATTENTION if backend == "cudnn" else SDPBackend.FLASH_ATTENTION

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        with sdpa_kernel(kernel):
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.squeeze(0).transpose(0, 1)

    return attention


def _of_ring_flash_attn(cp: hcp.ContextParallelHandler) -> Attention:
    package = importlib.import_module("ring_flash_attn")
    longest = max(cp.layout.lengths) // cp.degree

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = package.zigzag_ring_flash_attn_varlen_func(
            query, key, value, cp.cu_seqlens, longest, causal=True
        )
        return out

    return attention
