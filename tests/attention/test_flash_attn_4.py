"""flash-attn-4's compiled functions called directly. tests/cuda runs them with the package."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.flash_attn_4 import stand_in
from support.packs import (
    Block,
    Rows,
    drawn,
    errors,
    exact,
    expect_order_refused,
    packed,
    results,
)

from hcp.attention.fixed_capacity import Capacity, FixedLaunch, FixedTables
from hcp.attention.kernels import KernelCall, Launch

Load = Callable[..., Any]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Load hcp's adapter over a stand-in of the package."""
    real = importlib.metadata.version
    names = "hcp.attention.kernels.flash_attn_4_compiled", "hcp.attention.kernels.flash_attn_4"

    def load(interface: ModuleType, version: str = "4.0.0b36", capability: int = 9) -> Any:
        monkeypatch.setattr(
            importlib.metadata, "version", lambda x: version if x == "flash-attn-4" else real(x)
        )
        cute = ModuleType("flash_attn.cute")
        cute.interface = interface  # type: ignore[attr-defined]
        for name, module in (("flash_attn", ModuleType("flash_attn")), ("flash_attn.cute", cute)):
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
        return importlib.import_module(names[1])

    yield load
    import hcp.attention.kernels as package

    for name in names:
        if sys.modules.pop(name, None):
            delattr(package, name.rpartition(".")[2])


GAPS = [Block(5, 9), Block(1, 1, (2, 3)), Block(20, 33, (0, 1)), Block(2, 2, (3, 0))]
MANY = [Block(3, 4)] * 9
ONE = [Block(7, 7)]
CASES: dict[str, Any] = {
    "causal": {},
    "full": {"window": (-1, -1)},
    "window": {"window": (3, 2)},
    "left": {"window": (4, -1)},
    "causal window": {"window": (4, 0)},
    "one query head a key head": {"heads": (4, 4)},
    "unequal sizes": {"sizes": (64, 40)},
    "unequal sizes, one query head a key head": {"sizes": (64, 40), "heads": (4, 4)},
    "wider values": {"sizes": (40, 64)},
    "wide": {"sizes": (256, 256), "heads": (2, 1)},
    "very many": {"blocks": MANY},
    "one tile": {"blocks": ONE},
    "softcap": {"softcap": 5.0},
    "gradient of the log-sum-exp": {"grad_lse": True},
    "float16": {"dtype": torch.float16},
}


def case(
    blocks: Any = GAPS, window: tuple[int, int] = (-1, 0), softcap: float = 0.0, **options: Any
) -> tuple[Launch, Rows, float]:
    launch = packed(blocks, window)
    return launch, drawn(launch, **options), softcap


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_the_second_call_goes_around_the_package_with_equal_results(
    load: Load, options: dict[str, Any]
) -> None:
    package = stand_in()
    launch, rows, softcap = case(**options)
    kernel = load(package).Flash4(softcap)
    first = results(kernel, launch, rows)
    assert package.calls == ["forward", "backward"]
    kernels = package.alone.entered
    second = results(kernel, launch, rows)
    assert package.calls == ["forward", "backward"]
    assert package.alone.entered == 2 * kernels
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b) or torch.equal(a.isnan(), b.isnan())
    worst = errors(launch, second, exact(launch, rows, softcap))
    assert max(worst.values()) <= 0.02, worst


def test_other_lengths_are_of_the_same_kind_and_other_masks_are_not(load: Load) -> None:
    package = stand_in()
    kernel = load(package).Flash4()
    long = [Block(20, 40), Block(30, 30)]
    for blocks in (long, [*long, *long], [Block(200, 300)]):
        launch, rows, _ = case(blocks)
        worst = errors(launch, results(kernel, launch, rows), exact(launch, rows))
        assert max(worst.values()) <= 0.02, worst
    assert package.calls == ["forward", "backward"]
    for options in (
        {"window": (-1, -1)},
        {"window": (5, 0)},
        {"heads": (4, 4)},
        {"sizes": (72, 72)},
        {"blocks": [*long] * 4},
    ):
        before = len(package.calls)
        launch, rows, _ = case(**{"blocks": long, **options})  # type: ignore[arg-type]
        results(kernel, launch, rows)
        assert package.calls[before:] == ["forward", "backward"]
    launch, rows, _ = case([Block(2, 2), Block(3, 40)])  # of one tile of queries
    before = len(package.calls)
    results(kernel, launch, rows)
    assert package.calls[before:] == ["backward"]


