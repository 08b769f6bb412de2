"""Results of attention, kept for a recomputation: equal gradients, and no second forward."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hcp
from hcp.attention import layer
from hcp.attention.kept import KeptResults

LENGTHS = [13, 1, 30]


def gradients(ranks, kept, calls=2):
    """Of layers that attend twice, in float64."""

    def work(groups):
        plan = hcp.plan(LENGTHS, ranks=ranks, max_tokens_per_rank=48, min_degree=ranks)
        samples = [
            {"rows": torch.randn(n, 2, 8, generator=torch.Generator().manual_seed(n)).double()}
            for n in LENGTHS
        ]
        mine = samples if groups.transport.rank == 0 else []
        for cp, local in hcp.dispatch(plan, mine, [0] * len(LENGTHS), groups):
            rows = local.rows.requires_grad_()

            def attend(x, cp=cp):
                for i in range(calls):
                    x = x + cp.attention(torch.tanh(x), x, x.sin(), layer=i)
                return x

            if kept is None:
                out = attend(rows)
            else:
                results = kept()
                contexts = results.keeping(), results.recalling()
                out = checkpoint(
                    attend, rows, use_reentrant=False, context_fn=lambda given=contexts: given
                )
            out.square().sum().backward()
        return rows.grad

    return hcp.loopback(ranks, work)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients_are_equal_and_attention_computes_once(ranks):
    expected = gradients(ranks, None)
    with mock.patch.object(layer, "forward", wraps=layer.forward) as forward:
        found = gradients(ranks, KeptResults)
    assert forward.call_count == 2 * ranks
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_results_may_wait_elsewhere():
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.numpy().copy()

    found = gradients(1, lambda: KeptResults(pack, torch.from_numpy))
    assert packed == 2 * [(44, 2, 8), (44, 2)]
    assert torch.equal(found[0], gradients(1, None)[0])


def test_more_calls_than_were_kept_are_an_error():
    kept = KeptResults()
    with kept.keeping():
        layer.current.results.add(torch.zeros(1), torch.zeros(1))
    with kept.recalling():
        assert layer.current.results.next() is not None
        with pytest.raises(RuntimeError, match="attention again after call 1, expected 1 calls"):
            layer.current.results.next()
    assert layer.current.results is None
