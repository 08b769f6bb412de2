"""Put hcp in place in Megatron-LM: each place is probed before any is changed.

| place | in its place |
|---|---|
| `arguments.add_megatron_arguments` | the same, and hcp's flags |
| `arguments.validate_args` | the same without the options of hcp, and refusals |
| `GPTModel`, `HybridModel`, where builders take them from | the same, of layers by hcp |
| `BlendedMegatronDatasetBuilder` | the same, on every rank |
| `training.get_forward_backward_func` | the schedule over planned micro-batches |
| `training.evaluate` | the same, with one mean over all tokens |
| `training.wrap_data_iterator` | a refusal: what it would pack is planned (branch dev) |
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import hcp
from hcp.integrations.megatron.versions import require_megatron
from hcp.tools.programs.launch import refusals

_TRAINING = "megatron.training.training"
# Builders of Megatron-LM, and scripts with builders of their own: those of branch dev.
_GPT = ("megatron.training.models.gpt", "megatron.core.models.gpt")
_HYBRID = ("megatron.training.models.hybrid", "megatron.core.models.hybrid.hybrid_model")
_PLACES = (
    ("megatron.training.arguments", "add_megatron_arguments", ("parser",)),
    ("megatron.training.arguments", "validate_args", ("args",)),
    *((module, "GPTModel", ("config", "transformer_layer_spec")) for module in _GPT),
    *((module, "HybridModel", ("config", "hybrid_stack_spec")) for module in _HYBRID),
    (
        "megatron.core.datasets.blended_megatron_dataset_builder",
        "BlendedMegatronDatasetBuilder",
        ("is_built_on_rank",),
    ),
    (_TRAINING, "get_forward_backward_func", ()),
    (_TRAINING, "update_seqlen_stats_from_cu_seqlens", ("cu_seqlens",)),
    (_TRAINING, "evaluate", ("forward_step_func", "data_iterator", "model")),
    (_TRAINING, "get_args", ()),
    (_TRAINING, "get_tensorboard_writer", ()),
    (_TRAINING, "get_wandb_writer", ()),
)
_SPECS = ("transformer_layer_spec", "mtp_block_spec", "hybrid_stack_spec")


@functools.cache
def install() -> None:
    """Put hcp in place in the Megatron-LM that this process imports. The second call does nothing.

    Raises ImportError, and changes nothing, for a release that was not tested, or that lacks one of
    the places.
    """
    version = require_megatron()
    for module, name, parameters in _PLACES:
        _probe(version, module, name, parameters)
    arguments: Any = import_module("megatron.training.arguments")
    training: Any = import_module(_TRAINING)
    arguments.add_megatron_arguments = _with_flags(arguments.add_megatron_arguments)
    run = _Run()
    arguments.validate_args = _with_options(arguments.validate_args, run)
    for modules, name in ((_GPT, "GPTModel"), (_HYBRID, "HybridModel")):
        places = [import_module(module) for module in modules]
        model = with_layers(getattr(places[0], name), _asks_for_linear_cross_entropy)
        for place in places:
            setattr(place, name, model)
    _build_datasets_everywhere()
    training.get_forward_backward_func = _planned(training, run)
    training.evaluate = _by_tokens(training, run)
    if hasattr(training, "wrap_data_iterator"):  # of branch dev
        training.wrap_data_iterator = _refuse_scheduler


def _probe(version: str, module: str, name: str, parameters: tuple[str, ...]) -> None:
    """Check that a place is there and takes what hcp passes to it."""
    try:
        place = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"Megatron-LM {version} has no {module}.{name} ({error}), expected it: hcp was tested "
            "with the scripts of Megatron-LM 0.19; older ones take hcp.integrations.megatron's "
            "functions, see docs/guides/megatron.md"
        ) from error
    missing = [each for each in parameters if each not in inspect.signature(place).parameters]
    if missing:
        raise ImportError(
            f"{module}.{name} of Megatron-LM {version} takes no {', '.join(missing)}, expected it "
            "as in Megatron-LM 0.19"
        )


def _with_flags(add_arguments: Callable[..., Any]) -> Callable[..., Any]:
    from hcp.integrations.megatron.lm.flags import add_flags

    @functools.wraps(add_arguments)
    def added(parser: Any) -> Any:
        return add_flags(add_arguments(parser))

    return added


class _Run:
    """The state of a run that hcp keeps outside of Megatron-LM's arguments, which go into
    checkpoints."""

    config: hcp.Config
    """The options of hcp, which are known after the command line is read."""
    evaluation_steps: int | None = None
    """The steps of the evaluation that runs. None: none does."""


def _with_options(validate: Callable[..., Any], run: _Run) -> Callable[..., Any]:
    from hcp.integrations.megatron.lm import flags

    @functools.wraps(validate)
    def validated(args: Any, *others: Any, **options: Any) -> Any:
        with refusals():
            run.config = flags.take_options(args)
        with flags.hidden_limits(args):
            result = validate(args, *others, **options)
        flags.hide_options(args)
        with refusals():
            flags.check_args(args, run.config)
        return result

    return validated


def _refuse_scheduler(data_iterator: Any, config: Any, *given: Any, **options: Any) -> Any:
    """Takes the place of branch dev's packing, which is called where a config asks for it."""
    raise ValueError(
        f"config.sequence_packing_scheduler is {config.sequence_packing_scheduler!r}, expected "
        "None: hcp plans; give --sequence-packing-scheduler or --dynamic-context-parallel on the "
        "command line, and set nothing in the model's config"
    )


