"""The fit of a memory model: a line that no measured peak is above."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hcp
from hcp.tools.memory_fit import MemoryFit, Peak, Shared, expect_close, fit_peaks, fit_shared

ROWS = st.lists(st.integers(1, 2**20), min_size=3, max_size=8, unique=True)
BYTES = st.integers(1, 2**30)
LIMIT = 2**62


@given(ROWS, BYTES, st.integers(0, 2**30), st.integers(0, 2**40))
def test_a_line_gives_its_own_numbers(rows: list[int], kept: int, more: int, fixed: int) -> None:
    peaks = [Peak(n, fixed + (kept + more) * n, kept * n) for n in rows]
    fit = fit_peaks(peaks, LIMIT)
    assert (fit.model.activation, fit.model.logit) == (kept, more)
    assert (fit.fixed, fit.model.limit) == (fixed, LIMIT - fixed)
    assert fit.largest_error == 0


@given(ROWS, BYTES)
def test_without_a_forward_all_bytes_are_activations(rows: list[int], a_row: int) -> None:
    fit = fit_peaks([Peak(n, a_row * n) for n in rows], LIMIT)
    assert (fit.model.activation, fit.model.logit) == (a_row, 0)


def noisy(data: st.DataObject, rows: list[int], a_row: int, fixed: int, noise: int) -> list[Peak]:
    return [Peak(n, fixed + a_row * n + data.draw(st.integers(0, noise))) for n in rows]


@given(st.data(), ROWS, st.integers(2**10, 2**30), st.integers(0, 2**30), st.integers(0, 2**12))
def test_no_peak_is_above_the_model(
    data: st.DataObject, rows: list[int], a_row: int, fixed: int, noise: int
) -> None:
    peaks = noisy(data, rows, a_row, fixed, noise)
    spread = noise / (max(rows) - min(rows)) * len(rows)
    if a_row <= spread:
        return
    fit = fit_peaks(peaks, LIMIT)
    assert all(fit.error(peak) >= 0 for peak in peaks)
    assert any(fit.fixed + fit.model.bytes(p.rows, 0, 1) == p.bytes for p in peaks) or not fit.fixed


@given(st.data(), st.integers(2**12, 2**20), st.integers(0, 2**20))
def test_noise_moves_the_model_by_no_more_than_itself(
    data: st.DataObject, a_row: int, fixed: int
) -> None:
    rows, noise = [1000, 2000, 4000, 8000], 2**12
    fit = fit_peaks(noisy(data, rows, a_row, fixed, noise), LIMIT)
    for n in rows:
        assert 0 <= fit.fixed + fit.model.bytes(n, 0, 1) - (fixed + a_row * n) <= 3 * noise


@given(st.data(), ROWS, BYTES, st.integers(1, 2**20))
def test_more_bytes_a_row_never_give_a_smaller_model(
    data: st.DataObject, rows: list[int], a_row: int, more: int
) -> None:
    peaks = noisy(data, rows, a_row + 2**22, 0, 2**10)
    larger = [Peak(p.rows, p.bytes + more * p.rows) for p in peaks]
    small, large = fit_peaks(peaks, LIMIT), fit_peaks(larger, LIMIT)
    assert large.model.activation == small.model.activation + more
    assert large.fixed == small.fixed


def test_peaks_that_bend_upwards_are_below_the_line_and_far() -> None:
    """Attention that keeps a matrix of scores: no line holds beyond what was measured."""
    peaks = [Peak(n, n * n) for n in (256, 512, 1024, 2048)]
    fit = fit_peaks(peaks, LIMIT)
    assert all(fit.error(peak) >= 0 for peak in peaks)
    message = r"above a measured peak by [\d,.]+%, expected at most 10%: .* \(65,536 at 256 rows, "
    with pytest.raises(ValueError, match=message):
        expect_close(fit, 0.1)
    expect_close(fit_peaks([Peak(n, 5 * n) for n in (2, 3, 4)], LIMIT), 0.0)


@pytest.mark.parametrize("peaks", [[Peak(n, 7) for n in (1, 2, 3)], [Peak(1, 9), Peak(5, 3)]])
def test_bytes_that_do_not_grow_are_refused(peaks: list[Peak]) -> None:
    with pytest.raises(ValueError, match=r"do not grow with its rows: \d at 1 rows, \d at"):
        fit_peaks(peaks, LIMIT)


def test_a_limit_below_one_row_is_refused() -> None:
    peaks = [Peak(n, 100 + 10 * n) for n in (1, 2, 3)]
    assert fit_peaks(peaks, 113, Shared(attention=3)).model.limit == 13
    message = "limit is 112 bytes, expected at least the 113 of a micro-batch of one row"
    with pytest.raises(ValueError, match=re.escape(message)):
        fit_peaks(peaks, 112, Shared(attention=3))


# ---- degrees -------------------------------------------------------------------------------------


def attention(degrees: list[int], alone: int, gathered: int, row: int) -> dict[int, list[Peak]]:
    return {
        d: [Peak(n, n * (alone + (d > 1) * (gathered * d + row))) for n in (64, 128, 256)]
        for d in [1, *degrees]
    }


@given(
    st.lists(st.integers(2, 512), min_size=2, max_size=9, unique=True),
    st.integers(0, 2**20),
    st.integers(0, 2**20),
)
def test_gathered_keys_are_told_from_what_every_degree_adds(
    degrees: list[int], gathered: int, row: int
) -> None:
    assert fit_shared(attention(degrees, 500, gathered, row)) == Shared(gathered, row)


def test_one_larger_degree_counts_as_gathered() -> None:
    assert fit_shared(attention([4], 500, 8, 4)) == Shared(gathered=9)
    assert fit_shared(attention([], 500, 8, 4)) == fit_shared({}) == Shared()


@given(
    st.dictionaries(st.integers(2, 64), st.integers(0, 2**20), min_size=1), st.integers(0, 2**20)
)
def test_no_degree_takes_more_than_the_fit_says(more: dict[int, int], alone: int) -> None:
    found = fit_shared(
        {d: [Peak(n, n * (alone + more.get(d, 0))) for n in (1, 2, 3)] for d in [1, *more]}
    )
    assert min(found) >= 0
    assert all(found.attention + found.gathered * d >= bytes_more for d, bytes_more in more.items())


def test_what_degrees_add_is_in_the_model() -> None:
    peaks = [Peak(n, 10 * n, 6 * n) for n in (1, 2, 3)]
    fit: MemoryFit = fit_peaks(peaks, 1000, Shared(5, 2, 4))
    wanted = {"gathered": 5, "attention": 2, "head_chunks": 4}
    assert fit.model == hcp.MemoryModel(activation=6, logit=4, limit=1000, **wanted)


def test_what_exchanges_hold_is_in_the_model() -> None:
    peaks = [Peak(n, 10 * n + 3, 6 * n) for n in (1, 2, 3)]
    found = fit_peaks(peaks, 1000, buffer=900).model
    assert found == hcp.MemoryModel(activation=6, logit=4, limit=997, buffer=900)
    with pytest.raises(ValueError, match=r"at least the 13 .* and the 988 of buffers of exchanges"):
        fit_peaks(peaks, 1000, buffer=988)
