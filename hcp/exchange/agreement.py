"""Agreement: ranks compare which call they are in before they use each other's rows.

Every exchange carries a stamp. It names the kind of call (the plan, step and micro-batch that it
belongs to, its operation, dtypes, heads, sizes and options), the number of the call in its handler,
the pass, and the layer where the caller names one. Ranks whose stamps differ hear it in words
before any row is used. The numbers follow the forward: a backward carries the number of its forward
call, so that backwards may run in any order that all ranks share.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hcp.errors import HcpError
from hcp.exchange.differences import in_words
from hcp.exchange.gather import Gathered
from hcp.exchange.tables import Move, Origin

LayerName = int | str | None
"""A caller's name for its layer."""

FORWARD, BACKWARD, BACKWARD_WITH_LSE = range(3)
"""The passes of a call. Under the last, gradients of the log-sum-exp travel too."""
_PASSES = ("forward", "backward", "backward with a gradient of the log-sum-exp")

# Tags have 30 bits. The factors are odd, so that numbers below 2**28 give different tags for one
# kind.
_FIRST_TAG, _TAG_BITS = 2, 30
_TAG_MASK = 2**_TAG_BITS - 1
_NUMBER_FACTOR, _LAYER_FACTOR = 0x1E3779B1, 0x05EBCA6B


class CallKind:
    """A kind of call: what such calls have in common on all ranks. Made once for all of them."""

    __slots__ = ("base", "callers", "digest", "fields")

    def __init__(self, operation: str, origin: Origin | None = None, **options: Any) -> None:
        """``options``: values that JSON can hold. None is left out."""
        named: dict[str, Any] = {"operation": operation}
        if origin is not None:
            named["plan"] = f"{origin.plan:016x}"
            named["step"], named["micro-batch"] = origin.step, origin.micro_batch
        named |= {name: value for name, value in options.items() if value is not None}
        text = json.dumps(named)
        self.fields: dict[str, Any] = json.loads(text)  # as others read them
        digest = blake2b(text.encode(), digest_size=8).digest()
        self.digest = int.from_bytes(digest, "little")
        self.base = self.digest & _TAG_MASK
        self.callers: tuple[int, ...] = ()
        """Ranks that make these calls and compare them, where they are more than those that
        exchange rows. In a ring, a rank waits for neighbours, which may wait for one that is in
        another call."""


class Stamp:
    """One call, or one pass of it."""

    __slots__ = ("kind", "layer", "number", "passed", "tag")

    def __init__(
        self, kind: CallKind, number: int = 0, passed: int = FORWARD, layer: LayerName = None
    ) -> None:
        self.kind, self.number, self.passed = kind, number, passed
        self.layer = None if layer is None else str(layer)  # as operators take it
        mixed = kind.base + (4 * number + passed) * _NUMBER_FACTOR
        if self.layer is not None:
            mixed += (zlib.crc32(self.layer.encode()) + 1) * _LAYER_FACTOR
        self.tag = _FIRST_TAG + (mixed & _TAG_MASK)
        """The tag of messages and signals. Rows of different stamps never meet."""

    @property
    def identity(self) -> tuple[int, int, int, str | None]:
        """Equal for the same call and pass, and for no others."""
        return self.kind.digest, self.number, self.passed, self.layer

    def in_pass(self, passed: int) -> Stamp:
        """Stamp the same call in another pass."""
        return Stamp(self.kind, self.number, passed, self.layer)

    @property
    def fields(self) -> dict[str, Any]:
        """The stamp in words: names, and values that JSON can hold."""
        named = {"layer": self.layer} if self.layer is not None else {}
        numbered = {"call": self.number} if self.number else {}
        return {**self.kind.fields, **numbered, "pass": _PASSES[self.passed], **named}


class Refusal(NamedTuple):
    """A call that one rank cannot make. It tells the ranks that wait for it."""

    call: tuple[Any, ...]
    """The call's name on all ranks: its origin, who calls, and its number."""
    reason: str


def rows_like(x: Tensor) -> str:
    """Name the dtype and row shape of x, as kinds do: "float32 (4, 8)"."""
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape[1:])}"


# ---- ranks that differ ---------------------------------------------------------------------------


