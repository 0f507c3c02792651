"""Configurations of TRL, verl and NeMo RL as flat keys, read without their packages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_rl.config.porting.defaults import defaults_of_verl
from mcore_rl.config.porting.references import resolved

SECTIONS_OF_NEMO_RL = {"grpo": "grpo", "dpo": "dpo", "sft": "sft", "rm": "rm", "distillation": "distill"}
"""Map from a section of NeMo RL, which only one of its programs reads, to the algorithm here."""


GROUPS = ("model_engine", "engine", "optim", "model", "profiler", "actor", "critic", "rollout", "ref", "reward")
"""Keys by which verl's commands choose a file for a section (Hydra's groups)."""


@dataclass(frozen=True)
class Foreign:
    """A configuration of another program.

    values: its values by dotted key. algorithm: the program here that corresponds; "" if it is not known.
    processes: number of processes, if it is known. nodes: number of machines. unread: what has to be read by a person,
    one line each. defaults: values of the program for keys that are left out. names: how a key is written in the file,
    where another program of the package has it under another name.
    """

    program: str
    algorithm: str
    values: Mapping[str, Any]
    processes: int | None = None
    unread: tuple[str, ...] = ()
    nodes: int = 1
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)

    def spelled(self, key: str) -> str:
        """Return the name that a key has in the file."""
        return self.names.get(key, key)


def of_verl(own: str, values: Mapping[str, Any], unread: Sequence[str]) -> Foreign:
    """Return a configuration of verl from its values over those of verl's file `own`.

    The algorithm is left open if it rests on verl's default while a part of the file is unread.
    """
    groups = [
        values.get(key) for key in ("model_engine", "engine", "engine.strategy", "actor_rollout_ref.actor.strategy")
    ]
    values = {key: value for key, value in values.items() if key not in GROUPS or isinstance(value, dict)}
    if "megatron" in groups:
        own = own.replace("ppo_trainer", "ppo_megatron_trainer").replace("sft_trainer", "sft_megatron_trainer")
    defaults = defaults_of_verl(own)
    of_all, computed = resolved({**defaults, **values})
    given = {key: of_all[key] for key in values if key in of_all}
    told = [*unread, *(line for key, line in computed.items() if key in values)]
    algorithm = "sft" if own.startswith("sft") else ""
    if not algorithm and (not told or {"algorithm.adv_estimator", "distillation.enabled"} & set(given)):
        by_estimator = "ppo" if of_all.get("algorithm.adv_estimator") == "gae" else "grpo"
        algorithm = "distill" if of_all.get("distillation.enabled") is True else by_estimator
    nodes, gpus = (of_all.get(f"trainer.{key}") for key in ("nnodes", "n_gpus_per_node"))
    left = {key: value for key, value in of_all.items() if key not in values}
    names = {as_in_ppo(key, "megatron" in groups): key for key in of_all} if algorithm == "sft" else {}
    if names:
        given, left = ({as_in_ppo(k, "megatron" in groups): v for k, v in part.items()} for part in (given, left))
    return Foreign("verl", algorithm, given, _product(nodes, gpus), tuple(told), _whole(nodes), left, names)


def as_in_ppo(key: str, is_megatron: bool) -> str:
    """Return the name that a key of verl's SFT has in its other programs."""
    engine = "megatron" if is_megatron else "fsdp_config"
    places = {"model": "model", "optim": "actor.optim", "checkpoint": "actor.checkpoint", "engine": f"actor.{engine}"}
    section, _, rest = key.partition(".")
    return f"actor_rollout_ref.{places[section]}.{rest}" if section in places and rest else key


def of_nemo_rl(algorithm: str, values: Mapping[str, Any], unread: Sequence[str]) -> Foreign:
    """Return a configuration of NeMo RL. `algorithm` is "" if only the sections of the file tell the program."""
    given, computed = resolved(values)
    sections = [
        ours for theirs, ours in SECTIONS_OF_NEMO_RL.items() if any(key.startswith(f"{theirs}.") for key in given)
    ]
    algorithm = algorithm or (sections[0] if len(sections) == 1 else "")
    nodes, gpus = (given.get(f"cluster.{key}", usual) for key, usual in (("num_nodes", 1), ("gpus_per_node", None)))
    told = (*unread, *computed.values())
    if given.get("policy.generation.backend") == "vllm" and given.get("policy.generation.colocated.enabled") is False:
        nodes, gpus = _without_engines(nodes, gpus, given)
    return Foreign("NeMo RL", algorithm, given, _product(nodes, gpus), told, _whole(nodes))


def _without_engines(nodes: Any, gpus: Any, given: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the numbers of nodes, and of GPUs of each, that train where the engines have GPUs of their own.

    NeMo RL gives the engines GPUs of the node, if there is one, and otherwise whole nodes.
    """

    def without(total: Any, resource: str) -> Any:
        part = given.get(f"policy.generation.colocated.resources.{resource}")
        return total - part if isinstance(total, int) and isinstance(part, int) and 0 < part < total else total

    return (nodes, without(gpus, "gpus_per_node")) if nodes == 1 else (without(nodes, "num_nodes"), gpus)


def _product(*sizes: Any) -> int | None:
    return math.prod(sizes) if all(isinstance(size, int) and size > 0 for size in sizes) else None


def _whole(nodes: Any) -> int:
    return nodes if isinstance(nodes, int) and nodes > 0 else 1
