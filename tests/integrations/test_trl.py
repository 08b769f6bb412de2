"""TRL's trainers under hcp, beside TRL's own on one rank: the real package on gloo ranks."""

from __future__ import annotations

import contextlib
import warnings
from functools import partial
from importlib import metadata
from unittest import mock

import pytest
import torch
from support.examples import example
from support.finetuning import as_torchrun, fsdp_on_cpus, read_by_rank_0
from support.ranks import run_ranks, try_ranks
from support.tensorboard_writer import METRICS, check

import hcp
from hcp import _versions as versions

pytest.importorskip("trl", reason="pip install '.[trl]'")

FUSED = versions.numbers(metadata.version("trl")) >= (1, 15)
padded = pytest.mark.skipif(not FUSED, reason="hcp's DPO and GRPO need TRL 1.15 or later")

WORDS = [f"w{i}" for i in range(60)]
TRAINING = (13, 2, 40, 7, 30, 3, 9, 55)
CONFIG = {"max_seqlen_per_dp_cp_rank": 64}
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tokenizer():
    """One token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def build():
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(7)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def build_experts():
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(7)
    sizes = SMALL | {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))


def text(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(60, (length,), generator=generator))


def pairs():
    return [
        {"prompt": text(1 + n // 3, n), "completion": " " + text(1 + n // 2, n + 100)}
        for n in TRAINING
    ]


def preferences():
    return [
        {
            "prompt": text(1 + n // 3, n),
            "chosen": " " + text(1 + n // 2, n + 100),
            "rejected": " " + text(2 + n // 4, n + 200),
        }
        for n in TRAINING
    ]


def lora():
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")


OPTIONS = {
    "use_cpu": True,
    "max_steps": 3,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "bf16": False,
}


def losses_of(trainer, **options):
    trainer.train(**options)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def check_metrics(trainer, hcps, sequences):
    """hcp's metrics are in the trainer's own log, with each loss, and nowhere else."""
    for entry in trainer.state.log_history:
        found = {name for name in entry if name.startswith("hcp/")}
        assert found == (METRICS if hcps and "loss" in entry else set())
        if found:
            check({name: entry[name] for name in found}, sequences, ranks=2)


def made(
    kind,
    size,
    folder,
    data,
    hcps,
    options,
    model=None,
    streaming=False,
    prepare=lambda: None,
    **more,
):
    """A trainer of TRL's, or hcp's of that name, with batches of 4 in all. `prepare` is called
    between TRL's arguments and its trainer."""
    import datasets
    import trl

    from hcp.integrations import trl as ours

    as_torchrun(size)
    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_list(data)
    config = getattr(trl, f"{kind}Config")
    chosen = OPTIONS | {"per_device_train_batch_size": 4 // size} | options
    args = config(output_dir=str(folder), **chosen)
    prepare()
    return getattr(ours if hcps else trl, f"{kind}Trainer")(
        model=model or build(),
        args=args,
        train_dataset=dataset.to_iterable_dataset() if streaming else dataset,
        processing_class=tokenizer(),
        **({"cp": hcp.Config(**CONFIG)} if hcps else {}) | more,
    )


@pytest.fixture(autouse=True)
def quiet():
    """TRL's arguments warn of names that Transformers is to give up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


# ---- supervised fine-tuning ----------------------------------------------------------------------

IN_ORDER = {"train_sampling_strategy": "sequential", "max_length": 64}
SFT = {
    "completions": IN_ORDER,
    "whole": IN_ORDER | {"completion_only_loss": False},
    "packed": IN_ORDER | {"packing": True, "max_steps": 1},
    "lora": IN_ORDER,
    "without logits": IN_ORDER,
    "own loss": IN_ORDER,
}


def focal(outputs, labels, num_items_in_batch=None):
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).sum() / num_items_in_batch


def fine_tune(rank, size, folder, case, hcps):
    more = {"peft_config": lora()} if case == "lora" else {}
    if case == "without logits" and hcps:
        more["linear_cross_entropy"] = True
    if case == "own loss":
        more["compute_loss_func"] = focal
    options = SFT[case] | {"eval_strategy": "no"}
    trainer = made("SFT", size, folder, pairs(), hcps, options, eval_dataset=None, **more)
    losses = losses_of(trainer)
    check_metrics(trainer, hcps, 8 if SFT[case].get("packing") else 4)
    names = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    weights = dict(trainer.model.named_parameters())
    return losses, {name: weights[name].detach().clone() for name in names}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            marks=[
                pytest.mark.skipif(
                    case == "without logits" and not hasattr(torch.nn, "LinearCrossEntropyOptions"),
                    reason="torch has it from 2.13 on",
                ),
                pytest.mark.skipif(
                    case == "whole"
                    and versions.numbers(metadata.version("transformers")) < (5, 12),
                    reason="an older Transformers also divides by first tokens, without a loss",
                ),
            ],
        )
        for case in SFT
    ],
)
def test_supervised_fine_tuning_takes_trls_steps(case, tmp_path):
    ((expected, weights),) = run_ranks(1, fine_tune, tmp_path / "1", case, False)
    for losses, found in run_ranks(2, fine_tune, tmp_path / "2", case, True):
        assert len(losses) == len(expected)
        assert losses == pytest.approx(expected, abs=1e-4)
        assert max(float((found[n] - w).abs().max()) for n, w in weights.items()) < 2e-3


def go_on(rank, size, folder):
    """A LoRA on a stream: four steps; and two more after a checkpoint of the second."""
    options = IN_ORDER | {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    runs = []
    for resumed in (None, str(folder / "checkpoint-2")):
        trainer = made(
            "SFT", size, folder, pairs(), True, options, peft_config=lora(), streaming=True
        )
        runs.append(losses_of(trainer, resume_from_checkpoint=resumed))
    return runs


@pytest.mark.skipif(
    versions.numbers(metadata.version("transformers")) < (5, 18),
    reason="Transformers up to 5.17 cannot load an optimizer's state onto several ranks of a CPU",
)
def test_a_checkpoint_of_a_lora_goes_on_in_a_stream(tmp_path):
    for straight, resumed in run_ranks(2, go_on, tmp_path):
        assert len(straight) == 4
        assert resumed == pytest.approx(straight, abs=1e-6)


# ---- padded batches ------------------------------------------------------------------------------

DPO = {
    "sigmoid": {"precompute_ref_log_probs": False},
    "ipo and sft": {"loss_type": ["ipo", "sft"], "ld_alpha": 0.5},
    "accumulated": {"gradient_accumulation_steps": 2, "gradient_checkpointing": False},
    "lora": {"gradient_checkpointing": False},
}


def prefer(rank, size, folder, case, hcps):
    more = {"peft_config": lora()} if case == "lora" else {"ref_model": build()}
    options = {"train_sampling_strategy": "sequential", "beta": 0.5} | DPO[case]
    options["eval_strategy"] = "steps"
    options |= {"eval_steps": 3, "per_device_eval_batch_size": 4 // size}
    import datasets

    held_out = datasets.Dataset.from_list(preferences()[4:])
    trainer = made("DPO", size, folder, preferences(), hcps, options, eval_dataset=held_out, **more)
    losses = losses_of(trainer)
    check_metrics(trainer, hcps, 8)  # of 4 pairs
    history = trainer.state.log_history
    for key in ("rewards/margins", "logps/chosen", "entropy", "eval_loss", "eval_logps/rejected"):
        losses += [entry[key] for entry in history if key in entry]
    return losses


@padded
@pytest.mark.parametrize("case", DPO)
def test_preference_optimization_takes_trls_steps(case, tmp_path):
    theirs = run_ranks(2, prefer, tmp_path / "theirs", case, False)
    ours = run_ranks(2, prefer, tmp_path / "ours", case, True)
    assert len(theirs[0]) > 10
    for expected, found in zip(theirs, ours, strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-3)


REFERENCES = {
    "a model": lambda: {"ref_model": build()},
    "without adapters": lambda: {"peft_config": lora()},
}


def sharded(loads):
    """FSDP2, where rank 0 alone reads the weights or every rank does."""
    config = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "version": 2}
    return {"fsdp": True, "fsdp_config": config | {"cpu_ram_efficient_loading": loads}}


def prefer_sharded(rank, size, folder, reference, hcps, loads=False):
    """TRL's own losses under DDP, or hcp's with parameters that FSDP2 shards over the ranks."""
    options = {"train_sampling_strategy": "sequential", "beta": 0.5}
    options |= {"gradient_checkpointing": False, "eval_strategy": "no"}
    options |= sharded(loads) if hcps else {}
    more = REFERENCES[reference]()
    with contextlib.ExitStack() as stack:
        prepare = partial(stack.enter_context, fsdp_on_cpus()) if hcps else (lambda: None)
        trainer = made(
            *("DPO", size, folder, preferences(), hcps, options),
            model=read_by_rank_0(rank, build()) if loads else None,
            prepare=prepare,
            **more,
        )
        if loads:
            base = trainer.model.get_base_model() if "peft_config" in more else trainer.model
            with pytest.raises(ValueError, match=r"rank 0 alone has its weights"):
                base(fused_lm_head=True)
        losses = losses_of(trainer)
        kinds = {type(p).__name__ for p in trainer.model.parameters()}
    return losses, kinds


@padded
@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("reference", REFERENCES)
def test_preferences_under_fsdp2_take_trls_steps(reference, loads, tmp_path):
    """Accelerate takes FSDP2 on accelerators only; see fsdp_on_cpus."""
    theirs = run_ranks(2, prefer_sharded, tmp_path / "theirs", reference, False)
    ours = run_ranks(2, prefer_sharded, tmp_path / "ours", reference, True, loads)
    for (expected, whole), (found, sharded) in zip(theirs, ours, strict=True):
        assert "DTensor" in sharded - whole
        assert len(found) == 3
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-3)


def reward(completions, **columns):
    return [float(len(set(text.split()))) for text in completions]


def optimize(rank, size, folder, saved, hcps, trees=False):
    """Losses, and each call's log-probabilities, with whether they train."""
    options = {
        "num_generations": 4,
        "max_completion_length": 12,
        "beta": 0.5,
        "num_iterations": 2,  # asks for those of the old policy
        "max_steps": 4,
    }
    prompts = [{"prompt": pair["prompt"]} for pair in pairs()]
    model = build()
    model.config._name_or_path = str(saved)  # where TRL loads the reference from
    more = {"trees": trees} if trees else {}
    trainer = made(
        "GRPO", size, folder, prompts, hcps, options, model=model, reward_funcs=reward, **more
    )
    seen = []
    own = trainer._get_per_token_logps_and_entropies

    def watched(*positional, **keywords):
        found = own(*positional, **keywords)
        seen.append((torch.is_grad_enabled(), found[0].detach().flatten().tolist()))
        return found

    trainer._get_per_token_logps_and_entropies = watched
    losses = losses_of(trainer)
    if not trees:
        check_metrics(trainer, hcps, 4)
    return losses, seen


@padded
@pytest.mark.parametrize("trees", [False, True])
def test_group_relative_policy_optimization_takes_trls_steps(trees, tmp_path):
    build().save_pretrained(saved := tmp_path / "reference")
    theirs = run_ranks(2, optimize, tmp_path / "theirs", saved, False)
    ours = run_ranks(2, optimize, tmp_path / "ours", saved, True, trees)
    for (expected, said), (losses, found) in zip(theirs, ours, strict=True):
        assert losses == pytest.approx(expected, abs=1e-3)
        assert {trains for trains, _ in said} == {True, False}
        assert [trains for trains, _ in found] == [trains for trains, _ in said]
        for (_, a), (_, b) in zip(found, said, strict=True):
            assert a == pytest.approx(b, abs=1e-2)


def refuse_a_reference_on_meta(rank, size, folder):
    with contextlib.ExitStack() as stack:
        made(
            *("DPO", size, folder, preferences(), True, sharded(True)),
            model=read_by_rank_0(rank, build()),
            prepare=partial(stack.enter_context, fsdp_on_cpus()),
            ref_model=read_by_rank_0(rank, build()),
        )


@padded
def test_a_reference_without_weights_is_refused_on_all_ranks(tmp_path):
    for refused in try_ranks(2, refuse_a_reference_on_meta, tmp_path):
        assert "ValueError: 21 weights of the reference model are on the device meta" in str(
            refused
        )


def optimize_sharded(rank, size, folder, hcps, loads=False):
    """TRL's own losses under DDP, or hcp's with parameters that FSDP2 shards over the ranks."""
    options = {"num_generations": 4, "max_completion_length": 12, "num_iterations": 2}
    options |= {"beta": 0.0, "max_steps": 4} | (sharded(loads) if hcps else {})
    model = read_by_rank_0(rank, build()) if loads else None
    prompts = [{"prompt": pair["prompt"]} for pair in pairs()]
    with contextlib.ExitStack() as stack:
        prepare = partial(stack.enter_context, fsdp_on_cpus()) if hcps else (lambda: None)
        given = ("GRPO", size, folder, prompts, hcps, options)
        trainer = made(*given, model=model, prepare=prepare, reward_funcs=reward)
        losses = losses_of(trainer)
        kinds = {type(p).__name__ for p in trainer.model.parameters()}
    return losses, kinds


@padded
@pytest.mark.parametrize("loads", [False, True])
def test_policies_under_fsdp2_take_trls_steps(loads, tmp_path):
    """Accelerate takes FSDP2 on accelerators only; see fsdp_on_cpus."""
    theirs = run_ranks(2, optimize_sharded, tmp_path / "theirs", False)
    ours = run_ranks(2, optimize_sharded, tmp_path / "ours", True, loads)
    for (expected, whole), (found, sharded) in zip(theirs, ours, strict=True):
        assert "DTensor" in sharded - whole
        assert len(found) == 4
        assert found == pytest.approx(expected, abs=1e-3)


# ---- experts -------------------------------------------------------------------------------------

BALANCE = 0.5


def fine_tune_experts(rank, size, folder, hcps, options):
    given = IN_ORDER | {"router_aux_loss_coef": BALANCE, "gradient_accumulation_steps": 1} | options
    trainer = made("SFT", size, folder, pairs(), hcps, given, model=build_experts())
    return losses_of(trainer), weights_of(trainer.model)


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_the_loss_of_experts_in_fine_tuning_is_trls_of_one_sequence_in_a_batch(tmp_path):
    one = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    ((expected, weights),) = run_ranks(1, fine_tune_experts, tmp_path / "1", False, one)
    without = {"router_aux_loss_coef": 0.0}
    plain, _ = run_ranks(2, fine_tune_experts, tmp_path / "0", True, without)[0]
    assert expected[0] - plain[0] > BALANCE  # equal loads have the experts of a token, 2
    for losses, found in run_ranks(2, fine_tune_experts, tmp_path / "2", True, {}):
        assert losses == pytest.approx(expected, abs=1e-4)
        assert max(float((found[n] - w).abs().max()) for n, w in weights.items()) < 2e-3


def by_sequence(own):
    """Transformers' loss of routers, of each sequence of a padded batch alone: their mean."""

    def mean(router_logits, experts, chosen, mask):
        size, length = mask.shape
        rows = [x.view(size, length, -1) for x in router_logits]
        each = [
            own(tuple(x[i][mask[i].bool()] for x in rows), experts, chosen) for i in range(size)
        ]
        return torch.stack(each).mean()

    return mean


def prefer_experts(rank, size, folder, hcps, coefficient, trees=False):
    from transformers.models.mixtral import modeling_mixtral

    options = {"train_sampling_strategy": "sequential", "beta": 0.5, "max_steps": 2}
    options |= {"router_aux_loss_coef": coefficient}
    trainer = made(
        *("DPO", size, folder, preferences(), hcps, options),
        model=build_experts(),
        ref_model=build_experts(),
        **({"trees": trees} if hcps else {}),
    )
    own = by_sequence(modeling_mixtral.load_balancing_loss_func)
    with mock.patch.object(modeling_mixtral, "load_balancing_loss_func", None if hcps else own):
        losses = losses_of(trainer)
    logged = [entry["aux_loss"] for entry in trainer.state.log_history if "aux_loss" in entry]
    return losses, logged, weights_of(trainer.model)


@padded
@pytest.mark.parametrize("trees", [False, True])
def test_the_loss_of_experts_in_preference_optimization_is_that_of_each_sequence(trees, tmp_path):
    """TRL's own of each alone, of one rank, whose batch has the sequences of both."""
    ((expected, logged, weights),) = run_ranks(1, prefer_experts, tmp_path / "1", False, BALANCE)
    plain, *_ = run_ranks(1, prefer_experts, tmp_path / "0", False, 0.0)[0]
    assert expected[0] - plain[0] > BALANCE
    results = run_ranks(2, prefer_experts, tmp_path / "2", True, BALANCE, trees)
    assert sum(losses[0] for losses, *_ in results) / 2 == pytest.approx(expected[0], abs=1e-3)
    for _, aux, found in results:
        assert aux == pytest.approx(logged, abs=1e-3)
        assert max(float((found[n] - w).abs().max()) for n, w in weights.items()) < 2e-3


# ---- logs ----------------------------------------------------------------------------------------


def train_twice(rank, size, folder, kind):
    """Tokens of each logged mean, of the first training and of the second."""
    data = pairs() if kind == "SFT" else preferences()
    options = {"train_sampling_strategy": "sequential", "logging_steps": 2}
    more = {"ref_model": build()} if kind == "DPO" else {}
    trainer = made(kind, size, folder, data, True, options, **more)
    found = []
    for _ in range(2):
        trainer.train()
        history = trainer.state.log_history
        found.append([entry["hcp/tokens"] for entry in history if "hcp/tokens" in entry])
    return found


@pytest.mark.parametrize("kind", ["SFT", pytest.param("DPO", marks=padded)])
def test_the_log_of_a_training_has_no_steps_of_the_one_before(kind, tmp_path):
    """Of three steps, the log of every second one leaves out the last."""
    ((first, second),) = run_ranks(1, train_twice, tmp_path, kind)
    assert len(first) == 1
    assert second[-1] == first[0]


# ---- refused -------------------------------------------------------------------------------------


def refuse(rank, size, folder):
    make = partial(made, size=size, folder=folder, hcps=True)
    said = r"SFTConfig\.loss_type is 'dft', expected nll or chunked_nll: .* give compute_loss_func"
    with pytest.raises(ValueError, match=said):  # TRL has had this loss in two ways
        make("SFT", data=pairs(), options={"loss_type": "dft"})
    with pytest.raises(
        ValueError, match="linear_cross_entropy is True with compute_loss_func, exp"
    ):
        make("SFT", data=pairs(), options={}, compute_loss_func=focal, linear_cross_entropy=True)
    with pytest.raises(ValueError, match="pad_to_multiple_of is 64, expected None: hcp packs"):
        make("SFT", data=pairs(), options={"pad_to_multiple_of": 64})
    best = {"metric_for_best_model": "mean_token_accuracy"}
    with pytest.raises(ValueError, match="is 'mean_token_accuracy', expected 'eval_loss' or one"):
        make("SFT", data=pairs(), options=best)
    masked = [{"input_ids": [5, 6, 7], "labels": [-100] * 3}] * 4
    with pytest.raises(ValueError, match=r"has 0 samples once TRL has prepared it, .*\(64\) alone"):
        make("SFT", data=masked, options={"max_length": 64})
    model = build()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"layers.0.self_attn.attention_dropout 0.1, expected 0"):
        make("SFT", data=pairs(), options={}, model=model)
    raw = make("SFT", data=pairs(), options={"dataset_kwargs": {"skip_prepare_dataset": True}})
    with pytest.raises(
        ValueError, match=r"^dataset\[\d\]: a sample has \['completion', 'prompt'\]"
    ):
        raw.train()


