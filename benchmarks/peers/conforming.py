"""Libraries of context parallelism that `conformance.py` asks for the same attention.

A contestant is a function that gets a :class:`Job` on every rank. It chooses the rows of the pack
that this rank computes, and calls its library on them as the library's documentation says::

    def my_library(job):
        rows = job.zigzag()                        # or any rows: each token on one rank
        q, k, v = job.cut(rows)                    # leaves, (rows, heads, size), on job.device
        if job.case.sinks:
            raise NotTaken("my_library.attention has no argument for sinks")
        out = my_library.attention(q, k, v, group=torch.distributed.group.WORLD,
                                   softmax_scale=job.case.softmax_scale)
        return Part(rows, out, (q, k, v))

    register(Contestant("my library", my_library, package="my-library", module="my_library",
                        url="https://example.org/my-library", devices=("cuda",)))

`python benchmarks/conformance.py --with FILE.py` reads a file of such lines. The program runs the
backward, gathers the parts and compares. Raise NotTaken for what the library documents that it does
not have, before its first call. What the library itself raises is reported with its words.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common.attention_cases import NAMES, Case
from common.machine import package_version
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import hcp
from peers import shipped

FLOATING = ("float64", "float32", "bfloat16")
BLOCK = 128
"""Tokens of a block of FlexAttention's masks."""


class NotTaken(Exception):
    """A contestant's interface has no argument for something that the case asks for."""


@dataclass(frozen=True)
class Part:
    """What one rank computed."""

    rows: Tensor
    """The rows of the pack, int64 on the CPU."""
    out: Tensor
    """(rows, heads, value size)"""
    leaves: tuple[Tensor, ...]
    """Query, key and value, and the sinks if the case has them."""


