"""Reinforcement learning: one loop for every algorithm; what differs between them is data.

Two loops run at once when ``rollout.max_staleness > 0``::

    generator (own process, own core)          trainer (this process)
    ---------------------------------          ----------------------
    takes: admitted episodes                   takes: one batch of ready episodes   [prepare_batch]
    makes: tokens with versions                makes: one new weight version        [train, publish]
    waits for: admission (staleness budget)    waits for: batch_size ready episodes
    unblocked by: ``set_version``              unblocked by: an episode that ends

With ``max_staleness = 0`` they alternate. An update reaches a running request between two tokens.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from tandem.algorithms.advantages import check_estimator
from tandem.algorithms.correction import check_correction
from tandem.checkpoint import list_steps, staging
from tandem.config import RLConfig
from tandem.data.prompts import PromptSource, open_prompts
from tandem.errors import ConfigError, EngineError
from tandem.models.loading import context_length, load_tokenizer, resolve_model
from tandem.observe import (
    Progress,
    RunReport,
    Sample,
    final_screen,
    write_summary,
)
from tandem.rollout import (
    ComposedInferenceEngine,
    RolloutWorkflow,
    load_reward,
    load_workflow,
    open_inference_engine,
)
from tandem.rollout.group import GroupWorkflow
from tandem.store import STORE_FILE, SqliteStore, StoreWriter
from tandem.train import EngineRegistry
from tandem.trainers.bubble import Bubble
from tandem.trainers.evaluate import Evaluation, HeldOut
from tandem.trainers.frozen import check_scores, check_vocabulary
from tandem.trainers.publish import publish_weights, release_weights
from tandem.trainers.ranks import on_all_ranks
from tandem.trainers.rl_batch import build_objective
from tandem.trainers.rl_learner import Learner, open_learner
from tandem.trainers.rl_rewards import has_signal
from tandem.trainers.run import Run, open_run, seed_generators
from tandem.trainers.sft import run_stage
from tandem.trainers.watch import Watch
from tandem.types import SaveLoadMeta
from tandem.weights import Manifest

log = logging.getLogger(__name__)


@on_all_ranks
def run_rl(config: RLConfig, *, resume: bool = False) -> dict[str, Any]:
    """Train a policy as ``config`` says and return the content of ``summary.json``.

    Raises:
        Preempted: SIGTERM or SIGINT; the state is saved and ``resume=True`` goes on from there.
        ConfigError, DataError: before anything was trained.
        RolloutError, TrainingDiverged: the fault budget is spent.
    """
    with open_run(config, resume=resume) as run:
        model_path = resolve_model(config.model, seed=config.run.seed, workdir=run.dir)
        task = open_task(config, model_path)
        if config.warmup is not None:
            model_path = run_stage(
                config.warmup,
                model_path,
                run,
                run.dir / "warmup",
                tokenizer_path=config.model.tokenizer_path,
            )
        with open_session(task, run, model_path) as session:
            session.train()
            return session.finish()


@dataclasses.dataclass
class RLState:
    """What a checkpoint keeps of the loop itself."""

    step: int = 0
    train_s: float = 0.0
    max_staleness_seen: int = 0
    mismatch_max: float = 0.0
    accuracies: dict[str, float] = dataclasses.field(default_factory=dict)
    rewards: list[float | None] = dataclasses.field(default_factory=list)
    samples_before: list[dict[str, Any]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class RLTask:
    """What a run learns and is measured by. Opened before anything is trained, so that a mistake in
    it costs no time; ``config`` has its prompt limit resolved."""

    config: RLConfig
    tokenizer: Any
    prompts: PromptSource
    workflow: RolloutWorkflow
    held_out: HeldOut | None

    def close(self) -> None:
        """Release what the workflows hold, when no episode runs any more."""
        self.workflow.close()
        if self.held_out is not None:
            self.held_out.close()


def open_task(config: RLConfig, model_path: str) -> RLTask:
    EngineRegistry.get_engine_cls("language_model", config.train.backend, config.train.device)
    name = config.algorithm.advantage
    check_estimator(name, config.algorithm.advantage_kwargs)
    build_objective(config.algorithm, config.teacher)
    for correction in config.algorithm.corrections:
        check_correction(correction.method, correction.kwargs)
    tokenizer = load_tokenizer(config.model.tokenizer_path or model_path)
    _check_other_models(config, tokenizer)
    config = _with_prompt_limit(config, model_path)
    limit = config.rollout.max_prompt_tokens
    assert limit is not None
    workflow = _open_workflow(config, tokenizer)
    prompts = open_prompts(
        config.data,
        tokenizer,
        seed=config.run.seed,
        max_prompt_tokens=limit,
        overlong=config.rollout.overlong_prompt,
    )
    held_out = None
    if config.eval.data is not None:
        held_out = HeldOut(
            config.eval,
            config.rollout,
            tokenizer,
            max_prompt_tokens=limit,
            max_tokens=_context(config, model_path),
            seed=config.run.seed,
        )
    return RLTask(config, tokenizer, prompts, workflow, held_out)


def _check_other_models(config: RLConfig, tokenizer: Any) -> None:
    """Critic, reward model and teacher read the policy's tokens and are what they have to be."""
    critic, scorer, teacher = config.critic, config.reward_model, config.teacher
    if critic is not None:
        EngineRegistry.get_engine_cls("value_model", critic.train.backend, critic.train.device)
        if critic.path is not None:
            check_vocabulary(critic.path, tokenizer, "critic.path")
    if scorer is not None:
        EngineRegistry.get_engine_cls("reward_model", scorer.backend, scorer.device)
        check_scores(scorer.path, "reward_model.path")
        check_vocabulary(scorer.path, tokenizer, "reward_model.path")
    if teacher is not None:
        EngineRegistry.get_engine_cls("language_model", teacher.backend, teacher.device)
        check_vocabulary(teacher.path, tokenizer, "teacher.path")


