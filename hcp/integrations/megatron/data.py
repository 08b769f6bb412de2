"""Turn samples into planned micro-batches, on every tensor- and pipeline-parallel rank.

Every rank loads its share of a global batch, and the ranks of each dp_cp group exchange the rows
among themselves. Tensor- and pipeline-parallel peers load the same share, so nothing is broadcast.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

import hcp
from hcp._words import Sync
from hcp.integrations.barrier import waits_in_layers
from hcp.integrations.columns import AXES
from hcp.integrations.documents import bounds_of, first_miscounted, lengths_by_axes, short
from hcp.integrations.megatron.megatron_packed import packed_seq_params, with_padding
from hcp.integrations.megatron.mtp import PredictionTokens
from hcp.integrations.megatron.pool import CPGroupPool
from hcp.integrations.too_long import fit_of
from hcp.step.ahead import ReadItems
from hcp.step.dispatch import Step, StepTransport, gather_masks
from hcp.step.planner import StepPlanner

Batch = dict[str, Any]


class MicroBatches:
    """One step, with the arguments that Megatron's schedules take."""

    def __init__(
        self,
        step: hcp.Step,
        *,
        has_rows: bool = True,
        cp_groups: Sequence[dist.ProcessGroup | None] = (),
    ) -> None:
        """`has_rows`: whether this pipeline stage needs tokens and labels. `cp_groups`: for the
        PackedSeqParams of each micro-batch (default: they have none)."""
        self.plan, self.planning = step.plan, step.planning
        self.stats = step.stats
        self._batches = [
            _batch_of(cp, local, has_rows, group)
            for (cp, local), group in zip(step, cp_groups or [None] * len(step), strict=True)
        ]
        if has_rows and self._batches:
            tokens = PredictionTokens(self._batches)
            for batch in self._batches:
                batch["prediction_tokens"] = tokens

    def __len__(self) -> int:
        """The value for `num_microbatches`, the same on every rank."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)

    def data_iterator(self, chunks: int | None = None) -> Any:
        """The value for `data_iterator`: an iterator, or a list with one for each of a rank's
        `chunks` of the model (virtual pipeline stages)."""
        if chunks is None:
            return iter(self._batches)
        return [iter(self._batches) for _ in range(chunks)]


def _batch_of(
    cp: hcp.ContextParallelHandler,
    local: hcp.LocalBatch,
    has_rows: bool,
    cp_group: dist.ProcessGroup | None,
) -> Batch:
    """Return the batch of a micro-batch. tokens, labels and loss_mask are (1, rows), or None in a
    stage that does not need them. position_ids are (1, rows), or (3, 1, rows) of samples that have
    positions of three axes.

    A rank without rows gets padding: Megatron's layers cannot reshape zero rows.
    """
    rows = cp.rows or cp.plan.core.alignment
    fields = {name: with_padding(local[name], rows)[None] if has_rows else None for name in _FIELDS}
    positions = local[AXES].T.unsqueeze(1) if AXES in local else cp.position_ids[None]
    return {
        **fields,
        "position_ids": pad(positions, (0, rows - cp.rows)),
        "attention_mask": None,
        "packed_seq_params": packed_seq_params(cp, cp_group, rows=rows),
    }


_FIELDS = ("tokens", "labels", "loss_mask")
MASK = "mask"


def plan_batches(
    batches: Iterable[Iterable[Mapping[str, Any]]],
    config: hcp.Config,
    groups: hcp.ProcessGroups,
    *,
    cost: hcp.CostModel | None = None,
    samples_of: str = "dp_cp",
    alignment: int = 1,
    virtual_stages: int = 1,
    micro_batch_group: int | None = None,
    sync: Sync | None = None,
    cp_groups: CPGroupPool | None = None,
    masks: bool = False,
) -> Iterator[MicroBatches]:
    """Plan each global batch and bring its rows to where they are computed.

    `batches`: for each step, the samples that this rank loads, any number. A sample is a dictionary
    with "tokens" (length,). "labels" and "loss_mask", 0 or 1, are (length,), and made from the
    tokens if they are missing; given labels below 0 do not count then. Megatron's own samples,
    with a batch dimension of 1, with `original_seq_len` or with packed `cu_seqlens`, are split into
    their sequences. With `cu_seqlens_padded` too, these are their places, and `cu_seqlens` their
    lengths. For multimodal rotary embedding all have "position_ids" (3, length), of time, height
    and width, which are 0 on every axis where a sequence begins and nowhere else.
    `samples_of`: the ranks that load different samples: all of "dp_cp", or those of "dp", if CP
    siblings load the same, as Megatron's samplers do. `cost`: that of one pipeline stage.

    `alignment`: the rows of every rank are a multiple of it; for `sequence_parallel` it is the
    tensor-parallel size. A rank's rows, padding included, stay within the config's limit.
    `virtual_stages`: Megatron's `virtual_pipeline_model_parallel_size`. The number of micro-batches
    is then a multiple of `micro_batch_group`, Megatron's `microbatch_group_size_per_vp_stage`
    (default: the pipeline stages). `sync`: the ranks of a domain wait for each other once per
    "step" or after every "micro_batch". The default is `config.sync`, whose "auto" is "micro_batch"
    if experts lie on several ranks; give "micro_batch" with FSDP. `cp_groups`: gives each
    micro-batch's PackedSeqParams a process group of its ranks, for layers of your own that need
    one.

    `masks`: samples may have "mask", an `hcp.Mask` of their tokens, such as a tree of
    `hcp.prefix_trees`; those without are causal. A mask needs "labels", and a "loss_mask" of whole
    numbers: for how many texts a row counts. The option is the same on every rank.

    `config.plan_ahead` steps are planned while the one before them trains; `step.planning` says how
    long that took. `batches` is read as far ahead, on the caller's thread.
    Iteration ends when no rank has samples left. A rank that has none in a step still takes part in
    it. Every rank of the job iterates. Raises on all ranks if one fails to load, and if tensor- or
    pipeline-parallel peers loaded different samples.
    """
    if samples_of not in ("dp_cp", "dp"):
        raise ValueError(f"samples_of is {samples_of!r}, expected 'dp_cp' or 'dp'")
    if masks and config.too_long != "refuse":
        raise ValueError(
            f"config.too_long is {config.too_long!r} and masks is True, expected 'refuse': a mask "
            "is of a whole sample; hcp.prefix_trees(max_tokens=) makes trees that are short enough"
        )
    has_rows = groups.rank("pp") in (0, groups.size("pp") - 1)
    of_step: list[hcp.Mask | None] = []
    planner = StepPlanner.of(
        config,
        groups.size("dp_cp"),
        cost=cost,
        waits=lambda: waits_in_layers(groups),
        masks=lambda _: of_step if any(of_step) else None,
        fit=fit_of(config, groups.size("dp_cp"), alignment),
        sync=sync,
        alignment=alignment,
        pipeline_stages=groups.size("pp"),
        virtual_stages=virtual_stages,
        micro_batch_group=micro_batch_group,
    )
    source = iter(batches)
    shares = (
        ReadItems(_own_share(next(source, ()), groups, samples_of, has_rows, masks))
        for _ in itertools.count()
    )

    def with_masks(share: ReadItems[dict[str, Any]], step_transport: StepTransport) -> Step | None:
        of_step[:] = gather_masks([each.get(MASK) for each in share.items], step_transport)
        rows = ({name: x for name, x in each.items() if name != MASK} for each in share)
        return planner.step_of_some(rows, groups, step_transport)

    steps = planner.steps(shares, groups, with_masks if masks else None, until_empty=True)
    with contextlib.closing(steps):
        for number, step in enumerate(steps):
            _agree(step.plan, number, groups)
            taken = () if cp_groups is None else cp_groups.of_step(step, groups)
            yield MicroBatches(step, has_rows=has_rows, cp_groups=taken)


def _own_share(
    samples: Iterable[Mapping[str, Any]],
    groups: hcp.ProcessGroups,
    samples_of: str,
    has_rows: bool,
    masks: bool,
) -> Iterator[dict[str, Any]]:
    size, place = (groups.size("cp"), groups.rank("cp")) if samples_of == "dp" else (1, 0)
    sequences = (sequence for sample in samples for sequence in sequences_of(sample, masks))
    for i, sequence in enumerate(sequences):
        if i % size == place:
            yield sequence if has_rows else _without_columns(sequence)


def _without_columns(sequence: Mapping[str, Any]) -> dict[str, Any]:
    """A sequence as rows of 0 columns, for the middle stages of a pipeline, which need no tokens.
    They need positions of three axes, and masks."""
    needed = {name: sequence[name] for name in (AXES, MASK) if name in sequence}
    return {"rows": torch.empty(len(sequence["tokens"]), 0), **needed}


def sequences_of(sample: Mapping[str, Any], masks: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the sequences of a sample, each with tokens, labels and loss_mask, (length,). One with
    a mask is one sequence, and refused unless `masks`."""
    rows = _rows_of(sample)
    if sample.get(MASK) is not None:
        _check_mask(sample, rows, masks)
        yield {**_complete(rows, counts_twice=True), MASK: sample[MASK]}
        return
    for start, stop in bounds_of(sample, rows):
        if stop > start:
            _check_document(sample, rows, start, stop)
            yield _complete({name: value[start:stop] for name, value in rows.items()})


