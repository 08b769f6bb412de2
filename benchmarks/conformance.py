"""Check libraries of context parallelism against attention on one rank, case by case.

    python benchmarks/conformance.py                     hcp and what is installed, on CPU ranks
    python benchmarks/conformance.py --device cuda       on GPUs, one rank each
    python benchmarks/conformance.py --with mine.py --only mine      a library of your own

Every contestant gets the same packs of sequences, on the same ranks, and returns the output of its
rows. The program computes the same attention over whole sequences by the formula, on one rank and
in float64, and compares outputs and gradients. It is a check, not a ranking: a library that refuses
what it does not compute does what it should. `peers/conforming.py` says how a library takes part.

Columns:
  forward    largest error of the output, over the largest element of one rank's output
  backward   the same for the gradients of queries, keys, values and sinks, the worst of them
  verdict    right      errors are rounding: below 1e-6 in float64 and 1e-4 in float32, as some
                        libraries compute float64 in float32, and below 0.03 in bfloat16
             wrong      they are not, or a token is missing or NaN
             refused    an error of the library on some rank, with its words
             crashed    a process ended, or failed inside where nothing was checked (IndexError,
                        KeyError, TypeError, AttributeError)
             no answer  in twice --seconds
             not taken  the library's interface, or this adapter, has no argument for it
             "right forward, refused backward" and the like where the two differ
"""

from __future__ import annotations

import argparse
import runpy
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from common.attention_cases import GRADIENTS, Case, cases, inputs, one_rank
from common.flags import end_after, parser_of
from common.machine import hardware, versions
from common.pool import ENDED, LATE, Failure, Pool
from peers.conforming import CONTESTANTS, Contestant, Job, NotTaken, Part
from torch import Tensor

LIMITS = {"float64": 1e-6, "float32": 1e-4, "bfloat16": 0.03}
UNCHECKED = ("IndexError", "KeyError", "TypeError", "AttributeError", ENDED)
ECHOES = ("gloo/transport", "imed out", "onnection closed", "NCCL error", "Wait timeout")
"""Words of the errors that a rank gets when another one has failed."""
SHOWN = 110
"""Characters of a message in the table."""


# ---- on a rank -----------------------------------------------------------------------------------


def on_rank(
    rank: int,
    size: int,
    device: torch.device,
    name: str,
    case: Case,
    plugins: list[str],
    gradients: bool,
) -> dict[str, Tensor] | str:
    """Return what a contestant computed here, on the CPU and in float64; or why it takes it not."""
    read(plugins)
    whole = {key: x.to(device) for key, x in inputs(case).items()}
    job = Job(case, rank, size, device, whole, gradients)
    try:
        part = CONTESTANTS[name].attend(job)
    except NotTaken as reason:
        return str(reason)
    if gradients and part.out.requires_grad:
        part.out.backward(whole["grad"][part.rows.to(device)].to(part.out.dtype))
    return results(part, gradients)


def results(part: Part, gradients: bool) -> dict[str, Tensor]:
    found = {"rows": part.rows, "out": part.out.detach().double().cpu()}
    if gradients:
        for name, leaf in zip(GRADIENTS, part.leaves, strict=False):
            grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            found[name] = grad.double().cpu()
    return found


def read(plugins: Iterable[str]) -> None:
    for plugin in plugins:
        runpy.run_path(plugin)


# ---- one case of one contestant ------------------------------------------------------------------


def judged(pool: Pool, contestant: Contestant, case: Case, args: argparse.Namespace) -> list[str]:
    """Return the cells forward, backward and verdict."""
    if case.dtype not in contestant.dtypes:
        return ["", "", f"not taken: {case.dtype}"]
    both = answers(pool, contestant, case, args, gradients=True)
    if isinstance(both, str):
        return ["", "", f"not taken: {both}"]
    if not isinstance(both, Failure):
        errors = errors_of(case, both)
        forward = errors.pop("out")
        return [f"{forward:.1e}", f"{max(errors.values()):.1e}", verdict(case, forward, errors)]
    alone = answers(pool, contestant, case, args, gradients=False)
    if isinstance(alone, str | Failure):
        return ["", "", said(both)]
    forward = errors_of(case, alone)["out"]
    word = "right" if forward <= LIMITS[case.dtype] else "wrong"
    return [f"{forward:.1e}", "", f"{word} forward, backward {said(both)}"]


def answers(
    pool: Pool, contestant: Contestant, case: Case, args: argparse.Namespace, *, gradients: bool
) -> list[dict[str, Tensor]] | Failure | str:
    """Return the parts of all ranks, the failure that says most, or why a case is not taken."""
    given = (contestant.name, case, args.plugins, gradients)
    found = pool.run(on_rank, *given, seconds=args.seconds)
    failures = [each for each in found if isinstance(each, Failure)]
    if failures:
        return min(failures, key=_echoes)
    reasons = [each for each in found if isinstance(each, str)]
    return reasons[0] if reasons else found


