"""Rules for the values of NeMo RL. Other keys keep their values, under the names in the table of keys."""

from __future__ import annotations

import math
import re
from typing import Any

from mcore_rl.config.porting.rules import (
    DTYPE,
    FP8_RECIPE,
    SCHEDULE,
    TO_DO,
    Choice,
    Given,
    Outcome,
    Refused,
    Rule,
    ToDo,
    betas,
    first_rate,
    lowest_rate,
    number,
    only_if,
    optimizer,
    positive,
    refused,
    said,
    sequence_parallel,
    servers,
    targets,
    to,
    true_for,
)

_CFG = "policy.megatron_cfg"


def _by_backend(megatron: bool, rule: Rule, section: str = _CFG) -> Rule:
    """Return `rule` for configurations in which the backend Megatron of `section` is enabled, or is not."""
    reason = f"{section}.enabled is {'not ' if megatron else ''}set"
    return only_if(f"{section}.enabled", lambda value: (value is True) == megatron, reason, rule)


def _nodes_of_servers(value: Any, given: Given) -> Outcome:
    """Rule for the number of nodes that only generate; `of_nemo_rl` does not count them among those that train."""
    if given("policy.generation.backend") != "vllm" or given("policy.generation.colocated.enabled") is not False:
        return "the engines have no nodes of their own"
    nodes = int(number(value, "policy.generation.colocated.resources.num_nodes")) if value else 0
    if not nodes or given("cluster.num_nodes") in (None, 1):
        return "the servers get the GPUs of the node on which nobody trains"
    return ToDo(f"servers have nodes of their own: SERVER_NODES={nodes} sbatch scripts/slurm/grpo_vllm.sbatch …")


def _with_vllm(rule: Rule) -> Rule:
    return only_if("policy.generation.backend", lambda value: value == "vllm", "the engine is not vLLM", rule)


def _responses(given: Given) -> float:
    """Return the number of responses in a step of a program on rollouts."""
    part = "grpo" if given.algorithm == "grpo" else "distillation"
    return given.number(f"{part}.num_prompts_per_step") * given.number(f"{part}.num_generations_per_prompt", 1)


def _batch(value: Any, given: Given) -> Outcome:
    if given.algorithm == "distill" and value != _responses(given):
        return Refused("a step makes one update, of all its responses")
    return {"grpo.train_global_batch_size" if given.algorithm == "grpo" else "batch.global_batch_size": value}


def _updates(steps: float, given: Given) -> int:
    """Return a number of updates: schedules of NeMo RL count steps, here they count updates."""
    size = given.number("policy.train_global_batch_size")
    return int(steps) * (math.ceil(_responses(given) / size) if given.algorithm == "grpo" and size > 0 else 1)


def _warmup(value: Any, given: Given) -> Outcome:
    steps = number(value, "lr_warmup_iters")
    return {"optimizer.warmup_steps": _updates(steps, given)} if steps > 0 else "there is no warmup by default"


def _optimizer_of_pytorch(value: Any, given: Given) -> Outcome:
    """Return an optimizer with the weight decay that it has in PyTorch by default."""
    name, decay = str(value).rpartition(".")[2], "policy.optimizer.kwargs.weight_decay"
    if name == "Adam" and given.number(decay) > 0:
        return Refused("weight decay is AdamW's here, and a part of the gradient there")
    found = optimizer(value, given)
    if isinstance(found, str) or name != "AdamW" or given(decay) is not None:
        return found
    return {**found, "optimizer.weight_decay": 0.01}


def _switched(switch: str, rule: Rule) -> Rule:
    return only_if(switch, lambda value: value is True, f"{switch} is not set", rule)


def _server_options_of_nemo_rl(value: Any, given: Given) -> Outcome:
    room, precision = (given(f"policy.generation.vllm_cfg.{name}") for name in ("gpu_memory_utilization", "precision"))
    words = [] if room is None else ["--gpu-memory-utilization", str(room)]
    words += ["--quantization", "fp8_per_block"] * (precision == "fp8")
    return {"generation.vllm.arguments": words} if words else "the servers have the precision of model.dtype"


