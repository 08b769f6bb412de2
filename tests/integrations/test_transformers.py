"""hcp inside Transformers: its decoder models and its Trainer, the real package on gloo ranks."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import logging
import logging.handlers
import os
import pickle
import subprocess
import sys
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from support.finetuning import (
    TRAINING,
    VALIDATION,
    as_torchrun,
    documents,
    fsdp_on_cpus,
    read_by_rank_0,
)
from support.ranks import run_alone, run_ranks, try_ranks
from support.tensorboard_writer import check
from support.walks import walk_of
from torch.utils._python_dispatch import TorchDispatchMode

import hcp
from hcp import _versions as versions

pytest.importorskip("transformers", reason="pip install '.[transformers]'")

from support import architectures, sweep
from support.sweep import difference, gradients, spread, summed

OTHERS_IN_OLDER = ("axk2", "granitemoehybrid", "minicpm3", "nemotron")
"""Types that Transformers before 5.17 lacks, or that are refused there, or for another reason."""
OLDER = versions.numbers(versions.installed("transformers")) < (5, 17)


def skip_others(kind):
    if OLDER and kind in OTHERS_IN_OLDER:
        pytest.skip(f"the Transformers of now has {kind} otherwise")


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
MODELS = {
    "llama": SMALL,
    "qwen2": SMALL,
    "qwen3": SMALL | {"head_dim": 8},
    "mistral": SMALL | {"sliding_window": 8},
    "gemma3_text": SMALL | {"head_dim": 8, "sliding_window": 8, "num_hidden_layers": 6},
    "gemma2": SMALL
    | {"head_dim": 8, "sliding_window": 8, "attn_logit_softcapping": 2.0},  # caps many of them
    "gpt_oss": SMALL
    | {"head_dim": 8, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phimoe": SMALL | {"sliding_window": 8, "num_local_experts": 4},
    "qwen3_moe": SMALL | EXPERTS | {"head_dim": 8, "num_experts": 4},
    "deepseek_v3": SMALL
    | EXPERTS
    | LATENT
    | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_routed_experts": 4},
    # Its own positions start after the index of padding.
    "roberta": SMALL | {"is_decoder": True, "pad_token_id": 2, "eos_token_id": 0},
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
}
LENGTHS = (1, 33, 21, 33, 1)

needs_linear_cross_entropy = pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="torch has it from 2.13 on"
)


def chosen_plan():
    """On 3 ranks: all degrees, and a rank without rows."""
    groups = [[(0, 3, [1])], [(0, 2, [2, 0])], [(0, 1, [4]), (1, 2, [3])]]
    return hcp.Plan.from_dict(
        {
            "ranks": 3,
            "max_tokens_per_rank": 20,
            "lengths": list(LENGTHS),
            "micro_batches": [
                {
                    "groups": [
                        {"first_rank": first, "degree": degree, "sequences": sequences}
                        for first, degree, sequences in batch
                    ]
                }
                for batch in groups
            ],
        }
    )


def build(kind, **changes):
    """A small model of random weights, without dropout, that is not hcp's yet."""
    import transformers

    transformers.logging.set_verbosity_error()
    options = MODELS.get(kind, SMALL) | changes
    if kind == "gpt2":
        options |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    config = transformers.CONFIG_MAPPING[kind](**options)
    torch.manual_seed(7)
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()


# ---- models --------------------------------------------------------------------------------------


def whole(model, dataset):
    """Logits of each document alone, and the gradients of the mean loss over all of them."""
    from torch.nn import functional as F

    logits = [model(d["input_ids"][None], use_cache=False).logits[0] for d in dataset]
    losses = [
        F.cross_entropy(x[:-1], d["input_ids"][1:], reduction="sum")
        for x, d in zip(logits, dataset, strict=True)
    ]
    (sum(losses) / sum(len(d["input_ids"]) - 1 for d in dataset)).backward()
    return [x.detach() for x in logits], gradients(model)


def check_spread(model, dataset, logits, expected):
    """A model by hcp has the logits and the gradients of whole sequences."""
    from hcp.integrations.transformers import register_hcp_attention

    model.zero_grad()
    register_hcp_attention(model)
    difference, found = spread(model, dataset, logits, chosen_plan())
    assert difference < 2e-5 * max(x.abs().max() for x in logits)
    scale = max(grad.abs().max() for grad in expected.values())
    for name, grad in expected.items():
        assert (found[name] - grad).abs().max() < 1e-4 * scale, name


@pytest.mark.parametrize("kind", MODELS)
def test_logits_and_gradients_are_those_of_whole_sequences(kind):
    model, dataset = build(kind), documents(LENGTHS)
    logits, expected = whole(model, dataset)
    check_spread(model, dataset, logits, expected)


TRAINED = 8  # positions, fewer than documents have
SCALED = {
    "yarn": {"factor": 8.0, "original_max_position_embeddings": TRAINED},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
    "linear": {"factor": 8.0},
}


def scaled(kind, rope_type, trained=TRAINED):
    parameters = {"rope_type": rope_type, "rope_theta": 1e4, **SCALED[rope_type]}
    return build(kind, rope_parameters=parameters, max_position_embeddings=trained)


@pytest.mark.parametrize("rope_type", SCALED)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_scaled_rotary_embedding_is_that_of_whole_sequences(kind, rope_type):
    """Also of positions that the model was not trained for."""
    assert max(LENGTHS) > TRAINED
    dataset, plain = documents(LENGTHS), build(kind)
    unscaled, _ = whole(plain, dataset)
    model = scaled(kind, rope_type)
    logits, expected = whole(model, dataset)
    assert not torch.allclose(logits[1], unscaled[1], atol=1e-3)
    check_spread(model, dataset, logits, expected)


def test_transformers_does_not_look_for_documents_that_the_layout_has(monkeypatch):
    """It would wait for all that a GPU has to do. Calls without hcp look for them as before."""
    from transformers import masking_utils

    from hcp.integrations.transformers import model as calls
    from hcp.integrations.transformers import own_attention, register_hcp_attention

    model = build("qwen3")
    register_hcp_attention(model)
    found = []
    search = masking_utils.find_packed_sequence_indices
    search = getattr(search, "__wrapped__", search)  # of Transformers itself
    watched = mock.Mock(side_effect=lambda positions: found.append(positions) or search(positions))
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", watched)
    calls._wrap_search.cache_clear()
    plan = hcp.plan([5, 3], ranks=1, max_tokens_per_rank=8)

    def work(groups):
        ((cp, local),) = hcp.dispatch(plan, documents([5, 3]), [0, 0], groups)
        return calls.causal_lm_outputs(model, cp, local).logits, calls.model_inputs(cp, local)

    ((logits, inputs),) = hcp.loopback(1, work)
    assert len(found) == 0
    del inputs["cp"]
    with own_attention(model) as own:  # only the search keeps documents apart
        assert torch.allclose(own(**inputs).logits, logits, atol=1e-5)
    assert len(found) == 1
    calls._wrap_search.cache_clear()


def warnings_of_positions(model, caplog, monkeypatch):
    from hcp.integrations.transformers import register_hcp_attention, trained_positions
    from hcp.integrations.transformers.model import causal_lm_outputs

    monkeypatch.setattr(trained_positions, "_told", set())
    register_hcp_attention(model)
    plan = hcp.plan([40, 3], ranks=2, max_tokens_per_rank=24)

    def work(groups):
        own = documents([40, 3]) if groups.transport.rank == 0 else []
        for cp, local in hcp.dispatch(plan, own, [0, 0], groups):
            for _ in range(2):
                causal_lm_outputs(model, cp, local)

    hcp.loopback(2, work)
    return [record.getMessage() for record in caplog.records if "positions" in record.getMessage()]


def test_positions_beyond_the_trained_ones_are_warned_of_once(caplog, monkeypatch):
    model = build("llama", max_position_embeddings=16)
    (told,) = warnings_of_positions(model, caplog, monkeypatch)
    assert "a sequence has 40 tokens, and LlamaConfig names 16 positions" in told
    assert "{'rope_type': 'yarn', 'factor': 3, 'original_max_position_embeddings': 16}" in told


@pytest.mark.parametrize("rope_type", ["yarn", "llama3"])
def test_positions_that_rotary_embedding_is_scaled_to_are_not_warned_of(
    rope_type, caplog, monkeypatch
):
    assert not warnings_of_positions(scaled("llama", rope_type), caplog, monkeypatch)


needs_recurrent_layers = pytest.mark.skipif(
    OLDER,
    reason="older recurrent layers mix the documents of a pack: the probe refuses them",
)
RECURRENT = ("falcon_h1", "kimi_linear", "lfm2", "mamba2", "nemotron_h", "qwen3_next", "zamba2")


@needs_recurrent_layers
@pytest.mark.parametrize("kind", ["kimi_linear", "qwen3_next", "zamba2"])
def test_recurrent_layers_exchange_rows_for_heads(kind):
    from hcp.integrations.transformers import register_hcp_attention

    lengths = (3, 19, 1)
    model, dataset = architectures.build(kind), documents(lengths)
    logits, expected = whole(model, dataset)
    model.zero_grad()
    register_hcp_attention(model)
    plan = hcp.plan(lengths, ranks=2, max_tokens_per_rank=20, min_degree=2)
    difference, found = spread(model, dataset, logits, plan, "sequence_to_head")
    assert difference < 3e-5 * max(x.abs().max() for x in logits)
    scale = max(grad.abs().max() for grad in expected.values())
    for name, grad in expected.items():
        assert (found[name] - grad).abs().max() < 1e-4 * scale, name


def joined(dataset):
    """Documents as one sequence, whose first tokens nothing predicts."""
    labels = [torch.cat([torch.tensor([-100]), d["input_ids"][1:]]) for d in dataset]
    return {
        "input_ids": torch.cat([d["input_ids"] for d in dataset]),
        "labels": torch.cat(labels),
    }


@needs_recurrent_layers
@pytest.mark.parametrize(
    ("kind", "scan_type"),
    [
        *((kind, "auto") for kind in RECURRENT),
        *((kind, "sequence_to_head") for kind in ("kimi_linear", "qwen3_next", "zamba2")),
    ],
)
def test_documents_of_one_sequence_are_to_recurrent_layers_what_each_is_alone(kind, scan_type):
    from hcp.integrations.transformers import register_hcp_attention

    lengths = (3, 17, 1, 2, 15)
    model, dataset = architectures.build(kind), documents(lengths)
    logits, expected = whole(model, dataset)
    model.zero_grad()
    register_hcp_attention(model)
    masks = [hcp.Mask.documents(lengths[:3]), hcp.Mask.documents(lengths[3:])]
    plan = hcp.plan([21, 17], masks=masks, ranks=2, max_tokens_per_rank=20, min_degree=2)
    packs = [joined(dataset[:3]), joined(dataset[3:])]
    whole_logits = [torch.cat(logits[:3]), torch.cat(logits[3:])]
    difference, found = spread(model, packs, whole_logits, plan, scan_type)
    assert difference < 3e-5 * max(x.abs().max() for x in logits)
    scale = max(grad.abs().max() for grad in expected.values())
    for name, grad in expected.items():
        assert (found[name] - grad).abs().max() < 1e-4 * scale, name


@needs_recurrent_layers
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_pass_states_and_start_anew_in_each_document(kind):
    from hcp.integrations.transformers import register_hcp_attention

    lengths = (3, 33, 1, 2, 21)
    model, dataset = architectures.build(kind), documents(lengths)
    logits, expected = whole(model, dataset)
    model.zero_grad()
    register_hcp_attention(model)
    groups = [[(0, 3, [1, 0])], [(1, 2, [4, 2, 3])]]
    batches = [
        {"groups": [{"first_rank": f, "degree": d, "sequences": s} for f, d, s in batch]}
        for batch in groups
    ]
    limits = {"ranks": 3, "max_tokens_per_rank": 20, "lengths": list(lengths)}
    plan = hcp.Plan.from_dict(limits | {"micro_batches": batches})
    difference, found = spread(model, dataset, logits, plan)
    assert difference < 3e-5 * max(x.abs().max() for x in logits)
    scale = max(grad.abs().max() for grad in expected.values())
    for name, grad in expected.items():
        assert (found[name] - grad).abs().max() < 1e-4 * scale, name


def test_float64_is_exact_where_the_model_computes_in_it():
    from hcp.integrations.transformers import register_hcp_attention

    model, dataset = build("gpt2").double(), documents(LENGTHS)
    logits, expected = whole(model, dataset)
    model.zero_grad()
    register_hcp_attention(model)
    plan = hcp.plan(LENGTHS, ranks=4, max_tokens_per_rank=16)
    difference, found = spread(model, dataset, logits, plan)
    assert difference < 1e-12
    assert max((found[name] - grad).abs().max() for name, grad in expected.items()) < 1e-12


