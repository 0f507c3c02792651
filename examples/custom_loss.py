"""A custom loss: focal negative log-likelihood, with a lower weight for tokens that the model already predicts well.

    torchrun --nproc-per-node 2 examples/custom_loss.py configs/sft_cpu.yaml parallel.tensor_model_parallel_size=2

The loss needs only log-probabilities. The policy therefore computes them from hidden states and shards of the LM head,
without logits of shape [tokens, vocabulary]. The loss does not depend on microbatches, packs and ranks: it sums over
its inputs and divides by the count of the whole global batch.
"""

import sys

from mcore_rl.cli.entry_point import run_script
from mcore_rl.config import SFTConfig
from mcore_rl.losses.common import LogprobLoss, LossType, token_mask_of


class FocalLoss(LogprobLoss):
    """Focal loss: −Σ (1 − p)^γ · log p over the tokens that have a loss, divided by their number (arXiv:1708.02002)."""

    loss_type = LossType.TOKEN_LEVEL

    def __init__(self, gamma=2.0):
        self.gamma = gamma
        self.metric_reductions = {"confident": "mean"}  # other metrics are summed over microbatches

    def from_logprobs(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks, entropy=None):
        mask = token_mask_of(data, next_token_logprobs)
        probabilities = next_token_logprobs.exp()
        losses = -((1 - probabilities) ** self.gamma) * next_token_logprobs
        loss = (losses * mask).sum() / global_valid_toks
        confident = ((probabilities > 0.5) * mask).sum() / mask.sum().clamp(min=1)
        return loss, {
            "loss": loss.detach(),
            "confident": confident.detach(),
            "num_valid_samples": data["sample_mask"].sum(),
        }


def train(config):
    # These modules import Megatron; `run_script` has selected the device before.
    from mcore_rl.algorithms.supervised import Objective, SupervisedTrainer
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy
    from mcore_rl.run.setup import claim_output_dir, load_inputs

    inputs = claim_output_dir(config, load_inputs(config))
    policy = MegatronPolicy(config, config.total_steps(len(inputs.train)))
    SupervisedTrainer(config, inputs, policy, Objective(FocalLoss())).run()
    policy.shutdown()


if __name__ == "__main__":
    run_script("focal", SFTConfig, train, __doc__, arguments=sys.argv[1:])
