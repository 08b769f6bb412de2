"""What each layer keeps, chosen by counted bytes and prices: the bytes are those of a real model,
the arithmetic that of a walk through a step."""

from __future__ import annotations

import importlib
import itertools
import json
import runpy
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.finetuning import documents

import hcp

pytest.importorskip("transformers", reason="pip install '.[transformers]'")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE = SIZES | {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 64}
WIDE |= {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000}
ROWS = 700


def config(kind="qwen3", layers=4, sizes=SIZES, **changes):
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers.CONFIG_MAPPING[kind](**sizes, num_hidden_layers=layers, **changes)


def prices(**changes):
    from hcp.integrations.transformers import memory

    same = {"row_forward": 1e-6, "row_backward": 2e-6, "pair_forward": 1e-10}
    same |= {"pair_backward": 3e-10, "head_row": 1e-6, "parameter": 1e-9, "host_rate": 1e9}
    same["host_parameter"] = 1e-8
    return memory.Prices(**same | changes)


# ---- bytes ---------------------------------------------------------------------------------------


def saved_on_the_cpu(kind, layers, word, chunk_rows, **changes):
    """Bytes that all layers of a real model save in a forward through hcp, each memory once."""
    import transformers

    from hcp.attention.kept import KeptResults
    from hcp.integrations.transformers import (
        causal_lm_losses,
        causal_lm_sample,
        memory,
        register_hcp_attention,
    )

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(kind, layers, **changes)).train()
    register_hcp_attention(model)
    memory.apply(model, memory.Choice([word] * layers, chunk_rows))
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage
        return tensor

    def work(groups):
        plan = hcp.plan([ROWS], ranks=1, max_tokens_per_rank=ROWS)
        samples = [causal_lm_sample(d) for d in documents([ROWS])]
        results = partial(KeptResults, pack, lambda kept: kept)
        where = "hcp.integrations.transformers.memory.layers.KeptResults"
        for cp, local in hcp.dispatch(plan, samples, [0], groups):
            with (
                mock.patch(where, results),
                torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept),
            ):
                losses = causal_lm_losses(model, cp, local)
            size = sum(storage.nbytes() for storage in found.values())
            del losses
        return size

    return hcp.loopback(1, work)[0]


@pytest.mark.parametrize(
    ("kind", "word", "chunk_rows"),
    [
        ("qwen3", "keep", 0),
        ("qwen3", "recompute", 0),
        ("qwen3", "recompute", 64),
        ("llama", "keep", 0),
        ("llama", "recompute", 0),
        ("gemma2", "keep", 0),
    ],
)
def test_counted_bytes_of_a_layer_are_those_that_a_real_one_saves(kind, word, chunk_rows):
    from hcp.integrations.transformers import memory

    four = saved_on_the_cpu(kind, 4, word, chunk_rows)
    measured = (four - saved_on_the_cpu(kind, 2, word, chunk_rows)) / 2
    counted = memory.model_bytes(config(kind), torch.float32, chunk_rows)
    assert counted.of(word, ROWS).held.at(ROWS) == pytest.approx(measured, rel=0.03)


def test_parameters_are_counted_as_the_model_has_them():
    import transformers

    from hcp.integrations.transformers import memory

    counted = memory.model_bytes(config(layers=3), torch.float32, 0)
    model = transformers.AutoModelForCausalLM.from_config(config(layers=3))
    assert counted.parameters == sum(p.numel() for p in model.parameters())


class Unspecific(torch.autograd.Function):
    """A loss that keeps nothing, and lets the gradient of its input go."""

    @staticmethod
    def forward(ctx, hidden):
        ctx.shape = hidden.shape
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx, grad):
        return grad.new_empty(ctx.shape)


