"""FlashAttention-4's compiled functions, called without the package's Python.

That Python takes the host longer than a short pack takes the GPU. So the first call of a kind goes
through the package's own function, which compiles what it lacks, and hcp writes down which compiled
functions it called, and how. If hcp would have done the same, later calls of this kind call the
compiled functions at once.

This module is written for one version of the package and for compute capability 9: there it knows
the arguments of the compiled functions. Everywhere else all calls go through the package.

n rows of a call, N keys, H query heads, G key-value heads, D head size, E head size of values.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

import hcp.ops  # noqa: F401  (loads torch.ops.hcp)
from hcp.attention.kernels import FLASH_ATTN_4 as VERSION

CAPABILITY = 9

_log = logging.getLogger("hcp")


class PackedLaunch(NamedTuple):
    """A launch in the package's terms. Gaps are sequences of it."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    window_size_left: int | None
    window_size_right: int | None

    @property
    def sequences(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1

    @property
    def causal(self) -> bool:
        return self.window_size_left is None and self.window_size_right == 0

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """The window as compiled functions take it: a causal mask is no window to them."""
        return (None, None) if self.causal else (self.window_size_left, self.window_size_right)

    @property
    def mask(self) -> tuple[bool, bool, bool]:
        """The kind of mask that a function is compiled for: causal, a limit to the left, one to the
        right."""
        left, right = self.limits
        return self.causal, left is not None, right is not None


class CompiledCall(NamedTuple):
    """One call of a compiled function."""

    owner: str
    """The package's function that compiles it."""
    arguments: tuple[Any, ...]


Compiled = Callable[..., object]


class Shapes(NamedTuple):
    """The dtype of rows, and the shapes of queries, keys and values."""

    dtype: torch.dtype
    query: torch.Size
    key: torch.Size
    value: torch.Size

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor) -> Shapes:
        return cls(query.dtype, query.shape, key.shape, value.shape)

    @property
    def has_rows(self) -> bool:
        return self.query[0] > 0 and self.key[0] > 0

    @property
    def head_sizes(self) -> tuple[int, int]:
        return self.query[2], self.value[2]

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """The dtype and sizes that a function is compiled for."""
        return self.dtype, self.query[1:], self.key[1], self.value[2]


