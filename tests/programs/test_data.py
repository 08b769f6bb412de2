"""The data of programs: no text is lost, and a batch is a pure function of seed and iteration."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hcp.tools.programs import text_data

CPU = torch.device("cpu")


def corpus_of(path, max_length=100, eval_documents=1, seed=0, **options):
    return text_data.load_corpus(
        str(path), max_length=max_length, eval_documents=eval_documents, seed=seed, **options
    )


def text_of(documents):
    return b"".join(document.text for document in documents)


# ---- Reading ----


def test_a_folder_is_read_by_path_and_what_is_left_out_is_counted(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_bytes(b"one")
    (tmp_path / "a.txt").write_bytes("zwei, drei: \u00e4\u20ac\U0001f600".encode())
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "picture").write_bytes(b"\x89PNG\0")
    (tmp_path / ".hidden").write_bytes(b"no")
    texts = text_data.read_texts(tmp_path)
    assert texts.texts == ["zwei, drei: \u00e4\u20ac\U0001f600".encode(), b"one"]
    assert (texts.files, dict(texts.skipped)) == (4, {"empty": 1, "not text": 1})


def test_text_in_another_encoding_is_read_as_it_is(tmp_path):
    (tmp_path / "latin").write_bytes("d\u00e9j\u00e0 vu".encode("latin-1"))
    assert text_data.read_texts(tmp_path).texts == [b"d\xe9j\xe0 vu"]


def test_a_text_file_is_one_text(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(b"x" * 250)
    corpus = corpus_of(path)
    assert sorted(document.length for document in corpus.training + corpus.validation) == [
        51,
        100,
        100,
    ]


def test_a_separator_cuts_texts(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("one\n---\ntwo\n---\n\n---\nthree\n")
    corpus = corpus_of(path, separator="---\n")
    assert sorted(document.text for document in corpus.training + corpus.validation) == [
        b"one",
        b"three",
        b"two",
    ]


def test_json_lines_give_a_text_each(tmp_path):
    path = tmp_path / "lines.jsonl"
    records = [
        {"text": "a\nb", "id": 1},
        {"text": ""},
        {"text": "\ud800 half a pair"},
        {"text": "\u00fc"},
    ]
    path.write_text("\n\n".join(json.dumps(record) for record in records) + "\n")
    texts = text_data.read_texts(path)
    assert texts.texts == [b"a\nb", b"\xed\xa0\x80 half a pair", b"\xc3\xbc"]
    assert dict(texts.skipped) == {"empty": 1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON"),
        (b"[1]", 'expected an object with a field "text"'),
        (b'"text"', 'expected an object with a field "text"'),
        (b'{"content": "x"}', 'expected an object with a field "text"'),
        (b'{"text": 7}', 'field "text" is int, expected a string'),
        (b'{"text": null}', 'field "text" is NoneType, expected a string'),
        (b'{"text": "\xff"}', "not JSON"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path, line, message):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=f"lines.jsonl:3: {message}"):
        corpus_of(path)


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl"])
def test_an_empty_file_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=f"{name}: no text to train on"):
        corpus_of(tmp_path / name)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no text to train on \(no files\)"):
        corpus_of(tmp_path)


def test_a_folder_without_text_says_what_it_has(tmp_path):
    (tmp_path / "picture").write_bytes(b"\0")
    (tmp_path / "nothing").write_bytes(b"")
    with pytest.raises(ValueError, match=r"no text to train on \(1 empty, 1 not text\)"):
        corpus_of(tmp_path)


def test_a_binary_file_is_refused_with_the_place(tmp_path):
    path = tmp_path / "program"
    path.write_bytes(b"ELF\0")
    with pytest.raises(ValueError, match="program: byte 3 is zero, expected a text file"):
        corpus_of(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"missing\.txt: cannot be read: No such file"):
        corpus_of(tmp_path / "missing.txt")


def test_the_standard_library_is_there():
    corpus = text_data.load_corpus(None, max_length=4096, eval_documents=37, seed=0)
    assert len(corpus.validation) == 37
    assert corpus.longest == 4096
    assert corpus.texts.files > 100
    assert "Python standard library" in corpus.describe()


# ---- Documents ----


@pytest.mark.parametrize(
    ("size", "lengths"),
    [(0, [1]), (8, [9]), (9, [10]), (10, [10, 1]), (11, [10, 2]), (19, [10, 10])],
)
def test_a_text_is_split_at_max_length_and_its_end_counts(size, lengths):
    documents = text_data.split_text(b"x" * size, 10)
    assert [document.length for document in documents] == lengths
    assert [document.ends for document in documents] == [False] * (len(lengths) - 1) + [True]


@given(st.binary(max_size=200), st.integers(2, 50))
def test_splitting_loses_nothing(text, max_length):
    documents = text_data.split_text(text, max_length)
    assert text_of(documents) == text
    assert sum(document.length for document in documents) == len(text) + 1
    assert all(1 <= document.length <= max_length for document in documents)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=20), st.integers(1, 40), st.integers(0, 3))
def test_exactly_as_many_documents_are_held_out_as_asked_and_none_is_lost(sizes, count, seed):
    parts = [
        [text_data.Document(f"{i}.{j}".encode(), True) for j in range(size)]
        for i, size in enumerate(sizes)
    ]
    if sum(sizes) <= count:
        with pytest.raises(ValueError, match=f"{sum(sizes)} documents - {count} held out"):
            text_data.hold_out(parts, count, seed)
        return
    training, validation = text_data.hold_out(parts, count, seed)
    assert len(validation) == count
    assert sorted(d.text for d in training + validation) == sorted(
        d.text for part in parts for d in part
    )


@given(st.binary(min_size=1, max_size=50), st.booleans())
def test_labels_are_the_next_tokens_and_the_last_one_does_not_count(text, ends):
    sample = text_data.sample(text_data.Document(text, ends), CPU)
    expected = list(text) + [text_data.END_OF_DOCUMENT] * ends
    assert sample["tokens"].tolist() == expected
    assert sample["labels"].tolist()[:-1] == expected[1:]
    assert sample["loss_mask"].tolist() == [1.0] * (len(expected) - 1) + [0.0]
    assert sample["tokens"].dtype == sample["labels"].dtype == torch.int64
    assert sample["loss_mask"].dtype == torch.float32


def test_the_end_alone_is_a_document_too():
    assert text_data.sample(text_data.Document(b"", True), CPU)["tokens"].tolist() == [
        text_data.END_OF_DOCUMENT
    ]


@given(st.lists(st.integers(1, 100), min_size=1))
def test_percentiles_are_lengths_of_documents(lengths):
    percentiles = text_data.length_percentiles(lengths)
    assert set(percentiles.values()) <= set(lengths)
    assert percentiles[100] == max(lengths)
    for p, value in percentiles.items():
        assert sum(length <= value for length in lengths) * 100 >= p * len(lengths)


# ---- Global batches ----


def batch(iteration, documents=10, seed=3, size=4):
    return text_data.batch_indices(documents, seed=seed, iteration=iteration, batch_size=size)


def test_a_pass_takes_every_document_once():
    passes = [i for iteration in range(5) for i in batch(iteration)]
    assert sorted(passes[:10]) == sorted(passes[10:]) == list(range(10))
    assert passes[:10] != passes[10:]


def test_a_batch_depends_on_seed_and_iteration_only():
    assert batch(3) == batch(3)
    text_data.permutation.cache_clear()
    assert batch(1) == [i for iteration in range(5) for i in batch(iteration)][4:8]
    assert [batch(i, seed=3) for i in range(2)] != [batch(i, seed=4) for i in range(2)]


def test_a_batch_may_be_larger_than_a_pass():
    assert sorted(batch(0, documents=3, size=9)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_two_readings_are_equal_and_other_texts_are_not(tmp_path):
    for name, text in (("a", "one"), ("b", "two"), ("c", "three")):
        (tmp_path / name).write_text(text)
    first, second = corpus_of(tmp_path), corpus_of(tmp_path)
    assert first.digest == second.digest
    (tmp_path / "c").write_text("drei")
    assert corpus_of(tmp_path).digest != first.digest


def test_a_document_of_one_token_is_too_short_a_limit(tmp_path):
    with pytest.raises(ValueError, match="max_length is 1, expected >= 2"):
        corpus_of(tmp_path, max_length=1)
