"""Every call of a handler, where some or all ranks of a group have no rows, equals one rank.

What is compared: support/zero_rows.py.
"""

from __future__ import annotations

import functools
from operator import attrgetter
from typing import Any

import pytest
import torch
from support.core_attention import WholeAttention
from support.public_names import names_of_handler
from support.zero_rows import DTYPES, PLANS, TYPES, Call, Inputs, Made, Results, check, masked
from torch import Tensor
from torch.nn import functional as F

import hcp
from hcp._words import QkvFormat
from hcp.exchange import states as passing

# ---- the calls -----------------------------------------------------------------------------------


def attention(**options: Any) -> Call:
    def call(made: Made, given: Inputs) -> Results:
        more = dict(options)
        if more.pop("sinks", False):
            more["sinks"] = given.parameter("sinks", 4)
        heads, of_keys = more.pop("heads", (4, 2))
        tensors = given("query", heads, 8), given("key", of_keys, 8), given("value", of_keys, 6)
        if "softcap" in more:  # no kernel caps scores of smaller dtypes on CPUs
            tensors = tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)
        found = made.cp.attention(*tensors, return_lse=True, **more)
        return {"out": ("rows", found[0]), "lse": ("rows", found[1])}

    return call


def by_sequences(qkv_format: QkvFormat) -> Call:
    """Attention of a batch of equal lengths."""

    def call(made: Made, given: Inputs) -> Results:
        count = max(1, len(made.cp.layout.sequences))
        rows = [given(name, 4, 8) for name in ("query", "key", "value")]
        batch = [x.unflatten(0, (count, -1)) if len(x) else x.unsqueeze(0) for x in rows]
        if qkv_format == "sbhd":
            batch = [x.transpose(0, 1) for x in batch]
        out = made.cp.attention(*batch, qkv_format=qkv_format)
        out = out.transpose(0, 1) if qkv_format == "sbhd" else out
        return {"out": ("rows", out.flatten(0, 1))}

    return call


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
    """Latent rows (n, 8) to keys (n, 4, 5) and values (n, 4, 4). Like many models it reshapes in a
    way that fails for n = 0."""

    def __init__(self, given: Inputs) -> None:
        self.weights = [given.parameter("weight", 4 * 9, 8), given.parameter("bias", 4 * 9)]

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        key, value = F.linear(rows, *self.weights).view(len(rows), -1, 9).split([5, 4], -1)
        return key, value


def core_attn(made: Made, given: Inputs) -> Results:
    tensors = {name: given(name, 4, 8) for name in ("query", "key", "value")}
    gain = {"gain": given.parameter("gain", 1)}
    own = WholeAttention()
    functional = functools.partial(torch.func.functional_call, own, gain)
    options = {"attn_mask_type": "causal", "packed_seq_params": made.cp.packed_seq_params()}
    by_module = made.cp.core_attn(attn_mod=lambda *x, **o: functional(x, o), **tensors, **options)
    return {
        "out": ("rows", made.cp.core_attn(attn_mod=None, **tensors)),
        "by a module": ("rows", by_module),
    }


def cross_attention(**options: Any) -> Call:
    def call(made: Made, given: Inputs) -> Results:
        more = dict(options)
        if more.pop("sinks", False):
            more["sinks"] = given.parameter("sinks", 4)
        key, value = given("key", 2, 8, keys=True), given("value", 2, 6, keys=True)
        query = given("query", 4, 8)
        found = made.cp.cross_attention(query, key, value, made.keys, return_lse=True, **more)
        return {"out": ("rows", found[0]), "lse": ("rows", found[1])}

    return call


def sparse_attention(latent: bool) -> Call:
    def call(made: Made, given: Inputs) -> Results:
        indexer = given("index query", 3, 4), given("index key", 4), given("index weights", 3)
        indices, scores = made.cp.sparse.top_k(*indexer, 2)
        keys: dict[str, Any]
        if latent:
            keys = {"key": given("latent", 8), "expand": Expansion(given)}
        else:
            keys = {"key": given("key", 2, 5), "value": given("value", 2, 4)}
        found = made.cp.sparse.attention(given("query", 4, 5), indices=indices, **keys)
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
    rows = made.cp.sequences.repeat(given("value", 3, kind="held"))
    sums = made.cp.sequences.sum(given("x", 3) * rows)
    own = made.cp.sequences.combine(sums.square())
    tokens = given("y", 2)[: made.cp.rows - made.cp.layout.padding]
    group = made.cp.group.sum(tokens.sum(0, keepdim=True))
    named = {"rows": ("rows", rows), "sums": ("held", sums), "brought": ("brought", own)}
    return {**named, "group": ("once", group)}


def over_domain(made: Made, given: Inputs) -> Results:
    x = given("x", 2)
    tokens = x[: made.cp.rows - made.cp.layout.padding]
    return {"rows": ("rows", x * made.cp.group.sum_over_domain(tokens.sum(0, keepdim=True)))}


