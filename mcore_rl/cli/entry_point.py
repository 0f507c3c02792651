"""The entry point of every script: its arguments, its one-line errors and its exit status.

Under torchrun, every rank runs this code, and a user's error occurs on all ranks. Rank 0 prints the error; the other
ranks wait for torchrun to end them. torchrun also reads the error from the error file and prints it again at its end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from mcore_rl.cli.plan import describe_layouts
from mcore_rl.config import TrainingConfig, build_config, changed_values, laid_over, read_overridable, resolved_yaml
from mcore_rl.config.base import whole_number
from mcore_rl.config.schema import as_list, as_text, reference_of, section_of
from mcore_rl.errors import Stopped, TrainingError, UserError, UserErrors, is_lost_peer
from mcore_rl.run import directory, watchdog
from mcore_rl.run.converted_checkpoint import CONFIG_KEY, KEY, checkpoint_at, config_directory_of, converted
from mcore_rl.run.identity import model_directories
from mcore_rl.run.preflight import missing_trackers, preflight
from mcore_rl.utils.console import console, flush_output, print_error, quiet_libraries, rank_zero_printer
from mcore_rl.utils.model_directory import check_model_directory, check_tokenizer, download, is_hub_name
from mcore_rl.utils.packages import check_packages, import_torch
from mcore_rl.utils.torchrun import (
    error_file,
    is_launched,
    is_under_torchrun,
    launcher,
    local_rank,
    local_world_size,
    may_restart,
    processors,
    rank,
    set_world_size,
    world_size,
)

ConfigT = TypeVar("ConfigT", bound=TrainingConfig)

PEER_SECONDS = 5.0
"""Seconds that a rank waits for another rank's error before it prints its own."""

SPIN_COUNT = 10_000_000
"""Number of times that a waiting thread looks for work before it sleeps; libgomp's default is 300,000."""

LONGEST_LINE = 200
"""Largest number of characters of a `key=value` on the console; a longer one is shortened."""

STATUS_FILE = "MCORE_RL_STATUS_FILE"
"""Environment variable by which `launch` names a file to its ranks. They write the status of a stopped run to it."""

KEYS_OF_OPTIONS = {"model": "model.path", "data": "data.train", "output": "output_dir"}
"""Map from a command-line option to the configuration key that it sets. Every run needs these keys."""


class Parser(argparse.ArgumentParser):
    """Argument parser that reports an error in the arguments in a single line."""

    def error(self, message: str) -> NoReturn:
        leave(2, f"{message} ({self.prog} --help says more)")


