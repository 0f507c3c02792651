"""The models and data that a check makes, and the configuration of its part `speed`."""

from __future__ import annotations

import shutil
from typing import Any

from mcore_rl import platform
from mcore_rl.config import DPOConfig, ModelConfig, resolved_yaml
from mcore_rl.simulation.sequences import Sequences, sequences_of
from mcore_rl.testing.cluster.plan import MIXTURE, Plan, dpo_config, grpo_config, resume_configs, small_model
from mcore_rl.testing.demo_data import make_model, shuffled_pairs, shuffled_words, write_jsonl

SEED_MODEL, LARGE = "seed", "large"
"""Directories below `Plan.models`: the source of the small models, and the model of the part `speed` on GPUs."""
PACKS = 4
"""Packs of each replica in a step of the part `speed`."""
PARTS_OF_PACK = (4, 4, 8, 8, 16, 16, 16, 16)
"""Lengths of the sequences of a pack as fractions of the pack; both sequences of a pair have the same length."""
RESPONSE_PART = 1 / 3

SHAPES: dict[float, dict[str, Any]] = {
    64: {"num_hidden_layers": 16, "vocab_size": 128_256, "intermediate_size": 8192},
    32: {"num_hidden_layers": 16, "vocab_size": 32_000, "intermediate_size": 8192},
    16: {"num_hidden_layers": 8, "vocab_size": 32_000, "intermediate_size": 5632},
    0: {"num_hidden_layers": 4, "vocab_size": 32_000, "intermediate_size": 5632},
}
"""Shape of the model of the part `speed`, by the least memory of a GPU in GiB; the hidden size is always 2048.

The shapes have 1.5, 1.1, 0.5 and 0.3 billion parameters, with 18 bytes of weights, gradients and optimizer state each.
"""


def prepare(plan: Plan) -> None:
    """Write all models, data and configurations to the output directory; the first node does this once."""
    platform.initialize_platform()
    data = plan.directory / "data"
    data.mkdir()
    pairs = shuffled_pairs()[:512]
    write_jsonl(data / "pairs.jsonl", ({"prompt": a, "chosen": b, "rejected": shuffled_words(b)} for a, b in pairs))
    write_jsonl(data / "prompts.jsonl", ({"prompt": prompt} for prompt, _ in pairs))
    layouts = [plan.first_layout, plan.second_layout, *(case.layout for case in plan.cases)]
    for kind in {small_model(plan), *(case.model for case in plan.cases)}:
        _write_small_model(plan, kind, layouts, [" ".join(pair) for pair in pairs])
    if plan.gpu and plan.speed is None:
        _write_large_model(plan)
    configs = plan.directory / "configs"
    configs.mkdir()
    first, second = resume_configs(plan)
    of_files = {"resume_1": first, "resume_2": second, "grpo": grpo_config(plan), "speed": speed_config(plan)}
    for name, config in of_files.items():
        (configs / f"{name}.yaml").write_text(resolved_yaml(config))


def _write_small_model(plan: Plan, kind: str, layouts: list[Any], texts: list[str]) -> None:
    """Write a small model with random weights that all `layouts` divide, of the given architecture or of our own.

    Its weights are exact in bfloat16, as `compare_in_bfloat16` requires.
    """
    import torch

    from mcore_rl.testing.layout_check import invent_adapter, shrink_model

    if plan.model is not None:
        source = ModelConfig.model_validate({**plan.model, "lora": None})
    else:
        directory = plan.models / SEED_MODEL / kind
        make_model(directory, texts)
        if kind == MIXTURE:
            _make_mixture(directory)
        source = ModelConfig(path=directory)
    shrink_model(source, plan.models / kind, layouts, torch.bfloat16)
    if plan.model is not None and plan.model.get("lora") is not None:
        invent_adapter(ModelConfig.model_validate({**plan.model, "path": plan.models / kind}), plan.adapter)


def _make_mixture(directory: Any) -> None:
    """Replace the model's configuration by one of a mixture of experts with the same vocabulary."""
    from transformers import AutoConfig, MixtralConfig

    dense = AutoConfig.from_pretrained(directory)
    MixtralConfig(
        vocab_size=dense.vocab_size,
        max_position_embeddings=dense.max_position_embeddings,
        bos_token_id=None,
        eos_token_id=dense.eos_token_id,
        pad_token_id=dense.pad_token_id,
        sliding_window=None,
    ).save_pretrained(directory)


def _write_large_model(plan: Plan) -> None:
    """Write the model of the part `speed`: a Llama whose size the memory of a GPU allows, with random weights."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = next(shape for least, shape in SHAPES.items() if plan.gpu_gib >= least)
    config = LlamaConfig(
        **shape, hidden_size=2048, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
        max_position_embeddings=131_072, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(plan.models / LARGE)
    for file in (plan.models / small_model(plan)).glob("tokenizer*"):
        shutil.copy2(file, plan.models / LARGE)


def speed_config(plan: Plan) -> DPOConfig:
    """Return the configuration of the part `speed`: the given one, or a model and a layout of the check's own."""
    if plan.speed is not None:
        return DPOConfig.model_validate(plan.speed)
    layout, (dtype, tokens) = plan.first_layout, ("bfloat16", 8192) if plan.gpu else ("float32", 512)
    path, options = plan.models / LARGE, dict[str, Any]()
    if not plan.gpu:
        path, options = plan.models / small_model(plan), {**(plan.model or {}), "lora": None}
    return dpo_config(
        plan,
        layout,
        dtype,
        model={**options, "path": str(path), "dtype": dtype},
        output_dir=str(plan.directory / "speed"),
        data={"train": "not read", "max_sequence_length": tokens // PARTS_OF_PACK[0]},
        batch={"global_batch_size": layout.dp * PACKS * len(PARTS_OF_PACK) // 2, "tokens_per_pack": tokens},
        dpo={"reference": "precompute"},
    )


def speed_sequences(config: DPOConfig) -> Sequences:
    """Return the lengths of the sequences of a step in the part `speed`."""
    width = config.pack_width(config.rows_per_unit)
    longest = config.data.max_sequence_length
    lengths = [min(max(width // part, 2), longest) for part in PARTS_OF_PACK]
    return sequences_of(config, lengths, RESPONSE_PART)
