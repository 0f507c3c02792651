"""Tests of a reference that follows the policy: log-probabilities by transformers, under layouts, through
checkpoints."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from layout_cases import lora_config, make_config, make_data, plain_logprobs
from peak_memory import PeakMemory
from safetensors.torch import save_file
from small_models import and_long, make_model
from transformers import AutoModelForCausalLM

from mcore_rl.algorithms.build_loss import build_loss
from mcore_rl.algorithms.dpo import precomputes_reference
from mcore_rl.config import DPOConfig, GRPOConfig, build_config
from mcore_rl.errors import UserError, WorkerError
from mcore_rl.models.policy.reference import ReferenceWeights
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes

ALPHAS = (0.6, 0.25)


def move_and_save(config, directory):
    """A step before each move; weights at the beginning and at each move, the reference's scores after the last."""
    from mcore_rl.models.megatron.weights.conversion import export_hf_weights
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2, keep_reference=True)
    weights = [{name: tensor.clone() for name, tensor in export_hf_weights(policy.model)}]
    for alpha in ALPHAS:
        policy.train(make_data(), build_loss(config))
        weights.append({name: tensor.clone() for name, tensor in export_hf_weights(policy.model)})
        policy.move_reference(alpha)
    policy.train(make_data(), build_loss(config))
    scores = policy.get_reference_policy_logprobs(make_data())["reference_logprobs"]
    saved = policy.save_checkpoint(directory, 3, {"position": 1})
    policy.shutdown()
    return weights, scores, saved


def load_and_score(config, saved):
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2, keep_reference=True)
    restored = policy.load_checkpoint(saved)
    scores = policy.get_reference_policy_logprobs(make_data())["reference_logprobs"]
    again = policy.save_checkpoint(saved.parent, 4, {"position": 2})
    policy.shutdown()
    return restored.pieces, scores, again


@pytest.mark.parametrize(
    ("family", "first", "second"),
    and_long(
        [],
        [
            ("qwen2", ParallelLayout(tp=2, sp=True), ParallelLayout(pp=2)),
            ("llama", ParallelLayout(), ParallelLayout(tp=2, dp=2)),
            ("gemma3", ParallelLayout(dp=2), ParallelLayout(cp=2)),
            ("mixtral", ParallelLayout(dp=2, ep=2), ParallelLayout(tp=2, ep=2, etp=1, sp=True)),
            ("deep", ParallelLayout(pp=2, vpp=3), ParallelLayout()),
        ],
    ),
    ids=str,
)
def test_the_reference_is_the_mixture(family, first, second, model_of, tmp_path):
    config = make_config(model_of(family))
    weights, scores, saved = run_processes(move_and_save, first.apply(config), tmp_path, world_size=first.world_size)[0]
    mixed = {name: tensor.double() for name, tensor in weights[0].items()}
    for alpha, current in zip(ALPHAS, weights[1:], strict=True):
        mixed = {name: (1 - alpha) * tensor + alpha * current[name].double() for name, tensor in mixed.items()}
    shutil.copytree(model_of(family), tmp_path / "mixed")
    save_file({name: tensor.float() for name, tensor in mixed.items()}, tmp_path / "mixed" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "mixed", dtype=torch.float32)
    with torch.no_grad():
        expected = plain_logprobs(model, make_data())
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=4e-5)
    pieces, again, resaved = run_processes(load_and_score, second.apply(config), saved, world_size=second.world_size)[0]
    assert "reference" in pieces
    torch.testing.assert_close(again, scores, rtol=0, atol=4e-5)
    # A run that has loaded the reference continues to save it, whether it moves it further or not.
    _, last, _ = run_processes(load_and_score, config, resaved, world_size=1)[0]
    torch.testing.assert_close(last, scores, rtol=0, atol=4e-5)


