"""Fine-tune a pretrained model of Transformers on real text, with a CP degree for each document.

    torchrun --nproc-per-node 2 examples/sft_text.py            # SmolLM2-135M; 2 CPU ranks or GPUs
    torchrun --nproc-per-node 2 examples/sft_text.py --model Qwen/Qwen3-0.6B --text FOLDER
    torchrun --nproc-per-node 2 examples/sft_text.py --model from-config --lr 2e-3   # no network
    python examples/sft_text.py                                 # one rank

The losses are the same on any number of ranks. Needs `pip install -e '.[transformers]'`.

A document is a file (.py, .txt, .md, .rst) under --text, by default the sources of Python's own
standard library, which every machine has. Each is read once, up to --max-length tokens. --model is
a name on the hub, a folder, or `from-config`: a small Qwen 3 with random weights and a tokenizer
trained on the same text. `from_pretrained` loads what is saved under --save.

Each step prints "x 1.20 over packed static CP 2 (simulated)": by the cost model, packed static CP
takes 1.20 times as long for these documents. It gives all of them one degree and packs them by
next-fit. --cost FILE, written by `hcp calibrate`, is the cost model of your machine and model. The
default, hcp.CostModel(), is for GPUs, whatever runs here.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sysconfig
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import hcp
from hcp.cli.simulate import packed
from hcp.integrations.transformers import (
    DynamicCPDataLoader,
    EvalDataLoader,
    causal_lm_loss,
    causal_lm_losses,
    register_hcp_attention,
)

Document = dict[str, list[int]]
SUFFIXES = {".py", ".txt", ".md", ".rst"}
END = "<|endoftext|>"
FROM_CONFIG = "from-config"


# ---- text and model ------------------------------------------------------------------------------


def files(args: argparse.Namespace) -> list[Path]:
    """The files of the run in a drawn order: those held out, then those to train on."""
    folder = Path(args.text)
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix in SUFFIXES
        and path.stat().st_size > 1
        and "site-packages" not in path.relative_to(folder).parts
    )
    needed = args.held_out + args.steps * args.documents
    if len(found) < needed:
        raise SystemExit(
            f"--text {folder} has {len(found)} files of {', '.join(sorted(SUFFIXES))}, expected "
            f"{needed} = held-out ({args.held_out}) + steps ({args.steps}) * documents "
            f"({args.documents}): give another folder, or fewer steps"
        )
    return random.Random(args.seed).sample(found, needed)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def read(paths: Sequence[Path], tokenizer: Any, longest: int) -> list[Document]:
    texts = [text_of(path) for path in paths]
    tokens = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return [{"input_ids": [*each, tokenizer.eos_token_id][:longest]} for each in tokens]


def load(name: str) -> tuple[Any, Any]:
    """The tokenizer and the model, of the hub or of a folder."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.get_default_dtype())
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"NOTHING WAS TRAINED: --model {name} is not a folder with a model, and the hub does "
            "not give it (is there a network?). Expected a name on the hub, a folder, or "
            f"`--model {FROM_CONFIG}`: random weights, no network.\nTransformers says: {error}"
        ) from error
    return tokenizer, model


