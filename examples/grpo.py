"""GRPO on a toy task under dynamic context parallelism: one file to copy from.

    torchrun --nproc-per-node 2 examples/grpo.py        # CPU ranks, or a GPU for each rank
    python examples/grpo.py                             # one rank

A policy learns to repeat the last token of its prompt. In each step every rank samples several
answers to its own prompts (https://arxiv.org/abs/2402.03300). The log-probabilities of the old
policy and of the reference are computed under a plan, forward only, and come back in the order of
the samples. Then the samples travel again, with the advantages of their answers. The loss is the
mean over all answer tokens of the batch, so neither the plan nor the number of ranks changes it.

What answers to a prompt share is computed once, as a prefix tree, or the prompt is packed with each
of them (--packing each). The loss is the same. A prompt with long answers is more than one rank
holds, so it gets a higher degree than one with short answers. Each step prints how many sequences
got which.

T rows of this rank, A answers of its sequences, V tokens of the vocabulary.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import hcp
from hcp.step.dispatch import gather_masks

VOCABULARY, END = 8, 0
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention of q, k, v, (tokens, heads, size) each."""


class Sample(NamedTuple):
    """A sequence: a prompt, and one answer to it or a tree of several."""

    fields: dict[str, Tensor]
    mask: hcp.Mask | None


# ---- the policy ----------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(1)
        x = x + self.out(attend(q, k, v).flatten(1))
        return x + self.mlp(self.norms[1](x))


