"""Models of the real Megatron-Core in float64: hcp's layers give the logits and gradients of
Megatron's own model, without hcp, of one document at a time.

The ranks are threads of one process (hcp.loopback) that share one model, so nothing of a
micro-batch can lie in the model itself.
"""

import contextlib
import functools
import importlib.util
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.megatron_delta import with_delta_net
from support.megatron_models import YARN, mamba_hybrid
from support.ranks import run_ranks
from support.trees import Tree

import hcp

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None
        or importlib.util.find_spec("megatron.core") is None,
        reason="Megatron-Core is not installed: python -m pip install megatron-core==0.16.1",
    ),
    pytest.mark.filterwarnings("ignore"),
]

LENGTHS = [61, 5, 1, 17, 2, 30]
MLA = dict(
    multi_latent_attention=True,
    kv_channels=12,  # Megatron's own core attention takes it for the size of values
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_head_dim=8,
    qk_pos_emb_head_dim=4,
    v_head_dim=12,
)
POSITIONS = {
    "YaRN": dict(position_embedding_type="yarn"),
    "rotary embedding scaled as Llama 3's": dict(rope_scaling=True, rotary_base=100),
    "learned positions": dict(position_embedding_type="learned_absolute"),
    "positions of three axes": dict(position_embedding_type="mrope"),
    "positions of three axes over levels": dict(position_embedding_type="mrope"),
}
"""The model's position embeddings, if not `position_embedding_type="rope"`."""
OPTIONS = hcp.Config(
    sum(LENGTHS), cp_comm_type=hcp.COMM_TYPES, hierarchical_context_parallel_sizes=(2, 2)
)
MODELS = {
    "grouped queries": {},
    "heads of another size and norms of queries and keys": dict(kv_channels=20, qk_layernorm=True),
    "interleaved rotary embedding": dict(rotary_interleaved=True),
    "layers without rotary embedding": dict(no_rope_freq=[0, 1]),
    "a window in every second layer": dict(window_size=(7, 0), window_attn_skip_freq=2),
    "learnable sinks": dict(softmax_type="learnable"),
    "softmax off by one": dict(softmax_type="off-by-one"),
    "scores scaled by layer": dict(apply_query_key_layer_scaling=True),
    "latent attention": {**MLA, "rope_type": "rope"},
    "latent attention with YaRN": {**MLA, "rope_type": "yarn"},
    "latent attention without query compression": {**MLA, "rope_type": "rope", "q_lora_rank": None},
    "biases and an output gate": dict(add_qkv_bias=True, attention_output_gate=True),
    "a scale of its own": dict(softmax_scale=0.7),
    "one group of queries": dict(num_query_groups=1),
    "YaRN": {},
    "rotary embedding scaled as Llama 3's": {},
    "learned positions": {},
    "positions of three axes": dict(mrope_section=[1, 2, 1]),
    "positions of three axes over levels": dict(
        mrope_section=[1, 2, 1], cp_comm_type=["a2a+p2p", "auto"]
    ),
    "two comm types": dict(cp_comm_type=["a2a", "all_gather"]),
    "levels and whatever is fastest": dict(cp_comm_type=["a2a+p2p", "auto"]),
    "a Mamba hybrid": dict(mamba_num_groups=2),
    "a Mamba hybrid of one group": dict(mamba_num_groups=1),
    "a Mamba hybrid of few heads": dict(mamba_num_groups=1, mamba_head_dim=32),
    "a gated delta net": dict(linear_num_key_heads=2, linear_num_value_heads=4),
    "a gated delta net of one head": dict(linear_num_key_heads=1, linear_num_value_heads=1),
}

RECURRENT = "a Mamba hybrid", "a gated delta net"


