"""Payloads: rows of which each sequence has a number of its own, and the ranks that get them.

The rows of a sequence are its units end to end (images, audio clips). Tokens of the sequence may
take rows, in order: image token i takes row i of the image embeddings, say.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hcp import _core
from hcp.exchange.layout import Layout, tensor_of
from hcp.exchange.tables import Route, Sections, places
from hcp.planning.plan import Plan

SPLITS = _core.SPLITS
"""The rules by which a group's ranks split a payload."""


class Takers(NamedTuple):
    """The tokens that take rows of a payload, of the sequences that this rank loaded or computes.

    Runs are (first token, tokens, rows of each) of tokens that follow each other. Where several
    tokens take one row, the last number of all runs of a sequence is minus their number.
    """

    sources: Sequence[int]
    """The rank that loaded each sequence."""
    rank: int
    counts: Sequence[int]
    """Runs of each sequence."""
    loaded: Sequence[int]
    """The words of the runs of sequences that this rank loaded, by ascending index."""
    computed: Sequence[int]
    """The words of the runs of sequences that this rank computes, in the order of the plan."""


class Split:
    """How the ranks of each group split one payload of a plan."""

    def __init__(
        self,
        plan: Plan,
        rule: str,
        units: Sequence[Sequence[int]] | Sequence[int],
        takers: Takers | None = None,
    ) -> None:
        """``rule``: one of SPLITS. ``units``: of all sequences of the plan, the rows of each unit,
        or the number of rows where each is a unit."""
        self.rule, self.has_takers = rule, takers is not None
        self._core = plan.core.payload(rule, *_counted(units), takers)
        self._of_units = False

    def of_units(self) -> Split:
        """The split of a payload that has one row per unit, which goes where the unit's rows go."""
        split = Split.__new__(Split)
        split.rule, split.has_takers = self.rule, False
        split._core, split._of_units = self._core, True
        return split

    def from_sources(self, sources: Sequence[int], rank: int) -> Route:
        """The route from what ``rank`` loaded, its sequences by ascending index, to what it gets,
        micro-batch after micro-batch."""
        return Route(self._core.route(sources, rank, self._of_units))

    def to_tokens(self, layout: Layout) -> Route:
        """The route of results, one of each taker whose rows a rank has, to the ranks that have the
        takers."""
        return Route(self._core.route_to_tokens(layout.micro_batch, layout.rank))

    def of_rank(self, layout: Layout) -> RankRows:
        """The rows of the payload that a rank has in a micro-batch."""
        words = self._core.measure(layout.micro_batch, layout.rank, self._of_units)
        return RankRows(tensor_of(words, torch.int64))


def _counted(
    units: Sequence[Sequence[int]] | Sequence[int],
) -> tuple[Sequence[int], list[int] | None]:
    """The units of each sequence, and their rows; None: one each."""
    lists = [rows for rows in units if not isinstance(rows, int)]
    if not lists:
        return units, None  # type: ignore[return-value]
    return [len(rows) for rows in lists], list(itertools.chain.from_iterable(lists))


class RankRows(Sections):
    """The rows that one rank has of a payload in a micro-batch."""

    SECTIONS = _core.PAYLOAD_SECTIONS
    PLACES = places(SECTIONS)

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 (sequences + 1,): rows of each of the group's sequences, summed."""
        return self.section("SEQUENCES").flatten().int()

    @property
    def cu_units(self) -> Tensor:
        """int32 (units + 1,): rows of each unit, summed. Nothing under "tokens"."""
        return self.section("UNITS").flatten().int()

    @property
    def token_rows(self) -> Tensor:
        """int64 (m,): where tokens that take rows lie among the rank's own rows."""
        return self.section("TAKING").flatten()
