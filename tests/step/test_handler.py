"""The handler's other parts for layers: rotary embedding, rolling, the loss."""

from __future__ import annotations

from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cases import GlooGroups
from support.ranks import RankError, run_ranks, try_ranks

import hcp
from hcp.exchange.layout import Layout, whole_cu_seqlens


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


def positions_here(cp: hcp.ContextParallelHandler, positions: torch.Tensor) -> torch.Tensor:
    return positions[cp.position_ids]


@pytest.mark.parametrize("rotated", [8, 4])
def test_neighbouring_elements_are_rotated_when_interleaved(rotated: int) -> None:
    def check(groups: Any) -> None:
        for cp in all_handlers(groups, (17, 3)):
            freqs = torch.randn(40, rotated // 2, dtype=torch.float64).repeat_interleave(2, 1)
            t = torch.randn(cp.rows, 2, 8, dtype=torch.float64)
            out = cp.apply_rotary_pos_emb(t, freqs, interleaved=True)
            for row, (_, token) in enumerate(tokens_of(cp)):
                pairs = torch.view_as_complex(t[row, :, :rotated].unflatten(1, (-1, 2)))
                turned = pairs * torch.polar(torch.ones(()).double(), freqs[token, ::2])
                want = torch.cat([torch.view_as_real(turned).flatten(1), t[row, :, rotated:]], 1)
                assert torch.allclose(out[row], want, atol=1e-14)

    hcp.loopback(3, check)


def test_yarns_factor_scales_what_is_rotated() -> None:
    def check(groups: Any) -> None:
        (cp,) = all_handlers(groups, [17], min_degree=2)
        freqs = torch.randn(17, 4, dtype=torch.float64)
        t = torch.randn(cp.rows, 2, 8, dtype=torch.float64)
        out = cp.apply_rotary_pos_emb(t, freqs, mscale=1.25)
        plain = cp.apply_rotary_pos_emb(t, freqs)
        assert torch.allclose(out[..., :4], 1.25 * plain[..., :4], atol=1e-14)
        assert torch.equal(out[..., 4:], t[..., 4:])

    hcp.loopback(2, check)


def test_integers_are_not_rotated() -> None:
    def call(groups: Any) -> None:
        (cp,) = all_handlers(groups, [9])
        cp.apply_rotary_pos_emb(torch.ones(9, 1, 4, dtype=torch.int32), torch.zeros(9, 4))

    with pytest.raises(ValueError, match=r"t is torch.int32, expected floats"):
        hcp.loopback(1, call)


def test_given_positions_take_the_place_of_those_in_the_sequence() -> None:
    def check(groups: Any) -> None:
        (cp,) = all_handlers(groups, [17], min_degree=2)
        freqs = torch.randn(60, 8, dtype=torch.float64)
        t = torch.randn(cp.rows, 2, 8, dtype=torch.float64)
        ids = positions_here(cp, 3 * torch.arange(17) + 7)
        out = cp.apply_rotary_pos_emb(t, freqs, positions=ids)
        for row, token in enumerate(ids.tolist()):
            assert torch.allclose(out[row, 1], rotate(t[row, 1], freqs[token]), atol=1e-14)

    hcp.loopback(2, check)


@pytest.mark.parametrize("by", ["option", "config", "rotary"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("axes", [[0, 0, 1, 1, 1, 2], [0, 1, 2, 0, 1, 0]], ids=str)
def test_each_frequency_follows_its_own_axis_in_multimodal_rope(
    axes: list[int], interleaved: bool, by: str
) -> None:
    """Axes as in Qwen2-VL, sections of the frequencies, and as in Qwen3-VL, which follow time,
    height and width in turns. Pairs are halves of a head as there, or neighbours as in GLM-4V."""

    def check(groups: Any) -> None:
        (cp,) = all_handlers(groups, [17], min_degree=2)
        inverse = 10000.0 ** (-torch.arange(6, dtype=torch.float64) / 6)
        angles = torch.arange(40)[:, None] * inverse
        table = angles.repeat_interleave(2, 1) if interleaved else angles.repeat(1, 2)
        whole = torch.randint(0, 40, (17, 3), generator=torch.Generator().manual_seed(0))
        ids = positions_here(cp, whole)
        t = torch.randn(cp.rows, 2, 14, dtype=torch.float64)
        given = {"positions": ids, "axes": axes}
        if by == "rotary":
            out = cp.apply_rotary_pos_emb(t, cp.rotary(table, interleaved=interleaved, **given))
        elif by == "config":
            config = SimpleNamespace(rotary_interleaved=interleaved)
            out = cp.apply_rotary_pos_emb(t, table, config, **given)
        else:
            out = cp.apply_rotary_pos_emb(t, table, interleaved=interleaved, **given)
        turned = t[..., :12]
        first, second = (
            (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
        )
        for row, own in enumerate(ids.tolist()):
            angle = torch.stack([own[a] * f for a, f in zip(axes, inverse, strict=True)])
            pairs = torch.complex(first[row], second[row]) * torch.polar(
                torch.ones(6).double(), angle
            )
            parts = (pairs.real, pairs.imag)
            want = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
            assert torch.allclose(out[row, :, :12], want, atol=1e-12)
            assert torch.equal(out[row, :, 12:], t[row, :, 12:])

    hcp.loopback(2, check)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"positions": torch.zeros(8, dtype=torch.int64)},
            r"positions .* \(8,\), expected 9",
        ),
        ({"positions": torch.zeros(9, 3, dtype=torch.int64)}, r"shape \(9, 3\) and axes is None"),
        ({"axes": [0, 0]}, r"shape \(9,\) and axes is \[0, 0\]"),
        (
            {"positions": torch.zeros(9, 3, dtype=torch.int64), "axes": [0, 3]},
            r"axes is \[0, 3\], expected 2 numbers from 0 to 2",
        ),
        ({"freqs": torch.zeros(9, 6)}, "freqs has 6 angles, expected an even number up to .* 4"),
        ({"freqs": torch.zeros(9, 3)}, "freqs has 3 angles, expected an even number"),
        ({"freqs": torch.zeros(9)}, r"freqs has shape \(9,\), expected \(positions, angles\)"),
        ({"freqs": torch.zeros(())}, "freqs has 0 positions, expected >= 9"),
        ({"t": torch.zeros(99, 1, 4)}, r"t has shape \(99, 1, 4\), expected 9 rows"),
    ],
)
def test_wrong_rotary_arguments_are_refused(options: Any, message: str) -> None:
    def call(groups: Any) -> None:
        (cp,) = all_handlers(groups, [9])
        given = {"t": torch.zeros(9, 1, 4), "freqs": torch.zeros(9, 4), **options}
        cp.apply_rotary_pos_emb(**given)

    with pytest.raises(ValueError, match=message):
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


