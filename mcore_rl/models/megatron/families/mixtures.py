"""Families of mixture-of-experts models.

They are Mixtral, Qwen2-MoE, Qwen3-MoE, MiniMax-M2, ERNIE-4.5, GLM-4.5 and gpt-oss; and with latent attention
DeepSeek-V3 (also Kimi-K2 and Moonlight), Mistral-4, GLM-4.7-Flash, DeepSeek-V3.2 and GLM-5.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, cast

from torch import Tensor

from mcore_rl.data.choices import ROUTED_EXPERTS, RecordedChoice
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.attention.attention import TokenMixer
from mcore_rl.models.megatron.attention.latent import LatentAttention
from mcore_rl.models.megatron.attention.small_value import SmallValueAttention
from mcore_rl.models.megatron.attention.sparse import Indexer
from mcore_rl.models.megatron.families.base import Family, PredictionNames, gated_mlp
from mcore_rl.models.megatron.families.dense import SLIDING, PositionScale, RopeByKind
from mcore_rl.models.megatron.layers.transformer_layer import rope_parameters
from mcore_rl.models.megatron.weight_mapping import (
    FirstRow,
    InterleavedGateUp,
    Kind,
    Mapping,
    Part,
    Replicated,
    Shape,
    TransposedColumns,
)


@dataclass(frozen=True)
class Experts:
    """Describes the experts of a model.

    count: number of routed experts in a layer. topk: number of routed experts that are chosen for a token.
    width: size of a routed expert's hidden layer.
    sparse_layers: for each layer, whether it has experts; layers without experts are dense.
    shared_width: size of the shared expert's hidden layer; 0 if there is no shared expert. Every token goes through the
        shared expert, without being routed.
    shared_gate: whether the output of the shared expert is multiplied by a gate.
    score: function that maps the router's logits to scores, "softmax", "sigmoid" or "sqrtsoftplus" (the square root of
        log(1 + exp)). normalise: whether the weights of a
        token's experts sum to 1. scale: factor of the weights; None for 1.
    groups, group_topk: the experts are divided into `groups` groups, and a token's experts are chosen from the best
        `group_topk` groups. Both are 1 if there are no groups.
    selection_bias: whether a bias without gradient is added to the scores for the choice of experts.
    float32_router: whether the router's weight is always float32, whatever the model's precision is, as in
        transformers.
    has_biases: whether the router and the experts' linear layers have biases.
    limit: limit to which the gate and up projections of routed experts are clamped; None for that of all MLPs.
    latent: size of the latent states that the routed experts see, which are projected from the hidden states and back;
        0 if the experts see the hidden states.
    by_id: numbers of the layers in which the experts of a token depend on its id alone.
    is_beside_mlp: whether the shared expert is a dense MLP beside the experts, with norms of its own (`moe.layer`).
    """

    count: int
    topk: int
    width: int
    sparse_layers: tuple[bool, ...]
    shared_width: int = 0
    shared_gate: bool = False
    score: str = "softmax"
    normalise: bool = True
    scale: float | None = None
    groups: int = 1
    group_topk: int = 1
    selection_bias: bool = False
    float32_router: bool = False
    has_biases: bool = False
    limit: float | None = None
    latent: int = 0
    by_id: tuple[int, ...] = ()
    is_beside_mlp: bool = False


class Mixture(Family):
    """A family in which all or some layers have experts.

    count_field: configuration field for the number of experts in a layer. width_field: configuration field for the size
        of an expert's hidden layer.
    mlp_name: Hugging Face name of the module that contains a layer's experts. shared_name, selection_bias_name: names,
        in this module, of the shared expert and of the bias for the choice of experts.
    expert_names: names, in an expert's module, of its gate, up and down projections.
    """

    count_field: ClassVar[str] = "num_experts"
    width_field: ClassVar[str] = "moe_intermediate_size"
    expert_names: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj", "down_proj")
    mlp_name: ClassVar[str] = "mlp"
    shared_name: ClassVar[str] = "shared_expert"
    selection_bias_name: ClassVar[str] = "gate.e_score_correction_bias"

    @cached_property
    @abstractmethod
    def experts(self) -> Experts:
        """Description of the model's experts."""

    def choices(self) -> dict[str, RecordedChoice]:
        layers, topk = sum(self.experts.sparse_layers), self.experts.topk
        return {ROUTED_EXPERTS: RecordedChoice(ROUTED_EXPERTS, layers, topk), **super().choices()}

    def check(self, max_sequence_length: int) -> None:
        super().check(max_sequence_length)
        experts = self.experts
        if experts.topk > experts.count:
            raise UserError(
                f"model.path: {experts.topk} experts per token are more than the {experts.count} experts of a layer"
            )
        if experts.count % experts.groups:
            raise UserError(f"model.path: {experts.count} experts cannot be divided into {experts.groups} groups")

    def megatron_fields(self) -> dict[str, Any]:
        experts = self.experts
        sparse = [int(layer) for layer in experts.sparse_layers]
        return {
            **super().megatron_fields(),
            "num_moe_experts": experts.count,
            "moe_router_topk": experts.topk,
            "moe_ffn_hidden_size": experts.width,
            "moe_layer_freq": 1 if all(sparse) else sparse,  # checkpoints stack layers of equal kind
            "moe_shared_expert_intermediate_size": experts.shared_width or None,
            "moe_shared_expert_gate": experts.shared_gate,
            # Megatron accepts a bias for the choice of experts only with sigmoid. Our own router computes the scores.
            "moe_router_score_function": "sigmoid" if experts.selection_bias else experts.score,
            "moe_router_pre_softmax": True,  # our own router converts scores to weights
            "moe_router_enable_expert_bias": experts.selection_bias,
            "moe_router_load_balancing_type": "none",
        }

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        hf, experts = self.hf, self.experts
        super().shrink(layers, tensor_parallel, expert_parallel)
        hf.num_experts_per_tok = min(experts.topk, 3)
        setattr(hf, self.count_field, math.lcm(expert_parallel, experts.groups) * 4)
        setattr(hf, self.width_field, 16 * max(2, tensor_parallel))

    def divisible_by_tensor_parallel(self) -> dict[str, int]:
        sizes = super().divisible_by_tensor_parallel()
        if all(self.experts.sparse_layers):
            del sizes["intermediate size"]
        if self.experts.shared_width:
            sizes["width of the shared experts"] = self.experts.shared_width
        return sizes

    def active_parameters(self) -> int:
        of_experts = sum(math.prod(part.shape) for m in self.table.values() if m.is_expert for part in m.parts)
        idle = self.experts.count - self.experts.topk
        return super().active_parameters() - of_experts * idle // self.experts.count

    def _layer(self, layer: int, ours: str, theirs: str) -> Iterator[Mapping]:
        for mapping in super()._layer(layer, ours, theirs):
            if not self.experts.sparse_layers[layer] or ".mlp." not in mapping.megatron:
                yield mapping
        if self.experts.sparse_layers[layer]:
            yield from self._sparse(f"{ours}mlp.", f"{theirs}{self.mlp_name}.")

    def _sparse(self, ours: str, theirs: str) -> Iterator[Mapping]:
        experts, hidden = self.experts, self.hidden_size
        gate = Part(f"{theirs}gate.weight", (experts.count, hidden))
        yield Mapping(f"{ours}router.weight", (gate,), Replicated(), is_float32=experts.float32_router)
        if experts.selection_bias:
            bias = Part(theirs + self.selection_bias_name, (experts.count,))
            yield Mapping(f"{ours}router.expert_bias", (bias,), Replicated(), is_float32=True)
        for expert in range(experts.count):
            names = f"{ours}experts.{expert}.", f"{theirs}experts.{expert}."
            yield from gated_mlp(*names, experts.latent or hidden, experts.width, self.expert_names, is_expert=True)
        if experts.latent:
            for name, shape in (("fc1", (experts.latent, hidden)), ("fc2", (hidden, experts.latent))):
                part = Part(f"{theirs}{name}_latent_proj.weight", shape)
                yield Mapping(f"{ours}{name}_latent_proj.weight", (part,), Replicated())
        if experts.shared_width:
            names = f"{ours}shared_experts.", f"{theirs}{self.shared_name}."
            yield from gated_mlp(*names, hidden, experts.shared_width, self.mlp_projections)
        if experts.shared_gate:
            gate = Part(f"{theirs}shared_expert_gate.weight", (1, hidden))
            yield Mapping(f"{ours}shared_experts.gate_weight", (gate,), Replicated())


