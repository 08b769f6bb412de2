"""Fields that are not one row per token: values of sequences, payloads and their results."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import GlooGroups
from support.fields import check_step, sample
from support.ranks import RankError, run_ranks, try_ranks

import hcp
from hcp.step.config import Config
from hcp.step.planner import StepPlanner


@settings(max_examples=40)
@given(st.data())
def test_every_field_arrives_by_its_rule(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 5))
    lengths = data.draw(st.lists(st.integers(1, 20 * ranks), max_size=6))
    sources = [data.draw(st.integers(0, ranks - 1)) for _ in lengths]
    limits = {"alignment": data.draw(st.sampled_from([1, 4])), "masked": data.draw(st.booleans())}
    found = hcp.loopback(ranks, lambda g: check_step(g, lengths, sources, **limits))
    whole = [sample(i, n) for i, n in enumerate(lengths)]
    rows = sorted(row for rank in found for _, some, _ in rank for row in some)
    assert rows == sorted(row for s in whole for row in s["pixels"][:, 0].tolist())


def gloo_step(rank: int, size: int) -> int:
    found = check_step(GlooGroups(), [40, 7, 1, 19, 64], [0, 2, 2, 1, 1], min_degree=2)
    return sum(len(rows) for _, rows, _ in found)


def test_gloo_ranks_get_their_fields() -> None:
    rows = run_ranks(3, gloo_step)
    assert sum(rows) == sum(len(sample(i, n)["pixels"]) for i, n in enumerate([40, 7, 1, 19, 64]))


def test_even_units_are_spread_by_rows() -> None:
    """Sixteen images of one size, in two sequences that four ranks compute: four images each."""
    units = [4] * 8
    samples = [
        {"x": torch.zeros(40), "image": torch.full((32,), i), "rows": torch.tensor(units)}
        for i in range(2)
    ]
    fields = {"image": hcp.Payload("even", units="rows"), "rows": hcp.Payload(per_unit_of="image")}

    def images(groups: Any) -> list[int]:
        plan = hcp.plan([40, 40], ranks=4, max_tokens_per_rank=20)
        own = samples if groups.transport.rank == 3 else []
        ((_, local),) = hcp.dispatch(plan, own, [3, 3], groups, fields=fields)
        return [len(local.rows), *local.image.unique().tolist()]

    assert hcp.loopback(4, images) == [[4, 0], [4, 0], [4, 1], [4, 1]]


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1.5, -2.0], torch.float32),
        ([7, 2**62], torch.int64),
        ([True, False], torch.bool),
        ([numpy.float32(0.1), numpy.float32(3)], torch.float32),
        ([numpy.float64(0.1), numpy.float64(1e300)], torch.float64),
        ([numpy.int32(-5), numpy.int32(5)], torch.int32),
        ([numpy.bool_(True), numpy.bool_(False)], torch.bool),
        ([numpy.array(2.5), numpy.array(0.1)], torch.float64),
        ([torch.tensor(0.25), 0.1], torch.float32),
    ],
)
def test_a_value_of_a_sequence_may_be_a_number(values: list[Any], dtype: torch.dtype) -> None:
    lengths, rules = [5, 3], {"value": "sequence"}
    samples = [
        {"x": torch.zeros(n), "value": value} for n, value in zip(lengths, values, strict=True)
    ]

    def call(groups: Any) -> list[Any]:
        own = [samples[groups.transport.rank]]
        _, sources, gathered = hcp.gather_lengths(own, groups, fields=rules)
        plan = hcp.plan(lengths, ranks=2, max_tokens_per_rank=4)
        found = []
        for given_samples in (own, gathered):
            for cp, local in hcp.dispatch(plan, given_samples, sources, groups, fields=rules):
                assert local.value.dtype == dtype
                found += zip(cp.layout.sequences, local.value.tolist(), strict=True)
        return found

    for found in hcp.loopback(2, call):
        assert found
        for sequence, value in found:
            assert value == torch.as_tensor(values[sequence]).to(dtype).item()


# ---- strings -------------------------------------------------------------------------------------

TEXTS = ["prompt-7", "", "na\u00efve \u6f22\u5b57 \U0001f600", "a\x00b"]


def texts_here(rank: int, size: int, ahead: int) -> list[tuple[int, str]]:
    """The strings of this rank's sequences, where rank 0 has loaded all and moves none itself."""
    lengths, rules = [20, 1, 7, 9], {"uid": "text", "reward": "sequence"}
    samples: list[Any] = [
        {"x": torch.full((n,), i), "uid": text, "reward": float(i)}
        for i, (n, text) in enumerate(zip(lengths, TEXTS, strict=True))
    ]
    groups = hcp.build_process_groups()
    planner = StepPlanner.of(Config(8, plan_ahead=ahead), size, fields=rules)
    (step,) = planner.steps([samples if rank == 0 else []], groups)
    found = []
    for cp, local in step:
        assert isinstance(local.uid, tuple)
        assert dict(local)["uid"] == local.uid
        assert [int(reward) for reward in local.reward] == list(cp.layout.sequences)
        found += zip(cp.layout.sequences, local.uid, strict=True)
    return found


