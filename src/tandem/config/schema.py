"""The sections of a run's configuration, one class each; cross-checks sit on the roots."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from tandem.config.reward import RewardConfig
from tandem.config.section import (
    Beta,
    Dtype,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from tandem.config.urls import check_scheme
from tandem.types import GenerationConfig

Seed = Annotated[int, Field(ge=0, lt=2**62)]
"""With room below 64 bits for the seeds that are made of it."""


class RunConfig(Section):
    """Identity of a run. Its directory is ``output_dir/name``."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    output_dir: str = "outputs"
    seed: Seed = 0
    threads: PositiveInt | None = Field(
        None, description="torch threads of the training process; None: cores minus the generator's"
    )
    stall_timeout_s: PositiveFloat = Field(
        1800.0, description="RL ends with an error when nothing at all moved for so long"
    )


class LoraConfig(Section):
    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    dropout: Fraction = 0.0
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    adapter_path: str | None = None


class TinyModelConfig(Section):
    """A model built from a config, with a character tokenizer over ``alphabet``."""

    architecture: Literal["qwen3", "llama"] = "qwen3"
    alphabet: str = "0123456789abcdefghijklmnopqrstuvwxyz ?=+-*/.,:;()<>\n"
    hidden_size: PositiveInt = 128
    num_layers: PositiveInt = 4
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt = 2
    intermediate_size: PositiveInt = 384
    max_position: PositiveInt = 512


class ModelConfig(Section):
    """Where the model comes from: a Hugging Face directory, or ``tiny``, built from a config."""

    path: str | None = None
    tiny: TinyModelConfig | None = None
    tokenizer_path: str | None = None
    lora: LoraConfig | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.tiny is None):
            raise ValueError("give exactly one of model.path and model.tiny")
        return self


class OptimizerConfig(Section):
    lr: NonNegativeFloat = 1e-5
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] | None = Field(
        1.0, description="None or inf: no clipping; 0, negative and NaN are errors"
    )
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    min_lr_ratio: Fraction = 0.0
    restart_schedule: bool = Field(
        False, description="a resume with true begins the schedule anew; weights and state go on"
    )
    max_skipped_in_row: PositiveInt = Field(
        10, description="non-finite steps in a row before TrainingDiverged"
    )

    @field_validator("max_grad_norm")
    @classmethod
    def _not_nan(cls, value: float | None) -> float | None:
        if value is not None and value != value:
            raise ValueError("must be a number > 0, inf or null (no clipping)")
        return value


class ParallelConfig(Section):
    """How the ranks of a sharded backend divide the work.

    Ranks that are left after ``tensor``, ``sequence`` and ``replicate`` shard parameters, gradients
    and optimizer state, together with those of their sequence. Each data-parallel rank has rows of
    its own; tensor- and sequence-parallel ranks see the same rows.
    """

    tensor: PositiveInt = Field(1, description="ranks that compute each layer together")
    replicate: PositiveInt = Field(
        1, description="hybrid sharding: whole copies of the model, each sharded over its own ranks"
    )
    sequence: PositiveInt = Field(
        1, description="ranks that each compute a slice of every sequence, for long ones"
    )
    reduce_per_microbatch: bool = Field(
        True, description="False: once a batch; less communication, whole gradients on every rank"
    )
    gather_per_microbatch: bool = Field(
        True, description="False: once a batch; less communication, whole weights on every rank"
    )
    timeout_s: PositiveFloat = Field(1800.0, description="how long a rank waits for the others")


class TrainConfig(OptimizerConfig):
    """The train engine and its optimizer; ``train.lr`` and friends are the optimizer's."""

    backend: str = "local"
    device: str | None = Field(None, description="None: cuda, npu, else cpu")
    dtype: Dtype = Field("float32", description="compute dtype; master weights are fp32")
    max_tokens_per_microbatch: PositiveInt = 4096
    microbatch_size: PositiveInt | None = Field(None, description="rows; None: only the token cap")
    gradient_checkpointing: bool = False
    offload_params: bool = False
    offload_optimizer: bool = False
    offload_grads: bool = False
    parallel: ParallelConfig = ParallelConfig()