def config_of(name, **options):
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    given = dict(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=32,
        num_attention_heads=4,
        num_query_groups=4 if "latent" in name else 2,
        normalization="RMSNorm",
        add_bias_linear=False,
        use_cpu_initialization=True,
        params_dtype=torch.float64,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    if "hybrid" in name:
        given |= dict(num_layers=4, mamba_state_dim=6, mamba_head_dim=16)
    if "delta" in name:
        sizes = dict(linear_conv_kernel_dim=4, linear_key_head_dim=6, linear_value_head_dim=8)
        given |= sizes | dict(activation_func=F.silu, deterministic_mode=True)
    kind = MLATransformerConfig if "latent" in name else TransformerConfig
    config = kind(**{**given, **options})
    for option, value in YARN.items():  # read by these names; fields since 0.19
        setattr(config, f"yarn_{option}", value)
    return config


def build_both(name, options, fused_rope=True):
    """Megatron's own model, and the one with hcp's layers, with the same weights."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection

    from hcp.integrations.megatron import hcp_layer_spec

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    tensor_parallel.random.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    collection = ProcessGroupCollection.use_mpu_process_groups()
    own = build(name, options, collection, lambda spec: spec).double()
    by_hcp = functools.partial(hcp_layer_spec, fused_rope=fused_rope)
    model = build(name, options, collection, by_hcp).double()
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.mul_(3)  # so that scores are not all alike
        for path, parameter in own.named_parameters():
            if "delta" in name and path.endswith("A_log"):
                parameter.fill_(-1)  # so that states last
    model.load_state_dict(own.state_dict())
    return own, model


def build(name, options, collection, wrap):
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel

    from hcp.integrations.megatron import hcp_model_class

    config = config_of(name, **options)
    if "hybrid" in name:
        return mamba_hybrid(collection, None, config=config, wrap=wrap)
    spec = get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    if "sparse" in name:
        from support.megatron_sparse import sparse_attention_spec

        spec.submodules.self_attention = sparse_attention_spec(config)
    elif "latent" in name:
        spec.submodules.self_attention.submodules.core_attention = of_any_size()
    if "delta" in name:
        spec = with_delta_net(spec)
    made, mtp = wrap(spec), None
    if config.mtp_num_layers:
        mtp = wrap(get_gpt_mtp_block_spec(config, made, use_transformer_engine=False))
    by_hcp = hcp_model_class if made is not spec and "axes" in name else lambda own: own
    return by_hcp(GPTModel)(
        config,
        made,
        vocab_size=264,
        max_sequence_length=64,
        rotary_percent=0.5 if name == "grouped queries" else 1.0,
        mtp_block_spec=mtp,
        pg_collection=collection,
        **{"position_embedding_type": "rope", **POSITIONS.get(name, {})},
    )


def of_any_size():
    """Megatron's own core attention, which does not know two arguments of its latent attention."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Attention(DotProductAttention):
        def __init__(self, *args, k_channels=None, v_channels=None, **options):
            super().__init__(*args, **options)

    return Attention


def axes_of(length):
    """Time, height and width (length, 3) of text and images of 3 by 5 tokens in turns."""
    rows, first = [], 0
    while len(rows) < length:
        rows += [[first + i] * 3 for i in range(4)]
        rows += [[first + 4, first + 4 + y, first + 4 + x] for y in range(3) for x in range(5)]
        first += 9
    return torch.tensor(rows[:length])


def position_ids_of(model, counted, axes):
    """What Megatron's model takes, of rows that count tokens and rows of axes."""
    of_axes = getattr(model, "position_embedding_type", None) == "mrope"
    return axes.T[:, None] if of_axes else counted[None]


def documents(lengths):
    """Tokens of each document, and weights of its logits in what is differentiated."""
    drawn = torch.Generator().manual_seed(0)
    tokens = [torch.randint(64, (n,), generator=drawn) for n in lengths]
    return tokens, [torch.randn(n, 264, generator=drawn, dtype=torch.float64) for n in lengths]


def computed_alone(model, lengths):
    """Logits of every document by itself, and the sum of their gradients."""
    parameters, logits = list(model.parameters()), {}
    sums = [torch.zeros_like(p) for p in parameters]
    for i, (tokens, weights) in enumerate(zip(*documents(lengths), strict=True)):
        n = len(tokens)
        positions = position_ids_of(model, torch.arange(n), axes_of(n))
        out = model(tokens[None], positions, None)[0]
        grads = torch.autograd.grad((out * weights).sum(), parameters)
        for total, grad in zip(sums, grads, strict=True):
            total += grad
        logits[i] = out.detach()
    return logits, sums


def plan_with_ranks_without_rows(lengths):
    """Of 4 ranks: in the second micro-batch a sequence of one token has three of them."""
    groups = [(1, 2, [0])], [(0, 3, [2])], [(3, 1, [1, 3, 4, 5])]
    return hcp.Plan.from_dict(
        {
            "ranks": 4,
            "max_tokens_per_rank": 100,
            "lengths": lengths,
            "micro_batches": [
                {"groups": [dict(first_rank=f, degree=d, sequences=s) for f, d, s in batch]}
                for batch in groups
            ],
        }
    )


def packed(lengths, several):
    """Sequences of the plan's documents, each of one or (`several`) of two and more: samples,
    lengths, and masks."""
    samples = [
        {"tokens": tokens, "weights": weights, "axes": axes_of(len(tokens))}
        for tokens, weights in zip(*documents(lengths), strict=True)
    ]
    if not several:
        return samples, lengths, None
    parts = [slice(0, 2), slice(2, None)]
    joined = [
        {name: torch.cat([sample[name] for sample in samples[part]]) for name in samples[0]}
        for part in parts
    ]
    masks = [hcp.Mask.documents(lengths[part]) for part in parts]
    return joined, [sum(lengths[part]) for part in parts], masks


def computed(
    model,
    ranks,
    lengths,
    room,
    alignment=1,
    comm_types=None,
    scan_type="auto",
    several=False,
    masks=None,
    **degrees,
):
    """Logits of every document, the sum of all ranks' gradients, the degrees of groups, and how
    keys travelled. `several`: see `packed`. `masks`: of each document."""
    from hcp.integrations.megatron import packed_seq_params

    samples, own_lengths, joined_masks = packed(lengths, several)
    masks = masks or joined_masks
    parameters = list(model.parameters())

    def on_rank(groups):
        rank = groups.rank("dp_cp")
        sources = [i % ranks for i in range(len(own_lengths))]
        limits = {"ranks": ranks, "max_tokens_per_rank": room, "alignment": alignment, **degrees}
        if room is None:
            plan = plan_with_ranks_without_rows(lengths)
        else:
            plan = hcp.plan(own_lengths, masks=masks, **limits)
        own = samples[rank::ranks]
        options = {"comm_types": comm_types} if comm_types else OPTIONS.dispatch_options()
        options |= {"scan_type": scan_type}
        step = hcp.dispatch(plan, own, sources, groups, **options)
        sums, logits = [torch.zeros_like(p) for p in parameters], {}
        ways = set()
        for cp, local in step:
            rows = cp.rows or alignment
            assert rows % alignment == 0
            more = 0, rows - cp.rows
            positions = F.pad(position_ids_of(model, cp.position_ids, local.axes), more)
            params = packed_seq_params(cp, rows=rows)
            out = model(F.pad(local.tokens, more)[None], positions, None,
                        packed_seq_params=params)[0, : cp.rows]  # fmt: skip
            grads = torch.autograd.grad((out * local.weights).sum(), parameters)
            for total, grad in zip(sums, grads, strict=True):
                total += grad
            logits |= whole_sequences(cp, out.detach(), sources, rank)
            ways |= {(choice.asked, choice.used) for choice in (*cp.comm.choices, *cp.scan.choices)}
        return logits, sums, {g.degree for batch in plan.micro_batches for g in batch}, ways

    results = hcp.loopback(ranks, on_rank)
    logits = {i: rows for result in results for i, rows in result[0].items()}
    joined = torch.cat([logits[i] for i in range(len(own_lengths))])
    logits = dict(enumerate(joined.split(list(lengths))))
    gradients = [sum(result[1][i] for result in results) for i in range(len(parameters))]
    return logits, gradients, *results[0][2:]


def whole_sequences(cp, out, sources, rank):
    """The rows of the micro-batch that this rank loaded, after they were computed elsewhere."""
    groups = cp.plan.micro_batches[cp.micro_batch]
    own = sorted(i for group in groups for i in group.sequences if sources[i] == rank)
    rows = cp.combine(out).split([cp.plan.lengths[i] for i in own])
    return dict(zip(own, rows, strict=True))


def compare(
    rank,
    size,
    name,
    ranks,
    room,
    alignment,
    way=None,
    fused_rope=True,
    scan_type="auto",
    several=False,
    by_span=False,
):
    with layers_on_cpu(name), contextlib.ExitStack() as wide:
        if by_span:  # long ones have a call of the kernel each
            wide.enter_context(mock.patch("hcp.integrations.megatron.mamba.LONG_SPAN", 0))
        own, model = build_both(name, MODELS[name], fused_rope)
        expected = computed_alone(own, LENGTHS)
        given = ranks, LENGTHS, room, alignment
        types = ["p2p"] if several else None
        *found, degrees, ways = computed(model, *given, types, scan_type, several)
        assert max(degrees) > 1
        assert way is None or way in ways
        check_equal(found, expected, own, model, 1e-10)
        assert any(float(rows.std()) > 0.1 for rows in expected[0].values())


@contextlib.contextmanager
def layers_on_cpu(name):
    from hcp.integrations.megatron import megatron_on_cpu

    if "hybrid" in name:
        from support.megatron_scan import stand_in_for_kernels

        stand_in_for_kernels()
    with megatron_on_cpu(), contextlib.ExitStack() as wide:
        if is_recurrent(name):  # Megatron's own casts, one of them in a compiled function
            wide.enter_context(torch.compiler.set_stance("force_eager"))
            wide.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


def is_recurrent(name):
    return "delta" in name or "hybrid" in name


def check_equal(found, expected, own, model, bound):
    """Logits of all documents to 1e-10, and gradients to a bound; of both models."""
    (logits, summed), (theirs, gradients) = found, expected
    assert sorted(logits) == sorted(theirs) == list(range(len(theirs)))
    for i, rows in theirs.items():
        assert float((logits[i] - rows).abs().max()) < 1e-10, i
    by_name = dict(zip([path for path, _ in own.named_parameters()], gradients, strict=True))
    for grad, (path, _) in zip(summed, model.named_parameters(), strict=True):
        scale = float(by_name[path].abs().max())
        assert scale > 0, path
        assert float((grad - by_name[path]).abs().max()) < bound * max(1.0, scale), path


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_what_megatrons_own_does_under_any_plan(name):
    run_ranks(1, compare, name, 3, 26, 1, timeout=110)


@pytest.mark.parametrize("name", ["learnable sinks", "latent attention", "positions of three axes"])
def test_ranks_without_rows_give_every_parameter_its_gradient(name):
    run_ranks(1, compare, name, 4, None, 1, timeout=110)


@pytest.mark.parametrize("room", [26, None])
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("scan_type", ["pass_states", "sequence_to_head"])
def test_recurrent_layers_pass_states_or_exchange_heads_as_asked(name, scan_type, room):
    way, ranks = (scan_type, scan_type), 3 if room else 4
    run_ranks(1, compare, name, ranks, room, 1, way, True, scan_type, timeout=110)


@pytest.mark.parametrize("several", [False, True])
def test_spans_that_a_kernel_scans_one_by_one_give_it_their_states(several):
    given = "a Mamba hybrid", 3, 32, 4, None, True, "pass_states", several, True
    run_ranks(1, compare, *given, timeout=110)


@pytest.mark.parametrize(
    ("name", "scan_type"),
    [
        ("grouped queries", "auto"),
        ("positions of three axes", "auto"),
        ("a Mamba hybrid", "pass_states"),
        ("a Mamba hybrid", "sequence_to_head"),
        ("a gated delta net", "pass_states"),
        ("a gated delta net", "sequence_to_head"),
    ],
)
def test_documents_of_one_sequence_are_to_layers_what_each_is_alone(name, scan_type):
    run_ranks(1, compare, name, 3, 32, 4, None, True, scan_type, True, timeout=110)


TREES = (
    Tree((9, 7, 5, 3, 1, 6, 2), (-1, 0, 0, 1, 1, 3, 0)),
    Tree((5,), (-1,)),
    Tree((2, 3, 4), (-1, 0, 0)),
)
"""Of depth 4, with a part of one token; a text; and a prompt shorter than a convolution."""


def each_text(model):
    """Logits of every tree, and the sum of their gradients, each text by itself. A token that
    several texts share counts once."""
    parameters, logits = list(model.parameters()), {}
    sums = [torch.zeros_like(p) for p in parameters]
    drawn = documents([tree.length for tree in TREES])
    for i, (tree, tokens, weights) in enumerate(zip(TREES, *drawn, strict=True)):
        logits[i] = torch.full_like(weights, torch.nan)
        for text, first in zip(tree.texts, tree.firsts, strict=True):
            out = model(tokens[None, text], torch.arange(len(text))[None], None)[0]
            loss = (out[first] * weights[text][first]).sum()
            for total, grad in zip(sums, torch.autograd.grad(loss, parameters), strict=True):
                total += grad
            logits[i][text] = out.detach()
    return logits, sums


def compare_trees(rank, size, name, degree, scan_type):
    with layers_on_cpu(name):
        own, model = build_both(name, MODELS[name])
        lengths, masks = [tree.length for tree in TREES], [tree.mask for tree in TREES]
        given = degree + 1, lengths, 48 // degree, 1, ["p2p"], scan_type
        limits = {"min_degree": degree, "max_degree": degree}
        *found, degrees, ways = computed(model, *given, masks=masks, **limits)
        assert degrees == {degree}
        check_equal(found, each_text(own), own, model, 1e-10)
        assert scan_type == "auto" or (scan_type, scan_type) in ways


@pytest.mark.parametrize(
    ("name", "scan_type"),
    [
        ("grouped queries", "auto"),
        ("a Mamba hybrid", "auto"),
        ("a Mamba hybrid", "pass_states"),
        ("a gated delta net", "pass_states"),
        ("a gated delta net", "sequence_to_head"),
    ],
)
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_texts_of_trees_are_to_layers_what_each_is_alone(name, scan_type, degree):
    """One rank more than the largest tree has: ranks without rows take part."""
    run_ranks(1, compare_trees, name, degree, scan_type, timeout=110)


def refuse_branches(rank, size):
    from hcp.integrations.megatron import packed_seq_params

    mask = hcp.Mask.shared_prefix(6, [4, 4])
    plan = hcp.plan([14], masks=[mask], ranks=3, max_tokens_per_rank=14, min_degree=2, max_degree=2)

    def work(groups):
        options = {"scan_type": "sequence_to_head"}
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport, **options)
        tokens = torch.zeros(1, cp.rows or 1, dtype=torch.int64)
        params = packed_seq_params(cp, rows=tokens.shape[1])
        with pytest.raises(ValueError, match=r"the mask of sequence 0 has branches"):
            model(tokens, torch.zeros_like(tokens), None, packed_seq_params=params)

    with layers_on_cpu("a Mamba hybrid"):
        _, model = build_both("a Mamba hybrid", MODELS["a Mamba hybrid"])
        hcp.loopback(3, work)


