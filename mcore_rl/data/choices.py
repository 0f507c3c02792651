"""Choices that a model makes for each token while it samples. If they are recorded, training makes the same ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.config import ModelConfig

ROUTED_EXPERTS = "routed_experts"
"""Name of a batch entry [B, S, layers with experts, topk] int16: the experts of each input token; −1 if unknown."""
CHOSEN_KEYS = "chosen_keys"
"""Name of a batch entry [B, S, layers with an indexer, size] int32: what each layer's indexer chose for each input
token, as positions or other numbers in the token's own row (`attention.sparse`). −1 fills the rest; if all are −1, the
choice is unknown."""


@dataclass(frozen=True)
class KindOfChoice:
    """A kind of choice.

    what: what is chosen. option: key of the configuration's section `model` that turns on its replay. dtype: type of
        the recorded numbers.
    """

    what: str
    option: str
    dtype: torch.dtype


CHOICES = {
    ROUTED_EXPERTS: KindOfChoice("experts", "moe_router_replay", torch.int16),
    CHOSEN_KEYS: KindOfChoice("keys", "indexer_replay", torch.int32),
}


def replayed_choices(model: ModelConfig) -> list[str]:
    """Return the names of the choices of sampling that the policy makes again in training."""
    return [name for name, kind in CHOICES.items() if getattr(model, kind.option)]


@dataclass(frozen=True)
class RecordedChoice:
    """Describes a batch entry [B, S, layers, size] of recorded choices.

    name: one of `CHOICES`.
    layers: number of layers of the whole model that make this choice.
    size: number of choices of a layer for a token.
    """

    name: str
    layers: int
    size: int

    @property
    def dtype(self) -> torch.dtype:
        return CHOICES[self.name].dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a token's choices."""
        return self.layers, self.size

    def unknown(self, *sizes: int) -> Tensor:
        """Return unknown choices, [*sizes, layers, size]."""
        return torch.full((*sizes, *self.shape), -1, dtype=self.dtype)


def padded_choices(of_rows: Sequence[Mapping[str, Tensor]], width: int = 0) -> dict[str, Tensor]:
    """Return the choices that all rows have as batch entries [B, S, layers, size], right-padded by −1.

    Args:
        of_rows: for each row its choices by name, [tokens, layers, size].
        width: smallest S.
    """
    entries = {}
    for name in CHOICES:
        known = [choices[name] for choices in of_rows if name in choices]
        if known and len(known) == len(of_rows):
            padded = torch.nn.utils.rnn.pad_sequence(known, batch_first=True, padding_value=-1)
            entries[name] = F.pad(padded, (0, 0, 0, 0, 0, max(0, width - padded.shape[1])), value=-1)
    return entries
