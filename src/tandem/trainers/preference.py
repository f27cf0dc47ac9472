"""Training on preferences (``tandem dpo``): DPO and its relatives on pairs, KTO on single rows.

The formulas are in ``algorithms/preference``; reading the data is in ``data/preferences``.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict

from tandem.algorithms.preference_objective import KTOObjective, PairObjective
from tandem.config import DataConfig, DPOConfig, DPOStageConfig, LoraConfig, PairEvalConfig
from tandem.data.batch import collate
from tandem.data.demonstrations import Demonstration
from tandem.data.examples import ExampleSource
from tandem.data.preferences import Judged, Pair, open_judged, open_pairs
from tandem.errors import ConfigError
from tandem.trainers.pairs import PairEvaluator, pairs_to_batch, row_fields, starting_model
from tandem.trainers.ranks import on_all_ranks
from tandem.trainers.reference import Reference, logprob_sums
from tandem.trainers.run import open_run
from tandem.trainers.supervised import SupervisedStage, begin, finish, run_steps


@on_all_ranks
def run_dpo(config: DPOConfig, *, resume: bool = False) -> dict[str, Any]:
    """Train on preferences as ``config`` says and return the content of ``summary.json``.

    ``accuracy_*`` is the share of held-out pairs whose chosen response the policy finds more
    likely (with ``ipo``, ``simpo`` and ``orpo`` a token), with ``kto`` the share of held-out
    responses on the right side of the baseline; ``margin_*`` the mean implicit reward of the chosen
    over the rejected one.

    Raises:
        Preempted: SIGTERM or SIGINT; the state is saved and ``resume=True`` goes on from there.
        ConfigError, DataError: before anything was trained.
    """
    with open_run(config, resume=resume) as run, ExitStack() as stack:
        model_path = starting_model(config, run, lambda tokenizer: _open_all(config, tokenizer))
        kind = KTOStage if config.dpo.loss == "kto" else PairStage
        stage = kind(
            config.dpo,
            model_path,
            seed=config.run.seed,
            lora=config.model.lora,
            tokenizer_path=config.model.tokenizer_path,
        )
        stack.callback(stage.close)
        evaluator = stage.open_evaluator(config.eval)
        begin(run, stage, evaluator)
        run_steps(stage, run, run.dir, run.metrics, "dpo", evaluator)
        metric = "accuracy" if config.dpo.loss == "kto" else "pair accuracy"
        return finish(config, run, stage, evaluator.summary(), metric=metric)


class PairStage(SupervisedStage[DPOStageConfig, Pair]):
    """DPO and its relatives on pairs of responses."""

    kind = "dpo"
    prefix = "dpo"

    def __init__(
        self,
        config: DPOStageConfig,
        model_path: str,
        *,
        seed: int,
        lora: LoraConfig | None = None,
        tokenizer_path: str | None = None,
    ) -> None:
        self.objective = PairObjective(
            config.loss,
            beta=config.beta,
            label_smoothing=config.label_smoothing,
            length_normalised=config.length_normalised,
            gamma=0.5 if config.gamma is None else config.gamma,
            sft_coef=config.sft_coef,
        )
        self.loss = self.objective
        super().__init__(config, model_path, seed=seed, lora=lora, tokenizer_path=tokenizer_path)
        self._reference: Reference | None = None
        if self.objective.needs_reference and config.reference == "auto":
            self._reference = Reference(self.engine, config.train, model_path, seed=seed)
        if config.reference == "precompute":
            self.data.annotate(self._with_reference(self.data.all()))

    def _open_data(self) -> ExampleSource[Pair]:
        return _open_pairs(self.config, self.tokenizer, self.seed)

    def open_evaluator(self, config: PairEvalConfig) -> PairEvaluator:
        """Held-out pairs; their reference is computed now, when the policy is the initial one."""
        if config.data is None:
            return PairEvaluator(config, self, None, headline="policy_accuracy")
        pairs = _open_pairs(self.config, self.tokenizer, self.seed, config.data).all()
        if self.config.reference == "precompute":
            pairs = self._with_reference(pairs)
        batch = self.make_batch(pairs)
        return PairEvaluator(config, self, lambda: batch, headline="policy_accuracy")

    def make_batch(self, examples: list[Pair]) -> TensorDict:
        batch = pairs_to_batch(examples)
        if self._reference is not None:
            batch["ref_logprob_sums"] = self._reference.logprob_sums(batch)
        elif self.objective.needs_reference:
            sums = [value for pair in examples for value in pair.reference or ()]
            batch["ref_logprob_sums"] = torch.tensor(sums)
        return batch

    def close(self) -> None:
        if self._reference is not None:
            self._reference.close()
        super().close()

    def _with_reference(self, pairs: list[Pair]) -> list[Pair]:
        """The pairs with the log-probabilities that the policy gives them now."""
        size = self.config.batch_size
        found: list[Pair] = []
        for start in range(0, len(pairs), size):
            part = pairs[start : start + size]
            sums = logprob_sums(self.engine, pairs_to_batch(part)).view(-1, 2).tolist()
            found += [
                replace(pair, reference=(chosen, rejected))
                for pair, (chosen, rejected) in zip(part, sums, strict=True)
            ]
        return found


class KTOStage(SupervisedStage[DPOStageConfig, Judged]):
    """KTO on single responses; its baseline is estimated anew before every step."""

    kind = "dpo"
    prefix = "dpo"

    def __init__(
        self,
        config: DPOStageConfig,
        model_path: str,
        *,
        seed: int,
        lora: LoraConfig | None = None,
        tokenizer_path: str | None = None,
    ) -> None:
        self.loss = KTOObjective(
            beta=config.beta,
            desirable_weight=config.desirable_weight,
            undesirable_weight=config.undesirable_weight,
        )
        super().__init__(config, model_path, seed=seed, lora=lora, tokenizer_path=tokenizer_path)
        self._reference = Reference(self.engine, config.train, model_path, seed=seed)

    def _open_data(self) -> ExampleSource[Judged]:
        return _open_judged(self.config, self.tokenizer, self.seed)

    def open_evaluator(self, config: PairEvalConfig) -> PairEvaluator:
        if config.data is None:
            return PairEvaluator(config, self, None, headline="accuracy")
        held_out = _open_judged(self.config, self.tokenizer, self.seed, config.data).all()
        return PairEvaluator(config, self, lambda: self.make_batch(held_out), headline="accuracy")

    def make_batch(self, examples: list[Judged]) -> TensorDict:
        rows = [
            row_fields(item.row)
            | {"is_chosen": item.is_desirable, "loss_weights": 1.0 / len(examples)}
            for item in examples
        ]
        batch = collate(rows)
        batch["ref_logprob_sums"] = self._reference.logprob_sums(batch)
        batch["kl_baselines"] = torch.full((len(rows),), self._baseline(examples))
        return batch

    def close(self) -> None:
        self._reference.close()
        super().close()

    def _baseline(self, examples: list[Judged]) -> float:
        """KL(policy || reference), estimated on each prompt with its neighbour's response."""
        limit = min(self.config.max_length, self.config.train.max_tokens_per_microbatch)
        rows = [item.row for item in examples]
        batch = collate(
            [
                row_fields(mismatched(row, other, limit))
                for row, other in zip(rows, [*rows[1:], rows[0]], strict=True)
            ]
        )
        difference = logprob_sums(self.engine, batch) - self._reference.logprob_sums(batch)
        return max(0.0, float(difference.double().mean()))


