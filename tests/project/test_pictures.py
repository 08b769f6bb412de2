"""The pictures of the documentation are those that their program makes, and pages show them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hcp.cli.simulate import main

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures"
DRAW = runpy.run_path(str(FOLDER / "draw.py"))
PICTURES = DRAW["PICTURES"]


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


def test_the_picture_of_plans_has_the_numbers_that_simulate_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = DRAW["SIMULATED"]
    assert main(options.split()) == 0
    out = capsys.readouterr().out
    printed = re.findall(r"^(static CP|packing only|hcp) .* x (\d\.\d\d) ", out, re.M)
    assert len(printed) == 3
    printed = [row for row in printed if row[0] != "packing only"]
    drawn = (FOLDER / "plan.svg").read_text(encoding="utf-8")
    titles = re.findall(
        r'class="title" text-anchor="start">(?:packed )?(.*?): x (\d\.\d\d), idle', drawn
    )
    assert titles == printed
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"`hcp simulate {options}`" in readme
    assert f'"{out.splitlines()[-1]}"' in readme
    (alt,) = re.findall(r"!\[([^]]*)\]\(docs/pictures/plan\.svg\)", readme)
    assert all(speed in alt for _, speed in printed)


@pytest.mark.parametrize("name", ["plan", "speeds"])
def test_a_phone_can_read_the_pictures_of_the_readme(name: str) -> None:
    """Their smallest letters are 8.5 px high or more where a picture is 358 px wide."""
    drawn = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    width = float(ElementTree.fromstring(drawn).get("viewBox", "").split()[2])
    sizes = dict(re.findall(r"(?:\.(\w+)|text)\{font(?:-size)?:(\d+)px", drawn))
    used = re.findall(r'<text [^>]*class="(\w*)"', drawn)
    smallest = min(int(sizes.get(style, sizes[""])) for style in used)
    assert smallest * 358 / width > 8.5


def test_the_picture_of_speeds_has_the_numbers_of_the_results() -> None:
    page = ROOT / "benchmarks" / "results" / "megatron_h200x2_2026-11-27.md"
    peers = r"^\| Transformer Engine, (?:cuDNN|FlashAttention-4) \| (.*) \|$"
    rows = re.findall(peers, page.read_text(encoding="utf-8"), re.MULTILINE)
    found = [tuple(map(float, row.split(" | "))) for row in rows]
    assert found == list(DRAW["MEASURED"].values())
