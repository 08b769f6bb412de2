"""Vision-language models of Transformers: images are encoded once, wherever their tokens are."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from support.finetuning import as_torchrun
from support.ranks import run_ranks
from torch.nn import functional as F

import hcp

pytest.importorskip("transformers", reason="pip install '.[transformers]'")

from support.sweep import difference, gradients, summed

IMAGE, TOKENS = 7, 4
"""The token that stands for a part of an image, and how many do for one."""
TEXT = {
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
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
}
# The kinds of both parts, the size of a patch, and what else a configuration has.
MODELS = {
    "llava": ("clip_vision_model", "llama", 8, {"image_token_id": IMAGE}),
    "internvl": ("internvl_vision", "qwen2", [4, 4], {"image_token_id": IMAGE}),
    "aya_vision": ("siglip_vision_model", "cohere", 4, {"image_token_index": IMAGE}),
}
REFUSED = {
    "paligemma": (
        "siglip_vision_model",
        "gemma",
        8,
        {"image_token_index": IMAGE, "projection_dim": 32},
    ),
    "glm4v": (None, "glm4v_text", 4, {"image_token_id": IMAGE}),
}
QWEN = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "intermediate_size": 48}
# What the vision parts of Qwen's models have besides, and the width of a patch's row.
OF_AXES = {
    "qwen2_vl": {"embed_dim": 16},
    "qwen2_5_vl": {"out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl": {
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    },
}
RULES = {"pixel_values": hcp.Payload("even", tokens="is_image")}


def build(kind):
    import transformers

    transformers.logging.set_verbosity_error()
    vision, text, patch, options = (MODELS | REFUSED)[kind]
    size = [16, 16] if isinstance(patch, list) else 16
    seen = VISION | {"model_type": vision, "patch_size": patch, "image_size": size}
    if vision is None:  # Qwen's names
        seen = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
    config = transformers.CONFIG_MAPPING[kind](
        vision_config=seen,
        text_config=TEXT | {"model_type": text},
        **options,
    )
    torch.manual_seed(7)
    build = transformers.AutoModelForImageTextToText.from_config
    return build(config, attn_implementation="eager").double().eval()


def samples():
    """Texts with 3, 0, 1 and 3 images; two images may follow each other."""
    draw = torch.Generator().manual_seed(3)
    made = []
    for images in ([1, 2], [], [1], [3]):
        tokens = torch.randint(8, 64, (5,), generator=draw)
        for n in images:
            text = torch.randint(8, 64, (4,), generator=draw)
            tokens = torch.cat((tokens, torch.full((TOKENS * n,), IMAGE), text))
        pixels = torch.randn(sum(images), 3, 16, 16, generator=draw, dtype=torch.float64)
        made.append(
            {
                "input_ids": tokens,
                "labels": tokens.roll(-1),
                "is_image": tokens == IMAGE,
                "loss_mask": (torch.arange(len(tokens)) < len(tokens) - 1).double(),
                "pixel_values": pixels,
            }
        )
    return made


def alone(model, dataset):
    """The mean loss and its gradients, of the model's own forward of each sample."""
    losses = []
    for sample in dataset:
        images = {"pixel_values": sample["pixel_values"]} if len(sample["pixel_values"]) else {}
        logits = model(sample["input_ids"][None], use_cache=False, **images).logits[0]
        losses.append(F.cross_entropy(logits, sample["labels"], reduction="none")[:-1])
    loss = torch.cat(losses).mean()
    loss.backward()
    return loss.item(), gradients(model)


def build_of_axes(kind):
    import transformers

    transformers.logging.set_verbosity_error()
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = transformers.CONFIG_MAPPING[kind](
        vision_config=QWEN | OF_AXES[kind],
        text_config=TEXT | {"model_type": f"{kind}_text", "head_dim": 8, "rope_parameters": rope},
        image_token_id=IMAGE,
        vision_start_token_id=5,
        video_token_id=6,
    )
    torch.manual_seed(7)
    build = transformers.AutoModelForImageTextToText.from_config
    return build(config, attn_implementation="eager").double().eval()


