"""A packed micro-batch in Megatron's terms: ``PackedSeqParams``, and this rank's part of a batch.

T rows on this rank, S tokens of its group's sequences, end to end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hcp.exchange.layout import expect_sequences_alike
from hcp.megatron_style.handler_protocol import MegatronStyleHandler


@dataclass
class PackedSeqParams:
    """A packed micro-batch, with the field names of Megatron-Core's class of this name."""

    qkv_format: str = "thd"
    """Format of the rows: "thd", packed."""

    cu_seqlens_q: Tensor | None = None
    """int32 (documents + 1,): cumulative lengths of whole sequences, or of their documents where
    masks make several of one. Megatron counts whole sequences here under context parallelism too.
    Under ``alignment`` each rank's padding follows them, as a sequence of its own."""

    cu_seqlens_kv: Tensor | None = None
    """The tensor ``cu_seqlens_q``."""

    cu_seqlens_q_padded: Tensor | None = None
    """The tensor ``cu_seqlens_q``, by which Transformer Engine sees that no sequence is padded."""

    cu_seqlens_kv_padded: Tensor | None = None
    """The tensor ``cu_seqlens_q``."""

    max_seqlen_q: int = 0
    """Tokens of the longest sequence, padding included."""

    max_seqlen_kv: int = 0
    """Equal to ``max_seqlen_q``."""

    local_cp_size: int = 1
    """Ranks that compute these sequences; 1 on a rank without rows."""

    cp_group: Any = None
    """The process group of these ranks, if the caller has one."""

    total_tokens: int = 0
    """Tokens of all sequences."""

    pad_between_seqs: bool = False
    """Whether rows of padding lie between sequences. They never do."""

    cp_handler: MegatronStyleHandler | None = None
    """The handler, a :class:`hcp.ContextParallelHandler`: layers of a Megatron-style model receive
    it here."""


def packed_seq_params(cp: MegatronStyleHandler, cls: Any, cp_group: Any) -> Any:
    """See :meth:`hcp.ContextParallelHandler.packed_seq_params`."""
    if cp_group is not None:
        check_group(cp, cp_group)
    return _params(cp, cls, max(cp.degree, 1), cp_group, cp)


def whole_params(cp: MegatronStyleHandler, cls: Any) -> Any:
    """Describe the sequences to a layer that sees them whole, without context parallelism."""
    return _params(cp, cls, 1, None, None)


def _params(cp: MegatronStyleHandler, cls: Any, cp_size: int, cp_group: Any, handler: Any) -> Any:
    bounds, longest = cp.whole.cu_seqlens, max(cp.max_seqlen, *cp.layout.paddings, 0)
    said = PackedSeqParams(
        "thd", bounds, bounds, bounds, bounds, longest, longest, cp_size, cp_group
    )
    padding = sum(rows for rows in cp.layout.paddings if rows > 0)
    said.total_tokens, said.cp_handler = sum(cp.layout.lengths) + padding, handler
    if cls is PackedSeqParams:
        return said
    # Megatron-Core's class has more fields in each release, and no place for the handler.
    names = {field.name for field in dataclasses.fields(cls)}
    params = cls(**{name: value for name, value in vars(said).items() if name in names})
    params.cp_handler = handler
    return params


def check_group(cp: MegatronStyleHandler, cp_group: Any) -> None:
    """Raise ValueError for a process group of more or fewer ranks than compute this rank's
    sequences, or in which this rank has another place.

    ``cp_group``: one group, or one per level, the innermost first.
    """
    levels = cp_group if isinstance(cp_group, (list, tuple)) else [cp_group]
    size, place = 1, 0
    for level in levels:
        place += size * level.rank()
        size *= level.size()
    own = cp.group.rank
    if (size, place) != (max(cp.degree, 1), own):
        raise ValueError(
            f"cp_group is of {size} ranks, of which this one is number {place}, expected "
            f"{max(cp.degree, 1)} ranks and number {own}: the ranks that the plan gives these "
            "sequences"
        )


# ---- a batch -------------------------------------------------------------------------------------

_OF_ALL_RANKS = ("cu_seqlens", "max_seqlen")


def get_batch_on_this_cp_rank(
    batch: Mapping[str, Any], cp_handler: MegatronStyleHandler
) -> dict[str, Any]:
    """Take this rank's rows of a batch that every rank of the group has whole.

    Ranks exchange nothing. Megatron has a function of this name; this one works for any degree and
    any lengths. If each sample is on the rank that loaded it, use :func:`hcp.dispatch` instead.

    Args:
        batch: tensors by name, the whole sequences of the micro-batch in the order of
            ``cp_handler.layout.sequences``. They are packed, (S, ...) or (1, S, ...), or, if all
            have one length n, (sequences, n, ...); sequences of one token are packed. Several
            sequences are cut alike where n is a multiple of 2 * degree. An ``attention_mask`` is
            (b, 1, q, k), where q is the tokens of all sequences or their one length.
            ``cu_seqlens*`` and ``max_seqlen*`` describe whole sequences and stay as they
            are, as do None and numbers.
        cp_handler: this micro-batch's handler.

    Returns:
        The batch with tensors of (T, ...), (1, T, ...) or (sequences, T / sequences, ...). A rank
        without rows gets (0, ...) or (1, 0, ...). Rows of padding (``alignment``) are zeros. An
        ``attention_mask`` keeps the rows of this rank's queries.

    Raises:
        ValueError: a tensor whose tokens are not the layout's; (sequences, n, ...) if ranks have
            padding, which belongs to no sequence, or if sequences are not cut alike.
    """
    return {name: _on_this_rank(name, value, cp_handler) for name, value in batch.items()}


