"""The tables of ``hcp.attention.cross`` as lists, slow and obvious, for every rank."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hcp.attention.cross import KeyRoute
from hcp.attention.kernels import Launch
from hcp.exchange.layout import Layout, Span


class TokenRun(NamedTuple):
    """Consecutive tokens of a document on one rank."""

    start: int
    """The first token, as the document counts."""
    row: int
    """Its row on the rank."""
    rows: int


class Visibility(NamedTuple):
    """Which keys the queries of one document see."""

    queries: int
    keys: int
    left: int
    right: int

    @property
    def ahead(self) -> int:
        """The key at which query 0 stands."""
        return self.keys - self.queries

    def keys_of(self, run: TokenRun) -> range:
        """Keys that some query of the run sees."""
        first, end = run.start + self.ahead, run.start + run.rows + self.ahead
        begin = 0 if self.left < 0 else max(0, first - self.left)
        return range(
            begin, max(begin, self.keys if self.right < 0 else min(self.keys, end + self.right))
        )

    def seeing(self, run: TokenRun) -> TokenRun:
        """The queries of the run that see any key. Those too far before the first key see none."""
        blind = 0 if self.right < 0 else min(run.rows, max(0, -self.ahead - self.right - run.start))
        return TokenRun(run.start + blind, run.row + blind, run.rows - blind)

    def entry(self, run: TokenRun, keys: range, key_row: int) -> tuple[int, ...]:
        """An entry of queries, each of which sees some key, and the keys that they see."""
        at = run.start + self.ahead - keys.start
        low = 1 - run.rows if self.left < 0 else max(1 - run.rows, at - self.left)
        high = len(keys) - 1 if self.right < 0 else min(len(keys) - 1, at + self.right)
        return run.row, run.rows, key_row, len(keys), low, high


class RankSpans:
    """The tokens that each rank holds of each document of a micro-batch. A document has the number
    of its sequence, from the second of a sequence on plus 2^32 for each one before it."""

    def __init__(self, layout: Layout) -> None:
        self.documents: dict[int, list[int]] = {}
        """The documents of each rank's group, in order."""
        self.lengths: dict[int, int] = {}
        self.counts: dict[int, int] = {}
        self._runs: dict[tuple[int, int], list[TokenRun]] = {}
        for group in layout.plan.micro_batches[layout.micro_batch]:
            ranks = range(group.first_rank, group.first_rank + group.degree)
            self._add([Layout(layout.plan, layout.micro_batch, rank) for rank in ranks])

    def _add(self, layouts: Sequence[Layout]) -> None:
        """The layouts of a group's ranks."""
        whole = layouts[0].documents
        own = [self._numbered(document) for document in whole]
        for layout in layouts:
            self.documents[layout.rank] = own
            row = 0
            for number, (_, start, rows) in zip(layout.span_documents, layout.spans, strict=True):
                runs = self._runs.setdefault((layout.rank, own[number]), [])
                runs.append(TokenRun(start - whole[number].start, row, rows))
                row += rows

    def _numbered(self, document: Span) -> int:
        before = self.counts.get(document.sequence, 0)
        self.counts[document.sequence] = before + 1
        number = document.sequence + (before << 32)
        self.lengths[number] = document.rows
        return number

    def of(self, rank: int, document: int) -> list[TokenRun]:
        return self._runs.get((rank, document), [])


class Spans(NamedTuple):
    """The tokens of the queries and of the keys of all ranks."""

    queries: RankSpans
    keys: RankSpans
    window: tuple[int, int]

    def visibility(self, document: int) -> Visibility:
        lengths = self.queries.lengths[document], self.keys.lengths[document]
        return Visibility(*lengths, *self.window)

    def query_runs(self, rank: int, document: int) -> list[TokenRun]:
        """A rank's queries of a document; all as one run where no window tells them apart."""
        runs = self.queries.of(rank, document)
        if self.window != (-1, -1) or not runs:
            return runs
        return [TokenRun(0, runs[0].row, sum(run.rows for run in runs))]

    def seen(self, rank: int, document: int) -> list[range]:
        """Keys of a document that queries of a rank see: ascending ranges with gaps between."""
        visibility = self.visibility(document)
        seen: list[range] = []
        for run in self.query_runs(rank, document):
            keys = visibility.keys_of(run)
            if seen and keys and keys.start <= seen[-1].stop:
                seen[-1] = range(seen[-1].start, max(seen[-1].stop, keys.stop))
            elif keys:
                seen.append(keys)
        return seen

    def carried(self, owner: int, reader: int) -> Iterator[tuple[int, int, int, int]]:
        """Keys of an owner that a reader sees, in the order of the wire: (document, place among all
        that the reader sees of it, the owner's row, rows)."""
        for document in self.queries.documents.get(reader, ()):
            place = 0
            for seen in self.seen(reader, document):
                for start, row, rows in self.keys.of(owner, document):
                    begin, end = max(start, seen.start), min(start + rows, seen.stop)
                    if begin < end:
                        yield document, place + begin - seen.start, row + begin - start, end - begin
                place += len(seen)


