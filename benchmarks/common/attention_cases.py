"""Cases of attention for `conformance.py`, and the answer of one rank over whole sequences."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

NAMES = ("query", "key", "value")
GRADIENTS = ("dquery", "dkey", "dvalue", "dsinks")
JUNK = 1e3
"""What rows of padding hold. Whoever attends to them is off by as much."""


@dataclass(frozen=True)
class Case:
    """Sequences in a pack, and what a layer asks of its attention."""

    name: str
    lengths: tuple[int, ...]
    """Tokens of each sequence. They do not see each other."""
    padded: tuple[int, ...] | None = None
    """Rows of each sequence in the pack, those of padding at its end; None: no padding."""
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 16
    value_dim: int | None = None
    """The size of values' heads; None: ``head_dim``."""
    causal: bool = True
    window: int | None = None
    """A token sees so many before itself."""
    scale: float | None = None
    """Of the scores; None: 1 / sqrt(head_dim)."""
    sinks: bool = False
    """One more logit for each head, learned, in the softmax of every row (GPT-OSS)."""
    dtype: str = "float64"

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each sequence in the pack."""
        return self.padded or self.lengths

    @property
    def starts(self) -> tuple[int, ...]:
        """The first row of each sequence in the pack."""
        return (0, *itertools.accumulate(self.rows))[:-1]

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def real(self) -> Tensor:
        """The rows of the pack that are tokens."""
        pairs = zip(self.starts, self.lengths, strict=True)
        return torch.cat([torch.arange(start, start + n) for start, n in pairs])


def cases(ranks: int) -> list[Case]:
    """The cases for so many ranks: `edge` tokens are one chunk for each half of every rank."""
    edge = 2 * ranks
    documents = (1, 7, 30 * edge + 3, 2, edge - 1, edge, edge + 1, 97)
    even = (8 * edge, 40 * edge, edge, 4 * edge)
    return [
        Case("causal", (64 * edge,)),
        Case("causal, an odd length", (61 * edge - 3,)),
        Case("full attention", (64 * edge,), causal=False),
        Case("equal sequences", (16 * edge,) * 4),
        Case("documents that fill their chunks", even),
        Case("documents of any length", documents),
        Case("documents shorter than the ranks", (1, 1, 2, 1, 3)),
        Case("a border at a rank's end", (32 * edge, 32 * edge)),
        Case("a border one past a rank's end", (32 * edge + 1, 32 * edge - 1)),
        Case("grouped heads 4:2", (64 * edge,), kv_heads=2),
        Case("one key head", (64 * edge,), kv_heads=1),
        Case("a window", (64 * edge,), window=37),
        Case("a window in documents", documents, window=5),
        Case("sinks", (64 * edge,), sinks=True),
        Case("sinks in documents", documents, sinks=True),
        Case("a scale of its own", (64 * edge,), scale=0.07),
        Case("heads of 24", (64 * edge,), head_dim=24),
        Case("values of 8, keys of 16", (64 * edge,), value_dim=8),
        Case(
            "padding after each document", (edge - 1, 3 * edge + 1, 9), (edge, 5 * edge, 14 * edge)
        ),
        Case("causal, float32", (64 * edge,), dtype="float32"),
        Case("documents, float32", documents, kv_heads=2, dtype="float32"),
        Case("causal, bfloat16", (64 * edge,), dtype="bfloat16"),
        Case("documents, bfloat16", documents, kv_heads=2, dtype="bfloat16"),
        Case("all at once", documents, kv_heads=2, window=9, scale=0.2, sinks=True),
    ]


def inputs(case: Case) -> dict[str, Tensor]:
    """Query, key, value and the output's gradient of the whole pack, (rows, heads, size), and
    sinks, (heads,). Equal on every rank."""
    generator = torch.Generator().manual_seed(11)
    value = case.value_dim or case.head_dim
    shapes = {
        "query": (case.heads, case.head_dim),
        "key": (case.kv_heads, case.head_dim),
        "value": (case.kv_heads, value),
        "grad": (case.heads, value),
    }
    padding = torch.ones(sum(case.rows), dtype=torch.bool)
    padding[case.real()] = False
    made = {}
    for name, shape in shapes.items():
        x = torch.randn(len(padding), *shape, generator=generator, dtype=torch.float64)
        x[padding] = 0.0 if name == "grad" else JUNK
        made[name] = x.to(case.torch_dtype)
    wide = torch.promote_types(case.torch_dtype, torch.float32)
    return made | {"sinks": torch.randn(case.heads, generator=generator).to(wide)}


@functools.cache
def one_rank(case: Case) -> dict[str, Tensor]:
    """Output and gradients of the whole pack by the formula, in float64, of the rounded inputs."""
    given = {name: x.double() for name, x in inputs(case).items()}
    leaves = [given[name].requires_grad_() for name in (*NAMES, "sinks")]
    out = torch.zeros_like(given["grad"])
    for start, tokens in zip(case.starts, case.lengths, strict=True):
        here = slice(start, start + tokens)
        q, k, v = (x[here] for x in leaves[:3])
        out[here] = _attention(case, q, k, v, leaves[3])
    grads = torch.autograd.grad(out, leaves, given["grad"], allow_unused=True)
    found = dict(zip(GRADIENTS, grads, strict=True))
    wanted = GRADIENTS if case.sinks else GRADIENTS[:3]
    return {"out": out.detach()} | {name: found[name] for name in wanted}


def _attention(case: Case, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
    """softmax(scale q k' and the sink, of the keys that a query sees) v, of one sequence."""
    groups = case.heads // case.kv_heads
    keys, values = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * case.softmax_scale
    back = torch.arange(len(query))[:, None] - torch.arange(len(key))
    hidden = (back < 0) if case.causal else torch.zeros_like(back, dtype=torch.bool)
    if case.window is not None:
        hidden = hidden | (back > case.window)
    scores = scores.masked_fill(hidden, -math.inf)
    if case.sinks:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(query), 1)], 2)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(key)], values)