@dataclass(frozen=True)
class Job:
    """One case on one rank."""

    case: Case
    rank: int
    ranks: int
    device: torch.device
    whole: dict[str, Tensor]
    """`query`, `key`, `value`, `grad`, (rows of the pack, heads, size), and `sinks`, (heads,)."""
    gradients: bool = True

    def cut(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of these rows, as leaves."""
        query, key, value = (self._leaf(self.whole[name][rows.to(self.device)]) for name in NAMES)
        return query, key, value

    def sinks(self) -> Tensor | None:
        return self._leaf(self.whole["sinks"].clone()) if self.case.sinks else None

    def _leaf(self, x: Tensor) -> Tensor:
        return x.detach().requires_grad_(self.gradients)

    def zigzag(self) -> Tensor:
        """The rows of chunks r and 2N - 1 - r of the 2N chunks of every sequence."""
        chunks = 2 * self.ranks
        uneven = [n for n in self.case.rows if n % chunks]
        if uneven:
            raise NotTaken(f"lengths have to be multiples of {chunks}")
        parts = []
        for start, rows in zip(self.case.starts, self.case.rows, strict=True):
            size = rows // chunks
            for chunk in (self.rank, chunks - 1 - self.rank):
                parts.append(torch.arange(start + chunk * size, start + (chunk + 1) * size))
        return torch.cat(parts)

    def refuse(self, **reasons: str) -> None:
        """Raise NotTaken for the first of what the case asks for that has a reason here."""
        case = self.case
        asked = {
            "documents": len(case.lengths) > 1,
            "padding": case.padded is not None,
            "full": not case.causal,
            "window": case.window is not None,
            "sinks": case.sinks,
            "scale": case.scale is not None,
            "grouped": case.heads != case.kv_heads,
            "value_dim": case.value_dim is not None,
        }
        for name, reason in reasons.items():
            if asked[name]:
                raise NotTaken(reason)


@dataclass(frozen=True)
class Contestant:
    name: str
    attend: Callable[[Job], Part]
    package: str
    """Its name for pip, whose version the table shows."""
    module: str
    url: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = FLOATING
    composite: bool = False
    """Whether the number of ranks has to be a product."""

    def obstacle(self, device: str, ranks: int) -> str | None:
        """Return the reason why it cannot run here, or None."""
        if self.version is None:
            return f"not installed: pip install {self.package} ({self.url})"
        if device not in self.devices:
            return f"needs {' or '.join(self.devices)}"
        if self.composite and _factor(ranks) == ranks:
            return f"needs a number of ranks that is a product, such as 4, not {ranks}"
        return None

    @property
    def version(self) -> str | None:
        """None where it cannot be imported."""
        if not _importable(self.module):
            return None
        return hcp.__version__ if self.module == "hcp" else package_version(self.package) or "?"


CONTESTANTS: dict[str, Contestant] = {}


def register(contestant: Contestant) -> None:
    CONTESTANTS[contestant.name] = contestant


def _importable(module: str) -> bool:
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError, AssertionError):
        return False  # the last three: a library that it loads is absent
    return True


def _factor(ranks: int) -> int:
    """Return the smallest factor above 1, or the number itself."""
    return next((d for d in range(2, ranks) if ranks % d == 0), ranks)


# ---- hcp -----------------------------------------------------------------------------------------


def _hcp(comm_type: Any) -> Callable[[Job], Part]:
    def attend(job: Job) -> Part:
        case = job.case
        groups = hcp.build_process_groups()
        plan = hcp.plan(
            case.lengths,
            ranks=job.ranks,
            max_tokens_per_rank=sum(case.lengths),
            min_degree=job.ranks,
        )
        inner = _factor(job.ranks)
        cp = hcp.ContextParallelHandler(
            plan,
            0,
            groups.transport,
            comm_types=(comm_type,),
            hierarchical_context_parallel_sizes=(
                (inner, job.ranks // inner) if comm_type == "a2a+p2p" else ()
            ),
        )
        spans = [torch.arange(start, start + n) + case.starts[s] for s, start, n in cp.layout.spans]
        rows = torch.cat([torch.arange(0), *spans])
        q, k, v = job.cut(rows)
        sinks = job.sinks()
        out = cp.attention(
            *(q, k, v),
            causal=case.causal,
            window_size=(-1 if case.window is None else case.window, -1),
            softmax_scale=case.softmax_scale,
            sinks=sinks,
        )
        return Part(rows, out, (q, k, v) if sinks is None else (q, k, v, sinks))

    return attend


for _comm_type in hcp.COMM_TYPES:
    register(
        Contestant(
            f"hcp {_comm_type}",
            _hcp(_comm_type),
            package="hcp-torch",
            module="hcp",
            url="this repository",
            composite="+" in _comm_type,
        )
    )


# ---- PyTorch's prototypes ------------------------------------------------------------------------

_EXPERIMENTAL = "torch.distributed.tensor.experimental._context_parallel"


def _batched(x: Tensor) -> Tensor:
    """(1, heads, rows, size) of (rows, heads, size)."""
    return x.transpose(0, 1).unsqueeze(0)


def torch_sdpa(job: Job) -> Part:
    """`context_parallel` around scaled_dot_product_attention, as its tutorial has it. It chooses
    the rows, and cuts them out of what it is given. Key heads are repeated, as it has no groups."""
    context_parallel = importlib.import_module(_EXPERIMENTAL).context_parallel
    case = job.case
    job.refuse(
        documents="is_causal alone: no mask of documents",
        padding="is_causal alone: no mask of padding",
        window="is_causal alone: no window",
        sinks="scaled_dot_product_attention has no argument for sinks",
    )
    mesh = init_device_mesh(job.device.type, (job.ranks,))
    rows = torch.arange(sum(case.rows), device=job.device)
    with context_parallel(mesh, buffers=[rows], buffer_seq_dims=[0], no_restore_buffers={rows}):
        q, k, v = job.cut(rows.cpu())
        groups = case.heads // case.kv_heads
        query, key, value = map(_batched, (q, *(x.repeat_interleave(groups, 1) for x in (k, v))))
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=case.causal, scale=case.scale
        )
        out = out.squeeze(0).transpose(0, 1)
        if job.gradients:  # inside of the context, as it says
            out.backward(job.whole["grad"][rows].to(out.dtype))
    return Part(rows.cpu(), out.detach(), (q, k, v))


def torch_flex(job: Job) -> Part:
    """On CPUs nothing is compiled: it would take a minute for each case."""
    if job.device.type == "cuda":
        return _torch_flex(job)
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    with torch.compiler.set_stance("force_eager"):
        return _torch_flex(job)


def _torch_flex(job: Job) -> Part:
    """FlexAttention under `_ContextParallel`, as torchtitan uses it: keys are gathered, the mask of
    blocks is cut. The pack is filled up to whole blocks; rows that fill it are a document."""
    experimental = importlib.import_module(_EXPERIMENTAL)
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    case = job.case
    job.refuse(sinks="flex_attention has no argument for sinks")
    total = -(-sum(case.rows) // (BLOCK * job.ranks)) * BLOCK * job.ranks
    mask = flex.create_block_mask(
        _visible(case, total, job.device), 1, 1, total, total, device=job.device
    )
    mesh = init_device_mesh(job.device.type, (job.ranks,))
    places = torch.arange(total, device=job.device)
    rows, mask = experimental._context_parallel_shard(mesh, [places, mask], [0, 2], None)
    real = rows.cpu()[rows.cpu() < sum(case.rows)]
    q, k, v = job.cut(real)
    filled = (functional.pad(x, (0, 0, 0, 0, 0, len(rows) - len(real))) for x in (q, k, v))
    style = experimental._ContextParallel
    attention = torch.compile(flex.flex_attention)
    module = style(2, style.AttentionType.FLEX)._apply(_Called(attention), mesh)
    out = module(
        *(_batched(x) for x in filled),
        block_mask=mask,
        scale=case.softmax_scale,
        enable_gqa=case.heads != case.kv_heads,
    )
    return Part(real, out.squeeze(0).transpose(0, 1)[: len(real)], (q, k, v))


class _Called(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *positional: Tensor, **options: Any) -> Tensor:
        return self.function(*positional, **options)


def _visible(case: Case, total: int, device: torch.device) -> Callable[..., Tensor]:
    """The mask of a pack for FlexAttention. Padding is in documents of its own."""
    document = torch.full((total,), len(case.lengths), dtype=torch.int64)
    for i, (start, tokens) in enumerate(zip(case.starts, case.lengths, strict=True)):
        document[start : start + tokens] = i
    document = document.to(device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = document[query] == document[key]
        if case.causal:
            visible = visible & (query >= key)
        if case.window is not None:
            visible = visible & (query - key <= case.window)
        return visible

    return sees


def torch_ring(job: Job) -> Part:
    """The ring inside `context_parallel`, with CPUs' operator, which that does not dispatch."""
    case = job.case
    job.refuse(
        full="the zigzag ring is causal",
        padding="is_causal alone: no mask of padding",
        window="is_causal alone: no window",
        sinks="the ring has no argument for sinks",
        scale="this adapter passes no scale",
        value_dim="its operator wants one head size",
    )
    if len(set(case.rows)) > 1:
        raise NotTaken("sequences have to be a batch of one length")
    rows = job.zigzag()
    q, k, v = job.cut(rows)
    keys, values = (x.repeat_interleave(case.heads // case.kv_heads, 1) for x in (k, v))
    cp: Any = len(case.rows)
    return Part(rows, shipped._of_templated_ring(cp)(q, keys, values), (q, k, v))


_TORCH: dict[str, Any] = {
    "package": "torch",
    "module": _EXPERIMENTAL,
    "url": "https://docs.pytorch.org/docs/stable/distributed.tensor.html",
}
register(Contestant("torch context_parallel (SDPA)", torch_sdpa, **_TORCH))
register(Contestant("torch context parallel (FlexAttention)", torch_flex, **_TORCH))
register(Contestant("torch's ring, on CPUs", torch_ring, devices=("cpu",), **_TORCH))


# ---- libraries for GPUs --------------------------------------------------------------------------


def _shipped(name: str) -> Callable[[Job], Part]:
    """Causal packs that fill their chunks, as `peers/shipped.py` calls them."""

    def attend(job: Job) -> Part:
        adapter = "this adapter passes causal packs alone, no"
        job.refuse(
            full="this adapter passes causal packs alone",
            padding=f"{adapter} padding",
            window=f"{adapter} window",
            sinks=f"{adapter} sinks",
            scale=f"{adapter} scale",
            value_dim="values need the heads' size",
        )
        reason = shipped.heads_obstacle(name, (job.case.heads, job.case.kv_heads), job.ranks)
        if reason is not None:
            raise NotTaken(reason)
        rows = job.zigzag()
        plan = hcp.plan(
            job.case.rows,
            ranks=job.ranks,
            max_tokens_per_rank=sum(job.case.rows),
            min_degree=job.ranks,
        )
        cp = hcp.ContextParallelHandler(plan, 0, hcp.build_process_groups().transport)
        starts = job.case.starts
        spans = [torch.arange(start, start + n) + starts[s] for s, start, n in cp.layout.spans]
        rows = torch.cat(spans)
        q, k, v = job.cut(rows)
        return Part(rows, shipped.attention_of(name, cp, "auto")(q, k, v), (q, k, v))

    return attend


register(
    Contestant(
        "ring-flash-attention, zigzag varlen",
        _shipped("ring_flash_attn"),
        package="ring-flash-attn",
        module="ring_flash_attn",
        url="https://github.com/zhuzilin/ring-flash-attention",
        devices=("cuda",),
        dtypes=("bfloat16",),
    )
)
for _name in shipped.TRANSFORMER_ENGINE:
    register(
        Contestant(
            f"Transformer Engine {_name.removeprefix('te_').replace('_fa4', ', FlashAttention-4')}",
            _shipped(_name),
            package="transformer-engine",
            module="transformer_engine.pytorch",
            url="https://github.com/NVIDIA/TransformerEngine",
            devices=("cuda",),
            dtypes=("bfloat16",),
        )
    )
