"""Compare ways in which a copy engine brings runs of rows from another GPU's memory.

    python benchmarks/studies/peer_copies.py

`peer` copies long runs one by one (`csrc/cuda/read.cu`), and reads shorter ones by a kernel, which
reaches less of the link. Here two GPUs of one process copy from each other at once: the same bytes,
in runs that lie end to end in the source and three times as far apart in the target, as a gather of
four ranks lays them out. Ways:

    one      one copy of all bytes, end to end: the yardstick
    each     cudaMemcpyAsync, a call a run: what `peer` does with long runs
    batch    cudaMemcpyBatchAsync, one call for all runs (CUDA 12.8)
    strided  cudaMemcpy2DAsync, one call: for runs of one length alone

A share is the time of `one` / that of the way, of the slower GPU; `host us` is the host's time for
one GPU's calls. Medians of rounds in which all take turns. All targets are compared with their
sources, before and after.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from common.flags import end_after, parser_of
from torch import Tensor

BYTES = 2**27
APART = 3
RUN_BYTES = (2**16, 2**18, 2**20, 2**22, 2**24)
CALLS = 4
DEVICE_TO_DEVICE, IN_STREAM_ORDER = 3, 1


class Place(ctypes.Structure):
    """cudaMemLocation, of which nothing is said here."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Attributes(ctypes.Structure):
    """cudaMemcpyAttributes."""

    _fields_ = (
        ("access_order", ctypes.c_int),
        ("source", Place),
        ("target", Place),
        ("flags", ctypes.c_uint),
    )


def runtime() -> tuple[ctypes.CDLL, int]:
    """CUDA's runtime as torch has loaded it, and its version."""
    maps = Path("/proc/self/maps").read_text().split()
    path = next(word for word in maps if "libcudart" in word)
    library, version = ctypes.CDLL(path), ctypes.c_int()
    check("cudaRuntimeGetVersion", library.cudaRuntimeGetVersion(ctypes.byref(version)))
    return library, version.value


def check(function: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{function} gave the error {status}")


class Copies(NamedTuple):
    """What one GPU copies from the other: runs of bytes, where they lie and where they go."""

    source: Tensor
    target: Tensor
    run_bytes: int
    stream: torch.cuda.Stream

    @property
    def runs(self) -> int:
        return BYTES // self.run_bytes

    def addresses(self) -> tuple[list[int], list[int]]:
        steps = [i * self.run_bytes for i in range(self.runs)]
        sources = [self.source.data_ptr() + step for step in steps]
        return sources, [self.target.data_ptr() + APART * step for step in steps]

    def is_right(self, *, end_to_end: bool) -> bool:
        if end_to_end:
            found = self.target[:BYTES]
        else:
            found = self.target.view(self.runs, APART, self.run_bytes)[:, 0].flatten()
        return torch.equal(found, self.source.to(self.target.device))


def ways(cuda: ctypes.CDLL, version: int, copies: Copies) -> dict[str, Callable[[], None]]:
    """The calls of each way for one GPU, prepared."""
    sources, targets = copies.addresses()
    stream, n, run_bytes = ctypes.c_void_p(copies.stream.cuda_stream), copies.runs, copies.run_bytes
    pointers = ctypes.c_void_p * n
    given, taken = pointers(*sources), pointers(*targets)
    pairs = [
        (ctypes.c_void_p(to), ctypes.c_void_p(of)) for to, of in zip(targets, sources, strict=True)
    ]
    sizes = (ctypes.c_size_t * n)(*[run_bytes] * n)
    attributes, first = Attributes(IN_STREAM_ORDER), ctypes.c_size_t(0)
    failed = ctypes.c_size_t(0)

    def copy(to: ctypes.c_void_p, of: ctypes.c_void_p, size: int) -> None:
        status = cuda.cudaMemcpyAsync(to, of, ctypes.c_size_t(size), DEVICE_TO_DEVICE, stream)
        check("cudaMemcpyAsync", status)

    def one() -> None:
        copy(*pairs[0], BYTES)

    def each() -> None:
        for to, of in pairs:
            copy(to, of, run_bytes)

    def batch() -> None:
        shared = taken, given, sizes, ctypes.c_size_t(n)
        like = ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1)
        more = (ctypes.byref(failed),) if version < 13000 else ()
        check("cudaMemcpyBatchAsync", cuda.cudaMemcpyBatchAsync(*shared, *like, *more, stream))

    def strided() -> None:
        (to, of), (pitch, width, height) = pairs[0], map(ctypes.c_size_t, (run_bytes, run_bytes, n))
        wide = ctypes.c_size_t(APART * run_bytes)
        given = to, wide, of, pitch, width, height, DEVICE_TO_DEVICE, stream
        check("cudaMemcpy2DAsync", cuda.cudaMemcpy2DAsync(*given))

    found = {"one": one, "each": each, "strided": strided}
    if version >= 12080:
        found["batch"] = batch
    return found


