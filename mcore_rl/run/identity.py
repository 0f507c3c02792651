"""The identity of a run: algorithm, model, data, seed. Every checkpoint stores it.

Only the same run may resume a checkpoint. The other values of the configuration (learning rate, steps, layout, …)
may change; such changes are printed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mcore_rl.config import TrainingConfig
from mcore_rl.config.algorithms import CRITIC, JUDGE, REFERENCE, STUDENT, TEACHER
from mcore_rl.errors import UserError
from mcore_rl.utils.checkpoint_store import stored_identity
from mcore_rl.utils.model_directory import architecture_changes, architecture_of, digest_of_weights
from mcore_rl.utils.torchrun import launch_id

IDENTIFYING_KEYS = (
    "model.head",
    "model.dtype",
    "model.vision_tower",
    "dpo.preference_loss",
    "kto.loss",
    "sft.loss",
    "loss.name",
    "optimizer.name",
    "critic.optimizer.name",
    "environment.name",
    "environment.function",
    "seed",
)
"""Keys of the configuration that identify a run: a run with another value of such a key is another run."""
ADAPTER_KEYS = ("model.lora.rank", "model.lora.alpha", "model.lora.target_modules")
"""Further keys that identify a run with adapters. A run without adapters does not have them."""
NO_ADAPTER = "no adapter"
MTP_KEY = "model.mtp_loss_scaling_factor"
"""Key that identifies a run by whether it is 0: a checkpoint has the layers that predict further tokens, or not."""
SECOND_MODEL_KEYS = ("model.lora.path", REFERENCE, TEACHER, JUDGE, CRITIC)
"""Keys that contain the paths of models and adapters from which a run reads weights, except `model.path`."""
UNTRACKED_KEYS = (
    *("output_dir", "dry_run", "checkpoint", "logging"),
    *("model.path", *SECOND_MODEL_KEYS, "data.train"),
)
"""Keys and sections whose changes are not reported. Weights and training data are compared by content, not by path."""

NODE_LOCAL_KEYS = (
    *("output_dir", "model.path", *SECOND_MODEL_KEYS, f"{TEACHER}.*"),
    *("data.train*", "data.validation*", "data.columns*", "data.chat_template", "data.cache_dir"),
    *("environment.url", "environment.rewards.*.url", "generation.vllm.*"),
)
"""Patterns of keys whose values may differ between nodes: paths and servers. Weights and training data are compared by
content instead. The vLLM servers of other nodes do not matter, because all processes use those of rank 0."""
NOT_GIVEN = "(not given)"


@dataclass(frozen=True)
class RunIdentity:
    """Identity of a run, together with the configuration that the run was started with.

    architecture: the fields of the model's config.json that determine the architecture.
    base_weights: digest of the model's initial weights. A reference model keeps these weights.
    data: fingerprint of the tokenized training data. It depends on tokenizer and chat template. As long as the data has
        not been read, it is "" and is not compared.
    config: every value of the configuration.
    launch: `launch_id` of the launch that wrote this; "" without torchrun.
    other_weights: digests of the other weights that the run reads (adapter, reference, teacher, reward model, critic),
        by configuration key.
    chat_day: the date, in ISO 8601, that the chat templates of the policy and of a judging reward model insert; "" if
        neither uses a date.
    """

    algorithm: str
    architecture: dict[str, Any]
    base_weights: str
    data: str
    config: dict[str, Any]
    launch: str = ""
    other_weights: dict[str, str] = field(default_factory=dict)
    chat_day: str = ""

    @classmethod
    def of(cls, config: TrainingConfig, hf_config: Any, data: str, chat_day: str = "") -> RunIdentity:
        return cls(
            config.algorithm,
            architecture_of(hf_config),
            digest_of_weights(config.model.path),
            data,
            config.model_dump(mode="json"),
            launch_id(),
            {key: digest_of_weights(path) for key, path in model_directories(config).items() if key != "model.path"},
            chat_day,
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunIdentity:
        """Return the identity that `to_json` wrote; raise ValueError or TypeError if `text` is not an identity."""
        return cls(**json.loads(text))

    def require_same(self, earlier: RunIdentity, where: Path) -> None:
        """Check that a checkpoint was written by this run.

        Args:
            earlier: the identity of the run that wrote the checkpoint.
            where: the checkpoint's directory, for the error.

        Raises:
            UserError: `earlier` is another run; the message names the key that differs.
        """
        for key, was, now in self._identifying(earlier):
            change = f" ({was} → {now})" if was else ""
            remedy = "convert that checkpoint (mcore-rl convert to-hf) and train from the result"
            if Path(self.config["output_dir"]).resolve() in where.resolve().parents:
                remedy = (
                    "choose another output_dir, or start afresh with checkpoint.resume=none checkpoint.overwrite=true, "
                    "which removes that run"
                )
            raise UserError(f"{key}: the checkpoint {where} is of another run{change}; {remedy}")

    def _identifying(self, earlier: RunIdentity) -> Iterator[tuple[str, str, str]]:
        """Yield (key, earlier value, this run's value) for each difference that makes `earlier` another run."""
        if earlier.algorithm != self.algorithm:
            yield "the algorithm", earlier.algorithm, self.algorithm
        before, now = flattened(earlier.config), flattened(self.config)
        for key in IDENTIFYING_KEYS:
            if key in before and key in now and before[key] != now[key]:
                yield key, str(before[key]), str(now[key])
        if bool(before.get(MTP_KEY)) != bool(now.get(MTP_KEY)):
            yield MTP_KEY, str(before.get(MTP_KEY, 0.0)), str(now.get(MTP_KEY, 0.0))
        for key in ADAPTER_KEYS:
            if _in_any_order(before.get(key, NO_ADAPTER)) != _in_any_order(now.get(key, NO_ADAPTER)):
                yield key, str(before.get(key, NO_ADAPTER)), str(now.get(key, NO_ADAPTER))
        for key, was, value in architecture_changes(earlier.architecture, self.architecture):
            yield "model.path", f"{key} {was}", str(value)
        if earlier.base_weights.partition(" ")[0] != self.base_weights:  # earlier versions appended an adapter's digest
            yield "model.path: other weights", "", ""
        for key in second_model_keys({**before, **now}):
            path, digest = now.get(key), self.other_weights.get(key, "")
            if any((before.get(key) == absent) != (path == absent) for absent in (None, STUDENT)):
                yield key, str(before.get(key)), str(path)
            elif earlier.other_weights.get(key, digest) != digest:  # earlier versions stored no digest
                yield f"{key}: other weights in {path}", "", ""
        if self.data and earlier.data != self.data:
            yield f"data.train: {self.config['data']['train']} is other data", "", ""

    def differences(self, first: RunIdentity) -> list[str]:
        """Return the differences between the inputs of this process and the inputs of rank 0 (`first`).

        Each is a line that begins with the key; likely causes come first.
        """
        day = [f"the date {first.chat_day} → {self.chat_day}"] if first.chat_day != self.chat_day else []
        firsts, own = flattened(first.config), flattened(self.config)
        values = {key: (firsts.get(key, NOT_GIVEN), own.get(key, NOT_GIVEN)) for key in {**firsts, **own}}
        compared = {
            key: pair for key, pair in values.items() if not any(fnmatchcase(key, one) for one in NODE_LOCAL_KEYS)
        }
        configured = [f"{key} {was} → {now}" for key, (was, now) in compared.items() if was != now]
        contents = [f"{key} {was} → {now}" if was else key for key, was, now in self._identifying(first)]
        return day + configured + contents

    def changes(self, earlier: RunIdentity) -> list[str]:
        """Return the changes of the configuration since `earlier`, an identity of the same run, as `key old → new`."""
        before, now = flattened(earlier.config), flattened(self.config)
        pairs = {key: (_value(before, key), _value(now, key)) for key in {**now, **before} if not is_untracked(key)}
        known = {key: pair for key, pair in pairs.items() if NOT_GIVEN not in pair}
        return [f"{key} {was} → {value}" for key, (was, value) in known.items() if was != value]


def _value(values: Mapping[str, Any], key: str) -> Any:
    """Return the value of `key` in a flattened configuration: None if its section is null, `NOT_GIVEN` without both."""
    sections = (key[:place] for place, letter in enumerate(key) if letter == ".")
    is_null = any(values.get(section, NOT_GIVEN) is None for section in sections)
    return values.get(key, None if is_null else NOT_GIVEN)


def is_untracked(key: str) -> bool:
    """Return whether a change of this configuration key is not reported to the user."""
    return any(key == one or key.startswith(f"{one}.") for one in UNTRACKED_KEYS)


def _in_any_order(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def model_directories(config: TrainingConfig) -> dict[str, Path]:
    """Return the directories from which a run reads weights, as a map from configuration key to directory."""
    values = flattened(config.model_dump(mode="json"))
    keys = ("model.path", *second_model_keys(values))
    return {key: Path(values[key]) for key in keys if values.get(key) not in (None, STUDENT)}


def second_model_keys(values: Mapping[str, Any]) -> list[str]:
    """Return the configuration keys of all models except the trained one; each named teacher has its own key."""
    return [*SECOND_MODEL_KEYS, *sorted(key for key in values if key.startswith(f"{TEACHER}."))]


def input_paths(config: TrainingConfig) -> dict[str, Path]:
    """Return the paths of all files and directories that a run reads, as a map from configuration key to path."""
    data, template = config.data, config.data.chat_template
    files = {_named("data.train", i): Path(source) for i, source in enumerate(data.train_sources)}
    files |= {_named("data.validation", i): Path(source) for i, source in enumerate(data.validation_sources)}
    if template is not None and "{" not in template:  # the template itself
        files["data.chat_template"] = Path(template)
    return {**model_directories(config), **files}


def _named(key: str, number: int) -> str:
    return f"{key}[{number}]" if number else key


def identity_of(iteration: Path) -> RunIdentity | None:
    """Return the identity of the run that wrote a checkpoint.

    Return None if the checkpoint has no identity (converted weights) or is damaged.
    """
    try:
        return RunIdentity.from_json(stored_identity(iteration) or "")
    except (TypeError, ValueError):
        return None


def flattened(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as a single dictionary with dotted keys: {"a": {"b": 1}} → {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(flattened(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat
