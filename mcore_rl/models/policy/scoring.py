"""Models that score tokens: the base class of policy, reward model, teacher and reference model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl import platform
from mcore_rl.config import TrainingConfig
from mcore_rl.data.batching import Microbatch, divide, microbatch_planner
from mcore_rl.data.images import IMAGES, ImageReader, PlacedImage
from mcore_rl.data.prefix_plan import token_identities
from mcore_rl.distributed.batched_data_dict import BatchedDataDict, BatchShare, LocalBatch, batch_share
from mcore_rl.distributed.collectives import all_gather, all_reduce, broadcast_from_holder, fetch_rows
from mcore_rl.distributed.divergences import HiddenAndHead
from mcore_rl.errors import ContractError, TrainingError
from mcore_rl.losses.common import token_mask_of
from mcore_rl.models.megatron.families.vision_language import VisionLanguage
from mcore_rl.models.megatron.layers.fp8 import describe_fp8
from mcore_rl.models.megatron.layers.vision import distinct_images
from mcore_rl.models.megatron.model.build import build_model
from mcore_rl.models.megatron.model.hf_config import has_separate_head, hf_config_of
from mcore_rl.models.megatron.model.hf_directory import SafetensorsDirectory
from mcore_rl.models.megatron.model.lora import lora_of
from mcore_rl.models.megatron.parallel_state import (
    destroy_parallel,
    groups_of,
    initialize_parallel,
    is_run_layout,
    run_topology,
)
from mcore_rl.models.megatron.training.forward_step import (
    LogprobHead,
    RewardOfSequences,
    TopKHead,
    ValuesOfTokens,
    counted_of_rows,
    final_hidden_states,
    hidden_of_rows,
    run_microbatches,
)
from mcore_rl.models.megatron.training.optimizer import Offload
from mcore_rl.models.megatron.weight_mapping import padded_vocab_size
from mcore_rl.models.megatron.weights.adapters import add_adapters
from mcore_rl.models.megatron.weights.conversion import load_hf_weights, weights_of
from mcore_rl.models.policy.interfaces import LogprobOutputSpec
from mcore_rl.utils.console import size_text


def _scored_tokens(data: Mapping[str, Any], counted_only: bool) -> Tensor:
    """Return a mask [B, S − 1] of the predicted tokens to score: all tokens, or those that carry loss."""
    return token_mask_of(data, data["token_mask"]) if counted_only else torch.ones(data["input_ids"][:, 1:].shape)


class ScoringModel:
    """A model that computes log-probabilities, logits, rewards or values.

    Its parallel layout may differ from the trained model's layout. In this case, it collects the rows of all replicas
    of the trained model, and returns to each process the results for this process's rows. Models with the same layout
    share process groups.

    Args:
        config: the run's configuration. For a model of another size or family than the policy, pass
            `config.model_copy(update={"model": ModelConfig(path=…)})`.
        rows_per_unit: number of neighbouring rows that must be in the same microbatch, such as 2 for preference pairs.

    Raises:
        UserError: the model directory or the parallel layout does not fit the configuration.
    """

    may_differ = True
    """Whether a model of this class may have another parallel layout than the models that were built before."""

    def __init__(self, config: TrainingConfig, rows_per_unit: int = 1) -> None:
        config = self.config = platform.resolve(config)
        if config.deterministic:
            platform.make_deterministic()
        self.hf_config = hf_config_of(config.model)
        self.topology = initialize_parallel(config.parallel, self.may_differ)
        try:
            with groups_of(self.topology):
                self._build(rows_per_unit)
        except BaseException:
            destroy_parallel(self.topology)  # no model was built that uses the process groups
            raise

    def _build(self, rows_per_unit: int) -> None:
        config = self.config
        batching = microbatch_planner(config, rows_per_unit, self.topology.data.size)
        self.model = build_model(self.hf_config, config.model, config.parallel, self.topology)
        load_hf_weights(self.model, SafetensorsDirectory(config.model.path))
        if self.model.tower is not None:
            self.model.tower.source = ImageReader(config.model.path)
        if config.model.lora is not None:
            with_tower = config.model.vision_tower == "trained"
            lora = lora_of(config.model.lora, self.model.family, config.seed, with_tower)
            self.model = add_adapters(self.model, lora)
        self._count_flops()
        self.batching = replace(batching, attention_length=self._attention_length())
        self.chunks: list[Any] = list(self.model.chunks)
        self.weights_offload = Offload(keep=True)

    @property
    def has_own_layout(self) -> bool:
        """Whether this model's parallel layout differs from the trained model's."""
        return not is_run_layout(self.topology)

    @property
    def rank(self) -> int:
        """Rank of this process in the run."""
        return torch.distributed.get_rank()

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the files and prints the messages."""
        return self.rank == 0

    def parameters(self) -> Iterator[Tensor]:
        """Return this rank's shards of the weights, including the routers' biases."""
        self.finish_param_gather()
        return (tensor for chunk in self.model.chunks for _, tensor in weights_of(chunk))

    def describe(self) -> str:
        """Describe the model in one line: its family, its size, and its memory on this rank."""
        held = sum(tensor.nbytes for tensor in self.parameters())
        model, problem = self.config.model, platform.te_problem()
        if problem is None and model.dtype == "float32":
            problem = "multiplies float32 with TF32's precision"
        is_local = model.transformer_impl == "local"
        layers = "local layers" if is_local else "layers of Transformer Engine"
        if platform.has_gpu() and problem not in (None, "is not installed"):
            layers += f" (Transformer Engine {problem})" if is_local else f", which {problem}"
        size = f"{self.num_parameters:,} parameters, weights of {size_text(held)} a rank in {model.dtype}"
        mixers = dict.fromkeys(filter(None, (mixer.describe() for mixer in self._mixers)))
        heads = ["an LM head apart from the embeddings, which differ from it although config.json ties them"]
        notes = heads if model.head == "lm" and has_separate_head(model.path, model.trust_remote_code) else []
        if self.model.tower is not None:
            trained = "trained" if self.model.lora is None else "adapted"
            notes.append(f"a vision tower that is {trained if self.model.tower.is_trained else 'frozen'}")
        layout = [self.describe_layout()] if self.has_own_layout else []
        return ", ".join((str(model.path), size, layers, *mixers, *notes, *layout))

    def describe_fp8(self) -> str | None:
        """Describe in one line how products are computed in FP8; None if they are not."""
        fp8 = self.model.fp8
        return None if fp8 is None else describe_fp8(fp8, self.model.family.num_layers, self.config.pack_multiple)

    def describe_logits(self) -> str | None:
        """Describe in one line whether logits are kept for the backward pass; None for a reward model."""
        if self.model.family.has_reward_head:
            return None
        batch, rows, limit = self.config.batch, self.batching.rows_per_unit, self.model.logits_bytes
        tokens = self.config.pack_width(rows) if batch.packing else self.config.longest_record(rows)
        columns = -(-self.model.vocab_size // self.topology.tensor.size)
        most = 4 * tokens * batch.micro_batch_size * columns // self.topology.context.size
        kept = "kept for the backward pass"
        if most > limit:
            kept += f" if they take at most {size_text(int(limit))} (model.logits_memory_gib), otherwise recomputed"
        return f"logits of a microbatch: at most {size_text(most)} on a rank, {kept}"

    def describe_untrained(self) -> str | None:
        """Describe in one line the tensors of the model directory that are not trained; None if there are none.

        An export copies these tensors unchanged.
        """
        names = sorted(filter(self.model.family.copies, SafetensorsDirectory(self.config.model.path).names()))
        if not names:
            return None
        return f"{len(names)} tensors of {self.config.model.path} are not trained and exported unchanged: {names[0]}, …"

    def offload(self) -> int:
        """Move the weights to the host; return the number of bytes freed on the device."""
        return self.weights_offload.offload(self.parameters())

    def prepare_for_lp_inference(self, *args: Any, **kwargs: Any) -> None:
        """Prepare the model for scoring: restore the weights to the device."""
        self.weights_offload.restore()
        for chunk in self.chunks:
            chunk.eval()

    def finish_param_gather(self) -> None:
        """Wait for a pending all-gather of the weights. Collective.

        Training waits for the weights by itself. Any other code must call this method before it reads the weights.
        """
        self.model.finish_param_gather()

    def require_weights(self, purpose: str) -> None:
        """Raise RuntimeError if the weights are offloaded; otherwise wait for a pending all-gather of the weights.

        Args:
            purpose: the method that needs the weights; the error message starts with it.
        """
        self.require(purpose, self.weights_offload)
        self.finish_param_gather()

    def require(self, purpose: str, *offloads: Offload) -> None:
        """Raise RuntimeError if the tensors of any of `offloads` are offloaded.

        Args:
            purpose: the method that needs the tensors; the error message starts with it.
        """
        if any(offload.is_away for offload in offloads):
            raise RuntimeError(f"{purpose}: weights or optimizer state are offloaded; call prepare_for_training first")

    def shutdown(self) -> bool:
        """Release the process groups. They are destroyed when no model uses them any more."""
        destroy_parallel(self.topology)
        return True

    @property
    def num_parameters(self) -> int:
        """Number of parameters in the whole model, counted as Hugging Face counts them."""
        return self.model.family.num_parameters()

    def describe_layout(self) -> str:
        """Describe the parallel layout in one line."""
        parallel = self.config.parallel
        sizes = {name: getattr(self.topology, name).size for name in ("tensor", "pipeline", "context", "data")}
        text = " x ".join(f"{name} {size}" for name, size in sizes.items())
        if parallel.expert_model_parallel_size > 1:
            text += f", expert {parallel.expert_model_parallel_size} (tensor {parallel.expert_tensor_size})"
        return text + (", sequence parallel" if parallel.sequence_parallel else "") + f" on {platform.device().type}"

    def training_flops(
        self, lengths: Sequence[int], before: Sequence[int] | None = None, predicted: float | None = None
    ) -> float:
        """Return the number of floating-point operations for forward and backward over sequences of these lengths.

        Each parameter costs 6 operations per token; a frozen parameter under an adapter costs 4. The input embedding
        costs none, because it is a lookup. The LM head costs nothing for tokens whose prediction no loss reads. The
        operations of the token mixers are added: for causal attention over n tokens, 6·n²·heads·head_dim per layer; for
        a gated delta net, the products with its states; for sparse attention, those of the chosen keys and the
        indexer's forward pass. Recomputation and a vision tower (`tower_flops`) are not counted.

        Args:
            lengths: number of tokens in each sequence.
            before: for each sequence, the number of preceding tokens. The sequence attends to them, but they are not
                computed again. Default: 0.
            predicted: number of tokens whose prediction the loss reads. Default: all.
        """
        sequences = list(zip(lengths, before or [0] * len(lengths), strict=True))
        mixing = (n * sum(mixer.flops(*sequence) for sequence in sequences) for mixer, n in self._mixers.items())
        left_out = 0.0 if predicted is None else max(sum(lengths) - predicted, 0.0)
        return self._flops_of_weights * sum(lengths) - self._flops_of_head * left_out + sum(mixing)

    def _count_flops(self) -> None:
        """Compute the operations of the weights per token, and count the layers of each token mixer."""
        family, lora = self.model.family, self.model.lora
        of_parameter = 6.0 if lora is None else 4.0
        self._flops_of_weights = of_parameter * family.active_parameters()
        self._flops_of_head = 0.0 if family.has_reward_head else of_parameter * family.vocab_size * family.hidden_size
        if lora is not None:
            self._flops_of_weights += 6.0 * lora.active_parameters(family)
        mixers = map(family.token_mixer, range(family.num_layers))
        self._mixers = Counter(mixer for mixer in mixers if mixer is not None)

    def _attention_length(self) -> float:
        """Return the sequence length at which attention costs as much as all other operations."""
        per_token = sum(n * mixer.flops_per_token() for mixer, n in self._mixers.items())
        squared = sum(n * mixer.flops_per_token_squared() for mixer, n in self._mixers.items())
        return (self._flops_of_weights + per_token) / squared if squared else math.inf

    def flops_of(self, data: BatchedDataDict[Any]) -> float:
        """Return `training_flops` and `tower_flops` of a global batch, with the LM head for the tokens that carry loss.

        A common prefix counts once if the model computes it once.
        """
        predicted = float(token_mask_of(data, data["token_mask"]).count_nonzero()) if "token_mask" in data else None
        flops = self.training_flops(*self.batching.pieces(data), predicted) + self.tower_flops(data.get(IMAGES) or ())
        return batch_share(data).sum(flops)[0]

    def tower_flops(self, of_rows: Iterable[Sequence[PlacedImage] | None]) -> float:
        """Return the number of floating-point operations for forward and backward of a trained vision tower.

        Each distinct image of the rows counts once. A frozen tower counts nothing: like scoring, it is no training.
        """
        tower, family = self.model.tower, self.model.family
        if tower is None or not tower.is_trained or not isinstance(family, VisionLanguage):
            return 0.0
        # The gradients of frozen weights under adapters are not computed.
        return family.tower_flops(distinct_images(of_rows), 3.0 if self.model.lora is None else 2.0, 3.0)

    def divide(
        self, lengths: Sequence[int], tokens_of: Callable[[Sequence[int]], Tensor], known: Sequence[int] | None = None
    ) -> list[list[int]]:
        """Divide the rows of a global batch over the replicas; see `batching.divide`.

        Args:
            lengths: number of tokens in each row.
            tokens_of: function that returns the numbers of the given rows' tokens (`token_identities`).
            known: indices of the rows whose tokens this replica has; None if every replica has all tokens.

        Returns:
            For each replica, the indices of its rows.
        """
        return divide(self.batching, lengths, tokens_of, self.topology.data, known)

    def division_of(self, data: BatchedDataDict[Any]) -> list[list[int]]:
        """Divide a global batch over the replicas; return the indices of each replica's rows. Collective.

        Every rank passes all rows.
        """
        return self.divide(data["input_lengths"].tolist(), lambda rows: token_identities(data)[list(rows)])

    def own_rows(self, data: BatchedDataDict[Any]) -> LocalBatch[Any]:
        """Return this replica's rows of the global batch `data`. Every rank passes all rows. Collective."""
        replicas = self.topology.data
        share = BatchShare(self.division_of(data)[replicas.rank], data.size, replicas)
        return LocalBatch(data.select_indices(share.indices), share)

    # ------------------------------------------------------------ scoring

    def check_tokens(self, data: BatchedDataDict[Any], key: str) -> None:
        """Check that this model has an embedding for every token of a global batch. Collective.

        A policy whose LM head has more rows than the tokenizer has tokens can sample an unknown token id.

        Args:
            key: configuration key of this model, for the error message.

        Raises:
            TrainingError: a token has no embedding. Raised on every rank.
        """
        (token,) = batch_share(data).max(float(data["input_ids"].max()) if data.size else -1.0)
        if token >= self.model.vocab_size:
            raise TrainingError(
                f"{key}: {self.config.model.path} has only {self.model.vocab_size} rows of embeddings, but a "
                f"response contains token {token:.0f}, which is not in the tokenizer; use a model with more rows"
            )

    def get_logprobs(
        self,
        data: BatchedDataDict[Any],
        micro_batch_size: int | None = None,
        temperature: float = 1.0,
        counted_only: bool = False,
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """Return `logprobs` [B, S]; see `PolicyInterface`.

        Args:
            temperature: divisor of the logits.
            counted_only: return 0 for tokens that carry no loss (`token_mask`, `sample_mask`), and do not multiply
                their positions with the LM head.
        """
        return BatchedDataDict(logprobs=self._score(data, micro_batch_size, temperature, counted_only))

    def _score(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None, temperature: float, counted_only: bool
    ) -> Tensor:
        """Return the log-probability of each token in the rows of `data`, [B, S]; 0 in padding and in column 0."""
        head = LogprobHead(self.model, temperature)

        def score(hidden: Tensor, microbatch: Microbatch) -> dict[str, Tensor]:
            logprobs, _ = head(hidden, microbatch, _scored_tokens(microbatch.data, counted_only))
            return {"logprobs": F.pad(logprobs, (1, 0))}

        return self._map_microbatches(
            "get_logprobs", data, lambda rows: {"logprobs": per_token(rows)}, score, micro_batch_size=micro_batch_size
        )["logprobs"]

    def get_score_norms(
        self, data: BatchedDataDict[Any], temperature: float = 1.0, counted_only: bool = False
    ) -> BatchedDataDict[Any]:
        """Return `logprobs` and `score_norms`, [B, S] each: the log-probability and the score norm of each token.

        `counted_only` is explained at `get_logprobs`.

        The score norm of a token with probability π is ‖∂ log π / ∂ logits‖² = 1 − 2π + Σ π²; the sum is over the
        vocabulary. To compute Σ π², all logits are doubled: the token's probability is then p = π² / Σ π², so that
        Σ π² = π² / p. This needs a second product with the LM head, but no second pass through the model.
        """
        heads = LogprobHead(self.model, temperature), LogprobHead(self.model, temperature / 2)

        def score(hidden: Tensor, microbatch: Microbatch) -> dict[str, Tensor]:
            mask = _scored_tokens(microbatch.data, counted_only)
            logprobs, doubled = (head(hidden, microbatch, mask)[0] for head in heads)
            norms = 1 - 2 * logprobs.exp() + (2 * logprobs - doubled).exp()  # 0 where `mask` is 0
            return {"logprobs": F.pad(logprobs, (1, 0)), "score_norms": F.pad(norms, (1, 0))}

        def zeros(rows: BatchedDataDict[Any]) -> dict[str, Tensor]:
            return {name: per_token(rows) for name in ("logprobs", "score_norms")}

        return BatchedDataDict(self._map_microbatches("get_score_norms", data, zeros, score))

    def get_topk_logits(
        self, data: BatchedDataDict[Any], k: int, temperature: float | None = None
    ) -> BatchedDataDict[Any]:
        """Return the k largest logits for the token after each position, and the ids of these k tokens.

        The result contains `topk_logits` and `topk_indices`, both [B, S, k] and 0 in the padding. A student's
        `DistillationLossFn` reads these values of its teacher.

        Args:
            temperature: if set, return log-probabilities at this temperature instead of logits.

        Raises:
            ValueError: k is not between 1 and the vocabulary's size.
        """
        if not 1 <= k <= self.model.vocab_size:
            raise ValueError(f"get_topk_logits: k must be between 1 and {self.model.vocab_size}, got {k}")
        head = TopKHead(self.model, k, temperature)

        def best(hidden: Tensor, microbatch: Microbatch) -> dict[str, Tensor]:
            values, tokens = head(hidden, microbatch)
            return {"topk_logits": values, "topk_indices": tokens}

        def zeros(rows: BatchedDataDict[Any]) -> dict[str, Tensor]:
            return {"topk_logits": per_token(rows, k), "topk_indices": per_token(rows, k, dtype=torch.long)}

        return BatchedDataDict(self._map_microbatches("get_topk_logits", data, zeros, best))

    def get_rewards(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        """Return `rewards` [B, 1], one for each row; the model must have a reward head."""
        head = RewardOfSequences(self.model)
        return BatchedDataDict(
            self._map_microbatches(
                "get_rewards",
                data,
                lambda rows: {"rewards": torch.zeros(rows.size, 1, device=platform.device())},
                lambda x, mb: {"rewards": head(x, mb)},
                model_head="reward",
            )
        )

    def get_values(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        """Return `values` [B, S]; the model must have a reward head.

        Entry (b, t) is the value of the state in which token `input_ids[b, t]` was chosen, that is, after the tokens
        before t. Column 0 and the padding are 0.
        """
        head = ValuesOfTokens(self.model)
        return BatchedDataDict(
            self._map_microbatches(
                "get_values",
                data,
                lambda rows: {"values": per_token(rows)},
                lambda x, mb: {"values": head(x, mb)},
                model_head="reward",
            )
        )

    @torch.no_grad()
    def _map_microbatches(
        self,
        purpose: str,
        data: BatchedDataDict[Any],
        zeros: Callable[[BatchedDataDict[Any]], dict[str, Tensor]],
        compute: Callable[[Tensor, Microbatch], dict[str, Tensor]],
        model_head: str = "lm",
        micro_batch_size: int | None = None,
        is_needed: bool = True,
    ) -> dict[str, Tensor]:
        """Run the rows of `data` through the model in microbatches; return a dict of result tensors [B, …].

        The results are on the host, and the same on all ranks that have these rows. If the rows of a microbatch are
        shorter than those of `data`, the remaining entries are 0.

        Args:
            purpose: the method that calls this one; error messages start with it.
            zeros: function that allocates the results for the given rows: a dict of zeros on the device.
            compute: function that computes the results of one microbatch from the last stage's hidden states.
            model_head: head that the model must have.
            is_needed: whether this process needs the results. If False, and the model has a parallel layout of its own,
                this process receives no results.

        Raises:
            RuntimeError: the weights are offloaded, or the model has another head than `model_head`.
        """
        self.require_weights(purpose)
        if self.config.model.head != model_head:
            raise RuntimeError(f"{purpose}: model.head must be {model_head}, got {self.config.model.head}")
        if isinstance(data, LocalBatch) and self.has_own_layout and data.share.replicas is not self.topology.data:
            own = self.own_rows(data.all_rows(*COLUMNS_OF_ROWS, lists=(IMAGES,)))
            found = self._map_microbatches(purpose, own, zeros, compute, model_head, micro_batch_size)
            held, width = own.share.indices, data["input_ids"].shape[1]
            wanted = data.share.indices if is_needed else ()
            return {name: values[:, :width] for name, values in fetch_rows(found, held, wanted).items()}
        rows = zeros(data)
        microbatches = self._microbatches(data, micro_batch_size)
        # Indexing with a list would copy it to the device and make the host wait, for every microbatch.
        indices = platform.to_device([row for microbatch in microbatches for row in microbatch.rows])
        index_of = dict(zip(microbatches, indices.split([len(mb.rows) for mb in microbatches]), strict=True))

        def fill(hidden: Tensor, microbatch: Microbatch) -> tuple[Tensor, dict[str, Any]]:
            computed = compute(hidden, microbatch)
            if microbatch.counts:
                for name, values in computed.items():
                    rows[name][:, : values.shape[1]].index_copy_(0, index_of[microbatch], values.to(rows[name]))
            return hidden.new_zeros(()), {}

        self._run(microbatches, fill, train=False)
        replicas = None if isinstance(data, LocalBatch) else self.topology.data.group
        rows = {name: all_reduce(values, replicas) for name, values in rows.items()}
        return {name: all_reduce(values, self.topology.pipeline.group).cpu() for name, values in rows.items()}

    def _microbatches(
        self,
        data: BatchedDataDict[Any],
        micro_batch_size: int | None = None,
        share: bool = True,
        rows_per_unit: int = 1,
    ) -> list[Microbatch]:
        """Divide this rank's rows into microbatches.

        Args:
            micro_batch_size: number of rows per microbatch; only used if rows are not packed.
            share: whether rows may share a common prefix, so that a pack contains the prefix only once.
            rows_per_unit: number of neighbouring rows that must be in the same microbatch. The constructor's argument
                `rows_per_unit` stays in force too.
        """
        batching = self.batching
        if batching.rows_per_unit % rows_per_unit:
            together = math.lcm(batching.rows_per_unit, rows_per_unit)
            batching = microbatch_planner(self.config, together, self.topology.data.size)
            batching = replace(batching, attention_length=self.batching.attention_length)
        if not share:
            batching = replace(batching, rows_per_group=0)
        if micro_batch_size is not None:
            if micro_batch_size < 1 or micro_batch_size % batching.rows_per_unit:
                raise ContractError(
                    f"micro_batch_size must be a positive multiple of {batching.rows_per_unit}, got {micro_batch_size}"
                )
            batching = replace(batching, micro_batch_size=micro_batch_size // batching.rows_per_unit)
        return batching.microbatches(data, self.topology.data.rank)

    def _run(self, microbatches: list[Microbatch], head: Any, train: bool) -> list[dict[str, Any]]:
        for chunk in self.chunks:
            chunk.train(train)
        with groups_of(self.topology):
            return run_microbatches(self.model, self.chunks, microbatches, head, train)


COLUMNS_OF_ROWS = ("input_ids", "input_lengths", "sample_mask")
"""The columns of a batch that a model with another parallel layout needs, beside the list of images."""


def per_token(rows: BatchedDataDict[Any], *more: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor of zeros on the device, [B, S, *more], where [B, S] is the shape of `rows["input_ids"]`."""
    return torch.zeros(*rows["input_ids"].shape, *more, dtype=dtype, device=platform.device())


class TeacherModel(ScoringModel):
    """A teacher for distillation. It must have the student's tokenizer; size, family and parallel layout may differ.

    Args:
        config: the run's configuration, with the teacher as its model.
        student_vocab_size: number of rows in the student's LM head, without padding.
    """

    def __init__(self, config: TrainingConfig, student_vocab_size: int) -> None:
        super().__init__(config)
        tensor = run_topology().tensor
        self.head_rows = padded_vocab_size(student_vocab_size, tensor.size) // tensor.size

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @cached_property
    def head(self) -> Tensor:
        """This rank's shard of the teacher's LM head, [Vp, hidden], with the same tokens as the student's shard.

        If both shards are equally large, this is the teacher's shard itself. Otherwise it is a copy, with zeros for
        tokens that the teacher's head does not have. Collective over the ranks of the last stage; over all ranks if
        the teacher has its own layout.
        """
        is_last, own, tensor = self.topology.is_last_stage, self.topology.tensor, run_topology().tensor
        weight: Tensor | None = self.model.chunks[-1].lm_head_weight().detach() if is_last else None
        if not self.has_own_layout and weight is not None and weight.shape[0] == self.head_rows:
            return weight
        whole = None if weight is None else all_gather(weight, own.group).flatten(0, 1)
        if self.has_own_layout:
            whole = broadcast_from_holder(whole)
        assert whole is not None, "`head` is read on the last stage, or on all ranks"
        whole = F.pad(whole, (0, 0, 0, self.head_rows * tensor.size))
        return whole[self.head_rows * tensor.rank :][: self.head_rows].clone()

    @torch.no_grad()
    def counted_logits(self, microbatches: Sequence[Microbatch]) -> Mapping[Hashable, HiddenAndHead]:
        """Return, for each microbatch, the teacher's logits of the tokens that carry loss, as two factors.

        The logits are the product of the hidden states, [tokens that carry loss, hidden size], and `head`. The result
        is {} on all pipeline stages but the last.

        Raises:
            RuntimeError: the weights are offloaded.
        """
        self.require_weights("counted_logits")
        if self.has_own_layout:
            return self._logits_from_own_layout(microbatches)
        found: dict[Hashable, HiddenAndHead] = {}

        def keep(hidden: Tensor, microbatch: Microbatch) -> tuple[Tensor, dict[str, Any]]:
            picked = final_hidden_states(self.model, hidden, microbatch).logits.hidden
            found[microbatch] = HiddenAndHead(picked, self.head, self.model.family.logit_softcap)
            return hidden.new_zeros(()), {}

        self._run(list(microbatches), keep, train=False)
        return found

    def _logits_from_own_layout(self, microbatches: Sequence[Microbatch]) -> Mapping[Hashable, HiddenAndHead]:
        """Compute `counted_logits` of the student's `microbatches` if this model has its own layout.

        As many microbatches run at a time as this model has pipeline stages. More would need more memory, because the
        hidden states of all their tokens are kept until the tokens that carry loss are selected.
        """
        found: dict[Hashable, HiddenAndHead] = {}
        for start in range(0, len(microbatches), self.topology.pipeline.size):  # all replicas have equally many
            found |= self._logits_of_some(microbatches[start : start + self.topology.pipeline.size])
        return found

    def _logits_of_some(self, microbatches: Sequence[Microbatch]) -> Mapping[Hashable, HiddenAndHead]:
        student, head = run_topology(), self.head
        rows: BatchedDataDict[Any] = BatchedDataDict.from_batches(
            [{key: mb.data[key] for key in (*COLUMNS_OF_ROWS, IMAGES) if key in mb.data} for mb in microbatches]
        )
        local: LocalBatch[Any] = LocalBatch(rows.data, BatchShare.concatenated(rows.size, student.data))
        states = self._map_microbatches(
            "counted_logits",
            local,
            lambda rows: {"hidden": per_token(rows, head.shape[1], dtype=head.dtype)},
            lambda hidden, microbatch: {"hidden": hidden_of_rows(self.model, hidden, microbatch)},
            is_needed=student.is_last_stage,
        )["hidden"]
        if not student.is_last_stage:
            return {}
        of_microbatch = zip(microbatches, states.split([mb.data.size for mb in microbatches]), strict=True)
        softcap = self.model.family.logit_softcap
        return {
            microbatch: HiddenAndHead(counted_of_rows(hidden, microbatch, student.context.rank), head, softcap)
            for microbatch, hidden in of_microbatch
        }
