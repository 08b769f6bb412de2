"""The families "auto", "flash" and "fused": for every launch the fastest kernel that takes it.

Measurements say which one is fast: the table of ``speeds`` for a GPU that is in it, and those of
``trial`` for others, taken at the first dispatch (``agreed``). A rank decides from its own
launches, because nothing that is exchanged depends on the kernel. Each kernel takes the others'
log-sum-exp, so forward and backward may use different ones.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from hcp.attention.kernels import FAMILIES, Call, Kernel, Launch, PackedKernel, in_packs, kernels_of
from hcp.attention.kernels.agreed import agreed_on
from hcp.attention.kernels.explained import explained
from hcp.attention.kernels.present import CHOOSING, present
from hcp.attention.kernels.proof import fault
from hcp.attention.kernels.speeds import MEASURED, Place, Speed, Speeds, gain_of, place_of_call
from hcp.errors import HcpError

_log = logging.getLogger("hcp")


# ---- the kernel that chooses ---------------------------------------------------------------------


class Candidate(NamedTuple):
    """A kernel to choose, and how fast it is."""

    family: str
    kernel: PackedKernel
    speeds: tuple[Speed, ...]
    """Empty: unknown. Then it computes calls that no kernel of known speed takes."""

    def gain(self, place: Place, *, backward: bool) -> float:
        """How many times as fast as "torch" it is, as far as is known; 0: nothing is known."""
        return gain_of(self.family, self.speeds, place, backward=backward)


Kind = tuple[object, ...]


def _kind(call: Call) -> Kind:
    """What distinguishes calls for a library, in addition to numbers of rows and sequences."""
    query, value = call.query, call.value
    sizes = query.dtype, tuple(query.shape[1:]), tuple(value.shape[1:])
    return call.backward, call.grad_lse, *sizes, call.launch.window


def _is_captured(call: Call) -> bool:
    """Whether a CUDA graph is being made of it."""
    return call.query.is_cuda and torch.cuda.is_current_stream_capturing()


class Fastest:
    """Computes each launch by the fastest candidate that takes it.

    A launch remembers the choice, so that a layer's calls cost no search. A library's kernel is
    checked at the first call of a kind: see ``proof``. One that is wrong or fails is left out for
    calls of that kind, with a warning: the others compute them.
    """

    dtypes = (torch.bfloat16, torch.float16)

    launches = staticmethod(in_packs)

    def __init__(self, candidates: Sequence[Candidate], softcap: float = 0.0) -> None:
        """The first one computes what none takes, and so says why not. ``softcap``: theirs."""
        self.candidates = candidates
        self._softcap = softcap
        self._capped: dict[float, Fastest | None] = {}
        self._failed: set[tuple[str, Kind]] = set()
        self._proven: set[tuple[str, Kind]] = set()

    def capped(self, softcap: float) -> Fastest | None:
        if softcap not in self._capped:
            found = [(each, each.kernel.capped(softcap)) for each in self.candidates]
            able = [
                each._replace(kernel=cast(PackedKernel, kernel)) for each, kernel in found if kernel
            ]
            self._capped[softcap] = Fastest(able, softcap) if able else None
        return self._capped[softcap]

    def forward(
        self, launch: Launch, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        chosen = self._chosen(launch, query, value, False, False)
        try:
            return chosen.kernel.forward(launch, query, key, value, scale)
        except Exception as error:
            self._give_up(chosen, Call(launch, query, value, False, False), error)
            return self.forward(launch, query, key, value, scale)

    def backward(
        self,
        launch: Launch,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        has_grad_lse = grad_lse is not None
        chosen = self._chosen(launch, query, value, True, has_grad_lse)
        given = grad_out, grad_lse, query, key, value, out, lse, scale
        try:
            return chosen.kernel.backward(launch, *given)
        except Exception as error:
            self._give_up(chosen, Call(launch, query, value, True, has_grad_lse), error)
            return self.backward(launch, *given)

    def _chosen(
        self, launch: Launch, query: Tensor, value: Tensor, backward: bool, grad_lse: bool
    ) -> Candidate:
        exact = torch.are_deterministic_algorithms_enabled()
        like = self, backward, grad_lse, exact, query.dtype, query.shape, value.shape
        chosen: Candidate | None = launch.chosen.get(like)
        if chosen is None:
            call = Call(launch, query, value, backward, grad_lse)
            chosen = self.choose(call)
            while not self._is_right(chosen, call):
                chosen = self.choose(call)
            launch.chosen[like] = chosen
        return chosen

    def choose(self, call: Call) -> Candidate:
        """The fastest candidate that takes a call; of equals the first. In a CUDA graph that is
        being captured, nothing can be checked: there, the fastest of those that were."""
        kind, place = _kind(call), place_of_call(call)
        capturing = _is_captured(call)
        taking = [
            each
            for each in self.candidates
            if (each.family, kind) not in self._failed
            and each.kernel.takes(call)
            and (not capturing or self._is_proven(each, kind))
        ]
        return max(
            taking or self.candidates[:1],
            key=lambda each: each.gain(place, backward=call.backward),
        )

    def _is_proven(self, candidate: Candidate, kind: Kind) -> bool:
        return candidate.family == "torch" or (candidate.family, kind) in self._proven

    def _is_right(self, candidate: Candidate, call: Call) -> bool:
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

    def _give_up(self, failed: Candidate, call: Call, error: Exception) -> None:
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

_lock = threading.Lock()
_made: dict[tuple[str, torch.device], tuple[Speeds | None, Sequence[Kernel]]] = {}
"""Kernels, and what ranks had agreed on when they were made."""
_told: set[str] = set()


def for_device(device: torch.device) -> Sequence[Kernel]:
    """The kernels of "auto". On a CPU they are those of "torch"."""
    return _kernels("auto", device)


def flash_for_device(device: torch.device) -> Sequence[Kernel]:
    """The kernels of "flash": FlashAttention's, of any generation."""
    return _kernels("flash", device)


