"""The calls of a handler that move rows between ranks.

T rows on this rank, S rows of the sequences that it loaded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hcp._validate import plain
from hcp.exchange.agreement import refuse_transforms
from hcp.exchange.calls import Calls
from hcp.exchange.move import check_rows, copy_rows_of, move_rows
from hcp.exchange.routes import Routes
from hcp.exchange.tables import Route
from hcp.exchange.transport import Transport


class RowCalls:
    """Makes these calls: rows are checked, and compared with those of the ranks that make the same
    call. :class:`hcp.ContextParallelHandler` has a method for each, which says what it does."""

    def __init__(self, transport: Transport, calls: Calls, routes: Routes) -> None:
        self._transport, self._calls, self._routes = transport, calls, routes

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

    def roll(self, x: Tensor, shifts: int, dims: int) -> Tensor:
        """Shift rows along their documents. ``dims``: the dimension that holds the T rows."""

        def rolled(number: int) -> Tensor:
            shift = plain(shifts)
            if type(shift) is not int:
                raise ValueError(f"shifts is {shift!r}, expected an integer")
            route, rows = self._routes.roll(shift), x.movedim(dims, 0)
            self._check("roll_tensor", rows, route)
            stamp = self._calls.agreed_stamp("roll_tensor", number, rows, shifts=shift)
            if self._routes.has_branches:  # a row goes to several places
                return copy_rows_of(self._transport, route, rows, stamp).movedim(0, dims)
            back = self._routes.roll(-shift)
            return move_rows(self._transport, rows, route, back, stamp).movedim(0, dims)

        return self._calls.make("roll_tensor", rolled)

    def to_tokens(self, x: Tensor, payload: str, route_of: Callable[[], Route]) -> Tensor:
        """(n, ...) to (m, ...): results of a payload's rows. ``route_of``: gives their route."""

        def copied(number: int) -> Tensor:
            route = route_of()
            self._check("to_tokens", x, route)
            stamp = self._calls.agreed_stamp("to_tokens", number, x, payload=payload)
            return copy_rows_of(self._transport, route, x, stamp)

        return self._calls.make("to_tokens", copied)

    def _check(
        self, operation: str, x: Tensor, route: Route, dtype: torch.dtype | None = None
    ) -> None:
        check_rows(x, route.source_rows, self._transport.device, dtype)
        refuse_transforms(operation, x)
