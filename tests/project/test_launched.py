"""What checks say of ranks that do not end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.launched import PATHS, say_where

HANGS = """
import sys, threading
sys.path[:0] = sys.argv[1:]
from support.launched import answer_where

def inside():
    print(flush=True)
    locks[0].acquire()

def outside():
    print(flush=True)
    locks[1].acquire()

locks = threading.Lock(), threading.Lock()
for lock in locks:
    lock.acquire()
answer_where()
threading.Thread(target=inside).start()
outside()
"""


def test_the_stacks_of_a_rank_that_hangs_are_said(tmp_path: Path) -> None:
    said = tmp_path / "said"
    with said.open("a") as log:
        rank = subprocess.Popen(
            [sys.executable, "-c", HANGS, *PATHS], stdout=subprocess.PIPE, stderr=log
        )
    assert rank.stdout is not None
    for _ in range(2):
        rank.stdout.readline()  # a thread is there
    say_where(3, rank, said)
    rank.kill()
    rank.communicate()
    text = said.read_text()
    assert "rank 3 has not ended" in text
    assert " in inside\n" in text
    assert " in outside\n" in text
