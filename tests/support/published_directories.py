"""Helpers of tests that train directories as they are on the hub."""

import json

import torch
from layout_cases import make_data
from safetensors.torch import load_file, save_file


def save_in_shards(tensors, directory):
    """Write three files and their index, with neighbouring names in different files."""
    names, weight_map = sorted(tensors), {}
    for number in range(3):
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        own = {name: tensors[name].contiguous() for name in names[number::3]}
        save_file(own, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(own, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def add_head(directory, head):
    """Add an LM head to a directory of one file that ties the embeddings.

    Args:
        head: how it differs from them: "equal", "one apart" (in the last number only), "apart" or "smaller".
    """
    file = directory / "model.safetensors"
    tensors = load_file(file)
    embedding = next(tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    heads = {"equal": embedding.clone(), "one apart": embedding.clone(), "smaller": embedding[:-1].clone()}
    heads["one apart"][-1, -1] += 0.5
    noise = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(5))
    heads["apart"] = embedding + (0.1 * noise).to(embedding.dtype)
    save_file({**tensors, "lm_head.weight": heads[head]}, file, metadata={"format": "pt"})


def tensors_of(directory):
    return {name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()}


def train_and_export(config, before, after):
    """Export, train two steps, export in fp32; return the log-probabilities after that, the line on untrained tensors,
    and the description of the model."""
    from mcore_rl.algorithms.build_loss import build_loss
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    policy.export_hf(before)
    for _ in range(2):
        policy.train(policy.own_rows(make_data()), build_loss(config))
    checkpoint = config.checkpoint.model_copy(update={"export_dtype": "float32"})
    policy.config = policy.config.model_copy(update={"checkpoint": checkpoint})
    policy.export_hf(after)
    logprobs, lines = policy.get_logprobs(make_data())["logprobs"], (policy.describe_untrained(), policy.describe())
    policy.shutdown()
    return logprobs, *lines
