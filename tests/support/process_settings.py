"""Settings of a whole process, which a case has to leave as it found them for the next one.

    before, environment = process_settings(), dict(os.environ)
    case()
    put_back(environment)
    check_unchanged(before, "the case")  # AssertionError: names what is not as it was

The environment is put back instead: trainers and their launchers set variables on purpose.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch

_ABSENT = "absent"


def process_settings() -> dict[str, Any]:
    return {
        **_of_torch(),
        **_of_dynamo(),
        **{f"the handler of {each!r}": signal.getsignal(each) for each in signal.valid_signals()},
    }


def _of_torch() -> dict[str, Any]:
    return {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_default_device()": torch.get_default_device(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.are_deterministic_algorithms_enabled()": (
            torch.are_deterministic_algorithms_enabled()
        ),
    }


def _of_dynamo() -> dict[str, Any]:
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return {}
    settings = dynamo.config.get_config_copy()
    return {f"torch._dynamo.config.{name}": value for name, value in settings.items()}


def check_unchanged(before: dict[str, Any], name: str) -> None:
    after = process_settings()
    if not any(key.startswith("torch._dynamo") for key in before):  # imported by the case
        after = {key: value for key, value in after.items() if not key.startswith("torch._dynamo")}
    changed = [
        f"{key} is {after.get(key, _ABSENT)!r}, was {before.get(key, _ABSENT)!r}"
        for key in sorted({*before, *after})
        if after.get(key, _ABSENT) != before.get(key, _ABSENT)
    ]
    if changed:
        raise AssertionError(
            f"{name} left settings of the process changed, which the next case would get: "
            f"{'; '.join(changed)}. Set them back where the case ends"
        )


def put_back(environment: dict[str, str]) -> None:
    """Touch only what differs: other threads may read the environment meanwhile."""
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