def items_of_axes():
    """What a processor makes of texts with images of several sizes; 4 patches are a token."""
    draw, made = torch.Generator().manual_seed(3), []
    for sizes in ([[1, 4, 6], [1, 2, 2]], [], [[1, 2, 8]]):
        tokens = torch.randint(8, 64, (5,), generator=draw)
        for _, height, width in sizes:
            text = torch.randint(8, 64, (4,), generator=draw)
            tokens = torch.cat((tokens, torch.full((height * width // 4,), IMAGE), text))
        patches = sum(height * width for _, height, width in sizes)
        pixels = torch.randn(patches, 3 * 2 * 16, generator=draw, dtype=torch.float64)
        images = {"pixel_values": pixels, "image_grid_thw": torch.tensor(sizes)}
        made.append(
            {"input_ids": tokens, "mm_token_type_ids": (tokens == IMAGE).int()}
            | (images if sizes else {})
        )
    return made


def alone_of_axes(model, items):
    losses = []
    for item in items:
        given = {name: value[None] for name, value in item.items() if "ids" in name}
        images = {name: value for name, value in item.items() if name not in given}
        logits = model(**given, **images, use_cache=False).logits[0, :-1]
        losses.append(F.cross_entropy(logits, item["input_ids"][1:], reduction="none"))
    loss = torch.cat(losses).mean()
    loss.backward()
    return loss.item(), gradients(model)


def planned_of_axes(groups, model, items):
    from hcp.integrations.transformers import (
        causal_lm_loss,
        image_fields,
        image_inputs,
        image_sample,
    )

    rank, ranks, model = groups.transport.rank, groups.transport.size, copy.deepcopy(model)
    rules = image_fields(model)
    loaded = [image_sample(model, item) for item in items[rank::ranks]]
    for sample in loaded:
        sample["pixel_values"] = sample["pixel_values"].double()
    lengths, sources, own = hcp.gather_lengths(loaded, groups, fields=rules)
    plan = hcp.plan(lengths, ranks=ranks, max_tokens_per_rank=42 // ranks)
    total, encoded = 0.0, 0
    for cp, local in hcp.dispatch(plan, own, sources, groups, fields=rules):
        given = image_inputs(model, cp, local)
        loss = causal_lm_loss(model, cp, local, grad_reduce="sum", inputs=given)
        loss.backward()
        total += loss.item()
        encoded += len(local.image_grid_thw)
    return total, gradients(model), encoded


def known(kind):
    """A kind that the installed Transformers may be too old for."""
    import transformers

    model = transformers.Qwen3VLForConditionalGeneration
    old = "mm_encoder_outputs" not in inspect.signature(model.forward).parameters
    why = "the model takes no encoded images in this Transformers"
    return pytest.param(kind, marks=pytest.mark.skipif(old and kind == "qwen3_vl", reason=why))


@pytest.mark.parametrize("kind", map(known, OF_AXES))
def test_image_tokens_with_positions_of_three_axes(kind):
    from hcp.integrations.transformers import register_for_images

    model, items = build_of_axes(kind), items_of_axes()
    loss, expected = alone_of_axes(model, items)
    model.zero_grad()
    register_for_images(model)
    ((on_one, of_one, _),) = hcp.loopback(1, lambda groups: planned_of_axes(groups, model, items))
    assert on_one == pytest.approx(loss, abs=1e-6)  # rotary embedding is float32 in the models
    assert difference(of_one, expected) < 1e-5
    found = hcp.loopback(3, lambda groups: planned_of_axes(groups, model, items))
    assert sum(part for part, _, _ in found) == pytest.approx(on_one, abs=1e-7)
    assert difference(summed([part for _, part, _ in found]), of_one) < 1e-6
    assert sum(images for _, _, images in found) == 3  # each is encoded once


def packed(model, items, axes):
    """One row of all items, as a collator packs them: with positions of 3 or 4 rows, or none."""
    from hcp.integrations.transformers import image_sample

    row = {name: [item[name] for item in items if name in item] for name in items[0]}
    row = {name: torch.cat(values) for name, values in row.items()}
    positions = [image_sample(model, item)["rope_positions"].T for item in items]
    counted = torch.cat([torch.arange(len(item["input_ids"])) for item in items])
    if axes == 3:
        return {**row, "position_ids": torch.cat(positions, 1)}
    if axes == 4:
        return {**row, "position_ids": torch.cat((counted[None], torch.cat(positions, 1)))}
    return {**row, "seq_lengths": [len(item["input_ids"]) for item in items]}


def equal(found, expected):
    return len(found) == len(expected) and all(
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("axes", [0, 3, 4])
def test_a_packed_row_of_texts_with_images_is_taken_apart(axes):
    from hcp.integrations.transformers import image_sample, image_samples, register_for_images

    model, items = build_of_axes("qwen2_5_vl"), items_of_axes()
    row = packed(model, items, axes)
    samples = image_samples(model, row)
    assert equal(samples, [image_sample(model, item) for item in items])
    with pytest.raises(ValueError, match="a sample has 3 documents, expected one"):
        image_sample(model, row)
    with pytest.raises(ValueError, match=r"patches, .* expected the same number"):
        image_samples(model, row | {"image_grid_thw": row["image_grid_thw"].flip(0)})

    loss, expected = alone_of_axes(model, items)
    model.zero_grad()
    register_for_images(model)
    ((on_one, of_one, _),) = hcp.loopback(1, lambda groups: planned_of_axes(groups, model, items))
    of_row = [{**items[i], "position_ids": samples[i]["rope_positions"].T} for i in range(3)]
    found = hcp.loopback(3, lambda groups: planned_of_axes(groups, model, of_row))
    assert sum(part for part, _, _ in found) == pytest.approx(loss, abs=1e-6)
    assert difference(summed([part for _, part, _ in found]), expected) < 1e-5
    assert abs(sum(part for part, _, _ in found) - on_one) < 1e-7
    assert difference(summed([part for _, part, _ in found]), of_one) < 1e-6


def test_images_of_one_shape_go_to_the_documents_of_their_tokens():
    from hcp.integrations.transformers import image_sample, image_samples

    model, made = build("llava"), samples()
    items = [{name: sample[name] for name in ("input_ids", "pixel_values")} for sample in made]
    row = {name: torch.cat([item[name] for item in items]) for name in items[0]}
    row["attention_mask"] = [i for i, item in enumerate(items, 1) for _ in item["input_ids"]]
    assert equal(image_samples(model, row), [image_sample(model, item) for item in items])
    with pytest.raises(
        ValueError, match=r"\[12, 0, 4, 12\] tokens of images, and the row 6 images"
    ):
        image_samples(model, row | {"pixel_values": row["pixel_values"][:6]})


def test_positions_of_axes_are_refused_by_a_model_that_has_none():
    from transformers import LlamaConfig, LlamaForCausalLM

    from hcp.integrations.columns import causal_lm_samples
    from hcp.integrations.transformers import causal_lm_losses

    (sample,) = causal_lm_samples({"input_ids": [5, 6], "position_ids": [[0, 1]] * 3})

    def refuse(groups):
        plan = hcp.plan([2], ranks=1, max_tokens_per_rank=4)
        ((cp, local),) = hcp.dispatch(plan, [sample], [0], groups)
        small = {name: TEXT[name] for name in TEXT if name != "initializer_range"}
        with pytest.raises(ValueError, match="positions of three axes, expected a model of one of"):
            causal_lm_losses(LlamaForCausalLM(LlamaConfig(**small)), cp, local)

    hcp.loopback(1, refuse)


@pytest.mark.parametrize("kind", [known("qwen3_vl")])
def test_encoded_images_are_handed_over_as_the_model_itself_returns_them(kind):
    """Wrappers of models copy arguments, and models hand these on as a part of their output."""
    from torch.distributed.utils import _recursive_to
    from transformers.utils import ModelOutput

    from hcp.integrations.transformers import image_fields, image_inputs, image_sample

    model, item = build_of_axes(kind), items_of_axes()[0]

    def given(groups):
        rules, sample = image_fields(model), image_sample(model, item)
        plan = hcp.plan([len(sample["labels"])], ranks=1, max_tokens_per_rank=64)
        sample["pixel_values"] = sample["pixel_values"].double()
        ((cp, local),) = hcp.dispatch(plan, [sample], [0], groups, fields=rules)
        return image_inputs(model, cp, local)["mm_encoder_outputs"]

    (made,) = hcp.loopback(1, given)
    own = model.get_image_features(item["pixel_values"], item["image_grid_thw"], return_dict=True)
    for encoded in (made, *_recursive_to(made, torch.device("cpu"), False)):
        assert isinstance(encoded["image"], ModelOutput)
        assert torch.allclose(
            torch.cat(encoded["image"].pooler_output), torch.cat(own.pooler_output)
        )
        layers = zip(encoded["image"].deepstack_features, own.deepstack_features, strict=True)
        assert all(torch.allclose(torch.cat(found), torch.cat(layer)) for found, layer in layers)


def planned(groups, model, dataset):
    from hcp.integrations.transformers import image_inputs

    rank, ranks, model = groups.transport.rank, groups.transport.size, copy.deepcopy(model)
    lengths, sources, own = hcp.gather_lengths(dataset[rank::ranks], groups, fields=RULES)
    plan = hcp.plan(lengths, ranks=ranks, max_tokens_per_rank=42 // ranks)
    total, encoded = 0.0, 0
    for cp, local in hcp.dispatch(plan, own, sources, groups, fields=RULES):
        logits = model(**image_inputs(model, cp, local)).logits[0, : cp.rows]
        losses = F.cross_entropy(logits, local.labels, reduction="none")
        loss = cp.loss(losses, local.loss_mask, grad_reduce="sum")
        loss.backward()
        total += loss.item()
        encoded += len(local.pixel_values)
    return total, gradients(model), encoded


@pytest.mark.parametrize("kind", MODELS)
def test_losses_and_gradients_are_those_of_the_models_own_forward(kind):
    from hcp.integrations.transformers import register_for_images

    model, dataset = build(kind), samples()
    loss, expected = alone(model, dataset)
    model.zero_grad()
    register_for_images(model)
    ((on_one, of_one, _),) = hcp.loopback(1, lambda groups: planned(groups, model, dataset))
    assert on_one == pytest.approx(loss, abs=1e-6)  # rotary embedding is float32 in the models
    assert difference(of_one, expected) < 1e-5
    found = hcp.loopback(3, lambda groups: planned(groups, model, dataset))
    assert sum(part for part, _, _ in found) == pytest.approx(on_one, abs=1e-12)
    grads = summed([part for _, part, _ in found])
    assert difference(grads, of_one) < (1e-6 if kind == "aya_vision" else 1e-10)  # float32 norms
    assert sum(images for _, _, images in found) == 7  # each is encoded once


def test_models_and_rows_that_would_be_wrong_are_refused():
    import transformers

    from hcp.integrations.transformers import image_inputs, register_for_images

    text = transformers.AutoModelForCausalLM.from_config(
        transformers.CONFIG_MAPPING["llama"](**TEXT)
    )
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM has no vision_config.*text use register_hcp"
    ):
        register_for_images(text)
    with pytest.raises(ValueError, match="gives image tokens positions of several axes"):
        register_for_images(build("glm4v"))
    second = build("paligemma")
    second.config.text_config.sliding_window = 6
    with pytest.raises(ValueError, match="sliding window, which its prefixes reach over"):
        register_for_images(second)
    model = build("llava")
    register_for_images(model)
    flat = [s | {"pixel_values": torch.zeros(4 * len(s["pixel_values"]), 3)} for s in samples()]

    def work(groups):
        plan = hcp.plan([len(flat[0]["input_ids"])], ranks=1, max_tokens_per_rank=64)
        for cp, local in hcp.dispatch(plan, flat[:1], [0], groups, fields=RULES):
            image_inputs(model, cp, local)

    with pytest.raises(ValueError, match=r"'pixel_values' has rows of \(3,\), expected images"):
        hcp.loopback(1, work)


# ---- prefixes ------------------------------------------------------------------------------------


def test_prefixes_of_paligemma_see_themselves_whole():
    from hcp.integrations.transformers import causal_lm_loss, image_inputs, register_for_images

    model, prefixes = build("paligemma"), (9, 6, 4)
    dataset = []
    for prefix, sample in zip(prefixes, samples()[2:] + samples()[2:3], strict=False):
        rest = sample["input_ids"][sample["input_ids"] != IMAGE]
        tokens = torch.cat([torch.full((TOKENS,), IMAGE), rest])
        place = torch.arange(len(tokens))
        dataset.append(
            {
                "input_ids": tokens,
                "labels": tokens.roll(-1),
                "is_image": tokens == IMAGE,
                "loss_mask": ((place >= prefix - 1) & (place < len(tokens) - 1)).double(),
                "pixel_values": sample["pixel_values"][:1],
            }
        )
    counted, loss = sum(float(x["loss_mask"].sum()) for x in dataset), 0.0
    for prefix, sample in zip(prefixes, dataset, strict=False):
        suffix = (torch.arange(len(sample["input_ids"])) >= prefix).long()[None]
        given = {"pixel_values": sample["pixel_values"], "token_type_ids": suffix}
        logits = model(sample["input_ids"][None], use_cache=False, **given).logits[0]
        losses = F.cross_entropy(logits, sample["labels"], reduction="none")
        loss = loss + (losses * sample["loss_mask"]).sum() / counted
    loss.backward()
    expected = gradients(model)
    model.zero_grad()
    register_for_images(model)
    lengths = [len(sample["input_ids"]) for sample in dataset]
    masks = [hcp.Mask.prefix_lm(n, p) for n, p in zip(lengths, prefixes, strict=False)]

    def work(groups, plan):
        rank, own = groups.transport.rank, copy.deepcopy(model)
        sources = [i % plan.ranks for i in range(len(dataset))]
        for cp, local in hcp.dispatch(
            plan, dataset[rank :: plan.ranks], sources, groups, fields=RULES
        ):
            given = image_inputs(own, cp, local)
            causal_lm_loss(own, cp, local, grad_reduce="sum", inputs=given).backward()
        return gradients(own)

    for ranks in (1, 3):
        plan = hcp.plan(lengths, ranks=ranks, max_tokens_per_rank=80, min_degree=ranks, masks=masks)
        found = hcp.loopback(ranks, lambda groups, plan=plan: work(groups, plan))
        assert difference(summed(found), expected) < 1e-6  # rotary embedding and norms are float32


# ---- the Trainer ---------------------------------------------------------------------------------


def trained(rank, size, folder, kind):
    """Losses of three steps, an evaluation, and the gradients of the first step."""
    import transformers
    from transformers import TrainingArguments

    from hcp.integrations.transformers import Trainer

    as_torchrun(size)
    model = (build_of_axes(kind) if kind in OF_AXES else build(kind)).float()
    items = items_of_axes() if kind in OF_AXES else samples()
    kept = ("input_ids", "pixel_values", "image_grid_thw")
    items = [{name: x for name, x in item.items() if name in kept} for item in items]
    for item in items:
        if "pixel_values" in item:
            item["pixel_values"] = item["pixel_values"].float()
    trainer = Trainer(
        model,
        TrainingArguments(
            str(folder),
            max_steps=3,
            per_device_train_batch_size=4 // size,
            per_device_eval_batch_size=4 // size,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=1,
            max_grad_norm=0.0,
        ),
        train_dataset=items,
        eval_dataset=items[:2],
        cp=hcp.Config(max_seqlen_per_dp_cp_rank=64 // size),
        images=True,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    first = {}

    class Watch(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **keywords):
            first.update({} if first else gradients(model))

    trainer.add_callback(Watch())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.evaluate()["eval_loss"], first


@pytest.mark.parametrize("kind", map(known, ["llava", "qwen3_vl"]))
def test_the_trainer_takes_the_steps_of_one_rank(kind, tmp_path):
    ((losses, evaluation, first),) = run_ranks(1, trained, tmp_path, kind)
    two = run_ranks(2, trained, tmp_path, kind)
    for found, evaluated, grads in two:
        assert found == pytest.approx(losses, abs=1e-4)
        assert evaluated == pytest.approx(evaluation, abs=1e-4)
        assert difference(grads, first) < 1e-4
    assert losses[2] < losses[0]
    vision = [name for name in first if "vis" in name]
    assert any(first[name].abs().max() > 0 for name in vision)


def test_the_trainer_refuses_images_that_it_would_get_wrong(tmp_path):
    from transformers import TrainingArguments

    from hcp.integrations.transformers import Trainer, image_sample

    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    options = {"cp": hcp.Config(max_seqlen_per_dp_cp_rank=64), "images": True}
    with pytest.raises(ValueError, match=r"PaliGemma\w* takes token_type_ids"):
        Trainer(build("paligemma"), arguments, **options)
    model, item = build_of_axes("qwen2_vl"), items_of_axes()[0]
    with pytest.raises(ValueError, match=r"28 patches, 28 by its image_grid_thw, and 6 tokens"):
        image_sample(model, item | {"input_ids": item["input_ids"][:-5]})
    with pytest.raises(ValueError, match="a sample has 'pixel_values_videos'"):
        image_sample(model, item | {"pixel_values_videos": torch.zeros(4, 96)})
