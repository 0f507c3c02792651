"""Tests of programs that train on records with images."""

import json
import re
import shutil

import pytest
import torch
import yaml
from float32 import approx32_after_updates
from old_checkpoints import remove_module
from peft import PeftModel, get_peft_model_state_dict
from programs import ROOT, SUPPORT, metrics_of, run
from reward_model_cases import judge as judge
from safetensors.torch import load_file
from small_models import make_model as make_text_model
from transformers import AutoModelForImageTextToText, AutoTokenizer
from vision_cases import Qwen3VLForSequenceClassification, make_images, make_model, make_reward_model

from mcore_rl.config import DistillationConfig, DPOConfig, GRPOConfig, SFTConfig, load_config
from mcore_rl.errors import UserError


def question(number, *others):
    """A message with an image of the column `images`, and with further images."""
    parts = [{"type": "text", "text": f"number {number}: "}, {"type": "image"}, *others, {"type": "text", "text": "?"}]
    return {"role": "user", "content": parts}


def says(text):
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, images, records of each kind, and a configuration for each."""
    root = tmp_path_factory.mktemp("images")
    make_model("qwen3_vl", root / "model", initializer_range=0.05)
    (root / "pictures").mkdir()
    names = [f"pictures/{path.name}" for path in make_images(root / "pictures")]
    words = ["red", "green", "blue", "grey", "pink"]
    prompts = [
        ([question(n, *([{"type": "image", "image": names[2]}] if n % 3 == 0 else []))], [names[n % 5]])
        for n in range(12)
    ]
    text = [[{"role": "user", "content": f"say {n}"}] for n in range(4)]
    records = {
        "sft": [{"messages": [*p, says(words[n % 5])], "images": i} for n, (p, i) in enumerate(prompts)]
        + [{"messages": [*p, says("yes")]} for p in text],
        "dpo": [
            {"prompt": p, "chosen": [says(words[n % 5])], "rejected": [says("no")], "images": i}
            for n, (p, i) in enumerate(prompts)
        ],
        "kto": [
            {"prompt": p, "completion": [says(words[n % 5])], "label": n % 3 == 0, "images": i}
            for n, (p, i) in enumerate(prompts)
        ],
        "grpo": [{"prompt": p, "images": i, "answer": "e"} for p, i in prompts]
        + [{"prompt": p, "answer": "e"} for p in text],
    }
    for name, some in records.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in some))
        config = {
            "model": {"path": str(root / "model"), "vision_tower": "trained"},
            "output_dir": str(root / f"out_{name}"),
            "data": {"train": str(root / f"{name}.jsonl"), "max_sequence_length": 96, "cache_dir": str(root / "cache")},
            "optimizer": {
                "lr": 1e-3,
                "vision_tower_lr": 5e-4,
                "warmup_steps": 0,
                "schedule": "constant",
                "adam_eps": 1e-4,
            },
            "trainer": {"max_steps": 4},
            "checkpoint": {"save_interval": 2},
        }
        if name == "grpo":
            own = {"num_prompts_per_step": 6, "num_generations_per_prompt": 3, "max_new_tokens": 8}
            config |= {
                "grpo": own,
                "loss": {"reference_policy_kl_penalty": 0.01},
                "environment": {"name": "function", "function": "judge_functions:counts_letters"},
                "batch": {"tokens_per_pack": 400},
            }
        else:
            config["batch"] = {"global_batch_size": 4}
        (root / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return root


def assert_same_metrics(ours, theirs):
    assert [m["step"] for m in ours] == [m["step"] for m in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for name, value in b.items():
            if not name.endswith(("seconds", "per_second")):
                assert a[name] == pytest.approx(value, rel=2e-4, abs=2e-5), (a["step"], name)


@pytest.mark.long
def test_sft_with_images_resumes_under_another_layout_and_is_exported(files):
    """Two steps in one process, two more under TP2 CP2; the result is that of four steps in one process."""
    process = run("train_sft.py", files / "sft.yaml")
    assert "train: 16 records" in process.stdout_text and "12 with images" in process.stdout_text
    whole, out = files / "out_sft", files / "out_resumed"
    shutil.copytree(whole, out)
    (out / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2\n")
    shutil.rmtree(out / "hf")
    layout = ("tensor_model_parallel_size=2", "context_parallel_size=2", "sequence_parallel=true")
    arguments = [f"output_dir={out}", *(f"parallel.{value}" for value in layout)]
    resumed = run("train_sft.py", files / "sft.yaml", *arguments, processes=4)
    assert "resumed from" in resumed.stdout_text
    assert_same_metrics(metrics_of(out), metrics_of(whole))
    found, expected = (load_file(where / "hf" / "model.safetensors") for where in (out, whole))
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 1e-5 * tensor.norm(), name
    before = load_file(files / "model" / "model.safetensors")
    assert not torch.equal(before["model.visual.pos_embed.weight"], expected["model.visual.pos_embed.weight"])
    model = AutoModelForImageTextToText.from_pretrained(whole / "hf", dtype=torch.float32)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert (whole / "hf" / "preprocessor_config.json").is_file()
    assert json.loads((whole / "hf" / "config.json").read_text())["vision_config"]["depth"] == 3
    # The checkpoint converts to the same directory, and back to a checkpoint.
    run("convert", "to-hf", whole / "checkpoints", files / "converted")
    converted = load_file(files / "converted" / "model.safetensors")
    assert all(torch.equal(converted[name], tensor) for name, tensor in expected.items())
    run("convert", "from-hf", files / "converted", files / "megatron")
    run("convert", "to-hf", files / "megatron", files / "again")
    again = load_file(files / "again" / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())


@pytest.mark.long
def test_a_checkpoint_without_the_tower_is_resumed_and_converted(files):
    """The tower then is that of the model directory."""
    out = files / "out_text"
    arguments = [f"output_dir={out}", "model.vision_tower=frozen", "optimizer.vision_tower_lr=null"]
    run("train_sft.py", files / "sft.yaml", *arguments, "trainer.max_steps=2")
    expected = load_file(out / "hf" / "model.safetensors")
    (checkpoint,) = out.glob("checkpoints/iter_*2")
    remove_module(checkpoint, "visual.")
    run("convert", "to-hf", out / "checkpoints", files / "of_text")
    converted = load_file(files / "of_text" / "model.safetensors")
    assert converted.keys() == expected.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in expected.items())
    resumed = run("train_sft.py", files / "sft.yaml", *arguments, "trainer.max_steps=3")
    assert "resumed from" in resumed.stdout_text


@pytest.mark.long
def test_a_dry_run_shows_what_is_trained_on_after_images(files):
    told = run("train_sft.py", files / "sft.yaml", "--dry-run", f"output_dir={files / 'dry'}").stdout_text
    shown = told.partition("the first records")[2].replace(" ", "")
    assert re.search(r"number\d.*<\|image_pad\|>×\d\d?<\|vision_end\|>\?.*»(red|green|blue|grey|pink)<\|end\|>", shown)


@pytest.mark.long
def test_adapters_of_text_model_and_tower_resume_under_another_layout(files):
    """The adapter directory is PEFT's, also after a conversion of the checkpoint."""
    lora = ["model.lora={rank: 4}", "optimizer.vision_tower_lr=null"]
    whole, out = files / "out_lora", files / "out_lora_resumed"
    run("train_sft.py", files / "sft.yaml", f"output_dir={whole}", *lora)
    shutil.copytree(whole, out)
    (out / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2\n")
    shutil.rmtree(out / "adapter")
    layout = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
    resumed = run("train_sft.py", files / "sft.yaml", f"output_dir={out}", *lora, *layout, processes=2)
    assert "resumed from" in resumed.stdout_text
    assert_same_metrics(metrics_of(out), metrics_of(whole))
    run("convert", "to-hf", whole / "checkpoints", files / "converted_adapter")
    found, again, expected = (
        load_file(where / "adapter_model.safetensors")
        for where in (out / "adapter", files / "converted_adapter", whole / "adapter")
    )
    assert any(".visual." in name for name in expected)
    for name, tensor in expected.items():
        assert torch.equal(again[name], tensor), name
        assert (found[name] - tensor).norm() <= 1e-5 * tensor.norm(), name
    base = AutoModelForImageTextToText.from_pretrained(files / "model", dtype=torch.float32)
    loaded = get_peft_model_state_dict(PeftModel.from_pretrained(base, whole / "adapter"))
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


@pytest.mark.long
def test_dpo_with_images_has_the_same_numbers_with_each_kind_of_reference(files):
    run("train_dpo.py", files / "dpo.yaml", "dpo.reference=precompute")
    other = files / "out_swap"
    layout = "parallel.pipeline_model_parallel_size=2"
    run("train_dpo.py", files / "dpo.yaml", "dpo.reference=swap", layout, f"output_dir={other}", processes=2)
    found, expected = metrics_of(other), metrics_of(files / "out_dpo")
    assert_same_metrics(found, expected)
    assert expected[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert expected[3]["loss"] < expected[0]["loss"]


@pytest.mark.long
def test_kto_with_images_has_the_same_numbers_in_two_replicas(files):
    run("train_kto.py", files / "kto.yaml", "batch.global_batch_size=6")
    run("train_kto.py", files / "kto.yaml", "batch.global_batch_size=6", f"output_dir={files / 'kto2'}", processes=2)
    assert_same_metrics(metrics_of(files / "kto2"), metrics_of(files / "out_kto"))


@pytest.mark.long
def test_grpo_with_images_has_the_same_numbers_under_layouts_and_when_replayed(files, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    record = files / "rollouts.jsonl"
    run("train_grpo.py", files / "grpo.yaml", "--record", record)
    expected = metrics_of(files / "out_grpo")
    assert any(m["reward_mean"] > 0 and not m["skipped_update"] for m in expected)
    assert all(abs(m["token_mult_prob_error"] - 1) < 1e-4 for m in expected if "token_mult_prob_error" in m)
    shared = ("batch.share_prefixes=true", "batch.min_shared_tokens=4")
    for name, options, processes in (
        ("two", (), 2),
        ("tensor", ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true", *shared), 2),
    ):
        out = files / f"out_grpo_{name}"
        run("train_grpo.py", files / "grpo.yaml", *options, f"output_dir={out}", processes=processes)
        assert_same_metrics(metrics_of(out), expected)
    out = files / "out_replayed"
    run("train_grpo.py", files / "grpo.yaml", "--replay", record, f"output_dir={out}")
    for ours, theirs in zip(metrics_of(out), expected, strict=True):
        assert ours["loss"] == approx32_after_updates(theirs["loss"])


@pytest.mark.long
def test_a_reward_model_judges_and_values_images_under_layouts(files):
    """A reward model is trained on pairs with images; PPO starts its critic from it, and it judges the responses."""
    values = yaml.safe_load((files / "dpo.yaml").read_text())
    values |= {"output_dir": str(files / "out_rm"), "trainer": {"max_steps": 3}}
    (files / "rm.yaml").write_text(yaml.safe_dump(values))
    run("train_rm.py", files / "rm.yaml")
    run(
        "train_rm.py", files / "rm.yaml", f"output_dir={files / 'rm2'}", "parallel.context_parallel_size=2", processes=2
    )
    expected = metrics_of(files / "out_rm")
    assert_same_metrics(metrics_of(files / "rm2"), expected)
    assert expected[-1]["loss"] < expected[0]["loss"]
    exported = files / "out_rm" / "hf"
    model, loading = Qwen3VLForSequenceClassification.from_pretrained(exported, output_loading_info=True)
    assert model.config.architectures == ["Qwen3VLForSequenceClassification"]
    assert not any(loading.values()), loading

    values = yaml.safe_load((files / "grpo.yaml").read_text())
    values |= {"output_dir": str(files / "out_ppo"), "trainer": {"max_steps": 3}, "ppo": values.pop("grpo")}
    values["environment"] = {"name": "reward_model", "path": str(exported)}
    values["loss"] = {"reference_policy_kl_penalty": 0.01, "use_kl_in_reward": True}
    optimizer = {**values["optimizer"], "lr": 1e-2}
    del optimizer["vision_tower_lr"]
    values["critic"] = {"path": str(exported), "export_hf": True, "optimizer": optimizer}
    (files / "ppo.yaml").write_text(yaml.safe_dump(values))
    run("train_ppo.py", files / "ppo.yaml")
    layout = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true", "critic.offload=true")
    run("train_ppo.py", files / "ppo.yaml", *layout, f"output_dir={files / 'ppo2'}", processes=2)
    expected = metrics_of(files / "out_ppo")
    assert expected[0]["reward_std"] > 0
    assert_same_metrics(metrics_of(files / "ppo2"), expected)
    critic = load_file(files / "out_ppo" / "critic" / "model.safetensors")
    before = load_file(exported / "model.safetensors")
    assert critic.keys() == before.keys()
    assert not torch.equal(critic["score.weight"], before["score.weight"])


@pytest.mark.long
@pytest.mark.parametrize("on_policy", [False, True])
def test_distillation_with_images_has_the_same_numbers_under_layouts(files, on_policy):
    teacher = make_model("qwen3_vl", files / f"teacher_{on_policy}", initializer_range=0.06)
    values = yaml.safe_load((files / "sft.yaml").read_text())
    values |= {"output_dir": str(files / f"out_distill_{on_policy}"), "trainer": {"max_steps": 2}}
    values["distillation"] = {"teacher": str(teacher)} | (
        {"on_policy": True, "max_new_tokens": 6, "topk": None} if on_policy else {"topk": 8}
    )
    config = files / f"distill_{on_policy}.yaml"
    config.write_text(yaml.safe_dump(values))
    run("train_distill.py", config)
    out, expected = files / f"distill2_{on_policy}", metrics_of(files / f"out_distill_{on_policy}")
    for layout, processes in (
        (["parallel.tensor_model_parallel_size=2", "distillation.teacher_parallel={}"], 2),
        (["parallel.context_parallel_size=2"], 2),
    ):
        shutil.rmtree(out, ignore_errors=True)
        run("train_distill.py", config, f"output_dir={out}", *layout, processes=processes)
        assert_same_metrics(metrics_of(out), expected)


@pytest.fixture(scope="module")
def text_model(files):
    """A model without a vision tower, with the tokenizer of the model that reads images."""
    path = make_text_model("qwen3", files / "text")
    for file in (files / "model").glob("token*"):
        shutil.copy(file, path)
    return path


def test_a_part_of_the_run_that_reads_no_images_is_refused_before_training(files, text_model, judge):
    from mcore_rl.run.setup import load_inputs

    larger = shutil.copytree(files / "model", files / "larger")
    processor = json.loads((larger / "preprocessor_config.json").read_text())
    processor["size"]["longest_edge"] *= 2
    (larger / "preprocessor_config.json").write_text(json.dumps(processor))
    reward = make_reward_model(files / "model", files / "reward")
    blind = shutil.copytree(reward, files / "blind")
    tokenizer = AutoTokenizer.from_pretrained(blind)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}{{ m['content'] | length }}{% endfor %}"
    tokenizer.save_pretrained(blind)
    without_processor = shutil.copytree(reward, files / "without_processor")
    (without_processor / "preprocessor_config.json").unlink()
    distill = yaml.safe_load((files / "sft.yaml").read_text())
    distill["distillation"] = {"teacher": str(files / "model"), "topk": 4}
    (files / "distill.yaml").write_text(yaml.safe_dump(distill))
    for kind, name, option, message in (
        (
            DPOConfig,
            "dpo",
            f"dpo.reference_model={text_model}",
            "dpo.reference_model: qwen3 reads no images, but records",
        ),
        (
            DPOConfig,
            "dpo",
            f"dpo.reference_model={larger}",
            r"dpo\.reference_model: the image processor of .*larger makes other numbers of tokens than that of "
            r"model\.path .*\(8, 256, 5120\) instead of \(8, 256, 2560\)",
        ),
        (
            GRPOConfig,
            "grpo",
            f"environment={{name: reward_model, path: {judge}}}",
            "environment.path: .* reads no images",
        ),
        (
            GRPOConfig,
            "grpo",
            f"environment={{name: reward_model, path: {blind}}}",
            r"environment\.path: .*blind cannot judge images: the conversation has 1 image, but its text has "
            r"<\|image_pad\|> 0 times",
        ),
        (
            GRPOConfig,
            "grpo",
            f"environment={{name: reward_model, path: {reward}, format: text}}",
            r"environment\.format=text: joins the texts of messages",
        ),
        (
            GRPOConfig,
            "grpo",
            f"environment={{name: reward_model, path: {without_processor}}}",
            r"environment\.path: .*without_processor has no preprocessor_config\.json",
        ),
        (
            DistillationConfig,
            "distill",
            "distillation={teacher: policy, topk: 4, teacher_prompt: '{prompt} Why?'}",
            r"sft\.jsonl, line 1: distillation\.teacher_prompt: is a text, but the record's prompt has images",
        ),
        (
            SFTConfig,
            "sft",
            f"model={{path: {text_model}}}",
            r"sft\.jsonl, line 1: the record has images, but the model reads no images; leave them out",
        ),
    ):
        out = f"output_dir={files / 'refused'}"
        with pytest.raises(UserError, match=message):
            options = [option, out, "optimizer.vision_tower_lr=null"]
            load_inputs(load_config(kind, files / f"{name}.yaml", options), world_size=1)


@pytest.mark.exhaustive
def test_grpo_teaches_the_colour_of_squares(tmp_path):
    """The demo: the colours of held-out pictures are guessed before, and known afterwards."""
    run("make_image_data.py", tmp_path / "data")
    sft, grpo = (ROOT / "configs" / f"{name}_images.yaml" for name in ("sft", "grpo"))
    taught = [f"output_dir={tmp_path / 'sft'}", f"model.path={tmp_path / 'data' / 'model'}"]
    run("train_sft.py", sft, *taught, f"data.train={tmp_path / 'data' / 'sft_train.jsonl'}")
    data = [f"data.{part}={tmp_path / 'data' / part}.jsonl" for part in ("train", "validation")]
    models = [f"output_dir={tmp_path / 'grpo'}", f"model.path={tmp_path / 'sft' / 'hf'}"]
    run("train_grpo.py", grpo, *models, *data, "trainer.max_steps=40")
    metrics = metrics_of(tmp_path / "grpo")
    before, after = (metrics[step]["validation_reward_positive_fraction"] for step in (0, -1))
    assert before <= 0.5
    assert after >= 0.9
    run("report", tmp_path / "grpo")
    assert "<img src=" in (tmp_path / "grpo" / "report.html").read_text()
