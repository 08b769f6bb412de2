"""The operators against slow references, on every device that has them.

Legend: N rows of the input, R rows of the result, H heads, D head size.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import permutations
from math import inf, log, nan
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import planning, reference
from torch import Tensor
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from hcp import ops

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# One rounding of the result, a few of the sums before it.
TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 2e-6,
    torch.bfloat16: 2**-8 + 1e-6,
    torch.float16: 2**-11 + 1e-6,
}


def devices() -> list[str]:
    has_cuda = torch.cuda.is_available() and torch._C._dispatch_has_kernel_for_dispatch_key(
        "hcp::pack", "CUDA"
    )
    return ["cpu", "cuda"] if has_cuda else ["cpu"]


@pytest.fixture(params=devices(), scope="module")
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def table(*records: tuple[int, ...], words: int = 4) -> Tensor:
    return torch.tensor(records, dtype=torch.int64).reshape(len(records), words)


def segments_table(*records: tuple[int, int]) -> Tensor:
    return table(*records, words=2)


def random(
    *shape: int, seed: int, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def expect_close(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Within the dtype's tolerance of the value, or of 1; equal where infinite or NaN."""
    tolerance = TOLERANCE[dtype or actual.dtype]
    torch.testing.assert_close(
        actual.cpu().double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True
    )


# ---- pack and unpack -----------------------------------------------------------------------------

ANY_DTYPE = [
    *FLOATS,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", ANY_DTYPE, ids=str)
def test_pack_gathers_rows_of_any_dtype_side_by_side(device, dtype):
    a = torch.arange(12, device=device).reshape(4, 3).to(dtype)
    b = torch.arange(4, device=device).reshape(4, 1).to(dtype)
    records = [(1, 2), (-1, 1), (0, 4), (3, 1)]
    out = ops.pack([a, b], segments_table(*records), 8)
    assert out.dtype == dtype
    for column, source in zip(out.split([3, 1], 1), (a, b), strict=True):
        assert torch.equal(
            column.cpu().to(torch.complex128),
            reference.gather(source.cpu().to(torch.complex128), records),
        )


def test_unpack_undoes_pack(device):
    sources = [
        random(5, 3, seed=0, device=device),
        random(5, 0, seed=1, device=device),
        random(5, 2, seed=2, device=device),
    ]
    packed = ops.pack(sources, segments_table((3, 2), (0, 3)), 5)
    outs = ops.unpack(packed, segments_table((2, 3), (0, 2)), [3, 0, 2], 5)
    assert all(torch.equal(out, source) for out, source in zip(outs, sources, strict=True))


def test_pack_and_unpack_take_rows_any_stride_apart(device):
    wide = random(6, 10, seed=0, device=device)
    views = [wide[:, 2:5], wide[::2].repeat(2, 1)[:, 5:6], wide[:1, 7:9].expand(6, 2)]
    records = [(4, 2), (0, 1)]
    out = ops.pack(views, segments_table(*records), 3)
    assert torch.equal(out, reference.pack(views, records))
    outs = ops.unpack(wide[1:, 1:6], segments_table(*records[1:]), [2, 3], 1)
    assert torch.equal(torch.cat(outs, 1), wide[1:2, 1:6])


@pytest.mark.parametrize("columns", [16, 17, 33])
@pytest.mark.parametrize("to", [None, torch.float64], ids=str)
def test_pack_and_unpack_take_any_number_of_tensors(device, columns, to):
    widths = [8] * (columns - 2) + [0, 3]
    sources = [
        random(6, width, seed=i, dtype=torch.float32, device=device).requires_grad_()
        for i, width in enumerate(widths)
    ]
    records = [(2, 4), (-1, 1), (0, 2)]
    out = ops.pack(sources, segments_table(*records), 7, dtype=to)
    expected = reference.pack([source.detach().cpu() for source in sources], records)
    assert torch.equal(out.cpu(), expected.to(to or torch.float32))
    out.backward(torch.ones_like(out))
    assert all(torch.equal(source.grad, torch.ones_like(source)) for source in sources)
    back = ops.unpack(out.detach(), segments_table((5, 2), (0, 4)), widths, 6, dtype=torch.float32)
    assert all(torch.equal(o, source) for o, source in zip(back, sources, strict=True))


def test_pack_of_zero_rows(device):
    source = random(3, 2, seed=0, device=device).requires_grad_()
    out = ops.pack([source], segments_table(), 0)
    assert out.shape == (0, 2)
    out.sum().backward()
    assert torch.equal(source.grad, torch.zeros_like(source))


def test_pack_from_zero_rows_gives_only_zeros(device):
    source = random(0, 2, seed=0, device=device)
    assert torch.equal(ops.pack([source], segments_table((-1, 3)), 3), source.new_zeros(3, 2))
    assert [o.shape for o in ops.unpack(source, segments_table((0, 0)), [2], 0)] == [(0, 2)]


def test_unpack_into_nothing(device):
    assert ops.unpack(random(3, 0, seed=0, device=device), segments_table((0, 3)), [], 3) == []


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradient_of_pack_sums_the_copies(device, dtype):
    source = torch.zeros(4, 2, dtype=dtype, device=device, requires_grad=True)
    out = ops.pack([source], segments_table((0, 3), (-1, 1), (1, 3), (2, 1)), 8)
    grad = torch.arange(16, dtype=dtype, device=device).reshape(8, 2)
    out.backward(grad)
    expected = torch.stack([grad[0], grad[1] + grad[4], grad[2] + grad[5] + grad[7], grad[6]])
    assert torch.equal(source.grad, expected)


def test_gradient_of_pack_is_rounded_once(device):
    """256 + 1 is 256 in bfloat16: summed one by one in bfloat16 the ones would vanish."""
    source = torch.zeros(1, 1, dtype=torch.bfloat16, device=device, requires_grad=True)
    out = ops.pack([source], segments_table(*[(0, 1)] * 9), 9)
    out.backward(torch.tensor([256.0] + [1.0] * 8, device=device, dtype=torch.bfloat16)[:, None])
    assert source.grad.item() == 264


def test_integers_have_no_gradient(device):
    assert not ops.pack(
        [torch.ones(2, 1, dtype=torch.int64, device=device)], segments_table((0, 2)), 2
    ).requires_grad


@st.composite
def segment_tables(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    rows = draw(st.integers(0, 9))
    starts = st.integers(-1, rows)
    segment = starts.flatmap(
        lambda row: st.tuples(st.just(row), st.integers(0, 4 if row < 0 else rows - row))
    )
    return rows, draw(st.lists(segment, max_size=6))


@settings(deadline=None)
@given(segment_tables(), st.lists(st.integers(0, 5), min_size=1, max_size=3), st.integers(0, 2**31))
def test_any_gather_and_its_gradient_equal_the_reference(device, segment_table, widths, seed):
    rows, records = segment_table
    out_rows = sum(length for _, length in records)
    sources = [
        random(rows, width, seed=seed + i, device=device).requires_grad_()
        for i, width in enumerate(widths)
    ]
    out = ops.pack(sources, segments_table(*records), out_rows)
    expected = reference.pack(sources, records)
    assert torch.equal(out, expected)
    grad = random(*out.shape, seed=seed, device=device)
    expected_grads = torch.autograd.grad(expected, sources, grad)
    for actual, wanted in zip(torch.autograd.grad(out, sources, grad), expected_grads, strict=True):
        expect_close(actual, wanted.cpu())
    source = torch.cat(sources, 1).detach().requires_grad_()
    unpacked = torch.cat(ops.unpack(source, segments_table(*records), widths, out_rows), 1)
    assert torch.equal(unpacked, expected)
    (actual,) = torch.autograd.grad(unpacked, source, grad)
    expect_close(actual, torch.cat(expected_grads, 1).cpu())


# ---- reduce --------------------------------------------------------------------------------------

RUNS = [(1, 2, 0, 0), (1, 2, 1, 1), (1, 2, 0, 1), (4, 1, 1, 0), (5, 2, 0, 1), (5, 2, 1, 1)]


@pytest.mark.parametrize("width", [0, 1, 15, 256, 257, 700])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_reduce_sums_the_parts_of_each_run(device, dtype, width):
    parts = [random(3, width, seed=p, dtype=dtype, device=device) for p in range(2)]
    out = ops.reduce(parts, table(*RUNS), 8)
    assert out.dtype == dtype
    expect_close(out, reference.reduce([part.cpu() for part in parts], RUNS, 8))
    assert torch.equal(out[[0, 3, 7]], out.new_zeros(3, width))


def test_reduce_is_rounded_once(device):
    parts = [
        torch.full((1, 1), value, dtype=torch.bfloat16, device=device)
        for value in [256.0] + [1.0] * 8
    ]
    assert ops.reduce(parts, table(*[(0, 1, p, 0) for p in range(9)]), 1).item() == 264


def test_reduce_keeps_columns_side_by_side(device):
    parts = [random(3, width, seed=i, device=device) for i, width in enumerate([2, 3, 2, 3])]
    out = ops.reduce(parts, table(*RUNS), 8, columns=2)
    joined = [torch.cat(parts[:2], 1), torch.cat(parts[2:], 1)]
    assert torch.equal(out, ops.reduce(joined, table(*RUNS), 8))


def test_reduce_takes_rows_any_stride_apart(device):
    wide = random(6, 9, seed=0, device=device)
    views = [wide[::2, 1:4], wide[3:, 4:7]]
    assert torch.equal(
        ops.reduce(views, table(*RUNS), 8), ops.reduce([v.clone() for v in views], table(*RUNS), 8)
    )


def test_reduce_of_zero_rows_and_of_no_runs(device):
    part = random(3, 2, seed=0, device=device)
    assert ops.reduce([part], table(), 0).shape == (0, 2)
    assert torch.equal(ops.reduce([part], table(), 4), part.new_zeros(4, 2))
    assert torch.equal(ops.reduce([part[:0]], table(), 1), part.new_zeros(1, 2))


def test_infinity_and_nan_pass_through_a_sum(device):
    for dtype in FLOATS:
        parts = [
            torch.tensor([[inf, inf, nan, -0.0]], dtype=dtype, device=device),
            torch.tensor([[1.0, -inf, 1.0, -0.0]], dtype=dtype, device=device),
        ]
        out = ops.reduce(parts, table((0, 1, 0, 0), (0, 1, 1, 0)), 1).cpu()
        assert out[0, 0] == inf, out
        assert out[0, 1:3].isnan().all(), out
        assert out[0, 3].signbit(), out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_value_is_read_and_rounded_as_torch_does(device, dtype):
    values = (
        torch.arange(-(2**15), 2**15, dtype=torch.int32)
        .to(torch.int16)
        .view(dtype)[None]
        .to(device)
    )
    runs = table((0, 1, 0, 0), (0, 1, 1, 0))
    for other in (0.0, 1e-7, 0.37, 1.0, 1000.3):
        others = torch.full_like(values, other)
        torch.testing.assert_close(
            ops.reduce([values, others], runs, 1),
            (values.float() + others.float()).to(dtype),
            rtol=0,
            atol=0,
            equal_nan=True,
        )


@st.composite
def run_tables(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, ...]], int]:
    """(rows of each part, records, rows of the result)"""
    count = draw(st.integers(1, 4))
    part_rows = [draw(st.integers(0, 6)) for _ in range(count)]
    records: list[tuple[int, ...]] = []
    row = draw(st.integers(0, 2))
    for _ in range(draw(st.integers(0, 4))):
        rows = draw(st.integers(1, 4))
        for part in draw(st.lists(st.integers(0, count - 1), max_size=4)):
            if part_rows[part] >= rows:
                records.append((row, rows, part, draw(st.integers(0, part_rows[part] - rows))))
        row += rows + draw(st.integers(0, 1))
    return part_rows, records, row


