"""A Megatron-style training script with dynamic context parallelism.

get_batches plans global batches and sends their rows to where they are computed, each while the one
before it trains. train_step runs the micro-batches, each with its own handler. Gradients are summed
once. For an evaluation hcp.eval_cp_context lays the same ranks out differently, and evaluate reads
the layout from the model.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hcp
from hcp._words import GradReduce
from hcp.attention.comm_types import fitted_sizes
from hcp.demo import checkpoint
from hcp.demo.demo_report import DemoStep, Reporter, Run
from hcp.demo.gpt_model import GPTModel
from hcp.step.ahead import ReadItems
from hcp.step.config import Config
from hcp.step.planner import StepPlanner
from hcp.tools.choose import choose_eval_context_parallel
from hcp.tools.programs.arguments import cost_model
from hcp.tools.programs.ranks import initialize_distributed, on_every_rank, same_on_every_rank
from hcp.tools.programs.run_records import Evaluation
from hcp.tools.programs.text_data import (
    VOCABULARY_SIZE,
    Corpus,
    Document,
    batch_indices,
    load,
    read_corpus,
    sample,
)

_STARTED = time.monotonic()

# ---- One step ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trainer:
    """State that the functions below share, as Megatron's functions share get_args()."""

    args: argparse.Namespace
    config: Config
    cost: hcp.CostModel
    groups: hcp.ProcessGroups
    device: torch.device


def get_batches(
    trainer: Trainer, config: Config, documents: Sequence[Document], first: int = 0
) -> Generator[hcp.Step]:
    """Yield the global batches of a training, from that of step ``first`` on: each is planned, and
    its rows sent to where they are computed, while the one before it trains. A rank loads its
    share."""
    args, groups = trainer.args, trainer.groups
    ranks, rank = groups.size("dp_cp"), groups.rank("dp_cp")

    def shares() -> Iterator[ReadItems[dict[str, Tensor]]]:
        for iteration in range(first, args.train_iters):
            batch = batch_indices(
                len(documents),
                seed=args.seed,
                iteration=iteration,
                batch_size=args.global_batch_size,
            )
            yield ReadItems(load(documents, batch[rank::ranks], torch.device("cpu")))

    return StepPlanner.of(config, ranks, cost=trainer.cost).steps(shares(), groups)


def forward_step(
    trainer: Trainer, model: nn.Module, cp: hcp.ContextParallelHandler, local: hcp.LocalBatch
) -> Tensor:
    """Return the loss of each row of this rank, (T,). T may be 0."""
    with autocast(trainer):
        logits = model(local.tokens, cp)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, local.labels, reduction="none")


def autocast(trainer: Trainer) -> torch.autocast:
    half = trainer.args.dtype == "bfloat16"
    return torch.autocast(trainer.device.type, torch.bfloat16, enabled=half)


def train_step(
    trainer: Trainer,
    model: nn.Module,
    gradients: Gradients | DDPGradients,
    optimizer: torch.optim.Optimizer,
    step: hcp.Step,
) -> Update:
    """Run the micro-batches of a step, then update the weights once."""
    gradients.zero()
    loss_sum, rows = torch.zeros(2, dtype=torch.float64, device=trainer.device)
    for cp, local in step.reducing_last(gradients.no_sync):
        losses = forward_step(trainer, model, cp, local)
        loss = cp.loss(losses, local.loss_mask, grad_reduce=gradients.grad_reduce)
        loss.backward()  # type: ignore[no-untyped-call]
        loss_sum += cp.loss_sum(losses.detach(), local.loss_mask)[0]
        rows += local.tokens.shape[0]
    gradients.reduce()
    norm = nn.utils.clip_grad_norm_(
        model.parameters(), trainer.args.clip_grad or float("inf"), foreach=True
    )
    optimizer.step()
    total_loss, total_rows = sum_over_ranks(trainer, torch.stack((loss_sum, rows)))
    return Update(total_loss / max(1.0, step.loss_tokens or 0.0), norm.item(), int(total_rows))


