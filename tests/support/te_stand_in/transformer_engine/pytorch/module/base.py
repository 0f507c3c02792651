"""The base class of TE's modules: parameters and their marks, and a product that can add gradients to `main_grad`."""

import pickle

import torch
import torch.nn.functional as F

from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, check_dimensions, rounded

_dummies = {}


def get_dummy_wgrad(shape, dtype, zero=False):
    """Return a tensor that stands for a gradient which was added to `main_grad`.

    The real one holds arbitrary values. These are NaN, so that code which reads them is noticed.
    """
    key = (*shape, dtype)
    if key not in _dummies:
        _dummies[key] = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return _dummies[key].fill_(0.0 if zero else torch.nan).detach()


class Product(torch.autograd.Function):
    """x · weightᵀ (+ bias). With `fuse`, the weight's gradient is added to `main_grad`, as a fused kernel does.

    With an FP8 recipe, the three products of forward and backward pass multiply values that were rounded to FP8, in
    fp32. `rounded_weight` is the weight as the forward pass uses it, which may come from a cache.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, fuse, recipe, rounded_weight):
        ctx.weight, ctx.fuse, ctx.recipe, ctx.shape = weight, fuse, recipe, x.shape
        if recipe is None:
            ctx.save_for_backward(x if weight.requires_grad else None, None)
            return F.linear(x, weight, bias)
        check_dimensions(x, weight)
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rounded(rows, recipe, "input", 0) if weight.requires_grad else None, rounded_weight)
        out = rounded(rows, recipe, "input", 1) @ rounded_weight.T
        out = (out if bias is None else out + bias.float()).to(x.dtype)
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx, grad):
        (x, rounded_weight), weight, recipe = ctx.saved_tensors, ctx.weight, ctx.recipe
        rows = grad.reshape(-1, grad.shape[-1])
        of_x = of_weight = of_bias = None
        if recipe is not None:
            check_dimensions(rows)
        if ctx.needs_input_grad[0]:
            if recipe is None:
                of_x = grad @ weight
            else:
                by = rounded(weight, recipe, "weight", 0) if recipe.mxfp8() else rounded_weight
                of_x = (rounded(rows, recipe, "gradient", 1) @ by).to(grad.dtype).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            if recipe is None:
                of_weight = rows.T @ x.reshape(-1, x.shape[-1])
            else:
                assert len(rows) % 16 == 0, f"FP8 cannot sum over {len(rows)} rows"
                of_weight = rounded(rows, recipe, "gradient", 0).T @ x
            if ctx.fuse:
                weight.main_grad.add_(of_weight)
                of_weight = None
                if hasattr(weight, "grad_added_to_main_grad"):
                    weight.grad_added_to_main_grad = True
                    is_zero = getattr(weight, "zero_out_wgrad", False)
                    of_weight = get_dummy_wgrad(list(weight.main_grad.shape), weight.dtype, zero=is_zero)
            else:
                of_weight = of_weight.to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_x, of_weight, of_bias, None, None, None


class TransformerEngineBaseModule(torch.nn.Module):
    """A module that multiplies in FP8 inside `fp8_autocast`, and may keep its weights in FP8 between products."""

    def __init__(self):
        super().__init__()
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta = {"fp8_checkpoint": False, "recipe": None}
        self.tp_group, self.tp_size, self.sequence_parallel = None, 1, False
        self.activation_dtype, self._fp8_workspaces = None, {}

    def product(self, x, name, bias, is_first_microbatch):
        """Return x · weightᵀ (+ bias), where `name` is the weight's name.

        In FP8, `is_first_microbatch` says whether to round the weight again or to use the last rounded one; None: round
        it and keep nothing.
        """
        weight, recipe = getattr(self, name), FP8GlobalStateManager.get_fp8_recipe()
        kept = None
        if recipe is not None:
            kept = self._fp8_workspaces.get(name) if is_first_microbatch is False else None
            if kept is None:
                kept = rounded(weight.detach(), recipe, "weight", 1)
                if is_first_microbatch is not None:
                    self._fp8_workspaces[name] = kept
        return Product.apply(x, weight, bias, self.fuse_wgrad_accumulation, recipe, kept)

    def note_recipe(self):
        """Note the recipe in force, which becomes part of checkpoints."""
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        self.fp8 = recipe is not None
        if self.fp8:
            self.fp8_meta |= {"fp8_checkpoint": True, "recipe": recipe}

    def prepare_forward(self, inp):
        """Check an input, as TE does before each product."""
        self.note_recipe()
        self.allow_different_data_and_param_types = False
        self.set_activation_dtype(inp)

    def set_activation_dtype(self, inp):
        if self.activation_dtype == inp.dtype:
            return
        if not self.allow_different_data_and_param_types:
            for name, param in self.named_parameters():
                assert param.dtype == inp.dtype, f"{name} in {param.dtype} with an input in {inp.dtype}"
        self.activation_dtype = inp.dtype

    def set_tensor_parallel_group(self, tp_group):
        self.tp_group = tp_group

    def init_fp8_metadata(self, num_gemms=1):
        pass

    def get_extra_state(self):
        """Return the recipe, pickled in a tensor, once the module has multiplied in FP8."""
        if not self.fp8_meta["fp8_checkpoint"]:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(bytearray(pickle.dumps({"recipe": self.fp8_meta["recipe"]})), dtype=torch.uint8)

    def set_extra_state(self, state):
        if torch.is_tensor(state) and state.numel():
            raise NotImplementedError("the stand-in unpickles nothing, but the state holds a pickled recipe")

    def set_sizes(self, in_features, out_features, parallel_mode, tp_group, tp_size, sequence_parallel):
        """Set this rank's sizes of a linear layer."""
        if parallel_mode not in ("row", "column", None):
            raise AssertionError(f"parallel_mode {parallel_mode} not supported")
        self.tp_group, self.parallel_mode = tp_group, parallel_mode
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.in_features = in_features // (self.tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (self.tp_size if parallel_mode == "column" else 1)

    def add_weight(self, name, dtype, device, init_method, get_rng_state_tracker, rng_tracker_name):
        """Register a weight [out, in] with the marks that TE sets in Megatron's manner."""
        shape = self.out_features, self.in_features
        weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype or torch.get_default_dtype(), device=device))
        self.register_parameter(name, weight)
        if not weight.is_meta:
            init = init_method or (lambda w: torch.nn.init.normal_(w, mean=0.0, std=0.023))
            with torch.no_grad():
                if get_rng_state_tracker is None:
                    init(weight)
                else:
                    with get_rng_state_tracker().fork(*([rng_tracker_name] if rng_tracker_name else [])):
                        init(weight)
        _mark(weight, 1 if self.parallel_mode == "row" else 0)

    def add_bias(self, name, has_bias, dtype, device):
        """Register a bias [out]; without one, set an empty tensor as TE does."""
        dtype = dtype or torch.get_default_dtype()
        if not has_bias:
            setattr(self, name, torch.tensor([], dtype=dtype, device=device))
            return
        bias = torch.nn.Parameter(torch.zeros(self.out_features, dtype=dtype, device=device))
        self.register_parameter(name, bias)
        if self.parallel_mode == "row":
            bias.sequence_parallel = self.sequence_parallel
        elif self.parallel_mode == "column":
            _mark(bias, 0)


def _mark(parameter, dimension):
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dimension, 1
