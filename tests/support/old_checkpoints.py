"""Checkpoints as versions of this package wrote them whose models lacked a module."""

import hashlib
import json
import pickle
from pathlib import Path


def remove_module(checkpoint: Path, module: str) -> None:
    """Remove a module, such as the vision tower `visual.`, from the index of a checkpoint."""
    file = checkpoint / ".metadata"
    index = pickle.loads(file.read_bytes())
    mark = f".{module}"
    index.state_dict_metadata = {k: v for k, v in index.state_dict_metadata.items() if mark not in f".{k}"}
    index.storage_data = {k: v for k, v in index.storage_data.items() if mark not in f".{k.fqn}"}
    index.planner_data = {k: v for k, v in (index.planner_data or {}).items() if mark not in f".{k}"}
    file.write_bytes(pickle.dumps(index))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest[".metadata"] = [file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest()]
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