def mismatched(row: Demonstration, other: Demonstration, limit: int) -> Demonstration:
    """The prompt of ``row`` with the response of ``other``, at most ``limit`` tokens."""
    start, response = row.loss_mask.index(True), other.loss_mask.index(True)
    ids = row.input_ids[:start] + other.input_ids[response:]
    mask = row.loss_mask[:start] + other.loss_mask[response:]
    return Demonstration(ids[:limit], mask[:limit])


def _open_pairs(
    config: DPOStageConfig, tokenizer: Any, seed: int, data: DataConfig | None = None
) -> ExampleSource[Pair]:
    needs_reference = config.reference == "columns"
    return open_pairs(config, tokenizer, seed=seed, data=data, needs_reference=needs_reference)


def _open_judged(
    config: DPOStageConfig, tokenizer: Any, seed: int, data: DataConfig | None = None
) -> ExampleSource[Judged]:
    """The responses to train on or, from ``data``, all held-out ones, evaluated as one batch."""
    found = open_judged(config, tokenizer, seed=seed, data=data)
    smallest = len(found) if data else len(found) % config.batch_size
    if smallest == 1:
        raise ConfigError(
            f"{'eval.data' if data else 'dpo.batch_size'}: {len(found)} responses leave a batch of "
            "one; the baseline of kto needs two or more"
        )
    return found


def _open_all(config: DPOConfig, tokenizer: Any) -> None:
    open_data = _open_judged if config.dpo.loss == "kto" else _open_pairs
    open_data(config.dpo, tokenizer, config.run.seed)
    if config.eval.data is not None:
        open_data(config.dpo, tokenizer, config.run.seed, config.eval.data)