def _asynchronous(value: Any, given: Given) -> Outcome:
    return {"grpo.max_staleness": int(number(value, "max_trajectory_age_steps"))}


_OF_FILES = ("ResponseDataset", "PreferenceDataset", "BinaryPreferenceDataset", "OpenAIFormatDataset")
"""Names of NeMo RL for datasets in files of the user."""


def _dataset(key: str, section: str) -> Rule:
    """Return a rule for the name of the dataset that the keys of `section` describe."""

    def rule(value: Any, given: Given) -> Outcome:
        if value in _OF_FILES:
            part = "train" if key == "data.train" else "val"
            paths = (given(f"{section}.data_path"), given(f"data.{part}_data_path"))
            value = next((path for path in paths if path is not None), None)
            if value is None:
                return Refused("the path of its file is missing")
        elif not any(sign in str(value) for sign in "/.:"):
            return Refused("is NeMo RL's name of a dataset that it prepares; give a file or a dataset on the hub")
        split = given(f"{section}.split", "train")
        return {key: value if split == "train" else f"{value}:{split}"}

    return rule


def _path(section: str) -> Rule:
    """Return a rule for the path of a dataset whose name stands in the section data.default."""
    key = {"train": "data.train", "validation": "data.validation"}.get(section)

    def rule(value: Any, given: Given) -> Outcome:
        name = given("data.default.dataset_name", "ResponseDataset")
        if key is None or given(f"data.{section}.dataset_name") is not None:
            return "a part of data.train or data.validation"
        return _dataset(key, f"data.{section}")(name, given)

    return rule


def _columns(value: Any, given: Given) -> Outcome:
    """Return the columns that have other names than the fields. The rules of all keys of columns return the same."""
    second = "answer" if given.algorithm in ("grpo", "ppo") else "completion"
    keys = {"prompt": "input_key", second: "output_key"}
    sections = ("data.train", "data", "data.default")
    named = {
        field: next((found for part in sections if (found := given(f"{part}.{key}"))), key.partition("_")[0])
        for field, key in keys.items()
    }
    return {"data.columns": {field: name for field, name in named.items() if name != field}}


def _longest_response(value: Any, given: Given) -> Outcome:
    total = given.number("policy.max_total_sequence_length", math.inf)
    return {"grpo.max_new_tokens": None if number(value, "max_new_tokens") >= total else value}


def _estimator(value: Any, given: Given) -> Outcome:
    return Choice({
        "grpo": "the default",
        "gdpo": {"grpo.advantage_estimator": "gdpo"},
        "reinforce_plus_plus": {
            "grpo.advantage_estimator": "reinforce_plus_plus",
            "grpo.minus_baseline": given("grpo.adv_estimator.minus_baseline", True),
        },
    })(value, given)  # fmt: skip


def _of_grpo(key: str) -> Rule:
    """Return the rule for an option of NeMo RL's estimator grpo, which is also a key of the section grpo."""
    is_grpo = {None, "grpo"}.__contains__
    epsilon = {"grpo.advantage_epsilon": 1e-6}  # what NeMo RL adds to standard deviations
    return only_if(
        "grpo.adv_estimator.name",
        is_grpo,
        "an option of the estimator grpo",
        lambda value, given: {f"grpo.{key}": value, **(epsilon if key == "normalize_rewards" and value else {})},
    )


def _overlong(value: Any, given: Given) -> Outcome:
    part = "grpo.reward_shaping"
    if given(f"{part}.enabled") is not True or given(f"{part}.stop_properly_penalty_coef") is not None:
        return "the penalty is off"
    total = given.number("policy.max_total_sequence_length", math.inf)
    longest = min(given.number("policy.generation.max_new_tokens", total), total)
    at = given.number(f"{part}.max_response_length", longest)
    if given.number(f"{part}.overlong_buffer_penalty", 1) != 1 or at != longest:
        return Refused("the penalty here rises to 1 at grpo.max_new_tokens")
    return {"grpo.overlong_cache_length": value}


