"""torchtitan, the real package on gloo ranks: dynamic, static and one-rank runs are one run."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from support.ranks import run_ranks
from support.tensorboard_writer import check

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed: make test-trainers", allow_module_level=True)

from support import titan
from support.examples import EXAMPLES
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.validate import Validator
from torchtitan.config import CompileConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.models import deepseek_v3
from torchtitan.models.common.attention import ScaledDotProductAttention, VarlenAttention
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE
from torchtitan.models.common.token_dispatcher import HybridEPTokenDispatcher
from torchtitan.trainer import Trainer

import hcp
from hcp.attention.rotary import Rotary, rotate_by_torch
from hcp.integrations.torchtitan import (
    PackedAttention,
    PackedContextParallel,
    check_supported,
)
from hcp.integrations.torchtitan.batches import documents_of
from hcp.integrations.torchtitan.torchtitan_rotary import HcpComplexRoPE, by_hcp
from hcp.integrations.unrotated import take_rotary

pytestmark = pytest.mark.timeout(600)

LIMIT = 40
"""Rows of a rank: a document of 64 tokens needs two."""


def on_ranks(size, case, *args):
    return run_ranks(size, case, *args, timeout=500)


def train(rank, size, planner, family, options):
    """Losses and validation losses."""
    run = titan.Run(titan.config_of(planner, spec=titan.spec_of(family), **options))
    run.train()
    run.close()
    return run.losses, run.validations


def runs(family, options, planners):
    """The losses of one rank, and those of four under each planner."""
    one = on_ranks(1, train, titan.options(256), family, options)[0]
    return one, [on_ranks(4, train, planner, family, options)[0] for planner in planners]


# ---- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_packed_logits_are_those_of_each_document_alone_under_torchtitans_own_attention(family):
    config = titan.spec_of(family).model
    packed = config.build()
    own = titan.MODELS[family]("debugmodel", attn_backend="varlen").model.layers[0].attention.rope
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.attention.rope = own
    plain = config.build()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in packed.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    plain.load_state_dict(packed.state_dict())
    documents = [torch.arange(n) * 7 % titan.VOCABULARY for n in (30, 1, 2, 17, 5)]
    alone = [
        plain(tokens[None], positions=torch.arange(len(tokens))[None])[0] for tokens in documents
    ]

    def one(groups):
        own = range(groups.rank("dp_cp"), len(documents), 3)
        samples = [
            {"tokens": documents[i], "document": torch.full_like(documents[i], i)} for i in own
        ]
        lengths, sources, samples = hcp.gather_lengths(samples, groups)
        plan = hcp.plan(lengths, ranks=3, max_tokens_per_rank=16)
        rows = 0
        for cp, local in hcp.dispatch(plan, samples, sources, groups):
            assert cp.rows > 0
            positions = cp.position_ids
            got = packed(local.tokens[None], positions=positions[None], attention_masks=cp)[0]
            expected = [alone[i][p] for i, p in zip(local["document"], positions, strict=True)]
            torch.testing.assert_close(got, torch.stack(expected), rtol=1e-4, atol=1e-5)
            rows += cp.rows
        return rows

    assert sum(hcp.loopback(3, one)) == sum(map(len, documents))


@pytest.mark.parametrize("window", [(-1, 0), (3, 0), (-1, -1), (2, 1)])
def test_windows_are_those_of_torchtitans_varlen_attention(window):
    generator = torch.Generator().manual_seed(5)
    q, k, v = torch.randn(3, 1, 12, 2, 8, generator=generator, dtype=torch.float64)
    left, right = (12 if limit < 0 else limit for limit in window)
    at = torch.arange(12)
    seen = (at[None] >= at[:, None] - left) & (at[None] <= at[:, None] + right)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=seen)

    def one(groups):
        plan = hcp.plan([12], ranks=1, max_tokens_per_rank=12)
        samples = [{"tokens": torch.zeros(12, dtype=torch.int64)}]
        [(cp, _)] = hcp.dispatch(plan, samples, [0], groups)
        attention = PackedAttention.Config(window_size=window).build()
        got = attention(q, k, v, attention_masks=cp, enable_gqa=True)
        torch.testing.assert_close(got.transpose(1, 2), expected, rtol=1e-10, atol=1e-12)

    hcp.loopback(1, one)


# ---- who rotates ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_rotation_in_attention_is_torchtitans_at_any_degree_and_comm_type(family):
    """To the rounding of float32, in which torchtitan rotates."""
    specs = [titan.MODELS[family]("debugmodel", attn_backend="varlen") for _ in range(2)]
    for spec, fused_rope in zip(specs, (True, False), strict=True):
        del spec.model.layers[2:]
        PackedContextParallel.Config(fused_rope=fused_rope).build().convert(spec.model)
    fused, unfused = (spec.model.build() for spec in specs)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in fused.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    unfused.load_state_dict(fused.state_dict())
    assert not isinstance(
        unfused.layers["0"].attention.rope, type(fused.layers["0"].attention.rope)
    )
    documents = [torch.arange(n) * 7 % titan.VOCABULARY for n in (30, 3, 17)]

    def one(groups, ranks, comm_type):
        own = [{"tokens": each} for each in documents[groups.rank("dp_cp") :: ranks]]
        sources = [i % ranks for i in range(3)]
        lengths = list(map(len, documents))
        plan = hcp.plan(lengths, ranks=ranks, max_tokens_per_rank=50, min_degree=ranks)
        for cp, local in hcp.dispatch(plan, own, sources, groups, comm_types=[comm_type]):
            results = []
            for model in (fused, unfused):
                given = cp.position_ids[None]
                out = model(local.tokens[None], positions=given, attention_masks=cp)
                grads = torch.autograd.grad(out.square().mean(), list(model.parameters()))
                results.append((out, *grads))
            for found, expected in zip(*results, strict=True):
                scale = float(expected.abs().max())
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * scale)

    for ranks in (1, 2, 4):
        for comm_type in ("p2p", "all_gather", "a2a"):
            hcp.loopback(ranks, lambda groups, n=ranks, c=comm_type: one(groups, n, c))


@pytest.mark.parametrize("kind", [ComplexRoPE, CosSinRoPE])
def test_both_of_torchtitans_tables_are_read_as_it_reads_them(kind):
    """In float64, where torchtitan itself rotates in float32 only."""
    config = kind.Config(dim=8, max_seq_len=64, scaling="yarn", rope_factor=4.0)
    own, ours = config.build(), by_hcp(config, hands_on=True).build()
    lengths = [30, 3, 17]

    def one(groups):
        plan = hcp.plan(lengths, ranks=2, max_tokens_per_rank=30)
        for i in range(len(plan.micro_batches)):
            cp = hcp.ContextParallelHandler(plan, i, groups.transport)
            q, k = (torch.randn(1, cp.rows, heads, 8) for heads in (4, 2))
            positions = cp.position_ids[None]
            query, key = ours(q, k, positions)
            assert query.rows is q
            rows, key_rows, rotary = take_rotary(query, key, cp)
            found = [cp.apply_rotary_pos_emb(x[0], rotary) for x in (rows, key_rows)]
            for mine, theirs in zip(found, own(q, k, positions), strict=True):
                torch.testing.assert_close(mine, theirs[0])
            assert take_rotary(*ours(q, k, positions), cp)[2] is rotary
            other = by_hcp(config, hands_on=True).build()
            assert take_rotary(*other(q, k, positions), cp)[2] is rotary
            wide = [x[0].double().requires_grad_() for x in (q, k, k)]
            inside = cp.attention(*wide, rotary_pos_emb=rotary)
            apart = [rotate_by_torch(x, rotary) for x in wide[:2]]
            expected = cp.attention(*apart, wide[2])
            torch.testing.assert_close(inside, expected, rtol=0, atol=1e-10)
            for a, b in zip(*(torch.autograd.grad(x.square().sum(), wide, retain_graph=True)
                              for x in (inside, expected)), strict=True):  # fmt: skip
                torch.testing.assert_close(a, b, rtol=0, atol=1e-10)

    hcp.loopback(2, one)


def test_positions_are_those_of_the_trainer():
    rope = by_hcp(ComplexRoPE.Config(dim=8, max_seq_len=64), hands_on=True).build()
    with pytest.raises(ValueError, match="positions is None, expected those of the micro-batch"):
        rope(torch.zeros(1, 3, 2, 8), torch.zeros(1, 3, 2, 8))


def test_a_rotary_embedding_of_another_class_stays():
    class Other(ComplexRoPE):
        @dataclass(kw_only=True, slots=True)
        class Config(ComplexRoPE.Config):
            pass

    config = Other.Config(dim=8, max_seq_len=64)
    assert by_hcp(config, hands_on=True) is config


def in_float64(kind):
    """torchtitan's own rotation, which computes in float32 whatever it is given, in float64."""

    def of_numbers(query, key, table):
        pairs = (torch.view_as_complex(x.unflatten(-1, (-1, 2))) for x in (query, key))
        return tuple(torch.view_as_real(x * table).flatten(3) for x in pairs)

    def of_halves(query, key, table):
        cos, sin = table.chunk(2, dim=-1)
        return tuple(x * cos + CosSinRoPE._rotate_half(x) * sin for x in (query, key))

    return staticmethod({ComplexRoPE: of_numbers, CosSinRoPE: of_halves}[kind])