@pytest.mark.long
def test_adapters_are_copied(model_of, tmp_path):
    """The reference without adapters becomes the policy of the last move."""
    values = lora_config(model_of("llama"), rank=4).model_dump()
    config = DPOConfig.model_validate({**values, "reference_sync": {"interval": 1, "alpha": 1}})
    layout = ParallelLayout(tp=2, pp=2)
    before, after, saved = run_processes(adapters_moved, layout.apply(config), tmp_path, world_size=4)[0]
    torch.testing.assert_close(after, before)
    _, again, _ = run_processes(load_and_score, config, saved, world_size=1)[0]
    torch.testing.assert_close(again, before, rtol=0, atol=4e-5)
    without = DPOConfig.model_validate({**values, "reference_sync": None})
    _, again, _ = run_processes(load_and_score, without, saved, world_size=1)[0]
    torch.testing.assert_close(again, before, rtol=0, atol=4e-5)


def adapters_moved(config, directory):
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2, keep_reference=True)
    for _ in range(2):
        policy.train(make_data(), build_loss(config))
    before = policy.get_logprobs(make_data())["logprobs"]
    policy.move_reference(1.0)
    policy.train(make_data(), build_loss(config))
    after = policy.get_reference_policy_logprobs(make_data())["reference_logprobs"]
    saved = policy.save_checkpoint(directory, 3, {"position": 1})
    policy.shutdown()
    return before, after, saved


def train(config):
    from mcore_rl.algorithms.dpo import train_dpo

    train_dpo(config)


@pytest.mark.long
def test_a_run_that_is_taken_up_again(tmp_path):
    make_model("llama", tmp_path / "model")
    pairs = [{"prompt": f"say {i} ", "chosen": "ab" * (1 + i % 3), "rejected": "ba"} for i in range(12)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))

    def run(name, steps, sync):
        data = str(tmp_path / "pairs.jsonl")
        values = {
            "output_dir": str(tmp_path / name),
            "model": {"path": str(tmp_path / "model")},
            "data": {"train": data, "validation": data, "max_sequence_length": 48},
            "batch": {"global_batch_size": 4},
            "optimizer": {"lr": 3e-3, "schedule": "constant"},
            "trainer": {"max_steps": steps, "validation_interval": 1},
            "checkpoint": {"export_hf": False, "asynchronous": False},
            "reference_sync": sync,
        }
        run_processes(train, build_config(DPOConfig, values, [], ""), world_size=1)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [(json.loads(line)["loss"], json.loads(line)["validation_loss"]) for line in lines]

    whole = run("whole", 6, {"interval": 2, "alpha": 0.5})
    for steps in (2, 3, 6):
        parts = run("parts", steps, {"interval": 2, "alpha": 0.5})
    assert parts == whole
    fixed = run("fixed", 6, None)
    assert whole[0] == fixed[0] and whole[1][0] == fixed[1][0]
    assert whole[1][1] != fixed[1][1], "validation after step 2 is by the reference that has moved"
    assert all(a != b for a, b in zip(whole[2:], fixed[2:], strict=True))


def test_a_reference_that_has_moved_is_not_computed_again(model_of, tmp_path):
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "bc", "rejected": "de"}\n')
    values = {
        "output_dir": str(tmp_path / "out"),
        "model": {"path": str(model_of("llama"))},
        "data": {"train": str(tmp_path / "pairs.jsonl"), "max_sequence_length": 16},
        "batch": {"global_batch_size": 1},
        "checkpoint": {"export_hf": False},
        "reference_sync": {"interval": 1},
    }
    run_processes(train, build_config(DPOConfig, values, [], ""), world_size=1)
    without = {**values, "reference_sync": None, "trainer": {"max_epochs": 2}}
    auto = build_config(DPOConfig, without, [], "")
    assert not precomputes_reference(auto, SimpleNamespace(train=range(1))), "what has moved is in the checkpoint alone"
    with pytest.raises(WorkerError, match=r"dpo\.reference=precompute: .*iter_0000001 starts from other weights"):
        run_processes(train, build_config(DPOConfig, without, ["dpo.reference=precompute"], ""), world_size=1)


def convert(source, destination):
    from mcore_rl.models.megatron.checkpoint.convert import hf_to_megatron

    hf_to_megatron(source, destination, lambda items, count: items)


