"""Fit the prices of a cost model to measured micro-batches, by non-negative least squares.

A measured time is taken as a sum of amounts times prices. The core says the amounts: it is asked
for the time at one price alone. No price may be negative: it would mean nothing and break the
planner.
"""

# P points, F prices.

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hcp.planning.cost import PRICES, CostModel

LEAST_SHARE = 0.01
"""The least share of the largest micro-batch's time that its rows must take. Below it, prices
mean nothing."""


@dataclass(frozen=True)
class Point:
    """One group's micro-batch and its measured time."""

    lengths: tuple[int, ...]
    degree: int
    far: bool
    """Whether the group spans nodes."""
    seconds: float


@dataclass(frozen=True)
class Fit:
    prices: dict[str, float]
    """Seconds per unit of each amount, by the names of CostModel's fields."""
    overlap: int
    """1: the exchange overlaps with attention."""

    @property
    def cost(self) -> CostModel:
        seconds: dict[str, Any] = self.prices
        return CostModel.from_seconds(**seconds, overlap=self.overlap)

    def predict(self, point: Point) -> float:
        """Return the seconds of a point by the integers that a plan will see."""
        cost = self.cost
        assert cost.unit is not None
        node = point.degree - 1 if point.far else 0
        times = (cost.time(length, point.degree, node) for length in point.lengths)
        return cost.launched(sum(times)) * cost.unit

    def errors(self, points: Sequence[Point]) -> list[float]:
        """Return |predicted / measured - 1| of each point, ascending."""
        return sorted(abs(self.predict(p) / p.seconds - 1) for p in points)


EXCHANGES = {
    "p2p": ("exchange",),
    "all_gather": ("exchange",),
    "a2a": ("all_to_all",),
    "a2a+p2p": ("exchange", "all_to_all"),
}
"""The prices of exchange, by comm type."""


