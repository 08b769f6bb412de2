"""The families "auto" and "flash": for every launch the fastest kernel that takes it.

Measurements say which one is fast: the table of ``speeds`` for a GPU that is in it, and those of
``trial`` for others, taken at the first dispatch. A rank decides from its own launches, because
nothing that is exchanged depends on the kernel. Each kernel takes the others' log-sum-exp, so
forward and backward may use different ones.
"""

from __future__ import annotations

import json
import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from hcp.attention.kernels import FAMILIES, Call, Kernel, Launch, PackedKernel, in_packs, kernels_of
from hcp.attention.kernels.speeds import (
    MEASURED,
    Place,
    Speed,
    nearest,
    place_of_call,
    place_of_pack,
)
from hcp.attention.kernels.trial import PACKS, measure
from hcp.exchange.loopback import LoopbackTransport
from hcp.exchange.transport import Transport

_log = logging.getLogger("hcp")

Capability = tuple[int, int]
Speeds = dict[str, tuple[Speed, ...]]
"""By family."""

CHOOSING = ("auto", "flash")
"""The families whose kernel chooses between those of other families."""


def _among(choosing: str) -> list[str]:
    """The families that one of ``CHOOSING`` chooses between, "torch" first: it is the yardstick."""
    names = [name for name, family in FAMILIES.items() if family.role]
    if choosing == "flash":
        names = [name for name in names if name == "torch" or name.startswith("flash_attn")]
    return sorted(names, key=lambda name: name != "torch")


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


def gain_of(family: str, speeds: Sequence[Speed], place: Place, *, backward: bool) -> float:
    """See ``Candidate.gain``."""
    if family == "torch":
        return 1.0
    return nearest(speeds, place).gain(backward=backward) if speeds else 0.0


