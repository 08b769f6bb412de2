"""Compare ways in which images reach the ranks that compute their texts, and are encoded there.

    torchrun --nproc-per-node 4 benchmarks/bench_fields.py
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/bench_fields.py --device cpu

A batch of --sequences texts of --tokens tokens, each with 0 to --images images, of which a rank
loads its share. Each image takes --image-tokens tokens. An encoder of --layers layers turns its
pixel values into the rows of these tokens. Contestants:

    gather   without payloads: every rank gets all images, padded to as many as the rank with the
             most of them has loaded, and encodes those of its own sequences
    whole    hcp.Payload("whole"): the ranks of a sequence get its images, and each encodes them
    even     hcp.Payload("even"): each image goes to one rank of its sequence, which encodes it; the
             rows go to the ranks of their tokens

Columns, the largest of all ranks: images that a rank encodes; MiB of pixel values that it holds; ms
of a step (plan known; images moved, encoded, put into their rows, and all backward), the median of
--rounds rounds in which all take turns; and the time of "gather" over it.

Before anything is timed, the rows of all tokens and the encoder's gradient, summed over the ranks,
are compared with one rank's.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from datetime import timedelta
from functools import partial
from random import Random

import torch
import torch.distributed as dist
from common.flags import parser_of
from common.machine import hardware
from common.timing import by_turns, end_ranks, slowest, start_ranks, timed
from torch import Tensor, nn

import hcp
from hcp.step.handler import ContextParallelHandler

TIMEOUT = timedelta(seconds=60)
CONTESTANTS = ("gather", "whole", "even")
MIB = 2**20

Sample = dict[str, Tensor]


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, device="cuda", rounds=10, deadline=500.0)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4096, help="of the longest sequence")
    parser.add_argument("--images", type=int, default=8, help="most images of a sequence")
    parser.add_argument("--image-tokens", type=int, default=256, help="of an image")
    parser.add_argument("--pixels", type=int, default=2352, help="values of a token's patches")
    parser.add_argument("--hidden", type=int, default=1024, help="width of the encoder")
    parser.add_argument("--layers", type=int, default=8, help="of the encoder")
    parser.add_argument("--min-degree", type=int, help="ranks of a sequence (default: all)")
    return parser.parse_args()


# ---- the batch -----------------------------------------------------------------------------------


class Batch:
    """Texts with images, alike on every rank; rank i loads every one whose number is i modulo the
    ranks."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        r, draw = Random(1), torch.Generator().manual_seed(1)
        self.counts = [r.randint(0, args.images) for _ in range(args.sequences)]
        least = args.images * args.image_tokens
        self.lengths = [
            max(1, least, r.randint(args.tokens // 4, args.tokens)) for _ in range(args.sequences)
        ]
        self.pixels = [
            torch.randn(count, args.image_tokens, args.pixels, generator=draw)
            for count in self.counts
        ]
        """(images, tokens of an image, pixels) of each sequence."""
        ranks = dist.get_world_size()
        self.sources = [i % ranks for i in range(args.sequences)]
        most = max(*self.lengths, 2 * -(-sum(self.lengths) // ranks))
        self.plan = hcp.plan(
            self.lengths,
            ranks=ranks,
            max_tokens_per_rank=most,
            min_degree=args.min_degree or ranks,
        )

    def samples(self) -> list[Sample]:
        """Those that this rank has loaded."""
        rank = dist.get_rank()
        return [self._sample(i) for i, source in enumerate(self.sources) if source == rank]

    def _sample(self, i: int) -> Sample:
        """Images come first in their text. `place`: 1 more than the number of a token's row."""
        taken, place = self.counts[i] * self.args.image_tokens, torch.zeros(self.lengths[i])
        place[:taken] = torch.arange(1, taken + 1)
        return {
            "weight": torch.arange(1.0, self.lengths[i] + 1).to(self.device),
            "is_image": (place > 0).to(self.device),
            "place": place.long().to(self.device),
            "pixels": self.pixels[i].to(self.device),
        }

    def encoder(self) -> nn.Sequential:
        torch.manual_seed(2)
        widths = [self.args.pixels, *[self.args.hidden] * self.args.layers]
        layers = [
            layer
            for given, made in itertools.pairwise(widths)
            for layer in (nn.Linear(given, made, bias=False), nn.Tanh())
        ]
        return nn.Sequential(*layers).to(self.device)


class Contestant:
    """One way of a step. Calling it computes the step; then the encoder has gradients."""

    def __init__(self, name: str, batch: Batch, groups: hcp.ProcessGroups) -> None:
        self.name, self.batch, self.groups = name, batch, groups
        self.encoder = batch.encoder()
        self.samples = batch.samples()
        if name == "gather":
            self.samples = [
                {key: x for key, x in sample.items() if key != "pixels"} for sample in self.samples
            ]
            self.loaded = torch.cat([x["pixels"] for x in batch.samples()] or [self._none()])
        self.encoded, self.held_bytes = 0, 0

    def _none(self) -> Tensor:
        args = self.batch.args
        return torch.zeros(0, args.image_tokens, args.pixels, device=self.batch.device)

    def __call__(self) -> list[tuple[Tensor, ...]]:
        """Rows of the tokens of images, with their sequences and places, of each micro-batch."""
        self.encoder.zero_grad(set_to_none=True)
        self.encoded, self.held_bytes = 0, 0
        every = self._gathered() if self.name == "gather" else None
        fields = {} if every else {"pixels": self._rule()}
        batch = self.batch
        results: list[tuple[Tensor, ...]] = []
        for cp, local in hcp.dispatch(
            batch.plan, self.samples, batch.sources, self.groups, fields=fields
        ):
            if every is None:
                rows = self._of_payload(cp, local.pixels)
            else:
                rows = self._of_all(cp, every, local.place)
            taken = local.is_image.nonzero()[:, 0]
            (rows * local.weight[taken].unsqueeze(1)).sum().backward()
            sequences = torch.tensor(cp.layout.sequences, device=batch.device).repeat_interleave(
                cp.cu_seqlens.diff().long()
            )
            results.append((rows.detach(), sequences[taken], local.place[taken] - 1))
        return results

    def _rule(self) -> hcp.Payload:
        if self.name == "whole":
            return hcp.Payload("whole", tokens="is_image")
        return hcp.Payload("even", tokens="is_image")

    def _of_payload(self, cp: ContextParallelHandler, pixels: Tensor) -> Tensor:
        self._count(pixels)
        return cp.payloads["pixels"].to_tokens(self.encoder(pixels).flatten(0, 1))

    # ---- without payloads ----

    def _gathered(self) -> list[Tensor]:
        """The images of each sequence."""
        batch, ranks = self.batch, dist.get_world_size()
        by_rank = [
            [count for count, s in zip(batch.counts, batch.sources, strict=True) if s == rank]
            for rank in range(ranks)
        ]
        most = max(map(sum, by_rank))
        padded = self.loaded.new_zeros(most, *self.loaded.shape[1:])
        padded[: len(self.loaded)] = self.loaded
        whole = padded.new_empty(ranks, *padded.shape)
        dist.all_gather_into_tensor(whole.view(-1, *padded.shape[1:]), padded)
        self.held_bytes = whole.nbytes
        pieces = [
            iter(images[: sum(own)].split(own)) for images, own in zip(whole, by_rank, strict=True)
        ]
        return [next(pieces[source]) for source in batch.sources]

    def _of_all(self, cp: ContextParallelHandler, every: list[Tensor], place: Tensor) -> Tensor:
        pixels = torch.cat([self._none(), *(every[i] for i in cp.layout.sequences)])
        self.encoded += len(pixels)
        encoded = self.encoder(pixels).flatten(0, 1)
        per_image = self.batch.args.image_tokens
        counts = [self.batch.counts[i] * per_image for i in cp.layout.sequences]
        starts = torch.tensor([0, *counts], device=place.device).cumsum(0)[:-1]
        rows = starts.repeat_interleave(cp.cu_seqlens.diff().long()) + place - 1
        return encoded[rows[place > 0]]

    def _count(self, pixels: Tensor) -> None:
        self.encoded += len(pixels)
        self.held_bytes += pixels.nbytes


# ---- what it must give ---------------------------------------------------------------------------


def check(contestant: Contestant) -> None:
    """End the run unless rows and gradients are those of one rank."""
    batch, results = contestant.batch, contestant()
    alone, expected = batch.encoder(), {}
    for i, pixels in enumerate(batch.pixels):
        rows = alone(pixels.to(batch.device)).flatten(0, 1)
        weights = torch.arange(1.0, len(rows) + 1, device=batch.device)
        (rows * weights.unsqueeze(1)).sum().backward()
        expected[i] = rows.detach()
    seen = 0
    for rows, sequences, places in results:
        seen += len(rows)
        for i in sequences.unique().tolist():
            at = sequences == i
            expect(contestant, "rows", rows[at], expected[i][places[at]])
    total = torch.tensor(seen, device=batch.device)
    dist.all_reduce(total)
    if int(total) != sum(batch.counts) * batch.args.image_tokens:
        raise SystemExit(f"{contestant.name}: {int(total)} rows of images, expected all of them")
    for own, whole in zip(contestant.encoder.parameters(), alone.parameters(), strict=True):
        grad = torch.zeros_like(own) if own.grad is None else own.grad.clone()
        dist.all_reduce(grad)
        wanted = torch.zeros_like(whole) if whole.grad is None else whole.grad
        expect(contestant, "gradients", grad, wanted)


def expect(contestant: Contestant, what: str, found: Tensor, wanted: Tensor) -> None:
    apart = float((found - wanted).abs().max()) if found.numel() else 0.0
    limit = 1e-3 * max(1.0, float(wanted.abs().max()) if wanted.numel() else 1.0)
    if not apart <= limit:
        raise SystemExit(f"{contestant.name}: {what} are {apart:.1e} off, expected {limit:.1e}")


def main() -> int:
    args = arguments()
    device = start_ranks(args.device, args.deadline, TIMEOUT)
    groups = hcp.build_process_groups(timeout=TIMEOUT)
    batch = Batch(args, device)
    contestants = {name: Contestant(name, batch, groups) for name in CONTESTANTS}
    for contestant in contestants.values():
        check(contestant)
    times = by_turns(contestants, device, partial(timed, device=device), args.rounds)
    first = dist.get_rank() == 0
    if first:
        print(
            f"{dist.get_world_size()} x {hardware(args.device)}, torch {torch.__version__}, hcp "
            f"{hcp.__version__}, {sum(batch.counts)} images of {args.sequences} sequences"
        )
        print(f"{'':>8} {'images':>7} {'pixel MiB':>10} {'ms':>10} {'x time':>7}")
    for name, each in contestants.items():
        row = {
            "name": name,
            "images": int(slowest(each.encoded, device)),
            "pixel MiB": f"{slowest(each.held_bytes, device) / MIB:.2f}",
            "ms": f"{times[name] * 1e3:.2f}",
            "x time": f"{times['gather'] / times[name]:.2f}",
        }
        if first:
            print(
                f"{row['name']:>8} {row['images']:>7} {row['pixel MiB']:>10} {row['ms']:>10} "
                f"{row['x time']:>7}",
                flush=True,
            )
            args.json.add(row)
    groups.close()
    end_ranks()
    return 0


if __name__ == "__main__":
    sys.exit(main())
