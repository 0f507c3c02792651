"""The samples of an evaluation: their file, their statistics, and the comparison of two models."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, Self

from mcore_rl.errors import UserError
from mcore_rl.rollouts.collector import StatisticsBySource
from mcore_rl.rollouts.samples import RolloutSummary
from mcore_rl.run.directory import JUDGE_LOG
from mcore_rl.serving.evaluation_page import evaluation_page
from mcore_rl.utils.lock_file import LockFile, LockHeld

RESULT, SAMPLES, PAGE, LOCK = "eval.json", "samples.jsonl", "eval.html", "eval.lock"
CONFIDENCE = 0.95
SAMPLING = ("samples", "temperature", "top_k", "top_p", "min_p", "stop_strings", "max_new_tokens", "chat_template")
"""Settings that two compared evaluations should have in common."""

PASS_AT = re.compile(r"pass@\d+")

Entry = dict[str, Any]
"""A sample as in samples.jsonl: `prompt` and `sample` are its indices; `error` is null if it was judged."""


@dataclass(frozen=True)
class Interval:
    """An estimate of a mean, with its confidence interval of 95 %; NaN where there are too few prompts."""

    mean: float
    low: float
    high: float

    def to_json(self) -> dict[str, float | None]:
        return {name: None if math.isnan(value) else value for name, value in vars(self).items()}


def interval_of(groups: Iterable[Sequence[float]]) -> Interval:
    """Return the mean over all values, and its interval. Values of a group, those of one prompt, may be correlated.

    The standard error is clustered by group (arXiv:2411.00640, section 2.2), with the factor G / (G − 1) for G groups;
    the interval assumes a normal distribution of the mean.
    """
    values = [list(group) for group in groups if len(group)]
    count = sum(map(len, values))
    if not count:
        return Interval(math.nan, math.nan, math.nan)
    mean = math.fsum(x for group in values for x in group) / count
    if len(values) < 2:
        return Interval(mean, math.nan, math.nan)
    squares = math.fsum(math.fsum(x - mean for x in group) ** 2 for group in values)
    error = math.sqrt(squares * len(values) / (len(values) - 1)) / count
    half = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * error
    return Interval(mean, mean - half, mean + half)


def paired_difference(own: Sequence[Entry], baseline: Sequence[Entry]) -> tuple[Interval, int]:
    """Return the mean difference of two models' rewards, own − baseline, and the number of prompts.

    It is the mean over the prompts of which both models have judged samples (arXiv:2411.00640, section 4).
    """
    of_own, of_baseline = _rewards(own), _rewards(baseline)
    differences = [
        [_mean(of_own[prompt]) - _mean(of_baseline[prompt])] for prompt in sorted(of_own.keys() & of_baseline.keys())
    ]
    return interval_of(differences), len(differences)


def _rewards(entries: Sequence[Entry]) -> dict[int, list[float]]:
    """Return the rewards of the judged samples by prompt."""
    found = defaultdict[int, list[float]](list)
    for entry in entries:
        if entry["error"] is None:
            found[entry["prompt"]].append(entry["reward"])
    return found


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def metrics_of(entries: Sequence[Entry], samples: int) -> dict[str, Any]:
    """Return the metrics of all samples, and of the samples of each source.

    pass@k and maj@k are for the powers of two up to `samples`, and for `samples`. If samples could not be judged,
    `pass@K_prompts` is the number of prompts with at least k judged samples, over which pass@k is the mean.

    Args:
        samples: number of samples of each prompt.
    """
    ks = sorted({samples, *(2**n for n in range(samples.bit_length()))}) if samples > 1 else ()
    ordered = sorted(entries, key=lambda entry: (entry["prompt"], entry["sample"]))
    sources = {entry["prompt"]: entry["source"] for entry in ordered}
    sums = StatisticsBySource(sources.get, ks, samples)
    outcomes = [_outcome(entry) for entry in ordered]
    sums.add(outcomes, [entry["answer"] for entry in ordered] if samples > 1 else None)
    metrics = sums.metrics(if_none_judged=math.nan)
    found = {"reward": interval_of(_rewards(ordered).values())}
    for source in sorted({name for name in sources.values() if name is not None}):
        own = [entry for entry in ordered if entry["source"] == source]
        found[f"{source}/reward"] = interval_of(_rewards(own).values())
    if any(entry["error"] is not None for entry in ordered):
        judged = [len(rewards) for rewards in _rewards(ordered).values()]
        metrics |= {f"pass@{k}_prompts": sum(count >= k for count in judged) for k in ks}
    told: dict[str, Any] = {name: None if math.isnan(value) else value for name, value in metrics.items()}
    return {**told, **{f"{name}_interval": one.to_json() for name, one in found.items()}}


def _outcome(entry: Entry) -> RolloutSummary:
    length = entry["response_length"]
    return RolloutSummary(
        prompt=entry["prompt"], sample_id=0, reward=entry["reward"] or 0.0, rewards=entry["rewards"],
        error=entry["error"], truncated=entry["truncated"], turns=entry["turns"], num_tokens=length,
        response_length=length, longest_response=length, weight_versions=[],
    )  # fmt: skip


def fingerprint_of(prompts: Iterable[Any]) -> str:
    """Return a hash of the texts and records of prompts, which does not depend on the model."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.content, prompt.record], sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


