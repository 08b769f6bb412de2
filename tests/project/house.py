"""Print which folder of hcp imports which, on how many floors, and where imports form a cycle.

    python tests/project/house.py --files exchange   # what each file of hcp/exchange is for
    python tests/project/house.py            # rooms, floor by floor
    python tests/project/house.py --arrows   # also every arrow with the import that makes it
    python tests/project/house.py --root OTHER_TREE
    python tests/project/house.py --layer    # the files that one attention layer runs through

A room is a folder of ``hcp``, or a module that lies in ``hcp`` itself. An arrow is an import from
one room into another, wherever it stands: at the top of a file, inside a function, or for types
only. Exit status 1: there is a cycle.
"""

from __future__ import annotations

import argparse
import ast
import multiprocessing
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]

Arrows = dict[tuple[str, str], list[str]]
"""(room, room it uses) -> the imports, as "file:line module"."""


def modules_of(root: Path) -> dict[str, Path]:
    """Dotted names of hcp's modules with their files."""
    found = {}
    for path in sorted((root / "hcp").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(path: Path, modules: Iterable[str]) -> Iterator[tuple[int, str]]:
    """(line, module) of each import of a module of hcp."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in dotted]
        else:
            continue
        for name in names:
            if name == "hcp" or name.startswith("hcp."):
                yield node.lineno, name


def room_of(module: str, path: Path, root: Path) -> str:
    """The folder below hcp that a module lies in; its own name where it lies in hcp itself."""
    folder = path.relative_to(root / "hcp").parent.parts
    return folder[0] if folder else module.removeprefix("hcp.")


def arrows_of(root: Path) -> tuple[set[str], Arrows]:
    """Rooms and arrows. ``hcp`` itself, which names everything, is the roof and no room; a room
    that imports it uses everything, which the callers of hcp may do."""
    modules = modules_of(root)
    rooms = {name: room_of(name, path, root) for name, path in modules.items() if name != "hcp"}
    arrows: Arrows = defaultdict(list)
    for name, path in modules.items():
        if name == "hcp":
            continue
        for line, used in imports_of(path, modules):
            room = rooms.get(used, "hcp" if used == "hcp" else used.removeprefix("hcp."))
            if room != rooms[name]:
                arrows[rooms[name], room].append(f"{path.relative_to(root)}:{line} {used}")
    return set(rooms.values()), dict(arrows)


def cycles_of(rooms: Iterable[str], uses: Mapping[str, set[str]]) -> list[list[str]]:
    """Rooms that reach each other, in groups of two or more."""
    reached = {room: _reached(room, uses) for room in rooms}
    groups = {
        tuple(sorted({room, *(r for r in reached[room] if room in reached.get(r, ()))}))
        for room in reached
    }
    return sorted(list(group) for group in groups if len(group) > 1)


def _reached(room: str, uses: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    todo = [room]
    while todo:
        for used in uses.get(todo.pop(), set()) - found:
            found.add(used)
            todo.append(used)
    return found


def floors_of(rooms: set[str], uses: Mapping[str, set[str]]) -> list[list[str]]:
    """Rooms from the ground up: each above all that it uses. Rooms of a cycle share a floor."""
    alone = {room: frozenset({room}) for room in rooms}
    for group in cycles_of(rooms, uses):
        alone.update(dict.fromkeys(group, frozenset(group)))
    heights: dict[frozenset[str], int] = {}

    def height(group: frozenset[str]) -> int:
        if group not in heights:
            below = {alone[u] for room in group for u in uses.get(room, ()) if u in alone} - {group}
            heights[group] = 1 + max(map(height, below), default=0)
        return heights[group]

    floors: dict[int, list[str]] = defaultdict(list)
    for room in sorted(rooms):
        floors[height(alone[room])].append(room)
    return [floors[number] for number in sorted(floors)]


def uses_of(arrows: Arrows) -> dict[str, set[str]]:
    uses: dict[str, set[str]] = defaultdict(set)
    for room, used in arrows:
        uses[room].add(used)
    return uses


# ---- what a file is for --------------------------------------------------------------------------

SOURCES = (".py", ".pyi", ".c", ".h", ".cpp", ".cu", ".cuh")
_OPENING = re.compile(
    r'\A(?:"""|/\*|//)(.*?)(?:\n *(?:\*|//)? *\n|"""|\*/|\n(?! \*|//|\w))', re.DOTALL
)