def whole_model_on_meta(counts, rows, counted, norm=False):
    """The most bytes of a step of all layers, and the last norm, walked through without values;
    and those from the norm's backward on until its gradient is there."""
    import transformers

    from hcp.integrations.transformers import memory
    from hcp.integrations.transformers.memory.host import Parked
    from hcp.integrations.transformers.memory.layer_bytes import COUNTED
    from hcp.integrations.transformers.memory.live_bytes import LiveBytes

    class OnTheDevice(LiveBytes):
        def _add(self, storage):
            if storage.device.type == "meta":
                super()._add(storage)

    order = ("recompute_offload", "offload", "recompute", "keep")
    words = [word for word, n in zip(order, counts, strict=True) for _ in range(n)]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config(layers=len(words), sizes=WIDE), attn_implementation=COUNTED
        ).bfloat16()
    if not norm:
        model.model.norm = torch.nn.Identity()
    memory.apply(model, memory.Choice(words, counted.chunk_of(rows)))
    of_norm = []
    model.model.norm.register_forward_pre_hook(
        lambda norm, given: given[0].register_hook(lambda grad: of_norm.append(live.most)) and None
    )
    mask = torch.empty(1, 1, rows, rows, device="meta", dtype=torch.bool)
    tokens = torch.zeros(1, rows, device="meta", dtype=torch.long)

    def no_values(*given):
        return None

    with OnTheDevice() as live, mock.patch.object(Parked, "_on_stream", no_values):
        out = model.model(input_ids=tokens, attention_mask=mask, use_cache=False)
        loss = Unspecific.apply(out.last_hidden_state)
        del out
        most, live.most = live.most, live.now
        loss.backward()
    return max(most, live.most), *of_norm


@pytest.mark.parametrize(
    ("counts", "rows"),
    [
        ((0, 0, 6, 0), 120_000),
        ((0, 0, 0, 6), 20_000),
        ((0, 0, 4, 2), 20_000),
        ((0, 0, 4, 2), 120_000),
        ((0, 0, 2, 4), 60_000),
        ((0, 1, 2, 3), 60_000),
        ((0, 2, 0, 4), 20_000),
        ((3, 0, 0, 3), 60_000),
        ((6, 0, 0, 0), 120_000),
        ((0, 6, 0, 0), 20_000),
    ],
)
def test_the_fullest_phase_is_that_of_a_walk_through_all_layers(counts, rows):
    """Without the loss, and what parameters take."""
    step, phases = phases_of(counts, rows)
    predicted = max(size for name, size in phases.items() if "layers" in name or "forward" in name)
    walked, _ = whole_model_on_meta(counts, rows, step.counted)
    assert predicted == pytest.approx(walked, rel=0.03)


@pytest.mark.parametrize("counts", [(3, 2, 0, 1), (2, 1, 3, 0)])
def test_the_backward_of_one_or_two_offloaded_layers_is_counted_as_if_all_their_rows_were_back(
    counts,
):
    """Those of the last one come back one by one: the forward is the fullest, by a little."""
    step, phases = phases_of(counts, 60_000)
    walked, _ = whole_model_on_meta(counts, 60_000, step.counted)
    assert phases["the forward"] == pytest.approx(walked, rel=0.03)
    assert walked < max(phases.values()) < 1.08 * walked


def phases_of(counts, rows, chunk_rows=16_384):
    from hcp.integrations.transformers import memory
    from hcp.integrations.transformers.memory.chooser import Counts, _Step

    model = config(layers=6, sizes=WIDE)
    counted = memory.model_bytes(model, torch.bfloat16, chunk_rows)
    machine = memory.Machine(1, 2**40, offload_state=True)
    step = _Step(model, counted, prices(), machine, rows)
    return step, step.phases(Counts(*counts))


def test_each_row_goes_to_the_host_once(monkeypatch):
    """Not once for each operator that saves a view of it, nor what all layers share."""
    from hcp.integrations.transformers.memory import host

    went = []
    computed = host.LayerCopies.computed

    def note(copies):
        went.append(sum(parked.copy.nbytes for _, parked in copies._known.values()))
        computed(copies)

    monkeypatch.setattr(host.LayerCopies, "computed", note)
    step, _ = phases_of((3, 3, 0, 0), 20_000)
    whole_model_on_meta((3, 3, 0, 0), 20_000, step.counted)
    assert went == pytest.approx([step.again_held] * 3 + [step.kept_held] * 3, rel=1e-3)


def test_the_backward_of_the_last_norm_is_that_of_a_walk():
    step, phases = phases_of((0, 0, 4, 2), 60_000, chunk_rows=0)
    predicted = phases["the backward of the last norm"] - step.weights.head
    assert predicted > max(size for name, size in phases.items() if "layers" in name)
    walked, _ = whole_model_on_meta((0, 0, 4, 2), 60_000, step.counted, norm=True)
    assert predicted == pytest.approx(walked, rel=0.03)


@pytest.mark.parametrize("counts", [(0, 0, 4, 2), (0, 0, 0, 6), (4, 0, 0, 2)])
def test_the_last_norm_in_chunks_is_not_the_fullest(counts):
    step, phases = phases_of(counts, 60_000)
    predicted = phases["the backward of the last norm"] - step.weights.head
    assert predicted < max(size for name, size in phases.items() if "layers" in name)
    _, walked = whole_model_on_meta(counts, 60_000, step.counted, norm=True)
    assert predicted == pytest.approx(walked, rel=0.03)


