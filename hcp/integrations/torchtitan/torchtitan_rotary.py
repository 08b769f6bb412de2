"""torchtitan's rotary embeddings by hcp: in its attention, or by its kernel before it.

Grouped-query attention gets queries and keys handed on unrotated. Latent attention computes with
what is rotated, a part of each query head and a key that all heads share.

T tokens on this rank, N heads, H elements of a head that are rotated.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE, RoPE

import hcp
from hcp.attention.rotary import Rotary, rotate
from hcp.integrations.unrotated import Unrotated, once, place_of

_OPTIONS = {field.name for field in fields(RoPE.Config)} - {"param_init", "sharding_config"}
"""The options of a rotary embedding that its table depends on."""


class _ByHcp:
    """Mixed into a rotary embedding of torchtitan's, whose table it keeps."""

    config: Any
    cache: Tensor

    def forward(
        self, query: Tensor, key: Tensor, positions: Tensor | None = None
    ) -> tuple[Any, Any]:
        """query and key (1, T, N, H); positions (1, T), those that the trainer gives."""
        if positions is None:
            raise ValueError("positions is None, expected those of the micro-batch's rows, (1, T)")
        if self.config.hands_on:
            rotary_of = partial(self._rotary_of, positions)
            return Unrotated(query, rotary_of), Unrotated(key, rotary_of)
        rotary = self._rotary_of_all(positions)
        return _rotated(query, rotary), _rotated(key, rotary)

    def _rotary_of(self, positions: Tensor, cp: hcp.ContextParallelHandler) -> Rotary:
        """That of the rows that attention takes."""
        if torch.compiler.is_dynamo_compiling():  # into each layer's own kernels
            return self._made(positions[0, : cp.rows])
        key = *self._options, place_of(positions)
        return once(cp, key, positions, lambda: self._made(positions[0, : cp.rows]))

    def _rotary_of_all(self, positions: Tensor) -> Rotary:
        if torch.compiler.is_dynamo_compiling():
            return self._made(positions[0])
        key = *self._options, place_of(positions)
        return once(positions, key, None, lambda: self._made(positions[0]))

    @property
    def _options(self) -> tuple[Any, ...]:
        """The values that are equal where the tables of two layers' modules are alike: each module
        has a table of its own."""
        options = (getattr(self.config, name) for name in _OPTIONS)
        return type(self), self.table.device, self.table.dtype, *options

    @property
    def table(self) -> Tensor:
        """The cache, which tensor-parallel ranks replicate."""
        return self.cache.to_local() if isinstance(self.cache, DTensor) else self.cache

    def _made(self, positions: Tensor) -> Rotary:
        return self._rotary(positions).for_kernels(torch.float32)

    def _rotary(self, positions: Tensor) -> Rotary:
        raise NotImplementedError


def _rotated(t: Tensor, rotary: Rotary) -> Tensor:
    """t (1, T, N, H) rotated by hcp's kernel. Of a DTensor, each tensor-parallel rank rotates its
    heads."""
    if isinstance(t, DTensor):
        local = _rotated(t.to_local(), rotary)
        return DTensor.from_local(local, t.device_mesh, t.placements, run_check=False)
    return rotate(t[0], rotary).unsqueeze(0)


class HcpComplexRoPE(_ByHcp, ComplexRoPE):
    """Rotates neighbouring pairs, by complex numbers."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        hands_on: bool = True
        """Leave queries and keys to hcp's attention. False: rotate them by hcp's kernel."""

    def _rotary(self, positions: Tensor) -> Rotary:
        numbers = self.table[positions].repeat_interleave(2, dim=1)  # (T, H / 2) to (T, H)
        return Rotary(numbers.real, numbers.imag, True)


class HcpCosSinRoPE(_ByHcp, CosSinRoPE):
    """Rotates halves of a head, by cosines and sines."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        hands_on: bool = True
        """Leave queries and keys to hcp's attention. False: rotate them by hcp's kernel."""

    def _rotary(self, positions: Tensor) -> Rotary:
        cos, sin = self.table[positions].chunk(2, dim=1)  # (T, 2 H)
        return Rotary(cos, sin, False)


_COUNTERPARTS: dict[type, Any] = {
    ComplexRoPE.Config: HcpComplexRoPE.Config,
    CosSinRoPE.Config: HcpCosSinRoPE.Config,
}


def by_hcp(config: RoPE.Config, *, hands_on: bool) -> RoPE.Config:
    """The configuration of the same rotary embedding by hcp: handed on to its attention, or by its
    kernel. One of another class, which may rotate otherwise, stays as it is."""
    made = _COUNTERPARTS.get(type(config))
    if made is None:
        return config
    own = {field.name: getattr(config, field.name) for field in fields(config)}
    return made(**own, hands_on=hands_on)
