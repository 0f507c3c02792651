"""`name_gpus`: a function that each process of a Ray cluster calls at its start, so that Ray's GPUs, which are only
numbers here, count as this process's GPUs. Training runs on the CPU."""

import os

from mcore_rl import platform


def name_gpus():
    platform.gpu_names = lambda: tuple(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
