"""Runs microbatches through the model under Megatron's pipeline schedules, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl import platform
from mcore_rl.data.batching import Microbatch
from mcore_rl.data.choices import CHOSEN_KEYS
from mcore_rl.data.images import IMAGES
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.distributed.collectives import all_gather_forward_split_backward
from mcore_rl.distributed.divergences import FinalHiddenStates, HiddenAndHead
from mcore_rl.distributed.logprobs import (
    KEPT_TILE_SHAPE,
    Tile,
    accumulation_dtype,
    gather_hidden_states,
    linear_logprobs,
    valid_columns,
)
from mcore_rl.distributed.packs import (
    LossPositions,
    PackLayout,
    PrefixLayout,
    gather_context_parallel,
    slice_context_parallel,
)
from mcore_rl.distributed.sampling_mask import KeptTokens, kept_tiles, on_device
from mcore_rl.distributed.topk import linear_topk
from mcore_rl.distributed.topology import Topology
from mcore_rl.errors import ContractError, UserError
from mcore_rl.losses.common import (
    LossFunction,
    reads_counted_tokens_only,
    takes_hidden_states,
    takes_logprobs,
    token_mask_of,
)
from mcore_rl.losses.packing import LogitShards, SequencePackingLossWrapper, rows_of_width
from mcore_rl.models.megatron.families.mixtures import Mixture
from mcore_rl.models.megatron.kernels.packed_attention import visible_keys
from mcore_rl.models.megatron.layers.packs import LaterTokens, PackParams, RoutedTokens, later_tokens
from mcore_rl.models.megatron.layers.vision import pack_images, pack_positions
from mcore_rl.models.megatron.model.gpt_model import ModelShard
from mcore_rl.utils.console import size_text

from megatron.core.pipeline_parallel import get_forward_backward_func

# A function of the last stage's hidden states of a microbatch that returns a scalar to minimise, and outputs.
Head = Callable[[Tensor, Microbatch], tuple[Tensor, dict[str, Any]]]


def run_microbatches(
    model: ModelShard, wrapped: Sequence[torch.nn.Module], microbatches: Sequence[Microbatch], head: Head, train: bool
) -> list[dict[str, Any]]:
    """Run the forward pass of the microbatches and, if `train` is True, the backward pass.

    Args:
        wrapped: this rank's chunks of the model, wrapped for training if they are trained.
        head: function that computes the loss and the outputs of a microbatch on the last stage.

    Returns:
        The head's outputs for each microbatch; [] on all pipeline stages but the last.
    """
    several, kept = len(wrapped) > 1, dict[Microbatch, dict[str, Any]]()

    def inputs(microbatch: Microbatch, chunk: int) -> dict[str, Any]:
        """Return the inputs of a microbatch; they are kept until it has passed every chunk, of which this is the last.

        Chunks run in their order: the interleaved schedule starts a microbatch in the next one after this one.
        """
        of_chunk = kept.get(microbatch) or model_inputs(microbatch, model)
        if chunk < len(wrapped) - 1:
            kept[microbatch] = of_chunk
        else:
            kept.pop(microbatch, None)
        return of_chunk

    def forward_step(iterator: Any, chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        microbatch = next(iterator)
        output = chunk(**inputs(microbatch, wrapped.index(chunk)))

        def loss(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            value, outputs = head(hidden, microbatch)
            if not microbatch.counts:  # a filler microbatch trains nothing, even if the loss ignores masks
                value = value.masked_fill(torch.ones_like(value, dtype=torch.bool), 0)
            # Every context-parallel rank computes the whole loss, and gradients are summed over these ranks.
            value = value / model.topology.context.size
            return value, torch.ones((), dtype=torch.int, device=value.device), outputs

        return output, loss

    run = get_forward_backward_func(model.topology.pipeline.size, len(wrapped) if several else None)
    total = microbatches[0].layout.total
    return run(
        forward_step_func=forward_step,
        data_iterator=[iter(microbatches) for _ in wrapped] if several else iter(microbatches),
        model=list(wrapped) if several else wrapped[0],
        num_microbatches=len(microbatches),
        seq_length=total,
        micro_batch_size=model.family.message_rows,  # the streams take the place of Megatron's batch
        forward_only=not train,
    )


def model_inputs(microbatch: Microbatch, model: ModelShard) -> dict[str, Any]:
    """Return the arguments of the forward pass over a pack, such as this rank's tokens [1, T / CP] and positions."""
    topology = model.topology
    layout, input_ids = microbatch.layout, microbatch.data["input_ids"]
    cp_rank = topology.context.rank
    tokens = slice_context_parallel(layout.pack_rows(input_ids), layout, cp_rank)
    tower = model.tower
    assert tower is not None or not any(microbatch.data.get(IMAGES) or ()), "the model reads no images"
    positions = layout.position_ids if tower is None else pack_positions(microbatch)
    positions = slice_context_parallel(positions, layout, cp_rank)
    routed = RoutedTokens.of(microbatch, topology).tensors() if isinstance(model.family, Mixture) else []
    config = model.chunks[0].config
    uses_te = config.transformer_impl == "transformer_engine" and not isinstance(layout, PrefixLayout)
    ends = [layout.cu_seqlens_padded] if uses_te else []
    masks = [slice_context_parallel(layout.is_token, layout, cp_rank).to(config.params_dtype)] if config.fp8 else []
    keys = _recorded_keys(microbatch, model)
    later = _later_tokens(microbatch, model)
    tensors = tokens, positions, *masks, *ends, *keys.values(), *(x for of in later for x in of.tensors()), *routed
    # Transformer Engine's attention needs no index tensors; a layer that falls back to the local attention sends them.
    visible, (tokens, positions, *rest) = visible_keys(layout, cp_rank, *tensors, sends_index=not uses_te)
    params = PackParams(qkv_format="thd", visible=visible, positions=positions, token_ids=tokens)
    if masks:
        params.is_token = rest.pop(0)
    if ends:
        params.cu_seqlens = rest.pop(0)
    params.recorded = {layer: rest.pop(0) for layer in keys}
    params.later = [LaterTokens(*(rest.pop(0) for _ in of.tensors())) for of in later]
    if routed:
        params.routed = RoutedTokens(*rest)
    if tower is not None and topology.is_first_stage:
        params.images = pack_images(microbatch, tower)
    return {
        "input_ids": tokens[None],
        "position_ids": positions[None],
        "attention_mask": None,
        "packed_seq_params": params,
    }


