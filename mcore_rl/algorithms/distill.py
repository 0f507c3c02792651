"""Distillation: a student learns a teacher's distribution, on given responses or on the student's responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from mcore_rl import platform
from mcore_rl.algorithms.build_loss import build_loss
from mcore_rl.algorithms.supervised import Columns, Objective, SupervisedTrainer, TrainingBatch
from mcore_rl.config import DistillationConfig
from mcore_rl.config.algorithms import TEACHER, teacher_configs
from mcore_rl.data.batching import padded_rows
from mcore_rl.data.chat import end_token_ids
from mcore_rl.data.datasets import DistillationDataset
from mcore_rl.data.token_store import images_column
from mcore_rl.distributed.batched_data_dict import BatchShare, LocalBatch
from mcore_rl.models.generation.interfaces import prompts_to_answer
from mcore_rl.models.generation.sampling import SamplingParams
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.models.policy.scoring import ScoringModel, TeacherModel
from mcore_rl.run.setup import claim_output_dir, load_inputs
from mcore_rl.utils.console import rank_zero_printer


def train_distill(config: DistillationConfig) -> Path | None:
    """Train the student towards the next-token distributions of its teachers, over top-k or all tokens."""
    config = platform.resolve(config)
    inputs = claim_output_dir(config, load_inputs(config))
    student = MegatronPolicy(config, config.total_steps(len(inputs.train)))
    loaded = {
        name: TeacherModel(of_teacher, student.model.vocab_size) for name, of_teacher in teacher_configs(config).items()
    }
    for name, teacher in loaded.items():
        rank_zero_printer(student.is_writer)(f"teacher{' ' * bool(name)}{name}: {teacher.describe()}")
    if config.distillation.on_policy:
        params = SamplingParams(
            max_new_tokens=config.distillation.max_new_tokens,
            temperature=config.distillation.temperature,
            stop_token_ids=tuple(sorted(end_token_ids(inputs.tokenizer))),
            seed=config.seed,
        )
        student.prepare_for_generation(params, config.data.max_sequence_length, inputs.tokenizer)
        assert student.generation is not None, "prepared"
        student.generation.say = rank_zero_printer(student.is_writer)
    objective = DistillationObjective(config, student, loaded, inputs.tokenizer)
    exported = SupervisedTrainer(config, inputs, student, objective).run()
    for teacher in loaded.values():
        teacher.shutdown()
    student.shutdown()
    return exported


class DistillationObjective(Objective):
    """Trains the student to minimise its divergence from the teachers.

    The divergence is computed on the records' responses, or on the student's own answers to the records' prompts.

    Args:
        loaded: the teachers that are separate models, by name. A teacher that is missing here is the student itself,
            which then reads another prompt.
    """

    def __init__(
        self, config: DistillationConfig, student: MegatronPolicy, loaded: Mapping[str, TeacherModel], tokenizer: Any
    ) -> None:
        super().__init__(build_loss(config, next(iter(loaded.values()), None)))
        self.options, self.student, self.tokenizer = config.distillation, student, tokenizer
        if self.options.form == "sampled":
            self.temperature = self.options.temperature
        self.teachers: dict[str, ScoringModel] = {name: loaded.get(name, student) for name in self.options.teachers}

    def rows(self, batch: TrainingBatch) -> LocalBatch[Any]:
        if not self.options.on_policy or batch.samples is None:
            return batch.rows
        sequences = [batch.dataset.units[index][0] for index in batch.indices]
        prompts = [sequence.truncate(sequence.token_mask.index(True)) for sequence in sequences]
        images = [prompt.images for prompt in prompts]
        read = prompts_to_answer([prompt.input_ids for prompt in prompts], batch.samples, images)
        asked: LocalBatch[Any] = LocalBatch(read, batch.rows.share)
        answered, lengths = self.student.generate(asked), asked["input_lengths"]
        ends, columns = answered["unpadded_sequence_lengths"], torch.arange(answered["output_ids"].shape[1])
        entries: dict[str, Any] = {
            "input_ids": answered["output_ids"],
            "token_mask": ((columns >= lengths[:, None]) & (columns < ends[:, None])).float(),
            "input_lengths": ends,
            "sample_mask": torch.ones(len(prompts)),
            **images_column(images),
        }
        if self.options.form == "sampled":
            entries["generation_logprobs"] = answered["logprobs"]
        return LocalBatch(entries, batch.rows.share)

    def current_columns(self, batch: TrainingBatch) -> Columns:
        """Return the teachers' top-k logits and their token ids at each position of the batch.

        For form=sampled, return the log-probabilities that the teachers give to the tokens of the batch. If the whole
        vocabulary is compared, return {}: the loss itself runs the teacher.
        """
        rows = batch.rows
        only = next(iter(self.teachers.items()))
        if self.options.topk is None:
            only[1].check_tokens(rows, TEACHER)
            return {}  # the loss runs the teacher on the student's microbatches
        if isinstance(self.options.teacher, Mapping) or self.options.teacher_prompt is not None:
            return self._of_each_record(batch)
        scored = self._scored(*only, rows)
        if self.options.form == "sampled":
            return {"teacher_logprobs": scored["values"]}
        return {"teacher_topk_logits": scored["values"], "teacher_topk_indices": scored["indices"]}

    def _scored(self, name: str, teacher: ScoringModel, rows: LocalBatch[Any]) -> Columns:
        """Return the top-k logits of the teacher `name` as `values` and their tokens as `indices`, [B, S, k] each.

        For form=sampled, return only `values` [B, S]: the teacher's log-probability of each token in `rows`.
        """
        teacher.check_tokens(rows, f"{TEACHER}.{name}" if name else TEACHER)
        options = self.options
        if options.form == "sampled":
            return {"values": teacher.get_logprobs(rows, temperature=options.temperature)["logprobs"]}
        assert options.topk is not None, "the whole vocabulary is compared by the loss"
        temperature = options.loss_temperature if options.kl_type == "reverse_unnormalized" else None
        best = teacher.get_topk_logits(rows, options.topk, temperature)
        return {"values": best["topk_logits"], "indices": best["topk_indices"]}

    def _of_each_record(self, batch: TrainingBatch) -> Columns:
        """Return what `current_columns` returns, computed for each record by the teachers of this record.

        Called if records name their teachers, or if the teachers read another prompt than the student.
        """
        dataset, rows, options = cast(DistillationDataset, batch.dataset), batch.rows, self.options
        have_names, is_sampled = isinstance(options.teacher, Mapping), options.form == "sampled"
        chosen = [dataset.teachers(n) if have_names else dict.fromkeys(self.teachers, 1.0) for n in batch.indices]
        most = int(rows.share.max(max(map(len, chosen), default=1))[0])
        (count, width), k = rows["input_ids"].shape, 1 if is_sampled else options.topk or 1
        values = torch.zeros(count, width, most, k)
        indices, weights = torch.zeros_like(values, dtype=torch.long), torch.zeros(count, 1, most)
        for name, teacher in self.teachers.items():
            own = [row for row, named in enumerate(chosen) if name in named]
            share = BatchShare.concatenated(len(own), rows.share.replicas)
            if not share.total:
                continue
            read, shifts = self._read_by_teacher(batch, own, share)
            scored = self._scored(name, teacher, read)
            for n, row in enumerate(own):
                slot, start = list(chosen[row]).index(name), int(rows["token_mask"][row].argmax()) - 1
                end = int(rows["input_lengths"][row])
                weights[row, 0, slot], there = chosen[row][name], slice(start + shifts[n], end + shifts[n])
                values[row, start:end, slot] = scored["values"][n, there].view(-1, k)
                if not is_sampled:
                    indices[row, start:end, slot] = scored["indices"][n, there]
        if is_sampled:
            return {"teacher_logprobs": (values[..., 0] * weights).sum(-1), "teacher_weight": weights.sum((1, 2))}
        flat = {"teacher_topk_logits": values.flatten(2), "teacher_topk_indices": indices.flatten(2)}
        return {**flat, "teacher_weights": weights} if have_names else flat

    def _read_by_teacher(
        self, batch: TrainingBatch, own: Sequence[int], share: BatchShare
    ) -> tuple[LocalBatch[Any], list[int]]:
        """Return the rows that a teacher reads, and how many tokens longer each row's prompt is than the student's.

        The number is 0 without `teacher_prompt`, and negative if the teacher's prompt is shorter.

        Args:
            own: indices of the rows of `batch` that the teacher scores.
            share: positions of these rows among the rows that the teacher scores on all replicas.
        """
        rows = batch.rows.select_indices(own)
        if self.options.teacher_prompt is None:
            return LocalBatch(rows.data, share), [0] * len(own)
        dataset, sequences, shifts = cast(DistillationDataset, batch.dataset), list[tuple[int, ...]](), list[int]()
        for n, row in enumerate(own):
            prompt = dataset.teacher_prompt(batch.indices[row], self.tokenizer)
            start, end = int(rows["token_mask"][n].argmax()), int(rows["input_lengths"][n])
            sequences.append((*prompt, *rows["input_ids"][n, start:end].tolist()))
            shifts.append(len(prompt) - start)
        read = padded_rows(sequences, self.tokenizer.pad_token_id)
        masks = {"token_mask": torch.zeros(read["input_ids"].shape), "sample_mask": torch.ones(len(own))}
        return LocalBatch({**read, **masks}, share), shifts
