"""hcp needs torch only. numpy, which torch does not require, may be absent."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]

WITHOUT_NUMPY = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "numpy" else super().find_spec(name, path, target)

sys.meta_path[:] = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
"""

STEP = """
import datetime, sys
import torch
import torch.distributed as dist

try:
    torch.ones(1).numpy()
except RuntimeError as error:
    assert "Numpy is not available" in str(error)
else:
    sys.exit("numpy is there: nothing is proved")

import hcp

rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group(
    "gloo",
    init_method=f"file://{store}",
    rank=rank,
    world_size=size,
    timeout=datetime.timedelta(seconds=100),
)
pgs = hcp.build_process_groups()

torch.manual_seed(0)
layer = torch.nn.Linear(8, 3 * 8).double()
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
own = [{"x": torch.ones(n, 8).double(), "loss_mask": torch.ones(n)} for n in (9, 5 + rank)]
lengths, sources, samples = hcp.gather_lengths(own, pgs)
plan = hcp.plan(lengths, ranks=size, max_tokens_per_rank=12)
metrics = hcp.Metrics(pgs)
for cp, local in hcp.dispatch(plan, samples, sources, pgs):
    query, key, value = layer(local.x).view(-1, 3, 2, 4).unbind(1)
    losses = cp.attention(query, key, value).square().sum((1, 2))
    cp.loss(losses, local.loss_mask, grad_reduce="sum").backward()
    metrics.add("loss", losses, local.loss_mask)
before = layer.weight.detach().clone()
optimizer.step()
assert not torch.equal(before, layer.weight)
assert metrics.reduce()["loss"].count == sum(lengths)

evaluation = pgs.with_context_parallel(size)
batches = hcp.EvalPlan(3, evaluation, micro_batch_size=1)
dataset = [torch.arange(3), torch.zeros(0), torch.ones(2).bfloat16()]
assert [len(batch.samples[0]) for batch in batches.batches(dataset)] == [3, 0, 2]
evaluation.close()
pgs.close()
dist.destroy_process_group()
print("trained")
"""


def run_step(python: list[str], code: str, folder: Path, ranks: int) -> None:
    """On ``ranks`` processes at once, started in a folder of their own."""
    command = [*python, "-c", code]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(folder / "store")],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    for process in processes:
        out, err = process.communicate(timeout=250)
        assert (process.returncode, out) == (0, "trained\n"), err


def test_a_step_trains_without_numpy(tmp_path: Path) -> None:
    run_step([sys.executable], WITHOUT_NUMPY + STEP, tmp_path, 1)


# ---- the wheel -----------------------------------------------------------------------------------


def built_wheel(folder: Path) -> Path:
    """hcp for the CPU, built from a copy of the project."""
    source = folder / "source"
    for name in ("csrc", "hcp"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(PROJECT / name, source / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, source)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, str(source)],
        env={**os.environ, "NVCC": ""},
        check=True,
    )
    (wheel,) = folder.glob("hcp_torch-*.whl")
    return wheel


def requirements(name: str, found: set[str]) -> set[str]:
    """The installed packages that one needs, and itself."""
    try:
        required = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:  # for another platform
        return found
    found.add(name)
    for line in required:
        needed = re.match(r"[\w.-]+", line)
        if needed and "extra ==" not in line and needed[0] not in found:
            requirements(needed[0], found)
    return found


def install_torch_alone(site: Path) -> None:
    """Links to torch and what it requires."""
    for package in requirements("torch", set()):
        files = importlib.metadata.files(package) or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            link = site / top
            if not link.exists():
                link.symlink_to(
                    Path(str(importlib.metadata.distribution(package).locate_file(top)))
                )


@pytest.mark.long
def test_the_wheel_trains_a_step_in_an_environment_with_torch_alone(tmp_path: Path) -> None:
    wheel = built_wheel(tmp_path)
    venv.create(tmp_path / "env", symlinks=True)
    python = [str(tmp_path / "env" / "bin" / "python"), "-I"]
    paths = {"base": str(tmp_path / "env"), "platbase": str(tmp_path / "env")}
    site = Path(sysconfig.get_path("purelib", "venv", paths))
    install_torch_alone(site)
    assert not (site / "numpy").exists()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True)
    run_step(python, STEP, tmp_path, 2)
    doctor = subprocess.run(
        [*python, "-m", "hcp", "doctor"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in doctor.stderr, doctor.stderr
