"""Builds the two libraries of hcp. What is not about building stands in pyproject.toml.

    hcp/_core.abi3.so   csrc/core + bounds       C11 on CPython's limited API, no torch
                        + exchange + python
    hcp/_ops.abi3.so    csrc/core + cpu          C11 and C++17 on libtorch's stable ABI, no Python;
                        + exchange + torch       CUDA's runtime linked in, its driver not needed;
                        + cuda, nccl where nvcc  NCCL is found in the process at run time
                        is

Without nvcc the version ends in +cpu. Both libraries work with every CPython >= 3.11 and every
torch >= 2.10. torch's headers and libtorch_cpu come
from the environment that hcp is being installed into. torch is no build requirement, because pip
would download a second one.

CC, CXX, CFLAGS, CXXFLAGS and LDFLAGS mean what they always mean: CFLAGS=-Werror makes warnings
errors. LDSHARED links instead of CC and CXX. NVCC names CUDA's compiler; NVCC= (empty) builds for
the CPU alone.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.dist_info import dist_info

OLDEST_TORCH = (2, 10)

NOTE = Path("hcp/_built_from.txt")
"""Beside the libraries in the tree: digests of what they were made from and of themselves, then
"cuda" or "cpu"."""

WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow"]
COMMON = ["-O3", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", *WARNINGS, "-Icsrc/include"]
C_FLAGS = ["-std=c11", *COMMON]
CXX_FLAGS = ["-std=c++17", *COMMON, "-fvisibility-inlines-hidden"]
# A100, H100 and B200; the last also as PTX, for what comes after.
CUDA_TARGETS = ["80", "90", "100"]
CUDA_FLAGS = [
    *("-std=c++17", "-O3", "-DNDEBUG", "-Xcompiler=-fPIC,-fvisibility=hidden", "-Icsrc/include"),
    *(f"-gencode=arch=compute_{target},code=sm_{target}" for target in CUDA_TARGETS),
    f"-gencode=arch=compute_{CUDA_TARGETS[-1]},code=compute_{CUDA_TARGETS[-1]}",
    "--compress-mode=size",
]


def sources(*folders: str) -> list[str]:
    files = [path for folder in folders for path in sorted(Path("csrc", folder).rglob("*"))]
    return [str(path) for path in files if path.suffix in (".c", ".cpp", ".cu")]


LIBRARIES = [
    Extension("hcp._core", sources("core", "bounds", "exchange", "python"), py_limited_api=True),
    Extension(
        "hcp._ops", sources("core", "cpu", "cuda", "exchange", "nccl", "torch"), py_limited_api=True
    ),
]


# ---- What the machine must have ------------------------------------------------------------------


def missing(what: str, remedy: str) -> SystemExit:
    return SystemExit(f"\nhcp was not built, nothing was changed: {what}. {remedy}\n")


def find_compiler(variable: str, usual: list[str], package: str) -> list[str]:
    """The compiler's command: the environment's word, else the first usual name that exists."""
    chosen = os.environ.get(variable)
    candidates = [chosen] if chosen else usual
    for command in candidates:
        if shutil.which(shlex.split(command)[0]):
            return shlex.split(command)
    raise missing(
        f"no compiler: {variable} is {chosen!r}, which is not on PATH"
        if chosen
        else f"no compiler: none of {', '.join(usual)} is on PATH",
        f"Install {package} with the system's package manager, or set {variable} to a compiler.",
    )


def find_nvcc() -> list[str] | None:
    """CUDA's compiler, or None where there is none: hcp then works with CPU tensors alone."""
    chosen = os.environ.get("NVCC")
    if chosen is not None and not chosen:
        return None
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    for command in [chosen] if chosen else ["nvcc", f"{home}/bin/nvcc"]:
        if shutil.which(shlex.split(command)[0]):
            return shlex.split(command)
    if chosen:
        raise missing(f"NVCC is {chosen!r}, which is not on PATH", "Correct it, or set NVCC= .")
    return None


def find_cuda_libraries(nvcc: list[str]) -> list[str]:
    """Where CUDA's runtime lies, as options of a linker."""
    command = [*nvcc, "--dryrun", "--shared", "none.o", "-o", "none.so"]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    found = re.search(r"^#\$ LIBRARIES=(.*)$", said, re.MULTILINE)
    if found is None:
        raise missing(f"{shlex.join(command)} names no LIBRARIES", "Set NVCC to CUDA's nvcc.")
    folders = [word for word in shlex.split(found[1]) if not word.endswith("/stubs")]
    return [*folders, "-lcudart_static", "-lrt", "-lpthread", "-ldl"]


def find_python_headers() -> str:
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").exists():
        raise missing(
            f"{include}/Python.h does not exist",
            "Install the headers of this Python (python3-dev or python3-devel in most systems).",
        )
    return include


