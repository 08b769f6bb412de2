"""Random cases of attention on GPUs, each beside the formula in float64 on the whole sequences.

    torchrun --nproc-per-node 2 tests/cuda/fuzz_attention.py --cases 2000 [--seed 0] [--seconds 400]

Ranks of several processes share one GPU by sharing.py. As ranks of one process:

    python tests/cuda/fuzz_attention.py --ranks 4

A case draws the transport, the comm type, lengths, degrees, masks, windows, sinks, soft-capping,
dtypes, heads, head sizes and the backend. It goes on after a case that fails, and prints a table
last. Exit code 1: a case failed. `--only SEED` repeats one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from support import masks
from torch import Tensor

import hcp
from hcp.errors import HcpError

LENGTHS = 1, 1, 2, 2, 3, 5, 13, 64, 97, 129, 300, 777, 1024
HEADS = (1, 1), (4, 4), (4, 2), (6, 1), (6, 3), (8, 2), (5, 1)
SIZES = 8, 16, 32, 40, 64, 72, 96, 128, 192, 256
FAST_SIZES = 64, 128
"""Head sizes for backends that compile a kernel for each."""
WINDOWS = (-1, -1), (-1, -1), (-1, -1), (0, 0), (16, 0), (24, 5), (-1, 3), (200, -1)
MOST_ERROR = {"float64": 1e-10, "float32": 1e-4, "float16": 0.01, "bfloat16": 0.06}
"""Most that a result may be off, as a share of the largest expected, or of 1."""
DTYPES = "bfloat16", "bfloat16", "bfloat16", "float16", "float32", "float64"


@dataclass(frozen=True)
class Case:
    """What one seed draws, equal on every rank."""

    seed: int
    ranks: int
    transport: Any
    backend: str
    comm_type: Any
    lengths: tuple[int, ...]
    kinds: tuple[str, ...]
    """Of each sequence's mask, see ``support.masks``."""
    min_degree: int
    alignment: int
    window: tuple[int, int]
    causal: bool
    sinks: bool
    softcap: float
    dtype: str
    heads: tuple[int, int]
    size: int
    value_size: int

    @classmethod
    def draw(
        cls, seed: int, ranks: int, transports: tuple[str, ...], backends: tuple[str, ...]
    ) -> Case:
        r = Random(seed)
        dtype = r.choice(DTYPES)
        narrow = dtype in ("bfloat16", "float16")
        backend = r.choice(backends) if narrow else "torch"
        size = r.choice(SIZES if backend == "torch" else FAST_SIZES)
        lengths = tuple(r.choice(LENGTHS) for _ in range(r.randint(1, 6)))
        if r.random() < 0.15:
            lengths = tuple(r.choice((1, 2, 3)) for _ in lengths)
        masked = r.random() < 0.5
        kinds = tuple(r.choice(list(masks.KINDS)) if masked else "causal" for _ in lengths)
        return cls(
            seed,
            ranks,
            r.choice(transports),
            backend,
            r.choice(("p2p", "all_gather", "a2a", "auto")),
            lengths,
            kinds,
            r.randint(1, ranks),
            r.choice((1, 1, 8)),
            r.choice(WINDOWS),
            masked or r.random() < 0.8,
            r.random() < 0.25,
            20.0 if not narrow and r.random() < 0.1 else 0.0,
            dtype,
            r.choice(HEADS),
            size,
            size if r.random() < 0.8 or backend != "torch" else r.choice(SIZES),
        )

    def plan(self) -> hcp.Plan:
        given = [masks.KINDS[kind](Random(self.seed + i), n) for i, (kind, n) in self._sequences]
        return hcp.plan(
            self.lengths,
            ranks=self.ranks,
            max_tokens_per_rank=sum(self.lengths) + 8 * self.ranks,
            min_degree=self.min_degree,
            alignment=self.alignment,
            masks=given if any(given) else None,
        )

    @property
    def _sequences(self) -> Iterator[tuple[int, tuple[str, int]]]:
        return enumerate(zip(self.kinds, self.lengths, strict=True))

    def seen(self, plan: hcp.Plan, sequence: int) -> Tensor:
        """bool (n, n): whether each token sees each. A window counts positions."""
        length = self.lengths[sequence]
        mask = next(iter(plan.masks.values()))[sequence] if plan.masks else None
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        whole = causal if self.causal else torch.ones_like(causal)
        seen = whole if not plan.masks else causal if mask is None else mask.dense()
        at = torch.tensor(range(length) if mask is None else mask.positions)
        ahead = at - at[:, None]
        left, right = self.window
        if left >= 0:
            seen = seen & (ahead >= -left)
        return seen & (ahead <= right) if right >= 0 else seen

    def rows(self, sequence: int) -> list[Tensor]:
        """Queries, keys, values, and gradients of outputs and of log-sum-exps, on the GPU."""
        generator = torch.Generator("cuda").manual_seed(self.seed * 64 + sequence)
        (heads, groups), length = self.heads, self.lengths[sequence]
        keys = (groups, self.size), (groups, self.value_size)
        shapes = (heads, self.size), *keys, (heads, self.value_size)
        drawn = [
            torch.randn(length, *shape, device="cuda", generator=generator).to(
                getattr(torch, self.dtype)
            )
            for shape in shapes
        ]
        return [*drawn, torch.randn(length, heads, device="cuda", generator=generator)]

    def sink_logits(self) -> Tensor | None:
        generator = torch.Generator("cuda").manual_seed(self.seed)
        drawn = torch.randn(self.heads[0], device="cuda", generator=generator)
        wide = torch.float64 if self.dtype == "float64" else torch.float32
        return drawn.to(wide) if self.sinks else None