@pytest.mark.parametrize("kind", [ComplexRoPE, CosSinRoPE])
def test_latent_attention_rotated_by_the_kernel_is_torchtitans_own(kind, monkeypatch):
    """At any degree and comm type, against one rank too, in float64."""
    monkeypatch.setattr(kind, "apply_rotary_emb", in_float64(kind))
    rope = kind.Config(dim=8, max_seq_len=64, scaling="yarn", rope_factor=4.0)
    fused, unfused = (
        titan.experts_spec("deepseek_v3", fused_rope=fused_rope, dense_layers=2, rope=rope)
        .model.build()
        .double()
        for fused_rope in (True, False)
    )
    assert type(unfused.layers["0"].attention.rope) is kind
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in fused.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.2 * values)
    unfused.load_state_dict(fused.state_dict())
    documents = [torch.arange(n) * 7 % titan.VOCABULARY for n in (30, 3, 17)]
    lengths, shapes, own = list(map(len, documents)), [], Rotary.rotate
    monkeypatch.setattr(Rotary, "rotate", lambda self, t: shapes.append(t.shape) or own(self, t))

    def gradients(groups, model, ranks, comm_type):
        own = [{"tokens": each} for each in documents[groups.rank("dp_cp") :: ranks]]
        plan = hcp.plan(lengths, ranks=ranks, max_tokens_per_rank=50, min_degree=ranks)
        sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
        outs, sources = [], [i % ranks for i in range(3)]
        for cp, local in hcp.dispatch(plan, own, sources, groups, comm_types=[comm_type]):
            given = cp.position_ids[None]
            outs.append(model(local.tokens[None], positions=given, attention_masks=cp))
            grads = torch.autograd.grad(outs[-1].square().sum(), list(model.parameters()))
            sums = [a + b for a, b in zip(sums, grads, strict=True)]
        return [out.detach() for out in outs], sums

    def computed(model, ranks, comm_type):
        found = hcp.loopback(ranks, lambda groups: gradients(groups, model, ranks, comm_type))
        totals = [sum(each) for each in zip(*(grads for _, grads in found), strict=True)]
        return [out for outs, _ in found for out in outs], totals

    def same(found, expected):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10 * max(1.0, float(b.abs().max())))

    _, of_one_rank = computed(unfused, 1, "p2p")
    assert not shapes
    for ranks in (1, 2, 4):
        for comm_type in ("p2p", "all_gather", "a2a"):
            (found, grads), (expected, _) = (
                computed(model, ranks, comm_type) for model in (fused, unfused)
            )
            same(found, expected)
            same(grads, of_one_rank)
    assert {shape[1:] for shape in shapes} == {(4, 8), (1, 8)}


