"""What lies where in memory that ranks have mapped, and which signals a rank raises and waits for:
the core's against those of slow Python."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support.link_tables import SlowLink

from hcp import _core
from hcp.exchange.layout import tensor_of
from hcp.exchange.peer import SignalTable
from hcp.exchange.signals import LATE, PIECES, SignalFailure

MAPPED = [0x7000_0000_0000 + (rank << 32) for rank in range(64)]


def drawn(draw: random.Random) -> tuple[int, list[int], int]:
    """A rank, where the memory of each rank lies, 0 where it is not mapped, and bytes for rows."""
    size = draw.randint(1, 64)
    bases = [draw.choice((0, base)) for base in MAPPED[:size]]
    rank = draw.randrange(size)
    bases[rank] = MAPPED[rank]
    return rank, bases, draw.choice((0, 4096, 8191, 2 * 4096, 2**20 + 5, 2**30))


def records(signals: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(record) for record in signals.tolist()]


def test_signals_equal_those_of_slow_python() -> None:
    draw = random.Random(4)
    for _ in range(2000):
        given = drawn(draw)
        mapped = [peer for peer, base in enumerate(given[1]) if base]

        def some(of: list[int] = mapped) -> list[int]:
            return draw.sample(of, draw.randint(0, len(of)))

        half, readers = draw.randrange(2), some()
        reads = [(some(), some()) for _ in range(draw.randint(0, 4))]
        words = _core.Link(*given).exchange(half, readers, reads)
        table = SignalTable(tensor_of(words, torch.int64))
        found = [(records(full), records(done), after) for full, done, after in table.reads()]
        owner = [records(table.section(name)) for name in ("FREE", "FILLED")]
        assert (*owner, found) == SlowLink(*given).exchange(half, readers, reads)


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
        for given in (([peer], []), ([], [([2, peer], [])]), ([], [([], []), ([], [peer])])):
            with pytest.raises(ValueError, match=f"rank {peer} is not one whose memory rank 0 has"):
                link.exchange(0, *given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="half is 2, expected 0 to 1"):
        link.exchange(2, [], [])
    with pytest.raises(ValueError, match="half is -1, expected 0 to 1"):
        link.rows(-1, 1, 8)
    with pytest.raises(ValueError, match=r"stages 8192 bytes \(1024 rows of 8\), expected <= 4096"):
        link.rows(0, 1024, 8)
    for rows, row_bytes in ((2**40, 2**40), (-1, 8), (8, -1)):
        with pytest.raises(ValueError, match=f"rows are {rows} of {row_bytes} bytes, expected"):
            link.rows(0, rows, row_bytes)


# ---- messages ------------------------------------------------------------------------------------


class Ends:
    """Two ranks that send each other messages, in memory of this process."""

    def __init__(self) -> None:
        size = _core.link_bytes(2, 2 * 4096)
        self.memory = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
        bases = [memory.data_ptr() for memory in self.memory]
        self.links = [_core.Link(rank, bases, 2 * 4096) for rank in range(2)]
        self.counts = [torch.zeros(link.counts, dtype=torch.int64) for link in self.links]
        self.failure = torch.zeros(4, dtype=torch.int64)
        self.progress = torch.zeros(PIECES, dtype=torch.int32)

    def fresh(self) -> _core.Link:
        return _core.Link(0, [memory.data_ptr() for memory in self.memory], 2 * 4096)

    def mail(
        self, rank: int, sent: torch.Tensor, received: torch.Tensor, rounds: torch.Tensor
    ) -> None:
        link = tensor_of(self.links[rank].words, torch.int64)
        counted = self.counts[rank], 5, 10**7, self.failure, 0
        given = sent, received, rounds, link, self.progress, self.progress
        torch.ops.hcp.mail(*given, *counted)

    def rounds(self, rank: int, sends: list[int], receives: list[int]) -> torch.Tensor:
        return tensor_of(self.links[rank].rounds(sends, receives, 16), torch.int64)


def test_messages_take_mailboxes_by_turns() -> None:
    ends = Ends()
    none = torch.empty(0, 0)
    for number in range(5):
        sent, received = torch.full((3, 4), float(number)), torch.zeros(4, 4)
        ends.mail(0, sent, none, ends.rounds(0, [1, 1, 2], []))
        ends.mail(1, none, received, ends.rounds(1, [], [0, 2, 2]))
        assert received[:, 0].tolist() == [0, 0, number, number]
    first = ends.links[0].rows(0, 0, 8) // 4
    rows = [ends.memory[0].view(torch.float32)[first + half * 1024].item() for half in range(2)]
    assert rows == [3, 4]  # the fourth message, and the fifth
    # As often as each half was used: staged for the other rank, and read from it.
    assert [counts.tolist() for counts in ends.counts] == [
        [0, 2, 0, 3, 0, 0, 0, 0],
        [0, 0, 0, 0, 2, 0, 3, 0],
    ]


def test_a_message_that_does_not_come_is_late() -> None:
    ends = Ends()
    with pytest.raises(RuntimeError, match="the signal of rank 0 is 0, expected"):
        ends.mail(1, torch.empty(0, 0), torch.zeros(4, 4), ends.rounds(1, [], [0, 0, 2]))
    failure = SignalFailure.from_address(ends.failure.data_ptr())
    assert (failure.kind, failure.peer, failure.found) == (LATE, 0, 0)
    assert _core.signal_tag(failure.expected) == 5


def test_rounds_that_lie_outside_of_rows_are_refused() -> None:
    ends = Ends()
    out, back = ends.rounds(0, [1, 1, 2], []), ends.rounds(0, [], [1, 2, 2])
    rows, none = torch.zeros(4, 4), torch.empty(0, 0)
    for sent, received, rounds in (
        (rows[:2], none, out),  # rows that are not there
        (none, rows[:3], back),
        (torch.zeros(4, 8192), none, out),  # rows that are larger than a mailbox
        (none, torch.zeros(4, 8192), back),
        (none, none, out),
        (none, none, back),
    ):
        with pytest.raises(RuntimeError, match=r"rounds has \d+ words that are no rounds|runs\["):
            ends.mail(0, sent, received, rounds)
    odd = torch.zeros(66, dtype=torch.uint8)[1:65].view(4, 16)
    with pytest.raises(RuntimeError, match="expected all of them to begin at a multiple of 4"):
        ends.mail(0, odd, none, out)
    given = rows, none, out, torch.zeros(12, dtype=torch.int64), ends.progress, ends.progress
    with pytest.raises(RuntimeError, match="link has 12 words that are no link"):
        torch.ops.hcp.mail(*given, ends.counts[0], 5, 10**7, ends.failure, 0)
    # Nothing was counted: the next message takes the mailbox of the first.
    assert not any(counts.any() for counts in ends.counts)
    assert ends.links[0].words.tolist() == ends.fresh().words.tolist()
    ends.counts[0] = ends.counts[0][:2]
    with pytest.raises(RuntimeError, match="counts has 2 words, expected the 8 of link"):
        ends.mail(0, rows, none, out)
