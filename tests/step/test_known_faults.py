"""Faults that other trainers had under context parallelism without an error, as cases against hcp.

docs/guides/known-faults.md says where each was reported. A case equals one rank in float64, or is
refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import Case, grad_of, loopback_error
from support.ranks import run_ranks
from torch import Tensor
from torch.nn import functional as F

import hcp

EXACT = 1e-10
DEGREES = (1, 2, 4)
HEADS, SIZE, WORDS = 4, 4, 11
WIDTH = HEADS * SIZE


# ---- a model of one layer, on whole sequences and under a plan -----------------------------------


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embedding": (WORDS, WIDTH),
        "qkv": (WIDTH, 3, HEADS, SIZE),
        "out": (HEADS, SIZE, WIDTH),
        "head": (WIDTH, WORDS),
    }
    return {
        name: torch.randn(*shape, generator=generator, dtype=torch.float64) / 2
        for name, shape in shapes.items()
    }


def leaves_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.clone().requires_grad_() for name, x in tensors.items()}


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def layer(w: dict[str, Tensor], tokens: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
    """Return the rows' embeddings, and what the layer adds to them."""
    x = w["embedding"][tokens]
    q, k, v = torch.einsum("tw,wjhd->jthd", x, w["qkv"])
    return x, torch.einsum("thd,hdw->tw", attend(q, k, v), w["out"])


def losses_of(w: dict[str, Tensor], x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x @ w["head"], labels, reduction="none")


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


def texts(
    lengths: tuple[int, ...], masks: list[list[int]] | None = None
) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(WORDS, (n + 1,), generator=generator) for n in lengths]
    kept = masks or [[1] * n for n in lengths]
    return [
        {"tokens": x[:-1], "labels": x[1:], "loss_mask": torch.tensor(mask).double()}
        for x, mask in zip(drawn, kept, strict=True)
    ]


