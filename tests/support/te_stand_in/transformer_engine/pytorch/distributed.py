"""Recomputation and random states, and the exchanges between tensor-parallel ranks that TE's modules make."""

from contextlib import contextmanager, nullcontext

import torch
import torch.distributed
import torch.utils.checkpoint

from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast


def checkpoint(function, *args, **kwargs):
    """Recompute `function` in the backward pass, with the FP8 recipe and the random states of the first pass."""
    if kwargs.pop("distribute_saved_activations", False):
        raise NotImplementedError("the stand-in does not distribute saved activations")
    tracker = kwargs.pop("get_rng_state_tracker", None)
    kwargs.pop("tp_group", None)
    states = tracker().get_states() if tracker else None
    is_first, recipe = True, FP8GlobalStateManager.get_fp8_recipe()

    def again(*inputs):
        with fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            return function(*inputs, **kwargs)

    def run(*inputs):
        nonlocal is_first
        if is_first or not tracker:
            is_first = False
            return again(*inputs)
        current = tracker().get_states()
        tracker().set_states(states)
        try:
            return again(*inputs)
        finally:
            tracker().set_states(current)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=True)


def activation_recompute_forward(activation_recompute=False, recompute_phase=False):
    return nullcontext()


class CudaRNGStatesTracker:
    """Named random states of the CPU's generator."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.states_, self.seeds_ = {}, set()

    def get_states(self):
        return dict(self.states_)

    def set_states(self, states):
        self.states_ = states

    def add(self, name, seed):
        if seed in self.seeds_ or name in self.states_:
            raise RuntimeError(f"seed {seed} or state {name} exists already")
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name="model-parallel-rng"):
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outside)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward, group):
        ctx.backward, ctx.group = backward, group
        return forward(x, group)

    @staticmethod
    def backward(ctx, grad):
        return ctx.backward(grad, ctx.group), None, None, None


def _identity(x, group):
    return x.view_as(x)


def _sum(x, group):
    total = x.contiguous().clone()
    torch.distributed.all_reduce(total, group=group)
    return total


def _gather(x, group):
    whole = x.new_empty(group.size() * len(x), *x.shape[1:])
    torch.distributed.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


def _scatter(x, group):
    return _sum(x, group).chunk(group.size())[group.rank()].contiguous()


def enter_column(x, group, sequence_parallel):
    """Return the input of a column-parallel product; with sequence parallelism, gather the rows of all ranks."""
    if group is None or group.size() == 1:
        return x
    return _Exchange.apply(x, *((_gather, _scatter) if sequence_parallel else (_identity, _sum)), group)


def leave_row(x, group, sequence_parallel):
    """Sum a row-parallel product over ranks; with sequence parallelism, each rank keeps its rows."""
    if group is None or group.size() == 1:
        return x
    return _Exchange.apply(x, *((_scatter, _gather) if sequence_parallel else (_sum, _identity)), group)


def gather_rows(x, group):
    """Gather the rows of all ranks; the gradient is summed and scattered."""
    return x if group is None or group.size() == 1 else _Exchange.apply(x, _gather, _scatter, group)
