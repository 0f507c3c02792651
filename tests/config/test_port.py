"""Configurations of TRL, verl and NeMo RL, translated: values, reasons, and that the result loads."""

import contextlib
import dataclasses
import fnmatch
import re
import shlex
from pathlib import Path

import make_defaults_of_verl
import pytest
import yaml
from make_config_reference import other_keys
from programs import ROOT

from mcore_rl.cli.port import port_command, ported_text
from mcore_rl.cli.train import PROGRAMS
from mcore_rl.config import build_config, load_config
from mcore_rl.config.base import DATASET_FORMATS
from mcore_rl.config.porting import shell
from mcore_rl.config.porting.defaults import TABLE, defaults_of_verl
from mcore_rl.config.porting.foreign import Foreign, as_in_ppo
from mcore_rl.config.porting.port import RULES_OF, nested, port
from mcore_rl.config.porting.read import read_foreign
from mcore_rl.config.porting.trl import DEFAULTS
from mcore_rl.errors import UserError
from mcore_rl.models.generation.vllm.placement import place_servers, planned_nodes

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
    assert config == documented("Qwen2-0.5B-DPO")
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
trainer: {total_epochs: 15, n_gpus_per_node: 8, save_freq: -1, default_local_dir: outputs/verl_grpo_example_gsm8k,
          logger: console}
"""


def test_file_of_verl_becomes_the_documented_command(tmp_path):
    """The values that differ from the documented command's are verl's own defaults, and are told as such."""
    config, ported = translated(VERL, tmp_path, "verl.yaml")
    chosen = ["environment.pattern", "parallel.tensor_model_parallel_size", "logging.wandb", "logging.run_name"]
    expected = documented("verl_grpo", without=chosen)
    told = {re.search(r"-> ([\w.]+): ", line)[1] for line in ported.became if line.startswith("verl's default ")}
    assert told == {
        "model.dtype", "environment.num_workers", "seed", "checkpoint.asynchronous", "loss.ratio_clip_c",
        "loss.kl_output_clamp",
        "optimizer.schedule", "optimizer.weight_decay", "grpo.max_new_tokens", "generation.offload",
    }  # fmt: skip
    same = ("environment", "logging", "seed", "model", "checkpoint", "generation", "loss", "grpo")
    assert dataclasses.replace(config.loss, kl_output_clamp=None) == expected.loss
    assert config.grpo.model_copy(update={"advantage_epsilon": expected.grpo.advantage_epsilon}) == expected.grpo
    dumped, wanted = (part.model_dump(exclude=set(same)) for part in (config, expected))
    assert dumped == wanted
    assert config.grpo.train_global_batch_size == 1280 and config.generation.vllm.num_servers == "auto"
    assert config.environment.function == "verl.utils.reward_score:default_compute_score" and not ported.differs
    assert any("needs verl in the run's environment" in line for line in ported.todo)
    words = "python3 -m verl.trainer.main_ppo "
    flat = {**read_foreign(tmp_path / "verl.yaml").values, "trainer.n_gpus_per_node": 8}
    command = words + " ".join(shlex.quote(f"{key}={yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}")
                               for key, value in flat.items())  # fmt: skip
    assert translated(command, tmp_path)[0] == config


def test_lists_of_files_of_verl_are_one_source(tmp_path):
    text = VERL.replace("gsm8k/train.parquet", "[a.parquet, b.parquet]").replace(
        "/test.parquet]", "/test.parquet, c.parquet]"
    )
    config, _ = translated(text, tmp_path, "verl.yaml")
    assert config.data.train == ("a.parquet", "b.parquet")
    assert config.data.validation == ("gsm8k/test.parquet", "c.parquet")


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
               colocated: {enabled: true}, stop_strings: null, max_len: "${eval:2 * 3}"}
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
    assert config.loss.kl_output_clamp == 10.0 and config.grpo.normalize_rewards  # NeMo RL's defaults
    assert config.grpo.advantage_epsilon == 1e-6
    unset = {"normalize_rewards": None, "advantage_epsilon": expected.grpo.advantage_epsilon}
    of_defaults = {"loss": expected.loss, "grpo": config.grpo.model_copy(update=unset)}
    assert config.model_copy(update=of_defaults) == expected
    assert any("min_lr" in line and "a constant rate has no minimum" in line for line in ported.left)
    assert any(line.startswith("policy.generation.max_len: ") for line in ported.todo) and not ported.differs
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
            {"generation.offload": True, "generation.vllm.tensor_parallel_size": 2,
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
        ("--model_revision abc", {"model.path": "m@abc"}),
    ],
)  # fmt: skip
def test_values_of_trl_are_converted(arguments, expected, tmp_path):
    config, ported = translated(GRPO + arguments, tmp_path)
    assert not ported.refused
    for name, value in expected.items():
        found = value_of(config, name)
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


@pytest.mark.parametrize(
    ("program", "algorithm"), [("verl", "grpo"), ("verl", "ppo"), ("verl", "sft"), ("NeMo RL", "grpo")]
)
def test_every_key_of_other_programs_is_answered(program, algorithm):
    """Each key of a file that has all of them becomes something or has a reason."""
    of_verl = {"sft": "sft_trainer_engine"}.get(algorithm, "ppo_megatron_trainer")
    if program == "verl":
        keys = [as_in_ppo(key, False) if algorithm == "sft" else key for key in defaults_of_verl(of_verl)]
    else:
        keys = leaves(yaml.safe_load((ROOT / "tests" / "docs" / "other_keys.yaml").read_text())[program])
    values = dict.fromkeys(keys, "1")
    ported = port(Foreign(program, algorithm, values), PROGRAMS[algorithm].config)
    told = (*ported.became, *ported.left, *ported.differs, *ported.todo)
    assert not [line for line in ported.todo if "does not know" in line]
    answered = {re.match(r"(.*?): ", line)[1] for line in told}
    assert not set(keys) - answered


def test_rules_are_for_keys_of_the_table():
    """A rule for a key that no table has would never be used, except for earlier names of TRL's keys."""
    earlier = {"torch_dtype", "warmup_ratio", "max_prompt_length", "rpo_alpha", "data_files"}
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
        ("a.sh", "trl dpo --run_name 'a", "unexpected EOF while looking for matching"),
        ("a.sh", "trl dpo --config nowhere.yaml", "nowhere.yaml: there is no such file here, beside"),
        ("a.sh", "python -m recipe.dapo.main_dapo a=1", "it starts recipe.dapo.main_dapo, which has no counterpart"),
        ("a.sh", "uv run examples/run_grpo.py policy.model_name=m", "has no --config"),
        ("a.sh", "while true; do :; done", "bash did not come to its end within"),
        ("a.sh", "python -m verl.trainer.main_ppo --config-name=mine", "mine.yaml: there is no such file"),
        ("a.sh", "trl dpo --learning_rate x --per_device_train_batch_size y", "per_device_train_batch_size: must be a"),
        ("a.sh", "trl dpo --loss_type ipo hinge --loss_weights 1", "loss_weights: must have one weight for each of 2"),
        ("a.py", "def", "is not Python (invalid syntax in line 1)"),
        ("a.py", "x = 1", "makes no configurations of TRL (DPOConfig"),
    ],
)
def test_wrong_files_are_refused_in_one_line(name, text, message, tmp_path, monkeypatch):
    monkeypatch.setattr(shell, "SECONDS", 1)
    with pytest.raises(UserError) as error:
        translated(text, tmp_path, name)
    assert message in str(error.value) and "\n" not in str(error.value)


