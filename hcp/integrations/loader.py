"""Loaders that turn a dataset of tokens into micro-batches, which are planned and dispatched.

They know torch's datasets and no trainer. The trainers of Transformers, Accelerate and Lightning
all accept them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from hcp._digest import digest_of
from hcp._validate import expect_names, expect_size
from hcp.errors import HcpError
from hcp.evaluation.plan import EvalPlan
from hcp.groups.build import build_process_groups
from hcp.groups.process_groups import ProcessGroups
from hcp.planning.cost import CostModel
from hcp.planning.plan import Plan
from hcp.rebinding.exclude import Exclude
from hcp.rebinding.rebind import eval_cp_context
from hcp.step.config import NO_WINDOW, Config
from hcp.step.dispatch import Step, dispatch, gather_lengths

_log = logging.getLogger("hcp")

IGNORED = -100
"""The label that does not count, for torch.nn.functional.cross_entropy and for Transformers."""

ToSample = Callable[[Any], Mapping[str, Tensor]]


def causal_lm_sample(item: Mapping[str, Any]) -> dict[str, Tensor]:
    """Make a sample of one sequence of a dataset: `input_ids`, `labels` (the token after each) and
    `loss_mask`, (tokens,) each.

    `item` has `input_ids`, a list or a tensor (tokens,). It may have `labels` of the same length,
    not shifted, -100 where a token does not count (default: all count). It may have
    `completion_mask` or `assistant_masks`, 0 where a token does not count. `attention_mask`,
    `position_ids`, `seq_lengths` and `token_type_ids` are accepted if they describe one document
    without padding. Raises ValueError for anything else: an empty sequence, padding, packed
    documents (hcp packs them itself), and other entries.
    """
    if not isinstance(item, Mapping) or "input_ids" not in item:
        names = sorted(item) if isinstance(item, Mapping) else type(item).__name__
        raise ValueError(f"a sample has {names}, expected 'input_ids': tokenize the dataset first")
    tokens = _integers("input_ids", item["input_ids"])
    if tokens.dim() != 1:
        raise ValueError(f"input_ids has shape {tuple(tokens.shape)}, expected (tokens,)")
    if not len(tokens):
        raise ValueError(
            "input_ids is empty in a sample, expected >= 1 token: leave empty documents out of the "
            "dataset (dataset.filter)"
        )
    given = {name: column for name, column in item.items() if column is not None}
    _check_columns(given, len(tokens))
    labels = _column(given, "labels", tokens).clone() if "labels" in given else tokens.clone()
    for name in MASKS:
        if name in given:
            labels[_column(given, name, tokens) == 0] = IGNORED
    labels = torch.cat((labels[1:], labels.new_full((1,), IGNORED)))
    return {"input_ids": tokens, "labels": labels, "loss_mask": (labels != IGNORED).float()}


MASKS = ("completion_mask", "assistant_masks")
"""Columns that TRL and chat templates leave: 0 where a token is not learned."""

_UNPACKED = (
    "one document in a sample: hcp packs them itself (in TRL packing=False; "
    "hcp.integrations.loader.packed_documents takes packed rows apart)"
)


def _check_columns(given: Mapping[str, Any], tokens: int) -> None:
    """Refuse, by name, columns that do not describe one document without padding."""
    known = {"input_ids", "labels", *MASKS, *_PLAIN}
    if others := sorted(set(map(str, given)) - known):
        raise ValueError(
            f"a sample has {others[0]!r}, expected only {', '.join(sorted(known))}: hcp does not "
            f"know what it asks for. Remove it (dataset.remove_columns({others})), or give "
            "to_sample=, which makes a sample of an item"
        )
    for name, (values, expected) in _PLAIN.items():
        if name not in given:
            continue
        found = torch.as_tensor(given[name]).flatten().tolist()
        if found != values(tokens):
            raise ValueError(
                f"{name} is {_short(found)} in a sample of {tokens} tokens, expected {expected}"
            )


_PLAIN: dict[str, tuple[Callable[[int], list[int]], str]] = {
    "attention_mask": (
        lambda tokens: [1] * tokens,
        "all 1, no padding: tokenize with padding=False",
    ),
    "position_ids": (lambda tokens: list(range(tokens)), f"0, 1, 2, ...: {_UNPACKED}"),
    "seq_lengths": (lambda tokens: [tokens], f"their number: {_UNPACKED}"),
    "token_type_ids": (lambda tokens: [0] * tokens, "all 0: hcp does not hand segments on"),
}
"""Columns that must have the values of one document without padding."""


def _short(values: list[Any]) -> str:
    return repr(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"


def _column(given: Mapping[str, Any], name: str, tokens: Tensor) -> Tensor:
    values = _integers(name, given[name])
    if values.shape != tokens.shape:
        raise ValueError(f"{name} has shape {tuple(values.shape)}, expected {tuple(tokens.shape)}")
    return values


def _integers(name: str, given: Any) -> Tensor:
    values = torch.as_tensor(given)
    if values.is_floating_point() and values.numel():  # an empty list has floats
        raise ValueError(f"{name} is {values.dtype}, expected integers")
    return values.to(torch.int64)


def packed_documents(
    fields: Mapping[str, Tensor], positions: Tensor
) -> Iterator[dict[str, Tensor]]:
    """Split rows that other code has packed into their documents.

    `fields`: tensors (T, ...) by name. `positions` (T,): a document starts where they are 0. Raises
    ValueError for positions that do not count up.
    """
    starts = (positions == 0).nonzero().flatten().tolist()
    if len(positions) and starts[:1] != [0]:
        raise ValueError(f"positions begin with {int(positions[0])}, expected 0")
    for start, end in itertools.pairwise([*starts, len(positions)]):
        if int(positions[end - 1]) != end - 1 - start:
            raise ValueError(
                f"position {int(positions[end - 1])} stands {end - 1 - start} tokens after a 0, "
                "expected positions that count up from 0 in each document"
            )
        yield {name: rows[start:end] for name, rows in fields.items()}


# ---- where ranks wait for each other -------------------------------------------------------------

_EXPERT_RANKS = ("ep_size", "expert_parallel_size", "expert_model_parallel_size")
"""Names that modules and their configurations give to the number of ranks of experts."""


class Barrier:
    """The option `sync` of a configuration; a model decides what "auto" means."""

    def __init__(self, config: Config, model: nn.Module | None) -> None:
        self._config, self._model = config, model

    @cached_property
    def sync(self) -> str:
        """The value "step" or "micro_batch". It is read with the first batch, when the model is
        sharded already."""
        waiting = self._model is not None and waits_in_layers(self._model)
        return self._config.sync_where(waiting=waiting)


def waits_in_layers(model: nn.Module) -> bool:
    """Whether ranks wait for each other in the layers of a model, not only to reduce gradients.

    They do if parameters are sharded by FSDP or DeepSpeed's ZeRO-3, or experts lie on several
    ranks.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules()):
        return True
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):  # ZeRO-3 marks them
        return True
    return any(_spreads_experts(module) for module in model.modules())