class Mixtral(Mixture):
    model_type = "mixtral"
    has_layer_types = False
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


class Qwen3MoE(Mixture):
    model_type = "qwen3_moe"
    has_layer_types = False
    has_qk_norm = True

    @cached_property
    def experts(self) -> Experts:
        hf = self.hf
        dense = set(hf.mlp_only_layers or ())
        return Experts(
            hf.num_experts,
            hf.num_experts_per_tok,
            hf.moe_intermediate_size,
            sparse_layers=tuple(
                layer not in dense and (layer + 1) % hf.decoder_sparse_step == 0 for layer in range(self.num_layers)
            ),
            shared_width=getattr(hf, "shared_expert_intermediate_size", 0),
            shared_gate=hasattr(hf, "shared_expert_intermediate_size"),
            normalise=getattr(hf, "norm_topk_prob", True),
        )

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        kinds = {*self.experts.sparse_layers}
        super().shrink(layers, tensor_parallel, expert_parallel)
        if True in kinds:  # keep both kinds of layers: the first dense if the model has dense layers, the others sparse
            self.hf.decoder_sparse_step, self.hf.mlp_only_layers = 1, [0] if False in kinds and layers > 1 else []
        if hasattr(self.hf, "shared_expert_intermediate_size"):
            self.hf.shared_expert_intermediate_size = 24 * max(2, tensor_parallel)


