"""The calls of a handler that move rows between ranks, and those that sum over ranks.

T rows on this rank, S rows of the sequences that it loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hcp._validate import expect_items, plain
from hcp.exchange.agreement import Moves, Stamp, refuse_transforms, rows_like
from hcp.exchange.calls import Calls
from hcp.exchange.layout import Layout, span_rows
from hcp.exchange.move import (
    AllPairs,
    check_rows,
    copy_rows_of,
    move_rows,
    sum_by_sequence,
    sum_over,
)
from hcp.exchange.routes import Routes
from hcp.exchange.states import Maps, Parts, Rule, StatePasses, linear, pass_states
from hcp.exchange.tables import Route
from hcp.exchange.transport import Transport
from hcp.exchange.units import guarded


class RowCalls:
    """Makes these calls: rows are checked, and compared with those of the ranks that make the same
    call. :class:`hcp.ContextParallelHandler` has a method for each, which says what it does."""

    def __init__(self, layout: Layout, transport: Transport, calls: Calls, routes: Routes) -> None:
        self._layout, self._transport = layout, transport
        self._calls, self._routes = calls, routes
        self._pairs = AllPairs(calls.group, transport.rank)

    @property
    def device(self) -> torch.device:
        """The device of the domain's rows."""
        return self._transport.device

    def dispatch(self, x: Tensor, dtype: torch.dtype | None) -> Tensor:
        """(S, ...) to (T, ...)."""
        return self._dispatched("dispatch", x, dtype, reverse=False)

    def combine(self, x: Tensor, dtype: torch.dtype | None) -> Tensor:
        """(T, ...) to (S, ...)."""
        return self._dispatched("combine", x, dtype, reverse=True)

    def _dispatched(
        self, operation: str, x: Tensor, dtype: torch.dtype | None, *, reverse: bool
    ) -> Tensor:
        def moved(number: int) -> Tensor:
            route = self._routes.dispatch(reverse=reverse)
            back = self._routes.dispatch(reverse=not reverse)
            self._check(operation, x, route, dtype)
            stamp = self._calls.domain_stamp(operation, number, x, dtype or x.dtype)
            self._calls.agree(route, stamp)
            return move_rows(self._transport, x, route, back, stamp, dtype)

        return self._calls.make(operation, moved, everywhere=True)

    def combine_by_sequence(self, x: Tensor) -> Tensor:
        """(sequences, ...) to (those loaded here, ...)."""

        def combined(number: int) -> Tensor:
            path, sequences = self._routes.by_sequence(), len(self._layout.sequences)
            if x.dim() == 0 or x.shape[0] != sequences:
                raise ValueError(f"x has shape {tuple(x.shape)}, expected {sequences} sequences")
            check_rows(x, sequences, self._transport.device)
            refuse_transforms("combine_by_sequence", x)
            stamp = self._calls.domain_stamp("combine_by_sequence", number, x, x.dtype)
            return copy_rows_of(self._transport, path, x, self._calls.agree(path, stamp))

        return self._calls.make("combine_by_sequence", combined, everywhere=True)

    def roll(self, x: Tensor, shifts: int, dims: int) -> Tensor:
        """Shift rows along their documents. ``dims``: the dimension that holds the T rows."""

        def rolled(number: int) -> Tensor:
            shift = plain(shifts)
            if type(shift) is not int:
                raise ValueError(f"shifts is {shift!r}, expected an integer")
            route, back = self._routes.roll(shift), self._routes.roll(-shift)
            rows = x.movedim(dims, 0)
            stamp = self._agree("roll_tensor", number, rows, route, self._pairs, shifts=shift)
            return move_rows(self._transport, rows, route, back, stamp).movedim(0, dims)

        return self._calls.make("roll_tensor", rolled)

    def halo(self, x: Tensor, before: int) -> Tensor:
        """(T, ...) to (T + before * spans, ...)."""

        def copied(number: int) -> Tensor:
            route = self._routes.halo(before)
            stamp = self._agree("halo", number, x, route, self._pairs, before=plain(before))
            return copy_rows_of(self._transport, route, x, stamp)

        return self._calls.make("halo", copied)

    def pass_states(
        self, states: Tensor, decay: Tensor | None, transition: Tensor | None
    ) -> Tensor:
        """(N, ...) to (N, ...), N spans."""

        def passed(number: int) -> Tensor:
            maps = self._linear_maps(states, decay, transition)
            kind = "decay" if transition is None else "transition"
            given = {kind: rows_like(maps.parts[1])}
            stamp = self._calls.stamp("pass_states", number, maps.parts[0], states.dtype, **given)
            (entering,) = self._passed("pass_states", maps, stamp)
            return entering.to(states.dtype)

        return self._calls.make("pass_states", passed)

    def pass_maps(
        self,
        maps: Sequence[Tensor],
        combine: Callable[[Parts, Parts], Parts],
        apply: Callable[[Parts, Parts], Parts],
        initial: Sequence[Tensor],
    ) -> Parts:
        """N maps (N, ...) to N states."""

        def passed(number: int) -> Parts:
            parts, first = self._expect_maps(maps), _expect_initial(initial)
            of_two, of_state = guarded("combine", combine), guarded("apply", apply)
            dtype = functools.reduce(torch.promote_types, [x.dtype for x in (*parts, *first)])
            wide = torch.promote_types(dtype, torch.float32)
            start = tuple(x.to(wide).unsqueeze(0) for x in first)

            def started(given: Parts) -> Parts:
                count = len(given[0])
                found = of_state(given, tuple(x.expand(count, *x.shape[1:]) for x in start))
                return tuple(found)

            rule = Rule(of_two, of_state, started, start)
            made = Maps(tuple(x.to(wide) for x in parts), rule)
            others = ", ".join(str(rows_like(part)) for part in (*made.parts[1:], *start))
            stamp = self._calls.stamp("pass_maps", number, made.parts[0], wide, others=others)
            return self._passed("pass_maps", made, stamp)

        return self._calls.make("pass_maps", passed)

    def state_cost(self, row_bytes: int) -> int:
        """What passing maps of ``row_bytes`` costs, as ``StatePasses.choose`` counts."""
        return self._passes.cost(row_bytes)

    def _passed(self, operation: str, maps: Maps, stamp: Stamp) -> Parts:
        self._layout.plan.core.expect_no_branches(f"cp.{operation}")
        refuse_transforms(operation, *maps.parts)
        self._calls.agree(self._pairs, stamp)
        with torch.autocast(self._transport.device.type, enabled=False):  # it would round maps
            return self._entering(maps, stamp)

    def _entering(self, maps: Maps, stamp: Stamp) -> Parts:
        if self._layout.degree <= 1:  # no map is used, of which backward asks for gradients
            touched, spans = sum(x[:0].sum() for x in maps.parts), len(maps.parts[0])
            return tuple(x.expand(spans, *x.shape[1:]) + touched for x in maps.rule.initial)
        return pass_states(self._transport, self._passes, maps, stamp)

    @functools.cached_property
    def _passes(self) -> StatePasses:
        return StatePasses(self._layout)

    def _expect_maps(self, maps: Sequence[Tensor]) -> Parts:
        expect_items("maps", maps, "tensors")
        if not maps:
            raise ValueError("maps is empty, expected one tensor or more")
        spans = len(span_rows(self._layout))
        for i, part in enumerate(maps):
            if part.dim() < 1 or part.shape[0] != spans:
                raise ValueError(
                    f"maps[{i}] has shape {tuple(part.shape)}, expected ({spans}, ...): a part for "
                    "each of cp.span_cu_seqlens's spans"
                )
            self._expect_floats(f"maps[{i}]", part)
        return tuple(maps)

    def _expect_floats(self, name: str, x: Tensor) -> None:
        if not (x.is_floating_point() or x.is_complex()):
            raise ValueError(f"{name} is {x.dtype}, expected floats or complex numbers")
        if x.device.type != self._transport.device.type:
            raise ValueError(f"{name} is on {x.device}, expected {self._transport.device}")

    def _linear_maps(self, states: Tensor, decay: Tensor | None, transition: Tensor | None) -> Maps:
        """Check states and what multiplies them. Both are computed in float32 or wider."""
        spans = len(span_rows(self._layout))
        if states.dim() < 2 or states.shape[0] != spans:
            raise ValueError(
                f"states has shape {tuple(states.shape)}, expected ({spans}, ...): a state for "
                "each of cp.span_cu_seqlens's spans"
            )
        if (decay is None) == (transition is None):
            given = "neither" if decay is None else "both"
            raise ValueError(f"{given} of decay and transition given, expected one of them")
        factor = (
            _expect_decay(states, decay)
            if transition is None
            else (_expect_transition(states, transition))
        )
        for name, x in (("states", states), ("decay or transition", factor)):
            self._expect_floats(name, x)
        if factor.is_complex() and not states.is_complex():
            raise ValueError(
                f"states is {states.dtype} and what multiplies it is {factor.dtype}, expected "
                f"complex states too, since the result has their dtype: states.to({factor.dtype})"
            )
        wide = torch.promote_types(torch.promote_types(states.dtype, factor.dtype), torch.float32)
        zeros = torch.zeros(1, *states.shape[1:], dtype=wide, device=states.device)
        rule = linear(torch.mul if transition is None else torch.matmul, zeros)
        return Maps((states.to(wide), factor.to(wide)), rule)

    def to_tokens(self, x: Tensor, payload: str, route_of: Callable[[], Route]) -> Tensor:
        """(n, ...) to (m, ...): results of a payload's rows. ``route_of``: gives their route."""

        def copied(number: int) -> Tensor:
            route = route_of()
            check_rows(x, route.source_rows, self._transport.device)
            refuse_transforms("to_tokens", x)
            stamp = self._calls.stamp("to_tokens", number, x, x.dtype, payload=payload)
            return copy_rows_of(self._transport, route, x, self._calls.agree(self._pairs, stamp))

        return self._calls.make("to_tokens", copied)

    def _agree(
        self,
        operation: str,
        number: int,
        x: Tensor,
        route: Route,
        callers: Moves,
        **options: int | str,
    ) -> Stamp:
        """Check the rows of a call, and compare it with the ranks that make the same."""
        self._check(operation, x, route)
        stamp = self._calls.stamp(operation, number, x, x.dtype, **options)
        return self._calls.agree(callers, stamp)

    def _check(
        self, operation: str, x: Tensor, route: Route, dtype: torch.dtype | None = None
    ) -> None:
        check_rows(x, route.source_rows, self._transport.device, dtype)
        refuse_transforms(operation, x)

    def sum_over_group(self, x: Tensor) -> Tensor:
        """Sum x over the ranks that compute these sequences."""

        def summed(number: int) -> Tensor:
            if not x.is_floating_point() and x.dtype != torch.int64:
                raise ValueError(f"x is {x.dtype}, expected floats or int64: x.to(torch.int64)")
            refuse_transforms("sum_over_group", x)
            return self._sum("sum_over_group", x, number)

        return self._calls.make("sum_over_group", summed)

    def sum_by_sequence(self, x: Tensor, bounds: Tensor) -> Tensor:
        """(T, ...) to (sequences, ...). ``bounds``: local rows of each sequence, summed."""

        def summed(number: int) -> Tensor:
            rows = self._layout.rows
            if x.dim() == 0 or x.shape[0] != rows:
                raise ValueError(f"x has shape {tuple(x.shape)}, expected {rows} rows")
            if not x.is_floating_point():
                raise ValueError(f"x is {x.dtype}, expected floats: counts as float64 stay exact")
            refuse_transforms("sum_by_sequence", x)
            own = x[: rows - self._layout.padding]
            return self._sum("sum_by_sequence", sum_by_sequence(own, bounds), number)

        return self._calls.make("sum_by_sequence", summed)

    def _sum(self, operation: str, x: Tensor, number: int) -> Tensor:
        stamp = self._calls.stamp(operation, number, x.unsqueeze(0), x.dtype)
        return sum_over(self._transport, self._pairs, x, stamp)


