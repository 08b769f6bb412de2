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

VERSION = "4.0.0b36"
CAPABILITY = 9

_log = logging.getLogger("hcp")


class Pack(NamedTuple):
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
        """What a compiled function depends on: causal, a limit to the left, one to the right."""
        left, right = self.limits
        return self.causal, left is not None, right is not None


class Step(NamedTuple):
    """One call of a compiled function."""

    owner: str
    """The package's function that compiles it."""
    arguments: tuple[Any, ...]


class Call(Protocol):
    """A forward or a backward."""

    def kind(self, package: ModuleType) -> Hashable:
        """What the compiled functions depend on. None: the package calls none."""

    def by_package(self, package: ModuleType) -> tuple[Tensor, ...]:
        """Compute by the package's own function."""

    def steps(
        self, package: ModuleType, device: torch.device
    ) -> tuple[tuple[Tensor, ...], list[Step]]:
        """The results, allocated on a device, and the steps that compute them."""


# ---- forward and backward ------------------------------------------------------------------------


class Forward(NamedTuple):
    """Output (n, H, E) and log-sum-exp (H, n)."""

    pack: Pack
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    softcap: float

    def kind(self, package: ModuleType) -> Hashable:
        if _has_no_rows(self.query, self.key):
            return None
        many = self.pack.sequences > package.BIN_BATCH_SEARCH_THRESH
        rows = _kind_of_rows(self.query, self.key, self.value)
        return Forward, rows, self.pack.mask, self.softcap, many

    def by_package(self, package: ModuleType) -> tuple[Tensor, ...]:
        # More than these two come back in some versions.
        out, lse, *_ = package._flash_attn_fwd(
            self.query,
            self.key,
            self.value,
            softmax_scale=self.scale,
            softcap=self.softcap,
            return_lse=True,
            **self.pack._asdict(),
        )
        return out, lse

    def steps(
        self, package: ModuleType, device: torch.device
    ) -> tuple[tuple[Tensor, ...], list[Step]]:
        pack, query = self.pack, self.query
        rows, heads, _ = query.shape
        out = torch.empty(rows, heads, self.value.shape[2], dtype=query.dtype, device=device)
        lse = torch.empty(heads, rows, dtype=torch.float32, device=device)
        blocks, steps = _blocks(package, pack.cu_seqlens_q, device)
        own = (query, self.key, self.value, out, lse, self.scale)
        cu_seqlens = pack.cu_seqlens_q, pack.cu_seqlens_k
        # Neither lengths in use, nor pages, sinks, sparse blocks or splits.
        rest = (None, package.AuxData(), blocks, None)
        arguments = (*own, *cu_seqlens, None, None, None, *pack.limits, None, *rest)
        return (out, lse), [*steps, Step("_flash_attn_fwd", arguments)]


