"""rebind on models of the real Megatron-Core, when it is installed (megatron-core==0.16.1).

On a CPU Megatron-Core has no context parallelism of its own, so its layers get a core attention
that gathers keys and values, written here. All else is Megatron's: rotary embeddings and their
caches, MoE router and dispatcher, MTP, the Mamba mixer's context object, configs, and
ProcessGroupCollection. The reference of every layout is Megatron's own attention on one rank.
"""

import gc
import importlib.util
import inspect
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.megatron_models import YARN, config_of, mamba_hybrid
from support.megatron_scan import stand_in_for_kernels
from support.ranks import run_ranks

import hcp
import hcp.rebinding.places
import hcp.rebinding.twins
import hcp.rebinding.walk
from hcp.integrations.megatron import EvalContextParallel, wrap_evaluate

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None
        or importlib.util.find_spec("megatron.core") is None,
        reason="Megatron-Core is not installed",
    ),
    pytest.mark.filterwarnings("ignore"),
]


class GatheredAttention(torch.nn.Module):
    """Causal attention over the zigzag rows of a CP group."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, **options):
        super().__init__()
        self.config = config
        self.pg_collection = options["pg_collection"]

    def forward(self, query, key, value, attention_mask, **options):
        group = self.pg_collection.cp
        place, n = group.rank(), group.size()
        assert n == self.config.context_parallel_size, (n, self.config.context_parallel_size)
        parts = (
            [torch.empty_like(key) for _ in range(n)],
            [torch.empty_like(value) for _ in range(n)],
        )
        dist.all_gather(parts[0], key.contiguous(), group=group)
        dist.all_gather(parts[1], value.contiguous(), group=group)
        rows = query.shape[0]
        positions = [zigzag(rows * n, r, n) for r in range(n)]
        hidden = positions[place][:, None] < torch.cat(positions)[None]
        key, value = torch.cat(parts[0]), torch.cat(parts[1])
        repeat = query.shape[2] // key.shape[2]
        key, value = (x.repeat_interleave(repeat, 2) for x in (key, value))
        scores = torch.einsum("sbhd,tbhd->bhst", query, key) / query.shape[-1] ** 0.5
        out = torch.einsum("bhst,tbhd->sbhd", scores.masked_fill(hidden, -1e9).softmax(-1), value)
        return out.flatten(2)


def zigzag(n, place, size):
    chunks = torch.arange(n).chunk(2 * size)
    return torch.cat([chunks[place], chunks[2 * size - 1 - place]])


def on_cpu(rank, size, case):
    from hcp.integrations.megatron import megatron_on_cpu

    with megatron_on_cpu():
        return case(rank, size)


def collection_of(groups):
    """A real ProcessGroupCollection; the expert grid has no CP in it."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    roles = {role: getattr(groups, role) for role in groups.roles}
    one = groups.tp
    return ProcessGroupCollection(
        **roles, ep=one, expt_tp=one, tp_ep=one, tp_ep_pp=one, expt_dp=groups.dp_cp, embd=one
    )


def start():
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    tensor_parallel.random.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)


def moe_gpt(train, core_attention=GatheredAttention):
    """Build with this core attention, Megatron's own if it is None."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = config_of(
        num_moe_experts=2,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        moe_ffn_hidden_size=32,
        moe_token_dispatcher_type="allgather",
        add_bias_linear=False,
        mtp_num_layers=1,
    )
    spec = get_gpt_layer_local_spec(num_experts=2, moe_grouped_gemm=False)
    if core_attention is not None:
        spec.submodules.self_attention.submodules.core_attention = core_attention
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=64,
        max_sequence_length=64,
        position_embedding_type="rope",
        pg_collection=train,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False),
    )


def mean_loss(model, groups, tokens):
    """The mean over the tokens of one sequence. This rank computes its zigzag rows."""
    cp = groups.cp
    rows = zigzag(tokens.shape[1] - 1, cp.rank(), cp.size())
    with torch.no_grad():
        losses = model(tokens[:, rows], rows[None], None, labels=tokens[:, rows + 1])
    metrics = hcp.Metrics(groups)
    metrics.add("loss", losses)
    return metrics.reduce()["loss"].mean


def everything(model):
    """All groups and numbers that the model's objects hold."""
    walk = hcp.rebinding.walk.Walk(hcp.rebinding.twins.Twins.of_mapping({object(): object()}))
    walk.run(model)
    seen = {}
    for holder in walk.kept:
        for *_, key, value, _ in hcp.rebinding.places.places(holder, ""):
            if isinstance(value, (int, dist.ProcessGroup)):
                seen[id(holder), str(key)] = value if isinstance(value, int) else id(value)
    return seen


