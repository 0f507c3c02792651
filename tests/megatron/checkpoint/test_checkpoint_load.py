"""Tests of loading a checkpoint: it needs the memory of the state only, each data-parallel rank reads its own part, and
all ranks report an unreadable checkpoint."""

import ctypes
import gc
import pickle
import re
from enum import Enum

import pytest
import torch
from layout_cases import make_config, make_data
from peak_memory import PeakMemory
from small_models import make_model

from mcore_rl.algorithms.build_loss import build_loss
from mcore_rl.config import DPOConfig
from mcore_rl.errors import UserError
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes


def in_precision(config, dtype):
    values = config.model_dump()
    values["model"]["dtype"] = dtype
    return DPOConfig.model_validate(values)


def save(config, directory):
    """A checkpoint none of whose moments is zero."""
    from mcore_rl.models.megatron.training.optimizer import optimizers_with_parameters
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    policy.train(make_data(), build_loss(config))
    for inner in optimizers_with_parameters(policy.optimizer):
        for number, state in enumerate(inner.optimizer.state.values(), 1):
            state["exp_avg"].fill_(number)
            state["exp_avg_sq"].fill_(-number)
            state["step"].fill_(7)
    saved = policy.save_checkpoint(directory, 1, {})
    policy.shutdown()
    return saved


def load(config, iteration):
    """Return the peak bytes of loading, before and after the moments exist; the bytes of the moments and of the fp32
    weights; and the number of elements of optimizer state that are read."""
    from mcore_rl.models.megatron.checkpoint.load import RegionReader
    from mcore_rl.models.megatron.training.optimizer import optimizers_with_parameters
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy, read = MegatronPolicy(config, total_steps=10, rows_per_unit=2), []
    with pytest.MonkeyPatch.context() as patch:
        original = RegionReader.read

        def count(reader, regions):
            regions = list(regions)
            read.extend(r.values.numel() for r in regions if r.key.startswith("optimizer.state."))
            original(reader, regions)

        patch.setattr(RegionReader, "read", count)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before would hide as much of what is taken
        with PeakMemory() as peak:
            policy.load_checkpoint(iteration)
        with PeakMemory() as again:
            policy.load_checkpoint(iteration)
    states = [
        (parameter, state)
        for inner in optimizers_with_parameters(policy.optimizer)
        for parameter, state in inner.optimizer.state.items()
    ]
    moments = sum(state[name].nbytes for _, state in states for name in ("exp_avg", "exp_avg_sq"))
    masters = sum(parameter.numel() * parameter.itemsize for parameter, _ in states)
    checked = [(state["exp_avg"].min(), state["exp_avg_sq"].max(), float(state["step"])) for _, state in states]
    assert all(first > 0 > second and step == 7 for first, second, step in checked)
    policy.shutdown()
    return (peak.bytes - moments, again.bytes), moments, masters, sum(read) // 2


def test_each_data_parallel_rank_reads_its_own_part(model_of, tmp_path):
    config = in_precision(make_config(model_of("llama")), "bfloat16")
    (saved,) = run_processes(save, config, tmp_path, world_size=1)
    ranks = run_processes(load, ParallelLayout(dp=2).apply(config), saved, world_size=2)
    everything = sum(masters + moments for _, moments, masters, _ in ranks) // 4
    numbers = [read for *_, read in ranks]
    assert sum(numbers) == everything
    assert max(numbers) < 0.6 * everything


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "dtype"), [(ParallelLayout(), "float32"), (ParallelLayout(tp=2), "bfloat16")], ids=str
)
def test_loading_takes_little_memory(first, dtype, tmp_path):
    """At data parallelism of 2, from stored shards that are as large as their tensors."""
    path = make_model("llama", tmp_path / "large", vocab_size=32000, hidden_size=512, num_hidden_layers=6,
                      intermediate_size=2048, num_attention_heads=8, num_key_value_heads=4, head_dim=64)  # fmt: skip
    config = in_precision(make_config(path), dtype)
    saved = run_processes(save, first.apply(config), tmp_path / "saved", world_size=first.world_size)[0]
    for (made, there), moments, masters, _ in run_processes(
        load, ParallelLayout(dp=2).apply(config), saved, world_size=2
    ):
        state = moments + masters
        print(f"state {state / 1e6:.0f} MB; beyond it {made / 1e6:.1f} MB ({made / state:.1%}), {there / 1e6:.1f} MB")
        assert max(made, there) <= 0.05 * state