def make_model(paths: Sequence[Path], folder: Path) -> None:
    """Save a small Qwen 3 with random weights, and a tokenizer trained on these files."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, special_tokens=[END], initial_alphabet=letters, show_progress=False
    )
    bpe.train_from_iterator((text_of(path) for path in paths), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    tokenizer.save_pretrained(folder)
    Qwen3ForCausalLM(config).save_pretrained(folder)


# ---- a step and an evaluation --------------------------------------------------------------------


def autocast(groups: hcp.ProcessGroups) -> torch.autocast:
    """Weights are float32. GPUs compute in bfloat16."""
    device = groups.transport.device.type
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def train_step(
    model: Any, optimizer: torch.optim.Optimizer, step: hcp.Step, groups: hcp.ProcessGroups
) -> float:
    """Train on a global batch, planned and dispatched. Return its mean loss over all tokens."""
    total = torch.zeros((), device=groups.transport.device)
    for cp, local in step:
        with autocast(groups):
            loss = causal_lm_loss(model, cp, local, grad_reduce="sum")
        loss.backward()
        total += loss.detach()
    for tensor in (*(p.grad for p in model.parameters()), total):
        dist.all_reduce(tensor, group=groups.dp_cp)  # sums, once in a step
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(total)


@torch.no_grad()
def perplexity(model: Any, loader: EvalDataLoader) -> float:
    """Return exp of the mean loss over the tokens of all documents, each computed once."""
    model.eval()
    metrics = hcp.Metrics(loader.groups)
    for cp, local in loader:
        with autocast(loader.groups):
            losses = causal_lm_losses(model, cp, local)
        metrics.add_sum("loss", *cp.loss_sum(losses, local.loss_mask))
    model.train()
    return math.exp(metrics.reduce()["loss"].mean)


# ---- what a step prints --------------------------------------------------------------------------


def over_packed_static(plan: hcp.Plan, degree: int) -> float:
    """Simulated: the time of packed static CP over that of the plan."""
    limits = {**plan.to_dict(), "memory": None, "speeds": None}
    return packed(plan.lengths, degree, limits, plan.cost).makespan / plan.makespan


def degrees_of(plan: hcp.Plan) -> str:
    """Say how many documents have which degree, such as "5 at CP 1, 3 at CP 2"."""
    groups = [group for batch in plan.micro_batches for group in batch]
    found = Counter(group.degree for group in groups for _ in group.sequences)
    return ", ".join(f"{count} at CP {degree}" for degree, count in sorted(found.items()))


def in_words(plan: hcp.Plan, static: int, seconds: float) -> str:
    return (
        f"{sum(plan.lengths) / seconds:7,.0f} tokens/s | "
        f"{min(plan.lengths):,} to {max(plan.lengths):,} tokens | {degrees_of(plan)} | "
        f"x {over_packed_static(plan, static):.2f} over packed static CP {static} (simulated)"
    )


# ---- the run -------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Train as one rank of the job. Return the losses, and the perplexities before and after."""
    groups = hcp.build_process_groups()
    rank, ranks = groups.rank("dp_cp"), groups.size("dp_cp")
    say = print if rank == 0 else lambda *words, **options: None
    paths, name = files(args), args.model
    if name == FROM_CONFIG:
        name = Path(args.save) / "random-weights"
        if rank == 0:
            make_model(paths[args.held_out :], name)
        dist.barrier()
    tokenizer, model = load(str(name))
    model.to(groups.transport.device)
    with autocast(groups):
        register_hcp_attention(model)
    documents = read(paths, tokenizer, args.max_length)
    # For a model of your own it is what fits in memory. A longer document is spread over several.
    most = args.max_seqlen_per_dp_cp_rank or 2 + args.max_length // min(ranks, 2)
    config = hcp.Config(max_seqlen_per_dp_cp_rank=most)
    static = config.static_degree(max(len(each["input_ids"]) for each in documents), ranks)
    options: dict[str, Any] = {
        "global_batch_size": args.documents,
        "cost": hcp.CostModel.load(args.cost) if args.cost else None,
    }
    held_out = EvalDataLoader(documents[: args.held_out], config, groups, **options)
    batches = DynamicCPDataLoader(documents[args.held_out :], config, groups, **options)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)

    losses, perplexities = [], [perplexity(model, held_out)]
    say(f"{args.model} on {ranks} ranks, perplexity of held-out text {perplexities[0]:.3f}")
    began = time.perf_counter()
    for number, step in enumerate(batches):
        losses.append(train_step(model, optimizer, step, groups))
        took, began = time.perf_counter() - began, time.perf_counter()
        words = in_words(step.plan, static, took)
        say(f"step {number:3}  loss {losses[-1]:.6f} | {words}", flush=True)
    perplexities.append(perplexity(model, held_out))
    if rank == 0:
        model.save_pretrained(args.save)
        tokenizer.save_pretrained(args.save)
    say(f"perplexity of held-out text {perplexities[1]:.3f}; the model is in {args.save}")
    return losses, perplexities


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a model on real text, with dynamic CP")
    add = parser.add_argument
    add("--model", default="HuggingFaceTB/SmolLM2-135M", help=f"hub name, folder or {FROM_CONFIG}")
    add("--text", default=sysconfig.get_path("stdlib"), help="folder; a document is a file")
    add("--steps", type=int, default=20)
    add("--documents", type=int, default=8, help="of a step, over all ranks")
    add("--held-out", type=int, default=16, help="documents of the evaluation")
    add("--max-length", type=int, default=4096, help="tokens of a document; the rest is cut")
    add(
        "--max-seqlen-per-dp-cp-rank",
        type=int,
        help="what fits in memory (default: half of --max-length; one rank: all)",
    )
    add("--lr", type=float, default=5e-5, help="more for random weights, such as 2e-3")
    add("--cost", help="cost model, a file of `hcp calibrate`")
    add("--save", default="runs/sft_text", help="folder of the trained model")
    add("--seed", type=int, default=0, help="which files, and their order")
    return parser.parse_args(argv)


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ:  # under torchrun; without it hcp makes a job of one rank
        dist.init_process_group("nccl" if on_gpus else "gloo")
    train(parse_args())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
