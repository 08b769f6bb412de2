"""Attention that rotates queries and keys itself equals rotating them first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import GlooGroups
from support.ranks import run_ranks
from support.rotary import error, handlers, inputs
from torch import Tensor

import hcp
from hcp.attention import rotary as rope


@settings(max_examples=25)
@given(
    st.integers(1, 5),
    st.sampled_from(hcp.COMM_TYPES),
    st.sampled_from([0, 2, 6, 8]),
    st.booleans(),
    st.fixed_dictionaries(
        {"causal": st.booleans(), "window_size": st.sampled_from([(-1, -1), (5, 3)])}
    ),
)
def test_attention_with_rotary_pos_emb_equals_rotating_first(
    ranks: int, comm_type: str, turned: int, interleaved: bool, options: Any
) -> None:
    errors = hcp.loopback(
        ranks, lambda groups: error(groups, comm_type, turned, interleaved, options)
    )
    assert max(errors) <= 1e-10


def gloo_errors(rank: int, size: int) -> list[float]:
    groups, types = GlooGroups(), ("p2p", "all_gather", "a2a")
    return [error(groups, name, 6, True, {}, checkpointed=False) for name in types]


def test_it_works_on_gloo_ranks() -> None:
    assert max(map(max, run_ranks(3, gloo_errors))) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_types_have_the_bits_of_rotating_first(dtype: torch.dtype) -> None:
    """Output: the same bits. Gradients: rounded once instead of twice."""

    def check(groups: Any) -> None:
        (cp,) = handlers(groups, "p2p")
        query, key, value, grad = (x.to(dtype) for x in inputs(cp))
        rotary = cp.rotary(torch.randn(64, 8))
        qkv = [x.requires_grad_() for x in (query, key, value)]
        fused = cp.attention(*qkv, rotary_pos_emb=rotary)
        rotated = [rope.rotate_by_torch(x, rotary) for x in qkv[:2]]
        apart = cp.attention(*rotated, qkv[2])
        assert torch.equal(fused, apart)
        results, wanted = (torch.autograd.grad(out, qkv, grad) for out in (fused, apart))
        for result, want in zip(results, wanted, strict=True):
            scale = float(want.abs().max())
            assert float((result - want).abs().max()) <= 8 * torch.finfo(dtype).eps * scale

    hcp.loopback(3, check)


@pytest.mark.parametrize("comm_type", ["p2p", "a2a"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_backward_keeps_no_projection_of_queries_keys_and_values_alive(
    ranks: int, comm_type: str
) -> None:
    def check(groups: Any) -> None:
        cp = handlers(groups, comm_type)[0]
        projected = torch.randn(cp.rows, 8, 8, requires_grad=True)
        rows, kept = projected * 2, []  # not a leaf, which lives anyway

        def keep(saved: Tensor) -> Tensor:
            kept.append(saved.untyped_storage().nbytes() / max(1, saved.nbytes))
            return saved

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            out = cp.attention(*rows.split([4, 2, 2], dim=1), rotary_pos_emb=torch.randn(64, 8))
        assert len(kept) >= 5
        assert max(kept) <= 2
        out.sum().backward()
        assert projected.grad is not None

    hcp.loopback(ranks, check)


def passes_of(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that a call makes of those that rotate, pack and sum."""
    made: list[str] = []
    with monkeypatch.context() as patch:
        for name in ("rotate", "rotate_pack", "pack_to_send", "reduce_to_send", "sum_gradients"):
            operator = getattr(torch.ops.hcp, name)

            def counted(*args: Any, own: Any = operator.default, name: str = name) -> Any:
                turns = name == "sum_gradients" and args[5] is not None
                made.append(f"{name}, turned back" if turns else name)
                return own(*args)

            patch.setattr(operator, "default", counted)
        call()
    return made


