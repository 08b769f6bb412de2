"""The layers: includes, imports and symbols of the built libraries point down only.

integrations, demo, cli, tools
hcp
csrc/python, csrc/torch
csrc/bounds, csrc/cpu, csrc/cuda, csrc/exchange, csrc/nccl
csrc/core
"""

from __future__ import annotations

import ast
import re
import subprocess
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE_LIBRARY = ROOT / "hcp" / "_core.abi3.so"
OPS_LIBRARY = ROOT / "hcp" / "_ops.abi3.so"

# Of C's own headers, those without I/O, threads, signals, time or locale. <stdio.h> is for
# vsnprintf alone, which the symbols below hold.
PLAIN_C = {
    "assert.h",
    "float.h",
    "inttypes.h",
    "limits.h",
    "math.h",
    "stdarg.h",
    "stdbool.h",
    "stddef.h",
    "stdint.h",
    "stdio.h",
    "stdlib.h",
    "string.h",
}
STABLE_ABI = r"torch/(csrc/stable|headeronly)/.*"

# All that the core and the CPU kernels take from libc and libm.
MEMORY = {"malloc", "calloc", "realloc", "free"}
TEXT = {"snprintf", "vsnprintf", "strcat", "strchr", "strcmp", "strlen", "strncmp", "strtol"}
BLOCKS = {"memchr", "memcmp", "memcpy", "memmove", "memset", "qsort"}
MATHS = {"exp", "expf", "log", "logf", "log1p", "log1pf", "fmax", "fmaxf"}
LIBC = MEMORY | TEXT | BLOCKS

TRAINERS = {
    "accelerate",
    "deepspeed",
    "lightning",
    "megatron",
    "nemo",
    "pytorch_lightning",
    "torchtitan",
    "transformer_engine",
    "transformers",
    "verl",
}


def files(folder: str) -> list[Path]:
    found = [path for path in sorted((ROOT / "csrc" / folder).rglob("*")) if path.is_file()]
    assert found, f"csrc/{folder} is empty"
    return found


def includes(path: Path) -> list[str]:
    """Headers that a file includes. Those of its own folder are named from csrc on."""
    names = re.findall(r'^\s*#\s*include\s*([<"][^>"]+)[>"]', path.read_text(), re.MULTILINE)
    return [inside(path, name) for name in names]


def inside(path: Path, name: str) -> str:
    beside = (path.parent / name[1:]).resolve()
    if name[0] == '"' and beside.exists():
        return str(beside.relative_to(ROOT / "csrc"))
    return name[1:]


def unexpected(folder: str, *allowed: str) -> dict[str, list[str]]:
    """Files of the folder with the includes that are neither the folder's own nor allowed."""
    strangers = {
        path.name: [
            name
            for name in includes(path)
            if not name.startswith(f"{folder}/")
            and not any(re.fullmatch(pattern, name) for pattern in allowed)
        ]
        for path in files(folder)
    }
    return {name: strange for name, strange in strangers.items() if strange}


PLAIN = "|".join(re.escape(name) for name in sorted(PLAIN_C))


def test_core_includes_only_plain_c_and_its_own_headers() -> None:
    assert unexpected("core", PLAIN, r"hcp/(hcp|fail)\.h") == {}


def test_bounds_include_only_plain_c_and_the_core() -> None:
    assert unexpected("bounds", PLAIN, r"core/plan/plan\.h") == {}


def test_cpu_kernels_include_only_plain_c_the_contracts_and_the_error_helper() -> None:
    assert unexpected("cpu", PLAIN, r"hcp/(hcp|kernels|index|merging|fail)\.h") == {}


def test_links_include_only_plain_c_the_core_and_the_contract() -> None:
    assert unexpected("exchange", PLAIN, r"core/internal\.h", r"hcp/link\.h") == {}


def test_public_headers_include_only_plain_c_and_each_other() -> None:
    assert unexpected("include/hcp", PLAIN, r"hcp/\w+\.h") == {}


def test_python_glue_includes_only_python_plain_c_a_clock_and_the_contract() -> None:
    clock = r"time\.h"  # by which a search asks for signals now and then
    contracts = r"hcp/(hcp|link|signal)\.h"
    assert unexpected("python", PLAIN, r"Python\.h", contracts, clock) == {}


