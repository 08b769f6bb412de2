"""Training with the real Megatron-Core: equal results under every plan and layout.

The reference of every model is Megatron's own on one rank, without hcp, one document at a time. The
losses of steps of Adam are compared, and the gradients of the first step.
"""

import dataclasses
import functools
import importlib.util

import pytest
import torch
from support.examples import example
from support.megatron_cases import Case, lengths_of, train, train_alone
from support.ranks import run_ranks

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None
        or importlib.util.find_spec("megatron.core") is None,
        reason="Megatron-Core is not installed: python -m pip install megatron-core==0.16.1",
    ),
    pytest.mark.filterwarnings("ignore"),
]

needs_linear_cross_entropy = pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="torch has it from 2.13 on"
)
EIGHT, TWENTY = ((*lengths_of(steps - 1), (9,)) for steps in (8, 20))
"""Lengths of the steps. The last batch is a single sample."""


@functools.cache
def reference(name):
    (outcome,) = run_ranks(1, train_alone, CASES[name], timeout=280)
    return outcome


def agree(name, ranks, *flags, losses=1e-4, gradients=1e-5, moves=True):
    """The case on more ranks gives the reference's losses and gradients: what rank 0 saw."""
    expected = reference(name)
    outcomes = run_ranks(ranks, train, CASES[name].but(*flags), expected.gradients, timeout=280)
    for outcome in outcomes:
        assert outcome.tokens == expected.tokens
        assert outcome.losses == pytest.approx(expected.losses, rel=0, abs=losses)
        worst = max(outcome.differences.items(), key=lambda item: item[1], default=("", 0.0))
        assert worst[1] < gradients, worst
    assert expected.losses[-1] != pytest.approx(expected.losses[0], rel=1e-3)
    seen = outcomes[0]
    assert seen.uncovered == []
    for evaluation in seen.evaluations:  # 7 documents of 173 bytes, each with its end
        assert (evaluation.documents, evaluation.tokens) == (7, 173)
        assert expected.evaluations == [(pytest.approx(evaluation.loss, rel=1e-5), 173)]
    assert [evaluation.dp for evaluation in seen.evaluations][1] == 1
    if moves:
        assert max(seen.degrees) > 1
    return seen


EXPERTS = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "16")
CASES = {
    "gpt": Case(lengths=EIGHT),
    "hybrid": Case(
        ("--num-layers", "4", "--lr", "3e-4"),
        dict(mamba_state_dim=6, mamba_head_dim=16, mamba_num_groups=2),
        builder="hybrid",
        lengths=EIGHT,
    ),
    "deep gpt": Case(("--num-layers", "4"), lengths=EIGHT),
    "qwen3 moe": Case(
        EXPERTS,
        dict(qk_layernorm=True, kv_channels=16),
        lengths=EIGHT,
    ),
    "flex experts": Case(
        EXPERTS,
        dict(moe_token_dispatcher_type="flex", moe_router_dtype="fp32"),
        builder="flex",
        lengths=EIGHT,
    ),
    "balanced experts": Case(
        (*EXPERTS, "--clip-grad", "0"),
        dict(
            **dict(params_dtype=torch.float64, pipeline_dtype=torch.float64),
            moe_router_load_balancing_type="seq_aux_loss",
            **dict(moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.05, moe_router_dtype="fp64"),
            **dict(moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid"),
            moe_router_bias_update_rate=0.05,
        ),
        builder="wide",
        lengths=EIGHT,
    ),
    "recomputed gpt": Case(
        options=dict(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        ),
        lengths=EIGHT,
    ),
    "float64 gpt": Case(
        ("--clip-grad", "0"),
        dict(params_dtype=torch.float64, pipeline_dtype=torch.float64),
        builder="float64",
        lengths=TWENTY,
    ),
    # Megatron weighs predictions by the tokens of a micro-batch, hcp by those of the step.
    "mtp": Case(("--mtp-num-layers", "2"), lengths=EIGHT, together=True),
    "float64 mtp": Case(
        ("--mtp-num-layers", "2", "--clip-grad", "0"),
        dict(params_dtype=torch.float64, pipeline_dtype=torch.float64),
        builder="predicting",
        lengths=EIGHT,
        together=True,
    ),
}
TREES = ((45, 50, 38, 41, 7, 55, 30), (61, 61, 22, 12, 9), (90, 89, 25), (30,))
"""Lengths of rollouts of each step. Some end inside what others share."""
for name in ("float64 gpt", "balanced experts"):
    CASES[f"{name} on trees"] = dataclasses.replace(CASES[name], lengths=TREES, shared=14)
CASES["float64 untied mtp"] = CASES["float64 mtp"].but("--untie-embeddings-and-output-weights")


BOTH = pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])


def scheduler(static, ranks):
    """The options of static CP over a domain of so many ranks, or those of dynamic CP."""
    return ("--context-parallel-size", str(ranks)) if static else ()


def test_dynamic_cp_on_four_ranks_trains_as_one_rank_does():
    seen = agree("gpt", 4)
    assert len(set(seen.degrees)) > 1


@pytest.mark.parametrize(
    "flags", [(), ("--context-parallel-size", "4"), ("--pipeline-model-parallel-size", "2")]
)
def test_with_a_loss_of_ones_own_in_float64_training_agrees_to_1e_9(flags):
    agree("float64 gpt", 4, *flags, losses=1e-9, gradients=1e-11)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, ()),
        (4, ()),
        (4, ("--context-parallel-size", "4")),
        (4, ("--pipeline-model-parallel-size", "2")),
        (4, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
    ],
)
def test_training_on_trees_equals_training_on_each_rollout_alone(ranks, flags):
    agree("float64 gpt on trees", ranks, *flags, losses=1e-10, gradients=1e-10, moves=ranks > 2)