def test_a_rotation_of_all_layers_is_made_once(monkeypatch):
    config = ComplexRoPE.Config(dim=8, max_seq_len=64)
    layers = [by_hcp(config, hands_on=False).build() for _ in range(3)]
    made, own = [], HcpComplexRoPE._rotary
    monkeypatch.setattr(
        HcpComplexRoPE, "_rotary", lambda self, positions: made.append(self) or own(self, positions)
    )
    query, key = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 1, 8)
    positions = torch.arange(5)[None]
    for layer in layers:
        layer(query, key, positions)
    assert len(made) == 1
    layers[0](query, key, positions.clone())
    assert len(made) == 2


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_dynamic_static_and_one_rank_runs_of_20_steps_agree(family):
    planners = [
        titan.options(LIMIT, eval_context_parallel_size=2),
        titan.options(LIMIT, "static_cp", context_parallel_size=4, cp_comm_type="all_gather"),
    ]
    one, others = runs(family, {"validation_rows": 5}, planners)
    assert len(one[0]) == 20
    assert one[0][-1] < one[0][0]
    for losses, validations in others:
        assert losses == pytest.approx(one[0], abs=1e-4)
        assert len(validations) == 3
        assert validations == pytest.approx(one[1], abs=1e-4)


def log(rank, size):
    run = titan.Run(titan.config_of(titan.options(LIMIT), steps=3)).train()
    run.close()
    return run.extra