def warn_of_the_barrier(model: nn.Module, plan: Plan) -> None:
    """Warn, once, of plans that are right but slower than they could be: those whose ranks do not
    wait for each other in the layers, for a model whose ranks do."""
    if plan.sync == "step" and plan.ranks > 1 and waits_in_layers(model):
        _warn_of_the_barrier()


@cache
def _warn_of_the_barrier() -> None:
    _log.warning(
        "hcp: the plan lets ranks wait at the end of a step only, and the model's are to wait in "
        "every layer, as its parameters are sharded or its experts lie on several ranks: give "
        'model= to the loader, or say hcp.Config(sync="micro_batch")'
    )


def _spreads_experts(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    holders = (module, config, getattr(config, "distributed_config", None))
    sizes = (getattr(holder, name, None) for holder in holders for name in _EXPERT_RANKS)
    return any(isinstance(size, int) and size > 1 for size in sizes)


# ---- training ------------------------------------------------------------------------------------


class GlobalBatches:
    """This rank's share of each global batch, as lists of indices. The last batch may be small, and
    a share empty.

    The samples of a batch depend on the seed and the epoch only, not on the ranks.
    """

    def __init__(
        self, samples: int, batch_size: int, rank: int, ranks: int, *, shuffle: bool, seed: int
    ) -> None:
        self.samples, self.batch_size = samples, batch_size
        self.rank, self.ranks = rank, ranks
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for first in range(0, self.samples, self.batch_size):
            yield order[first : first + self.batch_size][self.rank :: self.ranks]

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.samples))
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
        return torch.randperm(self.samples, generator=generator).tolist()


