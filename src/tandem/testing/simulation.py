"""A whole asynchronous run as one seeded simulation: real executor, ledger, journal, store, feed,
scripted generation and weight updates on a virtual clock; only the trainer is made up.

Generation has stragglers; prompts are submitted twice, attempts are given up and end all the same,
updates are skipped, publishing fails, the process is killed between any two events and resumed from
its last checkpoint. An independent book (``simulation_book``) is told of every transition and every
batch and raises at the first that breaks a rule.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict

from tandem.config import InferenceConfig
from tandem.config.schema import RolloutConfig
from tandem.inference.scripted import ScriptedOptions
from tandem.rollout import RolloutWorkflow, ScriptedInferenceEngine
from tandem.rollout.simulated import SimulatedRuntime
from tandem.rollout.workflow import Episode, sample_seed
from tandem.store import MemoryStore, StoreWriter
from tandem.testing.simulation_book import Book
from tandem.trainers.publish import publish_weights, release_weights
from tandem.types import GenerationConfig, LLMRequest, ParamSpec, Prompt, WeightUpdateMeta
from tandem.weights import publish

_FOREVER_S = 1e9
_INFERENCE = InferenceConfig(mode="inprocess")
_WEIGHTS = (("weight", torch.zeros(1)),)
_SPECS = (ParamSpec("weight", (1,), "float32"),)


class Killed(BaseException):
    """The simulated process is gone, as by SIGKILL."""


@dataclass(frozen=True)
class Scenario:
    """What a simulated run does. Probabilities are per episode, or per training step.

    A token takes ``token_s``, of a straggler ``straggler_factor`` times as long. Training on a
    batch takes ``train_s`` on average. Kills come every ``kill_every`` events on average.
    """

    rollout: RolloutConfig
    num_events: int = 10_000
    token_s: float = 0.01
    mean_tokens: int = 12
    max_tokens: int = 100
    train_s: float = 0.1
    stragglers: float = 0.02
    straggler_factor: float = 50.0
    failures: float = 0.01
    rejections: float = 0.02
    stubborn: float = 0.3
    duplicates: float = 0.2
    trainer_rejects: float = 0.1
    failed_publishes: float = 0.05
    kill_every: int | None = 4_000
    checkpoint_every: int = 5


@dataclass
class Report:
    """What a simulated run came to; equal digests mean the same batches, token by token.

    ``counts`` are transitions into each state, over all starts.
    """

    num_events: int = 0
    num_transitions: int = 0
    num_steps: int = 0
    num_kills: int = 0
    num_late: int = 0
    trained_tokens: int = 0
    violating_tokens: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    digest: str = ""
    time_s: float = 0.0


class NumberedPrompts:
    """Epoch after epoch of prompts that are their own number."""

    def __len__(self) -> int:
        return 1 << 20

    def prompt(self, epoch: int, position: int) -> Prompt:
        return Prompt(epoch, position, {"prompt_ids": (3, 4)})


class _Episodes(RolloutWorkflow):
    """A group of completions with made-up rewards; what it does is drawn from (seed, episode)."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._scenario = scenario
        self._seed = seed
        self._generation = scenario.rollout.generation

    async def arun_episode(self, engine: Any, data: Mapping[str, Any]) -> TensorDict | None:
        episode = Episode.of(data)
        scenario = self._scenario
        draw = random.Random(f"{self._seed}/{episode.uid}")
        generation = asyncio.gather(
            *[self._sample(engine, episode, i) for i in range(scenario.rollout.group_size)]
        )
        if draw.random() < scenario.stubborn:
            responses = await _in_spite_of_all(generation)
        else:
            responses = await generation
        if draw.random() < scenario.failures:
            raise ValueError("an unlucky episode")
        if draw.random() < scenario.rejections:
            return None
        return rows_of(responses, draw)

    async def _sample(self, engine: Any, episode: Episode, index: int) -> Any:
        seed = sample_seed(self._seed, episode.episode_id, index)
        request = LLMRequest(f"{episode.uid}.{index}", (3, 4), self._generation.new(seed=seed))
        return await engine.agenerate(request)


async def _in_spite_of_all(work: asyncio.Future[Any]) -> Any:
    """Goes on when it is cancelled, as a workflow should not: its result comes late."""
    while True:
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if work.cancelled():
                raise