MET = """\
set -xeuo pipefail
SCRIPT_DIR=$(cd -- "$(dirname "${BASH_SOURCE[0]}")" > /dev/null 2>&1 && pwd)
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
: "${NODES:=1}"
model=${MODEL:-${BASE:-Qwen}/Qwen3-8B}
max_prompt_length=$((1024 * 1)); max_response_length=$((max_prompt_length * 2))
longest=${LONGEST:-$(((max_prompt_length + max_response_length) * 2))}
offload=$([ -n "$UNSET" ] && echo true || echo false)
if [ "$NODES" -gt 1 ]; then lr=1e-5; else lr=3e-6; fi
case "$DEVICE" in gpu) coefficient=0.01;; npu) coefficient=0.5;; *) exit 1;; esac
DATA=(
    algorithm.adv_estimator=grpo
    data.train_files="['$HOME/a.parquet', '$HOME/b c.parquet']"
    data.train_batch_size=64   # a comment
    data.max_prompt_length=${max_prompt_length}
    data.max_response_length=${max_response_length}
)
DATA+=(actor_rollout_ref.model.path="$model")
ACTOR=(actor_rollout_ref.actor.optim.lr=$lr actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=$coefficient actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$longest
    actor_rollout_ref.actor.megatron.optimizer_offload=$offload)
EXTRA=(model_engine=megatron trainer.nnodes=$NODES
)
LAUNCH=(python3)
if [ "${USE_UV:-1}" != 0 ]; then
    uv sync --frozen
    LAUNCH=(uv run --frozen python3)
fi
read -r name <<< "an experiment"
launch() {
    "${LAUNCH[@]}" -m verl.trainer.main_ppo "${DATA[@]}" "${ACTOR[@]}" "${EXTRA[@]}" \\
        actor_rollout_ref.rollout.n=4 trainer.project_name='a
project' trainer.experiment_name="$name $(date +%F)" \\
        custom_reward_function.path="$SCRIPT_DIR/rewards.py" trainer.default_local_dir="$CKPT/x" "$@" 2>&1 | tee log.txt
}
set -- trainer.logger=console trainer.total_epochs=2
launch "$@" > out.log &
wait
"""


def test_shell_script_is_read_as_bash_reads_it(tmp_path, monkeypatch):
    """The script starts no program and writes no file; values that depend on them are reported."""
    monkeypatch.chdir(tmp_path)
    config, ported = translated(MET, tmp_path, "run.sh")
    home = str(Path.home())
    assert list(config.data.train) == [f"{home}/a.parquet", f"{home}/b c.parquet"]
    assert (str(config.model.path), config.optimizer.lr) == ("Qwen/Qwen3-8B", 3e-6)
    assert (config.data.max_sequence_length, config.grpo.max_new_tokens) == (3072, 2048)
    assert (config.batch.tokens_per_pack, config.loss.reference_policy_kl_penalty) == (6144, 0.01)
    assert (config.grpo.num_generations_per_prompt, config.trainer.max_epochs) == (4, 2)
    assert not config.optimizer.offload and config.environment.function == "rewards:compute_score"
    todo = "\n".join(ported.todo)
    assert "python3 -c 'import torch_npu': was not run; taken as failed" in todo
    assert "trainer.experiment_name: is an experiment <output_of_date>" in todo
    assert "trainer.default_local_dir: is ${CKPT}/x" in todo and "put the directory of" in todo
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours.yaml", "run.sh"]


