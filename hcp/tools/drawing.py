"""Draw timelines of plans as SVG, alone or in a page of HTML that needs no network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from hcp.tools.timeline import Box, idle_shares, spans, timeline

if TYPE_CHECKING:
    from hcp.planning.cost import TimeTable
    from hcp.planning.plan import Plan

LEFT, RIGHT = 58, 62
"""Room for the names of ranks, and for their idle shares."""
EDGE = 10
"""Where titles start."""
ROWS = 340
"""The height of all ranks of a plan, unless there are very few or very many."""
LETTERS, LARGE = 11, 14
"""The size of labels, and of those of a brief picture, which a phone makes smaller."""
COLOURS = ("#dbe9f6", "#a6cee3", "#8fd19e", "#fdd07a", "#f4935b", "#d1557a", "#8d59a8", "#4b4a8f")
"""The colours of degrees 1, 2, 4 ..., mixed for those between them."""
DARK_FROM = 32
"""The degree from which labels are white."""
STYLE = (
    ".light{fill:#fff}.small{fill:#555}.box{stroke:#fff;stroke-width:.6}"
    ".bound{stroke:#111;stroke-width:1.3;stroke-dasharray:2 3}"
    ".idle{fill:#c9c9c9}.rows{fill:#f4f4f4}"
)


class _Scale(NamedTuple):
    """From a plan's time and ranks to points of the picture."""

    left: float
    per_time: float
    top: float
    per_rank: float
    letters: float = LETTERS

    @property
    def character(self) -> float:
        """The width of one."""
        return self.letters * 6 / 11

    def labels(self, tokens: int, degree: int) -> tuple[str, ...]:
        """Of a sequence, the best one first."""
        if self.letters == LETTERS:
            return f"{degree} | {tokens:,}", f"{degree}"
        return (f"{tokens:,} tokens on {degree} GPU{'s' if degree > 1 else ''}",)

    def x(self, time: float) -> float:
        return self.left + time * self.per_time

    def y(self, rank: float) -> float:
        return self.top + rank * self.per_rank


def timeline_svg(
    plans: Mapping[str, Plan],
    *,
    unit: float | None = None,
    width: int = 960,
    height: float = ROWS,
) -> str:
    """Draw plans below each other on one axis of time, by their names.

    Ranks stand below each other, and a colour is a CP degree. A box is a sequence: its label has
    the degree and the tokens, and pointing at it tells its ranks. In gaps ranks launch or wait;
    grey bars at the right are idle shares. The title has the speed, where the first plan's is 1.
    The dotted line is the bound: no plan of these lengths within any of the plans' limits ends
    earlier. Of a pipeline one stage is drawn, without waiting for neighbours. ``unit``: seconds of
    one unit of the cost model. ``width`` and ``height``: of the picture, and of a plan's ranks.
    """
    longest = max([1, *(plan.makespan for plan in plans.values())])
    first, bound = _compared(list(plans.values()))
    parts: list[str] = []
    says: list[str] = []
    top = 8.0
    for name, plan in plans.items():
        per_rank = min(26.0, max(1.5, height / max(1, plan.ranks)))
        scale = _Scale(LEFT, (width - LEFT - RIGHT) / longest, top + 40, per_rank)
        came, held = plan_words(plan, first, bound)
        says.append(f"{name}: {came}")
        parts.append(_text(EDGE, top + 14, says[-1], "title"))
        parts.append(_text(EDGE, top + 30, held, "small"))
        parts += _panel(plan, plan.bound if bound is None else bound, scale, width)
        top = scale.y(plan.ranks) + 14
    parts += _axis(longest, unit, top, width)
    parts += _legend(plans, top + 38)
    return _picture(width, top + 52, says, parts)


def brief_svg(plans: Mapping[str, Plan], *, width: int = 560, height: float = 56) -> str:
    """Draw plans as `timeline_svg` does, flat and with few words in large letters: a plan's speed,
    where the first one's is 1, and its idle share."""
    longest = max([1, *(plan.makespan for plan in plans.values())])
    first, bound = _compared(list(plans.values()))
    parts: list[str] = []
    says: list[str] = []
    top = 0.0
    for name, plan in plans.items():
        scale = _Scale(0, width / longest, top + 20, height / max(1, plan.ranks), LARGE)
        says.append(f"{name}: {', '.join(_speed_and_idle(plan, first))}")
        parts.append(_text(0, top + 14, says[-1], "title"))
        parts += _ranks(plan, plan.bound if bound is None else bound, scale)
        top = scale.y(plan.ranks) + 4
    degrees = _degrees(plans)[:8]
    parts += _brief_legend(degrees, top + 14)
    top += 14 if len(degrees) <= 4 else 32  # beside the legend where there is room, else below it
    parts.append(_text(width, top, "dotted: lower bound; simulated", "small", "end"))
    return _picture(width, top + 5, says, parts, LARGE)


