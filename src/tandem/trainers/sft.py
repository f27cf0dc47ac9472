"""Supervised fine-tuning: one stage, alone (``tandem sft``) or as the warm-up of an RL run."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from tandem.algorithms.aggregation import loss_weights
from tandem.algorithms.sft import sft_loss
from tandem.checkpoint import CheckpointDir, latest, supersede_newer
from tandem.config import RolloutConfig, SFTConfig, SFTStageConfig
from tandem.data.batch import collate
from tandem.data.demonstrations import Demonstration, open_demonstrations
from tandem.data.examples import ExampleSource
from tandem.models.loading import resolve_model
from tandem.observe import MetricsLogger
from tandem.rollout import ComposedInferenceEngine, open_inference_engine
from tandem.trainers.evaluate import Evaluation, HeldOut
from tandem.trainers.publish import publish_weights, release_weights
from tandem.trainers.ranks import on_all_ranks
from tandem.trainers.run import Run, open_run
from tandem.trainers.supervised import SupervisedStage, begin, finish, is_due, run_steps
from tandem.types import SaveLoadMeta


@on_all_ranks
def run_sft(config: SFTConfig, *, resume: bool = False) -> dict[str, Any]:
    """Fine-tune as ``config`` says and return the content of ``summary.json``.

    Raises:
        Preempted: SIGTERM or SIGINT; the state is saved and ``resume=True`` goes on from there.
        ConfigError, DataError: before anything was trained.
    """
    with open_run(config, resume=resume) as run, ExitStack() as stack:
        model_path = resolve_model(config.model, seed=config.run.seed, workdir=run.dir)
        stage = SFTStage(
            config.sft,
            model_path,
            seed=config.run.seed,
            lora=config.model.lora,
            tokenizer_path=config.model.tokenizer_path,
        )
        stack.callback(stage.close)
        evaluator = _Evaluator(config, run, stage)
        stack.callback(evaluator.close)
        begin(run, stage, evaluator)
        run_steps(stage, run, run.dir, run.metrics, "sft", evaluator)
        result = {
            "accuracy_before": evaluator.accuracies.get("0"),
            "accuracy_after": evaluator.accuracies.get(str(stage.step)),
        }
        samples = evaluator.last.samples if evaluator.last else ()
        return finish(config, run, stage, result, samples_after=samples)


def run_stage(
    config: SFTStageConfig,
    model_path: str,
    run: Run,
    directory: Path,
    *,
    tokenizer_path: str | None = None,
) -> str:
    """Train one stage inside ``run`` and return the directory of the resulting model.

    A stage that is complete already is not run again; one that was cut short goes on.
    """
    result = directory / "model"
    if (result / "config.json").exists():
        return str(result)
    directory.mkdir(exist_ok=True)
    checkpoint = latest(directory)
    if checkpoint is not None:
        supersede_newer(directory, checkpoint.step)
    stage = SFTStage(config, model_path, seed=run.config.run.seed, tokenizer_path=tokenizer_path)
    first = checkpoint.step + 1 if checkpoint else 1
    with MetricsLogger(directory, resume_step=first) as metrics:
        try:
            if checkpoint is not None:
                stage.restore(checkpoint)
            run_steps(stage, run, directory, metrics, "warm-up", None)
            stage.engine.save(SaveLoadMeta(str(result), tokenizer=stage.tokenizer))
        finally:
            stage.close()
    return str(result)


class SFTStage(SupervisedStage[SFTStageConfig, Demonstration]):
    """Cross entropy of demonstrations."""

    kind = "sft"
    prefix = "sft"
    loss = staticmethod(sft_loss)

    def _open_data(self) -> ExampleSource[Demonstration]:
        return open_demonstrations(self.config, self.tokenizer, seed=self.seed)

    def make_batch(self, examples: list[Demonstration]) -> TensorDict:
        """A padded batch with token-mean loss weights."""
        batch = collate(
            [
                {"input_ids": torch.tensor(row.input_ids), "loss_mask": torch.tensor(row.loss_mask)}
                for row in examples
            ]
        )
        batch["loss_weights"] = loss_weights("token-mean", batch["loss_mask"])
        return batch


class _Evaluator:
    """Held-out accuracy of the model in training; its generator starts on first use."""

    def __init__(self, config: SFTConfig, run: Run, stage: SFTStage) -> None:
        self.config, self.run, self.stage = config, run, stage
        self.held_out: HeldOut | None = None
        if config.eval.data is not None:
            self.held_out = HeldOut(
                config.eval,
                self._rollout(),
                stage.tokenizer,
                max_prompt_tokens=stage.context - 1,
                max_tokens=stage.context,
                seed=config.run.seed,
            )
        self.accuracies: dict[str, float] = {}
        self.last: Evaluation | None = None
        self._engine: ComposedInferenceEngine | None = None

    def is_due(self, step: int) -> bool:
        last = self.stage.total_steps
        return self.held_out is not None and is_due(step, self.config.eval.every, last)

    def evaluate(self, step: int) -> dict[str, float]:
        assert self.held_out is not None
        engine = self._started()
        publish_weights(
            self.stage.engine,
            engine,
            version=self.stage.engine.get_version() + 1,
            incarnation=self.run.incarnation,
            config=self.config.inference,
            disk_path=str(self.run.dir / "weights"),
        )
        self.last = self.held_out.evaluate(engine)
        self.accuracies[str(step)] = self.last.accuracy
        return self.last.as_metrics("heldout")

    def _rollout(self) -> RolloutConfig:
        return RolloutConfig(reward=self.config.reward, generation=self.config.eval.decoding)

    def _started(self) -> ComposedInferenceEngine:
        if self._engine is None:
            self._engine = open_inference_engine(
                self.config.inference,
                self._rollout(),
                model_path=self.stage.model_path,
                tokenizer=self.stage.tokenizer,
                incarnation=self.run.incarnation,
                seed=self.config.run.seed,
                tokenizer_path=self.config.model.tokenizer_path,
            )
        return self._engine

    def state(self) -> dict[str, Any]:
        return {"accuracies": self.accuracies}

    def restore(self, checkpoint: CheckpointDir) -> None:
        self.accuracies = dict(checkpoint.extra["accuracies"])

    def close(self) -> None:
        if self._engine is not None:
            self._engine.destroy()
        release_weights(self.run.incarnation)
