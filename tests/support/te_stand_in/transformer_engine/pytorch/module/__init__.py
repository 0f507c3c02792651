"""Norms and linear layers."""

import torch
import torch.nn.functional as F

from transformer_engine import since
from transformer_engine.pytorch.distributed import enter_column, leave_row
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, get_align_size_for_quantization, is_quantizable
from transformer_engine.refusal import refuse

from .base import TransformerEngineBaseModule


def normalize(x, weight, bias, eps, kind, zero_centered_gamma):
    """Normalize in fp32; the weight multiplies before the result is rounded to x's precision."""
    wide, scale = x.float(), weight.float() + (1 if zero_centered_gamma else 0)
    if kind == "RMSNorm":
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * scale).to(x.dtype)
    return F.layer_norm(wide, weight.shape, scale, None if bias is None else bias.float(), eps).to(x.dtype)


class _Norm(torch.nn.Module):
    def _build(self, size, eps, sequence_parallel, dtype, zero_centered_gamma, options):
        device, dtype = options.pop("device", "cuda"), dtype or options.pop("dtype", None) or torch.get_default_dtype()
        refuse(type(self).__name__, **options)
        self.eps, self.zero_centered_gamma, self.bias = eps, zero_centered_gamma, None
        fill = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = torch.nn.Parameter(fill(size, dtype=dtype, device=device))
        if isinstance(self, LayerNorm):
            self.bias = torch.nn.Parameter(torch.zeros(size, dtype=dtype, device=device))
        for parameter in self.parameters():
            if sequence_parallel is not None:
                parameter.sequence_parallel = sequence_parallel

    def forward(self, inp):
        return normalize(inp, self.weight, self.bias, self.eps, type(self).__name__, self.zero_centered_gamma)


class RMSNorm(_Norm):
    def __init__(
        self,
        normalized_shape=None,
        eps=1e-5,
        sequence_parallel=None,
        params_dtype=None,
        zero_centered_gamma=False,
        hidden_size=None,
        **kwargs,
    ):
        super().__init__()
        size = hidden_size if normalized_shape is None else normalized_shape
        self._build(size, eps, sequence_parallel, params_dtype, zero_centered_gamma, kwargs)


class LayerNorm(_Norm):
    def __init__(
        self,
        normalized_shape=None,
        eps=1e-5,
        sequence_parallel=None,
        params_dtype=None,
        zero_centered_gamma=False,
        hidden_size=None,
        **kwargs,
    ):
        super().__init__()
        size = hidden_size if normalized_shape is None else normalized_shape
        self._build(size, eps, sequence_parallel, params_dtype, zero_centered_gamma, kwargs)


class Linear(TransformerEngineBaseModule):
    def __init__(
        self,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        parameters_split=None,
        device="cuda",
        ub_overlap_ag=False,
        ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False,
        ub_bulk_dgrad=False,
        ub_bulk_wgrad=False,
        ub_name=None,
        delay_wgrad_compute=False,
        symmetric_ar_type=None,
        save_original_input=False,
        name=None,
    ):
        super().__init__()
        refuse(
            "Linear",
            parameters_split=parameters_split,
            user_buffers=ub_overlap_ag or ub_overlap_rs or ub_overlap_rs_dgrad or ub_bulk_dgrad or ub_bulk_wgrad,
            delay_wgrad_compute=delay_wgrad_compute,
            symmetric_ar_type=symmetric_ar_type,
        )
        self.set_sizes(in_features, out_features, parallel_mode, tp_group, tp_size, sequence_parallel)
        self.fuse_wgrad_accumulation, self.use_bias, self.return_bias = fuse_wgrad_accumulation, bias, return_bias
        self.save_original_input = save_original_input  # of no effect on the numbers
        self.add_weight("weight", params_dtype, device, init_method, get_rng_state_tracker, rng_tracker_name)
        self.add_bias("bias", bias, params_dtype, device)

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        refuse("Linear", fp8_output=fp8_output, fp8_grad=fp8_grad)
        self.prepare_forward(inp)
        adds_bias = self.use_bias and not self.return_bias
        if self.parallel_mode == "column":
            recipe = FP8GlobalStateManager.get_fp8_recipe()
            if recipe is not None and self.sequence_parallel:
                assert is_quantizable(recipe, inp), f"All-gather requires quantizable tensor, not {list(inp.shape)}"
            inp = enter_column(inp, self.tp_group, self.sequence_parallel)
        inside = self.bias if adds_bias and self.parallel_mode != "row" else None
        out = self.product(inp, "weight", inside, is_first_microbatch)
        if self.parallel_mode == "row":
            out = leave_row(out, self.tp_group, self.sequence_parallel)
            out = out + self.bias if adds_bias else out
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(TransformerEngineBaseModule):
    def __init__(
        self,
        in_features,
        out_features,
        eps=1e-5,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        init_method=None,
        bias=True,
        normalization="LayerNorm",
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        return_layernorm_output=False,
        return_layernorm_output_gathered=False,
        parameters_split=None,
        zero_centered_gamma=False,
        device="cuda",
        ub_overlap_ag=False,
        ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False,
        ub_bulk_wgrad=False,
        ub_bulk_dgrad=False,
        ub_name=None,
        delay_wgrad_compute=False,
        symmetric_ar_type=None,
        name=None,
    ):
        super().__init__()
        raise NotImplementedError("the stand-in has no fused norm and product; the project's layers keep them apart")


