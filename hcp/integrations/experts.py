"""Find experts whose results depend on the rows that a rank holds, as far as a model says so."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from torch import nn

_log = logging.getLogger("hcp")

_LOSS = re.compile(
    r"(^|_)(aux(iliary)?|z|balanc\w*)_loss(_coef|_coeff|_coefficient|_weight|_alpha)?$"
)

_CAPACITY = re.compile(r"capacity_factor|expert_capacity|moe\w*_capacity")

_CHECKED: WeakSet[nn.Module] = WeakSet()
"""Models whose experts were checked."""


def check_experts(model: nn.Module) -> None:
    """Check the experts of a model, which may be wrapped, once.

    Raises ValueError for experts that drop tokens by the rows of a rank, hence by the plan. Warns
    of losses that are no mean over tokens."""
    if model in _CHECKED:
        return
    losses: dict[str, None] = {}
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            kind = type(holder).__name__
            for name, value in capacities(holder):
                raise ValueError(
                    f"{kind}.{name} is {value}, expected experts that take every token: which ones "
                    "they drop depends on the rows of a rank, and so on the plan. Set it to None, "
                    f"or {kind}.drop_tokens to False, as the experts read it"
                )
            losses |= {f"{kind}.{name} is {value}": None for name, value in _losses(holder)}
    for place in losses:
        _log.warning(
            "hcp: %s, so results depend on the plan: no mean over the tokens of the batch", place
        )
    _CHECKED.add(model)


def capacities(holder: object) -> Iterator[tuple[str, float]]:
    """Yield the limits of tokens that an expert takes, as (name, value), among the attributes of a
    module or of its configuration. There are none if it says that it drops no token."""
    if getattr(holder, "drop_tokens", True) is False:
        return
    for name, value in getattr(holder, "__dict__", {}).items():
        if _CAPACITY.search(name) and _positive(value):
            yield name, value


def _losses(holder: object) -> Iterator[tuple[str, Any]]:
    """Yield the coefficients of losses that are computed. Transformers' configurations have some
    that are not used unless they ask for the router's logits."""
    asked = getattr(holder, "output_router_logits", None)
    if asked:
        yield "output_router_logits", asked
    if asked is None:
        for name, value in getattr(holder, "__dict__", {}).items():
            if _LOSS.search(name) and _positive(value):
                yield name, value


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
