"""A module of Transformer Engine's shape."""

from torch import nn


class TEAttention(nn.Module):
    """Transformer Engine's shape: built without CP it has no group, and its default type."""

    def __init__(self, config=None, layer_number=1):
        super().__init__()
        self.cp_group, self.cp_global_ranks, self.cp_stream = None, None, None
        self.cp_comm_type = "p2p"
        self.config, self.layer_number = config, layer_number
        self.calls = []

    def set_context_parallel_group(self, cp_group, cp_global_ranks, cp_stream, cp_comm_type):
        self.cp_group, self.cp_global_ranks = cp_group, cp_global_ranks
        self.cp_stream, self.cp_comm_type = cp_stream, cp_comm_type
        self.calls.append(cp_comm_type)
