"""Runs on two nodes, which are two launchers on this machine with addresses and GPUs of their own."""

import os
import subprocess
import sys
from contextlib import ExitStack

from ended import kept_until_end
from ports import free_port
from programs import ROOT, SUPPORT

HOSTS = ("127.0.0.1", "127.0.0.2")


def run_on_two_nodes(gpus, each, *words, seconds=240):
    """Run `mcore-rl` with `words` by `each` processes on both nodes, which count as nodes of `gpus` GPUs; return what
    the nodes printed."""
    path = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"), str(ROOT))))
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", each]
    launch += ["--master-addr", HOSTS[0], "--master-port", free_port()]
    with ExitStack() as started:
        nodes = [
            started.enter_context(kept_until_end(subprocess.Popen(
                list(map(str, [*launch, "--node-rank", node, "-m", "on_gpus", gpus, host, *words])),
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True,
            )))
            for node, host in enumerate(HOSTS)
        ]  # fmt: skip
        said = [node.communicate(timeout=seconds)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(said)
    return said