def refused(config, iteration, broken_rank):
    """Return the error on each rank; on one of them a file is damaged."""
    from mcore_rl.models.megatron.checkpoint.load import RegionReader
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    with pytest.MonkeyPatch.context() as patch:
        if policy.rank == broken_rank:
            patch.setattr(RegionReader, "_read_piece", lambda *_: broken())
        with pytest.raises(UserError) as error:
            policy.load_checkpoint(iteration)
    policy.shutdown()
    return str(error.value)


def broken():
    raise OSError("Input/output error")


def test_a_rank_that_cannot_read_tells_all(model_of, tmp_path):
    config = make_config(model_of("llama"))
    (saved,) = run_processes(save, config, tmp_path, world_size=1)
    for told in run_processes(refused, ParallelLayout(dp=2).apply(config), saved, 1, world_size=2):
        assert told == f"{saved}/__0_0.distcp: cannot be read: Input/output error"
    other = make_config(make_model("llama", tmp_path / "wider", intermediate_size=128))
    (told,) = run_processes(refused, other, saved, None, world_size=1)
    assert told.startswith(f"{saved} does not fit the model: decoder.layers.mlp.")


def test_state_in_a_checkpoint_of_megatron_019_is_read(tmp_path):
    """Megatron 0.19 writes the state as a list of one element, an object among the shards."""
    from torch.distributed import checkpoint

    from mcore_rl.models.megatron.checkpoint.load import check_trusted, read_common

    common = {"state": {"step": 7, "rates": [0.1, 3e-5]}}
    written = {"model.weight": torch.arange(6.0).view(2, 3), "common_state/shard_0_1": [common]}
    planner = checkpoint.DefaultSavePlanner(flatten_state_dict=False)
    checkpoint.save(written, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert read_common(tmp_path, check_trusted(tmp_path)) == common


def test_checkpoint_without_common_state_is_refused(tmp_path):
    from torch.distributed.checkpoint.metadata import Metadata

    from mcore_rl.models.megatron.checkpoint.load import read_common

    with pytest.raises(UserError, match=r"has neither the file common\.pt nor the object common_state"):
        read_common(tmp_path, Metadata({}, storage_data={}))


def test_index_with_a_path_of_another_python_is_read(tmp_path):
    """Python 3.13 pickles paths as `pathlib._local.PosixPath`, other versions as `pathlib.PosixPath`."""
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    from mcore_rl.models.megatron.checkpoint.load import read_index

    written = pickle.dumps(Metadata({}, storage_meta=StorageMeta(checkpoint_id=tmp_path)), protocol=2)
    for module in (b"pathlib", b"pathlib._local"):
        (tmp_path / ".metadata").write_bytes(re.sub(rb"cpathlib(\._local)?\n", b"c" + module + b"\n", written))
        assert read_index(tmp_path).storage_meta.checkpoint_id == tmp_path


class PicklerOfPython3112(pickle.Pickler):
    """Pickles enumerations as Python 3.11.0 to 3.11.3 does."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_index_with_enumerations_of_another_python_is_read(tmp_path):
    """Attributes that are no members of enumerations are refused: they could be methods."""
    from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

    from mcore_rl.models.megatron.checkpoint.load import read_index

    properties = TensorProperties(memory_format=torch.preserve_format)
    written = Metadata({"weight": TensorStorageMetadata(properties, torch.Size([2]), [])})
    with open(tmp_path / ".metadata", "wb") as file:
        PicklerOfPython3112(file).dump(written)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert read_index(tmp_path).state_dict_metadata["weight"].properties.memory_format is torch.preserve_format
    for harmful in ((type(tmp_path), "unlink"), (torch.Size, "__new__"), (tmp_path, "unlink")):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Attribute(*harmful)))
        with pytest.raises(UserError, match="which an index never contains"):
            read_index(tmp_path)


class Attribute:
    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)
