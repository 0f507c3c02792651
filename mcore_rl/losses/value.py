"""The critic's loss: values against the returns that were found by them."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_rl.errors import ContractError
from mcore_rl.losses.common import masked_mean, require_count, require_keys, require_shape, token_mask_of
from mcore_rl.losses.interfaces import LossFunction, LossType


class ValueLossDataDict(TypedDict):
    """The entries that `ValueLossFn` reads; all [B, S] aligned with `input_ids`, `sample_mask` [B].

    `values` are those before the update, needed only with `value_clip`.
    """

    values: Tensor
    returns: Tensor
    token_mask: Tensor
    sample_mask: Tensor


class ValueLossFn(LossFunction):
    """½·E[max((V − R)², (V_clip − R)²)] over tokens, V_clip = V_prev + clamp(V − V_prev, −ε, ε).

    The clip that belongs to PPO's own implementation (arXiv:1707.06347; described in arXiv:2005.12729, section 3):
    where V has gone further than ε and nearer to R, there is no gradient. Without `value_clip`: ½·E[(V − R)²].

    Args:
        value_clip: ε, more than 0, or None for no clip.
    """

    loss_type = LossType.TOKEN_LEVEL
    reads_values = True
    """It is given the values of tokens, [B, S], by a model with a reward head."""

    def __init__(self, value_clip: float | None = None) -> None:
        if value_clip is not None and not value_clip > 0:
            raise ContractError(f"ValueLossFn: value_clip must be more than 0, or None for no clip, got {value_clip}")
        self.value_clip = value_clip
        self.required_keys = ("token_mask", "sample_mask", "returns", *(() if value_clip is None else ("values",)))

    def __call__(
        self,
        values: Float[Tensor, "batch seq"],
        data: Any,
        global_valid_seqs: Tensor | None = None,
        global_valid_toks: Tensor | None = None,
    ) -> tuple[Float[Tensor, ""], dict[str, Any]]:
        """Raises ContractError for missing keys, shapes or counts that do not fit."""
        require_keys(data, self.required_keys, self)
        for key in self.required_keys:
            shape = tuple(values.shape[:1]) if key == "sample_mask" else tuple(values.shape)
            require_shape(key, data[key], shape, self)
        tokens = require_count("global_valid_toks", global_valid_toks, self)
        values = values if values.dtype == torch.float64 else values.float()
        mask = token_mask_of(data, values)

        def predicted(x: Tensor) -> Tensor:  # 0 where nothing counts: −inf or NaN would come back as NaN gradients
            return torch.where(mask > 0, x[:, 1:].to(values), 0)

        def mean(per_token: Tensor) -> Tensor:
            return masked_mean(per_token, mask, global_normalization_factor=tokens)

        current, returns = predicted(values), predicted(data["returns"])
        error = (current - returns).square()
        clipped_error = error
        if self.value_clip is not None:
            before = predicted(data["values"])
            moved = (current - before).clamp(-self.value_clip, self.value_clip)
            clipped_error = (before + moved - returns).square()
        loss = 0.5 * mean(torch.maximum(error, clipped_error))
        metrics = {
            "loss": loss,
            "value_clip_fraction": mean((clipped_error > error).to(current)),
            "num_valid_samples": data["sample_mask"].sum(),
        }
        return loss, {name: value.detach() for name, value in metrics.items()}
