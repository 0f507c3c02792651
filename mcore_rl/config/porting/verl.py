"""Rules for the values of verl. Other keys keep their values, under the names in the table of keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_rl.config.porting.rules import (
    DTYPE,
    FP8_RECIPE,
    SCHEDULE,
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
    trackers,
    true_for,
)

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
LOSS = f"{ACTOR}.policy_loss.loss_mode"


def _sources(key: str) -> Rule:
    def rule(value: Any, given: Given) -> Outcome:
        files = list(value) if isinstance(value, list | tuple) else [value]
        return {key: files[0] if len(files) == 1 else files}

    return rule


def _mini_batch(value: Any, given: Given) -> Outcome:
    """Convert a mini-batch, which counts prompts, into one that counts responses."""
    return {"grpo.train_global_batch_size": int(number(value, "ppo_mini_batch_size") * given.number(f"{ROLLOUT}.n", 1))}


def _columns(keys: Mapping[str, str]) -> Rule:
    """Return the rule for `keys`, which name the columns of fields. It returns all columns with other names."""

    def rule(value: Any, given: Given) -> Outcome:
        named = {field: given(key, field) for field, key in keys.items()}
        others = {field: name for field, name in named.items() if name != field}
        return {"data.columns": others} if others else f"{value} is the default"

    return rule


_PROMPT_COLUMNS = {"prompt": "data.prompt_key", "images": "data.image_key"}
_CHAT_COLUMNS = {"messages": "data.messages_key", "tools": "data.tools_key"}


def _tower(value: Any, given: Given) -> Outcome:
    if value in (True, "true", "True"):
        return {"model.vision_tower": "frozen"}
    reads_images = given.values.get("data.image_key") is not None
    return {"model.vision_tower": "trained"} if reads_images else "data.image_key is not set, so there is no image"


def _longest_response(given: Given) -> float:
    return given.number(f"{ROLLOUT}.response_length", given.number("data.max_response_length"))


def _length(value: Any, given: Given) -> Outcome:
    return {"data.max_sequence_length": int(given.number("data.max_prompt_length") + _longest_response(given))}


def _clip(value: Any, given: Given) -> Outcome:
    low, high = (given(f"{ACTOR}.clip_ratio_{side}", value) for side in ("low", "high"))
    loss = str(given(LOSS))
    if loss.startswith("dppo"):
        return {"loss.divergence_clip_min": low, "loss.divergence_clip_max": high}
    if loss == "geo_mean":
        return {"loss.log_ratio_clip_min": low, "loss.log_ratio_clip_max": high}
    if loss in ("sapo", "gpg"):
        return "the loss does not clip"
    return {"loss.ratio_clip_min": low, "loss.ratio_clip_max": high}


KL_IN_LOSS, KL_IN_REWARD = f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"


def _kl(switch: str, rule: Rule, without: Outcome = "there is no KL term") -> Rule:
    """Return `rule` for the KL that `switch` turns on. With both KLs, that in the loss becomes the one here."""

    def of_switch(value: Any, given: Given) -> Outcome:
        counted = next((name for name in (KL_IN_LOSS, KL_IN_REWARD) if given(name) is True), None)
        return rule(value, given) if counted == switch else "this KL term is off" if counted else without

    return of_switch


def _kl_in_reward(value: Any, given: Given) -> Outcome:
    if given(KL_IN_LOSS) is True:
        return Refused(f"there is one KL term, that of {KL_IN_LOSS}")
    return {"loss.use_kl_in_reward": True}


def _estimator_of_kl(value: Any, given: Given) -> Outcome:
    name, plus, _ = str(value).partition("+")
    names = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    if name not in names:
        return Refused(f"{value} does not exist here; it may be one of {', '.join(names)}")
    found = {"loss.kl_estimator": names[name], "loss.kl_gradient": "unbiased" if plus else "value"}
    return found | ({"loss.kl_output_clamp": 10.0} if names[name] == "k3" else {})


def _advantages(value: Any, given: Given) -> Outcome:
    normalizes = given("algorithm.norm_adv_by_std_in_grpo", True) is not False
    grpo = {"grpo.advantage_estimator": "grpo", "grpo.advantage_epsilon": 1e-6}
    grpo = grpo if normalizes else {"grpo.advantage_estimator": "dr_grpo"}
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
    loss = given(LOSS, "vanilla")
    mode = "seq-mean-token-mean" if loss == "sapo" else str(value)
    if loss == "geo_mean":
        return "the loss is a mean over sequences"
    if loss == "gspo" and mode == "token-mean":
        return Refused("with ratios of sequences, the loss here is a mean over sequences")
    by_clipping = loss in ("vanilla", "gspo", "cispo", "gpg")
    found = {} if not by_clipping else {"loss.token_level_loss": mode == "token-mean"}
    if mode == "seq-mean-token-sum-norm":
        longest = given(f"{ACTOR}.loss_scale_factor") or _longest_response(given)
        return {**found, "loss.dr_grpo_max_tokens": longest}
    if mode not in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        return Refused(f"{value} does not exist here")
    usual = by_clipping and mode == "token-mean"
    return found if usual else {**found, "loss.aggregation": mode.replace("-", "_")}


def _warmup(steps: str) -> Rule:
    return only_if(steps, lambda value: value is None or number(value, steps) <= 0, f"{steps} is set", positive(
        "optimizer.warmup_ratio", "there is no warmup by default"
    ))  # fmt: skip


_ENGINES = ("vllm", "sglang", "trtllm")
"""Engines of verl in whose place vLLM generates here."""


def _with_vllm(rule: Rule) -> Rule:
    return only_if(f"{ROLLOUT}.name", lambda value: value in _ENGINES, "no server generates", rule)


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


def _validates(rule: Rule) -> Rule:
    return only_if("data.val_files", bool, "data.val_files is missing", rule)


def _frequency(key: str, reason: str) -> Rule:
    """Return a rule for a number of steps, or a time of verl's SFT."""
    of_number = positive(key, reason)
    return lambda value, given: (
        ToDo(f"an interval counts steps; set {key}") if str(value).startswith("after_") else of_number(value, given)
    )


