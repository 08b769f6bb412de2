"""What layers need that scan sequences, recurrent ones and convolutions: ``cp.scan``.

T rows on this rank, N spans of them: runs of consecutive tokens of one document, or of one part of
a tree of texts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hcp._validate import expect_items, plain
from hcp._words import ScanType
from hcp.attention import scan_types as scans
from hcp.exchange.agreement import Stamp, refuse_transforms, rows_like
from hcp.exchange.calls import Calls, HandlerPart
from hcp.exchange.layout import Layout, copied, halo_rows, span_rows
from hcp.exchange.move import check_rows, copy_rows_of
from hcp.exchange.routes import Routes
from hcp.exchange.states import MapRule, Maps, Parts, StatePasses, linear, pass_states
from hcp.exchange.transport import Transport
from hcp.exchange.units import guarded


class Scan(HandlerPart):
    """Rows before a span, and states that pass from span to span: ``cp.scan``."""

    def __init__(
        self,
        layout: Layout,
        transport: Transport,
        calls: Calls,
        routes: Routes,
        scan_type: ScanType,
    ) -> None:
        scans.check_scan_type(scan_type)
        self._layout, self._transport = layout, transport
        self._calls, self._routes = calls, routes
        self.type: ScanType = scan_type
        """How recurrent layers get past the borders of ranks, as it was asked for."""
        self._choices: dict[scans.ScanSizes, scans.ScanChoice] = {}
        self._halo_rows: dict[int, Tensor] = {}

    @functools.cached_property
    def span_cu_seqlens(self) -> Tensor:
        """int32 (N + 1,): rows of each of this rank's spans, summed. A span is a run of consecutive
        tokens of one document, which has at most two on a rank, unless masks cut sequences
        otherwise. In a tree of texts a span ends at each token that several others continue, or one
        elsewhere. Padding is one more span."""
        with torch.inference_mode(False):
            bounds = torch.tensor([0, *span_rows(self._layout)], dtype=torch.int64, device="cpu")
            return bounds.cumsum(0).int().to(self._transport.device)

    # ---- rows before a span ----

    def halo(self, x: Tensor, before: int) -> Tensor:
        """Put the ``before`` rows that precede each span in its document, or its text of a tree,
        before it, from the ranks that hold them, with gradients.

        A causal convolution of ``before + 1`` taps over the result, without padding, gives row r's
        output at ``halo_rows(before)[r] - before``. Every rank of the group calls it.

        Args:
            x: (T, ...).
            before: rows before each span.

        Returns:
            (T + before * spans, ...); rows of zeros where the document has begun later.
        """

        def copied(number: int) -> Tensor:
            route = self._routes.halo(before)
            check_rows(x, route.source_rows, self._transport.device)
            refuse_transforms("scan.halo", x)
            stamp = self._calls.agreed_stamp("scan.halo", number, x, before=plain(before))
            return copy_rows_of(self._transport, route, x, stamp)

        return self._calls.make("scan.halo", copied)

    def halo_rows(self, before: int) -> Tensor:
        """int64 (T,): where this rank's rows lie in what ``halo`` gives."""
        self._routes.halo(before)  # refuses a wrong number of rows
        if before not in self._halo_rows:
            with torch.inference_mode(False):
                rows = halo_rows(self._layout, before)
            self._halo_rows[before] = copied(rows, self._transport.device)
        return self._halo_rows[before]

    # ---- states ----

    def pass_states(
        self, states: Tensor, decay: Tensor | None = None, *, transition: Tensor | None = None
    ) -> Tensor:
        """Return the state that enters each span of this rank's rows, for layers with a recurrent
        state, with gradients: zeros at the start of a document. In a tree of texts a branch starts
        from the state of the token that it continues.

        A layer computes each span (``span_cu_seqlens``) from zeros first. It gives the state at the
        end of each, and what a state that enters is multiplied by until then: ``decay`` or
        ``transition``.

        Computed in float32 or wider. Ranks exchange states only, however long their rows are: all
        at once, or in rounds that double the spans which a state covers, whichever costs less by
        the plan's prices of links. Every rank of the group calls it, those without rows too.

        Args:
            states: (N, ...), at the end of each of this rank's N spans.
            decay: of the shape of states or with 1 in place of sizes: element by element, as in
                Mamba and gated linear attention.
            transition: (N, ..., K, K) for states (N, ..., K, V): from the left, as in delta nets.

        Returns:
            (N, ...), in the dtype of states.
        """

        def passed(number: int) -> Tensor:
            maps = self._linear_maps(states, decay, transition)
            kind = "decay" if transition is None else "transition"
            given = {kind: rows_like(maps.parts[1])}
            stamp = self._calls.stamp(
                "scan.pass_states", number, maps.parts[0], states.dtype, **given
            )
            (entering,) = self._passed("scan.pass_states", maps, stamp)
            return entering.to(states.dtype)

        return self._calls.make("scan.pass_states", passed)

    def pass_maps(
        self,
        maps: Sequence[Tensor],
        *,
        combine: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Tensor, ...]],
        apply: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Tensor, ...]],
        initial: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """Return the state that enters each span, by a rule of the layer's own, with gradients.

        Both functions take and give tuples of tensors (n, ...), are differentiable, and may be
        called with n = 0; ranks call them different numbers of times, as ``expand`` in
        ``attention``. They use PyTorch's operations on each of the n alone. Every rank of the group
        calls it, those without rows too.

        Args:
            maps: tensors (N, ...), the map of each of this rank's N spans: how the state after a
                span follows from the state before. Floats; computed in float32 or wider.
            combine: ``combine(earlier, later)``: of n maps and of the n maps of the spans that
                follow, the maps of both together. It is associative.
            apply: ``apply(maps, states)``: the n states after n spans, from those before.
            initial: the state at the start of a document, as tensors without N. Its gradient is
                this rank's share.

        Returns:
            Tensors (N, ...), those of the state.
        """

        def passed(number: int) -> Parts:
            parts, first = self._expect_maps(maps), self._expect_initial(initial)
            of_two, of_state = guarded("combine", combine), guarded("apply", apply)
            dtype = functools.reduce(torch.promote_types, [x.dtype for x in (*parts, *first)])
            wide = torch.promote_types(dtype, torch.float32)
            start = tuple(x.to(wide).unsqueeze(0) for x in first)

            def started(given: Parts) -> Parts:
                count = len(given[0])
                found = of_state(given, tuple(x.expand(count, *x.shape[1:]) for x in start))
                return tuple(found)

            rule = MapRule(of_two, of_state, started, start)
            made = Maps(tuple(x.to(wide) for x in parts), rule)
            others = ", ".join(str(rows_like(part)) for part in (*made.parts[1:], *start))
            stamp = self._calls.stamp("scan.pass_maps", number, made.parts[0], wide, others=others)
            return self._passed("scan.pass_maps", made, stamp)

        return self._calls.make("scan.pass_maps", passed)

    def _passed(self, operation: str, maps: Maps, stamp: Stamp) -> Parts:
        self._layout.plan.core.expect_trees(f"cp.{operation}")
        refuse_transforms(operation, *maps.parts)
        self._calls.agree(self._calls.pairs, stamp)
        with torch.autocast(self._transport.device.type, enabled=False):  # it would round maps
            return self._entering(maps, stamp)

    def _entering(self, maps: Maps, stamp: Stamp) -> Parts:
        if not self._layout.spans_continue:  # no map is used, of which backward asks for gradients
            touched, spans = sum(x[:0].sum() for x in maps.parts), len(maps.parts[0])
            return tuple(x.expand(spans, *x.shape[1:]) + touched for x in maps.rule.initial)
        return pass_states(self._transport, self._passes, maps, stamp)

    @functools.cached_property
    def _passes(self) -> StatePasses:
        return StatePasses(self._layout, self._transport.device)

    def _expect_maps(self, maps: Sequence[Tensor]) -> Parts:
        expect_items("maps", maps, "tensors")
        if not maps:
            raise ValueError("maps is empty, expected one tensor or more")
        spans = len(span_rows(self._layout))
        for i, part in enumerate(maps):
            if part.dim() < 1 or part.shape[0] != spans:
                raise ValueError(
                    f"maps[{i}] has shape {tuple(part.shape)}, expected ({spans}, ...): a part for "
                    "each of cp.scan.span_cu_seqlens's spans"
                )
            self._expect_floats(f"maps[{i}]", part)
        return tuple(maps)

    def _expect_initial(self, initial: Sequence[Tensor]) -> Parts:
        expect_items("initial", initial, "tensors")
        if not initial:
            raise ValueError("initial is empty, expected a state: one tensor or more")
        for i, part in enumerate(initial):
            self._expect_floats(f"initial[{i}]", part)
        return tuple(initial)

    def _expect_floats(self, name: str, x: Tensor) -> None:
        if not (x.is_floating_point() or x.is_complex()):
            raise ValueError(f"{name} is {x.dtype}, expected floats or complex numbers")
        if x.device.type != self._transport.device.type:
            raise ValueError(f"{name} is on {x.device}, expected {self._transport.device}")

    def _linear_maps(self, states: Tensor, decay: Tensor | None, transition: Tensor | None) -> Maps:
        """Check states and what multiplies them. Both are computed in float32 or wider."""
        spans = len(span_rows(self._layout))
        if states.dim() < 2 or states.shape[0] != spans:
            raise ValueError(
                f"states has shape {tuple(states.shape)}, expected ({spans}, ...): a state for "
                "each of cp.scan.span_cu_seqlens's spans"
            )
        if (decay is None) == (transition is None):
            given = "neither" if decay is None else "both"
            raise ValueError(f"{given} of decay and transition given, expected one of them")
        factor = (
            _expect_decay(states, decay)
            if transition is None
            else _expect_transition(states, transition)
        )
        for name, x in (("states", states), ("decay or transition", factor)):
            self._expect_floats(name, x)
        if factor.is_complex() and not states.is_complex():
            raise ValueError(
                f"states is {states.dtype} and what multiplies it is {factor.dtype}, expected "
                f"complex states too, since the result has their dtype: states.to({factor.dtype})"
            )
        wide = torch.promote_types(torch.promote_types(states.dtype, factor.dtype), torch.float32)
        zeros = states.new_zeros((), dtype=wide).expand(1, *states.shape[1:])
        rule = linear(torch.mul if transition is None else torch.matmul, zeros)
        return Maps((states.to(wide), factor.to(wide)), rule)

    # ---- the choice between states and whole sequences ----

    def choose(
        self,
        heads: int,
        *,
        row_bytes: int,
        state_bytes: int,
        exchanges: int = 2,
        row_work: int = 0,
    ) -> scans.ScanChoice:
        """Choose how a recurrent layer gets past the borders of ranks, by ``type``.

        "auto" takes what costs the busiest rank less in the forward: bytes that travel, more of
        them between nodes as the plan's prices say, 1 MiB for each round of messages, ``row_work``
        where states travel, and copies of rows where those do. It passes states where ranks cannot
        share the heads evenly. Nothing is exchanged here.

        Args:
            heads: of the layer.
            row_bytes: of one row of all heads, to whole sequences and back.
            state_bytes: of one span's state and decay or transition, as ``pass_states`` exchanges
                them.
            exchanges: calls of ``cp.whole.sequence_to_head`` and ``head_to_sequence``.
            row_work: what one row of all heads computes more where states travel, in bytes that a
                link carries in the same time.

        Returns:
            A choice whose ``used`` is "pass_states" or "sequence_to_head", the same on all ranks of
            the group.

        Raises:
            ValueError: some branch of the plan has no one parent, or "sequence_to_head" is asked
                for and ranks outnumber the heads.
        """
        self._layout.plan.core.expect_trees("cp.scan.choose")
        sizes = scans.ScanSizes(heads, row_bytes, state_bytes, exchanges, row_work)
        if sizes not in self._choices:
            self._choices[sizes] = scans.choose(self._layout, self.type, sizes)
        return self._choices[sizes]

    @property
    def choices(self) -> tuple[scans.ScanChoice, ...]:
        """The way that this rank's group uses for each recurrent layer's sizes so far, with the
        reason."""
        return tuple(self._choices.values())


def _expect_decay(states: Tensor, decay: Tensor | None) -> Tensor:
    assert decay is not None
    fits = decay.dim() == states.dim() and decay.shape[0] == states.shape[0]
    pairs = zip(decay.shape[1:], states.shape[1:], strict=False)
    if not fits or any(own not in (1, size) for own, size in pairs):
        raise ValueError(
            f"decay has shape {tuple(decay.shape)}, expected that of states, "
            f"{tuple(states.shape)}, or 1 in place of sizes after the first"
        )
    return decay


def _expect_transition(states: Tensor, transition: Tensor) -> Tensor:
    expected = *states.shape[:-1], states.shape[-2]
    if states.dim() < 3 or tuple(transition.shape) != expected:
        raise ValueError(
            f"transition has shape {tuple(transition.shape)} for states {tuple(states.shape)}, "
            "expected (spans, ..., K, K) for (spans, ..., K, V)"
        )
    return transition
