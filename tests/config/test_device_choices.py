"""Tests of the values that depend on the device."""

import pytest

from mcore_rl.config import SFTConfig
from mcore_rl.errors import UserError


def config_of(model=None, parallel=None):
    values = {"output_dir": "out", "model": {"path": "model", **(model or {})}, "data": {"train": "data.jsonl"}}
    return SFTConfig.model_validate({**values, "parallel": parallel or {}})


def chosen(config, **device):
    config = config.for_device(**{"has_te": False, "simulates": False, **device})
    overlaps = config.parallel.overlap_grad_reduce, config.parallel.overlap_param_gather
    return config.model.dtype, config.model.transformer_impl, *overlaps


def test_auto_is_chosen_by_the_device():
    config = config_of()
    assert chosen(config, on_gpu=False) == ("float32", "local", False, False)
    assert chosen(config, on_gpu=False, has_te=True) == ("float32", "local", False, False)
    assert chosen(config, on_gpu=True) == ("bfloat16", "local", True, True)
    assert chosen(config, on_gpu=True, has_te=True) == ("bfloat16", "transformer_engine", True, True)
    assert chosen(config, on_gpu=True, has_te=True, simulates=True) == ("bfloat16", "local", True, True)


def test_given_values_are_kept():
    values = {"dtype": "float32", "transformer_impl": "local"}, {"overlap_grad_reduce": False}
    assert chosen(config_of(*values), on_gpu=True, has_te=True) == ("float32", "local", False, False)
    explicit = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    assert chosen(config_of(None, explicit), on_gpu=False) == ("float32", "local", True, True)
    te = {"transformer_impl": "transformer_engine"}
    assert chosen(config_of(te), on_gpu=False, has_te=True)[1] == "transformer_engine"
    assert chosen(config_of(te), on_gpu=True, simulates=True)[1] == "local"


def test_a_gather_that_overlaps_makes_the_reduction_overlap():
    assert chosen(config_of(None, {"overlap_param_gather": True}), on_gpu=False)[2:] == (True, True)
    with pytest.raises(ValueError, match="overlap_param_gather: needs overlap_grad_reduce=true"):
        config_of(None, {"overlap_grad_reduce": False, "overlap_param_gather": True})


def test_choosing_twice_changes_nothing():
    once = config_of().for_device(on_gpu=True, has_te=True, simulates=False)
    assert once.for_device(on_gpu=False, has_te=True, simulates=False) == once


def test_missing_transformer_engine_is_refused():
    with pytest.raises(UserError, match="Transformer Engine is not installed; install it with pip install"):
        chosen(config_of({"transformer_impl": "transformer_engine"}), on_gpu=True)