def test_experts_on_trees_are_balanced_as_by_each_rollout_alone():
    flags = ("--expert-model-parallel-size", "2")
    agree("balanced experts on trees", 4, *flags, losses=1e-9, gradients=1e-10)


@needs_linear_cross_entropy
def test_losses_without_logits_train_as_one_rank_does():
    agree("gpt", 3, "--linear-cross-entropy")


def test_static_cp_trains_as_one_rank_does():
    seen = agree("gpt", 4, "--context-parallel-size", "4")
    assert len(set(seen.degrees)) == 1


@pytest.mark.parametrize("comm_type", [("all_gather",), ("a2a", "p2p")], ids=" ".join)
def test_comm_types_once_or_per_layer_change_nothing(comm_type):
    agree("gpt", 3, "--cp-comm-type", *comm_type)


def test_a_distributed_optimizer_trains_as_one_rank_does():
    agree("gpt", 4, "--use-distributed-optimizer")


def test_tensor_parallel_ranks_train_as_one_rank_does():
    agree("gpt", 4, "--tensor-model-parallel-size", "2")


@BOTH
def test_tensor_parallel_ranks_with_sequence_parallelism_train_as_one_rank_does(static):
    agree(
        "gpt", 4, "--tensor-model-parallel-size", "2", "--sequence-parallel", *scheduler(static, 2)
    )


@BOTH
def test_a_mamba_hybrid_with_a_stand_in_scan_trains_as_one_rank_does(static):
    # The decay's gradient is a sum over all pairs, in float32.
    agree("hybrid", 4, *scheduler(static, 4), gradients=1e-4)


@BOTH
def test_pipeline_stages_train_as_one_rank_does(static):
    agree("gpt", 4, "--pipeline-model-parallel-size", "2", *scheduler(static, 2))


@BOTH
def test_interleaved_pipeline_stages_train_as_one_rank_does(static):
    seen = agree(
        "deep gpt",
        4,
        *scheduler(static, 2),
        *("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"),
    )
    assert all(count % 2 == 0 for count in seen.micro_batches)


def test_recomputed_layers_train_as_one_rank_does():
    agree("recomputed gpt", 3)


@BOTH
def test_experts_over_two_ranks_train_as_one_rank_does(static):
    agree("qwen3 moe", 4, "--expert-model-parallel-size", "2", *scheduler(static, 4))


SPREAD = ("--expert-model-parallel-size", "2")
OVER_FOUR = ("--expert-model-parallel-size", "4")
SHARED = ("--tensor-model-parallel-size", "2", "--sequence-parallel")


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, ()),
        (4, ()),
        (4, ("--context-parallel-size", "4")),
        (4, SPREAD),
        (4, OVER_FOUR),
        (4, (*OVER_FOUR, "--context-parallel-size", "4")),
        (4, SHARED),
        (4, (*SHARED, *SPREAD, "--expert-tensor-parallel-size", "1")),
        (4, (*SHARED, *OVER_FOUR, "--expert-tensor-parallel-size", "1")),
        (4, ("--pipeline-model-parallel-size", "2")),
    ],
)
def test_losses_and_biases_of_routers_are_those_of_each_document_alone(ranks, flags):
    agree("balanced experts", ranks, *flags, losses=1e-9, gradients=1e-10, moves=ranks > 2)


WHOLE = ("--expert-tensor-parallel-size", "1")
"""The ranks of a tensor-parallel group each hold whole experts."""


@pytest.mark.parametrize(
    "flags", [SPREAD, OVER_FOUR, (*OVER_FOUR, *SHARED, *WHOLE)], ids=["EP 2", "EP 4", "EP 4, TP 2"]
)
def test_experts_by_the_flex_dispatcher_train_as_one_rank_does(flags):
    """Of DeepEP, whose exchanges a stand-in makes over Gloo."""
    agree("flex experts", 4, *flags)


def test_experts_of_tensor_parallel_ranks_train_as_one_rank_does():
    agree("qwen3 moe", 4, "--tensor-model-parallel-size", "2", "--sequence-parallel")


def test_experts_over_two_ranks_under_tensor_parallelism_train_as_one_rank_does():
    flags = ("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1")
    agree("qwen3 moe", 4, "--tensor-model-parallel-size", "2", "--sequence-parallel", *flags)


@BOTH
def test_multi_token_prediction_trains_as_one_rank_does(static):
    agree("mtp", 4, *scheduler(static, 4))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
def test_multi_token_prediction_in_a_pipeline_trains_as_one_rank_does(untied, ranks):
    """The last stage's copy of the embedding has gradients of predictions, and of the output where
    it is tied. Megatron sums them with those of the first stage."""
    name = "float64 untied mtp" if untied else "float64 mtp"
    flags = ("--pipeline-model-parallel-size", "2")
    agree(name, ranks, *flags, losses=1e-9, gradients=1e-10, moves=ranks > 2)


def run_example(rank, size):
    from hcp.integrations.megatron import megatron_on_cpu

    with megatron_on_cpu():
        return example("megatron_core").train(steps=2)


def test_the_example_has_the_losses_of_one_rank_in_both_layouts():
    ((losses, evaluations),) = run_ranks(1, run_example, timeout=280)
    assert losses[1] < losses[0]
    for found, evaluated in run_ranks(2, run_example, timeout=280):
        assert found == pytest.approx(losses, abs=1e-4)
        assert evaluated == pytest.approx(evaluations, abs=1e-4)
