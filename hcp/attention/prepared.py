"""Preparations of attention under a schedule: made at the first call of a kind, then kept for all
layers and both passes."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hcp import _core
from hcp.attention.checks import Inputs, check, check_latent
from hcp.attention.head_exchange import HeadExchange
from hcp.attention.head_shares import split
from hcp.attention.kernel_calls import Launches, launches_of
from hcp.attention.kernels import Kernel, KernelChoice, kernel_for
from hcp.attention.key_transfer import KeyTransfer, transfer_of
from hcp.attention.rotary import Rotary
from hcp.exchange.agreement import CallKind, LayerName, Stamp, agree_once, rows_like
from hcp.exchange.tables import Move, Schedule
from hcp.exchange.transport import Transport, shares, transport_of

_log = logging.getLogger("hcp")
_told = itertools.count()


class PreparedLayer(NamedTuple):
    """What layers of one kind share under a schedule: they differ in their rows alone."""

    schedule: Schedule
    kernel: Kernel
    launches: Launches
    transfer: KeyTransfer
    scale: float
    kind: CallKind
    heads: HeadExchange | None
    """None where rows stay: there is nobody to exchange heads with."""
    packs: bool
    """Whether what the first exchange sends can be packed while keys are rotated."""
    chunks: Sequence[HeadChunk]
    """Heads that are computed one after the other. Empty where all are computed at once."""


class HeadChunk(NamedTuple):
    """Some of the heads of a layer, and the layer that they are."""

    queries: slice
    keys: slice
    layer: PreparedLayer


class Prepared:
    """A schedule, and all that attention has made for it."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.layers: dict[tuple[object, ...], PreparedLayer] = {}
        """The key is everything that distinguishes one kind of call from another."""
        self.agreed: set[int] = set()
        """See ``agreement.Moves``."""
        self.numbers: Iterator[int] = itertools.count(1)
        """Numbers of its calls. A handler numbers the calls of all its schedules together."""
        self.exchanges = itertools.count()
        """Numbers of a group's exchanges through shared memory, alike on all its ranks."""
        self._head_exchanges = itertools.count()
        """Numbers of the neighbours' exchanges of heads through shared memory: those who compute no
        heads make no others."""
        self._heads: dict[tuple[int, int], HeadExchange] = {}
        self.layer_bytes = 0
        """Bytes that the forward of a layer receives: of the kind of calls with the most."""
        self._launches: dict[Kernel, Launches] = {}

    @property
    def sends(self) -> list[Move]:
        return self.schedule.sends

    @property
    def receives(self) -> list[Move]:
        return self.schedule.receives

    def launches_of(self, kernel: Kernel) -> Launches:
        """The schedule's launches of a kernel."""
        launches = self._launches.get(kernel)
        if launches is None:
            launches = self._launches[kernel] = launches_of(self.schedule, kernel)
        return launches

    def heads_of(self, transport: Transport, queries: int, keys: int) -> HeadExchange:
        """The neighbours' exchange of so many heads."""
        made = self._heads.get((queries, keys))
        if made is None:
            given = transport, self.schedule, queries, keys, self._head_exchanges
            made = self._heads[queries, keys] = HeadExchange(*given)
        return made


_prepared: weakref.WeakValueDictionary[int, Prepared] = weakref.WeakValueDictionary()


def prepared_of(words: Tensor) -> Prepared:
    """The preparations for the schedule in these words.

    They live as long as somebody keeps them, as a handler does. A backward that outlives its
    handler makes them again from the words, which say everything.

    Raises ValueError for words that are no schedule.
    """
    _expect_words(words)
    serial = int(words[0])
    prepared = _prepared.get(serial)
    if prepared is None:
        prepared = _prepared[serial] = Prepared(Schedule(words))
    return prepared


def _expect_words(words: Tensor) -> None:
    if words.dtype != torch.int64 or words.dim() != 1 or words.device.type != "cpu":
        raise ValueError(
            f"words is {words.dtype} of shape {tuple(words.shape)} on {words.device}, expected the "
            "int64 (words,) of a schedule, on cpu"
        )
    if len(words) < 2:
        raise ValueError(f"words has {len(words)} items, expected those of a schedule")


class LayerOptions(NamedTuple):
    """A layer's options, in types that compilers know: see ``operator``."""

    words: Tensor
    """Its schedule."""
    scale: float
    choice: KernelChoice


class LayerCall(NamedTuple):
    """A call of a layer without its tensors. It travels from the handler to the kernels."""

    options: LayerOptions
    prepared: Prepared
    """Of the options' words."""
    rotary: Rotary | None = None
    number: int = 0
    """Of the call in its handler. 0: a backward's, of which no rank compares anything."""
    name: LayerName = None
    """What its caller names the layer by."""


def make_layer(call: LayerCall, inputs: Inputs, latent: bool) -> PreparedLayer:
    """Check the first call of a kind, compare it with the peers, and prepare for all like it."""
    schedule = call.prepared.schedule
    transport = transport_of(schedule.header.transport)
    checked = check_latent if latent else check
    checked(inputs, schedule.rows, transport.device)
    count = 1 if latent else _chunk_count(schedule, transport, inputs)
    kind = _kind_of(call, inputs, latent, count)
    # Signals between GPUs carry the stamp themselves.
    if call.number and not schedule.header.in_place:
        agree_once(transport, call.prepared, Stamp(kind, call.number, layer=call.name))
    chunks = _chunks(call, transport, kind, inputs, count) if count > 1 else []
    return _layer(call, transport, kind, inputs, chunks)


