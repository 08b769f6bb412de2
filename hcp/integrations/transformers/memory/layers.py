"""Layers of a model of Transformers' that keep, recompute or offload their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from hcp.attention.kept import KeptResults
from hcp.integrations.transformers.memory.choice import Choice, LayerRows
from hcp.integrations.transformers.memory.host import HostCopies, LayerCopies, Versions
from hcp.integrations.transformers.memory.row_chunks import InChunks, norms_outside, row_wise_of


class Applied:
    """Layers under a choice. ``remove()`` gives the model its own layers back."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self._replaced: list[tuple[nn.Module, Any]] = []

    def replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._replaced.append((module, vars(module).get("forward")))
        module.forward = forward

    def remove(self) -> None:
        for module, before in self._replaced:
            del module.forward
            if before is not None:
                module.forward = before
        self._replaced.clear()


def apply(model: nn.Module, choice: Choice) -> Applied:
    """Let the layers of a model keep, recompute or offload what their backward needs.

    Call it after ``register_hcp_attention`` or before it, and before or after FSDP2's
    ``fully_shard``; every rank with an equal choice. Losses and gradients are those of the model
    without it. Forwards without gradients are not changed, but for chunks.

    A recomputed layer does not attend again: hcp's attention keeps its output and log-sum-exp.
    Attention by indices and recurrent layers are computed twice.

    Args:
        model: a causal language model of Transformers, which may be wrapped.
        choice: a word for each layer, and the rows of a chunk.

    Returns:
        An object whose ``remove()`` undoes it.

    Raises:
        ValueError: the model has another number of layers, its own gradient checkpointing is on, a
            choice is applied already, or an MLP cannot be computed in chunks.
    """
    layers = layers_of(model)
    _check(model, layers, choice)
    words = list(zip(layers, choice.layers, strict=True))
    again = [layer for layer, word in words if word.startswith("recompute")]
    parts: list[nn.Module] = []
    if choice.chunk_rows:
        parts = [part for layer in again for part in row_wise_of(layer)]
        parts += norms_outside(model, layers)
    applied, host = Applied(choice), _Host()
    some_go = any(map(_goes, choice.layers))
    for layer, word in words:
        if word != "keep" or some_go:
            applied.replace(layer, _LayerForward(layer, word, host))
    for part in parts:
        applied.replace(part, InChunks(part, choice.chunk_rows, vars(part).get("forward")))
    return applied


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the decoder's layers, first to last. Raises ValueError if their number is not that of
    the model's configuration."""
    found = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    expected = getattr(text, "num_hidden_layers", None)
    if not found or (expected is not None and len(found) != expected):
        raise ValueError(
            f"{type(model).__name__} has {len(found)} layers that can be computed again, expected "
            f"the {expected} of its configuration: a decoder of GradientCheckpointingLayer alone"
        )
    return list(found)


def _check(model: nn.Module, layers: list[nn.Module], choice: Choice) -> None:
    if len(choice.layers) != len(layers):
        raise ValueError(
            f"choice.layers has {len(choice.layers)} words, expected {len(layers)}: one for each "
            f"layer of {type(model).__name__}"
        )
    for layer in layers:
        _expect_no_checkpointing(layer)
    if any("forward" in vars(layer) for layer in layers):
        raise _applied_before("a layer")
    if any(isinstance(vars(part).get("forward"), InChunks) for part in model.modules()):
        raise _applied_before("the last norm")


def _applied_before(what: str) -> ValueError:
    return ValueError(
        f"{what} has a forward of its own already, expected that of its class: remove() the "
        "choice that was applied before"
    )


def _expect_no_checkpointing(layer: nn.Module) -> None:
    if getattr(layer, "gradient_checkpointing", False):
        raise ValueError(
            "gradient checkpointing is on, expected it off: the choice says which layers are "
            "computed again. Say gradient_checkpointing=False"
        )


class _Host:
    """The copies of a model, made at the first forward: a Trainer moves models to their devices."""

    def __init__(self) -> None:
        self._copies: HostCopies | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_copies": None}  # a copy of the model has its own

    def drain(self) -> None:
        if self._copies is not None:
            self._copies.drain()

    def layer(
        self, module: nn.Module, shared: Iterable[Tensor], device: torch.device
    ) -> LayerCopies:
        if self._copies is None or self._copies.device != device:
            self.drain()
            self._copies = HostCopies(device)
        return self._copies.layer(module, shared)


def _goes(word: LayerRows) -> bool:
    return word.endswith("offload")


class _LayerForward:
    """The forward of one layer, in the place of its class's. Copies of a model have copies of it,
    since it names its layer."""

    def __init__(self, layer: nn.Module, word: LayerRows, host: _Host) -> None:
        self.layer, self.host, self.goes = layer, host, _goes(word)
        self.compute = _recomputed if word.startswith("recompute") else _kept

    def __call__(self, hidden: Tensor, *others: Any, **named: Any) -> Any:
        given = hidden, *others
        if not torch.is_grad_enabled():
            return _kept(self.layer, None, given, named)
        if self.layer.training:
            _expect_no_checkpointing(self.layer)  # which a Trainer switches on when it trains
        try:
            return self._watched(given, named)
        except BaseException:
            self.host.drain()  # rows that no backward will ask for
            raise

    def _watched(self, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if not self.goes:
            result = self.compute(self.layer, None, given, named)
            self.host.drain()  # of the layer before, whose rows have left by now
            return result
        hidden, *others = given
        shared = (x for x in tree_leaves((others, named)) if isinstance(x, Tensor))
        copies = self.host.layer(self.layer, shared, hidden.device)
        with saved_tensors_hooks(copies.pack, copies.unpack):
            result = self.compute(self.layer, copies, given, named)
        copies.computed()
        return result


def _kept(layer: nn.Module, copies: object, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return type(layer).forward(layer, *given, **named)


def _recomputed(
    layer: nn.Module,
    copies: LayerCopies | None,
    given: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:
    """Hooks of saved tensors that are outside of a checkpoint get its input alone."""
    results = KeptResults() if copies is None else KeptResults(copies.pack, copies.unpack)
    weights = Versions(layer.parameters())

    def computed(*given: Any, **named: Any) -> Any:
        weights.expect_unchanged()
        return type(layer).forward(layer, *given, **named)

    return checkpoint(
        computed,
        *given,
        use_reentrant=False,
        context_fn=lambda: (results.keeping(), results.recalling()),
        **named,
    )
