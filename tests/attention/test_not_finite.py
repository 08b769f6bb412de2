"""NaN and infinity reach the results that they reach on one rank with whole sequences, and no
results of other sequences."""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from support import fake_cudnn
from support.cases import NAMES, Case, dispatched, staged_by, whole_sequences
from support.not_finite import INF, NAN, expect_nothing_lost, results
from torch import Tensor

import hcp
from hcp import ops
from hcp.attention import kernels
from hcp.attention.kernels import Kernel, KernelFamily, Launch, join
from hcp.attention.kernels.flash_attn_cpu import CpuFlash
from hcp.attention.kernels.flash_attn_torch import Flash2
from hcp.attention.kernels.formula import Formula
from hcp.exchange.tables import Entry, Schedule, ScheduleHeader, schedule_words
from hcp.step.dispatch import Groups

CASES = {
    "one rank": Case((9, 5), 1),
    "one rank, fewer keys than a vector": Case((3, 2), 1),
    "fewer keys than a vector": Case((9, 5), 3, min_degree=3),
    "bfloat16": Case((9, 5), 3, min_degree=3, dtype="bfloat16"),
    "float32": Case((70, 5), 2, min_degree=2, dtype="float32"),
    "full": Case((9, 5), 3, min_degree=3, causal=False),
    "window": Case((20, 5), 3, min_degree=3, window=(6, 0)),
    "all_gather": Case((9, 5), 3, min_degree=3, comm_type="all_gather"),
    "a2a": Case((9, 5), 3, min_degree=3, heads=6, kv_heads=3, comm_type="a2a"),
}


@pytest.mark.parametrize("rows", [slice(None), slice(2, 3)], ids=["all rows", "one row"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_not_finite_on_one_rank_is_not_finite_under_a_plan(case: Case, rows: slice) -> None:
    expect_nothing_lost(case, rows)


def test_a_cap_on_scores_hides_no_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    family = KernelFamily(lambda: lambda device: [Formula()])
    monkeypatch.setitem(kernels.FAMILIES, "torch", family)
    expect_nothing_lost(CASES["all_gather"], slice(4, 5))


def test_a_value_counts_however_little_its_key_weighs() -> None:
    """Its weight is 0 in float64, and one rank multiplies by it."""
    case = Case((8,), 2, min_degree=2)
    (sample,) = samples = whole_sequences(case)
    sample["query"].fill_(40.0)
    sample["key"][:] = torch.arange(8.0, dtype=torch.float64)[:, None, None]
    sample["value"][0] = NAN
    assert (sample["query"][-1, 0] @ (sample["key"][0, 0] - sample["key"][-1, 0])).exp() == 0
    out = hcp.loopback(2, lambda groups: results(groups, case, samples)["query"])[0]
    assert out.isnan().all()


def test_a_sink_of_infinity_is_not_taken_for_all_of_a_row() -> None:
    def check(groups: Groups) -> Tensor:
        case = Case((9,), 2, min_degree=2)
        ((cp, local),) = dispatched(groups, case)
        sinks = torch.tensor([INF, 0.0, NAN, -INF], dtype=torch.float64)
        query, key, value = (local[name] for name in NAMES[:3])
        out = cp.attention(query, key, value, sinks=sinks)
        across = cp.cross_attention(query, key, value, cp, causal=True, sinks=sinks)
        return torch.cat([out, across])

    for out in hcp.loopback(2, check):
        assert out[:, [0, 2]].isnan().all()
        assert out[:, [1, 3]].isfinite().all()


# ---- what libraries write of rows without a finite sum -------------------------------------------

SQUARE = Entry(0, 3, 0, 3, -2, 0)
ROWS = 3, 2, 8


def written(lse: float) -> tuple[Tensor, Tensor]:
    """Output (n, H, D) and log-sum-exp (H, n). Row 1 of head 0 is NaN."""
    out, sums = torch.ones(ROWS), torch.ones(2, 3)
    out[1, 0], sums[0, 1] = NAN, lse
    return out, sums


@pytest.fixture
def flash4(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """The adapter of flash-attn-4 with the package replaced."""
    interface = ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd = lambda *rows, **options: written(-INF)  # type: ignore[attr-defined]
    cute = ModuleType("flash_attn.cute")
    cute.interface = interface  # type: ignore[attr-defined]
    for name, module in (("flash_attn", ModuleType("flash_attn")), ("flash_attn.cute", cute)):
        monkeypatch.setitem(sys.modules, name, module)
    module = importlib.import_module("hcp.attention.kernels.flash_attn_4")
    monkeypatch.setattr(module, "_has_sizes", lambda *rows: True)
    yield module.Flash4()
    del sys.modules["hcp.attention.kernels.flash_attn_4"], hcp.attention.kernels.flash_attn_4


def flash2(lse: float) -> Kernel:
    class Written(Flash2):
        def run(self, launch: Launch, rows: Any, scale: float) -> tuple[Tensor, Tensor]:
            return written(lse)

    return Written()


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], Kernel]]:
    """The adapter of cuDNN with the package replaced, by the log-sum-exp that is written."""
    monkeypatch.setitem(sys.modules, "cudnn", fake_cudnn.module())
    module = importlib.import_module("hcp.attention.kernels.cudnn")
    monkeypatch.setattr(module, "_has_sizes", lambda *sizes: True)

    def written_by(lse: float) -> Kernel:
        def run(task: Any, rows: dict[str, Tensor]) -> None:
            out, sums = written(lse)
            rows["out"].copy_(out)
            rows["lse"].copy_(sums.t())

        monkeypatch.setattr(module, "_run", run)
        kernel: Kernel = module.Cudnn()
        return kernel

    yield written_by
    del sys.modules["hcp.attention.kernels.cudnn"], kernels.cudnn


