"""Every place of a model that holds a training group holds its eval twin instead; undone exactly.

    with hcp.eval_cp_context(model, train_pgs, eval_pgs):
        evaluate(model)

Slots are found by identity, not by name: whatever attribute, dictionary item or list item holds the
very object `train_pgs` or one of its groups is a slot. Groups that both layouts share stay.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import sysconfig
import types
from collections import Counter, UserDict, UserList, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hcp._core import Rebinding
from hcp.errors import HcpError
from hcp.groups import ProcessGroups


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One place that changes hands."""

    path: str
    """Where it is, seen from the model: "model.layers[3].attention.cp_group"."""

    role: str
    """What it holds: a role such as "cp", "collection", or several for a tuple of groups."""

    kind: str
    """How it is written: "item" is owner[key]; "member" an attribute of __slots__."""

    owner: Any = field(repr=False)
    key: Any

    value: Any = field(repr=False)
    """What it holds inside the context."""


def eval_cp_context(
    model: object, train_pgs: ProcessGroups, eval_pgs: ProcessGroups
) -> AbstractContextManager[ProcessGroups]:
    """A context inside which `model` uses `eval_pgs` wherever it uses `train_pgs`.

    `model` is a module, or any object or list of them (the chunks of a virtual pipeline). The
    context gives `eval_pgs`. Every rank enters; on entry the ranks of dp_cp compare what they are
    about to swap. All slots are swapped or none. On any exit, exceptions and Ctrl-C included, each
    slot gets back what it held.

    Raises ValueError when the model holds nothing of `train_pgs` to swap (with the arguments in the
    wrong order, for instance) and when a twin is missing or ambiguous; HcpError on the other ranks
    when one refuses, and on all when they found different slots.
    """
    for name, collection in (("train_pgs", train_pgs), ("eval_pgs", eval_pgs)):
        if not isinstance(collection, ProcessGroups):
            raise ValueError(
                f"{name} is a {type(collection).__name__}, expected hcp.ProcessGroups: wrap a "
                "trainer's collection once with hcp.ProcessGroups.from_existing"
            )
    return _EvalContext(model, train_pgs, eval_pgs)


def find_slots(model: object, train_pgs: ProcessGroups, eval_pgs: ProcessGroups) -> list[Slot]:
    """The slots that `eval_cp_context` would swap, in its order. No communication.

    Looks into modules, objects' __dict__ and __slots__, dictionaries, lists and tuples; never into
    tensors, classes, Python modules, process groups, collections, or what torch and the standard
    library keep for themselves (of a DDP, FSDP or compiled wrapper just the module inside).
    """
    twins = _Twins(train_pgs, eval_pgs)
    walk = _Walk(twins)
    walk.run(model)
    if not walk.slots and twins.differing:
        raise ValueError(_nothing_to_swap(walk, twins.differing))
    return walk.slots


class _EvalContext(Rebinding):
    # Leaving is Rebinding.__exit__, in C: Ctrl-C cannot arrive between the body and the restoring.

    def __init__(self, model: object, train_pgs: ProcessGroups, eval_pgs: ProcessGroups) -> None:
        super().__init__()
        self._arguments = (model, train_pgs, eval_pgs)

    def __enter__(self) -> ProcessGroups:  # type: ignore[override]
        slots = _agreed_slots(*self._arguments)
        try:
            self.switch(
                [(slot.kind, slot.owner, slot.key, slot.path) for slot in slots],
                [slot.value for slot in slots],
            )
            return self._arguments[2]
        except BaseException:
            self.restore()
            raise


# ---- twins ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Twin:
    role: str
    value: Any
    problem: str = ""
    """Why a slot that holds the original cannot be swapped."""