class _Help(argparse.Action):
    """The option `--help`, which lists options and all sections' keys; `--help SECTION` explains a section's keys."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, config_type: type[TrainingConfig], help: str | None = None
    ) -> None:
        super().__init__(option_strings, dest, nargs="?", const="", metavar="SECTION", help=help)
        self.config_type = config_type

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, section: Any, option: Any = None) -> NoReturn:
        with exit_on_error():
            if section:
                show("\n".join(as_text([section_of(self.config_type, section)])).strip())
            else:
                told = "Sections of the configuration and their keys (--help SECTION explains them):"
                show("\n".join([parser.format_help(), told, *as_list(reference_of(self.config_type))]))
        sys.exit(0)


def run_script(
    algorithm: str,
    config_type: type[ConfigT],
    train: Callable[..., Any],
    description: str,
    file_options: Mapping[str, str] = {},
    arguments: Sequence[str] | None = None,
    prog: str | None = None,
) -> None:
    """Parse `[CONFIG] [--option VALUE] [section.key=value …]`, train, and exit.

    Args:
        algorithm: name of the algorithm, for the default output directory of a run without a configuration file.
        train: function that is called with the configuration and, by name, the path of each file option (None if not
            given). The device is selected before the call, so `train` may import modules that use Megatron.
        file_options: names of the options that take a path, with their help texts.
        arguments: arguments of the command line; by default, those of this process.
        prog: name of the program in messages; by default, the name of its file.

    The exit status is 0 after success, 1 after a failure with a traceback, 2 after a user's error, 3 if training cannot
    continue (one line for 2 and 3), and 128 + N if signal N ended the run first. torchrun turns all but 0 into 1.
    """
    parser = Parser(prog=prog, description=description, add_help=False)
    words = "a YAML file, and overrides of its values; without a file at least --model and --data"
    parser.add_argument("words", nargs="*", metavar="CONFIG section.key=value", help=words)
    for option, key in KEYS_OF_OPTIONS.items():
        parser.add_argument(f"--{option}", metavar="PATH", help=f"the same as {key}=PATH")
    parser.add_argument("-h", "--help", action=_Help, config_type=config_type, help="print this help, or a section's")
    dry_run = "check all inputs, print the plan for N processes, and stop; 4x8: for 4 nodes with 8 processes each"
    parser.add_argument("--dry-run", nargs="?", type=_planned, const=_Planned(world_size()), metavar="N", help=dry_run)
    shown = "print the changed values, then every value, and stop"
    parser.add_argument("--print-config", action="store_true", help=shown)
    for name, purpose in file_options.items():
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=purpose)
    parsed = parser.parse_intermixed_args(_with_processes(sys.argv[1:] if arguments is None else arguments))
    paths = {name: getattr(parsed, name) for name in file_options}
    with exit_on_error():
        config, source = _configuration(algorithm, config_type, parsed)
        if parsed.dry_run and not is_launched():
            set_world_size(parsed.dry_run.processes)
        if parsed.print_config:
            show(_printed(config))
            return
        config = with_local_models(config)
        preflight(config, world_size(), paths)
        check_packages()
        _announce(config, source)
        quiet_libraries()
        with _threads_spin():
            import_torch()
            from mcore_rl.platform import initialize_platform, resolve

        initialize_platform()
        if config.dry_run:
            from mcore_rl.cli.dry_run import run_dry  # imports the simulator, which training does not need

            run_dry(config, **paths, per_node=_processes_of_each_node(parsed.dry_run))
        else:
            train(resolve(config), **paths)
        flush_output()


@contextmanager
def _threads_spin() -> Iterator[None]:
    """Context in which to import PyTorch, so that its threads spin (wait in a loop) for 10 ms before they sleep.

    Waking a thread takes longer than many operations of a training step. The threads spin only if this machine has a
    core for each thread of its processes, and the user has set neither GOMP_SPINCOUNT nor OMP_WAIT_POLICY. PyTorch
    reads the setting when it is imported. Afterwards the setting is removed, so that child processes, such as vLLM's
    servers, do not inherit it.
    """
    cores, threads = processors(), os.environ.get("OMP_NUM_THREADS", "")
    # Without a number, or with 0, PyTorch uses all cores.
    fits = local_world_size() * ((int(threads) if threads.isdecimal() else 0) or cores) <= cores
    if not fits or not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}.isdisjoint(os.environ):
        yield
        return
    os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    try:
        yield
    finally:
        del os.environ["GOMP_SPINCOUNT"]


class _Planned(NamedTuple):
    """The processes of a dry run: the number of all, and that of each node; None if it is not known."""

    processes: int
    per_node: int | None = None


def _planned(text: str) -> _Planned:
    """Parse the argument of `--dry-run`: N processes, or NODESxN."""
    numbers = [whole_number(part) for part in text.split("x")]
    match numbers:
        case [int(processes)] if processes:
            return _Planned(processes)
        case [int(nodes), int(per_node)] if nodes and per_node:
            return _Planned(nodes * per_node, per_node)
    raise argparse.ArgumentTypeError(
        f"must be a whole number of at least 1, or nodes and processes of each such as 4x8, got {text[:80]!r}"
    )


def _processes_of_each_node(planned: _Planned | None) -> int | None:
    """Return the number of processes of each node if torchrun or the argument of `--dry-run` tells it."""
    if is_under_torchrun():
        return local_world_size()
    return None if planned is None else planned.per_node


def _with_processes(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, with `--dry-run=N` in place of a `--dry-run` before a configuration file or an override.

    N is the number of processes. Otherwise argparse would take the file or the override for N.
    """
    words = list(arguments)
    for place, after in enumerate(words[1:]):
        if words[place] == "--dry-run" and ("=" in after or Path(after).is_file()):
            words[place] = f"--dry-run={world_size()}"
    return words