def most_of_a_real_backward(model, rows):
    """The most bytes on a CPU in the backward of a step on one rank, from when the loss has made
    the gradient of the head's weight, which is there too; and that are left after it."""
    from torch.profiler import ProfilerActivity, profile

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight):
            ctx.grads = [torch.ones_like(hidden), torch.ones_like(weight)]
            return hidden.new_zeros(())

        @staticmethod
        def backward(ctx, grad):
            return ctx.grads.pop(0), ctx.grads.pop(0)

    hidden = model.model(torch.zeros(1, rows, dtype=torch.long), use_cache=False).last_hidden_state
    loss = Loss.apply(hidden, model.lm_head.weight)
    held = hidden.nbytes + model.lm_head.weight.nbytes
    del hidden
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loss.backward()
    events = profiled.profiler.kineto_results.events()
    memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return held + max(itertools.accumulate(size for _, size in memory))


@pytest.mark.parametrize("tied", [False, True])
def test_the_backward_of_the_embedding_is_that_of_a_real_one(tied):
    """The gradient of a head with the same weight waits for that of the embedding."""
    import transformers

    from hcp.integrations.transformers import memory
    from hcp.integrations.transformers.memory.chooser import Counts, _Step

    many = SIZES | {"vocab_size": 200_000}
    model = config(layers=2, sizes=many, tie_word_embeddings=tied)
    counted = memory.model_bytes(model, torch.float32)
    step = _Step(model, counted, prices(), memory.Machine(1, 2**40), 8)
    phase = step.phases(Counts(0, 0, 0, 2))["the backward of the embedding"]
    measured = most_of_a_real_backward(
        transformers.AutoModelForCausalLM.from_config(model), step.rows
    )
    weights_and_moments = 12 * counted.parameters
    assert phase - weights_and_moments == pytest.approx(measured, rel=0.03)


def test_gradients_of_the_micro_batches_before_are_counted_on_one_rank():
    import transformers

    from hcp.integrations.transformers import memory

    made = config(layers=2)
    model = transformers.AutoModelForCausalLM.from_config(made)
    model(torch.zeros(1, 8, dtype=torch.long)).logits.sum().backward()
    counted = memory.model_bytes(made, torch.float32)
    machines = (memory.Machine(1, 2**40, accumulates=some) for some in (False, True))
    one, several = (memory.choose(made, counted, prices(), m, 8).phases for m in machines)
    grads = sum(p.grad.nbytes for p in model.parameters())
    for phase in ("the forward", "the loss"):
        assert several[phase] - one[phase] == grads


@pytest.mark.parametrize("rows", [1500, 30_000, 500_000])
@pytest.mark.parametrize(
    ("word", "chunk_rows"), [("keep", 0), ("recompute", 0), ("recompute", 4096)]
)
def test_the_most_of_a_layer_is_counted_at_few_rows_and_at_many(rows, word, chunk_rows):
    """Which moment is the fullest depends on the rows: that of few has gradients of parameters."""
    from hcp.integrations.transformers import memory
    from hcp.integrations.transformers.memory.layer_bytes import _Layer, _of_one_layer

    model = config(sizes=WIDE)
    counted = memory.model_bytes(model, torch.bfloat16, chunk_rows).of(word, rows)
    layer = _Layer(_of_one_layer(model, torch.bfloat16), torch.bfloat16)
    applied = memory.apply(layer.model, memory.Choice([word], chunk_rows))
    real = layer._count(rows)
    applied.remove()
    assert counted.forward.at(rows) == pytest.approx(real.forward, rel=0.03)
    assert counted.backward.at(rows) == pytest.approx(real.backward, rel=0.03)
    assert counted.in_backward(rows, 2**40) == pytest.approx(2**40 + real.backward_attention)


