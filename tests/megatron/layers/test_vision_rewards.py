"""Tests of reward heads and teachers on models that read images: transformers' numbers, under every layout."""

import copy

import pytest
import torch
import torch.nn.functional as F
import vision_cases
from float32 import FORWARD, approx32, assert_close32
from layout_cases import STEPS, make_config
from small_models import and_long
from transformers import AutoModelForSequenceClassification
from vision_cases import make_images, make_vision_data, model_arguments, plain_rewards

from mcore_rl.config import GRPOConfig, PPOConfig, RMConfig
from mcore_rl.distributed.batched_data_dict import BatchShare, LocalBatch
from mcore_rl.environments.interfaces import Sample
from mcore_rl.testing.layout_check import LayoutResult, ParallelLayout, compare, compute_layout_result
from mcore_rl.testing.processes import run_processes

CENTER = 0.1
CLASSIFIERS = {
    "qwen3_vl": vision_cases.Qwen3VLForSequenceClassification,
    "qwen3_5": AutoModelForSequenceClassification,
}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory, images):
    """Return a function that computes the configuration, the data and transformers' results of a family, once."""
    made = {}

    def get(family):
        if family not in made:
            root = tmp_path_factory.mktemp(family)
            path = vision_cases.make_reward_model(vision_cases.make_model(family, root / "lm"), root / "reward")
            values = {k: v for k, v in make_config(path).model_dump().items() if k in RMConfig.model_fields}
            values["model"] |= {"head": "reward", "vision_tower": "trained"}
            values["data"]["max_sequence_length"] = 80
            config = RMConfig.model_validate({**values, "reward": {"center_rewards_coefficient": CENTER}})
            data = make_vision_data(path, images)
            made[family] = config, data, plain_outcome(CLASSIFIERS[family], config, data)
        return made[family]

    return get


def plain_outcome(kind, config, data):
    """Run the steps with transformers' classifier and torch.optim."""
    model = kind.from_pretrained(config.model.path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.optimizer.lr, eps=config.optimizer.adam_eps, weight_decay=0
    )
    pairs, first, metrics = data["sample_mask"][::2], None, []
    for _ in range(STEPS):
        optimizer.zero_grad()
        rewards = plain_rewards(model, data, config.model.path)
        chosen, rejected = rewards[::2], rewards[1::2]
        loss = -(F.logsigmoid(chosen - rejected) * pairs).sum() / pairs.sum()
        loss = loss + CENTER * ((chosen + rejected) ** 2 * pairs).sum() / pairs.sum()
        loss.backward()
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
        }
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad).item()
        optimizer.step()
        accuracy = (((chosen > rejected) * pairs).sum() / pairs.sum()).item()
        metrics.append({"loss": loss.item(), "grad_norm": norm, "accuracy": accuracy})
        first = first or (rewards.detach()[:, None], gradients)
    return LayoutResult(metrics, *first, {name: p.detach() for name, p in model.named_parameters()})


@pytest.mark.parametrize(
    ("family", "layout"),
    and_long(
        [("qwen3_vl", ParallelLayout(tp=2, sp=True))],
        [
            ("qwen3_vl", ParallelLayout(cp=2)),
            ("qwen3_vl", ParallelLayout(dp=2, pp=2)),
            ("qwen3_5", ParallelLayout()),
        ],
        [
            ("qwen3_vl", ParallelLayout()),
            ("qwen3_vl", ParallelLayout(packing=False)),
            ("qwen3_vl", ParallelLayout(tp=2, cp=2, sp=True)),
            ("qwen3_5", ParallelLayout(tp=2, cp=2, sp=True)),
        ],
    ),
    ids=str,
)
def test_a_reward_model_reads_images_as_transformers_does(family, layout, expected):
    """Rewards, loss, all gradients, and the weights after three steps."""
    config, data, plain = expected(family)
    found = run_processes(
        compute_layout_result, layout.apply(config), copy.deepcopy(data), STEPS, world_size=layout.world_size
    )[0]
    assert compare(found, plain).within(1e-5, 5e-4 if family == "qwen3_5" else 1e-5), compare(found, plain)


