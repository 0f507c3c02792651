"""Tests that the tables of names for users of other programs name existing functions and keys."""

import dataclasses
import fnmatch
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml
from make_config_reference import other_keys
from programs import ROOT, metrics_of
from small_models import make_model

from mcore_rl.cli.train import PROGRAMS
from mcore_rl.config import build_config
from mcore_rl.config.porting.defaults import defaults_of_verl
from mcore_rl.config.porting.foreign import as_in_ppo
from mcore_rl.config.schema import reference_of

PAGE = (ROOT / "docs" / "coming_from.md").read_text()
ROWS = list(other_keys(PAGE))


def our_keys():
    for program in PROGRAMS.values():
        for section in reference_of(program.config):
            yield section.name
            for key in section.keys:
                yield f"{section.name}.{key.name}" if section.name else key.name


def test_our_names():
    known = set(our_keys())
    assert not [here for *_, here, _ in ROWS if here and here not in known]
    assert all(note for *_, here, note in ROWS if not here), "a key without counterpart needs a reason"


def missing_and_unknown(program, theirs, kind=""):
    """The keys that no row names, and the keys and patterns of rows for this kind that name none."""
    rows = [key for of, algorithm, keys, _, _ in ROWS if of == program and algorithm in ("", kind) for key in keys]
    missing = [key for key in theirs if not any(fnmatch.fnmatchcase(key, row) for row in rows)]
    return missing, [row for row in rows if not fnmatch.filter(theirs, row)]


@pytest.mark.long
def test_every_key_of_trl():
    """Every field of TRL's configurations is in the table, with those of transformers' TrainingArguments and of the
    arguments of TRL's scripts."""
    import trl
    from trl.scripts.grpo import GRPOScriptArguments

    configs = {"SFT": trl.SFTConfig, "DPO": trl.DPOConfig, "GRPO": trl.GRPOConfig, "RM": trl.RewardConfig}
    configs |= {"KTO": trl.KTOConfig}
    scripts = {name: [trl.ModelConfig, trl.ScriptArguments] for name in configs}
    scripts["GRPO"] = [trl.ModelConfig, GRPOScriptArguments]
    fields = {
        name: [field.name for part in (config, *scripts[name]) for field in dataclasses.fields(part)]
        for name, config in configs.items()
    }
    everywhere = {name for names in fields.values() for name in names}
    for kind, names in fields.items():
        missing, unknown = missing_and_unknown("TRL", names, kind)
        assert not missing and not set(unknown) - everywhere, kind
    for program, kind, keys, *_ in ROWS:
        assert program != "TRL" or set(keys) <= set(fields.get(kind, everywhere)), (kind, keys)


def leaves(tree, prefix=""):
    if isinstance(tree, list):
        return [prefix + key for key in tree]
    parts = ((f"{prefix}{key}." if key else prefix, value) for key, value in tree.items())
    return [leaf for name, value in parts for leaf in leaves(value, name)]


def test_every_key_of_nemo_rl():
    theirs = leaves(yaml.safe_load((ROOT / "tests" / "docs" / "other_keys.yaml").read_text())["NeMo RL"])
    assert len(theirs) > 250
    missing, unknown = missing_and_unknown("NeMo RL", theirs)
    assert not missing and not unknown


WITHOUT_DEFAULT = {
    "actor_rollout_ref.actor.megatron.override_transformer_config.*", "actor_rollout_ref.actor.router_replay.mode",
    "data.apply_chat_template_kwargs.*", "trainer.seed", "trainer.max_ckpt_to_keep", "trainer.profile_interval",
    "*profiler.*", "reward*.reward_kwargs.*",
}  # fmt: skip
"""Keys of rows that verl's commands add to its file, or that only its SFT or an earlier version has."""


def test_every_key_of_verl():
    of_ppo = {*defaults_of_verl("ppo_trainer"), *defaults_of_verl("ppo_megatron_trainer")}
    assert len(of_ppo) > 750
    missing, unknown = missing_and_unknown("verl", of_ppo)
    added = [row for row in unknown if any(fnmatch.fnmatchcase(row, pattern) for pattern in WITHOUT_DEFAULT)]
    assert not missing and added == unknown
    of_sft = {as_in_ppo(name, False) for name in defaults_of_verl("sft_trainer_engine")}
    of_sft |= {as_in_ppo(name, True) for name in defaults_of_verl("sft_megatron_trainer_engine")}
    assert not missing_and_unknown("verl", of_sft, "SFT")[0]


def names_in(text):
    return re.findall(r"`([\w.-]+)`", text)


def section(start, end):
    return PAGE[PAGE.index(start) : PAGE.index(end)]


