"""Masks: which tokens of its sequence each token sees.

A mask is a set of slices, each of consecutive queries and consecutive keys, as in MagiAttention's
AttnSlice (https://arxiv.org/abs/2505.13211). Kernels compute slices as they are.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from hcp import _core
from hcp._validate import (
    IntegerArray,
    expect_choice,
    expect_items,
    expect_names,
    expect_size,
    expect_sizes,
    shallow,
)

if TYPE_CHECKING:
    from torch import Tensor

FULL, CAUSAL, INVERSE_CAUSAL, BOTH = KINDS = ("full", "causal", "inverse_causal", "both")
"""The kinds of a slice."""


class Slice(NamedTuple):
    """Consecutive queries, the consecutive keys that they may see, and which of these they do."""

    queries: tuple[int, int]
    """First, and one after the last."""
    keys: tuple[int, int]
    kind: str = FULL
    """"full": every query sees every key. "causal": the last query sees up to the last key, and
    each query before it one key less at the end. "inverse_causal": the first query sees from the
    first key on, and each query after it one key less at the beginning. "both": both limits."""

    @property
    def band(self) -> tuple[int, int]:
        """(low, high): query q sees key k of the slice when low <= k - q <= high."""
        (first, end), (first_key, end_key) = self.queries, self.keys
        low = first_key - first if self.kind in (INVERSE_CAUSAL, BOTH) else first_key - end + 1
        high = end_key - end if self.kind in (CAUSAL, BOTH) else end_key - first - 1
        return low, high


class Mask:
    """An immutable mask of one sequence: which of its tokens each token sees.

    A token that is in no slice sees nothing: its attention is 0.
    """

    __slots__ = ("__dict__", "length", "runs")

    length: int
    """Tokens of the sequence."""
    runs: tuple[tuple[int, int], ...] | None
    """(first token, its position) of each run of positions; None: positions are places."""

    def __init__(
        self,
        length: int,
        slices: Iterable[Slice | tuple[Any, ...]],
        positions: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Check the slices, and keep them in order.

        Args:
            length: tokens of the sequence.
            slices: (queries, keys, kind) or :class:`Slice`, in any order. No pair may be in two of
                them.
            positions: runs (first token, its position), the first run at token 0, for tokens whose
                positions are not their places in the sequence; they ascend within a run. None: they
                are their places.

        Raises:
            ValueError: a slice outside the sequence, of an unknown kind, or over another; it is
                named.
        """
        set_once = object.__setattr__
        set_once(self, "length", _expect_length(length))
        made = [_checked(self.length, i, part) for i, part in enumerate(slices)]
        _expect_apart(made)
        vars(self)["slices"] = tuple(sorted(made, key=lambda part: (part.queries, part.keys)))
        set_once(self, "runs", _runs_of(self.length, positions))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Mask is immutable, expected no new {name}: make another Mask")

    # ---- constructors ----

    @classmethod
    def full(cls, length: int) -> Self:
        """Every token sees every token.

        Args:
            length: tokens of the sequence.

        Returns:
            The mask.
        """
        return cls(length, [Slice((0, length), (0, length))])

    @classmethod
    def causal(cls, length: int) -> Self:
        """A token sees itself and what comes before it.

        Args:
            length: tokens of the sequence.

        Returns:
            The mask.
        """
        return cls(length, [Slice((0, length), (0, length), CAUSAL)])

    @classmethod
    def window(cls, length: int, left: int, right: int = 0) -> Self:
        """Token i sees those from i - left to i + right.

        Args:
            length: tokens of the sequence.
            left: tokens seen before a token; -1: no limit.
            right: tokens seen after it; -1: no limit.

        Returns:
            The mask.
        """
        expect_size("left", left, least=-1)
        expect_size("right", right, least=-1)
        return cls(length, _band((0, length), (0, length), left, right))

    @classmethod
    def prefix_lm(cls, length: int, prefix: int) -> Self:
        """The first tokens see each other, both ways; later ones are causal (T5,
        https://arxiv.org/abs/1910.10683; PaliGemma).

        Args:
            length: tokens of the sequence.
            prefix: tokens of its beginning that see each other.

        Returns:
            The mask.
        """
        return cls.bidirectional_spans(length, [(0, prefix)] if prefix else [])

    @classmethod
    def bidirectional_spans(
        cls, length: int, spans: Iterable[tuple[int, int]], *, left: int = -1
    ) -> Self:
        """A causal text in which the tokens of each span see their whole span: the images of Gemma
        3.

        Args:
            length: tokens of the sequence.
            spans: (first, end) of each span.
            left: tokens see at most so many before themselves, and the whole span that they are in;
                -1: no limit.

        Returns:
            The mask.
        """
        expect_size("left", left, least=-1)
        parts: list[Slice] = []
        done = 0
        for i, (first, end) in enumerate(spans):
            if not done <= first < end <= length:
                raise ValueError(
                    f"spans[{i}] is {(first, end)}, expected {done} <= first < end <= {length}: "
                    "spans ascend inside the sequence"
                )
            parts += _band((done, first), (0, first), left, 0)
            # Queries that look back past their span's beginning, then those that do not.
            past = end if left < 0 else min(end, first + left + 1)
            parts += _band((first, past), (0, end), left, -1)
            parts += [Slice((past, end), (first, end))] if past < end else []
            done = end
        parts += _band((done, length), (0, length), left, 0)
        return cls(length, parts)

    @classmethod
    def chunked(cls, length: int, chunk: int) -> Self:
        """Causal inside each chunk: chunked attention (Llama 4).

        Args:
            length: tokens of the sequence.
            chunk: tokens of a chunk.

        Returns:
            The mask.
        """
        expect_size("chunk", chunk)
        ends = [*range(chunk, length, chunk), length]
        return cls(
            length,
            [Slice(part, part, CAUSAL) for part in itertools.pairwise([0, *ends])],
        )

    @classmethod
    def streaming(cls, length: int, first: int, left: int) -> Self:
        """A causal window, and first tokens that all later ones see (StreamingLLM,
        https://arxiv.org/abs/2309.17453).

        Args:
            length: tokens of the sequence.
            first: tokens of its beginning that all later ones see.
            left: tokens that a token sees before itself.

        Returns:
            The mask.
        """
        expect_size("first", first, least=0)
        expect_size("left", left, least=0)
        near = min(length, first + left + 1)  # queries whose window reaches the first tokens
        parts = _band((0, near), (0, near), -1, 0)
        if near < length:
            parts += [Slice((near, length), (0, first))] if first else []
            parts += [Slice((near, length), (near - left, length), BOTH)]
        return cls(length, parts)

    @classmethod
    def documents(cls, parts: Iterable[int | Mask], *, restart: bool = True) -> Self:
        """Documents end to end in one sequence: each sees itself only.

        Args:
            parts: for each document its length, if it is causal, or its mask.
            restart: positions restart in each document.

        Returns:
            The mask.
        """
        slices: list[Slice] = []
        runs: list[tuple[int, int]] = []
        start = 0
        for i, part in enumerate(parts):
            mask = part if isinstance(part, Mask) else cls.causal(expect_size(f"parts[{i}]", part))
            slices += [_moved(each, start) for each in mask.slices]
            runs += [(start + token, at) for token, at in mask.runs or ((0, 0),)]
            start += mask.length
        if start == 0:
            raise ValueError("parts is empty, expected one document or more")
        return cls(start, slices, runs if restart else None)

    @classmethod
    def from_positions(cls, positions: Sequence[int] | IntegerArray) -> Self:
        """Causal documents that begin where positions restart: where one is not its predecessor
        plus 1.

        Args:
            positions: of each token.

        Returns:
            The mask.
        """
        numbers = expect_sizes("positions", _listed(positions), least=0)
        starts = [0] if numbers else []
        starts += [i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1] + 1]
        slices = [Slice(part, part, CAUSAL) for part in itertools.pairwise([*starts, len(numbers)])]
        return cls(len(numbers), slices, [(start, numbers[start]) for start in starts])

    @classmethod
    def tree(cls, lengths: Sequence[int], parents: Sequence[int]) -> Self:
        """Texts that share beginnings, each part of them once: a tree of parts. Turn trees, several
        answers to one prompt.

        Parts lie end to end. A token sees the parts that its own continues, and its own part up to
        itself; its position is its place in its text.

        Args:
            lengths: tokens of each part.
            parents: for each part the earlier part that it continues, or -1 if it begins a text.

        Returns:
            The mask.
        """
        sizes = expect_sizes("lengths", lengths)
        expect_items("parents", parents, "indices of parts, -1 for none")
        if not sizes:
            raise ValueError("lengths is empty, expected one part or more")
        length = _expect_length(sum(sizes))
        table = _core.tree_mask(sizes, _listed(parents))
        sections = _core.read_table(table, _core.TREE_MASK_SECTIONS)
        words, positions = (table[first:end] for first, end, _ in sections)
        runs = zip(positions[::2], positions[1::2], strict=True)
        return cls.of_core(length, words.cast("B"), runs)

    @classmethod
    def of_core(cls, length: int, words: memoryview, runs: Iterable[tuple[int, int]]) -> Self:
        """A tree's mask, as the core has made it.

        Args:
            length: tokens of the tree.
            words: of its slices, 8 bytes each.
            runs: of positions, (first token, its position).

        Returns:
            The mask, unchecked.
        """
        made, kept = cls.__new__(cls), tuple(runs)
        object.__setattr__(made, "length", length)
        object.__setattr__(made, "runs", None if kept == ((0, 0),) else kept)
        vars(made)["words"] = numbers = array("q")
        numbers.frombytes(words)
        return made

    @classmethod
    def shared_prefix(cls, prompt: int, answers: Sequence[int]) -> Self:
        """One prompt and several answers to it: a tree of two levels.

        Args:
            prompt: tokens of the prompt.
            answers: tokens of each answer.

        Returns:
            The mask.
        """
        return cls.tree([prompt, *answers], [-1] + [0] * len(answers))

    # ---- what it says ----

    @cached_property
    def slices(self) -> tuple[Slice, ...]:
        """Ascending by their first query, then by their first key."""
        words = self.words
        return tuple(_slice_of_tree(*words[i : i + 4]) for i in range(0, len(words), 6))

    @cached_property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees: what attention costs."""
        return _core.slices_pairs(self.words, 0, self.length)

    def pairs_of(self, first: int, end: int) -> int:
        """Count the pairs of some queries.

        Args:
            first: the first query.
            end: the one after the last.

        Returns:
            How many query-key pairs they have.
        """
        return _core.slices_pairs(self.words, expect_size("first", first, least=0), end)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """The position of each token, for a rotary embedding."""
        if self.runs is None:
            return tuple(range(self.length))
        ends = [*(token for token, _ in self.runs[1:]), self.length]
        return tuple(
            at + i
            for (token, at), end in zip(self.runs, ends, strict=True)
            for i in range(end - token)
        )

    def dense(self) -> Tensor:
        """The mask as bool (length, length), True where the row's token sees the column's. For
        tests: it takes length squared bytes."""
        import torch

        seen = torch.zeros(self.length, self.length, dtype=torch.bool)
        for part in self.slices:
            (first, end), (first_key, end_key) = part.queries, part.keys
            ahead = torch.arange(first_key, end_key) - torch.arange(first, end).unsqueeze(1)
            low, high = part.band
            seen[first:end, first_key:end_key] |= (ahead >= low) & (ahead <= high)
        return seen

    @cached_property
    def words(self) -> Sequence[int]:
        """The slices as the core takes them: two ranges and the band of each."""
        return _words_of(self.slices)

    @cached_property
    def end(self) -> int:
        """One more than the largest position."""
        runs = self.runs or ((0, 0),)
        ends = [*(token for token, _ in runs[1:]), self.length]
        return max(at + end - token for (token, at), end in zip(runs, ends, strict=True))

    @cached_property
    def checksum(self) -> int:
        """A hash of the mask, 64 bits."""
        runs = self.runs or ()
        sizes = self.length, len(self.slices), len(runs), self.runs is None
        numbers = array("q", [*sizes, *itertools.chain.from_iterable(runs), *self.words])
        digest = blake2b(numbers.tobytes(), digest_size=8)
        return int.from_bytes(digest.digest(), "little")

    def to_dict(self) -> dict[str, Any]:
        """Return the mask as plain data, from which :meth:`from_dict` makes an equal mask."""
        return {
            "length": self.length,
            "slices": [[*part.queries, *part.keys, part.kind] for part in self.slices],
            "positions": None if self.runs is None else [list(run) for run in self.runs],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Make a mask of what :meth:`to_dict` gave.

        Args:
            data: that dictionary.

        Returns:
            The mask.
        """
        with shallow("the mask"):
            return cls._of_data(data)

    @classmethod
    def _of_data(cls, data: Mapping[str, Any]) -> Self:
        expect_names("mask", data, ("length", "slices", "positions"))
        expect_items("mask.slices", data["slices"], "slices")
        slices = []
        for i, item in enumerate(data["slices"]):
            expect_items(f"mask.slices[{i}]", item, "four tokens and a kind")
            if len(item) != 5:
                raise ValueError(f"mask.slices[{i}] is {item!r}, expected four tokens and a kind")
            slices.append(Slice((item[0], item[1]), (item[2], item[3]), item[4]))
        return cls(data["length"], slices, data["positions"])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_dict, (self.to_dict(),)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            return NotImplemented
        mine, theirs = ((m.length, m.slices, m.runs) for m in (self, other))
        return mine == theirs

    def __hash__(self) -> int:
        return hash(self.checksum)

    def __repr__(self) -> str:
        return f"Mask(length={self.length}, slices={len(self.slices)}, pairs={self.pairs})"