@pytest.mark.parametrize("ahead", [0, 1])
def test_strings_travel_to_every_rank_of_their_sequences(ahead: int) -> None:
    found = run_ranks(3, texts_here, ahead)
    assert all(text == TEXTS[i] for of_rank in found for i, text in of_rank)
    assert {i for of_rank in found for i, _ in of_rank} == {0, 1, 2, 3}
    assert all(0 in dict(of_rank) for of_rank in found)  # the longest is on all ranks


def test_samples_that_were_gathered_keep_their_strings() -> None:
    def texts(groups: Any) -> list[str]:
        rules = {"uid": "text"}
        samples: list[Any] = [{"x": torch.zeros(2), "uid": text} for text in TEXTS]
        lengths, sources, own = hcp.gather_lengths(samples, groups, fields=rules)
        plan = hcp.plan(lengths, ranks=1, max_tokens_per_rank=8)
        ((cp, local),) = hcp.dispatch(plan, own, sources, groups, fields=rules)
        return [local.uid[cp.layout.sequences.index(i)] for i in range(len(TEXTS))]

    assert hcp.loopback(1, texts) == [TEXTS]


def test_strings_and_numbers_may_go_to_dispatch_as_they_are() -> None:
    def given(groups: Any) -> tuple[Any, Any]:
        rules = {"uid": "text", "reward": "sequence"}
        samples: list[Any] = [{"x": torch.zeros(2), "uid": "a", "reward": 1.5}]
        plan = hcp.plan([2], ranks=1, max_tokens_per_rank=8)
        ((_, local),) = hcp.dispatch(plan, samples, [0], groups, fields=rules)
        return local.uid, local.reward.tolist()

    assert hcp.loopback(1, given) == [(("a",), [1.5])]


VALUES = [
    None, True, 0, -(2**70), 0.1, float("inf"), -0.0, "", "\u6f22 \ud800", (),
    ("step 7", 3, (0.5, None), ((),)),
]  # fmt: skip


def test_values_of_python_arrive_equal_and_of_the_same_types() -> None:
    def values(groups: Any) -> list[tuple[int, Any]]:
        rank, rules = groups.transport.rank, {"info": "value"}
        samples: list[Any] = [
            {"x": torch.zeros(9), "info": value} for value in (VALUES if rank == 1 else [])
        ]
        lengths, sources, _ = hcp.gather_lengths(samples, groups, fields=rules)
        plan = hcp.plan(lengths, ranks=2, max_tokens_per_rank=9, min_degree=2)
        step = hcp.dispatch(plan, samples, sources, groups, fields=rules)
        return [x for cp, local in step for x in zip(cp.layout.sequences, local.info, strict=True)]

    for found in hcp.loopback(2, values):
        assert sorted(i for i, _ in found) == list(range(len(VALUES)))
        assert [repr(dict(found)[i]) for i in range(len(VALUES))] == list(map(repr, VALUES))


def test_ranks_with_other_rules_of_bytes_are_an_error() -> None:
    def given(groups: Any) -> None:
        rules: Any = {"uid": ("text", "value")[groups.transport.rank]}
        plan = hcp.plan([2, 2], ranks=2, max_tokens_per_rank=8)
        hcp.dispatch(plan, [{"x": torch.zeros(2), "uid": "a"}], [0, 1], groups, fields=rules)

    with pytest.raises(hcp.HcpError, match="give every rank the same fields="):
        hcp.loopback(2, given)


# ---- what is refused -----------------------------------------------------------------------------


def of_three(**fields: Any) -> dict[str, Any]:
    """A sequence of five tokens, of which three are marked, and a field of three rows."""
    marked = torch.tensor([0, 1, 1, 0, 1], dtype=torch.bool)
    return {"x": torch.zeros(5), "marked": marked, "image": torch.zeros(3, 2), **fields}


