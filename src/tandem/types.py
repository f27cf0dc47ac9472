"""The nouns that cross folders. No torch import at run time: config and CLI read this file first.

Shape suffixes used everywhere: ``P`` prompts, ``G`` samples of one prompt, ``B`` rows, ``T`` padded
tokens, ``N`` packed tokens, ``V`` vocabulary, ``H`` hidden size.

One alignment: index t of every per-token tensor speaks about token t. Entry 0 of a sequence has no
prediction: log-probability 0.0, never trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tandem.errors import ConfigError

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

StopReason = Literal["stop", "length", "abort", "tool_calls"]
Reduction = Literal["mean", "sum", "min", "max"]
TransportKind = Literal["inprocess", "shared_memory", "disk"]
MAX_TOP_LOGPROBS = 64
OnTokens = Callable[[Sequence[int], Sequence[float], Sequence[int]], None]
"""Told of new output tokens with their log-probabilities and versions, each token once, in order,
the last before the request ends. Called from any thread; it is short and never raises."""


@dataclass(frozen=True, slots=True, order=True)
class WeightVersion:
    """Name of one set of weights: ``n`` counts published updates within one start of a run."""

    incarnation: str
    n: int


# --- generation -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """How tokens are drawn. ``top_k = 0``, ``top_p = 1``, ``min_p = 0``, neutral penalties: off.

    ``max_tokens`` bounds prompt plus completion; ``seed = None`` lets the engine draw a seed.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    n_samples: int = 1
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    max_tokens: int | None = None
    greedy: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(
            self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        )
        for name, low in (("n_samples", 1), ("max_new_tokens", 1), ("min_new_tokens", 0)):
            _require(isinstance(getattr(self, name), int), self, name, "an integer")
            _require(getattr(self, name) >= low, self, name, f"an integer >= {low}")
        _require(
            self.min_new_tokens <= self.max_new_tokens, self, "min_new_tokens", "<= max_new_tokens"
        )
        _require(
            self.max_tokens is None or self.max_tokens >= 2, self, "max_tokens", "None or >= 2"
        )
        _require(_is_finite(self.temperature, 0.0), self, "temperature", "a finite number >= 0")
        _require(_is_finite(self.top_p, 0.0) and 0 < self.top_p <= 1, self, "top_p", "in (0, 1]")
        _require(self.top_k >= 0, self, "top_k", "0 (off) or a positive integer")
        _require(_is_finite(self.min_p, 0.0) and self.min_p < 1, self, "min_p", "in [0, 1)")
        _require(
            _is_finite(self.repetition_penalty, 0.0) and self.repetition_penalty > 0,
            self,
            "repetition_penalty",
            "a finite number > 0 (1 is off)",
        )
        for name in ("frequency_penalty", "presence_penalty"):
            _require(_is_finite(getattr(self, name), -2.0), self, name, "a finite number >= -2")
        _require(all(self.stop), self, "stop", "non-empty strings")
        _require(
            all(_is_finite(bias, -math.inf) for bias in self.logit_bias.values()),
            self,
            "logit_bias",
            "finite numbers by token id",
        )

    @property
    def is_greedy(self) -> bool:
        return self.greedy or self.temperature == 0.0

    @property
    def training_temperature(self) -> float:
        """What training divides the logits by; the log-probabilities of greedy tokens are at 1."""
        return 1.0 if self.is_greedy else self.temperature

    def untrainable_fields(self) -> list[str]:
        """Names of the fields that make the sampled distribution differ from plain softmax."""
        neutral = GenerationConfig()
        names = (
            "top_p",
            "top_k",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "logit_bias",
            "min_new_tokens",
        )
        changed = [name for name in names if getattr(self, name) != getattr(neutral, name)]
        return (["greedy"] if self.is_greedy else []) + changed

    def new(self, **changes: Any) -> GenerationConfig:
        return replace(self, **changes)


def _is_finite(value: object, low: float) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value >= low
    )


def _require(ok: bool, owner: object, name: str, allowed: str) -> None:
    if not ok:
        raise ConfigError(
            f"{type(owner).__name__}.{name}: got {getattr(owner, name)!r}, allowed: {allowed}"
        )


@dataclass(frozen=True, slots=True)
class LLMRequest:
    """One prompt to complete. Never mutated by an engine; ``rid`` is unique per attempt.

    ``raw_logprobs``, ``top_logprobs`` (how many alternatives) and ``prompt_logprobs`` ask for the
    fields of the response of the same names; a backend that lacks them refuses the request.
    ``on_tokens`` is told of tokens as they come by a backend with the capability ``streaming``;
    others leave it alone. The response is the same.
    """

    rid: str
    input_ids: tuple[int, ...]
    gconfig: GenerationConfig = field(default_factory=GenerationConfig)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    raw_logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    on_tokens: OnTokens | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_ids", tuple(self.input_ids))
        _require(
            isinstance(self.top_logprobs, int) and 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS,
            self,
            "top_logprobs",
            f"an integer from 0 to {MAX_TOP_LOGPROBS}",
        )