def test_labels_roll_in_megatrons_shape() -> None:
    def check(groups: Any) -> None:
        (cp,) = all_handlers(groups, [9], min_degree=2)
        rolled = cp.roll_tensor(cp.position_ids[None], shifts=-2, dims=-1)
        assert rolled.tolist() == [[p + 2 if p < 7 else 0 for p in cp.position_ids.tolist()]]

    hcp.loopback(2, check)


# ---- halo ----------------------------------------------------------------------------------------


def check_halo(groups: Any, lengths: Any, before: int, min_degree: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    whole = [torch.randn(n, 2, 3, generator=generator).to(dtype) for n in lengths]
    zeros = torch.zeros(2, 3, dtype=dtype)
    for cp in all_handlers(groups, lengths, min_degree=min_degree):
        local = [whole[s][t] for s, t in tokens_of(cp)]
        x = torch.stack(local) if local else torch.zeros(0, 2, 3, dtype=dtype)
        out = cp.scan.halo(x.requires_grad_(), before)
        want = [
            whole[s][t] if t >= 0 else zeros
            for s, start, rows in cp.layout.spans
            for t in range(start - before, start + rows)
        ]
        assert out.shape == (len(want), 2, 3)
        assert torch.equal(out, torch.stack(want) if want else out)
        assert torch.equal(out[cp.scan.halo_rows(before)], x)
        # Each row counts once itself, and once in each halo that it is in.
        out.sum().backward()
        for row, (s, t) in enumerate(tokens_of(cp)):
            starts = all_starts(cp)[s]
            copies = sum(start - before <= t < start for start in starts)
            assert torch.equal(x.grad[row], torch.full_like(x.grad[row], 1 + copies))


def all_starts(cp: hcp.ContextParallelHandler) -> dict[int, list[int]]:
    """The starts of the spans of each sequence, on all ranks."""
    starts: dict[int, list[int]] = {}
    for rank in range(cp.layout.first_rank, cp.layout.first_rank + cp.degree):
        for s, start, _ in Layout(cp.plan, cp.micro_batch, rank).spans:
            starts.setdefault(s, []).append(start)
    return starts


@given(
    st.integers(1, 6),
    st.lists(st.integers(1, 60), min_size=1, max_size=5),
    st.integers(0, 70),
    st.sampled_from([torch.float64, torch.bfloat16]),
    st.data(),
)
def test_halos_are_the_rows_before_each_span(
    ranks: int, lengths: list[int], before: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    min_degree = data.draw(st.integers(1, ranks))
    lengths = [min(length, 20 * ranks) for length in lengths]
    hcp.loopback(ranks, lambda g: check_halo(g, lengths, before, min_degree, dtype))


def gloo_halo(rank: int, size: int) -> None:
    check_halo(GlooGroups(), [40, 7, 2], 3, 2, torch.float32)


def test_halos_work_on_gloo_ranks() -> None:
    run_ranks(3, gloo_halo)


def test_fewer_than_no_rows_before_a_span_are_refused() -> None:
    def call(groups: Any) -> None:
        (cp,) = all_handlers(groups, [9])
        with pytest.raises(ValueError, match="before is -1, expected an integer >= 0"):
            cp.scan.halo(torch.zeros(9, 2), -1)
        cp.scan.halo(torch.zeros(9, 2), 1)
        with pytest.raises(ValueError, match=r"before is 1.0, expected an integer >= 0"):
            cp.scan.halo(torch.zeros(9, 2), 1.0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"shifts is 1.0, expected an integer"):
            cp.roll_tensor(torch.zeros(9, 2), 1.0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="before is -1, expected an integer >= 0"):
            cp.scan.halo_rows(-1)
        for rows in (torch.zeros(9, 2), torch.zeros(9, 0)):
            with pytest.raises(ValueError, match=rf"before is {2**31}, expected 0 to \d+, so that"):
                cp.scan.halo(rows, 2**31)
        with pytest.raises(ValueError, match=rf"before is {2**62}, expected 0 to"):
            cp.scan.halo_rows(2**62)

    hcp.loopback(1, call)


def test_a_causal_convolution_equals_one_rank() -> None:
    weight = torch.randn(5, 1, 4, dtype=torch.float64)
    lengths = (31, 6, 2)
    whole = [torch.randn(n, 5, dtype=torch.float64) for n in lengths]

    def convolved(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv1d(x.t()[None], weight, groups=5)[0].t()

    answers = []
    for x in whole:
        leaf = x.clone().requires_grad_()
        out = convolved(torch.cat([x.new_zeros(3, 5), leaf]))
        out.square().sum().backward()
        answers.append((out.detach(), leaf.grad))

    def check(groups: Any) -> None:
        (cp,) = all_handlers(groups, lengths, min_degree=3)
        local = torch.stack([whole[s][t] for s, t in tokens_of(cp)]).requires_grad_()
        out = convolved(cp.scan.halo(local, 3))[cp.scan.halo_rows(3) - 3]
        out.square().sum().backward()
        for n, result in enumerate((out, local.grad)):
            want = torch.stack([answers[s][n][t] for s, t in tokens_of(cp)])
            assert torch.allclose(result, want, atol=1e-12)

    hcp.loopback(3, check)


# ---- sums ----------------------------------------------------------------------------------------


def check_sums(groups: Any, lengths: Any, min_degree: int) -> None:
    generator = torch.Generator().manual_seed(5)
    whole = [torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in lengths]
    for cp in all_handlers(groups, lengths, min_degree=min_degree):
        local = [whole[s][t] for s, t in tokens_of(cp)]
        x = torch.stack(local) if local else torch.zeros(0, 2, dtype=torch.float64)
        sums = cp.sequences.sum(x.requires_grad_())
        want = [whole[s].sum(0) for s in cp.layout.sequences]
        assert sums.shape == (len(want), 2)
        assert torch.allclose(sums, torch.stack(want) if want else sums, atol=1e-12)
        # Each rank makes something of its own of the sums.
        (sums * (1 + cp.group.rank)).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, cp.degree * (cp.degree + 1) // 2))
        counts = torch.tensor([cp.rows, 1])
        assert cp.group.sum(counts).tolist() == (
            [sum(cp.layout.lengths), cp.degree] if cp.degree else [0, 1]
        )


@given(st.integers(1, 6), st.lists(st.integers(1, 60), min_size=1, max_size=5), st.data())
def test_sums_count_whole_sequences_once_on_each_rank_of_the_group(
    ranks: int, lengths: list[int], data: st.DataObject
) -> None:
    min_degree = data.draw(st.integers(1, ranks))
    lengths = [min(length, 20 * ranks) for length in lengths]
    hcp.loopback(ranks, lambda g: check_sums(g, lengths, min_degree))


@pytest.mark.parametrize("lengths", [[7], [3, 6], [13, 2]])
def test_padding_counts_for_nothing_in_sums(lengths: list[int]) -> None:
    def check(groups: Any) -> int:
        padding = 0
        for cp in all_handlers(groups, lengths, min_degree=2, alignment=4):
            x = torch.ones(cp.rows, 3, requires_grad=True)
            sums = cp.sequences.sum(x)
            assert sums.tolist() == [[n] * 3 for n in cp.layout.lengths]
            sums.sum().backward()
            real = cp.rows - cp.layout.padding
            assert torch.equal(x.grad[:real], torch.full((real, 3), float(cp.degree)))
            assert not x.grad[real:].any()
            padding += cp.layout.padding
        return padding

    assert sum(hcp.loopback(2, check)) > 0


def test_a_sum_is_no_other_call_with_rows_of_the_same_kind() -> None:
    def check(groups: Any) -> None:
        (cp,) = all_handlers(groups, [40], min_degree=2)
        if cp.group.rank == 0:
            cp.group.sum(torch.ones(3))
        else:
            cp.roll_tensor(torch.ones(cp.rows, 3))

    with pytest.raises(hcp.HcpError, match="is in another call: "):
        hcp.loopback(2, check)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32])
def test_integers_that_would_wrap_are_not_summed(dtype: torch.dtype) -> None:
    def check(groups: Any) -> None:
        (cp,) = all_handlers(groups, [40], min_degree=2)
        with pytest.raises(ValueError, match=r"expected floats or int64: x.to\(torch.int64\)"):
            cp.group.sum(torch.ones(2, dtype=dtype))
        with pytest.raises(ValueError, match="expected floats: counts as float64 stay exact"):
            cp.sequences.sum(torch.ones(cp.rows, dtype=dtype))

    hcp.loopback(2, check)


def load_balance(share: torch.Tensor, probability: torch.Tensor) -> torch.Tensor:
    """An auxiliary loss that is not linear in its sums, as that of experts."""
    return (share * probability).sum() / (1 + probability.square().sum())


def check_sum_over_domain(groups: Any, lengths: Any, limits: Any) -> int:
    generator = torch.Generator().manual_seed(6)
    whole = [torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in lengths]
    without_rows = 0
    for cp in all_handlers(groups, lengths, **limits):
        sequences = sorted(s for g in cp.plan.micro_batches[cp.micro_batch] for s in g.sequences)
        here = [whole[s].clone().requires_grad_() for s in sequences]
        rows = torch.cat(here)
        expected = load_balance((rows > 0).sum(0).double(), rows.tanh().sum(0))
        expected.backward()

        local = [whole[s][t] for s, t in tokens_of(cp)]
        x = torch.stack(local) if local else torch.zeros(0, 3, dtype=torch.float64)
        x.requires_grad_()
        counts = cp.group.sum_over_domain((x > 0).sum(0))
        assert counts.dtype == torch.int64
        loss = load_balance(counts.double(), cp.group.sum_over_domain(x.tanh().sum(0)))
        assert abs(loss - expected).item() < 1e-10
        # Each rank has the whole loss, so the gradients of all ranks' losses add up.
        (loss / groups.transport.size).backward()
        by_sequence = dict(zip(sequences, here, strict=True))
        want = [by_sequence[s].grad[t] for s, t in tokens_of(cp)]
        assert torch.allclose(x.grad, torch.stack(want) if want else x.grad, atol=1e-10, rtol=0)
        without_rows += not cp.rows
    return without_rows


@given(st.integers(1, 6), st.lists(st.integers(1, 60), min_size=1, max_size=5), st.data())
def test_a_sum_over_the_domain_has_the_gradients_of_one_rank(
    ranks: int, lengths: list[int], data: st.DataObject
) -> None:
    limits = {"min_degree": data.draw(st.integers(1, ranks))}
    lengths = [min(length, 20 * ranks) for length in lengths]
    hcp.loopback(ranks, lambda g: check_sum_over_domain(g, lengths, limits))


def gloo_sum_over_domain(rank: int, size: int) -> int:
    return check_sum_over_domain(GlooGroups(), [15], {"max_degree": 1})


def test_ranks_without_rows_take_part_in_a_sum_over_the_domain() -> None:
    assert sorted(run_ranks(3, gloo_sum_over_domain)) == [0, 1, 1]


def test_a_rank_that_gives_another_shape_to_a_sum_over_the_domain_is_named() -> None:
    def check(groups: Any) -> None:
        (cp,) = all_handlers(groups, [5], max_degree=1)
        cp.group.sum_over_domain(torch.ones(2 + groups.transport.rank))

    with pytest.raises(hcp.HcpError, match=r"differ|in another call"):
        hcp.loopback(2, check)


def test_a_rank_without_sequences_has_no_sums() -> None:
    def check(groups: Any) -> int:
        (cp,) = all_handlers(groups, [5], max_degree=1)
        x = torch.ones(cp.rows, 2, requires_grad=True)
        sums = cp.sequences.sum(x)
        sums.sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))
        return len(sums)

    assert sorted(hcp.loopback(2, check)) == [0, 1]