class _Twins:
    """From the identity of each object of the training layout to its counterpart."""

    def __init__(self, train: ProcessGroups, evaluation: ProcessGroups) -> None:
        self._by_id: dict[int, _Twin] = {}
        self.differing = [
            role
            for role in train.roles
            if getattr(train, role) is not getattr(evaluation, role, None)
        ]
        self.eval_only: set[int] = set()
        self._add("collection", train, evaluation)
        if train.source is not None and evaluation.source is not None:
            self._add("collection", train.source, evaluation.source)
        for role in train.roles:
            self._add_role(role, getattr(train, role), getattr(evaluation, role, None))
        originals = {id(getattr(train, role)) for role in train.roles}
        for role in evaluation.roles:
            self.eval_only |= {id(getattr(evaluation, role))} - originals
        if evaluation is not train:
            self.eval_only.add(id(evaluation))
        self.closed = {id(o) for o in (train.source, evaluation.source) if o is not None}
        if train.source is not None and evaluation.source is None:
            # Its own attributes are the slots: nothing of the trainer's kind could replace it.
            self.closed.discard(id(train.source))

    def get(self, value: object) -> _Twin | None:
        return self._by_id.get(id(value))

    def _add(self, role: str, original: object, value: object) -> None:
        self._by_id[id(original)] = _Twin(role, value)

    def _add_role(self, role: str, original: object, value: object | None) -> None:
        known = self._by_id.get(id(original))
        if value is None:
            self._by_id[id(original)] = _Twin(
                role, None, f"eval_pgs has no role {role!r}; give it one, so that it can be swapped"
            )
        elif known is None:
            self._add(role, original, value)
        elif known.value is not value and not known.problem:
            known.problem = (
                f"in train_pgs {known.role!r} and {role!r} are the same object, and eval_pgs has "
                "different ones for them; give each role of train_pgs a group of its own, as "
                "build_process_groups does"
            )


# ---- the walk ------------------------------------------------------------------------------------

_ATOMS = frozenset(
    {str, int, float, bool, complex, bytes, type(None), torch.Tensor, torch.nn.Parameter}
    | {torch.dtype, torch.device, torch.Size, types.FunctionType, types.BuiltinFunctionType}
)
_CLOSED = (torch.Tensor, types.ModuleType, type, dist.ProcessGroup, ProcessGroups)
_CONTAINERS = (dict, list, deque, UserDict, UserList)
_OPEN_STDLIB = (*_CONTAINERS, types.SimpleNamespace, argparse.Namespace)
_MODULE_KEEPS = frozenset(vars(torch.nn.Module()))  # parameters, buffers, hooks, children

_Held = tuple[str, Any, Any, Any, str]
"""kind, owner, key, value, path of one place that holds something."""


class _Walk:
    """Goes through everything that a model reaches, each object once, in a fixed order."""

    def __init__(self, twins: _Twins) -> None:
        self.slots: list[Slot] = []
        self.shared: list[str] = []
        self.eval_held: list[str] = []
        self._twins = twins
        self._seen: set[int] = set()
        self._todo: deque[tuple[Any, str]] = deque()
        self._tuples: dict[int, tuple[str, Any]] = {}
        self._kept: list[Any] = []

    def run(self, model: object) -> None:
        self._reach(model, "model")
        while self._todo:
            holder, path = self._todo.popleft()
            for held in _places(holder, path):
                self._look(held)

    def _look(self, held: _Held) -> None:
        kind, owner, key, value, path = held
        if type(value) in _ATOMS:
            return
        role, new = self._replace(value, path)
        if new is not value:
            self.slots.append(Slot(path, role, kind, owner, key, new))

    def _replace(self, value: Any, path: str) -> tuple[str, Any]:
        """The role and the new value of a place; the value itself when nothing is to change."""
        twin = self._twins.get(value)
        if twin is not None:
            if twin.problem:
                raise ValueError(f"{path} holds the group {twin.role!r}: {twin.problem}")
            if twin.value is value:
                self.shared.append(f"{path} ({twin.role})")
            return twin.role, twin.value
        if id(value) in self._twins.eval_only:
            self.eval_held.append(path)
        elif isinstance(value, tuple):
            return self._replace_tuple(value, path)
        elif isinstance(value, (set, frozenset)):
            self._refuse_set(value, path)
        else:
            self._reach(value, path)
        return "", value

    def _replace_tuple(self, value: tuple[Any, ...], path: str) -> tuple[str, Any]:
        if id(value) not in self._tuples:
            self._kept.append(value)  # an identity is only good while its object lives
            self._tuples[id(value)] = self._rebuild(value, path)
        return self._tuples[id(value)]

    def _rebuild(self, value: tuple[Any, ...], path: str) -> tuple[str, Any]:
        roles, items = [], []
        for i, item in enumerate(value):
            role, new = ("", item) if type(item) in _ATOMS else self._replace(item, f"{path}[{i}]")
            items.append(new)
            roles += [role] if new is not item else []
        if not roles:
            return "", value
        # Also right for named tuples, whose classes take their fields one by one.
        return ", ".join(roles), tuple.__new__(type(value), items)

    def _refuse_set(self, value: Iterable[Any], path: str) -> None:
        for item in value:
            twin = self._twins.get(item)
            if twin is not None and twin.value is not item:
                raise ValueError(
                    f"{path} is a set that holds the group {twin.role!r}, and items of a set "
                    "have no place to swap; keep groups in a list, a dictionary or an attribute"
                )

    def _reach(self, value: Any, path: str) -> None:
        if isinstance(value, tuple):
            self._replace_tuple(value, path)
        elif (
            id(value) not in self._seen and id(value) not in self._twins.closed and _is_open(value)
        ):
            self._seen.add(id(value))
            self._kept.append(value)
            self._todo.append((value, path))


