"""Fit a memory model to measured peaks: a line that no measured peak is above.

Integers and fractions alone decide, so peaks that lie on a line give its very numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from hcp._validate import expect_size
from hcp.planning.memory import MemoryModel


class Peak(NamedTuple):
    """The bytes of one measured micro-batch, in addition to those that were held before it."""

    rows: int
    bytes: int
    """The most at once."""
    kept: int = 0
    """Bytes that the layers' forward leaves for the backward."""


class Shared(NamedTuple):
    """The buffers of attention over several ranks, in terms of a model."""

    gathered: int = 0
    """Bytes of each token of the group."""
    attention: int = 0
    """Bytes of each row of the rank, whatever the degree."""
    head_chunks: int = 1
    """The most chunks of heads."""

    @property
    def row(self) -> int:
        """Bytes of one row alone, in as many chunks as may be."""
        return -(-self.attention // self.head_chunks)


@dataclass(frozen=True)
class MemoryFit:
    """A memory model, and how well it tells what was measured."""

    model: MemoryModel
    fixed: int
    """Bytes of any micro-batch, however few its rows. They are taken off the model's limit."""
    peaks: tuple[Peak, ...]

    def error(self, peak: Peak) -> float:
        """Return by what part the model is above a peak."""
        return (self.fixed + self.model.bytes(peak.rows, 0, 1)) / max(1, peak.bytes) - 1

    @property
    def largest_error(self) -> float:
        return max(self.error(peak) for peak in self.peaks)


ALONE = Shared()
"""For plans of degree 1."""


def fit_peaks(
    peaks: Sequence[Peak], limit: int, shared: Shared = ALONE, buffer: int = 0
) -> MemoryFit:
    """Fit the bytes of a row to peaks of three numbers of rows or more, all at degree 1.

    The slope is that of least squares. The line is then raised until no peak is above it, and what
    it has at 0 rows is taken off ``limit``, the most bytes of a micro-batch and of ``buffer``,
    which exchanges hold. Raises ValueError if the peaks do not grow with the rows, or if one row
    does not fit.
    """
    slope = _slope([(peak.rows, peak.bytes) for peak in peaks])
    if slope <= 0:
        raise ValueError(
            f"the bytes of a micro-batch do not grow with its rows: {_in_words(peaks)}, expected a "
            "step that runs forward and backward over as many rows as it is told"
        )
    row = math.ceil(slope)
    fixed = max(0, *(peak.bytes - row * peak.rows for peak in peaks))
    kept = math.ceil(_slope([(peak.rows, peak.kept) for peak in peaks]))
    activation = min(max(0, kept), row) if any(peak.kept for peak in peaks) else row
    expect_size("limit", limit)
    least = fixed + row + shared.row + buffer
    if limit < least:
        held = f" and the {buffer:,} of buffers of exchanges" if buffer else ""
        raise ValueError(
            f"limit is {limit:,} bytes, expected at least the {least - buffer:,} of a "
            f"micro-batch of one row{held}: use a GPU with more memory, or hold less"
        )
    model = MemoryModel(
        activation=activation,
        logit=row - activation,
        limit=limit - fixed,
        buffer=buffer,
        **shared._asdict(),
    )
    return MemoryFit(model, fixed, tuple(peaks))


def fit_shared(by_degree: Mapping[int, Sequence[Peak]], head_chunks: int = 1) -> Shared:
    """Fit what attention takes more if its sequences are spread over several ranks.

    ``by_degree``: the peaks of attention alone at degree 1, and at larger ones, all heads at once.
    No measured degree takes more than the fit says. ``head_chunks``: for the model.
    """
    slopes = {d: _slope([(p.rows, p.bytes) for p in peaks]) for d, peaks in by_degree.items()}
    more = {d: max(Fraction(0), slopes[d] - slopes[1]) for d in slopes if d > 1}
    if not more:
        return Shared(head_chunks=head_chunks)
    # A row of a rank comes with d tokens of its group.
    if len(more) == 1:
        ((degree, bytes_more),) = more.items()
        return Shared(math.ceil(bytes_more / degree), 0, head_chunks)
    gathered = math.ceil(max(Fraction(0), _slope(list(more.items()))))
    row = max(Fraction(0), *(bytes_more - gathered * d for d, bytes_more in more.items()))
    return Shared(gathered, math.ceil(row), head_chunks)


def expect_close(fit: MemoryFit, tolerance: float) -> None:
    """Raise ValueError if the model is above a peak by more than the tolerance: the peaks then lie
    on no line, and the model does not tell those of other rows."""
    if fit.largest_error > tolerance:
        raise ValueError(
            f"the model is above a measured peak by {fit.largest_error:.1%}, expected at most "
            f"{tolerance:.0%}: the bytes of a micro-batch do not follow its rows "
            f"({_in_words(fit.peaks)}); measure more rows, which weigh more than what every "
            "micro-batch takes"
        )


def _slope(points: Sequence[tuple[int, int | Fraction]]) -> Fraction:
    """The slope of least squares, exactly."""
    xs, ys = [Fraction(x) for x, _ in points], [Fraction(y) for _, y in points]
    left, low = sum(xs, Fraction(0)) / len(xs), sum(ys, Fraction(0)) / len(ys)
    across = (x - left for x in xs)
    rise = sum(((x - left) * (y - low) for x, y in zip(xs, ys, strict=True)), Fraction(0))
    return rise / sum((x * x for x in across), Fraction(0))


def _in_words(peaks: Sequence[Peak]) -> str:
    return ", ".join(f"{peak.bytes:,} at {peak.rows:,} rows" for peak in peaks)