def begun_from_other_weights(config, iteration):
    """Losses of four steps at once, and of two and two; a run of each reference."""
    found = []
    for reference, steps in (("auto", (4,)), ("swap", (2, 4)), ("auto", (2, 4))):
        dpo, out = dataclasses.replace(config.dpo, reference=reference), config.output_dir / f"{reference}{len(steps)}"
        for number, last in enumerate(steps):
            resume = iteration.parent if number == 0 else "auto"
            checkpoint = config.checkpoint.model_copy(update={"resume": str(resume), "allow_partial": True})
            trainer = config.trainer.model_copy(update={"max_steps": last})
            changes = {"dpo": dpo, "output_dir": out, "checkpoint": checkpoint, "trainer": trainer}
            run_processes(train, config.model_copy(update=changes), world_size=1)
        found.append([json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()])
    return found


@pytest.mark.long
def test_a_run_begun_from_other_weights_keeps_its_reference(model_of, tmp_path):
    """From a converted model, which is not that of model.path: stopped and resumed or not."""
    other = make_model("llama", tmp_path / "other", initializer_range=0.08)
    run_processes(convert, other, tmp_path / "weights", world_size=1)
    (tmp_path / "pairs.jsonl").write_text(
        "".join(f'{{"prompt": "a{n}", "chosen": "bc{n}", "rejected": "de"}}\n' for n in range(4))
    )
    values = {
        "output_dir": str(tmp_path / "out"),
        "model": {"path": str(model_of("llama"))},
        "data": {"train": str(tmp_path / "pairs.jsonl"), "max_sequence_length": 16},
        "batch": {"global_batch_size": 2},
        "optimizer": {"lr": 1e-2, "warmup_steps": 0, "schedule": "constant"},
        "trainer": {"max_steps": 4},
        "checkpoint": {"export_hf": False},
    }
    config = build_config(DPOConfig, values, [], "")
    (iteration,) = (tmp_path / "weights").glob("iter_*")
    whole, swapped, parts = begun_from_other_weights(config, iteration)
    assert whole[0] == pytest.approx(0.6931, abs=1e-4) and len(whole) == 4
    assert whole == swapped == parts


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        (DPOConfig, ["reference_sync.alpha=0"], r"reference_sync\.alpha: Input should be greater than 0"),
        (DPOConfig, ["reference_sync.alpha=1.5"], r"reference_sync\.alpha: Input should be less than or equal to 1"),
        (
            DPOConfig,
            ["reference_sync.interval=4", "dpo.reference=precompute"],
            "reference_sync: needs a loss with a reference, without",
        ),
        (
            DPOConfig,
            ["reference_sync.interval=4", "dpo.preference_loss=simpo"],
            "reference_sync: needs a loss with a reference, without",
        ),
        (
            DPOConfig,
            ["reference_sync.interval=4", "model.lora.rank=2"],
            r"reference_sync\.alpha: must be 1 with model\.lora",
        ),
        (
            GRPOConfig,
            ["reference_sync.interval=4"],
            "reference_sync: needs a reference, which a run with loss.reference_policy",
        ),
    ],
)
def test_what_is_refused(kind, overrides, message):
    values = {"output_dir": "o", "model": {"path": "m"}, "data": {"train": "x"}}
    with pytest.raises(UserError, match=message):
        build_config(kind, values, overrides, "")


def test_taking_the_place_takes_one_tensor_more():
    """Compare 24 tensors of 4 MB each: the values equal the earlier ones bit for bit, also after an interruption."""
    tensors = [torch.randn(2**20) for _ in range(24)]
    kept = ReferenceWeights(tensors)
    begun = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.add_(torch.randn(2**20))
    current = [tensor.clone() for tensor in tensors]

    def same(one, other):
        return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    with PeakMemory() as peak, pytest.raises(KeyError), kept.in_place():
        assert same(tensors, begun) and not same(kept.kept, begun)
        raise KeyError
    assert same(tensors, current) and same(kept.kept, begun)
    assert peak.bytes < 3 * 4 * 2**20
    with PeakMemory() as peak:
        kept.move(0.25)
    assert peak.bytes < 5 * 4 * 2**20
    for moved, a, b in zip(kept.kept, begun, current, strict=True):
        assert torch.equal(moved, torch.lerp(a, b, 0.25))
