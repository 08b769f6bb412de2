"""The cost of one sequence at a degree, in integers, so that all ranks decide alike."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

from hcp import _core
from hcp._validate import expect_names, expect_size, expect_sizes
from hcp._words import Preset
from hcp.planning import saved

PRICES: tuple[str, ...] = _core.PRICES
TIMES = tuple(name for name in PRICES if name not in ("window", "tile", "overlap"))
"""The prices that are times."""
MOVING = ("exchange", "exchange_far", "all_to_all", "all_to_all_far", "step")
"""The prices of exchanging rows with other ranks."""


class TimeTable(NamedTuple):
    """Measured or computed times of sequences, by length and degree."""

    lengths: tuple[int, ...]
    """Ascending."""
    degrees: tuple[int, ...]
    """Ascending. A plan under the table uses these degrees and no others."""
    times: tuple[int, ...]
    """len(lengths) * len(degrees) integers, row after row, one row per length. 0: there is no time,
    and no plan uses the degree for the length."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Integer prices in one unit of your choice: only their ratios decide a plan.

    One sequence of L tokens on d ranks takes
    ``(pair * L * (L + 1) / 2 + token * L) / d + exchange * (L - L / d)``. Every micro-batch on a
    rank takes ``launch`` in addition, and ``host`` at least.

    The defaults are for those who know no prices. A token through the linear layers costs as much
    as 12,288 pairs, which are those of a hidden size of 4096: the 24,576 s + s^2 by which RL
    trainers balance. A launch costs 2,000 tokens, an exchanged token a twentieth of one. These two
    lost least over five decoders of 1B to 70B, two links and eight families of lengths: plans by
    them took 5.6% longer in the mean on 8 ranks than plans by the model's own prices, and 10.4% on
    32 (``benchmarks/studies/default_prices.py``, with ``--seeds 8``, and with ``--ranks 32
    --sequences 256 --seeds 5``).
    """

    pair: int = 2
    """One query-key pair of causal attention."""
    token: int = 24_576
    """One token through everything that is not attention."""
    exchange: int = 1_229
    """One token's keys and values received by one rank."""
    launch: int = 49_152_000
    """The fixed cost of one micro-batch on one rank."""
    exchange_far: int = 0
    """``exchange`` in a group that spans nodes, if that is more."""
    all_to_all: int = 0
    """One token's exchange of rows for heads and back. Attention never hides it. A rank's total
    falls with the degree."""
    all_to_all_far: int = 0
    """``all_to_all`` in a group that spans nodes, if that is more."""
    step: int = 0
    """One more rank in the group."""
    window: int = 0
    """The most keys that a query sees; 0: all before it."""
    tile: int = 0
    """Rows that each of a sequence's 2 d chunks is rounded up to; 0: none."""
    overlap: int = 0
    """1: the exchange overlaps with attention, as in a ring."""
    host: int = 0
    """The least time of one micro-batch on one rank, with rows or without: the time in which its
    host queues it. Where a GPU computes for longer, that hides it. 0: never more than ``launch``,
    as with these defaults, whose launch of 2,000 tokens is above the host's time of a decoder of 8B
    (about 800)."""
    table: TimeTable | None = None
    """Replaces every price but ``launch`` and ``host`` in a plan. The comm type "auto" still uses
    the prices."""
    function: Callable[[int, int], float] | None = None
    """Gives times when the search for a plan needs them: :meth:`from_function`."""
    unit: float | None = None
    """The seconds of one unit, if they are known. They decide nothing but how times are shown."""
    kernels: tuple[str, ...] = ()
    """The backends whose attention kernels were measured for these prices, in order; empty: not
    known, or none. They decide nothing: :func:`hcp.dispatch` warns if others compute."""

    def __post_init__(self) -> None:
        for name in PRICES:
            value = expect_size(f"cost.{name}", getattr(self, name), least=0)
            object.__setattr__(self, name, value)
        if self.table is not None:
            object.__setattr__(self, "table", _checked(self.table))
        if self.unit is not None and not (math.isfinite(self.unit) and self.unit > 0):
            raise ValueError(f"cost.unit is {self.unit!r}, expected seconds > 0")
        object.__setattr__(self, "kernels", _names(self.kernels))
        if self.function is not None and self.unit is None:
            raise ValueError("cost.unit is None, expected seconds > 0 for a cost function")

    @property
    def has_prices(self) -> bool:
        """Whether the model has prices of pairs or bytes. A table of times alone has none."""
        alone = self.table is not None or self.function is not None
        return not alone or self.pair > 0 or self.exchange > 0 or self.all_to_all > 0

    @property
    def prices(self) -> tuple[int, ...]:
        """The prices as integers, in the core's order."""
        return tuple(getattr(self, name) for name in PRICES)

    def time(
        self, length: int, degree: int, ranks_per_node: int = 0, pairs: int | None = None
    ) -> int:
        """Give the time of one sequence, without ``launch``.

        Args:
            length: its tokens.
            degree: ranks that compute it.
            ranks_per_node: of a node; 0: one node has all.
            pairs: its query-key pairs, in place of those of the window.

        Returns:
            The time, in units.
        """
        if self.function is not None:
            return self._call(length, degree)
        own = -1 if pairs is None else pairs
        return _core.cost_time(self.prices, self.table, length, degree, ranks_per_node, own)

    def launched(self, work: int) -> int:
        """Give a rank's time for a micro-batch.

        Args:
            work: the times of its sequences, 0 without any.

        Returns:
            ``launch + work``, and ``host`` at least.
        """
        return max(self.host, self.launch + work)

    @classmethod
    def from_function(
        cls,
        f: Callable[[int, int], float],
        *,
        launch: float | None = None,
        unit: float = 1e-9,
        prices: CostModel | None = None,
    ) -> CostModel:
        """Make a model of any function of a length and a degree.

        On several ranks, send one rank's ``tabulated`` to the others, since floats may differ
        between machines.

        Args:
            f: ``f(length, degree)`` gives seconds. The search for a plan calls it once per distinct
                length and degree that it looks at, and the plan keeps these times as its table. Its
                ``bound`` holds for plans of these times: of all, if ``degree * f(length, degree)``
                does not fall as the degree grows. An exception of ``f`` ends the search.
            launch: seconds of one micro-batch on one rank; None: 0, or that of ``prices``.
            unit: seconds become integers of so many seconds, rounded up.
            prices: a model of prices with a ``unit``, such as a calibrated one; its unit is then
                that of all. The comm type "auto" chooses by these prices, and is refused without
                them, since whole times do not contain the time of a comm type. They decide nothing
                else.

        Returns:
            The model.

        Raises:
            ValueError: seconds below 0, or prices without a unit.
        """
        if launch is not None and not (math.isfinite(launch) and launch >= 0):
            raise ValueError(f"launch is {launch!r}, expected seconds >= 0")
        if not (math.isfinite(unit) and unit > 0):
            raise ValueError(f"unit is {unit!r}, expected seconds > 0")
        if prices is None:
            fixed = round((launch or 0.0) / unit)
            return cls(pair=0, token=0, exchange=0, launch=fixed, function=f, unit=unit)
        if prices.unit is None or prices.table is not None or prices.function is not None:
            raise ValueError(
                "prices is a model without a unit or with times of its own, expected prices of "
                "known seconds: CostModel.from_seconds, a preset, or what calibrate wrote"
            )
        fixed = prices.launch if launch is None else round(launch / prices.unit)
        return replace(prices, function=f, launch=fixed)

    def tabulated(self, lengths: Iterable[int], degrees: Iterable[int]) -> CostModel:
        """Make the model plain integers: a function becomes a table, all else stays.

        Args:
            lengths: of the sequences that will be planned.
            degrees: that a plan may have.

        Returns:
            The model, which equals itself on every rank.
        """
        if self.function is None:
            return self
        rows, columns = tuple(sorted(set(lengths))), tuple(sorted(set(degrees)))
        times = tuple(self._call(length, degree) for length in rows for degree in columns)
        table = TimeTable(rows, columns, times)
        return replace(self, function=None, table=table)

    def _call(self, length: int, degree: int) -> int:
        assert self.function is not None
        assert self.unit is not None
        return _core.function_time(self.function, self.unit, length, degree)

    @classmethod
    def from_seconds(
        cls, *, window: int = 0, tile: int = 0, overlap: int = 0, **seconds: float
    ) -> CostModel:
        """Make a model of prices in seconds, measured or computed. Missing prices are 0.

        Prices become integers of one unit, a power of ten, in which ``pair`` (or ``token``, if
        ``pair`` is 0) has four digits. It is right to 0.05%, and a thousand sequences of a million
        tokens still sum within 63 bits.

        Args:
            window: the most keys that a query sees; 0: all before it.
            tile: rows that a chunk is rounded up to; 0: none.
            overlap: 1: the exchange overlaps with attention.
            **seconds: of ``pair``, ``token``, ``exchange``, ``launch``, ``exchange_far``,
                ``all_to_all``, ``all_to_all_far``, ``step`` and ``host``.

        Returns:
            The model.

        Raises:
            ValueError: another name, a number below 0, or ``pair`` and ``token`` both 0.
        """
        named = {"pair": 0.0, "token": 0.0, "exchange": 0.0, "launch": 0.0} | seconds
        unknown = sorted(named.keys() - set(TIMES))
        if unknown:
            raise ValueError(f"{unknown[0]} is not a time, expected {', '.join(TIMES)}")
        for name, value in named.items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value!r}, expected seconds >= 0")
        leading = named["pair"] or named["token"]
        if leading == 0:
            raise ValueError("pair and token are 0, expected one of them > 0")
        unit = float(f"1e{math.floor(math.log10(leading)) - 3}")
        if unit == 0:
            raise ValueError(f"{leading!r} seconds are too few for four digits")
        prices: dict[str, Any] = {name: round(value / unit) for name, value in named.items()}
        return cls(**prices, window=window, tile=tile, overlap=overlap, unit=unit)

    def save(self, path: str | os.PathLike[str], provenance: Mapping[str, Any]) -> None:
        """Write the integers as JSON, for :meth:`load`.

        Args:
            path: of the file.
            provenance: the origin of the prices, as JSON values; the names of ``kernels`` are its
                entry of that name, with their versions or without.

        Raises:
            ValueError: the model is a function: save what ``tabulated`` gives.
        """
        if self.function is not None:
            raise ValueError("the cost model is a function: save what tabulated(...) gives")
        table = None if self.table is None else self.table._asdict()
        entries = {
            "unit_seconds": self.unit,
            "prices": dict(zip(PRICES, self.prices, strict=True)),
            "table": table,
        }
        known = {"kernels": list(self.kernels)} if self.kernels else {}
        saved.write(path, FORMAT, entries, known | dict(provenance))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostModel:
        """Read a file of :meth:`save` or ``hcp calibrate``: equal integers on every rank.

        Args:
            path: of the file.

        Returns:
            The model.

        Raises:
            ValueError: an entry that is not as expected; the file and the entry are named.
        """
        return saved.read(path, FORMAT, ("unit_seconds", "prices", "table"), _from_entries)

    @classmethod
    def for_transformer(
        cls,
        *,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_query_groups: int | None = None,
        head_dim: int | None = None,
        bytes_per_element: int = 2,
        flops_per_byte: int = 1_600,
        flops_per_byte_far: int = 8_000,
        launch_flops: int = 100_000_000_000,
        host_flops: int = 350_000_000_000,
    ) -> CostModel:
        """Make a model of prices in floating-point operations of one decoder layer's forward pass.
        SwiGLU is assumed (three matrices in the feed-forward layer).

        Args:
            hidden_size: values of a token between layers.
            ffn_hidden_size: values of a token inside the feed-forward layer.
            num_attention_heads: query heads.
            num_query_groups: key-value heads; None: as many.
            head_dim: of a head; None: hidden_size / num_attention_heads.
            bytes_per_element: of keys and values.
            flops_per_byte: the machine's compute rate over its exchange rate (default: 400 TFLOP/s
                over 250 GB/s, as by NVLink).
            flops_per_byte_far: the same in a group that spans nodes (default: over 50 GB/s). It
                counts where a plan knows ``ranks_per_node``, and where it is the larger of the two.
            launch_flops: operations that the machine could compute in the time that every
                micro-batch costs a layer, whatever rows it holds (default: 0.25 ms, which were
                fitted to layers of Megatron-Core on H200s).
            host_flops: operations that the machine could compute in the time in which the host
                queues a layer (default: 0.9 ms, a third of the 2.7 ms that a layer of Megatron-Core
                needs forward and backward beside an H200; Transformers needs 4.1).

        Returns:
            The model.
        """
        groups = num_query_groups or num_attention_heads
        sizes = {
            "hidden_size": hidden_size,
            "ffn_hidden_size": ffn_hidden_size,
            "num_attention_heads": num_attention_heads,
            "num_query_groups": groups,
        }
        for name, size in sizes.items():
            expect_size(name, size)
        if head_dim is None and hidden_size % num_attention_heads:
            raise ValueError(
                f"hidden_size ({hidden_size}) % num_attention_heads ({num_attention_heads}) == "
                f"{hidden_size % num_attention_heads}, expected 0, or head_dim"
            )
        head_dim = head_dim or hidden_size // num_attention_heads
        query_width, key_width = num_attention_heads * head_dim, groups * head_dim
        weights = 2 * hidden_size * (query_width + key_width) + 3 * hidden_size * ffn_hidden_size
        sent = 2 * key_width * bytes_per_element
        return cls(
            pair=4 * query_width,
            token=2 * weights,
            exchange=sent * flops_per_byte,
            exchange_far=sent * flops_per_byte_far if flops_per_byte_far > flops_per_byte else 0,
            launch=launch_flops,
            host=host_flops,
        )

    @classmethod
    def preset(cls, name: Preset) -> CostModel:
        """Give a published or measured cost model.

        Args:
            name: one of :data:`hcp.tools.presets.PRESETS`.

        Returns:
            The model.

        Raises:
            ValueError: another name.
        """
        presets: dict[str, CostModel] = import_module("hcp.tools.presets").PRESETS
        if name not in presets:
            raise ValueError(f"preset is {name!r}, expected one of {', '.join(presets)}")
        return presets[name]


