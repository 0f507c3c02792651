"""Families of dense models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.attention.attention import FusedQKVAttention, TokenMixer
from mcore_rl.models.megatron.families.base import Family
from mcore_rl.models.megatron.layers.transformer_layer import (
    SUPPORTED_ROPE_TYPES,
    plain_frequencies,
    scaled_frequencies,
)
from mcore_rl.models.megatron.weight_mapping import Columns, GateUp, Mapping, Part


class Llama(Family):
    model_type = "llama"
    has_windows = False


class Mistral(Family):
    model_type = "mistral"
    has_layer_types = False


class Qwen2(Family):
    model_type = "qwen2"
    has_qkv_bias = True


class Qwen3(Family):
    model_type = "qwen3"
    has_qk_norm = True


class Olmo2(Family):
    model_type = "olmo2"
    has_windows = False
    norms_before = False
    norms_after = True
    norm_names = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
    has_wide_qk_norm = True

    def divisible_by_tensor_parallel(self) -> dict[str, int]:
        return {**super().divisible_by_tensor_parallel(), "key-value heads": self.num_query_groups}


class PackedMLP(Family):
    """A family whose gate and up projections are stacked in one Hugging Face tensor."""

    def _mlp(self, layer: int, ours: str, theirs: str) -> Iterator[Mapping]:
        yield from packed_mlp(ours, theirs, self.hidden_size, self.intermediate_size)


def packed_mlp(ours: str, theirs: str, hidden: int, width: int) -> Iterator[Mapping]:
    """Yield the mappings of an MLP whose gate and up projections are stacked; the arguments are `gated_mlp`'s."""
    both = f"{theirs}gate_up_proj.weight"
    parts = (Part(both, (width, hidden)), Part(both, (width, hidden), width))
    yield Mapping(f"{ours}linear_fc1.weight", parts, GateUp())
    yield Mapping(f"{ours}linear_fc2.weight", (Part(f"{theirs}down_proj.weight", (hidden, width)),), Columns())


class Phi3(PackedMLP):
    model_type = "phi3"
    has_layer_types = False
    rotates_partly = True

    def check(self, max_sequence_length: int) -> None:
        super().check(max_sequence_length)
        for name in ("embd_pdrop", "resid_pdrop"):
            if getattr(self.hf, name, 0.0):
                raise UserError(f"model.path: {name} other than 0 is not supported")

    def token_mixer(self, layer: int) -> TokenMixer:
        return self._grouped_query_attention(layer, FusedQKVAttention)


class Glm4(PackedMLP):
    model_type = "glm4"
    has_windows = False
    rotates_partly = True
    rotates_neighbours = True
    norms_after = True
    norm_names = (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )

    @property
    def has_qkv_bias(self) -> bool:
        return bool(self.hf.attention_bias)


class SeedOss(Family):
    """Seed-OSS. The dropout in its configuration is ignored, as in other programs for post-training."""

    model_type = "seed_oss"
    has_windows = False
    has_dropout = True

    @property
    def has_qkv_bias(self) -> bool:
        return bool(self.hf.attention_bias)

    def token_mixer(self, layer: int) -> TokenMixer:
        return self._grouped_query_attention(layer, output_bias=bool(self.hf.attention_out_bias))


class SmolLM3(Family):
    """SmolLM3. Some of its layers have no rotary embedding; this is expressed by frequencies of 0."""

    model_type = "smollm3"

    def ropes(self) -> list[Tensor]:
        frequencies = self._rope_frequencies()[0]
        return [frequencies, torch.zeros_like(frequencies)]

    def rope_kind(self, layer: int) -> int:
        return int(not self.hf.no_rope_layers[layer])

    def rope_factor(self, layer: int) -> float:
        return super().rope_factor(layer) if self.hf.no_rope_layers[layer] else 1.0

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        super().shrink(layers, tensor_parallel, expert_parallel)
        kinds = list(dict.fromkeys(self.hf.no_rope_layers))
        self.hf.no_rope_layers = [kinds[layer % len(kinds)] for layer in range(layers)]


@dataclass(frozen=True)
class PositionScale:
    """The factor 1 + beta · log(1 + ⌊position / original⌋). Llama 4 multiplies queries by this factor.

    The factor is greater than 1 from position `original` on.
    """

    beta: float
    original: int

    def __call__(self, positions: Tensor) -> Tensor:
        return 1 + self.beta * torch.log(1 + torch.floor(positions / self.original))

    @classmethod
    def of(cls, rope: dict[str, Any]) -> PositionScale | None:
        """Return the scale in the RoPE parameters of Mistral's models; None if they have no scale."""
        beta, original = (rope.get(name) for name in ("llama_4_scaling_beta", "original_max_position_embeddings"))
        return cls(beta, original) if beta and original else None


