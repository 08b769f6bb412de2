"""The example of real text: the model of `from-config`, trained on files of Python's library."""

from __future__ import annotations

import contextlib
import io
import math
import re
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.examples import example
from support.ranks import run_alone, run_ranks

import hcp

pytest.importorskip("transformers", reason="pip install '.[transformers]'")

SOURCES = (
    *("this.py", "keyword.py", "bisect.py", "heapq.py", "colorsys.py", "token.py", "stat.py"),
    *("struct.py", "types.py", "copy.py", "queue.py", "csv.py", "abc.py", "sched.py"),
)
SMALL = ["--model", "from-config", "--steps", "2", "--documents", "5", "--held-out", "4"]
LINE = re.compile(
    r"step +\d+  loss \d\.\d{6} \| +[\d,]+ tokens/s \| ([\d,]+) to ([\d,]+) tokens \| "
    r"((?:\d+ at CP \d(?:, )?)+) \| x \d\.\d\d over packed static CP (\d) \(simulated\)"
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Sources of the standard library, of very different lengths."""
    folder = tmp_path / "text"
    folder.mkdir()
    for name in SOURCES:
        shutil.copy(Path(sysconfig.get_path("stdlib")) / name, folder)
    return folder


def options(text: Path, folder: Path, *more: str) -> list[str]:
    return [*SMALL, "--text", str(text), "--save", str(folder), "--max-length", "600", *more]


def train(rank: int, size: int, argv: list[str]) -> tuple[list[float], list[float], str]:
    torch.set_default_dtype(torch.float64)
    printed = io.StringIO()
    try:
        module = example("sft_text")
        with contextlib.redirect_stdout(printed):
            losses, perplexities = module.train(module.parse_args(argv))
    finally:
        torch.set_default_dtype(torch.float32)
    return losses, perplexities, printed.getvalue()


def perplexity_of_transformers(folder: Path, argv: list[str]) -> float:
    """Of the held-out documents one after the other, by Transformers alone."""
    import transformers

    module = example("sft_text")
    args = module.parse_args(argv)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    total, count = 0.0, 0
    for document in module.read(module.files(args)[: args.held_out], tokenizer, args.max_length):
        tokens = torch.tensor([document["input_ids"]])
        with torch.no_grad():
            logits = model(tokens).logits[0, :-1]  # the model's own loss is of float32
        total += float(F.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
        count += len(logits)
    return math.exp(total / count)


def test_two_ranks_have_the_losses_of_one_and_transformers_loads_what_they_save(
    text: Path, tmp_path: Path
) -> None:
    argv = options(text, tmp_path / "alone", "--lr", "2e-3")
    ((losses, perplexities, _),) = run_ranks(1, train, argv, timeout=280)
    assert perplexities[1] < perplexities[0]
    argv = options(text, tmp_path / "saved", "--lr", "2e-3")
    first, second = run_ranks(2, train, argv, timeout=280)
    for found, evaluated, _ in (first, second):
        assert found == pytest.approx(losses, abs=1e-10)
        assert evaluated == pytest.approx(perplexities, rel=1e-10)
    loaded = perplexity_of_transformers(tmp_path / "saved", argv)
    assert loaded == pytest.approx(perplexities[1], rel=1e-10)
    lines = LINE.findall(first[2])
    assert len(lines) == 2, first[2]
    assert second[2] == ""
    assert all(int(least) < int(most) == 600 for least, most, _, _ in lines)
    assert "at CP 2" in lines[0][2] + lines[1][2]
    assert {static for *_, static in lines} == {"2"}


def test_the_speed_over_packed_static_cp_is_that_of_next_fit_at_one_degree() -> None:
    """Rows on each of two ranks are 5, 5, 4, 4, of which a rank holds 9: next-fit makes three packs
    in this order, hcp two."""
    plan = hcp.plan([10, 10, 8, 8], ranks=2, max_tokens_per_rank=9)
    packs = ([10], [10, 8], [8])
    static = sum(sum(plan.cost.time(n, 2) for n in pack) + plan.cost.launch for pack in packs)
    assert static > plan.makespan
    found = example("sft_text").over_packed_static(plan, 2)
    assert found == pytest.approx(static / plan.makespan)


def run_main(argv: list[str]) -> None:
    sys.argv = ["sft_text.py", *argv]
    example("sft_text").main()


def test_it_runs_without_a_launcher(text: Path, tmp_path: Path) -> None:
    argv = options(text, tmp_path / "saved", "--steps", "1", "--max-length", "100")
    done = run_alone(run_main, argv, folder=tmp_path)
    assert done.code == 0, done.err
    assert "step   0  loss " in done.out
    assert (tmp_path / "saved" / "model.safetensors").exists()


def test_a_model_that_cannot_be_loaded_ends_the_run_loudly(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"NOTHING WAS TRAINED: --model .*--model from-config"):
        example("sft_text").load(str(tmp_path))


def test_too_few_files_end_the_run(text: Path, tmp_path: Path) -> None:
    module: Any = example("sft_text")
    with pytest.raises(SystemExit, match=r"has 14 files of .*, expected 44 = held-out \(4\)"):
        module.files(module.parse_args(options(text, tmp_path, "--steps", "8")))
