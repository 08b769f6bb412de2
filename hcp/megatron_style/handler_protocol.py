"""The parts of a handler that Megatron-style functions use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from hcp.attention.whole_sequences import WholeSequences
from hcp.exchange.layout import Layout
from hcp.exchange.sums import HandlerGroup


class MegatronStyleHandler(Protocol):
    """The protocol of these parts. :class:`hcp.ContextParallelHandler` implements it."""

    layout: Layout
    rows: int
    degree: int
    max_seqlen: int
    group: HandlerGroup
    whole: WholeSequences

    @property
    def device(self) -> torch.device: ...

    @property
    def attention(self) -> Callable[..., Any]: ...

    @property
    def core_attn(self) -> Callable[..., Tensor]: ...

    @property
    def packed_seq_params(self) -> Callable[..., Any]: ...
