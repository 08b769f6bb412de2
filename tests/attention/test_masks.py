"""Attention under masks equals attention on one rank with the same mask as a dense matrix."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from support import masks
from torch import Tensor

import hcp
from hcp import Mask
from hcp.exchange.layout import Layout
from hcp.step.dispatch import gather_masks

TYPES = ("all_gather", "p2p", "a2a")
HEADS, GROUPS, SIZE = 4, 2, 8


@dataclass(frozen=True)
class Job:
    """Sequences under masks, planned, and what attention makes of them."""

    plan: hcp.Plan
    comm_type: str
    window: tuple[int, int] = (-1, -1)
    sharing: bool = False
    name: str | None = None
    sinks: bool = False

    @property
    def masks(self) -> tuple[Mask, ...]:
        return self.plan.masks[self.name or next(iter(self.plan.masks))]


def rows_of(length: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"query": HEADS, "key": GROUPS, "value": GROUPS, "grad": HEADS}
    rows = {
        name: torch.randn(length, heads, SIZE, generator=generator, dtype=torch.float64)
        for name, heads in sizes.items()
    }
    return rows | {"token": torch.arange(length)}


def loss_of(out: Tensor, lse: Tensor, grad: Tensor) -> Tensor:
    return (out * grad).sum() + (lse.masked_fill(lse.isinf(), 0) * grad.sum(-1)).sum()


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)


def in_window(query: Tensor, key: Tensor, window: tuple[int, int]) -> Tensor:
    """Whether positions of keys lie in a window around those of queries."""
    left, right = window
    near = torch.ones_like(query + key, dtype=torch.bool)
    if left >= 0:
        near &= key >= query - left
    return near & (key <= query + right) if right >= 0 else near


def on_one_rank(job: Job, i: int, rows: dict[str, Tensor]) -> list[Tensor]:
    query, key, value = (rows[name].clone().requires_grad_() for name in ("query", "key", "value"))
    positions = torch.tensor(job.masks[i].positions)
    seen = job.masks[i].dense() & in_window(positions[:, None], positions, job.window)
    out, lse = masks.attention(query, key, value, seen)
    if job.sinks:
        both = torch.logaddexp(lse, SINKS.expand_as(lse))
        out, lse = out * (lse - both).exp().unsqueeze(-1), both
    loss_of(out, lse, rows["grad"]).backward()
    return [out.detach(), lse.detach(), query.grad, key.grad, value.grad, positions]


def on_a_rank(job: Job, samples: list[dict[str, Tensor]], groups: Any) -> list[tuple[Any, ...]]:
    rank = groups.transport.rank
    sources = [i % job.plan.ranks for i in range(len(samples))]
    own = [sample for sample, source in zip(samples, sources, strict=True) if source == rank]
    results = []
    step = hcp.dispatch(job.plan, own, sources, groups, comm_types=[job.comm_type])
    for cp, local in step:
        query, key, value = (
            local[name].clone().requires_grad_() for name in ("query", "key", "value")
        )
        sinks = SINKS if job.sinks else None
        options = {"window_size": job.window, "mask": job.name, "sinks": sinks}
        out, lse = cp.attention(query, key, value, return_lse=True, **options)
        loss_of(out, lse, local["grad"]).backward()
        rows = cp.rows - cp.layout.padding
        owners = torch.tensor(cp.layout.sequences).repeat_interleave(cp.cu_seqlens.diff().long())
        parts = [out.detach(), lse.detach(), query.grad, key.grad, value.grad, cp.position_ids]
        results.append((owners, local["token"][:rows], [x[:rows] for x in parts]))
    return results


def error_of(job: Job) -> float:
    """The largest difference to one rank, of anything, over all rows; each must be there once."""
    samples = [rows_of(n, i) for i, n in enumerate(job.plan.lengths)]
    whole = [on_one_rank(job, i, rows) for i, rows in enumerate(samples)]
    ranks = hcp.loopback(
        job.plan.ranks, lambda groups: on_a_rank(job, samples, groups), sharing=job.sharing
    )
    worst, seen = 0.0, 0
    for owners, tokens, parts in (result for rank in ranks for result in rank):
        for i in owners.unique().tolist():
            at = tokens[owners == i]
            seen += len(at)
            for part, expected in zip(parts, whole[i], strict=True):
                mine, theirs = part[owners == i], expected[at]
                assert torch.equal(mine.isinf(), theirs.isinf())
                difference = (mine - theirs).nan_to_num(0.0).abs()
                worst = max(worst, float(difference.max()))
    assert seen == sum(job.plan.lengths)
    return worst


def planned(lengths: list[int], given: Any, ranks: int, **limits: Any) -> hcp.Plan:
    return hcp.plan(lengths, masks=given, ranks=ranks, max_tokens_per_rank=400, **limits)


@pytest.mark.parametrize("comm_type", TYPES)
@pytest.mark.parametrize("kind", masks.KINDS)
def test_every_kind_equals_one_rank(kind: str, comm_type: str) -> None:
    r = Random(kind)
    lengths = [1, 2, 17, 97]
    given = [masks.KINDS[kind](r, n) for n in lengths]
    plan = planned(lengths, given, 3, min_degree=3)
    assert error_of(Job(plan, comm_type)) <= 1e-10


@pytest.mark.parametrize("comm_type", TYPES)
@pytest.mark.parametrize("degree", range(1, 9))
def test_any_degree_equals_one_rank(degree: int, comm_type: str) -> None:
    r = Random(degree)
    lengths = [1, 2 * degree - 1, 2 * degree + 1, 61]
    given = [masks.KINDS[r.choice(list(masks.KINDS))](r, n) for n in lengths]
    plan = planned(lengths, given, degree, min_degree=degree)
    assert error_of(Job(plan, comm_type, sinks=degree % 2 == 0)) <= 1e-10


@pytest.mark.parametrize("comm_type", TYPES)
@pytest.mark.parametrize(("node", "ranks"), [(2, 4), (2, 6), (3, 6), (1, 4), (4, 8)])
def test_groups_of_nodes_equal_one_rank(node: int, ranks: int, comm_type: str) -> None:
    r = Random(10 * node + ranks)
    lengths = [2 * ranks, 97, 1, 61]
    given = [masks.KINDS[r.choice(list(masks.KINDS))](r, n) for n in lengths]
    plan = planned(lengths, given, ranks, min_degree=ranks, ranks_per_node=node)
    assert error_of(Job(plan, comm_type)) <= 1e-10
    assert error_of(Job(plan, comm_type, (7, 2), sinks=True)) <= 1e-10


@pytest.mark.parametrize("sharing", [False, True], ids=["sent", "read"])
@pytest.mark.parametrize("seed", range(8))
def test_mixed_degrees_equal_one_rank(seed: int, sharing: bool) -> None:
    r = Random(seed)
    lengths = [r.choice([1, 2, 3, 8, 17, 64, 100]) for _ in range(5)]
    given = [masks.KINDS[r.choice(list(masks.KINDS))](r, n) for n in lengths]
    cost = hcp.CostModel(pair=1000, token=1, exchange=1, launch=1)
    plan = planned(lengths, given, r.randint(2, 8), alignment=r.choice([1, 4]), cost=cost)
    window = r.choice([(-1, -1), (3, -1), (2, 4)])
    job = Job(plan, r.choice(TYPES[:2] if sharing else TYPES), window, sharing)
    assert error_of(job) <= 1e-10, job


@pytest.mark.parametrize("sharing", [False, True], ids=["sent", "read"])
@pytest.mark.parametrize("comm_type", TYPES[:2])
def test_a_rank_whose_queries_see_nothing_gets_the_gradients_of_its_keys(
    comm_type: str, sharing: bool
) -> None:
    """Rank 0 sees a key of rank 1's, which sees nothing; rank 2 is seen by nobody."""
    mask = Mask(6, [((0, 1), (1, 2)), ((5, 6), (1, 2))])
    plan = planned([6], [mask], 3, min_degree=3)
    assert error_of(Job(plan, comm_type, sharing=sharing)) <= 1e-10


