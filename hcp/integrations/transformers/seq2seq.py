"""Models of an encoder and a decoder whose rows are spread over ranks: T5Gemma.

A pair of texts is a sequence of two plans: the encoder's tokens, and the decoder's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hcp.integrations.transformers.attention import (
    ATTENTION,
    Window,
    check_model,
    register_hcp_attention,
)
from hcp.integrations.transformers.encoder import EncoderMask
from hcp.integrations.transformers.masks import FULL, SLIDING
from hcp.integrations.transformers.probe import (
    difference_of,
    evaluating,
    implementations,
    keep_attention,
    mark,
    tolerance,
)
from hcp.planning.plan import plan
from hcp.step.dispatch import LocalBatch, dispatch
from hcp.step.handler import ContextParallelHandler
from hcp.tools.loopback import loopback

MODEL_TYPES = {"t5gemma"}
"""Types of models of an encoder and a decoder that were tested."""

_SIZES = (5, 3), (3, 4), (2, 2)
"""Tokens of the pairs that are compared: of the encoder, of the decoder."""


def register_for_seq2seq(model: Any) -> None:
    """Give hcp's attention to a model of an encoder and a decoder (T5Gemma).

    Two forwards compare its own logits of three pairs of texts with those of the pairs in a pack.
    Raises ValueError for other models, and for one that computes otherwise.
    """
    name, kind = type(model).__name__, getattr(getattr(model, "config", None), "model_type", None)
    if kind not in MODEL_TYPES or not hasattr(model, "get_decoder"):
        raise ValueError(
            f"{name} is of type {kind!r}, expected one of {sorted(MODEL_TYPES)} with a head: in "
            "other models of an encoder and a decoder hcp does not know the cross-attention"
        )
    check_model(model)
    register_hcp_attention()
    before = implementations(model)
    try:
        with evaluating(model), _narrow_windows(model):
            model.set_attn_implementation("eager")
            pairs = _pairs(model)
            own = [
                model(input_ids=s[None], decoder_input_ids=t[None], use_cache=False).logits[0]
                for s, t in pairs
            ]
            mark(model, True)
            model.set_attn_implementation(ATTENTION)
            found, expected = _packed(model, pairs), torch.cat(own)
            if (apart := difference_of(found, expected)) > (limit := tolerance(model, expected)):
                raise ValueError(
                    f"{name}'s logits of packed pairs are {apart:.1%} off its own, expected "
                    f"at most {limit:.0%}: it computes something that hcp does not know"
                )
        keep_attention(model, ATTENTION)
    except BaseException:
        mark(model, False)
        model.set_attn_implementation(before)
        raise


def seq2seq_inputs(
    model: nn.Module,
    cp: ContextParallelHandler,
    local: LocalBatch,
    keys: ContextParallelHandler,
    encoder: LocalBatch,
) -> dict[str, Any]:
    """Return the arguments of a model: `model(**seq2seq_inputs(model, cp, local, keys, encoder))`.

    `cp`, `local`: the decoder's micro-batch, with `input_ids` that are shifted already. `keys`,
    `encoder`: the encoder's, of the same sequences (see `cp.cross_attention`), with `input_ids`.
    """
    config: Any = model.config
    return {
        "input_ids": keys.at_least_one_row(encoder.input_ids).unsqueeze(0),
        "position_ids": keys.at_least_one_row(keys.position_ids).unsqueeze(0),
        "attention_mask": {
            FULL: EncoderMask(keys),
            SLIDING: EncoderMask(keys, config.encoder.sliding_window),
        },
        "decoder_input_ids": cp.at_least_one_row(local.input_ids).unsqueeze(0),
        "decoder_position_ids": cp.at_least_one_row(cp.position_ids).unsqueeze(0),
        "decoder_attention_mask": {
            FULL: Window(None),
            SLIDING: Window(config.decoder.sliding_window),
        },
        "use_cache": False,
        "cp": cp,
    }


@contextlib.contextmanager
def _narrow_windows(model: Any) -> Iterator[None]:
    """Let layers with a sliding window see so few tokens that short texts show the difference."""
    parts = [part for part in (model.config.encoder, model.config.decoder) if part.sliding_window]
    windows = [part.sliding_window for part in parts]
    try:
        for part in parts:
            part.sliding_window = 2
        yield
    finally:
        for part, window in zip(parts, windows, strict=True):
            part.sliding_window = window


def _pairs(model: Any) -> list[tuple[Tensor, Tensor]]:
    """Texts of arbitrary tokens, none of which is special."""
    words = int(model.config.decoder.vocab_size)
    device = model.get_input_embeddings().weight.device
    drawn = torch.arange(words // 4, words // 4 + 20, device=device) % words
    return [(drawn[i : i + s], drawn[i + 7 : i + 7 + t]) for i, (s, t) in enumerate(_SIZES)]


def _packed(model: Any, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The logits of all pairs, end to end."""

    def step(groups: Any) -> Tensor:
        (keys, encoder), (cp, local) = (
            next(iter(dispatch(made, samples, [0] * len(samples), groups)))
            for made, samples in (
                (
                    plan([len(pair[i]) for pair in pairs], ranks=1, max_tokens_per_rank=32),
                    [{"input_ids": pair[i]} for pair in pairs],
                )
                for i in (0, 1)
            )
        )
        logits: Tensor = model(**seq2seq_inputs(model, cp, local, keys, encoder)).logits[0]
        order = [cp.layout.sequences.index(i) for i in range(len(pairs))]
        parts = torch.split(logits, [len(pairs[i][1]) for i in cp.layout.sequences])
        return torch.cat([parts[i] for i in order])

    (found,) = loopback(1, step, device=pairs[0][0].device)
    return found