class DynamicCPCollator:
    """Turns this rank's share of a global batch, items of a dataset, into a planned `hcp.Step`.

    Every rank of the domain calls it for every batch, in the main process.
    """

    def __init__(
        self,
        config: Config,
        groups: ProcessGroups,
        *,
        cost: CostModel | None = None,
        to_sample: ToSample = causal_lm_sample,
        window_sizes: Sequence[tuple[int, int]] = (),
        model: nn.Module | None = None,
        alignment: int = 1,
    ) -> None:
        """`model`: decides `config.sync` if that is "auto", when the first batch is planned.
        `alignment`: the rows of every rank are a multiple of it."""
        self.config, self.groups, self.cost = config, groups, cost
        self.to_sample, self.window_sizes = to_sample, tuple(window_sizes)
        self.alignment = alignment
        self._barrier = Barrier(config, model)
        config.validate(ranks=groups.size("dp_cp"))

    def __call__(self, items: Any) -> Step:
        """Plan and dispatch. `items` may be a generator: an exception of it is raised on every
        rank."""
        samples = (self.to_sample(item) for item in items)
        lengths, sources, own = gather_lengths(samples, self.groups)
        ranks = self.groups.size("dp_cp")
        limits = {"sync": self._barrier.sync, "alignment": self.alignment}
        plan = self.config.plan(lengths, ranks, self.cost, **limits)
        options = self.config.dispatch_options()
        return dispatch(
            plan,
            own,
            sources,
            self.groups,
            **{**options, "window_sizes": (*options["window_sizes"], *self.window_sizes)},
        )


