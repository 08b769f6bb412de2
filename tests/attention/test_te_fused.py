"""Transformer Engine's fused attention: what hcp gives to it and what it takes back. The library
itself runs in tests/cuda."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import pytest
import torch
from support import te_fused
from support.packs import Block, drawn, errors, exact, expect_order_refused, packed, results
from torch import Tensor

import hcp
import hcp.attention.kernels as kernels
from hcp.attention.kernels import Call, Launch

Load = Callable[..., Any]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Load hcp's adapter over a stand-in of the library."""

    def load(capability: tuple[int, int] = (9, 0), **options: Any) -> Any:
        for name, module in te_fused.modules(**options).items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        adapter = importlib.import_module("hcp.attention.kernels.te_fused")
        (kernel,) = adapter.for_device(torch.device("cuda"))
        return kernel

    yield load
    if sys.modules.pop("hcp.attention.kernels.te_fused", None):
        del kernels.te_fused  # type: ignore[attr-defined]


SQUARES = [Block(3, 3), Block(1, 1), Block(2, 2), Block(90, 90)]
GAPS = [Block(5, 9), Block(1, 1, (2, 3)), Block(20, 33, (0, 1)), Block(2, 2, (3, 0))]
CASES: dict[str, Any] = {
    "squares": {"blocks": SQUARES},
    "squares in windows": {"blocks": SQUARES, "window": (5, 0)},
    "gaps": {"blocks": GAPS},
    "gaps and no mask": {"blocks": GAPS, "window": (-1, -1)},
    "gaps in windows": {"blocks": GAPS, "window": (4, 2)},
    "gaps and a limit to the left": {"blocks": GAPS, "window": (4, -1)},
    "more queries than keys": {"blocks": [Block(9, 2), Block(3, 3)], "window": (-1, -1)},
    "heads for each other": {"blocks": GAPS, "heads": (4, 4)},
    "unequal sizes": {"blocks": GAPS, "sizes": (64, 40)},
    "float16": {"blocks": GAPS, "dtype": torch.float16},
    "gradient of the log-sum-exp": {"blocks": GAPS, "sizes": (64, 48), "grad_lse": True},
}


@pytest.mark.parametrize("backward", [te_fused.fused_attn_bwd, te_fused.backward_of_2_13])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_pack_is_the_formulas(load: Load, options: dict[str, Any], backward: Any) -> None:
    kernel = load(backward=backward)
    rest = {name: x for name, x in options.items() if name not in ("blocks", "window")}
    launch = packed(options["blocks"], options.get("window", (-1, 0)), start=(4, 7))
    rows = drawn(launch, **rest)
    for with_grad in (False, True):
        assert kernel.takes(Call(launch, rows.query, rows.value, with_grad, "grad_lse" in rest))
    worst = errors(launch, results(kernel, launch, rows), exact(launch, rows))
    assert max(worst.values()) <= 0.02, worst


def test_rows_of_any_strides_are_taken(load: Load) -> None:
    kernel = load()
    launch = packed(SQUARES)
    rows = drawn(launch, heads=(4, 4))
    expected = results(kernel, launch, rows)
    fused = torch.cat([rows.query, rows.key, rows.value], 1)
    query, key, value = fused.split(4, 1)
    assert not query.is_contiguous()
    given = rows._replace(query=query, key=key, value=value)
    for a, b in zip(results(kernel, launch, given), expected, strict=True):
        assert torch.equal(a, b)
    out, lse = kernel.forward(launch, *rows.qkv, 0.125)
    turned = lse.t().contiguous().t()
    assert not turned.is_contiguous()
    given_grad = rows.grad_out[:1].expand_as(rows.grad_out), None, *rows.qkv, out, turned
    kernel.backward(launch, *given_grad, 0.125)  # the stand-in wants all of it packed


def test_a_row_that_the_library_calls_empty_is_nan(load: Load) -> None:
    def infinite(**given: Any) -> Any:
        out, aux = te_fused.fused_attn_fwd(**given)
        aux[0][0, 0], aux[0][1, 1] = -math.inf, math.inf
        return out, aux

    infinite.__signature__ = signature(te_fused.fused_attn_fwd)  # type: ignore[attr-defined]
    kernel = load(forward=infinite)
    launch = packed([Block(4, 4)])
    _, lse = kernel.forward(launch, *drawn(launch).qkv, 0.125)
    assert lse[0, 0].isnan()
    assert lse[1, 1].isnan()
    assert int(lse.isnan().sum()) == 2


def test_a_launch_is_prepared_once(load: Load) -> None:
    kernel = load()
    launch = packed(GAPS)
    rows = drawn(launch)
    results(kernel, launch, rows)
    kept = dict(launch.kept)
    results(kernel, launch, rows)
    assert len(kept) == 2
    assert all(launch.kept[name] is x for name, x in kept.items())


# ---- what it does not take -----------------------------------------------------------------------


def rows_of(size: int, value_size: int | None = None) -> tuple[Tensor, Tensor]:
    return torch.empty(4, 2, size), torch.empty(4, 2, value_size or size)


