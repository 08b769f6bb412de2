"""Signals and places of memory that ranks have mapped, by slow and obvious Python."""

from __future__ import annotations

from collections.abc import Sequence

HALVES, PIECES, PAGE, WORD_BYTES = 2, 16, 4096, 8
STAGED, READ = 0, 1

Record = tuple[int, int, int, int]
"""A signal: (word, place of its count, peer, whether it counts one more)."""


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

    def read_by(self, places: Sequence[tuple[int, int]]) -> list[Record]:
        return self._signals(READ, places, STAGED, to=False)

    def staged_for(self, places: Sequence[tuple[int, int]]) -> list[Record]:
        return self._signals(STAGED, places, STAGED, to=True, adds_one=True)

    def staged_by(self, places: Sequence[tuple[int, int]], met: frozenset[int]) -> list[Record]:
        return self._signals(STAGED, places, READ, to=False, adds_one=True, met=met)

    def read_of(self, places: Sequence[tuple[int, int]]) -> list[Record]:
        return self._signals(READ, places, READ, to=True)

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
