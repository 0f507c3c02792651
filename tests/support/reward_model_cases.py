"""Configurations for tests in which a reward model judges."""

import pytest
import torch
from small_models import make_config, make_tokenizer
from transformers import AutoModelForSequenceClassification

from mcore_rl.config import GRPOConfig

LIMIT = 70


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """Write a sequence classifier of another family and size than the policies here."""
    directory = tmp_path_factory.mktemp("judge")
    torch.manual_seed(5)
    config = make_config("qwen2", num_hidden_layers=4, hidden_size=32, num_labels=1, tie_word_embeddings=False)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def grpo_config(policy, judge, **environment):
    return GRPOConfig.model_validate(
        {
            "output_dir": "unused",
            "model": {"path": policy},
            "data": {"train": "unused", "max_sequence_length": 32},
            "batch": {"tokens_per_pack": 96},
            "optimizer": {"lr": 1e-3},
            "trainer": {"max_steps": 1},
            "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_new_tokens": 8},
            "environment": {"name": "reward_model", "path": judge, "max_sequence_length": LIMIT, **environment},
        }
    )


TOO_LONG = [{"role": "user", "content": "a" * 60}, {"role": "assistant", "content": "b" * 30}]


def judged(config, logs):
    from mcore_rl.environments.interfaces import Sample
    from mcore_rl.environments.reward_model import RewardModelEnvironment
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=3)
    environment = RewardModelEnvironment(config)
    steps = environment.step([Sample(log, {}) for log in logs]), environment.step([Sample(TOO_LONG, {})])
    environment.close()
    policy.shutdown()
    return steps
