"""Megatron-Core's routers under plans, against Megatron's own router.

It computes each document alone, or the rows of a micro-batch on the process group of its ranks.
"""

import functools
import importlib.util
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.planning import CHEAP_LAUNCHES
from support.ranks import run_ranks
from support.trees import Tree

import hcp

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None
    or importlib.util.find_spec("megatron.core") is None,
    reason="Megatron-Core is not installed: python -m pip install megatron-core==0.16.1",
)

EXPERTS, HIDDEN, COEFFICIENT = 4, 6, 0.3
EVEN = (16, 8, 24, 4, 40, 12)
"""Documents of which each rank of a group of two has as many rows."""
ODD = (17, 1, 24, 3, 41, 12)


def rows_of(lengths):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, HIDDEN, generator=generator, dtype=torch.float64) for n in lengths]


def router(kind, tp_cp, tp=None):
    """Megatron's router, of equal weights on every rank. `tp`: ranks that share rows."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.router import TopKRouter

    sizes = dict(num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, num_moe_experts=EXPERTS)
    if tp is not None:
        sizes |= dict(tensor_model_parallel_size=tp.size(), sequence_parallel=True)
    config = TransformerConfig(
        **sizes,
        moe_router_load_balancing_type=kind,
        moe_aux_loss_coeff=COEFFICIENT,
        moe_z_loss_coeff=0.05,
        moe_router_dtype="fp64",
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        add_bias_linear=False,
        params_dtype=torch.float64,
    )
    groups = SimpleNamespace(tp=tp or alone(), cp=alone(), tp_cp=tp_cp, tp_dp_cp=dist.group.WORLD)
    made = TopKRouter(config, groups).train()
    made.set_layer_number(1)
    weight = torch.linspace(-1, 1, EXPERTS * HIDDEN, dtype=torch.float64).sin()
    made.weight.data.copy_(weight.view(EXPERTS, HIDDEN))
    return made


@functools.cache
def alone():
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def route(module, rows):
    """Run a router on (T, HIDDEN), and its losses' backward."""
    probs, _ = module(rows.unsqueeze(1))
    (0 * probs).sum().backward()


def taken():
    """Take what Megatron would log, of one layer: the values on this rank."""
    from support.megatron_cases import log_of_experts

    log = log_of_experts()
    values = {n: e["values"] if isinstance(e, dict) else e.values for n, e in log.items()}
    log.clear()
    return {name: each.sum().item() for name, each in values.items()}


def summed(value):
    total = torch.as_tensor(value, dtype=torch.float64).clone()
    dist.all_reduce(total)
    return total


def twins(module, step):
    """Yield, for each micro-batch, its handler, its rows, and the router of its layer."""
    from hcp.integrations.megatron.megatron_routers import planned_router
    from hcp.integrations.megatron.twin import twin

    for cp, local in step:
        rows = torch.cat([local.x, local.x.new_ones(max(0, 3 - cp.rows), HIDDEN)])
        kind = planned_router(type(module))
        yield cp, rows, twin(module, kind, cp=cp, rows=len(rows))


def step_of(lengths, options, tp=1):
    groups = hcp.build_process_groups(tp=tp)
    plan = hcp.plan(lengths, ranks=groups.transport.size, cost=CHEAP_LAUNCHES, **options)
    sources = [i % groups.transport.size for i in range(len(lengths))]
    own = [
        {"x": x}
        for x, source in zip(rows_of(lengths), sources, strict=True)
        if source == groups.transport.rank
    ]
    return hcp.dispatch(plan, own, sources, groups)


def on_cpu(function, *args):
    from support.megatron_cases import wide_routers

    from hcp.integrations.megatron import megatron_on_cpu

    alone.cache_clear()
    with megatron_on_cpu(), wide_routers():
        function(*args)


def each_document(rank, size, options, trees):
    on_cpu(compare_documents, options, trees)


def compare_documents(options, trees):
    own = router("seq_aux_loss", alone())
    logged = {}
    texts = rows_of(ODD)
    if trees:
        each = zip(rows_of([tree.length for tree in trees]), trees, strict=True)
        texts = [rows[text] for rows, tree in each for text in tree.texts]
    for rows in texts:
        route(own, rows)
        for name, value in taken().items():
            logged[name] = logged.get(name, 0.0) + value * len(rows) / sum(map(len, texts))
    module = router("seq_aux_loss", alone())
    if trees:
        options = options | {"masks": [tree.mask for tree in trees]}
    step = step_of([tree.length for tree in trees] or ODD, options)
    for _, rows, planned in twins(module, step):
        route(planned, rows)
    assert (summed(module.weight.grad) - own.weight.grad).abs().max() < 1e-10
    assert torch.equal(summed(module.local_tokens_per_expert), own.local_tokens_per_expert.double())
    found = taken()
    assert sorted(found) == ["seq_load_balancing_loss", "z_loss"]
    for name, value in found.items():
        mean = summed(value).item() / dist.get_world_size() / len(step)
        assert mean == pytest.approx(logged[name], rel=1e-5), name


@pytest.mark.parametrize(
    "options",
    [
        dict(max_tokens_per_rank=20),
        dict(max_tokens_per_rank=64, min_degree=4),
        dict(max_tokens_per_rank=24, alignment=8),
        dict(max_tokens_per_rank=200, max_degree=1),
    ],
)
def test_losses_counts_and_logs_are_those_of_megatrons_router_on_each_document(options):
    """Degrees, padding, and ranks without rows, whose rows that stand in do not count."""
    run_ranks(4, each_document, options, (), timeout=110)