@pytest.mark.parametrize(
    ("rows", "more", "gib"),
    [
        (2**24, {}, "4.0 GiB"),
        (2**24 - 1, {}, ""),
        (2**25, {"linear_cross_entropy": True}, ""),
        (2**25, {"compute_loss_func": focal}, ""),
    ],
)
def test_large_logits_are_told_of_where_trl_makes_none(rows, more, gib, tmp_path):
    if more.get("linear_cross_entropy") and not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        pytest.skip("torch has it from 2.13 on")
    (told,) = run_ranks(1, tell_of_logits, tmp_path, rows, more)
    assert len(told) == bool(gib)
    assert all(gib in each and "64 words" in each and f"{rows:,} rows" in each for each in told)


def tell_of_logits(rank, size, folder, rows, more):
    told = []
    with mock.patch("hcp.integrations.trl.sft._log.warning", lambda x, *y: told.append(x % y)):
        made("SFT", size, folder, pairs(), True, {}, cp=hcp.Config(rows), **more)
    return told


def refuse_padded(rank, size, folder):
    make = partial(made, size=size, folder=folder, hcps=True)
    experts = build_experts()
    experts.config.output_router_logits = True  # which TRL leaves as it is
    with pytest.raises(ValueError, match=r"output_router_logits is True, .* or in TRL's options"):
        make("DPO", data=preferences(), options={}, model=experts, ref_model=build())
    config = hcp.Config(**CONFIG, eval_context_parallel_size=1)
    with pytest.raises(ValueError, match="eval_context_parallel_size is 1, expected None: DPO"):
        make("DPO", data=preferences(), options={}, ref_model=build(), cp=config)
    model = build()
    make("DPO", data=preferences(), options={}, model=model, ref_model=build())
    tokens = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="was called with pixel_values, expected a batch of text"):
        model(input_ids=tokens, labels=tokens, fused_lm_head=True, pixel_values=tokens)


