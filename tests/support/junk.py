"""Call every operator of torch.ops.hcp with junk. test_ops.py runs this in a process of its own.

    python tests/support/junk.py FIRST LAST SEED

Each argument of a good call is replaced by each kind of junk that its type allows. Then several
arguments are replaced at once, drawn by the seed. A call must end or raise one of ALLOWED. Its name
is printed first, so that the last line tells the place of a crash or a hang.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

import hcp
import hcp.attention.operator
from hcp import _core
from hcp.exchange.layout import tensor_of
from hcp.exchange.signals import PIECES
from hcp.exchange.tables import ScheduleHeader, schedule_words

ALLOWED = (ValueError, RuntimeError, NotImplementedError, TypeError)
"""The errors that a call may raise. TypeError is for arguments that the schema does not accept."""
MEMORY = 1 << 30
"""The most bytes of results: torch refuses larger ones."""
DRAWN = 20
"""The number of calls of each operator with several kinds of junk at once."""

ADDRESSES = ("signals", "free", "staged", "done", "read_staged", "read_done", "link")
"""Tables of addresses. An operator cannot tell a wrong address from a right one, unless it is 0."""


def records(*rows: tuple[int, ...], words: int = 4) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), words)


# ---- good calls ----------------------------------------------------------------------------------

COUNTS = torch.zeros(8, dtype=torch.int64)
_END = _core.Link(0, [8, 8], 4 * 4096)
LINK = tensor_of(_END.words, torch.int64)
ROUNDS = tensor_of(_END.rounds([], [], 8), torch.int64)
FAILURE = torch.zeros(4, dtype=torch.int64)
PROGRESS = torch.zeros(PIECES, dtype=torch.int32)
NOBODY = records()


def good(words: Tensor) -> dict[str, tuple[Any, ...]]:
    """Return the positional arguments of good calls, in the order of the schemas."""
    x, grad = torch.randn(4, 3), torch.randn(3, 3)
    outs, lses = [torch.randn(4, 2, 4)], [torch.randn(4, 2)]
    segments, runs = records((0, 2), (3, 1), words=2), records((0, 3, 0, 1))
    cuts = records((0, 2), (1, 2), words=2)
    heads, cos, sin = torch.randn(3, 2, 4), torch.randn(3, 4), torch.randn(3, 4)
    told = (NOBODY, COUNTS, 1, 1_000_000, FAILURE)
    q, k, v = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    out, lse = torch.randn(5, 4, 8), torch.randn(5, 4)
    halves = records((0, 2, 2), (2, 2, 2), (0, 1, 1), (1, 1, 1), words=3)
    words_of_rows = torch.zeros(4, 8, dtype=torch.float64)
    turn = torch.randn(5, 8), torch.randn(5, 8), False
    return {
        "pack": ([x], segments, 3),
        "pack_backward": (grad, segments, [1, 2], 4),
        "unpack": (x, segments, [1, 2], 3),
        "unpack_backward": ([grad], segments, 4),
        "merge": (outs, lses, runs, 4),
        "reduce": ([x], runs, 4, 1),
        "reduce_backward": (torch.randn(4, 3), runs, [4], [3]),
        "reduce_rotated": ([torch.randn(4, 8)], runs, 3, 1, cos, sin, 4, 1, False, True),
        "rotate": (heads, cos, sin, False, False),
        "rotate_pack": (heads, cos, sin, False, [grad], records((0, 3), words=2), 3),
        "cut": ([x, outs[0]], cuts),
        "pack_to_send": ([x, outs[0]], segments, 3, 2),
        "reduce_to_send": ([x], runs, 1, 4),
        "arrive": (torch.randn(4, 20), segments, 3, 2, 6, 4, cuts),
        "sum_gradients": (
            [torch.randn(4, 2, 4)],
            *(torch.randn(4, 8), records((0, 3, 0, 0), (0, 3, 1, 0)), 3, 1, cos, sin, False),
        ),
        "merge_on": (torch.zeros(4, 2, 4), torch.randn(4, 2), outs, lses, runs),
        "merge_last": (torch.zeros(4, 2, 4), torch.randn(4, 2), outs, lses, runs),
        "sum_on": (torch.zeros(4, 2, 4), True, outs, runs),
        "call_memory": ([heads], [torch.randn(3, 2)], records((0, 3, 2, 4), (2, 2, 8, 0))),
        "signal_set": (x, NOBODY, COUNTS, 1),
        "stage": (torch.randn(4, 3), [x], runs, 1, NOBODY, NOBODY, PROGRESS, *told[1:]),
        "read": ([x], runs, 4, 1, 0, NOBODY, NOBODY, PROGRESS, *told[1:], 0),
        "mail": (x, torch.randn(4, 3), ROUNDS, LINK, PROGRESS, PROGRESS, *told[1:], 0),
        "stage_and_read": (
            *(torch.randn(4, 3), [x], runs, NOBODY, NOBODY, PROGRESS),
            *([x], runs, 4, 0, NOBODY, NOBODY, PROGRESS, 1, *told[1:], 0),
        ),
        "exchange_blocks": (
            *([out, lse, k], halves, 2, 1, 1, runs, 4, words_of_rows, runs, NOBODY, NOBODY),
            *(PROGRESS, True, [words_of_rows], runs, 0, NOBODY, NOBODY, PROGRESS, True),
            *(*told[1:], 0),
        ),
        "join_blocks": (torch.randn(6, 24), [out, lse], halves, 2),
        "place": (torch.randn(4, 3), [x], runs, 1),
        "join": (x, 0),
        "nccl_exchange": (
            *(x, records(words=3), grad, records(words=3), 0, torch.zeros(6).long(), 0, 0, 0),
            *(torch.zeros(3).long(), [], [], 0),
        ),
        "attention": (q, k, v, torch.randn(4), words, 0.3, *turn),
        "attention_backward": (
            *(out, lse, q, k, v, torch.randn(4), out, lse, words),
            *(torch.ones(1).long(), 0.3, *turn),
        ),
    }


# ---- junk ----------------------------------------------------------------------------------------

EDGES = (0, 1, 2, 2**31 - 1, 2**31, 2**33, 2**40, 2**62, 2**63 - 1)
INTEGERS = (*EDGES, *(-edge for edge in EDGES[1:]), -(2**63))
DTYPES = (torch.int8, torch.bool, torch.int64, torch.complex64, torch.bfloat16, torch.float64)


def junk_tensors(x: Tensor, name: str) -> Iterator[Tensor]:
    yield from (torch.tensor(1.0), torch.tensor(1), torch.zeros(0), torch.zeros(3))
    yield from (x[:0], x[..., :0], x.flatten(), x.unsqueeze(0), x.unsqueeze(-1))
    yield from (x.to("meta"), x.transpose(0, -1), x.to_sparse(), torch.cat([x, x]))
    yield from (x[:1].expand(2**33, *x.shape[1:]) if len(x) else x, torch.zeros(2**33, 0))
    yield from (torch.zeros(2**33, 0, 4), torch.zeros(2**33, 4, 0), torch.zeros(0, 2**62))
    yield from (x.to(dtype) for dtype in DTYPES)
    yield x.clone().double().requires_grad_()
    numbers = (0, 1, -1, 3) if name in ADDRESSES else (0, 1, -1, 2**31, 2**62, 2**63 - 1, -(2**63))
    for number in numbers if x.dtype == torch.int64 else ():
        yield torch.full_like(x, number)
        for i in range(min(x.shape[-1], 4) if x.dim() else 0):
            changed = x.clone()
            changed[..., i] = number
            yield changed
        if x.dim() == 2:
            yield torch.full((2, x.shape[1]), number)
    if x.is_floating_point():
        yield from (torch.full_like(x, number) for number in (float("nan"), float("inf"), -1e30))


def junk_of(kind: str, value: Any, name: str) -> Iterator[Any]:
    if kind.startswith("List[Tensor]"):
        first = value[0]
        yield from ([], value * 2, [first, first[:0]], [first, first.to("meta")], [None])
        yield from ([x] for x in junk_tensors(first, name))
        yield from ([first, x] for x in junk_tensors(first, name))
    elif "Tensor" in kind:
        yield None
        yield from junk_tensors(value, name)
    elif kind.startswith("List[int]"):
        yield from ([], [0] * 100, value * 2, [None])
        yield from ([number] for number in INTEGERS)
        yield from ([number, number] for number in INTEGERS)
    elif kind in ("int", "SymInt"):
        yield from (*INTEGERS, None, 2**64)
    elif kind == "float":
        yield from (0.0, -1.0, float("nan"), float("inf"), None)
    elif kind == "str":
        yield from ("", "x" * 10000, None)
    elif kind == "bool":
        yield from (not value, None)
    else:
        raise AssertionError(f"no junk for {name} of type {kind}")


def calls(random: Random, words: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    every = good(words)
    for name in sorted(operators() - every.keys()):
        raise AssertionError(f"torch.ops.hcp.{name} has no good call here")
    for name, arguments in every.items():
        operator = getattr(torch.ops.hcp, name).default
        schema = operator._schema.arguments[: len(arguments)]
        junk = [
            list(junk_of(str(argument.type), value, argument.name))
            for argument, value in zip(schema, arguments, strict=True)
        ]
        if name != "nccl_exchange":
            operator(*arguments)  # or the junk would be refused for what is not junk
        for i, values in enumerate(junk):
            for j, value in enumerate(values):
                given = (*arguments[:i], value, *arguments[i + 1 :])
                yield f"{name}, {schema[i].name} {j}", partial(operator, *given)
        for j in range(DRAWN):
            given = tuple(
                random.choice(values) if random.random() < 0.3 else value
                for values, value in zip(junk, arguments, strict=True)
            )
            yield f"{name}, drawn {j}", partial(operator, *given)
        for dtype in (torch.int8, torch.complex64, torch.quint8):
            if operator._schema.arguments[-1].name == "dtype":
                yield (
                    f"{name}, dtype {dtype}",
                    partial(operator, *arguments, dtype=dtype),
                )


def operators() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix("hcp::") for name in names if name.startswith("hcp::")}


def main(first: int, last: int, seed: int) -> None:
    torch.set_num_threads(1)
    hcp.loopback(1, lambda groups: call_all(first, last, seed, groups), timeout=600)


def call_all(first: int, last: int, seed: int, groups: Any) -> None:
    plan = hcp.plan([5], ranks=1, max_tokens_per_rank=8)
    key = groups.transport.key
    words = schedule_words(plan, ScheduleHeader(transport=key), "p2p", window_size=(-1, 0))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for i, (name, call) in enumerate(calls(Random(seed), words)):
        if not first <= i < last:
            continue
        print(i, name, flush=True)
        try:
            call()
        except ALLOWED as error:
            if any(words in str(error) for words in ("INTERNAL ASSERT", "API call failed")):
                raise AssertionError("no words for a reader") from error


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
