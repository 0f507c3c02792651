"""Attention over packs (thd) with causal masks; under context parallelism each rank has two chunks of each sequence."""

import torch

from transformer_engine.pytorch.distributed import gather_rows
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.refusal import refuse

from . import rope


class DotProductAttention(TransformerEngineBaseModule):
    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal",
        window_size=None,
        sequence_parallel=False,
        tp_size=1,
        get_rng_state_tracker=None,
        tp_group=None,
        layer_number=None,
        attention_type="self",
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type="p2p",
        softmax_scale=None,
        softmax_type="vanilla",
        return_max_logit=False,
    ):
        super().__init__()
        refuse(
            "DotProductAttention",
            attention_dropout=attention_dropout,
            window_size=window_size is not None,
            softmax_type=softmax_type != "vanilla",
            return_max_logit=return_max_logit,
            attention_type=attention_type != "self",
            different_channels=isinstance(kv_channels, tuple) and kv_channels[0] != kv_channels[1],
        )
        channels = kv_channels[0] if isinstance(kv_channels, tuple) else kv_channels
        self.softmax_scale = channels**-0.5 if softmax_scale is None else softmax_scale
        self.heads, self.groups = num_attention_heads // tp_size, (num_gqa_groups or num_attention_heads) // tp_size
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def set_context_parallel_group(self, cp_group, cp_global_ranks, cp_stream, cp_comm_type="p2p"):
        if isinstance(cp_group, list):
            raise NotImplementedError("the stand-in has no hierarchical context parallelism")
        self.cp_group, self.cp_comm_type = cp_group, cp_comm_type

    def forward(
        self,
        query_layer,
        key_layer,
        value_layer,
        attention_mask=None,
        qkv_format=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        attn_mask_type=None,
        window_size=None,
        checkpoint_core_attention=False,
        core_attention_bias_type="no_bias",
        core_attention_bias=None,
        alibi_slopes=None,
        fast_zero_fill=True,
        inference_params=None,
        pad_between_seqs=None,
        fp8_output=False,
    ):
        refuse(
            "DotProductAttention",
            attention_mask=attention_mask is not None,
            window_size=window_size is not None,
            checkpoint_core_attention=checkpoint_core_attention,
            bias=core_attention_bias_type != "no_bias",
            alibi_slopes=alibi_slopes is not None,
            inference_params=inference_params is not None,
            fp8_output=fp8_output,
        )
        self.note_recipe()  # attention itself is never computed in FP8
        if (qkv_format or self.qkv_format) != "thd" or (attn_mask_type or self.attn_mask_type) != "padding_causal":
            raise NotImplementedError("the stand-in attends to packs (thd) with the mask padding_causal only")
        if cu_seqlens_q is None or cu_seqlens_kv is None or max_seqlen_q is None or max_seqlen_kv is None:
            raise AssertionError("packs need cu_seqlens and max_seqlen")
        if (query_layer.shape[-2], key_layer.shape[-2]) != (self.heads, self.groups):
            raise AssertionError("queries or keys have another number of heads than the module")
        padded = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
        starts, slots = padded[:-1].tolist(), padded.diff().tolist()
        if max(slots) > max_seqlen_q:
            raise AssertionError("a sequence is longer than max_seqlen_q")
        return self._attend(query_layer, key_layer, value_layer, starts, slots, cu_seqlens_q.diff().tolist())

    def _attend(self, query, key, value, starts, slots, lengths):
        """Return [T / CP, heads · d]; rows in the padding of a sequence are 0."""
        size = 1 if self.cp_group is None else self.cp_group.size()
        rank = 0 if size == 1 else self.cp_group.rank()
        chunks = 2 * size if size > 1 else 1
        if any(slot % chunks for slot in slots):
            raise AssertionError(f"each sequence must be a multiple of {chunks}")
        keys, values = (gather_rows(x, self.cp_group).unflatten(0, (size, -1)) for x in (key, value))
        own = (rank, chunks - 1 - rank) if size > 1 else (0,)
        pieces = []
        for start, slot, length in zip(starts, slots, lengths, strict=True):
            first, width = start // size, slot // chunks
            place = [(min(n, chunks - 1 - n), first + (width if n >= size and size > 1 else 0)) for n in range(chunks)]
            whole = [torch.cat([x[owner, begin : begin + width] for owner, begin in place]) for x in (keys, values)]
            for number in own:
                begin = place[number][1]
                pieces.append(self._chunk(query[begin : begin + width], *whole, number * width, length))
        attended = torch.cat(pieces)
        return torch.cat((attended, attended.new_zeros(len(query) - len(attended), *attended.shape[1:]))).flatten(1)

    def _chunk(self, query, keys, values, offset, length):
        """Attend with queries, the first of which is token `offset` of a sequence of `length` tokens."""
        keys, values = (x.repeat_interleave(self.heads // self.groups, dim=1).float() for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * self.softmax_scale
        queries, others = torch.arange(offset, offset + len(query))[:, None], torch.arange(len(keys))
        scores = scores.masked_fill(others > queries, -torch.inf)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        return (out * (queries < length)[..., None]).to(query.dtype)
