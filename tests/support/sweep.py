"""Build every causal architecture of the installed Transformers at toy size, and compare it under
hcp with itself: equal, or refused before training.

python -m support.sweep                    # all of them: what is wrong is printed, with exit code 1
python -m support.sweep llama roberta      # some
python -m support.sweep --write            # also writes the table of docs/guides/transformers.md
python -m support.sweep --check            # also fails where that table says something else
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hcp
from hcp._words import ScanType
from support import architectures
from support.finetuning import documents

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "transformers.md"
BEGIN = "<!-- Written by make sweep-transformers: begin -->"
END = "<!-- Written by make sweep-transformers: end -->"

LENGTHS = (21, 5, 12)
TOLERANCE = 3e-5
"""Of float32 logits and gradients, relative to the largest."""

REASONS = {
    "layers with a state": "have layers with a state that scans the sequence",
    "through AttentionInterface": "do not call attention through `AttentionInterface`",
    r"layer_types has \[": "have linear, sparse or convolution layers",
    "asks for (block_)?indices|asks for position_bias": "have sparse attention or position biases",
    "hand its keyword arguments on": "do not hand `cp=` on to their layers",
    "of its attention mask|mask of its own": "make or read a mask of their own",
    "rope_type": "have a rotary embedding that depends on the batch",
    "is not causal": "have attention that is not causal",
    "": "differ from themselves in the comparison before training",
}
"""What the table says of a refusal, by a pattern of its message. The first one counts."""

FUSED = "equal, rotated in hcp's attention"
KERNEL = "equal, rotated by hcp's kernel before it"
EQUAL = "equal, rotated by their own code or without rotation"
OF = {"attention": FUSED, "kernel": KERNEL, "model": EQUAL}
"""The row of a model that is equal, by what rotates."""
NO_TOY = "no toy"


@dataclass(frozen=True)
class Verdict:
    """What came of a model."""

    result: str
    """The row of the table, or what is wrong."""

    wrong: bool = False

    message: str = ""
    """Of a refusal."""


def verdict(model: Any) -> Verdict:
    """Compare a model under hcp, at degrees 1 and 2, with itself."""
    from hcp.integrations.transformers import masks_of, register_hcp_attention
    from hcp.integrations.transformers.transformers_rotary import rotator_of

    dataset, unfused = documents(LENGTHS), copy.deepcopy(model)
    with torch.no_grad():
        logits = [model(d["input_ids"][None], use_cache=False).logits[0] for d in dataset]
    try:
        register_hcp_attention(model)
    except ValueError as error:
        return Verdict(refusal_of(str(error)), message=str(error))
    rotator = rotator_of(model)
    register_hcp_attention(unfused, fused_rope=False)
    for ranks in (1, 2):
        masks = masks_of(model, LENGTHS)
        plan = hcp.plan(LENGTHS, ranks=ranks, max_tokens_per_rank=40, min_degree=ranks, masks=masks)
        apart, found = spread(model, dataset, logits, plan)
        if not apart < TOLERANCE * float(max(x.abs().max() for x in logits)):
            return Verdict(f"logits are {apart} off on {ranks} ranks", wrong=True)
        if rotator != "model":
            _, expected = spread(unfused, dataset, logits, plan)
            if not (off := difference(found, expected)) < TOLERANCE:
                return Verdict(f"gradients are {off} off on {ranks} ranks", wrong=True)
    return Verdict(OF[rotator])


def refusal_of(message: str) -> str:
    return next(said for pattern, said in REASONS.items() if re.search(pattern, message))


def spread(
    model: Any,
    dataset: Sequence[Mapping[str, Tensor]],
    logits: Sequence[Tensor],
    plan: hcp.Plan,
    scan_type: ScanType = "auto",
) -> tuple[float, dict[str, Tensor]]:
    """Run a model on ranks that are threads. Returns the largest difference from `logits`, and the
    gradients of the mean loss, summed over ranks."""
    from hcp.integrations.transformers import causal_lm_loss, causal_lm_sample, model_inputs

    ranks = plan.ranks

    def work(groups: Any) -> tuple[float, dict[str, Tensor]]:
        own_model = copy.deepcopy(model)
        rank = groups.transport.rank
        sources = [i % ranks for i in range(len(dataset))]
        own = [
            causal_lm_sample(d) | {"expected": x}
            for d, x, source in zip(dataset, logits, sources, strict=True)
            if source == rank
        ]
        apart = 0.0
        for cp, local in hcp.dispatch(plan, own, sources, groups, scan_type=scan_type):
            with torch.no_grad():
                found = own_model(**model_inputs(cp, local)).logits[0, : cp.rows]
            if cp.rows:
                apart = max(apart, (found - local.expected).abs().max().item())
            causal_lm_loss(own_model, cp, local, grad_reduce="sum").backward()
        return apart, gradients(own_model)

    results = hcp.loopback(ranks, work)
    return max(apart for apart, _ in results), summed([grads for _, grads in results])


def gradients(model: Any) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def summed(by_rank: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([grads[name] for grads in by_rank]).sum(0) for name in by_rank[0]}


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference, relative to the largest value."""
    largest = max(float(x.abs().max()) for x in expected.values() if x.numel())
    pairs = ((found[name], x) for name, x in expected.items() if x.numel())
    return max(float((a - b).abs().max()) for a, b in pairs) / largest


