"""Configurations of TRL, verl and NeMo RL, translated: values, reasons, and that the result loads."""

import dataclasses
import fnmatch
import re
import shlex

import pytest
import yaml
from make_config_reference import other_keys
from programs import ROOT

from mcore_rl.cli.port import ported_text
from mcore_rl.cli.train import PROGRAMS
from mcore_rl.config import build_config, load_config
from mcore_rl.config.porting.foreign import Foreign, read_foreign
from mcore_rl.config.porting.port import RULES_OF, nested, port
from mcore_rl.config.porting.trl import DEFAULTS
from mcore_rl.errors import UserError

OURS = {"DPOConfig": "dpo", "SFTConfig": "sft", "RewardConfig": "rm", "KTOConfig": "kto", "GRPOConfig": "grpo"}


def translated(text, tmp_path, name="file", algorithm=None):
    """Write a file, translate it, load the result from its text; return the configuration and the translation."""
    (tmp_path / name).write_text(text)
    foreign = read_foreign(tmp_path / name)
    foreign = dataclasses.replace(foreign, algorithm=algorithm or foreign.algorithm)
    config_type = PROGRAMS[foreign.algorithm].config
    ported = port(foreign, config_type)
    (tmp_path / "ours.yaml").write_text(ported_text(tmp_path / name, foreign, ported))
    return load_config(config_type, tmp_path / "ours.yaml"), ported


def documented(program, without=()):
    """The values of the command of docs/coming_from.md that corresponds to an example of `program`."""
    page = (ROOT / "docs" / "coming_from.md").read_text().partition("## A command of each")[2]
    command = next(text for text in re.findall(r"```\n(.*?)```", page, re.S) if program in text)
    words = shlex.split(command.replace("\\\n", " "))
    named = {"--model": "model.path", "--data": "data.train", "--output": "output_dir"}
    overrides = [f"{named[word]}={words[place + 1]}" for place, word in enumerate(words) if word in named]
    overrides += [word for word in words if re.match(r"[\w.]+=", word) and word.partition("=")[0] not in without]
    return build_config(PROGRAMS[words[2]].config, {}, overrides, "the page")


DPO = """\
#!/bin/bash
export MODEL=Qwen/Qwen2-0.5B-Instruct
# as in the first lines of TRL's script
trl dpo --model_name_or_path $MODEL --dataset_name=trl-lib/ultrafeedback_binarized \\
    --learning_rate 5.0e-7 --max_steps 1000 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 \\
    --eval_strategy steps --eval_steps 50 --output_dir Qwen2-0.5B-DPO --no_remove_unused_columns --seed 0
"""


def test_command_of_trl_becomes_the_documented_one(tmp_path):
    config, ported = translated(DPO, tmp_path)
    assert config == documented("Qwen2-0.5B-DPO", without=["checkpoint.save_interval"])
    assert not ported.refused
    for start in (
        "trl dpo --num_processes 4",
        "accelerate launch --num_processes 4 -m trl.scripts.dpo",
        "accelerate launch --num_processes 4 trl/scripts/dpo.py",
        "torchrun --nproc_per_node=4 dpo.py",
    ):
        of_four, _ = translated(DPO.replace("trl dpo", start), tmp_path)
        assert of_four.batch.global_batch_size == 2 * 8 * 4, start


VERL = """\
data: {train_files: gsm8k/train.parquet, val_files: [gsm8k/test.parquet], train_batch_size: 1024}
actor_rollout_ref:
  model: {path: Qwen/Qwen2-7B-Instruct, enable_gradient_checkpointing: true}
  actor: {optim: {lr: 1e-6}, ppo_mini_batch_size: 256, use_kl_loss: true, kl_loss_coef: 0.001, clip_ratio: 0.2}
  rollout: {name: vllm, tensor_model_parallel_size: 2, gpu_memory_utilization: 0.6, n: 5}
algorithm: {adv_estimator: grpo, use_kl_in_reward: false}
trainer: {total_epochs: 15, n_gpus_per_node: 8, save_freq: -1, default_local_dir: outputs/verl_grpo_example_gsm8k}
"""


def test_file_of_verl_becomes_the_documented_command(tmp_path):
    config, ported = translated(VERL, tmp_path, "verl.yaml")
    chosen = ["environment.name", "environment.pattern", "parallel.tensor_model_parallel_size"]
    assert config == documented("verl_grpo", without=[*chosen, "logging.wandb", "logging.run_name"])
    assert config.grpo.train_global_batch_size == 1280 and config.generation.vllm.num_servers == 4
    assert any(line.startswith("environment.name: choose the judge") for line in ported.todo)
    words = "python3 -m verl.trainer.main_ppo "
    flat = {**read_foreign(tmp_path / "verl.yaml").values, "trainer.n_gpus_per_node": 8}
    command = words + " ".join(shlex.quote(f"{key}={yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}")
                               for key, value in flat.items())  # fmt: skip
    assert translated(command, tmp_path)[0] == config


