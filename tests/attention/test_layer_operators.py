"""The operators that a layer queues around its attention calls, against their definitions."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hcp import ops
from hcp.attention.key_transfer import ReadKeys, cut, rotated_back, sum_gradients
from hcp.attention.operator import Arguments, BackwardArguments
from hcp.attention.rotary import NO_ROTATION, Rotary
from hcp.exchange.agreement import CallKind, Stamp
from hcp.exchange.signals import PIECES

layer = torch.ops.hcp


class StagedForNobody:
    """Memory that others read, whose owner reads nothing."""

    def stage(self, exchange: int, grads: list[Tensor], stamp: Stamp, own: list[Tensor]) -> None:
        assert len(grads) == 4
        assert own == []


def table(*records: tuple[int, ...]) -> Tensor:
    return torch.tensor(records, dtype=torch.int64)


def rows(count: int, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, *shape, generator=generator, dtype=torch.float64)


def apart(x: Tensor) -> Tensor:
    """The same values in the strides of CPU kernels: heads outside, rows inside."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def test_gradients_of_others_keys_leave_once_they_are_staged():
    """Also on a rank whose own keys no query sees, so that it reads none."""
    launches = SimpleNamespace(stages=[[], [None, None]])
    schedule = SimpleNamespace(query_rows=3, return_receives=[])
    transfer = ReadKeys.__new__(ReadKeys)
    vars(transfer).update(
        _launches=launches, _schedule=schedule, _grads=StagedForNobody(), _exchanges=iter([0])
    )
    grads = [rows(5, 2, 4), rows(5, 2, 6), rows(7, 2, 4), rows(7, 2, 6)]
    held = [weakref.ref(grad) for grad in grads]
    returned = transfer.return_gradients(grads, None, Stamp(CallKind("check")))
    assert [grad() for grad in held] == [None] * 4
    assert all(torch.equal(x, torch.zeros_like(x)) for x in returned())
    assert [tuple(x.shape) for x in returned()] == [(3, 2, 4), (3, 2, 6)]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("attention", Arguments), ("attention_backward", BackwardArguments)],
)
def test_operators_of_attention_have_the_defaults_of_their_schema(name, arguments):
    """The dispatcher leaves out what has the schema's default: the operator would take its own."""
    given = getattr(layer, name).default._schema.arguments
    assert [x.name for x in given] == list(arguments._fields)
    assert {x.name: x.default_value for x in given if x.has_default_value()} == (
        arguments._field_defaults
    )


def test_cuts_are_views_of_all_tensors_one_call_behind_the_other():
    query, lse = apart(rows(5, 3, 2)), rows(5, 3)
    views = cut([query, lse], table((1, 2), (0, 5), (5, 0)), 3)
    wanted = [query[1:3], lse[1:3], query, lse, query[5:], lse[5:]]
    assert all(torch.equal(a, b) for a, b in zip(views, wanted, strict=True))
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(views[:4], wanted[:4], strict=True))
    assert views[2] is query


def test_calls_that_take_all_rows_are_not_cut():
    query = rows(4, 2, 2)
    assert all(view is query for view in cut([query], None, 3))


@pytest.mark.parametrize("record", [(0, 6), (-1, 2), (5, 1), (2, -1), (2**62, 2**62)])
def test_a_cut_outside_of_the_rows_is_refused(record):
    with pytest.raises(
        RuntimeError, match=r"cuts\[1\] is rows \[.* of tensors\[0\], expected rows"
    ):
        cut([rows(5, 2)], table((0, 1), record), 2)
    with pytest.raises(RuntimeError, match=r"cuts\[0\] is rows \[.* of received, expected rows"):
        layer.arrive(rows(5, 4), torch.empty(0, 2, dtype=torch.int64), 0, 1, 2, 2, table(record))


