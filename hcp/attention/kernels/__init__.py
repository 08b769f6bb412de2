"""Attention kernels of libraries under one interface. ``kernel_for`` finds the one for a layer.

A schedule has entries, each a dense block of queries and keys. A kernel computes one entry in a
launch, or as many as it can take. Every kernel gives outputs (n, H, E) and their
log-sum-exp (n, H), natural log, float32 (float64 for float64). Its backward takes the merged output
and log-sum-exp.

Every query of an entry sees some key of the entry. So a row whose scores have no finite sum (NaN,
or all of them infinite) must have NaN as its log-sum-exp: the merge would leave out a row with
-inf, as if it had seen nothing, and +inf would outweigh all others.

n rows of a launch, H query heads, G key-value heads, D head size, E head size of values.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import itertools
import math
import sys
import warnings
from array import array
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from hcp import _core
from hcp.exchange.layout import copied, tensor_of
from hcp.exchange.tables import Entry, Sections, places

_Rows: TypeAlias = "slice[int, int, None]"


class Launch:
    """Entries that one launch computes. Their queries, and their keys, ascend without overlap."""

    bounds_change = False
    """Whether what ``bounds`` returns is written anew between calls: then nothing that is made of
    its contents may be kept."""
    _blocks: Tensor

    def __init__(self, entries: Sequence[Entry]) -> None:
        first, last = entries[0], entries[-1]
        self.entries = entries
        self._begin(
            slice(first.query_row, last.query_row + last.query_rows),
            slice(first.key_row, last.key_row + last.key_rows),
            first.window,
        )

    @classmethod
    def of_table(cls, fields: Sequence[int], blocks: Tensor) -> Launch:
        """A launch of a table of the core. ``fields``: begin and end of its queries and of its
        keys, and its window. ``blocks``: the fields of its entries."""
        launch = cls.__new__(cls)
        launch._blocks = blocks
        query, query_end, key, key_end, *window = fields
        launch._begin(slice(query, query_end), slice(key, key_end), (window[0], window[1]))
        return launch

    def _begin(self, queries: _Rows, keys: _Rows, window: tuple[int, int]) -> None:
        self.queries, self.keys, self.window = queries, keys, window
        self.chosen: dict[tuple[object, ...], Any] = {}
        """The kernel that computes it, by call, where one chooses between others: see ``auto``."""
        self.kept: dict[str, Any] = {}
        """Values that a kernel made of it for the calls of all layers, under the kernel's name."""
        self._bounds: tuple[Tensor, Tensor] | None = None

    @cached_property
    def entries(self) -> Sequence[Entry]:
        """Made when a kernel asks for them."""
        return [Entry(*fields) for fields in self._blocks.tolist()]

    def packed(self, sequences: int = 0) -> Packed:
        """The entries as libraries take them. ``sequences``: see ``Packed.places``."""
        fields = array("q", itertools.chain.from_iterable(self.entries))
        return Packed(tensor_of(_core.packed(fields, sequences), torch.int64))

    @cached_property
    def _packed(self) -> Packed:
        return self.packed()

    @property
    def longest(self) -> tuple[int, int]:
        """Most queries, and most keys, of an entry."""
        return self._packed.sizes.most_queries, self._packed.sizes.most_keys

    @property
    def longest_bounds(self) -> tuple[int, int]:
        """The same of the sequences of ``bounds``."""
        return self._packed.sizes.most_bound_queries, self._packed.sizes.most_bound_keys

    @property
    def queries_are_whole(self) -> bool:
        """Whether every query of the launch belongs to an entry."""
        return self._packed.sizes.queries == self.queries.stop - self.queries.start

    @property
    def keys_are_whole(self) -> bool:
        """Whether every key of the launch belongs to an entry."""
        return self._packed.sizes.keys == self.keys.stop - self.keys.start

    @property
    def pairs_of_a_query(self) -> float:
        """The keys that a query of an entry sees on average."""
        return self._packed.sizes.pairs / self._packed.sizes.queries

    def bounds(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """cu_seqlens of queries and of keys, int32, on the device: those of the entries, and the
        gaps between them as queries without keys and keys without queries. Kept for the next
        layer."""
        if self._bounds is None:
            bounds = self._packed.section("BOUNDS").to(torch.int32).t().contiguous()
            queries, keys = copied(bounds, device)
            self._bounds = queries, keys
        return self._bounds


ResultGrads: TypeAlias = tuple[Tensor, Tensor | None]
"""The gradients of an output and of its log-sum-exp. None: 0."""

Attended: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Queries, keys, values, output and log-sum-exp: what a forward took, and what it gave once all
launches were merged."""


class Kernel(Protocol):
    """Computes calls. Rows may have any stride; the elements of a head are adjacent."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]: ...

    def capped(self, softcap: float) -> Kernel | None:
        """The kernel with scores s as softcap * tanh(s / softcap). None: the library has none."""

    @property
    def packs(self) -> bool:
        """Whether a launch computes as many entries as ascend in queries and in keys and have one
        window; else it computes one."""

    def forward(
        self, launch: Launch, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of the launch's queries. The log-sum-exp is finite or NaN: see
        ``nan_for_infinity``."""

    def backward(
        self, launch: Launch, grads: ResultGrads, attended: Attended, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This launch's share of the gradients of its queries, keys and values, in their shapes.
        Rows that no entry names may hold anything.

        The gradient of the log-sum-exp, times a score's weight, adds to that score's gradient.
        """


class KernelCall(NamedTuple):
    """A launch as a kernel is asked about it. Heads, sizes and dtype are those of the rows."""

    launch: Launch
    query: Tensor
    value: Tensor
    backward: bool
    grad_lse: bool
    """Whether the log-sum-exp has a gradient."""


class PackedKernel(Kernel, Protocol):
    """A kernel that computes a whole pack in one launch, so that "auto" can choose it."""

    def takes(self, call: KernelCall) -> bool:
        """Whether the library has a kernel for the call. One that has not is called only where no
        other has, and says why not."""


def join(entries: Sequence[Entry], *, packs: bool) -> list[Launch]:
    """The entries of one stage as launches of a kernel. ``packs``: see ``Kernel``."""
    fields = array("q", itertools.chain.from_iterable(entries))
    return LaunchTable(tensor_of(_core.join_entries(fields, packs), torch.int64)).launches()


class PackedSizes(NamedTuple):
    """``hcp_packed_sizes``."""

    most_queries: int
    """Of an entry."""
    most_keys: int
    most_bound_queries: int
    """Of a sequence of ``Launch.bounds``."""
    most_bound_keys: int
    queries: int
    """Of all entries."""
    keys: int
    pairs: int
    """Pairs of a query and a key that it sees."""
    square: int
    """1 where each entry has as many queries as keys."""


class Packed(Sections):
    """Entries of one launch as libraries take them. Rows count from the launch's first."""

    SECTIONS = _core.PACKED_SECTIONS
    PLACES = places(SECTIONS)

    @cached_property
    def sizes(self) -> PackedSizes:
        return PackedSizes(*self.records("SIZES")[0])

    def places(self) -> Tensor:
        """int64 (2, 2 sequences + 1), of queries and of keys: where each entry begins and, for each
        spare sequence and once more, where the last one ends; then the rows of each entry, 0 of
        spare sequences."""
        return torch.cat([self.section("STARTS"), self.section("ROWS")]).t().contiguous()


class LaunchTable(Sections):
    """Launches, as the core's tables have them."""

    SECTIONS = _core.LAUNCHES_SECTIONS
    PLACES = places(SECTIONS)

    def launches(self) -> list[Launch]:
        """The launches of all stages."""
        blocks, begin, made = self.section("ENTRIES"), 0, []
        for end, *fields in self.records("LAUNCHES"):
            made.append(Launch.of_table(fields, blocks[begin:end]))
            begin = end
        return made


def nan_for_infinity(lse: Tensor) -> Tensor:
    """Replace infinity by NaN in a kernel's log-sum-exp, in place, in one launch.

    Libraries write infinity if the sum over a row's scores is NaN, as they do if it is 0:
    FlashAttention-2 +inf, FlashAttention-4 -inf.
    """
    return torch.nan_to_num_(lse, math.nan, math.nan, math.nan)


def is_ordered(backward: bool) -> bool:
    """Whether a call must give the same bits each time: torch's deterministic algorithms are on,
    and it is a backward, which kernels may sum in any order."""
    return backward and torch.are_deterministic_algorithms_enabled()


def refuse_order(family: str) -> None:
    """Refuse a backward that must give the same bits each time, for a family whose kernel does not.
    Where torch only warns, so does this.

    Raises ValueError.
    """
    if not is_ordered(backward=True):
        return
    message = (
        f"the backward of the backend {family!r} sums in any order, expected a deterministic one "
        "under torch.use_deterministic_algorithms: use the backend 'auto', 'torch' or 'cudnn'"
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise ValueError(message)
    warnings.warn(message, UserWarning, stacklevel=2)


def scores_of_sinks(sinks: Tensor, dtype: torch.dtype) -> Tensor:
    """Sinks as log-sum-exps of their own. +inf becomes NaN, as in a softmax."""
    return torch.nan_to_num(sinks.to(dtype), math.nan, math.nan, -math.inf)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a kernel sums in, and that of its log-sum-exp."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- families ------------------------------------------------------------------------------------

FLASH_ATTN_4 = "4.0.0b36"
"""The version of flash-attn-4 whose compiled functions hcp calls."""

KernelsFor = Callable[[torch.device], Sequence[Kernel]]
"""Gives a library's kernels for a device, the preferred one first."""


class KernelFamily(NamedTuple):
    """The kernels of one library: a backend whose keys travel by hcp's schedules."""

    load: Callable[[], KernelsFor]
    """Imports the module that calls the library. Raises ImportError if the library is missing."""
    package: str | None = None
    """The library's name for pip. None: torch has it."""
    capability: tuple[int, int] = 0, 0
    """The least compute capability of a GPU that it runs on. (0, 0): it runs on any device."""
    reason: str = ""
    """Why it needs this capability: a sentence."""
    newest: int | None = None
    """The newest major compute capability that it has kernels for. None: for those to come too."""
    install: str = ""
    """The command that installs the package, or a sentence that says how to."""
    module: str | None = None
    """The module that is there whatever the package is called: builds from source have had other
    names. None: the package has one name."""

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether it has kernels for GPUs of a compute capability."""
        return capability >= self.capability and (
            self.newest is None or capability[0] <= self.newest
        )

    @property
    def version(self) -> str | None:
        """The version of the package, which is not imported. None: it is not installed."""
        version = version_of(self.package)
        if version is None and self.module is not None and _is_there(self.module):
            return "of unknown version"
        return version


def version_of(package: str | None) -> str | None:
    """The version of a package, which is not imported; None: it is not installed. Without a
    package, that of torch."""
    try:
        return importlib.metadata.version(package or "torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_there(module: str) -> bool:
    """Whether a module can be found. It is not imported."""
    loaded = sys.modules.get(module) is not None
    return loaded or importlib.util.find_spec(module) is not None


def _module(name: str) -> Callable[[], KernelsFor]:
    """Load the function ``for_device`` of a module, which is imported only then."""

    def load() -> KernelsFor:
        for_device: KernelsFor = importlib.import_module(name).for_device
        return for_device

    return load


FAMILIES: dict[str, KernelFamily] = {
    "auto": KernelFamily(_module("hcp.attention.kernels.auto")),
    "torch": KernelFamily(_module("hcp.attention.kernels.flash_attn_torch")),
    "cudnn": KernelFamily(
        _module("hcp.attention.kernels.cudnn"),
        "nvidia-cudnn-frontend",
        (9, 0),
        "Below, its backward takes no packed log-sum-exp.",
        newest=10,
        install="python -m pip install nvidia-cudnn-frontend",
    ),
    # Its kernels are those of "torch", which lack only soft-capping.
    "flash_attn": KernelFamily(
        _module("hcp.attention.kernels.flash_attn_2"),
        "flash-attn",
        (8, 0),
        install="python -m pip install --no-build-isolation flash-attn",
    ),
    "flash_attn_4": KernelFamily(
        _module("hcp.attention.kernels.flash_attn_4"),
        "flash-attn-4",
        (9, 0),
        "Below, its backward has no kernel.",
        install=f"python -m pip install flash-attn-4=={FLASH_ATTN_4}",
    ),
    "flash_attn_3": KernelFamily(
        _module("hcp.attention.kernels.flash_attn_3"),
        "flash-attn-3",
        (9, 0),
        newest=9,
        install="build it from the folder hopper of FlashAttention's repository; no index has it",
        module="flash_attn_interface",
    ),
}


def families() -> list[str]:
    """The names of all families."""
    return list(FAMILIES)


_loaded: dict[tuple[KernelFamily, torch.device], Sequence[Kernel]] = {}


def kernels_of(name: str, device: torch.device) -> Sequence[Kernel]:
    """A family's kernels for a device, the preferred one first. Made once for all layers.

    Raises ValueError for a device that the family does not run on.
    """
    family = FAMILIES[name]
    if family.capability > (0, 0):
        _check_device(name, family, device)
    kernels = _loaded.get((family, device))
    if kernels is None:  # of two threads that load them at once, both get the first one's
        kernels = _loaded.setdefault((family, device), family.load()(device))
    return kernels


def _check_device(name: str, family: KernelFamily, device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(
            f"the backend {name!r} is asked for {device.type}, expected CUDA: use 'torch' there"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < family.capability:
        found, least = (".".join(map(str, pair)) for pair in (capability, family.capability))
        message = (
            f"the backend {name!r} is asked for compute capability {found}, expected {least} or "
            f"higher: use 'torch' there. {family.reason}"
        )
        raise ValueError(message.rstrip())
    if family.newest is not None and capability[0] > family.newest:
        found = ".".join(map(str, capability))
        raise ValueError(
            f"the backend {name!r} is asked for compute capability {found}, expected "
            f"{family.newest}.x or lower, for which it has kernels: use 'torch' or 'flash_attn_4'"
        )


class KernelChoice(NamedTuple):
    """A layer's choice of a kernel. The device and the dtype decide the rest."""

    family: str = "auto"
    softcap: float = 0.0


def kernel_for(device: torch.device, dtype: torch.dtype, choice: KernelChoice) -> Kernel:
    """The first kernel of the family that takes the dtype and, where scores are capped, caps them.

    Raises ValueError where no kernel of the family does.
    """
    family, softcap = choice
    candidates = kernels_of(family, device)
    fitting = [kernel for kernel in candidates if dtype in kernel.dtypes]
    if not fitting:
        raise ValueError(
            f"dtype is {dtype} on {device.type}, expected one of "
            f"{list(dict.fromkeys(t for k in candidates for t in k.dtypes))} for {family!r}"
        )
    if softcap == 0.0:
        return fitting[0]
    for kernel in fitting:
        capped = kernel.capped(softcap)
        if capped is not None:
            return capped
    raise ValueError(
        f"softcap is {softcap} for {dtype} on {device.type}, expected 0.0: PyTorch's "
        "FlashAttention caps no scores; the formula does, for float32 and float64, and on CUDA the "
        "packages flash-attn-4, flash-attn-3 and flash-attn do, which the backend 'auto' uses once "
        "installed"
    )
