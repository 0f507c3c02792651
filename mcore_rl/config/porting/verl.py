"""Rules for the values of verl and NeMo RL. Other keys keep their values, under the names in the table of keys."""

from __future__ import annotations

from typing import Any

from mcore_rl.config.porting.rules import (
    DTYPE,
    FP8_RECIPE,
    SCHEDULE,
    Choice,
    Given,
    Outcome,
    Rule,
    number,
    only_if,
    optimizer,
    positive,
    said,
    servers,
    targets,
    to,
    trackers,
    true_for,
)

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"

# ------------------------------------------------------------------ verl


def _sources(key: str) -> Rule:
    def rule(value: Any, given: Given) -> Outcome:
        files = list(value) if isinstance(value, list | tuple) else [value]
        if len(files) == 1:
            return {key: files[0]}
        return {key: dict.fromkeys(files, 1.0) if key == "data.train" else {f"part{i}": f for i, f in enumerate(files)}}

    return rule


def _mini_batch(value: Any, given: Given) -> Outcome:
    """Convert a mini-batch, which counts prompts, into one that counts responses."""
    return {"grpo.train_global_batch_size": int(number(value, "ppo_mini_batch_size") * given.number(f"{ROLLOUT}.n", 1))}


def _columns(value: Any, given: Given) -> Outcome:
    """Return the columns that have other names than the fields. The rules of all keys of columns return the same."""
    keys = {"prompt": "data.prompt_key", "images": "data.image_key"}
    named = {field: given(key, field) for field, key in keys.items()}
    others = {field: name for field, name in named.items() if name != field}
    return {"data.columns": others} if others else f"{value} is the default"


def _tower(value: Any, given: Given) -> Outcome:
    if value in (True, "true", "True"):
        return {"model.vision_tower": "frozen"}
    reads_images = given.values.get("data.image_key") is not None
    return {"model.vision_tower": "trained"} if reads_images else "data.image_key is not set, so there is no image"


def _length(value: Any, given: Given) -> Outcome:
    prompt, response = (int(given.number(f"data.max_{part}_length")) for part in ("prompt", "response"))
    return {"data.max_sequence_length": prompt + response}


def _clip(value: Any, given: Given) -> Outcome:
    low, high = (given(f"{ACTOR}.clip_ratio_{side}", value) for side in ("low", "high"))
    if str(given(f"{ACTOR}.policy_loss.loss_mode", "vanilla")).startswith("dppo"):
        return {"loss.divergence_clip_min": low, "loss.divergence_clip_max": high}
    return {"loss.ratio_clip_min": low, "loss.ratio_clip_max": high}


def _kl_coefficient(switch: str, other: str) -> Rule:
    """Return a rule for the coefficient of the KL that `switch` turns on; it is 0 if `other` is not on either."""

    def rule(value: Any, given: Given) -> Outcome:
        if given(switch) is True:
            return {"loss.reference_policy_kl_penalty": value}
        return f"{switch} is not set" if given(other) is True else {"loss.reference_policy_kl_penalty": 0.0}

    return rule


def _estimator_of_kl(value: Any, given: Given) -> Outcome:
    name, plus, _ = str(value).partition("+")
    names = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    if given(f"{ACTOR}.use_kl_loss") is not True and given("algorithm.use_kl_in_reward") is not True:
        return "there is no KL term"
    if name not in names:
        return f"{value} does not exist here; it may be one of {', '.join(names)}"
    return {"loss.kl_estimator": names[name], "loss.kl_gradient": "unbiased" if plus else "value"}


