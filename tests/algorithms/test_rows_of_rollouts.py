"""Rollouts with several rows: a token counts once, and a rollout weighs the same, however many rows it has."""

import json

import pytest
import torch
import yaml
from float32 import FORWARD, approx32, approx32_after_updates
from hypothesis import assume, given
from hypothesis import strategies as st
from programs import metrics_of, run
from small_models import make_model

from mcore_rl.data.batching import global_valid_counts
from mcore_rl.data.choices import RecordedChoice
from mcore_rl.losses.policy_gradient import ClippedPGLossFn, calculate_kl
from mcore_rl.rollouts.samples import Rollout, RowsOfRollouts, TokenRow, rewards_of_tokens, to_batch

KL, CLIP = 0.1, 0.2


def random_rollouts(generator, count):
    """Return rollouts of one to four rows; a row may have no token that carries loss."""
    rollouts = []
    for number in range(count):
        rows = []
        for _ in range(int(torch.randint(1, 5, (), generator=generator))):
            length = int(torch.randint(1, 9, (), generator=generator))
            mask = [False, *(torch.rand(length, generator=generator) < 0.6).tolist()]
            tokens = torch.randint(0, 30, (length + 1,), generator=generator).tolist()
            rows.append(TokenRow(tokens, mask, [-float(m) for m in mask]))
        first, *further = rows
        rollouts.append(
            Rollout(number, number, first.input_ids, first.token_mask, first.logprobs, number / 3, further_rows=further)
        )
    return rollouts


def batch_of(rollouts):
    batch, rows = to_batch(rollouts, 0), RowsOfRollouts.of([rollout.outcome for rollout in rollouts])
    if (weights := rows.weights()) is not None:
        batch["sample_weights"] = weights.double()
    return batch, rows


def by_definition(options, logprobs, data, rollout_of, count):
    """Return the loss in float64, summed token by token from its formula."""
    totals, tokens = [logprobs.new_zeros(()) for _ in range(count)], [0] * count
    prev, reference, advantages = (
        data[key][:, 1:] for key in ("prev_logprobs", "reference_policy_logprobs", "advantages")
    )
    for row, rollout in enumerate(rollout_of):
        counted = ((data["token_mask"][row, 1:] * data["sample_mask"][row]) > 0).nonzero()[:, 0].tolist()
        log_ratios = [logprobs[row, t] - prev[row, t] for t in counted]
        for t, log_ratio in zip(counted, log_ratios, strict=True):
            if options.get("sequence_level_importance_ratios"):
                log_ratio = sum(log_ratios) / len(log_ratios)  # of the row's counted tokens
            ratio, advantage = log_ratio.exp(), advantages[row, t]
            value = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP))
            totals[rollout] = totals[rollout] + value + KL * calculate_kl(logprobs[row, t], reference[row, t])
            tokens[rollout] += 1
    kept = [n for n in range(count) if tokens[n]]
    if options.get("aggregation") == "seq_mean_token_sum":
        return sum(totals[n] for n in kept) / len(kept)
    if options.get("token_level_loss", True):
        return sum(totals[n] for n in kept) / sum(tokens)
    return sum(totals[n] / (options.get("dr_grpo_max_tokens") or tokens[n]) for n in kept) / len(kept)


BY_SAMPLE = {"token_level_loss": False}
LOSSES = {
    "mean over tokens": {"token_level_loss": True},
    "mean over samples": BY_SAMPLE,
    "Dr. GRPO": {**BY_SAMPLE, "dr_grpo_max_tokens": 11},
    "sums over samples": {**BY_SAMPLE, "aggregation": "seq_mean_token_sum"},
    "GSPO": {**BY_SAMPLE, "sequence_level_importance_ratios": True},
}


