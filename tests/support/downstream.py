"""Stand-ins for axolotl, LLaMA-Factory and ms-swift: what their sources give to hcp's plug-ins.

Each has the names, the arguments and the order of calls of the original: how its workflow makes its
trainer, what this trainer's `__init__` takes and adds, and which methods of Transformers' `Trainer`
it overrides. Inside `installed()`, imports find them.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from transformers import Seq2SeqTrainer
from transformers import Trainer as HfTrainer

IGNORED = -100


def padded(rows: Sequence[dict[str, Any]], **others: Any) -> dict[str, Tensor]:
    """A collator: rows of one length, with labels."""
    longest = max(len(row["input_ids"]) for row in rows)

    def filled(name: str, value: int) -> Tensor:
        columns = [list(row[name]) for row in rows]
        return torch.tensor([column + [value] * (longest - len(column)) for column in columns])

    tokens = filled("input_ids", 0)
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    mask = (torch.arange(longest) < lengths[:, None]).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": filled("labels", IGNORED)}


# ---- axolotl 0.21: axolotl.integrations.base, axolotl.core ---------------------------------------


class BasePlugin:
    """Its hooks that the plug-in leaves return None."""

    def get_collator_cls_and_kwargs(self, cfg: Any, is_eval: bool = False) -> None: ...


class AxolotlTrainer(HfTrainer):  # type: ignore[misc]
    axolotl_cfg: Any = None

    def __init__(
        self,
        *positional: Any,
        bench_data_collator: Any = None,
        eval_data_collator: Any = None,
        dataset_tags: Any = None,
        **keywords: Any,
    ) -> None:
        self.eval_data_collator, self.dataset_tags = eval_data_collator, dataset_tags
        super().__init__(*positional, **keywords)
        self.train_data_collator = self.data_collator

    def compute_loss(self, model: nn.Module, inputs: Any, *others: Any, **keywords: Any) -> Any:
        return super().compute_loss(model, inputs, *others, **keywords)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        logs |= {"ppl": 2.0 ** logs["loss"]} if "loss" in logs else {}
        super().log(logs, start_time)


class Cfg(dict):  # type: ignore[type-arg]
    """axolotl's configuration: what is absent is None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


def build_in_axolotl(cfg: Cfg, plugin: Any, model: nn.Module, rows: Any, **given: Any) -> Any:
    """What `HFCausalTrainerBuilder.build` does with a plug-in."""
    options = given | {"average_tokens_across_devices": False, "max_steps": cfg.max_steps or 1}
    if plugin is not None:
        options |= plugin.get_training_args(cfg)
    options.pop("include_tkps", None)  # of its own arguments
    cls = AxolotlTrainer if plugin is None else plugin.get_trainer_cls(cfg)
    assert issubclass(cls, HfTrainer)
    trainer = cls(
        model=model,
        train_dataset=rows,
        eval_dataset=None,
        args=transformers.TrainingArguments(**options),
        data_collator=padded,
        callbacks=[],
        eval_data_collator=padded,
        bench_data_collator=padded,
        dataset_tags=["rows"],
    )
    trainer.axolotl_cfg = cfg
    return trainer


# ---- LLaMA-Factory 0.9.5: llamafactory.train -----------------------------------------------------


def dft_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Each token's loss times its probability. A constant where no token has a label."""
    targets = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].reshape(-1)
    losses = nn.functional.cross_entropy(
        outputs.get("logits").float().flatten(0, -2), targets, reduction="none"
    )[targets != IGNORED]
    if not len(losses):
        return torch.tensor(0.0)
    weighted = (losses * (-losses).exp().detach()).sum()
    return weighted / (len(losses) if num_items_in_batch is None else num_items_in_batch)


class CustomSeq2SeqTrainer(Seq2SeqTrainer):  # type: ignore[misc]
    def __init__(
        self,
        finetuning_args: Any,
        processor: Any,
        model_args: Any = None,
        gen_kwargs: Any = None,
        ref_model: Any = None,
        **keywords: Any,
    ) -> None:
        keywords["processing_class"] = keywords.pop("tokenizer")
        super().__init__(**keywords)
        self.finetuning_args = finetuning_args
        if finetuning_args.use_dft_loss:
            self.compute_loss_func = dft_loss

    def compute_loss(self, model: nn.Module, inputs: Any, *others: Any, **keywords: Any) -> Any:
        return super().compute_loss(model, inputs, *others, **keywords)

    def prediction_step(self, *positional: Any, **keywords: Any) -> Any:
        return super().prediction_step(*positional, **keywords)


class CustomTrainer(HfTrainer):  # type: ignore[misc]
    def __init__(self, finetuning_args: Any, processor: Any, **keywords: Any) -> None:
        keywords["processing_class"] = keywords.pop("tokenizer")
        super().__init__(**keywords)
        self.finetuning_args = finetuning_args


