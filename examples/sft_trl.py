"""TRL's supervised fine-tuning with dynamic CP: packing, loss on completions only, LoRA if asked.

    torchrun --nproc-per-node 2 examples/sft_trl.py             # CPU ranks, or a GPU for each rank
    torchrun --nproc-per-node 2 examples/sft_trl.py --lora      # adapters of PEFT
    python examples/sft_trl.py                                  # one rank

Needs `pip install -e '.[trl]'`. hcp's trainer is
`class SFTTrainer(hcp.integrations.transformers.Trainer, trl.SFTTrainer)`: TRL prepares the dataset,
hcp plans and trains, and every argument of TRL's is there. What a script of TRL's changes is the
import and `cp=`, in `train`. The losses are the same on any number of ranks.
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import transformers
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import SFTConfig

import hcp
from hcp.integrations.trl import SFTTrainer

WORLD = int(os.environ.get("WORLD_SIZE", 1))
ON_GPUS = torch.cuda.is_available()


def train(lora: bool, folder: str, steps: int = 6) -> list[float]:
    """Train as one rank of the job. Return the loss of each step."""
    args = SFTConfig(
        output_dir=folder,
        max_steps=steps,
        max_length=256,
        packing=True,  # rows of TRL's are taken apart: no document sees another
        completion_only_loss=True,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        disable_tqdm=True,
        bf16=ON_GPUS,
        use_cpu=not ON_GPUS,
        report_to=[],
        save_strategy="no",
    )
    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"]) if lora else None
    trainer = SFTTrainer(
        toy_model(),
        args,
        train_dataset=Dataset.from_list(conversations()),
        processing_class=toy_tokenizer(),
        peft_config=adapters,
        global_batch_size=4,
        # Tokens that a rank holds at once. A longer document is spread over several ranks.
        cp=hcp.Config(max_seqlen_per_dp_cp_rank=2 + 256 // WORLD),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# ---- in place of from_pretrained and of your data ------------------------------------------------


def toy_model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def toy_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token for each word."""
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def conversations() -> list[dict[str, str]]:
    """Prompts of many lengths, each followed by the words that come next."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for _ in range(64):
        length = 4 + int(240 * torch.rand((), generator=draw) ** 4)
        words = [f"w{i % 61}" for i in range(length)]
        cut = length // 2
        made.append({"prompt": " ".join(words[:cut]), "completion": " " + " ".join(words[cut:])})
    return made


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        train("--lora" in sys.argv[1:], folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
