"""Swap every training group of a model for its eval twin, and restore the model exactly.

    with hcp.eval_cp_context(model, train_pgs, eval_pgs):
        evaluate(model)

The walk finds the slots once; their table is kept with the model while its structure holds. A
switch is a loop in C over the table.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from hcp._core import Rebinding
from hcp._html import table
from hcp._ranges import later_range, range_of
from hcp.errors import HcpError
from hcp.exchange.transport import Transport
from hcp.groups.process_groups import ProcessGroups
from hcp.rebinding.exclude import Exclude, listed
from hcp.rebinding.findings import Finding
from hcp.rebinding.holders import find_elsewhere
from hcp.rebinding.request import Request, walk_for
from hcp.rebinding.slot_tables import DepthOnly, RequestTable, tables_of
from hcp.rebinding.writers import Slot


def eval_cp_context(
    model: object,
    train_pgs: ProcessGroups,
    eval_pgs: ProcessGroups,
    *,
    exclude: Exclude = (),
    strict: bool = False,
) -> AbstractContextManager[ProcessGroups]:
    """Return a context inside which `model` uses `eval_pgs` in place of `train_pgs`.

    Every rank enters. On entry the ranks of dp_cp compare what they are about to swap, and all
    slots are swapped or none. On any exit, exceptions and Ctrl-C included, each slot gets back what
    it held.

    Entering the context again inside swaps nothing. It is an error to enter one from a layout that
    the model does not have at that moment. It is also an error to enter one in a second thread,
    since the first thread restores the training layout at its exit.

    Args:
        model: a module, or any object or list of them (the chunks of a virtual pipeline).
        train_pgs: the groups that the model holds.
        eval_pgs: the groups that it holds inside.
        exclude: paths (``"vision_model"``, ``"*.vision"``), objects or classes that stay as they
            are, with everything that is reached through them alone.
        strict: refuse to enter if `audit` finds a place that looks dependent on the layout and that
            nothing covers.

    Returns:
        The context, whose value is `eval_pgs`.

    Raises:
        ValueError: the model holds nothing of `train_pgs` to swap (the arguments may be in the
            wrong order), it has another layout, or a twin is missing or ambiguous.
        HcpError: on the other ranks if one refuses, on all ranks if they found different slots, and
            in a second thread.
    """
    _check_collections(train_pgs, eval_pgs)
    return _EvalContext(model, train_pgs, eval_pgs, exclude, strict)


def rebind(
    model: object,
    old: ProcessGroups | Mapping[Any, Any],
    new: ProcessGroups | None = None,
    *,
    exclude: Exclude = (),
    strict: bool = False,
    agree: Transport | None = None,
) -> Rebound:
    """Switch a model at once, from one layout to another or by any mapping of groups to groups.

    `rebind(model, train_pgs, other_pgs)` does what `eval_cp_context` does on entry.

    Args:
        model: a module, or any object or list of them.
        old: the layout that the model has; or a mapping `{group: twin}`, of which only the places
            that hold those objects are swapped, nothing derived from them.
        new: the layout that it gets; None with a mapping.
        exclude: as in :func:`hcp.eval_cp_context`.
        strict: as in :func:`hcp.eval_cp_context`.
        agree: with a mapping, the transport (`pgs.transport`) whose ranks compare their slots
            first: all of them call.

    Returns:
        What undoes the switch by `restore()`, at the end of a `with` block, and when it is dropped.
        `keep()` makes the switch last, between two phases of a job.
    """
    if isinstance(old, ProcessGroups):
        if new is None:
            raise ValueError("rebind was given old groups and no new ones, expected both")
        _check_collections(old, new)
        return Rebound(Request(model, old, new, listed(exclude), strict, old.transport))
    if new is not None or not isinstance(old, Mapping) or not old:
        raise ValueError(
            f"rebind was given a {type(old).__name__}{' and more' if new is not None else ''}, "
            "expected two hcp.ProcessGroups, or one mapping {group: twin, ...} that is not empty"
        )
    return Rebound(Request(model, dict(old), None, listed(exclude), strict, agree))


def find_slots(
    model: object, train_pgs: ProcessGroups, eval_pgs: ProcessGroups, *, exclude: Exclude = ()
) -> list[Slot]:
    """Return the slots that `eval_cp_context` would swap, in its order. Ranks do not communicate.

    The walk goes into modules, objects' __dict__ and __slots__, dictionaries, lists, tuples, sets,
    partials, closures and the class attributes of the objects that it meets. It never goes into
    tensors, Python modules, process groups, collections, or objects that torch and the standard
    library keep for themselves. In a DDP, FSDP or compiled wrapper it visits only the module
    inside.

    Args:
        model: a module, or any object or list of them.
        train_pgs: the groups that the model holds.
        eval_pgs: those that it would get.
        exclude: as in :func:`hcp.eval_cp_context`.

    Returns:
        A list of slots: their paths, what they hold and what they would hold.
    """
    _check_collections(train_pgs, eval_pgs)
    return walk_for(Request(model, train_pgs, eval_pgs, listed(exclude), False, None)).slots


@dataclass(frozen=True, slots=True)
class Audit:
    """The slots of a switch, and the places that it would miss. `print(audit)` lists them."""

    slots: list[Slot]
    uncovered: list[Finding]
    """Places that look dependent on the layout and that nothing covers."""
    elsewhere: list[Finding]
    """Holders of a training group, in the whole process, that the model does not reach."""
    excluded: list[str]
    """Paths at which `exclude` kept the walk out."""
    shared: list[str]
    """Places that hold a group of both layouts."""

    def __str__(self) -> str:
        lines = [f"{len(self.slots)} slots"]
        lines += [f"  {slot.path} ({slot.role})" for slot in self.slots]
        lines += [f"{len(self.uncovered)} places look dependent on the layout and are not covered"]
        lines += [f"  {finding}" for finding in self.uncovered]
        lines += [f"{len(self.elsewhere)} hold a training group and are not reached from the model"]
        lines += [f"  {finding}" for finding in self.elsewhere]
        lines += [f"{len(self.excluded)} excluded"] + [f"  {path}" for path in self.excluded]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [(slot.path, f"slot of {slot.role}") for slot in self.slots]
        rows += [(each.path, f"not covered: {each.reason}") for each in self.uncovered]
        rows += [(each.path, f"not reached: {each.reason}") for each in self.elsewhere]
        rows += [(path, "excluded") for path in self.excluded]
        uncovered = len(self.uncovered) + len(self.elsewhere)
        title = f"{len(self.slots)} slots, {uncovered} places that no switch covers"
        return table(title, ("place", "what it is"), rows)


def audit(
    model: object, train_pgs: ProcessGroups, eval_pgs: ProcessGroups, *, exclude: Exclude = ()
) -> Audit:
    """List all places that `eval_cp_context` would swap, and suspicious ones that it would not.

    Ranks do not communicate, and nothing is swapped.

    Args:
        model: a module, or any object or list of them.
        train_pgs: the groups that the model holds.
        eval_pgs: those that it would get.
        exclude: as in :func:`hcp.eval_cp_context`.

    Returns:
        An :class:`hcp.rebinding.rebind.Audit`, which `print` lists.
    """
    _check_collections(train_pgs, eval_pgs)
    walk = walk_for(Request(model, train_pgs, eval_pgs, listed(exclude), True, None))
    elsewhere = find_elsewhere(walk)
    walk.excluded.check_used()
    return Audit(walk.slots, walk.findings, elsewhere, walk.excluded.paths, walk.shared)


def _check_collections(train_pgs: object, eval_pgs: object) -> None:
    for name, collection in (("train_pgs", train_pgs), ("eval_pgs", eval_pgs)):
        if not isinstance(collection, ProcessGroups):
            raise ValueError(
                f"{name} is a {type(collection).__name__}, expected hcp.ProcessGroups: wrap a "
                "trainer's collection once with hcp.ProcessGroups.from_existing"
            )


# ---- a switch ------------------------------------------------------------------------------------


class _EvalContext(Rebinding):
    # Leaving is Rebinding.__exit__, in C: Ctrl-C cannot arrive between the body and the restoring.
    # It enters the range of restoring, too.

    def __init__(
        self,
        model: object,
        train_pgs: ProcessGroups,
        eval_pgs: ProcessGroups,
        exclude: Exclude,
        strict: bool,
    ) -> None:
        super().__init__()
        self._request = Request(
            model, train_pgs, eval_pgs, listed(exclude), strict, train_pgs.transport
        )

    def __enter__(self) -> ProcessGroups:  # type: ignore[override]
        try:
            with range_of("hcp: rebind"):
                self.switch(_agreed_table(self._request).switch)
            self.range = later_range("hcp: restore")
            return self._request.new  # type: ignore[no-any-return]
        except BaseException:
            self.restore()
            raise


class Rebound(Rebinding):
    """A switch that has been made: see `rebind`."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        try:
            with range_of("hcp: rebind"):
                self.switch(_agreed_table(request).switch)
            self.range = later_range("hcp: restore")
        except BaseException:
            self.restore()
            raise


