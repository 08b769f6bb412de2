"""What `make test` leaves out, CI runs: no case of the core is in neither part, or in both."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.parts import SHARE, part_of_each

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "tests/planning/test_mask.py",  # many cases
    "tests/programs/test_demo.py",  # slow tests
    "tests/attention/test_nodes.py",  # a slow test with cases
)


COLLECT = """
import sys, pytest
for given in ("whole", "drawn", "rest", "drawn -k window"):
    print("Collected with --part", given)
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "--day", "2026-01-01", "--part"]
    pytest.main([*options, *given.split(), *sys.argv[1:]])
"""


def collected() -> list[list[str]]:
    """The tests of each collection. One process makes all, because torch takes long to import."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, *FILES],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )
    of_each = done.stdout.split("Collected with --part ")[1:]
    return [[line for line in said.splitlines() if "::" in line] for said in of_each]


def test_the_parts_are_all_tests_and_share_none() -> None:
    whole, drawn, rest, chosen = collected()
    assert sorted(drawn + rest) == sorted(whole)
    assert len(set(whole)) == len(whole)
    assert drawn
    slow = "tests/programs/test_demo.py::test_torchrun_starts_it_too"
    assert [line for line in rest if line.startswith(slow)]
    # A choice among the tests draws the same cases of those that are left.
    assert chosen == [line for line in drawn if line in chosen]
    assert chosen


class Item:
    def __init__(self, nodeid: str, *marks: str) -> None:
        self.nodeid, self.marks = nodeid, marks

    def get_closest_marker(self, name: str) -> Any:
        return name if name in self.marks else None


def parts(items: list[Item], day: str = "2026-01-01") -> dict[str, str]:
    return {item.nodeid: part for item, part in part_of_each(items, day).items()}  # type: ignore


def test_one_case_in_so_many_is_drawn_and_at_least_one() -> None:
    items = [Item(f"a.py::f[{i}-[x]]") for i in range(2 * SHARE + 1)]
    items += [Item("a.py::g"), Item("b.py::f[0]"), Item("b.py::f[1]")]
    drawn = [name for name, part in parts(items).items() if part == "drawn"]
    assert [
        sum(name.startswith(f) for name in drawn) for f in ("a.py::f", "a.py::g", "b.py::f")
    ] == [*(3, 1, 1)]


def test_each_day_draws_others_whatever_the_order_of_tests() -> None:
    items = [Item(f"a.py::f[{i}]") for i in range(10 * SHARE)]
    assert parts(items) == parts(items[::-1])
    assert parts(items) != parts(items, "2026-01-02")


def test_slow_tests_are_never_drawn() -> None:
    items = [Item("a.py::f", "slow"), Item("a.py::g[0]", "slow"), Item("a.py::g[1]")]
    for day in ("2026-01-01", "2026-01-02", "2026-01-03"):
        assert parts(items, day) == dict.fromkeys(("a.py::f", "a.py::g[0]"), "rest") | {
            "a.py::g[1]": "drawn"
        }


def test_ci_runs_both_parts_of_one_day_and_every_folder() -> None:
    makefile, ci = ((ROOT / name).read_text() for name in ("Makefile", ".ci/run"))
    assert "$(CORE) --part drawn" in makefile
    assert "$(CORE) --part rest" in makefile
    for target in ("test", "test-rest"):
        assert re.search(rf'^part .* make {target} ARGS="\$day"$', ci, re.MULTILINE), target
    core = re.search(r"^CORE = \$\(addprefix tests/,((?:.*\\\n)*.*)\)$", makefile, re.MULTILINE)
    assert core
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert folders == {
        *core[1].replace("\\\n", " ").replace("/test_c.py", "").split(),
        *("integrations", "cuda"),
    }