class Update(NamedTuple):
    loss: float
    """The mean over the batch."""
    grad_norm: float
    rows: int
    """Rows that all ranks computed together."""


class Gradients:
    """All gradients in one buffer, summed over the domain after the last micro-batch."""

    grad_reduce: GradReduce = "sum"

    def __init__(self, model: nn.Module, groups: hcp.ProcessGroups) -> None:
        self.group = groups.dp_cp
        parameters = list(model.parameters())
        self.buffer = torch.cat([torch.zeros_like(p).flatten() for p in parameters])
        views = torch.split(self.buffer, [p.numel() for p in parameters])
        for p, view in zip(parameters, views, strict=True):
            p.grad = view.view_as(p)

    def zero(self) -> None:
        self.buffer.zero_()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def reduce(self) -> None:
        dist.all_reduce(self.buffer, group=self.group)


class DDPGradients:
    """Gradients that DistributedDataParallel averages in the last backward: hence "mean"."""

    grad_reduce: GradReduce = "mean"

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model = model

    def zero(self) -> None:
        self.model.zero_grad(set_to_none=False)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.model.no_sync()

    def reduce(self) -> None:
        pass


# ---- Evaluation ----------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(trainer: Trainer, model: GPTModel, documents: Sequence[Document]) -> Evaluation:
    """Return the mean loss of the documents, each once, under the layout that the model holds."""
    groups = model.pg_collection
    wanted = evaluated(trainer.args, documents)
    plan = evaluation_plan(trainer, groups, wanted)
    metrics = hcp.Metrics(groups)
    model.eval()
    options = trainer.config.dispatch_options(groups.size("cp"))
    ahead = trainer.config.plan_ahead
    for step in plan.dispatch(Samples(wanted, trainer.device), plan_ahead=ahead, **options):
        for cp, local in step:
            losses = forward_step(trainer, model, cp, local)
            metrics.add_sum("loss", *cp.loss_sum(losses, local.loss_mask))
            # Each document masks its last token and no other: counted on the rows that arrived.
            metrics.add_sum("documents", (local.loss_mask == 0).sum(), 0)
            metrics.add_sum("tokens", len(losses), 0)
    model.train()
    plan.finish()
    totals = metrics.reduce()
    seen, tokens = totals["documents"].total, totals["tokens"].total
    expected = (len(wanted), sum(document.length for document in wanted))
    if (seen, tokens) != expected:
        raise hcp.HcpError(
            f"evaluation computed {seen:.0f} documents and {tokens:.0f} tokens,"
            f" expected {expected[0]} and {expected[1]}",
            code="samples-missed",
        )
    return Evaluation(
        cp=groups.size("cp"),
        dp=groups.size("dp"),
        loss=totals["loss"].total / max(1.0, totals["loss"].count),
        documents=int(seen),
        tokens=int(tokens),
    )


def evaluated(args: argparse.Namespace, documents: Sequence[Document]) -> list[Document]:
    """Return the documents to evaluate: all, or as many as --eval-iters asks for."""
    if args.eval_iters is None:
        return list(documents)
    return list(documents[: args.eval_iters * args.global_batch_size])


class Samples:
    """Documents as a map-style dataset of samples."""

    def __init__(self, documents: Sequence[Document], device: torch.device) -> None:
        self.documents, self.device = documents, device

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return sample(self.documents[index], self.device)


def evaluation_plan(
    trainer: Trainer, groups: hcp.ProcessGroups, documents: Sequence[Document]
) -> hcp.EvalPlan:
    """Plan static CP of the layout's own size. There is no backward, so rows and bytes have no
    limit where one document needs more."""
    lengths, degree = [document.length for document in documents], groups.size("cp")
    config = trainer.config
    return hcp.EvalPlan(
        lengths,
        groups,
        max_tokens_per_rank=config.rows_in_evaluation(degree, max(lengths)),
        global_batch_size=trainer.args.global_batch_size,
        degree=degree,
        ranks_per_node=config.ranks_per_node,
        cost=trainer.cost,
        memory=config.memory_in_evaluation(degree, max(lengths)),
    )


