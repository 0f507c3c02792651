"""Layers of attention and MLP: linear layers, norms, gated activations, rotary embeddings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mcore_rl import platform
from mcore_rl.distributed.topology import ParallelDimension
from mcore_rl.errors import UserError
from mcore_rl.models.megatron.layers.fp8 import keep_padding_zero
from mcore_rl.models.megatron.layers.parameters import ShardedMixin, sum_over_sequence_ranks
from mcore_rl.models.megatron.parallel_state import ProcessGroupCollection, process_groups

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

if TYPE_CHECKING:
    from mcore_rl.models.megatron.layers.packs import PackParams


class GenerationFastPath:
    """A module with a second, faster forward pass, which is used only for generation and may round differently.

    Scoring uses the same pass as training. Before the first update, both therefore compute bitwise equal
    log-probabilities.
    """

    in_generation = False


def with_adapter(adapter: Any, input_: Tensor, output: Tensor) -> Tensor:
    """Return a linear layer's output plus the output of its adapter, if it has one that is enabled."""
    if adapter is None or not adapter.enabled:
        return output
    return (output + adapter(input_)).to(output.dtype)


class LoRALinearMixin(GenerationFastPath):
    """A linear layer that may have an adapter, whose output is added to the layer's output.

    is_column: True if the weight is sharded by rows (a column-parallel layer), False if it is sharded by columns (a
        row-parallel layer), None if it is not sharded.
    """

    weight: Tensor
    is_column: bool | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapter: Any = None

    def _with_adapter(self, input_: Tensor, output: Tensor) -> Tensor:
        return with_adapter(self.adapter, input_, output)


class ColumnLinear(LoRALinearMixin, ColumnParallelLinear):
    """A linear layer whose weight is sharded by rows over tensor-parallel ranks."""

    is_column = True

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = self._plain(input_, *args, **kwargs)
        return self._with_adapter(input_, output), bias

    def _plain(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if not self.in_generation:
            output: tuple[Tensor, Tensor | None] = super().forward(input_, *args, **kwargs)
            return output
        if self.sequence_parallel and not self.explicit_expert_comm:
            input_ = gather_from_sequence_parallel_region(input_, group=self.tp_group)
        if self.skip_bias_add:
            return platform.linear(input_, self.weight), self.bias
        return platform.linear(input_, self.weight, self.bias), None


def recomputed(function: Callable[..., Any], *tensors: Tensor | None) -> Any:
    """Return `function(*tensors)`. Only `tensors` are kept; the backward pass calls the function again."""
    if not torch.is_grad_enabled():
        return function(*tensors)
    return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)


class AttachedLoss(torch.autograd.Function):
    """Returns `x` unchanged. When the gradient of `x` is computed, the backward pass of `loss` runs too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(())


def bias_of_first_rank(bias: Tensor) -> Tensor:
    """Return an expert's bias on the first rank of the expert's tensor-parallel group, and zeros on the other ranks.

    The outputs of these ranks are summed, so the bias must be added once. All of the ranks get the bias's gradient.
    """
    group = process_groups().expt_tp
    if group.size() == 1:
        return bias
    copied: Tensor = copy_to_tensor_model_parallel_region(bias, group=group)
    return copied * float(group.rank() == 0)


class ExpertBiasMixin:
    """A row-parallel linear layer that may belong to an expert and may have a bias.

    For an expert, Megatron's sum of the bias's gradients over tensor-parallel ranks is switched off, because each of
    these ranks may have different experts.
    """

    bias: Tensor | None

    def __init__(self, *args: Any, is_expert: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, is_expert=is_expert, **kwargs)  # type: ignore[call-arg]
        self.is_expert = is_expert
        if is_expert and self.bias is not None:
            sum_over_sequence_ranks(self.bias, when=False)

    def _with_expert_bias(self, output: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return an expert's output as a copy, and its bias on the first rank only (`bias_of_first_rank`).

        The copy is needed because Megatron adds the bias in place, and the output may be a view.
        """
        if not self.is_expert or bias is None:
            return output, bias
        return output.clone(), bias_of_first_rank(bias)