class EvaluationFiles:
    """The directory of an evaluation: eval.json, samples.jsonl and eval.html.

    Args:
        settings: what the samples depend on. Samples of other settings are not used again.

    Raises:
        UserError: the directory has an evaluation with other settings and `overwrite` is not set, or other files.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any], overwrite: bool = False) -> None:
        self.directory, self.settings = directory, dict(settings)
        self.samples = directory / SAMPLES
        self.entries = dict[tuple[int, int], Entry]()
        """The judged samples, by prompt and number."""
        self._is_new = not (directory / RESULT).exists()
        self._lock = LockFile(directory / LOCK)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock.take()
        except LockHeld as held:
            raise UserError(f"{directory}: another evaluation writes there ({held})") from None
        except OSError as error:
            raise UserError(f"{directory}: cannot be written ({error.strerror})") from None
        try:
            self._open(overwrite)
        except BaseException:
            self._lock.release()
            raise

    def _open(self, overwrite: bool) -> None:
        """Read the judged samples of an earlier evaluation; write the settings."""
        directory, result = self.directory, self.directory / RESULT
        if result.is_file() and not overwrite:
            if changes := _changes(read_result(directory)["settings"], self.settings):
                raise UserError(
                    f"{directory}: has an evaluation with other settings ({', '.join(changes)}); choose another "
                    "directory (--output), or replace it (--overwrite)"
                )
            self.entries = {key: entry for key, entry in _read(self.samples).items() if entry["error"] is None}
        elif not result.is_file() and self.samples.exists():
            raise UserError(f"{self.samples}: exists, but there is no {RESULT}; choose another directory (--output)")
        _write(self.samples, "".join(_line(entry) for entry in self.entries.values()))
        _write(result, json.dumps({"settings": self.settings, "metrics": None}, indent=1) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Release the directory. After an error before the first sample, remove the files of a new evaluation."""
        if kind is not None and self._is_new and not self.entries:
            for name in (RESULT, SAMPLES, JUDGE_LOG):
                (self.directory / name).unlink(missing_ok=True)
        self._lock.release()
        if kind is not None:
            with contextlib.suppress(OSError):
                self.directory.rmdir()  # if nothing else is there

    def add(self, entries: Sequence[Entry]) -> None:
        """Append samples to samples.jsonl."""
        with open(self.samples, "a") as file:
            file.writelines(map(_line, entries))
        self.entries |= {(entry["prompt"], entry["sample"]): entry for entry in entries}

    def finish(self, model: str, samples: int, dropped: int = 0) -> None:
        """Sort samples.jsonl, and write the metrics and the page.

        Args:
            samples: number of samples of each prompt.
            dropped: number of prompts that were not evaluated because they are too long.
        """
        ordered = [self.entries[key] for key in sorted(self.entries)]
        _write(self.samples, "".join(map(_line, ordered)))
        metrics = {"dropped_prompts": dropped, **metrics_of(ordered, samples)}
        result = {"model": model, "settings": self.settings, "metrics": metrics}
        _write_result(self.directory, result, ordered)


def check_baseline(settings: Mapping[str, Any], baseline: Path) -> list[str]:
    """Check that an evaluation with these settings can be compared with a baseline.

    Returns:
        The names of the settings of sampling that differ.

    Raises:
        UserError: the baseline is no finished evaluation, or it is of other prompts or judges.
    """
    other = read_result(baseline)
    if other.get("metrics") is None:
        raise UserError(f"{baseline}: the evaluation was not finished; run it again")
    changes = _changes(other["settings"], settings)
    for name, what in {"fingerprint": "prompts", "judge": "judges"}.items():
        if name in changes:
            raise UserError(f"--baseline {baseline}: is an evaluation with other {what}")
    return [name for name in changes if name in SAMPLING]


