"""The start of a run on rollouts: its inputs, policy, generation and environment."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.config import RLConfig
from mcore_rl.data.datasets import PromptDataset
from mcore_rl.environments.interfaces import CollectiveEnvironment, Environment
from mcore_rl.environments.judge_processes import JudgedEnvironment, probe
from mcore_rl.environments.reward_model import RewardModelEnvironment
from mcore_rl.models.generation.backends import generation_of
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.rollouts.recordings import REPLAYED_OPTIONS, check_record, read_recording, recorded_by
from mcore_rl.rollouts.samples import Rollout
from mcore_rl.rollouts.worker import Conversation, RolloutWorker
from mcore_rl.run.directory import JUDGE_LOG
from mcore_rl.run.preflight import find_checkpoints, is_restart
from mcore_rl.run.setup import Inputs, claim_output, load_inputs
from mcore_rl.run.step_log import StepLog
from mcore_rl.utils import torchrun
from mcore_rl.utils.checkpoint_store import digest_of_file
from mcore_rl.utils.console import speaker

if TYPE_CHECKING:
    from mcore_rl.algorithms.grpo import GRPORun

PROBED_RECORDS = 4
"""A judge may refuse an odd record; one that fails on all of these is wrong."""


def train_on_rollouts(
    config: RLConfig, record: Path | None, replay: Path | None, run_type: type[GRPORun]
) -> Path | None:
    """A run of that type, with all that it needs; returns the directory of the exported model, if there is one.

    Raises:
        UserError: the configuration, the data or one of the files is not usable.
    """
    inputs, recorded = _checked_inputs(config, record, replay)
    steps = config.total_steps(len(inputs.train))
    updates = (steps - config.first_update_step + 1) * config.updates_per_step
    policy = MegatronPolicy(config, updates, keep_reference=config.keeps_reference)
    with contextlib.ExitStack() as started:
        environment = environment_of(config, policy)
        if environment is not None:
            started.callback(environment.close)
        worker = rollout_worker(config, inputs, policy, environment)
        started.callback(worker.generation.close)
        started.callback(worker.close)
        run = run_type(config, inputs, policy, worker, StepLog(record) if record else None, recorded)
        exported = run.run()
    policy.shutdown()
    return exported


def _checked_inputs(
    config: RLConfig, record: Path | None, replay: Path | None
) -> tuple[Inputs[PromptDataset], dict[int, list[Rollout]] | None]:
    """The run's inputs, and a recording's rollouts; the output directory is claimed last."""
    inputs: Inputs[PromptDataset] = load_inputs(config)
    prompts = inputs.train.prompts
    recorded = None
    if replay:
        steps = config.total_steps(len(prompts))
        required = {**config.rollouts.model_dump(include=REPLAYED_OPTIONS), "data": inputs.train.fingerprint}
        recorded = read_recording(replay, steps, required, config.model.moe_router_replay, config.algorithm)
    elif torchrun.rank() == 0 and config.environment.name != "reward_model":
        first = [Conversation(Rollout.begin(0, 0, prompt), prompt).sample for prompt in prompts[:PROBED_RECORDS]]
        probe(config.environment, first, config.parallel.timeout_seconds / 2)
    if record:
        goes_on = bool(find_checkpoints(config)[0]) or is_restart(config.output_dir)
        check_record(record, recorded_by(config, inputs.train.fingerprint), goes_on)
    contents = "" if replay is None else digest_of_file(replay)
    return claim_output(config, inputs, {"--record": str(record is not None), "--replay": contents}), recorded


def environment_of(config: RLConfig, policy: MegatronPolicy) -> Environment | CollectiveEnvironment | None:
    """Return the environment, on the ranks that have a part in it."""
    if config.environment.name == "reward_model":
        judge = RewardModelEnvironment(config)
        speaker(policy.is_writer)(f"reward model: {judge.model.describe()}")
        return judge
    if policy.topology.leads_replica:
        return JudgedEnvironment(config.environment, config.output_dir / JUDGE_LOG)
    return None


def rollout_worker(
    config: RLConfig,
    inputs: Inputs[PromptDataset],
    policy: MegatronPolicy,
    environment: Environment | CollectiveEnvironment | None,
) -> RolloutWorker:
    """Generation with the policy's weights, as the configuration says."""
    tokenizer, topology = inputs.tokenizer, policy.topology
    generation = generation_of(config, policy, tokenizer, speaker(policy.is_writer))
    return RolloutWorker(
        generation, environment, tokenizer, config.environment.max_turns, config.parallel.meeting_seconds, topology
    )
