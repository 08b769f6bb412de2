"""Train one model under static and under dynamic CP, each in a job of its own. Compare each step.

    python benchmarks/studies/convergence.py --folder runs/curves \\
        --dtype float64 --train-iters 500 --eval-interval 50

The jobs are `python -m hcp demo` with the arguments that this program does not know: the data, the
model, the batches, and the ranks. They share nothing but those and the seed. --launch names another
command that starts their ranks:

    python benchmarks/studies/convergence.py --folder runs/curves --seeds 2 \\
        --launch "torchrun --nproc-per-node 4 -m hcp.demo" --dtype bfloat16 --train-iters 2000

A job whose results are in the folder is not run again, so that jobs can run one at a time.

--minutes 7 ends after about so many minutes: the jobs that are left share them, and each saves a
checkpoint after its last step. The same command goes on from there, in pieces, until all jobs have
come to their end. Until then it compares the steps that all jobs have done. Checkpoints have 12
bytes for each weight; --checkpoints names another folder for them, so that --folder stays small.

--seeds 2 also trains under static CP from a second seed. How far two seeds are apart is what a
difference between layouts is compared with where rounding is large, as in bfloat16.

It prints a table, and draws curves.png into the folder: losses, their differences by step, and the
losses of evaluations under the training layout and the eval layout. The exit status is 1 where

- with one seed, losses of a step, or its two evaluations, differ by more than --tolerance,
- with more, the mean difference of evaluations is larger between layouts than between seeds.

It is 0 where jobs are left to run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from hcp.tools.programs.draw import pyplot, write_figure

STATIC, DYNAMIC = "static_cp", "dynamic_cp"
LOSS = "loss, dynamic and static CP"
TWO_LAYOUTS = "evaluation under two layouts"
EVALUATION = "evaluation, dynamic and static CP"
SEEDS = "evaluation, two seeds of static CP"
START_SECONDS = 25.0
"""Time of a job in which it does not train: its ranks start, and save at the end."""


class Curve(NamedTuple):
    """What one job wrote down."""

    name: str
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    def values(self, key: str) -> list[float]:
        return [step[key] for step in self.steps]

    def evaluated(self, layout: str) -> tuple[list[int], list[float]]:
        """Steps, and losses after them."""
        found = [each for each in self.evaluations if each["layout"] == layout]
        return [each["iteration"] for each in found], [each["loss"] for each in found]

    def until(self, steps: int) -> Curve:
        """The same, without what came after so many steps."""
        evaluations = [each for each in self.evaluations if each["iteration"] <= steps]
        return self._replace(steps=self.steps[:steps], evaluations=evaluations)


class Job(NamedTuple):
    """A training in a job of its own, and where it writes."""

    scheduler: str
    seed: int
    folder: Path
    checkpoints: Path

    @property
    def ended(self) -> bool:
        return (self.folder / "summary.json").exists()


def main() -> int:
    args, given = arguments()
    seeds = [args.seed + i for i in range(args.seeds)]
    jobs = [job_of(args, STATIC, seed) for seed in seeds] + [job_of(args, DYNAMIC, seeds[0])]
    run_jobs(args, jobs, given)
    curves = [curve_of(each) for each in jobs]
    steps = min(len(curve.steps) for curve in curves)
    *static, dynamic = (curve.until(steps) for curve in curves)
    ended = all(each.ended for each in jobs)
    if not ended:
        done = ", ".join(f"{curve.name}: {len(curve.steps)}" for curve in curves)
        print(f"jobs are left to run; steps so far: {done}. Run the same command again.\n")
    if not static[0].evaluations:
        return 0
    rows = table_rows(static, dynamic)
    print(f"| compared, {steps} steps | largest difference | mean difference |\n|---|---|---|")
    for name, differences in rows.items():
        print(f"| {name} | {max(differences):.2e} | {fmean(differences):.2e} |")
    draw([*static, dynamic], args.folder / "curves.png")
    if not ended:
        return 0
    if args.seeds == 1:
        compared = [name for name in rows if name == LOSS or name.startswith(TWO_LAYOUTS)]
        layouts, allowed = max(max(rows[name]) for name in compared), args.tolerance
    else:
        layouts, allowed = fmean(rows[EVALUATION]), fmean(rows[SEEDS])
    if layouts > allowed:
        print(f"{layouts:.2e} is more than {allowed:.2e}", file=sys.stderr)
    return int(layouts > allowed)


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="of the jobs and the picture")
    parser.add_argument("--seed", type=int, default=1234, help="of weights and batches")
    parser.add_argument("--seeds", type=int, default=1, help="under static CP")
    parser.add_argument(
        "--launch", default="python -m hcp demo", help="what starts the ranks of a job"
    )
    parser.add_argument("--minutes", type=float, help="time for this piece (default: any)")
    parser.add_argument("--checkpoints", type=Path, help="folder (default: that of the jobs)")
    parser.add_argument("--tolerance", type=float, default=1e-9, help="of losses")
    return parser.parse_known_args()


def job_of(args: argparse.Namespace, scheduler: str, seed: int) -> Job:
    name = f"{scheduler}-{seed}"
    return Job(scheduler, seed, args.folder / name, (args.checkpoints or args.folder) / name)


def run_jobs(args: argparse.Namespace, jobs: Sequence[Job], given: Sequence[str]) -> None:
    """Run the jobs that have not ended. Each gets an equal share of the time that is left."""
    left = [each for each in jobs if not each.ended]
    until = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    for i, each in enumerate(left):
        command = [*shlex.split(args.launch), "--no-compare", "--run-dir", str(each.folder)]
        command += ["--sequence-packing-scheduler", each.scheduler, "--seed", str(each.seed)]
        if (each.checkpoints / "checkpoint.pt").exists():
            command += ["--load", str(each.checkpoints)]
        if until is not None:
            share = (until - time.monotonic()) / (len(left) - i)
            minutes = max(share - START_SECONDS, 1.0) / 60
            command += [
                "--save",
                str(each.checkpoints),
                "--exit-duration-in-mins",
                f"{minutes:.3f}",
            ]
        subprocess.run([*command, *given], check=True)


def curve_of(job: Job) -> Curve:
    """Read what a job wrote."""
    lines = [json.loads(line) for line in (job.folder / "metrics.jsonl").read_text().splitlines()]
    kinds = {kind: [x for x in lines if x["kind"] == kind] for kind in ("train", "evaluation")}
    return Curve(f"{job.scheduler}, seed {job.seed}", kinds["train"], kinds["evaluation"])


def table_rows(static: Sequence[Curve], dynamic: Curve) -> dict[str, list[float]]:
    """Differences by step, by what is compared."""
    first = static[0]
    rows = {
        LOSS: apart(first.values("loss"), dynamic.values("loss")),
        "gradient norm, dynamic and static CP": apart(
            first.values("grad_norm"), dynamic.values("grad_norm")
        ),
    }
    for curve in (first, dynamic):
        layouts = [curve.evaluated(layout)[1] for layout in ("training", "eval")]
        rows[f"{TWO_LAYOUTS}, {curve.name}"] = apart(*layouts)
    validated = first.evaluated("training")[1]
    rows[EVALUATION] = apart(validated, dynamic.evaluated("training")[1])
    for other in static[1:]:
        rows["loss, two seeds of static CP"] = apart(first.values("loss"), other.values("loss"))
        rows[SEEDS] = apart(validated, other.evaluated("training")[1])
    return rows


def apart(these: Sequence[float], those: Sequence[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(these, those, strict=True)]


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Draw losses, and below them how far each is from the first."""
    plt = pyplot()
    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=[2, 1], layout="constrained"
    )
    first = curves[0]
    styles = ["-", *[":"] * (len(curves) - 2), "--"]
    for i, (curve, style) in enumerate(zip(curves, styles, strict=True)):
        steps, losses = curve.values("iteration"), curve.values("loss")
        top.plot(steps, losses, style, color=f"C{i}", label=curve.name, linewidth=1.2)
        if curve is not first:
            differences = [max(x, 1e-17) for x in apart(first.values("loss"), losses)]
            bottom.semilogy(steps, differences, color=f"C{i}", linewidth=1)
    for layout, marker in (("training", "o"), ("eval", "x")):
        at, losses = first.evaluated(layout)
        top.plot(at, losses, marker, color="black", label=f"evaluation, {layout} layout")
    top.set_ylabel("loss (nats per byte)")
    top.legend(frameon=False, fontsize=8)
    bottom.set_ylabel(f"|loss - {first.name}|", fontsize=8)
    bottom.set_xlabel("step")
    write_figure(figure, path)
    plt.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