def differing(rank: int, own: Mapping[str, Any], peer: int, theirs: Mapping[str, Any]) -> HcpError:
    """Make the error of a rank whose peer is in another call."""
    return HcpError(
        f"rank {rank}: rank {peer} is in another call: {_difference(rank, own, peer, theirs)}; "
        "every rank of a group must make the same calls in one order, with the same dtypes, heads, "
        "sizes and options",
        code="calls-differ",
    )


def unknown(rank: int, own: Mapping[str, Any], peer: int) -> HcpError:
    """Make the error of a rank whose peer is in another call, which no rank names."""
    return HcpError(
        f"rank {rank}: rank {peer} is in another call than this rank, which is in {name(own)}: "
        f"{json.dumps(dict(own))}; every rank of a group must make the same calls in one order, "
        "with the same dtypes, heads, sizes and options",
        code="calls-differ",
    )


def refused(rank: int, own: Mapping[str, Any], peer: int, reason: str) -> HcpError:
    """Make the error of a rank whose peer has refused the call."""
    return HcpError(
        f"rank {rank}: rank {peer} has refused {name(own)}, and waits no more: {reason}",
        code="call-refused",
    )


def name(fields: Mapping[str, Any]) -> str:
    """Name a call in a few words."""
    words = str(fields.get("operation"))
    if "call" in fields:
        words += f", call {fields['call']}"
    if "micro-batch" in fields:
        words += f" of micro-batch {fields['micro-batch']} in step {fields['step']}"
    return words


def _difference(rank: int, own: Mapping[str, Any], peer: int, theirs: Mapping[str, Any]) -> str:
    """Say in what two calls differ. Of different operations, only the names: their options say
    nothing."""
    if own.get("operation") != theirs.get("operation"):
        return f"{name(own)} here, {name(theirs)} on rank {peer}"
    names = [n for n in dict.fromkeys([*own, *theirs]) if own.get(n) != theirs.get(n)]
    if "causal" in names and own["window_size"][0] == theirs["window_size"][0]:
        names.remove("window_size")  # causal says it
    said = "; ".join(in_words(n, {rank: own.get(n), peer: theirs.get(n)}) for n in names)
    return f"in {own.get('operation')}, {said}"


