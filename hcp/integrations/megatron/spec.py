"""Put hcp into a layer specification of Megatron's, wherever a module sees several tokens."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec, get_module

from hcp.integrations.megatron.delta import passing_states
from hcp.integrations.megatron.layers import CoreAttention, is_absorbed, positioned
from hcp.integrations.megatron.mamba import sharing_heads
from hcp.integrations.megatron.megatron_dsa import choosing
from hcp.integrations.megatron.megatron_routers import planned_layer
from hcp.integrations.megatron.mtp import rolling

# By name: importing a Mamba mixer takes Triton, which a GPT does without.
_COUNTERPARTS: dict[str, Callable[..., type]] = {
    "SelfAttention": positioned,
    "MLASelfAttention": positioned,
    "AbsorbedMLASelfAttention": positioned,
    "DSAttention": choosing,
    "GatedDeltaNet": passing_states,
    "MambaMixer": sharing_heads,
    "MultiTokenPredictionLayer": rolling,
}
_MIXES_TOKENS = ("CrossAttention", "GatedDelta")


def hcp_layer_spec(spec: Any, *, fused_rope: bool = True, send_latents: bool = True) -> Any:
    """Copy a specification so that its layers follow the degree of each micro-batch.

    `spec`: that of a GPT layer or block, a hybrid (Mamba) stack, or an MTP block, local or
    Transformer Engine's. It may be anything made of Megatron's ModuleSpecs, dataclasses of
    submodules and lists. Every self-attention, grouped or latent, gets hcp's core attention. Mamba
    mixers, gated delta nets, MTP layers and routers of experts see the sequences of the
    micro-batch. Linear layers, norms, MLPs and experts stay.

    `fused_rope`: hcp rotates queries and keys, in its attention, with `config.apply_rope_fusion`
    and without. False: Megatron rotates them before, by its unfused code.

    `send_latents`: keys and values of multi-latent attention travel compressed, and are projected
    where they are received, if `fused_rope` is True and the comm type of the layer is "p2p",
    "all_gather" or "auto". Keys and values travel with `sequence_parallel` over several ranks, FP8,
    FP4 and `delay_wgrad_compute`.

    Raises ValueError for a layer that mixes tokens and has no counterpart in hcp, with its path,
    and for a specification without any layer that hcp replaces.
    """
    if isinstance(spec, type):
        raise ValueError(
            f"spec is the class {spec.__name__}, expected a ModuleSpec or a dataclass of submodules"
        )
    made = copy.deepcopy(spec)
    nodes = _module_specs(made, "spec")
    if not sum(_replace(node, path, fused_rope, send_latents) for node, path in nodes):
        raise ValueError(
            "the specification has no self-attention, Mamba mixer, gated delta net or MTP layer, "
            "expected one"
        )
    return made


def _module_specs(node: Any, path: str) -> Iterator[tuple[Any, str]]:
    """Yield every ModuleSpec below a node, and its path."""
    if isinstance(node, ModuleSpec):
        yield node, path
        yield from _module_specs(node.submodules, f"{path}.submodules")
    elif isinstance(node, (list, tuple)):
        for i, each in enumerate(node):
            yield from _module_specs(each, f"{path}[{i}]")
    elif dataclasses.is_dataclass(node) and not isinstance(node, type):
        for field in dataclasses.fields(node):
            yield from _module_specs(getattr(node, field.name), f"{path}.{field.name}")


def _replace(node: Any, path: str, fused_rope: bool, send_latents: bool) -> bool:
    module = get_module(node)
    if not isinstance(module, type):
        return False
    if module.__module__.startswith("hcp."):  # a specification that was made of one of ours
        return True
    _check_known(module, path)
    if _has_experts(node.submodules):
        node.module = planned_layer(module)
        return False  # it mixes no tokens itself
    for base in module.__mro__:
        if base.__name__ in _COUNTERPARTS and base.__module__.startswith("megatron.core."):
            _check_not_bridges(module, path)
            made = _COUNTERPARTS[base.__name__]
            rotates = made is positioned
            node.module = made(module, fused_rope, send_latents) if rotates else made(module)
            if hasattr(node.submodules, "core_attention"):
                _replace_core(node.submodules, module, path)
            return True
    return False


def _has_experts(submodules: Any) -> bool:
    """Whether submodules are those of a transformer layer with experts."""
    mlp = getattr(submodules, "mlp", None)
    made = mlp.func if isinstance(mlp, partial) else mlp
    module = get_module(made) if isinstance(made, ModuleSpec) else made
    return isinstance(module, type) and any(b.__name__ == "MoELayer" for b in module.__mro__)


def _replace_core(submodules: Any, attention: type, path: str) -> None:
    """Put hcp's core attention into the submodules of a layer. DSA keeps its own, which follows."""
    core = submodules.core_attention
    if core is not None:
        _check_not_bridges(get_module(core), f"{path}.submodules.core_attention")
    chooses = core is not None and get_module(core).__name__ == "DSAttention"
    if chooses != is_absorbed(attention):
        raise ValueError(
            f"{path} is {attention.__name__} with the core attention "
            f"{get_module(core).__name__ if core else None}, expected DSAttention in "
            "AbsorbedMLASelfAttention, and in no other layer: hcp attends to chosen keys by latent "
            "rows"
        )
    if not chooses:
        submodules.core_attention = CoreAttention


def _check_known(module: type, path: str) -> None:
    names = [base.__name__ for base in module.__mro__ if base.__name__ not in _COUNTERPARTS]
    mixing = [name for name in names if name.startswith(_MIXES_TOKENS)]
    if mixing:
        raise ValueError(
            f"{path} is {mixing[0]}, which mixes tokens across the ranks of a sequence and has no "
            "counterpart in hcp; expected SelfAttention, MLASelfAttention, "
            "AbsorbedMLASelfAttention, GatedDeltaNet, MambaMixer or MultiTokenPredictionLayer"
        )


def _check_not_bridges(module: Any, path: str) -> None:
    """Refuse attention that Megatron-Bridge derives: soft caps, windows or positions of its own."""
    if module.__module__.startswith("megatron.bridge."):
        raise ValueError(
            f"{path} is Megatron-Bridge's {module.__name__}, expected attention of Megatron-Core's:"
            " hcp's would leave out what this one adds"
        )
