"""`python -m on_gpus GPUS HOST ARGUMENT …`: the `mcore-rl` command on a node that counts as one with GPUS GPUs and the
address HOST. Training runs on the CPU."""

import sys

from mcore_rl import platform
from mcore_rl.cli.main import main

if __name__ == "__main__":
    gpus, host = int(sys.argv[1]), sys.argv[2]
    platform.gpu_names = lambda: tuple(map(str, range(gpus)))
    from mcore_rl.models.generation.vllm import placement

    placement.local_address = lambda ip: host
    main(sys.argv[3:])
