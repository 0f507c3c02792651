"""Tests of configuration files: every file in configs/ loads, and every mistake gives one line that names the key."""

import pytest
import yaml
from programs import ROOT

from mcore_rl.cli.train import PROGRAMS
from mcore_rl.config import (
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    ParallelConfig,
    PPOConfig,
    RMConfig,
    SFTConfig,
    build_config,
    changed_values,
    load_config,
    resolved_yaml,
)
from mcore_rl.config.load import expand_headers
from mcore_rl.config.schema import forms_of_section
from mcore_rl.errors import UserError, UserErrors

CONFIGS = ROOT / "configs"
MINIMAL = """
output_dir: out
model: {path: model}
data: {train: train.jsonl, max_sequence_length: 64}
batch: {global_batch_size: 8}
optimizer: {lr: 1e-5}
trainer: {max_steps: 3}
"""
MINIMAL_RL = """
output_dir: out
model: {path: model}
data: {train: train.jsonl}
grpo: {num_prompts_per_step: 2, num_generations_per_prompt: 2, max_new_tokens: 4}
"""


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configurations_load(path):
    kinds = {"dpo": DPOConfig, "sft": SFTConfig, "grpo": GRPOConfig, "rm": RMConfig, "kto": KTOConfig, "ppo": PPOConfig}
    config = load_config(kinds[path.name.split("_")[0]], path)
    assert config.optimizer.lr > 0
    assert config.optimizer.warmup_steps == 0  # the first step of a warm-up would train nothing


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("**/dpo_*.yaml")), ids=lambda path: path.name)
def test_changed_values_are_overrides_that_give_the_configuration(path, monkeypatch):
    for name in ("MODEL", "TRAIN", "VALIDATION", "DATA"):
        monkeypatch.setenv(name, "x")
    fp8 = ["model.fp8={}", "model.dtype=bfloat16"]
    template = r"""data.chat_template="{{ messages }}\n\n{# it's #}\n" """
    config = load_config(DPOConfig, path, ["data.columns={prompt: 'a: b', chosen: c.d}", template, *fp8])
    changed = changed_values(config)
    assert "model.fp8={}" in changed
    assert not any("\n" in line for line in changed), "each line is a comment in --print-config"
    assert build_config(DPOConfig, {}, changed, "") == config
    assert not any(line.startswith(("seed=", "optimizer.name=")) for line in changed), "these are defaults"
    assert "seed=7" in changed_values(build_config(DPOConfig, {}, [*changed, "seed=7"], ""))


def test_overrides_and_types(write):
    config = load_config(DPOConfig, write(MINIMAL), ["optimizer.lr=3e-4", "dpo.reference=precompute"])
    assert config.optimizer.lr == 3e-4  # YAML itself reads 3e-4 as a string
    assert config.dpo.reference == "precompute"


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_section_that_is_null_has_its_default(program, tmp_path):
    text = f"output_dir: {tmp_path / 'out'}\nmodel: {{path: model}}\ndata: {{train: x}}\n"
    required = {"distillation": {"teacher": "model"}} if program.config.algorithm == "distill" else {}
    plain = build_config(program.config, {**yaml.safe_load(text), **required}, [], "")
    for name, field in program.config.model_fields.items():
        if name in ("model", "data", *required):
            with pytest.raises(UserError, match=f"{name}: must be a section of keys, found nothing \\(null\\)"):
                build_config(program.config, {**yaml.safe_load(text), **required}, [f"{name}=null"], "")
        elif forms_of_section(field.annotation):
            given = {**yaml.safe_load(text), **required}
            assert build_config(program.config, given, [f"{name}=null"], "") == plain, name