def test_a_ring_turns_keys_while_it_packs_and_gradients_while_it_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The passes that are saved: one of rotation over keys, and two over gradients."""

    def call() -> None:
        def step(groups: Any) -> None:
            plan = hcp.plan([64], ranks=2, max_tokens_per_rank=32)
            cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
            q, k, v = (torch.randn(32, 2, 8).requires_grad_() for _ in range(3))
            cp.attention(q, k, v, rotary_pos_emb=torch.randn(64, 8)).sum().backward()

        hcp.loopback(2, step)

    # On each of two ranks: queries; the wire; the wire of the backward; one sum for the other, and
    # two turned (one of keys, with values beside).
    assert Counter(passes_of(call, monkeypatch)) == {
        "rotate": 2,
        "rotate_pack": 2,
        "pack_to_send": 2,
        "reduce_to_send": 2,
        "sum_gradients, turned back": 4,
    }


def test_a_table_of_angles_will_do_and_a_rotary_serves_all_layers() -> None:
    def check(groups: Any) -> None:
        (cp,) = handlers(groups, "p2p")
        query, key, value, _ = inputs(cp)
        freqs = torch.randn(64, 1, 1, 4, dtype=torch.float64)
        rotary = cp.rotary(freqs)
        assert rotary.cos.shape == (cp.rows, 4)
        out = cp.attention(query, key, value, rotary_pos_emb=freqs)
        assert torch.equal(out, cp.attention(query, key, value, rotary_pos_emb=rotary))
        by_hand = [cp.apply_rotary_pos_emb(x, rotary) for x in (query, key)]
        assert torch.equal(out, cp.attention(*by_hand, value))
        with pytest.raises(ValueError, match=r"options are given beside a Rotary"):
            cp.apply_rotary_pos_emb(query, rotary, mscale=2.0)
        with pytest.raises(ValueError, match="freqs has 10 angles, expected an even number up to"):
            cp.attention(query, key, value, rotary_pos_emb=torch.zeros(64, 10))

    hcp.loopback(3, check)


WRONG = {
    "positions has -1, expected 0 to 39: freqs has 40 positions": lambda at: at - 1,
    "positions has 40, expected 0 to 39: freqs has 40 positions": lambda at: at * 0 + 40,
    "positions is torch.float64, expected int64": Tensor.double,
    "positions is torch.bool, expected int64": Tensor.bool,
}


@pytest.mark.parametrize("axes", [None, [0, 1, 1, 0]])
@pytest.mark.parametrize("said", WRONG)
def test_positions_that_a_table_has_not_are_refused(said: str, axes: Any) -> None:
    def refused(groups: Any) -> None:
        (cp,) = handlers(groups, "p2p")
        at = WRONG[said](cp.position_ids.clone())
        positions = at if axes is None else torch.stack((torch.zeros_like(at), at), 1)
        with pytest.raises(ValueError, match=said):
            cp.rotary(torch.randn(40, 8), positions=positions, axes=axes)

    hcp.loopback(1, refused)


@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd"])
def test_a_batch_of_equal_lengths_is_rotated_as_its_rows_are(qkv_format: str) -> None:
    def check(groups: Any) -> None:
        plan = hcp.plan([12, 12], ranks=2, max_tokens_per_rank=12, min_degree=2)
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
        query, key, value, _ = inputs(cp)
        rotary = cp.rotary(torch.randn(12, 8, dtype=torch.float64))
        rows = cp.attention(query, key, value, rotary_pos_emb=rotary)
        batch = [x.unflatten(0, (2, -1)) for x in (query, key, value, rows)]
        if qkv_format == "sbhd":
            batch = [x.transpose(0, 1) for x in batch]
        *qkv, want = batch
        out = cp.attention(*qkv, rotary_pos_emb=rotary, qkv_format=qkv_format)
        assert torch.equal(out, want)

    hcp.loopback(2, check)


def test_a_second_derivative_is_refused() -> None:
    def call(groups: Any) -> None:
        (cp,) = handlers(groups, "p2p")
        query, key, value, _ = inputs(cp)
        query.requires_grad_()
        out = cp.attention(query, key, value, rotary_pos_emb=torch.randn(64, 8).double())
        (grad,) = torch.autograd.grad(out.sum(), query, create_graph=True)
        grad.sum().backward()

    with pytest.raises(NotImplementedError, match="differentiated twice"):
        hcp.loopback(1, call)


def test_learned_frequencies_keep_their_gradient() -> None:
    """No kernel gives it: PyTorch's operators stand in, exactly."""

    def check(groups: Any) -> None:
        (cp,) = handlers(groups, "all_gather")
        query, key, value, grad = inputs(cp)
        grads = []
        for fused in (True, False):
            freqs = torch.ones(64, 8, dtype=torch.float64).mul(0.3).requires_grad_()
            rotary = cp.rotary(freqs)
            if fused:
                out = cp.attention(query, key, value, rotary_pos_emb=rotary)
            else:
                turned = [rope.rotate_by_torch(x, rotary) for x in (query, key)]
                out = cp.attention(*turned, value)
            out.backward(grad)
            grads.append(freqs.grad)
        assert torch.equal(*grads)
        assert cp.rows == 0 or float(grads[0].abs().max()) > 0

    hcp.loopback(3, check)


def test_transforms_of_torch_func_go_through_pytorchs_operators() -> None:
    def check(groups: Any) -> None:
        (cp,) = handlers(groups, "p2p")
        query, *_ = inputs(cp)
        rotary = cp.rotary(torch.randn(64, 8, dtype=torch.float64))
        _, tangent = torch.func.jvp(
            lambda x: cp.apply_rotary_pos_emb(x, rotary), (query,), (query,)
        )
        assert torch.allclose(tangent, rope.rotate_by_torch(query, rotary))

    hcp.loopback(1, check)


def test_ranks_that_do_not_all_rotate_are_told() -> None:
    def call(groups: Any) -> None:
        plan = hcp.plan([64], ranks=2, max_tokens_per_rank=32)
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)
        q = torch.zeros(32, 2, 8)
        freqs = torch.zeros(64, 8) if groups.transport.rank else None
        cp.attention(q, q, q, rotary_pos_emb=freqs)

    with pytest.raises(hcp.HcpError, match="is in another call: "):
        hcp.loopback(2, call)
