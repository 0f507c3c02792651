"""Tests of vLLM's servers under the Ray controller, on a Ray cluster of two nodes of four GPUs each. The nodes are on
this machine, and their GPUs are numbers of Ray's accounts. A stand-in takes vLLM's place and writes down where it
runs."""

import math
import os
import socket
import sys
import time

import pytest
import torch
from ports import free_port
from small_models import make_model
from stand_in_vllm import calls, wait_for
from vllm_cases import vllm_python

from mcore_rl.config import GRPOConfig, build_config
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.errors import UserError, WorkerError
from mcore_rl.testing.layout_check import ParallelLayout

pytestmark = pytest.mark.long
SECONDS = 120


@pytest.fixture(scope="module")
def cluster():
    import ray
    from ray.cluster_utils import Cluster

    environment = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # Ray would count on it
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 6, "num_gpus": 4, "include_dashboard": False})
        nodes.add_node(num_cpus=6, num_gpus=4)
        runtime = {"env_vars": environment, "worker_process_setup_hook": "ray_gpus.name_gpus"}
        ray.init(address=nodes.address, log_to_driver=False, runtime_env=runtime)
        yield nodes
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model("qwen2", tmp_path_factory.mktemp("ray") / "model", initializer_range=0.1)


def make_config(directory, model, *options, offload=False, **vllm):
    values = {
        "output_dir": str(directory / "out"),
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": "data.jsonl", "max_sequence_length": 60},
        "optimizer": {"lr": 3e-2, "schedule": "constant"},
        "parallel": {"timeout_seconds": 60},
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_new_tokens": 6},
        "environment": {"name": "exact_match"},
        "generation": {
            "backend": "vllm",
            "offload": offload,
            "vllm": {"python": str(vllm_python(directory, *options)), "port": max(free_port(), free_port()), **vllm},
        },
    }
    return build_config(GRPOConfig, values, [], "here")


def places(directory):
    path = directory / "places"
    return [tuple(line.split()) for line in path.read_text().splitlines()] if path.exists() else []


def until(reached):
    deadline = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def listens(place):
    host, port, _ = place
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0


def free_gpus():
    import ray

    return ray.available_resources().get("GPU", 0)


def prompts():
    lengths = torch.tensor([3, 5, 4, 5])
    ids = torch.randint(10, 60, (4, 5), generator=torch.Generator().manual_seed(3))
    ids[torch.arange(5) >= lengths[:, None]] = 0
    return BatchedDataDict({"input_ids": ids, "input_lengths": lengths})


def trained_on(policy, generated):
    """Make one step of supervised fine-tuning on the responses."""
    from mcore_rl.losses.common import NLLLoss

    ids, lengths = generated["output_ids"], generated["unpadded_sequence_lengths"]
    rows, width = ids.shape
    data = {"input_ids": ids, "input_lengths": lengths, "sample_mask": torch.ones(rows)}
    data["token_mask"] = (torch.arange(width) < lengths[:, None]).float()
    return policy.train(BatchedDataDict(data), NLLLoss())


def check_logprobs(policy, generated, prompts):
    """The servers' log-probabilities must be those of the policy's weights."""
    ids, lengths = generated["output_ids"], generated["unpadded_sequence_lengths"]
    scored = policy.get_logprobs(BatchedDataDict({"input_ids": ids, "input_lengths": lengths}))["logprobs"]
    position = torch.arange(ids.shape[1])
    of_response = (position >= prompts["input_lengths"][:, None]) & (position < lengths[:, None])
    assert of_response.sum() >= 4
    torch.testing.assert_close(generated["logprobs"][of_response], scored[of_response], atol=1e-4, rtol=1e-4)


