"""Small models that read images, rows with images, and transformers' results for them, a row at a time."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from layout_cases import STEPS, as_saved, gradient_of, make_config, plain_loss
from PIL import Image
from safetensors.torch import load_file, save_file
from small_models import DELTA_NET_EXPERTS, DELTA_NETS, SMALL, make_tokenizer
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLPreTrainedModel

from mcore_rl.data.images import ImageReader, PlacedImage
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.testing.layout_check import LayoutResult

SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
VISION_START, VISION_END, IMAGE, VIDEO = 6, 7, 8, 9
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if m['role'] == 'assistant' %}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 36,
    "initializer_range": 0.2,
}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}
PARTIAL_MROPE = {**MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",  # as in published directories
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 4 * 64, "longest_edge": 40 * 64},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
FAMILIES = {
    "qwen3_vl": (
        "qwen3_vl",
        {"num_hidden_layers": 4, "rope_parameters": MROPE},
        {**TOWER, "deepstack_visual_indexes": [0, 1]},
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        {
            "num_hidden_layers": 4,
            "rope_parameters": MROPE,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 1,
        },
        {**TOWER, "deepstack_visual_indexes": [1]},
    ),
    "qwen3_5": ("qwen3_5", {**DELTA_NETS, "rope_parameters": PARTIAL_MROPE}, TOWER),
    "qwen3_5_moe": ("qwen3_5_moe", {**DELTA_NET_EXPERTS, "rope_parameters": PARTIAL_MROPE}, TOWER),
}
SIZES = [(40, 24), (16, 48), (33, 57), (24, 24), (70, 30)]
"""Widths and heights of the images. Some are resized."""


def make_model(family: str, directory: Path, **changes) -> Path:
    """Write a small model with random weights, with tokenizer and image processor; return its directory."""
    model_type, text, tower = FAMILIES[family]
    torch.manual_seed(1)
    tied = changes.pop("tie_word_embeddings", False)
    config = CONFIG_MAPPING[model_type](
        text_config={**SMALL, **text, **changes},
        vision_config=tower,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=tied,
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    make_tokenizer(SPECIAL, CHAT_TEMPLATE).save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return directory


class Qwen3VLForSequenceClassification(GenericForSequenceClassification, Qwen3VLPreTrainedModel):
    """transformers' generic classifier for Qwen3-VL. transformers itself has one for Qwen3.5 only."""


def make_reward_model(model: Path, directory: Path) -> Path:
    """Write the model with a random reward head instead of its LM head; return the directory."""
    shutil.copytree(model, directory)
    tensors = load_file(directory / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors["score.weight"] = torch.randn(1, SMALL["hidden_size"], generator=torch.Generator().manual_seed(6)) * 0.2
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["architectures"] = [config["architectures"][0].replace("ConditionalGeneration", "SequenceClassification")]
    config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def plain_rewards(model, data, path: Path) -> torch.Tensor:
    """Compute the rewards [B] of a transformers classifier, row by row."""
    rows = zip(data["input_ids"], data["input_lengths"].tolist(), data["images"], strict=True)
    return torch.stack([model(**model_arguments(ids[:n], images, path)).logits[0, 0] for ids, n, images in rows])


def make_images(directory: Path) -> list[Path]:
    """Write images with random pixels; return their paths."""
    generator = torch.Generator().manual_seed(2)
    paths = []
    for number, (width, height) in enumerate(SIZES):
        pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)
        paths.append(directory / f"{number}.png")
        Image.fromarray(pixels.numpy()).save(paths[-1])
    return paths


def write_prompts_with_images(directory: Path, count: int) -> None:
    """Write prompts.jsonl, in which each prompt has zero to two images, and the images."""
    paths = make_images(directory)
    with open(directory / "prompts.jsonl", "w") as file:
        for number in range(count):
            images = [{"type": "image", "image": paths[(number + n) % 5].name} for n in range(number % 3)]
            content = [*images, {"type": "text", "text": f"say {number}"}]
            file.write(json.dumps({"prompt": [{"role": "user", "content": content}], "answer": str(number)}) + "\n")


ROWS = [[0], [0], [1, 2], [1, 2], [], [], [3], [4], [], [2], [0, 0], [1]]
"""Numbers of the images of each row. Rows 2 n and 2 n + 1 are a pair; pairs with equal images share their prompt."""