def _printed(config: TrainingConfig) -> str:
    """Return the configuration as YAML, after comments that list the values that differ from their defaults."""
    changed = "".join(f"#   {line}\n" for line in changed_values(config))
    return f"# Values that differ from their defaults:\n{changed}\n{resolved_yaml(config).rstrip()}"


def _announce(config: TrainingConfig, source: str) -> None:
    """Print `source` (the file of the configuration), the number of processes, and the values that are not defaults.

    For a dry run, also describe the parallel layouts, and warn of trackers that a run would refuse.
    """
    if rank() == 0:
        processes = "1 process" if world_size() == 1 else f"{world_size()} processes"
        console.print(f"{source}: {processes}; importing PyTorch and Megatron …", markup=False)
        console.print(f"not at their defaults: {'  '.join(map(_shortened, changed_values(config)))}", markup=False)
        if config.dry_run:
            missing = (f"warning: a run would be refused: {problem}" for problem in missing_trackers(config))
            for line in (*missing, *describe_layouts(config, world_size())):
                console.print(line, markup=False)


def _shortened(line: str) -> str:
    """Return the `key=value` in `line` as the console shows it: long values are shortened, and headers hidden."""
    key, _, value = line.partition("=")
    if ".headers." in key and "${" not in value:
        return f"{key}=…"
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}…"


def _configuration(algorithm: str, config_type: type[ConfigT], parsed: argparse.Namespace) -> tuple[ConfigT, str]:
    """Return the configuration that the command line gives, and its source: the file's path, or "command line"."""
    words = list(parsed.words)
    path = words.pop(0) if words and ("=" not in words[0] or Path(words[0]).is_file()) else None
    options = {key: getattr(parsed, option) for option, key in KEYS_OF_OPTIONS.items()}
    if str(options["data.train"]).startswith("["):  # a list of sources, written as in an override
        words.insert(0, f"data.train={options.pop('data.train')}")
    given = {key: value for key, value in options.items() if value is not None}
    values: dict[str, Any] = {"dry_run": True} if parsed.dry_run else {}
    for key, value in given.items():
        section, _, name = key.rpartition(".")
        (values.setdefault(section, {}) if section else values)[name] = value
    if path is not None:
        return build_config(config_type, laid_over(read_overridable(path), values), words, path), path
    if not {"model.path", "data.train"} <= {*given, *(word.partition("=")[0] for word in words)}:
        raise UserError("give a configuration file, or --model and --data (see --help)")
    if "output_dir" not in given:  # default for runs without a file; overrides come later
        named = given.get("model.path") or next(w for w in reversed(words) if w.startswith("model.path="))[11:]
        model = Path(named).resolve().name if Path(named).exists() else Path(named).name
        values["output_dir"] = f"outputs/{algorithm}_{model}"
    return build_config(config_type, values, words, "command line"), "command line"


def with_local_models(config: ConfigT, with_weights: bool = True) -> ConfigT:
    """Return `config` with model directories in place of names on the hub and of checkpoints.

    Models of the hub are downloaded to its cache. The checkpoint that `model.path` names is converted.

    Args:
        with_weights: whether the weights are needed too.

    Raises:
        UserError: a model cannot be downloaded, or a checkpoint cannot be converted.
    """
    named = {key: path for key, path in model_directories(config).items() if is_hub_name(path)}
    paths: dict[str, Path | None] = {key: download(str(path), key, with_weights) for key, path in named.items()}
    if (directory := _made_from_checkpoint(config, with_weights)) is not None:
        paths |= {KEY: directory, CONFIG_KEY: None}
    if not paths:
        return config
    values = config.model_dump(mode="json", exclude_unset=True)
    return build_config(
        type(config), values, [f"{key}={json.dumps(path and str(path))}" for key, path in paths.items()], ""
    )


