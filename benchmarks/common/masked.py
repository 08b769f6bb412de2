"""Attention of packs under masks on the ranks of a run: checked by the formula, and timed."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from random import Random

import torch
import torch.distributed as dist
from peers import magi
from torch import Tensor

import hcp
from common.flags import filled
from common.layers import Layer, Sizes, Whole, checked_layer, prices_of
from common.machine import hardware, package_version
from common.timing import by_turns, copy_rate, end_ranks, slowest, start_ranks, timed
from hcp import Mask
from hcp.attention.kernels import KernelChoice
from hcp.planning.mask import Slice

DEFAULTS = {
    "heads": ([4, 2], [64, 8]),
    "head_dim": (16, 128),
    "dtype": ("float64", "bfloat16"),
}
"""On a CPU, on GPUs."""
CALLS = 4
SCORES = 2**27
"""How many the formula holds at once."""
DEADLINE, TIMEOUT = 590.0, timedelta(seconds=300)
BACKWARD = 2.5
"""Its operations over the forward's."""
COLUMNS = (
    *("mask", "contestant", "rows", "ms f", "ms f+b"),
    *("TFLOP/s a rank f", "TFLOP/s a rank b"),
)


def sequences_of(mask: Mask) -> list[Mask]:
    """Return the parts of a mask between which nobody sees, one after the other."""
    reaches = sorted(
        (min(q[0], k[0]), max(q[1], k[1]), i) for i, (q, k, _) in enumerate(mask.slices)
    )
    parts: list[tuple[int, int, list[int]]] = []
    for first, end, i in reaches:
        if parts and first < parts[-1][1]:
            start, last, members = parts.pop()
            parts.append((start, max(last, end), [*members, i]))
        else:
            parts.append((first, end, [i]))
    edges = [0, *(end for _, end, _ in parts)]
    if [first for first, _, _ in parts] != edges[:-1] or edges[-1] != mask.length:
        raise ValueError(f"{mask} has tokens in no slice, expected each in one")

    def moved(i: int, start: int) -> Slice:
        (a, b), (c, d), kind = mask.slices[i]
        return Slice((a - start, b - start), (c - start, d - start), kind)

    return [
        Mask(end - start, [moved(i, start) for i in sorted(members)])
        for start, end, members in parts
    ]


def seen_by(mask: Mask, first: int, end: int, device: torch.device) -> Tensor:
    """Return which tokens these queries see, bool (queries, tokens)."""
    seen = torch.zeros(end - first, mask.length, dtype=torch.bool, device=device)
    for part in mask.slices:
        a, b = max(part.queries[0], first), min(part.queries[1], end)
        if a < b:
            keys = torch.arange(*part.keys, device=device)
            ahead = keys - torch.arange(a, b, device=device).unsqueeze(1)
            low, high = part.band
            seen[a - first : b - first, slice(*part.keys)] |= (ahead >= low) & (ahead <= high)
    return seen