def test_null_removes_a_section_of_the_included_file(write, tmp_path):
    base = write(MINIMAL_RL + "generation: {backend: vllm, vllm: {num_servers: 2, weight_updates: delta}}")
    config = load_config(GRPOConfig, base, ["generation.vllm=null"])
    assert (config.generation.backend, config.generation.vllm.num_servers) == ("vllm", "auto")
    config = load_config(GRPOConfig, base, ["generation=null", "generation.offload=true"])
    assert (config.generation.backend, config.generation.offload) == ("megatron", True)
    child = tmp_path / "child.yaml"
    child.write_text(f"base: {base.name}\ngeneration:\ngrpo: null")
    config = load_config(GRPOConfig, child)
    assert config.generation == type(config.generation)()
    assert config.batch.global_batch_size == 16 * 8, "the default of grpo"


def test_resolved_configuration_reads_back(write, tmp_path):
    config = load_config(DPOConfig, write(MINIMAL))
    assert load_config(DPOConfig, write(resolved_yaml(config))) == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.rate=1"], "unknown key optimizer.rate; known here are name, lr"),
        (
            ["optimizer.learning_rate=1"],
            "unknown key optimizer.learning_rate; TRL's learning_rate is optimizer.lr here",
        ),
        (["dpo.beta=1"], "unknown key dpo.beta; TRL's beta is dpo.reference_policy_kl_penalty here"),
        (["trainer.tf32=true"], "TRL's tf32 has no counterpart here: model.dtype holds for training and validation"),
        (["policy.megatron_cfg.fp8_cfg.fp8=e4m3"], "has no counterpart here: the format follows from model.fp8.recipe"),
        (["policy.megatron_cfg.fp8_cfg.fp8_recipe=mxfp8"], "fp8_recipe is model.fp8.recipe here"),
        (["model.fp8.recipe=delayed"], "model.fp8.recipe: delayed scaling is not supported, because its scales"),
        (["policy.megatron_cfg.scheduler.lr_decay_style=x"], "NeMo RL's policy.* is optimizer.schedule here"),
        (["model.name=x"], "unknown key model.name; known here are path, "),
        (["policy.megatron_cfg.nothing=true"], "unknown key policy; known here are "),
        (["x.optimizer.clip_grad=1"], "NeMo RL's policy.megatron_cfg.optimizer.clip_grad is optimizer.clip_"),
        (["critic.model.path=x"], r"verl's critic.model.path is critic.path, which this program does not have"),
        (["policy.tokenizer.chat_template=x"], "NeMo RL's policy.tokenizer.chat_template is data.chat_template here"),
        (["actor_rollout_ref.actor.megatron.context_parallel_size=2"], "is parallel.context_parallel_size here"),
        (["optimizer.weigth_decay=1"], r"unknown key optimizer.weigth_decay; did you mean optimizer\.weight_decay\?"),
        (["paralel.x=1"], "unknown key paralel; did you mean parallel?"),
        (["batch.global_batch_size=true"], "batch.global_batch_size: must be a number"),
        (["batch.global_batch_size=0"], "batch.global_batch_size: .*got 0"),
        (["data.overlong=cut"], "data.overlong: .*'drop' or 'truncate'.*got 'cut'"),
        (["seed.x=1"], "seed is a value, not a section"),
        (["seed"], "write it as section.key=value"),
        (["optimizer={lr: 1e-3, lr: 0.5}"], "is not a YAML value: the key lr is given in line 1 and again in line 1"),
        (["optimizer.warmup_steps=3", "optimizer.warmup_ratio=0.1"], "optimizer.warmup_ratio: cannot be combined with"),
        (["optimizer.decay_ratio=0.2"], "optimizer.decay_ratio: requires schedule=wsd, not cosine"),
        (["optimizer.lr=${NOT_SET_ANYWHERE}"], "the environment variable NOT_SET_ANYWHERE is not set"),
        (["optimizer.lr=${a b}"], r"does not name an environment variable; to write a plain \${, use \$\${"),
        (["optimizer.min_lr=1"], "min_lr: must be at most lr"),
        (["parallel.sequence_parallel=true"], "needs tensor_model_parallel_size > 1"),
        (["parallel.expert_tensor_parallel_size=2"], "must equal tensor_model_parallel_size"),
        (["parallel.virtual_pipeline_model_parallel_size=2"], "needs pipeline_model_parallel_size > 1"),
    ],
)
def test_mistakes(write, overrides, message):
    import re

    with pytest.raises(UserError) as error:
        load_config(DPOConfig, write("seed: 1" + MINIMAL), overrides)
    assert re.search(message, str(error.value)), str(error.value)
    assert "\n" not in str(error.value)