@settings(deadline=None)
@given(run_tables(), st.integers(0, 5), st.integers(0, 2**31))
def test_any_sum_and_its_gradient_equal_the_reference(device, run_table, width, seed):
    part_rows, records, rows = run_table
    parts = [
        random(n, width, seed=seed + p, device=device).requires_grad_()
        for p, n in enumerate(part_rows)
    ]
    out = ops.reduce(parts, table(*records), rows)
    expected = reference.reduce([part.cpu() for part in parts], records, rows)
    expect_close(out, expected)
    grad = random(rows, width, seed=seed)
    actual_grads = torch.autograd.grad(out, parts, grad.to(device))
    if not records:
        assert not any(actual.any() for actual in actual_grads)
        return
    wanted_grads = torch.autograd.grad(expected, parts, grad, allow_unused=True)
    for part, actual, wanted in zip(parts, actual_grads, wanted_grads, strict=True):
        expect_close(actual, torch.zeros(part.shape) if wanted is None else wanted.cpu())


# ---- casts ---------------------------------------------------------------------------------------

CASTS = list(permutations(FLOATS, 2))
BITS = {torch.float64: torch.int64, torch.float32: torch.int32}


def sum_dtype(*dtypes: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def expect_bits(actual: Tensor, expected: Tensor) -> None:
    """Compare all bits but those of NaN. Zeros have a sign."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    nans = expected.isnan()
    assert torch.equal(actual.isnan(), nans)
    a, b = (
        x.masked_fill(nans, 0).contiguous().view(BITS.get(x.dtype, torch.int16))
        for x in (actual, expected)
    )
    wrong = (a != b).nonzero()
    assert not len(wrong), (wrong[0], actual[tuple(wrong[0])], expected[tuple(wrong[0])])


def gathered(source: Tensor, records: list[tuple[int, int]]) -> Tensor:
    """Gather by index_select. It knows no rows of zeros, so they are the last one here."""
    rows = torch.cat([source, source.new_zeros(1, source.shape[1])])
    index = [len(source) if row < 0 else row + i for row, n in records for i in range(n)]
    return rows.index_select(0, torch.tensor(index, dtype=torch.int64, device=source.device))


def numbers_at_borders(dtype: torch.dtype, to: torch.dtype) -> Tensor:
    """Every value of 16 bits that either dtype has, the middle of it and the next, and the nearest
    numbers above and below: subnormals, ties, what overflows, infinities, NaN."""
    shorts = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    narrow = [x for x in (dtype, to) if x.itemsize == 2] or [torch.bfloat16, torch.float16]
    values = torch.cat([shorts.view(x).double() for x in narrow])
    largest = torch.tensor([torch.finfo(to).max, torch.finfo(to).tiny], dtype=torch.float64)
    values = torch.cat([values, largest, -largest])
    ties = (values + values.roll(-1)) / 2
    both = torch.cat([values, ties]).to(dtype)
    if dtype.itemsize == 2:
        return both
    up, down = (torch.nextafter(both, torch.tensor(x, dtype=dtype)) for x in (inf, -inf))
    return torch.cat([both, up, down])


@pytest.mark.parametrize(("dtype", "to"), CASTS, ids=str)
def test_a_cast_has_the_bits_of_pytorchs_own(device, dtype, to):
    values = numbers_at_borders(dtype, to).to(device)
    for rows in (values[None], values[None, 1:], values[:, None]):  # aligned, not, one by one
        segments = segments_table((0, len(rows)))
        expect_bits(ops.pack([rows], segments, len(rows), dtype=to), rows.to(to))
        expect_bits(
            ops.unpack(rows, segments, [rows.shape[1]], len(rows), dtype=to)[0], rows.to(to)
        )
        runs = table((0, len(rows), 0, 0))
        expect_bits(ops.reduce([rows], runs, len(rows), dtype=to), rows.to(to))


RECORDS = [(4, 2), (-1, 3), (0, 4), (2, 0), (2, 3)]  # rows of zeros, rows named again


@pytest.mark.parametrize("widths", [[32, 8, 64], [7, 1, 300], [0, 5], [16, 3], [1032]], ids=str)
@pytest.mark.parametrize(("dtype", "to"), CASTS, ids=str)
def test_a_cast_gathers_rows_any_stride_apart(device, dtype, to, widths):
    wide = random(7, sum(widths) + 3, seed=0, dtype=dtype, device=device)
    segments, rows = segments_table(*RECORDS), sum(n for _, n in RECORDS)
    for first in (0, 1, 3):
        source = wide[1:, first : first + sum(widths)]
        expected = gathered(source, RECORDS).to(to)
        expect_bits(ops.pack(source.split(widths, 1), segments, rows, dtype=to), expected)
        expect_bits(ops.pack([source.contiguous()], segments, rows, dtype=to), expected)
        outs = ops.unpack(source, segments, widths, rows, dtype=to)
        assert all(out.is_contiguous() for out in outs)
        expect_bits(torch.cat(outs, 1), expected)
    one = wide[:1].expand(7, -1)
    expect_bits(ops.pack([one], segments, rows, dtype=to), gathered(one, RECORDS).to(to))


def test_a_cast_of_nothing(device):
    source = random(3, 2, seed=0, device=device)
    half = {"dtype": torch.float16}
    assert ops.pack([source], segments_table(), 0, **half).shape == (0, 2)
    assert ops.pack([source[:, :0]], segments_table((0, 3)), 3, **half).shape == (3, 0)
    zeros = ops.pack([source[:0]], segments_table((-1, 2)), 2, **half)
    assert torch.equal(zeros, source.new_zeros(2, 2, **half))
    assert ops.unpack(source[:, :0], segments_table((0, 3)), [], 3, **half) == []
    assert torch.equal(ops.reduce([source], table(), 4, **half), source.new_zeros(4, 2, **half))


@pytest.mark.parametrize("dtype", ANY_DTYPE, ids=str)
def test_the_sources_own_dtype_is_no_cast(device, dtype):
    source = torch.arange(12, device=device).reshape(4, 3).to(dtype)
    segments = segments_table((1, 2), (0, 1))
    out = ops.pack([source], segments, 3, dtype=dtype)
    (back,) = ops.unpack(source, segments, [3], 3, dtype=dtype)
    expected = ops.pack([source], segments, 3)
    for actual in (out, back):
        assert actual.dtype == dtype
        assert torch.equal(*(x.cpu().to(torch.complex64) for x in (actual, expected)))


def summed(parts: list[Tensor], records: list[tuple[int, ...]], rows: int, to: torch.dtype):
    """The sum in the order of the records, rounded once."""
    wide = sum_dtype(parts[0].dtype, to)
    out = torch.zeros(rows, parts[0].shape[1], dtype=wide, device=parts[0].device)
    begun: set[int] = set()
    for first, n, part, part_row in records:
        for i in range(n):
            row = parts[part][part_row + i].to(wide)
            out[first + i] = out[first + i] + row if first + i in begun else row
            begun.add(first + i)
    return out.to(to)


@pytest.mark.parametrize("width", [0, 1, 15, 256, 257, 704])
@pytest.mark.parametrize(("dtype", "to"), CASTS, ids=str)
def test_a_sum_is_cast_when_it_is_rounded(device, dtype, to, width):
    wide = random(6, width + 2, seed=1, dtype=dtype, device=device)
    for parts in (
        [random(3, width, seed=p, dtype=dtype, device=device) for p in range(2)],
        [wide[::2, 1 : width + 1], wide[3:, 2:]],
    ):
        expected = summed(parts, RUNS, 8, to)
        expect_bits(ops.reduce(parts, table(*RUNS), 8, dtype=to), expected)
    columns = [wide[:3, :width], wide[:3, :2], wide[3:, :width], wide[3:, :2]]
    expect_bits(
        ops.reduce(columns, table(*RUNS), 8, columns=2, dtype=to),
        torch.cat([summed(columns[c::2], RUNS, 8, to) for c in range(2)], 1),
    )


def test_sums_are_in_float64_where_parts_or_result_are(device):
    runs = table((0, 1, 0, 0), (0, 1, 1, 0), (0, 1, 2, 0))
    for dtype, to in ((torch.float32, torch.float64), (torch.float64, torch.float32)):
        parts = [torch.full((1, 1), x, dtype=dtype, device=device) for x in (1.0, 2**-30, -1.0)]
        assert ops.reduce(parts, runs, 1, dtype=to).item() == 2**-30


def test_a_sum_of_negative_zeros_stays_one_when_cast(device):
    for dtype, to in CASTS:
        parts = [torch.full((1, 9), -0.0, dtype=dtype, device=device)] * 2
        out = ops.reduce(parts, table((0, 1, 0, 0), (0, 1, 1, 0)), 1, dtype=to)
        assert out.signbit().all(), (dtype, to)


def cast_calls(to: torch.dtype):
    """(call, plain expression) of one tensor (6, 5), to (12, 5), with repeated rows and zeros."""
    segments, rows = segments_table(*RECORDS), sum(n for _, n in RECORDS)
    runs = table((0, 3, 0, 1), (0, 3, 1, 0), (0, 3, 0, 3), (5, 6, 0, 0))
    return {
        "pack": (
            lambda x: ops.pack([x[:, :2], x[:, 2:]], segments, rows, dtype=to),
            lambda x: gathered(x, RECORDS),
        ),
        "unpack": (
            lambda x: torch.cat(ops.unpack(x, segments, [2, 3], rows, dtype=to), 1),
            lambda x: gathered(x, RECORDS),
        ),
        "reduce": (
            lambda x: ops.reduce(
                [x[:, :2], x[:, 2:], x[3:, :2], x[3:, 2:]], runs, 12, columns=2, dtype=to
            ),
            lambda x: reference.reduce([x, x[3:]], runs.tolist(), 12).to(x.device),
        ),
    }


@pytest.mark.parametrize("name", ["pack", "unpack", "reduce"])
@pytest.mark.parametrize(("dtype", "to"), CASTS, ids=str)
def test_gradients_of_a_cast_are_those_of_float64_in_the_inputs_dtype(device, dtype, to, name):
    call, plain = cast_calls(to)[name]
    x = random(6, 5, seed=0, dtype=dtype, device=device).requires_grad_()
    grad = random(12, 5, seed=1, dtype=to, device=device)
    (actual,) = torch.autograd.grad(call(x), x, grad)
    assert actual.dtype == dtype
    exact = x.detach().cpu().double().requires_grad_()
    (wanted,) = torch.autograd.grad(plain(exact), exact, grad.cpu().double())
    expect_close(actual, wanted)


@pytest.mark.parametrize("name", ["pack", "unpack", "reduce"])
@pytest.mark.parametrize(("dtype", "to"), CASTS, ids=str)
def test_the_second_derivative_of_a_cast_is_the_cast(device, dtype, to, name):
    call, _ = cast_calls(to)[name]
    x, other = (random(6, 5, seed=i, dtype=dtype, device=device) for i in range(2))
    grad = random(12, 5, seed=2, dtype=to, device=device).requires_grad_()
    (first,) = torch.autograd.grad(call(x.requires_grad_()), x, grad, create_graph=True)
    (second,) = torch.autograd.grad(first, grad, other)
    assert second.dtype == to
    expect_close(second, call(other).cpu())


class Calls(TorchDispatchMode):
    """The operators that are called meanwhile, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(operator.name())
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["pack", "unpack", "reduce"])
def test_no_derivative_of_a_cast_needs_a_pass_to_cast(device, name):
    """Autograd would cast a gradient of another dtype by itself."""
    call, _ = cast_calls(torch.bfloat16)[name]
    x, other = (random(6, 5, seed=i, device=device) for i in range(2))
    grad = random(12, 5, seed=2, dtype=torch.bfloat16, device=device).requires_grad_()
    with Calls() as calls:
        (first,) = torch.autograd.grad(call(x.requires_grad_()), x, grad, create_graph=True)
        torch.autograd.grad(first, grad, other)
    assert f"hcp::{name}_backward" in calls.names
    assert calls.names.count(f"hcp::{name}") == 2
    assert not {"aten::_to_copy", "aten::copy_"} & set(calls.names), calls.names


