"""The loop of every supervised stage: batches of examples, one step each, evaluation, checkpoints.

What the examples are, how they become a batch and which loss they have is said by the stages in
``sft``, ``preference`` and ``reward_model``.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from tensordict import TensorDict

from tandem.checkpoint import BackgroundWriter, CheckpointDir, staging
from tandem.config import LoraConfig, Root, StageConfig
from tandem.data.examples import ExampleSource
from tandem.errors import ConfigError
from tandem.launch import open_engine
from tandem.models.loading import context_length, load_tokenizer
from tandem.observe import MetricsLogger, Progress, RunReport, final_screen, write_summary
from tandem.train import TrainEngine
from tandem.trainers.run import Run, seed_generators
from tandem.types import FinetuneSpec, LossFn, SaveLoadMeta

log = logging.getLogger(__name__)

Example = TypeVar("Example")
Config = TypeVar("Config", bound=StageConfig)


class SupervisedStage(ABC, Generic[Config, Example]):
    """Engine, data and position of one supervised stage."""

    kind: ClassVar[Literal["sft", "dpo", "reward"]]
    prefix: ClassVar[str]
    """Of the metrics that the engine gives."""
    model_type: ClassVar[str] = "language_model"
    loss: LossFn

    def __init__(
        self,
        config: Config,
        model_path: str,
        *,
        seed: int,
        lora: LoraConfig | None = None,
        tokenizer_path: str | None = None,
    ) -> None:
        seed_generators(seed)
        self.config, self.seed, self.model_path = config, seed, model_path
        self.tokenizer_path = tokenizer_path
        self.tokenizer = load_tokenizer(tokenizer_path or model_path)
        self.context = context_length(model_path)
        if config.max_length > self.context:
            raise ConfigError(
                f"{self.kind}.max_length: got {config.max_length}, allowed: <= {self.context}, the "
                f"context of the model in {model_path!r}"
            )
        self.data = self._open_data()
        self.step = 0
        per_epoch = -(-len(self.data) // config.batch_size)
        self.total_steps = config.steps or config.epochs * per_epoch
        self._batches = self.data.batches(config.batch_size)
        self.engine = self._open_engine(lora)

    @abstractmethod
    def _open_data(self) -> ExampleSource[Example]: ...

    @abstractmethod
    def make_batch(self, examples: list[Example]) -> TensorDict:
        """The examples of one optimizer step with the weights that the loss needs."""

    def run_step(self) -> dict[str, float]:
        """One optimizer step on the next batch."""
        started = time.monotonic()
        batch = self.make_batch(next(self._batches))
        result = self.engine.train_batch(batch, self.loss)
        self.engine.lr_scheduler_step()
        self.step += 1
        wall = time.monotonic() - started
        num_tokens = float(batch["attention_mask"].sum())
        metrics = {
            name if "/" in name else f"{self.prefix}/{name}": v for name, v in result.items()
        }
        return metrics | {"timing_s/step": wall, "perf/tokens_per_s": num_tokens / wall}

    def save(
        self,
        run_dir: Path,
        *,
        keep: int | None,
        upload_url: str | None = None,
        background: BackgroundWriter | None = None,
        extra: dict[str, Any],
    ) -> None:
        with staging(
            run_dir, self.step, keep=keep, upload_url=upload_url, background=background
        ) as target:
            self.engine.save_checkpoint(str(target.path / "policy"), global_step=self.step)
            target.manifest_extra.update({"data": self.data.state_dict(), **extra})

    def restore(self, checkpoint: CheckpointDir) -> None:
        self.engine.load_checkpoint(str(checkpoint.path / "policy"))
        self.data.load_state_dict(checkpoint.extra["data"])
        self._batches = self.data.batches(self.config.batch_size)
        self.step = checkpoint.step
        log.info("resumed from step %d", self.step)

    def close(self) -> None:
        self.engine.destroy()

    def _open_engine(self, lora: LoraConfig | None) -> TrainEngine:
        config = self.config
        return open_engine(
            self.model_type,
            config.train,
            model_path=self.model_path,
            lora=lora,
            seed=self.seed,
            tokenizer_path=self.tokenizer_path,
            ft_spec=FinetuneSpec(
                total_train_epochs=1,
                dataset_size=self.total_steps * config.batch_size,
                train_batch_size=config.batch_size,
            ),
        )


class Evaluator(Protocol):
    """What is measured on held-out data; ``state`` is kept in checkpoints."""

    def is_due(self, step: int) -> bool: ...

    def evaluate(self, step: int) -> dict[str, float]: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, checkpoint: CheckpointDir) -> None: ...


def is_due(step: int, every: int, last: int) -> bool:
    """Whether an evaluation every ``every`` steps (0: never) and at the ``last`` falls on this."""
    return step == last or (every > 0 and step % every == 0)


def begin(run: Run, stage: SupervisedStage[Any, Any], evaluator: Evaluator) -> None:
    """Go on from the run's checkpoint, or evaluate the model that training starts from."""
    if run.checkpoint is not None:
        stage.restore(run.checkpoint)
        evaluator.restore(run.checkpoint)
    elif evaluator.is_due(stage.total_steps):
        run.metrics.log(0, evaluator.evaluate(0))


def run_steps(
    stage: SupervisedStage[Any, Any],
    run: Run,
    directory: Path,
    metrics: MetricsLogger,
    title: str,
    evaluator: Evaluator | None,
) -> None:
    """All steps that are left; an evaluator comes with a stage that is a run of its own."""
    tracking, keep = run.config.tracking, run.config.checkpoint.keep
    # A warm-up, which has no evaluator, is a part of its run: what is uploaded are that run's own.
    upload_url = run.config.checkpoint.upload_url if evaluator else None
    every = stage.config.checkpoint_every
    with Progress(
        stage.kind, stage.total_steps, start=stage.step, title=title, enabled=tracking.progress
    ) as progress:
        while stage.step < stage.total_steps:
            values = stage.run_step()
            if evaluator is not None and evaluator.is_due(stage.step):
                values |= evaluator.evaluate(stage.step)
            metrics.log(stage.step, values)
            progress.update(stage.step, values)
            stopping = run.stop.requested is not None
            last = stage.step == stage.total_steps
            if stopping or last or (every and stage.step % every == 0):
                extra = {"wall_s": run.elapsed_s(), **(evaluator.state() if evaluator else {})}
                stage.save(
                    directory,
                    keep=keep,
                    upload_url=upload_url,
                    background=run.writer,
                    extra=extra,
                )
            if stopping:
                run.end_stopped()


def finish(
    config: Root, run: Run, stage: SupervisedStage[Any, Any], result: dict[str, Any], **report: Any
) -> dict[str, Any]:
    """Export the model, write ``summary.json`` with ``result`` in front, show the last screen."""
    model_dir: Path | None = None
    if config.checkpoint.export_model:
        model_dir = run.dir / "model"
        stage.engine.save(SaveLoadMeta(str(model_dir), tokenizer=stage.tokenizer))
    summary = {
        **result,
        "wall_s": run.elapsed_s(),
        "steps": stage.step,
        "seed": config.run.seed,
        "num_examples": len(stage.data),
        "dropped": stage.data.dropped,
        "model_dir": str(model_dir) if model_dir else None,
    }
    run.wait_for_checkpoint()
    write_summary(run.dir, summary)
    if config.tracking.progress:
        final_screen(
            RunReport(
                title=config.run.name,
                run_dir=run.dir,
                steps=stage.step,
                wall_s=run.elapsed_s(),
                model_dir=model_dir,
                before=result["accuracy_before"],
                after=result["accuracy_after"],
                **report,
            )
        )
    return summary