def test_every_key_of_another_trainer_has_a_line(write):
    """Errors about keys of other trainers name all of them; the other mistakes stand together in the first line."""
    values = ["optimizer={learning_rate: 1, tf32: true}", "optimizer.rate=2", "dpo.beta=1", "seed=x"]
    values.append("per_device_eval_batch_size=1")
    with pytest.raises(UserErrors) as error:
        load_config(DPOConfig, write(MINIMAL), values)
    first, *foreign = error.value.lines
    assert "seed: " in first and "unknown key optimizer.rate" in first
    assert sorted(line.removeprefix("command line: unknown key ").partition(";")[0] for line in foreign) == [
        "dpo.beta", "optimizer.learning_rate", "optimizer.tf32", "per_device_eval_batch_size",
    ]  # fmt: skip
    with pytest.raises(UserErrors) as error:
        load_config(DPOConfig, write(MINIMAL), ["policy={model_name: m, made_up: 1, max_grad_norm: 2}"])
    assert [line.partition("policy.")[2].partition(";")[0] for line in error.value.lines] == [
        "model_name", "made_up", "max_grad_norm",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "said_by"),
    [
        (["batch.global_batch_size=0"], "command line: batch.global_batch_size: "),
        (["batch={global_batch_size: 0}"], "command line: batch.global_batch_size: "),
        (["optimizer.lr=2"], "{file}: batch.global_batch_size: "),
        (["batch.global_batch_size=8", "nonsense=1"], "command line: unknown key nonsense; "),
        (["optimizer.lr=x"], "{file}: "),  # both are wrong
        (["batch.global_batch=8"], "{file}: "),  # a key that begins the other's name
    ],
)
def test_who_said_what_is_wrong(write, overrides, said_by):
    file = write(MINIMAL.replace("global_batch_size: 8", "global_batch_size: 0"))
    with pytest.raises(UserError) as error:
        load_config(DPOConfig, file, overrides)
    assert str(error.value).startswith(said_by.format(file=file))


def test_a_stop_string_is_not_empty(write):
    grpo = "grpo: {num_prompts_per_step: 2, num_generations_per_prompt: 4, max_new_tokens: 8, stop_strings: ['']}"
    with pytest.raises(UserError, match=r"grpo\.stop_strings\.0: .* at least 1 character"):
        load_config(GRPOConfig, write(MINIMAL + grpo))