def tokens_of(*tokens: int) -> hcp.Payload:
    return hcp.Payload(tokens=lambda sample: torch.tensor(tokens))


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no rule": (of_three(), {}, r"name a field of another number of rows in fields="),
    "an unknown rule": (of_three(), {"image": "whole"}, r"fields\['image'\] is 'whole', expected"),
    "a rule of no field": (
        of_three(),
        {"image": hcp.Payload(), "sound": hcp.Payload()},
        r"samples\[0\] has no field 'sound', expected one as fields= has a rule for it",
    ),
    "the loss mask": (
        of_three(loss_mask=torch.tensor(1.0)),
        {"image": hcp.Payload(), "loss_mask": "sequence"},
        r"fields\['loss_mask'\] is given, expected none",
    ),
    "no parent": (
        of_three(),
        {"image": hcp.Payload(per_unit_of="sound")},
        r"per_unit_of is 'sound', expected a payload in fields",
    ),
    "a scalar": (
        of_three(image=torch.tensor(1.0)),
        {"image": hcp.Payload()},
        r"samples\[0\]\['image'\] has no dimension, expected a payload \(rows, ...\)",
    ),
    "a number of Python": (
        of_three(image=1.5),
        {"image": hcp.Payload()},
        r"samples\[0\]\['image'\] is float 1.5, expected a tensor \(rows, ...\)$",
    ),
    "a number without a rule": (
        of_three(image=numpy.float32(1.5)),
        {},
        r"expected a tensor \(tokens, ...\), or for a value of the whole sequence "
        r"fields=\{'image': 'sequence'\}$",
    ),
    "an integer of 65 bits": (
        of_three(image=2**64),
        {"image": "sequence"},
        r"\['image'\] is int 18446744073709551616, expected a number of at most 64 bits",
    ),
    "a text": (
        of_three(image="uid-7"),
        {"image": "sequence"},
        r"\['image'\] is str 'uid-7', expected a number .* the rule of strings is 'text'",
    ),
    "no text": (
        of_three(image=1.5),
        {"image": "text"},
        r"\['image'\] is float 1.5, expected a str",
    ),
    "no value": (
        of_three(image=[1, 2]),
        {"image": "value"},
        r"\['image'\] is list \[1, 2\], expected None, a bool, an int, a float, a string, or a",
    ),
    "no value inside": (
        of_three(image=("a", {1: 2})),
        {"image": "value"},
        r"\['image'\] is tuple \('a', \{1: 2\}\), expected None, a bool",
    ),
    "a text of numpy": (
        of_three(image=numpy.str_("uid-7")),
        {"image": "sequence"},
        r"\['image'\] is .*'uid-7'.*, expected a number of at most 64 bits",
    ),
    "a date": (
        of_three(image=numpy.datetime64("2026-11-26")),
        {"image": "sequence"},
        r"\['image'\] is .*datetime64.*2026-11-26.*, expected a number of at most 64 bits",
    ),
    "nothing": (
        of_three(image=None),
        {"image": "sequence"},
        r"\['image'\] is NoneType None, expected a number of at most 64 bits",
    ),
    "an unknown mask": (
        of_three(),
        {"image": hcp.Payload(tokens="mask")},
        r"fields\['image'\].tokens is 'mask', expected one of .* or a function",
    ),
    "too many rows": (
        of_three(image=torch.zeros(4, 2)),
        {"image": hcp.Payload(tokens="marked")},
        r"\['image'\] has 4 rows and 3 tokens that take them, expected as many rows for each",
    ),
    "no row for a token": (
        of_three(image=torch.zeros(0, 2)),
        {"image": hcp.Payload(tokens="marked")},
        r"has 0 rows and 3 tokens that take them",
    ),
    "a row of several tokens": (
        of_three(image=torch.zeros(1, 2)),
        {"image": hcp.Payload("tokens", tokens="marked")},
        r"has 1 rows and 3 tokens .* expected at least one row for each token under \"tokens\"",
    ),
    "tokens that descend": (of_three(), {"image": tokens_of(1, 3, 2)}, "descend or lie outside"),
    "a token outside": (of_three(), {"image": tokens_of(1, 3, 5)}, r"expected 0 to 4"),
    "too few tokens": (of_three(), {"image": tokens_of(1, 3)}, r"expected bools \(5,\), or"),
    "units of other rows": (
        of_three(sizes=torch.tensor([1, 1])),
        {"image": hcp.Payload("even", units="sizes"), "sizes": hcp.Payload(per_unit_of="image")},
        r"has 3 rows and units of \[1, 1\], expected units of at least one row that sum to 3",
    ),
    "units of no integers": (
        of_three(),
        {"image": hcp.Payload("even", units="x")},
        r"the units of samples\[0\]\['image'\] are \(5,\) of torch.float32, expected \(units,\)",
    ),
    "a token in two units": (
        of_three(image=torch.zeros(6, 2)),
        {"image": hcp.Payload("even", units=lambda s: torch.tensor([3, 3]), tokens="marked")},
        r"samples\[0\]\['image'\]: token 2 takes rows before and after row 3, where a unit ends",
    ),
    "rows of units": (
        of_three(sizes=torch.tensor([1, 1])),
        {"image": hcp.Payload(), "sizes": hcp.Payload(per_unit_of="image")},
        r"samples\[0\]\['sizes'\] has 2 rows, expected 3: one per unit of 'image'",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_fields_that_break_their_rule_are_refused(what: str) -> None:
    given, fields, message = WRONG[what]

    def call(groups: Any) -> None:
        hcp.gather_lengths([given], groups, fields=fields)
        plan = hcp.plan([5], ranks=1, max_tokens_per_rank=8)
        hcp.dispatch(plan, [given], [0], groups, fields=fields)

    with pytest.raises(ValueError, match=message):
        hcp.loopback(1, call)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "zigzag"}, "split is 'zigzag', expected one of whole, first, even, tokens"),
        ({"split": "tokens"}, 'split is "tokens" without tokens='),
        ({"split": "tokens", "tokens": "x", "units": "y"}, "tokens cut units"),
        ({"per_unit_of": "x", "tokens": "y"}, "per_unit_of is 'x' beside other options"),
    ],
)
def test_rules_that_contradict_themselves_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hcp.Payload(**options)