def _with_reward_model(rule: Rule) -> Rule:
    def of_model(value: Any, given: Given) -> Outcome:
        is_used = any(given(f"{part}.enable") is True for part in _REWARD_MODELS)
        return rule(value, given) if is_used else "no reward model is enabled"

    return of_model


def _overlong(part: str) -> Rule:
    """Return a rule for the length over which the penalty of long responses rises, options of `part`."""

    def rule(value: Any, given: Given) -> Outcome:
        if given(f"{part}.enable") is not True:
            return "the penalty is off"
        longest = given(f"{part.rpartition('.')[0]}.max_resp_len", _longest_response(given))
        if given(f"{part}.penalty_factor", 1.0) != 1 or longest != _longest_response(given):
            return Refused("the penalty here rises to 1 at grpo.max_new_tokens")
        return {"grpo.overlong_cache_length": value}

    return rule


_REWARD_MODELS = ("reward.reward_model", "reward_model")


def _reward_model(value: Any, given: Given) -> Outcome:
    return {"environment.name": "reward_model", "environment.path": value}


def _of_critic(rule: Rule) -> Rule:
    """Return a rule for the critic's optimizer like that for the policy's."""

    def renamed(value: Any, given: Given) -> Outcome:
        outcome = rule(value, given)
        return outcome if isinstance(outcome, str) else {f"critic.{key}": part for key, part in outcome.items()}

    return renamed


def _lowest_rate(optim: str) -> Rule:
    return lambda value, given: {"optimizer.min_lr": number(value, "min_lr_ratio") * given.number(f"{optim}.lr")}


def _warmup_steps(part: str) -> Rule:
    """Return a rule for the warmup of `part`, actor or critic. verl's schedule counts steps, here it counts updates."""

    def rule(value: Any, given: Given) -> Outcome:
        steps, updates = number(value, "lr_warmup_steps"), 1
        if given.algorithm in ("grpo", "ppo"):
            minibatches = given.number("data.train_batch_size") / given.number(f"{part}.ppo_mini_batch_size")
            updates = math.ceil(minibatches) * int(given.number(f"{part}.ppo_epochs", 1))
        return {"optimizer.warmup_steps": int(steps) * updates} if steps > 0 else "lr_warmup_steps_ratio counts"

    return rule


