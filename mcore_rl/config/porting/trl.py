"""Rules for the values of TRL. A key without a rule keeps its value, under the name in the table of keys."""

from __future__ import annotations

import math
from typing import Any

from mcore_rl.config.base import DATASET_FORMATS
from mcore_rl.config.porting.rules import (
    DTYPE,
    SCHEDULE,
    Choice,
    Given,
    Outcome,
    Refused,
    Rule,
    ToDo,
    number,
    only_if,
    optimizer,
    positive,
    refused,
    said,
    servers,
    targets,
    to,
    trackers,
    true_for,
    whole,
)
from mcore_rl.errors import UserError


def _batch_of_trl(value: Any, given: Given) -> Outcome:
    each, steps = (int(given.number(key)) for key in ("per_device_train_batch_size", "gradient_accumulation_steps"))
    update = each * steps * given.processes
    if given.algorithm != "grpo":
        return {"batch.global_batch_size": update}
    responses = int(given.number("generation_batch_size")) or (
        each * given.processes * int(given.number("steps_per_generation", steps))
    )
    group = int(given.number("num_generations"))
    if responses % group or (update % group or responses % update):
        return Refused(
            f"{responses} responses of a generation, updates of {update} and groups of {group} do not divide each "
            "other; set grpo.num_prompts_per_step and grpo.train_global_batch_size"
        )
    return {"grpo.num_prompts_per_step": responses // group, "grpo.train_global_batch_size": update}


def _updates_per_step(given: Given) -> float:
    """Return the number of TRL's optimizer steps for one step here: several for GRPO that reuses its rollouts."""
    if given.algorithm != "grpo":
        return 1
    sizes = _batch_of_trl(None, given)
    if isinstance(sizes, str):
        return 1
    responses = sizes["grpo.num_prompts_per_step"] * given.number("num_generations")
    return given.number("num_iterations", 1) * responses / sizes["grpo.train_global_batch_size"]


def _steps(key: str) -> Rule:
    """Return a rule for a number of TRL's optimizer steps."""

    def rule(value: Any, given: Given) -> Outcome:
        count = number(value, key)
        if count <= 0:
            return "0 and less switch it off, as leaving it out does here"
        if count < 1:
            return ToDo(f"{value} of the run; give a number of steps as {key}")
        return {key: math.ceil(count / _updates_per_step(given))}

    return rule


def _evaluates(given: Given) -> bool:
    return str(given("eval_strategy", "no")) not in ("no", "False")


def _validation_interval(value: Any, given: Given) -> Outcome:
    if not _evaluates(given):
        return "eval_strategy=no: nothing is evaluated"
    if given("eval_strategy") != "steps":
        return ToDo("an interval counts steps; set trainer.validation_interval")
    return _steps("trainer.validation_interval")(given("eval_steps", given("logging_steps")), given)


def _dataset(split: str, key: str, usual: str) -> Rule:
    def rule(value: Any, given: Given) -> Outcome:
        name, part = given("dataset_name"), given(split, usual)
        if name is None:
            return "dataset_name is missing"
        if key == "data.validation" and not _evaluates(given):
            return "eval_strategy=no: nothing is evaluated"
        if name in DATASET_FORMATS:
            return _files(name, part, key, given("data_files"))
        return {key: name if part == "train" else f"{name}:{part}"}

    return rule


def _files(form: str, part: str, key: str, files: Any) -> Outcome:
    """Return the source that load_dataset(form, data_files=files, split=part) reads."""
    if form not in ("json", "parquet"):
        return Refused(f"{form} is not read here; write the records into a .jsonl or .parquet file")
    if isinstance(files, dict):
        files = files.get(part)
    elif key == "data.validation" and part != "train":
        return "data_files has one split"
    if files is None:
        return Refused(f"{form} is a format, and data_files does not name the files of {part}")
    return {key: files[0] if isinstance(files, list) and len(files) == 1 else files}


def _losses_on_pairs(value: Any, given: Given) -> Outcome:
    types = list(value) if isinstance(value, list | tuple) else [value]
    weights = given("loss_weights") or [1.0] * len(types)
    weights = weights if isinstance(weights, list | tuple) else [weights]
    if len(weights) != len(types):
        raise UserError(f"loss_weights: must have one weight for each of {len(types)} loss types, got {len(weights)}")
    pairs = {name: weight for name, weight in zip(types, weights, strict=True) if name != "sft"}
    if not pairs:
        return Refused("the losses need one on pairs; for sft alone, use the program sft")
    found: dict[str, Any] = {"dpo.preference_loss": list(pairs) if len(pairs) > 1 else next(iter(pairs))}
    if len(pairs) > 1 and set(pairs.values()) != {1.0}:
        found["dpo.preference_loss_weights"] = list(pairs.values())
    elif len(pairs) == 1 and [*pairs.values()] != [1.0]:
        found["dpo.preference_loss_weight"] = next(iter(pairs.values()))
    if "sft" in types:
        found["dpo.sft_loss_weight"] = weights[types.index("sft")]
    return found | ({"dpo.preference_average_log_probs": True} if "ipo" in pairs else {})


SMOOTHED = {"robust", "exo_pair", "aot", "aot_unpaired"}
"""Losses on pairs for which TRL reads label_smoothing."""


def _smoothing(value: Any, given: Given) -> Outcome:
    types = given("loss_type")
    smoothed = SMOOTHED & ({types} if isinstance(types, str) else set(types))
    return {"dpo.label_smoothing": value} if smoothed else "TRL ignores it with this loss_type"


def _clip_of_trl(value: Any, given: Given) -> Outcome:
    low, loss = given.number("epsilon"), given("loss_type")
    high = given.number("epsilon_high", low)
    if loss == "cispo":
        return {"loss.ratio_clip_min": 1.0, "loss.ratio_clip_max": high - 1}
    if loss in ("sapo", "vespo"):
        return f"loss_type={loss} does not clip ratios"
    return {"loss.ratio_clip_min": low, "loss.ratio_clip_max": high}


def _loss_of_trl(value: Any, given: Given) -> Outcome:
    longest = int(given.number("max_completion_length"))
    return Choice({
        "dapo": {"loss.token_level_loss": True},
        "bnpo": {"loss.token_level_loss": True},
        "grpo": {"loss.token_level_loss": False},
        "dr_grpo": {"loss.token_level_loss": False, "loss.dr_grpo_max_tokens": longest},
        "cispo": {"loss.clip_type": "cispo"},
        **{name: {"loss.name": name} for name in ("sapo", "vespo", "luspo")},
    })(value, given)  # fmt: skip


def _room_for_prompts(value: Any, given: Given) -> Outcome:
    longest, prompt = int(number(value, "max_completion_length")), int(given.number("max_prompt_length", 512))
    return {"grpo.max_new_tokens": longest, "data.max_sequence_length": prompt + longest}


def _correction(value: Any, given: Given) -> Outcome:
    mode, low = str(given("vllm_importance_sampling_mode")), given("vllm_importance_sampling_clip_min")
    level, _, kind = mode.partition("_")
    high = given("vllm_importance_sampling_cap", given("vllm_importance_sampling_clip_max"))
    if value is not True or level not in ("token", "sequence"):
        return "without it, log-probabilities are not corrected, as by default here"
    found = {
        "loss.use_importance_sampling_correction": True,
        "loss.importance_sampling_level": level,
        "loss.truncated_importance_sampling_type": "icepop" if kind == "mask" else "tis",
        "loss.truncated_importance_sampling_ratio": high,
    }
    if kind == "mask":  # needs both bounds; TRL's null is no lower bound
        low = 0.0 if low is None else low
    return found | ({} if low is None else {"loss.truncated_importance_sampling_ratio_min": low})


def _server_options(value: Any, given: Given) -> Outcome:
    """Return the options of vLLM's servers that the run starts."""
    options = [
        ("--gpu-memory-utilization", given("vllm_gpu_memory_utilization")),
        ("--max-model-len", given("vllm_max_model_length")),
        ("--model-impl", given("vllm_model_impl")),
    ]
    words = [word for option, setting in options if setting is not None for word in (option, str(setting))]
    return {"generation.vllm.arguments": words}


def _server(value: Any, given: Given) -> Outcome:
    url = given("vllm_server_base_url")
    host = str(given("vllm_server_host", "127.0.0.1")).replace("0.0.0.0", "127.0.0.1")
    return {
        "generation.vllm.urls": [str(url).rstrip("/") if url else f"http://{host}:{given('vllm_server_port', 8000)}"]
    }


JUDGES = {name: {"name": "math"} for name in ("accuracy_reward", "reasoning_accuracy_reward")} | {
    "think_format_reward": {"name": "trl", "function": "trl.rewards:think_format_reward"}
}
"""Judges here for functions of TRL's script, by their names in the script or in trl.rewards."""


def _rewards(value: Any, given: Given) -> Outcome:
    names = [str(name) for name in value] if isinstance(value, list | tuple) else [str(value)]
    judges = {}
    for name in names:
        module, _, function = name.rpartition(".")
        of_trl = JUDGES.get(name.removeprefix("trl.rewards."))
        if not module and of_trl is None:
            return Refused(f"{name} is no function of a module; write it in one of yours, as environment.function")
        judges[function] = of_trl or {"name": "trl", "function": f"{module}:{function}"}
    if len(names) == 1:
        return {f"environment.{key}": part for key, part in next(iter(judges.values())).items()}
    weights = given("reward_weights") or [1.0] * len(names)
    if len(weights) != len(names):
        raise UserError(f"reward_weights: must have one weight for each of {len(names)} rewards, got {len(weights)}")
    weighted = {
        name: {**judge, "weight": weight} for (name, judge), weight in zip(judges.items(), weights, strict=True)
    }
    return {"environment.name": "weighted", "environment.rewards": weighted}


def _lora_alpha(value: Any, given: Given) -> Outcome:
    alpha, rank = given.number("lora_alpha"), given.number("lora_r")
    return {"model.lora.alpha": whole(alpha * math.sqrt(rank) if given("use_rslora") is True else alpha)}


def _epochs(value: Any, given: Given) -> Outcome:
    if given.number("max_steps", -1) > 0:
        return "max_steps ends the run"
    return {"trainer.max_epochs": math.ceil(number(value, "num_train_epochs"))}


def _warmup(value: Any, given: Given) -> Outcome:
    steps = number(value, "warmup_steps")
    if steps <= 0:
        return "there is no warmup by default"
    return {"optimizer.warmup_ratio": steps} if steps < 1 else {"optimizer.warmup_steps": int(steps)}


def _metric(value: Any, given: Given) -> Outcome:
    if not _evaluates(given):
        return "eval_strategy=no: nothing is evaluated"
    return {"checkpoint.best_metric": f"validation_{str(value).removeprefix('eval_')}"}


def _with_vllm(rule: Rule) -> Rule:
    return only_if("use_vllm", lambda value: value is True, "use_vllm is not set", rule)


def _with_lora(rule: Rule) -> Rule:
    return only_if("use_peft", lambda value: value is True, "use_peft is not set", rule)


def _in_mode(mode: str, rule: Rule) -> Rule:
    return _with_vllm(only_if("vllm_mode", lambda value: value == mode, f"vllm_mode is not {mode}", rule))


def _with_sync(rule: Rule) -> Rule:
    return only_if("sync_ref_model", lambda value: value is True, "sync_ref_model is not set", rule)


def _with_loss(name: str, key: str) -> Rule:
    return only_if("loss_type", lambda value: value == name, f"loss_type is not {name}", to(f"loss.{key}"))


def _dtype(value: Any, given: Given) -> Outcome:
    if given("bf16") is True:
        return "bf16 is set"
    in_float32 = str(value).endswith(("float32", "fp32"))
    by_device = in_float32 and given("bf16") is not False
    return "TRL computes in bf16 on GPUs unless bf16 is false, as auto does here" if by_device else DTYPE(value, given)


def _bf16(value: Any, given: Given) -> Outcome:
    return {"model.dtype": "bfloat16" if value is True else "float32"}


def _model(value: Any, given: Given) -> Outcome:
    revision = given("model_revision", "main")
    return {"model.path": value if revision == "main" else f"{value}@{revision}"}


def _reference_updates(value: Any, given: Given) -> Outcome:
    return {
        "reference_sync.interval": given("ref_model_sync_steps"),
        "reference_sync.alpha": given("ref_model_mixup_alpha"),
    }


def _text_field(value: Any, given: Given) -> Outcome:
    return "text is the default" if value == "text" else {"data.columns": {"text": value}}


def _engine_mode(value: Any, given: Given) -> Outcome:
    return {"generation.offload": True} if value == "colocate" else _server(value, given)


def _reward_model(value: Any, given: Given) -> Outcome:
    return {"environment.name": "reward_model", "environment.path": value}


def _seed_of_data(value: Any, given: Given) -> Outcome:
    return "seed is set" if given.values.get("seed") is not None else {"seed": value}


def _pushed(value: Any, given: Given) -> Outcome:
    name = given("hub_model_id")
    return {"checkpoint.push_to_hub": name} if name else "set checkpoint.push_to_hub=OWNER/NAME"


IN_BATCH = "a part of the batch sizes, which count the whole batch"


RULES: dict[tuple[str, str], Rule] = {
    ("", "neftune_noise_alpha"): refused("SFT has no noise"),
    ("", "label_smoothing_factor"): refused("SFT has no label smoothing"),
    ("", "fp16"): refused("fp16 does not exist here; bf16 is model.dtype=bfloat16"),
    ("", "completion_only_loss"): refused("only responses are trained on", harmless=(None, True)),
    ("", "optim_args"): refused("each option is a key of its own in optimizer"),
    ("", "optim_target_modules"): refused("an option of an optimizer that does not exist here"),
    ("", "lr_scheduler_kwargs"): refused("each option is a key of its own in optimizer"),
    ("", "use_dora"): refused("adapters are those of LoRA"),
    ("", "lora_modules_to_save"): refused("adapters train no other weights"),
    ("grpo", "generation_kwargs"): refused("a token's probability must be the one that training computes"),
    ("grpo", "repetition_penalty"): refused(
        "a token's probability must be the one that training computes", harmless=(None, 1)
    ),
    ("grpo", "vllm_structured_outputs_regex"): refused("a token's probability must be the one that training computes"),
    ("grpo", "chat_template_kwargs"): refused("write the values into the template of data.chat_template"),
    ("grpo", "top_entropy_quantile"): refused("every response token counts", harmless=(None, 1)),
    ("grpo", "use_adaptive_entropy"): refused("loss.entropy_bonus is constant"),
    ("", "per_device_train_batch_size"): _batch_of_trl,
    ("", "gradient_accumulation_steps"): said(IN_BATCH),
    ("", "bf16"): _bf16,
    ("", "dtype"): _dtype,
    ("", "torch_dtype"): _dtype,
    ("", "model_name_or_path"): _model,
    ("", "model_revision"): said("a part of model.path"),
    ("", "dataset_name"): _dataset("dataset_train_split", "data.train", "train"),
    ("", "dataset_train_split"): said("a part of data.train"),
    ("", "data_files"): said("a part of data.train or data.validation"),
    ("", "dataset_test_split"): _dataset("dataset_test_split", "data.validation", "test"),
    ("", "use_peft"): said("the keys of model.lora turn LoRA on"),
    ("", "lora_r"): _with_lora(to("model.lora.rank")),
    ("", "lora_alpha"): _with_lora(_lora_alpha),
    ("", "use_rslora"): said("a part of model.lora.alpha"),
    ("", "lora_dropout"): _with_lora(to("model.lora.dropout")),
    ("", "lora_target_modules"): _with_lora(targets),
    ("", "packing"): true_for(to("batch.packing"), "packs are only a layout: each holds whole sequences"),
    ("", "padding_free"): said("packs have no padding between sequences"),
    ("", "packing_strategy"): said("there is one strategy"),
    ("", "eval_packing"): said("validation uses packs too"),
    ("", "gradient_checkpointing"): true_for(to("model.recompute_activations")),
    ("", "activation_checkpointing"): true_for(to("model.recompute_activations")),
    ("", "lr_scheduler_type"): SCHEDULE,
    ("", "warmup_steps"): _warmup,
    ("", "warmup_ratio"): positive("optimizer.warmup_ratio", "there is no warmup by default"),
    ("", "num_train_epochs"): _epochs,
    ("", "max_steps"): _steps("trainer.max_steps"),
    ("", "eval_strategy"): _validation_interval,
    ("", "eval_steps"): said("a part of trainer.validation_interval"),
    ("", "eval_on_start"): only_if(
        "eval_strategy",
        lambda value: str(value) not in ("None", "no", "False"),
        "eval_strategy=no",
        to("trainer.validate_at_start"),
    ),
    ("", "logging_steps"): _steps("trainer.log_interval"),
    ("", "save_steps"): only_if(
        "save_strategy",
        lambda value: value == "steps",
        "save_strategy is not steps",
        _steps("checkpoint.save_interval"),
    ),
    ("", "save_strategy"): said("a run always saves at its end; checkpoint.save_interval counts steps"),
    ("", "resume_from_checkpoint"): said("the same command resumes its own run; checkpoints of TRL cannot be read"),
    ("", "metric_for_best_model"): _metric,
    ("", "greater_is_better"): lambda value, given: {"checkpoint.best_mode": "max" if value is True else "min"},
    ("", "load_best_model_at_end"): true_for(to("checkpoint.export_best")),
    ("", "report_to"): trackers,
    ("", "run_name"): only_if(
        "report_to",
        lambda names: {"wandb", "mlflow"} & {*([names] if isinstance(names, str) else names or ())},
        "no tracker has names of runs",
        to("logging.run_name"),
    ),
    ("", "project"): said("the name of the tracker's project"),
    ("", "push_to_hub"): true_for(_pushed),
    ("", "hub_model_id"): said("a part of checkpoint.push_to_hub"),
    ("", "optim"): optimizer,
    ("", "data_seed"): _seed_of_data,
    ("", "ddp_timeout"): to("parallel.timeout_seconds"),
    ("dpo", "max_length"): to("data.max_sequence_length"),
    ("kto", "max_length"): lambda value, given: {"data.max_sequence_length": value, "data.overlong": "truncate"},
    ("", "truncation_mode"): Choice({"keep_start": {"data.overlong": "truncate"}}),
    ("", "sync_ref_model"): true_for(_reference_updates, "the reference is fixed by default"),
    ("", "ref_model_sync_steps"): _with_sync(to("reference_sync.interval")),
    ("", "ref_model_mixup_alpha"): _with_sync(to("reference_sync.alpha")),
    ("dpo", "loss_type"): _losses_on_pairs,
    ("dpo", "loss_weights"): said("a part of loss_type"),
    ("dpo", "label_smoothing"): _smoothing,
    ("dpo", "rpo_alpha"): lambda value, given: {"dpo.sft_loss_weight": value, "dpo.sft_average_log_probs": True},
    ("dpo", "precompute_ref_log_probs"): true_for(to("dpo.reference", lambda _: "precompute"), "auto is the default"),
    ("sft", "loss_type"): Choice(
        {"nll": {"sft.loss": "nll"}, "chunked_nll": {"sft.loss": "nll"}, "dft": {"sft.loss": "dft"}}
    ),
    ("sft", "dataset_text_field"): _text_field,
    ("grpo", "generation_batch_size"): said(IN_BATCH),
    ("grpo", "steps_per_generation"): said(IN_BATCH),
    ("grpo", "max_completion_length"): _room_for_prompts,
    ("grpo", "max_prompt_length"): said("a part of data.max_sequence_length"),
    ("grpo", "top_k"): positive("grpo.top_k", "all tokens are candidates by default"),
    ("grpo", "epsilon"): _clip_of_trl,
    ("grpo", "epsilon_high"): said("a part of loss.ratio_clip_max"),
    ("grpo", "loss_type"): _loss_of_trl,
    ("grpo", "importance_sampling_level"): Choice(
        {
            "token": "ratios of tokens are the default",
            "sequence": {"loss.sequence_level_importance_ratios": True},
        }
    ),
    ("grpo", "scale_rewards"): Choice(
        {
            "group": {"grpo.normalize_rewards": True},
            True: {"grpo.normalize_rewards": True},
            "none": {"grpo.normalize_rewards": False},
            False: {"grpo.normalize_rewards": False},
        }
    ),
    ("grpo", "multi_objective_aggregation"): Choice(
        {
            "sum_then_normalize": "the default",
            "normalize_then_sum": {"grpo.advantage_estimator": "gdpo"},
        }
    ),
    ("grpo", "use_vllm"): true_for(to("generation.backend", lambda _: "vllm"), "the training processes generate"),
    ("grpo", "vllm_mode"): _with_vllm(_engine_mode),
    **{
        ("grpo", f"vllm_server_{part}"): said("a part of generation.vllm.urls") for part in ("base_url", "host", "port")
    },
    ("grpo", "vllm_server_timeout"): _in_mode("server", to("generation.vllm.start_seconds")),
    ("grpo", "vllm_enable_sleep_mode"): said("generation.offload follows from vllm_mode"),
    ("grpo", "vllm_tensor_parallel_size"): _in_mode("colocate", servers),
    **{
        ("grpo", f"vllm_{part}"): _in_mode("colocate", _server_options)
        for part in ("gpu_memory_utilization", "max_model_length", "model_impl")
    },
    ("grpo", "vllm_importance_sampling_correction"): _with_vllm(_correction),
    **{
        ("grpo", f"vllm_importance_sampling_{part}"): said("a part of vllm_importance_sampling_correction")
        for part in ("mode", "clip_max", "clip_min", "cap")
    },
    ("grpo", "use_bias_correction_kl"): only_if(
        "beta",
        lambda value: value,
        "beta is 0",
        Choice(
            {
                True: {"loss.kl_gradient": "unbiased"},
                False: {"loss.kl_gradient": "value"},
            }
        ),
    ),
    ("grpo", "log_completions"): said("samples are always written to samples.jsonl"),
    ("grpo", "max_tool_calling_iterations"): refused("set environment.max_turns and a judge that answers tool calls"),
    ("grpo", "reward_funcs"): _rewards,
    ("grpo", "reward_weights"): said("a part of environment.rewards"),
    ("grpo", "reward_model_name_or_path"): _reward_model,
    **{("grpo", f"sapo_temperature_{sign}"): _with_loss("sapo", f"tau_{sign}") for sign in ("pos", "neg")},
    **{("grpo", f"vespo_{part}"): _with_loss("vespo", part) for part in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "": {
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3.0, "max_length": 1024,
        "lr_scheduler_type": "linear", "logging_steps": 10, "gradient_checkpointing": True, "seed": 42,
        "save_strategy": "steps", "save_steps": 500,
        "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "dataset_test_split": "test",
        "ref_model_sync_steps": 512, "ref_model_mixup_alpha": 0.6,
    },
    "sft": {"learning_rate": 2e-5, "truncation_mode": "keep_start"},
    "dpo": {"learning_rate": 1e-6, "truncation_mode": "keep_start", "loss_type": ["sigmoid"], "beta": 0.1},
    "kto": {"learning_rate": 1e-6, "beta": 0.1},
    "rm": {"learning_rate": 1e-4},
    "grpo": {
        "learning_rate": 1e-6, "num_generations": 8, "max_completion_length": 512, "beta": 0.0, "epsilon": 0.2,
        "loss_type": "dapo", "max_length": None, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 1,
        "vllm_gpu_memory_utilization": 0.3, "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0,
        "use_bias_correction_kl": True,
    },
}  # fmt: skip
"""Defaults of TRL by algorithm, "" for all. They hold for values that a user leaves out, so they are ported too."""
