"""Tests of refit: weights are sent to an engine in other processes, and device memory is released for it."""

import json
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import peft
import pytest
import torch
from layout_cases import make_config, make_data
from peak_memory import PeakMemory
from ports import free_port
from refit_cases import (
    BUCKET_BYTES,
    CLOSE,
    ENGINES,
    REFITS,
    engine_of,
    engine_outputs,
    policy_outputs,
    share_and_receive,
)
from safetensors.torch import save_file
from small_models import and_long
from transformers import AutoModelForCausalLM

from mcore_rl.algorithms.build_loss import build_loss
from mcore_rl.config import DPOConfig
from mcore_rl.errors import WorkerError
from mcore_rl.models.refit.transfer import (
    RefitGroup,
    RefitGroups,
    RefitReceiver,
    RefitStore,
    decode_refit_info,
    encode_refit_info,
    listen,
    local_address,
    plan_buckets,
    send_weights,
)
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes


def train_and_refit(config, port):
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    policy.init_collective("127.0.0.1", port, ENGINES + 1)
    loss_fn = build_loss(config)
    results = []
    for _ in range(REFITS):
        policy.train(make_data(), loss_fn)
        policy.broadcast_weights_for_collective(BUCKET_BYTES)
        results.append(policy_outputs(policy))
    return results


def is_trainer(rank, policies, store):
    """Whether this is one of the first processes, which leave the others and make up the policy's world."""
    import os

    torch.distributed.destroy_process_group()
    if rank >= policies:
        return False
    os.environ["WORLD_SIZE"] = str(policies)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{store}", rank=rank, world_size=policies)
    return True


def start_both(config, policies, port, store):
    """Trainers and engine are one set of processes; only the trainers form the policy's world."""
    from mcore_rl.models.megatron.families import family_of
    from mcore_rl.models.megatron.model.hf_config import load_hf_config

    rank = torch.distributed.get_rank()
    if is_trainer(rank, policies, store):
        return train_and_refit(config, port)
    model, load = engine_of(config.model.path)
    info = {
        name: (shape, torch.float32) for name, shape in family_of(load_hf_config(config.model.path)).shapes().items()
    }
    receiver = RefitReceiver(load, info)
    receiver.init_collective("127.0.0.1", port, rank - policies + 1, ENGINES + 1, timeout=60)
    results = []
    for _ in range(REFITS):
        receiver.update_weights_from_collective()
        results.append(engine_outputs(model))
    return results


@pytest.mark.parametrize(
    ("layout", "family"),
    and_long(
        [(ParallelLayout(), "llama")],
        [(ParallelLayout(tp=2, pp=2), "qwen2"), (ParallelLayout(), "qwen2"), (ParallelLayout(tp=2, pp=2), "llama")],
    ),
    ids=str,
)
def test_refit_by_collective(layout, family, model_of):
    config = layout.apply(make_config(model_of(family)))
    policies = layout.world_size
    everyone = run_processes(start_both, config, policies, free_port(), free_port(), world_size=policies + ENGINES)
    for refit in range(REFITS):
        for engine in everyone[policies:]:
            torch.testing.assert_close(engine[refit], everyone[0][refit], **CLOSE)
    assert not torch.allclose(everyone[0][0][0], everyone[0][1][0], atol=1e-3), "training changed the weights"


def two_steps(config):
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    loss_fn = build_loss(config)
    metrics = [policy.train(make_data(), loss_fn) for _ in range(2)][-1]
    policy.shutdown()
    return metrics


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.parametrize("layout", and_long([ParallelLayout()], [ParallelLayout(tp=2, pp=2)]), ids=str)
def test_refit_by_shared_memory_and_offloading(layout, model_of):
    config = layout.apply(make_config(model_of("llama")))
    results = run_processes(share_and_receive, config, world_size=layout.world_size)
    expected, again, received, _, errors, metrics = results[0]
    torch.testing.assert_close(received, expected, **CLOSE)
    assert all(map(torch.equal, again, expected))
    assert [error.split(":")[0] for error in errors] == ["get_logprobs", "train"]
    assert all("call prepare_for_training first" in error for error in errors)
    assert metrics == run_processes(two_steps, config, world_size=layout.world_size)[0]
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(config.model.path).parameters())
    before = sum(result[3][0] for result in results)  # fp32 gradients, and two moments
    after = sum(result[3][1] for result in results)  # fp32 weights
    assert before >= 3 * 4 * parameters
    assert after >= 4 * parameters


