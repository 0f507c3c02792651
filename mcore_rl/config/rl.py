"""Configurations of training on rollouts: environment, generation, GRPO and PPO."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from mcore_rl.config.base import (
    Count,
    Directory,
    FractionBelowOne,
    Name,
    NonNegative,
    PositiveFloat,
    PositiveInt,
    Section,
    refuse_bool,
)
from mcore_rl.config.environment import EnvironmentConfig
from mcore_rl.config.sections import ModelConfig, OptimizerConfig, ReferenceSyncConfig, TrainerConfig, TrainingConfig
from mcore_rl.errors import UserError
from mcore_rl.losses.policy_options import (
    ClippedPGOptions,
    DPPOKLOptions,
    DPPOTVOptions,
    DROOptions,
    GMPOOptions,
    LUSPOOptions,
    PolicyLossOptions,
    SAPOOptions,
    VESPOOptions,
    options_class,
)

LOOPBACK = "127.0.0.1"
SERVER_LOGS = "vllm"
"""Directory of vLLM's logs and of the run's key in the output directory."""


FP8_SCHEMES = ("fp8_per_block", "fp8_per_tensor", "fp8", "mxfp8")
"""vLLM's online quantizations of bfloat16 weights to FP8; fp8 is the older name of fp8_per_tensor."""


def _names_quantization(word: str) -> bool:
    """Return whether a word is vLLM's option for a quantization, or an abbreviation of it."""
    return word == "-q" or (len(word) > len("--q") and "--quantization".startswith(word))


class VLLMConfig(Section):
    """vLLM's servers, which run in their own Python environment and processes (docs/rollouts.md)."""

    urls: tuple[Annotated[str, Field(pattern=r"^http://([^/?#:\[\]]+|\[[0-9a-fA-F:.]+\]):\d+$")], ...] = ()
    """URLs of servers that `mcore-rl vllm-servers` started, as http://HOST:PORT, with an address of IPv6 in brackets.
    Without any, the run starts servers on its own nodes."""
    num_servers: PositiveInt | Literal["auto"] = "auto"
    """Number of servers to start, on all nodes together. auto: as many as the GPUs hold; on the CPU, one on each
    node."""
    tensor_parallel_size: PositiveInt = 1
    """Tensor-parallel processes of each server, which are on one node."""
    devices: tuple[Count, ...] = ()
    """Numbers of the GPUs of each node that servers may use, as torch counts them. Default: with offload, the GPUs of
    the training processes; otherwise those that no training process uses."""
    host: Name | None = None
    """Address that the servers listen on. null: 127.0.0.1 or, if a run has several nodes, the address of each node
    towards the first rank. Requests need the run's key, but are not encrypted: use a network that you trust."""
    port: Annotated[int, Field(ge=1024, lt=2**16), BeforeValidator(refuse_bool)] = 8100
    """Port of the first server of a node; the others use the following ports."""
    python: Directory = Path(".venv-vllm/bin/python")
    """Python interpreter of the environment with vLLM (`make install-vllm`)."""
    arguments: tuple[str, ...] = ()
    """Further arguments of vLLM's server, such as [--gpu-memory-utilization, "0.5"]. With [--quantization,
    fp8_per_block], it samples in FP8 (docs/fp8.md)."""
    weight_updates: Literal["whole", "delta"] = "whole"
    """whole: before each step, send all weights to the servers. delta: send what has changed since the last update;
    trainer and servers keep a copy of the weights in host memory for that. It saves network traffic, not time of
    loading."""
    start_seconds: PositiveFloat = 900.0
    """Time limit for a server to start."""
    request_seconds: PositiveFloat = 1800.0
    """Time limit for a response."""

    @property
    def quantization(self) -> str | None:
        """Scheme by which vLLM quantizes the weights that it receives (`--quantization`); None if it does not."""
        words = [part for word in self.arguments for part in word.split("=", 1)]
        following = [value for name, value in itertools.pairwise(words) if _names_quantization(name)]
        return following[-1] if following else None

    @model_validator(mode="after")
    def _consistent(self) -> VLLMConfig:
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("urls: a server is listed twice")
        if len(set(self.devices)) < len(self.devices):
            raise ValueError("devices: a GPU is listed twice")
        for word in self.arguments:
            if word.partition("=")[0].replace("_", "-") == "--api-key":
                raise ValueError("arguments: --api-key: other users can read a command line; set VLLM_API_KEY instead")
            name = word.partition("=")[0].replace("_", "-")
            if (
                name.startswith("--quantization-")
                or "quantization_config" in word
                or (word[:2] == "-q" and word != "-q")
            ):
                raise ValueError(
                    f"arguments: {word}: write the quantization as --quantization SCHEME, with one of "
                    f"{', '.join(FP8_SCHEMES)}, so that this program can read it"
                )
        if self.arguments and _names_quantization(self.arguments[-1]):
            raise ValueError(f"arguments: {self.arguments[-1]} has no value; add one of {', '.join(FP8_SCHEMES)}")
        if self.quantization not in (None, *FP8_SCHEMES):
            raise ValueError(
                f"arguments: --quantization {self.quantization} cannot be applied to the bfloat16 weights that the "
                f"trainer sends; use one of {', '.join(FP8_SCHEMES)}"
            )
        return self