def test_a_mamba_mixer_that_is_to_exchange_heads_refuses_branches_by_name():
    """On all ranks, those without rows too."""
    run_ranks(1, refuse_branches, timeout=110)


@pytest.mark.parametrize("name", ["a Mamba hybrid of few heads", "a gated delta net of one head"])
def test_recurrent_layers_pass_states_to_more_ranks_than_heads(name):
    run_ranks(1, compare, name, 8, 9, 1, ("auto", "pass_states"), timeout=110)


@pytest.mark.parametrize(
    "name", ["levels and whatever is fastest", "positions of three axes over levels"]
)
def test_layers_exchange_heads_among_neighbours_and_pass_keys_around_a_ring(name):
    run_ranks(1, compare, name, 4, 18, 1, ("a2a+p2p", "a2a+p2p"), timeout=110)


@pytest.mark.parametrize(
    "name",
    [
        *("grouped queries", "positions of three axes", "latent attention"),
        *("a Mamba hybrid", "a gated delta net"),
    ],
)
def test_rows_that_alignment_adds_change_nothing(name):
    run_ranks(1, compare, name, 3, 26, 4, timeout=110)


# ---- positions of three axes ---------------------------------------------------------------------

AXES = "positions of three axes"


def axes_over_ranks(rank, size, lengths, options):
    """Megatron's groups have CP of all ranks, by which its own rotary embedding would cut angles.
    The last rank loads no sample."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    from hcp.integrations import megatron as hcp_megatron

    # Megatron computes losses and angles in float32.
    wide = mock.patch.object(torch.Tensor, "float", torch.Tensor.double)
    with hcp_megatron.megatron_on_cpu(), wide:
        options = MODELS[AXES] | dict(calculate_per_token_loss=True) | options
        own, _ = build_both(AXES, options)
        own.rotary_pos_emb.inv_freq = own.rotary_pos_emb.inv_freq.double()
        samples = [
            {"tokens": tokens, "position_ids": axes_of(len(tokens)).T}
            for tokens in documents(lengths)[0]
        ]
        for sample in samples:
            tokens, positions = sample["tokens"], sample["position_ids"]
            mask = (torch.arange(len(tokens)) < len(tokens) - 1)[None].double()
            given = dict(labels=tokens.roll(-1)[None], loss_mask=mask)
            (own(tokens[None], positions[:, None], None, **given) * mask).sum().backward()

        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(context_parallel_size=size)
        collection = ProcessGroupCollection.use_mpu_process_groups()
        model = build(AXES, options, collection, hcp_megatron.hcp_layer_spec).double()
        model.load_state_dict(own.state_dict())
        model.rotary_pos_emb.inv_freq = own.rotary_pos_emb.inv_freq
        assert model.rotary_pos_emb.cp_group.size() == size
        config = hcp.Config(32)
        groups = hcp.ProcessGroups.from_existing(collection)
        share = samples[rank :: size - 1] if rank < size - 1 else []
        (step,) = hcp_megatron.plan_batches([share], config, groups)
        assert max(group.degree for batch in step.plan.micro_batches for group in batch) > 1
        batches = step.data_iterator()
        for _ in range(len(step)):
            output, loss_of = hcp_megatron.forward_step(batches, model)
            loss_of(output)[0].backward()
        for (path, parameter), reference in zip(
            model.named_parameters(), own.parameters(), strict=True
        ):
            torch.distributed.all_reduce(parameter.grad)
            scale = float(reference.grad.abs().max())
            assert scale > 0, path
            assert float((parameter.grad - reference.grad).abs().max()) < 1e-10 * max(1, scale), (
                path
            )


@pytest.mark.parametrize(
    ("lengths", "options"),
    [(LENGTHS, {}), ([61], dict(mtp_num_layers=2))],  # newer releases weigh by the whole batch
    ids=["several samples", "a sample, with prediction layers"],
)
def test_positions_of_three_axes_travel_with_the_samples(lengths, options):
    run_ranks(3, axes_over_ranks, lengths, options, timeout=110)


def refuse_axes(rank, size):
    from hcp.integrations.megatron import megatron_on_cpu, packed_seq_params

    with megatron_on_cpu():
        own, model = build_both(AXES, MODELS[AXES])
        for option, message in (
            (dict(rotary_interleaved=True), "config.rotary_interleaved is True, expected False"),
            (MLA | dict(rope_type="rope"), r"config.mrope_section is \[1, 2, 1\], expected None"),
        ):
            kind = f"{AXES}, latent" if "rope_type" in option else AXES
            with pytest.raises(ValueError, match=message):
                build_both(kind, MODELS[AXES] | option)
        plan = hcp.plan([6], ranks=1, max_tokens_per_rank=6)
        tokens = torch.arange(6)[None]

        def on_rank(groups):
            cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
            for places in (tokens, axes_of(7).T[:, None]):
                with pytest.raises(ValueError, match=r"position_ids has .*, expected \(3, 1, 6\)"):
                    model(tokens, places, None, packed_seq_params=packed_seq_params(cp))
            # Layers of hcp in Megatron's own model, whose angles may be cut.
            own.decoder = model.decoder
            given = tokens, axes_of(6).T[:, None], None
            with pytest.raises(ValueError, match=r"no angles of its rows, .* hcp_model_class"):
                own(*given, packed_seq_params=packed_seq_params(cp))

        hcp.loopback(1, on_rank)


def test_positions_of_three_axes_that_no_row_would_be_turned_by_are_refused():
    run_ranks(1, refuse_axes, timeout=110)


# ---- latent rows ---------------------------------------------------------------------------------

LATENT = "latent attention"
WIDTHS = {
    "p2p": {True: 16 + 4, False: 4 * (12 + 12)},
    "a2a": {True: 4 * (12 + 12), False: 4 * (12 + 12)},
}
"""Elements of a row by `send_latents`: latent and rotated, or four heads' keys and values."""


