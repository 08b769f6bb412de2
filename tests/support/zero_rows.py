"""Compare a call on ranks of which some have no rows with the same call on one rank.

    check(PLANS["one rank outside"], call, torch.float64)    # call(made, given) gives Results

A rank without rows makes the call and its backward. It gets results of the dtype that others get,
and every input and parameter has a gradient there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import hcp

TYPES: Any = ("p2p", "all_gather", "a2a", "a2a+p2p", "auto")

Results = dict[str, tuple[str, Tensor]]
"""Of each result, by name, what its rows are: see `places`."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}


# ---- plans in which ranks have no rows -----------------------------------------------------------


def planned(ranks: int, lengths: list[int], *groups: tuple[int, int, list[int]]) -> dict[str, Any]:
    """A plan of one micro-batch as data. ``groups``: first rank, degree, sequences."""
    made = [{"first_rank": f, "degree": d, "sequences": s} for f, d, s in groups]
    return {
        "ranks": ranks,
        "max_tokens_per_rank": 64,
        "lengths": lengths,
        "micro_batches": [{"groups": made}],
    }


PLANS = {
    "one rank outside": planned(3, [5, 2], (0, 2, [0, 1])),
    "all but one of a group": planned(4, [1], (0, 4, [0])),
    "some of a group, and ranks outside": planned(5, [2, 1], (1, 3, [0, 1])),
    "two groups of few tokens": planned(5, [1, 2, 1], (0, 2, [2]), (2, 3, [1, 0])),
    "rows of padding": planned(4, [3, 1], (0, 3, [0, 1])) | {"alignment": 4},
    "many ranks outside": planned(4, [9], (3, 1, [0])),
}


def keys_of(plan: dict[str, Any]) -> dict[str, Any]:
    """The plan of the keys of cross-attention: other lengths, on one rank alone."""
    ranks, lengths = plan["ranks"], [n + 2 for n in plan["lengths"]]
    return planned(ranks, lengths, (ranks - 1, 1, list(range(len(lengths)))))