def first_lines(root: Path, named: str = "") -> list[tuple[Path, str]]:
    """(file below root, the sentence by which it opens, "" where it has none) of the sources of hcp
    and csrc, of folders and files alone that have `named` in their path."""
    files = [path for top in ("csrc", "hcp") for path in (root / top).rglob("*")]
    sources = sorted(path.relative_to(root) for path in files if path.suffix in SOURCES)
    return [(path, _opening(root / path)) for path in sources if named in str(path)]


def _opening(path: Path) -> str:
    found = _OPENING.match(path.read_text())
    words = re.sub(r"\s*\n(?: \*|//)?\s*", " ", found[1]).strip() if found else ""
    sentence = re.split(r"\.(?:\s|$)", words.removeprefix(f"{path.name} - "), maxsplit=1)[0]
    return sentence[:1].upper() + sentence[1:]


# ---- one layer -----------------------------------------------------------------------------------


def files_of_a_layer(*, rotates: bool = False, root: Path = ROOT) -> set[str]:
    """Files of hcp in which one attention layer executes Python code, forward and backward.

    The layer is warm: calls like it were made before. It is a causal ``cp.attention`` over float32
    rows on the CPU, of one sequence on two processes that exchange keys under "p2p" by
    torch.distributed's gloo. ``rotates``: with a rotary embedding, made once for all layers.
    """
    sys.path.insert(0, str(root))
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool,
        ):
            ranks = [pool.submit(_run_layer, rank, folder, rotates) for rank in range(2)]
            return {str(Path(file).relative_to(root)) for r in ranks for file in r.result()}
    finally:
        sys.path.remove(str(root))


def _run_layer(rank: int, folder: str, rotates: bool) -> set[str]:
    """One rank's part: the files that it runs through, all those of hcp."""
    import torch
    import torch.distributed as dist

    import hcp

    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    groups = hcp.build_process_groups(tp=1, cp=1, dp=2, pp=1)
    plan = hcp.plan([64], ranks=2, max_tokens_per_rank=32, min_degree=2)
    samples = [{"tokens": torch.arange(64)}] if rank == 0 else []
    ((cp, _),) = hcp.dispatch(plan, samples, [0], groups)
    rotary = cp.rotary(torch.randn(64, 8)) if rotates else None
    rows = [torch.randn(cp.rows, 2, 8, requires_grad=True) for _ in range(3)]
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    def layer() -> None:
        out = cp.attention(*rows, rotary_pos_emb=rotary)
        out.backward(torch.ones_like(out))

    layer()
    sys.setprofile(note)
    layer()
    sys.setprofile(None)
    dist.barrier()
    dist.destroy_process_group()
    return {file for file in files if file.startswith(str(Path(hcp.__file__).parent))}


# ---- the command ---------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_KeepLines)
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to look at")
    parser.add_argument("--arrows", action="store_true", help="print every arrow and its imports")
    parser.add_argument(
        "--files", nargs="?", const="", metavar="NAME", help="what each file is for, of one folder"
    )
    parser.add_argument("--layer", action="store_true", help="run one layer and print its files")
    args = parser.parse_args()
    if args.files is not None:
        for path, line in first_lines(args.root.resolve(), args.files):
            print(f"{path!s:58} {line}")
        return 0
    if args.layer:
        for rotates in (False, True):
            files = files_of_a_layer(rotates=rotates, root=args.root.resolve())
            print(f"{len(files)} files, with{'' if rotates else 'out'} rotary embedding:")
            print("".join(f"    {file}\n" for file in sorted(files)), end="")
        return 0
    rooms, arrows = arrows_of(args.root.resolve())
    uses = uses_of(arrows)
    cycles, floors = cycles_of(rooms, uses), floors_of(rooms, uses)
    for number, floor in reversed(list(enumerate(floors, 1))):
        print(f"{number:2}  {'  '.join(floor)}")
    if args.arrows:
        for (room, used), places in sorted(arrows.items()):
            print(f"{room} -> {used}")
            print("".join(f"    {place}\n" for place in places), end="")
    for group in cycles:
        print(f"cycle: {' <-> '.join(group)}")
    print(
        f"{len(rooms)} rooms, {len(arrows)} arrows, {len(cycles)} cycles, {len(floors)} floors, "
        f"{len(modules_of(args.root.resolve()))} files"
    )
    return bool(cycles)


class _KeepLines(argparse.RawDescriptionHelpFormatter):
    """Print the usage lines above as they stand."""


if __name__ == "__main__":
    sys.exit(main())