def _picture(
    width: int, height: float, says: Sequence[str], parts: Sequence[str], letters: int = LETTERS
) -> str:
    size = f'width="{width}" height="{height:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" {size} '
        f'role="img" aria-label="{escape("; ".join(says))}"><style>'
        f"text{{font:{letters}px system-ui,sans-serif;fill:#222}}"
        f".title{{font-size:{max(letters, 13)}px;font-weight:600}}{STYLE}</style>"
        f'<rect {size} fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _compared(plans: Sequence[Plan]) -> tuple[Plan | None, int | None]:
    """Return the first plan and the least bound of plans that can be compared: several of the same
    sequences on the same ranks, by the same costs."""
    first = plans[0] if len(plans) > 1 else None
    if first is None or not all(_comparable(first, plan) for plan in plans):
        return None, None
    return first, min(plan.bound for plan in plans)


def _comparable(one: Plan, other: Plan) -> bool:
    same = (one.lengths, one.ranks, one.core.pipeline_stages)
    if same != (other.lengths, other.ranks, other.core.pipeline_stages):
        return False
    # A plan that was made of given groups may not know the seconds of a unit.
    prices = [replace(plan.cost, table=None, unit=None, kernels=()) for plan in (one, other)]
    if prices[0] != prices[1]:
        return False
    # A plan of a cost function has those times that its search has asked for.
    tables = [_times(plan.cost.table) for plan in (one, other)]
    return all(tables[1].get(key, time) == time for key, time in tables[0].items())


def _times(table: TimeTable | None) -> dict[tuple[int, int], int]:
    """The times of a table, by length and degree."""
    if table is None:
        return {}
    cells = zip(product(table.lengths, table.degrees), table.times, strict=True)
    return {key: time for key, time in cells if time > 0}


def plan_words(plan: Plan, first: Plan | None = None, bound: int | None = None) -> tuple[str, str]:
    """Return what came of a plan, and what it holds: a line each.

    ``first``: the plan whose time is 1.00. ``bound``: the one that is drawn, by default the
    plan's own."""
    report = plan.report()
    tokens = sum(plan.lengths)
    staged = f", one of {report.pipeline_stages} stages" if report.pipeline_stages > 1 else ""
    plural = "" if report.micro_batches == 1 else "es"
    least = plan.bound if bound is None else bound
    of_bound = f"{_ratio(plan.makespan, least):.2f} x the lower bound (dotted)"
    return (
        ", ".join((*_speed_and_idle(plan, first), of_bound)),
        f"{len(plan.lengths):,} sequences, {tokens:,} tokens on {plan.ranks:,} ranks, "
        f"{report.micro_batches} micro-batch{plural}{staged}",
    )


def _speed_and_idle(plan: Plan, first: Plan | None) -> Iterator[str]:
    if first:
        yield f"x {_ratio(first.makespan, plan.makespan):.2f}"
    yield f"idle {plan.report().idle_share:.0%}"


def _ratio(time: int, over: int) -> float:
    return time / over if over else 1.0


class Timelines(dict[str, "Plan"]):
    """Plans by their names, which a notebook shows as timelines on one axis of time.

    A title has the speed of a plan over that of the first one, its idle share, and its time over
    the lower bound (dotted). `plan` alone, as the last line of a cell, shows one timeline.
    """

    def _repr_html_(self) -> str:
        return timeline_svg(self)


def timeline_page(
    plans: Mapping[str, Plan], title: str, words: str = "", unit: float | None = None
) -> str:
    """Return a page of HTML with the timeline of plans, below a title and words."""
    drawn = timeline_svg(plans, unit=unit, width=1080)
    lines = "".join(f"<p>{escape(line)}</p>" for line in words.splitlines() if line)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>"
        "body{font:15px/1.5 system-ui,sans-serif;margin:24px auto;max-width:1100px;padding:0 12px;"
        "color:#222;background:#fff}h1{font-size:20px}figure{margin:0;overflow-x:auto}"
        "svg{max-width:100%;height:auto}rect.box:hover{stroke:#000}</style></head>"
        f"<body><h1>{escape(title)}</h1>{lines}<figure>{drawn}</figure>"
        "<p>Ranks stand below each other. A colour is a CP degree, a box a sequence: point at it "
        "for its length. Light grey is launching or waiting; the bars at the right are each "
        "rank's idle share. A title has the speed, where the first plan's is 1. The dotted line is "
        "a lower bound: no plan of these lengths within any of the plans' limits ends earlier. "
        "Times are those of the cost model, not measured.</p></body></html>\n"
    )


def _ranks(plan: Plan, bound: int, scale: _Scale) -> Iterator[str]:
    """What the ranks of a plan do, and the bound's line."""
    end, bottom = scale.x(plan.makespan), scale.y(plan.ranks)
    yield _rect(scale.left, scale.top, end - scale.left, bottom - scale.top, "rows")
    x = scale.x(bound)
    yield from (part for box in timeline(plan) for part in _sequences(plan, box, scale, x))
    yield (
        f'<line class="bound" x1="{x:.1f}" x2="{x:.1f}" y1="{scale.top - 3:.1f}" '
        f'y2="{bottom + 3:.1f}"><title>bound: no plan is faster</title></line>'
    )


