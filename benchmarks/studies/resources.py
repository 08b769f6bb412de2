"""Print each CUDA kernel's registers, spills, stack and shared memory.

    python benchmarks/studies/resources.py > benchmarks/results/resources_DATE.md

It compiles every csrc/**/*.cu for every target with the build's flags. It needs nvcc and c++filt,
but no GPU.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(ROOT.glob("csrc/**/*.cu"))
TARGETS = ("80", "90", "100")
COMMAND = "nvcc -std=c++17 -O3 -DNDEBUG -Icsrc/include --resource-usage -cubin"


class Kernel(NamedTuple):
    name: str
    """The mangled name."""
    registers: int
    """Registers per thread."""
    spilled: int
    """Bytes per thread, stored and loaded."""
    stack: int
    """Bytes per thread."""
    shared: int
    """Bytes per block."""


def compiled(source: Path, target: str) -> tuple[list[Kernel], str]:
    """Return the kernels of a file, and nvcc's output. Raises RuntimeError if it fails."""
    done = subprocess.run(
        [*shlex.split(COMMAND), f"-arch=sm_{target}", str(source), "-o", os.devnull],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(done.args)}: exit code {done.returncode}\n{done.stdout}")
    return kernels_of(done.stdout), done.stdout


def kernels_of(said: str) -> list[Kernel]:
    """Read the kernels in the output of ptxas, each with the lines up to the next."""
    _, *parts = re.split(r"Compiling entry function '(\w+)'", said)
    return [_kernel(name, text) for name, text in zip(parts[::2], parts[1::2], strict=True)]


def _kernel(name: str, said: str) -> Kernel:
    def bytes_of(what: str) -> int:
        return sum(map(int, re.findall(rf"(\d+) bytes {what}", said)))

    (registers,) = re.findall(r"Used (\d+) registers", said)
    spilled = bytes_of("spill stores") + bytes_of("spill loads")
    return Kernel(name, int(registers), spilled, bytes_of("stack frame"), bytes_of("smem"))


# ---- The report ----------------------------------------------------------------------------------


def families(names: Sequence[str]) -> list[str]:
    """Return the names of kernels without types and numbers. name<true> and name<false> differ."""
    done = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    )
    return [family(line) for line in done.stdout.splitlines()]


def family(demangled: str) -> str:
    ((name, flag),) = re.findall(r"^(?:void )?(\w+)(?:.*, (true|false)>\()?", demangled)
    return f"{name}<{flag}>" if flag else name


def span(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return str(least) if least == most else f"{least} to {most}"


def table(found: Sequence[tuple[str, str, Kernel]]) -> list[str]:
    """Return the rows of the table, one for each (file, target, kernel)."""
    names = families([kernel.name for _, _, kernel in found])
    kernels: dict[tuple[str, str], dict[str, list[Kernel]]] = {}
    for name, (file, target, kernel) in zip(names, found, strict=True):
        kernels.setdefault((file, name), {}).setdefault(target, []).append(kernel)
    registers = [f"registers, sm_{target}" for target in TARGETS]
    titles = ["kernel", "file", "variants", *registers, "spilled", "stack", "shared"]
    lines = [titles, ["---"] * len(titles)]
    for (file, name), by_target in sorted(kernels.items()):
        all_of = [kernel for own in by_target.values() for kernel in own]
        lines.append(
            [
                f"`{name}`",
                f"`{file}`",
                str(len(all_of) // len(by_target)),
                *(span([kernel.registers for kernel in by_target[t]]) for t in TARGETS),
                str(max(kernel.spilled for kernel in all_of)),
                str(max(kernel.stack for kernel in all_of)),
                str(max(kernel.shared for kernel in all_of)),
            ]
        )
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def main() -> None:
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True)
    pairs = list(product(SOURCES, TARGETS))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda pair: compiled(*pair)[0], pairs))
    found = [
        (source.name, target, kernel)
        for (source, target), kernels in zip(pairs, results, strict=True)
        for kernel in kernels
    ]
    spilling = sum(kernel.spilled > 0 for _, _, kernel in found)
    print(f"""# What the CUDA kernels take

{datetime.now(UTC):%Y-%m-%d}, nvcc {version.stdout.splitlines()[-2].split("release ")[1]}.

    python benchmarks/studies/resources.py

runs `{COMMAND}`
on each file for each target, and reads what ptxas says. Variants differ in types and in elements of
a vector: least to most. Registers, and bytes spilled and on the stack, are of a thread, bytes of
shared memory of a block: the most of all targets.

Of {len(found)} kernels {spilling or "none"} spilled.
""")
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
