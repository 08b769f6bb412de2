"""docs/card.yaml says what the project's other files say."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

import hcp

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
CARD: dict[str, Any] = yaml.safe_load((ROOT / "docs" / "card.yaml").read_text())
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_versions_are_those_of_the_project() -> None:
    assert CARD["version"] == hcp.__version__
    assert CARD["distribution"] == PROJECT["name"]
    assert CARD["license"] == PROJECT["license"]
    assert CARD["requires"]["python"] == PROJECT["requires-python"]
    assert f"torch{CARD['requires']['torch']}" in PROJECT["dependencies"]


def test_trainers_have_their_guides_and_versions() -> None:
    extras = PROJECT["optional-dependencies"]
    for trainer in CARD["trainers"]:
        assert (ROOT / trainer["guide"]).exists()
        extra = trainer["name"].lower()
        if extra in extras:
            assert f"{extra}{trainer['versions']}" in extras[extra]
    guides = {path.stem for path in (ROOT / "docs" / "guides").glob("*.md")}
    named = {Path(trainer["guide"]).stem for trainer in CARD["trainers"]}
    assert set(extras) & guides - {"demo"} <= named


def test_what_is_said_to_be_tested_stands_on_a_page_of_results() -> None:
    """In a row of the matrix, or as `torch 2.11.0` and `Python 3.12.3` of a measurement."""
    tested = CARD["tested"]
    pages = [(ROOT / page).read_text() for page in tested["pages"]]
    rows = re.findall(r"(?m)^\| (\d+\.\d+)\.\S* \| (\d+\.\d+)\.\d+ \| ([^|]*passed)?", pages[0])
    assert rows
    assert [row for row in rows if not row[2]] == []
    text = "\n".join(pages)
    assert [gpu for gpu in tested["gpus"] if gpu not in text] == []
    for package, place in (("torch", 0), ("python", 1)):
        shown = {row[place] for row in rows}
        shown |= set(re.findall(rf"(?i)\b{package} (\d+\.\d+)\.\d+", text))
        assert shown == set(tested[package]), package


def test_the_matrix_takes_what_is_tested() -> None:
    makefile = (ROOT / "Makefile").read_text()
    torches = re.search(r"(?m)^TORCHES \?= (.*)$", makefile)
    newest = re.search(r"(?m)^TORCH +\?= torch==(.*)$", makefile)
    assert torches
    assert newest
    versions = torches[1].split()
    assert {version.rpartition(".")[0] for version in versions} >= {*CARD["tested"]["torch"]}
    assert newest[1] in versions
    for name in ("ci", "release"):
        jobs = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())["jobs"]
        steps = jobs["wheel"]["steps"]
        (pythons,) = (
            step["with"]["python-version"].split() for step in steps if "setup-python" in str(step)
        )
        assert {*pythons} >= {*CARD["tested"]["python"]}
        assert "make test-matrix" in [step.get("run") for step in steps]


@pytest.mark.parametrize("entry", CARD["measured"], ids=lambda entry: entry["page"])
def test_a_measurement_has_a_page_a_program_and_its_date(entry: dict[str, Any]) -> None:
    page = ROOT / entry["page"]
    assert str(entry["date"]) in page.name
    text = " ".join(page.read_text().split())
    (program,) = (word for word in shlex.split(entry["command"]) if word.endswith(".py"))
    assert (ROOT / program).exists()
    assert entry["command"] in text
    for version in entry["versions"].values():
        assert str(version) in text
    for number in entry["result"]:
        assert re.search(rf"\b{number:.2f}", text), number