def test_what_would_be_wrong_is_refused(tmp_path):
    run_ranks(1, refuse, tmp_path)


@padded
def test_padded_batches_that_would_be_wrong_are_refused(tmp_path):
    run_ranks(1, refuse_padded, tmp_path)


@pytest.mark.parametrize("name", ["DPOTrainer", "GRPOTrainer"])
def test_a_trl_without_its_fused_head_refuses_by_name_what_needs_it(name, monkeypatch):
    from hcp.integrations import trl as ours

    lost = "trl.trainer.utils:add_fused_lm_head"
    monkeypatch.setattr(versions, "has_seam", lambda seam: seam != lost)
    said = rf"^trl is .*, which has no {lost}, which hcp's {name} uses: expected 1\.15 or later"
    with pytest.raises(ImportError, match=said):
        getattr(ours, name)
    assert ours.SFTTrainer
    with pytest.raises(AttributeError, match="has no attribute 'KTOTrainer'"):
        _ = ours.KTOTrainer


def padded_batches(rank, size):
    """Log-probabilities of rows with other lengths and sides of padding, and of the rows alone."""
    from trl.trainer.utils import add_fused_lm_head

    from hcp.integrations.loader import domain
    from hcp.integrations.transformers import register_hcp_attention
    from hcp.integrations.trl.padded import spread_padded
    from hcp.tools.loggers import MeanMetrics

    model, own = build(), build()
    for each in (model, own):
        add_fused_lm_head(each)
    register_hcp_attention(model)
    spread_padded(
        model, hcp.Config(**CONFIG, sync="step"), domain(None, size, "cpu"), None, MeanMetrics()
    )
    draw = torch.Generator().manual_seed(rank)
    tokens = torch.randint(4, 64, (4, 9), generator=draw)
    mask = torch.zeros(4, 9, dtype=torch.long)
    mask[0, :5] = mask[1, 2:] = mask[3, 8:] = 1  # the third has padding only
    labels = tokens.masked_fill(mask == 0, -100)
    labels[0, :2] = -100
    given = {"input_ids": tokens.int(), "labels": labels, "fused_lm_head": True}
    with torch.no_grad():
        for form in (mask, mask.bool(), mask.float()):
            found = model(**given, attention_mask=form).log_probs
            assert not found[2].any()
            for row, kept in ((0, slice(0, 5)), (1, slice(2, 9))):
                alone = {
                    name: x[row, kept][None]
                    for name, x in (("input_ids", tokens), ("labels", labels))
                }
                expected = own(**alone, fused_lm_head=True).log_probs[0]
                torch.testing.assert_close(
                    found[row, kept][: len(expected)], expected, atol=1e-4, rtol=0
                )
        for wrong in (mask[:, None], mask * 2):
            with pytest.raises(ValueError, match=r"attention_mask has shape .* expected \(4, 9\)"):
                model(**given, attention_mask=wrong)