@pytest.mark.parametrize(
    "text",
    [
        "touch a; /bin/touch b; $(echo touch) c; > d; echo x > e; exec > f; : >> g; cat <<< x > h",
        "PATH=/bin:/usr/bin; export PATH; touch a; command touch b; command -p touch c; builtin eval 'touch d'",
        "source /etc/profile; . /etc/profile; enable touch; hash -p /bin/touch t; t a; set +r; bash -c 'touch c'",
        "eval 'echo x > a'; f() { echo x > b; }; f; trap 'echo x > c' EXIT; coproc { echo x > d; }; echo x | tee e",
        "cd /tmp; pwd > a; ulimit -c 1; umask 0; unset -f cd; unset -f command_not_found_handle; cd /; touch b",
        "eval 'mapfile -t A < /etc/passwd'; builtin eval 'x=$(< /etc/passwd)'; NOTES=x; COMMAND=\"trl dpo\"; mkdir o",
        "kill -9 $$; kill -9 $PPID; kill -9 -1; read x < /dev/tcp/127.0.0.1/9; exec 5<>/dev/tcp/127.0.0.1/9",
    ],
)
def test_shell_script_cannot_act(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(f"{text}\ntrl dpo --beta 0.2\n")
    found = read_foreign(tmp_path / "run.sh")
    assert (found.algorithm, found.values) == ("dpo", {"beta": 0.2})
    assert [path.name for path in tmp_path.iterdir()] == ["run.sh"]


def test_outputs_and_arguments_that_are_unknown(tmp_path):
    """Also where a function calls the program; and a comment ends a command, as in a file of verl's own."""
    (tmp_path / "run.sh").write_text(
        "now() { date +%F; }\nname=run_$(now)\nif [ $# -lt 2 ]; then echo usage; exit 1; fi\nlr=$1; out=$2; shift 2\n"
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.experiment_name=$name \\\n"
        'actor_rollout_ref.actor.optim.lr=$lr trainer.default_local_dir="$out/$(cat < name)" "$@" \\\n'
        "    # a note\n    actor_rollout_ref.rollout.n=4 \\\n    data.train_batch_size=3\n"
    )
    with pytest.raises(UserError, match="the file reads arguments: give them behind its name"):
        read_foreign(tmp_path / "run.sh")
    found = read_foreign(tmp_path / "run.sh", shell.Script(("1e-5", "o", "data.max_prompt_length=7")))
    assert found.values == {
        "algorithm.adv_estimator": "grpo", "actor_rollout_ref.actor.optim.lr": 1e-5, "data.max_prompt_length": 7,
    }  # fmt: skip
    unread = "\n".join(found.unread)
    assert "trainer.experiment_name: is run_<output_of_date>" in unread
    assert "trainer.default_local_dir: is o/<output_of_cat>" in unread
    assert "actor_rollout_ref.rollout.n=4 data.train_batch_size=3: bash reads this as a command of its own" in unread


@pytest.mark.parametrize(
    ("text", "values", "told"),
    [
        ("[[ $DEBUG ]] && E=9; [ \"$A\" != '' ] && F=9\ntrl dpo --beta ${E:-2} --seed ${F:-1}", {"beta": 2, "seed": 1},
         ["A is not set by the file: branches depend on it", "DEBUG is not set by the file"]),
        ("trl dpo --beta $((UNSET)) --seed 3", {"seed": 3}, ["beta: is ${UNSET}"]),
        ("N=$(nproc)\ntrl dpo --beta $((N/2)) --seed 3", {"seed": 3}, ["beta: is ${N}"]),
        ("source ./env.sh; . x\ntrl dpo --beta ${B:-1}", {"beta": 1}, ["source ./env.sh: the file was not read"]),
        ("read -r R < run.txt; mapfile -t L < f\ntrl dpo --seed 3", {"seed": 3}, ["< run.txt: the file was not read"]),
        ("dev=$(python3 -c 'print(1)'); S=3\nif [ \"$dev\" == npu ]; then S=4; fi\ntrl dpo --seed $S", {"seed": 3},
         ["python3 -c 'print(1)': was not run; branches depend on its output"]),
        ("H=$(command -v nvidia-smi >/dev/null && echo 4 || echo 3)\ntrl dpo --seed $H", {"seed": 3},
         ["command -v nvidia-smi: no program was found"]),
        ("trl dpo --seed 3 \\\n  # --max_length 5 \\\n  --beta 0.3", {"seed": 3}, ["--beta 0.3: bash reads this as a"]),
        ("while ! nc -z localhost 1; do sleep 1; done\nwhile true; do if ray x; then break; fi; sleep $T; done\n"
         "trl dpo --seed 3", {"seed": 3}, ["ray x: was not run"]),
        ('eval "$(conda shell.bash hook)"\ntrl dpo --seed 3', {"seed": 3}, ["conda shell.bash hook", "was not read"]),
        ("COMMAND='trl dpo --seed 3'\nmkdir -p x\n$COMMAND", {"seed": 3}, []),
        ("if ! trl dpo --seed 3; then exit 1; fi", {"seed": 3}, []),
        ("trl dpo --run_name $(basename /x/y.sh .sh)_no --dataset_name no",
         {"run_name": "y_no", "dataset_name": "no"}, []),
    ],
)  # fmt: skip
def test_what_a_script_does_not_say_is_told(text, values, told, tmp_path):
    (tmp_path / "run.sh").write_text(text)
    found = read_foreign(tmp_path / "run.sh")
    assert found.values == values
    for line in told:
        assert line in "\n".join(found.unread), found.unread


def test_arithmetic_that_bash_alone_tells_from_commands(tmp_path):
    text = (
        'a=${A:-4}; b=$a\necho ${Q:-$((a*2))} "${Q:-$((a + $b))}" ${Q:-$(( (a > 2 ? 1 : 0) + ${b} ))} '
        "$((${A:-2} + 1)) ${Q:-$((unknown + 1))} ${Q:-$((echo one); (echo two))} ${Q:-$((uname))}"
    )
    (commands,) = shell.expand(text.replace("echo $", "run $", 1), tmp_path / "run.sh").commands
    assert commands == ["run", "8", "8", "5", "3", "${unknown}", "one", "two", "${uname}"]


def test_variables_of_a_script_can_be_given(tmp_path, capsys):
    (tmp_path / "run.sh").write_text("trl dpo --model_name_or_path ${M:?set M} --dataset_name d --learning_rate $LR")
    with pytest.raises(UserError, match="M: set M; give variables of the script by --env NAME=VALUE"):
        read_foreign(tmp_path / "run.sh")
    with pytest.raises(SystemExit) as stop:
        port_command([str(tmp_path / "run.sh"), "--env", "M=m", "--env", "LR=2e-6"], "port")
    assert stop.value.code == 0 and "lr: 2.0e-06" in capsys.readouterr().out


def test_processes_of_several_machines(tmp_path):
    start = "torchrun --nproc_per_node=8 --nnodes 2 -m "
    for text, processes in {
        f"{start}trl.scripts.dpo --model_name_or_path m --dataset_name d": 16,
        f"{start}verl.trainer.sft_trainer model.path=m data.train_files=a": 16,
        "accelerate launch --num_processes 16 -m trl.scripts.dpo --model_name_or_path m": 16,
    }.items():
        (tmp_path / "run.sh").write_text(text)
        assert read_foreign(tmp_path / "run.sh").processes == processes, text


def test_commands_in_words_of_others(tmp_path):
    """A launcher of a cluster gets the command as one word, or in a variable (NeMo RL)."""
    (tmp_path / "dpo.yaml").write_text("dpo: {reference_policy_kl_penalty: 0.2}\npolicy: {model_name: m}\n")
    for text in (
        "srun --nodes=1 bash -c 'cd /x && uv run run_dpo.py --config dpo.yaml dpo.seed=7'",
        'COMMAND="uv run ./examples/run_dpo.py --config dpo.yaml dpo.seed=7" sbatch --nodes=1 ray.sub',
        "ray job submit --address=http://x -- python run_dpo.py --config=dpo.yaml ++dpo.seed=7",
    ):
        (tmp_path / "run.sh").write_text(text)
        found = read_foreign(tmp_path / "run.sh")
        assert (found.algorithm, found.values["dpo.seed"]) == ("dpo", 7), text


def test_algorithm_is_never_a_guess(tmp_path):
    """If a part of verl's command is unread and no estimator is named, the algorithm is asked for."""
    start = "python3 -m verl.trainer.main_ppo data.train_files=a.parquet"
    for text, algorithm in {
        start: "ppo",
        f"{start} $OPTIONS": "",
        f"{start} $(cat options)": "",
        f"{start} odd": "",
        f"{start} odd algorithm.adv_estimator=rloo": "grpo",
        f"{start} algorithm.adv_estimator=$E": "",
    }.items():
        (tmp_path / "run.sh").write_text(text)
        found = read_foreign(tmp_path / "run.sh")
        assert found.algorithm == algorithm, text
        assert bool(found.unread) == (text != start)


def test_files_of_hydra(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "base.yaml").write_text(
        "algorithm: {adv_estimator: rloo}\ndata: {max_response_length: 100}\n"
    )
    (tmp_path / "config" / "mine.yaml").write_text(
        "hydra: {searchpath: [x]}\ndefaults: [ppo_trainer, base, _self_, {actor: other}]\n"
        "data: {max_prompt_length: 50}\n"
        "actor_rollout_ref: {rollout: {n: 3, response_length: '${data.max_response_length}'}, model: {path: m}}\n"
    )
    start = "python3 -m verl.trainer.main_ppo trainer.logger=console "
    text = f"{start} --config-path=config --config-name='mine' data.train_files=a.parquet data.max_prompt_length=60"
    config, ported = translated(text, tmp_path, "run.sh")
    assert (config.data.max_sequence_length, config.grpo.advantage_estimator) == (160, "rloo")
    assert any("the values of actor: other are not read" in line for line in ported.todo)
    mine = (tmp_path / "config" / "mine.yaml").read_text()
    (tmp_path / "config" / "mine.yaml").write_text(
        mine.replace("base, _self_", "_self_, base").replace("{max_prompt", "{max_response_length: 7, max_prompt")
    )
    assert translated(text, tmp_path, "run.sh")[0].data.max_sequence_length == 160
    own, _ = translated(f"{start} --config-name=ppo_megatron_trainer data.train_files=a.parquet "
                        "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=2 actor_rollout_ref.model.path=m "
                        "'data={max_prompt_length:10,max_response_length: 20}'", tmp_path, "run.sh")  # fmt: skip
    assert own.data.max_sequence_length == 30


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {"trainer.max_epochs": 30, "grpo.num_prompts_per_step": 1024, "grpo.train_global_batch_size": 1280,
              "loss.reference_policy_kl_penalty": 0, "loss.ratio_clip_c": 3.0}),
        ("actor_rollout_ref.actor.use_kl_loss=True",
         {"loss.reference_policy_kl_penalty": 0.001, "loss.kl_estimator": "k3", "loss.use_kl_in_reward": False}),
        ("algorithm.use_kl_in_reward=True algorithm.adv_estimator=reinforce_plus_plus",
         {"loss.reference_policy_kl_penalty": 0.001, "loss.kl_estimator": "k1", "loss.use_kl_in_reward": True,
          "loss.kl_output_clamp": None}),
        ("data.train_batch_size=24 actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ppo_epochs=2 "
         "actor_rollout_ref.actor.optim.lr_warmup_steps=7", {"optimizer.warmup_steps": 42}),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=dppo_kl", {"loss.name": "dppo_kl", "loss.ratio_clip_c": 3.0}),
        ("actor_rollout_ref.rollout.response_length=100 actor_rollout_ref.rollout.val_kwargs.n=1",
         {"grpo.max_new_tokens": 100, "data.max_sequence_length": 612}),
        ("actor_rollout_ref.actor.optim.override_optimizer_config.eps=1e-6", {"optimizer.adam_eps": 1e-6}),
        (" ".join(
            f"+actor_rollout_ref.actor.megatron.override_transformer_config.{word}"
            for word in ("moe_z_loss_coeff=0.001", "moe_aux_loss_coeff=0.01", "num_layers_in_first_pipeline_stage=3")
         ) + " actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
         {"model.moe_z_loss_coeff": 0.001, "model.moe_aux_loss_coeff": 0.01,
          "parallel.num_layers_in_first_pipeline_stage": 3}),
        ("actor_rollout_ref.actor.clip_ratio=0.3", {"loss.ratio_clip_min": 0.2, "loss.ratio_clip_max": 0.2}),
        ("actor_rollout_ref.rollout.name=sglang", {"generation.backend": "vllm", "generation.offload": True}),
        ("actor_rollout_ref.actor.fsdp_config.model_dtype=fp32", {"model.dtype": "bfloat16"}),
        ("--config-path=config --config-name=ppo_megatron_trainer.yaml model=hf_model", {"trainer.max_epochs": 30}),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=cispo", {"loss.clip_type": "cispo", "loss.ratio_clip_c": None}),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean actor_rollout_ref.actor.clip_ratio_low=0.3",
         {"loss.name": "gmpo", "loss.log_ratio_clip_min": 0.3, "loss.log_ratio_clip_max": 0.2}),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=sapo",
         {"loss.name": "sapo", "loss.aggregation": "seq_mean_token_mean"}),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
         {"loss.sequence_level_importance_ratios": True, "loss.token_level_loss": False, "loss.ratio_clip_c": None}),
        ("actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=low_var_kl",
         {"loss.kl_output_clamp": 10.0, "grpo.advantage_epsilon": 1e-6}),
        ("reward_model.enable=True reward_model.model_path=/rm reward_model.inference.tensor_model_parallel_size=4",
         {"environment.parallel.tensor_model_parallel_size": 4}),
        ("actor_rollout_ref.model.lora_rank=0 actor_rollout_ref.model.exclude_modules=x", {"model.lora": None}),
        ("reward.reward_kwargs.overlong_buffer_cfg.enable=True reward.reward_kwargs.overlong_buffer_cfg.len=128 "
         "reward.reward_kwargs.max_resp_len=512", {"grpo.overlong_cache_length": 128}),
        ("reward_model.enable=True reward_model.model_path=/rm",
         {"environment.name": "reward_model", "environment.path": Path("/rm")}),
        ("custom_reward_function.path=/x/own.py custom_reward_function.name=score",
         {"environment.name": "verl", "environment.function": "own:score"}),
    ],
)  # fmt: skip
def test_defaults_of_verl_hold(arguments, expected, tmp_path):
    start = (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=t.parquet "
        "trainer.logger=console actor_rollout_ref.model.path=m actor_rollout_ref.rollout.n=5 "
    )
    config, ported = translated(start + arguments, tmp_path, "run.sh")
    assert not ported.refused and not ported.differs
    for name, value in expected.items():
        assert value_of(config, name) == value, name