@pytest.mark.parametrize(
    ("freezes", "image_key", "tower"),
    [
        (True, "pictures", "frozen"),
        (False, "pictures", "trained"),
        (False, None, "frozen"),
        (None, "images", "trained"),
    ],
)
def test_images_of_verl(freezes, image_key, tower, tmp_path):
    text = VERL
    if image_key is not None:
        text = text.replace("{train_files", f"{{image_key: {image_key}, prompt_key: question, train_files")
    if freezes is not None:
        text = text.replace("actor: {", f"actor: {{freeze_vision_tower: {str(freezes).lower()}, ")
    config, ported = translated(text, tmp_path, "verl.yaml")
    assert config.model.vision_tower == tower
    named = {} if image_key in (None, "images") else {"images": image_key}
    assert config.data.columns == ({} if image_key is None else {"prompt": "question", **named})
    assert not [line for line in ported.todo if "does not know" in line]
    if freezes is False and image_key is None:
        assert any("freeze_vision_tower" in line and "data.image_key is not set" in line for line in ported.left)


NEMO_RL = """\
grpo: {num_prompts_per_step: 64, num_generations_per_prompt: 32, max_num_epochs: 1, use_leave_one_out_baseline: true,
       seed: 42, max_rollout_turns: 1}
loss_fn: {reference_policy_kl_penalty: 0.01, ratio_clip_c: null, kl_input_clamp_value: null, token_level_loss: true}
policy:
  model_name: meta-llama/Llama-3.1-8B-Instruct
  max_total_sequence_length: 4096
  train_global_batch_size: 512
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0}}
  dtensor_cfg: {enabled: false, tensor_parallel_size: 7}
  megatron_cfg:
    enabled: true
    pipeline_model_parallel_size: 2
    optimizer: {optimizer: adam, lr: 3.0e-7, weight_decay: 0.01, min_lr: 3.0e-8}
    scheduler: {lr_decay_style: constant, lr_warmup_iters: 13}
  generation: {backend: vllm, max_new_tokens: 3072, vllm_cfg: {tensor_parallel_size: 1, gpu_memory_utilization: 0.6},
               colocated: {enabled: true}, stop_strings: null, max_len: "${mul:2, 3}"}
data: {max_input_seq_length: "${policy.max_total_sequence_length}", dataset_name: "nvidia/OpenMathInstruct-2:train_1M"}
env: {math: {num_workers: 2, math_verify_impl: hf_math_verify}}
cluster: {gpus_per_node: 8, num_nodes: 1}
checkpointing: {checkpoint_dir: results/grpo_8b_megatron}
"""


def test_file_of_nemo_rl_becomes_the_documented_command(tmp_path):
    pytest.importorskip("math_verify")
    config, ported = translated(NEMO_RL, tmp_path, "nemo.yaml")
    expected = documented("OpenMathInstruct", without=["data.columns"])
    assert config.loss.kl_clamp is None  # the file says null; the documented command keeps 20
    assert config.model_copy(update={"loss": expected.loss}) == expected
    assert any("min_lr" in line and "which is refused here" in line for line in ported.left)
    assert any(line.startswith("policy.generation.max_len: ") for line in ported.todo)
    (tmp_path / "child.yaml").write_text("defaults: nemo.yaml\npolicy: {train_global_batch_size: 1024}\n")
    child, _ = translated((tmp_path / "child.yaml").read_text(), tmp_path, "child.yaml")
    assert child.grpo.train_global_batch_size == 1024 and child.model == config.model


