"""Fields that are not one row per token, between GPUs: over NCCL, and over peer memory where two
GPUs are."""

from __future__ import annotations

import pytest
import torch
from support.fields import check_step
from support.gpu_ranks import on_gpus
from support.ranks import run_ranks

from hcp._words import TransportName

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def fields_over(rank: int, size: int, transport: TransportName) -> None:
    groups = on_gpus(rank, transport)
    for options in ({"min_degree": size}, {"masked": True}):
        check_step(groups, [40, 7, 1, 19, 24], [0, 1, 0, 1, 1], device="cuda", **options)
    groups.close()


@pytest.mark.parametrize("transport", ["nccl", "peer"])
def test_fields_travel_between_gpus(transport: str) -> None:
    if transport == "peer" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run_ranks(2, fields_over, transport, timeout=110)
