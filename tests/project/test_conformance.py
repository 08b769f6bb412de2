"""`benchmarks/conformance.py`: hcp passes its cases, and other verdicts are those that they should
be, by contestants of this test that are wrong, refuse, crash or do not take a case."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import hcp

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "conformance.py"

PLUGINS = """
import os
import torch
from torch.nn import functional
from peers.conforming import Contestant, NotTaken, Part, register


def alone(q, k, v, scale):
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def bypasses(job):
    rows = job.zigzag()
    q, k, v = job.cut(rows)
    return Part(rows, alone(q, k, v, job.case.scale).transpose(0, 1), (q, k, v))


def whole(job):
    # Rank 0 computes everything.
    rows = torch.arange(sum(job.case.rows)) if job.rank == 0 else torch.arange(0)
    q, k, v = job.cut(rows)
    return Part(rows, alone(q, k, v, job.case.scale).transpose(0, 1), (q, k, v))



def forgets(job):
    part = whole(job)
    return Part(part.rows[1:], part.out[1:], part.leaves) if job.rank == 0 else part


def refuses(job):
    raise ValueError("heads have to be | 7")


def crashes(job):
    os._exit(3) if job.rank else torch.distributed.barrier()


def takes_not(job):
    raise NotTaken("no argument")


def raises_backward(job):
    if job.gradients:
        raise NotImplementedError("no backward here")
    return whole(job)


for f in (bypasses, whole, forgets, refuses, crashes, takes_not, raises_backward):
    register(Contestant(f.__name__, f, package="torch", module="torch", url="here"))
register(Contestant("absent", whole, package="absent", module="absent_library", url="there"))
register(Contestant("for GPUs", whole, package="torch", module="torch", url="x", devices=("cuda",)))
"""

TYPES = [each for each in hcp.COMM_TYPES if "+" not in each]
VERDICTS = {
    "bypasses": "wrong: forward, dquery, dkey, dvalue",
    "whole": "right",
    "forgets": "wrong: forward, dquery, dkey, dvalue",
    "refuses": "refused: ValueError: heads have to be / 7",
    "crashes": "crashed: ended: the process ended with status 3",
    "takes_not": "not taken: no argument",
    "raises_backward": "right forward, backward refused: NotImplementedError: no backward here",
    "absent": "not installed: pip install absent (there)",
    "for GPUs": "needs cuda",
}


def rows_of(tmp_path: Path, *arguments: str) -> list[dict[str, str]]:
    file = tmp_path / "rows.json"
    command = [sys.executable, str(PROGRAM), "--ranks", "2", "--json", str(file), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, str]] = json.loads(file.read_text())["rows"]
    assert sum(line.startswith("| ") for line in done.stdout.splitlines()) == len(found) + 1
    return found


@pytest.mark.timeout(300)
def test_hcp_is_right_in_every_case(tmp_path: Path) -> None:
    """By each comm type that 2 ranks have."""
    rows = [row for row in rows_of(tmp_path, "--only", "hcp") if row["case"] != "all"]
    assert {row["library"] for row in rows} == {f"hcp {each}" for each in TYPES}
    assert len(rows) > 20 * len(TYPES)
    assert [row for row in rows if row["verdict"] != "right"] == []


@pytest.mark.timeout(300)
def test_verdicts_say_what_happened(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(PLUGINS)
    only = ("--only", *VERDICTS, "--cases", "a scale of its own", "--seconds", "60")
    rows = rows_of(tmp_path, "--with", str(plugin), *only)
    assert {row["library"]: row["verdict"] for row in rows} == VERDICTS
