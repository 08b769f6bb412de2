"""Attention whose keys and values travel compressed, as rows of latents.

Multi-head latent attention (MLA, https://arxiv.org/abs/2405.04434) computes the keys and values of
all heads from one short row a token. That row travels here. A function of the caller expands rows
to keys and values, for one launch of a kernel at a time, and once more in the backward.

To the schedule and the transfer a latent row is a key of one head, with a value of no elements.

T rows on this rank, W elements of a latent row, n rows of a launch, H query heads, G key-value
heads, D head size, E head size of values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hcp.attention.checks import Inputs
from hcp.attention.kept import current
from hcp.attention.kernels import Attended, Kernel, Launch, ResultGrads
from hcp.attention.layer import backward, forward, layer_of
from hcp.attention.prepared import LayerCall, PreparedLayer
from hcp.exchange.units import expect_no_unit, without_units

Expand = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Latent rows (n, W) to keys (n, G, D) and values (n, G, E), each row from its own alone."""


def as_key_and_value(latent: Tensor) -> tuple[Tensor, Tensor]:
    """Latent rows (..., W) as a key of one head and a value of no elements: (..., 1, W) and
    (..., 1, 0)."""
    if latent.dim() < 2:
        raise ValueError(f"key has shape {tuple(latent.shape)}, expected latent rows (rows, width)")
    key = latent.unsqueeze(-2)
    return key, key[..., :0]


def check_options(value: Tensor | None, rotary_pos_emb: object) -> None:
    """Raise an error for what ``expand`` does not go with."""
    if value is not None:
        raise ValueError(
            "value is given with expand=, expected latent rows as key alone: expand gives the "
            "values; torch.cat what is to travel"
        )
    if rotary_pos_emb is not None:
        raise ValueError(
            "rotary_pos_emb is given with expand=, expected None: keys are there only where they "
            "were received; rotate queries, and the part of the latent rows that has positions, "
            "before, by cp.apply_rotary_pos_emb"
        )
    if torch.compiler.is_dynamo_compiling():
        raise NotImplementedError(
            "expand is given in a compiled layer, expected none: an operator takes no function; "
            "leave the call out by torch.compiler.disable, or expand first: "
            "cp.attention(query, *expand(latent))"
        )


def without_expand(value: Tensor | None) -> ValueError:
    """The error of a call that has arguments of ``expand``, and not ``expand`` itself."""
    if value is None:
        return ValueError("value is None, expected a tensor, or expand= with latent rows as key")
    return ValueError("parameters is given without expand=, expected both or none")


def parameters_of(expand: Expand, given: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
    """The tensors with gradients that ``expand`` uses: those given, or a module's parameters."""
    if given is None:
        given = list(expand.parameters()) if isinstance(expand, nn.Module) else []
    for i, parameter in enumerate(given):
        if not isinstance(parameter, Tensor):
            raise ValueError(
                f"parameters[{i}] is {type(parameter).__name__}, expected the tensors that expand "
                "uses"
            )
    distinct = {_edge_of(x): x for x in given if x.requires_grad}
    return tuple(distinct.values())


def attention(
    inputs: Inputs, call: LayerCall, expand: Expand, parameters: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Attend from this rank's rows to whole sequences: (T, H, D) and latent rows, as
    ``as_key_and_value`` gives them, to (T, H, E); and its log-sum-exp (T, H)."""
    expect_no_unit("expand", expand)
    expansion = Expansion(expand, parameters, _autocast_of(inputs[0]))
    out, lse = _LatentAttention.apply(*inputs, call, expansion, *parameters)  # type: ignore[no-untyped-call]
    return out, lse


# ---- expansion -----------------------------------------------------------------------------------


class _Autocast(NamedTuple):
    """The state of autocast in the forward, which the backward runs in too."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    def again(self) -> AbstractContextManager[Any]:
        # A cast made without gradients must not be found by a forward outside.
        options = {"dtype": self.dtype, "enabled": self.enabled, "cache_enabled": False}
        return torch.autocast(self.device_type, **options)  # type: ignore[arg-type]


def _autocast_of(x: Tensor) -> _Autocast:
    kind = x.device.type
    return _Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))


