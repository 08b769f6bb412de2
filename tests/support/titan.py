"""Run torchtitan on CPUs, for tests. It asks a device module for functions that torch.cpu lacks.

Import this before torchtitan. TITAN_ON_GPU=1 in the environment leaves torchtitan its GPUs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._utils
import torch.distributed
from torch import Tensor

CPU = SimpleNamespace(
    set_device=lambda device: None,
    device_count=lambda: 1,
    current_device=lambda: 0,
    get_device_name=lambda device=None: "cpu",
    get_device_properties=lambda device=None: SimpleNamespace(total_memory=1 << 30, name="cpu"),
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
    memory_stats=lambda device=None: {},
    synchronize=lambda: None,
)
_module_of: Any = torch._utils._get_device_module
ON_GPU = os.environ.get("TITAN_ON_GPU") == "1"
if not ON_GPU:
    torch._utils._get_available_device_type = lambda: "cpu"
vars(torch._utils)["_get_device_module"] = lambda name: CPU if name == "cpu" else _module_of(name)

import torchtitan.tools.utils  # noqa: E402

torch._utils._get_device_module = _module_of
assert ON_GPU or torchtitan.tools.utils.device_type == "cpu", "torchtitan was imported before this"

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.tensor import DTensor, distribute_tensor  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import (  # noqa: E402
    TORCH_DTYPE_MAP,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.models import deepseek_v3, llama3, qwen3  # noqa: E402
from torchtitan.models.common import token_dispatcher  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts  # noqa: E402
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE  # noqa: E402

import hcp  # noqa: E402
from hcp._words import Scheduler  # noqa: E402
from hcp.integrations.torchtitan import (  # noqa: E402
    ContextParallelTrainer,
    ContextParallelValidator,
    PackedContextParallel,
)

VOCABULARY = 2048
IGNORE = -100


class Tokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Loader(BaseDataLoader):
    """Rows of packed documents of any length. Row i is equal on all ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        rows: int = 1000
        infinite: bool = False
        shortest: int = 1
        longest: int = 64
        """The most tokens of a document. The end of the row cuts the last one."""

    def __init__(
        self,
        config: Any,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        tokenizer: Any = None,
        **kwargs: Any,
    ) -> None:
        self.config, self.seq_len, self.size = config, seq_len, local_batch_size
        self.first, self.stride, self.loaded = dp_rank, dp_world_size, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield rows r, r + n, ... on rank r of n. The last batch may be smaller."""
        own = range(self.first, self.config.rows, self.stride)
        for start in range(self.loaded, len(own), self.size):
            rows = [self.row(i) for i in own[start : start + self.size]]
            self.loaded = start + self.size
            tokens, positions, labels = (torch.stack(column) for column in zip(*rows, strict=True))
            yield {"input": tokens, "positions": positions}, labels

    def row(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(i)
        tokens = torch.randint(VOCABULARY, (self.seq_len + 1,), generator=generator)
        labels, positions = tokens[1:].clone(), torch.zeros(self.seq_len, dtype=torch.int64)
        start = 0
        while start < self.seq_len:
            bounds = self.config.shortest, self.config.longest + 1
            length = int(torch.randint(*bounds, (), generator=generator))
            end = min(self.seq_len, start + length)
            positions[start:end] = torch.arange(end - start)
            labels[end - 1] = IGNORE
            start = end
        return tokens[:-1], positions, labels

    def state_dict(self) -> dict[str, Any]:
        return {"loaded": self.loaded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["loaded"]


MODELS = {"llama3": llama3.model_registry, "qwen3": qwen3.model_registry}


def spec_of(
    family: str = "llama3", flavor: str = "debugmodel", backend: str = "varlen", layers: int = 2
) -> Any:
    spec = MODELS[family](flavor, attn_backend=backend, converters=[PackedContextParallel.Config()])
    del spec.model.layers[layers:]
    return spec


def experts_spec(
    family: str, *, fused_rope: bool = True, dense_layers: int = 1, rope: Any = None
) -> Any:
    """A toy model of two layers with experts, of a family that has them: one of grouped-query
    attention, and one of multi-head latent attention whose first layers are dense."""
    options: dict[str, Any] = {
        "n_layers": 2,
        "dim": 256,
        "n_heads": 4,
        "num_experts": 4,
        "moe_hidden_dim": 32,
    }
    options |= {"attn_backend": "varlen", "moe_comm_backend": "standard"}
    if family == "qwen3":
        spec = qwen3.model_registry("debugmodel_moe", attn_backend="varlen")
        rope = rope or CosSinRoPE.Config(dim=16, max_seq_len=4096)
        layers = qwen3._build_qwen3_moe_layers(
            **options, n_kv_heads=2, head_dim=16, top_k=2, rope=rope
        )
    else:
        spec = deepseek_v3.model_registry("debugmodel", attn_backend="varlen")
        yarn: dict[str, Any] = {"scaling": "yarn", "rope_factor": 4.0}
        rope = rope or ComplexRoPE.Config(dim=8, max_seq_len=4096, **yarn)
        layers = deepseek_v3._build_dsv3_layers(
            **options,
            n_dense_layers=dense_layers,
            q_lora_rank=0,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=20,
            mscale=0.7,
            dense_hidden_dim=64,
            num_shared_experts=1,
            router_top_k=2,
            router_score_func="sigmoid",
            non_blocking_capacity_factor=None,
            rope=rope,
        )
    spec.model.layers[:] = layers
    PackedContextParallel.Config(fused_rope=fused_rope).build().convert(spec.model)
    return spec


def _grouped_mm(self: Any, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
    ends = [0, *offs.tolist()]
    parts = [A[a:b] @ B_t[e] for e, (a, b) in enumerate(itertools.pairwise(ends))]
    return torch.cat(parts)


@contextlib.contextmanager
def experts_in_float32() -> Iterator[None]:
    """Return a context inside which experts compute in float32: torchtitan's compute in bfloat16,
    whatever the parameters have, in which runs of other plans differ by rounding."""
    narrow, own = torch.Tensor.bfloat16, GroupedExperts._grouped_mm
    vars_of: Any = torch.Tensor, GroupedExperts
    vars_of[0].bfloat16, vars_of[1]._grouped_mm = torch.Tensor.float, _grouped_mm
    try:
        yield
    finally:
        vars_of[0].bfloat16, vars_of[1]._grouped_mm = narrow, own


class _Wide:
    """Stands in for torch in a module of torchtitan that rounds to float32."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Return a context inside which models, FSDP and experts compute in float64, whatever
    torchtitan rounds to. Build models inside of it."""
    own = torch.Tensor.double
    with contextlib.ExitStack() as stack:
        for name in ("bfloat16", "float"):
            stack.enter_context(mock.patch.object(torch.Tensor, name, own))
        stack.enter_context(mock.patch.object(GroupedExperts, "_grouped_mm", _grouped_mm))
        stack.enter_context(mock.patch.object(token_dispatcher, "torch", _Wide()))
        stack.enter_context(mock.patch.dict(TORCH_DTYPE_MAP, float32=torch.float64))
        yield


def draw_weights(model: Any) -> None:
    """Draw weights that are equal on any number of ranks. On CPUs those of DTensors are not."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = 0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            whole += 1.0 if "norm" in name else 0.0
            whole = whole.to(parameter.dtype)
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                whole = distribute_tensor(whole, mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(whole)


def _whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


class CpuTrainer(ContextParallelTrainer):
    """A trainer over Gloo, which lacks the sum with a factor that FSDP2 asks for."""

    @dataclass(kw_only=True, slots=True)
    class Config(ContextParallelTrainer.Config):
        pass

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for module in self.model_parts[0].modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def config_of(
    context_parallel: hcp.Config,
    *,
    spec: Any = None,
    steps: int = 20,
    local_batch_size: int = 1,
    global_batch_size: int = 4,
    seq_len: int = 64,
    loader: Any = None,
    validation_rows: int = 0,
    parallelism: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Configure a small job. `validation_rows`: rows to validate with after steps 1, 10, 20 ..."""
    return CpuTrainer.Config(
        **{
            "model_spec": spec or spec_of(),
            "context_parallel": context_parallel,
            "tokenizer": Tokenizer.Config(),
            "dataloader": loader or Loader.Config(),
            "loss": CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
            "optimizer": default_adamw(lr=1e-3),
            "lr_scheduler": LRSchedulersContainer.Config(warmup_steps=2),
            "parallelism": ParallelismConfig(
                **{"spmd_backend": "partial_dtensor", **(parallelism or {})}
            ),
            "training": TrainingConfig(
                local_batch_size=local_batch_size,
                global_batch_size=global_batch_size,
                seq_len=seq_len,
                steps=steps,
                **{
                    "disable_cuda_graphs": True,
                    "mixed_precision_param": "float32",
                    **(training or {}),
                },
            ),
            "metrics": MetricsProcessor.Config(log_freq=1),
            "validator": ContextParallelValidator.Config(
                enable=validation_rows > 0,
                freq=10,
                steps=-1,
                dataloader=Loader.Config(rows=validation_rows),
            ),
            **options,
        }
    )


class Run:
    """A job, and the values that it logged."""

    def __init__(self, config: Any) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.extra: list[dict[str, float]] = []
        """What hcp gave to torchtitan's own logger in each step."""
        self.validations: list[float] = []
        # Under what hcp puts around it.
        with mock.patch.object(
            MetricsProcessor, "log", lambda _, *given, **named: self._log(*given, **named)
        ):
            self.trainer = config.build()
        draw_weights(self.trainer.model_parts[0])
        processor = self.trainer.metrics_processor
        processor.log_validation = lambda loss, step, **_: self.validations.append(loss)

    def _log(
        self,
        step: int,
        avg_loss: float,
        max_loss: float,
        grad_norm: float,
        extra_metrics: Any = None,
    ) -> None:
        self.losses.append(avg_loss)
        self.norms.append(grad_norm)
        self.extra.append({k: v for k, v in extra_metrics.items() if k.startswith("hcp/")})

    def train(self) -> Run:
        self.trainer.train()
        return self

    def first_gradients(self) -> dict[str, Any]:
        """Return the whole gradients of the first step by name, before they are clipped."""
        trainer = self.trainer
        inputs, labels = next(trainer.batch_generator(trainer.dataloader))
        tokens = (labels != IGNORE).sum()
        torch.distributed.all_reduce(tokens)
        tokens //= trainer.parallel_dims.tp  # whose ranks load the same
        trainer.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=tokens)
        return {name: _whole(p.grad) for name, p in self._parameters()}

    def weights(self) -> dict[str, Any]:
        """Return the whole parameters by name."""
        return {name: _whole(p.detach()) for name, p in self._parameters()}

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        """Yield parameters by the names that they have without checkpointed layers."""
        for name, parameter in self.trainer.model_parts[0].named_parameters():
            yield name.replace("_checkpoint_wrapped_module.", ""), parameter

    def expert_biases(self) -> list[Tensor]:
        """Return the biases by which torchtitan balances the experts of each layer."""
        model = self.trainer.model_parts[0]
        found = [b for name, b in model.named_buffers() if name.endswith("expert_bias_E")]
        return [_whole(b).clone() for b in found]

    def expert_counts(self) -> list[Tensor]:
        """Return the tokens that this rank has given to each expert since the last update, by
        layer."""
        model = self.trainer.model_parts[0]
        found = [b for name, b in model.named_buffers() if name.endswith("tokens_per_expert_E")]
        return [(b.to_local() if isinstance(b, DTensor) else b).clone() for b in found]

    def close(self) -> None:
        self.trainer.close()


def options(limit: int, scheduler: Scheduler = "dynamic_cp", **others: Any) -> hcp.Config:
    return hcp.Config(limit, sequence_packing_scheduler=scheduler, **others)
