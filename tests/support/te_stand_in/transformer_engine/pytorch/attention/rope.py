"""Rotary embedding. Its angles have no factor on cos and sin, like the real function's."""


def apply_rotary_pos_emb(
    t,
    freqs,
    tensor_format="sbhd",
    start_positions=None,
    interleaved=False,
    fused=False,
    cu_seqlens=None,
    cp_size=1,
    cp_rank=0,
):
    raise NotImplementedError("the stand-in has no fused rotary embedding; apply_rope_fusion must be off")