class Policy(nn.Module):
    """A decoder of packed tokens. It gets its attention as a function, and knows no ranks."""

    def __init__(
        self, width: int = 32, heads: int = 2, layers: int = 2, longest: int = 512
    ) -> None:
        super().__init__()
        self.embedding, self.positions = (
            nn.Embedding(VOCABULARY, width),
            nn.Embedding(longest, width),
        )
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the log-probabilities of each next token, (T, V)."""
        x = self.embedding(tokens) + self.positions(positions)
        for layer in self.layers:
            x = layer(x, attend)
        return F.log_softmax(self.head(x), -1)


def attend_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one sequence that this rank has whole."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


# ---- answers and rewards: each rank for its own prompts ------------------------------------------


def prompts_of(step: int, args: argparse.Namespace) -> list[Tensor]:
    """The prompts of a step, of many lengths, the same on every rank."""
    draw = torch.Generator().manual_seed(args.seed + step)
    lengths = torch.randint(2, args.longest_prompt + 1, (args.prompts,), generator=draw).tolist()
    return [torch.randint(1, VOCABULARY, (n,), generator=draw) for n in lengths]


@torch.no_grad()
def answer(policy: Policy, prompt: Tensor, most: int, draw: torch.Generator) -> Tensor:
    """Sample at most so many tokens. A trainer has an inference engine for that."""
    tokens = prompt
    for _ in range(most):
        places = torch.arange(len(tokens), device=tokens.device)
        probabilities = policy(tokens, places, attend_alone)[-1].exp().cpu()
        token = torch.multinomial(probabilities, 1, generator=draw).to(tokens.device)
        tokens = torch.cat((tokens, token))
        if int(token) == END:
            break
    return tokens[len(prompt) :]


def rollout(
    policy: Policy, prompts: Sequence[tuple[int, Tensor]], args: argparse.Namespace
) -> tuple[list[Sample], list[float]]:
    """Answer prompts, given with their seeds. Return the samples and the rewards."""
    samples: list[Sample] = []
    rewards: list[float] = []
    for seed, prompt in prompts:
        draw = torch.Generator().manual_seed(seed)
        answers = [answer(policy, prompt, args.answer, draw) for _ in range(args.answers)]
        scores = torch.stack([(a == prompt[-1]).double().mean() for a in answers])
        advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
        together = args.answers if args.packing == "shared" else 1
        for i in range(0, args.answers, together):
            some = slice(i, i + together)
            samples.append(sample_of(prompt, answers[some], advantages[some]))
        rewards += scores.tolist()
    return samples, rewards


def sample_of(prompt: Tensor, answers: Sequence[Tensor], advantages: Tensor) -> Sample:
    """Make a prefix tree of answers to a prompt: what they share is computed once.

    The loss is of each answer's tokens. A row counts once for each answer through it.
    """
    trees = hcp.prefix_trees([torch.cat((prompt, tokens)) for tokens in answers])
    kinds: Any = {"device": prompt.device, "dtype": torch.get_default_dtype()}
    weights = [F.pad(torch.ones(len(a), **kinds), (len(prompt) - 1, 1)) for a in answers]
    pairs = list(zip(weights, advantages.to(**kinds), strict=True))
    columns = {
        "tokens": trees.tokens,
        "labels": [labels.clamp(min=0) for labels in trees.labels],
        "loss_mask": trees.summed(weights),
        "up": trees.summed([w * a.clamp(min=0) for w, a in pairs]),
        "down": trees.summed([w * a.clamp(max=0) for w, a in pairs]),
        "advantages": trees.by_tree([a for _, a in pairs]),
        "lengths": trees.by_tree([torch.tensor(len(a), **kinds) for a in answers]),
    }
    (fields,) = trees.fields()  # answers to one prompt of two tokens or more are one tree
    fields |= {name: column[0].to(prompt.device) for name, column in columns.items()}
    return Sample(fields, trees.masks[0])


# ---- the update: all ranks together --------------------------------------------------------------


SMALL_MODEL = hcp.CostModel(token=24_576, exchange=4_096, launch=40 * 24_576)
"""In a small model a token moved costs a sixth of one computed, and a micro-batch forty more."""


def most_tokens(ranks: int, args: argparse.Namespace) -> int:
    """The most rows of a rank in a micro-batch: for a model of your own, what fits in memory. Here
    it is half of the longest sequence if there are several ranks."""
    longest = args.longest_prompt + args.answers * (args.answer + 1)
    return args.max_tokens_per_rank or 1 + longest // min(ranks, 2)


RULES: dict[str, str | hcp.Payload] = {
    **hcp.Trees.RULES,
    "advantages": hcp.Payload("whole"),
    "lengths": hcp.Payload("whole"),
}
"""Values of an answer have one row of each."""


def planned(samples: Sequence[Sample], groups: Any, args: argparse.Namespace) -> hcp.Step:
    """Plan the samples of all ranks, and bring each to the ranks that compute it."""
    given = [sample.fields for sample in samples]
    lengths, sources, own = hcp.gather_lengths(given, groups, fields=RULES)
    masks = gather_masks([sample.mask for sample in samples], groups)
    ranks = groups.size("dp_cp")
    most = most_tokens(ranks, args)
    plan = hcp.plan(lengths, masks=masks, ranks=ranks, max_tokens_per_rank=most, cost=SMALL_MODEL)
    return hcp.dispatch(plan, own, sources, groups, fields=RULES)


def log_probs(policy: Policy, cp: hcp.ContextParallelHandler, local: hcp.LocalBatch) -> Tensor:
    """The log-probability of each row's label, (T,)."""
    every = policy(local.tokens, cp.position_ids, cp.attention)
    return every.gather(1, local.labels[:, None])[:, 0]


