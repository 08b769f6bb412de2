"""What every program says of its options, and the name by which it calls itself."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest

import hcp
from hcp.cli.commands import COMMANDS, main

PACKAGE = Path(hcp.__file__).parent
Parser = argparse.ArgumentParser


def built(module: str) -> Parser:
    parser: Parser = import_module(module).build_parser()
    return parser


def of_transformers() -> Parser:
    pytest.importorskip("transformers")
    return built("hcp.integrations.transformers.program")


def of_megatron_lm() -> Parser:
    return import_module("hcp.integrations.megatron.lm.flags").add_flags(Parser())


PARSERS: dict[str, Callable[[], Parser]] = {
    "hcp demo": lambda: built("hcp.demo.demo_arguments"),
    "hcp plan": lambda: built("hcp.cli.plan"),
    "hcp simulate": lambda: built("hcp.cli.simulate"),
    "hcp calibrate": lambda: built("hcp.cli.calibrate"),
    "hcp doctor": lambda: built("hcp.cli.doctor"),
    "Megatron-Core's program": lambda: built("hcp.integrations.megatron.program.program_arguments"),
    "Megatron-LM's launcher": lambda: built("hcp.integrations.megatron.launch"),
    "Megatron-LM's flags": of_megatron_lm,
    "Transformers' program": of_transformers,
    "hcp.add_arguments": lambda: hcp.add_arguments(Parser()),
}


@pytest.mark.parametrize("name", PARSERS)
def test_every_option_says_what_it_is_its_unit_and_its_default(name: str) -> None:
    parser = PARSERS[name]()
    formatter = parser._get_formatter()
    actions = [x for x in parser._actions if not isinstance(x, argparse._HelpAction)]
    assert actions
    for action in actions:
        option = "/".join(action.option_strings) or action.dest
        assert action.help, f"{option} has no help"
        if action.nargs == 0:
            continue
        assert action.choices or action.metavar, f"{option} has neither choices nor a unit"
        says = formatter._expand_help(action)
        told = not action.option_strings or "default" in says or "required" in says
        assert told, f"{option} does not say its default: {says}"


def test_no_module_adds_options_that_are_not_looked_at_here() -> None:
    pytest.importorskip("transformers")  # before all others are imported
    seen = set()
    add = argparse._ActionsContainer.add_argument

    def noting(self: Parser, *given: object, **options: object) -> argparse.Action:
        seen.add(Path(sys._getframe(1).f_code.co_filename))
        return add(self, *given, **options)  # type: ignore[arg-type]

    with mock.patch.object(argparse._ActionsContainer, "add_argument", noting):
        for parser in PARSERS.values():
            parser()
    adding = {path for path in PACKAGE.rglob("*.py") if ".add_argument(" in path.read_text()}
    assert len(adding) > 8
    assert adding - seen == set()


def test_every_command_is_looked_at_here() -> None:
    assert {f"hcp {command}" for command in COMMANDS} <= PARSERS.keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_calls_itself_hcp_in_its_usage(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(PACKAGE / "__main__.py"), command])  # as python -m does
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    usage, *_ = printed.splitlines()
    assert usage.startswith(f"usage: hcp {command} ")
    assert len(usage) <= 100
    assert "python -m hcp " not in printed
    assert "__main__" not in printed


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_a_command_calls_itself_hcp_in_its_errors(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hcp", *command.split(), "--none"], capture_output=True, text=True
    )
    *_, last = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert last.startswith(f"hcp {command}".rstrip() + ": error: ")
    assert ("--out" if command == "calibrate" else "--none") in last
    assert "python -m hcp" not in done.stderr


def test_the_launcher_asks_for_the_script_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        built("hcp.integrations.megatron.launch").parse_args([])
    assert capsys.readouterr().err.endswith("arguments are required: SCRIPT\n")


def test_an_unknown_command_is_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    for given, says in (["plam"], "'plam' is not a command"), ([], "no command is given"):
        assert main(given) == 2
        usage, *_, last = capsys.readouterr().err.splitlines()
        assert usage == "usage: hcp COMMAND [--help] ..."
        assert last == f"hcp: error: {says}, expected one of {', '.join(COMMANDS)}"


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_a_command_without_lengths_says_what_to_give(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = ["--ranks", "8", "--max-tokens-per-rank", "1K"]
    for given, missing in ([], ", --ranks RANKS"), (limits, ""):
        with pytest.raises(SystemExit) as end:
            main([command, *given])
        assert end.value.code == 2
        file = "FILE" if command == "plan" else "--lengths FILE"
        expected = (
            f"missing: lengths ({file}, with - for standard input, or --family NAME){missing}"
        )
        said = capsys.readouterr().err
        assert expected in said
        assert ("--max-tokens-per-rank TOKENS\n" in said) == (given == [] and command == "plan")
