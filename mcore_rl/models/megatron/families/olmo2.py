"""OLMo-2: norms behind attention and MLP instead of before them; one norm over all heads of queries, and of keys."""

from mcore_rl.models.megatron.families.base import Family


class Olmo2(Family):
    model_type = "olmo2"
    has_windows = False
    needs_torch_layers = True
    norms_before = False
    norms_after = True
    norm_names = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
    has_wide_qk_norm = True

    def divisible_by_tensor_parallel(self) -> dict[str, int]:
        return {**super().divisible_by_tensor_parallel(), "key-value heads": self.num_query_groups}
