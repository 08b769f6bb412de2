"""Which layers keep, recompute and offload their rows: the fastest choice that fits."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from hcp._validate import expect_names, expect_size
from hcp._versions import installed, numbers
from hcp.integrations.model_cost import Sizes, sizes_of
from hcp.integrations.transformers.memory.choice import ROWS, Choice, LayerRows
from hcp.integrations.transformers.memory.layer_bytes import ModelBytes, exchange_bytes
from hcp.integrations.transformers.memory.weight_bytes import WeightBytes
from hcp.planning import saved

GIB = 2**30
FORMAT = "hcp memory prices, version 1"


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds on one device, and the rate of its link to the host."""

    row_forward: float
    """Of a row in one layer's forward, without attention."""
    row_backward: float
    pair_forward: float
    """Of a query-key pair in one layer's attention."""
    pair_backward: float
    head_row: float
    """Of a row in the head and the loss, both ways."""
    parameter: float
    """Of the update of a parameter that a rank owns."""
    host_parameter: float
    """Of the same on the host, with its part of the gradients' norm."""
    host_rate: float
    """Bytes a second between device and host, each way."""

    @classmethod
    def of_rates(
        cls,
        config: Any,
        *,
        matrices: float,
        attention: float,
        attention_backward: float,
        host_rate: float,
        memory_rate: float,
        host_memory_rate: float,
    ) -> Prices:
        """Return prices by a device's rates, without measuring.

        Args:
            config: of a model of Transformers.
            matrices: operations a second of the model's products.
            attention: the same of attention's forward.
            attention_backward: the same of its backward, which has 2.5 times as many operations.
            host_rate: bytes a second between device and host.
            memory_rate: bytes a second of the device's own memory, for the update.
            host_memory_rate: the same of the host's memory, for all threads of one rank.
        """
        sizes = _sizes_of(config)
        heads = sizes.heads * sizes.head_dim
        keys = sizes.key_heads * sizes.head_dim
        weights = sizes.hidden * (2 * heads + 2 * keys + 3 * sizes.feed_forward)
        row = 2 * weights / matrices
        head = 2 * sizes.hidden * config.get_text_config().vocab_size / matrices
        return cls(
            row_forward=row,
            row_backward=2 * row,
            pair_forward=4 * heads / attention,
            pair_backward=10 * heads / attention_backward,
            head_row=3 * head,
            parameter=28 / memory_rate,  # reads four numbers of Adam's, writes three, in float32
            host_parameter=40 / host_memory_rate,  # and reads gradients twice, and writes them once
            host_rate=host_rate,
        )

    def save(self, path: str | os.PathLike[str], provenance: Mapping[str, Any]) -> None:
        saved.write(path, FORMAT, {"prices": asdict(self)}, provenance)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Prices:
        """Read a file of :meth:`save` or ``hcp calibrate --memory --model``. Raises ValueError that
        names the file and the entry that is not as expected."""
        return saved.read(path, FORMAT, ("prices",), _from_entries)


def _from_entries(data: dict[str, Any]) -> Prices:
    expect_names("prices", data["prices"], Prices.__slots__)
    for name, value in data["prices"].items():
        if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
            raise ValueError(f"prices.{name} is {json.dumps(value):.60}, expected a number >= 0")
    if data["prices"]["host_rate"] == 0:
        raise ValueError("prices.host_rate is 0, expected bytes a second, > 0")
    return Prices(**data["prices"])


