"""Programs of several ranks of this host, started by torchrun and ended with all their ranks."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def started(ranks: int, *program: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a program, a path and its arguments, under torchrun. ``options``: of `Popen`.

    Inside the context it runs. Where the context raises, as on a timeout of `wait` or
    `communicate`, torchrun is asked to end, so that its ranks end, too: each has a session of its
    own, which outlives a torchrun that is killed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), *program]
    with subprocess.Popen(command, text=True, **options) as torchrun:
        try:
            yield torchrun
        except BaseException:
            torchrun.terminate()
            torchrun.communicate()  # a pipe that nobody reads would stop it before its ranks end
            raise