class GenerationConfig(Section):
    """The engine that generates responses."""

    backend: Literal["megatron", "vllm"] = "megatron"
    """megatron: the training processes generate with the weights that they train. vllm: vLLM's servers generate with
    the weights that the trainer sends to them."""
    max_token_mult_prob_error: Annotated[float, Field(gt=1), BeforeValidator(refuse_bool)] | None = None
    """End the run before an update whose `token_mult_prob_error` is larger: sampler and trainer disagree too much."""
    first_step_tolerance: Annotated[float, Field(gt=0), BeforeValidator(refuse_bool)] | None = None
    """End the run before its first update if `logprob_error`, `kl_penalty` or `probs_ratio` - 1 is larger, because the
    weights of sampler, policy and reference are still the same. null: 0.001 in float32, 0.2 in bfloat16 and FP8."""
    offload: bool = False
    """During generation, keep the policy's tensors in host memory. megatron: all tensors except the weights. vllm: all
    tensors; the servers use the same GPUs, and sleep during scoring and training."""
    cuda_graphs: bool = True
    """megatron: on a GPU, replay the kernels of a decoding step as a CUDA graph. No effect for MoE
    models, in FP8, under tensor or pipeline parallelism, or in `deterministic` runs. For vLLM, see vllm.arguments."""
    vllm: VLLMConfig = VLLMConfig()

    @model_validator(mode="after")
    def _used(self) -> GenerationConfig:
        if self.backend != "vllm" and self.vllm != VLLMConfig():
            raise ValueError(f"vllm: requires backend=vllm, not {self.backend}")
        if self.backend == "vllm" and not self.cuda_graphs:
            raise ValueError("cuda_graphs: requires backend=megatron; for vLLM, write vllm.arguments=[--enforce-eager]")
        return self


