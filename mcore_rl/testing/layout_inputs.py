"""What parallel layouts are compared on: the first batch of a configuration, and a small model like its own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from mcore_rl.config import GRPOConfig, KTOConfig, TrainingConfig
from mcore_rl.config.parallel import ParallelLayout
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.errors import UserError
from mcore_rl.platform import te_problem
from mcore_rl.testing.layout_check import invent_adapter, shrink_model
from mcore_rl.testing.processes import Start, run_processes


def with_layers(config: TrainingConfig, implementation: str | None, start: Start | None = None) -> TrainingConfig:
    """Return `config` with layers of this implementation, or unchanged if it is None.

    With `start`, check in a process of this kind that Transformer Engine can be used, if the configuration requires it.

    Raises:
        UserError: Transformer Engine cannot be used.
    """
    model = config.model
    if implementation is not None:
        model = model.model_copy(update={"transformer_impl": implementation})
    if start is not None and (model.transformer_impl == "transformer_engine" or model.fp8 is not None):
        (problem,) = run_processes(te_problem, world_size=1, start=start)
        if problem is not None:
            key = "model.transformer_impl=transformer_engine" if model.fp8 is None else "model.fp8"
            raise UserError(f"{key}: Transformer Engine {problem}")
    return config.model_copy(update={"model": model})


def with_small_model(
    config: TrainingConfig, directory: Path, layouts: Iterable[ParallelLayout], dtype: str
) -> TrainingConfig:
    """Write a small model of the configured architecture, with an adapter if one is configured, below `directory`.

    Return `config` with this model, in `dtype`. See `shrink_model` and `invent_adapter`.
    """
    small = directory / "model"
    shrink_model(config.model, small, layouts, getattr(torch, dtype))
    changes = {"path": small, "dtype": dtype, "mtp_loss_scaling_factor": 0.0}
    model = config.model.model_copy(update=changes)
    if model.lora is not None:
        model = invent_adapter(model, directory / "adapter")
    return config.model_copy(update={"model": model})


def first_batch(config: TrainingConfig, tokenizer: Any) -> BatchedDataDict[Any]:
    """Return the first global batch of the configured data."""
    from mcore_rl.data.batching import collate
    from mcore_rl.data.datasets import dataset_loader

    dataset = dataset_loader(config)(config.data.train, tokenizer, config.data)
    count = min(config.batch.global_batch_size, len(dataset))
    indices = dataset.order(config.seed).indices(0, count)
    data = collate([dataset.units[i] for i in indices], tokenizer.pad_token_id)
    if isinstance(config, KTOConfig):
        data["desirable"] = torch.tensor([dataset.is_desirable(i) for i in indices])
    return data


def invent_rollouts(config: GRPOConfig, tokenizer: Any) -> BatchedDataDict[Any]:
    """Return random responses to the first prompts, with random rewards; their content does not matter here."""
    from mcore_rl.algorithms.advantages import EstimatorInputs, advantages_of
    from mcore_rl.algorithms.grpo import add_columns_of_loss
    from mcore_rl.data.datasets import load_prompt_dataset
    from mcore_rl.data.token_store import images_column
    from mcore_rl.rollouts.samples import Rollout, to_batch

    dataset = load_prompt_dataset(config.data.train, tokenizer, config.data, config.max_prompt_length)
    prompts, group = config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt
    generator = torch.Generator().manual_seed(config.seed)
    rollouts: list[Rollout] = []
    for index in dataset.order(config.seed).indices(0, prompts):
        room = config.data.max_sequence_length - len(dataset.prompts[index].input_ids)
        longest = min(config.max_response_length, room)
        for length in torch.randint(1, longest + 1, (group,), generator=generator).tolist():
            rollout = Rollout.begin(index, len(rollouts), dataset.prompts[index])
            tokens = torch.randint(len(tokenizer), (length,), generator=generator).tolist()
            rollout.add_response(tokens, [0.0] * length)
            rollouts.append(rollout)
    rewards = torch.rand(prompts, group, generator=generator)
    data = to_batch(rollouts, tokenizer.pad_token_id)
    data.update(images_column([dataset.prompts[rollout.prompt].images for rollout in rollouts]))
    shape, names = data["token_mask"].shape, config.environment.rewards.values()
    more = EstimatorInputs(
        torch.rand(len(names), prompts, group, generator=generator),
        torch.tensor([reward.weight for reward in names]),
        torch.rand(shape, generator=generator),
        torch.rand(shape, generator=generator),
    )
    data["advantages"] = advantages_of(config.grpo, rewards, data["token_mask"], more=more)
    add_columns_of_loss(config.loss, data, rewards)
    return data
