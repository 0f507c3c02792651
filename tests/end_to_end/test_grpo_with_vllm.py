"""Tests of whole runs with stand-ins for vLLM servers, which use transformers: without vLLM, and with features that its
CPU build lacks."""

import json
import math
import re
import signal

import pytest
import torch
from ports import free_port
from stand_in_vllm import calls, serving
from vllm_cases import root as root
from vllm_cases import train, vllm_python

from mcore_rl.utils.checkpoint_store import CheckpointStore, digest_problems

pytestmark = pytest.mark.long


LAYOUTS = [
    ((), 1),
    (("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"), 2),
]
RARELY_ALONE = [pytest.param(*LAYOUTS[0], marks=pytest.mark.exhaustive), LAYOUTS[1]]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("layout", "processes"), RARELY_ALONE, ids=["one process", "TP2"])
def test_experts_are_those_that_the_server_told(layout, processes, root, tmp_path):
    """It sends tokens where no router would: the log-probabilities agree only if training sends them there too."""
    recording = tmp_path / "recording.jsonl"
    options = (f"model.path={root / 'mixture'}", "trainer.max_steps=2", *layout)
    replay = "model.moe_router_replay=true"
    with serving(root / "mixture", tmp_path, ["--experts"]) as (urls, _, _):
        _, metrics = train(root, tmp_path.name, *options, urls, replay, "--record", recording, processes=processes)
        wrong, _ = train(root, f"{tmp_path.name}_wrong", *options, urls, processes=processes, check=False)
    for step in metrics:
        assert step["token_mult_prob_error"] == pytest.approx(1, abs=1e-4)
        assert step["skipped_update"] == 0
    assert wrong.returncode and "before any update logprob_error must be 0" in wrong.stderr_text
    check_recording(recording)
    _, again = train(root, f"{tmp_path.name}_again", *options, urls, replay, "--replay", recording, processes=processes)
    for ours, theirs in zip(again, metrics, strict=True):
        assert {name: ours[name] for name in ("loss", "grad_norm")} == {
            name: theirs[name] for name in ("loss", "grad_norm")
        }


def check_recording(path):
    """Return the experts of the three sparse layers of four, at all tokens except the last of each conversation."""
    turns = set()
    for line in path.read_text().splitlines():
        for rollout in json.loads(line)["rollouts"]:
            turns.add(rollout["turns"])
            *rows, last = rollout["choices"]["routed_experts"]
            assert last == [[-1] * 3] * 3 and len(rows) + 1 == len(rollout["input_ids"])
            for position, row in enumerate(rows):
                assert row == [[(position + 3 * layer + k) % 8 for k in range(3)] for layer in (0, 2, 3)]
    assert turns == {2}


def test_a_server_that_tells_no_experts_is_named(root, tmp_path):
    options = (f"model.path={root / 'mixture'}", "model.moe_router_replay=true")
    with serving(root / "mixture", tmp_path, []) as (urls, _, _):
        process, _ = train(root, tmp_path.name, *options, urls, check=False)
    assert process.returncode == 3 and process.stderr_text.count("\n") == 1
    assert (
        "its response has no routed_experts; start the server with --enable-return-routed-experts"
        in process.stderr_text
    )


# ------------------------------------------------------------------ sampling masks


@pytest.mark.parametrize(("layout", "processes"), LAYOUTS, ids=["one process", "TP2"])
def test_training_has_the_distribution_over_the_servers_kept_tokens(layout, processes, root, tmp_path):
    """Validation samples greedily, which a server with masks has no other way for than top_k=1."""
    options = ("grpo.top_k=9", "trainer.max_steps=2", "trainer.validation_interval=2", *layout)
    validation = f"data.validation={root / 'prompts.jsonl'}"
    with serving(root / "dense", tmp_path, ["--masks"], ["--masks"]) as (urls, _, _):
        _, metrics = train(root, tmp_path.name, *options, validation, urls, processes=processes)
    trained = [line for line in metrics if "loss" in line]
    assert len(trained) == 2
    for step in trained:
        assert step["token_mult_prob_error"] == pytest.approx(1, abs=1e-4)
        assert step["kept_tokens_mean"] == 9