def _rows_of(sample: Mapping[str, Any]) -> dict[str, Tensor]:
    """The rows of a sample, (length,) each, and position_ids (length, 3) if they have three
    axes."""
    if not isinstance(sample, Mapping) or sample.get("tokens") is None:
        given = sorted(map(str, sample)) if isinstance(sample, Mapping) else type(sample).__name__
        raise ValueError(f"a sample has {given}, expected 'tokens' among them")
    rows = {name: _flat(name, sample[name]) for name in _FIELDS if sample.get(name) is not None}
    length = len(rows["tokens"])
    if sample.get("position_ids") is not None:
        positions = _tensor("position_ids", sample["position_ids"])
        if positions.shape[:-1] in ((3,), (3, 1)):
            rows["position_ids"] = _by_row(positions)
        elif positions.shape[:-1] not in ((), (1,)):
            raise ValueError(
                f"position_ids has shape {tuple(positions.shape)}, expected (length,), or "
                "(3, length) of time, height and width for multimodal rotary embedding"
            )
    for name, value in rows.items():
        if len(value) != length:
            raise ValueError(
                f"{name} has {len(value)} rows in a sample of {length} tokens, expected as many"
            )
    return rows


def _by_row(positions: Tensor) -> Tensor:
    """Positions (length, 3), of (3, length) or (3, 1, length)."""
    whole = positions.long()
    if not torch.equal(whole.to(positions.dtype), positions):
        parts = positions[positions != whole]
        raise ValueError(
            f"position_ids has {parts[0].item()} on one of its axes, expected whole numbers: hcp "
            "turns rows by those"
        )
    return whole.reshape(3, -1).T.contiguous()


