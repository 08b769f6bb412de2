"""FlashAttention-2's packs, in torch and in the package ``flash_attn``: what they are given."""

from __future__ import annotations

from random import Random

import pytest
import torch
from support.varlen import varlen_backward, varlen_forward
from torch import Tensor

from hcp.attention.kernels import Launch, join
from hcp.attention.kernels.flash_attn_torch import MOST_HEAD_SIZE, Flash2
from hcp.attention.kernels.formula import Formula
from hcp.exchange.tables import Entry


class Library(Flash2):
    """FlashAttention-2 by the formula, with its decoding path: for a longest of one query, without
    a window, it takes the i-th query for that of the i-th sequence, and refuses other numbers."""

    def run(self, launch, rows, scale):  # type: ignore[no-untyped-def]
        cu_q, cu_k, most_q, most_k = self.pack(launch, rows[0])
        if most_q == 1 and rows[0].shape[1] > rows[1].shape[1] and launch.window == (-1, -1):
            assert len(rows[0]) == len(cu_q) - 1, "shape is invalid for input of size"
            cu_q = torch.arange(len(cu_q), dtype=torch.int32)
        left, right = launch.window
        out, lse, *_ = varlen_forward(
            *rows, cu_q, cu_k, most_q, most_k, **self.options(scale, left, right)
        )
        return out, lse

    def run_backward(self, launch, grad_out, rows, lse, scale):  # type: ignore[no-untyped-def]
        assert grad_out.shape[2] <= MOST_HEAD_SIZE
        assert grad_out.shape == rows[0].shape == rows[3].shape
        grads = [torch.empty_like(x) for x in rows[:3]]
        pack = self.pack(launch, grad_out)
        options = self.options(scale, *launch.window)
        varlen_backward(grad_out, *rows, lse, *grads, *pack, **options)
        return grads

    @staticmethod
    def options(scale: float, left: int, right: int) -> dict[str, object]:
        window = {"window_size_left": left, "window_size_right": right}
        return {"dropout_p": 0.0, "causal": False, "softmax_scale": scale, "softcap": 0.0, **window}


def full(*blocks: tuple[int, int, int, int]) -> list[Entry]:
    """Entries without a limit, of (first query, queries, first key, keys)."""
    return [Entry(q, queries, k, keys, -queries, keys) for q, queries, k, keys in blocks]


def drawn(launch: Launch, size: int, value_size: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(launch.queries.stop, 4, size), (launch.keys.stop, 2, size)]
    shapes += [(launch.keys.stop, 2, value_size), (launch.queries.stop, 4, value_size)]
    return [torch.randn(*shape, dtype=torch.float64) for shape in shapes]


def expect_the_formula(entries: list[Entry], size: int, value_size: int) -> None:
    """Compare the rows of the entries, forward and backward with a gradient of the log-sum-exp."""
    (launch,) = join(entries, packs=True)
    query, key, value, grad = drawn(launch, size, value_size)
    grad_lse, kernel = grad[..., 0], Library()
    out, lse = kernel.forward(launch, query, key, value, 0.3)
    found = kernel.backward(launch, (grad, grad_lse), (query, key, value, out, lse), 0.3)
    for entry in entries:
        q = slice(entry.query_row, entry.query_row + entry.query_rows)
        k = slice(entry.key_row, entry.key_row + entry.key_rows)
        own, rows = Launch([entry]), (query[q], key[k], value[k])
        want, sums = Formula(0.0).forward(own, *rows, 0.3)
        wanted = Formula(0.0).backward(own, (grad[q], grad_lse[q]), (*rows, want, sums), 0.3)
        both = (out[q], want), (lse[q], sums), (found[0][q], wanted[0])
        both = *both, (found[1][k], wanted[1]), (found[2][k], wanted[2])
        for got, expected in both:
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "entries",
    [
        pytest.param(full((0, 1, 0, 5), (1, 1, 9, 3)), id="keys between, which nobody sees"),
        pytest.param(full((0, 1, 0, 5), (3, 1, 5, 3)), id="rows between, which no entry names"),
        pytest.param(
            full((0, 1, 0, 5), (3, 1, 5, 3), (4, 1, 9, 2)),
            id="as many rows as sequences",
        ),
        pytest.param(full((0, 1, 0, 5)), id="one sequence"),
    ],
)
def test_packs_whose_longest_sequence_has_one_query(entries: list[Entry]) -> None:
    expect_the_formula(entries, 8, 8)


def test_drawn_packs_of_single_queries() -> None:
    r = Random(0)
    for _ in range(200):
        blocks, query, key = [], 0, 0
        for _ in range(r.randint(1, 6)):
            blocks.append((query, 1, key, r.randint(1, 4)))
            query, key = query + 1 + r.choice((0, 0, 1, 2)), key + blocks[-1][3] + r.choice((0, 3))
        expect_the_formula(full(*blocks), 8, 8)


@pytest.mark.parametrize(("size", "value_size"), [(256, 256), (64, 256), (256, 64), (254, 254)])
def test_the_largest_head_sizes_have_gradients_of_the_log_sum_exp(
    size: int, value_size: int
) -> None:
    expect_the_formula(full((0, 3, 0, 5), (3, 2, 7, 4)), size, value_size)
