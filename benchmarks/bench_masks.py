"""Compare how evenly ranks share attention under masks: hcp's cuts, zigzag, and equal chunks dealt
to the least loaded rank; what planning by pairs brings; and attention of such packs on GPUs.

    python benchmarks/bench_masks.py [--ranks 8 16 32] [--packs 20]
    python benchmarks/bench_masks.py --plans               batches of masked sequences, planned
    torchrun --nproc-per-node 8 benchmarks/bench_masks.py --time --device cuda [--peers magi]

The masks are those of MagiAttention's benchmark of its dispatch solver (exps/dist_attn of
SandAI-org/MagiAttention): documents whose lengths follow its published distributions, packed to
8,192 tokens a rank; "short" up to 128Ki tokens in all, "long" beyond.

Columns, medians and the worst over --packs draws:
  zigzag     pairs of the busiest rank over the mean, under zigzag chunks
  dealt      the same for chunks of --chunk tokens, the heaviest first to the least loaded rank that
             has room: what MagiAttention's solver does, written anew from its description
  hcp        the same for the cuts of hcp.plan(masks=)
  rows       keys that the ranks of hcp's cuts fetch under all_gather, over all keys of the others
  pieces     most runs of tokens on a rank
  ms         milliseconds to plan with masks, cuts included

With --plans: makespan over lower_bound by the pairs of the masks, for plans by pairs and for
plans that price every sequence as causal.

With --time: attention of --heads heads is computed forward and backward, by hcp and by
MagiAttention where it is installed (peers/magi.py), on --tokens tokens a rank. The first four masks
are those of MagiAttention's benchmark of its whole attention; the lengths of documents follow that
benchmark, which splits what is longer than a quarter of the pack. hcp plans the parts of a pack
that do not see each other as sequences, by the cost of attention alone, at the rates that the run
measures, with up to --room times the mean rows on a rank. Each contestant's output and gradients
are compared with the formula before it is timed. Columns:
  rows       of the rank that has the most, over the mean
  ms         mean over the packs of the slowest rank's, of which each is the median of --rounds
  TFLOP/s    4 operations for each pair, head and element of a head forward, 2.5 times as many
             backward, over the time: of both passes less the forward's
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from common.flags import JsonFile, end_after, parser_of
from common.machine import planner_line
from common.masked import time_masks

import hcp
from hcp import Mask
from hcp.exchange.layout import Layout
from hcp.exchange.tables import Schedule, ScheduleHeader, schedule_words
from hcp.planning.mask import CAUSAL, Slice
from hcp.planning.plan import lower_bound
from hcp.tools.check import check_plan

SHORT = {
    (1, 256): 766,
    (256, 512): 1651,
    (512, 768): 1246,
    (768, 1024): 972,
    (1024, 1536): 1324,
    (1536, 2048): 927,
    (2048, 2560): 720,
    (2560, 3072): 519,
    (3072, 3584): 379,
    (3584, 4096): 264,
    (4096, 5120): 380,
    (5120, 6144): 245,
    (6144, 7168): 145,
    (7168, 8192): 97,
    (8192, 10240): 122,
    (10240, 15360): 128,
    (15360, 20480): 51,
    (20480, 65536): 64,
}
"""Weights of document lengths for packs of up to 128Ki tokens."""
LONG = {
    (1, 2048): 16,
    (2048, 4096): 5,
    (4096, 8192): 4,
    (8192, 16384): 6,
    (16384, 32768): 8,
    (32768, 65536): 21,
    (65536, 131072): 40,
    (131072, 262144): 20,
    (262144, 524288): 5,
    (524288, 1048576): 4,
    (1048576, 2097152): 1,
    (2097152, 4194304): 1,
}
"""The same for longer packs."""
SPLIT = {
    (0, 10): 30_254,
    (11, 50): 391_188,
    (51, 100): 699_596,
    (101, 200): 1_377_757,
    (201, 500): 3_794_735,
    (501, 1024): 3_316_785,
    (1025, 2048): 2_106_566,
    (2049, 4096): 988_525,
    (4097, 8192): 410_002,
    (8193, 16384): 173_574,
    (16385, 32768): 115_007,
    (32769, 65536): 18_428,
    (65537, 131072): 22_513,
    (131073, 196608): 18_284,
}
"""Numbers of documents, by length, in MagiAttention's benchmark of its whole attention."""