class Tables:
    """What ``listed`` gives of the core's table, for any rank."""

    def __init__(self, queries: Layout, keys: Layout, window: tuple[int, int]) -> None:
        """``queries``, ``keys``: layouts of any rank in the two plans."""
        self.spans = Spans(RankSpans(queries), RankSpans(keys), window)
        self.ranks = keys.plan.ranks

    def of(self, rank: int, source_rows: int) -> dict[str, Any]:
        documents = self.spans.queries.documents.get(rank, [])
        sizes = [sum(map(len, self.spans.seen(rank, document))) for document in documents]
        key_starts = list(itertools.accumulate(sizes, initial=0))
        pack, sends = self._sent(rank)
        starts = dict(zip(documents, key_starts, strict=False))
        stores, receives = self._received(rank, starts)
        entries = list(self._entries(rank, documents, key_starts))
        rows = [sum(rows for *_, rows in moves) for moves in (sends, receives)]
        return {
            "sizes": (source_rows, *rows, key_starts[-1]),
            "pack": pack,
            "sends": sends,
            "receives": receives,
            "arrange": [(wire, rows) for _, wire, rows in sorted(stores)],
            "places": [(row, rows) for row, _, rows in stores],
            "entries": entries,
            "query_runs": cut([(e[0], e[1], i, 0) for i, e in enumerate(entries)]),
            "key_runs": cut([(e[2], e[3], i, 0) for i, e in enumerate(entries)]),
        }

    def _sent(self, rank: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        pack: list[tuple[int, ...]] = []
        sends: list[tuple[int, ...]] = []
        sent = 0
        for peer in range(self.ranks):
            first = sent
            for _, _, row, rows in self.spans.carried(rank, peer):
                pack.append((row, rows))
                sent += rows
            sends += [(peer, first, sent - first)] if sent > first else []
        return pack, sends

    def _received(
        self, rank: int, starts: dict[int, int]
    ) -> tuple[list[tuple[int, int, int]], list[tuple[int, ...]]]:
        """(output row, wire row, rows) of what comes, in the order of the wire; and receives."""
        stores: list[tuple[int, int, int]] = []
        receives: list[tuple[int, ...]] = []
        received = 0
        for peer in range(self.ranks):
            first = received
            for document, place, _, rows in self.spans.carried(peer, rank):
                stores.append((starts[document] + place, received, rows))
                received += rows
            receives += [(peer, first, received - first)] if received > first else []
        return stores, receives

    def _entries(
        self, rank: int, documents: Sequence[int], key_starts: Sequence[int]
    ) -> Iterator[tuple[int, ...]]:
        for document, key_row in zip(documents, key_starts, strict=False):
            visibility, seen = self.spans.visibility(document), self.spans.seen(rank, document)
            for whole in self.spans.query_runs(rank, document):
                keys, run = visibility.keys_of(whole), visibility.seeing(whole)
                if keys and run.rows > 0:
                    yield visibility.entry(run, keys, key_row + _place_in(seen, keys.start))


def _place_in(ranges: Sequence[range], key: int) -> int:
    """The place of a key among the keys of all ranges, end to end."""
    return sum(min(key, r.stop) - r.start for r in ranges if r.start <= key)


def cut(records: Sequence[tuple[int, int, int, int]]) -> list[tuple[int, ...]]:
    """Cut records (row, rows, part, part_row) where any of them begins or ends, so that records of
    the same rows are one run."""
    edges = sorted({edge for row, rows, *_ in records for edge in (row, row + rows)})
    made = []
    for row, rows, part, part_row in records:
        own = edges[bisect_left(edges, row) : bisect_left(edges, row + rows) + 1]
        made += [(a, b - a, part, part_row + a - row) for a, b in itertools.pairwise(own)]
    return sorted(made)


def launch_runs(launches: Sequence[Launch]) -> list[list[tuple[int, ...]]]:
    """Runs of queries and runs of keys, of the launches."""
    parts = [(entry, i, launch) for i, launch in enumerate(launches) for entry in launch.entries]
    return [
        cut([(e.query_row, e.query_rows, i, e.query_row - x.queries.start) for e, i, x in parts]),
        cut([(e.key_row, e.key_rows, i, e.key_row - x.keys.start) for e, i, x in parts]),
    ]


def listed(route: KeyRoute) -> dict[str, Any]:
    """The same of hcp's own."""

    def records(name: str) -> list[tuple[int, ...]]:
        return [tuple(record) for record in route.records(name)]

    return {
        "sizes": (route.source_rows, route.sent_rows, route.received_rows, route.output_rows),
        "pack": [tuple(record) for record in route.pack.tolist()],
        "sends": [tuple(move) for move in route.sends],
        "receives": [tuple(move) for move in route.receives],
        "arrange": [tuple(record) for record in route.arrange.tolist()],
        "places": records("PLACES"),
        "entries": [tuple(entry) for entry in route.entries],
        "query_runs": records("QUERY_RUNS"),
        "key_runs": records("KEY_RUNS"),
    }
