"""Distillation: a student learns a teacher's distribution, on given responses or on its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_rl.algorithms.build_loss import loss_of
from mcore_rl.algorithms.supervised import SupervisedRun
from mcore_rl.config import DistillationConfig
from mcore_rl.config.algorithms import TEACHER, config_of_teacher
from mcore_rl.data.chat import end_token_ids
from mcore_rl.data.datasets import Dataset
from mcore_rl.distributed.batched_data_dict import OwnRows, Share
from mcore_rl.models.generation.interfaces import prompts_to_answer
from mcore_rl.models.generation.sampling import SamplingParams
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.models.policy.scoring import TeacherModel
from mcore_rl.run.setup import claim_output, load_inputs
from mcore_rl.utils.console import speaker


def train_distill(config: DistillationConfig) -> Path | None:
    """Bring the student's next-token distributions near the teacher's, over its likeliest tokens or all of them."""
    inputs = claim_output(config, load_inputs(config))
    student = MegatronPolicy(config, config.total_steps(len(inputs.train)))
    teacher = TeacherModel(config_of_teacher(config), inputs.hf_config.vocab_size)
    speaker(student.is_writer)(f"teacher: {teacher.describe()}")

    def add_teacher(data: OwnRows[Any], dataset: Dataset, indices: Sequence[int]) -> None:
        teacher.check_tokens(data, TEACHER)
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
    # Computed anew in each validation: kept, a set's columns are k times as large as its tokens.
    loss = loss_of(config, teacher)
    exported = DistillationRun(config, inputs, student, loss, add_current_columns=add_teacher).run()
    teacher.shutdown()
    student.shutdown()
    return exported


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