class Ministral3(Mistral):
    model_type = "ministral3"

    def token_mixer(self, layer: int) -> TokenMixer:
        return self._grouped_query_attention(layer, query_scale=PositionScale.of(self.hf.rope_parameters))


FULL, SLIDING = "full_attention", "sliding_attention"


class RopeByKind(Family):
    """A family in which kinds of layers have rotary frequencies of their own, such as layers with windows.

    rope_names: names of the kinds in `rope_parameters`, in the order of `rope_kind`.
    """

    rope_names: ClassVar[tuple[str, str]] = (FULL, SLIDING)
    default_rotated_part: ClassVar[float] = 1.0
    """`partial_rotary_factor` if the configuration does not have it."""

    def ropes(self) -> list[Tensor]:
        return [self._rope(kind)[0] for kind in self.rope_names]

    def rope_kind(self, layer: int) -> int:
        return int(self.hf.layer_types[layer] == SLIDING)

    def rope_factor(self, layer: int) -> float:
        return self._rope(self.rope_names[self.rope_kind(layer)])[1]

    def _rope(self, kind: str) -> tuple[Tensor, float]:
        if kind not in self.hf.rope_parameters:
            raise UserError(
                f"model.path: rope_parameters has no entry {kind!r}; it must have one for each kind of layer"
            )
        parameters = self.hf.rope_parameters[kind]
        if parameters["rope_type"] == "default":
            part = parameters.get("partial_rotary_factor", self.default_rotated_part) if self.rotates_partly else 1.0
            return plain_frequencies(parameters["rope_theta"], int(self.head_dim * part)), 1.0
        if parameters["rope_type"] not in SUPPORTED_ROPE_TYPES:
            raise UserError(f"model.path: rope type {parameters['rope_type']!r} is not supported")
        return scaled_frequencies(self.hf, parameters["rope_type"], layer_type=kind)


class Olmo3(RopeByKind, Olmo2):
    """OLMo-3: OLMo-2 with windows in most layers."""

    model_type = "olmo3"
    has_windows = True


class Gemma3(Family):
    model_type = "gemma3_text"
    norms_after = True
    norm_names = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    activations: ClassVar = {"gelu_pytorch_tanh": partial(F.gelu, approximate="tanh")}
    has_qk_norm = True

    def __init__(self, hf: Any) -> None:
        super().__init__(hf)
        self.embedding_scale = self.hidden_size**0.5

    @property
    def activation(self) -> str:
        return str(self.hf.hidden_activation)

    @property
    def softmax_scale(self) -> float:
        return float(self.hf.query_pre_attn_scalar**-0.5)

    def check(self, max_sequence_length: int) -> None:
        super().check(max_sequence_length)
        for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
            if getattr(self.hf, name, None):
                raise UserError(f"model.path: {name} is not supported")
        for kind in (FULL, SLIDING):
            self._rope(kind)

    def ropes(self) -> list[Tensor]:
        return [self._rope(kind) for kind in (FULL, SLIDING)]

    def rope_factor(self, layer: int) -> float:
        return 1.0

    def rope_kind(self, layer: int) -> int:
        return int(self.hf.layer_types[layer] == SLIDING)

    def _rope(self, kind: str) -> Tensor:
        parameters = self._rope_parameters(kind)
        inverse = plain_frequencies(parameters["rope_theta"], self.head_dim)
        if parameters["rope_type"] == "linear":
            return inverse / parameters["factor"]
        if parameters["rope_type"] != "default":
            raise UserError(
                f"model.path: rope type {parameters['rope_type']!r} is not supported; it must be default or linear"
            )
        return inverse

    def _rope_parameters(self, kind: str) -> dict[str, Any]:
        """Return the RoPE parameters of the layers of one kind.

        transformers 5 stores the parameters by kind; transformers 4 has separate fields.
        """
        if hasattr(self.hf, "rope_local_base_freq"):
            scaling = {} if kind == SLIDING else dict(self.hf.rope_scaling or {})
            theta = self.hf.rope_local_base_freq if kind == SLIDING else self.hf.rope_theta
            return {"rope_type": "default", **scaling, "rope_theta": theta}
        return dict(self.hf.rope_parameters[kind])

    def megatron_fields(self) -> dict[str, Any]:
        return {**super().megatron_fields(), "layernorm_zero_centered_gamma": True}