def gloo_sums(rank: int, size: int) -> None:
    check_sums(GlooGroups(), [40, 7, 2], 2)


def test_sums_work_on_gloo_ranks() -> None:
    run_ranks(3, gloo_sums)


# ---- calls that differ ---------------------------------------------------------------------------

# By the ranks 0 and 1, of two, that hold a sequence which rank 0 has loaded.
DIFFERING = {
    "shifts": ("roll_tensor", -1, "roll_tensor", 1),
    "rows before": ("scan.halo", 1, "scan.halo", 2),
    "halo and roll": ("scan.halo", 1, "roll_tensor", -1),
    "roll and sum": ("roll_tensor", -1, "group.sum", None),
    "dispatch and combine": ("dispatch", None, "combine", None),
}


def call(cp: hcp.ContextParallelHandler, operation: str, option: int | None) -> None:
    loaded = operation == "dispatch" and cp.layout.rank == 0
    rows = {"group.sum": 1, "dispatch": 40 * loaded}.get(operation, cp.rows)
    options = [] if option is None else [option]
    attrgetter(operation)(cp)(torch.zeros(rows, 3), *options)


def differing_call(rank: int, size: int, first: Any, second: Any, calls_before: int) -> None:
    groups = GlooGroups(5) if calls_before else GlooGroups()
    (cp,) = all_handlers(groups, [40], min_degree=size)
    for _ in range(calls_before):
        call(cp, *first)
    call(cp, *(second if rank == 1 else first))