def test_experts_are_refused_by_name():
    from hcp.integrations.transformers import memory

    experts = config("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    with pytest.raises(ValueError, match=r"does not run on the device meta.*Choice of your own"):
        memory.model_bytes(experts, torch.float32)


# ---- the choice ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    from hcp.integrations.transformers import memory

    made = config(layers=8, sizes=WIDE)
    return made, memory.model_bytes(made, torch.bfloat16)


def chosen(model, length=262_144, ranks=2, gib=64.0, host=64, **changes):
    from hcp.integrations.transformers import memory

    machine = memory.Machine(ranks, int(gib * 2**30), host * 2**30)
    return memory.choose(*model, prices(**changes), machine, length)


def test_all_is_kept_where_it_fits(model):
    found = chosen(model, length=4096)
    assert found.choice.layers == ("keep",) * 8
    assert found.parts["computed again"] == found.parts["waiting for copies"] == 0
    assert "all rows fit" in found.told()


def test_less_memory_never_makes_a_step_faster(model):
    steps = [chosen(model, gib=gib) for gib in (6, 8, 12, 20, 64)]
    for lean, rich in itertools.pairwise(steps):
        assert lean.seconds >= rich.seconds
        assert lean.device_bytes <= lean.limit
    assert len({step.choice for step in steps}) > 2


def test_a_fast_link_offloads_and_a_slow_one_does_not(model):
    fast, slow = (chosen(model, gib=12, host_rate=rate) for rate in (1e12, 1e6))
    assert any(word.endswith("offload") for word in fast.choice.layers)
    assert not any(word.endswith("offload") for word in slow.choice.layers)
    whole = "keep" if "offload" in fast.choice.layers else "recompute"
    rows = model[1].of(whole, fast.rows).held.at(fast.rows)  # those that the backward needs first
    assert fast.parts["waiting for copies"] == pytest.approx(rows / 1e12)
    assert slow.parts["waiting for copies"] == 0


def test_no_more_of_the_host_than_there_is(model):
    found = chosen(model, gib=12, host=0, host_rate=1e12)
    assert found.host_bytes == 0
    assert not any(word.endswith("offload") for word in found.choice.layers)


def test_the_seconds_of_a_step_are_its_sums(model):
    found = chosen(model, length=100_000, ranks=2, gib=64)
    rows, pairs = 50_000, 50_000 * 100_000 / 2
    assert found.rows == rows
    assert found.parts["forward"] == pytest.approx(8 * (rows * 1e-6 + pairs * 1e-10))
    assert found.parts["backward"] == pytest.approx(8 * (rows * 2e-6 + pairs * 3e-10))
    assert found.parts["head and loss"] == pytest.approx(rows * 1e-6)
    assert found.seconds == pytest.approx(sum(found.parts.values()))


def test_the_host_updates_parameters_that_it_keeps(model):
    from hcp.integrations.transformers import memory

    own = model[1].parameters / 2
    machine = memory.Machine(2, 64 * 2**30, 2**36)
    updates = [
        memory.choose(*model, prices(), found, 100_000).parts["update"]
        for found in (machine, replace(machine, offload_state=True))
    ]
    assert updates == pytest.approx([own * 1e-9, own * (1e-8 + 8 / 1e9)], rel=1e-6)


def test_a_length_that_cannot_fit_is_refused_with_the_longest_that_can(model):
    from hcp.integrations.transformers import memory

    machine = memory.Machine(2, 4 * 2**30, 8 * 2**30)
    longest = memory.longest_of(*model, prices(), machine)
    assert longest > 1000
    assert memory.choose(*model, prices(), machine, longest).device_bytes <= 4 * 2**30
    message = rf"length is {longest + 2:,} tokens on 2 ranks, expected {longest:,} or fewer"
    with pytest.raises(ValueError, match=message):
        memory.choose(*model, prices(), machine, longest + 2)
    whole = replace(machine, offload_state=True)
    assert memory.longest_of(*model, prices(), whole) >= longest


def test_a_device_too_small_for_any_length_is_told(model):
    from hcp.integrations.transformers import memory

    message = "length is 512 tokens on 2 ranks, expected 0 or fewer: no length fits, and the least"
    with pytest.raises(ValueError, match=message):
        memory.choose(*model, prices(), memory.Machine(2, 2**20, 2**30), 512)


def test_a_forecast_says_what_is_kept_and_why(model):
    told = chosen(model, gib=8).told()
    assert "262,144 tokens, 131,072 rows a rank: predicted" in told
    assert "GiB a device" in told
    assert "recomputed without attention" in told
    assert "memory is fullest in" in told


def test_the_picture_and_the_page_have_the_numbers_of_the_forecast(monkeypatch, capsys):
    root = Path(__file__).parents[2]
    drawing = runpy.run_path(str(root / "docs" / "pictures" / "draw.py"))
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    bench_long = importlib.import_module("bench_long")
    page = (root / "docs" / "guides" / "long-sequences.md").read_text(encoding="utf-8")
    command = " ".join(page.split())
    for tokens, drawn in drawing["PREDICTED"].items():
        options = drawing["FORECAST"].split()
        monkeypatch.setattr("sys.argv", ["bench_long.py", *options, "--tokens", str(tokens)])
        args = bench_long.arguments()
        found = bench_long.chosen(args, bench_long.config_of(args.model, args.layers, tokens), 8)
        sizes = (found.device_bytes / 2**30, found.host_bytes / 2**30)
        layers = tuple(
            found.choice.layers.count(word)
            for word in ("keep", "offload", "recompute", "recompute_offload")
        )
        assert drawn == (pytest.approx(found.seconds, rel=0.005), *_approximately(sizes), layers)
        if tokens == 2**20:
            assert found.told() in page
            assert f"bench_long.py --forecast 8 --model 8b --tokens {tokens}" in command
    assert capsys.readouterr().out == ""


def _approximately(sizes):
    return [pytest.approx(size, abs=0.06) for size in sizes]


def test_prices_of_rates_are_sums_of_operations():
    from hcp.integrations.transformers import memory

    rates = {"matrices": 1e12, "attention": 2e12, "attention_backward": 4e12}
    rates |= {"host_rate": 1e9, "memory_rate": 28.0, "host_memory_rate": 20.0}
    found = memory.Prices.of_rates(config(sizes=SIZES), **rates)
    weights = 32 * (32 + 16 + 16 + 32 + 3 * 96)
    assert found.row_forward == pytest.approx(2 * weights / 1e12)
    assert found.pair_forward == pytest.approx(4 * 32 / 2e12)
    assert found.pair_backward == pytest.approx(10 * 32 / 4e12)
    assert found.head_row == pytest.approx(6 * 32 * 64 / 1e12)
    assert found.parameter == 1.0
    assert found.host_parameter == 2.0


# ---- prices --------------------------------------------------------------------------------------


def test_prices_are_read_as_they_were_written(tmp_path):
    from hcp.integrations.transformers import memory

    path = tmp_path / "prices.json"
    prices().save(path, {"device": "none"})
    assert memory.Prices.load(path) == prices()
    data = json.loads(path.read_text())
    data["prices"]["host_rate"] = 0
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"prices\.host_rate is 0, expected bytes a second"):
        memory.Prices.load(path)
    data["prices"]["row_forward"] = "fast"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r'prices\.row_forward is "fast", expected a number'):
        memory.Prices.load(path)


