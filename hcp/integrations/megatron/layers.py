"""Megatron's attention layers with hcp's core attention and the plan's positions.

T rows on this rank, H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import cache
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

import hcp
from hcp._words import CommType
from hcp.integrations.megatron.attention_backend import backend_of_config
from hcp.integrations.megatron.megatron_checks import check_experts
from hcp.integrations.megatron.megatron_latent import Expansion, hand_on, sends_latents
from hcp.integrations.megatron.megatron_packed import handler_of, with_padding, without_causal_mask
from hcp.integrations.megatron.megatron_rotary import (
    Rotations,
    check_latent,
    latent_twin,
    rotations_of,
)
from hcp.integrations.megatron.twin import twin
from hcp.step.backends import require_backend

_CAUSAL = {
    AttnMaskType.causal: True,
    AttnMaskType.padding_causal: True,
    AttnMaskType.causal_bottom_right: True,  # queries and keys are as many
    AttnMaskType.padding: False,
    AttnMaskType.no_mask: False,
}
"""Whether a layer is causal. A mask of one's own (arbitrary) is refused."""


class CoreAttention(MegatronModule):
    """Replaces Megatron's core attention: packed sequences under any degree.

    The config gives windows and the layers that have them, the kind of softmax, the scale and the
    attention backend. Learnable sinks are a parameter with Megatron's name. Refuses dropout and
    biases, and experts whose outputs depend on the plan.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: CommType | None = None,
        pg_collection: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.pg_collection = pg_collection
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        _refuse(config, dropout, attention_type)
        self._backend = backend_of_config(config)
        require_backend(self._backend)
        check_experts(config, pg_collection)
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window_size = tuple(config.window_size) if windowed else (-1, -1)
        scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        # A latent attention's keys are wider than kv_channels, and it always says its scale.
        # apply_query_key_layer_scaling divides by the layer, Megatron's softmax multiplies again:
        # for the range of float16, and no change to any score.
        self.softmax_scale = scale
        # Megatron passes it only where it builds with CP > 1.
        self.cp_comm_type = cp_comm_type or _comm_type(config, layer_number)
        heads = config.num_attention_heads // pg_collection.tp.size()
        self.register_parameter("softmax_offset", None)
        self._off_by_one = config.softmax_type == "off-by-one"
        if config.softmax_type == "learnable":
            device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
            offset = torch.empty(heads, device=device, dtype=config.params_dtype)
            if config.perform_initialization:
                config.init_method(offset)
            self.softmax_offset = torch.nn.Parameter(offset)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **options: Any,
    ) -> Tensor:
        """Return (T, H * E) for query (T, H, D), key (T, G, D) and value (T, G, E). With an
        expansion in packed_seq_params, the key is latent rows (T, 1, W), and the value nothing."""
        if attention_bias is not None:
            raise ValueError("attention_bias is a tensor, expected None: hcp adds none to scores")
        cp = handler_of(packed_seq_params, self.pg_collection.cp, self.config)
        self._check_backend(cp)
        count = query.shape[0]
        query, key, value = (x[: cp.rows] for x in (query, key, value))
        rotations: Rotations | None = getattr(packed_seq_params, "rotations", None)
        expansion: Expansion | None = getattr(packed_seq_params, "expansion", None)
        rotary = None
        if rotations is not None:
            query, key, rotary = rotations.apply(cp, query, key)
        keys: dict[str, Any] = {"key": key, "value": value}
        if expansion is not None:
            keys = {"key": key.squeeze(1), "expand": expansion, "parameters": expansion.parameters}
        causal = _is_causal(attn_mask_type or self.attn_mask_type)
        over = cp if causal else without_causal_mask(cp)
        out: Tensor = over.attention(
            query,
            **keys,
            causal=causal,
            window_size=self.window_size,
            softmax_scale=self.softmax_scale,
            sinks=self._sinks(query),
            comm_type=self.cp_comm_type,
            rotary_pos_emb=rotary,
            layer=self.layer_number,
        )
        return with_padding(out.flatten(1), count)

    def _check_backend(self, cp: hcp.ContextParallelHandler) -> None:
        """Refuse a handler that was made for another backend than Megatron's config names."""
        if self._backend not in ("auto", cp.kernel_family):
            raise ValueError(
                f"config.attention_backend asks for hcp's backend {self._backend!r}, but the "
                f"handler of the micro-batch has {cp.kernel_family!r}: give hcp.Config("
                f"attention_backend={self._backend!r}), or take hcp_megatron.config_from_args(args)"
            )

    def _sinks(self, query: Tensor) -> Tensor | None:
        if self._off_by_one:
            return query.new_zeros(query.shape[1])
        return self.softmax_offset

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        """Return the sinks, sharded by head as in Megatron's own core attention."""
        own = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            {"softmax_offset": 0} if own else {},
            sharded_offsets,
            tp_group=self.pg_collection.tp,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