@pytest.mark.parametrize("lie", [apart, Tensor.clone], ids=["apart", "dense"])
def test_keys_beside_values_are_packed_to_be_sent_and_arrive_as_they_were(lie):
    key, value, segments = lie(rows(6, 2, 3)), lie(rows(6, 2, 5, seed=1)), table((4, 2), (0, 3))
    sent, received = layer.pack_to_send([key, value], segments, 5, 7)
    assert torch.equal(sent, ops.pack([key.flatten(1), value.flatten(1)], segments, 5))
    assert (received.shape, received.dtype) == ((7, 16), sent.dtype)
    cuts, order = table((0, 3), (1, 2)), table((2, 3), (0, 2))
    views = layer.arrive(sent, order, 5, 2, 3, 5, cuts)
    arrived = [torch.cat([x[:3], x[4:]]) for x in (key, value)]
    wanted = [x[first : first + count] for first, count in cuts.tolist() for x in arrived]
    assert all(torch.equal(a, b) for a, b in zip(views, wanted, strict=True))


def test_rows_that_need_no_order_are_seen_where_they_arrived():
    received = rows(4, 7)
    key, value = layer.arrive(
        received, torch.empty(0, 2, dtype=torch.int64), 0, 1, 3, 4, table((1, 3))
    )
    assert torch.equal(key, received[1:, :3].unsqueeze(1))
    assert torch.equal(value, received[1:, 3:].unsqueeze(1))
    assert key.data_ptr() == received[1:].data_ptr()


def test_rows_of_another_width_than_their_heads_are_refused():
    with pytest.raises(RuntimeError, match=r"received has shape \(4, 7\), expected \(any, 8\)"):
        layer.arrive(rows(4, 7), torch.empty(0, 2, dtype=torch.int64), 0, 1, 4, 4, table((0, 4)))


RUNS = ((0, 2, 0, 1), (0, 2, 1, 0), (2, 3, 2, 2), (2, 3, 0, 3))


@pytest.mark.parametrize("rotates", [False, True], ids=["as they are", "rotated back"])
@pytest.mark.parametrize("lie", [apart, Tensor.clone], ids=["apart", "dense"])
def test_gradients_are_summed_with_those_that_came_home(lie, rotates):
    grads = [lie(rows(6, 2, size, seed=size + i)) for i in range(2) for size in (4, 3)]
    home, angles = rows(5, 14, seed=9), rows(5, 4, seed=10)
    rotary = Rotary(angles.cos(), angles.sin(), True) if rotates else None
    runs = table(*RUNS)
    parts = [*(grad.flatten(1) for grad in grads), *home.split([8, 6], 1)]
    keys, values = ops.reduce(parts, runs, 5, 2).split([8, 6], 1)
    wanted = rotated_back(keys.reshape(5, 2, 4), rotary), values.reshape(5, 2, 3)
    sums = sum_gradients(grads, home, runs, 5, 2, rotary)
    for actual, expected in zip(sums, wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)
    sent = layer.reduce_to_send(grads, table(RUNS[0], RUNS[1]), 2, 2)
    assert torch.equal(sent, ops.reduce(parts[:4], table(RUNS[0], RUNS[1]), 2, 2))


def test_gradients_that_came_home_in_another_width_are_refused():
    with pytest.raises(RuntimeError, match=r"home has shape \(5, 13\), expected \(any, 14\)"):
        sum_gradients([rows(6, 2, 4), rows(6, 2, 3)], rows(5, 13), table((0, 1, 0, 0)), 1, 2, None)
    with pytest.raises(RuntimeError, match=r"columns is 3, expected from 1 to the 2 tensors"):
        layer.sum_gradients([rows(6, 2), rows(6, 2)], None, table((0, 1, 0, 0)), 1, 3, *NO_ROTATION)


