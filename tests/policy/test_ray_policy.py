"""Tests of the Ray controller: torchrun's numbers, and failures that reach the driver within seconds."""

import os
import signal
import sys
import time

import pytest
import torch
from layout_cases import make_config, make_data

from mcore_rl.algorithms.build_loss import build_loss
from mcore_rl.algorithms.interfaces import LossFunction, LossType
from mcore_rl.errors import UserError, WorkerError
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes

pytestmark = pytest.mark.long
LAYOUT = ParallelLayout(tp=2)
SECONDS = 300  # On a machine that runs other tests, an actor needs a minute to import Megatron.


@pytest.fixture(scope="module")
def cluster():
    import ray

    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
    yield
    ray.shutdown()


@pytest.fixture
def policy(cluster, model_of):
    from mcore_rl.models.policy.ray_policy import Policy

    made = Policy(LAYOUT.apply(make_config(model_of("llama"))), 2, total_steps=10, rows_per_unit=2)
    yield made
    made.shutdown()


def direct(config):
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    trained = [policy.train(make_data(), build_loss(config)) for _ in range(2)]
    results = trained, policy.evaluate(make_data(), build_loss(config)), policy.get_logprobs(make_data())
    policy.shutdown()
    return results


def test_the_numbers_are_the_workers_own(policy, model_of, tmp_path):
    config = LAYOUT.apply(make_config(model_of("llama")))
    metrics, evaluated, logprobs = run_processes(direct, config, world_size=2)[0]
    assert [policy.train(make_data(), build_loss(config)) for _ in range(2)] == metrics
    assert policy.evaluate(make_data(), build_loss(config)) == evaluated
    assert (policy.get_logprobs(make_data())["logprobs"] == logprobs["logprobs"]).all()
    saved = policy.save_checkpoint(tmp_path, 2, {})
    assert saved.name == "iter_0000002"
    freed = policy.offload_before_refit()
    assert freed > 0
    policy.prepare_for_training()
    assert policy.load_checkpoint(saved).state["step"] == 2
    assert sum(map(len, policy.prepare_weights_for_ipc(20_000))) == len(policy.prepare_refit_info())


def test_one_ranks_result_comes_to_the_driver(policy, monkeypatch):
    """A result that all ranks have is sent once; the memory that each rank released is requested from each."""
    import ray

    fetched, get = [], ray.get
    monkeypatch.setattr(ray, "get", lambda ref, **options: fetched.append(get(ref, **options)) or fetched[-1])
    logprobs = policy.get_logprobs(make_data())["logprobs"]
    assert sorted(value is None for value, _ in fetched) == [False, True]
    assert any(value is not None and torch.equal(value["logprobs"], logprobs) for value, _ in fetched)
    fetched.clear()
    freed = policy.offload_before_refit()
    assert len(fetched) == 2 and all(0 < value < freed for value, _ in fetched)
    policy.prepare_for_training()


class FailingLoss(LossFunction):
    loss_type = LossType.TOKEN_LEVEL

    def __call__(self, *args, **kwargs):
        raise ZeroDivisionError("this loss always fails")


class Engine:
    """An inference worker: a transformers model in a separate actor."""

    def __init__(self, path, info):
        from refit_cases import engine_of

        from mcore_rl.models.refit.transfer import RefitReceiver

        self.model, load = engine_of(path)
        self.receiver = RefitReceiver(load, info)

    def join(self, ip, port):
        self.receiver.init_collective(ip, port, 1, 2, timeout=SECONDS)

    def refit(self):
        from refit_cases import engine_outputs

        self.receiver.update_weights_from_collective()
        return engine_outputs(self.model)


@pytest.mark.exhaustive
def test_an_engine_is_refitted(policy, model_of):
    import ray
    from ports import free_port
    from refit_cases import CLOSE, policy_outputs

    engine, port = ray.remote(Engine).remote(str(model_of("llama")), policy.prepare_refit_info()), free_port()
    joining = engine.join.remote("127.0.0.1", port)
    policy.wait(policy.init_collective("127.0.0.1", port, 2), timeout=SECONDS)
    ray.get(joining, timeout=SECONDS)
    policy.train(make_data(), build_loss(LAYOUT.apply(make_config(model_of("llama")))))
    refitting = engine.refit.remote()
    policy.wait(policy.broadcast_weights_for_collective(20_000), timeout=SECONDS)
    torch.testing.assert_close(ray.get(refitting, timeout=SECONDS), policy_outputs(policy), **CLOSE)
    ray.kill(engine)


def test_a_failure_arrives_with_rank_and_traceback(policy):
    with pytest.raises(WorkerError, match=r"(?s)rank [01]: Traceback .* this loss always fails"):
        policy.train(make_data(), FailingLoss())


class DyingLoss(FailingLoss):
    def __call__(self, *args, **kwargs):
        import torch

        if torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)


def test_a_dead_actor_fails_the_call_within_seconds(policy):
    started = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1: the actor died"):
        policy.train(make_data(), DyingLoss())
    assert time.monotonic() - started < 20


def test_a_layout_that_does_not_divide(cluster, model_of):
    from mcore_rl.models.policy.ray_policy import Policy

    with pytest.raises(UserError, match=r"must divide the number of processes \(3\)"):
        Policy(LAYOUT.apply(make_config(model_of("llama"))), 3)
