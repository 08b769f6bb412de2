"""Every benchmark that runs on CPUs, at its smallest: its checks pass, and it prints its table.

`make check` checks the types of those that need GPUs.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import core_attention
from support.ranks import run_ranks
from torch import Tensor

import hcp

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
GPU_ONLY = {"bench_attention_kernels"}
RUNS = {
    "bench_attention": (
        2,
        "--device cpu --tokens 512 --heads 2 1 --head-dim 8 --rounds 1 --packs one halves P4",
    ),
    "bench_attention --degrees": (
        4,
        "--device cpu --tokens 256 --heads 4 2 --head-dim 8 --rounds 1 --packs one --dtype bfloat16"
        " --degrees 2 4 --take min",
    ),
    "bench_attention --alone": (
        1,
        "--alone --device cpu --degrees 2 --tokens 512 --heads 2 1 --head-dim 8 --rounds 1"
        " --packs halves",
    ),
    "bench_attention --host": (1, "--host --device cpu --degrees 2 --types p2p --rounds 2"),
    "bench_eval": (
        2,
        "--device cpu --pp 1 2 --samples 2 --length 16 --hidden 8 --heads 2 --layers 2 --rounds 1",
    ),
    "bench_exchange": (2, "--device cpu --most-mib 1"),
    "bench_experts": (
        2,
        "--device cpu --expert-ranks 2 --sequences 4 --rounds 1 --num-layers 1",
    ),
    "bench_experts --simulate": (
        1,
        "--simulate --ranks 8 --expert-ranks 4 --sequences 4 --batches 1 --tail 1 2",
    ),
    "bench_long": (1, "--device cpu --ranks 2 --tokens 128"),
    "bench_long --sequences": (
        1,
        "--device cpu --ranks 2 --tokens 128 --sequences 3 --contestants dynamic padded alone",
    ),
    "bench_long --forecast": (1, "--forecast 4 --sequences 6 --tokens 4096 --family chatqa2"),
    "bench_trainers": (1, "--device cpu --ranks 2 --families github --contestants packing dynamic"),
    "bench_fields": (
        2,
        "--device cpu --sequences 3 --tokens 40 --images 2 --image-tokens 4 --pixels 6 --hidden 8"
        " --layers 2 --rounds 1",
    ),
    "bench_kernels": (1, "--device cpu --rows 256 --rounds 1 --only pack reduce rotate"),
    "bench_latent": (
        2,
        "--device cpu --tokens 64 --heads 2 --latent 8 --shared 4 --head-dim 8 --rounds 1",
    ),
    "bench_megatron": (2, "--device cpu --families P1 --tokens 2048 --rounds 1"),
    "bench_megatron one": (
        2,
        "--device cpu --families one --tokens 500 --rounds 1 --recompute --linear-loss",
    ),
    "bench_megatron --ladder": (
        1,
        "--device cpu --ladder --ranks 2 --tokens 256 --most-tokens 512 --hcp hcp",
    ),
    "bench_million": (2, "--device cpu --tokens 512 --check-tokens 64 --dtype float64"),
    "bench_million --ladder": (
        1,
        "--device cpu --ladder --ranks 2 --types p2p --te --most-tokens 512 --check-tokens 64",
    ),
    "bench_masks": (1, "--ranks 2 --tokens 512 --chunk 128 --packs 1"),
    "bench_masks --plans": (1, "--plans --ranks 4 --packs 1"),
    "bench_masks --time": (2, "--time --tokens 96 --packs 2 --rounds 1"),
    "bench_plan": (1, "--families P2,X4 --costs default --seeds 1 --peers"),
    "bench_rebind": (1, "--modules 10 --rounds 1"),
    "bench_states": (
        2,
        "--device cpu --lengths 40 3 --heads 2 --head-dim 4 --state-dim 4 --chunk 8 --rounds 1",
    ),
    "bench_states --layer": (
        2,
        "--device cpu --layer delta --passes forward --contestants pass_states --lengths 40 3"
        " --heads 2 --head-dim 4 --state-dim 4 --rounds 1",
    ),
    "bench_tree": (
        2,
        "--device cpu --prompt 40 --answers 3 --answer 9 --heads 4 2 --head-dim 8 --rounds 1"
        " --dtype float32",
    ),
    "bench_rollouts": (
        2,
        "--device cpu --prompts 30 --answers 3 --answer 7 --layers 1 --width 16 --inner 24"
        " --heads 2 1 --head-dim 8 --vocabulary 40 --rounds 1 --dtype float64",
    ),
    "bench_train": (2, "--device cpu --families P1 --batches 1 --tokens 512 --num-layers 1"),
    "studies/cut_profile": (
        2,
        "--device cpu --tokens 256 --heads 2 2 --head-dim 8 --rounds 1 --calls 2 --packs one",
    ),
    "studies/simulated": (1, "--eval"),
    "studies/exact": (
        1,
        "--ranks 2 --sequences 3 --families P1 --costs default --seeds 1 --workers 1",
    ),
    "studies/default_prices": (1, "--ranks 2 --seeds 1 --sequences 4"),
    "studies/empty_micro_batches": (2, "--device cpu --models transformers --rounds 1"),
    "studies/exact_pipeline": (1, "--ranks 2 --sequences 3 --families P1,X3 --seeds 1"),
}
NEEDS = {
    "bench_long": "trl",
    "bench_trainers": "trl",
    "studies/exact": "ortools",
    "bench_experts": "megatron",
    "bench_megatron": "megatron",
    "studies/empty_micro_batches": "transformers",
}


def skip_without_needs(name: str) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")


def run_benchmark(rank: int, size: int, name: str, arguments: list[str]) -> str:
    """The output of one rank of a program that a launcher starts."""
    store = launched(rank, size)
    printed = io.StringIO()
    given, sys.argv = sys.argv, [name, *arguments]
    sys.path.insert(0, str(BENCHMARKS))
    try:
        with redirect_stdout(printed):
            runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.argv = given
        sys.path.remove(str(BENCHMARKS))
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"], store
    return printed.getvalue()


def launched(rank: int, size: int) -> dist.TCPStore | None:
    """Leave the case's own group, and what torchrun leaves in its place: rank 0's store."""
    own = (
        dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if not rank else None
    )
    ports = [own.port if own else 0]
    dist.broadcast_object_list(ports, 0)
    dist.destroy_process_group()
    os.environ.update(
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(ports[0]),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    return own


@pytest.mark.parametrize("run", RUNS)
def test_a_small_run_passes_its_checks_and_prints_its_table(run: str, tmp_path: Path) -> None:
    name = run.split()[0]
    skip_without_needs(name)
    size, arguments = RUNS[run]
    file = tmp_path / "rows.json"
    flags = ["--json", str(file)] if name.startswith("bench_") else []
    first, *others = run_ranks(size, run_benchmark, name, [*shlex.split(arguments), *flags])
    assert len(first.splitlines()) >= 3, first
    assert others == [""] * (size - 1)
    if flags:
        written = json.loads(file.read_text())
        assert written.keys() == {"benchmark", "arguments", "machine", "versions", "rows"}
        assert written["benchmark"] == name
        assert written["versions"]["hcp"] == hcp.__version__
        assert written["rows"]
        assert all(len(row) > 2 for row in written["rows"])


def test_lengths_of_ones_own_are_compared_with_packed_static_cp(tmp_path: Path) -> None:
    skip_without_needs("bench_megatron")
    file, rows = tmp_path / "mine.jsonl", tmp_path / "rows.json"
    own = [9, 700, 40, 33, 260, 5, 18, 77, 300]
    file.write_text("".join(json.dumps({"ids": [0] * length}) + "\n" for length in own))
    options = f"--device cpu --lengths {file} --column ids --tokens 600 --batches 9 --rounds 1"
    given = [*shlex.split(options), "--hcp", "static CP", "--json", str(rows)]
    printed, other = run_ranks(2, run_benchmark, "bench_megatron", given)
    assert other == ""
    assert "mine.jsonl: 1 of 9 lengths are cut to 512 tokens" in printed
    sizes = f"9 sequences, {sum(own) - 188} tokens, longest 512"
    assert f"mine.jsonl  lengths of a file: {sizes}" in printed
    said = r"mine\.jsonl: hcp computes these batches \d+\.\d\d times as fast as packed static CP on"
    assert re.search(said, printed), printed
    written = json.loads(rows.read_text())["rows"]
    assert [(row["family"], row["contestant"]) for row in written] == [
        ("mine.jsonl", "hcp"),
        ("mine.jsonl", "static CP"),
    ]
    assert all(row["gradients_off"] < 1e-3 for row in written)


@pytest.mark.usefixtures("benchmarks")
def test_one_sentence_says_how_fast_hcp_is_over_what_people_run() -> None:
    skip_without_needs("bench_megatron")
    bench = runpy.run_path(str(BENCHMARKS / "bench_megatron.py"))
    seconds = {"hcp": 2.0, "static CP": 5.0, "te p2p flash": 3.0, "te a2a fused": 2.5}
    totals = {name: bench["Totals"](seconds=took) for name, took in seconds.items()}
    assert bench["verdict"](totals) == (
        "hcp computes these batches 2.50 times as fast as packed static CP on hcp's engine and "
        "1.25 times as fast as Transformer Engine (te a2a fused)"
    )
    alone = {"hcp": totals["hcp"]}
    assert bench["verdict"](alone) == "hcp computes these batches alone: nothing is compared"


@pytest.mark.usefixtures("benchmarks")
def test_a_contestant_that_takes_too_long_leaves_no_rank_behind(tmp_path: Path) -> None:
    from common.torchrun import started

    program = tmp_path / "hangs.py"
    program.write_text(
        "import os, pathlib, time\n"
        "made = pathlib.Path(__file__).with_name('new' + os.environ['RANK'])\n"
        "made.write_text(str(os.getpid()))\n"
        "made.rename(made.with_name('rank' + os.environ['RANK']))\n"
        "time.sleep(300)\n"
    )
    pipe, files = subprocess.PIPE, [tmp_path / f"rank{rank}" for rank in range(2)]

    def run() -> None:
        with started(2, str(program), stdout=pipe, stderr=pipe) as torchrun:
            while not all(file.exists() for file in files):
                assert torchrun.poll() is None
                time.sleep(0.05)
            torchrun.communicate(timeout=0.1)

    with pytest.raises(subprocess.TimeoutExpired):
        run()
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


@pytest.mark.usefixtures("benchmarks")
def test_trls_own_cp_trains_the_steps_of_the_others_and_is_timed_by_their_tokens() -> None:
    """Its ring runs on GPUs alone: what it is given and what is made of its seconds is checked."""
    skip_without_needs("bench_trainers")
    import trl
    from common.trainer_runs import Measured

    bench = importlib.import_module("bench_trainers")
    args = SimpleNamespace(steps=40, warm=2, sequences=3, longest=8192, device="cpu")
    lengths = bench.lengths_of(args, "github")
    measured = Measured(seconds=[9.0, 9.0, 2.0], losses=[1.0])
    found = bench.tokens_of(args, "github", "cp", measured)
    assert found == sum(lengths[6:9]) / 2
    with mock.patch.object(trl, "SFTTrainer") as made:
        bench.by_trl(args, bench.config_of("toy", None, 64), [], 2, with_cp=True)
    given = made.call_args.args[1]
    assert (given.per_device_train_batch_size, given.gradient_accumulation_steps) == (1, 3)
    assert (given.max_steps, given.pad_to_multiple_of) == (2 + bench.CP_STEPS, 4)
    assert given.parallelism_config.cp_size == 2
    other = Measured(losses=[1.1])
    bench.check({("cp", 2): [measured], ("packing", 2): [other]}, "github", "cpu")
    with pytest.raises(SystemExit, match=r"\('cp', 2\) has loss 1.0, \('dynamic', 2\) has 1.1"):
        bench.check({("dynamic", 2): [other], ("cp", 2): [measured]}, "github", "cpu")


@pytest.mark.usefixtures("benchmarks")
def test_own_lengths_fill_batches_and_each_is_used_once() -> None:
    from common.batches import filled_batches

    own = [1 + 37 * i % 90 for i in range(80)]
    whole = filled_batches(own, tokens=200, batches=1000, seed=3)
    assert sorted(x for batch in whole for x in batch) == sorted(own)
    assert all(sum(batch) <= 200 for batch in whole)
    assert all(sum(a) + b[0] > 200 for a, b in itertools.pairwise(whole))
    assert filled_batches(own, tokens=200, batches=3, seed=3) == whole[:3]
    assert filled_batches(own, tokens=200, batches=3, seed=4) != whole[:3]
    assert filled_batches([7, 500, 7], tokens=10, batches=5, seed=0).count([500]) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--lengths none.jsonl", "none.jsonl: [Errno 2] No such file or directory"),
        ("--lengths none.jsonl --ladder", "--lengths goes with batches of many sequences"),
    ],
)
def test_own_lengths_that_cannot_be_read_are_refused(
    arguments: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    skip_without_needs("bench_megatron")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", ["bench_megatron.py", "--device", "cpu", *arguments.split()])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(BENCHMARKS / "bench_megatron.py"), run_name="__main__")
    assert end.value.code == 2
    assert f"bench_megatron.py: error: {says}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        (
            "bench_million",
            "--device cpu --tokens 128 --check-tokens 64 --dtype float64 --types p2p",
        ),
        (
            "bench_attention",
            "--device cpu --tokens 128 --heads 2 1 --head-dim 8 --rounds 1 --packs many"
            " --types p2p --dtype float64 --peers te_p2p te_a2a te_all_gather te_p2p_fa4 te_a2a_fa4"
            " te_all_gather_fa4",
        ),
    ],
)
def test_transformer_engine_stands_beside_hcp(name: str, arguments: str) -> None:
    """A module of its arguments takes its place. One that refuses, or is wrong, is left out."""
    printed, _ = run_ranks(2, run_beside_engine, name, shlex.split(arguments))
    rows = [line for line in printed.splitlines() if line.startswith("|") and "te_" in line]
    assert len(rows) == 2, printed
    assert "te_p2p" in rows[0]
    assert "te_p2p_fa4" in rows[1]
    left_out = [line for line in printed.splitlines() if "te_a2a" in line or "te_all" in line]
    assert len(left_out) == 4, printed
    assert "heads refused" in printed
    assert "off by" in printed
    if name == "bench_attention":
        assert "best of Transformer Engine" in printed


def run_beside_engine(rank: int, size: int, name: str, arguments: list[str]) -> str:
    class DotProductAttention(core_attention.RingLike):
        def __init__(self, heads: int, size: int, **options: object) -> None:
            super().__init__()
            assert (options["qkv_format"], options["attn_mask_type"]) == ("thd", "padding_causal")

        def forward(self, query: Tensor, key: Tensor, value: Tensor, **kw: Any) -> Tensor:  # type: ignore[override]
            if self.cp_comm_type == "a2a":
                raise ValueError("heads refused")
            group = self.cp_group
            params = SimpleNamespace(
                cu_seqlens_q=kw["cu_seqlens_q"], cp_group=group, local_cp_size=group.size()
            )
            out = super().forward(query, key, value, None, "padding_causal", None, params)
            if os.environ["NVTE_FLASH_ATTN"] == "1":
                sees = names[f"{te_kernels.ATTENTION}.backends"]._flash_attn_fwd_v4
                out = out * sees(window_size_left=-1, window_size_right=0)
            return out * 2 if self.cp_comm_type == "all_gather" else out

    sys.path.insert(0, str(BENCHMARKS))
    from peers import shipped, te_kernels

    package, module = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    module.DotProductAttention = DotProductAttention  # type: ignore[attr-defined]
    names = {"transformer_engine": package, "transformer_engine.pytorch": module}
    names |= kernels_of(lambda window_size_left, window_size_right: window_size_left is None)

    def obstacle(name: str, device: torch.device) -> str | None:
        return None if name in shipped.TRANSFORMER_ENGINE else "not asked for"

    sys.path.remove(str(BENCHMARKS))
    with (
        mock.patch.dict(sys.modules, names),
        mock.patch.object(shipped, "obstacle", obstacle),
        mock.patch.dict(os.environ),
    ):
        return run_benchmark(rank, size, name, arguments)


def test_magi_attention_stands_beside_hcp_under_masks() -> None:
    """A module of its arguments takes its place. One that refuses, or is wrong, is left out."""
    arguments = "--time --tokens 96 --packs 1 --rounds 1 --masks prefix sparse full causal"
    printed, _ = run_ranks(2, run_beside_magi, shlex.split(arguments))
    rows = [line.split(" | ")[:2] for line in printed.splitlines() if line.startswith("| ")]
    wanted = [["| prefix", "hcp"], ["| prefix", "magi"], ["| sparse", "hcp"], ["| sparse", "magi"]]
    assert rows[1:] == [*wanted, ["| full", "hcp"], ["| causal", "hcp"]], printed
    assert "full: without magi, ValueError: full refused" in printed
    assert "causal: without magi, SystemExit: rank 0: magi: the output is off by 1 of" in printed


def run_beside_magi(rank: int, size: int, arguments: list[str]) -> str:
    """With contiguous rows of each rank, and keys that every rank gathers."""
    kinds = {"inv_causal": "inverse_causal", "bi_causal": "both"}

    def key_of(**given: Any) -> SimpleNamespace:
        names = given["attn_mask_type"]
        if names == ["full"]:
            raise ValueError("full refused")
        ranges = zip(given["q_ranges"], given["k_ranges"], names, strict=True)
        parts = [(tuple(q), tuple(k), kinds.get(kind, kind)) for q, k, kind in ranges]
        mask = hcp.Mask(given["total_seqlen_q"], parts)
        assert dist.get_world_size(given["cp_group_or_mesh"]) == size
        assert given["dist_attn_config"]["dispatch_config"]["chunk_size"] == 2048
        rows = torch.arange(mask.length).chunk(size)[rank]
        gain = 2 if names == ["causal"] else 1
        return SimpleNamespace(pad_size=0, mask=mask, rows=rows, gain=gain)

    def calc_attn(query: Tensor, key: Tensor, value: Tensor, of: Any) -> tuple[Tensor, None]:
        own = torch.stack([key, value], 1).repeat_interleave(2, 2)
        key, value = torch.cat(core_attention.gathered(own, dist.group.WORLD)).unbind(1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
        unseen = ~of.mask.dense()[of.rows]
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value) * of.gain, None

    module = ModuleType("magi_attention.api")
    vars(module).update(
        AttnRanges=SimpleNamespace(from_ranges=list),
        AttnOverlapMode=SimpleNamespace(STATIC="static"),
        magi_attn_flex_key=key_of,
        get_position_ids=lambda key: key.rows,
        calc_attn=calc_attn,
    )
    for name in ("OverlapConfig", "UniformOverlapAlg", "DispatchConfig", "DistAttnConfig"):
        setattr(module, name, dict)
    module.MinHeapDispatchAlg = object  # type: ignore[attr-defined]
    sys.path.insert(0, str(BENCHMARKS))
    from peers import magi

    sys.path.remove(str(BENCHMARKS))
    with (
        mock.patch.dict(sys.modules, {"magi_attention": ModuleType("magi_attention")}),
        mock.patch.dict(sys.modules, {module.__name__: module}),
        mock.patch.object(magi, "obstacle", return_value=None),
        mock.patch.dict(os.environ),
    ):
        return run_benchmark(rank, size, "bench_masks", arguments)


@pytest.mark.usefixtures("benchmarks")
def test_what_triton_tunes_is_compiled_at_once_before_it_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stand-ins take the places of Triton's autotuner and of its mode of compiling in threads."""
    from peers.tuning import compile_in_threads

    done: list[object] = []

    configs = [SimpleNamespace(all_kwargs=lambda warps=warps: {"w": warps}) for warps in (1, 2)]

    class Autotuner:
        def __init__(self) -> None:
            self.nargs = {"x": 7}
            self.fn = SimpleNamespace(warmup=lambda *given, **named: done.append((given, named)))

        def prune_configs(self, named: dict[str, object]) -> list[Any]:
            return configs[: 1 if "few" in named else 2]

    class AsyncCompileMode:
        def __init__(self, pool: Any, ignore_errors: bool) -> None:
            assert ignore_errors

        def __enter__(self) -> None:
            done.append("in")

        def __exit__(self, *error: object) -> None:
            done.append("out")

    tuner, mode = (
        ModuleType("triton.runtime.autotuner"),
        ModuleType("triton.runtime._async_compile"),
    )
    tuner.Autotuner, mode.AsyncCompileMode = Autotuner, AsyncCompileMode  # type: ignore[attr-defined]
    for each in (tuner, mode):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for _ in range(2):  # twice is as once
        assert compile_in_threads(2) == "Triton compiles what it tunes in 4 threads a rank"
    assert Autotuner().prune_configs({"few": 1}) == configs[:1]
    assert done == []
    assert Autotuner().prune_configs({"grid": 3, "warmup": False}) == configs
    first, second = (((7,), {"grid": 3, "w": warps}) for warps in (1, 2))
    assert done == ["in", first, second, "out"]
    monkeypatch.setitem(sys.modules, mode.__name__, None)
    assert compile_in_threads(2).startswith("Triton compiles what it tunes one after the other: ")