def forget_models():
    """Those that nobody holds but Megatron's cache of rotary tables, where strict finds them."""
    from megatron.core.models.common.embeddings import RotaryEmbedding

    RotaryEmbedding.forward.cache_clear()
    gc.collect()


LISTS = (
    "*_global_process_group_list*",
    *("*_GLOO'*", "*'_TENSOR_AND_DATA_PARALLEL_GROUP'*"),  # the optimizer's
)


def evaluate_gpt(rank, size):
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    start()
    collection = ProcessGroupCollection.use_mpu_process_groups()
    train = hcp.ProcessGroups.from_existing(collection)
    evaluation = train.with_context_parallel(2)
    model = moe_gpt(collection).eval()
    tokens = torch.randint(0, 64, (1, 17), generator=torch.Generator().manual_seed(0))
    own = moe_gpt(collection, core_attention=None).eval()
    own.load_state_dict(model.state_dict())
    expected = mean_loss(own, train, tokens)
    outside = mean_loss(model, train, tokens)
    del own
    forget_models()
    before, tp_group = everything(model), collection.tp
    audit = hcp.audit(model, train, evaluation)
    parts = [model, vars(parallel_state)]
    with hcp.eval_cp_context(parts, train, evaluation, strict=True, exclude=LISTS):
        assert model.cp_group is model.mtp.cp_group is evaluation.cp
        assert model.config.context_parallel_size == 2
        assert model.decoder.layers[0].mlp.router.cp_group is evaluation.cp
        assert collection.tp is tp_group
        assert collection.cp is evaluation.cp
        inside = mean_loss(model, evaluation, tokens)
        assert everything(model) != before
    assert everything(model) == before
    assert mean_loss(model, train, tokens) == outside
    assert abs(inside / expected - 1) < 1e-6, (inside, expected)
    assert abs(outside / expected - 1) < 1e-6, (outside, expected)
    return sorted({slot.role for slot in audit.slots})


def test_a_moe_gpt_with_mtp_gives_the_same_loss_under_the_eval_layout():
    for roles in run_ranks(2, on_cpu, evaluate_gpt, timeout=110):
        assert {"cache", "cp", "cp size", "dp", "tp_cp"} <= set(roles)


