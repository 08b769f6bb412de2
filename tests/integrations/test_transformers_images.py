"""Vision-language models of Transformers: images are encoded once, wherever their tokens are."""

from __future__ import annotations

import copy

import pytest
import torch
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
    "qwen2_vl": (None, "qwen2_vl_text", 4, {"image_token_id": IMAGE}),
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


def planned(groups, model, dataset):
    from hcp.integrations.transformers import image_inputs

    rank, ranks, model = groups.transport.rank, groups.transport.size, copy.deepcopy(model)
    lengths, sources, own = hcp.gather_lengths(dataset[rank::ranks], groups, fields=RULES)
    plan = hcp.plan(lengths, ranks=ranks, max_tokens_per_rank=42 // ranks)
    total, encoded = 0.0, 0
    for cp, local in hcp.dispatch(plan, own, sources, groups, fields=RULES):
        logits = model(**image_inputs(model, cp, local)).logits[0, : cp.rows]
        losses = F.cross_entropy(logits, local.labels, reduction="none")
        loss = cp.loss(losses, local.loss_mask)
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
        register_for_images(build("qwen2_vl"))
    model = build("llava")
    register_for_images(model)
    flat = [s | {"pixel_values": torch.zeros(4 * len(s["pixel_values"]), 3)} for s in samples()]

    def work(groups):
        plan = hcp.plan([len(flat[0]["input_ids"])], ranks=1, max_tokens_per_rank=64)
        for cp, local in hcp.dispatch(plan, flat[:1], [0], groups, fields=RULES):
            image_inputs(model, cp, local)

    with pytest.raises(ValueError, match=r"'pixel_values' has rows of \(3,\), expected images"):
        hcp.loopback(1, work)