@functools.cache
def find_torch() -> Path:
    """The folder of the torch that hcp will run with.

    pip builds in an environment of its own, which hides the target's packages by means of
    PYTHONPATH; the same interpreter without that variable sees them.
    """
    report = (
        "import os, torch; print(torch.__version__, os.path.dirname(torch.__file__), sep='\\n')"
    )
    hidden = {"PYTHONPATH", "PYTHONNOUSERSITE"}
    target = {name: value for name, value in os.environ.items() if name not in hidden}
    for environment in (dict(os.environ), target):
        found = subprocess.run(
            [sys.executable, "-P", "-c", report],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if found.returncode == 0:
            break
    else:
        last_line = (found.stderr.strip().splitlines() or ["no output"])[-1]
        raise missing(
            f"torch cannot be imported by {sys.executable} ({last_line})",
            "hcp is built against the torch it will run with: install torch 2.10 or later in the "
            "same environment first, then hcp. Tools that build with another environment's Python "
            "need to be told not to (uv: --no-build-isolation, build: --no-isolation).",
        )
    version, folder = found.stdout.splitlines()[-2:]
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TORCH:
        raise missing(
            f"torch is {version} in {folder}, expected 2.10 or later for its stable ABI",
            "Upgrade torch in this environment, then install hcp.",
        )
    return Path(folder)


class Toolchain:
    """Everything that a build needs, found or refused before anything is compiled."""

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise missing(f"the platform is {sys.platform}, expected linux", "Build on Linux.")
        self.cc = find_compiler("CC", ["cc", "gcc", "clang"], "gcc")
        self.cxx = find_compiler("CXX", ["c++", "g++", "clang++"], "g++")
        self.nvcc = find_nvcc()
        if self.nvcc is None and os.environ.get("NVCC") is None:
            print("nvcc is neither on PATH nor in CUDA_HOME: hcp is built without CUDA kernels")
        python = find_python_headers()
        torch = find_torch()
        self.torch_version = (torch / "version.py").read_text()
        self.torch_libraries = torch / "lib"
        # Of libtorch's headers only the stable ABI is used, down to the oldest torch.
        oldest = f"0x{OLDEST_TORCH[0]:02x}{OLDEST_TORCH[1]:02x}000000000000"
        self.folder_flags = {
            "core": C_FLAGS,
            "bounds": C_FLAGS,
            "cpu": C_FLAGS,
            "exchange": C_FLAGS,
            "nccl": C_FLAGS,
            "python": [
                *C_FLAGS,
                "-DPy_LIMITED_API=0x030B0000",
                f'-DHCP_CORE_HASH="{core_hash()}"',
                f"-isystem{python}",
            ],
            "torch": [
                *CXX_FLAGS,
                f"-DTORCH_TARGET_VERSION={oldest}",
                f"-isystem{torch / 'include'}",
            ],
        }

    def builds(self, source: str) -> bool:
        return self.nvcc is not None or not is_for_cuda(source)

    def digest(self, libraries: list[Extension]) -> str:
        """Of all that the libraries are made from. Python's headers of every version give the same
        binary."""
        commands = [
            shlex.join(
                word for word in self.compile_command(source, Path()) if "-isystem" not in word
            )
            for library in libraries
            for source in library.sources
            if self.builds(source)
        ]
        compilers = [*filter(None, (self.cc, self.cxx, self.nvcc))]
        versions = [
            subprocess.run([*command, "--version"], capture_output=True).stdout
            for command in compilers
        ]
        files = [Path("setup.py"), *sorted(path for path in Path("csrc").rglob("*.*"))]
        linked = [environment_flags(name) for name in ("LDSHARED", "LDFLAGS")]
        words = [*commands, *map(str, linked), *map(str, files), self.torch_version]
        return digest_of(
            [*(w.encode() for w in words), *versions, *(file.read_bytes() for file in files)]
        )

    def compile_command(self, source: str, output: Path) -> list[str]:
        if source.endswith(".cu"):
            assert self.nvcc is not None
            return [*self.nvcc, *CUDA_FLAGS, "-c", source, "-o", str(output)]
        flags = self.folder_flags[Path(source).parts[1]]
        if source.endswith(".cpp"):
            compiler, extra = self.cxx, environment_flags("CXXFLAGS")
        else:
            compiler, extra = self.cc, environment_flags("CFLAGS")
        return [*compiler, *flags, *extra, "-c", source, "-o", str(output)]

    def link_command(self, name: str, objects: list[str], output: Path) -> list[str]:
        of_core = name == "hcp._core"
        compiler = self.cc if of_core else self.cxx
        linker = environment_flags("LDSHARED") or [*compiler, "-shared"]
        libraries: list[str] = []
        if not of_core:
            # No rpath: hcp imports torch first, and what is loaded already is found by name.
            libraries += [f"-L{self.torch_libraries}", "-ltorch_cpu", "-lm", "-Wl,--no-undefined"]
        if not of_core and self.nvcc:
            libraries += find_cuda_libraries(self.nvcc)
        return [*linker, *objects, *libraries, *environment_flags("LDFLAGS"), "-o", str(output)]


def core_hash() -> str:
    """Of what plans and tables are made by: ranks whose cores differ must not meet."""
    digest = hashlib.sha256()
    for folder in ("core", "exchange", "include/hcp"):
        for path in sorted(Path("csrc", folder).rglob("*.[ch]")):
            digest.update(str(path).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def digest_of(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def is_for_cuda(source: str) -> bool:
    return source.endswith((".cu", "_cuda.cpp")) or Path(source).parent.name == "nccl"


def longest_first(sources: Iterable[str]) -> list[str]:
    """Files for CUDA compile for a minute, C++ with torch's headers for seconds: begun last, one of
    them would leave the other cores idle."""
    slowest = (".cu", ".cpp", ".c")
    return sorted(sources, key=lambda source: slowest.index(Path(source).suffix))


def environment_flags(variable: str) -> list[str]:
    return shlex.split(os.environ.get(variable, ""))


# ---- The build -----------------------------------------------------------------------------------


def run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(shlex.join(command), done.stdout, sep="\n", end="", flush=True)
    if done.returncode != 0:
        raise SystemExit(
            f"\nhcp was not built: this command failed\n{shlex.join(command)}\n{done.stdout}"
        )


class BuildInTemporaryFolder(build):
    """Leaves no build/ in the source tree, whose old files would get into the next wheel."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.build_base = tempfile.mkdtemp(prefix="hcp-build-")
        atexit.register(shutil.rmtree, self.build_base, ignore_errors=True)


class CheckedMetadata(dist_info):
    """pip asks for metadata first: what is missing is said before it downloads anything for hcp."""

    def run(self) -> None:
        Toolchain()
        super().run()


class BuildLibraries(build_ext):
    """Compiles each source once, side by side, and links both libraries when all have compiled.

    An editable install leaves them in the tree, with a note of what they were made from: a second
    environment takes them as they are.
    """

    def run(self) -> None:
        if not self.inplace:
            super().run()
            return
        tools = Toolchain()
        inputs, kind = tools.digest(self.extensions), "cuda" if tools.nvcc else "cpu"
        if NOTE.exists() and NOTE.read_text() == f"{inputs} {self.libraries_in_tree()} {kind}":
            print("Both libraries in the tree are those of these sources and compilers")
            return
        super().run()
        NOTE.write_text(f"{inputs} {self.libraries_in_tree()} {kind}")

    def libraries_in_tree(self) -> str:
        """A digest of the libraries that editable installs share."""
        files = [Path("hcp", Path(self.get_ext_filename(x.name)).name) for x in self.extensions]
        return digest_of([file.read_bytes() if file.exists() else b"" for file in files])

    def build_extensions(self) -> None:
        tools = Toolchain()
        objects: dict[str, Path] = {}
        for library in self.extensions:
            library.sources = [source for source in library.sources if tools.builds(source)]
            for source in library.sources:
                objects[source] = Path(self.build_temp, source).with_suffix(".o")
        for output in objects.values():
            output.parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(self.parallel or len(os.sched_getaffinity(0))) as workers:
            commands = [
                tools.compile_command(source, objects[source]) for source in longest_first(objects)
            ]
            list(workers.map(run, commands))
        for library in self.extensions:
            output = Path(self.get_ext_fullpath(library.name))
            output.parent.mkdir(parents=True, exist_ok=True)
            run(
                tools.link_command(library.name, [str(objects[s]) for s in library.sources], output)
            )


def version_suffix() -> str:
    """What tells a wheel without CUDA kernels from one with them. A source distribution is both."""
    return "" if find_nvcc() or "sdist" in sys.argv else "+cpu"


def project_urls() -> dict[str, str]:
    """Addresses of the repository whose workflow builds hcp. Elsewhere none is known."""
    server, repository = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    if not server or not repository:
        return {}
    home = f"{server}/{repository}"
    return {
        "Homepage": home,
        "Documentation": f"{home}/tree/main/docs",
        "Changelog": f"{home}/blob/main/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }


setup(
    project_urls=project_urls(),
    ext_modules=LIBRARIES,
    cmdclass={
        "build": BuildInTemporaryFolder,
        "build_ext": BuildLibraries,
        "dist_info": CheckedMetadata,
    },
    options={
        "bdist_wheel": {"py_limited_api": "cp311"},
        "egg_info": {"tag_build": version_suffix()},
        # An editable install is a path that type checkers and editors follow, and no import hook.
        "editable_wheel": {"mode": "compat"},
    },
)