def fit(points: Sequence[Point], comm_type: str = "p2p") -> Fit:
    """Find the prices with the least sum of squared relative errors.

    A ring's exchange may overlap with attention: the better of both fits is returned. Raises
    ValueError if the times do not grow with the rows: no plan could be made of them.
    """
    exchanges = EXCHANGES[comm_type]
    candidates = [_fit_additive(points, exchanges)]
    if max(_share_of_rows(point, candidates[0].prices) for point in points) < LEAST_SHARE:
        rows = max(sum(point.lengths) // point.degree for point in points)
        raise ValueError(
            f"the times of {len(points)} micro-batches with up to {rows} rows a rank do not grow "
            "with their rows: measure more rows (--max-tokens-per-rank), a larger model, more "
            "--repeats, or while the machine does nothing else"
        )
    if exchanges == ("exchange",) and candidates[0].prices["pair"] > 0:
        candidates.append(_fit_overlapped(points, candidates[0]))
    return min(candidates, key=lambda f: sum(error**2 for error in f.errors(points)))


def with_host(found: Fit, seconds: float) -> Fit:
    """Return the fit with the time of a micro-batch of one row on one rank: the host's, since its
    kernels are short. The other prices stay those of full micro-batches."""
    return replace(found, prices=found.prices | {"host": seconds})


def _share_of_rows(point: Point, prices: dict[str, float]) -> float:
    """The share of a point's time that its rows and their attention take."""
    amounts = _amounts(point, ())
    return sum(prices[name] * amounts[name] for name in ("pair", "token")) / point.seconds


def _fit_additive(points: Sequence[Point], exchanges: Sequence[str]) -> Fit:
    rows = [_amounts(point, exchanges) for point in points]
    return Fit(_solve(rows, points), overlap=0)


def _amounts(point: Point, exchanges: Sequence[str]) -> dict[str, float]:
    """The amount of each price that a point pays."""
    moving = [name + ("_far" if point.far else "") for name in exchanges if point.degree > 1]
    return {"launch": 1.0} | {
        name: sum(_amount(name, length, point.degree, point.far) for length in point.lengths)
        for name in ("pair", "token", "step", *moving)
    }


_PRICE = 2**16
"""Of an amount, where its time is asked for: the core's rounding is then 2^-16 of an amount."""


@functools.cache
def _amount(name: str, length: int, degree: int, far: bool) -> float:
    """The amount of a price that a sequence pays: what the price adds to the core's time."""
    with_it, without = (_time(length, degree, far, **{name: price}) for price in (_PRICE, 0))
    return (with_it - without) / _PRICE


@functools.cache
def _hidden(length: int, degree: int, far: bool) -> float:
    """The pairs whose time hides the exchange of a sequence, where it is the longer of both."""
    name, much = "exchange_far" if far else "exchange", _PRICE * length
    paid = _PRICE * _amount("pair", length, degree, far) + much * _amount(name, length, degree, far)
    exposed = _time(length, degree, far, overlap=1, **{"pair": _PRICE, name: much})
    return (paid - (exposed - _time(length, degree, far))) / _PRICE


def _time(length: int, degree: int, far: bool, **prices: int) -> int:
    """The core's time at these prices; a token costs 1 more, since it may not be free."""
    none: dict[str, Any] = dict.fromkeys(PRICES, 0)
    cost = CostModel(**none | prices | {"token": prices.get("token", 0) + 1})
    return cost.time(length, degree, degree - 1 if far else 0)


def _fit_overlapped(points: Sequence[Point], start: Fit) -> Fit:
    """Fit the prices of :meth:`hcp.CostModel.time` with overlap.

    Only the part of a sequence's exchange that its attention does not hide counts. The prices
    decide which sequences have such a part, so both are found in turns."""
    found = [Fit(start.prices, overlap=1)]
    for _ in range(20):
        rows = [_exposed_amounts(point, found[-1].prices) for point in points]
        found.append(Fit(_solve(rows, points), overlap=1))
        if found[-1].prices["pair"] == 0 or found[-1] == found[-2]:
            break
    usable = [f for f in found if f.prices["pair"] > 0]
    return min(usable, key=lambda f: sum(error**2 for error in f.errors(points)))


def _exposed_amounts(point: Point, prices: dict[str, float]) -> dict[str, float]:
    amounts = _amounts(point, ("exchange",))
    d, name = point.degree, "exchange_far" if point.far else "exchange"
    if d == 1:
        return amounts
    amounts[name] = 0.0
    for length in point.lengths:
        moved, hidden = _amount(name, length, d, point.far), _hidden(length, d, point.far)
        if prices.get(name, 0.0) * moved > prices["pair"] * hidden:
            amounts[name] += moved
            amounts["pair"] -= hidden
    return amounts


def _solve(rows: Sequence[dict[str, float]], points: Sequence[Point]) -> dict[str, float]:
    names = sorted({name for row in rows for name in row})
    matrix = torch.tensor([[row.get(n, 0.0) for n in names] for row in rows], dtype=torch.float64)
    seconds = torch.tensor([point.seconds for point in points], dtype=torch.float64)
    solved = non_negative_least_squares(
        matrix / seconds.unsqueeze(1), torch.ones_like(seconds)
    ).tolist()
    prices = dict(zip(names, solved, strict=True))
    # Between nodes never less than inside one, as the core has it.
    for far in [name for name in names if name.endswith("_far")]:
        prices[far] = max(prices[far], prices.get(far.removesuffix("_far"), 0.0))
    return {"pair": 0.0, "token": 0.0, "launch": 0.0} | prices


def non_negative_least_squares(matrix: Tensor, target: Tensor) -> Tensor:
    """Find x >= 0, (F,), with the least |matrix x - target|, for matrix (P, F) and target (P,).

    Exact, for a few columns: over the columns where x is not 0 it is the unconstrained solution. So
    every choice of columns is tried, and the best solution without a negative entry is kept.
    """
    scale = matrix.abs().amax(0).clamp_min(torch.finfo(matrix.dtype).tiny)
    scaled = matrix / scale
    best, solution = float(target.square().sum()), torch.zeros_like(scale)
    columns = range(matrix.shape[1])
    for size in range(1, len(columns) + 1):
        for chosen in map(list, itertools.combinations(columns, size)):
            x = torch.linalg.lstsq(scaled[:, chosen], target, driver="gelsd").solution
            error = float((scaled[:, chosen] @ x - target).square().sum())
            if error < best and bool((x >= 0).all()):
                best = error
                solution = torch.zeros_like(scale)
                solution[chosen] = x
    return solution / scale
