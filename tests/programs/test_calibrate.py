"""Calibration finds the prices of computed times, and writes a file of prices on real ranks."""

from __future__ import annotations

import itertools
import json
import os
import platform
import random
import shlex
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.memory import Bytes, allocated
from support.ranks import run_ranks

import hcp
from hcp.cli import calibrate as calibration
from hcp.cli.calibrate import conclude, flat_rows, held_out, main, parse_arguments
from hcp.cli.calibrate import grid as cells_of
from hcp.cli.fit import Fit, Point, fit, non_negative_least_squares
from hcp.cli.measure_memory import MeasuredMemory, conclude_memory, measure_memory
from hcp.tools.check import check_plan
from hcp.tools.memory_fit import Peak, fit_peaks, fit_shared
from hcp.tools.programs import launch

PRICES = {"pair": 2e-10, "token": 3e-7, "exchange": 4e-7, "launch": 5e-3, "step": 1e-4}


def grid(truth: Fit, noise: float = 0.0, node: int = 100) -> list[Point]:
    """The times that the grid would have measured under these prices."""
    draw = random.Random(7)
    points = []
    for degree, rows, parts in itertools.product((1, 2, 3, 4, 8), (256, 1024, 4096), (1, 4, 16)):
        lengths = (rows * degree // parts,) * parts
        point = Point(lengths, degree, degree > node, 1.0)
        seconds = truth.predict(point) * (1 + draw.uniform(-noise, noise))
        points.append(Point(lengths, degree, degree > node, seconds))
    return points


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(
    "prices",
    [
        PRICES,
        PRICES | {"step": 0.0},
        PRICES | {"exchange": 1e-8},
        PRICES | {"launch": 0.0},
        PRICES | {"exchange_far": 4e-6},
    ],
)
def test_prices_come_back_from_times_that_they_made(prices: dict[str, float], overlap: int) -> None:
    truth = Fit(prices, overlap)
    points = grid(truth, node=4 if "exchange_far" in prices else 100)
    found = fit(points)
    assert found.errors(points)[-1] < 1e-3
    for name in ("pair", "token", "launch"):
        assert found.prices[name] == pytest.approx(prices[name], rel=2e-2, abs=1e-9)


def test_all_to_all_has_a_price_of_its_own() -> None:
    truth = Fit({"pair": 2e-10, "token": 3e-7, "all_to_all": 4e-7, "launch": 5e-3}, 0)
    found = fit(grid(truth), "a2a")
    assert found.cost.exchange == 0
    assert found.prices["all_to_all"] == pytest.approx(4e-7, rel=1e-2)


def test_noise_of_five_percent_leaves_errors_of_that_size() -> None:
    points = grid(Fit(PRICES, 0), noise=0.05)
    held_out = points[::4]
    found = fit([point for point in points if point not in held_out])
    errors = found.errors(held_out)
    assert errors[len(errors) // 2] < 0.05
    assert errors[-1] < 0.12


def test_no_price_is_negative_when_times_fall_with_the_number_of_ranks() -> None:
    points = [Point((1000,), d, False, 1.0 / d**2) for d in (1, 2, 4, 8)]
    assert all(price >= 0 for price in fit(points).prices.values())


def test_a_far_exchange_is_never_cheaper_than_a_near_one() -> None:
    truth = Fit(PRICES | {"exchange_far": PRICES["exchange"]}, 0)
    points = [
        Point(p.lengths, p.degree, p.far, p.seconds * (0.7 if p.far else 1))
        for p in grid(truth, node=4)
    ]
    found = fit(points).prices
    assert found["exchange_far"] >= found["exchange"] > 0


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_least_squares_keep_the_conditions_of_an_optimum(
    seed: int, columns: int, rows: int
) -> None:
    """Karush, Kuhn and Tucker: x >= 0, the gradient >= 0, and 0 where x is not."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    target = torch.randn(rows, generator=generator, dtype=torch.float64)
    x = non_negative_least_squares(matrix, target)
    gradient = matrix.T @ (matrix @ x - target)
    assert bool((x >= 0).all())
    assert bool((gradient >= -1e-8).all()), gradient
    assert float((gradient * x).abs().max()) < 1e-8


# ---- the grid ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3, 8, 12, 64])
def test_the_grid_has_every_kind_of_micro_batch(ranks: int) -> None:
    cells = cells_of(ranks, 62, 1000)
    assert {1, ranks} <= {cell.degree for cell in cells}
    assert len(set(cells)) == len(cells)
    for cell in cells:
        assert min(cell.lengths) >= 1
        assert sum(cell.lengths) <= 1000 * cell.degree
    assert max(sum(cell.lengths) for cell in cells) == 1000 * ranks


def test_the_grid_halves_the_rows_down_to_the_least() -> None:
    rows = {sum(cell.lengths) // cell.degree for cell in cells_of(2, 300, 2048)}
    assert rows == {2048, 1024, 512}


def test_rows_whose_time_is_the_hosts_are_found() -> None:
    points = grid(Fit({"token": 1e-5}, 0))
    assert flat_rows(points) == 0
    doubled = [
        Point((rows * degree,), degree, False, max(rows * 1e-5, 0.02 + degree / 1000))
        for degree in (1, 2, 4)
        for rows in (512, 1024, 2048, 4096, 8192)
    ]
    assert flat_rows(doubled) == 1024
    cells = cells_of(2, 187, 3000)
    points = [Point(c.lengths, c.degree, False, 0.02) for c in cells]
    assert flat_rows(points) >= 1488, "of the largest two sizes, whose rows are not quite halves"


def test_held_out_points_are_a_quarter_and_the_same_for_a_seed() -> None:
    assert held_out(60, 1) == held_out(60, 1) != held_out(60, 2)
    assert len(held_out(60, 1)) == 15


# ---- the command ---------------------------------------------------------------------------------


SMALL = ["--num-layers", "1", "--hidden-size", "16", "--ffn-hidden-size", "16"]
SMALL += ["--num-attention-heads", "2", "--max-tokens-per-rank", "256", "--repeats", "1"]


def calibrate(*argv: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "hcp", "calibrate", *SMALL, *argv],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def test_times_that_do_not_grow_with_the_rows_are_refused() -> None:
    points = [Point(p.lengths, p.degree, p.far, 0.02) for p in grid(Fit(PRICES, 0))]
    with pytest.raises(ValueError, match="up to 4096 rows a rank do not grow"):
        fit(points)


@pytest.mark.parametrize("comm_type", ["p2p", "a2a"])
def test_measured_times_become_a_file_that_plans(
    comm_type: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(calibration, "nvidia_smi", lambda *_: "580.1\n580.1\n")
    out = tmp_path / "cost.json"
    argv = [*SMALL, "--ranks", "3", "--out", str(out), "--cp-comm-type", comm_type]
    args = parse_arguments(argv)
    cells = cells_of(3, 16, 256)
    truth = Fit(PRICES, 0)
    seconds = [truth.predict(Point(c.lengths, c.degree, False, 1.0)) for c in cells]
    conclude(
        args, cells, seconds, min(seconds) / 2, "a device", {"flash_attn_4": "4.0", "torch": "2.13"}
    )
    assert "held-out points: median" in capsys.readouterr().out
    provenance = json.loads(out.read_text())["provenance"]
    assert (provenance["ranks"], provenance["model"]["cp_comm_type"]) == (3, comm_type)
    assert provenance["model"]["attention_backend"] == "auto"
    assert shlex.split(provenance["command"]) == ["hcp", "calibrate", *argv]
    assert provenance["device"] == "a device"
    assert provenance["kernels"] == {"flash_attn_4": "4.0", "torch": "2.13"}
    assert provenance["versions"] == {
        "hcp": hcp.__version__,
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "driver": "580.1",
        "python": platform.python_version(),
    }
    assert datetime.strptime(provenance["date"], "%Y-%m-%d %H:%M UTC")
    assert provenance["errors"]["held-out"]["points"] == 11
    assert provenance["errors"]["fitted"]["points"] == 34
    assert provenance["points"] == [
        [c.lengths[0], len(c.lengths), c.degree, took]
        for c, took in zip(cells, seconds, strict=True)
    ]
    cost = hcp.CostModel.load(out)
    assert cost.unit is not None
    assert cost.host * cost.unit == pytest.approx(min(seconds) / 2, rel=1e-3)
    assert cost.kernels == ("flash_attn_4", "torch")
    plan = hcp.plan([700, 30, 90], ranks=3, max_tokens_per_rank=256, cost=cost)
    check_plan(plan)
    assert plan.kernels == cost.kernels


def conclude_from(truth: Fit, noise: float, tmp_path: Path, *argv: str) -> Path:
    out = tmp_path / "cost.json"
    args = parse_arguments([*SMALL, "--ranks", "3", "--out", str(out), *argv])
    draw, cells = random.Random(7), cells_of(3, 16, 256)
    seconds = [
        truth.predict(Point(c.lengths, c.degree, False, 1.0)) * draw.uniform(1, 1 + noise)
        for c in cells
    ]
    conclude(args, cells, seconds, 0.0, "a device", {"torch": "2.13"})
    return out


FREE = Fit({"token": 1e-5, "launch": 1e-3}, 0)


def test_prices_by_which_attention_is_free_are_refused_in_words(tmp_path: Path) -> None:
    message = r"pair is 0, which makes attention free, expected > 0: sequences of up to 768 tokens"
    with pytest.raises(ValueError, match=message):
        conclude_from(FREE, 0, tmp_path)
    assert not (tmp_path / "cost.json").exists()


def test_prices_that_miss_held_out_points_by_far_are_refused_in_words(tmp_path: Path) -> None:
    message = r"the median of the errors on 11 held-out points is \d+\.\d%, expected at most 30%"
    with pytest.raises(ValueError, match=message):
        conclude_from(Fit(PRICES, 0), 40, tmp_path)
    assert not (tmp_path / "cost.json").exists()


def test_refused_prices_may_be_accepted_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = conclude_from(FREE, 0, tmp_path, "--accept-errors")
    assert "accepted by --accept-errors: pair is 0" in capsys.readouterr().out
    assert hcp.CostModel.load(out).pair == 0


def test_no_driver_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert calibration.driver() is None


@pytest.mark.parametrize("comm_type", ["p2p", "a2a+p2p"])
def test_ranks_measure_every_cell(comm_type: str, tmp_path: Path) -> None:
    """So small a model on so busy a machine may show no growth: then it says so."""
    out = tmp_path / "cost.json"
    levels = ["--hierarchical-context-parallel-sizes", "2", "2"] if comm_type == "a2a+p2p" else []
    given = ["--out", str(out), "--cp-comm-type", comm_type, *levels, "--accept-errors"]
    done = calibrate("--ranks", "3", *given)
    assert "92/92" in done.stderr
    if done.returncode == 2:
        assert "do not grow with their rows" in done.stderr
        assert not out.exists()
        return
    assert done.returncode == 0, done.stderr
    points = json.loads(out.read_text())["provenance"]["points"]
    assert len(points) == 45
    assert all(seconds > 0 for *_, seconds in points)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-tokens-per-rank", "64"], "max_tokens_per_rank is 64, expected >= 256"),
        (["--min-tokens-per-rank", "200"], "min_tokens_per_rank is 200, expected 16 to half"),
        (["--num-query-groups", "3"], "num_attention_heads (2) % num_query_groups (3) == 2"),
        (["--repeats", "0"], "repeats is 0, expected an integer >= 1"),
        (
            ["--out", "/none/such/cost.json"],
            "out is /none/such/cost.json, expected a file that can be written: No such",
        ),
        (["--cp-comm-type", "auto"], "cp_comm_type is 'auto', which goes by the prices"),
        (["--attention-backend", "magi"], "attention_backend is 'magi', expected one of auto, tor"),
        (["--cp-comm-type", "a2a+p2p"], "hierarchical_context_parallel_sizes is missing"),
        (["--vocab-size", "263"], "vocab_size is 263, expected >= 264: tokens of the data"),
        (["--memory", "--memory-share", "0"], "memory_share is 0.0, expected a part of the memory"),
        (["--memory", "--device", "cpu"], "--memory reads what the allocator of a GPU counts, and"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_ranks_start(
    argv: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launch, "start_ranks", lambda *_: pytest.fail("ranks were started"))
    assert main([*SMALL, "--out", str(tmp_path / "cost.json"), *argv]) == launch.USER_ERROR
    said = capsys.readouterr().err
    assert said.startswith("hcp calibrate: error: ")
    assert message in said


# ---- bytes ---------------------------------------------------------------------------------------

MEASURED = ["--num-layers", "2", "--hidden-size", "32", "--ffn-hidden-size", "64"]
MEASURED += ["--num-attention-heads", "4", "--num-query-groups", "2", "--max-tokens-per-rank"]
MEASURED += ["256", "--min-tokens-per-rank", "32"]


def measured_on_cpu(rank: int, size: int, *argv: str) -> MeasuredMemory:
    """What calibrate --memory measures, by the CPU's allocator."""
    args = parse_arguments([*MEASURED, "--ranks", str(size), "--out", "memory.json", *argv])
    return measure_memory(args, torch.device("cpu"), least_allocated, room=2**27 + rank)


def least_allocated(call: Callable[[], object]) -> Bytes:
    """The bytes of a call without those that something else happens to hold meanwhile."""
    return Bytes(*map(min, zip(allocated(call), allocated(call), strict=True)))


@pytest.mark.parametrize("comm_type", ["all_gather", "p2p"])
def test_ranks_measure_bytes(comm_type: str) -> None:
    results = run_ranks(3, measured_on_cpu, "--cp-comm-type", comm_type)
    assert results[0] == results[1] == results[2]
    measured = results[0]
    fit, model = measured.fit, measured.fit.model
    assert [peak.rows for peak in fit.peaks] == [32, 64, 128, 256]
    assert sorted(measured.by_degree) == [1, 2, 3]
    assert measured.room == 2**27 == model.limit + fit.fixed
    assert 0 <= fit.largest_error < 0.1
    # support/layer_bytes.py: keys and values as received and in order, or with their gradients
    keys = 2 * 2 * 8 * 4  # of 2 heads of 8 elements of float32
    # A busy host may not have noticed yet that a message has gone: its rows count once more.
    assert (keys if comm_type == "all_gather" else 0) <= model.gathered <= 4 * keys


def test_a_larger_vocabulary_takes_more_bytes_of_logits_and_no_more_activations() -> None:
    small, large = (
        run_ranks(1, measured_on_cpu, "--vocab-size", str(size))[0].fit.model for size in (300, 600)
    )
    assert small.gathered == large.gathered == 0
    assert small.activation == pytest.approx(large.activation, rel=0.01)
    # logits, their log-softmax, and their gradient, in float32
    assert 2 * 4 * 300 <= large.logit - small.logit <= 4 * 4 * 300


def test_the_model_of_bytes_holds_for_other_rows() -> None:
    measured = run_ranks(1, measured_on_cpu)[0]
    elsewhere = run_ranks(1, measured_on_cpu, "--max-tokens-per-rank", "400")[0]
    for peak in elsewhere.fit.peaks:
        assert -0.01 < measured.fit.error(peak) < 0.1


def test_measured_bytes_become_a_file_that_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hcp.tools.programs.ranks.runs_on_cpus", lambda *_: False)
    out = tmp_path / "memory.json"
    argv = [*MEASURED, "--ranks", "2", "--out", str(out), "--memory", "--memory-share", "0.8"]
    argv += ["--head-chunks", "2"]
    args = parse_arguments(argv)
    peaks = [Peak(rows, 100 + 30 * rows, 20 * rows) for rows in (32, 64, 128, 256)]
    by_degree = {1: [Peak(n, 5 * n) for n in (1, 2, 3)], 2: [Peak(n, 9 * n) for n in (1, 2, 3)]}
    fit = fit_peaks(peaks, 9100, fit_shared(by_degree, args.head_chunks))
    conclude_memory(args, MeasuredMemory(fit, by_degree, 9100), "a device")
    model = hcp.MemoryModel(activation=20, logit=10, gathered=2, limit=9000, head_chunks=2)
    assert hcp.MemoryModel.load(out) == model
    said = capsys.readouterr().out
    assert "2 ranks on a device, float32, p2p" in said
    assert "9,000  bytes of a micro-batch: 80% of a GPU, less what is held" in said
    assert "gathered and attention are divided by up to 2 chunks of heads" in said
    assert "that is 300 rows of a rank at degree 1" in said
    assert "largest error on 4 points of 32 to 256 rows: 0.00%" in said
    provenance = json.loads(out.read_text())["provenance"]
    assert shlex.split(provenance["command"]) == ["hcp", "calibrate", *argv]
    assert (provenance["device"], provenance["model"]["vocab_size"]) == ("a device", 264)
    assert provenance["points"] == [[1, *peak] for peak in peaks]
    assert provenance["points of attention alone"][3] == [2, 1, 9, 0]
    assert provenance["bytes of any micro-batch"] == 100
    config = hcp.Config(400, memory=out)
    assert max(config.plan([500, 20, 150], ranks=2).report().rank_bytes) <= 9000


def test_bytes_that_follow_no_line_are_refused_unless_accepted(tmp_path: Path) -> None:
    out = tmp_path / "memory.json"
    fit = fit_peaks([Peak(n, n * n) for n in (32, 64, 128, 256)], 10**9)
    measured = MeasuredMemory(fit, {}, 10**9)
    args = parse_arguments([*MEASURED, "--ranks", "1", "--out", str(out)])
    with pytest.raises(ValueError, match="expected at most 10%: the bytes of a micro-batch do not"):
        conclude_memory(args, measured, "a device")
    assert not out.exists()
    args.accept_errors = True
    conclude_memory(args, measured, "a device")
    assert hcp.MemoryModel.load(out) == fit.model
