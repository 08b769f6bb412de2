"""Gated delta nets, which pass states between ranks, or exchange rows for heads.

T rows on this rank, H value heads and G key heads of this tensor-parallel rank, K and V their
sizes.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from hcp.integrations.megatron.megatron_packed import handler_of, with_padding
from hcp.integrations.megatron.twin import named
from hcp.integrations.recurrent import convolve, delta_rule


@cache
def passing_states(net: type) -> type:
    """Derive a class of gated delta nets that follow the degree of each micro-batch.

    `net`: Megatron's GatedDeltaNet, or a class of one's own that is derived from it and has no
    other forward."""
    l2norm = named(net, "l2norm")

    class Net(net):  # type: ignore[misc, valid-type]
        def forward(  # type: ignore[no-untyped-def]
            self, hidden_states, attention_mask=None, *given, packed_seq_params=None, **options
        ):
            cp = handler_of(packed_seq_params, self.pg_collection.cp, self.config)
            projected, _ = self.in_proj(hidden_states)
            heads, keys = self.num_value_heads, 2 * self.qk_dim + self.v_dim
            sizes = [size // self.tp_size for size in (keys, self.v_dim, heads, heads)]
            mixed, gate, beta, alpha = projected[: cp.rows, 0].split(sizes, 1)
            mixed = convolve(cp, mixed, self.conv_kernel_dim, self._convolved)
            decay = -self.A_log.exp() * F.softplus(alpha.float() + self.dt_bias)
            gates = {"g": decay, "beta": beta.sigmoid()}
            rule = named(net, _RULES[bool(self.config.deterministic_mode)])
            query, key, value = self._heads(mixed)
            out = delta_rule(cp, rule, query, key, value, gates, use_qk_l2norm_in_kernel=False)
            normed = self._apply_gated_norm(out, gate.unflatten(1, (-1, self.value_head_dim)))
            rows = normed.reshape(cp.rows, sizes[1])
            return self.out_proj(with_padding(rows, len(projected))[:, None])

        def _convolved(self, rows: Tensor) -> Tensor:
            """Convolve (rows, channels) as if zeros came before the first."""
            given = F.pad(rows.t(), (self.conv_kernel_dim - 1, 0))
            weight, bias = self.conv1d.weight, self.conv1d.bias
            out = F.conv1d(given.unsqueeze(0), weight, bias, groups=len(given))
            convolved: Tensor = self.act_fn(out[0].t())
            return convolved

        def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Split (T, query | key | value) into query and key (T, H, K) and value (T, H, V)."""
            sizes = [size // self.tp_size for size in (self.qk_dim, self.qk_dim, self.v_dim)]
            query, key, value = torch.split(mixed, sizes, 1)
            query, key = (x.unflatten(1, (-1, self.key_head_dim)) for x in (query, key))
            if self.use_qk_l2norm:
                query, key = (l2norm(x.contiguous()) for x in (query, key))
            each = self.num_value_heads // self.num_key_heads
            query, key = (x.repeat_interleave(each, 1) for x in (query, key))
            return query, key, value.unflatten(1, (-1, self.value_head_dim))

    Net.__name__ = f"Hcp{net.__name__}"
    return Net


_RULES = {True: "torch_chunk_gated_delta_rule", False: "chunk_gated_delta_rule"}
"""The functions in the module of the class, by the config's `deterministic_mode`."""
