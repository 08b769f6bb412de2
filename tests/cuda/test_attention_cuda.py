"""Attention on one GPU in loopback: the CPU's tables and cases, exact kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import Case, loopback_error
from hypothesis import given, settings
from hypothesis import strategies as st

import hcp

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


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("comm_type", hcp.COMM_TYPES)
@pytest.mark.parametrize("degree", range(1, 9))
def test_flash_attention_rounds_as_one_call_does(degree: int, comm_type: str, causal: bool) -> None:
    case = Case(
        LENGTHS,
        degree,
        min_degree=degree,
        comm_type=comm_type,
        causal=causal,
        head_dim=64,
        dtype="bfloat16",
    )
    alone = loopback_error(replace(case, ranks=1, min_degree=1), device="cuda")
    assert loopback_error(case, device="cuda") <= 2 * alone


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
    degree: int, comm_type: str, window: tuple[int, int]
) -> None:
    case = Case(LENGTHS, degree, min_degree=degree, comm_type=comm_type, window=window)
    case = replace(
        case, causal=False, sinks=True, lse=True, head_dim=64, value_dim=48, dtype="bfloat16"
    )
    alone = loopback_error(replace(case, ranks=1, min_degree=1))  # the CPU's kernel
    assert loopback_error(case, device="cuda") <= 3 * alone
