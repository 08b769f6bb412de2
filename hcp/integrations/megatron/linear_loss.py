"""Megatron's models whose losses are computed without the logits of all rows in memory."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hcp.integrations.linear_cross_entropy import check_linear_cross_entropy, linear_cross_entropy


def use_linear_cross_entropy(model: Any) -> None:
    """Let a GPTModel compute its losses of hidden states and the output layer's weight, in chunks.

    `model`: a chunk as it was built, before Float16Module and DistributedDataParallel. A chunk
    without the output layer stays as it is, and a call without labels returns logits as before.
    Raises ValueError for tensor parallelism, multi-token prediction and deferred gradients of
    embeddings, and ImportError without a library that computes it.
    """
    config = model.config
    for name, expected, why in (
        ("tensor_model_parallel_size", 1, "a rank would have a part of the vocabulary"),
        ("mtp_num_layers", None, "its losses and their counts are of logits"),
        ("defer_embedding_wgrad_compute", False, "the output layer's gradient is computed at once"),
    ):
        value = getattr(config, name, expected)
        if (value or expected) != expected:
            raise ValueError(
                f"{name} is {value!r}, expected {expected!r} with a linear cross-entropy: {why}"
            )
    if not model.post_process:
        return
    # Megatron may build it on the CPU and move it.
    check_linear_cross_entropy(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    layer, kind = model.output_layer.__class__, model.__class__
    model.output_layer.__class__ = _handing_on(layer)
    model.__class__ = _with_losses(kind)


@cache
def _handing_on(layer: type) -> type:
    """Derive a class of output layers that return their input where losses are asked for."""

    def forward(self: Any, input_: Tensor, weight: Tensor | None = None, **named: Any) -> Any:
        if not self.asked_for_losses:
            return super(made, self).forward(input_, weight, **named)
        self.handed_on = input_, self.weight if weight is None else weight
        return input_, None

    own = {"forward": forward, "asked_for_losses": False, "__module__": __name__}
    made: Any = type(layer.__name__, (layer,), own)
    return made  # type: ignore[no-any-return]


@cache
def _with_losses(model: type) -> type:
    """Derive a class of models that compute losses of what such an output layer handed on."""
    signature = inspect.signature(model.forward)  # type: ignore[attr-defined]

    def forward(self: Any, *given: Any, **named: Any) -> Tensor:
        labels = signature.bind(self, *given, **named).arguments.get("labels")
        self.output_layer.asked_for_losses = labels is not None
        try:
            return super(made, self).forward(*given, **named)  # type: ignore[no-any-return]
        finally:
            self.output_layer.asked_for_losses, self.output_layer.handed_on = False, None

    def compute_language_model_loss(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the losses, [b, s], of labels, [b, s], and what the output layer handed on."""
        hidden, weight = self.output_layer.handed_on
        if logits is not hidden:
            raise ValueError(
                f"{type(self).__name__} changes its logits, such as by a scale, expected a model "
                "that does not: leave the linear cross-entropy out"
            )
        rows, batch = hidden.shape[:2]
        flat = labels.transpose(0, 1).reshape(-1)
        losses = linear_cross_entropy(hidden.flatten(0, 1), weight, flat)
        return losses.view(rows, batch).transpose(0, 1).contiguous()

    own = {"forward": forward, "compute_language_model_loss": compute_language_model_loss}
    made: Any = type(model.__name__, (model,), {**own, "__module__": __name__})
    return made  # type: ignore[no-any-return]
