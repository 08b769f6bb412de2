"""Attention's options other than masks and sinks, under any degree, against one rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.features import TYPES, check_softcap, drawn, handlers, rows_here
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import hcp
from hcp.attention import qkv_format as formats

# ---- soft-capping --------------------------------------------------------------------------------


@given(
    st.integers(1, 5),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sampled_from(TYPES),
    st.sampled_from([(-1, 0), (-1, -1), (5, 0), (4, 3)]),
    st.data(),
)
def test_capped_scores_equal_those_on_one_rank(
    ranks: int, lengths: list[int], comm_type: str, window: tuple[int, int], data: st.DataObject
) -> None:
    degree = data.draw(st.integers(1, ranks))
    cls = hcp.ContextParallelHandler
    errors = hcp.loopback(
        ranks, lambda groups: check_softcap(groups, cls, lengths, comm_type, window, degree)
    )
    assert max(errors) < 1e-10


def test_a_log_sum_exp_that_a_kernel_gives_by_heads_travels() -> None:
    cls = hcp.ContextParallelHandler
    errors = hcp.loopback(3, lambda groups: check_softcap(groups, cls, [1, 2], "a2a", (-1, 0), 1))
    assert max(errors) < 1e-10


def test_ranks_that_cap_differently_are_refused() -> None:
    def call(groups: Any) -> None:
        (cp,) = handlers(groups, [9], min_degree=2)
        x = torch.randn(cp.rows, 2, 4)
        cp.attention(x, x, x, softcap=float(10 + groups.transport.rank))

    with pytest.raises(hcp.HcpError, match="is in another call: "):
        hcp.loopback(2, call)


@pytest.mark.parametrize(
    ("dtype", "softcap", "message"),
    [
        (torch.bfloat16, 30.0, r"softcap is 30.0 for torch.bfloat16 on cpu, expected 0.0: Py"),
        (torch.float32, -1.0, "softcap is -1.0, expected a finite number >= 0.0"),
        (torch.float32, "x", "softcap is 'x', expected a finite number >= 0.0"),
        (torch.float32, math.nan, "softcap is nan, expected a finite number >= 0.0"),
        (torch.float32, math.inf, "softcap is inf, expected a finite number >= 0.0"),
    ],
)
def test_a_cap_that_no_kernel_has_is_refused(dtype: Any, softcap: float, message: str) -> None:
    def call(groups: Any) -> None:
        (cp,) = handlers(groups, [9])
        x = torch.randn(9, 2, 4, dtype=dtype)
        cp.attention(x, x, x, softcap=softcap)

    with pytest.raises(ValueError, match=message):
        hcp.loopback(1, call)


def test_a_compiled_layer_caps_scores() -> None:
    def check(groups: Any) -> None:
        def layer(x: Tensor, cp: hcp.ContextParallelHandler) -> Tensor:
            return cp.attention(x, x, x, softcap=2.0)

        (cp,) = handlers(groups, [9])
        x = 3 * torch.randn(9, 2, 8)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, cp)
        assert torch.allclose(compiled, layer(x, cp), atol=1e-6)
        assert not torch.allclose(compiled, cp.attention(x, x, x), atol=1e-2)

    hcp.loopback(1, check, timeout=300)


# ---- batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("sequences", [1, 3])
def test_a_batch_of_equal_lengths_attends_as_its_rows_do(qkv_format: str, sequences: int) -> None:
    lengths = [13] if sequences == 1 else [12] * sequences
    whole = drawn(lengths, 2, 4)

    def check(groups: Any) -> None:
        (cp,) = handlers(groups, lengths, min_degree=2)
        rows = rows_here(cp, whole).requires_grad_()
        want, want_lse = cp.attention(rows, rows, rows, return_lse=True)
        want.square().sum().backward()
        batch = rows.detach().view(sequences, -1, 2, 4)
        batch = batch.transpose(0, 1) if qkv_format == "sbhd" else batch
        batch.requires_grad_()
        out, lse = cp.attention(batch, batch, batch, return_lse=True, qkv_format=qkv_format)
        assert out.shape == batch.shape
        out.square().sum().backward()

        def as_rows(x: Tensor) -> Tensor:
            return (x.transpose(0, 1) if qkv_format == "sbhd" else x).flatten(0, 1)

        assert torch.equal(as_rows(out), want)
        assert torch.equal(as_rows(lse), want_lse)
        assert torch.allclose(as_rows(batch.grad), rows.grad, atol=1e-12)

    hcp.loopback(2, check)


def test_a_batch_of_sequences_that_are_not_cut_alike_is_refused() -> None:
    def check(groups: Any) -> None:
        (cp,) = handlers(groups, [6, 6], min_degree=2)
        x = torch.randn(2, 3, 2, 4)
        with pytest.raises(ValueError, match="expected a multiple of 2 \\* degree = 4"):
            cp.attention(x, x, x, qkv_format="bshd")

    hcp.loopback(2, check)


@pytest.mark.parametrize(("qkv_format", "sequences"), [("bshd", 3), ("bshd", 1), ("sbhd", 1)])
def test_a_batch_enters_without_a_copy(qkv_format: str, sequences: int) -> None:
    def check(groups: Any) -> None:
        (cp,) = handlers(groups, [8] * sequences)
        shape = (8, 1) if qkv_format == "sbhd" else (sequences, 8)
        x = torch.randn(*shape, 2, 4)
        assert formats.to_rows(cp.layout, x, qkv_format).data_ptr() == x.data_ptr()

    hcp.loopback(1, check)


@pytest.mark.parametrize(
    ("shape", "qkv_format", "message"),
    [
        ((5, 2, 2, 4), "sbhd", r"expected 10 rows of 2 sequences of one length, not \(6, 4\)"),
        ((10, 2, 4), "bshd", r"shape is \(10, 2, 4\), expected bshd: 4 dim"),
        ((10, 2, 4), "bhsd", "qkv_format is 'bhsd', expected one of"),
    ],
)
def test_a_wrong_batch_is_refused(shape: Any, qkv_format: str, message: str) -> None:
    def call(groups: Any) -> None:
        (cp,) = handlers(groups, [6, 4])
        x = torch.zeros(shape)
        cp.attention(x, x, x, qkv_format=qkv_format)

    with pytest.raises(ValueError, match=message):
        hcp.loopback(1, call)


# ---- how it is differentiated --------------------------------------------------------------------


def gradients(groups: Any, comm_type: str, how: str) -> list[Tensor]:
    lengths = (29, 7, 1)
    (cp,) = handlers(groups, lengths, min_degree=2)
    leaves = [rows_here(cp, drawn(lengths, h, 4, seed=h)).requires_grad_() for h in (4, 2)]
    sinks = torch.zeros(4, dtype=torch.float64, requires_grad=True)

    def layer(q: Tensor, kv: Tensor) -> Tensor:
        return cp.attention(q, kv, kv, sinks=sinks, window_size=(6, 0), comm_type=comm_type)

    if how.startswith("checkpoint"):
        out = checkpoint(layer, *leaves, use_reentrant=how.endswith("reentrant"))
    else:
        out = layer(*leaves)
    if how == "twice":
        out.square().sum().backward(retain_graph=True)
    out.square().sum().backward()
    scale = 2 if how == "twice" else 1
    return [x.grad / scale for x in (*leaves, sinks)]


@pytest.mark.parametrize("comm_type", TYPES)
@pytest.mark.parametrize("how", ["checkpoint", "checkpoint reentrant", "twice"])
def test_recomputed_and_retained_graphs_give_the_same_gradients(how: str, comm_type: str) -> None:
    plain = hcp.loopback(3, lambda groups: gradients(groups, comm_type, "plain"))
    other = hcp.loopback(3, lambda groups: gradients(groups, comm_type, how))
    for a, b in zip(plain, other, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_attention_without_gradients_gives_the_same_output(mode: Any) -> None:
    def check(groups: Any) -> None:
        (cp,) = handlers(groups, [29], min_degree=2)
        x = rows_here(cp, drawn([29], 2, 4)).requires_grad_()
        want = cp.attention(x, x, x)
        with mode():
            out = cp.attention(x, x, x)
        assert torch.equal(out, want)
        assert not out.requires_grad

    hcp.loopback(2, check)


CALLS: dict[str, Any] = {
    "attention": lambda cp, x: cp.attention(x, x, x),
    "roll_tensor": lambda cp, x: cp.roll_tensor(x),
    "scan.halo": lambda cp, x: cp.scan.halo(x, 2),
    "scan.pass_states": lambda cp, x: cp.scan.pass_states(x[:1], x[:1]),
    "dispatch": lambda cp, x: cp.dispatch(x),
    "whole.sequence_to_head": lambda cp, x: cp.whole.sequence_to_head(x),
    "group.sum": lambda cp, x: cp.group.sum(x),
    "group.sum_over_domain": lambda cp, x: cp.group.sum_over_domain(x),
    "sequences.sum": lambda cp, x: cp.sequences.sum(x),
}
TRANSFORMS: dict[str, Any] = {
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "vmap": lambda f, x: torch.vmap(f)(x[None]),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
}


def alone(groups: Any) -> hcp.ContextParallelHandler:
    plan = hcp.plan([9], ranks=1, max_tokens_per_rank=16)
    return hcp.ContextParallelHandler(plan, 0, groups.transport, sources=[0])


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", CALLS)
def test_transforms_of_torch_func_are_refused_by_name(name: str, transform: str) -> None:
    def call(groups: Any) -> None:
        cp = alone(groups)
        TRANSFORMS[transform](lambda x: CALLS[name](cp, x), torch.randn(9, 2, 4))

    with pytest.raises(NotImplementedError, match=f"cp.{name} is called under a transform of to"):
        hcp.loopback(1, call)


def test_forward_mode_is_refused() -> None:
    def call(groups: Any) -> None:
        cp, x = alone(groups), torch.randn(9, 2, 4)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, x)
            cp.attention(x, dual, x)

    with pytest.raises(NotImplementedError, match=r"cp\.attention is called with dual tensors"):
        hcp.loopback(1, call)


def test_a_second_derivative_of_attention_is_refused() -> None:
    def call(groups: Any) -> None:
        x = torch.randn(9, 2, 4, requires_grad=True)
        out = CALLS["attention"](alone(groups), x)
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        grad.sum().backward()

    with pytest.raises(NotImplementedError, match="differentiated twice, expected once"):
        hcp.loopback(1, call)


@pytest.mark.parametrize("name", ["roll_tensor", "scan.halo", "dispatch", "whole.sequence_to_head"])
def test_rows_that_only_travel_are_differentiated_twice(name: str) -> None:
    def check(groups: Any) -> None:
        cp = alone(groups)
        x = torch.randn(9, 2, 4, dtype=torch.float64, requires_grad=True)
        out = CALLS[name](cp, x)
        (grad,) = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        # A row is there once, or not at all: what is cubed is the row itself.
        (there,) = torch.autograd.grad(CALLS[name](cp, x).sum(), x)
        assert torch.allclose(second, 6 * x * there, atol=1e-12)
        assert second.abs().max() > 0

    hcp.loopback(1, check)


# ---- types and edges -----------------------------------------------------------------------------


@pytest.mark.parametrize("comm_type", TYPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_near_as_one_rank_in_it(dtype: torch.dtype, comm_type: str) -> None:
    """No further from float64 than twice what one rank in the same type is."""
    lengths = (61, 7)
    whole = drawn(lengths, 2, 8, dtype=dtype)

    def errors(groups: Any, degree: int) -> list[float]:
        (cp,) = handlers(groups, lengths, min_degree=degree)
        results = []
        for kind in (dtype, torch.float64):
            x = rows_here(cp, whole).to(kind).requires_grad_()
            out = cp.attention(x, x, x, comm_type=comm_type)
            out.float().square().sum().backward()
            results.append((out.detach(), x.grad))
        pairs = zip(*results, strict=True)
        return [float((a.double() - b.double()).abs().max()) for a, b in pairs]

    (single,) = hcp.loopback(1, lambda groups: errors(groups, 1))
    for spread in hcp.loopback(3, lambda groups: errors(groups, 3)):
        assert all(a <= 2 * b + 1e-6 for a, b in zip(spread, single, strict=True))


def test_a_sink_of_minus_infinity_is_no_sink() -> None:
    def check(groups: Any) -> None:
        (cp,) = handlers(groups, [29], min_degree=2)
        results = []
        for sinks in (None, torch.full((2,), -torch.inf, dtype=torch.float64)):
            x = rows_here(cp, drawn([29], 2, 4)).requires_grad_()
            given = sinks if sinks is None else sinks.requires_grad_()
            out = cp.attention(x, x, x, sinks=given)
            out.square().sum().backward()
            results.append((out.detach(), x.grad))
        assert torch.equal(given.grad, torch.zeros_like(given))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    hcp.loopback(2, check)
