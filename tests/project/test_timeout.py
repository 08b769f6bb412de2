"""A test that runs too long fails with its stacks, and the others of its file still run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
FILE = """
import time

def test_before(): pass

def test_that_sleeps():
    with open("runs", "a") as runs:
        runs.write("x")
    time.sleep(600)

def test_after(): pass
"""


def test_a_test_that_sleeps_runs_once_and_fails_with_its_stacks(tmp_path: Path) -> None:
    (tmp_path / "test_file.py").write_text(FILE)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "conftest", "-n", "1", "--dist", "loadfile"),
            *("--no-loadscope-reorder", "--timeout", "5", "--timeout-method", "thread", "."),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert (tmp_path / "runs").read_text() == "x", said
    assert re.search(r"it ended a worker of this run:(.*\n)*.*in test_that_sleeps", said), said
    assert "2 passed" in said, said
