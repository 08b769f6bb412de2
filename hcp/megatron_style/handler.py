"""The parts of a handler that Megatron-style functions use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from hcp.exchange.layout import Layout


class Handler(Protocol):
    """The protocol of these parts. :class:`hcp.ContextParallelHandler` implements it."""

    layout: Layout
    rows: int
    degree: int
    max_seqlen: int
    whole_cu_seqlens: Tensor

    @property
    def device(self) -> torch.device: ...

    @property
    def place(self) -> int: ...

    @property
    def global_ranks(self) -> list[int]: ...

    @property
    def rows_in_whole(self) -> Tensor: ...

    @property
    def attention(self) -> Callable[..., Any]: ...

    @property
    def core_attn(self) -> Callable[..., Tensor]: ...

    @property
    def packed_seq_params(self) -> Callable[..., Any]: ...

    def sequence_to_head(self, x: Tensor) -> Tensor: ...

    def head_to_sequence(self, x: Tensor, count: int) -> Tensor: ...
