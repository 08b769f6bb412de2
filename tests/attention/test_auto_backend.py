"""The choice of the backend `auto`. The libraries' kernels run on GPUs: tests/cuda."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.ranks import run_ranks
from torch import Tensor

import hcp
import hcp.exchange.loopback
import hcp.step.backends
from hcp.attention import kernels
from hcp.attention.kernels import (
    FAMILIES,
    Call,
    Choice,
    KernelFamily,
    Launch,
    agreed,
    explained,
    families,
    fastest,
    in_packs,
    kernel_for,
    present,
    proof,
    speeds,
    trial,
)
from hcp.attention.kernels.fastest import Candidate, Fastest
from hcp.attention.kernels.flash_attn_torch import Flash2
from hcp.attention.kernels.formula import Formula
from hcp.attention.kernels.speeds import MEASURED, Speed, nearest, place_of_call
from hcp.exchange.gather import Gathered
from hcp.exchange.tables import Entry

FLASH_4 = (
    Speed((65536,), 2.01, 1.84),
    Speed((32768, 16384, 8192, 4096, 2048, 1024, 512, 256, 128, 128), 2.15, 1.97),
    Speed((8192,), 2.21, 2.10),
    Speed((4096, 2048, 1024, 512, 256, 128, 64, 64), 1.93, 2.02),
    Speed((1024,) * 64, 1.61, 1.67),
    Speed((1024,) * 8, 1.61, 1.57),
    Speed((512,) * 16, 1.53, 1.35),
    Speed((128,) * 512, 0.64, 0.97),
)
"""A table for tests."""


@given(st.integers(1, 9), st.integers(1, 9), st.integers(-12, 12), st.integers(-12, 12))
def test_the_pairs_of_a_band_are_counted(rows: int, keys: int, low: int, high: int) -> None:
    low, high = min(low, high), max(low, high)
    seen = sum(low <= k - q <= high for q in range(rows) for k in range(keys))
    assert Launch([Entry(3, rows, 4, keys, low, high)]).pairs == seen


def causal(*lengths: int) -> Launch:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return Launch(
        [Entry(start, n, start, n, 1 - n, 0) for start, n in zip(starts, lengths, strict=True)]
    )


def rows(heads: int = 32, size: int = 128) -> Tensor:
    return torch.empty(0, heads, size)


# ---- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize("measured", FLASH_4, ids=lambda m: f"{len(m.lengths)}x{m.lengths[0]}")
def test_a_measured_pack_is_its_own_nearest(measured: Speed) -> None:
    call = Call(causal(*measured.lengths), rows(), rows(), False, False)
    assert nearest(FLASH_4, place_of_call(call)) is measured


def test_no_measured_gain_is_out_of_what_kernels_do() -> None:
    for tables in MEASURED.values():
        for family, measured in tables.items():
            assert FAMILIES[family].role == "fastest"
            assert all(0.3 < gain < 3 for m in measured for gain in (m.forward, m.backward))
            assert len({m.lengths for m in measured}) == len(measured)


# ---- the choice ----------------------------------------------------------------------------------


class Packs(Formula):
    """The formula for packs of any dtype, which reports what it computes."""

    dtypes = (torch.bfloat16, torch.float16, torch.float64)  # type: ignore[assignment]
    launches = staticmethod(in_packs)
    asked: list[str]

    def __init__(self, name: str, asked: list[str], softcap: float = 0.0, **refuses: Any) -> None:
        super().__init__(softcap)
        vars(self).update(name=name, asked=asked, refuses=refuses)

    def takes(self, call: Call) -> bool:
        return not (
            call.query.shape[2] in self.refuses.get("sizes", ())
            or (call.grad_lse and self.refuses.get("grad_lse", False))
            or (call.backward and self.refuses.get("backward", False))
        )

    def capped(self, softcap: float) -> Any:
        if self.name not in self.refuses.get("caps", (self.name,)):
            return None
        return Packs(self.name, self.asked, softcap, **self.refuses)

    def forward(self, launch: Launch, query: Tensor, key: Tensor, value: Tensor, scale: float):  # type: ignore[no-untyped-def]
        self.asked.append(f"{self.name} forward")
        out = query.new_full((len(query), query.shape[1], value.shape[2]), torch.nan)  # in gaps
        lse = query.new_full(query.shape[:2], torch.nan)
        for one, q, k in parts_of(launch):
            out[q], lse[q] = super().forward(one, query[q], key[k], value[k], scale)
        return out, lse

    def backward(self, launch: Launch, grad_out: Tensor, grad_lse: Any, *rest: Any):  # type: ignore[no-untyped-def]
        self.asked.append(f"{self.name} backward")
        query, key, value, out, lse, scale = rest
        grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for one, q, k in parts_of(launch):
            given = grad_out[q], None if grad_lse is None else grad_lse[q]
            rows = query[q], key[k], value[k], out[q], lse[q]
            found = super().backward(one, *given, *rows, scale)
            for grad, part, at in zip(grads, found, (q, k, k), strict=True):
                grad[at] = part
        return grads


def parts_of(launch: Launch) -> Iterator[tuple[Launch, slice, slice]]:
    """Each entry alone, and its queries and keys in the launch's."""
    for entry in launch.entries:
        query, key = entry.query_row - launch.queries.start, entry.key_row - launch.keys.start
        rows = slice(query, query + entry.query_rows), slice(key, key + entry.key_rows)
        yield Launch([entry]), *rows