def test_torchtitans_own_logger_gets_the_metrics_of_each_step():
    for logged in on_ranks(2, log):
        assert len(logged) == 3
        for written in logged:
            check(written, written["hcp/sequences"], 2)
            assert written["hcp/tokens"] == 4 * 64


def first_gradients(rank, size, planner, window):
    spec = titan.spec_of()
    for layer in spec.model.layers:
        layer.attention.inner_attention.window_size = window
    run = titan.Run(titan.config_of(planner, spec=spec))
    gradients = run.first_gradients()
    run.close()
    return gradients


@pytest.mark.parametrize("window", [(-1, 0), (9, 0)])
def test_gradients_of_the_first_step_are_those_of_one_rank(window):
    one = on_ranks(1, first_gradients, titan.options(256), window)[0]
    for planner in (
        titan.options(LIMIT),
        titan.options(LIMIT, min_dynamic_context_parallel_size=3),
        titan.options(LIMIT, "static_cp", context_parallel_size=2, cp_comm_type="a2a"),
    ):
        for gradients in on_ranks(4, first_gradients, planner, window):
            assert gradients.keys() == one.keys()
            for name, gradient in gradients.items():
                scale = float(one[name].abs().max())
                torch.testing.assert_close(
                    gradient, one[name], rtol=1e-4, atol=2e-6 * scale, msg=lambda m, n=name: n + m
                )


def test_a_step_goes_on_when_some_loaders_have_ended_and_training_ends_with_the_last():
    options = {"loader": titan.Loader.Config(rows=10)}
    one, [(losses, _)] = runs("llama3", options, [titan.options(LIMIT)])
    assert len(one[0]) == 3
    assert losses == pytest.approx(one[0], abs=1e-4)


def test_a_batch_of_one_document_longer_than_a_rank_holds():
    options = {"loader": titan.Loader.Config(rows=1, shortest=64)}
    two_of_four = titan.options(LIMIT, "static_cp", context_parallel_size=2)
    planners = [titan.options(LIMIT), titan.options(17), two_of_four]
    one, others = runs("llama3", options, planners)
    assert len(one[0]) == 1
    for losses, _ in others:
        assert losses == pytest.approx(one[0], abs=1e-5)


def train_from(rank, size, folder, load_step):
    """The losses of six steps, or of those after a checkpoint, and the tokens of this rank."""
    config = titan.config_of(
        titan.options(LIMIT),
        steps=6,
        dump_folder=str(folder),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=3, load_step=load_step, last_save_model_only=False
        ),
    )
    run = titan.Run(config)
    run.train()
    run.close()
    return run.losses, run.trainer.ntokens_seen


def test_a_checkpoint_goes_on_where_it_was(tmp_path):
    straight = on_ranks(2, train_from, tmp_path, -1)
    assert {path.name for path in (tmp_path / "checkpoint").iterdir()} >= {"step-3", "step-6"}
    resumed = on_ranks(2, train_from, tmp_path, 3)
    for (losses, tokens), (rest, tokens_then) in zip(straight, resumed, strict=True):
        assert len(losses) == 6
        assert rest == losses[3:]
        assert tokens_then == tokens


def test_the_example_trains_by_torchtitans_own_command_line(tmp_path):
    flags = "--module torchtitan_job --config small --training.steps 3"
    planner = "--context_parallel.max_seqlen_per_dp_cp_rank 40"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    job = EXAMPLES / "torchtitan_job.py"
    done = subprocess.run(
        [*command, "--standalone", str(job), *flags.split(), *planner.split()],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stderr + done.stdout)
    assert done.returncode == 0, text
    losses = re.findall(r" step:\s+(\d) +loss:\s+([\d.]+)", text)
    assert {step for step, _ in losses} >= {"1", "2", "3"}, text
    assert "Training completed" in text


