"""Train one model under static and under dynamic CP, each in a job of its own. Compare each step.

    python benchmarks/studies/convergence.py --folder runs/curves \\
        --dtype float64 --train-iters 500 --eval-interval 50

The jobs are `python -m hcp demo` with the arguments that this program does not know: the data, the
model, the batches, and the ranks. They share nothing but those and the seed. --seeds 2 also trains
under static CP from a second seed: how far two seeds are apart is what a difference between
layouts may be compared with.

A job whose results are in the folder is not run again.

It prints a table, and draws curves.png into the folder: losses, their differences by step, and the
losses of evaluations under the training layout and the eval layout. The exit status is 1 where
losses of a step, or its two evaluations, differ by more than --tolerance.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hcp.programs.draw import pyplot

STATIC, DYNAMIC = "static_cp", "dynamic_cp"


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


def main() -> int:
    args, job = arguments()
    seeds = [args.seed + i for i in range(args.seeds)]
    static = [curve_of(args.folder, STATIC, seed, job) for seed in seeds]
    dynamic = curve_of(args.folder, DYNAMIC, seeds[0], job)
    rows = table_rows(static, dynamic)
    print("| compared | largest difference | mean difference |\n|---|---|---|")
    for name, differences in rows.items():
        mean = sum(differences) / len(differences)
        print(f"| {name} | {max(differences):.2e} | {mean:.2e} |")
    draw([*static, dynamic], args.folder / "curves.png")
    compared = ("loss, dynamic", "evaluation")
    worst = max(max(rows[name]) for name in rows if name.startswith(compared))
    if worst > args.tolerance:
        print(f"{worst:.2e} is more than {args.tolerance:.0e}", file=sys.stderr)
    return int(worst > args.tolerance)


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="of the jobs and the picture")
    parser.add_argument("--seed", type=int, default=1234, help="of weights and batches")
    parser.add_argument("--seeds", type=int, default=1, help="under static CP")
    parser.add_argument("--tolerance", type=float, default=1e-9, help="of losses")
    return parser.parse_known_args()


def curve_of(folder: Path, scheduler: str, seed: int, job: Sequence[str]) -> Curve:
    """Run a job, unless it was run, and read what it wrote."""
    own = folder / f"{scheduler}-{seed}"
    if not (own / "summary.json").exists():
        command = [sys.executable, "-m", "hcp", "demo", "--no-compare", "--run-dir", str(own)]
        command += ["--sequence-packing-scheduler", scheduler, "--seed", str(seed), *job]
        subprocess.run(command, check=True)
    lines = [json.loads(line) for line in (own / "metrics.jsonl").read_text().splitlines()]
    kinds = {kind: [x for x in lines if x["kind"] == kind] for kind in ("train", "evaluation")}
    return Curve(f"{scheduler}, seed {seed}", kinds["train"], kinds["evaluation"])


def table_rows(static: Sequence[Curve], dynamic: Curve) -> dict[str, list[float]]:
    """Differences by step, by what is compared."""
    first = static[0]
    rows = {
        "loss, dynamic and static CP": apart(first.values("loss"), dynamic.values("loss")),
        "gradient norm, dynamic and static CP": apart(
            first.values("grad_norm"), dynamic.values("grad_norm")
        ),
    }
    for curve in (first, dynamic):
        layouts = [curve.evaluated(layout)[1] for layout in ("training", "eval")]
        rows[f"evaluation under two layouts, {curve.name}"] = apart(*layouts)
    for other in static[1:]:
        rows["loss, two seeds of static CP"] = apart(first.values("loss"), other.values("loss"))
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
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
