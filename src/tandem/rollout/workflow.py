"""What a workflow is and what it is given. Ready-made workflows have files of their own.

Nothing here schedules, counts or filters episodes: that is the executor.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tandem.errors import ConfigError, DataError
from tandem.rollout.importing import import_object

if TYPE_CHECKING:
    from tensordict import TensorDict

    from tandem.rollout.engine import InferenceEngine

OverlongPolicy = Literal["error", "filter", "truncate_left", "truncate_right"]


class OverlongPromptError(DataError):
    """A prompt is too long and the policy is ``error``: the run stops, it is not a bad sample."""


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
    """Turns one prompt into the rows of one episode."""

    @abstractmethod
    async def arun_episode(
        self, engine: InferenceEngine, data: Mapping[str, Any]
    ) -> TensorDict | None:
        """Rows of a batch (``input_ids``, ``attention_mask``, ``loss_mask``, ``logprobs``,
        ``versions``, ``rewards``), or None: rejected.

        ``data`` is an ``Episode`` when the executor calls. An exception makes the episode failed.
        """


def sample_seed(run_seed: int, episode_id: int, sample_index: int) -> int:
    """63-bit seed of one sample. The attempt takes no part: a repetition draws the same tokens."""
    text = f"{run_seed}/{episode_id}/{sample_index}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def fit_prompt(
    ids: Sequence[int], max_tokens: int | None, policy: OverlongPolicy, *, name: str
) -> tuple[int, ...] | None:
    """The prompt under the one policy for overlong prompts; None: filter it out.

    ``truncate_left`` keeps the last ``max_tokens``, ``truncate_right`` the first.

    Raises:
        OverlongPromptError: the policy is ``error``; the message has ``name`` and both lengths.
    """
    if max_tokens is None or len(ids) <= max_tokens:
        return tuple(ids)
    if policy == "filter":
        return None
    if policy == "truncate_left":
        return tuple(ids[-max_tokens:])
    if policy == "truncate_right":
        return tuple(ids[:max_tokens])
    raise OverlongPromptError(
        f"{name}: the prompt has {len(ids)} > {max_tokens} tokens (rollout.max_prompt_tokens); "
        "raise the limit or set rollout.overlong_prompt to filter, truncate_left or truncate_right"
    )


def load_workflow(name: str, kwargs: Mapping[str, Any]) -> RolloutWorkflow:
    """A user's workflow named ``path/file.py:Class`` or ``package.module:Class``."""
    made = import_object(name, field="rollout.workflow")(**kwargs)
    if not isinstance(made, RolloutWorkflow):
        raise ConfigError(
            f"rollout.workflow: {name} made a {type(made).__name__}, allowed: a RolloutWorkflow"
        )
    return made
