"""Tests that a recording identifies the weights of its rollouts without reading the whole model."""

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_rl.errors import UserError
from mcore_rl.rollouts.recordings import SAMPLES_PER_TENSOR, hash_of_weights, read_recording


class LargestCopy(TorchDispatchMode):
    """Counter of the largest number of elements that an operation creates, without views of existing tensors."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view and result.untyped_storage().nbytes():
            shares = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.data_ptr() == result.data_ptr()]
            self.numbers = max(self.numbers, 0 if shares else result.numel())
        return result


def weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = {"embedding": (50_000, 3), "norm": (7,), "gate": (), "linear": (300, 501)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def test_weights_are_told_apart_by_a_few_of_their_numbers():
    for dtype in (torch.float32, torch.bfloat16):
        before, counted = weights(dtype), LargestCopy()
        with counted:
            first = hash_of_weights(before.items())
        assert counted.numbers <= 4 * 2 * SAMPLES_PER_TENSOR
        assert hash_of_weights(weights(dtype).items()) == first
        for name in before:
            moved = {**before, name: before[name] * 1.01}
            assert hash_of_weights(moved.items()) != first, name
        renamed = {("other" if name == "norm" else name): tensor for name, tensor in before.items()}
        assert hash_of_weights(renamed.items()) != first


@pytest.mark.parametrize("rollout", [[1], 7, {"unknown": 1}])
def test_a_rollout_of_another_form_is_told(rollout, tmp_path):
    path = tmp_path / "recording.jsonl"
    path.write_text(json.dumps({"step": 1, "sampling": {}, "rollouts": [rollout]}) + "\n")
    with pytest.raises(UserError, match="is not a recording of rollouts"):
        read_recording(path, 1, {})
