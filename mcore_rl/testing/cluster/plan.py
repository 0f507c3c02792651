"""The plan of a check: its parts, layouts, configurations, files and output directory. It needs no torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mcore_rl.config import DPOConfig, GRPOConfig
from mcore_rl.config.parallel import ParallelLayout
from mcore_rl.errors import UserError
from mcore_rl.utils.lock_file import LockFile, LockHeld

PARTS = {
    "collectives": "every collective between all ranks: right values, and bandwidth",
    "layouts": "training steps under several layouts, compared with one process, in float32 and bfloat16",
    "refit": "transfer of the weights to a process of an inference engine",
    "resume": "DPO that is saved, and resumed under another layout",
    "speed": "tokens per second and memory of DPO steps, beside the simulation",
    "grpo": "ten GRPO steps with generation in the training processes",
}
SHARES = {"collectives": 2, "layouts": 8, "refit": 2, "resume": 4, "speed": 4, "grpo": 3}
"""Share of the time that is left which each part may take, relative to the other parts that are still to run."""

RESUME_STEPS, SAVED_STEP = 4, 2
GRPO_STEPS = 10
SEQUENCE_LENGTH = 160
"""Largest number of tokens of a sequence, in every part but `speed`."""
LARGEST_SIZE = 8
"""Largest size of a model-parallel dimension in the layouts of a check."""
DENSE, MIXTURE = "dense", "mixture"


@dataclass(frozen=True)
class Case:
    """A layout to compare with one process.

    model: `DENSE` or `MIXTURE`.
    """

    model: str
    layout: ParallelLayout

    def __str__(self) -> str:
        dp = "" if self.layout.dp > 1 or self.layout.world_size == 1 else " dp1"
        return f"{self.layout}{dp if self.layout.ep > 1 else ''}{' (mixture)' if self.model == MIXTURE else ''}"


@dataclass(frozen=True)
class Plan:
    """Settings of a check that all its processes read. The first node writes them to the output directory.

    directory: the output directory.
    per_node: number of processes on each node.
    gpu_gib: memory of the smallest GPU in GiB; 0 without GPUs.
    gpu: name of the GPUs; "" without GPUs.
    collective_seconds: time limit of a collective.
    model: section `model` of the given configuration; None without a configuration.
    has_experts: whether the given model is a mixture of experts. Without a configuration, both kinds are checked.
    speed: the configuration of the part `speed`, if the given one fits the number of processes; otherwise None.
    note: why the layout of the given configuration is not used in the part `speed`; "" if it is used.
    backend: `parallel.backend` of the given configuration.
    """

    directory: Path
    nodes: int
    per_node: int
    gpu_gib: float
    gpu: str
    collective_seconds: int
    model: dict[str, Any] | None = None
    has_experts: bool = False
    speed: dict[str, Any] | None = None
    note: str = ""
    backend: str = "auto"

    @property
    def world_size(self) -> int:
        return self.nodes * self.per_node

    @property
    def collective_backend(self) -> str:
        """Name of the backend of torch.distributed that the check uses."""
        return self.backend if self.backend != "auto" else "nccl" if self.gpu else "gloo"

    def multiple(self, least: int) -> int:
        """Return the smallest multiple of the number of processes that is at least `least`."""
        return -(-least // self.world_size) * self.world_size

    @property
    def models(self) -> Path:
        """Directory of the models that the check makes."""
        return self.directory / "models"

    @property
    def adapter(self) -> Path:
        """Directory of the adapter that the check makes if the given configuration has adapters."""
        return self.models / "adapter"

    @property
    def first_layout(self) -> ParallelLayout:
        """Layout of the parts that run a single layout: two tensor-parallel ranks if possible, otherwise replicas."""
        tp = 2 if self.world_size % 2 == 0 else 1
        return ParallelLayout(tp=tp, dp=self.world_size // tp, sp=tp > 1)

    @property
    def second_layout(self) -> ParallelLayout:
        """Layout under which the part `resume` resumes. It equals the first one only with a single process."""
        size = self.world_size
        pp = 2 if size % 2 == 0 else 1
        cp = 2 if size % 4 == 0 else 1 if pp > 1 else _smallest_factor(size)
        return ParallelLayout(pp=pp, cp=cp, dp=size // (pp * cp))

    @property
    def cases(self) -> list[Case]:
        """The layouts to compare with one process, in a fixed order; [] for one process."""
        kinds = [DENSE, MIXTURE] if self.model is None else [MIXTURE if self.has_experts else DENSE]
        return [
            Case(kind, layout)
            for kind in kinds
            for layout in layouts_for(self.world_size, self.per_node, experts_only=kind == MIXTURE and len(kinds) > 1)
            if kind == MIXTURE or layout.ep == 1
        ]

    def write(self) -> None:
        text = json.dumps({**asdict(self), "directory": str(self.directory)}, indent=1)
        (self.directory / "plan.json").write_text(text + "\n")

    @classmethod
    def read(cls, directory: Path) -> Plan:
        """Return the plan in an output directory, with this node's path of the directory."""
        return cls(**{**json.loads((directory / "plan.json").read_text()), "directory": directory})

    def result_file(self, part: str) -> Path:
        """Return the file to which the ranks of a part write their result."""
        return self.directory / "results" / f"{part}.json"

    def read_result(self, part: str) -> dict[str, Any]:
        """Return the result that the ranks of a part have written so far; {} if there is none."""
        try:
            found: dict[str, Any] = json.loads(self.result_file(part).read_text())
        except (OSError, ValueError):
            return {}
        return found

    def write_result(self, part: str, result: dict[str, Any]) -> None:
        """Write the result of a part so far. A reader never sees half of it."""
        path = self.result_file(part)
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(result, indent=1) + "\n")
        partial.replace(path)


