"""Write a run's metrics.jsonl, summary.json, loss.png, plan.svg and table. Only rank 0 writes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hcp._files import write_file
from hcp.planning.plan import Plan
from hcp.tools.drawing import timeline_svg
from hcp.tools.programs.draw import pyplot, write_figure
from hcp.tools.programs.files import append_to_file, expect_writable
from hcp.tools.programs.progress import progress
from hcp.tools.programs.run_records import (
    NAMES,
    Evaluation,
    RunRecord,
    StepRecord,
    loss_difference,
    planning_text,
)

if TYPE_CHECKING:
    import hcp

COLOURS = {"static_cp": "tab:blue", "dynamic_cp": "tab:orange"}
EVALUATION_TOLERANCES = {"float64": 1e-6, "float32": 1e-6, "bfloat16": 1e-3}
"""The largest difference between the losses of two layouts that is rounding, by dtype."""


# ---- What was measured ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DemoStep(StepRecord):
    """A training step with the numbers of its plan."""

    iteration: int
    """Counted from 1."""
    padding_rows: int
    """Rows that the ranks computed beyond the batch's tokens."""
    work: int
    """Rank-time of the batch without context parallelism, in the cost model's unit."""
    bound: int
    """A lower bound for every plan, of any degrees."""
    makespan: int
    """The busiest rank's time in the plan."""