class Expansion(NamedTuple):
    """A function that expands latent rows, and the tensors with gradients that it uses."""

    function: Expand
    parameters: tuple[Tensor, ...]
    autocast: _Autocast

    def of(self, rows: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (n, G, D) and values (n, G, E) of rows (n, W), for queries (n, H, D)."""
        with self.autocast.again(), without_units("expand"):
            expanded = self.function(rows)
        return check_expanded(expanded, rows, query)

    def differentiable(
        self, rows: Tensor, query: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
        """Rows that take a gradient, keys and values with a graph to these and to the parameters,
        and which of the parameters are used."""
        with torch.enable_grad():
            leaf = rows.detach().requires_grad_()
            key, value = self.of(leaf, query)
        return leaf, key, value, _used(key, value, leaf, self.parameters)


def check_expanded(expanded: Any, rows: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, if they have the shapes that the queries want. Raises ValueError."""
    given = f"expand returned {_shown(expanded)} for rows of shape {tuple(rows.shape)}"
    n, (heads, size) = rows.shape[0], query.shape[1:]
    pair = isinstance(expanded, tuple) and len(expanded) == 2
    if not pair or not all(isinstance(x, Tensor) and x.dim() == 3 for x in expanded):
        raise ValueError(f"{given}, expected a key and a value, ({n}, heads, head_dim) each")
    key, value = expanded
    groups = key.shape[1]
    fits = key.shape[0] == n and key.shape[2] == size and groups > 0 and heads % groups == 0
    if not fits:
        raise ValueError(
            f"{given}, expected a key of shape ({n}, heads, {size}) whose heads divide the {heads} "
            "of query"
        )
    if value.shape[:2] != key.shape[:2] or value.shape[2] < 1:
        raise ValueError(
            f"{given}, expected a value of shape ({n}, {groups}, head_dim), as many rows and heads "
            "as its key has"
        )
    for name, x in (("key", key), ("value", value)):
        if (x.dtype, x.device) != (query.dtype, query.device):
            raise ValueError(
                f"expand returned a {name} of {x.dtype} on {x.device}, expected {query.dtype} on "
                f"{query.device}: those of query"
            )
    return key, value


def _shown(expanded: Any) -> str:
    """Describe what a function returned."""
    if isinstance(expanded, Tensor):
        return f"a tensor of shape {tuple(expanded.shape)}"
    if isinstance(expanded, (tuple, list)):
        return f"({', '.join(_shown(x) for x in expanded)})"
    return type(expanded).__name__


# ---- which parameters it uses --------------------------------------------------------------------

_Edge = tuple[object, int]
"""Where autograd brings the gradient of a tensor: the node that made it and which of its results it
is, or the identity of a leaf. Two names of one tensor have one."""


def _edge_of(x: Tensor) -> _Edge:
    return (id(x), 0) if x.grad_fn is None else (x.grad_fn, x.output_nr)


def _reached(todo: list[Any], ends: Collection[_Edge]) -> dict[_Edge, Tensor | None]:
    """The ends that gradients come to first, from edges (node, which of its results) on; and the
    leaves, which are given."""
    found: dict[_Edge, Tensor | None] = {}
    seen = set()
    while todo:
        edge = node, _ = todo.pop()
        if node is None or edge in seen:
            continue
        seen.add(edge)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf), 0] = leaf
        elif edge in ends:
            found[edge] = None
        else:
            todo += node.next_functions
    return found


def _used(
    key: Tensor, value: Tensor, rows: Tensor, parameters: Sequence[Tensor]
) -> tuple[int, ...]:
    """Which of the parameters keys and values are made from, not by way of another. Raise
    ValueError if one that they are made from is not among them: its gradient would be lost."""
    places = {_edge_of(x): i for i, x in enumerate(parameters)}
    made = [x for x in (key, value) if x.grad_fn is not None]
    found = _reached([*map(_edge_of, made)], places)
    found |= {_edge_of(x): x for x in (key, value) if x.is_leaf and x.requires_grad}
    found.pop(_edge_of(rows), None)
    for edge, leaf in found.items():
        if leaf is not None and edge not in places:
            raise ValueError(
                f"expand uses a parameter of shape {tuple(leaf.shape)} that is not among the "
                f"{len(parameters)} of parameters=, expected all that it uses: its gradient would "
                "be lost. Give parameters=[...], or expand as a torch.nn.Module of its own"
            )
    return tuple(sorted(places[edge] for edge in found))


def _expect_apart(parameters: Sequence[Tensor], used: Sequence[int]) -> None:
    """Raise ValueError if one of those used is made from another: its gradient would count twice,
    here and where autograd goes on from it."""
    places = {_edge_of(parameters[i]): i for i in used}
    for i in used:
        made = parameters[i].grad_fn
        for edge in _reached([] if made is None else [*made.next_functions], places):
            if edge in places:
                made_of = parameters[places[edge]]
                raise ValueError(
                    f"expand uses a parameter of shape {tuple(parameters[i].shape)} and that of "
                    f"shape {tuple(made_of.shape)} from which it is made, expected one of them: a "
                    "gradient would count twice. Make the first one in expand, and leave it out of "
                    "parameters="
                )