class Recent:
    """The stamps that a rank used last, by tag.

    A device that waited for one stamp and found another has most often found one of these, or one
    near them.
    """

    _MOST, _NEAR = 1024, 64

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._stamps: dict[int, Stamp] = {}
        self._kept: dict[int, Stamp] = {}

    def add(self, stamp: Stamp, *, kept: bool = False) -> None:
        """``kept``: for good, of a call that a CUDA graph may replay at any time."""
        if kept:
            self._kept[stamp.tag] = stamp
            return
        if len(self._stamps) >= self._MOST:
            for tag in list(self._stamps)[: self._MOST // 2]:
                del self._stamps[tag]
        self._stamps[stamp.tag] = stamp

    @property
    def _known(self) -> dict[int, Stamp]:
        return self._stamps | self._kept

    def of(self, tag: int) -> dict[str, Any] | None:
        """Find the call with a tag, in words."""
        stamp = self._known.get(tag)
        return None if stamp is None else stamp.fields

    def differing(self, peer: int, expected: int, found: int) -> HcpError:
        """Make the error of a rank whose device waited for one tag and found another."""
        own, theirs = self.of(expected), self._find(found)
        if own is None:
            return HcpError(
                f"rank {self._rank}: rank {peer} is in another call (signal {found:#x}, expected "
                f"{expected:#x}); every rank of a group must make the same calls in one order",
                code="calls-differ",
            )
        if theirs is None:
            return unknown(self._rank, own, peer)
        return differing(self._rank, own, peer, theirs.fields)

    def _find(self, tag: int) -> Stamp | None:
        known = self._known
        if tag in known:
            return known[tag]
        kinds = {stamp.kind.digest: stamp for stamp in known.values()}
        layers = dict.fromkeys(stamp.layer for stamp in known.values())
        for stamp in kinds.values():
            first = max(1, stamp.number - self._NEAR)
            for number in range(first, stamp.number + self._NEAR):
                for passed in range(len(_PASSES)):
                    for layer in layers:
                        near = Stamp(stamp.kind, number, passed, layer)
                        if near.tag == tag:
                            return near
        return None


# ---- collectives ---------------------------------------------------------------------------------


def label(what: str, payload: bytes) -> bytes:
    """Add to a rank's part of a gathering what the gathering is for."""
    return what.encode() + b"\0" + payload


def unlabel(rank: int, what: str, gathered: Gathered) -> Gathered:
    """Take every rank's payload. HcpError where a rank is in another gathering."""
    wanted = what.encode()

    def payload_of(part: bytes) -> bytes:
        theirs, _, payload = part.partition(b"\0")
        if theirs != wanted:
            peer = gathered.messages.index(part)
            raise HcpError(
                f"rank {rank}: rank {peer} is in another call: {what} here, "
                f"{theirs.decode(errors='replace')[:80]} on rank {peer}; every rank of a domain "
                "must make the same calls in one order",
                code="calls-differ",
            )
        return payload

    return gathered.map(payload_of)


# ---- the first call of a kind --------------------------------------------------------------------


class Moves(Protocol):
    """A route or a schedule: which ranks send rows to which."""

    agreed: set[int]
    """Digests of the kinds of calls that these ranks have found equal."""

    @property
    def sends(self) -> list[Move]: ...

    @property
    def receives(self) -> list[Move]: ...


class _Agrees(Protocol):
    rank: int

    def agree(self, stamp: Stamp, peers: Sequence[int]) -> None: ...


def agree_once(transport: _Agrees, moves: Moves, stamp: Stamp) -> None:
    """Compare a call with the peers, in both directions, when it is the first of its kind.

    A receive buffer of the wrong size would abort the process, or be filled in part: peers whose
    calls differ are refused before any row is on its way. Raises HcpError.
    """
    if stamp.kind.digest not in moves.agreed:
        peers = peers_of(transport.rank, (*moves.sends, *moves.receives))
        if peers or stamp.kind.callers:  # else this rank computes alone
            transport.agree(stamp, peers)
        moves.agreed.add(stamp.kind.digest)


def peers_of(rank: int, moves: Iterable[Move]) -> list[int]:
    """List the other ranks of some moves, ascending."""
    return sorted({move.peer for move in moves} - {rank})


# ---- stamps as messages --------------------------------------------------------------------------

HEADER_BYTES = 1024


def header_of(stamp: Stamp) -> Tensor:
    """Make the header that precedes the rows of a call. It is the same on all of the call's
    ranks."""
    return _as_header({"fields": stamp.fields, "digest": stamp.kind.digest, "tag": stamp.tag})


def header_of_refusal(refusal: Refusal) -> Tensor:
    """Make the header that is sent when no rows will follow."""
    reason = refusal.reason.encode("ascii", "replace").decode()[: HEADER_BYTES // 3]
    reason = "".join(letter if letter.isprintable() else " " for letter in reason)
    return _as_header({"call": list(refusal.call), "refused": reason})


def read_header(header: Tensor) -> dict[str, Any]:
    """Read a rank's header."""
    read: dict[str, Any] = json.loads(bytes(header.tolist()).rstrip(b"\0"))
    return read


def _as_header(said: dict[str, Any]) -> Tensor:
    text = json.dumps(said).encode()
    if len(text) > HEADER_BYTES:  # names of unusual length: digest and tag still differ
        text = json.dumps({**said, "fields": {"operation": "?"}}).encode()
    return torch.frombuffer(bytearray(text.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)


# ---- calls that no rank can make -----------------------------------------------------------------


def is_transformed(*tensors: Tensor) -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is at work."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or _any_dual(tensors)


def _any_dual(tensors: Sequence[Tensor]) -> bool:
    if forward_ad._current_level < 0:  # outside of it there are no tangents
        return False
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)  # type: ignore[no-untyped-call]


def refuse_transforms(name: str, *tensors: Tensor) -> None:
    """Raise NotImplementedError under torch.func and forward-mode differentiation.

    A transform would call an exchange with other shapes, or another number of times, than the peers
    do; and forward mode would lose the tangents.
    """
    if torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"cp.{name} is called under a transform of torch.func (grad, vmap, jvp, ...), expected "
            "none: ranks exchange rows in it; use torch.autograd.grad or backward()"
        )
    if _any_dual(tensors):
        raise NotImplementedError(
            f"cp.{name} is called with dual tensors, expected plain ones: it has no forward-mode "
            "derivative; use torch.autograd.grad or backward()"
        )
