"""Numbers and structures of signals, declared once by the C core for the host and for devices."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hcp import _core

HALVES = _core.SIGNALS["HALVES"]
"""Exchanges that may be under way at once: the next is staged while the last is read."""
PIECES = _core.SIGNALS["PIECES"]
"""Words of a signal: rows are read piece by piece while more are staged."""
LATE, OTHER_CALL = _core.SIGNALS["LATE"], _core.SIGNALS["OTHER_CALL"]
"""Kinds of failures."""


class SignalFailure(ctypes.Structure):
    """``hcp_signal_failure``: what stopped a device. Its kind is 0 while nothing has."""

    _fields_ = [(name, ctypes.c_int64) for name in _core.SIGNAL_FAILURE]
    kind: int
    peer: int
    expected: int
    found: int


class Watch(ctypes.Structure):
    """``hcp_watch``: words by which a thread and a device tell each other of exchanges."""

    _fields_ = [
        (name, SignalFailure if name == "other" else ctypes.c_int64) for name in _core.WATCH
    ]
    ended: int
    aborted: int
    other: SignalFailure


def words_for(structure: type[ctypes.Structure]) -> Tensor:
    """Zeroed memory of the host for a structure."""
    return torch.zeros(ctypes.sizeof(structure) // 8, dtype=torch.int64, device="cpu")
