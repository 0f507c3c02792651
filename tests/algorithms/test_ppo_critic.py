"""Tests of PPO's critic: values, GAE, loss and gradients equal plain float64 PyTorch under every layout."""

import pytest
import torch
from float32 import AFTER_UPDATES, approx32_after_updates, assert_close32, assert_updates32
from layout_cases import LR, make_config
from small_models import and_long, make_model
from torch import nn
from transformers import AutoModelForSequenceClassification

from mcore_rl.algorithms.advantages import gae_advantages, token_rewards_with_penalty, whiten
from mcore_rl.algorithms.critic import value_metrics
from mcore_rl.algorithms.loss_functions import ValueLossFn
from mcore_rl.errors import ContractError
from mcore_rl.rollouts.samples import Rollout, rewards_of_tokens, to_batch
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes

GAMMA, LAMBDA, CLIP, STEPS = 0.97, 0.9, 0.01, 3


def make_rollouts():
    """Twelve conversations of one or two responses, two to a prompt, some of one token; each token earns something."""
    generator = torch.Generator().manual_seed(11)

    def count(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    def tokens(size):  # without the pad token, whose embedding transformers gives no gradient
        return torch.randint(1, 250, (size,), generator=generator).tolist()

    rollouts = []
    for sample in range(12):
        if sample % 2 == 0:
            prompt = tokens(count(1, 8))
        rollout = Rollout(sample // 2, sample, list(prompt), [False] * len(prompt), [0.0] * len(prompt))
        for turn in range(1 + sample % 3 // 2):
            if turn:
                rollout.add_observation(tokens(count(1, 4)))
            size = 1 if sample == 3 else count(1, 20)
            rollout.add_response(tokens(size), [0.0] * size)
        own = [t for t, is_own in enumerate(rollout.token_mask) if is_own]
        rollout.token_rewards = [(t, float(torch.randn((), generator=generator))) for t in own]
        rollout.reward = sum(reward for _, reward in rollout.token_rewards)
        rollouts.append(rollout)
    return rollouts


def make_batch():
    data = to_batch(make_rollouts(), 0)
    data["sample_mask"][4] = 0
    return data


def megatron_critic(config):
    from mcore_rl.models.megatron.training.optimizer import gather_gradients
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy
    from mcore_rl.testing.layout_check import _main_grad

    critic, data, rollouts = MegatronPolicy(config, total_steps=10), make_batch(), make_rollouts()
    mask = data["token_mask"] * data["sample_mask"][:, None]
    data["token_rewards"] = rewards_of_tokens(rollouts, data)
    earned = token_rewards_with_penalty(data, torch.zeros(len(rollouts)), None)
    del data["token_rewards"]
    data["values"] = critic.get_values(data)["values"]
    advantages, returns = gae_advantages(earned, data["values"], mask, GAMMA, LAMBDA)
    data["returns"] = returns.float()
    loss_fn = ValueLossFn(CLIP)
    metrics = [critic.train(data, loss_fn) for _ in range(STEPS)]
    critic.compute_gradients(data, loss_fn)
    gather_gradients(critic.chunks)
    gradients = dict(export_hf_weights(critic.model, _main_grad))
    weights = dict(export_hf_weights(critic.model))
    critic.shutdown()
    return data["values"], whiten(advantages, mask), metrics, gradients, weights


def plain_values(model, data):
    """Compute the values [B, S] from transformers' hidden states, row by row."""
    values = []
    for ids, length in zip(data["input_ids"], data["input_lengths"].tolist(), strict=True):
        hidden = model.model(ids[None, :length]).last_hidden_state[0]
        of_states = model.score(hidden)[:, 0]
        values.append(nn.functional.pad(of_states[:-1], (1, len(ids) - length)))
    return torch.stack(values)


def plain_gae(rewards, values, gamma, lam):
    """Compute advantages of one sample's response tokens from the definition: a sum over later tokens."""
    steps = len(rewards)
    errors = [rewards[t] + (gamma * values[t + 1] if t + 1 < steps else 0) - values[t] for t in range(steps)]
    return [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, steps)) for t in range(steps)]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """A sequence classifier of one label, whose head is not zero."""
    path = tmp_path_factory.mktemp("critic") / "model"
    make_model("llama", path)
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
    nn.init.normal_(model.score.weight, std=0.3)
    model.save_pretrained(path)
    return path


def critic_config(path, layout, **batch):
    config = make_config(path)
    changes = {"model": config.model.model_copy(update={"head": "reward"})}
    changes["batch"] = config.batch.model_copy(update=batch)
    return layout.apply(config.model_copy(update=changes))


@pytest.fixture(scope="module")
def plain(reward_model):
    """The same by transformers, python and torch.optim, in float64."""
    config, data, rollouts = make_config(reward_model), make_batch(), make_rollouts()
    model = AutoModelForSequenceClassification.from_pretrained(reward_model, num_labels=1, dtype=torch.float64)
    with torch.no_grad():
        values = plain_values(model, data)
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    counted = torch.zeros(values.shape, dtype=torch.bool)
    for row, rollout in enumerate(rollouts):
        own = [t for t, _ in rollout.token_rewards]
        found = plain_gae([r for _, r in rollout.token_rewards], values[row, own].tolist(), GAMMA, LAMBDA)
        advantages[row, own] = torch.tensor(found, dtype=torch.float64)
        returns[row, own] = advantages[row, own] + values[row, own]
        counted[row, own] = row != 4
    own = advantages[counted]
    white = torch.where(counted, (advantages - own.mean()) / (own.std(correction=0) + 1e-4), 0)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.optimizer.lr, eps=config.optimizer.adam_eps, weight_decay=0
    )
    metrics = []
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        current = plain_values(model, data)[counted]
        before, target = values[counted], returns[counted]
        near = before + (current - before).clamp(-CLIP, CLIP)
        worse = torch.maximum((current - target) ** 2, (near - target) ** 2)
        loss = worse.mean() / 2
        loss.backward()
        if step == STEPS:
            break
        clipped = ((near - target) ** 2 > (current - target) ** 2).double().mean()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad)
        metrics.append({"loss": loss.item(), "value_clip_fraction": clipped.item(), "grad_norm": norm.item()})
        optimizer.step()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return values, white, metrics, gradients, {name: p.detach() for name, p in model.named_parameters()}


