"""Advantages from the rewards of a step's groups: P prompts, G responses to each."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

EPSILON = 1e-4


def grpo(rewards: Tensor) -> Tensor:
    """(r − group mean) / group standard deviation (arXiv:2402.03300, section 4.1.2); [P, G] → [P, G]."""
    return dr_grpo(rewards) / (rewards.std(dim=1, keepdim=True) + EPSILON)


def dr_grpo(rewards: Tensor) -> Tensor:
    """r − group mean: without the deviation, easy and hard prompts weigh alike (arXiv:2503.20783)."""
    return rewards - rewards.mean(dim=1, keepdim=True)


def rloo(rewards: Tensor) -> Tensor:
    """r − mean of the group's other rewards (arXiv:2402.14740): an unbiased baseline."""
    group_size = rewards.shape[1]
    return dr_grpo(rewards) * (group_size / (group_size - 1))


def reinforce_plus_plus(rewards: Tensor) -> Tensor:
    """(r − mean) / standard deviation, both over the whole batch (REINFORCE++, arXiv:2501.03262)."""
    return (rewards - rewards.mean()) / (rewards.std() + EPSILON)


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
}


def has_signal(rewards: Tensor) -> Tensor:
    """[P] True for groups whose rewards differ: the others teach nothing (DAPO, arXiv:2503.14476, section 3.2)."""
    return rewards.amax(dim=1) > rewards.amin(dim=1)
