"""Distillation: a student learns a teacher's distribution, on given responses or on its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_rl.algorithms.inputs import Inputs, check_model_beside, claim_output, load_inputs, total_steps
from mcore_rl.algorithms.metrics import speaker
from mcore_rl.algorithms.objectives import loss_of
from mcore_rl.algorithms.supervised import SupervisedRun
from mcore_rl.config import DistillationConfig, ModelConfig
from mcore_rl.data.chat import end_token_ids
from mcore_rl.data.records import Dataset, load_sft_dataset
from mcore_rl.distributed.own_rows import OwnRows, Share
from mcore_rl.errors import UserError
from mcore_rl.models.generation.interfaces import prompts_to_answer
from mcore_rl.models.generation.sampling import SamplingParams
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.models.policy.teacher import TeacherModel


def train_distill(config: DistillationConfig) -> Path | None:
    """Bring the student's next-token distributions near the teacher's, over its likeliest tokens or all of them."""
    inputs = load_inputs(config, load_sft_dataset, rows_per_unit=1)
    _check_teacher(config, inputs)
    inputs = claim_output(config, inputs)
    student = MegatronPolicy(config, total_steps(config.trainer, len(inputs.train), config.batch.global_batch_size))
    teacher = TeacherModel(config_of_teacher(config), inputs.hf_config.vocab_size)
    speaker(student.is_writer)(f"teacher: {teacher.describe()}")

    def add_teacher(data: OwnRows[Any], dataset: Dataset, indices: Sequence[int]) -> None:
        teacher.check_tokens(data, "distillation.teacher")
        if config.distillation.topk is None:
            return  # the loss lets it see the student's microbatches
        best = teacher.get_topk_logits(data, config.distillation.topk)
        data["teacher_topk_logits"], data["teacher_topk_indices"] = best["topk_logits"], best["topk_indices"]

    if config.distillation.on_policy:
        params = SamplingParams(
            max_new_tokens=config.distillation.max_new_tokens,
            temperature=config.distillation.temperature,
            stop_token_ids=tuple(sorted(end_token_ids(inputs.tokenizer))),
            seed=config.seed,
        )
        student.prepare_for_generation(params, config.data.max_sequence_length, inputs.tokenizer)
    exported = DistillationRun(config, inputs, student, loss_of(config, teacher), add_teacher).run()
    teacher.shutdown()
    student.shutdown()
    return exported


def config_of_teacher(config: DistillationConfig) -> DistillationConfig:
    """The run's configuration with the teacher in the student's place."""
    path, own = Path(config.distillation.teacher), config.model
    model = ModelConfig(path=path, dtype=own.dtype, trust_remote_code=own.trust_remote_code)
    return config.model_copy(update={"model": model})


def _check_teacher(config: DistillationConfig, inputs: Inputs[Dataset]) -> None:
    """
    Raises:
        UserError: the teacher cannot be used, or has another vocabulary than the student.
    """
    hf = check_model_beside(config_of_teacher(config), "distillation.teacher", inputs.tokenizer)
    topk, sizes = config.distillation.topk, (hf.vocab_size, inputs.hf_config.vocab_size)
    if topk is not None and sizes[0] > sizes[1]:
        raise UserError(
            f"distillation.teacher: {config.distillation.teacher} has an LM head of {sizes[0]} rows, the student one "
            f"of {sizes[1]}, so that a token of the teacher's likeliest may be none of the student's; set "
            "distillation.topk=null"
        )
    if topk is not None and topk > sizes[0]:
        raise UserError(f"distillation.topk={topk}: the teacher has {sizes[0]} tokens")


@dataclass
class DistillationRun(SupervisedRun):
    """Training on the records' responses, or on the student's answers to their prompts."""

    config: DistillationConfig

    def own_batch(
        self, dataset: Dataset, indices: Sequence[int], share: Share, samples: Sequence[int] | None
    ) -> OwnRows[Any]:
        if not self.config.distillation.on_policy or samples is None:
            return super().own_batch(dataset, indices, share, samples)
        sequences = [dataset.units[index][0] for index in indices]
        prompts = [sequence.input_ids[: sequence.token_mask.index(True)] for sequence in sequences]
        asked: OwnRows[Any] = OwnRows(prompts_to_answer(prompts, samples), share)
        answered, lengths = self.policy.generate(asked), asked["input_lengths"]
        ends, columns = answered["unpadded_sequence_lengths"], torch.arange(answered["output_ids"].shape[1])
        entries = {
            "input_ids": answered["output_ids"],
            "token_mask": ((columns >= lengths[:, None]) & (columns < ends[:, None])).float(),
            "input_lengths": ends,
            "sample_mask": torch.ones(len(prompts)),
        }
        return OwnRows(entries, share)
