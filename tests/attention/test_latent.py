"""Attention over latent rows, which are expanded where they are received, against one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import GlooGroups
from support.features import drawn, handlers
from support.latent import (
    NOPE,
    RANK,
    SHARED,
    VALUE,
    LatentCase,
    Up,
    gloo_errors,
    loopback_error,
)
from support.packs import Block, packed
from support.ranks import run_ranks
from torch import Tensor

import hcp
from hcp.attention import latent

TYPES = ("p2p", "all_gather")


@pytest.mark.parametrize("comm_type", TYPES)
@pytest.mark.parametrize("degree", range(1, 9))
def test_any_degree_equals_one_rank(degree: int, comm_type: str) -> None:
    lengths = (1, 2, 2 * degree - 1, 2 * degree, 2 * degree + 1, 13, 97, 3, 1)
    case = LatentCase(lengths, degree, degree, comm_type)
    assert loopback_error(case) <= 1e-10
    assert loopback_error(replace(case, lengths=(29,), causal=False, groups=2)) <= 1e-10


@settings(max_examples=25)
@given(
    st.integers(1, 5),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sampled_from([(-1, -1), (5, 0), (4, 3), (0, 0)]),
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    st.data(),
)
def test_drawn_cases_equal_one_rank(
    ranks: int,
    lengths: list[int],
    window: tuple[int, int],
    heads: tuple[int, int],
    data: st.DataObject,
) -> None:
    options: Any = {
        "min_degree": st.integers(1, ranks),
        "comm_type": st.sampled_from(TYPES),
        "stage_tokens": st.sampled_from([1, 8192]),
        **dict.fromkeys(("causal", "sinks", "sharing", "checkpointed"), st.booleans()),
    }
    taken = data.draw(st.fixed_dictionaries(options))
    case = LatentCase(
        tuple(lengths), ranks, window=window, heads=heads[0], groups=heads[1], **taken
    )
    assert loopback_error(case) <= 1e-10


@pytest.mark.parametrize("comm_type", TYPES)
def test_mixed_degrees_and_ranks_without_rows_equal_one_rank(comm_type: str) -> None:
    lengths = (31, 7, 11, 2, 5, 1, 8)
    groups = [(0, 1, [1, 5]), (1, 3, [0, 4]), (4, 2, [2]), (6, 1, [3])]
    later = [(2, 5, [6])]  # ranks 0 and 1 have no rows
    plan = hcp.Plan.from_dict(
        {
            "ranks": 7,
            "max_tokens_per_rank": 16,
            "lengths": lengths,
            "micro_batches": [
                {"groups": [dict(first_rank=f, degree=d, sequences=s) for f, d, s in batch]}
                for batch in (groups, later)
            ],
        }
    )
    assert loopback_error(LatentCase(lengths, 7, comm_type=comm_type), plan) <= 1e-10


@pytest.mark.parametrize("ranks", [2, 4])
def test_gloo_ranks_equal_one_rank(ranks: int) -> None:
    case = LatentCase((37, 5, 1), ranks, ranks)
    changes: list[dict[str, Any]] = [{}, {"comm_type": "all_gather"}, {"checkpointed": True}]
    cases = [replace(case, **change) for change in changes]
    assert max(map(max, run_ranks(ranks, gloo_errors, cases))) <= 1e-10


@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
def test_a_batch_of_equal_lengths_attends_as_its_rows_do(qkv_format: str) -> None:
    def check(groups: Any) -> None:
        (cp,) = handlers(groups, [12, 12], min_degree=2)
        (query, rows), up = drawn_rows(cp), Up(4)
        want = cp.attention(query, rows, expand=up)
        batch = [x.detach().unflatten(0, (2, -1)) for x in (query, rows)]
        if qkv_format == "sbhd":
            batch = [x.transpose(0, 1) for x in batch]
        out = cp.attention(*batch, expand=up, qkv_format=qkv_format)
        out = out.transpose(0, 1) if qkv_format == "sbhd" else out
        # BLAS may sum in another order where rows lie otherwise in memory.
        assert float((out.flatten(0, 1) - want).detach().abs().max()) < 1e-12

    hcp.loopback(2, check)


@pytest.mark.parametrize("comm_type", TYPES)
def test_masks_hide_what_they_hide_of_expanded_keys(comm_type: str) -> None:
    masks = [hcp.Mask.prefix_lm(30, 7), hcp.Mask.shared_prefix(9, [5, 6]), hcp.Mask(4, [])]

    def check(groups: Any) -> None:
        lengths = [mask.length for mask in masks]
        plan = hcp.plan(lengths, masks=masks, ranks=3, max_tokens_per_rank=64, min_degree=3)
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport, comm_types=[comm_type])
        (query, rows), up = drawn_rows(cp), Up(4)
        leaves = query, rows, *up.parameters()
        results = []
        for keys, options in (((rows,), {"expand": up}), (up(rows), {})):
            out, lse = cp.attention(query, *keys, return_lse=True, **options)
            grads = torch.autograd.grad(out.square().sum(), leaves)
            shared = [cp.group.sum(grad) for grad in grads[2:]]
            results.append([out, lse.exp(), *grads[:2], *shared])
        for found, want in zip(*results, strict=True):
            assert torch.allclose(found, want, rtol=1e-11, atol=1e-11)

    hcp.loopback(3, check)


# ---- what travels, and what is kept --------------------------------------------------------------


def drawn_rows(
    cp: Any, heads: int = 4, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    query = torch.randn(cp.rows, heads, NOPE + SHARED, dtype=dtype, requires_grad=True)
    return query, torch.randn(cp.rows, RANK + SHARED, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize(
    ("comm_type", "passes"), [("p2p", (1, 1 + 3 / 4)), ("all_gather", (3 / 4, 3 / 2))]
)
def test_a_latent_row_travels_in_place_of_keys_and_values(
    comm_type: str, passes: tuple[float, float]
) -> None:
    """The formulas of docs/concepts/latent-attention.md."""
    degree, length, up = 4, 64, Up(4)

    def sent(groups: Any) -> list[int]:
        (cp,) = handlers(groups, [length], min_degree=degree)
        query, rows = drawn_rows(cp)
        bytes_sent = []
        for keys, options in (((rows,), {"expand": up}), (up(rows), {})):
            start = groups.transport.bytes_sent
            out = cp.attention(query, *keys, comm_type=comm_type, **options)
            between = groups.transport.bytes_sent
            out.sum().backward()
            bytes_sent += [between - start, groups.transport.bytes_sent - between]
        return bytes_sent

    totals = [sum(of_rank) for of_rank in zip(*hcp.loopback(degree, sent), strict=True)]
    widths = RANK + SHARED, 4 * (NOPE + SHARED + VALUE)
    rows = (degree - 1) * length
    assert totals == [rows * part * width * 8 for width in widths for part in passes]


def test_no_key_or_value_is_kept_until_the_backward() -> None:
    def kept(groups: Any) -> None:
        (cp,) = handlers(groups, [40], min_degree=2)
        (query, rows), up = drawn_rows(cp), Up(4)
        for keys, options in (((rows,), {"expand": up}), ((up(rows)), {})):
            shapes: list[tuple[int, ...]] = []

            def pack(x: Tensor, shapes: list[tuple[int, ...]] = shapes) -> Tensor:
                shapes.append(tuple(x.shape))
                return x

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                cp.attention(query, *keys, **options)
            expanded = (cp.rows, 4, NOPE + SHARED)
            assert shapes.count(expanded) == (1 if options else 2)  # the query, and the key
            assert ((cp.rows, 1, RANK + SHARED) in shapes) == bool(options)

    hcp.loopback(2, kept)


# ---- parameters ----------------------------------------------------------------------------------


def test_parameters_may_be_results_of_other_layers() -> None:
    """As of a merged adapter."""
    (column,) = drawn([4 * (NOPE + VALUE)], 1)

    def check(groups: Any) -> None:
        (cp,) = handlers(groups, [23, 4], min_degree=2)
        (query, rows), up = drawn_rows(cp), Up(4)
        base, small = up.weight.detach(), (column / 9).requires_grad_()

        def expand(weight: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
            return lambda x: torch.func.functional_call(up, {"weight": weight}, (x,))  # type: ignore[no-any-return]

        grads = []
        for compressed in (True, False):
            weight = base + small @ small.detach().t() @ base
            keys = (rows,) if compressed else expand(weight)(rows)
            options: Any = {"expand": expand(weight), "parameters": [weight, up.bias]}
            out = cp.attention(query, *keys, **(options if compressed else {}))
            total = torch.autograd.grad(out.square().sum(), (query, small, up.bias))
            grads.append([total[0], *(cp.group.sum(x) for x in total[1:])])
        for found, want in zip(*grads, strict=True):
            assert torch.allclose(found, want, rtol=1e-11, atol=1e-11)

    hcp.loopback(2, check)


def up_of(x: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of 2 heads, each by a weight (2 * size, RANK) of its own."""
    latent, shared = x.split([RANK, SHARED], -1)
    keys = (latent @ key.t()).unflatten(1, (2, NOPE))
    shared = shared.unsqueeze(1).expand(-1, 2, -1)
    return torch.cat([keys, shared], -1), (latent @ value.t()).unflatten(1, (2, VALUE))


