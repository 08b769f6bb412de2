"""Payloads of a step: announced, moved to the ranks of their sequences, and used there."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hcp import _core, ops
from hcp.exchange.agreement import CallKind, Stamp
from hcp.exchange.layout import Layout, rows_may_vary
from hcp.exchange.payload_splits import RankRows, Split, Takers
from hcp.exchange.row_calls import RowCalls
from hcp.exchange.tables import Route
from hcp.exchange.transport import Transport
from hcp.planning.plan import Plan
from hcp.step.announcements import Announcements
from hcp.step.fields import (
    PER_SEQUENCE,
    Field,
    Payload,
    Rules,
    Sample,
    check_units,
    runs_of,
    units_of,
)

Fields = dict[str, list[Tensor]]
"""This rank's rows of each field, by name, in each micro-batch."""

Splits = dict[str, Split]
"""How each payload of a step is split. Handlers hold it before `hcp.dispatch` fills it."""


class LocalPayload:
    """One rank's part of a payload in a micro-batch: ``cp.payloads[name]``. The rows themselves are
    ``local[name]``."""

    def __init__(self, name: str, split: Split, layout: Layout, calls: RowCalls) -> None:
        self._name, self._split, self._layout, self._calls = name, split, layout, calls

    @property
    def split(self) -> str:
        """The rule by which the group's ranks split the payload."""
        return self._split.rule

    @cached_property
    def _held(self) -> RankRows:
        return self._split.of_rank(self._layout)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int32 (sequences + 1,), on the CPU: this rank's rows of each sequence, summed."""
        return self._held.cu_seqlens

    @cached_property
    def cu_units(self) -> Tensor:
        """int32 (units + 1,), on the CPU: rows of each unit that this rank has, summed: the bounds
        for an encoder that attends within units. ValueError where "tokens" cut units."""
        if self.split == "tokens":
            raise ValueError(
                f'payload {self._name!r} is split by "tokens", which cuts units, expected "whole", '
                '"first" or "even"'
            )
        return self._held.cu_units

    @cached_property
    def token_rows(self) -> Tensor:
        """int64 (m,): which of this rank's rows are tokens that take rows of the payload, in
        order."""
        self._check_takers()
        return self._held.token_rows.to(self._calls.device)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Move results of this rank's rows to the ranks whose tokens take them, with gradients.

        x (n, ...): one row of each token whose rows this rank has, in order. Returns (m, ...): one
        of each of this rank's own tokens that take rows, in order:
        ``embeddings.index_copy(0, token_rows, ...)`` puts them in place. Every rank of the group
        calls it.
        """
        return self._calls.to_tokens(x, self._name, self._route_to_tokens)

    @cached_property
    def _route(self) -> Route:
        return self._split.to_tokens(self._layout)

    def _route_to_tokens(self) -> Route:
        self._check_takers()
        return self._route

    def _check_takers(self) -> None:
        if not self._split.has_takers:
            raise ValueError(
                f"fields[{self._name!r}] has no tokens=, expected the tokens that take its rows"
            )


# ---- what this rank announces --------------------------------------------------------------------


class Announced:
    """The payloads of this rank's samples, and what it tells the other ranks of them."""

    def __init__(self, samples: Sequence[Sample], rules: Rules, lengths: Sequence[int]) -> None:
        """``lengths``: the tokens of each sample. ValueError for a payload that breaks its rule."""
        self.units: dict[str, list[list[int] | int]] = {}
        """By payload, for each sample: the rows of its units, or of all where each is one."""
        self.runs: dict[str, list[Tensor]] = {}
        """By payload whose rows tokens take, for each sample: these tokens."""
        payloads = {n: r for n, r in rules.items() if isinstance(r, Payload) and not r.per_unit_of}
        for name, rule in payloads.items():
            self.units[name] = [units_of(s, i, name, rule) for i, s in enumerate(samples)]
            if rule.tokens is not None:
                self.runs[name] = [
                    runs_of(sample, i, name, rule, length)
                    for i, (sample, length) in enumerate(zip(samples, lengths, strict=True))
                ]
                for i, (runs, units) in enumerate(
                    zip(self.runs[name], self.units[name], strict=True)
                ):
                    check_units(runs, units, f"samples[{i}][{name!r}]")
        self._check_rows_of_units(samples, rules)

    def _check_rows_of_units(self, samples: Sequence[Sample], rules: Rules) -> None:
        for name, rule in rules.items():
            if not isinstance(rule, Payload) or rule.per_unit_of is None:
                continue
            for i, sample in enumerate(samples):
                given = self.units[rule.per_unit_of][i]
                units = given if isinstance(given, int) else len(given)
                if sample[name].shape[0] != units:
                    raise ValueError(
                        f"samples[{i}][{name!r}] has {sample[name].shape[0]} rows, expected "
                        f"{units}: one per unit of {rule.per_unit_of!r}"
                    )

    def message(self) -> dict[str, Any]:
        """The announcement as values that JSON can hold."""
        runs = {name: [len(table) for table in tables] for name, tables in self.runs.items()}
        return {"units": self.units, "runs": runs}