@pytest.mark.usefixtures("benchmarks")
def test_a_mask_falls_apart_where_nobody_sees_over() -> None:
    from common.masked import seen_by, sequences_of

    mask = hcp.Mask.documents([hcp.Mask.prefix_lm(5, 2), 4, hcp.Mask.full(3), 1])
    parts = sequences_of(mask)
    assert [part.length for part in parts] == [5, 4, 3, 1]
    assert torch.equal(torch.block_diag(*(part.dense() for part in parts)).bool(), mask.dense())
    tree = hcp.Mask.shared_prefix(4, [3, 2])
    assert [part.length for part in sequences_of(tree)] == [9]
    for one in (mask, tree, hcp.Mask.window(9, 3, 2)):
        assert torch.equal(seen_by(one, 2, 7, torch.device("cpu")), one.dense()[2:7])
    with pytest.raises(ValueError, match="tokens in no slice"):
        sequences_of(hcp.Mask(4, [((0, 2), (0, 2)), ((3, 4), (3, 4))]))


@pytest.mark.parametrize(("factor", "said"), [(1.0, ""), (1.1, "off the formula by 0.1")])
def test_a_wrong_attention_of_megatrons_is_told_from_the_formula(factor: float, said: str) -> None:
    skip_without_needs("bench_megatron")
    for refused in run_ranks(2, check_small_pack, factor):
        assert said in refused if said else refused == ""