class Qwen2MoE(Qwen3MoE):
    model_type = "qwen2_moe"
    has_layer_types = True
    has_qk_norm = False

    @property
    def has_qkv_bias(self) -> bool:
        return bool(getattr(self.hf, "qkv_bias", True))


class MiniMaxM2(Mixtral):
    model_type = "minimax_m2"
    has_windows = False
    has_wide_qk_norm = True
    rotates_partly = True
    selection_bias_name = "e_score_correction_bias"

    @cached_property
    def experts(self) -> Experts:
        return replace(super().experts, score="sigmoid", selection_bias=True)

    def divisible_by_tensor_parallel(self) -> dict[str, int]:
        return {**super().divisible_by_tensor_parallel(), "key-value heads": self.num_query_groups}


class Ernie45MoE(Mixture):
    model_type = "ernie4_5_moe"
    has_windows = False
    rotates_neighbours = True
    count_field = "moe_num_experts"
    shared_name = "shared_experts"
    selection_bias_name = "moe_statics.e_score_correction_bias"

    @cached_property
    def experts(self) -> Experts:
        hf = self.hf
        layers = range(hf.moe_layer_start_index, hf.moe_layer_end_index + 1)
        interval = hf.moe_layer_interval
        return Experts(
            hf.moe_num_experts,
            hf.moe_k,
            hf.moe_intermediate_size,
            sparse_layers=tuple(n in layers and (n + 1) % interval == 0 for n in range(self.num_layers)),
            shared_width=hf.moe_intermediate_size * hf.moe_num_shared_experts,
            selection_bias=True,
            float32_router=True,
        )

    def check(self, max_sequence_length: int) -> None:
        super().check(max_sequence_length)
        if self.hf.use_bias:
            raise UserError("model.path: use_bias=true (biases in all linear layers) is not supported")
        if self.hf.moe_norm_min > 1e-6:
            raise UserError(
                f"model.path: moe_norm_min={self.hf.moe_norm_min} is not supported; it must be at most 1e-6"
            )

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        super().shrink(layers, tensor_parallel, expert_parallel)
        first = int(self.hf.moe_layer_start_index > 0 and layers > 1)
        self.hf.moe_layer_start_index, self.hf.moe_layer_end_index, self.hf.moe_layer_interval = first, layers - 1, 1

    def passes_on(self, name: str) -> bool:
        return ".mtp_" in name

    def _sparse(self, ours: str, theirs: str) -> Iterator[Mapping]:
        for mapping in super()._sparse(ours, theirs):
            if mapping.megatron.endswith("expert_bias"):  # [1, experts]
                (part,) = mapping.parts
                mapping = replace(mapping, parts=(replace(part, shape=(1, *part.shape)),), kind=FirstRow())
            yield mapping


