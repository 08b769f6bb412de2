"""A step: gather lengths, then move all rows, once, to where they are computed."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import struct
import threading
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hcp._ranges import ranged
from hcp._validate import expect_groups, expect_items, expect_sizes, plain
from hcp._words import CommType, ScanType
from hcp.attention.checks import window_of
from hcp.attention.comm_types import check_comm_types, check_prices, only_degree
from hcp.attention.kernels.auto import computing
from hcp.errors import HcpError
from hcp.exchange.gather import NO_COUNT, Gathered
from hcp.exchange.layout import rows_may_vary
from hcp.exchange.transport import Transport, shares
from hcp.planning.ahead import PlanningTime
from hcp.planning.mask import Mask, MasksLike
from hcp.planning.plan import Plan
from hcp.step.announcements import Announcements
from hcp.step.device_copies import DeviceCopies
from hcp.step.fields import (
    AS_BYTES,
    Field,
    Given,
    Rules,
    Sample,
    check_rules,
    describe,
    from_bytes,
    in_tensors,
    length_of,
    said_of,
)
from hcp.step.handler import ContextParallelHandler
from hcp.step.loss import LossTokens
from hcp.step.payloads import Announced, Carrier, Sources, Splits
from hcp.step.stats import StepStats, stats_of

_log = logging.getLogger("hcp")

_lock = threading.Lock()
_told: set[object] = set()
"""What was warned of in this process."""


class Groups(Protocol):
    """The part of process groups that dispatch needs: how the domain exchanges rows."""

    @property
    def transport(self) -> Transport: ...


class StepTransport(NamedTuple):
    """How the rows of a step get to where they are computed."""

    transport: Transport
    """Carries the rows. Its device is where they lie when they are there."""
    number: int
    """The number of the step among those of the domain, the same on all ranks."""

    @classmethod
    def of(cls, groups: Groups) -> StepTransport:
        """Begin the next step, over the transport of the layers.

        Args:
            groups: the process groups, or their transport.

        Returns:
            What carries its rows.
        """
        return cls(groups.transport, next(groups.transport.steps))


class LocalBatch:
    """This rank's rows of one micro-batch: ``local.tokens`` is ``local["tokens"]``. A field of
    strings, or of values of Python's, is a tuple, of one for each sequence.

    Has no other public attribute, so that a field may have any name; iterates over the names.
    ``dict(local)`` and ``**local`` give the fields by name, unless a field is called "keys".
    """

    keys: Callable[[], KeysView[str]]
    """The names, as dict() asks for them; the field of this name, if there is one."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = dict(fields)

    def __getitem__(self, name: str) -> Tensor:
        rows: Tensor = self._fields[name]
        return rows

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("_fields", {})
        if name not in fields:
            if name == "keys":
                return fields.keys
            raise AttributeError(
                f"the samples have no field {name!r}, expected one of {sorted(fields)}"
            )
        return fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def _to_device(self, copies: DeviceCopies) -> None:
        for name, rows in self._rows():
            moved = copies.copy(rows)
            if moved is not rows:
                self._fields[name] = rows_may_vary(moved)

    def _pin(self) -> None:
        self._fields |= {name: rows.pin_memory() for name, rows in self._rows()}

    def _rows(self) -> list[tuple[str, Tensor]]:
        """The fields that are no strings."""
        return [(name, x) for name, x in self._fields.items() if isinstance(x, Tensor)]


# ---- agreement: every rank says what it has, or why it cannot ------------------------------------


def gather_or_raise(transport: Transport, prepare: Callable[[], bytes], what: str) -> list[bytes]:
    """Gather what ``prepare`` returns on every rank. If it raises on one, every rank raises: none
    waits for a rank that has given up."""
    return gather_counted_or_raise(transport, lambda: (prepare(), NO_COUNT), what).messages