def chosen_by(
    kernel: Fastest, launch: Launch, size: int = 128, grad_lse: bool = False
) -> list[str]:
    """The families of both directions."""
    x = rows(size=size)
    return [
        kernel.choose(Call(launch, x, x, backward, grad_lse and backward)).family
        for backward in (False, True)
    ]


def of_two(asked: list[str] | None = None, table: Any = FLASH_4, **refuses: Any) -> Fastest:
    asked = [] if asked is None else asked
    return Fastest(
        [
            Candidate("torch", Packs("torch", asked, caps=refuses.get("caps", ("torch",))), ()),
            Candidate("flash_attn_4", Packs("flash_attn_4", asked, **refuses), table),
        ]
    )


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        (causal(16384), "flash_attn_4"),
        (causal(*[1024] * 8), "flash_attn_4"),
        (causal(*[128] * 512), "torch"),
        (causal(2048), "flash_attn_4"),
        (Launch([Entry(0, 8192, 0, 65536, -8192, 65536)]), "flash_attn_4"),
    ],
)
def test_each_call_goes_where_it_was_faster(launch: Launch, expected: str) -> None:
    assert chosen_by(of_two(), launch) == [expected, expected]


def test_forward_and_backward_go_to_different_kernels_by_the_table() -> None:
    table = (Speed((4096,), 2.0, 0.5), Speed((64,) * 64, 0.5, 2.0))
    assert chosen_by(of_two(table=table), causal(4096)) == ["flash_attn_4", "torch"]
    assert chosen_by(of_two(table=table), causal(*[64] * 64)) == ["torch", "flash_attn_4"]


def test_the_fastest_of_many_is_chosen_and_a_refused_call_goes_to_the_next() -> None:
    def faster(gain: float, name: str, **refuses: Any) -> Candidate:
        return Candidate(name, Packs(name, [], **refuses), (Speed((4096,), gain, gain),))

    kernel = Fastest(
        [
            Candidate("torch", Packs("torch", []), ()),
            faster(1.5, "second"),
            faster(2.0, "first", sizes=(100,), grad_lse=True),
            Candidate("unknown", Packs("unknown", []), ()),
        ]
    )
    assert chosen_by(kernel, causal(300)) == ["first", "first"]
    assert chosen_by(kernel, causal(300), size=100) == ["second", "second"]
    assert chosen_by(kernel, causal(300), grad_lse=True) == ["first", "second"]


def test_a_kernel_of_unknown_speed_computes_what_no_other_takes() -> None:
    kernel = Fastest(
        [
            Candidate("torch", Packs("torch", [], sizes=(512,)), ()),
            Candidate("unknown", Packs("unknown", []), ()),
        ]
    )
    assert chosen_by(kernel, causal(300)) == ["torch", "torch"]
    assert chosen_by(kernel, causal(300), size=512) == ["unknown", "unknown"]


def test_what_no_kernel_takes_is_left_to_the_first_which_says_why() -> None:
    kernel = Fastest([Candidate("torch", Packs("torch", [], sizes=(512,)), ())])
    assert chosen_by(kernel, causal(300), size=512) == ["torch", "torch"]


def test_capped_scores_go_to_those_that_cap() -> None:
    kernel = of_two(caps=("flash_attn_4",))
    capped = kernel.capped(30.0)
    assert capped is not None
    assert [each.family for each in capped.candidates] == ["flash_attn_4"]
    assert chosen_by(capped, causal(*[128] * 512)) == ["flash_attn_4", "flash_attn_4"]
    assert kernel.capped(30.0) is capped, "schedules keep launches by kernel"
    assert of_two(caps=()).capped(30.0) is None


class Failing(Packs):
    error: Exception

    def forward(self, *args: Any) -> Any:
        super().forward(*args)
        raise self.error

    backward = forward


def with_failing(error: Exception, asked: list[str]) -> Fastest:
    failing = Failing("fast", asked)
    vars(failing)["error"] = error
    return Fastest(
        [
            Candidate("torch", Packs("torch", asked), ()),
            Candidate("fast", failing, (Speed((64,), 2.0, 2.0),)),
        ]
    )


