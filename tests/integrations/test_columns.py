"""Items of other people's datasets: each document is the sample it makes alone, or the item is
refused by the name of its column."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hcp import _versions as versions
from hcp.integrations import columns
from hcp.integrations.columns import causal_lm_sample, causal_lm_samples

# ---- what a document says of its tokens, by hand -------------------------------------------------


def next_tokens(document: dict[str, list[int]]) -> list[int]:
    """The labels of a document: the token after each, unless something says that it is not
    learned."""
    labels = document.get("labels", document["input_ids"])
    learned = [
        all(
            document[name][i] for name in ("completion_mask", "assistant_masks") if name in document
        )
        for i in range(len(labels))
    ]
    kept = [label if learn else -100 for label, learn in zip(labels, learned, strict=True)]
    return [*kept[1:], -100]


@st.composite
def rows(draw: st.DrawFn) -> list[dict[str, list[int]]]:
    """Documents of a packed row, which have the same columns."""
    names = draw(st.sets(st.sampled_from(["labels", "completion_mask", "assistant_masks"])))
    documents = []
    for length in draw(st.lists(st.integers(1, 6), min_size=1, max_size=5)):
        numbers = st.lists(st.integers(0, 90), min_size=length, max_size=length)
        bits = st.lists(st.integers(0, 1), min_size=length, max_size=length)
        document = {"input_ids": draw(numbers)}
        for name in sorted(names):
            document[name] = draw(bits)
        if "labels" in names:
            document["labels"] = [
                token if bit else -100
                for token, bit in zip(document["input_ids"], document["labels"], strict=True)
            ]
        documents.append(document)
    return documents


FORMS: dict[str, Callable[[list[int]], Any]] = {
    "a list": list,
    "a tuple": tuple,
    "one row of a batch": lambda x: [x],
    "a tensor": torch.tensor,
    "int32": lambda x: torch.tensor(x, dtype=torch.int32),
    "a tensor of one row": lambda x: torch.tensor([x]),
    "numpy": numpy.array,
    "numpy's int16": lambda x: numpy.array([x], dtype=numpy.int16),
    "numbers of numpy": lambda x: [numpy.int64(i) for i in x],
    "every second of an array": lambda x: numpy.repeat(x, 2)[::2],
}


@settings(max_examples=150)
@given(st.data())
def test_a_packed_row_gives_each_document_as_if_it_were_alone(data: st.DataObject) -> None:
    documents = data.draw(rows())
    lengths = [len(document["input_ids"]) for document in documents]
    item = {name: [x for d in documents for x in d[name]] for name in documents[0]}
    bounds = data.draw(
        st.sets(st.sampled_from(["seq_lengths", "position_ids", "attention_mask"]), min_size=1)
    )
    if "position_ids" in bounds:
        item["position_ids"] = [i for length in lengths for i in range(length)]
    if "attention_mask" in bounds:
        item["attention_mask"] = [i for i, length in enumerate(lengths, 1) for _ in range(length)]
    given_in = {
        name: FORMS[data.draw(st.sampled_from(sorted(FORMS)))](c) for name, c in item.items()
    }
    if "seq_lengths" in bounds:
        given_in["seq_lengths"] = data.draw(st.sampled_from([list, torch.tensor, numpy.array]))(
            lengths
        )
    found = causal_lm_samples(given_in)
    assert [s["input_ids"].tolist() for s in found] == [d["input_ids"] for d in documents]
    assert [s["labels"].tolist() for s in found] == [next_tokens(d) for d in documents]
    for sample in found:
        assert {x.dtype for x in sample.values()} == {torch.int64, torch.bool}
        assert sample["loss_mask"].tolist() == [x != -100 for x in sample["labels"].tolist()]


@pytest.mark.parametrize("form", FORMS)
def test_a_document_may_come_in_any_form(form: str) -> None:
    make = FORMS[form]
    item = {"input_ids": make([5, 6, 7, 8]), "labels": make([-100, -100, 7, 8])}
    item |= {"attention_mask": make([1] * 4), "position_ids": make([0, 1, 2, 3])}
    sample = causal_lm_sample(item)
    assert sample["input_ids"].tolist() == [5, 6, 7, 8]
    assert sample["labels"].tolist() == [-100, 7, 8, -100]


NUMBERS = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.booleans(),
    st.integers(2**63, 2**65),
    st.floats(-9, 9),
    st.none(),
    st.lists(st.integers(0, 3), max_size=2),
    st.integers(-9, 9).map(numpy.int64),
    st.integers(-9, 9).map(torch.tensor),
)


@given(st.one_of(st.lists(st.integers(-(2**63), 2**63 - 1)), st.lists(NUMBERS, max_size=4)))
def test_a_list_gives_the_integers_that_torch_makes_of_it(numbers: list[Any]) -> None:
    try:
        wanted = torch.as_tensor(numbers).to(torch.int64)
        mine = columns._tensor(numbers).to(torch.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        with pytest.raises(type(error)):
            columns._tensor(numbers)
    else:
        assert torch.equal(mine, wanted)


def test_masks_may_be_bools() -> None:
    mask = numpy.array([False, True, True])
    item = {"input_ids": [5, 6, 7], "completion_mask": mask, "attention_mask": torch.ones(3).bool()}
    assert causal_lm_sample(item)["labels"].tolist() == [6, 7, -100]


def test_a_sequence_without_a_token_to_learn_is_a_sample() -> None:
    sample = causal_lm_sample({"input_ids": [5, 6], "labels": [-100, -100]})
    assert sample["loss_mask"].tolist() == [False, False]


def test_a_tail_of_positions_0_is_documents_without_a_loss() -> None:
    """LlamaFactory pads positions by 0: what is added learns nothing, and nothing sees it."""
    item = {"input_ids": [5, 6, 7, 0, 0], "position_ids": [0, 1, 2, 0, 0]}
    first, *others = causal_lm_samples(item)
    assert first["input_ids"].tolist() == [5, 6, 7]
    assert [float(sample["loss_mask"].sum()) for sample in others] == [0.0, 0.0]


# ---- what is refused, and what the error says ----------------------------------------------------

ITEM = {"input_ids": [10, 11, 12, 13, 14, 15, 16, 17]}
PACKED = [0, 1, 2, 0, 0, 1, 2, 3]
REFUSED = {
    "positions of two axes": (
        {"position_ids": [PACKED] * 2},
        "position_ids has shape (2, 8), expected (8,), the place of each token in its document, or "
        "positions of axes",
    ),
    "positions of axes that go on": (
        {"position_ids": [[i + 3 for i in PACKED], PACKED, PACKED]},
        "position_ids has [3, 0, 0] on the axes of the first of 8 tokens, expected 0 on each",
    ),
    "positions of axes, and other lengths": (
        {"position_ids": [PACKED] * 3, "seq_lengths": [4, 4]},
        "documents have [3, 1, 4] tokens by position_ids and [4, 4] by seq_lengths",
    ),
    "positions of axes, and another count": (
        {"position_ids": torch.tensor([range(8)] + [PACKED] * 3)},
        "expected 0 at token 3, not 3, as a document starts at token 3 by position_ids",
    ),
    "numbers of documents, and other positions": (
        {"attention_mask": [1, 1, 1, 1, 2, 2, 2, 2], "position_ids": PACKED},
        "expected 3 at token 3, not 0, as a document starts at token 0 by attention_mask",
    ),
    "numbers of documents, and other lengths": (
        {"attention_mask": [1, 1, 1, 1, 2, 2, 2, 2], "seq_lengths": [3, 5]},
        "documents have [4, 4] tokens by attention_mask and [3, 5] by seq_lengths, expected the "
        "same",
    ),
    "numbers of documents that come again": (
        {"attention_mask": [1, 1, 1, 2, 2, 1, 1, 1]},
        "expected numbers of documents that ascend, as 1, 1, 1, 2, 3, 3",
    ),
    "negative numbers of documents": (
        {"attention_mask": [1, 1, 1, -1, 2, 2, 2, 2]},
        "expected the number of each token's document, 0 in padding",
    ),
    "padding on the left": (
        {"attention_mask": [False] * 2 + [True] * 6},
        "expected 0, which is padding, at the end alone: leave the 2 tokens of 0 out",
    ),
    "padding between documents": (
        {"attention_mask": [1, 1, 1, 0, 2, 2, 2, 2]},
        "at the end alone: leave the 1 tokens of 0 out",
    ),
    "padding alone": ({"attention_mask": [0] * 8}, "leave the 8 tokens of 0 out"),
    "labels in padding": (
        {"attention_mask": [1] * 6 + [0] * 2, "labels": [7] * 8},
        "labels is [7, 7, 7, 7, 7, 7, 7, 7] in an item of 8 tokens, expected -100 where the "
        "attention_mask is 0, as in padding",
    ),
    "positions padded by 1": (
        {"position_ids": [0, 1, 2, 0, 1, 1, 1, 1]},
        "expected 2 at token 5, not 1: positions count up from 0 in each document, without padding",
    ),
    "positions that go on": (
        {"position_ids": range(1024, 1032)},
        "position_ids is [1024, 1025, 1026, 1027, 1028, 1029, 1030, 1031] in an item of 8 tokens, "
        "expected 0 at token 0, not 1024",
    ),
    "a document of the row before": (
        {"position_ids": [5, 6, 0, 1, 0, 1, 2, 3]},
        "expected 0 at token 0, not 5: positions count up from 0 in each document, without "
        "padding. Count them so, or give seq_lengths in their place",
    ),
    "positions with a gap": (
        {"position_ids": [0, 1, 2, 0, 1, 3, 4, 5]},
        "expected 2 at token 5, not 3",
    ),
    "lengths and other positions": (
        {"seq_lengths": [4, 4], "position_ids": PACKED},
        "expected 3 at token 3, not 0, as a document starts at token 0 by seq_lengths",
    ),
    "lengths of nothing": (
        {"seq_lengths": [3, 0, 5]},
        "seq_lengths is [3, 0, 5] in an item of 8 tokens, expected lengths >= 1",
    ),
    "no lengths": ({"seq_lengths": []}, "seq_lengths is [] in an item of 8 tokens"),
    "bounds of documents": (
        {"document_lens": [0, 3, 8]},
        "a sample has 'document_lens', expected seq_lengths, cu_seqlens, or position_ids that",
    ),
    "bounds that end early": (
        {"cu_seqlens": [0, 3, 6]},
        "cu_seqlens ends at 6, expected 8, the tokens of the sample",
    ),
    "bounds and lengths": (
        {"cu_seqlens": [0, 3, 8], "seq_lengths": [4, 4]},
        "documents have [4, 4] tokens by seq_lengths and [3, 5] by cu_seqlens",
    ),
    "bounds of keys that are others": (
        {"cu_seq_lens_q": [0, 3, 8], "cu_seq_lens_k": [0, 4, 8]},
        "cu_seq_lens_k is [0, 4, 8], expected [0, 3, 8], cu_seq_lens_q: queries and keys alike",
    ),
    "labels between bounds": (
        {"cu_seqlens_padded": [0, 4, 8], "cu_seqlens": [0, 3, 7], "labels": [7] * 8},
        "loss_mask is not 0 in the rows 3 to 3, which cu_seqlens_padded says are padding",
    ),
    "numbers of sequences": ({"seq_idx": [0] * 3 + [1] * 5}, "a sample has 'seq_idx', expected"),
    "weights": (
        {"loss_mask": [0.5] * 8},
        "a sample has 'loss_mask', expected only assistant_masks, attention_mask",
    ),
    "labels of another convention": (
        {"labels": [-1, -1, *range(6)]},
        "labels is [-1, -1, 0, 1, 2, 3, 4, 5] in an item of 8 tokens, expected ids >= 0, or -100 "
        "where a token does not count, not -1",
    ),
    "a mask of several values": (
        {"completion_mask": [0, 0, 2, 2, 2, 2, 2, 2]},
        "expected 0 or 1 for each token",
    ),
    "a mask of blocks": (
        {"attention_mask": numpy.ones((8, 8), bool)},
        "attention_mask has shape (8, 8), expected (8,): hcp makes the masks of documents itself",
    ),
    "two rows": (
        {"input_ids": [[1, 2], [3, 4]]},
        "input_ids has shape (2, 2), expected (tokens,): an item is one row",
    ),
    "negative tokens": ({"input_ids": [1, -100]}, "input_ids is [1, -100] in an item of 2 tokens"),
    "no tokens": ({"input_ids": [[]]}, "input_ids is empty in a sample"),
    "tokens in words": (
        {"input_ids": ["a", "b"]},
        "input_ids is list, expected integers (tokens,)",
    ),
    "rows of several lengths": ({"input_ids": [[1, 2], [3]]}, "input_ids is list, expected"),
    "objects": ({"labels": numpy.array([None] * 8)}, "labels is ndarray, expected integers"),
    "complex numbers": ({"labels": [1j] * 8}, "labels is torch.complex64, expected integers"),
    "no column of tokens": (
        {"input_ids": None, "labels": [1]},
        "a sample has ['labels'], expected",
    ),
    "names of several types": ({7: [1]}, "a sample has '7', expected only"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("make", [causal_lm_sample, causal_lm_samples])
def test_what_hcp_would_not_follow_is_refused_with_its_cause(what: str, make: Any) -> None:
    columns, message = REFUSED[what]
    with pytest.raises(ValueError, match=re.escape(message)):
        make({**ITEM, **columns})


SAYING = {
    "positions": {"position_ids": [PACKED]},
    "lengths": {"seq_lengths": [3, 1, 4]},
    "numbers": {"attention_mask": [1, 1, 1, 2, 3, 3, 3, 3]},
    "numbers of another start": {"attention_mask": [[4, 4, 4, 5, 7, 7, 7, 7]]},
    "numbers and positions": {
        "attention_mask": [1, 1, 1, 2, 3, 3, 3, 3],
        "position_ids": PACKED,
        "seq_lengths": [3, 1, 4],
    },
    "bounds": {"cu_seqlens": [0, 3, 4, 8]},
    "bounds of queries": {"cu_seqlens_q": [0, 3, 4, 8], "cu_seqlens_kv": [0, 3, 4, 8]},
}


@pytest.mark.parametrize("what", SAYING)
def test_one_sample_of_several_documents_is_refused(what: str) -> None:
    item = {**ITEM, **SAYING[what]}
    with pytest.raises(ValueError, match=r"documents of \[3, 1, 4\] tokens, expected one document"):
        causal_lm_sample(item)
    found = [sample["input_ids"].tolist() for sample in causal_lm_samples(item)]
    assert found == [[10, 11, 12], [13], [14, 15, 16, 17]]


def test_positions_of_axes_travel_with_the_rows() -> None:
    """A document of an image of 2 x 2 tokens and a word after it, and one of two words."""
    axes = [[0, 0, 0, 0, 2, 0, 1], [0, 0, 1, 1, 2, 0, 1], [0, 1, 0, 1, 2, 0, 1]]
    counted = [0, 1, 2, 3, 4, 0, 1]
    padded = [[*row, 1] for row in axes]
    forms: list[dict[str, Any]] = [
        {"position_ids": axes},
        {"position_ids": torch.tensor(axes)[:, None]},
        {"position_ids": [counted, *axes]},
        {"position_ids": torch.tensor([counted, *axes])[:, None], "seq_lengths": [5, 2]},
        {"position_ids": padded, "attention_mask": [1] * 5 + [2] * 2 + [0]},
    ]
    for form in forms:
        tokens = list(range(8 if "attention_mask" in form else 7))
        found = causal_lm_samples({"input_ids": tokens, **form})
        assert [sample["input_ids"].tolist() for sample in found] == [[0, 1, 2, 3, 4], [5, 6]]
        axes_found = [sample["rope_positions"].T.tolist() for sample in found]
        assert axes_found == [[row[:5] for row in axes], [row[5:] for row in axes]]


PADDED = {
    "a mask": {"attention_mask": [1] * 5 + [0] * 3, "position_ids": [0, 1, 2, 0, 1, 1, 1, 1]},
    "a mask and labels": {
        "attention_mask": [1] * 5 + [0] * 3,
        "labels": [10, 11, 12, 13, 14, -100, -100, -100],
        "seq_lengths": [3, 2],
    },
    "numbers": {"attention_mask": [1, 1, 1, 2, 2, 0, 0, 0]},
    "places": {
        "input_ids": [10, 11, 12, 0, 13, 14, 0, 0],
        "cu_seqlens_padded": [0, 4, 8],
        "cu_seqlens": [0, 3, 5],
        "position_ids": [0, 1, 2, 3, 0, 1, 2, 3],
    },
    "places of queries": {
        "input_ids": [10, 11, 12, 0, 13, 14, 0, 0],
        "labels": [10, 11, 12, -100, 13, 14, -100, -100],
        "cu_seqlens_q_padded": torch.tensor([[0, 4, 8]]),
        "cu_seqlens_q": torch.tensor([[0, 3, 5]]),
    },
}


@pytest.mark.parametrize("what", PADDED)
def test_padding_is_left_out(what: str) -> None:
    first, second = causal_lm_samples({**ITEM, **PADDED[what]})
    assert first["input_ids"].tolist() == [10, 11, 12]
    assert first["labels"].tolist() == [11, 12, -100]
    assert second["input_ids"].tolist() == [13, 14]
    assert second["labels"].tolist() == [14, -100]


# ---- what collators of Transformers and TRL write ------------------------------------------------

DOCUMENTS = [
    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
    {"input_ids": [8], "labels": [8]},
    {"input_ids": [9, 10, 11, 12], "labels": [-100, -100, -100, -100]},
]


def same(found: list[dict[str, Any]], documents: list[dict[str, Any]]) -> None:
    assert [s["input_ids"].tolist() for s in found] == [d["input_ids"] for d in documents]
    assert [s["labels"].tolist() for s in found] == [next_tokens(d) for d in documents]


def test_rows_of_transformers_flattening_collator_are_taken_apart() -> None:
    transformers = pytest.importorskip("transformers")
    for returned in ("pt", "np"):
        flattened = transformers.DataCollatorWithFlattening(return_tensors=returned)(DOCUMENTS)
        same(causal_lm_samples(flattened), DOCUMENTS)
    more = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(DOCUMENTS)
    same(causal_lm_samples(more), DOCUMENTS)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_rows_that_trl_packs_are_taken_apart(strategy: str) -> None:
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    if strategy == "bfd_split" and versions.numbers(trl.__version__) < (1,):
        pytest.skip(f"TRL {trl.__version__} has no such strategy")
    dataset = datasets.Dataset.from_list(DOCUMENTS)
    packed = trl.pack_dataset(dataset, 5, strategy)
    for form in (None, "torch", "numpy"):
        found = [s for item in packed.with_format(form) for s in causal_lm_samples(item)]
        tokens = [s["input_ids"].tolist() for s in found]
        if strategy == "wrapped":  # without bounds: the rows are documents
            assert tokens == [[5, 6, 7, 8, 9], [10, 11, 12]]
        else:
            assert sorted(tokens) == sorted(d["input_ids"] for d in DOCUMENTS)
            assert {tuple(s["labels"].tolist()) for s in found} == {
                tuple(next_tokens(d)) for d in DOCUMENTS
            }
