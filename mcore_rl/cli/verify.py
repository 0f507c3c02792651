"""`mcore-rl verify`: check in less than half an hour that training works on a cluster, and measure its speed.

A part is one launch of all ranks, or several. Each launch has its own log and time limit. If a part fails, the table
shows the reason, and the next part runs. Every node runs the same command. The launches of all nodes meet by torchrun's
rendezvous; the first node writes the inputs and the results.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mcore_rl.cli import verify_part
from mcore_rl.cli.entry_point import Parser, exit_on_error, leave, with_local_models
from mcore_rl.cli.launch import nodes_and_processes, split, split_endpoint
from mcore_rl.cli.train import PROGRAMS, load_for
from mcore_rl.cli.verify_process import POLL_SECONDS, Ended, Interrupted, Signals, run_process
from mcore_rl.config import TrainingConfig
from mcore_rl.errors import UserError
from mcore_rl.report.verification import Anonymous, write_results
from mcore_rl.run.preflight import check_layout, check_lengths
from mcore_rl.testing.cluster.plan import PARTS, SHARES, CheckDirectory, Plan, dpo_config
from mcore_rl.testing.cluster.verdicts import (
    FAILED,
    LEFT_OUT,
    NO_TIME,
    NO_TIME_STATUS,
    NOT_RUN,
    PASSED,
    TABLE_HEADER,
    Outcome,
    judge_part,
    table_row,
)
from mcore_rl.utils import torchrun
from mcore_rl.utils.console import counted, quiet_libraries
from mcore_rl.utils.model_directory import check_model_directory

AT_ONCE = 5
"""Layouts that a launch of the part `layouts` compares."""
NUMBERS = {"nodes": 0, "collectives": 1, "refit": 2, "resume": 3, "speed": 6, "grpo": 7, "layouts": 8}
"""Offsets of the ports of launches by the start of their names. A number at the end of a name is added."""
MEETING_PORT, C10D_PORT = 29500, 29400
"""torchrun's default ports, of --master-port and of --rdzv-endpoint."""
PAIRS_OF_REPLICA = 16
"""Pairs of each replica in a step of the part `speed`; four pairs fill a pack."""
LEAST_SECONDS = 1.0
"""A launch with less time than this is not started."""
PREPARATION_SHARE = 0.2
"""Part of the time after which the preparation is ended."""


@dataclass
class Nodes:
    """The nodes of a check, and the rendezvous of its launches.

    number: number of this node.
    options: torchrun's options, as the user gave them.
    """

    count: int
    per_node: int
    options: Sequence[str]
    parsed: argparse.Namespace
    number: int = 0
    described: list[dict[str, Any]] = field(default_factory=list)

    def options_of_launch(self, name: str, per_node: int | None = None) -> list[str]:
        """Return torchrun's options for the launch `name`, which has a separate rendezvous id and port.

        A node may start a launch before another node has ended the previous launch. With the same port, it would join
        the previous launch. The port depends only on the name, so nodes may have started different numbers of launches.
        """
        kind, _, first = name.partition("_")
        number, parsed = NUMBERS[kind] + int(first or 0), self.parsed
        own = [*_without_processes(self.options), "--nproc-per-node", str(per_node or self.per_node)]
        if self.count == 1:
            return own
        own += ["--rdzv-id", f"{parsed.rdzv_id}-{name}"]
        if parsed.rdzv_backend == "static" and not parsed.rdzv_endpoint:
            return [*own, "--master-port", str((parsed.master_port or MEETING_PORT) + number)]
        host, port = split_endpoint(parsed.rdzv_endpoint, C10D_PORT)
        return [*own, "--rdzv-endpoint", f"{host}:{port + number}"]

    @property
    def addresses(self) -> list[str]:
        """Hosts that torchrun's options name."""
        parsed = self.parsed
        hosts = split_endpoint(parsed.rdzv_endpoint, C10D_PORT)[0], parsed.master_addr, parsed.local_addr
        return [host.strip("[]") for host in hosts if host]


def _without_processes(options: Sequence[str]) -> Iterator[str]:
    """Yield torchrun's options without the number of processes."""
    words = iter(options)
    for word in words:
        name, separator, _ = word.replace("_", "-").partition("=")
        if name != "--nproc-per-node":
            yield word
        elif not separator:
            next(words)


