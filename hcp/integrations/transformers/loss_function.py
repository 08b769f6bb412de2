"""A loss function of a user's own, `compute_loss_func` of Transformers, on the rows of a rank.

T rows of this rank, or the one that stands in for none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hcp._words import GradReduce
from hcp.integrations.columns import IGNORED
from hcp.integrations.loader import ToSample, samples_of
from hcp.step.dispatch import LocalBatch
from hcp.step.handler import ContextParallelHandler


class LossFunction:
    """A function `(outputs, labels, num_items_in_batch) -> loss` that adds up what each row gives
    and divides the sum by `num_items_in_batch`.

    It is given rows such that the usual shift pairs each with its own target: `outputs.logits` is
    (1, T + 1, vocabulary) with a row of zeros at the end, and `labels` is (1, T + 1), -100 and then
    the targets, which are -100 where a row has no loss. So `logits[:, :-1]` go with
    `labels[:, 1:]`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._checked = False

    def share(
        self,
        cp: ContextParallelHandler,
        local: LocalBatch,
        outputs: Any,
        grad_reduce: GradReduce | None,
    ) -> Tensor:
        """Return this micro-batch's share of the loss of the whole batch, to call `backward` on.
        `grad_reduce`: as for `cp.loss`."""
        # A batch without loss tokens has loss 0.
        loss = self(cp, local, outputs, max(1, round(cp.loss_tokens or 0)))
        return loss * cp.plan.ranks if grad_reduce == "mean" else loss

    def __call__(
        self, cp: ContextParallelHandler, local: LocalBatch, outputs: Any, items: int
    ) -> Tensor:
        """Return the function's loss of this rank's rows, a scalar. `outputs`: of the model, whose
        logits change. `items`: what the sum is divided by.

        Raises ValueError for a function whose loss would depend on the plan. This is found out by
        six more calls, in the first micro-batch in which this rank has a loss."""
        targets = local.labels.masked_fill(local.loss_mask == 0, IGNORED)
        labels = F.pad(cp.at_least_one_row(targets, IGNORED), (1, 0), value=IGNORED)[None]
        outputs.logits = F.pad(outputs.logits, (0, 0, 0, 1))
        spare = outputs.logits[0, -1, 0]
        count = torch.tensor(items, device=labels.device)
        loss = self._scalar(self.function(outputs, labels.clone(), num_items_in_batch=count))
        if not self._checked and cp.rows:
            self._checked = self._check(outputs, labels, count, loss)
        if torch.is_grad_enabled() and not loss.requires_grad:
            if bool((labels != IGNORED).any()) and bool(loss != 0):
                raise ValueError(
                    "compute_loss_func returns a loss without a gradient, expected one that is "
                    "computed of outputs.logits: do not detach it"
                )
            # Functions return a constant where no row has a label. The other ranks reduce
            # gradients, so that this one has to go through the model, too. The spare row is 0.
            loss = loss + spare
        return loss

    def _check(self, outputs: Any, labels: Tensor, count: Tensor, loss: Tensor) -> bool:
        """Whether this micro-batch shows that the loss is a sum over rows, divided by the count.
        It does not if it has no loss. Raises ValueError if it shows that the loss is another."""
        whole = float(loss.detach())
        has_label = labels != IGNORED
        if not bool(has_label.any()) or not 0 < abs(whole) < float("inf"):
            return False
        odd = has_label & (has_label.cumsum(-1) % 2 == 1)
        again = partial(self._again, outputs)
        parts = [again(labels.where(some, IGNORED), count) for some in (odd, has_label & ~odd)]
        twice = again(labels, 2 * count)
        one = labels.where(has_label & (has_label.cumsum(-1) == 1), IGNORED)
        begun = one.clone()
        begun[0, 0] = one.max()  # which the usual shift leaves out
        alone, unshifted = again(one, count), again(begun, count)
        moved = self._of_rows(outputs, labels, odd, count)
        near = (1e-4 if torch.finfo(loss.dtype).bits >= 32 else 2e-2) * max(
            abs(whole), *map(abs, parts)
        )
        n = int(count)
        if not abs(2 * twice - whole) <= near:
            raise ValueError(
                f"compute_loss_func gives {whole:g} with num_items_in_batch={n} and {twice:g} with "
                f"{2 * n}, expected {whole / 2:g}: {_INSTEAD}"
            )
        if not abs(unshifted - alone) <= 1e-2 * abs(alone):
            raise ValueError(
                f"compute_loss_func gives {alone:g} for one label and {unshifted:g} if "
                "labels[0, 0] is one, too, expected the same: pair outputs.logits[:, :-1] with "
                "labels[:, 1:], as for Transformers. Rows would learn the tokens they are given"
            )
        if not abs(sum(parts) - whole) <= near:
            raise ValueError(
                f"compute_loss_func gives {whole:g} for labels of this rank, and {parts[0]:g} and "
                f"{parts[1]:g} for two parts of them, the others being {IGNORED}, expected parts "
                f"that add up to it: {_INSTEAD}"
            )
        if not abs(moved - parts[0]) <= near:
            raise ValueError(
                f"compute_loss_func gives {parts[0]:g} for some labels of this rank, and "
                f"{moved:g} for their rows alone in the reverse order, expected the same: "
                f"{_INSTEAD}"
            )
        return True

    def _of_rows(self, outputs: Any, labels: Tensor, some: Tensor, count: Tensor) -> float:
        """The loss of the rows with some of the labels, in the reverse order, before a row without
        one."""
        places = some[0].nonzero()[:, 0].flip(0)
        whole, spare = outputs.logits, outputs.logits[:, -1:]
        outputs.logits = torch.cat([whole[:, places - 1], spare, spare], 1)
        try:
            picked = F.pad(labels[:, places], (1, 1), value=IGNORED)
            return self._again(outputs, picked, count)
        finally:
            outputs.logits = whole

    @torch.no_grad()
    def _again(self, outputs: Any, labels: Tensor, count: Tensor) -> float:
        return float(self._scalar(self.function(outputs, labels.clone(), num_items_in_batch=count)))

    def _scalar(self, loss: Any) -> Tensor:
        if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
            return loss.reshape(())
        found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"compute_loss_func returns {found}, expected a tensor of one floating-point number"
        )


_INSTEAD = (
    "a rank has a part of the batch's rows, so the loss would depend on the plan. Add up what each "
    f"row with a label (not {IGNORED}) gives by itself, and divide the sum by num_items_in_batch, "
    "the loss tokens of the whole batch"
)


def check_whole_logits(linear_cross_entropy: bool) -> None:
    """Raise ValueError if a loss function would get no logits."""
    if linear_cross_entropy:
        raise ValueError(
            "linear_cross_entropy is True with compute_loss_func, expected False: a loss function "
            "is given the logits of all rows, which linear_cross_entropy does not make"
        )


def unweighted(to_sample: ToSample) -> ToSample:
    """Return a `to_sample` that refuses weights of losses other than 0 and 1."""
    return partial(_unweighted, to_sample)


def _unweighted(to_sample: ToSample, item: Any) -> list[Any]:
    samples = samples_of(to_sample, item)
    for sample in samples:
        weights = torch.as_tensor(sample["loss_mask"])
        others = weights[(weights != 0) & (weights != 1)]
        if len(others):
            raise ValueError(
                f"loss_mask has {others[0].item():g} with compute_loss_func, expected 0 or 1: the "
                "function sees which rows have a loss, not their weights"
            )
    return samples
