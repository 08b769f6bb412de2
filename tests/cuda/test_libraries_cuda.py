"""Kernels of libraries that are called below their own Python, on one GPU: FlashAttention-4's
compiled functions."""

from __future__ import annotations

import importlib.util
import threading
from typing import Any

import pytest
import torch
from support.packs import Block, Rows, drawn, errors, exact, packed, results
from torch import Tensor

from hcp.attention.kernels import Kernel, KernelCall, Launch, kernels_of

GPU = torch.device("cuda", 0)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


needs_flash_attn_4 = pytest.mark.skipif(
    not has("flash_attn.cute"), reason="needs flash-attn-4 (the package flash_attn.cute)"
)

SHORT = [Block(1, 1), Block(2, 2), Block(3, 3), Block(60, 60)]
GAPS = [Block(130, 200), Block(64, 64, (0, 10)), Block(2, 300, (31, 0)), Block(300, 300, (0, 26))]
LONG = [Block(1000, 3000), Block(700, 700)]
MANY = [Block(5, 9)] * 300
PACKS: dict[str, Any] = {
    "short": {"blocks": SHORT},
    "gaps": {"blocks": GAPS},
    "gaps, no mask": {"blocks": GAPS, "window": (-1, -1)},
    "gaps, causal windows": {"blocks": GAPS, "window": (40, 0)},
    "gaps, windows": {"blocks": GAPS, "window": (40, 7)},
    "gaps, a limit to the left": {"blocks": GAPS, "window": (40, -1)},
    "long": {"blocks": LONG, "sizes": (128, 128), "heads": (32, 8)},
    "very many": {"blocks": MANY},
    "one head of keys": {"blocks": GAPS, "heads": (8, 1)},
    "heads for each other": {"blocks": GAPS, "heads": (4, 4)},
    "short heads for each other": {"blocks": SHORT, "heads": (4, 4)},
    "unequal sizes": {"blocks": GAPS, "sizes": (128, 64)},
    "192 and 128": {"blocks": GAPS, "sizes": (192, 128)},
    "192 and 128, heads for each other": {"blocks": GAPS, "sizes": (192, 128), "heads": (4, 4)},
    "256": {"blocks": GAPS, "sizes": (256, 256)},
    "float16": {"blocks": GAPS, "dtype": torch.float16},
    "gradient of the log-sum-exp": {"blocks": GAPS, "grad_lse": True},
}


def pack_of(options: dict[str, Any]) -> tuple[Launch, Rows]:
    rest = {name: x for name, x in options.items() if name not in ("blocks", "window", "softcap")}
    launch = packed(options["blocks"], options.get("window", (-1, 0)), start=(5, 3))
    return launch, drawn(launch, device="cuda", **rest)


def expect_exact(kernel: Kernel, launch: Launch, rows: Rows, softcap: float = 0.0) -> None:
    worst = errors(launch, results(kernel, launch, rows), exact(launch, rows, softcap))
    assert worst["lse"] <= 1e-4, worst
    assert max(worst.values()) <= 0.02, worst


def expect_equal(found: Tensor, wanted: Tensor, name: str) -> None:
    """Bit for bit."""
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    assert bool(same.all()), f"{name}: {int((~same).sum())} of {same.numel()} differ"


# ---- all -----------------------------------------------------------------------------------------

PACKAGES = [
    "torch",
    pytest.param("cudnn", marks=pytest.mark.skipif(not has("cudnn"), reason="needs cudnn")),
    pytest.param("flash_attn_4", marks=needs_flash_attn_4),
]
SIZES = [(8, 8), (40, 40), (80, 80), (112, 112), (160, 160), (224, 224), (64, 48), (40, 64)]


