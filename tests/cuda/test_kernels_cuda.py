"""Kernels on a GPU: CUDA graphs, tables of many launches, reads of few blocks.
Their results: tests/exchange/test_ops.py."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from hcp import _core, ops
from hcp.exchange.layout import tensor_of
from hcp.exchange.signals import PIECES

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

ROWS, HEADS, HEAD_DIM = 300, 4, 64


def inputs(seed: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(ROWS, HEADS, HEAD_DIM, device="cuda", generator=generator) for _ in range(3)
    ]


def packed(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    segments = torch.tensor([[200, 100], [-1, 7], [0, 200]])
    return (ops.pack([x.flatten(1) for x in tensors], segments, 307),)


def cast(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    segments = torch.tensor([[200, 100], [-1, 7], [0, 200]])
    packed = ops.pack([x.flatten(1) for x in tensors], segments, 307, dtype=torch.bfloat16)
    runs = torch.tensor([[0, 307, 0, 0], [0, 307, 1, 0]])
    return packed, ops.reduce([packed, packed.flip(0)], runs, 307, dtype=torch.float64)


def merged(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    runs = torch.tensor([[0, ROWS, part, 0] for part in range(len(tensors))])
    return ops.merge(tensors, [x.sum(-1) for x in tensors], runs, ROWS)


def merged_in_turns(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    runs = torch.tensor([[0, ROWS // 2, 0, 0]])
    total, lses = torch.empty_like(tensors[0]), [x.sum(-1) for x in tensors]
    total_lse = torch.ops.hcp.merge_on(total, None, tensors[:1], lses[:1], runs)
    total_lse = torch.ops.hcp.merge_on(total, total_lse, tensors[1:2], lses[1:2], runs)
    return torch.ops.hcp.merge_last(total, total_lse, tensors[2:], lses[2:], runs)


def summed_in_turns(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    runs = torch.tensor([[0, ROWS // 2, 0, 0]])
    total = torch.empty_like(tensors[0])
    for i, x in enumerate(tensors):
        torch.ops.hcp.sum_on(total, i > 0, [x], runs)
    return (total,)


def summed(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    runs = torch.tensor([[0, ROWS, part, 0] for part in range(len(tensors))])
    return (ops.reduce([x.flatten(1) for x in tensors], runs, ROWS),)


def tables(rows: int = ROWS, turned: int = HEAD_DIM) -> tuple[Tensor, Tensor]:
    angles = torch.arange(rows * turned, device="cuda").view(rows, turned).sin() * 3
    return angles.cos(), angles.sin()


def turned(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    segments = torch.tensor([[200, 100], [0, 200], [150, 100]])
    key, *beside = tensors
    flat = [x.flatten(1) for x in beside]
    return ops.rotate_pack(key, *tables(), flat, segments, 400)


def turned_sum(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    runs = torch.tensor([[0, ROWS, part, 0] for part in range(len(tensors))])
    flat = [x.flatten(1) for x in tensors]
    return (ops.reduce_rotated(flat, runs, ROWS, 1, *tables(), HEAD_DIM, 1, inverse=True),)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("size", "angles"), [(64, 64), (64, 32), (63, 40), (24, 8), (16, 12)])
def test_vectors_and_single_elements_turn_to_the_bits_of_the_cpu(
    dtype: torch.dtype, interleaved: bool, size: int, angles: int
) -> None:
    """Heads that are aligned, heads that are not, and the CPU: products are rounded alike."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angle = torch.randn(50, angles, generator=generator, dtype=torch.float64)
    cos, sin = angle.cos().to(wide), angle.sin().to(wide)
    spaced = torch.randn(50, 3, size + 1, generator=generator).to(dtype)
    for t in (spaced[..., :size], spaced[..., 1:], spaced[..., :size].contiguous()):
        for inverse in (False, True):
            turn = partial(ops.rotate, interleaved=interleaved, inverse=inverse)
            # Strides survive .cuda() for a whole tensor alone.
            moved = spaced.cuda()[..., t.storage_offset() % (size + 1) :][..., :size]
            moved = t.cuda() if t.is_contiguous() else moved
            assert torch.equal(turn(moved, cos.cuda(), sin.cuda()).cpu(), turn(t, cos, sin))


