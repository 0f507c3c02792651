"""Generation by the training model itself, in the training processes.

Data- and context-parallel ranks are replicas that divide the prompts. The tensor- and pipeline-parallel ranks of a
replica run the same steps. A replica runs up to `max_batch_size` sequences at once (`ContinuousBatch`). A prompt that
is already being answered (the others of its group) is not computed again.
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
from mcore_rl.distributed.batched_data_dict import BatchedDataDict, LocalBatch
from mcore_rl.distributed.collectives import gather_rows
from mcore_rl.distributed.sampling_mask import KeptTokens
from mcore_rl.distributed.topology import ParallelDimension
from mcore_rl.errors import UserError
from mcore_rl.models.generation.continuous_batching import ContinuousBatch, RunningSequence, StopStrings
from mcore_rl.models.generation.decoder import Decoder
from mcore_rl.models.generation.interfaces import (
    GenerationDatumSpec,
    GenerationInterface,
    GenerationOutputSpec,
    Response,
    gather_responses,
    output_of,
    prompts_of,
)
from mcore_rl.models.generation.sampling import SamplingParams
from mcore_rl.models.megatron.build import ModelShard
from mcore_rl.models.megatron.families.mixtures import Mixture


class TrainedHere(Protocol):
    """The methods of a policy that releases memory while its model generates."""

    def offload_before_refit(self) -> int: ...

    def prepare_for_training(self) -> None: ...


class MegatronGeneration(GenerationInterface):
    """Generation with the weights of a model in training.

    Args:
        params: sampling parameters.
        max_sequence_length: limit of prompt and response together, in tokens.
        tokenizer: decodes the ends of responses, for stop strings.
        max_batch_size: maximum number of concurrent sequences of a replica.
        prefill_tokens: maximum number of prompt tokens in a forward pass.
        record_experts: return the experts of every token.

    lag: see `ContinuousBatch`. makes_room: the policy that releases its gradients and optimizer state meanwhile.

    Raises:
        UserError: `record_experts` is set and the model has no experts.
    """

    def __init__(
        self,
        model: ModelShard,
        params: SamplingParams,
        max_sequence_length: int,
        tokenizer: Any,
        max_batch_size: int = 64,
        prefill_tokens: int = 8192,
        record_experts: bool = False,
    ) -> None:
        self.decoder, self.topology, self.params = Decoder(model, record_experts), model.topology, params
        self.model = model
        if record_experts and not isinstance(model.family, Mixture):
            raise UserError(f"model.moe_router_replay: {model.family.model_type} has no experts; leave it out")
        self.record_experts, self.family = record_experts, model.family
        self.max_sequence_length, self.tokenizer = max_sequence_length, tokenizer
        self.max_batch_size, self.prefill_tokens = max_batch_size, prefill_tokens
        self.stop_strings = StopStrings(params.stop_strings, tokenizer)
        self.lag = int(platform.is_asynchronous())
        self.makes_room: TrainedHere | None = None

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Prepare generation; with `makes_room` the policy keeps only its weights on the device."""
        if self.makes_room is not None:
            self.makes_room.offload_before_refit()
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """End generation; with `makes_room` the policy's memory is restored."""
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
        """Return a response to each row. Collective, also for a replica without rows.

        Args:
            greedy: take the most likely token, independent of the temperature.
            max_new_tokens: a limit for each row; by default the limit of the sampling parameters.

        Raises:
            UserError: a prompt is empty, or leaves no room for a response.
        """
        self.model.finish_param_gather()
        params = replace(self.params, temperature=0.0) if greedy else self.params
        asked = prompts_of(data, self.max_sequence_length)
        limits = max_new_tokens or [params.max_new_tokens] * len(asked)
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
            mine.append(RunningSequence(row, sample_id, prompt, limit))
        responses: list[Response] = []
        with self.decoder.generating():
            if mine:
                rows = min(len(mine), self.max_batch_size)
                batch = ContinuousBatch(
                    self.decoder, mine, params, self.stop_strings, rows, self.prefill_tokens, self.lag
                )
                responses = batch.run()
            self.decoder.run_idle()
        return self._collect(mine, responses, [prompt for _, prompt in asked], sharing)

    def _collect(
        self,
        mine: list[RunningSequence],
        responses: list[Response],
        prompts: list[tuple[int, ...]],
        sharing: Sequence[ParallelDimension],
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Gather the sequences of all ranks that divide them."""
        # Parts consist of neighbouring rows, so rank order is row order.
        gathered = gather_responses(self._with_kept_tokens(responses), *reversed(sharing))
        collected = output_of(prompts, gathered, self.tokenizer.pad_token_id)
        if self.record_experts:
            collected["routed_experts"] = self._collect_experts(mine, collected, sharing)
        return collected

    def _with_kept_tokens(self, responses: list[Response]) -> list[Response]:
        """Return the responses with the kept tokens that only the last stage has. Collective over the pipeline."""
        pipeline = self.topology.pipeline
        if not self.params.keeps_mask or pipeline.size == 1:
            return responses
        own = KeptTokens.concatenated([response.kept_tokens for response in responses if response.kept_tokens])
        kept = KeptTokens(gather_rows(own.counts, pipeline), gather_rows(own.ids, pipeline))
        if not len(kept):  # greedy responses have none
            return responses
        parts = kept.split([len(response.token_ids) for response in responses])
        return [replace(response, kept_tokens=part) for response, part in zip(responses, parts, strict=True)]

    def _collect_experts(
        self, mine: list[RunningSequence], collected: BatchedDataDict[Any], sharing: Sequence[ParallelDimension]
    ) -> Tensor:
        """Gather experts of every stage as in `_collect`; return [B, S', layers with experts, topk] int16.

        Each token has experts except a response's last token, which was not an input of the model.
        """
        assert isinstance(self.family, Mixture)
        experts, layers = self.family.experts, [router.index for router in self.decoder.routers]
        fed = (collected["unpadded_sequence_lengths"] - 1).tolist()
        own = [s.experts() for s in mine] if layers else []
        of_stage = torch.cat([torch.zeros(0, len(layers), experts.topk, dtype=torch.int16), *own])
        if layers:  # as bytes: NCCL has no int16
            of_stage = gather_rows(of_stage.view(torch.uint8), *reversed(sharing)).view(torch.int16)
        by_layer = of_stage.transpose(0, 1).reshape(len(layers), sum(fed) * experts.topk)
        numbers = gather_rows(torch.tensor(layers, dtype=torch.long), self.topology.pipeline)
        of_all = gather_rows(by_layer.contiguous().view(torch.uint8), self.topology.pipeline).view(torch.int16)
        routed = torch.empty(sum(fed), sum(experts.sparse_layers), experts.topk, dtype=torch.int16)
        routed[:, numbers] = of_all.view(len(numbers), sum(fed), experts.topk).transpose(0, 1)
        shape = (*collected["output_ids"].shape, *routed.shape[1:])
        rows = torch.full(shape, -1, dtype=torch.int16)
        for row, part in enumerate(routed.split(fed)):
            rows[row, : len(part)] = part
        return rows


def sampling_params_of(config: RLConfig, tokenizer: Any) -> SamplingParams:
    """Return the sampling parameters of the configuration."""
    options = config.rollouts
    return SamplingParams(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        stop_token_ids=tuple(sorted(end_token_ids(tokenizer))),
        stop_strings=options.stop_strings,
        seed=config.seed,
        max_kept_tokens=options.sampled_at_most,
    )


def megatron_generation_of(config: RLConfig, policy: Any, tokenizer: Any) -> MegatronGeneration:
    """Return generation with the model of `policy`, a `MegatronPolicy`, by the configuration's options."""
    generation = MegatronGeneration(
        policy.model,
        sampling_params_of(config, tokenizer),
        config.data.max_sequence_length,
        tokenizer,
        config.rollouts.generation_batch_size,
        record_experts=config.model.moe_router_replay,
    )
    if config.generation.offload:
        generation.makes_room = policy
    return generation
