"""What nvcc says of the kernels, on any machine that has it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KERNELS = sorted(ROOT.glob("csrc/cuda/*.cu"))


@pytest.mark.long
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
@pytest.mark.parametrize("target", ["80", "90", "100"])
@pytest.mark.parametrize("source", KERNELS, ids=lambda path: path.name)
def test_no_kernel_warns_or_spills(source: Path, target: str, tmp_path: Path) -> None:
    flags = ["-std=c++17", "-O3", "-DNDEBUG", "-Icsrc/include", "--resource-usage"]
    done = subprocess.run(
        ["nvcc", *flags, f"-arch=sm_{target}", "-c", str(source), "-o", str(tmp_path / "out.o")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)
    assert bool(spills) == ("__global__" in source.read_text())
    assert set(spills) <= {"0"}, done.stderr