def shared_batches(rank, size):
    """Losses and gradients of padded batches that begin alike: as trees, and by the model alone,
    in float64."""
    import transformers
    from trl.trainer.utils import add_fused_lm_head

    from hcp.integrations.loader import domain
    from hcp.integrations.transformers import register_hcp_attention
    from hcp.integrations.trl.padded import spread_padded
    from hcp.tools.loggers import MeanMetrics

    transformers.logging.set_verbosity_error()

    def qwen():
        torch.manual_seed(7)
        made = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, head_dim=8)).double()
        for module in list(made.modules()):
            for name, norm in module.named_children():
                if type(norm).__name__ == "Qwen3RMSNorm":  # which computes in float32
                    wide = torch.nn.RMSNorm(norm.weight.shape, eps=1e-6, dtype=torch.float64)
                    setattr(module, name, wide)
        add_fused_lm_head(made)
        return made

    model, own, means = qwen(), qwen(), MeanMetrics()
    register_hcp_attention(model)
    config = hcp.Config(56 // size + 8, sync="step")
    spread_padded(model, config, domain(None, size, "cpu"), None, means, {"min_shared": 2})
    draw = torch.Generator().manual_seed(rank)
    tokens = torch.randint(4, 64, (4, 30), generator=draw)
    tokens[1:3, :20] = tokens[0, :20]  # one prompt, and answers of which two begin alike
    tokens[2, :25] = tokens[1, :25]
    mask = torch.ones_like(tokens)
    mask[1, 28:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[:3, :20] = -100
    labels[2, 22] = -100  # of a row that another answer shares, which has a target there
    factors = torch.randn(4, 29, generator=draw, dtype=torch.float64)
    given = {"input_ids": tokens, "labels": labels, "attention_mask": mask}
    losses = []
    for each in (model, own):
        said = each(**given, fused_lm_head=True)
        loss = (said.log_probs * factors).sum()
        loss.backward()
        losses.append(loss.item())
    for one, other in zip(model.parameters(), own.parameters(), strict=True):
        torch.distributed.all_reduce(one.grad)
        torch.distributed.all_reduce(other.grad)
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=0)  # TRL's head
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)  # computes in float32
    return means.take()


