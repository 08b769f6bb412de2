"""Save the demo's runs, and go on from where they were saved."""

from __future__ import annotations

import argparse
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from hcp.programs.launch import InputError

FILE = "checkpoint.pt"
SAME = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("untie_embeddings_and_output_weights", "max_length", "dtype", "seed", "global_batch_size"),
    *("train_iters", "lr", "lr_warmup_iters", "lr_decay_style", "clip_grad"),
    *("ranks", "ddp", "eval_interval", "eval_iters"),
)
"""Arguments without which a run would not go on as it began."""


class Saved(Protocol):
    """A run that can be saved."""

    @property
    def name(self) -> str: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def settings_of(args: argparse.Namespace, digest: str) -> dict[str, Any]:
    """Return what a run that goes on must have in common with the one that was saved. `digest`: of
    the documents."""
    same = {name: getattr(args, name) for name in SAME}
    return {**same, "options": repr(args.config), "documents": digest}


def save(folder: Path, runs: Sequence[Saved], settings: Mapping[str, Any], metrics: str) -> None:
    """Write what all ranks hold alike: one of them calls it. A file that was there is replaced once
    the new one is complete. `metrics`: the text of metrics.jsonl so far."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "settings": dict(settings),
        "runs": {run.name: run.state_dict() for run in runs},
        "metrics": metrics,
        "random": torch.get_rng_state(),
    }
    new = folder / f"{FILE}.new"
    torch.save(state, new)
    new.replace(folder / FILE)


def read(folder: Path) -> bytes:
    """Return the file of a folder. Raises InputError where there is none."""
    path = folder / FILE
    if not path.exists():
        raise InputError(f"--load {folder}: no {FILE} in it, expected one that --save wrote")
    return path.read_bytes()


def load(folder: Path, data: bytes, runs: Sequence[Saved], settings: Mapping[str, Any]) -> str:
    """Bring runs to where they were saved, and return the text of metrics.jsonl until then. Every
    rank calls it. Raises InputError where they would not go on as they began."""
    # On the host: AdamW reads the number of its steps there.
    state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    for name, value in settings.items():
        saved = state["settings"].get(name)
        if saved != value:
            raise InputError(
                f"--load {folder}: it was saved with {name} {saved!r}, expected {value!r}: go on "
                "with the arguments that it began with"
            )
    names = [run.name for run in runs]
    if sorted(names) != sorted(state["runs"]):
        raise InputError(
            f"--load {folder}: it has the runs {sorted(state['runs'])}, expected {sorted(names)}"
        )
    for run in runs:
        run.load_state_dict(state["runs"][run.name])
    torch.set_rng_state(state["random"])
    metrics: str = state["metrics"]
    return metrics
