"""What a newcomer meets first: a source folder without a build, no torch, no trainer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hcp.cli.commands import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
FILES = ("__init__", "__main__", "_built", "_version")

HIDDEN = """
import os, sys
from importlib import metadata
from importlib.machinery import PathFinder

hidden = set(os.environ["HIDDEN"].split())
version = metadata.version

def shown(name):
    if name in hidden:
        raise metadata.PackageNotFoundError(name)
    return version(name)

metadata.version = shown

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)

sys.meta_path[:] = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
"""
"""A sitecustomize.py under which some packages are absent."""

Done = subprocess.CompletedProcess[str]


def run_without(packages: str, folder: Path, *arguments: str) -> Done:
    """Run Python with hcp, where the packages are absent."""
    (folder / "sitecustomize.py").write_text(HIDDEN)
    paths = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "HIDDEN": packages},
        capture_output=True,
        text=True,
    )


def only_line(done: Done) -> str:
    """The one line that a failing command prints."""
    assert (done.returncode != 0, done.stdout) == (True, ""), done
    (line,) = done.stderr.splitlines()
    return line


# ---- not built -----------------------------------------------------------------------------------


def unbuilt(folder: Path, setup: bool) -> Path:
    (folder / "hcp").mkdir()
    for name in FILES:
        shutil.copy(ROOT / "hcp" / f"{name}.py", folder / "hcp")
    if setup:
        (folder / "setup.py").touch()
    return folder


@pytest.mark.parametrize(
    ("setup", "says"),
    [
        (True, "is the source of hcp without _core.abi3.so and _ops.abi3.so, expected a build: "),
        (False, "lacks _core.abi3.so and _ops.abi3.so, expected the libraries of an installed hcp"),
    ],
)
def test_a_folder_without_a_build_says_so_in_one_line(
    setup: bool, says: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hcp", "doctor"],
        cwd=unbuilt(tmp_path, setup),
        capture_output=True,
        text=True,
    )
    line = only_line(done)
    assert says in line
    assert ("pip install -e" in line) == setup


# ---- no torch ------------------------------------------------------------------------------------


HELP = ["--help", *(f"{command} --help" for command in COMMANDS)]


@pytest.mark.parametrize("arguments", HELP)
def test_help_needs_no_torch(arguments: str, tmp_path: Path) -> None:
    done = run_without("torch tqdm matplotlib", tmp_path, "-m", "hcp", *arguments.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: hcp ")


IMPORTED = """
import sys
from hcp.cli.commands import main

try:
    main(sys.argv[1:])
except SystemExit:
    pass
print("imported:", *sorted(sys.modules.keys() & {"torch", "numpy", "matplotlib"}))
"""


@pytest.mark.parametrize("arguments", HELP)
def test_help_imports_no_torch(arguments: str) -> None:
    """So that it comes at once where torch is installed."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, *arguments.split()], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "imported:"


def test_a_plan_needs_no_torch(tmp_path: Path) -> None:
    limits = ["--family=mock", "--sequences=8", "--ranks=4", "--max-tokens-per-rank=8192"]
    for command in ("plan", "simulate"):
        done = run_without("torch", tmp_path, "-m", "hcp", command, *limits)
        assert (done.returncode, done.stderr) == (0, "")


def test_what_needs_torch_says_so_in_one_line(tmp_path: Path) -> None:
    for command, says in {
        "calibrate": "hcp calibrate: error: calibrate needs torch",
        "demo": "hcp demo: error: the demo needs torch",
    }.items():
        assert only_line(run_without("torch", tmp_path, "-m", "hcp", command)).startswith(says)
    for module in ("megatron", "transformers"):
        done = run_without("torch", tmp_path, "-m", f"hcp.integrations.{module}")
        assert "hcp.integrations needs torch, which is not installed: " in only_line(done)


def test_the_doctor_says_that_torch_is_missing(tmp_path: Path) -> None:
    done = run_without("torch", tmp_path, "-m", "hcp", "doctor")
    assert (done.returncode, done.stderr) == (1, "")
    assert re.search("no  torch +not installed, and only plans can be made without", done.stdout)


def test_a_name_that_needs_torch_says_so(tmp_path: Path) -> None:
    done = run_without("torch", tmp_path, "-c", "import hcp; hcp.dispatch")
    assert done.stderr.splitlines()[-1] == (
        "ImportError: hcp.dispatch needs torch, which is not installed: python -m pip install torch"
    )


# ---- no trainer ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("megatron", "megatron-core"),
        ("megatron.launch script.py --flag", "megatron-core"),
        ("transformers", "transformers"),
        ("trl", "trl"),
        ("torchtitan", "torchtitan"),
    ],
)
def test_a_program_whose_trainer_is_absent_says_so_in_one_line(
    module: str, package: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").touch()
    absent = f"{package} megatron"
    done = run_without(absent, tmp_path, "-m", *f"hcp.integrations.{module}".split())
    assert re.search(rf"{package} is not installed, expected .*: pip install", only_line(done))


# ---- no kernels ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name", "needs"),
    [
        ("hcp demo", "hcp demo", ""),
        ("hcp calibrate --out cost.json", "hcp calibrate", ""),
        ("hcp.integrations.megatron", "hcp.integrations.megatron", "megatron"),
        ("hcp.integrations.transformers", "hcp.integrations.transformers", "transformers"),
    ],
)
def test_a_program_refuses_a_backend_whose_package_is_absent_before_it_starts_ranks(
    module: str, name: str, needs: str, tmp_path: Path
) -> None:
    if needs:
        pytest.importorskip(needs)
    flags = ["--attention-backend", "flash_attn_4", "--max-length", "512"]
    if "calibrate" in module:
        flags = flags[:2]
    done = run_without("flash-attn-4 flash_attn", tmp_path, "-m", *module.split(), *flags)
    says = (
        f"{name}: error: the backend 'flash_attn_4' needs the package flash-attn-4, which is not "
        "installed: python -m pip install flash-attn-4=="
    )
    assert done.returncode == 2
    assert says in done.stderr.splitlines()[-1]
    assert "No module named" not in done.stderr


# ---- no matplotlib, no tqdm ----------------------------------------------------------------------

MODEL = "--ranks 1 --num-layers 1 --hidden-size 32 --ffn-hidden-size 64"
STEP = "--train-iters 1 --global-batch-size 2 --max-length 60 --max-seqlen-per-dp-cp-rank 80"


def test_the_demo_draws_no_picture_without_matplotlib_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for name in "abcdef":
        (tmp_path / "texts" / f"{name}.txt").write_text(f"{name} to be or not to be")
    options = f"demo {MODEL} {STEP} --data texts --eval-documents 2 --run-dir run"
    done = run_without("matplotlib tqdm", tmp_path, "-m", "hcp", *options.split())
    assert done.returncode == 0, done.stderr
    assert "plan.svg; loss.png needs: pip install matplotlib" in done.stdout
    written = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert written == ["metrics.jsonl", "plan.svg", "summary.json"]


def test_calibrate_needs_no_tqdm(tmp_path: Path) -> None:
    options = f"calibrate {MODEL} --repeats 2 --max-tokens-per-rank 2048 --accept-errors --out cost"
    done = run_without("matplotlib tqdm", tmp_path, "-m", "hcp", *options.split())
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "cost").exists()
