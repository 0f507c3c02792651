"""Models by their names on the Hugging Face hub, kept in its cache."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from mcore_rl.errors import UserError

_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
WEIGHTS = ["*.safetensors"]
"""Patterns of weights that are trained here; other formats are not downloaded."""
PATTERNS = ["*.json", "*.jinja", "*.txt", "*.model"]
"""Patterns of the other files."""
CODE = ["*.py"]
PUSH = "checkpoint.push_to_hub"
"""The key that errors name."""


def is_hub_name(path: Path) -> bool:
    """Whether a path that leads nowhere reads as OWNER/NAME or OWNER/NAME@REVISION."""
    return not path.exists() and _NAME.fullmatch(str(path)) is not None


def download(name: str, key: str, with_code: bool = False, with_weights: bool = True) -> Path:
    """The directory of a model in the hub's cache, with all that is needed downloaded; $HF_HUB_OFFLINE=1 never does.

    Every process may ask at the same time: one of a node downloads, the others wait for it.

    Args:
        key: names it in errors.
        with_code: the model's own code as well.
        with_weights: not its configuration and tokenizer alone.

    Raises:
        UserError: it is not there, not to be had, or not to be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    match = _NAME.fullmatch(name)
    assert match is not None, f"{name} is no name on the hub"
    patterns = PATTERNS + (WEIGHTS if with_weights else []) + (CODE if with_code else [])
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


def is_repository_name(name: str) -> bool:
    """Whether the hub would take OWNER/NAME for a new repository."""
    return re.fullmatch(r"\b[\w.-]+\b/\b[\w.-]{1,96}\b", name) is not None and not re.search(r"--|\.\.", name)


def check_repository(name: str) -> None:
    """Check, without writing, that the hub can be reached and lets this user write to a repository, or create it.

    Raises:
        UserError: the hub cannot be reached, or refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    api, owner = HfApi(), name.partition("/")[0]
    with_write: dict[str, Any] = {"write": True} if "write" in inspect.signature(api.auth_check).parameters else {}
    try:
        try:
            api.auth_check(name, **with_write)
        except GatedRepoError:
            raise
        except RepositoryNotFoundError:  # `make_repository` creates it
            user = api.whoami()
            owners = [user["name"], *(organization["name"] for organization in user.get("orgs", []))]
            if owner not in owners:
                told = f"the token is of {owners[0]}, who is not {owner} and not a member of it"
                raise PermissionError(told) from None
    except Exception as error:  # as below
        raise _not_writable(name, error) from None


def make_repository(name: str) -> None:
    """Create the model's repository on the hub (private) if it is not there, and check that `push` may write to it.

    Raises:
        UserError: the hub cannot be reached, or does not let one write there.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(name, private=True, exist_ok=True)  # of another's that one may read it says nothing
        if "write" in inspect.signature(api.auth_check).parameters:  # in newer versions of the client
            api.auth_check(name, write=True)
    except Exception as error:  # the client's HTTP library, and so what it raises, changes with its versions
        raise _not_writable(name, error) from None


def _not_writable(name: str, error: Exception) -> UserError:
    hint = "log in with `hf auth login` or $HF_TOKEN, or leave it out and upload later"
    return UserError(f"{PUSH}: {name} is not to be written to ({_reason(error)}); {hint}")


def push(directory: Path, name: str) -> str:
    """Upload an exported model; returns its address.

    Raises:
        UserError: it did not arrive; the directory is as it was.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().upload_folder(repo_id=name, folder_path=directory, commit_message="Trained with mcore_rl")
    except Exception as error:  # as above
        remedy = f"it is whole in {directory}; `hf upload {name} {directory}` sends it"
        raise UserError(f"{PUSH}: the model did not get to {name} ({_reason(error)}); {remedy}") from None
    return f"{HfApi().endpoint}/{name}"


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