@pytest.mark.parametrize("options", LOSSES.values(), ids=list(LOSSES))
@given(seed=st.integers(0, 10**6))
def test_losses_equal_their_formulas(options, seed):
    generator = torch.Generator().manual_seed(seed)
    rollouts = random_rollouts(generator, 5)
    data, rows = batch_of(rollouts)
    counted = [sum(rows.sizes[row].counted for row in rows.of_rollouts([n])) for n in range(5)]
    assume(all(counted))
    failed = seed % 5
    data["sample_mask"] = torch.tensor([float(rollout != failed) for rollout in rows.rollout_of])
    shape = data["input_ids"].shape
    for key in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs"):
        data[key] = -torch.rand(shape, generator=generator, dtype=torch.float64)
    of_rollouts = torch.randn(len(rollouts), generator=generator, dtype=torch.float64)
    data["advantages"] = of_rollouts[list(rows.rollout_of)][:, None].expand(shape)
    logprobs = (-torch.rand(shape[0], shape[1] - 1, generator=generator, dtype=torch.float64)).requires_grad_()
    clip = {
        "ratio_clip_min": CLIP,
        "ratio_clip_max": CLIP,
        "ratio_clip_c": None,
        "reference_policy_kl_penalty": KL,
        "use_on_policy_kl_approximation": False,
        "use_importance_sampling_correction": False,
    }
    loss, metrics = ClippedPGLossFn({**clip, **options}).from_logprobs(logprobs, data, *global_valid_counts(data))
    expected = by_definition(options, logprobs, data, rows.rollout_of, len(rollouts))
    assert metrics["num_valid_samples"] == pytest.approx(4)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-7)  # float64: masked means add 1e-8 to their counts
    ours, theirs = (torch.autograd.grad(x, logprobs, retain_graph=True)[0] for x in (loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)  # float64


def test_each_row_ends_in_the_reward_of_its_rollout():
    rollouts = random_rollouts(torch.Generator().manual_seed(1), 4)
    data, rows = batch_of(rollouts)
    rewards = rewards_of_tokens(rollouts, data)
    assert rewards.sum(1).tolist() == pytest.approx([rollouts[n].reward for n in rows.rollout_of])
    for row, sizes in enumerate(rows.sizes):
        if sizes.counted:
            (last,) = rewards[row].nonzero()[:, 0].tolist() or [int(data["token_mask"][row].nonzero().max())]
            assert data["token_mask"][row, last] and not data["token_mask"][row, last + 1 :].any()


def test_rows_without_tokens_that_carry_loss():
    """A rollout without such tokens counts as a sample, like one of a single row."""
    row = TokenRow([1, 2], [False, False], [0.0, 0.0])
    nothing = Rollout(0, 0, [1, 2], [False, False], [0.0, 0.0], further_rows=[row])
    some = Rollout(0, 1, [1, 2, 3], [False, True, True], [0.0, -1.0, -1.0], further_rows=[row])
    rows = RowsOfRollouts.of([nothing.outcome, some.outcome])
    assert rows.weights().tolist() == [0.5, 0.5, 1, 0] and list(rows.rollout_of) == [0, 0, 1, 1]
    assert RowsOfRollouts.of([Rollout(0, 0, [1, 2], [False, True], [0.0, -1.0]).outcome]).weights() is None


def test_a_rollout_without_a_request_has_unknown_experts():
    """Without the column on one replica, the replicas would not exchange the same columns."""
    experts = torch.ones(2, 3, 2, dtype=torch.int16)
    some = Rollout(
        0, 0, [1, 2, 3], [False, True, True], [0.0, -1.0, -1.0], turns=1, choices={"routed_experts": experts}
    )
    batch = to_batch(
        [Rollout(0, 1, [1, 2], [False, False], [0.0, 0.0]), some], 0, [RecordedChoice("routed_experts", 3, 2)]
    )
    assert bool((batch["routed_experts"][0] == -1).all()) and bool((batch["routed_experts"][1, :2] == 1).all())


# ------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("rows")
    make_model("qwen3", root / "model", initializer_range=0.05)
    prompts = [{"prompt": f"say {letter}", "answer": letter} for letter in "abcdefghij"]
    (root / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (root / "turns_judge.py").write_text(
        "from mcore_rl.environments.interfaces import Step\n\n\n"
        "def judge(log, record):\n"
        "    ended = len(log) > 4 or len(log[-1]['content']) % 3 == 0\n"
        "    reward = sum(map(ord, log[-1]['content'])) % 7 / 7 if ended else 0.0\n"
        "    return Step(reward=reward, done=ended, observation=None if ended else ' more ')\n"
    )
    for name in ("grpo", "ppo"):
        config = {
            "output_dir": "set below",
            "model": {"path": str(root / "model")},
            "data": {"train": str(root / "prompts.jsonl"), "max_sequence_length": 60},
            "optimizer": {"lr": 1e-3, "adam_eps": 1e-4},
            "trainer": {"max_steps": 2},
            "checkpoint": {"export_hf": False},
            name: {"num_prompts_per_step": 3, "num_generations_per_prompt": 4, "max_new_tokens": 6},
            "environment": {"name": "function", "function": "turns_judge:judge", "num_workers": 1, "max_turns": 3},
        }
        (root / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return root


def train(files, algorithm, name, *arguments, processes=1):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(files))
        out = f"output_dir={files / name}"
        run(f"train_{algorithm}.py", files / f"{algorithm}.yaml", out, *arguments, processes=processes)
    return metrics_of(files / name)


def split_rows(entry):
    """Split each rollout of a recorded step into a row for each of its responses, with the same contexts."""
    for rollout in entry["rollouts"]:
        mask = rollout["token_mask"]
        ends = [t + 1 for t in range(len(mask)) if mask[t] and (t + 1 == len(mask) or not mask[t + 1])]
        rows, begin = [], 0
        for end in ends:
            rows.append(
                {
                    "input_ids": rollout["input_ids"][:end],
                    "token_mask": [False] * begin + mask[begin:end],
                    "logprobs": [0.0] * begin + rollout["logprobs"][begin:end],
                    "token_rewards": [],
                }
            )
            begin = end
        first, *further = rows[::-1]  # the row of the last response comes first
        rollout |= {**first, "further_rows": further}
    return entry


CASES = {
    "grpo": ["loss.reference_policy_kl_penalty=0.05"],
    "rloo by sample": ["loss.token_level_loss=false", "grpo.advantage_estimator=rloo"],
    "minibatches": ["grpo.train_global_batch_size=4", "loss.dr_grpo_max_tokens=9", "loss.token_level_loss=false"],
    "reinforce++": ["grpo.advantage_estimator=reinforce_plus_plus"],
    "ppo": ["ppo.gae_lambda=1", "critic.path={root}/model"],
}
TIMES = ("seconds", "per_second", "mfu")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "processes"),
    [
        pytest.param(name, 2 if name == "grpo" else 1, marks=getattr(pytest.mark, "long" if quick else "exhaustive"))
        for name in CASES
        for quick in [name in ("grpo", "ppo")]
    ],
)
def test_a_row_for_each_response_changes_nothing(name, processes, files):
    """Rows are built from a recording: each response in a row of its own, behind the same tokens as before."""
    algorithm = "ppo" if name == "ppo" else "grpo"
    options = [option.format(root=files) for option in CASES[name]]
    recording = files / f"{name}.jsonl"
    train(files, algorithm, f"{name} recorded", *options, "--record", recording)
    entries = [json.loads(line) for line in recording.read_text().splitlines()]
    assert any(sum(r["turns"] > 1 for r in entry["rollouts"]) for entry in entries)
    split = files / f"{name} split.jsonl"
    split.write_text("".join(json.dumps(split_rows(entry)) + "\n" for entry in entries))
    whole = train(files, algorithm, f"{name} whole", *options, "--replay", recording)
    rows = train(files, algorithm, f"{name} rows", *options, "--replay", split, processes=processes)
    for one, other in zip(whole, rows, strict=True):
        assert other["loss"] == approx32(one["loss"], FORWARD)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
        for key in one:
            is_size = key.endswith(TIMES) or "token" in key.split("_") or key.startswith(("memory", "tflops"))
            if key == "lr":
                assert other[key] == one[key]
            elif not is_size and isinstance(one[key], float):
                assert other[key] == approx32_after_updates(one[key]), key
