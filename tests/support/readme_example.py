"""The names that README.md's example takes as given, and checks of its result."""

BEFORE = """
import torch
import torch.distributed as dist
from torch.nn import functional as F

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Model(torch.nn.Module):
    def __init__(self, pgs):
        super().__init__()
        self.pg_collection = pgs
        self.embedding = torch.nn.Embedding(256, 32)
        self.qkv = torch.nn.Linear(32, 3 * 32)

    def forward(self, tokens, cp):
        x = self.embedding(tokens)
        q, k, v = self.qkv(x).unflatten(1, (3, 4, 8)).unbind(1)
        x = x + cp.attention(q, k, v).flatten(1)
        labels = cp.roll_tensor(tokens)
        return F.cross_entropy(x @ self.embedding.weight.T, labels, reduction="none")


def sample(length):
    tokens = torch.randint(256, (length,))
    return {"tokens": tokens, "loss_mask": (torch.arange(length) < length - 1).float()}


loader = [[sample(n) for n in (300, 7, 1, 64)] for _ in range(2)]
updates, evaluated = [], []


def update(model, group):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
    updates.append(float(model.qkv.weight.grad.norm()))
    model.zero_grad()


def evaluate(model):
    evaluated.append(model.pg_collection)
"""

AFTER = """
assert len(updates) == 2 and all(norm > 0 for norm in updates)
assert evaluated == [eval_pgs] and model.pg_collection is train_pgs
"""
