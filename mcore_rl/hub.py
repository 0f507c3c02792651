"""Models by their names on the Hugging Face hub, kept in its cache."""

from __future__ import annotations

import re
from pathlib import Path

from mcore_rl.errors import UserError

_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
"""Files of a model that is trained here; not its weights in other formats."""
CODE = ["*.py"]


def is_hub_name(path: Path) -> bool:
    """Whether a path that leads nowhere reads as OWNER/NAME or OWNER/NAME@REVISION."""
    return not path.exists() and _NAME.fullmatch(str(path)) is not None


def download(name: str, key: str, with_code: bool = False) -> Path:
    """The directory of a model in the hub's cache, with all that is needed downloaded; $HF_HUB_OFFLINE=1 never does.

    Every process may ask at the same time: one of a node downloads, the others wait for it.

    Args:
        key: names it in errors.
        with_code: the model's own code as well.

    Raises:
        UserError: it is not there, not to be had, or not to be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    match = _NAME.fullmatch(name)
    assert match is not None, f"{name} is no name on the hub"
    patterns = PATTERNS + (CODE if with_code else [])
    try:
        return Path(snapshot_download(match["name"], revision=match["revision"], allow_patterns=patterns))
    except GatedRepoError:
        reason = "its owner gives it to those who asked; log in with `hf auth login` once you have"
    except RepositoryNotFoundError:
        reason = "the hub has no model of this name that one may see without logging in (`hf auth login`)"
    except LocalEntryNotFoundError:
        reason = f"is not in the hub's cache, and the hub cannot be reached; `hf download {match['name']}` gets it"
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
    raise UserError(f"{key}: {name} is no directory, and as a name on the hub: {reason}")