FORMAT = "hcp cost model, version 1"
"""The first entry of a saved model."""


def _from_entries(data: dict[str, Any]) -> CostModel:
    expect_names("prices", data["prices"], [n for n in PRICES if n != "host"], ("host",))
    unit, table = data["unit_seconds"], data["table"]
    if unit is not None and type(unit) not in (int, float):
        raise ValueError(f"unit_seconds is {unit!r}, expected a number > 0 or null")
    if table is None and not data["prices"]["pair"] and not data["prices"]["token"]:
        raise ValueError("prices.pair and prices.token are 0, expected one of them > 0")
    rows = None if table is None else _table_from_json(table)
    kernels = data["provenance"].get("kernels", ())
    if not isinstance(kernels, (list, dict, tuple)):
        raise ValueError(f"provenance.kernels is {kernels!r:.60}, expected names of backends")
    return CostModel(**data["prices"], table=rows, unit=unit, kernels=tuple(kernels))


def _names(kernels: Iterable[str]) -> tuple[str, ...]:
    names = tuple(kernels)
    if isinstance(kernels, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"cost.kernels is {kernels!r:.60}, expected names of backends")
    return tuple(sorted(set(names)))


def _table_from_json(table: Any) -> TimeTable:
    expect_names("table", table, TimeTable._fields)
    for name in TimeTable._fields:
        if not isinstance(table[name], list):
            raise ValueError(f"table.{name} is {table[name]!r:.60}, expected a list of integers")
    return TimeTable(**table)


def _checked(table: TimeTable) -> TimeTable:
    """Return the table as ints. Raises ValueError for one that a plan cannot use."""
    if not isinstance(table, TimeTable):
        raise ValueError(f"cost.table is {table!r:.60}, expected an hcp.planning.cost.TimeTable")
    lengths, degrees, times = (
        expect_sizes(f"table.{name}", values, least=int(name != "times"))
        for name, values in table._asdict().items()
    )
    for name, values in (("lengths", lengths), ("degrees", degrees)):
        if any(a >= b for a, b in itertools.pairwise(values)):
            raise ValueError(f"table.{name} is {values!r:.60}, expected ascending integers")
    expected = len(lengths) * len(degrees)
    if len(times) != expected:
        raise ValueError(
            f"table.times has {len(times)} entries, expected lengths * degrees = {expected}"
        )
    return TimeTable(lengths, degrees, times)
