"""The C tests: each tests/c/test_*.c, with all of hcp that is C, under the sanitizers."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("core", "cpu", "nccl")
SOURCES = sorted(path for folder in FOLDERS for path in ROOT.glob(f"csrc/{folder}/*.c"))
TESTS = sorted(ROOT.glob("tests/c/test_*.c"))
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
COMPILE = ["gcc", "-std=c11", "-g", "-O1", *WARNINGS, *SANITIZERS, "-Icsrc/include"]


def succeed(command: list[str]) -> None:
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, (
        f"{' '.join(command)}\nexit status {done.returncode}\n{done.stdout}"
    )


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The objects, compiled once."""
    folder = tmp_path_factory.mktemp("objects")
    objects = [str(folder / f"{source.parent.name}_{source.stem}.o") for source in SOURCES]
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        commands = [
            [*COMPILE, "-c", str(source), "-o", output]
            for source, output in zip(SOURCES, objects, strict=True)
        ]
        list(workers.map(succeed, commands))
    return objects


@pytest.mark.parametrize("source", TESTS, ids=lambda path: path.stem)
def test_c_test_passes_under_the_sanitizers(
    source: Path, library: list[str], tmp_path: Path
) -> None:
    program = str(tmp_path / source.stem)
    succeed([*COMPILE, str(source), *library, "-lm", "-ldl", "-o", program])
    succeed([program])


def test_every_c_file_is_compiled() -> None:
    assert TESTS
    assert {path.parent.name for path in SOURCES} == set(FOLDERS)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_no_fuzzed_request_breaks_a_plan(library: list[str], tmp_path: Path) -> None:
    program = str(tmp_path / "fuzz_plan")
    source = "tests/fuzz/fuzz_plan.c"
    succeed([*COMPILE, "-DHCP_FUZZ_MAIN", source, *library, "-lm", "-ldl", "-o", program])
    succeed([program, "20000"])
