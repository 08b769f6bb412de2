"""What lies where in memory that ranks have mapped, and which signals a rank raises and waits for:
the core's against those of slow Python."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support.link_tables import SlowLink

from hcp import _core
from hcp.exchange.peer import PeerMemory

MAPPED = [0x7000_0000_0000 + (rank << 32) for rank in range(64)]


def drawn(draw: random.Random) -> tuple[int, list[int], int]:
    """A rank, where the memory of each rank lies, 0 where it is not mapped, and bytes for rows."""
    size = draw.randint(1, 64)
    bases = [draw.choice((0, base)) for base in MAPPED[:size]]
    rank = draw.randrange(size)
    bases[rank] = MAPPED[rank]
    return rank, bases, draw.choice((0, 4096, 8191, 2 * 4096, 2**20 + 5, 2**30))


def memory_of(rank: int, bases: list[int], buffer_bytes: int) -> PeerMemory:
    def view(*given: Any) -> torch.Tensor:
        raise AssertionError(given)

    failure = torch.zeros(4, dtype=torch.int64)
    device = torch.device("cpu")
    given = {"device": device, "stream": 0, "buffer_bytes": buffer_bytes, "timeout": 1.0}
    return PeerMemory(rank, bases, view, failure, **given)  # type: ignore[arg-type]


def records(signals: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(record) for record in signals.tolist()]


def test_signals_equal_those_of_slow_python() -> None:
    draw = random.Random(4)
    for _ in range(500):
        given = drawn(draw)
        memory, slow = memory_of(*given), SlowLink(*given)
        mapped = tuple(peer for peer, base in enumerate(given[1]) if base)
        half = draw.randrange(2)
        peers = tuple(draw.sample(mapped, draw.randint(0, len(mapped))))
        places = tuple((peer, draw.randrange(2)) for peer in peers)
        met = frozenset(draw.sample(peers, len(peers) // 2))
        own = tuple((peer, half) for peer in peers)
        assert records(memory.read_by(half, peers)) == slow.read_by(own)
        everybody = tuple((peer, half) for peer in mapped)
        assert records(memory.read_by(half)) == slow.read_by(everybody)
        assert records(memory.staged_for(half, peers)) == slow.staged_for(own)
        assert records(memory.staged_by(places, met)) == slow.staged_by(places, met)
        assert records(memory.read_of(places)) == slow.read_of(places)


def test_places_of_rows_and_counts_equal_those_of_slow_python() -> None:
    draw = random.Random(5)
    for _ in range(500):
        rank, bases, buffer_bytes = drawn(draw)
        link, slow = _core.Link(rank, bases, buffer_bytes), SlowLink(rank, bases, buffer_bytes)
        assert _core.link_bytes(len(bases), buffer_bytes) == slow.bytes()
        assert (link.half_bytes, link.counts) == (slow.half_bytes, slow.counts)
        assert [link.rows(half, 0, 8) for half in range(2)] == [
            slow.rows(half) for half in range(2)
        ]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((2, [8, 8], 4096), "rank is 2, expected one of the 2 ranks"),
        ((-1, [8, 8], 4096), "rank is -1, expected one of the 2 ranks"),
        ((0, [0, 8], 4096), "rank is 0, expected one of the 2 ranks, whose own memory is mapped"),
        ((0, [8, 8], -1), "buffer_bytes is -1, expected >= 0"),
    ],
)
def test_an_end_that_cannot_be_is_refused(given: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        _core.Link(*given)


def test_places_that_are_none_are_refused() -> None:
    link = _core.Link(0, [8, 0, 8], 2 * 4096)
    for peer in (1, 3, -1):
        with pytest.raises(ValueError, match=f"rank {peer} is not one whose memory rank 0 has"):
            link.signals(0, (peer, 0, 0))
    with pytest.raises(ValueError, match="half is 2, expected 0 to 1"):
        link.signals(1, (2, 2, 0))
    with pytest.raises(ValueError, match="half is -1, expected 0 to 1"):
        link.rows(-1, 1, 8)
    with pytest.raises(ValueError, match="which is 4, expected 0 to 3"):
        link.signals(4, (2, 0, 0))
    with pytest.raises(ValueError, match=r"stages 8192 bytes \(1024 rows of 8\), expected <= 4096"):
        link.rows(0, 1024, 8)
    for rows, row_bytes in ((2**40, 2**40), (-1, 8), (8, -1)):
        with pytest.raises(ValueError, match=f"rows are {rows} of {row_bytes} bytes, expected"):
            link.rows(0, rows, row_bytes)
