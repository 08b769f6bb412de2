"""Where the steps of a trainer go: kernels by what they do, the GPU's idle time, and the host's.

    torchrun --nproc-per-node 1 benchmarks/studies/step_profile.py --out trace.json.gz --after 7 \
        benchmarks/bench_trainers.py --ranks 1 --families github --contestant dynamic:github
    python benchmarks/studies/step_profile.py --out trace.json.gz

The first runs any program that steps an optimizer of torch's. After so many steps rank 0 records
--steps of them, and all ranks end. The second reads the file and prints milliseconds a step:

    of the GPU   kernels and copies by what they do, and the time in which none ran
    idle within  that time while the host was in such a range: hcp's, FSDP2's, the optimizer's
    host         those ranges on each thread. A profile slows the host down, not the GPU

Times of different kinds may overlap.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import runpy
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from common.trace import Event, profile_of
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

RANK = int(os.environ.get("RANK", 0))
KINDS = {
    "attention": r"flash|fmha|attention",
    "NCCL": r"nccl",
    "optimizer": r"multi_tensor|adam",
    "hcp's rows": r"(move|turn|stage|merge|sum|read)_rows|signals",
    "matrix products": r"gemm|nvjet|cutlass_|cublas",
    "copies and casts": r"Memcpy|Memset|copy|CatArray|split_with",
    "norms, activations, sums, loss": "",
}
RANGES = r"^(hcp: [a-z ]+|FSDP::\w+|Optimizer\.step)"
LEAST_MS = 0.5
Span = tuple[float, float]


# ---- record --------------------------------------------------------------------------------------


def record(args: argparse.Namespace) -> None:
    """Run the program. It ends once the steps are recorded."""
    if not torch.cuda.is_available():
        raise SystemExit("step_profile.py records on a GPU, and torch.cuda finds none here")
    steps, seen = 0, profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def after_a_step(*given: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == args.after:
            torch.cuda.synchronize()
            if RANK == 0:
                seen.start()
        if steps == args.after + args.steps:
            torch.cuda.synchronize()
            if RANK == 0:
                seen.stop()
                seen.export_chrome_trace(str(args.out))
            sys.stdout.flush()
            os._exit(0)

    register_optimizer_step_post_hook(after_a_step)
    program, *options = args.program
    sys.argv = [program, *options]
    sys.path.insert(0, str(Path(program).resolve().parent))
    runpy.run_path(program, run_name="__main__")


# ---- read ----------------------------------------------------------------------------------------


def tell(args: argparse.Namespace) -> None:
    with gzip.open(args.out) as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    on_gpu = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not on_gpu:
        raise SystemExit(f"{args.out} has {len(events)} events and none of a GPU")
    found = profile_of([Event(e["name"], e["tid"], ns(e["ts"]), ns(e["dur"])) for e in on_gpu])
    idle = [(gap.start / 1e3, (gap.start + gap.duration) / 1e3) for gap in found.gaps]
    kinds, counts = defaultdict[str, float](float), defaultdict[str, int](int)
    for event in on_gpu:
        kind = next(k for k, text in KINDS.items() if re.search(text, event["name"], re.I))
        kinds[kind] += event["dur"]
        counts[kind] += 1
    each = 1e3 * args.steps  # of microseconds
    print("| of the GPU | ms a step | kernels |\n|---|---|---|")
    for kind in sorted(kinds, key=lambda kind: -kinds[kind]):
        print(f"| {kind} | {kinds[kind] / each:.1f} | {counts[kind] / args.steps:,.0f} |")
    print(f"| idle | {sum(end - start for start, end in idle) / each:.1f} | |")
    ranges = defaultdict[tuple[str, int], list[Span]](list)
    for event in events:
        named = re.search(RANGES, event["name"])
        if named and event.get("cat") in ("user_annotation", "cpu_op"):
            ranges[named[1], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    threads = sorted({tid for _, tid in ranges})
    print(
        "\n| range of the host | thread | ms a step | times | idle within |\n|---|---|---|---|---|"
    )
    for (name, tid), spans in sorted(ranges.items(), key=lambda each: -length(each[1])):
        if length(spans) / each >= LEAST_MS:  # shorter ones tell nothing
            within = sum(common(gap, span) for gap in idle for span in spans)
            print(
                f"| {name} | {threads.index(tid)} | {length(spans) / each:.1f} | "
                f"{len(spans) / args.steps:,.0f} | {within / each:.1f} |"
            )


def ns(microseconds: float) -> int:
    return round(1e3 * microseconds)


def length(spans: Sequence[Span]) -> float:
    return sum(end - start for start, end in spans)


def common(one: Span, other: Span) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the trace, .json.gz")
    parser.add_argument("--after", type=int, default=7, help="steps before (%(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="recorded (%(default)s)")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="and its options; none: read")
    args = parser.parse_args()
    (record if args.program else tell)(args)


if __name__ == "__main__":
    main()
