"""Settings of all tests: one thread, a compile cache of their own, and repeatable random inputs."""

from __future__ import annotations

import atexit
import faulthandler
import hashlib
import os
import shutil
import tempfile
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from hypothesis import settings
from support.parts import PARTS, part_of_each

# Tests run side by side and start ranks of their own: one thread each keeps them apart, and sums
# have one order.
torch.set_num_threads(1)

# Inductor's cache is a folder of this process. It knows neither the shapes nor the schemas of
# operators: graphs that another hcp compiled would be taken for this one's. Without workers, no
# thread of theirs is there to be forked.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="hcp-inductor-")
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

# A failure prints the line that repeats it. With CI set, every run draws the same inputs.
settings.register_profile("here", deadline=None, print_blob=True)
settings.register_profile("ci", settings.get_profile("here"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        choices=PARTS,
        default="whole",
        help="which tests: all; those that the day draws, without the slow ones; or the rest of "
        "them",
    )
    today = datetime.now(UTC).date().isoformat()
    parser.addoption("--day", default=today, help="draws the part; by default today, in UTC")


# Warnings are errors in tests of hcp alone. Trainers warn as they like, in their own tests and
# where the core's tests import them. Files that are closed late and modules without a spec are
# what Python itself says nothing about.
STRICT = pytest.mark.filterwarnings(
    "error",
    "ignore::ResourceWarning",
    "ignore::ImportWarning",
    # Modules of torch's own that the first compiled function imports.
    "ignore:.torch.jit.script:DeprecationWarning",
    # Once in a process, of rows of torch.complex32.
    "ignore:ComplexHalf support is experimental:UserWarning",
    # Python 3.12 and later, of every fork: test_forked.py is about them.
    "default:This process .* is multi-threaded:DeprecationWarning",
    "default:::(accelerate|lightning|megatron|transformers)",
)
OF_TRAINERS = ("integrations", "project", "cuda")


# First, because what -k leaves of a test does not change which of its cases are drawn.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name not in OF_TRAINERS:
            item.add_marker(STRICT, append=False)  # a test's own filters come later
    if config.getoption("--part") != "whole":
        _leave_out_the_other_part(config, items)


def _leave_out_the_other_part(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted, parts = config.getoption("--part"), part_of_each(items, config.getoption("--day"))
    config.hook.pytest_deselected(items=[item for item in items if parts[item] != wanted])
    items[:] = [item for item in items if parts[item] == wanted]


def pytest_report_header(config: pytest.Config) -> str | None:
    part, day = config.getoption("--part"), config.getoption("--day")
    return None if part == "whole" else f"--part {part} --day {day}"


# A test that runs too long ends its worker, and xdist gives it to the next one. Each worker notes
# the test that it runs; the next one fails it at once, with the stacks of the one that it ended.

ENDED = pytest.StashKey[str]()
_notes: dict[pytest.Item, IO[str]] = {}


def _note_of(item: pytest.Item) -> Path | None:
    """Where a worker notes that it runs a test. None: there are no workers."""
    run = getattr(item.config, "workerinput", {}).get("testrunuid")
    name = hashlib.sha256(f"{run} {item.nodeid}".encode()).hexdigest()
    return Path(tempfile.gettempdir(), f"hcp-test-{name}") if run else None


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    note = _note_of(item)
    if note is None:
        return
    if note.exists():
        item.stash[ENDED] = note.read_text()
    _notes[item] = note.open("w")
    faulthandler.dump_traceback_later(0.98 * settings.timeout, file=_notes[item])


def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    if item in _notes:
        faulthandler.cancel_dump_traceback_later()
        note = _notes.pop(item)
        note.close()
        Path(note.name).unlink()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if ENDED in item.stash:
        pytest.fail(f"it ended a worker of this run:\n{item.stash[ENDED]}", pytrace=False)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the "ratios" of tests: the largest of each test, and with -v of each case."""
    largest: dict[str, dict[str, float]] = defaultdict(dict)
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, ratios in report.user_properties:
                if name != "ratios":
                    continue
                tests = [report.location[2].partition("[")[0]]
                for test in tests + [report.location[2]] * (config.option.verbose > 0):
                    for key, ratio in ratios.items():
                        largest[test][key] = max(ratio, largest[test].get(key, 0))
    for test, ratios in largest.items():
        text = " ".join(f"{key} {ratio:.2f}" for key, ratio in ratios.items())
        terminalreporter.write_line(f"ratio {text}  {test}")
