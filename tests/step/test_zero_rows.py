"""Every call of a handler, where some or all ranks of a group have no rows, equals one rank.

A rank without rows makes each call and its backward, gets results of the dtype that others get, and
gives every input and parameter a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.latent import Up
from torch import Tensor
from torch.nn import functional as F

import hcp

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
    return {**made.to_dict(), **{k: v for k, v in plan.items() if k != "lengths"}}


def on_one_rank(plan: dict[str, Any]) -> dict[str, Any]:
    everything = {"first_rank": 0, "degree": 1, "sequences": list(range(len(plan["lengths"])))}
    return plan | {"ranks": 1, "micro_batches": [{"groups": [everything]}], "alignment": 1}


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
    if kind == "rows":
        rows = [starts[s] + t for s, first, n in cp.layout.spans for t in range(first, first + n)]
        return rows + [sum(lengths)] * cp.layout.padding, sum(lengths) + 1
    if kind == "loaded":
        return [starts[s] + t for s in own for t in range(lengths[s])], sum(lengths) + 1
    if kind in ("once", "share"):
        return [0], 1
    return list(cp.layout.sequences) if kind == "held" else own, len(lengths)


class Inputs:
    """Draws a rank's part of tensors that all ranks know whole."""

    def __init__(self, made: Made, dtype: torch.dtype) -> None:
        self.made, self.dtype = made, dtype
        self.leaves: dict[str, tuple[Tensor, list[int], int]] = {}

    def __call__(self, name: str, *shape: int, kind: str = "rows", keys: bool = False) -> Tensor:
        """Rows of a kind, of the keys' micro-batch if asked, which take a gradient."""
        found, count = places(kind, self.made.keys if keys else self.made.cp, self.made.sources)
        leaf = self._whole(name, count, *shape)[found].to(self.dtype).requires_grad_()
        self.leaves[name] = leaf, found, count
        return leaf

    def parameter(self, name: str, *shape: int) -> Tensor:
        leaf = self._whole(name, *shape).to(self.dtype).requires_grad_()
        self.leaves[name] = leaf, list(range(shape[0])), shape[0]
        return leaf

    def weights_of(self, name: str, kind: str, x: Tensor) -> Tensor:
        """What the loss multiplies a result by: padding by 0, what ranks share on one of them."""
        found, count = places(kind, self.made.cp, self.made.sources)
        whole = self._whole(f"weights of {name}", count, *x.shape[1:])
        whole[sum(self.made.cp.plan.lengths) :] = 0
        return whole[found] * (kind not in ("held", "once") or self.made.cp.place == 0)

    def _whole(self, name: str, *shape: int) -> Tensor:
        seed = sum(map(ord, name))
        drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return drawn.to(self.dtype).double()


class Made:
    """What a call is given: the handlers of this rank."""

    def __init__(self, groups: Any, plan: dict[str, Any], options: dict[str, Any]) -> None:
        made, ranks = hcp.Plan.from_dict(plan), plan["ranks"]
        self.sources = [(i + ranks - 1) % ranks for i in range(len(made.lengths))]
        lengths, loss_tokens = keys_of(plan), float(sum(made.lengths))
        given = {"sources": self.sources, "loss_tokens": loss_tokens}
        self.cp = hcp.ContextParallelHandler(made, 0, groups.transport, **given, **options)
        self.keys = hcp.ContextParallelHandler(hcp.Plan.from_dict(lengths), 0, groups.transport)


# ---- the calls -----------------------------------------------------------------------------------


def attention(**options: Any) -> Callable[[Made, Inputs], Results]:
    def call(made: Made, given: Inputs) -> Results:
        more = dict(options)
        if more.pop("sinks", False):
            more["sinks"] = given.parameter("sinks", 4)
        heads = more.pop("kv_heads", 2)
        tensors = given("query", 4, 8), given("key", heads, 8), given("value", heads, 6)
        if "softcap" in more:  # no kernel caps scores of smaller dtypes on CPUs
            tensors = tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)
        found = made.cp.attention(*tensors, return_lse=True, **more)
        return {"out": ("rows", found[0]), "lse": ("rows", found[1])}

    return call


def of_one_head(made: Made, given: Inputs) -> Results:
    out = made.cp.attention(given("query", 1, 8), given("key", 1, 8), given("value", 1, 8))
    return {"out": ("rows", out)}


def rotated_attention(made: Made, given: Inputs) -> Results:
    query, key, value = given("query", 4, 8), given("key", 2, 8), given("value", 2, 8)
    rotary = made.cp.rotary(frequencies())
    return {"out": ("rows", made.cp.attention(query, key, value, rotary_pos_emb=rotary))}


