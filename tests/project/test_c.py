"""The C tests: each tests/c/test_*.c, with all of hcp's C code, under the sanitizers of gcc and of
clang. Both compilers give equal plans, however they optimise. tests/c/test_*.cpp are tests of what
a file for CUDA does on the host."""

from __future__ import annotations

import fcntl
import functools
import itertools
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import planning

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("core", "bounds", "cpu", "exchange", "nccl")
SOURCES = sorted(path for folder in FOLDERS for path in ROOT.glob(f"csrc/{folder}/**/*.c"))
CORE = sorted([*ROOT.glob("csrc/core/**/*.c"), *ROOT.glob("csrc/bounds/*.c")])
TESTS = sorted(ROOT.glob("tests/c/test_*.c"))
HOST_TESTS = sorted(ROOT.glob("tests/c/test_*.cpp"))
CUDA_VERSIONS = (12000, 12080, 13000)
"""CUDART_VERSION where a file's code differs."""
FUZZ = "tests/fuzz/fuzz_plan.c"
COMPILERS = ("gcc", "clang")
EACH = ("gcc", pytest.param("clang", marks=pytest.mark.slow))
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror"]
# NULL + 0, the address of nothing in a tensor without elements, is one that clang alone objects to:
# C++ allows it, and so will C.
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SANITIZERS += ["-fno-sanitize=pointer-overflow"]
SANITIZED = ["-g", "-O1", *SANITIZERS]
LIBRARIES = ["-lm", "-ldl"]


def compile_command(compiler: str, flags: list[str]) -> list[str]:
    return [compiler, "-std=c11", *flags, *WARNINGS, "-Icsrc/include"]


def compile_host_command(compiler: str, cuda: int) -> list[str]:
    command = ["g++" if compiler == "gcc" else "clang++", "-std=c++17", *SANITIZED, *WARNINGS]
    return [*command, "-Icsrc/include", f"-DCUDART_VERSION={cuda}"]


def succeed(command: list[str]) -> str:
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, (
        f"{' '.join(command)}\nexit status {done.returncode}\n{done.stdout}"
    )
    return done.stdout


@functools.cache
def why_not(compiler: str) -> str | None:
    """The part that a compiler lacks for these tests. gcc has to be there, as to install hcp."""
    if compiler == "gcc":
        return None
    if shutil.which(compiler) is None:
        return f"{compiler} is not on PATH: install the packages clang and libclang-rt-*-dev"
    program = [compiler, *SANITIZERS, "-x", "c", "-", "-o", os.devnull]
    done = subprocess.run(program, input="int main(void) { return 0; }", text=True, stderr=-1)
    return None if done.returncode == 0 else f"{compiler} lacks its sanitizers:\n{done.stderr}"


def need(*compilers: str) -> None:
    for compiler in compilers:
        if why_not(compiler):
            pytest.skip(str(why_not(compiler)))


class Libraries:
    """The objects of each compiler, compiled once, whichever process of the run is first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of(self, compiler: str) -> list[str]:
        folder = self.folder / f"objects_{compiler}"
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "complete").exists():
                self._compile(compiler, folder)
                (folder / "complete").touch()
        return [str(self._object(folder, source)) for source in SOURCES]

    def _compile(self, compiler: str, folder: Path) -> None:
        command = compile_command(compiler, SANITIZED)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as workers:
            commands = [
                [*command, "-c", str(source), "-o", str(self._object(folder, source))]
                for source in SOURCES
            ]
            list(workers.map(succeed, commands))

    @staticmethod
    def _object(folder: Path, source: Path) -> Path:
        return folder / f"{source.parent.name}_{source.stem}.o"


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    base = tmp_path_factory.getbasetemp()
    return Libraries(base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base)


@pytest.mark.parametrize("compiler", EACH)
@pytest.mark.parametrize("source", TESTS, ids=lambda path: path.stem)
def test_c_test_passes_under_the_sanitizers(
    source: Path, compiler: str, libraries: Libraries, tmp_path: Path
) -> None:
    need(compiler)
    program = str(tmp_path / source.stem)
    command = compile_command(compiler, SANITIZED)
    succeed([*command, str(source), *libraries.of(compiler), *LIBRARIES, "-o", program])
    succeed([program])


@pytest.mark.parametrize("cuda", CUDA_VERSIONS)
@pytest.mark.parametrize("compiler", EACH)
@pytest.mark.parametrize("source", HOST_TESTS, ids=lambda path: path.stem)
def test_what_a_file_for_cuda_does_on_the_host(
    source: Path, compiler: str, cuda: int, libraries: Libraries, tmp_path: Path
) -> None:
    need(compiler)
    program = str(tmp_path / source.stem)
    command = compile_host_command(compiler, cuda)
    succeed([*command, str(source), *libraries.of(compiler), *LIBRARIES, "-o", program])
    succeed([program])


def test_every_c_file_is_compiled() -> None:
    assert TESTS
    assert HOST_TESTS
    assert {path.relative_to(ROOT / "csrc").parts[0] for path in SOURCES} == set(FOLDERS)


# ---- requests that nobody thought of -------------------------------------------------------------


def fuzz_command(compiler: str, flags: list[str], objects: list[str], program: Path) -> list[str]:
    command = compile_command(compiler, [*flags, "-DHCP_FUZZ_MAIN"])
    return [*command, FUZZ, *objects, *LIBRARIES, "-o", str(program)]


@pytest.mark.parametrize(
    "compilers", [("gcc",), pytest.param(COMPILERS, marks=pytest.mark.slow)], ids=" and ".join
)
def test_no_request_of_today_breaks_a_plan_and_compilers_give_the_same_plans(
    compilers: tuple[str, ...], libraries: Libraries, tmp_path: Path
) -> None:
    """A digest stands for all plans and all refusals; the seed is in it."""
    need(*compilers)
    digests = {}
    for compiler in compilers:
        program = tmp_path / compiler
        succeed(fuzz_command(compiler, SANITIZED, libraries.of(compiler), program))
        digests[compiler] = succeed([str(program), "120", str(planning.seed())])
    assert len(set(digests.values())) == 1, digests


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_3000_requests_give_the_same_plans_however_the_core_is_compiled(tmp_path: Path) -> None:
    need(*COMPILERS)
    builds = list(itertools.product(COMPILERS, ("-O0", "-O2", "-O3", " ".join(SANITIZED))))

    def digest(build: tuple[str, str]) -> str:
        compiler, flags = build
        program = tmp_path / f"{compiler}{len(flags)}{flags[2]}"
        succeed(fuzz_command(compiler, flags.split(), [str(path) for path in CORE], program))
        return succeed([str(program), "3000", str(planning.seed())])

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as workers:
        digests = dict(zip(builds, workers.map(digest, builds), strict=True))
    assert len(set(digests.values())) == 1, digests


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_no_fuzzed_request_breaks_a_plan(
    compiler: str, libraries: Libraries, tmp_path: Path
) -> None:
    need(compiler)
    program = tmp_path / "fuzz_plan"
    succeed(fuzz_command(compiler, SANITIZED, libraries.of(compiler), program))
    succeed([str(program), "20000", str(planning.seed() + 1)])
