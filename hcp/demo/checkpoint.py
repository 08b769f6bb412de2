"""Save the demo's runs, and go on from where they were saved."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from hcp._files import write_file
from hcp._validate import expect_names
from hcp.tools.programs.files import expect_writable, remove_unfinished
from hcp.tools.programs.launch import InputError

FILE = "checkpoint.pt"
OWNER = "checkpoint.run"
"""Names the run that saves into the folder."""
FORMAT = b"hcp demo checkpoint, version 1, sha256 "
"""The beginning of a checkpoint. The hash of the rest follows, in hexadecimal, and after a new line
the bytes of torch.save."""
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


class Folder:
    """The folder of --save, which belongs to the run that began to save into it last.

    One rank makes it. An older run that still saves, such as one whose launcher is gone, is ended
    by its next save."""

    def __init__(self, path: str) -> None:
        """Raises ValueError if nothing can be written there."""
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--save {path}: it cannot be a folder: {error.strerror}") from None
        expect_writable("save", self.path / FILE)
        owner = {"run": os.urandom(8).hex(), "host": platform.node(), "process": os.getpid()}
        self._owner = json.dumps(owner)
        write_file(self.path / OWNER, self._owner)
        remove_unfinished(self.path / FILE)

    def save(self, runs: Sequence[Saved], settings: Mapping[str, Any], metrics: str) -> None:
        """Write what all ranks hold alike. `metrics`: the text of metrics.jsonl so far. Raises
        InputError if the folder is another run's, and OSError; the file that was there is kept."""
        state = {
            "settings": dict(settings),
            "runs": {run.name: run.state_dict() for run in runs},
            "metrics": metrics,
            "random": torch.get_rng_state(),
        }
        memory = io.BytesIO()
        torch.save(state, memory)
        data = memory.getvalue()
        content = FORMAT + hashlib.sha256(data).hexdigest().encode() + b"\n" + data
        write_file(self.path / FILE, content, before=self._expect_own)

    def _expect_own(self) -> None:
        try:
            owner = (self.path / OWNER).read_text()
        except FileNotFoundError:  # nobody else has begun to save here
            return
        if owner != self._owner:
            raise InputError(
                f"--save {self.path}: a later run saves there, {owner}, expected this one, "
                f"{self._owner}: end one of them, or give each a folder of its own"
            )


def read(folder: Path) -> bytes:
    """Return the file of a folder. Raises InputError where there is none, or one that --save did
    not write, or not whole."""
    path = folder / FILE
    if not path.exists():
        raise InputError(f"--load {folder}: no {FILE} in it, expected one that --save wrote")
    content = path.read_bytes()
    head = len(FORMAT)
    if content[:head] != FORMAT:
        raise InputError(
            f"{path}: it begins with {content[:head]!r:.60}, expected {FORMAT!r}: a file that "
            "--save of this version wrote"
        )
    digest, data = content[head : head + 64], content[head + 65 :]
    found = hashlib.sha256(data).hexdigest().encode()
    if found != digest:
        raise InputError(
            f"{path}: the hash of its {len(data)} bytes is {found[:12]!r}, expected "
            f"{digest[:12]!r}, which it names: it was cut or changed. Take another copy"
        )
    return data


def load(folder: Path, data: bytes, runs: Sequence[Saved], settings: Mapping[str, Any]) -> str:
    """Bring runs to where they were saved, and return the text of metrics.jsonl until then. `data`:
    what `read` gave. Every rank calls it. Raises InputError where they would not go on as they
    began."""
    state = _state_in(folder / FILE, data)
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


def _state_in(path: Path, data: bytes) -> dict[str, Any]:
    try:
        # On the host: AdamW reads the number of its steps there.
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        expect_names("", state, ("settings", "runs", "metrics", "random"))
    except Exception as error:  # of zip, pickle or torch, by what the bytes happen to be
        raise InputError(f"{path}: it cannot be read: {error}") from None
    return dict(state)
