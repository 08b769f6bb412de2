"""cuDNN's packed attention through the package nvidia-cudnn-frontend (1.32) under hcp's schedules.

cuDNN computes graphs, and compiles a kernel for each graph that is built. A graph knows the most
sequences and rows that it can hold. How long the sequences are, and where they lie, are data: so
few graphs serve all packs.

Needs cuDNN 9.10.2 or later.

n rows of a launch, H query heads, G key-value heads, D head size, E head size of values; B
sequences of a graph, S rows of its longest.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import cudnn  # type: ignore[import-not-found]
import torch
from torch import Tensor

from hcp._versions import check_if_installed
from hcp.attention.kernels import (
    Attended,
    Kernel,
    KernelCall,
    Launch,
    ResultGrads,
    nan_for_infinity,
    wide,
)
from hcp.attention.kernels.shapes import (
    LSE_COLUMNS,
    backward_columns,
    head_size,
    narrowed,
    widened,
)
from hcp.errors import HcpError
from hcp.exchange.layout import copied

LEAST_VERSION = 91002
"""As ``cudnn.backend_version`` gives it: of a release before it, attention is known to be wrong."""

CHECK = "Compare the losses of a few steps with those of the backend 'torch'."


class Cudnn:
    """Computes whole packs in one launch, with values of their own head size.

    Only entries are sequences of a graph: rows of gaps belong to none, and keep what was in memory.
    """

    dtypes = (torch.bfloat16, torch.float16)

    packs = True

    def takes(self, call: KernelCall) -> bool:
        """Not bounds that change: its graph is made of their numbers."""
        if call.launch.bounds_change:
            return False
        sizes = call.query.shape[2], call.value.shape[2]
        if call.grad_lse:
            sizes = (_size_with_columns(call.query, call.value),) * 2
        return _has_sizes(*sizes, call.query.device)

    def capped(self, softcap: float) -> None:
        return None

    def forward(
        self, launch: Launch, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        if not _has_sizes(query.shape[2], value.shape[2], query.device):
            raise ValueError(
                f"head sizes are {query.shape[2]} and {value.shape[2]}, expected "
                f"{_EXPECTED_SIZES} for the backend 'cudnn': use 'torch'"
            )
        query, key, value = (_laid_out(x) for x in (query, key, value))
        out = _made(launch.queries_are_whole, query, value.shape[2])
        lse = query.new_empty(query.shape[:2], dtype=wide(query.dtype))
        rows = {"query": query, "key": key, "value": value, "out": out, "lse": lse}
        _run(_Task(launch, scale, backward=False), rows)
        return out, nan_for_infinity(lse)

    def backward(
        self, launch: Launch, grads: ResultGrads, attended: Attended, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_out, grad_lse = grads
        if grad_lse is None:
            return self._grads(launch, grad_out, attended, scale)
        query, _, value, _, _ = attended
        return narrowed(self._with_columns(launch, grads, attended, scale), query, value)

    def _with_columns(
        self, launch: Launch, grads: ResultGrads, attended: Attended, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients in a head size that holds the log-sum-exp's gradient, which cuDNN lacks."""
        query, key, value, out, lse = attended
        size = _size_with_columns(query, value)
        if not _has_sizes(size, size, query.device):
            raise ValueError(
                f"the log-sum-exp has a gradient with head sizes {query.shape[2]} and "
                f"{value.shape[2]}, for which the backend 'cudnn' has no kernel: use 'torch'"
            )
        grad_out, query, key, value, out = (
            widened(rows, size) for rows in backward_columns(grads, (query, key, value, out))
        )
        return self._grads(launch, grad_out, (query, key, value, out, lse), scale)

    def _grads(
        self, launch: Launch, grad_out: Tensor, attended: Attended, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, out, lse = attended
        query, key, value = (_laid_out(x) for x in (query, key, value))
        rows = {"query": query, "key": key, "value": value}
        rows |= {"out": out, "grad_out": grad_out, "lse": lse}
        rows |= {name: _aligned(rows[name].contiguous()) for name in ("out", "grad_out", "lse")}
        grads = (
            _made(launch.queries_are_whole, query, query.shape[2]),
            _made(launch.keys_are_whole, key, key.shape[2]),
            _made(launch.keys_are_whole, value, value.shape[2]),
        )
        rows |= zip(("grad_query", "grad_key", "grad_value"), grads, strict=True)
        _run(_Task(launch, scale, backward=True), rows)
        return grads


# ---- what cuDNN takes ----------------------------------------------------------------------------

_EXPECTED_SIZES = (
    "multiples of 16 up to 128, or 192 with 128 for the values, or on Hopper one size up to 256,"
)


def _has_sizes(size: int, value_size: int, device: torch.device) -> bool:
    """Whether forward and backward have a kernel for these head sizes.

    With other multiples of 8 the backward would need memory for B x S rows.
    """
    if size % 16 or value_size % 16:
        return False
    if max(size, value_size) <= 128 or (size, value_size) == (192, 128):
        return True
    return size == value_size <= 256 and _is_hopper(device)


def _size_with_columns(query: Tensor, value: Tensor) -> int:
    """The head size for the columns of the log-sum-exp's gradient."""
    return _rounded_up(head_size(query, value, LSE_COLUMNS), 16)


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


_ALIGNMENT = 16
"""Bytes, of the first row. cuDNN takes it for granted."""


def _laid_out(rows: Tensor) -> Tensor:
    """Rows whose heads lie one after the other. There may be more between rows, as between those of
    a projection to queries, keys and values."""
    heads, size = rows.shape[1:]
    stride = _row_stride(rows)
    adjacent = rows.stride(2) == 1 and (heads == 1 or rows.stride(1) == size)
    fits = adjacent and stride >= heads * size and stride * rows.element_size() % _ALIGNMENT == 0
    return _aligned(rows if fits else rows.contiguous())


def _row_stride(rows: Tensor) -> int:
    """Elements from one row to the next. PyTorch's number says nothing if there is one row."""
    return rows.stride(0) if len(rows) > 1 else rows.shape[1] * rows.shape[2]


def _aligned(rows: Tensor) -> Tensor:
    return rows if rows.data_ptr() % _ALIGNMENT == 0 else rows.clone()


def _made(whole: bool, rows: Tensor, size: int) -> Tensor:
    """Rows for a result. Zeros where some belong to no entry, for cuDNN does not write these."""
    shape = *rows.shape[:2], size
    return rows.new_empty(shape) if whole else rows.new_zeros(shape)


# ---- tasks ---------------------------------------------------------------------------------------


class _Task(NamedTuple):
    launch: Launch
    scale: float
    backward: bool


# A handle serves one thread at a time, and the backward runs on another thread than the forward.
_ONE_AT_A_TIME = threading.Lock()
_HANDLES: dict[torch.device, Any] = {}
_GRAPHS: dict[_Shape, _Graph] = {}
_PLACES: weakref.WeakKeyDictionary[Launch, _Places] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def _handle_on(device: torch.device) -> Iterator[Any]:
    """The device's handle, for its current stream, and for one thread."""
    with _ONE_AT_A_TIME, torch.cuda.device(device):
        if device not in _HANDLES:
            _HANDLES[device] = cudnn.create_handle()
        stream = torch.cuda.current_stream(device).cuda_stream
        cudnn.set_stream(handle=_HANDLES[device], stream=stream)
        yield _HANDLES[device]


def _run(task: _Task, rows: dict[str, Tensor]) -> None:
    """Compute a task's results, which are among the rows."""
    device = rows["query"].device
    with _handle_on(device) as handle:
        places = _PLACES.get(task.launch)
        if places is None:
            places = _PLACES[task.launch] = _Places(task.launch, device)
        shape = _shape_of(task, places, rows)
        graph = _GRAPHS.get(shape)
        if graph is None:
            graph = _GRAPHS[shape] = _Graph(shape, handle=handle)
        workspace = torch.empty(max(1, graph.workspace), dtype=torch.uint8, device=device)
        graph.execute(rows, places, workspace, handle)


class _Places:
    """Where the entries of a launch lie, on the device, and what a graph must hold for them. Kept
    for the next layer.

    A graph's sequences beyond the entries have no rows.
    """

    def __init__(self, launch: Launch, device: torch.device) -> None:
        self.sequences = _power_of_four(len(launch.entries))
        packed = launch.packed(self.sequences)
        self.square = launch.window == (-1, -1) or bool(packed.sizes.square)
        queries, keys = (rows.stop - rows.start for rows in (launch.queries, launch.keys))
        self.rows = _rounded_total(queries), _rounded_total(keys)
        self.longest = tuple(
            min(_power_of_four(max(n, _LEAST_ROWS)), rows)
            for n, rows in zip(launch.longest, self.rows, strict=True)
        )
        places = copied(packed.places(), device)
        self._starts = places[:, : self.sequences + 1]
        self._sizes: list[Tensor] = [of.to(torch.int32) for of in places[:, self.sequences + 1 :]]
        self._offsets: dict[tuple[int, int], Tensor] = {}

    def sizes(self, side: int) -> Tensor:
        """Rows of each sequence, int32 (B). ``side``: 0 for queries, 1 for keys."""
        return self._sizes[side]

    def offsets(self, side: int, stride: int) -> Tensor:
        """Elements before each sequence, and before the end, int64 (B + 1)."""
        if (side, stride) not in self._offsets:
            self._offsets[side, stride] = self._starts[side] * stride
        return self._offsets[side, stride]


# ---- shapes --------------------------------------------------------------------------------------


class _Shape(NamedTuple):
    """The calls that a graph is built for."""

    backward: bool
    deterministic: bool
    device: torch.device
    dtype: torch.dtype
    scale: float
    window: tuple[int, int]
    square: bool
    """Whether every sequence has as many queries as keys, so that its first query sees the first
    key: cuDNN's mask is aligned top left. Else it is aligned bottom right."""
    sequences: int
    longest: tuple[int, ...]
    """Queries, and keys, of the longest sequence."""
    rows: tuple[int, int]
    """Queries, and keys, of the launch: what a backward's sums need memory for. (0, 0) forward."""
    heads: tuple[int, int]
    sizes: tuple[int, int]
    """Head size of queries and keys, and of values."""
    strides: tuple[int, int, int]
    """Elements from one row of queries, of keys and of values to the next."""


def _shape_of(task: _Task, places: _Places, rows: dict[str, Tensor]) -> _Shape:
    launch, query, key, value = task.launch, rows["query"], rows["key"], rows["value"]
    return _Shape(
        task.backward,
        task.backward and torch.are_deterministic_algorithms_enabled(),
        query.device,
        query.dtype,
        float(task.scale),
        launch.window,
        places.square,
        places.sequences,
        places.longest,
        places.rows if task.backward else (0, 0),
        (query.shape[1], key.shape[1]),
        (query.shape[2], value.shape[2]),
        (_row_stride(query), _row_stride(key), _row_stride(value)),
    )


# cuDNN has no graph for one query and one key.
_LEAST_ROWS = 256


def _power_of_four(number: int) -> int:
    """Round up to 1, 4, 16, 64 and so on. Rows beyond a sequence's end are not computed."""
    power = 1
    while power < number:
        power *= 4
    return power


def _rounded_total(rows: int) -> int:
    """Round up by a quarter at most: a backward needs memory for so many rows."""
    step = max(1024, 1 << max(0, rows.bit_length() - 3))
    return _rounded_up(rows, step)


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step


# ---- graphs --------------------------------------------------------------------------------------

_TYPES = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}
QUERIES, KEYS = 0, 1