def rows_of(text):
    """The names in the first column, by the word before them."""
    found = {}
    for kind, names in re.findall(r"^\| (\w+): (.*?) \|", text, re.M):
        found.setdefault(kind, []).extend(names_in(names))
    assert all(len(set(names)) == len(names) for names in found.values()), "a name stands twice"
    return {kind: set(names) for kind, names in found.items()}


@pytest.mark.long
def test_loss_types_of_trl():
    """Every loss type that TRL's trainers accept is in the table, and every name of ours there is one of the losses."""
    import inspect

    import trl
    from trl.experimental.cpo import CPOConfig
    from trl.experimental.online_dpo import OnlineDPOConfig
    from trl.experimental.sdpo import SDPOConfig
    from trl.experimental.tpo import TPOConfig

    from mcore_rl.losses.options import PreferenceLossType
    from mcore_rl.losses.policy_options import PolicyLossName

    def compared(trainer):
        source = inspect.getsource(trainer._compute_loss)
        lists = re.findall(r"loss_type in \[(.*?)\]", source)
        return set(re.findall(r"loss_type == \"(\w+)\"", source)) | set(re.findall(r"\"(\w+)\"", " ".join(lists)))

    def choices(config):
        field = config.__dataclass_fields__["loss_type"]
        return set(field.metadata.get("choices") or re.findall(r"'(\w+)'(?= \(default\):|:)", field.metadata["help"]))

    rows = rows_of(section("### Loss types of TRL", "### Settings that give other numbers"))
    of_dpo, of_grpo = compared(trl.DPOTrainer), compared(trl.GRPOTrainer)
    expected = {"DPO": of_dpo, "GRPO": of_grpo, "KTO": compared(trl.KTOTrainer), "SFT": choices(trl.SFTConfig)}
    others = {"OnlineDPO": OnlineDPOConfig, "SDPO": SDPOConfig, "TPO": TPOConfig, "CPO": CPOConfig}
    expected |= {name: choices(config) for name, config in others.items()}
    assert rows == expected
    assert of_dpo - {"sft"} <= set(get_args(PreferenceLossType))
    assert {"sapo", "vespo", "luspo", "gmpo"} <= set(get_args(PolicyLossName))
    with_types = {
        path.name.removesuffix("_config.py").replace("_", "")
        for path in Path(trl.__file__).parent.rglob("*_config.py")
        if re.search(r"^    loss_type: ", path.read_text(), re.M)
    }
    assert with_types == {name.lower() for name in expected}


ESTIMATORS_OF_VERL = """gae grpo reinforce_plus_plus reinforce_plus_plus_baseline remax rloo opo grpo_passk gpg
    rloo_vectorized grpo_vectorized optimal_token_baseline tir_optimal_token_baseline gdpo"""
LOSSES_OF_VERL = "vanilla dppo_tv dppo_kl gspo sapo gpg clip_cov kl_cov geo_mean cispo bypass_mode flow_grpo"
LOSS_KEYS_OF_NEMO_RL = {
    "ClippedPG": """disable_ppo_ratio token_level_loss sequence_level_importance_ratios ratio_clip_min ratio_clip_max
        ratio_clip_c reference_policy_kl_penalty reference_policy_kl_type kl_input_clamp_value kl_output_clamp_value
        use_kl_in_reward use_importance_sampling_correction truncated_importance_sampling_type
        truncated_importance_sampling_ratio truncated_importance_sampling_ratio_min use_on_policy_kl_approximation
        force_on_policy_ratio seq_logprob_error_in_loss use_cispo positive_example_nll_weight""",
    "DPO": """reference_policy_kl_penalty preference_loss_weight sft_loss_weight preference_average_log_probs
        sft_average_log_probs""",
    "MPO": """reference_policy_kl_penalty preference_loss_weight sft_loss_weight bco_loss_weight
        preference_average_log_probs sft_average_log_probs quality_average_log_probs reward_shift_momentum
        reward_shift""",
    "Distillation": "kl_type mixed_kl_weight zero_outside_topk",
    "MseValue": "scale cliprange",
}


def test_names_of_verl():
    rows = rows_of(section("### Estimators and losses of verl", "## NeMo RL"))
    assert rows == {"estimator": set(ESTIMATORS_OF_VERL.split()), "loss": set(LOSSES_OF_VERL.split())}