def test_torch_glue_includes_only_the_stable_abi_standard_headers_and_the_contracts() -> None:
    standard = r"[a-z_0-9]+"  # C++'s own have no dot
    contracts = r"hcp/(hcp|kernels|index|link|signal)\.h"
    found = unexpected("torch", PLAIN, standard, STABLE_ABI, contracts)
    # The one place that looks into the CUDA build of torch, at run time.
    assert found == {"ops_cuda.cpp": ["dlfcn.h", "hcp/nccl.h"]}


def test_cuda_kernels_include_only_cudas_runtime_plain_c_and_the_contracts() -> None:
    cuda = r"cuda_(runtime|bf16|fp16)\.h"
    assert unexpected("cuda", PLAIN, cuda, r"hcp/(kernels|index|merging|signal|fail)\.h") == {}


def test_the_exchange_by_nccl_includes_only_plain_c_the_loader_the_clock_and_the_contract() -> None:
    assert unexpected("nccl", PLAIN, r"(dlfcn|time)\.h", r"hcp/(nccl|fail)\.h") == {}


def test_python_glue_keeps_to_the_limited_api() -> None:
    text = (ROOT / "csrc" / "python" / "glue.h").read_text()
    assert "#define Py_LIMITED_API 0x030B0000" in text


# ---- Symbols -------------------------------------------------------------------------------------


