"""The rule for rebinding Transformer Engine's attention. Transformer Engine is not imported."""

from __future__ import annotations

from typing import Any

import torch

from hcp.groups.process_groups import ProcessGroups
from hcp.rebinding.packages import PackageRules
from hcp.rebinding.rules import Rule
from hcp.rebinding.safe_access import has, is_a

_METHOD = "set_context_parallel_group"


def _is_attention(holder: Any) -> bool:
    """Whether a module has the method and the attributes of Transformer Engine's attention."""
    return is_a(holder, torch.nn.Module) and has(holder, _METHOD) and has(holder, "cp_global_ranks")


def _arguments(attention: Any, pgs: ProcessGroups) -> tuple[Any, ...]:
    """Return the method's arguments: cp_group, cp_global_ranks, cp_stream, cp_comm_type."""
    comm_type = _comm_type_of(attention)
    group: Any = pgs.cp
    if comm_type == "a2a+p2p":
        levels = pgs.hierarchy
        if len(levels) != 2:
            raise ValueError(
                "cp_comm_type 'a2a+p2p' takes two levels of CP groups, and the layout has "
                f"{len(levels)}: give build_process_groups or with_context_parallel "
                "hierarchical=[a2a, p2p]"
            )
        group = list(levels)
    stream = getattr(attention, "cp_stream", None)
    if stream is None and torch.cuda.is_available():
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return group, pgs.ranks("cp"), stream, comm_type


def _heads_that_do_not_divide(attention: Any, pgs: ProcessGroups) -> str | None:
    """Refuse numbers of heads that Transformer Engine refuses only when it computes attention."""
    comm_type = _comm_type_of(attention)
    if pgs.size("cp") == 1 or comm_type not in ("a2a", "a2a+p2p"):
        return None
    levels = pgs.hierarchy
    inner = levels[0].size() if comm_type == "a2a+p2p" and levels else pgs.size("cp")
    tp = pgs.size("tp") if "tp" in pgs.roles else 1
    for name in ("num_attention_heads", "num_gqa_groups"):
        heads = getattr(attention, name, 0)
        if heads // tp % inner:
            return (
                f"it exchanges rows for heads among {inner} ranks ({comm_type}), and has {name} "
                f"{heads} over tp = {tp}, expected a multiple of {inner} on each"
            )
    return None


def _comm_type_of(attention: Any) -> str:
    """Return the comm type of one attention layer.

    Megatron tells Transformer Engine the configured type only if it builds with CP > 1. A layer
    that was built without CP has Transformer Engine's default, whatever the configuration says.
    """
    configured = getattr(getattr(attention, "config", None), "cp_comm_type", None)
    if isinstance(configured, (list, tuple)):
        layer = getattr(attention, "layer_number", 1)
        configured = configured[layer - 1] if layer - 1 < len(configured) else None
    return configured or getattr(attention, "cp_comm_type", None) or "p2p"


RULES = PackageRules(
    shapes=(
        (
            _is_attention,
            Rule(
                method=_METHOD,
                arguments=_arguments,
                held=("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type"),
                refuse=_heads_that_do_not_divide,
            ),
        ),
    ),
)
