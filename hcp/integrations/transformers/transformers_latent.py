"""Latent attention of Transformers' models, whose keys and values travel compressed.

Such a layer has a method `expand_kv`, which gives keys and values of latent rows and of a rotated
key that all heads share; attention comes next. In a model that sends latents the method hands both
on, and hcp's attention expands the rows that it receives.

T rows of this rank, n rows of a launch, H heads, C elements of a latent row, R of the shared key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hcp.attention.comm_types import exchanges_heads
from hcp.step.handler import ContextParallelHandler

METHOD = "expand_kv"
_PROJECTION = "kv_b_proj"
_SENDS = "_hcp_sends_latents"
"""An attribute of a model's layers, copied and pickled with them."""
_MADE_BY_HCP = "_hcp_hands_latents_on"


@dataclass(frozen=True, slots=True, eq=False)
class Unexpanded:
    """Keys and values that attention is to expand.

    It has none of a tensor's operations. So a layer that computes with what it takes for keys or
    values fails, and cannot give a wrong result.
    """

    layer: Any
    own: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]
    """The layer's own method."""
    latent: Tensor
    """(1, 1, T, C)"""
    shared: Tensor
    """(1, 1, T, R)"""

    def expanded(self) -> tuple[Tensor, Tensor]:
        """Keys (1, H, T, D) and values (1, H, T, E), as the layer makes them."""
        return self.own(self.layer, self.latent, self.shared)

    def arguments(self, count: int) -> dict[str, Any]:
        """The arguments of attention for the first rows (count, C + R), which travel."""
        # A rotary embedding may widen what it rotates.
        both = self.latent, self.shared.to(self.latent.dtype)
        rows = torch.cat([x[0, 0, :count] for x in both], dim=-1)
        return {"key": rows, "expand": self.expand, "parameters": self.parameters}

    def expand(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (n, H, D) and values (n, H, E) of rows (n, C + R)."""
        sizes = [self.latent.shape[-1], self.shared.shape[-1]]
        latent, shared = (x[None, None] for x in torch.split(rows, sizes, dim=-1))
        key, value = self.own(self.layer, latent, shared)
        return key[0].transpose(0, 1), value[0].transpose(0, 1)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters to which a backward through the method gives gradients."""
        return [p for p in getattr(self.layer, _PROJECTION).parameters() if p.requires_grad]

    def can_travel(self, cp: ContextParallelHandler) -> bool:
        """Whether rows can travel before they are expanded, in a micro-batch.

        They cannot where heads travel, in a compiled layer, where a trainer gathers the parameters
        only while the projection is called, or where it drops elements out."""
        drops = any(
            isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 and m.training
            for m in getattr(self.layer, _PROJECTION).modules()
        )
        whole = all(type(p) in (Tensor, nn.Parameter) and p.numel() for p in self.parameters)
        compiled = torch.compiler.is_dynamo_compiling()
        return whole and not (drops or compiled or exchanges_heads(cp.comm.default_type))


def send_latents(model: nn.Module, attention: str) -> bool:
    """Let every layer of a model that could do so hand latent rows on to the attention `attention`.
    Returns whether there is one."""
    layers = list(_layers(model))
    for layer in layers:
        _install(type(layer), attention)
        setattr(layer, _SENDS, True)
    return bool(layers)


def expand_before(model: nn.Module) -> None:
    """Let every layer expand by itself."""
    for layer in _layers(model):
        setattr(layer, _SENDS, False)


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if hasattr(type(module), METHOD) and hasattr(module, _PROJECTION):
            yield module


def _install(cls: type, attention: str) -> None:
    """Replace the method of a layer's class, once in a process."""
    own = getattr(cls, METHOD)
    if hasattr(own, _MADE_BY_HCP):
        return

    @functools.wraps(own)
    def expand_kv(self: Any, latent: Tensor, shared: Tensor) -> Any:
        ours = getattr(self, _SENDS, False) and self.config._attn_implementation == attention
        if not ours or torch.compiler.is_dynamo_compiling():
            return own(self, latent, shared)
        unexpanded = Unexpanded(self, own, latent, shared)
        return unexpanded, unexpanded

    vars(expand_kv)[_MADE_BY_HCP] = True
    setattr(cls, METHOD, expand_kv)
