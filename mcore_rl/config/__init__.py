"""The configuration: frozen pydantic models, one per YAML section, and the loader.

`load_config(DPOConfig, "configs/dpo_cpu.yaml", ["optimizer.lr=1e-4"])` reads a file, applies
`section.key=value` overrides and reports every error in one line that names the key.
"""

from mcore_rl.config.algorithms import (
    DistillationAlgorithmConfig,
    DistillationConfig,
    DPOAlgorithmConfig,
    DPOConfig,
    KTOConfig,
    RewardAlgorithmConfig,
    RMConfig,
    SFTConfig,
)
from mcore_rl.config.base import Section
from mcore_rl.config.environment import EnvironmentConfig
from mcore_rl.config.load import (
    build_config,
    changed_values,
    laid_over,
    load_config,
    read_overridable,
    read_yaml,
    resolved_yaml,
)
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.rl import (
    CriticConfig,
    GenerationConfig,
    GRPOAlgorithmConfig,
    GRPOConfig,
    PPOAlgorithmConfig,
    PPOConfig,
    RLConfig,
    RolloutOptions,
    VLLMConfig,
)
from mcore_rl.config.sections import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    TrainerConfig,
    TrainingConfig,
    greatest_is_best,
    read_chat_template,
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
    "changed_values",
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