def test_a_kernel_that_fails_at_a_call_is_left_out_of_its_kind_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[str] = []
    kernel = with_failing(RuntimeError("no plan"), asked)
    x, wide = (torch.randn(8, 2, size, dtype=torch.float64) for size in (16, 24))
    for launch in (causal(5, 3), causal(8)):
        for _ in range(2):
            kernel.forward(launch, x, x, x, 0.25)
    assert asked == ["fast forward"] + ["torch forward"] * 4
    (record,) = caplog.records
    assert record.message == (
        "the attention kernel 'fast' failed in the forward of float64 with head sizes 16 and 16, "
        "and attention goes on without it for such calls: RuntimeError: no plan"
    )
    kernel.forward(causal(8), wide, wide, wide, 0.25)
    assert asked[5:] == ["fast forward", "torch forward"]


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError("full"), KeyboardInterrupt()])
def test_what_is_not_the_kernels_fault_is_raised(error: Exception) -> None:
    asked: list[str] = []
    x = torch.randn(8, 2, 16, dtype=torch.float64)
    with pytest.raises(type(error)):
        with_failing(error, asked).forward(causal(8), x, x, x, 0.25)
    assert asked == ["fast forward"]


def test_an_error_of_the_last_kernel_is_raised() -> None:
    kernel = with_failing(ValueError("head sizes"), [])
    vars(kernel)["candidates"] = kernel.candidates[1:]
    x = torch.randn(8, 2, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match="head sizes"):
        kernel.forward(causal(8), x, x, x, 0.25)


class Unordered(Packs):
    """As FlashAttention-4, whose gradients of queries are summed in any order."""

    def takes(self, call: Call) -> bool:
        return not (call.backward and torch.are_deterministic_algorithms_enabled())


def test_a_deterministic_backward_goes_to_a_kernel_that_has_one() -> None:
    asked: list[str] = []
    fast = Candidate("fast", Unordered("fast", asked), (Speed((64,), 2.0, 2.0),))
    kernel = Fastest([Candidate("torch", Packs("torch", asked), ()), fast])
    launch = causal(5, 3)
    x = torch.randn(8, 2, 16, dtype=torch.float64)
    for enabled in (False, True, False):
        torch.use_deterministic_algorithms(enabled)
        try:
            out, lse = kernel.forward(launch, x, x, x, 0.25)
            kernel.backward(launch, x, None, x, x, x, out, lse, 0.25)
        finally:
            torch.use_deterministic_algorithms(False)
    backwards = [each for each in asked if each.endswith("backward")]
    checks = ["fast backward"]
    assert backwards == [*checks, "fast backward", "torch backward", "fast backward"]


def test_a_launch_remembers_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    kernel, other = of_two(asked), of_two(asked)
    launch = causal(5, 3)
    x = torch.randn(8, 2, 16, dtype=torch.float64)
    searches = []
    search = Fastest.choose

    def counted(self: Fastest, call: Call) -> Candidate:
        searches.append(call)
        return search(self, call)

    monkeypatch.setattr(Fastest, "choose", counted)
    for _ in range(3):
        out, lse = kernel.forward(launch, x, x, x, 0.25)
        kernel.backward(launch, x, None, x, x, x, out, lse, 0.25)
    assert len(searches) == 2
    kernel.backward(launch, x, lse, x, x, x, out, lse, 0.25)
    other.forward(launch, x, x, x, 0.25)
    wide = torch.randn(8, 4, 16, dtype=torch.float64)
    kernel.forward(launch, wide, x, x, 0.25)
    assert len(searches) == 5


# ---- a check before results are used -------------------------------------------------------------


class TopLeft(Packs):
    """Takes a causal mask for one that begins at the first key: right for whole sequences."""

    def forward(self, launch: Launch, *rows: Any) -> Any:
        moved = [
            entry._replace(high=0) if entry.window == (-1, 0) else entry for entry in launch.entries
        ]
        return super().forward(Launch(moved), *rows)


class UnevenSizes(Packs):
    """As FlashAttention-4's gradients were for some head sizes."""

    def backward(self, launch: Launch, grad_out: Tensor, grad_lse: Any, *rest: Any) -> Any:
        grads = super().backward(launch, grad_out, grad_lse, *rest)
        if grad_out.shape[2] % 32:
            grads[1].zero_()
        return grads


def checked(kernel: Packs) -> Fastest:
    """It and another that is right."""
    fast = Candidate("fast", kernel, (Speed((64,), 2.0, 2.0),))
    return Fastest([Candidate("torch", Packs("torch", []), ()), fast])


