"""Draft heads for speculative decoding, trained beside a trunk under dynamic context parallelism.

    torchrun --nproc-per-node 2 examples/draft_heads.py     # CPU ranks, or a GPU for each rank
    python examples/draft_heads.py                          # one rank
    python examples/draft_heads.py --live                   # the trunk trains too

Two heads read the hidden states of all of the trunk's layers. `Eagle` drafts one token after the
other, and trains on its own drafts (EAGLE-3, https://arxiv.org/abs/2503.01840). `DFlash` drafts a
block of tokens at once (https://arxiv.org/abs/2602.06036). Their rows lie where the trunk's rows
lie, so they add no row to the plan. What tokens see is said by masks of the plan. Losses are the
same on any number of ranks.

T rows on this rank, at times none. H heads, D head size, V tokens of the vocabulary.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import hcp
from hcp.attention.merge import merge_attention
from hcp.attention.rotary import Rotary

VOCABULARY, WIDTH, HEADS, LAYERS = 32, 64, 4, 3
LONGEST = 200
STEPS = 3  # tokens that `Eagle` drafts after the first
BLOCK = 4  # tokens of a block of `DFlash`: one that is known, and those that it drafts
ROUNDS = 2  # layouts of blocks over each document in a step
DECAY = 0.8  # the weight of each later draft, as a share of that of the one before

Sample = dict[str, Tensor]


# ---- the trunk -----------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv, self.out, self.mlp = heads_of(WIDTH, 3), nn.Linear(WIDTH, WIDTH), mlp()

    def forward(self, x: Tensor, cp: hcp.ContextParallelHandler, rotary: Rotary) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unbind(1)
        x = x + self.out(cp.attention(q, k, v, mask="causal", rotary_pos_emb=rotary).flatten(1))
        return x + self.mlp(self.norms[1](x))


def heads_of(width: int, parts: int) -> nn.Sequential:
    """A projection of (T, width) to (T, parts, H, D)."""
    return nn.Sequential(
        nn.Linear(width, parts * WIDTH), nn.Unflatten(-1, (parts, HEADS, WIDTH // HEADS))
    )


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(
        self, tokens: Tensor, cp: hcp.ContextParallelHandler, rotary: Rotary
    ) -> list[Tensor]:
        """Return the hidden states of each layer, (T, WIDTH). `logits` reads the last."""
        hidden = [self.embedding(tokens)]
        for layer in self.layers:
            hidden.append(layer(hidden[-1], cp, rotary))
        return hidden[1:]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden))


def angles(positions: int, like: Tensor) -> Tensor:
    """The rotary angles of so many positions, (positions, D)."""
    size = WIDTH // HEADS
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2, device=like.device) / size)
    return torch.outer(torch.arange(positions, device=like.device), frequencies).repeat(1, 2)


# ---- a head that drafts one token after the other ------------------------------------------------


class Eagle(nn.Module):
    """One layer. In step 0 each row has the trunk's states and the token after it. In each later
    step it has what this head made of it in the step before, and the next token.

    The query of step s sees the keys of step 0 up to its own row, s positions before its own, and
    the keys that its own row has made in steps 1 to s.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fuse = nn.Linear(LAYERS * WIDTH, WIDTH, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(4))
        self.qkv, self.out, self.mlp = heads_of(2 * WIDTH, 3), nn.Linear(WIDTH, WIDTH), mlp()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(
        self, features: Sequence[Tensor], known: Sequence[Tensor], cp: hcp.ContextParallelHandler
    ) -> list[Tensor]:
        """Return the logits of each step, (T, V). `known`: for each step the embedding (T, WIDTH)
        of the token that it goes on from."""
        state = self.fuse(torch.cat(list(features), 1))
        keys: list[tuple[Tensor, Tensor]] = []
        drafted = []
        for step, embedded in enumerate(known):
            given = torch.cat((self.norms[0](embedded), self.norms[1](state)), 1)
            q, k, v = self.qkv(given).unbind(1)
            freqs = angles(cp.get_rotary_seq_len() + len(known), q)
            at = cp.rotary(freqs, positions=cp.position_ids + step)
            q, k = cp.apply_rotary_pos_emb(q, at), cp.apply_rotary_pos_emb(k, at)
            keys.append((k, v))
            state = state + self.out(attend_to_steps(q, keys, cp).flatten(1))
            state = state + self.mlp(self.norms[2](state))
            drafted.append(self.head(self.norms[3](state)))
        return drafted


def attend_to_steps(
    q: Tensor, keys: Sequence[tuple[Tensor, Tensor]], cp: hcp.ContextParallelHandler
) -> Tensor:
    """Attend to the rows of step 0, which lie on several ranks, and to this row's own later steps,
    which lie here."""
    (first, *later) = keys
    name = f"step {len(later)}"
    parts = [cp.attention(q, *first, mask="causal", return_lse=True, layer=name)]
    if later:
        k, v = (torch.stack(x, 2) for x in zip(*later, strict=True))  # (T, H, steps, D)
        scores = (q.unsqueeze(2) * k).sum(-1) * q.shape[-1] ** -0.5
        parts.append(((scores.softmax(-1).unsqueeze(-1) * v).sum(2), scores.logsumexp(-1)))
    return merge_attention(parts)[0]


