"""Measure what micro-batches cost on this machine, and write a cost model, or with --memory a
memory model, for hcp.plan.

A GPT of the given sizes runs forward and backward through hcp's own dispatch and attention, over a
grid of lengths, packs and degrees. Computation, attention and exchange are measured together, as
they run in training: bandwidths and rates measured one by one predict a step less well.

    hcp calibrate --ranks 4 --out cost.json                      starts 4 ranks on this machine
    torchrun --nproc-per-node 8 -m hcp.cli.calibrate --out ...   runs under your own launcher
    hcp plan --cost cost.json ...                                plans by these prices
    hcp calibrate --memory --out memory.json                     bytes of micro-batches on GPUs
    hcp calibrate --memory --model Qwen/Qwen3-8B --out ...       prices of keeping, recomputing and
                                                                 offloading layers of that model
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any

from hcp._validate import expect_size
from hcp.attention.comm_types import COMM_TYPES, check_comm_types
from hcp.cli.command_arguments import in_words, new_parser
from hcp.cli.doctor import nvidia_smi
from hcp.step.config import Config
from hcp.tools.programs.arguments import (
    DTYPES,
    add_model_arguments,
    add_rank_arguments,
    check_model,
    number_of_ranks,
    whole_number,
)
from hcp.tools.programs.files import expect_writable
from hcp.tools.programs.text_data import VOCABULARY_SIZE

if TYPE_CHECKING:
    from hcp.cli.fit import Fit, Point

HELD_OUT = 4
"""One point in so many is held out of the fit, to say how well the fit predicts."""
BYTES_MAX = 0.1
"""The largest error of a fit of bytes, of which little is noise."""
MEDIAN_MAX, P95_MAX = 0.3, 1.0
"""The largest median and 95th percentile of held-out errors. Prices with larger ones are refused:
plans by them would balance something else."""
SIZES = (
    "ranks",
    "max_tokens_per_rank",
    "repeats",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "vocab_size",
)


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser("calibrate", __doc__, takes="--out FILE [OPTIONS]")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="JSON file to write; required"
    )
    add_rank_arguments(parser)
    add_grid(parser)
    add_memory(parser)
    add_model_arguments(parser)
    parser.add_argument(
        "--vocab-size",
        type=whole_number,
        default=VOCABULARY_SIZE,
        metavar="TOKENS",
        help="rows of the embedding and of the output layer",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="type of what is computed; bfloat16: autocast over float32 weights, which "
        "FlashAttention on GPUs needs",
    )
    return parser


def add_grid(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("grid")
    group.add_argument(
        "--max-tokens-per-rank",
        type=whole_number,
        default=2048,
        metavar="TOKENS",
        help="most rows of one rank in the grid",
    )
    group.add_argument(
        "--min-tokens-per-rank",
        type=whole_number,
        metavar="TOKENS",
        help="fewest, reached by halving; below some number of rows a GPU waits for its host, and "
        "times no longer follow the rows (default: a sixteenth of the most)",
    )
    group.add_argument(
        "--repeats",
        type=int,
        default=5,
        metavar="TIMES",
        help="measurements of each point, of which the median counts",
    )
    group.add_argument(
        "--cp-comm-type",
        choices=COMM_TYPES,
        default="p2p",
        help="how keys and values travel; not auto, which goes by the prices that are measured",
    )
    group.add_argument(
        "--hierarchical-context-parallel-sizes",
        nargs="+",
        type=int,
        default=[],
        metavar="RANKS",
        help="levels of a2a+p2p, the inner all-to-all first and the ring last (default: none)",
    )
    group.add_argument(
        "--attention-backend",
        default="auto",
        metavar="NAME",
        help="whose kernels compute attention: measure with the one that will train",
    )
    group.add_argument(
        "--seed", type=int, default=1234, metavar="NUMBER", help="of the held-out points"
    )
    group.add_argument(
        "--accept-errors",
        action="store_true",
        help="write prices that make attention free, or that miss held-out points by far, all the "
        f"same (refused: a median above {MEDIAN_MAX:.0%}%, a 95th percentile above "
        f"{P95_MAX:.0%}%; of bytes, any above {BYTES_MAX:.0%}%)",
    )


def add_memory(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory")
    group.add_argument(
        "--memory",
        action="store_true",
        help="measure bytes in place of seconds, on GPUs: a file for `--memory` of trainers",
    )
    group.add_argument(
        "--model",
        metavar="NAME",
        help="with --memory: a folder with a config.json, or a name on the hub. One layer of it is "
        "measured, with the link to the host, on one device: a file for "
        "hcp.integrations.transformers.memory.Prices.load (default: layers of --hidden-size and "
        "the like, for the memory of plans)",
    )
    group.add_argument(
        "--memory-share",
        type=float,
        default=0.95,
        metavar="SHARE",
        help="share of a GPU's memory that training may fill",
    )
    group.add_argument(
        "--head-chunks",
        type=int,
        default=1,
        metavar="CHUNKS",
        help="most chunks of heads that plans may compute attention in",
    )
    group.add_argument(
        "--peer-buffer-bytes",
        type=int,
        default=2**30,
        metavar="BYTES",
        help="what each GPU gives to exchanges, of which plans leave so much free: what training "
        "gives build_process_groups, and on several hosts twice that",
    )


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the options. Raises ValueError for options that do not go together."""
    args = build_parser().parse_args(argv)
    from hcp.tools.memory import expect_share
    from hcp.tools.programs.ranks import runs_on_cpus  # imports torch, which --help does without

    args.command = shlex.join(["hcp", "calibrate", *argv])
    args.ranks = number_of_ranks(args.ranks)
    for name in SIZES:
        expect_size(name, getattr(args, name))
    if args.max_tokens_per_rank < 256:
        raise ValueError(f"max_tokens_per_rank is {args.max_tokens_per_rank}, expected >= 256")
    if args.min_tokens_per_rank is None:
        args.min_tokens_per_rank = args.max_tokens_per_rank // 16
    if not 16 <= args.min_tokens_per_rank <= args.max_tokens_per_rank // 2:
        raise ValueError(
            f"min_tokens_per_rank is {args.min_tokens_per_rank}, expected 16 to half of "
            f"max_tokens_per_rank = {args.max_tokens_per_rank}"
        )
    check_model(args)
    if args.vocab_size < VOCABULARY_SIZE:
        raise ValueError(
            f"vocab_size is {args.vocab_size}, expected >= {VOCABULARY_SIZE}: tokens of the data"
        )
    expect_share("memory_share", args.memory_share)
    expect_size("head_chunks", args.head_chunks, "chunks")
    expect_size("peer_buffer_bytes", args.peer_buffer_bytes)
    if args.model and not args.memory:
        raise ValueError(f"model is {args.model!r} without --memory, expected --memory --model")
    if args.memory and not args.model and runs_on_cpus(args.device, args.ranks):
        raise ValueError(
            f"--memory reads what the allocator of a GPU counts, and {args.ranks} ranks run on the "
            "CPU here: run it where each rank has a GPU, or lower --ranks"
        )
    if args.cp_comm_type == "auto":
        raise ValueError(
            "cp_comm_type is 'auto', which goes by the prices that are measured here, expected "
            f"one of {[name for name in COMM_TYPES if name != 'auto']}"
        )
    sizes = tuple(args.hierarchical_context_parallel_sizes)
    check_comm_types([args.cp_comm_type], sizes, None, where="cp_comm_type")
    args.config = Config(
        args.max_tokens_per_rank,
        cp_comm_type=args.cp_comm_type,
        hierarchical_context_parallel_sizes=sizes,
        attention_backend=args.attention_backend,
    )
    args.config.require_backend()
    if os.environ.get("RANK", "0") == "0":  # the rank that writes
        expect_writable("out", args.out)
    return args