def _check_mask(sample: Mapping[str, Any], rows: Mapping[str, Tensor], masks: bool) -> None:
    """Refuse a sample's mask that is not one of its tokens, and what contradicts it."""
    mask, length = sample[MASK], len(rows["tokens"])
    if not masks:
        raise ValueError(
            f"a sample has a mask, {mask!r:.60}, expected none: plan_batches(masks=True) takes them"
        )
    if not isinstance(mask, hcp.Mask) or mask.length != length:
        raise ValueError(
            f"mask is {mask!r:.60} in a sample of {length} tokens, expected an hcp.Mask of as many"
        )
    missing = [name for name in _FIELDS if name not in rows]
    if missing:
        raise ValueError(
            f"a sample has a mask and no {' and no '.join(missing)}, expected them: which token "
            "follows a row, and for how many texts it counts, does not follow from the tokens. "
            "hcp.prefix_trees gives labels, and summed(loss_masks)"
        )
    others = [
        name for name in sample if name.startswith(_OF_DOCUMENTS) and sample[name] is not None
    ]
    if others:
        raise ValueError(
            f"a sample has a mask and {others}, expected the mask alone: it says which rows see "
            "each other, and their positions"
        )


_OF_DOCUMENTS = ("position_ids", "attention_mask", "original_seq_len", "cu_seqlens")
"""How fields begin that say where documents lie."""