_LAYER = re.compile(r"^model\.(?:language_model\.)?layers\.(\d+)\.")


class Glm4MoE(Mixture):
    model_type = "glm4_moe"
    has_windows = False
    rotates_partly = True
    count_field = "n_routed_experts"
    shared_name = "shared_experts"

    @property
    def has_qkv_bias(self) -> bool:
        return bool(self.hf.attention_bias)

    @property
    def has_qk_norm(self) -> bool:
        return bool(self.hf.use_qk_norm)

    @cached_property
    def experts(self) -> Experts:
        return self._experts(tuple(layer >= self.hf.first_k_dense_replace for layer in range(self.num_layers)))

    def _experts(self, sparse_layers: tuple[bool, ...]) -> Experts:
        hf = self.hf
        return Experts(
            getattr(hf, self.count_field),
            hf.num_experts_per_tok,
            hf.moe_intermediate_size,
            sparse_layers=sparse_layers,
            shared_width=hf.moe_intermediate_size * (getattr(hf, "n_shared_experts", 0) or 0),
            score="sigmoid",
            normalise=hf.norm_topk_prob,
            scale=hf.routed_scaling_factor,
            groups=hf.n_group,
            group_topk=hf.topk_group,
            selection_bias=True,
            float32_router=True,
        )

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        super().shrink(layers, tensor_parallel, expert_parallel)
        self.hf.first_k_dense_replace = min(getattr(self.hf, "first_k_dense_replace", 0), 1)

    def passes_on(self, name: str) -> bool:
        """Return whether the tensor `name` belongs to an additional layer that predicts further tokens.

        Exports contain such tensors unchanged.
        """
        layer = _LAYER.match(name)
        return layer is not None and int(layer[1]) >= self.num_layers

    def prediction_names(self, k: int) -> PredictionNames | None:
        layer = f"{self.prefix}layers.{self.num_layers + k}."
        return PredictionNames(
            layer,
            embedding_norm=f"{layer}enorm",
            hidden_norm=f"{layer}hnorm",
            projection=f"{layer}eh_proj",
            final_norm=f"{layer}shared_head.norm",
            embedding=f"{layer}embed_tokens.weight",
            head=f"{layer}shared_head.head.weight",
        )

    def as_prediction_layer(self, hf: Any) -> None:
        super().as_prediction_layer(hf)
        hf.first_k_dense_replace = 0


LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of latent states in transformers, whatever `rms_norm_eps` is."""


class DeepseekV3(Glm4MoE):
    model_type = "deepseek_v3"
    has_qk_norm = False
    has_qkv_bias = False

    def __init__(self, hf: Any) -> None:
        super().__init__(hf)
        self.num_query_groups = self.num_attention_heads
        self.head_dim = self.hf.qk_nope_head_dim + self.hf.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor by which query–key products are multiplied, with YaRN's correction (`mscale_all_dim`)."""
        rope, scale = rope_parameters(self.hf), float(self.head_dim**-0.5)
        if rope["rope_type"] != "default" and rope.get("mscale_all_dim") and rope["factor"] > 1:
            scale *= (0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1) ** 2
        return scale

    def token_mixer(self, layer: int) -> TokenMixer:
        return self._latent_attention(layer)

    def _latent_attention(self, layer: int, rotates: bool = True) -> LatentAttention:
        hf = self.hf
        return LatentAttention(
            hidden=self.hidden_size,
            heads=self.num_attention_heads,
            groups=self.num_attention_heads,
            head_dim=self.head_dim,
            scale=self.softmax_scale,
            query_rank=hf.q_lora_rank,
            key_value_rank=hf.kv_lora_rank,
            rotated=hf.qk_rope_head_dim,
            value_dim=hf.v_head_dim,
            interleaved=bool(getattr(hf, "rope_interleave", True)),
            rope_factor=self.rope_factor(layer),
            eps=LATENT_NORM_EPS,
            rotates=rotates,
        )

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        hf = self.hf
        super().shrink(layers, tensor_parallel, expert_parallel)
        hf.num_key_value_heads = hf.num_attention_heads
        hf.qk_nope_head_dim, hf.qk_rope_head_dim, hf.v_head_dim = 12, 8, 14
        hf.kv_lora_rank, hf.q_lora_rank = 20, None if hf.q_lora_rank is None else 28
        hf.qk_head_dim, hf.head_dim = 20, 8


