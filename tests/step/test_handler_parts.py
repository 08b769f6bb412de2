"""A handler's parts: which names it has, how long it lives, and its old names, which warn."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch
from support.public_names import own_names, parts_of_handler, value_of

import hcp
from hcp.exchange.calls import HandlerPart
from hcp.step.moved_names import MOVED, OF_STEP

MISSION = {
    "apply_rotary_pos_emb",
    "attention",
    "combine",
    "core_attn",
    "dispatch",
    "get_emb_on_this_cp_rank",
    "get_rotary_seq_len",
    "roll_tensor",
}
"""Names that trainers know."""

TABLES = {
    "cu_seqlens",
    "degree",
    "layout",
    "max_seqlen",
    "micro_batch",
    "plan",
    "position_ids",
    "rows",
}
"""What a handler knows of its micro-batch. All other names are calls, what they read, and parts."""


def made(groups: Any, **options: Any) -> hcp.ContextParallelHandler:
    plan = hcp.plan([9, 4], ranks=groups.transport.size, max_tokens_per_rank=16)
    return hcp.ContextParallelHandler(plan, 0, groups.transport, sources=[0, 0], **options)


def on_one_rank(check: Callable[[hcp.ContextParallelHandler], None]) -> None:
    hcp.loopback(1, lambda groups: check(made(groups)))


# ---- names ---------------------------------------------------------------------------------------


def test_a_handler_has_few_public_names() -> None:
    def check(cp: hcp.ContextParallelHandler) -> None:
        names = {*own_names(cp)}
        assert names >= MISSION | TABLES
        assert len(names - TABLES) <= 26, sorted(names - TABLES)
        assert not names & {*MOVED, *OF_STEP}

    on_one_rank(check)


def test_the_page_of_public_names_lists_the_parts() -> None:
    def check(cp: hcp.ContextParallelHandler) -> None:
        parts = {name: type(getattr(cp, name)) for name in own_names(cp)}
        parts = {name: cls for name, cls in parts.items() if issubclass(cls, HandlerPart)}
        assert parts == {name: value_of(cls) for name, cls in parts_of_handler().items()}

    on_one_rank(check)


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_new_one_with_a_warning_at_its_caller(old: str) -> None:
    def check(cp: hcp.ContextParallelHandler) -> None:
        said = rf"^cp\.{old} is now {re.escape(f'cp.{MOVED[old]}')}$"
        with pytest.warns(DeprecationWarning, match=said) as warned:
            found = getattr(cp, old)
        assert [warning.filename for warning in warned] == [__file__]
        assert same(found, attrgetter(MOVED[old])(cp))

    on_one_rank(check)


@pytest.mark.parametrize(("old", "new"), [("arrive", "to_device"), ("pin", "pin")])
def test_what_a_step_does_is_still_found_at_the_handler(old: str, new: str) -> None:
    def check(cp: hcp.ContextParallelHandler) -> None:
        with pytest.warns(DeprecationWarning, match=rf"^cp\.{old} is now part of step\.{new}$"):
            assert getattr(cp, old) == getattr(cp, f"_{new}")

    on_one_rank(check)


def test_a_name_that_never_was_is_an_attribute_error() -> None:
    def check(cp: hcp.ContextParallelHandler) -> None:
        with pytest.raises(AttributeError, match=r"^'ContextParallelHandler' .* 'hallo'$"):
            cp.hallo  # type: ignore[attr-defined]  # noqa: B018

    on_one_rank(check)


class Mixin:
    def sum_over_group(self, x: Any) -> Any: ...


@pytest.mark.parametrize(
    ("bases", "members", "said"),
    [
        ((), {"halo": lambda self, x, before: x}, "has halo, .* now cp.scan.halo, which layers"),
        ((), {"scan_type": "pass_states"}, "has scan_type, expected none: it is now cp.scan.type"),
        ((Mixin,), {}, "has sum_over_group, expected none: it is now cp.group.sum"),
        ((), {"arrive": lambda self: None}, "has arrive, expected none: hcp.Step no longer calls"),
    ],
)
def test_a_class_that_would_override_an_old_name_is_refused(
    bases: tuple[type, ...], members: dict[str, Any], said: str
) -> None:
    with pytest.raises(TypeError, match=f"^Own {said}"):
        type("Own", (*bases, hcp.ContextParallelHandler), members)


# ---- lives ---------------------------------------------------------------------------------------


def test_a_handler_whose_parts_were_used_is_freed_without_the_collector() -> None:
    def check(groups: Any) -> None:
        cp = made(groups)
        x = torch.randn(cp.rows, 2, 4, requires_grad=True)
        y = cp.whole.head_to_sequence(cp.whole.sequence_to_head(x), 2)
        sums = cp.sequences.repeat(cp.sequences.sum(y)) + cp.scan.halo(y, 1)[cp.scan.halo_rows(1)]
        cp.group.sum(sums).sum().backward()
        with pytest.warns(DeprecationWarning, match="place"):
            assert cp.place == 0  # type: ignore[attr-defined]
        lives = [weakref.ref(cp), *(weakref.ref(getattr(cp, name)) for name in parts_of_handler())]
        gc.disable()
        try:
            del cp, sums, y
            assert [life for life in lives if life() is not None] == []
        finally:
            gc.enable()

    hcp.loopback(1, check)


def test_a_part_is_used_without_its_handler() -> None:
    def check(groups: Any) -> None:
        scan, sequences = attrgetter("scan", "sequences")(made(groups))
        assert scan.halo(torch.ones(13, 1), 1).shape == (15, 1)
        assert sorted(sequences.sum(torch.ones(13)).tolist()) == [4, 9]

    hcp.loopback(1, check)


@pytest.mark.parametrize("name", parts_of_handler())
def test_a_part_is_copied_with_what_holds_it_and_not_pickled(name: str) -> None:
    def check(cp: hcp.ContextParallelHandler) -> None:
        part = getattr(cp, name)
        assert copy.deepcopy([part])[0] is part
        with pytest.raises(NotImplementedError, match=f"a {type(part).__name__} is pickled"):
            pickle.dumps(part)

    on_one_rank(check)


def test_tables_that_arrive_later_arrive_in_the_parts_too() -> None:
    def check(groups: Any) -> None:
        cp = made(groups, on_device=False)
        brought = []

        def bring(table: torch.Tensor) -> torch.Tensor:
            brought.append(table.clone())
            return brought[-1]

        cp._to_device(bring)
        assert len(brought) == 3
        for table in (cp.cu_seqlens, cp.position_ids, cp.whole.cu_seqlens):
            assert any(table is other for other in brought)
        assert cp.sequences._cu_seqlens is cp.cu_seqlens

    hcp.loopback(1, check)


USES: dict[
    str, Callable[[hcp.ContextParallelHandler, Callable[..., torch.Tensor]], torch.Tensor]
] = {
    "attention": lambda cp, rows: cp.attention(*(rows(cp.rows, 2, 4) for _ in "qkv"), layer=0),
    "cross_attention": lambda cp, rows: cp.cross_attention(
        *(rows(cp.rows, 2, 4) for _ in "qkv"), keys=cp
    ),
    "roll_tensor": lambda cp, rows: cp.roll_tensor(rows(cp.rows, 3), 1),
    "combine": lambda cp, rows: cp.combine(rows(cp.rows, 3)),
    "scan.halo": lambda cp, rows: cp.scan.halo(rows(cp.rows, 3), 2),
    "scan.pass_states": lambda cp, rows: cp.scan.pass_states(*(rows(spans(cp), 3) for _ in "sd")),
    "scan.span_cu_seqlens": lambda cp, rows: rows(1) * cp.scan.span_cu_seqlens,
    "sequences.sum": lambda cp, rows: cp.sequences.sum(rows(cp.rows, 3)),
    "whole.sequence_to_head": lambda cp, rows: cp.whole.sequence_to_head(rows(cp.rows, 2, 4)),
    "whole.row_indices": lambda cp, rows: rows(30)[cp.whole.row_indices],
}


def spans(cp: hcp.ContextParallelHandler) -> int:
    return len(cp.scan.span_cu_seqlens) - 1


@pytest.mark.parametrize("name", USES)
def test_what_was_first_used_in_inference_mode_trains(name: str) -> None:
    plan = hcp.plan([9, 1, 20], ranks=2, max_tokens_per_rank=30, min_degree=2)

    def work(groups: Any) -> torch.Tensor:
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport, sources=[0, 0, 1])
        made: list[torch.Tensor] = []

        def rows(*shape: int) -> torch.Tensor:
            made.append(torch.ones(shape, dtype=torch.float64))
            return made[-1].requires_grad_(not torch.is_inference_mode_enabled())

        with torch.inference_mode():
            USES[name](cp, rows)
        out = USES[name](cp, rows)
        out.sum().backward()  # type: ignore[no-untyped-call]
        assert made[-1].grad is not None
        return out

    hcp.loopback(2, work)
