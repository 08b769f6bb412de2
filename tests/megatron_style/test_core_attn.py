"""Any core attention in a Megatron-style layer equals one rank's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cases import GlooGroups, whole_attention
from support.core_attention import Case, RingLike, Sizes, WholeAttention, handlers, made_group
from support.ranks import run_ranks
from torch import Tensor

import hcp


def inputs_of(lengths: Any, sizes: Sizes) -> list[tuple[Tensor, ...]]:
    """query, key, value and the output's gradient of each sequence, the same on every rank."""
    heads, groups, size, value_size = sizes
    generator = torch.Generator().manual_seed(3)
    shapes = ((heads, size), (groups, size), (groups, value_size), (heads, value_size))

    def draw(n: int, shape: tuple[int, int]) -> Tensor:
        return torch.randn(n, *shape, generator=generator, dtype=torch.float64)

    return [tuple(draw(n, shape) for shape in shapes) for n in lengths]


def answers_of(lengths: Any, sizes: Sizes, causal: bool) -> list[tuple[Tensor, ...]]:
    """Output and gradients of each sequence, on one rank."""
    answers = []
    for *qkv, grad in inputs_of(lengths, sizes):
        leaves = [x.clone().requires_grad_() for x in qkv]
        out, _ = whole_attention(*leaves, None, causal, (-1, -1))
        out.backward(grad)
        answers.append((out.detach(), *(x.grad for x in leaves)))
    return answers  # type: ignore[return-value]


def rows_here(cp: hcp.ContextParallelHandler, wholes: list[Tensor]) -> Tensor:
    parts = [wholes[s][start : start + rows] for s, start, rows in cp.layout.spans]
    return torch.cat([wholes[0][:0], *parts])


def error(groups: Any, case: Case, module: Any, group_of: Any = lambda cp: None) -> float:
    """The largest difference from one rank, of output and gradients."""
    inputs = inputs_of(case.lengths, case.sizes)
    answers = answers_of(case.lengths, case.sizes, case.causal)
    worst = 0.0
    for cp in handlers(groups, case):
        q, k, v, grad = (rows_here(cp, [x[n] for x in inputs]) for n in range(4))
        batch = max(len(cp.layout.lengths), 1)

        def shaped(x: Tensor, batch: int = batch) -> Tensor:
            return x.view(batch, -1, *x.shape[1:]).transpose(0, 1) if case.batched else x

        leaves = [shaped(x).detach().clone().requires_grad_() for x in (q, k, v)]
        out = cp.core_attn(
            attn_mod=module,
            query=leaves[0],
            key=leaves[1],
            value=leaves[2],
            attn_mask_type="causal" if case.causal else "no_mask",
            cp_group=group_of(cp),
        )
        assert out.shape == shaped(grad).flatten(-2).shape
        out.backward(shaped(grad).flatten(-2))
        results = [out.detach().unflatten(-1, grad.shape[1:]), *(x.grad for x in leaves)]
        for n, result in enumerate(results):
            want = shaped(rows_here(cp, [answer[n] for answer in answers]))
            assert result.shape == want.shape
            if want.numel():
                worst = max(worst, float((result - want).abs().max()))
    return worst


KINDS = {"hcp's own": hcp.CoreAttention, "none": lambda: None, "any other": WholeAttention}


@given(
    st.integers(1, 5),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sampled_from([(4, 2), (6, 6), (5, 5), (6, 2), (8, 1)]),
    st.sampled_from(sorted(KINDS)),
    st.booleans(),
    st.data(),
)
def test_core_attention_under_any_degree_equals_one_rank(
    ranks: int,
    lengths: list[int],
    heads: tuple[int, int],
    kind: str,
    causal: bool,
    data: st.DataObject,
) -> None:
    ranks = min(ranks, heads[0])
    case = Case(
        tuple(lengths),
        ranks,
        min_degree=data.draw(st.integers(1, ranks)),
        sizes=(*heads, 6, 5),
        causal=causal,
    )
    module = KINDS[kind]()
    assert max(hcp.loopback(ranks, lambda groups: error(groups, case, module))) < 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_equal_lengths_enter_as_rows_by_sequences(kind: str) -> None:
    case = Case((18, 18, 18), 3, min_degree=3, batched=True)
    module = KINDS[kind]()
    assert max(hcp.loopback(3, lambda groups: error(groups, case, module))) < 1e-10


