"""Reward and value heads on a trunk of Transformers: those of one rank at any degree.

A reward is the score of the last token of a sequence, and a value that of each token.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import hcp

transformers = pytest.importorskip("transformers", reason="pip install '.[transformers]'")

LENGTHS = [23, 9, 5, 31, 1, 12]
"""Tokens of three pairs: of each the first is preferred."""


def heads() -> tuple[Any, Any, torch.nn.Linear]:
    """A causal model, a reward model on the same trunk, and a value head."""
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        num_labels=1,
        initializer_range=0.2,
        attn_implementation="eager",
    )
    rewards = transformers.GPT2ForSequenceClassification(config).double().eval()
    causal = transformers.GPT2LMHeadModel(config).double().eval()
    causal.transformer = rewards.transformer
    return causal, rewards, torch.nn.Linear(32, 1).double()


def samples() -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [
        {
            "input_ids": torch.randint(8, 64, (n,), generator=draw),
            "returns": torch.randn(n, generator=draw, dtype=torch.float64),
            "is_last": torch.arange(n) == n - 1,
            "loss_mask": torch.ones(n, dtype=torch.float64),
        }
        for n in LENGTHS
    ]


def gradients(*modules: torch.nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for module in modules for parameter in module.parameters()]
    return [torch.zeros(()) if grad is None else grad for grad in found]


def preference(rewards: torch.Tensor) -> torch.Tensor:
    """The sum over pairs of the loss of Bradley and Terry."""
    return -F.logsigmoid(rewards[0::2] - rewards[1::2]).sum()


def alone() -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of Transformers' own reward model and of values, on each sequence."""
    _, rewards, value = heads()
    given = samples()
    scores = [rewards(s["input_ids"][None]).logits[0, 0] for s in given]
    hidden = [rewards.transformer(s["input_ids"][None]).last_hidden_state[0] for s in given]
    errors = [(value(h)[:, 0] - s["returns"]).square() for h, s in zip(hidden, given, strict=True)]
    loss = preference(torch.stack(scores)) / 3 + torch.cat(errors).mean()
    loss.backward()
    return loss.item(), gradients(rewards, value)


def planned(groups: Any, made: Any, least: int) -> tuple[float, list[torch.Tensor]]:
    from hcp.integrations.transformers import model_inputs

    causal, reward, value = copy.deepcopy(made)
    rank, ranks = groups.transport.rank, groups.transport.size
    pairs = [i for i in range(3) if i % ranks == rank]
    own = [samples()[2 * i + j] for i in pairs for j in (0, 1)]
    lengths, sources, gathered = hcp.gather_lengths(own, groups)
    plan = hcp.plan(lengths, ranks=ranks, max_tokens_per_rank=32, min_degree=least)
    step = hcp.dispatch(plan, gathered, sources, groups)
    losses, scores = [], []
    for cp, local in step:
        hidden = causal.base_model(**model_inputs(cp, local)).last_hidden_state[0, : cp.rows]
        errors = (value(hidden)[:, 0] - local.returns).square()
        losses.append(cp.loss(errors, local.loss_mask, grad_reduce="sum"))
        score = reward.score(hidden)[:, 0]
        scores.append(cp.sequences.sum(score.where(local.is_last, 0.0)))
    rewards = torch.stack(step.combine_by_sequence(scores))
    loss = preference(rewards) / 3 + torch.stack(losses).sum()
    loss.backward()
    return loss.item(), gradients(reward, value)


@pytest.mark.parametrize(("ranks", "least"), [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3)])
def test_reward_and_value_heads_are_those_of_one_rank(ranks: int, least: int) -> None:
    from hcp.integrations.transformers import register_hcp_attention

    expected, by_parameter = alone()
    made = heads()
    register_hcp_attention(made[0])
    found = hcp.loopback(ranks, lambda groups: planned(groups, made, least))
    assert sum(loss for loss, _ in found) == pytest.approx(expected, abs=1e-10)
    for i, want in enumerate(by_parameter):
        got = sum((grads[i] for _, grads in found), torch.zeros((), dtype=torch.float64))
        assert float((got - want).abs().max()) < 1e-10