def test_loss_keys_of_nemo_rl():
    """Every key is in the table; those that are called the same are keys here, and accepted by the loss."""
    from mcore_rl.losses.options import DistillationOptions, DPOOptions
    from mcore_rl.losses.policy_options import ClippedPGOptions

    table = section("### Loss keys of NeMo RL", "## Names of metrics")
    assert rows_of(table) == {kind: set(keys.split()) for kind, keys in LOSS_KEYS_OF_NEMO_RL.items()}
    options = {"ClippedPG": ClippedPGOptions, "DPO": DPOOptions, "MPO": DPOOptions, "Distillation": DistillationOptions}
    same = re.findall(r"^\| (\w+): (.*?) \| the same", table, re.M)
    assert {kind for kind, _ in same} == set(options)
    for kind, names in same:
        assert set(names_in(names)) <= set(options[kind].__dataclass_fields__), kind


def test_values_of_ours_exist():
    """Keys that the tables set (`section.key=value`) are keys, and text values are among the choices."""
    kinds = {}
    for program in PROGRAMS.values():
        for part in reference_of(program.config):
            kinds |= {f"{part.name}.{key.name}": key.kind for key in part.keys}
    found = re.findall(r"`(\w+\.\w+)=([\w_]+)`", PAGE)
    assert len(found) > 25
    for key, value in found:
        assert key in kinds, key
        choices = kinds[key].split(" | ")
        assert value in choices or {"number", "integer"} & set(choices), (key, value)


@pytest.mark.long
def test_names_of_metrics():
    """Names of ours are in the package, those of TRL in its trainers."""
    import inspect

    import trl

    from mcore_rl import losses, rollouts

    sources = "".join(
        path.read_text() for part in (losses, rollouts) for path in Path(part.__path__[0]).parent.rglob("*.py")
    )
    trainers = (trl.GRPOTrainer, trl.DPOTrainer)
    of_trl = "".join(inspect.getsource(inspect.getmodule(trainer)) for trainer in trainers)
    rows = re.findall(r"^\| `([\w@]+)` \| (`[\w/]+`|–) \|", section("## Names of metrics", "## Code written"), re.M)
    assert len(rows) > 30
    formed = {"reward_NAME_mean": "reward_{name}_mean", "pass@k": '"pass"', "maj@k": '"maj"'}
    formed |= {f"clip_fraction_{side}": f"clip_fraction_{side}" for side in ("low", "high")}
    formed |= dict.fromkeys(("generation_seconds", "judging_seconds"), "{name}_seconds")
    for ours, theirs in rows:
        assert formed.get(ours, f'"{ours}"') in sources, ours
        name = theirs.strip("`").replace("NAME", "{reward_func_name}")
        assert theirs in ("–", "`loss`", "`grad_norm`", "`learning_rate`") or f'"{name}"' in of_trl, theirs


SMALLER = {
    "trainer.max_steps": 2, "trainer.validation_interval": 1, "trainer.log_interval": 1, "checkpoint.save_interval": 1,
    "batch.global_batch_size": 4, "data.max_sequence_length": 96, "grpo.max_new_tokens": 8,
    "grpo.num_prompts_per_step": 4, "grpo.num_generations_per_prompt": 2, "grpo.train_global_batch_size": 4,
}  # fmt: skip
RECORD = {"prompt": "What is 1+1?", "answer": "2", "chosen": "2", "rejected": "3"}


@pytest.mark.long
@pytest.mark.parametrize("place, program", enumerate(["TRL", "verl", "NeMo RL"]))
def test_translated_commands_run(place, program, tmp_path):
    """The commands of the page run: with a small model and data, on the CPU, without vLLM and W&B."""
    text = section("## A command of each", "## Names of metrics")
    explanation, command = re.findall(r"(.*?)```\n(.*?)```", text, re.S)[place]
    assert program in explanation
    words = shlex.split(command.replace("\\\n", " "))
    algorithm, overrides = words[2], [word for word in words if re.match(r"(?!logging)[\w.]+=", word)]
    build_config(
        PROGRAMS[algorithm].config, {}, [*overrides, "model.path=m", "data.train=d", "output_dir=o"], "the page"
    )
    make_model("llama", tmp_path / "model")
    names = {"prompt": "problem", "answer": "expected_answer"} if program == "NeMo RL" else {}
    records = [{names.get(key, key): f"{value}{i}" for key, value in RECORD.items()} for i in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    kept = [word for word in overrides if not word.startswith(("generation.", "data.validation"))]
    smaller = [f"{key}={SMALLER[key]}" for key in (word.partition("=")[0] for word in kept) if key in SMALLER]
    done = subprocess.run(
        [sys.executable, "-m", "mcore_rl", "train", algorithm, "--nproc-per-node", "2", "--model", tmp_path / "model",
         "--data", tmp_path / "data.jsonl", "--output", tmp_path / "out", *kept, *smaller, "trainer.max_steps=2",
         f"data.validation={tmp_path / 'data.jsonl'}"],
        capture_output=True, text=True, timeout=150, cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert metrics_of(tmp_path / "out")[-1]["step"] == 2