@pytest.mark.parametrize(
    "call", [packed, cast, merged, merged_in_turns, summed, summed_in_turns, turned, turned_sum]
)
def test_a_captured_kernel_computes_the_inputs_of_each_replay(
    call: Callable[[list[Tensor]], tuple[Tensor, ...]],
) -> None:
    tensors = inputs(0)
    call(tensors)  # what is loaded at the first call is not captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(tensors)
    for seed in (1, 2):
        for tensor, fresh in zip(tensors, inputs(seed), strict=True):
            tensor.copy_(fresh)
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        for result, expected in zip(results, call(inputs(seed)), strict=True):
            assert torch.equal(result, expected)


@pytest.mark.parametrize("count", [512, 513, 4000, 4001, 9000])
def test_tables_of_any_length_gather_the_rows_of_the_cpu(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    starts = torch.randint(-1, 50, (count, 1), generator=generator)
    segments = torch.cat([starts, torch.randint(0, 4, (count, 1), generator=generator)], 1)
    rows = int(segments[:, 1].sum())
    columns = [torch.randn(53, width, generator=generator) for width in (8, 4)]
    for dtype in (None, torch.bfloat16, torch.float64):
        packed = ops.pack([column.cuda() for column in columns], segments, rows, dtype=dtype)
        assert torch.equal(packed.cpu(), ops.pack(columns, segments, rows, dtype=dtype))


FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("count", [3, 600, 4100])
@pytest.mark.parametrize("width", [1, 7, 64, 72])
@pytest.mark.parametrize(("dtype", "to"), list(permutations(FLOATS, 2)), ids=str)
def test_casts_of_vectors_and_of_elements_have_the_bits_of_the_cpu(
    dtype: torch.dtype, to: torch.dtype, width: int, count: int
) -> None:
    generator = torch.Generator().manual_seed(count)
    starts = torch.randint(-1, 50, (count, 1), generator=generator)
    segments = torch.cat([starts, torch.randint(0, 4, (count, 1), generator=generator)], 1)
    rows = int(segments[:, 1].sum())
    wide = torch.randn(53, 2 * width + 1, generator=generator, dtype=torch.float64).to(dtype)
    moved = wide.cuda()
    for first in (0, 1):
        both = [x[:, first : first + 2 * width] for x in (wide, moved)]
        ours, theirs = (
            ops.pack(x.split(width, 1), segments, rows, dtype=to) for x in (both[1], both[0])
        )
        assert torch.equal(ours.cpu(), theirs)
        aligned = ops.pack([both[1].contiguous()], segments, rows, dtype=to)
        assert torch.equal(aligned.cpu(), theirs)
        for x in (both[1], both[1].contiguous()):
            outs = ops.unpack(x, segments, [width, width], rows, dtype=to)
            assert torch.equal(torch.cat(outs, 1).cpu(), theirs)


@pytest.mark.parametrize(("parts", "columns"), [(1, 17), (3, 50), (100, 2), (128, 1)])
@pytest.mark.parametrize("width", [3, 8, 1032])
def test_sums_of_many_parts_and_columns_have_the_bits_of_the_cpu(
    parts: int, columns: int, width: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(9, width, generator=generator).bfloat16() for _ in range(parts * columns)
    ]
    first = [(0, 4, part, part % 5) for part in range(parts)]
    runs = torch.tensor([*first, (6, 2, parts - 1, 7)])
    for dtype in (None, torch.float32, torch.float64, torch.float16):
        summed = ops.reduce([x.cuda() for x in tensors], runs, 9, columns=columns, dtype=dtype)
        expected = ops.reduce(tensors, runs, 9, columns=columns, dtype=dtype)
        assert torch.equal(summed.cpu(), expected)


@pytest.mark.parametrize("width", [4097, 66_000, 1 << 20])
def test_wide_rows_that_many_blocks_share_have_the_bits_of_the_cpu(width: int) -> None:
    """As states of recurrent layers: few rows, of up to 8 MiB."""
    generator = torch.Generator().manual_seed(width)
    columns = [torch.randn(3, size, generator=generator) for size in (width, 5)]
    segments, rows = torch.tensor([[2, 1], [-1, 1], [0, 2]]), 4
    runs = torch.tensor([(0, 2, 0, 0), (0, 2, 1, 1), (3, 1, 1, 0)])
    moved = [x.cuda() for x in columns]
    for dtype in (None, torch.bfloat16, torch.float64):
        packed = ops.pack(columns, segments, rows, dtype=dtype)
        assert torch.equal(ops.pack(moved, segments, rows, dtype=dtype).cpu(), packed)
        found, expected = (
            ops.unpack(x, segments, [width, 5], rows) for x in (packed.cuda(), packed)
        )
        for x, wanted in zip(found, expected, strict=True):
            assert torch.equal(x.cpu(), wanted)
        both = [columns[0], columns[0].flip(0)]
        summed = ops.reduce([x.cuda() for x in both], runs, 4, dtype=dtype)
        assert torch.equal(summed.cpu(), ops.reduce(both, runs, 4, dtype=dtype))


@pytest.mark.parametrize("rows", [6000, 6101, 16384])
def test_long_runs_that_are_copied_are_the_rows_of_a_sum(rows: int) -> None:
    """Rows of 8 KiB, in one copy and in two."""
    words = torch.zeros(3, PIECES, dtype=torch.int64, device="cuda")
    staged = [torch.randn(rows, 4096, device="cuda").bfloat16() for _ in range(2)]
    split = [part for one in staged for part in one.split([1024, 3072], 1)]
    words[:2] = 1 << 32 | 5
    counts, progress = torch.zeros(3).long().cuda(), torch.zeros(PIECES, device="cuda").int()
    met = torch.tensor([(words[i].data_ptr(), i, i, 1) for i in range(2)])
    done = torch.tensor([(words[2].data_ptr(), 1, 0, 1)])
    half = rows // 2
    runs = torch.tensor([(0, half, 1, 0), (half, rows, 0, 0), (half + rows, 7, 1, rows - 7)])
    stream = torch.cuda.Stream().cuda_stream
    how = met, done, progress, counts, 5, 10**9, torch.zeros(4).long().pin_memory(), stream
    read = torch.ops.hcp.read(split, runs, half + rows + 7, 2, 1, *how)
    torch.ops.hcp.join(read, stream)
    assert torch.equal(read, ops.reduce(split, runs, half + rows + 7, columns=2))
    assert words[2].tolist() == [1 << 32] + [0] * (PIECES - 1)


# By a kernel in one launch, in several, and by the copy engine.
@pytest.mark.parametrize(("pieces", "step", "gap"), [(3, 1666, 7), (500, 10, 1), (3, 5461, 3000)])
@pytest.mark.parametrize("owners", [1, 2])
def test_rows_between_those_that_are_read_are_placed_meanwhile(
    owners: int, pieces: int, step: int, gap: int
) -> None:
    words = torch.zeros(owners + 1, PIECES, dtype=torch.int64, device="cuda")
    words[:owners] = 1 << 32 | 5
    counts, progress = torch.zeros(owners).long().cuda(), torch.zeros(PIECES, device="cuda").int()
    staged = [torch.randn(pieces * step, 1024, device="cuda").double() for _ in range(owners)]
    own = torch.randn(pieces * gap, 1024, device="cuda").double()
    read_runs = torch.tensor(
        [(i * (step + gap) + gap, step, i % owners, i * step) for i in range(pieces)]
    )
    own_runs = torch.tensor([(i * (step + gap), gap, 0, i * gap) for i in range(pieces)])
    total = pieces * (step + gap)
    met = torch.tensor([(words[i].data_ptr(), i, i, 1) for i in range(owners)])
    done = torch.tensor([(words[owners].data_ptr(), 0, 0, 1)])
    stream = torch.cuda.Stream().cuda_stream
    heads, nothing = torch.tensor([(0, 1024, 1024), (0, 0, 0)]), torch.empty(0, 4).long()
    half = torch.empty(0, 1024, device="cuda", dtype=torch.float64)
    out = torch.ops.hcp.exchange_blocks(
        *([own], heads, 1, 0, 0, own_runs, total),
        *(half, nothing, nothing, nothing, progress, False),  # nothing is staged
        *(staged, read_runs, 0, met, done, progress, True),
        *(counts, 5, 10**9, torch.zeros(4).long().pin_memory(), stream),
    )
    torch.ops.hcp.join(out, stream)
    merged = torch.cat([read_runs, own_runs + torch.tensor([0, 0, owners, 0])])
    merged = merged[merged[:, 0].argsort()]
    assert torch.equal(out, ops.reduce([*staged, own], merged, total))
    assert words[owners].tolist() == [1 << 32] + [0] * (PIECES - 1)
    assert not progress.any()


@pytest.mark.parametrize("width", [1, 3, 512])
@pytest.mark.parametrize("rows", [1, 7, 5000])
def test_messages_arrive_bit_by_bit_in_rows_that_there_are(rows: int, width: int) -> None:
    """Also those that are no numbers, in one round or two; and the rows around them stay."""
    mailbox = -(-(rows + 1) // 2 * width * 8 // 4096) * 4096
    size = _core.link_bytes(2, 2 * mailbox)
    memory = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    bits = torch.randint(-(2**63), 2**63 - 1, (rows, width), device="cuda")
    bits[0, 0] = torch.tensor(0xFFF0_0000_0000_0001 - 2**64)  # a signalling NaN
    out = torch.full((rows + 2, width), 7, device="cuda")
    failure, stream = torch.zeros(4).long().pin_memory(), torch.cuda.Stream().cuda_stream
    kept = []
    for rank, moves in enumerate((([1, 0, rows], []), ([], [0, 1, rows]))):
        link = _core.Link(rank, [one.data_ptr() for one in memory], 2 * mailbox)
        counts = torch.zeros(link.counts, device="cuda").long()
        progress = torch.zeros(2, PIECES, device="cuda").int()
        tables = (link.rounds(*moves, 8 * width), link.words)
        given = bits, out, *(tensor_of(words, torch.int64) for words in tables), *progress
        torch.ops.hcp.mail(*given, counts, 5, 10**9, failure, stream)
        kept.append((given, counts))
    torch.ops.hcp.join(out, stream)
    assert torch.equal(out[1:-1], bits)
    assert torch.equal(out[:: rows + 1], torch.full((2, width), 7, device="cuda"))
    assert not failure.any()
    assert all(not progress.any() for given, _ in kept for progress in given[-2:])


@pytest.mark.parametrize("rows", [16384, 40000])  # by a kernel all pieces at once, or one by one
# By a kernel, or by the copy engine: runs of 1 MiB, or all rows of an owner in one.
@pytest.mark.parametrize("run", [100, 512, 40000])
@pytest.mark.parametrize("owners", [1, 2])
def test_rows_are_read_while_they_are_staged(owners: int, run: int, rows: int) -> None:
    """The reading is queued first, and waits on its stream for each piece."""
    generator = torch.Generator("cuda").manual_seed(rows)
    rows_of = [
        torch.randn(rows, 1024, device="cuda", generator=generator).bfloat16()
        for _ in range(owners)
    ]
    staged = [torch.full_like(own, torch.nan) for own in rows_of]
    words = torch.zeros(owners + 1, PIECES, dtype=torch.int64, device="cuda")
    counts, progress = torch.zeros(owners).long().cuda(), torch.zeros(PIECES, device="cuda").int()
    theirs = torch.ones(1).long().cuda()
    met = torch.tensor([(words[i].data_ptr(), i, i, 1) for i in range(owners)])
    done = torch.tensor([(words[owners].data_ptr(), 0, 0, 1)])
    starts = [(row, own) for row in range(0, rows, run) for own in range(owners)]
    runs, total = [], 0
    for row, own in starts:
        runs.append((total, min(run, rows - row), own, row))
        total += runs[-1][1]

    def stage(piece: int) -> None:
        begin, end = rows * piece // PIECES, rows * (piece + 1) // PIECES
        for own in range(owners):
            assert not words[owners].any()  # nothing is told before all has come
            staged[own][begin:end] = rows_of[own][begin:end]
            signal = torch.tensor([(words[own, piece].data_ptr(), 0, own, 0)])
            torch.ops.hcp.signal_set(staged[own], signal, theirs, 5)

    stage(0)  # loads the kernels: that waits for everything that runs
    words.zero_()
    for one in staged:
        one.fill_(torch.nan)
    table, stream = torch.tensor(runs), torch.cuda.Stream().cuda_stream
    how = met, done, progress, counts, 5, 10**10, torch.zeros(4).long().pin_memory(), stream
    split = [part for one in staged for part in one.split(512, 1)]
    read = torch.ops.hcp.read(split, table, total, 2, 0, *how)
    for piece in range(PIECES):
        stage(piece)
    torch.ops.hcp.join(read, stream)
    split = [part for one in rows_of for part in one.split(512, 1)]
    assert torch.equal(read, ops.reduce(split, table, total, columns=2))
    assert words[owners].tolist() == [1 << 32] + [0] * (PIECES - 1)


@pytest.mark.parametrize("columns", [2, 17])  # one launch takes all, or several do
@pytest.mark.parametrize("width", [3, 64, 1024])
@pytest.mark.parametrize("rows", [0, 1, 7, 64, 65, 5000])
def test_rows_that_are_staged_and_read_are_those_of_a_sum(
    rows: int, width: int, columns: int
) -> None:
    def randn(n: int) -> torch.Tensor:
        return torch.randn(n, width, device="cuda").bfloat16()

    def signal(number: int) -> tuple[int, int, int, int]:
        return words[number].data_ptr(), number, number, 1

    words = torch.zeros(4, PIECES, dtype=torch.int64, device="cuda")
    counts, progress = torch.zeros(4).long().cuda(), torch.zeros(2, PIECES, device="cuda").int()
    how = counts, 5, 10**9, torch.zeros(4).long().pin_memory()
    nobody, half = torch.empty(0, 4).long(), rows // 2
    # Two owners stage sums of two parts each; a reader adds what it has, rows the other way round.
    both = torch.tensor([(0, rows, part, 0) for part in (1, 0)] * (rows > 0)).long().view(-1, 4)
    staged, sums = [], []
    for owner in range(2):
        parts = [randn(rows) for _ in range(2 * columns)]
        staged.append(torch.full((rows, columns * width), torch.nan, device="cuda").bfloat16())
        told = torch.tensor([signal(owner)])
        torch.ops.hcp.stage(staged[-1], parts, both, columns, nobody, told, progress[0], *how)
        sums.append(ops.reduce(parts, both, rows, columns=columns))
    own = [randn(rows) for _ in range(columns)]
    runs = [(0, half, part, rows - half) for part in (1, 0, 2)] * (half > 0)
    runs += [(half, rows - half, 2, 0)] * (rows > half)
    table = torch.tensor(runs).long().view(-1, 4)
    split = [part for sum in staged for part in sum.split(width, 1)]
    met = torch.tensor([(words[i].data_ptr(), 2 + i, i, 1) for i in range(2)])
    done = torch.tensor([(words[2 + i].data_ptr(), 2 + i, i, 1) for i in range(2)])
    stream = torch.cuda.Stream().cuda_stream
    given = [*own, *split], table, rows, columns, 1, met, done, progress[1], *how, stream
    read = torch.ops.hcp.read(*given)
    torch.ops.hcp.join(read, stream)
    for sum, expected in zip(staged, sums, strict=True):
        assert torch.equal(sum, expected)
    split = [part for sum in sums for part in sum.split(width, 1)]
    assert torch.equal(read, ops.reduce([*own, *split], table, rows, columns=columns))
    assert torch.equal(words[:2].cpu(), torch.full((2, PIECES), 1 << 32 | 5))
    assert words[2:, 0].tolist() == [1 << 32] * 2
    assert not words[2:, 1:].any()
    assert not progress.any()


def end_exchange(watch: Tensor, number: int, *, captured: bool = False) -> None:
    """An exchange of nothing by NCCL, and its end."""
    rows, none = torch.zeros(1, 1, device="cuda"), torch.empty(0, 3).long()
    stream = torch.cuda.Stream().cuda_stream
    stamps: Any = torch.zeros(3, dtype=torch.int64, device="cuda"), [], [], 0

    def exchange(number: int) -> None:
        given = rows, none, rows, none, 0, watch, number, 10**9, stream
        torch.ops.hcp.nccl_exchange(*given, *stamps)
        torch.ops.hcp.join(rows, stream)

    if captured:
        exchange(0)  # loads the kernel
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            exchange(0)
        watch[1] = number
        graph.replay()
    else:
        exchange(number)
    torch.cuda.synchronize()


def test_the_end_of_an_exchange_tells_its_number() -> None:
    watch = torch.zeros(6).long().pin_memory()
    for number in (1, 5):
        end_exchange(watch, number)
        assert watch.tolist() == [number, 0, 0, 0, 0, 0]
    end_exchange(watch, 0, captured=True)
    assert watch.tolist() == [5, 0, 0, 0, 0, 0]


def end_aborted(captured: bool) -> None:
    watch = torch.tensor([0, int(not captured), 0, 0, 0, 0]).pin_memory()
    try:
        end_exchange(watch, 1, captured=captured)
    except RuntimeError:  # CUDA's
        os._exit(STOPPED if watch.tolist() == [0, 1, 0, 0, 0, 0] else 1)
    os._exit(0)


STOPPED = 77


@pytest.mark.parametrize("captured", [False, True])
def test_the_end_of_an_aborted_exchange_stops_the_device(captured: bool) -> None:
    process = multiprocessing.get_context("spawn").Process(target=end_aborted, args=(captured,))
    process.start()
    process.join(120)
    process.kill()
    assert process.exitcode == STOPPED
