"""A stand-in for the package ``cudnn``: its graphs of attention, by the formula, on the CPU.

What it defines has the arguments of nvidia-cudnn-frontend 1.32, and refuses what cuDNN refuses. It
reads and writes tensors as cuDNN does: a sequence's rows lie at its offset in the memory that is
given, in the strides of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

TYPES = {
    "BFLOAT16": (torch.bfloat16,),
    "HALF": (torch.float16,),
    "DOUBLE": (torch.float64,),
    "FLOAT": (torch.float32, torch.float64),
    "INT32": (torch.int32,),
    "INT64": (torch.int64,),
}


class NotSupportedError(Exception):
    """``cudnn.cudnnGraphNotSupportedError``."""


class Described:
    """A tensor of a graph."""

    def __init__(self, dim: list[int], stride: list[int], data_type: str, uid: int) -> None:
        self.dim, self.stride, self.data_type, self.uid = dim, stride, data_type, uid
        self.offsets: Described | None = None
        self.is_output = False

    def set_uid(self, uid: int) -> Described:
        self.uid = uid
        return self

    def set_output(self, value: bool) -> Described:
        self.is_output = value
        return self

    def set_dim(self, dim: list[int]) -> Described:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Described:
        self.stride = stride
        return self

    def set_data_type(self, data_type: str) -> Described:
        self.data_type = data_type
        return self

    def set_ragged_offset(self, offsets: Described) -> Described:
        self.offsets = offsets
        return self


class Graph:
    """``cudnn.pygraph``."""

    built: ClassVar[list[Graph]] = []

    def __init__(
        self, *, io_data_type: str, intermediate_data_type: str, compute_data_type: str, handle: Any
    ) -> None:
        assert (intermediate_data_type, compute_data_type) == ("FLOAT", "FLOAT")
        self.io_data_type = io_data_type
        self.tensors: list[Described] = []
        self.ports: dict[str, Described] = {}
        self.options = SimpleNamespace()
        self.calls: list[dict[int, Tensor]] = []
        self.steps: list[str] = []

    def tensor(self, *, dim: list[int], stride: list[int], data_type: str, uid: int) -> Described:
        made = Described(dim, stride, data_type, uid)
        self.tensors.append(made)
        return made

    def sdpa(self, *, q: Any, k: Any, v: Any, generate_stats: bool, **options: Any) -> list[Any]:
        assert generate_stats is True
        return self._node({"q": q, "k": k, "v": v}, ("out", "stats"), **options)

    def sdpa_backward(
        self,
        *,
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        dO: Any,
        stats: Any,
        max_total_seq_len_q: int,
        max_total_seq_len_kv: int,
        use_deterministic_algorithm: bool,
        **options: Any,
    ) -> list[Any]:
        given = {"q": q, "k": k, "v": v, "out": o, "grad_out": dO, "stats": stats}
        results = self._node(given, ("grad_q", "grad_k", "grad_v"), **options)
        self.options.totals = max_total_seq_len_q, max_total_seq_len_kv
        self.options.deterministic = use_deterministic_algorithm
        return results

    def _node(
        self,
        given: dict[str, Described],
        results: tuple[str, ...],
        *,
        attn_scale: float,
        use_padding_mask: bool,
        seq_len_q: Described,
        seq_len_kv: Described,
        diagonal_alignment: str,
        diagonal_band_left_bound: int | None,
        diagonal_band_right_bound: int | None,
    ) -> list[Described]:
        assert type(attn_scale) is float
        assert use_padding_mask
        made = {name: self.tensor(dim=[], stride=[], data_type="", uid=-1) for name in results}
        self.ports = {**given, **made}
        self.sizes = seq_len_q, seq_len_kv
        left, right = diagonal_band_left_bound, diagonal_band_right_bound
        self.options = SimpleNamespace(
            scale=attn_scale, alignment=diagonal_alignment, left=left, right=right
        )
        return list(made.values())

    def validate(self) -> None:
        self.steps.append("validate")
        numbers = [x.uid for x in self.tensors]
        assert min(numbers) >= 0
        assert len({*numbers}) == len(numbers)
        sequences, _, longest, size = self.ports["q"].dim
        _, _, most_keys, value_size = self.ports["v"].dim
        assert all(x.dim == [sequences, 1, 1, 1] for x in self.sizes)
        assert all(x.data_type == "INT32" for x in self.sizes)
        assert (longest, most_keys) != (1, 1)
        if size % 8 or value_size % 8:
            raise NotSupportedError("hidden_dim should be multiple of 8")
        assert self.options.left is None or self.options.left > 0
        assert self.options.right is None or self.options.right >= 0
        for name, x in self.ports.items():
            assert x.is_output == (name.startswith("grad_") and name != "grad_out") or (
                "grad_out" not in self.ports and name in ("out", "stats")
            )
            assert x.stride[3] == 1
            assert x.offsets is not None
            assert (x.offsets.dim, x.offsets.data_type) == ([sequences + 1, 1, 1, 1], "INT64")
            assert x.data_type == ("FLOAT" if name == "stats" else self.io_data_type)
            assert x.dim[2] == (most_keys if name.endswith(("k", "v")) else longest)
            expected = {"stats": 1, "q": size, "k": size, "grad_q": size, "grad_k": size}
            assert x.dim[3] == expected.get(name, value_size)

    def build_operation_graph(self) -> None:
        self.steps.append("build_operation_graph")

    def create_execution_plans(self, modes: list[str]) -> None:
        assert modes == ["A"]
        self.steps.append("create_execution_plans")

    def deselect_engines(self, names: list[str]) -> None:
        assert not any(name in "eng6_k24=26" for name in names)

    def check_support(self) -> None:
        self.steps.append("check_support")

    def build_plans(self) -> None:
        assert self.steps == [
            "validate",
            "build_operation_graph",
            "create_execution_plans",
            "check_support",
        ]
        Graph.built.append(self)

    def get_workspace_size(self) -> int:
        return 64 * len(self.ports)

    def execute(self, given: dict[int, Tensor], workspace: Tensor, *, handle: Any) -> None:
        assert self in Graph.built
        assert workspace.dtype == torch.uint8
        assert workspace.numel() >= self.get_workspace_size()
        assert {*given} == {x.uid for x in self.tensors}
        self.calls.append(given)
        for x in self.tensors:
            assert given[x.uid].dtype in TYPES[x.data_type]
        for x in self.ports.values():
            offsets = self._of(x.offsets).tolist()
            assert offsets == sorted(offsets)
            assert offsets[0] == 0
        compute = self._backward if "grad_out" in self.ports else self._forward
        for sequence, queries, keys in self._sequences():
            compute(sequence, queries, keys)

    def _of(self, x: Any) -> Tensor:
        return self.calls[-1][x.uid]

    def _sequences(self) -> Iterator[tuple[int, int, int]]:
        sizes = zip(*(self._of(x).tolist() for x in self.sizes), strict=True)
        for sequence, (queries, keys) in enumerate(sizes):
            assert (queries == 0) == (keys == 0)
            if queries:
                yield sequence, queries, keys

    def _rows(self, name: str, sequence: int, rows: int) -> Tensor:
        """A sequence's rows, (heads, rows, size), in the memory that was given."""
        x = self.ports[name]
        _, heads, longest, size = x.dim
        assert rows <= longest, (name, rows, longest)
        memory, at = self._of(x), int(self._of(x.offsets)[sequence])
        if "grad_out" in self.ports:
            total = self.options.totals[name.endswith(("k", "v"))]
            assert at // x.stride[2] + rows <= total, (name, at, rows, total)
        last = at + (heads - 1) * x.stride[1] + (rows - 1) * x.stride[2] + size
        held = 1 + sum((n - 1) * s for n, s in zip(memory.shape, memory.stride(), strict=True))
        assert last <= held, (name, last, held)
        return memory.as_strided(
            (heads, rows, size), tuple(x.stride[1:]), memory.storage_offset() + at
        )

    def _weights(
        self, sequence: int, queries: int, keys: int, lse: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Weights (heads, queries, keys) in float64, and the log-sum-exp (heads, queries)."""
        q = self._rows("q", sequence, queries).double()
        k = self._wide(self._rows("k", sequence, keys))
        scores = q @ k.transpose(1, 2) * self.options.scale
        shift = keys - queries if self.options.alignment == "BOTTOM_RIGHT" else 0
        ahead = torch.arange(keys) - torch.arange(queries)[:, None] - shift
        hidden = torch.zeros(queries, keys, dtype=torch.bool)
        if self.options.left is not None:
            hidden |= ahead <= -self.options.left
        if self.options.right is not None:
            hidden |= ahead > self.options.right
        scores = scores.masked_fill(hidden, -torch.inf)
        lse = scores.logsumexp(-1) if lse is None else lse
        return (scores - lse.unsqueeze(-1)).exp(), lse

    def _wide(self, rows: Tensor) -> Tensor:
        return rows.double().repeat_interleave(self.ports["q"].dim[1] // len(rows), 0)

    def _forward(self, sequence: int, queries: int, keys: int) -> None:
        weights, lse = self._weights(sequence, queries, keys, None)
        value = self._wide(self._rows("v", sequence, keys))
        self._rows("out", sequence, queries).copy_(weights @ value)
        self._rows("stats", sequence, queries).copy_(lse.unsqueeze(-1))

    def _backward(self, sequence: int, queries: int, keys: int) -> None:
        lse = self._rows("stats", sequence, queries).double().squeeze(-1)
        weights, _ = self._weights(sequence, queries, keys, lse)
        names = ("q", "out", "grad_out")
        q, out, grad_out = (self._rows(name, sequence, queries).double() for name in names)
        k, v = (self._wide(self._rows(name, sequence, keys)) for name in ("k", "v"))
        delta = (grad_out * out).sum(-1, keepdim=True)
        grad_scores = weights * (grad_out @ v.transpose(1, 2) - delta) * self.options.scale
        self._rows("grad_q", sequence, queries).copy_(grad_scores @ k)
        for name, grad in (
            ("grad_k", grad_scores.transpose(1, 2) @ q),
            ("grad_v", weights.transpose(1, 2) @ grad_out),
        ):
            rows = self._rows(name, sequence, keys)
            rows.copy_(grad.unflatten(0, (len(rows), -1)).sum(1))


def module() -> ModuleType:
    """The package."""
    made: Any = ModuleType("cudnn")
    made.pygraph = Graph
    made.cudnnGraphNotSupportedError = NotSupportedError
    made.data_type = SimpleNamespace(**{name: name for name in TYPES})
    made.heur_mode = SimpleNamespace(A="A", FALLBACK="FALLBACK")
    made.diagonal_alignment = SimpleNamespace(TOP_LEFT="TOP_LEFT", BOTTOM_RIGHT="BOTTOM_RIGHT")
    made.backend_version = lambda: 91900
    made.backend_version_string = lambda: "9.19.0"
    return made
