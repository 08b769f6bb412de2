"""Layers of a real model that keep, recompute or offload their rows: equal results, in the memory
that their choice says."""

from __future__ import annotations

import copy
import gc
import pickle
from unittest import mock

import pytest
import torch
from support.finetuning import documents
from support.ranks import run_ranks

import hcp

pytest.importorskip("transformers", reason="pip install '.[transformers]'")

from support.sweep import gradients, summed

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LENGTHS = (33, 7, 1, 20)
ONE_BATCH = hcp.plan(LENGTHS, ranks=1, max_tokens_per_rank=100)
MIXED = ("recompute_offload", "offload", "recompute", "keep")
CHOICES = {
    "keep": (("keep",) * 4, 0),
    "recompute": (("recompute",) * 4, 0),
    "recompute, chunks": (("recompute",) * 4, 5),
    "offload": (("offload",) * 4, 0),
    "recompute and offload": (("recompute_offload",) * 4, 3),
    "mixed": (MIXED, 4),
}


def build(kind="qwen3", dtype=torch.float64, **changes):
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(7)
    config = transformers.CONFIG_MAPPING[kind](**SMALL | changes)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    return model.to(dtype)


def registered(*given, **changes):
    from hcp.integrations.transformers import register_hcp_attention

    model = build(*given, **changes)
    register_hcp_attention(model)
    return model


def checkpointing(model):
    """Transformers' own, under the name of the version that is installed."""
    old = model.gradient_checkpointing_enable
    getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": False})


@pytest.fixture(autouse=True)
def _copies_of_any_size():
    with mock.patch("hcp.integrations.transformers.memory.host.LEAST_BYTES", 1):
        yield


def trained(model, ranks, plan=None, **options):
    """The loss of a batch over ranks, and its gradients, summed over them."""
    from hcp.integrations.transformers import causal_lm_loss, causal_lm_sample

    data = [causal_lm_sample(d) for d in documents(LENGTHS)]
    plan = plan or hcp.plan(LENGTHS, ranks=ranks, max_tokens_per_rank=34, min_degree=ranks)
    source = [i % ranks for i in range(len(data))]

    def work(groups):
        own = copy.deepcopy(model)
        rank = groups.transport.rank
        mine = [d for d, s in zip(data, source, strict=True) if s == rank]
        total = 0.0
        for cp, local in hcp.dispatch(plan, mine, source, groups):
            loss = causal_lm_loss(own, cp, local, grad_reduce="sum", **options)
            loss.backward()
            total += loss.item()
        return total, gradients(own)

    found = hcp.loopback(ranks, work)
    return sum(loss for loss, _ in found), summed([grads for _, grads in found])


def expect_equal(found, expected):
    assert abs(found[0] - expected[0]) < 1e-12
    assert found[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        assert (found[1][name] - grad).abs().max() < 1e-12, name


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", CHOICES)
def test_losses_and_gradients_are_those_of_the_plain_model(name, ranks):
    from hcp.integrations.transformers import memory

    model = registered()
    expected = trained(model, ranks)
    layers, rows = CHOICES[name]
    applied = memory.apply(model, memory.Choice(layers, chunk_rows=rows))
    expect_equal(trained(model, ranks), expected)
    applied.remove()
    expect_equal(trained(model, ranks), expected)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
        ("gemma3_text", {"sliding_window": 8}),
        ("llama", {"attention_bias": True}),
        (
            "deepseek_v3",
            {
                "q_lora_rank": 16,
                "kv_lora_rank": 16,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8,
                "v_head_dim": 12,
                "num_key_value_heads": 4,
                "moe_intermediate_size": 16,
                "num_experts_per_tok": 2,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "n_routed_experts": 4,
            },
        ),
    ],
)
def test_other_models_too(kind, changes):
    """With sinks, windows, norms after the MLP, biases, experts and latent keys."""
    from hcp.integrations.transformers import memory

    model = registered(kind, **changes)
    expected = trained(model, 2)
    memory.apply(model, memory.Choice(MIXED))
    expect_equal(trained(model, 2), expected)


