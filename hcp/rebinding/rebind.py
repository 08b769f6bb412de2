"""Every place of a model that holds a training group holds its eval twin instead; undone exactly.

    with hcp.eval_cp_context(model, train_pgs, eval_pgs):
        evaluate(model)

What is a slot, and what only looks like one, is found by hcp.rebinding.walk, once; the table
is kept with the model while its structure holds. A switch is a loop in C over the table.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from hcp._core import Rebinding, SlotTable
from hcp.errors import HcpError
from hcp.exchange.transport import Transport
from hcp.groups.groups import ProcessGroups
from hcp.rebinding.holders import find_elsewhere
from hcp.rebinding.walk import _HOME, Exclude, Finding, Slot, Twins, Walk, listed


def eval_cp_context(
    model: object,
    train_pgs: ProcessGroups,
    eval_pgs: ProcessGroups,
    *,
    exclude: Exclude = (),
    strict: bool = False,
) -> AbstractContextManager[ProcessGroups]:
    """A context inside which `model` uses `eval_pgs` wherever it uses `train_pgs`.

    `model` is a module, or any object or list of them (the chunks of a virtual pipeline). The
    context gives `eval_pgs`. Every rank enters; on entry the ranks of dp_cp compare what they are
    about to swap. All slots are swapped or none. On any exit, exceptions and Ctrl-C included, each
    slot gets back what it held. Entering it again inside swaps nothing; entering another one from a
    layout that the model does not have just then is an error, and so is entering any in a second
    thread, since the thread that is inside would take the layout away.

    `exclude`: paths ("vision_model", "*.vision"), objects or classes that stay as they are, with
    everything that is reached through them alone. `strict`: refuse to enter when `audit` finds a
    place that looks dependent on the layout and that nothing covers.

    Raises ValueError when the model holds nothing of `train_pgs` to swap (with the arguments in the
    wrong order, for instance), when it has another layout, and when a twin is missing or ambiguous;
    HcpError on the other ranks when one refuses, on all when they found different slots, and in a
    second thread.
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

    `rebind(model, train_pgs, other_pgs)` is what `eval_cp_context` does on entry. With a mapping
    `{group: twin}` only what holds those objects is swapped, nothing derived from them; `agree` is
    the transport (`pgs.transport`) whose ranks compare their slots first, all of which then call.

    What comes back undoes the switch, by `restore()`, at the end of a `with` block, and when it is
    dropped; `keep()` makes it last, between two phases of a job.
    """
    if isinstance(old, ProcessGroups):
        if new is None:
            raise ValueError("rebind was given old groups and no new ones, expected both")
        _check_collections(old, new)
        return Rebound(_Request(model, old, new, listed(exclude), strict, old.transport))
    if new is not None or not isinstance(old, Mapping) or not old:
        raise ValueError(
            f"rebind was given a {type(old).__name__}{' and more' if new is not None else ''}, "
            "expected two hcp.ProcessGroups, or one mapping {group: twin, ...} that is not empty"
        )
    return Rebound(_Request(model, dict(old), None, listed(exclude), strict, agree))


def find_slots(
    model: object, train_pgs: ProcessGroups, eval_pgs: ProcessGroups, *, exclude: Exclude = ()
) -> list[Slot]:
    """The slots that `eval_cp_context` would swap, in its order. No communication.

    Looks into modules, objects' __dict__ and __slots__, dictionaries, lists, tuples, sets,
    partials, closures and the class attributes of what it meets; never into tensors, Python
    modules, process groups, collections, or what torch and the standard library keep for
    themselves (of a DDP, FSDP or compiled wrapper just the module inside).
    """
    _check_collections(train_pgs, eval_pgs)
    return _walk(_Request(model, train_pgs, eval_pgs, listed(exclude), False, None)).slots


@dataclass(frozen=True, slots=True)
class Audit:
    """What a switch would do, and what it would leave; `print(audit)` lists it."""

    slots: list[Slot]
    uncovered: list[Finding]
    """Places that look dependent on the layout and that nothing covers."""
    elsewhere: list[Finding]
    """What holds a training group, in the whole process, and is not reached from the model."""
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


def audit(
    model: object, train_pgs: ProcessGroups, eval_pgs: ProcessGroups, *, exclude: Exclude = ()
) -> Audit:
    """Everything that `eval_cp_context` would swap and everything suspicious that it would not.

    No communication, and nothing is swapped.
    """
    _check_collections(train_pgs, eval_pgs)
    walk = _walk(_Request(model, train_pgs, eval_pgs, listed(exclude), True, None))
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


@dataclass(frozen=True, slots=True)
class _Request:
    """What is to be swapped for what, where."""

    model: object
    old: Any
    new: Any
    exclude: tuple[Any, ...]
    strict: bool
    transport: Transport | None

    def twins(self) -> Twins:
        return Twins.of_mapping(self.old) if self.new is None else Twins(self.old, self.new)

    def key(self) -> tuple[Any, ...]:
        if self.new is None:
            old: Any = tuple((id(a), id(b)) for a, b in self.old.items())
        else:
            old = (id(self.old), id(self.new))
        chunks = self.model if isinstance(self.model, (list, tuple)) else (self.model,)
        return (
            old,
            tuple(map(id, chunks)),
            self.strict,
            *(x if isinstance(x, str) else id(x) for x in self.exclude),
        )

    def layouts(self) -> str:
        return "" if self.new is None else f"{self.old!r} to {self.new!r}"


class _EvalContext(Rebinding):
    # Leaving is Rebinding.__exit__, in C: Ctrl-C cannot arrive between the body and the restoring.

    def __init__(
        self,
        model: object,
        train_pgs: ProcessGroups,
        eval_pgs: ProcessGroups,
        exclude: Exclude,
        strict: bool,
    ) -> None:
        super().__init__()
        self._request = _Request(
            model, train_pgs, eval_pgs, listed(exclude), strict, train_pgs.transport
        )

    def __enter__(self) -> ProcessGroups:  # type: ignore[override]
        table = _agreed_table(self._request)
        try:
            self.switch(table.switch)
            return self._request.new  # type: ignore[no-any-return]
        except BaseException:
            self.restore()
            raise


class Rebound(Rebinding):
    """A switch that has been made: see `rebind`."""

    def __init__(self, request: _Request) -> None:
        super().__init__()
        self.switch(_agreed_table(request).switch)


# ---- tables, kept with the model -----------------------------------------------------------------


class _Table:
    """The slots of one request, and whether they are still all there is."""

    def __init__(self, request: _Request, home: _Home) -> None:
        walk = _walk(request, home.state["layout"])
        self.slots = walk.slots
        self._walk = walk if request.strict else None
        self.still_holds: Callable[[], bool] = walk.records.take()
        switched = [*walk.slots, *home.marks(request)]
        self.switch = SlotTable(
            [(slot.kind, slot.owner, slot.key, slot.path) for slot in switched],
            [slot.value for slot in switched],
        )
        self.request = request  # what its key names stays alive
        self.digest = hashlib.sha256(self.text().encode()).digest()

    def check_covered(self) -> None:
        """What is elsewhere may be new, though the model is the same."""
        if self._walk is None:
            return
        findings = [*self._walk.findings, *find_elsewhere(self._walk)]
        self._walk.excluded.check_used()
        if findings:
            raise ValueError(_not_covered(findings))

    def text(self) -> str:
        # Sorted: Megatron-Core fills its collection of groups from a Python set, hence in another
        # order in each process.
        lines = sorted(f"{slot.path} ({slot.role})" for slot in self.slots)
        return "\n".join([*lines, self.request.layouts()])


class _Home:
    """What hcp keeps with a model: tables by request, and the layout that it is switched to.

    It goes with the model and stays behind when the model is copied or saved.
    """

    LIMIT = 8

    def __init__(self) -> None:
        self.tables: dict[tuple[Any, ...], _Table] = {}
        self.state: dict[str, Any] = {"inside": None, "layout": None, "thread": 0, "depth": 0}

    def __reduce__(self) -> tuple[Any, ...]:
        return _Home, ()

    def marks(self, request: _Request) -> list[Slot]:
        """The last slots of all: what the model is switched to, by whom, and how many are open."""
        state = self.state
        marks = {"inside": request.key(), "thread": threading.get_ident()}
        if request.new is not None:
            marks["layout"] = request.new
        return [
            *(Slot("model", name, "item", state, name, value) for name, value in marks.items()),
            self.depth_mark(),
        ]

    def depth_mark(self) -> Slot:
        return Slot("model", "depth", "depth", self.state, "depth", self.state["depth"] + 1)

    def check_thread(self) -> None:
        state = self.state
        if state["depth"] and state["thread"] != threading.get_ident():
            raise HcpError(
                f"the model is inside a context that thread {state['thread']} has entered, and "
                f"this is thread {threading.get_ident()}: when that one leaves, this one would go "
                "on with the groups of training; enter once, around all threads that evaluate"
            )

    def check_layout(self, request: _Request) -> None:
        """Whoever enters from a layout that the model has left would swap a part of it, or none."""
        layout = self.state["layout"]
        if not self.state["depth"] or layout is None or request.new is None:
            return
        if not _same_layout(layout, request.old):
            raise ValueError(_elsewhere(layout, request))

    def table(self, request: _Request) -> _Table | _Nothing:
        if self.state["depth"] and self.state["inside"] == request.key():
            return _Nothing(request, self)
        self.check_layout(request)
        key = (self.state["depth"], threading.get_ident(), *request.key())
        table = self.tables.pop(key, None)
        if table is None or not table.still_holds():
            table = _Table(request, self)
        self.tables[key] = table
        while len(self.tables) > self.LIMIT:
            self.tables.pop(next(iter(self.tables)))
        table.check_covered()
        return table


class _Nothing:
    """In place of a table where the model is switched already: one more context is open."""

    def __init__(self, request: _Request, home: _Home) -> None:
        mark = home.depth_mark()
        self.switch = SlotTable([(mark.kind, mark.owner, mark.key, mark.path)], [mark.value])
        self.request = request
        self.digest = hashlib.sha256(self.text().encode()).digest()

    def text(self) -> str:
        return f"already inside\n{self.request.layouts()}"


_loose: dict[int, tuple[object, _Home]] = {}
"""Homes of models that have no place for one, dictionaries for instance, while they are open."""


def _home(model: object) -> _Home:
    """Where a model keeps its tables: with its first object that has a __dict__."""
    parts = model[:1] if isinstance(model, (list, tuple)) else ()
    for owner in (model, *parts):
        attributes = getattr(owner, "__dict__", None)
        if type(attributes) is dict and not isinstance(owner, type):
            home: _Home = attributes.setdefault(_HOME, _Home())
            return home
    for key in [key for key, (_, home) in _loose.items() if not home.state["depth"]]:
        del _loose[key]
    first = parts[0] if parts else model
    return _loose.setdefault(id(first), (first, _Home()))[1]


def _same_layout(a: ProcessGroups, b: ProcessGroups) -> bool:
    return a is b or (
        a.roles == b.roles and all(getattr(a, role) is getattr(b, role) for role in a.roles)
    )


def _elsewhere(layout: ProcessGroups, request: _Request) -> str:
    return (
        f"the model is in the layout {layout!r}, to which a context or a rebinding has switched "
        f"it, expected {request.old!r}, the one to switch from: leave that context first, or "
        "switch from the layout that it gave"
    )


def _walk(request: _Request, layout: ProcessGroups | None = None) -> Walk:
    """`layout`: what the model was switched to last, as far as hcp knows."""
    twins = request.twins()
    walk = Walk(twins, request.exclude)
    walk.run(request.model)
    if not request.strict:  # else once it is known what is elsewhere
        walk.excluded.check_used()
    if not walk.groups_found and (twins.differing or not walk.shared):
        raise ValueError(_nothing_to_swap(walk, twins.differing))
    if not twins.differing:
        _check_nothing_left(walk, request, layout)
    return walk


def _check_nothing_left(walk: Walk, request: _Request, layout: ProcessGroups | None) -> None:
    """Layouts of the same groups leave nothing to swap, in a model that has one of them."""
    if layout is None or _same_layout(layout, request.old):
        return
    left = {r for r in request.old.roles if getattr(layout, r, None) is not getattr(request.old, r)}
    if not left & walk.shared_roles:
        raise ValueError(_elsewhere(layout, request))


def _not_covered(findings: Sequence[Finding]) -> str:
    listed = "\n  ".join(str(finding) for finding in findings[:20])
    more = f"\n  and {len(findings) - 20} more" if len(findings) > 20 else ""
    return (
        f"strict: {len(findings)} places look dependent on the layout and nothing covers "
        f"them:\n  {listed}{more}"
    )


def _nothing_to_swap(walk: Walk, differing: Sequence[str]) -> str:
    if walk.eval_held:
        return (
            "the model holds nothing of train_pgs that differs from eval_pgs, but holds eval_pgs "
            f"at {walk.eval_held[0]}: the arguments look swapped, expected "
            "eval_cp_context(model, train_pgs, eval_pgs); or the model is inside such a context"
        )
    found = f"; it holds only what both layouts share: {walk.shared[0]}" if walk.shared else ""
    return (
        f"the model holds none of train_pgs, expected the collection or one of its groups "
        f"{', '.join(differing)}{' ' if differing else ''}somewhere in its modules, attributes, "
        f"dictionaries, lists or tuples{found}; pass the collection that the model was built with"
    )


# ---- agreement -----------------------------------------------------------------------------------

_FOUND, _REFUSED = b"found", b"refused"


def _agreed_table(request: _Request) -> _Table | _Nothing:
    """The table, after every rank of dp_cp has found the same; else an error on all of them."""
    home = _home(request.model)
    home.check_thread()  # alone: the other thread may be in the middle of a collective
    if request.transport is None:
        return home.table(request)
    transport = request.transport
    table: _Table | _Nothing | None = None
    refusal: Exception | None = None
    try:
        table = home.table(request)
        own = _FOUND + table.digest
    except Exception as error:
        refusal = error
        own = _REFUSED + hashlib.sha256(str(error).encode()).digest()
    digests = transport.all_gather_bytes(own.ljust(64, b"\0"), "hcp.eval_cp_context")
    if table is not None and all(digest == digests[transport.rank] for digest in digests):
        return table
    # Every rank saw the same digests, so all of them come here, and none swaps.
    text = str(refusal) if table is None else table.text()
    tables = [
        other.decode()
        for other in transport.all_gather_bytes(text.encode(), "hcp.eval_cp_context: slots")
    ]
    if refusal is not None:
        raise refusal
    raise HcpError(_disagreement(transport.rank, digests, tables))


def _disagreement(rank: int, digests: Sequence[bytes], tables: Sequence[str]) -> str:
    for other, digest in enumerate(digests):
        if digest.startswith(_REFUSED):
            return (
                f"rank {rank}: nothing was swapped, because rank {other} refused: {tables[other]}"
            )
    usual = Counter(digests).most_common(1)[0][0]
    odd = next(other for other, digest in enumerate(digests) if digest != usual)
    expected = tables[digests.index(usual)].split("\n")
    got = tables[odd].split("\n")
    at = next(i for i, lines in enumerate(zip(expected, got, strict=False)) if len(set(lines)) > 1)
    return (
        f"rank {rank}: nothing was swapped, because the ranks of dp_cp would swap different slots: "
        f"rank {odd} has {len(got) - 1} and rank {digests.index(usual)} {len(expected) - 1}, and "
        f"at slot {at} rank {odd} has {got[at]} where {expected[at]} was expected; build the model "
        "in the same way on every rank"
    )