def value_of(config, name):
    for part in name.split("."):
        config = getattr(config, part)
    return config


def test_sft_of_verl(tmp_path):
    text = (
        "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer data.train_files=t.parquet model.path=m optim.lr=1e-5 "
        "engine=megatron optim=megatron engine.tensor_model_parallel_size=2 data.max_length=2048 "
        "trainer.logger=console trainer.total_epochs=2 data.messages_key=turns model.lora.rank=8 data.truncation=right"
    )
    config, ported = translated(text, tmp_path, "run.sh")
    assert (config.optimizer.lr, config.batch.global_batch_size, config.trainer.max_epochs) == (1e-5, 256, 2)
    assert (config.parallel.tensor_model_parallel_size, config.data.max_sequence_length) == (2, 2048)
    assert (config.data.columns, config.model.lora.rank, config.seed) == ({"messages": "turns"}, 8, 1)
    assert config.data.overlong == "truncate" and not ported.differs
    assert any(line.startswith("optim.lr: ") for line in ported.became)
    config, ported = translated(
        f"{text} optim.lr_decay_style=cosine optim.min_lr=1e-6 data.val_files=v.parquet "
        "trainer.test_freq=after_each_epoch",
        tmp_path,
        "run.sh",
    )
    assert (config.optimizer.schedule, config.optimizer.min_lr, config.trainer.validation_interval) == (
        "cosine",
        1e-6,
        None,
    )
    assert any(line.startswith("trainer.test_freq: after_each_epoch: an interval counts steps") for line in ported.todo)
    config, _ = translated(text.replace(" optim.lr=1e-5", ""), tmp_path, "run.sh")
    assert config.optimizer.lr == 1e-3  # verl's default with Megatron


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("loss_fn: {use_cispo: true, ratio_clip_max: 4.0}", {"loss.clip_type": "cispo", "loss.ratio_clip_max": 4.0}),
        ("policy: {max_total_sequence_length: 64, generation: {max_new_tokens: '${policy.max_total_sequence_length}'}}",
         {"grpo.max_new_tokens": None, "data.max_sequence_length": 64}),
        ("policy: {megatron_cfg: {enabled: true, peft: {enabled: true, dim: 4, alpha: 8, target_modules: "
         "[linear_qkv, linear_fc1]}}}",
         {"model.lora.rank": 4, "model.lora.target_modules": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")}),
        ("grpo: {use_dynamic_sampling: true, dynamic_sampling_max_gen_batches: 3, adv_estimator: "
         "{name: reinforce_plus_plus}}",
         {"grpo.dynamic_sampling_rounds": 3, "grpo.advantage_estimator": "reinforce_plus_plus",
          "grpo.minus_baseline": True}),
        ("grpo: {reward_shaping: {enabled: true, overlong_buffer_length: 32, max_response_length: 128}}\n"
         "policy: {max_total_sequence_length: 128, generation: {max_new_tokens: 128}}",
         {"grpo.overlong_cache_length": 32, "grpo.max_new_tokens": None}),
        ("env: {math: {num_workers: 3}}", {"environment.name": "math", "environment.num_workers": 3}),
        ("policy: {sequence_packing: {enabled: true, train_mb_tokens: '${mul:512, ${policy.train_micro_batch_size}}'}, "
         "train_micro_batch_size: 4}", {"batch.tokens_per_pack": 2048}),
        ("policy: {optimizer: {name: torch.optim.AdamW}, scheduler: [{name: torch.optim.lr_scheduler.LinearLR, kwargs: "
         "{total_iters: 50}}, {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0}}, {milestones: [50]}]}",
         {"optimizer.schedule": "constant", "optimizer.warmup_steps": 50}),
        ("", {"grpo.use_leave_one_out_baseline": True, "loss.reference_policy_kl_penalty": 0.01,
              "optimizer.schedule": "constant"}),
        ("grpo: {max_num_steps: 100}\n"
         "policy: {scheduler: {name: torch.optim.lr_scheduler.CosineAnnealingLR, kwargs: {T_max: 100, eta_min: 1e-7}}}",
         {"optimizer.schedule": "cosine", "optimizer.min_lr": 1e-7}),
        ("data: {train: {processor: p, repeat: 3, dataset_name: other.jsonl}, validation: {repeat: 2}}",
         {"data.train": "other.jsonl", "data.validation": None}),
        ("data: {_override_: true, train: {data_path: a.jsonl}, "
         "default: {dataset_name: ResponseDataset, input_key: q}}",
         {"data.train": "a.jsonl", "data.columns": {"prompt": "q", "answer": "output"}}),
        ("grpo: {num_prompts_per_step: 64}\n"
         "policy: {train_global_batch_size: 64, optimizer: {name: torch.optim.AdamW}, scheduler: ["
         "{name: torch.optim.lr_scheduler.LinearLR, kwargs: {total_iters: 5}}, "
         "{name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0}}, {milestones: [5]}]}",
         {"optimizer.warmup_steps": 20, "optimizer.weight_decay": 0.01, "grpo.advantage_epsilon": 1e-6}),
        ("policy: {train_global_batch_size: 8, megatron_cfg: {enabled: true, scheduler: {lr_warmup_iters: 5}}}",
         {"optimizer.warmup_steps": 20}),
        ("policy: {megatron_cfg: {enabled: true, moe_router_load_balancing_type: aux_loss, "
         "expert_tensor_parallel_size: 1, tensor_model_parallel_size: 2}}", {"parallel.tensor_model_parallel_size": 2}),
    ],
)  # fmt: skip
def test_values_of_nemo_rl_are_converted(text, expected, tmp_path):
    pytest.importorskip("math_verify")
    (tmp_path / "base.yaml").write_text(
        "grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 4}\nloss_fn: {}\n"
        "policy: {model_name: m}\ndata: {train: {dataset_name: t.jsonl}}\n"
    )
    config, ported = translated(f"defaults: base.yaml\n{text}", tmp_path, "mine.yaml", algorithm="grpo")
    assert not ported.differs and not ported.refused
    for name, value in expected.items():
        assert value_of(config, name) == value, name


