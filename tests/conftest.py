"""Settings of all tests: one thread, a compile cache of their own, and repeatable random inputs."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections import defaultdict

import pytest
import torch
from hypothesis import settings

# Tests run side by side and start ranks of their own: one thread each keeps them apart, and sums
# have one order.
torch.set_num_threads(1)

# Inductor's cache is a folder of this process. It knows neither the shapes nor the schemas of
# operators: graphs that another hcp compiled would be taken for this one's. Without workers, no
# thread of theirs is there to be forked.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="hcp-inductor-")
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

# A failure prints the line that repeats it. With CI set, every run draws the same inputs.
settings.register_profile("here", deadline=None, print_blob=True)
settings.register_profile("ci", settings.get_profile("here"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the "ratios" of tests: the largest of each test, and with -v of each case."""
    largest: dict[str, dict[str, float]] = defaultdict(dict)
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, ratios in report.user_properties:
                if name != "ratios":
                    continue
                tests = [report.location[2].partition("[")[0]]
                for test in tests + [report.location[2]] * (config.option.verbose > 0):
                    for key, ratio in ratios.items():
                        largest[test][key] = max(ratio, largest[test].get(key, 0))
    for test, ratios in largest.items():
        text = " ".join(f"{key} {ratio:.2f}" for key, ratio in ratios.items())
        terminalreporter.write_line(f"ratio {text}  {test}")
