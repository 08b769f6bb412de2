"""The core's tables of payloads equal tables that slow and obvious Python makes, on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.payload_tables import Drawn, by_sequence, draw_payload, listed, result

import hcp
from hcp import _core
from hcp.exchange.layout import Layout
from hcp.exchange.payload_splits import SPLITS, Split, Takers
from hcp.exchange.tables import Route
from hcp.planning.plan import Group


def check_route(drawn: Drawn, plan: hcp.Plan, sources: Sequence[int], rank: int) -> None:
    slow, fast = drawn.slow(plan, sources, rank), drawn.fast(plan, sources, rank)
    of_units = [(slow.of_units(), fast.of_units())] if drawn.rule != "tokens" else []
    for expected, found in ((slow, fast), *of_units):
        route = found.from_sources(sources, rank)
        assert listed(route) == listed(expected.from_sources(sources, rank))
        assert route.parts == expected.rows_of_micro_batches(rank)
        own = [i for i, source in enumerate(sources) if source == rank]
        assert route.source_rows == sum(expected.rows(i) for i in own)


def check_rank_rows(drawn: Drawn, layout: Layout, sources: Sequence[int]) -> None:
    slow = drawn.slow(layout.plan, sources, layout.rank)
    fast = drawn.fast(layout.plan, sources, layout.rank)
    group = Group(layout.first_rank, layout.degree, layout.sequences)
    of_units = [(slow.of_units(), fast.of_units())] if drawn.rule != "tokens" else []
    for expected, found in ((slow, fast), *of_units):
        pieces = []
        if layout.degree:
            pieces = expected.pieces(layout.micro_batch, group, layout.rank)
        rows = found.of_rank(layout)
        assert rows.cu_seqlens.diff().tolist() == [
            sum(piece.rows for piece in pieces if piece.sequence == sequence)
            for sequence in layout.sequences
        ]
        if drawn.rule != "tokens":
            units = [n for piece in pieces for n in expected.units_within(*piece)]
            assert rows.cu_units.diff().tolist() == units
    taking = slow.token_rows(layout) if drawn.runs is not None else []
    assert fast.of_rank(layout).token_rows.tolist() == taking


def check_to_tokens(drawn: Drawn, layout: Layout, sources: Sequence[int]) -> None:
    slow = drawn.slow(layout.plan, sources, layout.rank)
    fast = drawn.fast(layout.plan, sources, layout.rank)
    found = result(lambda: fast.to_tokens(layout))
    if drawn.runs is None:
        assert found == "the payload has no takers, expected tokens that take rows"
        return
    expected = result(lambda: slow.to_tokens(layout))
    if isinstance(expected, str):
        assert found == expected
    else:
        assert listed(found) == listed(expected)
        assert found.source_rows == slow.takers_held(layout)


def check_all(plan: hcp.Plan, rng: random.Random, rules: Sequence[str] = SPLITS) -> None:
    sources = [rng.randrange(plan.ranks) for _ in plan.lengths]
    payloads = [draw_payload(rng, plan.lengths, rule) for rule in rules]
    for rank in range(plan.ranks):
        for drawn in payloads:
            check_route(drawn, plan, sources, rank)
        for micro_batch in range(len(plan.micro_batches)):
            layout = Layout(plan, micro_batch, rank)
            for drawn in payloads:
                check_rank_rows(drawn, layout, sources)
                check_to_tokens(drawn, layout, sources)
            route = Route.by_sequence(plan, sources, micro_batch, rank)
            assert listed(route) == listed(by_sequence(plan, sources, micro_batch, rank))
            assert route.source_rows == len(layout.sequences)


@st.composite
def requests(draw: st.DrawFn) -> tuple[hcp.Plan, random.Random]:
    """Plans with and without pipelines, nodes, documents and padding, degrees forced and free."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    lengths = draw(st.lists(st.integers(1, 60), max_size=6))
    rng = random.Random(draw(st.integers(0, 2**32)))
    masks = None
    if lengths and draw(st.booleans()):
        cuts = [rng.randint(0, n - 1) for n in lengths]
        masks = [
            hcp.Mask.documents([cut, n - cut] if cut else [n])
            for cut, n in zip(cuts, lengths, strict=True)
        ]
    plan = hcp.plan(
        lengths,
        ranks=ranks,
        max_tokens_per_rank=max(lengths, default=1) + 8,
        min_degree=ranks if draw(st.booleans()) else 1,
        alignment=draw(st.sampled_from([1, 4])),
        ranks_per_node=draw(st.sampled_from([None, 1, 2])) if ranks % 2 == 0 else None,
        pipeline_stages=draw(st.sampled_from([1, 2])),
        sync=draw(st.sampled_from(["step", "micro_batch"])),
        masks=masks,
    )
    return plan, rng


