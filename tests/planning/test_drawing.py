"""Pictures of plans: every sequence is a box at its place, and text is escaped."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hcp
from hcp.tools.choose import choose_eval_context_parallel
from hcp.tools.drawing import (
    LEFT,
    RIGHT,
    Timelines,
    brief_svg,
    colour_of,
    plan_words,
    timeline_page,
    timeline_svg,
)
from hcp.tools.timeline import idle_shares, timeline

SVG = "{http://www.w3.org/2000/svg}"


def boxes_of(drawn: str) -> list[tuple[str, float, float]]:
    """What each box says, where it starts and how wide it is."""
    found = ElementTree.fromstring(drawn).iter(f"{SVG}rect")
    return [
        (box.findtext(f"{SVG}title") or "", float(box.get("x", "")), float(box.get("width", "")))
        for box in found
        if box.get("class") == "box" and box.find(f"{SVG}title") is not None
    ]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 5000), max_size=30), st.sampled_from([1, 3, 8, 70]))
def test_each_sequence_is_a_box_of_its_time(lengths: list[int], ranks: int) -> None:
    plan = hcp.plan(lengths, ranks=ranks, max_tokens_per_rank=5000)
    boxes = boxes_of(timeline_svg({"a": plan}))
    expected = []
    for box in timeline(plan):
        starts = (box.start + plan.cost.launch, *box.ends[:-1])
        for s, start, end in zip(box.sequences, starts, box.ends, strict=True):
            expected.append((s, start, end - start, box.degree))
    assert len(boxes) == len(expected) == len(lengths)
    scale = (960 - LEFT - RIGHT) / max(1, plan.makespan)
    for (says, x, wide), (s, start, took, degree) in zip(boxes, expected, strict=True):
        assert says.startswith(f"sequence {s}: {lengths[s]:,} tokens, CP {degree}, rank")
        assert x == pytest.approx(LEFT + start * scale, abs=0.06)
        assert wide == pytest.approx(took * scale, abs=0.006)


def test_plans_share_an_axis_and_the_unit_gives_it_seconds() -> None:
    fast = hcp.plan([100] * 4, ranks=4, max_tokens_per_rank=1000)
    slow = hcp.plan([100] * 4, ranks=4, max_tokens_per_rank=1000, min_degree=4)
    drawn = timeline_svg({"slow <&>": slow, "fast": fast}, unit=1e-3)
    ends = [x + wide for _, x, wide in boxes_of(drawn)]
    assert max(ends[:4]) == pytest.approx(960 - RIGHT, abs=0.1)
    assert max(ends[:4]) > max(ends[4:])
    assert f"{slow.makespan:,.1f} ms" in drawn
    faster = slow.makespan / fast.makespan
    assert f"slow &lt;&amp;&gt;: x 1.00, idle 0%, {faster:.2f} x the lower bound (dotted)" in drawn
    assert f"fast: x {faster:.2f}, idle 0%, 1.00 x the lower bound (dotted)" in drawn
    words = "4 sequences, 400 tokens on 4 ranks, 1 micro-batch"
    assert plan_words(fast) == ("idle 0%, 1.00 x the lower bound (dotted)", words)
    assert drawn.count(words) == 2


def bounds_of(drawn: str) -> list[float]:
    lines = ElementTree.fromstring(drawn).iter(f"{SVG}line")
    return [float(line.get("x1", "")) for line in lines if line.get("class") == "bound"]


def test_plans_of_the_same_sequences_have_one_bound() -> None:
    limits = {"ranks": 4, "max_tokens_per_rank": 1000}
    lengths = [100, 200, 700]
    slow, fast = hcp.plan(lengths, **limits, min_degree=4), hcp.plan(lengths, **limits)
    assert fast.bound < slow.bound
    scale = (960 - LEFT - RIGHT) / slow.makespan
    at = pytest.approx(LEFT + fast.bound * scale, abs=0.06)
    assert bounds_of(timeline_svg({"slow": slow, "fast": fast})) == [at, at]
    (own,) = bounds_of(timeline_svg({"slow": slow}))
    assert own == pytest.approx(LEFT + slow.bound * scale, abs=0.06)


def test_plans_by_one_cost_function_are_compared_whatever_degrees_it_was_asked_for() -> None:
    cost = hcp.CostModel.from_function(lambda tokens, degree: 1e-6 * (5 + tokens**2 / degree))
    limits = {"ranks": 4, "max_tokens_per_rank": 1000, "cost": cost}
    one, other = hcp.plan([100] * 4, **limits), hcp.plan([100] * 4, **limits, min_degree=4)
    assert one.cost != other.cost
    assert "one: x 1.00, idle" in timeline_svg({"one": one, "other": other})


def test_a_brief_picture_has_the_boxes_speeds_and_bound_of_the_whole_one() -> None:
    cost = hcp.CostModel(exchange=4_096, launch=1_048_576)
    limits: dict[str, Any] = {"ranks": 4, "max_tokens_per_rank": 1000, "cost": cost}
    lengths = [100, 200, 700]
    plans = {"slow": hcp.plan(lengths, **limits, min_degree=4), "fast": hcp.plan(lengths, **limits)}
    whole, brief = timeline_svg(plans), brief_svg(plans, width=500, height=80)
    assert [says for says, *_ in boxes_of(brief)] == [says for says, *_ in boxes_of(whole)]
    scale = 500 / plans["slow"].makespan
    assert max(x + wide for _, x, wide in boxes_of(brief)) == pytest.approx(500, abs=0.1)
    assert bounds_of(brief) == [pytest.approx(plans["fast"].bound * scale, abs=0.06)] * 2
    titles = [re.search(rf"{name}: x \d\.\d\d, idle \d+%", whole) for name in plans]
    assert all(title and f">{title[0]}</text>" in brief for title in titles)
    assert ">700 tokens on 4 GPUs</text>" in brief
    assert re.findall(r">(\d+)</text>", brief) == ["1", "3", "4"]
    assert "rank 0</text>" not in brief


LIMITS: dict[str, Any] = {"ranks": 4, "max_tokens_per_rank": 1000}


@pytest.mark.parametrize(
    ("lengths", "limits"),
    [
        ([90] * 5, LIMITS),
        ([100] * 4, LIMITS | {"ranks": 3}),
        ([100] * 4, LIMITS | {"cost": hcp.CostModel(launch=3)}),
        ([100] * 4, LIMITS | {"cost": hcp.CostModel.from_function(lambda tokens, _: tokens)}),
    ],
)
def test_plans_of_other_sequences_ranks_or_costs_are_not_compared(
    lengths: list[int], limits: dict[str, Any]
) -> None:
    one, other = hcp.plan([100] * 4, **LIMITS), hcp.plan(lengths, **limits)
    drawn = timeline_svg({"one": one, "other": other})
    assert f"other: {plan_words(other)[0]}" in drawn
    assert " x 1.00, " not in drawn


def test_a_page_tells_each_rank_and_its_idle_share() -> None:
    plan = hcp.plan([700, 100, 50, 40], ranks=4, max_tokens_per_rank=1000, max_degree=1)
    page = timeline_page({"a": plan}, "Title")
    idle = idle_shares(plan, timeline(plan))
    assert len({f"{share:.1%}" for share in idle}) == 4
    for rank, share in enumerate(idle):
        assert f"<title>rank {rank}: idle {share:.1%}</title>" in page
        assert page.count(f">rank {rank}</text>") == 1
    bars = re.findall(r'class="idle" x="[\d.]+" y="[\d.]+" width="([\d.]+)"', page)
    assert [float(wide) for wide in bars] == [pytest.approx(18 * x, abs=0.006) for x in idle]


def test_pointing_at_a_box_tells_its_length_and_degree() -> None:
    plan = hcp.plan([3000, 10], ranks=8, max_tokens_per_rank=1000)
    page = timeline_page({"a": plan}, "Title")
    (long,) = [
        says
        for says, *_ in boxes_of(page[page.index("<svg") : page.index("</figure>")])
        if says.startswith("sequence 0")
    ]
    degree = plan.micro_batches[0][0].degree
    assert long.startswith(f"sequence 0: 3,000 tokens, CP {degree}, ranks 0 to {degree - 1}, ")
    assert "rect.box:hover{" in page


def test_a_page_needs_no_network() -> None:
    plan = hcp.plan([100] * 4, ranks=4, max_tokens_per_rank=1000)
    page = timeline_page({"a": plan}, "Title <b>", "one\ntwo & three")
    assert page.startswith("<!doctype html>")
    assert "<h1>Title &lt;b&gt;</h1><p>one</p><p>two &amp; three</p>" in page
    assert re.findall(r"(?:src|href)=", page) == []
    assert re.findall(r"https?://\S+", page) == ['http://www.w3.org/2000/svg"']


def test_degrees_have_their_colours() -> None:
    degrees = [*range(1, 130), 4096]
    colours = {d: colour_of(d) for d in degrees}
    assert len({colours[d] for d in (1, 2, 3, 4, 6, 8, 16, 32, 64, 128)}) == 10
    assert colours[128] == colours[4096]
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours.values())


def test_notebooks_show_plans_and_reports() -> None:
    plan = hcp.plan([3000, 10], ranks=8, max_tokens_per_rank=1000)
    assert plan._repr_html_() == timeline_svg({"plan": plan})
    both = {
        "static": hcp.plan([3000, 10], ranks=8, max_tokens_per_rank=1000, min_degree=4),
        "a": plan,
    }
    assert Timelines(both)._repr_html_() == timeline_svg(both)
    shown = plan.report()._repr_html_()
    assert f"<td>{plan.makespan:,}</td>" in shown
    assert '<td style="text-align:left">rank tokens</td>' in shown
    choice = choose_eval_context_parallel(4, 100, ranks=4, train_cp=4)
    assert choice._repr_html_().count("<tr>") == 1 + len(choice.candidates)
