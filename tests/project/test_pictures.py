"""The pictures of the documentation are those that their program makes, and pages show them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures"
PICTURES = runpy.run_path(str(FOLDER / "draw.py"))["PICTURES"]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_its_program_makes(name: str) -> None:
    drawn = PICTURES[name]()
    assert ElementTree.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"
    stored = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert stored == drawn, f"{name}.svg is another: run python docs/pictures/draw.py"


def test_pages_show_every_picture() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {
        x for page in pages for x in re.findall(r"pictures/([a-z0-9-]+)\.svg", page.read_text())
    }
    assert shown == PICTURES.keys() == {path.stem for path in FOLDER.glob("*.svg")}
