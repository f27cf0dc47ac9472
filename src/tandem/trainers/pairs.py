"""What training on preferences and training a reward model share: pairs as batches, evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from tandem.checkpoint import CheckpointDir
from tandem.config import PairEvalConfig, PairRoot
from tandem.data.batch import collate
from tandem.data.demonstrations import Demonstration
from tandem.data.preferences import Pair
from tandem.models.loading import load_tokenizer, resolve_model
from tandem.trainers.run import Run
from tandem.trainers.sft import run_stage
from tandem.trainers.supervised import SupervisedStage, is_due


def starting_model(config: PairRoot, run: Run, open_data: Callable[[Any], object]) -> str:
    """Directory of the model that training starts from, after the warm-up if there is one.

    ``open_data(tokenizer)`` fails before a warm-up on whatever the run would fail on after it.
    """
    path = resolve_model(config.model, seed=config.run.seed, workdir=run.dir)
    if config.warmup is None:
        return path
    tokenizer_path = config.model.tokenizer_path
    open_data(load_tokenizer(tokenizer_path or path))
    folder = run.dir / "warmup"
    return run_stage(config.warmup, path, run, folder, tokenizer_path=tokenizer_path)


def row_fields(row: Demonstration) -> dict[str, Any]:
    return {"input_ids": torch.tensor(row.input_ids), "loss_mask": torch.tensor(row.loss_mask)}


def pairs_to_batch(pairs: Sequence[Pair]) -> TensorDict:
    """Two rows a pair, the chosen one first; every pair of the step weighs the same."""
    rows = []
    for index, pair in enumerate(pairs):
        for is_chosen, row in ((True, pair.chosen), (False, pair.rejected)):
            fields = row_fields(row) | {"pair_ids": index, "is_chosen": is_chosen}
            fields["loss_weights"] = 1.0 / len(pairs)
            if pair.margin is not None:
                fields["margins"] = pair.margin
            rows.append(fields)
    return collate(rows)


class PairEvaluator:
    """Loss and metrics on held-out data, without generating; ``make_batch`` builds their batch.

    ``headline`` is the metric that the summary calls accuracy.
    """

    def __init__(
        self,
        config: PairEvalConfig,
        stage: SupervisedStage[Any, Any],
        make_batch: Callable[[], TensorDict] | None,
        *,
        headline: str,
    ) -> None:
        self.config, self.stage, self._make_batch = config, stage, make_batch
        self._headline = headline
        self.results: dict[str, dict[str, float]] = {}

    def is_due(self, step: int) -> bool:
        last = self.stage.total_steps
        return self._make_batch is not None and is_due(step, self.config.every, last)

    def evaluate(self, step: int) -> dict[str, float]:
        assert self._make_batch is not None
        found = self.stage.engine.infer_batch(self._make_batch(), self.stage.loss)
        named = {name.rpartition("/")[2]: value for name, value in found.metrics.items()}
        self.results[str(step)] = named | {"loss": found.loss}
        return {f"eval/heldout/{name}": value for name, value in self.results[str(step)].items()}

    def summary(self) -> dict[str, float | None]:
        """Accuracy, margin and loss on held-out data, before and after; None: not measured."""
        moments = {"before": "0", "after": str(self.stage.step)}
        names = {"accuracy": self._headline, "margin": "margin", "loss": "loss"}
        return {
            f"{name}_{moment}": self.results.get(step, {}).get(metric)
            for name, metric in names.items()
            for moment, step in moments.items()
        }

    def state(self) -> dict[str, Any]:
        return {"evaluations": self.results}

    def restore(self, checkpoint: CheckpointDir) -> None:
        self.results = dict(checkpoint.extra["evaluations"])
