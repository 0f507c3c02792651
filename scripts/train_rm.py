"""Reward models from preferences: [torchrun --nproc-per-node N] scripts/train_rm.py CONFIG [key=value …]"""

from mcore_rl.cli.train import train

if __name__ == "__main__":
    train("rm")