def masked(plan: dict[str, Any]) -> dict[str, Any]:
    """The plan, under masks of which some rows see nothing."""
    masks = [
        hcp.Mask(n, [((n // 2, n), (0, n), "causal")] if n > 1 else []) for n in plan["lengths"]
    ]
    named = {"full": [hcp.Mask.full(n) for n in plan["lengths"]], "holes": masks}
    made = hcp.plan(plan["lengths"], ranks=1, max_tokens_per_rank=64, masks=named)
    return made.to_dict() | plan | {"max_degree": plan["ranks"]}


def on_one_rank(plan: dict[str, Any]) -> dict[str, Any]:
    everything = {"first_rank": 0, "degree": 1, "sequences": list(range(len(plan["lengths"])))}
    alone = {"ranks": 1, "max_degree": 1, "alignment": 1}
    return plan | alone | {"micro_batches": [{"groups": [everything]}]}


# ---- inputs --------------------------------------------------------------------------------------


def places(kind: str, cp: hcp.ContextParallelHandler, sources: list[int]) -> tuple[list[int], int]:
    """Where rows lie among those of all sequences end to end, and how many these are.

    Kinds: "rows" of tokens that this rank computes, "loaded" those that it loaded, "held" one of
    each sequence of its group, "brought" one of each that it loaded, "once" one for its group,
    "share" one for each rank.
    """
    lengths, rank = cp.plan.lengths, cp.layout.rank
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    own = [i for i, source in enumerate(sources) if source == rank]
    if kind == "rows":  # those of padding lie beyond the end
        rows = [starts[s] + t for s, first, n in cp.layout.spans for t in range(first, first + n)]
        return rows + [sum(lengths)] * cp.layout.padding, sum(lengths)
    if kind == "loaded":
        return [starts[s] + t for s in own for t in range(lengths[s])], sum(lengths)
    if kind in ("once", "share"):
        return [0], 1
    return list(cp.layout.sequences) if kind == "held" else own, len(lengths)


class Inputs:
    """Draws a rank's part of tensors that all ranks know whole."""

    def __init__(self, made: Made, dtype: torch.dtype) -> None:
        self.made, self.dtype = made, dtype
        self.leaves: dict[str, tuple[Tensor, list[int], int]] = {}
        self.parameters: set[str] = set()

    def __call__(self, name: str, *shape: int, kind: str = "rows", keys: bool = False) -> Tensor:
        """Rows of a kind, of the keys' micro-batch if asked, which take a gradient."""
        found, count = places(kind, self.made.keys if keys else self.made.cp, self.made.sources)
        leaf = self._whole(name, count + 1, *shape)[found].to(self.dtype).requires_grad_()
        self.leaves[name] = leaf, found, count
        return leaf

    def parameter(self, name: str, *shape: int) -> Tensor:
        leaf = self._whole(name, *shape).to(self.dtype).requires_grad_()
        self.leaves[name] = leaf, list(range(shape[0])), shape[0]
        self.parameters.add(name)
        return leaf

    def weights_of(self, name: str, kind: str, x: Tensor) -> Tensor:
        """What the loss multiplies a result by: padding by 0, what ranks share on one of them."""
        found, count = places(kind, self.made.cp, self.made.sources)
        whole = self._whole(f"weights of {name}", count + 1, *x.shape[1:])
        whole[count] = 0
        return whole[found] * self.made.counts(kind)

    def _whole(self, name: str, *shape: int) -> Tensor:
        seed = sum(map(ord, name))
        drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return drawn.to(self.dtype).double()


class Made:
    """What a call is given: the handlers of this rank."""

    def __init__(self, groups: Any, plan: dict[str, Any]) -> None:
        made, ranks = hcp.Plan.from_dict(plan), plan["ranks"]
        inner = max(d for d in range(1, max(2, ranks)) if ranks % d == 0)
        self.sources = [(i + ranks - 1) % ranks for i in range(len(made.lengths))]
        self._given = made, 0, groups.transport
        self._options: dict[str, Any] = {
            "comm_types": TYPES[:3] if made.masks else TYPES,
            "hierarchical_context_parallel_sizes": () if made.masks else (inner, ranks // inner),
            "loss_tokens": float(sum(made.lengths)),
        }
        self.cp = self.again()
        self.keys = hcp.ContextParallelHandler(
            hcp.Plan.from_dict(keys_of(plan)), 0, groups.transport
        )

    def again(self, **options: Any) -> hcp.ContextParallelHandler:
        """The handler with further options."""
        given = self._options | options
        return hcp.ContextParallelHandler(*self._given, sources=self.sources, **given)

    def counts(self, kind: str) -> bool:
        """Whether results of a kind count on this rank: what a group shares does so on one."""
        return kind not in ("held", "once") or self.cp.group.rank == 0


# ---- compared ------------------------------------------------------------------------------------

Call = Callable[[Made, Inputs], Results]
Found = dict[str, tuple[torch.dtype, Tensor]]


def found_by(groups: Any, plan: dict[str, Any], call: Call, dtype: torch.dtype) -> Found:
    """Results of a rank and its gradients, float64, in their places among those of all ranks."""
    made = Made(groups, plan)
    given = Inputs(made, dtype)
    results, total, found = call(made, given), torch.zeros((), dtype=torch.float64), {}
    for name, (kind, x) in results.items():
        rows, count = places(kind, made.cp, made.sources)
        assert len(x) == len(rows), (name, x.shape, rows)
        finite = x.double().masked_fill(x.isinf(), 0)
        total = total + (finite * given.weights_of(name, kind, x)).sum()
        found[name] = x.dtype, in_place(x if made.counts(kind) else x * 0, rows, count)
    total.backward()
    for name, (leaf, rows, count) in given.leaves.items():
        assert leaf.grad is not None, f"{name} has no gradient on rank {made.cp.layout.rank}"
        shares = made.cp.degree or name not in given.parameters
        assert shares or not leaf.grad.any(), f"{name} has a gradient of no row"
        found[f"gradient of {name}"] = leaf.grad.dtype, in_place(leaf.grad, rows, count)
    return found


def in_place(x: Tensor, rows: list[int], count: int) -> Tensor:
    whole = torch.zeros(count + 1, *x.shape[1:], dtype=torch.float64)
    return whole.index_add(0, torch.tensor(rows, dtype=torch.int64), x.detach().double())[:count]


def check(plan: dict[str, Any], call: Call, dtype: torch.dtype) -> None:
    """Compare results and gradients with those of one rank in float64."""
    shares = hcp.loopback(plan["ranks"], lambda groups: found_by(groups, plan, call, dtype))
    alone = on_one_rank(plan)
    (want,) = hcp.loopback(1, lambda groups: found_by(groups, alone, call, torch.float64))
    for name, (_, expected) in want.items():
        dtypes = [share[name][0] for share in shares]
        assert len(set(dtypes)) == 1, f"{name} has the dtypes {dtypes}"
        found = torch.stack([share[name][1] for share in shares]).sum(0)
        limit = TOLERANCES[dtype] * max(1.0, float(expected.nan_to_num(0, 0, 0).abs().max()))
        assert torch.allclose(found, expected, rtol=0, atol=limit), (name, found, expected)
