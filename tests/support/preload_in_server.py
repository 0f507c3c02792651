"""Modules that the test processes import, imported once in the server from which they are forked."""

import accelerate  # noqa: F401  # transformers imports it with the first model that it loads
import shape_checks  # noqa: F401  # before anything of the package
from small_models import FAMILIES
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

for model_type in {model_type for model_type, _ in FAMILIES.values()}:
    MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.for_model(model_type))]  # imports the family's module

from mcore_rl.platform import initialize_platform

initialize_platform()

import fork_server
import torch.distributed.checkpoint  # noqa: F401
from forked_writer import fork_writers

import mcore_rl.algorithms.distill
import mcore_rl.algorithms.dpo
import mcore_rl.algorithms.grpo
import mcore_rl.algorithms.kto
import mcore_rl.algorithms.ppo
import mcore_rl.algorithms.rm
import mcore_rl.algorithms.sft
import mcore_rl.cli.main
import mcore_rl.cli.train  # noqa: F401

fork_server.share()
fork_writers()
