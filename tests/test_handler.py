"""What layers ask of the handler beside attention: rotary embedding, rolling, the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import GlooGroups
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks

import hcp


def all_handlers(groups: Any, lengths: Any, capacity: int = 24, **plan: Any) -> list[Any]:
    made = hcp.plan(lengths, ranks=groups.transport.size, max_tokens_per_rank=capacity, **plan)
    return [
        hcp.ContextParallelHandler(made, m, groups.transport, sources=[0] * len(lengths))
        for m in range(len(made.micro_batches))
    ]


def tokens_of(cp: hcp.ContextParallelHandler) -> list[tuple[int, int]]:
    return [(s, t) for s, start, rows in cp.layout.spans for t in range(start, start + rows)]


# ---- rotary embedding ----------------------------------------------------------------------------


def rotate(row: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """One head at one position, element by element."""
    half = len(angle) // 2
    out = row.clone()
    for i in range(half):
        a, b = row[i], row[i + half]
        out[i] = a * torch.cos(angle[i]) - b * torch.sin(angle[i])
        out[i + half] = b * torch.cos(angle[i + half]) + a * torch.sin(angle[i + half])
    return out


@pytest.mark.parametrize("rotated", [8, 4])
@pytest.mark.parametrize("shape", ["plain", "megatron"])
def test_rows_are_rotated_by_their_own_position(rotated: int, shape: str) -> None:
    def check(groups: Any) -> None:
        for cp in all_handlers(groups, (17, 3, 30)):
            assert cp.get_rotary_seq_len() == max(cp.layout.lengths, default=0)
            freqs = torch.randn(40, rotated, dtype=torch.float64)
            given_freqs = freqs[:, None, None] if shape == "megatron" else freqs
            t = torch.randn(cp.rows, 2, 8, dtype=torch.float64)
            out = cp.apply_rotary_pos_emb(t, given_freqs)
            for row, (_, token) in enumerate(tokens_of(cp)):
                for head in range(2):
                    want = rotate(t[row, head], freqs[token])
                    assert torch.allclose(out[row, head], want, atol=1e-14)

    hcp.loopback(3, check)


def test_a_table_of_positions_gives_each_row_its_own() -> None:
    table = torch.randn(40, 1, 1, 6)

    def check(groups: Any) -> None:
        for cp in all_handlers(groups, (17, 3, 30)):
            tokens = [token for _, token in tokens_of(cp)]
            assert torch.equal(cp.get_emb_on_this_cp_rank(table), table[tokens])

    hcp.loopback(3, check)


@pytest.mark.parametrize("name", ["freqs", "emb"])
def test_too_few_positions_are_refused(name: str) -> None:
    def call(groups: Any) -> None:
        (cp,) = all_handlers(groups, [9])
        if name == "emb":
            cp.get_emb_on_this_cp_rank(torch.zeros(8, 4))
        else:
            cp.apply_rotary_pos_emb(torch.zeros(9, 1, 4), torch.zeros(8, 4))

    with pytest.raises(ValueError, match=f"{name} has 8 positions, expected >= 9"):
        hcp.loopback(1, call)


# ---- rolling -------------------------------------------------------------------------------------


def check_roll(groups: Any, lengths: Any, shifts: int, min_degree: int) -> None:
    generator = torch.Generator().manual_seed(5)
    whole = [torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in lengths]
    for cp in all_handlers(groups, lengths, min_degree=min_degree):
        tokens = tokens_of(cp)
        local = [whole[s][t] for s, t in tokens]
        x = torch.stack(local) if local else torch.zeros(0, 2, dtype=torch.float64)
        rolled = cp.roll_tensor(x.requires_grad_(), shifts)
        for row, (s, t) in enumerate(tokens):
            inside = 0 <= t - shifts < len(whole[s])
            want = whole[s][t - shifts] if inside else torch.zeros(2, dtype=torch.float64)
            assert torch.equal(rolled[row], want)
        rolled.backward(x.detach())
        assert torch.equal(x.grad, cp.roll_tensor(x.detach(), -shifts))


@given(
    st.integers(1, 6),
    st.lists(st.integers(1, 60), min_size=1, max_size=5),
    st.integers(-70, 70),
    st.data(),
)
def test_rolling_shifts_within_sequences_across_ranks(
    ranks: int, lengths: list[int], shifts: int, data: st.DataObject
) -> None:
    min_degree = data.draw(st.integers(1, ranks))
    lengths = [min(length, 20 * ranks) for length in lengths]
    hcp.loopback(ranks, lambda g: check_roll(g, lengths, shifts, min_degree))


def gloo_roll(rank: int, size: int) -> None:
    check_roll(GlooGroups(), [40, 7, 2], -1, 2)


def test_rolling_works_on_gloo_ranks() -> None:
    run_ranks(3, gloo_roll)


def test_integers_and_vectors_roll_too() -> None:
    def check(groups: Any) -> list[list[int]]:
        (cp,) = all_handlers(groups, [6], min_degree=2)
        return [cp.roll_tensor(cp.position_ids).tolist(), cp.position_ids.tolist()]

    for rolled, positions in hcp.loopback(2, check):
        assert rolled == [p + 1 if p < 5 else 0 for p in positions]


# ---- whole sequences -----------------------------------------------------------------------------


def check_trade(groups: Any, lengths: Any, heads: int, min_degree: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    whole = [torch.randn(n, heads, 3, generator=generator).to(dtype) for n in lengths]
    for cp in all_handlers(groups, lengths, min_degree=min_degree):
        local = [whole[s][t] for s, t in tokens_of(cp)]
        x = torch.stack(local) if local else torch.zeros(0, heads, 3, dtype=dtype)
        y = cp.sequence_to_head(x.requires_grad_())
        own = cp.head_slice(heads)
        want = [whole[s][:, own] for s in cp.layout.sequences]
        assert cp.whole_cu_seqlens.diff().tolist() == [len(part) for part in want]
        assert torch.equal(y, torch.cat(want) if want else y.new_zeros(0, heads, 3))
        back = cp.head_to_sequence(y, heads)
        assert torch.equal(back, x)
        weights = torch.randn(x.shape, generator=generator).to(dtype)
        back.backward(weights)  # the adjoint of the identity, through both
        assert torch.equal(x.grad, weights)


@given(
    st.integers(1, 6),
    st.lists(st.integers(1, 60), min_size=1, max_size=5),
    st.integers(1, 7),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.data(),
)
def test_rows_become_whole_sequences_of_some_heads_and_come_back(
    ranks: int, lengths: list[int], heads: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    min_degree = data.draw(st.integers(1, ranks))
    lengths = [min(length, 20 * ranks) for length in lengths]
    hcp.loopback(ranks, lambda g: check_trade(g, lengths, heads, min_degree, dtype))


def gloo_trade(rank: int, size: int) -> None:
    check_trade(GlooGroups(), [40, 7, 2, 1], 5, 2, torch.float32)


def test_whole_sequences_work_on_gloo_ranks() -> None:
    run_ranks(3, gloo_trade)


def test_a_scan_over_whole_sequences_equals_one_rank() -> None:
    """A recurrent layer: the gradient at a token depends on all tokens behind it."""
    x = torch.randn(31, 5, 2, dtype=torch.float64)
    whole = x.clone().requires_grad_()
    whole.cumsum(0).square().sum().backward()

    def check(groups: Any) -> None:
        (cp,) = all_handlers(groups, [31], min_degree=3)
        local = x[cp.position_ids].requires_grad_()
        out = cp.head_to_sequence(cp.sequence_to_head(local).cumsum(0), 5)
        out.square().sum().backward()
        assert torch.allclose(out, x.cumsum(0)[cp.position_ids], atol=1e-12)
        assert torch.allclose(local.grad, whole.grad[cp.position_ids], atol=1e-12)

    hcp.loopback(3, check)


@pytest.mark.parametrize("to_heads", [True, False])
def test_wrong_rows_of_whole_sequences_are_refused(to_heads: bool) -> None:
    def call(groups: Any) -> None:
        (cp,) = all_handlers(groups, [9])
        if to_heads:
            cp.sequence_to_head(torch.zeros(8, 2, 4))
        else:
            cp.head_to_sequence(torch.zeros(9, 3, 4), 2)

    message = r"expected \(9, heads, ...\)" if to_heads else r"expected \(9, 2, ...\)"
    with pytest.raises(ValueError, match=message):
        hcp.loopback(1, call)


# ---- handlers as values --------------------------------------------------------------------------


def test_an_unknown_comm_type_is_refused() -> None:
    def make(groups: Any) -> None:
        plan = hcp.plan([5], ranks=1, max_tokens_per_rank=8)
        hcp.ContextParallelHandler(plan, 0, groups.transport, comm_types=("ring",))

    with pytest.raises(ValueError, match="comm_type is 'ring', expected one of"):
        hcp.loopback(1, make)


def test_groups_that_are_gone_are_named() -> None:
    def use_after(groups: Any) -> Any:
        (cp,) = all_handlers(groups, [5])
        return cp

    (cp,) = hcp.loopback(1, use_after)
    transport_words = cp._schedules["p2p", -1, 0].clone()
    transport_words[0] = -1  # a serial that was never read
    transport_words[1] = 10**9
    with pytest.raises(hcp.HcpError, match="process groups of this handler are gone"):
        torch.ops.hcp.attention(*[torch.zeros(5, 1, 4)] * 3, None, transport_words, 1.0)
