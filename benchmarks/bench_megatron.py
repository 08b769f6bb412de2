"""Megatron-Core's own context parallelism, by Transformer Engine, beside the same model with hcp.

    torchrun --nproc-per-node 2 benchmarks/bench_megatron.py [--families P1 P2 P3 P4]
    torchrun --nproc-per-node 8 benchmarks/bench_megatron.py --lengths mine.jsonl
    torchrun --nproc-per-node 2 benchmarks/bench_megatron.py --families one --tokens 262144 \\
        --recompute --linear-loss --num-layers 16 --vocab-size 65536 [--ladder without torchrun]
    torchrun --nproc-per-node 2 benchmarks/bench_megatron.py --device cpu

A GPT of Megatron-Core with Transformer Engine's layers and fused rotary embedding computes equal
global batches with equal weights:

    te p2p, te a2a, te all_gather
                    Megatron's CP over all ranks, sequences packed by next-fit in their order and
                    padded to full chunks. "fused" is cuDNN's attention, "flash" FlashAttention-4,
                    mended where Transformer Engine needs it (peers/te_kernels.py)
    static CP       packed static CP on the engine of "hcp": one degree, the least divisor of the
                    ranks that holds the longest sequence of a batch, and next-fit in their order
    hcp             as it comes: hcp_layer_spec, the options' defaults ("p2p", the kernels of
                    "auto"), and a plan by the prices that follow from the model's sizes
    hcp tuned       --cp-comm-type, and a plan by prices that are fitted in the run to micro-batches
                    of degrees 1 to all, or of a file of `hcp calibrate` (--cost)
    wave greedy     Megatron's dynamic scheduler, re-implemented in benchmarks/peers/planners.py, on
                    the engine and with the prices of "hcp tuned"

A step is forward, backward and one sum of all gradients, in turns. The optimizer is left out, since
its work is equal for all. So are planning and the dispatch of rows, which a loader does ahead.
Families are those of benchmarks/common/families.py, with sequences up to --tokens per batch, each
cut to the rows of all ranks. --lengths takes them from a file of your own, as `hcp simulate` reads
it: shuffled, in batches of up to --tokens, and in place of the families unless these are named too;
--batches says how many. The family "one" is one sequence of --tokens on all ranks; memory for
rows that peers read is then as large as it needs, and no prices are fitted.

--recompute has Megatron compute each layer again in the backward. --linear-loss computes losses
without logits in memory: by liger-kernel 0.8.5, if it is installed, or torch 2.13.

Before anything is timed, Transformer Engine's attention of a small pack is compared with the
formula, and losses, and gradients of the attention's weights, of each contestant with those of the
first. One of Transformer Engine's that cannot compute, or is wrong, has the reason in its row.
Columns: micro-batches; tokens per second, and hcp's over those; the most memory that a step took,
in torch's allocator and outside it, and hcp's over that; the gradients' relative distance. The
lines below a family compare hcp's contestants with the fastest of Transformer Engine, and say what
hcp aims at on so many GPUs; and in one sentence with packed static CP.

--ladder doubles the length of the family "one" for each contestant, in processes of its own, until
its memory is used up: see common/ladder.py. Weights and gradients are in memory, optimizer states
are not. Nothing is compared there.

On CPUs, where Transformer Engine does not run, only hcp's plans, packed static CP and Megatron's
scheduler are compared, with Megatron's local layers: that shows that the run works, and no speed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common.attention_cases import GRADIENTS, Case, inputs, one_rank
from common.batches import drawn, filled_batches, sample
from common.families import BY_NAME, Family
from common.flags import end_after, parser_of
from common.ladder import add_ladder, check_ladder, climb, climb_all, is_full, leave_full
from common.machine import hardware
from common.memory import limit_memory, outside_torch, staged_bytes
from common.timing import by_turns, device_name, end_ranks, slowest, start_ranks, timed
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from peers import conforming, te_kernels
from peers.planners import next_fit_at, plan_of, static_degree, wave_greedy
from peers.ring import padded
from torch import Tensor, nn

import hcp
from hcp.cli.calibrate import Cell
from hcp.cli.fit import Point, fit
from hcp.cli.lengths import HELP, read_lengths
from hcp.cli.measure import step_of
from hcp.demo.training import Gradients, Trainer
from hcp.exchange.peer import BUFFER_BYTES
from hcp.integrations import megatron as hcp_megatron
from hcp.integrations.megatron.data import MicroBatches
from hcp.integrations.megatron.versions import require_megatron
from hcp.planning.cost import PRICES
from hcp.step.config import Config
from hcp.tools.programs.arguments import cost_model

FULL = {
    "num_layers": 12,
    "hidden_size": 2048,
    "ffn_hidden_size": 7168,
    "num_attention_heads": 16,
    "num_query_groups": 8,
    "vocab_size": 32_768,
    "max_tokens_per_rank": 32_768,
    "tokens": 262_144,
}
TINY = {
    "num_layers": 1,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 512,
    "max_tokens_per_rank": 256,
    "tokens": 1024,
}
FAMILIES = ("P1", "P2", "P3", "P4")
ONE = "one"
STATIC = "static CP"
OWN = (STATIC, "hcp", "hcp tuned", "wave greedy")
"""Contestants on hcp's engine."""
MOST_WRONG = 0.03
"""The largest error of Transformer Engine's attention, over the largest element."""
FITTED = {"hcp tuned", "wave greedy"}
"""Those that need prices fitted in the run."""
TARGETS = {2: (1.15, 1.15), 4: (1.3, 1.15), 8: (1.6, 1.25)}
"""Tokens per second over the best of Transformer Engine, by GPUs: on P1 and P2, on P3 and P4."""
MEMORY_TARGET = 1.05
TOLERANCES = {torch.bfloat16: (2**-8, 0.2), torch.float32: (1e-5, 1e-3)}
"""Relative tolerances of a loss and of gradients."""
TIMEOUT = timedelta(seconds=120)
CALIBRATION_ROUNDS = 2
WARM_TOKENS = 2048
"""The length at which the ladder connects a contestant, before its memory is limited."""
Batch = dict[str, Any]