def test_another_attention_can_be_set_again():
    from hcp.integrations.transformers import register_hcp_attention

    model = build("llama")
    tokens = documents([12])[0]["input_ids"][None]
    before = model(tokens, use_cache=False).logits
    register_hcp_attention(model)
    model.set_attn_implementation("eager")
    assert torch.equal(model(tokens, use_cache=False).logits, before)


@pytest.mark.parametrize("other", ["eager", "sdpa"])
def test_a_micro_batch_is_refused_while_another_attention_is_set(other):
    """Another attention takes no notice of `cp=`: each rank would see its own rows alone."""
    from hcp.integrations.transformers import model_inputs, register_hcp_attention

    model, (document,) = build("llama"), documents([12])
    register_hcp_attention(model)
    model = pickle.loads(pickle.dumps(model))  # as a launcher may send it

    def compute(groups):
        plan = hcp.plan([12], ranks=2, max_tokens_per_rank=6, min_degree=2)
        own = [document] if groups.transport.rank == 0 else []
        for cp, local in hcp.dispatch(plan, own, [0], groups):
            model(**model_inputs(cp, local))

    hcp.loopback(2, compute)
    model.set_attn_implementation(other)
    with pytest.raises(ValueError, match=f"with cp= while its attention is '{other}', expected 'h"):
        hcp.loopback(2, compute)
    model.set_attn_implementation("hcp")
    hcp.loopback(2, compute)


def test_generate_is_refused_while_sharded_and_works_after():
    from hcp.integrations.transformers import (
        model_inputs,
        own_attention,
        register_hcp_attention,
    )

    model = build("llama")
    tokens = documents([6])[0]["input_ids"]
    register_hcp_attention(model)
    with pytest.raises(
        ValueError, match=r"generate .*call it inside of hcp.*own_attention\(model\)"
    ):
        model.generate(tokens[None], max_new_tokens=2)

    def sharded(groups):
        plan = hcp.plan([6], ranks=1, max_tokens_per_rank=6)
        for cp, local in hcp.dispatch(plan, [{"input_ids": tokens}], [0], groups):
            inputs = model_inputs(cp, local)
            with pytest.raises(ValueError, match=r"not used by the model: \['cp'\]"):
                model.generate(**inputs, max_new_tokens=2)
            with pytest.raises(ValueError, match="expected 1 x 6 of each"):
                model(**inputs | {"input_ids": tokens[None, :5], "position_ids": None})

    hcp.loopback(1, sharded)
    with own_attention(model) as whole:
        assert whole.generate(tokens[None], max_new_tokens=2).shape == (1, 8)
    assert model.config._attn_implementation == "hcp"


def forward(model, **changes):
    """One micro-batch of six tokens through a model."""
    from hcp.integrations.transformers import model_inputs, register_hcp_attention

    register_hcp_attention(model)
    sample = {"input_ids": torch.arange(6)}

    def work(groups):
        plan = hcp.plan([6], ranks=1, max_tokens_per_rank=6)
        for cp, local in hcp.dispatch(plan, [sample], [0], groups):
            model(**model_inputs(cp, local) | changes)

    hcp.loopback(1, work)


def test_what_attention_does_not_compute_is_refused_where_it_is_asked_for():
    with pytest.raises(ValueError, match=r"softcap is 2.0 for torch.bfloat16 on cpu, expected 0.0"):
        forward(build("gemma2").bfloat16())
    with pytest.raises(ValueError, match=r"dropout_p is 0.5, expected 0.0"):
        forward(build("llama", attention_dropout=0.5).train())
    with pytest.raises(ValueError, match=r"attention_mask has shape \(1, 6\), expected None: rows"):
        forward(build("llama"), attention_mask=torch.ones(1, 6))
    with pytest.raises(ValueError, match=r"given a mask of its own, expected none"):
        forward(build("llama"), attention_mask=torch.ones(1, 1, 6, 6))
    with pytest.raises(ValueError, match=r"called without cp=, expected the handler"):
        forward(build("llama"), cp=None)


def test_a_model_that_was_not_compared_is_refused_in_its_first_layer():
    from hcp.integrations.transformers import model_inputs, register_hcp_attention

    register_hcp_attention()
    model = build("roberta")
    model.set_attn_implementation("hcp")  # its positions would be wrong

    def work(groups):
        plan = hcp.plan([6], ranks=1, max_tokens_per_rank=6)
        for cp, local in hcp.dispatch(plan, [{"input_ids": torch.arange(3, 9)}], [0], groups):
            model(**model_inputs(cp, local))

    with pytest.raises(ValueError, match=r"that hcp has not checked, expected register_hcp_atten"):
        hcp.loopback(1, work)


REFUSED_MODELS = [
    ("mamba", {"hidden_size": 32}, "layers with a state|AttentionInterface"),
    ("bloom", {"hidden_size": 32, "n_head": 4}, "does not call its attention through Attention"),
    ("mixtral", {"output_router_logits": True}, "output_router_logits is True, expected False"),
    ("opt", {"layerdrop": 0.1}, "layerdrop is 0.1, expected 0: a rank that skips a layer leaves"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "rope_type 'dynamic', expected one that does not",
    ),
    (
        "gemma3_text",  # a set for each kind of layer
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            }
        },
        "rope_type 'dynamic', expected one that does not",
    ),
]


@pytest.mark.parametrize(("kind", "changes", "message"), REFUSED_MODELS)
def test_a_model_that_needs_more_than_attention_gives_is_refused(kind, changes, message):
    from hcp.integrations.transformers import register_hcp_attention

    small = SMALL if kind in ("llama", "mixtral") else {"vocab_size": 64}
    import transformers

    config = transformers.CONFIG_MAPPING[kind](**small | changes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=message):
        register_hcp_attention(model)
    assert model.config._attn_implementation != "hcp"


def refused_by_a_forward(model, message):
    """Refused by register_hcp_attention before training. The model stays as it was."""
    from hcp.integrations.transformers import register_hcp_attention

    model.train()
    with pytest.raises(ValueError, match=message):
        register_hcp_attention(model)
    assert model.config._attn_implementation != "hcp"
    assert not any("Positions" in repr(hook) for hook in model._forward_pre_hooks.values())
    assert all(module.training for module in model.modules())


TASKS = {
    "AutoModel": "gives no logits for 4 tokens, expected .* causal language models",
    "AutoModelForTokenClassification": r"gives logits of shape \(1, 4, 2\) for 4 tokens, expected",
    "AutoModelForSequenceClassification": r"gives logits of shape \(1, 2\) for 4 tokens, expected",
    "AutoModelForQuestionAnswering": "gives no logits for 4 tokens, expected",
}


@pytest.mark.parametrize("task", TASKS)
def test_a_model_of_another_task_is_refused(task):
    import transformers

    config = transformers.LlamaConfig(**SMALL)
    refused_by_a_forward(getattr(transformers, task).from_config(config), TASKS[task])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "doge",
            "AttributeError: the model reads 'dtype' of its attention mask, expected one that",
        ),
        ("nemotron", "does not hand its keyword arguments on to its attention, expected that cp="),
    ],
)
def test_a_model_that_leaves_no_place_for_the_handler_is_refused(kind, message):
    skip_others(kind)
    refused_by_a_forward(build(kind), message)


def llama_that(forward):
    """A Llama whose forward, given as f(original, ids, **keywords), is another."""
    import transformers

    class Changed(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, **keywords):
            return forward(super().forward, input_ids, **keywords)

    torch.manual_seed(7)
    return Changed(transformers.LlamaConfig(**SMALL))


def needs_segments(forward, ids, **keywords):
    if "token_type_ids" not in keywords:
        raise KeyError("token_type_ids are required")
    return forward(ids, **keywords)


def adds_a_prompt(forward, ids, **keywords):
    prompt = torch.full((1, 2), 9)
    keywords["position_ids"] = None
    return forward(torch.cat((prompt, ids), 1), **keywords)


def adds_a_loss(forward, ids, labels=None, **keywords):
    out = forward(ids, labels=labels, **keywords)
    if labels is not None:
        out.loss = out.loss + 1e-3 * out.logits.logsumexp(-1).pow(2).mean()
    return out


def counts_for_itself(forward, ids, position_ids=None, **keywords):
    return forward(ids, position_ids=3 * torch.arange(ids.shape[1])[None], **keywords)


def counts_by_two(forward, ids, position_ids=None, **keywords):
    own = torch.arange(ids.shape[1])[None] * 2
    return forward(ids, position_ids=own if position_ids is None else position_ids, **keywords)


def mixes_neighbours(forward, ids, **keywords):
    out = forward(ids, **keywords)
    out.logits = out.logits + torch.nn.functional.pad(out.logits, (0, 0, 1, 0))[:, :-1]
    if keywords.get("labels") is not None:
        out.loss = torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[0, 1:])
    return out


CHANGED = [
    (needs_segments, "does not compute 4 tokens with input_ids, .*: KeyError: 'token_type_ids are"),
    (adds_a_prompt, r"gives logits of shape \(1, 6, 64\) for 4 tokens, .*no tokens or prompts"),
    (adds_a_loss, "own loss of 4 tokens is .*the cross entropy of the next tokens: hcp trains on"),
    (
        counts_for_itself,
        "'s logits of 4 packed tokens are .* off its own|change by .* with the doc",
    ),
    (counts_by_two, "makes other positions than those it is given, expected 0, 1, 2"),
    (mixes_neighbours, "change by .* with the document before it in the pack, expected none"),
]


@pytest.mark.parametrize(("forward", "message"), CHANGED, ids=[f.__name__ for f, _ in CHANGED])
def test_what_a_model_computes_besides_is_found_before_training(forward, message):
    refused_by_a_forward(llama_that(forward), message)


def test_16_bits_round_and_are_not_taken_for_another_model():
    from hcp.integrations.transformers import register_hcp_attention

    for kind in ("llama", "qwen3_moe", "gpt2"):
        register_hcp_attention(build(kind).bfloat16())


def test_weights_that_are_not_there_are_refused():
    import transformers

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    refused_by_a_forward(model, "the weights of LlamaForCausalLM are on the device meta, expected")


def test_padding_in_a_document_is_refused_where_it_moves_positions():
    model = build("roberta")
    from hcp.integrations.transformers import register_hcp_attention

    register_hcp_attention(model)
    register_hcp_attention(model)  # again: positions are shifted once
    forward(model, input_ids=torch.tensor([[9, 8, 7, 6, 5, 4]]))
    with pytest.raises(ValueError, match="input_ids has the token 2 in a document, expected none"):
        forward(model)


def test_experts_that_drop_tokens_are_refused():
    model = build("mixtral", num_local_experts=2)
    model.config.moe_expert_capacity_factor = 1.25
    refused_by_a_forward(
        model, "moe_expert_capacity_factor is 1.25, expected experts that take every token"
    )


def test_what_is_no_model_of_transformers_is_refused():
    from hcp.integrations.transformers import register_hcp_attention

    with pytest.raises(ValueError, match="the model is a Linear, expected a PreTrainedModel"):
        register_hcp_attention(torch.nn.Linear(2, 2))


# ---- who rotates ---------------------------------------------------------------------------------

FUSED = {
    "llama": SMALL,
    "qwen3": MODELS["qwen3"],
    "mistral": MODELS["mistral"],
    "gpt_oss": MODELS["gpt_oss"],  # tables of half the size
    "cohere2": SMALL
    | {"head_dim": 8, "sliding_window": 8},  # neighbouring pairs; not in all layers
    "glm": SMALL | {"head_dim": 8, "partial_rotary_factor": 0.5},  # half of each head
}
"""Six forms of rotary embedding."""

ROTATED_IN_FLOAT32 = {"cohere2"}
"""By the function of the model, whatever it is given."""


def rotating(model, fused_rope):
    """A copy of a model under hcp's attention."""
    from hcp.integrations.transformers import register_hcp_attention

    made = copy.deepcopy(model)
    register_hcp_attention(made, fused_rope=fused_rope)
    return made


def computed(model, plan, comm_type="p2p"):
    """Logits of the rows of each rank, and the gradients of the mean loss, by name."""
    from hcp.integrations.transformers import causal_lm_loss, causal_lm_sample, model_inputs

    dataset = [causal_lm_sample(d) for d in documents(plan.lengths)]

    def work(groups):
        own_model, logits, rank = copy.deepcopy(model), {}, groups.transport.rank
        sources = [i % plan.ranks for i in range(len(dataset))]
        own = dataset[rank :: plan.ranks]
        for cp, local in hcp.dispatch(plan, own, sources, groups, comm_types=[comm_type]):
            with torch.no_grad():
                found = own_model(**model_inputs(cp, local)).logits[0, : cp.rows]
            logits[f"{rank}, {cp.micro_batch}"] = found
            causal_lm_loss(own_model, cp, local, grad_reduce="sum").backward()
        return logits, gradients(own_model)

    results = hcp.loopback(plan.ranks, work)
    logits = {name: rows for logits, _ in results for name, rows in logits.items()}
    return logits, summed([grads for _, grads in results])


