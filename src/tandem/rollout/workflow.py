"""What a workflow is and what it is given. Ready-made workflows have files of their own.

Nothing here schedules, counts or filters episodes: that is the executor.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from tandem.config.objects import load_object
from tandem.errors import ConfigError, DataError, RolloutError
from tandem.store.records import EpisodeRecord

if TYPE_CHECKING:
    from tensordict import TensorDict

    from tandem.rollout.engine import InferenceEngine

STANDARD_ARGUMENTS = frozenset(
    {
        "reward",
        "generation",
        "group_size",
        "min_group_size",
        "tokenizer",
        "seed",
        "max_prompt_tokens",
        "overlong_prompt",
    }
)
"""What a trainer offers every workflow; a user's constructor takes those that it names."""

_BUILT_IN = {
    "agent": "tandem.serve.agent:AgentWorkflow",
    "multi_turn": "tandem.rollout.multi_turn:MultiTurnWorkflow",
    "single_turn": "tandem.rollout.single_turn:SingleTurnWorkflow",
    "tool_use": "tandem.rollout.tool_use:tool_use",
}

EpisodeListener = Callable[[EpisodeRecord], None]


class OverlongPromptError(DataError):
    """A prompt is too long and the policy is ``error``: the run stops, it is not a bad sample."""


class SampleError(RolloutError):
    """One sample of a group failed. Never a reward of 0, and not the end of its group."""


@dataclass(frozen=True, slots=True, eq=False)
class Episode(Mapping[str, Any]):
    """The columns of one prompt, as a read-only mapping, and the identity of this attempt.

    ``uid`` is unique per attempt and the start of every request id. ``training`` is False in
    ``rollout_batch``. ``notes`` is for the log: ``prompt``, ``completions``, ``rewards`` and
    ``reason`` (of a rejection) are known.
    """

    data: Mapping[str, Any]
    episode_id: int = 0
    attempt: int = 0
    uid: str = "0"
    training: bool = True
    notes: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Episode:
        """``data`` itself when the executor made it, else episode 0 of nobody's run."""
        return data if isinstance(data, Episode) else cls(data)


class RolloutWorkflow(ABC):
    """Turns one prompt into the rows of one episode.

    ``listener`` is told of every attempt that ended, from the rollout thread.
    """

    listener: EpisodeListener | None = None

    def with_listener(self, listener: EpisodeListener) -> Self:
        """A copy of this workflow whose episodes are reported to ``listener``."""
        other = copy.copy(self)
        other.listener = listener
        return other

    def close(self) -> None:
        """Release what episodes shared, after the last of them. Idempotent."""

    @abstractmethod
    async def arun_episode(
        self, engine: InferenceEngine, data: Mapping[str, Any]
    ) -> TensorDict | None:
        """Rows of a batch (``input_ids``, ``attention_mask``, ``loss_mask``, ``logprobs``,
        ``versions``, ``rewards``), or None: rejected.

        ``temperature`` is that of ``rollout.generation`` unless the rows have it, ``truncated``
        false; ``group_ids`` and ``sample_ids`` say what belongs together (default: one group, one
        trajectory a row).

        ``data`` is an ``Episode`` when the executor calls. An exception makes the episode failed.
        """


def sample_seed(run_seed: int, episode_id: int, sample_index: int, turn: int = 0) -> int:
    """63-bit seed of one sample and, in a conversation, of one of its turns.

    The attempt takes no part: a repetition draws the same tokens.
    """
    text = f"{run_seed}/{episode_id}/{sample_index}" + (f"/{turn}" if turn else "")
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def load_workflow(name: str, **kwargs: Any) -> RolloutWorkflow:
    """A workflow by name: a built-in, ``path/file.py:Class`` or ``package.module:Class``.

    Of ``STANDARD_ARGUMENTS`` a constructor gets those that it names, of the others all.
    """
    if name not in _BUILT_IN and ":" not in name:
        raise ConfigError(
            f"rollout.workflow: got {name!r}, allowed: {', '.join(sorted(_BUILT_IN))}, "
            "path/file.py:Class or package.module:Class"
        )
    factory = load_object(_BUILT_IN.get(name, name), field="rollout.workflow")
    parameters = inspect.signature(factory).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        unknown = sorted(set(kwargs) - set(parameters) - STANDARD_ARGUMENTS)
        if unknown:
            raise ConfigError(
                f"rollout.workflow_kwargs.{unknown[0]}: {name} does not take it; allowed: "
                f"{', '.join(sorted(parameters))}"
            )
        kwargs = {key: value for key, value in kwargs.items() if key in parameters}
    made = factory(**kwargs)
    if not isinstance(made, RolloutWorkflow):
        raise ConfigError(
            f"rollout.workflow: {name} made a {type(made).__name__}, allowed: a RolloutWorkflow"
        )
    return made
