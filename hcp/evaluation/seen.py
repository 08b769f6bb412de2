"""The set of evaluated samples as three numbers that ranks can add up."""

from __future__ import annotations

import struct
from collections.abc import Iterable


class Seen:
    """A set of indices as three sums. No set that a mistake would produce has equal sums."""

    _MASK = (1 << 64) - 1

    def __init__(self, count: int = 0, total: int = 0, mixed: int = 0) -> None:
        self.count, self.total, self.mixed = count, total, mixed

    def add(self, indices: Iterable[int]) -> None:
        for i in indices:
            self.count += 1
            self.total = (self.total + i) & self._MASK
            self.mixed = (self.mixed + _mixed(i)) & self._MASK

    def merge(self, other: Seen) -> None:
        self.count += other.count
        self.total = (self.total + other.total) & self._MASK
        self.mixed = (self.mixed + other.mixed) & self._MASK

    def times(self, n: int) -> Seen:
        return Seen(self.count * n, self.total * n & self._MASK, self.mixed * n & self._MASK)

    def to_bytes(self) -> bytes:
        return struct.pack("<3Q", self.count, self.total, self.mixed)

    @classmethod
    def pair_from_bytes(cls, data: bytes) -> tuple[Seen, Seen]:
        numbers = struct.unpack("<6Q", data)
        return cls(*numbers[:3]), cls(*numbers[3:])


def _mixed(i: int) -> int:
    """Hash to 64 bits by the finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    x = (i + 1) * 0x9E3779B97F4A7C15 & Seen._MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & Seen._MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & Seen._MASK
    return x ^ x >> 31