def test_ray_places_servers_beside_the_ranks_and_they_get_the_weights(cluster, model, tmp_path):
    """One of the servers dies while it generates; its actor starts it again on its GPUs, and it is used again."""
    from mcore_rl.models.policy.ray_policy import Policy

    config = make_config(tmp_path, model, "--die", "/mcore_rl/generate", 3, tmp_path / "died", tensor_parallel_size=2)
    config = ParallelLayout(tp=2).apply(config)
    policy = Policy(config, 2, num_gpus_per_worker=1, total_steps=4, rows_per_unit=1)
    try:
        started = places(tmp_path)
        assert sorted(devices for *_, devices in started) == ["0,1", "2,3", "2,3"]  # ranks have 0,1 of a node
        assert len({place[:2] for place in started}) == 3
        assert free_gpus() == 0
        texts = []
        for _ in range(4):
            assert policy.prepare_for_generation()
            generated = policy.generate(prompts())
            assert policy.finish_generation()
            check_logprobs(policy, generated, prompts())
            texts.append(generated["output_ids"].tolist())
            assert math.isfinite(trained_on(policy, generated)["loss"])
            if (tmp_path / "died").exists():
                until(lambda: len(places(tmp_path)) == 4)
                wait_for("http://{}:{}".format(*places(tmp_path)[3][:2]))
        (again,) = places(tmp_path)[3:]
        assert again in started
        assert texts[0] != texts[-1]
        host, port, _ = again
        paths = [path for _, path in calls(tmp_path / f"{host}:{port}.log")]
        assert paths.count("/init_weight_transfer_engine") == 2
        assert "/mcore_rl/generate" in paths[len(paths) - paths[::-1].index("/init_weight_transfer_engine") :]
    finally:
        policy.shutdown()
    until(lambda: free_gpus() == 8 and not any(map(listens, places(tmp_path))))


@pytest.mark.parametrize(
    ("gpus", "size", "expected"),
    [(3, 1, ["0", "0"]), pytest.param(1, 2, ["0,1"], marks=pytest.mark.exhaustive)],
    ids=["two nodes", "one"],
)
def test_servers_take_turns_with_the_ranks_of_their_node(gpus, size, expected, cluster, model, tmp_path):
    """Two ranks of three GPUs are on different nodes, which both have the name of this machine. Two ranks of one GPU
    are on one node, and one server uses the GPUs of both."""
    from mcore_rl.models.policy.ray_policy import Policy

    config = make_config(tmp_path, model, "--sleeps", offload=True, tensor_parallel_size=size)
    policy = Policy(config, 2, num_gpus_per_worker=gpus, total_steps=4, rows_per_unit=1)
    try:
        assert policy.servers is None
        for _ in range(2):
            policy.prepare_for_generation()
            generated = policy.generate(prompts())
            policy.finish_generation()
            check_logprobs(policy, generated, prompts())
            trained_on(policy, generated)
        assert [devices for *_, devices in places(tmp_path)] == expected
        logs = [[path for _, path in calls(tmp_path / f"{host}:{port}.log")] for host, port, _ in places(tmp_path)]
        for paths in logs:
            assert paths.count("/finish_weight_update") == paths.count("/sleep?level=1") == 2
    finally:
        policy.shutdown()
    until(lambda: free_gpus() == 8 and not any(map(listens, places(tmp_path))))


def test_servers_that_do_not_fit_are_refused_before_a_model_is_built(cluster, tmp_path):
    """There is no model; nothing is left running."""
    from mcore_rl.models.policy.ray_policy import Policy

    message = (
        r"num_servers=3: a server needs 2 GPUs of one node, so 2 servers would fit on the nodes of the Ray cluster "
        r"\(4 GPUs, 3 of them for ranks, 4 GPUs, 0 of them for ranks\)|\(4 GPUs, 0 of them .* 4 GPUs, 3 of them"
    )
    config = make_config(tmp_path, tmp_path / "no_model", tensor_parallel_size=2, num_servers=3)
    with pytest.raises(UserError, match=message):
        Policy(config, 3, num_gpus_per_worker=1)
    config = make_config(tmp_path, tmp_path / "no_model", offload=True, tensor_parallel_size=2)
    with pytest.raises(WorkerError, match=r"UserError: generation\.vllm\.tensor_parallel_size=2: does not divide"):
        Policy(config, 3, num_gpus_per_worker=1)
    config = make_config(tmp_path, tmp_path / "no_model", devices=[1])
    with pytest.raises(UserError, match="devices: Ray chooses the GPUs of servers"):
        Policy(config, 1, num_gpus_per_worker=1)
    assert not places(tmp_path)
    until(lambda: free_gpus() == 8)


@pytest.mark.exhaustive
def test_a_server_that_does_not_start_ends_everything(cluster, model, tmp_path):
    from mcore_rl.models.policy.ray_policy import Policy

    config = make_config(tmp_path, model, "--no-such-option")
    with pytest.raises(UserError, match=r"the server http://\S+ did not start: it ended with status 2"):
        Policy(config, 1, total_steps=1)
    assert len(places(tmp_path)) == 1  # on a CPU cluster, auto is one server
    assert places(tmp_path)[0][2] in ("none", "")
    until(lambda: free_gpus() == 8)
