"""Which part of the model computes now, forward and backward."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from mcore_rl.simulation.rank import replaced

LM_HEAD, OTHER = "LM head", "other"
OF_MODULES = {
    "self_attention": "projections",
    "mlp": "MLP",
    "router": "router",
    "experts": "experts",
    "shared_experts": "experts",
    "output_layer": "reward head",
}
"""Parts by the names of modules in a layer or a model; of nested modules the innermost counts."""


class Parts:
    """Names of parts of the model, at whatever is computed.

    In a forward pass it is the part that has been entered. In a backward pass it is the one in which the autograd node
    that runs was made: torch numbers nodes in their order, also those of a forward pass that is done again.
    """

    def __init__(self) -> None:
        self._entered: list[str] = []
        self._numbers: list[int] = []  # from which on nodes belong to …
        self._names: list[str] = []  # … this part

    def now(self) -> str:
        """The part that computes."""
        if self._entered:
            return self._entered[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return OTHER
        place = bisect_right(self._numbers, node._sequence_nr())
        return self._names[place - 1] if place else OTHER

    def of_modules(self, models: Iterable[torch.nn.Module]) -> None:
        """From now on notice when modules are entered. Hooks of forward passes alone: others would keep what modules
        take and give."""
        for name, module in (named for model in models for named in model.named_modules()):
            part = OF_MODULES.get(name.rpartition(".")[2])
            if part is not None:
                module.register_forward_pre_hook(lambda *_, part=part: self._enter(part))
                module.register_forward_hook(lambda *_: self._leave())

    @contextmanager
    def of_lm_head(self) -> Iterator[None]:
        """Meanwhile notice when something is computed from hidden states and the LM head."""
        from mcore_rl.distributed import divergences
        from mcore_rl.models.megatron import forward_step

        places: list[tuple[Any, str]] = [
            (forward_step, "linear_logprobs"),
            (forward_step, "linear_topk"),
            (forward_step.LossHead, "_from_logits"),
            (divergences, "linear_logprobs"),
            (divergences, "linear_divergences"),
        ]
        with ExitStack() as stack:
            for owner, name in places:
                stack.enter_context(replaced(owner, name, self._within(LM_HEAD, getattr(owner, name))))
            yield

    def _within(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._leave()

        return wrapper

    def _enter(self, part: str) -> None:
        self._entered.append(part)
        self._note(part)

    def _leave(self) -> None:
        self._entered.pop()
        self._note(self._entered[-1] if self._entered else OTHER)

    def _note(self, part: str) -> None:
        self._numbers.append(torch.autograd._get_sequence_nr())
        self._names.append(part)