@pytest.mark.parametrize("comm_type", TYPES)
def test_keys_that_nobody_sees_have_gradients_of_zero(comm_type: str) -> None:
    """All queries are in one launch, and half of the keys."""
    given = [Mask(4, [((0, 4), (0, 2))]), Mask(4, [((0, 4), (2, 4))])]
    for degree in (1, 2):
        plan = planned([4, 4], given, 2, min_degree=degree)
        assert error_of(Job(plan, comm_type)) <= 1e-10


WINDOWS = [(3, -1), (-1, 0), (0, 0), (5, 2)]


@pytest.mark.parametrize("comm_type", TYPES)
@pytest.mark.parametrize("kind", masks.KINDS)
def test_windows_count_positions(kind: str, comm_type: str) -> None:
    r = Random(kind)
    lengths = [1, 2, 17, 61]
    for degree, window in zip((1, 2, 3, 5), WINDOWS, strict=True):
        given = [masks.KINDS[kind](r, n) for n in lengths]
        plan = planned(lengths, given, degree, min_degree=degree)
        assert error_of(Job(plan, comm_type, window, sinks=degree == 2)) <= 1e-10, (degree, window)


def path_to(part: int, parents: list[int]) -> list[int]:
    return [*path_to(parents[part], parents), part] if part >= 0 else []