def rolled(made: Made, given: Inputs) -> Results:
    x = given("x", 2, 3)
    back = made.cp.roll_tensor(x.permute(1, 2, 0), 2, -1).permute(2, 0, 1)
    return {"next": ("rows", made.cp.roll_tensor(x)), "back": ("rows", back)}


def with_halo(made: Made, given: Inputs) -> Results:
    found, at = made.cp.scan.halo(given("x", 2, 3), 2), made.cp.scan.halo_rows(2)
    return {"before": ("rows", torch.stack([found[at - 2], found[at - 1], found[at]], 1))}


def spans_of(cp: hcp.ContextParallelHandler, x: Tensor) -> list[Tensor]:
    sizes = cp.scan.span_cu_seqlens.diff().tolist()
    return list(x.split(sizes)) if sizes else []


def recurrence(name: str) -> Call:
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
            entering = made.cp.scan.pass_states(states, **{name: factors})
        outs = []
        spans = spans_of(made.cp, x), spans_of(made.cp, factor), entering
        for rows, factors, state in zip(*spans, strict=True):
            state = state.to(x.dtype)  # a map's is float32 or wider
            for row, one in zip(rows, factors, strict=True):
                state = multiply(one, state) + row
                outs.append(state)
        return {"states": ("rows", torch.stack(outs) if outs else entering.to(x.dtype))}

    return call


def mixed_states(made: Made, given: Inputs) -> Results:
    """Decays wider than states: the result has the dtype of states."""
    x = given("x", 2, 3)
    ends = [rows.sum(0) for rows in spans_of(made.cp, x)]
    states = torch.stack(ends) if ends else x
    decay = torch.zeros(len(states), 1, 1, dtype=torch.promote_types(x.dtype, torch.float32))
    entering = made.cp.scan.pass_states(states, decay)  # what the span before has given
    assert entering.dtype == x.dtype
    seen = x + entering.sum() * 0
    return {"states": ("rows", seen)}


def mapped(
    cp: hcp.ContextParallelHandler, states: Tensor, factors: Tensor, initial: Tensor
) -> Tensor:
    Parts = tuple[Tensor, ...]

    def after(maps: Parts, before: Parts) -> Parts:
        return (maps[0] @ before[0] + maps[1],)

    def both(earlier: Parts, later: Parts) -> Parts:
        return later[0] @ earlier[0], later[0] @ earlier[1] + later[1]

    (entering,) = cp.scan.pass_maps(
        (factors, states), combine=both, apply=after, initial=(initial,)
    )
    return entering


def by_heads(heads: int) -> Call:
    def call(made: Made, given: Inputs) -> Results:
        cp = made.cp
        own = cp.whole.sequence_to_head(given("x", heads, 2))
        held = cp.whole.head_slice(heads)
        assert own.shape[1] == held.stop - held.start
        whole = own.split(cp.whole.cu_seqlens.diff().tolist())
        scanned = torch.cat([x.cumsum(0) for x in whole]) if whole else own
        return {"scanned": ("rows", cp.whole.head_to_sequence(scanned, heads))}

    return call


def losses(made: Made, given: Inputs) -> Results:
    cp, losses = made.cp, given("losses")
    mask = torch.ones(cp.rows)
    mask[cp.rows - cp.layout.padding :] = 0
    loss = cp.loss(losses, mask, grad_reduce="sum").view(1)
    total, count = cp.loss_sum(losses, mask)
    return {"loss": ("share", loss), "sums": ("share", torch.stack([total, count]).view(1, 2))}


def padded(made: Made, given: Inputs) -> Results:
    x = given("x", 2)
    row = made.cp.at_least_one_row(x, 3.0)
    assert len(row) == max(1, made.cp.rows)
    return {"x": ("rows", row[: made.cp.rows])}


