"""Transformer Engine itself under hcp, on GPUs over NCCL, with Megatron-Core's models.

    torchrun --nproc-per-node 2 tests/cuda/check_transformer_engine.py

The backend `transformer_engine` computes what the formula does in float64. A GPTModel of
Megatron's with Transformer Engine's layers evaluates equally under every layout, its groups come
back, and then it computes what it did before, bit for bit. FP8 with delayed scaling: an evaluation
in a context leaves scales and the history of largest values as they were, and the training steps
after it are those of a model that was not evaluated. With 4 ranks and more also two levels of
groups, and user buffers (TP 2) whose rows are as many under both layouts.

A table at the end has what was switched, how far results were off, and the milliseconds of
`hcp.audit`, and of entering and leaving a context. The program exits with 1 on a fault.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

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
WORDS, HIDDEN = 1024, 512


class Row(NamedTuple):
    """A line of the table."""

    case: str
    slots: int | None
    error: float
    audit_ms: float | None = None
    enter_ms: float | None = None
    leave_ms: float | None = None


rows: list[Row] = []


def main() -> int:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    size = dist.get_world_size()
    wrong = 0
    for comm_type, causal in itertools.product(("p2p", "all_gather", "a2a"), (True, False)):
        wrong += check_backend(comm_type, causal)
    levels = [2, size // 2] if size >= 4 else None
    with parallel(1, levels):
        for comm_type in ("p2p", "a2a", "all_gather", *(("a2a+p2p",) if levels else ())):
            wrong += check_model(comm_type)
        wrong += check_model("p2p", limit=2e-2, fp8="hybrid")
        wrong += check_fp8_state()
    if levels:
        with parallel(2, None):
            wrong += check_user_buffers()
    elif dist.get_rank() == 0:
        print(f"skipped: two levels of groups, and user buffers: {size} ranks, expected 4 or more")
    print_table()
    dist.destroy_process_group()
    return wrong > 0


@contextmanager
def parallel(tp: int, levels: Sequence[int] | None) -> Iterator[None]:
    """Megatron's groups: TP, and CP over all other ranks."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        context_parallel_size=dist.get_world_size() // tp,
        hierarchical_context_parallel_sizes=levels,
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def print_table() -> None:
    if dist.get_rank() > 0:
        return
    print(
        "\n| case | slots | off by | audit, ms | enter, ms | leave, ms |\n|---|---|---|---|---|---|"
    )
    for row in rows:
        times = (f"{x:.1f}" if x is not None else "-" for x in row[3:])
        slots = "-" if row.slots is None else row.slots
        print(f"| {row.case} | {slots} | {row.error:.1e} | {' | '.join(times)} |")


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
    rows.append(Row(f"backend {comm_type}, {mask}", None, max(errors)))
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
        wrong += check_layout(f"{name} cp {size} -> {cp}", model, groups, cp, trained, limit)
        wrong += report(state_of(model) == before, f"{name} cp {cp}: groups are back")
        again = mean_loss(model, size)
        wrong += report(again == trained, f"{name} cp {cp}: then {again!r}, as before")
    groups.close()
    return wrong


def check_layout(
    name: str,
    model: torch.nn.Module,
    groups: hcp.ProcessGroups,
    cp: int,
    trained: float,
    limit: float,
    tp: int = 1,
    lengths: Sequence[int] = LENGTHS,
) -> int:
    """Evaluate under another layout. Return the faults, and add a row to the table."""
    with closing(groups.with_context_parallel(cp)) as layout:
        begun = time.perf_counter()
        found = hcp.audit(model, groups, layout)
        audited = time.perf_counter() - begun
        wrong = report(
            bool(found.slots) and not found.uncovered,
            f"{name}: {len(found.slots)} slots, {len(found.uncovered)} uncovered",
        )
        torch.cuda.synchronize()
        begun = time.perf_counter()
        with hcp.eval_cp_context(model, groups, layout):
            entered = time.perf_counter() - begun
            loss = mean_loss(model, cp, tp, lengths)
            begun = time.perf_counter()
        left = time.perf_counter() - begun
    error = abs(loss / trained - 1)
    times = (1e3 * seconds for seconds in (audited, entered, left))
    rows.append(Row(name, len(found.slots), error, *times))
    return wrong + report(error <= limit, f"{name}: {loss:.6f}, expected {trained:.6f}")


# ---- FP8 -----------------------------------------------------------------------------------------


class Scaling(NamedTuple):
    """FP8 state of one direction of one module."""

    scale: Tensor
    history: Tensor
    """Largest values of the step under way, then of those before it."""


class Training(NamedTuple):
    """Three training steps, and the FP8 state around what came after the first."""

    before: dict[str, Scaling]
    after: dict[str, Scaling]
    losses: list[float]
    gradients: Tensor
    """Of the step after it."""


