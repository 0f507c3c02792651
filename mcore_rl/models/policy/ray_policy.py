"""A policy whose ranks are Ray actors. One driver process controls the actors.

This module needs the `ray` extra. Each actor contains a `MegatronPolicy`, as each process of torchrun does. The driver
puts a global batch into Ray's object store once. Every rank reads the batch and selects its own rows in the same way as
under torchrun, so the results are equal.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcore_rl.config import TrainingConfig
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.errors import TimeLimitError, UserError, WorkerError
from mcore_rl.losses.common import LossFunction
from mcore_rl.models.generation.interfaces import GenerationDatumSpec, GenerationInterface, GenerationOutputSpec
from mcore_rl.models.policy.interfaces import ColocatablePolicyInterface, LogprobOutputSpec, ReferenceLogprobOutputSpec
from mcore_rl.platform import initialize_platform
from mcore_rl.utils.console import quiet_libraries

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError:
    raise UserError("the Ray controller needs the ray extra (pip install 'mcore_rl[ray]')") from None


class Policy(ColocatablePolicyInterface, GenerationInterface):
    """Starts `world_size` actors, one per rank, and makes every call on all of them.

    Args:
        config: the run's configuration. `world_size` must be a multiple of the size of the run's parallel layout.
        world_size: number of actors. Each has a CPU and, on a GPU cluster, a GPU.
        num_gpus_per_worker: number of GPUs per actor; 0 on a CPU cluster.
        start_timeout: time limit in seconds for the placement of the actors, and for building the model.
        worker_options: arguments of `MegatronPolicy`: `total_steps`, `rows_per_unit`, `keep_reference`.

    Raises:
        UserError: `world_size` is no multiple of the size of the parallel layout.
        WorkerError: a rank could not be started.
    """

    def __init__(
        self,
        config: TrainingConfig,
        world_size: int,
        num_gpus_per_worker: float = 0,
        start_timeout: float = 300,
        **worker_options: Any,
    ) -> None:
        config.parallel.data_parallel_size(world_size)
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False)
        self.start_timeout = start_timeout
        bundle = {"CPU": 1.0, **({"GPU": float(num_gpus_per_worker)} if num_gpus_per_worker else {})}
        # Pack neighbouring ranks on one node: tensor-parallel groups consist of neighbouring ranks.
        self.placement = placement_group([bundle] * world_size, strategy="PACK")
        if not self.placement.wait(start_timeout):
            remove_placement_group(self.placement)
            raise WorkerError(f"the Ray cluster has too few free resources for {world_size} workers of {bundle} each")
        actor = ray.remote(_Worker)
        self.workers = [
            actor.options(
                num_cpus=1,
                num_gpus=num_gpus_per_worker,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self.placement, rank),
            ).remote(rank, world_size)
            for rank in range(world_size)
        ]
        address = self._gather([self.workers[0].address.remote()], start_timeout)[0]
        self._call("start", config, *address, timeout=start_timeout, **worker_options)

    # ------------------------------------------------------------ calls

    def _refs(self, method: str, *args: Any, from_all: bool = False, **kwargs: Any) -> list[Any]:
        """Start the call of `method` on every rank; return a Ray object reference for each rank's result.

        A batch is put into the object store only once.

        Args:
            from_all: whether every rank returns its result. Otherwise only the first rank returns its result, and all
                other ranks return None.
        """
        stored = [ray.put(arg) if isinstance(arg, BatchedDataDict) else arg for arg in args]
        return [
            worker.call.remote(method, from_all or rank == 0, *stored, **kwargs)
            for rank, worker in enumerate(self.workers)
        ]

    def _call(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Call `method` on all ranks and return the first rank's result.

        Most methods have the same result on all ranks, so only one result is transferred.
        """
        return self._gather(self._refs(method, *args, **kwargs), timeout)[0]

    def _call_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `method` on all ranks and return all ranks' results."""
        return self._gather(self._refs(method, *args, from_all=True, **kwargs))

    def _gather(self, refs: Sequence[Any], timeout: float | None = None) -> list[Any]:
        """Wait for calls that were started on every rank; return their results.

        If a rank fails, all ranks are ended, because the other ranks would wait for it forever.

        Raises:
            WorkerError: a rank failed, died, or took longer than `timeout` seconds.
        """
        rank_of, waiting = {ref: rank for rank, ref in enumerate(refs)}, list(refs)
        results: list[Any] = [None] * len(refs)
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=timeout)
            if not ready:
                self._end()
                raise TimeLimitError(f"ranks {sorted(rank_of[ref] for ref in waiting)} took longer than {timeout} s")
            try:
                results[rank_of[ready[0]]], failure = ray.get(ready[0])
            except ray.exceptions.RayError as error:
                failure = f"the actor died: {str(error).splitlines()[0]}"
            if failure is not None:
                self._end()
                raise WorkerError(f"rank {rank_of[ready[0]]}: {failure}")
        return results

    def _end(self) -> None:
        for worker in self.workers:
            ray.kill(worker)
        remove_placement_group(self.placement)
        self.workers = []

    # ------------------------------------------------------------ the interface

    def get_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None, temperature: float = 1.0
    ) -> BatchedDataDict[LogprobOutputSpec]:
        return self._call("get_logprobs", data, micro_batch_size, temperature)

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None, temperature: float = 1.0
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        return self._call("get_reference_policy_logprobs", data, micro_batch_size, temperature)

    def get_topk_logits(self, data: BatchedDataDict[Any], k: int) -> BatchedDataDict[Any]:
        """Call `MegatronPolicy.get_topk_logits` on all ranks."""
        return self._call("get_topk_logits", data, k)

    def get_rewards(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        """Call `MegatronPolicy.get_rewards` on all ranks."""
        return self._call("get_rewards", data)

    def evaluate(self, data: BatchedDataDict[Any], loss_fn: LossFunction, temperature: float = 1.0) -> dict[str, float]:
        """Return the loss's metrics over a global batch, computed without gradients."""
        metrics: dict[str, float] = self._call("evaluate", data, loss_fn, temperature)
        return metrics

    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        temperature: float = 1.0,
    ) -> dict[str, Any]:
        """Call `MegatronPolicy.train` on all ranks."""
        metrics: dict[str, Any] = self._call("train", data, loss_fn, eval_mode, gbs, mbs, temperature)
        return metrics

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Call `MegatronPolicy.generate` on all ranks."""
        return self._call("generate", data, greedy)

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Call `MegatronPolicy.prepare_for_generation` on all ranks."""
        return all(self._call_all("prepare_for_generation", *args, **kwargs))

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        return all(self._call_all("finish_generation", *args, **kwargs))

    def prepare_for_lp_inference(self, *args: Any, **kwargs: Any) -> None:
        self._call("prepare_for_lp_inference", *args, **kwargs)

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        self._call("prepare_for_training", *args, **kwargs)

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        self._call("finish_training", *args, **kwargs)

    def save_checkpoint(self, directory: Path, step: int, state: dict[str, Any]) -> Path:
        path: Path = self._call("save_checkpoint", directory, step, state)
        return path

    def load_checkpoint(self, iteration: Path, allow_partial: bool = False) -> Any:
        """Call `MegatronPolicy.load_checkpoint` on all ranks."""
        return self._call("load_checkpoint", iteration, allow_partial)

    def export_hf(self, destination: Path) -> None:
        """Write the current weights as a Hugging Face model directory."""
        self._call("export_hf", destination)

    def offload_before_refit(self) -> int:
        return sum(self._call_all("offload_before_refit"))

    def offload_after_refit(self) -> int:
        return sum(self._call_all("offload_after_refit"))

    def prepare_refit_info(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        info: dict[str, Any] = self._call("prepare_refit_info", *args, **kwargs)
        return info

    def adapter_settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = self._call("adapter_settings")
        return settings

    def prepare_weights_for_ipc(self, *args: Any, **kwargs: Any) -> list[list[str]]:
        groups: list[list[str]] = self._call("prepare_weights_for_ipc", *args, **kwargs)
        return groups

    def get_weights_ipc_handles(self, keys: list[str]) -> dict[str, Any]:
        handles: dict[str, Any] = self._call("get_weights_ipc_handles", keys)
        return handles

    def init_collective(self, ip: str, port: int, world_size: int) -> list[Any]:
        """Start to create a process group with the inference engine's processes; return `ray.ObjectRef`s.

        The arguments are those of `MegatronPolicy.init_collective`. Let the engine's processes join the group, then
        pass the references to `wait`.
        """
        return self._refs("init_collective", ip, port, world_size)

    def broadcast_weights_for_collective(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Start the broadcast of the weights on all ranks; return `ray.ObjectRef`s.

        The arguments are those of `MegatronPolicy.broadcast_weights_for_collective`. Let the engine's processes receive
        the weights, then pass the references to `wait`.
        """
        return self._refs("broadcast_weights_for_collective", *args, **kwargs)

    def wait(self, refs: Sequence[Any], timeout: float | None = None) -> list[Any]:
        """Wait until a call that was started on all ranks has ended; `refs` is what the call has returned.

        Returns:
            A list with an entry for each rank: the first rank's result, and None for the others.

        Raises:
            WorkerError: a rank failed, died, or took longer than `timeout` seconds.
        """
        return self._gather(refs, timeout)

    def shutdown(self) -> bool:
        """Close the ranks' process groups, then end their actors."""
        if self.workers:
            self._call("shutdown")
            self._end()
        return True


class _Worker:
    """The actor of one rank.

    A call returns a pair (result, failure). `failure` is the traceback as text, or None if the call has succeeded.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        # Ray shows each actor only its own GPU, which therefore has index 0.
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0")

    def address(self) -> tuple[tuple[str, int], None]:
        """Return the address at which the ranks can meet: this node's IP address and a free port."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return (ray.util.get_node_ip_address(), listener.getsockname()[1]), None

    def call(self, method: str, result_wanted: bool, *args: Any, **kwargs: Any) -> tuple[Any, str | None]:
        try:
            result = getattr(self if method == "start" else self.policy, method)(*args, **kwargs)
            return result if result_wanted else None, None
        except Exception:
            return None, traceback.format_exc()

    def start(self, config: TrainingConfig, host: str, port: int, **options: Any) -> None:
        quiet_libraries()
        initialize_platform()
        from mcore_rl.models.policy.megatron_policy import MegatronPolicy

        os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
        self.policy = MegatronPolicy(config, **options)
