"""Rates of a machine, by which operations and bytes become one price."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hcp.planning.cost import CostModel

if TYPE_CHECKING:  # --help needs no torch
    import torch


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a GPU, (major, minor); None for another device."""
    if device.type != "cuda":
        return None
    from torch.cuda import get_device_capability

    return get_device_capability(device)


def machine_cost(device: torch.device, ranks_per_node: int | None, **sizes: Any) -> CostModel:
    """Return the prices of a model on devices like this one. ``sizes``: those of
    :meth:`hcp.CostModel.for_transformer`."""
    rates = rates_of(device.type, ranks_per_node, capability_of(device))
    return CostModel.for_transformer(**sizes, **rates)


def rates_of(
    device: str, ranks_per_node: int | None, capability: tuple[int, int] | None = None
) -> dict[str, int]:
    """Return the rates of a machine for :meth:`hcp.CostModel.for_transformer`, equal on all ranks
    of a job whose devices are alike.

    A CPU core computes less than a GPU in the time in which it sends a byte, and is its own host.
    GPUs of one host are
    taken to exchange by NVLink. Where ranks are on several hosts, and a plan does not know which,
    all of them are taken to exchange by a network.

    Args:
        device: the type of the job's devices.
        ranks_per_node: of a node; None: not known.
        capability: of its GPUs, (major, minor); None, or one without rates of its own: Hopper's.
    """
    if device == "cpu":
        return {
            "flops_per_byte": 200,
            "flops_per_byte_far": 0,
            "launch_flops": 20_000_000,
            "host_flops": 0,
        }
    rates = _GENERATIONS.get((capability or (9, 0))[0], {})
    near = ranks_per_node or _are_on_one_host()
    far = rates.get("flops_per_byte_far", 8_000)
    return rates if near else {**rates, "flops_per_byte": far}


_GENERATIONS = {
    8: {
        "flops_per_byte": 800,
        "flops_per_byte_far": 4_000,
        "launch_flops": 50_000_000_000,
        "host_flops": 175_000_000_000,
    },
    10: {
        "flops_per_byte": 1_600,
        "flops_per_byte_far": 20_000,
        "launch_flops": 250_000_000_000,
        "host_flops": 875_000_000_000,
    },
}
"""Rates by the major compute capability, where they are not Hopper's. They are assumed from data
sheets, not measured: 200 TFLOP/s with 250 GB/s by NVLink on Ampere, 1,000 with 625 on Blackwell, 50
GB/s over a network, and on any of them what the defaults say for a layer: 0.25 ms a micro-batch,
0.9 ms of the host."""


def _are_on_one_host() -> bool:
    """Whether the launcher says that all ranks of the job are on this host, as torchrun does."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    return local is not None and local == os.environ.get("WORLD_SIZE")