def _of_optimizer(part: str) -> dict[str, Rule]:
    """Return the rules for the options of the optimizer of `part`, actor or critic, without their prefix."""
    optim = f"{part}.optim"
    return {
        "optimizer": optimizer,
        "betas": betas,
        "weight_decay": to("optimizer.weight_decay"),
        "clip_grad": to("optimizer.clip_grad"),
        "lr_warmup_steps": _warmup_steps(part),
        "lr_warmup_init": first_rate,
        "num_cycles": only_if(
            f"{optim}.lr_scheduler_type",
            lambda name: name == "cosine",
            "there is no cosine",
            refused("a cosine has half a period", harmless=(0.5,)),
        ),
        "override_optimizer_config.eps": to("optimizer.adam_eps"),
        "lr_warmup_steps_ratio": _warmup(f"{optim}.lr_warmup_steps"),
        "min_lr_ratio": _lowest_rate(optim),
        "min_lr": lowest_rate(f"{optim}.lr_decay_style"),
        "lr_scheduler_type": SCHEDULE,
        "lr_decay_style": SCHEDULE,
        "warmup_style": SCHEDULE,
        "override_optimizer_config.optimizer_cpu_offload": true_for(to("optimizer.offload")),
        "override_optimizer_config.decoupled_weight_decay": refused(
            "weight decay is AdamW's here", harmless=(None, True)
        ),
        **{
            f"override_optimizer_config.{key}": said("chooses where the optimizer computes, not what")
            for key in (
                "optimizer_offload_fraction",
                "overlap_cpu_optimizer_d2h_h2d",
                "use_precision_aware_optimizer",
                "fused",
                "foreach",
            )
        },
        "override_optimizer_config.*": lambda value, given: ToDo("if it changes the update, set its counterpart"),
    }


def _of_muon(optim: str) -> dict[str, Rule]:
    """Return the rules for Muon's options; the factor of an update is Megatron's, or one that follows from betas."""
    names = {"muon_momentum": to("optimizer.muon_momentum"), "muon_num_ns_steps": to("optimizer.muon_steps")}
    names |= {
        "muon_scale_mode": refused("set optimizer.muon_scale: the factor of an update is another"),
        "muon_nesterov": refused("Muon here always has Nesterov's correction", harmless=(True,)),
    }
    is_muon = lambda name: "muon" in str(name).lower()  # noqa: E731 (used once)
    return {
        key: only_if(f"{optim}.optimizer", is_muon, "the optimizer is not Muon", rule) for key, rule in names.items()
    }


def _as_actor(key: str) -> Rule:
    """Return a rule for an option of the critic that is the policy's here."""

    def rule(value: Any, given: Given) -> Outcome:
        usual = given(f"{ACTOR}.{key}")
        return "as the policy's" if value == usual else Refused(f"the critic has the policy's {key}, {usual}")

    return rule


def _of_teacher(rule: Rule) -> Rule:
    return only_if("distillation.enabled", lambda value: value is True, "there is no teacher", rule)


def _divergence(value: Any, given: Given) -> Outcome:
    """Return the loss of a teacher: a divergence over its likeliest tokens, or a reward for sampled tokens."""
    by_gradient = given("distillation.distillation_loss.use_policy_gradient") is True
    if value in ("kl", "k1") and by_gradient:
        return {"distillation.form": "sampled"}
    if value == "forward_kl_topk" and not by_gradient:
        return {"distillation.kl_type": "forward"}
    return Refused(f"{value} does not exist here{' by policy gradient' if by_gradient else ''}")


def _recomputed(value: Any, given: Given) -> Outcome:
    kept = [name for name in value or () if name in ("mlp", "moe", "shared_experts")]
    return {"model.recompute_modules": kept} if kept else "attention is recomputed by its kernel"