@pytest.mark.parametrize("kind", FUSED)
def test_rotation_in_attention_is_the_models_own_at_any_degree_and_comm_type(kind):
    from hcp.integrations.transformers.transformers_rotary import rotator_of

    model = build(kind, **FUSED[kind]).double()
    fused, unfused = (rotating(model, fused_rope) for fused_rope in (True, False))
    assert (rotator_of(fused), rotator_of(unfused)) == ("attention", "model")
    bound = 1e-5 if kind in ROTATED_IN_FLOAT32 else 1e-10
    for ranks in (1, 2, 4):
        lengths = [21, 5, 12]
        plan = hcp.plan(lengths, ranks=ranks, max_tokens_per_rank=40, min_degree=ranks)
        for comm_type in ("p2p", "all_gather", "a2a"):
            found, expected = (computed(m, plan, comm_type) for m in (fused, unfused))
            assert difference(found[0], expected[0]) < bound, (ranks, comm_type)
            assert difference(found[1], expected[1]) < bound, (ranks, comm_type)


# ---- who rotates a part of each head -------------------------------------------------------------

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
PARTLY = {
    "deepseek_v3": (  # neighbours, which it gathers
        "deepseek_v3",
        {"rope_parameters": YARN, "first_k_dense_replace": 2},
    ),
    "deepseek_v3 of halves": (
        "deepseek_v3",
        {"rope_interleave": False, "first_k_dense_replace": 2},
    ),
    "deepseek_v2": ("deepseek_v2", LATENT | {"first_k_dense_replace": 2}),  # complex numbers
    "minicpm3": ("minicpm3", LATENT),
    "youtu": ("youtu", LATENT),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "llama4_text": (  # rows before heads
        "llama4_text",
        {
            "head_dim": 8,
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "layer_types": ["full_attention"] * 2,  # none in chunks
        },
    ),
}
"""Models that cut heads, or compute with what is rotated."""

PARTLY_IN_FLOAT32 = {"deepseek_v2", "llama4_text"}


def with_norms_of_its_dtype(model):
    """In place of those that compute in float32 whatever they are given."""
    for module in list(model.modules()):
        for name, norm in list(module.named_children()):
            if type(norm).__name__.endswith("RMSNorm") and hasattr(norm, "weight"):
                made = torch.nn.RMSNorm(norm.weight.shape, eps=1e-6)
                made.weight = norm.weight
                setattr(module, name, made)
    return model


def latent_or_not(model, fused_rope, send_latents):
    from hcp.integrations.transformers import register_hcp_attention

    made = copy.deepcopy(model)
    register_hcp_attention(made, fused_rope=fused_rope, send_latents=send_latents)
    return made


@pytest.mark.parametrize("kind", PARTLY)
def test_rotation_by_the_kernel_is_the_models_own_at_any_degree_and_comm_type(kind):
    from hcp.integrations.transformers.transformers_rotary import rotator_of

    family, options = PARTLY[kind]
    skip_others(family)
    model, lengths = with_norms_of_its_dtype(build(family, **options).double()), [21, 5, 12]
    unfused = latent_or_not(model, False, False)
    bound = 1e-5 if family in PARTLY_IN_FLOAT32 else 1e-10
    alone = hcp.plan(lengths, ranks=1, max_tokens_per_rank=40)
    _, of_one_rank = computed(unfused, alone)
    for send_latents in (True, False):
        fused = latent_or_not(model, True, send_latents)
        assert (rotator_of(fused), rotator_of(unfused)) == ("kernel", "model")
        for ranks in (1, 2, 4):
            plan = hcp.plan(lengths, ranks=ranks, max_tokens_per_rank=40, min_degree=ranks)
            for comm_type in ("p2p", "all_gather", "a2a"):
                case = send_latents, ranks, comm_type
                found, expected = (computed(m, plan, comm_type) for m in (fused, unfused))
                assert difference(found[0], expected[0]) < bound, case
                assert difference(found[1], expected[1]) < bound, case
                assert difference(found[1], of_one_rank) < bound, case


def test_the_kernel_rotates_a_part_of_each_query_and_one_key_of_a_row(monkeypatch):
    from hcp.attention.rotary import Rotary
    from hcp.integrations.transformers.transformers_rotary import Form

    fused = rotating(build("deepseek_v3"), True)
    shapes, made = [], []
    rotate, rotary = Rotary.rotate, Form.rotary
    monkeypatch.setattr(Rotary, "rotate", lambda self, t: shapes.append(t.shape) or rotate(self, t))
    monkeypatch.setattr(
        Form, "rotary", lambda self, *tables: made.append(self) or rotary(self, *tables)
    )
    plan = hcp.plan([9], ranks=1, max_tokens_per_rank=9)
    computed(fused, plan)
    # Twice: without gradients and with them, each through two layers, of one rotation.
    assert shapes == [(9, 4, 8), (9, 1, 8)] * 4
    assert len(made) == 2


# ---- latent rows ---------------------------------------------------------------------------------


def expands():
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    return hasattr(DeepseekV3Attention, "expand_kv")


needs_expand_kv = pytest.mark.skipif(
    not expands(),
    reason="this Transformers expands latent rows in the midst of its layers: install 5.23",
)
LATENT_MODELS = {"deepseek_v3": {}, "deepseek_v2": LATENT | EXPERTS, "youtu": LATENT}


def sending(model, send_latents):
    """A copy of a model under hcp's attention."""
    from hcp.integrations.transformers import register_hcp_attention

    made = copy.deepcopy(model)
    register_hcp_attention(made, send_latents=send_latents)
    return made


def keys_sent(model, plan, comm_type, monkeypatch):
    """Whether calls of attention got latent rows."""
    latent, own = [], hcp.ContextParallelHandler.attention

    def attention(*given, **options):
        latent.append(options.get("expand") is not None)
        return own(*given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(hcp.ContextParallelHandler, "attention", attention)
        computed(model, plan, comm_type)
    return set(latent)


@needs_expand_kv
@pytest.mark.parametrize("kind", LATENT_MODELS)
def test_latent_rows_travel_and_change_nothing(kind, monkeypatch):
    model = build(kind, **LATENT_MODELS[kind]).double()
    latent, expanded = (sending(model, send_latents) for send_latents in (True, False))
    for ranks in (1, 2, 4):
        plan = hcp.plan([21, 5, 12], ranks=ranks, max_tokens_per_rank=40, min_degree=ranks)
        for comm_type in ("p2p", "all_gather", "a2a"):
            found, expected = (computed(m, plan, comm_type) for m in (latent, expanded))
            assert difference(found[0], expected[0]) < 1e-10, (ranks, comm_type)
            assert difference(found[1], expected[1]) < 1e-10, (ranks, comm_type)
    assert keys_sent(latent, plan, "p2p", monkeypatch) == {True}
    assert keys_sent(latent, plan, "a2a", monkeypatch) == {False}
    assert keys_sent(expanded, plan, "p2p", monkeypatch) == {False}


@needs_expand_kv
def test_an_adapter_that_drops_elements_out_expands_before(monkeypatch):
    model = sending(build("deepseek_v3"), True)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.kv_b_proj = torch.nn.Sequential(attention.kv_b_proj, torch.nn.Dropout(0.1))
    plan = hcp.plan([9], ranks=2, max_tokens_per_rank=9, min_degree=2)
    assert keys_sent(model.eval(), plan, "p2p", monkeypatch) == {True}
    assert keys_sent(model.train(), plan, "p2p", monkeypatch) == {False}


@needs_expand_kv
def test_a_layer_that_computes_with_keys_expands_them_itself(caplog, monkeypatch):
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    own = DeepseekV3Attention.forward

    def forward(self, *given, **options):
        expand = self.expand_kv
        self.expand_kv = lambda *rows: tuple(2 * x for x in expand(*rows))
        try:
            return own(self, *given, **options)
        finally:
            del self.expand_kv

    caplog.set_level(logging.INFO, "hcp")
    model = build("deepseek_v3")
    monkeypatch.setattr(DeepseekV3Attention, "forward", forward)
    plan = hcp.plan([9], ranks=2, max_tokens_per_rank=9, min_degree=2)
    assert keys_sent(sending(model, True), plan, "p2p", monkeypatch) == {False}
    assert "expands keys and values before they travel" in caplog.text


def test_a_model_that_rotates_otherwise_rotates_itself(caplog):
    from hcp.integrations.transformers.transformers_rotary import rotator_of

    caplog.set_level(logging.INFO, "hcp")
    assert rotator_of(rotating(build("nanochat"), True)) == "model"
    assert rotator_of(rotating(build("deepseek_v3"), True)) == "kernel"
    assert rotator_of(rotating(build("gpt2"), True)) == "model"
    assert [record.getMessage()[:46] for record in caplog.records] == [
        "hcp: NanoChatForCausalLM rotates queries and k",
        "hcp: DeepseekV3ForCausalLM leaves rotary embed",
        *(["hcp: DeepseekV3ForCausalLM sends latent rows i"] if expands() else []),
        "hcp: GPT2LMHeadModel has no layers that could ",
    ]
    assert "apply_rotary_pos_emb rotates in a form that hcp does not know" in caplog.text


def test_one_model_is_fused_and_another_of_its_kind_is_not():
    """They share the function of their module."""
    from hcp.integrations.transformers.transformers_rotary import let_model_rotate, rotator_of

    model, tokens = build("llama"), documents([12])[0]["input_ids"][None]
    before = model(tokens, use_cache=False).logits
    fused = rotating(model, True)
    assert torch.equal(model(tokens, use_cache=False).logits, before)
    fused.set_attn_implementation("eager")
    assert torch.equal(fused(tokens, use_cache=False).logits, before)
    fused.set_attn_implementation("hcp")
    assert rotator_of(copy.deepcopy(fused)) == "attention"
    let_model_rotate(fused)
    assert rotator_of(fused) == "model"


def test_a_fused_model_that_was_pickled_is_fused(monkeypatch):
    from transformers.models.llama import modeling_llama

    own = modeling_llama.apply_rotary_pos_emb
    own = getattr(own, "__wrapped__", own)
    fused = rotating(build("llama"), True)
    plan = hcp.plan([9, 5], ranks=1, max_tokens_per_rank=20)
    expected, _ = computed(fused, plan)
    sent = pickle.dumps(fused)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", own)  # as in another process
    found, _ = computed(pickle.loads(sent), plan)
    assert difference(found, expected) == 0


def test_a_layer_that_changes_one_of_both_is_refused():
    from hcp.integrations.unrotated import Unrotated, take_rotary

    rows, cp = torch.zeros(2, 1, 4), object()
    handed = Unrotated(rows, lambda cp: None)
    with pytest.raises(ValueError, match=r"query is Tensor and key Unrotated, expected both from"):
        take_rotary(rows, handed, cp)
    with pytest.raises(ValueError, match=r"query is Unrotated and key Unrotated, expected both"):
        take_rotary(Unrotated(rows, lambda cp: None), handed, cp)


def halves(q, k, cos, sin):
    """Llama's."""

    def rotated(x):
        first, second = x.chunk(2, -1)
        return x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)

    return rotated(q), rotated(k)


def test_the_form_of_a_function_is_found_or_refused():
    from hcp.integrations.transformers.transformers_rotary import FORMS, UnknownRotaryError, form_of

    assert form_of(halves, 8, 8, 8) == FORMS[0]
    wrong = {
        "the other way round": lambda q, k, cos, sin: halves(q, k, cos, -sin),
        "queries only": lambda q, k, cos, sin: (halves(q, k, cos, sin)[0], k),
        "a factor": lambda q, k, cos, sin: tuple(1.001 * x for x in halves(q, k, cos, sin)),
        "one result": lambda q, k, cos, sin: halves(q, k, cos, sin)[0],
    }
    for function in wrong.values():
        with pytest.raises(UnknownRotaryError, match="in a form that hcp does not know"):
            form_of(function, 8, 8, 8)
    with pytest.raises(
        UnknownRotaryError, match=r"does not rotate .* tables of 6 elements: Runtime"
    ):
        form_of(halves, 8, 8, 6)


