"""The choice of the backend `auto`. The libraries' kernels run on GPUs: tests/cuda."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import hcp
import hcp.step.backends
from hcp.attention import kernels
from hcp.attention.kernels import (
    KernelCall,
    KernelChoice,
    KernelFamily,
    Launch,
    auto,
    kernel_for,
    order,
    present,
    proof,
)
from hcp.attention.kernels.auto import Auto, KernelCandidate
from hcp.attention.kernels.flash_attn_torch import Flash2
from hcp.attention.kernels.formula import Formula
from hcp.exchange.tables import Entry


@given(st.integers(1, 9), st.integers(1, 9), st.integers(-12, 12), st.integers(-12, 12))
def test_the_pairs_of_a_band_are_counted(rows: int, keys: int, low: int, high: int) -> None:
    low, high = min(low, high), max(low, high)
    seen = sum(low <= k - q <= high for q in range(rows) for k in range(keys))
    assert Launch([Entry(3, rows, 4, keys, low, high)]).packed().sizes.pairs == seen


def causal(*lengths: int) -> Launch:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return Launch(
        [Entry(start, n, start, n, 1 - n, 0) for start, n in zip(starts, lengths, strict=True)]
    )


def rows(heads: int = 32, size: int = 128) -> Tensor:
    return torch.empty(0, heads, size)


# ---- the choice ----------------------------------------------------------------------------------


class Packs(Formula):
    """The formula for packs of any dtype, which reports what it computes."""

    dtypes = (torch.bfloat16, torch.float16, torch.float64)  # type: ignore[assignment]
    packs = True
    asked: list[str]

    def __init__(self, name: str, asked: list[str], softcap: float = 0.0, **refuses: Any) -> None:
        super().__init__(softcap)
        vars(self).update(name=name, asked=asked, refuses=refuses)

    def takes(self, call: KernelCall) -> bool:
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

    def backward(self, launch: Launch, grads: Any, attended: Any, scale: float):  # type: ignore[no-untyped-def]
        self.asked.append(f"{self.name} backward")
        (grad_out, grad_lse), (query, key, value, out, lse) = grads, attended
        whole = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for one, q, k in parts_of(launch):
            given = grad_out[q], None if grad_lse is None else grad_lse[q]
            rows = query[q], key[k], value[k], out[q], lse[q]
            found = super().backward(one, given, rows, scale)
            for grad, part, at in zip(whole, found, (q, k, k), strict=True):
                grad[at] = part
        return whole


def parts_of(launch: Launch) -> Iterator[tuple[Launch, slice, slice]]:
    """Each entry alone, and its queries and keys in the launch's."""
    for entry in launch.entries:
        query, key = entry.query_row - launch.queries.start, entry.key_row - launch.keys.start
        rows = slice(query, query + entry.query_rows), slice(key, key + entry.key_rows)
        yield Launch([entry]), *rows


def chosen_by(kernel: Auto, launch: Launch, size: int = 128, grad_lse: bool = False) -> list[str]:
    """The families of both directions."""
    x = rows(size=size)
    return [
        kernel.choose(KernelCall(launch, x, x, backward, grad_lse and backward)).family
        for backward in (False, True)
    ]


def of_two(asked: list[str] | None = None, **refuses: Any) -> Auto:
    asked = [] if asked is None else asked
    return Auto(
        [
            KernelCandidate("torch", Packs("torch", asked, caps=refuses.get("caps", ("torch",)))),
            KernelCandidate("flash_attn_4", Packs("flash_attn_4", asked, **refuses)),
        ]
    )


def of(*names: str, **refuses: Any) -> Auto:
    """Candidates with kernels of their own. ``refuses``: what those of a name refuse."""
    return Auto([KernelCandidate(name, Packs(name, [], **refuses.get(name, {}))) for name in names])