def run_in_llama_factory(
    model: nn.Module, rows: Any, given: dict[str, Any], **finetuning: Any
) -> Any:
    """What `run_sft` does: the class is found under its name in the workflow's module."""
    workflow = importlib.import_module("llamafactory.train.sft.workflow")
    plain = {"use_dft_loss": False, "use_asft_loss": False, "disable_shuffling": False}
    return vars(workflow)["CustomSeq2SeqTrainer"](
        model=model,
        args=transformers.Seq2SeqTrainingArguments(**given),
        finetuning_args=SimpleNamespace(**plain | finetuning),
        data_collator=padded,
        callbacks=[],
        gen_kwargs={},
        ref_model=None,
        train_dataset=rows,
        tokenizer=None,
        processor=None,
    )


# ---- ms-swift 4.6: swift.trainers ----------------------------------------------------------------


class SwiftSeq2SeqTrainer(Seq2SeqTrainer):  # type: ignore[misc]
    def __init__(
        self, model: nn.Module, args: Any, template: Any, train_dataset: Any, **keywords: Any
    ) -> None:
        self.template = template
        super().__init__(
            model=model,
            args=args,
            data_collator=template.data_collator,
            train_dataset=train_dataset,
            **keywords,
        )
        if template.loss_type is not None:
            self.compute_loss_func = {"dft": dft_loss}[template.loss_type]

    def compute_loss(self, model: nn.Module, inputs: Any, *others: Any, **keywords: Any) -> Any:
        return super().compute_loss(model, inputs, *others, **keywords)

    def prediction_step(self, *positional: Any, **keywords: Any) -> Any:
        return super().prediction_step(*positional, **keywords)

    def get_train_dataloader(self, skip_batches: int = 0) -> Any:
        return super().get_train_dataloader()


class TrainerFactory:
    TRAINER_MAPPING: ClassVar[dict[str, str]] = {}

    @classmethod
    def get_trainer_cls(cls, args: Any) -> Any:
        module, name = cls.TRAINER_MAPPING[args.task_type].rsplit(".", 1)
        return getattr(importlib.import_module(module), name)


def run_in_ms_swift(
    model: nn.Module,
    rows: Any,
    given: dict[str, Any],
    sequence_parallel_size: int = 1,
    loss_type: str | None = None,
) -> Any:
    """What `SwiftSft.run` does. The type of the loss is an option of its arguments, in the
    original."""
    template = SimpleNamespace(
        data_collator=lambda items: padded([row for item in items for row in listed(item)]),
        sequence_parallel_size=sequence_parallel_size,
        loss_type=loss_type,
    )
    return TrainerFactory.get_trainer_cls(SimpleNamespace(task_type="causal_lm"))(
        model=model,
        args=transformers.Seq2SeqTrainingArguments(**given),
        template=template,
        train_dataset=rows,
        eval_dataset=None,
    )


def listed(item: Any) -> list[Any]:
    """A pack of ms-swift's is a list of rows."""
    return item if isinstance(item, list) else [item]


# ---- modules -------------------------------------------------------------------------------------

MODULES: dict[str, dict[str, Any]] = {
    "axolotl": {},
    "axolotl.integrations": {},
    "axolotl.integrations.base": {"BasePlugin": BasePlugin},
    "axolotl.core": {},
    "axolotl.core.trainers": {"AxolotlTrainer": AxolotlTrainer},
    "pydantic": {"BaseModel": object},
    "llamafactory": {},
    "llamafactory.train": {},
    "llamafactory.train.sft": {},
    "llamafactory.train.sft.trainer": {"CustomSeq2SeqTrainer": CustomSeq2SeqTrainer},
    "llamafactory.train.sft.workflow": {"CustomSeq2SeqTrainer": CustomSeq2SeqTrainer},
    "llamafactory.train.pt": {},
    "llamafactory.train.pt.trainer": {"CustomTrainer": CustomTrainer},
    "llamafactory.train.pt.workflow": {"CustomTrainer": CustomTrainer},
    "swift": {},
    "swift.trainers": {"Seq2SeqTrainer": SwiftSeq2SeqTrainer},
    "swift.trainers.trainer_factory": {"TrainerFactory": TrainerFactory},
}


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Inside this context, imports of the three projects find the stand-ins, as if new."""
    TrainerFactory.TRAINER_MAPPING = {"causal_lm": "swift.trainers.Seq2SeqTrainer"}
    made = {name: ModuleType(name) for name in MODULES}
    for name, module in made.items():
        vars(module).update(MODULES[name])
    ours = "hcp.integrations.axolotl"  # derives from a stand-in
    with mock.patch.dict(sys.modules, made):
        sys.modules.pop(ours, None)
        yield
    sys.modules.pop(ours, None)