def peak_while_sending(config, port, store, budget):
    """Bytes that the sending rank takes at most; the engine keeps nothing."""
    import os

    from mcore_rl.models.megatron.families import family_of
    from mcore_rl.models.megatron.model.hf_config import load_hf_config
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    rank = torch.distributed.get_rank()
    torch.distributed.destroy_process_group()
    if rank == 2:
        info = {
            name: (shape, torch.float32)
            for name, shape in family_of(load_hf_config(config.model.path)).shapes().items()
        }
        receiver = RefitReceiver(lambda tensors: [None for _ in tensors], info)
        receiver.init_collective("127.0.0.1", port, 1, 2, timeout=60)
        return receiver.update_weights_from_collective()
    os.environ["WORLD_SIZE"] = "2"
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{store}", rank=rank, world_size=2)
    policy = MegatronPolicy(config)
    policy.init_collective("127.0.0.1", port, 2)

    with PeakMemory() as peak:
        policy.broadcast_weights_for_collective(budget)
    policy.shutdown()
    return peak.bytes


@pytest.mark.long
def test_sending_takes_little_memory(tmp_path):
    """Two buckets and the largest tensor, gathered over tensor-parallel ranks; the model itself is five times that."""
    from small_models import make_model

    path = make_model("llama", tmp_path / "large", vocab_size=32000, hidden_size=512, num_hidden_layers=12,
                      intermediate_size=3072, num_attention_heads=8, num_key_value_heads=4, head_dim=64)  # fmt: skip
    config = ParallelLayout(tp=2).apply(make_config(path))
    budget, largest = 8 * 10**6, 32000 * 512 * 4
    peak = run_processes(peak_while_sending, config, free_port(), free_port(), budget, world_size=3)[0]
    print(f"peak {peak / 1e6:.0f} MB; bucket {budget / 1e6:.0f} MB, largest tensor {largest / 1e6:.0f} MB")
    assert peak < 2 * budget + 1.1 * largest


SENT = {"small": torch.arange(7.0), "large": torch.randn(2_000_000, generator=torch.Generator().manual_seed(0))}


def send_to_two(ports):
    """The first process sends to two engines: one follows the protocol, the other connects and does nothing."""
    rank, info = torch.distributed.get_rank(), {name: (tuple(x.shape), x.dtype) for name, x in SENT.items()}
    info = decode_refit_info(json.loads(json.dumps(encode_refit_info(info))))
    if rank == 0:
        groups = RefitGroups(
            {name: RefitGroup.join("127.0.0.1", ports[name], 0, 2, timeout=3) for name in ("works", "hangs")}
        )
        for _ in range(2):
            send_weights(SENT.items(), info, groups, BUCKET_BYTES)
        return list(groups.groups), list(groups.failures)
    received, engine = {}, RefitReceiver(lambda tensors: received.update(tensors), info)
    engine.init_collective("127.0.0.1", ports[("works", "hangs")[rank - 1]], 1, 2, timeout=30)
    if rank == 2:
        return None  # its process stays, and with it the connection
    for _ in range(2):
        engine.update_weights_from_collective()
    return received


@pytest.mark.long
def test_an_engine_that_hangs_is_left_out():
    ports = {"works": free_port(), "hangs": free_port()}
    (left, failed), received, _ = run_processes(send_to_two, ports, world_size=3, timeout=30)
    assert (left, failed) == (["works"], ["hangs"])
    assert received.keys() == SENT.keys()
    assert all(torch.equal(received[name], SENT[name]) for name in SENT)