LAYOUTS = and_long(
    [ParallelLayout(), ParallelLayout(tp=2, sp=True), ParallelLayout(cp=2), ParallelLayout(pp=2)],
    [
        ParallelLayout(packing=False),
        ParallelLayout(tp=2),
        ParallelLayout(dp=2),
        ParallelLayout(dp=2, packing=False),
        ParallelLayout(tp=2, cp=2, sp=True),
    ],
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_critic_equals_plain_pytorch(layout, plain, reward_model):
    config = critic_config(reward_model, layout)
    assert_same(run_processes(megatron_critic, config, world_size=layout.world_size)[0], plain)


@pytest.mark.parametrize(
    "layout", and_long([ParallelLayout()], [ParallelLayout(cp=2), ParallelLayout(tp=2, sp=True)]), ids=str
)
def test_a_prompt_that_stands_in_a_pack_once(layout, plain, reward_model):
    config = critic_config(reward_model, layout, share_prefixes=True, min_shared_tokens=2)
    assert_same(run_processes(megatron_critic, config, world_size=layout.world_size)[0], plain)


def assert_same(ours, theirs):
    data = make_batch()
    there = torch.arange(data["input_ids"].shape[1]) < data["input_lengths"][:, None]
    torch.testing.assert_close(ours[0].double(), torch.where(there, theirs[0], 0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-5)
    for a, b in zip(ours[2], theirs[2], strict=True):
        for name in b:
            assert a[name] == approx32_after_updates(b[name]), name
    assert theirs[2][-1]["value_clip_fraction"] > 0.1, "nothing was clipped: the clip is not tested"
    for name, gradient in theirs[3].items():
        assert_close32(ours[3][name].double(), gradient, AFTER_UPDATES, what=name)
    for name, weight in theirs[4].items():
        assert_updates32(ours[4][name].double(), weight, STEPS * LR, what=name)


# ------------------------------------------------------------------ the estimator


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
def test_gae_is_the_sum_that_defines_it(gamma, lam):
    """Rows with gaps between responses, rows with one token or none, and arbitrary values outside of responses."""
    generator = torch.Generator().manual_seed(2)
    rewards, values = torch.randn(2, 6, 9, generator=generator, dtype=torch.float64)
    mask = (torch.rand(6, 9, generator=generator) < 0.6).float()
    mask[0], mask[1], mask[2] = 0, 1, 0
    mask[2, 8] = 1
    outside = torch.where(mask > 0, values, torch.nan)
    advantages, returns = gae_advantages(torch.where(mask > 0, rewards, torch.inf), outside, mask, gamma, lam)
    for row in range(6):
        own = mask[row].nonzero()[:, 0]
        expected = torch.zeros(9, dtype=torch.float64)
        expected[own] = torch.tensor(
            plain_gae(rewards[row, own].tolist(), values[row, own].tolist(), gamma, lam), dtype=torch.float64
        )
        torch.testing.assert_close(advantages[row], expected)
        torch.testing.assert_close(returns[row, own], (expected + values[row])[own])
    assert not returns[mask == 0].any()


def test_known_limits_of_gae():
    """λ = 1, γ = 1: return minus value. λ = 0: the error of one step. A perfect critic: nothing."""
    mask, rewards = torch.ones(1, 4), torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    values = torch.tensor([[0.5, 0.25, 0.75, 0.5]])
    whole, returns = gae_advantages(rewards, values, mask, 1.0, 1.0)
    assert whole.tolist() == [[0.5, 0.75, 0.25, 0.5]] and returns.tolist() == [[1.0] * 4]
    assert gae_advantages(rewards, values, mask, 1.0, 0.0)[0].tolist() == [[-0.25, 0.5, -0.25, 0.5]]
    assert not gae_advantages(rewards, torch.ones(1, 4), mask, 1.0, 0.95)[0].any()


def test_whitening_counts_what_the_mask_counts():
    values = torch.tensor([[1.0, torch.nan, 3.0], [5.0, 100.0, torch.inf]])
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    white = whiten(values, mask, 0.0)
    deviation = (8 / 3) ** 0.5
    torch.testing.assert_close(white, torch.tensor([[-2.0, 0, 0], [2.0, 0, 0]], dtype=torch.float64) / deviation)
    assert not whiten(torch.full((2, 3), 0.7), torch.ones(2, 3), 0.0).any(), "all equal: nothing, not rounding"
    assert not whiten(values, torch.zeros(2, 3)).any()


# ------------------------------------------------------------------ the loss, and what is told


def loss_of(values, returns, before, clip, mask=None):
    mask = torch.ones(values.shape) if mask is None else mask
    data = {"returns": returns, "values": before, "token_mask": mask, "sample_mask": torch.ones(len(values))}
    return ValueLossFn(clip)(values, data, mask[:, 0].sum(), mask[:, 1:].sum())


def test_the_clip_stops_what_has_gone_far_enough():
    """Nearer to the return by more than ε: no gradient. Further away from it: the whole."""
    values = torch.tensor([[0.0, 0.5, -0.5, 0.1]], dtype=torch.float64, requires_grad=True)
    loss, metrics = loss_of(values, torch.ones(1, 4), torch.zeros(1, 4), 0.2)
    (gradient,) = torch.autograd.grad(loss, values)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 0.0, -1.5, -0.9]], dtype=torch.float64) / 3)
    assert loss.item() == pytest.approx((0.8**2 + 1.5**2 + 0.9**2) / 6)
    assert metrics["value_clip_fraction"].item() == pytest.approx(1 / 3)
    free, _ = loss_of(values, torch.ones(1, 4), torch.zeros(1, 4), None)
    assert free.item() == pytest.approx((0.5**2 + 1.5**2 + 0.9**2) / 6)