class Sources:
    """The rank that loaded each sequence. There may be a hundred thousand of them."""

    def __init__(self, ranks: Sequence[int] = ()) -> None:
        """ValueError for what is no integer, or has more than 32 bits."""
        self.ranks = array("i", _core.int32s(ranks, "sources"))
        """The rank of each sequence, in memory that the core reads as it is."""

    @cached_property
    def table(self) -> Tensor:
        """The same, int32 (sequences,), on the CPU."""
        if not self.ranks:
            return torch.empty(0, dtype=torch.int32, device="cpu")
        return torch.frombuffer(self.ranks, dtype=torch.int32)

    def lie_in(self, ranks: int) -> bool:
        """Whether all are ranks of a domain of so many."""
        return not self.ranks or 0 <= int(self.table.min()) <= int(self.table.max()) < ranks

    def loaded_by(self, rank: int) -> list[int]:
        """The sequences that a rank has loaded, ascending."""
        own: list[int] = (self.table == rank).nonzero()[:, 0].tolist()
        return own


# ---- the exchanges -------------------------------------------------------------------------------


class Carrier:
    """Moves the fields of a step from the ranks that loaded the samples to those of the plan."""

    def __init__(
        self,
        plan: Plan,
        samples: Sequence[Sample],
        sources: Sources,
        transport: Transport,
        step: int,
    ) -> None:
        self._plan, self._samples, self._sources = plan, samples, sources
        self._transport, self._step = transport, step

    def splits(self, rules: Rules, announced: Announced, all_said: Announcements) -> Splits:
        """Return how each payload is split. ``all_said``: what all ranks have announced."""
        splits: Splits = {}
        if not any(isinstance(rule, Payload) for rule in rules.values()):
            return splits
        messages = all_said.by_rank()
        for name, rule in rules.items():
            if isinstance(rule, Payload) and rule.per_unit_of is None:
                units = self._by_sequence([said["units"].get(name, []) for said in messages])
                counts = [said["runs"].get(name, []) for said in messages]
                takers = None
                if rule.tokens is not None:
                    takers = self._takers(
                        name, self._by_sequence(counts), announced.runs.get(name, [])
                    )
                splits[name] = Split(self._plan, rule.split, units, takers)
        for name, rule in rules.items():
            if isinstance(rule, Payload) and rule.per_unit_of is not None:
                splits[name] = splits[rule.per_unit_of].of_units()
        return splits

    def _by_sequence(self, by_rank: Sequence[Sequence[Any]]) -> list[Any]:
        each = [iter(values) for values in by_rank]
        return [next(each[source]) for source in self._sources.ranks]

    def _takers(self, name: str, counts: Sequence[int], own: Sequence[Tensor]) -> Takers:
        """Bring the tables of tokens to the ranks of their sequences."""
        sources, rank = self._sources.ranks, self._transport.rank
        route = Split(self._plan, "whole", counts).from_sources(sources, rank)
        loaded = torch.cat([*own, torch.empty(0, 3, dtype=torch.int64)])
        what = f"tokens of {name}"
        (computed,) = self._exchange(route, [loaded.to(self._transport.device)], what)
        words = (runs.flatten().tolist() for runs in (loaded, computed))
        return Takers(sources, rank, counts, *words)

    def rows(self, fields: Sequence[Field]) -> Fields:
        """Return the fields with one row per token."""
        per_token = [field for field in fields if field.per_token]
        if not per_token:
            return {}
        plan, rank = self._plan, self._transport.rank
        count = plan.micro_batch_count
        route = Route.dispatch(plan, self._sources.ranks, rank, 0, count, reverse=False)
        return self._carry(per_token, route, None)

    def others(self, fields: Sequence[Field], splits: Splits) -> Fields:
        """Return the fields of sequences, and the payloads."""
        values: Fields = {}
        per_sequence = [field for field in fields if field.per_sequence]
        if per_sequence:
            one = Split(self._plan, "whole", [1] * len(self._plan.lengths))
            values |= self._split(per_sequence, one, PER_SEQUENCE)
        for field in fields:
            if field.name in splits:
                values |= self._split([field], splits[field.name], f"payload {field.name}")
        return values

    def _split(self, fields: Sequence[Field], split: Split, what: str) -> Fields:
        route = split.from_sources(self._sources.ranks, self._transport.rank)
        return self._carry(fields, route, what)

    def _carry(self, fields: Sequence[Field], route: Route, what: str | None) -> Fields:
        """Move fields in one exchange."""
        columns = [field.to_rows(self._samples, self._transport.device) for field in fields]
        moved = self._exchange(route, columns, what)
        sizes = route.parts
        return {
            # Copies, since a compiled model would tell views apart by where they start.
            field.name: [
                rows_may_vary(part.clone()) for part in torch.split(field.from_rows(rows), sizes)
            ]
            for field, rows in zip(fields, moved, strict=True)
        }

    def _exchange(self, route: Route, columns: Sequence[Tensor], what: str | None) -> list[Tensor]:
        wire = ops.pack(columns, route.pack, route.sent_rows)
        received = wire.new_empty(route.received_rows, wire.shape[1])
        checksum = f"{self._plan.checksum:016x}"
        stamp = Stamp(CallKind("hcp.dispatch", plan=checksum, step=self._step, what=what))
        self._transport.start(wire, route.sends, received, route.receives, stamp=stamp).wait()
        widths = [column.shape[1] for column in columns]
        return ops.unpack(received, route.arrange, widths, route.output_rows)