@pytest.mark.parametrize("what", DIFFERING)
def test_ranks_that_call_differently_all_get_an_error(what: str) -> None:
    calls = DIFFERING[what]
    for rank, result in enumerate(try_ranks(2, differing_call, calls[:2], calls[2:], 0)):
        assert isinstance(result, RankError)
        assert result.kind == "HcpError"
        assert f"rank {rank}: rank {1 - rank} is in another call: " in result.message


def test_ranks_that_differ_later_never_read_rows_that_are_not_theirs() -> None:
    """The rank that changes its call waits for an agreement, the other for rows: until the
    timeout, and without a wrong number."""
    calls = DIFFERING["shifts"]
    for result in try_ranks(2, differing_call, calls[:2], calls[2:], 1):
        assert isinstance(result, RankError)
        assert result.kind == "HcpError"


def test_a_sum_has_the_same_bits_on_every_rank() -> None:
    def check(groups: Any) -> list[int]:
        (cp,) = all_handlers(groups, [40], min_degree=4)
        generator = torch.Generator().manual_seed(groups.transport.rank)
        x = torch.randn(64, generator=generator).exp()
        return cp.group.sum(x).view(torch.int32).tolist()

    results = hcp.loopback(4, check)
    assert all(result == results[0] for result in results)


# ---- whole sequences -----------------------------------------------------------------------------


