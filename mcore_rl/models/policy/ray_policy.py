"""A policy whose ranks are Ray actors. One driver process controls the actors.

This module needs the `ray` extra. Each actor contains a `MegatronPolicy`, as each process of torchrun does. The driver
puts a global batch into Ray's object store once. Every rank reads the batch and selects its own rows in the same way as
under torchrun, so the results are equal. With `generation.backend=vllm`, each actor also contains a `VLLMGeneration`.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from mcore_rl import platform
from mcore_rl.config import RLConfig, TrainingConfig
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.errors import TimeLimitError, UserError, WorkerError
from mcore_rl.losses.common import LossFunction
from mcore_rl.models.generation.interfaces import GenerationDatumSpec, GenerationInterface, GenerationOutputSpec
from mcore_rl.models.policy.interfaces import ColocatablePolicyInterface, LogprobOutputSpec, ReferenceLogprobOutputSpec
from mcore_rl.utils import torchrun
from mcore_rl.utils.console import quiet_libraries, rank_zero_printer

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError:
    raise UserError("the Ray controller needs the ray extra (pip install 'mcore_rl[ray]')") from None

from mcore_rl.models.policy.ray_servers import RayServers, needs_servers

OF_GENERATION = ("prepare_for_generation", "generate", "finish_generation")
"""Methods of a rank's engine, if it is not the policy itself."""


class Policy(ColocatablePolicyInterface, GenerationInterface):
    """Starts `world_size` actors, one per rank, and makes every call on all of them.

    With `generation.backend=vllm`, vLLM's servers generate. With `generation.offload`, the actors of each node start
    them on the actors' GPUs. Otherwise Ray places them on other GPUs of the cluster (`RayServers`), unless
    `generation.vllm.urls` names servers that run already.

    Args:
        config: the run's configuration. `world_size` must be a multiple of the size of the run's parallel layout.
        world_size: number of actors. Each has a CPU and, on a GPU cluster, a GPU.
        num_gpus_per_worker: number of GPUs per actor; 0 on a CPU cluster.
        start_timeout: time limit in seconds for the placement of the actors, and for building the model.
        worker_options: arguments of `MegatronPolicy`: `total_steps`, `rows_per_unit`, `keep_reference`.

    Raises:
        UserError: `world_size` is no multiple of the size of the parallel layout; or servers that Ray has to place do
            not fit on the cluster's GPUs, or do not start.
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
        self.workers: list[Any] = []
        self.servers: RayServers | None = None
        bundle = {"CPU": 1.0, **({"GPU": float(num_gpus_per_worker)} if num_gpus_per_worker else {})}
        # Pack neighbouring ranks on one node: tensor-parallel groups consist of neighbouring ranks.
        self.placement = placement_group([bundle] * world_size, strategy="PACK")
        if not self.placement.wait(start_timeout):
            remove_placement_group(self.placement)
            raise WorkerError(f"the Ray cluster has too few free resources for {world_size} workers of {bundle} each")
        try:
            self._start(config, world_size, num_gpus_per_worker, worker_options)
        except BaseException:
            self._end()
            raise

    def _start(
        self, config: TrainingConfig, world_size: int, num_gpus_per_worker: float, options: dict[str, Any]
    ) -> None:
        """Start servers and ranks. The servers start while the ranks build the model."""
        if isinstance(config, RLConfig) and needs_servers(config):
            self.servers = RayServers(config, self.placement, num_gpus_per_worker, self.start_timeout)
            vllm = config.generation.vllm.model_copy(update={"urls": self.servers.urls})
            config = config.model_copy(update={"generation": config.generation.model_copy(update={"vllm": vllm})})
        actor = ray.remote(_Worker)
        self.workers = [
            actor.options(
                num_cpus=1,
                num_gpus=num_gpus_per_worker,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self.placement, rank),
            ).remote(rank, world_size)
            for rank in range(world_size)
        ]
        addresses = self._gather([worker.address.remote() for worker in self.workers], self.start_timeout)
        (_, host, port), nodes = addresses[0], [node for node, _, _ in addresses]
        self._call("start", config, host, port, nodes, timeout=self.start_timeout, **options)
        if self.servers is not None:
            assert isinstance(config, RLConfig), "as servers were started"
            self.servers.wait(config.generation.vllm.start_seconds + self.start_timeout)

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
        if self.servers is not None:
            self.servers.close()
        remove_placement_group(self.placement)
        self.workers, self.servers = [], None

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
        """Call `generate` of the engine, `MegatronPolicy` or `VLLMGeneration`, on all ranks."""
        return self._call("generate", data, greedy)

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Call `prepare_for_generation` of the engine, `MegatronPolicy` or `VLLMGeneration`, on all ranks."""
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
        """Close the ranks' engines and process groups, then end the actors and the servers."""
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

    def address(self) -> tuple[tuple[str, str, int | None], None]:
        """Return this node's Ray id and IP address and, on the first rank, the port at which the ranks can meet.

        The first rank starts to listen at once. Otherwise another program could take the port before the ranks have
        imported Megatron.
        """
        host, port = ray.util.get_node_ip_address(), None
        if torchrun.rank() == 0:
            self.store = torch.distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            port = self.store.port
        return (ray.get_runtime_context().get_node_id(), host, port), None

    def call(self, method: str, result_wanted: bool, *args: Any, **kwargs: Any) -> tuple[Any, str | None]:
        try:
            result = getattr(self._owner(method), method)(*args, **kwargs)
            return result if result_wanted else None, None
        except Exception:
            return None, traceback.format_exc()

    def _owner(self, method: str) -> Any:
        """Return the object that has `method`."""
        if method in ("start", "shutdown"):
            return self
        return self.policy if self.generation is None or method not in OF_GENERATION else self.generation

    def start(self, config: TrainingConfig, host: str, port: int, nodes: Sequence[str], **options: Any) -> None:
        """Build the policy and, with `generation.backend=vllm`, the engine that uses the servers.

        Args:
            host, port: address at which the ranks meet.
            nodes: id of each rank's Ray node. Several Ray nodes may be on one machine.

        Raises:
            UserError: the servers that this node would start do not fit; it is raised before the model is built.
        """
        quiet_libraries()
        platform.initialize_platform()
        from mcore_rl.data.tokenize import load_tokenizer
        from mcore_rl.models.generation.vllm.generation import VLLMGeneration, vllm_generation_of
        from mcore_rl.models.generation.vllm.placement import places_of_launch
        from mcore_rl.models.policy.megatron_policy import MegatronPolicy

        group_rank = list(dict.fromkeys(nodes)).index(ray.get_runtime_context().get_node_id())
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port), GROUP_RANK=str(group_rank))
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(True)  # all ranks connect to the store of `address`
        config = platform.resolve(config)
        self.generation: VLLMGeneration | None = None
        if not isinstance(config, RLConfig):
            self.policy = MegatronPolicy(config, **options)
            return
        limit = timedelta(seconds=config.parallel.timeout_seconds)
        platform.initialize_process_group(limit, config.parallel.backend)
        places_of_launch(config)
        self.policy = MegatronPolicy(config, **options)
        tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
        if not config.rollouts.sample_unused_ids:
            self.policy.exclude_unused_ids(tokenizer)
        if config.generation.backend == "vllm":
            say = rank_zero_printer(self.policy.is_writer)
            self.generation = vllm_generation_of(config, self.policy, tokenizer, say)

    def shutdown(self) -> bool:
        """Close the engine, which ends the servers that this actor has started, and the policy."""
        if self.generation is not None:
            self.generation.close()
        return self.policy.shutdown()
