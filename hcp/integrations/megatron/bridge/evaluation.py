"""Megatron-Bridge: a callback that runs evaluation and test under another layout.

pretrain(config, forward_step, callbacks=[EvalContextParallel()])
"""

from __future__ import annotations

from typing import Any

from hcp.groups.process_groups import ProcessGroups
from hcp.integrations.megatron.bridge.bridge_seams import BridgeCallback, check_batches
from hcp.rebinding.exclude import Exclude
from hcp.rebinding.rebind import Rebound, rebind


class EvalContextParallel(BridgeCallback):
    """A callback with Megatron-Bridge's event names: evaluation and test run under `eval_pgs`.

    Without groups, Bridge's own option `config.dist.eval_context_parallel_size` gives the layout,
    and the groups are made from Bridge's own as soon as it has them.

    On a time limit and on exceptions, Bridge does not send its end events. The layout is therefore
    also restored at the next event of training.
    """

    def __init__(
        self,
        train_pgs: ProcessGroups | None = None,
        eval_pgs: ProcessGroups | None = None,
        *,
        exclude: Exclude = (),
        strict: bool = False,
    ) -> None:
        if (train_pgs is None) != (eval_pgs is None):
            raise ValueError("train_pgs and eval_pgs go together: give both or neither")
        given = None if train_pgs is None or eval_pgs is None else (train_pgs, eval_pgs)
        self._given = self._pgs = given
        self._exclude, self._strict = exclude, strict
        self._rebound: Rebound | None = None
        super().__init__()

    @property
    def inside(self) -> bool:
        """Whether the model is in the eval layout."""
        return self._rebound is not None

    def set_up(self, state: Any, collection: Any) -> None:
        """Set the groups by which the validation and test loaders shard, in Bridge's state.

        `collection`: the groups of training. Every rank calls it, once for each run. Raises
        ValueError if Bridge, which rounds the number of micro-batches down, would leave out samples
        of each batch.
        """
        self._pgs = self._given or _groups_of(state, collection)
        evaluation = self._pgs[1]
        check_batches(state, evaluation.size("dp"))
        state._eval_pgs = evaluation.source or evaluation

    def on_eval_start(self, context: Any) -> None:
        self.restore()
        if self._pgs is None:
            raise ValueError(
                "the callback has no groups, expected Megatron-Bridge's pretrain or finetune to "
                "call it; in a loop of your own, call set_up(state, pg_collection) first"
            )
        self._rebound = rebind(
            context.model, *self._pgs, exclude=self._exclude, strict=self._strict
        )

    def on_eval_end(self, context: Any) -> None:
        self.restore()

    on_test_start, on_test_end = on_eval_start, on_eval_end
    on_train_step_start = on_train_end = on_checkpoint_save = on_eval_end

    def restore(self) -> None:
        """Restore the model's training layout, if it is in the other one."""
        rebound, self._rebound = self._rebound, None
        if rebound is not None:
            rebound.restore()


def _groups_of(state: Any, collection: Any) -> tuple[ProcessGroups, ProcessGroups]:
    """Return the training and eval groups that the configuration asks for. Every rank calls it."""
    size = getattr(state.cfg.dist, "eval_context_parallel_size", None)
    if size is None:
        raise ValueError(
            "config.dist.eval_context_parallel_size is None, expected the context-parallel size of "
            "evaluation, or EvalContextParallel(train_pgs, eval_pgs)"
        )
    train = ProcessGroups.from_existing(collection)
    return train, train.with_context_parallel(size)
