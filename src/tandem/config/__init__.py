"""Typed, frozen run configuration: sections, loading from YAML with overrides, cross-field checks.

Nothing here imports torch; a component is handed its own section, never the root.
"""

from tandem.config.load import load_config, resolve_recipe, to_yaml
from tandem.config.resume import RESUMABLE_CHANGES, check_resume
from tandem.config.schema import (
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    InferenceConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RewardConfig,
    RLConfig,
    RolloutConfig,
    Root,
    RunConfig,
    SFTConfig,
    SFTStageConfig,
    TinyModelConfig,
    TrackingConfig,
    TrainConfig,
)

__all__ = [
    "RESUMABLE_CHANGES",
    "AlgorithmConfig",
    "CheckpointConfig",
    "DataConfig",
    "EvalConfig",
    "InferenceConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RLConfig",
    "RewardConfig",
    "RolloutConfig",
    "Root",
    "RunConfig",
    "SFTConfig",
    "SFTStageConfig",
    "TinyModelConfig",
    "TrackingConfig",
    "TrainConfig",
    "check_resume",
    "load_config",
    "resolve_recipe",
    "to_yaml",
]