@dataclass
class Run(RunRecord[DemoStep]):
    ranks: int = 1
    first_plan: Plan | None = None
    evaluations: list[tuple[Evaluation, Evaluation]] = field(default_factory=list)
    """Pairs of evaluations: under the training layout, and under the eval layout."""

    @property
    def efficiency(self) -> float:
        span = sum(step.makespan for step in self.steps)
        return sum(step.work for step in self.steps) / (self.ranks * span) if span else 1.0

    @property
    def padding_rows(self) -> int:
        return sum(step.padding_rows for step in self.steps)

    def summary(self) -> dict[str, Any]:
        return {
            "first_loss": self.steps[0].loss,
            "last_loss": self.steps[-1].loss,
            "tokens_per_second": self.tokens_per_second,
            "plan_efficiency": self.efficiency,
            "micro_batches_per_step": self.micro_batches,
            "plan_seconds": self.planning.seconds,
            "plan_waited": self.planning.waited,
            "padding_rows": self.padding_rows,
            "evaluations": [
                [asdict(evaluation) for evaluation in both] for both in self.evaluations
            ],
            "evaluation_difference": self.evaluation_difference,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return it as values that torch.load takes by weights_only."""
        plan = self.first_plan
        return {
            "steps": [asdict(step) for step in self.steps],
            "evaluations": [[asdict(each) for each in both] for both in self.evaluations],
            "first_plan": None if plan is None else json.dumps(plan.to_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = [DemoStep(**step) for step in state["steps"]]
        self.evaluations = [
            (Evaluation(**trained), Evaluation(**other)) for trained, other in state["evaluations"]
        ]
        plan = state["first_plan"]
        self.first_plan = None if plan is None else Plan.from_dict(json.loads(plan))

    @property
    def evaluation_difference(self) -> float:
        """The largest difference of losses between the two layouts."""
        return max(abs(trained.loss - other.loss) for trained, other in self.evaluations)


# ---- Reporter ------------------------------------------------------------------------------------


class Reporter:
    """Writes the report during a run and at its end. On other ranks than 0 it does nothing."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self.args = args
        self.active = rank == 0
        self.bar: Any = None
        self.setting: dict[str, Any] = {}
        if self.active:
            self.folder = make_folder(args.run_dir)
            self.metrics = self.folder / "metrics.jsonl"
            expect_writable("run_dir", self.metrics)

    def start(
        self,
        description: str,
        parameters: int,
        device: torch.device,
        groups: hcp.ProcessGroups,
        eval_groups: hcp.ProcessGroups,
        why: str = "",
    ) -> None:
        """Print the setting; `why` says how the eval layout was chosen."""
        if not self.active:
            return
        args = self.args
        limit = args.config.max_seqlen_per_dp_cp_rank
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        trained, other = (f"cp {g.size('cp')} x dp {g.size('dp')}" for g in (groups, eval_groups))
        print(description)
        print(f"GPT of {parameters / 1e6:.2f} M parameters, {args.dtype}, on {args.ranks} x {name}")
        print(f"layouts: training {trained} with at most {limit:,} tokens on a rank, eval {other}")
        if why:
            print(f"eval layout: {why}")
        sys.stdout.flush()
        steps = args.train_iters * (2 if args.compare else 1)
        self.bar = progress(steps, "training", "step")
        self.setting = {
            "arguments": {
                name: value for name, value in vars(self.args).items() if name != "config"
            },
            "data": description.split("\n"),
            "parameters": parameters,
            "device": name,
            "python": platform.python_version(),
            "torch": torch.__version__,
        }

    def begin(self, metrics: str, steps: int) -> None:
        """Begin after so many steps of all runs together, whose lines are ``metrics``."""
        if self.active:
            write_file(self.metrics, metrics)
            self.bar.initial = self.bar.n = steps

    def stopped(self, runs: Sequence[Run]) -> None:
        """Say that the time was up."""
        if self.active:
            done, of = len(runs[0].steps), self.args.train_iters
            print(f"\nstopped after step {done} of {of}: go on with --load {self.args.save}")

    def step(self, run: Run) -> None:
        if not self.active:
            return
        step = run.steps[-1]
        self.bar.set_postfix_str(f"{NAMES[run.scheduler]}, loss {step.loss:.4f}", refresh=False)
        self.bar.update()
        if len(run.steps) == 1:
            self.bar.refresh()  # the first results at once
        if step.iteration % self.args.log_interval == 0 or step.iteration == self.args.train_iters:
            self.write(
                "train",
                run.scheduler,
                {**asdict(step), "tokens_per_second": step.tokens_per_second},
            )
        if self.bar.n == self.bar.total:
            self.bar.close()

    def evaluation(self, run: Run) -> None:
        if not self.active:
            return
        for layout, evaluation in zip(("training", "eval"), run.evaluations[-1], strict=True):
            self.write(
                "evaluation",
                run.scheduler,
                {"iteration": run.steps[-1].iteration, "layout": layout, **asdict(evaluation)},
            )

    def write(self, kind: str, scheduler: str, values: dict[str, Any]) -> None:
        line = json.dumps({"kind": kind, "run": scheduler, **values})
        append_to_file(self.metrics, line + "\n")

    def finish(self, runs: Sequence[Run]) -> None:
        if not self.active:
            return
        summary: dict[str, Any] = {
            **self.setting,
            "runs": {run.scheduler: run.summary() for run in runs},
        }
        if len(runs) > 1:
            summary["largest_loss_difference"] = loss_difference(runs)
            summary["speedup"] = runs[-1].tokens_per_second / runs[0].tokens_per_second
        write_file(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        files = ["metrics.jsonl", "summary.json", "plan.svg"]
        if importlib.util.find_spec("matplotlib") is not None:
            draw_losses(runs, self.folder / "loss.png")
            files.insert(2, "loss.png")
        firsts = {NAMES[run.scheduler]: run.first_plan for run in runs if run.first_plan}
        write_file(self.folder / "plan.svg", timeline_svg(firsts))
        print("\n" + table(runs, EVALUATION_TOLERANCES[self.args.dtype]))
        no_picture = "" if "loss.png" in files else "; loss.png needs: pip install matplotlib"
        print(f"\n{self.folder}: {', '.join(files)}{no_picture}", flush=True)


def make_folder(asked: str | None) -> Path:
    """Make the folder that was asked for, or a new one under runs/ named after the time."""
    if asked is not None:
        folder = Path(asked)
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    name = time.strftime("demo-%Y%m%d-%H%M%S")
    for attempt in range(1, 100):
        folder = Path("runs", name if attempt == 1 else f"{name}-{attempt}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
    raise FileExistsError(f"runs{os.sep}{name} and its numbered siblings all exist: give --run-dir")


# ---- Table ---------------------------------------------------------------------------------------


def table(runs: Sequence[Run], tolerance: float) -> str:
    """Return the comparison as a table: a column for each run, and one for remarks."""
    rows = [("", [NAMES[run.scheduler] for run in runs], ""), *table_rows(runs, tolerance)]
    label_width = max(len(label) for label, _, _ in rows)
    value_width = max(len(value) for _, values, _ in rows for value in values)
    lines = []
    for label, values, note in rows:
        cells = "".join(f"  {value:>{value_width}}" for value in values)
        lines.append(f"{label:{label_width}}{cells}  {note}".rstrip())
    lines.insert(1, "-" * max(len(line) for line in lines))
    return "\n".join(lines)


def table_rows(runs: Sequence[Run], tolerance: float) -> Iterator[tuple[str, list[str], str]]:
    compared = len(runs) > 1
    difference = f"largest difference {loss_difference(runs):.1e}" if compared else ""
    ratio = f"x {runs[-1].tokens_per_second / runs[0].tokens_per_second:.2f}" if compared else ""
    yield "loss, first step", [f"{run.steps[0].loss:.4f}" for run in runs], ""
    yield "loss, last step", [f"{run.steps[-1].loss:.4f}" for run in runs], difference
    yield "tokens/s", [f"{run.tokens_per_second:,.0f}" for run in runs], ratio
    yield "plan efficiency", [f"{run.efficiency:.2f}" for run in runs], "work / (ranks x makespan)"
    yield "micro-batches in a step", [f"{run.micro_batches:.1f}" for run in runs], ""
    planning = [planning_text(run.planning) for run in runs]
    yield "planning a step, hidden", planning, "the share that no step waited for"
    yield "padding rows", [f"{run.padding_rows:,}" for run in runs], ""
    finals = [run.evaluations[-1] for run in runs]
    for i, layout in enumerate(("training", "eval")):
        first = finals[0][i]
        yield (
            f"evaluation, {layout} layout",
            [f"{final[i].loss:.6f}" for final in finals],
            f"cp {first.cp} x dp {first.dp}:"
            f" {first.documents:,} documents, {first.tokens:,} tokens",
        )
    differences = [run.evaluation_difference for run in runs]
    verdict = "the layouts agree" if max(differences) <= tolerance else "THE LAYOUTS DISAGREE"
    yield (
        "difference of layouts",
        [f"{value:.1e}" for value in differences],
        f"{verdict} to {tolerance:.0e}",
    )


# ---- Pictures ------------------------------------------------------------------------------------


def draw_losses(runs: Sequence[Run], path: Path) -> None:
    """Draw the losses of all runs, and below them the difference of the first two."""
    plt = pyplot()
    figure, axes = plt.subplots(
        len(runs), 1, sharex=True, squeeze=False, figsize=(7, 2.5 + 1.5 * len(runs)),
        gridspec_kw={"height_ratios": [3, 1][: len(runs)]}, layout="constrained",
    )  # fmt: skip
    top = axes[0, 0]
    for run, style in zip(runs, ("-", "--"), strict=False):
        iterations = [step.iteration for step in run.steps]
        losses = [step.loss for step in run.steps]
        top.plot(
            iterations,
            losses,
            style,
            color=COLOURS[run.scheduler],
            label=NAMES[run.scheduler],
            linewidth=2,
        )
    top.set_ylabel("loss (nats per byte)")
    top.legend(frameon=False)
    if len(runs) > 1:
        differences = [
            abs(a.loss - b.loss) for a, b in zip(runs[0].steps, runs[1].steps, strict=True)
        ]
        axes[1, 0].semilogy(iterations, [max(d, 1e-16) for d in differences], "k.-")
        axes[1, 0].set_ylabel("|difference|")
    axes[-1, 0].set_xlabel("step")
    axes[-1, 0].xaxis.get_major_locator().set_params(integer=True)
    write_figure(figure, path)
    plt.close(figure)
