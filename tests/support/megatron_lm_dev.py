"""Megatron-LM's branch dev, as far as it meets hcp: release 0.19 with dev's own dynamic CP.

Its loader does not stack samples, and before each step and evaluation it packs them by
`wrap_data_iterator`, which takes none without `cu_seqlens` or `padded_seq_len`. It makes a process
group for each degree, so that an odd number of ranks is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def stand_in() -> None:
    """Put what dev has more than release 0.19 in place."""
    from megatron.core import parallel_state
    from megatron.training import arguments, initialize, training
    from megatron.training.datasets import data_samplers

    training.wrap_data_iterator = _pack
    for name in ("train_step", "evaluate"):
        setattr(training, name, _packing(training, getattr(training, name)))
    arguments.validate_args = _validating(arguments.validate_args)
    for module in (parallel_state, initialize.mpu):
        module.initialize_model_parallel = _grouping(parallel_state.initialize_model_parallel)
    loader = data_samplers.build_pretraining_data_loader
    training.build_pretraining_data_loader = _not_stacking(loader, training)


def _pack(data_iterator: Any, config: Any, micro_batches: int) -> Any:
    batch = next(data_iterator)
    batch[0]["cu_seqlens"]
    raise AssertionError("packed by dev itself")


def _packing(training: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def packing(forward_step_func: Any, data_iterator: Any, *given: Any, **options: Any) -> Any:
        if training.get_args().sequence_packing_scheduler is not None:
            training.wrap_data_iterator(data_iterator, None, 1)
        return function(forward_step_func, data_iterator, *given, **options)

    return packing


def _validating(validate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(validate)
    def validated(args: Any, *given: Any, **options: Any) -> Any:
        if args.dynamic_context_parallel:
            args.sequence_packing_scheduler = (
                args.sequence_packing_scheduler or "default_dynamic_cp"
            )
            if args.sequence_packing_scheduler != "default_dynamic_cp":
                raise ValueError("Dynamic context parallelism requires default_dynamic_cp")
        return validate(args, *given, **options)

    return validated


def _grouping(initialize: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(initialize)
    def initialized(*given: Any, **options: Any) -> Any:
        from megatron.training import get_args

        assert not get_args().dynamic_context_parallel, "an even number of ranks"
        return initialize(*given, **options)

    return initialized


def _not_stacking(build: Callable[..., Any], training: Any) -> Callable[..., Any]:
    @functools.wraps(build)
    def built(*given: Any, **options: Any) -> Any:
        loader = build(*given, **options)
        if loader is not None and training.get_args().sft:
            loader.collate_fn = list
        return loader

    return built