def expect_right(kernel: Fastest, launch: Launch, size: int) -> None:
    """It gives what the formula does."""
    query, key = torch.randn(8, 4, size).double(), torch.randn(8, 2, size).double()
    right = Packs("formula", [])
    out, lse = right.forward(launch, query, key, key, 0.25)
    grads = right.backward(launch, query, None, query, key, key, out, lse, 0.25)
    for _ in range(2):
        found = kernel.forward(launch, query, key, key, 0.25)
        found += kernel.backward(launch, query, None, query, key, key, out, lse, 0.25)
        for got, want in zip(found, (out, lse, *grads), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (0, 0), (2, 0), (3, 2)])
def test_a_kernel_that_is_right_is_checked_once_for_a_kind(window: tuple[int, int]) -> None:
    asked: list[str] = []
    launch = proof.launch_of(window)
    assert launch.window == window
    launch = Launch([entry for entry in launch.entries if entry.window == window][:1])
    kernel = checked(Packs("fast", asked))
    x = torch.randn(launch.queries.stop, 4, 8).double()
    key = torch.randn(launch.keys.stop, 2, 8).double()
    for _ in range(3):
        out, lse = kernel.forward(launch, x, key, key, 0.25)
        kernel.backward(launch, x, lse, x, key, key, out, lse, 0.25)
    checked_first = ["fast forward"] * 2 + ["fast backward"] * 2
    assert asked == checked_first + ["fast forward", "fast backward"] * 2


