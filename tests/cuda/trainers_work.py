"""What the trainers of check_trainers.py train, and how a run of theirs is watched."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Work:
    """What is trained. A step has `batch` documents, of `longest` tokens at most."""

    hidden_size: int
    layers: int
    vocabulary: int
    longest: int
    batch: int
    steps: int
    apart: float
    """Most that the losses of a step may be apart."""


WORK = {
    "cuda": Work(1024, 8, 8192, 16384, 32, 6, 2e-2),
    "cpu": Work(32, 2, 64, 64, 6, 3, 1e-5),
}


def documents(work: Work) -> list[dict[str, torch.Tensor]]:
    """Draw documents whose lengths are lognormal, as those of text are."""
    generator = torch.Generator().manual_seed(7)
    count = work.batch * work.steps
    lengths = torch.randn(count, generator=generator).exp() * work.longest / 8
    return [
        {"input_ids": torch.randint(3, work.vocabulary, (int(n),), generator=generator)}
        for n in lengths.clamp(2, work.longest)
    ]


def llama(work: Work) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=work.vocabulary,
        hidden_size=work.hidden_size,
        intermediate_size=2 * work.hidden_size,
        num_hidden_layers=work.layers,
        num_attention_heads=max(work.hidden_size // 128, 4),
        num_key_value_heads=max(work.hidden_size // 512, 2),
        max_position_embeddings=work.longest,
    )
    torch.manual_seed(3)
    return LlamaForCausalLM(config)


@dataclass
class Timed:
    """The loss of each step, and the seconds of all but the first two."""

    losses: list[float]
    ends: list[float]

    def step(self, loss: float) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.losses.append(loss)
        self.ends.append(time.perf_counter())

    def seconds(self) -> float:
        warm = min(2, len(self.ends) - 1)
        return (self.ends[-1] - self.ends[warm - 1]) / (len(self.ends) - warm)


def averaged(total: torch.Tensor) -> float:
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
