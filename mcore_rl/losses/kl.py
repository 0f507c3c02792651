"""Estimators of KL(π ‖ π_ref) from the log-probabilities of sampled tokens, and their gradients."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_rl.errors import ContractError
from mcore_rl.losses.importance import finite_exp
from mcore_rl.losses.options import KLEstimator

# Nats: eˣ of more is infinite in fp32.
EXP_LIMIT = 80.0


def calculate_kl(
    logprobs: Float[Tensor, "*shape"],
    logprobs_reference: Float[Tensor, "*shape"],
    estimator: KLEstimator = "k3",
    clamp: float | None = 20.0,
    output_clamp: float | None = None,
) -> Float[Tensor, "*shape"]:
    """Per-token estimate in nats (http://joschu.net/blog/kl-approx.html).

    With x = reference − current: k1 = −x, k2 = x² / 2, k3 = eˣ − x − 1. Over samples of π, k1 and k3 have the
    KL as their mean (k3 is never negative); k2 is biased and its gradient is not (see `kl_weights`).

    Args:
        clamp: bound on |x|, against overflow: e²⁰ nats are wrong anyway. None for the bare formula, which is
            what the documented version of the reference has.
        output_clamp: bound on the estimate's absolute value; None for none.
    """
    x = logprobs_reference - logprobs
    if clamp is not None:
        x = x.clamp(-clamp, clamp)
    if estimator == "k1":
        kl = -x
    elif estimator == "k2":
        kl = x.square() / 2
    elif estimator == "k3":
        # An infinite estimate would, times the 0 that clipping gives as a gradient, be NaN.
        kl = torch.expm1(x if output_clamp is None else x.clamp(max=EXP_LIMIT)) - x
    else:
        raise ContractError(f"KL estimator must be k1, k2 or k3, got {estimator!r}")
    return kl if output_clamp is None else kl.clamp(-output_clamp, output_clamp)


def kl_weights(
    logprobs: Float[Tensor, "*shape"],
    generation_logprobs: Float[Tensor, "*shape"] | None,
    gradient: Literal["value", "unbiased"],
) -> Float[Tensor, "*shape"]:
    """The factor of a KL estimate: its importance weight, with or without a gradient.

    The weight's value is exp(current − generation) for samples of another policy (`generation_logprobs`), else 1.

    value: the weight has no gradient, so that the gradient is that of the estimate's formula. Its mean over samples
        of π is ∇KL(π ‖ π_ref) for k2, ∇KL(π_ref ‖ π) for k3 (the loss of the GRPO paper, arXiv:2402.03300, of TRL
        and of the reference's documented version), and 0 for k1, which then regularises nothing.
    unbiased: the weight is exp(current − its own detached value), so that the probability of having been sampled
        is differentiated too. The mean is ∇KL(π ‖ π_ref) for k1 and k3 (arXiv:2506.09477; the reference's present
        version), and ∇E[k2] for k2.
    """
    if generation_logprobs is None:
        if gradient == "value":
            return torch.ones_like(logprobs)
        return torch.exp(logprobs - logprobs.detach())
    weights = finite_exp(logprobs - generation_logprobs)
    return weights if gradient == "unbiased" else weights.detach()