_OPTIM = f"{ACTOR}.optim"
_MEGATRON = f"{ACTOR}.megatron"
_TRANSFORMER = f"{_MEGATRON}.override_transformer_config"
VERL: dict[tuple[str, str], Rule] = {
    ("", "data.train_files"): _sources("data.train"),
    ("", "data.val_files"): _sources("data.validation"),
    ("", "data.max_prompt_length"): _length,
    **{("", key): _columns(_PROMPT_COLUMNS) for key in _PROMPT_COLUMNS.values()},
    ("", f"{ACTOR}.freeze_vision_tower"): _tower,
    ("", "data.train_max_samples"): positive("data.max_samples", "all records are used by default"),
    ("", "data.truncation"): refused("prompts are never truncated; longer ones are dropped", harmless=(None, "error")),
    ("", "data.shuffle"): refused("training data is always shuffled by seed", harmless=(None, True)),
    ("", "data.apply_chat_template_kwargs"): refused("write the values into the template of data.chat_template"),
    ("", "algorithm.rollout_correction.bypass_mode"): refused("log-probabilities are computed before the update"),
    ("", "algorithm.rollout_correction.rollout_is_batch_normalize"): refused("weights are not normalized"),
    ("", f"{_OPTIM}.override_optimizer_config"): refused("each option is a key of its own in optimizer"),
    ("", f"{ROLLOUT}.do_sample"): refused("responses are always sampled", harmless=(None, True)),
    ("", f"{ROLLOUT}.ignore_eos"): refused("an end token ends a response"),
    **{
        ("", f"{ACTOR}.{part}qat.enable"): refused("weights are not trained for quantization")
        for part in ("", "fsdp_config.")
    },
    **{
        ("", f"{MODEL}.{part}exclude_modules"): _lora(refused("name the projections in model.lora.target_modules"))
        for part in ("", "lora.")
    },
    ("", "data.apply_chat_template_kwargs.*"): refused("write the values into the template of data.chat_template"),
    ("", f"{MODEL}.override_config.*"): refused("write the values into config.json of model.path", harmless=(None,)),
    ("", f"{_OPTIM}.lr_decay_steps"): only_if(
        f"{_OPTIM}.lr_decay_style", lambda style: style != "constant", "a constant rate does not decay",
        refused("the rate decays over the whole run"),
    ),
    **{("", f"{_OPTIM}.{key}"): rule for key, rule in _of_muon(_OPTIM).items()},
    ("", "critic.grad_clip"): to("critic.optimizer.clip_grad"),
    **{("", f"critic.{key}"): _as_actor(key) for key in ("ppo_epochs", "ppo_mini_batch_size", "loss_agg_mode")},
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
    ("", f"{ACTOR}.kl_loss_coef"): _kl(
        KL_IN_LOSS, to("loss.reference_policy_kl_penalty"), without={"loss.reference_policy_kl_penalty": 0.0}
    ),
    ("", "algorithm.kl_ctrl.kl_coef"): _kl(KL_IN_REWARD, to("loss.reference_policy_kl_penalty")),
    ("", KL_IN_REWARD): true_for(_kl_in_reward),
    ("", f"{ACTOR}.kl_loss_type"): _kl(KL_IN_LOSS, _estimator_of_kl),
    ("", "algorithm.kl_penalty"): _kl(KL_IN_REWARD, _estimator_of_kl),
    ("", "algorithm.gamma"): lambda value, given: (
        Refused("rewards are not discounted by this estimator")
        if value != 1 and given("algorithm.adv_estimator") == "reinforce_plus_plus"
        else {"ppo.gamma": value}
    ),
    ("", "algorithm.adv_estimator"): _advantages,
    ("", "algorithm.norm_adv_by_std_in_grpo"): said("a part of grpo.advantage_estimator"),
    ("", LOSS): _loss,
    ("", f"{ACTOR}.loss_agg_mode"): _aggregation,
    ("", f"{ACTOR}.loss_scale_factor"): said("a part of loss_agg_mode"),
    ("", f"{ACTOR}.clip_ratio_c"): only_if(
        LOSS,
        lambda v: v in ("vanilla", "dppo_tv", "dppo_kl"),
        "the loss has no second bound",
        to("loss.ratio_clip_c"),
    ),
    **{
        ("", f"{ACTOR}.{key}"): only_if(LOSS, lambda v: v == "sapo", "the loss is not sapo", to(f"loss.{key}"))
        for key in ("tau_pos", "tau_neg")
    },
    **{("", f"{_OPTIM}.{key}"): rule for key, rule in _of_optimizer(ACTOR).items()},
    **{("", f"critic.optim.{key}"): _of_critic(rule) for key, rule in _of_optimizer("critic").items()},
    ("", "critic.optim.lr"): to("critic.optimizer.lr"),
    ("", "critic.optim.*"): said("an option of PyTorch's optimizers"),
    **{
        ("", f"{part}.rollout.tensor_model_parallel_size"): _with_reward_model(
            to("environment.parallel.tensor_model_parallel_size")
        )
        for part in ("reward.reward_model", "reward_model")
    },
    ("", "reward_model.inference.tensor_model_parallel_size"): _with_reward_model(
        to("environment.parallel.tensor_model_parallel_size")
    ),
    **{
        ("", key): _with_reward_model(_reward_model)
        for key in ("reward.reward_model.model_path", "reward_model.model.path", "reward_model.model_path")
    },
    **{
        ("", f"distillation.{part}.inference.tensor_model_parallel_size"): lambda value, given: (
            "the teacher has the student's layout"
            if given.values.get("distillation.enabled") is not True
            else {"distillation.teacher_parallel.tensor_model_parallel_size": value}
        )
        for part in ("teacher_models.teacher_model", "teacher_model")
    },
    ("", "distillation.teacher_model.model_path"): to("distillation.teacher"),
    ("", "distillation.distillation_loss.loss_mode"): _of_teacher(_divergence),
    ("", "distillation.distillation_loss.use_policy_gradient"): said("a part of loss_mode"),
    ("", "distillation.distillation_loss.topk"): _of_teacher(only_if(
        "distillation.distillation_loss.loss_mode", lambda mode: mode == "forward_kl_topk", "the loss reads no topk",
        to("distillation.topk"),
    )),
    **{
        ("", f"distillation.distillation_loss.{key}"): _of_teacher(refused(f"{key} does not exist here"))
        for key in ("loss_max_clamp", "log_prob_min_clamp")
    },
    ("", "distillation.distillation_loss.distillation_loss_coef"): _of_teacher(
        refused("the loss has no factor", harmless=(None, 1))
    ),
    ("distill", "data.train_batch_size"): lambda value, given: {
        "batch.global_batch_size": int(number(value, "train_batch_size") * given.number(f"{ROLLOUT}.n", 1)),
        "distillation.on_policy": True,
    },
    ("distill", f"{ROLLOUT}.n"): said("a part of batch.global_batch_size"),
    ("distill", f"{ACTOR}.ppo_mini_batch_size"): only_if(
        "data.train_batch_size", lambda size: size is not None, "one update a step",
        lambda value, given: (
            "one update a step" if value == given("data.train_batch_size") else Refused("a step makes one update")
        ),
    ),
    ("", f"{_OPTIM}.total_training_steps"): positive("trainer.max_steps", "the run counts epochs"),
    ("", "trainer.total_training_steps"): positive("trainer.max_steps", "the run counts epochs"),
    ("", "trainer.save_freq"): _frequency("checkpoint.save_interval", "a run always saves at its end"),
    ("", "trainer.test_freq"): _validates(_frequency("trainer.validation_interval", "nothing is validated")),
    ("", "trainer.val_before_train"): _validates(to("trainer.validate_at_start")),
    ("", "trainer.logger"): trackers,
    ("", "trainer.project_name"): said("the name of the tracker's project"),
    ("", "trainer.experiment_name"): only_if(
        "trainer.logger", lambda names: {"wandb", "mlflow"} & {*([names] if isinstance(names, str) else names or ())},
        "no tracker has names of runs", to("logging.run_name"),
    ),
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
    **{("", f"{ACTOR}.{part}"): DTYPE for part in ("megatron.dtype", "fsdp_config.dtype")},
    ("", f"{ACTOR}.fsdp_config.model_dtype"): said("weights are fp32 in the optimizer; dtype is that of computing"),
    ("", f"{_MEGATRON}.sequence_parallel"): sequence_parallel(f"{_MEGATRON}.tensor_model_parallel_size"),
    ("", f"{_MEGATRON}.override_transformer_config.recompute_granularity"): Choice(
        {"full": {"model.recompute_activations": True}}
    ),
    ("", f"{_TRANSFORMER}.recompute_modules"): only_if(
        f"{_TRANSFORMER}.recompute_granularity", lambda value: value == "selective",
        "recompute_granularity is not selective", _recomputed,
    ),
    ("", f"{_TRANSFORMER}.fp8_recipe"): only_if(f"{_TRANSFORMER}.fp8", bool, "fp8 is not set", FP8_RECIPE),
    ("", f"{_TRANSFORMER}.fp8"): lambda value, given: (
        FP8_RECIPE(given(f"{_TRANSFORMER}.fp8_recipe", "delayed"), given) if value else "FP8 is off by default"
    ),
    **{
        ("", f"{_TRANSFORMER}.{key}"): to(f"model.{key}")
        for key in ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate")
    },
    **{
        ("", f"{_TRANSFORMER}.num_layers_in_{place}_pipeline_stage"): to(
            f"parallel.num_layers_in_{place}_pipeline_stage"
        )
        for place in ("first", "last")
    },
    **{
        ("", f"{_TRANSFORMER}.{pattern}"): said("chooses how the model is computed, not what")
        for pattern in (
            "*fusion*", "*fused*", "*flash*", "*overlap*", "recompute_*", "attention_backend", "context_parallel_*",
            "cp_comm_type", "tp_comm_*", "cross_entropy_*", "account_for_*", "persist_layer_norm", "moe_router_dtype",
            "moe_grouped_gemm", "moe_token_dispatcher_type", "moe_enable_deepep", "moe_flex_dispatcher_backend",
            "moe_use_legacy_grouped_gemm", "variable_seq_lengths", "deallocate_pipeline_outputs", "batch_p2p_comm",
            "fp8_param", "first_last_layers_bf16", "use_cpu_initialization", "gradient_checkpointing*",
        )
    },
    ("", f"{_TRANSFORMER}.*"): lambda value, given: ToDo("if it changes what the model computes, set its counterpart"),
    **{
        ("", f"{_TRANSFORMER}.num_layers_at_{place}_in_bf16"): only_if(
            f"{_TRANSFORMER}.first_last_layers_bf16", bool, "first_last_layers_bf16 is not set",
            to(f"model.fp8.{key}_layers"),
        )
        for place, key in (("start", "first"), ("end", "last"))
    },
    ("", f"{ROLLOUT}.name"): Choice({"hf": "as here", **{name: {"generation.backend": "vllm"} for name in _ENGINES}}),
    ("", f"{ROLLOUT}.top_k"): positive("grpo.top_k", "all tokens are candidates by default"),
    ("", f"{ROLLOUT}.prompt_length"): said("a part of data.max_sequence_length"),
    **{
        ("", key): lambda value, given: {"grpo.max_new_tokens": int(_longest_response(given))}
        for key in (f"{ROLLOUT}.response_length", "data.max_response_length")
    },
    ("", f"{ROLLOUT}.tensor_model_parallel_size"): _with_vllm(servers),
    ("", f"{ROLLOUT}.free_cache_engine"): _with_vllm(said("servers on the GPUs of training sleep: generation.offload")),
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
    ("", f"{ROLLOUT}.multi_turn.enable"): refused("set environment.max_turns and a judge that answers tool calls"),
    **{
        ("", f"{ROLLOUT}.multi_turn.{part}"): rule("set environment.max_turns and a judge that answers tool calls")
        for part, rule in {
            "max_assistant_turns": said,
            "max_user_turns": said,
            "tool_config_path": refused,
            "function_tool_path": refused,
        }.items()
    },
    **{
        ("", f"data.{part}"): said("a part of rollout.multi_turn")
        for part in ("tool_config_path", "function_tool_path")
    },
    ("", "algorithm.kl_ctrl.type"): Choice({"fixed": "the coefficient is constant"}),
    ("", "algorithm.use_pf_ppo"): refused("samples are not reweighted by their rewards"),
    ("", "distillation.distillation_loss.use_task_rewards"): only_if(
        "distillation.enabled", lambda value: value is True, "there is no teacher",
        refused("no reward is added to the loss of a teacher"),
    ),
    ("", f"{MODEL}.mtp.mtp_loss_scaling_factor"): only_if(
        f"{MODEL}.mtp.enable_train", lambda value: value is True, "mtp.enable_train is not set",
        to("model.mtp_loss_scaling_factor"),
    ),
    ("", "trainer.log_val_generations"): positive("grpo.num_logged_samples", "samples of training steps are written"),
    **{
        ("", f"{ROLLOUT}.{part}"): said("options of vLLM's server are written in generation.vllm.arguments")
        for part in (
            "engine_kwargs.vllm", "dtype", "cudagraph_capture_sizes", "data_parallel_size", "expert_parallel_size",
            "pipeline_model_parallel_size", "enable_chunked_prefill", "enable_prefix_caching", "scheduling_policy",
            "load_format", "disable_log_stats", "quantization_config_file",
        )
    },
    ("", "data.custom_cls.path"): refused("a dataset is a file, directory or name; write the records that yours makes"),
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
    ("", "algorithm.rollout_correction.rollout_rs"): refused("set loss.truncated_importance_sampling_type"),
    ("", "algorithm.rollout_correction.rollout_rs_threshold"): said("set loss.truncated_importance_sampling_type"),
    **{
        ("", f"{part}{key}"): said("a part of environment.function")
        for part in ("", "reward.")
        for key in ("custom_reward_function.path", "custom_reward_function.name")
    },
    **{
        ("", key): Choice({name: "a part of environment.function" for name in ("naive", "dapo", "prime", "gdpo")})
        for key in ("reward.reward_manager.name", "reward_model.reward_manager")
    },
    **{("", f"{part}.enable"): said("a part of environment.name") for part in _REWARD_MODELS},
    **{
        ("", f"{part}.reward_kwargs.{key}"): rule
        for part in ("reward", "reward_model")
        for key, rule in {
            "overlong_buffer_cfg.enable": said("a part of grpo.overlong_cache_length"),
            "overlong_buffer_cfg.len": _overlong(f"{part}.reward_kwargs.overlong_buffer_cfg"),
            "overlong_buffer_cfg.penalty_factor": said("a part of grpo.overlong_cache_length"),
            "overlong_buffer_cfg.log": said("the metrics have it"),
            "max_resp_len": said("a part of grpo.overlong_cache_length"),
        }.items()
    },
    ("sft", "data.train_batch_size"): to("batch.global_batch_size"),
    ("sft", "data.max_length"): to("data.max_sequence_length"),
    ("sft", "data.truncation"): Choice({
        "error": "longer records are dropped", "right": {"data.overlong": "truncate"},
    }),
    ("sft", "data.micro_batch_size_per_gpu"): said("packs hold as many sequences as fit"),
    ("sft", "data.max_token_len_per_gpu"): only_if(
        "data.use_dynamic_bsz", lambda value: value is True, "use_dynamic_bsz is not set", to("batch.tokens_per_pack")
    ),
    ("sft", "data.use_dynamic_bsz"): said("batches are always packed by their tokens"),
    **{("sft", key): _columns(_CHAT_COLUMNS) for key in _CHAT_COLUMNS.values()},
    ("sft", "data.pad_mode"): said("packs have no padding"),
    ("sft", f"{ACTOR}.fsdp_config.seed"): said("trainer.seed is set"),
    ("sft", f"{_MEGATRON}.seed"): said("trainer.seed is set"),
}  # fmt: skip

