"""Log-probabilities of whole responses under the policy that training starts from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tensordict import TensorDict
from torch import Tensor

from tandem.algorithms.preference_objective import response_sums
from tandem.config import TrainConfig
from tandem.launch import open_engine
from tandem.train import TrainEngine


class Reference:
    """The initial policy beside the one in training: without its adapter, or a frozen copy."""

    def __init__(
        self, policy: TrainEngine, config: TrainConfig, model_path: str, *, seed: int
    ) -> None:
        self._policy = policy
        self._frozen: TrainEngine | None = None
        if policy.lora is None:
            frozen = config.model_copy(update={"schedule": "constant"})
            self._frozen = open_engine("language_model", frozen, model_path=model_path, seed=seed)

    def logprob_sums(self, batch: TensorDict) -> Tensor:
        """Log-probability of each row's response, ``[B]``."""
        with self._engine() as engine:
            return logprob_sums(engine, batch)

    def close(self) -> None:
        if self._frozen is not None:
            self._frozen.destroy()

    @contextmanager
    def _engine(self) -> Iterator[TrainEngine]:
        if self._frozen is not None:
            yield self._frozen
            return
        with self._policy.reference():
            yield self._policy


def logprob_sums(engine: TrainEngine, batch: TensorDict) -> Tensor:
    """Log-probability of each row's response under ``engine`` as it is now, ``[B]``."""
    scored = engine.forward(batch, outputs=["train_logprobs"], trained_only=True)
    return response_sums(scored["train_logprobs"], batch["loss_mask"])[0]
