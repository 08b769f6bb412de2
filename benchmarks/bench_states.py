"""A recurrent layer over several ranks: states that travel, against rows exchanged for heads.

    torchrun --nproc-per-node 8 benchmarks/bench_states.py [--layer delta]
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/bench_states.py --device cpu

Layers, of --heads heads of --head-dim elements:

    mamba   the scan of Mamba-2 in PyTorch, in chunks of --chunk rows: states of --state-dim, and B
            and C of --groups groups of heads
    delta   a gated delta net, with keys of --state-dim: by the package fla on GPUs
            (chunk_gated_delta_rule), by Transformers' function in PyTorch on CPUs

A pack of --lengths tokens lies on all ranks. Contestants:

    whole              one rank computes the whole pack, and nothing travels
    pass_states        each rank computes its rows, and `cp.scan.pass_states` exchanges states
    sequence_to_head   each rank computes whole sequences of some heads, and rows travel; left out
                       where ranks cannot share the heads
    fla                fla's own CP over the same kernel (`build_cp_context`), contiguous rows; with
                       --layer delta on GPUs

Columns: MiB that a rank receives in the forward and in both passes, by the formulas below; the most
MiB that the passes allocate at once beyond the inputs; milliseconds of the forward and of both
passes; `ideal f` and `ideal`, the part of these times that a rank's even share of `whole` takes
(1.000: what travels is free, and ranks share the work evenly); `cost`, by which "auto" chooses: MiB
that a link carries in the time that it expects of a forward beyond that share. `auto` marks what it
takes. Each is the largest of all ranks; times are the median of rounds in which all take turns.
--passes forward leaves the backward out, as where fla refuses it (Hopper with Triton from 3.4 to
before 3.7.1).

A rank receives the states and decays of the spans before its last, of each sequence (in rounds
where that is less), and in the backward the gradients of as many as others took of it; or
(d - 1) / d^2 of the rows, there and back, in each pass.

Before anything is timed, outputs and gradients are compared with those of `whole`. A contestant of
others that refuses or is wrong is named, with the error, and left out. In these first calls fla has
Triton tune its kernels, for each size of heads and values: see peers/tuning.py. --contestants
leaves some out, and so what is tuned for them alone.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common.flags import add_sizes, filled, parser_of
from common.layers import check
from common.machine import hardware, package_version
from common.memory import peak_bytes
from common.timing import by_turns, end_ranks, slowest, start_ranks, timed
from peers.tuning import compile_in_threads
from torch import Tensor
from torch.nn import functional as F

import hcp
from hcp._words import ScanType
from hcp.attention.scan_types import ScanSizes, prices
from hcp.exchange.states import StatePasses
from hcp.integrations.recurrent import (
    delta_rule,
    delta_work,
    mamba_work,
    scan_mamba,
    takes_packs,
)

# T rows, S rows of the pack, H heads, G groups, P head size, N state size, c chunks of q rows.

TIMEOUT = timedelta(seconds=60)
DEFAULTS = {
    "lengths": ([700, 40, 4, 280], [49_152, 8_192, 8_000, 192]),
    "heads": (4, 64),
    "groups": (2, 8),
    "head_dim": (16, 64),
    "state_dim": (16, 128),
    "chunk": (32, 128),
    "dtype": ("float32", "bfloat16"),
    "transport": ("torch", "auto"),
}
"""On a CPU, on GPUs."""
WHOLE, FLA = "whole", "fla"
STATES: ScanType = "pass_states"
HEADS: ScanType = "sequence_to_head"
WAYS: tuple[ScanType, ...] = (STATES, HEADS)
MIB = 2**20


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, device="cuda", rounds=5, deadline=590)
    whats = {
        "heads": "of the layer",
        "groups": "of heads, which write and read alike",
        "head-dim": "elements of a head",
        "state-dim": "elements of a state for each of a head's",
        "chunk": "rows that one matrix product covers",
    }
    add_sizes(parser, whats, DEFAULTS)
    parser.add_argument("--layer", choices=LAYERS, default="mamba")
    parser.add_argument("--passes", choices=("both", "forward"), default="both")
    parser.add_argument(
        "--contestants",
        nargs="*",
        choices=(*WAYS, FLA),
        default=(*WAYS, FLA),
        help="beside whole (all)",
    )
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of each sequence")
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16"))
    parser.add_argument("--transport", help="(CPU: torch, CUDA: auto)")
    return filled(parser.parse_args(), DEFAULTS)


def main() -> int:
    args = arguments()
    device = start_ranks(args.device, args.deadline, TIMEOUT)
    groups = hcp.build_process_groups(transport=args.transport, timeout=TIMEOUT)
    layer = LAYERS[args.layer](args, groups, device)
    begun = time.perf_counter()
    passes = layer.passes(args.passes)
    names = layer.checked(passes)
    layer.tell(f"the first calls took {slowest(time.perf_counter() - begun, device):.0f} s")
    times = {}
    for both in passes:
        steps = {name: partial(layer.results, name, both) for name in names}
        found = by_turns(steps, device, partial(timed, device=device), args.rounds)
        times[both] = {name: slowest(time, device) for name, time in found.items()}
    print_table(args, layer, times)
    groups.close()
    end_ranks()
    return 0


# ---- the scan ------------------------------------------------------------------------------------


def scan(x: Tensor, logs: Tensor, b: Tensor, c: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Scan one sequence x (T, H, P), whose groups of heads write b and read c (T, G, N), from
    zeros: (T, H, P), and the state (H, P, N) at its end."""
    rows = len(x)
    b, c = (y.repeat_interleave(x.shape[1] // y.shape[1], 1) for y in (b, c))

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


# ---- layers --------------------------------------------------------------------------------------


class Layer:
    """Inputs of the whole pack, alike on every rank, and the contestants."""

    NAMES: tuple[str, ...] = ()
    """Of the inputs."""
    row_work, exchanges = 0, 2

    def __init__(
        self, args: argparse.Namespace, groups: hcp.ProcessGroups, device: torch.device
    ) -> None:
        self.args, self.device = args, device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.dtype = getattr(torch, args.dtype)
        self.rows = sum(args.lengths)
        limits = {"ranks": self.ranks, "max_tokens_per_rank": self.rows, "min_degree": self.ranks}
        plan = hcp.plan(args.lengths, **limits)
        if len(plan.micro_batches) != 1:
            raise SystemExit(f"{len(plan.micro_batches)} micro-batches, expected one")
        self.cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
        self.by = {
            way: hcp.ContextParallelHandler(plan, 0, groups.transport, scan_type=way)
            for way in WAYS
        }
        self.functions: dict[str, Callable[..., Tensor]] = {
            WHOLE: self.whole,
            STATES: self.by_states,
        }
        if args.heads >= self.ranks:
            self.functions[HEADS] = self.by_heads
        self.inputs = self.drawn(torch.Generator(device).manual_seed(1))
        for name in {*self.functions} - {WHOLE, *args.contestants}:
            del self.functions[name]
        """The last one is the gradient of the output."""
        layout = self.cp.layout
        starts = torch.tensor([0, *args.lengths]).cumsum(0)[list(layout.sequences)]
        starts = starts.repeat_interleave(layout.cu_seqlens.diff())
        self.local_rows = (starts + layout.positions).to(device)

    def drawn(self, generator: torch.Generator) -> list[Tensor]:
        raise NotImplementedError

    def whole(self, *inputs: Tensor) -> Tensor:
        raise NotImplementedError

    def by_states(self, *inputs: Tensor) -> Tensor:
        raise NotImplementedError

    def by_heads(self, *inputs: Tensor) -> Tensor:
        raise NotImplementedError

    def randn(self, generator: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(self.rows, *shape, generator=generator, device=self.device)

    def rows_of(self, name: str) -> Tensor | slice:
        """This rank's rows of the pack."""
        if name == FLA:
            own = self.rows // self.ranks
            return slice(self.rank * own, (self.rank + 1) * own)
        return slice(None) if name == WHOLE else self.local_rows

    @functools.cached_property
    def local_inputs(self) -> list[Tensor]:
        """Not gathered in what is timed: a rank of a trainer has its rows."""
        return [y[self.local_rows] for y in self.inputs]

    def inputs_of(self, name: str) -> list[Tensor]:
        if name in WAYS:
            return self.local_inputs
        return [y[self.rows_of(name)] for y in self.inputs]

    def results(self, name: str, both: bool) -> list[Tensor]:
        """Output of this rank's rows, and gradients where ``both`` passes run."""
        *leaves, grad = self.inputs_of(name)
        leaves = [y.detach().requires_grad_() for y in leaves]
        out = self.functions[name](*leaves)
        if not both:
            return [out.detach()]
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]

    def passes(self, asked: str) -> list[bool]:
        """Whether the backward runs too, in each table; told where it cannot."""
        if asked == "both":
            try:
                self.results(WHOLE, True)
                return [False, True]
            except (NotImplementedError, RuntimeError, ValueError, AssertionError) as error:
                self.tell(f"without the backward: {type(error).__name__}: {str(error)[:300]}")
        return [False]

    def checked(self, passes: Sequence[bool]) -> list[str]:
        """Return the contestants that give the results of one rank, to rounding. End the run where
        hcp's do not."""
        both = passes[-1]
        whole = self.results(WHOLE, both)
        names = ("output", *(f"gradient of {name}" for name in self.NAMES))[: len(whole)]
        largest = [float(y.abs().max()) for y in whole]
        found = [WHOLE]
        for name in self.functions:
            if name != WHOLE and self._is_right(name, both, names, whole, largest):
                found.append(name)
        return found

    def _is_right(
        self,
        name: str,
        both: bool,
        names: Sequence[str],
        whole: Sequence[Tensor],
        largest: Sequence[float],
    ) -> bool:
        said = ""
        try:
            wanted = [y[self.rows_of(name)] for y in whole]
            mine = self.results(name, both)
            mine = [y.to(other.dtype) for y, other in zip(mine, wanted, strict=True)]
            check(name, names, mine, wanted, largest, self.dtype)
        except (Exception, SystemExit) as error:
            if name != FLA:
                raise
            said = f"{type(error).__name__}: {str(error)[:300]}"
        if not slowest(float(bool(said)), self.device):
            return True
        self.tell(f"{name}: left out, {said or 'it failed on another rank'}")
        return False

    def tell(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    @property
    def row_bytes(self) -> int:
        """Of a row of all heads, to whole sequences and back."""
        raise NotImplementedError

    @property
    def state_bytes(self) -> int:
        """Of one span's state, and its decay or transition."""
        raise NotImplementedError

    def costs(self) -> dict[str, int]:
        """What "auto" goes by."""
        return dict(zip(WAYS, prices(self.cp.layout, self.sizes), strict=True))

    def choice(self) -> str:
        return self.cp.scan.choose(**self.sizes._asdict()).used

    @property
    def sizes(self) -> ScanSizes:
        sizes = self.row_bytes, self.state_bytes, self.exchanges, self.row_work
        return ScanSizes(self.args.heads, *sizes)

    def received(self, name: str) -> tuple[int, int] | None:
        """Bytes that this rank receives, in the forward and in both passes; None: not known."""
        degree = self.cp.degree
        if name == FLA:
            return None
        if name == WHOLE or degree <= 1:
            return 0, 0
        if name == HEADS:
            moved = self.rows * (degree - 1) * self.row_bytes // degree**2
            return moved, 2 * moved
        paths = StatePasses(self.cp.layout, self.device).choose(self.state_bytes).paths
        taken, given = (
            sum(
                move.rows for path in paths for move in getattr(path, way) if move.peer != self.rank
            )
            for way in ("receives", "sends")
        )
        return taken * self.state_bytes, (taken + given) * self.state_bytes

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


class Mamba(Layer):
    NAMES = ("x", "decays", "B", "C")

    def drawn(self, generator: torch.Generator) -> list[Tensor]:
        args = self.args
        heads, scale = args.heads, args.state_dim**-0.5
        x, grad = (self.randn(generator, heads, args.head_dim) for _ in range(2))
        logs = -self.randn(generator, heads).sigmoid() / 16
        b, c = (self.randn(generator, args.groups, args.state_dim) * scale for _ in range(2))
        return [y.to(self.dtype) for y in (x, logs, b, c, grad)]

    def whole(self, *inputs: Tensor) -> Tensor:
        return self._sequences(self.args.lengths, *inputs)

    def by_states(self, *inputs: Tensor) -> Tensor:
        x, logs, b, c = inputs

        def spans_of(spans: list[slice]) -> tuple[Tensor, Tensor]:
            chunk = self.args.chunk
            scans = [scan(x[span], logs[span], b[span], c[span], chunk) for span in spans]
            outs, states = zip(*scans, strict=True)
            return torch.cat(outs), torch.stack(states)

        return scan_mamba(self.cp, x, logs.to(self.wide), c.to(self.wide), spans_of)

    def by_heads(self, *inputs: Tensor) -> Tensor:
        x, logs, b, c = inputs
        b, c = (y.repeat_interleave(x.shape[1] // y.shape[1], 1) for y in (b, c))
        mine = self.cp.whole.sequence_to_head(torch.cat([x, b, c, logs[..., None]], 2))
        x, b, c, rate = mine.split([x.shape[2], b.shape[2], c.shape[2], 1], 2)
        out = self._sequences(self.cp.layout.lengths, x, rate[..., 0], b, c)
        return self.cp.whole.head_to_sequence(out.to(self.dtype), self.args.heads)

    def _sequences(self, lengths: Sequence[int], *inputs: Tensor) -> Tensor:
        parts = zip(*(torch.split(y, list(lengths)) for y in inputs), strict=True)
        chunk = self.args.chunk
        return torch.cat([scan(x, logs, b, c, chunk)[0] for x, logs, b, c in parts])

    @property
    def row_bytes(self) -> int:
        sizes = 2 * self.args.head_dim + 2 * self.args.state_dim + 1
        return int(self.args.heads * sizes * self.dtype.itemsize)

    @property
    def state_bytes(self) -> int:
        size = self.args.head_dim * self.args.state_dim + 1
        return int(self.args.heads * size * self.wide.itemsize)

    @property
    def row_work(self) -> int:  # type: ignore[override]
        return mamba_work(self.args.heads, self.args.head_dim, self.args.state_dim)


class Delta(Layer):
    NAMES = ("queries", "keys", "values", "decays", "betas")
    exchanges = 3

    def drawn(self, generator: torch.Generator) -> list[Tensor]:
        args = self.args
        self.bounds = torch.tensor([0, *args.lengths]).cumsum(0).to(self.device)
        self.rule = self._rule()
        heads = args.heads
        query, key = (self.randn(generator, heads, args.state_dim) for _ in range(2))
        value, grad = (self.randn(generator, heads, args.head_dim) for _ in range(2))
        decays = F.logsigmoid(self.randn(generator, heads) + 3).to(self.wide)
        betas = self.randn(generator, heads).sigmoid()
        query, key = (F.normalize(y, dim=-1) for y in (query, key))
        given = [y.to(self.dtype) for y in (query, key, value, betas, grad)]
        return [*given[:3], decays, *given[3:]]

    def _rule(self) -> Callable[..., tuple[Tensor, Any]]:
        if self.device.type == "cpu":
            found = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
            rule: Callable[..., tuple[Tensor, Any]] = found.torch_chunk_gated_delta_rule
            return rule
        self.tell(compile_in_threads(self.ranks))
        rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        if self.rows % self.ranks:
            self.tell(f"without {FLA}: {self.rows} tokens, expected a multiple of {self.ranks}")
            return rule
        try:
            build = importlib.import_module("fla.ops.cp").build_cp_context
            context = build(self.bounds, dist.group.WORLD, cu_seqlens_cpu=self.bounds.cpu())
        except Exception as error:  # the package checks drivers as it is imported
            self.tell(f"without {FLA}: {type(error).__name__}: {str(error)[:300]}")
        else:
            self.functions[FLA] = partial(self._called, cp_context=context)
        return rule

    def _called(self, *inputs: Tensor, **options: Any) -> Tensor:
        out: Tensor = self.rule(*(y[None] for y in inputs), **options)[0]
        return out[0]

    def whole(self, *inputs: Tensor) -> Tensor:
        if takes_packs(self.rule):
            return self._called(*inputs, cu_seqlens=self.bounds)
        spans = zip(*(torch.split(y, self.args.lengths) for y in inputs), strict=True)
        return torch.cat([self._called(*span) for span in spans])

    def by_states(self, *inputs: Tensor) -> Tensor:
        return self._by(STATES, *inputs)

    def by_heads(self, *inputs: Tensor) -> Tensor:
        return self._by(HEADS, *inputs)

    def _by(
        self, way: ScanType, query: Tensor, key: Tensor, value: Tensor, *gates: Tensor
    ) -> Tensor:
        named = dict(zip(("g", "beta"), gates, strict=True))
        return delta_rule(self.by[way], self.rule, query, key, value, named)

    @property
    def row_bytes(self) -> int:
        sizes = 2 * self.args.head_dim + 2 * self.args.state_dim
        gates = self.dtype.itemsize + self.wide.itemsize
        return int(self.args.heads * (sizes * self.dtype.itemsize + gates))

    @property
    def state_bytes(self) -> int:
        keys = self.args.state_dim
        return int(self.args.heads * keys * (keys + self.args.head_dim) * self.wide.itemsize)

    @property
    def row_work(self) -> int:  # type: ignore[override]
        sizes = self.args.heads, self.args.state_dim, self.args.head_dim
        return delta_work(*sizes, self.dtype.itemsize)


LAYERS: dict[str, type[Layer]] = {"mamba": Mamba, "delta": Delta}


# ---- the table -----------------------------------------------------------------------------------

WIDTHS = {
    "scan": 18,
    "MiB f": -9,
    "MiB f+b": -9,
    "peak MiB": -9,
    "ms f": -9,
    "ms f+b": -9,
    "ideal f": -7,
    "ideal": -6,
    "cost": -9,
    "auto": 4,
}


def print_table(
    args: argparse.Namespace, layer: Layer, times: dict[bool, dict[str, float]]
) -> None:
    versions = [f"{name} {package_version(name)}" for name in ("flash-linear-attention", "triton")]
    beside = f", {', '.join(versions)}" if args.layer == "delta" and args.device == "cuda" else ""
    layer.tell(
        f"{layer.ranks} x {hardware(args.device)}, torch {torch.__version__}, hcp "
        f"{hcp.__version__}{beside}, layer {args.layer}, {args.lengths} tokens, {args.heads} heads "
        f"of {args.head_dim}, states of {args.state_dim}, {args.dtype}"
    )
    names = [name for name in WIDTHS if name != "auto"]
    layer.tell(_line(dict(zip(names, names, strict=True))))
    choice, costs = layer.choice(), layer.costs()
    for name in times[False]:
        moved = layer.received(name)
        sent = [None, None] if moved is None else [slowest(x, layer.device) / MIB for x in moved]
        cells = {"scan": name, "MiB f": _number(sent[0], 3), "MiB f+b": _number(sent[1], 3)}
        peak = peak_bytes(partial(layer.results, name, True in times), layer.device)
        cells["peak MiB"] = _number(slowest(peak, layer.device) / MIB, 1)
        for both, what in ((False, ("ms f", "ideal f")), (True, ("ms f+b", "ideal"))):
            seconds = times[both][name] if both in times else None
            whole = times[both][WHOLE] if both in times else 0.0
            share = whole if name == WHOLE else whole / layer.ranks
            cells[what[0]] = _number(None if seconds is None else seconds * 1e3, 2)
            cells[what[1]] = _number(None if seconds is None else share / seconds, 3)
        cells["cost"] = _number(costs[name] / MIB if name in costs else None, 1)
        cells["auto"] = "auto" if name == choice else ""
        layer.tell(_line(cells))
        if layer.rank == 0:
            args.json.add(cells)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _line(cells: dict[str, str]) -> str:
    padded = itertools.starmap(_padded, ((cells.get(name, ""), n) for name, n in WIDTHS.items()))
    return " ".join(padded).rstrip()


def _padded(cell: str, width: int) -> str:
    return f"{cell:<{width}}" if width > 0 else f"{cell:>{-width}}"


if __name__ == "__main__":
    sys.exit(main())
