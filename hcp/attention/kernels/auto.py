"""The family "auto": for every launch the first kernel, in a static order, that takes it.

A rank decides from its own launches, because nothing that is exchanged depends on the kernel. Each
kernel takes the others' log-sum-exp, so forward and backward may use different ones.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from hcp.attention.kernels import (
    FAMILIES,
    Attended,
    Kernel,
    KernelCall,
    Launch,
    PackedKernel,
    ResultGrads,
    kernels_of,
)
from hcp.attention.kernels.order import order_of
from hcp.attention.kernels.present import FamilyStatus, dotted, present
from hcp.attention.kernels.proof import fault
from hcp.errors import HcpError

_log = logging.getLogger("hcp")


# ---- the kernel that chooses ---------------------------------------------------------------------


class KernelCandidate(NamedTuple):
    """A kernel to choose."""

    family: str
    kernel: PackedKernel


Kind = tuple[object, ...]


def _kind(call: KernelCall) -> Kind:
    """The properties by which a library tells calls apart, besides numbers of rows and
    sequences."""
    query, value = call.query, call.value
    sizes = query.dtype, tuple(query.shape[1:]), tuple(value.shape[1:])
    return call.backward, call.grad_lse, *sizes, call.launch.window


def _is_captured(call: KernelCall) -> bool:
    """Whether a CUDA graph is being made of it."""
    return call.query.is_cuda and torch.cuda.is_current_stream_capturing()


class Auto:
    """Computes each launch by the first candidate, in the order for it, that takes it.

    A launch remembers the choice, so that a layer's calls cost no search. A library's kernel is
    checked at the first call of a kind: see ``proof``. One that is wrong or fails is left out for
    calls of that kind, with a warning: the others compute them.
    """

    dtypes = (torch.bfloat16, torch.float16)

    packs = True

    def __init__(self, candidates: Sequence[KernelCandidate], softcap: float = 0.0) -> None:
        """The first one computes what none takes, and so says why not. ``softcap``: theirs."""
        self.candidates = candidates
        self._softcap = softcap
        self._capped: dict[float, Auto | None] = {}
        self._failed: set[tuple[str, Kind]] = set()
        self._proven: set[tuple[str, Kind]] = set()

    def capped(self, softcap: float) -> Auto | None:
        if softcap not in self._capped:
            found = [(each, each.kernel.capped(softcap)) for each in self.candidates]
            able = [
                each._replace(kernel=cast(PackedKernel, kernel)) for each, kernel in found if kernel
            ]
            self._capped[softcap] = Auto(able, softcap) if able else None
        return self._capped[softcap]

    def forward(
        self, launch: Launch, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        chosen = self._chosen(launch, query, value, False, False)
        try:
            return chosen.kernel.forward(launch, query, key, value, scale)
        except Exception as error:
            self._give_up(chosen, KernelCall(launch, query, value, False, False), error)
            return self.forward(launch, query, key, value, scale)

    def backward(
        self, launch: Launch, grads: ResultGrads, attended: Attended, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        (query, _, value, _, _), has_grad_lse = attended, grads[1] is not None
        chosen = self._chosen(launch, query, value, True, has_grad_lse)
        try:
            return chosen.kernel.backward(launch, grads, attended, scale)
        except Exception as error:
            self._give_up(chosen, KernelCall(launch, query, value, True, has_grad_lse), error)
            return self.backward(launch, grads, attended, scale)

    def _chosen(
        self, launch: Launch, query: Tensor, value: Tensor, backward: bool, grad_lse: bool
    ) -> KernelCandidate:
        exact = torch.are_deterministic_algorithms_enabled()
        like = self, backward, grad_lse, exact, query.dtype, query.shape, value.shape
        chosen: KernelCandidate | None = launch.chosen.get(like)
        if chosen is None:
            call = KernelCall(launch, query, value, backward, grad_lse)
            chosen = self.choose(call)
            while not self._is_right(chosen, call):
                chosen = self.choose(call)
            launch.chosen[like] = chosen
        return chosen

    def choose(self, call: KernelCall) -> KernelCandidate:
        """The first candidate that takes a call. In a CUDA graph that is being captured, nothing
        can be checked: there, the first of those that were."""
        kind, capturing = _kind(call), _is_captured(call)
        taking = {
            each.family: each
            for each in self.candidates
            if (each.family, kind) not in self._failed
            and each.kernel.takes(call)
            and (not capturing or self._is_proven(each, kind))
        }
        ordered = (taking[family] for family in order_of(call) if family in taking)
        return next(ordered, self.candidates[0])

    def _is_proven(self, candidate: KernelCandidate, kind: Kind) -> bool:
        return candidate.family == "torch" or (candidate.family, kind) in self._proven

    def _is_right(self, candidate: KernelCandidate, call: KernelCall) -> bool:
        """Check the candidate, once for a kind. One that is wrong is given up."""
        kind = _kind(call)
        if self._is_proven(candidate, kind) or _is_captured(call):
            return True
        try:
            wrong = fault(candidate.kernel, call, self._softcap)
            if wrong is not None:
                raise HcpError(
                    f"{wrong}: use the backend 'torch' for such calls", code="kernel-wrong"
                )
        except Exception as error:
            self._give_up(candidate, call, error)
            return False
        self._proven.add((candidate.family, kind))
        return True

    def _give_up(self, failed: KernelCandidate, call: KernelCall, error: Exception) -> None:
        """Leave calls of this kind to the others from now on, and warn. Raises the error where
        there is no other, and where the GPU's memory is full."""
        if failed is self.candidates[0] or isinstance(error, torch.cuda.OutOfMemoryError):
            raise error
        self._failed.add((failed.family, _kind(call)))
        call.launch.chosen.clear()
        _log.warning(
            "the attention kernel %r failed in the %s of %s with head sizes %d and %d, and "
            "attention goes on without it for such calls: %s: %s",
            failed.family,
            "backward" if call.backward else "forward",
            str(call.query.dtype).removeprefix("torch."),
            call.query.shape[2],
            call.value.shape[2],
            type(error).__name__,
            error,
        )


# ---- a family's kernels for a device -------------------------------------------------------------

_told: set[str] = set()


def for_device(device: torch.device) -> Sequence[Kernel]:
    """The kernels of "auto". On a CPU they are those of "torch"."""
    known = kernels_of("torch", device)
    if device.type != "cuda":
        return known
    kernels, found = present(device)
    told = f"attention by 'auto' {explained(torch.cuda.get_device_capability(device), found)}"
    if told not in _told:
        _told.add(told)
        _log.info(told)
    if [*kernels] == ["torch"]:
        return known
    return Auto([KernelCandidate(name, kernel) for name, kernel in kernels.items()]), *known


def explained(capability: tuple[int, int], found: Sequence[FamilyStatus]) -> str:
    """Which kernels are there, and which are not and why, in one line."""
    there = ", ".join(each.shown for each in found if each.lacks is None)
    lacking = "; ".join(f"{each.family}: {each.lacks}" for each in found if each.lacks is not None)
    text = f"on compute capability {dotted(capability)}: {there}"
    return text + (f". Not used: {lacking}" if lacking else "")


def computing(name: str, device: torch.device) -> dict[str, str | None]:
    """The families that compute attention for a backend on a device, and the versions of their
    packages: for "auto" all that it chooses between, save for flash_attn, whose kernels are those
    of torch."""
    names = [name]
    if name == "auto":
        names = ["torch"] if device.type != "cuda" else [*present(device)[0]]
    return {each: FAMILIES[each].version for each in sorted({*names} - {"flash_attn"} or names)}