def _is_causal(kind: AttnMaskType) -> bool:
    if kind not in _CAUSAL:
        names = ", ".join(each.name for each in _CAUSAL)
        raise ValueError(f"attn_mask_type is {kind.name!r}, expected one of {names}")
    return _CAUSAL[kind]


def _comm_type(config: Any, layer_number: int) -> CommType | None:
    """Return the comm type of a layer, of the config's one or many. None: the handler's first."""
    given = config.cp_comm_type
    if not isinstance(given, (list, tuple)):
        return given
    return given[(layer_number - 1) % len(given)]


def _refuse(config: Any, dropout: float, attention_type: str) -> None:
    """Refuse, by its option's name, what hcp's attention does not compute."""
    options = {
        "attention_dropout": (dropout, 0.0),
        "fused_single_qkv_rope": (config.fused_single_qkv_rope, False),
        "qk_clip": (getattr(config, "qk_clip", False), False),
        "log_max_attention_logit": (getattr(config, "log_max_attention_logit", False), False),
        **_mrope_options(config),
        "flash_decode": (config.flash_decode, False),
    }
    for name, (given, expected) in options.items():
        if given != expected:
            raise ValueError(
                f"config.{name} is {given}, expected {expected}: hcp's attention does not do it"
            )
    if attention_type != "self":
        raise ValueError(f"attention_type is {attention_type!r}, expected 'self'")


def _mrope_options(config: Any) -> dict[str, Any]:
    """What does not go with multimodal rotary embedding. Megatron's model leaves it out of latent
    attention, and gives interleaved pairs angles of 3 rows."""
    section = getattr(config, "mrope_section", None)
    if section is None:
        return {}
    if config.multi_latent_attention:
        return {"mrope_section": (section, None)}
    return {"rotary_interleaved": (config.rotary_interleaved, False)}


# ---- positions -----------------------------------------------------------------------------------