@settings(max_examples=40, deadline=None)
@given(requests())
def test_tables_equal_those_of_slow_python(request: tuple[hcp.Plan, random.Random]) -> None:
    check_all(*request)


@pytest.mark.parametrize("rule", SPLITS)
def test_tables_of_64_ranks_equal_those_of_slow_python(rule: str) -> None:
    lengths = [1, 2, 63, 64, 65, 300, 127]
    plan = hcp.plan(lengths, ranks=64, max_tokens_per_rank=900, min_degree=64)
    check_all(plan, random.Random(rule), [rule])
    check_all(hcp.plan(lengths, ranks=64, max_tokens_per_rank=64), random.Random(rule), [rule])


# ---- what is refused -----------------------------------------------------------------------------

PLAN = hcp.plan([8, 5], ranks=2, max_tokens_per_rank=8, min_degree=2)


def takers(counts: list[int], loaded: list[int]) -> Takers:
    """Of sequences that rank 0 loaded and computes."""
    return Takers([0, 0], 0, counts, loaded, loaded)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "another rule": (
        lambda: Split(PLAN, "odd", [1, 1]),
        r"split is 'odd', expected one of 'whole', 'first', 'even', 'tokens'",
    ),
    "too few sequences": (lambda: Split(PLAN, "whole", [1]), "units has 1 items, expected 2"),
    "fewer than no units": (
        lambda: Split(PLAN, "whole", [1, -1]),
        r"units\[1\] is -1, expected >= 0 and 2\^40 of all",
    ),
    "fewer than no rows": (
        lambda: Split(PLAN, "whole", [[1], [-1]]),
        r"unit_rows\[1\] is -1, expected >= 0 and 2\^40 of all",
    ),
    "no takers under tokens": (
        lambda: Split(PLAN, "tokens", [1, 1]),
        'takers is NULL, expected the tokens that take rows, under "tokens"',
    ),
    "a token outside": (
        lambda: Split(PLAN, "even", [0, 1], takers([0, 1], [5, 1, 1])),
        "takers are 1 tokens from token 5 on with 1 rows each, expected tokens from 0 to 4",
    ),
    "tokens that descend": (
        lambda: Split(PLAN, "even", [2, 0], takers([2, 0], [3, 1, 1, 3, 1, 1])),
        "takers are 1 tokens from token 3 on with 1 rows each, expected tokens from 4 to 7",
    ),
    "other rows than there are": (
        lambda: Split(PLAN, "even", [3, 0], takers([1, 0], [0, 2, 1])),
        "takers take other rows than the 3 that there are",
    ),
    "more runs than counted": (
        lambda: Split(PLAN, "even", [1, 0], takers([0, 0], [0, 1, 1])),
        "takers have 1 runs of loaded and 1 of computed sequences, expected 0 and 0",
    ),
    "half a run": (
        lambda: Split(PLAN, "even", [1, 0], takers([1, 0], [0, 1])),
        "loaded has 2 items, expected 0",
    ),
    "units of cut units": (
        lambda: (
            Split(PLAN, "tokens", [1, 0], takers([1, 0], [0, 1, 1]))
            .of_units()
            .from_sources([0, 0], 0)
        ),
        'of_units is 1 under "tokens", which cut units, expected 0',
    ),
    "a source outside": (
        lambda: Split(PLAN, "whole", [1, 1]).from_sources([0, 2], 0),
        r"sources\[1\] is 2, expected 0 to 1",
    ),
    "a rank outside": (
        lambda: Split(PLAN, "whole", [1, 1]).from_sources([0, 1], 2),
        "rank is 2, expected 0 to 1",
    ),
    "a micro-batch outside": (
        lambda: PLAN.core.route_by_sequence([0, 1], 9, 0),
        "micro_batch is 9, expected >= 0 and <",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_payload_is_refused(what: str) -> None:
    call, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        call()


def test_a_payload_keeps_its_plan_alive() -> None:
    split = Split(hcp.plan([8] * 50, ranks=2, max_tokens_per_rank=8), "whole", [3] * 50)
    assert sum(split.from_sources([0] * 50, 0).parts) > 0


def test_sections_have_the_names_of_the_header() -> None:
    assert [name for name, _ in _core.PAYLOAD_SECTIONS] == ["SEQUENCES", "UNITS", "TAKING"]
    assert _core.ROUTE_SECTIONS[-1] == ("PARTS", 1)