def alone(samples: list[dict[str, Tensor]]) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss over all loss tokens of whole sequences, and its gradients."""
    w = leaves_of(weights())
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        x, added = layer(w, sample["tokens"], causal)
        total = total + (losses_of(w, x + added, sample["labels"]) * sample["loss_mask"]).sum()
    loss = total / sum(float(s["loss_mask"].sum()) for s in samples)
    loss.backward()
    return float(loss.detach()), {name: grad_of(x) for name, x in w.items()}


def planned(groups: Any, samples: list[dict[str, Tensor]], degree: int) -> hcp.Step:
    lengths = [len(s["tokens"]) for s in samples]
    ranks = groups.transport.size
    plan = hcp.plan(lengths, ranks=ranks, max_tokens_per_rank=64, min_degree=degree)
    sources = [i % ranks for i in range(len(samples))]
    own = [s for s, source in zip(samples, sources, strict=True) if source == groups.transport.rank]
    return hcp.dispatch(plan, own, sources, groups)


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name] - x).abs().max()) for name, x in expected.items())


# ---- losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", DEGREES)
def test_the_loss_of_an_evaluation_is_the_same_number_at_every_degree(degree: int) -> None:
    samples = texts((33, 7, 12))
    expected, _ = alone(samples)

    def evaluate(groups: Any) -> float:
        w, metrics = weights(), hcp.Metrics(groups)
        for cp, local in planned(groups, samples, degree):
            x, added = layer(w, local.tokens, cp.attention)
            metrics.add("loss", losses_of(w, x + added, local.labels), local.loss_mask)
        return metrics.reduce()["loss"].mean

    assert hcp.loopback(4, evaluate) == pytest.approx([expected] * 4, rel=EXACT)


MASKS = {
    "one token counts": [[0] * 30 + [1], [0] * 5],
    "a rank has none that counts": [[1] * 4 + [0] * 27, [0] * 5],
    "all count": [[1] * 31, [1] * 5],
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("degree", DEGREES)
def test_gradients_do_not_depend_on_where_the_loss_tokens_lie(
    degree: int, masks: list[list[int]]
) -> None:
    samples = texts((31, 5), masks)
    loss, expected = alone(samples)

    def train(groups: Any) -> tuple[float, dict[str, Tensor]]:
        w, total = leaves_of(weights()), 0.0
        for cp, local in planned(groups, samples, degree):
            x, added = layer(w, local.tokens, cp.attention)
            share = cp.loss(
                losses_of(w, x + added, local.labels), local.loss_mask, grad_reduce="sum"
            )
            share.backward()
            total += float(share.detach())
        return total, {name: grad_of(x) for name, x in w.items()}

    results = hcp.loopback(4, train)
    assert sum(part for part, _ in results) == pytest.approx(loss, rel=EXACT)
    summed = {name: torch.stack([g[name] for _, g in results]).sum(0) for name in expected}
    assert worst(summed, expected) < EXACT


def test_gradients_that_a_trainer_averages_are_as_large_as_those_that_it_sums() -> None:
    samples = texts((31, 5))
    _, expected = alone(samples)

    def train(groups: Any, how: Any) -> dict[str, Tensor]:
        w = leaves_of(weights())
        for cp, local in planned(groups, samples, 2):
            x, added = layer(w, local.tokens, cp.attention)
            losses = losses_of(w, x + added, local.labels)
            cp.loss(losses, local.loss_mask, grad_reduce=how).backward()
        return {name: grad_of(x) for name, x in w.items()}

    for how, reduced in (("sum", torch.sum), ("mean", torch.mean)):
        each = hcp.loopback(4, lambda groups, how=how: train(groups, how))
        found = {name: reduced(torch.stack([g[name] for g in each]), 0) for name in expected}
        assert worst(found, expected) < EXACT
    with pytest.raises(ValueError, match=r"grad_reduce is None, expected one of"):
        hcp.loopback(4, lambda groups: train(groups, None))


# ---- what a layer asks of its attention ----------------------------------------------------------


@pytest.mark.parametrize("comm_type", hcp.COMM_TYPES)
def test_sinks_count_and_are_learned(comm_type: str) -> None:
    case = Case((29, 5, 1), 4, min_degree=4, comm_type=comm_type, sinks=True, lse=True)
    assert loopback_error(case) < EXACT


def test_an_option_that_attention_does_not_have_is_an_error() -> None:
    """Nothing is swallowed: Transformers' name for sinks is not hcp's."""

    def call(groups: Any) -> None:
        cp = hcp.ContextParallelHandler(
            hcp.plan([9], ranks=1, max_tokens_per_rank=9), 0, groups.transport
        )
        x = torch.randn(9, 2, 4)
        cp.attention(x, x, x, s_aux=torch.randn(2))

    with pytest.raises(TypeError, match="unexpected keyword argument 's_aux'"):
        hcp.loopback(1, call)


@pytest.mark.parametrize("comm_type", hcp.COMM_TYPES)
def test_a_window_stays_a_window(comm_type: str) -> None:
    case = Case((61, 9, 2), 4, min_degree=4, comm_type=comm_type, window=(5, 0))
    assert loopback_error(case) < EXACT


@pytest.mark.parametrize("comm_type", hcp.COMM_TYPES)
def test_the_scale_of_the_softmax_is_the_one_that_is_given(comm_type: Any) -> None:
    lengths, scale = (29, 6), 0.07
    generator = torch.Generator().manual_seed(5)
    wholes = [torch.randn(3, n, 2, 8, generator=generator, dtype=torch.float64) for n in lengths]

    def expected_of(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        out = F.scaled_dot_product_attention(*x.transpose(1, 2), is_causal=True, scale=scale)
        out.square().sum().backward()
        return out.detach().transpose(0, 1), grad_of(x)

    expected = [expected_of(x) for x in wholes]

    def check(groups: Any) -> None:
        plan = hcp.plan(lengths, ranks=4, max_tokens_per_rank=16, min_degree=4)
        levels = {"hierarchical_context_parallel_sizes": (2, 2)} if "+" in comm_type else {}
        cp = hcp.ContextParallelHandler(
            plan, 0, groups.transport, comm_types=(comm_type,), **levels
        )

        def here(parts: list[Tensor], dim: int) -> Tensor:
            spans = [parts[s].narrow(dim, start, n) for s, start, n in cp.layout.spans]
            return torch.cat(spans, dim)

        x = here(wholes, 1).requires_grad_()
        out = cp.attention(*x, softmax_scale=scale)
        out.square().sum().backward()
        assert float((out.detach() - here([e[0] for e in expected], 0)).abs().max()) < EXACT
        assert float((grad_of(x) - here([e[1] for e in expected], 1)).abs().max()) < EXACT

    hcp.loopback(4, check)


# ---- lengths, documents and padding --------------------------------------------------------------


@pytest.mark.parametrize("comm_type", hcp.COMM_TYPES)
def test_a_pack_of_different_lengths_is_its_sequences(comm_type: str) -> None:
    case = Case((1, 2, 97, 13, 3, 1, 40), 4, min_degree=4, comm_type=comm_type)
    assert loopback_error(case) < EXACT


@pytest.mark.parametrize("comm_type", hcp.COMM_TYPES)
def test_the_last_token_of_an_odd_length_counts(comm_type: str) -> None:
    assert loopback_error(Case((7, 3), 2, min_degree=2, comm_type=comm_type)) < EXACT


def test_documents_of_one_sequence_do_not_see_each_other() -> None:
    documents = (7, 1, 20, 5)
    generator = torch.Generator().manual_seed(6)
    whole = torch.randn(3, sum(documents), 2, 8, generator=generator, dtype=torch.float64)
    expected = torch.cat([causal(*part) for part in whole.split(documents, 1)])

    def check(groups: Any) -> None:
        mask = hcp.Mask.documents(documents)
        plan = hcp.plan(
            [sum(documents)], ranks=3, max_tokens_per_rank=12, min_degree=3, masks=[mask]
        )
        own = [{"qkv": whole.transpose(0, 1)}] if groups.transport.rank == 0 else []
        for cp, local in hcp.dispatch(plan, own, [0], groups):
            out = cp.combine(cp.attention(*local.qkv.unbind(1), window_size=(-1, -1)))
            if groups.transport.rank == 0:
                assert float((out - expected).abs().max()) < EXACT

    hcp.loopback(3, check)


@pytest.mark.parametrize("comm_type", hcp.COMM_TYPES)
def test_nobody_attends_to_padding(comm_type: Any) -> None:
    """Rows that the alignment adds hold NaN here: whoever attends to one becomes NaN."""
    lengths = (29, 6)
    generator = torch.Generator().manual_seed(8)
    wholes = [torch.randn(3, n, 4, 8, generator=generator, dtype=torch.float64) for n in lengths]
    expected = [causal(*x) for x in wholes]

    def check(groups: Any) -> int:
        plan = hcp.plan(lengths, ranks=4, max_tokens_per_rank=16, min_degree=4, alignment=8)
        levels = {"hierarchical_context_parallel_sizes": (2, 2)} if "+" in comm_type else {}
        cp = hcp.ContextParallelHandler(
            plan, 0, groups.transport, comm_types=(comm_type,), **levels
        )
        padding = cp.layout.padding
        rows = [wholes[s][:, start : start + n] for s, start, n in cp.layout.spans]
        nothing = torch.full((3, padding, 4, 8), torch.nan, dtype=torch.float64)
        x = torch.cat([*rows, nothing], 1).requires_grad_()
        real = cp.rows - padding
        out = cp.attention(*x)[:real]
        out.sum().backward()
        want = torch.cat([expected[s][start : start + n] for s, start, n in cp.layout.spans])
        assert float((out.detach() - want).abs().max()) < EXACT
        assert torch.isfinite(grad_of(x)[:, :real]).all()
        return int(padding)

    assert sum(hcp.loopback(4, check)) > 0


# ---- other kinds of parallelism, other kinds of layers -------------------------------------------


def tensor_parallel(rank: int, size: int, samples: list[dict[str, Tensor]]) -> Any:
    """Tensor parallelism over 2 ranks, the rest for sequences: each rank has half of the heads."""
    groups = hcp.build_process_groups(tp=2)
    mine = slice(*(HEADS // 2 * (groups.rank("tp") + i) for i in (0, 1)))
    w = weights()
    w = leaves_of(w | {"qkv": w["qkv"][:, :, mine], "out": w["out"][mine]})
    shown = torch.zeros(2, dtype=torch.float64)
    for cp, local in planned(groups, samples, groups.size("dp_cp")):
        assert cp.degree == 2
        x, part = layer(w, local.tokens, cp.attention)
        added = Summed.apply(part, groups.tp)
        losses = losses_of(w, x + added, local.labels)
        cp.loss(losses, local.loss_mask, grad_reduce="sum").backward()
        shown += torch.stack(cp.loss_sum(losses.detach(), local.loss_mask))
    grads = {name: grad_of(x) for name, x in w.items()}
    dist.all_reduce(shown, group=groups.dp_cp)
    for grad in grads.values():
        dist.all_reduce(grad, group=groups.dp_cp)
    return float(shown[0] / shown[1]), groups.rank("tp"), grads


class Summed(torch.autograd.Function):
    """The sum of the parts of all tensor-parallel ranks, each of which takes its gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def test_tensor_and_context_parallelism_together_equal_one_rank() -> None:
    samples = texts((33, 7))
    loss, expected = alone(samples)
    for shown, tp, grads in run_ranks(4, tensor_parallel, samples):
        assert shown == pytest.approx(loss, rel=EXACT)
        heads = slice(HEADS // 2 * tp, HEADS // 2 * (tp + 1))
        assert float((grads["qkv"] - expected["qkv"][:, :, heads]).abs().max()) < EXACT
        assert float((grads["out"] - expected["out"][heads]).abs().max()) < EXACT
        assert float((grads["head"] - expected["head"]).abs().max()) < EXACT


@dataclass(frozen=True)
class Delta:
    """Rows of a gated delta rule: h = gate (I - b k k') h + b k v', and q' h for each row."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    b: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Delta:
        """Of (T, heads, 3 * SIZE + 2)."""
        q, k, v, gate, b = x.split((SIZE, SIZE, SIZE, 1, 1), -1)
        return cls(q, F.normalize(k, dim=-1), v, gate.sigmoid(), b.sigmoid())

    def steps(self) -> tuple[Tensor, Tensor]:
        outer = self.k[..., :, None] * self.k[..., None, :]
        eye = torch.eye(SIZE, dtype=outer.dtype)
        transitions = self.gate[..., None] * (eye - self.b[..., None] * outer)
        return transitions, self.b[..., None] * self.k[..., :, None] * self.v[..., None, :]

    def scan(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs, and the state after the last row."""
        outs = []
        for q, transition, given in zip(self.q, *self.steps(), strict=True):
            state = transition @ state + given
            outs.append(torch.einsum("hk,hkv->hv", q, state))
        return torch.stack(outs), state


def by_states(cp: hcp.ContextParallelHandler, x: Tensor) -> Tensor:
    spans = [Delta.of(part) for part in x.split(cp.scan.span_cu_seqlens.diff().tolist())]
    zero = x.new_zeros(x.shape[1], SIZE, SIZE)
    ends = torch.stack([span.scan(zero)[1] for span in spans])
    whole = torch.stack([product(span.steps()[0]) for span in spans])
    entering = cp.scan.pass_states(ends, transition=whole)
    return torch.cat([span.scan(h)[0] for span, h in zip(spans, entering, strict=True)])


def product(transitions: Tensor) -> Tensor:
    total = transitions[0]
    for each in transitions[1:]:
        total = each @ total
    return total


def by_heads(cp: hcp.ContextParallelHandler, x: Tensor) -> Tensor:
    whole = cp.whole.sequence_to_head(x)
    zero = x.new_zeros(whole.shape[1], SIZE, SIZE)
    parts = whole.split(cp.whole.cu_seqlens.diff().tolist())
    return cp.whole.head_to_sequence(
        torch.cat([Delta.of(part).scan(zero)[0] for part in parts]), HEADS
    )


@pytest.mark.parametrize("way", [by_states, by_heads])
@pytest.mark.parametrize("degree", DEGREES)
def test_gated_delta_layers_scan_whole_sequences(degree: int, way: Any) -> None:
    lengths = (33, 7)
    generator = torch.Generator().manual_seed(9)
    wholes = [
        torch.randn(n, HEADS, 3 * SIZE + 2, generator=generator, dtype=torch.float64)
        for n in lengths
    ]

    def expected_of(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        out, _ = Delta.of(x).scan(x.new_zeros(HEADS, SIZE, SIZE))
        out.square().sum().backward()
        return out.detach(), grad_of(x)

    expected = [expected_of(x) for x in wholes]

    def check(groups: Any) -> None:
        plan = hcp.plan(lengths, ranks=degree, max_tokens_per_rank=64, min_degree=degree)
        cp = hcp.ContextParallelHandler(plan, 0, groups.transport)

        def here(parts: list[Tensor]) -> Tensor:
            return torch.cat([parts[s][start : start + n] for s, start, n in cp.layout.spans])

        x = here(wholes).requires_grad_()
        out = way(cp, x)
        out.square().sum().backward()
        for found, want in zip(
            (out.detach(), grad_of(x)), zip(*expected, strict=True), strict=True
        ):
            assert float((found - here(list(want))).abs().max()) < EXACT

    hcp.loopback(degree, check)
