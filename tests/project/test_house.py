"""The number of files that a reader of one layer opens."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from house import ROOT, arrows_of, cycles_of, files_of_a_layer, uses_of


def test_no_folders_use_each_other_in_a_circle() -> None:
    rooms, arrows = arrows_of(ROOT)
    assert cycles_of(rooms, uses_of(arrows)) == []


def test_a_circle_over_three_rooms_would_be_found() -> None:
    uses = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert cycles_of("abcd", uses) == [["a", "b", "c"]]


@pytest.mark.parametrize(
    ("rotates", "most"), [(False, 7), (True, 8)], ids=["plain", "with a rotary embedding"]
)
def test_a_warm_layer_runs_through_few_files(rotates: bool, most: int) -> None:
    """A causal layer on the CPU, forward and backward, of two gloo ranks under "p2p".

    The names for profilers are not counted: a reader of the layer can pass over them.
    """
    files = set(files_of_a_layer(rotates=rotates)) - {"hcp/_ranges.py"}
    assert "hcp/attention/layer.py" in files
    assert len(files) <= most, sorted(files)
