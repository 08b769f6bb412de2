"""Global batches of a family that fit a machine, and samples of tokens for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from common.families import Family
from hcp.tools.programs.text_data import VOCABULARY_SIZE


def drawn(
    family: Family, *, ranks: int, capacity: int, tokens: int, batches: int, seed: int
) -> Iterator[list[int]]:
    """Draw the lengths of global batches: sequences of up to ``tokens`` in all, each cut to the
    rows of all ranks."""
    random = Random(seed)
    for _ in range(batches):
        lengths = [min(length, ranks * capacity) for length in family.draw(random)]
        sums = itertools.accumulate(lengths)
        kept = sum(total <= tokens for total in sums)
        yield lengths[: max(1, kept)]


def filled_batches(
    lengths: Sequence[int], *, tokens: int, batches: int, seed: int
) -> list[list[int]]:
    """Shuffle lengths, and fill global batches with up to ``tokens`` of them in their order, each
    length once. There are fewer batches where the lengths do not fill so many."""
    order = list(lengths)
    Random(seed).shuffle(order)
    made: list[list[int]] = [[]]
    for length in order:
        if made[-1] and sum(made[-1]) + length > tokens:
            if len(made) == batches:
                break
            made.append([])
        made[-1].append(length)
    return made


def sample(length: int, rows: int, seed: int, device: torch.device) -> dict[str, Tensor]:
    """Return a random walk through the vocabulary, padded to `rows`. Labels are the next tokens."""
    generator = torch.Generator().manual_seed(seed)
    moves = torch.randint(1, 9, (length + 1,), generator=generator)
    walk = (moves.cumsum(0) % VOCABULARY_SIZE).to(device)
    ones = torch.ones(length, device=device)
    fields = {"tokens": walk[:-1], "labels": walk[1:], "loss_mask": ones}
    return {name: F.pad(field, (0, rows - length)) for name, field in fields.items()}
