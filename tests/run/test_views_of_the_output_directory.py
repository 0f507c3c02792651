"""Tests that ranks agree although they see different files in the output directory, as on a network file system."""

import json
from pathlib import Path

import pytest
import yaml
from small_models import make_model

from mcore_rl.config import DPOConfig, load_config
from mcore_rl.testing.processes import run_processes


def train(path, hides, *overrides):
    """Train with DPO; with `hides`, rank 1 sees neither checkpoints nor log-probabilities. Return the printed lines."""
    import torch

    from mcore_rl.algorithms.dpo import train_dpo
    from mcore_rl.run import metrics

    config, said = load_config(DPOConfig, path, list(overrides)), []

    scores, checkpoints = (config.output_dir / name for name in ("reference_logprobs", "checkpoints"))

    def hidden(look):
        return lambda self: self != scores and not (self.parent == checkpoints and self.name[0] != ".") and look(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics.console, "print", lambda message, **options: said.append(message))
        if hides and torch.distributed.get_rank() == 1:
            for name in ("is_dir", "exists"):
                patch.setattr(Path, name, hidden(getattr(Path, name)))
        train_dpo(config)
    return said


@pytest.mark.long
def test_the_first_rank_decides_on_the_reference(tmp_path):
    """A resumed run has its reference's log-probabilities on disk, which rank 1 does not see."""
    make_model("llama", tmp_path / "model", initializer_range=0.05)
    pairs = [{"prompt": f"say {i} ", "chosen": "ab" * (i + 1), "rejected": "ba"} for i in range(4)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    config = {
        "output_dir": str(tmp_path / "out"),
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": str(tmp_path / "pairs.jsonl"), "max_sequence_length": 48},
        "batch": {"global_batch_size": 4},
        "trainer": {"max_steps": 1},
        "checkpoint": {"export_hf": False},
    }
    (tmp_path / "dpo.yaml").write_text(yaml.safe_dump(config))
    run_processes(train, tmp_path / "dpo.yaml", False, world_size=2, timeout=60)
    arguments = (tmp_path / "dpo.yaml", True, "trainer.max_steps=2")
    said, _ = run_processes(train, *arguments, world_size=2, timeout=60)
    assert any(line.startswith("resumed from ") for line in said), said
    steps = [json.loads(line)["step"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