def _advantages(value: Any, given: Given) -> Outcome:
    normalizes = given("algorithm.norm_adv_by_std_in_grpo", True) is not False
    grpo = {"grpo.advantage_estimator": "grpo" if normalizes else "dr_grpo"}
    plus = {"grpo.advantage_estimator": "reinforce_plus_plus"}
    return Choice({
        "gae": "the program ppo has it",
        "grpo": grpo, "grpo_vectorized": grpo,
        "reinforce_plus_plus": plus,
        "reinforce_plus_plus_baseline": plus | {"grpo.minus_baseline": True},
        **{name: {"grpo.advantage_estimator": "rloo"} for name in ("rloo", "rloo_vectorized")},
        "gdpo": {"grpo.advantage_estimator": "gdpo"},
        **{
            name: {"grpo.advantage_estimator": "optimal_token_baseline"}
            for name in ("optimal_token_baseline", "tir_optimal_token_baseline")
        },
    })(value, given)  # fmt: skip


def _loss(value: Any, given: Given) -> Outcome:
    return Choice({
        "vanilla": {"loss.name": "clipped_pg"},
        "gspo": {"loss.sequence_level_importance_ratios": True, "loss.token_level_loss": False},
        "cispo": {"loss.clip_type": "cispo"},
        "gpg": {"loss.disable_ppo_ratio": True},
        "geo_mean": {"loss.name": "gmpo"},
        **{name: {"loss.name": name} for name in ("dppo_tv", "dppo_kl", "sapo")},
    })(value, given)  # fmt: skip


def _aggregation(value: Any, given: Given) -> Outcome:
    mode = str(value)
    by_clipping = given(f"{ACTOR}.policy_loss.loss_mode", "vanilla") in ("vanilla", "gspo", "cispo", "gpg")
    found = {} if not by_clipping else {"loss.token_level_loss": mode == "token-mean"}
    if mode == "seq-mean-token-sum-norm":
        longest = given(f"{ACTOR}.loss_scale_factor") or given("data.max_response_length")
        return {**found, "loss.dr_grpo_max_tokens": longest}
    if mode not in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        return f"{value} does not exist here"
    usual = by_clipping and mode == "token-mean"
    return found if usual else {**found, "loss.aggregation": mode.replace("-", "_")}


def _warmup(steps: str) -> Rule:
    return only_if(steps, lambda value: value is None or number(value, steps) <= 0, f"{steps} is set", positive(
        "optimizer.warmup_ratio", "there is no warmup by default"
    ))  # fmt: skip


def _with_vllm(rule: Rule) -> Rule:
    return only_if(f"{ROLLOUT}.name", lambda value: value == "vllm", "the engine is not vLLM", rule)


def _server_options(value: Any, given: Given) -> Outcome:
    options = [
        ("--gpu-memory-utilization", given(f"{ROLLOUT}.gpu_memory_utilization")),
        ("--max-model-len", given(f"{ROLLOUT}.max_model_len")),
        ("--max-num-seqs", given(f"{ROLLOUT}.max_num_seqs")),
        ("--max-num-batched-tokens", given(f"{ROLLOUT}.max_num_batched_tokens")),
        ("--quantization", {"fp8": "fp8_per_block"}.get(given(f"{ROLLOUT}.quantization"))),
    ]
    words = [word for option, setting in options if setting is not None for word in (option, str(setting))]
    return {"generation.vllm.arguments": [*words, *["--enforce-eager"] * (given(f"{ROLLOUT}.enforce_eager") is True)]}


def _lora(rule: Rule) -> Rule:
    def has(given: Given) -> bool:
        return max(given.number(f"{MODEL}.lora_rank"), given.number(f"{MODEL}.lora.rank")) > 0

    return lambda value, given: rule(value, given) if has(given) else "lora_rank is 0"


def _sequence_parallel(size: str) -> Rule:
    return true_for(only_if(
        size, lambda value: value is not None and number(value, size) > 1, f"{size} is 1",
        to("parallel.sequence_parallel"),
    ))  # fmt: skip


def _validates(rule: Rule) -> Rule:
    return only_if("data.val_files", bool, "data.val_files is missing", rule)


def _with_reward_model(rule: Rule) -> Rule:
    switches = ("reward.reward_model.enable", "reward_model.enable")

    def of_model(value: Any, given: Given) -> Outcome:
        is_used = any(given(switch) is True for switch in switches)
        return rule(value, given) if is_used else "no reward model is enabled"

    return of_model