# ---- a head that drafts a block at once ----------------------------------------------------------


class DFlashLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.query, self.key_value = heads_of(WIDTH, 1), heads_of(WIDTH, 2)
        self.out, self.mlp = nn.Linear(WIDTH, WIDTH), mlp()

    def forward(
        self, x: Tensor, features: Tensor, cp: hcp.ContextParallelHandler, rotary: Rotary, name: str
    ) -> Tensor:
        own = self.norms[0](x)
        q = self.query(own)[:, 0]
        parts = []
        for rows, mask in ((features, f"before {name}"), (own, f"block {name}")):
            k, v = self.key_value(rows).unbind(1)
            parts.append(cp.attention(q, k, v, mask=mask, return_lse=True, rotary_pos_emb=rotary))
        x = x + self.out(merge_attention(parts)[0].flatten(1))
        return x + self.mlp(self.norms[1](x))


class DFlash(nn.Module):
    """Layers in which the rows of a block see the trunk's states of all tokens before the block,
    and each other in both directions. The first token of a block is known, the others are masked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fuse = nn.Sequential(nn.Linear(LAYERS * WIDTH, WIDTH, bias=False), nn.RMSNorm(WIDTH))
        self.masked = nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList(DFlashLayer() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(
        self,
        features: Sequence[Tensor],
        embedded: Tensor,
        places: Tensor,
        cp: hcp.ContextParallelHandler,
        rotary: Rotary,
        name: str,
    ) -> Tensor:
        """Return the logits of each row's own token, (T, V). `places`: (T,), each row's place in
        its block. `name`: of the round whose blocks these are."""
        fused = self.fuse(torch.cat(list(features), 1))
        x = torch.where(places.unsqueeze(1) == 0, embedded, self.masked)
        for layer in self.layers:
            x = layer(x, fused, cp, rotary, name)
        return self.head(self.norm(x))


# ---- blocks and masks ----------------------------------------------------------------------------


def blocks_of(length: int, step: int, turn: int) -> list[tuple[int, int]]:
    """The blocks of a round over a document: end to end, from a token that moves from step to step.
    None begins at token 0, before which there are no states. Any blocks that do not overlap do."""
    first = 1 + (step + turn * BLOCK // ROUNDS) % BLOCK
    return [(start, start + BLOCK) for start in range(first, length - BLOCK + 1, BLOCK)]


def masks_of(packs: Sequence[Sequence[int]], step: int) -> dict[str, list[hcp.Mask]]:
    """The masks of all sequences of a step. `packs`: the lengths of each sequence's documents."""
    masks = {"causal": [hcp.Mask.documents(lengths) for lengths in packs]}
    for turn in range(ROUNDS):
        for name, seen in (("before", 0), ("block", 1)):
            masks[f"{name} {turn}"] = [
                hcp.Mask.documents(block_mask(n, step, turn, bool(seen)) for n in lengths)
                for lengths in packs
            ]
    return masks


def block_mask(length: int, step: int, turn: int, inside: bool) -> hcp.Mask:
    """What the rows of blocks see: of the trunk's states those before the block, or `inside` it the
    block itself."""
    blocks = blocks_of(length, step, turn)
    return hcp.Mask(length, [((a, b), (a, b) if inside else (0, a)) for a, b in blocks])


def places_of(lengths: Sequence[int], step: int) -> Tensor:
    """Each token's place in its block, (tokens, ROUNDS), -1 in none. A field of the samples."""
    places = torch.full((sum(lengths), ROUNDS), -1)
    for start, n in zip(itertools.accumulate(lengths, initial=0), lengths, strict=False):
        for turn in range(ROUNDS):
            for a, b in blocks_of(n, step, turn):
                places[start + a : start + b, turn] = torch.arange(BLOCK)
    return places


# ---- losses --------------------------------------------------------------------------------------


class Models(NamedTuple):
    trunk: Trunk
    eagle: Eagle
    dflash: DFlash

    def parameters(self, live: bool) -> Iterator[nn.Parameter]:
        trained = self if live else self[1:]
        return itertools.chain.from_iterable(model.parameters() for model in trained)


def loss_of(
    models: Models, cp: hcp.ContextParallelHandler, local: hcp.LocalBatch, live: bool
) -> Tensor:
    """This micro-batch's share of the loss of both heads, and of the trunk's own if it is live."""
    rotary = cp.rotary(angles(cp.get_rotary_seq_len(), local.loss_mask))
    with torch.set_grad_enabled(live):
        features = models.trunk(local.tokens, cp, rotary)
    loss = eagle_loss(models, features, cp, local) + dflash_loss(
        models, features, cp, local, rotary
    )
    if live:
        losses = cross_entropy(models.trunk.logits(features[-1]), local.labels)
        loss = loss + cp.loss(losses, local.loss_mask, grad_reduce="sum")
    return loss