def _made_from_checkpoint(config: TrainingConfig, with_weights: bool) -> Path | None:
    """Return the model directory for the checkpoint that `model.path` names; None if it names none.

    Raises:
        UserError: the checkpoint cannot be converted; or `model.config_path` is set without a checkpoint.
    """
    model = config.model
    if (checkpoint := checkpoint_at(model.path)) is None:
        if model.config_path is not None:
            raise UserError(f"{CONFIG_KEY}: is only for checkpoints, and model.path={model.path} is none")
        return None
    directory = config_directory_of(checkpoint, model.config_path)
    if is_hub_name(directory):
        directory = download(str(directory), CONFIG_KEY, with_weights=False)
    check_model_directory(directory, CONFIG_KEY)
    check_tokenizer(directory)
    return converted(checkpoint, directory, rank_zero_printer(local_rank() == 0)) if with_weights else directory


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Context that ends the process, with a message and an exit status, if an error is raised in it."""
    launcher()  # remembers its process id while it still runs
    try:
        yield
    except UserErrors as error:
        leave(2, error.lines)
    except UserError as error:
        leave(2, str(error))
    except TrainingError as error:
        leave(3, str(error))
    except Stopped as stop:
        _leave_stopped(stop)
    except KeyboardInterrupt:
        leave(130, "interrupted")
    except Exception as error:
        text = traceback.format_exc()
        leave(1, text + watchdog.explain(error, text), lost_peer=is_lost_peer(error))


def show(text: str) -> None:
    """Print `text`; if the reader has closed the pipe (`| head`), end the process without an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os._exit(0)


def count(text: str) -> int:
    """Parse an argument that is an integer of at least 1."""
    number = whole_number(text)
    if not number:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text[:80]!r}")
    return number


def leave(status: int, message: str | Sequence[str], lost_peer: bool = False) -> NoReturn:
    """Print a message and end this process at once; an orderly end would hang in collectives with other ranks.

    Args:
        status: exit status; a message with status 1 is a traceback.
        message: text that is printed in one line, or several such texts, each with a line of its own.
        lost_peer: whether another rank has probably failed first. If so, this rank waits for torchrun to end
            it, so that only the other rank prints an error.
    """
    directory.release()
    messages = [message] if isinstance(message, str) else message
    one_line_each = (f"error: {' '.join(text.split())}" for text in messages)
    line = "\n".join(messages if status == 1 else one_line_each)
    flush_output()
    if lost_peer or (rank() > 0 and status != 1):
        _wait_to_be_ended()
    _write_error_file(line)
    named = rank() > 0 or (status == 1 and is_launched())
    print_error(f"[rank {rank()}] {line}" if named else line)
    os._exit(status)


def _leave_stopped(stop: Stopped) -> NoReturn:
    """End this process, whose run a signal has stopped, with the status of `stop`.

    torchrun regards another status than 0 as a failure: it ends the node's other ranks, and with --max-restarts it
    starts all ranks again. So the status is 0 if torchrun would restart them. It is also 0 below `launch`, which reads
    the run's status from a file.
    """
    flush_output()
    if file := os.environ.get(STATUS_FILE):
        if local_rank() == 0:
            Path(file).write_text(str(stop.status))
        os._exit(0)
    if may_restart():
        os._exit(0)
    if rank() > 0:
        _wait_to_be_ended()
    _write_error_file(str(stop))
    os._exit(stop.status)


def _wait_to_be_ended() -> None:
    """Wait until torchrun ends this process, as it ends all ranks after the first failure."""
    if is_under_torchrun():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(PEER_SECONDS)


def _write_error_file(line: str) -> None:
    """Write `line` to the error file of `torch.distributed.elastic`, which torchrun includes in its last report."""
    if path := error_file():
        told = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(int(time.time()))}}
        path.write_text(json.dumps({"message": told}))