def formula(mask: Mask, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return output and gradients of queries, keys and values, by the formula in float32 (for
    float64 in float64). The ranks share the queries."""
    query, key, value, grad = tensors
    wide = torch.promote_types(query.dtype, torch.float32)
    found = [torch.zeros_like(x, dtype=wide) for x in (query, query, key, value)]
    kv_heads, size = key.shape[1:]
    each = query.shape[1] // kv_heads
    scale = 1 / math.sqrt(size)
    rows = max(1, SCORES // (each * mask.length))
    blocks = range(0, mask.length, rows)
    for first in blocks[dist.get_rank() :: dist.get_world_size()]:
        end = min(first + rows, mask.length)
        unseen = ~seen_by(mask, first, end, query.device)
        for g in range(kv_heads):
            heads = slice(g * each, (g + 1) * each)
            q, d = (x[first:end, heads].to(wide).transpose(0, 1) for x in (query, grad))
            k, v = (x[:, g].to(wide) for x in (key, value))
            weights = (scale * q @ k.T).masked_fill_(unseen, -math.inf).softmax(-1)
            out = weights @ v
            inner = weights * (d @ v.T - (d * out).sum(-1, keepdim=True))
            parts = out, scale * inner @ k
            for result, part in zip(found[:2], parts, strict=True):
                result[first:end, heads] = part.transpose(0, 1)
            found[2][:, g] += scale * torch.einsum("hqk,hqd->kd", inner, q)
            found[3][:, g] += torch.einsum("hqk,hqd->kd", weights, d)
    for result in found:
        dist.all_reduce(result)
    return found


class Pack:
    """A mask, and inputs and expected results that all ranks have alike."""

    def __init__(self, mask: Mask, sizes: Sizes) -> None:
        self.mask, self.sizes = mask, sizes
        generator = torch.Generator(sizes.device).manual_seed(1)
        counts = sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads
        self.inputs = [sizes.randn(mask.length, count, generator) for count in counts]
        self.wanted = formula(mask, self.inputs)
        self.largest = [float(x.abs().max()) for x in self.wanted]

    @property
    def flops(self) -> int:
        """Of the forward."""
        return 4 * self.mask.pairs * self.sizes.heads * self.sizes.head_dim

    def layer(self, what: str, rows: Tensor, attention: Callable[..., Tensor]) -> Layer:
        """Return attention of a rank's rows, after a check."""
        given, wanted = ([x[rows] for x in tensors] for tensors in (self.inputs, self.wanted))
        return checked_layer(what, attention, given, wanted, self.largest, self.sizes.dtype)


@dataclass
class Taken:
    """What the packs of one kind took by one contestant."""

    rows: float = 0.0
    flops: float = 0.0
    forward: float = 0.0
    both: float = 0.0
    packs: int = 0


class Bench:
    """State that all packs share."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.sizes = Sizes.of(args, device)
        self.handler = hcp.get_cp_handler_cls(args.backend, args.comm_type)
        self.groups = hcp.build_process_groups(transport=args.transport)
        whole = Whole([args.tokens], self.sizes, KernelChoice(self.handler.kernel_family))
        whole.both()
        seconds = slowest(timed(whole.both, device), device)
        pairs = Mask.causal(args.tokens).pairs
        flops = (1 + BACKWARD) * 4 * pairs * self.sizes.heads * self.sizes.head_dim
        prices = prices_of(self.sizes, flops / seconds, copy_rate(device, 3))
        self.cost = replace(prices, token=0)  # nothing but attention is computed here
        self.magi: magi.Magi | None = None
        if "magi" in args.peers:
            if said := magi.obstacle(device):
                self.tell(f"without magi: {said}")
            else:
                self.magi = magi.Magi()

    def tell(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def kind(self, kind: str, masks: Sequence[Mask]) -> None:
        """Check and time the packs of one kind, and print a row of each contestant."""
        taken: dict[str, Taken] = {}
        for mask in masks:
            pack = Pack(mask, self.sizes)
            layers = {"hcp": self._hcp(pack)}
            if self.magi is not None:
                own = self._tried(kind, "magi", partial(self._magi, pack, self.magi))
                layers |= {} if own is None else {"magi": own}
            for name, times in self._timed(layers).items():
                total = taken.setdefault(name, Taken())
                rows = sum(len(layer.inputs[0]) for layer in layers[name])
                share = slowest(rows, self.device) * self.ranks / mask.length
                total.rows = max(total.rows, share)
                total.flops += pack.flops
                total.forward += times[0]
                total.both += times[1]
                total.packs += 1
        for name, total in taken.items():
            self._print(kind, name, total)

    def _hcp(self, pack: Pack) -> list[Layer]:
        """Layers of a plan's micro-batches, whose sequences are what sees each other."""
        masks = sequences_of(pack.mask)
        lengths = [mask.length for mask in masks]
        causal = all(mask == Mask.causal(mask.length) for mask in masks)
        plan = hcp.plan(
            lengths,
            ranks=self.ranks,
            max_tokens_per_rank=math.ceil(self.args.room * pack.mask.length / self.ranks),
            masks=None if causal else masks,
            cost=self.cost,
        )
        starts = torch.tensor([0, *itertools.accumulate(lengths)])
        layers = []
        for m in range(len(plan.micro_batches)):
            cp = self.handler(plan, m, self.groups.transport)
            first = starts[list(cp.layout.sequences)]
            first = first.repeat_interleave(cp.layout.cu_seqlens.diff().cpu())
            rows = (first + cp.layout.positions.cpu()).to(self.device)
            layers.append(pack.layer("hcp", rows, cp.attention))
        return layers

    def _magi(self, pack: Pack, peer: magi.Magi) -> list[Layer]:
        sizes = self.sizes
        given = peer.dispatched(pack.mask, sizes.heads, sizes.kv_heads, sizes.head_dim)
        return [pack.layer("magi", *given)]

    def _tried(self, kind: str, name: str, made: Callable[[], list[Layer]]) -> list[Layer] | None:
        """Return a peer's layers, or None where it refuses on a rank, or is wrong; told then."""
        failed, layers = "", None
        try:
            layers = made()
        except (Exception, SystemExit) as error:
            failed = f"{type(error).__name__}: {str(error)[:300]}"
        if slowest(float(layers is None), self.device):
            self.tell(f"{kind}: without {name}, {failed or 'which failed on another rank'}")
            return None
        return layers

    def _timed(self, layers: dict[str, list[Layer]]) -> dict[str, tuple[float, float]]:
        """Return the seconds of the forward and of both passes."""
        steps: dict[str, Callable[[], object]] = {}
        for name, own in layers.items():
            steps[f"{name} f"] = partial(_each, [layer.forward for layer in own])
            steps[f"{name} f+b"] = partial(_each, [layer.both for layer in own])
        clock = partial(timed, device=self.device, calls=CALLS)
        times = by_turns(steps, self.device, clock, self.args.rounds)
        return {name: (times[f"{name} f"], times[f"{name} f+b"]) for name in layers}

    def _print(self, kind: str, name: str, total: Taken) -> None:
        done = total.flops / self.ranks / 1e12
        rate = done / total.forward, BACKWARD * done / (total.both - total.forward)
        times = (x / total.packs * 1e3 for x in (total.forward, total.both))
        row = dict(zip(COLUMNS, (kind, name, total.rows, *times, *rate), strict=True))
        if self.rank == 0:
            self.args.json.add(row)
        numbers = (row[column] for column in COLUMNS[2:])
        forms = (".2f", ".3f", ".3f", ".4g", ".4g")
        cells = itertools.starmap(format, zip(numbers, forms, strict=True))
        self.tell(f"| {' | '.join((kind, name, *cells))} |")


def _each(steps: Sequence[Callable[[], object]]) -> None:
    for step in steps:
        step()


def time_masks(args: argparse.Namespace, drawn: Callable[[str, Random, int], Mask]) -> None:
    """Time all kinds. ``drawn``: makes a mask of a kind and of so many tokens."""
    filled(args, DEFAULTS)
    args.rounds = args.rounds or 5
    if args.device == "cuda" and "magi" in args.peers:
        magi.set_variables()
    device = start_ranks(args.device, args.deadline or DEADLINE, TIMEOUT)
    bench = Bench(args, device)
    bench.tell(
        f"{bench.ranks} ranks on {hardware(args.device)}, torch {torch.__version__}, hcp "
        f"{hcp.__version__}, MagiAttention {package_version('magi_attention') or 'absent'}; heads "
        f"{args.heads[0]}:{args.heads[1]} of {args.head_dim}, {args.dtype}, {args.tokens} tokens a "
        f"rank, {args.packs} packs of each mask, median of {args.rounds}; hcp by {args.comm_type} "
        f"over {bench.groups.transport.name}, up to {args.room:g} of the mean rows a rank"
    )
    bench.tell(f"\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for kind in args.masks:
        random = (Random(f"{kind} {bench.ranks} {seed}") for seed in range(args.packs))
        masks = [drawn(kind, r, bench.ranks * args.tokens) for r in random]
        bench.kind(kind, list(dict.fromkeys(masks)))
    bench.groups.close()
    end_ranks()