def _reward_model(value: Any, given: Given) -> Outcome:
    return {"environment.name": "reward_model", "environment.path": value}


def _betas(value: Any, given: Given) -> Outcome:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return f"must be two numbers, got {value!r}"
    return {"optimizer.adam_beta1": value[0], "optimizer.adam_beta2": value[1]}


def _of_critic(rule: Rule) -> Rule:
    """Return a rule for the critic's optimizer like that for the policy's."""

    def renamed(value: Any, given: Given) -> Outcome:
        outcome = rule(value, given)
        return outcome if isinstance(outcome, str) else {f"critic.{key}": part for key, part in outcome.items()}

    return renamed


def _lowest_rate(optim: str) -> Rule:
    return lambda value, given: {"optimizer.min_lr": number(value, "min_lr_ratio") * given.number(f"{optim}.lr")}


def _of_optimizer(optim: str) -> dict[str, Rule]:
    """Return the rules for the options of an optimizer, without their prefix."""
    return {
        "optimizer": optimizer,
        "betas": _betas,
        "weight_decay": to("optimizer.weight_decay"),
        "clip_grad": to("optimizer.clip_grad"),
        "lr_warmup_steps": positive("optimizer.warmup_steps", "lr_warmup_steps_ratio counts"),
        "lr_warmup_steps_ratio": _warmup(f"{optim}.lr_warmup_steps"),
        "min_lr_ratio": _lowest_rate(optim),
        "lr_scheduler_type": SCHEDULE,
        "warmup_style": SCHEDULE,
    }