def test_the_gradient_of_a_cast_is_rounded_once(device):
    """In bfloat16 256 + 1 is 256, and 1 + 2**-8 is 1: rounding twice would show."""
    for dtype, to, values in (
        (torch.float32, torch.bfloat16, [256.0] + [1.0] * 8),
        (torch.bfloat16, torch.float32, [1.0] + [2.0**-8] * 8),
    ):
        grad = torch.tensor(values, device=device, dtype=to)[:, None]
        for gather in (
            lambda x: ops.pack([x], segments_table(*[(0, 1)] * 9), 9, dtype=to),  # noqa: B023
            lambda x: ops.unpack(x, segments_table(*[(0, 1)] * 9), [1], 9, dtype=to)[0],  # noqa: B023
            lambda x: ops.reduce([x], table(*[(i, 1, 0, 0) for i in range(9)]), 9, dtype=to),  # noqa: B023
        ):
            source = torch.zeros(1, 1, dtype=dtype, device=device, requires_grad=True)
            gather(source).backward(grad)
            assert source.grad.dtype == dtype
            assert source.grad.item() == sum(values)


# ---- rotary embedding ----------------------------------------------------------------------------


def tables(rows: int, turned: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Tables of one angle for each element: the transpose is not the way back."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angle = random(rows, turned, seed=7, device=device)
    return angle.cos().to(wide), angle.sin().to(wide)


def turned_rows(
    t: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool = False
) -> Tensor:
    """The matrix of each row's turn, or its transpose, times each head."""
    rows, _, size = t.shape
    pairs = cos.shape[1] // 2
    matrix = torch.eye(size, dtype=torch.float64).repeat(rows, 1, 1)
    for p in range(pairs):
        x, y = (2 * p, 2 * p + 1) if interleaved else (p, p + pairs)
        matrix[:, x, x], matrix[:, x, y] = cos[:, x].cpu(), -sin[:, x].cpu()
        matrix[:, y, y], matrix[:, y, x] = cos[:, y].cpu(), sin[:, y].cpu()
    matrix = matrix.mT if inverse else matrix
    return torch.einsum("nij,nhj->nhi", matrix, t.cpu().double())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("size", "turned"), [(64, 64), (64, 48), (7, 4), (5, 0), (600, 598), (2, 2)]
)
def test_rotate_turns_each_head_by_its_rows_angles(device, dtype, interleaved, size, turned):
    t = random(5, 3, size + 8, seed=0, dtype=dtype, device=device)[..., :size]  # strided heads
    cos, sin = tables(5, turned, dtype, device)
    for inverse in (False, True):
        out = ops.rotate(t, cos, sin, interleaved=interleaved, inverse=inverse)
        assert out.is_contiguous()
        expect_close(out, turned_rows(t, cos, sin, interleaved, inverse))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("records", [[(0, 40)], [(2, 33), (0, 1), (1, 4), (3, 2)], []])
def test_rotate_pack_is_rotate_then_pack_bit_for_bit(device, dtype, interleaved, records):
    t = random(40, 2, 24, seed=0, dtype=dtype, device=device)
    beside = [random(40, n, seed=n, dtype=dtype, device=device) for n in (5, 8)]
    cos, sin = tables(40, 16, dtype, device)
    segments, rows = segments_table(*records), sum(n for _, n in records)
    turned, packed = ops.rotate_pack(t, cos, sin, beside, segments, rows, interleaved=interleaved)
    assert torch.equal(turned, ops.rotate(t, cos, sin, interleaved=interleaved))
    assert torch.equal(packed, ops.pack([turned.flatten(1), *beside], segments, rows))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("size", "turned"), [(16, 16), (24, 8), (3, 2)])