class InferenceConfig(Section):
    backend: Literal["embedded", "scripted"] = "embedded"
    mode: Literal["process", "inprocess"] = Field(
        "process", description="a child process with its own core, or a thread of this process"
    )
    device: str | None = None
    dtype: Dtype = "float32"
    max_batch_size: PositiveInt = Field(64, description="requests that run at the same time")
    max_context: PositiveInt | None = None
    max_tokens_per_pass: PositiveInt = Field(
        2048, description="tokens of one forward pass; longer prompts are computed in chunks"
    )
    cache_tokens: PositiveInt | None = Field(
        None, description="tokens of all running requests; None: what a quarter of memory holds"
    )
    prefix_cache_mib: NonNegativeInt = Field(
        256, description="memory for prefixes kept across requests; 0 turns it off"
    )
    numerics: Literal["matched", "fast"] = Field(
        "matched",
        description="matched: float32 on a CPU gives the bits of training's log-probabilities; "
        "fast: other kernels and a second copy of the weights laid out for them, as in bfloat16",
    )
    record_decoding: bool = Field(
        True,
        description="record the operators of a decoding step and run them without Python, with the "
        "same bits; false: always run the model as it is",
    )
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    transport: Literal["auto", "inprocess", "shared_memory", "disk"] = "auto"
    threads: PositiveInt = 1
    deterministic: bool = Field(
        False,
        description="start only if generating gives the bits of training's log-probabilities, "
        "whatever shares the batch; needs float32, the CPU and one thread on both sides",
    )
    start_timeout_s: PositiveFloat = 120.0
    update_timeout_s: PositiveFloat = 120.0

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.mode == "inprocess" and self.transport == "shared_memory":
            raise ValueError("inference.transport=shared_memory needs inference.mode=process")
        crosses = self.backend == "embedded" and self.mode == "process"
        if crosses and self.transport == "inprocess":
            raise ValueError("inference.transport=inprocess needs inference.mode=inprocess")
        return self

    @model_validator(mode="after")
    def _deterministic(self) -> Self:
        if not self.deterministic or self.backend == "scripted":
            return self
        needed = {
            "dtype": "float32",
            "device": "cpu",
            "threads": 1,
            "kv_on_update": "recompute",
            "numerics": "matched",
        }
        for name, value in needed.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"inference.deterministic needs inference.{name}={value}, "
                    f"got {getattr(self, name)!r}"
                )
        return self


class RolloutConfig(Section):
    batch_size: PositiveInt = Field(32, description="episodes (prompts) in one training batch")
    group_size: PositiveInt = Field(8, description="samples of one prompt")
    min_group_size: PositiveInt = 2
    max_concurrent: PositiveInt = Field(64, description="episodes that run at once")
    max_staleness: NonNegativeInt = 1
    stale_policy: Literal["drop", "mask", "wait", "pace"] = Field(
        "wait",
        description="episodes with tokens older than max_staleness: drop them; mask those tokens; "
        "wait for running episodes before they get too old; pace: mask, run as few episodes at "
        "once as keep the trainer busy, and wait a little, so that little gets old",
    )
    workflow: str = "single_turn"
    workflow_kwargs: dict[str, Any] = {}
    reward: RewardConfig = RewardConfig()
    generation: GenerationConfig = GenerationConfig(max_new_tokens=64)
    max_prompt_tokens: PositiveInt | None = None
    overlong_prompt: Literal["error", "filter", "truncate_left", "truncate_right"] = "error"
    episode_timeout_s: PositiveFloat = 300.0
    wait_timeout_s: PositiveFloat = 600.0
    max_failures_in_row: PositiveInt = 16
    drop_zero_variance: bool = Field(False, description="dynamic sampling: reject such groups")
    max_rejected_in_row: PositiveInt = 512


