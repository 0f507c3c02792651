"""Distillation from a teacher: [torchrun --nproc-per-node N] scripts/train_distill.py CONFIG [key=value …]"""

from mcore_rl.cli.train import train

if __name__ == "__main__":
    train("distill")
