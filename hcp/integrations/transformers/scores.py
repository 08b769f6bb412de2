"""Scores of sequences: heads of `...ForSequenceClassification`, computed by all ranks together.

B sequences of this rank's batch, L their padded length, T rows of this rank, C labels.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput, SequenceClassifierOutputWithPast

from hcp.groups.process_groups import ProcessGroups
from hcp.integrations.model_cost import cost_of_model
from hcp.integrations.transformers.attention import ATTENTION, register_hcp_attention
from hcp.integrations.transformers.masks import masks_of
from hcp.integrations.transformers.model import losses_of, model_inputs
from hcp.integrations.transformers.padded_batches import expect_batch_of_text, kept_tokens
from hcp.integrations.transformers.probe import (
    Positions,
    difference_of,
    documents_to_compare,
    evaluating,
    implementations,
    keep_attention,
    tolerance,
)
from hcp.planning.cost import CostModel
from hcp.step.config import Config
from hcp.step.dispatch import LocalBatch, Step
from hcp.step.handler import ContextParallelHandler
from hcp.step.planner import StepPlanner
from hcp.tools.loggers import MeanMetrics

HEAD = "score"
"""The name under which classes of decoders for sequence classification keep their head."""

_OF_THE_BATCH = {"input_ids", "attention_mask", "labels"}
_HARMLESS = {"use_cache", "num_items_in_batch", "return_dict"}
"""Arguments that Trainers and PEFT pass, and that change no score."""


class Trunk(nn.Module):
    """A model without its head, as a causal language model whose logits are its hidden states: what
    `register_hcp_attention` compares."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.whole = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.whole, name)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, **given: Any
    ) -> CausalLMOutput:
        whole: Any = self.whole
        hidden = whole.base_model(input_ids=input_ids, **given).last_hidden_state
        # The comparison expects a column for each token, and a loss of them.
        words = whole.get_input_embeddings().weight.shape[0]
        logits = F.pad(hidden, (0, max(0, words - hidden.shape[-1])))
        if labels is None:
            return CausalLMOutput(logits=logits)
        loss = losses_of(logits[0, :-1], labels[0, 1:]).mean()
        return CausalLMOutput(loss=loss, logits=logits)


def register_for_scores(model: nn.Module, *, fused_rope: bool = True) -> None:
    """Give hcp's attention to a decoder with a head for sequence classification, such as a reward
    model: one score, or one of each class, at the last token of a sequence.

    See `register_hcp_attention`, which compares the hidden states. Raises ValueError for a model
    without such a head.
    """
    _check_head(model)
    trunk = type(type(model).__name__, (Trunk,), {})(model)
    register_hcp_attention(trunk, fused_rope=fused_rope)
    if any(isinstance(hook, Positions) for hook in trunk._forward_pre_hooks.values()):
        raise ValueError(
            f"{type(model).__name__} counts positions from its padding's index on, expected a "
            "decoder whose positions are 0, 1, 2, ..."
        )
    keep_attention(model.base_model, ATTENTION)  # type: ignore[arg-type]


def _check_head(model: nn.Module) -> None:
    """Raise ValueError unless a model scores a sequence by its head, from the hidden state of the
    last token."""
    name, head = type(model).__name__, getattr(model, HEAD, None)
    advice = (
        f"expected a decoder of the kind ...ForSequenceClassification, whose {HEAD!r} scores the "
        "last token"
    )
    if not isinstance(head, nn.Module) or not hasattr(model, "base_model"):
        raise ValueError(f"{name} has no head {HEAD!r}, {advice}")
    before: Any = implementations(model)
    try:
        with evaluating(model):
            model.set_attn_implementation("eager")  # type: ignore[operator]
            tokens, _ = documents_to_compare(model)
            own = model(input_ids=tokens[None], use_cache=False).logits
            hidden = model.base_model(input_ids=tokens[None], use_cache=False)  # type: ignore[operator]
            found = head(hidden.last_hidden_state[:, -1])
            limit = tolerance(model, own)
    finally:
        model.set_attn_implementation(before)  # type: ignore[operator]
    if found.shape != own.shape or difference_of(found, own) > limit:
        raise ValueError(f"{name} computes other scores than its head {HEAD!r} does, {advice}")


