"""The configuration: frozen pydantic models, one per YAML section, and the loader.

`load_config(DPOConfig, "configs/dpo_cpu.yaml", ["optimizer.lr=1e-4"])` reads a file, applies
`section.key=value` overrides and answers anything wrong with one line that names the key.
"""

from mcore_rl.config.algorithms import (
    DistillationAlgorithmConfig,
    DistillationConfig,
    DPOAlgorithmConfig,
    DPOConfig,
    GRPOAlgorithmConfig,
    GRPOConfig,
    KTOConfig,
    RewardAlgorithmConfig,
    RMConfig,
    SFTConfig,
)
from mcore_rl.config.base import Section
from mcore_rl.config.checkpoint import CheckpointConfig, greatest_is_best
from mcore_rl.config.data import DataConfig, read_chat_template
from mcore_rl.config.environment import EnvironmentConfig
from mcore_rl.config.files import laid_over, read_overridable, read_yaml
from mcore_rl.config.generation import GenerationConfig, VLLMConfig
from mcore_rl.config.loading import build_config, load_config, resolved_yaml
from mcore_rl.config.model import LoRAConfig, ModelConfig, ParallelConfig
from mcore_rl.config.ppo import CriticConfig, PPOAlgorithmConfig, PPOConfig
from mcore_rl.config.rollouts import RLConfig, RolloutOptions
from mcore_rl.config.sections import (
    BatchConfig,
    LoggingConfig,
    OptimizerConfig,
    TrainerConfig,
    TrainingConfig,
)

__all__ = [
    "CriticConfig",
    "PPOAlgorithmConfig",
    "PPOConfig",
    "RLConfig",
    "RolloutOptions",
    "DPOAlgorithmConfig",
    "DPOConfig",
    "DistillationAlgorithmConfig",
    "DistillationConfig",
    "EnvironmentConfig",
    "GenerationConfig",
    "GRPOAlgorithmConfig",
    "GRPOConfig",
    "KTOConfig",
    "RewardAlgorithmConfig",
    "RMConfig",
    "SFTConfig",
    "VLLMConfig",
    "build_config",
    "greatest_is_best",
    "read_chat_template",
    "laid_over",
    "load_config",
    "read_overridable",
    "read_yaml",
    "resolved_yaml",
    "BatchConfig",
    "CheckpointConfig",
    "DataConfig",
    "LoggingConfig",
    "LoRAConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Section",
    "TrainerConfig",
    "TrainingConfig",
]
