"""Transformer Engine itself under hcp, on GPUs over NCCL, with Megatron-Core's models.

    torchrun --nproc-per-node 2 tests/cuda/check_transformer_engine.py

The backend `transformer_engine` computes what the formula does in float64. A GPTModel of
Megatron's with Transformer Engine's layers evaluates equally under every layout, its groups come
back, and then it computes what it did before, bit for bit. It exits with 1 on a fault.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor

import hcp

LENGTHS = (512, 64, 1024, 64, 256)
"""Multiples of 2 x 4 ranks. FP8 wants a multiple of 8 rows on each."""
WORDS = 1024


def main() -> int:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    size = dist.get_world_size()
    wrong = 0
    for comm_type, causal in itertools.product(("p2p", "all_gather", "a2a"), (True, False)):
        wrong += check_backend(comm_type, causal)
    levels = [2, size // 2] if size >= 4 else None
    parallel_state.initialize_model_parallel(
        context_parallel_size=size, hierarchical_context_parallel_sizes=levels
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    for comm_type in ("p2p", "a2a", "all_gather", *(("a2a+p2p",) if levels else ())):
        wrong += check_model(comm_type)
    wrong += check_model("p2p", limit=2e-2, fp8="hybrid")
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return wrong > 0


def report(fine: bool, text: str) -> int:
    """Print a case on rank 0. Return 1 if it is wrong on some rank."""
    bad = torch.tensor(int(not fine), device="cuda")
    dist.all_reduce(bad)
    if dist.get_rank() == 0:
        print("BAD" if bad.item() else "ok ", text, flush=True)
    return int(bad.item() > 0)


# ---- the backend ---------------------------------------------------------------------------------


def check_backend(comm_type: Any, causal: bool) -> int:
    """Return 1 if an output or a gradient is off by more than bfloat16 rounds."""
    groups = hcp.build_process_groups()
    size = dist.get_world_size()
    plan = hcp.plan(LENGTHS, ranks=size, max_tokens_per_rank=4096, min_degree=size)
    results = []
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    drawn: list[Tensor] | None = None
    for backend, dtype in (("torch", torch.float64), ("transformer_engine", torch.bfloat16)):
        cls = hcp.get_cp_handler_cls(backend)
        cp = cls(plan, 0, groups.transport, comm_types=(comm_type,))
        if drawn is None:
            drawn = [
                torch.randn(cp.rows, heads, 64, device="cuda", generator=generator).bfloat16()
                for heads in (8, 4, 4, 8)
            ]
        *leaves, grad = (x.to(dtype) for x in drawn)
        leaves = [x.requires_grad_() for x in leaves]
        options: dict[str, Any] = {}
        if backend == "transformer_engine":
            options = {"cp_group": dist.group.WORLD}
        out = cp.attention(*leaves, causal=causal, **options)
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    errors = [
        float((got.double() - want).abs().max() / want.abs().max())
        for want, got in zip(*results, strict=True)
    ]
    groups.close()
    mask = "causal" if causal else "full"
    return report(max(errors) <= 0.03, f"backend {comm_type} {mask}: off by {max(errors):.1e}")


# ---- a model -------------------------------------------------------------------------------------


def check_model(comm_type: str, limit: float = 2e-3, **options: Any) -> int:
    """Return the number of faults of one model under every layout."""
    size = dist.get_world_size()
    collection = ProcessGroupCollection.use_mpu_process_groups()
    model = build_model(collection, size, comm_type, **options)
    groups = hcp.ProcessGroups.from_existing(collection)
    before = state_of(model)
    trained = mean_loss(model, size)
    name = " ".join([comm_type, *options])
    wrong = 0
    sizes = [1] if comm_type == "a2a+p2p" else [d for d in range(1, size) if size % d == 0]
    for cp in sizes:
        layout = groups.with_context_parallel(cp)
        found = hcp.audit(model, groups, layout)
        wrong += report(
            bool(found.slots) and not found.uncovered,
            f"{name} cp {size} -> {cp}: {len(found.slots)} slots, {len(found.uncovered)} uncovered",
        )
        begun = time.perf_counter()
        with hcp.eval_cp_context(model, groups, layout):
            entered = time.perf_counter() - begun
            loss = mean_loss(model, cp)
        wrong += report(
            abs(loss / trained - 1) <= limit,
            f"{name} cp {size} -> {cp}: {loss:.6f}, expected {trained:.6f}; entered in "
            f"{entered * 1e3:.1f} ms",
        )
        wrong += report(state_of(model) == before, f"{name} cp {cp}: groups are back")
        again = mean_loss(model, size)
        wrong += report(again == trained, f"{name} cp {cp}: then {again!r}, as before")
        layout.close()
    return wrong


def build_model(
    collection: ProcessGroupCollection, size: int, comm_type: str, **options: Any
) -> torch.nn.Module:
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)  # of a model before; Megatron refuses them
    config = TransformerConfig(
        num_layers=2,
        hidden_size=512,
        ffn_hidden_size=1024,
        num_attention_heads=8,
        num_query_groups=4,
        normalization="RMSNorm",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        apply_rope_fusion=True,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,
        context_parallel_size=size,
        cp_comm_type=comm_type,
        attention_backend=AttnBackend.fused,
        **options,
    )
    torch.manual_seed(0)
    model = GPTModel(
        config,
        get_gpt_layer_with_transformer_engine_spec(),
        WORDS,
        max(LENGTHS),
        position_embedding_type="rope",
        pg_collection=collection,
    )
    return model.cuda().eval()


def attentions(model: torch.nn.Module) -> Iterator[Any]:
    return (x for x in model.modules() if hasattr(x, "set_context_parallel_group"))


def state_of(model: torch.nn.Module) -> list[tuple[Any, ...]]:
    """Return what each of Transformer Engine's attentions holds of a layout."""
    return [
        (id(x.cp_group), tuple(x.cp_global_ranks or ()), id(x.cp_stream), x.cp_comm_type)
        for x in attentions(model)
    ]


def mean_loss(model: torch.nn.Module, cp: int) -> float:
    """Return the mean loss over all tokens. Ranks of one CP group share its sequences."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mine = LENGTHS if cp == size else LENGTHS[rank // cp :: size // cp]
    total = torch.zeros(2, dtype=torch.float64, device="cuda")
    tokens, params = cut(mine, cp, rank % cp)
    with torch.no_grad():
        losses = model(tokens, tokens * 0, None, labels=tokens, packed_seq_params=params)
    total += torch.stack([losses.double().sum(), losses.new_tensor(losses.numel()).double()])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def cut(lengths: Sequence[int], cp: int, rank: int) -> tuple[Tensor, PackedSeqParams]:
    """Return this rank's chunks, one from the front and one from the back of each sequence."""
    parts = []
    for length in lengths:
        generator = torch.Generator().manual_seed(length)
        chunks = torch.randint(WORDS, (length,), generator=generator).chunk(2 * cp)
        parts += [chunks[rank], chunks[2 * cp - 1 - rank]]
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    return torch.cat(parts).cuda()[None], params


if __name__ == "__main__":
    sys.exit(main())