class Way(NamedTuple):
    config: Config
    cost: hcp.CostModel


@dataclass(frozen=True)
class Job:
    """State that all functions share."""

    args: argparse.Namespace
    device: torch.device
    collection: ProcessGroupCollection
    """Megatron's groups, of which `cp` has all ranks."""
    groups: hcp.ProcessGroups
    model: nn.Module
    """The model with hcp's attention. Its weights and gradients are those of all contestants."""
    gradients: Gradients
    ways: Mapping[str, Way]
    """How hcp's contestants move keys, and what they plan by."""
    refused: dict[str, str] = field(default_factory=dict)
    """Transformer Engine's contestants that no batch is computed by, and why."""
    outside: dict[str, float] = field(default_factory=dict)
    """Memory of the GPU that each contestant took outside torch's allocator, in GiB: hcp's all
    together."""

    @property
    def ranks(self) -> int:
        return dist.get_world_size()


def main() -> int:
    begun = time.perf_counter()
    args = arguments()
    if args.ladder:
        end_after(args.deadline)
        limit = "all memory" if args.memory_gib is None else f"{args.memory_gib:g} GiB of memory"
        print(
            f"{hardware(args.device)}, torch {torch.__version__}, {engine_version()}, hcp "
            f"{hcp.__version__}; {limit} for each\n{args.num_layers} layers of "
            f"{args.hidden_size}, heads {args.num_attention_heads}:{args.num_query_groups}, "
            f"{args.vocab_size} words\n\n{RUNG_HEAD}",
            flush=True,
        )
        own = [name for name in args.hcp if name not in (STATIC, "wave greedy")]
        climb_all(args, [*own, *(args.te if args.device == "cuda" else ())])
        return 0
    # The host queues a long step at once: its last exchange waits for all of it.
    timeout = timedelta(seconds=args.deadline) if ONE in args.families else TIMEOUT
    device = start_ranks(args.device, args.deadline, timeout)
    on_cpu = hcp_megatron.megatron_on_cpu if device.type == "cpu" else contextlib.nullcontext
    with on_cpu():
        parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
        tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
        collection = ProcessGroupCollection.use_mpu_process_groups()
        dist.all_reduce(torch.zeros(1, device=device), group=collection.dp_cp)
        if args.climb:
            climb_one(args, device, collection)
        else:
            compare_all(args, device, collection, begun)
        parallel_state.destroy_model_parallel()
    end_ranks()
    return 0


def compare_all(
    args: argparse.Namespace,
    device: torch.device,
    collection: ProcessGroupCollection,
    begun: float,
) -> None:
    before = outside_torch(device)
    with closing(connected(args, collection, args.families)) as groups:
        outside = {"hcp": outside_torch(device) - before}
        torch.manual_seed(args.seed)
        model = build_model(args, device, collection, with_hcp=True)
        ways = {"hcp": Way(Config(args.max_tokens_per_rank), sizes_cost(args, device))}
        gradients = Gradients(model, groups)
        job = Job(args, device, collection, groups, model, gradients, ways, outside=outside)
        others = list(transformer_engines(job)) if device.type == "cuda" else []
        if FITTED & set(args.hcp):
            cost = ways["hcp"].cost
            if args.cost or args.families != [ONE]:
                cost = hcp.CostModel.load(args.cost) if args.cost else calibrated(job)
            ways["hcp tuned"] = Way(tuned(args), cost)
        print_head(job, time.perf_counter() - begun)
        families = [ALONE if name == ONE else BY_NAME[name] for name in args.families]
        for family in [*families, *own_family(args)]:
            if slowest(time.perf_counter() - begun, device) > args.seconds:
                tell(f"{family.name}: left out, the run took over --seconds {args.seconds:g}")
                continue
            compare(job, family, others)
    tell(f"\n{time.perf_counter() - begun:.0f} s in all")


