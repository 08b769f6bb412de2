"""Which layers keep, recompute and offload their rows: the fastest choice that fits."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from hcp._validate import expect_names, expect_size
from hcp.integrations.model_cost import Sizes, sizes_of
from hcp.integrations.transformers.memory.choice import ROWS, Choice, LayerRows
from hcp.integrations.transformers.memory.layer_bytes import ModelBytes, exchange_bytes
from hcp.planning import saved

GIB = 2**30
FORMAT = "hcp memory prices, version 1"
STATE_BYTES = 16
"""Bytes of a parameter on its owner: float32 weight and gradient, and both moments of Adam."""


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
    ) -> Prices:
        """Return prices by a device's rates, without measuring.

        Args:
            config: of a model of Transformers.
            matrices: operations a second of the model's products.
            attention: the same of attention's forward.
            attention_backward: the same of its backward, which has 2.5 times as many operations.
            host_rate: bytes a second between device and host.
            memory_rate: bytes a second of the device's own memory, for the update.
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
    """Whether a step may have several micro-batches. FSDP2 then holds the gradients of all
    parameters on each device, in the dtype of rows, until the last one reduces them."""

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
            layers += f"; MLPs and norms of recomputed layers in chunks of {chunks:,} rows"
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
    advice = "" if machine.offload_state else ", or offload parameters and optimizer to the host"
    raise ValueError(
        f"length is {length:,} tokens on {machine.ranks} ranks, expected {longest:,} or fewer: the "
        f"least that a device needs is {least / GIB:.2f} GiB of {machine.device_bytes / GIB:.2f}, "
        f"with {machine.host_bytes / GIB:.2f} GiB of the host a rank. Take more ranks{advice}"
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
        self.kept_forward = kept.forward.at(rows) + buffers
        self.kept_backward = kept.backward.at(rows) + buffers
        self.again_forward = again.forward.at(rows) + buffers
        self.again_backward = again.backward.at(rows) + buffers
        # All layers share the angles of the rotary embedding; tokens, labels, positions and masks.
        self.fixed = self._fixed() + rows * (2 * sizes.head_dim * counted.itemsize + 32)
        # The last hidden states, their normed form in 16 and 32 bits and their gradient, and the
        # gradient of the head's weight; logits are made in chunks of as many bytes.
        row = counted.width * (3 * counted.itemsize + 8)
        self.loss = row * rows + counted.other_parameters * counted.itemsize // 2

    def _fixed(self) -> int:
        """Parameters: the rank's share with gradients and optimizer, two layers gathered, one's
        gradients on their way, embedding and head, which stay, and gradients that are not reduced
        yet."""
        one, rest = self.counted.layer_parameters, self.counted.other_parameters
        own = 0 if self.machine.offload_state else STATE_BYTES * self._own_parameters()
        if self.machine.ranks == 1:
            return own
        waiting = self.counted.parameters if self.machine.accumulates else 0
        return own + (2 * one + rest + waiting) * self.counted.itemsize + 4 * one

    def _own_parameters(self) -> int:
        return -(-self.counted.parameters // self.machine.ranks)

    def phases(self, counts: Counts) -> dict[str, int]:
        """The most bytes on the device: in the forward, the loss, and the backward of the last
        layer under each word. What was held by layers above is gone by then."""
        lean, offloaded, again, kept = counts
        held_again = again * self.again_held
        held = held_again + kept * self.kept_held
        moving = self.again_held if lean else 0
        moving_whole = self.kept_held if offloaded else 0
        found = {"the loss": held + self.loss}
        if kept:
            found["the backward of kept layers"] = held - self.kept_held + self.kept_backward
        if kept or offloaded:
            before = held - self.kept_held if kept else moving_whole
            found["the forward"] = before + self.kept_forward
        if again:
            below = held_again - self.again_held + max(moving, moving_whole)
            found["the backward of recomputed layers"] = below + self.again_backward
        if offloaded:
            found["the backward of offloaded layers"] = moving_whole + self.kept_backward
        if lean:
            found["the backward of layers recomputed from the host"] = moving + self.again_backward
        return {name: self.fixed + size for name, size in found.items()}

    def fits(self, counts: Counts) -> bool:
        return (
            self.host_bytes(counts) <= self.machine.host_bytes
            and max(self.phases(counts).values()) <= self.machine.device_bytes
        )

    def host_bytes(self, counts: Counts) -> int:
        rows = counts.recompute_offload * self.again_held + counts.offload * self.kept_held
        state = STATE_BYTES * self._own_parameters() if self.machine.offload_state else 0
        return rows + state

    def seconds(self, counts: Counts) -> dict[str, float]:
        """Seconds of each part of a step. Copies hide behind the layer that computes beside."""
        prices, layers = self.prices, sum(counts)
        again = counts.recompute + counts.recompute_offload
        lean, whole = self.again_held / prices.host_rate, self.kept_held / prices.host_rate
        waits = counts.recompute_offload * (
            max(0.0, lean - self.forward) + max(0.0, lean - self.backward - self.matrices)
        )
        waits += counts.offload * (max(0.0, whole - self.forward) + max(0.0, whole - self.backward))
        update = self._own_parameters() * prices.parameter
        if self.machine.offload_state:  # gradients go, weights come
            update += 8 * self._own_parameters() / prices.host_rate
        return {
            "forward": layers * self.forward,
            "backward": layers * self.backward,
            "computed again": again * self.matrices,
            "waiting for copies": waits,
            "head and loss": self.rows * prices.head_row,
            "update": update,
        }

    def forecast(self, counts: Counts) -> Forecast:
        words = [word for word, n in zip(_ORDER, counts, strict=True) for _ in range(n)]
        parts, phases = self.seconds(counts), self.phases(counts)
        again = counts.recompute + counts.recompute_offload
        return Forecast(
            choice=Choice(words, self.counted.chunk_of(self.rows) if again else 0),
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
