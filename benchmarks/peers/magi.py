"""MagiAttention's context parallelism for a pack under any mask, as its own benchmark runs it.

The settings are those of `exps/dist_attn/benchmark_conf.py` of SandAI-org/MagiAttention 1.1.1:
chunks of 2,048 tokens at most and eight for each rank at least, dealt by its heap to the least
loaded rank; its kernel FFA for Hopper; keys and values fetched in two stages by NCCL's all-to-all.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hcp import Mask
from hcp.planning.mask import BOTH, CAUSAL, FULL, INVERSE_CAUSAL

PACKAGE = "magi_attention"
VARIABLES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    "NCCL_CGA_CLUSTER_SIZE": "1",
    "TORCH_NCCL_HIGH_PRIORITY": "1",
}
"""Of the process, as its benchmark sets them. NCCL reads the second once."""
KINDS = {FULL: "full", CAUSAL: "causal", INVERSE_CAUSAL: "inv_causal", BOTH: "bi_causal"}
CHUNK = 2048


def obstacle(device: torch.device) -> str | None:
    """Return the reason why it cannot run here, or None."""
    if device.type != "cuda":
        return "for cuda alone"
    try:
        with warnings.catch_warnings():  # of an extension that its defaults do not use
            warnings.simplefilter("ignore")
            importlib.import_module(f"{PACKAGE}.api")
    except Exception as error:  # the package asks for its extension as it is imported
        return f"{type(error).__name__}: {str(error)[:200]}"
    capability = torch.cuda.get_device_capability(device)
    return None if capability == (9, 0) else f"compute capability {capability}, expected (9, 0)"


def set_variables() -> None:
    """Set what it wants of the process, before ranks are connected."""
    os.environ.update(VARIABLES)


class Magi:
    """Its group of all ranks."""

    def __init__(self) -> None:
        self.group = dist.new_group(list(range(dist.get_world_size())))

    def dispatched(
        self, mask: Mask, heads: int, kv_heads: int, head_dim: int
    ) -> tuple[Tensor, Callable[[Tensor, Tensor, Tensor], Tensor]]:
        """Return this rank's rows of a sequence under the mask, and attention of them."""
        api = importlib.import_module(f"{PACKAGE}.api")
        parts = mask.slices
        key = api.magi_attn_flex_key(
            q_ranges=api.AttnRanges.from_ranges([list(part.queries) for part in parts]),
            k_ranges=api.AttnRanges.from_ranges([list(part.keys) for part in parts]),
            attn_mask_type=[KINDS[part.kind] for part in parts],
            total_seqlen_q=mask.length,
            total_seqlen_k=mask.length,
            num_heads_q=heads,
            num_heads_kv=kv_heads,
            head_dim=head_dim,
            pad_size=0,
            cp_group_or_mesh=self.group,
            dist_attn_config=_settings(api),
        )
        if key.pad_size:
            raise ValueError(f"{mask.length} tokens are padded by {key.pad_size}, expected by none")

        def attention(query: Tensor, keys: Tensor, value: Tensor) -> Tensor:
            out: Tensor = api.calc_attn(query, keys, value, key)[0]
            return out

        return api.get_position_ids(key).long(), attention


def _settings(api: Any) -> Any:
    overlap = api.OverlapConfig(
        mode=api.AttnOverlapMode.STATIC,
        degree=2,
        min_chunk_size=512,
        max_num_chunks=4096,
        alg=api.UniformOverlapAlg(random_costs=True, random_seed=42),
    )
    chunks = api.DispatchConfig(chunk_size=CHUNK, alg=api.MinHeapDispatchAlg())
    return api.DistAttnConfig(dispatch_config=chunks, overlap_config=overlap)
