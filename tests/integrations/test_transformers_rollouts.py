"""A small Qwen3 of Transformers on prefix trees, and on each rollout alone, in float64."""

import pytest
import torch

import hcp
from hcp.step.dispatch import gather_masks

pytest.importorskip("transformers", reason="pip install '.[transformers]'")

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}


def build():
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(7)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL)).double()
    for module in list(model.modules()):
        for name, norm in list(module.named_children()):
            if type(norm).__name__ == "Qwen3RMSNorm":  # which computes in float32
                wide = torch.nn.RMSNorm(norm.weight.shape, eps=1e-6, dtype=torch.float64)
                setattr(module, name, wide)
    return model


def rollouts(rank):
    """Two prompts with answers, of which some begin alike, and one is another's beginning."""
    draw = torch.Generator().manual_seed(rank)
    made = []
    for prompt in (21, 4):
        start = torch.randint(64, (prompt,), generator=draw)
        turn = torch.cat((start, torch.randint(64, (5,), generator=draw)))
        made += [torch.cat((turn, torch.randint(64, (n,), generator=draw))) for n in (3, 9)]
        made += [torch.cat((start, torch.randint(64, (7,), generator=draw))), turn]
    return made


def train(groups, model, alone):
    """Losses and gradients of a weighted sum of log-probabilities: trees, and each alone."""
    from hcp.integrations.transformers.model import causal_lm_outputs

    rank, size = groups.transport.rank, groups.transport.size
    own = rollouts(rank)
    factors = [torch.linspace(-1, 1, len(each), dtype=torch.float64).cos() for each in own]
    trees = hcp.prefix_trees(own)
    sums = trees.summed([torch.nn.functional.pad(x[:-1], (0, 1)) for x in factors])
    samples = [
        {"input_ids": tokens, "labels": labels.clamp(min=0), "factors": factor}
        for tokens, labels, factor in zip(trees.tokens, trees.labels, sums, strict=True)
    ]
    lengths, sources, samples = hcp.gather_lengths(samples, groups)
    masks = gather_masks(trees.masks, groups)
    plan = hcp.plan(lengths, masks=masks, ranks=size, max_tokens_per_rank=64 // size)
    assert max(group.degree for groups in plan.micro_batches for group in groups) == size
    total, expected = (torch.zeros((), dtype=torch.float64) for _ in range(2))
    for cp, local in hcp.dispatch(plan, samples, sources, groups):
        every = causal_lm_outputs(model, cp, local).logits[0, : cp.rows].log_softmax(-1)
        loss = (every.gather(1, local.labels[:, None])[:, 0] * local.factors).sum()
        loss.backward()
        total += loss.detach()
    for tokens, factor in zip(own, factors, strict=True):
        every = alone(tokens[None]).logits[0, :-1].log_softmax(-1)
        loss = (every.gather(1, tokens[1:, None])[:, 0] * factor[:-1]).sum()
        loss.backward()
        expected += loss.detach()
    grads = [torch.cat([p.grad.flatten() for p in each.parameters()]) for each in (model, alone)]
    return total, expected, *grads


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_trees_have_the_losses_and_gradients_of_rollouts_alone(ranks):
    from hcp.integrations.transformers import register_hcp_attention

    models = [(build(), build()) for _ in range(ranks)]
    for model, _ in models:
        register_hcp_attention(model)
    results = hcp.loopback(ranks, lambda groups: train(groups, *models[groups.transport.rank]))
    totals, expected, found, grads = map(sum, zip(*results, strict=True))
    torch.testing.assert_close(totals, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(found, grads, rtol=0, atol=1e-10)
