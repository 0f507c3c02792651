"""Answers by the policy's own weights, asked of the object that users hold."""

from __future__ import annotations

from typing import Any

from mcore_rl.config import RLConfig, TrainingConfig
from mcore_rl.data.tokenize import load_tokenizer
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.errors import ContractError
from mcore_rl.models.generation.interfaces import GenerationDatumSpec, GenerationInterface, GenerationOutputSpec
from mcore_rl.models.generation.megatron_generation import MegatronGeneration, megatron_generation_of
from mcore_rl.models.generation.sampling import SamplingParams
from mcore_rl.models.megatron.build import BuiltModel
from mcore_rl.models.megatron.optimizer import Offload


class Generating(GenerationInterface):
    """The part of the Megatron policy that generates in the training processes."""

    config: TrainingConfig
    model: BuiltModel
    weights_away: Offload
    generation: MegatronGeneration | None

    def prepare_for_generation(
        self,
        params: SamplingParams | None = None,
        max_sequence_length: int | None = None,
        tokenizer: Any = None,
        max_batch_size: int = 64,
    ) -> bool:
        """Make ready for `generate`, with the weights as they then are.

        Args:
            params: how tokens are drawn; without it, a GRPO configuration says so, or the call before this one.
            max_sequence_length: of prompt and response together; `data.max_sequence_length` if left out.
            tokenizer: the model directory's own if left out.

        Raises:
            ContractError: nothing says how tokens are drawn.
        """
        self.weights_away.restore()
        if params is None and self.generation is not None:
            return self.generation.prepare_for_generation()
        tokenizer = tokenizer or load_tokenizer(self.config.model.path, self.config.model.trust_remote_code)
        if params is not None:
            limit = max_sequence_length or self.config.data.max_sequence_length
            self.generation = MegatronGeneration(self.model, params, limit, tokenizer, max_batch_size)
        elif isinstance(self.config, RLConfig):
            self.generation = megatron_generation_of(self.config, self, tokenizer)
        else:
            raise ContractError("prepare_for_generation: give SamplingParams; the configuration is not GRPO's")
        return self.generation.prepare_for_generation()

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """A response to each row, by the current weights; as `MegatronGeneration.generate`."""
        self.require("generate", self.weights_away)  # type: ignore[attr-defined]
        if self.generation is None:
            self.prepare_for_generation()
        assert self.generation is not None
        return self.generation.generate(data, greedy)

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        return self.generation is None or self.generation.finish_generation()
