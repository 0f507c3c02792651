"""Distillation: a student learns a teacher's distribution, on given responses or on the student's responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mcore_rl import platform
from mcore_rl.algorithms.build_loss import build_loss
from mcore_rl.algorithms.supervised import Columns, Objective, SupervisedTrainer, TrainingBatch
from mcore_rl.config import DistillationConfig
from mcore_rl.config.algorithms import TEACHER, teacher_config
from mcore_rl.data.chat import end_token_ids
from mcore_rl.distributed.batched_data_dict import LocalBatch
from mcore_rl.models.generation.interfaces import prompts_to_answer
from mcore_rl.models.generation.sampling import SamplingParams
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.models.policy.scoring import TeacherModel
from mcore_rl.run.setup import claim_output_dir, load_inputs
from mcore_rl.utils.console import rank_zero_printer


def train_distill(config: DistillationConfig) -> Path | None:
    """Train the student's next-token distributions towards the teacher's, over the teacher's top-k tokens or all
    tokens."""
    config = platform.resolve(config)
    inputs = claim_output_dir(config, load_inputs(config))
    student = MegatronPolicy(config, config.total_steps(len(inputs.train)))
    teacher = TeacherModel(teacher_config(config), student.model.vocab_size)
    rank_zero_printer(student.is_writer)(f"teacher: {teacher.describe()}")
    if config.distillation.on_policy:
        params = SamplingParams(
            max_new_tokens=config.distillation.max_new_tokens,
            temperature=config.distillation.temperature,
            stop_token_ids=tuple(sorted(end_token_ids(inputs.tokenizer))),
            seed=config.seed,
        )
        student.prepare_for_generation(params, config.data.max_sequence_length, inputs.tokenizer)
    exported = SupervisedTrainer(config, inputs, student, DistillationObjective(config, student, teacher)).run()
    teacher.shutdown()
    student.shutdown()
    return exported


class DistillationObjective(Objective):
    """A divergence from the teacher, on the records' responses or on the student's answers to their prompts."""

    def __init__(self, config: DistillationConfig, student: MegatronPolicy, teacher: TeacherModel) -> None:
        super().__init__(build_loss(config, teacher))
        self.config, self.student, self.teacher = config, student, teacher

    def rows(self, batch: TrainingBatch) -> LocalBatch[Any]:
        if not self.config.distillation.on_policy or batch.samples is None:
            return batch.rows
        sequences = [batch.dataset.units[index][0] for index in batch.indices]
        prompts = [sequence.input_ids[: sequence.token_mask.index(True)] for sequence in sequences]
        asked: LocalBatch[Any] = LocalBatch(prompts_to_answer(prompts, batch.samples), batch.rows.share)
        answered, lengths = self.student.generate(asked), asked["input_lengths"]
        ends, columns = answered["unpadded_sequence_lengths"], torch.arange(answered["output_ids"].shape[1])
        entries = {
            "input_ids": answered["output_ids"],
            "token_mask": ((columns >= lengths[:, None]) & (columns < ends[:, None])).float(),
            "input_lengths": ends,
            "sample_mask": torch.ones(len(prompts)),
        }
        return LocalBatch(entries, batch.rows.share)

    def current_columns(self, batch: TrainingBatch) -> Columns:
        """Return the teacher's top-k tokens. They are k times as large as the batch's tokens, too large to be
        stored."""
        self.teacher.check_tokens(batch.rows, TEACHER)
        if self.config.distillation.topk is None:
            return {}  # the loss runs the teacher on the student's microbatches
        best = self.teacher.get_topk_logits(batch.rows, self.config.distillation.topk)
        return {"teacher_topk_logits": best["topk_logits"], "teacher_topk_indices": best["topk_indices"]}