def test_a_launch_is_prepared_once(load: Load) -> None:
    adapter = load(stand_in())
    launch, rows, _ = case()
    results(adapter.Flash4(), launch, rows)
    (pack,) = launch.kept.values()
    launch.sizes = None  # type: ignore[assignment,method-assign]
    results(adapter.Flash4(), launch, rows)
    (again,) = launch.kept.values()
    assert again is pack


def test_tiles_of_very_many_sequences_are_counted_once_for_all_layers(load: Load) -> None:
    package = stand_in()
    kernel = load(package).Flash4()
    launch, rows, _ = case(MANY)
    results(kernel, launch, rows)  # by the package
    by_the_package = [*package.counted]
    assert len(by_the_package) == 3  # of queries, forward and backward, and of keys
    expected = results(kernel, launch, rows)
    assert package.counted[3:] == by_the_package
    for a, b in zip(results(kernel, launch, rows), expected, strict=True):
        assert torch.equal(a, b) or torch.equal(a.isnan(), b.isnan())
    assert package.counted[6:] == []
    other, rows, _ = case([*MANY, *ONE])
    worst = errors(other, results(kernel, other, rows), exact(other, rows))
    assert max(worst.values()) <= 0.02, worst
    assert package.counted[6:] == by_the_package


def test_tiles_are_counted_anew_where_the_tables_of_a_graph_handler_change(load: Load) -> None:
    package = stand_in()
    kernel = load(package).Flash4()
    tables = FixedTables(
        Capacity(rows=600, sequences=8, max_seqlen=600, ranks=1), torch.device("cpu")
    )
    launch = FixedLaunch(tables, (-1, 0))
    query = torch.randn(600, 2, 32).bfloat16()
    for lengths in ([300, 300], [100] * 6):
        ends = torch.tensor([0, *lengths]).cumsum(0)
        for bounds in (tables.query_bounds, tables.key_bounds):
            bounds.fill_(600)[: len(ends)] = ends
        for _ in range(3):
            package.counted.clear()
            out, lse = kernel.forward(launch, query, query, query, 1.0)
            kernel.backward(launch, (out, None), (query, query, query, out, lse), 1.0)
            assert len(package.counted) == 3


def test_rows_of_any_strides_are_taken(load: Load) -> None:
    kernel = load(stand_in()).Flash4()
    launch, rows, _ = case(heads=(4, 4))
    expected = results(kernel, launch, rows)
    fused = torch.cat([x.unsqueeze(1) for x in (rows.query, rows.query)], 1)
    odd = torch.zeros(rows.key.numel() + 1, dtype=rows.key.dtype)[1:].view(rows.key.shape)
    odd.copy_(rows.key)
    turned = rows.value.transpose(0, 2).contiguous().transpose(0, 2)
    given = rows._replace(query=fused[:, 1], key=odd, value=turned)
    assert not given.query.is_contiguous()
    assert given.key.data_ptr() % 16
    for a, b in zip(results(kernel, launch, given), expected, strict=True):
        assert torch.equal(a, b) or torch.equal(a.isnan(), b.isnan())
    same = rows.grad_out[:1, :1].expand_as(rows.grad_out)
    found = results(kernel, launch, rows._replace(grad_out=same))
    wanted = results(kernel, launch, rows._replace(grad_out=same.contiguous()))
    assert all(torch.equal(a, b) for a, b in zip(found[2:], wanted[2:], strict=True))


def test_a_deterministic_backward_is_not_taken_and_refused(load: Load) -> None:
    kernel = load(stand_in()).Flash4()
    launch, rows, _ = case(ONE)
    expect_order_refused(kernel, launch, rows, "flash_attn_4")


def test_no_rows_are_left_to_the_package(load: Load) -> None:
    package = stand_in()
    kernel = load(package).Flash4()
    launch, rows, _ = case(ONE)
    none = rows.key[:0]
    for _ in range(2):
        out, _ = kernel.forward(launch, rows.query, none, none, 1.0)
        assert not out.any()
    assert package.calls == ["forward"] * 2


# ---- where it is not what it was written for -----------------------------------------------------


def expect_the_package(kernel: Any, package: Any) -> None:
    launch, rows, _ = case()
    for _ in range(3):
        worst = errors(launch, results(kernel, launch, rows), exact(launch, rows))
        assert max(worst.values()) <= 0.02, worst
    assert package.calls == ["forward", "backward"] * 3


