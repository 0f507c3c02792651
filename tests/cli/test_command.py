"""Tests of the `mcore-rl` command: one line and the ranks' exit status, for every end of a run."""

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib import import_module

import psutil
import pytest
import yaml
from forked_programs import run_forked
from ports import free_port
from programs import ROOT
from small_models import make_model

from mcore_rl.cli.entry_point import _shortened, _threads_spin, exit_on_error
from mcore_rl.cli.main import COMMANDS, main
from mcore_rl.cli.train import PROGRAMS
from mcore_rl.errors import Stopped
from mcore_rl.utils.checkpoint_store import CheckpointStore

COMMAND = [sys.executable, "-m", "mcore_rl"]
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    root = tmp_path_factory.mktemp("command")
    make_model("llama", root / "model")
    records = [{"prompt": f"say {i} ", "completion": "ab" * (1 + i % 5)} for i in range(7)]
    (root / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = {
        "output_dir": str(root / "out"),
        "model": {"path": str(root / "model")},
        "data": {"train": str(root / "data.jsonl"), "max_sequence_length": 48},
        "batch": {"global_batch_size": 2},
        "optimizer": {"lr": 1e-3},
        "trainer": {"max_steps": 2000, "log_interval": 1},
        "checkpoint": {"save_interval": None, "export_hf": False},
    }
    (root / "config.yaml").write_text(yaml.safe_dump(config))
    return root / "config.yaml"


def call(*arguments):
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env=ENVIRONMENT)


def forked(*arguments):
    return run_forked(["-m", "mcore_rl", *arguments], ENVIRONMENT)


