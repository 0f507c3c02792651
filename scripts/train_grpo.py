"""torchrun [--nproc-per-node N] scripts/train_grpo.py CONFIG [--record FILE | --replay FILE] [section.key=value …]"""

from pathlib import Path

from mcore_rl.config import GRPOConfig
from mcore_rl.entry_point import run_script


def train(config: GRPOConfig, record: Path | None, replay: Path | None) -> None:
    from mcore_rl.algorithms.grpo import train_grpo

    train_grpo(config, record, replay)


if __name__ == "__main__":
    run_script(
        GRPOConfig,
        train,
        "Group relative policy optimization on Megatron.",
        record="a file that keeps every step's rollouts",
        replay="such a file, to train from its rollouts instead of generating",
    )