def fused_for_device(device: torch.device) -> Sequence[Kernel]:
    """The kernels of "fused": cuDNN's, by any package."""
    return _kernels("fused", device)


def _kernels(choosing: str, device: torch.device) -> Sequence[Kernel]:
    if device.type != "cuda":
        return kernels_of("torch", device)
    agreed = agreed_on(torch.cuda.get_device_capability(device))
    with _lock:
        before, kernels = _made.get((choosing, device), (None, ()))
        if not kernels or before is not agreed:
            kernels = _make(choosing, device, agreed)
            _made[choosing, device] = agreed, kernels
        return kernels


def computing(name: str, device: torch.device) -> dict[str, str | None]:
    """The families that compute attention for a backend on a device, and the versions of their
    packages: for those that choose, all that they choose between, save for spare ones."""
    names = [name]
    if name in CHOOSING and device.type != "cuda":
        names = ["torch"]
    elif name in CHOOSING:
        agreed = agreed_on(torch.cuda.get_device_capability(device))
        names = [
            each.family
            for each in present(name, device)[1]
            if each.lacks is None
            and FAMILIES[each.family].role == "fastest"
            and (agreed is None or each.family in agreed)
        ]
    return {each: FAMILIES[each].version for each in sorted(names)}


def _make(choosing: str, device: torch.device, agreed: Speeds | None) -> Sequence[Kernel]:
    kernels, found = present(choosing, device)
    capability = torch.cuda.get_device_capability(device)
    speeds = MEASURED.get(capability, {}) if agreed is None else agreed
    if agreed is not None:
        found = [
            each._replace(lacks=each.lacks or _not_everywhere(each.family, agreed))
            for each in found
        ]
    usable = [each.family for each in found if each.lacks is None]
    if not usable:
        raise HcpError(
            f"the backend {choosing!r} has no kernel {explained(capability, found, {})}",
            code="kernel-missing",
        )
    told = f"attention by {choosing!r} {explained(capability, found, speeds)}"
    if told not in _told:
        _told.add(told)
        _log.info(told)
    known = kernels_of("torch", device) if "torch" in usable else ()
    if usable == ["torch"]:
        return known
    chosen = [Candidate(name, kernels[name], speeds.get(name, ())) for name in usable]
    return Fastest(chosen), *known


def _not_everywhere(name: str, agreed: Speeds) -> str | None:
    return None if name in agreed else "other ranks do not have it, or a trial of it failed"
