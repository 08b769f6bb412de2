"""T5Gemma under two plans, of its encoder and of its decoder, equals itself on one rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import hcp

pytest.importorskip("transformers")

import transformers
from support.sweep import difference, gradients, summed

from hcp.integrations.transformers import (
    causal_lm_loss,
    register_for_seq2seq,
    register_hcp_attention,
    seq2seq,
    seq2seq_inputs,
)
from hcp.integrations.transformers import (
    encoder as encoders,
)

PART = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 4,
    "attn_logit_softcapping": 2.0,
    "dropout_rate": 0.0,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SOURCES, TARGETS = (19, 3, 30), (8, 21, 1)


def built() -> Any:
    torch.manual_seed(5)
    config = transformers.T5GemmaConfig(
        encoder=PART, decoder=PART, dropout_rate=0.0, attention_dropout=0.0
    )
    model = transformers.T5GemmaForConditionalGeneration(config).double().eval()
    model.set_attn_implementation("eager")  # "sdpa" leaves soft-capping out
    return model


def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(4)
    return [
        tuple(torch.randint(3, 64, (n,), generator=drawn) for n in both)
        for both in zip(SOURCES, TARGETS, strict=True)
    ]


def shifted(labels: torch.Tensor) -> torch.Tensor:
    return torch.cat([labels.new_ones(1), labels[:-1]])


@pytest.mark.parametrize(
    ("degrees", "ranks"),
    [((1, 1), 1), ((2, 1), 2), ((1, 3), 3), ((3, 3), 3), ((1, 1), 5)],  # the last: 2 have no rows
)
def test_pairs_equal_the_model_alone(degrees: tuple[int, int], ranks: int) -> None:
    model, total = built(), sum(TARGETS)
    for source, labels in pairs():
        inputs = shifted(labels)
        given = {"input_ids": source[None], "decoder_input_ids": inputs[None]}
        logits = model(**given, use_cache=False).logits[0]
        (F.cross_entropy(logits, labels, reduction="sum") / total).backward()
    expected = gradients(model)
    model.zero_grad()
    register_for_seq2seq(model)
    of_source, of_target = (
        hcp.plan(lengths, ranks=ranks, max_tokens_per_rank=80, min_degree=degree, max_degree=degree)
        for lengths, degree in zip((SOURCES, TARGETS), degrees, strict=True)
    )

    def work(groups: Any) -> dict[str, torch.Tensor]:
        own, rank = copy.deepcopy(model), groups.transport.rank
        loaded = [pair for i, pair in enumerate(pairs()) if i % ranks == rank]
        origin = [i % ranks for i in range(len(SOURCES))]
        sources = [{"input_ids": source} for source, _ in loaded]
        targets = [
            {
                "input_ids": shifted(labels),
                "labels": labels,
                "loss_mask": torch.ones(len(labels)),
            }
            for _, labels in loaded
        ]
        for (keys, encoder), (cp, local) in zip(
            hcp.dispatch(of_source, sources, origin, groups),
            hcp.dispatch(of_target, targets, origin, groups),
            strict=True,
        ):
            given = seq2seq_inputs(own, cp, local, keys, encoder)
            causal_lm_loss(own, cp, local, grad_reduce="sum", inputs=given).backward()
        return gradients(own)

    found = hcp.loopback(ranks, work)
    assert difference(summed(found), expected) < 1e-6  # norms and rotation are float32


def test_windows_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(keys: Any, window: int = -1) -> encoders.EncoderMask:
        return encoders.EncoderMask(keys, window - 1 if window > 0 else window)

    monkeypatch.setattr(seq2seq, "EncoderMask", other)
    model = built()
    with pytest.raises(ValueError, match="it computes something that hcp does not know"):
        register_for_seq2seq(model)
    assert model.config.encoder.sliding_window == 4


def test_other_models_are_refused() -> None:
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is of type 'llama', expected one of"):
        register_for_seq2seq(transformers.LlamaForCausalLM(config))
    with pytest.raises(ValueError, match=r"encoder and a decoder, .*register_for_seq2seq"):
        register_hcp_attention(built())