def _expect_initial(initial: Sequence[Tensor]) -> Parts:
    expect_items("initial", initial, "tensors")
    for i, part in enumerate(initial):
        if not (part.is_floating_point() or part.is_complex()):
            raise ValueError(f"initial[{i}] is {part.dtype}, expected floats or complex numbers")
    if not initial:
        raise ValueError("initial is empty, expected a state: one tensor or more")
    return tuple(initial)


def _expect_decay(states: Tensor, decay: Tensor | None) -> Tensor:
    assert decay is not None
    fits = decay.dim() == states.dim() and decay.shape[0] == states.shape[0]
    pairs = zip(decay.shape[1:], states.shape[1:], strict=False)
    if not fits or any(own not in (1, size) for own, size in pairs):
        raise ValueError(
            f"decay has shape {tuple(decay.shape)}, expected that of states, "
            f"{tuple(states.shape)}, or 1 in place of sizes after the first"
        )
    return decay


def _expect_transition(states: Tensor, transition: Tensor) -> Tensor:
    expected = *states.shape[:-1], states.shape[-2]
    if states.dim() < 3 or tuple(transition.shape) != expected:
        raise ValueError(
            f"transition has shape {tuple(transition.shape)} for states {tuple(states.shape)}, "
            "expected (spans, ..., K, K) for (spans, ..., K, V)"
        )
    return transition
