"""The bytes that a layer of a model takes under each word of a choice, counted without computing.

T rows of a rank, H query heads, G key-value heads, D and E head sizes.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from hcp.attention.kept import current
from hcp.integrations.transformers.memory.choice import Choice, LayerRows
from hcp.integrations.transformers.memory.layers import apply, layers_of
from hcp.integrations.transformers.memory.live_bytes import LiveBytes

COUNTED = "hcp_counted"
"""The attention that keeps what hcp's keeps, and computes nothing."""


class Line(NamedTuple):
    """Bytes of so many rows."""

    row: float
    fixed: float

    def at(self, rows: int) -> int:
        return int(self.row * rows + self.fixed)


class Most(NamedTuple):
    """The most bytes at once, of any number of rows: which moment of a pass is the fullest depends
    on it, so that there is a line between each two counts."""

    counts: tuple[tuple[int, int], ...]
    """Rows and bytes, ascending."""

    def at(self, rows: int) -> int:
        return max(_line(*pair).at(rows) for pair in itertools.pairwise(self.counts))


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer, or of the last norm, its parameters not counted."""

    held: Line
    """From its forward to its backward, its input included where it is needed."""
    forward: Most
    """The most during its forward, input and output included."""
    backward: Most
    """The most during its backward: with what it held, and the gradients of its parameters."""
    forward_attention: Most
    """The most while attention runs, buffers of exchanges not included."""
    backward_attention: Most

    def in_forward(self, rows: int, buffers: int) -> int:
        """The most of both, with so many bytes of buffers of exchanges."""
        return max(self.forward.at(rows), self.forward_attention.at(rows) + buffers)

    def in_backward(self, rows: int, buffers: int) -> int:
        return max(self.backward.at(rows), self.backward_attention.at(rows) + buffers)


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of a model's layers and parameters."""

    layers: int
    width: int
    """Values of a row between layers."""
    itemsize: int
    kept: LayerBytes
    recomputed: LayerBytes
    in_chunks: LayerBytes | None
    """The same with its MLP and norms in chunks; None: it cannot be, or was not asked for."""
    chunk_rows: int
    layer_parameters: int
    other_parameters: int
    """Of the embedding, the head and the last norm."""
    embedding_parameters: int
    """Of the embedding, 0 where it is the head's weight, too."""
    whole_norm: LayerBytes
    """Of what lies between the last layer and the head: the last norm."""
    norm_in_chunks: LayerBytes | None
    """The same in chunks; None: as for layers."""

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.other_parameters

    def of(self, word: LayerRows, rows: int) -> LayerBytes:
        if not word.startswith("recompute"):
            return self.kept
        chunks = self.in_chunks if self.chunk_of(rows) else None
        return chunks or self.recomputed

    def norm(self, rows: int) -> LayerBytes:
        chunks = self.norm_in_chunks if self.chunk_of(rows) else None
        return chunks or self.whole_norm

    def chunk_of(self, rows: int) -> int:
        """Rows of a chunk where a rank has so many rows; 0: there are none."""
        return self.chunk_rows if self.in_chunks and rows > 2 * self.chunk_rows else 0


def model_bytes(config: Any, dtype: torch.dtype, chunk_rows: int = 16_384) -> ModelBytes:
    """Count the bytes of a model by its configuration alone, in seconds and without its memory.

    Args:
        config: of a causal language model of Transformers.
        dtype: of weights and rows as layers compute them.
        chunk_rows: rows of a chunk of MLPs and norms in recomputed layers, and of the last norm,
            where there are many rows; 0: none.

    Returns:
        The bytes of one layer under each word, and the numbers of parameters.

    Raises:
        ValueError: the model does not run without values, as one with experts does not.
    """
    text = config.get_text_config()
    model = _of_one_layer(config, dtype)
    layer = _Layer(model, dtype)
    chunked = norm_in_chunks = None
    if chunk_rows:
        try:
            chunks = tuple(n * chunk_rows for n in (2, 4, 8, 16, 32))
            chunked = layer.counted(Choice(["recompute"], chunk_rows), chunks)
            norm_in_chunks = layer.norm_counted(Choice(["keep"], chunk_rows), chunks)
        except ValueError:  # its MLP computes all rows at once
            chunk_rows = 0
    own, embedding = _numel(layer.layer), model.get_input_embeddings()  # type: ignore[operator]
    tied = embedding.weight is model.get_output_embeddings().weight  # type: ignore[operator]
    return ModelBytes(
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        itemsize=dtype.itemsize,
        kept=layer.counted(Choice(["keep"]), ROWS),
        recomputed=layer.counted(Choice(["recompute"]), ROWS),
        in_chunks=chunked,
        chunk_rows=chunk_rows,
        layer_parameters=own,
        other_parameters=_numel(model) - own,
        embedding_parameters=0 if tied else _numel(embedding),
        whole_norm=layer.norm_counted(Choice(["keep"]), ROWS),
        norm_in_chunks=norm_in_chunks,
    )


