"""nvcc's report on the kernels, on any machine that has it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from studies import resources


@pytest.mark.long
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
@pytest.mark.parametrize("target", resources.TARGETS)
@pytest.mark.parametrize("source", resources.SOURCES, ids=lambda path: path.name)
def test_no_kernel_warns_or_spills(source: Path, target: str) -> None:
    kernels, said = resources.compiled(source, target)
    assert "warning" not in said, said
    assert bool(kernels) == ("__global__" in source.read_text())
    assert [kernel for kernel in kernels if kernel.spilled] == []


SAID = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z9turn_rowsIfLi4ELb1EEv12carried_runs11turned_rows' for 'sm_90'
ptxas info    : Function properties for _Z9turn_rowsIfLi4ELb1EEv12carried_runs11turned_rows
    32 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 16384 bytes smem, 32 bytes cumulative stack size
ptxas info    : Compiling entry function '_Z9turn_rowsIdLi1ELb1EEv12carried_runs11turned_rows' for 'sm_90'
ptxas info    : Function properties for _Z9turn_rowsIdLi1ELb1EEv12carried_runs11turned_rows
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
ptxas info    : Compiling entry function '_Z11set_signals15carried_signalsi' for 'sm_90'
ptxas info    : Function properties for _Z11set_signals15carried_signalsi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""  # noqa: E501


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="c++filt is not on PATH")
def test_the_report_has_the_least_and_the_most_of_each_kernel() -> None:
    found = [("a.cu", "90", kernel) for kernel in resources.kernels_of(SAID)]
    assert [tuple(kernel)[1:] for _, _, kernel in found] == [
        (128, 20, 32, 16384),
        (40, 0, 0, 0),
        (8, 0, 0, 0),
    ]
    rows = [(file, target, kernel) for target in resources.TARGETS for file, _, kernel in found]
    assert resources.table(rows)[2:] == [
        "| `set_signals` | `a.cu` | 1 | 8 | 8 | 8 | 0 | 0 | 0 |",
        "| `turn_rows<true>` | `a.cu` | 2 | 40 to 128 | 40 to 128 | 40 to 128 | 20 | 32 | 16384 |",
    ]