_OPTIM = f"{ACTOR}.optim"
_MEGATRON = f"{ACTOR}.megatron"
_FP8 = f"{_MEGATRON}.override_transformer_config"
VERL: dict[tuple[str, str], Rule] = {
    ("", "data.train_files"): _sources("data.train"),
    ("", "data.val_files"): _sources("data.validation"),
    ("", "data.max_prompt_length"): _length,
    ("", "data.prompt_key"): _columns,
    ("", "data.image_key"): _columns,
    ("", f"{ACTOR}.freeze_vision_tower"): _tower,
    ("", "data.train_max_samples"): positive("data.max_samples", "all records are used by default"),
    ("", "data.truncation"): said("prompts are never truncated; longer ones are dropped"),
    ("", "data.filter_overlong_prompts"): said("longer prompts are always dropped"),
    ("", f"{ACTOR}.ppo_mini_batch_size"): _mini_batch,
    ("", f"{ACTOR}.ppo_micro_batch_size"): said("packs hold as many sequences as fit"),
    ("", f"{ACTOR}.ppo_micro_batch_size_per_gpu"): said("packs hold as many sequences as fit"),
    ("", f"{ACTOR}.ppo_max_token_len_per_gpu"): only_if(
        f"{ACTOR}.use_dynamic_bsz",
        lambda value: value is True,
        "use_dynamic_bsz is not set",
        to("batch.tokens_per_pack"),
    ),
    ("", f"{ACTOR}.use_dynamic_bsz"): said("batches are always packed by their tokens"),
    ("", f"{ACTOR}.clip_ratio"): _clip,
    ("", f"{ACTOR}.clip_ratio_low"): _clip,
    ("", f"{ACTOR}.clip_ratio_high"): _clip,
    ("", f"{ACTOR}.use_kl_loss"): said("a part of loss.reference_policy_kl_penalty"),
    ("", f"{ACTOR}.kl_loss_coef"): _kl_coefficient(f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"),
    ("", "algorithm.kl_ctrl.kl_coef"): _kl_coefficient("algorithm.use_kl_in_reward", f"{ACTOR}.use_kl_loss"),
    ("", "algorithm.use_kl_in_reward"): true_for(to("loss.use_kl_in_reward")),
    ("", f"{ACTOR}.kl_loss_type"): _estimator_of_kl,
    ("", "algorithm.kl_penalty"): only_if(
        "algorithm.use_kl_in_reward", lambda v: v is True, "there is no KL in rewards", _estimator_of_kl
    ),
    ("", "algorithm.adv_estimator"): _advantages,
    ("", "algorithm.norm_adv_by_std_in_grpo"): said("a part of grpo.advantage_estimator"),
    ("", f"{ACTOR}.policy_loss.loss_mode"): _loss,
    ("", f"{ACTOR}.loss_agg_mode"): _aggregation,
    ("", f"{ACTOR}.loss_scale_factor"): said("a part of loss_agg_mode"),
    ("", f"{ACTOR}.tau_pos"): only_if(
        f"{ACTOR}.policy_loss.loss_mode", lambda v: v == "sapo", "the loss is not sapo", to("loss.tau_pos")
    ),
    ("", f"{ACTOR}.tau_neg"): only_if(
        f"{ACTOR}.policy_loss.loss_mode", lambda v: v == "sapo", "the loss is not sapo", to("loss.tau_neg")
    ),
    **{("", f"{_OPTIM}.{key}"): rule for key, rule in _of_optimizer(_OPTIM).items()},
    **{("", f"critic.optim.{key}"): _of_critic(rule) for key, rule in _of_optimizer("critic.optim").items()},
    ("", "critic.optim.lr"): to("critic.optimizer.lr"),
    ("", "critic.optim.*"): said("an option of PyTorch's optimizers"),
    **{
        ("", f"{part}.rollout.tensor_model_parallel_size"): _with_reward_model(
            to("environment.parallel.tensor_model_parallel_size")
        )
        for part in ("reward.reward_model", "reward_model")
    },
    **{
        ("", key): _with_reward_model(_reward_model)
        for key in ("reward.reward_model.model_path", "reward_model.model.path")
    },
    ("", "distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size"): to(
        "distillation.teacher_parallel.tensor_model_parallel_size"
    ),
    ("", f"{_OPTIM}.total_training_steps"): positive("trainer.max_steps", "the run counts epochs"),
    ("", "trainer.total_training_steps"): positive("trainer.max_steps", "the run counts epochs"),
    ("", "trainer.save_freq"): positive("checkpoint.save_interval", "a run always saves at its end"),
    ("", "trainer.test_freq"): _validates(positive("trainer.validation_interval", "nothing is validated")),
    ("", "trainer.val_before_train"): _validates(to("trainer.validate_at_start")),
    ("", "trainer.logger"): trackers,
    ("", "trainer.project_name"): said("the name of the tracker's project"),
    ("", "trainer.resume_mode"): Choice(
        {"auto": {"checkpoint.resume": "auto"}, "disable": {"checkpoint.resume": "none"}}
    ),
    ("", "trainer.resume_from_path"): said("checkpoints of verl cannot be read"),
    ("", f"{MODEL}.enable_gradient_checkpointing"): true_for(to("model.recompute_activations")),
    ("", f"{MODEL}.lora_rank"): _lora(to("model.lora.rank")),
    ("", f"{MODEL}.lora_alpha"): _lora(to("model.lora.alpha")),
    ("", f"{MODEL}.target_modules"): _lora(targets),
    **{("", f"{MODEL}.lora.{part}"): _lora(to(f"model.lora.{part}")) for part in ("rank", "alpha", "dropout")},
    ("", f"{MODEL}.lora.target_modules"): _lora(targets),
    **{("", f"{ACTOR}.{part}"): DTYPE for part in ("megatron.dtype", "fsdp_config.model_dtype", "fsdp_config.dtype")},
    ("", f"{_MEGATRON}.sequence_parallel"): _sequence_parallel(f"{_MEGATRON}.tensor_model_parallel_size"),
    ("", f"{_MEGATRON}.override_transformer_config.recompute_granularity"): Choice(
        {"full": {"model.recompute_activations": True}}
    ),
    ("", f"{_FP8}.fp8_recipe"): only_if(f"{_FP8}.fp8", bool, "fp8 is not set", FP8_RECIPE),
    ("", f"{_FP8}.fp8"): lambda value, given: (
        FP8_RECIPE(given(f"{_FP8}.fp8_recipe", "delayed"), given) if value else "FP8 is off by default"
    ),
    **{
        ("", f"{_FP8}.num_layers_at_{place}_in_bf16"): only_if(
            f"{_FP8}.first_last_layers_bf16", bool, "first_last_layers_bf16 is not set", to(f"model.fp8.{key}_layers")
        )
        for place, key in (("start", "first"), ("end", "last"))
    },
    ("", f"{ROLLOUT}.name"): Choice({"vllm": {"generation.backend": "vllm"}}),
    ("", f"{ROLLOUT}.top_k"): positive("grpo.top_k", "all tokens are candidates by default"),
    ("", f"{ROLLOUT}.prompt_length"): said("a part of data.max_sequence_length"),
    ("", f"{ROLLOUT}.response_length"): said("see data.max_response_length"),
    ("", f"{ROLLOUT}.tensor_model_parallel_size"): _with_vllm(servers),
    ("", f"{ROLLOUT}.free_cache_engine"): _with_vllm(to("generation.offload")),
    ("", "actor_rollout_ref.hybrid_engine"): _with_vllm(to("generation.offload")),
    **{
        ("", f"{ROLLOUT}.{part}"): _with_vllm(_server_options)
        for part in (
            "gpu_memory_utilization",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "enforce_eager",
            "quantization",
        )
    },
    **{
        ("", f"{ROLLOUT}.multi_turn.{part}"): said("set environment.max_turns and a judge that answers tool calls")
        for part in ("enable", "max_assistant_turns", "max_user_turns", "tool_config_path", "function_tool_path")
    },
    **{
        ("", f"data.{part}"): said("an environment answers the calls of its tools")
        for part in ("tool_config_path", "function_tool_path")
    },
    ("", f"{ACTOR}.checkpoint.save_contents"): said("the model is always exported at the end"),
    ("", "algorithm.filter_groups.enable"): true_for(
        lambda value, given: {
            "grpo.dynamic_sampling_rounds": given("algorithm.filter_groups.max_num_gen_batches") or 10
        }
    ),
    ("", "algorithm.filter_groups.max_num_gen_batches"): said("a part of grpo.dynamic_sampling_rounds"),
    ("", "algorithm.rollout_correction.rollout_is"): lambda value, given: {
        "loss.use_importance_sampling_correction": True,
        "loss.importance_sampling_level": value,
        "loss.truncated_importance_sampling_type": "tis",
        "loss.truncated_importance_sampling_ratio": given("algorithm.rollout_correction.rollout_is_threshold", 2.0),
    },
    ("", "algorithm.rollout_correction.rollout_is_threshold"): said("a part of rollout_is"),
    ("", "algorithm.rollout_correction.rollout_rs"): said("set loss.truncated_importance_sampling_type"),
    ("", "algorithm.rollout_correction.rollout_rs_threshold"): said("set loss.truncated_importance_sampling_type"),
    **{
        ("", key): said("set environment.name and environment.function=module:function, which has another signature")
        for key in (
            "custom_reward_function.path",
            "custom_reward_function.name",
            "reward.custom_reward_function.*",
            "reward.reward_manager.name",
            "reward_model.reward_manager",
            "reward.reward_model.enable",
            "reward_model.enable",
        )
    },
}
DEFAULTS_OF_VERL: dict[str, Any] = {
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    "actor_rollout_ref.hybrid_engine": True,
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{_OPTIM}.lr": 1e-6,
    f"{_OPTIM}.lr_scheduler_type": "constant",
    f"{_OPTIM}.weight_decay": 0.01,
    f"{ACTOR}.freeze_vision_tower": False,
}
"""Defaults of verl that differ from those here, or that rules read. They hold for values that a file leaves out."""

# ------------------------------------------------------------------ NeMo RL

_CFG = "policy.megatron_cfg"


def _by_backend(megatron: bool, rule: Rule) -> Rule:
    """Return `rule` for configurations in which the backend Megatron is enabled, or is not."""
    reason = f"{_CFG}.enabled is {'not ' if megatron else ''}set"
    return only_if(f"{_CFG}.enabled", lambda value: (value is True) == megatron, reason, rule)


def _batch(value: Any, given: Given) -> Outcome:
    key = "grpo.train_global_batch_size" if given.algorithm == "grpo" else "batch.global_batch_size"
    return {key: value}


def _switched(switch: str, rule: Rule) -> Rule:
    return only_if(switch, lambda value: value is True, f"{switch} is not set", rule)


def _server_options_of_nemo_rl(value: Any, given: Given) -> Outcome:
    room, precision = (given(f"policy.generation.vllm_cfg.{name}") for name in ("gpu_memory_utilization", "precision"))
    words = [] if room is None else ["--gpu-memory-utilization", str(room)]
    words += ["--quantization", "fp8_per_block"] * (precision == "fp8")
    return {"generation.vllm.arguments": words} if words else "the servers have the precision of model.dtype"


def _asynchronous(value: Any, given: Given) -> Outcome:
    return {"grpo.max_staleness": int(number(value, "max_trajectory_age_steps"))}


def _dataset(key: str, part: str) -> Rule:
    def rule(value: Any, given: Given) -> Outcome:
        split = given(f"data.{part}.split", "train")
        return {key: value if split == "train" else f"{value}:{split}"}

    return rule


NEMO_RL: dict[tuple[str, str], Rule] = {
    ("", "policy.train_global_batch_size"): _batch,
    ("", "policy.train_micro_batch_size"): said("packs hold as many sequences as fit"),
    ("", "policy.precision"): DTYPE,
    ("", f"{_CFG}.pipeline_dtype"): said("policy.precision"),
    ("", f"{_CFG}.optimizer.bf16"): said("policy.precision"),
    ("", f"{_CFG}.optimizer.fp16"): said("policy.precision"),
    ("", f"{_CFG}.optimizer.optimizer"): _by_backend(True, optimizer),
    ("", "policy.optimizer.name"): _by_backend(False, optimizer),
    **{
        ("", f"policy.optimizer.kwargs.{theirs}"): _by_backend(False, to(f"optimizer.{ours}"))
        for theirs, ours in {"lr": "lr", "weight_decay": "weight_decay", "eps": "adam_eps"}.items()
    },
    ("", "policy.optimizer.kwargs.betas"): _by_backend(False, _betas),
    **{
        ("", f"{_CFG}.optimizer.{key}"): _by_backend(True, to(f"optimizer.{key}"))
        for key in ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps")
    },
    **{
        ("", f"{_CFG}.scheduler.{key}"): said(f"{_CFG}.optimizer.weight_decay")
        for key in ("start_weight_decay", "end_weight_decay")
    },
    ("", f"{_CFG}.scheduler.lr_decay_style"): _by_backend(True, SCHEDULE),
    ("", f"{_CFG}.scheduler.lr_decay_iters"): said("the rate decays over the whole run, trainer.max_steps"),
    ("", f"{_CFG}.scheduler.lr_warmup_iters"): _by_backend(
        True, positive("optimizer.warmup_steps", "there is no warmup by default")
    ),
    ("", "policy.scheduler"): said("a list of PyTorch's schedules; set optimizer.schedule and optimizer.warmup_steps"),
    ("", f"{_CFG}.activation_checkpointing"): _by_backend(True, true_for(to("model.recompute_activations"))),
    ("", "policy.dtensor_cfg.activation_checkpointing"): _by_backend(
        False, true_for(to("model.recompute_activations"))
    ),
    **{
        ("", f"{_CFG}.{key}_parallel_size"): _by_backend(True, to(f"parallel.{key}_parallel_size"))
        for key in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    },
    ("", f"{_CFG}.sequence_parallel"): _by_backend(True, _sequence_parallel(f"{_CFG}.tensor_model_parallel_size")),
    ("", "policy.dtensor_cfg.tensor_parallel_size"): _by_backend(False, to("parallel.tensor_model_parallel_size")),
    ("", "policy.dtensor_cfg.context_parallel_size"): _by_backend(False, to("parallel.context_parallel_size")),
    ("", "policy.dtensor_cfg.sequence_parallel"): _by_backend(
        False, _sequence_parallel("policy.dtensor_cfg.tensor_parallel_size")
    ),
    **{
        ("", f"{_CFG}.num_layers_in_{place}_pipeline_stage"): _by_backend(
            True, to(f"parallel.num_layers_in_{place}_pipeline_stage")
        )
        for place in ("first", "last")
    },
    ("", f"{_CFG}.moe_router_load_balancing_type"): Choice({"none": {"model.moe_aux_loss_coeff": 0.0}}),
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
    ("", "policy.tokenizer.chat_template_kwargs"): said("write the values into the template of data.chat_template"),
    ("", "policy.tokenizer.chat_template"): lambda value, given: (
        "the tokenizer's template is the default" if value == "default" else {"data.chat_template": value}
    ),
    **{
        ("", f"policy.dtensor_cfg.lora_cfg.{theirs}"): _switched(
            "policy.dtensor_cfg.lora_cfg.enabled", to(f"model.lora.{ours}")
        )
        for theirs, ours in {"dim": "rank", "alpha": "alpha", "dropout": "dropout"}.items()
    },
    ("", "policy.dtensor_cfg.lora_cfg.target_modules"): _switched(
        "policy.dtensor_cfg.lora_cfg.enabled",
        lambda value, given: targets(value, given) if value else "all projections are the default",
    ),
    ("", "policy.dtensor_cfg.lora_cfg.enabled"): said("the keys of model.lora turn LoRA on"),
    ("", "policy.generation.backend"): Choice(
        {"vllm": {"generation.backend": "vllm"}, "megatron": {"generation.backend": "megatron"}}
    ),
    ("", "policy.generation.colocated.enabled"): only_if(
        "policy.generation.backend", lambda value: value == "vllm", "the engine is not vLLM", to("generation.offload")
    ),
    ("", "policy.generation.colocated.resources.*"): said("generation.vllm.devices names the GPUs of the servers"),
    ("", "policy.generation.vllm_cfg.tensor_parallel_size"): only_if(
        "policy.generation.backend",
        lambda value: value == "vllm",
        "the engine is not vLLM",
        servers,
    ),
    **{
        ("", f"policy.generation.vllm_cfg.{part}"): only_if(
            "policy.generation.backend",
            lambda value: value == "vllm",
            "the engine is not vLLM",
            _server_options_of_nemo_rl,
        )
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
    ("", "checkpointing.save_period"): positive("checkpoint.save_interval", "a run always saves at its end"),
    ("", "checkpointing.metric_name"): said("set checkpoint.best_metric to a metric's name here"),
    ("", "checkpointing.higher_is_better"): said("a part of checkpoint.best_mode"),
    ("", "checkpointing.checkpoint_must_save_by"): said(
        "a run saves on a signal; checkpoint.save_minutes is an interval"
    ),
    ("", "checkpointing.save_consolidated"): said("the model is always exported at the end"),
    ("", "checkpointing.model_save_format"): said("the model is exported as safetensors"),
    ("", "data.max_input_seq_length"): said("policy.max_total_sequence_length"),
    ("", "data.dataset_name"): to("data.train"),
    ("", "data.train.dataset_name"): _dataset("data.train", "train"),
    ("", "data.train.split"): said("a part of data.train"),
    ("", "data.validation.dataset_name"): _dataset("data.validation", "validation"),
    ("", "data.validation.split"): said("a part of data.validation"),
    ("", "env.math.math_verify_impl"): to("environment.name", lambda _: "math"),
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
