"""benchmarks/studies/step_profile.py says where the time of a made-up trace went."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "benchmarks" / "studies" / "step_profile.py"


Event = dict[str, object]


def event(cat: str, name: str, start_ms: float, ms: float, thread: int = 0) -> Event:
    times = {"ts": start_ms * 1e3, "dur": ms * 1e3}
    return {"ph": "X", "cat": cat, "name": name, "tid": thread, **times}


def told(path: Path, *events: Event, steps: int = 1) -> subprocess.CompletedProcess[str]:
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}, file)
    command = [sys.executable, str(PROGRAM), "--out", str(path), "--steps", str(steps)]
    return subprocess.run(command, capture_output=True, text=True)


def test_kernels_have_kinds_and_idle_time_is_that_of_ranges(tmp_path: Path) -> None:
    done = told(
        tmp_path / "trace.json.gz",
        event("kernel", "nvjet_sm90_tst", 0, 10),
        event("kernel", "flash_fwd", 8, 4),  # overlaps, and the next begins 8 ms later
        event("gpu_memcpy", "Memcpy DtoD", 20, 2),
        event("kernel", "void at::native::elementwise_kernel", 24, 1),
        event("user_annotation", "hcp: plan", 13, 6, 7),
        event("user_annotation", "FSDP::pre_forward (model.layers.0)", 21, 2, 7),
        event("user_annotation", "FSDP::pre_forward (model.layers.1)", 23.5, 1, 7),
        event("kernel", "ncclDevKernel_AllGather", 25, 3),
        steps=2,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if "|" in line]
    assert ["matrix products", "5.0", "0"] in rows
    assert ["attention", "2.0", "0"] in rows
    assert ["copies and casts", "1.0", "0"] in rows
    assert ["NCCL", "1.5", "0"] in rows
    assert ["idle", "5.0"] in rows  # 12 to 20 and 22 to 24
    assert ["hcp: plan", "0", "3.0", "0", "3.0"] in rows
    assert ["FSDP::pre_forward", "0", "1.5", "1", "0.8"] in rows


def test_a_trace_without_a_gpu_is_refused(tmp_path: Path) -> None:
    done = told(tmp_path / "trace.json.gz", event("cpu_op", "aten::add", 0, 1))
    assert done.returncode == 1
    assert "has 1 events and none of a GPU" in done.stderr