def connected(
    args: argparse.Namespace, collection: ProcessGroupCollection, families: Sequence[str]
) -> hcp.ProcessGroups:
    """Connect hcp's ranks over Megatron's groups. A family "one" may need more memory for rows that
    peers read than they have by default."""
    needed = BUFFER_BYTES
    if ONE in families:
        head = args.hidden_size // args.num_attention_heads
        row = 2 * args.num_query_groups * head
        needed = max(needed, staged_bytes(args.tokens, dist.get_world_size(), row, 2))
    return hcp.ProcessGroups.from_existing(collection, peer_buffer_bytes=needed)


def sizes_cost(args: argparse.Namespace, device: torch.device) -> hcp.CostModel:
    """Return the prices that a program of hcp's takes where it is given none."""
    return cost_model(args, device, bytes_per_element=2 if device.type == "cuda" else 4)


def tuned(args: argparse.Namespace) -> Config:
    return Config(args.max_tokens_per_rank, cp_comm_type=args.cp_comm_type)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, device="cuda", rounds=2, deadline=580)
    parser.add_argument(
        "--families",
        nargs="+",
        choices=(*FAMILIES, ONE),
        help=f"what batches are drawn from ({' '.join(FAMILIES)}; with --lengths none)",
    )
    parser.add_argument("--lengths", metavar="FILE", help=f"{HELP} (none)")
    says = "of --lengths: the column or field that has tokens, or their number (found by its name)"
    parser.add_argument("--column", metavar="NAME", help=says)
    parser.add_argument("--batches", type=int, default=1, help="global batches of a family (1)")
    says = f"contestants of Transformer Engine ({', '.join(map(repr, ENGINES))})"
    parser.add_argument("--te", nargs="*", default=[*ENGINES], choices=ENGINES, help=says)
    says = f"contestants on hcp's engine, of which hcp always is one ({', '.join(map(repr, OWN))})"
    parser.add_argument("--hcp", nargs="*", default=[*OWN], choices=OWN, help=says)
    parser.add_argument("--cp-comm-type", default="all_gather", help="of hcp tuned (all_gather)")
    parser.add_argument("--recompute", action="store_true", help="layers, in the backward")
    parser.add_argument("--linear-loss", action="store_true", help="no logits in memory")
    parser.add_argument("--cost", metavar="FILE", help="prices of this model (fitted in the run)")
    parser.add_argument("--seed", type=int, default=1, help="of weights and batches (1)")
    parser.add_argument("--seconds", type=float, default=420, help="start no family later (420)")
    for name, size in FULL.items():
        says = f"({size}; {TINY[name]} on the CPU)"
        parser.add_argument("--" + name.replace("_", "-"), type=int, help=says)
    add_ladder(parser)
    args = parser.parse_args()
    check_ladder(parser, args)
    if args.lengths is not None and (args.ladder or args.climb):
        parser.error("--lengths goes with batches of many sequences, expected none with --ladder")
    if args.families is None:
        args.families = [] if args.lengths is not None else list(FAMILIES)
    if args.ladder or args.climb:
        args.families = [ONE]
    try:
        args.own = read_lengths(args.lengths, args.column) if args.lengths is not None else []
    except ValueError as error:
        parser.error(str(error))
    fills_ranks = args.families == [ONE] and args.max_tokens_per_rank is None
    for name, size in (FULL if args.device == "cuda" else TINY).items():
        if getattr(args, name) is None:
            setattr(args, name, size)
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected >= 1")
    if fills_ranks:
        set_length(args, args.tokens)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ONE in args.families and not args.ladder and args.tokens > args.max_tokens_per_rank * ranks:
        parser.error(
            f"--tokens is {args.tokens} in one sequence, expected <= {ranks} ranks x "
            f"--max-tokens-per-rank {args.max_tokens_per_rank}"
        )
    return args


