"""Real text in documents of a family's lengths, as JSON lines: write_family.py FAMILY LONGEST."""

import json
import sys
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from common.families import BY_NAME

from hcp.tools.programs.text_data import read_standard_library

DOCUMENTS = {"P2": 1200, "P3": 160}


def main(name: str, longest: int) -> None:
    text = b"\n".join(read_standard_library().texts).decode("latin-1")
    text = "".join(c for c in text if c.isascii())  # so that a character is a token
    random = Random(1)
    written, at = 0, 0
    while written < DOCUMENTS[name]:
        for length in BY_NAME[name].draw(random):
            size = min(length, longest) - 1  # and the end of the document
            if at + size > len(text):
                at = 0
            print(json.dumps({"text": text[at : at + size]}))
            at, written = at + size, written + 1


main(sys.argv[1], int(sys.argv[2]))
