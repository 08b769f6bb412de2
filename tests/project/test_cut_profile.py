"""benchmarks/studies/cut_profile.py says where the time of made-up traces went."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FLASH = "kernel_cutlass_kernel_flash_attncuteflash"
FORWARD = f"{FLASH}_fwd_sm90FlashAttentionForwardSm90_object_at__tensorptrbf16"
BACKWARD = f"{FLASH}_bwd_sm90FlashAttentionBackwardSm90_object_at__tensorptrbf16"
BEFORE = f"{FLASH}_bwd_preprocessFlashAttentionBackwardPreprocess_object_at__tensor"
AFTER = f"{FLASH}_bwd_postprocessFlashAttentionBackwardPostprocess_object_at__tensor"
MERGE = "void merge_rows<__nv_bfloat16, 8, __nv_bfloat16>(carried_runs, merged)"
READ = "void read_rows<__nv_bfloat16, 8>(carried_runs, summed_columns, reading)"
WAIT = "wait_signals(carried_awaited, int, int, carried_signals)"


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from common import trace

    return trace


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = BENCHMARKS / "studies" / "cut_profile.py"
    spec = importlib.util.spec_from_file_location("cut_profile", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "group", "short"),
    [
        (FORWARD, "forward", "FlashAttentionForwardSm90"),
        (BACKWARD, "backward", "FlashAttentionBackwardSm90"),
        (BEFORE, "around", "FlashAttentionBackwardPreprocess"),
        (AFTER, "around", "FlashAttentionBackwardPostprocess"),
        (
            "void pytorch_flash::flash_fwd_kernel<Traits<128>, true>(P)",
            "forward",
            "flash_fwd_kernel",
        ),
        (
            "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<T>(P)",
            "backward",
            "flash_bwd_dq_dk_dv_loop_seqk_parallel_ke",
        ),
        (
            "void pytorch_flash::flash_bwd_dot_do_o_kernel<T>(P)",
            "around",
            "flash_bwd_dot_do_o_kernel",
        ),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "forward", None),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "backward", None),
        (MERGE, "merge", "merge_rows"),
        ("_Z8sum_rowsI13__nv_bfloat16S0_Li8ELb0EEv12carried_runs14summed_columns", "merge", None),
        ("void move_rows<64, of_vectors>(carried_segments<64>)", "pack", "move_rows"),
        ("void turn_rows<float, 4>(carried_runs, turned_rows)", "pack", "turn_rows"),
        ("void stage_rows<float, 4>(carried_runs, summed_columns, staging)", "pack", "stage_rows"),
        (READ, "read", "read_rows"),
        (WAIT, "wait", "wait_signals"),
        ("set_signals(carried_signals, carried_signals, int)", "wait", "set_signals"),
        (
            "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
            "nccl",
            "ncclDevKernel_SendRecv",
        ),
        ("Memcpy PtoP (Device -> Device)", "copy", "Memcpy PtoP (Device -> Device)"),
        ("Memset (Device)", "fill", "Memset (Device)"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(A)",
            "fill",
            "FillFunctor",
        ),
        ("void at::native::elementwise_kernel<128, 2, L>(int)", "torch", "elementwise_kernel"),
    ],
)
def test_kernels_are_told_apart_by_their_names(
    trace: Any, name: str, group: str, short: str | None
) -> None:
    assert trace.group_of(name) == group
    assert trace.short(name) == short or short is None


def events_of(trace: Any) -> list[Any]:
    """Two streams: the second one reads and waits while the first one computes, and longer."""
    return [
        trace.Event(FORWARD, 7, 1000, 400, 900),
        trace.Event(READ, 9, 1100, 500, 950),  # 200 after the forward
        trace.Event(WAIT, 9, 1600, 100, 960),
        trace.Event(MERGE, 7, 1750, 50, 1720),  # queued 20 after the wait's end, begun 30 later
        trace.Event("Memset (Device)", 7, 2000, 0, 1000),
        trace.Event(BACKWARD, 7, 2100, 300),
        trace.Event(BACKWARD, 9, 2200, 100, 1000),
    ]


def test_all_of_the_wall_is_one_kind_or_idle(trace: Any) -> None:
    events = events_of(trace)
    for given in (events, events[::-1]):
        found = trace.profile_of(given)
        assert (found.begin, found.wall) == (1000, 1400)
        shares = {"attention": 700, "work": 50, "exchange": 200, "waits": 100, "idle": 350}
        assert found.shares == shares
        assert found.overlap == 300 + 100
        busy = {name: time for name, time in found.busy.items() if time}
        assert busy == {"forward": 400, "backward": 300, "merge": 50, "read": 500, "wait": 100}
        assert found.kernels[BACKWARD] == (2, 400)
    assert trace.profile_of([]).wall == 0


def test_gaps_name_what_came_before_and_after_and_who_was_late(trace: Any) -> None:
    found = trace.profile_of(events_of(trace))
    assert found.gaps == [
        trace.Gap(1800, 200, MERGE, "Memset (Device)", 0),
        trace.Gap(2000, 100, "Memset (Device)", BACKWARD, None),
        trace.Gap(1700, 50, WAIT, MERGE, 20),
    ]
    assert found.unqueued == 20
    late = trace.profile_of([trace.Event("a", 1, 0, 10), trace.Event("b", 1, 30, 10, 500)])
    assert late.gaps == [trace.Gap(10, 20, "a", "b", 20)], "no more than the gap"


def test_gaps_between_the_same_two_kernels_are_one_line(trace: Any) -> None:
    gaps = [trace.Gap(at, length, *pair, 1) for at, length, *pair in GAPS]
    assert trace.alike(gaps) == [(gaps[2], 1, 9), (gaps[1], 2, 12)]


GAPS = [(0, 5, "a", "b"), (10, 7, "a", "b"), (20, 9, "b", "a")]


class Traced:
    """An event as torch.profiler has it."""

    def __init__(
        self, name: str, device: str, start: int, correlation: int, *, is_range: bool = False
    ) -> None:
        self.name = lambda: name
        self.device_type = lambda: SimpleNamespace(name=device)
        self.start_ns, self.duration_ns = lambda: start, lambda: 5
        self.correlation_id = lambda: correlation
        self.device_resource_id = lambda: 7
        self.is_user_annotation = lambda: is_range


def test_kernels_are_joined_with_their_launches_and_ranges_are_left_out(trace: Any) -> None:
    traced = [
        Traced("cudaLaunchKernel", "CPU", 10, 3),
        Traced("cuLaunchKernelEx", "CPU", 20, 4),
        Traced("cudaDeviceSynchronize", "CPU", 30, 0),
        Traced("hcp: attention", "CUDA", 40, 0, is_range=True),
        Traced("nccl:send 0->1", "CUDA", 40, 0),
        Traced("Stream Wait Event", "CUDA", 40, 3),
        Traced(MERGE, "CUDA", 40, 3),
        Traced(FORWARD, "CUDA", 50, 4),
        Traced(READ, "CUDA", 60, 0),
    ]
    assert trace._on_gpu(traced) == [
        trace.Event(MERGE, 7, 40, 5, 15),
        trace.Event(FORWARD, 7, 50, 5, 25),
        trace.Event(READ, 7, 60, 5, None),
    ]


def test_losses_add_up_to_what_a_layer_takes_longer(trace: Any, study: Any) -> None:
    layer = trace.profile_of(events_of(trace))
    calls = trace.profile_of([trace.Event(FORWARD, 7, 0, 350), trace.Event(BACKWARD, 7, 360, 300)])
    whole = trace.profile_of([trace.Event(FORWARD, 7, 0, 600), trace.Event(BACKWARD, 7, 620, 580)])
    first = trace.profile_of([trace.Event(FORWARD, 7, 0, 1000)])
    lost = study.losses(1, layer, calls, [first, whole])
    assert lost == {
        "gpu": 600 - 500,
        "pieces": 650 - 590,
        "beside": 700 - 650,
        "work": 50,
        "exchange": 200,
        "waits": 100,
        "idle": 350 - 10,
    }
    assert sum(lost.values()) == layer.wall - first.wall / 2


def test_tables_have_each_rank_the_slowest_ones_losses_and_gaps(trace: Any, study: Any) -> None:
    fast = trace.profile_of([trace.Event(FORWARD, 7, 900, 1000)])
    slow, alone = trace.profile_of(events_of(trace)), trace.profile_of([])
    found = [
        study.Found("p2p", part, [fast, slow], [alone, alone], [4000, 8000], 2e-3)
        for part in ("f", "f+b")
    ]
    whole = study.Ideal([trace.profile_of([trace.Event(FORWARD, 7, 0, 2000)])] * 2, 3e-3)
    ideals = {"f": whole, "f+b": whole}
    lines = study.report(found, ideals, 1, 2, 1e9)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    by_rank = [row for row in rows if row[:2] == ["p2p", "f"] and len(row) == 18]
    assert [row[2] for row in by_rank] == ["0", "1"]
    assert by_rank[0][3:5] == ["1", "1 100%"]
    assert by_rank[0][-1] == "0"
    assert by_rank[1][4] == "0 29%"
    titles = rows[next(i for i, row in enumerate(rows) if "pieces" in row)]
    (lost,) = [row for row in rows if row[:2] == ["p2p", "f"] and len(row) == len(titles) < 18]
    assert dict(zip(titles, lost, strict=True)) == {
        "type": "p2p",
        "pass": "f",
        "rank": "1",
        "ms": "2.00",
        "ideal ms": "1.50",
        "wall": "1",
        "ideal": "1",
        "share": "0.71",
        "gpu": "0 0%",
        "pieces": "-1 -100%",
        "beside": "1 70%",
        "work": "0 5%",
        "exchange": "0 20%",
        "waits": "0 10%",
        "idle": "0 35% (0)",
        "link": "8",
    }
    gaps = [row for row in rows if len(row) == 7 and row[0] == "p2p"]
    assert [row[1:] for row in gaps] == [
        ["f+b", "0", "0", "1 in 1", "merge_rows", "Memset (Device)"],
        ["f+b", "0", "-", "1 in 1", "Memset (Device)", "FlashAttentionBackwardSm90"],
    ]
    assert len(lines) <= 60


def test_the_file_has_every_kernel_of_every_rank(trace: Any, study: Any) -> None:
    slow = trace.profile_of(events_of(trace))
    found = [study.Found("p2p", "f", [slow, slow], [slow, slow], [0, 0], 2e-3)]
    whole, row = study.summaries("one", found, {"f": study.Ideal([slow, slow], 3e-3)}, 1, 1e9)
    assert whole["ranks"][1]["layer"]["kernels"][BACKWARD] == {"count": 2, "sum": 0.4}
    assert [rank["layer"]["kernels"].keys() for rank in row["ranks"]] == [slow.kernels.keys()] * 2
    assert sum(row["ranks"][1]["lost"].values()) == pytest.approx(1.4 / 2)
