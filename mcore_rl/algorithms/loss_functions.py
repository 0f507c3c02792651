"""NeMo RL's import path of the losses, which `mcore_rl.losses` defines."""

from mcore_rl.compat.nemo_rl.loss_functions import *  # noqa: F403
from mcore_rl.compat.nemo_rl.loss_functions import __all__ as __all__