def check_small_pack(rank: int, size: int, factor: float) -> str:
    """What bench_megatron says of attention that is so many times the right one."""
    sys.path.insert(0, str(BENCHMARKS))
    bench: Any = importlib.import_module("bench_megatron")
    sys.path.remove(str(BENCHMARKS))
    ring = core_attention.RingLike()
    ring.set_context_parallel_group(dist.group.WORLD, list(range(size)), None, "p2p")

    def core(*rows: Any, packed_seq_params: Any) -> Tensor:
        query, key, value = (x.double() for x in rows[:3])
        params = SimpleNamespace(
            cu_seqlens_q=packed_seq_params.cu_seqlens_q,
            cp_group=dist.group.WORLD,
            local_cp_size=size,
        )
        out = ring(query, key, value, None, "padding_causal", None, params)
        return (out * factor).to(torch.bfloat16)

    layer = SimpleNamespace(self_attention=SimpleNamespace(core_attention=core))
    model = SimpleNamespace(decoder=SimpleNamespace(layers=[layer]))
    args = SimpleNamespace(num_attention_heads=4, num_query_groups=2, hidden_size=32)
    job = SimpleNamespace(args=args, ranks=size, device=torch.device("cpu"))
    try:
        bench.check_attention(job, SimpleNamespace(model=model, select=lambda: None))
    except ValueError as error:
        return str(error)
    return ""


