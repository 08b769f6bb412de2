"""Recurrent layers of trainers over this rank's rows: convolutions, Mamba-2 and the delta rule.

A kernel computes each span by itself. What precedes the span comes from other ranks: rows for a
convolution, a state for a scan.

T rows, H heads, P and N sizes of Mamba's state, K and V of the delta rule's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hcp.exchange.layout import span_rows
from hcp.step.handler import ContextParallelHandler


def convolve(
    cp: ContextParallelHandler, x: Tensor, taps: int, convolution: Callable[[Tensor], Tensor]
) -> Tensor:
    """Convolve x (T, channels) along its sequences.

    `convolution`: (rows, channels) to the same, as if zeros came before its first row; a row sees
    itself and `taps - 1` rows before it.
    """
    near = cp.halo(x, taps - 1)
    if len(near) == 0:  # no convolution takes it, and weights want gradients
        return convolution(F.pad(near, (0, 0, 0, 1)))[:0]
    return convolution(near)[cp.halo_rows(taps - 1)]


def scan_mamba(
    cp: ContextParallelHandler,
    x: Tensor,
    logs: Tensor,
    reads: Tensor,
    scan: Callable[[slice], tuple[Tensor, Tensor]],
) -> Tensor:
    """Scan x (T, H, P) by Mamba-2, along its sequences.

    `logs`: (T, H), logarithms of the decays. `reads`: (T, H, N), what each row reads of the state.
    `scan`: of a span of these rows, from zeros, gives (rows, H, P) and the state (H, P, N).
    """
    spans = _spans(cp)
    scans = [scan(span) for span in spans]
    states = torch.stack([state for _, state in scans]) if scans else _no_states(x, reads)
    decays = [logs[span].sum(0).exp()[:, None, None] for span in spans]
    entering = cp.pass_states(states, torch.stack(decays) if decays else states)
    if not scans:
        return _touched(x, entering, logs)
    outs = []
    for span, (out, _), state in zip(spans, scans, entering, strict=True):
        read = torch.einsum("thn,hpn->thp", reads[span], state.to(reads.dtype))
        outs.append(out + (read * logs[span].cumsum(0).exp()[..., None]).to(out.dtype))
    return torch.cat(outs)


def delta_rule(
    cp: ContextParallelHandler,
    rule: Callable[..., tuple[Tensor, Any]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gates: dict[str, Tensor],
    **options: Any,
) -> Tensor:
    """Compute a gated delta rule along sequences: (T, H, V).

    `rule`: a function as `fla.ops.gated_delta_rule.chunk_gated_delta_rule`. `gates`: its `g` and
    `beta`, (T, ...).

    State and output are linear in the state that enters a span. So the rule runs once, on values
    followed by K zeros, from zeros followed by the identity. What it makes of the identity is the
    span's transition, and what its rows read from a state that enters.
    """
    (heads, width), keys = value.shape[1:], key.shape[2]
    whole = cp.degree <= 1  # spans are sequences
    identity = torch.eye(keys, device=value.device).expand(1, heads, keys, keys)
    start = {} if whole else {"initial_state": F.pad(identity, (width, 0))}
    wide = value if whole else F.pad(value, (0, keys))
    outs, ends, spans = [], [], _spans(cp)
    for span in spans:
        given = (x[span].unsqueeze(0) for x in (query, key, wide))
        own = {name: gate[span].unsqueeze(0) for name, gate in gates.items()}
        out, end = rule(*given, **own, **start, output_final_state=not whole, **options)
        outs.append(out[0])
        ends.append(end)
    if whole:
        return torch.cat(outs) if outs else _touched(value, query, key, *gates.values())
    made = torch.cat(ends) if ends else _no_states(key.expand(-1, heads, -1), wide)
    states, transitions = torch.split(made, [width, keys], -1)
    entering = cp.pass_states(states, transition=transitions)
    if not outs:
        return _touched(value, query, key, entering, *gates.values())
    added = [
        torch.einsum("thk,hkv->thv", out[..., width:].to(state.dtype), state).to(out.dtype)
        for out, state in zip(outs, entering, strict=True)
    ]
    return torch.cat([out[..., :width] + more for out, more in zip(outs, added, strict=True)])


def _spans(cp: ContextParallelHandler) -> list[slice]:
    ends = torch.tensor([0, *span_rows(cp.layout)]).cumsum(0).tolist()
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


# ---- a rank without rows -------------------------------------------------------------------------
#
# It takes part in exchanges, forward and backward, and gives its weights gradients of zeros.


def _no_states(rows: Tensor, columns: Tensor) -> Tensor:
    """No state (0, H, A, B), made of no row (0, H, A) and no row (0, H, B)."""
    return rows[..., :, None].float() * columns[..., None, :].float()


def _touched(x: Tensor, *others: Tensor) -> Tensor:
    """No row x, which depends on others of no element."""
    return x + sum(other.sum().to(x.dtype) for other in others)
