"""Flags that every benchmark has, and the file of results that `--json` writes."""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.machine import machine, versions
from hcp._files import write_file

Defaults = Mapping[str, tuple[Any, Any]]
"""By the argument's name: on a CPU, on GPUs."""


class JsonFile:
    """The rows of a benchmark's table with machine and versions.

    The file is written again with each row: a run that ends early leaves the rows before its end.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self._rows: list[dict[str, object]] = []

    def add(self, row: Mapping[str, object]) -> None:
        """Add a row, on the rank that prints it. Cells with the text of a number become numbers."""
        if self.path is None:
            return
        self._rows.append({name: _number(cell) for name, cell in row.items()})
        content = {
            "benchmark": Path(sys.argv[0]).stem,
            "arguments": sys.argv[1:],
            "machine": machine(),
            "versions": versions(),
            "rows": self._rows,
        }
        write_file(self.path, json.dumps(content, indent=1) + "\n")


def _device(name: str) -> str:
    if name == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise argparse.ArgumentTypeError("cuda, but torch finds no GPU here")
    return name


def _number(cell: object) -> object:
    if not isinstance(cell, str):
        return cell
    for kind in (int, float):
        try:
            return kind(cell.strip().replace(",", ""))
        except ValueError:
            continue
    return cell.strip()


def parser_of(
    doc: str | None,
    *,
    devices: Sequence[str] = ("cpu", "cuda"),
    device: str,
    rounds: int | None,
    rounds_help: str = "(%(default)s)",
    deadline: float | None = None,
    formatter_class: type[argparse.HelpFormatter] = argparse.HelpFormatter,
) -> argparse.ArgumentParser:
    """Make a parser with the flags that every benchmark has. A deadline of None: no end."""
    text = doc or ""
    whole = formatter_class is argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=text if whole else text.partition("\n")[0], formatter_class=formatter_class
    )
    parser.add_argument(
        "--device", type=_device, choices=devices, default=device, help=f"({device})"
    )
    parser.add_argument("--rounds", type=int, default=rounds, help=f"timed rounds {rounds_help}")
    ends = "never" if deadline is None else f"{deadline:g}"
    parser.add_argument(
        "--deadline", type=float, default=deadline, help=f"end after these seconds ({ends})"
    )
    parser.add_argument(
        "--json",
        type=JsonFile,
        default=JsonFile(),
        metavar="FILE",
        help="write the table's rows, the machine and the versions",
    )
    return parser


def end_after(deadline: float | None) -> None:
    """End the process, with the stack of each thread, if it lives longer than these seconds."""
    if deadline is not None:
        faulthandler.dump_traceback_later(deadline, exit=True)


def add_sizes(
    parser: argparse.ArgumentParser, whats: Mapping[str, str], defaults: Defaults
) -> None:
    """Add a flag of a whole number for each size, by its name and what it is."""
    for name, what in whats.items():
        cpu, cuda = defaults[name.replace("-", "_")]
        parser.add_argument(f"--{name}", type=int, help=f"{what} (CPU: {cpu}, CUDA: {cuda})")


def filled(args: argparse.Namespace, defaults: Defaults) -> argparse.Namespace:
    """Set what was not given to the default of the device."""
    for name, choices in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, choices[args.device == "cuda"])
    return args