def latent_attention(made: Made, given: Inputs) -> Results:
    up = Expansion(given)
    out, lse = made.cp.attention(
        given("query", 4, 5), given("latent", 8), expand=up, parameters=up.weights, return_lse=True
    )
    return {"out": ("rows", out), "lse": ("rows", lse)}


class Expansion:
    """Latent rows to keys and values, as `support.latent.Up`."""

    def __init__(self, given: Inputs) -> None:
        like = Up(4)
        self.weights = [given.parameter(n, *p.shape) for n, p in like.named_parameters()]
        self._up = like

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(("weight", "bias"), self.weights, strict=True))
        found: tuple[Tensor, Tensor] = torch.func.functional_call(self._up, named, (rows,))
        return found


def core_attn(made: Made, given: Inputs) -> Results:
    tensors = {name: given(name, 4, 8) for name in ("query", "key", "value")}
    return {"out": ("rows", made.cp.core_attn(attn_mod=None, **tensors))}


def cross_attention(**options: Any) -> Callable[[Made, Inputs], Results]:
    def call(made: Made, given: Inputs) -> Results:
        more = dict(options)
        if more.pop("sinks", False):
            more["sinks"] = given.parameter("sinks", 4)
        key, value = given("key", 2, 8, keys=True), given("value", 2, 6, keys=True)
        query = given("query", 4, 8)
        found = made.cp.cross_attention(query, key, value, made.keys, return_lse=True, **more)
        return {"out": ("rows", found[0]), "lse": ("rows", found[1])}

    return call


def sparse_attention(latent: bool) -> Callable[[Made, Inputs], Results]:
    def call(made: Made, given: Inputs) -> Results:
        indexer = given("index query", 3, 4), given("index key", 4), given("index weights", 3)
        indices, scores = made.cp.top_k_keys(*indexer, 2)
        keys: dict[str, Any]
        if latent:
            keys = {"key": given("latent", 8), "expand": Expansion(given)}
        else:
            keys = {"key": given("key", 2, 5), "value": given("value", 2, 4)}
        found = made.cp.sparse_attention(given("query", 4, 5), indices=indices, **keys)
        scores = scores.masked_fill(indices < 0, 0)
        results = zip(("out", "lse", "weights", "scores"), (*found, scores), strict=True)
        return {name: ("rows", x) for name, x in results}

    return call


def frequencies() -> Tensor:
    return torch.arange(64)[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1]).double()


def rotated(made: Made, given: Inputs) -> Results:
    table = made.cp.get_emb_on_this_cp_rank(frequencies()).to(given.dtype)
    turned = made.cp.apply_rotary_pos_emb(given("t", 3, 6), made.cp.rotary(frequencies()))
    assert 0 <= made.cp.get_rotary_seq_len() <= 64
    return {"turned": ("rows", turned), "table": ("rows", table)}


def dispatched(made: Made, given: Inputs) -> Results:
    rows = made.cp.dispatch(given("x", 3, kind="loaded"))
    back = made.cp.combine(rows * rows)
    return {"rows": ("rows", rows), "back": ("loaded", back)}


def cast(made: Made, given: Inputs) -> Results:
    rows = made.cp.dispatch(given("x", 3, kind="loaded"), dtype=torch.float32)
    return {
        "rows": ("rows", rows),
        "back": ("loaded", made.cp.combine(rows, dtype=torch.bfloat16)),
    }


def of_sequences(made: Made, given: Inputs) -> Results:
    rows = made.cp.repeat_by_sequence(given("value", 3, kind="held"))
    sums = made.cp.sum_by_sequence(given("x", 3) * rows)
    own = made.cp.combine_by_sequence(sums.square())
    tokens = given("y", 2)[: made.cp.rows - made.cp.layout.padding]
    group = made.cp.sum_over_group(tokens.sum(0, keepdim=True))
    named = {"rows": ("rows", rows), "sums": ("held", sums), "brought": ("brought", own)}
    return {**named, "group": ("once", group)}


def rolled(made: Made, given: Inputs) -> Results:
    x = given("x", 2, 3)
    back = made.cp.roll_tensor(x.permute(1, 2, 0), 2, -1).permute(2, 0, 1)
    return {"next": ("rows", made.cp.roll_tensor(x)), "back": ("rows", back)}


def with_halo(made: Made, given: Inputs) -> Results:
    found, at = made.cp.halo(given("x", 2, 3), 2), made.cp.halo_rows(2)
    return {"before": ("rows", torch.stack([found[at - 2], found[at - 1], found[at]], 1))}


