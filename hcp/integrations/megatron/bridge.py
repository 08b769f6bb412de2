"""Megatron-Bridge: a callback that runs evaluation and test under another layout.

    pretrain(config, forward_step, callbacks=[EvalContextParallel()])

Bridge has no event between its process groups and its loaders that goes with `train.num_epochs`.
The first callback therefore puts a function in the place of `setup` in Bridge's `pretrain`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import mock

from hcp.groups.process_groups import ProcessGroups
from hcp.rebinding.exclude import Exclude
from hcp.rebinding.rebind import Rebound, rebind


class EvalContextParallel:
    """A callback with Megatron-Bridge's event names: evaluation and test run under `eval_pgs`.

    Without groups, Bridge's own option `config.dist.eval_context_parallel_size` gives the layout,
    and the groups are made from Bridge's own as soon as it has them.

    On a time limit and on exceptions, Bridge does not send its end events. The layout is therefore
    also restored at the next event of training.
    """

    def __init__(
        self,
        train_pgs: ProcessGroups | None = None,
        eval_pgs: ProcessGroups | None = None,
        *,
        exclude: Exclude = (),
        strict: bool = False,
    ) -> None:
        if (train_pgs is None) != (eval_pgs is None):
            raise ValueError("train_pgs and eval_pgs go together: give both or neither")
        given = None if train_pgs is None or eval_pgs is None else (train_pgs, eval_pgs)
        self._given = self._pgs = given
        self._exclude, self._strict = exclude, strict
        self._rebound: Rebound | None = None
        _put_in_place()

    @property
    def inside(self) -> bool:
        """Whether the model is in the eval layout."""
        return self._rebound is not None

    def set_up(self, state: Any, collection: Any) -> None:
        """Set the groups by which the validation and test loaders shard, in Bridge's state.

        `collection`: the groups of training. Every rank calls it, once for each run. Raises
        ValueError if Bridge, which rounds the number of micro-batches down, would leave out samples
        of each batch.
        """
        self._pgs = self._given or _groups_of(state, collection)
        evaluation = self._pgs[1]
        _check_batches(state, evaluation)
        state._eval_pgs = evaluation.source or evaluation

    def on_eval_start(self, context: Any) -> None:
        self.restore()
        if self._pgs is None:
            raise ValueError(
                "the callback has no groups, expected Megatron-Bridge's pretrain or finetune to "
                "call it; in a loop of your own, call set_up(state, pg_collection) first"
            )
        self._rebound = rebind(
            context.model, *self._pgs, exclude=self._exclude, strict=self._strict
        )

    def on_eval_end(self, context: Any) -> None:
        self.restore()

    on_test_start, on_test_end = on_eval_start, on_eval_end
    on_train_step_start = on_train_end = on_checkpoint_save = on_eval_end

    def on_train_start(self, context: Any) -> None:
        """Do nothing, as for the events of single steps."""

    on_train_step_end = on_eval_step_start = on_eval_step_end = on_train_start
    on_test_step_start = on_test_step_end = on_train_start

    def restore(self) -> None:
        """Restore the model's training layout, if it is in the other one."""
        rebound, self._rebound = self._rebound, None
        if rebound is not None:
            rebound.restore()


@functools.cache
def _put_in_place() -> None:
    """Make Bridge's `pretrain` set up the callbacks of this module. Nothing without Bridge."""
    if find_spec("megatron") is None or find_spec("megatron.bridge") is None:
        return
    pretrain: Any = import_module("megatron.bridge.training.pretrain")
    setup: Any = import_module("megatron.bridge.training.setup")
    for module, name in ((pretrain, "setup"), (setup, "initialize_megatron")):
        if not callable(getattr(module, name, None)):
            raise ImportError(
                f"{module.__name__} has no {name}, expected it as in Megatron-Bridge 0.6.2"
            )
    pretrain.setup = _with_groups(pretrain.setup, setup)


def _with_groups(setup: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """Return Bridge's `setup`, which sets callbacks up as soon as the process groups are there."""

    @functools.wraps(setup)
    def with_groups(state: Any, *given: Any, callback_manager: Any = None, **options: Any) -> Any:
        callbacks = _callbacks_of(callback_manager)
        if not callbacks:
            return setup(state, *given, callback_manager=callback_manager, **options)
        initialize = module.initialize_megatron

        def initialized(*args: Any, **options: Any) -> Any:
            collection = initialize(*args, **options)
            for callback in callbacks:
                callback.set_up(state, collection)
            return collection

        with mock.patch.object(module, "initialize_megatron", initialized):
            return setup(state, *given, callback_manager=callback_manager, **options)

    return with_groups


def _callbacks_of(manager: Any) -> list[EvalContextParallel]:
    """The callbacks of this module among those of Bridge's manager."""
    if manager is None:
        return []
    owners = [getattr(each, "__self__", None) for each in manager.list_callbacks("on_eval_start")]
    return [each for each in owners if isinstance(each, EvalContextParallel)]


def _groups_of(state: Any, collection: Any) -> tuple[ProcessGroups, ProcessGroups]:
    """Return the training and eval groups that the configuration asks for. Every rank calls it."""
    size = getattr(state.cfg.dist, "eval_context_parallel_size", None)
    if size is None:
        raise ValueError(
            "config.dist.eval_context_parallel_size is None, expected the context-parallel size of "
            "evaluation, or EvalContextParallel(train_pgs, eval_pgs)"
        )
    train = ProcessGroups.from_existing(collection)
    return train, train.with_context_parallel(size)


def _check_batches(state: Any, evaluation: ProcessGroups) -> None:
    """Check that batches divide, as Bridge does for its own option but not for given groups."""
    validation = getattr(getattr(state, "cfg", None), "validation", None)
    batch = getattr(validation, "eval_global_batch_size", None)
    micro_batch = getattr(validation, "eval_micro_batch_size", None)
    if batch is None or micro_batch is None:
        return
    ranks = evaluation.size("dp")
    if rest := batch % (micro_batch * ranks):
        raise ValueError(
            f"eval_global_batch_size ({batch}) % (eval_micro_batch_size ({micro_batch}) x "
            f"data-parallel ranks of evaluation ({ranks})) == {rest}, expected 0: Bridge would "
            "leave samples out of every batch"
        )