def test_a_count_that_is_not_there_is_refused_before_anything_is_counted():
    counts, failure, words = (torch.zeros(n, dtype=torch.int64) for n in (2, 4, PIECES))
    address = words.data_ptr()
    told, wrong = table((address, 1, 0, 1)), table((address, 2, 0, 1))
    free = table((address, 1, 0, 0))  # as often as was counted: never
    given = [rows(3, 2)], table((0, 3, 0, 0)), 1
    out, progress = torch.zeros(3, 2, dtype=torch.float64), torch.zeros(PIECES).int()
    how = progress, counts, 5, 0, failure
    with pytest.raises(RuntimeError, match=r"free\[0\] counts in place 2, expected < 2"):
        layer.stage(out, *given, wrong, told, *how)
    layer.stage(out, *given, free, told, *how)  # nobody is waited for
    assert torch.equal(out, given[0][0])
    assert (counts.tolist(), words.tolist()) == ([0, 1], [1 << 32 | 5] * PIECES)
    with pytest.raises(RuntimeError, match=r"staged has 2 owners, expected at most the 1 parts"):
        layer.read([out], given[1], 3, 1, 0, torch.cat([told, told]), told, *how, 0)
    again = table((address, 1, 0, 0))  # what the same exchange has counted before
    assert torch.equal(layer.read([out], given[1], 3, 1, 0, again, told, *how, 0), out)
    assert (counts.tolist(), words[0].item()) == ([0, 1], 1 << 32)


# ---- blocks of heads -----------------------------------------------------------------------------

TWO_RANKS = table((0, 2, 2), (2, 1, 2), (0, 1, 1), (0, 1, 1))
"""Three query heads and one key-value head, which both ranks have."""


def words_of(column: Tensor, first: int, heads: int, most: int) -> Tensor:
    """Some heads of a column, and zeros up to whole vectors of 16 bytes."""
    flat = column[:, first : first + heads].flatten(1)
    item = column.element_size()
    vectors = -(-most * column.shape[2:].numel() * item // 16)
    filled = torch.zeros(len(flat), 16 * vectors // item, dtype=column.dtype)
    filled[:, : flat.shape[1]] = flat
    return filled.view(torch.float64)


@pytest.mark.parametrize("lie", [apart, Tensor.clone], ids=["apart", "dense"])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_vectors_of_blocks_are_staged_read_and_placed(lie, first):
    query, lse, key = (lie(rows(5, 3, 2)).float(), rows(5, 3).float(), lie(rows(5, 1, 3)))
    blocks = [
        torch.cat(
            [words_of(x, *TWO_RANKS[block + 2 * (x is key)].tolist()) for x in (query, lse, key)],
            1,
        )
        for block in range(2)
    ]
    parts = [block[:, 2 * first :] for block in blocks]
    width, nobody = parts[0].shape[1], torch.empty(0, 4, dtype=torch.int64)
    staged, theirs = torch.zeros(4, width).double(), rows(3, width, seed=2)
    runs, read_runs = table((0, 4, 1, 1)), table((5, 3, 0, 0))
    counts, progress = torch.zeros(2).long(), torch.zeros(PIECES).int()
    found = layer.exchange_blocks(
        *([query, lse, key], TWO_RANKS, 2, first, 0, table((0, 5, 0, 0)), 8),
        *(staged, runs, nobody, nobody, progress, True),
        *([theirs], read_runs, 0, nobody, nobody, progress, True),
        *(counts, 5, 0, torch.zeros(4).long(), 0),
    )
    assert found.dtype == query.dtype
    assert torch.equal(staged, parts[1][1:5])
    assert torch.equal(found.view(torch.float64), torch.cat([parts[0], theirs]))


def exchanged(**other) -> Tensor:
    nobody, progress = torch.empty(0, 4, dtype=torch.int64), torch.zeros(PIECES).int()
    given = {"columns": [rows(5, 3, 2)], "blocks": TWO_RANKS, "by_query": 1, "first": 0, "own": 0}
    given |= {"own_runs": table((0, 5, 0, 0)), "rows": 5, "out": rows(5, 4), "runs": nobody}
    given |= {"free": nobody, "staged": nobody, "stage_progress": progress, "stages": True}
    given |= {"read_parts": [], "read_runs": nobody, "next": 0, "read_staged": nobody}
    given |= {"read_done": nobody, "read_progress": progress, "at_once": True, "tag": 5}
    given |= {"counts": torch.zeros(2).long(), "timeout_ns": 0, "stream": 0}
    return layer.exchange_blocks(**given | {"failure": torch.zeros(4).long()} | other)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"columns": []}, "columns has 0 tensors, expected >= 1"),
        ({"columns": [rows(5)]}, r"columns\[0\] has shape \(5\), expected 2 dimensions"),
        (
            {"columns": [rows(5, 2, 2)]},
            r"columns\[0\] has 2 heads, expected those of blocks\[1\]: 1 from 2 on",
        ),
        (
            {"columns": [rows(5, 3, 2), rows(4, 1, 2)]},
            r"columns\[1\] has shape \(4, 1, 2\), expected \(5, 1, 2\)",
        ),
        ({"blocks": TWO_RANKS[:3]}, "blocks has 3 records, expected as many of queries as of keys"),
        (
            {"blocks": TWO_RANKS - table((0, 0, 1), (0, 0, 0), (0, 0, 0), (0, 0, 0))},
            r"blocks\[0\] is 2 heads from 0 on in a block of 1",
        ),
        (
            {"blocks": TWO_RANKS + table((0, 0, 0), (0, 0, 1), (0, 0, 0), (0, 0, 0))},
            r"blocks\[1\] is 1 heads from 2 on in a block of 3, expected 0 or more in one of 2",
        ),
        ({"own": 2}, "own is 2, expected one of 2 blocks"),
        ({"first": 1}, "vectors are 2 from 1 on, expected some of 2"),
        ({"out": rows(5, 3)}, "out has 3 words in a row, expected vectors of 16 bytes"),
        ({"out": rows(5, 4).float()}, "out has dtype Float, expected Double"),
        ({"own_runs": table((0, 6, 0, 0)), "rows": 6}, r"runs\[0\]"),
        ({"read_parts": [rows(3, 2)]}, r"read_parts\[0\] has shape \(3, 2\), expected \(any, 4\)"),
    ],
)
def test_what_is_no_exchange_of_blocks_is_refused(other, said):
    assert torch.equal(exchanged().view(5, 2, 2), rows(5, 3, 2)[:, :2])
    with pytest.raises(RuntimeError, match=said):
        exchanged(**other)


