"""Nsight Systems sees the parts of a step and of an evaluation: NVTX gets their names.

A library that takes NVTX's calls, as Nsight's does, prints the names of the ranges that torch
pushes under `emit_nvtx`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.ranges import EVALUATION, TRAINING

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LIBRARY = Path(__file__).with_name("nvtx_names.c")


def test_nvtx_gets_the_names_of_the_diagram(tmp_path: Path) -> None:
    library = tmp_path / "names.so"
    subprocess.run(["cc", "-shared", "-fPIC", str(LIBRARY), "-o", str(library)], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "support.ranges"],
        env={**os.environ, "NVTX_INJECTION64_PATH": str(library)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    names = set(re.findall(r"^NVTX (hcp: [a-z_ ]*[a-z_])", done.stderr, re.MULTILINE))
    assert names == TRAINING | EVALUATION
