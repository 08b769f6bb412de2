"""Copies of a step's rows and tables to the device of its layers."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


class DeviceCopies:
    """Brings tensors to a device. On a GPU the copies have a stream of their own, so that they run
    while the step before computes, and what the caller queues after the ``with`` waits for them.

    The tensors are written before, in memory from which GPUs copy while hosts go on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cuda = device.type == "cuda"
        self._copies = _stream_of_copies(device) if cuda else None
        self._reader = torch.cuda.current_stream(device) if cuda else None

    def __enter__(self) -> DeviceCopies:
        return self

    def copy(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the device: itself if it is there."""
        if tensor.device == self._device:
            return tensor
        if self._copies is None or self._reader is None:
            return tensor.to(self._device)
        with torch.cuda.stream(self._copies):
            moved = tensor.to(self._device, non_blocking=True)
        # Its memory is of the copies' stream, and must not be used again before the reader's end.
        moved.record_stream(self._reader)
        return moved

    def __exit__(self, *_: object) -> None:
        if self._copies is not None and self._reader is not None:
            self._reader.wait_stream(self._copies)


@functools.cache
def _stream_of_copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
