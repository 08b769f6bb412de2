"""The words that arguments take, as types: checkers and editors then know them."""

from __future__ import annotations

from typing import Literal

Backend = Literal[
    "auto",
    "torch",
    "cudnn",
    "flash_attn",
    "flash_attn_4",
    "flash_attn_3",
    "transformer_engine",
]
"""Whose code computes attention: what hcp comes with, of ``hcp.step.backends.BACKENDS``."""

CommType = Literal["p2p", "all_gather", "a2a", "a2a+p2p", "auto"]
"""How keys and values travel: ``hcp.COMM_TYPES``."""

Degrees = Literal["any", "pow2"]
"""Which degrees a plan may give."""

DerivedKind = Literal["size", "rank", "ranks", "flag"]
"""The kinds of values under names that ``hcp.rebinding.derived.register_derived`` adds."""

GradReduce = Literal["sum", "mean"]
"""How a trainer reduces gradients."""

Preset = Literal[
    "flexsp-7b",
    "flexsp-13b",
    "flexsp-30b",
    "hydraulis-7b-tp4",
    "hydraulis-7b-tp8",
    "gpt-1b-h200",
]
"""Cost models that come with hcp."""

PayloadSplit = Literal["whole", "first", "even", "tokens"]
"""The rules by which ranks split a payload: see `hcp.Payload`."""

QkvFormat = Literal["thd", "sbhd", "bshd"]
"""How queries, keys and values are laid out."""

ScanType = Literal["pass_states", "sequence_to_head", "auto"]
"""How recurrent layers get past the borders of ranks: ``hcp.attention.scan_types``."""

Scheduler = Literal["dynamic_cp", "static_cp", "default_dynamic_cp", "dp_balanced", "hcp"]
"""Who chooses degrees. The last three are Megatron's names."""

Sync = Literal["step", "micro_batch"]
"""After what ranks wait for each other."""

SyncOption = Literal["auto", "step", "micro_batch"]
"""``Sync``, or what the trainer's model does."""

TooLong = Literal["refuse", "drop", "cut"]
"""What becomes of samples that are too long for all ranks together."""

TransportName = Literal["auto", "torch", "nccl", "peer", "mixed"]
"""The ways to carry rows between ranks."""
