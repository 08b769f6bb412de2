"""torchtitan's validator under the eval layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.validate import Validator

import hcp
from hcp.integrations.loader import eval_groups, eval_layout
from hcp.integrations.torchtitan.batches import collator_of, documents_of, model_inputs
from hcp.step.ahead import ReadItems


class ContextParallelValidator(Validator):
    """torchtitan's validator under the eval layout: every document has the CP degree
    `context_parallel.eval_context_parallel_size`, by default that of training (1 if dynamic).

    Loaders shard as in training, so every layout evaluates the same documents, each once.
    `steps=-1` ends when the loaders of all ranks have ended; none waits for a shorter one.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        pass

    def use(
        self, groups: hcp.ProcessGroups, config: hcp.Config, cost: hcp.CostModel, alignment: int
    ) -> None:
        """Take the training layout, the planner's options and prices, and of what every rank's rows
        are a multiple. The trainer calls it."""
        self.cost = cost
        self.train_groups, self.eval_groups = groups, eval_groups(groups, config)
        degree, self.alignment = self.eval_groups.size("cp"), alignment
        self.planner = config.for_evaluation(degree, self.seq_len, alignment)

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Compute the mean loss of the validation set, and log it by torchtitan."""
        (model,) = model_parts
        model.eval()
        with eval_layout(model, self.train_groups, self.eval_groups) as groups:
            loss = self.mean_loss(model, groups)
        model.train()
        self.metrics_processor.log_validation(loss=loss, step=step)

    def mean_loss(self, model: nn.Module, groups: hcp.ProcessGroups) -> float:
        """Return the mean loss of the validation set under the layout of `groups`."""
        metrics, loaded = hcp.Metrics(groups), 0
        collator = collator_of(self.planner, groups, cost=self.cost, alignment=self.alignment)
        shares = (ReadItems(collator.samples_of(read)) for read in self._documents())
        for step in collator.planner.steps(shares, groups, until_empty=True):
            loaded += sum(step.plan.lengths)
            for cp, local in step:
                tokens, labels, extra = model_inputs(cp, local)
                with self.validation_context():
                    loss, _ = self.loss_fn(model(tokens, **extra), labels)
                metrics.add_sum("loss", loss, (labels != IGNORE_INDEX).sum())
                metrics.add_sum("tokens", cp.rows - cp.layout.padding, 0)
        totals = metrics.reduce()
        if not loaded:
            raise hcp.HcpError(
                "the validation loaders gave no document, expected some", code="no-data"
            )
        if totals["tokens"].total != loaded:
            raise hcp.HcpError(
                f"validation computed {totals['tokens'].total:.0f} tokens, expected the {loaded} "
                "that were loaded",
                code="samples-missed",
            )
        return totals["loss"].mean

    def _documents(self) -> Iterator[Iterable[dict[str, Tensor]]]:
        """Yield the documents of this rank's batches, then none after the end of its loader."""
        loader = self.dl_config.build(
            dp_world_size=self.dp_world_size,
            dp_rank=self.dp_rank,
            tokenizer=self.tokenizer,
            seq_len=self.seq_len,
            local_batch_size=self.local_batch_size,
        )
        batches = iter(loader)
        for _ in itertools.count() if self.config.steps == -1 else range(self.config.steps):
            batch = next(batches, None)
            if batch is not None:
                self.metrics_processor.ntokens_since_last_log += batch[1].numel()
            yield () if batch is None else documents_of(*batch)