class Mistral4(DeepseekV3):
    """Mistral-4: DeepSeek-V3 with softmax scores without biases, and queries scaled by their position."""

    model_type = "mistral4"
    auto_class = "AutoModelForImageTextToText"  # AutoModelForCausalLM does not know it

    @cached_property
    def experts(self) -> Experts:
        return replace(super().experts, score="softmax", selection_bias=False, float32_router=False)

    def token_mixer(self, layer: int) -> TokenMixer:
        return replace(self._latent_attention(layer), query_scale=PositionScale.of(self.hf.rope_parameters))

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        super().shrink(layers, tensor_parallel, expert_parallel)
        self.hf.head_dim = self.hf.qk_head_dim  # its RoPE rotates a part of this
        self.hf.rope_parameters["partial_rotary_factor"] = self.hf.qk_rope_head_dim / self.hf.head_dim


class MLPByLayer(Glm4MoE):
    """A family whose configuration says for each layer whether it is dense or sparse."""

    @cached_property
    def experts(self) -> Experts:
        return self._experts(tuple(kind == "sparse" for kind in self.hf.mlp_layer_types))

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        kinds = list(dict.fromkeys(self.hf.mlp_layer_types))
        super().shrink(layers, tensor_parallel, expert_parallel)
        self.hf.mlp_layer_types = [kinds[min(layer, len(kinds) - 1)] for layer in range(layers)]

    def as_prediction_layer(self, hf: Any) -> None:
        super().as_prediction_layer(hf)
        hf.mlp_layer_types = ["sparse"]


class Glm4MoELite(MLPByLayer, DeepseekV3):
    model_type = "glm4_moe_lite"


class MiMoV2Flash(RopeByKind, MLPByLayer):
    """MiMo-V2-Flash: layers with windows have sinks and twice the key-value heads; values are smaller than keys."""

    model_type = "mimo_v2_flash"
    default_rotated_part = 0.334
    has_windows = True
    has_qk_norm = False

    def token_mixer(self, layer: int) -> TokenMixer:
        hf, has_window = self.hf, self.hf.layer_types[layer] == SLIDING
        return self._grouped_query_attention(
            layer,
            SmallValueAttention,
            groups=self.num_query_groups * (2 if has_window else 1),
            has_sinks=has_window,
            sinks_name="attention_sink_bias",
            value_dim=hf.v_head_dim,
            value_scale=1.0 if hf.attention_value_scale is None else hf.attention_value_scale,
        )

    def divisible_by_tensor_parallel(self) -> dict[str, int]:
        return {**super().divisible_by_tensor_parallel(), "key-value heads": self.num_query_groups}

    def passes_on(self, name: str) -> bool:
        return name.startswith("model.mtp.")

    def prediction_names(self, k: int) -> PredictionNames | None:
        layer = f"model.mtp.layers.{k}."
        names = f"{layer}enorm", f"{layer}hnorm", f"{layer}eh_proj", f"{layer}final_layernorm"
        return PredictionNames(layer, *names)

    def as_prediction_layer(self, hf: Any) -> None:
        super().as_prediction_layer(hf)
        hf.layer_types, hf.mlp_layer_types = [SLIDING], ["dense"]

    @cached_property
    def predictor(self) -> Family:
        family: Any = super().predictor
        family.norm_names = ("input_layernorm", "", "pre_mlp_layernorm", "")
        return cast(Family, family)

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        super().shrink(layers, tensor_parallel, expert_parallel)
        self.hf.head_dim, self.hf.v_head_dim = 24, 16  # a third of a head rotates