@dataclass(frozen=True, slots=True)
class LLMResponse:
    """What was sampled: one entry of each ``output_*`` list per output token.

    ``output_logprobs`` are of the distribution sampled from (after temperature),
    ``output_versions`` name the weights whose forward pass made the token. Times are in seconds;
    ``itl`` has one gap per token after the first. A sampled stop token stays in ``output_tokens``.

    On request: ``raw_logprobs`` of the output tokens under the model's own distribution
    (temperature 1, no bias, penalty or filter), ``prompt_logprobs`` of the prompt tokens under the
    same (entry 0 is 0.0), and ``top_logprobs``, for every output token the likeliest
    ``(token, logprob)`` of the distribution sampled from, best first.
    """

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    stop_reason: StopReason
    latency: float = 0.0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    text: str | None = None
    raw_logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    prompt_logprobs: list[float] | None = None


# --- training -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FinetuneSpec:
    """How long training lasts, from which the learning-rate schedule follows."""

    total_train_epochs: int
    dataset_size: int
    train_batch_size: int

    def __post_init__(self) -> None:
        for item in fields(self):
            _require(getattr(self, item.name) >= 1, self, item.name, "an integer >= 1")

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.dataset_size // self.train_batch_size)

    @property
    def total_train_steps(self) -> int:
        return self.total_train_epochs * self.steps_per_epoch


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of one micro-batch; means are combined with ``weight``."""

    value: float | Tensor
    weight: float | Tensor = 1.0
    reduction: Reduction = "mean"


LossFn = Callable[["Mapping[str, Tensor]", "TensorDict"], "tuple[Tensor, dict[str, Metric]]"]
"""``loss_fn(outputs, microbatch) -> (summed loss, metrics)``.

``outputs`` holds the per-token tensors ``[B, T]`` named by the function's attribute
``required_outputs`` (default ``{"train_logprobs"}``; also ``"entropy"``, and ``"logits"``, which
are ``[B, T, V]`` and take that memory; of a value model ``"values"`` and ``"bootstrap_values"``, of
a reward model ``"scores"``, the last two ``[B]``), aligned with the rows of ``microbatch``. Losses
of all micro-batches and data-parallel ranks are summed, so normalisation must be in the batch's
weight keys."""


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """Per-token outputs in the caller's order and layout, detached; the summed loss; metrics."""

    outputs: dict[str, Tensor]
    loss: float
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """Name on disk, full shape and dtype (``"float32"``) of one exported tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class WeightUpdateMeta:
    """One weight update. Both ends are given the same object: the inference engine first.

    ``channel`` names the meeting point of the two engines in the controlling process, ``path`` the
    directory for the ``disk`` transport, ``dtype`` what travels (``None``: the parameters' own).
    """

    type: TransportKind
    version: int
    incarnation: str = ""
    channel: str = "policy"
    path: str | None = None
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class SaveLoadMeta:
    """A Hugging Face model directory; ``with_optim`` adds the training state beside it."""

    path: str
    weight_format: str = "hf"
    with_optim: bool = False
    tokenizer: Any | None = None
    processor: Any | None = None
    base_model_path: str | None = None


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Resources one worker asks of a scheduler. ``mem`` is in MiB."""

    cpu: int
    gpu: int
    mem: int
    nodelist: str | None = None
    exclude: str | None = None
    partition: str | None = None
    container_image: str | None = None
    env_vars: dict[str, str] = field(default_factory=dict)
    time_limit: str | None = None
    begin: str | None = None
    deadline: str | None = None


# --- rollout --------------------------------------------------------------------------------------


class EpisodeState(StrEnum):
    """An episode is in exactly one of these at every moment."""

    # Of the text, to which a state is equal; that of an enumeration is a call of Python.
    __hash__ = str.__hash__

    QUEUED = "queued"
    RUNNING = "running"
    READY = "ready"
    IN_TRAINING = "in_training"
    CONSUMED = "consumed"
    REJECTED = "rejected"
    FAILED = "failed"
    STALE = "stale"
    SUPERSEDED = "superseded"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One item of a prompt stream. ``(epoch, position)`` is its identity, the same after a resume.

    ``data`` holds the columns of the dataset row; workflows and rewards read them.
    """

    epoch: int
    position: int
    data: Mapping[str, Any]

    @property
    def episode_id(self) -> int:
        return self.epoch * EPISODE_STRIDE + self.position


EPISODE_STRIDE = 1 << 40
"""Episode ids are ``epoch * EPISODE_STRIDE + position``, so that they fit an int64 tensor."""
