"""Put hcp in place in Megatron-Bridge's `pretrain`, for the runs that have a callback of hcp.

Bridge has no event between its process groups and its loaders that goes with `train.num_epochs`.
hcp therefore puts a function in the place of `_pretrain`, which `pretrain` and `finetune` call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import mock


class BridgeCallback:
    """A callback with Megatron-Bridge's event names, which also takes part in Bridge's setup."""

    def __init__(self) -> None:
        _put_in_place()

    def set_up(self, state: Any, collection: Any) -> None:
        """Take Bridge's state and the groups of training, as soon as Bridge has them and before it
        builds the model and its loaders. Every rank calls it, once for each run."""

    def in_place(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context around a whole run."""
        return contextlib.nullcontext()

    def on_event(self, context: Any) -> None:
        """Do nothing: an event that a callback does not use."""

    on_train_start = on_train_step_start = on_train_step_end = on_train_end = on_event
    on_eval_start = on_eval_step_start = on_eval_step_end = on_eval_end = on_event
    on_test_start = on_test_step_start = on_test_step_end = on_test_end = on_event
    on_checkpoint_save = on_event


@functools.cache
def _put_in_place() -> None:
    """Make Bridge's `pretrain` set up callbacks of hcp. Does nothing without Bridge."""
    if find_spec("megatron") is None or find_spec("megatron.bridge") is None:
        return
    pretrain = module_with("pretrain", "_pretrain")
    pretrain._pretrain = _with_callbacks(pretrain._pretrain)


def module_with(name: str, *places: str) -> Any:
    """Import a module of Bridge's training. Raises ImportError if it lacks one of some places."""
    module = import_module(f"megatron.bridge.training.{name}")
    for place in places:
        if not callable(getattr(module, place, None)):
            raise ImportError(
                f"{module.__name__} has no {place}, expected it as in Megatron-Bridge 0.6.2"
            )
    return module


def _with_callbacks(pretrain: Callable[..., Any]) -> Callable[..., Any]:
    """Return Bridge's `_pretrain`, inside which the run's callback is in place."""

    @functools.wraps(pretrain)
    def with_callbacks(
        state: Any, forward_step_func: Any, callback_manager: Any = None, *given: Any, **named: Any
    ) -> Any:
        callback = _callback_of(callback_manager)
        if callback is None:
            return pretrain(state, forward_step_func, callback_manager, *given, **named)
        setup = module_with("setup", "initialize_megatron")
        initialize = setup.initialize_megatron

        def initialized(*given: Any, **named: Any) -> Any:
            collection = initialize(*given, **named)
            callback.set_up(state, collection)
            return collection

        with mock.patch.object(setup, "initialize_megatron", initialized), callback.in_place():
            return pretrain(state, forward_step_func, callback_manager, *given, **named)

    return with_callbacks


def _callback_of(manager: Any) -> BridgeCallback | None:
    """The callback of hcp among those of Bridge's manager, or None."""
    events = () if manager is None else manager.list_callbacks("on_eval_start")
    owners = [getattr(each, "__self__", None) for each in events]
    found = [each for each in owners if isinstance(each, BridgeCallback)]
    if len(found) > 1:
        names = ", ".join(type(each).__name__ for each in found)
        raise ValueError(
            f"callbacks has {names}, expected one of hcp: DynamicContextParallel takes the layout "
            "of evaluation from dist.eval_context_parallel_size"
        )
    return found[0] if found else None


def check_batches(state: Any, ranks: int) -> None:
    """Check that batches of evaluation divide over data-parallel ranks. Bridge checks that for its
    own option only, and rounds down where they do not."""
    validation = getattr(getattr(state, "cfg", None), "validation", None)
    batch = getattr(validation, "eval_global_batch_size", None)
    micro_batch = getattr(validation, "eval_micro_batch_size", None)
    if batch is None or micro_batch is None:
        return
    if rest := batch % (micro_batch * ranks):
        raise ValueError(
            f"eval_global_batch_size ({batch}) % (eval_micro_batch_size ({micro_batch}) x "
            f"data-parallel ranks of evaluation ({ranks})) == {rest}, expected 0: Bridge would "
            "leave samples out of every batch"
        )