def alone(
    rows: dict[str, Tensor], sizes: list[int], parents: list[int], window: tuple[int, int]
) -> list[Tensor]:
    """Each part of a tree at the end of its own text, alone: outputs and all gradients, by the rows
    of the tree."""
    tokens = torch.arange(sum(sizes)).split(sizes)
    query, key, value = (rows[name].clone().requires_grad_() for name in ("query", "key", "value"))
    outs = []
    for part, own in enumerate(tokens):
        text = torch.cat([tokens[i] for i in path_to(part, parents)])
        place = torch.arange(len(text))
        query_place = place[-len(own) :, None]
        seen = (place <= query_place) & in_window(query_place, place, window)
        outs.append(masks.attention(query[own], key[text], value[text], seen)[0])
    out = torch.cat(outs)
    (out * rows["grad"]).sum().backward()
    return [out.detach(), *(x.grad for x in (query, key, value) if x.grad is not None)]


@pytest.mark.parametrize("sharing", [False, True], ids=["sent", "read"])
@pytest.mark.parametrize("seed", range(12))
def test_a_window_over_a_tree_is_that_of_each_text_alone(seed: int, sharing: bool) -> None:
    r = Random(seed)
    sizes = [r.randint(1, 12) for _ in range(r.randint(1, 8))]
    parents = [r.randint(-1, i - 1) for i in range(len(sizes))]
    if seed % 3 == 0:
        parents = [-1] + [0] * (len(sizes) - 1)  # one prompt, several answers
    window = r.choice([0, 1, 3, 8]), r.choice([-1, 0])
    degree, comm_type = r.randint(1, 5), r.choice(TYPES[:2] if sharing else TYPES)
    rows = rows_of(sum(sizes), seed)
    plan = planned([sum(sizes)], [Mask.tree(sizes, parents)], degree, min_degree=degree)

    def check(groups: Any) -> list[tuple[Tensor, list[Tensor]]]:
        own = [rows] if groups.transport.rank == 0 else []
        ((cp, local),) = hcp.dispatch(plan, own, [0], groups, comm_types=[comm_type])
        query, key, value = (
            local[name].clone().requires_grad_() for name in ("query", "key", "value")
        )
        out = cp.attention(query, key, value, window_size=window)
        (out * local["grad"]).sum().backward()
        return [(local["token"], [out.detach(), query.grad, key.grad, value.grad])]

    whole = alone(rows, sizes, parents, window)
    for token, parts in (x for rank in hcp.loopback(degree, check, sharing=sharing) for x in rank):
        for part, expected in zip(parts, whole, strict=True):
            assert torch.allclose(part, expected[token], rtol=0, atol=1e-10), (window, comm_type)


