"""Gemma 4, text: dense models, mixtures, and models whose layers have embeddings of their own and share keys."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.attention.attention import TokenMixer
from mcore_rl.models.megatron.attention.shared_key import SharedKeyAttention
from mcore_rl.models.megatron.families.base import Family, gated_mlp, norm
from mcore_rl.models.megatron.families.dense import FULL, SLIDING, Gemma3, RopeByKind
from mcore_rl.models.megatron.families.mixtures import Experts, Mixture
from mcore_rl.models.megatron.layers.per_layer_inputs import PerLayerInputs, ScaledLayer
from mcore_rl.models.megatron.layers.transformer_layer import PackLayer, plain_frequencies, scaled_frequencies
from mcore_rl.models.megatron.weight_mapping import Mapping, Part, Replicated, Vocabulary

NORMS_BESIDE_EXPERTS = {
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm_1",
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts_post_norm": "post_feedforward_layernorm_2",
    "post_norm": "post_feedforward_layernorm",
}
"""Norms of `ParallelMoELayer`, and their names in the Hugging Face model."""


class Gemma4(RopeByKind, Family):
    """Gemma 4 without experts.

    Full layers may have heads of another size and another number of key heads, which may also be the values. They
    rotate only a part of each head; this is expressed by frequencies of 0.
    """

    model_type = "gemma4_text"
    norms_after = True
    norm_names = Gemma3.norm_names
    activations: ClassVar = Gemma3.activations
    has_qk_norm = True
    softmax_scale = 1.0

    def __init__(self, hf: Any) -> None:
        super().__init__(hf)
        self.embedding_scale = self.hidden_size**0.5

    @classmethod
    def kind_for(cls, hf: Any) -> type[Family]:
        mixtures = {Gemma4: Gemma4Mixture, Gemma4WithTowers: Gemma4MixtureWithTowers}
        return mixtures[cls] if cls.text_config(hf).enable_moe_block else cls

    def layer_config(self, layer: int) -> Any:
        return self.hf.per_layer_config[layer]

    @property
    def activation(self) -> str:
        return str(self.hf.hidden_activation)

    @property
    def logit_softcap(self) -> float | None:
        return None if self.hf.final_logit_softcapping is None else float(self.hf.final_logit_softcapping)

    @property
    def per_layer_inputs(self) -> PerLayerInputs | None:
        hf = self.hf
        if not hf.hidden_size_per_layer_input:
            return None
        return PerLayerInputs(hf.hidden_size_per_layer_input, hf.vocab_size_per_layer_input, self.padding_token)

    @property
    def shares_tensors(self) -> bool:
        return self.per_layer_inputs is not None or self.hf.num_kv_shared_layers > 0

    def layer_module(self, layer: int) -> tuple[type[PackLayer], dict[str, Any]]:
        inputs = self.per_layer_inputs
        return ScaledLayer, {"input_size": 0 if inputs is None else inputs.size}

    def key_source(self, layer: int) -> int | None:
        """Return the layer whose keys and values this layer uses; None if it has its own."""
        types, first = self.hf.layer_types, self.num_layers - self.hf.num_kv_shared_layers
        if layer < first:
            return None
        return max(earlier for earlier in range(first) if types[earlier] == types[layer])

    def mlp_width(self, layer: int) -> int:
        is_double = self.hf.use_double_wide_mlp and self.key_source(layer) is not None
        return self.intermediate_size * (2 if is_double else 1)

    def token_mixer(self, layer: int) -> TokenMixer:
        own = self.layer_config(layer)
        return self._grouped_query_attention(
            layer,
            SharedKeyAttention,
            head_dim=own.head_dim,
            groups=own.num_key_value_heads,
            eps=self.norm_eps,
            keys_are_values=self.hf.attention_k_eq_v and self.hf.layer_types[layer] == FULL,
            source=self.key_source(layer),
            is_source=layer in self._sources,
        )

    @cached_property
    def _sources(self) -> set[int | None]:
        return {self.key_source(layer) for layer in range(self.num_layers)}

    def _rope(self, kind: str) -> tuple[Tensor, float]:
        hf = self.hf
        if kind not in hf.layer_types:  # no layer uses these frequencies
            return plain_frequencies(1e4, 2), 1.0
        parameters = (hf.rope_parameters or {}).get(kind)
        if parameters is None or parameters["rope_type"] not in ("default", "proportional"):
            raise UserError(
                f"model.path: rope_parameters must have an entry {kind!r} of the type default or proportional"
            )
        if parameters["rope_type"] == "proportional":
            return scaled_frequencies(hf, "proportional", layer_type=kind)
        return plain_frequencies(parameters["rope_theta"], hf.per_layer_config[kind].head_dim), 1.0

    def check(self, max_sequence_length: int) -> None:
        hf = self.hf
        if others := sorted({*hf.layer_types} - {FULL, SLIDING}):
            raise UserError(f"model.path: layer_types has {others[0]!r}, which is not supported")
        for kind in dict.fromkeys(hf.layer_types):
            sizes = {self.layer_config(n).head_dim for n in range(self.num_layers) if hf.layer_types[n] == kind}
            if len(sizes) > 1:
                raise UserError(f"model.path: layers of the type {kind!r} have heads of several sizes ({sizes})")
        if hf.use_bidirectional_attention == "all":
            raise UserError("model.path: use_bidirectional_attention='all' is not supported")
        if hf.final_logit_softcapping is not None and hf.final_logit_softcapping <= 0:
            raise UserError(
                f"model.path: final_logit_softcapping={hf.final_logit_softcapping} must be above 0, or null"
            )
        first = self.num_layers - hf.num_kv_shared_layers
        if first < 1 or {*hf.layer_types} - {*hf.layer_types[:first]}:
            raise UserError(
                f"model.path: num_kv_shared_layers={hf.num_kv_shared_layers} leaves no layer of each type in "
                "layer_types with keys and values of its own"
            )
        if hf.hidden_size_per_layer_input and hf.vocab_size_per_layer_input < self.vocab_size:
            raise UserError(
                f"model.path: vocab_size_per_layer_input={hf.vocab_size_per_layer_input} must be at least vocab_size "
                f"({self.vocab_size})"
            )
        super().check(max_sequence_length)

    def num_parameters(self) -> int:
        return super().num_parameters() - self.num_layers  # the layers' constants are buffers in transformers

    def active_parameters(self) -> int:
        inputs, active = self.per_layer_inputs, super().active_parameters() + self.num_layers
        return active if inputs is None else active - inputs.vocab_size * inputs.size * self.num_layers

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        hf, kinds = self.hf, list(dict.fromkeys(self.hf.layer_types))
        shares = hf.num_kv_shared_layers > 0 and layers > len(kinds)
        hf.per_layer_config = None
        super().shrink(layers, tensor_parallel, expert_parallel)
        hf.layer_types = [kinds[layer % len(kinds)] for layer in range(layers)]
        hf.num_kv_shared_layers = layers - len(kinds) if shares else 0
        hf.vocab_size_per_layer_input = hf.vocab_size
        if hf.hidden_size_per_layer_input:
            hf.hidden_size_per_layer_input = 12
        full = [layer for layer in range(layers) if hf.layer_types[layer] == FULL]
        hf.per_layer_config = {layer: {"head_dim": 24} for layer in full}

    def _mappings(self) -> Iterator[Mapping]:
        first, *others = super()._mappings()
        yield first
        if (inputs := self.per_layer_inputs) is not None:
            ours, width = "embedding.per_layer.", inputs.size * self.num_layers
            table = Part(f"{self.prefix}embed_tokens_per_layer.weight", (inputs.vocab_size, width))
            yield Mapping(f"{ours}table.weight", (table,), Vocabulary(inputs.vocab_size))
            projection = Part(f"{self.prefix}per_layer_model_projection.weight", (width, self.hidden_size))
            yield Mapping(f"{ours}projection.weight", (projection,), Replicated())
            yield norm(f"{ours}norm", f"{self.prefix}per_layer_projection_norm", inputs.size)
        yield from others

    def _layer(self, layer: int, ours: str, theirs: str) -> Iterator[Mapping]:
        yield from super()._layer(layer, ours, theirs)
        if (inputs := self.per_layer_inputs) is not None:
            shapes = {"gate": (inputs.size, self.hidden_size), "projection": (self.hidden_size, inputs.size)}
            for name, hf_name in (("gate", "per_layer_input_gate"), ("projection", "per_layer_projection")):
                part = Part(f"{theirs}{hf_name}.weight", shapes[name])
                yield Mapping(f"{ours}input_{name}.weight", (part,), Replicated())
            yield norm(f"{ours}input_norm", f"{theirs}post_per_layer_input_norm", self.hidden_size)
        yield Mapping(f"{ours}layer_scalar", (Part(f"{theirs}layer_scalar", (1,)),), Replicated(), is_frozen=True)

    def passes_on(self, name: str) -> bool:
        """Return whether the tensor `name` is one of those that published directories have for layers without keys."""
        layer, _, rest = name.removeprefix(f"{self.prefix}layers.").partition(".self_attn.")
        is_own = rest.startswith(("k_proj.", "v_proj.", "k_norm."))
        return is_own and layer.isdecimal() and self.key_source(int(layer)) is not None


class Gemma4Mixture(Gemma4, Mixture):
    """Gemma 4 with experts beside the MLP of each layer."""

    experts_in = ""

    @cached_property
    def experts(self) -> Experts:
        hf = self.hf
        return Experts(
            hf.num_experts,
            hf.top_k_experts,
            hf.moe_intermediate_size,
            sparse_layers=(True,) * self.num_layers,
            shared_width=hf.intermediate_size,
            is_beside_mlp=True,
        )

    def check(self, max_sequence_length: int) -> None:
        for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            if not getattr(self.hf, name):
                raise UserError(f"model.path: enable_moe_block=true requires {name}")
        super().check(max_sequence_length)
        if any(self.mlp_width(layer) != self.intermediate_size for layer in range(self.num_layers)):
            raise UserError("model.path: use_double_wide_mlp=true with enable_moe_block=true is not supported")

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        topk = self.experts.topk
        super().shrink(layers, tensor_parallel, expert_parallel)
        self.hf.top_k_experts = min(topk, 3)

    def _sparse(self, ours: str, theirs: str) -> Iterator[Mapping]:
        experts, hidden = self.experts, self.hidden_size
        layer = theirs.removesuffix(f"{self.mlp_name}.")
        for name, hf_name, shape in (
            ("weight", "proj.weight", (experts.count, hidden)),
            ("scale", "scale", (hidden,)),
            ("per_expert_scale", "per_expert_scale", (experts.count,)),
        ):
            yield Mapping(f"{ours}router.{name}", (Part(f"{layer}router.{hf_name}", shape),), Replicated())
        for name, hf_name in NORMS_BESIDE_EXPERTS.items():
            yield norm(f"{ours}{name}", layer + hf_name, hidden)
        for expert in range(experts.count):
            names = f"{ours}experts.{expert}.", f"{layer}experts.{expert}."
            yield from gated_mlp(*names, hidden, experts.width, self.expert_names, is_expert=True)
        yield from gated_mlp(f"{ours}shared_experts.", theirs, hidden, experts.shared_width)

    def _layer(self, layer: int, ours: str, theirs: str) -> Iterator[Mapping]:
        for mapping in super()._layer(layer, ours, theirs):
            if mapping.megatron != f"{ours}pre_mlp_layernorm.weight":  # it is among the norms beside the experts
                yield mapping


OF_TOWERS = ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.")
"""Prefixes of the tensors of towers for images and audio."""


class Gemma4WithTowers(Gemma4):
    """A directory of Gemma 4 with towers for images and audio. Only its text model is trained."""

    model_type = "gemma4"
    prefix = "model.language_model."
    without_adapters = r".*\.(vision_tower|audio_tower)\..*"

    @staticmethod
    def text_config(hf: Any) -> Any:
        return hf.text_config

    def passes_on(self, name: str) -> bool:
        return super().passes_on(name) or name.startswith(OF_TOWERS)

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        super().shrink(layers, tensor_parallel, expert_parallel)
        self.whole.audio_config = None
        if self.whole.vision_config is not None:
            self.whole.vision_config.num_hidden_layers = 1


class Gemma4MixtureWithTowers(Gemma4WithTowers, Gemma4Mixture):
    """`Gemma4WithTowers` with experts."""