def check_head_exchange(
    groups: Any, lengths: Any, heads: int, min_degree: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(5)
    whole = [torch.randn(n, heads, 3, generator=generator).to(dtype) for n in lengths]
    for cp in all_handlers(groups, lengths, min_degree=min_degree):
        local = [whole[s][t] for s, t in tokens_of(cp)]
        x = torch.stack(local) if local else torch.zeros(0, heads, 3, dtype=dtype)
        y = cp.whole.sequence_to_head(x.requires_grad_())
        own = cp.whole.head_slice(heads)
        want = [whole[s][:, own] for s in cp.layout.sequences]
        assert cp.whole.cu_seqlens.diff().tolist() == [len(part) for part in want]
        assert torch.equal(y, torch.cat(want) if want else y.new_zeros(0, heads, 3))
        back = cp.whole.head_to_sequence(y, heads)
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
    hcp.loopback(ranks, lambda g: check_head_exchange(g, lengths, heads, min_degree, dtype))


@pytest.mark.parametrize("over", [0, 1])
def test_more_tokens_in_a_group_than_int32_boundaries_can_name_are_refused(over: int) -> None:
    lengths = [2**30, 2**30 - 1 + over]
    options = {"max_tokens_per_rank": 2**19 + 2, "cost": hcp.CostModel(pair=0, token=1)}
    plan = hcp.plan(lengths, ranks=4096, min_degree=4096, **options)
    ((group,),) = plan.micro_batches
    assert len(group.sequences) == 2
    if over == 0:
        assert whole_cu_seqlens(Layout(plan, 0, 3)).tolist() == [0, 2**30, 2**31 - 1]
        return
    transport = SimpleNamespace(rank=3, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"rank 3 has 2,147,483,648 tokens, expected <= 2,147,4"):
        hcp.ContextParallelHandler(plan, 0, transport)


@given(
    st.integers(1, 5),
    st.lists(st.integers(1, 60), min_size=1, max_size=5),
    st.sampled_from([2, 4, 8]),
    st.data(),
)
def test_padding_travels_as_sequences_of_its_own(
    ranks: int, lengths: list[int], alignment: int, data: st.DataObject
) -> None:
    """Rows of a rank: its number plus a fraction, so that they are known wherever they are."""
    min_degree = data.draw(st.integers(1, ranks))
    lengths = [min(length, 20 * ranks) for length in lengths]

    def check(groups: Any) -> None:
        rank = groups.transport.rank
        for cp in all_handlers(groups, lengths, min_degree=min_degree, alignment=alignment):
            assert cp.rows % alignment == 0
            padding = cp.layout.padding
            x = rank + torch.arange(cp.rows, dtype=torch.float64) / 1024
            x = x[:, None].repeat(1, 3).requires_grad_()
            y = cp.whole.sequence_to_head(x)
            assert cp.whole.cu_seqlens.tolist()[-1] == y.shape[0]
            tokens = sum(cp.layout.lengths)
            owners = [cp.layout.first_rank + j for j in range(cp.degree)]
            mine = [r for r, n in zip(owners, cp.layout.paddings, strict=True) for _ in range(n)]
            if y.shape[1]:
                assert y[tokens:, 0].floor().tolist() == mine
            back = cp.whole.head_to_sequence(y, 3)
            assert torch.equal(back, x)
            back.backward(x.detach())
            assert torch.equal(x.grad, x)
            rolled = cp.roll_tensor(torch.ones(cp.rows))
            assert rolled[cp.rows - padding :].tolist() == [0] * padding

    hcp.loopback(ranks, check)


def gloo_head_exchange(rank: int, size: int) -> None:
    check_head_exchange(GlooGroups(), [40, 7, 2, 1], 5, 2, torch.float32)


def test_whole_sequences_work_on_gloo_ranks() -> None:
    run_ranks(3, gloo_head_exchange)


def test_a_scan_over_whole_sequences_equals_one_rank() -> None:
    """A recurrent layer: the gradient at a token depends on all later tokens."""
    x = torch.randn(31, 5, 2, dtype=torch.float64)
    whole = x.clone().requires_grad_()
    whole.cumsum(0).square().sum().backward()

    def check(groups: Any) -> None:
        (cp,) = all_handlers(groups, [31], min_degree=3)
        local = x[cp.position_ids].requires_grad_()
        out = cp.whole.head_to_sequence(cp.whole.sequence_to_head(local).cumsum(0), 5)
        out.square().sum().backward()
        assert torch.allclose(out, x.cumsum(0)[cp.position_ids], atol=1e-12)
        assert torch.allclose(local.grad, whole.grad[cp.position_ids], atol=1e-12)

    hcp.loopback(3, check)


@pytest.mark.parametrize("to_heads", [True, False])
def test_wrong_rows_of_whole_sequences_are_refused(to_heads: bool) -> None:
    def call(groups: Any) -> None:
        (cp,) = all_handlers(groups, [9])
        if to_heads:
            cp.whole.sequence_to_head(torch.zeros(8, 2, 4))
        else:
            cp.whole.head_to_sequence(torch.zeros(9, 3, 4), 2)

    message = r"expected \(9, heads, ...\)" if to_heads else r"expected \(9, 2, ...\)"
    with pytest.raises(ValueError, match=message):
        hcp.loopback(1, call)


# ---- handlers as values --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"comm_types": ("ring",)}, "comm_type is 'ring', expected one of"),
        (
            {"comm_types": "p2p"},
            "comm_types is 'p2p', expected a sequence of one or more of",
        ),
        ({"comm_types": []}, r"comm_types is \[\], expected one or more of \('p2p'"),
        ({"comm_types": 5}, "comm_types is 5, expected a sequence of one or more"),
        ({"hierarchical_context_parallel_sizes": 2}, "sizes is 2, expected a sequence of integers"),
        ({"window_sizes": (3, 0)}, r"window_sizes\[0\] is 3, expected \(left, right\) in tokens"),
        ({"window_sizes": 3}, r"window_sizes is 3, expected a sequence of \(left, right\)"),
        ({"heads": (8, 2)}, r"heads\[0\] is 8, expected a sequence of integers"),
        ({"heads": [(8, 2, 2)]}, r"heads\[0\] is \(8, 2, 2\), expected \(query heads, key-value"),
        ({"sources": None}, "sources is None, expected a sequence of ranks"),
        ({"sources": [0.0, 0.0]}, r"sources\[0\] is 0.0, expected 0 to 0"),
    ],
)
def test_what_layers_cannot_have_is_refused_by_dispatch(options: Any, message: str) -> None:
    def make(groups: Any) -> None:
        plan = hcp.plan([5, 3], ranks=1, max_tokens_per_rank=8)
        samples = [{"tokens": torch.zeros(n)} for n in (5, 3)]
        hcp.dispatch(plan, samples, **{"sources": [0, 0], "groups": groups, **options})

    with pytest.raises(ValueError, match=message):
        hcp.loopback(1, make)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (4, {"softmax_scale": "x"}, "softmax_scale is 'x', expected a finite number"),
        (4, {"softmax_scale": float("nan")}, "softmax_scale is nan, expected a finite number"),
        (4, {"softmax_scale": 0.0}, "softmax_scale is 0.0, expected a finite number > 0.0"),
        (4, {"softmax_scale": -0.5}, "softmax_scale is -0.5, expected .* multiply the queries"),
        (4, {"window_size": 3}, r"window_size is 3, expected \(left, right\) in tokens"),
        (4, {"window_size": (-7, -3)}, r"window_size is \(-7, -3\), expected \(left, right\)"),
        (4, {"window_size": (3, -2)}, r"window_size is \(3, -2\), expected \(left, right\)"),
        (4, {"window_size": ("a", "b")}, r"window_size is \('a', 'b'\), expected \(left, right\)"),
        (0, {}, r"query has shape \(9, 1, 0\), expected a head size >= 1"),
    ],
)
def test_what_attention_cannot_have_is_refused(
    size: int, options: Any, message: str, across: bool
) -> None:
    def call(groups: Any) -> None:
        (cp,) = all_handlers(groups, [9])
        rows = torch.zeros(9, 1, size)
        attention = cp.cross_attention if across else cp.attention
        attention(rows, rows, rows, *([cp] if across else []), **options)

    with pytest.raises(ValueError, match=message):
        hcp.loopback(1, call)


