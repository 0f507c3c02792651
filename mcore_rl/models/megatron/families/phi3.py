"""Phi-3 and Phi-4: Llama, with query, key and value in one tensor, and gate and up in another."""

from collections.abc import Iterator

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.families.base import Family
from mcore_rl.models.megatron.weight_mapping import Columns, GateUp, Mapping, Part


class Phi3(Family):
    model_type = "phi3"
    rotates_partly = True

    def check(self, max_sequence_length: int) -> None:
        super().check(max_sequence_length)
        for name in ("embd_pdrop", "resid_pdrop"):
            if getattr(self.hf, name, 0.0):
                raise UserError(f"model.path: {name} other than 0 is not supported")

    def _qkv_parts(self, theirs: str, rows: dict[str, int]) -> tuple[Part, ...]:
        first = 0
        parts = []
        for count in rows.values():
            parts.append(Part(f"{theirs}qkv_proj.weight", (count, self.hidden_size), first))
            first += count
        return tuple(parts)

    def _mlp(self, layer: int, ours: str, theirs: str) -> Iterator[Mapping]:
        hidden, width = self.hidden_size, self.hf.intermediate_size
        both = f"{theirs}gate_up_proj.weight"
        parts = (Part(both, (width, hidden)), Part(both, (width, hidden), width))
        yield Mapping(f"{ours}linear_fc1.weight", parts, GateUp())
        yield Mapping(f"{ours}linear_fc2.weight", (Part(f"{theirs}down_proj.weight", (hidden, width)),), Columns())
