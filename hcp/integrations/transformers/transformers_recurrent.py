"""Recurrent layers of Transformers' models: short convolutions, Mamba-2 and the gated delta rule.

A layer calls these as functions of its module, with the keyword arguments of its model, `cp=` among
them. hcp replaces the functions, once in a process. Without `cp=` they compute what they did.

T rows, H heads, P and V head sizes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hcp.attention.scan_types import SEQUENCE_TO_HEAD
from hcp.exchange.layout import stretch_rows
from hcp.integrations.recurrent import convolve, delta_rule, mamba_work, scan_mamba
from hcp.step.handler import ContextParallelHandler

MODEL_TYPES = frozenset(
    {
        "bailing_hybrid",
        "bamba",
        "falcon_h1",
        "granitemoehybrid",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "mamba2",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "zamba2",
    }
)
"""Models whose recurrent layers were compared with themselves under hcp."""

CARRIED = frozenset({"mamba2"})
"""Those that do not hand keyword arguments on to their layers."""

LAYERS = frozenset(
    {"attention", "conv", "hybrid", "linear_attention", "mamba", "mlp", "moe", "sparse"}
)
"""Kinds of layers of these models, by their names in configurations, beside attention."""

Function = Callable[..., Any]


def is_recurrent(config: Any) -> bool:
    """Whether a configuration is of a model whose recurrent layers hcp knows."""
    return getattr(config, "model_type", None) in MODEL_TYPES


def hand_states_on(model: nn.Module) -> None:
    """Replace the functions of the modules that define a model's layers."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", None) in CARRIED:
        _carry(model)
    for layer in model.modules():
        names = getattr(inspect.unwrap(type(layer).forward), "__globals__", {})
        for name in names.keys() & _REPLACED.keys():
            if not hasattr(names[name], _MADE_BY_HCP):
                names[name] = _replacing(names[name], _REPLACED[name])


_MADE_BY_HCP = "_hcp_passes_states"


def _replacing(function: Function, replaced: Function) -> Function:
    """The function, but for calls with `cp=`."""

    @functools.wraps(function)
    def called(*given: Any, cp: ContextParallelHandler | None = None, **options: Any) -> Any:
        if cp is None:
            return function(*given, **options)
        return replaced(function, cp, *given, **options)

    vars(called)[_MADE_BY_HCP] = True
    return called