@pytest.mark.parametrize(
    ("program", "text", "told"),
    [
        ("NeMo RL", "grpo: {reward_scaling: {enabled: true}}", "grpo.reward_scaling.enabled: true: rewards are not"),
        ("NeMo RL", "env: {code: {num_workers: 1}}", "env.code.num_workers: 1: write this environment"),
        ("NeMo RL", "env: {math: {math_verify_impl: dapo_math_verify}}", "env.math.math_verify_impl: dapo_math_verify"),
        ("NeMo RL", "data: {train: {dataset_name: OpenMathInstruct-2}}", "is NeMo RL's name of a dataset"),
        ("NeMo RL", "grpo: {adv_estimator: {name: opd}}", "grpo.adv_estimator.name: opd: opd does not exist here"),
        ("NeMo RL", "cluster: {num_nodes: 2, gpus_per_node: 8}\npolicy: {generation: {backend: vllm, vllm_cfg: "
         "{tensor_parallel_size: 16}}}", "a server's 16 GPUs must be on one node, and a node has 8"),
        ("NeMo RL", "policy: {megatron_cfg: {enabled: true, expert_model_parallel_size: 2, freeze_moe_router: true}}",
         "policy.megatron_cfg.freeze_moe_router: true: routers are trained"),
        ("NeMo RL", "policy: {optimizer: {name: torch.optim.AdamW, kwargs: {amsgrad: true}}}", "amsgrad: true: the"),
        ("NeMo RL", "policy: {optimizer: {name: torch.optim.Adam, kwargs: {weight_decay: 0.1}}}", "decay is AdamW's"),
        *[
            ("NeMo RL", "grpo: {max_num_steps: 9}\npolicy: {scheduler: [{name: torch.optim.lr_scheduler.LinearLR, "
             f"kwargs: {{total_iters: 5{end}}}}}, {{name: torch.optim.lr_scheduler.CosineAnnealingLR, "
             f"kwargs: {{T_max: {steps}}}}}, {{milestones: [{at}]}}]}}", said)
            for end, steps, at, said in [
                (", end_factor: 0.5", 9, 5, "a warmup rises to the whole rate"),
                ("", 9, 4, "a warmup rises to the whole rate"),
                ("", 99, 5, "the rate decays over the run"),
            ]
        ],
        ("NeMo RL", "data: {train: {subset: main}}", "data.train.subset: main: a dataset on the hub has no subset"),
        ("NeMo RL", "policy: {megatron_cfg: {enabled: true, scheduler: {lr_decay_style: cosine, lr_decay_iters: 9}}}",
         "policy.megatron_cfg.scheduler.lr_decay_iters: 9: the rate decays over the run"),
        ("NeMo RL", "policy: {hf_config_overrides: {rope_theta: 1}}", "hf_config_overrides.rope_theta: 1: write"),
        ("verl", "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {model: {override_config: {x: 1}}}",
         "actor_rollout_ref.model.override_config.x: 1: write the values into config.json"),
        ("verl", "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {actor: {policy_loss: {loss_mode: gspo}}}",
         "actor_rollout_ref.actor.loss_agg_mode: token-mean: with ratios of sequences"),
        ("verl", "algorithm: {adv_estimator: grpo, use_kl_in_reward: true}\nactor_rollout_ref: "
         "{actor: {use_kl_loss: true}}", "algorithm.use_kl_in_reward: true: there is one KL term"),
        ("verl", "algorithm: {adv_estimator: reinforce_plus_plus, gamma: 0.9}", "algorithm.gamma: 0.9: rewards"),
        ("verl", "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {actor: {optim: {lr_scheduler_type: cosine, "
         "num_cycles: 1.5}}}", "actor_rollout_ref.actor.optim.num_cycles: 1.5: a cosine has half a period"),
        ("verl", "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {actor: {optim: {override_optimizer_config: "
         "{decoupled_weight_decay: false}}}}", "decoupled_weight_decay: false: weight decay is AdamW's"),
        ("verl", "algorithm: {adv_estimator: remax}", "algorithm.adv_estimator: remax: remax does not exist here"),
        ("verl", "algorithm: {adv_estimator: grpo, kl_ctrl: {type: adaptive}}", "algorithm.kl_ctrl.type: adaptive"),
        ("verl", "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {actor: {policy_loss: {loss_mode: clip_cov}}}",
         "actor_rollout_ref.actor.policy_loss.loss_mode: clip_cov: clip_cov does not exist"),
        ("verl", "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {rollout: {multi_turn: {enable: true}}}",
         "actor_rollout_ref.rollout.multi_turn.enable: true: set environment.max_turns"),
        ("verl", "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {rollout: {n: 1}}",
         "actor_rollout_ref.rollout.n: 1 -> grpo.num_generations_per_prompt: 1, which is refused here"),
    ],
)  # fmt: skip
def test_what_would_train_differently_comes_first(program, text, told, tmp_path, capsys):
    """Such values come first in the file and on the standard error, and the exit status is 1."""
    base = {
        "NeMo RL": "grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 4}\npolicy: {model_name: m}\n"
        "data: {train: {dataset_name: t.jsonl}}\n",
        "verl": "actor_rollout_ref: {model: {path: m}, rollout: {n: 4}}\ndata: {train_files: a.parquet}\n"
        "trainer: {logger: console}\n",
    }[program]
    (tmp_path / "base.yaml").write_text(base)
    (tmp_path / "mine.yaml").write_text(
        f"defaults: {'base.yaml' if program == 'NeMo RL' else '[ppo_trainer, base]'}\n{text}"
    )
    with pytest.raises(SystemExit) as stop:
        port_command([str(tmp_path / "mine.yaml"), "--algorithm", "grpo"], "port")
    out, err = capsys.readouterr()
    first = out.splitlines()[3]
    assert out.splitlines()[2].startswith("# Without a counterpart") and told in first, out
    assert err.startswith("differs: ") and told in err.splitlines()[0]
    assert stop.value.code == 1


