"""A generation backend whose every token a test can hold and let go, a tokenizer, a workflow."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from tandem.config.schema import RolloutConfig
from tandem.data.batch import collate
from tandem.errors import EngineError
from tandem.inference.backend import GenerationBackend
from tandem.rollout.composed import ComposedInferenceEngine
from tandem.rollout.workflow import Episode, RolloutWorkflow
from tandem.store import StoreWriter
from tandem.types import (
    EpisodeState,
    GenerationConfig,
    LLMRequest,
    LLMResponse,
    Prompt,
    WeightUpdateMeta,
    WeightVersion,
)

TIMEOUT_S = 20.0
"""How long a test waits for an event before it fails; never a measure of success."""


class GatedBackend(GenerationBackend):
    """Plays ``script(request)`` token by token, as far as the gates allow.

    A request may make a token when generation is not paused and ``gate(request, made)`` is true.
    ``seen`` has the request ids that were known when the first token of all was made.
    """

    def __init__(self, script: Callable[[LLMRequest], Sequence[int]] = lambda req: [7, 2]) -> None:
        self.script = script
        self.requests: list[LLMRequest] = []
        self.aborted: list[str] = []
        self.finished: list[str] = []
        self.seen: list[str] | None = None
        self.num_pauses = 0
        self._gate: Callable[[LLMRequest, int], bool] = lambda req, made: True
        self._paused = False
        self._version = 0
        self._closed = False
        self._changed = threading.Condition()
        self._held: list[Future[None]] = []

    def start(self) -> None:
        self._closed = False

    def close(self) -> None:
        self._closed = True
        self._wake()

    @property
    def is_closed(self) -> bool:
        return self._closed

    async def generate(self, req: LLMRequest) -> LLMResponse:
        ids: list[int] = []
        versions: list[int] = []
        with self._changed:
            self.requests.append(req)
            self._changed.notify_all()
        try:
            await asyncio.sleep(0)
            tokens = list(self.script(req))[: req.gconfig.max_new_tokens]
            while len(ids) < len(tokens):
                if (held := self._hold(req, len(ids))) is not None:
                    await asyncio.wrap_future(held)
                    continue
                ids.append(tokens[len(ids)])
                versions.append(self._version)
                if req.on_tokens is not None:
                    req.on_tokens(ids[-1:], [-0.5], versions[-1:])
        except asyncio.CancelledError:
            self.aborted.append(req.rid)
            raise
        self.finished.append(req.rid)
        reason = "length" if len(ids) == req.gconfig.max_new_tokens else "stop"
        return LLMResponse(list(req.input_ids), ids, [-0.5] * len(ids), versions, reason)

    def _hold(self, req: LLMRequest, made: int) -> Future[None] | None:
        with self._changed:
            if self._closed:
                raise EngineError("closed")
            if not self._paused and self._gate(req, made):
                if self.seen is None:
                    self.seen = [request.rid for request in self.requests]
                return None
            held: Future[None] = Future()
            self._held.append(held)
            self._changed.notify_all()
            return held

    def _wake(self) -> None:
        with self._changed:
            held, self._held = self._held, []
        for future in held:
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def update_weights(self, meta: WeightUpdateMeta) -> Future[None]:
        self.commit(meta.version)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @property
    def version(self) -> WeightVersion:
        return WeightVersion("double", self._version)

    def pause_generation(self) -> None:
        self._paused = True
        self.num_pauses += 1

    def resume_generation(self) -> None:
        self._paused = False
        self._wake()

    def stats(self) -> Mapping[str, Any]:
        return {"finished": len(self.finished)}

    # what tests do

    def commit(self, version: int) -> None:
        self._version = version

    def allow(self, gate: Callable[[LLMRequest, int], bool]) -> None:
        """Replace the gate and let go what it allows."""
        self._gate = gate
        self._wake()

    def wait_requests(self, count: int) -> None:
        """Until ``count`` requests have ever arrived."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.requests) >= count, TIMEOUT_S)

    def wait_held(self, count: int) -> None:
        """Until ``count`` requests stand at a gate."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._held) >= count, TIMEOUT_S)


class OneRow(RolloutWorkflow):
    """One completion, one row, reward 1. ``data["act"]`` is called first with the episode."""

    async def arun_episode(self, engine: Any, data: Mapping[str, Any]) -> Any:
        episode = Episode.of(data)
        if "act" in data:
            result = data["act"](episode)
            if asyncio.iscoroutine(result):
                result = await result
            if result is not None:
                return None if result == "reject" else result
        prompt = tuple(data.get("prompt_ids", (5, 6)))
        response = await engine.agenerate(LLMRequest(f"{episode.uid}.0", prompt))
        return one_row(prompt, response)


def one_row(prompt: Sequence[int], response: LLMResponse, reward: float = 1.0) -> Any:
    made = len(response.output_tokens)
    return collate(
        [
            {
                "input_ids": torch.tensor([*prompt, *response.output_tokens]),
                "loss_mask": torch.tensor([False] * len(prompt) + [True] * made),
                "logprobs": torch.tensor([0.0] * len(prompt) + response.output_logprobs),
                "versions": torch.tensor([-1] * len(prompt) + response.output_versions),
                "rewards": torch.tensor(reward),
            }
        ]
    )


class Prompts:
    """A random-access source of ``length`` prompts whose ids name epoch and position."""

    def __init__(self, length: int = 100, **data: Any) -> None:
        self.length = length
        self.data = data
        self.asked: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return self.length

    def prompt(self, epoch: int, position: int) -> Prompt:
        self.asked.append((epoch, position))
        return Prompt(epoch, position, {"prompt_ids": (10 + position, 3), **self.data})


class LetterTokenizer:
    """Token 1 is BOS and 2 EOS (special); token 10 + i is the i-th letter."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [10 + ord(letter) - ord("a") for letter in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        special = "" if skip_special_tokens else "<>"
        return "".join(chr(ord("a") + i - 10) if i >= 10 else special for i in ids)

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        return "".join(message["content"] for message in messages)


def make_engine(
    backend: GatedBackend | None = None, *, writer: StoreWriter | None = None, **rollout: Any
) -> ComposedInferenceEngine:
    """An initialised engine; defaults: batches of 2, staleness 1, generous deadlines."""
    settings: dict[str, Any] = {
        "batch_size": 2,
        "group_size": 1,
        "min_group_size": 1,
        "max_concurrent": 16,
        "max_staleness": 1,
        "wait_timeout_s": TIMEOUT_S,
        "episode_timeout_s": TIMEOUT_S,
        "generation": GenerationConfig(max_new_tokens=8),
    }
    engine = ComposedInferenceEngine(
        backend or GatedBackend(), RolloutConfig(**settings | rollout), seed=0, writer=writer
    )
    engine.initialize()
    return engine


def publish(engine: ComposedInferenceEngine) -> int:
    """One more version, as a trainer makes after each batch."""
    version = engine.get_version() + 1
    engine.backend.commit(version)  # type: ignore[attr-defined]
    engine.set_version(version)
    return version


def count(engine: ComposedInferenceEngine, state: str) -> int:
    return engine.executor.ledger.count(EpisodeState(state))


def wait_until(engine: ComposedInferenceEngine, condition: Callable[[], bool]) -> None:
    """Until ``condition`` holds; it is looked at whenever the executor changes."""
    lock = engine.executor._lock
    with lock:
        assert lock.wait_for(condition, TIMEOUT_S), engine.describe()