def gather_counted_or_raise(
    transport: Transport, prepare: Callable[[], tuple[bytes, float]], what: str
) -> Gathered:
    """The same, where ``prepare`` also returns a count."""
    failure: Exception | None = None
    count = NO_COUNT
    try:
        said, count = prepare()
        message = b"+" + said
    except Exception as error:
        failure = error
        message = b"-" + f"{type(error).__name__}: {error}".encode()[:2000]
    gathered = transport.all_gather_counted(message, count, what)
    if failure is not None:
        raise failure
    if any(message[:1] == b"-" for message in gathered.different):
        messages = enumerate(gathered.messages)
        failed = {rank: m[1:].decode() for rank, m in messages if m[:1] == b"-"}
        reasons = "; ".join(f"rank {rank} failed: {reason}" for rank, reason in failed.items())
        raise HcpError(f"rank {transport.rank}: {reasons}", code="rank-failed")
    return gathered.map(lambda message: message[1:])


@ranged("hcp: gather_lengths")
def gather_lengths(
    samples: Iterable[Given], groups: Groups, *, fields: Rules | None = None
) -> tuple[list[int], list[int], list[Sample]]:
    """Gather the lengths of the whole global batch. Every rank of the domain calls it.

    Args:
        samples: this rank's share of the batch, possibly empty, possibly a generator that still has
            to load it: a loader that raises here becomes an error on every rank. Sequences are
            numbered by rank, then in the order given.
        groups: this rank's process groups.
        fields: see :func:`hcp.dispatch`.

    Returns:
        The lengths in tokens, the rank that loaded each sequence, and this rank's samples as a
        list.

    Raises:
        HcpError: a rank's samples could not be loaded or have a fault.
    """
    expect_groups(groups)
    loaded: list[Sample] = []

    def prepare() -> bytes:
        loaded.extend(in_tensors(samples, fields or {}))
        lengths = [length_of(sample, i, fields or {}) for i, sample in enumerate(loaded)]
        return struct.pack(f"<{len(lengths)}q", *lengths)

    messages = gather_or_raise(groups.transport, prepare, "hcp.gather_lengths")
    joined = b"".join(messages)
    lengths = list(struct.unpack(f"<{len(joined) // 8}q", joined))
    sources: list[int] = []
    for rank, message in enumerate(messages):
        sources += [rank] * (len(message) // 8)
    return lengths, sources, loaded


def gather_masks(masks: Sequence[Mask | None], groups: Groups) -> list[Mask | None]:
    """Gather the masks of the whole global batch, in the order of :func:`gather_lengths`.

    Every rank of the domain calls it.

    Args:
        masks: of this rank's samples, None for a causal one.
        groups: this rank's process groups.

    Returns:
        The masks of all sequences, for :func:`hcp.plan`.
    """

    def prepare() -> bytes:
        for i, mask in enumerate(masks):
            if mask is not None and not isinstance(mask, Mask):
                raise ValueError(f"masks[{i}] is {mask!r:.60}, expected a Mask or None")
        different = list(dict.fromkeys(mask for mask in masks if mask is not None))
        index = {mask: i for i, mask in enumerate(different)}
        own = [None if mask is None else index[mask] for mask in masks]
        return json.dumps([[mask.to_dict() for mask in different], own]).encode()

    gathered: list[Mask | None] = []
    for message in gather_or_raise(groups.transport, prepare, "hcp.step.dispatch.gather_masks"):
        dicts, own = json.loads(message)
        different = [Mask.from_dict(each) for each in dicts]
        gathered += [None if i is None else different[i] for i in own]
    return gathered


# ---- what this rank has --------------------------------------------------------------------------


def _check_samples(
    plan: Plan,
    samples: Sequence[Sample],
    sources: Sources,
    transport: Transport,
    rules: Rules,
) -> None:
    own, lengths = sources.loaded_by(transport.rank), plan.core.lengths
    if len(own) != len(samples):
        raise ValueError(
            f"samples has {len(samples)} items, expected {len(own)}: "
            f"sources says that rank {transport.rank} loaded as many"
        )
    for i, (sequence, sample) in enumerate(zip(own, samples, strict=True)):
        length = length_of(sample, i, rules)
        if length != lengths[sequence]:
            raise ValueError(
                f"samples[{i}] has {length} tokens, expected {lengths[sequence]}: "
                f"the length of sequence {sequence} in the plan"
            )


def _checked_sources(sources: Sequence[int], plan: Plan, transport: Transport) -> Sources:
    if plan.ranks != transport.size:
        raise ValueError(
            f"the plan is for {plan.ranks} ranks, expected {transport.size}: the domain's"
        )
    expect_items("sources", sources, "ranks")
    if len(sources) != len(plan.core.lengths):
        raise ValueError(f"sources has {len(sources)} items, expected {len(plan.core.lengths)}")
    if isinstance(sources, Tensor):
        sources = sources.tolist()
    with contextlib.suppress(ValueError):
        checked = Sources(sources)  # all at once, for they may be many
        if checked.lie_in(plan.ranks):
            return checked
    i, source = next(
        (i, source)
        for i, source in enumerate(sources)
        if type(plain(source)) is not int or not 0 <= source < plan.ranks
    )
    raise ValueError(f"sources[{i}] is {source!r}, expected 0 to {plan.ranks - 1}")


def _loss_tokens(samples: Sequence[Sample], loss_mask: str) -> float:
    """Count the loss tokens of this rank's samples. NO_COUNT where they have no mask."""
    if not samples or loss_mask not in samples[0]:
        return NO_COUNT
    total = 0.0
    for i, sample in enumerate(samples):
        weights = sample[loss_mask].double()
        count, least = torch.stack((weights.sum(), weights.min())).tolist()  # one wait for a device
        if least < 0:
            raise ValueError(
                f"samples[{i}][{loss_mask!r}] has {least:g}, expected weights >= 0: losses are "
                "divided by the sum of all weights. Multiply the losses by factors such as "
                "advantages, or use loss_sum and a denominator of your own"
            )
        if not math.isfinite(count):
            raise ValueError(
                f"samples[{i}][{loss_mask!r}] sums to {count}, expected a finite number of loss "
                "tokens"
            )
        total += count
    return total


def _check_layers(
    window_sizes: Sequence[tuple[int, int]], heads: Sequence[tuple[int, int]]
) -> None:
    expect_items("window_sizes", window_sizes, "(left, right)")
    for i, window in enumerate(window_sizes):
        window_of(window, False, f"window_sizes[{i}]")
    expect_items("heads", heads, "(query heads, key-value heads)")
    for i, counts in enumerate(heads):
        if len(expect_sizes(f"heads[{i}]", counts)) != 2:
            raise ValueError(f"heads[{i}] is {counts!r}, expected (query heads, key-value heads)")


def _announce(
    plan: Plan,
    samples: Sequence[Sample],
    sources: Sources,
    transport: Transport,
    comm_types: Sequence[str],
    sizes: Sequence[int],
    rules: Rules,
) -> dict[str, Any]:
    """Check what this rank gives for a step, and say what all ranks compare of it."""
    check_comm_types(comm_types, sizes, only_degree(plan))
    check_prices(comm_types, plan.cost)
    _check_samples(plan, samples, sources, transport, rules)
    return {
        "plan": f"{plan.checksum:016x}",
        "sources": zlib.crc32(sources.ranks),
        "comm_types": list(comm_types),
        "hierarchical_context_parallel_sizes": list(sizes),
        "fields": describe(samples, rules) if samples else None,
    }


_SAME_PLAN = "give every rank the same lengths, limits, cost and sources"
_SAME_TYPES = "name the same, in one order"
_MUST_AGREE = {
    "step": "call hcp.dispatch as often on every rank",
    "plan": _SAME_PLAN,
    "sources": _SAME_PLAN,
    "comm_types": _SAME_TYPES,
    "hierarchical_context_parallel_sizes": _SAME_TYPES,
    "scan_type": "name the same",
    "loss_mask": "name the same field",
    "rules": "give every rank the same fields=",
    "fields": "load the same fields on every rank",
}
"""What ranks announce that must be the same on all of them, in the order in which they compare it:
and what to do where it differs."""


# ---- the step ------------------------------------------------------------------------------------


class Step:
    """The micro-batches of one global batch on this rank, as pairs (cp, local).

    ``len(step)`` is the same on every rank; a rank without rows in a micro-batch gets 0 of them,
    and runs forward and backward all the same. A deep copy has the same handlers and copies of the
    rows. Pickling raises NotImplementedError: handlers hold connections of their process.
    """

    def __init__(
        self,
        plan: Plan,
        micro_batches: list[tuple[ContextParallelHandler, LocalBatch]],
        loss_tokens: float | None,
        sources: Sources,
        rank: int,
    ) -> None:
        self.plan = plan
        self.loss_tokens = loss_tokens
        """Loss tokens of the whole batch: the sum of every sample's loss mask."""
        self._micro_batches = micro_batches
        self._sources, self.rank = sources, rank
        self.planning: PlanningTime | None = None
        """How long its planning took, and for how much of it the trainer waited. None: it was not
        measured."""
        self.too_long = 0
        """Samples of the batch that were dropped or cut: see ``Config.too_long``."""

    @cached_property
    def own_sequences(self) -> tuple[int, ...]:
        """The sequences that this rank loaded, as indices of ``plan.lengths``, ascending."""
        return tuple(self._sources.loaded_by(self.rank))

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """The rank that loaded each sequence."""
        return tuple(self._sources.ranks)

    def arrive(self) -> None:
        """Call ``to_device``: the name until 0.3."""
        warnings.warn("Step.arrive is now Step.to_device", DeprecationWarning, stacklevel=2)
        self.to_device()

    def to_device(self) -> None:
        """Copy tables and rows to the device of the layers, where they are not there yet: for a
        step that was prepared on another thread. Neither the host nor what the GPU computes at the
        moment waits for the copies; what is queued from now on does."""
        if not self._micro_batches:
            return
        with DeviceCopies(self._micro_batches[0][0].device) as copies:
            for cp, local in self._micro_batches:
                cp._to_device(copies.copy)
                local._to_device(copies)

    def pin(self) -> None:
        """Put tables and rows into memory from which GPUs copy while hosts go on."""
        for cp, local in self._micro_batches:
            cp._pin()
            local._pin()

    def __len__(self) -> int:
        return len(self._micro_batches)

    def __iter__(self) -> Iterator[tuple[ContextParallelHandler, LocalBatch]]:
        return iter(self._micro_batches)

    def reducing_last(
        self, no_sync: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> Iterator[tuple[ContextParallelHandler, LocalBatch]]:
        """Yield the micro-batches, so that gradients are reduced over ranks in the last one only.

        Every micro-batch but the last is handed out inside a context. Use each before you take the
        next.

        Args:
            no_sync: gives the context in which a forward and its backward reduce none, such as
                ``no_sync`` of DDP or FSDP.

        Returns:
            Pairs (cp, local).
        """
        for i, micro_batch in enumerate(self, 1):
            with contextlib.nullcontext() if i == len(self) else no_sync():
                yield micro_batch

    def stats(self) -> StepStats:
        """Return what the step did, in numbers for a logger: ``step.stats().metrics()``. Call it
        after the step; before, ``layer_bytes`` is 0."""
        return self.later_stats()()

    def later_stats(self) -> Callable[[], StepStats]:
        """Note what layers have received, and return a function that computes the numbers of
        ``stats`` when somebody reads them. It keeps the plan, and neither rows nor tables."""
        received = sum([cp.comm.layer_bytes for cp, _ in self._micro_batches])
        return partial(stats_of, self.plan, received, self.planning, self.too_long)

    def combine(self, results: Iterable[Tensor]) -> list[Tensor]:
        """Bring results of tokens, such as log-probabilities, back to the samples. Gradients pass
        through where every rank has samples. Every rank of the domain calls it.

        Args:
            results: of each micro-batch, in order, (T, ...).

        Returns:
            Those of this rank's samples, (tokens, ...) each, in the order in which they were given
            to :func:`hcp.dispatch`.
        """

        def cut(rows: Tensor, loaded: list[int]) -> Sequence[Tensor]:
            return torch.split(rows, [self.plan.lengths[sequence] for sequence in loaded])

        return self._brought_back(results, lambda cp, x: cp.combine(x), cut)

    def combine_by_sequence(self, results: Iterable[Tensor]) -> list[Tensor]:
        """Bring results of sequences, such as rewards, back to the samples. Gradients and callers:
        as for ``combine``.

        Args:
            results: of each micro-batch, in order, (sequences, ...), as ``cp.sequences.sum`` has
                them; those of each group's first rank are taken.

        Returns:
            One of each of this rank's samples, in their order.
        """

        def cut(values: Tensor, _: list[int]) -> Sequence[Tensor]:
            return values.unbind()

        return self._brought_back(results, lambda cp, x: cp.sequences.combine(x), cut)

    def _brought_back(
        self,
        results: Iterable[Tensor],
        combine: Callable[[ContextParallelHandler, Tensor], Tensor],
        cut: Callable[[Tensor, list[int]], Sequence[Tensor]],
    ) -> list[Tensor]:
        """Combine each micro-batch, and ``cut`` what comes back into the sequences that this rank
        loaded."""
        each = self._checked(results)
        found: dict[int, Tensor] = {}
        idle = []
        for m, ((cp, _), x) in enumerate(zip(self._micro_batches, each, strict=True)):
            here = set(self.plan.sequences_of(m))
            loaded = [sequence for sequence in self.own_sequences if sequence in here]
            back = combine(cp, x)
            found.update(zip(loaded, cut(back, loaded), strict=True))
            if not loaded and back.requires_grad:
                idle.append(back.sum())
        if idle:  # other ranks' backwards wait for this one's
            first = self.own_sequences[0]
            found[first] = found[first] + sum(idle)
        return [found[sequence] for sequence in self.own_sequences]

    def _checked(self, results: Iterable[Tensor]) -> list[Tensor]:
        each = list(results)
        if len(each) != len(self):
            raise ValueError(
                f"results has {len(each)} items, expected {len(self)}: one of each micro-batch"
            )
        without = sorted(set(range(self.plan.ranks)) - set(self._sources.ranks))
        if without and torch.is_grad_enabled() and any(x.requires_grad for x in each):
            raise ValueError(
                f"results have gradients, and ranks {without} loaded no samples, expected some on "
                "every rank: all take part in the backward; or call it under torch.no_grad()"
            )
        return each


@ranged("hcp: dispatch")
def dispatch(
    plan: Plan,
    samples: Sequence[Given],
    sources: Sequence[int],
    groups: Groups,
    *,
    comm_types: Sequence[CommType] | None = None,
    hierarchical_context_parallel_sizes: Sequence[int] = (),
    window_sizes: Sequence[tuple[int, int]] = (),
    heads: Sequence[tuple[int, int]] = (),
    loss_mask: str = "loss_mask",
    fields: Rules | None = None,
    handler_cls: type[ContextParallelHandler] = ContextParallelHandler,
    stamp_call_sites: bool = False,
    masks: MasksLike | None = None,
    scan_type: ScanType = "auto",
    step_transport: StepTransport | None = None,
    passage: StepTransport | None = None,
) -> Step:
    """Move all rows of a global batch, once, to where the plan computes them.

    Every rank of the domain calls it. Before any row moves, ranks compare their plans, sources and
    fields; what differs or fails on one rank is an error on all of them. The first call on GPUs
    also measures kernels of which "auto" has no numbers, briefly.

    Args:
        plan: who computes what: :func:`hcp.plan`.
        samples: those that this rank loaded, in the order of their indices in ``plan.lengths``; the
            same fields, dtypes and row shapes everywhere. Numbers get the dtype that
            torch.as_tensor gives them.
        sources: the rank that loaded each sequence.
        groups: this rank's process groups; rows move over ``dp_cp``.
        comm_types: the ways in which layers will exchange keys and values, the default first. None:
            those of ``handler_cls``.
        hierarchical_context_parallel_sizes: of the levels of "a2a+p2p", the inner all-to-all first
            and the ring last. When the plan has one degree only, their product is this degree; else
            a group of degree d has the largest inner level up to the one given that divides d, has
            a query head for each of its ranks and stays in a node: ``cp.comm.choices`` says which.
        window_sizes: the sliding windows of compiled layers; others need not be named.
        heads: (query heads, key-value heads) of compiled layers under "a2a+p2p" or "auto".
        loss_mask: the field whose sum over the whole batch is its number of loss tokens.
        fields: the rules of fields that are not one row per token, by name: "sequence" (one number,
            or tensor of a fixed shape, per sample, on every rank of the sequence's group as
            (sequences, ...)), "text" (one string per sample, as a tuple), "value" (one value of
            Python's per sample, as a tuple) or an :class:`hcp.Payload`.
        handler_cls: the class of the handlers, which also says whose kernels compute attention:
            :func:`hcp.get_cp_handler_cls`. The default is "auto".
        stamp_call_sites: ranks also compare where in the trainer's source they call attention, to
            find those that call layers of one kind in different orders.
        masks: of all sequences, as :func:`hcp.plan` takes them, in place of the plan's own; the
            same on every rank (:func:`gather_masks`).
        scan_type: how recurrent layers get past the borders of ranks: "pass_states",
            "sequence_to_head", or "auto", whichever costs fewer bytes.
        step_transport: for a step that is prepared on another thread than layers run on; call
            ``Step.to_device`` before its use.
        passage: the name of ``step_transport`` until 0.3.

    Returns:
        A :class:`hcp.Step`: pairs (cp, local), one for each micro-batch.

    Raises:
        ValueError: a wrong argument on this rank.
        HcpError: ranks differ, another rank refused, or a peer is gone.
    """
    expect_groups(groups)
    transport = groups.transport
    if passage is not None:
        warnings.warn(
            "passage= of hcp.dispatch is now step_transport=", DeprecationWarning, stacklevel=2
        )
        step_transport = passage
    carrier, step = step_transport or StepTransport.of(groups)
    sizes = hierarchical_context_parallel_sizes
    comm_types = handler_cls.comm_types if comm_types is None else comm_types
    handlers: list[ContextParallelHandler] = []
    loss_tokens = LossTokens()
    splits: Splits = {}
    announced: list[Announced] = []
    loaded_by = Sources()
    own: list[Sample] = []

    def prepare() -> tuple[bytes, float]:
        nonlocal plan, loaded_by, own
        plan = plan if masks is None else plan.with_masks(masks)
        _expect_counted(plan, transport)
        _tell_of_other_kernels(plan, handler_cls, transport)
        loaded_by = _checked_sources(sources, plan, transport)
        _check_layers(window_sizes, heads)
        rules = check_rules(fields, loss_mask)
        own = list(in_tensors(samples, fields or {}))
        message = {
            "step": step,
            **_announce(plan, own, loaded_by, transport, comm_types, sizes, rules),
            "rules": {name: said_of(rule) for name, rule in sorted((fields or {}).items())},
            "loss_mask": loss_mask,
            "scan_type": scan_type,
        }
        tokens = plan.core.lengths
        lengths = [tokens[i] for i in loaded_by.loaded_by(transport.rank)]
        announced.append(Announced(own, rules, lengths))
        for micro_batch in range(plan.micro_batch_count):
            handler = handler_cls(
                plan,
                micro_batch,
                transport,
                comm_types=comm_types,
                hierarchical_context_parallel_sizes=sizes,
                window_sizes=window_sizes,
                heads=heads,
                sources=loaded_by.ranks,
                loss_tokens=loss_tokens,
                payloads=splits,
                step=step,
                stamp_call_sites=stamp_call_sites,
                scan_type=scan_type,
                on_device=step_transport is None,
            )
            handlers.append(handler)
        said = json.dumps(message | announced[0].message()).encode()
        return said, _loss_tokens(own, loss_mask)

    said = Announcements(gather_counted_or_raise(carrier, prepare, "hcp.dispatch"), carrier)
    agreed = said.agreed(_MUST_AGREE, {"plan": plan.to_dict, "sources": loaded_by.ranks.tolist})
    loss_tokens.set(said.loss_tokens)
    _tell_of_no_loss(plan, loss_tokens, loss_mask, transport)
    rules = check_rules(fields, loss_mask)
    fields_here = [
        Field(name, dtype, shape, rules.get(name)) for name, dtype, shape in agreed["fields"] or []
    ]
    rows = Carrier(plan, own, loaded_by, carrier, step)
    splits |= rows.splits(rules, announced[0], said)
    values = rows.rows(fields_here) | rows.others(fields_here, splits)
    batches = [
        LocalBatch(
            {
                field.name: from_bytes(
                    fields[field.name], values[field.name][i], cp.payloads[field.name].cu_seqlens
                )
                if fields and fields.get(field.name) in AS_BYTES
                else values[field.name][i]
                for field in fields_here
            }
        )
        for i, cp in enumerate(handlers)
    ]
    micro_batches = list(zip(handlers, batches, strict=True))
    return Step(plan, micro_batches, loss_tokens.count, loaded_by, transport.rank)


def _expect_counted(plan: Plan, transport: Transport) -> None:
    """Raise ValueError where a plan counts the buffers of exchanges, and they are larger."""
    counted = plan.memory.buffer
    held = transport.buffer_bytes if shares(transport) else 0
    if 0 < counted < held:
        raise ValueError(
            f"plan.memory.buffer is {counted:,} bytes, and the process groups hold {held:,} of "
            "each GPU, expected at most those of the plan: build them with a smaller "
            f"peer_buffer_bytes, or calibrate with --peer-buffer-bytes {held}"
        )


def _first(told: object) -> bool:
    """Whether this process has not warned of it yet."""
    with _lock:
        known = told in _told
        _told.add(told)
    return not known


def _tell_of_no_loss(
    plan: Plan, loss_tokens: LossTokens, loss_mask: str, transport: Transport
) -> None:
    """Warn once, on the first rank, of a batch in which no token has a loss."""
    if loss_tokens.count == 0 and transport.rank == 0 and _first(loss_mask):
        _log.warning(
            "hcp: no token of a global batch has a loss: %r is 0 for all %d tokens of its %d "
            "sequences, as labels of -100 make it. The loss and all gradients of this batch are 0. "
            "Check how labels are masked, and whether prompts alone fill the length at which texts "
            "are cut; further such batches are not told of",
            *(loss_mask, sum(plan.lengths), len(plan.lengths)),
        )


def _tell_of_other_kernels(
    plan: Plan, handler_cls: type[ContextParallelHandler], transport: Transport
) -> None:
    """Warn once, on the first rank, of a plan whose prices other kernels had than those that
    compute attention."""
    own = handler_cls.attention is ContextParallelHandler.attention
    if transport.rank > 0 or not plan.kernels or not own:
        return
    here = tuple(computing(handler_cls.kernel_family, transport.device))
    if here == plan.kernels or not _first((plan.kernels, here)):
        return
    _log.warning(
        "the plan goes by prices of the attention kernels %s, and %s compute attention here: "
        "measure prices of these by `hcp calibrate --attention-backend %s --out "
        "cost.json`, and plan with `--cost cost.json` or hcp.CostModel.load",
        ", ".join(plan.kernels),
        ", ".join(here),
        handler_cls.kernel_family,
    )