class _Graph:
    """A built graph. Its tensors are known by the names of rows, of sizes and of offsets."""

    def __init__(self, shape: _Shape, **options: Any) -> None:
        """``options``: the handle, or what a graph is built for without a GPU."""
        self._shape = shape
        self._graph = cudnn.pygraph(
            io_data_type=_TYPES[shape.dtype],
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            **options,
        )
        self._numbers: dict[str, int] = {}
        self._sizes = [self._index("sizes", side, shape.sequences) for side in (QUERIES, KEYS)]
        self._offsets: dict[tuple[int, int], Any] = {}
        try:
            (self._backward if shape.backward else self._forward)()
            self._build()
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError) as error:
            raise HcpError(
                f"cuDNN {cudnn.backend_version_string()} has no kernel for {shape}: use the "
                f"backend 'torch' ({error})",
                code="kernel-missing",
            ) from error
        self.workspace: int = self._graph.get_workspace_size()

    def execute(
        self, rows: dict[str, Tensor], places: _Places, workspace: Tensor, handle: Any
    ) -> None:
        given = {self._numbers[name]: x.detach() for name, x in rows.items()}
        for side in (QUERIES, KEYS):
            given[self._numbers[f"sizes {side}"]] = places.sizes(side)
        for side, stride in self._offsets:
            given[self._numbers[f"offsets {side} {stride}"]] = places.offsets(side, stride)
        self._graph.execute(given, workspace, handle=handle)

    def _build(self) -> None:
        graph = self._graph
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        # The frontend's own engines in Python: they compile by other libraries, at every shape.
        graph.deselect_engines(["sdpa_"])
        graph.check_support()
        graph.build_plans()

    def _forward(self) -> None:
        given = {name: self._rows(name) for name in ("query", "key", "value")}
        out, lse = self._graph.sdpa(
            q=given["query"],
            k=given["key"],
            v=given["value"],
            generate_stats=True,
            **self._common(),
        )
        self._result("out", out)
        self._result("lse", lse)

    def _backward(self) -> None:
        names = ("query", "key", "value", "out", "grad_out", "lse")
        query, key, value, out, grad_out, lse = (self._rows(name) for name in names)
        grads = self._graph.sdpa_backward(
            q=query,
            k=key,
            v=value,
            o=out,
            dO=grad_out,
            stats=lse,
            max_total_seq_len_q=self._shape.rows[QUERIES],
            max_total_seq_len_kv=self._shape.rows[KEYS],
            use_deterministic_algorithm=self._shape.deterministic,
            **self._common(),
        )
        for name, grad in zip(("grad_query", "grad_key", "grad_value"), grads, strict=True):
            self._result(name, grad)

    def _common(self) -> dict[str, Any]:
        """Arguments of both directions."""
        left, right = self._shape.window
        alignment = cudnn.diagonal_alignment
        return {
            "attn_scale": self._shape.scale,
            "use_padding_mask": True,
            "seq_len_q": self._sizes[QUERIES],
            "seq_len_kv": self._sizes[KEYS],
            "diagonal_alignment": alignment.TOP_LEFT
            if self._shape.square
            else alignment.BOTTOM_RIGHT,
            # The first key that is hidden, counted to the left of the diagonal.
            "diagonal_band_left_bound": None if left < 0 else left + 1,
            "diagonal_band_right_bound": None if right < 0 else right,
        }

    def _rows(self, name: str) -> Any:
        """Rows that are given."""
        side, dim, stride = self._layout(name)
        rows = self._graph.tensor(
            dim=dim, stride=stride, data_type=self._type(name), uid=self._number(name)
        )
        rows.set_ragged_offset(self._offsets_of(side, stride[2]))
        return rows

    def _result(self, name: str, rows: Any) -> None:
        side, dim, stride = self._layout(name)
        rows.set_uid(self._number(name)).set_output(True).set_dim(dim).set_stride(stride)
        rows.set_data_type(self._type(name))
        rows.set_ragged_offset(self._offsets_of(side, stride[2]))

    def _layout(self, name: str) -> tuple[int, list[int], list[int]]:
        """Whether rows are of queries or of keys, and their dimensions and strides, in cuDNN's
        order: sequence, head, row, column."""
        shape = self._shape
        side = KEYS if name.endswith(("key", "value")) else QUERIES
        heads = shape.heads[side]
        size = (
            1 if name == "lse" else shape.sizes[name in ("value", "grad_value", "out", "grad_out")]
        )
        given = dict(zip(("query", "key", "value"), shape.strides, strict=True))
        row, longest = given.get(name, heads * size), shape.longest[side]
        return side, [shape.sequences, heads, longest, size], [longest * row, size, row, 1]

    def _offsets_of(self, side: int, stride: int) -> Any:
        if (side, stride) not in self._offsets:
            index = self._index(f"offsets {side}", stride, self._shape.sequences + 1)
            self._offsets[side, stride] = index
        return self._offsets[side, stride]

    def _index(self, name: str, of: int, length: int) -> Any:
        name = f"{name} {of}"
        kind = cudnn.data_type.INT32 if name.startswith("sizes") else cudnn.data_type.INT64
        return self._graph.tensor(
            dim=[length, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kind, uid=self._number(name)
        )

    def _type(self, name: str) -> Any:
        return cudnn.data_type.FLOAT if name == "lse" else _TYPES[self._shape.dtype]

    def _number(self, name: str) -> int:
        """A new number, by which cuDNN knows a tensor."""
        self._numbers[name] = len(self._numbers) + 1
        return self._numbers[name]


def for_device(device: torch.device) -> Sequence[Kernel]:
    check_if_installed("nvidia-cudnn-frontend", check=CHECK)
    if cudnn.backend_version() < LEAST_VERSION:
        raise ValueError(
            f"cuDNN is {cudnn.backend_version_string()}, expected 9.10.2 or later for the backend "
            "'cudnn': install nvidia-cudnn-cu12 or nvidia-cudnn-cu13, or use 'torch'"
        )
    return (Cudnn(),)