GRPO = (
    "trl grpo --model_name_or_path m --dataset_name d --output_dir o --num_processes 2 --per_device_train_batch_size 8 "
)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--num_generations 4", {"grpo.num_prompts_per_step": 4, "grpo.train_global_batch_size": 16}),
        (
            "--gradient_accumulation_steps 2 --steps_per_generation 8 --max_steps 40 --num_iterations 2",
            {"grpo.num_prompts_per_step": 16, "grpo.train_global_batch_size": 32, "trainer.max_steps": 5},
        ),
        (
            "--generation_batch_size 64 --num_generations 16",
            {"grpo.num_prompts_per_step": 4, "grpo.train_global_batch_size": 16},
        ),
        ("--loss_type cispo --epsilon_high 5", {"loss.clip_type": "cispo", "loss.ratio_clip_max": 4.0}),
        ("--loss_type dr_grpo", {"loss.dr_grpo_max_tokens": 512, "loss.token_level_loss": False}),
        ("--loss_type sapo --sapo_temperature_neg 2", {"loss.name": "sapo", "loss.tau_neg": 2}),
        ("--epsilon 0.1", {"loss.ratio_clip_min": 0.1, "loss.ratio_clip_max": 0.1}),
        ("--epsilon 0.1 --epsilon_high 0.3", {"loss.ratio_clip_min": 0.1, "loss.ratio_clip_max": 0.3}),
        ("--max_completion_length 2048", {"grpo.max_new_tokens": 2048, "data.max_sequence_length": 2560}),
        ("--beta 0.04", {"loss.reference_policy_kl_penalty": 0.04, "loss.kl_gradient": "unbiased"}),
        (
            "--use_vllm --vllm_mode server --vllm_server_host 10.0.0.1",
            {"generation.vllm.urls": ("http://10.0.0.1:8000",), "generation.offload": False,
             "loss.truncated_importance_sampling_type": "icepop", "loss.importance_sampling_level": "sequence"},
        ),
        (
            "--use_vllm --vllm_tensor_parallel_size 2",
            {"generation.offload": True, "generation.vllm.num_servers": 1,
             "generation.vllm.arguments": ("--gpu-memory-utilization", "0.3")},
        ),
        ("--scale_rewards none", {"grpo.normalize_rewards": False}),
        ("--reward_funcs a.b.c", {"environment.name": "trl", "environment.function": "a.b:c"}),
        ("--use_peft --lora_r 64 --use_rslora", {"model.lora.rank": 64, "model.lora.alpha": 32 * 8}),
        ("--lora_r 64", {"model.lora": None}),
        ("--warmup_steps 0.1", {"optimizer.warmup_ratio": 0.1}),
        ("--sync_ref_model --ref_model_sync_steps 3 --beta 0.1", {"reference_sync.interval": 3}),
        ("--eval_strategy steps --eval_steps 4 --dataset_test_split t",
         {"data.validation": "d:t", "trainer.validation_interval": 4}),
        ("--fp16 --model_revision abc", {"model.path": "m@abc"}),
    ],
)  # fmt: skip
def test_values_of_trl_are_converted(arguments, expected, tmp_path):
    config, ported = translated(GRPO + arguments, tmp_path)
    assert not ported.refused
    for name, value in expected.items():
        found = config
        for part in name.split("."):
            found = getattr(found, part)
        assert type(value)(found) == value if value is not None else found is None, (name, found)


def test_losses_on_pairs_keep_their_weights(tmp_path):
    words = (
        "trl dpo --model_name_or_path m --dataset_name d --loss_type sigmoid bco_pair sft --loss_weights 0.8 0.2 1.0"
    )
    config, _ = translated(words, tmp_path)
    assert (config.dpo.preference_loss, config.dpo.sft_loss_weight) == (("sigmoid", "bco_pair"), 1.0)
    assert tuple(config.dpo.preference_loss_weights) == (0.8, 0.2)
    config, _ = translated(words.partition(" --loss_type")[0] + " --loss_type robust --label_smoothing 0.1", tmp_path)
    assert config.dpo.label_smoothing == 0.1
    config, _ = translated(words.partition(" --loss_type")[0] + " --loss_type ipo", tmp_path)
    assert config.dpo.preference_average_log_probs
    config, ported = translated(words.partition(" --loss_type")[0] + " --label_smoothing 0.1", tmp_path)
    assert config.dpo.label_smoothing == 0 and any("TRL ignores it" in line for line in ported.left)


PYTHON = """\
from trl import DPOConfig, DPOTrainer
data = load_dataset("d", split="train[:5]")
trainer = DPOTrainer(
    model="m", args=DPOConfig(output_dir="o", beta=0.3, learning_rate=rate(3)), train_dataset=data,
    peft_config=LoraConfig(r=4, target_modules=["q_proj"]),
)
"""


def test_python_file_of_trl(tmp_path):
    config, ported = translated(PYTHON, tmp_path, "train.py")
    assert (config.dpo.reference_policy_kl_penalty, str(config.model.path)) == (0.3, "m")
    assert (config.data.train, config.model.lora.rank) == ("d:train[:5]", 4)
    assert config.model.lora.target_modules == ("q_proj",)
    assert ported.todo[0].startswith("learning_rate: is rate(3) in line 4")


def test_yaml_of_trl_under_a_command(tmp_path):
    (tmp_path / "kto.yaml").write_text("model_name_or_path: m\ndataset_name: d\nbeta: 0.2\nlearning_rate: 1e-5\n")
    config, _ = translated("trl kto --config kto.yaml --beta 0.5", tmp_path)
    assert (config.kto.reference_policy_kl_penalty, config.optimizer.lr) == (0.5, 1e-5)
    alone, _ = translated((tmp_path / "kto.yaml").read_text(), tmp_path, "kto.yaml", algorithm="kto")
    assert alone.kto.reference_policy_kl_penalty == 0.2


