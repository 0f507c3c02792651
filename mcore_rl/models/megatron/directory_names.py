"""Names of tensors that differ between directories of the same model.

Families name tensors as published directories do, and transformers may write others; DeepSeek-V4's names are those of
transformers' modules, which neither has.
"""

from __future__ import annotations

import re

RENAMED = (
    (r"\.block_sparse_moe\.((gate|up|down)_proj\.weight)$", r".mlp.\1"),  # dense layers of Kimi Linear
    (r"\.hc_pre\.(hc_(?:attn|mlp)_layer)\.hc_(fn|base|scale)$", r".\1.hc_pre.hc_\2"),  # this and the next two: HY-4
    (r"\.hc_pre\.(hc_head\.hc_head_(?:fn|base|scale))$", r".\1"),
    (r"\.(mlp(?:\.shared_experts)?)\.linear_gate\.weight$", r".\1.gate_proj.weight"),
    (r"^head\.weight$", "lm_head.weight"),  # this and the others: DeepSeek-V4
    (r"^embed\.weight$", "model.embed_tokens.weight"),
    (r"^norm\.weight$", "model.norm.weight"),
    (r"^hc_head_(fn|base|scale)$", r"model.hc_head.hc_\1"),
    (r"^(?:model\.)?(layers\.\d+)\.hc_(attn|ffn)_(fn|base|scale)$", r"model.\1.\2_hc.\3"),
    (r"^(?:model\.)?(layers\.\d+)\.attn_norm\.", r"model.\1.input_layernorm."),
    (r"^(?:model\.)?(layers\.\d+)\.ffn_norm\.", r"model.\1.post_attention_layernorm."),
)
"""Pairs of a pattern of names in some directories, and the name in the family."""
_IN_BLOCK = re.compile(r"^(?:model\.)?(layers\.\d+)\.(attn|ffn)\.(.*)$")
IN_ATTENTION = (
    (r"^indexer\.weights_proj\.", "compressor.indexer.scorer.weights_proj."),
    (r"^indexer\.wq_b\.", "compressor.indexer.q_b_proj."),
    (r"^indexer\.compressor\.", "compressor.indexer."),
    (r"^attn_sink$", "sinks"),
    (r"\bape$", "position_bias"),
    (r"\bq_norm\.", "q_a_norm."),
    (r"\bnorm\.", "kv_norm."),
    (r"\bwgate\.", "gate_proj."),
    (r"\bwkv\.", "kv_proj."),
    (r"\bw(q_a|q_b|o_a|o_b)\.", r"\1_proj."),
)
IN_MLP = (
    (r"^gate\.bias$", "gate.e_score_correction_bias"),
    (r"\bw1\.", "gate_proj."),
    (r"\bw2\.", "down_proj."),
    (r"\bw3\.", "up_proj."),
)


def name_in_family(name: str) -> str:
    """Return the name that a family uses for the tensor that a directory calls `name`."""
    for pattern, new in RENAMED:
        name = re.sub(pattern, new, name)
    if (match := _IN_BLOCK.match(name)) is None:
        return name
    layer, block, rest = match.groups()
    for pattern, new in IN_ATTENTION if block == "attn" else IN_MLP:
        rest = re.sub(pattern, new, rest)
    return f"model.{layer}.{'self_attn' if block == 'attn' else 'mlp'}.{rest}"