@pytest.mark.parametrize("heads", [(8, 2), (4, 4)], ids=["8:2", "4:4"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", PACKAGES)
def test_head_sizes_that_a_kernel_takes_give_what_the_formula_gives(
    name: str, sizes: tuple[int, int], heads: tuple[int, int]
) -> None:
    kernel: Any = kernels_of(name, GPU)[0]
    launch, rows = pack_of({"blocks": GAPS, "sizes": sizes, "heads": heads})
    if not all(
        kernel.takes(KernelCall(launch, rows.query, rows.value, x, False)) for x in (False, True)
    ):
        pytest.skip("this library has no such size")
    expect_exact(kernel, launch, rows)


# ---- FlashAttention-4 ----------------------------------------------------------------------------


FLASH_4 = {**PACKS, "softcap": {"blocks": GAPS, "softcap": 20.0}}


def by_package(adapter: Any) -> tuple[Any, Any]:
    """The adapter's forward and backward through the package's own functions."""
    from flash_attn.cute import interface  # type: ignore[import-not-found]

    class ByPackage:
        def __call__(self, calls: Any, rows: list[Tensor], sums: list[Tensor]) -> Any:
            no_results = torch.empty(0, 4, dtype=torch.int64)
            given = torch.ops.hcp.call_memory(rows, sums, no_results)
            return calls.by_package(interface, given)

    return adapter.CALLER, ByPackage()


def twice(
    adapter: Any, kernel: Any, launch: Launch, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Results by compiled functions, which a first call found, and by the package."""
    direct, package = by_package(adapter)
    results(kernel, launch, rows)
    known = dict(direct._functions)
    assert None not in known.values()
    out, lse = kernel.forward(launch, *rows.qkv, 0.125)
    given = (rows.grad_out, rows.grad_lse), (*rows.qkv, out, lse), 0.125
    found = out, lse, *kernel.backward(launch, *given)
    assert direct._functions == known
    with monkeypatch.context() as patch:
        patch.setattr(adapter, "CALLER", package)
        wanted = *kernel.forward(launch, *rows.qkv, 0.125), *kernel.backward(launch, *given)
    return found, wanted


@needs_flash_attn_4
@pytest.mark.parametrize("options", FLASH_4.values(), ids=FLASH_4)
def test_flash_attention_4s_compiled_functions_give_what_the_package_gives(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hcp.attention.kernels import flash_attn_4 as adapter

    if not adapter.CALLER.direct(GPU):
        pytest.skip("another version of flash-attn-4, or another GPU, than it was written for")
    launch, rows = pack_of(options)
    softcap = options.get("softcap", 0.0)
    kernel = adapter.Flash4(softcap)
    found, wanted = twice(adapter, kernel, launch, rows, monkeypatch)
    # What several blocks of threads add to differs from call to call: the gradient of a query with
    # keys in several tiles, and gradients of keys that several query heads share.
    alone = options.get("heads", (8, 2)) == (4, 4)
    one_tile = max(block.keys for block in options["blocks"]) <= 64
    fixed = {"out": True, "lse": True, "dquery": one_tile, "dkey": alone, "dvalue": alone}
    for (name, is_fixed), a, b in zip(fixed.items(), found, wanted, strict=True):
        if is_fixed:
            expect_equal(a, b, name)
        else:
            a, b = (x.double().nan_to_num(0.0) for x in (a, b))  # NaN in gaps, if any
            most = float((a - b).abs().max())
            assert most <= 0.01 * max(1.0, float(b.abs().max())), (name, most)
    worst = errors(launch, found, exact(launch, rows, softcap))
    assert max(worst.values()) <= 0.02, worst


@needs_flash_attn_4
def test_flash_attention_4_takes_rows_of_any_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    from hcp.attention.kernels import flash_attn_4 as adapter

    launch, rows = pack_of({"blocks": SHORT, "heads": (4, 4)})
    kernel = adapter.Flash4()
    expected = results(kernel, launch, rows)
    query, key, value = torch.cat(rows.qkv, 1).split(4, 1)
    strided = rows._replace(query=query, key=key, value=value)
    for name, a, b in zip("olqkv", results(kernel, launch, strided), expected, strict=True):
        expect_equal(a, b, name)
    same = rows.grad_out[:1, :1].expand_as(rows.grad_out)
    found, wanted = (
        results(kernel, launch, rows._replace(grad_out=grad)) for grad in (same, same.contiguous())
    )
    for name, a, b in zip("olqkv", found, wanted, strict=True):
        expect_equal(a, b, name)


@needs_flash_attn_4
def test_flash_attention_4_waits_for_what_is_queued_on_a_stream() -> None:
    from hcp.attention.kernels import flash_attn_4 as adapter

    launch, rows = pack_of({"blocks": SHORT, "heads": (4, 4)})
    kernel = adapter.Flash4()
    expected = results(kernel, launch, rows)
    later = [torch.empty_like(x) for x in rows.qkv]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10**8)
        for target, x in zip(later, rows.qkv, strict=True):
            target.copy_(x)
        given = rows._replace(query=later[0], key=later[1], value=later[2])
        found = results(kernel, launch, given)
    torch.cuda.synchronize()
    for name, a, b in zip("olqkv", found, expected, strict=True):
        expect_equal(a, b, name)


@needs_flash_attn_4
def test_flash_attention_4_is_called_by_several_threads() -> None:
    from hcp.attention.kernels import flash_attn_4 as adapter

    failures: list[BaseException] = []

    def work(options: dict[str, Any]) -> None:
        try:
            launch, rows = pack_of(options)
            for _ in range(20):
                expect_exact(adapter.Flash4(), launch, rows)
        except BaseException as error:
            failures.append(error)

    given = [FLASH_4[name] for name in ("gaps", "gaps", "heads for each other", "float16")]
    threads = [threading.Thread(target=work, args=(options,)) for options in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
