"""A short measurement of kernels on this GPU, against PyTorch's FlashAttention-2."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hcp.attention.kernels import Call, Launch, PackedKernel
from hcp.attention.kernels.speeds import HEADS, KEY_HEADS, SIZE
from hcp.exchange.tables import Entry

PACKS = (
    (8192,),
    (4096, 2048, 1024, 512, 256, 128, 64, 64),
    (1024,) * 8,
    (512,) * 16,
    (128,) * 64,
)
ROUNDS, REPEATS = 3, 2
DTYPE = torch.bfloat16
SCALE = SIZE**-0.5
TOLERANCE = 0.05
"""Most that a result may be off, as a share of the largest expected."""

Seconds = list[tuple[float, float]]
"""Forward and backward of each pack, host time included; infinite where it takes no backward."""


class Trial(NamedTuple):
    seconds: dict[str, Seconds]
    """Of each kernel that computes every pack, by name."""
    failed: dict[str, str]
    """Why the others do not."""


def measure(base: PackedKernel, kernels: Mapping[str, PackedKernel], device: torch.device) -> Trial:
    """Measure kernels and a base, named "torch", whose results they must reproduce.

    The random state of torch stays as it is.
    """
    running = dict(kernels)
    trial = Trial({name: [] for name in ("torch", *running)}, {})
    generator = torch.Generator(device).manual_seed(0)

    def reproducing(rows: _Rows) -> dict[str, _Pack]:
        """Run all on a pack. A kernel that fails, or gives other results, has no further one."""
        packs = {"torch": _Pack(base, rows)}
        expected = packs["torch"].results()
        for name in [*running]:
            try:
                pack = _Pack(running[name], rows)
                if not pack.has_forward:
                    raise ValueError(f"it takes no causal pack of {DTYPE} with heads of {SIZE}")
                pack.check(expected)
                packs[name] = pack
            except Exception as error:  # any error of a library: others go on
                trial.failed[name] = f"{type(error).__name__}: {error}"
                del running[name], trial.seconds[name]
        return packs

    for lengths in PACKS:
        packs = reproducing(_Rows.draw(whole_launch(lengths), generator))
        forwards = _taking_turns({name: pack.forward for name, pack in packs.items()}, device)
        able = {name: pack.backward for name, pack in packs.items() if pack.has_backward}
        backwards = _taking_turns(able, device)
        for name in packs:
            trial.seconds[name].append((forwards[name], backwards.get(name, math.inf)))
    return trial


def whole_launch(lengths: Sequence[int]) -> Launch:
    """Whole causal sequences, end to end."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return Launch([Entry(at, n, at, n, 1 - n, 0) for at, n in zip(starts, lengths, strict=True)])


class _Rows(NamedTuple):
    launch: Launch
    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor

    @classmethod
    def draw(cls, launch: Launch, generator: torch.Generator) -> _Rows:
        def random(rows: slice, heads: int) -> Tensor:
            shape, device = (rows.stop - rows.start, heads, SIZE), generator.device
            return torch.randn(shape, generator=generator, device=device, dtype=DTYPE)

        keys = random(launch.keys, KEY_HEADS), random(launch.keys, KEY_HEADS)
        return cls(launch, random(launch.queries, HEADS), *keys, random(launch.queries, HEADS))


class _Pack:
    """A kernel's calls over the rows of a pack."""

    def __init__(self, kernel: PackedKernel, rows: _Rows) -> None:
        self._kernel, self._rows = kernel, rows
        self.has_forward, self.has_backward = (
            kernel.takes(Call(rows.launch, rows.query, rows.value, backward, False))
            for backward in (False, True)
        )
        if self.has_forward:
            self._out, self._lse = self.forward()

    def forward(self) -> tuple[Tensor, Tensor]:
        launch, query, key, value, _ = self._rows
        return self._kernel.forward(launch, query, key, value, SCALE)

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        launch, query, key, value, grad = self._rows
        known = self._out, self._lse
        return self._kernel.backward(launch, grad, None, query, key, value, *known, SCALE)

    def results(self) -> list[Tensor]:
        """The output, its log-sum-exp and, if it has them, gradients."""
        return [self._out, self._lse, *(self.backward() if self.has_backward else ())]

    def check(self, expected: list[Tensor]) -> None:
        names = ("output", "log-sum-exp", "queries' gradient", "keys' gradient", "values' gradient")
        for name, got, want in zip(names, self.results(), expected, strict=False):
            error = float((got - want).abs().max() / want.abs().max())
            if not error <= TOLERANCE:
                raise ArithmeticError(
                    f"the {name} is off by {error:.3f} of its largest, expected <= {TOLERANCE}"
                )


def _taking_turns(
    steps: Mapping[str, Callable[[], object]], device: torch.device
) -> dict[str, float]:
    """Seconds of each step: the median of rounds in which they take turns. One more round warms
    up."""
    rounds = [
        {name: _seconds(step, device) for name, step in steps.items()} for _ in range(ROUNDS + 1)
    ]
    return {name: statistics.median(taken[name] for taken in rounds[1:]) for name in steps}


def _seconds(step: Callable[[], object], device: torch.device) -> float:
    _finish(device)
    begun = time.perf_counter()
    for _ in range(REPEATS):
        step()
    _finish(device)
    return (time.perf_counter() - begun) / REPEATS


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
