"""Distillation: a student learns a teacher's distribution, on given responses or on its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_rl.algorithms.inputs import Inputs, claim_output, load_inputs, total_steps
from mcore_rl.algorithms.metrics import speaker
from mcore_rl.algorithms.objectives import loss_of
from mcore_rl.algorithms.supervised import SupervisedRun
from mcore_rl.config import DistillationConfig, ModelConfig
from mcore_rl.data.chat import end_token_ids
from mcore_rl.data.records import Dataset, Unit, load_sft_dataset
from mcore_rl.data.tokenize import load_tokenizer
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.errors import UserError
from mcore_rl.models.generation.sampling import SamplingParams
from mcore_rl.models.megatron.hf_checkpoint import SafetensorsDirectory
from mcore_rl.models.megatron.hf_config import check_model_fits, load_hf_config
from mcore_rl.models.megatron.weights import check_hf_tensors
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.models.policy.scoring import ScoringModel


def train_distill(config: DistillationConfig) -> None:
    """Bring the student's next-token distributions near the teacher's, over the teacher's likeliest tokens."""
    inputs = load_inputs(config, load_sft_dataset, rows_per_unit=1)
    _check_teacher(config, inputs)
    inputs = claim_output(config, inputs)
    student = MegatronPolicy(config, total_steps(config.trainer, len(inputs.train), config.batch.global_batch_size))
    teacher = ScoringModel(_teaching(config))
    speaker(student.is_writer)(f"teacher: {teacher.describe()}")

    def add_teacher(data: BatchedDataDict[Any], indices: list[int] | None) -> None:
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
    DistillationRun(config, inputs, student, loss_of(config), add_teacher).run()
    teacher.shutdown()
    student.shutdown()


def _teaching(config: DistillationConfig) -> DistillationConfig:
    """The run's configuration with the teacher in the student's place."""
    path, own = Path(config.distillation.teacher), config.model
    model = ModelConfig(path=path, dtype=own.dtype, trust_remote_code=own.trust_remote_code)
    return config.model_copy(update={"model": model})


def _check_teacher(config: DistillationConfig, inputs: Inputs[Dataset]) -> None:
    """
    Raises:
        UserError: the teacher cannot be used, or has another vocabulary than the student.
    """
    model = _teaching(config).model
    try:
        hf = load_hf_config(model.path, model.trust_remote_code)
        check_model_fits(hf, config.parallel, config.data.max_sequence_length, model)
        check_hf_tensors(hf, SafetensorsDirectory(model.path))
        tokenizer = load_tokenizer(model.path, model.trust_remote_code)
    except UserError as error:
        raise UserError(str(error).replace("model.path", "distillation.teacher")) from None
    sizes = hf.vocab_size, inputs.hf_config.vocab_size
    if tokenizer.get_vocab() != inputs.tokenizer.get_vocab() or sizes[0] > sizes[1]:
        raise UserError(f"distillation.teacher: {model.path} has another vocabulary than model.path")
    if config.distillation.topk > sizes[0]:
        raise UserError(f"distillation.topk={config.distillation.topk}: the teacher has {sizes[0]} tokens")


@dataclass
class DistillationRun(SupervisedRun):
    """Training on the records' responses, or on the student's answers to their prompts."""

    config: DistillationConfig

    def collate(self, units: list[Unit], first_sample: int) -> BatchedDataDict[Any]:
        if not self.config.distillation.on_policy:
            return super().collate(units, first_sample)
        prompts = [sequence.input_ids[: sequence.token_mask.index(True)] for (sequence,) in units]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(p, dtype=torch.long) for p in prompts], batch_first=True)
        samples = torch.arange(first_sample, first_sample + len(prompts))
        answered = self.policy.generate(BatchedDataDict(input_ids=rows, input_lengths=lengths, sample_ids=samples))
        ends, columns = answered["unpadded_sequence_lengths"], torch.arange(answered["output_ids"].shape[1])
        return BatchedDataDict(
            input_ids=answered["output_ids"],
            token_mask=((columns >= lengths[:, None]) & (columns < ends[:, None])).float(),
            input_lengths=ends,
            sample_mask=torch.ones(len(prompts)),
        )