@contextmanager
def open_session(task: RLTask, run: Run, model_path: str) -> Iterator[RLSession]:
    """Start the engines, restore the newest checkpoint if there is one, release all at the end."""
    config = task.config
    seed_generators(config.run.seed)
    with ExitStack() as stack:
        learner = stack.enter_context(open_learner(config, model_path))
        store = SqliteStore(run.dir / STORE_FILE)
        stack.callback(store.close)
        writer = StoreWriter(store, run.incarnation)
        stack.callback(writer.close)
        rollout = open_inference_engine(
            config.inference,
            config.rollout,
            model_path=model_path,
            tokenizer=task.tokenizer,
            incarnation=run.incarnation,
            seed=config.run.seed,
            tokenizer_path=config.model.tokenizer_path,
            writer=writer,
        )
        stack.callback(release_weights, run.incarnation)
        stack.callback(task.close)
        stack.callback(rollout.destroy)
        progress = stack.enter_context(
            Progress("rl", total=config.steps, enabled=config.tracking.progress)
        )
        watch = Watch(run, rollout, steps=config.steps)
        session = RLSession(task, run, learner, rollout, writer, watch, progress)
        stack.enter_context(watch.watching())
        session.restore()
        yield session


@dataclasses.dataclass
class RLSession:
    """The engines of one start of a run and the loop over them."""

    task: RLTask
    run: Run
    learner: Learner
    rollout: ComposedInferenceEngine
    writer: StoreWriter
    watch: Watch
    progress: Progress

    def __post_init__(self) -> None:
        self.config = self.task.config
        self.state = RLState()
        self.bubble = Bubble()
        self._busy_s: float | None = None
        """The generator's at the end of a step that the next one follows at once."""
        self.last_evaluation: Evaluation | None = None

    # --- the loop -----------------------------------------------------------------------------

    def train(self) -> None:
        self.publish(self.learner.policy.get_version())
        if self.state.step == 0 and self.run.checkpoint is None:
            self._evaluate()
            self._save()
        while self.state.step < self.config.steps:
            metrics = self.step()
            is_last = self.state.step == self.config.steps
            if is_last:
                self.rollout.pause()
            if is_last or self._is_due(self.config.eval.every):
                metrics |= self._evaluate()
            self.record(metrics)
            stopping = self.run.stop.requested is not None
            if stopping or is_last or self._is_due(self.config.checkpoint.every):
                self._save()
            if stopping:
                self.run.end_stopped()

    def step(self) -> dict[str, float]:
        """One training batch: roll out, prepare, optimise, publish exactly one new version."""
        # To ask a busy generator takes milliseconds: once a step.
        before_s = self._busy_s if self._busy_s is not None else self.rollout.busy_s()
        clock = _Clock()
        batch = self.next_batch()
        clock.lap("rollout")
        staleness = self.rollout.take_metrics()
        metrics = self.train_on(batch, clock.lap) | staleness
        total = clock.total()
        self._busy_s, busy_s = self.rollout.busy_s(), None
        if before_s is not None and self._busy_s is not None:
            busy_s = self._busy_s - before_s
        metrics |= {f"timing_s/{name}": value for name, value in clock.laps.items()}
        metrics["timing_s/step"] = total
        metrics["perf/tokens_per_s"] = metrics["perf/num_tokens"] / total
        metrics |= self.bubble.add(step_s=total, wait_s=clock.laps["rollout"], busy_s=busy_s)
        self.state.step += 1
        self.state.train_s += total
        return metrics

    def next_batch(self) -> TensorDict:
        """The rows of the next step's episodes, when they are ready."""
        accept = None
        if self.config.rollout.drop_zero_variance:
            accept = partial(has_signal, advantage=self.config.algorithm.advantage)
        self.watch.phase("rollout", step=self.state.step + 1)
        return self.rollout.prepare_batch(self.task.prompts, self.task.workflow, accept)

    def train_on(
        self, batch: TensorDict, lap: Callable[[str], None] = lambda name: None
    ) -> dict[str, float]:
        """Learn from a batch, publish the new version, record both; ``lap`` ends each part."""
        self.watch.phase("training")
        trained = self.learner.learn(batch, lap=lap, beat=self.watch.beat)
        version = self.learner.policy.get_version() + 1
        manifest = self.publish(version)
        lap("publish")
        self.writer.log("trained", version, {"metrics": trained, "weights": manifest.digest()})
        return trained

    def publish(self, version: int) -> Manifest:
        """Let the generator serve the policy's weights as ``version``."""
        self.watch.phase("publishing weights")
        return publish_weights(
            self.learner.policy,
            self.rollout,
            version=version,
            incarnation=self.run.incarnation,
            config=self.config.inference,
            disk_path=str(self.run.dir / "weights"),
        )

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.state.step % every == 0

    # --- what surrounds a step ------------------------------------------------------------------

    def record(self, metrics: dict[str, float]) -> None:
        """Write a step's metrics, after a look at what must not be."""
        state = self.state
        state.max_staleness_seen = max(
            state.max_staleness_seen, int(metrics.get("staleness/max", 0))
        )
        state.mismatch_max = max(state.mismatch_max, metrics.get("mismatch/same_version_max", 0.0))
        if state.max_staleness_seen > self.config.rollout.max_staleness:
            raise AssertionError(
                f"trained on a token {state.max_staleness_seen} versions old, allowed: "
                f"{self.config.rollout.max_staleness}"
            )
        if self.config.inference.deterministic and state.mismatch_max > 0:
            raise EngineError(
                "inference.deterministic: under the same weights a log-probability of the sampler "
                f"is {state.mismatch_max:g} from the train engine's, allowed: 0"
            )
        state.rewards.append(metrics.get("reward/mean"))
        self.run.metrics.log(state.step, metrics)
        self.progress.update(state.step, metrics)

    def _evaluate(self) -> dict[str, float]:
        if self.task.held_out is None:
            return {}
        self.watch.phase("evaluation")
        self._busy_s = None
        result = self.task.held_out.evaluate(self.rollout)
        self.last_evaluation = result
        self.state.accuracies[str(self.state.step)] = result.accuracy
        if self.state.step == 0:
            self.state.samples_before = [dataclasses.asdict(s) for s in result.samples]
            self.run.metrics.log(0, result.as_metrics("heldout"))
        return result.as_metrics("heldout")

    def _save(self) -> None:
        config = self.config.checkpoint
        self.watch.phase("checkpoint")
        self._busy_s = None
        with staging(
            self.run.dir,
            self.state.step,
            keep=config.keep,
            upload_url=config.upload_url,
            background=self.run.writer,
        ) as target:
            self.learner.save(target.path, self.state.step)
            target.manifest_extra["wall_s"] = self.run.elapsed_s()
            target.manifest_extra["loop"] = dataclasses.asdict(self.state)
            target.manifest_extra["bubble"] = dataclasses.asdict(self.bubble)
            target.manifest_extra["data"] = self.task.prompts.state_dict()
            target.manifest_extra["rollout"] = self.rollout.state_dict()
        self._retain()

    def _retain(self) -> None:
        """Bound the trajectory store, without what the oldest checkpoint on disk may need."""
        config, step = self.config.store, self.state.step
        self.writer.store.retain(
            needed_from=min(list_steps(self.run.dir), default=0),
            keep_from=None if config.keep_steps is None else step - config.keep_steps,
            max_bytes=config.max_size_mb << 20,
        )

    def restore(self) -> None:
        """Go on from the run's checkpoint, if it has one."""
        checkpoint = self.run.checkpoint
        step = checkpoint.step if checkpoint else 0
        self.writer.log("start", step, {"step": step, "steps": self.config.steps})
        if checkpoint is None:
            return
        # The position is the rollout's; this notices that the prompts are others now.
        self.task.prompts.load_state_dict(checkpoint.extra["data"])
        self.learner.load(checkpoint.path)
        self.state = RLState(**checkpoint.extra["loop"])
        self.bubble = Bubble(**checkpoint.extra.get("bubble", {}))
        self.rollout.load_state_dict(checkpoint.extra["rollout"])
        log.info("resumed from step %d", self.state.step)

    def finish(self) -> dict[str, Any]:
        """Evaluate, export the model, write ``summary.json`` and show the last screen."""
        self.watch.phase("finish")
        state, config = self.state, self.config
        if self.last_evaluation is None:
            self._evaluate()
        model_dir: Path | None = None
        if config.checkpoint.export_model:
            model_dir = self.run.dir / "model"
            self.learner.policy.save(SaveLoadMeta(str(model_dir), tokenizer=self.task.tokenizer))
        summary = {
            "accuracy_before": state.accuracies.get("0"),
            "accuracy_after": state.accuracies.get(str(state.step)),
            "wall_s": self.run.elapsed_s(),
            "train_s": state.train_s,
            "steps": state.step,
            "seed": config.run.seed,
            "max_staleness_seen": state.max_staleness_seen,
            "mismatch_max": state.mismatch_max,
            "trainer_wait_share": self.bubble.trainer_wait_share,
            "generator_idle_share": self.bubble.generator_idle_share,
            "model_dir": str(model_dir) if model_dir else None,
        }
        self.run.wait_for_checkpoint()
        write_summary(self.run.dir, summary)
        self._show(summary, model_dir)
        return summary

    def _show(self, summary: dict[str, Any], model_dir: Path | None) -> None:
        if not self.config.tracking.progress:
            return
        report = RunReport(
            title=self.config.run.name,
            run_dir=self.run.dir,
            steps=self.state.step,
            wall_s=summary["wall_s"],
            model_dir=model_dir,
            before=summary["accuracy_before"],
            after=summary["accuracy_after"],
            num_problems=len(self.task.held_out.prompts) if self.task.held_out else None,
            trainer_wait=summary["trainer_wait_share"],
            generator_idle=summary["generator_idle_share"],
            rewards=self.state.rewards,
            samples_before=[Sample(**sample) for sample in self.state.samples_before],
            samples_after=self.last_evaluation.samples if self.last_evaluation else (),
        )
        final_screen(report)