def send_rows(rank, size):
    from megatron.core.process_groups_config import ProcessGroupCollection

    from hcp.integrations.megatron import hcp_layer_spec, megatron_on_cpu, packed_seq_params

    def bytes_sent(groups):
        plan = hcp.plan([40], ranks=2, max_tokens_per_rank=40, min_degree=2)
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport, comm_types=[comm_type])
        tokens = torch.zeros(1, cp.rows, dtype=torch.int64)
        with torch.no_grad():
            model(tokens, cp.position_ids[None], None, packed_seq_params=packed_seq_params(cp))
        return groups.transport.bytes_sent

    with megatron_on_cpu():
        build_both(LATENT, MODELS[LATENT])
        collection = ProcessGroupCollection.use_mpu_process_groups()
        for comm_type, widths in WIDTHS.items():
            for send, width in widths.items():
                wrap = functools.partial(hcp_layer_spec, send_latents=send)
                model = build(LATENT, MODELS[LATENT], collection, wrap).double()
                sent = hcp.loopback(2, bytes_sent)
                keys = model.config.num_layers * 20 * width * 8
                if comm_type == "p2p":
                    assert sent == [keys, keys], (send, sent)
                else:  # half of all heads, and queries and outputs and their log-sum-exps too
                    assert min(sent) >= keys / 2