def _num_steps(given: Given) -> Any:
    """Return the number of steps of the run."""
    sections = ("sft", "dpo", "rm", "grpo", "distillation")
    return next((found for part in sections if (found := given(f"{part}.max_num_steps")) is not None), None)


def _schedules(value: Any, given: Given) -> Outcome:
    """Return the schedule of a list of PyTorch's: a warmup, then a constant rate or a cosine."""
    parts = [part for part in value if "name" in part]
    milestones = next((part["milestones"] for part in value if "milestones" in part), None)
    named = {str(part.get("name")).rpartition(".")[2]: part.get("kwargs", {}) for part in parts}
    if not named:
        return {"optimizer.schedule": "constant"}
    warmup, constant, cosine = (named.get(f"{name}LR") for name in ("Linear", "Constant", "CosineAnnealing"))
    if len(named) > 2 or (constant is None) == (cosine is None) or (constant or {}).get("factor", 1.0) != 1:
        return Refused("set optimizer.schedule and optimizer.warmup_steps")
    rises = int(number((warmup or {}).get("total_iters", 5), "total_iters")) if warmup is not None else 0
    if warmup and (warmup.get("end_factor", 1.0) != 1 or (milestones is not None and milestones != [rises])):
        return Refused("set optimizer.warmup_steps: a warmup rises to the whole rate, and the next schedule follows")
    if cosine and cosine.get("T_max") not in (None, (steps := _num_steps(given)), (steps or 0) - rises):
        return Refused("the rate decays over the run")
    found: dict[str, Any] = {"optimizer.schedule": "constant" if cosine is None else "cosine"}
    if warmup is not None:
        found["optimizer.warmup_steps"] = _updates(rises, given)
        found[TO_DO] = f"the rate rises from 0 here, there from {warmup.get('start_factor', 1 / 3):.3g} of it"
    if cosine and "eta_min" in cosine:
        found["optimizer.min_lr"] = number(cosine["eta_min"], "eta_min")
    return found


def _decay(value: Any, given: Given) -> Outcome:
    """Return why the number of steps of the decay has no key: it is that of the run."""
    if given(f"{_CFG}.scheduler.lr_decay_style") == "constant":
        return "a constant rate does not decay"
    return "the length of the run" if value == _num_steps(given) else Refused("the rate decays over the run")


def _schedule(value: Any, given: Given) -> Outcome:
    """Return the schedule of a single one of PyTorch's, whose arguments are keys of their own."""
    prefix = "policy.scheduler.kwargs."
    arguments = {key.removeprefix(prefix): part for key, part in given.values.items() if key.startswith(prefix)}
    return _schedules([{"name": value, "kwargs": arguments}], given)


def _is_mixture(given: Given) -> bool:
    return given.number(f"{_CFG}.expert_model_parallel_size", 1) > 1 or bool(
        re.search(r"(?i)A\d+B|moe|mixtral|deepseek-v|gpt-oss|moonlight", str(given("policy.model_name")))
    )


def _of_mixture(rule: Rule) -> Rule:
    return lambda value, given: rule(value, given) if _is_mixture(given) else "the model is no mixture"


def _frozen_router(value: Any, given: Given) -> Outcome:
    return (
        Refused("routers are trained")
        if value is True and _is_mixture(given)
        else "there is no router, or it is trained"
    )


def _math(value: Any, given: Given) -> Outcome:
    if given("env.math.math_verify_impl", "hf_math_verify") != "hf_math_verify":
        return Refused("another reading of answers than the judge math has; write it as environment.function")
    return {"environment.name": "math"}


