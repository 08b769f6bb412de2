"""Cost models by name: prices that others published, and some that were measured."""

from __future__ import annotations

from hcp.planning.cost import CostModel


def _flexsp(a1: float, a2: float, b1: float, layers: int, hidden: int) -> CostModel:
    """Return FlexSP's model: a1 s^2 + a2 s + b1 in ms on A100-40G (arXiv 2412.01523, constants of
    its artifact), and its all-to-all of 16 * layers * hidden bytes per token, at its measured rates
    for 4 ranks (104 GB/s) and for 32 (5.94 GB/s)."""
    moved = 16 * layers * hidden
    return CostModel(
        pair=round(2 * a1 * 1e8),
        token=round(a2 * 1e8),
        exchange=0,
        launch=round(b1 * 1e8),
        all_to_all=round(moved / 104.07e9 * 1e11),
        all_to_all_far=round(moved / 5.94e9 * 1e11),
        unit=1e-11,
    )


def _hydraulis(a: float, b: float, c: float) -> CostModel:
    """Return Hydraulis' model: a s^2 + b s + c in ms (arXiv 2412.07894, 7B on A100), with a ring of
    7B keys and values (32 layers of 8 KiB per token, forward and backward) over 200 and 50 GB/s."""
    moved = 3 * 32 * 8192
    return CostModel(
        pair=round(2 * a * 1e8),
        token=round(b * 1e8),
        exchange=round(moved / 200e9 * 1e11),
        exchange_far=round(moved / 50e9 * 1e11),
        launch=round(c * 1e8),
        overlap=1,
        unit=1e-11,
    )


_GPT_1B_H200 = CostModel(
    pair=1675,
    token=9962047,
    exchange=1150995,
    launch=28222737487,
    step=168271152,
    unit=1e-12,
    kernels=("torch",),
)
"""Measured: a GPT of 1.0 B parameters (18 layers, width 2048, heads 16:8, bfloat16), all_gather
among 4 H200s of one host, 2048 to 8192 rows a rank, attention by PyTorch's FlashAttention-2 (the
backend "torch"); 5.7% off in the median of held-out points. All points and versions:
benchmarks/results/calibrate_h200x4_2026-11-22.json."""


PRESETS: dict[str, CostModel] = {
    "flexsp-7b": _flexsp(5.128e-6, 0.1839576, 629.36, 32, 4096),
    "flexsp-13b": _flexsp(9.2852e-6, 0.3060189, 1132.56, 40, 5120),
    "flexsp-30b": _flexsp(1.54262e-5, 0.8035742, 2789.36, 60, 6656),
    "hydraulis-7b-tp4": _hydraulis(9.51e-7, 0.05557, 51.4),
    "hydraulis-7b-tp8": _hydraulis(5.12e-7, 0.03268, 59.7),
    "gpt-1b-h200": _GPT_1B_H200,
}
"""Cost models by name: published ones, and one that was measured."""
