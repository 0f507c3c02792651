"""Recordings: files with every step's rollouts, to train on them again without generating."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_rl.config import TrainingConfig
from mcore_rl.data.choices import CHOICES
from mcore_rl.data.images import PlacedImage
from mcore_rl.distributed.sampling_mask import KeptTokens
from mcore_rl.errors import UserError
from mcore_rl.rollouts.samples import Rollout, TokenRow
from mcore_rl.run.metrics import read_step_log

REPLAYED_OPTIONS = {"temperature", "num_generations_per_prompt", "num_prompts_per_step"}
"""Keys of the algorithm's section that a replay must share with its recording."""


def recorded_by(config: TrainingConfig, data: str) -> dict[str, Any]:
    """Return values that identify this run in its recording; `data` is the fingerprint of its prompts."""
    return {"output_dir": str(config.output_dir.resolve()), "seed": config.seed, "data": data}


def check_record(path: Path, run: dict[str, Any], goes_on: bool) -> None:
    """Check that rollouts can be recorded in the file `path`. If the file exists, it must be this run's recording.

    Args:
        run: the result of `recorded_by` for this run.
        goes_on: whether this run continues an earlier launch; otherwise the file must not exist.

    Raises:
        UserError: the file cannot be written, or is not the recording of this run.
    """
    if not path.parent.is_dir():
        raise UserError(f"--record {path}: the directory {path.parent} does not exist")
    if path.exists() and not goes_on:
        raise UserError(f"--record {path}: exists already and will not be overwritten; name another file")
    if path.exists():
        try:
            found = [entry["sampling"] for entry in read_step_log(path)]
            others = [name for name in run if any(sampling.get(name) != run[name] for sampling in found)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"--record {path}: is not a recording of rollouts; name another file") from None
        if others:
            raise UserError(f"--record {path}: is of another run (different {', '.join(others)}); name another file")


def recorded_step(weights: str, sampling: dict[str, Any], rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return the entry of a recording for a step: its rollouts, their sampling options, and a hash of the weights."""
    return {"weights": weights, "sampling": sampling, "rollouts": [_to_json(r) for r in rollouts]}


def read_recording(
    path: Path,
    steps: int,
    required: dict[str, Any],
    replayed: Sequence[str] = (),
    section: str = "grpo",
    keeps_mask: bool = False,
) -> dict[int, list[Rollout]]:
    """Read a recording; return the rollouts of each step.

    Args:
        steps: number of steps that the recording must have.
        required: sampling options of this run. They must equal the recorded options.
        replayed: names of the choices of sampling that this run makes again.
        section: section of the configuration that has the sampling options, for errors.
        keeps_mask: whether this run needs the kept tokens (those that top-k, top-p and min-p left in sampling) in the
            recording. It then computes probabilities over the kept tokens only.

    Raises:
        UserError: the file is missing, is not a recording, has fewer than `steps` steps, or was sampled with other
            options.
    """
    try:
        entries = {int(entry["step"]): entry for entry in read_step_log(path)}
        recorded = {step: [_from_json(r) for r in entry["rollouts"]] for step, entry in entries.items()}
        found = {name: entry["sampling"][name] for entry in entries.values() for name in sorted(required)}
    except OSError as error:
        raise UserError(f"--replay {path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--replay {path}: is not a recording of rollouts: {error}") from None
    if missing := [step for step in range(1, steps + 1) if step not in recorded]:
        raise UserError(
            f"--replay {path}: lacks step {missing[0]}, but this run has {steps} steps; "
            "lower trainer.max_steps, or replay another recording"
        )
    answered = [r for rollouts in recorded.values() for r in rollouts if r.response_lengths]
    for name, kind in CHOICES.items():
        has_choice = {name in rollout.choices for rollout in answered}
        if has_choice - {name in replayed}:
            has = "without" if name in replayed else "with"
            raise UserError(
                f"--replay {path}: was recorded {has} the {kind.what} of each token, but "
                f"model.{kind.option}={name in replayed}; change this key, or replay another recording"
            )
    with_mask = {r.kept_tokens is not None for r in answered}
    if with_mask - {keeps_mask}:
        has, value = ("without", "false") if keeps_mask else ("with", "true, and the same top_k, top_p and min_p")
        raise UserError(
            f"--replay {path}: was recorded {has} the sampling mask of each token; "
            f"set {section}.keep_sampling_mask={value}"
        )
    for name, value in sorted(required.items()):
        if found[name] != value:
            differs = f"was sampled with {section}.{name}={found[name]}, but this run has {value}; change this key"
            if name == "data":
                differs = "was recorded with other prompts than those of data.train; use the same data"
            raise UserError(f"--replay {path}: {differs}, or replay another recording")
    return recorded


SAMPLES_PER_TENSOR = 64


def hash_of_weights(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a SHA-256 of the tensors' names, and of some evenly spaced values of each tensor.

    The hash distinguishes the weights after different updates, without reading the whole model.
    """
    digest, samples = hashlib.sha256(), []
    for name, tensor in tensors:
        digest.update(name.encode())
        numbers = tensor.detach().flatten()
        samples.append(numbers[:: max(1, len(numbers) // SAMPLES_PER_TENSOR)].double())
    digest.update(torch.cat(samples).cpu().numpy().tobytes())  # a single copy from the device
    return digest.hexdigest()


def _to_json(rollout: Rollout) -> dict[str, Any]:
    further = [_row_to_json(row) for row in rollout.further_rows]
    return _row_to_json(replace(rollout, further_rows=[], session=[])) | {"further_rows": further}


def _row_to_json(row: Rollout | TokenRow) -> dict[str, Any]:
    kept = row.kept_tokens
    lists = {name: getattr(row, name).tolist() for name in ("input_ids", "token_mask", "logprobs")}
    return asdict(replace(row, choices={}, kept_tokens=None)) | {
        **lists,
        "choices": {name: values.tolist() for name, values in row.choices.items()},
        "kept_tokens": None if kept is None else {"counts": kept.counts.tolist(), "ids": kept.ids.tolist()},
    }


def _from_json(values: dict[str, Any]) -> Rollout:
    rollout = Rollout(**values)
    rollout.further_rows = [TokenRow(**row) for row in rollout.further_rows]  # type: ignore[arg-type]
    rows: list[Rollout | TokenRow] = [rollout, *rollout.further_rows]
    for row in rows:
        images: Any = row.images
        row.images = tuple(PlacedImage(**{**image, "grid": tuple(image["grid"])}) for image in images)
        row.choices = {name: torch.tensor(choice, dtype=CHOICES[name].dtype) for name, choice in row.choices.items()}
        kept: Any = row.kept_tokens
        if kept is not None:
            row.kept_tokens = KeptTokens(*(torch.tensor(kept[part], dtype=torch.int32) for part in ("counts", "ids")))
    return rollout
