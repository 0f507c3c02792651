"""The experts that vLLM sent tokens to, as its servers tell them."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import torch
from jaxtyping import Int16
from torch import Tensor

from mcore_rl.models.megatron.families.mixtures import Experts

DTYPES = ("uint8", "uint16", "int32")


def decode_routed_experts(
    encoded: str | None, num_tokens: int, experts: Experts
) -> Int16[Tensor, "tokens layers topk"]:
    """Experts of the tokens of a prompt and its response; −1 at the last one, which was never fed to the model.

    Args:
        encoded: base64 of the bytes of a .npy file: [num_tokens − 1, layers of the model, topk]. Dense layers have
            rows too, which mean nothing and are left out here.
        num_tokens: of prompt and response.

    Raises:
        ValueError: what is told instead, and what is expected.
    """
    if encoded is None:
        raise ValueError("no routed_experts (it must run with --enable-return-routed-experts)")
    array = _load(encoded)
    expected = (num_tokens - 1, len(experts.sparse_layers), experts.topk)
    if array.shape != expected or array.dtype.name not in DTYPES:
        raise ValueError(
            f"routed_experts of shape {array.shape} and type {array.dtype}, not {expected} (tokens fed to the model, "
            f"layers, experts a token) and one of {', '.join(DTYPES)}"
        )
    chosen = array[:, list(experts.sparse_layers)].astype(np.int64)
    if chosen.size and not 0 <= chosen.min() <= chosen.max() < experts.count:
        raise ValueError(f"routed_experts from {chosen.min()} to {chosen.max()}; there are {experts.count} experts")
    ordered = np.sort(chosen, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():  # rows that nothing was written to are such
        raise ValueError("routed_experts that name an expert twice for a token")
    return torch.from_numpy(np.pad(chosen, ((0, 1), (0, 0), (0, 0)), constant_values=-1)).short()


def _load(encoded: str) -> np.ndarray[Any, Any]:
    try:
        return np.load(io.BytesIO(base64.b64decode(encoded, validate=True)), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"routed_experts that are no array ({error})") from None
