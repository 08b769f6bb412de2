"""A handler of fixed capacity, whose layers a CUDA graph captures once for many plans."""

from __future__ import annotations

import itertools
from typing import Literal

import torch
from torch import Tensor

from hcp.attention.checks import check, scale_of, window_of
from hcp.attention.fixed_capacity import (
    Capacity,
    FixedAttention,
    FixedCall,
    FixedTables,
    words_of,
)
from hcp.attention.layer import as_kernels_take
from hcp.errors import HcpError
from hcp.exchange.agreement import refuse_transforms
from hcp.step.dispatch import Groups
from hcp.step.handler import ContextParallelHandler


class GraphHandler:
    """The handler that layers in a CUDA graph take in place of a micro-batch's.

    Its tables lie in device memory of fixed size. ``load`` replaces them, and a graph that was
    captured once computes the next micro-batch, of any plan that fits. C below is ``rows``.

    Under ``ranks`` > 1, each rank gathers the keys and values of all ``ranks`` ranks of its block
    (ranks 0 to ranks - 1 of the domain, and so on), C rows each, in every layer.
    """

    def __init__(
        self,
        groups: Groups,
        *,
        rows: int,
        sequences: int,
        max_seqlen: int | None = None,
        ranks: int = 1,
        backend: Literal["auto", "torch", "flash_attn", "flash_attn_3", "flash_attn_4"] = "auto",
    ) -> None:
        """Allocate the tables, whose size never changes.

        Args:
            groups: the process groups, or the transport, of the job.
            rows: most rows of a rank in any micro-batch.
            sequences: most sequences that a rank has tokens of.
            max_seqlen: tokens of the longest sequence; None: rows * ranks.
            ranks: of a block of the domain, within which each sequence is computed.
            backend: the FlashAttention for bfloat16 and float16, "auto" being the fastest that is
                installed. float32 and float64 use the formula over all pairs of rows, for tests.

        Raises:
            ValueError: a number below 1, or ranks that do not divide the domain. The first call
                raises it for a block that spans nodes under transport "mixed".
        """
        longest = rows * ranks if max_seqlen is None else max_seqlen
        capacity = Capacity(rows=rows, sequences=sequences, max_seqlen=longest, ranks=ranks)
        for name, value in (("rows", rows), ("ranks", ranks), *capacity._asdict().items()):
            if value < 1:
                raise ValueError(f"{name} is {value}, expected >= 1")
        self._transport = transport = groups.transport
        if transport.size % ranks:
            raise ValueError(
                f"ranks is {ranks}, expected a divisor of the {transport.size} ranks of the domain"
            )
        self.capacity = capacity
        self.rows = rows
        """Rows of every tensor, C."""
        self._tables = FixedTables(capacity, transport.device)
        self.position_ids = self._tables.positions
        """int64 (C,), in fixed memory: each row's place in its sequence; 0 where no token is."""
        self._backend = backend
        self._numbers = itertools.count(1)
        self._known: dict[tuple[object, ...], FixedAttention] = {}

    def load(self, cp: ContextParallelHandler) -> None:
        """Take the tables of a micro-batch: one copy to the device, in order on the current stream.

        Every rank of a block loads the same micro-batch before it runs or replays a layer. A
        backward uses the tables that are there when it runs: load after it, or have a handler for
        each micro-batch under way. Calls outside of graphs raise HcpError where a backward finds
        others than its forward, or a rank others than its block; replays of a graph cannot.

        Args:
            cp: the handler of the micro-batch.

        Raises:
            ValueError: a plan with masks, or a micro-batch that does not fit; alike on all ranks of
                a block.
        """
        words = words_of(self.capacity, cp.plan, cp.micro_batch, self._transport.rank)
        self._tables.load(words, f"micro-batch {cp.micro_batch} of plan {cp.plan.checksum:016x}")

    def pad(self, x: Tensor) -> Tensor:
        """Fill a tensor of a micro-batch up to the fixed number of rows.

        Args:
            x: (T, ...).

        Returns:
            (C, ...), with zeros after its rows.

        Raises:
            ValueError: more than C rows.
        """
        if len(x) > self.rows:
            raise ValueError(f"x has {len(x)} rows, expected <= {self.rows}")
        return torch.cat([x, x.new_zeros(self.rows - len(x), *x.shape[1:])])

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        softmax_scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        """Compute causal attention of this rank's rows over their whole sequences, with gradients.

        Run it once, forward and backward, before a capture. Differentiable once.

        Args:
            query: (C, H, D). Rows without a token must be finite; their results and gradients are
                0.
            key: (C, G, D).
            value: (C, G, E).
            softmax_scale: None: 1 / sqrt(D).
            window_size: (left, right), the right one -1 or 0.

        Returns:
            (C, H, E).

        Raises:
            ValueError: a wrong tensor.
            HcpError: ranks differ at the first call, or that is in a capture.
        """
        refuse_transforms("attention", query, key, value)
        query, key, value = as_kernels_take(query, key, value)
        left, right = window_of(window_size, False)
        if right > 0:
            raise ValueError(f"window_size is {window_size}, expected (left, -1) or (left, 0)")
        scale = scale_of(query, softmax_scale)
        dtypes = query.dtype, key.dtype, value.dtype
        like = query.shape, key.shape, value.shape, dtypes, left, scale
        of, number = self._known.get(like), next(self._numbers)
        if of is None:
            self._expect_no_capture()
            check((query, key, value, None), self.rows, self._transport.device)
            of = FixedAttention(
                self._tables,
                self._transport,
                query,
                key,
                value,
                scale=scale,
                window=(left, 0),
                family=self._backend,
            )
            of.agree(number)
            self._known[like] = of
        out: Tensor = FixedCall.apply(query, key, value, of, number)  # type: ignore[no-untyped-call]
        return out

    def _expect_no_capture(self) -> None:
        on_gpu = self._transport.device.type == "cuda"
        if on_gpu and self.capacity.ranks > 1 and torch.cuda.is_current_stream_capturing():
            raise HcpError(
                f"rank {self._transport.rank}: a CUDA graph captures the first call of its kind, "
                "in which ranks compare their arguments on the host: run the layer once, forward "
                "and backward, before the capture",
                code="cuda-graph",
            )