PLACEHOLDERS = (
    "data.train_files", "data.val_files", f"{MODEL}.path", "critic.model.path",
    "distillation.teacher_models.teacher_model.model_path",
)  # fmt: skip
"""Keys whose default values in verl are examples."""

INSTEAD_OF_UNSET = {f"{ROLLOUT}.name": "vllm"}
"""Values for keys that verl's file leaves to the user."""


def judge_of_verl(given: Given) -> tuple[Mapping[str, Any], str]:
    """Return the judge of a configuration of verl, and what a person has to do for it."""
    if any(given(f"{part}.enable") is True for part in _REWARD_MODELS):
        return {}, ""
    sections = ("reward.custom_reward_function", "custom_reward_function")
    section = next((part for part in sections if given(f"{part}.path")), sections[0])
    path, name = given(f"{section}.path"), given(f"{section}.name")
    if path is None:
        function = "verl.utils.reward_score:default_compute_score"
        todo = "is verl's choice by data_source, and needs verl in the run's environment: or choose another judge"
    else:
        module = str(path).removeprefix("pkg://")
        module = module if module != str(path) else Path(module).stem
        function = f"{module}:{name or 'compute_score'}"
        todo = f"put the directory of {path} on PYTHONPATH"
    return {"environment.name": "verl", "environment.function": function}, f"environment.function: {function} {todo}"
