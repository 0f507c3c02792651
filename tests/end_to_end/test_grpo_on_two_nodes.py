"""Tests of runs on two nodes, which are two launchers on this machine with addresses of their own; servers are started
by their nodes. A stand-in takes vLLM's place, and writes down where it runs."""

import re

import pytest
import yaml
from ports import free_port
from programs import metrics_of
from stand_in_vllm import calls
from two_nodes import HOSTS, run_on_two_nodes
from vllm_cases import root as root
from vllm_cases import vllm_python

pytestmark = pytest.mark.long


def train_on_two_nodes(root, directory, gpus, *overrides, options=()):
    """Run four processes on two nodes of `gpus` GPUs; return what the nodes printed, the places of the servers, and
    their calls by address."""
    config = yaml.safe_load((root / "grpo.yaml").read_text())
    config["output_dir"] = str(directory / "out")
    config["generation"]["vllm"] = {"python": str(vllm_python(directory, *options)), "port": free_port()}
    (directory / "grpo.yaml").write_text(yaml.safe_dump(config))
    said = run_on_two_nodes(gpus, 2, "train", "grpo", directory / "grpo.yaml", *overrides)
    places = [tuple(line.split()) for line in (directory / "places").read_text().splitlines()]
    return said, places, {(host, port): calls(directory / f"{host}:{port}.log") for host, port, _ in places}


@pytest.mark.parametrize(
    ("gpus", "overrides", "expected", "steps"),
    [
        # Steps of a second or more go on while the servers start again, which takes about ten seconds.
        (8, ["generation.vllm.tensor_parallel_size=3"], ["2,3,4", "5,6,7"], 24),
        (2, ["generation.offload=true"], ["0", "1"], 6),  # a step waits for them
    ],
    ids=["GPUs of their own", "the GPUs of training"],
)
def test_each_node_starts_servers_on_its_gpus_and_starts_them_again(gpus, overrides, expected, steps, root, tmp_path):
    """A server of each node dies while it generates. Its node starts it again where it was, and it generates again."""
    dies = ["--die", "/mcore_rl/generate", 4, tmp_path / "died-$8"]  # one server of each node
    said, places, of_servers = train_on_two_nodes(
        root,
        tmp_path,
        gpus,
        f"trainer.max_steps={steps}",
        "grpo.num_prompts_per_step=8",
        *overrides,
        options=["--sleeps", "--seconds", 0.1, *dies],
    )
    assert [step["step"] for step in metrics_of(tmp_path / "out")] == list(range(1, steps + 1))
    first, again = places[:4], places[4:]
    assert sorted((host, devices) for host, _, devices in first) == [(h, d) for h in HOSTS for d in expected]
    assert len({place[:2] for place in first}) == 4
    assert sorted(host for host, *_ in again) == list(HOSTS) and set(again) < set(first), said
    table = [line.split() for line in said[0].splitlines() if re.match(r"  \d  ", line)]
    assert sorted((host, port, devices) for _, host, port, devices in table) == sorted(first)
    for node, host in enumerate(HOSTS):
        (port,) = [port for of_host, port, _ in again if of_host == host]
        url = f"http://{host}:{port}"
        assert f"a vLLM server has ended: {url}; it ended with status -9" in said[node]
        assert f"a vLLM server is started again: {url}" in said[node]
        assert f"a vLLM server answers again: {url}" in said[0]
        paths = [path for _, path in of_servers[host, port]]
        later = paths[paths.index("/init_weight_transfer_engine", paths.index("/mcore_rl/generate")) :]
        assert later.count("/mcore_rl/generate") > 3 and later.count("/update_weights") >= 1


@pytest.mark.exhaustive
def test_servers_that_do_not_fit_are_refused_before_they_start(root, tmp_path):
    with pytest.raises(AssertionError, match="2 nodes with 2 GPUs, 2 of them for training, 0 for servers"):
        train_on_two_nodes(root, tmp_path, 2)
    assert not (tmp_path / "places").exists()
