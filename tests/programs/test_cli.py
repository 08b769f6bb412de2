"""The commands of hcp: their output, files and errors."""

from __future__ import annotations

import io
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plan_prices import idle_launch

import hcp
from hcp.attention.kernels import KernelFamily
from hcp.cli import doctor, slack
from hcp.cli.commands import main
from hcp.cli.simulate import next_fit, parse_arguments, simulate
from hcp.exchange.connect import TRANSPORTS
from hcp.planning.plan import Group, lower_bound
from hcp.step import backends
from hcp.tools.check import check_plan
from hcp.tools.drawing import timeline_svg
from hcp.tools.programs.families import FAMILIES
from hcp.tools.timeline import Box, chrome_trace, timeline

ROOT = Path(__file__).resolve().parents[2]
LIMITS = ["--ranks", "8", "--max-tokens-per-rank", "1024"]
Capture = pytest.CaptureFixture[str]


def test_help_lists_the_commands(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    _usage, commands = capsys.readouterr().out.split("\n\n")
    listed = [line.split()[0] for line in commands.splitlines()]
    assert listed == ["demo", "plan", "simulate", "calibrate", "doctor"]


# ---- timeline and trace --------------------------------------------------------------------------


def requests() -> st.SearchStrategy[hcp.Plan]:
    return st.builds(
        lambda lengths, launch, **limits: hcp.plan(
            lengths, ranks=6, max_tokens_per_rank=90, cost=hcp.CostModel(launch=launch), **limits
        ),
        st.lists(st.integers(1, 500), max_size=30),
        st.sampled_from([0, 10**6]),
        sync=st.sampled_from(["step", "micro_batch"]),
        speeds=st.sampled_from([None, [1.0, 0.7, 0.95, 0.93, 1.0, 0.99]]),
    )


def end_of(plan: hcp.Plan, boxes: Sequence[Box], rank: int) -> int:
    """Return the end of a rank's last box, and of the launches without rows that follow it."""
    own = [box for box in boxes if box.first_rank <= rank < box.first_rank + box.degree]
    last = max((box.micro_batch for box in own), default=-1)
    after = len(plan.micro_batches) - 1 - last if plan.sync == "step" else 0
    return max((box.end for box in own), default=0) + after * idle_launch(plan, rank)


@given(requests())
@settings(max_examples=60, deadline=None)
def test_the_timeline_runs_each_sequence_once_and_ends_at_the_makespan(plan: hcp.Plan) -> None:
    boxes = timeline(plan)
    assert (
        max((end_of(plan, boxes, rank) for rank in range(plan.ranks)), default=0) == plan.makespan
    )
    assert sorted(s for box in boxes for s in box.sequences) == list(range(len(plan.lengths)))
    for box in boxes:
        for i, end in enumerate(box.ends):
            first = Group(box.first_rank, box.degree, box.sequences[: i + 1])
            assert end - box.start == plan.group_time(first)
        assert box.end == box.ends[-1]


@given(requests())
@settings(max_examples=60, deadline=None)
def test_no_rank_of_a_timeline_does_two_things_at_once(plan: hcp.Plan) -> None:
    boxes = timeline(plan)
    for rank in range(plan.ranks):
        own = [box for box in boxes if box.first_rank <= rank < box.first_rank + box.degree]
        own.sort(key=lambda box: box.start)
        assert all(a.end <= b.start for a, b in itertools.pairwise(own))
    if plan.sync == "micro_batch":
        for a, b in itertools.combinations(boxes, 2):
            assert a.micro_batch == b.micro_batch or a.end <= b.start


def slices(trace: dict, category: str) -> list[dict]:
    return [event for event in trace["traceEvents"] if event.get("cat") == category]


def test_a_trace_has_a_row_per_rank_and_sequences_inside_their_group() -> None:
    plan = hcp.plan([3000, 10, 900, 900], ranks=4, max_tokens_per_rank=1024)
    trace = chrome_trace(plan)
    for group in slices(trace, "group"):
        inside = [
            event
            for event in slices(trace, "sequence")
            if event["tid"] == group["tid"]
            and group["ts"] <= event["ts"]
            and event["ts"] + event["dur"] <= group["ts"] + group["dur"] * (1 + 1e-9)
        ]
        assert [event["name"] for event in inside] == [
            f"sequence {s}" for s in group["args"]["sequences"]
        ]
        assert sum(event["args"]["tokens"] for event in inside) == group["args"]["tokens"]
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert names == [f"rank {rank}" for rank in range(4)]


def test_a_trace_is_in_microseconds_where_the_cost_has_seconds() -> None:
    cost = hcp.CostModel.from_seconds(pair=1e-9, token=1e-6, launch=0.25)
    plan = hcp.plan([1000] * 5, ranks=2, max_tokens_per_rank=1024, cost=cost)
    ends = [event["ts"] + event["dur"] for event in slices(chrome_trace(plan, cost.unit), "group")]
    assert cost.unit is not None
    assert max(ends) == pytest.approx(plan.makespan * cost.unit * 1e6)
    assert max(ends) > 0.75e6  # three micro-batches of a quarter of a second


# ---- plan ----------------------------------------------------------------------------------------


def test_plan_prints_a_report_and_its_micro_batches(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "lengths").write_text("3000, 10\n20 [900]")
    assert main(["plan", str(tmp_path / "lengths"), *LIMITS]) == 0
    out = capsys.readouterr().out
    made = hcp.plan([3000, 10, 20, 900], ranks=8, max_tokens_per_rank=1024)
    assert "4 sequences, 3,930 tokens, longest 3,000" in out
    assert f"makespan {made.makespan:.4g}, in units of the cost model" in out
    assert f"that is {made.report().ratio:.4f} of the bound {made.bound:.4g}" in out
    assert f"ranks wait {made.report().idle_share:.1%} of it" in out
    assert "micro-batch  groups  ranks  sequences" in out


ROOM = {"max_tokens_per_rank": 1024, "memory": None, "alignment": 1}


def test_plan_says_that_dynamic_cp_pays_over_packed_static_cp(
    tmp_path: Path, capsys: Capture
) -> None:
    """A giant needs 8 ranks; next-fit puts what is short on all of them, one pack at a time."""
    (tmp_path / "lengths").write_text(" ".join(["8000", *["400"] * 63]))
    assert main(["plan", str(tmp_path / "lengths"), *LIMITS]) == 0
    out = capsys.readouterr().out
    lengths = [8000, *[400] * 63]
    made = hcp.plan(lengths, ranks=8, max_tokens_per_rank=1024)
    (gain,) = re.findall(
        r"x ([\d.]+) over packed static CP \(next-fit, degree 8\), by this model", out
    )
    static = hcp.Plan.from_dict(
        made.to_dict()
        | {
            "micro_batches": [
                {"groups": [{"first_rank": 0, "degree": 8, "sequences": held}]}
                for held in next_fit(lengths, 8, ROOM)
            ]
        }
    )
    assert len(static.micro_batches) > 1
    assert float(gain) == pytest.approx(static.makespan / made.makespan, abs=0.005)
    assert float(gain) > 1.03


def test_plan_says_that_static_cp_is_enough_for_equal_lengths(
    tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "lengths").write_text("1000 " * 8)
    assert main(["plan", str(tmp_path / "lengths"), *LIMITS, "--max-degree", "1"]) == 0
    said = "Dynamic CP brings 3% or less here: packed static CP (next-fit, degree 1) is enough."
    assert said in capsys.readouterr().out


def test_plan_says_why_no_packed_static_cp_is_there_to_compare_with(
    tmp_path: Path, capsys: Capture
) -> None:
    """4096 tokens fill 4 of 6 ranks; of 6 ranks the divisors are 1, 2, 3 and 6, which is no power
    of two."""
    (tmp_path / "lengths").write_text("4096 10")
    asked = ["plan", str(tmp_path / "lengths"), "--ranks", "6", "--max-tokens-per-rank", "1024"]
    assert main([*asked, "--degrees", "pow2"]) == 0
    out = capsys.readouterr().out
    assert "packed static CP has no plan within these limits: " in out
    assert "4096 tokens on a rank of 2, the widest power of two that divides 6, (2048) > " in out


def test_plan_says_how_much_of_the_distance_is_proven_slack(
    tmp_path: Path, capsys: Capture
) -> None:
    random = Random(1)
    lengths = [round(1000 * 1.1 * 1.2 ** random.uniform(0, 11)) for _ in range(24)]
    (tmp_path / "lengths").write_text(" ".join(map(str, lengths)))
    cost = hcp.CostModel(exchange=4_096, launch=1_048_576)
    cost.save(tmp_path / "cost.json", {})
    asked = ["plan", str(tmp_path / "lengths"), "--cost", str(tmp_path / "cost.json"), *LIMITS]
    asked += ["--sync", "micro_batch"]
    assert main(asked) == 0
    out = capsys.readouterr().out
    request: dict[str, Any] = {"ranks": 8, "max_tokens_per_rank": 1024, "cost": cost}
    made = hcp.plan(lengths, **request, sync="micro_batch")
    sharper = lower_bound(lengths, **request, sync="micro_batch", effort=2)
    assert sharper > made.bound
    above, slack = made.makespan / made.bound - 1, sharper / made.bound - 1
    assert f"of the {above:.2%} above it, {slack:.2%} are slack of the bound" in out


def test_a_bound_that_takes_long_to_sharpen_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(slack, "QUICK", 10)
    asked = ["plan", "--family", "chatqa2", "--sequences", "9", *LIMITS, "--max-length", "2999"]
    asked += ["--sync", "micro_batch"]
    assert main(asked) == 0
    assert "no plan can save was not looked for (--prove)" in capsys.readouterr().out
    assert main([*asked, "--prove"]) == 0
    assert "slack of the bound" in capsys.readouterr().out


def test_plan_prints_seconds_where_the_unit_is_known(capsys: Capture) -> None:
    assert main(["plan", "--family", "chatqa2", "--sequences", "9", *LIMITS, "--max-length", "999",
                 "--cost", "gpt-1b-h200"]) == 0  # fmt: skip
    assert re.search(r"makespan [\d.]+ ms, predicted by the cost model", capsys.readouterr().out)


def test_a_reader_that_leaves_early_is_no_error() -> None:
    words = [sys.executable, "-m", "hcp", "plan", "--family", "chatqa2", "--max-length", "999"]
    with subprocess.Popen(
        [*words, *LIMITS, "--sequences", "20000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""


def test_plan_takes_lengths_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("3000 10"))
    assert main(["plan", "-", *LIMITS]) == 0
    assert "2 sequences, 3,010 tokens" in capsys.readouterr().out


def check_page(page: str, title: str) -> None:
    assert page.startswith("<!doctype html>")
    assert f"<h1>{title}</h1>" in page
    assert page.count("<svg") == 1


def test_plan_gives_data_pictures_and_a_trace(tmp_path: Path, capsys: Capture) -> None:
    trace, svg, page = (tmp_path / name for name in ("trace.json", "plan.svg", "plan.html"))
    argv = ["--family", "mock", "--sequences", "40", "--max-length", "700", "--json"]
    outputs = ["--trace", str(trace), "--svg", str(svg), "--html", str(page)]
    assert main(["plan", *argv, *outputs, *LIMITS]) == 0
    plan = hcp.Plan.from_dict(json.loads(capsys.readouterr().out))
    check_plan(plan)
    assert len(plan.lengths) == 40
    assert max(plan.lengths) == 700
    assert json.loads(trace.read_text()) == chrome_trace(plan)
    assert svg.read_text() == timeline_svg({"hcp": plan})
    check_page(page.read_text(), "A plan of 40 sequences for 8 ranks")


def test_plan_takes_costs_by_name_and_from_a_file(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "lengths").write_text("3000 10 20 900")
    hcp.CostModel.preset("flexsp-7b").save(tmp_path / "cost.json", {})
    outs = []
    for cost in ("flexsp-7b", str(tmp_path / "cost.json")):
        assert main(["plan", str(tmp_path / "lengths"), *LIMITS, "--json", "--cost", cost]) == 0
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1]
    assert json.loads(outs[0])["cost"]["launch"] == hcp.CostModel.preset("flexsp-7b").launch


def test_plan_knows_pipelines(capsys: Capture) -> None:
    stages = ["--pipeline-stages", "2", "--virtual-stages", "2", "--micro-batch-group", "3"]
    family = ["--family", "mock", "--sequences", "40", "--max-length", "700"]
    assert main(["plan", *family, *LIMITS, *stages, "--json"]) == 0
    plan = hcp.Plan.from_dict(json.loads(capsys.readouterr().out))
    assert (plan.core.pipeline_stages, plan.core.virtual_stages) == (2, 2)
    assert len(plan.micro_batches) % 3 == 0


@pytest.mark.parametrize("cost", ["flexsp-8b", "{file}"])
def test_plan_refuses_costs_that_it_cannot_read(cost: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "cost.json").write_text("{}")
    with pytest.raises(SystemExit) as error:
        main(["plan", *LIMITS, "--cost", cost.format(file=tmp_path / "cost.json")])
    assert error.value.code == 2
    message = capsys.readouterr().err
    assert "flexsp-7b" in message if cost == "flexsp-8b" else "format is None" in message


def test_plan_says_why_there_is_none(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "lengths").write_text("9000")
    assert main(["plan", str(tmp_path / "lengths"), *LIMITS]) == 1
    assert "hcp plan: error: lengths[0] is 9000: the fullest of 8 ranks" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "none"), *LIMITS]) == 1
    assert "No such file" in capsys.readouterr().err
    (tmp_path / "lengths").write_text("9 nine")
    assert main(["plan", str(tmp_path / "lengths"), *LIMITS]) == 1
    assert "'nine', expected lengths in tokens" in capsys.readouterr().err