class RolloutOptions(Section):
    """Options that all algorithms on rollouts share."""

    num_prompts_per_step: PositiveInt = 16
    """Prompts of a step, over all processes."""
    num_generations_per_prompt: PositiveInt = 8
    """Number of responses to each prompt. They are the prompt's group."""
    max_new_tokens: PositiveInt | None = 256
    """Maximum number of tokens of a response. null: as many as data.max_sequence_length leaves after the prompt."""
    temperature: Annotated[float, Field(gt=0), BeforeValidator(refuse_bool)] = 1.0
    """Divisor of the logits, in sampling and in training."""
    top_k: PositiveInt | None = None
    """Sample only from the k most likely tokens."""
    top_p: Annotated[float, Field(gt=0, le=1), BeforeValidator(refuse_bool)] = 1.0
    """Sample only from the most likely tokens that together have this probability."""
    min_p: Annotated[float, Field(ge=0, le=1), BeforeValidator(refuse_bool)] = 0.0
    """Sample only from tokens with at least this fraction of the most likely token's probability."""
    keep_sampling_mask: bool | None = None
    """In training, normalise probabilities over only the tokens that top_k, top_p and min_p keep. The default is true
    if one of them leaves out tokens (docs/rollouts.md)."""
    max_kept_tokens: PositiveInt = 1024
    """Maximum number of tokens in a sampling mask. Any further, less likely tokens are not sampled."""
    sample_unused_ids: bool = False
    """Also sample the model's last ids, for which the tokenizer has no token; they have no text. By default, such ids
    have no probability, in sampling and in training."""
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a response."""
    generation_batch_size: PositiveInt = 64
    """Sequences that a replica generates at the same time."""
    advantage_epsilon: NonNegative = 1e-4
    """Constant added to the divisor of advantages, which is a standard deviation, or for maxrl the mean reward."""
    num_updates_per_rollout: PositiveInt = 1
    """Passes over each step's rollouts. A pass is one optimizer step, or several with train_global_batch_size."""
    train_global_batch_size: PositiveInt | None = None
    """Number of responses in one update, over all processes; a multiple of the group size. The groups are shuffled in
    each step. Each pass (num_updates_per_rollout) uses each response once. The default is all responses of a step."""
    dynamic_sampling_rounds: PositiveInt = 1
    """Maximum number of rounds of sampling in a step. Between two rounds, new prompts replace the groups in which all
    rewards are equal (DAPO). 1: there is no second round, so these groups stay."""
    max_staleness: Count = 0
    """Number of future steps whose responses are generated during a step. A response is used in training at most this
    many weight versions after its generation. More than 0 needs generation.backend=vllm (docs/rollouts.md)."""
    overlong_cache_length: PositiveInt | None = None
    """Penalize responses of more than max_new_tokens minus this number of tokens. The penalty rises linearly to 1 at
    max_new_tokens (DAPO); if that is null, at data.max_sequence_length. null: no penalty."""
    mask_truncated: bool = False
    """Exclude truncated responses (cut off by max_new_tokens) from the loss."""
    num_validation_generations: PositiveInt = 1
    """Responses to each validation prompt. 1: a greedy response. More: sampled responses, whose metrics include pass@k
    and maj@k (docs/rollouts.md)."""
    validation_k: tuple[PositiveInt, ...] | None = None
    """Values of k for pass@k and maj@k, at most num_validation_generations. null: 1 and num_validation_generations."""
    num_logged_samples: Count = 4
    """Number of samples of each step that are written to samples.jsonl and to the trackers, at least two of each chosen
    prompt. Each has its reward, its mean advantage, and the record's `answer` as ground truth. MLflow gets a file
    samples/step_000123.json."""

    @property
    def filters_tokens(self) -> bool:
        """True if some tokens are never sampled."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0

    @property
    def sampled_at_most(self) -> int | None:
        """Maximum number of tokens in the sampling mask at a position; None if no mask is stored.

        The mask contains the tokens that top-k, top-p and min-p left to sample from.
        """
        if not self.filters_tokens or self.keep_sampling_mask is False:
            return None
        return min(self.max_kept_tokens, self.top_k or self.max_kept_tokens)

    @property
    def compared(self) -> Literal["group", "batch"] | None:
        """Samples whose rewards are compared: those of the same prompt ("group"), or all of a step ("batch").

        If the compared rewards are equal, an update learns nothing. None: an update can learn even from equal rewards.
        """
        return None

    @property
    def compares_named_rewards(self) -> bool:
        """Whether advantages are computed from each named reward, not from the sum of the rewards."""
        return False

    @property
    def reads_score_norms(self) -> bool:
        """Whether advantages are computed from each token's reward and ‖∂ log π / ∂ logits‖²."""
        return False

    @model_validator(mode="after")
    def _has_a_mask(self) -> Self:
        if self.keep_sampling_mask and not self.filters_tokens:
            raise ValueError(
                "keep_sampling_mask: needs top_k, top_p or min_p; without them all tokens are kept, so leave "
                "keep_sampling_mask out"
            )
        if self.sampled_at_most is None and self.max_kept_tokens != type(self).model_fields["max_kept_tokens"].default:
            raise ValueError(
                "max_kept_tokens: has an effect only if the sampling mask is kept (docs/rollouts.md); leave "
                "max_kept_tokens out"
            )
        return self

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        cache, limit = self.overlong_cache_length, self.max_new_tokens
        if cache is not None and limit is not None and cache > limit:
            raise ValueError(f"overlong_cache_length: must be at most max_new_tokens ({limit})")
        if self.dynamic_sampling_rounds > 1 and self.num_generations_per_prompt == 1:
            raise ValueError(
                "dynamic_sampling_rounds: compares several responses to a prompt; set num_generations_per_prompt "
                "to 2 or more"
            )
        return self

    @property
    def ks_of_validation(self) -> tuple[int, ...]:
        """Values of k of pass@k and maj@k, ascending; empty for greedy validation."""
        total = self.num_validation_generations
        return () if total == 1 else tuple(sorted(set(self.validation_k or (1, total))))

    @model_validator(mode="after")
    def _votes(self) -> Self:
        total = self.num_validation_generations
        if self.validation_k is not None and (total == 1 or max(self.validation_k, default=0) > total):
            raise ValueError(
                f"validation_k: must be at most num_validation_generations, which is {total}"
                + (" (greedy); raise that number, or leave validation_k out" if total == 1 else "")
            )
        if self.validation_k == ():
            raise ValueError(
                "validation_k: must not be empty; leave validation_k out to get [1, num_validation_generations]"
            )
        return self


