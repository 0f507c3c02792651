"""From prompts to judged conversations, and from those to a batch to train on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from mcore_rl.data.prompts import Prompt
from mcore_rl.data.tokenize import tokenize_observation
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.environments.interfaces import Environment, MessageLog, Step
from mcore_rl.errors import UserError
from mcore_rl.models.generation.interfaces import GenerationDatumSpec
from mcore_rl.models.generation.megatron_generation import MegatronGeneration


@dataclass
class Rollout:
    """One conversation: a prompt, responses, and observations between them.

    input_ids, token_mask, logprobs: of all tokens; masked are those of responses, which alone have
        log-probabilities.
    truncated: the last response ran into the limit of new tokens.
    error: why it could not be judged, if so.
    """

    prompt: int
    """Index in the dataset."""
    sample_id: int
    """Position among all samples of the run: with the seed, its random numbers."""
    input_ids: list[int]
    token_mask: list[bool]
    logprobs: list[float]
    reward: float = 0.0
    truncated: bool = False
    turns: int = 0
    error: str | None = None
    message_log: MessageLog = field(default_factory=list)

    @property
    def response_length(self) -> int:
        """Tokens of all responses."""
        return sum(self.token_mask)


class RolloutWorker:
    """Lets the policy answer prompts in an environment, which rank 0 alone runs. Every call is collective."""

    def __init__(
        self, generation: MegatronGeneration, environment: Environment | None, tokenizer: Any, max_turns: int
    ) -> None:
        self.generation, self.environment, self.tokenizer = generation, environment, tokenizer
        self.max_turns = max_turns

    def run(
        self, prompts: Sequence[tuple[int, Prompt]], sample_ids: Sequence[int], greedy: bool = False
    ) -> list[Rollout]:
        """One conversation for each (index, prompt); `sample_ids` tell them apart."""
        rollouts = [
            Rollout(index, sample_id, list(p.input_ids), [False] * len(p.input_ids), [0.0] * len(p.input_ids))
            for (index, p), sample_id in zip(prompts, sample_ids, strict=True)
        ]
        for rollout, (_, prompt) in zip(rollouts, prompts, strict=True):
            rollout.message_log = prompt.message_log
        records = [prompt.record for _, prompt in prompts]
        plain = [isinstance(prompt.content, str) for _, prompt in prompts]
        going = list(range(len(rollouts)))
        while going:
            self._respond([rollouts[i] for i in going], greedy)
            steps = self._judge([rollouts[i].message_log for i in going], [records[i] for i in going])
            going = [
                i for i, step in zip(going, steps, strict=True) if self._goes_on(rollouts[i], step, plain=plain[i])
            ]
        return rollouts

    def _respond(self, rollouts: list[Rollout], greedy: bool) -> None:
        lengths = [len(r.input_ids) for r in rollouts]
        ids = torch.zeros(len(rollouts), max(lengths), dtype=torch.long)
        for row, rollout in enumerate(rollouts):
            ids[row, : lengths[row]] = torch.tensor(rollout.input_ids)
        sample_ids = torch.tensor([r.sample_id for r in rollouts])
        data: BatchedDataDict[GenerationDatumSpec] = BatchedDataDict(
            input_ids=ids, input_lengths=torch.tensor(lengths), sample_ids=sample_ids
        )
        out = self.generation.generate(data, greedy)
        ends, truncated = out["unpadded_sequence_lengths"].tolist(), out["truncated"].tolist()
        for row, rollout in enumerate(rollouts):
            response = slice(lengths[row], ends[row])
            tokens = out["output_ids"][row, response].tolist()
            rollout.input_ids += tokens
            rollout.token_mask += [True] * len(tokens)
            rollout.logprobs += out["logprobs"][row, response].tolist()
            rollout.truncated, rollout.turns = truncated[row], rollout.turns + 1
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            rollout.message_log = [*rollout.message_log, {"role": "assistant", "content": text}]

    def _judge(self, logs: list[MessageLog], records: list[dict[str, Any]]) -> list[Step]:
        box: list[Any] = [self.environment.step(logs, records) if self.environment is not None else None]
        torch.distributed.broadcast_object_list(box, src=0)
        steps: list[Step] = box[0]
        return steps

    def _goes_on(self, rollout: Rollout, step: Step, plain: bool) -> bool:
        """Take the reward; True if there is an observation, and room, for another turn."""
        rollout.reward += step.reward
        rollout.error = rollout.error or step.error
        if step.done or step.error or step.observation is None or rollout.turns >= self.max_turns:
            return False
        *before, response = rollout.message_log
        context = "" if plain else before
        observed = tokenize_observation(self.tokenizer, context, response["content"], step.observation)
        if len(rollout.input_ids) + len(observed) >= self.generation.max_sequence_length:
            return False
        rollout.input_ids += observed
        rollout.token_mask += [False] * len(observed)
        rollout.logprobs += [0.0] * len(observed)
        rollout.message_log = [*rollout.message_log, {"role": "user", "content": step.observation}]
        return True


def to_batch(rollouts: Sequence[Rollout], pad_token_id: int) -> BatchedDataDict[Any]:
    """Right-padded rows: input_ids, token_mask, generation_logprobs [B, S], input_lengths, sample_mask [B]."""
    lengths = [len(r.input_ids) for r in rollouts]
    shape = (len(rollouts), max(lengths))
    data: BatchedDataDict[Any] = BatchedDataDict(
        input_ids=torch.full(shape, pad_token_id),
        token_mask=torch.zeros(shape),
        generation_logprobs=torch.zeros(shape),
        input_lengths=torch.tensor(lengths),
        sample_mask=torch.ones(len(rollouts)),
    )
    for row, (rollout, length) in enumerate(zip(rollouts, lengths, strict=True)):
        data["input_ids"][row, :length] = torch.tensor(rollout.input_ids)
        data["token_mask"][row, :length] = torch.tensor(rollout.token_mask).float()
        data["generation_logprobs"][row, :length] = torch.tensor(rollout.logprobs)
    return data


# ------------------------------------------------------------------ record and replay


def record_step(path: Path, step: int, weights: str, sampling: dict[str, Any], rollouts: Sequence[Rollout]) -> None:
    """Append a step's rollouts to a file of JSON lines; lines of this step or later ones are replaced.

    Args:
        weights: hash of the weights that generated them.
    """
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [line for line in lines if json.loads(line)["step"] < step]
    new = {"step": step, "weights": weights, "sampling": sampling, "rollouts": [asdict(r) for r in rollouts]}
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text("".join(line + "\n" for line in [*kept, json.dumps(new)]))
    temporary.replace(path)


def read_recording(path: Path, steps: int) -> dict[int, list[Rollout]]:
    """The rollouts of each recorded step.

    Raises:
        UserError: no such file, not a recording, or one of fewer than `steps` steps.
    """
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        recorded = {int(line["step"]): [Rollout(**rollout) for rollout in line["rollouts"]] for line in lines}
    except OSError as error:
        raise UserError(f"--replay {path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--replay {path}: is not a recording of rollouts: {error}") from None
    if missing := [step for step in range(1, steps + 1) if step not in recorded]:
        raise UserError(f"--replay {path}: has no step {missing[0]} of the {steps} that are asked for")
    return recorded


def hash_of_weights(tensors: Any) -> str:
    """SHA-256 over (name, tensor) pairs in their order."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
