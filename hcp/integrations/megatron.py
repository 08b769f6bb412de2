"""Megatron-LM and Megatron-Bridge: evaluate under another layout, with their own loops.

evaluate = hcp.integrations.megatron.wrap_evaluate(evaluate, train_pgs, eval_pgs, get_args())
callbacks = [hcp.integrations.megatron.EvalContextParallel(train_pgs, eval_pgs)]
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from hcp.groups import ProcessGroups
from hcp.rebind import Rebound, eval_cp_context, rebind
from hcp.slots import Exclude

T = TypeVar("T")


def wrap_evaluate(
    evaluate: Callable[..., T],
    train_pgs: ProcessGroups,
    eval_pgs: ProcessGroups,
    args: Any = None,
    *,
    exclude: Exclude = (),
    strict: bool = False,
) -> Callable[..., T]:
    """A Megatron-LM style `evaluate(forward_step_func, data_iterator, model, ...)` that runs under
    `eval_pgs`.

    `args`: the trainer's global arguments, whose `data_parallel_size` and `context_parallel_size`
    are those of the eval layout inside, so that micro-batches are counted right. Everything is
    undone however `evaluate` ends. The data iterator must shard by `eval_pgs.rank("dp")`.
    """
    signature = inspect.signature(evaluate)
    if "model" not in signature.parameters:
        raise ValueError(
            f"{getattr(evaluate, '__name__', evaluate)} has the parameters "
            f"{', '.join(signature.parameters)}, expected one called model"
        )
    if args is not None and getattr(args, "data_parallel_size", None) != train_pgs.size("dp"):
        raise ValueError(
            f"args.data_parallel_size is {getattr(args, 'data_parallel_size', None)!r}, expected "
            f"the data-parallel size of train_pgs, {train_pgs.size('dp')}"
        )

    @functools.wraps(evaluate)
    def wrapped(*positional: Any, **keywords: Any) -> T:
        model = signature.bind(*positional, **keywords).arguments["model"]
        chunks = list(model) if isinstance(model, (list, tuple)) else [model]
        everything = [*chunks, *([] if args is None else [args])]
        with eval_cp_context(everything, train_pgs, eval_pgs, exclude=exclude, strict=strict):
            return evaluate(*positional, **keywords)

    return wrapped


class EvalContextParallel:
    """A callback with Megatron-Bridge's event names: evaluation and test run under `eval_pgs`.

    Bridge leaves out its end events on a time limit and on exceptions, so the layout is also
    restored at the next event of training.
    """

    def __init__(
        self,
        train_pgs: ProcessGroups,
        eval_pgs: ProcessGroups,
        *,
        exclude: Exclude = (),
        strict: bool = False,
    ) -> None:
        self._train, self._eval = train_pgs, eval_pgs
        self._exclude, self._strict = exclude, strict
        self._rebound: Rebound | None = None

    @property
    def inside(self) -> bool:
        """Whether the model is in the eval layout just now."""
        return self._rebound is not None

    def on_data_init_start(self, context: Any) -> None:
        """Validation and test loaders shard by the data-parallel group that they find here."""
        context.state._eval_pgs = self._eval.source or self._eval

    def on_eval_start(self, context: Any) -> None:
        self.restore()
        self._rebound = rebind(
            context.model, self._train, self._eval, exclude=self._exclude, strict=self._strict
        )

    def on_eval_end(self, context: Any) -> None:
        self.restore()

    on_test_start, on_test_end = on_eval_start, on_eval_end
    on_train_step_start = on_train_end = on_checkpoint_save = on_eval_end

    def on_train_start(self, context: Any) -> None:
        """Nothing, like the events of single steps."""

    on_train_step_end = on_eval_step_start = on_eval_step_end = on_train_start
    on_test_step_start = on_test_step_end = on_train_start

    def restore(self) -> None:
        """Give the model the training layout back, if it is in the other one."""
        rebound, self._rebound = self._rebound, None
        if rebound is not None:
            rebound.restore()
