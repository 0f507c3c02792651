"""The environment variables that judging processes are given: not the trainer's secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from mcore_rl.config import EnvironmentConfig

ALWAYS = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "PWD", "TMPDIR", "TMP", "TEMP", "TZ", "XDG_*"),
    *("LANG", "LANGUAGE", "LC_*"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_*"),
    *("OMP_*", "MKL_*", "OPENBLAS_*", "TORCH_*", "CUDA_HOME", "CUDA_PATH", "NVIDIA_VISIBLE_DEVICES"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_DATASETS_*", "HF_MODULES_CACHE"),
    *("TRANSFORMERS_*", "TOKENIZERS_*", "MCORE_RL_*", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    *("SSL_CERT_*", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
)
"""Patterns of what Python, torch, tokenizers, locales and requests to URLs need."""
SET = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""The values that every judging process gets: one thread, and no GPU."""
IN_HEADER = re.compile(r"\$\{(\w+)\}")


def judge_variables(config: EnvironmentConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a judging process.

    Args:
        environ: the trainer's environment.
    """
    patterns = (*ALWAYS, *config.environment_variables, *_in_headers(config))
    passed = {name: value for name, value in environ.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}
    return passed | SET


def _in_headers(config: EnvironmentConfig) -> Iterator[str]:
    """Yield the variables that the headers of HTTP judges name."""
    for judge in (config, *config.rewards.values()):
        for value in judge.headers.values():
            yield from IN_HEADER.findall(value)