def _listed(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


def _slice_of_tree(first: int, end: int, first_key: int, end_key: int) -> Slice:
    """Whole parts before the queries, or the queries' own part."""
    kind = CAUSAL if end_key == end else FULL
    return Slice((first, end), (first_key, end_key), kind)


def _moved(part: Slice, tokens: int) -> Slice:
    (first, end), (first_key, end_key), kind = part
    return Slice((first + tokens, end + tokens), (first_key + tokens, end_key + tokens), kind)


def _band(queries: tuple[int, int], keys: tuple[int, int], left: int, right: int) -> list[Slice]:
    """Slices of queries that see, of these keys, those from ``left`` before themselves to ``right``
    after; -1: no limit. The queries lie among the keys."""
    first, end = queries
    first_key, end_key = keys
    # Queries between two of these see keys through one kind of slice.
    edges = {first, end}
    if left >= 0:
        edges.add(min(max(first, first_key + left + 1), end))
    if right >= 0:
        edges.add(min(max(first, end_key - right), end))
    parts = []
    for a, b in itertools.pairwise(sorted(edges)):
        low_cuts = left >= 0 and a >= first_key + left + 1
        high_cuts = right >= 0 and b <= end_key - right
        kind = (FULL, CAUSAL, INVERSE_CAUSAL, BOTH)[2 * low_cuts + high_cuts]
        begin = a - left if low_cuts else first_key
        parts.append(Slice((a, b), (begin, b + right if high_cuts else end_key), kind))
    return parts


# ---- checks --------------------------------------------------------------------------------------


def _expect_length(given: int) -> int:
    length = expect_size("length", given)
    if length >= 2**31:
        raise ValueError(f"length is {length}, expected < 2^31: pairs are counted in 64 bits")
    return length


def _checked(length: int, i: int, part: Any) -> Slice:
    place = f"slices[{i}]"
    expect_items(place, part, "queries, keys and a kind")
    if len(part) not in (2, 3):
        raise ValueError(f"{place} is {part!r}, expected (first, end), (first, end) and a kind")
    ranges = []
    for name, given in zip(("queries", "keys"), part, strict=False):
        expect_items(f"{place}.{name}", given, "two tokens")
        tokens = expect_sizes(f"{place}.{name}", given, least=0)
        if len(tokens) != 2 or not tokens[0] < tokens[1] <= length:
            raise ValueError(
                f"{place}.{name} is {given!r}, expected (first, end) with 0 <= first < end <= "
                f"{length}: tokens of the sequence"
            )
        ranges.append((tokens[0], tokens[1]))
    kind = part[2] if len(part) == 3 else FULL
    expect_choice(f"{place}.kind", kind, KINDS)
    return Slice(ranges[0], ranges[1], kind)


def _expect_apart(slices: Sequence[Slice]) -> None:
    """Raise ValueError where a pair of a query and a key is in two slices."""
    found = _core.slices_overlap(_words_of(slices))
    if found is not None:
        a, b, query, key = found
        raise ValueError(
            f"slices[{a}] is {tuple(slices[a])} and slices[{b}] {tuple(slices[b])}: query "
            f"{query} sees key {key} in both, expected slices without a common pair"
        )


def _words_of(slices: Iterable[Slice]) -> array[int]:
    return array("q", [n for part in slices for n in (*part[0], *part[1], *part.band)])


def _runs_of(length: int, positions: Any) -> tuple[tuple[int, int], ...] | None:
    if positions is None:
        return None
    expect_items("positions", positions, "(first token, position)")
    runs = [expect_sizes(f"positions[{i}]", run, least=0) for i, run in enumerate(positions)]
    for i, run in enumerate(runs):
        least = runs[i - 1][0] + 1 if i else 0
        if len(run) != 2 or not least <= run[0] < length or (i == 0 and run[0] != 0):
            raise ValueError(
                f"positions[{i}] is {positions[i]!r}, expected (first token, position): the first "
                f"at token 0, tokens ascending and < {length}"
            )
        if run[1] >= 2**63:
            raise ValueError(f"positions[{i}] is {run}, expected a position < 2^63")
    if not runs:
        raise ValueError("positions is empty, expected (0, position of the first token) first")
    kept: list[tuple[int, int]] = []
    for token, at in runs:
        if not kept or at - token != kept[-1][1] - kept[-1][0]:
            kept.append((token, at))
    return None if kept == [(0, 0)] else tuple(kept)


# ---- the masks of a plan -------------------------------------------------------------------------

Masks = dict[str, tuple[Mask, ...]]
"""Masks of all sequences of a plan, by name, the default first."""
MasksLike = Sequence[Mask | None] | Mapping[str, Sequence[Mask | None]]
"""Masks as users give them: None is a causal mask, and masks without a name are all layers'."""

MasksFor = Callable[[Sequence[int]], MasksLike | None]
"""Gives the masks of sequences of these lengths; None: they need none."""

UNNAMED = "mask"
"""The name of masks that were given without one."""


def masks_of(given: MasksLike, lengths: Sequence[int]) -> Masks:
    """Return masks of these sequences by name. ValueError where a mask is not one of its
    sequence, or two of a sequence have different positions."""
    named = given if isinstance(given, Mapping) else {UNNAMED: given}
    if not named:
        raise ValueError("masks is empty, expected a mask of each sequence")
    made: Masks = {}
    for name, masks in named.items():
        place = f"masks[{name!r}]" if isinstance(given, Mapping) else "masks"
        if not isinstance(name, str):
            raise ValueError(f"masks has the name {name!r}, expected text")
        expect_items(place, masks, "a Mask or None of each sequence")
        if len(masks) != len(lengths):
            raise ValueError(f"{place} has {len(masks)} items, expected {len(lengths)}")
        made[name] = tuple(
            _of_length(f"{place}[{i}]", mask, length)
            for i, (mask, length) in enumerate(zip(masks, lengths, strict=True))
        )
    _expect_one_position(made)
    return made


def _of_length(place: str, mask: Any, length: int) -> Mask:
    if mask is None:
        return Mask.causal(length)
    if not isinstance(mask, Mask):
        raise ValueError(f"{place} is {mask!r:.60}, expected a Mask or None")
    if mask.length != length:
        raise ValueError(f"{place} is of {mask.length} tokens, expected {length}: its sequence's")
    return mask


def _expect_one_position(masks: Masks) -> None:
    for i, own in enumerate(zip(*masks.values(), strict=True)):
        if len({mask.runs for mask in own}) > 1:
            raise ValueError(
                f"the masks {list(masks)} of sequence {i} have different positions, expected the "
                "same: a token has one"
            )


def packed(masks: Sequence[Mask]) -> tuple[array[int], ...]:
    """Masks as the core takes them: where the slices of each begin, and the words of all; then the
    same of their runs of positions."""
    runs = ((*itertools.chain.from_iterable(mask.runs or ()),) for mask in masks)
    return *_records((mask.words for mask in masks), 6), *_records(runs, 2)


def _records(words: Iterable[Sequence[int]], width: int) -> tuple[array[int], array[int]]:
    firsts, joined = array("q", [0]), array("q")
    for each in words:
        joined.extend(each)
        firsts.append(len(joined) // width)
    return firsts, joined


def pairs_of(masks: Masks) -> list[int]:
    """Pairs of each sequence, on average over the names, rounded up: layers of all kinds count
    alike."""
    return [
        -(-sum(mask.pairs for mask in own) // len(own)) for own in zip(*masks.values(), strict=True)
    ]


def plain_masks(masks: Masks) -> dict[str, Any]:
    """Masks as plain data, each different one once."""
    different = list(dict.fromkeys(mask for own in masks.values() for mask in own))
    index = {mask: i for i, mask in enumerate(different)}
    return {
        "different": [mask.to_dict() for mask in different],
        "of": {name: [index[mask] for mask in own] for name, own in masks.items()},
    }


def masks_from(data: Any) -> Masks | None:
    """Masks of what ``plain_masks`` gave."""
    if data is None:
        return None
    expect_names("masks", data, ("different", "of"))
    expect_items("masks.different", data["different"], "masks")
    different = [Mask.from_dict(each) for each in data["different"]]
    if not isinstance(data["of"], Mapping):
        raise ValueError(f"masks.of is {data['of']!r:.60}, expected names and indices")
    made: Masks = {}
    for name, indices in data["of"].items():
        own = expect_sizes(f"masks.of.{name}", indices, least=0)
        for i, index in enumerate(own):
            if index >= len(different):
                raise ValueError(
                    f"masks.of.{name}[{i}] is {index}, expected < {len(different)}: the masks"
                )
        made[name] = tuple(different[index] for index in own)
    return made
