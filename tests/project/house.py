"""Draw the house: which room of hcp uses which, on how many floors, and where arrows form a cycle.

    python tests/project/house.py            # rooms, floor by floor
    python tests/project/house.py --arrows   # also every arrow with the import that makes it
    python tests/project/house.py --root OTHER_TREE

A room is a folder of ``hcp``, or a module that lies in ``hcp`` itself. An arrow is an import from
one room into another, wherever it stands: at the top of a file, inside a function, or for types
only. Exit status 1: there is a cycle.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_KeepLines)
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to look at")
    parser.add_argument("--arrows", action="store_true", help="print every arrow and its imports")
    args = parser.parse_args()
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
