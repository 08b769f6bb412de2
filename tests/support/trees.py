"""Trees of texts, and what an operation gives on each text of one alone: hcp has no hand in it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from hypothesis import strategies as st
from torch import Tensor

from hcp import Mask


@dataclass(frozen=True)
class Tree:
    """Parts end to end, and the part that each continues, -1: none."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]

    @property
    def mask(self) -> Mask:
        return Mask.tree(self.lengths, self.parents)

    @property
    def length(self) -> int:
        return sum(self.lengths)

    @cached_property
    def texts(self) -> list[list[int]]:
        """The tokens of each text, from a root to a leaf."""
        starts = [0, *itertools.accumulate(self.lengths)]
        texts: list[list[int]] = []
        found: list[list[int]] = []
        for part, parent in enumerate(self.parents):
            before = texts[parent] if parent >= 0 else []
            texts.append(before + list(range(starts[part], starts[part + 1])))
            if part not in self.parents[part + 1 :]:
                found.append(texts[part])
        return found

    @cached_property
    def firsts(self) -> list[list[int]]:
        """Of each text, the places of the tokens that no text before has."""
        seen: set[int] = set()
        places = []
        for text in self.texts:
            places.append([i for i, token in enumerate(text) if token not in seen])
            seen |= set(text)
        return places


@st.composite
def trees(draw: st.DrawFn, most: int = 8) -> Tree:
    """Any fan-out, several roots, and parts of one token."""
    count = draw(st.integers(1, most))
    lengths = draw(st.lists(st.integers(1, 7), min_size=count, max_size=count))
    deep = draw(st.booleans())
    parents = [draw(st.integers(max(-1, i - 2) if deep else -1, i - 1)) for i in range(count)]
    return Tree(tuple(lengths), tuple(parents))


def each_text(
    alone: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor, tree: Tree
) -> tuple[Tensor, Tensor]:
    """Results of the rows x and their gradients, each text computed by itself. A row that several
    texts share has one result and one gradient of it, that of the first text."""
    out, grads = grad.new_full((len(x), grad.shape[1]), torch.nan), torch.zeros_like(x)
    for text, first in zip(tree.texts, tree.firsts, strict=True):
        leaf = x[text].clone().requires_grad_()
        made = alone(leaf)
        mine = torch.zeros_like(made)
        mine[first] = grad[text][first, : made.shape[1]]
        out = out[:, : made.shape[1]]
        for place, token in enumerate(text):  # texts that share a row agree
            known = out[token].isnan().any() or (out[token] - made[place]).abs().max() < 1e-10
            assert known, (tree, token)
        out[text] = made.detach()
        made.backward(mine)
        assert leaf.grad is not None
        grads.index_add_(0, torch.tensor(text), leaf.grad)
    return out, grads
