"""The `mcore-rl` command: the table of its subcommands, and its usage."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from mcore_rl.cli.entry_point import exit_on_error, leave, show
from mcore_rl.cli.train import PROGRAMS
from mcore_rl.utils.packages import check_packages, import_torch


@dataclass(frozen=True)
class Command:
    """A subcommand.

    function: `module:name` of the function that runs it, in this package. It is called with the arguments and the
        command's name in messages. The module is imported when the command starts: others do not wait for it.
    usage: the forms of its arguments, one per line.
    purpose: what it does, for `mcore-rl --help`.
    needs_torch: whether the module imports PyTorch, so that the packages are checked before.
    """

    function: str
    usage: str
    purpose: str
    needs_torch: bool = False


_ALGORITHMS = ",".join(PROGRAMS)
_TRAIN = f"""\
{{{_ALGORITHMS}}} [torchrun's options] CONFIG [section.key=value …]
{{…}} [torchrun's options] --model PATH --data FILE [--output DIRECTORY] [section.key=value …]"""
_PORT = "FILE [ARGUMENT …] [--env NAME=VALUE] [--algorithm {…}] [--num-processes N] [--output FILE]"
_CONVERT = """\
to-hf CHECKPOINT DESTINATION [--model MODEL]
from-hf MODEL DESTINATION
inspect CHECKPOINT"""
_SIMULATE = "CONFIG [section.key=value …] --algorithm {…} --world-size N [--hardware NAME] [--lengths N,…] [--search]"
_LAYOUTS = "CONFIG [section.key=value …] [--algorithm {…}] [--layouts KEY=1,2 …] [--max-processes N] [--device cuda]"
_VERIFY = "[torchrun's options] [CONFIG] [section.key=value …] [--output DIRECTORY] [--only PARTS] [--minutes N]"
_EVAL = """\
[torchrun's options] MODEL --data FILE [--judge NAME …] [--samples N] [--baseline OTHER] [section.key=value …]
NAME --url URL --data FILE [--judge NAME …] [--samples N] [--baseline DIRECTORY]"""
_CHAT = "[torchrun's options] MODEL [--compare OTHER] [section.key=value …]"
_SERVE = "[torchrun's options] MODEL [--host ADDRESS] [--port N] [section.key=value …]"
_SERVERS = "CONFIG [section.key=value …] [--hosts HOST,…] [--gpus-per-node N]"

COMMANDS = {
    "train": Command("train:train_command", _TRAIN, "trains a model"),
    "port": Command("port:port_command", _PORT, "translates a configuration of TRL, verl or NeMo RL"),
    "convert": Command("convert:convert", _CONVERT, "converts checkpoints to Hugging Face's format and back"),
    "simulate": Command("simulate:simulate", _SIMULATE, "estimates memory and time of a step of any size"),
    "layouts": Command("layouts:layouts", _LAYOUTS, "compares parallel layouts with one process"),
    "verify": Command("verify:verify", _VERIFY, "checks and measures a node or a cluster", needs_torch=True),
    "vllm-servers": Command(
        "vllm_servers:vllm_servers", _SERVERS, "starts the vLLM servers of a configuration", needs_torch=True
    ),
    "eval": Command("evaluate:evaluate", _EVAL, "judges a model's responses, and compares models", needs_torch=True),
    "chat": Command("chat:chat", _CHAT, "talks to a model in the terminal"),
    "serve": Command("serve:serve", _SERVE, "serves a model by OpenAI's and Anthropic's APIs", needs_torch=True),
    "report": Command("report:report", "RUN [RUN …] [--output FILE]", "shows runs on one HTML page"),
    "schema": Command("schema:schema", "{…}", "prints the JSON schema of a configuration"),
    "doctor": Command("doctor:doctor", "", "lists the installed packages, and what must be mended"),
}
"""The subcommands by name. One whose ranks torchrun starts begins with `launch.run_launched`."""

EXAMPLES = """\
    mcore-rl train dpo configs/dpo_cpu.yaml                          one process
    mcore-rl train dpo --nproc-per-node 8 dpo.yaml optimizer.lr=1e-6 eight processes
    mcore-rl train grpo --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 grpo.yaml
    mcore-rl verify --nproc-per-node 8                               check this node in less than half an hour
    mcore-rl port FILE > dpo.yaml                                    translate a configuration
    mcore-rl report OUTPUT                                           write OUTPUT/report.html
    mcore-rl eval OUTPUT --data test.jsonl --judge math              rewards with confidence intervals
    mcore-rl chat OUTPUT --compare MODEL                             the model after and before training"""
MORE = """\
`mcore-rl COMMAND --help` explains the arguments of a command, `mcore-rl train dpo --help` the options and keys of a
training program, and `torchrun --help` the options of a launch."""


def usage() -> str:
    """Return the text of `mcore-rl --help`."""
    forms = (
        f"mcore-rl {name} {form}".rstrip() for name, command in COMMANDS.items() for form in command.usage.split("\n")
    )
    purposes = (f"    {name:<14}{command.purpose}" for name, command in COMMANDS.items())
    return "\n".join([*forms, "", *purposes, "", EXAMPLES, "", MORE])


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words in (["-h"], ["--help"]):
        show(usage())
        sys.exit(0 if words else 2)
    command = COMMANDS.get(words[0])
    if command is None:
        leave(2, f"mcore-rl {' '.join(words)}: there is no such command; the commands are {', '.join(COMMANDS)}")
    if command.needs_torch:
        with exit_on_error():
            check_packages()
            import_torch()
    module, _, name = command.function.partition(":")
    getattr(import_module(f"mcore_rl.cli.{module}"), name)(words[1:], f"mcore-rl {words[0]}")
