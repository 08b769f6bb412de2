"""Scan types: how a recurrent layer's sequences get past the borders of ranks.

"pass_states": each rank scans its own rows, and states travel. "sequence_to_head": each rank scans
whole sequences of some heads, and rows travel. "auto": what costs less. The core prices both by
what travels, by what a layer computes more where states do, and by the plan's prices of links, in
integers, so that every rank of a group decides alike.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal, NamedTuple

from hcp._validate import expect_choice, expect_size
from hcp._words import ScanType
from hcp.exchange.sizes import ROUND_BYTES

if TYPE_CHECKING:
    from hcp.exchange.layout import Layout

PASS_STATES: Literal["pass_states"] = "pass_states"
SEQUENCE_TO_HEAD: Literal["sequence_to_head"] = "sequence_to_head"
AUTO: Literal["auto"] = "auto"
SCAN_TYPES: tuple[ScanType, ...] = (PASS_STATES, SEQUENCE_TO_HEAD, AUTO)

_log = logging.getLogger("hcp")


class ScanSizes(NamedTuple):
    """What a recurrent layer would exchange in its forward, and compute more."""

    heads: int
    row_bytes: int
    """Bytes of one row of all heads, to whole sequences and back."""
    state_bytes: int
    """Bytes of the map of one span of all heads: its state, and its decay or transition."""
    exchanges: int = 2
    """Calls of sequence_to_head and head_to_sequence."""
    row_work: int = 0
    """What one row of all heads computes more where states travel, in bytes that a link carries in
    the same time."""


class ScanChoice(NamedTuple):
    """The scan type that was asked for, and the one that a group of ranks uses."""

    asked: ScanType
    used: ScanType
    why: str


def check_scan_type(scan_type: str) -> None:
    expect_choice("scan_type", scan_type, SCAN_TYPES)


def choose(layout: Layout, asked: ScanType, sizes: ScanSizes) -> ScanChoice:
    """Choose what this rank's group uses."""
    heads, degree = expect_size("heads", sizes.heads), layout.degree
    if asked == SEQUENCE_TO_HEAD and degree > heads:
        raise ValueError(
            f"scan_type is {asked!r}, the micro-batch has degree {degree} and the layer {heads} "
            f"heads on each tensor-parallel rank, expected a degree <= {heads}: plan with "
            f"max_degree={heads}, or scan_type={PASS_STATES!r}"
        )
    if asked != AUTO:
        return ScanChoice(asked, asked, "as asked")
    if degree <= 1:
        return ScanChoice(asked, SEQUENCE_TO_HEAD, f"degree {degree}: nothing travels")
    if heads % degree:
        return _said(asked, PASS_STATES, f"{degree} ranks cannot share {heads} heads evenly")
    states, rows = prices(layout, sizes)
    used: ScanType = PASS_STATES if states <= rows else SEQUENCE_TO_HEAD
    costs = f"{PASS_STATES}: {states}, {SEQUENCE_TO_HEAD}: {rows}"
    return _said(asked, used, f"least cost, in bytes of a link, of {costs}")


def prices(layout: Layout, sizes: ScanSizes) -> tuple[int, int]:
    """Price "pass_states" and "sequence_to_head" as `auto` does, in bytes of a link."""
    return layout.plan.core.scan_price(
        *(layout.micro_batch, layout.rank, sizes.row_bytes, sizes.state_bytes, sizes.row_work),
        *(ROUND_BYTES, sizes.exchanges),
    )


def _said(asked: ScanType, used: ScanType, why: str) -> ScanChoice:
    _log_once(used, why)
    return ScanChoice(asked, used, why)


_logged: set[ScanType] = set()


def _log_once(used: ScanType, why: str) -> None:
    """Log the first choice of each type in a process."""
    if used not in _logged:
        _logged.add(used)
        _log.info("scan_type 'auto' uses %s in a group: %s", used, why)