def _asks_for_linear_cross_entropy() -> bool:
    training: Any = import_module(_TRAINING)
    return bool(training.get_args().linear_cross_entropy)


def with_layers(model: type, linear_cross_entropy: Callable[[], bool]) -> Any:
    """Derive a class of models whose specifications become hcp's, and whose MTP losses follow the
    plan. A HybridModel has no losses of its own; hcp's forward step refuses one with MTP.

    `linear_cross_entropy` is asked when a model is built: see `use_linear_cross_entropy`."""
    from hcp.integrations.megatron.linear_loss import use_linear_cross_entropy
    from hcp.integrations.megatron.mtp import hcp_model_class
    from hcp.integrations.megatron.spec import hcp_layer_spec

    signature = inspect.signature(model)
    base = hcp_model_class(model) if hasattr(model, "_postprocess") else model

    def __init__(self: Any, *given: Any, **options: Any) -> None:
        bound = signature.bind(*given, **options)
        for name in _SPECS:
            if bound.arguments.get(name) is not None:
                with refusals():
                    bound.arguments[name] = hcp_layer_spec(bound.arguments[name])
        with refusals():
            super(made, self).__init__(*bound.args, **bound.kwargs)
            if linear_cross_entropy():
                use_linear_cross_entropy(self)

    made: Any = type(model.__name__, (base,), {"__init__": __init__})
    made.__module__ = __name__
    return made


def _build_datasets_everywhere() -> None:
    """Build datasets on all tensor- and pipeline-parallel ranks: each plans its own samples."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )

    build = BlendedMegatronDatasetBuilder.__init__

    @functools.wraps(build)
    def __init__(self: Any, cls: Any, sizes: Any, is_built_on_rank: Any, config: Any) -> None:
        build(self, cls, sizes, lambda: True, config)

    BlendedMegatronDatasetBuilder.__init__ = __init__


def _planned(training: Any, run: _Run) -> Callable[..., Any]:
    from hcp.integrations.megatron.lm.logged import Writers
    from hcp.integrations.megatron.lm.schedule import CountedSchedule, groups_of_parallel_state

    get = training.get_forward_backward_func

    @functools.wraps(get)
    def planned(*given: Any, **options: Any) -> CountedSchedule:
        args, groups = training.get_args(), groups_of_parallel_state()
        schedule, steps = get(*given, **options), run.evaluation_steps
        return CountedSchedule(schedule, args, run.config, groups, writers, steps)

    def writers() -> Writers:
        args = training.get_args()
        tensorboard, wandb = training.get_tensorboard_writer(), training.get_wandb_writer()
        step, interval = args.curr_iteration + 1, args.tensorboard_log_interval
        return Writers(step, interval, tensorboard, wandb)

    return planned


def _by_tokens(training: Any, run: _Run) -> Callable[..., Any]:
    """Evaluate with --sft as without: Megatron-LM's mean of means would depend on the plan."""
    evaluate = training.evaluate
    parameters = inspect.signature(evaluate)

    @functools.wraps(evaluate)
    def evaluated(*given: Any, **options: Any) -> Any:
        args = training.get_args()
        sft, args.sft = args.sft, False
        steps = parameters.bind(*given, **options).arguments.get("eval_iters")
        run.evaluation_steps = args.eval_iters if steps is None else steps
        try:
            return evaluate(*given, **options)
        finally:
            args.sft, run.evaluation_steps = sft, None

    return evaluated
