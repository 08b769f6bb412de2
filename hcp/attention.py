"""Packed attention over local and received rows, forward and backward.

The schedule (see ``hcp.layout``) says everything: which keys arrive when, and which dense blocks of
queries and keys are computed, by library kernels (``hcp.kernels``). The partial outputs are merged
once by log-sum-exp. The backward fetches the keys again, gives the kernel the merged output and
log-sum-exp, sends partial gradients of keys and values to their owners, and sums them once.

T rows on this rank, H query heads, G key-value heads, D head size, E head size of values, N rows of
a buffer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from hcp import heads, ops
from hcp.exchange import (
    Transport,
    agree_once,
    shares,
    signature,
    tag_of,
    transport_of,
)
from hcp.kernels import Call, Choice, Kernel, families, kernel_for
from hcp.layout import Entry, Move, Schedule, Trade, kernel_of, schedule_of

# ---- stages: keys as they arrive -----------------------------------------------------------------


class _Carried:
    """Keys beside values that peers send."""

    def __init__(
        self,
        run: _Run,
        schedule: Schedule,
        local: list[Tensor],
        width: int,
        first_sent: Tensor | None,
    ) -> None:
        """``first_sent``: what stage 1 sends, where it is packed already."""
        self._run, self._schedule, self._local, self._width = run, schedule, local, width
        self._first_sent = first_sent
        self._received: Tensor | None = None

    def begin(self, number: int) -> Callable[[], Tensor]:
        """Start a stage's exchange; its rows, (key_rows, G * (D + E)), once they are there."""
        stage = self._schedule.stages[number]
        received = self._local[0].new_empty(stage.received_rows, self._width)
        if number == 1 and self._first_sent is not None:
            sent = self._first_sent
        elif stage.packs:
            sent = ops.pack(self._local, stage.pack, stage.sent_rows)
        else:  # nothing, or what the stage before has received
            sent = received if self._received is None else self._received
        pending = self._run.transport.start(
            sent, stage.sends, received, stage.receives, tag=self._run.tag
        )

        def rows() -> Tensor:
            pending.wait()
            self._received = received
            if not stage.arranges:
                return received
            return ops.pack([received], stage.arrange, stage.key_rows)

        return rows


class _Shared:
    """Keys beside values that this rank reads from where their owners staged them."""

    def __init__(self, run: _Run, schedule: Schedule, local: list[Tensor], width: int) -> None:
        assert shares(run.transport)
        self._schedule, self._tag = schedule, run.tag
        self._local, self._width = local, width
        self._staged = run.transport.stage(
            next(schedule.exchanges), schedule.query_rows, width, local[0].dtype, schedule.readers
        )
        if schedule.readers:
            self._staged.write(local, schedule.whole_run, 2, run.tag)

    def begin(self, number: int) -> Callable[[], Tensor]:
        read = self._schedule.reads[number]
        if read is None:
            return lambda: self._local[0].new_empty(0, self._width)
        owners, runs, done = read
        rows = self._schedule.stages[number].key_rows
        return self._staged.read(owners, runs, rows, self._tag, done).wait


