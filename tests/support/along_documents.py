"""Operations that go from token to token along documents: under a plan, and of one document or text
alone, in which hcp has no hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hcp.integrations.recurrent import convolve, delta_rule, mamba_states, scan_mamba
from support.megatron_delta import slow_rule

HEADS, KEYS, VALUES, TAPS = 2, 2, 1, 4
COLUMNS = HEADS * (2 * KEYS + VALUES + 2)


def recurrence(x: Tensor, state: Tensor) -> Tensor:
    """The state after each row: half of the columns are decays, the others what is added."""
    decays, added = x.chunk(2, 1)
    states = []
    for decay, own in zip(decays.sigmoid(), added, strict=True):
        state = decay * state + own
        states.append(state)
    return torch.stack(states) if states else added


def spans_of(cp: Any, x: Tensor) -> list[Tensor]:
    sizes = cp.scan.span_cu_seqlens.diff().tolist()
    return list(x.split(sizes)) if sizes else []


def passed(cp: Any, x: Tensor) -> Tensor:
    spans, added = spans_of(cp, x), x.chunk(2, 1)[1]
    ends = [recurrence(span, torch.zeros_like(span[0, ::2]))[-1] for span in spans]
    decays = [span.chunk(2, 1)[0].sigmoid().prod(0) for span in spans]
    entering = cp.scan.pass_states(
        torch.stack(ends) if ends else added, torch.stack(decays) if decays else added
    )
    outs = [recurrence(span, state) for span, state in zip(spans, entering, strict=True)]
    return torch.cat(outs) if outs else entering


def passed_maps(cp: Any, x: Tensor) -> Tensor:
    """The same by functions, from ones."""

    def apply(maps: Any, states: Any) -> Any:
        return (maps[1] * states[0] + maps[0],)

    def combine(earlier: Any, later: Any) -> Any:
        return later[1] * earlier[0] + later[0], later[1] * earlier[1]

    spans, added = spans_of(cp, x), x.chunk(2, 1)[1]
    ends = [recurrence(span, torch.zeros_like(span[0, ::2]))[-1] for span in spans]
    decays = [span.chunk(2, 1)[0].sigmoid().prod(0) for span in spans]
    maps = [torch.stack(part) if part else added for part in (ends, decays)]
    (entering,) = cp.scan.pass_maps(maps, combine=combine, apply=apply, initial=[ones(x)])
    outs = [recurrence(span, state) for span, state in zip(spans, entering, strict=True)]
    return torch.cat(outs) if outs else entering


def ones(x: Tensor) -> Tensor:
    return x.new_ones(x.shape[1] // 2)


def scanned_whole(cp: Any, x: Tensor) -> Tensor:
    mine = cp.whole.sequence_to_head(x.unflatten(1, (HEADS, -1)))
    sizes = cp.whole.cu_seqlens.diff().tolist()
    sums = [part.sin().cumsum(0) for part in mine.split(sizes)] if sizes else [mine]
    return cp.whole.head_to_sequence(torch.cat(sums), HEADS).flatten(1)


def scanned_stretches(cp: Any, x: Tensor) -> Tensor:
    """The same, where a stretch starts from the sum at the end of its parent."""
    mine = cp.whole.sequence_to_head(x.unflatten(1, (HEADS, -1)), branches=True)
    sizes = cp.whole.stretch_cu_seqlens.diff().tolist()
    sums = [part.sin().cumsum(0) for part in mine.split(sizes)] if sizes else [mine]
    for i, parent in enumerate(cp.whole.parents):
        if parent >= 0:
            sums[i] = sums[i] + sums[parent][-1]
    return cp.whole.head_to_sequence(torch.cat(sums), HEADS).flatten(1)


def convolution(rows: Tensor) -> Tensor:
    weight = torch.linspace(-1, 1, TAPS * rows.shape[1]).double().view(-1, 1, TAPS)
    return F.conv1d(F.pad(rows.t(), (TAPS - 1, 0))[None], weight, groups=rows.shape[1])[0].t()


def parts_of(x: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Query, key, value and gates of a delta rule."""
    sizes = [KEYS, KEYS, VALUES, 1, 1]
    query, key, value, g, beta = x.unflatten(1, (HEADS, -1)).split(sizes, 2)
    key = key / (1 + key.norm(dim=2, keepdim=True))
    return query, key, value, {"g": -g[..., 0].square(), "beta": beta[..., 0].sigmoid()}


def delta(cp: Any, x: Tensor) -> Tensor:
    query, key, value, gates = parts_of(x)
    return delta_rule(cp, slow_rule, query, key, value, gates).flatten(1)


def delta_alone(x: Tensor) -> Tensor:
    query, key, value, gates = parts_of(x)
    g, beta = (gates[name][None] for name in ("g", "beta"))
    return slow_rule(query[None], key[None], value[None], g, beta)[0][0].flatten(1)


def mamba_of(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values, writes, reads, _ = x.unflatten(1, (HEADS, -1)).split([VALUES, KEYS, KEYS, 2], 2)
    return values, -values[..., 0].square(), writes, reads


def mamba(cp: Any, x: Tensor) -> Tensor:
    values, logs, writes, reads = mamba_of(x)

    def scan(spans: list[slice]) -> tuple[Tensor, Tensor]:
        outs = [mamba_alone(x[span]) for span in spans]
        return torch.cat(outs).unflatten(1, (HEADS, -1)), mamba_states(values, logs, writes, spans)

    return scan_mamba(cp, values, logs, reads, scan).flatten(1)


def mamba_alone(x: Tensor) -> Tensor:
    values, logs, writes, reads = mamba_of(x)
    state, outs = x.new_zeros(HEADS, VALUES, KEYS), []
    for value, log, write, read in zip(values, logs, writes, reads, strict=True):
        state = state * log.exp()[:, None, None] + value[:, :, None] * write[:, None]
        outs.append((state * read[:, None]).sum(2))
    return torch.stack(outs).flatten(1)


def rolled(rows: Tensor, shift: int) -> Tensor:
    out = torch.zeros_like(rows)
    if shift < 0:
        out[:shift] = rows[-shift:]
    else:
        out[shift:] = rows[: len(rows) - shift]
    return out


Pair = tuple[Callable[[Any, Tensor], Tensor], Callable[[Tensor], Tensor]]
OPERATIONS: dict[str, Pair] = {
    "pass_states": (passed, lambda x: recurrence(x, torch.zeros_like(x[0, ::2]))),
    "pass_maps": (passed_maps, lambda x: recurrence(x, ones(x))),
    "sequence_to_head": (scanned_whole, lambda x: x.sin().cumsum(0)),
    "sequence_to_head by stretches": (scanned_stretches, lambda x: x.sin().cumsum(0)),
    "convolve": (lambda cp, x: convolve(cp, x, TAPS, convolution), convolution),
    "labels": (lambda cp, x: cp.roll_tensor(x), lambda x: rolled(x, -1)),
    "roll by 3": (lambda cp, x: cp.roll_tensor(x, 3), lambda x: rolled(x, 3)),
    "roll by -5": (lambda cp, x: cp.roll_tensor(x, -5), lambda x: rolled(x, -5)),
    "delta_rule": (delta, delta_alone),
    "scan_mamba": (mamba, mamba_alone),
}


def rows_of(cp: Any, wholes: list[Tensor]) -> Tensor:
    """This rank's rows, zeros in padding."""
    parts = [wholes[s][start : start + rows] for s, start, rows in cp.layout.spans]
    padding = wholes[0].new_zeros(cp.layout.padding, wholes[0].shape[1])
    return torch.cat([wholes[0][:0], *parts, padding])
