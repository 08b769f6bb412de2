"""Packed micro-batches in Megatron's terms."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import hcp
from hcp.megatron_style.packed import get_thd_batch_on_this_cp_rank


def handlers(groups: Any, lengths: Any, **plan: Any) -> list[hcp.ContextParallelHandler]:
    made = hcp.plan(lengths, ranks=groups.transport.size, **{"max_tokens_per_rank": 24, **plan})
    return [
        hcp.ContextParallelHandler(made, m, groups.transport)
        for m in range(len(made.micro_batches))
    ]


def test_packed_seq_params_count_whole_sequences() -> None:
    def check(groups: Any) -> list[int]:
        for cp in handlers(groups, (40, 7, 2)):
            params = cp.packed_seq_params()
            assert params.qkv_format == "thd"
            lengths = list(cp.layout.lengths)
            assert params.cu_seqlens_q.dtype == torch.int32
            assert params.cu_seqlens_q.diff().tolist() == lengths
            others = ("cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
            assert all(getattr(params, name) is params.cu_seqlens_q for name in others)
            assert params.max_seqlen_q == params.max_seqlen_kv == max(lengths, default=0)
            assert params.max_seqlen_q == cp.max_seqlen
            assert params.total_tokens == sum(lengths)
            assert params.local_cp_size == max(cp.degree, 1)
            assert params.cp_group is None
            assert params.cp_handler is cp
            assert not params.pad_between_seqs
        return [cp.degree for cp in handlers(groups, (40, 7, 2))]

    degrees = [set(own) for own in hcp.loopback(3, check)]
    assert any(own - {0, 1} for own in degrees)


def test_under_alignment_no_piece_is_longer_than_max_seqlen_says() -> None:
    def check(groups: Any) -> int:
        (cp,) = handlers(groups, (2, 1), alignment=8)
        params = cp.packed_seq_params()
        pieces = params.cu_seqlens_q.diff().tolist()
        assert pieces[:2] == list(cp.layout.lengths)
        assert params.max_seqlen_q == params.max_seqlen_kv == max(pieces)
        return max(pieces)

    assert hcp.loopback(1, check) == [5]


@dataclass
class OlderRelease:
    qkv_format: str = ""
    cu_seqlens_q: Any = None
    max_seqlen_q: int = 0
    something_new: str = "its own default"


def test_the_class_of_any_release_gets_the_fields_that_it_has() -> None:
    (cp,) = hcp.loopback(1, lambda groups: handlers(groups, (5,))[0])
    params = cp.packed_seq_params(OlderRelease)
    assert type(params) is OlderRelease
    assert params.cu_seqlens_q.tolist() == [0, 5]
    assert params.max_seqlen_q == 5
    assert params.something_new == "its own default"
    assert params.cp_handler is cp


@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="Megatron-Core is not installed"
)
def test_megatrons_own_class_is_filled() -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    (cp,) = hcp.loopback(1, lambda groups: handlers(groups, (5, 7))[0])
    params = cp.packed_seq_params(PackedSeqParams)
    assert type(params) is PackedSeqParams
    assert params.cu_seqlens_q.diff().tolist() == list(cp.layout.lengths)
    assert params.cu_seqlens_kv_padded is params.cu_seqlens_q
    assert (params.qkv_format, params.local_cp_size) == ("thd", 1)


# ---- a batch -------------------------------------------------------------------------------------


def tokens_of(cp: hcp.ContextParallelHandler) -> list[int]:
    """Numbers of this rank's tokens: 1000 per sequence, plus the place in it."""
    return [1000 * s + t for s, start, rows in cp.layout.spans for t in range(start, start + rows)]


