"""A recurrent layer over several ranks: states that travel, against rows exchanged for heads.

    torchrun --nproc-per-node 8 benchmarks/bench_states.py
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/bench_states.py --device cpu

The scan of Mamba-2 in PyTorch, in chunks of --chunk rows: --heads heads of --head-dim elements, and
states of --state-dim. A pack of --lengths tokens lies on all ranks. Contestants:

    whole              one rank scans the whole pack, and nothing travels
    pass_states        each rank scans its rows, and `cp.scan.pass_states` exchanges states
    sequence_to_head   each rank scans whole sequences of some heads, and rows travel; left out
                       where ranks outnumber the heads

Columns: MiB that a rank receives in the forward and in both passes, by the formulas below;
milliseconds of both passes; `bound`, the part of the time that a rank's even share of `whole` takes
(1.000: the exchange is free, and ranks share the scan evenly). `auto` marks what `cp.scan.choose`
takes. Each is the largest of all ranks; times are the median of rounds in which all take turns.

A rank receives the states and decays of the spans before its last, of each sequence (in rounds
where that is less), and in the backward the gradients of as many as others took of it; or
(d - 1) / d^2 of the rows, there and back, in each pass.

Before anything is timed, outputs and gradients are compared with those of `whole`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from common.flags import add_sizes, filled, parser_of
from common.layers import check
from common.machine import hardware
from common.timing import by_turns, end_ranks, slowest, start_ranks, timed
from torch import Tensor
from torch.nn import functional as F

import hcp
from hcp.exchange.states import StatePasses
from hcp.integrations.recurrent import scan_mamba

# T rows, S rows of the pack, H heads, P head size, N state size, c chunks of q rows.

TIMEOUT = timedelta(seconds=60)
DEFAULTS = {
    "lengths": ([700, 40, 3, 281], [49_152, 8_192, 8_000, 192]),
    "heads": (4, 64),
    "head_dim": (16, 64),
    "state_dim": (16, 128),
    "chunk": (32, 128),
    "dtype": ("float32", "bfloat16"),
    "transport": ("torch", "auto"),
}
"""On a CPU, on GPUs."""
NAMES = ("output", "gradient of x", "gradient of decays", "gradient of B", "gradient of C")
MIB = 2**20


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, device="cuda", rounds=5, deadline=590)
    whats = {
        "heads": "of the layer",
        "head-dim": "elements of a head",
        "state-dim": "elements of a state for each of a head's",
        "chunk": "rows that one matrix product covers",
    }
    add_sizes(parser, whats, DEFAULTS)
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of each sequence")
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16"))
    parser.add_argument("--transport", help="(CPU: torch, CUDA: auto)")
    return filled(parser.parse_args(), DEFAULTS)


def main() -> int:
    args = arguments()
    device = start_ranks(args.device, args.deadline, TIMEOUT)
    ranks = dist.get_world_size()
    groups = hcp.build_process_groups(transport=args.transport, timeout=TIMEOUT)
    rows = sum(args.lengths)
    plan = hcp.plan(args.lengths, ranks=ranks, max_tokens_per_rank=rows, min_degree=ranks)
    if len(plan.micro_batches) != 1:
        raise SystemExit(f"{len(plan.micro_batches)} micro-batches, expected one")
    cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
    layer = Layer(args, cp, device)
    contestants = {"whole": layer.whole, "pass_states": layer.by_states}
    if args.heads >= ranks:
        contestants["sequence_to_head"] = layer.by_heads
    layer.check([*contestants])
    both = {name: partial(layer.results, name) for name in contestants}
    times = by_turns(both, device, partial(timed, device=device), args.rounds)
    print_table(args, layer, {name: slowest(time, device) for name, time in times.items()})
    groups.close()
    end_ranks()
    return 0


# ---- the scan ------------------------------------------------------------------------------------


def scan(x: Tensor, logs: Tensor, b: Tensor, c: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Scan one sequence x (T, H, P), from zeros: (T, H, P), and the state (H, P, N) at its end."""
    rows = len(x)

    def chunked(y: Tensor) -> Tensor:
        wide = y if y.dtype == torch.float64 else y.float()
        padded = F.pad(wide, [0, 0] * (y.dim() - 1) + [0, -rows % chunk])
        return padded.unflatten(0, (-1, chunk))

    x, logs, b, c = (chunked(y) for y in (x, logs, b, c))
    sums = logs.cumsum(1)
    total = sums[:, -1]
    gaps = (sums[:, :, None] - sums[:, None]).permute(0, 3, 1, 2)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    mix = torch.einsum("cthn,cshn->chts", c, b) * gaps.masked_fill(later, -torch.inf).exp()
    out = torch.einsum("chts,cshp->cthp", mix, x)
    made = torch.einsum("cshp,cshn->chpn", x, b * (total[:, None] - sums).exp()[..., None])
    state, entering = torch.zeros_like(made[0]), []
    for one, decay in zip(made, total.exp()[..., None, None], strict=True):
        entering.append(state)
        state = decay * state + one
    out = out + torch.einsum("cthn,chpn->cthp", c * sums.exp()[..., None], torch.stack(entering))
    return out.flatten(0, 1)[:rows], state