@pytest.mark.parametrize(
    "options",
    [
        dict(max_tokens_per_rank=36),
        dict(max_tokens_per_rank=64, min_degree=3, max_degree=3),
        dict(max_tokens_per_rank=24, min_degree=4, alignment=8),
    ],
)
def test_losses_counts_and_logs_of_trees_are_those_of_megatrons_router_on_each_text(options):
    trees = (Tree((9, 7, 5, 3, 1, 6, 2), (-1, 0, 0, 1, 1, 3, 0)), Tree((2, 3, 4), (-1, 0, 0)))
    run_ranks(4, each_document, options, (*trees, Tree((8,), (-1,))), timeout=110)


@pytest.mark.parametrize("kind", ["aux_loss", "global_aux_loss"])
def test_losses_of_micro_batches_of_trees_are_those_of_megatrons_router_on_their_texts(kind):
    run_ranks(1, on_texts, kind, timeout=110)


def on_texts(rank, size, kind):
    on_cpu(compare_texts, kind)


def compare_texts(kind):
    trees = (Tree((9, 7, 5, 3), (-1, 0, 0, 1)), Tree((2, 3, 4), (-1, 0, 0)))
    lengths = [tree.length for tree in trees]
    whole = rows_of(lengths)
    own, module = router(kind, alone()), router(kind, alone())
    step = step_of(lengths, dict(max_tokens_per_rank=26, masks=[tree.mask for tree in trees]))
    assert len(step) == 2
    for cp, rows, planned in twins(module, step):
        route(planned, rows)
        (i,) = cp.layout.sequences
        route(own, torch.cat([whole[i][text] for text in trees[i].texts]))
        assert (module.weight.grad - own.weight.grad).abs().max() < 1e-10
    assert module.weight.grad.abs().max() > 1e-3


def left_out(group):
    """Megatron-Core 0.16 does not multiply such a loss by the ranks whose rows it is a mean of, by
    which it divides."""
    later = importlib.util.find_spec("megatron.core.transformer.moe.moe_logging") is not None
    return 1 if later else group.size()


def one_micro_batch(rank, size, kind):
    on_cpu(compare_micro_batches, kind)


def compare_micro_batches(kind):
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    own = router(kind, pairs[dist.get_rank() // 2])
    module = router(kind, alone() if kind == "aux_loss" else pairs[dist.get_rank() // 2])
    degrees = []
    # Megatron takes as many rows on each of the ranks whose rows it counts.
    lengths, limit = (EVEN, 24) if kind == "aux_loss" else ((24,) * 4, 12)
    step = step_of(lengths, dict(max_tokens_per_rank=limit, min_degree=2, max_degree=2))
    for cp, rows, planned in twins(module, step):
        degrees.append(cp.degree)
        route(planned, rows)
        assert cp.layout.padding == 0
        route(own, rows[: cp.rows])
        expected = own.weight.grad * left_out(own.tp_cp_group)
        assert (module.weight.grad - expected).abs().max() < 1e-10
    assert len(degrees) > 1
    assert set(degrees) == {2}
    assert module.weight.grad.abs().max() > 1e-3


# ---- rows that tensor-parallel ranks share ------------------------------------------------------


def own_rows(rows, tp):
    """This tensor-parallel rank's part of a micro-batch's rows."""
    return rows.chunk(tp.size())[tp.rank()]


def sharing_rows(rank, size, kind):
    on_cpu(compare_shared, kind)


def compare_shared(kind):
    """Ranks 0 and 1 share the rows of one context-parallel rank, ranks 2 and 3 those of another."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    tp = pairs[dist.get_rank() // 2]
    own, module = router(kind, dist.group.WORLD, tp), router(kind, tp, tp)
    limits = dict(max_tokens_per_rank=24, min_degree=2, max_degree=2, alignment=2)
    step = step_of(EVEN, limits, tp=2)
    assert len(step) > 1
    for cp, rows, planned in twins(module, step):
        assert (cp.degree, cp.layout.padding) == (2, 0)
        route(planned, own_rows(rows, tp))
        route(own, own_rows(rows, tp))
        expected = own.weight.grad * left_out(own.tp_cp_group)
        assert (module.weight.grad - expected).abs().max() < 1e-10
    assert module.weight.grad.abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["aux_loss", "global_aux_loss"])
def test_losses_of_rows_that_ranks_share_are_those_of_megatrons_router(kind):
    run_ranks(4, sharing_rows, kind, timeout=110)


def shared_documents(rank, size):
    on_cpu(compare_shared_documents)


def compare_shared_documents():
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    tp = pairs[dist.get_rank() // 2]
    own = router("seq_aux_loss", alone())
    for rows in rows_of(ODD):
        route(own, rows)
    taken()
    module = router("seq_aux_loss", tp, tp)
    for _, rows, planned in twins(
        module, step_of(ODD, dict(max_tokens_per_rank=40, alignment=4), 2)
    ):
        route(planned, own_rows(rows, tp))
    assert (summed(module.weight.grad) - own.weight.grad).abs().max() < 1e-10
    assert torch.equal(summed(module.local_tokens_per_expert), own.local_tokens_per_expert.double())


def test_sequences_whose_rows_ranks_share_have_the_losses_of_each_document():
    """With padding, which does not count."""
    run_ranks(4, shared_documents, timeout=110)


@pytest.mark.parametrize("kind", ["aux_loss", "global_aux_loss"])
def test_losses_of_micro_batches_are_those_of_megatrons_router_on_the_ranks_of_each(kind):
    run_ranks(4, one_micro_batch, kind, timeout=110)