def test_a_device_is_measured():
    from hcp.integrations.transformers import memory

    found = memory.measure(config(layers=4), torch.device("cpu"), torch.float32, [64, 256], 1)
    assert [n for n, *_ in found.seconds] == [64, 256]
    assert found.held == []
    for name, value in asdict(found.prices).items():
        assert value >= 0, name
    assert found.prices.host_rate > 0
    with pytest.raises(ValueError, match=r"lengths is \[64\], expected two"):
        memory.measure(config(), torch.device("cpu"), torch.float32, [64, 64])


def test_times_of_a_known_layer_are_fitted_exactly():
    from hcp.integrations.transformers.memory.measure import _fit

    row, pair = _fit([(n, 3e-6 * n + 5e-10 * n * n / 2) for n in (1000, 8000, 64_000)])
    assert row == pytest.approx(3e-6)
    assert pair == pytest.approx(5e-10)
    assert _fit([(100, 1e-4), (200, 2e-4), (400, 4e-4)]) == (pytest.approx(1e-6), pytest.approx(0))


def test_the_command_writes_prices_of_a_model(tmp_path, capsys):
    from hcp.cli import calibrate
    from hcp.integrations.transformers import memory

    config(layers=4).save_pretrained(tmp_path)
    out = tmp_path / "prices.json"
    argv = ["--memory", "--model", str(tmp_path), "--out", str(out), "--max-tokens-per-rank"]
    assert calibrate.main([*argv, "256", "--min-tokens-per-rank", "64", "--repeats", "1"]) == 0
    printed = capsys.readouterr().out
    assert "host_rate" in printed
    assert f"wrote {out}" in printed
    assert memory.Prices.load(out).host_rate > 0
    assert json.loads(out.read_text())["provenance"]["model type"] == "qwen3"
    assert calibrate.main(["--model", "x", "--out", str(out)]) == 2
    assert "model is 'x' without --memory" in capsys.readouterr().err
