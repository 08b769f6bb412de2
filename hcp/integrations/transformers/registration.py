"""When a trainer's model gets hcp's attention: at once, or where rank 0 alone has read the weights,
when FSDP2 has sharded them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.trainer_callback import TrainerCallback

from hcp.integrations.gathers import give_addresses, is_sharded, weights_come_later
from hcp.integrations.transformers.attention import ATTENTION
from hcp.integrations.transformers.probe import keep_attention


class Registration(TrainerCallback):  # type: ignore[misc]
    """Registers a model's attention once: when it is made, or else when training begins. Steps of
    one's own need it, too."""

    def __init__(self, trainer: Any, model: nn.Module, register: Callable[[], None]) -> None:
        self._accelerator, self._model = trainer.accelerator, model
        self._register: Callable[[], None] | None = register
        if self._waits():
            give_addresses(model)
            keep_attention(model, ATTENTION)  # until then, too
            trainer.add_callback(self)
        else:
            self.run()

    def run(self) -> None:
        if self._register is None:
            return
        if self._waits():
            self.expect_done()
        with self._accelerator.autocast():
            self._register()
        self._register = None

    def expect_done(self) -> None:
        if self._register is not None:
            raise ValueError(
                "fsdp_config has cpu_ram_efficient_loading and training has not begun, "
                "expected train() before evaluate() or predict(): rank 0 alone has its weights"
            )

    def on_train_begin(self, *given: Any, **others: Any) -> None:
        self.run()

    def _waits(self) -> bool:
        return weights_come_later(self._accelerator) and not is_sharded(self._model)
