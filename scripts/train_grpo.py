"""torchrun [--nproc-per-node N] scripts/train_grpo.py CONFIG [--record FILE | --replay FILE] [section.key=value …]"""

from mcore_rl.cli.train import train

if __name__ == "__main__":
    train("grpo")