def test_reduce_rotated_turns_the_sum_of_its_first_columns(
    device, dtype, interleaved, size, turned
):
    parts = [
        random(4, width, seed=i, dtype=dtype, device=device)
        for i, width in enumerate([2 * size, 5, 2 * size, 5])
    ]
    runs = table((1, 2, 0, 2), (1, 2, 1, 0), (4, 1, 1, 3))  # rows 0, 3 and 5 have no part
    cos, sin = tables(6, turned, dtype, device)
    out = ops.reduce_rotated(
        parts, runs, 6, 2, cos, sin, size, 1, interleaved=interleaved, inverse=True
    )
    assert torch.equal(out[:, 2 * size :], ops.reduce(parts[1::2], runs, 6))
    sums = ops.reduce([part.double() for part in parts[::2]], runs, 6).view(6, 2, size)
    want = turned_rows(sums, cos, sin, interleaved, inverse=True).flatten(1)
    expect_close(out[:, : 2 * size], want)


def test_a_turned_sum_is_rounded_once(device):
    """1 + 2**-9 is no bfloat16: turned by 0 and summed with 2**-9 it is, were it not rounded
    before."""
    parts = [torch.tensor([[x, 0.0]], device=device).bfloat16() for x in (1.0, 2**-9, 2**-9)]
    cos, sin = torch.ones(1, 2, device=device), torch.zeros(1, 2, device=device)
    runs = table(*((0, 1, part, 0) for part in range(3)))
    out = ops.reduce_rotated(parts, runs, 1, 1, cos, sin, 2, 1)
    assert out[0, 0] == 1 + 2**-8


def test_rotations_of_nothing(device):
    cos, sin = tables(0, 4, torch.float32, device)
    t = torch.zeros(0, 2, 4, device=device)
    assert ops.rotate(t, cos, sin).shape == (0, 2, 4)
    turned, packed = ops.rotate_pack(
        t, cos, sin, [torch.zeros(0, 3, device=device)], table(words=2), 0
    )
    assert turned.shape == (0, 2, 4)
    assert packed.shape == (0, 11)
    out = ops.reduce_rotated([t.flatten(1)], table(), 2, 1, *tables(2, 4, t.dtype, device), 4, 1)
    assert torch.equal(out, torch.zeros(2, 8, device=device))


def test_gradients_of_rotations_of_nothing(device):
    part = torch.zeros(0, 11, device=device, requires_grad=True)
    beside = torch.zeros(0, 8, device=device, requires_grad=True)
    cos, sin = tables(0, 4, torch.float32, device)
    ops.reduce_rotated([beside, part], table(), 0, 2, cos, sin, 4, 1).sum().backward()
    assert beside.grad.shape == (0, 8)
    assert part.grad.shape == (0, 11)


def test_a_gradient_of_what_is_turned_and_packed_may_lie_in_any_memory(device):
    t = random(3, 2, 4, seed=0, device=device).requires_grad_()
    beside = random(3, 1, seed=1, device=device)
    cos, sin = tables(3, 4, torch.float64, device)
    grad, grads = random(3, 2, 4, seed=2, device=device), []
    for laid in (grad, grad.permute(2, 1, 0).contiguous().permute(2, 1, 0)):
        out = ops.rotate_pack(t, cos, sin, [beside], table((0, 3), words=2), 3)
        grads += torch.autograd.grad(out, t, [laid, torch.ones_like(out[1])])
    assert torch.equal(*grads)


def test_learned_angles_are_refused_by_name(device):
    t, (cos, sin) = random(3, 1, 4, seed=0, device=device), tables(3, 4, torch.float64, device)
    out = ops.rotate(t, cos.requires_grad_(), sin)
    with pytest.raises(NotImplementedError, match=r"cos or sin of hcp\.ops\.rotate requires"):
        out.sum().backward()


# ---- merge ---------------------------------------------------------------------------------------


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def random_parts(
    rows: list[int], heads: int, head_dim: int, seed: int, dtype=torch.float64, device="cpu"
):
    outs = [
        random(n, heads, head_dim, seed=seed + p, dtype=dtype, device=device)
        for p, n in enumerate(rows)
    ]
    lses = [
        3 * random(n, heads, seed=seed - p - 1, dtype=lse_dtype(dtype), device=device)
        for p, n in enumerate(rows)
    ]
    return outs, lses


def reference_merge(outs, lses, records, rows):
    return reference.merge([o.cpu() for o in outs], [lse.cpu() for lse in lses], records, rows)


@pytest.mark.parametrize("head_dim", [0, 1, 8, 17, 128, 256, 300])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_merge_equals_the_softmax_formula(device, dtype, head_dim):
    outs, lses = random_parts([3, 3], 2, head_dim, seed=7, dtype=dtype, device=device)
    out, lse = ops.merge(outs, lses, table(*RUNS), 8)
    expected_out, expected_lse = reference_merge(outs, lses, RUNS, 8)
    assert (out.dtype, lse.dtype) == (dtype, lse_dtype(dtype))
    expect_close(out, expected_out)
    expect_close(lse, expected_lse, dtype=lse.dtype)


def test_rows_nobody_covers_are_zero_and_minus_infinity(device):
    outs, lses = random_parts([3, 3], 2, 4, seed=1, device=device)
    out, lse = ops.merge(outs, lses, table(*RUNS), 8)
    assert torch.equal(out[[0, 3, 7]], out.new_zeros(3, 2, 4))
    assert torch.equal(lse[[0, 3, 7]], lse.new_full((3, 2), -inf))


def test_one_part_is_copied_bit_for_bit(device):
    for dtype in FLOATS:
        outs, lses = random_parts([4], 3, 5, seed=2, dtype=dtype, device=device)
        out, lse = ops.merge(outs, lses, table((0, 4, 0, 0)), 4)
        assert torch.equal(out, outs[0])
        assert torch.equal(lse, lses[0])


def merge_scalars(
    device: str, dtype: torch.dtype, *parts: tuple[float, float]
) -> tuple[float, float]:
    """(out, lse) of one row, head and element."""
    outs = [torch.full((1, 1, 1), out, dtype=dtype, device=device) for out, _ in parts]
    lses = [torch.full((1, 1), lse, dtype=lse_dtype(dtype), device=device) for _, lse in parts]
    out, lse = ops.merge(outs, lses, table(*[(0, 1, p, 0) for p in range(len(parts))]), 1)
    return out.item(), lse.item()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([(2.0, -inf)], (0.0, -inf)),
        ([(nan, -inf), (inf, -inf)], (0.0, -inf)),
        ([(nan, -inf), (2.0, 1.0)], (2.0, 1.0)),
        ([(2.0, 1.0), (inf, -inf)], (2.0, 1.0)),
        ([(2.0, inf), (8.0, 1.0)], (2.0, inf)),
        ([(8.0, 1.0), (2.0, inf), (4.0, inf), (nan, -inf)], (3.0, inf)),
        ([(2.0, 0.0), (4.0, 0.0)], (3.0, log(2))),
        ([(2.0, 5000.0), (4.0, 5000.0)], (3.0, 5000 + log(2))),
        ([(2.0, -5000.0), (4.0, -5000.0)], (3.0, -5000 + log(2))),
        ([(2.0, nan), (4.0, 0.0)], (nan, nan)),
        ([(2.0, nan), (4.0, inf)], (nan, nan)),
        ([(2.0, inf), (4.0, nan)], (nan, nan)),
        ([(2.0, -inf), (4.0, nan)], (nan, nan)),
        # A weight that rounds to zero, of what a softmax over all keys would multiply too.
        ([(nan, -5000.0), (4.0, 5000.0)], (nan, 5000.0)),
        ([(4.0, 5000.0), (inf, -5000.0)], (nan, 5000.0)),
        ([(4.0, 5000.0), (2.0, -5000.0)], (4.0, 5000.0)),
    ],
)
def test_merge_of_infinite_and_extreme_lse(device, dtype, parts, expected):
    out, lse = merge_scalars(device, dtype, *parts)
    assert out == pytest.approx(expected[0], rel=1e-6, nan_ok=True), f"out of {parts}"
    assert lse == pytest.approx(expected[1], rel=1e-6, nan_ok=True), f"lse of {parts}"