def _echoes(failure: Failure) -> tuple[bool, bool]:
    """Order failures: those of ranks that lost another one, or waited for it, come last."""
    return failure.kind == LATE, any(word in failure.message for word in ECHOES)


def errors_of(case: Case, parts: list[dict[str, Tensor]]) -> dict[str, float]:
    """Return the largest relative error of the output and of each gradient."""
    expected = one_rank(case)
    rows = torch.cat([part["rows"] for part in parts])
    real = case.real()
    if Counter(rows[torch.isin(rows, real)].tolist()) != Counter(real.tolist()):
        return dict.fromkeys(expected if "dquery" in parts[0] else ["out"], float("inf"))
    errors = {}
    for name in expected:
        if name not in parts[0]:
            continue
        if name == "dsinks":
            found = torch.stack([part[name] for part in parts]).sum(0)
            errors[name] = relative(found, expected[name])
            continue
        found = torch.zeros_like(expected[name])
        found[rows] = torch.cat([part[name] for part in parts])
        errors[name] = relative(found[real], expected[name][real])
    return errors


def relative(found: Tensor, expected: Tensor) -> float:
    if not torch.isfinite(found).all():
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max())


def verdict(case: Case, forward: float, backward: dict[str, float]) -> str:
    limit = LIMITS[case.dtype]
    off = [name for name, error in {"forward": forward, **backward}.items() if not error <= limit]
    return f"wrong: {', '.join(off)}" if off else "right"


def said(failure: Failure) -> str:
    if failure.kind == LATE:
        return failure.message
    first = " ".join(failure.message.split())
    words = first if len(first) <= SHOWN else f"{first[: SHOWN - 3]}..."
    word = "crashed" if failure.kind in UNCHECKED else "refused"
    return f"{word}: {failure.kind}: {words}".replace("|", "/")


# ---- the program ---------------------------------------------------------------------------------


def main() -> None:
    args = arguments()
    read(args.plugins)
    end_after(args.deadline)
    chosen = [each for name, each in CONTESTANTS.items() if not args.only or wanted(name, args)]
    if not chosen:
        raise SystemExit(f"--only is {args.only}, expected words of {', '.join(CONTESTANTS)}")
    print(f"# Conformance of context parallelism, {args.ranks} ranks, {hardware(args.device)}")
    print("# " + ", ".join(f"{name} {number}" for name, number in versions().items()))
    print("\n| library | version | case | forward | backward | verdict |")
    print("|---|---|---|---|---|---|", flush=True)
    faults = [each for each in chosen if not table_of(each, args)]
    if any(each.module == "hcp" for each in faults):
        raise SystemExit(f"not right or not taken: {', '.join(each.name for each in faults)}")


def table_of(contestant: Contestant, args: argparse.Namespace) -> bool:
    """Print the rows of one contestant. Returns whether none is wrong, crashed or refused."""
    obstacle = contestant.obstacle(args.device, args.ranks)
    if obstacle is not None:
        show(args, contestant, "all", ["", "", obstacle])
        return True
    pool, fine = Pool(args.ranks, args.device), True
    for case in cases(args.ranks):
        if args.cases and not any(word in case.name for word in args.cases):
            continue
        cells = judged(pool, contestant, case, args)
        fine = fine and cells[2].partition(":")[0] in ("right", "not taken")
        show(args, contestant, case.name, cells)
    pool.end()
    return fine


def show(args: argparse.Namespace, contestant: Contestant, case: str, cells: list[str]) -> None:
    cells = [contestant.name, contestant.version or "", case, *cells]
    print(f"| {' | '.join(cells)} |", flush=True)
    names = ("library", "version", "case", "forward", "backward", "verdict")
    args.json.add({"ranks": args.ranks, **dict(zip(names, cells, strict=True))})


def wanted(name: str, args: argparse.Namespace) -> bool:
    return any(word in name for word in args.only)


def arguments() -> Any:
    parser = parser_of(
        __doc__,
        device="cpu",
        rounds=1,
        rounds_help="(not used: nothing is timed)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, help="(CPU: 4, CUDA: one for each GPU)")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="in contestants' names"
    )
    parser.add_argument("--cases", nargs="+", default=[], metavar="WORD", help="in cases' names")
    parser.add_argument(
        "--with", dest="plugins", nargs="+", default=[], metavar="FILE", help="more contestants"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="for one case (%(default)s)")
    args = parser.parse_args()
    if args.ranks is None:
        args.ranks = 4 if args.device == "cpu" else torch.cuda.device_count()
    args.plugins = [str(Path(plugin).resolve()) for plugin in args.plugins]
    return args


if __name__ == "__main__":
    main()
