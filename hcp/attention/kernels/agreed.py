"""The speeds of kernels that ranks agree on: those of tables, and those that all measure."""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from hcp.attention.kernels import FAMILIES, PackedKernel
from hcp.attention.kernels.present import dotted, present
from hcp.attention.kernels.speeds import MEASURED, Capability, Speed, Speeds
from hcp.attention.kernels.trial import PACKS, measure
from hcp.exchange.loopback import LoopbackTransport
from hcp.exchange.transport import Transport

_log = logging.getLogger("hcp")

_lock = threading.Lock()
_agreed: dict[Capability, Speeds] = {}
_transports: weakref.WeakSet[Any] = weakref.WeakSet()


def agree(transport: Transport) -> None:
    """Agree on kernels and their speeds, once for a domain of GPUs. Every rank calls it.

    Kernels that no table knows on this GPU are measured, briefly, after their libraries have
    compiled them. Of the ranks' times the slowest counts, so that all ranks with such a GPU choose
    alike. A domain in one process (``hcp.loopback``) measures nothing.
    """
    if transport.device.type != "cuda" or isinstance(transport, LoopbackTransport):
        return
    if transport not in _transports:
        agree_for(transport, transport.device)
        _transports.add(transport)


def agree_for(transport: Transport, device: torch.device) -> None:
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
    _warn_of_differences(transport.rank, like)


def agreed_on(capability: Capability) -> Speeds | None:
    """The families that ranks with such a GPU use, and their speeds: the same object until they
    change. None: nobody has agreed yet."""
    return _agreed.get(capability)


class _View(NamedTuple):
    """What a rank tells the others. In JSON, so tuples arrive as lists."""

    capability: Sequence[int]
    there: Sequence[str]
    """Families with a role."""
    seconds: Mapping[str, Sequence[tuple[float, float]]]
    """Of families without a table, and of "torch"; see ``trial``."""
    agreed: Mapping[str, Sequence[tuple[Sequence[int], float, float]]] | None
    """What it agreed on in another domain."""


def _view(capability: Capability, device: torch.device) -> dict[str, Any]:
    kernels, _ = present("auto", device)
    agreed = _agreed.get(capability)
    seconds: Mapping[str, Any] = {}
    if agreed is None:
        kernels, seconds = _measured(capability, kernels, device)
    before = None if agreed is None else {name: _rows(speeds) for name, speeds in agreed.items()}
    return _View(list(capability), [*kernels], seconds, before)._asdict()


def _rows(speeds: Sequence[Speed]) -> list[tuple[tuple[int, ...], float, float]]:
    return [(speed.lengths, speed.forward, speed.backward) for speed in speeds]


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
    begun = time.perf_counter()
    try:
        trial = measure(kernels["torch"], new, device)
    except Exception as error:  # the others wait for this rank's view
        failed = dict.fromkeys(new, f"{type(error).__name__}: {error}")
        seconds: Mapping[str, Any] = {}
    else:
        failed, seconds = trial.failed, trial.seconds
    _log.info(
        "a trial of the attention kernels %s on compute capability %s took %.1f s, compilation "
        "included",
        [*new],
        dotted(capability),
        time.perf_counter() - begun,
    )
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
            "the attention kernels %s are missing, or failed a trial, on some rank, so that no "
            "rank uses them: install the same packages on all",
            partly,
        )
