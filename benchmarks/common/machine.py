"""The machine and the versions that a benchmark ran on."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import hcp


def planner_line() -> str:
    """Return the first line of the planner's results. It leaves out torch."""
    return f"hcp {hcp.__version__}, Python {platform.python_version()}, {platform.machine()}"


def hardware(device: str) -> str:
    """Return the name of this process's GPU, or the number of the CPU's cores."""
    if device == "cuda":
        import torch

        return str(torch.cuda.get_device_name())
    return f"{os.cpu_count()} cores ({platform.machine()})"


def machine() -> dict[str, object]:
    """Describe the machine, for a file of results."""
    found: dict[str, object] = {
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def versions() -> dict[str, str]:
    """Return the versions of Python, of hcp with its commit, and of installed packages."""
    found = {"python": platform.python_version(), "hcp": hcp.__version__, "commit": commit()}
    for package in PACKAGES:
        if number := package_version(package):
            found[package] = number
    return found


def package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


PACKAGES = (
    "torch",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-frontend",
    "ring-flash-attn",
    "transformer-engine",
    "megatron-core",
    "liger-kernel",
)


def commit() -> str:
    """Return the commit that is checked out, or "" outside of a repository."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()