class _Carried:
    """Hooks of a model that leaves `cp=` out when it calls its layers' parent: the first takes the
    handler of a call, the second adds it."""

    def __init__(self) -> None:
        self._cp: ContextParallelHandler | None = None

    def take(self, model: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._cp = options.get("cp")

    def add(
        self, model: nn.Module, given: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        cp, self._cp = self._cp, None
        return given, options | {"cp": cp}


def _carry(model: nn.Module) -> None:
    """Let `cp=` arrive at the layers of a model of CARRIED, once."""
    hooks = model._forward_pre_hooks.values()
    if any(isinstance(getattr(hook, "__self__", None), _Carried) for hook in hooks):
        return
    carried = _Carried()
    model.register_forward_pre_hook(carried.take, with_kwargs=True)
    parent: Any = model.base_model
    parent.register_forward_pre_hook(carried.add, with_kwargs=True)


# ---- the functions -------------------------------------------------------------------------------
#
# A rank without rows has one that stands in: what these give for it is zeros.


def _convolved(
    function: Function,
    cp: ContextParallelHandler,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """(1, channels, T) to the same, by a causal convolution of taps `weight` (channels, taps)."""

    def convolution(rows: Tensor) -> Tensor:
        given = rows.t().contiguous().unsqueeze(0)
        out: Tensor = function(given, weight, bias, **options)[0].t()
        return out

    found = convolve(cp, hidden_states[0].t()[: cp.rows], weight.shape[-1], convolution)
    return _standing_in(found, hidden_states.shape[2]).transpose(1, 2)


def _scanned(
    function: Function,
    cp: ContextParallelHandler,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    **options: Any,
) -> Tensor:
    """Mamba-2: (1, T, H, P) to the same."""
    _refuse_cache("Mamba's scan", initial_states, return_final_states)
    options |= {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}

    given = hidden_states, dt, B, C
    rows, (heads, size), read = slice(0, cp.rows), hidden_states.shape[2:], B.shape[3]
    choice = cp.scan.choose(
        heads,
        row_bytes=heads * (2 * size + 2 * read + 1) * hidden_states.element_size(),
        state_bytes=heads * (size * read + 1) * 4,
        row_work=mamba_work(heads, size, read),
    )
    if cp.degree > 1 and choice.used == SEQUENCE_TO_HEAD:
        found = _scanned_by_heads(function, cp, [x[0, rows] for x in given], A, options)
        return _standing_in(found, hidden_states.shape[1])

    def scan(spans: list[slice]) -> tuple[Tensor, Tensor]:
        outs, states = zip(
            *(
                function(x, steps, A, b, c, return_final_states=True, **options)
                for x, steps, b, c in ([each[:, span] for each in given] for span in spans)
            ),
            strict=True,
        )
        return torch.cat([out[0] for out in outs]), torch.cat(states)

    steps = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    steps = (F.softplus(steps) if dt_softplus else steps).clamp(*dt_limit)
    logs = A.float() * steps[0, rows].float()
    skip = [options["D"]] if options.get("D") is not None else []
    found = scan_mamba(cp, hidden_states[0, rows], logs, C[0, rows].float(), scan, *skip)
    return _standing_in(found, hidden_states.shape[1])


def _scanned_by_heads(
    function: Function,
    cp: ContextParallelHandler,
    given: list[Tensor],
    A: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Each rank scans whole sequences of some heads: (T, H, P), (T, H), and (T, groups, N) twice,
    to (T, H, P). A group's rows travel once for each of its heads."""
    x, dt, b, c = given
    heads = x.shape[1]
    b, c = (part.repeat_interleave(heads // part.shape[1], 1) for part in (b, c))
    sizes = [x.shape[2], 1, b.shape[2], c.shape[2]]
    together = torch.cat([x, dt[..., None], b, c], 2)
    mine = torch.split(cp.whole.sequence_to_head(together, branches=True), sizes, 2)
    own = cp.whole.head_slice(heads)
    per_head = {
        name: option[own] if name in ("D", "dt_bias") and option is not None else option
        for name, option in options.items()
    }
    outs: list[Tensor] = []
    ends: list[Tensor] = []
    for i, (x, dt, b, c) in enumerate(zip(*_stretches(cp, mine), strict=True)):
        states = _entering(cp, i, ends)
        out = function(x[None], dt[None, ..., 0], A[own], b[None], c[None], **states, **per_head)
        out, *end = out if isinstance(out, tuple) else (out,)
        outs.append(out[0])
        ends += end
    return cp.whole.head_to_sequence(torch.cat(outs), heads)


def _stretches(cp: ContextParallelHandler, parts: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    lengths = stretch_rows(cp.layout)
    return [torch.split(part, lengths) for part in parts]


def _entering(cp: ContextParallelHandler, i: int, ends: list[Tensor]) -> dict[str, Any]:
    """Options for stretch i, where there are branches. `ends`: the states after those before."""
    if not cp.layout.has_branches:
        return {}
    parent = cp.whole.parents[i] if i < len(cp.whole.parents) else -1
    return {
        "initial_states": ends[parent] if parent >= 0 else None,
        "return_final_states": True,
    }


def _not_fused(function: Function, cp: ContextParallelHandler, *given: Any, **options: Any) -> None:
    """None: the layer calls its convolution and its scan instead."""


def _delta(
    function: Function,
    cp: ContextParallelHandler,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The gated delta rule, with a decay for each head or each key: (1, T, H, V)."""
    _refuse_cache("the delta rule", initial_state, output_final_state, cu_seqlens)
    rows = slice(0, cp.rows)
    gates = {"g": g[0, rows], "beta": beta[0, rows]}
    found = delta_rule(cp, function, query[0, rows], key[0, rows], value[0, rows], gates, **options)
    return _standing_in(found, value.shape[1]), None


def _standing_in(found: Tensor, rows: int) -> Tensor:
    """(1, rows, ...) of (T, ...), with zeros in a row that stands in."""
    more = found.new_zeros(rows - len(found), *found.shape[1:])
    return torch.cat([found, more]).unsqueeze(0)


def _refuse_cache(name: str, *states: Any) -> None:
    if any(state is not None and state is not False for state in states):
        raise ValueError(
            f"{name} is called with a cache, expected none under cp=: model_inputs says "
            "use_cache=False"
        )


_REPLACED: dict[str, Function] = {
    "causal_conv1d_fn": _convolved,
    "chunk_kimi_delta_attention": _delta,
    "mamba2_chunk_scan": _scanned,
    "mamba2_split_conv1d_scan_combined": _not_fused,
    "torch_chunk_gated_delta_rule": _delta,
}
"""By the names that Transformers gives these functions in the modules of its models."""
