"""Signals and places of memory that ranks have mapped, by slow and obvious Python."""

from __future__ import annotations

from collections.abc import Sequence

HALVES, PIECES, PAGE, WORD_BYTES = 2, 16, 4096, 8
STAGED, READ = 0, 1

Record = tuple[int, ...]
"""A signal: (word, place of its count, peer, whether it counts one more)."""
Read = tuple[Sequence[int], Sequence[int]]
"""The owners of a read, and those that no later one reads."""
Exchange = tuple[list[Record], list[Record], list[tuple[list[Record], list[Record], int]]]
"""Free, filled, and of each read: full, done, owners before this rank."""


class SlowLink:
    """What ``hcp._core.Link`` says."""

    def __init__(self, rank: int, bases: Sequence[int], buffer_bytes: int) -> None:
        self.rank, self.bases = rank, bases
        self.half_bytes = buffer_bytes // HALVES // PAGE * PAGE
        self.words_bytes = -(-self._signal_bytes(2 * HALVES * len(bases)) // PAGE) * PAGE
        self.counts = 2 * HALVES * len(bases)

    def bytes(self) -> int:
        return self.words_bytes + HALVES * self.half_bytes

    def rows(self, half: int) -> int:
        return self.words_bytes + half * self.half_bytes

    def exchange(self, half: int, readers: Sequence[int], reads: Sequence[Read]) -> Exchange:
        """The signals of an exchange through a half."""
        mapped = [peer for peer, base in enumerate(self.bases) if base]
        free = self._signals(READ, _at(mapped, half), STAGED, to=False)
        filled = self._signals(STAGED, _at(readers, half), STAGED, to=True, adds_one=True)
        made, met = [], frozenset[int]()
        for owners, done in reads:
            places = _at(owners, half)
            full = self._signals(STAGED, places, READ, to=False, adds_one=True, met=met)
            read = self._signals(READ, _at(done, half), READ, to=True)
            made.append((full, read, sum(owner < self.rank for owner in owners)))
            met |= frozenset(owners)
        return free, filled, made

    def _signals(
        self,
        kind: int,
        places: Sequence[tuple[int, int]],
        counted_as: int,
        *,
        to: bool,
        adds_one: bool = False,
        met: frozenset[int] = frozenset(),
    ) -> list[Record]:
        return [
            (
                self._word(*((peer, self.rank) if to else (self.rank, peer)), kind, half),
                self._place(counted_as, half, peer),
                peer,
                int(adds_one and peer not in met),
            )
            for peer, half in places
        ]

    def _word(self, owner: int, writer: int, kind: int, half: int) -> int:
        return self.bases[owner] + self._signal_bytes(self._place(kind, half, writer))

    def _place(self, kind: int, half: int, peer: int) -> int:
        return (kind * HALVES + half) * len(self.bases) + peer

    @staticmethod
    def _signal_bytes(signals: int) -> int:
        return signals * PIECES * WORD_BYTES


def _at(peers: Sequence[int], half: int) -> list[tuple[int, int]]:
    return [(peer, half) for peer in peers]
