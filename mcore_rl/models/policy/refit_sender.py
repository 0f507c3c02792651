"""Sender of the policy's weights to an inference engine, by collective or by shared memory."""

from __future__ import annotations

from typing import Any

import torch

from mcore_rl import platform
from mcore_rl.distributed.collectives import InternedObjects, gather_objects
from mcore_rl.models.megatron.build import ModelShard
from mcore_rl.models.megatron.lora import LoRA, shapes_of
from mcore_rl.models.megatron.lora_layers import export_adapters
from mcore_rl.models.megatron.weights import export_hf_weights
from mcore_rl.models.policy.refit import RefitGroup, RefitInfo, SharedBucket, plan_buckets, send_weights

BUCKET_BYTES = 512 * 1024**2


class WeightSender:
    """A sender of a model's weights to an engine, by collective with its processes or by shared memory. Collective.

    Args:
        seconds: time limit for the engine's processes to join, and for each collective with them.
    """

    def __init__(self, model: ModelShard, seconds: float) -> None:
        self.model, self.seconds = model, seconds
        self.rank = torch.distributed.get_rank()
        self.is_connected = False
        self._group: RefitGroup | None = None
        self._shared: SharedBucket | None = None
        self._devices = InternedObjects()

    def info(self, adapters_only: bool = False) -> RefitInfo:
        """Return name → (shape, dtype) of the tensors that are sent, in their order.

        Args:
            adapters_only: return only the adapters, under their names in PEFT's files.

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
        """Open a process group with the engine's processes, which have ranks 1 … world_size − 1.

        Raises:
            RuntimeError: the processes did not join within `seconds`.
        """
        if self.rank == 0:
            self._group = RefitGroup.join(ip, port, 0, world_size, self.seconds)
        self.is_connected = True

    def broadcast(self, bucket_bytes: int, adapters_only: bool = False) -> None:
        """Send all weights in buckets of at most `bucket_bytes`, gathering one tensor after the other.

        Args:
            adapters_only: send only the adapters, not the model's weights with merged adapters. The receivers must
                have received the matching `info`.

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
        """Return the names of tensors in groups of at most `bucket_bytes`."""
        return plan_buckets(self.info(adapters_only), bucket_bytes)

    def share(self, keys: list[str]) -> dict[str, Any]:
        """Write tensors into a block of shared memory on every device and release the blocks of the previous call.

        An engine's process reads the block of the device that it runs on.

        Args:
            keys: names of the model's tensors, or of the adapters' tensors.

        Returns:
            Device (a GPU's UUID, or "cpu", where one block serves all processes) → handle. The first rank returns the
            handles of all devices; any other rank returns only the handle of the block that it owns, if any.

        Raises:
            ValueError: the model has no tensor of that name.
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
