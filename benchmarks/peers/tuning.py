"""Triton's tuning in less time: what it tries of a kernel is compiled in threads first.

Triton's autotuner compiles and times one configuration after the other. Here all of a kernel's are
compiled at once, by Triton's own AsyncCompileMode, and then timed as ever: it tries the same, and
takes the fastest. The forward of fla 0.6's gated delta rule has 34 configurations and its context
parallelism 24 more, most of them for each number of heads and size of values anew.
"""

from __future__ import annotations

import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MOST_THREADS = 16


def compile_in_threads(ranks: int) -> str:
    """Change this process's autotuner, where Triton can. Return what was done. ``ranks``: processes
    that share the cores."""
    try:
        tuner = importlib.import_module("triton.runtime.autotuner").Autotuner
        mode = importlib.import_module("triton.runtime._async_compile").AsyncCompileMode
    except (ImportError, AttributeError) as error:
        return f"Triton compiles what it tunes one after the other: {error}"
    threads = max(1, min(MOST_THREADS, (os.cpu_count() or 1) // ranks))
    if not hasattr(tuner, "prunes"):
        tuner.prunes = tuner.prune_configs
        tuner.prune_configs = lambda *given: _compiled(mode, threads, *given)
    return f"Triton compiles what it tunes in {threads} threads a rank"


def _compiled(mode: Any, threads: int, tuner: Any, named: dict[str, Any]) -> Any:
    """Return a kernel's configurations, compiled. ``named``: its arguments by name."""
    configs = tuner.prunes(named)
    if len(configs) > 1:
        given = {name: value for name, value in named.items() if name != "warmup"}
        with ThreadPoolExecutor(threads) as pool, mode(pool, ignore_errors=True):
            for config in configs:  # one that fails is told by the tuner, which tries it again
                tuner.fn.warmup(*tuner.nargs.values(), **given, **config.all_kwargs())
    return configs
