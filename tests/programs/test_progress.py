"""Progress bars of programs: they tell the time that is left, on the first rank only."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest

from hcp.cli import simulate
from hcp.tools.programs import progress as module
from hcp.tools.programs.progress import progress, progress_over

pytest.importorskip("tqdm", reason="pip install '.[demo]'")

Capture = pytest.CaptureFixture[str]


def test_a_bar_tells_what_is_done_and_the_time_that_is_left(capsys: Capture) -> None:
    with progress(4, "training", "step") as bar:
        bar.update()
        bar.refresh()
        shown = capsys.readouterr().err
    assert re.search(r"training: +25%.*1/4 \[\d\d:\d\d<\d\d:\d\d, ", shown), shown


def test_other_ranks_show_nothing_and_print_their_lines(capsys: Capture) -> None:
    with progress(4, "training", shown=False) as bar:
        bar.update()
        bar.write("a line")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("a line\n", "")


def test_without_tqdm_nothing_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert list(progress_over([1, 2, 3], "planning")) == [1, 2, 3]
    assert capsys.readouterr().err == ""


def test_what_is_done_at_once_shows_no_bar(capsys: Capture) -> None:
    assert list(progress_over("abc", "planning")) == ["a", "b", "c"]
    assert capsys.readouterr().err == ""


def test_simulate_tells_how_far_planning_and_replaying_are(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    seen: list[tuple[int, str, str]] = []

    def watched(items: Any, what: str, unit: str) -> Any:
        seen.append((len(items), what, unit))
        return module.progress_over(items, what, unit)

    monkeypatch.setattr(simulate, "progress_over", watched)
    argv = "--family mock --sequences 8 --batches 3 --ranks 4 --max-tokens-per-rank 8192"
    assert simulate.main([*argv.split(), "--host-ms", "1"]) == 0
    first = [(3, "planning", "batch"), (3, "proving", "batch")]
    assert seen == [*first, *[(3, "replaying", "batch")] * 3]
    assert "SIMULATED" in capsys.readouterr().out