def shards_apart() -> bool:
    """Whether the installed Accelerate makes groups of the embedding and the head."""
    return numbers(installed("accelerate") or "0") >= (1, 14)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a model trains."""

    ranks: int
    """Over which a sequence is spread."""
    device_bytes: int
    """Of one device, for torch: less what CUDA and NCCL take, and a part for fragments."""
    host_bytes: int = 0
    """Of the host, for one rank."""
    offload_state: bool = False
    """Whether parameters, gradients and the optimizer lie on the host (FSDP2's CPU offload)."""
    accumulates: bool = False
    """Whether a step may have several micro-batches. Each device then holds the gradients of all
    parameters, in the dtype of rows, until FSDP2 reduces them in the last one."""
    apart: bool = field(default_factory=shards_apart)
    """Whether the embedding and the head are groups of FSDP2 of their own, as Accelerate 1.14 and
    later make them; by default whether the one that is installed does. Otherwise they are whole for
    all of a step, as under `fully_shard(model)`."""

    def __post_init__(self) -> None:
        for name, least in (("ranks", 1), ("device_bytes", 1), ("host_bytes", 0)):
            expect_size(f"machine.{name}", getattr(self, name), name, least=least)


class Counts(NamedTuple):
    """Layers under each word, in the order in which they stand in the model.

    The first layers wait longest for their backward, so that their rows go to the host. The last
    ones are kept: they are gone before a recomputed layer needs its memory."""

    recompute_offload: int
    offload: int
    recompute: int
    keep: int


@dataclass(frozen=True)
class Forecast:
    """A choice, and what a step of one sequence on all ranks is predicted to take."""

    choice: Choice
    length: int
    rows: int
    """Of a rank."""
    seconds: float
    """Of a step."""
    parts: Mapping[str, float]
    """Seconds of each part of a step."""
    device_bytes: int
    """The most at once on one device."""
    phases: Mapping[str, int]
    """The most bytes in each phase of a step."""
    host_bytes: int
    """Of the host, for one rank."""
    limit: int
    """``Machine.device_bytes``."""

    def told(self) -> str:
        """Return the prediction in words, for a log before the first step."""
        counts: dict[str, int] = {word: self.choice.layers.count(word) for word in ROWS}
        layers = ", ".join(f"{n} {_WORDS[word]}" for word, n in counts.items() if n)
        if chunks := self.choice.chunk_rows:
            again = "MLPs and norms of recomputed layers and " * any(
                counts[word] for word in ("recompute", "recompute_offload")
            )
            layers += f"; {again}the last norm in chunks of {chunks:,} rows"
        parts = ", ".join(f"{name} {s:.3g} s" for name, s in self.parts.items() if s)
        worst = max(self.phases, key=lambda name: self.phases[name])
        return (
            f"{self.length:,} tokens, {self.rows:,} rows a rank: predicted {self.seconds:.3g} s a "
            f"step, {self.device_bytes / GIB:.2f} of {self.limit / GIB:.2f} GiB a device, "
            f"{self.host_bytes / GIB:.2f} GiB of the host a rank\n"
            f"  layers: {layers}\n"
            f"  time: {parts}\n"
            f"  memory is fullest in {worst}; {self._why(counts)}"
        )

    def _why(self, counts: Mapping[str, int]) -> str:
        if counts["keep"] == len(self.choice.layers):
            return "all rows fit, so that nothing is computed twice or moved"
        if counts["keep"]:
            return "as many layers are kept as fit; another one would not"
        return "no layer can be kept as a whole"


_WORDS: Mapping[str, str] = {
    "keep": "kept",
    "offload": "offloaded",
    "recompute": "recomputed without attention",
    "recompute_offload": "recomputed without attention, from the host",
}


def choose(
    config: Any, counted: ModelBytes, prices: Prices, machine: Machine, length: int
) -> Forecast:
    """Choose what each layer keeps, for sequences of ``length`` tokens spread over all ranks.

    Every number of layers under every word is tried. The fastest that fits is taken.

    Args:
        config: of the model.
        counted: its bytes, see :func:`model_bytes`.
        prices: of this kind of device.
        machine: its ranks and memory.
        length: tokens of the longest sequence.

    Returns:
        The choice and its prediction: equal on all ranks for equal arguments.

    Raises:
        ValueError: nothing fits. The message has the longest length that does.
    """
    length = expect_size("length", length, "tokens", least=1)
    step = _Step(config, counted, prices, machine, length)
    fitting = (counts for counts in _all(counted.layers) if step.fits(counts))
    best = min(fitting, key=lambda counts: sum(step.seconds(counts).values()), default=None)
    if best is not None:
        return step.forecast(best)
    longest = longest_of(config, counted, prices, machine)
    least = min(max(step.phases(counts).values()) for counts in _leanest(counted.layers))
    none = "" if longest else "no length fits, and "
    advice = "" if machine.offload_state else ", or offload parameters and optimizer to the host"
    raise ValueError(
        f"length is {length:,} tokens on {machine.ranks} ranks, expected {longest:,} or fewer: "
        f"{none}the least that a device needs is {least / GIB:.2f} GiB of "
        f"{machine.device_bytes / GIB:.2f}, with {machine.host_bytes / GIB:.2f} GiB of the host a "
        f"rank. Take more ranks{advice}"
    )


def longest_of(config: Any, counted: ModelBytes, prices: Prices, machine: Machine) -> int:
    """Return the longest sequence, in tokens, that fits on all ranks; 0: none does."""

    def fits(length: int) -> bool:
        step = _Step(config, counted, prices, machine, length)
        return any(map(step.fits, _leanest(counted.layers)))

    below, above = 0, machine.ranks
    while above <= _ENDLESS and fits(above):
        below, above = above, 2 * above
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if fits(middle) else (below, middle)
    return below


_ENDLESS = 2**40


def _leanest(layers: int) -> Iterator[Counts]:
    """Choices of the least device memory: for each number of offloaded layers, the rest
    recomputed."""
    for offloaded in range(layers, -1, -1):
        yield Counts(offloaded, 0, layers - offloaded, 0)


def _all(layers: int) -> Iterator[Counts]:
    """All numbers of layers; those that move and recompute least first, which wins a tie."""
    for keep in range(layers, -1, -1):
        for recompute in range(layers - keep, -1, -1):
            for offload in range(layers - keep - recompute, -1, -1):
                yield Counts(layers - keep - recompute - offload, offload, recompute, keep)


class _Step:
    """Times and bytes of a step of one sequence, spread evenly over all ranks."""

    def __init__(
        self, config: Any, counted: ModelBytes, prices: Prices, machine: Machine, length: int
    ) -> None:
        self.counted, self.prices, self.machine = counted, prices, machine
        self.length = length
        self.rows = rows = -(-length // machine.ranks)
        sizes = _sizes_of(config)
        pairs = float(rows * length) / 2 * float(sizes.attending)
        pairs += float(rows) * min(length, sizes.window) * float(sizes.sliding)
        self.matrices = rows * prices.row_forward
        self.forward = self.matrices + pairs * prices.pair_forward
        self.backward = rows * prices.row_backward + pairs * prices.pair_backward
        kept, again = counted.of("keep", rows), counted.of("recompute", rows)
        shared = (sizes.heads, sizes.key_heads, sizes.head_dim, counted.itemsize, machine.ranks)
        buffers = exchange_bytes(*shared) * rows
        self.kept_held, self.again_held = kept.held.at(rows), again.held.at(rows)
        self.kept_forward = kept.in_forward(rows, buffers)
        self.kept_backward = kept.in_backward(rows, buffers)
        self.again_forward = again.in_forward(rows, buffers)
        self.again_backward = again.in_backward(rows, buffers)
        self.weights = WeightBytes(
            *(counted, machine.ranks),
            offloaded=machine.offload_state,
            accumulates=machine.accumulates,
            apart=machine.apart,
        )
        # All layers share the angles of the rotary embedding; tokens, labels, positions and masks.
        self.fixed = rows * (2 * sizes.head_dim * counted.itemsize + 32)
        # The last hidden states, normed, and their gradient. Logits are made in chunks of as many
        # bytes as these, rounded up to a power of two: of less than twice as many.
        self.row = rows * counted.width * counted.itemsize
        norm = counted.norm(rows)
        self.loss = norm.held.at(rows) + 4 * self.row
        self.norm_backward = norm.backward.at(rows)

    def phases(self, counts: Counts) -> dict[str, int]:
        """The most bytes on the device in each phase. Rows that were held by layers above are gone
        by then, and their gradients are there: the fullest of the layers under a word is its first
        or its last one. Rows go to the host while the next layer computes, and come back during the
        backward of the layer above if that one's came from there."""
        lean, offloaded, again, kept = counts
        held_again = again * self.again_held
        leaving = self.kept_held if offloaded else self.again_held if lean else 0
        beside_offloaded = self.kept_held if offloaded > 1 else self.again_held if lean else 0
        beside_lean = self.again_held if lean > 1 else 0
        held = held_again + kept * self.kept_held or leaving
        weights, forwards = self.weights, list[int]()
        found = {
            "the loss": weights.loss() + held + self.loss,
            "the backward of the last norm": weights.norm_backward() + held + self.norm_backward,
            "the backward of the embedding": weights.embedding_backward() + 2 * self.row,
            "the update": weights.update(),
        }

        def most(above: int, layers: int, below: int, each: int, own: int) -> int:
            """In the backward of some layers of one kind: each holds, and the most of its own."""
            first = weights.layer_backward(above) + (layers - 1) * each
            return below + own + max(first, weights.layer_backward(above + layers - 1))

        if kept:
            before = held_again + (kept - 1) * self.kept_held
            forwards.append(max(before, 0 if again else leaving) + self.kept_forward)
            found["the backward of kept layers"] = most(
                0, kept, held_again, self.kept_held, self.kept_backward
            )
        if again:
            before = (again - 1) * self.again_held
            forwards.append(max(before, leaving) + self.again_forward)
            found["the backward of recomputed layers"] = most(
                kept, again, 0, self.again_held, self.again_backward
            )
        if offloaded:
            forwards.append(beside_offloaded + self.kept_forward)
            found["the backward of offloaded layers"] = most(
                kept + again, offloaded, beside_offloaded, 0, self.kept_backward
            )
        if lean:
            forwards.append(beside_lean + self.again_forward)
            found["the backward of layers recomputed from the host"] = most(
                kept + again + offloaded, lean, beside_lean, 0, self.again_backward
            )
        found["the forward"] = weights.forward() + max(forwards)
        return {name: self.fixed + size for name, size in found.items()}

    def fits(self, counts: Counts) -> bool:
        return (
            self.host_bytes(counts) <= self.machine.host_bytes
            and max(self.phases(counts).values()) <= self.machine.device_bytes
        )

    def host_bytes(self, counts: Counts) -> int:
        rows = counts.recompute_offload * self.again_held + counts.offload * self.kept_held
        return rows + self.weights.on_host()

    def seconds(self, counts: Counts) -> dict[str, float]:
        """Seconds of each part of a step. Copies hide behind the layer that computes beside, but
        for those that the backward needs first."""
        prices, layers = self.prices, sum(counts)
        again = counts.recompute + counts.recompute_offload
        lean, whole = self.again_held / prices.host_rate, self.kept_held / prices.host_rate
        waits = whole if counts.offload else lean if counts.recompute_offload else 0.0
        waits += counts.recompute_offload * (
            max(0.0, lean - self.forward) + max(0.0, lean - self.backward - self.matrices)
        )
        waits += counts.offload * (max(0.0, whole - self.forward) + max(0.0, whole - self.backward))
        each = prices.parameter
        if self.machine.offload_state:  # gradients go, weights come
            each = prices.host_parameter + 8 / prices.host_rate
        return {
            "forward": layers * self.forward,
            "backward": layers * self.backward,
            "computed again": again * self.matrices,
            "waiting for copies": waits,
            "head and loss": self.rows * prices.head_row,
            "update": self.weights.own * each,
        }

    def forecast(self, counts: Counts) -> Forecast:
        words = [word for word, n in zip(_ORDER, counts, strict=True) for _ in range(n)]
        parts, phases = self.seconds(counts), self.phases(counts)
        return Forecast(
            choice=Choice(words, self.counted.chunk_of(self.rows)),
            length=self.length,
            rows=self.rows,
            seconds=sum(parts.values()),
            parts=parts,
            device_bytes=max(phases.values()),
            phases=phases,
            host_bytes=self.host_bytes(counts),
            limit=self.machine.device_bytes,
        )


_ORDER: tuple[LayerRows, ...] = ("recompute_offload", "offload", "recompute", "keep")
"""The fields of Counts, as words."""


def _sizes_of(config: Any) -> Sizes:
    sizes = sizes_of(config.get_text_config())
    if sizes is None:
        raise ValueError(
            f"{type(config).__name__} names no hidden_size and num_attention_heads, expected the "
            "configuration of a decoder"
        )
    return sizes