class LaunchCalls(Protocol):
    """The forwards, or the backwards, of one launch that are alike. What they have in common is
    made once for all layers."""

    shapes: Shapes
    functions: tuple[Compiled, ...] | None
    """Compiled functions, those that count first, once they are known. None: the package
    computes these calls."""
    counted: Counted
    results: Results

    def by_package(self, package: ModuleType, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Compute by the package's own function, from rows and sums as the library reads them."""

    def describe(self, package: ModuleType) -> tuple[Hashable, tuple[str, ...]]:
        """Make ready for `run`. Returns what the compiled functions depend on, and the package's
        functions that compile them, in the order of the calls, except those that count."""

    def run(
        self, functions: Sequence[Compiled], blocks: Sequence[Tensor | None], memory: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Compute by compiled functions. ``memory``: rows and sums as the library reads them, and
        the results, not yet computed."""


# ---- memory --------------------------------------------------------------------------------------

_ROWS, _FLOATS, _ZEROS = range(3)
"""Kinds of results, as `call_memory` has them: in the dtype of the rows, float32, float32 zeros."""


class Results:
    """The results of calls that are alike, and the memory of one call."""

    def __init__(self, *results: tuple[int, ...]) -> None:
        """Kind and shape of each. Those of the rows' dtype come first."""
        records = [(*result, 0)[:4] for result in results]
        self._results = results
        self._table = torch.tensor(records, dtype=torch.int64, device="cpu").view(-1, 4)

    def memory(self, rows: list[Tensor], sums: list[Tensor]) -> list[Tensor]:
        """Rows as compiled functions read them, in units of 16 bytes, sums (n, H) as (H, n), and
        the results, not yet computed."""
        memory: list[Tensor] = _memory(rows, sums, self._table)
        return memory

    def nowhere(self, dtype: torch.dtype) -> list[Tensor]:
        """The results on a device without memory."""
        return [
            torch.empty(shape, dtype=dtype if kind == _ROWS else torch.float32, device=_NOWHERE)
            for kind, *shape in self._results
        ]


_memory = torch.ops.hcp.call_memory.default
_NOTHING = Results()


class Counted:
    """Counts where the tiles of each sequence begin, which packs of very many sequences need."""

    owner = "_compute_tile_cumsum"

    def __init__(self, bounds: Sequence[Tensor]) -> None:
        """``bounds``: cu_seqlens. Nothing for packs of few sequences."""
        self.bounds = bounds
        self._counts: dict[int, list[Tensor | None]] = {}

    def blocks(self, functions: Sequence[Compiled]) -> Sequence[Tensor | None]:
        """The counts, made once for all layers on a stream."""
        if not self.bounds:
            return _NO_BLOCKS
        stream = _current_stream(self.bounds[0].device)
        blocks = self._counts.get(stream)
        if blocks is None:
            blocks = self.new(functions, self.bounds[0].device)
            # What a CUDA graph counts while it is captured is not there before it is replayed.
            if not (stream and torch.cuda.is_current_stream_capturing()):
                self._counts[stream] = blocks
        return blocks

    def new(self, functions: Sequence[Compiled], device: torch.device) -> list[Tensor | None]:
        blocks: list[Tensor | None] = []
        for count, bounds in zip(functions, self.bounds, strict=False):
            blocks.append(torch.empty(bounds.shape, dtype=torch.int32, device=device))
            count(blocks[-1], None, bounds, None, None, None)
        return blocks


_NO_BLOCKS = (None, None)


def _current_stream(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


# ---- forward and backward ------------------------------------------------------------------------


class Forwards:
    """Output (n, H, E) and log-sum-exp (H, n)."""

    counted: Counted
    results: Results

    def __init__(self, pack: PackedLaunch, shapes: Shapes, scale: float, softcap: float) -> None:
        self._pack, self.shapes, self._scale, self._softcap = pack, shapes, scale, softcap
        self.functions: tuple[Compiled, ...] | None = None

    def by_package(self, package: ModuleType, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        # More than these two come back in some versions.
        out, lse, *_ = package._flash_attn_fwd(
            *given,
            softmax_scale=self._scale,
            softcap=self._softcap,
            return_lse=True,
            **self._pack._asdict(),
        )
        return out, lse

    def describe(self, package: ModuleType) -> tuple[Hashable, tuple[str, ...]]:
        pack, (rows, heads, _) = self._pack, self.shapes.query
        many = pack.sequences > package.BIN_BATCH_SEARCH_THRESH
        self.counted = Counted([pack.cu_seqlens_q] if many else [])
        self.results = Results((_ROWS, rows, heads, self.shapes.value[2]), (_FLOATS, heads, rows))
        lengths = pack.cu_seqlens_q, pack.cu_seqlens_k
        # Neither lengths in use, nor pages, sinks or sparse blocks.
        self._rest = (*lengths, None, None, None, *pack.limits, None, None, package.AuxData())
        # The package's key also says whether the longest queries fit into one tile, and whether it
        # looked up the sequence of each tile: on this capability its kernel depends on neither.
        kind = Forwards, self.shapes.kind, pack.mask, self._softcap, many
        return kind, ("_flash_attn_fwd",)

    def run(
        self, functions: Sequence[Compiled], blocks: Sequence[Tensor | None], memory: list[Tensor]
    ) -> tuple[Tensor, ...]:
        (forward,) = functions
        forward(*memory, self._scale, *self._rest, blocks[0], None)  # without splits
        return memory[3], memory[4]


class Backwards:
    """Gradients of queries, keys and values, in the head sizes of the rows that are given."""

    counted: Counted
    results: Results

    def __init__(
        self, pack: PackedLaunch, shapes: Shapes, scale: float, softcap: float, has_grad_lse: bool
    ) -> None:
        self._pack, self.shapes, self._scale, self._softcap = pack, shapes, scale, softcap
        self._has_grad_lse = has_grad_lse
        self.functions: tuple[Compiled, ...] | None = None

    def by_package(self, package: ModuleType, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        *rows, lse = given[:6]
        grad_query, grad_key, grad_value, *_ = package._flash_attn_bwd(
            *rows,
            lse,
            softmax_scale=self._scale,
            softcap=self._softcap,
            dlse=given[6] if self._has_grad_lse else None,
            **self._pack._asdict(),
        )
        return grad_query, grad_key, grad_value

    def describe(self, package: ModuleType) -> tuple[Hashable, tuple[str, ...]]:
        pack, shapes = self._pack, self.shapes
        causal, left, right = pack.mask
        sizes = shapes.head_sizes
        tiles = _tiles_of(package._tile_size_bwd_sm90, *sizes, causal, left or right)
        many = pack.sequences > package.BIN_BATCH_SEARCH_THRESH
        self.counted = Counted([pack.cu_seqlens_q, pack.cu_seqlens_k] if many else [])
        # With several query heads a key-value head, their gradients meet in float32.
        shared = shapes.query[1] > shapes.key[1]
        self.results = Results(
            *((_ROWS, *shape) for shape in shapes[1:]), *_sums_of(pack, tiles, shapes, shared)
        )
        # Neither lengths in use, nor semaphores of a fixed order, nor sparse blocks.
        lengths = pack.cu_seqlens_q, pack.cu_seqlens_k, None, None
        self._rest = (*lengths, *pack.limits, None, None, None, package.AuxData(), None)
        one_block = pack.max_seqlen_q <= tiles.queries, pack.max_seqlen_k <= tiles.keys
        like = pack.mask, self._softcap, many, one_block, self._has_grad_lse
        converted = ("_bwd_postprocess_convert",) * (3 if shared else 1)
        kind = Backwards, shapes.kind, *like
        return kind, ("_bwd_preprocess", "_flash_attn_bwd", *converted)

    def run(
        self, functions: Sequence[Compiled], blocks: Sequence[Tensor | None], memory: list[Tensor]
    ) -> tuple[Tensor, ...]:
        before, main, convert_query, *convert = functions
        pack, scale, (blocks_q, blocks_k) = self._pack, self._scale, blocks
        query, key, value, out, grad_out, lse, *results = memory
        grad_lse = results.pop(0) if self._has_grad_lse else None
        grad_query, grad_key, grad_value, sums, delta, lse_2, *meeting = results
        cu_q, cu_k = pack.cu_seqlens_q, pack.cu_seqlens_k
        # It fills delta and the log-sum-exp in base 2, and zeroes the sums. None, None and 1.0
        # belong to another method. The last is what the output's rounding lost.
        lengths = cu_q, None, grad_lse
        before(out, grad_out, delta, lse, lse_2, sums, *lengths, None, None, 1.0, blocks_q, None)
        target = meeting or (grad_key, grad_value)
        rows = query, key, value, grad_out
        main(*rows, lse_2, delta, sums, *target, scale, *self._rest, blocks_k)
        convert_query(sums, grad_query, scale, cu_q, None, None, blocks_q)
        if convert:
            convert[0](meeting[0], grad_key, scale, cu_k, None, None, blocks_k)
            convert[1](meeting[1], grad_value, 1.0, cu_k, None, None, blocks_k)
        return grad_query, grad_key, grad_value


def _sums_of(
    pack: PackedLaunch, tiles: _Tiles, shapes: Shapes, shared: bool
) -> list[tuple[int, int, int]]:
    """The sums of a backward in float32, every sequence padded to whole tiles: by query heads the
    gradient of the queries, delta and the log-sum-exp; by key-value heads, where several query
    heads share one, zeros to which each adds its share of the gradients of keys and values."""
    rows, heads, size = shapes.query
    padded = tiles.padded(rows, pack.sequences, tiles.queries)
    sums = [(_FLOATS, heads, padded * tiles.columns(size)), *[(_FLOATS, heads, padded)] * 2]
    if shared:
        rows, heads, _ = shapes.key
        padded = tiles.padded(rows, pack.sequences, tiles.keys)
        sums += [(_ZEROS, heads, padded * tiles.columns(size)) for size in shapes.head_sizes]
    return sums


class _Tiles(NamedTuple):
    """How a backward cuts its work, on compute capability 9."""

    queries: int
    keys: int
    column_unit: int

    def columns(self, size: int) -> int:
        return -(-size // self.column_unit) * self.column_unit

    @staticmethod
    def padded(rows: int, sequences: int, tile: int) -> int:
        """Rows with room for a whole tile at the end of every sequence."""
        return (rows + (sequences + 1) * tile - 1) // tile * tile


@functools.cache
def _tiles_of(
    sizes_of: Callable[..., Any], size: int, value_size: int, causal: bool, local: bool
) -> _Tiles:
    config = sizes_of(size, value_size, causal, local)
    unit = 64 if config.dKV_swapAB else 32
    return _Tiles(config.m_block_size, config.n_block_size, unit)


# ---- calling -------------------------------------------------------------------------------------

_OWNERS = (
    "_flash_attn_fwd",
    "_flash_attn_bwd",
    "_bwd_preprocess",
    "_bwd_postprocess_convert",
    "_compute_tile_cumsum",
)
_NAMES = ("_tile_size_bwd_sm90", "BIN_BATCH_SEARCH_THRESH", "AuxData")


def obstacle(package: ModuleType) -> str:
    """Why all calls go through the package, whatever the GPU. Empty: they need not."""
    try:
        version = importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    if version != VERSION:
        return f"flash-attn-4 is {version}, expected {VERSION}"
    missing = [name for name in _NAMES if not hasattr(package, name)]
    missing += [
        f"{name}.compile_cache"
        for name in _OWNERS
        if not hasattr(getattr(package, name, None), "compile_cache")
    ]
    return f"flash-attn-4 {version} has no {', '.join(missing)}" if missing else ""


class Caller:
    """Computes calls, by compiled functions where it can."""

    def __init__(self, package: ModuleType) -> None:
        self._package = package
        self._obstacle = obstacle(package)
        self._functions: dict[Hashable, tuple[Compiled, ...] | None] = {}
        """By kind. None: the package called something else than expected."""
        # A process in which several threads called it at once ended in a segmentation fault.
        self._one_at_a_time = threading.Lock()
        if self._obstacle:
            _log.warning(
                "%s: every call goes through its own Python, which takes the host longer",
                self._obstacle,
            )

    def direct(self, device: torch.device) -> bool:
        """Whether calls on a device reach compiled functions without the package's Python."""
        return not self._obstacle and _is_known(device)

    def __call__(
        self, calls: LaunchCalls, rows: list[Tensor], sums: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Compute one of the calls, from rows (n, heads, size) and sums (n, H) of any strides."""
        functions = calls.functions
        if functions is None:
            return self._by_package(calls, rows, sums)
        memory = calls.results.memory(rows, sums)
        counted = len(calls.counted.bounds)
        with self._one_at_a_time:
            blocks = calls.counted.blocks(functions)
            return calls.run(functions[counted:] if counted else functions, blocks, memory)

    def _by_package(
        self, calls: LaunchCalls, rows: list[Tensor], sums: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Compute by the package, and learn from the first call of a kind."""
        given = _NOTHING.memory(rows, sums)
        with self._one_at_a_time:
            if not (calls.shapes.has_rows and self.direct(given[0].device)):
                return calls.by_package(self._package, given)
            kind, owners = calls.describe(self._package)
            if kind not in self._functions:
                results, self._functions[kind] = self._first(calls, owners, given)
                calls.functions = self._functions[kind]
                return results
            calls.functions = self._functions[kind]
            if calls.functions is None:
                return calls.by_package(self._package, given)
        return self(calls, rows, sums)

    def _first(
        self, calls: LaunchCalls, owners: Sequence[str], given: list[Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Compiled, ...] | None]:
        """The results, and the compiled functions if they were called as expected."""
        with _recorded(self._package) as recorded:
            results = calls.by_package(self._package, given)
        expected = _expected(calls, owners, given)
        known = _given(expected)
        found = _described([step for step, _ in recorded], known)
        awaited = _described(expected, known)
        if found == awaited:
            return results, tuple(function for _, function in recorded)
        _log.warning(
            "flash-attn-4 %s called %s, expected %s: calls of this kind go through its own Python, "
            "which takes the host longer",
            VERSION,
            found,
            awaited,
        )
        return results, None


def _expected(calls: LaunchCalls, owners: Sequence[str], given: list[Tensor]) -> list[CompiledCall]:
    """The steps of a call by compiled functions, of which none is called."""
    steps: list[CompiledCall] = []

    def function_of(owner: str) -> Compiled:
        return lambda *arguments: steps.append(CompiledCall(owner, arguments))

    counting = [function_of(Counted.owner)] * len(calls.counted.bounds)
    blocks = calls.counted.new(counting, _NOWHERE) or _NO_BLOCKS
    memory = [*given, *calls.results.nowhere(given[0].dtype)]
    calls.run([function_of(owner) for owner in owners], blocks, memory)
    return steps


@functools.cache
def _is_known(device: torch.device) -> bool:
    """Whether this module knows the compiled functions for a GPU."""
    capability = torch.cuda.get_device_capability(device)
    if capability[0] == CAPABILITY:
        return True
    _log.info(
        "flash-attn-4 on compute capability %d.%d, expected %d: every call goes through its own "
        "Python, which takes the host longer",
        *capability,
        CAPABILITY,
    )
    return False


_NOWHERE = torch.device("meta")


def _given(steps: Sequence[CompiledCall]) -> set[int]:
    """Addresses of the tensors that were there before the steps were made."""
    tensors = (x for step in steps for x in step.arguments if isinstance(x, Tensor))
    return {x.data_ptr() for x in tensors if x.device != _NOWHERE}


def _described(steps: Sequence[CompiledCall], given: set[int]) -> list[tuple[object, ...]]:
    """Steps without the values of their tensors. Equal ones do the same with the same tensors, and
    with new ones of the same shapes, in the same places."""
    numbers: dict[int, int] = {}

    def described(argument: object) -> object:
        if not isinstance(argument, Tensor):
            return argument
        here = argument.device != _NOWHERE
        address = argument.data_ptr() if here else id(argument)
        if here and address in given:
            return address, argument.shape, argument.dtype
        number = numbers.setdefault(address, len(numbers))
        return f"new {number}", argument.shape, argument.dtype

    return [(step.owner, *map(described, step.arguments)) for step in steps]


@contextmanager
def _recorded(package: ModuleType) -> Iterator[list[tuple[CompiledCall, Callable[..., object]]]]:
    """The steps that the package takes meanwhile on this thread, and their compiled functions."""
    steps: list[tuple[CompiledCall, Callable[..., object]]] = []
    caches = {name: getattr(package, name).compile_cache for name in _OWNERS}
    for name, cache in caches.items():
        getattr(package, name).compile_cache = _Recorder(name, cache, steps)
    try:
        yield steps
    finally:
        for name, cache in caches.items():
            getattr(package, name).compile_cache = cache


class _Recorder:
    """A cache of compiled functions that writes down how they are called."""

    def __init__(
        self, owner: str, cache: Any, steps: list[tuple[CompiledCall, Callable[..., object]]]
    ) -> None:
        self._owner, self._cache, self._steps = owner, cache, steps
        self._thread = threading.get_ident()

    def __contains__(self, key: object) -> bool:
        return key in self._cache

    def __setitem__(self, key: object, function: Callable[..., object]) -> None:
        self._cache[key] = function

    def __getitem__(self, key: object) -> Callable[..., object]:
        function: Callable[..., object] = self._cache[key]
        if threading.get_ident() != self._thread:
            return function

        def called(*arguments: Any) -> object:
            self._steps.append((CompiledCall(self._owner, arguments), function))
            return function(*arguments)

        return called