def copies(**other) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        exchanged(**other)
    return sum(event.name == "aten::copy_" for event in profile.events())


def test_columns_of_which_a_piece_takes_nothing_are_not_laid_out():
    one, two = [rows(5, 3, 2)], [rows(5, 3, 2), rows(5, 1, 4)]  # of 2 vectors each
    assert copies(columns=one) == copies(columns=two) > 0
    assert copies(columns=two, out=rows(5, 8)) > copies(columns=two)
    assert copies(columns=two, first=2, by_query=1) < copies(columns=two, out=rows(5, 8))


def test_blocks_of_others_are_joined():
    query, key = rows(4, 3, 2).float(), rows(4, 2, 1)
    heads = table((0, 2, 2), (2, 1, 2), (0, 1, 1), (1, 1, 1))
    came = torch.cat(
        [
            torch.cat(
                [words_of(x, *heads[block + 2 * (x is key)].tolist()) for x in (query, key)], 1
            )
            for block in range(2)
        ]
    )
    joined = layer.join_blocks(came, [query[:, :2], key[:, :1]], heads, 1)
    assert [x.dtype for x in joined] == [query.dtype, key.dtype]
    assert all(map(torch.equal, joined, (query, key)))
    with pytest.raises(RuntimeError, match="rows has 7 rows, expected as many of each of 2 blocks"):
        layer.join_blocks(came[:7], [query], heads, 1)
    with pytest.raises(RuntimeError, match="like has columns of 32 bytes, expected at most the 16"):
        layer.join_blocks(came[:, :2].contiguous(), [query, key], heads, 1)
