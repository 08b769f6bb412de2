"""Programs that start their own ranks print an error once, under the program's own name."""

from __future__ import annotations

import argparse
import importlib.util

import pytest
from support.ranks import run_module

import hcp
from hcp.tools.programs import launch

NEEDS = {"hcp.integrations.megatron": "megatron", "hcp.integrations.transformers": "transformers"}
"""Programs, and the package that each needs. The demo: tests/programs/test_demo.py."""


def program(run):
    def parse_args(argv):
        return argparse.Namespace(ranks=2)

    return launch.Program("a program", "a.module", lambda: None, parse_args, run)


def test_a_rank_that_cannot_go_on_says_why_under_the_programs_name(monkeypatch, capsys):
    def run(args):
        raise hcp.HcpError("no rows", code="no-data")

    monkeypatch.setattr(launch.time, "sleep", lambda seconds: None)
    for rank, place in (("0", ""), ("1", "rank 1: ")):
        monkeypatch.setenv("RANK", rank)
        assert program(run).main([]) == launch.USER_ERROR
        assert capsys.readouterr().err == f"a program: error: {place}no rows [HCP-no-data]\n"


@pytest.fixture
def waited(monkeypatch):
    """The seconds that ranks wait before they say why they end."""
    seconds = []
    monkeypatch.setattr(launch.time, "sleep", seconds.append)
    return seconds


def test_what_hcp_itself_refuses_is_one_line_whatever_the_error(waited, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    assert program(lambda args: hcp.plan([5], ranks=0, max_tokens_per_rank=8)).main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith("a program: error: ranks is 0, expected")
    assert said.count("\n") == 1
    with pytest.raises(ValueError, match="invalid literal"):  # a fault, which needs its traceback
        program(lambda args: int("five")).main([])


@pytest.mark.parametrize(
    ("rank", "local", "seconds"), [(0, 0, 0), (8, 0, 1), (1, 1, 2), (9, 1, 2), (1, None, 2)]
)
def test_ranks_speak_one_after_the_other(rank, local, seconds, waited, monkeypatch, capsys):
    """Rank 0, then the first rank of each machine, then others: an exit ends its neighbours."""

    def refuse(args):
        raise launch.InputError("no rows")

    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", str(local))
    assert program(refuse).main([]) == launch.USER_ERROR
    with pytest.raises(ZeroDivisionError):
        program(lambda args: 1 / 0).main([])
    assert waited == [seconds * launch.GRACE_SECONDS] * 2


def test_options_that_name_what_is_not_installed_are_refused_in_one_line(monkeypatch, capsys):
    def refuse(argv):
        raise hcp.HcpError("the backend needs a package", code="backend-missing")

    monkeypatch.delenv("RANK", raising=False)
    given = launch.Program("hcp demo", "hcp.demo", lambda: None, refuse, lambda args: None)
    assert given.main([]) == launch.USER_ERROR
    said = capsys.readouterr().err
    assert said == "hcp demo: error: the backend needs a package [HCP-backend-missing]\n"
    with pytest.raises(launch.InputError, match="the backend needs a package"), launch.refusals():
        refuse([])


def test_without_a_launcher_the_module_is_started_on_so_many_ranks(monkeypatch):
    started = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launch, "start_ranks", lambda *given: started.append(given) or 0)
    assert program(lambda args: pytest.fail("ran here")).main(["--x"]) == 0
    assert started == [(2, ["-m", "a.module", "--x"], "a program")]


def test_a_missing_package_is_one_line_of_the_program(monkeypatch, capsys):
    def check():
        raise ImportError("it is not installed")

    monkeypatch.delenv("RANK", raising=False)
    absent = launch.Program("a program", "a.module", check, lambda argv: None, lambda args: None)
    assert absent.main([]) == launch.USER_ERROR
    assert capsys.readouterr().err == "a program: error: it is not installed\n"


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        (launch.USER_ERROR, launch.USER_ERROR, ""),
        (1, 1, "a program: rank 3 failed with exit code 1\n"),
        (-9, 137, "a program: rank 3 was ended by SIGKILL (out of memory?)\n"),
    ],
)
def test_what_a_rank_could_not_say_is_said_under_the_programs_name(code, exit_code, said, capsys):
    assert launch.report_failure(3, code, "a program") == exit_code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("name", NEEDS)
def test_text_that_cannot_be_read_is_one_line_of_the_program_that_was_called(name, tmp_path):
    if importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "fine"}\n{"text": 7}\n')
    done = run_module(name, "--ranks", "2", "--data", str(path), ranks=2, folder=tmp_path)
    assert done.code == launch.USER_ERROR, done.err
    lines = [line for line in done.err.splitlines() if "error" in line or "rank" in line]
    # A rank that waited for rank 0 to say it may say it, too, on a busy machine.
    lines = [line for line in lines if not line.startswith(f"{name}: error: rank 1: ")]
    assert lines == [f'{name}: error: {path}:2: field "text" is int, expected a string']


def test_a_path_that_is_not_there_is_found_before_ranks_start(monkeypatch, capsys):
    pytest.importorskip("transformers", reason="pip install '.[transformers]'")
    from hcp.integrations.transformers.program import main

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launch, "start_ranks", lambda *_: pytest.fail("ranks were started"))
    for flags, message in (
        (["--data", "/nope"], "--data /nope: no such file or folder"),
        (["--window-size", "5,0"], "window_size is (5, 0), expected (-1, -1): the model has"),
        (["--eval-context-parallel-size", "auto"], "is 'auto', expected a number: ask"),
        (["--cp-comm-type", "p2p", "a2a"], "expected one for all layers: the model's"),
    ):
        assert main(flags) == launch.USER_ERROR
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("hcp.integrations.transformers: error: ")
        assert message in line