@pytest.mark.long
@pytest.mark.parametrize("name", OURS)
def test_every_field_of_trl(name, tmp_path):
    """All fields with TRL's own defaults load here, each field is answered once, and the assumed defaults are TRL's."""
    import trl
    from trl.scripts.grpo import GRPOScriptArguments

    scripts = GRPOScriptArguments if name == "GRPOConfig" else trl.ScriptArguments
    values = {}
    for config in (getattr(trl, name), trl.ModelConfig, scripts):
        for item in dataclasses.fields(config):
            has_factory = item.default_factory is not dataclasses.MISSING
            values[item.name] = item.default_factory() if has_factory else item.default
    assumed = {**DEFAULTS[""], **DEFAULTS[OURS[name]]}
    of_other_trainers = {"ref_model_sync_steps", "ref_model_mixup_alpha", "max_length"}
    for key, value in assumed.items():
        assert values.get(key) == value or (key not in values and key in of_other_trainers), key
    values |= {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o"}
    foreign = Foreign("TRL", OURS[name], values, 1)
    ported = port(foreign, PROGRAMS[OURS[name]].config)
    assert not ported.refused and not [line for line in ported.todo if "does not know" in line]
    told = {re.sub("^TRL's default ", "", line).partition(":")[0] for line in (*ported.became, *ported.left)}
    assert not set(values) - told
    PROGRAMS[OURS[name]].config.model_validate(nested(ported.values))
    only = {key: values[key] for key in ("model_name_or_path", "dataset_name", "output_dir")}
    plain = port(Foreign("TRL", OURS[name], only, 1), PROGRAMS[OURS[name]].config)
    assert plain.values.items() <= ported.values.items()


def leaves(tree, prefix=""):
    if isinstance(tree, list):
        return [prefix + key for key in tree]
    parts = ((f"{prefix}{key}." if key else prefix, value) for key, value in tree.items())
    return [leaf for name, value in parts for leaf in leaves(value, name)]


@pytest.mark.parametrize(("program", "algorithm"), [("verl", "grpo"), ("verl", "ppo"), ("NeMo RL", "grpo")])
def test_every_key_of_other_programs_is_answered(program, algorithm):
    """Each key of a file that has all of them becomes something or has a reason."""
    keys = leaves(yaml.safe_load((ROOT / "tests" / "docs" / "other_keys.yaml").read_text())[program])
    values = dict.fromkeys(keys, "1")
    ported = port(Foreign(program, algorithm, values), PROGRAMS[algorithm].config)
    told = (*ported.became, *ported.left)
    assert not [line for line in ported.todo if "does not know" in line]
    answered = {re.match(r"(.*?): ", line)[1] for line in told}
    assert not set(keys) - answered


def test_rules_are_for_keys_of_the_table():
    """A rule for a key that no table has would never be used, except for earlier names of TRL's keys."""
    earlier = {"torch_dtype", "warmup_ratio", "max_prompt_length"}
    rows = [(program, keys) for program, _, keys, *_ in other_keys((ROOT / "docs" / "coming_from.md").read_text())]
    for program, rules in RULES_OF.items():
        patterns = [key for of, keys in rows if of == program for key in keys]
        for _, key in rules:
            assert any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns) or key in earlier, key


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "a: [1", "a.yaml: not valid YAML"),
        ("a.yaml", "model: {path: m}\noptimizer: {lr: 1}", "is no configuration of TRL (which has no section model)"),
        ("a.sh", "", "has no commands of TRL"),
        ("a.sh", "trl dpo --beta 1\ntrl sft\n", "has 2 commands of TRL"),
        ("a.sh", "trl dpo --run_name 'a", "is neither YAML nor a command (No closing quotation"),
        ("a.sh", "trl dpo --config nowhere.yaml", "--config nowhere.yaml: there is no such file"),
        ("a.sh", "trl dpo --learning_rate x --per_device_train_batch_size y", "per_device_train_batch_size: must be a"),
        ("a.sh", "trl dpo --loss_type ipo hinge --loss_weights 1", "loss_weights: must have one weight for each of 2"),
        ("a.py", "def", "is not Python (invalid syntax in line 1)"),
        ("a.py", "x = 1", "makes no configurations of TRL (DPOConfig"),
    ],
)
def test_wrong_files_are_refused_in_one_line(name, text, message, tmp_path):
    with pytest.raises(UserError) as error:
        translated(text, tmp_path, name)
    assert message in str(error.value) and "\n" not in str(error.value)
