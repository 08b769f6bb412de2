"""The library's core is a thin skin of Python over native code, which decides and makes tables.

The core is ``hcp/`` without the trainers' integrations, the commands, the demo and the tools. It
has no more lines of Python than ``csrc/`` has of native code. No loop of it goes over the ranks of
a group, and it makes no table of records: each place that does is named below, with its reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {"integrations", "cli", "demo", "tools"}
NATIVE = {".c", ".h", ".cpp", ".cu", ".cuh"}

RANKS = re.compile(r"(?<![a-z])(ranks|degree|size|peers|nodes?)(?![a-z])")
"""Names of numbers of ranks, inside of which words stand apart by an underscore."""

LOOPS = {
    "attention/head_shares.py split": "the heads of each neighbour, as slices of tensors",
    "attention/kernels/shapes.py _with_grad_lse": "columns of a head, no ranks",
    "exchange/gather.py _all_gather": "memory for what torch gathers of each rank",
    "exchange/nccl.py NcclTransport._connect": "memory for what torch gathers of each rank",
    "exchange/torch_p2p.py TorchTransport._all_gather": "memory for what torch gathers",
    "groups/grids.py groups_of_level": "ranks of process groups, which torch takes as lists",
    "planning/plan.py Plan.sample_id_groups": "a list for each rank, which Megatron takes",
}
"""Functions of the core that loop over ranks, and why."""

TABLES = {
    "attention/kernels/flash_attn_4_compiled.py Results.__init__": "sizes of a library's results",
    "exchange/nccl.py NcclTransport._table": "moves without those to itself, for one operator",
}
"""Functions of the core that make a tensor of records, or sum over rows, and why."""


def core() -> list[Path]:
    paths = sorted((ROOT / "hcp").rglob("*.py"))
    return [path for path in paths if path.relative_to(ROOT / "hcp").parts[0] not in OUTSIDE]


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_the_core_has_no_more_python_than_native_lines() -> None:
    native = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in NATIVE]
    python, below = lines(core()), lines(native)
    assert python <= below, f"{python} lines of Python, expected <= {below}, those of csrc"


# ---- loops over ranks, and tables ----------------------------------------------------------------


def within(tree: ast.AST, names: tuple[str, ...] = ()) -> Iterator[tuple[str, ast.AST]]:
    """Each node with the name of the function or class that it stands in."""
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        own = (*names, node.name) if named else names
        yield ".".join(own), node
        yield from within(node, own)


def calls_of(node: ast.AST, name: str) -> Iterator[ast.Call]:
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == name:
            yield call


def loops_over_ranks(source: str) -> set[str]:
    """Functions with a loop over `range` of a number of ranks."""
    found = set()
    for name, node in within(ast.parse(source)):
        if isinstance(node, ast.For | ast.comprehension):
            ranges = (arg for call in calls_of(node.iter, "range") for arg in call.args)
            if any(RANKS.search(ast.unparse(arg)) for arg in ranges):
                found.add(name)
    return found


def makes_records(node: ast.AST) -> bool:
    """Whether it is a tensor of integers in rows: of tuples that a loop makes, or seen as rows."""
    if not isinstance(node, ast.Call):
        return False
    if ast.unparse(node.func) == "torch.tensor":
        made = (n for n in ast.walk(node.args[0]) if isinstance(n, ast.ListComp | ast.GeneratorExp))
        return any(isinstance(each.elt, ast.Tuple | ast.List) for each in made)
    if not isinstance(node.func, ast.Attribute) or node.func.attr != "view":
        return False
    return "torch.tensor" in {
        ast.unparse(call.func) for call in calls_of(node.func, "torch.tensor")
    }


def tables_made(source: str) -> set[str]:
    return {name for name, node in within(ast.parse(source)) if makes_records(node)}


def in_core(search: object) -> set[str]:
    found = set()
    for path in core():
        place = path.relative_to(ROOT / "hcp")
        found |= {f"{place} {name}" for name in search(path.read_text())}  # type: ignore[operator]
    return found


def test_the_core_loops_over_no_ranks_but_where_it_says_why() -> None:
    assert in_core(loops_over_ranks) == set(LOOPS)


def test_the_core_makes_no_tables_but_where_it_says_why() -> None:
    assert in_core(tables_made) == set(TABLES)


def test_a_loop_over_ranks_and_a_table_would_be_found() -> None:
    source = """
class Way:
    def rows(self, ranks):
        return [n for n in range(1, ranks + 1)]
def lone(rows):
    for row in range(rows): pass
    return torch.tensor([(row, 1) for row in rows])
def seen(records):
    return torch.tensor(records, device="cpu").view(-1, 4)
"""
    assert loops_over_ranks(source) == {"Way.rows"}
    assert tables_made(source) == {"lone", "seen"}
