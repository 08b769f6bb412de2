"""Attention on one GPU in loopback: the CPU's tables and cases, exact kernels."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.autocast import DTYPES, across, compare, module, own
from support.cases import Case, loopback_error, loopback_rms
from support.not_finite import expect_nothing_lost
from support.rotary import error as rope_error
from torch import Tensor

import hcp
from hcp.attention.kernels import Kernel, Launch, join, kernels_of
from hcp.attention.kernels.formula import Formula
from hcp.exchange.tables import Entry
from hcp.step.dispatch import Groups

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LENGTHS = (1, 2, 13, 97, 3, 300, 1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("comm_type", hcp.COMM_TYPES)
@pytest.mark.parametrize("degree", range(1, 9))
def test_any_degree_equals_one_rank_in_float64(degree: int, comm_type: str, causal: bool) -> None:
    case = Case(LENGTHS, degree, min_degree=degree, comm_type=comm_type, causal=causal)
    assert loopback_error(case, device="cuda") <= 1e-10


Record = Callable[[str, object], None]
ONE_CALL = {"out": 1.2, "dquery": 1.2, "dkey": 1.2, "dvalue": 1.2}
IN_PARTS = {True: {**ONE_CALL, "dkey": 1.25, "dvalue": 1.25},
            False: {"out": 1.25, "dquery": 1.3, "dkey": 1.2, "dvalue": 1.25}}  # fmt: skip
"""The key is whether the mask is causal."""
SHORT = {"out": "out", "dquery": "dq", "dkey": "dk", "dvalue": "dv"}


def expect_rounding_of_one_call(case: Case, record: Record) -> None:
    """Expect root-mean-square errors against float64, over all rows of all ranks, to be at most so
    many times those of one call of FlashAttention-2 over all of them.

    Rows that one call computes anyway ("a2a") hold 1.2. Of others, a kernel gives each part in
    bfloat16, and the sum, in float32, is rounded once more. Where a row has parts of like weight
    these are three errors of one size (the kernel's own of its weights, the parts', the sum's)
    instead of two, and the ratio comes to sqrt(3 / 2) = 1.22, whatever the degree.
    """
    alone = replace(case, ranks=1, min_degree=1, backend="torch")
    one, found = (loopback_rms(x, device="cuda") for x in (alone, case))
    most = ONE_CALL if case.comm_type == "a2a" else IN_PARTS[case.causal]
    ratios = {name: found[name] / one[name] for name in most}
    record("ratios", {SHORT[name]: ratio for name, ratio in ratios.items()})
    assert max(one.values()) <= 2**-7, one
    assert found["lse"] <= 1e-5, found
    assert found.get("dsinks", 0) <= 2**-7, found
    for name, ratio in ratios.items():
        assert ratio <= most[name], f"{name}: {ratio:.3f} times the error of one call: {ratios}"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("comm_type", hcp.COMM_TYPES)
@pytest.mark.parametrize("degree", range(1, 9))
def test_flash_attention_rounds_as_one_call_does(
    degree: int, comm_type: str, causal: bool, record_property: Record
) -> None:
    case = Case(
        LENGTHS,
        degree,
        min_degree=degree,
        comm_type=comm_type,
        causal=causal,
        head_dim=64,
        dtype="bfloat16",
    )
    expect_rounding_of_one_call(case, record_property)


@settings(max_examples=40)
@given(
    st.integers(1, 7),
    st.lists(st.integers(1, 150), min_size=1, max_size=7),
    st.sampled_from(hcp.COMM_TYPES),
    st.booleans(),
    st.data(),
)
def test_any_plan_equals_one_rank(
    ranks: int, lengths: list[int], comm_type: str, causal: bool, data: st.DataObject
) -> None:
    case = Case(
        tuple(lengths),
        ranks,
        capacity=160,
        min_degree=data.draw(st.integers(1, ranks)),
        comm_type=comm_type,
        causal=causal,
    )
    assert loopback_error(case, device="cuda") <= 1e-10


WINDOWS = [(0, 0), (5, 2), (64, 0), (-1, 40), (100, 100)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("comm_type", hcp.COMM_TYPES)
@pytest.mark.parametrize("degree", [1, 3, 4])
def test_windows_and_sinks_equal_one_rank_in_float64(
    degree: int, comm_type: str, window: tuple[int, int]
) -> None:
    case = Case(LENGTHS, degree, min_degree=degree, comm_type=comm_type, window=window)
    case = replace(case, causal=False, sinks=True, lse=True, value_dim=5)
    assert loopback_error(case, device="cuda") <= 1e-10


@pytest.mark.parametrize("window", [(-1, -1), *WINDOWS])
@pytest.mark.parametrize("comm_type", hcp.COMM_TYPES)
@pytest.mark.parametrize("degree", [1, 3, 4])
def test_flash_attention_with_windows_and_sinks_rounds_as_one_call_does(
    degree: int, comm_type: str, window: tuple[int, int], record_property: Record
) -> None:
    case = Case(LENGTHS, degree, min_degree=degree, comm_type=comm_type, window=window)
    case = replace(
        case, causal=False, sinks=True, lse=True, head_dim=64, value_dim=48, dtype="bfloat16"
    )
    expect_rounding_of_one_call(case, record_property)


# ---- rotary embedding, cross-attention -----------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("turned", [6, 8])
@pytest.mark.parametrize("comm_type", hcp.COMM_TYPES)
@pytest.mark.parametrize("degree", [1, 3, 4])
def test_attention_with_rotary_pos_emb_equals_rotating_first(
    degree: int, comm_type: str, turned: int, interleaved: bool
) -> None:
    errors = hcp.loopback(
        degree, lambda groups: rope_error(groups, comm_type, turned, interleaved, {}), device="cuda"
    )
    assert max(errors) <= 1e-10


@pytest.mark.parametrize("lengths", [(300, 40), (40, 300)], ids=["more queries", "more keys"])
@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"window_size": (20, 9)}, {"causal": True, "window_size": (64, 0)}],
    ids=str,
)
def test_masks_of_cross_attention_by_flash_attention_equal_the_formula(
    lengths: tuple[int, int], options: dict[str, Any]
) -> None:
    """Compare bfloat16 by FlashAttention-2 with float64 by the formula, forward and backward."""

    def difference(groups: Groups) -> float:
        sides = [hcp.plan([n], ranks=2, max_tokens_per_rank=512, min_degree=2) for n in lengths]
        cp, keys = (hcp.ContextParallelHandler(plan, 0, groups.transport) for plan in sides)
        shapes = (cp.rows, 4, 64), (keys.rows, 2, 64), (keys.rows, 2, 64), (cp.rows, 4, 64)
        drawn = [torch.randn(*shape, device="cuda").bfloat16() for shape in shapes]
        found = []
        for dtype in (torch.bfloat16, torch.float64):
            q, k, v, grad = (x.to(dtype).requires_grad_() for x in drawn)
            out = cp.cross_attention(q, k, v, keys, **options)
            found.append([out, *torch.autograd.grad(out, (q, k, v), grad)])
        return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))

    assert max(hcp.loopback(2, difference, device="cuda")) <= 0.06


# ---- kernels of packages -------------------------------------------------------------------------


def has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


needs_flash_attn_4 = pytest.mark.skipif(not has("flash_attn.cute"), reason="needs flash-attn-4")
needs_cudnn = pytest.mark.skipif(not has("cudnn"), reason="needs nvidia-cudnn-frontend")
needs_flash_attn_3 = pytest.mark.skipif(
    not (has("flash_attn_interface") and is_hopper()), reason="needs flash-attn-3 and Hopper"
)
CUDNN = pytest.param("cudnn", marks=needs_cudnn)
FLASH_3 = pytest.param("flash_attn_3", marks=needs_flash_attn_3)
FLASH_4 = pytest.param("flash_attn_4", marks=needs_flash_attn_4)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("comm_type", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize("degree", [1, 3])
@pytest.mark.parametrize("backend", [CUDNN, FLASH_3])
def test_a_package_rounds_as_flash_attention_2_does(
    backend: str, degree: int, comm_type: str, causal: bool, record_property: Record
) -> None:
    case = Case(LENGTHS, degree, min_degree=degree, comm_type=comm_type, causal=causal)
    case = replace(case, head_dim=64, dtype="bfloat16", backend=backend)
    expect_rounding_of_one_call(case, record_property)


@pytest.mark.parametrize("window", [(5, 2), (64, 0), (-1, 40)])
@pytest.mark.parametrize("comm_type", ["p2p", "all_gather"])
@pytest.mark.parametrize("backend", [CUDNN, FLASH_3])
def test_a_package_with_windows_and_sinks_rounds_as_one_call_does(
    backend: str, comm_type: str, window: tuple[int, int], record_property: Record
) -> None:
    case = Case(LENGTHS, 3, min_degree=3, comm_type=comm_type, window=window)
    case = replace(case, causal=False, sinks=True, lse=True, head_dim=64, value_dim=48)
    expect_rounding_of_one_call(replace(case, dtype="bfloat16", backend=backend), record_property)


@needs_flash_attn_4
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("comm_type", hcp.COMM_TYPES)
@pytest.mark.parametrize("backend", ["flash_attn_4", "auto"])
def test_flash_attention_4_rounds_as_flash_attention_2_does(
    backend: str, comm_type: str, causal: bool, record_property: Record
) -> None:
    case = Case(LENGTHS, 3, min_degree=3, comm_type=comm_type, causal=causal)
    case = replace(case, head_dim=64, dtype="bfloat16", backend=backend)
    expect_rounding_of_one_call(case, record_property)


@needs_flash_attn_4
@pytest.mark.parametrize("window", [(-1, -1), *WINDOWS])
@pytest.mark.parametrize("comm_type", ["p2p", "all_gather", "a2a"])
def test_flash_attention_4_with_windows_and_sinks_rounds_as_one_call_does(
    comm_type: str, window: tuple[int, int], record_property: Record
) -> None:
    case = Case(LENGTHS, 3, min_degree=3, comm_type=comm_type, window=window)
    case = replace(case, causal=False, sinks=True, lse=True, head_dim=64, value_dim=48)
    case = replace(case, dtype="bfloat16", backend="flash_attn_4")
    expect_rounding_of_one_call(case, record_property)


@needs_flash_attn_4
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_auto_computes_capped_and_deterministic_calls(softcap: float) -> None:
    plan = hcp.plan(LENGTHS, ranks=1, max_tokens_per_rank=512)

    def attend(groups: Groups, dtype: torch.dtype) -> list[Tensor]:
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
        generator = torch.Generator("cuda").manual_seed(0)
        q, k, v, grad = (
            torch.randn(cp.rows, n, 64, device="cuda", generator=generator).bfloat16().to(dtype)
            for n in (8, 2, 2, 8)
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = cp.attention(*leaves, softcap=softcap)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    def differences(groups: Groups) -> None:
        exact = attend(groups, torch.float64)
        for deterministic in (False, True) if softcap == 0.0 else (False,):
            torch.use_deterministic_algorithms(deterministic)
            try:
                found = [attend(groups, torch.bfloat16) for _ in range(2)]
            finally:
                torch.use_deterministic_algorithms(False)
            for got, want in zip(found[0], exact, strict=True):
                assert float((got - want).abs().max()) <= 0.02 * max(1.0, float(want.abs().max()))
            if deterministic:
                assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    hcp.loopback(1, differences, device="cuda")


# ---- autocast ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("call", [own, across, module], ids=lambda call: call.__name__)
def test_attention_under_autocast_is_that_of_pytorch(
    call: Callable[..., Tensor], dtypes: tuple[torch.dtype, ...]
) -> None:
    hcp.loopback(3, lambda groups: compare(groups, call, dtypes, "p2p"), device="cuda")


# ---- NaN and infinity ----------------------------------------------------------------------------


@pytest.mark.parametrize("comm_type", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize("backend", ["torch", CUDNN, FLASH_3, FLASH_4])
def test_what_is_not_finite_on_one_rank_is_not_finite_under_a_plan(
    backend: str, comm_type: str
) -> None:
    case = Case((300, 40), 3, min_degree=3, comm_type=comm_type, heads=6, kv_heads=3, head_dim=64)
    case = replace(case, dtype="bfloat16", backend=backend)
    for rows in (slice(None), slice(0, 1), slice(150, 151)):
        expect_nothing_lost(case, rows, "cuda")


def test_formula_and_merge_lose_no_nan_in_float64() -> None:
    case = Case((9, 5), 3, min_degree=3, comm_type="all_gather")
    expect_nothing_lost(case, slice(4, 5), "cuda")


# ---- packs ---------------------------------------------------------------------------------------


def packed(high: list[int]) -> Launch:
    """Entries with gaps before and between them, in queries, in keys and in both."""
    places = ((5, 130, 0, 200), (135, 64, 210, 64), (230, 2, 274, 300), (232, 300, 600, 300))
    entries = [Entry(*place, -place[1], h) for place, h in zip(places, high, strict=True)]
    return join(entries, packs=True)[0]


def results(
    kernel: Kernel, launch: Launch, rows: list[Tensor], grads: list[Tensor], scale: float = 0.125
) -> tuple[Tensor, ...]:
    """Output, log-sum-exp and gradients of a launch, on keys that somebody poisoned in the gaps.
    ``grads``: of the output and, perhaps, of the log-sum-exp."""
    query, key, value = rows
    grad_lse = grads[1] if len(grads) > 1 else None
    out, lse = kernel.forward(launch, query, key, value, scale)
    attended = query, key, value, out, lse
    return out, lse, *kernel.backward(launch, (grads[0], grad_lse), attended, scale)


def exact(
    softcap: float, launch: Launch, rows: list[Tensor], grads: list[Tensor]
) -> tuple[Tensor, ...]:
    """The results of every entry alone, by the formula in float64."""
    q0, k0 = launch.queries.start, launch.keys.start
    like = (*rows, grads[0], grads[0][..., 0])
    whole = [rows[0].new_zeros(x.shape, dtype=torch.float64) for x in like]
    dquery, dkey, dvalue, out, lse = whole
    for e in launch.entries:
        q = slice(e.query_row - q0, e.query_row - q0 + e.query_rows)
        k = slice(e.key_row - k0, e.key_row - k0 + e.key_rows)
        own = [x.double() for x in (rows[0][q], rows[1][k], rows[2][k])]
        parts = results(Formula(softcap), Launch([e]), own, [g[q].double() for g in grads])
        for target, at, part in zip(
            (out, lse, dquery, dkey, dvalue), (q, q, q, k, k), parts, strict=True
        ):
            target[at] = part
    return out, lse, dquery, dkey, dvalue


@needs_flash_attn_4
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_flash_attention_4_leaves_the_gaps_of_a_pack_out(mask: str, softcap: float) -> None:
    from hcp.attention.kernels.flash_attn_4 import Flash4

    launch = packed([70, 0, 298, 0] if mask == "causal" else [199, 63, 299, 299])
    assert len(launch.entries) == 4
    torch.manual_seed(0)
    queries, keys = 527, 900

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    rows = [draw(queries, 8, 64), draw(keys, 2, 64), draw(keys, 2, 64)]
    grads = [draw(queries, 8, 64), draw(queries, 8).float()]
    inside = torch.zeros(queries, dtype=torch.bool, device="cuda")
    for e in launch.entries:
        inside[e.query_row - 5 : e.query_row - 5 + e.query_rows] = True
    computed = results(Flash4(softcap), launch, rows, grads)
    for name, got, want in zip(
        ("out", "lse", "dquery", "dkey", "dvalue"),
        computed,
        exact(softcap, launch, rows, grads),
        strict=True,
    ):
        got, want = (x[inside] if len(x) == queries else x for x in (got.double(), want))
        assert float((got - want).abs().max()) <= 0.02 * max(1.0, float(want.abs().max())), name


def entries_with_gaps(sizes: list[tuple[int, int]], window: tuple[int, int]) -> list[Entry]:
    """Entries of so many queries and keys, with rows of none before each."""
    entries, query, key = [], 7, 9
    for i, (queries, keys) in enumerate(sizes):
        query, key = query + 3 * (i % 2), key + 200 * (i % 3)
        ahead = keys - queries
        low = 1 - queries if window[0] < 0 else max(1 - queries, ahead - window[0])
        high = keys - 1 if window[1] < 0 else min(keys - 1, ahead + window[1])
        entries.append(Entry(query, queries, key, keys, low, high))
        query, key = query + queries, key + keys
    return entries


def poison_memory() -> None:
    """Have what is allocated next hold NaN."""
    torch.cuda.empty_cache()
    blocks = [torch.full((n,), torch.nan, device="cuda") for n in (1 << 27, *[1 << 22] * 32)]
    blocks += [torch.full((1 << 10,), torch.nan, device="cuda") for _ in range(512)]
    torch.cuda.synchronize()
    del blocks


PACKED = [(130, 200), (64, 64), (2, 300), (300, 300), (3, 3), (1, 1), (1, 7), (2, 2), (90, 70)]


def expect_the_formula(
    kernel: Kernel, launch: Launch, rows: list[Tensor], grads: list[Tensor]
) -> None:
    queries = len(rows[0])
    inside = torch.zeros(queries, dtype=torch.bool, device="cuda")
    for e in launch.entries:
        first = e.query_row - launch.queries.start
        inside[first : first + e.query_rows] = True
    want = exact(0.0, launch, rows, grads)
    poison_memory()
    computed = results(kernel, launch, rows, grads)
    for name, got, wanted in zip(
        ("out", "lse", "dquery", "dkey", "dvalue"), computed, want, strict=True
    ):
        by_query = name in ("out", "lse", "dquery")
        got, wanted = (x[inside] if by_query else x for x in (got.double(), wanted))
        error = float((got - wanted).abs().max())
        assert error <= 0.02 * max(1.0, float(wanted.abs().max())), (name, launch.window, error)


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (20, 0), (40, 25)])
@pytest.mark.parametrize(
    ("heads", "dtype", "size", "lse"),
    [((32, 8), torch.bfloat16, 128, False), ((4, 4), torch.float16, 64, True)],
    ids=["32:8 bfloat16", "4:4 float16"],
)
@pytest.mark.parametrize("backend", [CUDNN, FLASH_3, FLASH_4])
def test_a_package_computes_packs_with_gaps(
    backend: str,
    heads: tuple[int, int],
    dtype: torch.dtype,
    size: int,
    lse: bool,
    window: tuple[int, int],
) -> None:
    """Also keys that no query of an entry sees, and memory that was not empty."""
    kernel = kernels_of(backend, torch.device("cuda", torch.cuda.current_device()))[0]
    # Under a causal mask a first query that sees a key has no more queries than keys beside it.
    sizes = [(q, k) for q, k in PACKED if q <= k or window[1] > 0]
    torch.manual_seed(0)
    for launch in join(entries_with_gaps(sizes, window), packs=True):
        queries = launch.queries.stop - launch.queries.start
        keys = launch.keys.stop - launch.keys.start

        def draw(rows: int, heads: int) -> Tensor:
            return torch.randn(rows, heads, size, device="cuda").to(dtype)

        rows = [draw(queries, heads[0]), draw(keys, heads[1]), draw(keys, heads[1])]
        grads = [draw(queries, heads[0])]
        if lse:
            grads.append(torch.randn(queries, heads[0], device="cuda"))
        expect_the_formula(kernel, launch, rows, grads)


@needs_cudnn
def test_cudnn_computes_rows_of_a_projection_and_is_deterministic_if_told() -> None:
    kernel = kernels_of("cudnn", torch.device("cuda", torch.cuda.current_device()))[0]
    (launch,) = join(entries_with_gaps([(64, 64), (300, 300)], (-1, 0)), packs=True)
    queries = launch.queries.stop - launch.queries.start
    keys = launch.keys.stop - launch.keys.start
    torch.manual_seed(0)
    together = torch.randn(max(queries, keys), 48 * 64, device="cuda").bfloat16()
    parts = [x.unflatten(1, (-1, 64)) for x in together.split([32 * 64, 8 * 64, 8 * 64], 1)]
    rows = [parts[0][:queries], parts[1][:keys], parts[2][:keys]]
    grad = torch.randn(queries, 32, 64, device="cuda").bfloat16()
    expect_the_formula(kernel, launch, rows, [grad])
    torch.use_deterministic_algorithms(True)
    try:
        found = [results(kernel, launch, rows, [grad]) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0][2:], again[2:], strict=True))
