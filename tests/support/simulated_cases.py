"""Configurations for tests of the simulation, and the corresponding real step."""

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import cache
from importlib import import_module

import psutil

from mcore_rl import platform
from mcore_rl.config import RLConfig, SFTConfig
from mcore_rl.config.algorithms import critic_config
from mcore_rl.simulation.counters import bytes_of
from mcore_rl.simulation.rank import prepare_process
from mcore_rl.simulation.sequences import Sequences, invented_batch
from mcore_rl.simulation.step import RankReport, measure_step

LENGTHS = (270, 99, 384, 2, 231, 192, 303, 45)
SEQUENCES = Sequences(LENGTHS, tuple(max(1, n // 2) for n in LENGTHS))
SECONDS = 300


def config_of(directory, algorithm=SFTConfig, **sections):
    batch = {} if issubclass(algorithm, RLConfig) else {"batch": {"global_batch_size": 8, "tokens_per_pack": 768}}
    values = {
        "output_dir": "unused",
        "model": {"path": str(directory)},
        "data": {"train": "unused.jsonl", "max_sequence_length": 384},
        "optimizer": {"lr": 1e-3},
        "trainer": {"max_steps": 2},
        **batch,
        **sections,
    }
    values["model"].setdefault("dtype", "float32")  # of the real steps on the CPU, with which a test compares
    values["parallel"] = {"overlap_grad_reduce": False, "overlap_param_gather": False, **values.get("parallel", {})}
    return algorithm.model_validate(values)


@cache
def prepare_real_process():
    """Import Megatron in this process for real steps on the CPU, and count their transfers."""
    from mcore_rl.simulation.counters import count_traffic

    traffic = count_traffic(perform=True)
    platform.initialize_platform()
    import_module("mcore_rl.models.policy.megatron_policy")
    return traffic


_servers = {}


def in_processes(function, *argument_lists, prepare=prepare_process):
    """Run all calls at the same time, each in a process forked from one in which `prepare` has imported Megatron."""
    if prepare not in _servers:
        _servers[prepare] = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), prepare)
    waiting = _servers[prepare].submit(_in_forks, function, argument_lists)
    try:
        return waiting.result(timeout=SECONDS)
    except (TimeoutError, BrokenProcessPool):
        for server in _servers.pop(prepare)._processes.values():
            with suppress(psutil.NoSuchProcess):
                for process in (*psutil.Process(server.pid).children(recursive=True), server):
                    process.kill()
        raise


def _in_forks(function, argument_lists):
    global _barrier
    context, count = multiprocessing.get_context("fork"), len(argument_lists)
    _barrier = context.Barrier(count)
    with ProcessPoolExecutor(count, context) as pool:
        return list(pool.map(_alone, [function] * count, argument_lists))


def _alone(function, arguments):
    _barrier.wait()  # until every process has its call, so that none gets two
    return function(*arguments)


def real_rank(config, rank, world_size, port, sequences) -> RankReport:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from mcore_rl.simulation.counters import AttentionFlops, HostReads

    return measure_step(config, sequences, prepare_real_process(), HostReads(), AttentionFlops(), ("cpu",))


def memory_of_offloaded_critic(config, sequences):
    """Return the memory that a real critic releases on the device, and the part of it that is zero afterwards."""
    from mcore_rl.algorithms.loss_functions import ValueLossFn
    from mcore_rl.models.megatron.training.optimizer import gradient_buffers
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    critic = MegatronPolicy(critic_config(config), 2)
    critic.train(critic.own_rows(invented_batch(config, sequences)), ValueLossFn(None))
    zeros = bytes_of(gradient_buffers(critic.chunks))
    return critic.offload_after_refit(), zeros


MIXTURE = {
    "hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32,
    "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
}  # fmt: skip
EQUAL = Sequences((192,) * 8, (96,) * 8)
"""Sequences with which every rank's packs have the same size, under all layouts."""


def call(*arguments):
    command = [sys.executable, "-m", "mcore_rl", "simulate", "--algorithm", "dpo"]
    command += map(str, arguments)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