def get_thd_batch_on_this_cp_rank(
    batch: Mapping[str, Any],
    cu_seqlens: Any = None,
    cu_seqlens_padded: Any = None,
    max_seqlen: Any = None,
    cp_size: int | None = None,
    cp_rank: int | None = None,
    *,
    cp_handler: MegatronStyleHandler,
) -> tuple[dict[str, Any], PackedSeqParams]:
    """Take this rank's rows of a packed batch, and its parameters.

    Megatron has a function of this name. The handler knows all values but the batch: those that are
    given must agree with it.

    Args:
        batch: as in :func:`get_batch_on_this_cp_rank`.
        cu_seqlens: of the handler's lengths; hcp pads no sequence.
        cu_seqlens_padded: the same.
        max_seqlen: the longest of these lengths, in tokens.
        cp_size: the handler's degree.
        cp_rank: this rank's place in the group.
        cp_handler: this micro-batch's handler.

    Returns:
        The batch, and its :class:`hcp.PackedSeqParams`.

    Raises:
        ValueError: a value that does not agree with the handler.
    """
    lengths = cp_handler.layout.lengths
    for name, bounds in (("cu_seqlens", cu_seqlens), ("cu_seqlens_padded", cu_seqlens_padded)):
        if bounds is not None:
            ends = torch.as_tensor(bounds).flatten().tolist()
            own = tuple(b - a for a, b in pairwise(ends))
            _expect(f"{name} of sequences of", own, tuple(lengths))
    if max_seqlen is not None:
        longest = int(torch.as_tensor(max_seqlen).flatten()[0])
        _expect("max_seqlen", longest, max(lengths, default=longest))
    if cp_size is not None:
        _expect("cp_size", cp_size, max(cp_handler.degree, 1))
    if cp_rank is not None:
        _expect("cp_rank", cp_rank, cp_handler.group.rank)
    return get_batch_on_this_cp_rank(batch, cp_handler), cp_handler.packed_seq_params()


def _expect(name: str, given: Any, own: Any) -> None:
    if given != own:
        raise ValueError(f"{name} {given}, expected {own}, as cp_handler has it")


def _on_this_rank(name: str, value: Any, cp: MegatronStyleHandler) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0 or name.startswith(_OF_ALL_RANKS):
        return value
    sequences, tokens = len(cp.layout.lengths), sum(cp.layout.lengths)
    equal = len(set(cp.layout.lengths)) == 1 and tokens > sequences
    if name == "attention_mask":
        return _mask_of_this_rank(value, cp)
    if cp.degree == 0:
        return value[:, :0] if value.dim() > 1 and value.shape[0] == 1 else value[:0]
    if (
        value.dim() > 1
        and value.shape[0] * value.shape[1] == tokens
        and (value.shape[0] == 1 or (equal and value.shape[0] == sequences))
    ):
        if value.shape[0] > 1 and cp.layout.padding:
            raise ValueError(
                f"batch[{name!r}] has shape {tuple(value.shape)}, expected ({tokens}, ...) or "
                f"(1, {tokens}, ...): this rank's {cp.layout.padding} rows of padding belong to "
                "no sequence"
            )
        if value.shape[0] > 1:
            expect_sequences_alike(cp.layout, f"batch[{name!r}]", tuple(value.shape))
        own = _rows_of(value.flatten(0, 1), cp)
        return own.view(value.shape[0], -1, *value.shape[2:])
    if value.shape[0] != tokens:
        raise ValueError(
            f"batch[{name!r}] has shape {tuple(value.shape)}, expected {tokens} tokens: the whole "
            f"sequences {cp.layout.sequences} of this micro-batch, of lengths {cp.layout.lengths}"
        )
    return _rows_of(value, cp)


def _rows_of(value: Tensor, cp: MegatronStyleHandler) -> Tensor:
    """Take this rank's rows (T, ...) of the whole sequences (S, ...), with zeros in padding."""
    rows, real = cp.whole.row_indices.to(value.device), cp.rows - cp.layout.padding
    own = value[rows[:real]]
    if real == cp.rows:
        return own
    return torch.cat((own, own.new_zeros(cp.rows - real, *own.shape[1:])))


def _mask_of_this_rank(mask: Tensor, cp: MegatronStyleHandler) -> Tensor:
    lengths, queries = cp.layout.lengths, mask.shape[2] if mask.dim() == 4 else -1
    if cp.degree == 0 and queries >= 0:
        return mask[:, :, :0]
    rows = cp.whole.row_indices[: cp.rows - cp.layout.padding].to(mask.device)
    if queries == sum(lengths):
        return mask.index_select(2, rows)
    if set(lengths) == {queries}:
        expect_sequences_alike(cp.layout, "batch['attention_mask']", tuple(mask.shape))
        return mask.index_select(2, rows[: len(rows) // len(lengths)])
    raise ValueError(
        f"batch['attention_mask'] has shape {tuple(mask.shape)}, expected (b, 1, queries, keys) "
        f"with {sum(lengths)} queries, or with the one length of all sequences; lengths are "
        f"{lengths}"
    )
