"""Silence library messages that are not for the user."""

from __future__ import annotations

import logging
import os
import warnings


def quiet_libraries() -> None:
    """Silence messages of libraries about parts that are not used here."""
    warnings.filterwarnings("ignore", module=r"megatron\..*|torch\..*|transformers\..*")
    warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine|transformer_engine).*")
    for name in ("transformers", "datasets", "megatron", "torch.distributed", "torch.utils", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # of every rank at once
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of processes started from here