def _translated(loss: Any) -> Any:
    """Return the options of a loss with this package's names, even if they were given with NeMo RL's names."""
    return options_class(loss).translate(loss) if isinstance(loss, dict) else loss


def _name_of_loss(loss: Any) -> str:
    return f"({loss.get('name', 'clipped_pg') if isinstance(loss, dict) else getattr(loss, 'name', 'clipped_pg')})"


PolicyLoss = Annotated[
    Annotated[ClippedPGOptions, Tag("(clipped_pg)")]
    | Annotated[DPPOTVOptions, Tag("(dppo_tv)")]
    | Annotated[DPPOKLOptions, Tag("(dppo_kl)")]
    | Annotated[SAPOOptions, Tag("(sapo)")]
    | Annotated[VESPOOptions, Tag("(vespo)")]
    | Annotated[LUSPOOptions, Tag("(luspo)")]
    | Annotated[GMPOOptions, Tag("(gmpo)")]
    | Annotated[DROOptions, Tag("(dro)")],
    Discriminator(_name_of_loss),
    BeforeValidator(_translated),
]
"""Options of the loss that `name` chooses."""


class GRPOTrainerConfig(TrainerConfig):
    validate_at_start: bool = True


class RLConfig(TrainingConfig):
    """Configuration that GRPO and PPO share: rollouts, judging, a policy-gradient loss."""

    trainer: GRPOTrainerConfig = GRPOTrainerConfig(max_epochs=1)
    loss: PolicyLoss = ClippedPGOptions()
    environment: EnvironmentConfig = EnvironmentConfig()
    generation: GenerationConfig = GenerationConfig()
    reference_sync: ReferenceSyncConfig | None = None

    @property
    def rollouts(self) -> RolloutOptions:
        """Options of the algorithm: the section that has the algorithm's name."""
        options: RolloutOptions = getattr(self, self.algorithm)
        return options

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer updates in a training step."""
        whole = self.batch.global_batch_size
        return self.rollouts.num_updates_per_rollout * (whole // (self.rollouts.train_global_batch_size or whole))

    @property
    def first_update_step(self) -> int:
        """First step that trains the policy."""
        return 1

    @model_validator(mode="after")
    def _fits_agents(self) -> Self:
        if self.environment.name != "agent":
            return self
        if self.rollouts.reads_score_norms:
            raise ValueError(
                f"{self.algorithm}.advantage_estimator: optimal_token_baseline compares tokens at equal places of "
                "responses, but an agent's sessions have any number of rows; choose another estimator"
            )
        return self

    @model_validator(mode="after")
    def _corrects_fp8(self) -> Self:
        scheme = self.generation.vllm.quantization
        if scheme is not None and not self.loss.use_importance_sampling_correction:
            raise ValueError(
                f"generation.vllm.arguments: with --quantization {scheme}, sampler and trainer compute different "
                "probabilities; set loss.use_importance_sampling_correction=true and "
                "loss.truncated_importance_sampling_ratio=2"
            )
        return self

    @property
    def sampler_has_blocks(self) -> bool:
        return self.generation.vllm.quantization == "fp8_per_block"

    @model_validator(mode="after")
    def _records_keys(self) -> Self:
        if self.model.indexer_replay and self.generation.backend == "vllm":
            raise ValueError(
                "model.indexer_replay: needs generation.backend=megatron, because vLLM does not return the keys that "
                "its indexers choose; leave model.indexer_replay out"
            )
        return self

    @model_validator(mode="after")
    def _observes(self) -> Self:
        if self.loss.observation_nll_weight and self.environment.max_turns == 1:
            raise ValueError(
                "loss.observation_nll_weight: needs observations, but with environment.max_turns=1 conversations have "
                "none; raise environment.max_turns, or leave loss.observation_nll_weight out"
            )
        if self.loss.observation_nll_weight and self.rollouts.sampled_at_most is not None:
            raise ValueError(
                "loss.observation_nll_weight: cannot be used with a sampling mask, which covers only sampled tokens, "
                f"not observations; set {self.algorithm}.keep_sampling_mask=false, or sample from all tokens"
            )
        return self

    @model_validator(mode="after")
    def _has_a_reference(self) -> Self:
        if self.reference_sync is not None and self.loss.reference_policy_kl_penalty == 0:
            raise ValueError(
                "reference_sync: needs a reference, which a run with loss.reference_policy_kl_penalty=0 does not "
                "have; leave reference_sync out"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _set_batch_size(cls, values: Any) -> Any:
        """Set the global batch size to the number of a step's responses."""
        if not (isinstance(values, dict) and isinstance(values.get(cls.algorithm) or {}, dict)):
            return values
        given, defaults = values.get(cls.algorithm) or {}, cls.model_fields[cls.algorithm].default
        names = ("num_prompts_per_step", "num_generations_per_prompt")
        sizes = [given.get(name, getattr(defaults, name)) for name in names]
        batch = values.get("batch") or {}
        if isinstance(batch, dict) and all(isinstance(size, int) for size in sizes):
            total = sizes[0] * sizes[1]
            if batch.get("global_batch_size", total) != total:
                raise ValueError(
                    f"batch.global_batch_size: must be num_prompts_per_step x num_generations_per_prompt ({total}); "
                    "leave batch.global_batch_size out"
                )
            values = {**values, "batch": {**batch, "global_batch_size": total}}
        return values

    @property
    def samples(self) -> bool:
        return True

    @property
    def max_response_length(self) -> int:
        """Maximum number of tokens in a response to the shortest prompt."""
        return self.rollouts.max_new_tokens or self.data.max_sequence_length - 1

    @property
    def max_answer_length(self) -> int:
        return self.max_response_length * self.environment.max_turns

    @property
    def keeps_reference(self) -> bool:
        return self.loss.reference_policy_kl_penalty > 0

    def samples_exactly(self, replays: bool = False) -> bool:
        """Return whether the sampler's log-probabilities equal the policy's.

        They do if the policy itself generates in fp32, and sampler and loss normalise over the same tokens: either no
        tokens are filtered, or the sampling mask is stored.

        Args:
            replays: whether the run trains on recorded rollouts.
        """
        own = not replays and self.generation.backend == "megatron"
        same_tokens = not self.rollouts.filters_tokens or self.rollouts.sampled_at_most is not None
        return own and self.model.in_float32 and same_tokens

    def is_on_policy(self, replays: bool = False) -> bool:
        """Return whether importance ratios are fixed at 1.

        This is `loss.force_on_policy_ratio` if it is set. Otherwise it is true if a step makes one update, with the
        weights that generated the samples."""
        chosen = self.loss.force_on_policy_ratio
        only = self.updates_per_step == 1
        return (only and self.samples_exactly(replays)) if chosen is None else chosen

    def scores_samples(self, replays: bool = False) -> bool:
        """Return whether a step computes log-probabilities before its updates, instead of using the sampler's."""
        return not self.is_on_policy(replays) or (self.loss.use_kl_in_reward and not self.samples_exactly(replays))

    def effective_loss_options(self, replays: bool = False) -> PolicyLossOptions:
        """Return the options `loss` with the `force_on_policy_ratio` that the run uses (see `is_on_policy`)."""
        return replace(self.loss, force_on_policy_ratio=self.is_on_policy(replays))

    @property
    def samples_per_step(self) -> int:
        return self.rollouts.num_prompts_per_step

    @property
    def rows_per_group(self) -> int:
        return self.rollouts.num_generations_per_prompt

    @property
    def max_prompt_length(self) -> int:
        """Maximum number of tokens in a prompt. A longer prompt would leave no room for a response."""
        return self.data.max_sequence_length - (self.rollouts.max_new_tokens or 1)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        own = self.algorithm
        if (self.rollouts.max_new_tokens or 1) >= self.data.max_sequence_length:
            raise ValueError(
                f"{own}.max_new_tokens: must be less than data.max_sequence_length "
                f"({self.data.max_sequence_length}), which counts the prompt too; null: as many as it leaves"
            )
        if (self.rollouts.overlong_cache_length or 0) > self.data.max_sequence_length:
            raise ValueError(
                f"{own}.overlong_cache_length: must be at most data.max_sequence_length "
                f"({self.data.max_sequence_length})"
            )
        size, group = self.rollouts.train_global_batch_size, self.rollouts.num_generations_per_prompt
        if size is not None and (size % group or self.batch.global_batch_size % size):
            raise ValueError(
                f"{own}.train_global_batch_size: {size} must be a multiple of {own}.num_generations_per_prompt "
                f"({group}), and must divide the number of responses of a step ({self.batch.global_batch_size})"
            )
        if self.loss.force_on_policy_ratio and self.updates_per_step > 1:
            why = "num_updates_per_rollout" if self.rollouts.num_updates_per_rollout > 1 else "train_global_batch_size"
            raise ValueError(
                f"loss.force_on_policy_ratio: needs exactly one update in each step, but {own}.{why} causes several; "
                "leave out one of the two keys"
            )
        if self.rollouts.max_staleness:
            self._check_stale()
        if self.data.overlong != "drop":
            raise ValueError("data.overlong: prompts are never truncated, only dropped; leave data.overlong out")
        return self

    def _check_stale(self) -> None:
        """Raise ValueError for options that cannot be used with samples that older weights generated."""
        name, loss = f"{self.algorithm}.max_staleness", self.loss
        if self.generation.backend != "vllm":
            raise ValueError(f"{name}: needs generation.backend=vllm, whose servers generate during training")
        if self.generation.offload:
            raise ValueError(f"{name}: sleeping servers cannot generate during training; leave out generation.offload")
        if self.environment.name == "reward_model":
            raise ValueError(
                f"{name}: needs judges outside the training processes, but a reward model judges in the training "
                "processes; use another environment"
            )
        if self.rollouts.dynamic_sampling_rounds > 1:
            raise ValueError(
                f"{name}: requests responses for later steps, but dynamic_sampling_rounds makes the prompts of these "
                "steps unknown; leave out dynamic_sampling_rounds"
            )
        if not loss.use_importance_sampling_correction or loss.truncated_importance_sampling_ratio is None:
            raise ValueError(
                f"{name}: trains on samples of older weights; set loss.use_importance_sampling_correction=true "
                "and a loss.truncated_importance_sampling_ratio, such as 2"
            )
        if loss.force_on_policy_ratio:
            raise ValueError(
                f"{name}: trains on samples of older weights, but loss.force_on_policy_ratio needs samples of the "
                "current weights; leave out loss.force_on_policy_ratio"
            )
        if self.generation.max_token_mult_prob_error is not None:
            raise ValueError(
                f"{name}: trains on samples of older weights, so sampler and trainer compute different "
                "log-probabilities; leave out generation.max_token_mult_prob_error"
            )