# ---- Grid ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A micro-batch to measure: each of its groups computes the same lengths at one degree."""

    lengths: tuple[int, ...]
    degree: int


def grid(ranks: int, least: int, most: int) -> list[Cell]:
    """Return the micro-batches to measure: one for each degree, number of rows and pack.

    The degrees are 1 to 8, then powers of two and all ranks. The rows of a rank are `most`, halved
    until the next would be below `least`. A pack has 1, 4 or 16 sequences of equal length.
    """
    return [
        Cell((rows * degree // parts,) * parts, degree)
        for degree in degrees_of(ranks)
        for rows in rows_of(least, most)
        for parts in (1, 4, 16)
    ]


def degrees_of(ranks: int) -> list[int]:
    return [d for d in range(1, ranks + 1) if d <= 8 or d == ranks or d & (d - 1) == 0]


def rows_of(least: int, most: int) -> list[int]:
    """Return the numbers of rows to measure, ascending."""
    return [most >> k for k in reversed(range(most.bit_length())) if most >> k >= least]


def flat_rows(points: Sequence[Point]) -> int:
    """Return the most rows of a rank that take at least three quarters of the time of twice as
    many; 0 if no number does.

    Up to that number a micro-batch takes the host's time, independent of its rows.
    """
    times: dict[tuple[int, int], dict[int, float]] = {}
    for p in points:
        rows = sum(p.lengths) // p.degree
        times.setdefault((p.degree, len(p.lengths)), {})[rows] = p.seconds
    ratios: dict[int, list[float]] = {}
    for of in times.values():
        for rows, more in itertools.pairwise(sorted(of)):
            ratios.setdefault(rows, []).append(of[rows] / of[more])
    return max((rows for rows, found in ratios.items() if median(found) >= 0.75), default=0)


def held_out(count: int, seed: int) -> set[int]:
    """Draw the points that the fit does not see."""
    return set(Random(seed).sample(range(count), count // HELD_OUT))


# ---- The report ----------------------------------------------------------------------------------


def errors_in_words(found: Fit, points: Sequence[Point]) -> dict[str, Any]:
    errors = found.errors(points)
    return {
        "points": len(errors),
        "median": round(errors[len(errors) // 2], 4),
        "p95": round(errors[min(len(errors) - 1, int(0.95 * len(errors)))], 4),
        "largest": round(errors[-1], 4),
    }


def doubts(found: Fit, errors: dict[str, Any], points: Sequence[Point]) -> list[str]:
    """List the reasons against planning by these prices, in words; empty if there are none."""
    said = []
    if found.prices["pair"] == 0:
        longest = max(max(p.lengths) for p in points)
        said.append(
            f"pair is 0, which makes attention free, expected > 0: sequences of up to {longest} "
            "tokens do not show what attention takes"
        )
    of = errors["held-out"]
    for name, most in (("median", MEDIAN_MAX), ("p95", P95_MAX)):
        if of[name] > most:
            said.append(
                f"the {name} of the errors on {of['points']} held-out points is {of[name]:.1%}, "
                f"expected at most {most:.0%}"
            )
    return said


def expect_no_doubts(said: Sequence[str], accepted: bool) -> None:
    """Raise ValueError if there are doubts; if they are accepted, print them instead."""
    if said and not accepted:
        raise ValueError(
            f"{'; '.join(said)}. No file was written: measure more rows (--max-tokens-per-rank), a "
            "larger model, more --repeats, or while the machine does nothing else; "
            "--accept-errors writes these prices all the same"
        )
    for doubt in said:
        print(f"  accepted by --accept-errors: {doubt}")


def driver() -> str | None:
    """Return the version of NVIDIA's driver, or None without one."""
    try:
        return nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def provenance(
    args: argparse.Namespace,
    device: str,
    kernels: Mapping[str, str | None],
    errors: dict[str, Any],
    points: Sequence[Point],
) -> dict[str, Any]:
    """Return the origin of the prices, with every measurement, as JSON values."""
    return origin(args, device) | {
        "kernels": dict(kernels),
        "repeats": args.repeats,
        "seed": args.seed,
        "errors": errors,
        "columns": ["tokens of a sequence", "sequences", "degree", "seconds"],
        "points": [[p.lengths[0], len(p.lengths), p.degree, p.seconds] for p in points],
    }


def origin(args: argparse.Namespace, device: str) -> dict[str, Any]:
    """Return what was measured, where and when, as JSON values."""
    import torch

    import hcp

    options = "dtype", "untie_embeddings_and_output_weights", "cp_comm_type", "attention_backend"
    model = (*SIZES[3:], *options)
    levels = "hierarchical_context_parallel_sizes"
    return {
        "command": args.command,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device,
        "ranks": args.ranks,
        "versions": {
            "hcp": hcp.__version__,
            "torch": torch.__version__,
            "CUDA": torch.version.cuda,
            "driver": driver(),
            "python": platform.python_version(),
        },
        "model": {name: getattr(args, name) for name in (*model, levels)},
        "tokens per rank": [args.min_tokens_per_rank, args.max_tokens_per_rank],
    }


def print_report(
    args: argparse.Namespace,
    found: Fit,
    errors: dict[str, Any],
    device: str,
    kernels: Mapping[str, str | None],
    points: Sequence[Point],
) -> None:
    from hcp.planning.cost import TIMES

    print(f"{args.ranks} ranks on {device}, {args.dtype}, {args.cp_comm_type}")
    for name, version in kernels.items():
        print(f"  attention by {name} {version or ''}".rstrip())
    for name in TIMES:
        if found.prices.get(name, 0.0) > 0:
            print(f"  {name:15}{in_words(found.prices[name]):>10}  {MEANINGS[name]}")
    if found.overlap:
        print("  the exchange hides behind attention")
    for name, of in errors.items():
        print(
            f"  error on {of['points']} {name} points: median {of['median']:.1%}, "
            f"p95 {of['p95']:.1%}, largest {of['largest']:.1%}"
        )
    flat = flat_rows(points)
    if flat:
        most = max(args.max_tokens_per_rank, 4 * flat)
        print(
            f"  {flat} rows of a rank take hardly less than {2 * flat}: the host is the limit. For "
            f"fuller micro-batches --min-tokens-per-rank {2 * flat} --max-tokens-per-rank {most} "
            "predicts better"
        )
    print(f"wrote {args.out}")


MEANINGS = {
    "pair": "a query-key pair of causal attention, all layers, forward and backward",
    "token": "a token through everything else",
    "exchange": "a token's keys and values received by a rank",
    "exchange_far": "the same in a group that spans nodes",
    "all_to_all": "a token of a rank from sequence to heads and back",
    "all_to_all_far": "the same in a group that spans nodes",
    "step": "one more rank in a group",
    "launch": "a micro-batch, whatever it holds",
    "host": "the least time of a micro-batch: that of one row",
}


def conclude(
    args: argparse.Namespace,
    cells: Sequence[Cell],
    seconds: Sequence[float],
    one_row: float,
    device: str,
    kernels: Mapping[str, str | None],
) -> None:
    """Fit the prices, write them to the file and print a report, on rank 0. ``one_row``: seconds of
    a micro-batch of one row. ``kernels``: the families that computed attention, and their
    versions."""
    from hcp.cli.fit import Point, fit, with_host

    local = int(os.environ.get("LOCAL_WORLD_SIZE", args.ranks))
    points = [
        Point(cell.lengths, cell.degree, cell.degree > local, took)
        for cell, took in zip(cells, seconds, strict=True)
    ]
    apart = held_out(len(points), args.seed)
    fitted = [point for i, point in enumerate(points) if i not in apart]
    found = with_host(fit(fitted, args.cp_comm_type), one_row)
    errors = {
        "held-out": errors_in_words(found, [points[i] for i in sorted(apart)]),
        "fitted": errors_in_words(found, fitted),
    }
    expect_no_doubts(doubts(found, errors, points), args.accept_errors)
    found.cost.save(args.out, provenance(args, device, kernels, errors, points))
    print_report(args, found, errors, device, kernels, points)


# ---- Layers of a model of Transformers' ----------------------------------------------------------


def measure_layers(args: argparse.Namespace) -> None:
    """Measure in this process, write the prices and print them."""
    import torch
    from transformers import AutoConfig

    from hcp.cli.measure import device_name
    from hcp.integrations.transformers import memory

    on_gpu = torch.cuda.is_available() and args.device != "cpu"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    config = AutoConfig.from_pretrained(args.model)
    lengths = rows_of(args.min_tokens_per_rank, args.max_tokens_per_rank)
    found = memory.measure(config, device, getattr(torch, args.dtype), lengths, args.repeats)
    columns = ["tokens", "seconds forward", "seconds backward"]
    measures = {"model type": config.model_type, "columns": columns, "points": found.seconds}
    measures |= {"rows and bytes of a kept layer": found.held}
    found.prices.save(args.out, origin(args, device_name(device)) | measures)
    print(f"one layer of {args.model} on {device_name(device)}, {args.dtype}")
    for name, value in asdict(found.prices).items():
        print(f"  {name:15}{value:>12.4g}  {LAYER_MEANINGS[name]}")
    print(f"wrote {args.out}")


LAYER_MEANINGS = {
    "row_forward": "s: a row in a layer's forward, without attention",
    "row_backward": "s: the same in its backward",
    "pair_forward": "s: a query-key pair of causal attention",
    "pair_backward": "s: the same in its backward",
    "head_row": "s: a row in the head and the loss",
    "parameter": "s: the update of a parameter",
    "host_parameter": "s: the same on the host, with the norm of gradients",
    "host_rate": "bytes/s between device and host",
}


# ---- Ranks ---------------------------------------------------------------------------------------


def run_rank(args: argparse.Namespace) -> None:
    import gc

    import torch.distributed as dist

    from hcp.cli.measure import device_name, kernels_of, measure
    from hcp.tools.programs.ranks import initialize_distributed

    device = initialize_distributed(args)
    try:
        if args.memory:
            from hcp.cli.measure_memory import conclude_memory, measure_memory

            measured = measure_memory(args, device)
            if dist.get_rank() == 0:
                conclude_memory(args, measured, device_name(device))
            return
        cells = grid(args.ranks, args.min_tokens_per_rank, args.max_tokens_per_rank)
        one_row, *seconds = measure(args, [Cell((1,), 1), *cells], device)
        if dist.get_rank() == 0:
            kernels = kernels_of(args.attention_backend, device)
            conclude(args, cells, seconds, one_row, device_name(device), kernels)
    finally:
        gc.collect()
        dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    """Run as one rank if a launcher started this process; else start all ranks."""
    from hcp import HcpError
    from hcp.tools.programs.launch import asks_for_help, fail, require_packages, start_ranks

    argv = list(sys.argv[1:] if argv is None else argv)
    rank = int(os.environ.get("RANK", 0))
    try:
        if not asks_for_help(argv):
            require_packages("calibrate", "torch")
        args = parse_arguments(argv)
        if args.model:
            measure_layers(args)
            return 0
        if "RANK" not in os.environ:
            return start_ranks(args.ranks, ["-m", "hcp.cli.calibrate", *argv], "hcp calibrate")
        run_rank(args)
    except (ValueError, HcpError) as error:
        return fail(error, rank, "hcp calibrate")
    except OSError as error:
        if error.filename is None:
            raise
        return fail(error, rank, "hcp calibrate")
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # As the demo's ranks: what is left of Gloo's threads must not end a finished run with SIGABRT.
    os._exit(code)