def layouts_for(processes: int, per_node: int, experts_only: bool = False) -> list[ParallelLayout]:
    """Return at most eight layouts for this number of processes. All sizes except data parallelism are powers of 2.

    Each dimension is tried alone, at its largest size, and together with other dimensions.

    Args:
        per_node: number of processes of a node, which tensor parallelism does not exceed.
        experts_only: return only layouts with expert parallelism.
    """
    most = min(_largest_power(processes), LARGEST_SIZE)
    tp = min(most, _largest_power(per_node))
    wanted: list[dict[str, Any]] = [
        {},
        {"tp": tp, "sp": True},
        {"pp": most},
        {"cp": most},
        {"tp": 2, "pp": 2, "sp": True},
        {"tp": 2, "pp": 2, "cp": 2, "sp": True} if processes % 8 == 0 else {"tp": 2, "cp": 2, "sp": True},
        {"ep": most},
        {"tp": 2, "ep": 2, "sp": True},
    ]
    found = []
    for sizes in wanted:
        layout = ParallelLayout(**sizes)
        if processes % layout.world_size:
            continue
        layout = replace(layout, dp=processes // layout.world_size)
        of_experts = layout.pp * layout.ep * layout.tp
        if (layout.ep > 1 or not experts_only) and layout.is_possible and processes % of_experts == 0:
            found.append(layout)
    return [layout for layout in dict.fromkeys(found) if layout.world_size > 1]


def _largest_power(number: int) -> int:
    """Return the largest power of 2 that divides `number`."""
    return number & -number


def _smallest_factor(number: int) -> int:
    """Return the smallest prime factor of `number`; 1 for 1."""
    return next((factor for factor in range(2, number + 1) if number % factor == 0), 1)


def batch_values(plan: Plan, layout: ParallelLayout, dtype: str) -> dict[str, Any]:
    """Return the sections that all small runs of a check share."""
    model = {**(plan.model or {}), "path": str(plan.models / small_model(plan)), "dtype": dtype}
    if model.get("lora") is not None:
        model["lora"] = {"path": str(plan.adapter)}
    parallel = {"backend": plan.backend, "timeout_seconds": plan.collective_seconds}
    return {
        "seed": 0,
        "parallel": {**layout.parallel_values, **parallel},
        "optimizer": {"lr": 1e-3, "warmup_steps": 0, "schedule": "constant"},
        "model": model,
        "checkpoint": {"export_hf": False},
    }


def small_model(plan: Plan) -> str:
    """Return the kind of the model that the small runs train: the given model's kind, or a dense one."""
    return MIXTURE if plan.has_experts else DENSE


def dpo_config(plan: Plan, layout: ParallelLayout, dtype: str, **sections: Any) -> DPOConfig:
    """Return the configuration of a small DPO run; `sections` replace its sections."""
    values = batch_values(plan, layout, dtype)
    values |= {
        "output_dir": str(plan.directory / "resume"),
        "data": {"train": str(plan.directory / "data" / "pairs.jsonl"), "max_sequence_length": SEQUENCE_LENGTH},
        "batch": {"global_batch_size": plan.multiple(8)},
        "trainer": {"max_steps": RESUME_STEPS},
        **sections,
    }
    return DPOConfig.model_validate(values)


def resume_configs(plan: Plan) -> tuple[DPOConfig, DPOConfig]:
    """Return the configurations of an uninterrupted run, and of a run that resumes its checkpoint under another
    layout."""
    checkpoint = {"export_hf": False, "save_interval": SAVED_STEP}
    first = plan.directory / "resume" / "uninterrupted"
    saved = first / "checkpoints" / f"iter_{SAVED_STEP:07d}"
    resumed = {"output_dir": str(plan.directory / "resume" / "resumed")}
    return (
        dpo_config(plan, plan.first_layout, "float32", output_dir=str(first), checkpoint=checkpoint),
        dpo_config(
            plan, plan.second_layout, "float32", **resumed, checkpoint={"export_hf": False, "resume": str(saved)}
        ),
    )


def grpo_config(plan: Plan) -> GRPOConfig:
    """Return the configuration of the GRPO run; its precision is the default of the device."""
    layout = plan.first_layout
    values = batch_values(plan, layout, "auto")
    values |= {
        "output_dir": str(plan.directory / "grpo"),
        "data": {"train": str(plan.directory / "data" / "prompts.jsonl"), "max_sequence_length": SEQUENCE_LENGTH},
        "trainer": {"max_steps": GRPO_STEPS},
        "grpo": {"num_prompts_per_step": plan.multiple(4), "num_generations_per_prompt": 4, "max_new_tokens": 24},
        "environment": {"name": "function", "function": f"{__name__}:judge_letters"},
    }
    return GRPOConfig.model_validate(values)


def judge_letters(message_log: Sequence[Mapping[str, Any]], record: Mapping[str, Any]) -> float:
    """Return the fraction of letters in the response: responses of an untrained model differ in it."""
    text = str(message_log[-1]["content"])
    return sum(character.isalpha() for character in text) / max(len(text), 1)


MARK = "verify.json"
"""File by which a directory is recognized as the output directory of a check."""
LOCK = "verify.lock"
WRITTEN = (
    MARK, LOCK, "verify.html", "plan.json", "nodes",
    "models", "data", "configs", "results", "logs", "resume", "grpo", "speed",
    "verify.json.partial", "verify.html.partial",
)  # fmt: skip
"""Everything that a check writes to its output directory. A check that is killed may leave partial files."""


class CheckDirectory:
    """The output directory of a check. Nothing is written before `claim` is called."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = LockFile(path / LOCK)

    def claim(self) -> None:
        """Create the directory, or remove the results of an earlier check from it; lock and mark it.

        The lock ends with this process, or with `close`.

        Raises:
            UserError: the directory contains other files, another check writes there, or it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._refuse_other_files()
            self._lock.take()
            # The mark comes first, so that the next check finds it if this one is killed.
            (self.path / MARK).write_text("{}\n")
            for name in WRITTEN:
                if name not in (MARK, LOCK):
                    path = self.path / name
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        except LockHeld as holder:
            raise UserError(
                f"--output {self.path}: is being written by another check ({holder}); name another directory"
            ) from None
        except OSError as error:
            raise UserError(f"--output {self.path}: cannot be written ({error.strerror})") from None

    def _refuse_other_files(self) -> None:
        names = {path.name for path in self.path.iterdir()}
        others = names - {*WRITTEN}
        if others or (names - {LOCK} and MARK not in names):
            raise UserError(
                f"--output {self.path}: contains files that no check has written "
                f"({', '.join(sorted(others or names)[:3])}); name another directory"
            )

    def close(self) -> None:
        """Release the lock, if this process holds it."""
        self._lock.release()
