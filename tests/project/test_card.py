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