@pytest.mark.parametrize("batched", [False, True])
def test_a_rank_without_rows_runs_the_module_for_its_parameters(batched: bool) -> None:
    case = Case((9,), 2, max_degree=1, batched=batched)

    def check(groups: Any) -> tuple[int, float]:
        module = WholeAttention()
        (cp,) = handlers(groups, case)
        shape = (cp.rows, 1) if batched else (cp.rows,)
        q = torch.ones(*shape, 4, 6, dtype=torch.float64, requires_grad=True)
        out = cp.core_attn(attn_mod=module, query=q, key=q, value=q, attn_mask_type="causal")
        out.sum().backward()
        assert q.grad is not None
        assert q.grad.shape == q.shape
        assert out.shape == (*shape, 24)
        assert module.gain.grad is not None
        return cp.rows, float(module.gain.grad)

    results = sorted(hcp.loopback(2, check))
    assert results[0] == (0, 0.0)
    assert results[1][0] == 9
    assert results[1][1] > 0


# ---- a module that does context parallelism itself -----------------------------------------------


def lend_groups(rank: int, size: int, case: Case) -> Any:
    module = RingLike()
    worst = error(GlooGroups(), case, module, made_group)
    held = (module.cp_group, module.cp_global_ranks, module.cp_stream, module.cp_comm_type)
    return worst, module.calls, held


def test_a_module_that_exchanges_itself_gets_the_plans_group_for_the_call() -> None:
    case = Case((48, 24, 6), 3, capacity=24)
    results = run_ranks(3, lend_groups, case)
    for worst, calls, held in results:
        assert worst < 1e-10
        assert held == ("built with", [7], None, "a2a")
        assert {comm_type for _, _, comm_type in calls} == {"p2p"}
    ranks_by_size = {
        (size, tuple(ranks or ())) for _, calls, _ in results for size, ranks, _ in calls
    }
    assert ranks_by_size == {(2, (0, 1)), (1, ())}


def test_the_modules_own_group_is_back_when_it_raises() -> None:
    module = RingLike()

    def call(groups: Any) -> None:
        (cp,) = handlers(groups, Case((8,), 1))
        x = torch.zeros(8, 2, 4)
        with pytest.raises(ZeroDivisionError):
            cp.core_attn(attn_mod=module, query=x, key=x, value=x, attn_mask_type="fail")

    hcp.loopback(1, call)
    assert module.calls == [(1, None, "p2p")]
    assert (module.cp_group, module.cp_comm_type) == ("built with", "a2a")


class FakeGroup:
    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


@pytest.mark.parametrize(
    ("length", "group", "message"),
    [
        (24, lambda rank: None, r"cp_group is None, expected the process group of the 2 ranks"),
        (24, lambda rank: FakeGroup(3, rank), r"cp_group is of 3 ranks, .* expected 2 ranks"),
        (24, lambda rank: FakeGroup(2, 1 - rank), r"this one is number \d, expected 2 .* number"),
        (23, lambda rank: FakeGroup(2, rank), r"lengths \[23\] are not divisible by 2 \* degree"),
    ],
)
def test_what_such_a_module_cannot_do_is_refused(length: int, group: Any, message: str) -> None:
    def call(groups: Any) -> None:
        (cp,) = handlers(groups, Case((length,), 2, min_degree=2))
        x = torch.zeros(cp.rows, 2, 4)
        own = group(groups.transport.rank)
        cp.core_attn(attn_mod=RingLike(), query=x, key=x, value=x, cp_group=own)

    with pytest.raises(ValueError, match=message):
        hcp.loopback(2, call)


