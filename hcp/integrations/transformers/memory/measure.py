"""Measure on a device the prices by which layers keep, recompute or offload their rows."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import hcp
from hcp.integrations.columns import causal_lm_sample
from hcp.integrations.transformers.attention import register_hcp_attention
from hcp.integrations.transformers.memory.chooser import Prices
from hcp.integrations.transformers.memory.layers import layers_of
from hcp.integrations.transformers.model import model_inputs
from hcp.tools.memory import allocated_on_gpu

COPY_BYTES = {"cpu": 2**26, "cuda": 2**30}


@dataclass(frozen=True)
class Measured:
    """Prices, and what they were fitted to."""

    prices: Prices
    seconds: Sequence[tuple[int, float, float]]
    """(tokens, of a layer's forward, of its backward)."""
    held: Sequence[tuple[int, int]]
    """(rows, bytes that a kept layer held), by the allocator of a GPU; empty without one."""


def measure(
    config: Any, device: torch.device, dtype: torch.dtype, lengths: Sequence[int], repeats: int = 3
) -> Measured:
    """Measure one layer of a model, its head, updates on both sides, and the link to the host.

    The layer runs through hcp's attention, on whole sequences of one rank. A line of matrices,
    which grows with the rows, and a square of attention are fitted to its seconds.

    Args:
        config: of a causal language model of Transformers. Weights are random.
        device: where it runs, and where it will train.
        dtype: of weights and rows.
        lengths: two or more numbers of tokens. The longest should have attention take most of the
            time.
        repeats: of each measurement; the median counts.

    Returns:
        The prices, all of them >= 0, with the measurements.

    Raises:
        ValueError: fewer than two lengths, or times that do not grow with them.
    """
    lengths = sorted(set(lengths))
    if len(lengths) < 2:
        raise ValueError(f"lengths is {lengths}, expected two different numbers of tokens or more")
    model = _of_one_layer(config, device, dtype)
    register_hcp_attention(model)
    layer = _Layer(model, device)
    seconds = [(n, *layer.seconds(n, repeats)) for n in lengths]
    forward, backward = (_fit([(s[0], s[i]) for s in seconds]) for i in (1, 2))
    held = [(n, layer.held(n)) for n in lengths] if device.type == "cuda" else []
    prices = Prices(
        row_forward=forward[0],
        row_backward=backward[0],
        pair_forward=forward[1],
        pair_backward=backward[1],
        head_row=_head_seconds(model, device, dtype, lengths[0], repeats),
        parameter=_update_seconds(device, repeats),
        host_parameter=_update_seconds(torch.device("cpu"), repeats, clips=True),
        host_rate=_host_rate(device, repeats),
    )
    return Measured(prices, seconds, held)


def _of_one_layer(config: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
    small = copy.deepcopy(config)
    text = small.get_text_config()
    text.num_hidden_layers = 1
    if kinds := getattr(text, "layer_types", None):
        text.layer_types = [max(set(kinds), key=kinds.count)]
    with torch.device(device):
        made: nn.Module = transformers.AutoModelForCausalLM.from_config(small, dtype=dtype)
    return made.train()


class _Layer:
    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        (self.layer,) = layers_of(model)

    def seconds(self, tokens: int, repeats: int) -> tuple[float, float]:
        """Seconds of forward and backward over one sequence of so many tokens."""
        found = self._with(tokens, lambda compute: self._timed(compute, repeats))
        return median(f for f, _ in found), median(b for _, b in found)

    def held(self, tokens: int) -> int:
        def bytes_of(compute: Callable[[], Tensor]) -> int:
            compute()
            return allocated_on_gpu(compute)[1]

        return int(self._with(tokens, bytes_of))

    def _timed(self, compute: Callable[[], Tensor], repeats: int) -> list[tuple[float, float]]:
        found = []
        for _ in range(repeats + 1):
            start = self._now()
            out = compute()
            middle = self._now()
            out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]
            found.append((middle - start, self._now() - middle))
        return found[1:]

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _with(self, tokens: int, use: Callable[[Callable[[], Tensor]], Any]) -> Any:
        """Call ``use`` with what computes the layer over one sequence of this rank."""

        def work(groups: Any) -> Any:
            plan = hcp.plan([tokens], ranks=1, max_tokens_per_rank=tokens)
            sample = causal_lm_sample({"input_ids": torch.ones(tokens, dtype=torch.long)})
            ((cp, local),) = hcp.dispatch(plan, [sample], [0], groups)
            (hidden, *others), named = self._arguments(model_inputs(cp, local))
            rows = hidden.detach().requires_grad_()

            def compute() -> Tensor:
                out: Any = self.layer(rows, *others, **named)
                result: Tensor = out[0] if isinstance(out, tuple) else out
                return result

            return use(compute)

        return hcp.loopback(1, work, device=self.device)[0]

    def _arguments(self, inputs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        seen: list[Any] = []
        hook = self.layer.register_forward_pre_hook(
            lambda module, given, named: seen.append((given, named)), with_kwargs=True
        )
        try:
            with torch.no_grad():
                self.model(**inputs, logits_to_keep=1)
        finally:
            hook.remove()
        found: tuple[tuple[Any, ...], dict[str, Any]] = seen[0]
        return found


def _fit(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Seconds of a row and of a pair: least squares of relative errors, neither below 0."""
    rows = torch.tensor([[n, n * n / 2] for n, _ in points], dtype=torch.float64)
    times = torch.tensor([s for _, s in points], dtype=torch.float64)
    scaled, ones = rows / times.unsqueeze(1), torch.ones_like(times)
    scale = scaled.amax(0)
    row, pair = (torch.linalg.lstsq(scaled / scale, ones).solution / scale).tolist()
    if row >= 0 and pair >= 0:
        return row, pair
    alone = [max(0.0, float((scaled[:, i] @ ones) / scaled[:, i].square().sum())) for i in (0, 1)]
    errors = [float((scaled[:, i] * alone[i] - 1).square().sum()) for i in (0, 1)]
    if min(errors) > 0.5 * len(points):
        raise ValueError(f"seconds by tokens are {points}, expected times that grow with tokens")
    return (alone[0], 0.0) if errors[0] <= errors[1] else (0.0, alone[1])


def _median_seconds(device: torch.device, repeats: int, call: Callable[[], object]) -> float:
    found = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return median(found[1:])


def _head_seconds(
    model: Any, device: torch.device, dtype: torch.dtype, rows: int, repeats: int
) -> float:
    """Of a row, forward and backward, where logits of so many rows fit."""
    head = model.get_output_embeddings()
    rows = min(rows, 4096)
    hidden = torch.zeros(rows, head.in_features, device=device, dtype=dtype, requires_grad=True)
    labels = torch.zeros(rows, dtype=torch.long, device=device)

    def call() -> None:
        nn.functional.cross_entropy(head(hidden).float(), labels).backward()  # type: ignore[no-untyped-call]

    return _median_seconds(device, repeats, call) / rows


def _update_seconds(device: torch.device, repeats: int, *, clips: bool = False) -> float:
    """Of a parameter. ``clips``: the norm of its gradients counts, too."""
    count = 2**22 if device.type == "cpu" else 2**26
    weight = nn.Parameter(torch.zeros(count, device=device))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)

    def update() -> None:
        if clips:
            nn.utils.clip_grad_norm_([weight], 1.0)
        optimizer.step()

    return _median_seconds(device, repeats, update) / count


def _host_rate(device: torch.device, repeats: int) -> float:
    """Bytes a second of the slower direction."""
    on_gpu = device.type == "cuda"
    count = COPY_BYTES[device.type]
    here = torch.zeros(count, dtype=torch.uint8, device=device)
    there = torch.zeros(count, dtype=torch.uint8, pin_memory=on_gpu)
    out = _median_seconds(device, repeats, lambda: there.copy_(here, non_blocking=on_gpu))
    back = _median_seconds(device, repeats, lambda: here.copy_(there, non_blocking=on_gpu))
    return count / max(out, back)
