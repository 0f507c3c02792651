"""Supervised fine-tuning: [torchrun --nproc-per-node N] scripts/train_sft.py CONFIG [key=value …]"""

from mcore_rl.cli.train import train

if __name__ == "__main__":
    train("sft")