class Fastest:
    """Computes each launch by the fastest candidate that takes it.

    A launch remembers the choice, so that a layer's calls cost no search.
    """

    dtypes = (torch.bfloat16, torch.float16)

    launches = staticmethod(in_packs)

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        """The first one computes what none takes, and so says why not."""
        self.candidates = candidates
        self._capped: dict[float, Fastest | None] = {}

    def capped(self, softcap: float) -> Fastest | None:
        if softcap not in self._capped:
            found = [(each, each.kernel.capped(softcap)) for each in self.candidates]
            able = [
                each._replace(kernel=cast(PackedKernel, kernel)) for each, kernel in found if kernel
            ]
            self._capped[softcap] = Fastest(able) if able else None
        return self._capped[softcap]

    def forward(
        self, launch: Launch, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        chosen = self._chosen(launch, query, value, False, False)
        return chosen.forward(launch, query, key, value, scale)

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
        chosen = self._chosen(launch, query, value, True, grad_lse is not None)
        return chosen.backward(launch, grad_out, grad_lse, query, key, value, out, lse, scale)

    def _chosen(
        self, launch: Launch, query: Tensor, value: Tensor, backward: bool, grad_lse: bool
    ) -> Kernel:
        like = self, backward, grad_lse, query.dtype, query.shape, value.shape
        kernel = launch.chosen.get(like)
        if kernel is None:
            call = Call(launch, query, value, backward, grad_lse)
            kernel = launch.chosen[like] = self.choose(call).kernel
        return kernel

    def choose(self, call: Call) -> Candidate:
        """The fastest candidate that takes a call; of equals the first."""
        taking = [each for each in self.candidates if each.kernel.takes(call)]
        place = place_of_call(call)
        return max(
            taking or self.candidates[:1],
            key=lambda each: each.gain(place, backward=call.backward),
        )


# ---- what is there -------------------------------------------------------------------------------


class Found(NamedTuple):
    """A family on a GPU."""

    family: str
    lacks: str | None
    """Why it is not there. None: it is."""

    @property
    def shown(self) -> str:
        """Its name and its package's."""
        package, version = FAMILIES[self.family].package, FAMILIES[self.family].version
        return f"{self.family} ({package} {version})" if package else self.family


def survey(choosing: str, capability: Capability) -> list[Found]:
    """The families that one of ``CHOOSING`` chooses between, on a GPU of this compute capability.
    Their packages are looked up, and not imported."""
    return [Found(name, _lacks(name, capability)) for name in _among(choosing)]


def _lacks(name: str, capability: Capability) -> str | None:
    family = FAMILIES[name]
    if capability < family.capability:
        return f"it needs compute capability {dotted(family.capability)}"
    if family.package and family.version is None:
        return f"{family.package} is not installed"
    return None


def dotted(capability: Capability) -> str:
    """A compute capability as people write it."""
    return ".".join(map(str, capability))


_lock = threading.RLock()
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


def _present(choosing: str, device: torch.device) -> tuple[dict[str, PackedKernel], list[Found]]:
    """The kernels that are there, by family, and what was found of all families."""
    kernels: dict[str, PackedKernel] = {}
    found = []
    for each in survey(choosing, torch.cuda.get_device_capability(device)):
        loaded = each.lacks or _load(each.family, device)
        found.append(each._replace(lacks=loaded if isinstance(loaded, str) else None))
        if not isinstance(loaded, str):
            kernels[each.family] = loaded
    return kernels, found


# ---- a family's kernels for a device -------------------------------------------------------------

_agreed: dict[Capability, Speeds] = {}
"""What ranks agreed on at a dispatch: the families to choose between, and their speeds."""
_made: dict[tuple[str, torch.device], Sequence[Kernel]] = {}
_told: set[str] = set()


def for_device(device: torch.device) -> Sequence[Kernel]:
    """The kernels of "auto". On a CPU they are those of "torch"."""
    return _kernels("auto", device)


def flash_for_device(device: torch.device) -> Sequence[Kernel]:
    """The kernels of "flash": FlashAttention's, of any generation."""
    return _kernels("flash", device)


def _kernels(choosing: str, device: torch.device) -> Sequence[Kernel]:
    if device.type != "cuda":
        return kernels_of("torch", device)
    with _lock:
        if (choosing, device) not in _made:
            _made[choosing, device] = _make(choosing, device)
        return _made[choosing, device]


def _make(choosing: str, device: torch.device) -> Sequence[Kernel]:
    kernels, found = _present(choosing, device)
    capability = torch.cuda.get_device_capability(device)
    speeds = _agreed.get(capability, MEASURED.get(capability, {}))
    if capability in _agreed:
        found = [
            each._replace(lacks=each.lacks or _not_everywhere(each.family, speeds))
            for each in found
        ]
    usable = [each.family for each in found if each.lacks is None]
    told = f"attention by {choosing!r} {explained(capability, found, speeds)}"
    if told not in _told:
        _told.add(told)
        _log.info(told)
    known = kernels_of("torch", device)
    if usable == ["torch"]:
        return known
    chosen = [Candidate(name, kernels[name], speeds.get(name, ())) for name in usable]
    return Fastest(chosen), *known


def _not_everywhere(name: str, agreed: Speeds) -> str | None:
    return None if name in agreed else "other ranks do not have it, or a trial of it failed"


# ---- agreement of ranks --------------------------------------------------------------------------

_transports: weakref.WeakSet[Any] = weakref.WeakSet()


def agree(transport: Transport) -> None:
    """Agree on kernels and their speeds, once for a domain of GPUs. Every rank calls it.

    Kernels that no table knows on this GPU are measured, which takes about a second after their
    libraries have compiled them. Of the ranks' times the slowest counts, so that all ranks with
    such a GPU choose alike. A domain in one process (``hcp.loopback``) measures nothing.
    """
    if transport.device.type != "cuda" or isinstance(transport, LoopbackTransport):
        return
    if transport not in _transports:
        share(transport, transport.device)
        _transports.add(transport)


def share(transport: Transport, device: torch.device) -> None:
    """As ``agree``, for GPUs of this device's kind."""
    with _lock:
        capability = torch.cuda.get_device_capability(device)
        own = json.dumps(_view(capability, device)).encode()
    views = [_View(**json.loads(view)) for view in transport.all_gather_bytes(own, "kernels")]
    like = [view for view in views if tuple(view.capability) == capability]
    with _lock:
        agreed = agreed_by(like)
        if agreed != _agreed.get(capability):
            _agreed[capability] = agreed
            _made.clear()
    _warn_of_differences(transport.rank, like)


class _View(NamedTuple):
    """What a rank tells the others. In JSON, so tuples arrive as lists."""

    capability: Sequence[int]
    there: Sequence[str]
    """Families of the role "fastest" or "last"."""
    seconds: Mapping[str, Sequence[tuple[float, float]]]
    """Of families without a table, and of "torch"; see ``trial``."""
    agreed: Mapping[str, Sequence[tuple[Sequence[int], float, float]]] | None
    """What it agreed on in another domain."""


def _view(capability: Capability, device: torch.device) -> dict[str, Any]:
    kernels, _ = _present("auto", device)
    agreed = _agreed.get(capability)
    seconds: Mapping[str, Any] = {}
    if agreed is None:
        kernels, seconds = _measured(capability, kernels, device)
    return _View(list(capability), [*kernels], seconds, agreed)._asdict()


def _measured(
    capability: Capability, kernels: dict[str, PackedKernel], device: torch.device
) -> tuple[dict[str, PackedKernel], Mapping[str, Any]]:
    """Measure kernels without a table. Returns those that work, and their seconds."""
    tables = MEASURED.get(capability, {})
    new = {
        name: kernel
        for name, kernel in kernels.items()
        if FAMILIES[name].role == "fastest" and name != "torch" and name not in tables
    }
    if not new:
        return kernels, {}
    try:
        trial = measure(kernels["torch"], new, device)
    except Exception as error:  # the others wait for this rank's view
        failed = dict.fromkeys(new, f"{type(error).__name__}: {error}")
        seconds: Mapping[str, Any] = {}
    else:
        failed, seconds = trial.failed, trial.seconds
    for name, reason in failed.items():
        _log.warning(
            "a trial of the attention kernel %r failed, so that attention goes on without it: %s",
            name,
            reason,
        )
    return {name: kernel for name, kernel in kernels.items() if name not in failed}, seconds


def agreed_by(views: Sequence[_View]) -> Speeds:
    """The families that every rank has, and their speeds, from the views of ranks with one kind of
    GPU. What one of them agreed on before holds."""
    everywhere = [name for name in views[0].there if all(name in view.there for view in views)]
    before = next((view.agreed for view in views if view.agreed is not None), None)
    if before is not None:
        speeds = {
            name: tuple(Speed(tuple(lengths), *gains) for lengths, *gains in rows)
            for name, rows in before.items()
        }
        return {name: speeds[name] for name in speeds if name in everywhere}
    capability = cast(Capability, tuple(views[0].capability))
    tables = MEASURED.get(capability, {})
    return {name: tables.get(name) or _slowest(name, views) for name in everywhere}


def _slowest(name: str, views: Sequence[_View]) -> tuple[Speed, ...]:
    """Speeds from the slowest rank's times. None where some rank has no times."""
    if name == "torch" or not all({name, "torch"} <= view.seconds.keys() for view in views):
        return ()

    def slowest(family: str, pack: int, direction: int) -> float:
        return max(view.seconds[family][pack][direction] for view in views)

    return tuple(
        Speed(lengths, *(slowest("torch", i, way) / slowest(name, i, way) for way in (0, 1)))
        for i, lengths in enumerate(PACKS)
    )


def _warn_of_differences(rank: int, views: Sequence[_View]) -> None:
    names = dict.fromkeys(name for view in views for name in view.there)
    partly = [name for name in names if not all(name in view.there for view in views)]
    if partly and rank == 0:
        _log.warning(
            "the attention kernels %s are not there on every rank, so that no rank uses them: "
            "install the same packages on all",
            partly,
        )


# ---- in words ------------------------------------------------------------------------------------


def explained(capability: Capability, found: Sequence[Found], speeds: Speeds) -> str:
    """Which kernels are there, which one computes what, and what is not there, in one line."""
    there = [each for each in found if each.lacks is None]
    shares = _shares([each.family for each in there], speeds)
    parts = [f"{each.shown} {shares[each.family]}" for each in there]
    lacking = [f"{each.family}: {each.lacks}" for each in found if each.lacks is not None]
    text = f"on compute capability {dotted(capability)}: {'; '.join(parts)}"
    return text + (f". Not used: {'; '.join(lacking)}" if lacking else "")


def _shares(names: Sequence[str], speeds: Speeds) -> dict[str, str]:
    """What each family computes, as a share of the measured packs."""
    packs = list(dict.fromkeys(speed.lengths for name in names for speed in speeds.get(name, ())))
    if not packs:
        return {name: _unknown(name) for name in names}
    wins = {name: [0, 0] for name in names}
    for lengths in packs:
        place = place_of_pack(lengths)
        for way in (0, 1):
            gains = {
                name: gain_of(name, speeds.get(name, ()), place, backward=bool(way))
                for name in names
            }
            wins[max(gains, key=lambda name: gains[name])][way] += 1
    return {
        name: f"computes what is like {ahead[0]} of {len(packs)} measured packs forward and "
        f"{ahead[1]} backward"
        if name == "torch" or speeds.get(name)
        else _unknown(name)
        for name, ahead in wins.items()
    }


def _unknown(name: str) -> str:
    if name == "torch":
        return "computes every call that it takes"
    if FAMILIES[name].role == "last":
        return "computes calls that no other takes"
    return (
        "is in no table of such a GPU, so that the first hcp.dispatch measures it; until then it "
        "computes calls that no other takes"
    )


def advice(capability: Capability, there: Sequence[str]) -> list[str]:
    """What another package would bring on a GPU, a line for each that is in the table of speeds and
    would be the fastest for some pack."""
    tables = MEASURED.get(capability, {})
    lines = []
    for name, speeds in tables.items():
        if name in there:
            continue
        gains = [
            speed.gain(backward=backward)
            / max(
                gain_of(
                    other, tables.get(other, ()), place_of_pack(speed.lengths), backward=backward
                )
                for other in ("torch", *there)
            )
            for speed in speeds
            for backward in (False, True)
        ]
        ahead = [gain for gain in gains if gain > 1.0]
        if ahead:
            lines.append(
                f"{FAMILIES[name].package} would be faster in {len(ahead)} of {len(gains)} "
                f"measured cases (packs, forward and backward), up to {max(ahead):.1f} times: "
                "pip install 'hcp[kernels]'"
            )
    return lines