def test_linear_cross_entropy_beside_them():
    from hcp.integrations.transformers import memory

    model = registered()
    expected = trained(model, 2)
    memory.apply(model, memory.Choice(MIXED, chunk_rows=4))
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        expect_equal(trained(model, 2, linear_cross_entropy=True), expected)


def test_autocast_is_that_of_the_forward():
    from hcp.integrations.transformers import memory

    model = registered(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        # Threads of ranks do not inherit autocast: one rank, in this thread.
        expected = trained(model, 1)
        memory.apply(model, memory.Choice(("recompute",) * 4, chunk_rows=100))
        found = trained(model, 1)
    assert found[0] == expected[0]
    for name, grad in expected[1].items():
        assert torch.equal(found[1][name], grad), name


# ---- what is computed, and what is kept ----------------------------------------------------------


@pytest.mark.parametrize(("word", "calls"), [("keep", 4), ("offload", 4), ("recompute", 4)])
def test_attention_runs_forward_once_for_each_layer(word, calls):
    from hcp.attention import layer
    from hcp.integrations.transformers import memory

    model = registered()
    memory.apply(model, memory.Choice((word,) * 4))
    with (
        mock.patch.object(layer, "forward", wraps=layer.forward) as forward,
        mock.patch.object(layer, "backward", wraps=layer.backward) as backward,
    ):
        trained(model, 1, ONE_BATCH)
    assert (forward.call_count, backward.call_count) == (calls, calls)


def test_a_plain_checkpoint_would_run_it_twice():
    from hcp.attention import layer

    model = registered()
    checkpointing(model)
    with mock.patch.object(layer, "forward", wraps=layer.forward) as forward:
        trained(model.train(), 1, ONE_BATCH)
    assert forward.call_count == 8


def test_a_recomputed_layer_does_not_compute_its_mlp_a_third_time():
    """Chunks are computed in the forward and in the backward; the layer's recomputation ends
    before them."""
    from hcp.integrations.transformers import memory

    model = registered()
    rows = []
    mlp = type(model.model.layers[0].mlp)
    own = mlp.forward

    def counted(self, hidden):
        rows.append(hidden.shape[1])
        return own(self, hidden)

    memory.apply(model, memory.Choice(("recompute",) * 4, chunk_rows=5))
    with mock.patch.object(mlp, "forward", counted):
        trained(model, 1, ONE_BATCH)
    assert sum(rows) == 2 * 4 * sum(LENGTHS)
    assert max(rows) == 5


@pytest.mark.parametrize("word", ["keep", "recompute"])
def test_the_last_norm_computes_so_many_rows_at_a_time(word):
    """Whatever the layers keep, in the forward and again in the backward."""
    from hcp.integrations.transformers import memory

    model = build()
    rows = []
    norm = type(model.model.norm)
    own = norm.forward

    def counted(self, hidden):
        if self is model.model.norm:
            rows.append(hidden.shape[1])
        return own(self, hidden)

    memory.apply(model, memory.Choice((word,) * 4, chunk_rows=20))
    with mock.patch.object(norm, "forward", counted):
        ids = torch.ones(1, sum(LENGTHS), dtype=torch.long)
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    assert rows == 2 * [20, 20, 20, 1]


@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-14), (torch.bfloat16, 2**-7)])
def test_a_norm_in_chunks_is_that_of_all_rows(dtype, within):
    """Rows and their gradients bit for bit, and the gradient of its weight to the rounding of the
    largest: those of chunks are summed in float32 or wider."""
    from hcp.integrations.transformers.memory.row_chunks import InChunks

    made = torch.Generator().manual_seed(3)
    exact = build().model.norm
    with torch.no_grad():
        exact.weight.copy_(1 + torch.rand(32, generator=made))
    norm = copy.deepcopy(exact).to(dtype)
    rows, grad = (torch.randn(1, 1001, 32, generator=made).to(dtype) for _ in range(2))
    exact.weight.data.copy_(norm.weight)

    def computed(part, forward, wide):
        hidden = rows.to(wide).requires_grad_()
        out = forward(hidden)
        return [out, *torch.autograd.grad(out, (hidden, part.weight), grad.to(wide))]

    expected = computed(exact, exact, torch.float64)
    whole, chunked = (computed(norm, f, dtype) for f in (norm, InChunks(norm, 50, None)))
    for a, b in zip(whole[:2], chunked[:2], strict=True):
        assert torch.equal(a, b)
    assert (chunked[2] - expected[2]).abs().max() <= within * expected[2].abs().max()