def misuse(config):
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy, messages = MegatronPolicy(config), []
    for call in (
        policy.broadcast_weights_for_collective,
        lambda: policy.get_weights_ipc_handles(["model.nothing"]),
        lambda: policy.train(make_data(), None),
        lambda: RefitReceiver(print, {}).update_weights_from_collective(),
    ):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            messages.append(str(error))
    policy.shutdown()
    return messages


def test_misuse_is_told(model_of):
    assert run_processes(misuse, make_config(model_of("llama")), world_size=1)[0] == [
        "broadcast_weights_for_collective: call init_collective first",
        "get_weights_ipc_handles: the model has no model.nothing",
        "train: the policy has no optimizer, because it was built with total_steps=0",
        "update_weights_from_collective: call init_collective first",
    ]


def has_ipv6():
    with suppress(OSError):
        listen("::1", 0).close()
        return True
    return False


WITH_IPV6 = pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6"))


@pytest.mark.parametrize("ip", ["127.0.0.1", WITH_IPV6])
def test_a_group_meets_at_an_address_of_either_kind(ip):
    assert local_address(ip) == ip
    store, sent = RefitStore(ip, 0, 0, 30), torch.arange(3.0)

    def receive():
        return RefitGroup.join(ip, store.port, 1, 2, timeout=30).broadcast(torch.zeros(3))

    with ThreadPoolExecutor(1) as beside:
        received = beside.submit(receive)
        RefitGroup(store, 2).broadcast(sent)
        assert torch.equal(received.result(30), sent)


def wait_for_nobody(config, port):
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(
        config.model_copy(update={"parallel": config.parallel.model_copy(update={"timeout_seconds": 2})})
    )
    policy.init_collective("127.0.0.1", port, 2)


def test_an_engine_that_never_comes(model_of):
    with pytest.raises(WorkerError, match=r"[Tt]ime"):
        run_processes(wait_for_nobody, make_config(model_of("llama")), free_port(), world_size=1, timeout=30)


def test_buckets_hold_no_more_than_their_budget():
    info = {f"t{i}": ((size,), torch.float32) for i, size in enumerate([10, 10, 30, 5, 5, 100, 1])}
    assert plan_buckets(info, 120) == [["t0", "t1"], ["t2"], ["t3", "t4"], ["t5"], ["t6"]]


# ------------------------------------------------------------------ adapters alone


def with_adapters(path, targets):
    values = make_config(path).model_dump()
    values["model"]["lora"] = {"rank": 3, "alpha": 7, "target_modules": targets}
    values["optimizer"]["lr"] = 3e-2
    return DPOConfig.model_validate(values)


def send_adapters(config, port):
    """Each refit's outputs, and the settings; adapters and merged weights are sent to the two engines in turn."""
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    policy.init_collective("127.0.0.1", port, 2)
    results = []
    for _ in range(REFITS):
        policy.train(make_data(), build_loss(config))
        policy.broadcast_weights_for_collective(BUCKET_BYTES, adapters_only=True)
        policy.broadcast_weights_for_collective(BUCKET_BYTES)
        results.append(policy_outputs(policy))
    sizes = [
        sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in policy.prepare_refit_info(alone).values())
        for alone in (True, False)
    ]
    assert sum(len(keys) for keys in policy.prepare_weights_for_ipc(BUCKET_BYTES, adapters_only=True)) == len(
        policy.prepare_refit_info(adapters_only=True)
    )
    return results, policy.adapter_settings(), sizes


