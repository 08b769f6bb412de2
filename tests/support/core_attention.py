"""Core attention modules as trainers give them, and cases to call them with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hcp
from support.cases import whole_attention
from support.planning import CHEAP_LAUNCHES

Sizes = tuple[int, int, int, int]  # query heads, key-value heads, D, E


class WholeAttention(torch.nn.Module):
    """A module without context parallelism. It takes its number of heads from its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any,
        attention_bias: Tensor | None,
        packed_seq_params: Any,
    ) -> Tensor:
        causal = attn_mask_type == "causal"
        if query.dim() == 4:  # (tokens, sequences, heads, size)
            parts = [
                whole_attention(q, k, v, None, causal, (-1, -1))[0]
                for q, k, v in zip(query.unbind(1), key.unbind(1), value.unbind(1), strict=True)
            ]
            return torch.stack(parts, 1).flatten(2) * self.gain
        assert packed_seq_params.local_cp_size == 1
        assert packed_seq_params.cp_group is None
        sizes = packed_seq_params.cu_seqlens_q.diff().tolist()
        assert max(sizes) == packed_seq_params.max_seqlen_q
        split = zip(query.split(sizes), key.split(sizes), value.split(sizes), strict=True)
        outs = [whole_attention(q, k, v, None, causal, (-1, -1))[0] for q, k, v in split]
        return torch.cat(outs).flatten(1) * self.gain


class RingLike(torch.nn.Module):
    """A module with context parallelism of its own, like Transformer Engine's. It is given a group,
    cuts sequences evenly, and gathers keys and values over the group."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.set_context_parallel_group("built with", [7], None, "a2a")

    def set_context_parallel_group(
        self, group: Any, ranks: Any, stream: Any, comm_type: str
    ) -> None:
        self.cp_group, self.cp_global_ranks = group, ranks
        self.cp_stream, self.cp_comm_type = stream, comm_type

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any,
        attention_bias: Tensor | None,
        packed_seq_params: Any,
    ) -> Tensor:
        group, size = self.cp_group, packed_seq_params.local_cp_size
        self.calls.append((size, self.cp_global_ranks, self.cp_comm_type))
        assert packed_seq_params.cp_group is group
        if attn_mask_type == "fail":
            raise ZeroDivisionError
        bounds = packed_seq_params.cu_seqlens_q
        rows = [zigzag_rows(bounds, j, size) for j in range(size)]
        place = group.rank() if group is not None else 0
        keys = gathered(torch.cat([key, value], 2), group)
        whole = torch.empty(int(bounds[-1]), *keys[0].shape[1:], dtype=key.dtype)
        whole = whole.index_copy(0, torch.cat(rows), torch.cat(keys))
        own = rows[place]
        outs = torch.zeros(len(own), query.shape[1], value.shape[2], dtype=query.dtype)
        for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            here = ((own >= start) & (own < end)).nonzero().squeeze(1)
            k, v = whole[start:end].split([key.shape[2], value.shape[2]], 2)
            out = rows_of_attention(query[here], k, v, own[here] - start)
            outs = outs.index_copy(0, here, out)
        return outs.flatten(1)


def zigzag_rows(bounds: Tensor, place: int, size: int) -> Tensor:
    parts = []
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if size == 1:
            parts.append(torch.arange(start, end))
            continue
        chunks = torch.arange(start, end).chunk(2 * size)
        assert len({len(chunk) for chunk in chunks}) == 1, "an uneven cut"
        parts += [chunks[place], chunks[2 * size - 1 - place]]
    return torch.cat(parts)


def gathered(x: Tensor, group: Any) -> list[Tensor]:
    """Gather every rank's rows. The backward sums the gradients."""
    if group is None or group.size() == 1:
        return [x]
    return list(_Gather.apply(x, group))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> tuple[Tensor, ...]:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        summed = torch.stack(grads)
        dist.all_reduce(summed, group=ctx.group)
        return summed[ctx.group.rank()], None


def rows_of_attention(q: Tensor, k: Tensor, v: Tensor, tokens: Tensor) -> Tensor:
    """Compute causal attention of the queries at some tokens of a sequence."""
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
    hidden = torch.arange(len(k)) > tokens[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    ranks: int
    min_degree: int = 1
    max_degree: int | None = None
    capacity: int = 60
    sizes: Sizes = (4, 2, 6, 5)
    causal: bool = True
    batched: bool = False


def handlers(groups: Any, case: Case) -> list[hcp.ContextParallelHandler]:
    plan = hcp.plan(
        case.lengths,
        ranks=case.ranks,
        max_tokens_per_rank=case.capacity,
        min_degree=case.min_degree,
        max_degree=case.max_degree,
        cost=CHEAP_LAUNCHES,
    )
    return [
        hcp.ContextParallelHandler(plan, m, groups.transport)
        for m in range(len(plan.micro_batches))
    ]


def made_group(cp: hcp.ContextParallelHandler) -> Any:
    """Create a process group for each degree of the plan, as a trainer does beforehand."""
    mine = None
    for group in cp.plan.micro_batches[cp.micro_batch]:
        ranks = list(range(group.first_rank, group.first_rank + group.degree))
        made = dist.new_group(ranks)
        mine = made if dist.get_rank() in ranks else mine
    return mine if cp.degree > 1 else None