def symbols(path: Path, *flags: str) -> list[tuple[str, str]]:
    """(type, name) of each symbol, as nm says."""
    command = ["nm", *flags, "--format=posix", str(path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [(fields[1], fields[0]) for fields in (line.split() for line in lines)]


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("objects")


def compiled(path: Path, folder: Path) -> Path:
    """The object of one C file, made once. Without position-independent code, a constant table of
    pointers is read-only data and no relocated data."""
    output = folder / f"{path.parent.name}-{path.stem}.o"
    if output.exists():
        return output
    plain = ["-U_FORTIFY_SOURCE", "-fno-stack-protector", "-fno-pie", "-fno-pic"]
    command = ["gcc", "-std=c11", "-O2", *plain, "-I", str(ROOT / "csrc" / "include")]
    subprocess.run([*command, "-c", str(path), "-o", str(output)], check=True)
    return output


def mutable(path: Path, folder: Path) -> list[str]:
    """Names of the globals and static variables that can be written."""
    return [name for kind, name in symbols(compiled(path, folder)) if kind in "bBdDcCsSgG"]


def borrowed(folder: str, objects: Path) -> set[str]:
    """The names that the files of a folder take from outside it."""
    tables = [symbols(compiled(path, objects)) for path in files(folder) if path.suffix == ".c"]
    defined = {name for table in tables for kind, name in table if kind in "TRV"}
    return {name for table in tables for kind, name in table if kind in "Uw"} - defined


@pytest.mark.parametrize("folder", ["core", "bounds", "cpu", "exchange"])
def test_there_is_no_mutable_global(folder: str, objects: Path) -> None:
    found = {path.name: mutable(path, objects) for path in files(folder) if path.suffix == ".c"}
    assert {name: names for name, names in found.items() if names} == {}


def test_a_mutable_global_would_be_found(tmp_path: Path) -> None:
    planted = tmp_path / "planted.c"
    planted.write_text(
        'static const char *const names[] = {"a", "b"};\n'
        "const char *name(int i) { return names[i]; }\n"
        "int count(void) { static int calls; return ++calls; }\n"
    )
    names = [name.partition(".")[0] for name in mutable(planted, tmp_path)]
    assert names == ["calls"]


def test_core_takes_from_libc_memory_and_text_but_no_io_and_no_threads(objects: Path) -> None:
    assert borrowed("core", objects) - LIBC == set()


def test_the_core_uses_nothing_of_the_sharper_bounds(objects: Path) -> None:
    paths = [path for path in files("bounds") if path.suffix == ".c"]
    made = {
        name for path in paths for kind, name in symbols(compiled(path, objects)) if kind == "T"
    }
    assert made == {"hcp_plan_bound"}
    assert not made & borrowed("core", objects)


def calls(paths: list[Path], objects: Path) -> dict[str, set[str]]:
    """Files with the files whose functions they use."""
    tables = {path.name: symbols(compiled(path, objects)) for path in paths}
    home = {name: file for file, table in tables.items() for kind, name in table if kind in "TR"}
    return {
        file: {home[name] for kind, name in table if kind == "U" and name in home}
        for file, table in tables.items()
    }


def test_no_files_of_the_core_use_each_other_in_a_circle(objects: Path) -> None:
    uses = calls([path for path in files("core") if path.suffix == ".c"], objects)
    TopologicalSorter(uses).prepare()


def test_cpu_kernels_take_from_outside_only_maths_and_the_error_helper(objects: Path) -> None:
    assert borrowed("cpu", objects) - BLOCKS - MATHS - {"hcp__fail"} == set()


def undefined(library: Path) -> set[str]:
    """Names that a library takes from others, but for those that carry a version of the C and C++
    runtimes and the weak ones that every compiler leaves."""
    runtime = re.compile(r".*@(GLIBC|GLIBCXX|CXXABI|GCC)_[0-9.]+")
    weak = {"__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable"}
    names = {name for _, name in symbols(library, "--dynamic", "--undefined-only")}
    return {name for name in names if not runtime.fullmatch(name)} - weak


def entries(library: Path, tag: str) -> set[str]:
    """Values of a tag of the dynamic section, such as NEEDED."""
    command = ["readelf", "--dynamic", "--wide", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(re.findall(rf"\({tag}\).*\[(.*)\]", text))


def test_core_library_takes_only_python_and_libc() -> None:
    names = undefined(CORE_LIBRARY)
    assert {name for name in names if not re.match(r"_?Py[A-Z_]", name)} == set()
    assert entries(CORE_LIBRARY, "NEEDED") <= {"libc.so.6", "libpthread.so.0"}


def test_ops_library_takes_only_the_stable_abi_and_the_c_and_cpp_runtimes() -> None:
    names = undefined(OPS_LIBRARY)
    assert names, "the operators use nothing of torch"
    assert {name for name in names if not name.startswith(("aoti_torch_", "torch_"))} == set()
    runtimes = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libpthread.so.0"}
    # CUDA's static runtime finds its driver with them; no library of CUDA's is needed.
    loaders = {"libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
    assert entries(OPS_LIBRARY, "NEEDED") <= {"libtorch_cpu.so", *runtimes, *loaders}


def test_ops_library_takes_only_what_the_libstdcpp_of_gcc_8_has() -> None:
    # What is newer is in csrc/torch/older_runtime.cpp. `make wheel` checks what it takes of glibc.
    names = subprocess.run(
        ["objdump", "-T", str(OPS_LIBRARY)], capture_output=True, text=True, check=True
    ).stdout
    found = re.findall(r"\b(GLIBCXX_3\.4|CXXABI_1\.3)\.(\d+)", names)
    latest = {name: max(int(n) for of, n in found if of == name) for name, _ in found}
    assert latest.get("GLIBCXX_3.4", 0) <= 24
    assert latest.get("CXXABI_1.3", 0) <= 11


@pytest.mark.parametrize("library", [CORE_LIBRARY, OPS_LIBRARY], ids=lambda path: path.name)
def test_a_library_names_no_path_of_the_machine_that_built_it(library: Path) -> None:
    assert entries(library, "RPATH") | entries(library, "RUNPATH") == set()


@pytest.mark.parametrize("library", [CORE_LIBRARY, OPS_LIBRARY], ids=lambda path: path.name)
def test_a_library_shows_nothing_of_the_core(library: Path) -> None:
    shown = {name for _, name in symbols(library, "--dynamic", "--defined-only")}
    assert {name for name in shown if "hcp" in name} == set()


def test_core_library_shows_its_module_and_nothing_else() -> None:
    shown = {name for _, name in symbols(CORE_LIBRARY, "--dynamic", "--defined-only")}
    assert shown == {"PyInit__core"}


# ---- Python --------------------------------------------------------------------------------------


def imports(source: str, package: tuple[str, ...]) -> set[str]:
    """Modules that a file imports anywhere, also inside functions; relative ones made absolute. A
    text that is the name of a module of hcp counts: importlib takes it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *filter(None, [node.module])])
            found.add(module)
            found.update(f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"hcp(\.\w+)+", str(node.value)):
            found.add(str(node.value))
    return found


def library_files() -> list[Path]:
    """Every Python file of the library itself: not the integrations and the programs."""
    outside = {"integrations", "demo", "cli", "tools", "__main__.py"}
    return [
        path
        for path in sorted((ROOT / "hcp").rglob("*.py"))
        if path.relative_to(ROOT / "hcp").parts[0] not in outside
    ]


def importers(names: set[str], paths: list[Path]) -> dict[str, set[str]]:
    """Files with what they import of the modules named, or inside them."""
    found = {
        str(path.relative_to(ROOT)): {
            module
            for module in imports(path.read_text(), path.relative_to(ROOT).parent.parts)
            if any(module == name or module.startswith(f"{name}.") for name in names)
        }
        for path in paths
    }
    return {path: modules for path, modules in found.items() if modules}


def test_the_library_imports_no_trainer() -> None:
    assert importers(TRAINERS, library_files()) == {}


def test_the_library_imports_neither_program_nor_tool_nor_integration() -> None:
    found = importers({"hcp.demo", "hcp.cli", "hcp.tools", "hcp.integrations"}, library_files())
    public = found.pop("hcp/__init__.py")
    assert public == {
        f"hcp.{home}{suffix}"
        for home, name in (
            ("tools.loopback", "loopback"),
            ("tools.programs.options", "add_arguments"),
        )
        for suffix in ("", f".{name}")
    }, "public names are imported where they are asked for, and for types"
    assert found == {
        # A plan's timeline, imported when a notebook shows the plan.
        "hcp/planning/plan.py": {"hcp.tools.drawing"},
        # Published prices, imported when one is asked for by name.
        "hcp/planning/cost.py": {"hcp.tools.presets"},
        # A backend by name, imported when it is asked for: nobody has to import it before.
        "hcp/step/backends.py": {"hcp.integrations.transformer_engine.transformer_engine_handler"},
        # Rules for a package's classes, imported when a model has one of them.
        "hcp/rebinding/packages.py": {
            "hcp.integrations.deepspeed.deepspeed_rules",
            "hcp.integrations.megatron.megatron_rules",
            "hcp.integrations.transformer_engine.transformer_engine_rules",
        },
    }


KNOWN_BY_NAME = {
    "hcp/_versions.py": "one table has the tested versions of all packages",
    "hcp/_words.py": "the backends that hcp comes with, by their libraries' names",
    "hcp/rebinding/packages.py": "which rules belong to which package",
    "hcp/step/backends.py": "users ask for a backend by its library's name",
    "hcp/step/config.py": "options take Megatron's names of schedulers for hcp's",
}
"""Files of the library that name a trainer's package, and why."""


def code_words(source: str) -> set[str]:
    """Names and texts of a file's code, docstrings and comments aside."""
    tree = ast.parse(source)
    documents = {id(x.value) for x in ast.walk(tree) if isinstance(x, ast.Expr)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set() if id(node) in documents else {node.value}
        for field in ("id", "attr", "name", "arg", "module", "asname"):
            found.add(str(getattr(node, field, None)))
    return found


def trainers_named(source: str) -> set[str]:
    """Trainers' packages that the code names. hcp's own folder megatron_style is none."""
    pattern = re.compile(rf"(?<![a-z])(?:{'|'.join(sorted(TRAINERS))})(?!_style)(?![a-z])")
    return {name for word in code_words(source) for name in pattern.findall(word.lower())}


def test_the_library_names_no_trainers_package_but_where_it_says_why() -> None:
    found = {
        str(path.relative_to(ROOT)): trainers_named(path.read_text()) for path in library_files()
    }
    assert {path for path, names in found.items() if names} == set(KNOWN_BY_NAME)


def test_a_trainers_package_in_code_or_in_a_text_would_be_found() -> None:
    source = '"""Megatron\'s."""\nrules = {"megatron.core.Router": 1}\nis_deepspeed = 1  # verl\n'
    assert trainers_named(source) == {"megatron", "deepspeed"}
    assert trainers_named('"""torchtitan"""\nfrom hcp.megatron_style import packed\n') == set()


def test_the_programs_kit_imports_no_program_and_no_integration() -> None:
    paths = sorted((ROOT / "hcp" / "tools" / "programs").rglob("*.py"))
    assert paths
    assert importers({"hcp.demo", "hcp.cli", "hcp.integrations", *TRAINERS}, paths) == {}


def test_integrations_do_not_import_the_demo_or_a_command() -> None:
    paths = sorted((ROOT / "hcp" / "integrations").rglob("*.py"))
    assert importers({"hcp.demo", "hcp.cli"}, paths) == {}


def test_the_demo_imports_no_trainer() -> None:
    paths = sorted((ROOT / "hcp" / "demo").rglob("*.py"))
    assert paths
    assert importers(TRAINERS, paths) == {}


def test_an_import_inside_a_function_by_a_relative_name_or_by_a_text_would_be_found() -> None:
    source = (
        "def f():\n    import megatron.core\n    from . import demo\n    from .demo import main\n"
        "    importlib.import_module('hcp.cli.plan')\n"
    )
    found = {"megatron.core", "hcp", "hcp.demo", "hcp.demo.main", "hcp.cli.plan"}
    assert imports(source, ("hcp",)) == found