class DataConfig(Section):
    """``source``: ``reasoning_gym`` (procedural, by task name), ``jsonl`` or ``parquet`` (path), or
    ``dataset`` (a Hugging Face ``datasets`` directory on disk)."""

    source: Literal["reasoning_gym", "jsonl", "parquet", "dataset"] = "reasoning_gym"
    path: str | None = None
    task: str | None = None
    task_kwargs: dict[str, Any] = {}
    size: PositiveInt | None = Field(None, description="rows used; required for procedural data")
    seed: Seed = Field(0, description="seed of procedural data and of the shuffle")
    shuffle: bool = True
    columns: dict[str, str] = Field({}, description="our column name -> the file's")
    prompt_template: str | None = Field(None, description="e.g. '{question} ='; None: the column")
    answer_template: str | None = Field(None, description="for demonstrations, e.g. '{answer}'")
    system_prompt: str | None = None
    chat: bool = Field(False, description="render prompts through the tokenizer's chat template")
    answer_noise: str | None = Field(
        None,
        description="wrong_variant, near_miss, or path.py:function(row, rng, **kwargs) -> answer, "
        "for imperfect demonstrations, and for the rejected answers of pairs",
    )
    answer_noise_kwargs: dict[str, Any] = {}
    split: Literal["all", "train", "heldout"] = Field(
        "all",
        description="by a hash of the question: heldout is one problem in ten, never in train, "
        "whatever the seeds",
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.source == "reasoning_gym":
            if self.task is None:
                raise ValueError("data.task is required with source=reasoning_gym")
            if self.size is None:
                raise ValueError("data.size is required with source=reasoning_gym")
        elif self.path is None:
            raise ValueError(f"data.path is required with source={self.source}")
        return self


class EvalConfig(Section):
    data: DataConfig | None = None
    reward: RewardConfig | None = Field(None, description="None: the reward of training")
    every: NonNegativeInt = Field(
        0, description="steps between evaluations; 0: before and after only"
    )
    samples: PositiveInt = Field(
        1,
        description="completions a prompt; one is decoded as generation says, more are drawn at "
        "generation.temperature, whatever generation.greedy",
    )
    generation: GenerationConfig = GenerationConfig(greedy=True, max_new_tokens=64)
    correct_at: float = Field(1.0, description="a reward from which on a completion is right")
    answer: str = Field(
        "auto",
        description="what maj@k counts votes by: text, number, path.py:function(completion) -> "
        "text or None, or auto: what the reward looks at",
    )
    batch_size: PositiveInt = 256

    @property
    def decoding(self) -> GenerationConfig:
        """How completions are made: several greedy ones would all be the same."""
        return self.generation if self.samples == 1 else self.generation.new(greedy=False)

    @model_validator(mode="after")
    def _draws(self) -> Self:
        if self.decoding.n_samples != 1:
            raise ValueError("eval.generation.n_samples: use eval.samples instead")
        if self.samples > 1 and self.decoding.is_greedy:
            raise ValueError(
                f"eval.samples: got {self.samples} with eval.generation.temperature=0, which draws "
                "the same completion every time; raise the temperature"
            )
        return self


class CheckpointConfig(Section):
    every: NonNegativeInt = Field(
        10,
        description="steps between checkpoints of RL; 0: first and last only; supervised stages "
        "have checkpoint_every",
    )
    keep: PositiveInt | None = 2
    background: bool = Field(
        False,
        description="training goes on while a checkpoint is written; costs a second copy of model "
        "and optimizer in memory, and the newest checkpoint may not be on disk yet when a run is "
        "killed",
    )
    upload_url: str | None = Field(None, description="any fsspec URL; gets a copy of each")
    export_model: bool = True

    @field_validator("upload_url")
    @classmethod
    def _known_store(cls, value: str | None) -> str | None:
        if value is not None:
            check_scheme(value)
        return value


class TrackingConfig(Section):
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    project: str = "tandem"
    progress: bool = True


class StageConfig(Section):
    """One supervised stage: what it reads and for how long."""

    data: DataConfig
    steps: PositiveInt | None = None
    epochs: PositiveInt = 1
    batch_size: PositiveInt = 32
    max_length: PositiveInt = 512
    overlong: Literal["error", "filter", "truncate"] = "error"
    checkpoint_every: NonNegativeInt = Field(100, description="steps between; 0: last only")
    train: TrainConfig = TrainConfig()


class SFTStageConfig(StageConfig):
    completion_only: bool = True


class DPOStageConfig(StageConfig):
    """Training on preferences; ``batch_size`` counts pairs, with ``loss=kto`` single responses."""

    loss: Literal["sigmoid", "hinge", "ipo", "robust", "simpo", "orpo", "kto"] = "sigmoid"
    beta: PositiveFloat = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    length_normalised: bool | None = Field(
        None, description="divide log-ratios by the response's tokens; None: ipo, simpo, orpo only"
    )
    gamma: NonNegativeFloat | None = Field(None, description="simpo's target margin; None: 0.5")
    sft_coef: NonNegativeFloat = Field(0.0, description="times the chosen response's SFT loss")
    desirable_weight: PositiveFloat = Field(1.0, description="kto")
    undesirable_weight: PositiveFloat = Field(1.0, description="kto")
    reference: Literal["auto", "precompute", "columns"] = Field(
        "auto",
        description="log-probabilities of the reference: auto, of each batch by the initial policy "
        "(a frozen copy, or the model without its adapter); precompute, of all data before the "
        "first step; columns, ref_chosen_logps and ref_rejected_logps of the data",
    )

    @model_validator(mode="after")
    def _meaningful(self) -> Self:
        is_kto = self.loss == "kto"
        unused = {
            "gamma": self.gamma is not None and self.loss != "simpo",
            "label_smoothing": self.label_smoothing > 0 and self.loss not in ("sigmoid", "robust"),
            "length_normalised": self.length_normalised is not None
            and self.loss in ("simpo", "orpo", "kto"),
            "sft_coef": self.sft_coef > 0 and is_kto,
            "desirable_weight": self.desirable_weight != 1 and not is_kto,
            "undesirable_weight": self.undesirable_weight != 1 and not is_kto,
            "reference": self.reference != "auto" and self.loss in ("simpo", "orpo", "kto"),
        }
        names = [name for name, is_unused in unused.items() if is_unused]
        if names:
            raise ValueError(f"dpo.{names[0]} means nothing with dpo.loss={self.loss}; leave it")
        if is_kto and self.batch_size < 2:
            raise ValueError("dpo.batch_size must be >= 2 with loss=kto: its baseline needs others")
        return self


class RewardStageConfig(StageConfig):
    """Training of a reward model on pairs; ``batch_size`` counts pairs."""

    center_coef: NonNegativeFloat = Field(
        0.0, description="times (r_chosen + r_rejected)^2, which keeps scores around 0"
    )


class Root(Section):
    run: RunConfig = RunConfig()
    model: ModelConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()


class SupervisedRoot(Root):
    @model_validator(mode="after")
    def _one_interval(self) -> Self:
        if self.checkpoint.every != CheckpointConfig().every:
            kind = getattr(self, "kind", "sft")
            raise ValueError(f"checkpoint.every is for RL; use {kind}.checkpoint_every")
        return self


class SFTConfig(SupervisedRoot):
    kind: Literal["sft"] = "sft"
    sft: SFTStageConfig
    inference: InferenceConfig = InferenceConfig(mode="inprocess")
    reward: RewardConfig = RewardConfig()
    eval: EvalConfig = EvalConfig()


class PairEvalConfig(Section):
    """Held-out preferences, measured before, after and, with ``every``, between."""

    data: DataConfig | None = None
    every: NonNegativeInt = Field(
        0, description="steps between evaluations; 0: before and after only"
    )


class PairRoot(SupervisedRoot):
    """What runs on pairs share; ``warmup`` is an optional supervised stage before."""

    warmup: SFTStageConfig | None = None
    eval: PairEvalConfig = PairEvalConfig()


class DPOConfig(PairRoot):
    """A run on preferences."""

    kind: Literal["dpo"] = "dpo"
    dpo: DPOStageConfig


class RewardModelConfig(PairRoot):
    """A run that trains a reward model."""

    kind: Literal["reward"] = "reward"
    reward: RewardStageConfig


class EvalRunConfig(Root):
    """What ``tandem eval`` measures where no run is at hand: a model on the data of ``eval``."""

    kind: Literal["eval"] = "eval"
    inference: InferenceConfig = InferenceConfig(mode="inprocess")
    rollout: RolloutConfig = Field(
        RolloutConfig(), description="workflow, reward, prompt limits and deadlines"
    )
    eval: EvalConfig

    @model_validator(mode="after")
    def _has_data(self) -> Self:
        if self.eval.data is None:
            raise ValueError(
                "eval.data is required: say what to evaluate on, e.g. eval.data.source=jsonl "
                "eval.data.path=FILE (tandem eval: --data FILE)"
            )
        return self