def verify(arguments: Sequence[str], prog: str) -> None:
    """Run `mcore-rl verify ARGUMENTS`, and exit.

    The exit status is 0 if all parts have passed, 1 if one has failed or none has run, 2 after a user's error, 4 if
    none has failed but there was no time for some, and 128 plus the number of a signal that ended the check.
    """
    options, words = split(arguments)
    late = [word for word in words if word.startswith("--n") and split([word])[0]]
    if late:
        leave(2, f"{late[0]}: options of the launch come first: {prog} {late[0]} … CONFIG")
    parsed = _parser(prog).parse_intermixed_args(words)
    if torchrun.is_launched():
        leave(2, f"{prog} launches its own processes: run it without torchrun, with torchrun's options")
    quiet_libraries()
    with exit_on_error():
        try:
            with closing(CheckDirectory(parsed.output.resolve())) as directory:
                status = _begin(parsed, options, directory).run()
        except Interrupted as error:
            leave(128 + error.number, f"ended by {error}")
    sys.exit(status)


def _parser(prog: str) -> Parser:
    parts = "; ".join(f"{name}: {purpose}" for name, purpose in PARTS.items())
    parser = Parser(prog=prog, description=f"Check a cluster. Parts: {parts}.")
    parser.add_argument("words", nargs="*", metavar="CONFIG section.key=value", help="use this model and layout")
    parser.add_argument("--algorithm", choices=PROGRAMS, default="dpo", help="algorithm of CONFIG (default: dpo)")
    parser.add_argument("--output", type=Path, default=Path("outputs/verify"), help="directory of all results")
    parser.add_argument("--only", metavar="PART,PART", help=f"run only these parts of {','.join(PARTS)}")
    parser.add_argument("--minutes", type=_minutes, default=30.0, help="end after so many minutes (default: 30)")
    return parser


def _minutes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text[:80]!r}")
    return number


