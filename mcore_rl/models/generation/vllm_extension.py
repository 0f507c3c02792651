"""Weights of the policy into vLLM's workers. Written to vLLM's worker-extension interface, and not run here.

llm = LLM(model, worker_extension_cls="mcore_rl.models.generation.vllm_extension.RefitWorkerExtension")
llm.collective_rpc("prepare_refit", args=(policy.prepare_refit_info(),))
llm.collective_rpc("init_collective", args=(ip, port, 1, world_size))     # beside policy.init_collective(…)
llm.collective_rpc("update_weights_from_collective")                      # beside policy.broadcast_weights…
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_rl.models.policy.refit import RefitInfo, RefitReceiver


class RefitWorkerExtension:
    """Mixed into each vLLM worker, which has `model_runner`, `device` and `rank`."""

    model_runner: Any
    device: Any
    rank: int

    def prepare_refit(self, info: RefitInfo) -> None:
        """Learn what will come; vLLM's own loader takes tensors by their Hugging Face names."""
        self.refit_receiver = RefitReceiver(self.model_runner.model.load_weights, info, self.device)

    def init_collective(self, ip: str, port: int, first_rank: int, world_size: int) -> None:
        """Join the policy's group as rank `first_rank` and this worker's own."""
        self.refit_receiver.init_collective(ip, port, first_rank + self.rank, world_size)

    def update_weights_from_collective(self) -> None:
        self.refit_receiver.update_weights_from_collective()

    def update_weights_from_ipc_handles(self, handles: Mapping[str, Any]) -> None:
        self.refit_receiver.update_weights_from_ipc_handles(handles)