def timeouts(rank, size):
    run = titan.Run(titan.config_of(titan.options(LIMIT), steps=2))
    run.train()
    backend = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
    found = backend.options._timeout.total_seconds()
    run.close()
    return found


def test_torchtitan_shortens_its_timeouts_after_the_first_step_under_any_torch():
    assert on_ranks(2, timeouts) == [100.0, 100.0]  # comm.train_timeout_seconds


def shards(rank, size, parallelism):
    run = titan.Run(titan.config_of(titan.options(LIMIT), parallelism=parallelism, steps=1))
    parameters = list(run.trainer.model_parts[0].parameters())
    assert run.trainer.planner.sync == "micro_batch"  # ranks wait in every layer
    run.train()
    run.close()
    return sum(p.numel() for p in parameters), sum(p.to_local().numel() for p in parameters)


@pytest.mark.parametrize(("replicas", "over"), [(1, 4), (2, 2)])
def test_parameters_are_sharded_over_all_ranks_that_torchtitan_would_shard_over(replicas, over):
    results = on_ranks(4, shards, {"data_parallel_replicate_degree": replicas})
    whole = results[0][0]
    assert sum(own for _, own in results) == whole * replicas
    assert max(own for _, own in results) < 1.1 * whole / over


# ---- tensor and expert parallelism, experts, compiled models -------------------------------------


def train_toy(rank, size, planner, family, options):
    """Gradients and counts of experts of the first step; losses, validation losses and biases of
    experts of two more."""
    given = {"steps": 3, "validation_rows": 3, **options}
    with titan.experts_in_float32():
        run = titan.Run(titan.config_of(planner, spec=toy(family), **given))
        gradients = run.first_gradients()
        counts, waits = run.expert_counts(), run.trainer.planner.sync
        run.train()
        biases = run.expert_biases()
        run.close()
    return gradients, run.losses, run.validations, biases, counts, waits


def toy(family):
    name = family.removesuffix("_experts")
    if family == "deepseek_v3_dense":
        return titan.experts_spec("deepseek_v3", dense_layers=2)
    return titan.spec_of(name) if name == family else titan.experts_spec(name)


@functools.cache
def alone(family):
    return on_ranks(1, train_toy, titan.options(256), family, {})[0]


SHARED = [
    pytest.param(4, "llama3", {"tensor_parallel_degree": 2}, id="tp"),
    pytest.param(2, "deepseek_v3_experts", {}, id="moe"),
    pytest.param(2, "deepseek_v3_experts", {"expert_parallel_degree": 2}, id="ep"),
    pytest.param(4, "deepseek_v3_dense", {"tensor_parallel_degree": 2}, id="latent-tp"),
    pytest.param(
        4,
        "qwen3_experts",
        {"tensor_parallel_degree": 2, "expert_parallel_degree": 4},
        id="tp-ep",
    ),
]


@pytest.mark.parametrize(("size", "family", "parallelism"), SHARED)
def test_models_that_are_sharded_in_other_ways_train_as_on_one_rank(size, family, parallelism):
    """Dynamic degrees, rows that stand in, and for TP rows that fill up to a multiple of it."""
    gradients, losses, validations, biases, counts, _ = alone(family)
    planner = titan.options(LIMIT, eval_context_parallel_size=2)
    results = on_ranks(size, train_toy, planner, family, {"parallelism": parallelism})
    for by_rank, expected in zip(zip(*(r[4] for r in results), strict=True), counts, strict=True):
        assert torch.equal(sum(by_rank), expected)
    for found in results:
        assert found[0].keys() == gradients.keys()
        for name, gradient in found[0].items():
            scale = float(gradients[name].abs().max())
            torch.testing.assert_close(
                gradient,
                gradients[name],
                rtol=1e-4,
                atol=4e-6 * scale,
                msg=lambda m, n=name: n + m,
            )
        assert found[1] == pytest.approx(losses, abs=1e-4)
        assert found[2] == pytest.approx(validations, abs=1e-4)
        assert len(found[3]) == len(biases)
        for bias, expected in zip(found[3], biases, strict=True):
            assert torch.equal(bias, expected)
            assert expected.any()
        assert found[5] == "micro_batch"