def test_groups_that_are_gone_are_named() -> None:
    def use_after(groups: Any) -> Any:
        (cp,) = all_handlers(groups, [5])
        return cp

    (cp,) = hcp.loopback(1, use_after)
    transport_words = cp._schedules.words_of("p2p", -1, 0, (1, 1)).clone()
    transport_words[0] = -1  # a serial that was never read
    transport_words[1] = 10**9
    with pytest.raises(hcp.HcpError, match="process groups of this handler are gone"):
        torch.ops.hcp.attention(*[torch.zeros(5, 1, 4)] * 3, None, transport_words, 1.0)


# ---- models that cannot compute 0 rows -----------------------------------------------------------


def test_a_rank_without_rows_gets_one_and_others_keep_theirs() -> None:
    def check(groups: Any) -> list[int]:
        counts = []
        for cp in all_handlers(groups, [1]):
            x = torch.ones(cp.rows, 2)
            given = cp.at_least_one_row(x, -100)
            assert given.tolist() == (x.tolist() or [[-100.0, -100.0]])
            assert given[: cp.rows].tolist() == x.tolist()
            with pytest.raises(ValueError, match=f"x has {cp.rows + 1} rows, expected {cp.rows}"):
                cp.at_least_one_row(torch.ones(cp.rows + 1))
            counts.append(cp.rows)
        return counts

    assert sorted(hcp.loopback(2, check)) == [[0], [1]]
