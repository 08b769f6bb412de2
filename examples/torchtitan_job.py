"""A job for torchtitan's own command line: packed documents, a CP degree for each micro-batch.

    torchrun --nproc-per-node 2 examples/torchtitan_job.py --module torchtitan_job --config small
    torchrun ... --training.steps 100 --context_parallel.max_seqlen_per_dp_cp_rank 512

Trains on CPU ranks, or with a GPU for each rank; torchtitan prints the loss of each step. Needs
torchtitan. `small` is what the job is: three names of hcp's, and one option, stand in a
configuration that is otherwise torchtitan's. On GPUs `-m torchtitan.train` may stand in place of
this file's path, with this folder on PYTHONPATH. Every option of `hcp.Config` is a flag.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
from torch import Tensor

# Without GPUs: what torchtitan asks of a device's module, before it is imported.
ON_GPUS = torch.cuda.is_available()
CPU = SimpleNamespace(
    set_device=lambda device: None,
    device_count=lambda: 1,
    current_device=lambda: 0,
    get_device_name=lambda device=None: "cpu",
    get_device_properties=lambda device=None: SimpleNamespace(total_memory=1 << 30, name="cpu"),
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
    memory_stats=lambda device=None: {},
    synchronize=lambda: None,
)
if not ON_GPUS:
    vars(torch._utils)["_get_device_module"] = lambda name: CPU
    vars(torch._utils)["_get_available_device_type"] = lambda: "cpu"

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.train import main  # noqa: E402

import hcp  # noqa: E402
from hcp.integrations.torchtitan import (  # noqa: E402
    ContextParallelTrainer,
    ContextParallelValidator,
    PackedContextParallel,
)

VOCABULARY, ROWS, WORLD = 2048, 64, int(os.environ.get("WORLD_SIZE", 1))


def small() -> Any:
    """The configuration. For a job of your own only the lines with hcp's names differ."""
    model = model_registry(
        "debugmodel", attn_backend="varlen", converters=[PackedContextParallel.Config()]
    )
    del model.model.layers[2:]
    return Job.Config(  # on GPUs ContextParallelTrainer.Config
        model_spec=model,
        context_parallel=hcp.Config(
            max_seqlen_per_dp_cp_rank=2 + ROWS // WORLD, eval_context_parallel_size=WORLD
        ),
        validator=ContextParallelValidator.Config(
            enable=True, freq=5, steps=-1, dataloader=Documents.Config(rows=4)
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        training=TrainingConfig(
            local_batch_size=1,
            global_batch_size=4,
            seq_len=ROWS,
            steps=5,
            disable_cuda_graphs=True,
            mixed_precision_param="bfloat16" if ON_GPUS else "float32",
        ),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        optimizer=default_adamw(lr=1e-3),
        metrics=MetricsProcessor.Config(log_freq=1),
        tokenizer=Words.Config(),
        dataloader=Documents.Config(),
    )


class Job(ContextParallelTrainer):
    """hcp's trainer, also over Gloo, which lacks the sum with a factor that FSDP2 asks for."""

    @dataclass(kw_only=True, slots=True)
    class Config(ContextParallelTrainer.Config):
        pass

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for module in self.model_parts[0].modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(not ON_GPUS)


# ---- in place of your tokenizer and your data ----------------------------------------------------


class Words(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **others: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **others: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **others: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Documents(BaseDataLoader):
    """Rows of packed documents that count upwards. A document starts where the position is 0."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        rows: int = 1000
        infinite: bool = False
        """A validator says False: its rows end."""

    def __init__(
        self,
        config: Any,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **others: Any,
    ) -> None:
        self.own = range(dp_rank, config.rows, dp_world_size)
        self.seq_len, self.size, self.loaded = seq_len, local_batch_size, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for start in range(self.loaded, len(self.own), self.size):
            self.loaded = start + self.size
            rows = [self.row(i) for i in self.own[start : start + self.size]]
            tokens, positions, labels = (torch.stack(column) for column in zip(*rows, strict=True))
            yield {"input": tokens, "positions": positions}, labels

    def row(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Documents until the row is full, whose last tokens have no label (-100)."""
        draw = torch.Generator().manual_seed(seed)
        tokens: list[int] = []
        positions: list[int] = []
        labels: list[int] = []
        while len(tokens) < self.seq_len:
            length = int(torch.randint(1, self.seq_len + 1, (), generator=draw))
            length = min(length, self.seq_len - len(tokens))
            first = int(torch.randint(VOCABULARY, (), generator=draw))
            tokens += [(first + i) % VOCABULARY for i in range(length)]
            labels += [(first + i) % VOCABULARY for i in range(1, length)] + [-100]
            positions += range(length)
        return torch.tensor(tokens), torch.tensor(positions), torch.tensor(labels)

    def state_dict(self) -> dict[str, Any]:
        return {"loaded": self.loaded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["loaded"]


if __name__ == "__main__":
    main()
