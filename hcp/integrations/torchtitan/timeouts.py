"""What torchtitan 0.3 calls of torch.distributed that came with torch 2.14."""

import torch.distributed as dist
from torch.distributed import distributed_c10d


def supply_set_timeout() -> None:
    """Let torchtitan shorten the timeouts of its groups after the first step, under any torch.

    torch 2.10 to 2.13 have the same function under the private name."""
    if not hasattr(dist, "set_timeout"):
        vars(dist)["set_timeout"] = distributed_c10d._set_pg_timeout
