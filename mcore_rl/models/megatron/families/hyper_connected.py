"""Families whose residual has several streams (hyper-connections): HY-4 and GLM-5.3."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.attention.attention import TokenMixer
from mcore_rl.models.megatron.attention.latent import LatentAttention
from mcore_rl.models.megatron.families.base import Family, PredictionNames
from mcore_rl.models.megatron.families.kimi_linear import KimiDelta
from mcore_rl.models.megatron.families.mixtures import Experts, GlmMoEDsa
from mcore_rl.models.megatron.layers.hyper_connections import Streams
from mcore_rl.models.megatron.recurrent.kimi_delta_attention import BoundedDeltaNet
from mcore_rl.models.megatron.weight_mapping import Mapping, Part, Replicated


class HyperConnected(Family):
    """A family whose residual has several streams.

    connection_names: for attention and MLP, the beginnings of the Hugging Face names of their connections' parameters.
    head_name: the same for the weights of the streams in the sum that the last norm reads.
    """

    connection_names: ClassVar[tuple[str, str]]
    head_name: ClassVar[str]

    def __init__(self, hf: Any) -> None:
        super().__init__(hf)
        self.streams: Streams = self._streams()

    @abstractmethod
    def _streams(self) -> Streams: ...

    def prediction_names(self, k: int) -> PredictionNames | None:
        return None  # layers that predict further tokens would need streams of their own

    def _last_norm(self, ours: str, theirs: str) -> Iterator[Mapping]:
        yield from super()._last_norm(ours, theirs)
        if not self.streams.ends_in_mean:
            rows = (self.streams.count,)
            yield from self._stream_weights(f"{ours}.streams.", self.prefix + self.head_name, rows)

    def _layer(self, layer: int, ours: str, theirs: str) -> Iterator[Mapping]:
        yield from super()._layer(layer, ours, theirs)
        for block, name in zip(("attention", "mlp"), self.connection_names, strict=True):
            yield from self._stream_weights(f"{ours}{block}_streams.", theirs + name, self.streams.sizes)

    def _stream_weights(self, ours: str, theirs: str, groups: tuple[int, ...]) -> Iterator[Mapping]:
        width, rows = self.streams.count * self.hidden_size, sum(groups)
        shapes = {"weight": ("fn", (rows, width)), "bias": ("base", (rows,)), "scale": ("scale", (len(groups),))}
        for name, (hf_name, shape) in shapes.items():
            yield Mapping(f"{ours}{name}", (Part(theirs + hf_name, shape),), Replicated(), is_float32=True)


class HYV4(HyperConnected, GlmMoEDsa):
    """HY-4: GLM-5's sparse attention with gates and sinks, and clamped routed experts.

    The names of its tensors are those of published directories.
    """

    model_type = "hy_v4"
    float32_head = True
    indexer_rotates_neighbours = False
    unadapted: ClassVar[tuple[str, ...]] = ("linear_gate",)
    connection_names = ("hc_attn_layer.hc_pre.hc_", "hc_mlp_layer.hc_pre.hc_")
    head_name = "hc_head.hc_head_"

    def _streams(self) -> Streams:
        hf = self.hf
        return Streams(hf.hc_mult, hf.rms_norm_eps, hf.hc_eps, hf.hc_magnitude, output_eps=hf.hc_eps)

    @cached_property
    def experts(self) -> Experts:
        return replace(super().experts, limit=self.hf.swiglu_limit)

    def token_mixer(self, layer: int) -> TokenMixer:
        mixer = super().token_mixer(layer)
        assert isinstance(mixer, LatentAttention) and mixer.indexer is not None
        indexer = replace(mixer.indexer, rotates_end=True, eps=self.hf.rms_norm_eps, float32_norm=True)
        return replace(mixer, interleaved=False, indexer=indexer, output_gate=True, has_sinks=True)

    def check(self, max_sequence_length: int) -> None:
        super().check(max_sequence_length)
        if self.hf.swiglu_limit <= 0:
            raise UserError(
                f"model.path: swiglu_limit={self.hf.swiglu_limit} must be above 0; in transformers, which does not "
                "leave out the clamp, all routed experts would return 0"
            )

    def passes_on(self, name: str) -> bool:
        return super().passes_on(name) or name.startswith("model.mtp_layers.")

    def _layer(self, layer: int, ours: str, theirs: str) -> Iterator[Mapping]:
        names = {
            f"{theirs}self_attn.gate_proj.weight": "linear_gate.weight",
            f"{theirs}self_attn.sinks": "learnable_sink_param",
        }
        for mapping in super()._layer(layer, ours, theirs):
            (part, *_), name = mapping.parts, names.get(mapping.parts[0].name)
            yield (
                mapping if name is None else replace(mapping, parts=(replace(part, name=f"{theirs}self_attn.{name}"),))
            )


class Glm5Next(HyperConnected, KimiDelta, GlmMoEDsa):
    """GLM-5.3, text: Kimi delta attention with bounded decays in most layers, attention to chosen pools of keys without
    rotation in the others, and clamped MLPs. The vision tower is exported unchanged.
    """

    model_type = "glm5_next"
    auto_class = "AutoModelForImageTextToText"
    prefix = "model.language_model."
    connection_names = ("hc_attn_", "hc_ffn_")

    @staticmethod
    def text_config(hf: Any) -> Any:
        return hf.text_config

    def _streams(self) -> Streams:
        hf = self.hf
        return Streams(
            hf.hc_mult, hf.rms_norm_eps, hf.hc_eps, iterations=max(hf.hc_sinkhorn_iters, 1), ends_in_mean=True
        )

    def indexer_source(self, layer: int) -> int:
        return layer

    def token_mixer(self, layer: int) -> TokenMixer:
        hf = self.hf
        if hf.layer_types[layer] == "linear_attention":
            return self._delta_net(BoundedDeltaNet, lower_bound=hf.linear_lower_bound)
        mixer = super().token_mixer(layer)
        assert isinstance(mixer, LatentAttention) and mixer.indexer is not None
        indexer = replace(mixer.indexer, pool=hf.index_kpool)
        return replace(mixer, eps=hf.rms_norm_eps, rotates=False, indexer=indexer)

    def check(self, max_sequence_length: int) -> None:
        super().check(max_sequence_length)
        hf = self.hf
        if not hf.index_kpool_always_select_tail:
            raise UserError(
                "model.path: index_kpool_always_select_tail=false is not supported, because the first tokens of a row "
                "would see no keys"
            )
        kinds = zip(hf.layer_types, hf.indexer_types, strict=True)
        if any(kind != "linear_attention" and indexer != "full" for kind, indexer in kinds):
            raise UserError('model.path: indexer_types other than "full" are not supported for layers with attention')
        if hf.linear_lower_bound is not None and hf.linear_lower_bound >= 0:
            raise UserError(f"model.path: linear_lower_bound={hf.linear_lower_bound} must be below 0")

    def megatron_fields(self) -> dict[str, Any]:
        return {
            **super().megatron_fields(),
            "activation_func_clamp_value": self.hf.swiglu_limit,
        }

    def passes_on(self, name: str) -> bool:
        return super().passes_on(name) or name.startswith("model.visual.")

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        super().shrink(layers, tensor_parallel, expert_parallel)
        hf = self.hf
        hf.qk_nope_head_dim, hf.qk_rope_head_dim, hf.qk_head_dim, hf.head_dim = 20, 0, 20, 0
        hf.index_kpool = min(hf.index_kpool, 4)
        vision = self.whole.vision_config
        vision.depth, vision.hidden_size, vision.num_heads, vision.intermediate_size = 1, 16, 2, 24
        vision.projection_intermediate_size, vision.out_hidden_size = 24, hf.hidden_size
