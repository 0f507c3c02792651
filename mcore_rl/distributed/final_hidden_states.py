"""The final hidden states and the LM head, for losses that build no logits."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_rl.distributed.linear_divergences import Divergences, LinearLogits, linear_divergences
from mcore_rl.distributed.linear_logprobs import linear_logprobs
from mcore_rl.distributed.loss_positions import CountedPositions


@dataclass(frozen=True)
class LastStates:
    """A microbatch's hidden states that predict counted tokens, beside the LM head.

    Values [N, S − 1, …] are of the whole rows, the same on every rank, 0 where nothing counts.

    microbatch: which one this is, for who knows more about it.
    logits: n rows of hidden states of this context-parallel rank; the head's rows of this tensor-parallel rank.
    inputs: where the input positions of these rows are among those of the flattened rows [N·S].
    vocab_size: of the vocabulary without its padding.
    temperature: divides all logits, beside what a loss divides them by.
    """

    microbatch: Hashable
    logits: LinearLogits
    positions: CountedPositions
    inputs: Int[Tensor, " n"]
    vocab_size: int
    temperature: float
    tensor_parallel_group: ProcessGroup | None
    context_parallel_group: ProcessGroup | None

    def logprobs_of(
        self, tokens: Int[Tensor, "rows seq k"], temperature: float, with_entropy: bool, normalize: bool = True
    ) -> tuple[Float[Tensor, "rows predicted k"], Float[Tensor, "rows predicted"] | None]:
        """Log-probabilities of the K tokens that stand at each *input* position, and the distributions' entropies.

        With `normalize=False` the first are logits, divided by the temperature (`linear_logprobs`).
        """
        logprobs, entropy = linear_logprobs(
            self.logits.hidden,
            self.logits.weight,
            tokens.flatten(0, 1)[self.inputs],
            self.tensor_parallel_group,
            self.vocab_size,
            temperature * self.temperature,
            with_entropy,
            normalize,
        )
        return self._spread(logprobs), None if entropy is None else self._spread(entropy)

    def divergences(
        self, teacher: LinearLogits, vocab_size: int, temperature: float, js_beta: float | None
    ) -> Divergences:
        """From a teacher's distributions at the same positions, over the vocabulary's first `vocab_size` tokens."""
        forward_kl, reverse_kl, js = linear_divergences(
            self.logits, teacher, self.tensor_parallel_group, vocab_size, temperature * self.temperature, js_beta
        )
        return Divergences(self._spread(forward_kl), self._spread(reverse_kl), None if js is None else self._spread(js))

    def _spread(self, values: Tensor) -> Tensor:
        return self.positions.spread(values, self.context_parallel_group)