class Backward(NamedTuple):
    """Gradients of queries, keys and values. ``lse`` and its gradient: (H, n)."""

    pack: Pack
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    grad_out: Tensor
    lse: Tensor
    grad_lse: Tensor | None
    scale: float
    softcap: float

    def kind(self, package: ModuleType) -> Hashable:
        if _has_no_rows(self.query, self.key):
            return None
        pack = self.pack
        tiles = self._tiles(package)
        one_block = pack.max_seqlen_q <= tiles.queries, pack.max_seqlen_k <= tiles.keys
        many = pack.sequences > package.BIN_BATCH_SEARCH_THRESH
        rows = _kind_of_rows(self.query, self.key, self.value)
        return Backward, rows, pack.mask, self.softcap, many, one_block, self.grad_lse is not None

    def by_package(self, package: ModuleType) -> tuple[Tensor, ...]:
        grad_query, grad_key, grad_value, *_ = package._flash_attn_bwd(
            self.query,
            self.key,
            self.value,
            self.out,
            self.grad_out,
            self.lse,
            softmax_scale=self.scale,
            softcap=self.softcap,
            dlse=self.grad_lse,
            **self.pack._asdict(),
        )
        return grad_query, grad_key, grad_value

    def steps(
        self, package: ModuleType, device: torch.device
    ) -> tuple[tuple[Tensor, ...], list[Step]]:
        pack, scale = self.pack, self.scale
        tiles = self._tiles(package)
        grads = tuple(torch.empty_like(x, device=device) for x in self[1:4])
        sums = self._sums(tiles, device)
        # With several query heads a key-value head, their gradients meet in float32.
        shared = self.query.shape[1] > self.key.shape[1]
        meeting = self._meeting(tiles, device) if shared else grads[1:]
        blocks_q, steps_q = _blocks(package, pack.cu_seqlens_q, device)
        blocks_k, steps_k = _blocks(package, pack.cu_seqlens_k, device)
        before = self._before(sums, blocks_q)
        main = self._main(package, sums, meeting, blocks_k)
        after = [
            _converted(sums.grad_query, grads[0], scale, pack.cu_seqlens_q, blocks_q),
        ]
        if shared:
            for at, factor in ((0, scale), (1, 1.0)):
                after.append(
                    _converted(meeting[at], grads[1 + at], factor, pack.cu_seqlens_k, blocks_k)
                )
        return grads, [*steps_q, *steps_k, before, main, *after]

    def _tiles(self, package: ModuleType) -> _Tiles:
        sizes = self.query.shape[2], self.value.shape[2]
        causal, left, right = self.pack.mask
        return _tiles_of(package._tile_size_bwd_sm90, *sizes, causal, left or right)

    def _sums(self, tiles: _Tiles, device: torch.device) -> _Sums:
        rows, heads, size = self.query.shape
        padded = tiles.padded(rows, self.pack.sequences, tiles.queries)
        new = functools.partial(torch.empty, dtype=torch.float32, device=device)
        return _Sums(
            new(heads, padded * tiles.columns(size)), new(heads, padded), new(heads, padded)
        )

    def _meeting(self, tiles: _Tiles, device: torch.device) -> Sequence[Tensor]:
        """Zeros to which every query head adds its share of the gradients of keys and values."""
        rows, heads, size = self.key.shape
        padded = tiles.padded(rows, self.pack.sequences, tiles.keys)
        widths = [padded * tiles.columns(x) for x in (size, self.value.shape[2])]
        zeros = torch.zeros(heads * sum(widths), dtype=torch.float32, device=device)
        starts = 0, heads * widths[0]
        return [
            zeros.as_strided((heads, width), (width, 1), start)
            for width, start in zip(widths, starts, strict=True)
        ]

    def _before(self, sums: _Sums, blocks: Tensor | None) -> Step:
        """Fill delta and the log-sum-exp in base 2, and zero the gradient of the queries."""
        own = self.out, self.grad_out, sums.delta, self.lse, sums.lse, sums.grad_query
        lengths = self.pack.cu_seqlens_q, None, self.grad_lse
        # None, None and 1.0 belong to another method. The last is what the output's rounding lost.
        return Step("_bwd_preprocess", (*own, *lengths, None, None, 1.0, blocks, None))

    def _main(
        self, package: ModuleType, sums: _Sums, meeting: Sequence[Tensor], blocks: Tensor | None
    ) -> Step:
        pack = self.pack
        rows = self.query, self.key, self.value, self.grad_out
        own = sums.lse, sums.delta, sums.grad_query, *meeting, self.scale
        lengths = pack.cu_seqlens_q, pack.cu_seqlens_k, None, None
        # Neither semaphores of a fixed order nor sparse blocks.
        rest = (None, None, None, package.AuxData(), None, blocks)
        return Step("_flash_attn_bwd", (*rows, *own, *lengths, *pack.limits, *rest))


class _Sums(NamedTuple):
    """What a backward sums in float32, by query heads, every sequence padded to whole tiles."""

    grad_query: Tensor
    delta: Tensor
    lse: Tensor


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


