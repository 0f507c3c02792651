"""Train a reward model on pairs, then use it as the judge in GRPO.

    python examples/reward_model_in_grpo.py MODEL PAIRS PROMPTS OUTPUT [NUMBER_OF_PROCESSES]

Both are runs of the `mcore-rl` command: each writes checkpoints, can be stopped and resumed, and exports a Hugging Face
model. In the second run the reward model is in the training processes, under the policy's layout.
"""

import subprocess
import sys
from pathlib import Path


def train(algorithm, processes, *arguments):
    launch = [sys.executable, "-m", "mcore_rl", "train", algorithm, "--nproc-per-node", processes]
    subprocess.run([*launch, *arguments], check=True)


def main(model, pairs, prompts, output, processes="1"):
    output = Path(output)
    common = ("--model", model, "data.max_sequence_length=160", "optimizer.lr=1e-4", "trainer.max_steps=2")
    reward_model = output / "reward_model"
    train("rm", processes, *common, "--data", pairs, "--output", str(reward_model), "batch.global_batch_size=8")
    train(
        *("grpo", processes, *common, "--data", prompts, "--output", str(output / "policy")),
        *("grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=4", "grpo.max_new_tokens=16"),
        *("environment.name=reward_model", f"environment.path={reward_model / 'hf'}"),
    )


if __name__ == "__main__":
    if len(sys.argv) not in (5, 6):
        sys.exit(__doc__)
    main(*sys.argv[1:])