PYTHON_GRPO = """\
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward
MODEL, EACH = "unread", 4
NAME: str = "Qwen/Qwen3-8B"
STEPS = 2
def short(completions, **others):
    return [float(len(text) < 9) for text in completions]
data = load_dataset("json", data_files={"train": "data/a.jsonl", "test": "data/b.jsonl"}, split="train")
args = GRPOConfig(output_dir=f"out/{NAME}", learning_rate=STEPS * 1e-6, per_device_train_batch_size=8 // STEPS,
                  num_generations=STEPS**2, reward_weights=[1.0, 0.5], **more)
GRPOTrainer(NAME, reward_funcs=[think_format_reward, short], args=args, train_dataset=data)
"""


def test_constants_functions_and_files_of_a_python_file(tmp_path):
    config, ported = translated(PYTHON_GRPO, tmp_path, "mine.py")
    assert (str(config.model.path), config.output_dir.as_posix()) == ("Qwen/Qwen3-8B", "out/Qwen/Qwen3-8B")
    assert (config.optimizer.lr, config.grpo.num_prompts_per_step, config.data.train) == (2e-6, 1, "data/a.jsonl")
    judges = config.environment.rewards
    assert {name: (judge.name, judge.function, judge.weight) for name, judge in judges.items()} == {
        "think_format_reward": ("trl", "trl.rewards:think_format_reward", 1.0), "short": ("trl", "mine:short", 0.5),
    }  # fmt: skip
    assert any(line.startswith("**more in line 10 is not read") for line in ported.todo)