def kernels_of(flash_attn_4: Callable[..., object] | None) -> dict[str, ModuleType]:
    """The modules of Transformer Engine that hold its choice, and FlashAttention-4's functions."""
    name = "transformer_engine.pytorch.attention.dot_product_attention"
    choice, backends = ModuleType(name), ModuleType(name)
    choice._attention_backends = {}  # type: ignore[attr-defined]
    for each in ("_flash_attn_fwd_v4", "_flash_attn_bwd_v4"):
        setattr(backends, each, flash_attn_4)
    return {f"{name}.dot_product_attention": choice, f"{name}.backends": backends}


@pytest.fixture
def te_kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The choice of Transformer Engine's kernels, in an environment of its own."""
    monkeypatch.setattr(os, "environ", {})
    return importlib.import_module("peers.te_kernels")


@pytest.mark.usefixtures("benchmarks")
def test_flash_attention_4_gets_none_for_no_limit_and_a_window_as_it_is(
    te_kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = kernels_of(lambda *positional, **named: (*positional, named))
    for name, module in given.items():
        monkeypatch.setitem(sys.modules, name, module)
    choice, backends = given.values()
    for kernel in ("flash", "fused", "flash"):
        choice._attention_backends.clear()
        te_kernels.select(kernel)
        assert choice._attention_backends == {"backend_selection_requires_update": True}, kernel
    choice._attention_backends.clear()
    te_kernels.select("flash")
    assert choice._attention_backends == {}, "one that was chosen is not chosen anew"
    for call in (backends._flash_attn_fwd_v4, backends._flash_attn_bwd_v4):
        assert call(1, window_size_left=-1, window_size_right=0) == (
            1,
            {"window_size_left": None, "window_size_right": 0},
        )
        assert call(window_size_left=7, window_size_right=-1) == (
            {"window_size_left": 7, "window_size_right": None},
        )
        assert call(causal=True) == ({"causal": True},)


@pytest.mark.usefixtures("benchmarks")
def test_a_transformer_engine_without_flash_attention_4_says_what_to_install(
    te_kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, module in kernels_of(None).items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ImportError, match="pip install --pre flash-attn-4"):
        te_kernels.select("flash")


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("bench_*.py")), ids=lambda path: path.stem)
def test_every_benchmark_has_the_same_flags(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    skip_without_needs(path.stem)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code in (None, 0)
    words = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert {"--device", "--rounds", "--deadline", "--json"} <= words


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.usefixtures("benchmarks")
def test_a_long_sequence_is_checked_by_a_few_of_its_queries() -> None:
    """The formula, chunk by chunk, equals attention over the whole sequence; faults are seen."""
    from common.layers import Sizes
    from common.long import GRAD, KEY, QUERY, VALUE, Long

    sizes = Sizes(4, 2, 8, torch.float64, torch.device("cpu"))
    for rank in range(2):
        long = Long(40, rank, 2, sizes)
        whole = [long.drawn(what, range(4)) for what in (QUERY, KEY, VALUE, GRAD)]
        *inputs, grad = whole
        places = torch.tensor(long.places)
        assert places.tolist() == [5, 9, 15, 19, 25, 29, 35, 39]
        sparse = torch.zeros_like(grad)
        sparse[places] = grad[places]
        out, *grads = attention_by_formula(*inputs, sparse)
        rows = torch.arange(40).view(4, 10)[list(long.chunks)].flatten()
        given = [x[rows].clone() for x in (out, *grads)]
        errors = long.errors(given[0], given[1:])
        assert len(errors) == 5
        assert max(errors.values()) < 1e-12, errors
        for i, row in ((0, 19), (1, 0), (1, 19), (2, 3), (3, 13)):
            wrong = [x[rows].clone() for x in (out, *grads)]
            wrong[i][row] += 1e-3
            assert max(long.errors(wrong[0], wrong[1:]).values()) > 1e-6, (i, row)


def attention_by_formula(query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> list[Tensor]:
    """Causal attention, (T, H, D), and the gradients of its inputs."""
    leaves = [x.requires_grad_() for x in (query, key, value)]
    groups = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(groups, 1) for x in leaves[1:])
    scores = torch.einsum("qhd,khd->hqk", query, keys) / query.shape[2] ** 0.5
    mask = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(mask, -torch.inf).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", weights, values)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.usefixtures("benchmarks")
def test_the_ladder_says_what_ended_a_contestant() -> None:
    from common.ladder import FULL, end_of

    full = f"p2p: {FULL} 2048 tokens on rank 1: CUDA out of memory. Tried to allocate 1.00 GiB."
    assert end_of("p2p", 1, f"| p2p | 1 |\n{full}\nmore", "", [512, 1024]) == (
        "p2p: 1024 tokens; out of memory at 2048 (rank 1: CUDA out of memory. Tried to allocate "
        "1.00 GiB.)"
    )
    late = "p2p: not tried at 2048 tokens, expected 70 s"
    assert end_of("p2p", 0, late, "", [1024]) == f"p2p: 1024 tokens; {late[5:]}"
    assert "ended with status 7: it broke" in end_of("p2p", 7, "", "it\nbroke", [])
    assert end_of("p2p", 0, "", "", [4]) == "p2p: 4 tokens, the most that was asked for"


@pytest.mark.usefixtures("benchmarks")
def test_the_ladder_prints_rows_before_a_contestant_ends(tmp_path: Path) -> None:
    """The contestant goes on only after its first row was printed."""
    contestant = tmp_path / "contestant.py"
    contestant.write_text(
        "import pathlib, sys, time\n"
        "print('| 512 | p2p |', flush=True)\n"
        f"while not pathlib.Path({str(tmp_path / 'printed')!r}).exists():\n"
        "    time.sleep(0.01)\n"
        "print('not a row', flush=True)\n"
        "print('it broke', file=sys.stderr)\n"
        "sys.exit(3)\n"
    )
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import pathlib\n"
        "from common.ladder import told\n"
        f"print(told(1, [{str(contestant)!r}], pathlib.Path({str(tmp_path)!r})))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    with subprocess.Popen(
        [sys.executable, str(parent)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "| 512 | p2p |\n"
        (tmp_path / "printed").touch()
        rest = process.stdout.read()
    status, printed, errors = ast.literal_eval(rest)
    assert (status, printed) == (1, "| 512 | p2p |\nnot a row\n")  # torchrun's, of a rank's 3
    assert errors.startswith("it broke\n")
    assert "exitcode  : 3" in errors


def test_every_benchmark_runs_here_or_needs_a_gpu() -> None:
    studies = {
        f"studies/{name}"
        for name in (
            "cut_profile",
            "default_prices",
            "empty_micro_batches",
            "exact",
            "exact_pipeline",
            "simulated",
        )
    }
    programs = {path.stem for path in BENCHMARKS.glob("bench_*.py")} | studies
    assert {run.split()[0] for run in RUNS} == programs - GPU_ONLY


@pytest.mark.parametrize(
    ("seeds", "apart", "status"),
    [(1, 0.0, 0), (1, 1e-12, 0), (1, 1e-7, 1), (2, 1e-7, 0), (2, 0.09, 0), (2, 0.11, 1)],
)
def test_curves_that_differ_are_told(
    seeds: int,
    apart: float,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Jobs that have run are read: here, what they would have written."""
    pytest.importorskip("matplotlib")
    for name in ("static_cp-7", "static_cp-8", "dynamic_cp-7"):
        loss = 1.0 + apart * (name == "dynamic_cp-7") + 0.1 * (name == "static_cp-8")
        step = {"kind": "train", "iteration": 1, "loss": loss, "grad_norm": 2.0}
        evaluation = {"kind": "evaluation", "iteration": 1, "loss": loss}
        lines = [step, *({**evaluation, "layout": layout} for layout in ("training", "eval"))]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        (tmp_path / name / "summary.json").write_text("{}")
    monkeypatch.setattr(
        sys,
        "argv",
        ["convergence", "--folder", str(tmp_path), "--seed", "7", "--seeds", str(seeds)],
    )
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(BENCHMARKS / "studies/convergence.py"), run_name="__main__")
    assert end.value.code == status
    assert f"| loss, dynamic and static CP | {1.0 + apart - 1.0:.2e} |" in capsys.readouterr().out
    assert (tmp_path / "curves.png").exists()


JOB = """
import json, pathlib, sys
given = [each for each in sys.argv[1:] if each != "--no-compare"]
options = dict(zip(given[::2], given[1::2]))
folder, saved = (pathlib.Path(options[name]) for name in ("--run-dir", "--save"))
for each in (folder, saved):
    each.mkdir(parents=True, exist_ok=True)
done = int((saved / "checkpoint.pt").read_text()) if "--load" in options else 0
assert float(options["--exit-duration-in-mins"]) > 0
done += 2 if options["--sequence-packing-scheduler"] == "static_cp" else 1
step = lambda i: {"kind": "train", "iteration": i, "loss": 1.0, "grad_norm": 2.0}
evaluation = {"kind": "evaluation", "loss": 1.0}
lines = [step(i + 1) for i in range(done)]
for layout in ("training", "eval"):
    lines += [{**evaluation, "iteration": i + 1, "layout": layout} for i in range(done)]
(folder / "metrics.jsonl").write_text("\\n".join(map(json.dumps, lines)))
(saved / "checkpoint.pt").write_text(str(done))
if done == 2:
    (folder / "summary.json").write_text("{}")
"""


def test_jobs_in_pieces_go_on_and_are_compared_as_far_as_all_have_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here a job does its two steps in one piece under static CP, and in two under dynamic CP."""
    pytest.importorskip("matplotlib")
    (tmp_path / "job.py").write_text(JOB)
    launch = f"{sys.executable} {tmp_path / 'job.py'}"
    options = ["--folder", str(tmp_path / "curves"), "--launch", launch, "--minutes", "1"]
    options += ["--checkpoints", str(tmp_path / "saved")]
    said = []
    for _ in range(3):
        monkeypatch.setattr(sys, "argv", ["convergence", *options])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(BENCHMARKS / "studies/convergence.py"), run_name="__main__")
        assert end.value.code == 0
        said.append(capsys.readouterr().out)
    assert "steps so far: static_cp, seed 1234: 2, dynamic_cp, seed 1234: 1. Run" in said[0]
    assert "| compared, 1 steps |" in said[0]
    assert "| compared, 2 steps |" in said[1]
    assert "left to run" not in said[1]
    assert said[2] == said[1]  # nothing was run again
    assert len(list((tmp_path / "curves").rglob("checkpoint.pt"))) == 0


def test_no_group_is_made_by_some_ranks_alone() -> None:
    """An NCCL group that was bound to its device would wait for the others. Gloo's do not."""
    files = [
        f
        for folder in ("benchmarks", "hcp", "tests/cuda")
        for f in (BENCHMARKS.parent / folder).rglob("*.py")
    ]
    assert len(files) > 50
    found = [
        (f.name, line)
        for f in files
        for line in f.read_text().splitlines()
        if "use_local_synchronization" in line and 'backend="gloo"' not in line
    ]
    assert found == []