class DeepseekV32(Glm4MoELite):
    """DeepSeek-V3.2: in each layer an indexer chooses the `index_topk` keys that a token sees."""

    model_type = "deepseek_v32"
    indexer_rotates_neighbours: ClassVar[bool] = False

    def indexer_source(self, layer: int) -> int:
        """Return the layer that chooses the keys of `layer`."""
        return layer

    def token_mixer(self, layer: int) -> TokenMixer:
        hf, mixer, source = self.hf, super().token_mixer(layer), self.indexer_source(layer)
        assert isinstance(mixer, LatentAttention)
        indexer = Indexer(
            hf.index_topk,
            hf.index_n_heads,
            hf.index_head_dim,
            interleaved=self.indexer_rotates_neighbours,
            source=source,
            is_shared=source != layer,
        )
        return replace(mixer, indexer=indexer)

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        super().shrink(layers, tensor_parallel, expert_parallel)
        self.hf.index_topk = min(self.hf.index_topk, 24)  # so that rows of invented data have more keys

    def passes_on(self, name: str) -> bool:
        return super().passes_on(name) or (".self_attn.indexer." in name and name not in self._of_indexers)

    @cached_property
    def _of_indexers(self) -> frozenset[str]:
        """Names of the tensors of all indexers. A directory may have others, in layers that share a choice."""
        return frozenset(name for name in self.shapes() if ".self_attn.indexer." in name)


class GlmMoEDsa(DeepseekV32):
    """GLM-5. Since GLM-5.2, layers share choices: a "shared" layer uses that of the last "full" layer before it."""

    model_type = "glm_moe_dsa"
    indexer_rotates_neighbours = True

    def indexer_source(self, layer: int) -> int:
        return max((number for number in range(layer + 1) if self.hf.indexer_types[number] == "full"), default=layer)

    def check(self, max_sequence_length: int) -> None:
        types = self.hf.indexer_types
        if len(types) != self.num_layers or types[0] != "full" or not {"full", "shared"}.issuperset(types):
            raise UserError(
                f'model.path: indexer_types must be "full" or "shared" for each of the {self.num_layers} layers, and '
                f'"full" for the first, not {types!r}'
            )
        super().check(max_sequence_length)

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        super().shrink(layers, tensor_parallel, expert_parallel)
        self.hf.indexer_types = ["full"] * layers


@dataclass(frozen=True)
class ScaledSwish:
    """The activation x · sigmoid(alpha · x)."""

    alpha: float

    def __call__(self, x: Tensor) -> Tensor:
        return x * (x * self.alpha).sigmoid()


class GptOss(Mixture):
    """gpt-oss.

    It has attention sinks, windows in every second layer, biases in all linear layers, clamped gates, and tensors that
    contain all experts of a layer.
    """

    model_type = "gpt_oss"
    has_qkv_bias = True
    count_field = "num_local_experts"
    width_field = "intermediate_size"

    @cached_property
    def experts(self) -> Experts:
        hf, sparse = self.hf, (True,) * self.num_layers
        return Experts(hf.num_local_experts, hf.num_experts_per_tok, hf.intermediate_size, sparse, has_biases=True)

    def token_mixer(self, layer: int) -> TokenMixer:
        return self._grouped_query_attention(layer, has_sinks=True, output_bias=True)

    def megatron_fields(self) -> dict[str, Any]:
        return {
            **super().megatron_fields(),
            "activation_func": ScaledSwish(getattr(self.hf, "swiglu_alpha", 1.702)),
            "activation_func_clamp_value": getattr(self.hf, "swiglu_limit", 7.0),
            "glu_linear_offset": 1.0,
        }

    def _sparse(self, ours: str, theirs: str) -> Iterator[Mapping]:
        count, width, hidden = self.experts.count, self.experts.width, self.hidden_size
        yield Mapping(f"{ours}router.weight", (Part(f"{theirs}router.weight", (count, hidden)),), Replicated())
        yield Mapping(f"{ours}router.bias", (Part(f"{theirs}router.bias", (count,)),), Replicated())
        for expert in range(count):
            tensors: list[tuple[str, str, Shape, Kind]] = [
                ("linear_fc1.weight", "gate_up_proj", (1, hidden, 2 * width), InterleavedGateUp()),
                ("linear_fc1.bias", "gate_up_proj_bias", (1, 2 * width), InterleavedGateUp()),
                ("linear_fc2.weight", "down_proj", (1, width, hidden), TransposedColumns()),
                ("linear_fc2.bias", "down_proj_bias", (1, hidden), FirstRow()),
            ]
            for name, hf_name, shape, kind in tensors:
                part = Part(f"{theirs}experts.{hf_name}", shape, expert)
                yield Mapping(f"{ours}experts.{expert}.{name}", (part,), kind, is_expert=True)
