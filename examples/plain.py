"""A GPT in plain PyTorch: a CP degree for each micro-batch, and evaluation under another layout.

    torchrun --nproc-per-node 2 examples/plain.py       # CPU ranks, or a GPU for each rank
    python examples/plain.py                            # one rank

The losses are the same on any number of ranks. What hcp adds to a training script is in `Block`,
`train_step` and `evaluate`. T rows on this rank, at times none.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import hcp
from hcp.attention.rotary import Rotary

VOCABULARY, WIDTH, HEADS, LAYERS = 32, 64, 4, 2
LONGEST = 400

Sample = dict[str, Tensor]


# ---- the model: layers get the micro-batch's handler, `cp`, and know no ranks --------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, cp: hcp.ContextParallelHandler, rotary: Rotary) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).unbind(1)
        x = x + self.out(cp.attention(q, k, v, rotary_pos_emb=rotary).flatten(1))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, pgs: hcp.ProcessGroups) -> None:
        super().__init__()
        self.pgs = pgs  # hcp.eval_cp_context puts the eval groups here
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, cp: hcp.ContextParallelHandler) -> Tensor:
        """Return the logits of each row, (T, VOCABULARY)."""
        x = self.embedding(tokens)
        rotary = cp.rotary(angles(cp.get_rotary_seq_len(), x))
        for block in self.blocks:
            x = block(x, cp, rotary)
        return self.head(self.norm(x))


def angles(positions: int, like: Tensor) -> Tensor:
    """The rotary angles of whole sequences. The handler knows which rows this rank has."""
    size = WIDTH // HEADS
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2, device=like.device) / size)
    return torch.outer(torch.arange(positions, device=like.device), frequencies).repeat(1, 2)


# ---- the data: documents of very different lengths -----------------------------------------------


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


def limit(pgs: hcp.ProcessGroups) -> int:
    """The most rows of a rank in a micro-batch. Here more ranks let each of them hold less; for a
    model of your own it is what fits in memory. A longer document is spread over several ranks."""
    return 2 + LONGEST // pgs.size("dp_cp")


def losses_of(model: GPT, cp: hcp.ContextParallelHandler, local: hcp.LocalBatch) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16, enabled=local.tokens.is_cuda):
        logits = model(local.tokens, cp)
    return F.cross_entropy(logits, local.labels, reduction="none")


# ---- a step and an evaluation --------------------------------------------------------------------


def train_step(
    model: GPT, optimizer: torch.optim.Optimizer, mine: Sequence[Sample], pgs: hcp.ProcessGroups
) -> float:
    """Train on a global batch, of which this rank has loaded some samples. Return the loss."""
    lengths, sources, samples = hcp.gather_lengths(mine, pgs)
    plan = hcp.plan(lengths, ranks=pgs.size("dp_cp"), max_tokens_per_rank=limit(pgs))
    total = torch.zeros((), device=pgs.transport.device)
    optimizer.zero_grad(set_to_none=False)
    for cp, local in hcp.dispatch(plan, samples, sources, pgs):  # rows go where they are computed
        losses = losses_of(model, cp, local)
        loss = cp.loss(losses, local.loss_mask, grad_reduce="sum")  # of the mean over the batch
        loss.backward()
        total += loss.detach()
    for tensor in (*(p.grad for p in model.parameters()), total):
        dist.all_reduce(tensor, group=pgs.dp_cp)  # sums, once in a step
    optimizer.step()
    return float(total)


@torch.no_grad()
def evaluate(model: GPT, dataset: Sequence[Sample]) -> float:
    """Return the mean loss over the dataset, under the layout that the model holds."""
    pgs = model.pgs
    plan = hcp.EvalPlan(
        [len(sample["tokens"]) for sample in dataset],
        pgs,
        max_tokens_per_rank=LONGEST,  # there is no backward
        degree=pgs.size("cp"),
    )
    metrics = hcp.Metrics(pgs)
    for step in plan.dispatch(dataset):
        for cp, local in step:
            metrics.add_sum("loss", *cp.loss_sum(losses_of(model, cp, local), local.loss_mask))
    plan.finish()  # raises unless each document was computed exactly once
    return metrics.reduce()["loss"].mean


def train(steps: int = 20) -> tuple[list[float], list[float]]:
    """Train as one rank of the job. Return the losses, and those of both evaluations."""
    train_pgs = hcp.build_process_groups(cp=1)
    eval_pgs = train_pgs.with_context_parallel(train_pgs.size("dp_cp"))
    device, rank, ranks = train_pgs.transport.device, train_pgs.rank("dp_cp"), eval_pgs.size("cp")
    torch.manual_seed(0)
    model = GPT(train_pgs).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        mine = documents(step, 16, device)[rank::ranks]
        losses.append(train_step(model, optimizer, mine, train_pgs))
        if rank == 0 and step % 5 == 0:
            print(f"step {step:3}  loss {losses[-1]:.6f}")
    held_out = documents(1_000_000, 8, device)
    evaluations = [evaluate(model, held_out)]
    with hcp.eval_cp_context(model, train_pgs, eval_pgs):
        evaluations.append(evaluate(model, held_out))
    if rank == 0:
        print(f"evaluation  CP 1: {evaluations[0]:.6f}  CP {ranks}: {evaluations[1]:.6f}")
    return losses, evaluations


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