@pytest.fixture
def short_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of few rows are ordered as long ones are."""
    monkeypatch.setattr(order, "LEAST_KEYS", {False: (0.0, 0.0), True: (0.0, 0.0)})


short = pytest.mark.usefixtures("short_is_long")


@pytest.mark.parametrize(
    ("launch", "forward", "backward"),
    [
        (causal(16384), "flash_attn_4", "flash_attn_4"),
        (causal(4096, 2048, 1024, 512, 256, 128, 64, 64), "flash_attn_4", "flash_attn_4"),
        (causal(2048), "flash_attn_4", "flash_attn_4"),
        (causal(*[1024] * 8), "cudnn", "flash_attn_4"),
        (causal(*[512] * 128), "cudnn", "flash_attn_4"),
        (causal(*[256] * 256), "cudnn", "torch"),
        (causal(*[128] * 512), "torch", "torch"),
        (Launch([Entry(0, 128, 0, 65536, -8192, 65536)]), "flash_attn_4", "flash_attn_4"),
    ],
)
def test_each_call_goes_where_an_h100_was_the_fastest(
    launch: Launch, forward: str, backward: str
) -> None:
    assert chosen_by(of("torch", "cudnn", "flash_attn_4"), launch) == [forward, backward]


@pytest.mark.parametrize("length", [64, 256, 512, 1024, 8192])
def test_the_next_in_order_computes_what_the_first_does_not_take(length: int) -> None:
    orders = order.LONG, order.MIDDLE, order.SHORT
    assert {len({*each}) for each in orders} == {len(present.CHOICES)}
    call = KernelCall(causal(length), rows(), rows(), False, False)
    names = order.order_of(call)
    for i, name in enumerate(names):
        refusing = {before: {"sizes": (128,)} for before in names[:i]}
        assert of(*present.CHOICES, **refusing).choose(call).family == name


def test_a_call_that_is_refused_in_one_direction_is_computed_by_two_kernels() -> None:
    kernel = of("torch", "cudnn", "flash_attn_4", flash_attn_4={"grad_lse": True})
    assert chosen_by(kernel, causal(4096)) == ["flash_attn_4", "flash_attn_4"]
    assert chosen_by(kernel, causal(4096), grad_lse=True) == ["flash_attn_4", "cudnn"]


def test_what_no_kernel_takes_is_left_to_the_first_which_says_why() -> None:
    kernel = of("torch", torch={"sizes": (512,)})
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


def with_failing(error: Exception, asked: list[str]) -> Auto:
    failing = Failing("flash_attn_4", asked)
    vars(failing)["error"] = error
    return Auto(
        [
            KernelCandidate("torch", Packs("torch", asked)),
            KernelCandidate("flash_attn_4", failing),
        ]
    )


@short
def test_a_kernel_that_fails_at_a_call_is_left_out_of_its_kind_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[str] = []
    kernel = with_failing(RuntimeError("no plan"), asked)
    x, wide = (torch.randn(8, 2, size, dtype=torch.float64) for size in (16, 24))
    for launch in (causal(5, 3), causal(8)):
        for _ in range(2):
            kernel.forward(launch, x, x, x, 0.25)
    assert asked == ["flash_attn_4 forward"] + ["torch forward"] * 4
    (record,) = caplog.records
    assert record.message == (
        "the attention kernel 'flash_attn_4' failed in the forward of float64 with head sizes 16 "
        "and 16, and attention goes on without it for such calls: RuntimeError: no plan"
    )
    kernel.forward(causal(8), wide, wide, wide, 0.25)
    assert asked[5:] == ["flash_attn_4 forward", "torch forward"]


@short
@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError("full"), KeyboardInterrupt()])
def test_what_is_not_the_kernels_fault_is_raised(error: Exception) -> None:
    asked: list[str] = []
    x = torch.randn(8, 2, 16, dtype=torch.float64)
    with pytest.raises(type(error)):
        with_failing(error, asked).forward(causal(8), x, x, x, 0.25)
    assert asked == ["flash_attn_4 forward"]


def test_an_error_of_the_last_kernel_is_raised() -> None:
    kernel = with_failing(ValueError("head sizes"), [])
    vars(kernel)["candidates"] = kernel.candidates[1:]
    x = torch.randn(8, 2, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match="head sizes"):
        kernel.forward(causal(8), x, x, x, 0.25)


class Unordered(Packs):
    """As FlashAttention-4, whose gradients of queries are summed in any order."""

    def takes(self, call: KernelCall) -> bool:
        return not (call.backward and torch.are_deterministic_algorithms_enabled())


@short
def test_a_deterministic_backward_goes_to_a_kernel_that_has_one() -> None:
    asked: list[str] = []
    fast = KernelCandidate("flash_attn_4", Unordered("flash_attn_4", asked))
    kernel = Auto([KernelCandidate("torch", Packs("torch", asked)), fast])
    launch = causal(5, 3)
    x = torch.randn(8, 2, 16, dtype=torch.float64)
    for enabled in (False, True, False):
        torch.use_deterministic_algorithms(enabled)
        try:
            out, lse = kernel.forward(launch, x, x, x, 0.25)
            kernel.backward(launch, (x, None), (x, x, x, out, lse), 0.25)
        finally:
            torch.use_deterministic_algorithms(False)
    backwards = [each for each in asked if each.endswith("backward")]
    checks = ["flash_attn_4 backward"]
    assert backwards == [
        *checks,
        "flash_attn_4 backward",
        "torch backward",
        "flash_attn_4 backward",
    ]


def test_a_launch_remembers_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    kernel, other = of_two(asked), of_two(asked)
    launch = causal(5, 3)
    x = torch.randn(8, 2, 16, dtype=torch.float64)
    searches = []
    search = Auto.choose

    def counted(self: Auto, call: KernelCall) -> KernelCandidate:
        searches.append(call)
        return search(self, call)

    monkeypatch.setattr(Auto, "choose", counted)
    for _ in range(3):
        out, lse = kernel.forward(launch, x, x, x, 0.25)
        kernel.backward(launch, (x, None), (x, x, x, out, lse), 0.25)
    assert len(searches) == 2
    kernel.backward(launch, (x, lse), (x, x, x, out, lse), 0.25)
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

    def backward(self, launch: Launch, grads: Any, attended: Any, scale: float) -> Any:
        found = super().backward(launch, grads, attended, scale)
        if grads[0].shape[2] % 32:
            found[1].zero_()
        return found


def checked(kernel: Packs) -> Auto:
    """It and another that is right."""
    fast = KernelCandidate("flash_attn_4", kernel)
    return Auto([KernelCandidate("torch", Packs("torch", [])), fast])


def expect_right(kernel: Auto, launch: Launch, size: int) -> None:
    """It gives what the formula does."""
    query, key = torch.randn(8, 4, size).double(), torch.randn(8, 2, size).double()
    right = Packs("formula", [])
    out, lse = right.forward(launch, query, key, key, 0.25)
    grads = right.backward(launch, (query, None), (query, key, key, out, lse), 0.25)
    for _ in range(2):
        found = kernel.forward(launch, query, key, key, 0.25)
        found += kernel.backward(launch, (query, None), (query, key, key, out, lse), 0.25)
        for got, want in zip(found, (out, lse, *grads), strict=True):
            assert torch.equal(got, want)


@short
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (0, 0), (2, 0), (3, 2)])
def test_a_kernel_that_is_right_is_checked_once_for_a_kind(window: tuple[int, int]) -> None:
    asked: list[str] = []
    launch = proof.launch_of(window)
    assert launch.window == window
    launch = Launch([entry for entry in launch.entries if entry.window == window][:1])
    kernel = checked(Packs("flash_attn_4", asked))
    x = torch.randn(launch.queries.stop, 4, 8).double()
    key = torch.randn(launch.keys.stop, 2, 8).double()
    for _ in range(3):
        out, lse = kernel.forward(launch, x, key, key, 0.25)
        kernel.backward(launch, (x, lse), (x, key, key, out, lse), 0.25)
    checked_first = ["flash_attn_4 forward"] * 2 + ["flash_attn_4 backward"] * 2
    assert asked == checked_first + ["flash_attn_4 forward", "flash_attn_4 backward"] * 2


@short
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
    kernel = checked(wrong("flash_attn_4", []))
    high = 0 if window == (-1, 0) else 8
    expect_right(kernel, Launch([Entry(0, 8, 0, 8, -8, high)]), size)
    (record,) = caplog.records
    assert re.search(message, record.message)
    caplog.clear()
    if wrong is UnevenSizes:
        expect_right(kernel, Launch([Entry(0, 8, 0, 8, -8, high)]), 64)
        assert not caplog.records


def test_where_every_kernel_is_wrong_the_error_says_so() -> None:
    kernel = Auto([KernelCandidate("flash_attn_4", TopLeft("flash_attn_4", []))])
    x = torch.randn(8, 2, 16).double()
    with pytest.raises(hcp.HcpError, match=r"the output is off by .*: use the backend 'torch'"):
        kernel.forward(causal(8), x, x, x, 0.25)


@short
def test_in_a_graph_that_is_captured_only_checked_kernels_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    kernel, x = checked(Packs("flash_attn_4", asked)), torch.randn(8, 2, 16).double()
    with monkeypatch.context() as patch:
        patch.setattr(auto, "_is_captured", lambda call: True)
        kernel.forward(causal(8), x, x, x, 0.25)
        assert asked == []
    kernel.forward(causal(8), x, x, x, 0.25)
    with monkeypatch.context() as patch:
        patch.setattr(auto, "_is_captured", lambda call: True)
        kernel.forward(causal(8), x, x, x, 0.25)
    assert asked == ["flash_attn_4 forward"] * 3


# ---- a machine with a GPU, by stand-ins ----------------------------------------------------------


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No memory of other tests' kernels."""
    monkeypatch.setattr(kernels, "_loaded", {})
    monkeypatch.setattr(present, "_loaded", {})
    monkeypatch.setattr(auto, "_told", set())
    return monkeypatch


