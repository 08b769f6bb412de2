"""TensorBoard's writer for tests of trainers that make one themselves: it prints what is written.

`take_place` before the trainer is imported, then `scalars` of the output.
"""

from __future__ import annotations

import re
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from hcp.step.stats import StepStats

METRICS = {f"hcp/{name}" for name in (*StepStats._fields, "plan_hidden")}


class SummaryWriter:
    def __init__(self, *given: Any, **options: Any) -> None:
        pass

    def add_scalar(self, name: str, value: Any, step: int, *others: Any, **options: Any) -> None:
        print(f"SCALAR {step} {float(value)!r} {name}", flush=True)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *given, **options: None


def take_place() -> None:
    """Let imports of TensorBoard's writer find the one above, installed or not."""
    module = types.ModuleType("torch.utils.tensorboard")
    vars(module)["SummaryWriter"] = SummaryWriter
    for name in ("torch.utils.tensorboard", "torch.utils.tensorboard.writer"):
        sys.modules[name] = module


def scalars(out: str) -> dict[int, dict[str, float]]:
    """What hcp wrote of each step, by name."""
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for step, value, name in re.findall(r"^SCALAR (\d+) (\S+) (hcp/\w+)$", out, re.MULTILINE):
        assert name not in found[int(step)], f"{name} was written twice in step {step}"
        found[int(step)][name] = float(value)
    return dict(found)


def check(written: dict[str, float], sequences: int, ranks: int) -> None:
    """All of hcp's metrics are there, and say what the step was."""
    assert written.keys() == METRICS
    assert written["hcp/sequences"] == sequences
    assert 0 < written["hcp/efficiency"] <= 1
    assert 0 <= written["hcp/idle_share"] < 1
    assert 0 <= written["hcp/plan_hidden"] <= 1
    assert 1 <= written["hcp/mean_degree"] <= written["hcp/largest_degree"] <= ranks
    assert written["hcp/layer_bytes"] >= 0
