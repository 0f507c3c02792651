"""Mixtral: every layer a mixture, the weights of the chosen experts renormalised."""

from functools import cached_property

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.families.mixture import Experts, Mixture


class Mixtral(Mixture):
    model_type = "mixtral"
    count_field = "num_local_experts"
    width_field = "intermediate_size"
    expert_names = ("w1", "w3", "w2")
    mlp_name = "block_sparse_moe"

    @cached_property
    def experts(self) -> Experts:
        hf = self.hf
        sparse = (True,) * self.num_layers
        return Experts(hf.num_local_experts, hf.num_experts_per_tok, hf.intermediate_size, sparse)

    def check(self, max_sequence_length: int) -> None:
        super().check(max_sequence_length)
        if self.hf.router_jitter_noise:
            raise UserError("model.path: router_jitter_noise other than 0 is not supported")