class Layer:
    """Inputs of the whole pack, alike on every rank, and the contestants."""

    def __init__(
        self, args: argparse.Namespace, cp: hcp.ContextParallelHandler, device: torch.device
    ) -> None:
        self.args, self.cp, self.device = args, cp, device
        self.dtype = getattr(torch, args.dtype)
        generator = torch.Generator(device).manual_seed(1)
        rows, heads = sum(args.lengths), args.heads
        shapes = [(args.head_dim,), (), (args.state_dim,), (args.state_dim,), (args.head_dim,)]
        x, logs, b, c, grad = (
            torch.randn(rows, heads, *shape, generator=generator, device=device) for shape in shapes
        )
        scale = args.state_dim**-0.5
        given = x, -logs.sigmoid() / 16, b * scale, c * scale, grad
        self.inputs = [y.to(self.dtype) for y in given]
        """x, logarithms of decays, B, C, and the gradient of the output."""
        starts = torch.tensor([0, *args.lengths]).cumsum(0)[list(cp.layout.sequences)]
        starts = starts.repeat_interleave(cp.layout.cu_seqlens.diff())
        self.local_rows = (starts + cp.layout.positions).to(device)

    def whole(self, x: Tensor, logs: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return self._sequences(self.args.lengths, x, logs, b, c)

    def by_states(self, x: Tensor, logs: Tensor, b: Tensor, c: Tensor) -> Tensor:
        def spans_of(spans: list[slice]) -> tuple[Tensor, Tensor]:
            scans = [scan(x[span], logs[span], b[span], c[span], self.args.chunk) for span in spans]
            outs, states = zip(*scans, strict=True)
            return torch.cat(outs), torch.stack(states)

        wide = torch.promote_types(self.dtype, torch.float32)
        return scan_mamba(self.cp, x, logs.to(wide), c.to(wide), spans_of)

    def by_heads(self, x: Tensor, logs: Tensor, b: Tensor, c: Tensor) -> Tensor:
        mine = self.cp.whole.sequence_to_head(torch.cat([x, b, c, logs[..., None]], 2))
        sizes = [x.shape[2], b.shape[2], c.shape[2], 1]
        x, b, c, rate = mine.split(sizes, 2)
        out = self._sequences(self.cp.layout.lengths, x, rate[..., 0], b, c)
        return self.cp.whole.head_to_sequence(out.to(self.dtype), self.args.heads)

    def _sequences(
        self, lengths: Sequence[int], x: Tensor, logs: Tensor, b: Tensor, c: Tensor
    ) -> Tensor:
        spans = zip(*(torch.split(y, list(lengths)) for y in (x, logs, b, c)), strict=True)
        chunk = self.args.chunk
        return torch.cat([scan(x, logs, b, c, chunk)[0] for x, logs, b, c in spans])

    def results(self, name: str) -> list[Tensor]:
        """Output and gradients, of this rank's rows; under "whole" of all."""
        taken = self.inputs
        if name != "whole":
            taken = [y[self.local_rows] for y in taken]
        *leaves, grad = taken
        leaves = [y.detach().requires_grad_() for y in leaves]
        functions = {
            "whole": self.whole,
            "pass_states": self.by_states,
            "sequence_to_head": self.by_heads,
        }
        out = functions[name](*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]

    def check(self, names: Sequence[str]) -> None:
        """End the run unless all give the results of one rank, to rounding."""
        whole = self.results("whole")
        largest = [float(y.abs().max()) for y in whole]
        wanted = [y[self.local_rows] for y in whole]
        for name in [name for name in names if name != "whole"]:
            found = self.results(name)
            found = [y.to(other.dtype) for y, other in zip(found, wanted, strict=True)]
            check(name, NAMES, found, wanted, largest, self.dtype)

    @property
    def row_bytes(self) -> int:
        """Of a row of all heads, to whole sequences and back."""
        sizes = 2 * self.args.head_dim + 2 * self.args.state_dim + 1
        return self.args.heads * sizes * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Of one span's state and decay."""
        itemsize = torch.promote_types(self.dtype, torch.float32).itemsize
        return self.args.heads * (self.args.head_dim * self.args.state_dim + 1) * itemsize

    def received(self, name: str) -> tuple[int, int]:
        """Bytes that this rank receives, in the forward and in both passes."""
        degree = self.cp.degree
        if name == "whole" or degree <= 1:
            return 0, 0
        if name == "sequence_to_head":
            moved = sum(self.args.lengths) * (degree - 1) * self.row_bytes // degree**2
            return moved, 2 * moved
        paths = StatePasses(self.cp.layout).choose(self.state_bytes).paths
        rank = dist.get_rank()
        taken, given = (
            sum(move.rows for path in paths for move in getattr(path, way) if move.peer != rank)
            for way in ("receives", "sends")
        )
        return taken * self.state_bytes, (taken + given) * self.state_bytes


# ---- the table -----------------------------------------------------------------------------------


def print_table(args: argparse.Namespace, layer: Layer, times: dict[str, float]) -> None:
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    if first:
        print(
            f"{ranks} x {hardware(args.device)}, torch {torch.__version__}, hcp {hcp.__version__}, "
            f"{args.lengths} tokens, {args.heads} heads of {args.head_dim}, states of "
            f"{args.state_dim}, {args.dtype}"
        )
        print(f"{'scan':18} {'MiB f':>9} {'MiB f+b':>9} {'ms f+b':>9} {'bound':>6}")
    choice = layer.cp.scan.choose(
        args.heads, row_bytes=layer.row_bytes, state_bytes=layer.state_bytes
    )
    for name, seconds in times.items():
        forward, both = (slowest(count, layer.device) / MIB for count in layer.received(name))
        share = times["whole"] if name == "whole" else times["whole"] / ranks
        cells = {
            "scan": name,
            "MiB f": f"{forward:.3f}",
            "MiB f+b": f"{both:.3f}",
            "ms f+b": f"{seconds * 1e3:.2f}",
            "bound": f"{share / seconds:.3f}",
            "auto": "auto" if name == choice.used else "",
        }
        if first:
            widths = 18, -9, -9, -9, -6, 4
            padded = itertools.starmap(_padded, zip(cells.values(), widths, strict=True))
            print(" ".join(padded).rstrip(), flush=True)
            args.json.add(cells)


def _padded(cell: str, width: int) -> str:
    return f"{cell:<{width}}" if width > 0 else f"{cell:>{-width}}"


if __name__ == "__main__":
    sys.exit(main())