class Draw:
    """Lengths of documents that fill a pack."""

    def __init__(self, r: Random, tokens: int) -> None:
        self.r, self.tokens = r, tokens
        self._weights = LONG if tokens > 131_072 else SHORT

    def one(self, most: int) -> int:
        (low, high), *_ = self.r.choices([*self._weights], [*self._weights.values()])
        return min(most, self.r.randint(low, high))

    def documents(self) -> list[int]:
        lengths: list[int] = []
        left = self.tokens
        while left:
            lengths.append(self.one(left))
            left -= lengths[-1]
        return lengths


class SplitDraw(Draw):
    """Lengths in the middle of their ranges, in pieces of up to a quarter of the pack."""

    def __init__(self, r: Random, tokens: int) -> None:
        super().__init__(r, tokens)
        quarter = max(1, tokens // 4)
        self._pieces: dict[int, int] = {}
        for (low, high), count in SPLIT.items():
            whole, left = divmod((low + high) // 2, quarter)
            for piece, number in ((quarter, whole * count), (left, count)):
                if piece and number:
                    self._pieces[piece] = self._pieces.get(piece, 0) + number

    def one(self, most: int) -> int:
        (piece,) = self.r.choices([*self._pieces], [*self._pieces.values()])
        return min(most, piece)


def prefix(draw: Draw, tokens: int) -> Mask:
    return Mask.prefix_lm(tokens, draw.one(tokens))


def block_causal(draw: Draw) -> Mask:
    """Causal documents, of which the last sees the whole pack."""
    *lengths, last = draw.documents()
    start = draw.tokens - last
    before = Mask.documents(lengths).slices if lengths else ()
    return Mask(draw.tokens, [*before, Slice((start, draw.tokens), (0, draw.tokens), CAUSAL)])


def shared_question(draw: Draw) -> Mask:
    """The first document is seen by all."""
    question, *answers = draw.documents()
    return Mask.shared_prefix(question, answers) if answers else Mask.causal(question)


def sparse(draw: Draw) -> Mask:
    """A causal head that all see, a causal tail that sees a stretch before it whole."""
    half = draw.tokens // 2
    head = draw.one(half)
    if head == half:
        return Mask.causal(draw.tokens)
    width = draw.one(draw.tokens - 2 * head)
    end, tail = draw.tokens, draw.tokens - head
    seen = head + width
    parts = [
        Slice((0, head), (0, head), CAUSAL),
        Slice((head, end), (0, head)),
        Slice((tail - width, end), (head, seen)),
    ]
    if seen < end:
        parts.append(Slice((tail, end), (seen, end), CAUSAL))
    return Mask(end, parts)


MASKS: dict[str, Callable[[Draw], Mask]] = {
    "full": lambda draw: Mask.full(draw.tokens),
    "causal": lambda draw: Mask.causal(draw.tokens),
    "full documents": lambda draw: Mask.documents([Mask.full(n) for n in draw.documents()]),
    "causal documents": lambda draw: Mask.documents(draw.documents()),
    "shared question": shared_question,
    "block causal": block_causal,
    "prefix": lambda draw: prefix(draw, draw.tokens),
    "prefix documents": lambda draw: Mask.documents([prefix(draw, n) for n in draw.documents()]),
    "sparse": sparse,
}


# ---- balance -------------------------------------------------------------------------------------


def spans_of(plan: hcp.Plan, rank: int) -> list[tuple[int, int]]:
    return [(start, start + rows) for _, start, rows in Layout(plan, 0, rank).spans]


def busiest(mask: Mask, shares: list[list[tuple[int, int]]]) -> float:
    """Pairs of the busiest rank over the mean. Checks that all pairs are there."""
    pairs = [sum(mask.pairs_of(*span) for span in spans) for spans in shares]
    assert sum(pairs) == mask.pairs, "the ranks do not hold all queries"
    return max(pairs) * len(shares) / mask.pairs


def dealt(mask: Mask, ranks: int, chunk: int) -> float:
    """The same for chunks dealt by weight, as many to each rank."""
    starts = range(0, mask.length, chunk)
    weights = [mask.pairs_of(start, start + chunk) for start in starts]
    room, loads = [-(-len(starts) // ranks)] * ranks, [0] * ranks
    for weight in sorted(weights, reverse=True):
        _, rank = min((load, r) for r, load in enumerate(loads) if room[r])
        loads[rank] += weight
        room[rank] -= 1
    return max(loads) * ranks / mask.pairs


def rows_fetched(plan: hcp.Plan) -> float:
    """Keys that ranks fetch, over those that others hold."""
    fetched = 0
    for rank in range(plan.ranks):
        words = schedule_words(
            plan, ScheduleHeader(rank=rank, mask=0), "all_gather", window_size=(-1, -1)
        )
        fetched += sum(stage.received_rows for stage in Schedule(words).stages)
    return fetched / ((plan.ranks - 1) * sum(plan.lengths))


def one_group(tokens: int, ranks: int, masks: list[Mask] | None) -> hcp.Plan:
    return hcp.plan(
        [tokens], ranks=ranks, min_degree=ranks, max_tokens_per_rank=tokens, masks=masks
    )


def balance(kind: str, ranks: int, arguments: argparse.Namespace) -> dict[str, object]:
    """A row of the table: one kind of masks on so many ranks."""
    tokens = ranks * arguments.tokens
    zigzag = one_group(tokens, ranks, None)
    found: dict[str, list[float]] = {name: [] for name in ("zigzag", "dealt", "hcp")}
    rows, pieces, milliseconds = [], [], []
    for seed in range(arguments.packs):
        mask = MASKS[kind](Draw(Random(f"{kind} {ranks} {seed}"), tokens))
        begun = time.perf_counter()
        plan = one_group(tokens, ranks, [mask])
        milliseconds.append((time.perf_counter() - begun) * 1e3)
        found["zigzag"].append(busiest(mask, [spans_of(zigzag, rank) for rank in range(ranks)]))
        found["dealt"].append(dealt(mask, ranks, arguments.chunk))
        shares = [spans_of(plan, rank) for rank in range(ranks)]
        found["hcp"].append(busiest(mask, shares))
        rows.append(rows_fetched(plan))
        pieces.append(max(map(len, shares)))
    cells = {
        name: f"{statistics.median(values):.3f} {max(values):.3f}" for name, values in found.items()
    }
    return {
        "mask": kind,
        "ranks": ranks,
        **cells,
        "rows": f"{statistics.median(rows):.2f}",
        "pieces": max(pieces),
        "ms": f"{statistics.median(milliseconds):.1f}",
    }


# ---- plans ---------------------------------------------------------------------------------------

COST = hcp.CostModel.for_transformer(
    hidden_size=4096,
    ffn_hidden_size=11_008,
    num_attention_heads=32,
    num_query_groups=8,
    flops_per_byte=8_000,
    launch_flops=10_000_000_000,
)


def planned(ranks: int, sync: str, arguments: argparse.Namespace) -> dict[str, object]:
    """A row of the table: batches of sequences, each with a mask of any kind."""
    by_pairs, as_causal = [], []
    for seed in range(arguments.packs):
        r = Random(f"{ranks} {sync} {seed}")
        masks = [MASKS[r.choice([*MASKS])](Draw(r, r.randint(2048, 65_536))) for _ in range(64)]
        lengths = [mask.length for mask in masks]
        request: dict[str, Any] = {
            "ranks": ranks,
            "max_tokens_per_rank": 16_384,
            "sync": sync,
            "cost": COST,
        }
        pairs = [mask.pairs for mask in masks]
        plan = hcp.plan(lengths, pairs=pairs, **request)
        check_plan(plan, lengths)
        bound = lower_bound(lengths, pairs=pairs, **request)
        by_pairs.append(plan.makespan / bound)
        groups = hcp.plan(lengths, **request).to_dict()
        as_causal.append(hcp.Plan.from_dict({**groups, "pairs": pairs}).makespan / bound)
    return {
        "sync": sync,
        "ranks": ranks,
        "by pairs": f"{statistics.median(by_pairs):.3f} {max(by_pairs):.3f}",
        "as causal": f"{statistics.median(as_causal):.3f} {max(as_causal):.3f}",
    }


# ---- the program ---------------------------------------------------------------------------------


def show(rows: Iterable[dict[str, object]], file: JsonFile) -> None:
    widths: dict[str, int] = {}
    for row in rows:
        if not widths:
            widths = {name: max(len(name), 18 if i == 0 else 12) for i, name in enumerate(row)}
            print("  ".join(f"{name:>{width}}" for name, width in widths.items()))
        print("  ".join(f"{row[name]!s:>{width}}" for name, width in widths.items()), flush=True)
        file.add(row)


def main() -> None:
    parser = parser_of(__doc__, device="cpu", rounds=None, rounds_help="with --time (5)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--tokens", type=int, default=8192, help="of each rank")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a chunk that is dealt")
    parser.add_argument("--packs", type=int, help="draws of each mask (20; with --time 3)")
    parser.add_argument("--plans", action="store_true", help="batches of masked sequences")
    add_time(parser)
    arguments = parser.parse_args()
    arguments.packs = arguments.packs or (3 if arguments.time else 20)
    if arguments.time:
        time_masks(arguments, lambda kind, r, tokens: MASKS[kind](SplitDraw(r, tokens)))
        return
    if arguments.device != "cpu":
        parser.error("--device cuda goes with --time")
    end_after(arguments.deadline)
    print(planner_line())
    file = arguments.json
    if arguments.plans:
        syncs = ("step", "micro_batch")
        show((planned(n, sync, arguments) for n in arguments.ranks for sync in syncs), file)
    else:
        show((balance(kind, n, arguments) for n in arguments.ranks for kind in MASKS), file)


def add_time(parser: argparse.ArgumentParser) -> None:
    """Add the flags that --time reads."""
    parser.add_argument("--time", action="store_true", help="attention on the ranks of torchrun")
    parser.add_argument(
        "--masks",
        nargs="+",
        choices=MASKS,
        default=("causal", "full", "full documents", "causal documents"),
        metavar="MASK",
        help="with --time",
    )
    parser.add_argument("--peers", nargs="*", choices=("magi",), default=("magi",), help="(all)")
    parser.add_argument(
        "--heads", type=int, nargs=2, metavar=("QUERY", "KEY"), help="(CPU: 4 2, CUDA: 64 8)"
    )
    parser.add_argument("--head-dim", type=int, help="(CPU: 16, CUDA: 128)")
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16", "float16"))
    parser.add_argument(
        "--backend", default="auto", help="kernels of hcp, as of get_cp_handler_cls"
    )
    parser.add_argument("--comm-type", choices=hcp.COMM_TYPES, default="auto", help="of hcp (auto)")
    parser.add_argument("--transport", default="auto", help="of hcp (auto)")
    parser.add_argument("--room", type=float, default=1.1, help="of hcp's rows over the mean (1.1)")


if __name__ == "__main__":
    main()