def compare(directory: Path, baseline: Path) -> None:
    """Add the difference of an evaluation's rewards from those of a baseline to its eval.json and page.

    Raises:
        UserError: one of them is no finished evaluation, or they are of different prompts or judges.
    """
    own, other = read_result(directory), read_result(baseline)
    check_baseline(own["settings"], baseline)
    entries = read_entries(directory)
    difference, prompts = paired_difference(entries, read_entries(baseline))
    own["baseline"] = {
        "model": other["model"],
        "directory": str(baseline),
        "reward_mean": other["metrics"]["reward_mean"],
        "difference": difference.to_json(),
        "prompts": prompts,
    }
    _write_result(directory, own, entries)


def first_error(directory: Path) -> str:
    """Return the error of the first sample that could not be judged; "" if there is none."""
    return next((entry["error"] for entry in read_entries(directory) if entry["error"]), "")


def described(directory: Path) -> Iterator[str]:
    """Yield the lines that tell a person the results of an evaluation."""
    result = read_result(directory)
    metrics, samples = result["metrics"], result["settings"]["samples"]
    names = ["reward_mean", "reward_positive_fraction", *(name for name in metrics if PASS_AT.fullmatch(name))]
    names += ["response_length_mean", "truncated_fraction", "failed_fraction"]
    yield f"{result['model']}: {int(metrics['num_samples'])} samples, {samples} of each prompt"
    if dropped := metrics["dropped_prompts"]:
        yield f"  {dropped} prompts were too long, and were not evaluated"
    for name in names:
        if name in metrics:
            more = f"  {_in_words(metrics['reward_interval'])}" if name == "reward_mean" else ""
            more = f"  (over {prompts} prompts)" if (prompts := metrics.get(f"{name}_prompts")) is not None else more
            yield f"  {name:<26}{_rounded(metrics[name])}{more}"
    for name, one in metrics.items():
        if name.endswith("/reward_interval"):
            source = name.removesuffix("/reward_interval")
            yield f"  {source + ': reward_mean':<26}{_rounded(one['mean'])}  {_in_words(one)}"
    if (baseline := result.get("baseline")) is not None:
        difference = baseline["difference"]
        told = f"{_rounded(difference['mean'])}  {_in_words(difference)}"
        yield f"  difference from {baseline['model']}: {told} over {baseline['prompts']} prompts"
    yield f"{directory / RESULT}  {directory / SAMPLES}  {directory / PAGE}"


def _in_words(one: Mapping[str, float | None]) -> str:
    if one["low"] is None:
        return "(no interval: too few judged prompts)"
    return f"(95 % interval: {_rounded(one['low'])} to {_rounded(one['high'])})"


def _rounded(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _write_result(directory: Path, result: Mapping[str, Any], entries: Sequence[Entry]) -> None:
    _write(directory / RESULT, json.dumps(result, indent=1) + "\n")
    _write(directory / PAGE, evaluation_page(result, entries))


def _write(path: Path, text: str) -> None:
    """Write a file as a whole, so that a reader never sees a part of it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(text.encode("utf-8", "replace"))  # a sample may have half a surrogate pair
    partial.replace(path)


def _line(entry: Entry) -> str:
    return json.dumps(entry) + "\n"


def read_result(directory: Path) -> dict[str, Any]:
    """Return the content of an evaluation's eval.json.

    Raises:
        UserError: there is no evaluation in the directory.
    """
    try:
        result: dict[str, Any] = json.loads((directory / RESULT).read_bytes())
        assert isinstance(result["settings"], dict)
    except (OSError, ValueError, KeyError, TypeError, AssertionError):
        raise UserError(f"{directory / RESULT}: is not the result of mcore-rl eval") from None
    return result


def read_entries(directory: Path) -> list[Entry]:
    """Return the samples of a finished evaluation."""
    return list(_read(directory / SAMPLES).values())


def _read(path: Path) -> dict[tuple[int, int], Entry]:
    """Return the samples in a file by prompt and number; an incomplete last line is ignored."""
    found = dict[tuple[int, int], Entry]()
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            entry = json.loads(line)
        except ValueError:  # the evaluation was killed while it wrote
            continue
        if not isinstance(entry, dict) or not {"prompt", "sample", "error"} <= entry.keys():
            raise UserError(
                f"{path}: has lines that mcore-rl eval has not written; choose another directory (--output)"
            )
        found[entry["prompt"], entry["sample"]] = entry
    return found


def _changes(earlier: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings that differ."""
    told = json.loads(json.dumps(settings))
    return [name for name in sorted({*earlier, *told}) if earlier.get(name) != told.get(name)]
