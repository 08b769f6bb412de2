"""Run Megatron-LM's own evaluation loop under another layout.

evaluate = hcp.integrations.megatron.wrap_evaluate(evaluate, train_pgs, eval_pgs, get_args())
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from hcp.groups.process_groups import ProcessGroups
from hcp.rebinding.exclude import Exclude
from hcp.rebinding.rebind import eval_cp_context

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
    """Make a Megatron-LM style `evaluate(forward_step_func, data_iterator, model, ...)` run under
    `eval_pgs`.

    The result is a function with the arguments of `evaluate`. Inside it, the model, the other
    arguments of `evaluate` (config, collection of groups, communicator) and the globals of
    Megatron's `parallel_state` hold the eval layout. `args`: the trainer's global arguments. Their
    `data_parallel_size` and `context_parallel_size` change too, so that micro-batches are counted
    right. Everything is undone however `evaluate` ends. The data iterator must shard by
    `eval_pgs.rank("dp")`.

    Raises ValueError if `parallel_state` holds other groups than `train_pgs`.
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
        given = signature.bind(*positional, **keywords).arguments
        model = given.pop("model")
        given.pop("data_iterator", None)  # its position in the data is no part of the layout
        chunks = list(model) if isinstance(model, (list, tuple)) else [model]
        others = [value for value in (*given.values(), args) if _has_attributes(value)]
        _check_globals(train_pgs)
        with eval_cp_context(
            [*chunks, *others], train_pgs, eval_pgs, exclude=exclude, strict=strict
        ):
            return evaluate(*positional, **keywords)

    return wrapped


def _has_attributes(value: object) -> bool:
    """Whether an argument may hold groups or sizes: None, numbers and functions cannot."""
    return hasattr(value, "__dict__") and not callable(value)


def _check_globals(train_pgs: ProcessGroups) -> None:
    """Refuse globals of parallel_state, where Megatron-LM's code reads its groups, that hold
    another layout than `train_pgs`."""
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    group = getattr(parallel_state, "_CONTEXT_PARALLEL_GROUP", None)
    if group is not None and group is not train_pgs.cp and _is_registered(group):
        raise ValueError(
            "megatron.core.parallel_state holds a context-parallel group that train_pgs does not "
            "have, expected the same: Megatron-LM's code reads it there, and would stay in the "
            "training layout; take train_pgs = hcp.ProcessGroups.from_existing("
            "ProcessGroupCollection.use_mpu_process_groups()), or call destroy_model_parallel()"
        )


def _is_registered(group: Any) -> bool:
    """Whether torch.distributed knows a group. A destroyed one belongs to no layout."""
    try:
        return bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return False
