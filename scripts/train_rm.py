"""Reward models from preferences: [torchrun --nproc-per-node N] scripts/train_rm.py CONFIG [key=value …]"""

from mcore_rl.config import RMConfig
from mcore_rl.entry_point import run_script


def train(config: RMConfig) -> None:
    from mcore_rl.algorithms.rm import train_rm

    train_rm(config)


if __name__ == "__main__":
    run_script(RMConfig, train, __doc__)
