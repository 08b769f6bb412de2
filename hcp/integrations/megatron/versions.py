"""Require a release of Megatron-Core that was tested, or one that has what hcp calls."""

from __future__ import annotations

import runpy
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from hcp._versions import check_version

SEAMS = (
    "megatron.core.packed_seq_params:PackedSeqParams(qkv_format, cu_seqlens_q, cu_seqlens_kv)",
    "megatron.core.packed_seq_params:PackedSeqParams(local_cp_size, cp_group)",
    "megatron.core.utils:get_attr_wrapped_model",
    "megatron.core.transformer.enums:AttnMaskType",
    "megatron.core.transformer.module:MegatronModule",
    "megatron.core.transformer.multi_latent_attention:MLASelfAttention",
    "megatron.core.transformer.attention:SelfAttention.forward(rotary_pos_emb, packed_seq_params)",
    "megatron.core.transformer.spec_utils:ModuleSpec(module, params, submodules)",
    "megatron.core.transformer.spec_utils:get_module",
    "megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.forward",
    "megatron.core.models.gpt.gpt_model:GPTModel._postprocess",
    "megatron.core.transformer.multi_token_prediction:"
    "MultiTokenPredictionLayer._get_embeddings(packed_seq_params)",
    "megatron.core.transformer.multi_token_prediction:"
    "roll_tensor(shifts, dims, cp_group, packed_seq_params)",
)
"""The parts of Megatron that hcp calls, derives from or replaces. They must be there in a release
that was not tested."""

CHECK = "Compare the losses of a few steps on one rank and on two."


@cache
def require_megatron() -> str:
    """Return the version of the Megatron-Core that is, or would be, imported.

    Raises ImportError if there is none, or an older one than hcp was tested with, or one that lacks
    what hcp calls. Warns of any other that hcp was not tested with.
    """
    version = _version()
    check_version("megatron-core", version, SEAMS, check=CHECK)
    return str(version)


def _version() -> str | None:
    """Read the release from Megatron's own file; None without that file.

    pip does not know a checkout of Megatron-LM, and importing it takes long."""
    package = find_spec("megatron")
    for folder in (package and package.submodule_search_locations) or ():
        file = Path(folder, "core", "package_info.py")
        if file.exists():
            return str(runpy.run_path(str(file))["__version__"])
    return None
