"""Models of Transformers whose layers need masks: under hcp they equal themselves on one rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import hcp
from hcp import Mask

pytest.importorskip("transformers")

import transformers

from hcp.integrations.transformers import (
    causal_lm_loss,
    causal_lm_sample,
    causal_lm_samples,
    image_inputs,
    masks_of,
    model_inputs,
    register_for_images,
    register_hcp_attention,
)

LENGTHS = (21, 5, 40)


def llama4() -> Any:
    """Chunks of 7, and a layer whose queries are scaled by their positions."""
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        intermediate_size_mlp=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=7,
        no_rope_layers=[1, 1, 1, 0],
        floor_scale=8,
        attn_scale=0.9,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.Llama4ForCausalLM(config).double()


def test_chunked_layers_of_llama_4_equal_themselves() -> None:
    model = llama4()
    texts = [torch.randint(3, 64, (n,)) for n in LENGTHS]
    total = sum(n - 1 for n in LENGTHS)
    for ids in texts:
        loss = model(input_ids=ids[None], labels=ids[None], use_cache=False).loss
        (loss * (len(ids) - 1) / total).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    register_hcp_attention(model)

    def work(groups: Any, plan: hcp.Plan) -> dict[str, torch.Tensor]:
        own, rank = copy.deepcopy(model), groups.transport.rank
        sources = [i % plan.ranks for i in range(len(texts))]
        samples = [
            causal_lm_sample({"input_ids": ids})
            for ids, source in zip(texts, sources, strict=True)
            if source == rank
        ]
        for cp, local in hcp.dispatch(plan, samples, sources, groups):
            causal_lm_loss(own, cp, local, grad_reduce="sum").backward()
        return {name: p.grad for name, p in own.named_parameters() if p.grad is not None}

    for ranks in (1, 2, 3):
        plan = hcp.plan(
            LENGTHS,
            ranks=ranks,
            max_tokens_per_rank=80,
            min_degree=ranks,
            masks=masks_of(model, LENGTHS),
        )
        found = hcp.loopback(ranks, lambda groups, p=plan: work(groups, p))
        for name, grad in expected.items():
            summed = sum(each[name] for each in found)
            # Llama 4 rotates in float32.
            assert torch.allclose(summed, grad, atol=1e-6), (ranks, name)


@pytest.mark.parametrize(
    ("masks", "remedy"),
    [
        (None, r"hcp.plan\(masks=masks_of\(model, lengths\)\)"),
        (
            [hcp.Mask.shared_prefix(3, [1, 1])],
            r"masks are named \['mask'\].* plan the texts of a tree alone",
        ),
    ],
)
def test_chunked_layers_without_their_masks_are_refused(masks: Any, remedy: str) -> None:
    model = llama4()
    register_hcp_attention(model)
    plan = hcp.plan([5], ranks=1, max_tokens_per_rank=8, masks=masks)

    def work(groups: Any) -> None:
        sample = causal_lm_sample({"input_ids": torch.arange(3, 8)})
        ((cp, local),) = hcp.dispatch(plan, [sample], [0], groups)
        model(**model_inputs(cp, local))

    with pytest.raises(
        ValueError, match=rf"in chunks of 7, expected a plan with masks named.*{remedy}"
    ):
        hcp.loopback(1, work)


def test_models_without_chunks_need_no_masks() -> None:
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    assert masks_of(transformers.LlamaForCausalLM(config), [3]) is None


def test_positions_that_restart_are_documents() -> None:
    item = {
        "input_ids": [5, 6, 7, 8, 9, 10],
        "position_ids": [0, 1, 2, 0, 0, 1],
        "labels": [5, 6, 7, 8, 9, 10],
    }
    samples = causal_lm_samples(item)
    assert [sample["input_ids"].tolist() for sample in samples] == [[5, 6, 7], [8], [9, 10]]
    assert [sample["labels"].tolist() for sample in samples] == [[6, 7, -100], [-100], [10, -100]]
    with pytest.raises(ValueError, match="position_ids is"):
        causal_lm_samples({"input_ids": [5, 6, 7], "position_ids": [0, 2, 3]})


# ---- images in a text ----------------------------------------------------------------------------

IMAGE, TOKENS = 60, 4


def with_windows(kind: str) -> Any:
    """A model whose layers see 4 tokens, all or every other one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
    sizes |= {"num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 64}
    more: dict[str, Any] = {"sliding_window": 4}
    if kind == "gpt_oss":
        more |= {"num_local_experts": 2, "num_experts_per_tok": 1, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(kind, **sizes, **more)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("degree", [1, 3])
@pytest.mark.parametrize("kind", ["mistral", "gpt_oss", "gemma3_text"])
def test_windows_over_a_prompt_with_answers_are_those_of_each_answer_alone(
    kind: str, degree: int
) -> None:
    model = with_windows(kind)
    prompt, answers = 6, [5, 1, 4]
    ids = torch.randint(3, 64, (prompt + sum(answers),))
    parts = ids.split([prompt, *answers])
    alone = [
        model(input_ids=torch.cat([parts[0], own])[None], use_cache=False).logits[0, prompt:]
        for own in parts[1:]
    ]
    whole = model(input_ids=parts[0][None], use_cache=False).logits[0]
    expected = torch.cat([whole, *alone]).detach()
    register_hcp_attention(model)
    tree = Mask.shared_prefix(prompt, answers)
    plan = hcp.plan(
        [len(ids)], masks=[tree], ranks=degree, min_degree=degree, max_tokens_per_rank=99
    )

    def work(groups: Any) -> None:
        rows = {"input_ids": ids, "token": torch.arange(len(ids))}
        own = [rows] if groups.transport.rank == 0 else []
        for cp, local in hcp.dispatch(plan, own, [0], groups):
            found = copy.deepcopy(model)(**model_inputs(cp, local)).logits[0, : cp.rows]
            assert torch.allclose(found, expected[local.token], rtol=0, atol=1e-5)

    hcp.loopback(degree, work)


def gemma3() -> Any:
    torch.manual_seed(0)
    text = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 6,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        "vision_use_head": False,
    }
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=TOKENS,
        image_token_index=IMAGE,
        boi_token_index=61,
        eoi_token_index=62,
    )
    return transformers.Gemma3ForConditionalGeneration(config).double().eval()


