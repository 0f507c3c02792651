"""Tests of a published model, SmolLM2-135M-Instruct, with its own tokenizer and template: DPO equals TRL, DPO and GRPO
are the same in every layout, and transformers reads and generates the same."""

import json
import shutil

import pytest
import torch
import yaml
from programs import metrics_of, run
from safetensors.torch import load_file
from smollm import alone, smollm_directory
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_steps import STEPS, check_weights, trained

from mcore_rl.config import SFTConfig
from mcore_rl.data.token_store import SampleOrder
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.models.generation.sampling import SamplingParams
from mcore_rl.testing.processes import run_processes

pytestmark = pytest.mark.long

PAIRS, RATE, BETA = 4, 1e-5, 0.1  # pairs in a batch
EPSILON = 1e-6  # 1e-8 would blow rounding in near-zero gradients up to a whole step
LIMIT, NEW_TOKENS, END = 96, 8, 2
LAYOUTS = {  # the model has 9 heads, and 3 heads of keys and values
    "pp2": (2, "{pipeline_model_parallel_size: 2}"),
    "cp2": (2, "{context_parallel_size: 2}"),
    "tp3": (3, "{tensor_model_parallel_size: 3, sequence_parallel: true}"),
    "dp2": (2, "{}"),
}
QUESTIONS = [
    ("Which colour has the sky?", "Blue.", "The sky is green, and so is the sea."),
    ("What is 3 + 4? Answer with the number only.", "7", "12"),
    ("Name a large city.", "Paris is a large city.", "No."),
    ("Say hello.", "Hello! How can I help you?", "Hi"),
    ("What do cows eat?", "Grass.", "Cows eat stones and sand."),
    ("What is the capital of Italy?", "Rome", "It is Berlin, I think."),
]
SYSTEM = {"role": "system", "content": "Be brief."}
JUDGE = "def letters(log, record):\n    return len(set(log[-1]['content'].lower())) / 10\n"


def prompt(index):
    """Return a conversation: with the template's system message, with another one, or with an earlier turn."""
    asked = {"role": "user", "content": QUESTIONS[index % len(QUESTIONS)][0]}
    earlier = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    return [*([], [SYSTEM], earlier)[index % 3], asked]


