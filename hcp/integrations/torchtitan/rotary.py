"""torchtitan's rotary embeddings, which hand queries and keys on to hcp's attention.

T tokens on this rank, N heads, H head size, all of which is rotated.
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
from hcp.attention.rotary import Rotary
from hcp.integrations.rotary import Unrotated, once, place_of

_OPTIONS = {field.name for field in fields(RoPE.Config)} - {"param_init", "sharding_config"}
"""Of a rotary embedding: what its table depends on."""


class _HandingOn:
    """Mixed into a rotary embedding of torchtitan's, whose table it keeps."""

    config: Any
    cache: Tensor

    def forward(
        self, query: Tensor, key: Tensor, positions: Tensor | None = None
    ) -> tuple[Any, Any]:
        """query and key (1, T, N, H); positions (1, T), those that the trainer gives."""
        if positions is None:
            raise ValueError("positions is None, expected those of the micro-batch's rows, (1, T)")
        rotary_of = partial(self._rotary_of, positions)
        return Unrotated(query, rotary_of), Unrotated(key, rotary_of)

    def _rotary_of(self, positions: Tensor, cp: hcp.ContextParallelHandler) -> Rotary:
        if torch.compiler.is_dynamo_compiling():  # into each layer's own kernels
            return self._made(positions[0, : cp.rows])
        # The modules of all layers have tables of their own, alike where the options are.
        options = tuple(getattr(self.config, name) for name in _OPTIONS)
        key = type(self), self.table.device, self.table.dtype, options, place_of(positions)
        return once(cp, key, positions, lambda: self._made(positions[0, : cp.rows]))

    @property
    def table(self) -> Tensor:
        """The cache, which tensor-parallel ranks replicate."""
        return self.cache.to_local() if isinstance(self.cache, DTensor) else self.cache

    def _made(self, positions: Tensor) -> Rotary:
        return self._rotary(positions).for_kernels(torch.float32)

    def _rotary(self, positions: Tensor) -> Rotary:
        raise NotImplementedError


class HandingOnComplexRoPE(_HandingOn, ComplexRoPE):
    """Of neighbouring pairs, by complex numbers."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        pass

    def _rotary(self, positions: Tensor) -> Rotary:
        numbers = self.table[positions].repeat_interleave(2, dim=1)  # (T, H / 2) to (T, H)
        return Rotary(numbers.real, numbers.imag, True)


class HandingOnCosSinRoPE(_HandingOn, CosSinRoPE):
    """Of halves of a head, by cosines and sines."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def _rotary(self, positions: Tensor) -> Rotary:
        cos, sin = self.table[positions].chunk(2, dim=1)  # (T, 2 H)
        return Rotary(cos, sin, False)


_COUNTERPARTS: dict[type, Any] = {
    ComplexRoPE.Config: HandingOnComplexRoPE.Config,
    CosSinRoPE.Config: HandingOnCosSinRoPE.Config,
}


def handing_on(config: RoPE.Config) -> RoPE.Config:
    """The configuration of the same rotary embedding that hands on. One of another class, which may
    rotate otherwise, stays as it is."""
    made = _COUNTERPARTS.get(type(config))
    if made is None:
        return config
    return made(**{field.name: getattr(config, field.name) for field in fields(config)})
