"""NeMo RL's import path of functions that `mcore_rl.compat.nemo_rl.model_utils` defines."""

from mcore_rl.compat.nemo_rl.model_utils import (
    _get_tokens_on_this_cp_rank,
    allgather_cp_sharded_tensor,
    from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs_packed_sequences,
)

__all__ = [
    "_get_tokens_on_this_cp_rank",
    "allgather_cp_sharded_tensor",
    "from_parallel_logits_to_logprobs",
    "from_parallel_logits_to_logprobs_packed_sequences",
]