def _math_workers(value: Any, given: Given) -> Outcome:
    judge = _math(value, given)
    return "an option of the judge" if isinstance(judge, str) else {**judge, "environment.num_workers": value}


def _longest_prompt(value: Any, given: Given) -> Outcome:
    total = given.number("policy.max_total_sequence_length", math.inf)
    room = total - given.number("policy.generation.max_new_tokens", 0)
    if number(value, "max_input_seq_length") >= (room or total):
        return "prompts have the room that grpo.max_new_tokens leaves"
    return ToDo("longer prompts are not left out here")


def _of_teacher(megatron: bool, size: str) -> Rule:
    return _by_backend(megatron, to(f"distillation.teacher_parallel.{size}"), "teacher.megatron_cfg")


NEMO_RL: dict[tuple[str, str], Rule] = {
    ("", "policy.train_global_batch_size"): _batch,
    ("", "policy.train_micro_batch_size"): said("packs hold as many sequences as fit"),
    ("", "policy.precision"): DTYPE,
    ("", f"{_CFG}.pipeline_dtype"): said("policy.precision"),
    ("", f"{_CFG}.optimizer.bf16"): said("policy.precision"),
    ("", f"{_CFG}.optimizer.fp16"): said("policy.precision"),
    ("", f"{_CFG}.optimizer.optimizer"): _by_backend(True, optimizer),
    ("", "policy.optimizer.name"): _by_backend(False, _optimizer_of_pytorch),
    ("", "policy.optimizer.kwargs.amsgrad"): _by_backend(False, refused("the optimizer is AdamW without AMSGrad")),
    **{
        ("", f"policy.optimizer.kwargs.{theirs}"): _by_backend(False, to(f"optimizer.{ours}"))
        for theirs, ours in {"lr": "lr", "weight_decay": "weight_decay", "eps": "adam_eps"}.items()
    },
    ("", "policy.optimizer.kwargs.betas"): _by_backend(False, betas),
    **{
        ("", f"{_CFG}.optimizer.{key}"): _by_backend(True, to(f"optimizer.{key}"))
        for key in ("lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps")
    },
    ("", f"{_CFG}.optimizer.min_lr"): _by_backend(True, lowest_rate(f"{_CFG}.scheduler.lr_decay_style")),
    **{
        ("", f"{_CFG}.scheduler.{key}"): said(f"{_CFG}.optimizer.weight_decay")
        for key in ("start_weight_decay", "end_weight_decay")
    },
    ("", f"{_CFG}.scheduler.lr_decay_style"): _by_backend(True, SCHEDULE),
    ("", f"{_CFG}.scheduler.lr_decay_iters"): _by_backend(True, _decay),
    ("", f"{_CFG}.scheduler.lr_warmup_iters"): _by_backend(True, _warmup),
    ("", "policy.scheduler"): _by_backend(False, _schedules),
    ("", "policy.scheduler.name"): _by_backend(False, _schedule),
    ("", "policy.scheduler.kwargs.*"): said("a part of optimizer.schedule"),
    ("", f"{_CFG}.freeze_moe_router"): _frozen_router,
    **{
        ("", key): refused(reason, harmless=(None,))
        for key, reason in {
            "policy.hf_config_overrides.*": "write the values into config.json of model.path",
            "policy.tokenizer.chat_template_kwargs.*": "write the values into the template of data.chat_template",
        }.items()
    },
    ("distill", "dpo.topk_logits_k"): to("distillation.topk"),
    ("distill", "dpo.num_prompts_per_step"): lambda value, given: {
        "distillation.on_policy": True,
        "batch.global_batch_size": int(_responses(given)),
    },
    **{
        ("distill", f"dpo.{key}"): said("a part of batch.global_batch_size")
        for key in ("num_generations_per_prompt", "max_rollout_turns")
    },
    ("distill", "dpo.val_batch_size"): said("a validation uses all of data.validation"),
    ("distill", "dpo.max_val_samples"): said("a validation uses all of data.validation"),
    ("distill", "dpo.val_at_end"): to("trainer.validate_at_end"),
    ("distill", "teacher.model_name"): to("distillation.teacher"),
    **{
        ("distill", f"teacher.megatron_cfg.{key}_parallel_size"): _of_teacher(True, f"{key}_parallel_size")
        for key in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    },
    ("distill", "teacher.dtensor_cfg.tensor_parallel_size"): _of_teacher(False, "tensor_model_parallel_size"),
    ("distill", "teacher.dtensor_cfg.context_parallel_size"): _of_teacher(False, "context_parallel_size"),
    ("distill", "teacher.*"): said("the teacher computes as the student does"),
    ("distill", "policy.generation.backend"): said("the training processes generate"),
    ("distill", "policy.generation.vllm_cfg.tensor_parallel_size"): said("the training processes generate"),
    ("distill", "policy.generation.max_new_tokens"): lambda value, given: (
        {"distillation.max_new_tokens": value}
        if number(value, "max_new_tokens") < given.number("policy.max_total_sequence_length", math.inf)
        else Refused("must leave room for the prompts in policy.max_total_sequence_length")
    ),
    ("", "policy.hf_config_overrides"): refused("write the values into config.json of model.path"),
    ("", "policy.generation.stop_token_ids"): refused("the end tokens are the model's; grpo.stop_strings adds texts"),
    ("", "policy.tokenizer.name"): lambda value, given: (
        "the tokenizer is that of model.path"
        if value == given("policy.model_name")
        else Refused("the tokenizer is that of model.path")
    ),
    ("", f"{_CFG}.activation_checkpointing"): _by_backend(True, true_for(to("model.recompute_activations"))),
    ("", "policy.dtensor_cfg.activation_checkpointing"): _by_backend(
        False, true_for(to("model.recompute_activations"))
    ),
    **{
        ("", f"{_CFG}.{key}_parallel_size"): _by_backend(True, to(f"parallel.{key}_parallel_size"))
        for key in ("tensor_model", "pipeline_model", "context", "expert_model")
    },
    ("", f"{_CFG}.sequence_parallel"): _by_backend(True, sequence_parallel(f"{_CFG}.tensor_model_parallel_size")),
    ("", "policy.dtensor_cfg.tensor_parallel_size"): _by_backend(False, to("parallel.tensor_model_parallel_size")),
    ("", "policy.dtensor_cfg.context_parallel_size"): _by_backend(False, to("parallel.context_parallel_size")),
    ("", "policy.dtensor_cfg.sequence_parallel"): _by_backend(
        False, sequence_parallel("policy.dtensor_cfg.tensor_parallel_size")
    ),
    **{
        ("", f"{_CFG}.num_layers_in_{place}_pipeline_stage"): _by_backend(
            True, to(f"parallel.num_layers_in_{place}_pipeline_stage")
        )
        for place in ("first", "last")
    },
    ("", f"{_CFG}.moe_router_load_balancing_type"): _by_backend(
        True, _of_mixture(Choice({"none": {"model.moe_aux_loss_coeff": 0.0}}))
    ),
    ("", f"{_CFG}.moe_router_bias_update_rate"): _by_backend(
        True, _of_mixture(to("model.moe_router_bias_update_rate"))
    ),
    ("", f"{_CFG}.expert_tensor_parallel_size"): _by_backend(
        True, _of_mixture(to("parallel.expert_tensor_parallel_size"))
    ),
    ("", f"{_CFG}.scheduler.lr_warmup_init"): _by_backend(True, first_rate),
    ("", f"{_CFG}.optimizer.use_precision_aware_optimizer"): said(
        "optimizer.moments_dtype is the precision of the moments"
    ),
    ("", f"{_CFG}.optimizer.optimizer_cpu_offload"): _by_backend(True, true_for(to("optimizer.offload"))),
    ("", f"{_CFG}.optimizer.optimizer_offload_fraction"): said("optimizer.offload moves the whole optimizer"),
    ("", "policy.offload_optimizer_for_logprob"): said("optimizer.offload moves the whole optimizer"),
    ("", f"{_CFG}.optimizer.clip_grad"): _by_backend(True, to("optimizer.clip_grad")),
    ("", "policy.max_grad_norm"): _by_backend(False, to("optimizer.clip_grad")),
    ("", "policy.sequence_packing.enabled"): said("batches are always packed by their tokens"),
    ("", "policy.dynamic_batching.enabled"): said("batches are always packed by their tokens"),
    **{
        ("", f"policy.{part}.train_mb_tokens"): _switched(f"policy.{part}.enabled", to("batch.tokens_per_pack"))
        for part in ("sequence_packing", "dynamic_batching")
    },
    ("", "policy.tokenizer.chat_template_kwargs"): refused("write the values into the template of data.chat_template"),
    ("", "policy.tokenizer.chat_template"): lambda value, given: (
        "the tokenizer's template is the default" if value == "default" else {"data.chat_template": value}
    ),
    **{
        ("", f"policy.dtensor_cfg.lora_cfg.{theirs}"): _switched(
            "policy.dtensor_cfg.lora_cfg.enabled", to(f"model.lora.{ours}")
        )
        for theirs, ours in {"dim": "rank", "alpha": "alpha", "dropout": "dropout"}.items()
    },
    ("", "policy.dtensor_cfg.lora_cfg.target_modules"): _switched("policy.dtensor_cfg.lora_cfg.enabled", targets),
    ("", "policy.dtensor_cfg.lora_cfg.enabled"): said("the keys of model.lora turn LoRA on"),
    ("", "policy.generation.backend"): Choice(
        {"vllm": {"generation.backend": "vllm"}, "megatron": {"generation.backend": "megatron"}}
    ),
    ("", "policy.generation.colocated.enabled"): _with_vllm(to("generation.offload")),
    ("", "policy.generation.colocated.resources.num_nodes"): _nodes_of_servers,
    ("", "policy.generation.colocated.resources.*"): said("servers get the GPUs on which nobody trains"),
    ("", "policy.generation.vllm_cfg.tensor_parallel_size"): _with_vllm(servers),
    **{
        ("", f"policy.generation.vllm_cfg.{part}"): _with_vllm(_server_options_of_nemo_rl)
        for part in ("gpu_memory_utilization", "precision")
    },
    ("", "policy.megatron_cfg.fp8_cfg.enabled"): true_for(
        lambda value, given: FP8_RECIPE(given("policy.megatron_cfg.fp8_cfg.fp8_recipe", "delayed"), given)
    ),
    ("", "policy.megatron_cfg.fp8_cfg.fp8_recipe"): _switched("policy.megatron_cfg.fp8_cfg.enabled", FP8_RECIPE),
    ("", "policy.generation.vllm_cfg.*"): said("options of vLLM's server are written in generation.vllm.arguments"),
    ("", "policy.generation.vllm_kwargs"): said("options of vLLM's server are written in generation.vllm.arguments"),
    ("", "grpo.async_grpo.enabled"): said("grpo.max_staleness turns it on"),
    ("", "grpo.async_grpo.max_trajectory_age_steps"): _switched("grpo.async_grpo.enabled", _asynchronous),
    ("", "grpo.max_rollout_turns"): lambda value, given: (
        "one response is the default" if value == 1 else {"environment.max_turns": value}
    ),
    **{
        ("", f"{part}.max_num_steps"): positive("trainer.max_steps", "the run counts epochs")
        for part in ("grpo", "dpo")
    },
    **{
        ("", f"{part}.val_period"): positive("trainer.validation_interval", "nothing is validated")
        for part in ("grpo", "dpo")
    },
    ("", "checkpointing.save_period"): only_if(
        "checkpointing.enabled",
        lambda value: value is not False,
        "checkpointing is off",
        positive("checkpoint.save_interval", "a run always saves at its end"),
    ),
    ("", "checkpointing.metric_name"): said("set checkpoint.best_metric to a metric's name here"),
    ("", "checkpointing.higher_is_better"): said("a part of checkpoint.best_mode"),
    ("", "checkpointing.checkpoint_must_save_by"): said(
        "a run saves on a signal; checkpoint.save_minutes is an interval"
    ),
    ("", "checkpointing.save_consolidated"): said("the model is always exported at the end"),
    ("", "checkpointing.model_save_format"): said("the model is exported as safetensors"),
    ("", "data.max_input_seq_length"): _longest_prompt,
    ("", "data.dataset_name"): _dataset("data.train", "data"),
    ("", "data.train.dataset_name"): _dataset("data.train", "data.train"),
    ("", "data.validation.dataset_name"): _dataset("data.validation", "data.validation"),
    ("", "data.val_data_path"): to("data.validation"),
    **{("", f"data.{key}"): said("a part of data.train or data.validation") for key in ("split", "train_data_path")},
    **{("", f"data.{part}{key}_key"): _columns for part in ("", "train.", "default.") for key in ("input", "output")},
    **{
        ("", f"data.{part}{file}"): lambda value, given: (
            ToDo("each record holds its whole prompt: write the file's text into the records") if value else "no file"
        )
        for part in ("", "train.", "validation.", "default.")
        for file in ("prompt_file", "system_prompt_file")
    },
    **{
        ("", f"data.{section}.{key}"): rule
        for section in ("train", "validation", "default")
        for key, rule in {
            "split": said("a part of data.train or data.validation"),
            "data_path": _path(section),
            "subset": refused("a dataset on the hub has no subset here; write its records into a file"),
            "split_validation_size": refused("give data.validation records of their own", harmless=(None, 0, 0.0)),
            "repeat": said("set trainer.max_epochs"),
            "*": said("each record holds its whole prompt, and one judge judges all"),
        }.items()
    },
    ("", "data.default.dataset_name"): said("a part of data.train and data.validation"),
    ("", "env.math.num_workers"): _math_workers,
    ("", "env.math.math_verify_impl"): _math,
    ("", "env.math.*"): said("an option of the judge that NeMo RL has"),
    ("", "env.*"): refused("write this environment as environment.function", harmless=(None, False)),
    ("", "loss_fn.use_cispo"): true_for(to("loss.clip_type", lambda _: "cispo")),
    ("", "policy.generation.max_new_tokens"): _longest_response,
    ("", "grpo.use_dynamic_sampling"): true_for(
        lambda value, given: {"grpo.dynamic_sampling_rounds": given("grpo.dynamic_sampling_max_gen_batches", 10)}
    ),
    ("", "grpo.dynamic_sampling_max_gen_batches"): said("a part of grpo.dynamic_sampling_rounds"),
    ("", "grpo.batch_multiplier"): _switched(
        "grpo.use_dynamic_sampling",
        lambda value, given: (
            ToDo("a round samples the missing prompts only, so the data last longer")
            if number(value, "batch_multiplier") > 1
            else "as here"
        ),
    ),
    ("", "grpo.adv_estimator.name"): _estimator,
    ("", "grpo.adv_estimator.minus_baseline"): said("a part of grpo.advantage_estimator"),
    **{("", f"grpo.adv_estimator.{key}"): _of_grpo(key) for key in ("normalize_rewards", "use_leave_one_out_baseline")},
    **{("", f"grpo.{key}"): _of_grpo(key) for key in ("normalize_rewards", "use_leave_one_out_baseline")},
    ("", "grpo.reward_shaping.enabled"): said("a part of grpo.overlong_cache_length"),
    ("", "grpo.reward_shaping.overlong_buffer_length"): _overlong,
    ("", "grpo.reward_shaping.stop_properly_penalty_coef"): _switched(
        "grpo.reward_shaping.enabled", refused("rewards of truncated responses are not scaled", harmless=(None, 1, 1.0))
    ),
    ("", "grpo.reward_shaping.*"): said("a part of grpo.overlong_cache_length"),
    ("", "grpo.reward_scaling.enabled"): refused("rewards are not scaled; scale them in the judge"),
    ("", "grpo.reward_scaling.*"): said("options of grpo.reward_scaling.enabled"),
    **{
        ("", f"grpo.{key}"): refused("does not exist here")
        for key in (
            "advantage_clip_low",
            "advantage_clip_high",
            "seq_logprob_error_threshold",
            "invalid_tool_call_advantage",
            "malformed_thinking_advantage",
            "stop_at_validation_metric",
        )
    },
    ("", "grpo.skip_reference_policy_logprobs_calculation"): said("a run without a KL term has no reference"),
    ("", "grpo.calculate_advantages_on_gpu"): said("advantages are computed on the CPU"),
    ("", "data_plane.*"): said("there is no other store than the processes' memory"),
    ("", f"{_CFG}.peft.enabled"): said("the keys of model.lora turn LoRA on"),
    **{
        ("", f"{_CFG}.peft.{theirs}"): _switched(f"{_CFG}.peft.enabled", to(f"model.lora.{ours}"))
        for theirs, ours in {"dim": "rank", "alpha": "alpha", "dropout": "dropout"}.items()
    },
    ("", f"{_CFG}.peft.target_modules"): _switched(f"{_CFG}.peft.enabled", targets),
    ("", f"{_CFG}.peft.exclude_modules"): _switched(
        f"{_CFG}.peft.enabled", refused("name the projections in model.lora.target_modules", harmless=(None, [], ()))
    ),
    ("", f"{_CFG}.peft.*"): said("adapters have the options of the section model.lora only"),
    ("", "logger.wandb_enabled"): true_for(
        lambda value, given: {"logging.wandb": given("logger.wandb.project", "mcore_rl")}
    ),
    ("", "logger.wandb.project"): said("a part of logging.wandb"),
    ("", "logger.wandb.name"): _switched("logger.wandb_enabled", to("logging.run_name")),
    ("", "logger.tensorboard_enabled"): true_for(to("logging.tensorboard")),
    ("", "logger.mlflow_enabled"): true_for(
        lambda value, given: {"logging.mlflow": given("logger.mlflow.experiment_name", "mcore_rl")}
    ),
    ("", "logger.mlflow.experiment_name"): said("a part of logging.mlflow"),
    ("", "logger.mlflow.run_name"): _switched("logger.mlflow_enabled", to("logging.run_name")),
}

DEFAULTS_OF_NEMO_RL: dict[str, dict[str, Any]] = {
    **{name: {"policy.scheduler": ()} for name in ("sft", "dpo", "rm", "distill")},
    "grpo": {
        "policy.scheduler": (),
        "grpo.num_prompts_per_step": 32, "grpo.num_generations_per_prompt": 16, "grpo.max_num_epochs": 1,
        "grpo.normalize_rewards": True, "grpo.use_leave_one_out_baseline": True, "grpo.seed": 42,
        "loss_fn.token_level_loss": True, "loss_fn.ratio_clip_min": 0.2, "loss_fn.ratio_clip_max": 0.2,
        "loss_fn.reference_policy_kl_penalty": 0.01, "loss_fn.reference_policy_kl_type": "k3",
        "loss_fn.kl_input_clamp_value": 20.0, "loss_fn.kl_output_clamp_value": 10.0,
    },
}  # fmt: skip
"""Defaults of NeMo RL's programs by algorithm, of November 2026. Older versions had none: their files name every value.
PyTorch's optimizers have a constant rate without a schedule."""
