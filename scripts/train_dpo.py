"""Direct preference optimization: [torchrun --nproc-per-node N] scripts/train_dpo.py CONFIG [key=value …]"""

from mcore_rl.cli.train import train

if __name__ == "__main__":
    train("dpo")
