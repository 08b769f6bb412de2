"""Real text as packed sequences: documents, their tokens, and the global batches they make.

A token is a byte; one more token ends a document. A document longer than the limit is split, never
dropped. Nothing is padded. The documents of a global batch are a pure function of (seed,
iteration): each rank computes them without asking others, and loads its share only.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

END_OF_DOCUMENT = 256
VOCABULARY_SIZE = 264
"""256 bytes and the end of a document, rounded up to a multiple of 8."""

STANDARD_LIBRARY_SEPARATOR = "\n\n"
"""Blank lines: most blocks between them are short, a few are tables of many thousand tokens."""

HELD_OUT_SEED = 1234

NOT_OURS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True, slots=True)
class Document:
    """A run of tokens that attends to itself only: a whole text, or one part of a text that was
    split."""

    text: bytes
    ends: bool
    """Whether the end-of-document token follows; not so for a part that another part continues."""

    @property
    def length(self) -> int:
        return len(self.text) + self.ends


@dataclass(frozen=True)
class Texts:
    """Texts that were read, with their origin."""

    origin: str
    texts: list[bytes]
    files: int
    skipped: Counter[str]
    """Files and records left out, by reason."""


@dataclass(frozen=True)
class Corpus:
    texts: Texts
    training: list[Document]
    validation: list[Document]

    @property
    def longest(self) -> int:
        return max(document.length for document in self.training + self.validation)

    @property
    def digest(self) -> str:
        """A hash of all documents, in hexadecimal."""
        digest = hashlib.sha256(len(self.training).to_bytes(8, "little"))
        for document in self.training + self.validation:
            digest.update(document.length.to_bytes(8, "little") + document.text)
        return digest.hexdigest()

    def describe(self) -> str:
        """Describe the corpus in two or three lines."""
        lengths = [document.length for document in self.training + self.validation]
        split = len(lengths) - len(self.texts.texts)
        percentiles = ", ".join(
            f"p{p} {value:,}" for p, value in length_percentiles(lengths).items()
        )
        lines = [
            f"{self.texts.origin}: {self.texts.files:,} files, {len(lengths):,} documents"
            f" ({split:,} of them from splitting), {sum(lengths):,} tokens",
            f"tokens in a document: {percentiles}",
        ]
        if self.texts.skipped:
            reasons = ", ".join(
                f"{count:,} {reason}" for reason, count in sorted(self.texts.skipped.items())
            )
            lines.append(f"left out: {reasons}")
        return "\n".join(lines)


def load_corpus(
    path: str | None,
    *,
    max_length: int,
    eval_documents: int,
    seed: int,
    separator: str | None = None,
) -> Corpus:
    """Read the texts at path, split the long ones, and hold some out to evaluate.

    None stands for the Python standard library. Raises ValueError for input that cannot be used,
    with file and line where there is one.
    """
    if max_length < 2:
        raise ValueError(
            f"max_length is {max_length}, expected >= 2: one token has nothing to predict"
        )
    if path is None:
        texts = read_standard_library()
        separator = STANDARD_LIBRARY_SEPARATOR if separator is None else separator
    else:
        texts = read_texts(Path(path))
    if separator:
        texts = separate(texts, separator.encode())
    if not texts.texts:
        reasons = (
            ", ".join(f"{count} {reason}" for reason, count in sorted(texts.skipped.items()))
            or "no files"
        )
        raise ValueError(f"{texts.origin}: no text to train on ({reasons})")
    parts = [split_text(text, max_length) for text in texts.texts]
    training, validation = hold_out(parts, eval_documents, seed)
    return Corpus(texts, training, validation)


def read_corpus(args: argparse.Namespace) -> Corpus:
    """Load the corpus that the options of `add_data_arguments` ask for. What is held out does not
    depend on --seed: evaluations of two seeds are over the same documents."""
    return load_corpus(
        args.data,
        max_length=args.max_length,
        eval_documents=args.eval_documents,
        seed=HELD_OUT_SEED,
        separator=args.document_separator,
    )


# ---- Reading -------------------------------------------------------------------------------------


def read_standard_library() -> Texts:
    """Read the sources of the running Python, without its tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = read_folder(root, "*.py", NOT_OURS)
    return Texts("Python standard library", texts.texts, texts.files, texts.skipped)


def read_texts(path: Path) -> Texts:
    """Read a folder of text files, a text file, or a .jsonl file whose records have "text"."""
    if path.is_dir():
        return read_folder(path, "*", set())
    if path.suffix == ".jsonl":
        return read_json_lines(path)
    text = read_bytes(path)
    if b"\0" in text:
        raise ValueError(f"{path}: byte {text.index(0)} is zero, expected a text file")
    return Texts(str(path), [text] if text else [], 1, Counter({} if text else {"empty": 1}))


def read_folder(root: Path, pattern: str, without: set[str]) -> Texts:
    """Read all text files under root, by path. Files that are hidden, empty, not text or not
    readable are counted, not read."""
    texts: list[bytes] = []
    skipped: Counter[str] = Counter()
    files = 0
    for path in files_under(root, pattern, without):
        files += 1
        try:
            text = read_bytes(path)
        except ValueError:
            skipped["unreadable"] += 1
            continue
        if not text:
            skipped["empty"] += 1
        elif b"\0" in text:
            skipped["not text"] += 1
        else:
            texts.append(text)
    return Texts(str(root), texts, files, skipped)