def test_a_number_and_its_conjugate_are_two():
    from torch.autograd.graph import saved_tensors_hooks

    from hcp.integrations.transformers.memory.host import HostCopies

    def gradient(copies):
        x, weight = (torch.randn(9, dtype=torch.complex128, generator=made) for _ in range(2))
        weight.requires_grad_()
        with saved_tensors_hooks(copies.pack, copies.unpack):
            total = (x * weight + x.conj() * weight * weight).abs().sum()
        total.backward()
        return weight.grad

    class Stay:
        pack = unpack = staticmethod(lambda x: x)

    made = torch.Generator().manual_seed(1)
    expected = gradient(Stay)
    made = torch.Generator().manual_seed(1)
    assert torch.equal(
        gradient(HostCopies(torch.device("cpu")).layer(torch.nn.Identity(), [])), expected
    )


def test_a_mask_that_is_expanded_over_heads_takes_its_own_bytes_and_comes_back_expanded():
    from torch.autograd.graph import saved_tensors_hooks

    from hcp.integrations.transformers.memory.host import HostCopies

    mask = torch.randn(1, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    expanded = mask.expand(2, 5, 6, 6)
    host = HostCopies(torch.device("cpu"))
    copies = host.layer(torch.nn.Identity(), [])
    seen = copies.pack(expanded), copies.pack(mask[0, 0]), copies.pack(expanded[:, :, :, 1:2])
    assert seen[0].parked is seen[1].parked  # the same memory
    assert seen[0].parked.copy.numel() == 36
    copies.computed()
    for packed, given in zip(seen, (expanded, mask[0, 0], expanded[:, :, :, 1:2]), strict=True):
        back = copies.unpack(packed)
        assert torch.equal(back, given)
        assert back.untyped_storage().nbytes() <= mask.nbytes
        assert back.shape == given.shape
    weight = torch.ones(2, 5, 6, 6, requires_grad=True)
    with saved_tensors_hooks(copies.pack, copies.unpack):
        total = (weight * expanded).sum()
    total.backward()
    assert torch.equal(weight.grad, expanded)


def test_chunks_have_no_second_derivative():
    from hcp.integrations.transformers.memory.row_chunks import InChunks

    mlp = build().model.layers[0].mlp
    x = torch.randn(1, 11, 32, dtype=torch.float64, requires_grad=True)
    out = InChunks(mlp, 4, None)(x).square().sum()
    (grad,) = torch.autograd.grad(out, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (grad.square().sum() + x.sum()).backward()


def test_a_graph_may_be_walked_twice():
    from hcp.integrations.transformers import causal_lm_loss, causal_lm_sample, memory

    model = registered()
    memory.apply(model, memory.Choice(MIXED, chunk_rows=4))

    def work(groups):
        plan = hcp.plan([20], ranks=1, max_tokens_per_rank=20)
        samples = [causal_lm_sample(d) for d in documents([20])]
        for cp, local in hcp.dispatch(plan, samples, [0], groups):
            loss = causal_lm_loss(model, cp, local, grad_reduce="sum")
            loss.backward(retain_graph=True)
            once = gradients(model)
            loss.backward()
        return once, gradients(model)

    ((once, twice),) = hcp.loopback(1, work)
    for name, grad in once.items():
        assert torch.allclose(twice[name], 2 * grad, rtol=1e-12, atol=1e-14), name


def parked():
    """How many tensors are on the host."""
    from hcp.integrations.transformers.memory.host import Parked

    gc.collect()
    return sum(type(one) is Parked for one in gc.get_objects())


def loss_of(model, rows=30):
    ids = torch.arange(3, 3 + rows)[None]
    return model(input_ids=ids, labels=ids, use_cache=False).loss


@pytest.mark.parametrize("least", [1, 2000])  # bytes: all tensors go, or none of one number a row
@pytest.mark.parametrize("word", ["offload", "recompute_offload"])
def test_a_forward_without_a_backward_leaves_nothing_on_the_host(word, least):
    """Also where an operator saves its own result, which would hold itself."""
    from hcp.integrations.transformers import memory

    model, before = build(), parked()
    memory.apply(model, memory.Choice((word,) * 4))
    with mock.patch("hcp.integrations.transformers.memory.host.LEAST_BYTES", least):
        loss = loss_of(model)
        assert parked() > before
        del loss
    assert parked() == before


@pytest.mark.parametrize("word", ["keep", "offload", "recompute_offload"])
def test_a_layer_that_fails_leaves_nothing_on_the_host_or_on_its_way(word):
    from hcp.integrations.transformers import memory

    model, before = build(), parked()
    expected = torch.autograd.grad(loss_of(model), model.lm_head.weight)[0]
    memory.apply(model, memory.Choice(("offload", "offload", word, "keep")))
    failing = model.model.layers[2].mlp.down_proj.register_forward_hook(lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model)
    assert parked() == before
    assert model.model.layers[0].forward.host._copies._leaving is None
    failing.remove()
    assert torch.equal(torch.autograd.grad(loss_of(model), model.lm_head.weight)[0], expected)


@pytest.mark.parametrize(
    ("word", "chunk_rows", "weight"),
    [
        ("offload", 0, "layers.1.mlp.up_proj"),
        ("recompute", 0, "layers.1.mlp.up_proj"),
        ("recompute_offload", 0, "layers.1.self_attn.q_proj"),
        ("recompute", 7, "layers.1.mlp.down_proj"),
        ("keep", 7, "norm"),
    ],
)
@pytest.mark.parametrize("learns", [True, False])
def test_weights_that_are_updated_before_the_backward_are_told(word, chunk_rows, weight, learns):
    """As autograd does without hooks, and where it saves no weights. Also frozen ones, by which
    gradients get to others."""
    from hcp.integrations.transformers import memory

    model = build()
    updated = model.model.get_submodule(weight).weight.requires_grad_(learns)
    memory.apply(model, memory.Choice((word,) * 4, chunk_rows))
    loss = loss_of(model)
    with torch.no_grad():
        updated.mul_(2)
    message = r"saved torch.float64 tensor of \(.*\) is at version \d+, expected \d+ as in the for"
    with pytest.raises(RuntimeError, match=message):
        loss.backward()


@pytest.mark.parametrize("learns", [True, False])
def test_rows_of_chunks_that_are_modified_before_the_backward_are_told(learns):
    from hcp.integrations.transformers.memory.row_chunks import InChunks

    rows = torch.randn(1, 11, 32, dtype=torch.float64, requires_grad=learns)
    out = InChunks(build().model.layers[0].mlp, 4, None)(rows)
    with torch.no_grad():
        rows.mul_(2)
    with pytest.raises(RuntimeError, match=r"is at version 1.* expected (version )?0"):
        out.sum().backward()


@pytest.mark.parametrize("on_its_way", [True, False])
def test_rows_that_are_modified_on_their_way_to_the_host_are_told(on_its_way):
    """A copy on another stream may have some of either. Later they are there, and as they were."""
    from torch.autograd.graph import saved_tensors_hooks

    from hcp.integrations.transformers.memory.host import HostCopies

    host = HostCopies(torch.device("cpu"))
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    rows, copies = torch.tensor([5.0, 7.0]), host.layer(torch.nn.Identity(), [weight])
    with saved_tensors_hooks(copies.pack, copies.unpack):
        out = weight * rows
    copies.computed()
    if not on_its_way:
        host.drain()
    rows.zero_()
    if on_its_way:
        with pytest.raises(RuntimeError, match="version 1, expected 0 as in the forward"):
            out.sum().backward()
    else:
        out.sum().backward()
        assert weight.grad.tolist() == [5.0, 7.0]


def test_rows_on_their_way_back_that_no_backward_took_are_waited_for():
    """Otherwise the next tensor in their memory would be written over."""
    from hcp.integrations.transformers.memory.host import HostCopies, Parked

    stream = mock.Mock()
    one = Parked(torch.ones(3), HostCopies(torch.device("cpu")))
    with (
        mock.patch.object(Parked, "_on_stream", return_value="arrived"),
        mock.patch("torch.cuda.current_stream", return_value=stream),
    ):
        one.fetch()
    stream.wait_event.assert_not_called()
    del one
    stream.wait_event.assert_called_once_with("arrived")


def test_rows_leave_a_device_that_has_no_more_layers():
    from hcp.integrations.transformers.memory.layers import _Host

    host, module = _Host(), torch.nn.Identity()
    copies = host.layer(module, [], torch.device("cpu"))
    copies.pack(torch.ones(3))
    copies.computed()
    first = host._copies
    assert first._leaving is not None
    host.layer(module, [], torch.device("meta"))
    assert first._leaving is None


def sharded(rank, size, layers, rows, apart=False):
    """Two steps' losses of a model that FSDP2 shards, layer by layer. `apart`: the last norm and
    the head are one group, as Accelerate makes it."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    from hcp.integrations.transformers import DynamicCPDataLoader, causal_lm_loss, memory

    model = registered()
    memory.apply(model, memory.Choice(layers, chunk_rows=rows))
    head = [[model.model.norm, model.lm_head]] if apart else []
    for part in (*model.model.layers, *head, model):
        fully_shard(part)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # Gloo has no average
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    groups = hcp.build_process_groups()
    config = hcp.Config(max_seqlen_per_dp_cp_rank=34, sync="micro_batch")
    losses = []
    with mock.patch("hcp.integrations.transformers.memory.host.LEAST_BYTES", 1):
        loader = DynamicCPDataLoader(documents(LENGTHS), config, groups, global_batch_size=2)
        for step in loader:
            total = torch.zeros((), dtype=torch.float64)
            for cp, local in step:
                loss = causal_lm_loss(model, cp, local, grad_reduce="mean")
                loss.backward()
                total += loss.detach() / size
            torch.distributed.all_reduce(total)
            losses.append(float(total))
            optimizer.step()
            optimizer.zero_grad()
    groups.close()
    return losses


@pytest.mark.parametrize("apart", [False, True])
def test_under_fsdp2(apart):
    plain = run_ranks(2, sharded, ("keep",) * 4, 0)
    found = run_ranks(2, sharded, MIXED, 4, apart)
    for ours, theirs in zip(found, plain, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-12)
    assert plain[0][1] != plain[0][0]


def sharded_within(rank, size):
    """Shapes of what goes to the host of a layer whose MLP FSDP2 shards apart from it."""
    from torch.distributed.fsdp import fully_shard

    from hcp.integrations.transformers import memory
    from hcp.integrations.transformers.memory.host import LayerCopies

    model, shapes = build(), set()
    memory.apply(model, memory.Choice(("offload",) * 4))
    for layer in model.model.layers:
        fully_shard(layer.mlp)
        fully_shard(layer)
    computed = LayerCopies.computed

    def note(copies):
        shapes.update(tuple(parked.copy.shape) for _, parked in copies._known.values())
        computed(copies)

    with (
        mock.patch("hcp.integrations.transformers.memory.host.LEAST_BYTES", 1),
        mock.patch.object(LayerCopies, "computed", note),
    ):
        loss_of(model)
    return shapes


def test_weights_that_fsdp2_gathers_within_a_layer_stay():
    """Their memory is taken away once their module has computed, perhaps before it is copied."""
    (shapes, _) = run_ranks(2, sharded_within)
    assert (1, 30, 48) in shapes
    assert not shapes & {(32, 48), (48, 32)}


# ---- misuse --------------------------------------------------------------------------------------


def test_a_copy_of_the_model_has_layers_of_its_own():
    from hcp.integrations.transformers import memory

    model = registered()
    memory.apply(model, memory.Choice(MIXED, chunk_rows=4))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for layer in other.model.layers[:3]:
            assert layer.forward.layer is layer
        assert other.model.layers[0].mlp.forward.part is other.model.layers[0].mlp


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": "keep"}, r"choice\.layers is 'keep', expected one of"),
        ({"layers": ["kept"] * 4}, r"choice\.layers\[0\] is 'kept', expected one of"),
        ({"layers": ["keep"] * 3}, r"choice\.layers has 3 words, expected 4"),
        ({"layers": ["keep"] * 4, "chunk_rows": -1}, r"choice\.chunk_rows is -1"),
    ],
)
def test_a_choice_that_does_not_suit_is_refused(changes, message):
    from hcp.integrations.transformers import memory

    with pytest.raises(ValueError, match=message):
        memory.apply(build(), memory.Choice(**changes))


def test_an_mlp_that_drops_out_by_a_function_is_refused():
    from hcp.integrations.transformers import memory

    model = build("starcoder2", residual_dropout=0.25)
    choice = memory.Choice(("recompute",) * 4, chunk_rows=4)
    with pytest.raises(ValueError, match=r"Starcoder2MLP.residual_dropout drops out 0.25"):
        memory.apply(model, choice)
    model = build("starcoder2", residual_dropout=0.0).train()
    memory.apply(model, choice)
    model.model.layers[0].mlp.adapter = torch.nn.Dropout(0.5)  # as adapters have one
    with pytest.raises(ValueError, match=r"Starcoder2MLP.adapter drops out 0.5"):
        model(torch.ones(1, 9, dtype=torch.int64))


def test_what_a_choice_cannot_be_applied_to_is_refused():
    from hcp.integrations.transformers import memory

    again = memory.Choice(("recompute",) * 4, chunk_rows=4)
    model = build()
    memory.apply(model, again)
    with pytest.raises(ValueError, match=r"a layer has a forward of its own.*remove\(\)"):
        memory.apply(model, again)
    model = build()
    memory.apply(model, memory.Choice(("keep",) * 4, chunk_rows=4))
    with pytest.raises(ValueError, match=r"the last norm has a forward of its own.*remove\(\)"):
        memory.apply(model, again)
    model = build()
    checkpointing(model)
    with pytest.raises(ValueError, match="gradient checkpointing is on, expected it off"):
        memory.apply(model, again)
    model = registered()
    memory.apply(model, again)
    checkpointing(model)  # as a Trainer does when it trains
    trained(model.eval(), 1, ONE_BATCH)
    with pytest.raises(ValueError, match="gradient checkpointing is on, expected it off"):
        trained(model.train(), 1, ONE_BATCH)
    with pytest.raises(ValueError, match="has 0 layers that can be computed again"):
        memory.apply(torch.nn.Linear(2, 2), again)
    experts = build("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    with pytest.raises(ValueError, match=r"chunk_rows: .* expected layers of torch\.nn\.Linear"):
        memory.apply(experts, again)