class OneRank:
    """A CP group of one rank, for Megatron's code that cuts positions by its group: they are cut
    already."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class RowsOf:
    """A rotary module that returns the angles of this rank's rows, not those of the whole
    table."""

    def __init__(self, rotary: Any, cp: hcp.ContextParallelHandler, rows: int) -> None:
        self._rotary, self._cp, self._rows = rotary, cp, rows

    def get_rotary_seq_len(self, *args: Any, **options: Any) -> int:
        return self._cp.get_rotary_seq_len()

    def __call__(self, positions: int, **options: Any) -> Any:
        table = self._rotary(positions, packed_seq=True)
        if isinstance(table, tuple):  # angles and a factor
            return self.rows(table[0]), *table[1:]
        return self.rows(table)

    def rows(self, table: Tensor) -> Tensor:
        return with_padding(self._cp.get_emb_on_this_cp_rank(table), self._rows)


def _as_one_run(params: Any, cp: hcp.ContextParallelHandler, count: int) -> Any:
    """Return params of one sequence of all rows on one rank. Under them Megatron's own rotary
    embedding takes row i's angles from row i of the table. Their bounds stay on the CPU, where
    Megatron reads them without waiting for the GPU."""
    bounds = torch.tensor([0, count], dtype=torch.int32)
    rows = dataclasses.replace(
        params,
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        local_cp_size=None,
        cp_group=None,
        **({"total_tokens": None} if hasattr(params, "total_tokens") else {}),
    )
    rows.cp_handler = cp
    return rows


class _Positioned:
    """A mixin for Megatron's self-attention: its rows have the positions of the plan."""

    fused_rope: bool
    """Whether hcp rotates queries and keys, and not Megatron."""
    send_latents: bool
    """Whether the rows of a latent attention travel before they are projected, where they can."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        if not self.fused_rope and config.apply_rope_fusion:
            raise ValueError(
                "config.apply_rope_fusion is True with fused_rope=False of hcp_layer_spec, "
                "expected one of them: the fused rotation of packed rows under any degree is hcp's"
            )
        if self.fused_rope and isinstance(self, MLASelfAttention):
            check_latent(type(self), config)
        super().__init__(config, *args, **options)  # type: ignore[call-arg]

    def forward(  # type: ignore[no-untyped-def]
        self,
        hidden_states,
        attention_mask,
        *args,
        rotary_pos_emb=None,
        packed_seq_params=None,
        **options,
    ):
        group, config = self.pg_collection.cp, self.config  # type: ignore[attr-defined]
        cp = handler_of(packed_seq_params, group, config)
        count = packed_seq_params.rows
        params = _as_one_run(packed_seq_params, cp, count)
        made = self._twin(cp, count)
        if self._hands_on(cp):
            params.expansion = hand_on(made)
        latent = isinstance(self, MLASelfAttention) or is_absorbed(type(self))
        angles = _angles_of(packed_seq_params, config)
        if self.fused_rope and not latent:
            # Megatron is given no table, so it rotates nothing.
            params.rotations = rotations_of(self, cp, rotary_pos_emb, angles)
        elif angles is not None:
            options["rotary_pos_emb"] = angles
        elif rotary_pos_emb is not None:
            options["rotary_pos_emb"] = self._rows_of(rotary_pos_emb, cp, count)
        return super(_Positioned, made).forward(  # type: ignore[misc]
            hidden_states, attention_mask, *args, packed_seq_params=params, **options
        )

    def _hands_on(self, cp: hcp.ContextParallelHandler) -> bool:
        """Whether latent rows travel, and are projected where they are received."""
        wanted = self.send_latents and self.fused_rope and isinstance(self, MLASelfAttention)
        return wanted and sends_latents(self, cp)

    def _twin(self, cp: hcp.ContextParallelHandler, count: int) -> Any:
        """This layer for one call, on whose rank rows have their own positions."""
        groups = copy.copy(self.pg_collection)  # type: ignore[attr-defined]
        groups.cp = OneRank()
        absorbed = is_absorbed(type(self))
        if not (absorbed or isinstance(self, MLASelfAttention)):
            return twin(self, pg_collection=groups)
        if self.fused_rope and not absorbed:
            return latent_twin(self, cp, count, pg_collection=groups)
        positions = RowsOf(self.rotary_pos_emb, cp, count)  # type: ignore[attr-defined]
        return twin(self, pg_collection=groups, rotary_pos_emb=positions)

    def _rows_of(self, tables: Any, cp: hcp.ContextParallelHandler, count: int) -> Any:
        """Angles of this rank's rows, out of one table of Megatron's or several."""
        positions = RowsOf(None, cp, count)
        if isinstance(tables, Tensor):
            return positions.rows(tables)
        return tuple(None if each is None else positions.rows(each) for each in tables)


def _angles_of(params: Any, config: Any) -> Tensor | None:
    """The angles (T, 1, 1, R) of a micro-batch's rows under multimodal rotary embedding, None under
    any other."""
    section = getattr(config, "mrope_section", None)
    if section is None:
        return None
    angles: Tensor | None = getattr(params, "angles", None)
    if angles is None:
        raise ValueError(
            f"config.mrope_section is {section} and the model gave the micro-batch no angles of "
            "its rows, expected a model of hcp_model_class(GPTModel) with "
            "position_embedding_type='mrope'"
        )
    return angles


def is_absorbed(attention: type) -> bool:
    """Whether a layer is Megatron's latent attention over latent rows themselves, that of DSA."""
    return any(base.__name__ == "AbsorbedMLASelfAttention" for base in attention.__mro__)


@cache
def positioned(attention: type, fused_rope: bool, send_latents: bool = True) -> type:
    """Derive a class of self-attention whose rows have the positions of the plan.
    `fused_rope`: hcp rotates queries and keys, and not Megatron. `send_latents`: see
    `hcp_layer_spec`."""
    members = {
        "__module__": __name__,
        "fused_rope": fused_rope,
        "send_latents": send_latents,
    }
    return type(f"Hcp{attention.__name__}", (_Positioned, attention), members)