@padded
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_batches_that_begin_alike_are_computed_as_trees(ranks):
    metrics = run_ranks(ranks, shared_batches)
    assert metrics[0]["hcp/sequences"] == 2 * ranks  # of four each


@padded
def test_labels_that_are_no_next_tokens_are_no_tree():
    from hcp.integrations.trl.padded import _tree_samples

    sample = {"input_ids": torch.tensor([4, 5, 6]), "labels": torch.tensor([5, 7, -100])}
    with pytest.raises(ValueError, match="labels are other tokens than those that follow"):
        _tree_samples(hcp.prefix_trees([sample["input_ids"]]), [sample], [sample["labels"]])


@padded
@pytest.mark.parametrize("ranks", [1, 2])
def test_padding_on_any_side_is_left_out_and_other_masks_are_refused(ranks):
    run_ranks(ranks, padded_batches)


def test_columns_that_trl_would_read_are_read():
    from hcp.integrations.trl.sft import prepared_samples

    item = {"input_ids": [5, 6, 7], "completion_mask": [0, 1, 0], "attention_mask": [1, 1, 1]}
    (sample,) = prepared_samples(item)
    assert sample["labels"].tolist() == [6, -100, -100]
    (sample,) = prepared_samples(item, completion_only=False)
    assert sample["labels"].tolist() == [6, 7, -100]
    (sample,) = prepared_samples(item | {"labels": [5, -100, 7]})  # TRL made them
    assert sample["labels"].tolist() == [-100, 7, -100]


def test_positions_that_restart_are_documents_where_trl_has_not_packed():
    from hcp.integrations.trl.sft import prepared_samples

    item = {"input_ids": [5, 6, 7, 8], "position_ids": [0, 1, 0, 1], "text": "removed"}
    assert [s["input_ids"].tolist() for s in prepared_samples(item)] == [[5, 6], [7, 8]]
    packed = item | {"seq_lengths": [3, 1]}
    assert [len(s["input_ids"]) for s in prepared_samples(packed)] == [3, 1]


def run_example(rank, size, folder, lora):
    import datasets
    import transformers

    as_torchrun(size)
    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    module = example("sft_trl")
    assert size == module.WORLD
    return module.train(lora, str(folder), steps=2)


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_the_example_has_the_losses_of_one_rank(lora, tmp_path):
    (alone,) = run_ranks(1, run_example, tmp_path, lora, timeout=280)
    assert len(alone) == 2
    for losses in run_ranks(2, run_example, tmp_path, lora, timeout=280)[:1]:
        assert losses == pytest.approx(alone, abs=2e-3)  # logged with four digits