def _arrivals(
    run: _Run,
    schedule: Schedule,
    key: Tensor,
    value: Tensor,
    first_sent: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of each stage, while those of the next are on their way."""
    stages = len(schedule.stages)
    if stages == 1:
        yield key, value
        return
    _, *key_row = key.shape
    _, *value_row = value.shape
    key_width, value_width = key_row[0] * key_row[1], value_row[0] * value_row[1]
    width = key_width + value_width
    local = [key.flatten(1), value.flatten(1)]
    journey: _Carried | _Shared
    if shares(run.transport):
        journey = _Shared(run, schedule, local, width)
    else:
        journey = _Carried(run, schedule, local, width, first_sent)
    for number in range(1, stages):
        rows = journey.begin(number)
        yield key, value
        received = rows()
        count, start = received.shape[0], received.storage_offset()
        key = received.as_strided((count, *key_row), (width, key_row[1], 1), start)
        value = received.as_strided(
            (count, *value_row), (width, value_row[1], 1), start + key_width
        )
    yield key, value


# ---- calls: what a kernel computes at once -------------------------------------------------------


class _Cut(NamedTuple):
    """A call with its rows of the stage's tensors; None: all of them, without a view."""

    call: Call
    queries: slice | None
    keys: slice | None


class _Calls(NamedTuple):
    """A schedule in terms of a kernel's calls instead of its entries."""

    stages: list[list[Call]]
    cuts: list[list[_Cut]]
    output_runs: Tensor
    sunk_runs: Tensor
    """The same, with the sinks as one more part behind the calls."""
    home_runs: Tensor
    local_runs: Tensor
    one_call: bool
    """Whether a single call computes all rows on keys that lie here: nothing is merged or
    summed."""
    home: dict[int, _Home]
    """Of this rank, once it is needed."""


def _calls_of(schedule: Schedule, kernel: Kernel) -> _Calls:
    """Made once for a schedule and kernel; every layer uses it."""
    made = schedule.calls.get(kernel)
    if made is None:
        made = schedule.calls[kernel] = _make_calls(schedule, kernel)
    return cast(_Calls, made)


def _make_calls(schedule: Schedule, kernel: Kernel) -> _Calls:
    stages = [kernel.calls(stage.entries) for stage in schedule.stages]
    # Of each entry: its call, and where its queries and its keys start there.
    places: list[tuple[int, int, int]] = []
    number = 0
    for stage, calls in zip(schedule.stages, stages, strict=True):
        found: dict[Entry, tuple[int, int, int]] = {}
        for call in calls:
            for entry in call.entries:
                query, key = entry.query_row - call.queries.start, entry.key_row - call.keys.start
                found[entry] = (number, query, key)
            number += 1
        places += [found[entry] for entry in stage.entries]
    # What comes home is one more part behind the entries, and behind the calls, of stage 0.
    local = [*places[: len(schedule.stages[0].entries)], (len(stages[0]), 0, 0)]
    output_runs = _renumber(schedule.output_runs, places, 1)
    cuts = [
        [
            _Cut(
                call,
                _unless_all(call.queries, schedule.query_rows),
                _unless_all(call.keys, stage.key_rows),
            )
            for call in calls
        ]
        for stage, calls in zip(schedule.stages, stages, strict=True)
    ]
    return _Calls(
        stages,
        cuts,
        output_runs,
        _with_sinks(output_runs, number, schedule.query_rows),
        _renumber(schedule.home_runs, places, 2),
        _renumber(schedule.local_runs, local, 2),
        number == len(schedule.stages) == 1 and _covers(output_runs, schedule.query_rows),
        {},
    )


def _unless_all(chosen: slice, rows: int) -> slice | None:
    return None if chosen.stop - chosen.start == rows else chosen


def _covers(runs: Tensor, rows: int) -> bool:
    """Whether runs of one part are that part, row by row."""
    in_place = bool((runs[:, 0] == runs[:, 3]).all())
    return in_place and int(runs[:, 1].sum()) == rows


def _renumber(runs: Tensor, places: list[tuple[int, int, int]], offset: int) -> Tensor:
    """Runs over entries as runs over calls: the part, and where it starts in there."""
    if len(runs) == 0:
        return runs
    table = torch.tensor(places, device="cpu")[runs[:, 2]]
    return torch.stack([runs[:, 0], runs[:, 1], table[:, 0], runs[:, 3] + table[:, offset]], 1)


def _with_sinks(runs: Tensor, part: int, rows: int) -> Tensor:
    """One more part, of ``rows`` rows, in every run, and for the rows that no run names."""
    starts = runs[torch.cat([runs.new_ones(1).bool(), runs[1:, 0] != runs[:-1, 0]])[: len(runs)]]
    begins = torch.cat([runs.new_zeros(1), starts[:, 0] + starts[:, 1]])
    ends = torch.cat([starts[:, 0], runs.new_full((1,), rows)])
    gaps = torch.stack([begins, ends - begins], 1)[ends > begins]
    own = torch.cat([starts[:, :2], gaps])
    extra = torch.stack([own[:, 0], own[:, 1], torch.full_like(own[:, 0], part), own[:, 0]], 1)
    both = torch.cat([runs, extra])
    return both[both[:, 0].sort(stable=True).indices]


# ---- one call ------------------------------------------------------------------------------------


class _Run(NamedTuple):
    """How calls of one kind are computed under a schedule; made at the first of them."""

    transport: Transport
    kernel: Kernel
    calls: _Calls
    scale: float
    tag: int
    heads: _Heads | None
    """None where rows stay: nobody to trade with."""


def _run_of(
    schedule: Schedule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    scale: float,
    choice: Choice,
    turned: bool,
) -> _Run:
    """The run of a call, which is checked, here and with the peers, when its like is first seen."""
    like = (
        *(query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype),
        *(query.device, key.device, value.device, scale, choice, turned),
        None if sinks is None else (sinks.shape, sinks.dtype, sinks.device),
    )
    run = schedule.runs.get(like)
    if run is None:
        given = query, key, value, sinks, scale, choice, turned
        run = schedule.runs[like] = _make_run(schedule, *given)
    return cast(_Run, run)


def _make_run(
    schedule: Schedule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    scale: float,
    choice: Choice,
    turned: bool,
) -> _Run:
    transport = transport_of(schedule.transport_key)
    check(query, key, value, sinks, schedule.rows, transport.device)
    bits = struct.unpack("<2q", struct.pack("<2d", scale, choice.softcap))
    options = int(sinks is not None), int(turned)
    traits = (*signature(query, key, value), *schedule.kind, *bits, *options)
    # Signals between GPUs carry the tag themselves.
    signalled = shares(transport) and schedule.trade is None
    tag = tag_of(traits) if signalled else agree_once(transport, schedule, traits)
    kernel = kernel_for(query.device, query.dtype, choice)
    run = _Run(transport, kernel, _calls_of(schedule, kernel), scale, tag, None)
    trade = schedule.trade
    if trade is None or len(trade.receives) == 1:
        return run
    return run._replace(heads=_Heads(run, trade, query, key))


def _forward(
    run: _Run,
    schedule: Schedule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    first_sent: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries against keys as they arrive, merged."""
    outs, lses = [], []
    arrivals = _arrivals(run, schedule, key, value, first_sent)
    for cuts, (stage_key, stage_value) in zip(run.calls.cuts, arrivals, strict=True):
        for call, rows, key_rows in cuts:
            queries = query if rows is None else query[rows]
            keys, values = stage_key, stage_value
            if key_rows is not None:
                keys, values = keys[key_rows], values[key_rows]
            out, lse = run.kernel.forward(call, queries, keys, values, run.scale)
            outs.append(out)
            lses.append(lse)
    if not outs:  # no rows: a query sees at least its own key
        return _empty_result(query, value)
    return _merge(outs, lses, run.calls, sinks, schedule.query_rows)


def _backward_rows(
    run: _Run,
    schedule: Schedule,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    turn: Turn | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, those of others' keys sent home; those of queries and
    keys turned back."""
    given = grad_out, grad_lse, query, out, lse
    grads: list[tuple[Tensor, Tensor, Tensor]] = []
    arrivals = _arrivals(run, schedule, key, value)
    for cuts, (stage_key, stage_value) in zip(run.calls.cuts, arrivals, strict=True):
        for call, rows, key_rows in cuts:
            own = given
            if rows is not None:
                own = tuple(None if x is None else x[rows] for x in given)  # type: ignore[assignment]
            keys, values = stage_key, stage_value
            if key_rows is not None:
                keys, values = keys[key_rows], values[key_rows]
            grads.append(run.kernel.backward(call, *own[:3], keys, values, *own[3:], run.scale))
    if not grads:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    if run.calls.one_call:
        grad_query, grad_key, grad_value = grads[0]
        return _turned_back(grad_query, turn), _turned_back(grad_key, turn), grad_value
    grad_queries, grad_keys, grad_values = (
        [grad.flatten(1) for grad in parts] for parts in zip(*grads, strict=True)
    )
    # What is read from peers' memory is summed by a kernel that does not turn.
    reads = shares(run.transport) and len(schedule.stages) > 1
    if reads:
        home = _read_home(run, schedule, grad_keys, grad_values)
    else:
        home = _bring_home(run, schedule, grad_keys, grad_values, turn, key.shape[2])
    # Meanwhile:
    runs, count = run.calls.output_runs, schedule.query_rows
    grad_query = _summed(grad_queries, runs, count, 1, turn, query.shape[2])
    widths = grad_keys[0].shape[1], grad_values[0].shape[1]
    grad_key, grad_value = home().split_with_sizes(widths, 1)
    grad_key = grad_key.view(key.shape)
    if reads:
        grad_key = _turned_back(grad_key, turn)
    return grad_query.view(query.shape), grad_key, grad_value.view(value.shape)


# ---- rotary embedding ----------------------------------------------------------------------------


class Turn(NamedTuple):
    """The rotary embedding of this rank's queries and keys, as `ops.rotate` takes it."""

    cos: Tensor
    sin: Tensor
    interleaved: bool


def _turned(rows: Tensor, turn: Turn) -> Tensor:
    return ops.rotate(rows, turn.cos, turn.sin, interleaved=turn.interleaved)


def _turned_back(grad: Tensor, turn: Turn | None) -> Tensor:
    """A gradient (T, heads, D) that nothing sums."""
    if turn is None:
        return grad
    return ops.rotate(grad, turn.cos, turn.sin, interleaved=turn.interleaved, inverse=True)


def _summed(
    parts: list[Tensor], runs: Tensor, rows: int, columns: int, turn: Turn | None, head_dim: int
) -> Tensor:
    """Partial gradients summed and, on the way, those of the first column turned back."""
    if turn is None:
        return ops.reduce(parts, runs, rows, columns)
    cos, sin, interleaved = turn
    return ops.reduce_rotated(
        parts, runs, rows, columns, cos, sin, head_dim, 1, interleaved=interleaved, inverse=True
    )


# ---- gradients on their way home -----------------------------------------------------------------


def _bring_home(
    run: _Run,
    schedule: Schedule,
    grad_keys: list[Tensor],
    grad_values: list[Tensor],
    turn: Turn | None,
    head_dim: int,
) -> Callable[[], Tensor]:
    """Gradients of this rank's keys beside those of its values, (T, G * (D + E)): partial ones of
    other ranks' travel to their owners, and each owner sums its own, turned back."""
    calls = run.calls
    columns = [grad for pair in zip(grad_keys, grad_values, strict=True) for grad in pair]
    sent = ops.reduce(columns, calls.home_runs, schedule.home_sent_rows, columns=2)
    home = sent.new_empty(schedule.home_received_rows, sent.shape[1])
    pending = run.transport.start(
        sent, schedule.home_sends, home, schedule.home_receives, tag=run.tag
    )

    def sums() -> Tensor:
        pending.wait()
        widths = grad_keys[0].shape[1], grad_values[0].shape[1]
        local = columns[: 2 * len(calls.stages[0])]
        parts = [*local, *home.split_with_sizes(widths, 1)]
        return _summed(parts, calls.local_runs, schedule.query_rows, 2, turn, head_dim)

    return sums


class _Home(NamedTuple):
    """Partial gradients in their owners' reach. Each rank stages, for each of the others, as many
    rows as that owner has."""

    staged_rows: int
    staged_runs: Tensor
    readers: list[int]
    """Those that staged rows are for, ascending."""
    parts: list[tuple[int, int]]
    """Ranks that staged rows for this one, and how many each staged in all."""
    owners: list[int]
    """Those ranks."""
    runs: Tensor
    """Of this rank's calls of stage 0, then of those ranks."""


def _home_of(schedule: Schedule, calls: _Calls, rank: int) -> _Home:
    def start(stager: int, owner: int) -> int:
        return sum(n for peer, n in schedule.blocks.items() if peer < owner and peer != stager)

    def shifted(rows: Tensor, moves: list[Move], starts: list[int]) -> tuple[Tensor, Tensor]:
        """The move that each row belongs to, and the row counted from that move's start."""
        firsts = torch.tensor([move.row for move in moves], device="cpu")
        move = torch.searchsorted(firsts, rows, right=True) - 1
        return move, rows - firsts[move] + torch.tensor(starts, device="cpu")[move]

    sends = sorted(schedule.home_sends, key=lambda move: move.row)
    staged = calls.home_runs
    if sends:
        _, rows = shifted(
            staged[:, 0].contiguous(), sends, [start(rank, move.peer) for move in sends]
        )
        staged = torch.cat([rows.unsqueeze(1), staged[:, 1:]], 1)
        staged = staged[rows.sort(stable=True).indices]
    receives = sorted(schedule.home_receives, key=lambda move: move.row)
    local = len(calls.stages[0])
    runs = calls.local_runs.clone()
    home = runs[:, 2] == local
    if receives:
        starts = [start(move.peer, rank) for move in receives]
        move, rows = shifted(runs[home, 3], receives, starts)
        runs[home, 2], runs[home, 3] = local + move, rows
    total = sum(schedule.blocks.values())
    return _Home(
        total - schedule.query_rows,
        staged,
        sorted(move.peer for move in sends),
        [(move.peer, total - schedule.blocks[move.peer]) for move in receives],
        [move.peer for move in receives],
        runs,
    )


def _read_home(
    run: _Run, schedule: Schedule, grad_keys: list[Tensor], grad_values: list[Tensor]
) -> Callable[[], Tensor]:
    """As _bring_home, where each owner reads and sums what the others staged for it."""
    assert shares(run.transport)
    transport, calls = run.transport, run.calls
    pairs = list(zip(grad_keys, grad_values, strict=True))
    home = calls.home.get(transport.rank)
    if home is None:
        home = calls.home[transport.rank] = _home_of(schedule, calls, transport.rank)
    width = grad_keys[0].shape[1] + grad_values[0].shape[1]
    staged = transport.stage(
        next(schedule.exchanges), home.staged_rows, width, grad_keys[0].dtype, home.readers
    )
    if home.readers:
        columns = [grad for pair in pairs for grad in pair]
        staged.write(columns, home.staged_runs, 2, run.tag)
    own = pairs[: len(calls.stages[0])]
    return staged.read(
        home.parts, home.runs, schedule.query_rows, run.tag, home.owners, own=own
    ).wait


def _merge(
    outs: list[Tensor], lses: list[Tensor], calls: _Calls, sinks: Tensor | None, rows: int
) -> tuple[Tensor, Tensor]:
    if sinks is None:
        if calls.one_call:
            return outs[0], lses[0]
        return ops.merge(outs, lses, calls.output_runs, rows)
    # A sink is a key that every query of its head sees, whose value is 0.
    _, query_heads, head_size = outs[0].shape
    sink_out = outs[0].new_zeros(head_size).expand(rows, query_heads, -1)
    sink_lse = sinks.to(lses[0].dtype).expand(rows, -1)
    return ops.merge([*outs, sink_out], [*lses, sink_lse], calls.sunk_runs, rows)


def _empty_result(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, not yet computed."""
    out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
    return out, query.new_empty(query.shape[:2], dtype=_wide(query.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- heads for sequence --------------------------------------------------------------------------
#
# Neighbours trade their rows for heads, and each computes its own heads of all their rows.


class _Heads:
    """Who of the neighbours computes which heads. A key-value head is on every rank whose query
    heads attend to it."""

    def __init__(self, run: _Run, trade: Trade, query: Tensor, key: Tensor) -> None:
        self._transport, self._trade = run.transport, trade
        members = heads.members(trade)
        per_key = query.shape[1] // key.shape[1]
        self._even = query.shape[1] % len(members) == key.shape[1] % len(members) == 0
        self._queries = heads.split(query.shape[1], len(members))
        self._keys = [heads.key_heads(own, per_key) for own in self._queries]
        j = members.index(run.transport.rank)
        self.own = self._queries[j]
        """This rank's query heads."""
        keys = self._keys[j]
        key_of = [i // per_key - keys.start for i in _numbers(self.own)]
        count = len(_numbers(keys))
        even = [i * count // len(key_of) for i in range(len(key_of))]
        fits = not key_of or (len(key_of) % count == 0 and key_of == even)
        self.run = run if fits else run._replace(kernel=_Repeated(run.kernel, key_of, count))
        """Of those heads."""

    def bring(self, by_query: list[Tensor], by_key: list[Tensor], tag: int) -> list[Tensor]:
        if self._even:
            return heads.deal(self._transport, self._trade, [*by_query, *by_key], tag)
        columns = [
            [x[:, q] for x in by_query] + [x[:, k] for x in by_key]
            for q, k in zip(self._queries, self._keys, strict=True)
        ]
        return heads.bring(self._transport, self._trade, columns, tag)

    def take_back(
        self, by_query: list[Tensor], by_key: list[Tensor], key_count: int, tag: int
    ) -> list[Tensor]:
        if self._even:
            return heads.collect(self._transport, self._trade, [*by_query, *by_key], tag)
        shapes = [
            [(len(_numbers(q)), *x.shape[2:]) for x in by_query]
            + [(len(_numbers(k)), *x.shape[2:]) for x in by_key]
            for q, k in zip(self._queries, self._keys, strict=True)
        ]
        columns = [*by_query, *by_key]
        back = heads.take_back(self._transport, self._trade, columns, shapes, tag)
        parts = list(zip(*back, strict=True))
        queries, keys = parts[: len(by_query)], parts[len(by_query) :]
        return [torch.cat(part, 1) for part in queries] + [
            self._sum_keys(part, key_count) for part in keys
        ]

    def _sum_keys(self, parts: Sequence[Tensor], count: int) -> Tensor:
        """Gradients of key-value heads from every rank that had them, summed once."""
        total = parts[0].new_zeros(
            parts[0].shape[0], count, *parts[0].shape[2:], dtype=_wide(parts[0].dtype)
        )
        for own, part in zip(self._keys, parts, strict=True):
            total[:, own] += part
        return total.to(parts[0].dtype)


def _numbers(chosen: slice) -> range:
    return range(chosen.start, chosen.stop)


class _Repeated:
    """A kernel for query heads that do not divide evenly over their key-value heads: each gets one
    of its own."""

    def __init__(self, kernel: Kernel, key_of: list[int], count: int) -> None:
        self._kernel, self._key_of, self._count = kernel, key_of, count
        self.calls = kernel.calls
        self.dtypes = kernel.dtypes

    def capped(self, softcap: float) -> Kernel | None:
        kernel = self._kernel.capped(softcap)
        return None if kernel is None else _Repeated(kernel, self._key_of, self._count)

    def forward(
        self, call: Call, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        keys, values = key[:, self._key_of], value[:, self._key_of]
        return self._kernel.forward(call, query, keys, values, scale)

    def backward(
        self,
        call: Call,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = key[:, self._key_of], value[:, self._key_of]
        grad_query, grad_keys, grad_values = self._kernel.backward(
            call, grad_out, grad_lse, query, keys, values, out, lse, scale
        )
        return grad_query, self._collapse(grad_keys), self._collapse(grad_values)

    def _collapse(self, grad: Tensor) -> Tensor:
        """The adjoint of the repetition, summed in float32 (float64 for float64)."""
        wide = _wide(grad.dtype)
        index = torch.tensor(self._key_of, device=grad.device)
        total = grad.new_zeros(grad.shape[0], self._count, grad.shape[2], dtype=wide)
        return total.index_add_(1, index, grad.to(wide)).to(grad.dtype)


def _forward_of_heads(
    traded: _Heads,
    schedule: Schedule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    whole_query, whole_key, whole_value = traded.bring([query], [key, value], traded.run.tag)
    if whole_query.shape[1] > 0:
        own_sinks = None if sinks is None else sinks[traded.own]
        result = _forward(traded.run, schedule, whole_query, whole_key, whole_value, own_sinks)
    else:  # nor has any rank of the ring
        result = _empty_result(whole_query, whole_value)
    out, lse = traded.take_back(list(result), [], 0, traded.run.tag)
    return out, lse


def _backward_of_heads(
    traded: _Heads,
    schedule: Schedule,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    by_query = [grad_out, query, out, lse, *([] if grad_lse is None else [grad_lse])]
    # What travels depends on it: ranks that differ must not read each other's rows.
    tag = tag_of((traded.run.tag, len(by_query)))
    *wholes, whole_key, whole_value = traded.bring(by_query, [key, value], tag)
    whole_grad, whole_query, whole_out, whole_lse, *grad_lses = wholes
    if whole_query.shape[1] > 0:
        grads = _backward_rows(
            traded.run,
            schedule,
            whole_grad,
            grad_lses[0] if grad_lses else None,
            whole_query,
            whole_key,
            whole_value,
            whole_out,
            whole_lse,
        )
    else:
        grads = whole_query, whole_key, whole_value  # without heads, hence empty
    grad_query, grad_key, grad_value = traded.take_back([grads[0]], [*grads[1:]], key.shape[1], tag)
    return grad_query, grad_key, grad_value


# ---- operators -----------------------------------------------------------------------------------


class Layer(NamedTuple):
    """How a layer attends: its schedule, as a tensor for compiled models and as it was read."""

    words: Tensor
    schedule: Schedule
    choice: Choice

    @classmethod
    def of(cls, words: Tensor) -> Layer:
        family, softcap = kernel_of(words)
        return cls(words, schedule_of(words), Choice(families()[family], softcap))


def _attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, words: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    layer = Layer.of(words)
    run = _run_of(layer.schedule, query, key, value, sinks, scale, layer.choice, turned=False)
    out, lse, _, _ = _run_forward(run, layer.schedule, query, key, value, sinks, None)
    return out, lse


def _attention_rotated(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    words: Tensor,
    scale: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    layer = Layer.of(words)
    run = _run_of(layer.schedule, query, key, value, sinks, scale, layer.choice, turned=True)
    turn = Turn(cos, sin, interleaved)
    return _run_forward(run, layer.schedule, query, key, value, sinks, turn)


def _run_forward(
    run: _Run,
    schedule: Schedule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    turn: Turn | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, log-sum-exp, and the queries and keys that attention saw: turned."""
    first_sent: Tensor | None = None
    if turn is not None:
        query = _turned(query, turn)
        stages = schedule.stages
        if run.heads is None and len(stages) > 1 and not shares(run.transport):
            beside, sent = [value.flatten(1)], (stages[1].pack, stages[1].sent_rows)
            key, first_sent = ops.rotate_pack(
                key, turn.cos, turn.sin, beside, *sent, interleaved=turn.interleaved
            )
        else:
            key = _turned(key, turn)
    if run.heads is None:
        out, lse = _forward(run, schedule, query, key, value, sinks, first_sent)
    else:
        out, lse = _forward_of_heads(run.heads, schedule, query, key, value, sinks)
    return out, lse, query, key


def _attention_fake(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, words: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return _empty_result(query, value)


def _attention_rotated_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    words: Tensor,
    scale: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    turned = query.new_empty(query.shape), key.new_empty(key.shape)
    return *_empty_result(query, value), *turned


def _attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    words: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = grad_out, grad_lse, query, key, value, sinks, out, lse
    return _backward_of_operator(*given, words, scale, None)


def _attention_rotated_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    words: Tensor,
    scale: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For turned queries and keys, the gradients of those that were given."""
    given = grad_out, grad_lse, query, key, value, sinks, out, lse
    return _backward_of_operator(*given, words, scale, Turn(cos, sin, interleaved))


def _backward_of_operator(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    words: Tensor,
    scale: float,
    turn: Turn | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    layer, turned = Layer.of(words), turn is not None
    run = _run_of(layer.schedule, query, key, value, sinks, scale, layer.choice, turned)
    given = grad_out, grad_lse, query, key, value, sinks, out, lse
    *grads, grad_sinks = _run_backward(run, layer.schedule, *given, turn)
    # A compiler was told of strides: see _attention_backward_fake.
    grad_query, grad_key, grad_value = (grad.contiguous() for grad in grads)
    if grad_sinks is None:  # an operator gives a tensor
        grad_sinks = out.new_empty(0)
    return grad_query, grad_key, grad_value, grad_sinks


def _run_backward(
    run: _Run,
    schedule: Schedule,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    turn: Turn | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    grad_out = _innermost_contiguous(grad_out)
    given = schedule, grad_out, grad_lse, query, key, value, out, lse
    if run.heads is None:
        grads = _backward_rows(run, *given, turn)
    else:
        grad_query, grad_key, grad_value = _backward_of_heads(run.heads, *given)
        grads = _turned_back(grad_query, turn), _turned_back(grad_key, turn), grad_value
    if sinks is None:
        return *grads, None
    return *grads, _sinks_backward(grad_out, grad_lse, sinks, out, lse)


def _sinks_backward(
    grad_out: Tensor, grad_lse: Tensor | None, sinks: Tensor, out: Tensor, lse: Tensor
) -> Tensor:
    """This rank's share: a sink's weight in a row is exp(sink - lse), and its value is 0."""
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    weights = (sinks.to(lse.dtype) - lse).exp().masked_fill(lse == -torch.inf, 0)
    return -(weights * delta).sum(0).to(sinks.dtype)


def _attention_backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    words: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
        out.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape),
    )


def _attention_rotated_backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    words: Tensor,
    scale: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _attention_backward_fake(
        grad_out, grad_lse, query, key, value, sinks, out, lse, words, scale
    )


def _innermost_contiguous(rows: Tensor) -> Tensor:
    # The kernel ignores the innermost stride, and a gradient may come expanded from a sum.
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sinks, words, scale = inputs
    ctx.save_for_backward(query, key, value, sinks, *output, words)
    ctx.scale = scale
    ctx.set_materialize_grads(False)  # most calls do not use the log-sum-exp


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    query, key, value, sinks, out, lse, words = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    *grads, grad_sinks = torch.ops.hcp.attention_backward(
        grad_out, grad_lse, query, key, value, sinks, out, lse, words, ctx.scale
    )
    return *grads, None if sinks is None else grad_sinks, None, None


def _save_rotated(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, value, sinks, words, scale, cos, sin, interleaved = inputs
    out, lse, query, key = output
    ctx.save_for_backward(query, key, value, sinks, out, lse, words, cos, sin)
    ctx.scale, ctx.interleaved = scale, interleaved
    ctx.mark_non_differentiable(query, key)
    ctx.set_materialize_grads(False)


def _backward_rotated(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: None
) -> tuple[Any, ...]:
    query, key, value, sinks, out, lse, words, cos, sin = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    given = grad_out, grad_lse, query, key, value, sinks, out, lse, words, ctx.scale
    *grads, grad_sinks = torch.ops.hcp.attention_rotated_backward(*given, cos, sin, ctx.interleaved)
    return *grads, None if sinks is None else grad_sinks, None, None, None, None, None


def _refuse_second_derivative(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    raise NotImplementedError(
        "hcp attention was differentiated twice, expected once: it has no second derivative"
    )


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


# Registered by hand: torch.library.custom_op would import the compiler at the first eager call.
_ROWS = "Tensor query, Tensor key, Tensor value, Tensor? sinks"
_SAVED = f"Tensor grad_out, Tensor? grad_lse, {_ROWS}, Tensor out, Tensor lse"
_TABLES = "Tensor words, float scale"
_TURN = "Tensor cos, Tensor sin, bool interleaved"
_FOUR = "(Tensor, Tensor, Tensor, Tensor)"
_SCHEMAS = {
    "hcp::attention": f"({_ROWS}, {_TABLES}) -> (Tensor, Tensor)",
    "hcp::attention_backward": f"({_SAVED}, {_TABLES}) -> {_FOUR}",
    "hcp::attention_rotated": f"({_ROWS}, {_TABLES}, {_TURN}) -> {_FOUR}",
    "hcp::attention_rotated_backward": f"({_SAVED}, {_TABLES}, {_TURN}) -> {_FOUR}",
}
for _name, _run, _shapes, _gradient, _keep in (
    ("hcp::attention", _attention, _attention_fake, _backward, _save),
    (
        "hcp::attention_backward",
        _attention_backward,
        _attention_backward_fake,
        _refuse_second_derivative,
        _save_nothing,
    ),
    (
        "hcp::attention_rotated",
        _attention_rotated,
        _attention_rotated_fake,
        _backward_rotated,
        _save_rotated,
    ),
    (
        "hcp::attention_rotated_backward",
        _attention_rotated_backward,
        _attention_rotated_backward_fake,
        _refuse_second_derivative,
        _save_nothing,
    ),
):
    torch.library.define(_name, _SCHEMAS[_name])
    torch.library.impl(_name, ("cpu", "cuda"), _run)
    torch.library.register_fake(_name, _shapes)
    torch.library.register_autograd(_name, _gradient, setup_context=_keep)


# ---- the call ------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """The operator without its dispatch, which would take longer than all else in here."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        layer: Layer,
        scale: float,
        turn: Turn | None,
    ) -> tuple[Tensor, Tensor]:
        given, turned = (query, key, value, sinks), turn is not None
        with torch._C._AutoDispatchBelowAutograd():
            run = _run_of(layer.schedule, *given, scale, layer.choice, turned)
            out, lse, query, key = _run_forward(run, layer.schedule, *given, turn)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.layer, ctx.run, ctx.scale, ctx.turn = layer, run, scale, turn
        ctx.set_materialize_grads(False)  # most calls do not use the log-sum-exp
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        given = grad_out, grad_lse, query, key, value, sinks, out, lse
        if torch.is_grad_enabled() or _watched(query):  # it refuses a second derivative
            backward = torch.ops.hcp.attention_backward
            if ctx.turn is not None:
                backward = torch.ops.hcp.attention_rotated_backward
            grads = backward(*given, ctx.layer.words, ctx.scale, *(ctx.turn or ()))
        else:
            with torch._C._AutoDispatchBelowAutograd():
                grads = _run_backward(ctx.run, ctx.layer.schedule, *given, ctx.turn)
        grad_query, grad_key, grad_value, grad_sinks = grads
        grad_sinks = None if sinks is None else grad_sinks
        return grad_query, grad_key, grad_value, grad_sinks, None, None, None


_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def _watched(*tensors: Tensor) -> bool:
    """Whether a compiler, a mode or a kind of tensor is there that must see an operator."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or any(type(tensor) not in _PLAIN for tensor in tensors)
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    layer: Layer,
    scale: float,
    turn: Turn | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's rows over the whole sequences: (T, H, D), (T, G, D), (T, G, E) to
    (T, H, E), under the schedule of the layer; and its log-sum-exp (T, H), sinks included.

    With ``turn``, of queries and keys that `ops.rotate` turns, in fewer passes: keys are turned on
    their way into what is sent, and summed gradients are turned back before they are rounded.

    Differentiable once, see :meth:`hcp.ContextParallelHandler.attention`.
    """
    if _watched(query, key, value):
        return operator(query, key, value, sinks, layer.words, scale, turn)
    given = query, key, value, sinks, layer, scale, turn
    out, lse = _Attention.apply(*given)  # type: ignore[no-untyped-call]
    return out, lse


def operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    words: Tensor,
    scale: float,
    turn: Turn | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``attention``, for compilers: all that it depends on is in tensors and numbers."""
    given = query, key, value, sinks, words, scale
    if turn is None:
        out, lse = torch.ops.hcp.attention(*given)
    else:
        out, lse, _, _ = torch.ops.hcp.attention_rotated(*given, *turn)
    return out, lse


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    rows: int,
    device: torch.device,
) -> None:
    """Raise ValueError unless the tensors are what a kernel computes right.

    Kernels do not check head counts, and compute nonsense from wrong ones.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 3:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, expected (rows, heads, head_dim)"
            )
        if tensor.shape[0] != rows:
            raise ValueError(
                f"{name} has {tensor.shape[0]} rows, expected {rows}: "
                "this rank's rows of the micro-batch"
            )
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, expected {device}: the group's device")
        if tensor.dtype != query.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected {query.dtype} as query")
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"key has head_dim {key.shape[2]}, expected {query.shape[2]}: that of query"
        )
    if key.shape[1] != value.shape[1]:
        raise ValueError(f"value has {value.shape[1]} heads, expected {key.shape[1]}: those of key")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1] != 0:
        raise ValueError(
            f"query has {query.shape[1]} heads, expected a multiple of the {key.shape[1]} of key"
        )
    if sinks is not None:
        _check_sinks(sinks, query)


def _check_sinks(sinks: Tensor, query: Tensor) -> None:
    if sinks.shape != query.shape[1:2]:
        raise ValueError(
            f"sinks has shape {tuple(sinks.shape)}, expected ({query.shape[1]},): one per head"
        )
    if sinks.device != query.device or not sinks.is_floating_point():
        raise ValueError(
            f"sinks is {sinks.dtype} on {sinks.device}, expected floats on {query.device}"
        )