@pytest.fixture
def hopper(clean: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine where `auto` would pick FlashAttention-4."""
    versions = {"flash-attn-4": "4.0.0b36"}
    clean.setattr(KernelFamily, "version", property(lambda of: versions.get(of.package)))
    clean.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    module = SimpleNamespace(for_device=lambda device: [Packs("flash_attn_4", [])])
    clean.setitem(sys.modules, "hcp.attention.kernels.flash_attn_4", module)
    return clean


CUDA = torch.device("cuda")


def picked(family: str = "auto", softcap: float = 0.0) -> Any:
    return kernel_for(CUDA, torch.bfloat16, KernelChoice(family, softcap))


def test_where_there_is_no_gpu_auto_is_what_torch_is() -> None:
    assert hcp.get_cp_handler_cls().kernel_family == "auto"
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for softcap in (0.0, 20.0) if dtype in Formula.dtypes else (0.0,):
            own, torchs = (
                kernel_for(torch.device("cpu"), dtype, KernelChoice(family, softcap))
                for family in ("auto", "torch")
            )
            assert own == torchs


def test_auto_takes_what_torch_takes_on_a_gpu(hopper: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float64, torch.float32):
        assert type(kernel_for(CUDA, dtype, KernelChoice("auto"))) is Formula
        assert kernel_for(CUDA, dtype, KernelChoice("auto", 9.0)) == Formula(9.0)
    for dtype in (torch.bfloat16, torch.float16):
        assert type(kernel_for(CUDA, dtype, KernelChoice("auto"))) is Auto


def test_auto_uses_flash_attention_4_where_it_is_installed(hopper: pytest.MonkeyPatch) -> None:
    kernel = picked()
    assert chosen_by(kernel, causal(8192)) == ["flash_attn_4", "flash_attn_4"]
    assert picked() is kernel
    assert [each.family for each in picked(softcap=20.0).candidates] == ["flash_attn_4"]


def test_auto_is_torch_where_no_package_is(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(KernelFamily, "version", property(lambda of: None))
    assert type(picked()) is Flash2
    with pytest.raises(ValueError, match="packages flash-attn-4, flash-attn-3 and flash-attn do"):
        picked(softcap=20.0)


def test_auto_leaves_out_what_the_gpu_is_too_old_for(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert type(picked()) is Flash2


def test_a_newer_gpu_goes_by_the_same_order(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    assert chosen_by(picked(), causal(8192)) == ["flash_attn_4", "flash_attn_4"]


def test_a_broken_package_is_warned_of_once_and_the_others_go_on(
    hopper: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hopper.setitem(sys.modules, "hcp.attention.kernels.flash_attn_4", None)
    assert type(picked()) is Flash2
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
        "attention by 'auto' on compute capability 9.0: torch, flash_attn_4 (flash-attn-4 "
        "4.0.0b36). Not used: cudnn: nvidia-cudnn-frontend is not installed; flash_attn: "
        "flash-attn is not installed; flash_attn_3: flash-attn-3 is not installed"
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
    monkeypatch.setattr(order, "LEAST_KEYS", {False: (0.0, 0.0), True: (1e9, 1e9)})
    kernel = of_two(asked, grad_lse=True)
    monkeypatch.setattr(Auto, "dtypes", (torch.float64,))
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