def test_megatrons_thd_function_gives_rows_and_parameters_and_takes_its_arguments() -> None:
    def check(groups: Any) -> None:
        for cp in handlers(groups, (40, 7, 2)):
            lengths = cp.layout.lengths
            whole = torch.arange(sum(lengths))
            bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
            given = (bounds[None], bounds, torch.tensor([max(lengths, default=0)]))
            sizes = {"cp_size": max(cp.degree, 1), "cp_rank": cp.group.rank}
            for arguments, options in (((), {}), (given, sizes)):
                own, params = get_thd_batch_on_this_cp_rank(
                    {"tokens": whole[None]}, *arguments, **options, cp_handler=cp
                )
                starts = dict(zip(cp.layout.sequences, bounds.tolist(), strict=False))
                rows = [starts[s] + t for s, a, n in cp.layout.spans for t in range(a, a + n)]
                assert own["tokens"].tolist() == [rows]
                assert params.cp_handler is cp
                assert params.cu_seqlens_q.tolist() == bounds.tolist()
            for place, wrong in enumerate((bounds + 1, bounds[:-1], torch.tensor([39]))):
                arguments = [*given]
                arguments[place] = wrong if place else torch.cat((bounds[:1], wrong))
                if lengths:
                    with pytest.raises(ValueError, match=r"expected .*, as cp_handler has it"):
                        get_thd_batch_on_this_cp_rank({}, *arguments, cp_handler=cp)
            with pytest.raises(ValueError, match=r"cp_size 7, expected \d, as cp_handler has it"):
                get_thd_batch_on_this_cp_rank({}, cp_size=7, cp_handler=cp)

    hcp.loopback(3, check)


def test_a_whole_batch_is_cut_for_this_rank() -> None:
    def check(groups: Any) -> None:
        for cp in handlers(groups, (40, 7, 2)):
            whole = torch.tensor(
                [
                    1000 * s + t
                    for s, n in zip(cp.layout.sequences, cp.layout.lengths, strict=True)
                    for t in range(n)
                ],
                dtype=torch.int64,
            )
            bounds = cp.whole.cu_seqlens
            batch = {
                "tokens": whole[None],
                "embeddings": whole[:, None].expand(-1, 3),
                "labels": whole + 1,
                "attention_mask": None,
                "cu_seqlens": bounds,
                "max_seqlen": torch.tensor(cp.max_seqlen),
                "local_cp_size": cp.degree,
            }
            own = hcp.get_batch_on_this_cp_rank(batch, cp_handler=cp)
            tokens = tokens_of(cp)
            assert own["tokens"].tolist() == [tokens]
            assert own["embeddings"].tolist() == [[t] * 3 for t in tokens]
            assert own["labels"].tolist() == [t + 1 for t in tokens]
            assert own["cu_seqlens"] is bounds  # of whole sequences, on every rank
            for name in ("attention_mask", "max_seqlen", "local_cp_size"):
                assert own[name] is batch[name]
            if len(whole):
                wrong = {"tokens": whole[None, :-1]}
                with pytest.raises(ValueError, match=r"batch\['tokens'\] has shape \(1, "):
                    hcp.get_batch_on_this_cp_rank(wrong, cp_handler=cp)

    hcp.loopback(3, check)


