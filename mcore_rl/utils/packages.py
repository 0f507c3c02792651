"""The installed packages: their versions, compared with those that this package requires, and how to mend a mismatch.

Only the packages' metadata is read, so a mismatch is told before PyTorch and Megatron are imported.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

from mcore_rl.errors import UserError

DISTRIBUTION = "mcore_rl"
MODULES = {"megatron-core": "megatron.core", "pyyaml": "yaml"}
"""Module of a package whose name differs from the package's."""

CONTAINERS = "use a container of a newer release (docs/several_nodes.md lists them)"


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def is_own_build(version: str | None) -> bool:
    """Return whether a version is that of a build from sources, such as the packages of NVIDIA's containers.

    Such a version ends in a local label that names the sources, as in "2.10.0a0+b4e4ee81d3.nv25.12" or "2.5.0+f05f12c".
    The registries' builds of PyTorch have labels as well, which name a device: "2.13.0+cpu", "2.11.0+cu130".
    """
    label = (version or "").partition("+")[2]
    return bool(label) and not label.startswith(("cpu", "cu", "rocm", "xpu"))


def requirements() -> list[Requirement]:
    """Return what this package requires without any extra; [] if it was not installed but is only on the path."""
    try:
        named = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []
    every = map(Requirement, named)
    return [one for one in every if one.marker is None or one.marker.evaluate({"extra": ""})]


def package_problems() -> Iterator[str]:
    """Yield a line for each required package that is missing or has an unsupported version, with the remedy."""
    for one in requirements():
        version, wanted = version_of(one.name), f"{one.name}{one.specifier}"
        install = f"pip install '{wanted}'"
        if version is None:
            if not _is_importable(MODULES.get(one.name, one.name.replace("-", "_"))):
                yield f"{one.name} is not installed: {install}"
        elif not one.specifier.contains(version, prereleases=True):
            remedy = CONTAINERS if is_own_build(version) else install
            yield f"{one.name} {version} is installed, but mcore_rl needs {wanted}: {remedy}"


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above the module is missing
        return False


def import_torch() -> None:
    """Import PyTorch, which may lack a library or be built for another machine although its version fits.

    Raises:
        UserError: PyTorch cannot be imported.
    """
    try:
        importlib.import_module("torch")
    except (ImportError, OSError) as error:
        raise UserError(
            f"torch {version_of('torch')} cannot be imported ({type(error).__name__}: {error}); install a build for "
            "this machine (docs/several_nodes.md has the steps)"
        ) from error


def check_packages() -> None:
    """Check the versions of all required packages.

    Raises:
        UserError: a package is missing, or its version is not supported. The message has the command that mends it.
    """
    if problems := list(package_problems()):
        raise UserError("; ".join(problems))