def check_fp8_state() -> int:
    """Return the number of faults of training steps around an evaluation in a context.

    Gradients of equal steps differ by the order of sums on GPUs: those of two models that were not
    evaluated tell by how much."""
    size = dist.get_world_size()
    collection = ProcessGroupCollection.use_mpu_process_groups()
    with closing(hcp.ProcessGroups.from_existing(collection)) as groups:

        def evaluate(model: torch.nn.Module) -> None:
            with (
                closing(groups.with_context_parallel(1)) as layout,
                hcp.eval_cp_context(model, groups, layout),
            ):
                mean_loss(model, 1)

        plain, again = (train_fp8(collection, lambda model: None) for _ in range(2))
        there = train_fp8(collection, lambda model: mean_loss(model, size))
        context = train_fp8(collection, evaluate)
    noise = distance(again.gradients, plain.gradients)
    off = distance(context.gradients, plain.gradients)
    same, grown = unchanged(context), growth(context)
    wrong = report(len(context.before) > 0, f"FP8: {len(context.before)} states")
    wrong += report(same, "FP8: scales and history are as before the context")
    wrong += report(
        grown <= max(1.01 * growth(there), 1e-2),
        f"FP8: largest values of the step under way grew by {grown:.1e}, without a context by "
        f"{growth(there):.1e}",
    )
    wrong += report(
        context.losses[1] == plain.losses[1],
        f"FP8: the step after it {context.losses[1]!r}, expected {plain.losses[1]!r}",
    )
    wrong += report(
        off <= max(4 * noise, 1e-6), f"FP8: its gradients are off by {off:.1e}, noise {noise:.1e}"
    )
    step = abs(context.losses[2] / plain.losses[2] - 1)
    own = abs(there.losses[2] / plain.losses[2] - 1)
    wrong += report(
        step <= max(2 * own, 1e-4),
        f"FP8: the step after that is off by {step:.1e}, without a context by {own:.1e}",
    )
    rows.append(Row("FP8 state, gradients of the next step", len(context.before), off))
    return wrong


def train_fp8(collection: ProcessGroupCollection, between: Callable[[Any], object]) -> Training:
    """Train a new model for three steps with equal weights. ``between``: after the first."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    size = dist.get_world_size()
    FP8GlobalStateManager.reset()
    model = build_model(collection, size, "p2p", fp8="hybrid", fp8_recipe="delayed").train()
    losses = [train_step(model, size)]
    before = fp8_state(model)
    model.eval()
    between(model)
    model.train()
    after = fp8_state(model)
    losses.append(train_step(model, size))
    grads = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    gradients = torch.cat(grads)
    losses.append(train_step(model, size))
    return Training(before, after, losses, gradients)


def train_step(model: torch.nn.Module, cp: int) -> float:
    """Run forward and backward. Return the mean loss; weights stay."""
    model.zero_grad()
    tokens, params = cut(LENGTHS, cp, dist.get_rank())
    losses = model(tokens, tokens * 0, None, labels=tokens, packed_seq_params=params)
    losses.float().mean().backward()
    total = losses.detach().double().mean()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def fp8_state(model: torch.nn.Module) -> dict[str, Scaling]:
    """Copy the scales and histories of all modules."""
    found = {}
    for name, module in model.named_modules():
        meta = getattr(module, "fp8_meta", None) or {}
        for key in ("scaling_fwd", "scaling_bwd"):
            state: Any = meta.get(key)
            if hasattr(state, "amax_history"):
                found[f"{name}.{key}"] = Scaling(state.scale.clone(), state.amax_history.clone())
    return found


def unchanged(training: Training) -> bool:
    """Whether all is as before but the largest values of the step under way, to which Transformer
    Engine's kernels add those of any forward."""
    before, after = training.before, training.after
    return before.keys() == after.keys() and all(
        torch.equal(old.scale, after[name].scale)
        and torch.equal(old.history[1:], after[name].history[1:])
        for name, old in before.items()
    )


def growth(training: Training) -> float:
    """How much the largest values of the step under way grew past those of the step before."""
    worst = 0.0
    for name, old in training.before.items():
        now, last = training.after[name].history[0], old.history.max(0).values
        past = ((now - last) / last.clamp_min(1e-12)).max()
        worst = max(worst, float(past))
    return worst


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


# ---- user buffers --------------------------------------------------------------------------------


def check_user_buffers() -> int:
    """Return the number of faults of a model whose TP exchanges overlap, under CP of half the ranks
    and under CP 1. Buffers have one size, so that ranks have as many rows under both."""
    from transformer_engine.pytorch.module import base

    tp, cp = 2, dist.get_world_size() // 2
    os.environ["UB_SKIPMC"] = "1"  # no NVLink multicast
    lengths = (512,) * cp
    base.initialize_ub(shape=[512, HIDDEN], tp_size=tp, bootstrap_backend="nccl")
    try:
        collection = ProcessGroupCollection.use_mpu_process_groups()
        options = {"tensor_model_parallel_size": tp, "sequence_parallel": True}
        model = build_model(collection, cp, "p2p", tp_comm_overlap=True, **options)
        with closing(hcp.ProcessGroups.from_existing(collection)) as groups:
            before, trained = state_of(model), mean_loss(model, cp, tp, lengths)
            name = f"user buffers, tp {tp}, cp {cp} -> 1"
            wrong = check_layout(name, model, groups, 1, trained, 2e-3, tp, lengths)
            wrong += report(state_of(model) == before, f"{name}: groups are back")
            again = mean_loss(model, cp, tp, lengths)
            return wrong + report(again == trained, f"{name}: then {again!r}, as before")
    finally:
        base.destroy_ub()


def build_model(
    collection: ProcessGroupCollection, size: int, comm_type: str, **options: Any
) -> torch.nn.Module:
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)  # of a model before; Megatron refuses them
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
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
    tensor_parallel.model_parallel_cuda_manual_seed(1)  # weights are drawn from its states
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


def mean_loss(
    model: torch.nn.Module, cp: int, tp: int = 1, lengths: Sequence[int] = LENGTHS
) -> float:
    """Return the mean loss over all tokens. Ranks of one CP group share its sequences."""
    size, rank = dist.get_world_size() // tp, dist.get_rank() // tp
    mine = lengths if cp == size else lengths[rank // cp :: size // cp]
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
