"""Compare kernels with the memory they move: pack, merge, reduce, cast and rotate on one device.

    python benchmarks/bench_kernels.py
    OMP_NUM_THREADS=1 python benchmarks/bench_kernels.py --device cpu --rows 16384 --only rotate

Each result is checked first. Contestants take turns in one run, over buffers that together are
larger than the last cache. They are timed by CUDA events, or on the CPU by the host's clock. The
median of the rounds counts. Columns:

    bytes     the least bytes to read and write for the result, GB
    GB/s      bytes / median time
    of copy   that rate over the rate of a plain copy of 1 GiB (CPU: 64 MiB), timed in the same
              rounds: the bound is 1.00, the full rate of the memory
    vs peer   the peer's median time over ours

The peers are index_select and cat for pack, and index_select and .to for a cast. For merge they
are the chain of pairwise corrections that ring attention implementations launch, re-implemented
here, each step eager or compiled. For reduce they are a chain of additions in float32. For kernels
that rotate they are two passes of hcp's kernels, and PyTorch's operators, which each pass over the
memory once, before the pack or after the sum.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

import torch
from common.flags import end_after, parser_of
from torch import Tensor

from hcp import ops
from hcp.attention import rotary as rope

HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128
PARTS = 8
COPIES = 4  # sets of buffers, used in turn
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


Calls = Sequence[Callable[[], object]]
"""The calls of one contestant, one for each set of buffers."""


class Contest(NamedTuple):
    name: str
    bytes_moved: int
    ours: Calls
    peers: Mapping[str, Calls]


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def size_of(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


# ---- pack ----------------------------------------------------------------------------------------


def pack_contest(rows: int, run: int) -> Contest:
    """Pack keys and values of every other run of rows, side by side."""
    segments = torch.tensor([(row, run) for row in range(0, 2 * rows, 2 * run)])
    index = torch.cat([torch.arange(row, row + n) for row, n in segments.tolist()]).to(DEVICE)
    ours, peers = [], []
    for _ in range(COPIES):
        columns = [randn(2 * rows, KEY_HEADS * HEAD_DIM) for _ in range(2)]

        def by_hcp(columns: list[Tensor] = columns) -> Tensor:
            return ops.pack(columns, segments, rows)

        def by_index(columns: list[Tensor] = columns) -> Tensor:
            return torch.cat([column.index_select(0, index) for column in columns], 1)

        ours.append(by_hcp)
        peers.append(by_index)
    assert torch.equal(ours[0](), peers[0]())
    moved = 2 * rows * 2 * KEY_HEADS * HEAD_DIM * 2
    return Contest(f"pack, runs of {run}", moved, ours, {"index_select + cat": peers})


def cast_contest(rows: int, dtype: torch.dtype, to: torch.dtype) -> Contest:
    """Pack every other 256 rows of one tensor, in another dtype."""
    segments = torch.tensor([(row, 256) for row in range(0, 2 * rows, 512)])
    index = torch.cat([torch.arange(row, row + n) for row, n in segments.tolist()]).to(DEVICE)
    sets = [randn(2 * rows, 2 * KEY_HEADS * HEAD_DIM, dtype=dtype) for _ in range(COPIES)]
    ours = [lambda x=x: ops.pack([x], segments, rows, dtype=to) for x in sets]
    peers = [lambda x=x: x.index_select(0, index).to(to) for x in sets]
    apart = [lambda x=x: ops.pack([x], segments, rows).to(to) for x in sets]
    assert torch.equal(ours[0](), peers[0]())
    moved = size_of(sets[0][:rows], ours[0]())
    others = {"index_select + to": peers, "pack + to": apart}
    return Contest(f"pack, {name_of(dtype)} to {name_of(to)}", moved, ours, others)


# ---- merge ---------------------------------------------------------------------------------------


def correct_lse(lse: Tensor, step: Tensor) -> Tensor:
    high, low = torch.maximum(lse, step), torch.minimum(lse, step)
    return high + torch.log1p(torch.exp(low - high))


def correct_out(out: Tensor, step: Tensor, lse: Tensor, step_lse: Tensor) -> Tensor:
    return out + step * torch.exp(step_lse - lse).unsqueeze(-1).to(step.dtype)


def chain(
    outs: list[Tensor],
    lses: list[Tensor],
    lse_step: Callable[[Tensor, Tensor], Tensor],
    out_step: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Correct the log-sum-exp once for each part, then the output once for each, in bfloat16."""
    lse = lses[0].clone()
    for step in lses[1:]:
        lse = lse_step(lse, step)
    out = torch.zeros_like(outs[0])
    for step, step_lse in zip(outs, lses, strict=True):
        out = out_step(out, step, lse, step_lse)
    return out