# ---- all of them ---------------------------------------------------------------------------------


def sweep(kinds: Sequence[str]) -> dict[str, Verdict]:
    """Return the verdict of each kind of model, and print what is wrong."""
    found = {}
    for kind in kinds:
        found[kind] = judged(kind)
        if found[kind].wrong:
            print(f"{kind}: {found[kind].result}", flush=True)
    return found


def judged(kind: str) -> Verdict:
    model = architectures.build(kind)
    if model is None:
        return Verdict(NO_TOY)
    try:
        return verdict(model)
    except Exception as error:  # the verdict of a model that ends
        return Verdict(f"{type(error).__name__}: {error}", wrong=True)


def table(found: Mapping[str, Verdict]) -> str:
    """Return the table of the guide."""
    refused = [f"refused: they {said}" for said in REASONS.values()]
    rows: dict[str, list[str]] = {row: [] for row in (*OF.values(), *refused, NO_TOY)}
    for kind, of in sorted(found.items()):
        row = of.result if of.result in rows else f"refused: they {of.result}"
        rows.setdefault(row, []).append(kind)
    equal = sum(len(rows[row]) for row in OF.values())
    intro = (
        f"Of the {len(found)} causal language models of Transformers {transformers.__version__}, "
        f"{equal} compute their own logits at degrees 1 and 2 (to 3e-5), "
        f"{sum(len(rows[row]) for row in refused)} are refused before training, and for "
        f"{len(rows[NO_TOY])} there is no small model to try: they need other packages, or are "
        "large whatever their options."
    )
    lines = [
        f"| {row} | {len(kinds)} | {', '.join(f'`{kind}`' for kind in kinds)} |"
        for row, kinds in rows.items()
        if kinds
    ]
    head = ["", "| result | types | model types |", "|---|---|---|"]
    return "\n".join([*textwrap.wrap(intro, 100), *head, *lines])


def in_the_guide() -> str:
    """Return the table that the guide has."""
    return GUIDE.read_text().partition(BEGIN)[2].partition(END)[0].strip()


def write(text: str) -> None:
    before, _, rest = GUIDE.read_text().partition(BEGIN)
    GUIDE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m support.sweep", description=__doc__)
    parser.add_argument("kinds", nargs="*", help="model types (default: all)")
    parser.add_argument("--write", action="store_true", help="write the table of the guide")
    parser.add_argument("--check", action="store_true", help="fail if the guide's table differs")
    args = parser.parse_args(argv)
    if args.kinds and (args.write or args.check):
        parser.error("--write and --check take no kinds: the table has all of them")
    transformers.logging.set_verbosity_error()
    found = sweep(args.kinds or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    text = table(found)
    if args.write:
        write(text)
    stale = args.check and text != in_the_guide()
    if stale:
        print(f"{GUIDE.name} has another table: make sweep-transformers writes this one")
    print(text if stale or args.kinds else text.partition("\n|")[0])
    return int(stale or any(of.wrong for of in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