def rules_of_their_own(rank: int, size: int) -> None:
    plan = hcp.plan([5], ranks=size, max_tokens_per_rank=8)
    fields = {"image": hcp.Payload("first" if rank else "whole")}
    hcp.dispatch(plan, [] if rank else [of_three()], [0], GlooGroups(), fields=fields)


def test_ranks_with_different_rules_all_hear_it() -> None:
    for result in try_ranks(2, rules_of_their_own):
        assert isinstance(result, RankError)
        assert "rules.image.split differs: whole on rank 0, first on rank 1" in result.message
        assert "give every rank the same fields=" in result.message


def too_few_results(rank: int, size: int) -> None:
    plan = hcp.plan([5], ranks=size, max_tokens_per_rank=3)
    fields = {"image": hcp.Payload("first", tokens="marked")}
    own = [] if rank else [of_three()]
    ((cp, local),) = hcp.dispatch(plan, own, [0], GlooGroups(), fields=fields)
    cp.payloads["image"].to_tokens(local.image[: 2 - rank])


def test_too_few_results_are_an_error_on_every_rank() -> None:
    results = try_ranks(2, too_few_results)
    assert [result.kind for result in results] == ["ValueError", "HcpError"]
    assert "x has shape (2, 2), expected 3 rows" in results[0].message
    assert "rank 0 has refused to_tokens" in results[1].message


def test_results_of_a_payload_without_tokens_are_refused() -> None:
    def call(groups: Any) -> None:
        plan = hcp.plan([5], ranks=1, max_tokens_per_rank=8)
        fields = {"image": hcp.Payload()}
        ((cp, local),) = hcp.dispatch(plan, [of_three()], [0], groups, fields=fields)
        cp.payloads["image"].to_tokens(local.image)

    with pytest.raises(ValueError, match=r"fields\['image'\] has no tokens=, expected the tokens"):
        hcp.loopback(1, call)


def value_of(given: Any) -> Any:
    def call(groups: Any) -> Any:
        plan = hcp.plan([5], ranks=1, max_tokens_per_rank=8)
        samples = [{"rows": torch.arange(5), "value": given}]
        ((_, local),) = hcp.dispatch(plan, samples, [0], groups, fields={"value": "value"})
        return local.value

    return hcp.loopback(1, call)[0][0]


def test_a_tensor_is_no_value_of_pythons() -> None:
    with pytest.raises(ValueError, match=r"a tensor \(2,\) of torch.int64, expected None, a bool"):
        value_of(torch.tensor([49, 50]))  # whose bytes would be those of 12


def test_surrogates_stay_alone() -> None:
    assert value_of(("\ud83d\ude00", "\ud800", "é")) == ("\ud83d\ude00", "\ud800", "é")