def files_under(root: Path, pattern: str, without: set[str]) -> list[Path]:
    """Return files by path. Folders that are hidden or left out are not entered: a folder of
    installed packages has ten times the files of the standard library that it is in."""

    def kept(names: Iterable[str]) -> list[str]:
        return [name for name in names if name not in without and not name.startswith(".")]

    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = kept(folders)
        found += [Path(folder, name) for name in kept(fnmatch.filter(names, pattern))]
    return sorted(path for path in found if path.is_file())


def read_json_lines(path: Path) -> Texts:
    texts: list[bytes] = []
    skipped: Counter[str] = Counter()
    for number, line in enumerate(read_bytes(path).split(b"\n"), start=1):
        if not line.strip():
            continue
        text = read_record(line, f"{path}:{number}")
        if text:
            texts.append(text)
        else:
            skipped["empty"] += 1
    return Texts(str(path), texts, 1, skipped)


def read_record(line: bytes, place: str) -> bytes:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON: {error}") from None
    if not isinstance(record, dict) or "text" not in record:
        raise ValueError(f'{place}: expected an object with a field "text"')
    if not isinstance(record["text"], str):
        raise ValueError(
            f'{place}: field "text" is {type(record["text"]).__name__}, expected a string'
        )
    # JSON can spell half a surrogate pair, which UTF-8 proper cannot.
    return record["text"].encode("utf-8", "surrogatepass")


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {os.strerror(error.errno or 0)}") from None


def separate(texts: Texts, separator: bytes) -> Texts:
    """Cut each text at the separator. Parts of nothing but white space are dropped."""
    cut = [part.strip(b"\r\n") for text in texts.texts for part in text.split(separator)]
    return Texts(texts.origin, [part for part in cut if part.strip()], texts.files, texts.skipped)


# ---- Documents -----------------------------------------------------------------------------------


def split_text(text: bytes, max_length: int) -> list[Document]:
    """Split a text and its end token into documents of at most max_length tokens each."""
    length = len(text) + 1
    return [
        Document(text[start : start + max_length], ends=start + max_length >= length)
        for start in range(0, length, max_length)
    ]


def hold_out(
    parts: Sequence[list[Document]], count: int, seed: int
) -> tuple[list[Document], list[Document]]:
    """Return (training, validation). Exactly `count` documents are held out: whole texts, as long
    as they fit. Raises ValueError if none is left to train on."""
    total = sum(len(part) for part in parts)
    if total <= count:
        raise ValueError(
            f"{total} documents - {count} held out to evaluate = {total - count} to train on,"
            " expected >= 1: lower --eval-documents or --max-length, or add text"
        )
    held: set[int] = set()
    validation: list[Document] = []
    for i in permutation(len(parts), seed, -1):
        if len(validation) + len(parts[i]) <= count:
            held.add(i)
            validation += parts[i]
    training = [list(part) for i, part in enumerate(parts) if i not in held]
    # Texts that did not fit have more documents than are still missing: the end of the first of
    # them fills the rest.
    while len(validation) < count:
        validation.append(training[0].pop())
    return [document for part in training for document in part], validation


def length_percentiles(lengths: Iterable[int]) -> dict[int, int]:
    """Map percentages to the length that so many percent of the documents do not exceed."""
    ascending = sorted(lengths)
    return {
        p: ascending[max(0, -(-len(ascending) * p // 100) - 1)]
        for p in (10, 25, 50, 75, 90, 99, 100)
    }


# ---- Global batches ------------------------------------------------------------------------------


def batch_indices(documents: int, *, seed: int, iteration: int, batch_size: int) -> list[int]:
    """Return the indices of the documents in an iteration's global batch.

    Every pass through the data takes each document once, in an order of its own.
    """
    positions = range(iteration * batch_size, (iteration + 1) * batch_size)
    return [permutation(documents, seed, p // documents)[p % documents] for p in positions]


@lru_cache(maxsize=4)
def permutation(n: int, seed: int, round_: int) -> list[int]:
    import torch

    generator = torch.Generator().manual_seed((seed * 1_000_003 + round_) % 2**63)
    return torch.randperm(n, generator=generator).tolist()


def load(
    documents: Sequence[Document], indices: Sequence[int], device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the samples at these indices."""
    for i in indices:
        yield sample(documents[i], device)


def sample(document: Document, device: torch.device) -> dict[str, torch.Tensor]:
    """Return a document's tokens, labels and loss mask, (tokens,) each.

    A label is the token that follows. Nothing follows the last one, whose mask is 0.
    """
    import torch

    tokens = torch.frombuffer(bytearray(document.text + b"\0"), dtype=torch.uint8)[
        : document.length
    ].long()
    if document.ends:
        tokens[-1] = END_OF_DOCUMENT
    labels = tokens.roll(-1)
    loss_mask = torch.ones(document.length)
    labels[-1] = END_OF_DOCUMENT
    loss_mask[-1] = 0.0
    return {
        "tokens": tokens.to(device),
        "labels": labels.to(device),
        "loss_mask": loss_mask.to(device),
    }