def test_latent_rows_travel_in_place_of_keys_and_values():
    run_ranks(1, send_rows, timeout=110)


# ---- keys that an indexer chooses ----------------------------------------------------------------

SPARSE = dict(
    **MLA,
    rope_type="rope",
    transformer_impl="local",
    experimental_attention_variant="dsa",
    dsa_indexer_n_heads=3,
    dsa_indexer_head_dim=8,
    dsa_indexer_topk=5,
    dsa_indexer_rotate_activation=False,  # its transform is a package for GPUs
    dsa_indexer_loss_coeff=0.3,
    dsa_indexer_use_sparse_loss=True,
    calculate_per_token_loss=True,
    qk_layernorm=True,
)
SPARSE_MODELS = {
    "sparse latent attention": {},
    "sparse latent attention with YaRN": dict(rope_type="yarn"),
    "sparse latent attention without relu": dict(dsa_indexer_scoring_relu=False),
}


def has_sparse():
    found = importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core")
    return bool(found and [*Path(found.origin).parent.glob("**/dsa_layout.py")])


needs_sparse = pytest.mark.skipif(
    not has_sparse(),
    reason="Megatron-Core packs no DSA: python -m pip install megatron-core==0.19.2",
)


def compare_sparse(rank, size, name, ranks, room, alignment):
    from hcp.integrations.megatron import megatron_on_cpu

    with megatron_on_cpu():
        own, model = build_both(name, SPARSE | SPARSE_MODELS[name])
        own.train(), model.train()
        # Megatron's own computes scores and losses in float32, whatever it is given, and chooses
        # any keys of equal scores.
        exactly = dict(float=torch.Tensor.double, topk=first_of_equals)
        with mock.patch.multiple(torch.Tensor, **exactly):
            expected = computed_alone(own, LENGTHS)
        *found, degrees, _ = computed(model, ranks, LENGTHS, room, alignment)
        assert max(degrees) > 1
        check_equal(found, expected, own, model, 1e-10)


