"""The machine and the versions that a benchmark ran on."""

from __future__ import annotations

import os
import platform

import hcp


def planner_line() -> str:
    """The line that heads results of the planner, for which torch does not count."""
    return f"hcp {hcp.__version__}, Python {platform.python_version()}, {platform.machine()}"


def hardware(device: str) -> str:
    """The name of this process's GPU, or the number of the CPU's cores."""
    if device == "cuda":
        import torch

        return str(torch.cuda.get_device_name())
    return f"{os.cpu_count()} cores ({platform.machine()})"