def test_cuts_of_their_own_equal_one_rank() -> None:
    """Long enough that zigzag gives way."""
    mask = Mask.documents([Mask.prefix_lm(150, 140), 60, Mask.full(40)])
    plan = planned([250, 33], [mask, None], 4, min_degree=4)
    assert len(Layout(plan, 0, 0).spans) > 4
    for comm_type in TYPES:
        assert error_of(Job(plan, comm_type)) <= 1e-10


@pytest.mark.parametrize("name", [None, "near", "far"])
def test_layers_name_one_of_the_masks(name: str | None) -> None:
    spans = [(3, 20), (40, 44)]
    given = {
        "far": [Mask.bidirectional_spans(70, spans)],
        "near": [Mask.bidirectional_spans(70, spans, left=6)],
    }
    plan = planned([70], given, 2, min_degree=2)
    assert error_of(Job(plan, "all_gather", name=name)) <= 1e-10


def test_only_rows_that_are_seen_travel() -> None:
    """Chunks that end where ranks' tokens do: nothing is sent."""
    given = [Mask.documents([8, 8, 8, 8])]
    plan = planned([32], given, 2, min_degree=2)

    def sent(groups: Any, comm_type: str) -> int:
        own = [rows_of(32, 0)] if groups.transport.rank == 0 else []
        ((cp, local),) = hcp.dispatch(plan, own, [0], groups, comm_types=[comm_type])
        before = groups.transport.bytes_sent
        cp.attention(local["query"], local["key"], local["value"])
        return groups.transport.bytes_sent - before

    for comm_type in ("all_gather", "p2p"):
        assert hcp.loopback(2, lambda groups, c=comm_type: sent(groups, c)) == [0, 0]


# ---- what stands beside attention ----------------------------------------------------------------


def test_rows_roll_along_a_cut_sequence_and_come_back() -> None:
    """Parts that see themselves only, but whose positions go on, are one document."""
    mask = Mask.documents([Mask.prefix_lm(150, 140), 60, Mask.full(40)], restart=False)
    plan = planned([250], [mask], 4, min_degree=4)

    def check(groups: Any) -> None:
        rank = groups.transport.rank
        own = [{"token": torch.arange(250.0)}] if rank == 2 else []
        ((cp, local),) = hcp.dispatch(plan, own, [2], groups)
        token = local["token"]
        assert torch.equal(cp.roll_tensor(token), torch.where(token == 249, 0, token + 1))
        before = cp.scan.halo(token, 3)[cp.scan.halo_rows(3) - 1]
        assert torch.equal(before[token > 0], token[token > 0] - 1)
        whole = cp.whole.sequence_to_head(token[:, None, None].expand(-1, 4, 1).contiguous())
        assert torch.equal(whole[:, 0, 0], torch.arange(250.0))
        assert torch.equal(cp.whole.head_to_sequence(whole, 4)[:, 0, 0], token)
        back = cp.combine(token)
        assert torch.equal(back, torch.arange(250.0) if rank == 2 else torch.empty(0))

    hcp.loopback(4, check)


def test_positions_of_a_tree_rotate_its_rows() -> None:
    mask = Mask.shared_prefix(20, [5, 9])
    plan = planned([34], [mask], 2, min_degree=2)

    def check(groups: Any) -> None:
        own = [{"position": torch.tensor(mask.positions)}] if groups.transport.rank == 0 else []
        ((cp, local),) = hcp.dispatch(plan, own, [0], groups)
        assert torch.equal(cp.position_ids, local["position"])
        assert cp.get_rotary_seq_len() == 29
        table = torch.arange(29.0)[:, None]
        assert torch.equal(cp.get_emb_on_this_cp_rank(table)[:, 0].long(), local["position"])

    hcp.loopback(2, check)