def expect_refused(kernel: Any, launch: Launch, sizes: tuple[int, int], message: str) -> None:
    query, value = rows_of(*sizes)
    assert not kernel.takes(Call(launch, query, value, False, False))
    with pytest.raises(ValueError, match=message):
        kernel.forward(launch, query, query, value, 1.0)
    lse = torch.zeros(query.shape[:2])
    with pytest.raises(ValueError, match=message):
        kernel.backward(launch, query, None, query, query, value, value, lse, 1.0)


SQUARE = packed([Block(4, 4)])


@pytest.mark.parametrize(
    ("capability", "cudnn", "message"),
    [
        ((12, 0), (9, 19, 0), "compute capability is 12.0, expected 9.0 or higher, below 12.0"),
        ((8, 0), (9, 19, 0), "compute capability is 8.0, expected 9.0 or higher"),
        (
            (9, 0),
            (9, 10, 2),
            r"cuDNN is 9\.10\.2, expected 9.11 or later for the backend 'te_fused",
        ),
    ],
)
def test_other_gpus_and_versions_are_refused(
    load: Load, capability: tuple[int, int], cudnn: tuple[int, int, int], message: str
) -> None:
    kernel = load(capability, cudnn=cudnn)
    expect_refused(kernel, SQUARE, (64, 64), message)


@pytest.mark.parametrize(
    ("capability", "sizes", "taken"),
    [
        ((9, 0), (128, 128), True),
        ((9, 0), (8, 128), True),
        ((9, 0), (256, 256), False),
        ((9, 0), (192, 128), True),
        ((9, 0), (192, 136), False),
        ((9, 0), (264, 264), False),
        ((9, 0), (100, 100), False),
        ((10, 0), (128, 64), True),
        ((10, 0), (192, 128), True),
        ((10, 0), (136, 136), False),
        ((10, 3), (256, 256), False),
    ],
)
def test_sizes_are_those_of_the_library(
    load: Load, capability: tuple[int, int], sizes: tuple[int, int], taken: bool
) -> None:
    kernel = load(capability)
    assert kernel.takes(Call(SQUARE, *rows_of(*sizes), True, False)) == taken
    if not taken:
        message = f"head sizes are {sizes[0]} and {sizes[1]}, expected multiples of 8 up to 128"
        expect_refused(kernel, SQUARE, sizes, message)


@pytest.mark.parametrize(
    ("capability", "size", "taken"),
    [((9, 0), 120, True), ((9, 0), 128, False), ((10, 0), 120, True), ((10, 0), 128, False)],
)
def test_a_gradient_of_the_log_sum_exp_takes_more_columns(
    load: Load, capability: tuple[int, int], size: int, taken: bool
) -> None:
    kernel = load(capability)
    query, value = rows_of(size)
    assert kernel.takes(Call(SQUARE, query, value, True, True)) == taken
    assert kernel.takes(Call(SQUARE, query, value, False, True))
    if not taken:
        lse = torch.zeros(query.shape[:2])
        with pytest.raises(ValueError, match=f"head sizes are {size + 8} and {size + 8}"):
            kernel.backward(SQUARE, query, lse, query, query, value, value, lse, 1.0)


def test_masks_that_the_library_lacks_are_refused(load: Load) -> None:
    kernel = load()
    message = "a block of 5 queries and 4 keys has the window"
    wide = packed([Block(5, 4)], (-1, 2))
    expect_refused(kernel, wide, (64, 64), message)
    assert kernel.takes(Call(packed([Block(5, 4)], (-1, -1)), *rows_of(64), False, False))


def test_windows_are_refused_under_a_cudnn_that_errs_there(load: Load) -> None:
    kernel = load(cudnn=(9, 14, 0))
    expect_refused(kernel, packed([Block(4, 4)], (2, 0)), (64, 64), "under cuDNN 9.14.0")
    assert kernel.takes(Call(SQUARE, *rows_of(64), True, False))


def test_a_deterministic_backward_is_not_taken_and_refused(load: Load) -> None:
    expect_order_refused(load(), SQUARE, drawn(SQUARE), "te_fused")


def test_nothing_caps_scores(load: Load) -> None:
    assert load().capped(5.0) is None


# ---- the library's import ------------------------------------------------------------------------


def test_an_older_library_is_refused_by_name(load: Load) -> None:
    def older(q: Tensor, k: Tensor, v: Tensor, attn_mask_type: str = "padding") -> None: ...

    with pytest.raises(ImportError, match=r"older has no bottom_right_diagonal, expected .* 2\.13"):
        load(forward=older)
    with pytest.raises(
        hcp.HcpError, match=r"backend 'te_fused' cannot be imported .*2\.13 or later"
    ):
        hcp.get_cp_handler_cls("te_fused")


@pytest.mark.parametrize("error", [OSError("libcudnn.so is missing"), RuntimeError("no library")])
def test_a_library_that_cannot_load_its_own_is_named(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    real = importlib.import_module

    def failing(name: str, *rest: Any) -> Any:
        if name.startswith("transformer_engine"):
            raise error
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", failing)
    with pytest.raises(hcp.HcpError, match=f"transformer_engine cannot be imported: {error}"):
        hcp.get_cp_handler_cls("te_fused")