# ---- agreement -----------------------------------------------------------------------------------

_FOUND, _REFUSED = b"found", b"refused"


def _agreed_table(request: Request) -> RequestTable | DepthOnly:
    """Return the table of a request after all ranks of dp_cp have compared their slots. Raises
    HcpError on all of them if the slots differ."""
    kept = tables_of(request.model)
    kept.check_thread()  # alone: the other thread may be in the middle of a collective
    if request.transport is None:
        return kept.table(request)
    transport = request.transport
    table: RequestTable | DepthOnly | None = None
    refusal: Exception | None = None
    try:
        table = kept.table(request)
        own = _FOUND + table.digest
    except Exception as error:
        refusal = error
        own = _REFUSED + hashlib.sha256(str(error).encode()).digest()
    digests = transport.all_gather_bytes(own.ljust(64, b"\0"), "hcp.eval_cp_context")
    if table is not None and all(digest == digests[transport.rank] for digest in digests):
        return table
    # Every rank saw the same digests, so all of them come here, and none swaps.
    text = str(refusal) if table is None else table.text()
    texts = [
        other.decode()
        for other in transport.all_gather_bytes(text.encode(), "hcp.eval_cp_context: slots")
    ]
    if refusal is not None:
        raise refusal
    raise HcpError(_disagreement(transport.rank, digests, texts), code="swap-refused")


def _disagreement(rank: int, digests: Sequence[bytes], texts: Sequence[str]) -> str:
    for other, digest in enumerate(digests):
        if digest.startswith(_REFUSED):
            return f"rank {rank}: nothing was swapped, because rank {other} refused: {texts[other]}"
    usual = Counter(digests).most_common(1)[0][0]
    odd = next(other for other, digest in enumerate(digests) if digest != usual)
    expected = texts[digests.index(usual)].split("\n")
    got = texts[odd].split("\n")
    at = next(i for i, lines in enumerate(zip(expected, got, strict=False)) if len(set(lines)) > 1)
    return (
        f"rank {rank}: nothing was swapped, because the ranks of dp_cp would swap different slots: "
        f"rank {odd} has {len(got) - 1} and rank {digests.index(usual)} {len(expected) - 1}, and "
        f"at slot {at} rank {odd} has {got[at]} where {expected[at]} was expected; build the model "
        "in the same way on every rank"
    )