def test_lora_of_a_python_file_has_the_defaults_of_peft(tmp_path):
    peft = pytest.importorskip("peft")
    (tmp_path / "a.py").write_text(
        "a = DPOConfig()\nif x:\n    p = LoraConfig(task_type='CAUSAL_LM', bias='all')\nDPOTrainer('m', args=a, "
        "peft_config=p, ref_model=r, data_collator=None, eval_dataset=e, train_dataset=t)"
    )
    foreign = read_foreign(tmp_path / "a.py")
    ported = port(foreign, PROGRAMS["dpo"].config)
    plain = peft.LoraConfig(task_type="CAUSAL_LM")
    lora = {name: ported.values[f"model.lora.{name}"] for name in ("rank", "alpha")}
    assert lora == {"rank": plain.r, "alpha": plain.lora_alpha}
    assert ported.values.get("model.lora.dropout", 0.0) == plain.lora_dropout
    told = [line.partition(":")[0].partition(" of ")[0] for line in foreign.unread]
    assert sorted(told) == ["bias", "eval_dataset", "line 3", "ref_model"]


def test_second_data_set_of_a_python_file_is_not_trained_on(tmp_path):
    text = PYTHON_GRPO.replace("data = load", "other = load_dataset('org/b', split='test')\ndata = load")
    config, ported = translated(text + "args.learning_rate = 3e-5\n", tmp_path, "mine.py")
    assert config.data.train == "data/a.jsonl"
    assert any("load_dataset('org/b', split='test'): set data.train or" in line for line in ported.todo)
    assert any(line.startswith("learning_rate: is set in line 14") for line in ported.todo)
    (tmp_path / "two.py").write_text(text.replace("train_dataset=data", "train_dataset=pick(other, data)"))
    assert "data.train" not in port(read_foreign(tmp_path / "two.py"), PROGRAMS["grpo"].config).values
    shadowed = "lr = 1e-6\nN = 9**9**9\ndef f(lr):\n    return DPOConfig(learning_rate=lr, seed=N)\n"
    (tmp_path / "shadowed.py").write_text(shadowed)
    found = read_foreign(tmp_path / "shadowed.py")
    assert found.values == {} and len(found.unread) == 2


@pytest.mark.parametrize("prompts", [4, 8])
@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
def test_distillation_of_nemo_rl(prompts, backend, tmp_path):
    sizes = {"megatron": "tensor_model_parallel_size: 4", "dtensor": "tensor_parallel_size: 4"}[backend]
    text = (
        f"distillation: {{num_prompts_per_step: {prompts}, num_generations_per_prompt: 2, max_num_steps: 9}}\n"
        "policy: {model_name: m, train_global_batch_size: 8, megatron_cfg: {enabled: true}}\nloss_fn: {}\n"
        f"teacher: {{model_name: t, megatron_cfg: {{enabled: {str(backend == 'megatron').lower()}, "
        f"pipeline_model_parallel_size: 1}}, {backend}_cfg: {{{sizes}, context_parallel_size: 2}}}}\n"
        "data: {train: {dataset_name: t.jsonl}}\n"
    ).replace(", pipeline_model_parallel_size: 1}, megatron_cfg: {", ", ")
    config, ported = translated(text, tmp_path, "mine.yaml")
    teacher = config.distillation.teacher_parallel
    assert (teacher.tensor_model_parallel_size, teacher.context_parallel_size) == (4, 2)
    assert (config.batch.global_batch_size, config.trainer.max_steps) == (2 * prompts, 9)
    assert [line.partition(":")[0] for line in ported.differs] == ["policy.train_global_batch_size"] * (prompts == 8)


