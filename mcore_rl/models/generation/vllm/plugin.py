"""The plugin that runs inside vLLM's processes.

It imports none of this package's dependencies except PyTorch: the others are not installed in vLLM's environment.

Each process of vLLM calls `register`, the entry point `vllm.general_plugins`. The plugin receives the trainer's weights
by shared memory or collectives. It uses vLLM's interface for weight transfer and vLLM's layerwise reload. The reload
restores the parameters' loaders, which vLLM removes after it has loaded a model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    get_layerwise_info,
    make_online_process_loader,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from mcore_rl.models.refit.host_copy import HostCopy
from mcore_rl.models.refit.transfer import RefitInfo, RefitReceiver, decode_refit_info
from mcore_rl.utils.compression import zstd_problem

BACKEND = "mcore_rl"


@dataclass
class RefitInitInfo(WeightTransferInitInfo):
    """The request to connect to the trainer: a store to meet at, and a description of the tensors that will be sent.

    store: address (IP, port) of a store of the trainer's first rank. Each process writes there whose memory it can
        read, and then reads by which routes it gets weights (`mcore_rl.models.generation.vllm.weight_routes`).
    probes: for each rank of the trainer, what `Probe.told` returns there.
    tensors: names, shapes and dtypes of the tensors, as `encode_refit_info` returns them.
    timeout: time limit in seconds for the creation of a group, and for each of its collectives.
    on_host: whether to receive the weights in the host's memory, because the trainer may be on the same GPU.
    copy: if the trainer sends differences, the name of the server's copy of the weights in shared memory; else None.
    """

    store: tuple[str, int]
    probes: list[dict[str, str]]
    tensors: dict[str, Any]
    timeout: float
    on_host: bool
    copy: str | None


@dataclass
class RefitUpdateInfo(WeightTransferUpdateInfo):
    """The request for one update of the weights. The weights come in buckets that say which tensors they have.

    base: version from which differences begin; None if the update has all weights.
    version: version of the weights after the update.
    count: number of tensors in the update. The server keeps its values of the others, which have not changed.
    """

    base: int | None
    version: int
    count: int


class DirectCopies(TorchFunctionMode):
    """A context in which vLLM's layerwise reload also updates parameters that a model sets by a plain copy.

    The reload sees only tensors that a parameter's `weight_loader` loads. vLLM's gpt-oss in 16 or 32 bits copies the
    tensors of experts and sinks without a loader, so their old values would stay in use. In this context, a copy into
    an expert's parameter calls a loader. A copy into sinks changes the parameters in use, because sinks need no
    processing after loading.

    Args:
        model: a model on which `initialize_layerwise_reload` was called.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.loaders: dict[int, Callable[..., Any]] = {}
        for module in model.modules() if type(model).__name__ == "GptOssForCausalLM" else ():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if name == "sinks":
                    _place_kernel_tensors(module, info := get_layerwise_info(module))
                    info.reset()
                elif name in ("w13_weight", "w2_weight", "w13_bias", "w2_bias"):
                    parameter.weight_loader = default_weight_loader  # type: ignore[attr-defined]
                    self.loaders[id(parameter)] = make_online_process_loader(module, name)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and (loader := self.loaders.get(id(args[0]))):
            loader(*args)
            return args[0]
        return func(*args, **(kwargs or {}))


class RefitEngine(WeightTransferEngine[RefitInitInfo, RefitUpdateInfo]):
    """Receives the trainer's weights in one worker process of vLLM."""

    init_info_cls, update_info_cls = RefitInitInfo, RefitUpdateInfo
    receiver: RefitReceiver | None = None
    copies: DirectCopies | None = None

    def init_transfer_engine(self, init_info: RefitInitInfo) -> None:
        info, parallel = init_info, self.parallel_config
        index = parallel.data_parallel_index * parallel.world_size + parallel.rank
        if self.receiver is not None:
            self.receiver.close()
        if info.copy and (problem := zstd_problem()):
            raise RuntimeError(f"generation.vllm.weight_updates=delta: there is {problem} in vLLM's environment")
        tensors = decode_refit_info(info.tensors)
        copy = self._copy(tensors, info) if info.copy else None
        self.receiver = RefitReceiver(self._load, tensors, self.device, copy, info.on_host)
        self.receiver.join_routes(info.store, info.probes, index, info.timeout)

    def _copy(self, tensors: RefitInfo, info: RefitInitInfo) -> HostCopy:
        """Return the copy of the weights that the processes of this server on this machine share."""
        parallel = self.parallel_config
        count = parallel.local_world_size
        replica = parallel.data_parallel_index
        return HostCopy(
            tensors.values(), f"{info.copy}_{replica}", info.timeout, index=parallel.rank % count, count=count
        )

    def start_weight_update(self) -> None:
        self.copies = None  # the reload begins with the first tensors: until then, an update can be refused

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        with torch.device(self.device):
            if self.copies is None:
                # A later update may be for another model, such as a draft, so the model is read now.
                self._begin_reload()
                self.copies = DirectCopies(self.model)
            with self.copies:
                self.model.load_weights(tensors)

    def _begin_reload(self) -> None:
        for module in self.model.modules():
            # On the CPU, experts are packed for their kernel only if there is no kernel yet. Without this, the update
            # would succeed but the old experts would stay in use.
            method: Any = getattr(module, "quant_method", None)
            if self.device.type == "cpu" and getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None
            for parameter in module.parameters(recurse=False):
                loader: Any = getattr(parameter, "weight_loader", None)
                if isinstance(loader, functools.partial) and not hasattr(loader, "__name__"):
                    loader.__name__ = "partial"  # type: ignore[attr-defined]  # the reload reads it (MiniMax-M2)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: RefitUpdateInfo) -> None:
        if self.receiver is None:
            raise RuntimeError("update_weights: call init_weight_transfer_engine first")
        self.receiver.update_weights_from_collective(update_info.base, update_info.version, update_info.count)

    def finish_weight_update(self) -> None:
        with torch.device(self.device):
            finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            # On the CPU, a head that is tied to the embedding uses a packed copy of the weights, which a reload of the
            # embedding does not update.
            if self.device.type == "cpu" and isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
        self.receiver = None


def register() -> None:
    """Register the backend of `--weight-transfer-config '{"backend": "mcore_rl"}'`; repeated calls do nothing."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, RefitEngine)
