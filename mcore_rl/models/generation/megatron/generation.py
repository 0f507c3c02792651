"""Generation by the training model itself, in the training processes.

The prompts are divided over the data- and context-parallel ranks: each of these ranks is a replica. The tensor- and
pipeline-parallel ranks of a replica run the same steps. A replica runs up to `max_batch_size` sequences at once
(`ContinuousBatch`). If the next sequence has the same prompt as a running sequence, the prompt is not computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from mcore_rl import platform
from mcore_rl.config import RLConfig
from mcore_rl.data.chat import end_token_ids
from mcore_rl.data.choices import CHOICES, RecordedChoice, replayed_choices
from mcore_rl.data.images import IMAGES
from mcore_rl.distributed.batched_data_dict import BatchedDataDict, LocalBatch
from mcore_rl.distributed.collectives import gather_rows
from mcore_rl.distributed.sampling_mask import KeptTokens
from mcore_rl.distributed.topology import ParallelDimension
from mcore_rl.errors import UserError
from mcore_rl.models.generation.interfaces import (
    GenerationDatumSpec,
    GenerationInterface,
    GenerationOutputSpec,
    Response,
    gather_responses,
    output_of,
    prompts_of,
)
from mcore_rl.models.generation.megatron.continuous_batch import ContinuousBatch, RunningSequence, StopStrings
from mcore_rl.models.generation.megatron.decoder import Decoder
from mcore_rl.models.generation.sampling import SamplingParams
from mcore_rl.models.megatron.model.gpt_model import ModelShard
from mcore_rl.utils.console import GenerationProgress, PrintLine, silent


class TrainedHere(Protocol):
    """Interface of a policy whose model generates in the same processes in which it is trained.

    `offload_before_refit` releases the memory that only training needs; `prepare_for_training` allocates it again.
    """

    def offload_before_refit(self) -> int: ...

    def prepare_for_training(self) -> None: ...


class MegatronGeneration(GenerationInterface):
    """Generates with a model that is in training, in the same processes.

    lag: see `ContinuousBatch`.
    say: prints the progress of long generation; on the first rank only.
    makes_room: the policy that releases its gradients and optimizer state during generation; None to release nothing.

    Args:
        params: sampling parameters.
        max_sequence_length: maximum number of tokens in a prompt and its response together.
        tokenizer: decodes the ends of responses, to detect stop strings.
        max_batch_size: maximum number of concurrent sequences of a replica.
        prefill_tokens: maximum number of prompt tokens in a forward pass.
        recorded: names of the choices for each token that are returned (`CHOICES`).
        cuda_graphs: whether a GPU replays steps as CUDA graphs where it can (`Decoder.can_replay`).

    Raises:
        UserError: the model does not make a choice that is to be recorded.
    """

    def __init__(
        self,
        model: ModelShard,
        params: SamplingParams,
        max_sequence_length: int,
        tokenizer: Any,
        max_batch_size: int = 64,
        prefill_tokens: int = 8192,
        recorded: Sequence[str] = (),
        cuda_graphs: bool = True,
    ) -> None:
        self.decoder, self.topology, self.params = Decoder(model, recorded), model.topology, params
        self.model, self.uses_graphs = model, cuda_graphs and self.decoder.can_replay
        choices = model.family.choices()
        if missing := [name for name in recorded if name not in choices]:
            kind = CHOICES[missing[0]]
            raise UserError(
                f"model.{kind.option}: {model.family.model_type} chooses no {kind.what}; leave model.{kind.option} out"
            )
        self.recorded = [choices[name] for name in recorded]
        self.max_sequence_length, self.tokenizer = max_sequence_length, tokenizer
        self.max_batch_size, self.prefill_tokens = max_batch_size, prefill_tokens
        self.stop_strings = StopStrings(params.stop_strings, tokenizer)
        self.lag = int(platform.is_asynchronous())
        self.makes_room: TrainedHere | None = None
        self.say: PrintLine = silent

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Prepare generation. If `makes_room` is set, offload the policy's training state, but not its weights."""
        if self.makes_room is not None:
            self.makes_room.offload_before_refit()
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """End generation. If `makes_room` is set, move what was offloaded back to the device."""
        if self.makes_room is not None:
            self.makes_room.prepare_for_training()
        return True

    @torch.no_grad()
    def generate(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        greedy: bool = False,
        max_new_tokens: Sequence[int] | None = None,
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Return a response to the prompt in each row. Collective; a replica without rows must call it too.

        Args:
            greedy: always take the most likely token, whatever the temperature is.
            max_new_tokens: for each row, the maximum number of tokens in its response. Default: the sampling
                parameters' value for all rows.

        Raises:
            UserError: a prompt is empty, or leaves no room for a response.
        """
        self.model.finish_param_gather()
        params = replace(self.params, temperature=0.0) if greedy else self.params
        asked = prompts_of(data, self.max_sequence_length)
        limits = max_new_tokens or [params.max_new_tokens] * len(asked)
        images = data.get(IMAGES) or [()] * len(asked)
        sharing = (
            [self.topology.context] if isinstance(data, LocalBatch) else [self.topology.data, self.topology.context]
        )
        places = range(len(asked))
        for dimension in sharing:  # ranks get neighbouring rows, because equal prompts are computed once per rank
            places = dimension.part_of(places)
        mine = []
        for row in places:
            sample_id, prompt = asked[row]
            limit = min(limits[row], self.max_sequence_length - len(prompt))
            mine.append(RunningSequence(row, sample_id, prompt, limit, images=tuple(images[row] or ())))
        responses: list[Response] = []
        with self.decoder.generating():
            if mine:
                replicas = self.topology.data.size * self.topology.context.size
                responses = ContinuousBatch(
                    self.decoder,
                    mine,
                    params,
                    self.stop_strings,
                    min(len(mine), self.max_batch_size),
                    self.prefill_tokens,
                    self.lag,
                    self.uses_graphs,
                    GenerationProgress(len(mine), replicas, self.say),
                ).run()
            self.decoder.run_idle()
        return self._collect(mine, responses, [prompt for _, prompt in asked], sharing)

    def _collect(
        self,
        mine: list[RunningSequence],
        responses: list[Response],
        prompts: list[tuple[int, ...]],
        sharing: Sequence[ParallelDimension],
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Gather the responses of all ranks among which the prompts were divided; return prompts with responses.

        Args:
            mine: this rank's sequences.
            responses: their responses.
            prompts: the prompts of all ranks.
            sharing: the parallel dimensions over which the prompts were divided.
        """
        # Parts consist of neighbouring rows, so rank order is row order.
        gathered = gather_responses(self._with_kept_tokens(responses), *reversed(sharing))
        collected = output_of(prompts, gathered, self.tokenizer.pad_token_id)
        for choice in self.recorded:
            collected[choice.name] = self._collect_choices(choice, mine, collected, sharing)
        return collected

    def _with_kept_tokens(self, responses: list[Response]) -> list[Response]:
        """Add the kept tokens to the responses. Only the last stage has them. Collective over the pipeline."""
        pipeline = self.topology.pipeline
        if not self.params.keeps_mask or pipeline.size == 1:
            return responses
        own = KeptTokens.concatenated([response.kept_tokens for response in responses if response.kept_tokens])
        kept = KeptTokens(gather_rows(own.counts, pipeline), gather_rows(own.ids, pipeline))
        if not len(kept):  # greedy responses have none
            return responses
        parts = kept.split([len(response.token_ids) for response in responses])
        return [replace(response, kept_tokens=part) for response, part in zip(responses, parts, strict=True)]

    def _collect_choices(
        self,
        choice: RecordedChoice,
        mine: list[RunningSequence],
        collected: BatchedDataDict[Any],
        sharing: Sequence[ParallelDimension],
    ) -> Tensor:
        """Gather recorded choices from all stages and all ranks; return [B, S', layers, size].

        The other arguments are those of `_collect`. The last token of a response was not an input of the model; its
        entries are −1, like the padding's.
        """
        layers = self.decoder.recording_layers[choice.name]
        fed = (collected["unpadded_sequence_lengths"] - 1).tolist()
        own = [s.choices()[choice.name] for s in mine] if layers else []
        of_stage = torch.cat([torch.zeros(0, len(layers), choice.size, dtype=choice.dtype), *own])
        if layers:  # as bytes: NCCL has no int16
            of_stage = gather_rows(of_stage.view(torch.uint8), *reversed(sharing)).view(choice.dtype)
        by_layer = of_stage.transpose(0, 1).reshape(len(layers), sum(fed) * choice.size)
        numbers = gather_rows(torch.tensor(layers, dtype=torch.long), self.topology.pipeline)
        of_all = gather_rows(by_layer.contiguous().view(torch.uint8), self.topology.pipeline).view(choice.dtype)
        chosen = torch.empty(sum(fed), *choice.shape, dtype=choice.dtype)
        chosen[:, numbers] = of_all.view(len(numbers), sum(fed), choice.size).transpose(0, 1)
        rows = choice.unknown(*collected["output_ids"].shape)
        for row, part in enumerate(chosen.split(fed)):
            rows[row, : len(part)] = part
        return rows


def sampling_params_of(config: RLConfig, tokenizer: Any) -> SamplingParams:
    """Return the sampling parameters that the configuration's options set; stop tokens come from the tokenizer."""
    options = config.rollouts
    return SamplingParams(
        max_new_tokens=config.max_response_length,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        stop_token_ids=tuple(sorted(end_token_ids(tokenizer))),
        stop_strings=options.stop_strings,
        seed=config.seed,
        max_kept_tokens=options.sampled_at_most,
    )


def megatron_generation_of(
    config: RLConfig, policy: Any, tokenizer: Any, say: PrintLine = silent
) -> MegatronGeneration:
    """Return an object that generates with the model of `policy`, a `MegatronPolicy`; `config` sets the options.

    Args:
        say: see `MegatronGeneration`.
    """
    generation = MegatronGeneration(
        policy.model,
        sampling_params_of(config, tokenizer),
        config.data.max_sequence_length,
        tokenizer,
        config.rollouts.generation_batch_size,
        recorded=replayed_choices(config.model),
        cuda_graphs=config.generation.cuda_graphs,
    )
    generation.say = say
    if config.generation.offload:
        generation.makes_room = policy
    return generation
