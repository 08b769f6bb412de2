"""Context parallelism of others for one causal sequence that all ranks share.

Each runs as its authors' documents say, over the kernel of all contestants where it takes one:

    ring_flash_attn        zigzag_ring_flash_attn_func of ring-flash-attn
    ringmaster_zigzag      the zigzag ring of axolotl-ringmaster
    ringmaster_distflash   its balanced ring of contiguous rows (DistFlashAttention)
    torch_allgather        torch's own context_parallel, by its rotate methods; TRL's and
    torch_alltoall         Accelerate's engine. It takes PyTorch's kernels, and no grouped heads:
                           keys are repeated for every query head, and its time includes that
    deepspeed_ulysses      DistributedAttention of deepspeed
    fast_ulysses           all_to_all_4d of fast-ulysses around the kernel

ring-flash-attn is right in bfloat16 and float16 alone: for float32 its sum of queries' gradients is
the buffer that the next step writes. Ring means that keys go around; Ulysses, that rows are
exchanged for heads.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from peers import shipped
from peers.dao import Calls, as_flash_attn, standing_in

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Peer(NamedTuple):
    package: str
    """By which pip knows it."""
    module: str
    """That is imported."""
    like: str
    """hcp's comm type that moves the same rows."""
    contiguous: bool = False
    """Whether rank r of N has rows [r, r + 1) * n / N, in place of zigzag's chunks."""
    on_cpu: bool = False
    """Whether it runs on CPUs too."""


PEERS = {
    "ring_flash_attn": Peer("ring-flash-attn", "ring_flash_attn", "p2p", on_cpu=True),
    "ringmaster_zigzag": Peer("axolotl-ringmaster", "ringmaster.ring.zigzag", "p2p"),
    "ringmaster_distflash": Peer(
        "axolotl-ringmaster", "ringmaster.ring.distflash", "p2p", contiguous=True, on_cpu=True
    ),
    "torch_allgather": Peer("torch", shipped.MODULES["context_parallel"], "all_gather"),
    "torch_alltoall": Peer("torch", shipped.MODULES["context_parallel"], "p2p"),
    "deepspeed_ulysses": Peer("deepspeed", "deepspeed.sequence.layer", "a2a", contiguous=True),
    "fast_ulysses": Peer("fast-ulysses", "fast_ulysses", "a2a", contiguous=True),
}
ROTATES = "torch.distributed.tensor.experimental._attention"


def obstacle(
    name: str, device: torch.device, heads: tuple[int, int], ranks: int, calls: Calls
) -> str | None:
    """Return the reason why this peer cannot run here, or None."""
    peer = PEERS[name]
    if peer.like == "a2a" and any(n % ranks for n in heads):
        return f"heads are {heads[0]}:{heads[1]}, expected multiples of the {ranks} ranks"
    if device.type != "cuda" and not peer.on_cpu:
        return "for cuda alone"
    try:
        with _as_imported(name, calls):
            importlib.import_module(peer.module)
    except Exception as error:  # packages check libraries and drivers as they are imported
        return f"{peer.package}: {type(error).__name__}: {str(error)[:200]}"
    return None


@contextmanager
def _as_imported(name: str, calls: Calls) -> Iterator[None]:
    """Return the context in which a peer is imported: ring-flash-attn over these calls, and beside
    Transformers 5, which its adapters do not know."""
    if name != "ring_flash_attn":
        yield
        return
    adapters = types.ModuleType("ring_flash_attn.adapters")
    vars(adapters).update(substitute_hf_flash_attn=None, update_ring_flash_attn_params=None)
    with as_flash_attn(calls), standing_in({adapters.__name__: adapters}):
        yield


@contextmanager
def region(name: str, tokens: int, ranks: int, device: torch.device) -> Iterator[None]:
    """Return the context that attention and its backward run in."""
    if not name.startswith("torch_"):
        yield
        return
    importlib.import_module(ROTATES).set_rotate_method(name.removeprefix("torch_"))
    with shipped.running("context_parallel", tokens, ranks, device):
        yield


def attention_of(name: str, calls: Calls, backend: str) -> Attention:
    """Return its attention of this rank's rows (n, H, D). All ranks make it together."""
    if name.startswith("torch_"):
        return shipped.of_torch(backend)
    module = importlib.import_module(PEERS[name].module)
    batched = _MADE[name](module, calls)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return batched(query[None], key[None], value[None])[0]

    return attention


# ---- (1, n, H, D) to the same ------------------------------------------------------------------


def _ring_flash_attn(module: Any, calls: Calls) -> Attention:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = module.zigzag_ring_flash_attn_func(
            query, key, value, causal=True, group=dist.group.WORLD
        )
        return out

    return attention


def _ringmaster(function: str) -> Callable[[Any, Calls], Attention]:
    def made(module: Any, calls: Calls) -> Attention:
        module._flash_ops = calls.low_level  # it asks Transformers for flash_attn's otherwise

        def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            heads_first = (x.transpose(1, 2) for x in (query, key, value))
            out: Tensor = getattr(module, function)(
                *heads_first, group=dist.group.WORLD, scaling=query.shape[-1] ** -0.5
            )
            return out

        return attention

    return made


def _deepspeed(module: Any, calls: Calls) -> Attention:
    importlib.import_module("deepspeed").init_distributed(dist_backend=dist.get_backend())
    layer = module.DistributedAttention(calls.causal, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = layer(query, key, value, 0)
        return out

    return attention


def _fast_ulysses(module: Any, calls: Calls) -> Attention:
    group = module.UlyssesGroup()

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        whole = (group.all_to_all_4d(x, mode=0) for x in (query, key, value))
        out: Tensor = group.all_to_all_4d(calls.causal(*whole), mode=1)
        return out

    return attention


_MADE: dict[str, Callable[[Any, Calls], Attention]] = {
    "ring_flash_attn": _ring_flash_attn,
    "ringmaster_zigzag": _ringmaster("zigzag_ring_attention"),
    "ringmaster_distflash": _ringmaster("distflash_attention"),
    "deepspeed_ulysses": _deepspeed,
    "fast_ulysses": _fast_ulysses,
}