def sequence_scores(model: nn.Module, cp: ContextParallelHandler, local: LocalBatch) -> Tensor:
    """Return the scores of this micro-batch's sequences, (sequences, C), on every rank of the
    group. `model` is one that `register_for_scores` has taken.

    `local.input_ids`: (T,). `local.is_last`: (T,) bools, the token of each sequence that has its
    score.
    """
    whole: Any = model
    hidden = whole.base_model(**model_inputs(cp, local)).last_hidden_state[0]
    rows = whole.score(hidden)[: cp.rows]
    return cp.sequences.sum(rows.where(local.is_last.unsqueeze(1), 0.0))


# ---- padded batches ------------------------------------------------------------------------------


def spread_scores(
    model: Any,
    cp: Config,
    groups: ProcessGroups,
    cost: CostModel | None,
    trained: MeanMetrics,
    left_out: Collection[str] = (),
) -> None:
    """Let all ranks compute a model's padded batches together, while its attention is hcp's.
    `model`: as for `register_for_scores`, or such a model with adapters of PEFT.

    Every rank of the domain calls the model equally often. `trained` gets the numbers of the
    batches whose gradients are computed. `left_out`: names of columns that losses read and models
    do not."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    planner = StepPlanner.of(
        cp,
        groups.size("dp_cp"),
        cost=cost or cost_of_model(model, groups, cp.ranks_per_node),
        masks=lambda lengths: masks_of(base, lengths),
        compares=False,
    )
    own, known = base.forward, {*_OF_THE_BATCH, *_HARMLESS, *left_out}

    @wraps(own)  # whose arguments Transformers reads
    def forward(input_ids: Tensor | None = None, **given: Any) -> SequenceClassifierOutputWithPast:
        if implementations(base)[""] != ATTENTION:  # inside own_attention
            output: SequenceClassifierOutputWithPast = own(input_ids=input_ids, **given)
            return output
        tokens = _tokens_of(input_ids, given, known)
        samples = _samples(base, tokens, given.get("attention_mask"))
        step = planner.step(samples, groups)
        logits = _scores_of(base, step)
        if torch.is_grad_enabled():
            trained.add(step)
        return _output(base, logits, given.get("labels"))

    base.forward = forward


def _tokens_of(
    input_ids: Tensor | None, given: Mapping[str, Any], known: Collection[str]
) -> Tensor:
    """Return the tokens of a call. ValueError for other arguments that it has."""
    if input_ids is None:
        raise ValueError("the model was called without input_ids, expected a padded batch of them")
    expect_batch_of_text(
        *(given, known),
        "input_ids, attention_mask and labels alone: hcp dispatches tokens, and counts positions "
        "itself",
    )
    return input_ids


def _samples(base: Any, tokens: Tensor, mask: Tensor | None) -> list[dict[str, Tensor]]:
    """Return the sequences of a batch (B, L) without their padding."""
    kept = kept_tokens(
        tokens, mask, ". Give rows of several documents to hcp's Trainer with packed=True"
    )
    for i, some in enumerate(kept.any(1).tolist()):
        if not some:
            raise ValueError(
                f"sequence {i} of the batch has no token, by its attention_mask, expected 1 or "
                "more: a score is that of its last one"
            )
    padding = base.config.get_text_config().pad_token_id
    return [_sample(*rows, padding) for rows in zip(tokens, kept, strict=True)]


def _sample(tokens: Tensor, kept: Tensor, padding: int | None) -> dict[str, Tensor]:
    """A sequence and the token that has its score: as in Transformers, the last one that is not the
    padding token. Where that token ends texts as well, it is the one before."""
    own = tokens[kept]
    places = torch.arange(len(own), device=own.device)
    last = places[-1:] if padding is None else (places * (own != padding)).amax(0, keepdim=True)
    return {"input_ids": own, "is_last": places == last}


def _scores_of(base: Any, step: Step) -> Tensor:
    """Return the scores of this rank's batch, (B, C)."""
    return torch.stack(
        step.combine_by_sequence(sequence_scores(base, cp, local) for cp, local in step)
    )


def _output(base: Any, logits: Tensor, labels: Tensor | None) -> SequenceClassifierOutputWithPast:
    loss = None
    if labels is not None:
        loss = base.loss_function(
            logits=logits, labels=labels, pooled_logits=logits, config=base.config
        )
    return SequenceClassifierOutputWithPast(loss=loss, logits=logits)
