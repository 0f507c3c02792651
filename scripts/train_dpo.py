"""Direct preference optimization: [torchrun --nproc-per-node N] scripts/train_dpo.py CONFIG [key=value …]"""

from mcore_rl.config import DPOConfig
from mcore_rl.entry_point import run_script


def train(config: DPOConfig) -> None:
    from mcore_rl.algorithms.dpo import train_dpo

    train_dpo(config)


if __name__ == "__main__":
    run_script(DPOConfig, train, __doc__)
