"""Prices of plans by the sizes in a model's configuration."""

from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

import hcp
from hcp.integrations.loader import DynamicCPCollator
from hcp.integrations.model_cost import Sizes, cost_of_model, cost_of_sizes, sizes_of

CPU = torch.device("cpu")
DENSE = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
CONFIG = hcp.Config(max_seqlen_per_dp_cp_rank=64)


def config_of(**names: object) -> SimpleNamespace:
    return SimpleNamespace(**(DENSE | names))


@pytest.mark.parametrize(
    ("names", "sizes"),
    [
        ({}, Sizes(64, 192, 8, 2, 8)),
        ({"head_dim": 16}, Sizes(64, 192, 8, 2, 16)),
        ({"num_key_value_heads": None}, Sizes(64, 192, 8, 8, 8)),
        ({"intermediate_size": None}, Sizes(64, 256, 8, 2, 8)),
        ({"num_experts_per_tok": 2}, Sizes(64, 384, 8, 2, 8)),
        ({"num_experts_per_tok": 4, "moe_intermediate_size": 32}, Sizes(64, 128, 8, 2, 8)),
        (
            {
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 32,
                "n_shared_experts": 1,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
            },
            Sizes(64, 160, 8, 8, 24),
        ),
        (
            {
                "layer_types": ["linear_attention"] * 3 + ["full_attention"],
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 16,
            },
            Sizes(64, 144, 8, 2, 8, attending=Fraction(1, 4)),
        ),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128},
            Sizes(64, 192, 8, 2, 8, Fraction(1, 2), Fraction(1, 2), 128),
        ),
        (
            {"sliding_window": 128},
            Sizes(64, 192, 8, 2, 8, Fraction(0), Fraction(1), 128),
        ),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": None},
            Sizes(64, 192, 8, 2, 8),
        ),
    ],
)
def test_sizes_are_read_from_the_names_of_transformers(
    names: dict[str, object], sizes: Sizes
) -> None:
    assert sizes_of(config_of(**names)) == sizes


def test_layers_of_several_kinds_are_priced_by_their_mean() -> None:
    dense = Sizes(64, 192, 8, 2, 8)
    whole = cost_of_sizes(dense, CPU)
    quarter = cost_of_sizes(dense._replace(attending=Fraction(1, 4)), CPU)
    assert (quarter.pair, quarter.token) == (whole.pair // 4, whole.token)
    assert quarter.exchange == whole.exchange // 4
    half = dense._replace(attending=Fraction(1, 2), sliding=Fraction(1, 2), window=128)
    mixed = cost_of_sizes(half, CPU)
    assert mixed.token == whole.token + whole.pair * 64
    assert mixed.exchange == whole.exchange
    all_slide = cost_of_sizes(half._replace(attending=Fraction(0), sliding=Fraction(1)), CPU)
    assert (all_slide.window, all_slide.token) == (128, whole.token)


class Model(torch.nn.Module):
    def __init__(self, config: object) -> None:
        super().__init__()
        if config is not None:
            self.config = config


def test_a_loader_plans_by_the_prices_of_its_model() -> None:
    groups = hcp.loopback(1, lambda groups: groups)[0]
    model = torch.nn.Sequential()
    model.module = Model(config_of())
    own = cost_of_model(model, groups)
    assert own is not None
    assert own.token == 2 * (2 * 64 * (64 + 16) + 3 * 64 * 192)
    given = hcp.CostModel(pair=3)
    for cost, expected in ((None, own), (given, given)):
        collator = DynamicCPCollator(CONFIG, groups, model=model, cost=cost)
        assert collator.planner.plan([8]).cost == expected


def test_a_model_without_sizes_is_planned_by_the_default_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    groups = hcp.loopback(1, lambda groups: groups)[0]
    with caplog.at_level("INFO", logger="hcp"):
        for config in (None, SimpleNamespace(hidden_size=64)):
            collator = DynamicCPCollator(CONFIG, groups, model=Model(config))
            assert collator.planner.plan([8]).cost == hcp.CostModel()
    assert caplog.text.count("plans use the default prices. Give cost=") == 2