def a_leaf_twice(base: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    return base[: 2 * NOPE], base[2 * NOPE :], [base, base]


def a_view_twice(base: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    view = base[:8]
    return view[: 2 * NOPE], view, [view, view]


def two_views(base: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    key, value = base[: 2 * NOPE], base[2 * NOPE :]
    return key, value, [key, value]


def two_parts_of_one_split(base: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    key, value = base.split([2 * NOPE, 2 * VALUE])
    return key, value, [key, value]


def a_view_and_its_base(base: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    view = base[:8]
    return view[: 2 * NOPE], view, [base, view]


def a_copy_and_its_base(base: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    copy = base.clone()
    return copy[: 2 * NOPE], copy[2 * NOPE :], [copy, base]


def a_product_and_what_it_is_of(base: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    product = base * scale
    return product[: 2 * NOPE], product[2 * NOPE :], [base, product, scale]


def what_a_product_is_of(base: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    product = base * scale
    return product[: 2 * NOPE], product[2 * NOPE :], [base, scale]


NAMED = (
    a_leaf_twice,
    a_view_twice,
    two_views,
    two_parts_of_one_split,
    a_view_and_its_base,
    a_copy_and_its_base,
    a_product_and_what_it_is_of,
    what_a_product_is_of,
)
"""Weights of keys and of values, and what is named as parameters."""


@pytest.mark.parametrize("weights_of", NAMED)
def test_a_gradient_counts_once_whatever_names_its_tensor(weights_of: Any) -> None:
    def check(groups: Any) -> None:
        (cp,) = handlers(groups, [23, 4], min_degree=groups.transport.size)
        query, rows = drawn_rows(cp)
        base = drawn([2 * (NOPE + VALUE)], RANK)[0].requires_grad_()
        scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
        grads = []
        for compressed in (True, False):
            key, value, named = weights_of(base, scale)
            options: Any = {"expand": lambda x, k=key, v=value: up_of(x, k, v), "parameters": named}
            keys = (rows,) if compressed else up_of(rows, key, value)
            out = cp.attention(query, *keys, **(options if compressed else {}))
            leaves = query, base, scale
            total = torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True)
            grads.append([total[0], *map(cp.group.sum, total[1:])])
        for found, want in zip(*grads, strict=True):
            assert torch.allclose(found, want, rtol=1e-11, atol=1e-11)

    for ranks in (1, 3):
        hcp.loopback(ranks, check)


@pytest.mark.parametrize("how", ["a view", "a cast", "a product", "a part of a split"])
def test_a_parameter_used_beside_one_made_from_it_is_refused(how: str) -> None:
    def call(groups: Any) -> None:
        (cp,) = handlers(groups, [9])
        query, rows = drawn_rows(cp)
        base = drawn([2 * (NOPE + VALUE)], RANK)[0].requires_grad_()
        made = {
            "a view": base[: 2 * NOPE],
            "a cast": base.float().double()[: 2 * NOPE],
            "a product": 2 * base[: 2 * NOPE],
            "a part of a split": base.split([2 * NOPE, 2 * VALUE])[0],
        }[how]
        cp.attention(
            query,
            rows,
            expand=lambda x: up_of(x, made, base[2 * NOPE :]),
            parameters=[base, made],
        ).sum().backward()

    message = r"shape \(6, 6\) and that of shape \(14, 6\) from which it is made, expected one of"
    with pytest.raises(ValueError, match=message):
        hcp.loopback(1, call)


def test_the_other_part_of_a_split_is_no_parameter_that_was_named() -> None:
    def call(groups: Any) -> None:
        (cp,) = handlers(groups, [9])
        query, rows = drawn_rows(cp)
        base = drawn([2 * (NOPE + VALUE)], RANK)[0].requires_grad_()
        key, value = base.split([2 * NOPE, 2 * VALUE])
        out = cp.attention(query, rows, expand=lambda x: up_of(x, key, value), parameters=[key])
        out.sum().backward()

    with pytest.raises(ValueError, match=r"a parameter of shape \(14, 6\) that is not among the 1"):
        hcp.loopback(1, call)


def test_a_frozen_function_needs_no_gradient() -> None:
    def check(groups: Any) -> None:
        (cp,) = handlers(groups, [9], min_degree=2)
        (query, rows), up = drawn_rows(cp), Up(4).requires_grad_(False)
        cp.attention(query, rows, expand=up).sum().backward()
        assert rows.grad is not None
        assert up.weight.grad is None

    hcp.loopback(2, check)


def test_autocast_expands_in_its_dtype_both_times() -> None:
    seen: list[torch.dtype] = []

    class Watched(Up):
        def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
            key, value = super().forward(rows)
            seen.append(value.dtype)
            return key, value

    def check(groups: Any) -> None:
        (cp,) = handlers(groups, [9])
        (query, rows), up = drawn_rows(cp, dtype=torch.float32), Watched(4, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            out = cp.attention(query, rows, expand=up)
            later = up(rows)[1]  # no cast without gradients is found in the cache
        assert out.dtype == torch.bfloat16
        (out.float().sum() + later.float().sum()).backward()
        assert seen == [torch.bfloat16] * 3
        assert up.weight.grad is not None
        alone = torch.autograd.grad(up(rows)[1].float().sum(), up.weight)[0]
        assert not torch.allclose(up.weight.grad, alone, rtol=1e-3)

    hcp.loopback(1, check)


def test_rows_of_a_launch_that_no_entry_names_do_not_reach_the_parameters() -> None:
    """A kernel may leave anything in their gradients."""
    launch, up = packed([Block(3, 5), Block(2, 4, (0, 3))]), Up(4)

    class Ones:
        dtypes, packs = (torch.float64,), True

        def backward(
            self, launch: Any, grads: Any, attended: Any, scale: float
        ) -> tuple[Tensor, ...]:
            query, key, value, *_ = attended
            found = [torch.full_like(x, torch.nan) for x in (key, value)]
            for entry in launch.entries:
                for x in found:
                    x[entry.key_row : entry.key_row + entry.key_rows] = 1
            return query, *found

    kernel: Any = Ones()
    expansion = latent.Expansion(up, (*up.parameters(),), latent._autocast_of(up.weight))
    taking = latent._Expanding(kernel, expansion)
    query, rows = torch.randn(5, 4, 5).double(), torch.randn(12, 1, RANK + SHARED).double()
    attended = query, rows, rows[..., :0], query, query
    _, grad, _ = taking.backward(launch, (query, None), attended, 1.0)
    named = torch.cat([rows[:5], rows[8:]]).squeeze(1)
    total = sum(x.sum() for x in up(named))
    for found, want in zip(
        taking.sums, torch.autograd.grad(total, [*up.parameters()]), strict=True
    ):
        assert found is not None
        assert torch.allclose(found, want)
    assert not grad[5:8].any()
    assert grad[8:].all()


# ---- refused -------------------------------------------------------------------------------------

GOOD = Up(4)


def with_shape(change: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda rows: change(*GOOD(rows))


@pytest.mark.parametrize(
    ("expand", "message"),
    [
        (
            lambda x: x,
            r"returned a tensor of shape \(\d+, 8\) for rows of shape \(\d+, 8\), expect",
        ),
        (with_shape(lambda k, v: [k, v, v]), "expected a key and a value"),
        (with_shape(lambda k, v: (k, None)), r"NoneType\) for rows"),
        (with_shape(lambda k, v: (k[:-1], v)), r"expected a key of shape \(\d+, heads, 5\)"),
        (with_shape(lambda k, v: (k[:, :3], v[:, :3])), "whose heads divide the 4 of query"),
        (with_shape(lambda k, v: (k[..., :4], v)), r"a key of shape \(\d+, heads, 5\)"),
        (with_shape(lambda k, v: (k, v[:, :2])), r"a value of shape \(\d+, 4, head_dim\)"),
        (with_shape(lambda k, v: (k, v[..., :0])), r"a value of shape \(\d+, 4, head_dim\)"),
        (with_shape(lambda k, v: (k, v.float())), "a value of torch.float32 on cpu, expected"),
    ],
)
def test_a_function_whose_results_do_not_fit_is_refused(expand: Any, message: str) -> None:
    def call(groups: Any) -> None:
        (cp,) = handlers(groups, [9], min_degree=2)
        query, rows = drawn_rows(cp)
        cp.attention(query, rows, expand=expand, parameters=[*GOOD.parameters()])

    with pytest.raises((ValueError, hcp.HcpError), match=message):
        hcp.loopback(2, call)


def test_a_parameter_that_is_not_named_is_refused() -> None:
    def call(groups: Any) -> None:
        (cp,) = handlers(groups, [9])
        query, rows = drawn_rows(cp)
        cp.attention(query, rows, expand=GOOD.forward, parameters=[GOOD.bias]).sum().backward()

    message = r"uses a parameter of shape \(28, 6\) that is not among the 1 of parameters="
    with pytest.raises(ValueError, match=message):
        hcp.loopback(1, call)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"comm_type": "a2a"}, "comm_type is 'a2a' with expand=, expected 'p2p', 'all_gather' or"),
        ({"value": torch.zeros(9, 4, 4)}, "value is given with expand="),
        ({"rotary_pos_emb": torch.zeros(9, 2)}, "rotary_pos_emb is given with expand="),
        ({"expand": None}, "value is None, expected a tensor, or expand= with latent rows"),
        ({"expand": None, "value": torch.zeros(9, 1, 5), "parameters": []}, "without expand="),
        ({"parameters": [None]}, r"parameters\[0\] is NoneType"),
        ({"key": torch.zeros(9)}, r"key has shape \(9,\), expected latent rows \(rows, width\)"),
        ({"key": torch.zeros(8, 8)}, "key has 8 rows, expected 9"),
        ({"key": torch.zeros(9, 8)}, "key has dtype torch.float32, expected torch.float64"),
        ({"key": torch.zeros(9, 0)}, r"key has shape \(9, 0\), expected latent rows"),
    ],
)
def test_what_does_not_go_with_latent_rows_is_refused(options: Any, message: str) -> None:
    def call(groups: Any) -> None:
        (cp,) = handlers(groups, [9])
        query, rows = drawn_rows(cp)
        cp.attention(query, **{"key": rows, "expand": GOOD, **options})

    with pytest.raises(ValueError, match=message):
        hcp.loopback(1, call)


def test_a_compiled_layer_is_refused_by_name() -> None:
    def call(groups: Any) -> None:
        (cp,) = handlers(groups, [9])
        query, rows = drawn_rows(cp)
        layer = torch.compile(
            lambda q, x: cp.attention(q, x, expand=GOOD), backend="eager", fullgraph=True
        )
        layer(query, rows)

    with pytest.raises(Exception, match="expand is given in a compiled layer, expected none"):
        hcp.loopback(1, call, timeout=300)


def test_ranks_whose_latent_rows_differ_are_refused() -> None:
    def call(groups: Any) -> None:
        (cp,) = handlers(groups, [9], min_degree=2)
        query, rows = drawn_rows(cp)
        if groups.transport.rank:
            cp.attention(query, *GOOD(rows))
        else:
            cp.attention(query, rows, expand=GOOD)

    with pytest.raises(hcp.HcpError, match=r"is in another call: in attention, .*latent differs"):
        hcp.loopback(2, call)


def test_layers_in_another_order_are_refused() -> None:
    def call(groups: Any) -> None:
        (cp,) = handlers(groups, [9], min_degree=2)
        query, rows = drawn_rows(cp)
        for layer in (1, 2) if groups.transport.rank else (2, 1):
            cp.attention(query, rows, expand=GOOD, layer=layer)

    with pytest.raises(hcp.HcpError, match=r"is in another call: in attention, .*layer differs"):
        hcp.loopback(2, call)


def auto_on_gloo(rank: int, size: int) -> list[str]:
    plan = hcp.plan([64], ranks=size, max_tokens_per_rank=64, min_degree=size)
    cp = hcp.ContextParallelHandler(plan, 0, GlooGroups().transport, comm_types=("auto",))
    query, rows = drawn_rows(cp)
    cp.attention(query, rows, expand=GOOD)
    return [choice.used for choice in cp.comm.choices]


def test_auto_chooses_among_the_types_that_send_rows() -> None:
    for used in run_ranks(2, auto_on_gloo):
        assert used
        assert used[-1] in TYPES


def test_a_second_derivative_is_refused() -> None:
    def call(groups: Any) -> None:
        (cp,) = handlers(groups, [9])
        query, rows = drawn_rows(cp)
        out = cp.attention(query, rows, expand=GOOD)
        (grad,) = torch.autograd.grad(out.square().sum(), rows, create_graph=True)
        grad.sum().backward()

    with pytest.raises(RuntimeError, match="once_differentiable"):
        hcp.loopback(1, call)