def test_a_loss_of_nothing_is_nothing():
    values = torch.full((2, 3), 4.0, requires_grad=True)
    loss, _ = loss_of(values, torch.full((2, 3), torch.nan), torch.zeros(2, 3), 0.2, mask=torch.zeros(2, 3))
    (gradient,) = torch.autograd.grad(loss, values)
    assert loss.item() == 0 and not gradient.any()


def test_wrong_arguments_of_the_loss():
    with pytest.raises(ContractError, match="value_clip must be more than 0, or None to clip nothing, got 0"):
        ValueLossFn(0.0)
    data = {"returns": torch.zeros(1, 3), "token_mask": torch.ones(1, 3), "sample_mask": torch.ones(1)}
    with pytest.raises(ContractError, match="ValueLossFn: data lacks values; its keys are"):
        ValueLossFn(0.2)(torch.zeros(1, 3), data, torch.ones(()), torch.ones(()))
    with pytest.raises(ContractError, match=r"returns must be \(1, 4\), got \(1, 3\)"):
        ValueLossFn()(torch.zeros(1, 4), {**data, "token_mask": torch.ones(1, 4)}, torch.ones(()), torch.ones(()))


def test_explained_variance():
    returns = torch.tensor([[9.0, 1.0, 2.0, 3.0]])
    mask = torch.tensor([[0.0, 1.0, 1.0, 1.0]])
    assert value_metrics(returns, returns, mask)["explained_variance"] == 1
    assert value_metrics(torch.full((1, 4), 7.0), returns, mask)["explained_variance"] == 0
    half = value_metrics(returns / 2, returns, mask)
    assert half["explained_variance"] == pytest.approx(0.75)
    assert (half["values_mean"], half["returns_mean"]) == (1.0, 2.0)
    assert "explained_variance" not in value_metrics(returns, torch.ones(1, 4), mask)


