"""The options of ``cp.attention`` as types: ``**options: Unpack[AttentionOptions]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from torch import Tensor

from hcp._words import CommType, QkvFormat
from hcp.attention.latent import Expand
from hcp.attention.rotary import Rotary
from hcp.exchange.agreement import LayerName


class CoreAttentionOptions(TypedDict, total=False):
    """Those that a layer has from call to call."""

    causal: bool
    window_size: tuple[int, int]
    softmax_scale: float | None
    softcap: float
    comm_type: CommType | None


class AttentionOptions(CoreAttentionOptions, total=False):
    """All but ``return_lse``, on which the type of the result depends.

    :meth:`hcp.ContextParallelHandler.attention` says what they mean and has their defaults.
    """

    sinks: Tensor | None
    dropout_p: float
    qkv_format: QkvFormat
    rotary_pos_emb: Tensor | Rotary | None
    layer: LayerName
    mask: str | None
    expand: Expand | None
    parameters: Sequence[Tensor] | None


def expect_known(caller: str, options: Mapping[str, object], kind: type) -> None:
    """Raise TypeError, as Python does, unless all options are of these types' names."""
    known = {*getattr(kind, "__optional_keys__", ())}
    for name in options:
        if name not in known:
            raise TypeError(
                f"{caller} got an unexpected keyword argument {name!r}, expected some of "
                f"{sorted(known)}"
            )