def formula(case: Case, seen: Tensor, rows: list[Tensor]) -> list[Tensor]:
    """Output, log-sum-exp and gradients of queries, keys, values and sinks, in float64."""
    query, key, value = (x.double().requires_grad_() for x in rows[:3])
    sinks = case.sink_logits()
    sinks = None if sinks is None else sinks.double().requires_grad_()
    per_key = case.heads[0] // case.heads[1]
    keys, values = (x.repeat_interleave(per_key, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * case.size**-0.5
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~seen.to(scores.device), -torch.inf)
    lse = scores.logsumexp(-1)
    some = ~lse.isinf()
    if sinks is not None:
        lse = torch.logaddexp(lse.masked_fill(~some, -1e30), sinks[:, None])
        some = torch.ones_like(some)
    weights = (scores - lse.masked_fill(~some, 0)[..., None]).exp()
    out = torch.einsum("hqk,khe->qhe", weights, values)
    loss = (out * rows[3]).sum() + (lse.masked_fill(~some, 0).t() * rows[4]).sum()
    leaves = [query, key, value, *([] if sinks is None else [sinks])]
    return [out.detach(), lse.detach().t(), *torch.autograd.grad(loss, leaves)]


RESULTS = "output", "log-sum-exp", "queries' gradient", "keys' gradient", "values' gradient"


def check(case: Case, groups: Any) -> Tensor | None:
    """Compare this rank's rows; its share of the sinks' gradient.

    Raises AssertionError that names the result, its sequence and its error.
    """
    plan = case.plan()
    sinks = case.sink_logits()
    sinks = None if sinks is None else sinks.requires_grad_()
    kind = hcp.get_cp_handler_cls(case.backend)
    for micro_batch in range(plan.micro_batch_count):
        cp = kind(plan, micro_batch, groups.transport, comm_types=[case.comm_type])
        whole = {i: case.rows(i) for i in cp.layout.sequences}
        cuts = [(s.sequence, slice(s.start, s.start + s.rows)) for s in cp.layout.spans]
        own = [_cut(case, n, whole, cuts, cp.layout.padding) for n in range(5)]
        leaves = [x.requires_grad_() for x in own[:3]]
        out, lse = cp.attention(
            *leaves,
            causal=case.causal,
            window_size=case.window,
            sinks=sinks,
            softcap=case.softcap,
            return_lse=True,
        )
        finite = lse.masked_fill(lse.isinf(), 0)
        ((out * own[3]).sum(dtype=torch.float64) + (finite * own[4]).sum()).backward()
        answers = {i: formula(case, case.seen(plan, i), rows) for i, rows in whole.items()}
        found = out.detach(), lse.detach(), *map(_grad_or_zero, leaves)
        for n, (name, rows) in enumerate(zip(RESULTS, found, strict=True)):
            _compare(case, name, rows, cuts, {i: answer[n] for i, answer in answers.items()})
    return None if sinks is None else _grad_or_zero(sinks)


def _cut(
    case: Case, n: int, whole: dict[int, list[Tensor]], cuts: list[tuple[int, slice]], padding: int
) -> Tensor:
    like = case.rows(0)[n][:0]
    pad = like.new_zeros(padding, *like.shape[1:])
    return torch.cat([like, *(whole[i][n][part] for i, part in cuts), pad])


def _grad_or_zero(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _compare(
    case: Case, name: str, rows: Tensor, cuts: list[tuple[int, slice]], want: dict[int, Tensor]
) -> None:
    first = 0
    for i, part in cuts:
        found, expected = rows[first : first + part.stop - part.start].double(), want[i][part]
        first += len(found)
        blind = expected.isinf()
        assert torch.equal(found.isinf(), blind), f"{name} of sequence {i}: infinite elsewhere"
        error = (found - expected).masked_fill(blind, 0).abs().max()
        largest = max(1.0, float(want[i].masked_fill(want[i].isinf(), 0).abs().max()))
        assert error <= MOST_ERROR[case.dtype] * largest, (
            f"{name} of sequence {i} [{part.start}, {part.stop}): off by {float(error):.2e}, "
            f"expected <= {MOST_ERROR[case.dtype] * largest:.2e}"
        )


def check_sinks(case: Case, shares: list[Tensor | None]) -> None:
    """Compare the sum of the ranks' gradients of the sinks."""
    if not case.sinks:
        return
    plan = case.plan()
    each = range(len(case.lengths))
    want = torch.stack([formula(case, case.seen(plan, i), case.rows(i))[5] for i in each]).sum(0)
    found = torch.stack([share.double() for share in shares if share is not None]).sum(0).cuda()
    error = float((found - want).abs().max()) / max(1.0, float(want.abs().max()))
    assert error <= MOST_ERROR[case.dtype], f"sinks' gradient: off by {error:.2e}"


# ---- ranks ---------------------------------------------------------------------------------------


class Threads:
    """Ranks of one process on one GPU."""

    first = True
    """Whether this process prints."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.transports = "sent", "read"

    def run(self, case: Case) -> str | None:
        """What is wrong. None: nothing."""
        try:
            shares = hcp.loopback(
                self.ranks,
                lambda groups: check(case, groups),
                device="cuda",
                sharing=case.transport == "read",
            )
            check_sinks(case, shares)
        except Exception as error:
            return _told(error)
        return None


class Gpus:
    """A rank for each GPU."""

    def __init__(self) -> None:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
        self.ranks = dist.get_world_size()
        self.first = dist.get_rank() == 0
        self.transports = "peer", "nccl", "torch"
        self._tell = dist.new_group(backend="gloo", timeout=timedelta(seconds=300))
        self._groups: dict[str, hcp.ProcessGroups] = {}

    def run(self, case: Case) -> str | None:
        told, share = None, None
        try:
            share = check(case, self._groups_by(case.transport))
            torch.cuda.synchronize()
        except Exception as error:
            told = _told(error)
        found: list[Any] = [None] * self.ranks
        own = None if share is None else share.cpu()
        dist.all_gather_object(found, (told, own), group=self._tell)
        texts = [f"rank {i}: {text}" for i, (text, _) in enumerate(found) if text]
        if texts:
            self._begin_anew(case.transport)
            return min(
                texts, key=lambda text: "HcpError" in text
            )  # the cause before what it led to
        try:
            check_sinks(case, [share for _, share in found])
        except AssertionError as error:
            return _told(error)
        return None

    def _groups_by(self, transport: Any) -> hcp.ProcessGroups:
        if transport not in self._groups:
            self._groups[transport] = hcp.build_process_groups(
                transport=transport,
                timeout=timedelta(seconds=20),
            )
        return self._groups[transport]

    def _begin_anew(self, transport: str) -> None:
        """Close the groups of a case that failed, once no device reads from another any more."""
        groups = self._groups.pop(transport, None)
        with suppress(RuntimeError):  # the exchange that this rank's device waited for
            torch.cuda.synchronize()
        dist.barrier(group=self._tell)
        if groups is not None:
            with suppress(HcpError):
                groups.close()


def _told(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{place.filename.rpartition('/')[2]}:{place.lineno}"
    return f"{type(error).__name__} at {where}: {' '.join(str(error).split())[:300]}"


# ---- the run -------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=400, help="begin no case after these")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--only", type=int, help="repeat the case of this seed")
    parser.add_argument("--ranks", type=int, help="ranks of one process, without torchrun")
    parser.add_argument("--backends", nargs="+", default=["torch", "torch", "auto"])
    args = parser.parse_args()
    domain: Threads | Gpus = Threads(args.ranks) if args.ranks else Gpus()
    seeds = range(args.seed, args.seed + args.cases) if args.only is None else [args.only]
    begun, done, failed = time.monotonic(), Counter[str](), []
    for seed in seeds:
        late = torch.tensor(time.monotonic() - begun > args.seconds)
        if isinstance(domain, Gpus):
            dist.broadcast(late, 0, group=domain._tell)
        if late:
            break
        case = Case.draw(seed, domain.ranks, domain.transports, tuple(args.backends))
        wrong = domain.run(case)
        masked = "masks" if {*case.kinds} != {"causal"} else "causal" if case.causal else "full"
        done[f"{case.transport:5} {case.backend:12} {masked}"] += 1
        if wrong is not None:
            failed.append(case)
            if domain.first:
                print(f"BAD {wrong}\n    {case}", flush=True)
    if domain.first:
        for name, number in sorted(done.items()):
            print(f"{number:5} {name}")
        print(f"{done.total()} cases in {time.monotonic() - begun:.0f} s, {len(failed)} failed")
    if isinstance(domain, Gpus):
        dist.destroy_process_group()
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