def test_masks_of_all_ranks_are_gathered_and_given_to_dispatch() -> None:
    def check(groups: Any) -> tuple[int, bool]:
        rank = groups.transport.rank
        samples = [rows_of(9 + rank, rank)]
        lengths, sources, samples = hcp.gather_lengths(samples, groups)
        own = [Mask.full(9)] if rank == 0 else [None]
        given = gather_masks(own, groups)
        plan = hcp.plan(lengths, ranks=2, max_tokens_per_rank=20)
        step = hcp.dispatch(plan, samples, sources, groups, masks=given)
        return step.plan.checksum, step.plan.masks["mask"] == (Mask.full(9), Mask.causal(10))

    results = hcp.loopback(2, check)
    assert results[0] == results[1]
    assert results[0][1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": "far"}, r"mask is 'far', expected one of \['mask'\]"),
        ({"comm_type": "a2a+p2p"}, r"comm_types has 'a2a\+p2p' in a plan with masks"),
    ],
)
def test_what_masks_cannot_do_is_refused(options: dict[str, str], message: str) -> None:
    plan = planned([9], [Mask.full(9)], 2, min_degree=2)
    comm_type = options.pop("comm_type", "p2p")
    sizes = [1, 2] if "+" in comm_type else []

    def check(groups: Any) -> None:
        own = [rows_of(9, 0)] if groups.transport.rank == 0 else []
        given = {"comm_types": [comm_type], "hierarchical_context_parallel_sizes": sizes}
        ((cp, local),) = hcp.dispatch(plan, own, [0], groups, **given)
        cp.attention(local["query"], local["key"], local["value"], **options)

    with pytest.raises((ValueError, hcp.HcpError), match=message):
        hcp.loopback(2, check)


def test_modules_that_know_no_masks_are_refused() -> None:
    plan = planned([9], [Mask.full(9)], 1)

    def check(groups: Any) -> None:
        ((cp, local),) = hcp.dispatch(plan, [rows_of(9, 0)], [0], groups)
        rows = {name: local[name] for name in ("query", "key", "value")}
        assert cp.core_attn(attn_mod=None, **rows).shape == (9, HEADS * SIZE)
        cp.core_attn(attn_mod=torch.nn.Identity(), **rows)

    with pytest.raises(ValueError, match="the plan has masks, which Identity does not take"):
        hcp.loopback(1, check)


def test_auto_gathers_under_masks() -> None:
    plan = planned([40], [Mask.full(40)], 2, min_degree=2)

    def check(groups: Any) -> str:
        own = [rows_of(40, 0)] if groups.transport.rank == 0 else []
        ((cp, local),) = hcp.dispatch(plan, own, [0], groups, comm_types=["auto"])
        cp.attention(local["query"], local["key"], local["value"])
        return cp.comm.choices[-1].used

    assert hcp.loopback(2, check) == ["all_gather"] * 2


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_on_a_rank_that_see_nothing_at_all_give_0(sinks: bool) -> None:
    def check(groups: Any) -> None:
        plan = hcp.plan([4], masks=[Mask(4, [])], ranks=1, max_tokens_per_rank=4)
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
        query = torch.randn(4, 2, 8, requires_grad=True)
        sink = torch.tensor([0.5, -1.0], requires_grad=True) if sinks else None
        out, lse = cp.attention(query, query, query, sinks=sink, return_lse=True)
        assert not out.any()
        if sink is None:
            assert (lse == -torch.inf).all()
            out.sum().backward()
        else:
            assert torch.equal(lse, sink.expand(4, 2))
            lse.sum().backward()
            assert torch.equal(sink.grad, torch.full((2,), 4.0))
        assert not query.grad.any()

    hcp.loopback(1, check)
