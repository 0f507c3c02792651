"""The command `mcore-rl serve`: a model behind an endpoint that speaks OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mcore_rl.cli.entry_point import Parser, exit_on_error, with_local_models
from mcore_rl.cli.launch import run_launched
from mcore_rl.config.base import whole_number
from mcore_rl.errors import Stopped, TrainingError, UserError
from mcore_rl.serving.client import KEY_VARIABLE, is_loopback
from mcore_rl.serving.model_source import ModelSource, find_model
from mcore_rl.utils import torchrun
from mcore_rl.utils.console import console, quiet_libraries

DESCRIPTION = (
    "Serve a model behind an endpoint that speaks OpenAI's and Anthropic's APIs, until the command is stopped."
)
EPILOG = """\
MODEL is a model directory or a name on the hub, the output_dir of a run, a checkpoint, or a PEFT directory. Options of
torchrun, such as --nproc-per-node 2, come first; parallel.tensor_model_parallel_size=2 then divides the model.
generation.backend=vllm samples with vLLM's servers. The API key is the environment variable MCORE_RL_API_KEY."""
POLL_SECONDS = 0.1
CHECKPOINT_HELP = "weights of a run: of its newest checkpoint, of its best one, or its directory hf"


def port(text: str) -> int:
    """Parse a port; 0 lets the system choose one."""
    number = whole_number(text)
    if number is None or not 0 <= number < 2**16:
        raise argparse.ArgumentTypeError(f"must be a port from 0 to 65535, got {text[:80]!r}")
    return number


def serve(arguments: Sequence[str], prog: str) -> None:
    """Run `mcore-rl serve` on this rank."""
    parser = Parser(prog=prog, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("model", metavar="MODEL", help="what to serve")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes of the configuration")
    parser.add_argument("--host", default="127.0.0.1", help="address (127.0.0.1, which only this machine reaches)")
    parser.add_argument("--port", type=port, default=8000, help="port (8000); 0: any free port")
    parser.add_argument("--name", help="name of the model in requests and responses")
    parser.add_argument("--checkpoint", choices=("newest", "best", "hf"), help=CHECKPOINT_HELP)
    parsed = parser.parse_intermixed_args(run_launched(["serve"], arguments))
    with exit_on_error():
        # Log-probabilities are over all rows of the LM head, as other programs compute them.
        values: dict[str, Any] = {"environment": {}, "grpo": {"sample_unused_ids": True}}
        source = find_model(parsed.model, parsed.overrides, values, parsed.checkpoint)
        key = check_address(parsed.host)
        serve_model(source, parsed.host, parsed.port, parsed.name or source.name, key)


def check_address(host: str) -> str | None:
    """Return the API key of the endpoint; None if it needs none.

    Raises:
        UserError: others than this machine reach the address, and there is no key.
    """
    key = os.environ.get(KEY_VARIABLE) or None
    if key is None and not is_loopback(host):
        raise UserError(f"--host {host}: others can reach this address; set the environment variable {KEY_VARIABLE}")
    return key


def serve_model(source: ModelSource, host: str, port: int, name: str, key: str | None) -> None:
    """Load a model and serve it until a signal arrives."""
    quiet_libraries()
    source = replace(source, config=with_local_models(source.config))
    if torchrun.rank() == 0:
        console.print(f"loading {source.config.model.path} …", markup=False)
    from mcore_rl.platform import initialize_platform

    initialize_platform()
    from mcore_rl.agents.server import Server
    from mcore_rl.models.generation.megatron.served_generation import ServedGeneration
    from mcore_rl.serving.endpoint import PublicEndpoint
    from mcore_rl.serving.engine import serving_engine

    with serving_engine(source) as serving:
        topology = serving.policy.topology
        own_port = port + topology.data.rank if port else 0
        ends = _Ends()

        async def listen() -> Server:
            scores = isinstance(serving.engine, ServedGeneration)
            endpoint = PublicEndpoint(serving.engine, serving.tokenizer, name, key, scores)
            try:
                return Server(endpoint, host, own_port)
            except (OSError, OverflowError) as error:
                told = error.strerror if isinstance(error, OSError) else error
                raise UserError(f"--port {own_port}: {host} cannot listen on it ({told})") from None

        async def work() -> int:
            assert server is not None, "this rank leads a replica"
            await server.start()
            print(f"serving {name} at {server.url}/v1 (page: {server.url}/)", flush=True)
            try:
                return await ends.wait(serving.is_lost)
            finally:
                await server.stop()

        server = serving.settled(listen)  # all replicas, or none
        number = serving.run(work)
    if number is not None:
        raise Stopped(number)


class _Ends:
    """Waits for SIGINT or SIGTERM, which may arrive while the main thread is in a collective, or for torchrun's end."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: None)

    async def wait(self, is_lost: Callable[[], bool]) -> int:
        """Return the number of the signal; SIGHUP if torchrun has ended.

        Args:
            is_lost: returns whether the engine can answer no request any more.

        Raises:
            TrainingError: the engine is lost.
        """
        os.set_blocking(self._reading, False)
        while True:
            with contextlib.suppress(BlockingIOError):
                return os.read(self._reading, 1)[0]
            if torchrun.is_under_torchrun() and os.getppid() != torchrun.launcher():
                return signal.SIGHUP
            if is_lost():
                raise TrainingError("no vLLM server is left")
            await asyncio.sleep(POLL_SECONDS)
