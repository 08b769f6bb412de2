"""The command line: hcp COMMAND ..., or python -m hcp COMMAND ... where no script is installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from hcp._version import __version__


def demo(argv: Sequence[str]) -> int:
    from hcp.demo import main

    return main(argv)


def plan(argv: Sequence[str]) -> int:
    from hcp.cli.plan import main

    return main(argv)


def simulate(argv: Sequence[str]) -> int:
    from hcp.cli.simulate import main

    return main(argv)


def calibrate(argv: Sequence[str]) -> int:
    from hcp.cli.calibrate import main

    return main(argv)


def doctor(argv: Sequence[str]) -> int:
    from hcp.cli.doctor import main

    return main(argv)


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "demo": (
        demo,
        "train a small GPT on real text: dynamic CP against static CP, and eval-time CP",
    ),
    "plan": (plan, "plan lengths from a file or a family: report, table, timeline, trace"),
    "simulate": (simulate, "whether dynamic CP pays for your lengths, by a model"),
    "calibrate": (calibrate, "measure micro-batches on this machine: a cost model for plan"),
    "doctor": (doctor, "which parts of hcp work on this machine, and why the others do not"),
}


def run(command: str, argv: Sequence[str]) -> int:
    try:
        return COMMANDS[command][0](argv)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        advice = "torch is not installed: python -m pip install torch"
        print(f"hcp {command}: error: {advice}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # of `hcp plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        return run(argv[0], argv[1:])
    usage = "usage: hcp COMMAND [--help] ...\n       hcp --version\n\n" + "".join(
        f"  {name:11}{text}\n" for name, (_, text) in COMMANDS.items()
    )
    if argv and argv[0] in ("-h", "--help"):
        print(usage, end="")
        return 0
    if argv and argv[0] in ("-V", "--version"):
        print(f"hcp {__version__}")
        return 0
    wrong = f"{argv[0]!r} is not a command" if argv else "no command is given"
    print(f"{usage}\nhcp: error: {wrong}, expected one of {', '.join(COMMANDS)}", file=sys.stderr)
    return 2