class GRPOAlgorithmConfig(RolloutOptions):
    """Options of rollouts, and of the advantages that are computed from their rewards."""

    advantage_estimator: Literal[
        "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "gdpo", "maxrl", "optimal_token_baseline"
    ] = "grpo"
    """How advantages follow from rewards; see the table in docs/algorithms.md."""
    use_leave_one_out_baseline: bool | None = None
    """grpo: the baseline of a response is the mean reward of the other responses of its group; null: no."""
    normalize_rewards: bool | None = None
    """grpo: divide advantages by the standard deviation of the group's rewards; null: yes. dr_grpo is grpo without this
    division; rloo is grpo without this division, with the leave-one-out baseline."""
    advantage_deviation: Literal["sample", "population"] = "sample"
    """grpo: divisor in the standard deviation of n rewards: n − 1 (sample) or n (population)."""
    minus_baseline: bool = False
    """reinforce_plus_plus: first subtract the mean reward of a prompt's responses from each of their rewards."""

    @property
    def compared(self) -> Literal["group", "batch"] | None:
        if self.advantage_estimator == "optimal_token_baseline":  # token rewards with equal sums may differ
            return None
        whole_batch = self.advantage_estimator == "reinforce_plus_plus" and not self.minus_baseline
        return "batch" if whole_batch else "group"

    @property
    def compares_named_rewards(self) -> bool:
        return self.advantage_estimator == "gdpo"

    @property
    def reads_score_norms(self) -> bool:
        return self.advantage_estimator == "optimal_token_baseline"

    @property
    def baseline_and_scale(self) -> tuple[bool, bool]:
        """Whether baselines leave out the response's own reward, and whether to divide by the standard deviation."""
        if self.advantage_estimator == "grpo":
            return bool(self.use_leave_one_out_baseline), self.normalize_rewards is not False
        return self.advantage_estimator == "rloo", False

    @model_validator(mode="after")
    def _estimates(self) -> GRPOAlgorithmConfig:
        of_grpo = {"use_leave_one_out_baseline", "normalize_rewards", "advantage_deviation"}
        for name in sorted(self.model_fields_set & (of_grpo | {"minus_baseline"})):
            owner = "grpo" if name in of_grpo else "reinforce_plus_plus"
            if self.advantage_estimator != owner and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name}: is an option of advantage_estimator={owner}; leave {name} out")
        epsilon = type(self).model_fields["advantage_epsilon"].default
        if self.advantage_estimator == "optimal_token_baseline" and self.advantage_epsilon != epsilon:
            raise ValueError(
                "advantage_epsilon: has no effect, because optimal_token_baseline does not divide advantages; "
                "leave advantage_epsilon out"
            )
        if self.advantage_estimator in ("gdpo", "maxrl") and self.overlong_cache_length is not None:
            reason = (
                "does not read the sum of rewards" if self.compares_named_rewards else "needs rewards of at least 0"
            )
            raise ValueError(
                f"overlong_cache_length: {self.advantage_estimator} {reason}; leave overlong_cache_length out"
            )
        return self

    @model_validator(mode="after")
    def _grouped(self) -> GRPOAlgorithmConfig:
        if self.num_generations_per_prompt == 1 and self.advantage_estimator != "reinforce_plus_plus":
            raise ValueError(
                f"num_generations_per_prompt: {self.advantage_estimator} compares the responses to a prompt; use "
                "2 or more"
            )
        return self