@pytest.mark.parametrize(
    ("wrong", "size", "window", "message"),
    [
        (TopLeft, 16, (-1, 0), "forward of float64 with head sizes 16 and 16.*the output is off"),
        (UnevenSizes, 40, (-1, -1), "backward of float64 with head sizes 40 and 40.*the keys'"),
    ],
)
def test_a_kernel_that_is_wrong_for_some_calls_computes_none_of_them(
    wrong: type[Packs], size: int, window: tuple[int, int], message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    kernel = checked(wrong("fast", []))
    high = 0 if window == (-1, 0) else 8
    expect_right(kernel, Launch([Entry(0, 8, 0, 8, -8, high)]), size)
    (record,) = caplog.records
    assert re.search(message, record.message)
    caplog.clear()
    if wrong is UnevenSizes:
        expect_right(kernel, Launch([Entry(0, 8, 0, 8, -8, high)]), 64)
        assert not caplog.records


def test_where_every_kernel_is_wrong_the_error_says_so() -> None:
    kernel = Fastest([Candidate("fast", TopLeft("fast", []), ())])
    x = torch.randn(8, 2, 16).double()
    with pytest.raises(hcp.HcpError, match=r"the output is off by .*: use the backend 'torch'"):
        kernel.forward(causal(8), x, x, x, 0.25)


def test_in_a_graph_that_is_captured_only_checked_kernels_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    kernel, x = checked(Packs("fast", asked)), torch.randn(8, 2, 16).double()
    with monkeypatch.context() as patch:
        patch.setattr(fastest, "_is_captured", lambda call: True)
        kernel.forward(causal(8), x, x, x, 0.25)
        assert asked == []
    kernel.forward(causal(8), x, x, x, 0.25)
    with monkeypatch.context() as patch:
        patch.setattr(fastest, "_is_captured", lambda call: True)
        kernel.forward(causal(8), x, x, x, 0.25)
    assert asked == ["fast forward"] * 3


# ---- a machine with a GPU, by stand-ins ----------------------------------------------------------


MEMORIES = (agreed, "_agreed"), (fastest, "_made"), (present, "_loaded")


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No memory of other tests' kernels."""
    for module, name in MEMORIES:
        monkeypatch.setattr(module, name, {})
    monkeypatch.setattr(fastest, "_told", set())
    return monkeypatch


@pytest.fixture
def hopper(clean: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine where `auto` would pick FlashAttention-4."""
    versions = {"flash-attn-4": "4.0.0b36"}
    clean.setattr(KernelFamily, "version", property(lambda of: versions.get(of.package)))
    clean.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    clean.setitem(MEASURED, (9, 0), {"flash_attn_4": FLASH_4})
    module = SimpleNamespace(for_device=lambda device: [Packs("flash_attn_4", [])])
    clean.setitem(sys.modules, "hcp.attention.kernels.flash_attn_4", module)
    return clean


CUDA = torch.device("cuda")


def picked(family: str = "auto", softcap: float = 0.0) -> Any:
    return kernel_for(CUDA, torch.bfloat16, Choice(family, softcap))


def test_where_there_is_no_gpu_auto_is_what_torch_is() -> None:
    assert hcp.get_cp_handler_cls().kernel_family == "auto"
    assert {"auto", "flash"} <= {*families()}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for softcap in (0.0, 20.0) if dtype in Formula.dtypes else (0.0,):
            own, flash, torchs = (
                kernel_for(torch.device("cpu"), dtype, Choice(family, softcap))
                for family in ("auto", "flash", "torch")
            )
            assert own == flash == torchs


def test_auto_takes_what_torch_takes_on_a_gpu(hopper: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float64, torch.float32):
        assert type(kernel_for(CUDA, dtype, Choice("auto"))) is Formula
        assert kernel_for(CUDA, dtype, Choice("auto", 9.0)) == Formula(9.0)
    for dtype in (torch.bfloat16, torch.float16):
        assert type(kernel_for(CUDA, dtype, Choice("auto"))) is Fastest


def test_auto_uses_flash_attention_4_where_it_was_measured(hopper: pytest.MonkeyPatch) -> None:
    kernel = picked()
    assert chosen_by(kernel, causal(8192)) == ["flash_attn_4", "flash_attn_4"]
    assert picked() is kernel
    assert chosen_by(picked("flash"), causal(8192)) == ["flash_attn_4", "flash_attn_4"]
    assert [each.family for each in picked(softcap=20.0).candidates] == ["flash_attn_4"]


def test_auto_is_torch_where_no_package_is(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(KernelFamily, "version", property(lambda of: None))
    assert type(picked()) is Flash2
    with pytest.raises(ValueError, match="packages flash-attn-4, flash-attn-3 and flash-attn do"):
        picked(softcap=20.0)


def test_auto_leaves_out_what_the_gpu_is_too_old_for(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert type(picked()) is Flash2


def test_a_kernel_that_was_not_measured_on_this_gpu_serves_only_calls_of_its_own(
    hopper: pytest.MonkeyPatch,
) -> None:
    hopper.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert chosen_by(picked(), causal(8192)) == ["torch", "torch"]


def test_flash_chooses_among_flash_attention_only(hopper: pytest.MonkeyPatch) -> None:
    hopper.setitem(
        kernels.FAMILIES,
        "other",
        KernelFamily(lambda: lambda device: [Packs("other", [])], role="fastest"),
    )
    hopper.setitem(MEASURED[9, 0], "other", (Speed((8192,), 9.0, 9.0),))
    assert chosen_by(picked(), causal(8192)) == ["other", "other"]
    assert chosen_by(picked("flash"), causal(8192)) == ["flash_attn_4", "flash_attn_4"]


def test_fused_chooses_among_cudnns_kernels_or_says_why_there_is_none(
    hopper: pytest.MonkeyPatch,
) -> None:
    def add(name: str, package: str | None) -> None:
        family = KernelFamily(lambda: lambda device: [Packs(name, [])], package, role="fastest")
        hopper.setitem(kernels.FAMILIES, name, family)

    add("cudnn", "no-such-package")
    with pytest.raises(hcp.HcpError, match=r"'fused' has no kernel on .* 9.0: none is there\. Not"):
        picked("fused")
    add("cudnn", None)
    add("te_fused", None)
    hopper.setitem(MEASURED[9, 0], "te_fused", (Speed((8192,), 0.2, 0.1),))
    hopper.setitem(MEASURED[9, 0], "cudnn", (Speed((8192,), 0.1, 0.2),))
    assert chosen_by(picked("fused"), causal(8192)) == ["te_fused", "cudnn"]
    with pytest.raises(ValueError, match=r"dtype is torch\.float32 on cuda, expected one of"):
        kernel_for(CUDA, torch.float32, Choice("fused"))
    with pytest.raises(ValueError, match="'fused' is asked for cpu, expected CUDA: use 'torch'"):
        kernel_for(torch.device("cpu"), torch.bfloat16, Choice("fused"))


def test_a_broken_package_is_warned_of_once_and_the_others_go_on(
    hopper: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hopper.setitem(sys.modules, "hcp.attention.kernels.flash_attn_4", None)
    assert type(picked()) is Flash2
    assert type(picked("flash")) is Flash2
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "flash-attn-4 4.0.0b36 is installed and cannot be imported" in record.message
    assert "goes on without the backend 'flash_attn_4'" in record.message
    hcp.step.backends._made.cache_clear()
    with pytest.raises(hcp.HcpError, match="backend 'flash_attn_4' cannot be imported"):
        hcp.get_cp_handler_cls("flash_attn_4")


def test_what_is_chosen_and_why_is_logged_once(
    hopper: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hcp")
    picked(), picked(), picked(softcap=3.0)
    assert [record.message for record in caplog.records] == [
        "attention by 'auto' on compute capability 9.0: "
        "torch computes what is like 1 of 8 measured packs forward and 1 backward; "
        "flash_attn_4 (flash-attn-4 4.0.0b36) computes what is like 7 of 8 measured packs forward "
        "and 7 backward. Not used: cudnn: nvidia-cudnn-frontend is not installed; flash_attn: "
        "flash-attn is not installed; flash_attn_3: flash-attn-3 is not installed; "
        "te_fused: transformer-engine is not installed"
    ]


# ---- results -------------------------------------------------------------------------------------


def attend(groups: Any, cls: Any, seed: int, **options: Any) -> list[Tensor]:
    """Output, log-sum-exp and gradients of one handler's rows."""
    plan = hcp.plan([29, 7, 1, 12], ranks=3, max_tokens_per_rank=40, min_degree=3)
    cp = cls(plan, 0, groups.transport)
    generator = torch.Generator().manual_seed(seed + groups.transport.rank)
    q, k, v, sinks = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((cp.rows, 4, 8), (cp.rows, 2, 8), (cp.rows, 2, 8), (4,))
    )
    with torch.no_grad():
        sinks[:] = torch.tensor([0.3, -1.0, 2.0, 0.0])  # alike on all ranks
    out, lse = cp.attention(q, k, v, sinks=sinks, return_lse=True, **options)
    (out.square().sum() + lse.sin().sum()).backward()
    return [out, lse, *(x.grad for x in (q, k, v, sinks))]


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_results_are_those_of_torch_with_another_kernel_for_each_direction(
    monkeypatch: pytest.MonkeyPatch, softcap: float
) -> None:
    asked: list[str] = []
    kernel = of_two(asked, table=(Speed((64,), 2.0, 0.5),), grad_lse=True)
    monkeypatch.setattr(Fastest, "dtypes", (torch.float64,))
    family = KernelFamily(lambda: lambda device: (kernel,))
    monkeypatch.setitem(kernels.FAMILIES, "auto", family)

    def compare(groups: Any) -> float:
        auto, plain = (
            attend(groups, hcp.get_cp_handler_cls(name), 3, softcap=softcap)
            for name in ("auto", "torch")
        )
        pairs = zip(auto, plain, strict=True)
        return max(float((a - b).detach().abs().max()) for a, b in pairs)

    assert max(hcp.loopback(3, compare)) < 1e-11
    assert {*asked} == {"flash_attn_4 forward", "torch backward"}


# ---- measurement ---------------------------------------------------------------------------------


@pytest.fixture
def small_trial(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Packs that a CPU computes in no time."""
    packs = ((24,), (4,) * 6)
    for module in (trial, agreed):
        monkeypatch.setattr(module, "PACKS", packs)
    for name, value in (("HEADS", 2), ("KEY_HEADS", 1), ("SIZE", 8)):
        monkeypatch.setattr(trial, name, value)
    monkeypatch.setattr(trial, "DTYPE", torch.float64)
    return monkeypatch


def test_a_trial_times_each_direction_of_each_pack(small_trial: pytest.MonkeyPatch) -> None:
    before = torch.get_rng_state()
    found = trial.measure(Packs("torch", []), {"a": Packs("a", [])}, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    assert found.failed == {}
    assert {name: len(of) for name, of in found.seconds.items()} == {"torch": 2, "a": 2}
    assert all(0 < t < 10 for of in found.seconds.values() for pair in of for t in pair)


def test_a_kernel_without_a_backward_is_measured_forward(small_trial: pytest.MonkeyPatch) -> None:
    one_way = Packs("a", [], backward=True)
    found = trial.measure(Packs("torch", []), {"a": one_way}, torch.device("cpu"))
    assert found.failed == {}
    assert [backward for _, backward in found.seconds["a"]] == [math.inf] * 2
    views = [view("torch", "a", **found.seconds)] * 2
    assert [speed.backward for speed in agreed.agreed_by(views)["a"]] == [0.0, 0.0]


class Wrong(Packs):
    def forward(self, *args: Any) -> Any:
        out, lse = super().forward(*args)
        return out * 1.2, lse


class Raising(Packs):
    def backward(self, *args: Any) -> Any:
        raise RuntimeError("no kernel image is available")


def test_a_kernel_that_is_wrong_raises_or_refuses_is_left_out_of_a_trial(
    small_trial: pytest.MonkeyPatch,
) -> None:
    others = {
        "wrong": Wrong("wrong", []),
        "raising": Raising("raising", []),
        "refusing": Packs("refusing", [], sizes=(8,)),
        "good": Packs("good", []),
    }
    found = trial.measure(Packs("torch", []), others, torch.device("cpu"))
    assert {*found.seconds} == {"torch", "good"}
    assert "the output is off by" in found.failed["wrong"]
    assert found.failed["raising"] == "RuntimeError: no kernel image is available"
    assert "takes no causal pack" in found.failed["refusing"]


def test_a_trial_says_how_long_it_took(
    small_trial: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hcp")
    small_trial.setitem(FAMILIES, "a", KernelFamily(stand_in("a"), None, role="fastest"))
    both: dict[str, Any] = {name: Packs(name, []) for name in ("torch", "a")}
    there, seconds = agreed._measured((8, 6), both, torch.device("cpu"))
    assert ({*there}, {*seconds}) == ({"torch", "a"}, {"torch", "a"})
    (line,) = caplog.messages
    told = r"a trial of the attention kernels \['a'\] on compute capability 8\.6 took \d+\.\d s, .*"
    assert re.fullmatch(told, line)


def view(*there: str, before: Any = None, **seconds: Any) -> agreed._View:
    sent = agreed._View([8, 6], there, seconds, before)._asdict()
    return agreed._View(**json.loads(json.dumps(sent)))


def test_the_slowest_rank_counts_and_every_rank_finds_the_same(
    small_trial: pytest.MonkeyPatch,
) -> None:
    one = view("torch", "a", "b", torch=[(4, 8), (1, 1)], a=[(1, 4), (2, 1)], b=[(1, 1), (1, 1)])
    two = view("torch", "a", torch=[(6, 4), (1, 1)], a=[(2, 2), (1, 1)])
    expected = {"torch": (), "a": (Speed((24,), 3.0, 2.0), Speed((4,) * 6, 0.5, 1.0))}
    assert agreed.agreed_by([one, two]) == agreed.agreed_by([two, one]) == expected


def test_what_a_rank_agreed_on_before_holds(small_trial: pytest.MonkeyPatch) -> None:
    before = {"torch": [], "a": [((24,), 3.0, 2.0)], "b": []}
    views = [view("torch", "a", torch=[(1, 1)] * 2, a=[(9, 9)] * 2), view("torch", "a", "b")]
    views[1] = view("torch", "a", "b", before=before)
    assert agreed.agreed_by(views) == {"torch": (), "a": (Speed((24,), 3.0, 2.0),)}


def test_without_times_of_every_rank_nothing_is_known(small_trial: pytest.MonkeyPatch) -> None:
    one = view("torch", "a", torch=[(1, 1)] * 2, a=[(1, 1)] * 2)
    assert agreed.agreed_by([one, view("torch", "a")]) == {"torch": (), "a": ()}


def agree_over_gloo(rank: int, size: int) -> Any:
    """A domain where "a" is measured: slow on rank 1. "b" is on rank 0 alone, "c" fails on rank
    1."""
    patch = pytest.MonkeyPatch()
    with patch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
        for module, name in MEMORIES:
            patch.setattr(module, name, {})
        patch.setattr(agreed, "PACKS", ((24,), (4,) * 6))
        for name in ("a", "b", "c"):
            if name != "b" or rank == 0:
                load = stand_in(name)
                patch.setitem(FAMILIES, name, KernelFamily(load, None, role="fastest"))
        taken = []

        def measured(base: Any, others: Any, device: Any) -> trial.Trial:
            taken.append(sorted(others))
            slow = 1.0 + rank
            times = {"torch": [(6.0, 6.0)] * 2, "a": [(2.0 * slow, 8.0), (2.0, 3.0)]}
            times |= {name: [(1.0, 1.0)] * 2 for name in ("b", "c") if name in others}
            failed = {"c": "RuntimeError: none"} if rank == 1 else {}
            return trial.Trial({n: of for n, of in times.items() if n not in failed}, failed)

        patch.setattr(agreed, "measure", measured)
        for module in (present, fastest):
            patch.setattr(module, "kernels_of", gpu_kernels)
        groups = hcp.build_process_groups()
        agreed.agree_for(groups.transport, torch.device("cuda"))
        agreed.agree_for(groups.transport, torch.device("cuda"))
        kernel = fastest.for_device(torch.device("cuda"))[0]
        found = agreed.agreed_on((8, 6))
        assert isinstance(kernel, Fastest)
        chosen = chosen_by(kernel, causal(24)), chosen_by(kernel, causal(*[4] * 6))
    return found, chosen, taken


def stand_in(name: str) -> Any:
    return lambda: lambda device: [Packs(name, [])]


def gpu_kernels(name: str, device: torch.device) -> Any:
    return FAMILIES[name].load()(device)


def test_ranks_measure_once_and_choose_alike() -> None:
    (one, chosen, taken), (two, others, taken_two) = run_ranks(2, agree_over_gloo)
    assert one == two == {"torch": (), "a": (Speed((24,), 1.5, 0.75), Speed((4,) * 6, 3.0, 2.0))}
    assert chosen == others == (["a", "torch"], ["a", "a"])
    assert (taken, taken_two) == ([["a", "b", "c"]], [["a", "c"]])


def test_a_dispatch_on_cpus_measures_and_gathers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered(self: Any, payload: bytes, count: float, what: str) -> Gathered:
        asked.append(what)
        return gather(self, payload, count, what)

    asked: list[str] = []
    transport = hcp.exchange.loopback.LoopbackTransport
    gather = transport.all_gather_counted
    monkeypatch.setattr(transport, "all_gather_counted", gathered)
    monkeypatch.setattr(agreed, "agree_for", None)

    def step(groups: Any) -> None:
        plan = hcp.plan([5], ranks=1, max_tokens_per_rank=8)
        hcp.dispatch(plan, [{"x": torch.zeros(5, 2)}], [0], groups)

    hcp.loopback(1, step)
    assert asked == ["hcp.dispatch"]


class Own(hcp.ContextParallelHandler):
    def attention(self, query: Any, key: Any, value: Any, **options: Any) -> Any:
        return query


def test_the_first_dispatch_of_a_domain_agrees_unless_attention_is_not_hcps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(agreed, "agree", lambda transport: asked.append("agree"))

    def step(groups: Any) -> None:
        plan = hcp.plan([5], ranks=1, max_tokens_per_rank=8)
        for cls, expected in (
            (hcp.ContextParallelHandler, 1),
            (hcp.get_cp_handler_cls("flash", "a2a"), 2),
            (hcp.get_cp_handler_cls("torch"), 2),
            (Own, 2),
        ):
            hcp.dispatch(plan, [{"x": torch.zeros(5, 2)}], [0], groups, handler_cls=cls)
            assert len(asked) == expected

    hcp.loopback(1, step)


def test_a_domain_agrees_once_and_a_loopback_never(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[Any] = []
    monkeypatch.setattr(agreed, "agree_for", lambda transport, device: shared.append(transport))

    class OnGpus:
        device = CUDA

    transports = OnGpus(), OnGpus()
    for transport in (transports[0], *transports, *transports):
        agreed.agree(transport)  # type: ignore[arg-type]
    assert shared == [*transports]

    def never(groups: Any) -> None:
        monkeypatch.setattr(groups.transport, "device", CUDA)
        agreed.agree(groups.transport)

    hcp.loopback(1, never)
    assert len(shared) == 2


# ---- advice --------------------------------------------------------------------------------------


def test_advice_says_what_another_package_would_bring_where_that_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(MEASURED, (9, 0), {"flash_attn_4": FLASH_4})
    line, *others = explained.advice((9, 0), ["torch"])
    assert line == (
        "install flash-attn-4: flash_attn_4 was faster in 14 of 16 measured cases (packs, forward "
        "and backward), up to 2.2 times as fast"
    )
    assert explained.advice((9, 0), ["torch", "flash_attn_4"]) == others
    assert all(line.startswith("not measured here: ") for line in others)
    assert [line.split()[3] for line in others] == [
        *("nvidia-cudnn-frontend", "flash-attn-3", "transformer-engine")
    ]
    everything = ["torch", "flash_attn_4", "cudnn", "flash_attn_3", "te_fused"]
    assert explained.advice((9, 0), everything) == []


def test_advice_names_what_runs_where_nothing_was_measured() -> None:
    lines = explained.advice((10, 0), ["torch"])
    assert [line.split()[3] for line in lines] == [
        *("nvidia-cudnn-frontend", "flash-attn-4", "transformer-engine")
    ]
    assert all("the first hcp.dispatch measures" in line for line in lines)
    (line,) = explained.advice((12, 0), ["torch"])
    assert "flash-attn-4 runs on this GPU" in line
    (line,) = explained.advice((8, 0), ["torch"])
    assert line == (
        "no package of another kernel runs on this GPU; flash-attn brings torch's with soft-capping"
    )
    assert explained.advice((8, 6), ["torch", "flash_attn"]) == []


def test_advice_compares_with_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = tuple(Speed(m.lengths, 2 * m.forward, 2 * m.backward) for m in FLASH_4)
    table = {"flash_attn_4": FLASH_4, "flash_attn": twice}
    monkeypatch.setitem(MEASURED, (9, 0), table)
    (line, *_) = explained.advice((9, 0), ["torch", "flash_attn"])
    assert line.startswith("not measured here: nvidia-cudnn-frontend")
    (line, *_) = explained.advice((9, 0), ["torch", "flash_attn_4"])
    assert line.startswith("install flash-attn: flash_attn was faster in 16 of 16 measured cases")
    assert line.endswith("up to 2.0 times as fast")


@pytest.fixture(autouse=True)
def _tables_as_they_were() -> Iterator[None]:
    before = {capability: dict(of) for capability, of in speeds.MEASURED.items()}
    yield
    assert before == speeds.MEASURED
