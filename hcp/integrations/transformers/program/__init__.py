"""Fine-tune small Llama and Qwen models of random weights on real text, with dynamic CP.

python -m hcp.integrations.transformers --ranks 4
torchrun --nproc-per-node 4 -m hcp.integrations.transformers
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hcp
from hcp._validate import expect_size, flag
from hcp.integrations.loader import check_model_config
from hcp.planning.limits import rows_up_to
from hcp.tools.programs.arguments import (
    HelpFormatter,
    Parser,
    add_data_arguments,
    add_rank_arguments,
    add_seed,
    check_data,
    check_seed,
    number_of_ranks,
)
from hcp.tools.programs.launch import Program
from hcp.tools.programs.progress import progress
from hcp.tools.programs.ranks import initialize_distributed, on_every_rank, same_on_every_rank
from hcp.tools.programs.text_data import (
    END_OF_DOCUMENT,
    VOCABULARY_SIZE,
    Corpus,
    Document,
    read_corpus,
    sample,
)

MODELS = ("llama", "qwen3")
DESCRIPTION = """\
Fine-tune small models of random weights on real text with Transformers' Trainer, under static and
under dynamic context parallelism, and evaluate in two layouts."""
SIZES = {
    "train_iters": (8, "STEPS", "steps to train"),
    "global_batch_size": (32, "DOCUMENTS", "documents in a step, of all ranks"),
    "num_layers": (2, "LAYERS", "transformer layers"),
    "hidden_size": (64, "WIDTH", "values of a token between layers, a multiple of 16"),
}
"""Option, default, unit and meaning of each size."""


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m hcp.integrations.transformers",
        usage="%(prog)s [OPTIONS]",
        description=DESCRIPTION,
        formatter_class=HelpFormatter,
    )
    add_rank_arguments(parser)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=list(MODELS),
        help="what to train (default: all)",
    )
    for name, (size, unit, says) in SIZES.items():
        parser.add_argument(flag(name), type=int, default=size, metavar=unit, help=says)
    parser.add_argument("--lr", type=float, default=2e-3, metavar="RATE", help="learning rate")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    add_seed(parser)
    add_data_arguments(parser, max_length=2048)
    hcp.add_arguments(parser)
    return parser


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the options. Raises ValueError for options that do not go together."""
    args = build_parser().parse_args(argv)
    args.ranks = number_of_ranks(args.ranks)
    check_data(args)
    check_seed(args.seed)
    for name in ("ranks", *SIZES):
        expect_size(name, getattr(args, name))
    if args.hidden_size % 16:
        raise ValueError(f"hidden_size is {args.hidden_size}, expected a multiple of 16")
    if args.global_batch_size % args.ranks:
        raise ValueError(
            f"global_batch_size ({args.global_batch_size}) % ranks ({args.ranks}) == "
            f"{args.global_batch_size % args.ranks}, expected 0: the Trainer counts samples by rank"
        )
    if args.max_seqlen_per_dp_cp_rank is None:
        args.max_seqlen_per_dp_cp_rank = rows_up_to(args.max_length, args.ranks)
    if args.eval_context_parallel_size is None:
        args.eval_context_parallel_size = args.ranks
    args.config = hcp.Config.from_args(args)
    check_model_config(args.config)
    args.config.require_backend()
    args.config.validate(ranks=args.ranks, longest=args.max_length)
    return args


# ---- one rank ------------------------------------------------------------------------------------


class Documents:
    """Documents as a map-style dataset of token lists."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = documents

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": sample(self.documents[index], torch.device("cpu"))["tokens"]}


def build_model(kind: str, args: argparse.Namespace) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[kind](
        vocab_size=VOCABULARY_SIZE,
        hidden_size=args.hidden_size,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=args.hidden_size // 4,
        max_position_embeddings=args.max_length,
        bos_token_id=END_OF_DOCUMENT,
        eos_token_id=END_OF_DOCUMENT,
        pad_token_id=END_OF_DOCUMENT,
    )
    torch.manual_seed(args.seed)
    return AutoModelForCausalLM.from_config(config)


def finetune(
    kind: str,
    args: argparse.Namespace,
    device: torch.device,
    corpus: Corpus,
    folder: str,
    dynamic: bool,
    bar: Any,
) -> dict[str, list[float]]:
    """Train once and evaluate in both layouts."""
    import transformers

    from hcp.integrations.transformers import Trainer

    class Watch(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *positional: Any, **keywords: Any) -> None:
            bar.update()

    training = transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=args.global_batch_size // args.ranks,
        per_device_eval_batch_size=-(-args.eval_documents // args.ranks),
        max_steps=args.train_iters,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        bf16=args.bf16,
        use_cpu=device.type == "cpu",
        seed=args.seed,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        log_level="error",
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(
        build_model(kind, args),
        training,
        train_dataset=Documents(corpus.training),
        eval_dataset=Documents(corpus.validation),
        cp=args.config,
        dynamic_cp=dynamic,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(Watch())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    evaluations = [trainer.evaluate()["eval_loss"]]
    trainer.cp_eval_groups = trainer.cp_groups
    evaluations.append(trainer.evaluate()["eval_loss"])
    return {"losses": losses, "evaluations": evaluations}


def run_rank(args: argparse.Namespace) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    device = initialize_distributed(args)
    try:
        corpus = on_every_rank(lambda: read_corpus(args))
        same_on_every_rank("the documents under --data", corpus.digest)
        first, steps = dist.get_rank() == 0, 2 * len(args.models) * args.train_iters
        with (
            tempfile.TemporaryDirectory() as folder,
            progress(steps, "training", "step", shown=first) as bar,
        ):
            for kind in args.models:
                runs = [finetune(kind, args, device, corpus, folder, d, bar) for d in (False, True)]
                if first:
                    bar.write(table(kind, *runs))
                    sys.stdout.flush()
    finally:
        gc.collect()
        dist.destroy_process_group()


def table(kind: str, static: dict[str, list[float]], dynamic: dict[str, list[float]]) -> str:
    apart = max(abs(a - b) for a, b in zip(static["losses"], dynamic["losses"], strict=True))
    lines = [f"{kind:<28}{'static CP':>12}{'dynamic CP':>12}"]
    for label, of, at in (
        ("loss, first step", "losses", 0),
        ("loss, last step", "losses", -1),
        ("evaluation, eval layout", "evaluations", 0),
        ("evaluation, training layout", "evaluations", 1),
    ):
        lines.append(f"{label:<28}{static[of][at]:>12.4f}{dynamic[of][at]:>12.4f}")
    lines.append(f"{'largest difference of losses':<40}{apart:>12.1e}")
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Run as one rank if a launcher started this process; else start all ranks. Return the exit
    code."""
    name = "hcp.integrations.transformers"
    return Program(name, name, lambda: None, parse_args, run_rank).main(argv)
