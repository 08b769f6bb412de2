"""A module with the attributes of Transformer Engine's attention."""

from __future__ import annotations

from typing import Any

from torch import nn


class TEAttention(nn.Module):
    """Like Transformer Engine's attention: built without CP, it has no group and the default
    type."""

    def __init__(self, config: Any = None, layer_number: int = 1) -> None:
        super().__init__()
        self.cp_group: Any = None
        self.cp_global_ranks: Any = None
        self.cp_stream: Any = None
        self.cp_comm_type = "p2p"
        self.config, self.layer_number = config, layer_number
        self.calls: list[str] = []

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str
    ) -> None:
        self.cp_group, self.cp_global_ranks = cp_group, cp_global_ranks
        self.cp_stream, self.cp_comm_type = cp_stream, cp_comm_type
        self.calls.append(cp_comm_type)
