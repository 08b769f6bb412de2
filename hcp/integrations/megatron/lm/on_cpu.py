"""Run Megatron-LM's scripts on a machine without a GPU, over Gloo: to try out, and in tests."""

from __future__ import annotations

import functools
import sysconfig
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch

from hcp.integrations.megatron.cpu import megatron_on_cpu

_COUNTS = (
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
    "device_memory_used",
)


def require_helpers() -> None:
    """Raise ImportError where a checkout of Megatron-LM is not compiled for this Python. Without a
    GPU, Megatron-LM does not compile it."""
    if find_spec("megatron.core.datasets.helpers_cpp") is None:
        (folder,) = import_module("megatron.core.datasets").__path__
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        raise ImportError(
            f"Megatron-LM has no helpers_cpp{suffix} in {folder}, expected it: python -m pip "
            f"install pybind11, then make -C {folder} LIBEXT={suffix}"
        )


@contextmanager
def megatron_lm_on_cpu() -> Iterator[None]:
    """Return a context inside which Megatron-LM's `pretrain` runs on the CPU.

    It adds to `megatron_on_cpu` the calls of `megatron.training`: those that ask for a GPU, count
    its memory, or keep the state of its random numbers. The script needs
    `--distributed-backend gloo`.
    """
    from megatron.training import initialize, training

    without_gpu = functools.partial(training.initialize_megatron, allow_no_cuda=True)
    cuda: dict[str, Any] = {
        "device_count": lambda: 1,  # Megatron-LM makes no groups without devices
        # Its number of a generation lets Megatron-LM ask nothing of CUDA's environment.
        "get_device_properties": lambda *args: types.SimpleNamespace(major=10, minor=0),
        "memory_stats": lambda *args, **options: {},
        "empty_cache": lambda: None,
        "get_rng_state": lambda *args: torch.get_rng_state(),
        "set_rng_state": lambda state, *args: torch.set_rng_state(state),
        **{name: (lambda *args, **options: 0) for name in _COUNTS},
    }
    patches = (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.object(training, "initialize_megatron", without_gpu),
        # It would compile functions that are in the wheel, and warm up those that fuse on a GPU.
        mock.patch.object(initialize, "_compile_dependencies"),
        mock.patch.object(training, "set_jit_fusion_options"),
        torch.compiler.set_stance("force_eager"),  # a compiler would ask for the GPU's properties
    )
    with ExitStack() as stack:
        for each in (*patches, megatron_on_cpu()):
            stack.enter_context(each)
        yield