def _recorded_keys(microbatch: Microbatch, model: ModelShard) -> dict[int, Tensor]:
    """Return the recorded choices of this rank's indexers for its tokens by layer, [T / CP, size]."""
    rank, own = model.topology.context.rank, set(model.layer_numbers())
    recorded = microbatch.choices(CHOSEN_KEYS, lambda packed: slice_context_parallel(packed, microbatch.layout, rank))
    if recorded is None:
        return {}
    return {layer: recorded[:, n] for n, layer in enumerate(model.family.layers_with_indexer) if layer in own}


def _later_tokens(microbatch: Microbatch, model: ModelShard) -> list[LaterTokens]:
    """Return what the layers that predict further tokens read and predict; [] if this pass does not train them.

    Raises:
        UserError: the microbatch has images.
    """
    depth = model.family.mtp_depth
    if not depth or not torch.is_grad_enabled() or not model.chunks[-1].training:
        return []
    if any(microbatch.data.get(IMAGES) or ()):
        raise UserError(
            "model.mtp_loss_scaling_factor: layers that predict further tokens cannot be trained on images; leave "
            "model.mtp_loss_scaling_factor out"
        )
    return later_tokens(microbatch, depth, model.topology) if model.topology.is_last_stage else []


class LogprobHead:
    """Computes the log-probabilities of a microbatch's tokens from hidden states.

    Logits are kept for the backward pass only if they fit into `ModelShard.logits_bytes`.
    """

    def __init__(self, model: ModelShard, temperature: float = 1.0, with_entropy: bool = False) -> None:
        self.model, self.temperature, self.with_entropy = model, temperature, with_entropy

    def __call__(self, hidden: Tensor, microbatch: Microbatch, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities and entropies [n, S − 1], complete on every rank; 0 where `mask` is 0.

        The entropies are None unless the head was created with `with_entropy`. Only the hidden states at positions
        where `mask` is not 0 are multiplied with the LM head. A rank without such positions computes one position
        nevertheless, so that all ranks call the same collectives.

        If the data contain `kept_tokens`, each distribution is over the tokens that the sampler kept, and the result is
        0 for tokens that were not sampled.
        """
        topology, weight = self.model.topology, self.model.chunks[-1].lm_head_weight()
        hidden = gather_hidden_states(hidden, topology.tensor.group, topology.sequence_parallel)
        kept = kept_tokens_of(microbatch)
        if kept is not None:
            mask = mask * (kept.counts.view(len(mask), -1)[:, 1:] > 0)
        positions = LossPositions.of(microbatch.layout, mask, topology.context.rank)
        targets = positions.targets(microbatch.data["input_ids"])
        tiles = None if kept is None else on_device(self._tiles(kept, positions, targets), hidden.device)
        positions, (targets,) = positions.on(hidden.device, targets)
        picked = positions.pick(hidden)
        logprobs, entropy = linear_logprobs(
            picked,
            weight,
            targets,
            topology.tensor.group,
            self.model.num_ids,
            self.temperature,
            self.with_entropy,
            kept=tiles,
            keeps_logits=kept is None and logits_bytes(len(picked), weight) <= self.model.logits_bytes,
            softcap=self.model.family.logit_softcap,
        )
        group = topology.context.group
        return positions.spread(logprobs, group), None if entropy is None else positions.spread(entropy, group)

    def _tiles(self, kept: KeptTokens, positions: LossPositions, targets: Tensor) -> list[Tile]:
        """Return tiles of the logits, on the host. They cover the kept tokens (see `kept_tokens_of`) at `positions`."""
        kept = KeptTokens.of([targets.tolist()]) if positions.is_dummy else kept.at(positions.outputs())
        size, rank = self.model.chunks[-1].lm_head_weight().shape[0], self.model.topology.tensor.rank
        columns = valid_columns(size, rank, self.model.num_ids)
        return list(kept_tiles(kept, targets, rank * size, columns, KEPT_TILE_SHAPE[platform.device().type]))


def logits_bytes(tokens: int, weight: Tensor) -> int:
    """Return the bytes of `tokens` tokens' logits, in the accumulation type, on a rank with this shard `weight`."""
    return tokens * weight.shape[0] * accumulation_dtype(weight.dtype).itemsize


def kept_tokens_of(microbatch: Microbatch) -> KeptTokens | None:
    """Return the kept tokens at each of the N·S positions of the rows; None without the column `kept_tokens`.

    The kept tokens are those that top-k, top-p and min-p left for this position when it was sampled.

    Raises:
        ContractError: there are no kept tokens at a position whose token carries loss.
    """
    data = microbatch.data
    if "kept_tokens" not in data:
        return None
    width = data["input_ids"].shape[1]
    of_rows = [(KeptTokens.none(0) if kept is None else kept).padded(width) for kept in data["kept_tokens"]]
    kept = KeptTokens.concatenated(of_rows)
    lacking = (token_mask_of(data, data["token_mask"]) > 0) & (kept.counts.view(-1, width)[:, 1:] == 0)
    if bool(lacking.any()):
        row, position = lacking.nonzero()[0].tolist()
        raise ContractError(
            f"kept_tokens: row {row} must have kept tokens for position {position + 1}, because the loss "
            "counts this token"
        )
    return kept


def final_hidden_states(
    model: ModelShard, hidden: Tensor, microbatch: Microbatch, temperature: float = 1.0
) -> FinalHiddenStates:
    """Return a microbatch's final hidden states at the positions whose next token carries loss."""
    topology = model.topology
    mask = token_mask_of(microbatch.data, microbatch.data["token_mask"])
    hidden = gather_hidden_states(hidden, topology.tensor.group, topology.sequence_parallel)
    positions = LossPositions.of(microbatch.layout, mask, topology.context.rank)
    positions, (inputs,) = positions.on(hidden.device, positions.inputs())
    logits = HiddenAndHead(positions.pick(hidden), model.chunks[-1].lm_head_weight(), model.family.logit_softcap)
    groups = topology.tensor.group, topology.context.group
    return FinalHiddenStates(microbatch, logits, positions, inputs, model.vocab_size, temperature, *groups)


def hidden_of_rows(model: ModelShard, hidden: Tensor, microbatch: Microbatch) -> Tensor:
    """Return the hidden states of all tokens of the rows, [n, S, H], complete on every rank; 0 in the padding."""
    topology = model.topology
    hidden = gather_hidden_states(hidden, topology.tensor.group, topology.sequence_parallel)
    return _rows_of_pack(hidden, microbatch, topology)


def counted_of_rows(rows: Tensor, microbatch: Microbatch, context_rank: int) -> Tensor:
    """Return the hidden states in `rows` that predict tokens with loss; `rows` is a result of `hidden_of_rows`.

    The result is on the device, and equals what `final_hidden_states` returns.
    """
    width = microbatch.data["input_ids"].shape[1]
    mask = token_mask_of(microbatch.data, microbatch.data["token_mask"])
    positions = LossPositions.of(microbatch.layout, mask, context_rank)
    picked = rows[:, :width].flatten(0, 1)[positions.inputs()]
    return platform.sent(torch.zeros_like(picked) if positions.is_dummy else picked, platform.device())


def _rows_of_pack(local: Tensor, microbatch: Microbatch, topology: Topology) -> Tensor:
    """Gather values [T / CP, …] of a pack from all context-parallel ranks; return them as rows [n, S, …].

    The padding of the rows is 0.
    """
    layout, width = microbatch.layout, microbatch.data["input_ids"].shape[1]
    index, valid = (platform.sent(x, local.device) for x in layout.token_table(width))
    return gather_context_parallel(local, layout, topology.context.group)[index] * valid[..., None]


class TopKHead:
    """Computes, for each position of a microbatch, the k largest logits and their token ids.

    With `temperature` it computes log-probabilities instead of logits. It computes a few positions at a time.
    """

    def __init__(self, model: ModelShard, k: int, temperature: float | None = None) -> None:
        self.model, self.k, self.temperature = model, k, temperature

    def __call__(self, hidden: Tensor, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Return the logits (or log-probabilities) and the token ids, both [n, S, k] and complete on every rank.

        Both are 0 in the padding.
        """
        topology = self.model.topology
        group = topology.tensor.group
        hidden = gather_hidden_states(hidden, group, topology.sequence_parallel)
        weight, vocab_size = self.model.chunks[-1].lm_head_weight(), self.model.vocab_size
        softcap = self.model.family.logit_softcap
        values, ids = linear_topk(hidden, weight, self.k, group, vocab_size, softcap=softcap)
        if self.temperature is not None:
            values, _ = linear_logprobs(hidden, weight, ids, group, vocab_size, self.temperature, softcap=softcap)
        return _rows_of_pack(values, microbatch, topology), _rows_of_pack(ids, microbatch, topology)


class RewardOfSequences:
    """Computes the reward of each sequence: the reward head's output at the sequence's last token.

    As in transformers' sequence classifiers, padding tokens (`pad_token_id` of the configuration) are not counted, even
    if they are tokens of the sequence. A sequence of padding tokens alone is read at its first token.
    """

    def __init__(self, model: ModelShard) -> None:
        self.model = model

    def __call__(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        """Return the rewards of all rows, [n, 1] in fp32, on every rank."""
        layout = microbatch.layout
        index, _ = layout.token_table(microbatch.data["input_ids"].shape[1])
        last = index.gather(1, self._last_positions(microbatch.data["input_ids"], torch.tensor(layout.row_lengths)))
        return self._of_pack(hidden, layout)[platform.sent(last, hidden.device)]

    def _last_positions(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Return the positions [n, 1] of the tokens at which sequences [n, S] of these `lengths` [n] are read."""
        token = self.model.family.score_padding
        if token is None:
            return lengths[:, None] - 1
        positions = torch.arange(input_ids.shape[1])
        counted = (positions < lengths[:, None]) & (input_ids != token)
        return (positions * counted).amax(1, keepdim=True)

    def _of_pack(self, hidden: Tensor, layout: PackLayout) -> Tensor:
        """Return the reward head's output at each position of a pack, [T]."""
        topology = self.model.topology
        if topology.sequence_parallel:  # all ranks compute the same values, so each needs only its own gradient
            hidden = all_gather_forward_split_backward(hidden, topology.tensor.group)
        return gather_context_parallel(self.model.chunks[-1].output_layer(hidden), layout, topology.context.group)


class ValuesOfTokens(RewardOfSequences):
    """Computes the value of the state before each token: the reward head's output at the previous token."""

    def __call__(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        """Return the values of all rows, [n, S] in fp32, on every rank; column 0 and the padding are 0."""
        index, there = microbatch.layout.token_table(microbatch.data["input_ids"].shape[1])
        of_pack = self._of_pack(hidden, microbatch.layout)
        before, there = (platform.sent(x, hidden.device) for x in (index[:, :-1], there[:, 1:]))
        return F.pad(torch.where(there, of_pack[before], 0), (1, 0))


class LossHead:
    """Applies a loss function to the model's output.

    What the loss function receives depends on model and function:

    - If the model has a reward head: rewards [n, 1], or values of tokens [n, S] if the function has `reads_values`.
    - Otherwise log-probabilities, or hidden states, if the function accepts one of these.
    - Otherwise logits: sequence by sequence for a pack (`SequencePackingLossWrapper`), all at once for padded rows. A
      function without parameters for the parallel groups receives whole logits.

    The outputs are `loss` and `metrics`. If the function receives log-probabilities, the outputs also contain
    `logprobs`, `mask` (of the tokens that carry loss), and `rows` (the microbatch's row numbers).

    Args:
        global_valid_seqs, global_valid_toks: number of valid sequences and of valid tokens in the global batch.
    """

    def __init__(
        self,
        model: ModelShard,
        loss_fn: LossFunction,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        temperature: float = 1.0,
    ) -> None:
        self.model, self.temperature = model, temperature
        self.loss_fn: Any = loss_fn
        device = platform.device()
        self.counts = platform.sent(global_valid_seqs, device), platform.sent(global_valid_toks, device)
        number = ValuesOfTokens if getattr(loss_fn, "reads_values", False) else RewardOfSequences
        self.rewards = number(model) if model.family.has_reward_head else None
        self.fused = takes_logprobs(loss_fn)
        self.of_hidden_states = takes_hidden_states(loss_fn)
        self.of_counted_tokens = reads_counted_tokens_only(loss_fn)
        self.logprobs = LogprobHead(model, temperature, with_entropy=getattr(loss_fn, "needs_entropy", False))
        tensor, context = model.topology.tensor, model.topology.context
        self.shards = LogitShards(tensor.rank, tensor.group, context.group, model.num_ids)

    def __call__(self, hidden: Tensor, microbatch: Microbatch) -> tuple[Tensor, dict[str, Any]]:
        mask = token_mask_of(microbatch.data, microbatch.data["token_mask"])
        columns = {name: x for name, x in microbatch.data.items() if isinstance(x, Tensor)}
        there = platform.sent_together(list(columns.values()), hidden.device)
        data: BatchedDataDict[Any] = BatchedDataDict({**microbatch.data, **dict(zip(columns, there, strict=True))})
        more: dict[str, Any] = {}
        if self.rewards is not None:
            loss, metrics = self.loss_fn(self.rewards(hidden, microbatch), data, *self.counts)
        elif self.fused:
            wanted = self.loss_fn.tokens_read(microbatch.data) if self.of_counted_tokens else torch.ones_like(mask)
            logprobs, entropy = self.logprobs(hidden, microbatch, wanted)
            loss, metrics = self.loss_fn.from_logprobs(logprobs, data, *self.counts, entropy)
            more = {"logprobs": logprobs.detach(), "mask": mask, "rows": microbatch.rows}
        elif self.of_hidden_states:
            states = final_hidden_states(self.model, hidden, microbatch, self.temperature)
            loss, metrics = self.loss_fn.from_hidden_states(states, data, *self.counts)
        else:
            loss, metrics = self._from_logits(hidden, microbatch, data)
        return loss, {"loss": loss.detach(), "metrics": metrics, **more}

    def _from_logits(
        self, hidden: Tensor, microbatch: Microbatch, data: BatchedDataDict[Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        layout, shards = microbatch.layout, self.shards
        logits = vocab_parallel_logits(hidden, self.model) / self.temperature
        if microbatch.packed:
            padded = layout.cu_seqlens_padded[: layout.num_sequences + 1]
            return SequencePackingLossWrapper(self.loss_fn, layout.cu_seqlens, padded, shards.vocab_size)(
                logits[None], data, *self.counts, shards.rank, shards.vocab_group, shards.context_group
            )
        rows, width = layout.num_sequences, layout.padded_lengths[0]
        logits = logits[: rows * width // layout.cp_size].unflatten(0, (rows, -1))
        return shards.call(self.loss_fn, logits, rows_of_width(data, list(layout.lengths), width), self.counts)

    def cost_of_gathering(self, microbatches: Sequence[Microbatch]) -> str | None:
        """Return a line that tells what gathering the logits costs; None if the loss function needs no gathering."""
        if self.rewards is not None or self.fused or self.of_hidden_states:
            return None
        if not (lacking := self.shards.gathered_for(self.loss_fn)):
            return None
        unit = getattr(self.loss_fn, "rows_per_unit", 1)
        tokens = max(
            max(x.layout.padded_lengths) * (unit if x.packed else x.layout.num_sequences) for x in microbatches
        )
        weight = self.model.chunks[-1].lm_head_weight()
        columns = weight.shape[0] * self.model.topology.tensor.size
        size = size_text(tokens * columns * weight.element_size())
        return (
            f"{type(self.loss_fn).__name__} has no parameter {' and no parameter '.join(lacking)}: each rank gathers "
            f"logits of [{tokens}, {columns}] for it, {size}, and their gradient, as much again; a subclass of "
            f"LogprobLoss needs no logits (examples/custom_loss.py)"
        )


def vocab_parallel_logits(hidden: Tensor, model: ModelShard) -> Tensor:
    """Return logits [T / CP, Vp] in the model's precision; logits of ids without probability are −inf."""
    topology, weight = model.topology, model.chunks[-1].lm_head_weight()
    hidden = gather_hidden_states(hidden, topology.tensor.group, topology.sequence_parallel)
    columns = valid_columns(weight.shape[0], topology.tensor.rank, model.num_ids)
    logits = F.linear(hidden, weight)
    if (softcap := model.family.logit_softcap) is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return (
        logits
        if columns == weight.shape[0]
        else F.pad(logits[:, :columns], (0, weight.shape[0] - columns), value=-torch.inf)
    )