def evaluate_both_layouts(
    trainer: Trainer, model: GPTModel, documents: Sequence[Document], eval_groups: hcp.ProcessGroups
) -> tuple[Evaluation, Evaluation]:
    training_layout = evaluate(trainer, model, documents)
    with hcp.eval_cp_context(model, trainer.groups, eval_groups):
        eval_layout = evaluate(trainer, model, documents)
    return training_layout, eval_layout


# ---- Training ------------------------------------------------------------------------------------


class Training:
    """A run: its weights, their optimizer, and what it has done."""

    def __init__(self, trainer: Trainer, run: Run) -> None:
        """Begin from the seed's weights."""
        self.trainer, self.run = trainer, run
        self.model = build_model(trainer)
        if trainer.args.ddp:
            ddp = DistributedDataParallel(
                self.model, process_group=trainer.groups.dp_cp, gradient_as_bucket_view=True
            )
            self.wrapped: nn.Module = ddp
            self.gradients: Gradients | DDPGradients = DDPGradients(ddp)
            settle_buckets(trainer, ddp)
        else:
            self.wrapped, self.gradients = self.model, Gradients(self.model, trainer.groups)
        self.optimizer = build_optimizer(self.model, trainer.args.lr)
        self.schedule = learning_rates(trainer.args, self.optimizer)

    @property
    def name(self) -> str:
        return self.run.scheduler

    def state_dict(self) -> dict[str, Any]:
        """Return all that the rest of the run depends on. Batches follow from the seed and the
        number of steps."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "run": self.run.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.run.load_state_dict(state["run"])


def settle_buckets(trainer: Trainer, model: DistributedDataParallel) -> None:
    """Run forward and backward of one short document, whose gradients nobody uses.

    After the first backward of a process, DDP makes its buckets anew, in the order in which the
    gradients came. Where a gradient lies in a bucket decides in which order ranks are summed. So
    without this, a run that goes on from a checkpoint rounds its first step otherwise than one that
    was not stopped, on three ranks and more.
    """
    groups = trainer.groups
    document = Document(b" ", ends=True)
    samples = [sample(document, torch.device("cpu"))] if groups.rank("dp_cp") == 0 else []
    planner = StepPlanner.of(trainer.config, groups.size("dp_cp"), cost=trainer.cost)
    for cp, local in planner.step(samples, groups):
        losses = forward_step(trainer, model, cp, local)
        cp.loss(losses, local.loss_mask, grad_reduce="mean").backward()  # type: ignore[no-untyped-call]


def train(
    training: Training, corpus: Corpus, eval_groups: hcp.ProcessGroups, reporter: Reporter
) -> Generator[None]:
    """Train on the seed's batches, which no scheduler changes, from the step that comes next.

    Yields after every step: compared runs take turns, so that other work of the machine slows all
    of them alike.
    """
    trainer, run = training.trainer, training.run
    args = trainer.args
    first = len(run.steps)
    with contextlib.closing(get_batches(trainer, trainer.config, corpus.training, first)) as steps:
        for iteration in range(first, args.train_iters):
            started = time.perf_counter()
            step = next(steps)
            update = train_step(
                trainer, training.wrapped, training.gradients, training.optimizer, step
            )
            training.schedule.step()
            seconds = time.perf_counter() - started
            run.steps.append(record(trainer, iteration, step, update, seconds))
            run.first_plan = run.first_plan or step.plan
            reporter.step(run)
            last = iteration + 1 == args.train_iters
            if last or (args.eval_interval and (iteration + 1) % args.eval_interval == 0):
                run.evaluations.append(
                    evaluate_both_layouts(trainer, training.model, corpus.validation, eval_groups)
                )
                reporter.evaluation(run)
            yield


def train_all(
    trainings: Sequence[Training],
    corpus: Corpus,
    eval_groups: hcp.ProcessGroups,
    reporter: Reporter,
) -> bool:
    """Train all runs in turns, and save them where the options say. Returns whether they came to
    their end before the time was up."""
    trainer = trainings[0].trainer
    args = trainer.args
    settings = checkpoint.settings_of(args, corpus.digest)
    metrics = ""
    if args.load:
        place = Path(args.load)
        data = on_every_rank(lambda: checkpoint.read(place))
        same_on_every_rank("the checkpoints under --load", hashlib.sha256(data).hexdigest())
        metrics = on_every_rank(lambda: checkpoint.load(place, data, trainings, settings))
    writes = args.save and reporter.active
    folder = on_every_rank(lambda: checkpoint.Folder(args.save) if writes else None)
    reporter.begin(metrics, sum(len(each.run.steps) for each in trainings))

    def save() -> None:
        if folder is not None:
            folder.save(trainings, settings, reporter.metrics.read_text())

    with contextlib.ExitStack() as stack:
        turns = [
            stack.enter_context(contextlib.closing(train(each, corpus, eval_groups, reporter)))
            for each in trainings
        ]
        for _ in zip(*turns, strict=True):
            steps = len(trainings[0].run.steps)
            ended, stops = steps == args.train_iters, time_is_up(trainer)
            due = bool(args.save_interval) and steps % args.save_interval == 0
            if args.save and (ended or stops or due):
                on_every_rank(save)
            if stops and not ended:
                return False
    return True


def time_is_up(trainer: Trainer) -> bool:
    """Whether --exit-duration-in-mins have passed on any rank."""
    minutes = trainer.args.exit_duration_in_mins
    if minutes is None:
        return False
    passed = torch.tensor([float(time.monotonic() - _STARTED >= 60 * minutes)])
    return sum_over_ranks(trainer, passed.to(trainer.device)) != [0.0]


def build_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), foreach=True)


def learning_rates(
    args: argparse.Namespace, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LambdaLR:
    """Let the rate rise to --lr, and then stay there or fall along a cosine."""
    rising: int = args.lr_warmup_iters
    steps: int = args.train_iters
    falls = args.lr_decay_style == "cosine"

    def fraction(iteration: int) -> float:
        if iteration < rising:
            return (iteration + 1) / (rising + 1)
        done = (iteration - rising) / (steps - rising)
        return 0.5 * (1 + math.cos(math.pi * done)) if falls else 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, fraction)


def record(
    trainer: Trainer,
    iteration: int,
    step: hcp.Step,
    update: Update,
    seconds: float,
) -> DemoStep:
    plan, planning = step.plan, step.planning
    tokens = sum(plan.lengths)
    # Both schedulers are measured against the bound that holds when degrees are free.
    free = replace(trainer.config, sequence_packing_scheduler="dynamic_cp")
    bound = free.plan(plan.lengths, plan.ranks, trainer.cost).bound
    return DemoStep(
        iteration=iteration + 1,
        loss=update.loss,
        grad_norm=update.grad_norm,
        sequences=len(plan.lengths),
        tokens=tokens,
        loss_tokens=int(step.loss_tokens or 0),
        padding_rows=update.rows - tokens,
        micro_batches=len(step),
        work=plan.work,
        bound=bound,
        makespan=plan.makespan,
        efficiency=plan.efficiency,
        seconds=seconds,
        plan_seconds=planning.seconds if planning else 0.0,
        plan_waited=planning.waited if planning else 0.0,
    )


def build_model(trainer: Trainer, vocabulary: int = VOCABULARY_SIZE) -> GPTModel:
    torch.manual_seed(trainer.args.seed)
    model = GPTModel(trainer.args, trainer.groups, vocabulary).to(trainer.device)
    return model.double() if trainer.args.dtype == "float64" else model


def pretrain(args: argparse.Namespace) -> None:
    """Run the whole demo, on one rank of a job that a launcher started."""
    device = initialize_distributed(args)
    try:
        run_demo(args, device)
    finally:
        gc.collect()  # what still refers to a group keeps its threads alive
        dist.destroy_process_group()


def run_demo(args: argparse.Namespace, device: torch.device) -> None:
    corpus = on_every_rank(lambda: read_corpus(args))
    same_on_every_rank("the documents under --data", corpus.digest)
    reporter = on_every_rank(lambda: Reporter(args, dist.get_rank()))

    degree = args.config.static_degree(corpus.longest, args.ranks)
    groups = hcp.build_process_groups(tp=1, cp=degree, dp=args.ranks // degree, pp=1)
    bytes_per_element = {"float64": 8, "float32": 4, "bfloat16": 2}[args.dtype]
    cost = cost_model(args, device, bytes_per_element, args.config.ranks_per_node)
    eval_size, why = choose_eval_size(args, corpus, degree, cost)
    eval_groups = groups.with_context_parallel(eval_size)
    parameters = sum(p.numel() for p in GPTModel(args, groups).parameters())
    reporter.start(corpus.describe(), parameters, device, groups, eval_groups, why)

    static = replace(args.config, **static_options(args.config, degree))
    dynamic = replace(args.config, sequence_packing_scheduler="dynamic_cp")
    configs = [static, dynamic] if args.compare else [static if is_static(args.config) else dynamic]
    runs = [Run(config.sequence_packing_scheduler, ranks=args.ranks) for config in configs]
    trainings = [
        Training(Trainer(args, config, cost, groups, device), run)
        for config, run in zip(configs, runs, strict=True)
    ]
    if train_all(trainings, corpus, eval_groups, reporter):
        reporter.finish(runs)
    else:
        reporter.stopped(runs)
    eval_groups.close()
    groups.close()


def static_options(config: Config, degree: int) -> dict[str, object]:
    """Return the options for one degree for all sequences, with levels of hierarchical CP that fit
    it."""
    options: dict[str, object] = {
        "sequence_packing_scheduler": "static_cp",
        "context_parallel_size": degree,
    }
    levels = config.hierarchical_context_parallel_sizes
    if levels and not is_static(config):
        options["hierarchical_context_parallel_sizes"] = fitted_sizes(levels, degree)
    return options


def is_static(config: Config) -> bool:
    return config.sequence_packing_scheduler == "static_cp"


def choose_eval_size(
    args: argparse.Namespace, corpus: Corpus, degree: int, cost: hcp.CostModel
) -> tuple[int, str]:
    """Return the context-parallel size to evaluate with, and the reason."""
    size = args.config.eval_context_parallel_size
    if size == "auto":
        lengths = [document.length for document in evaluated(args, corpus.validation)]
        choice = choose_eval_context_parallel(
            len(lengths),
            lengths,
            ranks=args.ranks,
            train_cp=degree,
            cost=cost,
            max_tokens_per_rank=args.config.max_seqlen_per_dp_cp_rank,
            global_batch_size=args.global_batch_size,
            ranks_per_node=args.config.ranks_per_node,
            sync=args.config.sync_where(waiting=False),
            memory=args.config.memory_model,
        )
        return choice.cp, str(choice)
    # Without a wish, another than training's, where there is one: to show that it does not matter.
    return (size if isinstance(size, int) else 1 if degree > 1 else args.ranks), ""


def sum_over_ranks(trainer: Trainer, values: Tensor) -> list[float]:
    totals = values.clone()
    dist.all_reduce(totals, group=trainer.groups.dp_cp)
    numbers: list[float] = totals.tolist()
    return numbers