def make_vision_data(model: Path, paths: list[Path]) -> BatchedDataDict:
    """Return ragged pairs with images among random tokens, random masks, and one pair that does not count."""
    generator = torch.Generator().manual_seed(3)
    reader, rows, placed, masks = ImageReader(model), [], [], []

    def text(most: int) -> list[int]:
        count = int(torch.randint(1, most, (1,), generator=generator))
        return torch.randint(10, 240, (count,), generator=generator).tolist()

    prompt: list[int] = []
    for row, numbers in enumerate(ROWS):
        if not (row % 2 and numbers and numbers == ROWS[row - 1]):
            prompt, images = text(9), []
            for number in numbers:
                image = reader.placed(str(paths[number]), len(prompt) + 1)
                prompt += [VISION_START, *[IMAGE] * image.count, VISION_END, *text(7)]
                images.append(image)
        ids = [*prompt, *text(24)]
        mask = (torch.rand(len(ids), generator=generator) < 0.6).float()
        for image in images:
            mask[image.start : image.end] = 0
        mask[-1] = 1
        rows.append(ids)
        placed.append(tuple(images))
        masks.append(mask)
    width = max(map(len, rows))
    input_ids, token_mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width)
    for row, (ids, mask) in enumerate(zip(rows, masks, strict=True)):
        input_ids[row, : len(ids)], token_mask[row, : len(ids)] = torch.tensor(ids), mask
    sample_mask = torch.ones(len(rows))
    sample_mask[8:10] = 0
    return BatchedDataDict(
        input_ids=input_ids,
        token_mask=token_mask,
        input_lengths=torch.tensor(list(map(len, rows))),
        sample_mask=sample_mask,
        reference_policy_logprobs=torch.randn(len(rows), width, generator=generator) - 5,
        images=placed,
    )


def model_arguments(row: torch.Tensor, images: tuple[PlacedImage, ...], model: Path) -> dict[str, torch.Tensor]:
    """Return the arguments of transformers' model for one row [S]; its own image processor reads the images."""
    from transformers import AutoImageProcessor

    ids = row[None]
    if not images:
        return {"input_ids": ids}
    processor = AutoImageProcessor.from_pretrained(model, backend="pil")
    made = processor(images=[Image.open(image.path).convert("RGB") for image in images], return_tensors="pt")
    kinds = torch.zeros_like(ids)
    for image in images:
        kinds[0, image.start : image.end] = 1
    return {"input_ids": ids, "mm_token_type_ids": kinds, **made}


def plain_logprobs(model, data, path: Path) -> torch.Tensor:
    """Compute log-probabilities [B, S] with transformers only, row by row."""
    rows = []
    for ids, length, images in zip(data["input_ids"], data["input_lengths"].tolist(), data["images"], strict=True):
        logits = model(**model_arguments(ids[:length], images, path)).logits[0, :-1].double()
        chosen = F.log_softmax(logits, dim=-1).gather(1, ids[1:length, None])[:, 0]
        rows.append(F.pad(chosen, (1, data["input_ids"].shape[1] - length)))
    return torch.stack(rows)


def plain_outcome(config, data, steps: int = STEPS) -> LayoutResult:
    """Run the steps of `config` with transformers and torch.optim, without this package."""
    path = config.model.path
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    tower = list(model.model.visual.parameters())
    is_trained = config.model.vision_tower == "trained"
    model.model.visual.requires_grad_(is_trained)
    rest = [parameter for parameter in model.parameters() if not any(parameter is own for own in tower)]
    tower_lr = config.optimizer.lr if config.optimizer.vision_tower_lr is None else config.optimizer.vision_tower_lr
    groups = [{"params": rest}, *([{"params": tower, "lr": tower_lr}] if is_trained else [])]
    eps = config.optimizer.adam_eps
    optimizer = torch.optim.AdamW(groups, lr=config.optimizer.lr, betas=(0.9, 0.999), eps=eps, weight_decay=0)
    first, all_metrics = None, []
    for _ in range(steps):
        optimizer.zero_grad()
        logprobs = plain_logprobs(model, data, path)
        loss, metrics = plain_loss(logprobs, data, config)
        loss.backward()
        gradients = as_saved(model, gradient_of)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        metrics["grad_norm"] = torch.nn.utils.clip_grad_norm_(trained, config.optimizer.clip_grad).item()
        optimizer.step()
        all_metrics.append(metrics)
        first = first or (logprobs.detach(), gradients)
    return LayoutResult(all_metrics, *first, as_saved(model, lambda tensor: tensor))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def vision_config(path, tower="frozen", make=make_config, **optimizer):
    """Return a configuration of training with images."""
    values = make(path).model_dump()
    values["model"]["vision_tower"] = tower
    values["data"]["max_sequence_length"] = 80
    values["optimizer"].update(optimizer)
    return type(make(path)).model_validate(values)
