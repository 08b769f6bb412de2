"""Where a device's time goes: the kernels of a trace by what they do, what overlaps, and gaps.

Times are integers in nanoseconds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from common.timing import Step, synchronize

# ---- what kernels do -----------------------------------------------------------------------------

FORWARD, BACKWARD, AROUND = "forward", "backward", "around"
PACK, MERGE, FILL, TORCH = "pack", "merge", "fill", "torch"
READ, COPY, NCCL = "read", "copy", "nccl"
WAIT = "wait"

_PATTERNS = {
    PACK: r"(?<![a-z_])(move|turn|stage)_rows|^hcp::(pack|unpack|rotate|stage|arrive|cut)",
    MERGE: r"(?<![a-z_])(merge|sum)_rows|^hcp::(merge|sum|reduce)",
    READ: r"(?<![a-z_])read_rows|^hcp::read",
    WAIT: r"(?<![a-z_])(set_signals|wait_signals|set_stamp|end_exchange)",
    NCCL: r"nccl",
    COPY: r"^Memcpy",
    FILL: r"^Memset|FillFunctor|^aten::(zero|fill|zeros|zeros_like|full)_?$",
    AROUND: r"flash.*(preprocess|postprocess|combine|convert_dq|convert_dkv|dot_do_o)"
    r"|tile_?cumsum|CuSeqlensToBlocks|CuBlocksToBatch|PrepareScheduler",
    BACKWARD: r"(flash|fmha|attention|attn|sdpa).*(bwd|backward|bprop)"
    r"|(bwd|backward|bprop).*(flash|fmha|attention|attn|sdpa)",
    FORWARD: r"flash|fmha|attention|attn|sdpa",
}
GROUPS = (FORWARD, BACKWARD, AROUND, PACK, MERGE, READ, COPY, NCCL, WAIT, FILL, TORCH)
"""What a kernel does. ``AROUND``: before and after a backward's main kernel. ``TORCH``: all else.
``READ`` waits for its peers inside."""

ATTENTION, WORK, EXCHANGE, WAITS, IDLE = "attention", "work", "exchange", "waits", "idle"
KINDS = {
    ATTENTION: (FORWARD, BACKWARD, AROUND),
    WORK: (PACK, MERGE, FILL, TORCH),
    EXCHANGE: (READ, COPY, NCCL),
    WAITS: (WAIT,),
}
"""Where several run at once, the time is the first one's of these."""

_OF_PATTERNS = [(group, re.compile(text, re.IGNORECASE)) for group, text in _PATTERNS.items()]


def group_of(name: str) -> str:
    """Return what a kernel, a copy or (on the CPU) an operator does, by its name in a trace."""
    return next((group for group, pattern in _OF_PATTERNS if pattern.search(name)), TORCH)


def short(name: str) -> str:
    """Return a kernel's name without its types and arguments, 40 characters at most."""
    by_dsl = re.search(r"Flash[A-Za-z]+\d*", name)
    if by_dsl and "(" not in name:
        return by_dsl[0][:40]
    functor = re.search(r"\w+Functor\b", name)
    if functor:
        return functor[0][:40]
    if name.startswith(("Mem", "aten::", "hcp::")):
        return name[:40]
    plain = re.sub(r"^void |\(anonymous namespace\)::", "", name)
    return re.sub(r"[<(].*", "", plain).split("::")[-1][:40]


# ---- analysis ------------------------------------------------------------------------------------


class Event(NamedTuple):
    """Something that ran on a device."""

    name: str
    stream: int
    start: int
    duration: int
    queued: int | None = None
    """When the host had queued it. None: unknown."""


class Gap(NamedTuple):
    """A time in which nothing ran."""

    start: int
    duration: int
    before: str
    after: str
    unqueued: int | None
    """How long of it the host had not queued what came after. None: unknown."""


class Profile(NamedTuple):
    """Where the time between the first event and the last one went."""

    begin: int
    wall: int
    busy: dict[str, int]
    """By group: the time in which any of it ran."""
    shares: dict[str, int]
    """By kind, and ``IDLE``: together the wall."""
    overlap: int
    """The time in which more than one ran."""
    gaps: list[Gap]
    """The longest first."""
    kernels: dict[str, tuple[int, int]]
    """By name: how often it ran, and the sum of its durations."""

    @property
    def unqueued(self) -> int:
        """The part of the idle time in which the host had not queued what came after."""
        return sum(gap.unqueued or 0 for gap in self.gaps)