def first_of_equals(scores, k, dim=-1):
    found = scores.sort(dim=dim, descending=True, stable=True)
    return found.values.narrow(dim, 0, k), found.indices.narrow(dim, 0, k)


@needs_sparse
@pytest.mark.parametrize("name", SPARSE_MODELS)
@pytest.mark.parametrize(("ranks", "room", "alignment"), [(3, 26, 4), (4, None, 1)])
def test_chosen_keys_are_megatrons_under_any_plan(name, ranks, room, alignment):
    run_ranks(1, compare_sparse, name, ranks, room, alignment, timeout=110)


def refuse_sparse(rank, size):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from support.megatron_sparse import sparse_attention_spec

    from hcp.integrations.megatron import hcp_layer_spec, megatron_on_cpu

    name = "sparse latent attention"
    with megatron_on_cpu():
        for option, value in {
            "dsa_indexer_use_sparse_loss": False,
            "calculate_per_token_loss": False,
            "dsa_indexer_topk_freq": 2,
        }.items():
            with pytest.raises(ValueError, match=rf"config\.{option} is {value}, expected "):
                build_both(name, SPARSE | {option: value})
        config = config_of(name, **SPARSE)
        spec = get_gpt_layer_local_spec(multi_latent_attention=True, normalization="RMSNorm")
        sparse = sparse_attention_spec(config).submodules.core_attention
        spec.submodules.self_attention.submodules.core_attention = sparse
        with pytest.raises(ValueError, match="MLASelfAttention with the core attention DSA"):
            hcp_layer_spec(spec)


@needs_sparse
def test_what_sparse_attention_does_not_compute_is_refused_by_name():
    run_ranks(1, refuse_sparse, timeout=110)


# ---- who rotates ---------------------------------------------------------------------------------