def gathered(q, k, cos, sin):
    """DeepSeek's: neighbours are pairs, and their first elements come first."""

    def rotated(x):
        half = cos.shape[-1] // 2
        a, b, c, s = x[..., ::2], x[..., 1::2], cos[:, None, :, :half], sin[:, None, :, :half]
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    return rotated(q), rotated(k)


def numbers(q, k, table):
    """Llama 4's: complex numbers, and rows before heads."""

    def rotated(x):
        of_pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(of_pairs * table[:, :, None]).flatten(3).type_as(x)

    return rotated(q), rotated(k)


def test_forms_say_the_order_of_pairs_and_where_rows_are():
    from hcp.integrations.transformers.transformers_rotary import UnknownRotaryError, form_of

    form = form_of(gathered, 8, 8, 8)
    assert (form.interleaved, form.gathered, form.rows_first) == (False, True, False)
    form = form_of(numbers, 8, 8, 4, complex_table=True)
    assert (form.interleaved, form.gathered, form.rows_first) == (True, False, True)

    def conjugated(q, k, table):
        return numbers(q, k, table.conj())

    with pytest.raises(UnknownRotaryError, match="in a form that hcp does not know"):
        form_of(conjugated, 8, 8, 4, complex_table=True)


def marked(rotator, *tables):
    from hcp.integrations.transformers.transformers_rotary import _Marked

    plan = hcp.plan([5], ranks=1, max_tokens_per_rank=5)
    (cp,) = hcp.loopback(1, lambda groups: hcp.ContextParallelHandler(plan, 0, groups.transport))
    return [_Marked(table, rotator, cp) for table in tables]


def test_a_function_with_marked_tables_gives_its_own_elements():
    """Whatever a layer does with them then."""
    from hcp.integrations.transformers.transformers_rotary import _by_hcp

    drawn = torch.Generator().manual_seed(0)
    cos, sin = torch.randn(2, 1, 5, 8, generator=drawn, dtype=torch.float64)
    table = torch.polar(torch.ones(1, 5, 4), cos[..., :4].float())
    q, k = (torch.randn(1, n, 5, 8, generator=drawn, dtype=torch.float64) for n in (3, 1))
    for function, tables, by_rows in (
        (halves, (cos, sin), False),
        (gathered, (cos, sin), False),
        (numbers, (table,), True),
    ):
        given = [x.transpose(1, 2) if by_rows else x for x in (q, k)]
        found = _by_hcp(function)(*given, *marked("kernel", *tables))
        bound = 1e-6 if by_rows else 1e-14  # it computes in float32
        for mine, theirs in zip(found, function(*given, *tables), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=bound)


def test_a_function_with_other_rows_or_tables_than_marked_ones_is_refused():
    from hcp.integrations.transformers.transformers_rotary import UnknownRotaryError, _by_hcp

    cos, rows = torch.zeros(1, 5, 8), torch.zeros(1, 2, 5, 8)
    kernel, attention = marked("kernel", cos, cos), marked("attention", cos, cos)
    with pytest.raises(UnknownRotaryError, match=r"rows of shape \(2, 2, 5, 8\), expected one"):
        _by_hcp(halves)(rows.expand(2, -1, -1, -1), rows, *kernel)
    with pytest.raises(UnknownRotaryError, match=r"called with \(Tensor, Tensor, _Marked\), exp"):
        _by_hcp(halves)(rows, rows, kernel[0])
    with pytest.raises(UnknownRotaryError, match="a form that hcp's attention does not know"):
        _by_hcp(gathered)(rows, rows, *attention)


# ---- all architectures ---------------------------------------------------------------------------


SAMPLE = {
    "xlm-roberta": sweep.EQUAL,  # its own positions start after the index of padding
    "starcoder2": sweep.FUSED,
    "longcat_flash": sweep.KERNEL,
    "phi": sweep.KERNEL,
    "granitemoehybrid": sweep.FUSED,
    "jamba": "have layers with a state that scans the sequence",
    "mpt": "do not call attention through `AttentionInterface`",
    "axk2": "have linear, sparse or convolution layers",
    "doge": "make or read a mask of their own",
    "nemotron": "do not hand `cp=` on to their layers",
}
"""Kinds of models, and what the sweep over all of them finds."""


@pytest.mark.parametrize("kind", SAMPLE)
def test_an_architecture_is_right_or_refused_before_training(kind):
    skip_others(kind)
    found = sweep.judged(kind)
    assert (found.result, found.wrong) == (SAMPLE[kind], False), found.message


def test_a_configuration_need_not_name_its_padding():
    """As that of CodeGen since Transformers 5.24."""
    from hcp.integrations.transformers import register_hcp_attention

    model = build("llama")

    class Without(type(model.config)):
        def __getattribute__(self, name):
            if name == "pad_token_id":
                raise AttributeError(name)
            return super().__getattribute__(name)

    model.config.__class__ = Without
    register_hcp_attention(model)
    assert model.config._attn_implementation == "hcp"


def test_a_wrong_architecture_is_found(monkeypatch):
    from hcp.integrations.transformers import probe

    monkeypatch.setattr(probe, "_first_position", lambda model, document, own: 0)
    monkeypatch.setattr(probe, "_compare", lambda *given: given[-1])
    found = sweep.judged("roberta")
    assert found.wrong
    assert "off on 1 ranks" in found.result


@pytest.mark.skipif(
    metadata.version("transformers") != "5.24.0", reason="the guide's table is of 5.24.0"
)
def test_the_guide_has_a_verdict_of_each_architecture_once():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    rows = [line.split("|")[-2] for line in sweep.in_the_guide().splitlines() if "| `" in line]
    kinds = [kind.strip(" `") for row in rows for kind in row.split(",")]
    assert sorted(kinds) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


# ---- the Trainer ---------------------------------------------------------------------------------

LIMIT = 30
LINEAR = {"linear_cross_entropy": True}


def make_trainer(
    size,
    folder,
    kind="llama",
    *,
    limit=LIMIT,
    evaluation=None,
    dynamic=True,
    prepare=lambda: None,
    data=None,
    options=None,
    model=None,
    **args,
):
    """`prepare` is called between Transformers' arguments and its Trainer. `data`: of training.
    `options`: of the Trainer. `model`: in place of a whole one of that kind."""
    import transformers
    from transformers import TrainingArguments

    from hcp.integrations.transformers import Trainer

    model = model or build(kind)
    if kind == "gpt2":
        model = model.double()
    chosen = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8 // size,
        "per_device_eval_batch_size": 4 // size,
        "max_steps": 20,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "eval_strategy": "steps",
        "eval_steps": 10,
    }
    arguments = TrainingArguments(**chosen | args)
    prepare()
    trainer = Trainer(
        model,
        arguments,
        train_dataset=documents(TRAINING) if data is None else data,
        eval_dataset=documents(VALIDATION, seed=1),
        cp=hcp.Config(max_seqlen_per_dp_cp_rank=limit, eval_context_parallel_size=evaluation),
        dynamic_cp=dynamic,
        **options or {},
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def record(trainer):
    """Losses of all steps in full precision, gradients of the first step, evaluations, and hcp's
    metrics in the trainer's own log."""
    import transformers

    losses, first, rows = [], {}, []
    step = trainer.training_step

    def training_step(model, inputs, *others):
        loss = step(model, inputs, *others)
        losses.append(loss.item())
        rows.append([cp.rows for cp, _ in inputs])
        return loss

    class Watch(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **keywords):
            first.update({} if first else gradients(model))

    trainer.training_step = training_step
    trainer.add_callback(Watch())
    trainer.args.max_grad_norm = 0.0
    trainer.train()
    history = trainer.state.log_history
    return {
        "losses": losses,
        "logged": [entry["loss"] for entry in history if "loss" in entry],
        "first": first,
        "evaluations": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "rows": rows,
        "flos": trainer.state.total_flos,
        "metrics": [
            {name: value for name, value in entry.items() if name.startswith("hcp/")}
            for entry in history
        ],
    }


STEPS = {"llama": 8, "qwen2": 20, "gpt2": 8}


def train(rank, size, folder, kind, options):
    as_torchrun(size)
    steps = {"max_steps": STEPS[kind], "eval_steps": STEPS[kind] // 2} if kind in STEPS else {}
    return record(make_trainer(size, folder, kind, **steps | options))


def mean_of(results, key):
    """Over ranks, step by step."""
    return torch.tensor([result[key] for result in results], dtype=torch.float64).mean(0)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    found = {}

    def run(kind):
        if kind not in found:
            folder = tmp_path_factory.mktemp("one")
            found[kind] = run_ranks(1, train, folder, kind, {"limit": 128})
        return found[kind]

    return run


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"evaluation": 2, "gradient_checkpointing": True}),
        ("llama", {"dynamic": False, "evaluation": 1}),
        ("qwen2", {}),
        ("gpt2", {"evaluation": 4}),
        ("gpt2", {"dynamic": False}),
        pytest.param(
            *("gpt2", {"evaluation": 2, "options": LINEAR}),
            marks=needs_linear_cross_entropy,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)) or "dynamic",
)
def test_steps_are_those_of_one_rank(kind, options, one_rank, tmp_path):
    alone, four = one_rank(kind), run_ranks(4, train, tmp_path, kind, options, timeout=120)
    tolerance = 1e-9 if kind == "gpt2" else 1e-4
    losses, expected = mean_of(four, "losses"), mean_of(alone, "losses")
    assert len(losses) == STEPS[kind]
    assert all(result["losses"] == four[0]["losses"] for result in four), "of a rank's share"
    assert (losses - expected).abs().max() < tolerance
    assert expected[-1] < expected[0]
    assert (mean_of(four, "logged") - mean_of(four, "losses")).abs().max() < 1e-5
    scale = max(grad.abs().max() for grad in alone[0]["first"].values())
    for name, grad in alone[0]["first"].items():
        assert (four[0]["first"][name] - grad).abs().max() < 1e-2 * tolerance * scale, name
    evaluations = torch.tensor([result["evaluations"] for result in (*four, *alone)])
    assert evaluations.shape == (5, 2)
    assert (evaluations - evaluations[-1]).abs().max() < tolerance
    rows = [[n for result in four for n in result["rows"][i]] for i in range(STEPS[kind])]
    assert max(map(max, rows)) <= LIMIT
    assert 0 in itertools.chain(*rows), "no rank was without rows"
    assert four[0]["flos"] == pytest.approx(alone[0]["flos"])
    logged = [found for found in four[0]["metrics"] if found]
    assert len(logged) == STEPS[kind] < len(four[0]["metrics"]), "with each loss, and nowhere else"
    for found in logged:
        check(found, sequences=found["hcp/sequences"], ranks=4)
    assert [found["hcp/sequences"] for found in logged[:3]] == [8, 8, 1]  # of an epoch


def test_under_autocast_a_rank_computes_what_one_rank_does(tmp_path):
    options = {"bf16": True, "max_steps": 3, "eval_steps": 3}
    (alone,) = run_ranks(1, train, tmp_path, "qwen3", options | {"limit": 128})
    four = run_ranks(4, train, tmp_path, "qwen3", options, timeout=120)
    apart = mean_of(four, "losses") - mean_of([alone], "losses")
    assert 0 < apart.abs().max() < 2e-2  # bfloat16, not the types of the weights
    assert four[0]["evaluations"] == pytest.approx(alone["evaluations"], abs=2e-2)


def train_twice(rank, size, folder):
    """Six steps at once; three and, from the checkpoint, three more."""
    as_torchrun(size)
    options = {
        "limit": 64,
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "no",
    }
    options["max_grad_norm"] = 0.0
    straight = record(make_trainer(size, folder / "straight", **options))
    # Step 2 of 3 in an epoch: the middle.
    resumed = make_trainer(size, folder / "straight", **options)
    resumed.train(resume_from_checkpoint=str(folder / "straight" / "checkpoint-4"))
    return straight["logged"], [x["loss"] for x in resumed.state.log_history if "loss" in x]


CANNOT_RESUME = pytest.mark.skipif(
    versions.numbers(metadata.version("transformers")) < (5, 18),
    reason="Transformers up to 5.17 cannot load an optimizer's state onto several ranks of a CPU",
)


@CANNOT_RESUME
def test_a_checkpoint_goes_on_in_the_middle_of_an_epoch(tmp_path):
    for straight, resumed in run_ranks(2, train_twice, tmp_path):
        assert len(straight) == len(resumed) == 6
        assert resumed == pytest.approx(straight, abs=1e-6)


