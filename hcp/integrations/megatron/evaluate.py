"""Megatron-LM: its own evaluation loop under another layout.

evaluate = hcp.integrations.megatron.wrap_evaluate(evaluate, train_pgs, eval_pgs, get_args())
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from hcp.groups import ProcessGroups
from hcp.rebind import eval_cp_context
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