def strided_parts(device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Heads before rows, as attention kernels lay out their LSE, and columns of something wider."""
    outs = [
        random(2, 3, 6, seed=0, device=device).transpose(0, 1)[:, :, 1:5],
        random(3, 2, 4, seed=1, device=device),
    ]
    lses = [random(2, 3, seed=2, device=device).t(), random(3, 4, seed=3, device=device)[:, ::2]]
    return outs, lses


def test_merge_takes_strided_parts(device):
    outs, lses = strided_parts(device)
    actual = ops.merge(outs, lses, table(*RUNS), 8)
    expected = ops.merge(
        [o.contiguous() for o in outs], [lse.contiguous() for lse in lses], table(*RUNS), 8
    )
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


def test_merge_of_zero_rows_heads_or_elements(device):
    outs, lses = random_parts([3], 2, 4, seed=1, device=device)
    out, lse = ops.merge(outs, lses, table(), 0)
    assert (out.shape, lse.shape) == ((0, 2, 4), (0, 2))
    out, lse = ops.merge([outs[0][:0]], [lses[0][:0]], table(), 1)
    assert not out.any()
    assert (lse == -inf).all()
    out, lse = ops.merge([outs[0][:, :0]], [lses[0][:, :0]], table((0, 3, 0, 0)), 3)
    assert (out.shape, lse.shape) == ((3, 0, 4), (3, 0))


@settings(deadline=None)
@given(run_tables(), st.integers(1, 2), st.integers(0, 20), st.booleans(), st.integers(0, 2**31))
def test_any_merge_equals_the_reference(device, run_table, heads, head_dim, hide, seed):
    part_rows, records, rows = run_table
    outs, lses = random_parts(part_rows, heads, head_dim, seed=seed + 100)
    if hide:
        lses = [lse.masked_fill(random(*lse.shape, seed=seed) > 0.5, -inf) for lse in lses]
    moved = [[t.to(device) for t in tensors] for tensors in (outs, lses)]
    actual = ops.merge(*moved, table(*records), rows)
    expected = reference.merge(outs, lses, records, rows)
    expect_close(actual[0], expected[0])
    expect_close(actual[1], expected[1])


def in_turns(outs: list[Tensor], lses: list[Tensor], records, rows: int) -> tuple[Tensor, Tensor]:
    """Merge one part after the other: the first into an empty total, and the last with the cast."""
    layer, total_lse = torch.ops.hcp, None
    _, heads, head_dim = outs[0].shape
    total = outs[0].new_full((rows, heads, head_dim), nan, dtype=lses[0].dtype)
    tables = [
        table(*[(row, n, 0, first) for row, n, part, first in records if part == p])
        for p in range(len(outs))
    ]
    for out, lse, runs in list(zip(outs, lses, tables, strict=True))[:-1]:
        before = total.data_ptr()
        total_lse = layer.merge_on(total, total_lse, [out], [lse], runs)
        assert total.data_ptr() == before
    if total_lse is None:
        total_lse = lses[0].new_full((rows, heads), -inf)
    return layer.merge_last(total, total_lse, outs[-1:], lses[-1:], tables[-1])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("head_dim", [0, 1, 8, 17, 128, 300])
def test_a_merge_in_turns_equals_the_softmax_formula(device, dtype, head_dim):
    outs, lses = random_parts([3, 3], 2, head_dim, seed=7, dtype=dtype, device=device)
    out, lse = in_turns(outs, lses, RUNS, 8)
    expected_out, expected_lse = reference_merge(outs, lses, RUNS, 8)
    assert (out.dtype, lse.dtype) == (dtype, lse_dtype(dtype))
    expect_close(out, expected_out)
    expect_close(lse, expected_lse, dtype=lse.dtype)


@settings(deadline=None)
@given(run_tables(), st.integers(1, 2), st.integers(0, 20), st.booleans(), st.integers(0, 2**31))
def test_any_merge_in_turns_equals_the_reference(device, run_table, heads, head_dim, hide, seed):
    part_rows, records, rows = run_table
    outs, lses = random_parts(part_rows, heads, head_dim, seed=seed + 100)
    if hide:
        lses = [lse.masked_fill(random(*lse.shape, seed=seed) > 0.5, -inf) for lse in lses]
    moved = [[t.to(device) for t in tensors] for tensors in (outs, lses)]
    expected = reference.merge(outs, lses, records, rows)
    for actual, wanted in zip(in_turns(*moved, records, rows), expected, strict=True):
        expect_close(actual, wanted)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([(nan, -inf), (nan, -inf), (2.0, 1.0)], (2.0, 1.0)),
        ([(2.0, 1.0), (inf, -inf), (nan, -inf)], (2.0, 1.0)),
        ([(nan, -inf), (inf, -inf)], (0.0, -inf)),
        ([(2.0, 5000.0), (4.0, 5000.0), (9.0, -inf)], (3.0, 5000 + log(2))),
        ([(2.0, inf), (8.0, 1.0), (8.0, 1.0)], (2.0, inf)),
        ([(2.0, nan), (4.0, 0.0)], (nan, nan)),
        ([(2.0, 1.0), (4.0, nan), (2.0, 1.0)], (nan, nan)),
        ([(nan, -5000.0), (4.0, 5000.0)], (nan, 5000.0)),
    ],
)
def test_a_merge_in_turns_of_infinite_and_extreme_lse(device, dtype, parts, expected):
    outs = [torch.full((1, 1, 1), out, dtype=dtype, device=device) for out, _ in parts]
    lses = [torch.full((1, 1), lse, dtype=lse_dtype(dtype), device=device) for _, lse in parts]
    out, lse = in_turns(outs, lses, [(0, 1, p, 0) for p in range(len(parts))], 1)
    assert out.item() == pytest.approx(expected[0], rel=1e-6, nan_ok=True)
    assert lse.item() == pytest.approx(expected[1], rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("head_dim", [1, 8, 300])
def test_a_sum_in_turns_is_that_at_once_and_stays_wide(device, dtype, head_dim):
    parts, _ = random_parts([3, 3], 2, head_dim, seed=7, dtype=dtype, device=device)
    wide = lse_dtype(dtype)
    total = torch.full((8, 2, head_dim), nan, dtype=wide, device=device)
    for i, part in enumerate(parts):
        runs = table(*[(row, n, 0, first) for row, n, p, first in RUNS if p == i])
        torch.ops.hcp.sum_on(total, i > 0, [part], runs)
    at_once = ops.reduce([part.flatten(1) for part in parts], table(*RUNS), 8, dtype=wide)
    torch.testing.assert_close(total.flatten(1), at_once)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_are_placed_and_others_stay(device, dtype):
    parts = [torch.randn(6, 3).to(device, dtype) for _ in range(2)]
    out = torch.full((9, 6), 7, dtype=dtype, device=device)
    runs = table((1, 3, 0, 2), (1, 3, 1, 0), (6, 2, 1, 4))
    torch.ops.hcp.place(out, [*parts, *parts], runs, 2)
    expected = ops.reduce([*parts, *parts], runs, 9, columns=2)
    expected[[0, 4, 5, 8]] = 7
    assert torch.equal(out, expected)
    for wrong, message in [
        (out[:, :5], r"out has shape \(9, 5\), expected \(any, 6\)"),
        (out[:7], r"runs\[2\] is 2 rows from row 6, expected inside the result's 7 rows"),
        (out[:1].expand(9, 6), "out has rows 0 bytes apart"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            torch.ops.hcp.place(wrong, [*parts, *parts], runs, 2)


def test_wrong_totals_are_refused(device):
    outs, lses = random_parts([4], 2, 3, seed=1, dtype=torch.bfloat16, device=device)
    runs, layer = table((0, 4, 0, 0)), torch.ops.hcp
    good = torch.zeros(4, 2, 3, device=device)
    for total, message in [
        (good[:, :1], r"total has shape \(4, 1, 3\), expected \(any, 2, 3\)"),
        (good.bfloat16(), "total has dtype BFloat16, expected Float"),
        (good.mT.contiguous().mT, "total has strides .*, expected contiguous"),
        (good[:3], r"runs\[0\] is 4 rows from row 0, expected inside the result's 3 rows"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            layer.merge_on(total, None, outs, lses, runs)
        with pytest.raises(RuntimeError, match=message):
            layer.merge_last(
                total, total.new_zeros(len(total), 2, dtype=torch.float32), outs, lses, runs
            )
        with pytest.raises(RuntimeError, match=message):
            layer.sum_on(total, True, outs, runs)
    with pytest.raises(RuntimeError, match=r"total_lse has shape \(4, 1\), expected \(4, 2\)"):
        layer.merge_on(good, lses[0][:, :1], outs, lses, runs)


def test_a_merge_has_no_gradient(device):
    outs, lses = random_parts([2], 1, 2, seed=0, device=device)
    out, _ = ops.merge([outs[0].requires_grad_()], lses, table((0, 2, 0, 0)), 2)
    with pytest.raises(NotImplementedError, match=r"hcp\.ops\.merge was differentiated"):
        out.sum().backward()


# ---- memory of a library's call ------------------------------------------------------------------


def call_memory(rows: list[Tensor], sums: list[Tensor], *results: tuple[int, ...]) -> list[Tensor]:
    return torch.ops.hcp.call_memory(rows, sums, table(*results))


def test_aligned_rows_are_given_as_they_lie_and_without_a_gradient(device: str) -> None:
    qkv = random(4, 3, 2, 8, seed=1, dtype=torch.bfloat16, device=device).requires_grad_()
    with torch.no_grad():
        given = [x.requires_grad_() for x in qkv.detach().unbind(1)]
        rows = call_memory(given, [])
    for row, own in zip(rows, given, strict=True):
        assert row.data_ptr() == own.data_ptr()
        assert row.stride() == own.stride()
        assert not row.requires_grad
        assert torch.equal(row, own)


@pytest.mark.parametrize("way", ["address", "stride", "elements", "expanded"])
def test_other_rows_are_copied(device: str, way: str) -> None:
    wide = random(4, 3, 12, seed=1, dtype=torch.bfloat16, device=device)
    rows = {
        "address": wide[:, :, 1:9],
        "stride": wide[:, :, :8],
        "elements": wide[:, :, :8].transpose(0, 2).contiguous().transpose(0, 2),
        "expanded": wide[:, :1, :8].contiguous().expand(4, 3, 8),
    }[way]
    (copy,) = call_memory([rows], [])
    assert copy.data_ptr() != rows.data_ptr()
    assert copy.data_ptr() % 16 == 0
    assert copy.is_contiguous()
    assert torch.equal(copy, rows)


def test_sums_have_their_heads_first(device: str) -> None:
    rows = random(4, 3, 8, seed=1, dtype=torch.bfloat16, device=device)
    sums = random(4, 3, seed=2, dtype=torch.float32, device=device)
    turned = sums.t().contiguous()
    _, copied, own = call_memory([rows], [sums, turned.t()])
    assert torch.equal(copied, turned)
    assert copied.is_contiguous()
    assert own.data_ptr() == turned.data_ptr()
    assert own.shape == turned.shape


def test_results_have_the_rows_dtype_or_are_floats_apart_from_each_other(device: str) -> None:
    rows = random(4, 3, 8, seed=1, dtype=torch.bfloat16, device=device)
    wanted = (1, 5, 7), (0, 4, 3, 8), (2, 3, 50), (0, 2, 1, 16), (2, 6, 11), (1, 0, 4)
    _, first, second, *floats = call_memory([rows], [], *((*x, 0)[:4] for x in wanted))
    for result, shape in ((first, (4, 3, 8)), (second, (2, 1, 16))):
        assert (result.shape, result.dtype, result.device) == (shape, rows.dtype, rows.device)
    assert [tuple(x.shape) for x in floats] == [(5, 7), (3, 50), (6, 11), (0, 4)]
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in floats)
    assert len({x.data_ptr() % 512 for x in floats if x.numel()}) == 1
    assert not floats[1].any()
    assert not floats[2].any()
    for i, matrix in enumerate(floats):
        matrix.fill_(i)
    assert all(bool((matrix == i).all()) for i, matrix in enumerate(floats))


@pytest.mark.parametrize(
    ("rows", "sums", "results", "message"),
    [
        ([], [], [], "rows is empty, expected a tensor at least"),
        ([(4, 3)], [], [], r"rows\[0\] has shape \(4, 3\)"),
        ([(4, 3, 8)], [(4,)], [], r"sums\[0\] has shape \(4\)"),
        ([(4, 3, 8)], [], [(3, 1, 1, 1)], r"results\[0\] is of kind 3, expected 0 \(rows\)"),
        ([(4, 3, 8)], [], [(0, 1, -1, 1)], r"results\[0\] is 1 x -1 x 1, expected sizes >= 0"),
        ([(4, 3, 8)], [], [(1, 2**62, 4, 0)], r"expected a product below 2\^63"),
    ],
)
def test_wrong_memory_is_refused(
    rows: list[tuple[int, ...]],
    sums: list[tuple[int, ...]],
    results: list[tuple[int, ...]],
    message: str,
) -> None:
    given = [torch.zeros(shape) for shape in rows], [torch.zeros(shape) for shape in sums]
    with pytest.raises(RuntimeError, match=message):
        call_memory(*given, *results)


# ---- Wrong arguments -----------------------------------------------------------------------------

A = torch.zeros(4, 3)
S = segments_table((0, 4))
R = table((0, 4, 0, 0))
OUT, LSE = torch.zeros(4, 2, 3), torch.zeros(4, 2)
HUGE = 2**62

WRONG = {
    "pack nothing": (lambda: ops.pack([], S, 4), "sources has 0 tensors, expected >= 1"),
    "pack vectors": (
        lambda: ops.pack([A[0]], S, 4),
        r"sources\[0\] has shape \(3\), expected 2 dimensions",
    ),
    "pack dtypes": (
        lambda: ops.pack([A, A.double()], S, 4),
        r"sources\[1\] has dtype Double, expected Float as sources\[0\]",
    ),
    "pack rows": (
        lambda: ops.pack([A, A[:3]], S, 4),
        r"sources\[1\] has shape \(3, 3\), expected \(4, any\)",
    ),
    "pack column-major": (
        lambda: ops.pack([A.t().contiguous().t()], S, 4),
        r"sources\[0\] has stride 4 in its last",
    ),
    "pack too short": (lambda: ops.pack([A], S, 5), "segments have 4 rows, expected rows = 5"),
    "pack too long": (
        lambda: ops.pack([A], S, 3),
        r"segments\[0 .. 0\] have more rows than rows = 3",
    ),
    "pack less than nothing": (lambda: ops.pack([A], S, -1), "rows is -1, expected >= 0"),
    "pack beyond": (
        lambda: ops.pack([A], segments_table((1, 4)), 4),
        r"segments\[0\] is 4 rows from row 1, expected inside",
    ),
    "pack far beyond": (
        lambda: ops.pack([A], segments_table((HUGE, 4)), 4),
        r"from row 4611686018427387904, expected inside",
    ),
    "pack overflow": (
        lambda: ops.pack([A], segments_table((2, 2**63 - 1)), 4),
        "expected inside the source's 4 rows",
    ),
    "pack zeros overflow": (
        lambda: ops.pack([A], segments_table((-1, HUGE), (-1, HUGE)), 4),
        "more rows than rows = 4",
    ),
    "pack negative row": (
        lambda: ops.pack([A], segments_table((-2, 4)), 4),
        r"segments\[0\].row is -2, expected >= 0, or -1",
    ),
    "pack negative rows": (
        lambda: ops.pack([A], segments_table((0, -4)), 4),
        r"segments\[0\].rows is -4, expected >= 0",
    ),
    "segments of int32": (
        lambda: ops.pack([A], S.int(), 4),
        "segments has dtype Int, expected Long",
    ),
    "segments of triples": (
        lambda: ops.pack([A], torch.zeros(1, 3).long(), 4),
        r"segments has shape \(1, 3\), expected \(any, 2\)",
    ),
    "segments transposed": (
        lambda: ops.pack([A], torch.zeros(2, 2).long().t(), 4),
        "segments has strides .* expected contiguous",
    ),
    "pack integers cast": (
        lambda: ops.pack([A.int()], S, 4, dtype=torch.float32),
        r"sources\[0\] has dtype Int, expected Double, Float, BFloat16 or Half for a result of "
        r"dtype Float: cast it before, by .to\(\), or leave dtype out",
    ),
    "pack cast to bool": (
        lambda: ops.pack([A], S, 4, dtype=torch.bool),
        r"dtype is Bool, expected Double, Float, BFloat16 or Half where sources\[0\] has dtype "
        r"Float: leave dtype out and cast the result, by .to\(\)",
    ),
    "unpack bools cast": (
        lambda: ops.unpack(A.bool(), S, [3], 4, dtype=torch.float16),
        "source has dtype Bool, expected Double.* for a result of dtype Half",
    ),
    "unpack cast to bytes": (
        lambda: ops.unpack(A, S, [3], 4, dtype=torch.uint8),
        "dtype is Byte, expected Double.* where source has dtype Float",
    ),
    "reduce cast to integers": (
        lambda: ops.reduce([A], R, 4, dtype=torch.int64),
        r"dtype is Long, expected Double.* where parts\[0\] has dtype Float",
    ),
    "reduce cast to float8": (
        lambda: ops.reduce([A], R, 4, dtype=torch.float8_e4m3fn),
        "dtype is Float8_e4m3fn, expected Double",
    ),
    "unpack widths": (
        lambda: ops.unpack(A, S, [1, 1], 4),
        r"widths are \(1, 1\), expected to sum to the 3 columns of source",
    ),
    "unpack wide": (
        lambda: ops.unpack(A, S, [HUGE, HUGE, HUGE], 4),
        "expected to sum to the 3 columns of source",
    ),
    "unpack negative width": (
        lambda: ops.unpack(A, S, [4, -1], 4),
        r"expected to sum to the 3|widths\[1\] is -1",
    ),
    "unpack first negative": (
        lambda: ops.unpack(A, S, [-1, 4], 4),
        r"widths\[0\] is -1, expected >= 0",
    ),
    "unpack beyond": (
        lambda: ops.unpack(A, segments_table((1, 4)), [3], 4),
        "expected inside the source's 4 rows",
    ),
    "reduce nothing": (lambda: ops.reduce([], R, 4), "parts has 0 tensors, expected >= 1"),
    "reduce integers": (
        lambda: ops.reduce([A.int()], R, 4),
        r"parts\[0\] has dtype Int, expected Double, Float, BFloat16 or Half",
    ),
    "reduce columns": (lambda: ops.reduce([A], R, 4, columns=0), "columns is 0, expected >= 1"),
    "reduce odd parts": (
        lambda: ops.reduce([A, A, A], R, 4, columns=2),
        "parts has 3 tensors, expected a multiple of columns = 2",
    ),
    "reduce many columns": (
        lambda: ops.reduce([A], R, 4, columns=2**33),
        "parts has 1 tensors, expected a multiple",
    ),
    "reduce widths": (
        lambda: ops.reduce([A, A[:, 1:]], R, 4),
        r"parts\[1\] has shape \(4, 2\), expected \(4, 3\)",
    ),
    "reduce rows in a part": (
        lambda: ops.reduce([A, A[1:]], R, 4, columns=2),
        r"parts\[1\] has shape \(3, 3\), expected \(4, 3\)",
    ),
    "reduce dtypes": (
        lambda: ops.reduce([A, A.half()], R, 4),
        r"parts\[1\] has dtype Half, expected Float as parts\[0\]",
    ),
    "reduce column-major": (
        lambda: ops.reduce([A.t()[:, :2], A.t()[:, :2]], R, 4),
        r"parts\[0\] has stride 3 in its last",
    ),
    "runs empty": (
        lambda: ops.reduce([A], table((0, 0, 0, 0)), 4),
        r"runs\[0\].rows is 0, expected >= 1",
    ),
    "runs beyond": (
        lambda: ops.reduce([A], table((1, 4, 0, 0)), 4),
        r"runs\[0\] is 4 rows from row 1, expected inside the result's 4",
    ),
    "runs before": (
        lambda: ops.reduce([A], table((-1, 2, 0, 0)), 4),
        r"runs\[0\] is 2 rows from row -1, expected inside",
    ),
    "runs overflow": (
        lambda: ops.reduce([A], table((1, 2**63 - 1, 0, 0)), 4),
        "expected inside the result's 4 rows",
    ),
    "runs part": (
        lambda: ops.reduce([A], table((0, 4, 1, 0)), 4),
        r"runs\[0\].part is 1, expected >= 0 and < 1 parts",
    ),
    "runs negative part": (
        lambda: ops.reduce([A], table((0, 4, -1, 0)), 4),
        r"runs\[0\].part is -1, expected >= 0",
    ),
    "runs part rows": (
        lambda: ops.reduce([A], table((0, 4, 0, 1)), 4),
        r"runs\[0\] takes 4 rows from row 1 of part 0, expected inside its 4",
    ),
    "runs before the part": (
        lambda: ops.reduce([A], table((0, 1, 0, -1)), 4),
        r"takes 1 rows from row -1 of part 0",
    ),
    "runs after the part": (
        lambda: ops.reduce([A], table((0, 1, 0, 2**63 - 1)), 4),
        "of part 0, expected inside its 4",
    ),
    "runs overlap": (
        lambda: ops.reduce([A], table((0, 2, 0, 0), (1, 2, 0, 0)), 4),
        r"runs\[1\] is 2 rows from row 1, expected the same rows as",
    ),
    "runs overlap shorter": (
        lambda: ops.reduce([A], table((0, 2, 0, 0), (0, 1, 0, 0)), 4),
        r"runs\[1\] is 1 rows from row 0",
    ),
    "runs descend": (
        lambda: ops.reduce([A], table((2, 1, 0, 0), (0, 1, 0, 0)), 4),
        r"runs\[1\] is 1 rows from row 0",
    ),
    "runs of pairs": (
        lambda: ops.reduce([A], S, 4),
        r"runs has shape \(1, 2\), expected \(any, 4\)",
    ),
    "rotate flat": (lambda: ops.rotate(A, A, A), r"t has shape \(4, 3\), expected 3 dimensions"),
    "rotate integers": (lambda: ops.rotate(OUT.int(), A, A), "t has dtype Int, expected Double"),
    "rotate odd": (lambda: ops.rotate(OUT, A, A), "cos has 3 columns, expected an even number up"),
    "rotate beyond": (
        lambda: ops.rotate(OUT, torch.zeros(4, 4), torch.zeros(4, 4)),
        "cos has 4 columns, expected an even number up to the head size 3",
    ),
    "rotate rows": (
        lambda: ops.rotate(OUT, A[:, :2], A[1:, :2]),
        "cos has strides|sin has shape",
    ),
    "rotate dtype": (
        lambda: ops.rotate(OUT.half(), LSE.half(), LSE.half()),
        "cos has dtype Half, expected Float",
    ),
    "rotate column-major": (
        lambda: ops.rotate(OUT.mT.contiguous().mT, LSE, LSE),
        "t has stride 2 in its last dimension",
    ),
    "rotate_pack zeros": (
        lambda: ops.rotate_pack(OUT, LSE, LSE, [A], segments_table((-1, 2)), 2),
        r"segments\[0\].row is -1, expected >= 0",
    ),
    "rotate_pack beside": (
        lambda: ops.rotate_pack(OUT, LSE, LSE, [A[1:]], S, 4),
        r"beside\[0\] has shape \(3, 3\), expected \(4, any\)",
    ),
    "reduce_rotated heads": (
        lambda: ops.reduce_rotated([A], R, 4, 1, LSE, LSE, 2, 1),
        r"parts\[0\] has 3 columns, expected a multiple of head_dim = 2",
    ),
    "reduce_rotated columns": (
        lambda: ops.reduce_rotated([A], R, 4, 1, LSE, LSE, 3, 2),
        "rotated is 2, expected from 0 to columns = 1",
    ),
    "merge nothing": (lambda: ops.merge([], [], R, 4), "outs has 0 tensors, expected >= 1"),
    "merge lists": (
        lambda: ops.merge([OUT], [LSE, LSE], R, 4),
        "lses has 2 tensors, expected 1 as outs",
    ),
    "merge flat": (
        lambda: ops.merge([OUT[0]], [LSE], R, 4),
        r"outs\[0\] has shape \(2, 3\), expected 3 dimensions",
    ),
    "merge integers": (
        lambda: ops.merge([OUT.int()], [LSE], R, 4),
        r"outs\[0\] has dtype Int, expected Double",
    ),
    "merge heads": (
        lambda: ops.merge([OUT, OUT[:, :1]], [LSE, LSE], R, 4),
        r"outs\[1\] has shape \(4, 1, 3\), expected \(any, 2, 3\)",
    ),
    "merge dtypes": (
        lambda: ops.merge([OUT, OUT.double()], [LSE, LSE], R, 4),
        r"outs\[1\] has dtype Double, expected Float",
    ),
    "merge lse dtype": (
        lambda: ops.merge([OUT.half()], [LSE.half()], R, 4),
        r"lses\[0\] has dtype Half, expected Float",
    ),
    "merge lse double": (
        lambda: ops.merge([OUT.double()], [LSE], R, 4),
        r"lses\[0\] has dtype Float, expected Double",
    ),
    "merge lse shape": (
        lambda: ops.merge([OUT], [LSE.t()], R, 4),
        r"lses\[0\] has shape \(2, 4\), expected \(4, 2\)",
    ),
    "merge column-major": (
        lambda: ops.merge([OUT.mT.contiguous().mT], [LSE], R, 4),
        r"outs\[0\] has stride 2 in its last",
    ),
    "merge beyond": (
        lambda: ops.merge([OUT], [LSE], table((0, 5, 0, 0)), 5),
        "takes 5 rows from row 0 of part 0",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused_with_value_and_expectation(case):
    call, message = WRONG[case]
    with pytest.raises(RuntimeError, match=message):
        call()


hcp = torch.ops.hcp
WRONG_BACKWARD = {
    "pack grad flat": (
        lambda: hcp.pack_backward(A[0], S, [3], 4),
        r"grad has shape \(3\), expected 2 dimensions",
    ),
    "pack grad integer": (
        lambda: hcp.pack_backward(A.int(), S, [3], 4),
        "grad has dtype Int, expected Double",
    ),
    "pack grad rows": (
        lambda: hcp.pack_backward(A[1:], S, [3], 4),
        "segments.* have more rows than rows = 3",
    ),
    "pack grad beyond": (
        lambda: hcp.pack_backward(A, S, [3], 3),
        "expected inside the source's 3 rows",
    ),
    "pack grad widths": (
        lambda: hcp.pack_backward(A, S, [2], 4),
        r"widths are \(2\), expected to sum to the 3",
    ),
    "pack grad negative": (
        lambda: hcp.pack_backward(A, segments_table((-1, 4)), [3], -1),
        "rows is -1, expected >= 0",
    ),
    "pack grad cast": (
        lambda: hcp.pack_backward(A, S, [3], 4, dtype=torch.int32),
        "dtype is Int, expected Double.* where grad has dtype Float",
    ),
    "unpack grad cast": (
        lambda: hcp.unpack_backward([A], S, 4, dtype=torch.int32),
        r"dtype is Int, expected Double.* where grads\[0\] has dtype Float",
    ),
    "reduce grad cast": (
        lambda: hcp.reduce_backward(A, R, [4], [3], dtype=torch.int32),
        "dtype is Int, expected Double.* where grad has dtype Float",
    ),
    "unpack grad nothing": (lambda: hcp.unpack_backward([], S, 4), "grads has 0 tensors"),
    "unpack grad beyond": (
        lambda: hcp.unpack_backward([A], S, 3),
        "expected inside the source's 3 rows",
    ),
    "reduce grad beyond": (
        lambda: hcp.reduce_backward(A, R, [3], [3]),
        "of part 0, expected inside its 3 rows",
    ),
    "reduce grad negative": (
        lambda: hcp.reduce_backward(A, table(), [-3], [3]),
        r"part_rows\[0\] is -3, expected >= 0",
    ),
    "reduce grad parts": (
        lambda: hcp.reduce_backward(A, R, [], [3]),
        "part is 0, expected >= 0 and < 0 parts",
    ),
}


@pytest.mark.parametrize("case", WRONG_BACKWARD)
def test_wrong_gradients_are_refused_with_value_and_expectation(case):
    call, message = WRONG_BACKWARD[case]
    with pytest.raises(RuntimeError, match=message):
        call()


# ---- PyTorch's own checks ------------------------------------------------------------------------


def pack_case(device: str):
    sources = [
        random(4, 2, seed=0, device=device).requires_grad_(),
        random(4, 3, seed=1, device=device).requires_grad_(),
    ]
    return sources, segments_table((1, 3), (-1, 1), (0, 2)), 6


def unpack_case(device: str):
    return (
        random(4, 5, seed=0, device=device).requires_grad_(),
        segments_table((1, 3), (-1, 1), (0, 2)),
        [2, 3],
        6,
    )


def reduce_case(device: str):
    parts = [
        random(3, width, seed=i, device=device).requires_grad_()
        for i, width in enumerate([2, 1, 2, 1])
    ]
    return parts, table(*RUNS), 8, 2


def merge_case(device: str):
    outs, lses = random_parts([3, 4], 2, 3, seed=0, device=device)
    return outs, lses, table((1, 3, 0, 0), (1, 3, 1, 1)), 5


OPERATORS = {
    "pack": pack_case,
    "pack_backward": lambda device: (
        pack_case(device)[0][0].new_ones(6, 5, requires_grad=True),
        pack_case(device)[1],
        [2, 3],
        4,
    ),
    "unpack": unpack_case,
    "unpack_backward": lambda device: (
        list(ops.pack(*pack_case(device)).detach().requires_grad_().split([2, 3], 1)),
        unpack_case(device)[1],
        4,
    ),
    "reduce": reduce_case,
    "reduce_backward": lambda device: (
        random(8, 3, seed=0, device=device).requires_grad_(),
        table(*RUNS),
        [3, 3],
        [2, 1],
    ),
    "merge": merge_case,
    "rotate": lambda device: (
        random(5, 2, 6, seed=0, device=device).requires_grad_(),
        *tables(5, 4, torch.float64, device),
        True,
        False,
    ),
    "rotate_pack": lambda device: (
        random(5, 2, 6, seed=0, device=device).requires_grad_(),
        *tables(5, 4, torch.float64, device),
        False,
        [random(5, 3, seed=1, device=device).requires_grad_()],
        segments_table((1, 3), (0, 2)),
        5,
    ),
    "reduce_rotated": lambda device: (
        [
            random(3, width, seed=i, device=device).requires_grad_()
            for i, width in enumerate([4, 1, 4, 1])
        ],
        table(*RUNS),
        8,
        2,
        *tables(8, 2, torch.float64, device),
        4,
        1,
        False,
        True,
    ),
}


WITH_DTYPE = [f"{name}{way}" for name in ("pack", "unpack", "reduce") for way in ("", "_backward")]


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in OPERATORS] + [(name, {"dtype": torch.float32}) for name in WITH_DTYPE],
    ids=str,
)
def test_opcheck(device, name, options):
    arguments = OPERATORS[name](device)
    if name == "unpack_backward":  # columns of one tensor: views, which opcheck cannot make leaves
        arguments = (
            [grad.detach().clone().requires_grad_() for grad in arguments[0]],
            *arguments[1:],
        )
    opcheck(getattr(torch.ops.hcp, name).default, arguments, options)


@pytest.mark.parametrize("name", ["pack", "unpack", "reduce"])
def test_linear_operators_have_derivatives_of_any_order(device, name):
    first, *rest = OPERATORS[name](device)
    leaves = [first] if isinstance(first, Tensor) else list(first)

    def call(*tensors: Tensor):
        return getattr(ops, name)(tensors[0] if isinstance(first, Tensor) else list(tensors), *rest)

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_rotations_have_derivatives_of_any_order(device):
    t, cos, sin, *how = OPERATORS["rotate"](device)
    key, _, _, interleaved, (beside,), *packing = OPERATORS["rotate_pack"](device)
    parts, runs, *rest = OPERATORS["reduce_rotated"](device)
    for call, leaves in (
        (lambda x: hcp.rotate(x, cos, sin, *how), [t]),
        (lambda x, y: hcp.rotate_pack(x, cos, sin, interleaved, [y], *packing), [key, beside]),
        (lambda *x: hcp.reduce_rotated(list(x), runs, *rest), parts),
    ):
        assert torch.autograd.gradcheck(call, leaves)
        assert torch.autograd.gradgradcheck(call, leaves)


# ---- torch.compile -------------------------------------------------------------------------------


def chain(a: Tensor, b: Tensor, segments: Tensor, back: Tensor, runs: Tensor, rows: int) -> Tensor:
    """Every operator once, between operations that the compiler fuses."""
    packed = ops.pack([a * 2, b.sin()], segments, rows)
    left, right = ops.unpack(packed.cos(), back, [a.shape[1], b.shape[1]], rows)
    total = ops.reduce([left, left * 3], runs, rows)
    out, lse = ops.merge(
        [total.detach()[:, None], right.detach()[:, None, : a.shape[1]]],
        [total.detach()[:, :1], right.detach()[:, :1]],
        runs,
        rows,
    )
    turned = ops.rotate(
        total[:, None] * 2, *(f(a.detach()[:, :2]).contiguous() for f in (torch.cos, torch.sin))
    )
    return (turned * out).sum() + (right.sum() * lse.exp()).sum()


def chain_arguments(rows: int, width: int, device: str):
    a = random(rows, width, seed=rows, device=device).requires_grad_()
    b = random(rows, width + 1, seed=rows + 1, device=device).requires_grad_()
    segments = segments_table((2, rows - 2), (0, 2))
    back = segments_table((rows - 2, 2), (0, rows - 2))
    return a, b, segments, back, table((0, rows, 0, 0), (0, rows, 1, 0)), rows


def test_one_compiled_graph_serves_every_size(device):
    graphs = []

    def count_graphs(graph, _):
        graphs.append(graph)
        return graph.forward

    counting = torch.compile(chain, fullgraph=True, dynamic=True, backend=count_graphs)
    # Sizes that no others equal: PyTorch would take equal ones for one size.
    for rows, width in [(11, 6), (13, 6), (17, 8)]:
        arguments = chain_arguments(rows, width, device)
        torch.testing.assert_close(counting(*arguments), chain(*arguments))
    assert len(graphs) == 1, f"compiled {len(graphs)} graphs for three sizes"


@pytest.mark.parametrize(
    ("backend", "dynamic"), [("aot_eager", False), ("aot_eager", True), ("inductor", True)]
)
def test_compiled_functions_and_gradients_equal_eager_ones(device, backend, dynamic):
    torch.compiler.reset()
    compiled = torch.compile(chain, fullgraph=True, dynamic=dynamic, backend=backend)
    for rows in (5, 8):
        arguments = chain_arguments(rows, 3, device)
        expected = chain(*arguments)
        actual = compiled(*arguments)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(
            torch.autograd.grad(actual, arguments[:2]), torch.autograd.grad(expected, arguments[:2])
        )


def casts(a: Tensor, segments: Tensor, runs: Tensor, rows: int) -> Tensor:
    """There and back, between operations that the compiler fuses."""
    packed = ops.pack([a * 2, a.sin()], segments, rows, dtype=torch.float32)
    left, right = ops.unpack(packed * 3, segments, [a.shape[1]] * 2, rows, dtype=torch.bfloat16)
    return ops.reduce([left, right], runs, rows, dtype=torch.float64).sum() + packed.sum()


def test_compiled_casts_and_their_gradients_equal_eager_ones(device):
    torch.compiler.reset()
    compiled = torch.compile(casts, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 8):
        a = random(rows, 3, seed=rows, device=device).requires_grad_()
        segments, runs = segments_table((0, rows)), table((0, rows, 0, 0), (0, rows, 1, 0))
        expected, actual = casts(a, segments, runs, rows), compiled(a, segments, runs, rows)
        torch.testing.assert_close(actual, expected)
        grads = [torch.autograd.grad(x, a)[0] for x in (actual, expected)]
        torch.testing.assert_close(*grads)


# ---- junk ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_junk_in_any_argument_of_any_operator_ends_in_an_error_and_never_the_process() -> None:
    """Each call's name is printed before it: the last line is the call that died, or hung."""
    script = Path(__file__).parents[1] / "support" / "junk.py"
    command = [sys.executable, "-X", "faulthandler", str(script), "0", str(10**9)]
    command.append(str(planning.seed()))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    except subprocess.TimeoutExpired as late:
        last = (late.stdout or b"").decode().splitlines()[-1:]
        pytest.fail(f"{' '.join(command)}\nhangs in call {last}")
    last = done.stdout.splitlines()[-1:]
    assert done.returncode == 0, f"{' '.join(command)}\ncall {last}\n{done.stderr[-3000:]}"
