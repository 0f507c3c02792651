"""The sender of weights: the policy's tensors for an inference engine, by collective or by shared memory."""

from __future__ import annotations

from typing import Any

import torch

from mcore_rl import platform
from mcore_rl.distributed.collectives import Acquainted, gather_objects
from mcore_rl.models.generation.refit import RefitGroup, RefitInfo, SharedBucket, plan_buckets, send_weights
from mcore_rl.models.megatron.build import BuiltModel
from mcore_rl.models.megatron.lora import LoRA, shapes_of
from mcore_rl.models.megatron.lora_layers import export_adapters
from mcore_rl.models.megatron.weights import export_hf_weights, weights_of


class WeightHandover:
    """A model's weights for an engine: by a collective with its processes, or in shared memory. Collective.

    Args:
        seconds: that the engine's processes have to join, and a collective with them may take.
    """

    def __init__(self, model: BuiltModel, seconds: float) -> None:
        self.model, self.seconds = model, seconds
        self.rank = torch.distributed.get_rank()
        self.is_connected = False
        self._group: RefitGroup | None = None
        self._shared: SharedBucket | None = None
        self._devices = Acquainted()

    def info(self, adapters_only: bool = False) -> RefitInfo:
        """Return names, shapes and types of the tensors that are sent, in their order.

        Raises:
            RuntimeError: only adapters are wanted, and the model has none.
        """
        if adapters_only:
            return {name: (shape, torch.float32) for name, shape in shapes_of(self._lora().table).items()}
        dtype = next(tensor.dtype for chunk in self.model.chunks for _, tensor in weights_of(chunk))
        family = self.model.family
        wide = family.float32_tensors()
        return {name: (shape, torch.float32 if name in wide else dtype) for name, shape in family.shapes().items()}

    def adapter_settings(self) -> dict[str, Any]:
        """
        Raises:
            RuntimeError: the model has no adapters.
        """
        return self._lora().settings

    def _lora(self) -> LoRA:
        if self.model.lora is None:
            raise RuntimeError("adapters: the model has none (model.lora); refit sends its weights")
        return self.model.lora

    def connect(self, ip: str, port: int, world_size: int) -> None:
        """
        Raises:
            RuntimeError: the engine's processes did not come.
        """
        if self.rank == 0:
            self._group = RefitGroup.join(ip, port, 0, world_size, self.seconds)
        self.is_connected = True

    def broadcast(self, bucket_bytes: int, adapters_only: bool = False) -> None:
        """
        Raises:
            RuntimeError: nobody is connected, or there are no adapters.
        """
        if not self.is_connected:
            raise RuntimeError("broadcast_weights_for_collective: call init_collective first")
        info = self.info(adapters_only)
        tensors = (
            export_adapters(self.model, first_only=True)
            if adapters_only
            else export_hf_weights(self.model, copies=False, first_only=True)
        )
        send_weights(tensors, info, self._group, bucket_bytes)

    def buckets(self, bucket_bytes: int, adapters_only: bool = False) -> list[list[str]]:
        return plan_buckets(self.info(adapters_only), bucket_bytes)

    def share(self, keys: list[str]) -> dict[str, Any]:
        """
        Raises:
            ValueError: a key that the model does not have.
        """
        info = self.info()
        if adapters_only := self.model.lora is not None and not set(keys) & set(info):
            info = self.info(adapters_only)
        if unknown := sorted(set(keys) - set(info)):
            raise ValueError(f"get_weights_ipc_handles: the model has no {', '.join(unknown)}")
        devices = self._devices.gather(platform.device_id())
        self.release()  # the first rank has come back: nobody reads the last block
        if devices.index(devices[self.rank]) == self.rank:
            self._shared = SharedBucket({key: info[key] for key in keys})
        adapters = ((name, tensor) for name, tensor in export_adapters(self.model) if name in keys)
        weights = export_hf_weights(self.model, names=keys, copies=False)
        for name, tensor in adapters if adapters_only else weights:
            if self._shared is not None:
                self._shared.write(name, tensor)
        own = {} if self._shared is None else {devices[self.rank]: self._shared.handle()}
        everyones = gather_objects(own)
        return {device: handle for part in everyones for device, handle in part.items()} if self.rank == 0 else own

    def release(self) -> None:
        """Let go of this rank's last block of shared memory."""
        if self._shared is not None:
            self._shared.release()
        self._shared = None