# ---- simulate ------------------------------------------------------------------------------------


SIMULATE = ["simulate", "--family", "mock", "--sequences", "60", "--batches", "3", *LIMITS]


@pytest.fixture
def equal(tmp_path: Path) -> list[str]:
    """Options for 3 batches of 60 sequences, one of which fills a rank."""
    file = tmp_path / "equal.json"
    file.write_text(json.dumps([1024] * 180))
    return ["simulate", "--lengths", str(file), "--sequences", "60", "--batches", "3", *LIMITS]


def simulated(capsys: Capture, *argv: str, of: Sequence[str] = SIMULATE) -> dict[str, dict]:
    assert main([*of, "--json", *argv]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["simulated"] is True
    return data["results"]


def test_simulate_says_that_it_is_simulated(capsys: Capture) -> None:
    assert main(SIMULATE) == 0
    out = capsys.readouterr().out
    assert out.startswith("SIMULATED: 3 batches of 60 mock sequences")
    assert "nothing here was measured but the planning time" in out
    rows = [line for line in out.splitlines() if " x " in line]
    assert [line[:14].strip() for line in rows] == ["static CP", "packing only", "hcp"]


@pytest.mark.parametrize(("degrees", "degree"), [("any", 3), ("pow2", 4)])
def test_static_cp_has_a_degree_that_plans_may_have(
    degrees: str, degree: int, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "lengths").write_text("3000 10")
    argv = ["simulate", "--lengths", str(tmp_path / "lengths"), "--ranks", "12", "--sequences", "2"]
    argv += ["--batches", "1", "--max-tokens-per-rank", "1024", "--degrees", degrees]
    assert main(argv) == 0
    assert f"static degree {degree}" in capsys.readouterr().out


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_hcp_is_never_behind_in_its_own_model(sync: str, capsys: Capture) -> None:
    results = simulated(capsys, "--sync", sync)
    assert results["hcp"]["speedup"] >= results["packing only"]["speedup"] >= 1
    assert results["static CP"]["speedup"] == 1
    assert results["hcp"]["of_bound"] >= 1
    assert results["hcp"]["slack"] == results["static CP"]["slack"]
    assert 0 <= results["hcp"]["slack"] <= results["hcp"]["of_bound"] - 1
    assert results["static CP"]["planning_ms"] is None


def test_tokens_per_second_are_tokens_over_the_makespans_of_the_cost_model(
    equal: list[str], capsys: Capture
) -> None:
    """All prices but the launch are next to nothing, so micro-batches can be counted."""
    rates = ["--tflops", "1e5", "--attention-tflops", "1e5", "--gbps", "1e5", "--launch-ms", "1e4"]
    static = simulated(capsys, *rates, of=equal)["static CP"]
    assert static["micro_batches"] == 8  # 60 sequences on 8 ranks of degree 1
    assert static["tokens_per_second"] == pytest.approx(180 * 1024 / (3 * 8 * 10), rel=1e-3)
    assert static["gigabytes"] == 0


def test_static_cp_is_packed_by_next_fit(tmp_path: Path) -> None:
    """On 2 ranks of degree 2, each of which holds 512 tokens."""
    file = tmp_path / "lengths.json"
    file.write_text("[300, 500, 700, 400, 600, 100]")
    options = f"--lengths {file} --batches 1 --ranks 2 --max-tokens-per-rank 512"
    plan = simulate(parse_arguments(options.split())).plans[0]["static CP"]
    expected: list[list[int]] = []
    for length in plan.lengths:
        if not expected or sum(expected[-1]) + length > 1024:
            expected.append([])
        expected[-1].append(length)
    groups = [group for groups in plan.micro_batches for group in groups]
    assert [[plan.lengths[s] for s in group.sequences] for group in groups] == expected
    assert {group.degree for group in groups} == {2}


@pytest.mark.parametrize(("lengths", "says"), [
    ([1024] * 64, "3% or less here: packed static CP (next-fit, degree 1) is enough."),
    ([6000] + [100] * 63, " 1.23 times as fast as packed static CP (next-fit, degree 8), by this "
     "model; packing alone, at that degree, 1.00 times."),
])  # fmt: skip
def test_one_sentence_says_whether_dynamic_cp_pays(
    lengths: list[int], says: str, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps(lengths))
    argv = ["simulate", "--lengths", str(file), "--sequences", "64", "--batches", "1", *LIMITS]
    assert main(argv) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(says)


def test_bytes_are_keys_and_values_of_all_layers_three_times(capsys: Capture) -> None:
    lengths = ["--sequences", "1", "--batches", "1", "--max-length", "128", "--seed", "5"]
    forced = [
        "--min-degree",
        "4",
        "--max-degree",
        "4",
        "--ranks-per-node",
        "2",
        "--num-layers",
        "10",
    ]
    results = simulated(capsys, *lengths, *forced)
    # 128 tokens on 4 ranks of 2 nodes: each rank receives 96, and a token enters the
    # node that does not hold it.
    token = 3 * 10 * 2 * 8 * 128 * 2
    degree = 4
    assert results["hcp"]["gigabytes"] == pytest.approx(degree * 96 * token / 1e9)
    assert results["hcp"]["far_gigabytes"] == pytest.approx(128 * token / 1e9)


def test_a_pipeline_of_equal_micro_batches_takes_what_1f1b_takes(
    equal: list[str], capsys: Capture
) -> None:
    """Eight equal micro-batches in four stages: (8 + 3) / 8 of the time of a stage."""
    rates = ["--tflops", "1e5", "--attention-tflops", "1e5", "--gbps", "1e5", "--launch-ms", "1e4"]
    argv = ["--sync", "micro_batch", *rates]
    plain = simulated(capsys, *argv, of=equal)["static CP"]
    piped = simulated(capsys, *argv, "--pipeline-stages", "4", of=equal)["static CP"]
    assert plain["bubble"] == 0
    assert piped["bubble"] == pytest.approx(3 / 11, rel=1e-2)
    ratio = piped["tokens_per_second"] / plain["tokens_per_second"]
    assert ratio == pytest.approx(4 * 8 / 11, rel=1e-2)


def test_chunks_shorten_the_bubble_and_keep_the_multiple(capsys: Capture) -> None:
    """Eight equal micro-batches in four stages of two chunks: 3 / 2 of a stage's time more."""
    rates = ["--tflops", "1e5", "--attention-tflops", "1e5", "--gbps", "1e5", "--launch-ms", "1e4"]
    argv = ["--sync", "micro_batch", "--max-length", "1024", *rates, "--pipeline-stages", "4"]
    static = simulated(capsys, *argv, "--virtual-stages", "2")["static CP"]
    assert static["bubble"] == pytest.approx(1.5 / 9.5, rel=1e-2)
    results = simulated(capsys, *argv, "--virtual-stages", "2", "--micro-batch-group", "6")
    assert all(result["micro_batches"] % 6 == 0 for result in results.values())


def test_slower_ranks_give_fewer_tokens_and_hcp_knows_which(capsys: Capture) -> None:
    plain, spread = simulated(capsys), simulated(capsys, "--speed-spread", "0.3")
    for name, result in spread.items():
        assert result["tokens_per_second"] < plain[name]["tokens_per_second"]
    assert spread["hcp"]["speedup"] > plain["hcp"]["speedup"]


def test_a_slow_host_bounds_every_micro_batch(equal: list[str], capsys: Capture) -> None:
    """All prices are next to nothing, so that steps take what their hosts take."""
    rates = ["--tflops", "1e5", "--attention-tflops", "1e5", "--gbps", "1e5", "--launch-ms", "0"]
    argv = [*rates, "--host-ms", "1e4"]
    static = simulated(capsys, *argv, of=equal)["static CP"]
    assert static["micro_batches"] == 8
    faster = simulated(capsys, *argv[:-1], "0", of=equal)["static CP"]
    assert faster["tokens_per_second"] > 100 * static["tokens_per_second"]
    assert faster["idle_share"] < 1
    assert static["idle_share"] > 0.99


def test_plans_keep_to_the_memory_or_are_refused(capsys: Capture) -> None:
    argv = [*SIMULATE, "--max-length", "1024", "--activation-bytes", "1000", "--memory-bytes"]
    assert main([*argv, "1024000"]) == 0
    assert main([*argv, "1023000"]) == 1
    assert "1024000 bytes, expected <= 1023000 (memory.limit)" in capsys.readouterr().err


def test_simulate_draws_the_first_batch(tmp_path: Path, capsys: Capture) -> None:
    svg, page = tmp_path / "batch.svg", tmp_path / "batch.html"
    results = simulated(capsys, "--svg", str(svg), "--html", str(page))
    for name in results:
        assert f"{name}: " in svg.read_text()
    assert " ms</text>" in svg.read_text()
    check_page(page.read_text(), "SIMULATED: the first batch")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tflops", "0"], "tflops is 0.0, expected > 0"),
        (["--host-ms", "-1"], "host_ms is -1.0, expected >= 0"),
        (["--memory-bytes", "0"], "memory_bytes is 0, expected an integer >= 1"),
        (["--gbps", "nan"], "gbps is nan, expected > 0"),
        (["--speed-spread", "1"], "speed_spread is 1.0, expected 0 <= share < 1"),
        (["--pipeline-stages", "5"], "num_layers (32) % pipeline_stages (5) == 2, expected 0"),
        (
            ["--pipeline-stages", "4", "--virtual-stages", "3"],
            "* virtual_stages (3) == 8, expected",
        ),
        (["--batches", "0"], "batches is 0, expected an integer >= 1"),
        (["--ranks", "0"], "ranks is 0, expected an integer >= 1"),
        (["--num-attention-heads", "7"], "hidden_size (4096) % num_attention_heads (7) == 1"),
        (
            ["--max-tokens-per-rank", "100"],
            "rows of 8192 tokens on a rank of 8 (1024) > max_tokens_per_rank (100): raise it "
            "(--max-tokens-per-rank), use more ranks (--ranks), or shorten the sequences (--max-",
        ),
    ],
)
def test_simulate_says_what_it_cannot(argv: list[str], message: str, capsys: Capture) -> None:
    assert main([*SIMULATE, "--seed", "2", *argv]) == 1
    assert message in capsys.readouterr().err