def set_length(args: argparse.Namespace, tokens: int) -> None:
    """Have a sequence of the family "one", in full chunks, fill all ranks."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    args.tokens = padded(tokens, ranks)
    args.max_tokens_per_rank = args.tokens // ranks


# ---- models --------------------------------------------------------------------------------------


def build_model(
    args: argparse.Namespace,
    device: torch.device,
    collection: ProcessGroupCollection,
    *,
    with_hcp: bool,
    **options: Any,
) -> nn.Module:
    """Build Megatron's GPT in bfloat16 (on the CPU float32). `options`: of its config."""
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=on_gpu,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=not on_gpu,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=on_gpu,
        bias_activation_fusion=on_gpu,
        calculate_per_token_loss=True,
        **(RECOMPUTED if args.recompute else {}),
        **options,
    )
    spec = get_gpt_layer_with_transformer_engine_spec() if on_gpu else local_spec()
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)  # of a model before; Megatron refuses them
    model = GPTModel(
        config,
        hcp_megatron.hcp_layer_spec(spec) if with_hcp else spec,
        args.vocab_size,
        args.max_tokens_per_rank * dist.get_world_size(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        pg_collection=collection,
    )
    if args.linear_loss:
        hcp_megatron.use_linear_cross_entropy(model)
    return model.to(device)


RECOMPUTED: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def local_spec() -> Any:
    return get_gpt_layer_local_spec(normalization="RMSNorm")


def share_weights(model: nn.Module, of: nn.Module) -> None:
    """Give a model the parameters of another one, whose gradients they then have in common."""
    theirs = dict(of.named_parameters())
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = theirs[f"{path}.{name}"]


ENGINES = {
    f"te {comm_type} {backend.name}": (comm_type, backend)
    for backend in (AttnBackend.fused, AttnBackend.flash)
    for comm_type in ("p2p", "a2a", "all_gather")
}


@dataclass(frozen=True)
class Engine:
    """A model whose attention, and CP, are Transformer Engine's."""

    name: str
    backend: AttnBackend
    model: nn.Module

    def select(self) -> None:
        """Have Transformer Engine select its attention anew, if another model's was the last."""
        te_kernels.select(self.backend.name)


def transformer_engines(job: Job) -> Iterator[Engine]:
    """Build the models. One that cannot be built, or is wrong, has the reason in ``refused``."""
    for name in job.args.te:
        try:
            engine = Engine(name, ENGINES[name][1], engine_model(job, name))
            check_attention(job, engine)
        except Exception as error:  # whatever Transformer Engine refuses, on all ranks alike
            job.refused[name] = reason_of(error)
            continue
        yield engine


def engine_model(job: Job, name: str) -> nn.Module:
    comm_type, backend = ENGINES[name]
    model = build_model(
        job.args,
        job.device,
        job.collection,
        with_hcp=False,
        context_parallel_size=job.ranks,
        cp_comm_type=comm_type,
        attention_backend=backend,
    )
    share_weights(model, job.model)
    return model


def check_attention(job: Job, engine: Engine) -> None:
    """Compare the attention of its first layer on a small pack, and gradients, with the formula."""
    case = small_pack(job)
    whole = {name: x.to(job.device) for name, x in inputs(case).items()}
    given = conforming.Job(case, dist.get_rank(), job.ranks, job.device, whole)
    rows = given.zigzag()
    leaves = given.cut(rows)
    engine.select()
    decoder: Any = engine.model.decoder
    attention = decoder.layers[0].self_attention.core_attention
    packed = packed_params(case.lengths, job.device)
    masks = None, AttnMaskType.padding_causal
    out = attention(*leaves, *masks, packed_seq_params=packed).view_as(leaves[0])
    out.backward(whole["grad"][rows.to(job.device)])
    results = out.detach(), *(leaf.grad for leaf in leaves)
    expected = (one_rank(case)[name] for name in ("out", *GRADIENTS[:3]))
    wrong = max(map(error_of, results, (x[rows] for x in expected)))
    wrong = slowest(wrong, job.device)
    if wrong > MOST_WRONG:
        raise ValueError(
            f"its attention is off the formula by {wrong:.2g} of the largest element, expected <= "
            f"{MOST_WRONG}"
        )


def small_pack(job: Job) -> Case:
    args, chunk = job.args, 2 * job.ranks
    return Case(
        "a small pack",
        (8 * chunk, 40 * chunk, chunk, 4 * chunk),
        heads=args.num_attention_heads,
        kv_heads=args.num_query_groups,
        head_dim=args.hidden_size // args.num_attention_heads,
        dtype="bfloat16",
    )


def error_of(found: Tensor, expected: Tensor) -> float:
    error = (found.double().cpu() - expected).abs().max() / expected.abs().max()
    return float(error.nan_to_num(torch.inf))


def reason_of(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


# ---- steps ---------------------------------------------------------------------------------------


def run_micro_batches(model: nn.Module, batches: Sequence[Batch], tokens: int) -> Tensor:
    """Run forward and backward. Return this rank's share of the mean loss of `tokens`."""
    total = torch.zeros((), dtype=torch.float64, device=batches[0]["tokens"].device)
    for batch in batches:
        losses = model(
            batch["tokens"],
            batch["position_ids"],
            None,
            labels=batch["labels"],
            packed_seq_params=batch["packed_seq_params"],
        )
        loss = (losses.float() * batch["loss_mask"]).sum() / tokens
        loss.backward()
        total += loss.detach()
    return total


def run_step(job: Job, model: nn.Module, batches: Sequence[Batch], tokens: int) -> Tensor:
    job.gradients.zero()
    share = run_micro_batches(model, batches, tokens)
    job.gradients.reduce()
    return share


def engine_step(job: Job, engine: Engine, batches: Sequence[Batch], tokens: int) -> Tensor:
    engine.select()
    return run_step(job, engine.model, batches, tokens)


def dispatched(
    job: Job, config: Config, plan: hcp.Plan, lengths: Sequence[int], batch: int
) -> list[Batch]:
    """Return the micro-batches of a plan of hcp's engine. Rank i mod N loads sequence i."""
    sources = [i % job.ranks for i in range(len(lengths))]
    mine = [
        sample(lengths[i], lengths[i], seed_of(batch, i), job.device)
        for i in range(dist.get_rank(), len(lengths), job.ranks)
    ]
    options = config.dispatch_options()
    return list(MicroBatches(hcp.dispatch(plan, mine, sources, job.groups, **options)))


def seed_of(batch: int, sequence: int) -> int:
    return batch * 2**20 + sequence


def packed_in_order(job: Job, lengths: Sequence[int], batch: int) -> list[Batch]:
    """Return Megatron's micro-batches: next-fit packs, cut in chunks over all ranks."""
    split = [padded(length, job.ranks) for length in lengths]
    packs = next_fit_at(job.ranks, split, job.ranks, job.args.max_tokens_per_rank)
    return [
        cut_pack(job, [(lengths[i], split[i], seed_of(batch, i)) for i in members])
        for ((_, _, members),) in packs
    ]


def cut_pack(job: Job, members: Sequence[tuple[int, int, int]]) -> Batch:
    """Cut each sequence (length, padded length, seed) into 2 N chunks, of which this rank has one
    from the front and one from the back."""
    rank, last = dist.get_rank(), 2 * job.ranks - 1
    fields: dict[str, list[Tensor]] = {"tokens": [], "labels": [], "loss_mask": []}
    for length, rows, seed in members:
        whole = sample(length, rows, seed, job.device)
        for name, parts in fields.items():
            chunks = whole[name].chunk(last + 1)
            parts += [chunks[rank], chunks[last - rank]]
    batch: Batch = {name: torch.cat(parts)[None] for name, parts in fields.items()}
    batch["position_ids"] = torch.zeros_like(batch["tokens"])
    batch["packed_seq_params"] = packed_params([rows for _, rows, _ in members], job.device)
    return batch


def packed_params(rows: Sequence[int], device: torch.device) -> PackedSeqParams:
    """Say to Megatron which rows of a pack are a sequence."""
    bounds = list(itertools.accumulate(rows, initial=0))
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(rows),
        max_seqlen_kv=max(rows),
    )


# ---- prices --------------------------------------------------------------------------------------


def calibrated(job: Job) -> hcp.CostModel:
    """Fit prices on rank 0, to micro-batches of few and many rows, of one and of several sequences,
    at degrees 1 to all."""
    ranks, rows = job.ranks, job.args.max_tokens_per_rank
    degrees = [d for d in (1, 2, 4, 8, 16, 32) if d < ranks] + [ranks]
    cells = [
        Cell((size * degree // parts,) * parts, degree)
        for degree in degrees
        for size, parts in ((rows, 1), (rows, 4), (rows, 32), (rows // 4, 1))
        if ranks % degree == 0
    ]
    trainer = Trainer(job.args, tuned(job.args), hcp.CostModel(), job.groups, job.device)
    steps = {str(i): list(MicroBatches(step_of(trainer, cell))) for i, cell in enumerate(cells)}
    job.gradients.zero()
    times = by_turns(
        {name: partial(run_micro_batches, job.model, step, 1) for name, step in steps.items()},
        job.device,
        lambda run: timed(run, job.device),
        CALIBRATION_ROUNDS,
    )
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        points = [
            Point(cell.lengths, cell.degree, False, times[str(i)]) for i, cell in enumerate(cells)
        ]
        result = fit(points, job.args.cp_comm_type)
        errors = result.errors(points)
        print(
            f"prices from {len(points)} micro-batches, of which the fit is off by "
            f"{errors[len(errors) // 2]:.1%} (median), {errors[-1]:.1%} (most)"
        )
        found = [result.cost]
    dist.broadcast_object_list(found, src=0)
    cost: hcp.CostModel = found[0]
    return cost


# ---- comparison ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contestant:
    micro_batches: int
    step: Callable[[], Tensor]


@dataclass
class Totals:
    """What one contestant took, over batches."""

    seconds: float = 0.0
    micro_batches: int = 0
    memory: float = 0.0
    """The most, in GiB."""
    distance: float = 0.0


ALONE = Family(ONE, "one sequence on all ranks", 1, 1, lambda random: [])
OF_FILE = "lengths of a file"


def own_family(args: argparse.Namespace) -> list[Family]:
    """The family of --lengths, if they are given."""
    if args.lengths is None:
        return []
    return [Family(Path(args.lengths).name, OF_FILE, 1, 1, lambda random: args.own)]


def compare(job: Job, family: Family, engines: Sequence[Engine]) -> None:
    args = job.args
    batches = batches_of(job, family)
    totals: dict[str, Totals] = {}
    left_out = dict(job.refused)
    for number, lengths in enumerate(batches):
        contestants = dict(contestants_of(job, lengths, number, engines))
        checked = check(job, family, contestants, left_out)
        times = by_turns(
            {name: contestants[name].step for name in checked},
            job.device,
            lambda run: timed(run, job.device),
            args.rounds,
            warm=True,
        )
        for name, (distance, memory) in checked.items():
            total = totals.setdefault(name, Totals())
            total.seconds += times[name]
            total.micro_batches += contestants[name].micro_batches
            total.distance = max(total.distance, distance)
            total.memory = max(total.memory, memory)
    tokens = sum(map(sum, batches))
    sizes = f"{sum(map(len, batches))} sequences, {tokens} tokens, longest {max(map(max, batches))}"
    tell(f"\n{family.name}  {family.says}: {sizes}")
    totals = {name: total for name, total in totals.items() if name not in left_out}
    print_table(job, family, totals, tokens, left_out)


def batches_of(job: Job, family: Family) -> list[list[int]]:
    args = job.args
    if family is ALONE:
        return [[args.tokens]] * args.batches
    most = job.ranks * args.max_tokens_per_rank
    if family.says == OF_FILE:
        cut = sum(length > most for length in args.own)
        if cut:
            tell(f"{family.name}: {cut} of {len(args.own)} lengths are cut to {most} tokens")
        own = [min(length, most) for length in args.own]
        return filled_batches(own, tokens=args.tokens, batches=args.batches, seed=args.seed)
    return list(
        drawn(
            family,
            ranks=job.ranks,
            capacity=args.max_tokens_per_rank,
            tokens=args.tokens,
            batches=args.batches,
            seed=args.seed,
        )
    )


def contestants_of(
    job: Job, lengths: list[int], batch: int, engines: Sequence[Engine]
) -> Iterator[tuple[str, Contestant]]:
    tokens = sum(lengths)
    plans = {name: way.config.plan(lengths, job.ranks, way.cost) for name, way in job.ways.items()}
    if STATIC in job.args.hcp and len(lengths) > 1:
        plans[STATIC] = packed_static(job, lengths)
    if "wave greedy" in job.args.hcp and len(lengths) > 1 and job.ranks & (job.ranks - 1) == 0:
        capacity, cost = job.args.max_tokens_per_rank, job.ways["hcp tuned"].cost
        greedy = wave_greedy(lengths, job.ranks, capacity, cost)
        request = {"ranks": job.ranks, "max_tokens_per_rank": capacity, "cost": cost}
        plans["wave greedy"] = plan_of(greedy, lengths, request)
    for name, plan in plans.items():
        if name != "hcp" and name not in job.args.hcp:
            continue
        way = job.ways.get(name, job.ways["hcp tuned" if name in FITTED else "hcp"])
        own = dispatched(job, way.config, plan, lengths, batch)
        yield name, Contestant(len(own), partial(run_step, job, job.model, own, tokens))
    if engines:
        packs = packed_in_order(job, lengths, batch)
        for engine in engines:
            step = partial(engine_step, job, engine, packs, tokens)
            yield engine.name, Contestant(len(packs), step)


def packed_static(job: Job, lengths: list[int]) -> hcp.Plan:
    """Return packed static CP: next-fit in the order of arrival, at one degree."""
    ranks, capacity = job.ranks, job.args.max_tokens_per_rank
    degree = static_degree(lengths, ranks, capacity)
    request = {"ranks": ranks, "max_tokens_per_rank": capacity, "cost": job.ways["hcp"].cost}
    return plan_of(next_fit_at(degree, lengths, ranks, capacity), lengths, request)


def check(
    job: Job, family: Family, contestants: dict[str, Contestant], left_out: dict[str, str]
) -> dict[str, tuple[float, float]]:
    """Run each contestant once. Return how far its gradients are from the first's, and its memory.

    Where a loss or gradients are off by more than rounding, hcp's contestants end the run, and
    Transformer Engine's are left out, with the reason in ``left_out``.
    """
    dtype = next(job.model.parameters()).dtype
    most_loss, most_distance = TOLERANCES[dtype]
    found: dict[str, tuple[float, float]] = {}
    first: tuple[float, Tensor] | None = None
    for name, contestant in contestants.items():
        try:
            loss, memory = with_memory(job, name, contestant.step)
        except Exception as error:  # whatever Transformer Engine refuses, on all ranks alike
            if is_full(error):
                leave_full(f"{family.name}: {name}", job.args.tokens, error)
            if not name.startswith("te "):
                raise
            left_out[name] = reason_of(error)
            continue
        dist.all_reduce(loss)
        weights = attention_gradients(job.model)
        first = (loss.item(), weights) if first is None else first
        distance = float((weights - first[1]).norm() / first[1].norm())
        loss_distance = abs(loss.item() / first[0] - 1)
        if not (loss_distance <= most_loss and distance <= most_distance):
            text = (
                f"{family.name}: the loss of {name} is {loss.item()}, expected {first[0]} within "
                f"{most_loss:.1e}; its gradients are off by {distance:.3f}, expected <= "
                f"{most_distance}"
            )
            if not name.startswith("te "):
                raise SystemExit(text)
            left_out[name] = text
            continue
        found[name] = distance, slowest(memory, job.device)
    return found


def with_memory(job: Job, name: str, step: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """Run a contestant's step. Return its loss and the most memory that it took, in GiB, with what
    it took outside torch's allocator up to now: memory that peers read, NCCL's buffers."""
    if job.device.type != "cuda":
        return step(), 0.0
    before = outside_torch(job.device)
    torch.cuda.reset_peak_memory_stats()
    loss = step()
    torch.cuda.synchronize()
    taken = outside_torch(job.device) - before
    key = "hcp" if name in OWN else name
    job.outside[key] = job.outside.get(key, 0.0) + taken
    return loss, torch.cuda.max_memory_allocated() / 2**30 + job.outside[key]


def attention_gradients(model: nn.Module) -> Tensor:
    grads = (p.grad for name, p in model.named_parameters() if name.endswith("linear_qkv.weight"))
    return torch.cat([grad.float().flatten() for grad in grads if grad is not None])


# ---- the report ----------------------------------------------------------------------------------


def tell(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def print_head(job: Job, seconds: float) -> None:
    parameters = sum(p.numel() for p in job.model.parameters())
    args = job.args
    options = [name for name in ("recompute", "linear_loss") if getattr(args, name)]
    tell(
        f"{job.ranks} x {device_name(job.device)}, torch {torch.__version__}, Megatron-Core "
        f"{require_megatron()}, {engine_version()}, hcp {hcp.__version__}\n"
        f"{parameters / 1e6:.1f} M parameters, {args.num_layers} layers of {args.hidden_size}, "
        f"heads {args.num_attention_heads}:{args.num_query_groups}, at most "
        f"{args.max_tokens_per_rank} rows a rank; {', '.join([*options, 'rows'])} by "
        f"{job.groups.transport.name}; ready after {seconds:.0f} s"
    )
    for name, way in job.ways.items():
        prices = zip(PRICES, way.cost.prices, strict=True)
        shown = "  ".join(f"{price} {value}" for price, value in prices if value)
        tell(f"{name}: {way.config.cp_comm_type}, planned by {shown}")


def engine_version() -> str:
    try:
        import transformer_engine
    except ImportError:
        return "no Transformer Engine"
    return f"Transformer Engine {transformer_engine.__version__}"


def print_table(
    job: Job, family: Family, totals: dict[str, Totals], tokens: int, left_out: dict[str, str]
) -> None:
    tell(
        f"{'':14} {'micro-batches':>13} {'tokens/s':>10} {'hcp /':>7} {'GiB':>7} {'hcp /':>7} "
        f"{'gradients off':>14}"
    )
    own = totals["hcp"]
    for name, total in totals.items():
        memory = own.memory / total.memory if total.memory else 0.0
        tell(
            f"{name:14} {total.micro_batches:13} {tokens / total.seconds:10.0f} "
            f"{total.seconds / own.seconds:7.2f} {total.memory:7.1f} {memory:7.2f} "
            f"{total.distance:14.1e}"
        )
        job.args.json.add(
            {
                "family": family.name,
                "contestant": name,
                "micro_batches": total.micro_batches,
                "tokens_per_second": round(tokens / total.seconds),
                "hcp_over_it": round(total.seconds / own.seconds, 3),
                "memory_gib": round(total.memory, 2),
                "gradients_off": total.distance,
            }
        ) if dist.get_rank() == 0 else None
    for name, why in left_out.items():
        tell(f"{name:14} left out: {why}")
        if dist.get_rank() == 0:
            job.args.json.add({"family": family.name, "contestant": name, "left_out": why})
    rivals = {name: total for name, total in totals.items() if name.startswith("te ")}
    for name in job.ways if rivals else ():
        if name in totals:
            print_verdict(job, family, name, totals[name], rivals)
    tell(f"{family.name}: {verdict(totals)}")


def verdict(totals: Mapping[str, Totals]) -> str:
    """Say in a sentence how fast hcp is over packed static CP, and over Transformer Engine."""
    engines = {name: total for name, total in totals.items() if name.startswith("te ")}
    others = {"packed static CP on hcp's engine": totals[STATIC]} if STATIC in totals else {}
    if engines:
        best = min(engines, key=lambda name: engines[name].seconds)
        others[f"Transformer Engine ({best})"] = engines[best]
    own = totals["hcp"].seconds
    speeds = (f"{each.seconds / own:.2f} times as fast as {name}" for name, each in others.items())
    return f"hcp computes these batches {' and '.join(speeds) or 'alone: nothing is compared'}"


def print_verdict(
    job: Job, family: Family, name: str, own: Totals, rivals: dict[str, Totals]
) -> None:
    best = min(rivals, key=lambda rival: rivals[rival].seconds)
    ratio, memory = rivals[best].seconds / own.seconds, own.memory / rivals[best].memory
    aims = None if family is ALONE else TARGETS.get(job.ranks)
    aim = "" if aims is None else f" (aim {aims[family.name in ('P3', 'P4')]:g})"
    tell(
        f"{family.name}: {name} / {best}: tokens per second {ratio:.2f}{aim}, memory {memory:.2f} "
        f"(aim {MEMORY_TARGET:g} at most)"
    )


# ---- the ladder ----------------------------------------------------------------------------------

RUNG_COLUMNS = {"tokens": "d", "contestant": "", "tokens/s": ",.0f", "GiB": ".1f", "loss": ".4f"}
RUNG_HEAD = f"| {' | '.join(RUNG_COLUMNS)} |\n|{'---|' * len(RUNG_COLUMNS)}"


def rung_line(row: Mapping[str, Any]) -> str:
    return f"| {' | '.join(format(row[name], form) for name, form in RUNG_COLUMNS.items())} |"


def climb_one(
    args: argparse.Namespace, device: torch.device, collection: ProcessGroupCollection
) -> None:
    """Run the contestant of --climb on ever longer sequences."""
    length, base = args.tokens, outside_torch(device)
    first = hcp.ProcessGroups.from_existing(collection, peer_buffer_bytes=2**20)
    torch.manual_seed(args.seed)
    model = build_model(args, device, collection, with_hcp=True)
    gradients = Gradients(model, first)
    first.close()
    name, engine = args.climb, None
    job = Job(args, device, collection, first, model, gradients, {})
    if name in ENGINES:
        args.te = [name]
        (engine,) = transformer_engines(job)

    def rung(tokens: int, *, limited: bool = True) -> None:
        set_length(args, tokens)
        if engine is None:
            groups = connected(args, collection, [ONE])
            config = Config(args.max_tokens_per_rank) if name == "hcp" else tuned(args)
            own = replace(job, groups=groups, ways={name: Way(config, sizes_cost(args, device))})
            plan = config.plan([args.tokens], own.ranks, own.ways[name].cost)
            batches = dispatched(own, config, plan, [args.tokens], 0)
            step = partial(run_step, own, model, batches, args.tokens)
        else:
            batches = packed_in_order(job, [args.tokens], 0)
            step = partial(engine_step, job, engine, batches, args.tokens)
        if limited and args.memory_gib is not None:
            limit_memory(device, args.memory_gib)
        job.outside["hcp" if engine is None else name] = outside_torch(device) - base
        loss, memory = with_memory(job, name, step)
        seconds = slowest(timed(step, device), device)
        dist.all_reduce(loss)
        if engine is None:
            groups.close()
        row = {
            "tokens": args.tokens,
            "contestant": name,
            "tokens/s": args.tokens / seconds,
            "GiB": slowest(memory, device),
            "loss": loss.item(),
        }
        if limited and dist.get_rank() == 0:
            args.json.add(row)
            print(rung_line(row), flush=True)

    try:
        rung(min(length, WARM_TOKENS), limited=False)
        args.tokens = length
        climb(args, device, rung)
    except RuntimeError as error:
        if is_full(error):
            leave_full(name, args.tokens, error)
        raise


if __name__ == "__main__":
    sys.exit(main())