def _panel(plan: Plan, bound: int, scale: _Scale, width: int) -> Iterator[str]:
    """A plan with the names of its ranks and their idle shares."""
    yield from _ranks(plan, bound, scale)
    yield _text(width - RIGHT + 38, scale.top - 4, "idle", "small", "end")
    every = max(1, -(-13 // scale.per_rank))  # names need 13 points each
    for rank, idle in enumerate(idle_shares(plan, timeline(plan))):
        y, height = scale.y(rank), scale.per_rank
        what = f"rank {rank}: idle {idle:.1%}"
        yield _rect(width - RIGHT + 42, y + height * 0.15, 18 * idle, height * 0.7, "idle", what)
        if rank % every == 0:
            middle = y + min(height, 13) / 2 + 4
            yield _text(scale.left - 6, middle, f"rank {rank}", "small", "end")
            yield _text(width - RIGHT + 38, middle, f"{idle:.0%}", "small", "end")


def _sequences(plan: Plan, box: Box, scale: _Scale, line: float) -> Iterator[str]:
    """The sequences of a group, one after the other, over its ranks. No label is on the line."""
    y, height = scale.y(box.first_rank), box.degree * scale.per_rank
    last = box.first_rank + box.degree - 1
    ranks = f"rank {last}" if box.degree == 1 else f"ranks {box.first_rank} to {last}"
    for s, start, end in spans(plan, box):
        x, wide = scale.x(start), (end - start) * scale.per_time
        tokens = plan.lengths[s]
        what = f"sequence {s}: {tokens:,} tokens, CP {box.degree}, {ranks}, micro-batch "
        yield _rect(x, y, wide, height, "box", f"{what}{box.micro_batch}", box.degree)
        x, wide = _beside(line, x, wide)
        for label in scale.labels(tokens, box.degree):
            if height >= scale.letters - 0.5 and wide >= scale.character * len(label) + 4:
                style, middle = "light" if box.degree >= DARK_FROM else "", y + height / 2
                yield _text(x + wide / 2, middle + scale.letters * 4 / 11, label, style, "middle")
                break


def _beside(line: float, x: float, wide: float) -> tuple[float, float]:
    """The wider part of a box that a line divides, else all of it: its left end and its width."""
    before, after = line - x, x + wide - line
    if before <= 0 or after <= 0:
        return x, wide
    return (x, before) if before >= after else (line, after)


def _axis(longest: int, unit: float | None, top: float, width: int) -> Iterator[str]:
    """Quarters of the longest makespan."""
    for quarter in range(5):
        share = quarter / 4
        x = LEFT + share * (width - LEFT - RIGHT)
        label = f"{share * longest * unit * 1e3:,.1f} ms" if unit else f"{share:.0%}"
        anchor = "start" if quarter == 0 else "middle"
        yield f'<path d="M{x:.1f} {top - 10:.1f}v5" stroke="#555"/>'
        yield _text(x, top + 7, label, "small", anchor)
    what = "time" if unit else "share of the longest plan's time"
    yield _text(LEFT, top + 22, f"{what}, by the cost model: not measured", "small")


def _legend(plans: Mapping[str, Plan], y: float) -> Iterator[str]:
    return _swatches({f"CP {degree}": degree for degree in _degrees(plans)[:16]}, LEFT, y, LETTERS)


def _brief_legend(degrees: Sequence[int], y: float) -> Iterator[str]:
    yield _text(0, y, "GPUs of a sequence:", "small")
    yield from _swatches({f"{degree}": degree for degree in degrees}, 152, y, LARGE)


def _degrees(plans: Mapping[str, Plan]) -> list[int]:
    groups = [g for plan in plans.values() for groups in plan.micro_batches for g in groups]
    return sorted({group.degree for group in groups})


def _swatches(degrees: Mapping[str, int], x: float, y: float, letters: float) -> Iterator[str]:
    """The colours of degrees, by what is said of each."""
    for says, degree in degrees.items():
        yield _rect(x, y - 9, 12, 11, "box", degree=degree)
        yield _text(x + 16, y, says, "small")
        x += 34 + letters * len(says) * 6 / 11


def colour_of(degree: int) -> str:
    """The colour of a CP degree."""
    place = min(math.log2(degree), len(COLOURS) - 1)
    low = min(int(place), len(COLOURS) - 2)
    first, second = (bytes.fromhex(COLOURS[i][1:]) for i in (low, low + 1))
    mixed = (round(a + (b - a) * (place - low)) for a, b in zip(first, second, strict=True))
    return "#" + bytes(mixed).hex()


def _rect(
    x: float, y: float, wide: float, high: float, style: str, what: str = "", degree: int = 0
) -> str:
    colour = f' fill="{colour_of(degree)}"' if degree else ""
    tag = (
        f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{max(wide, 0):.2f}" '
        f'height="{high:.1f}"{colour}'
    )
    return f"{tag}><title>{escape(what)}</title></rect>" if what else f"{tag}/>"


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )
