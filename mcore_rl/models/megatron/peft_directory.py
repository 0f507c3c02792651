"""Adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mcore_rl.errors import UserError
from mcore_rl.models.megatron.expert_adapters import is_expert_target
from mcore_rl.models.megatron.hf_checkpoint import companions
from mcore_rl.run.identity import digest_of_weights
from mcore_rl.utils.checkpoint_store import digests_of, flush_directory, replace_listed, write_manifest

CONFIG_FILE, TENSORS_FILE, BASE_FILE = "adapter_config.json", "adapter_model.safetensors", "base_model.json"
"""The third is ours: `{"weights": digest}` of the base model, as `run_identity.digest_of_weights` makes it."""
NAME = "base_model.model.{module}.lora_{matrix}.weight"
"""Name of a tensor: `module` as the Hugging Face model names it, `matrix` A or B."""

ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "use_rslora": (False,),
    "fan_in_fan_out": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "modules_to_save": ((), []),
    "layers_to_transform": ((), []),
    "lora_bias": (False,),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),  # others (PiSSA, OLoRA, …) change the base
    "alora_invocation_tokens": ((), []),
    "use_bdlora": (False,),
    "arrow_config": (),
    "kasa_config": (),
    "monteclora_config": (),
}
"""Values of keys of the configuration that change what an adapter computes; null is any of them."""


class PEFTDirectory:
    """An adapter on disk.

    Raises:
        UserError: it is none, or of a kind that is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            config = json.loads((path / CONFIG_FILE).read_bytes())
            self.rank, self.alpha = int(config["r"]), float(config["lora_alpha"])
            self.target_parameters = tuple(config.get("target_parameters") or ())
            self.base = str(config.get("base_model_name_or_path") or "")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"model.lora.path: {path} must be a PEFT adapter with {CONFIG_FILE} ({type(error).__name__}: {error})"
            ) from None
        for key, values in ONLY.items():
            if config.get(key) is not None and config[key] not in values:
                raise UserError(f"model.lora.path: {path / CONFIG_FILE}: {key}={config[key]!r} is not supported")
        if others := [name for name in self.target_parameters if not is_expert_target(_last_two(name))]:
            raise UserError(f"model.lora.path: {path / CONFIG_FILE}: target_parameters={others!r} is not supported")
        try:
            self._file = safe_open(path / TENSORS_FILE, framework="pt")
        except (OSError, SafetensorError) as error:
            raise UserError(f"model.lora.path: {path / TENSORS_FILE} cannot be read ({error})") from None
        self.names = set(self._file.keys())

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Last components of the names of the modules that have an adapter, and of the experts' parameters."""
        modules = {name.split(".lora_")[0].removesuffix(".base_layer").rpartition(".")[2] for name in self.names}
        if self.target_parameters:
            modules.discard("experts")
        return tuple(sorted(modules | {_last_two(name) for name in self.target_parameters}))

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse tensors that are missing, unknown or misshapen.

        Raises:
            UserError: naming the first of them.
        """
        for what, names in (("lacks", set(shapes) - self.names), ("has unknown", self.names - set(shapes))):
            if names:
                raise UserError(f"model.lora.path: {self.path} {what} tensors: {', '.join(sorted(names)[:3])}")
        for name, shape in shapes.items():
            found = tuple(self._file.get_slice(name).get_shape())
            if found != shape:
                raise UserError(f"model.lora.path: {self.path}: {name} is {found}; for model.path it must be {shape}")

    def check_base(self, path: Path, weights: str) -> list[str]:
        """Compare the base model that it was made for with the one that it is put on.

        Args:
            weights: `digest_of_weights` of the model at `path`.

        Returns:
            a line if only the name tells, and tells of another.

        Raises:
            UserError: it was made for other weights.
        """
        try:
            made_for = json.loads((self.path / BASE_FILE).read_bytes())["weights"]
        except (OSError, ValueError, KeyError, TypeError):
            made_for = None
        if made_for is not None and made_for != weights:
            raise UserError(
                f"model.lora.path: {self.path} was trained on other weights ({self.base}) than those of {path}; "
                f"remove its {BASE_FILE} to use it all the same"
            )
        named = Path(self.base)  # a directory, or a name on the hub
        same = named.resolve() == path.resolve() if named.is_dir() else named.name == path.name
        if made_for or same or not self.base:
            return []
        return [f"model.lora.path: {self.path} names {self.base} as its base model, not {path}"]

    def read(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> Tensor:
        """`tensor[rows, columns]`, in fp32."""
        view = self._file.get_slice(name)
        return (view[rows] if columns is None else view[rows, columns]).float()


def _last_two(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def write_peft_directory(
    tensors: Iterable[tuple[str, Tensor]],
    destination: Path,
    base: Path,
    settings: Mapping[str, Any],
    is_writer: bool,
    chat_template: str | None = None,
) -> None:
    """Write an adapter, its configuration and the base model's tokenizer; every rank calls, `is_writer` writes.

    The directory appears under its name when it is whole, and replaces what an earlier call wrote.

    Args:
        base: the model that it is for.
        settings: `r`, `lora_alpha`, `lora_dropout`, `target_modules`, `target_parameters` if there are some.

    Raises:
        UserError: `destination` holds what no export wrote.
    """
    whole = {name: tensor.cpu().contiguous() for name, tensor in tensors}
    if not is_writer:
        return
    destination.parent.mkdir(parents=True, exist_ok=True)
    for leftover in destination.parent.glob(f".{destination.name}.*.partial"):
        shutil.rmtree(leftover)
    temporary = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", suffix=".partial", dir=destination.parent))
    save_file(whole, temporary / TENSORS_FILE, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "bias": "none",
        "inference_mode": True,
        **settings,
    }
    (temporary / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (temporary / BASE_FILE).write_text(json.dumps({"weights": digest_of_weights(base)}) + "\n")
    for file in companions(base):
        shutil.copy2(file, temporary / file.name)
    if chat_template is not None:
        (temporary / "chat_template.jinja").write_text(chat_template)
    write_manifest(temporary, digests_of(temporary, sorted(file.name for file in temporary.iterdir())))
    flush_directory(temporary)
    replace_listed(temporary, destination)