def test_a_server_without_the_required_masks_is_named(root, tmp_path):
    with serving(root / "dense", tmp_path, ["--masks"], []) as (urls, _, _):
        process, _ = train(root, tmp_path.name, "grpo.top_k=9", "grpo.keep_sampling_mask=true", urls, check=False)
    assert process.returncode == 2
    assert "does not run with --return-sampling-mask, but grpo.keep_sampling_mask=true needs" in process.stderr_text


# ------------------------------------------------------------------ sleep


def test_servers_sleep_while_the_policy_has_the_device(root, tmp_path):
    """Bit for bit the run without, recordings' hashes of the weights included."""
    options = ("trainer.validation_interval=2", f"data.validation={root / 'prompts.jsonl'}")
    runs = []
    for name, more in (("awake", []), ("asleep", ["generation.offload=true"])):
        recording = tmp_path / f"{name}.jsonl"
        with serving(root / "dense", tmp_path / name, ["--sleeps"], ["--sleeps"]) as (urls, _, logs):
            _, metrics = train(root, f"{tmp_path.name}_{name}", *options, urls, *more, "--record", recording)
            runs.append((comparable(metrics), weights_of(recording), [changes(log) for log in logs]))
    (awake, weights, of_awake), (asleep, same_weights, of_asleep) = runs
    assert awake == asleep and [step["step"] for step in awake] == [0, 1, 2, 3]
    assert weights == same_weights and len(set(weights)) == 3
    update = [
        "/pause?mode=keep&clear_cache=true",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/resume",
    ]
    refitted, woken = ["/wake_up", *update, "/sleep?level=1"], ["/wake_up", "/sleep?level=1"]
    # Validation at the start, with whose weights step 1 samples; step 2; validation after it, and step 3.
    assert of_asleep == [[*refitted, *woken, *refitted, *refitted, *woken]] * 2
    assert of_awake == [update * 3] * 2


def comparable(metrics):
    return [{k: v for k, v in step.items() if not k.endswith(("seconds", "per_second"))} for step in metrics]


def weights_of(recording):
    return [json.loads(line)["weights"] for line in recording.read_text().splitlines()]


ASKS = {"/health", "/v1/models", "/get_world_size", "/init_weight_transfer_engine", "/mcore_rl/generate"}


def changes(log):
    """Return the calls that change a server after the first weights; a server that is called while asleep reports
    it."""
    return [path for _, path in calls(log) if path not in ASKS and not path.startswith(("map", "block="))]


# ------------------------------------------------------------------ what dies


def ahead(root, name, urls, check=True):
    """Four steps, the answers for each asked for before the one before it is trained."""
    options = ("grpo.max_staleness=1", "trainer.max_steps=4", "loss.use_importance_sampling_correction=true")
    limit = "loss.truncated_importance_sampling_ratio=2"
    recording = root / f"{name}.jsonl"
    process, metrics = train(root, name, *options, limit, urls, "--record", recording, check=check)
    return process, metrics, recording


def check_complete(metrics, recording):
    """Every step has the samples that it is to have, once, whole, with the versions that are allowed."""
    assert [step["step"] for step in metrics] == [1, 2, 3, 4]
    for step in metrics:
        assert step["num_samples"] == 8 and step["failed_fraction"] == 0 and step["skipped_update"] == 0
        assert step["staleness_max"] <= 1 and math.isfinite(step["grad_norm"])
    entries = [json.loads(line) for line in recording.read_text().splitlines()]
    for number, entry in enumerate(entries):
        ids = [rollout["sample_id"] for rollout in entry["rollouts"]]
        assert ids == list(range(8 * number, 8 * (number + 1)))
        for rollout in entry["rollouts"]:
            assert rollout["turns"] == 2 and rollout["error"] is None
            assert sum(count for _, count in rollout["weight_versions"]) == sum(rollout["token_mask"])
            assert {version for version, _ in rollout["weight_versions"]} <= {number - 1, number}


LEFT = re.compile(r"a vLLM server is dropped: http://127.0.0.1:\d+[^\n]+")