class RowLinear(ExpertBiasMixin, LoRALinearMixin, RowParallelLinear):
    """A linear layer whose weight is sharded by columns over tensor-parallel ranks, which sum their outputs."""

    is_column = False

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = self._plain(input_)
        return self._with_expert_bias(self._with_adapter(input_, output), bias)

    def _plain(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.in_generation:
            output: tuple[Tensor, Tensor | None] = super().forward(input_)
            return output
        partial = platform.linear(input_, self.weight)
        if self.explicit_expert_comm:  # the token exchange sums experts' outputs
            return partial, self.bias
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(partial, group=self.tp_group), self.bias
        return reduce_from_tensor_model_parallel_region(partial, group=self.tp_group), self.bias


class ReplicatedLinear(LoRALinearMixin, ShardedMixin, torch.nn.Module):
    """A linear layer whose weight is the same on every tensor-parallel rank."""

    is_column = None

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(outputs, inputs, dtype=config.params_dtype))
        sum_over_sequence_ranks(self.weight, when=config.sequence_parallel)

    def forward(self, input_: Tensor) -> Tensor:
        return self._with_adapter(input_, F.linear(input_, self.weight))


class _MaskedGradient(torch.autograd.Function):
    """Identity function whose gradient is 0 where `keep` is False."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor) -> Tensor:
        ctx.save_for_backward(keep)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        return grad * keep, None


def without_gradient_of(token: int, embedded: Tensor, input_ids: Tensor, ranks: ParallelDimension) -> Tensor:
    """Return `embedded` with a gradient of 0 for one token's embedding, as `padding_idx` in transformers does.

    Args:
        embedded: output of an embedding, [T or T / TP (sequence parallelism), 1, …].
        input_ids: [1, T].
        ranks: the tensor-parallel ranks.
    """
    if not embedded.requires_grad:
        return embedded
    ids = input_ids.T
    if len(embedded) != len(ids):
        ids = ids.chunk(ranks.size)[ranks.rank]
    masked: Tensor = _MaskedGradient.apply(embedded, (ids != token)[..., None].to(embedded.dtype))
    return masked


class PackLayer(TransformerLayer):
    """Megatron's transformer layer. In addition, it gives the current pack to its router of experts, if it has one,
    and adds the features of images to its output (`PackImages.add_to`).

    Args:
        rope: the slice of the rotary angles that this layer uses, if the angles of several kinds of layers are
            concatenated; None to use all angles.
    """

    def __init__(self, *args: Any, rope: slice | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rope = rope
        if self.config.fp8:
            keep_padding_zero(self)

    def forward(self, *args: Any, packed_seq_params: PackParams | None = None, **kwargs: Any) -> Any:
        if self.rope is not None:
            kwargs["rotary_pos_emb"] = kwargs["rotary_pos_emb"][..., self.rope]
        if isinstance(self.mlp, MoELayer):
            self.mlp.router.pack = packed_seq_params
        hidden, context = self._blocks(*args, packed_seq_params=packed_seq_params, **kwargs)
        if packed_seq_params is not None and packed_seq_params.images is not None:
            hidden = packed_seq_params.images.add_to(hidden, self.layer_number - 1)
        return hidden, context

    def _blocks(self, *args: Any, **kwargs: Any) -> Any:
        """Run attention and MLP; return the hidden states after them, and Megatron's context, which is not used."""
        return super().forward(*args, **kwargs)


class RMSNorm(GenerationFastPath, torch.nn.Module):
    """Root-mean-square norm, computed in fp32 (arXiv:1910.07467). It can be used under sequence parallelism.

    If the configuration has `layernorm_zero_centered_gamma`, 1 is added to the weight (Gemma).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps, self.is_zero_centred = eps, config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        sum_over_sequence_ranks(self.weight, when=config.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 + self.weight.float() if self.is_zero_centred else self.weight
        # On GPUs torch's norm is one kernel, which keeps as little as `_Normed`. On the CPU it rounds differently and
        # keeps more.
        is_fused = x.is_cuda and weight.dtype == x.dtype and hasattr(torch.ops.aten, "_fused_rms_norm")
        if is_fused or (self.in_generation and x.dtype == torch.float32):
            return F.rms_norm(x, weight.shape, weight, self.eps)
        normed: Tensor = _Normed.apply(x, weight, self.eps)
        return normed


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """Return x / rms(x), the RMS norm without weight over the last dimension, computed in fp32."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)


