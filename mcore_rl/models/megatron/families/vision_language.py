"""Families of models that read images: Qwen3-VL, dense and with experts; and what they share with Qwen3.5.

Their text models rotate queries and keys by three positions (M-RoPE). A vision tower computes the features of images.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from mcore_rl.data.images import PlacedImage
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.families.base import Family
from mcore_rl.models.megatron.families.dense import Qwen3
from mcore_rl.models.megatron.families.mixtures import Experts, Qwen3MoE
from mcore_rl.models.megatron.layers.vision import VISION_TOWER, tower_shapes
from mcore_rl.models.megatron.weight_mapping import Mapping, Part, Replicated, Shape

HF_TOWER = "model.visual."
"""Prefix of the Hugging Face names of the tower's tensors."""


class VisionLanguage(Family):
    """A text model with a vision tower. The text model's family is the next base class."""

    auto_class = "AutoModelForImageTextToText"
    prefix = "model.language_model."
    default_sections: ClassVar[tuple[int, int, int]] = (24, 20, 20)
    """`rope_sections` if the configuration does not have them."""

    @staticmethod
    def text_config(hf: Any) -> Any:
        return hf.text_config

    @property
    def vision_config(self) -> Any:
        return self.whole.vision_config

    @property
    def deepstack(self) -> int:
        return len(getattr(self.vision_config, "deepstack_visual_indexes", None) or ())

    @property
    def rope_sections(self) -> list[int]:
        """Numbers of frequencies that rotate by time, row and column."""
        return list(self.hf.rope_parameters.get("mrope_section", self.default_sections))

    def rope_axes(self) -> Tensor:
        """Return the axis of each frequency: 0 for time, 1 for rows, 2 for columns. The axes are interleaved.

        Frequency i belongs to the rows if i ≡ 1 (mod 3), and to the columns if i ≡ 2 (mod 3), up to three times the
        size of the axis's section. All other frequencies belong to time.
        """
        axes, sections = torch.zeros(len(self.ropes()[0]), dtype=torch.long), self.rope_sections
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = axis
        return axes

    def check(self, max_sequence_length: int) -> None:
        super().check(max_sequence_length)
        if self.vision_config.out_hidden_size != self.hidden_size:
            raise UserError(
                f"model.path: vision_config.out_hidden_size ({self.vision_config.out_hidden_size}) must be the text "
                f"model's hidden_size ({self.hidden_size})"
            )

    def shrink(self, layers: int, tensor_parallel: int, expert_parallel: int) -> None:
        hf, vision = self.hf, self.vision_config
        super().shrink(layers, tensor_parallel, expert_parallel)
        hf.rope_parameters["mrope_section"] = [4, 2, 2] if len(self.ropes()[0]) == 8 else [1, 1, 0]
        vision.depth, vision.hidden_size, vision.num_heads, vision.intermediate_size = 3, 32, 2, 48
        vision.out_hidden_size, vision.num_position_embeddings = hf.hidden_size, 64
        if self.deepstack:
            vision.deepstack_visual_indexes = [0]

    def tower_parameters(self) -> int:
        """Return the number of parameters of the vision tower."""
        return sum(math.prod(shape) for shape in self._tower_shapes.values())

    def tower_flops(self, images: Iterable[PlacedImage], weights_factor: float = 1.0, factor: float = 1.0) -> float:
        """Return the number of floating-point operations of the tower's forward pass over `images`.

        The operations of products with weights are multiplied by `weights_factor`, and those of attention by `factor`.
        A weight of a matrix costs 2 operations per patch, or per token in the mergers. Attention over the n patches of
        an image costs 4·n²·hidden_size in each block.
        """
        vision, of_merge = self.vision_config, self.vision_config.spatial_merge_size**2
        patches = [image.count * of_merge for image in images]
        weights = {n: math.prod(s) for n, s in self._tower_shapes.items() if len(s) > 1 and not n.startswith("pos_")}
        of_tokens = sum(size for name, size in weights.items() if "merger" in name)
        of_weights = 2.0 * sum(patches) * (sum(weights.values()) - of_tokens + of_tokens / of_merge)
        return weights_factor * of_weights + factor * 4.0 * vision.depth * vision.hidden_size * sum(
            n * n for n in patches
        )

    def active_parameters(self) -> int:
        """Return `Family.active_parameters` without the tower, because only images go through it."""
        return super().active_parameters() - self.tower_parameters()

    @property
    def _tower_shapes(self) -> dict[str, Shape]:
        return tower_shapes(self.vision_config)

    def _mappings(self) -> Iterator[Mapping]:
        for name, shape in self._tower_shapes.items():
            yield Mapping(f"{VISION_TOWER}{name}", (Part(f"{HF_TOWER}{name}", shape),), Replicated())
        yield from super()._mappings()


class Qwen3VL(VisionLanguage, Qwen3):
    model_type = "qwen3_vl"


class Qwen3VLMoE(VisionLanguage, Qwen3MoE):
    model_type = "qwen3_vl_moe"

    @cached_property
    def experts(self) -> Experts:
        return replace(super().experts, normalise=True)  # whatever `norm_topk_prob` is, as in transformers