def test_distillation(tmp_path):
    text = (
        "python3 -m verl.trainer.main_ppo data.train_files=a.parquet actor_rollout_ref.model.path=m "
        "trainer.logger=console actor_rollout_ref.rollout.n=2 data.train_batch_size=8 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=8 "
        "distillation.enabled=True distillation.distillation_loss.use_task_rewards=False "
        "distillation.teacher_models.teacher_model.model_path=t distillation.distillation_loss."
    )
    config, ported = translated(f"{text}loss_mode=forward_kl_topk {text.split()[-1]}topk=9", tmp_path, "run.sh")
    assert (config.distillation.teacher, config.distillation.kl_type, config.distillation.topk) == ("t", "forward", 9)
    assert (config.batch.global_batch_size, config.distillation.on_policy) == (16, True) and not ported.differs
    config, _ = translated(f"{text}loss_mode=k1 {text.split()[-1]}use_policy_gradient=True", tmp_path, "run.sh")
    assert config.distillation.form == "sampled"
    (tmp_path / "run.sh").write_text(f"{text}loss_mode=k3")
    assert "k3 does not exist here" in port(read_foreign(tmp_path / "run.sh"), PROGRAMS["distill"].config).differs[0]
    config, ported = translated(
        "distillation: {num_prompts_per_step: 8, topk_logits_k: 5}\nloss_fn: {kl_type: mixed, mixed_kl_weight: 0.25}\n"
        "policy: {model_name: m, train_global_batch_size: 8, generation: {temperature: 0.7, max_new_tokens: 9}}\n"
        "teacher: {model_name: t, precision: bfloat16}\ndata: {train: {dataset_name: a.jsonl}}\n",
        tmp_path,
        "nemo.yaml",
    )
    found = config.distillation
    assert (found.teacher, found.topk, found.kl_type, found.mixed_kl_weight) == ("t", 5, "mixed", 0.25)
    assert (found.temperature, found.max_new_tokens, found.on_policy) == (0.7, 9, True) and not ported.differs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("actor_rollout_ref: {rollout: {tensor_model_parallel_size: 0, name: vllm}}\n", "must be at least 1, got 0"),
        ("policy: {scheduler: [3]}\ngrpo: {seed: 1}", "policy.scheduler: [3] is no value that NeMo RL has"),
        ("actor_rollout_ref: {a: 1}\ntrainer: {logger: 3, nnodes: 0}", "is no value that verl has ('int' object"),
        ("defaults: null\npolicy: {}", "values of None are not read"),
        ("1: 2\nbeta: 3", "1: 2: mcore_rl does not know this key of TRL"),
    ],
)
def test_odd_values_get_no_traceback(text, message, tmp_path):
    (tmp_path / "mine.yaml").write_text(text)
    with contextlib.suppress(UserError):
        foreign = read_foreign(tmp_path / "mine.yaml")
        ported = port(foreign, PROGRAMS["grpo"].config)
        assert message in "\n".join([*ported.todo, *ported.left])
        return
    with pytest.raises(UserError, match=re.escape(message)):
        port(read_foreign(tmp_path / "mine.yaml"), PROGRAMS["grpo"].config)


def test_names_of_formats_are_those_of_the_library():
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    assert set(_PACKAGED_DATASETS_MODULES) <= DATASET_FORMATS


def test_formats_are_no_datasets(tmp_path):
    (tmp_path / "mine.py").write_text(PYTHON_GRPO.replace('"json"', '"csv"'))
    found = port(read_foreign(tmp_path / "mine.py"), PROGRAMS["grpo"].config)
    assert found.refused and "csv is not read here" in found.differs[0] and "data.train" not in found.values
    config, _ = translated("trl dpo --model_name_or_path m --dataset_name d --rpo_alpha 0.5", tmp_path)
    assert (config.dpo.sft_loss_weight, config.dpo.sft_average_log_probs) == (0.5, True)


@pytest.mark.long
def test_defaults_are_those_of_verl():
    """The table is what its script makes from the installed verl."""
    assert make_defaults_of_verl.table() == TABLE.read_text()


ENGINES = {
    "TRL": (GRPO.replace("--num_processes 2", "--num_processes 8") + "--use_vllm --vllm_tensor_parallel_size 2", 8, 4),
    "verl": (VERL, 8, 4),
    "verl on two nodes": (VERL.replace("n_gpus_per_node: 8", "n_gpus_per_node: 8, nnodes: 2"), 16, 8),
    "NeMo RL": (NEMO_RL, 8, 8),
    "NeMo RL on two nodes": (NEMO_RL.replace("num_nodes: 1", "num_nodes: 2"), 16, 16),
    "NeMo RL with engines of their own": (
        NEMO_RL.replace("enabled: true}, stop", "enabled: false, resources: {gpus_per_node: 2}}, stop"), 6, 2
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "processes", "servers"), ENGINES.values(), ids=ENGINES)
def test_servers_of_a_ported_configuration_use_each_gpu_once(text, processes, servers, tmp_path):
    name = "file" if text.startswith("trl ") else "file.yaml"
    config, _ = translated(text, tmp_path, name)
    assert read_foreign(tmp_path / name).processes == processes
    places = place_servers(config, planned_nodes(processes, gpus_per_node=8))
    used = [(place.node, gpu) for place in places for gpu in place.devices]
    assert len(places) == servers and len(set(used)) == len(used) == (processes if config.generation.offload else 2)


def test_engines_on_nodes_of_their_own_are_started_by_the_job(tmp_path):
    resources = "colocated: {enabled: false, resources: {gpus_per_node: null, num_nodes: 1}}"
    text = NEMO_RL.replace("num_nodes: 1", "num_nodes: 3").replace("colocated: {enabled: true}", resources)
    config, ported = translated(text, tmp_path, "nemo.yaml")
    foreign = read_foreign(tmp_path / "nemo.yaml")
    assert (foreign.processes, foreign.nodes, config.generation.offload) == (16, 2, False)
    assert any("SERVER_NODES=1 sbatch scripts/slurm/grpo_vllm.sbatch" in line for line in ported.todo)