def _is_open(value: Any) -> bool:
    """Whether the walk goes inside."""
    if isinstance(value, _CLOSED):
        return False
    if isinstance(value, torch.nn.Module):
        return True
    if _is_closed_package(type(value).__module__.partition(".")[0]):
        return isinstance(value, _OPEN_STDLIB)
    return True


@cache
def _is_closed_package(name: str) -> bool:
    """torch, numpy and the standard library; not a user's module that has one of its names."""
    if name in ("torch", "numpy"):
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    library = Path(sysconfig.get_path("stdlib")).resolve()
    return name in sys.stdlib_module_names and (
        file is None or library in Path(file).resolve().parents
    )


def _places(holder: Any, path: str) -> Iterator[_Held]:
    """Every place of one object, in a fixed order."""
    if isinstance(holder, dict):
        for position, (key, value) in enumerate(list(holder.items())):
            yield "item", holder, key, value, f"{path}[{_key_text(key, position)}]"
    elif isinstance(holder, (list, deque)):
        for i, value in enumerate(holder):
            yield "item", holder, i, value, f"{path}[{i}]"
    if isinstance(holder, torch.nn.Module):
        yield from _module_places(holder, path)
    else:
        yield from _attribute_places(holder, path)


def _module_places(module: torch.nn.Module, path: str) -> Iterator[_Held]:
    attributes = vars(module)
    if not _is_wrapper(module):
        for name, value in list(attributes.items()):
            if name not in _MODULE_KEEPS:
                yield "item", attributes, name, value, f"{path}.{name}"
    for name, child in module._modules.items():
        yield "item", module._modules, name, child, f"{path}{_child_text(name)}"


def _is_wrapper(module: torch.nn.Module) -> bool:
    """DDP, FSDP and compiled modules keep groups of their own, for what they shard and reduce.

    `fully_shard` makes a class of torch's on top of the user's: the user's attributes count then.
    """
    classes = type(module).__mro__[: type(module).__mro__.index(torch.nn.Module)]
    return not classes[0].__module__.startswith("torch.nn.modules.") and all(
        cls.__module__.startswith("torch.") for cls in classes if cls is not object
    )


def _attribute_places(holder: Any, path: str) -> Iterator[_Held]:
    try:
        attributes = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        attributes = None
    if type(attributes) is dict:
        for name, value in list(attributes.items()):
            yield "item", attributes, name, value, f"{path}.{name}"
    for name in _slot_names(type(holder)):
        try:
            value = object.__getattribute__(holder, name)
        except AttributeError:
            continue  # declared and not set
        yield "member", holder, name, value, f"{path}.{name}"


def _slot_names(cls: type) -> Iterator[str]:
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType) and "__slots__" in vars(base):
                yield name


def _child_text(name: str) -> str:
    return f".{name}" if name.isidentifier() else f"[{name}]"


def _key_text(key: object, position: int) -> str:
    """The same on every rank: the repr of most objects tells their address."""
    if isinstance(key, (str, int, bool)):
        return repr(key)
    return f"{type(key).__name__} {position}"


def _nothing_to_swap(walk: _Walk, differing: Sequence[str]) -> str:
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


def _agreed_slots(model: object, train_pgs: ProcessGroups, eval_pgs: ProcessGroups) -> list[Slot]:
    """The slots, after every rank of dp_cp has found the same; else an error on all of them."""
    transport = train_pgs.transport
    slots: list[Slot] = []
    refusal: Exception | None = None
    try:
        slots = find_slots(model, train_pgs, eval_pgs)
        table = [f"{slot.path} ({slot.role})" for slot in slots]
        table.append(f"{train_pgs!r} to {eval_pgs!r}")
    except Exception as error:
        refusal, table = error, [str(error)]
    text = "\n".join(table)
    own = (_FOUND if refusal is None else _REFUSED) + hashlib.sha256(text.encode()).digest()
    digests = transport.all_gather_bytes(own.ljust(64, b"\0"))
    if refusal is None and all(digest == digests[transport.rank] for digest in digests):
        return slots
    # Every rank saw the same digests, so all of them come here, and none swaps.
    tables = [other.decode() for other in transport.all_gather_bytes(text.encode())]
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
