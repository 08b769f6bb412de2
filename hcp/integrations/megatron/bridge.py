"""Megatron-Bridge: a callback that runs evaluation and test under another layout.

    pretrain(config, forward_step, callbacks=[EvalContextParallel()])

The callback reads attributes of Bridge's objects and imports nothing of Bridge.
"""

from __future__ import annotations

from typing import Any

from hcp.groups.process_groups import ProcessGroups
from hcp.rebinding.exclude import Exclude
from hcp.rebinding.rebind import Rebound, rebind


class EvalContextParallel:
    """A callback with Megatron-Bridge's event names: evaluation and test run under `eval_pgs`.

    Without groups, Bridge's own option `config.dist.eval_context_parallel_size` gives the layout,
    and the groups are made from the model's just before the loaders are built.

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
        self._pgs = None if train_pgs is None or eval_pgs is None else (train_pgs, eval_pgs)
        self._exclude, self._strict = exclude, strict
        self._rebound: Rebound | None = None

    @property
    def inside(self) -> bool:
        """Whether the model is in the eval layout."""
        return self._rebound is not None

    def on_data_init_start(self, context: Any) -> None:
        """Set the data-parallel group by which the validation and test loaders shard.

        Raises ValueError if Bridge, which rounds the number of micro-batches down, would leave out
        samples of each batch.
        """
        if self._pgs is None:
            self._pgs = _groups_of(context)
        evaluation = self._pgs[1]
        _check_batches(context, evaluation)
        context.state._eval_pgs = evaluation.source or evaluation

    def on_eval_start(self, context: Any) -> None:
        self.restore()
        if self._pgs is None:
            raise ValueError(
                "the callback has no groups, expected on_data_init_start before an evaluation, or "
                "EvalContextParallel(train_pgs, eval_pgs)"
            )
        self._rebound = rebind(
            context.model, *self._pgs, exclude=self._exclude, strict=self._strict
        )

    def on_eval_end(self, context: Any) -> None:
        self.restore()

    on_test_start, on_test_end = on_eval_start, on_eval_end
    on_train_step_start = on_train_end = on_checkpoint_save = on_eval_end

    def on_train_start(self, context: Any) -> None:
        """Do nothing, as for the events of single steps."""

    on_train_step_end = on_eval_step_start = on_eval_step_end = on_train_start
    on_test_step_start = on_test_step_end = on_train_start

    def restore(self) -> None:
        """Restore the model's training layout, if it is in the other one."""
        rebound, self._rebound = self._rebound, None
        if rebound is not None:
            rebound.restore()


def _groups_of(context: Any) -> tuple[ProcessGroups, ProcessGroups]:
    """Return the training and eval groups that the configuration asks for. Every rank calls it."""
    size = getattr(context.state.cfg.dist, "eval_context_parallel_size", None)
    if size is None:
        raise ValueError(
            "config.dist.eval_context_parallel_size is None, expected the context-parallel size of "
            "evaluation, or EvalContextParallel(train_pgs, eval_pgs)"
        )
    chunk = context.model[0] if isinstance(context.model, (list, tuple)) else context.model
    while getattr(chunk, "pg_collection", None) is None and hasattr(chunk, "module"):
        chunk = chunk.module
    collection = getattr(chunk, "pg_collection", None)
    if collection is None:
        raise ValueError(
            f"the model ({type(chunk).__name__}) has no pg_collection, expected the groups that it "
            "was built with: set config.dist.use_decentralized_pg, or give the groups"
        )
    train = ProcessGroups.from_existing(collection)
    return train, train.with_context_parallel(size)


def _check_batches(context: Any, evaluation: ProcessGroups) -> None:
    """Check that batches divide, as Bridge does for its own option but not for given groups."""
    validation = getattr(getattr(context.state, "cfg", None), "validation", None)
    batch = getattr(validation, "eval_global_batch_size", None)
    micro_batch = getattr(validation, "eval_micro_batch_size", None)
    if batch is None or micro_batch is None:
        return
    ranks = evaluation.size("dp")
    if rest := batch % (micro_batch * ranks):
        raise ValueError(
            f"eval_global_batch_size ({batch}) % (eval_micro_batch_size ({micro_batch}) x "
            f"data-parallel ranks of evaluation ({ranks})) == {rest}, expected 0: Bridge would "
            "leave samples out of every batch"
        )