def spans_of(cp: hcp.ContextParallelHandler, x: Tensor) -> list[Tensor]:
    sizes = cp.span_cu_seqlens.diff().tolist()
    return list(x.split(sizes)) if sizes else []


def recurrence(name: str) -> Callable[[Made, Inputs], Results]:
    """h = decay * h + input, or transition @ h + input, by spans and the states that enter them."""

    def call(made: Made, given: Inputs) -> Results:
        x, factor = given("x", 2, 3), given("factor", *((2, 1) if name == "decay" else (2, 2)))
        factor, multiply = 0.1 * factor, torch.mul if name == "decay" else torch.matmul
        ends, products = [], []
        for rows, factors in zip(spans_of(made.cp, x), spans_of(made.cp, factor), strict=True):
            end, product = rows[0], factors[0]
            for row, one in zip(rows[1:], factors[1:], strict=True):
                end, product = multiply(one, end) + row, multiply(one, product)
            ends.append(end)
            products.append(product)
        states = torch.stack(ends) if ends else x
        factors = torch.stack(products) if products else factor
        if name == "maps":
            entering = mapped(made.cp, states, factors, given.parameter("initial", 2, 3))
        else:
            entering = made.cp.pass_states(states, **{name: factors})
        outs = []
        spans = spans_of(made.cp, x), spans_of(made.cp, factor), entering
        for rows, factors, state in zip(*spans, strict=True):
            state = state.to(x.dtype)  # a map's is float32 or wider
            for row, one in zip(rows, factors, strict=True):
                state = multiply(one, state) + row
                outs.append(state)
        return {"states": ("rows", torch.stack(outs) if outs else entering.to(x.dtype))}

    return call


def mapped(
    cp: hcp.ContextParallelHandler, states: Tensor, factors: Tensor, initial: Tensor
) -> Tensor:
    Parts = tuple[Tensor, ...]

    def after(maps: Parts, before: Parts) -> Parts:
        return (maps[0] @ before[0] + maps[1],)

    def both(earlier: Parts, later: Parts) -> Parts:
        return later[0] @ earlier[0], later[0] @ earlier[1] + later[1]

    (entering,) = cp.pass_maps((factors, states), combine=both, apply=after, initial=(initial,))
    return entering


def by_heads(heads: int) -> Callable[[Made, Inputs], Results]:
    def call(made: Made, given: Inputs) -> Results:
        cp = made.cp
        own = cp.sequence_to_head(given("x", heads, 2))
        held = cp.head_slice(heads)
        assert own.shape[1] == held.stop - held.start
        whole = own.split(cp.whole_cu_seqlens.diff().tolist())
        scanned = torch.cat([x.cumsum(0) for x in whole]) if whole else own
        return {"scanned": ("rows", cp.head_to_sequence(scanned, heads))}

    return call


def losses(made: Made, given: Inputs) -> Results:
    cp, losses = made.cp, given("losses")
    mask = torch.ones(cp.rows)
    mask[cp.rows - cp.layout.padding :] = 0
    loss = cp.loss(losses, mask).view(1)
    total, count = cp.loss_sum(losses, mask)
    return {"loss": ("share", loss), "sums": ("share", torch.stack([total, count]).view(1, 2))}


def padded(made: Made, given: Inputs) -> Results:
    x = given("x", 2)
    row = made.cp.at_least_one_row(x, 3.0)
    assert len(row) == max(1, made.cp.rows)
    return {"x": ("rows", row[: made.cp.rows])}


