"""The choice of the backend `auto`. The kernels themselves run on GPUs: tests/cuda."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hcp
from hcp.attention.kernels import Choice, Launch, families, kernel_for
from hcp.attention.kernels import fastest as auto_backend
from hcp.attention.kernels.fastest import MEASURED, Faster, nearest
from hcp.attention.kernels.flash_attn_torch import Flash2
from hcp.attention.kernels.formula import Formula
from hcp.exchange.tables import Entry


@given(st.integers(1, 9), st.integers(1, 9), st.integers(-12, 12), st.integers(-12, 12))
def test_the_pairs_of_a_band_are_counted(rows: int, keys: int, low: int, high: int) -> None:
    low, high = min(low, high), max(low, high)
    seen = sum(low <= k - q <= high for q in range(rows) for k in range(keys))
    assert Launch([Entry(3, rows, 4, keys, low, high)]).pairs == seen


def causal(*lengths: int) -> Launch:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return Launch(
        [Entry(start, n, start, n, -n, 0) for start, n in zip(starts, lengths, strict=True)]
    )


def rows(heads: int = 32, size: int = 128) -> torch.Tensor:
    return torch.empty(0, heads, size)


@pytest.mark.parametrize("measured", MEASURED, ids=lambda m: f"{len(m.lengths)}x{m.lengths[0]}")
def test_a_measured_pack_is_its_own_nearest(measured: Any) -> None:
    assert nearest(causal(*measured.lengths), rows(), rows()) is measured


def test_no_measured_gain_is_out_of_what_kernels_do() -> None:
    assert all(0.3 < gain < 3 for m in MEASURED for gain in (m.forward, m.backward))
    assert len({(len(m.lengths), *m.lengths) for m in MEASURED}) == len(MEASURED)


class Named(Formula):
    """The formula under a name, with the sizes that FlashAttention-4 takes."""

    def __init__(self, name: str, asked: list[str]) -> None:
        super().__init__()
        object.__setattr__(self, "report", lambda what: asked.append(f"{name} {what}"))

    def takes(self, query: torch.Tensor, value: torch.Tensor) -> bool:
        return query.shape[2] % 8 == 0

    def forward(self, *args: Any) -> Any:
        self.report("forward")  # type: ignore[attr-defined]

    def backward(self, *args: Any) -> Any:
        self.report("backward")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("launch", "size", "expected"),
    [
        (causal(16384), 128, ["flash4 forward", "flash4 backward"]),
        (causal(*[1024] * 8), 128, ["flash4 forward", "flash4 backward"]),
        (causal(*[128] * 512), 128, ["flash2 forward", "flash2 backward"]),
        (causal(2048), 128, ["flash4 forward", "flash4 backward"]),
        (
            Launch([Entry(0, 8192, 0, 65536, -8192, 65536)]),
            128,
            ["flash4 forward", "flash4 backward"],
        ),
        (causal(16384), 100, ["flash2 forward", "flash2 backward"]),
    ],
)
def test_each_direction_of_a_call_goes_where_it_was_faster(
    launch: Launch, size: int, expected: list[str]
) -> None:
    asked: list[str] = []
    kernel = Faster(Named("flash4", asked), Named("flash2", asked))
    x = rows(size=size)
    kernel.forward(launch, x, x, x, 1.0)
    kernel.backward(launch, x, None, x, x, x, x, x, 1.0)
    assert asked == expected


def test_where_there_is_no_gpu_auto_is_what_torch_is() -> None:
    cls = hcp.get_cp_handler_cls("auto")
    assert cls.kernel_family == "auto"
    assert "auto" in families()
    own, torchs = (
        kernel_for(torch.device("cpu"), torch.float64, Choice(family))
        for family in ("auto", "torch")
    )
    assert own is torchs


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine where `auto` would pick FlashAttention-4."""
    monkeypatch.setattr(auto_backend, "installed", lambda: "4.0.0b36")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    module = SimpleNamespace(Flash4=lambda: Named("flash4", []))
    monkeypatch.setitem(sys.modules, "hcp.attention.kernels.flash_attn_4", module)
    return monkeypatch


def picked() -> Any:
    return kernel_for(torch.device("cuda"), torch.bfloat16, Choice("auto"))


def test_auto_uses_flash_attention_4_where_it_was_measured(
    hopper: pytest.MonkeyPatch,
) -> None:
    assert isinstance(picked(), Faster)
    hopper.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert type(picked()) is Flash2
    hopper.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    hopper.setattr(auto_backend, "installed", lambda: None)
    assert type(picked()) is Flash2


def test_an_installed_package_that_cannot_be_imported_is_an_error(
    hopper: pytest.MonkeyPatch,
) -> None:
    hopper.setitem(sys.modules, "hcp.attention.kernels.flash_attn_4", None)
    with pytest.raises(hcp.HcpError, match="flash-attn-4 is installed and cannot be imported"):
        picked()
