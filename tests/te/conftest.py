"""Tests of the layers that consist of Transformer Engine's modules, with the CPU stand-in in `tests/support`.

Megatron looks for Transformer Engine when it is imported. These tests therefore need a pytest run of their own, with
the stand-in on PYTHONPATH (`make test-te`); any other run leaves them out.
"""

import importlib.util

import pytest

if importlib.util.find_spec("transformer_engine") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def model_of(tmp_path_factory):
    """Return a function from a family's name to the directory of a small model of it."""
    from small_models import models_below

    return models_below(lambda family: tmp_path_factory.mktemp("models") / family)