@pytest.mark.parametrize("family", ["llama3", "deepseek_v3_dense"])
def test_a_compiled_model_trains_as_on_one_rank(family):
    _, losses, validations, *_ = alone(family)
    options = {"compile": CompileConfig(enable=True, backend="aot_eager")}
    for found in on_ranks(2, train_toy, titan.options(LIMIT), family, options):
        assert found[1] == pytest.approx(losses, abs=1e-4)
        assert found[2] == pytest.approx(validations, abs=1e-4)


# ---- validation ----------------------------------------------------------------------------------


def validate(rank, size, eval_size, rows):
    """The loss of the same weights under one layout."""
    planner = titan.options(LIMIT, eval_context_parallel_size=eval_size)
    run = titan.Run(titan.config_of(planner, validation_rows=rows))
    validator = run.trainer.validator
    validator.validate(run.trainer.model_parts, 1)
    assert validator.planner.sync == "micro_batch"
    assert validator.eval_groups.size("cp") == (eval_size or 1)
    run.close()
    return run.validations[0]


@pytest.mark.parametrize("rows", [1, 7])
def test_the_validation_loss_is_the_same_under_every_layout(rows):
    losses = [on_ranks(4, validate, size, rows) for size in (None, 1, 2, 4)]
    reference = losses[0][0]
    assert torch.tensor(losses).sub(reference).abs().max() < 1e-6 * reference
    assert on_ranks(2, validate, 2, rows)[0] == pytest.approx(reference, rel=1e-6)


def test_a_validation_set_without_documents_is_an_error():
    with pytest.raises(AssertionError, match="the validation loaders gave no document"):
        on_ranks(1, validate_nothing)


def validate_nothing(rank, size):
    run = titan.Run(titan.config_of(titan.options(256), validation_rows=1))
    run.trainer.validator.dl_config.rows = 0
    run.trainer.validator.validate(run.trainer.model_parts, 1)


# ---- documents -----------------------------------------------------------------------------------


def test_documents_of_a_batch_begin_where_positions_do():
    tokens = torch.arange(12).view(2, 6)
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]])
    found = list(documents_of({"input": tokens, "positions": positions}, tokens + 1))
    assert [d["tokens"].tolist() for d in found] == [[0, 1, 2], [3], [4, 5], [*range(6, 12)]]
    assert all((d["labels"] == d["tokens"] + 1).all() for d in found)


def test_inputs_beside_tokens_and_positions_are_refused():
    inputs = {"input": torch.zeros(1, 3), "image": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"the loader gives \['image', 'input'\], expected input"):
        list(documents_of(inputs, torch.zeros(1, 3)))


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallelism": {"context_parallel_degree": 2}}, "context_parallel_degree is 2, expected"),
        ({"parallelism": {"pipeline_parallel_degree": 2}}, "pipeline_parallel_degree is 2, expect"),
        ({"parallelism": {"spmd_backend": "spmd_types"}}, "spmd_backend is 'spmd_types', expected"),
        ({"parallelism": {"tensor_parallel_degree": 64}}, "rank is 40, expected >= 64: every rank"),
        ({"debug": DebugConfig(moe_force_load_balance=True)}, "force_load_balance is True, expect"),
        ({"training": {"disable_cuda_graphs": False}}, "disable_cuda_graphs is False, expected"),
        (
            {"loss": ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config())},
            "loss is ChunkedLossWrapper.Config, expected",
        ),
        ({"validator": Validator.Config(enable=True)}, "validator is Validator.Config, expected"),
    ],
)
def test_options_that_were_not_tested_or_cannot_work_are_refused(options, message):
    config = titan.config_of(titan.options(LIMIT), **options)
    with pytest.raises(ValueError, match=message):
        check_supported(config)


@pytest.mark.parametrize(
    ("planner", "message"),
    [
        ({"cp_comm_type": ("p2p", "a2a")}, "expected one for all layers"),
        ({"window_size": (9, 0)}, r"window_size is \(9, 0\), expected \(-1, -1\): the model"),
        ({"eval_context_parallel_size": "auto"}, "is 'auto', expected a number"),
    ],
)
def test_planner_options_that_cannot_work_are_refused(planner, message):
    with pytest.raises(ValueError, match=message):
        check_supported(titan.config_of(hcp.Config(LIMIT, **planner)))