class _Clock:
    """Wall time of named laps, in seconds."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name] = now - self._last
        self._last = now

    def total(self) -> float:
        return sum(self.laps.values())


def _context(config: RLConfig, model_path: str) -> int:
    return min(context_length(model_path), config.inference.max_context or sys.maxsize)


def _with_prompt_limit(config: RLConfig, model_path: str) -> RLConfig:
    """``config`` with ``max_prompt_tokens`` and ``generation.max_tokens`` set to what context and
    micro-batch leave room for: no row of any workflow is longer."""
    generation = config.rollout.generation
    context = min(_context(config, model_path), generation.max_tokens or sys.maxsize)
    cap, new_tokens = config.train.max_tokens_per_microbatch, generation.max_new_tokens
    room = min(context - 1, cap - new_tokens)
    if room < 1:
        raise ConfigError(
            f"no room for a prompt: a completion may take {new_tokens} tokens "
            f"(rollout.generation.max_new_tokens) of train.max_tokens_per_microbatch ({cap}), and "
            f"the context has {context}"
        )
    limit = config.rollout.max_prompt_tokens or room
    if limit > room:
        raise ConfigError(
            f"rollout.max_prompt_tokens: got {limit}, allowed: 1 to {room}; a prompt with its "
            f"completion must fit train.max_tokens_per_microbatch ({cap}) and the context "
            f"({context})"
        )
    bounded = generation.new(max_tokens=min(context, cap))
    rollout = config.rollout.model_copy(update={"max_prompt_tokens": limit, "generation": bounded})
    return config.model_copy(update={"rollout": rollout})


def _open_workflow(config: RLConfig, tokenizer: Any) -> RolloutWorkflow:
    rollout = config.rollout
    workflow = load_workflow(
        rollout.workflow,
        reward=load_reward(rollout.reward),
        generation=rollout.generation,
        group_size=rollout.group_size,
        tokenizer=tokenizer,
        seed=config.run.seed,
        min_group_size=rollout.min_group_size,
        max_prompt_tokens=rollout.max_prompt_tokens,
        overlong_prompt=rollout.overlong_prompt,
        **rollout.workflow_kwargs,
    )
    if config.algorithm.advantage == "remax" and isinstance(workflow, GroupWorkflow):
        return workflow.with_greedy_baseline()
    return workflow
