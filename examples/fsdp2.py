"""FSDP2 with a CP degree for each micro-batch: a GPT whose parameters are sharded over all ranks.

    torchrun --nproc-per-node 2 examples/fsdp2.py       # CPU ranks, or a GPU for each rank
    python examples/fsdp2.py                            # one rank

Two arguments are FSDP's. FSDP gathers the parameters of each layer, so ranks wait for each other in
every micro-batch, and plans have to know: `sync="micro_batch"`. FSDP averages gradients over the
ranks: `grad_reduce="mean"`. Both stand in `train_step`. The losses are those of one rank.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import hcp

VOCABULARY, WIDTH, HEADS, LAYERS, LONGEST = 32, 64, 4, 2, 400

Sample = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, cp: hcp.ContextParallelHandler) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).unbind(1)
        x = x + self.out(cp.attention(q, k, v).flatten(1))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, cp: hcp.ContextParallelHandler) -> Tensor:
        """Return the logits of this rank's rows, at times none."""
        x = self.embedding(tokens) + self.positions(cp.position_ids)
        for block in self.blocks:
            x = block(x, cp)
        return self.head(self.norm(x))


def sharded(model: GPT) -> GPT:
    """Shard each block, and then the rest of the model, over all ranks."""
    for module in (*model.blocks, model):
        fully_shard(module)
        if isinstance(module, FSDPModule) and dist.get_backend() == "gloo":
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no average
    return model


def documents(seed: int, count: int, device: torch.device) -> list[Sample]:
    """Documents that count upwards, each in steps of its own."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = 4 + int((LONGEST - 4) * torch.rand((), generator=draw) ** 4)
        first, step = torch.randint(1, 4, (2,), generator=draw).tolist()
        text = (first + step * torch.arange(length + 1, device=device)) % VOCABULARY
        mask = torch.ones(length, device=device)
        made.append({"tokens": text[:-1], "labels": text[1:], "loss_mask": mask})
    return made


def train_step(
    model: GPT, optimizer: torch.optim.Optimizer, mine: Sequence[Sample], pgs: hcp.ProcessGroups
) -> float:
    """Train on a global batch, of which this rank has loaded some samples. Return the loss."""
    ranks = pgs.size("dp_cp")
    lengths, sources, samples = hcp.gather_lengths(mine, pgs)
    plan = hcp.plan(
        lengths, ranks=ranks, max_tokens_per_rank=2 + LONGEST // ranks, sync="micro_batch"
    )
    total = torch.zeros((), device=pgs.transport.device)
    for cp, local in hcp.dispatch(plan, samples, sources, pgs):  # rows go where they are computed
        with torch.autocast("cuda", torch.bfloat16, enabled=local.tokens.is_cuda):
            logits = model(local.tokens, cp)
        losses = F.cross_entropy(logits, local.labels, reduction="none")
        loss = cp.loss(losses, local.loss_mask, grad_reduce="mean")
        loss.backward()  # also with no rows: FSDP waits for every rank
        total += loss.detach() / ranks
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total, group=pgs.dp_cp)
    return float(total)


def train(steps: int = 20) -> list[float]:
    """Train as one rank of the job. Return the loss of each step."""
    pgs = hcp.build_process_groups()
    device, rank = pgs.transport.device, pgs.rank("dp_cp")
    torch.manual_seed(0)
    model = sharded(GPT().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        mine = documents(step, 16, device)[rank :: pgs.size("dp_cp")]
        losses.append(train_step(model, optimizer, mine, pgs))
        if rank == 0 and step % 5 == 0:
            print(f"step {step:3}  loss {losses[-1]:.6f}")
    return losses


def main() -> None:
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ:  # under torchrun; without it hcp makes a job of one rank
        dist.init_process_group("nccl" if on_gpus else "gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