def _begin(parsed: argparse.Namespace, options: Sequence[str], directory: CheckDirectory) -> Check:
    """Check everything that can be checked before a launch, and claim the output directory; return the check.

    Raises:
        UserError: the command, the configuration or the output directory is wrong, or a node lacks something.
    """
    started = time.monotonic()
    chosen = list(PARTS) if parsed.only is None else parsed.only.split(",")
    if unknown := [part for part in chosen if part not in PARTS]:
        raise UserError(f"--only {parsed.only}: unknown part {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    count, per_node, launched = nodes_and_processes(options)
    nodes = Nodes(count, per_node, options, launched)
    config = _given(parsed)
    signals = Signals()  # only now: until here, a signal ends this program at once, even in a download

    from mcore_rl.testing.cluster.nodes import describe_node

    own = describe_node()
    shares_gpus = config is not None and config.parallel.backend == "host"
    if own["gpus"] and not shares_gpus and per_node > len(own["gpus"]):
        raise UserError(
            f"--nproc-per-node {per_node}: this node has only {len(own['gpus'])} GPUs, and each process needs one"
        )
    if count == 1:
        directory.claim()
        nodes.described = [own]
    else:
        _meet(nodes, directory, 60 * parsed.minutes * PREPARATION_SHARE, signals)
    plan = _plan(config, nodes, directory.path, parsed.minutes)
    deadline = started + 60 * parsed.minutes
    return Check(plan, nodes, [part for part in PARTS if part in chosen], deadline, signals)


def _given(parsed: argparse.Namespace) -> TrainingConfig | None:
    """Return the given configuration, with local models; None if no file is given."""
    words = list(parsed.words)
    if not words:
        return None
    if "=" in words[0] and not Path(words[0]).is_file():
        raise UserError(f"{words[0]}: changes a key of a configuration; name the file first")
    # A check reads no data of the user's, so the configuration may lack data.train.
    config = with_local_models(load_for(parsed.algorithm, words[0], ["data.train=not read", *words[1:]]))
    check_model_directory(config.model.path)
    return config


def _meet(nodes: Nodes, directory: CheckDirectory, seconds: float, signals: Signals) -> None:
    """Let all nodes compare themselves, in a launch of one process on each node; claim the directory on the first."""
    from mcore_rl.testing.cluster.nodes import answer_claim

    def polled() -> bool:
        answer_claim(directory, answer)
        return False

    with tempfile.TemporaryDirectory() as own:
        answer, log = Path(own) / "answer", Path(own) / "log"
        words = ["nodes", str(directory.path), str(seconds), str(answer)]
        command = ["-m", verify_part.MODULE, *nodes.options_of_launch("nodes", per_node=1), *words]
        print(f"waiting for {nodes.count} nodes …", flush=True)
        ended = run_process(command, log, seconds, signals, is_over=polled)
        if ended.status != 0:
            raise UserError(f"--nnodes {nodes.count}: the nodes do not meet: {ended.reason}")
        found = json.loads(answer.read_text())
    if found["problem"]:
        raise UserError(found["problem"])
    nodes.number, nodes.described = found["node"], found["nodes"]


def _plan(config: TrainingConfig | None, nodes: Nodes, output: Path, minutes: float) -> Plan:
    """Return the plan of the check."""
    gpus = nodes.described[0]["gpus"]
    plan = Plan(
        directory=output,
        nodes=nodes.count,
        per_node=nodes.per_node,
        gpu_gib=min(node["gpu_gib"] for node in nodes.described),
        gpu=gpus[0] if gpus else "",
        collective_seconds=max(20, min(120, round(4 * minutes))),
    )
    if config is None:
        return plan
    from mcore_rl.platform import initialize_platform

    initialize_platform()
    from mcore_rl.simulation.search import experts_of

    model = {**config.model.model_dump(mode="json"), "head": "lm"}
    plan = replace(plan, model=model, has_experts=experts_of(config) > 1, backend=config.parallel.backend)
    try:
        check_layout(config, plan.world_size)
        check_lengths(config)
    except UserError as error:
        return replace(plan, note=f"measured with the check's own model and layout: {error}")
    return replace(plan, speed=_speed_values(config, plan))


def _speed_values(config: TrainingConfig, plan: Plan) -> dict[str, Any]:
    """Return the configuration of DPO steps with the model, layout, optimizer and packs of `config`."""
    sections: dict[str, Any] = {
        "model": {**config.model.model_dump(mode="json"), "head": "lm"},
        "parallel": config.parallel.model_dump(mode="json"),
        "optimizer": config.optimizer.model_dump(mode="json", exclude_unset=True),
        "data": {"train": "not read", "max_sequence_length": config.data.max_sequence_length},
        "batch": {"global_batch_size": PAIRS_OF_REPLICA * config.parallel.data_parallel_size(plan.world_size)},
        "dpo": {"reference": "precompute"},
        "output_dir": str(plan.directory / "speed"),
    }
    least = dpo_config(plan, plan.first_layout, "auto", **sections).pack_width(rows_per_unit=2)
    sections["batch"]["tokens_per_pack"] = max(config.batch.tokens_per_pack or 0, least)
    return dpo_config(plan, plan.first_layout, "auto", **sections).model_dump(mode="json", exclude_unset=True)


@dataclass
class Check:
    """A check of a cluster, as this node runs it.

    deadline: time of `time.monotonic` at which the check ends.
    missing: files of results that could not be written at the last attempt.
    """

    plan: Plan
    nodes: Nodes
    parts: Sequence[str]
    deadline: float
    signals: Signals
    outcomes: list[Outcome] = field(default_factory=list)
    launches: list[dict[str, Any]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    missing: list[str] = field(default_factory=list)

    def run(self) -> int:
        """Run all parts, print the table, and write the results; return the exit status.

        Raises:
            Interrupted: this program has received a signal. The results so far are written.
        """
        print(self._title(), flush=True)
        (self.plan.directory / "logs").mkdir(exist_ok=True)
        try:
            print(TABLE_HEADER, flush=True)
            try:
                problem = self._prepare()
            except OSError as error:
                problem = f"the output directory cannot be written ({error.strerror})"
            if problem:
                self.outcomes.append(Outcome("inputs", FAILED, problem))
                print(table_row(self.outcomes[-1]), flush=True)
            for place, part in enumerate([] if problem else self.parts):
                share = SHARES[part] / sum(SHARES[later] for later in self.parts[place:])
                limit = share * (self.deadline - time.monotonic())
                self.outcomes.append(self._run_part(part, limit))
                print(table_row(self.outcomes[-1]), flush=True)
                self._write()
        except Interrupted:
            with suppress(OSError):
                self._end_of_node(self.nodes.number).touch()
            raise
        finally:
            self._write()
        return self._finish()

    def _title(self) -> str:
        device = f"{self.plan.gpu or 'CPU'}, {self.plan.collective_backend.replace('nccl', 'NCCL')}"
        nodes = f"{self.plan.nodes} nodes of {self.plan.per_node}" if self.plan.nodes > 1 else "1 node"
        processes = counted(self.plan.world_size, "process", "processes")
        return f"{processes} ({nodes}; {device}); results in {self.plan.directory}"

    def _prepare(self) -> str:
        """Write the inputs, on the first node, or wait until it has written them; return why this failed, or ""."""
        limit = PREPARATION_SHARE * (self.deadline - time.monotonic())
        if self.nodes.number > 0:
            return self._wait_for_inputs(limit)
        self.plan.write()
        ended = self._start("prepare", ["-m", verify_part.MODULE, "prepare", str(self.plan.directory)], limit)
        if ended.status == 0:
            self._ready.touch()
        return ended.reason

    @property
    def _ready(self) -> Path:
        """File that the first node creates after it has written the inputs."""
        return self.plan.directory / "logs" / "prepare.done"

    def _end_of_node(self, number: int) -> Path:
        """Return the file that a node creates if a signal ends its check, so that the others do not wait for it."""
        return self.plan.directory / "logs" / f"ended_{number}"

    def _ended_node(self) -> str:
        """Return which other node's check a signal has ended; "" if none."""
        others = (number for number in range(self.nodes.count) if number != self.nodes.number)
        return next((f"the check on node {number} was ended" for number in others
                     if self._end_of_node(number).exists()), "")  # fmt: skip

    def _wait_for_inputs(self, limit: float) -> str:
        ends, failed = time.monotonic() + limit, self._ready.with_name("prepare.failed_0")
        while not self._ready.exists():
            self.signals.check()
            if failed.exists() or self._ended_node() or time.monotonic() >= ends:
                return "node 0 has not made the inputs"
            time.sleep(POLL_SECONDS)
        return ""

    def _run_part(self, part: str, limit: float) -> Outcome:
        """Run a part for at most `limit` seconds; return its outcome."""
        if limit < LEAST_SECONDS:
            return Outcome(part, NO_TIME, "the time was over")
        if ended := self._ended_node():
            return Outcome(part, NOT_RUN, ended)
        if self.plan.world_size == 1 and part in ("layouts", "refit"):
            needs = "there is nothing to compare with" if part == "layouts" else "one of the processes is the engine"
            return Outcome(part, LEFT_OUT, f"needs two processes: {needs}")
        started = time.monotonic()
        run = {"layouts": self._run_layouts, "resume": self._run_resume, "speed": self._run_speed}
        try:
            problem = run.get(part, lambda limit: self._run_ranks(part, part, limit).reason)(limit)
            outcome = Outcome(part, FAILED, problem) if problem else judge_part(self.plan, part)
        except (KeyError, ValueError, IndexError, TypeError, ZeroDivisionError) as error:
            outcome = Outcome(part, FAILED, f"its results cannot be read ({type(error).__name__}: {error})")
        except OSError as error:
            outcome = Outcome(part, FAILED, f"the output directory cannot be written ({error.strerror})")
        return replace(outcome, seconds=time.monotonic() - started)

    def _run_ranks(self, name: str, part: str, limit: float, *arguments: str) -> Ended:
        """Launch all ranks of a part; return how the launch ended."""
        options = self.nodes.options_of_launch(name)
        if part in ("resume", "grpo"):  # training programs
            algorithm = "grpo" if part == "grpo" else "dpo"
            words = ["-m", "mcore_rl", "train", algorithm, *options, str(self.plan.directory / f"configs/{name}.yaml")]
            return self._start(name, words, limit)
        words = ["-m", verify_part.MODULE, *options, part, str(self.plan.directory), *arguments]
        return self._start(name, words, limit, shows_stacks=True)

    def _run_layouts(self, limit: float) -> str:
        """Compare all layouts, several in each launch. After a launch that failed, go on with the layouts after it.

        Layouts without a result afterwards had no time.
        """
        ends, numbers = time.monotonic() + limit, list(range(len(self.plan.cases)))
        while numbers and (left := ends - time.monotonic()) >= LEAST_SECONDS:
            launch = numbers[:AT_ONCE]
            ended = self._run_ranks(f"layouts_{launch[0]}", "layouts", left, *map(str, launch))
            if ended.is_cut_off:
                break
            result = self.plan.read_result("layouts")
            rows = result.get("rows", {})
            done = [number for number in launch if str(self.plan.cases[number]) in rows]
            if ended.reason or not done:
                failed = next(number for number in launch if number not in done)
                rows[str(self.plan.cases[failed])] = {"error": ended.reason or "wrote no result"}
                if self.nodes.number == 0:
                    self.plan.write_result("layouts", {**result, "rows": rows})
                done.append(failed)
            numbers = [number for number in numbers if number not in done]
        return ""

    def _run_resume(self, limit: float) -> str:
        """Run the uninterrupted run, then a run that resumes from its checkpoint."""
        ends = time.monotonic() + limit
        first = self._run_ranks("resume_1", "resume", limit * 0.6).reason
        if first:
            return f"before saving: {first}"
        second = self._run_ranks("resume_2", "resume", ends - time.monotonic()).reason
        return f"after resuming: {second}" if second else ""

    def _run_speed(self, limit: float) -> str:
        """Measure the steps on all ranks; simulate them on the first node."""
        ends = time.monotonic() + limit
        problem = self._run_ranks("speed", "speed", limit * 0.7).reason
        if problem or self.nodes.number > 0:
            return problem
        words = ["-m", verify_part.MODULE, "simulation", str(self.plan.directory)]
        simulated = self._start("simulation", words, ends - time.monotonic())
        return f"simulation: {simulated.reason}" if simulated.reason else ""

    def _start(self, name: str, arguments: list[str], limit: float, shows_stacks: bool = False) -> Ended:
        """Run a process of the check; note its command and its end."""
        from mcore_rl.testing.cluster.ranks import SHOWN_STACKS

        logs, own = self.plan.directory / "logs", self.nodes.number
        others = [logs / f"{name}.failed_{node}" for node in range(self.nodes.count) if node != own]
        ended = run_process(
            arguments,
            logs / (f"{name}.log" if own == 0 else f"{name}.node_{own}.log"),
            limit,
            self.signals,
            is_over=lambda: bool(self._ended_node()) or any(path.exists() for path in others),
            stack_signal=SHOWN_STACKS if shows_stacks else None,
        )
        if ended.status != 0 and self.nodes.count > 1:
            (logs / f"{name}.failed_{own}").touch()  # the other nodes' ranks need not wait for this node's
        self.launches.append({"name": name, "command": " ".join(["python", *arguments]), **asdict(ended)})
        return ended

    def _write(self) -> None:
        """Write the results so far, on the first node."""
        if self.nodes.number > 0:
            return
        hosts = [node["host"] for node in self.nodes.described]
        names = Anonymous(self.plan.directory, hosts, self.nodes.addresses)
        devices = [{"gpus": node["gpus"], "versions": node["versions"]} for node in self.nodes.described]
        failed = [outcome.part for outcome in self.outcomes if outcome.has_failed]
        bad = [launch["name"] for launch in self.launches if launch["reason"]]
        whole = {
            "program": "mcore-rl verify",
            "command": names.command(["mcore-rl", *sys.argv[1:]]),
            "processes": self.plan.world_size,
            "backend": self.plan.collective_backend,
            "nodes": devices,
            "seconds": time.monotonic() - self.started,
            "parts": [asdict(outcome) for outcome in self.outcomes],
            "launches": self.launches,
            "ends_of_logs": {name: self._end_of_log(name) for name in bad},
            "failed": failed,
        }
        try:
            problem = write_results(self.plan.directory, names.cleaned(whole))
            missing, told = ["verify.html"] if problem else [], f"verify.html cannot be written ({problem})"
        except OSError as error:
            missing, told = ["verify.json", "verify.html"], f"verify.json cannot be written ({error.strerror})"
        if missing and missing != self.missing:
            print(f"warning: {told}", file=sys.stderr, flush=True)
        self.missing = missing

    def _end_of_log(self, name: str) -> list[str]:
        """Return the last lines of a log of the first node."""
        path = self.plan.directory / "logs" / f"{name}.log"
        return path.read_text(errors="replace").splitlines()[-30:] if path.is_file() else []

    def _finish(self) -> int:
        """Print where the results are; return the exit status."""
        failed = [outcome.part for outcome in self.outcomes if outcome.has_failed]
        late = [outcome.part for outcome in self.outcomes if outcome.verdict == NO_TIME]
        if self.nodes.number == 0:
            if not failed and not late:  # with them, a failed command can be run again
                for name in ("models", "resume", "grpo", "speed"):
                    shutil.rmtree(self.plan.directory / name, ignore_errors=True)
            files = {"to send": "verify.html", "all figures": "verify.json"}
            written = [
                f"{use}: {self.plan.directory / name}" for use, name in files.items() if name not in self.missing
            ]
            print("; ".join(written) or "the results cannot be written")
        verdicts = [outcome.verdict for outcome in self.outcomes]
        passed, left_out = verdicts.count(PASSED), verdicts.count(LEFT_OUT)
        if failed:
            told = f"failed: {', '.join(failed)}; logs: {self.plan.directory / 'logs'}"
        elif late:
            told = f"no time for {', '.join(late)}: give more by --minutes"
        elif not passed:
            told = f"nothing was checked: {counted(left_out, 'part')} left out"
        elif left_out:
            told = f"{passed} of {counted(len(verdicts), 'part')} passed, {left_out} left out"
        else:
            told = "all parts passed"
        print(told, flush=True)
        if failed or "verify.json" in self.missing or not (passed or late):
            return 1
        return NO_TIME_STATUS if late else 0
