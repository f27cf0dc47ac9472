"""Training of a reward model on pairs (``tandem reward``)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from tensordict import TensorDict

from tandem.algorithms.preference_objective import RewardObjective
from tandem.config import (
    DataConfig,
    LoraConfig,
    PairEvalConfig,
    RewardModelConfig,
    RewardStageConfig,
)
from tandem.data.examples import ExampleSource
from tandem.data.preferences import Pair, open_pairs
from tandem.trainers.pairs import PairEvaluator, pairs_to_batch, starting_model
from tandem.trainers.ranks import on_all_ranks
from tandem.trainers.run import open_run
from tandem.trainers.supervised import SupervisedStage, begin, finish, run_steps


@on_all_ranks
def run_reward(config: RewardModelConfig, *, resume: bool = False) -> dict[str, Any]:
    """Train a reward model as ``config`` says and return the content of ``summary.json``.

    The model starts from a language model, with a new head, or from a reward model. ``accuracy_*``
    is the share of held-out pairs whose chosen response scores higher, ``margin_*`` by how much.

    Raises:
        Preempted: SIGTERM or SIGINT; the state is saved and ``resume=True`` goes on from there.
        ConfigError, DataError: before anything was trained.
    """
    with open_run(config, resume=resume) as run, ExitStack() as stack:
        model_path = starting_model(config, run, lambda tokenizer: _open_all(config, tokenizer))
        stage = RewardStage(
            config.reward,
            model_path,
            seed=config.run.seed,
            lora=config.model.lora,
            tokenizer_path=config.model.tokenizer_path,
        )
        stack.callback(stage.close)
        evaluator = stage.open_evaluator(config.eval)
        begin(run, stage, evaluator)
        run_steps(stage, run, run.dir, run.metrics, "reward", evaluator)
        commands = (f"tandem status {run.dir}",)
        return finish(
            config,
            run,
            stage,
            evaluator.summary(),
            metric="pair accuracy",
            next_commands=commands,
        )


class RewardStage(SupervisedStage[RewardStageConfig, Pair]):
    """Bradley-Terry on the scores of two responses."""

    kind = "reward"
    prefix = "reward_model"
    model_type = "reward_model"

    def __init__(
        self,
        config: RewardStageConfig,
        model_path: str,
        *,
        seed: int,
        lora: LoraConfig | None = None,
        tokenizer_path: str | None = None,
    ) -> None:
        self.loss = RewardObjective(center_coef=config.center_coef)
        super().__init__(config, model_path, seed=seed, lora=lora, tokenizer_path=tokenizer_path)

    def _open_data(self) -> ExampleSource[Pair]:
        return _open(self.config, self.tokenizer, self.seed)

    def open_evaluator(self, config: PairEvalConfig) -> PairEvaluator:
        if config.data is None:
            return PairEvaluator(config, self, None, headline="accuracy")
        held_out = _open(self.config, self.tokenizer, self.seed, config.data)
        batch = self.make_batch(held_out.all())
        return PairEvaluator(config, self, lambda: batch, headline="accuracy")

    def make_batch(self, examples: list[Pair]) -> TensorDict:
        return pairs_to_batch(examples)


def _open(
    config: RewardStageConfig, tokenizer: Any, seed: int, data: DataConfig | None = None
) -> ExampleSource[Pair]:
    return open_pairs(config, tokenizer, seed=seed, data=data, needs_prompt=False)


def _open_all(config: RewardModelConfig, tokenizer: Any) -> None:
    _open(config.reward, tokenizer, config.run.seed)
    if config.eval.data is not None:
        _open(config.reward, tokenizer, config.run.seed, config.eval.data)