def test_another_version_is_called_by_its_own_functions(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    package = stand_in()
    only = ModuleType("flash_attn.cute.interface")  # of another version, these two alone are sure
    only._flash_attn_fwd = package._flash_attn_fwd  # type: ignore[attr-defined]
    only._flash_attn_bwd = package._flash_attn_bwd  # type: ignore[attr-defined]
    adapter = load(only, version="4.0.0")
    (line,) = caplog.messages
    assert line.startswith("flash-attn-4 is 4.0.0, expected 4.0.0b36: every call goes")
    assert not adapter.CALLER.direct(torch.device("cpu"))
    expect_the_package(adapter.Flash4(), package)
    assert len(caplog.messages) == 1


def test_the_extra_installs_the_version_that_is_called_directly(load: Load) -> None:
    load(stand_in())
    version = sys.modules["hcp.attention.kernels.flash_attn_4_compiled"].VERSION
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())
    extra = project["project"]["optional-dependencies"]["kernels"]
    (pinned,) = (line for line in extra if line.startswith("flash-attn-4"))
    assert pinned.partition(";")[0] == f"flash-attn-4=={version}"


def test_a_package_that_lacks_a_name_is_called_by_its_own_functions(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    package = stand_in()
    del package._bwd_preprocess.compile_cache
    tiles = package._tile_size_bwd_sm90
    del package._tile_size_bwd_sm90
    adapter = load(package)
    lacks = "has no _tile_size_bwd_sm90, _bwd_preprocess.compile_cache"
    assert f"flash-attn-4 4.0.0b36 {lacks}: every call goes" in caplog.text
    package._tile_size_bwd_sm90, package._bwd_preprocess.compile_cache = tiles, {}
    expect_the_package(adapter.Flash4(), package)


@pytest.mark.parametrize("capability", [8, 10, 12])
def test_another_gpu_is_served_by_the_package(
    load: Load, capability: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    package = stand_in()
    expect_the_package(load(package, capability=capability).Flash4(), package)
    assert caplog.text.count(f"flash-attn-4 on compute capability {capability}.0, expected 9") == 1


def test_functions_that_get_other_arguments_are_not_called_directly(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    package = stand_in(calls_of_one_more=True)
    expect_the_package(load(package).Flash4(), package)
    assert caplog.text.count("calls of this kind go through its own Python") == 2


def test_tensors_in_other_places_are_not_called_directly(load: Load) -> None:
    """Two tensors of one shape, one in the other's place: the same lists of shapes."""
    package = stand_in()
    adapter = load(package)
    compiled = sys.modules["hcp.attention.kernels.flash_attn_4_compiled"]
    launch, rows, _ = case()
    run = compiled.Backwards.run  # type: ignore[attr-defined]

    def swapped(self: Any, functions: Any, blocks: Any, memory: list[torch.Tensor]) -> Any:
        query, key, value, out, grad_out, *others = memory
        return run(self, functions, blocks, [query, key, value, grad_out, out, *others])

    compiled.Backwards.run = swapped  # type: ignore[attr-defined]
    kernel = adapter.Flash4()
    for _ in range(2):
        worst = errors(launch, results(kernel, launch, rows), exact(launch, rows))
        assert max(worst.values()) <= 0.02, worst
    assert package.calls == ["forward", "backward", "backward"]


def test_threads_take_turns(load: Load) -> None:
    package = stand_in()
    kernel = load(package).Flash4()
    failures = []

    def work(size: int) -> None:
        try:
            launch, rows, _ = case(sizes=(size, size))
            expected = exact(launch, rows)
            for _ in range(8):
                worst = errors(launch, results(kernel, launch, rows), expected)
                assert max(worst.values()) <= 0.02, worst
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(size,)) for size in (32, 32, 64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert package.alone.entered > 0


@pytest.mark.parametrize(
    ("capability", "sizes", "taken"),
    [
        (9, (256, 64), True),
        (9, (264, 64), False),
        (9, (60, 60), False),
        (10, (128, 64), True),
        (10, (192, 128), True),
        (10, (256, 256), True),
        (10, (160, 160), False),
        (10, (192, 192), False),
    ],
)
def test_head_sizes_are_those_of_the_gpu(
    load: Load, capability: int, sizes: tuple[int, int], taken: bool
) -> None:
    kernel = load(stand_in(), capability=capability).Flash4()
    launch, rows, _ = case(ONE, sizes=sizes)
    assert (
        kernel.takes(KernelCall(launch, rows.query, rows.value, backward=False, grad_lse=False))
        == taken
    )
    if not taken:
        with pytest.raises(ValueError, match=f"head sizes are {sizes[0]} and {sizes[1]}, expected"):
            kernel.forward(launch, *rows.qkv, 1.0)
