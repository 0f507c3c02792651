"""Qwen4 (`qwen4_exp`): gated delta nets, attention to chosen pools of keys, experts, a residual of gated streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.attention.attention import TokenMixer
from mcore_rl.models.megatron.attention.pooled import MeanIndexer, PooledSparseAttention
from mcore_rl.models.megatron.families.base import PredictionNames
from mcore_rl.models.megatron.families.mixtures import Experts
from mcore_rl.models.megatron.families.qwen_next import Qwen35MoEText
from mcore_rl.models.megatron.layers.gated_streams import GatedStreams
from mcore_rl.models.megatron.layers.ngram_embedding import NGramEmbedding, hash_multipliers, primes_from
from mcore_rl.models.megatron.recurrent.gated_delta_net import GatedDeltaNet
from mcore_rl.models.megatron.weight_mapping import Mapping, Part, Shape, Table, replicated_mappings

GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


class Qwen4Text(Qwen35MoEText):
    model_type = "qwen4_exp_text"
    gradient_tolerance = 1e-2  # one score of an n-gram's gate near 0, whose root has a large derivative, may decide one
    norms_before = False  # the connections of the streams have norms
    final_norm_name = "hyper_connection_mixer"

    def __init__(self, hf: Any) -> None:
        super().__init__(hf)
        self.streams = GatedStreams(self.hf.hc_count, float(self.hf.rms_norm_eps), self.hf.hc_lowrank)

    @cached_property
    def experts(self) -> Experts:
        return replace(super().experts, normalise=self.hf.norm_topk_prob)

    def token_mixer(self, layer: int) -> TokenMixer:
        hf = self.hf
        if hf.layer_types[layer] == "linear_attention":
            net = super().token_mixer(layer)
            assert isinstance(net, GatedDeltaNet)
            return replace(net, gate=GATES[hf.output_gate_type or hf.hidden_act])
        indexer = MeanIndexer(
            topk=hf.indexer_budget,
            pool=hf.indexer_compress_ratio,
            heads=hf.indexer_n_heads,
            head_dim=hf.indexer_head_dim,
            interleaved=False,
            source=layer,
            eps=hf.rms_norm_eps,
            frequencies=tuple(self.ropes()[0].tolist()),
            rope_factor=self.rope_factor(layer),
        )
        return self._grouped_query_attention(layer, PooledSparseAttention, output_gate=True, indexer=indexer)

    def check(self, max_sequence_length: int) -> None:
        hf = self.hf
        if hf.ple_layer_ids and hf.ngram_size < 2:
            raise UserError(f"model.path: ngram_size={hf.ngram_size} must be at least 2")
        if "indexed_attention" in hf.layer_types and hf.indexer_n_heads is None:
            raise UserError("model.path: indexer_n_heads must be set, as in transformers")
        super().check(max_sequence_length)

    def ngrams(self, layer: int) -> NGramEmbedding | None:
        hf = self.hf
        if layer + 1 not in hf.ple_layer_ids:
            return None
        index, heads = hf.ple_layer_ids.index(layer + 1), (hf.ngram_size - 1) * hf.heads_per_ngram
        sizes = primes_from(hf.ngram_vocab_size_base, heads * len(hf.ple_layer_ids))[index * heads :][:heads]
        multiple, end = hf.make_ngram_vocab_size_divisible_by, hf.eos_token_id
        return NGramEmbedding(
            multipliers=hash_multipliers(self.vocab_size, hf.ngram_size, index, hf.seed),
            heads=sizes,
            rows=-(-sum(sizes) // multiple) * multiple,
            head_dim=hf.ple_embed_dim // heads,
            end=end[0] if isinstance(end, list) else end,
            streams=self.streams_count,
            width=hf.ple_conv_kernel_size,
            eps=float(hf.rms_norm_eps),
        )

    @cached_property
    def _constants(self) -> dict[str, Tensor]:
        described = {layer: ngrams for layer in range(self.num_layers) if (ngrams := self.ngrams(layer)) is not None}
        return {
            f"{self.prefix}layers.{layer}.ple.ple_embedding.{name}": value
            for layer, ngrams in described.items()
            for name, value in ngrams.constants.items()
        }

    def prediction_names(self, k: int) -> PredictionNames | None:
        return None  # layers that predict further tokens would need streams of their own

    def constants(self) -> dict[str, Tensor]:
        return self._constants

    def passes_on(self, name: str) -> bool:
        return super().passes_on(name) or name in self._constants

    def active_parameters(self) -> int:
        tables = (ngrams.rows * ngrams.head_dim for n in range(self.num_layers) if (ngrams := self.ngrams(n)))
        return super().active_parameters() - sum(tables)

    def divisible_by_tensor_parallel(self) -> dict[str, int]:
        sizes = super().divisible_by_tensor_parallel()
        for layer in self.hf.ple_layer_ids[:1]:
            if (ngrams := self.ngrams(layer - 1)) is not None:
                sizes["size of an n-gram's embedding"] = ngrams.head_dim
        return sizes

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        super().shrink(layers, tensor_parallel, expert_parallel)
        hf = self.hf
        hf.hc_lowrank, hf.indexer_n_heads, hf.indexer_head_dim = 12, 8, 16
        hf.indexer_budget, hf.indexer_compress_ratio = 24, 4
        if hf.ple_layer_ids:
            hf.ple_layer_ids = [hf.layer_types.index("linear_attention") + 1]
            hf.heads_per_ngram, hf.ngram_vocab_size_base, hf.split_ngram_parts = 2, 40, 3
            hf.ple_embed_dim = (hf.ngram_size - 1) * hf.heads_per_ngram * 4 * max(2, tensor_parallel)

    def _last_norm(self, ours: str, theirs: str) -> Iterator[Mapping]:
        yield from self._connection(f"{ours}.", f"{theirs}.")

    def _layer(self, layer: int, ours: str, theirs: str) -> Iterator[Mapping]:
        if (ngrams := self.ngrams(layer)) is not None:
            yield from self._ngrams(ngrams, f"{ours}ngrams.", f"{theirs}ple.")
        yield from super()._layer(layer, ours, theirs)
        for ours_of_block, theirs_of_block in (("attention", "attn"), ("mlp", "mlp")):
            names = f"{ours}{ours_of_block}_streams.", f"{theirs}{theirs_of_block}_hyper_connection."
            yield from self._connection(*names, injects=True)

    def _ngrams(self, ngrams: NGramEmbedding, ours: str, theirs: str) -> Iterator[Mapping]:
        size = -(-ngrams.rows // self.hf.split_ngram_parts)  # of all parts but the last
        rows = tuple(min(size, ngrams.rows - first) for first in range(0, ngrams.rows, size))
        table = f"{theirs}ple_embedding.ngram_embedding.shard_"
        parts = tuple(Part(f"{table}{number}.weight", (n, ngrams.head_dim)) for number, n in enumerate(rows))
        yield Mapping(f"{ours}table", parts, Table(rows))
        wide = self.streams_count * self.hidden_size
        shapes: dict[str, tuple[str, Shape]] = {
            "key_norm": ("norm_key.weight", (wide,)),
            "query_norm": ("norm_query.weight", (wide,)),
            "conv_norm": ("norm_conv.weight", (wide,)),
            "conv_weight": ("conv1d.weight", (wide, 1, ngrams.width)),
            "key_proj.weight": ("key_proj.weight", (wide, ngrams.size)),
            "value_proj.weight": ("value_proj.weight", (self.hidden_size, ngrams.size)),
        }
        yield from replicated_mappings(ours, theirs, shapes)

    def _connection(self, ours: str, theirs: str, injects: bool = False) -> Iterator[Mapping]:
        """Yield the mappings of a gated mean or, if it `injects`, of a connection.

        Args:
            ours, theirs: prefixes of the Megatron and Hugging Face names.
        """
        count, rank = self.streams_count, self.hf.hc_lowrank
        width = count * self.hidden_size
        shapes: dict[str, tuple[str, Shape]] = {
            "norm_weight": ("hc_norm.weight", (width,)),
            "down_proj.weight": ("input_mix_weight_down.weight", (rank, width)),
            "up_proj.weight": ("input_mix_weight_up.weight", (width, rank)),
        }
        if injects:
            shapes["inject_proj.weight"] = "block_inject_weight.weight", (count, width)
        yield from replicated_mappings(ours, theirs, shapes)


class Qwen4(Qwen4Text):
    """The text model in a directory with a vision tower, which is exported unchanged."""

    model_type = "qwen4_exp"
    auto_class = "AutoModelForImageTextToText"
    prefix = "model.language_model."
    passed_on: ClassVar[tuple[str, ...]] = ("mtp.", "model.visual.")

    @staticmethod
    def text_config(hf: Any) -> Any:
        return hf.text_config

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        super().shrink(layers, tensor_parallel, expert_parallel)
        vision = self.whole.vision_config
        vision.depth, vision.hidden_size, vision.num_heads, vision.intermediate_size = 1, 16, 2, 24
        vision.out_hidden_size, vision.num_position_embeddings = self.hf.hidden_size, 16
