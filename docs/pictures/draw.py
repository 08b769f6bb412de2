"""Draw the pictures of the documentation: python docs/pictures/draw.py

Most are 480 points wide, so that a phone shows their text large enough.
tests/project/test_pictures.py holds that the files are what this program makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from math import log10
from pathlib import Path

from hcp._files import write_file
from hcp.cli.simulate import parse_arguments, simulate
from hcp.tools.drawing import colour_of

HERE = Path(__file__).parent
WIDTH = 480
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.head{font-size:14px;font-weight:600}"
    ".note{font-size:12px;fill:#555}.box{stroke:#555;fill:#f4f6f9}.cell{stroke:#fff}"
    ".line{stroke:#555;fill:none;stroke-width:1.3}"
)
RANKS = ("#4f8fc0", "#e08b3a", "#5aa469", "#a2619e")
"""The colours of ranks 0 to 3."""


# ---- parts ---------------------------------------------------------------------------------------


def picture(height: float, parts: Sequence[str], says: str, shown: int = WIDTH) -> str:
    """``shown``: the width on a wide screen."""
    size = f'width="{shown}" height="{height * shown / WIDTH:g}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" {size} '
        f'role="img" aria-label="{escape(says)}"><style>{STYLE}</style>'
        "<defs>"
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>'
        f'<rect width="{WIDTH}" height="{height:g}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>'
    )


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path class="line" d="M{x:g} {y:g}L{to_x:g} {to_y:g}" marker-end="url(#tip)"/>'


def box(x: float, y: float, wide: float, high: float, lines: Sequence[str]) -> str:
    """A box with lines of text, of which the first is its name."""
    top = y + high / 2 - 8 * (len(lines) - 1) + 5
    words = (
        text(x + wide / 2, top + 16 * i, line, "note" if i else "head", "middle")
        for i, line in enumerate(lines)
    )
    frame = f'<rect class="box" x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="5"/>'
    return frame + "".join(words)


def cell(x: float, y: float, wide: float, high: float, colour: str, seen: bool = True) -> str:
    shade = "" if seen else ' fill-opacity="0.12"'
    place = f'x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}"'
    return f'<rect class="cell" {place} fill="{colour}"{shade}/>'


# ---- pictures ------------------------------------------------------------------------------------


def flows() -> str:
    """The two flows: a training step, and an evaluation."""
    steps = [
        ("gather_lengths", "tokens of every rank's samples"),
        ("plan", "groups of ranks with a CP degree"),
        ("dispatch", "rows go where they are computed"),
        ("attention", "each layer, keys and values travel"),
        ("loss, backward", "the mean over the whole batch"),
        ("sum gradients", "over all ranks, then the optimizer"),
    ]
    parts = [text(0, 16, "A training step", "head")]
    for i, lines in enumerate(steps):
        y = 26 + 58 * i
        parts.append(box(0, y, 232, 44, lines))
        if i:
            parts.append(arrow(116, y - 14, 116, y - 1))
    back = 26 + 58 * 5 + 22
    parts.append(f'<path class="line" d="M232 {back}h10V48h-8" marker-end="url(#tip)"/>')
    evaluation = [
        ("train_pgs", "e.g. cp 1 x dp 4"),
        ("eval_cp_context", "swaps every group, or none"),
        ("eval_pgs", "e.g. cp 4 x dp 1"),
        ("evaluate(model)", "same weights, same processes"),
        ("on any exit", "puts each group back"),
    ]
    parts.append(text(262, 16, "An evaluation", "head"))
    for i, lines in enumerate(evaluation):
        y = 26 + 58 * i
        parts.append(box(262, y, 214, 44, lines))
        if i:
            parts.append(arrow(369, y - 14, 369, y - 1))
    return picture(366, parts, "The two flows of hcp")


def zigzag() -> str:
    """Who computes which pairs of a causal sequence on four ranks, by two cuts."""
    parts = []
    cuts = {
        "In four parts": [0, 0, 1, 1, 2, 2, 3, 3],
        "Zigzag": [0, 1, 2, 3, 3, 2, 1, 0],
    }
    side = 22
    for n, (name, owners) in enumerate(cuts.items()):
        left, top = 26 + 240 * n, 30
        parts.append(text(left, 18, name, "head"))
        for row, rank in enumerate(owners):
            for column in range(8):
                x, y = left + side * column, top + side * row
                parts.append(cell(x, y, side, side, RANKS[rank], seen=column <= row))
        pairs = [
            sum(row + 0.5 for row, owner in enumerate(owners) if owner == rank) for rank in range(4)
        ]
        for rank, count in enumerate(pairs):
            y = top + 8 * side + 24 + 22 * rank
            parts.append(text(left, y + 12, f"rank {rank}", "note"))
            parts.append(cell(left + 46, y, count * 9.5, 15, RANKS[rank]))
    parts.append(
        text(26, 222, "queries down, keys across; a pair is a key that a query sees", "note")
    )
    return picture(328, parts, "A causal sequence cut in parts, and zigzag")


def comm_types() -> str:
    """Which keys and values one rank of four has, by comm type."""
    parts = [
        text(0, 15, "Keys and values that rank 2 of 4 has: down, the eight", "note"),
        text(0, 31, "chunks of a sequence; across, heads; colours are ranks.", "note"),
    ]
    of = {rank: {(chunk, h) for chunk in (rank, 7 - rank) for h in range(4)} for rank in range(4)}
    every = set().union(*of.values())
    inside, outside = ({x for r in pair for x in of[r] if x[1] < 2} for pair in ((2, 3), (0, 1)))
    stages = {
        "p2p": ("a ring: one rank's after the other", [of[2], of[1], of[0], of[3]]),
        "all_gather": (
            "all rows that it sees, at once",
            [of[2], {(chunk, h) for chunk, h in every if chunk < 6}],
        ),
        "a2a": (
            "all rows of its heads, queries too",
            [of[2], {(chunk, h) for chunk, h in every if h == 2}],
        ),
        "a2a+p2p": ("heads inside a node, a ring between nodes", [of[2], inside, outside]),
    }
    wide, high = 15, 9
    for n, (name, (says, held)) in enumerate(stages.items()):
        top = 46 + 112 * n
        parts.append(text(0, top + 14, name, "head"))
        for i, line in enumerate(split_words(says, 18)):
            parts.append(text(0, top + 34 + 16 * i, line, "note"))
        for i, cells in enumerate(held):
            left = 132 + 90 * i
            for chunk, head in sorted(every):
                x, y, seen = left + wide * head, top + high * chunk, (chunk, head) in cells
                parts.append(cell(x, y, wide, high, RANKS[min(chunk, 7 - chunk)], seen=seen))
            label = "own" if i == 0 else f"stage {i}" if len(held) > 2 else "then"
            parts.append(text(left + 2 * wide, top + 8 * high + 15, label, "note", "middle"))
            if i:
                parts.append(arrow(left - 26, top + 4 * high, left - 5, top + 4 * high))
    return picture(46 + 112 * 4, parts, "What each comm type moves")


def split_words(words: str, most: int) -> Iterator[str]:
    """Lines of at most so many characters."""
    line = ""
    for word in words.split():
        if line and len(line) + 1 + len(word) > most:
            yield line
            line = word
        else:
            line = f"{line} {word}".strip()
    yield line


SIMULATED = "--family wikipedia --sequences 64 --batches 1 --ranks 16 --max-tokens-per-rank 8192"
"""The options of `hcp simulate` for the picture of plans. README.md and the notebook of
examples have them, too."""


def plan() -> str:
    """Packed static CP and hcp, as `hcp simulate` plans them."""
    return simulate(parse_arguments(SIMULATED.split())).picture()


FAMILIES = ("Wikipedia", "GitHub", "LongAlign", "ChatQA2")
MEASURED = {
    "with cuDNN": (1.14, 1.14, 1.13, 1.15),
    "with FlashAttention-4": (1.11, 1.08, 1.04, 1.10),
}
"""hcp's tokens per second where those of the faster of Transformer Engine's p2p and a2a are 1, by
its kernels and by the family of lengths: benchmarks/results/megatron_h200x2_2026-11-27.md."""


def speeds() -> str:
    """Tokens per second beside both Transformer Engines, by family of lengths."""
    what = "hcp's tokens per second on 2 H200s. Dashed, 1: Transformer Engine's"
    wide, top, parts = 150, 34, [text(0, 12, what, "note")]
    scale = wide / max(max(found) for found in MEASURED.values())
    for i, family in enumerate(FAMILIES):
        parts.append(text(62, top + 11 + 14 * i, family, "note", "end"))
    for n, (peer, found) in enumerate(MEASURED.items()):
        left = 68 + 218 * n
        parts.append(text(left, top - 5, peer, "note"))
        for i, speed in enumerate(found):
            y = top + 14 * i
            parts.append(cell(left, y, speed * scale, 14, RANKS[n]))
            parts.append(text(left + speed * scale + 5, y + 12, f"{speed:.2f}", "head"))
        line = f"M{left + scale:g} {top}v{14 * len(found)}"
        parts.append(f'<path class="line" d="{line}" stroke-dasharray="3 3"/>')
    return picture(top + 14 * len(FAMILIES) + 1, parts, what, shown=560)


FORECAST = "--forecast 8 --model 8b --device-gib 75 --host-gib 200"
"""The options of benchmarks/bench_long.py by which PREDICTED was computed, with --tokens."""

PREDICTED = {
    16_384: (0.225, 29.8, 0.0, (36, 0, 0, 0)),
    32_768: (0.560, 44.7, 0.0, (36, 0, 0, 0)),
    65_536: (1.59, 74.5, 0.0, (36, 0, 0, 0)),
    131_072: (5.29, 74.9, 4.5, (18, 0, 0, 18)),
    262_144: (18.5, 75.0, 9.1, (8, 0, 10, 18)),
    524_288: (67.7, 74.1, 198.1, (4, 14, 4, 14)),
    1_048_576: (259.0, 73.3, 68.5, (2, 0, 0, 34)),
    2_097_152: (1010.0, 72.8, 112.9, (0, 0, 8, 28)),
}
"""By the tokens of a sequence: seconds a step, GiB of a GPU and of the host for it, and how many
layers are kept, offloaded, recomputed, and recomputed from the host.
tests/integrations/test_transformers_memory_choice.py computes them again."""


def long_sequences() -> str:
    """What a step of one long sequence is predicted to take, and what its layers keep."""
    title = "Predicted, not measured: a step of one sequence on 8 GPUs"
    parts = [text(0, 15, title, "head")]
    words = ("kept", "offloaded", "recomputed", "recomputed from the host")
    for word, colour, x in zip(words, RANKS, (74, 126, 208, 298), strict=True):
        parts += [cell(x, 27, 10, 10, colour), text(x + 13, 36, word, "note")]
    parts.append(text(0, 36, "36 layers:", "note"))
    left, wide, low = 96, 48, (124, 186, 292, 388)  # low: where the bars of each row stand
    rows = (
        ("what", "they hold"),
        ("GiB", "of a GPU"),
        ("GiB of", "its host"),
        ("seconds a", "step (log)"),
    )
    for (first, second), y in zip(rows, low, strict=True):
        parts += [text(0, y - 24, first), text(0, y - 8, second)]
    points = []
    for i, (tokens, (seconds, device, host, layers)) in enumerate(PREDICTED.items()):
        x, top = left + wide * i, low[0]
        for count, colour in zip(layers, RANKS, strict=True):
            top -= 2 * count
            if count:
                parts.append(cell(x, top, wide - 8, 2 * count, colour))
        for held, y, above in ((device, low[1], 75.0), (host, low[2], host)):
            parts.append(cell(x, y - held / 2.5, wide - 8, held / 2.5, "#8a94a3"))
            parts.append(text(x + 20, y - above / 2.5 - 4, f"{held:.0f}", "note", "middle"))
        points.append((x + 20, low[3] - 16 * log10(10 * seconds)))
        label = f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}"
        parts.append(text(x + 20, points[-1][1] - 7, label, "note", "middle"))
        size = f"{tokens >> 20}M" if tokens >> 20 else f"{tokens >> 10}K"
        parts.append(text(x + 20, low[3] + 16, size, "note", "middle"))
    line = "L".join(f"{x:g} {y:.1f}" for x, y in points)
    parts.append(f'<path class="line" d="M{line}"/>')
    limit = f"M{left} {low[1] - 75 / 2.5:g}h{wide * len(PREDICTED) - 8}"
    parts.append(f'<path class="line" d="{limit}" stroke-dasharray="3 3"/>')
    parts.append(text(0, low[3] + 16, "tokens", "note"))
    return picture(low[3] + 22, parts, title, shown=560)


def evaluation() -> str:
    """The groups that a model of four ranks holds, outside and inside eval_cp_context."""
    parts = []
    layouts = {"training: cp 1 x dp 4": [0, 1, 2, 3], "evaluation: cp 4 x dp 1": [0, 0, 0, 0]}
    for n, (name, groups) in enumerate(layouts.items()):
        left = 250 * n
        parts.append(text(left, 16, name, "head"))
        for rank, group in enumerate(groups):
            x, colour = left + 56 * rank, colour_of(4 if n else 1)
            first = rank == 0 or groups[rank - 1] != group
            wide = 56 * groups.count(group) - 8
            if first:
                parts.append(cell(x, 28, wide, 56, colour))
            parts.append(text(x + 24, 50, f"rank {rank}", "note", "middle"))
            if n == 0:
                parts.append(text(x + 24, 68, "sample", "note", "middle"))
        if n:
            parts.append(text(left + 108, 68, "a part of each sample", "note", "middle"))
    parts.append(arrow(228, 56, 246, 56))
    places = [
        ("layer.cp_group", "rank r alone", "ranks 0 to 3"),
        ("layer.cp_size", "1", "4"),
        ("attention.pg_collection.dp", "ranks 0 to 3", "rank r alone"),
        ("parallel_state globals", "those of train_pgs", "those of eval_pgs"),
        ("weights, optimizer, random state", "untouched", "untouched"),
    ]
    parts.append(text(0, 116, "what the model holds", "head"))
    parts.append(text(224, 116, "outside", "head"))
    parts.append(text(362, 116, "inside", "head"))
    for i, (place, outside, inside) in enumerate(places):
        y = 138 + 22 * i
        parts += [text(0, y, place), text(224, y, outside, "note"), text(362, y, inside, "note")]
    return picture(242, parts, "What eval_cp_context swaps")


PICTURES: dict[str, Callable[[], str]] = {
    "flows": flows,
    "zigzag": zigzag,
    "comm-types": comm_types,
    "plan": plan,
    "speeds": speeds,
    "evaluation": evaluation,
    "long-sequences": long_sequences,
}

if __name__ == "__main__":
    for name, drawn in PICTURES.items():
        write_file(HERE / f"{name}.svg", drawn())