@pytest.mark.parametrize(
    "threads, processes, spin",
    [
        ("2", 1, True),
        (None, 1, True),
        ("1", 4, True),
        ("2", 3, False),
        (None, 2, False),
        ("8", 1, False),
        ("0", 2, False),
    ],
)
def test_threads_spin_only_if_each_has_a_core(monkeypatch, threads, processes, spin):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4), raising=False)
    for name, value in (("OMP_NUM_THREADS", threads), ("LOCAL_WORLD_SIZE", str(processes)), ("GOMP_SPINCOUNT", None)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    with _threads_spin():
        assert ("GOMP_SPINCOUNT" in os.environ) == spin
    assert "GOMP_SPINCOUNT" not in os.environ, "child processes would spin too"


def test_processes_that_the_launcher_does_not_place_are_counted(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4), raising=False)
    for name in ("LOCAL_WORLD_SIZE", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with _threads_spin():
        assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.parametrize("name, value", [("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "passive")])
def test_the_users_setting_for_waiting_threads_is_kept(monkeypatch, name, value):
    for other in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(name, value)
    for _ in range(2):
        with _threads_spin():
            assert os.environ.get("GOMP_SPINCOUNT") == (value if name == "GOMP_SPINCOUNT" else None)
    assert os.environ[name] == value


LAUNCH = ("train", "sft", "--nproc-per-node", "2")
WRONG = [
    ([], r"mcore-rl train \{sft,dpo"),
    (
        ["trian"],
        "error: mcore-rl trian: there is no such command; the commands are train, port, convert, simulate, layouts, "
        "verify, vllm-servers, eval, chat, serve, report, schema, doctor$",
    ),
    (["train"], "error: mcore-rl train: name one of sft, dpo, rm, kto, distill, grpo"),
    (["train", "ppo2", "x"], "error: mcore-rl train ppo2: name one of sft"),
    (["train", "sft"], "error: give a configuration file, or --model and --data"),
    (["train", "sft", "--model", "nowhere"], "error: give a configuration file, or --model and --data"),
    (
        ["train", "sft", "--model", "/nowhere", "--data", "x.jsonl"],
        "error: model.path: /nowhere does not exist",
    ),
    (["train", "sft", "--model=m", "--data=d", "--output="], "error: command line: output_dir: must not be empty"),
    (
        ["train", "sft", "--model=m", "--data=[a.jsonl, ./a.jsonl]"],
        r"error: command line: data\.train: a\.jsonl and \./a\.jsonl are the same source; leave one out",
    ),
    (["train", "sft", "--model=m", "--data=[a"], r"error: override 'data\.train=\[a': '\[a' is not a YAML value"),
    (["port", "nowhere"], "error: nowhere: cannot be read"),
    (["schema"], r"error: the following arguments are required: algorithm \(mcore-rl schema --help says more\)"),
    (["schema", "ppo2"], "error: argument algorithm: invalid choice: 'ppo2'"),
    (["schema", "sft", "x"], "error: unrecognized arguments: x"),
    (["doctor", "now"], r"error: unrecognized arguments: now \(mcore-rl doctor --help says more\)"),
    (["train", "sft", "nowhere.yaml"], "error: nowhere.yaml: cannot be read"),
    (["train", "sft", "--nproc-per-node", "two", "c.yaml"], "error: Unsupported nproc_per_node value: two"),
    (["train", "sft", "--nproc-per-node", "2"], "error: give a configuration file, or --model and --data"),
    (["train", "sft", "c.yaml", "--nproc-per-node", "2"], "error: --nproc-per-node: options of the launch come first"),
    (["train", "sft", "--nodes", "2", "c.yaml"], "error: unrecognized arguments: --nodes"),
    ([*LAUNCH, "nowhere.yaml"], "error: nowhere.yaml: cannot be read"),
    (["train", "sft", "nowhere.yaml", "--dry-run", "seed=1"], "error: nowhere.yaml: cannot be read"),
    (["train", "sft", "--dry-run", "model.path=m"], "error: give a configuration file, or --model and --data"),
    (["train", "sft", "c.yaml", "--dry-run", "0"], "error: argument --dry-run: must be a whole number of at least 1"),
    (["train", "sft", "c.yaml", "--dry-run", "4x0"], "error: argument --dry-run: must be a whole number of at least 1"),
    (["train", "sft", "c.yaml", "--dry-run", "2x2x2"], "error: argument --dry-run: must be a whole number .*as 4x8"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_command_refuses_wrong_arguments_in_one_line(arguments, message):
    in_new_interpreter = arguments == ["trian"] or arguments[-2:] == ["2", "nowhere.yaml"]
    done = (call if in_new_interpreter else forked)(*arguments)
    assert done.returncode == 2
    text = (done.stderr or done.stdout).strip()
    assert re.match(message, text), text
    assert not arguments or len(text.splitlines()) == 1


def test_command_prints_a_line_for_each_key_of_another_trainer():
    keys = ["dpo.beta=1", "optimizer.learning_rate=1", "trainer.tf32=true"]
    done = forked("train", "dpo", "--model", "m", "--data", "d", "--output", "o", *keys)
    assert done.returncode == 2
    lines = sorted(done.stderr.strip().splitlines())
    assert [line.partition(";")[0] for line in lines] == [
        f"error: command line: unknown key {key.partition('=')[0]}" for key in keys
    ]


MISSED = "--nnodes 2: not all nodes have joined in time"
UNMET = [
    pytest.param("--master-port {taken}", "--master-port {taken}: another program listens on this port", id="port"),
    pytest.param(
        "--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{free} --rdzv-conf is_host=0,read_timeout=3",
        "--rdzv-endpoint 127.0.0.1:{free}: no rendezvous of torchrun answers there",
        id="endpoint",
        marks=pytest.mark.long,
    ),
    pytest.param(
        "--nnodes 2 --node-rank 1 --master-addr 127.0.0.1 --master-port {free} --rdzv-conf timeout=3",
        MISSED + " at --master-addr 127.0.0.1, --master-port {free}",
        id="first node",
        marks=pytest.mark.long,
    ),
    pytest.param(
        "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{free} --rdzv-conf join_timeout=3",
        MISSED + "; start the same command on each node",
        id="second node",
        marks=pytest.mark.long,
    ),
]


@pytest.mark.parametrize(("options", "message"), UNMET)
def test_failed_rendezvous_is_one_line(options, message, config):
    with socket.create_server(("0.0.0.0", 0)) as listener:
        ports = {"taken": listener.getsockname()[1], "free": free_port()}
        done = call("train", "sft", *options.format(**ports).split(), "--nproc-per-node", "1", config)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"error: {message.format(**ports)}") and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.long
def test_doctor_reports_no_missing_package():
    done = call("doctor")
    assert done.returncode == 0 and not done.stderr
    assert "MISSING" not in done.stdout and "MEND THIS" not in done.stdout
    for name in ("torch", "pillow"):
        assert re.search(rf"^  {name} +\d", done.stdout, re.MULTILINE)
    assert done.stdout.endswith("\na run can start\n")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_every_command_prints_its_own_help(command, option, capsys):
    try:
        main([command, option])
    except SystemExit as end:
        assert end.code == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"usage: mcore-rl {command}") and not printed.err
    assert not [other for other in COMMANDS if f"usage: mcore-rl {other}" in printed.out and other != command]


def test_page_of_commands_lists_every_command():
    rows = [line for line in (ROOT / "docs" / "commands.md").read_text().splitlines() if line.startswith("| ")]
    assert not [command for command in COMMANDS if not any(f"`mcore-rl {command}" in row for row in rows)]


def test_functions_of_all_commands_exist():
    for command in COMMANDS.values():
        module, _, name = command.function.partition(":")
        assert callable(getattr(import_module(f"mcore_rl.cli.{module}"), name))


def test_help_is_printed_without_importing_pytorch():
    code = "import sys; from mcore_rl.cli.main import usage; usage(); print({'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "set()\n"


def test_help_prints_usage_of_all_commands_and_of_programs():
    text = forked("--help").stdout
    assert text.startswith("mcore-rl train {") and all(f"mcore-rl {command}" in text for command in COMMANDS)
    text = forked("train", "--help").stdout
    assert all(f"\n    {name:<8} {program.description}\n" in text for name, program in PROGRAMS.items())
    text = forked("train", "grpo", "--help").stdout
    assert text.startswith("usage: mcore-rl train grpo ") and "--replay FILE" in text


@pytest.mark.long
def test_command_ends_without_traceback_when_its_reader_ends():
    for arguments in ("train dpo --help", "train dpo --help dpo", "schema grpo"):
        command = f"{sys.executable} -m mcore_rl {arguments} | head -n 1"
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
        assert done.stdout and not done.stderr, done.stderr


@pytest.mark.long
def test_dry_run_prints_plan_and_writes_nothing(config, tmp_path):
    done = call(
        "train",
        "sft",
        config,
        "--dry-run",
        4,
        "parallel.tensor_model_parallel_size=2",
        f"output_dir={tmp_path / 'out'}",
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "4 processes: tensor 2 x context 1 x data 2 x pipeline 1" in lines
    assert "  ranks 2–3 (tensor 0–1)      context 0  data 1  pipeline stage 0" in lines
    assert "2,000 steps, of 2 sequences" in done.stdout
    assert len([line for line in lines if re.match(r"  s a y +\d +» ?a b", line) and line.endswith("«")]) == 2
    assert len([line for line in lines if line.startswith("memory of rank 0 at the peak of a step")]) == 1
    assert lines[-1].startswith("this was a dry run: ")
    assert not (tmp_path / "out").exists()
    refused = call("train", "sft", config, "--dry-run", 3, "parallel.tensor_model_parallel_size=2")
    assert refused.returncode == 2 and "must divide the number of processes (3)" in refused.stderr


@pytest.mark.long
def test_a_dry_run_prints_layouts_and_wrong_data_before_it_imports_pytorch(config, tmp_path):
    """PyTorch takes seconds to import. Here its import ends the process with another status."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import os\nos._exit(77)\n")
    environment = {
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])),
    }

    def dry_run(*overrides):
        command = [*COMMAND, "train", "sft", config, "--dry-run", "4", *overrides]
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=90, env=environment)

    tracked = [*COMMAND, "train", "sft", str(config), "logging.wandb=project"]  # this package is not installed
    refused = subprocess.run(tracked, capture_output=True, text=True, timeout=90, env=environment)
    assert refused.returncode == 2 and "error: logging.wandb: install the wandb extra" in refused.stderr
    planned = dry_run("parallel.pipeline_model_parallel_size=2", "batch.global_batch_size=4", "logging.wandb=project")
    assert planned.returncode == 77, planned.stderr
    assert "warning: a run would be refused: logging.wandb: install the wandb extra" in planned.stdout
    assert (
        "4 processes: tensor 1 x context 1 x data 2 x pipeline 2\n  layers of the pipeline stages: 1, 1"
        in planned.stdout
    )
    for override, told in (("data.columns={completion: answer}", "answer"), ("data.train=away.jsonl", "away.jsonl")):
        refused = dry_run(override)
        assert refused.returncode == 2 and told in refused.stderr, refused.stderr


@pytest.mark.long
def test_dry_run_plans_for_a_model_directory_with_only_a_config(config, tmp_path):
    """Also for messages, although the directory has no chat template. A run needs the other files."""
    (tmp_path / "plan").mkdir()
    shutil.copy(config.parent / "model" / "config.json", tmp_path / "plan" / "config.json")
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(chat) + "\n")
    options = f"model.path={tmp_path / 'plan'}", f"data.train={tmp_path / 'chat.jsonl'}", f"output_dir={tmp_path / 'o'}"
    tp = "parallel.tensor_model_parallel_size=2"
    done = forked("train", "sft", str(config), "--dry-run", "16x4", tp, "data.max_sequence_length=48", *options)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "64 processes: tensor 2 x context 1 x data 32 x pipeline 1" in lines
    assert any(line.startswith("memory of rank 0 at the peak of a step, on a GPU: ") for line in lines)
    assert lines[-1].endswith("run mcore-rl simulate CONFIG --algorithm sft --world-size 64 --lengths 48")
    assert not (tmp_path / "o").exists()
    refused = forked("train", "sft", str(config), *options)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr


@pytest.mark.long
@pytest.mark.parametrize("processes", ["2x4", "8"])
def test_dry_run_places_servers_for_nodes_of_so_many_processes(processes, config, tmp_path):
    (tmp_path / "plan").mkdir()
    shutil.copy(config.parent / "model" / "config.json", tmp_path / "plan" / "config.json")
    values = {
        "output_dir": str(tmp_path / "o"), "model": {"path": str(tmp_path / "plan")},
        "data": {"train": str(tmp_path / "d.jsonl")}, "grpo": {"num_prompts_per_step": 8, "max_new_tokens": 8},
        "generation": {"backend": "vllm", "vllm": {"python": sys.executable, "tensor_parallel_size": 4}},
    }  # fmt: skip
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(values))
    done = forked("train", "grpo", str(tmp_path / "grpo.yaml"), "--dry-run", processes, "data.max_sequence_length=48")
    assert done.returncode == 0, done.stderr
    if processes == "2x4":
        assert "vLLM's servers on 2 nodes of 8 GPUs with 4 processes each: 2 servers" in done.stdout.splitlines()
    else:
        assert "warning: on 1 node of 8 GPUs, this run would be refused: " in done.stdout
        assert "the servers would fit: --dry-run 2x4)" in done.stdout


@pytest.mark.exhaustive
def test_dry_run_estimates_memory_in_the_precision_of_a_gpu(config, tmp_path):
    """On a machine without GPUs, too, where `model.dtype=auto` is float32."""
    peaks = []
    for dtype in ("auto", "float32"):
        options = f"model.dtype={dtype}", "batch.global_batch_size=2000", "batch.tokens_per_pack=32768"
        done = call("train", "sft", config, "--dry-run", 1, *options, f"output_dir={tmp_path / 'out'}")
        (peak,) = re.findall(r"memory of rank 0 at the peak of a step, on a GPU: ([\d.]+) GB", done.stdout)
        peaks.append(float(peak))
    assert 0 < peaks[0] < 0.8 * peaks[1], peaks


def test_dry_run_checks_the_model_in_the_precision_of_a_gpu(config, tmp_path):
    """Grouped products need widths that are multiples of 8 in bfloat16, and of 4 in float32."""
    make_model("mixtral", tmp_path / "model", intermediate_size=36)
    options = f"model.path={tmp_path / 'model'}", "model.moe_grouped_gemm=true", f"output_dir={tmp_path / 'out'}"
    done = forked("train", "sft", str(config), "--dry-run", *options)
    assert done.returncode == 2, done.stdout
    assert "in bfloat16 the model's width of an expert (36) must be a multiple of 8" in done.stderr


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is there")
def test_dry_run_estimates_fp8_without_transformer_engine(config, tmp_path):
    """A run needs its layers; the plan for a GPU does not."""
    fp8 = "model.fp8.recipe=blockwise", f"output_dir={tmp_path / 'out'}"
    done = forked("train", "sft", str(config), "--dry-run", *fp8)
    assert done.returncode == 0 and "memory of rank 0 at the peak of a step, on a GPU: " in done.stdout, done.stderr
    for options, told in (
        (
            (),
            "model.fp8: requires Transformer Engine's layers; the local layers have no FP8; Transformer Engine is not",
        ),
        (("--dry-run", "model.dtype=float32"), "model.fp8: requires model.dtype=bfloat16 on a GPU"),
        (("--dry-run", "model.fp8.first_layers=9"), "leave none of the model's"),
    ):
        refused = forked("train", "sft", str(config), *options, *fp8)
        assert refused.returncode == 2 and told in refused.stderr, refused.stderr


@pytest.mark.long
def test_train_with_two_processes_succeeds(config, tmp_path):
    arguments = ["parallel.tensor_model_parallel_size=2", f"output_dir={tmp_path / 'out'}", "trainer.max_steps=1"]
    done = call(*LAUNCH, config, *arguments)
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stdout and "step 1/1" in done.stdout
    assert not done.stderr


ENDS = [
    pytest.param("launcher", signal.SIGTERM, 143, id="Slurm ends the job", marks=pytest.mark.long),
    pytest.param("group", signal.SIGINT, 130, id="Ctrl-C", marks=pytest.mark.long),
    pytest.param("rank", signal.SIGKILL, 137, id="a rank is killed", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("who", "number", "status"), ENDS)
def test_train_ended_by_signal_prints_few_lines_and_ends_a_script(who, number, status, config, tmp_path):
    """The launcher would restart ranks that fail, but not ranks that a signal has stopped."""
    out, restarts = tmp_path / "out", [] if number == signal.SIGKILL else ["--max-restarts", "1"]
    train = [*COMMAND, *LAUNCH[:2], *restarts, *LAUNCH[2:], str(config), f"output_dir={out}"]
    command = ["bash", "-ec", '"$@"; echo the next command', "bash", *train]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    ) as process:
        try:
            for line in process.stdout:
                if line.startswith("step "):
                    break
            (launcher,) = psutil.Process(process.pid).children()
            ranks = launcher.children()
            assert len(ranks) == 2
            launcher_and_ranks = [launcher, *ranks]
            connections = [one for member in launcher_and_ranks for one in member.net_connections()]
            assert {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
            {
                "launcher": lambda: launcher.send_signal(number),
                "group": lambda: os.killpg(process.pid, number),
                "rank": lambda: ranks[1].send_signal(number),
            }[who]()
            text, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == status, text
    lines = [line for line in text.splitlines() if not line.startswith("step ")]
    saved = [path.name for path in CheckpointStore(out / "checkpoints").iterations()]
    if number == signal.SIGKILL:
        assert lines[-1] == "error: rank 1 was ended by SIGKILL", text
        assert not saved
    else:
        asked, checkpoint, summary, *_, stopped = lines
        assert summary.startswith("steps 1–")
        assert asked.startswith(f"{number.name}: finishing the step and saving")
        assert checkpoint == f"checkpoint: {out / 'checkpoints' / saved[0]}"
        assert stopped.startswith(f"stopped by {number.name} after step ")
    deadline = time.monotonic() + 10
    while any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks):
        assert time.monotonic() < deadline, "ranks are left"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("environment", "status", "written"),
    [
        ({}, 143, ""),
        ({"MCORE_RL_STATUS_FILE": "file"}, 0, "143"),
        ({"MCORE_RL_STATUS_FILE": "file", "LOCAL_RANK": "1"}, 0, ""),
        ({"TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_RESTART_COUNT": "1"}, 0, ""),
        ({"TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_RESTART_COUNT": "2"}, 143, ""),
    ],
    ids=["one process", "below the launcher", "another rank", "torchrun would restart", "last start"],
)
def test_status_of_a_stopped_run(environment, status, written, tmp_path, monkeypatch):
    def leave(status):
        raise SystemExit(status)

    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "_exit", leave)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended, exit_on_error():
        raise Stopped(signal.SIGTERM)
    assert (ended.value.code, (tmp_path / "file").read_text()) == (status, written)


def test_console_shows_no_text_of_a_header_and_beginnings_of_long_values():
    assert _shortened("environment.headers.Authorization=Bearer abc") == "environment.headers.Authorization=…"
    named = "environment.rewards.a.headers.Authorization=Bearer ${TOKEN}"
    assert _shortened(named) == named and _shortened("seed=7") == "seed=7"
    assert len(_shortened(f"data.chat_template={'x' * 5000}")) < 250


@pytest.mark.long
def test_train_without_configuration_file_uses_defaults(config, tmp_path):
    values = yaml.safe_load(config.read_text())
    arguments = ["--model", values["model"]["path"], "--data", values["data"]["train"], "trainer.max_steps=1"]
    arguments += ["data.max_sequence_length=48", "checkpoint.export_hf=false"]
    done = subprocess.run(
        [*COMMAND, "train", "sft", "--nproc-per-node", "2", *arguments],
        capture_output=True, text=True, timeout=90, env={**ENVIRONMENT, "PYTHONPATH": os.getcwd()}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second, *_ = done.stdout.splitlines()
    assert first == "command line: 2 processes; importing PyTorch and Megatron …"
    assert second.startswith("not at their defaults: output_dir=") and "  trainer.max_steps=1  " in second
    assert "optimizer." not in second, "the run sets none"
    assert len(CheckpointStore(tmp_path / "outputs" / "sft_model" / "checkpoints").iterations()) == 1
    shown = call("train", "rm", *arguments, "--output", tmp_path / "elsewhere", "--print-config").stdout
    assert shown.startswith("# Values that differ from their defaults:\n#   output_dir=")
    shown = yaml.safe_load(shown)
    assert shown["output_dir"] == str(tmp_path / "elsewhere") and shown["model"]["head"] == "reward"
    over = yaml.safe_load(call("train", "sft", config, "--model", "/other", "--print-config").stdout)
    assert over["model"]["path"] == "/other" and over["data"] == {**over["data"], **values["data"]}