def _blocks(
    package: ModuleType, cu_seqlens: Tensor, device: torch.device
) -> tuple[Tensor | None, list[Step]]:
    """Where the tiles of each sequence begin, which packs of very many sequences need, and the step
    that counts them."""
    if cu_seqlens.shape[0] - 1 <= package.BIN_BATCH_SEARCH_THRESH:
        return None, []
    blocks = torch.empty(cu_seqlens.shape, dtype=torch.int32, device=device)
    arguments = (blocks, None, cu_seqlens, None, None, None)
    return blocks, [Step("_compute_tile_cumsum", arguments)]


def _converted(
    sums: Tensor, grad: Tensor, factor: float, cu_seqlens: Tensor, blocks: Tensor | None
) -> Step:
    """Round sums to a gradient."""
    arguments = (sums, grad, factor, cu_seqlens, None, None, blocks)
    return Step("_bwd_postprocess_convert", arguments)


def _kind_of_rows(query: Tensor, key: Tensor, value: Tensor) -> tuple[Hashable, ...]:
    return query.dtype, query.shape[1:], key.shape[1], value.shape[2]


def _has_no_rows(query: Tensor, key: Tensor) -> bool:
    return query.shape[0] == 0 or key.shape[0] == 0


def aligned(rows: Tensor) -> Tensor:
    """Rows as compiled functions read them: in units of 16 bytes, each element at its own place."""
    strides = rows.stride()
    unit = 16 // rows.element_size()
    fits = strides[2] == 1 and strides[0] % unit == 0 and strides[1] % unit == 0
    if fits and 0 not in strides and rows.data_ptr() % 16 == 0:
        return rows.detach() if rows.requires_grad else rows
    return rows.detach().clone(memory_format=torch.contiguous_format)


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
        self._functions: dict[Hashable, tuple[Callable[..., object], ...] | None] = {}
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

    def __call__(self, call: Call, device: torch.device) -> tuple[Tensor, ...]:
        kind = call.kind(self._package) if self.direct(device) else None
        if kind is None:
            return self._by_package(call)
        if kind not in self._functions:
            return self._first(kind, call)
        functions = self._functions[kind]
        if functions is None:
            return self._by_package(call)
        results, steps = call.steps(self._package, device)
        with self._one_at_a_time:
            for function, step in zip(functions, steps, strict=True):
                function(*step.arguments)
        return results

    def _by_package(self, call: Call) -> tuple[Tensor, ...]:
        with self._one_at_a_time:
            return call.by_package(self._package)

    def _first(self, kind: Hashable, call: Call) -> tuple[Tensor, ...]:
        """Compute by the package, and learn from it."""
        with self._one_at_a_time, _recorded(self._package) as recorded:
            results = call.by_package(self._package)
        _, expected = call.steps(self._package, _NOWHERE)
        given = _given(expected)
        found = _described([step for step, _ in recorded], given)
        awaited = _described(expected, given)
        if found == awaited:
            self._functions[kind] = tuple(function for _, function in recorded)
        else:
            self._functions[kind] = None
            _log.warning(
                "flash-attn-4 %s called %s, expected %s: calls of this kind go through its own "
                "Python, which takes the host longer",
                VERSION,
                found,
                awaited,
            )
        return results


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


def _given(steps: Sequence[Step]) -> set[int]:
    """Addresses of the tensors that were there before the steps were made."""
    tensors = (x for step in steps for x in step.arguments if isinstance(x, Tensor))
    return {x.data_ptr() for x in tensors if x.device != _NOWHERE}


def _described(steps: Sequence[Step], given: set[int]) -> list[tuple[object, ...]]:
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
def _recorded(package: ModuleType) -> Iterator[list[tuple[Step, Callable[..., object]]]]:
    """The steps that the package takes meanwhile on this thread, and their compiled functions."""
    steps: list[tuple[Step, Callable[..., object]]] = []
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
        self, owner: str, cache: Any, steps: list[tuple[Step, Callable[..., object]]]
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
            self._steps.append((Step(self._owner, arguments), function))
            return function(*arguments)

        return called