def resume_with_other_batches(rank, size, folder):
    """What is said when a checkpoint of global batches of 8 is resumed otherwise."""
    as_torchrun(size)
    options = {"limit": 64, "max_steps": 3, "eval_strategy": "no"}
    saved = options | {"save_strategy": "steps", "save_steps": 2}
    make_trainer(size, folder, **saved).train()
    said = []
    checkpoint = folder / "checkpoint-2"
    for others in (
        {"per_device_train_batch_size": 4 // size},  # as on half of the ranks
        {"data_seed": 3},
        {"train_sampling_strategy": "sequential"},
    ):
        with pytest.raises(ValueError, match="resume_from_checkpoint: ") as caught:
            make_trainer(size, folder, **options | others).train(resume_from_checkpoint=checkpoint)
        said.append(str(caught.value))
    others = {"per_device_train_batch_size": 4 // size, "ignore_data_skip": True}
    make_trainer(size, folder, **options | others).train(resume_from_checkpoint=checkpoint)
    if rank == 0:
        kept = checkpoint / "trainer_state.json"
        state = json.loads(kept.read_text())
        del state["stateful_callbacks"]["LoaderPosition"]
        kept.write_text(json.dumps(state))
    torch.distributed.barrier()
    warned = []
    with mock.patch.object(
        logging.getLogger("hcp"), "warning", lambda text, *_: warned.append(text)
    ):
        make_trainer(size, folder / "old", **saved).train(resume_from_checkpoint=checkpoint)
    return said, warned


@CANNOT_RESUME
def test_a_checkpoint_of_other_batches_is_refused(tmp_path):
    ((sizes, seed, order), warned), _ = run_ranks(2, resume_with_other_batches, tmp_path)
    assert "batch_size 8, expected 4: make the loader as the one that was saved" in sizes
    assert "batch_size is per_device_train_batch_size times the ranks" in sizes
    assert "seed 42, expected 3" in seed
    assert "shuffle True, expected False" in order
    (older,) = warned
    assert older.startswith("hcp: the checkpoint does not say of which batches its steps were")


def evaluate_alone(rank, size, folder):
    as_torchrun(size)
    found = []
    for evaluation in (None, 1, size):
        trainer = make_trainer(size, folder, evaluation=evaluation)
        found.append(trainer.evaluate()["eval_loss"])
    sets = {"a": documents(VALIDATION, seed=1), "b": documents([4], seed=2)}
    both = trainer.evaluate(sets)
    assert both["eval_a_loss"] == pytest.approx(found[0], abs=1e-6)
    assert both["eval_b_loss"] != found[0]
    trainer.eval_dataset = sets
    again = trainer.evaluate()
    assert {name: again[name] for name in both if name.endswith("loss")} == {
        name: value for name, value in both.items() if name.endswith("loss")
    }
    with pytest.raises(ValueError, match="the dataset has 0 samples"):
        trainer.evaluate([])
    return found


def test_evaluation_without_training_gives_one_loss_under_every_layout(tmp_path):
    losses = [loss for found in run_ranks(3, evaluate_alone, tmp_path) for loss in found]
    model, dataset = build("llama"), documents(VALIDATION, seed=1)
    total = tokens = 0
    for d in dataset:
        logits = model(d["input_ids"][None]).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(
            logits, d["input_ids"][1:], reduction="sum"
        ).item()
        tokens += len(d["input_ids"]) - 1
    assert losses == pytest.approx([total / tokens] * len(losses), abs=1e-5)


# ---- what people do with a Trainer ---------------------------------------------------------------


def most_likely(logits, labels):
    assert logits.shape[:2] == labels.shape
    return logits.argmax(-1), logits.amax(-1)


def accuracy(given):
    """Of the next tokens."""
    found, labels = given.predictions[0][:, :-1], given.label_ids[:, 1:]
    return {"accuracy": float((found == labels)[labels != -100].mean())}


def predict(rank, size, folder, evaluation):
    as_torchrun(size)
    options = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": most_likely}
    trainer = make_trainer(size, folder, evaluation=evaluation, options=options)
    whole = make_trainer(size, folder, evaluation=evaluation).predict(trainer.eval_dataset)
    return trainer.evaluate(), trainer.predict(trainer.eval_dataset), whole


def test_predictions_are_those_of_whole_sequences_in_order(tmp_path):
    model, dataset = build("llama"), documents(VALIDATION, seed=1)
    logits = [model(d["input_ids"][None]).logits[0].detach() for d in dataset]
    hits = torch.cat(
        [x[:-1].argmax(-1) == d["input_ids"][1:] for x, d in zip(logits, dataset, strict=True)]
    )
    for metrics, (found, labels, _), whole in run_ranks(2, predict, tmp_path, 2):
        assert metrics["eval_accuracy"] == pytest.approx(hits.double().mean().item())
        assert whole.metrics["test_loss"] == pytest.approx(metrics["eval_loss"], abs=1e-6)
        for i, (expected, sample) in enumerate(zip(logits, dataset, strict=True)):
            n = len(expected)
            assert found[0][i, :n].tolist() == expected.argmax(-1).tolist()
            assert found[1][i, :n] == pytest.approx(expected.amax(-1).numpy(), abs=1e-4)
            assert whole.predictions[i, :n] == pytest.approx(expected.numpy(), abs=1e-4)
            assert labels[i].tolist() == [-100, *sample["input_ids"][1:].tolist()] + [-100] * (
                labels.shape[1] - n
            )
            assert (whole.predictions[i, n:] == -100).all()


def predict_badly(rank, size, folder):
    as_torchrun(size)
    options = {"preprocess_logits_for_metrics": lambda logits, labels: logits.mean(1)}
    trainer = make_trainer(size, folder, options=options)
    with pytest.raises(ValueError, match=r"gives \(1, 64\) for .* rows, expected tensors \(1, "):
        trainer.predict(trainer.eval_dataset)


def test_metrics_that_want_whole_sequences_are_refused(tmp_path):
    run_ranks(1, predict_badly, tmp_path)


class Stream(torch.utils.data.IterableDataset):
    """Documents without a length; other ones on rank `wrong`."""

    def __init__(self, seeds=(0,), wrong=None):
        self.seeds, self.wrong, self.epochs = seeds, wrong, []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        shard = self.wrong == torch.distributed.get_rank() if self.wrong is not None else False
        for seed in self.seeds:
            yield from documents(TRAINING, seed)[3 if shard else 0 :]


def train_on_a_stream(rank, size, folder):
    """Losses of a stream and of the same documents in order, and of evaluation."""
    as_torchrun(size)
    options = {"limit": 128, "max_steps": 4, "eval_strategy": "no", "max_grad_norm": 0.0}
    streamed = make_trainer(size, folder, data=Stream(), **options)
    straight = record(streamed)
    ordered = options | {"train_sampling_strategy": "sequential"}
    expected = record(make_trainer(size, folder, **ordered))
    evaluated = [
        streamed.evaluate(data)["eval_loss"]
        for data in (streamed.eval_dataset, iter_of(streamed.eval_dataset))
    ]
    return straight, expected, evaluated, streamed.train_dataset.epochs


def iter_of(dataset):
    class Iterable:
        def __iter__(self):
            return iter(dataset)

    return Iterable()


def test_a_stream_trains_and_evaluates_as_a_dataset(tmp_path):
    for straight, expected, evaluated, epochs in run_ranks(2, train_on_a_stream, tmp_path):
        assert straight["logged"] == pytest.approx(expected["logged"], abs=1e-6)
        assert straight["rows"] == expected["rows"]
        assert evaluated[1] == pytest.approx(evaluated[0], abs=1e-6)
        assert epochs == [0, 1]


def resume_a_stream(rank, size, folder):
    as_torchrun(size)
    options = {"limit": 128, "max_steps": 4, "eval_strategy": "no", "max_grad_norm": 0.0}
    saved = options | {"save_strategy": "steps", "save_steps": 2}
    straight = record(make_trainer(size, folder, data=Stream(), **saved))["logged"]
    again = make_trainer(size, folder, data=Stream(), **options)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    losses = [entry["loss"] for entry in again.state.log_history if "loss" in entry]
    with pytest.raises(ValueError, match="the checkpoint is of epoch 1 of a stream, expected 0"):
        again.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    return straight, losses


@CANNOT_RESUME
def test_a_stream_goes_on_in_its_middle(tmp_path):
    for straight, resumed in run_ranks(2, resume_a_stream, tmp_path):
        assert resumed == pytest.approx(straight, abs=1e-6)


def train_on_other_streams(rank, size, folder):
    as_torchrun(size)
    make_trainer(size, folder, data=Stream(wrong=1), eval_strategy="no").train()


def test_a_stream_that_is_another_on_a_rank_is_refused(tmp_path):
    for found in try_ranks(2, train_on_other_streams, tmp_path):
        assert found.kind == "HcpError"
        assert "in batch 0 of the stream rank 1 of dp_cp has another first item" in found.message


def test_an_iterator_is_refused():
    from hcp.integrations.loader import _check_dataset

    with pytest.raises(ValueError, match="is a list_iterator, expected an iterable that starts"):
        _check_dataset(iter([1]))


def group_by_length(rank, size, folder):
    as_torchrun(size)
    options = {"train_sampling_strategy": "group_by_length", "eval_strategy": "no"}
    trainer = make_trainer(size, folder, limit=128, max_steps=3, **options)
    order = list(trainer.get_train_dataloader().batch_sampler)
    return order, record(trainer)["logged"]


def test_samples_of_like_length_go_together(tmp_path):
    (((batch, *_), alone),) = run_ranks(1, group_by_length, tmp_path)
    first, second = run_ranks(2, group_by_length, tmp_path)
    assert TRAINING[batch[0]] == max(TRAINING)  # Transformers' order: the longest first
    assert batch == [i for pair in zip(first[0][0], second[0][0], strict=True) for i in pair]
    mean = [(a + b) / 2 for a, b in zip(first[1], second[1], strict=True)]
    assert mean == pytest.approx(alone, abs=1e-4)


def generate_in_evaluation(rank, size, folder):
    import transformers

    from hcp.integrations.transformers import own_attention

    as_torchrun(size)
    texts = []

    class Generate(transformers.TrainerCallback):
        def on_evaluate(self, args, state, control, model, **keywords):
            with own_attention(model) as whole:
                made = whole.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
            texts.append(made.tolist())

    options = {"callbacks": [Generate()]}
    trainer = make_trainer(size, folder, limit=128, max_steps=4, eval_steps=2, options=options)
    losses = record(trainer)["logged"]
    assert len(texts) == 2
    return losses, texts


def test_generating_in_evaluation_leaves_training_as_it_is(tmp_path):
    (alone,) = run_ranks(1, generate_in_evaluation, tmp_path)
    for losses, texts in run_ranks(2, generate_in_evaluation, tmp_path):
        assert losses == pytest.approx(alone[0], abs=1e-4)
        assert texts == alone[1]


REFUSED_ARGUMENTS = [
    ({"train_sampling_strategy": "batch_rebalance"}, "is 'batch_rebalance', expected 'random'"),
    ({"batch_eval_metrics": True}, "batch_eval_metrics is True, expected False: a rank has rows"),
    ({"include_for_metrics": ["inputs"]}, "include_for_metrics is .*, expected .*: hcp gathers"),
    ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 2, expected 1: the plan"),
    ({"per_device_train_batch_size": 0}, "train_batch_size is 0, expected an integer >= 1"),
    ({"per_device_eval_batch_size": -1}, "eval_batch_size is -1, expected an integer >= 1"),
    ({"label_smoothing_factor": 0.1}, "label_smoothing_factor is 0.1, expected 0"),
    ({"auto_find_batch_size": True}, "auto_find_batch_size is True, expected False"),
    ({"include_num_input_tokens_seen": "all"}, "include_num_input_tokens_seen is 'all', expected"),
    ({"eval_do_concat_batches": False}, "eval_do_concat_batches is False, expected True"),
    ({"average_tokens_across_devices": False}, "across_devices is False, expected True: the loss"),
    ({"accelerator_config": {"split_batches": True}}, "split_batches is True, expected False"),
    ({"optim": "adalomo"}, "optim is 'adalomo', expected an optimizer that updates after the"),
    ({"optim": "galore_adamw_layerwise"}, "optim is 'galore_adamw_layerwise', expected an"),
    ({"bf16_full_eval": True}, "bf16_full_eval is True, expected False"),
    ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha is 5.0, expected None: its noise shrinks"),
]


def refuse_arguments(rank, size, folder):
    from transformers import TrainingArguments

    from hcp.integrations.transformers import Trainer

    as_torchrun(size)
    for options, message in REFUSED_ARGUMENTS:
        with pytest.raises(ValueError, match=message):
            make_trainer(size, folder, **options)
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[])
    config = hcp.Config(max_seqlen_per_dp_cp_rank=8)
    for options, message in (
        ({"data_collator": list}, "data_collator is a type, expected None: samples are packed"),
        ({"model_init": lambda: build("llama")}, "model_init was given, expected None: give the"),
    ):
        model = None if "model_init" in options else build("llama")
        with pytest.raises(ValueError, match=message):
            Trainer(model, args, cp=config, **options)

    class Mine(Trainer):
        def compute_loss(self, *given, **keywords):
            return 0.0

    with pytest.raises(ValueError, match=r"Mine\.compute_loss is a method of its own, expected"):
        Mine(build("llama"), args, cp=config)
    half = TrainingArguments(output_dir=str(folder), use_cpu=True, bf16=True, report_to=[])
    as_torchrun(size)
    with pytest.raises(ValueError, match=r"softcap is 2.0 for torch.bfloat16 on cpu, expected 0.0"):
        Trainer(build("gemma2"), half, cp=config)
    as_torchrun(size)
    windowed = hcp.Config(max_seqlen_per_dp_cp_rank=8, window_size=(4, 0))
    with pytest.raises(
        ValueError, match=r"window_size is \(4, 0\), expected \(-1, -1\): the model"
    ):
        Trainer(build("llama"), args, cp=windowed)
    unchosen = hcp.Config(max_seqlen_per_dp_cp_rank=8, eval_context_parallel_size="auto")
    with pytest.raises(ValueError, match="eval_context_parallel_size is 'auto', expected a number"):
        Trainer(build("llama"), args, cp=unchosen)
    with pytest.raises(ValueError, match=r"cp is 2, expected options, such as hcp.Config\(max"):
        Trainer(build("llama"), args, cp=2)
    mixed = hcp.Config(max_seqlen_per_dp_cp_rank=8, cp_comm_type=("p2p", "a2a"))
    with pytest.raises(ValueError, match=r"cp_comm_type lists .*, expected one for all layers"):
        Trainer(build("llama"), args, cp=mixed)
    trainer = Trainer(build("llama"), args, cp=config)
    with pytest.raises(ValueError, match="train_dataset is missing"):
        trainer.train()
    with pytest.raises(ValueError, match="eval_dataset is missing"):
        trainer.evaluate()
    empty = [{"input_ids": []}]
    trainer = Trainer(build("llama"), args, train_dataset=empty, eval_dataset=empty, cp=config)
    for use in (trainer.train, trainer.evaluate):
        with pytest.raises(
            ValueError, match=r"input_ids is empty in a sample, expected >= 1 token"
        ):
            use()
    trainer = Trainer(build("llama"), args, train_dataset=documents([100]), cp=config)
    said = r"^dataset\[0\]: it has 100 tokens, expected at most 8, .*, expected <= 8 \(max_seqlen"
    with pytest.raises(ValueError, match=said):
        trainer.train()
    for name in ("eval_context_parallel_size", "min_dynamic_context_parallel_size"):
        wide = hcp.Config(max_seqlen_per_dp_cp_rank=8, **{name: 4})
        with pytest.raises(ValueError, match=f"{name} is 4, expected a.* 1"):
            Trainer(build("llama"), args, cp=wide)
    gpt2 = build("gpt2")
    gpt2.transformer.h[1].attn.attn_dropout.p = 0.1
    for option, model in (
        ("attention_dropout", build("llama", attention_dropout=0.1)),
        ("attn_pdrop", gpt2),
    ):
        with pytest.raises(ValueError, match=rf" 0.1, expected 0: .*pretrained\(..., {option}=0.0"):
            Trainer(model, args, cp=config)


def test_what_would_be_wrong_or_without_effect_is_refused(tmp_path):
    run_ranks(1, refuse_arguments, tmp_path)


def test_tokens_that_are_no_integers_are_refused():
    from hcp.integrations.transformers import causal_lm_sample

    with pytest.raises(ValueError, match=r"input_ids is torch.float32, expected integers"):
        causal_lm_sample({"input_ids": [1.5, 2.7]})
    with pytest.raises(ValueError, match=r"labels is torch.float32, expected integers"):
        causal_lm_sample({"input_ids": [1, 2], "labels": torch.tensor([1.0, 2.0])})


@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks"])
def test_masks_say_which_tokens_are_learned(name):
    """Labels as TRL makes them: the token itself if the mask is 1."""
    from hcp.integrations.transformers import causal_lm_sample

    item = {"input_ids": [5, 6, 7, 8], name: [0, 0, 1, 1], "position_ids": [0, 1, 2, 3]}
    item |= {"seq_lengths": [4], "token_type_ids": [0] * 4, "attention_mask": [1] * 4}
    sample = causal_lm_sample(item)
    assert sample["labels"].tolist() == [-100, 7, 8, -100]
    assert sample["loss_mask"].tolist() == [0, 1, 1, 0]
    given = causal_lm_sample({**item, "labels": [5, -100, -100, 9], "pixel_values": None})
    assert given["labels"].tolist() == [-100, -100, 9, -100]


def test_a_packed_row_is_taken_apart():
    from hcp.integrations.transformers import causal_lm_samples

    item = {"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [2, 3], "labels": [5, 6, -100, 8, 9]}
    item["position_ids"] = [0, 1, 0, 1, 2]
    first, second = causal_lm_samples(item)
    assert (first["input_ids"].tolist(), first["labels"].tolist()) == ([5, 6], [6, -100])
    assert (second["input_ids"].tolist(), second["labels"].tolist()) == ([7, 8, 9], [8, 9, -100])
    (alone,) = causal_lm_samples({"input_ids": [5, 6], "seq_lengths": [2]})
    assert alone["input_ids"].tolist() == [5, 6]
    with pytest.raises(
        ValueError, match=r"seq_lengths is \[2, 2\] in an item of 5 tokens, expected"
    ):
        causal_lm_samples({**item, "seq_lengths": [2, 2]})
    with pytest.raises(ValueError, match="a sample has 'pixel_values', expected only"):
        causal_lm_samples({**item, "pixel_values": 0.5})


class Streamed(torch.utils.data.IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def restarting(rank, size, folder):
    """Losses, evaluations and predictions of documents, and of rows that they were packed into."""
    as_torchrun(size)
    texts = [d["input_ids"].tolist() for d in documents([9, 4, 1, 12, 7, 3])]
    rows = [
        {
            "input_ids": [token for text in texts[i : i + 3] for token in text],
            "position_ids": [place for text in texts[i : i + 3] for place in range(len(text))],
        }
        for i in (0, 3)
    ]
    found = {}
    for name, items in (
        ("documents", [{"input_ids": text} for text in texts]),
        ("rows", rows),
        ("stream", Streamed(rows)),
        ("grouped", rows),
    ):
        order = "group_by_length" if name == "grouped" else "sequential"
        trainer = make_trainer(
            size,
            folder / name,
            data=items,
            max_steps=2,
            per_device_train_batch_size=(6 if name == "documents" else 2) // size,
            eval_strategy="no",
            train_sampling_strategy=order,
        )
        losses = record(trainer)["logged"]
        evaluated = trainer.evaluate(items)["eval_loss"]
        predicted = trainer.predict(items).predictions
        found[name] = losses, evaluated, predicted.shape, float(predicted[:, 0].sum())
    return found


def test_positions_that_restart_are_documents_in_every_path_of_the_trainer(tmp_path):
    for found in run_ranks(2, restarting, tmp_path):
        losses, evaluated, shape, first = found.pop("documents")
        assert shape[:2] == (6, 12)
        for name, of_rows in found.items():
            assert of_rows[0] == pytest.approx(losses, abs=1e-5), name
            assert of_rows[1] == pytest.approx(evaluated, abs=1e-5), name
            assert of_rows[2] == shape, name
            assert of_rows[3] == pytest.approx(first, abs=1e-2), name


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (
            {"position_ids": [0, 1, 0, 1]},
            r"documents of \[2, 2\] tokens, expected one document: .* takes rows apart",
        ),
        (
            {"seq_lengths": [2, 2]},
            r"documents of \[2, 2\] tokens, expected one document: hcp packs them itself",
        ),
        (
            {"token_type_ids": [0, 0, 1, 1]},
            "token_type_ids is .*, expected all 0: hcp does not hand",
        ),
        ({"attention_mask": [1, 0, 1, 1]}, "attention_mask is .* padding, at the end alone"),
        ({"pixel_values": [0.5]}, "a sample has 'pixel_values', expected only .*remove_columns"),
        ({"text": "words"}, r"a sample has 'text', .*dataset.remove_columns\(\['text'\]\)"),
        ({"completion_mask": [1]}, r"completion_mask has shape \(1,\), expected \(4,\)"),
        ({"assistant_masks": [0.5] * 4}, "assistant_masks is torch.float32, expected integers"),
    ],
)
def test_a_column_that_hcp_does_not_follow_is_refused_by_name(column, message):
    from hcp.integrations.transformers import causal_lm_sample

    with pytest.raises(ValueError, match=message):
        causal_lm_sample({"input_ids": [5, 6, 7, 8], **column})


def make_trainer_alone(folder):
    from transformers import TrainingArguments

    from hcp.integrations.transformers import Trainer

    args = TrainingArguments(output_dir=folder, use_cpu=True, report_to=[])
    trainer = Trainer(build("llama"), args, cp=hcp.Config(max_seqlen_per_dp_cp_rank=8))
    assert trainer.cp_groups.size("dp_cp") == 1


def test_a_process_without_a_launcher_is_a_job_of_one_rank(tmp_path):
    done = run_alone(make_trainer_alone, str(tmp_path), folder=tmp_path)
    assert done.code == 0, done.err


def count_the_calls_of_a_step(folder):
    from transformers import TrainingArguments

    from hcp.integrations.transformers import Trainer

    walks = []

    class Counting(Trainer):
        def training_step(self, *given):
            walks.append(
                walk_of(lambda: losses.append(super(Counting, self).training_step(*given)))
            )
            return losses[-1]

    losses = []
    data = [{"input_ids": list(range(1, 1 + length))} for length in (5, 9, 3, 12)]
    args = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        report_to=[],
        per_device_train_batch_size=4,
        max_steps=2,
        save_strategy="no",
    )
    cp = hcp.Config(max_seqlen_per_dp_cp_rank=32, plan_ahead=0)
    Counting(build("llama"), args, train_dataset=data, cp=cp).train()
    last = walks[-1]
    assert len(walks) == 2
    assert last.calls <= 460, last.most()
    assert len(last.files) <= 26, sorted(last.files)
    computed = [name for name in last.functions if name.startswith("planning/")]
    assert computed == [], last.most()  # statistics are for who logs them