ROWS = (1024, 2048, 4096, 65_536, 131_072)
"""At which layers are counted."""


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _of_one_layer(config: Any, dtype: torch.dtype) -> nn.Module:
    """The model on the device meta, with one layer of its most frequent kind."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    text.num_hidden_layers = 1
    if kinds := getattr(text, "layer_types", None):
        text.layer_types = [Counter(kinds).most_common(1)[0][0]]
    AttentionInterface.register(COUNTED, _counted_attention)
    AttentionMaskInterface.register(COUNTED, lambda *given, **named: None)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(small, attn_implementation=COUNTED)
    return model.to(dtype).train()


class _Layer:
    """A layer, with the arguments that its model gives it."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        (self.layer,) = layers_of(model)
        self.model, self.dtype = model, dtype

    def counted(self, choice: Choice, rows: tuple[int, ...]) -> LayerBytes:
        return self._counted(self._count, choice, rows)

    def norm_counted(self, choice: Choice, rows: tuple[int, ...]) -> LayerBytes:
        return self._counted(self._count_norm, choice, rows)

    def _counted(
        self, count: Callable[[int], _Counts], choice: Choice, rows: tuple[int, ...]
    ) -> LayerBytes:
        applied = apply(self.model, choice)
        try:
            return _between(rows, list(map(count, rows)))
        finally:
            applied.remove()

    def _count(self, rows: int) -> _Counts:
        hidden, others, named = self._arguments(rows)
        leaf = torch.empty_like(hidden).requires_grad_()
        self.model.zero_grad()
        with LiveBytes() as live:
            hidden = leaf.clone()  # its own memory, as that of the layer before
            result = [_rows_of(self.layer(hidden, *others, **named))]
            del hidden
            return _through_the_backward(live, result)

    def _count_norm(self, rows: int) -> _Counts:
        """The model after its layer, whose place a copy takes."""
        made: list[LiveBytes] = []

        def replaced(layer: nn.Module, given: object, out: Any) -> Any:
            leaf = torch.empty_like(_rows_of(out)).requires_grad_()
            made.append(LiveBytes())
            made[0].__enter__()
            rows = leaf.clone()
            return (rows, *out[1:]) if isinstance(out, tuple) else rows

        self.model.zero_grad()
        hook = self.layer.register_forward_hook(replaced)
        try:
            decoder: Any = self.model.base_model
            result = [decoder(**self._given(rows)).last_hidden_state]
            return _through_the_backward(made[0], result)
        finally:
            hook.remove()
            for live in made:
                live.__exit__(None, None, None)

    def _given(self, rows: int) -> dict[str, Any]:
        # A mask that is made already, which Transformers hands on.
        mask = torch.empty(1, 1, rows, rows, device="meta", dtype=torch.bool)
        tokens = torch.zeros(1, rows, dtype=torch.long, device="meta")
        return {"input_ids": tokens, "attention_mask": mask, "use_cache": False}

    def _arguments(self, rows: int) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
        seen: list[Any] = []
        hook = self.layer.register_forward_pre_hook(
            lambda module, given, named: seen.append((given, named)), with_kwargs=True
        )
        try:
            with torch.no_grad():
                self.model(logits_to_keep=1, **self._given(rows))
        except (NotImplementedError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"{type(self.model).__name__} does not run on the device meta, expected one whose "
                "operators need no values to know their sizes: give a Choice of your own. "
                f"{type(error).__name__}: {error}"
            ) from error
        finally:
            hook.remove()
        (hidden, *others), named = seen[0]
        return hidden, tuple(others), named


def _rows_of(out: Any) -> Tensor:
    rows: Tensor = out[0] if isinstance(out, tuple) else out
    return rows


class _Counts(NamedTuple):
    held: int
    forward: int
    backward: int
    forward_attention: int
    backward_attention: int


def _through_the_backward(live: LiveBytes, result: list[Tensor]) -> _Counts:
    """Count what is live after a forward, and then its backward. ``result``: of the forward, alone;
    it is taken out of the list."""
    out = result.pop()
    forward, held, attending = live.most, live.now - out.nbytes, live.marked
    edge, like = get_gradient_edge(out), torch.empty_like(out, device="meta")
    del out
    live.most, live.marked = live.now, 0
    torch.autograd.backward([edge], [like])
    return _Counts(held, forward, live.most, attending, live.marked)


def _between(rows: tuple[int, ...], counts: list[_Counts]) -> LayerBytes:
    columns = (tuple(zip(rows, column, strict=True)) for column in zip(*counts, strict=True))
    held, *most = columns
    return LayerBytes(_line(*held[:2]), *map(Most, most))


def _line(few: tuple[int, int], many: tuple[int, int]) -> Line:
    row = (many[1] - few[1]) / (many[0] - few[0])
    return Line(row, few[1] - row * few[0])


# ---- attention that is counted -------------------------------------------------------------------


def _counted_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **others: Any
) -> tuple[Tensor, None]:
    rows = (x[0].transpose(0, 1) for x in (query, key, value))
    out: Tensor = _Counted.apply(*rows)  # type: ignore[no-untyped-call]
    return out.unsqueeze(0), None


class _Counted(torch.autograd.Function):
    """What hcp's attention saves, and the gradients that it makes. Buffers of its exchanges are
    those of `exchange_bytes`."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kept = current.results
        recalled = None if kept is None else kept.next()
        if recalled is None:
            out = query.new_empty(*query.shape[:2], value.shape[2])
            lse = query.new_empty(query.shape[:2], dtype=_wide(query.dtype))
            if kept is not None:
                kept.add(out, lse)
            LiveBytes.mark()
        else:
            out, lse = recalled
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        grads = tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])
        LiveBytes.mark()
        return grads


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@functools.cache
def exchange_bytes(heads: int, key_heads: int, head_dim: int, itemsize: int, ranks: int) -> int:
    """Bytes of a row in the buffers of one layer's attention, in its backward under "p2p": two
    blocks of arriving keys and values, their gradients in float32 twice, those of queries in
    float32. 0 for one rank."""
    keys = 2 * key_heads * head_dim
    return 0 if ranks == 1 else 2 * keys * itemsize + 2 * keys * 4 + heads * head_dim * 4