class _Expanding:
    """A kernel that takes latent rows for keys, and gives their gradients."""

    def __init__(self, kernel: Kernel, expansion: Expansion) -> None:
        self._kernel, self._expansion = kernel, expansion
        self.dtypes = kernel.dtypes
        self.packs = kernel.packs
        self.value_dim = 0
        """E, once a launch was computed."""
        self.sums: list[Tensor | None] = [None] * len(expansion.parameters)
        """The parameters' gradients of all launches so far, in float32 or wider."""
        self._apart: tuple[int, ...] = ()
        """Parameters of which none is made from another."""

    def capped(self, softcap: float) -> None:
        return None

    def forward(
        self, launch: Launch, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._expansion.of(key.squeeze(1), query)
        self.value_dim = values.shape[2]
        return self._kernel.forward(launch, query, keys, values, scale)

    def backward(
        self, launch: Launch, grads: ResultGrads, attended: Attended, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, out, lse = attended
        rows, keys, values, used = self._expansion.differentiable(key.squeeze(1), query)
        self._expect_apart(used)
        expanded = query, keys.detach(), values.detach(), out, lse
        grad_query, grad_key, grad_value = self._kernel.backward(launch, grads, expanded, scale)
        of_rows = _of_entries(launch, grad_key), _of_entries(launch, grad_value)
        taken = [
            (x, grad) for x, grad in zip((keys, values), of_rows, strict=True) if x.requires_grad
        ]
        outputs, gradients = zip(*taken, strict=True) if taken else ((), ())
        grad_rows: Tensor | None = None
        if taken:
            wanted = rows, *(self._expansion.parameters[i] for i in used)
            # What was made from parameters outside keeps its graph for other launches and calls.
            options = {"allow_unused": True, "retain_graph": True}
            grad_rows, *own = torch.autograd.grad(outputs, wanted, gradients, **options)
            self._add(used, own)
        if grad_rows is None:
            grad_rows = torch.zeros_like(rows)
        return grad_query, grad_rows.unsqueeze(1), torch.zeros_like(value)

    def _expect_apart(self, used: tuple[int, ...]) -> None:
        if used != self._apart:
            _expect_apart(self._expansion.parameters, used)
            self._apart = used

    def _add(self, used: Sequence[int], grads: Sequence[Tensor | None]) -> None:
        for i, grad in zip(used, grads, strict=True):
            if grad is None:
                continue
            before, dtype = self.sums[i], torch.promote_types(grad.dtype, torch.float32)
            self.sums[i] = grad.to(dtype) if before is None else before + grad


def _of_entries(launch: Launch, grad: Tensor) -> Tensor:
    """A gradient of the launch's keys. Rows of no entry, which may hold anything, become 0: they
    would reach the parameters."""
    if launch.keys_are_whole:
        return grad
    own = torch.zeros_like(grad)
    for entry in launch.entries:
        row = entry.key_row - launch.keys.start
        own[row : row + entry.key_rows] = grad[row : row + entry.key_rows]
    return own


# ---- the call ------------------------------------------------------------------------------------


def _attended(
    layer: PreparedLayer, call: LayerCall, expansion: Expansion, inputs: Inputs
) -> tuple[Tensor, Tensor]:
    query, key, *_ = inputs
    kernel = _Expanding(layer.kernel, expansion)
    out, lse, *_ = forward(layer._replace(kernel=kernel), call, inputs)
    if not kernel.value_dim:  # no rows, or none that sees a key: no launch
        _, values = expansion.of(key.new_zeros(1, key.shape[2]), query)
        out = out.new_zeros(*out.shape[:2], values.shape[2])
    return out, lse


class _LatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        call: LayerCall,
        expansion: Expansion,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        inputs = (query, key, value, sinks)
        layer = layer_of(call, inputs, latent=True)
        kept = current.results
        recalled = None if kept is None else kept.next()
        if recalled is None:
            out, lse = _attended(layer, call, expansion, inputs)
            if kept is not None:
                kept.add(out, lse)
        else:
            out, lse = recalled
        ctx.save_for_backward(query, key, value, sinks, out, lse, *parameters)
        ctx.layer, ctx.call, ctx.expansion = layer, call, expansion
        ctx.set_materialize_grads(False)  # most calls do not use the log-sum-exp
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        query, key, value, sinks, out, lse, *_ = ctx.saved_tensors
        expansion: Expansion = ctx.expansion
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        kernel = _Expanding(ctx.layer.kernel, expansion)
        layer: PreparedLayer = ctx.layer._replace(kernel=kernel)
        attended = query, key, value, out, lse
        grads = backward(layer, ctx.call, attended, sinks, (grad_out, grad_lse))
        own = [
            torch.zeros_like(parameter) if total is None else total.to(parameter.dtype)
            for parameter, total in zip(expansion.parameters, kernel.sums, strict=True)
        ]
        return *grads, None, None, *own