def test_a_step_of_two_layers_takes_few_python_calls(tmp_path):
    """A step of four documents on one rank, under Python 3.11."""
    done = run_alone(count_the_calls_of_a_step, str(tmp_path), folder=tmp_path)
    assert done.code == 0, done.err


# ---- importing, and a rank that fails ------------------------------------------------------------


def test_importing_hcp_does_not_register_anything():
    code = (
        "import transformers, hcp, hcp.integrations\n"
        "assert 'hcp' not in transformers.AttentionInterface().valid_keys()\n"
        "import hcp.integrations.transformers as ours\n"
        "assert 'hcp' not in transformers.AttentionInterface().valid_keys()\n"
        "ours.register_hcp_attention()\n"
        "assert 'hcp' in transformers.AttentionInterface().valid_keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)


def fail_on_one_rank(rank, size, folder):
    as_torchrun(size)
    trainer = make_trainer(size, folder, limit=128)
    if rank == 1:
        trainer.train_dataset[3] = {"text": "not tokenized"}
    trainer.train()


def test_a_bad_sample_on_one_rank_is_an_error_on_all(tmp_path):
    first, second = try_ranks(2, fail_on_one_rank, tmp_path)
    assert first.kind == "HcpError"
    assert "rank 1 failed: ValueError: dataset[3]: a sample has ['text'], expected" in first.message
    assert second.kind == "ValueError"


# ---- the loss without logits ---------------------------------------------------------------------


def loss_of(model, tokens, linear):
    """The loss of one document on one rank."""
    from hcp.integrations.transformers import causal_lm_loss, causal_lm_sample

    def work(groups):
        (sample,) = documents([tokens])
        plan = hcp.plan([tokens], ranks=1, max_tokens_per_rank=tokens)
        ((cp, local),) = hcp.dispatch(plan, [causal_lm_sample(sample)], [0], groups)
        return causal_lm_loss(model, cp, local, grad_reduce="sum", linear_cross_entropy=linear)

    return hcp.loopback(1, work)[0]


@needs_linear_cross_entropy
def test_logits_of_all_rows_are_never_in_memory():
    from support.memory import allocated

    from hcp.integrations.transformers import register_hcp_attention

    model, rows = build("llama", vocab_size=8192), 256
    register_hcp_attention(model)
    model.zero_grad()
    logits = rows * 8192 * 4
    peaks = {
        linear: allocated(lambda linear=linear: loss_of(model, rows, linear).backward()).peak
        for linear in (False, True)
    }
    assert peaks[False] > 2 * logits > 4 * peaks[True]


@needs_linear_cross_entropy
def test_under_autocast_it_is_the_loss_of_the_logits_in_float32():
    from hcp.integrations.transformers import register_hcp_attention

    model = build("llama")
    register_hcp_attention(model)
    with torch.autocast("cpu", torch.bfloat16):
        losses = [loss_of(model, 40, linear) for linear in (False, True)]
    assert [loss.dtype for loss in losses] == [torch.float32] * 2
    assert (losses[0] - losses[1]).abs() < 1e-2


@pytest.mark.parametrize("kind", ["cohere2", "gemma2", "granite"])
@needs_linear_cross_entropy
def test_logits_that_a_model_changes_are_refused(kind):
    from hcp.integrations.transformers import register_hcp_attention

    changes = {"granite": {"logits_scaling": 2.0}}.get(kind, {})
    model = build(kind, **changes)
    register_hcp_attention(model)
    with pytest.raises(ValueError, match="ForCausalLM changes what its head returns"):
        loss_of(model, 9, True)
    assert loss_of(model, 9, False) > 0  # the head is its own again


@needs_linear_cross_entropy
def test_a_hook_that_changes_what_the_head_returns_is_refused():
    from hcp.integrations.transformers import register_hcp_attention

    model = build("llama")
    register_hcp_attention(model)
    expected = loss_of(model, 9, False)
    hook = model.lm_head.register_forward_hook(lambda head, given, logits: logits * 2)
    with pytest.raises(ValueError, match=r"changes what its head returns, .* or by a hook"):
        loss_of(model, 9, True)
    hook.remove()
    assert (loss_of(model, 9, True) - expected).abs() < 1e-5


def test_a_head_whose_forward_was_replaced_is_refused_and_keeps_it():
    from hcp.integrations.transformers import register_hcp_attention

    model = build("llama")
    register_hcp_attention(model)
    own = model.lm_head.forward

    def doubled(x):
        return 2 * own(x)

    model.lm_head.forward = doubled
    with pytest.raises(ValueError, match="has a forward that replaces its class's, expected torch"):
        loss_of(model, 9, True)
    assert model.lm_head.forward is doubled


def test_a_head_that_is_not_linear_is_refused():
    from hcp.integrations.transformers import register_hcp_attention

    class Tuned(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    model = build("llama")
    register_hcp_attention(model)
    model.lm_head = Tuned(32, 64)
    with pytest.raises(ValueError, match=r"head of LlamaForCausalLM is Tuned, expected torch.nn"):
        loss_of(model, 9, True)


@needs_linear_cross_entropy
def test_rows_of_another_dtype_than_the_heads_weight_are_refused():
    """torch would compute losses in that of the rows."""
    from hcp.integrations.linear_cross_entropy import linear_cross_entropy

    rows, weight, labels = torch.ones(3, 8).bfloat16(), torch.ones(5, 8), torch.zeros(3).long()
    with pytest.raises(ValueError, match=r"rows are torch.bfloat16 and its weight is torch.float3"):
        linear_cross_entropy(rows, weight, labels)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear_cross_entropy(rows, weight, labels).dtype == torch.float32


def test_no_library_for_it_is_an_error(monkeypatch):
    from hcp.integrations.linear_cross_entropy import _library

    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
    with pytest.raises(ImportError, match=r"torch is .*, expected torch 2.13 or newer"):
        _library.__wrapped__("cpu")


# ---- FSDP2 ---------------------------------------------------------------------------------------


def train_sharded(rank, size, sync="auto"):
    """Three updates with parameters that are spread over the domain: losses, and warnings."""
    from torch.distributed.fsdp import fully_shard

    import hcp.integrations.barrier as ours
    from hcp.integrations.transformers import (
        DynamicCPDataLoader,
        causal_lm_loss,
        register_hcp_attention,
    )

    model = build("llama").train()
    register_hcp_attention(model)
    groups = hcp.build_process_groups()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    config = hcp.Config(max_seqlen_per_dp_cp_rank=LIMIT if size == 4 else 128, sync=sync)
    ours._warn_of_the_barrier.cache_clear()  # of this process, which other tests use
    warnings = logging.handlers.BufferingHandler(9)
    logging.getLogger("hcp").addHandler(warnings)
    loader = DynamicCPDataLoader(
        documents(TRAINING), config, groups, global_batch_size=8, model=model
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    losses = []
    for step in loader:
        assert step.plan.sync == ("micro_batch" if sync == "auto" else sync)
        total = 0.0
        for i, (cp, local) in enumerate(step):
            model.set_requires_gradient_sync(i + 1 == len(step))
            loss = causal_lm_loss(model, cp, local, grad_reduce="mean")
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    logging.getLogger("hcp").removeHandler(warnings)
    return losses, [record.getMessage() for record in warnings.buffer]


def test_fsdp2_spreads_parameters_over_the_domain_as_it_does():
    ((alone, _),) = run_ranks(1, train_sharded)
    four = run_ranks(4, train_sharded)
    assert len(alone) == 3
    mean = torch.tensor([losses for losses, _ in four]).mean(0)
    assert (mean - torch.tensor(alone)).abs().max() < 1e-4
    assert [warnings for _, warnings in four] == [[]] * 4


def test_a_plan_for_another_barrier_than_fsdps_is_warned_of_once():
    for _, warnings in run_ranks(2, train_sharded, "step"):
        (warning,) = warnings
        assert warning.startswith("hcp: the plan lets ranks wait at the end of a step only")


def losses_and_gradients(rank, size, sharded, returned=torch.bfloat16, hooked=None):
    """Of one micro-batch, by a head that computes losses. Sharded: as Accelerate does from 1.14 on,
    with a unit for the head, whose output is rounded to bfloat16, and the model's to `returned`.
    Hooked: with a forward hook on the head, "before" it is sharded or "after"."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from hcp.integrations.transformers import (
        causal_lm_losses,
        causal_lm_sample,
        register_hcp_attention,
    )

    model = build("llama").train()
    register_hcp_attention(model)
    head = model.lm_head
    if hooked == "before":
        head.register_forward_hook(doubled)
    if sharded:
        policy = MixedPrecisionPolicy(output_dtype=torch.bfloat16)
        fully_shard(head, mp_policy=policy)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=returned))
    if hooked == "after":
        head.register_forward_hook(doubled)
    if hooked == "in place":
        head.register_forward_hook(lambda head, given, out: out.mul_(2))
    if hooked == "unchanged":
        head.register_forward_hook(lambda head, given, out: out)
    plan = hcp.plan([21], ranks=size, max_tokens_per_rank=24 // size, sync="micro_batch")
    samples = [causal_lm_sample(sample) for sample in documents([21])] if rank == 0 else []
    ((cp, local),) = hcp.dispatch(plan, samples, [0], hcp.build_process_groups())
    losses = causal_lm_losses(model, cp, local, linear_cross_entropy=True)
    cp.loss(losses, local.loss_mask, grad_reduce="mean").backward()
    grads = [p.grad.full_tensor() if sharded else p.grad for p in model.parameters()]
    return cp.combine(losses.detach()), grads


def register_when_sharded_in_16_bits(rank, size):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from hcp.integrations.transformers import register_hcp_attention

    model, narrow = build("llama"), torch.bfloat16
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=narrow, output_dtype=narrow))
    with torch.autocast("cpu", narrow):
        register_hcp_attention(model)
    return model.config._attn_implementation


def test_a_model_that_is_sharded_in_16_bits_passes_the_probe():
    """FSDP2 rounds the loss that is compared."""
    assert run_ranks(2, register_when_sharded_in_16_bits) == ["hcp"] * 2


def test_a_registration_waits_for_weights_that_rank_0_reads():
    """Tied weights stay tied, and frozen ones frozen, when they get addresses."""
    from hcp.integrations.transformers.registration import Registration

    plugin = SimpleNamespace(fsdp_version=2, cpu_ram_efficient_loading=True)
    callbacks, registered = [], []
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    trainer = SimpleNamespace(accelerator=accelerator, add_callback=callbacks.append)
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2, device="meta") for _ in range(3)))
    model[1].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    registration = Registration(trainer, model, lambda: registered.append(model))
    assert callbacks == [registration]
    assert not any(weight.is_meta for weight in model.parameters())
    assert model[1].weight is model[0].weight
    assert len({weight.data_ptr() for weight in model.parameters()}) == 5
    assert [weight.requires_grad for weight in model.parameters()] == [True] * 4 + [False]
    for ask in (registration.run, registration.expect_done, registration.on_train_begin):
        with pytest.raises(ValueError, match="rank 0 alone has its weights"):
            ask()
    assert registered == []


def evaluate_before_training(rank, size, folder):
    as_torchrun(size)
    with contextlib.ExitStack() as stack:
        config = SHARDED["fsdp_config"] | {"cpu_ram_efficient_loading": True}
        prepare = partial(stack.enter_context, fsdp_on_cpus())
        options = SHARDED | {"fsdp_config": config, "max_steps": 1, "limit": 52}
        trainer = make_trainer(size, folder, prepare=prepare, **options)
        with pytest.raises(ValueError, match=r"rank 0 alone has its weights"):
            trainer.evaluate()
        with pytest.raises(ValueError, match=r"called with cp= while its attention is 'eager'"):
            trainer.model(torch.zeros(1, 1, dtype=torch.long), cp=object())
        trainer.train()
        return trainer.evaluate()["eval_loss"]


def test_weights_of_rank_0_are_sharded_before_they_are_compared(tmp_path):
    first, second = run_ranks(2, evaluate_before_training, tmp_path)
    assert first == second


def train_by_steps_of_ones_own(rank, size, folder, loads):
    from hcp.integrations.transformers import causal_lm_loss

    as_torchrun(size)
    losses = []
    with contextlib.ExitStack() as stack:
        config = SHARDED["fsdp_config"] | {"cpu_ram_efficient_loading": loads}
        prepare = partial(stack.enter_context, fsdp_on_cpus())
        options = SHARDED | {"fsdp_config": config, "max_steps": 2, "eval_strategy": "no"}
        options["model"] = read_by_rank_0(rank, build("llama")) if loads else None
        trainer = make_trainer(size, folder, prepare=prepare, limit=52, **options)

        def training_step(model, step, *others):
            total = 0.0
            for cp, local in step:
                loss = causal_lm_loss(model, cp, local, grad_reduce="mean")
                trainer.accelerator.backward(loss)
                total = total + loss.detach()
            losses.append(float(total))
            return total

        trainer.training_step = training_step
        trainer.train()
    return losses


def test_a_step_of_ones_own_computes_by_hcp_where_rank_0_loads_the_weights(tmp_path):
    expected = run_ranks(2, train_by_steps_of_ones_own, tmp_path, False)
    assert run_ranks(2, train_by_steps_of_ones_own, tmp_path, True) == expected


def doubled(head, given, out):
    return 2 * out


def refused_by_its_hook(rank, size, hooked, message):
    with pytest.raises(ValueError, match=message):
        losses_and_gradients(rank, size, True, hooked=hooked)


@pytest.mark.parametrize("hooked", ["before", "after", "in place"])
@needs_linear_cross_entropy
def test_a_hook_that_changes_what_a_sharded_head_returns_is_refused(hooked):
    name = r"<lambda>" if hooked == "in place" else "doubled"
    run_ranks(2, refused_by_its_hook, hooked, rf"changes what its head .*{name}\), exp")


@needs_linear_cross_entropy
def test_a_hook_that_changes_nothing_may_look_at_what_a_sharded_head_returns():
    losses, _ = run_ranks(2, losses_and_gradients, True)[0]
    found, _ = run_ranks(2, losses_and_gradients, True, torch.bfloat16, "unchanged")[0]
    assert torch.equal(found, losses)


@pytest.mark.parametrize("returned", [torch.bfloat16, torch.float32])
@needs_linear_cross_entropy
def test_losses_of_a_head_that_fsdp2_shards_are_not_rounded_to_what_it_returns(returned):
    alone, expected = run_ranks(1, losses_and_gradients, False)[0]
    two = run_ranks(2, losses_and_gradients, True, returned)
    torch.testing.assert_close(two[0][0], alone, atol=1e-5, rtol=0)  # that has the sample
    for _, grads in two:
        torch.testing.assert_close(grads, expected, atol=1e-6, rtol=1e-5)


def loss_beside_a_rank_without_rows(rank, size, linear, weights):
    """A micro-batch whose only sequence is on one rank: loss and gradients of this rank."""
    from hcp.integrations.transformers import (
        causal_lm_loss,
        causal_lm_sample,
        register_hcp_attention,
    )

    model = build("llama").double()
    register_hcp_attention(model)
    plan = hcp.plan([11], ranks=size, max_tokens_per_rank=16, max_degree=1)
    sample = causal_lm_sample(documents([11])[0])
    sample["loss_mask"] = sample["loss_mask"].to(weights)
    mine = [sample] if rank == 0 else []
    ((cp, local),) = hcp.dispatch(plan, mine, [0], hcp.build_process_groups())
    assert local.loss_mask.dtype == weights
    loss = causal_lm_loss(model, cp, local, grad_reduce="sum", linear_cross_entropy=linear)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


@needs_linear_cross_entropy
@pytest.mark.parametrize("weights", [torch.bool, torch.float64], ids=["mask", "weights"])
def test_a_loss_by_the_head_is_that_of_the_logits_also_on_ranks_without_rows(weights):
    expected = run_ranks(2, loss_beside_a_rank_without_rows, False, weights)
    for found, of_logits in zip(
        run_ranks(2, loss_beside_a_rank_without_rows, True, weights), expected, strict=True
    ):
        torch.testing.assert_close(found, of_logits, atol=1e-10, rtol=1e-10)
    assert sorted(loss > 0 for loss, _ in expected) == [False, True]


@needs_linear_cross_entropy
def test_the_head_sums_losses_where_each_row_counts_once(monkeypatch):
    """Liger then computes no logits a second time."""
    from hcp.integrations import linear_cross_entropy
    from hcp.integrations.transformers import (
        causal_lm_loss,
        causal_lm_sample,
        register_hcp_attention,
    )

    asked, library = [], linear_cross_entropy._library("cpu")

    def watched(*given):
        asked.append(given[-1])
        return library(*given)

    monkeypatch.setattr(linear_cross_entropy, "_library", lambda device: watched)
    model = build("llama")
    register_hcp_attention(model)

    def work(groups):
        for weights in (torch.bool, torch.float32):
            sample = causal_lm_sample(documents([9])[0])
            sample["loss_mask"] = sample["loss_mask"].to(weights)
            plan = hcp.plan([9], ranks=1, max_tokens_per_rank=9)
            ((cp, local),) = hcp.dispatch(plan, [sample], [0], groups)
            causal_lm_loss(model, cp, local, grad_reduce="sum", linear_cross_entropy=True)

    hcp.loopback(1, work)
    assert asked == [True, False]


SHARDED = {
    "fsdp": True,
    # Transformers before 5.12 takes FSDP1 where no version is named.
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    "max_steps": 6,
    "eval_steps": 3,
}


def train_by_sharded_trainer(rank, size, folder, options):
    as_torchrun(size)
    with contextlib.ExitStack() as stack:
        enter = partial(stack.enter_context, fsdp_on_cpus())
        trainer = make_trainer(size, folder, prepare=enter, **options)
        trainer.train()
        loaders = trainer.get_train_dataloader(), trainer.get_eval_dataloader()
        assert {handler.plan.sync for step in loaders[0] for handler, _ in step} == {"micro_batch"}
        assert {handler.plan.sync for handler, _ in loaders[1]} == {"micro_batch"}
        history = trainer.state.log_history
        sharded = [type(p).__name__ == "DTensor" for p in trainer.model.model.layers.parameters()]
    return (
        [entry["loss"] for entry in history if "loss" in entry],
        [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        all(sharded),
    )


def train_unsharded(rank, size, folder, options):
    as_torchrun(size)
    trainer = make_trainer(size, folder, **options)
    trainer.train()
    history = trainer.state.log_history
    return (
        [entry["loss"] for entry in history if "loss" in entry],
        [entry["eval_loss"] for entry in history if "eval_loss" in entry],
    )


def test_the_trainers_fsdp2_spreads_parameters_over_the_domain(tmp_path):
    """Accelerate takes it on accelerators only; see fsdp_on_cpus."""
    plain = {"limit": 128, "max_steps": 6, "eval_steps": 3}
    losses, evaluations = run_ranks(1, train_unsharded, tmp_path, plain)[0]
    options = SHARDED | {"evaluation": 4}
    for found, evaluated, sharded in run_ranks(4, train_by_sharded_trainer, tmp_path, options):
        assert sharded
        assert found == pytest.approx(losses, abs=1e-4)
        assert evaluated == pytest.approx(evaluations, abs=1e-4)


class Gathers(TorchDispatchMode):
    """Counts gathers of weights."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.c10d._allgather_base_.default
        return function(*args, **kwargs or {})


def gathers_of_a_step(rank, size, folder, options):
    """Micro-batches, and gathers of weights, of each step; losses; and whether this rank was once
    without rows."""
    as_torchrun(size)
    with contextlib.ExitStack() as stack:
        trainer = make_trainer(
            size, folder, prepare=partial(stack.enter_context, fsdp_on_cpus()), **options
        )
        step, found = trainer.training_step, []

        def training_step(model, inputs, *others):
            with Gathers() as gathers:
                loss = step(model, inputs, *others)
            found.append((len(inputs), gathers.count, min(cp.rows for cp, _ in inputs)))
            sharded = [type(p).__name__ == "DTensor" for p in model.parameters()]
            assert all(sharded), "the optimizer would not update what is gathered"
            return loss

        trainer.training_step = training_step
        trainer.train()
        history = trainer.state.log_history
    return found, [entry["loss"] for entry in history if "loss" in entry]


def test_weights_that_stay_after_forward_are_gathered_once_in_a_step(tmp_path):
    """Also by a rank without rows, whose micro-batches gather as those of the others do."""
    plain = {"limit": 128, "max_steps": 6, "eval_strategy": "no"}
    losses, _ = run_ranks(1, train_unsharded, tmp_path, plain)[0]
    options = SHARDED | {"eval_strategy": "no", "limit": 52}
    counted = {}
    for reshards in (True, False):
        config = options["fsdp_config"] | {"reshard_after_forward": reshards}
        two = run_ranks(2, gathers_of_a_step, tmp_path, options | {"fsdp_config": config})
        for _, trained in two:
            assert trained == pytest.approx(losses, abs=1e-4)
        assert [step[:2] for step in two[0][0]] == [step[:2] for step in two[1][0]]
        assert min(rows for found, _ in two for *_, rows in found) == 0
        counted[reshards] = [step[:2] for step in two[0][0]]
    assert max(micro_batches for micro_batches, _ in counted[True]) > 1
    groups = min(gathers for _, gathers in counted[False])
    for (micro_batches, often), (_, once) in zip(counted[True], counted[False], strict=True):
        assert once == groups
        assert often >= micro_batches * groups


def whole_gradients_of_steps(rank, size, folder, options):
    """Bytes of gradients of whole parameters after each backward of each step, and what a forecast
    adds for them."""
    from torch.distributed.fsdp import FSDPModule

    from hcp.integrations.gathers import parameter_groups
    from hcp.integrations.transformers import memory

    as_torchrun(size)
    with contextlib.ExitStack() as stack:
        trainer = make_trainer(
            size, folder, prepare=partial(stack.enter_context, fsdp_on_cpus()), **options
        )
        backward, step, found = trainer.accelerator.backward, trainer.training_step, []

        def counted(loss):
            backward(loss)
            modules = [m for m in trainer.model_wrapped.modules() if isinstance(m, FSDPModule)]
            groups = {id(g): g for m in modules for g in parameter_groups(m)}  # modules share some
            sharded = [p for g in groups.values() for p in g.fsdp_params]
            whole = [p.unsharded_accumulated_grad for p in sharded]
            whole += [p._unsharded_param.grad for p in sharded]
            found[-1].append(sum(grad.nbytes for grad in whole if grad is not None))

        def training_step(*given):
            found.append([])
            return step(*given)

        trainer.accelerator.backward, trainer.training_step = counted, training_step
        trainer.train()
    config, dtype = trainer.model.config, next(trainer.model.parameters()).dtype
    sizes = memory.model_bytes(config, dtype)
    rates = {"matrices": 1e12, "attention": 1e12, "attention_backward": 1e12}
    rates |= {"host_rate": 1e9, "memory_rate": 1e9, "host_memory_rate": 1e9}
    prices = memory.Prices.of_rates(config, **rates)
    bytes_ = [
        memory.choose(
            config, sizes, prices, memory.Machine(size, 2**30, accumulates=accumulates), 64
        ).phases["the loss"]
        for accumulates in (False, True)
    ]
    return found, bytes_[1] - bytes_[0]


def gathered_in_phases(rank, size, folder):
    """Bytes of whole weights and of results of gathers in the phases of a step, and what a forecast
    counts."""
    from torch.distributed.fsdp import FSDPModule

    from hcp.integrations.gathers import parameter_groups
    from hcp.integrations.transformers import memory
    from hcp.integrations.transformers.memory.chooser import shards_apart
    from hcp.integrations.transformers.memory.weight_bytes import WeightBytes

    as_torchrun(size)
    found = {}
    with contextlib.ExitStack() as stack:
        prepare = partial(stack.enter_context, fsdp_on_cpus())
        options = SHARDED | {"eval_strategy": "no", "max_steps": 2, "limit": 104 // size}
        if versions.numbers(versions.installed("transformers")) < (5, 12):
            options["fsdp"] = "full_shard auto_wrap"  # without it, the model is one group
        trainer = make_trainer(size, folder, prepare=prepare, **options)

        def gathered():
            modules = [m for m in trainer.model.modules() if isinstance(m, FSDPModule)]
            groups = {id(g): g for m in modules for g in parameter_groups(m)}.values()
            whole = [t for g in groups for p in g.fsdp_params for t in p.all_gather_outputs]
            waits = next(iter(groups)).comm_ctx.all_gather_state
            results = [g._all_gather_result for g in groups]
            results += [] if waits is None else [waits.all_gather_result]
            whole += [result.all_gather_output for result in results if result is not None]
            return sum({id(s): s.nbytes() for s in (t.untyped_storage() for t in whole)}.values())

        def watch(name):
            def called(module, given, out):
                found.setdefault(f"forward of {name}", gathered())
                if out.requires_grad:
                    out.register_hook(
                        lambda grad: found.update({f"backward of {name}": gathered()})
                    )

            return called

        own = trainer.model.model
        for i, layer in enumerate(own.layers):
            layer.mlp.register_forward_hook(watch(f"layer {i}"))
        own.norm.register_forward_hook(watch("norm"))
        trainer.train()
    counted = memory.model_bytes(trainer.model.config, torch.float32)
    layers = counted.layers
    weights = WeightBytes(counted, size, offloaded=True, accumulates=False, apart=shards_apart())
    head = weights.head  # its gradient
    expected = {
        f"forward of layer {layers - 1}": weights.forward(),
        "forward of norm": weights.loss() - head,
        "backward of norm": weights.norm_backward() - head,
    }
    return {name: found[name] for name in expected}, expected


def test_a_forecast_counts_the_weights_that_are_gathered_in_each_phase(tmp_path):
    for found, expected in run_ranks(2, gathered_in_phases, tmp_path):
        assert found == expected


def test_a_forecast_of_one_rank_counts_the_weights_that_fsdp2_makes_of_its_own(tmp_path):
    ((found, expected),) = run_ranks(1, gathered_in_phases, tmp_path)
    for phase, size in found.items():
        assert 0 < size <= expected[phase]


@pytest.mark.parametrize("reshards", [True, False])
def test_gradients_that_wait_for_the_last_micro_batch_are_in_the_forecast(tmp_path, reshards):
    options = SHARDED | {"eval_strategy": "no", "limit": 52, "max_steps": 3}
    config = options["fsdp_config"] | {"reshard_after_forward": reshards}
    for found, foreseen in run_ranks(
        2, whole_gradients_of_steps, tmp_path, options | {"fsdp_config": config}
    ):
        assert max(map(len, found)) > 1
        for step in found:
            assert step == [foreseen] * (len(step) - 1) + [0]


def ask_for_fsdp_on_a_cpu(rank, size, folder):
    as_torchrun(size)
    with contextlib.ExitStack() as stack:
        stack.callback(os.environ.pop, "ACCELERATE_USE_FSDP", None)
        with pytest.raises(ValueError, match="asks for FSDP and uses MULTI_CPU, expected FSDP"):
            make_trainer(size, folder, **SHARDED)


def test_fsdp_that_accelerate_would_leave_out_is_refused(tmp_path):
    run_ranks(2, ask_for_fsdp_on_a_cpu, tmp_path)
