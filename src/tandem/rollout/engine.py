"""The InferenceEngine contract. Implementations compose a generation backend with the executor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tandem.types import FinetuneSpec, LLMRequest, LLMResponse, Prompt, WeightUpdateMeta

if TYPE_CHECKING:
    from tensordict import TensorDict

    from tandem.rollout.feed import PromptStream
    from tandem.rollout.workflow import RolloutWorkflow

ShouldAccept = Callable[["TensorDict"], bool]
EpisodeData = Prompt | Mapping[str, Any]


class InferenceEngine(ABC):
    """Generates trajectories asynchronously, with a version on every token and bounded staleness.

    Methods other than ``agenerate`` are called from the controlling thread.
    """

    @abstractmethod
    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Start the backend and the executor, or connect to ``addr``. Idempotent."""

    @abstractmethod
    def destroy(self) -> None:
        """Stop everything that ``initialize`` started. Idempotent."""

    @abstractmethod
    async def agenerate(self, req: LLMRequest) -> LLMResponse:
        """Complete one prompt; the request is not mutated."""

    @abstractmethod
    def update_weights(self, meta: WeightUpdateMeta) -> Future[None]:
        """Begin a weight update without blocking.

        Then all train ranks call ``upload_weights(meta)``, then ``future.result()``, then
        ``set_version(meta.version)``. On an error the old version serves on, unpaused.
        """

    @abstractmethod
    def set_version(self, version: int) -> None:
        """Close the training batch in hand (in_training -> consumed).

        Raises:
            WeightSyncError: ``version`` is not the one that serves.
        """

    @abstractmethod
    def get_version(self) -> int:
        """The version that serves now."""

    @abstractmethod
    def submit(self, data: EpisodeData, workflow: RolloutWorkflow) -> int:
        """Enqueue one episode and return its id at once.

        A ``Prompt`` carries its id; a plain mapping gets the next free one.
        """

    @abstractmethod
    def wait(
        self, count: int, timeout: float | None = None, should_accept: ShouldAccept | None = None
    ) -> TensorDict:
        """Rows of the first ``count`` accepted episodes to finish, in order of submission.

        Raises:
            TimeoutError: nothing is lost, the next ``wait`` can have the episodes.
            RolloutError: ``count`` can no longer be reached, or the fault budget is spent.
        """

    @abstractmethod
    def rollout_batch(self, data: Sequence[EpisodeData], workflow: RolloutWorkflow) -> TensorDict:
        """Run all episodes and return their rows in input order, outside the staleness ledger.

        Failed and rejected episodes leave no rows; ``RolloutError`` when none ended well.
        """

    @abstractmethod
    def prepare_batch(
        self,
        dataloader: PromptStream,
        workflow: RolloutWorkflow,
        should_accept: ShouldAccept | None = None,
    ) -> TensorDict:
        """Keep the pipeline full from ``dataloader`` and return one training batch.

        ``dataloader`` is a ``PromptSource``, or an iterable of ``submit``'s data; only the first
        can be resumed.
        """

    @abstractmethod
    def reject(self, episode_ids: Collection[int], reason: str) -> None:
        """Drop episodes that are ready or in training; their places are free again."""

    @abstractmethod
    def pause(self) -> None:
        """Stop new submissions from starting; finished work is still collected."""

    @abstractmethod
    def resume(self) -> None:
        """Allow submissions again."""

    @abstractmethod
    def pause_generation(self) -> None:
        """Stop token generation at a token border, keeping running requests."""

    @abstractmethod
    def resume_generation(self) -> None:
        """Go on generating."""

    @abstractmethod
    def take_metrics(self) -> dict[str, float]:
        """``staleness/*`` of the batch last handed over, ``rollout/*`` since the last call."""

    @abstractmethod
    def describe(self) -> str:
        """What runs and what is waited for, in words for a person."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Data position, open episodes and counts, as plain JSON."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``: episodes open then run again, with the same seeds."""