def losses_of(
    new: Tensor, cp: hcp.ContextParallelHandler, local: hcp.LocalBatch, args: argparse.Namespace
) -> Tensor:
    """GRPO's losses of each row, (T,), summed over the answers through it: a clipped ratio times
    the answer's advantage, and the distance from the reference."""
    change = new - local.old
    if args.ratio == "sequence":  # one ratio of each answer (https://arxiv.org/abs/2507.18071)
        tree = hcp.TreeValues(cp, local)
        counted = change * (local.loss_mask > 0)
        ratio = (tree.sum_over_paths(counted) / local.lengths).exp()  # (A,)
        clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
        gain = torch.minimum(ratio * local.advantages, clipped * local.advantages)
        gain = tree.sum_over_leaves(gain)
    else:
        ratio = change.exp()
        gain = ratio.clamp(max=1 + args.clip) * local.up
        gain = gain + ratio.clamp(min=1 - args.clip) * local.down
    apart = local.reference - new
    return args.beta * (apart.exp() - apart - 1) * local.loss_mask - gain


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[Sample],
    groups: Any,
    args: argparse.Namespace,
) -> float:
    """Train on the samples once. Return the loss, the same on every rank."""
    optimizer.zero_grad()
    total = torch.zeros((), dtype=torch.float64, device=groups.transport.device)
    for cp, local in planned(samples, groups, args):
        losses = losses_of(log_probs(policy, cp, local), cp, local, args)
        some = (local.loss_mask > 0).to(losses.dtype)  # the losses have the weights
        loss = cp.loss(losses, some, grad_reduce="sum")
        loss.backward()
        total += loss.detach()
    for parameter in policy.parameters():
        dist.all_reduce(parameter.grad, group=groups.dp_cp)
    dist.all_reduce(total, group=groups.dp_cp)
    optimizer.step()
    return float(total)


def degrees_of(plan: hcp.Plan) -> str:
    """Say how many sequences have which degree, such as "5 at CP 1, 3 at CP 2"."""
    groups = [group for batch in plan.micro_batches for group in batch]
    found = Counter(group.degree for group in groups for _ in group.sequences)
    return ", ".join(f"{count} at CP {degree}" for degree, count in sorted(found.items()))


def train(args: argparse.Namespace) -> list[tuple[float, float]]:
    """Train as one rank of the job. Return the mean reward and the last loss of each step."""
    groups = hcp.build_process_groups()
    device, rank, ranks = groups.transport.device, groups.rank("dp_cp"), groups.size("dp_cp")
    torch.manual_seed(args.seed)
    policy = Policy(longest=args.longest_prompt + args.answer).to(device)
    reference = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.0)
    done = []
    for step in range(args.steps):
        prompts = [(1000 * step + i, p.to(device)) for i, p in enumerate(prompts_of(step, args))]
        # The order of all samples, by rank and then as given, is that of the prompts on any number
        # of ranks.
        share = range(rank * len(prompts) // ranks, (rank + 1) * len(prompts) // ranks)
        samples, rewards = rollout(policy, [prompts[i] for i in share], args)
        with torch.no_grad():
            forward = planned(samples, groups, args)
            for name, model in (("old", policy), ("reference", reference)):
                found = forward.combine(log_probs(model, cp, local) for cp, local in forward)
                for sample, rows in zip(samples, found, strict=True):
                    sample.fields[name] = rows
        for _ in range(args.updates):
            loss = update(policy, optimizer, samples, groups, args)
        sums = torch.tensor([sum(rewards), len(rewards)], dtype=torch.float64, device=device)
        dist.all_reduce(sums, group=groups.dp_cp)
        done.append((float(sums[0] / sums[1]), loss))
        if rank == 0:
            reward, degrees = done[-1][0], degrees_of(forward.plan)
            print(f"step {step:3}  loss {loss:+.6f}  reward {reward:.3f}  {degrees}", flush=True)
    return done


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO on a toy task under dynamic CP")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=8, help="of a step, over all ranks")
    parser.add_argument("--answers", type=int, default=6, help="to each prompt")
    parser.add_argument("--answer", type=int, default=12, help="most tokens of an answer")
    parser.add_argument("--longest-prompt", type=int, default=96)
    parser.add_argument(
        "--max-tokens-per-rank", type=int, help="default: half of the longest; one rank: all of it"
    )
    parser.add_argument("--updates", type=int, default=2, help="of each batch of answers")
    parser.add_argument("--packing", choices=("shared", "each"), default="shared")
    parser.add_argument("--ratio", choices=("token", "sequence"), default="token")
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--beta", type=float, default=0.01, help="weight of the reference")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main() -> None:
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ:  # under torchrun; without it hcp makes a job of one rank
        dist.init_process_group("nccl" if on_gpus else "gloo")
    train(parse_args())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