def pair(index):
    _, *answers = QUESTIONS[index % len(QUESTIONS)]
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in answers)
    return {"prompt": prompt(index), "chosen": chosen, "rejected": rejected}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A directory with the model, data, and a configuration for each algorithm."""
    root = tmp_path_factory.mktemp("smollm")
    (root / "model").symlink_to(smollm_directory())
    (root / "letters.py").write_text(JUDGE)
    pairs = [pair(i) for i in range(STEPS * PAIRS)]
    (root / "dpo.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pairs))
    (root / "grpo.jsonl").write_text("".join(json.dumps({"prompt": prompt(i)}) + "\n" for i in range(2 * STEPS)))
    own = {  # packs are so small that there are several microbatches
        "dpo": {
            "batch": {"global_batch_size": PAIRS, "tokens_per_pack": 2 * LIMIT},
            "dpo": {"reference_policy_kl_penalty": BETA},
        },
        "grpo": {
            "batch": {"tokens_per_pack": LIMIT},
            "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_new_tokens": NEW_TOKENS},
            "loss": {"reference_policy_kl_penalty": 0.05},
            "environment": {"name": "function", "function": "letters:letters", "num_workers": 1},
        },
    }
    for algorithm, sections in own.items():
        config = {
            "output_dir": str(root / algorithm),
            "model": {"path": str(root / "model"), "dtype": "float32"},
            "data": {"train": str(root / f"{algorithm}.jsonl"), "max_sequence_length": LIMIT},
            "optimizer": {"lr": RATE, "schedule": "constant", "adam_eps": EPSILON},
            "trainer": {"max_steps": STEPS},
            "checkpoint": {"asynchronous": False},  # no second copy of the optimizer's state in memory
            **sections,
        }
        (root / f"{algorithm}.yaml").write_text(yaml.safe_dump(config))
    return root


def train(root, algorithm, layout=None, *arguments):
    """Return the metrics of a run, and the directory with its model, whose checkpoint of 1.6 GB is removed."""
    out, (processes, parallel) = root / f"{algorithm}_{layout}", LAYOUTS.get(layout, (1, "{}"))
    settings = (f"output_dir={out}", f"parallel={parallel}", *arguments)
    with alone(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(root), prepend=":")  # the judge
        run(f"train_{algorithm}.py", root / f"{algorithm}.yaml", *settings, processes=processes)
    shutil.rmtree(out / "checkpoints")
    return metrics_of(out), out


def weights_of(directory):
    return load_file(directory / "model.safetensors")


@pytest.fixture(scope="module")
def dpo(root):
    return train(root, "dpo")


def check_metrics(found, expected, names):
    """Compare metrics to rounding in float32.

    A reward is a difference of two sums of log-probabilities, of up to 30 nats. The norm that TRL logs is off by 1e-5:
    torch adds up the squares of the embedding's 28 million gradients in float32.
    """
    for mine, theirs in zip(found, expected, strict=True):
        off = (f"{name} off by {abs(mine[name] - theirs[name]):.1e} of {theirs[name]:.3g}" for name in names)
        print(f"step {mine['step']}:", ", ".join(off))
    for mine, theirs in zip(found, expected, strict=True):
        for name in names:
            relative = 5e-5 if name == "grad_norm" else 1e-5
            absolute = 3e-5 if name.startswith("rewards_") else 1e-6
            assert mine[name] == pytest.approx(theirs[name], rel=relative, abs=absolute), (mine["step"], name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dpo_does_not_depend_on_layout(layout, root, dpo):
    metrics, out = train(root, "dpo", layout)
    names = ("loss", "logprobs_chosen_mean", "rewards_chosen_mean", "rewards_rejected_mean", "grad_norm")
    check_metrics(metrics, dpo[0], names)
    check_weights(*map(weights_of, (out / "hf", dpo[1] / "hf", root / "model")), layout)


@pytest.mark.exhaustive
def test_dpo_equals_trls(root, dpo):
    """TRL also trains the line break that the template writes after the end token; here it is not trained."""
    import trl

    class WithoutLineBreak(trl.DPOTrainer):
        def compute_loss(self, model, inputs, *arguments, **named):
            for ids, mask in zip(inputs["input_ids"], inputs["completion_mask"], strict=True):
                last = int(mask.nonzero().max())
                assert self.processing_class.decode(ids[last - 1 : last + 1]) == "<|im_end|>\n"
                mask[last] = 0
            return super().compute_loss(model, inputs, *arguments, **named)

    records = [pair(i) for i in SampleOrder(STEPS * PAIRS, 0).indices(0, STEPS * PAIRS)]
    settings = {
        "beta": BETA, "learning_rate": RATE, "adam_epsilon": EPSILON, "max_length": LIMIT,
        "per_device_train_batch_size": PAIRS,
    }  # fmt: skip
    with alone():
        losses, logs, weights = trained(WithoutLineBreak, trl.DPOConfig, root, records, settings, root / "model")
    expected = [
        {
            "loss": loss, "grad_norm": log["grad_norm"], "logprobs_chosen_mean": log["logps/chosen"],
            "rewards_chosen_mean": log["rewards/chosen"] / BETA,
            "rewards_rejected_mean": log["rewards/rejected"] / BETA,
        }
        for loss, log in zip(losses, logs, strict=True)
    ]  # fmt: skip
    check_metrics(dpo[0], expected, expected[0])
    initial = weights_of(root / "model")
    weights = {name: weights[name] for name in initial}
    check_weights(weights_of(dpo[1] / "hf"), weights, initial, "TRL")


# ------------------------------------------------------------------ GRPO


def rollouts(path):
    return [rollout for line in path.read_text().splitlines() for rollout in json.loads(line)["rollouts"]]


@pytest.fixture(scope="module")
def grpo(root):
    return train(root, "grpo", None, "checkpoint.export_hf=false", "--record", root / "one.jsonl")[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_grpo_does_not_depend_on_layout(layout, root, grpo):
    """All samples are the same; rewards of a group differ, so that all steps have gradients."""
    path = root / f"{layout}.jsonl"
    metrics, _ = train(root, "grpo", layout, "checkpoint.export_hf=false", "--record", path)
    for mine, theirs in zip(rollouts(path), rollouts(root / "one.jsonl"), strict=True):
        assert (mine["prompt"], mine["input_ids"]) == (theirs["prompt"], theirs["input_ids"])
        assert mine["reward"] == theirs["reward"]
        assert mine["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-4)
    assert all(step["grad_norm"] > 1 and step["reward_std"] > 0 for step in grpo)
    names = ("loss", "reward_mean", "reward_std", "kl_penalty", "approx_entropy", "grad_norm", "response_length_mean")
    check_metrics(metrics, grpo, names)


# ------------------------------------------------------------------ generation


def generated(path, prompts):
    """Return what Megatron generates, with the log-probabilities of the sampler and of the trainer."""
    from mcore_rl.models.generation.megatron.generation import MegatronGeneration
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    config = SFTConfig.model_validate(
        {
            "output_dir": "unused",
            "model": {"path": path, "dtype": "float32"},
            "data": {"train": "unused", "max_sequence_length": LIMIT},
            "batch": {"global_batch_size": 1, "tokens_per_pack": 2 * LIMIT},
            "trainer": {"max_steps": 1},
        }
    )
    policy = MegatronPolicy(config)
    params = SamplingParams(2 * NEW_TOKENS, stop_token_ids=(END,))
    generation = MegatronGeneration(policy.model, params, LIMIT, AutoTokenizer.from_pretrained(path))
    out = generation.generate(prompts, True)
    ids, lengths = out["output_ids"], out["unpadded_sequence_lengths"]
    data = BatchedDataDict(input_ids=ids, input_lengths=lengths, sample_mask=torch.ones(len(ids)))
    logprobs = policy.get_logprobs(data)["logprobs"]
    policy.shutdown()
    return ids, lengths, out["logprobs"], logprobs


@pytest.mark.parametrize("which", ["as published", "trained"])
def test_generation_and_logprobs_equal_transformers(which, root, request):
    path = root / "model" if which == "as published" else request.getfixturevalue("dpo")[1] / "hf"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    texts = [tokenizer.apply_chat_template(prompt(i), tokenize=False, add_generation_prompt=True) for i in range(4)]
    rows = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
    lengths = torch.tensor([row.shape[1] for row in rows])
    ids = torch.stack([torch.nn.functional.pad(row[0], (0, int(lengths.max()) - row.shape[1])) for row in rows])
    prompts = BatchedDataDict(input_ids=ids, input_lengths=lengths)
    with alone():
        ids, ends, sampled, scored = run_processes(generated, path, prompts, world_size=1, timeout=240)[0]
    apart = []
    for i, row in enumerate(rows):
        start, end = row.shape[1], int(ends[i])
        theirs = model.generate(row, max_new_tokens=2 * NEW_TOKENS, do_sample=False)[0]
        assert ids[i, :end].tolist() == theirs.tolist()
        with torch.no_grad():
            expected = model(theirs[None]).logits[0, :-1].double().log_softmax(-1).gather(1, theirs[1:, None])[:, 0]
        apart += [
            (scored[i, 1:end] - expected).abs().max(),
            (sampled[i, start:end] - expected[start - 1 :]).abs().max(),
        ]
    print(f"{which}: log-probabilities off by {max(apart):.1e}")
    assert max(apart) < 1e-4
