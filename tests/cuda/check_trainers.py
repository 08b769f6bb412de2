"""Trainers with hcp and without, on the GPUs of one host: the same losses, tokens per second.

    python tests/cuda/check_trainers.py --trainers transformers accelerate lightning deepspeed

Each trainer trains a Llama of random weights with sharded parameters, in bfloat16 with the kernels
that `auto` chooses, in up to five runs:

    alone     without hcp, on one rank, one document after the other
    one rank  with hcp, on one rank
    dynamic   with hcp on all ranks, dynamic CP
    static    with hcp on all ranks, static CP
    own CP    without hcp, under the trainer's own context parallelism over all ranks, for
              Transformers and Accelerate (ParallelismConfig(cp_size=)) and torchtitan, on GPUs

The losses of every step must agree. Those of "own CP" are not hcp's: how far they are off is said,
as is a failure, and neither fails the check. On one GPU the first two runs remain. torchtitan
trains rows of one document, all of one length. "megatron" runs
benchmarks/bench_megatron.py, which compares Megatron-Core's own CP by Transformer Engine with hcp.

--runs leaves some out, but never "one rank": "alone" and "own CP" took four fifths of the time on
two H200s.

More --ranks than GPUs share them, which says nothing about speed. --device cpu runs toys in float32
over Gloo, with DDP where the trainer shards on GPUs only. The last line of each trainer is its row
of the table, or says which package is not installed; the exit code is 1 if one failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trainers_alone import ALONE, OWN_CP
from trainers_titan import tokens_of
from trainers_with_hcp import WITH_HCP
from trainers_work import WORK, Timed, documents

import hcp

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from common.torchrun import started  # noqa: E402

PACKAGES = {
    "transformers": ("transformers", "accelerate"),
    "accelerate": ("accelerate", "transformers"),
    "lightning": ("lightning", "transformers"),
    "deepspeed": ("deepspeed", "transformers"),
    "torchtitan": ("torchtitan", "triton"),
    "megatron": ("megatron.core",),
}
"""What each trainer needs."""
RUNS: dict[str, Any] = {
    "alone": None,
    "one rank": "dynamic_cp",
    "dynamic": "dynamic_cp",
    "static": "static_cp",
    "own CP": None,
}
"""Runs of a trainer, and hcp's scheduler in them."""

# ---- one run, as a rank --------------------------------------------------------------------------