class GRPOConfig(RLConfig):
    algorithm: ClassVar[str] = "grpo"
    grpo: GRPOAlgorithmConfig = GRPOAlgorithmConfig()

    @model_validator(mode="after")
    def _rewards_tokens(self) -> GRPOConfig:
        if self.loss.use_kl_in_reward and self.grpo.advantage_estimator != "reinforce_plus_plus":
            raise ValueError("loss.use_kl_in_reward: needs grpo.advantage_estimator=reinforce_plus_plus")
        return self

    @model_validator(mode="after")
    def _has_several_rewards(self) -> GRPOConfig:
        if self.grpo.compares_named_rewards and len(self.environment.rewards) < 2:
            raise ValueError(
                "grpo.advantage_estimator: gdpo compares several rewards by name; set environment.name=weighted with "
                "two or more environment.rewards"
            )
        return self


Fraction01 = Annotated[float, Field(ge=0, le=1), BeforeValidator(refuse_bool)]


class PPOAlgorithmConfig(RolloutOptions):
    """Options of PPO's rollouts, and of GAE (arXiv:1506.02438), which computes their advantages."""

    num_generations_per_prompt: PositiveInt = 1
    """Responses to each prompt."""
    gamma: Fraction01 = 1.0
    """Discount per token."""
    gae_lambda: Fraction01 = 0.95
    """1: advantages use only the rewards. Less than 1: the critic's values replace a part of the later rewards, which
    lowers the variance."""
    whiten_advantages: bool = True
    """Subtract the mean of all tokens' advantages and divide by their standard deviation."""