@pytest.mark.parametrize(
    "library", ["FlashAttention-2", "FlashAttention-4", "cuDNN", "cuDNN, -inf"]
)
def test_a_row_that_a_library_calls_empty_is_nan(
    library: str, flash4: Kernel, cudnn: Callable[[float], Kernel]
) -> None:
    kernel = {
        "FlashAttention-2": lambda: flash2(INF),
        "FlashAttention-4": lambda: flash4,
        "cuDNN": lambda: cudnn(NAN),
        "cuDNN, -inf": lambda: cudnn(-INF),
    }[library]()
    (launch,) = join([SQUARE], packs=False)
    out, lse = kernel.forward(launch, *(torch.ones(ROWS) for _ in range(3)), 1.0)
    expected = torch.ones(3, 2)
    expected[1, 0] = NAN
    assert torch.equal(lse.isnan(), expected.isnan()), lse
    other = torch.full(ROWS, 2.0), torch.full((3, 2), 50.0)
    runs = torch.tensor([[0, 3, 0, 0], [0, 3, 1, 0]])
    merged, _ = ops.merge([out, other[0]], [lse.contiguous(), other[1]], runs, 3)
    assert torch.equal(merged[..., 0].isnan(), expected.isnan()), merged[..., 0]


@pytest.mark.parametrize("keys", [1, 3, 4, 7, 8, 9])
@pytest.mark.parametrize("dtype", CpuFlash.dtypes, ids=str)
def test_zeros_are_no_sign_of_nan(dtype: torch.dtype, keys: int) -> None:
    """The kernel of PyTorch writes 0 and a log-sum-exp of 0 for NaN; here they are right."""
    (launch,) = join([Entry(0, 1, 0, keys, 0, keys - 1)], packs=False)
    zeros = torch.zeros(1, 2, 8, dtype=dtype), torch.zeros(keys, 2, 8, dtype=dtype)
    out, lse = CpuFlash().forward(launch, zeros[0], zeros[1], zeros[1], 1.0)
    assert not out.any()
    assert torch.allclose(lse, torch.full_like(lse, math.log(keys)), atol=1e-4)


# ---- the law that this rests on ------------------------------------------------------------------


@pytest.mark.parametrize("comm_type", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (0, 0), (3, 0), (2, 2), (0, 5), (-1, 3)])
def test_every_query_of_an_entry_sees_a_key(comm_type: str, window: tuple[int, int]) -> None:
    for ranks, alignment, stage_tokens in itertools.product((1, 2, 3, 5), (1, 4), (1, 4, 8192)):
        lengths = 1, 2, 2 * ranks - 1, 2 * ranks + 1, 13, 40
        options = {"min_degree": ranks, "alignment": alignment}
        plan = hcp.plan(lengths, ranks=ranks, max_tokens_per_rank=200, **options)
        for rank in range(ranks):
            with staged_by(stage_tokens):
                words = schedule_words(
                    plan, ScheduleHeader(rank=rank), comm_type, window_size=window
                )
            for entry in (e for stage in Schedule(words).stages for e in stage.entries):
                for query in range(entry.query_rows):
                    first, last = query + entry.low, query + entry.high
                    assert max(first, 0) <= min(last, entry.key_rows - 1), (lengths, rank, entry)
