"""The handler that layers receive in place of a process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from hcp._ranges import ranged
from hcp._this_process import BoundToProcess
from hcp._words import CommType, GradReduce, QkvFormat, ScanType
from hcp.attention import latent, operator
from hcp.attention import layer as attention
from hcp.attention import qkv_format as formats
from hcp.attention import rotary as rope
from hcp.attention.checks import window_of
from hcp.attention.cross import CrossAttention, CrossOptions
from hcp.attention.options import AttentionOptions
from hcp.attention.prepared import LayerCall, LayerOptions, Prepared, prepared_of
from hcp.attention.scan import Scan
from hcp.attention.schedules import Asked, CommChoices, Schedules
from hcp.attention.sparse import SparseAttention
from hcp.attention.whole_sequences import WholeSequences
from hcp.exchange.agreement import LayerName, refuse_transforms
from hcp.exchange.calls import Calls, HandlerPart
from hcp.exchange.layout import (
    Layout,
    position_count,
    positions_of,
    rows_may_vary,
    whole_cu_seqlens,
)
from hcp.exchange.routes import Routes
from hcp.exchange.row_calls import RowCalls
from hcp.exchange.sums import HandlerGroup, SequenceValues
from hcp.exchange.tables import Origin
from hcp.exchange.transport import Transport
from hcp.megatron_style import core_attention as core_attn
from hcp.megatron_style import packed
from hcp.planning.plan import Plan
from hcp.step.loss import LossTokens, check_grad_reduce, check_losses, masked_sum, mean_loss
from hcp.step.moved_names import MovedNames
from hcp.step.payloads import LocalPayload, Splits


class ContextParallelHandler(MovedNames, BoundToProcess):
    """The context parallelism that layers use, for one rank and micro-batch.

    Made by :func:`hcp.dispatch`, unchanged from then on, and passed to layers explicitly: the
    backward of one micro-batch may run while a later one is in its forward. T below is ``rows``.
    A deep copy of what holds a handler holds the same handler; pickling raises
    NotImplementedError.
    """

    _ELSEWHERE = HandlerPart._ELSEWHERE

    kernel_family = "auto"
    """The backend whose kernels compute attention: see :func:`hcp.get_cp_handler_cls`."""
    comm_types: tuple[CommType, ...] = ("p2p",)
    """The comm types of a handler that is not told others."""

    def __init__(
        self,
        plan: Plan,
        micro_batch: int,
        transport: Transport,
        *,
        comm_types: Sequence[CommType] | None = None,
        hierarchical_context_parallel_sizes: Sequence[int] = (),
        window_sizes: Sequence[tuple[int, int]] = (),
        heads: Sequence[tuple[int, int]] = (),
        sources: Sequence[int] | None = None,
        loss_tokens: float | LossTokens | None = None,
        payloads: Splits | None = None,
        step: int = 0,
        stamp_call_sites: bool = False,
        scan_type: ScanType = "auto",
        on_device: bool = True,
    ) -> None:
        """Prepare what layers will ask for. :func:`hcp.dispatch` makes handlers; make one yourself
        to try a plan without samples.

        Args:
            plan: the plan.
            micro_batch: its place in the plan, from 0.
            transport: carries rows between the ranks of the plan: ``groups.transport``.
            comm_types: those that layers will name, the first being the default; None: those of the
                class.
            hierarchical_context_parallel_sizes: of the levels of "a2a+p2p", the ring last.
            window_sizes: sliding windows that compiled layers will name. Others are prepared when
                they are first used.
            heads: (query heads, key-value heads) of compiled layers under "a2a+p2p" or "auto".
            sources: the rank that loaded each sequence, for dispatch and combine.
            loss_tokens: of the whole batch, for the loss. Handlers of one batch may share
                LossTokens.
            payloads: how each payload is split.
            step: the number of the step, the same on all ranks, which compare it in every exchange.
            stamp_call_sites: also compare where in the trainer's source each call is made, for
                finding ranks that make calls of one kind in different orders.
            scan_type: how recurrent layers get past the borders of ranks: "pass_states",
                "sequence_to_head", or "auto", by bytes.
            on_device: False where :meth:`hcp.Step.to_device` brings the tables later, on the thread
                whose layers run.
        """
        if plan.masks and type(self).attention is not ContextParallelHandler.attention:
            raise ValueError(
                f"the plan has masks, which the attention of {type(self).__name__} does not take, "
                "expected a backend whose keys hcp moves, such as 'auto' or 'torch'"
            )
        layout = Layout(plan, micro_batch, transport.rank)
        self.plan = plan
        self.layout = layout
        self.micro_batch = micro_batch
        self._origin = Origin(plan.checksum, step, micro_batch)
        group = range(layout.first_rank, layout.first_rank + layout.degree)
        self._calls = calls = Calls(transport, self._origin, group, stamp_call_sites)
        self.rows = layout.rows
        """Rows of this rank, T. May be 0."""
        self.degree = layout.degree
        """Ranks that compute these sequences; 0 where this rank has none."""
        self.cu_seqlens = layout.cu_seqlens
        """int32 (sequences + 1,): local rows of each sequence, summed."""
        self.position_ids = positions_of(layout)
        """int64 (T,): each row's position: its place in its sequence, or what the sequence's mask
        says; 0 in padding."""
        whole = whole_cu_seqlens(layout)  # refuses more tokens than schedules should see
        self.max_seqlen = max(layout.lengths, default=0)
        """Tokens of the longest sequence, 0 on a rank without rows."""
        self._position_count = position_count(layout)
        if not isinstance(loss_tokens, LossTokens):
            loss_tokens = LossTokens(loss_tokens)
        self._loss_tokens = loss_tokens
        self._transport = transport
        self._schedules = Schedules(
            layout,
            transport,
            self.comm_types if comm_types is None else comm_types,
            hierarchical_context_parallel_sizes,
            kernel_family=self.kernel_family,
            step=step,
            numbers=calls.numbers,
        )
        self._schedules.prepare_all(window_sizes, heads)
        self._layers: dict[tuple[object, ...], tuple[LayerOptions, Prepared]] = {}
        self._cross = CrossAttention(layout, transport, calls, self._origin, self.kernel_family)
        self._routes = routes = Routes(layout, sources)
        self._rows = RowCalls(transport, calls, routes)
        self._splits = {} if payloads is None else payloads
        self.comm = CommChoices(self._schedules)
        """The comm types that layers use, and the bytes that they receive."""
        self.group = HandlerGroup(layout, transport, calls)
        """The ranks that compute these sequences, and sums over them."""
        self.scan = Scan(layout, transport, calls, routes, scan_type)
        """Rows before a span and states between spans, for layers that scan their own rows."""
        self.sequences = SequenceValues(layout, transport, calls, routes, self.cu_seqlens)
        """A value of each sequence: summed, repeated for rows, or brought back."""
        self.sparse = SparseAttention(layout, transport, calls)
        """Attention to chosen keys."""
        self.whole = WholeSequences(layout, transport, calls, self._schedules, whole)
        """Whole sequences of some heads, for layers that scan all rows."""
        if on_device:
            self._to_device()

    def _to_device(self, copy: Callable[[Tensor], Tensor] | None = None) -> None:
        """Bring the tables of rows to the device of the domain, for :class:`hcp.Step`. ``copy``:
        copies a table to it."""
        self._replace_tables(copy or (lambda table: table.to(self.device, non_blocking=True)))
        self.position_ids = rows_may_vary(self.position_ids)

    def _pin(self) -> None:
        """Put the tables of rows into memory from which GPUs copy while hosts go on."""
        self._replace_tables(Tensor.pin_memory)

    def _replace_tables(self, change: Callable[[Tensor], Tensor]) -> None:
        self.cu_seqlens = self.sequences._cu_seqlens = change(self.cu_seqlens)
        self.position_ids = change(self.position_ids)
        self.whole.cu_seqlens = change(self.whole.cu_seqlens)

    @property
    def head_chunks(self) -> int:
        """Chunks in which layers of this micro-batch compute their heads, one after the other: as
        few as the plan's memory model says that fit. A layer has at most its key-value heads."""
        return self._schedules.head_chunks

    @property
    def loss_tokens(self) -> float | None:
        """Loss tokens of the whole batch, None if nobody counted them."""
        return self._loss_tokens.count

    @cached_property
    def payloads(self) -> dict[str, LocalPayload]:
        """This rank's part of each payload of the samples, by name."""
        given = self.layout, self._rows
        return {name: LocalPayload(name, split, *given) for name, split in self._splits.items()}

    @property
    def device(self) -> torch.device:
        """The device of the domain's rows."""
        return self._transport.device

    # ---- attention ----

    @overload
    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = ...,
        *,
        return_lse: Literal[False] = ...,
        **options: Unpack[AttentionOptions],
    ) -> Tensor: ...

    @overload
    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = ...,
        *,
        return_lse: Literal[True],
        **options: Unpack[AttentionOptions],
    ) -> tuple[Tensor, Tensor]: ...

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
        softmax_scale: float | None = None,
        sinks: Tensor | None = None,
        softcap: float = 0.0,
        dropout_p: float = 0.0,
        return_lse: bool = False,
        comm_type: CommType | None = None,
        qkv_format: QkvFormat = "thd",
        rotary_pos_emb: Tensor | rope.Rotary | None = None,
        layer: LayerName = None,
        mask: str | None = None,
        expand: latent.Expand | None = None,
        parameters: Sequence[Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute attention of this rank's rows over their whole sequences, with gradients.

        Every rank of the group calls it with the same arguments. Differentiable once. Under
        ``torch.autocast`` query, key and value are cast to its dtype first (float64 is not), as for
        PyTorch's scaled_dot_product_attention, after they are rotated.

        Args:
            query: (T, H, D), float64, float32, bfloat16 or float16.
            key: (T, G, D), with H a multiple of G; with ``expand`` latent rows (T, W).
            value: (T, G, E); left out with ``expand``.
            causal: whether a token sees none after itself.
            window_size: (left, right), FlashAttention's sliding window: the token at i sees those
                from i - left to i + right, -1 being no limit; with ``causal``, none after i.
                Positions are what counts in a plan with masks: in a tree those of a path.
            softmax_scale: by default 1 / sqrt(D).
            sinks: (H,), a learned logit of each head, one more score in every row's softmax, with
                no value. Its gradient is this rank's share: sum over the domain, as for any
                parameter.
            softcap: scores s become softcap * tanh(s / softcap), where a kernel does so: the
                formula for float32 and float64, or the packages flash-attn-4, flash-attn-3 and
                flash-attn.
            dropout_p: refused unless 0: drop out after the attention.
            return_lse: also return the log-sum-exp.
            comm_type: one of those that the handler was made for (default: the first).
            qkv_format: "thd", or "sbhd" (rows, sequences, heads, size) or "bshd" (sequences, rows,
                ...) where all sequences have one length; the results come in it too. No copy, but
                for "sbhd" with several sequences.
            rotary_pos_emb: rotates queries and keys first, as ``apply_rotary_pos_emb`` does both,
                in fewer passes: what ``rotary`` gives, once for all layers, or a table of its
                ``freqs``.
            layer: the layer's number or name, by default the path of the module that calls. Ranks
                compare it, so that two layers of one kind that ranks call in different orders are
                an error, as calls of different kinds are. A compiled layer's is not compared.
                Needed where no module holds the layer.
            mask: the name of one of the plan's masks (default: the first), in a plan that has some.
                It says what tokens see, in place of ``causal``; ``window_size`` is a limit in
                addition.
            expand: keys travel compressed (multi-head latent attention): ``expand(rows)`` gives the
                keys (n, G, D) and values (n, G, E) of any latent rows (n, W), each from its own row
                alone. It is called for the rows of each launch, and again in the backward; ranks
                call it different numbers of times, so it may call no module that FSDP or ZeRO-3
                gathers by itself. Rotate queries and latent rows before, where they need it. Not
                under the comm types that exchange heads, "a2a" and "a2a+p2p", nor in compiled
                layers.
            parameters: the tensors with gradients that ``expand`` uses (default: its own, where it
                is a module), none of which is made from another; their gradients are this rank's
                share.

        Returns:
            (T, H, E); with ``return_lse`` also the log-sum-exp of each row's scores and sink, (T,
            H), natural log, float32 (float64 for float64), with its gradient.

        Raises:
            ValueError: a wrong tensor.
            HcpError: ranks differ or a peer is gone.
            NotImplementedError: under torch.func, and for a second derivative.
        """
        # A compiled layer's call gets its number when it is run. Not is_compiling(), which is also
        # true where another thread compiles.
        number = 0 if torch.compiler.is_dynamo_compiling() else next(self._calls.numbers)
        if layer is None and number:
            layer = self._calls.layer(warns=True)
        try:
            if expand is not None:
                latent.check_options(value, rotary_pos_emb)
                key, value = latent.as_key_and_value(key)
            elif value is None or parameters is not None:
                raise latent.without_expand(value)
            refuse_transforms("attention", query, key, value)
            batch = query.shape[qkv_format == "sbhd"]
            if qkv_format != "thd":
                query, key, value = (
                    formats.to_rows(self.layout, x, qkv_format) for x in (query, key, value)
                )
            if type(window_size) is not tuple or {*map(type, window_size)} != {int}:  # it is a key
                window_size = window_of(window_size, False)
            options = comm_type, causal, window_size, softmax_scale, softcap, dropout_p, mask
            asked = *options, query.shape[1:], key.shape[1:], expand is not None
            known = self._layers.get(asked) if number else None
            how = (
                known[0]
                if known
                else self._schedules.options_of(
                    query, key, Asked(*options), latent=expand is not None
                )
            )
            rotary: rope.Rotary | None = None
            if rotary_pos_emb is not None:
                if not isinstance(rotary_pos_emb, rope.Rotary):
                    rotary_pos_emb = self.rotary(rotary_pos_emb)
                dense = attention.dense_heads(query), attention.dense_heads(key)
                query, key, rotary = rope.for_attention(*dense, rotary_pos_emb)
            query, key, value = attention.as_kernels_take(query, key, value)
            given = query, key, value, sinks
            if expand is None and (number == 0 or attention.is_watched(query, key, value)):
                out, lse = operator.attention(*given, how, rotary, number, layer)
            else:
                if known is None:
                    known = self._layers[asked] = how, prepared_of(how.words)
                call = LayerCall(how, known[1], rotary, number, layer)
                if expand is None:
                    out, lse = attention.attention(*given, call)
                else:
                    own = latent.parameters_of(expand, parameters)
                    out, lse = latent.attention(given, call, expand, own)
        except Exception as error:
            if number:
                self._calls.refuse("attention", number, error)
            raise
        if qkv_format != "thd":
            out, lse = (formats.from_rows(x, batch, qkv_format) for x in (out, lse))
        return (out, lse) if return_lse else out

    def core_attn(
        self,
        *,
        attn_mod: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        cp_group: Any = None,
        comm_type: CommType | None = None,
    ) -> Tensor:
        """Compute a Megatron-style layer's core attention under this micro-batch's degree.

        A module is called as Megatron does: (query, key, value, attention_mask=, attn_mask_type=,
        attention_bias=, packed_seq_params=). Every rank of the group calls it with the same
        options. ``attn_mod`` is one of

        - None or an :class:`hcp.CoreAttention`: hcp's own attention, with the module's options. It
          takes no ``attention_mask``: ``attn_mask_type`` and its options say what is hidden.
        - A module with ``set_context_parallel_group``, as Transformer Engine's: it gets
          ``cp_group``, the comm type, and this micro-batch's PackedSeqParams for the call, and its
          own group back afterwards. It cuts sequences itself, so that their lengths must be
          divisible by 2 * degree.
        - Any other: it sees whole sequences (``whole.cu_seqlens``) and its share of the heads, in
          the format of query, and computes heads independently. With fewer key-value heads than the
          exchange can split, they are repeated.

        Args:
            attn_mod: the module.
            query: (T, heads, size), or (rows, sequences, heads, size) where all sequences have one
                length.
            key: as query.
            value: as query.
            attention_mask: for a module that is not hcp's.
            attn_mask_type: Megatron's AttnMaskType or its name.
            attention_bias: for a module that is not hcp's.
            packed_seq_params: an object whose class the module's are made of; its values are not
                read.
            cp_group: the process group of the plan's ranks, or a list of one per level, innermost
                first; needed by a module that exchanges rows itself where the degree is more than
                1.
            comm_type: as in ``attention``.

        Returns:
            (T, H * E), or (rows, sequences, H * E).

        Raises:
            ValueError: what the module cannot do under this degree.
        """
        given = {
            "attention_mask": attention_mask,
            "attn_mask_type": attn_mask_type,
            "attention_bias": attention_bias,
            "packed_seq_params": None,
        }
        own = packed.PackedSeqParams
        return core_attn.core_attn(
            self,
            self._calls,
            attn_mod,
            query,
            key,
            value,
            given,
            packed_class=own if packed_seq_params is None else type(packed_seq_params),
            cp_group=cp_group,
            comm_type=comm_type,
            default_comm_type=self._schedules.default,
        )

    def at_least_one_row(self, x: Tensor, value: float = 0) -> Tensor:
        """Return one row where this rank has none: for models that cannot compute 0 rows.

        ``y[:cp.rows]`` drops that row again.

        Args:
            x: (T, ...).
            value: of the row's elements.

        Returns:
            x, or (1, ...).
        """
        if len(x) != self.rows:
            raise ValueError(f"x has {len(x)} rows, expected {self.rows}")
        if self.rows:
            return x
        # Not a new tensor: what x was made by wants a gradient.
        return F.pad(x, (0, 0) * (x.dim() - 1) + (0, 1), value=value)

    def packed_seq_params(self, cls: Any = packed.PackedSeqParams, *, cp_group: Any = None) -> Any:
        """Describe this micro-batch as Megatron's PackedSeqParams.

        Args:
            cls: Megatron-Core's own class, of any release, or hcp's of the same names.
            cp_group: the process group of the plan's ranks.

        Returns:
            ``cu_seqlens`` of whole sequences, the degree and, if given, the group. It holds the
            handler, as ``cp_handler``.

        Raises:
            ValueError: a group of other ranks.
        """
        return packed.packed_seq_params(self, cls, cp_group)

    def cross_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: ContextParallelHandler,
        *,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softmax_scale: float | None = None,
        sinks: Tensor | None = None,
        softcap: float = 0.0,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute attention of this rank's rows to keys of the same sequences that have a layout of
        their own: an encoder's, for example.

        Where masks make several documents of a sequence, its keys have as many, and the queries of
        a document see the keys of the document of its number. Those of a tree of texts see all keys
        of their sequence. What else masks hide is hidden from self-attention only.

        Every rank of the domain calls it with the same options. During the call, each rank holds
        the keys that its queries see. Not for compiled layers.

        Args:
            query: (T, H, D).
            key: (keys.rows, G, D).
            value: (keys.rows, G, E).
            keys: the handler of the keys' micro-batch, of a plan of the same ranks in which
                sequence i has the keys of sequence i here; other lengths, degrees and ranks of it
                do not matter.
            causal: aligned bottom right, as FlashAttention's: of N queries and M keys, query i
                stands at key i + M - N, so that the last query sees the last key.
            window_size: as in ``attention``, aligned as ``causal``.
            softmax_scale: as in ``attention``.
            sinks: as in ``attention``.
            softcap: as in ``attention``.
            return_lse: as in ``attention``.

        Returns:
            (T, H, E), and with ``return_lse`` the log-sum-exp (T, H). A query that sees no key
            gives 0, and -inf as its log-sum-exp.

        Raises:
            ValueError: the keys of a sequence, or of a document, are not there; keys with
                branches; queries with branches under ``causal`` or a window, since they have
                several ends, or with trees of several roots in a sequence.
        """
        out, lse = self._cross.attend(
            (query, key, value, sinks),
            (keys.layout, keys._origin),
            CrossOptions(causal, window_size, softmax_scale, softcap),
        )
        return (out, lse) if return_lse else out

    # ---- rotary embedding ----

    def get_rotary_seq_len(self) -> int:
        """Positions that a table of rotary frequencies must have: tokens of the longest sequence,
        or what masks say; 0 on a rank without rows."""
        return self._position_count

    def get_emb_on_this_cp_rank(self, emb: Tensor) -> Tensor:
        """Take the rows of a table (positions, ...) at this rank's positions: (T, ...)."""
        rope.check_positions("emb", emb, self._position_count)
        return emb[self.position_ids]

    def rotary(
        self,
        freqs: Tensor,
        *,
        interleaved: bool = False,
        mscale: float = 1.0,
        positions: Tensor | None = None,
        axes: Sequence[int] | None = None,
    ) -> rope.Rotary:
        """The rotary embedding of this rank's rows (RoPE, https://arxiv.org/abs/2104.09864): cosine
        and sine of their own positions' angles.

        A scaling of frequencies (linear, NTK, YaRN, Llama 3) is one of ``freqs``.

        Args:
            freqs: (positions, R) or Megatron's (positions, 1, 1, R), the angle of each element that
                is rotated, R even: the first R elements of a head, the rest pass.
            interleaved: pairs are elements (2 i, 2 i + 1) instead of (i, i + R / 2).
            mscale: YaRN's factor of cosine and sine (https://arxiv.org/abs/2309.00071).
            positions: int64 (T,), where they are not the places in the sequences; or (T, axes) for
                multimodal RoPE (https://arxiv.org/abs/2409.12191). Dispatch them as a field of the
                samples.
            axes: which of the axes each of the R / 2 frequencies follows.

        Returns:
            For ``attention(rotary_pos_emb=)`` and ``apply_rotary_pos_emb`` of all layers.
        """
        if positions is None:
            rope.check_positions("freqs", freqs, self._position_count)
            positions = self.position_ids
        elif positions.shape[0] != self.rows:
            raise ValueError(
                f"positions has shape {tuple(positions.shape)}, expected {self.rows} rows"
            )
        angles = rope.angles_of(freqs, positions, axes, interleaved)
        return rope.rotary_of(angles, interleaved=interleaved, mscale=mscale)

    def apply_rotary_pos_emb(
        self,
        t: Tensor,
        freqs: Tensor | rope.Rotary,
        config: Any = None,
        *,
        interleaved: bool = False,
        mscale: float = 1.0,
        positions: Tensor | None = None,
        axes: Sequence[int] | None = None,
    ) -> Tensor:
        """Rotate rows by the angles of their own positions, in one pass.

        A layer that rotates both queries and keys does better to name them in
        ``attention(rotary_pos_emb=)``.

        Args:
            t: (T, heads, D).
            freqs: as in ``rotary``, or what it gave.
            config: Megatron's, of which ``rotary_interleaved`` is taken, and
                ``multi_latent_attention``, under which neighbours become pairs of halves first.
            interleaved: as in ``rotary``.
            mscale: as in ``rotary``.
            positions: as in ``rotary``.
            axes: as in ``rotary``.

        Returns:
            t's shape and dtype; computed in float32 or wider.
        """
        if config is not None:
            t, interleaved = rope.as_configured(t, freqs, config, interleaved)
        if not isinstance(freqs, rope.Rotary):
            options: Any = {"interleaved": interleaved, "mscale": mscale}
            freqs = self.rotary(freqs, positions=positions, axes=axes, **options)
        elif interleaved or mscale != 1.0 or positions is not None or axes is not None:
            raise ValueError("options are given beside a Rotary, expected them of cp.rotary(...)")
        return rope.rotate(t, freqs)

    # ---- rows between ranks ----

    def dispatch(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """Move rows from the ranks that loaded them to the ranks that compute them, with gradients.

        Every rank of the domain calls it.

        Args:
            x: (S, ...), the sequences of this micro-batch that this rank loaded, whole, end to end
                by ascending index.
            dtype: of the result, with the bits of ``.to(dtype)`` and without a pass of memory for
                it; rows travel in the smaller dtype of the two. float64, float32, bfloat16 or
                float16 where it is not x's own.

        Returns:
            (T, ...).
        """
        return self._rows.dispatch(x, dtype)

    @ranged("hcp: combine")
    def combine(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """Undo ``dispatch``, so that combine(dispatch(x)) is x.

        Args:
            x: (T, ...).
            dtype: as in ``dispatch``.

        Returns:
            (S, ...).
        """
        return self._rows.combine(x, dtype)

    def roll_tensor(self, x: Tensor, shifts: int = -1, dims: int = 0) -> Tensor:
        """Shift rows along their documents, across the borders of ranks.

        As torch.roll within each document, but what enters at an end is zeros. In a tree of texts
        rows shift along each text, for shifts > 0: a row's predecessors are the same in all. Every
        rank of the group calls it.

        Args:
            x: any shape that has the T rows.
            shifts: the default -1 gives every row its successor's value, as labels want.
            dims: the dimension that holds the T rows, such as -1 of Megatron's labels (1, T).

        Returns:
            x's shape.

        Raises:
            ValueError: the plan has branches and shifts < 0: several tokens may follow one. Load
                targets as a field, such as :attr:`hcp.Trees.labels`.
        """
        return self._rows.roll(x, shifts, dims)

    # ---- loss ----

    @ranged("hcp: loss")
    def loss(
        self, losses: Tensor, loss_mask: Tensor, *, grad_reduce: GradReduce | None = None
    ) -> Tensor:
        """Compute this micro-batch's share of the mean loss over the whole batch.

        The gradients of all shares, summed over the domain and the micro-batches, are those of
        sum(losses * loss_mask) / loss_tokens of the batch, whatever the plan.

        Args:
            losses: (T,).
            loss_mask: (T,).
            grad_reduce: what the trainer does with gradients over the domain, which it has to say:
                "sum", or "mean" where it averages them (DDP, FSDP), which multiplies by the
                domain's size.

        Returns:
            A scalar.
        """
        check_grad_reduce(grad_reduce)
        check_losses(losses, loss_mask, self.rows)
        scale = float(self._transport.size) if grad_reduce == "mean" else 1.0
        return mean_loss(losses, loss_mask, self._loss_tokens.known(), scale)

    @ranged("hcp: loss")
    def loss_sum(self, losses: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Compute what trainers that divide themselves need.

        Args:
            losses: (T,).
            loss_mask: (T,).

        Returns:
            The sum of losses and the number of loss tokens of this rank's rows, float64.
        """
        check_losses(losses, loss_mask, self.rows)
        return masked_sum(losses.to(_F64), loss_mask), loss_mask.sum(dtype=_F64)

    def __repr__(self) -> str:
        return (
            f"ContextParallelHandler(micro_batch={self.micro_batch}, degree={self.degree}, "
            f"rows={self.rows})"
        )


_F64 = torch.float64
