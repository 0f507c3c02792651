"""The forward pass of generation: the modules that train, their core attention exchanged for one with a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl import platform
from mcore_rl.distributed.collectives import all_gather, all_reduce
from mcore_rl.distributed.logprobs import gather_hidden_states, valid_columns
from mcore_rl.models.megatron.attention import PackParams
from mcore_rl.models.megatron.build import BuiltModel
from mcore_rl.models.megatron.layers import FasterInGeneration, linear
from mcore_rl.models.megatron.moe import routers_of

# Attention of one layer: its number on this rank, queries [T, heads, d], keys and values [T, groups, d]
# → [T, heads · d].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class CachedAttention(torch.nn.Module):
    """In place of a layer's core attention while sequences are generated."""

    def __init__(self, decoder: Decoder, layer: int) -> None:
        super().__init__()
        self.decoder, self.layer = [decoder], layer  # in a list: not a part of this module

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[T, heads, d] queries and [T, groups, d] keys and values → [T, heads · d]."""
        return self.decoder[0].attend(self.layer, query, key, value)


class Decoder:
    """This rank's chunks of the model, run on a few tokens at a time.

    Replicas that share out experts must run the model equally often: one that has no sequences left runs it on
    nothing as long as others go on (`run_idle`).
    """

    attend: Attend
    routed: Tensor
    """Experts of the last pass's tokens, [T, layers with experts on this rank, topk], if they are to be recorded."""

    def __init__(self, model: BuiltModel, record_experts: bool = False) -> None:
        self.model, self.topology, family = model, model.topology, model.family
        tp = self.topology.tensor.size
        # Where there are fewer key-value heads than ranks, several share one of them and split its queries.
        self.groups, self.head_dim = max(1, family.num_query_groups // tp), family.head_dim
        self.windows = [family.window(index) for index in model.layer_numbers()]
        self.scale = family.softmax_scale
        self.layers = [layer for chunk in model.chunks for layer in chunk.decoder.layers]
        self.dtype = next(iter(model.chunks[0].parameters())).dtype
        self.token_multiple = tp if self.topology.sequence_parallel else 1
        self.in_lockstep = self.topology.expert.size > 1
        self.routers = routers_of(model) if record_experts else []

    @contextmanager
    def generating(self) -> Iterator[None]:
        """The modules as generation wants them; inside, `forward` may be called."""
        attentions = [layer.self_attention for layer in self.layers]
        originals = [attention.core_attention for attention in attentions]
        faster = [
            module
            for chunk in self.model.chunks
            for module in chunk.modules()
            if isinstance(module, FasterInGeneration)
        ]
        for chunk in self.model.chunks:
            chunk.eval()
        try:
            for module in faster:
                module.in_generation = True
            for index, attention in enumerate(attentions):
                attention.core_attention = CachedAttention(self, index)
            yield
        finally:
            for module in faster:
                module.in_generation = False
            for attention, original in zip(attentions, originals, strict=True):
                attention.core_attention = original

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """All stages' layers on tokens [T]; final states [T, hidden] on the last stage, nothing of use on others."""
        if self.in_lockstep:
            self._running(1.0)
        return self._run(tokens, positions, attend)

    def run_idle(self) -> None:
        """Run on nothing for as long as another replica runs."""
        nothing = torch.zeros(0, dtype=torch.long, device=platform.device())
        while self.in_lockstep and bool(self._running(0.0) > 0):
            self._run(nothing, nothing, lambda layer, query, key, value: query.flatten(1))

    def _running(self, this_one: float) -> Tensor:
        """[1] how many replicas run the model now; who runs it himself need not read it."""
        runs = torch.full((1,), this_one, device=platform.device())
        return all_reduce(all_reduce(runs, self.topology.context.group), self.topology.data.group)

    def _run(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Tokens are padded to what sequence parallelism can share out, and to one at least."""
        count, multiple = len(tokens), self.token_multiple
        padding = max(-(-count // multiple), 1) * multiple - count
        tokens, positions = F.pad(tokens, (0, padding)), F.pad(positions, (0, padding))

        def attend_real(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if not padding:
                return attend(layer, query, key, value)
            return F.pad(attend(layer, query[:count], key[:count], value[:count]), (0, 0, 0, padding))

        self.attend = attend_real
        inputs = {
            "input_ids": tokens[None],
            "position_ids": positions[None],
            "attention_mask": None,
            "packed_seq_params": PackParams(qkv_format="thd", positions=positions),
        }
        for chunk in self.model.chunks:
            if not chunk.pre_process:
                chunk.set_input_tensor(self._received(len(tokens)))
            x: Tensor = chunk(**inputs)
            if not chunk.post_process:
                self._send(x)
        if self.routers:
            routed = torch.stack([router.chosen_last() for router in self.routers], dim=1)
            if self.topology.sequence_parallel:
                routed = all_gather(routed, self.topology.tensor.group).flatten(0, 1)
            self.routed = routed[:count]
        if not self.topology.is_last_stage:
            return x.new_empty(count, x.shape[-1])
        return gather_hidden_states(x, self.topology.tensor.group, self.topology.sequence_parallel)[:count]

    def _received(self, count: int) -> Tensor:
        pipeline, hidden = self.topology.pipeline, self.model.family.hidden_size
        x = torch.empty(count // self.token_multiple, 1, hidden, dtype=self.dtype, device=platform.device())
        torch.distributed.recv(x, group=pipeline.group, group_src=(pipeline.rank - 1) % pipeline.size)
        return x

    def _send(self, x: Tensor) -> None:
        pipeline = self.topology.pipeline
        torch.distributed.send(x.contiguous(), group=pipeline.group, group_dst=(pipeline.rank + 1) % pipeline.size)

    def logits(self, x: Tensor) -> Tensor:
        """[n, hidden] final states → [n, Vp] fp32; −inf in the vocabulary's padding."""
        logits = linear(x, self.model.chunks[-1].lm_head_weight()).float()
        logits[:, valid_columns(logits.shape[1], self.topology.tensor.rank, self.model.vocab_size) :] = -torch.inf
        return logits