def test_a_batch_of_equal_lengths_is_cut_by_sequences() -> None:
    def check(groups: Any) -> None:
        (cp,) = handlers(groups, (12, 12), min_degree=3)
        whole = torch.arange(24).view(2, 12)
        masks = torch.ones(2, 1, 12, 12, dtype=torch.bool).tril()
        batch = {"tokens": whole, "attention_mask": masks}
        own = hcp.get_batch_on_this_cp_rank(batch, cp_handler=cp)
        places = cp.position_ids[: cp.rows // 2]
        assert torch.equal(own["tokens"], whole[:, places])
        assert torch.equal(own["attention_mask"], masks[:, :, places])

    hcp.loopback(3, check)


def test_a_batch_whose_sequences_are_not_cut_alike_is_refused() -> None:
    def check(groups: Any) -> None:
        (cp,) = handlers(groups, (11, 11), min_degree=3)
        whole, mask = torch.arange(22).view(2, 11), torch.ones(2, 1, 11, 11, dtype=torch.bool)
        for batch in ({"tokens": whole}, {"attention_mask": mask}):
            with pytest.raises(ValueError, match="expected a multiple of 2 \\* degree = 6"):
                hcp.get_batch_on_this_cp_rank(batch, cp_handler=cp)
        own = hcp.get_batch_on_this_cp_rank({"tokens": whole.view(1, 22)}, cp_handler=cp)
        assert own["tokens"][0].tolist() == cp.whole.row_indices.tolist()

    hcp.loopback(3, check)


@pytest.mark.parametrize("lengths", [(4, 8), (6, 6), (7,)])
@pytest.mark.parametrize("alignment", [1, 4])
def test_a_mask_of_packed_sequences_keeps_the_rows_of_this_ranks_queries(
    lengths: tuple[int, ...], alignment: int
) -> None:
    def check(groups: Any) -> None:
        (cp,) = handlers(groups, lengths, min_degree=2, alignment=alignment)
        total = sum(lengths)
        mask = torch.arange(total)[None, None, :, None].expand(1, 1, total, total)
        own = hcp.get_batch_on_this_cp_rank({"attention_mask": mask}, cp_handler=cp)
        starts = [sum(cp.layout.lengths[:s]) for s in range(len(cp.layout.lengths))]
        pieces = cp.cu_seqlens.diff().tolist()
        wanted = [s for s, n in zip(starts, pieces, strict=True) for _ in range(n)]
        wanted = [s + p for s, p in zip(wanted, cp.position_ids.tolist(), strict=False)]
        assert own["attention_mask"][0, 0, :, 0].tolist() == wanted
        for wrong in (mask[:, :, 1:], mask[0, 0]):
            with pytest.raises(ValueError, match=r"batch\['attention_mask'\] has shape"):
                hcp.get_batch_on_this_cp_rank({"attention_mask": wrong}, cp_handler=cp)

    hcp.loopback(2, check)


def test_under_alignment_rows_of_padding_are_zeros() -> None:
    def check(groups: Any) -> int:
        (cp,) = handlers(groups, (7,), min_degree=2, alignment=4)
        whole = torch.arange(1, 8)
        own = hcp.get_batch_on_this_cp_rank({"a": whole, "b": whole[None]}, cp_handler=cp)
        real = cp.rows - cp.layout.padding
        wanted = (cp.position_ids[:real] + 1).tolist() + [0] * cp.layout.padding
        assert own["a"].tolist() == own["b"][0].tolist() == wanted
        return cp.layout.padding

    assert sum(hcp.loopback(2, check)) == 1


def test_under_alignment_a_batch_by_sequences_is_refused() -> None:
    def check(groups: Any) -> int:
        (cp,) = handlers(groups, (7, 7), min_degree=2, alignment=4)
        if cp.layout.padding:
            with pytest.raises(ValueError, match="rows of padding belong to no sequence"):
                hcp.get_batch_on_this_cp_rank({"a": torch.zeros(2, 7)}, cp_handler=cp)
        return cp.layout.padding

    assert sum(hcp.loopback(2, check)) > 0


@pytest.mark.parametrize("alignment", [1, 4])
def test_sequences_of_one_token_are_packed(alignment: int) -> None:
    def check(groups: Any) -> int:
        (cp,) = handlers(groups, (1, 1, 1), min_degree=2, alignment=alignment)
        whole = torch.ones(3, 1, 5)
        (own,) = hcp.get_batch_on_this_cp_rank({"a": whole}, cp_handler=cp).values()
        assert own.shape == (cp.rows, 1, 5)
        return int(own.sum())

    assert sum(hcp.loopback(2, check)) == 15


def test_rows_in_whole_are_those_of_sequence_to_head() -> None:
    def check(groups: Any) -> None:
        for cp in handlers(groups, (13, 2), min_degree=2, alignment=4):
            x = cp.whole.row_indices.to(torch.float64)[:, None].expand(-1, 2).contiguous()
            whole = cp.whole.sequence_to_head(x)
            assert whole[:, 0].tolist() == list(range(len(whole)))

    hcp.loopback(2, check)


def test_a_rank_without_rows_takes_none() -> None:
    def check(groups: Any) -> Any:
        (cp,) = handlers(groups, (6,), max_degree=1)
        batch = {"tokens": (1, 6), "weights": (6,), "embeddings": (6, 3), "images": (1, 6, 3)}
        if cp.degree == 0:
            whole = {name: torch.zeros(shape) for name, shape in batch.items()}
            own = hcp.get_batch_on_this_cp_rank(whole, cp_handler=cp)
            shapes = {name: tuple(rows.shape) for name, rows in own.items()}
            assert shapes == {
                "tokens": (1, 0),
                "weights": (0,),
                "embeddings": (0, 3),
                "images": (1, 0, 3),
            }
        return cp.degree

    assert sorted(hcp.loopback(2, check)) == [0, 1]
