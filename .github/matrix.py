"""Install one wheel into clean environments, and run a part of the tests in each.

    python .github/matrix.py dist/*.whl --torches 2.10.0 2.13.0

Each pair of a Python and a torch gets an environment of its own, outside of the tree, which is
removed afterwards. The wheel and torch are all that is installed for `smoke.py`; then the packages
of the tests are added. Torch's builds for CUDA take several GB each. Without --pythons it takes
each release of CPython that this machine has, from the oldest that pyproject.toml allows. It prints
a table in Markdown, and the exit code is 1 if a pair failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
TESTS = ("tests/planning/test_plan.py", "tests/step/test_dispatch.py", "tests/exchange/test_ops.py")
NEEDS = ("numpy", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
LIMIT_S = 1800


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--pythons", nargs="+", default=[], metavar="COMMAND")
    parser.add_argument("--torches", nargs="+", required=True, metavar="VERSION")
    args = parser.parse_args()
    pythons = args.pythons or found_pythons()
    print(f"{args.wheel.name}, {args.wheel.stat().st_size / 1e6:.1f} MB\n")
    print("| torch | Python | result | seconds |\n|---|---|---|---|", flush=True)
    failed = 0
    for torch in args.torches:
        for python in pythons:
            begun = time.monotonic()
            good, found = tried(args.wheel.resolve(), python, torch)
            failed += not good
            print(f"| {found} | {time.monotonic() - begun:.0f} |", flush=True)
    return failed > 0


def found_pythons() -> list[str]:
    """One interpreter of each release of CPython from the oldest one that hcp takes."""
    folders = os.environ["PATH"].split(os.pathsep)
    if shutil.which("pyenv"):  # Its own commands on PATH run the chosen versions only.
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=True).stdout
        folders += sorted(map(str, Path(root.strip()).glob("versions/3.*/bin")))
    project = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
    oldest = int(project["requires-python"].removeprefix(">=3."))
    releases = (f"python3.{minor}" for minor in range(oldest, oldest + 20))
    works = {
        release: [f"{folder}/{release}" for folder in folders if runs(f"{folder}/{release}")]
        for release in releases
    }
    return [commands[0] for commands in works.values() if commands]


def runs(python: str) -> bool:
    """Whether it is an interpreter that can make environments."""
    if not shutil.which(python):
        return False
    command = [python, "-c", "import ensurepip, venv"]
    return subprocess.run(command, capture_output=True).returncode == 0


def tried(wheel: Path, python: str, torch: str) -> tuple[bool, str]:
    """Whether a wheel works with a Python and a torch, and the table's cells about it."""
    folder = Path(tempfile.mkdtemp(prefix="hcp-matrix-"))
    own = folder / "environment/bin/python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            [str(word) for word in command],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        if done.returncode:
            (TREE / "dist/matrix.log").write_text(done.stdout)
            raise RuntimeError(done.stdout.strip().splitlines()[-1])
        return done.stdout

    versions = torch, python
    try:
        run(python, "-m", "venv", folder / "environment")
        run(own, "-m", "pip", "install", "--quiet", f"torch=={torch}")
        run(own, "-m", "pip", "install", "--quiet", wheel)
        asked = "import sys, torch; print(torch.__version__, sys.version.split()[0])"
        versions = tuple(run(own, "-c", asked).split()[-2:])
        shutil.copy(TREE / ".github/smoke.py", folder)
        run(own, "smoke.py")
        run(own, "-m", "pip", "install", "--quiet", *NEEDS)
        shutil.copytree(TREE / "tests", folder / "tests")
        shutil.copy(TREE / "pyproject.toml", folder)
        said = run(own, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *TESTS)
        counts = re.findall(r"\d+ (?:passed|skipped)", said.strip().splitlines()[-1])
        return True, " | ".join((*versions, ", ".join(counts)))
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return False, " | ".join((*versions, f"FAILED: {error}"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
