"""A training step and an evaluation, for tests of the ranges that name their parts.

`python -m support.ranges` runs them on a GPU under torch's `emit_nvtx`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch

import hcp
from hcp.step.dispatch import StepTransport

TRAINING = {
    "hcp: gather_lengths",
    "hcp: plan",
    "hcp: dispatch",
    "hcp: attention",
    "hcp: attention backward",
    "hcp: exchange",
    "hcp: combine",
    "hcp: loss",
}
EVALUATION = {"hcp: rebind", "hcp: evaluate", "hcp: restore"}


def run_step(groups: Any, within: AbstractContextManager[Any], device: str = "cpu") -> None:
    """Run two micro-batches on two ranks, in turn. The first rank is within the context."""

    def make(share: Any, step_transport: StepTransport) -> hcp.Step:
        lengths, sources, samples = hcp.gather_lengths(share, step_transport)
        plan = hcp.plan(lengths, ranks=2, max_tokens_per_rank=8, min_degree=2)
        return hcp.dispatch(plan, samples, sources, groups, step_transport=step_transport)

    def train() -> None:
        config = hcp.Config(max_seqlen_per_dp_cp_rank=8, plan_ahead=0)
        sample = {"x": torch.randn(10, 2, 8, device=device), "loss_mask": torch.ones(10)}
        shares = [[{name: field.to(device) for name, field in sample.items()}]]
        for step in hcp.planned_steps(shares, make, groups, config):
            for cp, local in step:
                x = local["x"].requires_grad_()
                out = cp.attention(x, x, x)
                cp.combine(out.detach())
                cp.loss(out.sum((1, 2)), local["loss_mask"], grad_reduce="sum").backward()

    if groups.rank("dp_cp") != 0:
        train()
        return
    with within:
        train()


def evaluate() -> None:
    """Swap an object of a model, evaluate two micro-batches, and restore, on one rank."""
    groups, old, new = hcp.build_process_groups(), Group(), Group()
    model = SimpleNamespace(group=old)
    with hcp.rebind(model, {old: new}):
        assert model.group is new
        for batch in hcp.EvalPlan(3, groups, micro_batch_size=2).batches(range(3)):
            assert len(batch.weights) == 2
    assert model.group is old


class Group:
    """Stands for a process group."""


def main() -> None:
    within = torch.autograd.profiler.emit_nvtx
    hcp.loopback(2, lambda groups: run_step(groups, within(), "cuda"), device="cuda")
    with within():
        evaluate()


if __name__ == "__main__":
    main()
