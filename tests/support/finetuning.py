"""Code that the tests of Transformers, Accelerate and Lightning share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import hcp

# In batches of eight: two whole ones, one of a single sample. The longest is longer than a rank
# holds.
TRAINING = (13, 1, 40, 7, 30, 3, 9, 100, 2, 5, 6, 4, 11, 1, 64, 8, 17)
VALIDATION = (50, 3, 1, 22, 9, 14, 2)


def documents(lengths: Sequence[int], seed: int = 0) -> list[dict[str, Tensor]]:
    """Draw documents of random tokens, 3 to 63."""
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(3, 64, (n,), generator=generator)} for n in lengths]


def as_torchrun(size: int) -> None:
    """Set a launcher's environment, and reset the state that Accelerate keeps between cases."""
    os.environ.update(
        LOCAL_WORLD_SIZE=str(size),
        NODE_RANK="0",
        MASTER_ADDR="localhost",
        OMP_NUM_THREADS="1",
    )
    try:
        from accelerate.state import AcceleratorState, GradientState
    except ImportError:
        return
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@contextlib.contextmanager
def fsdp_on_cpus() -> Iterator[None]:
    """Return a context inside which Accelerate uses FSDP, which it leaves out on CPUs. All else is
    Accelerate's own, over Gloo. PartialState must exist."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    before = {k: v for k, v in os.environ.items() if k.startswith(("FSDP_", "ACCELERATE_"))}
    try:
        yield
    finally:
        for name in [k for k in os.environ if k.startswith(("FSDP_", "ACCELERATE_"))]:
            del os.environ[name]
        os.environ.update(before)


def read_by_rank_0(rank: int, model: torch.nn.Module) -> torch.nn.Module:
    """Take the weights of a Transformers' model from other ranks, as where Transformers reads them
    for FSDP2, which sends them shards. Buffers stay."""
    for module in model.modules() if rank > 0 else ():
        for name, weight in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(weight.to("meta")))
    model.tie_weights()  # type: ignore[operator]
    return model


class Model(torch.nn.Module):
    """One layer of attention, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(64, 32)
        self.qkv = torch.nn.Linear(32, 96)
        self.double()

    def forward(self, cp: hcp.ContextParallelHandler, local: Any) -> Tensor:
        """Return the loss of each row, (T,)."""
        rows = self.qkv(self.embedding(local.input_ids))
        q, k, v = rows.view(len(rows), 3, 4, 8).unbind(1)
        logits = cp.attention(q, k, v).flatten(1) @ self.embedding.weight.T
        return torch.nn.functional.cross_entropy(logits, local.labels, reduction="none")