def base_and_adapters(config, policies, port, store):
    """The engine has the base model under PEFT, and one of merged weights."""
    from mcore_rl.models.megatron.families import family_of
    from mcore_rl.models.megatron.model.hf_config import load_hf_config
    from mcore_rl.models.megatron.model.lora import lora_of, shapes_of

    rank = torch.distributed.get_rank()
    if is_trainer(rank, policies, store):
        return send_adapters(config, port)
    hf = load_hf_config(config.model.path)
    lora = lora_of(config.model.lora, family_of(hf))
    base = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    adapted = peft.get_peft_model(base, peft.LoraConfig(**lora.settings, task_type="CAUSAL_LM"))
    info = {name: (shape, torch.float32) for name, shape in shapes_of(lora.table).items()}
    adapters = RefitReceiver(lambda tensors: peft.set_peft_model_state_dict(adapted, dict(tensors)), info)
    merged, load = state_engine_of(config.model.path)
    whole = RefitReceiver(load, {name: (shape, torch.float32) for name, shape in family_of(hf).shapes().items()})
    adapters.init_collective("127.0.0.1", port, 1, 2, timeout=60)
    whole.groups = adapters.groups
    results = []
    for _ in range(REFITS):
        adapters.update_weights_from_collective()
        whole.update_weights_from_collective()
        results.append((engine_outputs(adapted.eval()), engine_outputs(merged())))
    return results, lora.settings


def state_engine_of(path):
    """Rebuild a transformers model from the received tensors: the files of a mixture name each expert."""
    received = {}

    def load(tensors):
        received.update((name, tensor.clone()) for name, tensor in tensors)

    def model():
        with tempfile.TemporaryDirectory() as directory:
            save_file(received, f"{directory}/model.safetensors", metadata={"format": "pt"})
            shutil.copy(f"{path}/config.json", directory)
            return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    return model, load


@pytest.mark.parametrize(
    ("layout", "family", "targets"),
    and_long(
        [(ParallelLayout(tp=2, sp=True), "llama", ["q_proj", "v_proj", "down_proj"])],
        [
            (ParallelLayout(pp=2), "phi3", []),
            (ParallelLayout(dp=2, ep=2), "mixtral", ["q_proj", "experts.gate_up_proj", "experts.down_proj"]),
        ],
    ),
    ids=str,
)
def test_base_and_adapters_are_the_merged_model(layout, family, targets, model_of):
    config, policies = layout.apply(with_adapters(model_of(family), targets)), layout.world_size
    everyone = run_processes(base_and_adapters, config, policies, free_port(), free_port(), world_size=policies + 1)
    expected, settings, (adapters, weights) = everyone[0]
    found, same_settings = everyone[policies]
    assert settings == same_settings
    assert adapters < weights / 5
    for refit in range(REFITS):
        for engine in found[refit]:
            torch.testing.assert_close(engine, expected[refit], rtol=0, atol=1e-4)
    assert not torch.allclose(expected[0][0], expected[1][0], atol=1e-3), "training changed the adapters"


def adapters_by_shared_memory(config):
    """Return the tensors of a receiver in the same process, and those of an export."""
    from mcore_rl.models.megatron.weights.adapters import export_adapters
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    policy.train(make_data(), build_loss(config))
    taken = {}
    receiver = RefitReceiver(lambda tensors: taken.update((n, t.clone()) for n, t in tensors), {})
    for keys in policy.prepare_weights_for_ipc(5_000, adapters_only=True):
        handles = policy.get_weights_ipc_handles(keys)
        if handles:
            receiver.update_weights_from_ipc_handles(handles)
    policy.sender.release()
    exported = dict(export_adapters(policy.model))
    with pytest.raises(ValueError, match=r"the model has no base_model.model.lm_head.lora_A.weight"):
        policy.get_weights_ipc_handles([*exported, "base_model.model.lm_head.lora_A.weight"])
    policy.shutdown()
    return taken, exported


def no_adapters(config):
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, total_steps=0, rows_per_unit=2)
    for call in (policy.adapter_settings, lambda: policy.prepare_refit_info(adapters_only=True)):
        with pytest.raises(RuntimeError, match="adapters: the model has no adapters"):
            call()
    policy.shutdown()


def test_adapters_by_shared_memory(model_of):
    config = ParallelLayout(tp=2, sp=True).apply(with_adapters(model_of("llama"), ["q_proj", "up_proj"]))
    taken, exported = run_processes(adapters_by_shared_memory, config, world_size=2)[0]
    assert taken.keys() == exported.keys()
    assert all(torch.equal(taken[name], tensor) for name, tensor in exported.items())
    run_processes(no_adapters, make_config(model_of("llama")), world_size=1)