class CriticOptimizerConfig(OptimizerConfig):
    lr: FractionBelowOne = 1e-5


class CriticConfig(Section):
    """The critic, which predicts the value of each token's state."""

    path: Directory | None = None
    """Model that the critic starts from: a reward model, or a language model, which gets a new head of zeros. The
    default is `model.path`. Another model needs the policy's vocabulary, and must fit the parallel layout; its
    vision tower is frozen, and the router options and recompute_modules of `model` do not apply to it."""
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    """Optimizer of the critic. A step updates the critic as often as the policy; pretraining_steps update only the
    critic."""
    value_clip: PositiveFloat | None = 0.2
    """PPO's clipping of values: a value gets no gradient after it has moved toward its return by more than this number
    within a step. null: no clipping."""
    pretraining_steps: Count = 0
    """Number of steps at the start of the run in which only the critic is trained."""
    offload: bool = False
    """Keep the critic in host memory while it is not used."""
    export_hf: bool = False
    """Write the critic to output_dir/critic at the end, as a sequence classifier with one label."""


class PPOConfig(RLConfig):
    algorithm: ClassVar[str] = "ppo"
    ppo: PPOAlgorithmConfig = PPOAlgorithmConfig()
    critic: CriticConfig = CriticConfig()

    @property
    def first_update_step(self) -> int:
        return 1 + self.critic.pretraining_steps

    def check_steps(self, steps: int) -> None:
        if self.critic.pretraining_steps >= steps:
            raise UserError(
                f"critic.pretraining_steps={self.critic.pretraining_steps}: must be less than the steps of the "
                f"run ({steps}), so that the policy is trained"
            )

    @property
    def critic_model(self) -> ModelConfig:
        """Configuration of the critic's model, with the policy's precision."""
        own = self.model
        if self.critic.path is None or self.critic.path.resolve() == own.path.resolve():
            policys = {"moe_router_replay": False, "indexer_replay": False, "mtp_loss_scaling_factor": 0.0}
            return own.model_copy(update={"head": "reward", "lora": None, **policys})
        return ModelConfig(
            path=self.critic.path,
            dtype=own.dtype,
            head="reward",
            trust_remote_code=own.trust_remote_code,
            recompute_activations=own.recompute_activations,
        )

    @model_validator(mode="after")
    def _trains_tower(self) -> PPOConfig:
        if self.critic.optimizer.vision_tower_lr is not None and self.critic_model.vision_tower == "frozen":
            raise ValueError(
                "critic.optimizer.vision_tower_lr: has no effect, because the critic's vision tower is frozen; leave "
                "critic.optimizer.vision_tower_lr out"
            )
        return self

    @model_validator(mode="after")
    def _whitens(self) -> PPOConfig:
        epsilon = type(self.ppo).model_fields["advantage_epsilon"].default
        if not self.ppo.whiten_advantages and self.ppo.advantage_epsilon != epsilon:
            raise ValueError(
                "ppo.advantage_epsilon: has an effect only with ppo.whiten_advantages=true; leave "
                "ppo.advantage_epsilon out"
            )
        return self

    @model_validator(mode="after")
    def _exports(self) -> PPOConfig:
        if self.critic.export_hf and not self.checkpoint.export_hf:
            raise ValueError(
                "critic.export_hf: checkpoint.export_hf=false exports nothing; leave out one of the two keys"
            )
        return self