def test_simulate_needs_costs_in_seconds(tmp_path: Path, capsys: Capture) -> None:
    hcp.CostModel().save(tmp_path / "cost.json", {})
    assert main([*SIMULATE, "--cost", str(tmp_path / "cost.json")]) == 1
    assert "the cost file has no unit_seconds" in capsys.readouterr().err


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_draws_the_same_lengths_from_the_same_seed(name: str) -> None:
    draws = [[FAMILIES[name].draw(random) for _ in range(200)] for random in (Random(3), Random(3))]
    assert draws[0] == draws[1]
    assert min(draws[0]) >= 1
    assert len(set(draws[0])) > 50


def test_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hcp {hcp.__version__}\n"


# ---- doctor --------------------------------------------------------------------------------------


def examined(capsys: Capture, *argv: str) -> dict[tuple[str, str], dict]:
    main(["doctor", "--json", *argv])
    return {(f["part"], f["name"]): f for f in json.loads(capsys.readouterr().out)}


def test_doctor_says_what_works_here_and_why_the_rest_does_not(capsys: Capture) -> None:
    assert main(["doctor"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"hcp {hcp.__version__} works here on CPUs")
    assert [line for line in lines if not line.startswith(" ")] == [
        *("versions", "devices", "links", "kernels", "attention", "transports", "trial")
    ]
    assert all(line[2:4] in ("ok", "no", "  ") for line in lines if line[0] == " ")
    assert any(f"torch                       {torch.__version__}" in line for line in lines)
    kernels = lines[lines.index("kernels") + 1 : lines.index("attention")]
    assert len(kernels) <= 4, "as many lines as there are findings, and not as kernels"


CPU = doctor.Diagnosis("devices", "CPU", "x86_64, 2 cores for this process", True)
DRIVEN = [
    doctor.Diagnosis("devices", f"GPU {i}", "NVIDIA H200, 143771 MiB, driver 580", True)
    for i in range(2)
]


@pytest.mark.parametrize(
    ("findings", "says"),
    [
        (
            [CPU, doctor.Diagnosis("devices", "GPU", "no driver is installed here", False)],
            "works here on CPUs. It uses no GPU: no driver is installed here",
        ),
        (
            [CPU, *DRIVEN, doctor.Diagnosis("devices", "torch sees", "0 of 2 GPUs", False)],
            "works here on CPUs. It uses no GPU: 0 of 2 GPUs",
        ),
        (
            [CPU, *DRIVEN, doctor.Diagnosis("devices", "torch sees", "2 of 2 GPUs", True)],
            "works here on CPUs; --probe also tries each GPU. torch sees 2 of 2 GPUs (NVIDIA H200)",
        ),
        (
            [
                *(CPU, *DRIVEN, doctor.Diagnosis("devices", "torch sees", "2 of 2 GPUs", True)),
                doctor.Diagnosis("trial", "GPU 0, float32", "3 ranks equal one", True),
            ],
            "works here on CPUs and on each GPU. torch sees 2 of 2 GPUs (NVIDIA H200)",
        ),
        (
            [CPU, doctor.Diagnosis("trial", "CPU, float64", "3 ranks differ from one", False)],
            "does not work here. CPU, float64: 3 ranks differ from one",
        ),
        (
            [doctor.Diagnosis("versions", "torch", doctor.NO_TORCH, False)],
            f"does not work here. torch: {doctor.NO_TORCH}",
        ),
    ],
)
def test_doctor_begins_with_one_line(findings: list[doctor.Diagnosis], says: str) -> None:
    assert doctor.summary(findings) == f"hcp {hcp.__version__} {says}"


def test_doctor_names_the_kernels_that_differ_from_the_rest() -> None:
    built = [doctor.Diagnosis("kernels", f"{name}, CPU", "built in", True) for name in "abcd"]
    lacking = doctor.Diagnosis("kernels", "between, CPU", "there is none", None)
    assert [*doctor.folded([*built, lacking])] == [
        doctor.Diagnosis("kernels", "CPU", "4 kernels: built in", True),
        doctor.Diagnosis("kernels", "CPU", "between: there is none", None),
    ]


def test_doctor_names_another_project_that_overwrites_it(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "installed", lambda name: "0.1.3" if name == "hcp" else None)
    (found,) = doctor.namesake("versions")
    assert found.usable is False
    assert "0.1.3" in found.says
    assert "pip uninstall hcp hcp-torch" in found.says
    monkeypatch.setattr(doctor, "installed", lambda name: None)
    assert not list(doctor.namesake("versions"))


def test_doctor_makes_no_cuda_context_and_no_process_group(capsys: Capture) -> None:
    before = torch.cuda.is_initialized()
    main(["doctor"])
    assert torch.cuda.is_initialized() == before
    assert not dist.is_initialized()


def test_doctor_tries_every_type_on_the_cpu(capsys: Capture) -> None:
    findings = examined(capsys)
    for dtype in doctor.DTYPES:
        assert findings["trial", f"CPU, {dtype}"]["usable"] is True
        assert "3 ranks in loopback equal one" in findings["trial", f"CPU, {dtype}"]["says"]
    assert findings["trial", "GPUs"]["says"].startswith("not tried: --probe does")


def test_doctor_reports_a_trial_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(doctor, "_difference", lambda *arguments: 1e-3)
    assert main(["doctor"]) == 1
    assert "no  CPU, float64" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "_difference", lambda *arguments: float("nan"))
    assert main(["doctor"]) == 1
    assert "ArithmeticError: 3 ranks differ from one by nan" in capsys.readouterr().out


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA")
def test_doctor_says_that_torch_has_no_cuda(capsys: Capture) -> None:
    findings = examined(capsys, "--probe")
    for part, name in [
        *(("kernels", f"{name}, CUDA") for name in doctor.operators()),
        ("attention", "FlashAttention-2 of torch"),
        ("attention", "cudnn"),
    ]:
        assert findings[part, name]["usable"] is False
        assert findings[part, name]["says"]
    # Without one, --probe finds nothing wrong.
    assert findings["trial", "GPUs"]["usable"] is None
    assert findings["trial", "GPUs"]["says"] == "not tried: torch sees none"


