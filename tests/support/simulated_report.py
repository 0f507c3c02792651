"""A report without a simulation; a separate module, which a process imports quickly."""

import os
import signal
import time
from pathlib import Path

from mcore_rl.simulation.counters import Product, Transfer
from mcore_rl.simulation.step import RankReport

GRADIENTS = Transfer("reduce_scatter", (0, 1), "training", of_state=True)
WEIGHTS = Transfer("all_gather", (0, 1), "update", of_state=True)
MESSAGE = Transfer("send", (0, 2), "training")
MLP, HEAD = Product("training", "MLP", "bfloat16", 64, 64), Product("training", "LM head", "bfloat16", 64, 64)
REPORT = RankReport(
    rank=0, stage=0, parameters=1, memory={}, peak_phase="training", attention={"training": 500},
    shapes={MLP: 2000, HEAD: 1000, MLP._replace(phase="scoring"): 1000},
    kernel_bytes={}, copied_weights={}, gradient_elements={}, operands={}, launches={}, linear_weights=0,
    traffic={GRADIENTS: 40, WEIGHTS: 20, MESSAGE: 3}, calls={GRADIENTS: 4, WEIGHTS: 2, MESSAGE: 1},
    overlapped=frozenset(), host_bytes=0, host_reads={}, updates=1, packs=2, tokens=(1, 1), work=(1.0, 1.0),
    model_flops=1.0, seconds=1.0, is_mixture=False,
)  # fmt: skip


def killed_at_tp2(config, *_):
    """Replace `simulate_rank` on a machine without enough memory for one layout."""
    if config.parallel.tensor_model_parallel_size == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return REPORT


def kills_server_at_tp2(config, *_):
    """Replace `simulate_rank`: kill the process from which the simulated rank was forked."""
    if config.parallel.tensor_model_parallel_size == 2:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
        Path(os.environ["OUTLIVED"]).touch()
        os._exit(1)  # or the search would wait for this process for ever
    return REPORT