class DynamicCPDataLoader:
    """Iterates over the global batches of a dataset as steps of planned micro-batches.

    ::

        for step in DynamicCPDataLoader(dataset, config, groups, global_batch_size=64):
            for cp, local in step:
                ...

    Each rank of the domain loads its share of each batch. The batches do not depend on the number
    of ranks. The loader is no torch DataLoader, so a trainer leaves it as it is. It has the
    attributes that trainers look for: `dataset`, `sampler`, `batch_sampler`, `collate_fn`,
    `set_epoch`, a length, `state_dict`.
    """

    prefetch_factor = (
        None  # Accelerate's skip_first_batches makes a DataLoader of what it finds here
    )

    def __init__(
        self,
        dataset: Any,
        config: Config,
        groups: ProcessGroups,
        *,
        global_batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        load_workers: int = 0,
        cost: CostModel | None = None,
        to_sample: ToSample = causal_lm_sample,
        window_sizes: Sequence[tuple[int, int]] = (),
        model: nn.Module | None = None,
    ) -> None:
        """`dataset`: map-style, items for `to_sample`. `global_batch_size`: samples of all ranks
        together. `drop_last`: leave out the last batch of an epoch if it is smaller.
        `load_workers`: processes that read the dataset. `window_sizes`: see `hcp.dispatch`.
        `model`: the one that trains on the batches. With `config.sync` "auto", it decides whether
        ranks wait for each other in every layer. hcp's own trainers set it themselves."""
        _check_dataset(dataset)
        expect_size("global_batch_size", global_batch_size)
        self.dataset = dataset
        self.load_workers = load_workers
        self.collate_fn = DynamicCPCollator(
            config,
            groups,
            cost=cost,
            to_sample=to_sample,
            window_sizes=window_sizes,
            model=model,
        )
        samples = len(dataset)
        if drop_last:
            samples -= samples % global_batch_size
        if samples == 0:
            raise ValueError(
                f"the dataset has {len(dataset)} samples and no batch of {global_batch_size}, "
                "expected at least one: lower global_batch_size, or leave drop_last out"
            )
        rank, ranks = groups.rank("dp_cp"), groups.size("dp_cp")
        self.batch_sampler = GlobalBatches(
            samples, global_batch_size, rank, ranks, shuffle=shuffle, seed=seed
        )
        self.sampler = self.batch_sampler  # where trainers look for set_epoch
        self._start = self._next = 0

    def set_epoch(self, epoch: int) -> None:
        """Go on with the order of the samples in another epoch."""
        self.batch_sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Step]:
        self._next, self._start = self._start, 0
        shares = list(self.batch_sampler)[self._next :]
        loader = DataLoader(
            self.dataset,
            batch_sampler=[_FIRST_TWICE, *shares],
            collate_fn=list,
            num_workers=self.load_workers,
        )
        items, to_sample = iter(loader), self.collate_fn.to_sample
        made_for = {**self.state_dict(), "shuffle": self.batch_sampler.shuffle}
        _check_same_data(
            self.collate_fn.groups, made_for, lambda: [to_sample(item) for item in next(items)]
        )
        for _ in shares:
            step = self.collate_fn(_next_of(items))
            self._next += 1
            yield step

    def state_dict(self) -> dict[str, int]:
        """Return the position of the next batch. It holds for any number of ranks."""
        batches = self.batch_sampler
        return {
            "epoch": batches.epoch,
            "next": self._next,
            "seed": batches.seed,
            "batch_size": batches.batch_size,
            "samples": batches.samples,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where `state_dict` was taken."""
        own = self.state_dict()
        expect_names("state", state, own)
        for name in ("seed", "batch_size", "samples"):
            if state[name] != own[name]:
                raise ValueError(
                    f"the state has {name} {state[name]}, expected {own[name]}: "
                    "make the loader as the one that was saved"
                )
        self.batch_sampler.epoch = state["epoch"]
        self._start = self._next = state["next"]


def _next_of(items: Iterator[list[Any]]) -> Iterator[Any]:
    """Yield the items of the next share, which is loaded when the first one is taken."""
    yield from next(items)


_FIRST_TWICE = [0, 0]
"""The first sample of a dataset, twice: ranks compare it, unless two readings of it differ."""


def _check_same_data(
    groups: ProcessGroups,
    made_for: Mapping[str, int],
    first_twice: Callable[[], Sequence[Mapping[str, Tensor]]],
) -> None:
    """Raise HcpError on all ranks unless all have the same dataset and batches. A rank with another
    seed, or with a shard only, would leave samples out and repeat others."""
    try:
        once, again = map(digest_of, first_twice())
        first = once.hex() if once == again else ""
    except Exception:  # where the sample is wanted, all ranks learn of it
        first = ""
    own = {"the dataset's first sample": first, **made_for}
    gathered = groups.transport.all_gather_bytes(json.dumps(own).encode(), "hcp: same data")
    by_rank = [json.loads(payload) for payload in gathered]
    for name in reversed(own):
        values = [(rank, facts[name]) for rank, facts in enumerate(by_rank) if facts[name] != ""]
        for rank, value in values:
            if value != values[0][1]:
                shown = [f" ({each})" if name in made_for else "" for each in (value, values[0][1])]
                raise HcpError(
                    f"rank {dist.get_rank()}: {name} is another on rank {rank}{shown[0]} of dp_cp "
                    f"than on rank {values[0][0]}{shown[1]}, expected the same on every rank: each "
                    "is given the whole dataset and the same seed, and hcp gives it its share"
                )


def _check_dataset(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        raise ValueError(
            f"the dataset is a {type(dataset).__name__}, expected a map-style one with a length: "
            "every rank must know which samples make a batch"
        )


# ---- evaluation ----------------------------------------------------------------------------------


class EvalDataLoader:
    """Iterates over the micro-batches of an evaluation, as pairs (cp, local): each sample once.

    `groups`: those of the eval layout. The end of an iteration checks that each sample was
    evaluated once, by `hcp.EvalPlan.finish`.
    """

    def __init__(
        self,
        dataset: Any,
        config: Config,
        groups: ProcessGroups,
        *,
        global_batch_size: int,
        cost: CostModel | None = None,
        to_sample: ToSample = causal_lm_sample,
        model: nn.Module | None = None,
    ) -> None:
        _check_dataset(dataset)
        expect_size("global_batch_size", global_batch_size)
        self._barrier = Barrier(config, model)
        if len(dataset) == 0:
            raise ValueError("the dataset has 0 samples, expected some to evaluate")
        self.dataset, self.config, self.groups = dataset, config, groups
        self.global_batch_size, self.cost, self.to_sample = global_batch_size, cost, to_sample

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        lengths = self._lengths()
        degree = self._degree(lengths)
        plan = self._plan(lengths, degree)
        samples = _Samples(self.dataset, self.to_sample)
        for step in plan.dispatch(samples, **self.config.dispatch_options(degree)):
            yield from step
        plan.finish()

    def _plan(self, lengths: Sequence[int], degree: int | None) -> EvalPlan:
        widest = degree or self.groups.size("dp_cp")
        return EvalPlan(
            lengths,
            self.groups,
            max_tokens_per_rank=self.config.rows_in_evaluation(widest, max(lengths)),
            global_batch_size=self.global_batch_size,
            degree=degree,
            min_degree=self.config.min_dynamic_context_parallel_size,
            ranks_per_node=self.config.ranks_per_node,
            cost=self.cost,
            sync=self._barrier.sync,
        )

    def _degree(self, lengths: Sequence[int]) -> int | None:
        """Return the degree for all samples: the eval layout's if there is one, else training's.
        None stands for dynamic degrees."""
        if self.config.eval_context_parallel_size:
            return self.groups.size("cp")
        if self.config.sequence_packing_scheduler == "dynamic_cp":
            return None
        return self.config.static_degree(max(lengths), self.groups.size("dp_cp"))

    def _lengths(self) -> list[int]:
        """The lengths of all samples. Each rank reads its share, in addition to evaluating it."""
        rank, ranks = self.groups.rank("dp_cp"), self.groups.size("dp_cp")
        count = len(self.dataset)
        _check_same_data(
            self.groups,
            {"samples": count, "batch_size": self.global_batch_size},
            lambda: [self.to_sample(self.dataset[i]) for i in _FIRST_TWICE],
        )
        own = (self.to_sample(self.dataset[i]) for i in range(rank, count, ranks))
        widthless = ({"rows": next(iter(s.values())).new_empty(_tokens(s), 0)} for s in own)
        by_rank, sources, _ = gather_lengths(widthless, self.groups)
        shares = [
            [n for n, s in zip(by_rank, sources, strict=True) if s == r] for r in range(ranks)
        ]
        rounds = itertools.zip_longest(*shares)
        return [n for lengths in rounds for n in lengths if n is not None]


class _Samples:
    """A dataset of samples."""

    def __init__(self, dataset: Any, to_sample: ToSample) -> None:
        self.dataset, self.to_sample = dataset, to_sample

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        return self.to_sample(self.dataset[index])


def _tokens(sample: Mapping[str, Tensor]) -> int:
    return next(iter(sample.values())).shape[0]


def domain(groups: ProcessGroups | None, ranks: int) -> ProcessGroups:
    """Return the given groups, or those of one domain of all ranks.

    `ranks`: the number of ranks over which the trainer averages gradients. Raises ValueError if it
    is not the domain's: a loss with grad_reduce="mean" relies on that.
    """
    made = groups or build_process_groups()
    if made.size("dp_cp") != ranks:
        raise ValueError(
            f"the domain has {made.size('dp_cp')} ranks, expected {ranks}: those over which the "
            "trainer averages gradients. On a CPU say use_cpu=True to TrainingArguments and "
            "cpu=True to Accelerator, or they take each rank for a job of its own"
        )
    return made


class _Held:
    """Holds the groups that are in use, so that a model without any has something to switch."""

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups


def eval_groups(groups: ProcessGroups, config: Config) -> ProcessGroups:
    """Return the groups for evaluation: those with CP size `config.eval_context_parallel_size`, by
    default the training groups."""
    size = config.eval_context_parallel_size
    if size is None or size == groups.size("cp"):
        return groups
    check_eval_size(config)
    assert isinstance(size, int)
    config.validate(ranks=groups.size("dp_cp"))
    return groups.with_context_parallel(size)


def check_eval_size(config: Config) -> None:
    """Raise ValueError for the eval CP size "auto", which nobody has replaced by a number."""
    if config.eval_context_parallel_size == "auto":
        raise ValueError(
            "eval_context_parallel_size is 'auto', expected a number: ask "
            "hcp.choose_eval_context_parallel with the lengths of the evaluation first"
        )


def check_model_config(config: Config) -> None:
    """Raise ValueError for options that only Megatron-style layers follow, and for the eval CP size
    "auto", which nobody has replaced by a number."""
    if len(config.comm_types) > 1:
        raise ValueError(
            f"cp_comm_type lists {list(config.comm_types)}, expected one for all layers: the "
            "model's layers do not say which of them they are"
        )
    if config.window_size != NO_WINDOW:
        raise ValueError(
            f"window_size is {config.window_size}, expected {NO_WINDOW}: the model has the windows "
            "of its own configuration"
        )
    check_eval_size(config)


def eval_layout(
    model: object, groups: ProcessGroups, evaluation: ProcessGroups, *, exclude: Exclude = ()
) -> contextlib.AbstractContextManager[ProcessGroups]:
    """Like `hcp.eval_cp_context`, but also for a model that holds no groups and for equal
    layouts."""
    if evaluation is groups:
        return contextlib.nullcontext(groups)
    return eval_cp_context([model, _Held(groups)], groups, evaluation, exclude=exclude)