def test_pipeline_parallelism_is_refused_before_ranks_meet():
    parallelism = {"pipeline_parallel_degree": 2, "spmd_backend": "partial_dtensor"}
    config = titan.config_of(titan.options(LIMIT), parallelism=parallelism)
    with pytest.raises(ValueError, match="pipeline_parallel_degree is 2, expected 1: a stage of"):
        config.build()
    assert not torch.distributed.is_initialized()


def test_a_model_without_packed_attention_is_refused():
    plain = titan.MODELS["llama3"]("debugmodel", attn_backend="varlen")
    with pytest.raises(ValueError, match=r"inner_attention is VarlenAttention.Config, expected"):
        check_supported(titan.config_of(titan.options(LIMIT), spec=plain))


def test_experts_whose_rows_lie_in_buffers_of_one_size_are_refused():
    spec = titan.experts_spec("qwen3")
    moe = spec.model.layers[1].moe
    moe.routed_experts.token_dispatcher = HybridEPTokenDispatcher.Config(num_experts=4, top_k=2)
    with pytest.raises(ValueError, match=r"dispatcher is HybridEPTokenDispatcher.Config, expected"):
        check_supported(titan.config_of(titan.options(LIMIT), spec=spec))


def test_multi_token_prediction_is_refused():
    spec = deepseek_v3.model_registry("debugmodel", attn_backend="varlen")
    PackedContextParallel.Config().build().convert(spec.model)
    spec.model.mtp_layers = [spec.model.layers[-1]]
    with pytest.raises(ValueError, match="mtp_layers has 1 layers, expected none: torchtitan roll"):
        check_supported(titan.config_of(titan.options(LIMIT), spec=spec))


def test_layers_without_attention_are_refused():
    spec = titan.spec_of()
    spec.model.layers[1].attention = None
    with pytest.raises(ValueError, match=r"layers\.1\.attention\.inner_attention is NoneType"):
        check_supported(titan.config_of(titan.options(LIMIT), spec=spec))


def test_attention_of_other_kinds_is_refused():
    from torchtitan.models import gpt_oss, kimi_k2_7

    converters = [PackedContextParallel.Config()]
    with pytest.raises(ValueError, match="makes attention masks of its own"):
        gpt_oss.model_registry("debugmodel", converters=converters)
    with pytest.raises(ValueError, match="has a forward of its own, expected that of Decoder"):
        kimi_k2_7.model_registry("debugmodel", converters=converters)


@pytest.mark.parametrize("backend", ["varlen", "flex"])
def test_attention_of_both_packed_backends_is_replaced(backend):
    attention = [layer.attention for layer in titan.spec_of(backend=backend).model.layers]
    assert all(type(a.inner_attention) is PackedAttention.Config for a in attention)


def test_a_sliding_window_stays():
    spec = titan.MODELS["llama3"]("debugmodel", attn_backend="varlen")
    spec.model.layers[1].attention.inner_attention = VarlenAttention.Config(window_size=(9, 0))
    PackedContextParallel.Config().build().convert(spec.model)
    windows = [layer.attention.inner_attention.window_size for layer in spec.model.layers[:2]]
    assert windows == [(-1, 0), (9, 0)]


def train_with_torchtitans_trainer(rank, size):
    config = titan.config_of(titan.options(256))
    options = {f: getattr(config, f) for f in Trainer.Config.__slots__ if hasattr(config, f)}
    trainer = Trainer(Trainer.Config(**options))
    with pytest.raises(ValueError, match="attention_masks is a NoneType, expected a Context"):
        trainer.train()
    trainer.close()


def test_torchtitans_own_trainer_gets_an_error_that_names_the_right_one():
    on_ranks(1, train_with_torchtitans_trainer)


def test_a_limit_that_no_number_of_ranks_satisfies_is_refused():
    with pytest.raises(AssertionError, match=r"rows of 64 tokens on a rank of 2 .* > max_seqlen"):
        on_ranks(2, train, titan.options(20), "llama3", {})
