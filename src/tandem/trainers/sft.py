"""Supervised fine-tuning: one stage, alone (``tandem sft``) or as the warm-up of an RL run."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from tandem.algorithms.aggregation import loss_weights
from tandem.algorithms.sft import sft_loss
from tandem.checkpoint import BackgroundWriter, CheckpointDir, latest, staging, supersede_newer
from tandem.config import LoraConfig, RolloutConfig, SFTConfig, SFTStageConfig
from tandem.data.batch import collate
from tandem.data.demonstrations import Demonstration, DemonstrationSource, open_demonstrations
from tandem.errors import ConfigError
from tandem.models.loading import context_length, load_tokenizer, resolve_model
from tandem.observe import MetricsLogger, Progress, RunReport, final_screen, write_summary
from tandem.rollout import ComposedInferenceEngine, open_inference_engine
from tandem.train import EngineRegistry, TrainEngine
from tandem.trainers.evaluate import Evaluation, HeldOut
from tandem.trainers.publish import publish_weights, release_weights
from tandem.trainers.run import Run, open_run, seed_generators
from tandem.types import FinetuneSpec, SaveLoadMeta

log = logging.getLogger(__name__)


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
        stack.callback(stage.engine.destroy)
        evaluator = _Evaluator(config, run, stage)
        stack.callback(evaluator.close)
        if run.checkpoint is not None:
            stage.restore(run.checkpoint)
            evaluator.restore(run.checkpoint)
        elif evaluator.held_out is not None:
            run.metrics.log(0, evaluator.evaluate(0))
        _run_steps(stage, run, run.dir, run.metrics, "sft", evaluator)
        return _finish(config, run, stage, evaluator)


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
            _run_steps(stage, run, directory, metrics, "warm-up", None)
            stage.engine.save(SaveLoadMeta(str(result), tokenizer=stage.tokenizer))
        finally:
            stage.engine.destroy()
    return str(result)


class SFTStage:
    """Engine, data and position of one supervised stage."""

    def __init__(
        self,
        config: SFTStageConfig,
        model_path: str,
        *,
        seed: int,
        lora: LoraConfig | None = None,
        tokenizer_path: str | None = None,
    ) -> None:
        seed_generators(seed)
        self.config = config
        self.model_path = model_path
        self.tokenizer = load_tokenizer(tokenizer_path or model_path)
        self.context = context_length(model_path)
        if config.max_length > self.context:
            raise ConfigError(
                f"sft.max_length: got {config.max_length}, allowed: <= {self.context}, the context "
                f"of the model in {model_path!r}"
            )
        self.data: DemonstrationSource = open_demonstrations(config, self.tokenizer, seed=seed)
        self.step = 0
        per_epoch = -(-len(self.data) // config.batch_size)
        self.total_steps = config.steps or config.epochs * per_epoch
        self._batches = self.data.batches(config.batch_size)
        self.engine: TrainEngine = EngineRegistry.new(
            "language_model",
            config.train.backend,
            config=config.train,
            model_path=model_path,
            lora=lora,
            seed=seed,
            tokenizer_path=tokenizer_path,
        )
        self.engine.initialize(
            ft_spec=FinetuneSpec(
                total_train_epochs=1,
                dataset_size=self.total_steps * config.batch_size,
                train_batch_size=config.batch_size,
            )
        )

    def run_step(self) -> dict[str, float]:
        """One optimizer step on the next batch."""
        started = time.monotonic()
        batch = to_batch(next(self._batches))
        result = self.engine.train_batch(batch, sft_loss)
        self.engine.lr_scheduler_step()
        self.step += 1
        wall = time.monotonic() - started
        num_tokens = float(batch["attention_mask"].sum())
        metrics = {name if "/" in name else f"sft/{name}": v for name, v in result.items()}
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


def to_batch(rows: list[Demonstration]) -> TensorDict:
    """Demonstrations as a padded batch with token-mean loss weights of one optimizer step."""
    batch = collate(
        [
            {"input_ids": torch.tensor(row.input_ids), "loss_mask": torch.tensor(row.loss_mask)}
            for row in rows
        ]
    )
    batch["loss_weights"] = loss_weights("token-mean", batch["loss_mask"])
    return batch


def _run_steps(
    stage: SFTStage,
    run: Run,
    directory: Path,
    metrics: MetricsLogger,
    title: str,
    evaluator: _Evaluator | None,
) -> None:
    tracking, keep = run.config.tracking, run.config.checkpoint.keep
    # A warm-up, which has no evaluator, is a part of its run: what is uploaded are that run's own.
    upload_url = run.config.checkpoint.upload_url if evaluator else None
    every = stage.config.checkpoint_every
    with Progress(
        "sft", stage.total_steps, start=stage.step, title=title, enabled=tracking.progress
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
                stage.save(
                    directory,
                    keep=keep,
                    upload_url=upload_url,
                    background=run.writer,
                    extra={
                        "wall_s": run.elapsed_s(),
                        "accuracies": evaluator.accuracies if evaluator else {},
                    },
                )
            run.raise_if_stopped()


class _Evaluator:
    """Held-out accuracy of the model in training; its generator starts on first use."""

    def __init__(self, config: SFTConfig, run: Run, stage: SFTStage) -> None:
        self.config, self.run, self.stage = config, run, stage
        self.held_out: HeldOut | None = None
        if config.eval.data is not None:
            self.held_out = HeldOut(
                config.eval,
                config.reward,
                stage.tokenizer,
                max_prompt_tokens=stage.context - 1,
                seed=config.run.seed,
            )
        self.accuracies: dict[str, float] = {}
        self.last: Evaluation | None = None
        self._engine: ComposedInferenceEngine | None = None

    def is_due(self, step: int) -> bool:
        every = self.config.eval.every
        due = (every > 0 and step % every == 0) or step == self.stage.total_steps
        return self.held_out is not None and due

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
        return self.last.as_metrics("heldout", self.config.eval.samples)

    def _started(self) -> ComposedInferenceEngine:
        if self._engine is None:
            self._engine = open_inference_engine(
                self.config.inference,
                RolloutConfig(generation=self.config.eval.generation),
                model_path=self.stage.model_path,
                tokenizer=self.stage.tokenizer,
                incarnation=self.run.incarnation,
                seed=self.config.run.seed,
                tokenizer_path=self.config.model.tokenizer_path,
            )
        return self._engine

    def restore(self, checkpoint: CheckpointDir) -> None:
        self.accuracies = dict(checkpoint.extra["accuracies"])

    def close(self) -> None:
        if self._engine is not None:
            self._engine.destroy()
        release_weights(self.run.incarnation)


def _finish(config: SFTConfig, run: Run, stage: SFTStage, evaluator: _Evaluator) -> dict[str, Any]:
    model_dir: Path | None = None
    if config.checkpoint.export_model:
        model_dir = run.dir / "model"
        stage.engine.save(SaveLoadMeta(str(model_dir), tokenizer=stage.tokenizer))
    summary = {
        "accuracy_before": evaluator.accuracies.get("0"),
        "accuracy_after": evaluator.accuracies.get(str(stage.step)),
        "wall_s": run.elapsed_s(),
        "steps": stage.step,
        "seed": config.run.seed,
        "num_demonstrations": len(stage.data),
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
                before=evaluator.accuracies.get("0"),
                after=evaluator.accuracies.get(str(stage.step)),
                samples_after=evaluator.last.samples if evaluator.last else (),
            )
        )
    return summary
