"""scripts/serve_vllm.py CONFIG [section.key=value …]: the vLLM servers that a GRPO configuration describes.

The servers run until this script ends. The script prints generation.vllm.urls, with which a run uses them.
"""

import contextlib
import signal
import time

from mcore_rl.cli.entry_point import Parser, exit_on_error
from mcore_rl.config import GRPOConfig, VLLMConfig, load_config
from mcore_rl.errors import TrainingError, UserError
from mcore_rl.run.preflight import check_vllm
from mcore_rl.utils.console import quiet_libraries
from mcore_rl.utils.model_directory import check_model_directory


def main() -> None:
    parser = Parser(description="Start the vLLM servers of a configuration.")
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of the file's values")
    parser.add_argument(
        "--gpus", type=int, help="start as many servers as these GPUs hold, unless a key says otherwise"
    )
    parser.add_argument("--print-urls", action="store_true", help="print the servers' addresses, and stop")
    arguments = parser.parse_intermixed_args()
    with exit_on_error():
        overrides = ["generation.backend=vllm", *arguments.overrides, "generation.vllm.urls=[]"]
        config = load_config(GRPOConfig, arguments.config, overrides)
        if arguments.gpus is not None and not any(key.startswith("generation.vllm.num_servers=") for key in overrides):
            servers = servers_on(arguments.gpus, config.generation.vllm.tensor_parallel_size)
            config = load_config(GRPOConfig, arguments.config, [f"generation.vllm.num_servers={servers}", *overrides])
        if arguments.print_urls:
            return print(urls(config.generation.vllm))
        check_model_directory(config.model.path)
        check_vllm(config)
        quiet_libraries()
        serve(config)


def servers_on(gpus: int, tensor_parallel_size: int) -> int:
    """Return the number of servers that use all GPUs; raise UserError if they cannot be divided."""
    if gpus % tensor_parallel_size:
        raise UserError(
            f"generation.vllm.tensor_parallel_size={tensor_parallel_size}: must divide the number of GPUs of the "
            f"node ({gpus}); to leave some GPUs unused, set generation.vllm.num_servers"
        )
    return gpus // tensor_parallel_size


def urls(vllm: VLLMConfig) -> str:
    """Return the override by which a run uses the servers."""
    return f"generation.vllm.urls=[{','.join(vllm.started_urls)}]"


def serve(config: GRPOConfig) -> None:
    from mcore_rl.platform import initialize_platform, resolve

    initialize_platform()
    config = resolve(config)
    from mcore_rl.config.rl import SERVER_LOGS
    from mcore_rl.models.generation.vllm.client import VLLMServer
    from mcore_rl.models.generation.vllm.generation import wait_until_ready
    from mcore_rl.models.generation.vllm.server import VLLMServerProcesses

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    deadline = time.monotonic() + config.generation.vllm.start_seconds
    with contextlib.closing(VLLMServerProcesses(config, config.output_dir / SERVER_LOGS)) as service:
        for url in service.urls:
            wait_until_ready(VLLMServer(url, connections=1), service, deadline)
        print(urls(config.generation.vllm), flush=True)
        left = set(service.urls)
        while left:
            time.sleep(1)
            for url in sorted(left):
                if reason := service.why_ended(url):
                    print(f"{url}: {reason}", flush=True)
                    service.end(url)
                    left.remove(url)
        raise TrainingError("no vLLM server is left")


if __name__ == "__main__":
    main()
