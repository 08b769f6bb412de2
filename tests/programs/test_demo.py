"""The demo from its command line, on real ranks and text: its files and numbers."""

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_module

import hcp
from hcp._digest import digest_of
from hcp.demo import checkpoint
from hcp.demo.demo_arguments import parse_args
from hcp.demo.demo_report import DemoStep, Run, table
from hcp.demo.gpt_model import GPTModel
from hcp.demo.training import learning_rates
from hcp.step.config import Config
from hcp.tools.programs import text_data
from hcp.tools.programs.run_records import Evaluation, loss_difference

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    *("--num-layers", "2", "--hidden-size", "32", "--ffn-hidden-size", "64"),
    *("--max-length", "200", "--max-seqlen-per-dp-cp-rank", "80"),
    *("--train-iters", "3", "--global-batch-size", "7"),
)


def command(*argv, module="hcp"):
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    return subprocess.run(
        [sys.executable, "-m", *module.split(), *argv],
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def demo(*argv):
    return command("demo", *argv)


def demo_on(ranks, *argv, folder):
    """Run the demo on ranks that another launcher has started."""
    done = run_module("hcp", "demo", "--ranks", str(ranks), *argv, ranks=ranks, folder=folder)
    return SimpleNamespace(returncode=done.code, stdout=done.out, stderr=done.err)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder of 60 texts of 1 to 500 bytes, most of them short."""
    folder = tmp_path_factory.mktemp("texts")
    for i in range(60):
        size = 500 - i if i % 10 == 0 else 1 + i * 37 % 60
        (folder / f"{i:02}.txt").write_text(
            ("to be or not to be, that is the question. " * 12)[:size]
        )
    return str(folder)


def run_of(result, folder):
    assert result.returncode == 0, result.stderr + result.stdout
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["loss.png", "metrics.jsonl", "plan.svg", "summary.json"]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "plan.svg").read_bytes().startswith(b"<svg ")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return json.loads((folder / "summary.json").read_text()), lines


def steps_of(lines):
    """The training steps without what is measured."""
    measured = ("seconds", "tokens_per_second", "plan_seconds", "plan_waited")
    return [{k: v for k, v in line.items() if k not in measured} for line in lines]


# ---- End to end ----


@pytest.fixture(scope="module")
def exact(texts, tmp_path_factory):
    """A run on four ranks in float64: its result, folder, summary and metrics."""
    folder = tmp_path_factory.mktemp("run")
    result = demo(
        *["--ranks", "4", "--data", texts, "--run-dir", str(folder), "--dtype", "float64", *TINY]
    )
    return result, folder, *run_of(result, folder)


def test_dynamic_equals_static_and_nothing_is_padded(exact):
    _, _, summary, lines = exact
    assert summary["largest_loss_difference"] <= 1e-9
    assert [run["padding_rows"] for run in summary["runs"].values()] == [0, 0]
    steps = [line for line in lines if line["kind"] == "train"]
    assert [line["run"] for line in steps] == ["static_cp", "dynamic_cp"] * 3
    assert [line["iteration"] for line in steps] == [1, 1, 2, 2, 3, 3]
    assert all(line["sequences"] == 7 for line in steps)
    assert all(line["loss_tokens"] == line["tokens"] - 7 for line in steps)


def test_every_document_is_evaluated_once_in_both_layouts(exact):
    result, _, summary, _ = exact
    for run in summary["runs"].values():
        assert run["evaluation_difference"] <= 1e-6
        trained, other = run["evaluations"][-1]
        assert (trained["cp"], trained["dp"]) == (4, 1)
        assert (other["cp"], other["dp"]) == (1, 4)
        assert trained["documents"] == other["documents"] == 37
        assert trained["tokens"] == other["tokens"]
    assert "the layouts agree to 1e-06" in result.stdout


def test_it_says_where_its_results_are_and_nothing_that_alarms(exact):
    result, folder, _, _ = exact
    assert f"{folder}: metrics.jsonl, summary.json, loss.png, plan.svg" in result.stdout
    for alarm in ("Traceback", "Warning", "OMP_NUM_THREADS"):
        assert alarm not in result.stderr


def saved_in(folder):
    return torch.load(io.BytesIO(checkpoint.read(folder)), weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "ddp"), [(2, ()), (3, ("--ddp",))], ids=["own buffer", "ddp on three ranks"]
)
def test_a_run_that_was_stopped_and_loaded_is_bit_for_bit_the_one_that_was_not(
    ranks, ddp, texts, tmp_path
):
    """Of three ranks the order in which they are summed counts, which differs from DDP's first
    buckets to its later ones."""
    options = ["--data", texts, "--dtype", "float64", *TINY, "--eval-interval", "2", *ddp]
    options += ["--train-iters", "4", "--lr-warmup-iters", "1", "--lr-decay-style", "cosine"]
    options += ["--max-seqlen-per-dp-cp-rank", "100"]
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    once = ["--save", str(whole), "--run-dir", str(whole / "run")]
    result = demo_on(ranks, *options, *once, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    again = ["--save", str(pieces), "--run-dir", str(pieces / "run")]
    result = demo_on(ranks, *options, *again, "--exit-duration-in-mins", "1e-9", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert f"stopped after step 1 of 4: go on with --load {pieces}" in result.stdout
    assert not (pieces / "run/summary.json").exists()
    result = demo_on(ranks, *options, *again, "--load", str(pieces), folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "go on with" not in result.stdout
    ends = [saved_in(folder) for folder in (whole, pieces)]
    for name in ("static_cp", "dynamic_cp"):
        one, other = ({**end["runs"][name], "run": None} for end in ends)
        assert digest_of(one) == digest_of(other)
    once, again = (
        [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        for folder in (whole, pieces)
    )
    assert steps_of(once) == steps_of(again)
    assert len(once) == 2 * (4 + 2 * 2)
    first, second = (
        json.loads((folder / "run/summary.json").read_text())["runs"] for folder in (whole, pieces)
    )
    for name in first:
        assert first[name]["evaluations"] == second[name]["evaluations"]


@pytest.mark.slow
def test_a_run_with_other_arguments_than_its_checkpoint_is_refused(texts, tmp_path):
    options = ["--data", texts, *TINY, "--no-compare", "--train-iters", "1"]
    options += ["--max-seqlen-per-dp-cp-rank", "200"]
    saved, run = str(tmp_path / "saved"), ["--run-dir", str(tmp_path / "run")]
    metrics = tmp_path / "run/metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text("of the run before")
    result = demo_on(1, *options, *run, "--load", saved, folder=tmp_path)
    assert result.returncode == 2
    assert f"--load {saved}: no checkpoint.pt in it, expected one that --save" in result.stderr
    assert metrics.read_text() == "of the run before"
    result = demo_on(1, *options, *run, "--save", str(metrics), folder=tmp_path)
    assert result.returncode == 2
    assert f"--save {metrics}: it cannot be a folder: File exists" in result.stderr
    assert metrics.read_text() == "of the run before"
    result = demo_on(1, *options, *run, "--save", saved, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    again = [*options, *run, "--load", saved]
    for other, message in [
        (["--lr", "0.5"], "it was saved with lr 0.002, expected 0.5"),
        (["--window-size", "64,0"], "it was saved with options "),
        (["--ddp"], "it was saved with ddp False, expected True"),
        (["--compare"], "it has the runs ['dynamic_cp'], expected ['dynamic_cp', 'static_cp']"),
    ]:
        result = demo_on(1, *again, *other, folder=tmp_path)
        assert result.returncode == 2
        assert message in result.stderr
    result = demo_on(1, *again, folder=tmp_path)  # nothing is left to train
    assert result.returncode == 0, result.stderr
    assert "loss, last step" in result.stdout


@pytest.mark.slow
def test_ddp_on_another_number_of_ranks_makes_the_same_updates(exact, texts, tmp_path):
    result = demo_on(
        3,
        *["--ddp", "--data", texts, "--run-dir", str(tmp_path), *TINY],
        *["--cp-comm-type", "auto", "a2a+p2p", "--hierarchical-context-parallel-sizes", "3", "2"],
        *["--eval-interval", "2", "--eval-context-parallel-size", "auto"],
        folder=tmp_path,
    )
    summary, lines = run_of(result, tmp_path)
    for scheduler, run in summary["runs"].items():
        assert run["last_loss"] == pytest.approx(exact[2]["runs"][scheduler]["last_loss"], abs=1e-4)
        assert run["evaluation_difference"] <= 1e-6
    assert summary["largest_loss_difference"] <= 1e-4
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    assert [e["iteration"] for e in evaluations] == [2] * 4 + [3] * 4
    chosen = re.search(r"^eval layout: cp (\d)", result.stdout, re.MULTILINE)[1]
    assert {e["cp"] for e in evaluations if e["layout"] == "eval"} == {int(chosen)}
    assert re.findall(r"^  cp (\d): time", result.stdout, re.MULTILINE) == ["1", "3"]


@pytest.mark.slow
def test_one_rank_in_bfloat16_without_comparison_keeps_to_the_memory(texts, tmp_path):
    memory = tmp_path / "memory.json"
    hcp.MemoryModel(activation=10, limit=2500).save(memory, {})
    result = demo_on(
        1,
        *["--data", texts, "--run-dir", str(tmp_path / "a" / "b"), *TINY],
        *["--max-seqlen-per-dp-cp-rank", "300", "--dtype", "bfloat16", "--no-compare"],
        *["--untie-embeddings-and-output-weights", "--eval-documents", "5", "--eval-iters", "1"],
        *["--memory", str(memory)],
        folder=tmp_path,
    )
    summary, lines = run_of(result, tmp_path / "a" / "b")
    assert list(summary["runs"]) == ["dynamic_cp"]
    steps = [line for line in lines if line["kind"] == "train"]
    assert len(steps) == 3
    assert all(step["micro_batches"] >= step["tokens"] / 250 for step in steps)
    assert summary["runs"]["dynamic_cp"]["evaluations"][0][0]["documents"] == 5


@pytest.mark.slow
def test_torchrun_starts_it_too_and_a_global_batch_may_be_smaller_than_the_ranks(texts, tmp_path):
    result = command(
        *["--standalone", "--nproc-per-node", "2", "-m", "hcp.demo", "--data", texts, *TINY],
        *["--run-dir", str(tmp_path), "--global-batch-size", "1"],
        *["--max-seqlen-per-dp-cp-rank", "100"],
        module="torch.distributed.run",
    )
    summary, _ = run_of(result, tmp_path)
    assert summary["largest_loss_difference"] <= 1e-4


# ---- What is refused ----


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ranks", "0"], "ranks is 0, expected an integer >= 1"),
        (["--max-length", "1"], "max_length is 1, expected >= 2"),
        (["--data", "no/such/place"], "--data no/such/place: no such file or folder"),
        (["--hidden-size", "100"], "hidden_size (100) % (2 * num_attention_heads (4)) == 4"),
        (["--num-query-groups", "3"], "num_attention_heads (4) % num_query_groups (3) == 1"),
        (
            ["--context-parallel-size", "3"],
            "context_parallel_size is 3, expected a divisor of the 4 ranks",
        ),
        (
            ["--max-seqlen-per-dp-cp-rank", "9"],
            "rank of 4 (2048) > max_seqlen_per_dp_cp_rank (9)",
        ),
        (
            ["--cp-comm-type", "ring"],
            "cp_comm_type is 'ring', expected one of p2p, all_gather, a2a, a2a+p2p, auto",
        ),
        (["--attention-backend", "magi"], "attention_backend is 'magi', expected one of auto, tor"),
        (["--cp-comm-type", "a2a+p2p"], "hierarchical_context_parallel_sizes is missing"),
        (["--window-size", "3,-2"], "window_size is (3, -2), expected (left, right) in tokens"),
        (
            ["--window-size", "full", "64,0"],
            "window_size lists 2 values for 4 layers, expected 1 or 4",
        ),
        (["--cp-comm-type", "p2p", "p2p"], "cp_comm_type lists 2 values for 4 layers"),
        (["--memory", "no/such.json"], "memory is 'no/such.json', expected a file of `hcp"),
        (["--lr", "nan"], "lr is nan"),
        (["--lr-warmup-iters", "16"], "lr_warmup_iters is 16, expected 0 to 5"),
        (["--seed", "4294967296"], "seed is 4294967296, expected 0 to 4294967295"),
        (["--no-such-option"], "unrecognized arguments: --no-such-option (--help lists"),
        (["--ranks", "four"], "argument --ranks: invalid int value: 'four'"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_starts(
    argv, message, monkeypatch, capsys
):
    monkeypatch.setattr(
        "hcp.tools.programs.launch.start_ranks", lambda *_: pytest.fail("ranks were started")
    )
    from hcp.demo import main

    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("hcp demo: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_longest_document_that_takes_too_many_bytes_is_refused_before_anything_starts(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(
        "hcp.tools.programs.launch.start_ranks", lambda *_: pytest.fail("ranks were started")
    )
    from hcp.demo import main

    path = tmp_path / "memory.json"
    hcp.MemoryModel(activation=10, limit=20_479).save(path, {})
    assert main(["--memory", str(path)]) == 2
    assert (
        "a sequence of 8192 tokens takes 20,480 bytes on each of 4 ranks > memory.limit (20,479): "
        "use more ranks" in capsys.readouterr().err
    )


def test_bad_input_is_one_line_from_one_rank(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "fine"}\n{"text": 7}\n')
    result = demo("--ranks", "2", "--data", str(path), "--run-dir", str(tmp_path / "run"))
    assert result.returncode == 2
    message = f'hcp demo: error: {path}:2: field "text" is int, expected a string\n'
    assert result.stderr == message
    assert not (tmp_path / "run").exists()


def test_an_unknown_command_gets_the_usage():
    result = command("train")
    assert result.returncode == 2
    assert "'train' is not a command" in result.stderr
    assert "demo" in result.stderr


def test_ranks_that_contradict_the_launcher_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--ranks 3, but torchrun started 2"):
        parse_args(["--ranks", "3"])


# ---- Parts ----


@pytest.mark.parametrize("scheduler", ["static_cp", "dynamic_cp"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_loss_and_gradients_are_those_of_one_rank(ranks, scheduler):
    args = parse_args([*TINY, "--ranks", str(ranks), "--max-seqlen-per-dp-cp-rank", "120"])
    documents = [
        text_data.Document(bytes(range(n % 7, n % 7 + n)), True) for n in (1, 199, 30, 2, 77, 5)
    ]
    config = replace(args.config, sequence_packing_scheduler=scheduler)
    alone = loss_and_gradients(args, Config(1000), documents, 1)
    together = loss_and_gradients(args, config, documents, ranks)
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-12)


def loss_and_gradients(args, config, documents, ranks):
    torch.manual_seed(0)
    weights = GPTModel(args, None).double().state_dict()

    def one(groups):
        model = GPTModel(args, None).double()
        model.load_state_dict(weights)
        share = range(groups.rank("dp_cp"), len(documents), ranks)
        loader = text_data.load(documents, share, torch.device("cpu"))
        lengths, sources, samples = hcp.gather_lengths(loader, groups)
        plan = config.plan(lengths, ranks)
        total = torch.zeros((), dtype=torch.float64)
        for cp, local in hcp.dispatch(plan, samples, sources, groups):
            losses = F.cross_entropy(model(local.tokens, cp), local.labels, reduction="none")
            loss = cp.loss(losses, local.loss_mask, grad_reduce="sum")
            loss.backward()
            total += loss.detach()
        return torch.cat([total[None], *(p.grad.flatten() for p in model.parameters())])

    return torch.stack(hcp.loopback(ranks, one)).sum(dim=0)


def test_the_table_says_when_layouts_disagree():
    def run(scheduler, loss):
        step = DemoStep(
            iteration=1,
            loss=loss,
            grad_norm=1.0,
            sequences=7,
            tokens=100,
            loss_tokens=93,
            padding_rows=0,
            micro_batches=2,
            work=80,
            bound=20,
            makespan=25,
            efficiency=0.8,
            seconds=0.5,
            plan_seconds=0.02,
            plan_waited=0.005,
        )
        evaluations = [(Evaluation(4, 1, 3.0, 37, 999), Evaluation(1, 4, 3.1, 37, 999))]
        return Run(scheduler, [step], 4, None, evaluations)

    runs = [run("static_cp", 2.0), run("dynamic_cp", 2.5)]
    assert loss_difference(runs) == 0.5
    lines = table(runs, 1e-6).splitlines()
    assert "THE LAYOUTS DISAGREE" in lines[-1]
    assert any("largest difference 5.0e-01" in line for line in lines)


def test_the_rate_rises_and_falls() -> None:
    words = ["--train-iters", "8", "--lr", "4", "--lr-warmup-iters", "3"]
    for style, expected in (
        ("constant", [1, 2, 3, 4, 4, 4, 4, 4]),
        ("cosine", [1, 2, 3, 4, 3.618, 2.618, 1.382, 0.382]),
    ):
        args = parse_args([*words, "--lr-decay-style", style])
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.lr)
        schedule = learning_rates(args, optimizer)
        rates = []
        for _ in expected:
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        assert rates == pytest.approx(expected, abs=1e-3)