def test_servers_that_die_ahead_of_training_lose_no_sample(root, tmp_path):
    """One server dies while it generates for a later step, one while it receives weights; the third continues alone."""
    with serving(root / "dense", tmp_path, *[deadly(tmp_path)] * 3) as (urls, processes, logs):
        process, metrics, recording = ahead(root, tmp_path.name, urls)
        ended = {
            calls(log)[-1][1]: server.wait(5) for server, log in zip(processes, logs, strict=True) if is_dead(server)
        }
        assert ended == {"/mcore_rl/generate": -signal.SIGKILL, "/update_weights": -signal.SIGKILL}
        assert len(LEFT.findall(process.stdout_text + process.stderr_text)) == 2
    check_complete(metrics, recording)


def deadly(directory):
    """Return options with which the first server that gets its ninth request dies, and of the others the first that
    receives weights for the third time.

    Sixteen answers for each of two steps are asked for at first: of three servers or two one comes to its ninth, and
    before all have answered.
    """
    answering = ["--die", "/mcore_rl/generate", "9", directory / "answering"]
    return ["--seconds", "0.02", *answering, "--die", "/update_weights", "3", directory / "updating"]


def is_dead(server):
    return server.poll() is not None


@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["", "offload"])
def test_the_only_server_may_end_between_two_steps(offload, root, tmp_path):
    """It ends while it has nothing to do, after the last answer of a step, and again after the third step."""
    (root / "ending").write_text(str(tmp_path))
    vllm = {"python": str(vllm_python(tmp_path, "--sleeps")), "port": free_port()}
    options = [f"generation.vllm={json.dumps(vllm)}", "environment.function=judging:ending", "trainer.max_steps=4"]
    process, metrics = train(root, tmp_path.name, *options, f"generation.offload={offload}")
    assert [step["step"] for step in metrics] == [1, 2, 3, 4]
    printed = process.stdout_text + process.stderr_text
    assert printed.count("a vLLM server is started again: ") == 2 and "counts as failed" not in printed
    assert len((tmp_path / "places").read_text().splitlines()) == 3


def test_the_last_server_ahead_of_training_ends_the_run(root, tmp_path):
    """The run ends with one line and status 3; trained steps are kept."""
    with serving(root / "dense", tmp_path, *[deadly(tmp_path)] * 2) as (urls, processes, _):
        process, metrics, _ = ahead(root, tmp_path.name, urls, check=False)
        assert [server.wait(5) for server in processes] == [-signal.SIGKILL] * 2
    assert process.returncode == 3
    errors = [line for line in process.stderr_text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "no vLLM server is left; the last server's failure: http://127.0.0.1:" in errors[0]
    assert [step["step"] for step in metrics] == [1, 2]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("layout", "processes"),
    [
        *(pytest.param(*layout, marks=pytest.mark.exhaustive) for layout in LAYOUTS),
        ((), 2),
    ],
    ids=["one process", "TP2", "two replicas"],
)
def test_the_last_server_of_an_offloaded_policy_loses_no_step(layout, processes, root, tmp_path):
    """Weights and optimizer are in host memory while the server, which dies in the third step, uses the device."""
    dies = ["--sleeps", "--die", "/mcore_rl/generate", "36", tmp_path / "dead"]  # 16 requests a step
    with serving(root / "dense", tmp_path, dies) as (urls, _, _):
        options = ("generation.offload=true", "checkpoint.save_interval=null", *layout)
        process, metrics = train(root, tmp_path.name, *options, urls, processes=processes, check=False)
    assert process.returncode == 3, process.stderr_text
    assert "no vLLM server is left" in process.stderr_text
    assert [step["step"] for step in metrics] == [1, 2]
    store = CheckpointStore(root / tmp_path.name / "checkpoints")
    (saved,) = store.iterations()
    assert saved.name == "iter_0000002" and digest_problems(saved) == []
    state = torch.load(saved / "common.pt", weights_only=False)["state"]
    assert state["consumed_samples"] == 4
    with serving(root / "dense", tmp_path / "again", ["--sleeps"]) as (urls, _, _):
        _, metrics = train(root, tmp_path.name, *options, urls, processes=processes)
    assert [step["step"] for step in metrics] == [1, 2, 3]
