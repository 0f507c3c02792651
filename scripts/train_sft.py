"""Supervised fine-tuning: [torchrun --nproc-per-node N] scripts/train_sft.py CONFIG [key=value …]"""

from mcore_rl.config import SFTConfig
from mcore_rl.entry_point import run_script


def train(config: SFTConfig) -> None:
    from mcore_rl.algorithms.sft import train_sft

    train_sft(config)


if __name__ == "__main__":
    run_script(SFTConfig, train, __doc__)
