"""The positions that a model's rotary embedding was trained for, or is scaled to."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from hcp.step.handler import ContextParallelHandler

_log = logging.getLogger("hcp")


def trained_positions(config: Any) -> int | None:
    """Return how many positions a configuration names, with what its `rope_parameters` scale them
    to. None: it names none."""
    text = config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    if not isinstance(most, int):
        return None
    scaled = (
        int(parameters["factor"] * parameters["original_max_position_embeddings"])
        for parameters in each_rope(getattr(text, "rope_parameters", None))
        if parameters.get("factor") and parameters.get("original_max_position_embeddings")
    )
    return max(most, *scaled, 0)


def each_rope(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """Yield each set of `rope_parameters`: some models have one for each kind of layer."""
    if isinstance(parameters, dict):
        yield parameters
        for value in parameters.values():
            yield from each_rope(value)


def warn_of_positions(config: Any, cp: ContextParallelHandler) -> None:
    """Warn, once, of a sequence that has more positions than the model was trained for. Under a
    mask of the plan, positions may start again within a sequence, and nothing is said."""
    longest = max(cp.layout.lengths, default=0)
    most = None if cp.plan.masks else trained_positions(config)
    if most is not None and longest > most and most not in _told:
        _told.add(most)
        _log.warning(
            "hcp: a sequence has %s tokens, and %s names %s positions (max_position_embeddings, or "
            "what rope_parameters scale them to): the model was not trained for those beyond. "
            "Shorten the sequences, or scale the rotary embedding, such as by rope_parameters of "
            "{'rope_type': 'yarn', 'factor': %s, 'original_max_position_embeddings': %s}",
            *(f"{longest:,}", type(config).__name__, f"{most:,}", -(-longest // most), most),
        )


_told: set[int] = set()
"""The limits that a warning has named in this process."""
