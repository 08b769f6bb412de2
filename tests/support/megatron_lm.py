"""Run a script of Megatron-LM's on this rank: `python -m support.megatron_lm HOW SCRIPT FLAGS`.

HOW is "launch" (by hcp's launcher), "dev" (so too, with what branch dev has more) or "alone"
(Megatron-LM's own code, on the CPU).
"""

from __future__ import annotations

import re
import runpy
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

from support import tensorboard_writer
from support.megatron_lm_dev import stand_in
from support.older_python import complete_typing
from support.ranks import run_module

SCRIPT = str(Path(__file__).with_name("megatron_lm_script.py"))

FLAGS = (
    *("--num-layers", "2", "--hidden-size", "32", "--ffn-hidden-size", "48"),
    *("--num-attention-heads", "4", "--group-query-attention", "--num-query-groups", "2"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--swiglu"),
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--disable-bias-linear"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--no-rope-fusion"),
    *("--untie-embeddings-and-output-weights", "--calculate-per-token-loss"),
    *("--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", "4"),
    *("--lr", "1e-2", "--lr-decay-style", "constant", "--log-interval", "1"),
    *("--eval-iters", "2", "--eval-interval", "2", "--num-workers", "0", "--seed", "5"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "95", "--mock-data"),
    *("--make-vocab-size-divisible-by", "2", "--distributed-backend", "gloo"),
    *("--transformer-impl", "local", "--use-cpu-initialization", "--inference-rng-tracker"),
    *("--no-gradient-accumulation-fusion", "--no-persist-layer-norm", "--no-load-rng"),
    *("--no-masked-softmax-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion"),
    *("--no-create-attention-mask-in-dataloader", "--ckpt-format", "torch"),
)


@dataclass(frozen=True)
class Trained:
    losses: dict[int, float]
    """Of each iteration."""
    evaluations: list[float]
    """Of the validation sets, as often as they were evaluated, and last of the test set."""
    others: dict[str, list[float]]
    """Further losses of each iteration, by their names in the log."""
    metrics: dict[int, dict[str, float]]
    """What hcp wrote to TensorBoard of each iteration."""


OTHERS = ("mtp_1 loss", "mtp_2 loss", "z_loss")


def run(how: str, ranks: int, *flags: str, folder: Path, script: str = SCRIPT) -> Trained:
    done = run_module(
        "support.megatron_lm", how, script, *FLAGS, *flags, folder=folder, ranks=ranks
    )
    assert done.code == 0, done.err[-4000:]
    steps = re.findall(r"iteration +(\d+)/.*?lm loss: ([\d.E+-]+)", done.out)
    evaluated = re.findall(r"validation\S* loss at .*?value: ([\d.E+-]+)", done.out)
    others = {
        name: list(map(float, re.findall(rf"\| {name}: ([\d.E+-]+)", done.out))) for name in OTHERS
    }
    losses = {int(i): float(loss) for i, loss in steps}
    return Trained(
        losses, list(map(float, evaluated)), others, tensorboard_writer.scalars(done.out)
    )


def main() -> None:
    warnings.simplefilter("ignore")
    complete_typing()
    tensorboard_writer.take_place()
    how, script, *flags = sys.argv[1:]
    if how != "alone":
        from hcp.integrations.megatron.launch import main as launch

        if how == "dev":
            stand_in()
        launch([script, *flags])
        return
    from hcp.integrations.megatron.lm.on_cpu import megatron_lm_on_cpu

    sys.argv = [script, *flags]
    sys.path.insert(0, str(Path(script).resolve().parent))
    with megatron_lm_on_cpu():
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
