"""Every place of a model that holds a training group holds its eval twin instead; undone exactly.

    with hcp.eval_cp_context(model, train_pgs, eval_pgs):
        evaluate(model)

What is a slot, and what only looks like one, is found by the walk of hcp.slots, once; the table
is kept with the model while its structure holds. A switch is a loop in C over the table.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from hcp._core import Rebinding, SlotTable
from hcp.errors import HcpError
from hcp.exchange import Transport
from hcp.groups import ProcessGroups
from hcp.slots import _HOME, Exclude, Finding, Slot, Twins, Walk, listed


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
    slot gets back what it held. Entering it again inside swaps nothing.

    `exclude`: paths ("vision_model", "*.vision"), objects or classes that stay as they are, with
    everything that is reached through them alone. `strict`: refuse to enter when `audit` finds a
    place that looks dependent on the layout and that nothing covers.

    Raises ValueError when the model holds nothing of `train_pgs` to swap (with the arguments in the
    wrong order, for instance) and when a twin is missing or ambiguous; HcpError on the other ranks
    when one refuses, and on all when they found different slots.
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
    excluded: list[str]
    """Paths at which `exclude` kept the walk out."""
    shared: list[str]
    """Places that hold a group of both layouts."""

    def __str__(self) -> str:
        lines = [f"{len(self.slots)} slots"]
        lines += [f"  {slot.path} ({slot.role})" for slot in self.slots]
        lines += [f"{len(self.uncovered)} places look dependent on the layout and are not covered"]
        lines += [f"  {finding}" for finding in self.uncovered]
        lines += [f"{len(self.excluded)} excluded"] + [f"  {path}" for path in self.excluded]
        return "\n".join(lines)


def audit(
    model: object, train_pgs: ProcessGroups, eval_pgs: ProcessGroups, *, exclude: Exclude = ()
) -> Audit:
    """Everything that `eval_cp_context` would swap and everything suspicious that it would not.

    No communication, and nothing is swapped.
    """
    _check_collections(train_pgs, eval_pgs)
    walk = _walk(_Request(model, train_pgs, eval_pgs, listed(exclude), False, None))
    return Audit(walk.slots, walk.findings, walk.excluded.paths, walk.shared)


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

    def __init__(self, request: _Request) -> None:
        walk = _walk(request)
        if request.strict and walk.findings:
            raise ValueError(_not_covered(walk.findings))
        self.slots = walk.slots
        self.still_holds: Callable[[], bool] = walk.records.take()
        switched = [*walk.slots, *_marks(request)]
        self.switch = SlotTable(
            [(slot.kind, slot.owner, slot.key, slot.path) for slot in switched],
            [slot.value for slot in switched],
        )
        self.request = request  # what its key names stays alive
        self.digest = hashlib.sha256(self.text().encode()).digest()

    def text(self) -> str:
        # Sorted: Megatron-Core fills its collection of groups from a Python set, hence in another
        # order in each process.
        lines = sorted(f"{slot.path} ({slot.role})" for slot in self.slots)
        return "\n".join([*lines, self.request.layouts()])


class _Home:
    """What hcp keeps with a model: tables by request, and the request that it is switched to.

    It goes with the model and stays behind when the model is copied or saved.
    """

    LIMIT = 8

    def __init__(self) -> None:
        self.tables: dict[tuple[Any, ...], _Table] = {}
        self.state: dict[str, Any] = {"inside": None, "depth": 0}

    def __reduce__(self) -> tuple[Any, ...]:
        return _Home, ()

    def table(self, request: _Request) -> _Table:
        key = (self.state["depth"], *request.key())
        table = self.tables.pop(key, None)
        if table is None or not table.still_holds():
            table = _Table(request)
        self.tables[key] = table
        while len(self.tables) > self.LIMIT:
            self.tables.pop(next(iter(self.tables)))
        return table


class _Nothing:
    """In place of a table where the model is switched already."""

    switch = SlotTable((), ())

    def __init__(self, request: _Request) -> None:
        self.request = request
        self.digest = hashlib.sha256(self.text().encode()).digest()

    def text(self) -> str:
        return f"already inside\n{self.request.layouts()}"


def _home(model: object) -> _Home | None:
    """Where a model keeps its tables: with its first object that has a __dict__."""
    for owner in (model, *(model[:1] if isinstance(model, (list, tuple)) else ())):
        attributes = getattr(owner, "__dict__", None)
        if type(attributes) is dict and not isinstance(owner, type):
            home: _Home = attributes.setdefault(_HOME, _Home())
            return home
    return None


def _marks(request: _Request) -> list[Slot]:
    """The last slots of all: which request the model is switched to, and how many are open."""
    home = _home(request.model)
    if home is None:
        return []
    state = home.state
    return [
        Slot("model", "inside", "item", state, "inside", request.key()),
        Slot("model", "depth", "depth", state, "depth", state["depth"] + 1),
    ]


def _table(request: _Request) -> _Table | _Nothing:
    home = _home(request.model)
    if home is None:
        return _Table(request)
    if home.state["inside"] == request.key():
        return _Nothing(request)
    return home.table(request)


def _walk(request: _Request) -> Walk:
    twins = request.twins()
    walk = Walk(twins, request.exclude)
    walk.run(request.model)
    if not walk.groups_found and twins.differing:
        raise ValueError(_nothing_to_swap(walk, twins.differing))
    return walk


def _not_covered(findings: Sequence[Finding]) -> str:
    listed = "\n  ".join(str(finding) for finding in findings[:20])
    more = f"\n  and {len(findings) - 20} more" if len(findings) > 20 else ""
    return (
        f"strict: {len(findings)} places of the model look dependent on the layout and nothing "
        f"covers them:\n  {listed}{more}"
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
        f"{', '.join(differing)} somewhere in its modules, attributes, dictionaries, lists or "
        f"tuples{found}; pass the collection that the model was built with"
    )


# ---- agreement -----------------------------------------------------------------------------------

_FOUND, _REFUSED = b"found", b"refused"


def _agreed_table(request: _Request) -> _Table | _Nothing:
    """The table, after every rank of dp_cp has found the same; else an error on all of them."""
    if request.transport is None:
        return _table(request)
    transport = request.transport
    table: _Table | _Nothing | None = None
    refusal: Exception | None = None
    try:
        table = _table(request)
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