def test_levels_of_a_group_count_together() -> None:
    """Hierarchical: one process group per level, innermost first."""

    def check(groups: Any) -> Any:
        (cp,) = handlers(groups, Case((24,), 4, min_degree=4))
        rank = groups.transport.rank
        levels = [FakeGroup(2, rank % 2), FakeGroup(2, rank // 2)]
        assert cp.packed_seq_params(cp_group=levels).cp_group is levels
        with pytest.raises(ValueError, match="expected 4 ranks"):
            cp.packed_seq_params(cp_group=[*levels, FakeGroup(2, 0)])
        return cp.group.global_ranks

    assert hcp.loopback(4, check) == [[0, 1, 2, 3]] * 4


# ---- refusals ------------------------------------------------------------------------------------


def refuse(message: str, ranks: int = 2, **options: Any) -> None:
    def call(groups: Any) -> None:
        (cp,) = handlers(groups, Case((24,), ranks, min_degree=ranks))
        x = torch.zeros(cp.rows, 2, 4, dtype=torch.float64)
        x = x[:, None] if options.pop("batched", False) else x
        cp.core_attn(**{"attn_mod": None, "query": x, "key": x, "value": x, **options})

    with pytest.raises(ValueError, match=message):
        hcp.loopback(ranks, call)


def test_a_module_with_fewer_heads_than_ranks_is_refused() -> None:
    refuse("query has 2 heads, expected at least 3", 3, attn_mod=WholeAttention())


@pytest.mark.parametrize(("heads", "groups"), [(3, 2), (2, 4), (4, 0)])
def test_heads_that_do_not_divide_are_refused(heads: int, groups: int) -> None:
    def call(g: Any) -> None:
        (cp,) = handlers(g, Case((24,), 2, min_degree=2))
        query, key = (torch.zeros(cp.rows, n, 4) for n in (heads, groups))
        cp.core_attn(attn_mod=WholeAttention(), query=query, key=key, value=key)

    with pytest.raises(ValueError, match=f"query has {heads} .* of the {groups} of key"):
        hcp.loopback(2, call)


def test_queries_without_heads_are_refused() -> None:
    def call(g: Any) -> None:
        (cp,) = handlers(g, Case((24,), 2, min_degree=2))
        x = torch.zeros(cp.rows, 4)
        cp.core_attn(attn_mod=WholeAttention(), query=x, key=x, value=x)

    with pytest.raises(ValueError, match=r"query has shape \(12, 4\), expected \(..., heads, size"):
        hcp.loopback(2, call)


def test_a_module_that_counts_heads_itself_is_refused() -> None:
    refuse(
        r"attn_mod returned shape \(24, 8\), expected 96 elements",
        attn_mod=lambda query, key, value, **given: torch.zeros(24, 8),
    )


def test_masks_that_hcp_cannot_do_are_refused() -> None:
    refuse("attn_mask_type is 'arbitrary' for thd rows", attn_mask_type="arbitrary")
    refuse(
        r"attn_mask_type is 'padding_causal' for sbhd rows, expected .* \['causal', 'no_mask'\]",
        ranks=1,
        attn_mask_type=SimpleNamespace(name="padding_causal"),
        batched=True,
    )
    refuse("attention_bias is given, expected None", attention_bias=torch.zeros(1))
    refuse("attention_mask is given, expected None.* say attn_m", attention_mask=torch.zeros(1))


def test_a_comm_type_beside_that_of_the_module_is_refused() -> None:
    module = hcp.CoreAttention(comm_type="p2p")
    refuse("comm_type is 'ring', expected 'p2p', that of att", attn_mod=module, comm_type="ring")


def test_an_option_that_a_layer_does_not_have_is_refused_where_the_module_is_made() -> None:
    for name in ("window", "qkv_format"):
        with pytest.raises(
            TypeError, match=f"^CoreAttention got an unexpected .* '{name}', expected"
        ):
            hcp.CoreAttention(**{name: None})  # type: ignore[arg-type]


def test_batches_of_lengths_that_differ_are_refused() -> None:
    def call(groups: Any) -> None:
        (cp,) = handlers(groups, Case((4, 6), 1))
        x = torch.zeros(5, 2, 2, 4)
        cp.core_attn(attn_mod=None, query=x, key=x, value=x)

    with pytest.raises(ValueError, match=r"expected 10 rows of .* one length, not \(6, 4"):
        hcp.loopback(1, call)


def test_the_module_takes_the_handler_from_packed_seq_params() -> None:
    def call(groups: Any) -> None:
        (cp,) = handlers(groups, Case((9,), 2, min_degree=2))
        module = hcp.CoreAttention(window_size=(3, 0), softmax_scale=0.5)
        x = torch.randn(cp.rows, 2, 4, dtype=torch.float64)
        out = module(x, x, x, packed_seq_params=cp.packed_seq_params())
        want = cp.attention(x, x, x, window_size=(3, 0), softmax_scale=0.5)
        assert torch.equal(out, want.flatten(1))
        with pytest.raises(ValueError, match="packed_seq_params is NoneType without a handler"):
            module(x, x, x)

    hcp.loopback(2, call)