def _check_document(
    sample: Mapping[str, Any], rows: Mapping[str, Tensor], start: int, stop: int
) -> None:
    """Refuse rows that are not one causal document, such as several documents that
    `reset_position_ids` and `reset_attention_mask` tell apart. `rows`: of the sample."""
    positions, mask = sample.get("position_ids"), sample.get("attention_mask")
    length = len(rows["tokens"])
    if "position_ids" in rows:
        lengths = lengths_by_axes(rows["position_ids"][start:stop]).tolist()
        if len(lengths) > 1:
            raise ValueError(
                f"position_ids of the rows {start} to {stop - 1} are 0 on every axis at the row "
                f"{start + lengths[0]} too, expected that at the first alone: {_DOCUMENTS}"
            )
    elif positions is not None:
        own = _flat("position_ids", positions)[start:stop]
        counted = (own - first for first in (0, start))
        if len(own) != stop - start or not any(_counts_up(x) for x in counted):
            raise ValueError(
                f"position_ids of the rows {start} to {stop - 1} are {short(own)}, expected 0, "
                f"1, 2, ...: {_DOCUMENTS}"
            )
    if mask is not None and not _is_causal(torch.as_tensor(mask), length, start, stop):
        raise ValueError(
            f"attention_mask of the rows {start} to {stop - 1} is not Megatron's causal one, "
            f"expected that or None: {_DOCUMENTS}"
        )


def _counts_up(positions: Tensor) -> bool:
    return first_miscounted(positions, [len(positions)]) is None


_DOCUMENTS = (
    "hcp attends from each row to all rows before it in its sequence. Say where documents start "
    "with cu_seqlens, or build the dataset without reset_position_ids and reset_attention_mask"
)


def _is_causal(mask: Tensor, length: int, start: int, stop: int) -> bool:
    """Whether a mask is (..., length, length), and hides from each row the later rows and no
    others."""
    if mask.shape[-2:] != (length, length):
        return False
    own = mask.reshape(-1, *mask.shape[-2:])[:, start:stop, start:stop].bool()
    return torch.equal(own, torch.ones_like(own).triu(1))


def _tensor(name: str, given: Any) -> Tensor:
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} is {given!r:.60}, expected (length,): {error}") from None


def _flat(name: str, given: Any) -> Tensor:
    value = _tensor(name, given)
    if value.dim() == 2 and value.shape[0] == 1:
        value = value[0]
    if value.dim() != 1:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, expected (length,): one sequence for each "
            "sample (micro_batch_size 1), or packed ones with cu_seqlens"
        )
    return value


def _complete(rows: dict[str, Tensor], counts_twice: bool = False) -> dict[str, Tensor]:
    """`counts_twice`: a row may count for more than one text."""
    tokens = rows["tokens"].long()
    follows = "labels" not in rows
    labels = tokens.roll(-1) if follows else rows["labels"].long()
    given = rows.get("loss_mask")
    counts = torch.ones_like(tokens) if follows else labels >= 0
    mask = (counts if given is None else given).float()
    if follows:  # nothing follows the last token
        mask = mask.clone()
        mask[-1] = 0.0
    most = 2**24 if counts_twice else 1  # exact in float32
    if not ((mask >= 0) & (mask <= most) & (mask == mask.floor())).all():
        expected = "whole numbers of texts" if counts_twice else "only those"
        raise ValueError(
            f"loss_mask has values other than 0 and 1, expected {expected}: Megatron divides by "
            "their number"
        )
    if len(wrong := labels[(labels < 0) & (mask != 0)]):
        raise ValueError(
            f"{'tokens' if follows else 'labels'} has {int(wrong[0])} where loss_mask is 1, "
            "expected ids >= 0, or a loss_mask of 0 there: Megatron's loss counts such rows"
        )
    axes = {AXES: rows["position_ids"]} if "position_ids" in rows else {}
    return {"tokens": tokens, "labels": labels, "loss_mask": mask, **axes}


def _agree(plan: hcp.Plan, step: int, groups: hcp.ProcessGroups) -> None:
    """Raise on all tensor- and pipeline-parallel peers unless they made the same plan."""
    if "mp" not in groups.roles or groups.size("mp") == 1:
        return
    own = torch.tensor([plan.checksum % 2**62, step], device=groups.transport.device)
    every = [torch.empty_like(own) for _ in range(groups.size("mp"))]
    dist.all_gather(every, own, group=groups.mp)
    theirs = [each.tolist() for each in every]
    if any(each != theirs[0] for each in theirs):
        ranks = groups.ranks("mp")
        other = next(r for r, each in zip(ranks, theirs, strict=True) if each != theirs[0])
        raise hcp.HcpError(
            f"rank {dist.get_rank()}: the plans of step {step} differ between rank {ranks[0]} and "
            f"rank {other}, tensor- or pipeline-parallel peers; expected the same samples on both: "
            "shard data by the rank in dp_cp (or dp) only",
            code="ranks-differ",
        )