def test_doctor_lists_every_kernel_backend_and_transport(capsys: Capture) -> None:
    listed = examined(capsys)
    schemas = (ROOT / "csrc/torch/ops.cpp").read_text()
    kernels = re.findall(r'm\.def\(\s*"(\w+)\(', schemas)
    assert {"rotate", "reduce_rotated", "stage", "read", "nccl_exchange"} <= set(kernels)
    for device in ("CPU", "CUDA"):
        assert {("kernels", f"{name}, {device}") for name in kernels} <= set(listed)
    assert {("attention", name) for name in {*backends.BACKENDS} - {"torch"}} <= set(listed)
    assert {("attention", name) for name, _ in doctor.TORCH_KERNELS.values()} <= set(listed)
    assert {name for part, name in listed if part == "transports"} >= (
        {*TRANSPORTS} - {"auto", "torch"} | {"torch over Gloo", "torch over NCCL", "loopback"}
    )


def test_a_backend_that_is_new_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        backends.BACKENDS, "new", backends.HandlerBackend(Mock(), "no-such-package")
    )
    found = {finding.name: finding for finding in doctor.attention()}
    assert found["new"].says == "the package no-such-package is not installed"


GPU = """case "$1" in --query-gpu=compute_cap) echo 8.0 ;; esac"""


