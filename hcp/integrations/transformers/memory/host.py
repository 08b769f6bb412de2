"""Saved tensors in host memory, copied out and back while layers compute."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

LEAST_BYTES = 2**16
"""A smaller tensor stays on the device: its copy would take longer to start than to run."""


class HostCopies:
    """Copies of a model's saved tensors. On GPUs they run on a stream of their own, beside the
    layers: tensors of one layer leave while the next one computes, and come back while the layer
    after it runs its backward. On the CPU they are plain copies.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.Stream(device) if device.type == "cuda" else None
        self._leaving: _Leaving | None = None
        self._last: Callable[[], LayerCopies | None] = lambda: None

    def layer(self, module: nn.Module, shared: Iterable[Tensor]) -> LayerCopies:
        """Return the copies of a layer that is about to compute. What remains where it is: its
        parameters, and what all layers share."""
        copies = LayerCopies(self, module, set(map(_storage, shared)), self._last)
        self._last = weakref.ref(copies)
        return copies

    def leave(self, tensors: list[tuple[Tensor, Parked]]) -> None:
        """Let a layer's tensors go once they are copied: at the end of the next layer, which calls
        this or ``drain``. So the device holds the tensors of two layers at most."""
        self.drain()
        if tensors:
            copied = None if self.stream is None else self.stream.record_event()
            self._leaving = _Leaving(copied, [(x, weakref.ref(parked)) for x, parked in tensors])

    def drain(self) -> None:
        """Wait on the device, not on the host, for copies that are on their way."""
        leaving, self._leaving = self._leaving, None
        if leaving is None:
            return
        if leaving.copied is not None:  # the memory is of the stream that waits: no more to do
            torch.cuda.current_stream(self.device).wait_event(leaving.copied)
        for source, parked in leaving.sources:
            if (one := parked()) is not None:
                one.left(source)


class _Leaving(NamedTuple):
    copied: torch.Event | None
    sources: list[tuple[Tensor, weakref.ref[Parked]]]


class LayerCopies:
    """The tensors that one layer saves in one forward, by the hooks ``pack`` and ``unpack``."""

    def __init__(
        self,
        host: HostCopies,
        module: nn.Module,
        shared: set[int],
        before: Callable[[], LayerCopies | None],
    ) -> None:
        self._host, self._module, self._shared, self._before = host, module, shared, before
        self._known: dict[tuple[Any, ...], tuple[Tensor, Parked]] = {}
        self._parked: list[weakref.ref[Parked]] = []

    def pack(self, tensor: Tensor) -> _Stays | _Seen:
        # Without its graph: an operator that saves its own result would hold itself.
        whole = tensor.detach()
        tensor = _without_repeats(whole)
        if not self._goes(tensor):
            return _Stays(whole, whole._version)
        kind = tensor.dtype, tensor.is_conj(), tensor.is_neg(), tensor._version
        layout: Any = tensor.nbytes if tensor.is_contiguous() else (tensor.shape, tensor.stride())
        key = _storage(tensor), tensor.storage_offset(), layout, kind
        if key not in self._known:  # several operators save the same, and views of it
            self._known[key] = tensor, Parked(tensor, self._host)
            self._parked.append(weakref.ref(self._known[key][1]))
        return _Seen(self._known[key][1], tensor.shape, whole.shape)

    def _goes(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and tensor.device == self._host.device
            and tensor.nbytes >= LEAST_BYTES
            and _storage(tensor) not in self._shared
            # Those that compute now: FSDP2 gathers them module by module, and takes their memory
            # away as each one ends, which a copy on another stream does not see.
            and _storage(tensor) not in map(_storage, self._module.parameters())
        )

    def unpack(self, packed: _Stays | _Seen) -> Tensor:
        if isinstance(packed, _Stays):
            _expect_as_saved(packed.tensor, packed.tensor._version, packed.version)
            return packed.tensor
        self._host.drain()
        tensor = packed.parked.tensor().view(packed.shape).expand(packed.expanded)
        before, self._before = self._before(), lambda: None
        if before is not None:  # the layer whose backward is next
            before.fetch()
        return tensor

    def computed(self) -> None:
        """The layer's forward has ended."""
        self._host.leave(list(self._known.values()))
        self._known.clear()

    def fetch(self) -> None:
        """Begin to bring back what a backward still needs."""
        for parked in self._parked:
            if (one := parked()) is not None:
                one.fetch()


class _Stays(NamedTuple):
    """A saved tensor that is on the device. Autograd checks no versions where hooks are."""

    tensor: Tensor
    version: int


class Versions:
    """Those of tensors that a forward has read, and that it reads again where it is computed again
    for its backward. Autograd checks the versions of what it saves, and of these it saves none."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._versions = [(tensor, tensor._version) for tensor in tensors]

    def expect_unchanged(self) -> None:
        """Raise RuntimeError if one was modified since."""
        for tensor, version in self._versions:
            _expect_as_saved(tensor, tensor._version, version)


def _expect_as_saved(tensor: Tensor, version: int, expected: int) -> None:
    if version != expected:
        raise RuntimeError(
            f"a saved {tensor.dtype} tensor of {tuple(tensor.shape)} is at version {version}, "
            f"expected {expected} as in the forward: it was modified in place before its "
            "backward. Step the optimizer after the backward, and modify a copy"
        )


class _Seen(NamedTuple):
    """A saved tensor: memory that is on the host, its shape, and that in which an operator saw it,
    which may repeat it."""

    parked: Parked
    shape: torch.Size
    expanded: torch.Size


class Parked:
    """A tensor in host memory."""

    def __init__(self, tensor: Tensor, host: HostCopies) -> None:
        self._device, self._stream = tensor.device, host.stream
        self._fetched: Tensor | None = None
        self._arrived: torch.Event | None = None
        self._version = self._version_left = tensor._version
        self.copy = torch.empty_like(tensor, device="cpu", pin_memory=host.stream is not None)
        self._on_stream(self.copy, tensor)

    def fetch(self) -> None:
        if self._fetched is None:
            self._fetched = torch.empty_like(self.copy, device=self._device, pin_memory=False)
            self._arrived = self._on_stream(self._fetched, self.copy)
            if self._arrived is not None:
                self._owner = torch.cuda.current_stream(self._device)

    def __del__(self) -> None:
        """A backward that failed leaves copies on their way, whose memory others get next."""
        if self._arrived is not None:
            self._owner.wait_event(self._arrived)

    def left(self, source: Tensor) -> None:
        """All of it is on the host. What modified it before then may have been copied, too."""
        self._version_left = source._version

    def tensor(self) -> Tensor:
        """The tensor on its device again."""
        _expect_as_saved(self.copy, self._version_left, self._version)
        self.fetch()
        assert self._fetched is not None
        if self._arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrived)
        return self._fetched

    def _on_stream(self, target: Tensor, source: Tensor) -> torch.Event | None:
        if self._stream is None:
            target.copy_(source)
            return None
        # Also for the memory of the target, which earlier kernels may still use.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self._stream:
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()


def _without_repeats(tensor: Tensor) -> Tensor:
    """A tensor that was expanded, such as a mask over its heads, without what repeats its memory:
    a copy would hold all of it."""
    if 0 not in tensor.stride():
        return tensor
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    return tensor[tuple(slice(1 if stride == 0 and n > 1 else n) for stride, n in sizes)]


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number