def test_files_that_are_no_configuration(write, tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        load_config(DPOConfig, tmp_path / "missing.yaml")
    with pytest.raises(UserError, match="not valid YAML"):
        load_config(DPOConfig, write("a: [1"))
    with pytest.raises(UserError, match="must be a YAML mapping of sections"):
        load_config(DPOConfig, write("- a"))
    with pytest.raises(UserError, match="output_dir is required; model is required"):
        load_config(DPOConfig, write("data: {train: x}"))


def test_world_size():
    parallel = ParallelConfig(tensor_model_parallel_size=2, context_parallel_size=2)
    assert parallel.data_parallel_size(8) == 2
    with pytest.raises(UserError, match=r"= 4 must divide the number of processes \(6\)"):
        parallel.data_parallel_size(6)


def test_what_need_not_be_said(write):
    """Model, data and output directory are all that a file must have."""
    text = "output_dir: out\nmodel: {path: model}\ndata: {train: x.jsonl}"
    for kind in (SFTConfig, DPOConfig, RMConfig, KTOConfig, PPOConfig, GRPOConfig):
        config = load_config(kind, write(text))
        assert load_config(kind, write(resolved_yaml(config))) == config
        assert (config.trainer.max_steps, config.trainer.max_epochs) == (None, 1)
        assert (config.model.head == "reward") == (kind is RMConfig)
    assert config.batch.global_batch_size == 16 * 8
    assert not load_config(GRPOConfig, write(text), ["trainer.validate_at_start=false"]).trainer.validate_at_start
    assert load_config(DPOConfig, write(text)).optimizer.lr == 1e-6
    assert load_config(SFTConfig, write(text), ["optimizer.min_lr=1e-6"]).optimizer.lr == 2e-5
    assert load_config(SFTConfig, write(text), ["trainer.max_steps=4"]).trainer.max_epochs is None
    with pytest.raises(UserError, match=r"model\.head: must be reward to train a reward model"):
        load_config(RMConfig, write(text), ["model.head=lm"])


def test_a_file_builds_on_another(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "grand.yaml").write_text(MINIMAL)
    (tmp_path / "deep" / "base.yaml").write_text(
        "base: grand.yaml\noptimizer: {warmup_steps: 2}\ndata: {columns: {a: b}}"
    )
    child = tmp_path / "child.yaml"
    child.write_text("base: deep/base.yaml\noptimizer: {lr: 2e-5}\ndata: {columns: {c: d}}")
    config = load_config(SFTConfig, child, ["optimizer.min_lr=1e-6"])
    assert (config.optimizer.lr, config.optimizer.warmup_steps, config.optimizer.min_lr) == (2e-5, 2, 1e-6)
    assert config.data.columns == {"a": "b", "c": "d"}
    assert config.data.max_sequence_length == 64
    for text, message in [
        ("base: child.yaml", "base: child.yaml includes .* again"),
        ("base: missing.yaml", r"missing.yaml: cannot be read \(No such file or directory\) \(base of .*child.yaml\)"),
        ("base: [a]", r"base: must be the path of a file, got \['a'\]"),
        ("base:", "base: must be the path of a file, got None"),
    ]:
        child.write_text(text)
        with pytest.raises(UserError, match=message):
            load_config(SFTConfig, child)
    (tmp_path / "deep" / "grand.yaml").write_text("base: ../child.yaml")
    child.write_text("base: deep/base.yaml")
    with pytest.raises(UserError, match=r"includes .* again"):
        load_config(SFTConfig, child)


@pytest.mark.parametrize(
    ("given", "told"),
    [("{sigmoid: 1}", r"\(got keys\)"), ("[sigmoid, sft]", r"\(got 'sft'\)"), ("other", r"\(got 'other'\)")],
)
def test_of_several_forms_the_nearest_one_is_told(write, given, told):
    with pytest.raises(UserError, match=rf"command line: dpo\.preference_loss(\.1)?: Input should be [^;]*{told}$"):
        load_config(DPOConfig, write(MINIMAL), [f"dpo.preference_loss={given}"])


def test_a_file_of_another_algorithm_is_told_as_what_it_was_read(write):
    from mcore_rl.cli.train import load_for

    batch, grpo = "batch: {global_batch_size: 8}", "grpo: {num_prompts_per_step: 4, max_new_tokens: 9}"
    grpo = write(MINIMAL.replace(batch, grpo))
    assert load_for("grpo", grpo, []).grpo.num_prompts_per_step == 4
    with pytest.raises(UserError, match=r"unknown key grpo; .* \(read as a configuration of --algorithm dpo\)"):
        load_for("dpo", grpo, [])


def test_variables_of_the_environment(write, monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.setenv("RATE", "3e-4")
    config = load_config(
        SFTConfig,
        write(MINIMAL.replace("output_dir: out", "output_dir: ${SCRATCH}/${NAME_NOT_SET:-run}")),
        ["optimizer.lr=${RATE}", "data.chat_template='{{ $${x} }}${'"],
    )
    assert str(config.output_dir) == "/scratch/me/run"
    assert config.optimizer.lr == 3e-4
    assert config.data.chat_template == "{{ ${x} }}${"
    assert load_config(SFTConfig, write(resolved_yaml(config))) == config
    for odd in ("${HOME:?x}", "${RATE:1}", "${}", "${:-x}"):
        with pytest.raises(UserError, match="does not name an environment variable"):
            load_config(SFTConfig, write(MINIMAL), [f"data.train='{odd}'"])
    assert load_config(SFTConfig, write(MINIMAL), ["data.train=${NOT_SET:-}x"]).data.train == "x"
    with pytest.raises(UserError, match=r"config\.yaml: model\.path: the environment variable UNSET_HERE is not set"):
        load_config(SFTConfig, write(MINIMAL.replace("{path: model}", "{path: '${UNSET_HERE}/m'}")))


def test_headers_keep_their_variables(write, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "s3cret")
    judge = {"name": "http", "url": "http://localhost:9/", "headers": {"Authorization": "Bearer ${JUDGE_TOKEN}"}}
    values = {"environment": {"name": "weighted", "rewards": {"asked": judge}}}
    for overrides in (
        [],
        ["environment.rewards.asked.headers.Authorization='${JUDGE_TOKEN}'"],
        [f"environment={judge}"],
    ):
        config = load_config(GRPOConfig, write(MINIMAL_RL + yaml.safe_dump(values)), overrides)
        text = resolved_yaml(config)
        assert "${JUDGE_TOKEN}" in text and "$$" not in text and "s3cret" not in text
        assert load_config(GRPOConfig, write(text)) == config
    assert expand_headers({"A": "$${x} ${JUDGE_TOKEN} ${NOT_SET:-d}"}) == {"A": "${x} s3cret d"}


def test_what_is_laid_over_need_not_be_set(write, tmp_path):
    unset = write(MINIMAL.replace("{path: model}", "{path: '${UNSET_HERE}/m'}"))
    assert str(load_config(SFTConfig, unset, ["model.path=own"]).model.path) == "own"
    child = tmp_path / "child.yaml"
    child.write_text(f"base: {unset.name}\nmodel: {{path: own}}\n")
    assert str(load_config(SFTConfig, child).model.path) == "own"
    child.write_text(f"base: {unset.name}\nseed: 1\n")
    with pytest.raises(UserError, match=rf"{unset.name}: model\.path: the environment variable UNSET_HERE is not set"):
        load_config(SFTConfig, child)
    child.write_text("base: ${UNSET_HERE}.yaml\n")
    with pytest.raises(UserError, match=r"child\.yaml: base: the environment variable UNSET_HERE is not set"):
        load_config(SFTConfig, child)


@pytest.mark.parametrize(
    ("config", "overrides", "message"),
    [
        (
            DPOConfig,
            ["dpo={preference_loss: aot}", "model.lora={rank: 4, dropout: 0.1}"],
            "model.lora.dropout: preference_loss=aot sorts scores that are computed without dropout; set model.lora",
        ),
        (
            KTOConfig,
            ["kto.mismatched=batch", "batch.global_batch_size=1"],
            "kto.mismatched: batch needs another record's response, but batch.global_batch_size is 1; set kto.mism",
        ),
        (
            KTOConfig,
            ["kto={loss: apo_zero_unpaired, mismatched: batch}"],
            "kto: mismatched applies to the reference point",
        ),
        (DPOConfig, ["dpo={discopop_tau: 0.1}"], "discopop_tau applies to preference_loss=discopop, not to sigmoid"),
        (SFTConfig, ["sft.loss=chunked_nll"], "sft.loss: Input should be 'nll' or 'dft'"),
    ],
)
def test_option_that_a_loss_does_not_read_is_refused(config, overrides, message, write):
    with pytest.raises(UserError) as refused:
        load_config(config, write(MINIMAL), overrides)
    assert message in str(refused.value)