@pytest.mark.parametrize(
    ("gpus", "capability", "says"),
    [
        (0, "9.0", "torch sees no GPU"),
        (1, "7.5", "compute capability 7.5, expected 8.0 or higher"),
        (2, "7.5 9.0", None),
        (1, "[N/A]", None),
    ],
)
def test_doctor_says_whether_a_gpu_runs_the_kernels(
    gpus: int,
    capability: str,
    says: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_nvidia_smi(tmp_path, monkeypatch, f"printf '%s\\n' {capability}")
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert doctor.lacks_gpu((8, 0)) == says
    if says is not None:
        cuda = [finding for finding in doctor.kernels() if finding.name.endswith("CUDA")]
        assert all(finding.usable is False for finding in cuda)


@pytest.mark.parametrize(
    ("name", "version", "usable", "says"),
    [
        ("cudnn", None, False, "the package nvidia-cudnn-frontend is not installed"),
        ("cudnn", "1.32.0", False, "compute capability 8.0, expected 9.0 or higher, up to 10.x"),
        ("flash_attn", None, False, "the package flash-attn is not installed"),
        ("flash_attn", "2.8.3", True, "flash-attn 2.8.3, not imported"),
        ("flash_attn_3", "3.0", False, "compute capability 8.0, expected 9.0 or higher, up to 9.x"),
        ("flash_attn_3", None, False, "the package flash-attn-3 is not installed"),
        ("flash_attn_4", None, False, "the package flash-attn-4 is not installed"),
        ("flash_attn_4", "4.0", False, "compute capability 8.0, expected 9.0 or higher"),
        ("transformer_engine", "2.9", True, "transformer-engine 2.9, not imported"),
    ],
)
def test_doctor_says_which_backends_a_gpu_has(
    name: str,
    version: str | None,
    usable: bool,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_nvidia_smi(tmp_path, monkeypatch, 'case "$1" in --query-gpu=compute_cap) echo 8.0 ;; esac')
    monkeypatch.setattr(doctor, "installed", lambda package: version)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    finding = doctor.of_backend("attention", name)
    assert finding.usable is usable
    assert finding.says.startswith(says)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert doctor.of_backend("attention", name).usable is False


CHOICE = {
    "8.0": [
        "on compute capability 8.0: torch. Not used: cudnn: it needs compute capability 9.0; "
        "flash_attn: flash-attn is not installed; flash_attn_4: it needs compute capability 9.0; "
        "flash_attn_3: it needs compute capability 9.0",
        "install flash-attn: it has torch's kernels with soft-capping",
    ],
    "9.0": [
        "on compute capability 9.0: torch. Not used: cudnn: nvidia-cudnn-frontend is not "
        "installed; flash_attn: flash-attn is not installed; flash_attn_4: flash-attn-4 is not "
        "installed; flash_attn_3: flash-attn-3 is not installed",
        "install flash-attn-4: it is the fastest for long sequences",
        "install nvidia-cudnn-frontend: it is the fastest for sequences of some hundred tokens",
    ],
    "9.0 9.0, flash-attn-4": [
        "on compute capability 9.0: torch, flash_attn_4 (flash-attn-4 4.0). Not used: cudnn: "
        "nvidia-cudnn-frontend is not installed; flash_attn: flash-attn is not installed; "
        "flash_attn_3: flash-attn-3 is not installed",
        "install nvidia-cudnn-frontend: it is the fastest for sequences of some hundred tokens",
    ],
    "12.0": [
        "on compute capability 12.0: torch. Not used: cudnn: it has kernels up to compute "
        "capability 10.x; flash_attn: flash-attn is not installed; flash_attn_4: flash-attn-4 is "
        "not installed; flash_attn_3: it has kernels up to compute capability 9.x",
        "install flash-attn-4: it is the fastest for long sequences",
    ],
    "[N/A]": ["it goes by the GPU, which the driver does not name"],
}


@pytest.mark.parametrize("gpus", CHOICE)
def test_doctor_says_what_auto_chooses_and_what_to_install(
    gpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capabilities, _, package = gpus.partition(", ")
    fake_nvidia_smi(tmp_path, monkeypatch, f"printf '%s\\n' {capabilities}")
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    version = property(lambda family: "4.0" if family.package == package else None)
    monkeypatch.setattr(KernelFamily, "version", version)
    found = list(doctor.of_auto("attention"))
    assert len(found) == len(CHOICE[gpus])
    for finding, says in zip(found, CHOICE[gpus], strict=True):
        assert finding.says.startswith(says)
        assert finding.usable is not False
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    (none,) = doctor.of_auto("attention")
    assert none == ("attention", "auto", "what torch does: torch sees no GPU", True)


@pytest.mark.parametrize(
    ("gpus", "built", "nccl", "peer"),
    [
        (0, True, (False, "torch sees no GPU"), (False, "torch sees no GPU")),
        (2, False, (False, "nvcc was missing"), (False, "nvcc was missing")),
        (1, True, (True, "NCCL 2.28.9"), (False, "wants two")),
        (2, True, (True, "NCCL 2.28.9"), (None, "when process groups are built")),
    ],
)
def test_doctor_says_which_transports_gpus_have(
    gpus: int,
    built: bool,
    nccl: tuple[bool | None, str],
    peer: tuple[bool | None, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 28, 9))
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("hcp.exchange.connect.has_kernels", lambda: built)
    found = {finding.name: finding for finding in doctor.transports()}
    assert set(TRANSPORTS) - {"auto", "torch"} <= set(found)
    for name, (usable, says) in (("nccl", nccl), ("peer", peer)):
        assert found[name].usable is usable
        assert says in found[name].says


def fake_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\n" + script)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


SMI = """case "$1" in
--query-gpu=*) printf '0, NVIDIA H200, 143771 MiB, 580.1, 9.0\\n1, NVIDIA H200, 143771 MiB, 580.1, 9.0\\n' ;;
topo) printf '\\tGPU0\\tGPU1\\tGPU2\\tCPU Affinity\\nGPU0\\t X \\tNV18\\tSYS\\t0-9\\nGPU1\\tNV18\\t X \\tSYS\\t0-9\\nGPU2\\tSYS\\tSYS\\t X \\t0-9\\n\\nLegend:\\n\\n  X = Self\\n' ;;
esac
"""  # noqa: E501


def test_doctor_reads_gpus_and_links_from_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    fake_nvidia_smi(tmp_path, monkeypatch, SMI)
    findings = examined(capsys)
    says = "NVIDIA H200, 143771 MiB, driver 580.1, compute capability 9.0"
    assert findings["devices", "GPU 1"]["says"] == says
    assert findings["links", "NV18"]["says"] == "NVLink: GPUs 0-1"
    assert findings["links", "SYS"]["says"] == "across sockets: GPUs 0-2, 1-2"


def test_doctor_says_why_the_driver_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    fake_nvidia_smi(tmp_path, monkeypatch, "echo 'no devices were found'; exit 6")
    findings = examined(capsys)
    says = "nvidia-smi failed with exit code 6: no devices were found"
    assert findings["devices", "GPU"] == {
        "part": "devices", "name": "GPU", "says": says, "usable": False
    }  # fmt: skip