TYPES: Any = ("p2p", "all_gather", "a2a", "a2a+p2p", "auto")
CALLS: dict[str, tuple[tuple[str, ...], Callable[[Made, Inputs], Results]]] = {
    **{f"attention by {name}": (("attention",), attention(comm_type=name)) for name in TYPES},
    "attention of one key head": (("attention",), attention(kv_heads=1, comm_type="a2a")),
    "attention of one head": (("attention",), of_one_head),
    "a window": (("attention",), attention(window_size=(2, 0), causal=False)),
    "attention both ways": (("attention",), attention(causal=False)),
    "sinks": (("attention",), attention(sinks=True)),
    "sinks by heads": (("attention",), attention(sinks=True, comm_type="a2a")),
    "a cap": (("attention",), attention(softcap=3.0)),
    "attention of rotated rows": (("attention", "rotary"), rotated_attention),
    "latent attention": (("attention",), latent_attention),
    "a core attention": (("core_attn",), core_attn),
    "cross-attention": (("cross_attention",), cross_attention()),
    "causal cross-attention": (("cross_attention",), cross_attention(causal=True, sinks=True)),
    "cross-attention in a window": (("cross_attention",), cross_attention(window_size=(1, 1))),
    "sparse attention": (("top_k_keys", "sparse_attention"), sparse_attention(latent=False)),
    "sparse attention to latents": (("sparse_attention",), sparse_attention(latent=True)),
    "rotary embedding": (
        ("rotary", "apply_rotary_pos_emb", "get_emb_on_this_cp_rank", "get_rotary_seq_len"),
        rotated,
    ),
    "dispatch": (("dispatch", "combine"), dispatched),
    "dispatch to another dtype": (("dispatch", "combine"), cast),
    "values of sequences": (
        ("repeat_by_sequence", "sum_by_sequence", "combine_by_sequence", "sum_over_group"),
        of_sequences,
    ),
    "rolls": (("roll_tensor",), rolled),
    "a halo": (("halo", "halo_rows"), with_halo),
    "states and decays": (("pass_states",), recurrence("decay")),
    "states and transitions": (("pass_states",), recurrence("transition")),
    "states and maps": (("pass_maps",), recurrence("maps")),
    "whole sequences": (("sequence_to_head", "head_to_sequence", "head_slice"), by_heads(5)),
    "whole sequences of one head": (("sequence_to_head", "head_to_sequence"), by_heads(1)),
    "losses": (("loss", "loss_sum"), losses),
    "a row that stands in": (("at_least_one_row",), padded),
}
MASKED = {name: attention(mask=name, comm_type=by) for name in ("full", "holes") for by in TYPES[:3]}


# ---- compared ------------------------------------------------------------------------------------

Found = dict[str, tuple[torch.dtype, Tensor]]


def found_by(groups: Any, plan: dict[str, Any], call: Any, dtype: torch.dtype) -> Found:
    """Results of a rank and its gradients, float64, in their places among those of all ranks."""
    size = plan["ranks"]
    inner = max(d for d in range(1, max(2, size)) if size % d == 0)
    options = {"comm_types": TYPES, "hierarchical_context_parallel_sizes": (inner, size // inner)}
    if "masks" in plan:
        options = {"comm_types": TYPES[:3]}
    made = Made(groups, plan, options)
    given = Inputs(made, dtype)
    results, total, found = call(made, given), torch.zeros((), dtype=torch.float64), {}
    for name, (kind, x) in results.items():
        rows, count = places(kind, made.cp, made.sources)
        assert len(x) == len(rows), (name, x.shape, rows)
        weights = given.weights_of(name, kind, x)
        finite = x.double().masked_fill(x.isinf(), 0)
        total = total + (finite * weights).sum()
        kept = weights.new_tensor(float(kind not in ("held", "once") or made.cp.place == 0))
        found[name] = x.dtype, in_place(x if kept else x * 0, rows, count)
    total.backward()  # type: ignore[no-untyped-call]
    for name, (leaf, rows, count) in given.leaves.items():
        assert leaf.grad is not None, f"{name} has no gradient on rank {made.cp.layout.rank}"
        found[f"gradient of {name}"] = leaf.grad.dtype, in_place(leaf.grad, rows, count)
    return found


def in_place(x: Tensor, rows: list[int], count: int) -> Tensor:
    whole = torch.zeros(count, *x.shape[1:], dtype=torch.float64)
    return whole.index_add(0, torch.tensor(rows, dtype=torch.int64), x.detach().double())


def check(plan: dict[str, Any], call: Any, dtype: torch.dtype) -> None:
    shares = hcp.loopback(plan["ranks"], lambda groups: found_by(groups, plan, call, dtype))
    (want,) = hcp.loopback(
        1, lambda groups: found_by(groups, on_one_rank(plan), call, torch.float64)
    )
    for name, (_, expected) in want.items():
        dtypes = {share[name][0] for share in shares}
        assert len(dtypes) == 1, f"{name} has the dtypes {[share[name][0] for share in shares]}"
        tokens = sum(plan["lengths"])
        found = torch.stack([share[name][1] for share in shares]).sum(0)[:tokens]
        limit = TOLERANCES[dtype] * max(1.0, float(expected.nan_to_num(0, 0, 0).abs().max()))
        torch.testing.assert_close(found, expected[:tokens], rtol=0, atol=limit, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_call_equals_one_rank(plan: str, name: str, dtype: torch.dtype) -> None:
    check(PLANS[plan], CALLS[name][1], dtype)
