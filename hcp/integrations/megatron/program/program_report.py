"""The table that a run prints at its end."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hcp.integrations.megatron.versions import require_megatron
from hcp.tools.programs.run_records import (
    NAMES,
    Evaluation,
    RunRecord,
    StepRecord,
    loss_difference,
    planning_text,
)


@dataclass
class Run(RunRecord[StepRecord]):
    evaluations: list[Evaluation] = field(default_factory=list)
    """Two evaluations: under the training layout, and under the eval layout."""

    @property
    def efficiency(self) -> float:
        return sum(step.efficiency for step in self.steps) / len(self.steps)

    def line(self) -> str:
        step = self.steps[-1]
        return (
            f"{NAMES[self.scheduler]} step {len(self.steps)}: loss {step.loss:.6f}, norm "
            f"{step.grad_norm:.4f}, {step.micro_batches} micro-batches, "
            f"{step.tokens_per_second:,.0f} tokens/s"
        )


def report(
    args: argparse.Namespace, device: torch.device, data: str, parameters: int, runs: Sequence[Run]
) -> str:
    """Return the table, with a column for each run."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    lines = [
        "",
        f"Megatron-Core {require_megatron()}, {args.ranks} ranks on {name}, tensor "
        f"{args.tensor_model_parallel_size} x pipeline {args.pipeline_model_parallel_size} x "
        f"domain {args.domain}, {parameters:,} parameters on rank 0",
        data,
        "",
        f"{'':28}" + "".join(f"{NAMES[run.scheduler]:>14}" for run in runs),
        "-" * (28 + 14 * len(runs)),
    ]
    rows = {
        "loss, first step": [f"{run.steps[0].loss:.4f}" for run in runs],
        "loss, last step": [f"{run.steps[-1].loss:.4f}" for run in runs],
        "tokens/s": [f"{run.tokens_per_second:,.0f}" for run in runs],
        "plan efficiency": [f"{run.efficiency:.2f}" for run in runs],
        "micro-batches in a step": [f"{run.micro_batches:.1f}" for run in runs],
        "planning a step, hidden": [planning_text(run.planning) for run in runs],
        "evaluation, training layout": [f"{run.evaluations[0].loss:.6f}" for run in runs],
        "evaluation, eval layout": [f"{run.evaluations[1].loss:.6f}" for run in runs],
    }
    lines += [f"{label:28}" + "".join(f"{v:>14}" for v in values) for label, values in rows.items()]
    if len(runs) == 2:
        static, dynamic = runs
        ratio = dynamic.tokens_per_second / static.tokens_per_second
        lines += ["", f"dynamic / static tokens per second: {ratio:.2f}"]
        lines += [f"largest difference of losses: {loss_difference(runs):.1e}"]
    first = runs[0].evaluations
    lines += [
        f"evaluated {e.documents} documents, {e.tokens:,} loss tokens, under cp {e.cp} x dp {e.dp}"
        for e in first
    ]
    return "\n".join(lines)