def run(trainer: str, name: str, device: str, file: Path) -> None:
    """Train as a rank of torchrun. Rank 0 writes losses and tokens per second into the file."""
    cuda, work, ranks = device == "cuda", WORK[device], int(os.environ["WORLD_SIZE"])
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"
    dist.init_process_group("nccl" if cuda else "gloo")
    timed = Timed([], [])
    if RUNS[name] is None:
        ALONE[trainer](work, cuda, timed)
    else:
        limit = work.longest if ranks == 1 else -(-work.longest * 3 // (2 * ranks))
        config = hcp.Config(
            sequence_packing_scheduler=RUNS[name],
            max_seqlen_per_dp_cp_rank=limit,
            context_parallel_size=ranks if name == "static" else None,
        )
        WITH_HCP[trainer](work, config, cuda, timed)
    if trainer == "torchtitan":
        tokens = tokens_of(work)
    else:
        tokens = sum(len(each["input_ids"]) for each in documents(work))
    if dist.get_rank() == 0:
        speed = tokens / work.steps / timed.seconds()
        file.write_text(json.dumps({"losses": timed.losses, "tokens_per_s": speed}))
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a thread of a trainer's may outlive its group for a moment


# ---- all runs ------------------------------------------------------------------------------------


def compare(trainer: str, ranks: int, args: argparse.Namespace, folder: Path) -> bool:
    """Run a trainer in every way, print its row, and return whether its losses agree."""
    device = args.device
    found: dict[str, Any] = {}
    for name in runs_of(trainer, ranks, device):
        if name not in (*args.runs, "one rank"):
            continue
        file = folder / f"{trainer}-{name.replace(' ', '-')}.json"
        program = [__file__, "--device", device, "--as-rank", trainer, name, str(file)]
        own = 1 if name in ("alone", "one rank") else ranks
        code = ended(own, device, program, file.with_suffix(".log"), args.limit_s)
        if code == 0 and file.exists():
            found[name] = json.loads(file.read_text())
            continue
        print(file.with_suffix(".log").read_text()[-3000:])
        print(f"{'-- ' if name == 'own CP' else 'BAD'} {trainer:14} {name}: exit code {code}")
        if name != "own CP":
            return False
    return told(trainer, found, device)


def runs_of(trainer: str, ranks: int, device: str) -> list[str]:
    """The names of a trainer's runs. What is left out for want of GPUs is said."""
    if ranks == 1:
        print(f"-- {trainer:14} dynamic, static, own CP: one rank, expected 2 or more: skipped")
        return ["alone", "one rank"]
    if trainer not in OWN_CP:
        print(f"-- {trainer:14} own CP: this trainer has none for these models: skipped")
    elif device == "cpu":
        print(f"-- {trainer:14} own CP: PyTorch's context_parallel needs GPUs: skipped")
    else:
        return list(RUNS)
    return [name for name in RUNS if name != "own CP"]


def told(trainer: str, found: dict[str, Any], device: str) -> bool:
    """Print a trainer's row. Return whether the losses of all runs but "own CP" agree."""
    work, expected = WORK[device], found["one rank"]["losses"]
    off = {
        name: max(abs(a - b) for a, b in zip(each["losses"], expected, strict=True))
        for name, each in found.items()
    }
    own = off.pop("own CP", None)
    good = max(off.values()) <= work.apart and len(expected) == work.steps
    speeds = "  ".join(f"{name} {each['tokens_per_s']:9.0f}" for name, each in found.items())
    print(
        f"{'ok ' if good else 'BAD'} {trainer:14} losses {expected[0]:.4f} to {expected[-1]:.4f}, "
        f"apart by {max(off.values()):.1e}{'' if own is None else f' (own CP {own:.1e})'}  "
        f"tokens/s: {speeds}",
        flush=True,
    )
    return good


def megatron(ranks: int, device: str, limit_s: float, folder: Path) -> bool:
    """Run the benchmark of Megatron-Core. Print its table."""
    log = folder / "megatron.log"
    if device == "cuda" and missing("transformer_engine"):
        print("-- megatron       own CP: transformer_engine is not installed: skipped")
        given = ["--te"]
    else:
        given = []
    bench = str(ROOT / "benchmarks" / "bench_megatron.py")
    program = [bench, "--device", device, "--families", "P2", *given]
    code = ended(ranks, device, program, log, limit_s)
    lines = log.read_text().splitlines()
    print(*lines[-16:] if code == 0 else lines[-40:], sep="\n")
    print(f"{'BAD' if code else 'ok '} megatron       bench_megatron.py: exit code {code}")
    return code == 0


def ended(ranks: int, device: str, program: Sequence[str], log: Path, limit_s: float) -> int | None:
    """Run a program of several ranks, its output in the file. Return its exit code, None if it took
    too long. Ranks that are more than the GPUs share these, each as a host of its own to NCCL."""
    shared = device == "cuda" and ranks > torch.cuda.device_count()
    nodes = [str(Path(__file__).with_name("as_nodes.py")), str(ranks)] if shared else []
    try:
        with (
            log.open("w") as to,
            started(ranks, *nodes, *program, stdout=to, stderr=to) as torchrun,
        ):
            return torchrun.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None


def missing(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is None
    except ModuleNotFoundError:  # of a package inside another one
        return True


def check(trainer: str, args: argparse.Namespace, folder: Path) -> bool:
    """Run a trainer if it is installed, and say which of its packages is not."""
    absent = [name for name in PACKAGES[trainer] if missing(name)]
    if absent:
        print(f"-- {trainer:14} {', '.join(absent)}: not installed: skipped", flush=True)
        return True
    ranks = args.ranks or (torch.cuda.device_count() if args.device == "cuda" else 2)
    if trainer == "megatron":
        return megatron(ranks, args.device, 2 * args.limit_s, folder)
    return compare(trainer, ranks, args, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--trainers", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    parser.add_argument("--ranks", type=int, help="default: every GPU; 2 on a CPU")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="some of them")
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds of each run")
    parser.add_argument("--as-rank", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        logging.getLogger("hcp").setLevel(logging.ERROR)
        trainer, name, file = args.as_rank
        run(trainer, name, args.device, Path(file))
    if args.device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share few cores
    folder = Path(os.environ.get("OUT") or tempfile.mkdtemp())
    print(f"torch {torch.__version__}, logs in {folder}", flush=True)
    good = [check(trainer, args, folder) for trainer in args.trainers]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
