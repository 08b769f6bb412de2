"""The examples that need no trainer's package. Those of trainers are tested with their trainer."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.examples import EXAMPLES, example
from support.ranks import run_alone, run_ranks

# ---- training on ranks ----


def train(rank: int, size: int, name: str) -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        return example(name).train(steps=3)
    finally:
        torch.set_default_dtype(torch.float32)


def by_ranks(name: str) -> tuple[Any, list[Any]]:
    (alone,) = run_ranks(1, train, name)
    return alone, run_ranks(2, train, name)  # degrees 1 and 2


def test_plain_pytorch_has_the_losses_of_one_rank_in_both_layouts() -> None:
    (losses, evaluations), together = by_ranks("plain")
    assert losses[2] < losses[0]
    assert evaluations[0] == pytest.approx(evaluations[1], abs=1e-10)
    for found, evaluated in together:
        assert found == pytest.approx(losses, abs=1e-10)
        assert evaluated == pytest.approx(evaluations, abs=1e-10)


def test_fsdp2_has_the_losses_of_one_rank() -> None:
    losses, together = by_ranks("fsdp2")
    assert losses[2] < losses[0]
    for found in together:
        assert found == pytest.approx(losses, abs=1e-10)


def run_short(name: str) -> None:
    module = example(name)
    module.train = functools.partial(module.train, steps=1)
    module.main()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "fsdp2"])
def test_an_example_runs_without_a_launcher(name: str, tmp_path: Path) -> None:
    done = run_alone(run_short, name, folder=tmp_path)
    assert done.code == 0, done.err
    assert "step   0  loss " in done.out


# ---- two nodes ----


def test_the_job_of_two_nodes_is_a_shell_script_whose_flags_exist() -> None:
    from torch.distributed.run import get_args_parser

    from hcp.demo.demo_arguments import parse_args

    script = EXAMPLES / "two_nodes.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text().replace("\\\n", " ")
    directives = re.findall(r"^#SBATCH --([a-z-]+)=\S+$", text, re.MULTILINE)
    assert len(directives) == text.count("\n#SBATCH")
    (line,) = re.findall(r"^srun torchrun (.*)$", text, re.MULTILINE)
    values = {"SLURM_NNODES": "2", "GPUS": "8", "FIRST_NODE": "node-1", "SLURM_JOB_ID": "7"}
    words = re.sub(r'"?\$(\w+)(:\d+)?"?', lambda m: values[m[1]] + (m[2] or ""), line).split()
    launcher = get_args_parser().parse_args(words)
    assert (launcher.nnodes, launcher.nproc_per_node) == ("2", "8")
    assert launcher.rdzv_endpoint == "node-1:29500"
    assert [launcher.module, launcher.training_script] == [True, "hcp"]
    command, *flags = launcher.training_script_args
    assert command == "demo"
    with mock.patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "16"}):
        args = parse_args(flags)
    assert (args.ranks, args.config.ranks_per_node) == (16, 8)


# ---- the notebook ----

NOTEBOOK = EXAMPLES / "what_would_it_bring.ipynb"
AGAIN = "run `jupyter execute --inplace examples/what_would_it_bring.ipynb`"


def code_cells() -> list[dict[str, Any]]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def sources() -> list[str]:
    return ["".join(cell["source"]) for cell in code_cells()]


def execute(path: str) -> None:
    if importlib.util.find_spec("nbclient") is not None:
        import nbformat
        from nbclient import NotebookClient

        NotebookClient(nbformat.read(path, as_version=4), timeout=200).execute()
        return
    namespace: dict[str, Any] = {}
    for source in sources():
        exec(source, namespace)
    check(namespace)


def check(namespace: dict[str, Any]) -> None:
    plans = namespace["plans"]
    assert plans["hcp"].makespan < plans["static CP"].makespan
    assert len({g.degree for batch in plans["hcp"].micro_batches for g in batch}) > 1
    assert len({g.degree for batch in plans["static CP"].micro_batches for g in batch}) == 1
    static, dynamic = namespace["static"], namespace["dynamic"]
    assert static == pytest.approx(dynamic, abs=1e-5)
    assert dynamic[-1] < dynamic[0]


@pytest.mark.slow
def test_the_notebook_runs_and_its_plans_give_one_loss(tmp_path: Path) -> None:
    done = run_alone(execute, str(NOTEBOOK), folder=tmp_path)
    assert done.code == 0, done.err


def test_the_notebook_is_kept_with_the_outputs_of_one_run() -> None:
    """They come from cells that ran once, in order, without an error, and name no machine."""
    cells = code_cells()
    counts = [cell["execution_count"] for cell in cells]
    assert counts == [*range(1, len(cells) + 1)], AGAIN
    kinds = [output["output_type"] for cell in cells for output in cell["outputs"]]
    assert kinds == ["stream", "stream", "execute_result", "stream"], AGAIN
    assert NOTEBOOK.stat().st_size < 400_000
    text = NOTEBOOK.read_text(encoding="utf-8")
    homes = [str(Path.home()), "/home/", "/root/", "/tmp/", "/Users/", "site-packages", "Traceback"]
    assert [name for name in homes if name in text] == []


def test_the_outputs_of_the_notebook_are_those_of_its_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What the planner prints and draws is the same on every machine. Losses are not compared."""
    lengths, plans, picture, _ = code_cells()
    namespace: dict[str, Any] = {}
    for cell in (lengths, plans):
        exec("".join(cell["source"]), namespace)
        (output,) = cell["outputs"]
        assert "".join(output["text"]) == capsys.readouterr().out, AGAIN
    said = "".join(plans["outputs"][0]["text"])
    assert "over packed static CP (next-fit)" in said
    assert said.splitlines()[-1] == namespace["simulated"].verdict
    shown = eval("".join(picture["source"]), namespace)
    assert "".join(picture["outputs"][0]["data"]["image/svg+xml"]) == shown._repr_svg_(), AGAIN


def test_the_notebook_draws_the_picture_of_the_readme() -> None:
    (output,) = code_cells()[2]["outputs"]
    drawn = (EXAMPLES.parent / "docs" / "pictures" / "plan.svg").read_text(encoding="utf-8")
    assert "".join(output["data"]["image/svg+xml"]) == drawn


# ---- the list ----


ROWS = re.findall(
    r"^\| \[`([\w.]+)`\]\(\1\) \| .+? \| `([^`]+)`.*? \| .+? \| .+? \|$",
    (EXAMPLES / "README.md").read_text(),
    re.MULTILINE,
)
"""File and command."""


def test_every_example_has_a_line_in_the_list() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}
    assert sorted(file for file, _ in ROWS) == sorted(files)


@pytest.mark.parametrize("file", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_a_header_of_one_screen_begins_with_the_command_of_the_list(file: str) -> None:
    header = ast.get_docstring(ast.parse((EXAMPLES / file).read_text()))
    assert header is not None
    lines = header.splitlines()
    assert lines[0].endswith(".")
    assert lines[2].strip().partition("  ")[0] == dict(ROWS)[file]
    assert len(lines) <= 24, file