def merge_contest(rows: int) -> Contest:
    runs = torch.tensor([(0, rows, part, 0) for part in range(PARTS)])
    compiled = torch.compile(correct_lse), torch.compile(correct_out)
    ours, eager, fused = [], [], []
    for _ in range(COPIES):
        outs = [randn(rows, HEADS, HEAD_DIM) for _ in range(PARTS)]
        lses = [randn(rows, HEADS, dtype=torch.float32) for _ in range(PARTS)]
        ours.append(lambda o=outs, e=lses: ops.merge(o, e, runs, rows))
        eager.append(lambda o=outs, e=lses: chain(o, e, correct_lse, correct_out))
        fused.append(lambda o=outs, e=lses: chain(o, e, *compiled))
    weights = torch.stack(lses).double().softmax(0).unsqueeze(-1)
    exact = (weights * torch.stack(outs).double()).sum(0)
    error, chained = (float((x.double() - exact).abs().max()) for x in (ours[-1]()[0], eager[-1]()))
    print(f"merge: largest error {error:.1e}, of the bfloat16 chain {chained:.1e}")
    assert error <= chained
    moved = size_of(*outs, *lses) + size_of(outs[0], lses[0])
    return Contest(
        f"merge of {PARTS}", moved, ours, {"chain, eager": eager, "chain, compiled": fused}
    )


# ---- reduce --------------------------------------------------------------------------------------


def reduce_contest(rows: int) -> Contest:
    runs = torch.tensor([(0, rows, part, 0) for part in range(PARTS)])
    ours, peers = [], []
    for _ in range(COPIES):
        parts = [randn(rows, KEY_HEADS * HEAD_DIM) for _ in range(2 * PARTS)]

        def by_hcp(parts: list[Tensor] = parts) -> Tensor:
            return ops.reduce(parts, runs, rows, columns=2)

        def by_chain(parts: list[Tensor] = parts) -> Tensor:
            columns = []
            for column in (parts[::2], parts[1::2]):
                total = column[0].float()
                for part in column[1:]:
                    total += part
                columns.append(total.to(part.dtype))
            return torch.cat(columns, 1)

        ours.append(by_hcp)
        peers.append(by_chain)
    torch.testing.assert_close(ours[0](), peers[0]())
    moved = size_of(*parts) + size_of(*parts[:2])
    return Contest(f"reduce of {PARTS}", moved, ours, {"float32 chain": peers})


def cast_sum_contest(rows: int, dtype: torch.dtype, to: torch.dtype) -> Contest:
    """Sum eight parts, in another dtype."""
    runs = torch.tensor([(0, rows, part, 0) for part in range(PARTS)])
    ours, peers = [], []
    for _ in range(COPIES):
        parts = [randn(rows, 2 * KEY_HEADS * HEAD_DIM, dtype=dtype) for _ in range(PARTS)]

        def by_chain(parts: list[Tensor] = parts) -> Tensor:
            total = parts[0].to(torch.float32, copy=True)
            for part in parts[1:]:
                total += part
            return total.to(to)

        ours.append(lambda parts=parts: ops.reduce(parts, runs, rows, dtype=to))
        peers.append(by_chain)
    assert torch.equal(ours[0](), peers[0]())
    moved = size_of(*parts, ours[0]())
    return Contest(
        f"reduce of {PARTS}, {name_of(dtype)} to {name_of(to)}",
        moved,
        ours,
        {"float32 chain": peers},
    )