def timed(steps: Mapping[int, Callable[[], None]], both: list[Copies]) -> tuple[float, float]:
    """Seconds of the slower GPU for a call, all at once, and of the host for one GPU's."""
    marks = []
    for copies in both:
        torch.cuda.synchronize(copies.target.device)
    host = 0.0
    for device, step in steps.items():
        with torch.cuda.device(device), torch.cuda.stream(both[device].stream):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(2_000_000)  # so that both begin with calls queued
            begin.record()
            begun = time.perf_counter()
            for _ in range(CALLS):
                step()
            host += time.perf_counter() - begun
            end.record()
            marks.append((begin, end))
    for copies in both:
        torch.cuda.synchronize(copies.target.device)
    seconds = [begin.elapsed_time(end) / 1e3 / CALLS for begin, end in marks]
    return max(seconds), host / CALLS / len(steps)


def main() -> int:
    parser = parser_of(__doc__, devices=("cuda",), device="cuda", rounds=7, deadline=60)
    args = parser.parse_args()
    end_after(args.deadline)
    if torch.cuda.device_count() < 2:
        parser.error(f"{torch.cuda.device_count()} GPU is here, expected 2 that reach each other")
    held = [
        torch.randint(256, (BYTES,), dtype=torch.uint8, device=torch.device("cuda", i))
        for i in range(2)
    ]
    held[0][:1].to(held[1].device)  # torch lets each reach the other's memory
    held[1][:1].to(held[0].device)
    streams = [torch.cuda.Stream(i) for i in range(2)]
    room = [torch.zeros(APART * BYTES, dtype=torch.uint8, device=x.device) for x in held]
    cuda, version = runtime()
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, CUDA runtime {version}")
    print(f"{'run KiB':>8} {'one GB/s':>9} {'way':>8} {'share':>6} {'host us':>8}", flush=True)
    for run_bytes in RUN_BYTES:
        both = [Copies(held[1 - i], room[i], run_bytes, streams[i]) for i in range(2)]
        made = [ways(cuda, version, copies) for copies in both]
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in made[0]}
        for turn in range(args.rounds + 1):
            for name in [*times]:
                steps = {i: ways_of[name] for i, ways_of in enumerate(made)}
                try:
                    taken = timed(steps, both)
                except (RuntimeError, AttributeError) as error:
                    print(f"without {name}: {error}")
                    del times[name]
                    continue
                if turn > 0:
                    times[name].append(taken)
                if turn in (0, args.rounds):
                    expect_right(name, both)
        one = statistics.median(seconds for seconds, _ in times["one"])
        for name, taken_all in times.items():
            seconds, host = (statistics.median(x) for x in zip(*taken_all, strict=True))
            row = run_bytes >> 10, BYTES / one / 1e9, name, one / seconds, host * 1e6
            print(f"{row[0]:8} {row[1]:9.0f} {row[2]:>8} {row[3]:6.2f} {row[4]:8.0f}", flush=True)
            titles = "run KiB", "one GB/s", "way", "share", "host us"
            args.json.add(dict(zip(titles, row, strict=True)))
    return 0


def expect_right(name: str, both: list[Copies]) -> None:
    for copies in both:
        if not copies.is_right(end_to_end=name == "one"):
            raise SystemExit(
                f"{name}, runs of {copies.run_bytes} bytes: other bytes than the source's"
            )
        copies.target.zero_()


if __name__ == "__main__":
    sys.exit(main())