def build_yarn_under_cp(rank, size):
    """Its constructor cuts a table for this rank, through memory that is pinned."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection

    def yarn(core_attention):
        collection = ProcessGroupCollection.use_mpu_process_groups()
        config, spec = config_of(), get_gpt_layer_local_spec()
        config.context_parallel_size = collection.cp.size()
        for name, value in YARN.items():
            setattr(config, f"yarn_{name}", value)
        if core_attention is not None:
            spec.submodules.self_attention.submodules.core_attention = core_attention
        options = dict(position_embedding_type="yarn", pg_collection=collection)
        model = GPTModel(config, spec, 64, 64, **options).eval()
        return model, hcp.ProcessGroups.from_existing(collection)

    start()
    tokens = torch.randint(0, 64, (1, 17), generator=torch.Generator().manual_seed(0))
    own, alone = yarn(None)
    expected = mean_loss(own, alone, tokens)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    model, groups = yarn(GatheredAttention)
    model.load_state_dict(own.state_dict())
    assert mean_loss(model, groups, tokens) == pytest.approx(expected, rel=1e-6)
    for pinned in (torch.ones(3, pin_memory=True), torch.ones(3).pin_memory().cuda()):
        assert pinned.tolist() == [1, 1, 1]


def test_a_yarn_model_is_built_under_cp_on_a_cpu():
    run_ranks(2, on_cpu, build_yarn_under_cp, timeout=110)


def global_state():
    from megatron.core import parallel_state

    return (
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_context_parallel_global_ranks(),
        parallel_state.get_data_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        parallel_state.get_data_parallel_src_rank(),
    )


def switch_globals(rank, size):
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    start()
    collection = ProcessGroupCollection.use_mpu_process_groups()
    train = hcp.ProcessGroups.from_existing(collection)
    evaluation = train.with_context_parallel(2)
    model, before = moe_gpt(collection), dict(vars(parallel_state))
    outside, inside = (1, [rank], 2, 2, 0), (2, [0, 1], 1, 2, rank)
    callback = EvalContextParallel(train, evaluation)
    bridge = SimpleNamespace(model=[model])
    explicit = [model, vars(parallel_state)], ["*_global_process_group_list*"]
    assert global_state() == outside
    with hcp.eval_cp_context(model, train, evaluation, strict=True):
        assert parallel_state.get_context_parallel_group() is evaluation.cp
        assert global_state() == inside
    with hcp.eval_cp_context(explicit[0], train, evaluation, exclude=explicit[1]):
        assert global_state() == inside
    with hcp.eval_cp_context(model, train, evaluation, exclude=["parallel_state*"]):
        assert global_state() == outside
    callback.on_eval_start(bridge)
    assert global_state() == inside
    callback.on_eval_end(bridge)
    assert vars(parallel_state) == before


def test_parallel_states_globals_are_a_part_of_every_model_of_their_groups():
    run_ranks(2, on_cpu, switch_globals, timeout=110)


class MegatronLM:
    """Megatron-LM's evaluation with its global state.

    It cuts batches by the groups in parallel_state and counts micro-batches by the arguments. The
    schedule is given neither."""

    def __init__(self, collection, samples):
        self.args = Namespace(
            data_parallel_size=collection.dp.size(),
            context_parallel_size=1,
            eval_batch=len(samples),
        )
        self.samples = samples

    def data(self, groups):
        """A sample at a time, sharded by data-parallel rank."""
        for tokens in self.samples[groups.rank("dp") :: groups.size("dp")]:
            rows = torch.arange(len(tokens) - 1)
            fields = dict(tokens=tokens[:-1], labels=tokens[1:], position_ids=rows)
            yield {name: each[None] for name, each in fields.items()}

    def forward_step(self, data_iterator, model):
        from megatron.core import parallel_state, utils

        group = parallel_state.get_context_parallel_group()
        assert self.args.context_parallel_size == group.size()
        batch, options = next(data_iterator), {}
        if "is_hybrid_cp" in inspect.signature(utils.get_batch_on_this_cp_rank).parameters:
            options = dict(is_hybrid_cp=False)
        batch = utils.get_batch_on_this_cp_rank(batch, cp_group=group, **options)
        out = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return out, self.loss_func

    def loss_func(self, losses):
        report = torch.tensor([losses.sum(), losses.numel()])
        return losses.sum(), report[1].int(), {"lm loss": report}

    def evaluate(self, forward_step_func, data_iterator, model, config, pg_collection=None):
        from megatron.core.pipeline_parallel import get_forward_backward_func

        reports = get_forward_backward_func()(
            forward_step_func=forward_step_func,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=self.args.eval_batch // self.args.data_parallel_size,
            seq_length=16,
            micro_batch_size=1,
            forward_only=True,
        )
        if pg_collection is not None:
            assert pg_collection.cp.size() == self.args.context_parallel_size
        total = torch.stack([report["lm loss"] for report in reports]).sum(0)
        dist.all_reduce(total, group=model[0].pg_collection.dp_cp)
        return (total[0] / total[1]).item(), int(total[1])


def evaluate_by_globals(rank, size):
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    start()
    collection = ProcessGroupCollection.use_mpu_process_groups()
    train = hcp.ProcessGroups.from_existing(collection)
    evaluation = train.with_context_parallel(2)
    drawn = torch.Generator().manual_seed(0)
    samples = [torch.randint(0, 64, (n + 1,), generator=drawn) for n in (16, 8, 4, 12)]
    lm, model = MegatronLM(collection, samples), moe_gpt(collection).eval()
    own = moe_gpt(collection, core_attention=None).eval()
    own.load_state_dict(model.state_dict())
    with torch.no_grad():
        losses = [own(t[None, :-1], torch.arange(len(t) - 1)[None], None, labels=t[None, 1:])
                  for t in samples]  # fmt: skip
    expected = torch.cat([each.flatten() for each in losses]).mean().item()
    del own
    forget_models()

    wrapped = wrap_evaluate(lm.evaluate, train, evaluation, lm.args, strict=True)
    again = ProcessGroupCollection.use_mpu_process_groups()  # another object, the same groups
    given = [model], model.config, again
    mean, tokens = wrapped(lm.forward_step, lm.data(evaluation), *given)
    assert (mean, tokens) == (pytest.approx(expected, rel=1e-6), 40)
    plain = lm.evaluate(lm.forward_step, lm.data(train), *given)
    assert plain == (pytest.approx(expected, rel=1e-6), 40)
    assert (again.cp, lm.args.context_parallel_size) == (train.cp, 1)

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    with pytest.raises(ValueError, match="parallel_state holds a context-parallel group that"):
        wrapped(lm.forward_step, lm.data(evaluation), *given)


def test_megatron_lms_evaluation_reads_the_eval_layout_in_its_globals():
    run_ranks(2, on_cpu, evaluate_by_globals, timeout=110)


def build_with_own_groups(rank, size):
    start()
    collection = collection_of(hcp.build_process_groups())
    train = hcp.ProcessGroups.from_existing(collection)
    model = moe_gpt(collection)
    with (
        pytest.raises(ValueError, match="strict") as caught,
        hcp.eval_cp_context(model, train, train.with_context_parallel(2), strict=True),
    ):
        pytest.fail("the context was entered")
    return str(caught.value)


def test_mtp_that_took_the_global_groups_is_refused_by_name():
    """Given groups of the trainer's own, Megatron-Core 0.16's MTP still takes the global ones."""
    for text in run_ranks(2, on_cpu, build_with_own_groups, timeout=110):
        assert "model.mtp.cp_group: is a group by that name which train_pgs does not have" in text


def build_local_attention(rank, size):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    start()
    collection = collection_of(hcp.build_process_groups())
    train = hcp.ProcessGroups.from_existing(collection)
    model = GPTModel(config_of(), get_gpt_layer_local_spec(), 64, 64, pg_collection=collection)
    with (
        pytest.raises(ValueError, match="cannot be rebound") as caught,
        hcp.eval_cp_context(model, train, train.with_context_parallel(2)),
    ):
        pytest.fail("the context was entered")
    return str(caught.value)


def test_attention_without_context_parallelism_is_refused_by_name():
    for text in run_ranks(2, on_cpu, build_local_attention, timeout=110):
        assert (
            "core_attention (DotProductAttention) cannot be rebound: it computes attention" in text
        )


def build_with_linear_cross_entropy(rank, size):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from hcp.integrations.megatron import use_linear_cross_entropy

    start()
    collection, spec = collection_of(hcp.build_process_groups()), get_gpt_layer_local_spec()
    model = GPTModel(config_of(), spec, 64, 64, pg_collection=collection).eval()
    tokens = torch.arange(12)[None]
    given = (tokens, tokens, None)
    logits, losses = model(*given), model(*given, labels=tokens)
    for name, value in (("tensor_model_parallel_size", 2), ("mtp_num_layers", 1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model.config, name, value)
            with pytest.raises(ValueError, match=f"{name} is {value}, expected"):
                use_linear_cross_entropy(model)
    use_linear_cross_entropy(model)
    assert torch.equal(model(*given), logits)
    assert (model(*given, labels=tokens) - losses).abs().max() < 1e-6
    assert model.output_layer.handed_on is None
    forward = model.output_layer.forward
    model.output_layer.forward = lambda *a, **k: (forward(*a, **k)[0] * 2, None)
    with pytest.raises(ValueError, match="GPTModel changes its logits"):
        model(*given, labels=tokens)


@pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="torch has it from 2.13 on"
)
def test_a_linear_cross_entropy_gives_megatrons_losses_and_leaves_its_logits_alone():
    run_ranks(1, on_cpu, build_with_linear_cross_entropy, timeout=110)


def switch_mamba(rank, size):
    from megatron.core.ssm import mamba_context_parallel

    start()
    mamba_context_parallel.HAVE_EINOPS = True
    train = hcp.build_process_groups()
    evaluation = train.with_context_parallel(2)

    def make(groups):
        return mamba_context_parallel.MambaContextParallel(
            cp_group=groups.cp,
            d_inner_local_tp=16,
            nheads_local_tp=4,
            ngroups_local_tp=1,
            d_state=8,
            conv1d_cp1=conv,
            dt_bias_cp1=weights,
            A_log_cp1=weights,
            D_cp1=weights,
            D_has_hdim=False,
        )

    conv, weights = torch.nn.Conv1d(32, 32, 4, groups=32), torch.rand(4)
    mixer = torch.nn.Module()
    mixer.cp = make(train)
    before, fresh = dict(vars(mixer.cp)), make(evaluation)
    with hcp.eval_cp_context(mixer, train, evaluation, exclude=["*.conv1d_cp1"]):
        assert vars(mixer.cp) == vars(fresh)
        assert (mixer.cp.nheads_local_tpcp, mixer.cp.cp_rank, mixer.cp.group_repeat_count) == (
            2,
            rank,
            2,
        )
        assert torch.equal(mixer.cp.get_A_log(), fresh.get_A_log())
        assert mixer.cp.get_A_log().shape == (2,)
    assert vars(mixer.cp) == before


def test_mambas_context_object_is_what_its_constructor_makes_of_the_eval_layout():
    run_ranks(2, on_cpu, switch_mamba)


# ---- a Mamba hybrid ------------------------------------------------------------------------------


def switch_hybrid(rank, size):
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    stand_in_for_kernels()
    start()
    collection = ProcessGroupCollection.use_mpu_process_groups()
    train = hcp.ProcessGroups.from_existing(collection)
    evaluation = train.with_context_parallel(2)
    model = mamba_hybrid(collection, GatheredAttention)
    before = everything(model)
    audit = hcp.audit(model, train, evaluation)
    mixers = [model.decoder.layers[i].mixer for i in (0, 2)]
    assert {type(mixer).__name__ for mixer in mixers} == {"MambaMixer"}
    parts = [model, vars(parallel_state)]
    with hcp.eval_cp_context(parts, train, evaluation, strict=True, exclude=LISTS):
        assert model.config.context_parallel_size == 2
        assert model.rotary_pos_emb.cp_group is collection.cp is evaluation.cp
        for mixer in mixers:
            assert mixer.pg_collection is collection
            fresh = type(mixer.cp)(
                evaluation.cp,
                *(mixer.d_inner_local_tp, mixer.nheads_local_tp, mixer.ngroups_local_tp),
                *(mixer.d_state, mixer.conv1d, mixer.dt_bias, mixer.A_log, mixer.D),
                mixer.D_has_hdim,
            )
            assert vars(mixer.cp) == vars(fresh)
            assert (mixer.cp.cp_size, mixer.cp.cp_rank) == (2, rank)
            assert mixer.cp.nheads_local_tpcp == mixer.nheads_local_tp // 2
        assert everything(model) != before
    assert everything(model) == before
    return len(audit.slots), [str(finding) for finding in audit.uncovered]


def test_every_slot_of_a_mamba_hybrid_is_found_switched_and_restored():
    for slots, uncovered in run_ranks(2, on_cpu, switch_hybrid, timeout=110):
        assert slots > 8
        assert uncovered == []


def refuse_hybrid(rank, size):
    from megatron.core.process_groups_config import ProcessGroupCollection

    stand_in_for_kernels()
    start()
    collection = ProcessGroupCollection.use_mpu_process_groups()
    train = hcp.ProcessGroups.from_existing(collection)
    local = mamba_hybrid(collection, None)
    odd, between = (mamba_hybrid(collection, GatheredAttention) for _ in range(2))
    odd.decoder.layers[2].mixer.cp.nheads_local_tp = 3
    between.decoder.layers[2].mixer.cp.ngroups_local_tp = 3
    messages = []
    for each in (local, odd, between):
        before = everything(each)
        with (
            pytest.raises(ValueError, match="cannot be rebound") as caught,
            hcp.eval_cp_context(each, train, train.with_context_parallel(2)),
        ):
            pytest.fail("the context was entered")
        assert everything(each) == before
        messages.append(str(caught.value))
    return messages


def test_a_mamba_hybrid_that_cannot_work_in_the_layout_is_refused_by_name():
    context = "model.decoder.layers[2].mixer.cp (MambaContextParallel) cannot be rebound: it has "
    for attention, heads, groups in run_ranks(2, on_cpu, refuse_hybrid, timeout=110):
        assert "model.decoder.layers[1]" in attention
        assert "(DotProductAttention) cannot be rebound" in attention
        wrong = "on each of tp = 1 ranks, expected a"
        assert heads == f"{context}3 heads {wrong} multiple of CP = 2"
        assert groups == f"{context}3 groups {wrong} divisor or a multiple of CP = 2"


def refuse_delta_net(rank, size):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm import gated_delta_net
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    start()
    gated_delta_net.HAVE_FLA = True  # its kernels are Triton's; building needs none
    collection = collection_of(hcp.build_process_groups())
    train = hcp.ProcessGroups.from_existing(collection)
    heads = dict(linear_num_key_heads=2, linear_num_value_heads=4)
    model = gated_delta_net.GatedDeltaNet(
        config_of(
            **heads, linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=8
        ),
        gated_delta_net.GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear,
            out_norm=get_gpt_layer_local_spec().submodules.input_layernorm,
            out_proj=RowParallelLinear,
        ),
        pg_collection=collection,
    )
    before = everything(model)
    with (
        pytest.raises(ValueError, match="cannot be rebound") as caught,
        hcp.eval_cp_context(model, train, train.with_context_parallel(2)),
    ):
        pytest.fail("the context was entered")
    assert everything(model) == before
    return str(caught.value)


def test_a_delta_net_without_context_parallelism_is_refused_by_name():
    for text in run_ranks(2, on_cpu, refuse_delta_net, timeout=110):
        assert text.startswith("model (GatedDeltaNet) cannot be rebound: it runs its recurrence")