# ------------------------------------------------------------------ what tokens earn


def test_shaping_and_penalty_go_where_they_belong():
    """A turn's reward is its last token's; what shaping adds the last one's of all; the penalty each token's."""
    from mcore_rl.environments.interfaces import Step

    rollout = Rollout(0, 0, [5, 6], [False, False], [0.0, 0.0])
    rollout.add_response([7, 8], [-1.0, -1.0])
    rollout.add_reward(Step(reward=0.5))
    rollout.add_observation([9])
    rollout.add_response([7, 8, 9], [-1.0] * 3)
    rollout.add_reward(Step(reward=1.0, token_rewards=[0.0, 0.25, 0.125]))
    plain = Rollout(0, 1, [5, 6, 7], [False, True, False], [0.0, -1.0, 0.0], reward=2.0)  # as an old recording has it
    assert rollout.reward == 1.875
    penalty = torch.full((2, 8), 0.5)
    data = to_batch([rollout, plain], 0)
    data["token_rewards"] = rewards_of_tokens([rollout, plain], data)
    earned = token_rewards_with_penalty(data, torch.tensor([-0.1, 0.0]), penalty) + penalty
    torch.testing.assert_close(
        earned, torch.tensor([[0, 0, 0, 0.5, 0, 0, 0.25, 1.125 - 0.1], [0, 2, 0, 0, 0, 0, 0, 0]])
    )


def test_token_rewards_must_be_of_the_responses_tokens():
    from mcore_rl.environments.interfaces import Step

    rollout = Rollout(0, 0, [5], [False], [0.0])
    rollout.add_response([7, 8], [-1.0, -1.0])
    rollout.add_reward(Step(reward=1.0, token_rewards=[0.5]))
    assert rollout.error == "1 token_rewards for a response of 2 tokens"
    assert (rollout.reward, rollout.token_rewards) == (0.0, [])


def test_a_language_models_directory_begins_with_values_of_zero(model_of):
    values = run_processes(first_values, critic_config(model_of("llama"), ParallelLayout()), world_size=1)[0]
    assert values.shape == make_batch()["input_ids"].shape
    assert not values.any()


def first_values(config):
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    critic = MegatronPolicy(config, total_steps=1)
    values = critic.get_values(make_batch())["values"]
    critic.shutdown()
    return values