def eagle_loss(
    models: Models,
    features: Sequence[Tensor],
    cp: hcp.ContextParallelHandler,
    local: hcp.LocalBatch,
) -> Tensor:
    """The cross entropy between the trunk's own predictions and the drafts of all steps. Tokens,
    states and masks that lie some rows ahead come across the borders of ranks."""
    table = models.trunk.embedding.weight
    labels, states, mask = local.labels, features[-1].detach(), local.loss_mask
    known, targets, masks = [], [], []
    for _ in range(STEPS):
        known.append(F.embedding(labels, table))
        labels, states, mask = (cp.roll_tensor(x) for x in (labels, states, mask))
        with torch.no_grad():
            targets.append(models.trunk.logits(states).softmax(-1))
        masks.append(mask)
    drafted = models.eagle(features, known, cp)
    shares = [
        DECAY**step * cp.loss(cross_entropy(logits, target), mask, grad_reduce="sum")
        for step, (logits, target, mask) in enumerate(zip(drafted, targets, masks, strict=True))
    ]
    return torch.stack(shares).sum()


def dflash_loss(
    models: Models,
    features: Sequence[Tensor],
    cp: hcp.ContextParallelHandler,
    local: hcp.LocalBatch,
    rotary: Rotary,
) -> Tensor:
    """The cross entropy of the masked tokens of all blocks, less for later ones."""
    embedded = models.trunk.embedding(local.tokens)
    counted = cp.roll_tensor(local.loss_mask, 1)  # of the row that predicts this one
    shares = []
    for turn in range(ROUNDS):
        places = local.places[:, turn]
        logits = models.dflash(features, embedded, places, cp, rotary, str(turn))
        weights = torch.where(places > 0, counted * DECAY ** (places - 1), 0.0)
        losses = cross_entropy(logits, local.tokens)
        shares.append(cp.loss(losses, weights, grad_reduce="sum") / ROUNDS)
    return torch.stack(shares).sum()


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, reduction="none")


# ---- training ------------------------------------------------------------------------------------


def documents(seed: int, count: int, device: torch.device) -> list[Sample]:
    """Documents that count upwards, each in steps of its own."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = 4 + int((LONGEST - 4) * torch.rand((), generator=draw) ** 4)
        first, step = torch.randint(1, 4, (2,), generator=draw).tolist()
        text = (first + step * torch.arange(length + 1, device=device)) % VOCABULARY
        mask = torch.ones(length, device=device)
        places = places_of([length], seed).to(device)
        made.append({"tokens": text[:-1], "labels": text[1:], "loss_mask": mask, "places": places})
    return made


def planned(mine: Sequence[Sample], step: int, pgs: hcp.ProcessGroups) -> hcp.Step:
    lengths, sources, samples = hcp.gather_lengths(mine, pgs)
    plan = hcp.plan(
        lengths,
        masks=masks_of([[n] for n in lengths], step),
        ranks=pgs.size("dp_cp"),
        max_tokens_per_rank=2 + LONGEST // pgs.size("dp_cp"),
    )
    return hcp.dispatch(plan, samples, sources, pgs)


def train_step(
    models: Models,
    optimizer: torch.optim.Optimizer,
    batch: hcp.Step,
    pgs: hcp.ProcessGroups,
    live: bool,
) -> float:
    """Train on a global batch. Return the loss."""
    optimizer.zero_grad(set_to_none=False)
    total = torch.zeros((), device=pgs.transport.device)
    for cp, local in batch:
        loss = loss_of(models, cp, local, live)
        loss.backward()
        total += loss.detach()
    for tensor in (*(p.grad for p in models.parameters(live)), total):
        dist.all_reduce(tensor, group=pgs.dp_cp)  # sums, once in a step
    optimizer.step()
    return float(total)


def train(steps: int = 20, live: bool = False) -> list[float]:
    """Train as one rank of the job. Return the losses."""
    pgs = hcp.build_process_groups()
    device, rank, ranks = pgs.transport.device, pgs.rank("dp_cp"), pgs.size("dp_cp")
    torch.manual_seed(0)
    models = Models(Trunk().to(device), Eagle().to(device), DFlash().to(device))
    models.trunk.requires_grad_(live)
    for parameter in models.parameters(live):
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(models.parameters(live), lr=3e-3)
    losses = []
    for step in range(steps):
        mine = documents(step, 16, device)[rank::ranks]
        losses.append(train_step(models, optimizer, planned(mine, step, pgs), pgs, live))
        if rank == 0 and step % 5 == 0:
            print(f"step {step:3}  loss {losses[-1]:.6f}")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="draft heads beside a trunk, under dynamic CP")
    parser.add_argument("--live", action="store_true", help="train the trunk too")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ:  # under torchrun; without it hcp makes a job of one rank
        dist.init_process_group("nccl" if on_gpus else "gloo")
    train(args.steps, args.live)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