def with_images(tokens: int, starts: list[int]) -> dict[str, Any]:
    ids = torch.randint(3, IMAGE, (tokens,))
    spans = [(start, start + TOKENS) for start in starts]
    for start, end in spans:
        ids[start:end] = IMAGE
    pixels = torch.randn(len(starts), 3, 16, 16, dtype=torch.float64)
    return {"ids": ids, "spans": spans, "pixels": pixels}


def embedded(model: Any, sample: dict[str, Any]) -> torch.Tensor:
    """Embeddings of a sample's tokens, its images in their places."""
    ids = sample["ids"]
    rows = model.get_input_embeddings()(ids)
    images = model.model.get_image_features(sample["pixels"]).pooler_output
    return rows.masked_scatter((ids == IMAGE).unsqueeze(1).expand_as(rows), images.flatten(0, 1))


def test_images_of_gemma_3_see_themselves_whole() -> None:
    """Embeddings are computed where a sample was loaded, the language model where the plan says;
    gradients reach the tower of images."""
    model = gemma3()
    samples = [with_images(30, [2, 11]), with_images(17, [5])]
    own = []
    for sample in samples:
        ids = sample["ids"][None]
        types = (ids == IMAGE).long()
        options = {"token_type_ids": types, "pixel_values": sample["pixels"], "use_cache": False}
        logits = model(input_ids=ids, **options).logits[0]
        own.append(logits.detach())
        logits.square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert any("vision" in name for name in expected)
    model.zero_grad()
    register_for_images(model)
    lengths = [len(sample["ids"]) for sample in samples]
    spans = [Mask.bidirectional_spans(len(s["ids"]), s["spans"]) for s in samples]
    plan = hcp.plan(lengths, ranks=3, max_tokens_per_rank=60, min_degree=3, masks=spans)

    def work(groups: Any) -> dict[str, torch.Tensor]:
        mine, rank = copy.deepcopy(model), groups.transport.rank
        loaded = [i for i in range(len(samples)) if i == rank]
        fields = [{"expected": own[i]} for i in loaded]
        for cp, local in hcp.dispatch(plan, fields, [0, 1], groups):
            rows = [embedded(mine, samples[i]) for i in loaded]
            empty = torch.zeros(0, 32, dtype=torch.float64, requires_grad=True)
            inputs = cp.at_least_one_row(cp.dispatch(torch.cat([empty, *rows])))
            hidden = mine.model.language_model(
                inputs_embeds=inputs[None],
                position_ids=cp.at_least_one_row(cp.position_ids)[None],
                use_cache=False,
                cp=cp,
            ).last_hidden_state
            logits = mine.lm_head(hidden[0, : cp.rows])
            assert torch.allclose(logits, local.expected, atol=1e-10)
            logits.square().sum().backward()
        return {name: p.grad for name, p in mine.named_parameters() if p.grad is not None}

    found = hcp.loopback(3, work)
    for name, grad in expected.items():
        summed = sum(each[name] for each in found if name in each)
        # Transformers normalizes in float32 in places.
        assert torch.allclose(summed, grad, rtol=1e-7, atol=1e-5), name


def test_images_of_gemma_3_without_masks_are_refused() -> None:
    model = gemma3()
    plan = hcp.plan([5], ranks=1, max_tokens_per_rank=8)

    def work(groups: Any) -> None:
        ((cp, local),) = hcp.dispatch(plan, [{"input_ids": torch.arange(3, 8)}], [0], groups)
        image_inputs(model, cp, local)

    with pytest.raises(ValueError, match="expected a plan with masks that say so"):
        hcp.loopback(1, work)