class LayerNormMLP(TransformerEngineBaseModule):
    """A name that peft looks for where Transformer Engine is installed."""

    def __init__(self, *args, **kwargs):
        raise NotImplementedError("the stand-in has no LayerNormMLP")


class GroupedLinear(TransformerEngineBaseModule):
    """Rows in groups, each of which is multiplied with its own weight."""

    def __init__(
        self,
        num_gemms,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        device="cuda",
        ub_overlap_rs=False,
        ub_overlap_ag=False,
        ub_name=None,
        delay_wgrad_compute=False,
        save_original_input=False,
    ):
        super().__init__()
        refuse("GroupedLinear", user_buffers=ub_overlap_rs or ub_overlap_ag, delay_wgrad_compute=delay_wgrad_compute)
        self.set_sizes(in_features, out_features, parallel_mode, tp_group, tp_size, sequence_parallel)
        if self.tp_size > 1:
            raise AssertionError("GroupedLinear has no communication between tensor-parallel ranks")
        self.num_gemms, self.fuse_wgrad_accumulation = num_gemms, fuse_wgrad_accumulation
        self.save_original_input = save_original_input
        self.use_bias, self.return_bias = bias, return_bias
        for index in range(num_gemms):
            self.add_weight(
                f"weight{index}", params_dtype, device, init_method, get_rng_state_tracker, rng_tracker_name
            )
            self.add_bias(f"bias{index}", bias, params_dtype, device)

    def forward(self, inp, m_splits, is_first_microbatch=None):
        if not isinstance(m_splits, list) or len(m_splits) != self.num_gemms:
            raise AssertionError("m_splits must be a list with one number per group")
        self.prepare_forward(inp)
        rows = inp.reshape(-1, inp.shape[-1])
        if sum(m_splits) != len(rows):
            raise AssertionError("the groups must cover all rows")
        biases = [getattr(self, f"bias{index}") for index in range(self.num_gemms)]
        adds_bias = self.use_bias and not self.return_bias
        parts = [
            self.product(part, f"weight{index}", bias if adds_bias else None, is_first_microbatch)
            for index, (part, bias) in enumerate(zip(rows.split(m_splits), biases, strict=True))
        ]
        out = torch.cat(parts).view(*inp.shape[:-1], self.out_features)
        return (out, biases) if self.return_bias else out


if since(2, 14):

    class GroupedLinear(GroupedLinear):
        """The same rows and weights; one tensor for all weights is not imitated."""

        def __init__(
            self,
            num_gemms,
            in_features,
            out_features,
            sequence_parallel=False,
            fuse_wgrad_accumulation=False,
            tp_group=None,
            tp_size=1,
            get_rng_state_tracker=None,
            rng_tracker_name=None,
            init_method=None,
            bias=True,
            return_bias=False,
            params_dtype=None,
            parallel_mode=None,
            device="cuda",
            ub_overlap_rs=False,
            ub_overlap_ag=False,
            ub_name=None,
            delay_wgrad_compute=False,
            save_original_input=False,
            single_grouped_weight=False,
            single_grouped_bias=False,
            name=None,
        ):
            refuse("GroupedLinear", single_grouped=single_grouped_weight or single_grouped_bias)
            super().__init__(
                num_gemms, in_features, out_features, sequence_parallel, fuse_wgrad_accumulation, tp_group, tp_size,
                get_rng_state_tracker, rng_tracker_name, init_method, bias, return_bias, params_dtype, parallel_mode,
                device, ub_overlap_rs, ub_overlap_ag, ub_name, delay_wgrad_compute, save_original_input,
            )  # fmt: skip


class Fp8Padding(torch.nn.Module):
    """Appends rows of zeros to each group of rows, up to a number of rows that FP8 can multiply."""

    def __init__(self, num_gemms, align_size=None):
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def forward(self, inp, m_splits):
        size = self.align_size or get_align_size_for_quantization(FP8GlobalStateManager.get_fp8_recipe())
        padded = [-(-rows // size) * size for rows in m_splits]
        parts = [
            F.pad(part, (0, 0, 0, rows - len(part))) for part, rows in zip(inp.split(m_splits), padded, strict=True)
        ]
        return torch.cat(parts), padded


class Fp8Unpadding(Fp8Padding):
    """Removes the rows that `Fp8Padding` has appended."""

    def forward(self, inp, m_splits):
        size = self.align_size or get_align_size_for_quantization(FP8GlobalStateManager.get_fp8_recipe())
        parts = inp.split([-(-rows // size) * size for rows in m_splits])
        return torch.cat([part[:rows] for part, rows in zip(parts, m_splits, strict=True)])
