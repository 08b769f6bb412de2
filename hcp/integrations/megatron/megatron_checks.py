"""Refuse options of a config that make a loss, or the end of a run, depend on the plan."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch.distributed as dist

_log = logging.getLogger("hcp")


def check_experts(config: Any, groups: Any = None) -> None:
    """Refuse experts that do not fit a dynamic plan, and warn of losses that depend on it.

    Raises ValueError for experts whose outputs depend on the other rows of their rank, and for
    exchanges that need equally many rows on every rank. Warns of losses that are of a micro-batch
    by definition. `groups`: Megatron's collection, whose backend is checked.
    """
    if not _of(config, "num_moe_experts"):
        return
    for name, given, why in _refused(config):
        raise ValueError(f"config.{name} is {given!r}, {why}")
    for name, why in unfit_dispatcher(config):
        raise ValueError(
            f"config.{name} is {getattr(config, name)!r} with expert_model_parallel_size "
            f"{_of(config, _EXPERT_RANKS)}, expected moe_token_dispatcher_type 'alltoall': {why}"
        )
    group = getattr(groups, "tp", None)
    if group is not None and dist.get_backend(group) == "gloo":
        _check_flex_on_cpus(config.moe_token_dispatcher_type)
        check_gloo(_of(config, "expert_tensor_parallel_size"), _of(config, _EXPERT_RANKS))
    for name, given in _warned(config):
        _warn_once(
            f"config.{name} is {given!r}: this loss is of all rows of a micro-batch, so it, and "
            "its gradients, depend on the plan, as they depend on the packing in Megatron itself; "
            "moe_router_load_balancing_type='seq_aux_loss', or expert biases, do not"
        )


def unfit_dispatcher(config: Any, stages: int = 1) -> Iterator[tuple[str, str]]:
    """Yield (option, reason) of a dispatcher that cannot take the rows of a plan, of Megatron's
    config or of options by the same names. `stages`: of the pipeline, whose rows vary."""
    kind, spread = config.moe_token_dispatcher_type, _of(config, _EXPERT_RANKS) > 1
    if kind == "allgather" and (spread or stages > 1):
        yield "moe_token_dispatcher_type", f"it takes {_EQUAL_ROWS}"
    backend = _of(config, _BACKEND) if kind == "flex" else None
    if backend == "hybridep" and spread and not _of(config, _PADDED):
        yield _BACKEND, f"without {_PADDED} (Megatron-Core 0.19) it takes {_EQUAL_ROWS}"
    if backend == "ncclep":
        why = "its buffers hold the rows of the first micro-batch, and a later one may have more"
        yield _BACKEND, why


def _check_flex_on_cpus(dispatcher: str) -> None:
    if dispatcher == "flex":
        raise ValueError(
            "config.moe_token_dispatcher_type is 'flex' on CPUs, expected 'alltoall': the "
            "exchanges of all its backends run on GPUs"
        )


def check_gloo(expert_tensor_size: int, expert_ranks: int) -> None:
    """Refuse expert layouts in which ranks gather different numbers of rows: Gloo fails or
    hangs."""
    if expert_tensor_size > 1 and expert_ranks > 1:
        raise ValueError(
            f"expert_tensor_parallel_size is {expert_tensor_size} with expert_model_parallel_size "
            f"{expert_ranks} on CPUs, expected one of them to be 1: the tensor-parallel ranks of "
            "an expert gather different numbers of rows, which Gloo does not do; give "
            "--expert-tensor-parallel-size 1, or use GPUs"
        )


_EXPERT_RANKS = "expert_model_parallel_size"
_BACKEND = "moe_flex_dispatcher_backend"
_PADDED = "moe_hybridep_pad_uneven_dispatch_inputs"
_EQUAL_ROWS = "as many rows from each rank, and every rank has those that the plan gives it"


def _refused(config: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield (option, value, reason) of options by which the plan changes the experts' outputs."""
    for name in ("moe_expert_capacity_factor", "moe_expert_rank_capacity_factor"):
        if getattr(config, name, None) is not None:
            yield (
                name,
                getattr(config, name),
                "expected None: which tokens are dropped depends on the others of the micro-batch "
                "on the rank, hence on the plan",
            )
    if getattr(config, "moe_token_dropping", False):
        yield "moe_token_dropping", True, "expected False: the dropped tokens depend on the plan"
    if _of(config, "moe_input_jitter_eps"):
        noise = "expected None: the noise of a token would depend on the plan"
        yield "moe_input_jitter_eps", config.moe_input_jitter_eps, noise
    if getattr(config, "moe_router_force_load_balancing", False):
        random = "expected False: tokens go to experts at random, which depends on the plan"
        yield "moe_router_force_load_balancing", True, random
    if {"sinkhorn", "quantile_balancing"}.intersection(map(str, _kinds(config))):
        whole = (
            "expected another: it balances the rows of a micro-batch on a rank, hence the plan's"
        )
        yield "moe_router_load_balancing_type", config.moe_router_load_balancing_type, whole


def _warned(config: Any) -> Iterator[tuple[str, Any]]:
    coefficients = config.moe_aux_loss_coeff
    several = coefficients if isinstance(coefficients, (list, tuple)) else [coefficients]
    balanced = {"aux_loss", "global_aux_loss"}.intersection(map(str, _kinds(config)))
    if balanced and any(several):
        yield "moe_router_load_balancing_type", config.moe_router_load_balancing_type


def _kinds(config: Any) -> list[Any]:
    kinds = config.moe_router_load_balancing_type
    return list(kinds) if isinstance(kinds, (list, tuple)) else [kinds]


def _of(config: Any, name: str) -> Any:
    return getattr(config, name, None) or 0


@cache
def _warn_once(text: str) -> None:
    _log.warning(text)
