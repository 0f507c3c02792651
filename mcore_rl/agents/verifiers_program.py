"""Environments of the package `verifiers` (0.4) as programs, and their tasks as records.

    python -m mcore_rl.agents.verifiers_program TASKSET > tasks.jsonl

An episode of the environment is a session: verifiers runs its harness, whose requests go to the endpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import sys
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcore_rl.agents.agent_session import AgentSession

PREFIX = "verifiers:"
"""Begins the names of these programs; the id of a taskset follows."""
TASK = "task"
"""Field of a record that has the task's data."""


def load_environment(taskset: str, options: Mapping[str, Any]) -> Any:
    """Return the environment of a taskset.

    Args:
        options: keys of verifiers' configuration `env`.

    Raises:
        ValueError: verifiers is missing, the taskset or an option is unknown, or the environment has several agents.
    """
    try:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils import loaders
    except ImportError as error:
        raise ValueError(f"needs the package verifiers ({error}): pip install 'verifiers>=0.4,<0.5' uv") from None
    of_taskset = {**options.get("taskset", {}), "id": taskset}
    try:
        environment = loaders.load_environment(loaders.resolve_env_config({**options, "taskset": of_taskset}))
    except Exception as error:
        raise ValueError(f"cannot be loaded: {type(error).__name__}: {error}") from error
    agents = list(agent_config_fields(environment.config))
    if len(agents) > 1:
        raise ValueError(f"has several agents ({', '.join(agents)}); a session trains the policy of one agent")
    return environment


class VerifiersProgram:
    """Runs an episode of an environment for each session. The record's field `task` has the data of the task.

    Raises:
        ValueError: see `load_environment`.
    """

    def __init__(self, taskset: str, options: Mapping[str, Any]) -> None:
        self.environment = load_environment(taskset, options)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Hold what all episodes share: the proxy of requests, and tool servers."""
        async with self.environment.serving():
            yield

    async def __call__(self, session: AgentSession) -> dict[str, Any] | None:
        """Run the episode of a session; return its reward and its named rewards, or None if the taskset has no rewards.

        Raises:
            ValueError: the record has no task.
            RuntimeError: the episode failed.
        """
        from verifiers.v1 import EvalClientConfig, ModelContext

        task_type = type(self.environment.taskset).task_type()
        if not isinstance(session.record.get(TASK), dict):
            raise ValueError(f"the record has no field {TASK!r} with a task of the taskset")
        data = task_type.data_type().model_validate(session.record[TASK])
        task = task_type(data, self.environment.config.taskset.task)
        # A client reads its key from the environment. verifiers hides variables with API_KEY from what it starts.
        variable = f"MCORE_RL_API_KEY_{session.id}"
        os.environ[variable] = session.api_key
        try:
            client = EvalClientConfig(base_url=session.base_url, api_key_var=variable)
            episode = await self.environment.run_episode(task, ModelContext(model="policy", client=client))
        finally:
            del os.environ[variable]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors or not episode.ok:
            raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode has failed")
        if len(episode.traces) != 1:
            raise RuntimeError(f"the episode has {len(episode.traces)} runs of its agent; it must have one")
        (trace,) = episode.traces
        if not trace.rewards:
            return None
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        measured = {name: value for name, value in trace.metrics.items() if value is not None and math.isfinite(value)}
        return {"reward": float(trace.reward), "rewards": {**measured, **scores}}


def record_of(task: Any) -> dict[str, Any]:
    """Return the record of a task: its prompt, for the run's own use, and its data."""
    system, prompt = task.data.system_prompt, task.data.prompt
    messages = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        messages.append({"role": "user", "content": prompt})
    elif prompt:
        messages += [message.model_dump(mode="json", exclude_none=True) for message in prompt]
    if not messages:  # the environment's user begins the conversation
        messages.append({"role": "user", "content": task.data.description or task.data.name or str(task.data.idx)})
    return {"prompt": messages, TASK: task.data.model_dump(mode="json")}


def main() -> int:
    parser = argparse.ArgumentParser(description="Print the tasks of a taskset of verifiers as records.")
    parser.add_argument("taskset", help="id of the taskset, a package that is installed")
    parser.add_argument("--limit", type=int, help="maximum number of tasks; required for an infinite taskset")
    parser.add_argument(
        "--options", type=json.loads, default={}, help="keys of verifiers' configuration `env`, as JSON"
    )
    arguments = parser.parse_args()
    if arguments.limit is not None and arguments.limit < 1:
        parser.error(f"--limit must be at least 1, got {arguments.limit}")
    if not isinstance(arguments.options, dict):
        parser.error("--options must be a JSON object")
    output = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # the taskset may print
        try:
            taskset = load_environment(arguments.taskset, arguments.options).taskset
        except ValueError as error:
            sys.exit(f"error: {arguments.taskset} {error}")
        if not taskset.bounded and arguments.limit is None:
            sys.exit(f"error: {arguments.taskset} is infinite; set --limit")
        for task in itertools.islice(taskset, arguments.limit):
            print(json.dumps(record_of(task), ensure_ascii=False), file=output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
