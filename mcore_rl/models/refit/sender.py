"""Sends the policy's weights to an inference engine, by collective or by shared memory."""

from __future__ import annotations

from typing import Any

import torch

from mcore_rl import platform
from mcore_rl.distributed.collectives import InternedObjects, gather_objects
from mcore_rl.models.megatron.model.gpt_model import ModelShard
from mcore_rl.models.megatron.model.lora import LoRA, shapes_of
from mcore_rl.models.megatron.weights.adapters import export_adapters
from mcore_rl.models.megatron.weights.conversion import export_hf_weights
from mcore_rl.models.refit.transfer import RefitGroup, RefitInfo, SharedBucket, plan_buckets, send_weights


class WeightSender:
    """Sends a model's weights to an inference engine, by a collective or by shared memory.

    All ranks must call its methods together.

    Args:
        seconds: time limit for the engine's processes to join the group, and for each collective with them.
    """

    def __init__(self, model: ModelShard, seconds: float) -> None:
        self.model, self.seconds = model, seconds
        self.rank = torch.distributed.get_rank()
        self.is_connected = False
        self._group: RefitGroup | None = None
        self._shared: SharedBucket | None = None
        self._devices = InternedObjects()

    def info(self, adapters_only: bool = False) -> RefitInfo:
        """Return a map from each tensor's name to its (shape, dtype), in the order in which the tensors are sent.

        Args:
            adapters_only: return only the adapters' tensors, under the names that PEFT's files use.

        Raises:
            RuntimeError: `adapters_only` is set and the model has no adapters.
        """
        if adapters_only:
            return {name: (shape, torch.float32) for name, shape in shapes_of(self._lora().table).items()}
        dtype, family = self.model.chunks[0].config.params_dtype, self.model.family
        wide = family.float32_tensors()
        return {name: (shape, torch.float32 if name in wide else dtype) for name, shape in family.shapes().items()}

    def adapter_settings(self) -> dict[str, Any]:
        """Return the arguments of PEFT's `LoraConfig` for the adapters: `r`, `lora_alpha`, `target_modules`, …

        Raises:
            RuntimeError: the model has no adapters.
        """
        return self._lora().settings

    def _lora(self) -> LoRA:
        if self.model.lora is None:
            raise RuntimeError("adapters: the model has no adapters (model.lora); send its weights instead")
        return self.model.lora

    def connect(self, ip: str, port: int, world_size: int) -> None:
        """Create a process group of the first rank and the engine's processes (ranks 1 … world_size − 1).

        Raises:
            RuntimeError: the engine's processes did not join the group within the time limit.
        """
        if self.rank == 0:
            self._group = RefitGroup.join(ip, port, 0, world_size, self.seconds)
        self.is_connected = True

    def broadcast(self, bucket_bytes: int, adapters_only: bool = False) -> None:
        """Send all weights in buckets of at most `bucket_bytes`. The ranks gather one tensor after the other.

        Args:
            adapters_only: send only the adapters. Otherwise adapters are merged into the weights, and all weights are
                sent. The receivers must have the result of `info` for the same `adapters_only`.

        Raises:
            RuntimeError: `connect` was not called, or the model has no adapters.
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
        """Return the tensors' names in groups; the tensors of a group have at most `bucket_bytes` bytes together."""
        return plan_buckets(self.info(adapters_only), bucket_bytes)

    def share(self, keys: list[str]) -> dict[str, Any]:
        """Write the tensors `keys` into a block of shared memory on every device. Release the previous call's blocks.

        A process of the engine reads the block on its own device.

        Args:
            keys: names of tensors of the model, or of tensors of the adapters.

        Returns:
            A map from a device to the handle of its block. The device is named by the GPU's UUID, or "cpu". Ranks on
            the same device share one block. The first rank returns the handles of all devices. Any other rank returns
            the handle of the block that it has created, or {} if it has created none.

        Raises:
            ValueError: the model has no tensor with one of these names.
        """
        info = self.info()
        if adapters_only := self.model.lora is not None and not set(keys) & set(info):
            info = self.info(adapters_only)
        if unknown := sorted(set(keys) - set(info)):
            raise ValueError(f"get_weights_ipc_handles: the model has no {', '.join(unknown)}")
        devices = self._devices.gather(platform.device_id())
        self.release()  # all ranks have returned from the gather, so no process still reads the last block
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
        """Release this rank's block of shared memory."""
        if self._shared is not None:
            self._shared.release()
        self._shared = None
