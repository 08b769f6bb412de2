"""The families of kernels that are there on a GPU, of those that "auto" chooses between."""

from __future__ import annotations

import logging
import threading
from typing import NamedTuple, cast

import torch

from hcp.attention.kernels import FAMILIES, PackedKernel, kernels_of

_log = logging.getLogger("hcp")

CHOICES = "torch", "cudnn", "flash_attn", "flash_attn_4", "flash_attn_3"
"""The families that "auto" chooses between. PyTorch's is on every GPU."""


class FamilyStatus(NamedTuple):
    """A family on a GPU."""

    family: str
    lacks: str | None
    """Why it is not there. None: it is."""

    @property
    def shown(self) -> str:
        """Its name and its package's."""
        package, version = FAMILIES[self.family].package, FAMILIES[self.family].version
        return f"{self.family} ({package} {version})" if package else self.family


def survey(capability: tuple[int, int]) -> list[FamilyStatus]:
    """``CHOICES`` on a GPU of this compute capability. Their packages are looked up, and not
    imported."""
    return [FamilyStatus(name, _lacks(name, capability)) for name in CHOICES]


def _lacks(name: str, capability: tuple[int, int]) -> str | None:
    family = FAMILIES[name]
    if capability < family.capability:
        return f"it needs compute capability {dotted(family.capability)}"
    if family.newest is not None and capability[0] > family.newest:
        return f"it has kernels up to compute capability {family.newest}.x"
    if family.package and family.version is None:
        return f"{family.package} is not installed"
    return None


def dotted(capability: tuple[int, int]) -> str:
    """A compute capability as people write it."""
    return ".".join(map(str, capability))


_lock = threading.Lock()
_loaded: dict[tuple[str, torch.device], PackedKernel | str] = {}
"""The kernel of a family on a device, or why there is none."""


def _load(name: str, device: torch.device) -> PackedKernel | str:
    """Import a family. One whose package is there and broken is left out, and warned of once."""
    if (name, device) not in _loaded:
        family = FAMILIES[name]
        try:
            kernels = kernels_of(name, device)
            _loaded[name, device] = (
                cast(PackedKernel, kernels[0]) if kernels else "it has no kernel for this GPU"
            )
        except ValueError as error:  # it does not run on this GPU
            _loaded[name, device] = str(error)
        except Exception as error:  # broken packages raise more than ImportError
            _loaded[name, device] = f"it cannot be imported: {type(error).__name__}: {error}"
            _log.warning(
                "%s %s is installed and cannot be imported (%s: %s): attention goes on without the "
                "backend %r; install what the package needs, or uninstall it",
                family.package,
                family.version,
                type(error).__name__,
                error,
                name,
            )
    return _loaded[name, device]


def present(device: torch.device) -> tuple[dict[str, PackedKernel], list[FamilyStatus]]:
    """The kernels that are there, by family, and what was found of all families."""
    kernels: dict[str, PackedKernel] = {}
    found = []
    for each in survey(torch.cuda.get_device_capability(device)):
        with _lock:
            loaded = each.lacks or _load(each.family, device)
        found.append(each._replace(lacks=loaded if isinstance(loaded, str) else None))
        if not isinstance(loaded, str):
            kernels[each.family] = loaded
    return kernels, found
