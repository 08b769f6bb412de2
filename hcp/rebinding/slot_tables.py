"""Tables of slots. A table is made once for a request, kept with the model, and used at every
switch."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from hcp._core import SlotTable
from hcp.errors import HcpError
from hcp.rebinding import packages, revision
from hcp.rebinding.findings import Finding
from hcp.rebinding.holders import find_elsewhere
from hcp.rebinding.places import MODEL_TABLES
from hcp.rebinding.request import Request, another_layout, same_layout, walk_for
from hcp.rebinding.safe_access import is_a, own_attributes
from hcp.rebinding.writers import Slot


class RequestTable:
    """The slots of one request, and a test of whether the model still has these and no others."""

    def __init__(self, request: Request, tables: ModelTables) -> None:
        self._revision = revision.current()  # before the walk, which may load further rules
        walk = walk_for(request, tables.state["layout"])
        self.slots = walk.slots
        self._walk = walk if request.strict else None
        self._unchanged: Callable[[], bool] = walk.records.take(request.strict)
        switched = [*walk.slots, *tables.marks(request)]
        self.switch = SlotTable(
            [(slot.kind, slot.owner, slot.key, slot.path) for slot in switched],
            [slot.value for slot in switched],
        )
        self.request = request  # what its key names stays alive
        self.digest = hashlib.sha256(self.text().encode()).digest()

    def still_holds(self) -> bool:
        """Whether another walk would find the same slots."""
        return self._revision is revision.current() and self._unchanged()

    def check_covered(self) -> None:
        """Raise ValueError, if the request is strict, for a place that nothing covers. The search
        outside the model runs each time: what it finds may be new."""
        if self._walk is None:
            return
        findings = [*self._walk.findings, *find_elsewhere(self._walk)]
        self._walk.excluded.check_used()
        if findings:
            raise ValueError(_not_covered(findings))

    def text(self) -> str:
        """The text that the ranks compare: one line for each slot."""
        # Sorted: Megatron-Core fills its collection of groups from a Python set, hence in another
        # order in each process.
        lines = sorted(f"{slot.path} ({slot.role})" for slot in self.slots)
        return "\n".join([*lines, self.request.layouts()])


class ModelTables:
    """The tables of one model by request, and what the model is switched to.

    They are an attribute of the model. A copy and a pickle of the model have empty ones.
    """

    LIMIT = 8
    """Most tables that are kept."""

    def __init__(self) -> None:
        self.tables: dict[tuple[Any, ...], RequestTable] = {}
        self.state: dict[str, Any] = {"inside": None, "layout": None, "thread": 0, "depth": 0}

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelTables, ()

    def marks(self, request: Request) -> list[Slot]:
        """The last slots of a switch: the request, the thread, and how many switches are open."""
        state = self.state
        marks = {"inside": request.key(), "thread": threading.get_ident()}
        if request.new is not None:
            marks["layout"] = request.new
        return [
            *(Slot("model", name, "item", state, name, value) for name, value in marks.items()),
            self.depth_mark(),
        ]

    def depth_mark(self) -> Slot:
        """The slot that counts open switches."""
        return Slot("model", "depth", "depth", self.state, "depth", self.state["depth"] + 1)

    def check_thread(self) -> None:
        """Raise HcpError if another thread is inside a context of this model."""
        state = self.state
        if state["depth"] and state["thread"] != threading.get_ident():
            raise HcpError(
                f"the model is inside a context that thread {state['thread']} has entered, and "
                f"this is thread {threading.get_ident()}: when that one leaves, this one would go "
                "on with the groups of training; enter once, around all threads that evaluate",
                code="other-thread",
            )

    def check_layout(self, request: Request) -> None:
        """Raise ValueError if the model is in another layout than the one to switch from."""
        layout = self.state["layout"]
        if not self.state["depth"] or layout is None or request.new is None:
            return
        if not same_layout(layout, request.old):
            raise ValueError(another_layout(layout, request))

    def table(self, request: Request) -> RequestTable | DepthOnly:
        """The kept table for a request, or a new one if the model has changed since."""
        if self.state["depth"] and self.state["inside"] == request.key():
            return DepthOnly(request, self)
        self.check_layout(request)
        packages.load_imported()
        key = (self.state["depth"], threading.get_ident(), *request.key())
        table = self.tables.pop(key, None)
        if table is None or not table.still_holds():
            table = RequestTable(request, self)
        self.tables[key] = table
        while len(self.tables) > self.LIMIT:
            self.tables.pop(next(iter(self.tables)))
        table.check_covered()
        return table


class DepthOnly:
    """Replaces a table if the model is switched already: it counts one more open context."""

    def __init__(self, request: Request, tables: ModelTables) -> None:
        mark = tables.depth_mark()
        self.switch = SlotTable([(mark.kind, mark.owner, mark.key, mark.path)], [mark.value])
        self.request = request
        self.digest = hashlib.sha256(self.text().encode()).digest()

    def text(self) -> str:
        """The text that the ranks compare."""
        return f"already inside\n{self.request.layouts()}"


_loose: dict[int, tuple[object, ModelTables]] = {}
"""(model, tables) by the model's identity, for models without a __dict__, such as dictionaries,
while they are switched."""


def tables_of(model: object) -> ModelTables:
    """Return the tables of a model. Its first object that has a __dict__ keeps them."""
    parts = model[:1] if is_a(model, (list, tuple)) else ()
    for owner in (model, *parts):
        attributes = own_attributes(owner)
        if attributes is not None:
            tables: ModelTables = attributes.setdefault(MODEL_TABLES, ModelTables())
            return tables
    for key in [key for key, (_, tables) in _loose.items() if not tables.state["depth"]]:
        del _loose[key]
    first = parts[0] if parts else model
    return _loose.setdefault(id(first), (first, ModelTables()))[1]


def _not_covered(findings: Sequence[Finding]) -> str:
    listed = "\n  ".join(str(finding) for finding in findings[:20])
    more = f"\n  and {len(findings) - 20} more" if len(findings) > 20 else ""
    return (
        f"strict: {len(findings)} places look dependent on the layout and nothing covers "
        f"them:\n  {listed}{more}"
    )
