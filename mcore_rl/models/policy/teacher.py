"""A teacher whose whole distributions a student learns: hidden states and an LM head in the student's shards."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.config import TrainingConfig
from mcore_rl.data.batching import Microbatch
from mcore_rl.distributed.collectives import all_gather
from mcore_rl.distributed.divergences import LinearLogits
from mcore_rl.models.megatron.forward_step import last_states
from mcore_rl.models.megatron.weight_mapping import padded_vocab_size
from mcore_rl.models.policy.scoring import ScoringModel


class TeacherModel(ScoringModel):
    """A teacher with the student's layout and tokenizer; size and family may differ.

    Args:
        config: of the run, with the teacher's model.
        student_vocab_size: rows of the student's LM head, without padding.
    """

    def __init__(self, config: TrainingConfig, student_vocab_size: int) -> None:
        super().__init__(config)
        size = self.topology.tensor.size
        self.head_rows = padded_vocab_size(student_vocab_size, size) // size

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @cached_property
    def head(self) -> Tensor:
        """[Vp, hidden] the LM head's rows of this rank's share of the student's vocabulary; on the last stage.

        Its own shard, or where the vocabularies' sizes differ a copy of other rows: zeros where there is no token.
        """
        weight: Tensor = self.model.chunks[-1].lm_head_weight().detach()
        if weight.shape[0] == self.head_rows:
            return weight
        tensor = self.topology.tensor
        whole = F.pad(all_gather(weight, tensor.group).flatten(0, 1), (0, 0, 0, self.head_rows * tensor.size))
        return whole[self.head_rows * tensor.rank :][: self.head_rows].clone()

    @torch.no_grad()
    def counted_logits(self, microbatches: Sequence[Microbatch]) -> Mapping[Hashable, LinearLogits]:
        """Hidden states that predict each microbatch's counted tokens, beside `head`; {} but on the last stage.

        What stays in this rank's memory is [counted tokens, hidden size] of its share of the batch.

        Raises:
            RuntimeError: the weights are offloaded.
        """
        self.require_weights("counted_logits")
        found: dict[Hashable, LinearLogits] = {}

        def keep(hidden: Tensor, microbatch: Microbatch) -> tuple[Tensor, dict[str, Any]]:
            picked = last_states(self.model, hidden, microbatch).logits.hidden
            found[microbatch] = LinearLogits(picked, self.head)
            return hidden.new_zeros(()), {}

        self._run(list(microbatches), keep, train=False)
        return found