CALLS: dict[str, tuple[tuple[str, ...], Call]] = {
    **{f"attention by {name}": (("attention",), attention(comm_type=name)) for name in TYPES},
    "attention of one key head": (("attention",), attention(heads=(4, 1), comm_type="a2a")),
    "attention of one head": (("attention",), attention(heads=(1, 1))),
    "attention of three key heads": (("attention",), attention(heads=(6, 3), comm_type="a2a")),
    "a window": (("attention",), attention(window_size=(2, 0), causal=False)),
    "attention both ways": (("attention",), attention(causal=False)),
    "sinks": (("attention",), attention(sinks=True)),
    "sinks by heads": (("attention",), attention(sinks=True, comm_type="a2a")),
    "a cap": (("attention",), attention(softcap=3.0)),
    "attention of rotated rows": (("attention", "rotary"), rotated_attention),
    "latent attention": (("attention",), latent_attention),
    "core attention": (("core_attn", "packed_seq_params"), core_attn),
    "cross-attention": (("cross_attention",), cross_attention()),
    "causal cross-attention": (("cross_attention",), cross_attention(causal=True, sinks=True)),
    "cross-attention in a window": (("cross_attention",), cross_attention(window_size=(1, 1))),
    "sparse attention": (("sparse.top_k", "sparse.attention"), sparse_attention(latent=False)),
    "sparse attention to latents": (("sparse.attention",), sparse_attention(latent=True)),
    "rotary embedding": (
        ("rotary", "apply_rotary_pos_emb", "get_emb_on_this_cp_rank", "get_rotary_seq_len"),
        rotated,
    ),
    "dispatch": (("dispatch", "combine"), dispatched),
    "dispatch to another dtype": (("dispatch", "combine"), cast),
    "values of sequences": (
        ("sequences.repeat", "sequences.sum", "sequences.combine", "group.sum"),
        of_sequences,
    ),
    "a sum over the domain": (("group.sum_over_domain",), over_domain),
    "rolls": (("roll_tensor",), rolled),
    "a halo": (("scan.halo", "scan.halo_rows"), with_halo),
    "states and decays": (("scan.pass_states",), recurrence("decay")),
    "states and transitions": (("scan.pass_states",), recurrence("transition")),
    "states and wider decays": (("scan.pass_states",), mixed_states),
    "states and maps": (("scan.pass_maps",), recurrence("maps")),
    "whole sequences": (
        ("whole.sequence_to_head", "whole.head_to_sequence", "whole.head_slice"),
        by_heads(5),
    ),
    "whole sequences of one head": (
        ("whole.sequence_to_head", "whole.head_to_sequence"),
        by_heads(1),
    ),
    "losses": (("loss", "loss_sum"), losses),
    "a row that stands in": (("at_least_one_row",), padded),
}
MASKED = {
    f"{name} by {by}": attention(mask=name, comm_type=by)
    for name in ("full", "holes")
    for by in TYPES[:3]
}


# ---- compared ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_call_equals_one_rank(plan: str, name: str) -> None:
    check(PLANS[plan], CALLS[name][1], torch.float64)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_one_dtype(name: str, dtype: torch.dtype) -> None:
    check(PLANS["some of a group, and ranks outside"], CALLS[name][1], dtype)


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("plan", PLANS)
def test_attention_under_masks_equals_one_rank(plan: str, name: str) -> None:
    check(masked(PLANS[plan]), MASKED[name], torch.float64)


@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("plan", ["all but one of a group", "many ranks outside"])
def test_attention_of_a_batch_equals_one_rank(plan: str, qkv_format: QkvFormat) -> None:
    check(PLANS[plan], by_sequences(qkv_format), torch.float64)


@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith("states")])
@pytest.mark.parametrize("plan", PLANS)
def test_states_by_rounds_equal_one_rank(
    plan: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passing, "ROUND_BYTES", 0)
    check(PLANS[plan], CALLS[name][1], torch.float64)


# ---- what a rank without rows has ----------------------------------------------------------------

OUTSIDE = {
    "comm.default_type": "p2p",
    "comm.layer_bytes": 0,
    "comm_types": ("p2p",),
    "cu_seqlens": [0],
    "degree": 0,
    "device": torch.device("cpu"),
    "group.global_ranks": [],
    "group.rank": 0,
    "head_chunks": 1,
    "kernel_family": "auto",
    "loss_tokens": 7.0,
    "max_seqlen": 0,
    "payloads": {},
    "position_ids": [],
    "rows": 0,
    "scan.span_cu_seqlens": [0],
    "whole.cu_seqlens": [0],
    "whole.parents": (),
    "whole.row_indices": [],
    "whole.stretch_cu_seqlens": [0],
}
"""Of a handler's public names, those that give no rows, and what they give there."""

OTHERS = {
    "comm.choices",
    "layout",
    "micro_batch",
    "plan",
    "scan.choices",
    "scan.choose",
    "scan.type",
}


def test_a_rank_outside_has_no_rows() -> None:
    def found(groups: Any) -> dict[str, Any]:
        cp = hcp.ContextParallelHandler(
            hcp.Plan.from_dict(PLANS["one rank outside"]), 0, groups.transport, loss_tokens=7.0
        )
        values = {name: attrgetter(name)(cp) for name in OUTSIDE}
        return {n: x.tolist() if isinstance(x, Tensor) else x for n, x in values.items()}

    *_, outside = hcp.loopback(3, found)
    assert outside == OUTSIDE


def test_every_public_name_of_a_handler_is_tried_without_rows() -> None:
    covered = {name for names, _ in CALLS.values() for name in names}
    handler, *_ = hcp.loopback(4, lambda groups: Made(groups, PLANS["many ranks outside"]).cp)
    assert {*names_of_handler(handler)} - OTHERS == covered | OUTSIDE.keys()