def judged(config, logs):
    """Return the reward of each conversation, on this process's half of them."""
    from mcore_rl.environments.reward_model import RewardModelEnvironment
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=3)
    environment = RewardModelEnvironment(config, replicas=policy.topology.data)
    replicas = policy.topology.data
    steps = environment.step([Sample(log, {}) for log in logs[replicas.rank :: replicas.size]])
    environment.close()
    policy.shutdown()
    return steps


@pytest.mark.parametrize(
    ("processes", "own"), and_long([(2, {"tensor_model_parallel_size": 2})], [(1, None), (2, None)]), ids=str
)
def test_a_judging_reward_model_sees_the_images_of_conversations(processes, own, expected, images):
    """Also in a layout of its own, where one replica has conversations without images only."""
    model = expected("qwen3_vl")[0].model.path
    environment = {
        "name": "reward_model",
        "path": model,
        "max_sequence_length": 90,
        **({"parallel": own} if own else {}),
    }
    config = GRPOConfig.model_validate(
        {
            "output_dir": "unused",
            "model": {"path": model.parent / "lm"},
            "data": {"train": "unused", "max_sequence_length": 80},
            "batch": {"tokens_per_pack": 180},
            "optimizer": {"lr": 1e-3},
            "trainer": {"max_steps": 1},
            "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_new_tokens": 8},
            "environment": environment,
        }
    )

    def log(numbers, answer):
        parts = [{"type": "image", "image": str(images[n])} for n in numbers]
        content = [{"type": "text", "text": "see "}, *parts] if parts else "see"
        return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]

    logs = [log([0], "a"), log([], "b"), log([1, 2], "cd"), log([], "a"), log([3], "a"), log([], "the end")]
    steps = run_processes(judged, config, logs, world_size=processes)
    found = dict.fromkeys(range(len(logs)), 0.0)
    replicas = 1 if own is None and processes == 1 else processes
    for rank in range(replicas):
        found |= dict(zip(range(rank, len(logs), replicas), [step.reward for step in steps[rank]], strict=True))
    from mcore_rl.data.tokenize import judged_tokens, load_tokenizer

    said = [*log([0], "see <|image_pad|> there")]
    with pytest.raises(ValueError, match=r"has 1 image, but its text has <\|image_pad\|> 2 times"):
        judged_tokens(load_tokenizer(model, images=model), said)
    tokenizer = load_tokenizer(model, images=model)
    classifier = vision_cases.Qwen3VLForSequenceClassification.from_pretrained(model, dtype=torch.float32)
    for number, reward in found.items():
        row = judged_tokens(tokenizer, logs[number])
        one = {
            "input_ids": torch.tensor([row.input_ids]),
            "input_lengths": torch.tensor([len(row)]),
            "images": [row.images],
        }
        with torch.no_grad():
            assert reward == approx32(plain_rewards(classifier, one, model).item(), FORWARD)
    assert len({round(reward, 5) for reward in found.values()}) == len(logs)


def critics_values(config, data):
    from mcore_rl.algorithms.critic import Critic

    critic = Critic(config, total_updates=3)
    values = critic.values(LocalBatch(data, BatchShare.whole(data.size)))
    critic.model.shutdown()
    return values


def test_a_critic_values_tokens_after_images(expected):
    """The value before each token is the classifier's output at the token before it."""
    config, data, _ = expected("qwen3_vl")
    model = config.model.path
    ppo = PPOConfig.model_validate(
        {
            "output_dir": "unused",
            "model": {"path": model.parent / "lm"},
            "data": {"train": "unused", "max_sequence_length": 80},
            "optimizer": {"lr": 1e-3},
            "trainer": {"max_steps": 1},
            "ppo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_new_tokens": 8},
            "critic": {"path": model},
            "environment": {"name": "exact_match"},
        }
    )
    values = run_processes(critics_values, ppo, copy.deepcopy(data), world_size=1)[0]
    classifier = vision_cases.Qwen3VLForSequenceClassification.from_pretrained(model, dtype=torch.float32)
    for row, (length, images) in enumerate(zip(data["input_lengths"].tolist(), data["images"], strict=True)):
        ids = data["input_ids"][row, :length]
        with torch.no_grad():
            hidden = classifier.model(**model_arguments(ids, images, model)).last_hidden_state
            outputs = classifier.score(hidden)[0, :, 0]
        assert_close32(values[row, 1:length], outputs[:-1], FORWARD, scale=1)