def _chunk_count(schedule: Schedule, transport: Transport, inputs: Inputs) -> int:
    """In how many chunks heads are computed: so many as the memory of the plan asks for, and as the
    memory in which ranks stage keys and their gradients does."""
    _, key, value, _ = inputs
    asked, heads = schedule.header.head_chunks, key.shape[1]
    if not schedule.header.in_place or len(schedule.stages) == 1:
        return min(asked, heads)
    assert shares(transport)
    head_bytes = schedule.staged_rows * (key.shape[2] + value.shape[2]) * key.element_size()
    fit = max(1, transport.half_bytes // max(1, head_bytes)) * schedule.inner
    needed = min(-(-heads // fit), heads)
    if needed > asked:
        _tell_of_chunks(needed, transport.half_bytes, -(-heads // schedule.inner) * head_bytes)
    return max(min(asked, heads), needed)


def _tell_of_chunks(count: int, half_bytes: int, staged_bytes: int) -> None:
    """Log it once in a process."""
    if next(_told) == 0:
        _log.warning(
            "an attention layer stages up to %d bytes, and half of the peer buffer has %d: it "
            "computes its heads in %d chunks, one after the other; build the process groups with "
            "peer_buffer_bytes=%d or more to compute them at once",
            *(staged_bytes, half_bytes, count, _core.link_buffer_bytes(staged_bytes)),
        )


def _kind_of(call: LayerCall, inputs: Inputs, latent: bool, chunks: int) -> CallKind:
    schedule, choice = call.prepared.schedule, call.options.choice
    query, key, value, sinks = inputs
    kind = CallKind(
        "attention",
        schedule.origin,
        query=rows_like(query),
        key=rows_like(key),
        value=rows_like(value),
        causal=schedule.window[1] == 0,
        window_size=schedule.window,
        mask=None if schedule.header.mask < 0 else schedule.header.mask,
        softmax_scale=call.options.scale,
        softcap=choice.softcap,
        sinks=sinks is not None,
        rotary_pos_emb=call.rotary is not None,
        latent=latent or None,
        comm_type=schedule.comm_type,
        neighbours=schedule.inner,
        head_chunks=chunks if chunks > 1 else None,
    )
    kind.callers = schedule.callers
    return kind


def _chunks(
    call: LayerCall, transport: Transport, kind: CallKind, inputs: Inputs, count: int
) -> Sequence[HeadChunk]:
    query, key, value, sinks = inputs
    per_key = query.shape[1] // key.shape[1]
    layers: dict[int, PreparedLayer] = {}  # chunks of as many heads are computed alike
    chunks: list[HeadChunk] = []
    for keys in split(key.shape[1], count):
        queries, width = slice(keys.start * per_key, keys.stop * per_key), keys.stop - keys.start
        if width not in layers:
            own = (query[:, queries], key[:, keys], value[:, keys], sinks)
            layers[width] = _layer(call, transport, kind, own)
        chunks.append(HeadChunk(queries, keys, layers[width]))
    return chunks


def _layer(
    call: LayerCall,
    transport: Transport,
    kind: CallKind,
    inputs: Inputs,
    chunks: Sequence[HeadChunk] = (),
) -> PreparedLayer:
    prepared, (query, key, value, _) = call.prepared, inputs
    schedule = prepared.schedule
    kernel = kernel_for(query.device, query.dtype, call.options.choice)
    launches = prepared.launches_of(kernel)
    heads, groups = _heads_of(prepared, transport, query.shape[1], key.shape[1]), key.shape[1]
    if heads is not None:
        kernel, groups = heads.kernel(kernel), heads.key_count
    sizes = groups, key.shape[2], value.shape[2]
    transfer = transfer_of(schedule, launches, transport, sizes, key.dtype, prepared.exchanges)
    received = _received_bytes(schedule, heads, query, key, value)
    prepared.layer_bytes = max(prepared.layer_bytes, received)
    packs = heads is None and len(schedule.stages) > 1 and not schedule.header.in_place
    return PreparedLayer(
        schedule, kernel, launches, transfer, call.options.scale, kind, heads, packs, chunks
    )


def _received_bytes(
    schedule: Schedule, heads: HeadExchange | None, query: Tensor, key: Tensor, value: Tensor
) -> int:
    """Bytes that a rank receives in a layer's forward: keys and values of each stage. Of ranks that
    exchange rows for heads: other ranks' rows of this rank's heads, and this rank's rows of outputs
    and log-sum-exp of the other heads."""
    item, queries, keys = query.element_size(), query.shape[1], key.shape[1]
    own = (queries, keys) if heads is None else (heads.query_count, heads.key_count)
    pair = item * own[1] * (key.shape[2] + value.shape[2])
    received = pair * sum(move.rows for stage in schedule.stages for move in stage.receives_of_all)
    if heads is not None and schedule.head_moves is not None:
        others = schedule.head_moves.rows - schedule.rows
        received += others * (pair + item * own[0] * query.shape[2])
        output = item * value.shape[2] + max(item, 4)  # the log-sum-exp has 4 bytes at least
        received += schedule.rows * (queries - own[0]) * output
    return received


def _heads_of(
    prepared: Prepared, transport: Transport, queries: int, keys: int
) -> HeadExchange | None:
    moves = prepared.schedule.head_moves
    if moves is None or len(moves.receives) == 1:
        return None
    return prepared.heads_of(transport, queries, keys)
