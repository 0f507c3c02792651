"""Names of the fused router, which Megatron imports unconditionally; `moe_router_fusion` is not supported."""


def fused_topk_with_score_function(
    logits, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias
):
    raise NotImplementedError("the fused router is not implemented here")


def fused_compute_score_for_moe_aux_loss(logits, topk, score_function):
    raise NotImplementedError("the fused router is not implemented here")


def fused_moe_aux_loss(probs, tokens_per_expert, total_num_tokens, num_experts, topk, coeff):
    raise NotImplementedError("the fused router is not implemented here")
