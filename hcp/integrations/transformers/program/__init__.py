"""Fine-tune small Llama and Qwen models of random weights on real text, with dynamic CP.

python -m hcp.integrations.transformers --ranks 4
torchrun --nproc-per-node 4 -m hcp.integrations.transformers
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hcp
from hcp.config import expect_size, rows_up_to
from hcp.demo import start_ranks
from hcp.demo.data import END_OF_DOCUMENT, VOCABULARY_SIZE, Corpus, Document, load_corpus, sample

MODELS = ("llama", "qwen3")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hcp.integrations.transformers",
        description="Fine-tune small models of random weights on real text with Transformers' "
        "Trainer, under static and under dynamic context parallelism, and evaluate in two layouts.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="ranks to start on this machine")
    add("--device", choices=("auto", "cpu"), default="auto", help="auto: GPUs if each rank has one")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), help="what to train")
    add("--data", metavar="PATH", help="text; default: the sources of Python's standard library")
    add("--max-length", type=int, default=2048, help="tokens; longer documents are split")
    add("--eval-documents", type=int, default=37, help="documents held out for evaluation")
    add("--train-iters", type=int, default=8, help="steps")
    add("--global-batch-size", type=int, default=32, help="documents in a step, of all ranks")
    add("--lr", type=float, default=2e-3, help="learning rate")
    add("--num-layers", type=int, default=2, help="layers")
    add("--hidden-size", type=int, default=64, help="width, a multiple of 16")
    add("--bf16", action="store_true", help="autocast to bfloat16")
    add("--seed", type=int, default=1234, help="of weights and of the order of documents")
    hcp.add_arguments(parser)
    return parser


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    args = build_parser().parse_args(argv)
    args.ranks = int(os.environ.get("WORLD_SIZE", args.ranks))
    for name in ("ranks", "train_iters", "global_batch_size", "num_layers", "hidden_size"):
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
    kind: str, args: argparse.Namespace, corpus: Corpus, folder: str, *, dynamic: bool
) -> dict[str, list[float]]:
    """Train once and evaluate in both layouts."""
    import transformers

    from hcp.integrations.transformers import Trainer

    training = transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=args.global_batch_size // args.ranks,
        per_device_eval_batch_size=-(-args.eval_documents // args.ranks),
        max_steps=args.train_iters,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        bf16=args.bf16,
        use_cpu=not on_gpus(args),
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
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    evaluations = [trainer.evaluate()["eval_loss"]]
    trainer.cp_eval_groups = trainer.cp_groups
    evaluations.append(trainer.evaluate()["eval_loss"])
    return {"losses": losses, "evaluations": evaluations}


def on_gpus(args: argparse.Namespace) -> bool:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", args.ranks))
    return args.device == "auto" and torch.cuda.device_count() >= local


def run_rank(args: argparse.Namespace) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    if on_gpus(args):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpus(args) else "gloo")
    try:
        corpus = load_corpus(
            args.data,
            max_length=args.max_length,
            eval_documents=args.eval_documents,
            seed=args.seed,
        )
        with tempfile.TemporaryDirectory() as folder:
            for kind in args.models:
                runs = [finetune(kind, args, corpus, folder, dynamic=d) for d in (False, True)]
                if dist.get_rank() == 0:
                    print(table(kind, *runs), flush=True)
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


def main(argv: Sequence[str]) -> int:
    try:
        args = parse_args(argv)
    except ValueError as error:
        print(f"hcp.integrations.transformers: error: {error}", file=sys.stderr)
        return 2
    if "RANK" not in os.environ:
        return start_ranks(args.ranks, ["-m", "hcp.integrations.transformers", *argv])
    run_rank(args)
    return 0