def profile_of(events: Sequence[Event]) -> Profile:
    """Return where the time of some events went, whatever their order."""
    busy, shares = dict.fromkeys(GROUPS, 0), dict.fromkeys((*KINDS, IDLE), 0)
    overlap, gaps = 0, list[Gap]()
    groups = {event.name: group_of(event.name) for event in events}
    running: Counter[str] = Counter()
    last: int | None = None
    ended = ""
    for time, begun, done in _moments(events):
        duration = 0 if last is None else time - last
        active = [group for group, n in running.items() if n > 0]
        if last is not None and duration:
            for group in active:
                busy[group] += duration
            shares[_kind_of(active)] += duration
            overlap += duration * (sum(running.values()) > 1)
            if not active:
                gaps.append(_gap(last, duration, ended, begun[0]))
        running.update(groups[event.name] for event in begun)
        running.subtract(groups[event.name] for event in done)
        last, ended = time, done[-1].name if done else ended
    kernels: dict[str, tuple[int, int]] = {}
    for event in events:
        count, total = kernels.get(event.name, (0, 0))
        kernels[event.name] = count + 1, total + event.duration
    begin = min((event.start for event in events), default=0)
    gaps.sort(key=lambda gap: -gap.duration)
    return Profile(begin, sum(shares.values()), busy, shares, overlap, gaps, kernels)


def _moments(events: Sequence[Event]) -> Iterator[tuple[int, list[Event], list[Event]]]:
    """Yield each time at which events begin or end, with these, in order."""
    moments: dict[int, tuple[list[Event], list[Event]]] = {}
    for event in events:
        moments.setdefault(event.start, ([], []))[0].append(event)
        moments.setdefault(event.start + event.duration, ([], []))[1].append(event)
    for time in sorted(moments):
        yield time, *moments[time]


def _kind_of(active: Sequence[str]) -> str:
    return next((kind for kind, own in KINDS.items() if any(g in own for g in active)), IDLE)


def _gap(start: int, duration: int, before: str, after: Event) -> Gap:
    unqueued = None if after.queued is None else min(max(after.queued - start, 0), duration)
    return Gap(start, duration, before, after.name, unqueued)


def alike(gaps: Sequence[Gap]) -> list[tuple[Gap, int, int]]:
    """Return one gap, the longest, of those between the same two kernels, how many these are, and
    the sum of their durations. The longest first."""
    found: dict[tuple[str, str], list[Gap]] = {}
    for gap in sorted(gaps, key=lambda gap: -gap.duration):
        found.setdefault((gap.before, gap.after), []).append(gap)
    return [(own[0], len(own), sum(gap.duration for gap in own)) for own in found.values()]


# ---- recording -----------------------------------------------------------------------------------

_MARK = re.compile(r"spin_kernel|^aten::erfinv_$")
_NO_WORK = re.compile(r"^hcp: |^nccl:|^ProfilerStep|^(Context|Stream|Event) Sync|^Stream Wait")
"""Ranges and waits that a trace has on a device's lines, beside what runs."""


def recorded(step: Step, device: torch.device, calls: int) -> list[Event]:
    """Record some calls, queued one after the other from a common start of all ranks: kernels and
    copies on a GPU, outermost operators on the CPU. A call before them is left out.

    Raises RuntimeError if the profiler has seen nothing of the device.
    """
    cuda = device.type == "cuda"
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=False) as seen:
        step()
        synchronize(device)
        dist.barrier()
        synchronize(device)
        _mark(device)
        for _ in range(calls):
            step()
        synchronize(device)
    assert seen.profiler is not None
    results: Any = seen.profiler.kineto_results
    events = (_on_gpu if cuda else _on_cpu)(results.events())
    marks = [event.start + event.duration for event in events if _MARK.search(event.name)]
    if not marks:
        raise RuntimeError(
            f"torch.profiler has recorded {len(events)} events of {device} and not the mark, "
            f"expected it before the calls: does another tool profile this process?"
        )
    return [event for event in events if event.start >= marks[-1]]


def _mark(device: torch.device) -> None:
    """Run what no layer runs."""
    if device.type == "cuda":
        torch.cuda._sleep(1)
    else:
        torch.zeros(1).erfinv_()


def _on_gpu(traced: Iterable[Any]) -> list[Event]:
    given = list(traced)
    queued: Mapping[int, int] = {
        event.correlation_id(): event.start_ns() + event.duration_ns()
        for event in given
        if event.device_type().name != "CUDA"
        and event.name().startswith("cu")
        and event.correlation_id()
    }
    return [
        Event(
            event.name(),
            event.device_resource_id(),
            event.start_ns(),
            event.duration_ns(),
            queued.get(event.correlation_id()),
        )
        for event in given
        if event.device_type().name == "CUDA"
        and not event.is_user_annotation()
        and not _NO_WORK.search(event.name())
    ]


def _on_cpu(traced: Iterable[Any]) -> list[Event]:
    """Operators that no other operator called."""
    own = [event for event in traced if event.name().startswith(("aten::", "hcp::"))]
    own.sort(key=lambda event: (event.start_ns(), -event.duration_ns()))
    events: list[Event] = []
    ends: dict[int, int] = {}
    for event in own:
        thread, start = event.start_thread_id(), event.start_ns()
        if start >= ends.get(thread, 0):
            ends[thread] = start + event.duration_ns()
            events.append(Event(event.name(), thread, start, event.duration_ns()))
    return events
