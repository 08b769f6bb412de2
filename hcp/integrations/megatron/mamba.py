"""Mamba mixers, in which each rank scans its own rows and states pass between ranks, or each scans
whole sequences of some heads.

T rows on this rank, S tokens of its group's sequences, H heads and G groups of this tensor-parallel
rank, P head size, N state size.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import hcp
from hcp.attention.scan_types import PASS_STATES, SEQUENCE_TO_HEAD, ScanChoice
from hcp.integrations.megatron.megatron_packed import handler_of, with_padding
from hcp.integrations.megatron.twin import named, twin
from hcp.integrations.recurrent import convolve, mamba_states, mamba_work, scan_mamba


class HeadShare:
    """Replaces Megatron's MambaContextParallel for one micro-batch.

    It says which heads this rank scans, gives their weights, and moves rows there and back. The
    number of heads is at least the degree."""

    def __init__(self, whole: Any, cp: hcp.ContextParallelHandler) -> None:
        """`whole`: Megatron's object, whose sizes and weights are used."""
        self._whole, self._cp = whole, cp
        self.cp_size, self.cp_rank = 1, 0  # what remains is local
        # Branch dev of Megatron-LM compares it with that of packed_seq_params.
        self.cp_group = getattr(whole, "cp_group", None)
        heads, groups = whole.nheads_local_tp, whole.ngroups_local_tp
        self._units = _units(heads, groups, max(1, cp.degree))
        self._heads, self._own_units = cp.whole.head_slice(heads), cp.whole.head_slice(self._units)
        self.headdim = whole.d_inner_local_tp // heads
        self.nheads_local_tpcp = self._heads.stop - self._heads.start
        self.ngroups_local_tpcp = self._own_units.stop - self._own_units.start
        self.d_inner_local_tpcp = self.nheads_local_tpcp * self.headdim

    def set_context_parallel_group(self, cp_group: Any) -> None:
        """Keep the heads of this rank, which those of `packed_seq_params` say already. Branch dev
        calls it before and after a scan."""
        self.cp_group = cp_group

    def pre_conv_ssm(self, zxbcdt: Tensor, packed_seq_params: Any = None) -> Tensor:
        """Exchange (T, 1, z | x | B | C | dt) of all heads for (S, 1, ...) of this rank's heads."""
        whole, heads = self._whole, self._whole.nheads_local_tp
        inner, state = whole.d_inner_local_tp, whole.ngroups_local_tp * whole.d_state
        z, x, b, c, dt = zxbcdt[: self._cp.rows, 0].split(
            [inner, inner, state, state, heads], dim=1
        )
        by_head = torch.cat(
            [z.unflatten(1, (heads, -1)), x.unflatten(1, (heads, -1)), dt[..., None]], 2
        )
        by_unit = torch.cat([self._spread(b), self._spread(c)], 2)
        mine = self._cp.whole.sequence_to_head(by_head)
        z, x, dt = mine.split([self.headdim, self.headdim, 1], 2)
        b, c = self._cp.whole.sequence_to_head(by_unit).chunk(2, 2)
        return torch.cat([part.flatten(1) for part in (z, x, b, c, dt)], 1)[:, None]

    def post_conv_ssm(self, y: Tensor, packed_seq_params: Any = None) -> Tensor:
        """Exchange (S, 1, P * heads of this rank) for (T, 1, P * H)."""
        rows = y[:, 0].unflatten(1, (self.nheads_local_tpcp, self.headdim))
        out = self._cp.whole.head_to_sequence(rows, self._whole.nheads_local_tp).flatten(1)
        return with_padding(out, packed_seq_params.rows)[:, None]

    def _spread(self, part: Tensor) -> Tensor:
        """Expand (T, G * N) to (T, units, N): a group's rows once for each unit of its heads."""
        groups = self._whole.ngroups_local_tp
        return part.unflatten(1, (groups, -1)).repeat_interleave(self._units // groups, 1)

    def _channels(self, weight: Tensor) -> Tensor:
        """Take the channels x | B | C of the convolution that belong to this rank's heads."""
        whole = self._whole
        inner, state = whole.d_inner_local_tp, whole.ngroups_local_tp * whole.d_state
        x, b, c = weight.split([inner, state, state])
        own = x.unflatten(0, (whole.nheads_local_tp, -1))[self._heads].flatten(0, 1)
        spread = [
            part.unflatten(0, (whole.ngroups_local_tp, -1))
            .repeat_interleave(self._units // whole.ngroups_local_tp, 0)[self._own_units]
            .flatten(0, 1)
            for part in (b, c)
        ]
        return torch.cat([own, *spread])

    def get_conv1d_weight(self) -> Tensor:
        return self._channels(convolution_of(self._whole)[0])

    def get_conv1d_bias(self) -> Tensor:
        return self._channels(convolution_of(self._whole)[1])

    def get_dt_bias(self) -> Tensor:
        bias: Tensor = self._whole.dt_bias_cp1[self._heads]
        return bias

    def get_A_log(self) -> Tensor:
        log: Tensor = self._whole.A_log_cp1[self._heads]
        return log

    def get_D(self) -> Tensor:
        skip: Tensor = self._whole.D_cp1
        if not self._whole.D_has_hdim:
            return skip[self._heads]
        return skip.unflatten(0, (self._whole.nheads_local_tp, -1))[self._heads].flatten()


def convolution_of(whole: Any) -> tuple[Tensor, Tensor]:
    """Return the weight and the bias. Release 0.16 keeps the convolution, 0.19 its parameters."""
    if hasattr(whole, "conv1d_cp1"):
        return whole.conv1d_cp1.weight, whole.conv1d_cp1.bias
    return whole.conv1d_weight_cp1, whole.conv1d_bias_cp1


def _units(heads: int, groups: int, degree: int) -> int:
    """Return the number of equal parts of the heads, none of which spans two groups or ranks."""
    even = math.lcm(groups, degree)
    return even if heads % degree == 0 and heads % even == 0 else heads


LONG_SPAN = 4096
"""Rows with which a span fills a GPU by itself."""


def _by_span(cp: hcp.ContextParallelHandler) -> bool:
    """Whether each span has a call of the kernel for itself, which then gives its state: on all
    ranks of the group or on none, by the spans that zigzag makes of a document."""
    spans = 2 * cp.degree * len(cp.layout.stretches)
    return sum(cp.layout.lengths) >= LONG_SPAN * spans


@cache
def sharing_heads(mixer: type) -> type:
    """Derive a class of Mamba mixers that follow the degree of each micro-batch."""

    class Mixer(mixer):  # type: ignore[misc, valid-type]
        def forward(  # type: ignore[no-untyped-def]
            self, hidden_states, inference_context=None, *, packed_seq_params=None, **options
        ):
            cp = handler_of(packed_seq_params, self.pg_collection.cp, self.config)
            if cp.scan.type == SEQUENCE_TO_HEAD:  # the kernel starts all sequences from zeros
                cp.plan.core.expect_no_branches(f"A Mamba mixer under scan_type {cp.scan.type!r}")
            choice = self._choice(cp, hidden_states)
            if cp.degree == 0:
                return self._no_rows(hidden_states)
            if cp.layout.has_branches or (cp.degree > 1 and choice.used == PASS_STATES):
                return self._by_states(cp, hidden_states)
            own = twin(self, cp=HeadShare(self.cp, cp))
            return super(Mixer, own).forward(
                hidden_states, inference_context, packed_seq_params=packed_seq_params, **options
            )

        def _choice(self, cp: hcp.ContextParallelHandler, hidden_states: Tensor) -> ScanChoice:
            whole, size = self.cp, hidden_states.element_size()
            heads, inner = whole.nheads_local_tp, whole.d_inner_local_tp
            units = _units(heads, whole.ngroups_local_tp, max(1, cp.degree))
            return cp.scan.choose(
                heads,
                row_bytes=(3 * inner + heads + 2 * units * whole.d_state) * size,
                state_bytes=(inner * whole.d_state + heads) * 4,
                exchanges=3,
                row_work=mamba_work(heads, inner // heads, whole.d_state, 1 if _by_span(cp) else 2),
            )

        def _by_states(self, cp: hcp.ContextParallelHandler, hidden_states: Tensor) -> Any:
            """Scan this rank's rows of all heads."""
            whole, projected = self.cp, self.in_proj(hidden_states)[0]
            heads, groups = whole.nheads_local_tp, whole.ngroups_local_tp
            inner, state = whole.d_inner_local_tp, groups * whole.d_state
            z, mixed, dt = projected[: cp.rows, 0].split([inner, inner + 2 * state, heads], 1)
            mixed = convolve(cp, mixed, convolution_of(whole)[0].shape[-1], self._convolved)
            x, b, c = mixed.split([inner, state, state], 1)
            x, b, c = x.unflatten(1, (heads, -1)), *(y.unflatten(1, (groups, -1)) for y in (b, c))
            out = self._scanned(cp, x, dt, b, c).flatten(1)
            y = with_padding(out * F.silu(z), len(projected))[:, None]
            return self.out_proj(self.norm(y) if self.rmsnorm else y)

        def _convolved(self, rows: Tensor) -> Tensor:
            """Convolve (rows, channels) as if zeros came before the first."""
            weight, bias = convolution_of(self.cp)
            fused = named(mixer, "causal_conv1d_fn")
            if fused is not None:
                given = rows.t().unsqueeze(0)  # channels last
                out = fused(given, weight[:, 0], bias, activation=self.activation)
                convolved: Tensor = out[0].t()
                return convolved
            given = F.pad(rows.t(), (weight.shape[-1] - 1, 0)).unsqueeze(0)
            convolved = F.conv1d(given, weight, bias, groups=len(weight))[0].t()
            return self.act(convolved)

        def _scanned(
            self, cp: hcp.ContextParallelHandler, x: Tensor, dt: Tensor, b: Tensor, c: Tensor
        ) -> Tensor:
            """(T, H, P), by steps (T, H), and what rows write and read (T, G, N)."""
            whole = self.cp
            bias, rate = whole.dt_bias_cp1.float(), -whole.A_log_cp1.float().exp()
            skip = whole.D_cp1.float()
            if whole.D_has_hdim:
                skip = skip.unflatten(0, (x.shape[1], -1))
            steps = F.softplus(dt.float() + bias)
            kernel = named(mixer, "mamba_chunk_scan_combined")

            def each(spans: list[slice]) -> tuple[Tensor, Tensor]:
                """Kernels of single spans give states."""
                options = {"D": skip, "dt_bias": bias, "dt_softplus": True}
                found = [
                    kernel(
                        *(y[span][None].contiguous() for y in (x, dt)),
                        *(rate, b[span][None], c[span][None], self.chunk_size),
                        return_final_states=True,
                        **options,
                    )
                    for span in spans
                ]
                outs, states = zip(*found, strict=True)
                return torch.cat([out[0] for out in outs]), torch.cat(states)

            def together(spans: list[slice]) -> tuple[Tensor, Tensor]:
                numbers = torch.arange(len(spans), device=x.device, dtype=torch.int32)
                seq_idx = numbers.repeat_interleave(cp.scan.span_cu_seqlens.diff())[None]
                given = x[None], dt[None], rate, b[None], c[None], self.chunk_size
                options = {"D": skip, "dt_bias": bias, "dt_softplus": True, "seq_idx": seq_idx}
                out = kernel(*(y.contiguous() for y in given[:2]), *given[2:], **options)
                scaled = x.float() * steps[..., None]
                return out[0], mamba_states(scaled, steps * rate, b.float(), spans)

            scan = each if _by_span(cp) else together
            return scan_mamba(cp, x, steps * rate, c.float(), scan, skip)

        def _no_rows(self, hidden_states: Tensor) -> Any:
            """Compute without a scan. Every weight takes part, since DDP waits for gradients."""
            projected, _ = self.in_proj(hidden_states)
            y = projected[..., : self.d_inner_local_tp]
            whole = self.cp
            weights = [whole.dt_bias_cp1, whole.A_log_cp1, whole.D_cp1, *convolution_of(whole)]
            y = y + sum((w.sum() * 0).to(y.dtype) for w in weights)
            return self.out_proj(self.norm(y) if self.rmsnorm else y)

    Mixer.__name__ = f"Hcp{mixer.__name__}"
    return Mixer