def rows_of(responses: list[Any], draw: random.Random) -> TensorDict:
    """The rows of a group of responses to prompts of two tokens, with made-up rewards."""
    lengths = [len(item.output_tokens) for item in responses]
    shape = len(responses), 2 + max(lengths)
    versions, mask = torch.full(shape, -1), torch.zeros(shape, dtype=torch.bool)
    ids, attention = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    for row, (item, length) in enumerate(zip(responses, lengths, strict=True)):
        attention[row, : 2 + length] = True
        mask[row, 2 : 2 + length] = True
        versions[row, 2 : 2 + length] = torch.tensor(item.output_versions)
    rows = {
        "input_ids": ids,
        "attention_mask": attention,
        "loss_mask": mask,
        "logprobs": torch.zeros(shape),
        "versions": versions,
        "rewards": torch.tensor([draw.random() for _ in responses]),
    }
    return TensorDict(rows, batch_size=[len(responses)])


class _Trainer:
    """Has a version and one weight; its stream breaks when it is told to."""

    def __init__(self) -> None:
        self.version = 0
        self.breaks = False

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        broken, self.breaks = self.breaks, False
        publish(meta, _SPECS, () if broken else _WEIGHTS)

    def set_version(self, version: int) -> None:
        self.version = version


class Simulation:
    """One run from its first start to the last of ``scenario.num_events`` events."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.seed = seed
        self.book = Book(scenario.rollout)
        self.report = Report()
        self.draw = random.Random(seed)
        self._store = MemoryStore()
        self._manifests: list[tuple[int, str]] = []
        self._digest = hashlib.sha256()
        self._before = 0
        self._kill_at = 0
        self._time_s = 0.0
        self._num_starts = 0

    def run(self) -> Report:
        """Until all events are through.

        Raises:
            AssertionError: a rule was broken; the message says which.
        """
        while self._before < self.scenario.num_events:
            self._start()
            try:
                self._train()
            except Killed:
                self.report.num_kills += 1
            self._end()
        self.book.finish(self._position, self._open_ids)
        self.report.num_events = self._before
        self.report.counts = {state.value: n for state, n in self.book.totals.items()}
        self.report.num_transitions = self.book.num_transitions
        self.report.trained_tokens = self.book.trained_tokens
        self.report.violating_tokens = self.book.violating_tokens
        self.report.digest = self._digest.hexdigest()
        self.report.time_s = self._time_s
        return self.report

    # --- one start ------------------------------------------------------------------------------

    def _start(self) -> None:
        scenario = self.scenario
        self._num_starts += 1
        self.incarnation = f"simulation-{self.seed}-{self._num_starts}"
        self.runtime = SimulatedRuntime(self._time_s)
        events = self.runtime.events
        self._kill_at = scenario.num_events - self._before
        if scenario.kill_every is not None:
            drawn = 1 + int(self.draw.expovariate(1 / scenario.kill_every))
            self._kill_at = min(self._kill_at, drawn)
        events.before_event = self._maybe_kill
        # A group is kept after the time of a commit, as long as a token takes.
        writer = StoreWriter(
            self._store,
            self.incarnation,
            later=lambda write: events.call_later(scenario.token_s, write),
        )
        # The deadline of an update is of real time, which says nothing here.
        options = ScriptedOptions(
            latency_s=self._latency_s, update_timeout_s=1e6, clock=self.runtime
        )
        self.engine = ScriptedInferenceEngine(
            scenario.rollout,
            self._script,
            incarnation=self.incarnation,
            options=options,
            seed=self.seed,
            writer=writer,
            runtime=self.runtime,
        )
        self.trainer = _Trainer()
        self.book.watch(
            self.engine.executor, start=self._manifests[-1][0] if self._manifests else 0
        )
        self.engine.initialize()

    def _maybe_kill(self) -> None:
        if self.runtime.events.num_events >= self._kill_at:
            raise Killed

    def _end(self) -> None:
        self._before += self.runtime.events.num_events
        self._time_s = self.runtime.now()
        self.report.num_late += self.engine.executor.loop.num_late
        executor = self.engine.executor
        self._open_ids = set(self.book.open_ids()) | {key for key, _ in executor._feed.reruns}
        self._position = executor._feed.position
        release_weights(self.incarnation)
        self.runtime.events.abandon()

    def _latency_s(self, request: LLMRequest) -> float:
        scenario = self.scenario
        digest = hashlib.blake2b(f"{self.seed}/{request.gconfig.seed}".encode(), digest_size=4)
        drawn = int.from_bytes(digest.digest(), "big") / 2**32
        slow = scenario.straggler_factor if drawn < scenario.stragglers else 1.0
        return scenario.token_s * slow

    def _script(self, prompt_ids: tuple[int, ...], seed: int | None) -> list[int]:
        scenario, draw = self.scenario, random.Random(seed)
        length = 1 + int(draw.expovariate(1 / (scenario.mean_tokens - 1)))
        return [7] * (min(length, scenario.max_tokens) - 1) + [2]

    # --- the trainer ----------------------------------------------------------------------------

    def _train(self) -> None:
        step, workflow = 0, _Episodes(self.scenario, self.seed)
        if self._manifests:
            step, state = self._manifests[-1]
            self.engine.load_state_dict(json.loads(state))
        self._publish(step)
        if step == 0 and not self._manifests:
            self._save(0)
        while True:
            batch = self.engine.prepare_batch(NumberedPrompts(), workflow)
            self.book.handed_over(batch, step)
            self._digest.update(batch["episode_ids"].numpy().tobytes())
            self._digest.update(batch["versions"].numpy().tobytes())
            self._disturb(batch)
            self.runtime.pass_time(self.scenario.train_s * self.draw.uniform(0.5, 1.5))
            step += 1
            self.trainer.breaks = self.draw.random() < self.scenario.failed_publishes
            self._publish(step)
            self.report.num_steps += 1
            if step % self.scenario.checkpoint_every == 0:
                self._save(step)

    def _publish(self, version: int) -> None:
        trainer: Any = self.trainer
        publish_weights(
            trainer,
            self.engine,
            version=version,
            incarnation=self.incarnation,
            config=_INFERENCE,
        )
        self.book.published(version)

    def _save(self, step: int) -> None:
        state, mark = json.dumps(self.engine.state_dict()), self.book.num_final
        # Between this and the manifest's rename a kill leaves the old checkpoint the newest.
        self.runtime.pass_time(self.scenario.token_s)
        self._manifests.append((step, state))
        self.book.saved(step, mark)
        del self._manifests[:-2]
        self._store.retain(needed_from=self._manifests[0][0], keep_from=step, max_bytes=None)

    def _disturb(self, batch: TensorDict) -> None:
        """What a trainer and its callers may do at a bad moment."""
        scenario, draw = self.scenario, self.draw
        if draw.random() < scenario.trainer_rejects:
            self.engine.reject([int(batch["episode_ids"][0])], "a trainer's whim")
        if draw.random() < scenario.duplicates:
            when = draw.uniform(0, scenario.train_s / 2)
            self.runtime.events.call_later(when, self._submit_again, draw.random())
        if draw.random() < scenario.duplicates:
            self.engine.pause()
            self.runtime.events.call_later(draw.uniform(0, scenario.train_s), self.engine.resume)

    def _submit_again(self, which: float) -> None:
        ids = self.book.open_ids(without_training=True)
        if ids:
            position = ids[int(which * len(ids))]
            prompt = NumberedPrompts().prompt(*divmod(position, 1 << 40))
            self.engine.submit(prompt, _Episodes(self.scenario, self.seed))


def scenario(
    *,
    max_staleness: int = 2,
    stale_policy: Any = "wait",
    batch_size: int = 4,
    group_size: int = 2,
    max_concurrent: int = 12,
    max_tokens: int = 100,
    **options: Any,
) -> Scenario:
    """A scenario with small sizes; ``options`` are those of ``Scenario``."""
    rollout = RolloutConfig(
        batch_size=batch_size,
        group_size=group_size,
        max_concurrent=max_concurrent,
        max_staleness=max_staleness,
        stale_policy=stale_policy,
        generation=GenerationConfig(max_new_tokens=max_tokens),
        episode_timeout_s=options.pop("episode_timeout_s", 40.0),
        wait_timeout_s=_FOREVER_S,
        max_failures_in_row=1_000,
        max_rejected_in_row=1_000,
    )
    return Scenario(rollout, max_tokens=max_tokens, **options)
