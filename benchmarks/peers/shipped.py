"""Attention that others ship, on a rank's rows of the zigzag layout, which hcp and they use.

`context_parallel`: PyTorch's prototype (torch.distributed.tensor.experimental) with its own load
balancing, for one causal sequence on GPUs. It has no grouped heads: keys are repeated for every
query head, and its time includes that. `templated_ring`: the ring inside that prototype, for equal
sequences on CPUs, whose operator the prototype does not support. `ring_flash_attn`:
zigzag_ring_flash_attn_varlen_func of the package of this name
(https://github.com/zhuzilin/ring-flash-attention), for sequences that fill their chunks on GPUs.
`te_p2p`, `te_all_gather` and `te_a2a`: Transformer Engine's DotProductAttention with its context
parallelism of that comm type and its fused attention (cuDNN), for packs of such sequences on GPUs;
`te_p2p_fa4` and the like: the same over FlashAttention-4, mended by peers/te_kernels.py.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import hcp
from peers import te_kernels

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
MODULES = {
    "templated_ring": "torch.distributed.tensor.experimental._context_parallel._attention",
    "context_parallel": "torch.distributed.tensor.experimental",
    "ring_flash_attn": "ring_flash_attn",
    "te_p2p": "transformer_engine.pytorch",
    "te_all_gather": "transformer_engine.pytorch",
    "te_a2a": "transformer_engine.pytorch",
    "te_p2p_fa4": "transformer_engine.pytorch",
    "te_all_gather_fa4": "transformer_engine.pytorch",
    "te_a2a_fa4": "transformer_engine.pytorch",
}
TRANSFORMER_ENGINE = tuple(name for name in MODULES if name.startswith("te_"))
OVER_FLASH_ATTN_4 = "_fa4"


def obstacle(name: str, device: torch.device) -> str | None:
    """Return the reason why this attention cannot run here, or None."""
    wanted = "cpu" if name == "templated_ring" else "cuda"
    if device.type != wanted:
        return f"for {wanted} alone"
    try:
        importlib.import_module(MODULES[name])
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        return str(
            error
        )  # the others: Transformer Engine's, where a library that it loads is absent
    return None


def heads_obstacle(name: str, heads: Sequence[int], ranks: int) -> str | None:
    """Return the reason why this attention cannot run with these numbers of heads over so many
    ranks, or None. Transformer Engine's "a2a" ends its process by SIGFPE where ranks have none."""
    if name.startswith("te_a2a") and any(n % ranks for n in heads):
        return f"heads are {':'.join(map(str, heads))}, expected multiples of the {ranks} ranks"
    return None


def takes(name: str, lengths: Sequence[int], device: torch.device) -> bool:
    if obstacle(name, device) is not None:
        return False
    if name == "templated_ring":
        return len(set(lengths)) == 1
    return name != "context_parallel" or len(lengths) == 1


@contextmanager
def running(name: str, length: int, ranks: int, device: torch.device) -> Iterator[None]:
    """Return the context that `context_parallel` needs around attention of one sequence."""
    if name != "context_parallel":
        yield
        return
    from torch.distributed.tensor.experimental import context_parallel

    rows = torch.empty(length, device=device)
    mesh = init_device_mesh(device.type, (ranks,))
    with context_parallel(mesh, buffers=[rows], buffer_seq_dims=[0], no_restore_buffers={rows}):
        yield


def attention_of(name: str, cp: hcp.ContextParallelHandler, backend: str) -> Attention:
    if name == "templated_ring":
        return _of_templated_ring(len(cp.layout.lengths))
    if name in TRANSFORMER_ENGINE:
        return _of_transformer_engine(name, cp)
    return of_torch(backend) if name == "context_parallel" else _of_ring_flash_attn(cp)


def of_torch(backend: str) -> Attention:
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


def comm_type_of(name: str) -> str:
    """Return the comm type of one of Transformer Engine's."""
    return name.removeprefix("te_").removesuffix(OVER_FLASH_ATTN_4)


def _of_transformer_engine(name: str, cp: hcp.ContextParallelHandler) -> Attention:
    """Return its attention over all ranks. Its group's first call connects what it sends by."""
    package = importlib.import_module(MODULES[name])
    comm_type = comm_type_of(name)
    kernel = "flash" if name.endswith(OVER_FLASH_ATTN_4) else "fused"
    device = cp.cu_seqlens.device
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    bounds = [0, *itertools.accumulate(cp.layout.lengths)]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    longest = max(cp.layout.lengths)

    @functools.cache
    def module(heads: int, groups: int, size: int) -> Any:
        made = package.DotProductAttention(
            heads,
            size,
            num_gqa_groups=groups,
            attention_dropout=0.0,
            qkv_format="thd",
            attn_mask_type="padding_causal",
        )
        ranks = list(range(dist.get_world_size()))
        made.set_context_parallel_group(dist.group.WORLD, ranks, stream, comm_type)
        return made

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        te_kernels.select(kernel)
        out: Tensor = module(query.shape[1], key.shape[1], query.shape[2])(
            query,
            key,
            value,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        return out.view(query.shape)

    return attention


def _of_templated_ring(sequences: int) -> Attention:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # (T, H, D) to (B, H, T / B, D)
        rows = (x.unflatten(0, (sequences, -1)).transpose(1, 2) for x in (query, key, value))
        out: Tensor = _TemplatedRing.apply(*rows)
        return out.transpose(1, 2).flatten(0, 1)

    return attention


class _TemplatedRing(torch.autograd.Function):
    """PyTorch's ring over all ranks, with the operator of CPUs."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ring = importlib.import_module(MODULES["templated_ring"])
        ring._cp_options.enable_load_balance = True
        # float64 would fall to float32's rounding otherwise.
        ring._cp_options.convert_to_f32 = False
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        out, lse, *_ = ring._templated_ring_attention(
            dist.group.WORLD, 2, flash, query, key, value, is_causal=True
        )
        ctx.save_for_backward(query, key, value, out, lse)
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        ring = importlib.import_module(MODULES["templated_ring"])
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

        def gradients(*, grad_out: Tensor, is_causal: bool, **given: Tensor) -> tuple[Tensor, ...]:
            names = ("query", "key", "value", "out", "logsumexp")
            found: tuple[Tensor, ...] = flash(
                grad_out, *(given[name] for name in names), 0.0, is_causal
            )
            return found

        found = ring._templated_ring_attention_backward(
            *(dist.group.WORLD, 2, gradients, grad.contiguous(), "grad_out"),
            *ctx.saved_tensors,
            is_causal=True,
        )
        return tuple(found[:3])