class FloatRMSNorm(RMSNorm):
    """`RMSNorm` whose weight is always fp32, whatever the model's precision is."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(config, hidden_size, eps)
        self.weight.data = self.weight.data.float()


class _Normed(torch.autograd.Function):
    """The function weight · x / rms(x), which saves less for the backward pass than autograd would.

    It saves only x, the weight and one factor per row; autograd would also save results in fp32. If the weight is fp32,
    the whole product is computed in fp32 and then rounded to the precision of x. Otherwise x / rms(x) is rounded first.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        wide = wide * scale
        return wide.mul_(weight).to(x.dtype) if weight.dtype == torch.float32 else weight * wide.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed, grad = x.float() * scale, grad.float()
        of_weight = (grad * normed).flatten(0, -2).sum(0)
        of_x = grad * weight.float()
        mean = (of_x * normed).mean(-1, keepdim=True)
        of_x.sub_(normed.mul_(mean)).mul_(scale)
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None


class HeadRMSNorm(RMSNorm):
    """RMS norm of each attention head (Qwen3's q and k norms).

    Heads are sharded over tensor-parallel ranks. Megatron recognizes these norms by name and sums their gradients over
    the ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(config, hidden_size, eps)
        sum_over_sequence_ranks(self.weight, when=False)

    def forward(self, x: Tensor) -> Tensor:
        # k is a view of the projection: if it were saved as it is, it would keep the storage of q, k and v until the
        # backward pass.
        return super().forward(x.contiguous())


class WideRMSNorm(ShardedMixin, torch.nn.Module):
    """RMS norm over all heads together (OLMo-2's q and k norms), which are sharded over tensor-parallel ranks.

    Args:
        hidden_size: size of one head.
        heads: number of heads on all ranks together.
    """

    sharded: ClassVar[dict[str, int]] = {"weight": 0}

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, heads: int) -> None:
        super().__init__()
        self.eps, self.group = eps, process_groups().tp
        self.size = heads * hidden_size
        self.weight = torch.nn.Parameter(torch.ones(self.size // self.group.size(), dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize this rank's heads, [T, 1, heads / TP, d], by the mean square over the heads of all ranks."""
        wide = x.float().flatten(-2)
        total = reduce_from_tensor_model_parallel_region(wide.square().sum(-1, keepdim=True), group=self.group)
        mean = copy_to_tensor_model_parallel_region(total, group=self.group) / self.size
        return (self.weight * (wide * torch.rsqrt(mean + self.eps))).to(x.dtype).view_as(x)


class PostNormMixin:
    """Adds a norm after a linear layer, which is the last projection of attention or MLP."""

    def __init__(self, *args: Any, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(*args, config=config, **kwargs)  # type: ignore[call-arg]
        self.post_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)  # type: ignore[misc]
        return self.post_norm(output), bias


class NormedRowLinear(PostNormMixin, RowLinear):
    """`RowLinear`, followed by a norm."""


def glu(config: TransformerConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function (gate, up) → activation(gate) · (up + offset).

    The configuration sets activation, offset, and a limit to which gate and up are clamped.
    """
    return _glu(config.activation_func, config.activation_func_clamp_value, config.glu_linear_offset)


@functools.cache
def _glu(
    activation: Callable[[Tensor], Tensor], limit: float | None, offset: float
) -> Callable[[Tensor, Tensor], Tensor]:
    def gated(gate: Tensor, up: Tensor) -> Tensor:
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        product: Tensor = activation(gate) * (up + offset if offset else up)
        return product

    return gated


class GatedActivation(ShardedMixin, torch.nn.Module):
    """The gated activation of an MLP: it applies `glu` to the two halves of […, 2 · width] and returns […, width].

    Only the inputs are saved for the backward pass. Autograd would also save the activated gate and a copy of the other
    half: together 2/5 of an MLP's activations. If the result is multiplied by weights, autograd would save the
    unweighted result as well. It is a module because Megatron, since 0.17, accepts nothing else. Before, Megatron
    requires the method `sharded_state_dict`.

    In a model whose MLPs have no gates, it applies the activation function to […, width] instead.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        is_gated = config.gated_linear_unit
        self.product = _weighted(glu(config), 2) if is_gated else _weighted(config.activation_func, 1)

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the activation of `x`, in the precision of `x`.

        Args:
            weights: factors […, 1] of the result; None for no factors.
        """
        product: Tensor = _Gated.apply(x, weights, self.product)
        return product


@functools.cache
def _weighted(activation: Callable[..., Tensor], parts: int) -> Callable[..., Tensor]:
    """Return the function of x, and weights if there are any: the activation of the `parts` of x, times the weights."""

    def product(x: Tensor, weights: Tensor | None = None) -> Tensor:
        plain = activation(*x.chunk(parts, dim=-1))
        return plain if weights is None else (plain * weights).to(x.dtype)

    return product


def squared_relu(x: Tensor) -> Tensor:
    """Return relu(x)², called `relu2` in transformers."""
    return F.relu(x).square()


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None, product: Callable[..., Tensor]) -> Tensor:
        ctx.product = product
        ctx.save_for_backward(x, weights)
        return (platform.compiled(product) if platform.compiles(x) else product)(x, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [x for x in ctx.saved_tensors if x is not None]
        if platform.compiles(grad):
            of_x, *of_weights = platform.compiled(_gradients_of(ctx.product))(grad, *inputs)
        else:
            leaves = [x.detach().requires_grad_() for x in inputs]
            with torch.enable_grad():
                product = ctx.product(*leaves)
            of_x, *of_weights = torch.autograd.grad(product, leaves, grad)
        return of_x, of_weights[0] if of_weights else None, None


@functools.cache
def _gradients_of(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """Return the backward function of `function`: (gradient of the result, *inputs) → gradients of the inputs.

    It consists of operations that can be compiled.
    """
    return lambda grad, *inputs: torch.func.vjp(function, *inputs)[1](grad)


def rotate(x: Tensor, angles: Tensor, factor: float) -> Tensor:
    """Rotate the first `rotated` elements of each head (RoPE, arXiv:2104.09864); the other elements are unchanged.

    Element i is rotated together with element i + `rotated` / 2. Only the angles are kept for the backward pass.

    Args:
        x: [T, …, heads, head_dim].
        angles: fp32, [T, …, 1, rotated]; both halves of the last dimension are equal.
        factor: factor by which cos and sin are multiplied.
    """
    rotated: Tensor = _Rotated.apply(x, angles, factor)
    return rotated


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(angles)
        ctx.factor = factor
        ctx.turned = platform.compiled(_turned) if platform.compiles(x) else _turned_in_place
        turned: Tensor = ctx.turned(x, angles, factor)
        return turned

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (angles,) = ctx.saved_tensors
        return ctx.turned(grad, -angles, ctx.factor), None, None


def _turned(x: Tensor, angles: Tensor, factor: float) -> Tensor:
    cos, sin = ((wave * factor).to(x.dtype) for wave in (angles.cos(), angles.sin()))
    first, second = x[..., : angles.shape[-1]].chunk(2, dim=-1)
    turned = x[..., : angles.shape[-1]] * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, x[..., angles.shape[-1] :]), dim=-1)


def _turned_in_place(x: Tensor, angles: Tensor, factor: float) -> Tensor:
    """Rotate `x` as in `rotate`, with small temporary tensors, for devices without compiled kernels."""
    cos, sin = ((wave * factor).to(x.dtype) for wave in (angles.cos(), angles.sin()))
    result = x.clone(memory_format=torch.contiguous_format)
    turned, source = result[..., : angles.shape[-1]].mul_(cos), x[..., : angles.shape[-1]]
    halves = (part.chunk(2, dim=-1) for part in (turned, source, sin))
    (first, second), (of_first, of_second), (sin_first, sin_second) = halves
    first.sub_(of_second * sin_first)
    second.add_(of_first * sin_second)
    return result


SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def rope_parameters(hf_config: Any) -> dict[str, Any]:
    """Return a configuration's RoPE parameters under the names of transformers 5.

    The configuration may come from transformers 4 or 5. The parameters contain `rope_type`, `rope_theta`,
    `partial_rotary_factor`, and the parameters of the rope type.

    Raises:
        UserError: the rope type is not supported.
    """
    parameters = dict(getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {})
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    parameters.setdefault("rope_theta", getattr(hf_config, "rope_theta", 10000.0))
    parameters.setdefault("partial_rotary_factor", getattr(hf_config, "partial_rotary_factor", 1.0))
    if parameters["rope_type"] not in SUPPORTED_ROPE_TYPES:
        raise UserError(
            f"model.path: rope type {parameters['rope_type']!r} is not supported; "
            f"supported are {', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    return parameters


def rope_frequencies(hf_config: Any) -> tuple[Tensor, float]:
    """Return the inverse frequencies of a head's rotated pairs, and the factor by which cos and sin are multiplied.

    The frequencies are fp32, [head_dim · partial_rotary_factor / 2]. The factor is 1 except for YaRN.
    """
    parameters = rope_parameters(hf_config)
    if parameters["rope_type"] == "default":
        dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
        return plain_frequencies(parameters["rope_theta"], int(dim * parameters["partial_rotary_factor"])), 1.0
    return scaled_frequencies(hf_config, parameters["rope_type"])


def scaled_frequencies(hf_config: Any, rope_type: str, **options: Any) -> tuple[Tensor, float]:
    """Return the inverse frequencies, and the factor of cos and sin, that transformers computes for `rope_type`."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inverse, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](hf_config, torch.device("cpu"), **options)
    return inverse, float(attention_factor)


def plain_frequencies(theta: float, dim: int) -> Tensor:
    """Return the inverse frequencies [dim / 2] (fp32) of RoPE (arXiv:2104.09864)."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return 1.0 / theta**exponents


class PackedRotaryEmbedding(RotaryEmbedding):
    """Megatron's rotary embedding, which also accepts the positions of a pack's tokens.

    Given the positions of this rank's tokens, it computes only their angles. The rotation then needs no loop over
    sequences, and no sharding of the angles under context parallelism.

    Args:
        frequencies: inverse frequencies of each kind of layer. The angles of all kinds are concatenated; each layer
            selects its own slice (`PackLayer`).
        axes: if tokens have several positions, which of them each frequency uses.
    """

    def __init__(
        self, frequencies: Sequence[Tensor], pg_collection: ProcessGroupCollection, axes: Tensor | None = None
    ) -> None:
        inverse = torch.cat([part.repeat(2) for part in frequencies])
        super().__init__(len(inverse), rotary_percent=1.0, use_cpu_initialization=True, cp_group=pg_collection.cp)
        self.inv_freq, self.frequencies = frequencies[0], inverse
        self.axes = None if axes is None else axes.repeat(2)

    def get_rotary_seq_len(self, *args: Any) -> Any:
        packed_seq_params = args[-1]
        positions = getattr(packed_seq_params, "positions", None)
        return super().get_rotary_seq_len(*args) if positions is None else positions

    def forward(self, max_seq_len: Any, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """Return the angles of tokens.

        If `max_seq_len` is a tensor of positions, [T / CP] or [T / CP, axes], the angles are [T / CP, 1, rotated]. If
        it is a number, the angles are Megatron's: [S, 1, 1, rotated].
        """
        if not isinstance(max_seq_len, Tensor):
            return super().forward(max_seq_len, offset, packed_seq, cp_group)
        self.frequencies = platform.sent(self.frequencies, max_seq_len.device)
        if max_seq_len.ndim == 1:
            return torch.outer(max_seq_len.to(self.frequencies.dtype), self.frequencies)[:, None]
        assert self.axes is not None, "the tokens of this model have one position"
        self.axes = platform.sent(self.axes, max_seq_len.device)
        return (max_seq_len[:, self.axes].to(self.frequencies.dtype) * self.frequencies)[:, None]