ROTATED = [
    "grouped queries",  # half of each head is rotated
    "interleaved rotary embedding",
    "YaRN",
    "rotary embedding scaled as Llama 3's",
    "positions of three axes",
    "latent attention",
    "latent attention with YaRN",
]
DEGREES = {1: sum(LENGTHS), 2: 60, 4: 18}
"""Ranks, and room on each for its share of the longest document."""


def no_rotation(*args, **options):
    raise AssertionError("Megatron rotates")


def no_rotation_of_megatrons():
    """Patches of its functions, those of all layers' modules."""
    from megatron.core.transformer import attention, multi_latent_attention

    return [
        mock.patch.object(module, "apply_rotary_pos_emb", no_rotation)
        for module in (attention, multi_latent_attention)
    ]


def rotate_in_attention(rank, size, name):
    from hcp.integrations.megatron import megatron_on_cpu

    with megatron_on_cpu():
        own, model = build_both(name, MODELS[name])
        model.config.apply_rope_fusion = True  # as with Transformer Engine, whose own is not asked
        expected = computed_alone(own, LENGTHS)
        for ranks, room in DEGREES.items():
            for comm_type in ("p2p", "all_gather", "a2a"):
                one, other = no_rotation_of_megatrons()
                with one, other:
                    *found, degrees, ways = computed(
                        model, ranks, LENGTHS, room, comm_types=[comm_type]
                    )
                assert max(degrees) == ranks
                assert ranks == 1 or ways == {(comm_type, comm_type)}
                check_equal(found, expected, own, model, 1e-10)


@pytest.mark.parametrize("name", ROTATED)
def test_rotation_in_attention_is_megatrons_at_any_degree_and_comm_type(name):
    run_ranks(1, rotate_in_attention, name, timeout=110)


@pytest.mark.parametrize("name", ["YaRN", "positions of three axes", "latent attention with YaRN"])
def test_megatron_rotates_where_it_is_told_to(name):
    run_ranks(1, compare, name, 3, 26, 1, None, False, timeout=110)


def tables_of_queries_and_keys(rank, size):
    """Megatron's layers take one for each, and none for one of them."""
    from hcp.integrations.megatron import megatron_on_cpu, packed_seq_params

    with megatron_on_cpu():
        models = [build_both("grouped queries", {}, fused)[1] for fused in (True, False)]
        layers = [model.decoder.layers[0].self_attention for model in models]
        first, second = (torch.randn(64, 1, 1, 8) for _ in range(2))
        cases = [(first, second), (first, first), (None, second), (first, None), first, None]

        def on_rank(groups):
            plan = hcp.plan(LENGTHS, ranks=3, max_tokens_per_rank=26)
            for i in range(len(plan.micro_batches)):
                cp = hcp.ContextParallelHandler(plan, i, groups.transport)
                params = packed_seq_params(cp, rows=cp.rows or 1)
                generator = torch.Generator().manual_seed(groups.rank("dp_cp"))
                hidden = torch.randn(params.rows, 1, 32, generator=generator, dtype=torch.float64)
                for tables in cases:
                    outs = [one_layer(layer, hidden, tables, params) for layer in layers]
                    for pair in zip(*outs, strict=True):
                        fused, unfused = (rows[: cp.rows] for rows in pair)
                        torch.testing.assert_close(fused, unfused, rtol=0, atol=1e-10)

        hcp.loopback(3, on_rank)


def one_layer(layer, hidden, tables, params):
    """The output of an attention layer, and the gradient of its input."""
    hidden = hidden.clone().requires_grad_()
    out, _ = layer(hidden, None, rotary_pos_emb=tables, packed_seq_params=params)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    (grad,) = torch.autograd.grad((out * weights).sum(), hidden)
    return out.detach(), grad


def test_queries_and_keys_may_have_tables_of_their_own():
    run_ranks(1, tables_of_queries_and_keys, timeout=110)


def make_rotations_once(rank, size):
    """For all layers of a micro-batch, also where each has a rotary module of its own."""
    from hcp.attention import rotary as rope
    from hcp.integrations.megatron import megatron_on_cpu

    for name in ("YaRN", "positions of three axes", "latent attention with YaRN"):
        with megatron_on_cpu(), mock.patch.object(rope, "rotary_of", wraps=rope.rotary_of) as made:
            _, model = build_both(name, MODELS[name])
            computed(model, 1, LENGTHS, sum(LENGTHS))
            assert made.call_count == 1, name


def test_all_layers_of_a_micro_batch_share_one_rotation():
    run_ranks(1, make_rotations_once, timeout=110)


RECOMPUTED = {
    "positions of three axes": dict(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    ),
    "YaRN": dict(recompute_granularity="selective", recompute_modules=["core_attn"]),
    "latent attention with YaRN": dict(
        recompute_granularity="selective", recompute_modules=["mla_up_proj"]
    ),
    "latent attention": dict(recompute_granularity="selective", recompute_modules=["core_attn"]),
    "latent attention without query compression": dict(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    ),
    "interleaved rotary embedding": dict(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    ),
}