# ---- rotary embedding ----------------------------------------------------------------------------


def rotary(rows: int) -> rope.Rotary:
    angles = torch.rand(rows, HEAD_DIM // 2, device=DEVICE) * 100
    return rope.rotary_of(torch.cat((angles, angles), 1), interleaved=False, mscale=1.0)


def rotate_contest(rows: int) -> Contest:
    """Rotate queries."""
    turn = rotary(rows)
    sets = [randn(rows, HEADS, HEAD_DIM) for _ in range(COPIES)]
    ours = [lambda t=t: ops.rotate(t, turn.cos, turn.sin) for t in sets]
    peers = [lambda t=t: rope.rotate_by_torch(t, turn) for t in sets]
    assert torch.equal(ours[0](), peers[0]())
    moved = 2 * size_of(sets[0]) + size_of(turn.cos, turn.sin)
    return Contest("rotate queries", moved, ours, {"torch": peers})


def rotated_pack_contest(rows: int) -> Contest:
    """Rotate keys, and pack them side by side with values, all rows, as a ring sends them."""
    turn, segments = rotary(rows), torch.tensor([(0, rows)])
    ours, apart, torchs = [], [], []
    for _ in range(COPIES):
        key, value = randn(rows, KEY_HEADS, HEAD_DIM), randn(rows, KEY_HEADS * HEAD_DIM)

        def fused(key: Tensor = key, value: Tensor = value) -> tuple[Tensor, Tensor]:
            return ops.rotate_pack(key, turn.cos, turn.sin, [value], segments, rows)

        def one_by_one(key: Tensor = key, value: Tensor = value) -> tuple[Tensor, Tensor]:
            turned = ops.rotate(key, turn.cos, turn.sin)
            return turned, ops.pack([turned.flatten(1), value], segments, rows)

        def by_torch(key: Tensor = key, value: Tensor = value) -> tuple[Tensor, Tensor]:
            turned = rope.rotate_by_torch(key, turn)
            return turned, ops.pack([turned.flatten(1), value], segments, rows)

        ours.append(fused)
        apart.append(one_by_one)
        torchs.append(by_torch)
    for other in (apart, torchs):
        assert all(torch.equal(*both) for both in zip(ours[0](), other[0](), strict=True))
    moved = size_of(key, value, turn.cos, turn.sin) + size_of(*ours[0]())
    peers = {"rotate, pack": apart, "torch, pack": torchs}
    return Contest("rotate and pack", moved, ours, peers)


def rotated_sum_contest(rows: int) -> Contest:
    """Sum gradients of keys in two parts, as on two ranks, and rotate them back."""
    turn, runs = rotary(rows), torch.tensor([(0, rows, part, 0) for part in range(2)])
    back = rope.Rotary(turn.cos, -turn.sin, interleaved=False)
    ours, apart, torchs = [], [], []
    for _ in range(COPIES):
        parts = [randn(rows, KEY_HEADS * HEAD_DIM) for _ in range(2)]

        def fused(parts: list[Tensor] = parts) -> Tensor:
            given = parts, runs, rows, 1, turn.cos, turn.sin, HEAD_DIM, 1
            return ops.reduce_rotated(*given, inverse=True)

        def summed(parts: list[Tensor] = parts) -> Tensor:
            return ops.reduce(parts, runs, rows).view(rows, KEY_HEADS, HEAD_DIM)

        def one_by_one(parts: list[Tensor] = parts) -> Tensor:
            return ops.rotate(summed(parts), turn.cos, turn.sin, inverse=True).flatten(1)

        def by_torch(parts: list[Tensor] = parts) -> Tensor:
            return rope.rotate_by_torch(summed(parts), back).flatten(1)

        ours.append(fused)
        apart.append(one_by_one)
        torchs.append(by_torch)
    whole = torch.stack(parts).float().sum(0).view(rows, KEY_HEADS, HEAD_DIM)
    exact = rope.rotate_by_torch(whole, back).flatten(1)
    calls = ours[-1], apart[-1], torchs[-1]
    errors = [float((call() - exact).square().mean().sqrt()) for call in calls]
    print(f"sum and rotate back: error {errors[0]:.1e}, in two passes {errors[1]:.1e}")
    assert errors[0] <= min(errors[1:])
    moved = size_of(*parts, turn.cos, turn.sin, parts[0])
    peers = {"reduce, rotate": apart, "reduce, torch": torchs}
    return Contest("sum and rotate back", moved, ours, peers)


# ---- timing --------------------------------------------------------------------------------------


def time_once(calls: Calls, turn: int) -> float:
    """Return the seconds of one call, over the buffers whose turn it is."""
    if DEVICE.type == "cpu":
        begun = time.perf_counter()
        calls[turn % len(calls)]()
        return time.perf_counter() - begun
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(200_000)  # the launches are queued before the work begins
    start.record()
    calls[turn % len(calls)]()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def medians(contestants: Sequence[Calls], rounds: int) -> list[float]:
    times: list[list[float]] = [[] for _ in contestants]
    for turn in range(-3, rounds):
        for calls, own in zip(contestants, times, strict=True):
            seconds = time_once(calls, turn)
            if turn >= 0:
                own.append(seconds)
    return [statistics.median(own) for own in times]


CONTESTS: dict[str, Callable[[int], list[Contest]]] = {
    "pack": lambda rows: [pack_contest(rows, run) for run in (16, 256, 4096) if rows % run == 0],
    "merge": lambda rows: [merge_contest(rows)],
    "reduce": lambda rows: [reduce_contest(rows)],
    "cast": lambda rows: [
        *(cast_contest(rows, *way) for way in permutations((torch.bfloat16, torch.float32))),
        *(cast_sum_contest(rows, *way) for way in permutations((torch.bfloat16, torch.float32))),
    ],
    "rotate": lambda rows: [
        rotate_contest(rows),
        rotated_pack_contest(rows),
        rotated_sum_contest(rows),
    ],
}


def machine() -> str:
    if DEVICE.type == "cpu":
        return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


def main() -> None:
    global DEVICE
    parser = parser_of(__doc__, device=DEVICE.type, rounds=30)
    parser.add_argument("--rows", type=int, default=32_768, help="rows of each result")
    parser.add_argument("--only", nargs="+", choices=tuple(CONTESTS), default=tuple(CONTESTS))
    args = parser.parse_args()
    end_after(args.deadline)
    DEVICE = torch.device(args.device)
    copied = 2**30 if DEVICE.type == "cuda" else 2**26
    source, target = torch.ones(2, copied, dtype=torch.uint8, device=DEVICE)
    print(
        f"{machine()}, torch {torch.__version__}, Python {platform.python_version()}; "
        f"{args.rows} rows, {args.rounds} rounds, bfloat16"
    )
    print(f"{'':34} {'GB':>6} {'GB/s':>7} {'of copy':>8}  vs peer")
    for contest in (made for name in args.only for made in CONTESTS[name](args.rows)):
        copy, own, *others = medians(
            [[lambda: target.copy_(source)], contest.ours, *contest.peers.values()], args.rounds
        )
        rate = contest.bytes_moved / own
        versus = ", ".join(
            f"{other / own:.2f}x {name}" for name, other in zip(contest.peers, others, strict=True)
        )
        print(
            f"{contest.name:34} {contest.bytes_moved / 1e9:6.2f} {rate / 1e9:7.1f} "
            f"{rate / (2 * copied / copy):8.2f}  {versus}"
        )
        row = {"kernel": contest.name, "GB": contest.bytes_moved / 1e9, "GB/s": rate / 1e9}
        row |= {"of copy": rate / (2 * copied / copy)}
        for name, other in zip(contest.peers, others, strict=True):
            row[f"vs {name}"] = other / own
        args.json.add(row)


if __name__ == "__main__":
    main()