def recompute(rank, size, name, options):
    from hcp.integrations.megatron import megatron_on_cpu

    with megatron_on_cpu():
        _, plain = build_both(name, MODELS[name])
        _, model = build_both(name, {**MODELS[name], **options})
        model.load_state_dict(plain.state_dict())
        wanted, found = gradients_on_one_rank(plain), gradients_on_one_rank(model)
        for path, grad in wanted.items():
            assert float(grad.abs().max()) > 0, path
            torch.testing.assert_close(found[path], grad, rtol=0, atol=1e-10)


def gradients_on_one_rank(model):
    from hcp.integrations.megatron import packed_seq_params

    tokens, weights = documents(LENGTHS)

    def on_rank(groups):
        plan = hcp.plan(LENGTHS, ranks=1, max_tokens_per_rank=sum(LENGTHS))
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
        order = cp.layout.sequences
        axes = [axes_of(n) for n in LENGTHS]
        rows, by, axes = (torch.cat([each[i] for i in order]) for each in (tokens, weights, axes))
        positions = position_ids_of(model, cp.position_ids, axes)
        out = model(rows[None], positions, None, packed_seq_params=packed_seq_params(cp))
        (out[0] * by).sum().backward()

    model.train()
    hcp.loopback(1, on_rank)
    return {path: parameter.grad for path, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", RECOMPUTED)
def test_a_backward_that_repeats_its_forward_rotates_alike(name):
    run_ranks(1, recompute, name, RECOMPUTED[name], timeout=110)


def refuse_rotations(rank, size):
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from hcp.integrations.megatron import megatron_on_cpu
    from hcp.integrations.megatron.layers import positioned

    class Other(MLASelfAttention):
        def get_query_key_value_tensors(self, *args, **options):
            return super().get_query_key_value_tensors(*args, **options)

    with megatron_on_cpu():
        with pytest.raises(ValueError, match=r"config\.qk_head_dim is 7, expected an even number"):
            build_both("latent attention", MODELS["latent attention"] | {"qk_head_dim": 7})
        config = config_of("latent attention", **MODELS["latent attention"])
        with pytest.raises(ValueError, match="Other has a get_query_key_value_tensors of its own"):
            positioned(Other, True)(config)
        config.apply_rope_fusion = True
        with pytest.raises(ValueError, match="apply_rope_fusion is True with fused_rope=False"):
            positioned(MLASelfAttention, False)(config)
        with pytest.raises(
            ValueError, match=r"config\.fused_single_qkv_rope is True, expected False"
        ):
            build_both("grouped queries", dict(fused_single_qkv_rope=True))


def test_a_rotation_that_does_not_go_is_refused_by_name():
    run_ranks(1, refuse_rotations, timeout=110)


def roll_as_branch_dev_does(rank, size):
    from hcp.integrations.megatron import packed_seq_params
    from hcp.integrations.megatron.mtp import roll_tensor

    groups = hcp.build_process_groups()
    lengths = [5, 4]
    plan = hcp.plan(lengths, ranks=size, max_tokens_per_rank=9, min_degrees=[size, size])
    samples = [{"tokens": torch.arange(1, n + 1)} for n in lengths]
    step = hcp.dispatch(plan, samples if rank == 0 else [], [0, 0], groups)
    for cp, local in step:
        tokens, mask = local.tokens[None], torch.ones(1, cp.rows)
        for shift in (1, 2):
            tokens, padding, mask = roll_tensor(
                [tokens, torch.zeros(1, cp.rows, dtype=torch.bool), mask],
                packed_seq_params=packed_seq_params(cp),
                fill_values=[0, True, 0],
                sequence_fields=["input_ids", "padding_mask", "loss_mask"],
            )
            left = torch.tensor([lengths[i] for i in cp.layout.sequences]).repeat_interleave(
                cp.cu_seqlens.diff()
            )
            left = left - cp.position_ids[: cp.rows]  # tokens of the sequence from this one on
            expected = torch.where(left > shift, local.tokens + shift, 0)
            assert tokens.tolist() == [expected.tolist()]
            assert padding.tolist() == [(left == 1).tolist()]
            assert mask.tolist() == [(left > shift).float().tolist()]
            assert float(mask.sum()) == cp.rows  # as many as before the first shift
            assert type(mask * 2.0) is torch.Tensor


def test_fields_roll_together_as_branch_dev_of_megatron_asks():
    run_ranks(2, roll_as_branch_dev_does)


def test_mamba_heads_keep_the_group_that_branch_dev_of_megatron_sets():
    from hcp.integrations.megatron.mamba import HeadShare

    whole = mock.Mock(nheads_local_tp=4, ngroups_local_tp=2, d_inner_local_tp=8, cp_group="own")
    cp = mock.Mock(degree=2)
    cp.whole.head_slice = lambda count: slice(0, count // 2)
    share = HeadShare(whole, cp)
    assert (share.cp_group, share.nheads_local_tpcp) == ("own", 2)
    share.set_context_parallel_group("of the micro-batch")
    assert (share.cp_group, share.nheads_local_tpcp) == ("of the micro-batch", 2)
