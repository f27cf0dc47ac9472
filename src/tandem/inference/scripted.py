"""A generation backend without a model: completions come from a script, everything else is real.

Stops, budgets, versions, interruption and weight updates behave as in the embedded engine, so that
whatever is built on the contract can be tested in milliseconds. It computes no probabilities.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tandem.errors import ConfigError, DataError, EngineError
from tandem.inference.backend import GenerationBackend
from tandem.inference.clock import Clock, RealClock
from tandem.inference.memory import rss_bytes
from tandem.inference.stopping import Decoder, StopStrings
from tandem.inference.updates import PendingUpdate
from tandem.types import (
    GenerationConfig,
    LLMRequest,
    LLMResponse,
    ParamSpec,
    StopReason,
    WeightUpdateMeta,
    WeightVersion,
)
from tandem.weights import Published, check_manifest, open_published

Completion = Sequence[int]
Play = Callable[[tuple[int, ...], int | None], Completion]
Script = Play | Mapping[tuple[int, ...], Completion]
UNHONOURED = frozenset(
    {
        "n_samples",
        "min_new_tokens",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "logit_bias",
    }
)
"""Options that a script cannot follow. ``temperature`` and ``greedy`` are taken as they come: the
script is the distribution."""
_CLOSED = "the scripted backend was closed; start a new one"


def default_script(eos_id: int, vocab_size: int) -> Play:
    """One to eight tokens and EOS, a function of (prompt, seed)."""

    def script(prompt_ids: tuple[int, ...], seed: int | None) -> Completion:
        name = hashlib.sha256(f"{seed}:{prompt_ids}".encode()).digest()
        generator = random.Random(name)
        allowed = [token for token in range(vocab_size) if token != eos_id]
        return [*generator.choices(allowed, k=generator.randint(1, 8)), eos_id]

    return script


@dataclass(frozen=True, slots=True)
class ScriptedOptions:
    """What the double imitates.

    ``logprob`` is that of every token, or a function of the version that makes it. ``latency_s`` is
    the time of a token on ``clock``, or a function of the request it is for. ``param_specs`` is the
    model that updates must fit (``None``: any manifest is taken; digests are verified in any case).
    ``refuse`` names options to refuse beyond ``UNHONOURED``, such as ``seed``.
    """

    vocab_size: int = 256
    eos_id: int = 2
    max_context: int | None = None
    logprob: float | Callable[[int], float] = -1.0
    latency_s: float | Callable[[LLMRequest], float] = 0.0
    clock: Clock = field(default_factory=RealClock)
    decoder: Decoder | None = None
    param_specs: Sequence[ParamSpec] | None = None
    refuse: frozenset[str] = frozenset()
    update_timeout_s: float = 120.0


@dataclass(slots=True)
class _Run:
    """One request being played; lists grow by one entry a token."""

    request: LLMRequest
    completion: Completion
    limit: int
    stop_ids: frozenset[int]
    stop_strings: StopStrings | None
    started: float
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    reason: StopReason | None = None


class ScriptedBackend(GenerationBackend):
    """Plays ``script``: a function of (prompt ids, seed), or a mapping from prompt ids.

    A completion that the script ends without a stop token ends with ``stop`` as well.
    """

    capabilities = frozenset(
        {"seed", "logprobs", "versions", "interruption", "streaming", "weight_update"}
    )

    def __init__(
        self,
        script: Script | None = None,
        *,
        incarnation: str = "scripted",
        options: ScriptedOptions | None = None,
    ) -> None:
        self._options = options or ScriptedOptions()
        self._script = script or default_script(self._options.eos_id, self._options.vocab_size)
        self._version = WeightVersion(incarnation, 0)
        self._changed = threading.Condition()
        self._is_started = False
        self._ended: str | None = None
        self._is_paused = False
        self._hold_at: int | None = None
        self._held: list[Future[None]] = []
        self._updates: list[PendingUpdate] = []
        self._running = 0
        self._finished = 0
        self._tokens = 0

    # --- the contract ---

    def start(self) -> None:
        with self._changed:
            self._refuse_if_ended()
            self._is_started = True

    def close(self) -> None:
        with self._changed:
            self._ended = _CLOSED
            updates, self._updates = self._updates, []
        self._wake()
        for update in updates:
            update.fail(EngineError(_CLOSED))

    async def generate(self, req: LLMRequest) -> LLMResponse:
        run = self._accept(req)
        with self._changed:
            self._running += 1
        try:
            await asyncio.sleep(0)
            while run.reason is None:
                if (latency_s := self._latency_s(req)) > 0:
                    await self._options.clock.sleep(latency_s)
                held = self._advance(run)
                if held is not None:
                    await asyncio.wrap_future(held)
        finally:
            with self._changed:
                self._running -= 1
        with self._changed:
            self._finished += 1
        return self._response(run)

    def update_weights(self, meta: WeightUpdateMeta) -> Future[None]:
        with self._changed:
            self._refuse_if_ended()
        update = PendingUpdate(
            meta,
            self._commit,
            timeout_s=self._options.update_timeout_s,
            on_stuck=lambda _: self.close(),
        )
        with self._changed:
            self._updates = [item for item in self._updates if not item.future.done()]
            self._updates.append(update)
            ended = self._ended
        if ended is not None:
            update.fail(EngineError(ended))
        return update.future

    @property
    def version(self) -> WeightVersion:
        return self._version

    def pause_generation(self) -> None:
        with self._changed:
            self._refuse_if_ended()
            self._is_paused = True

    def resume_generation(self) -> None:
        with self._changed:
            self._refuse_if_ended()
            self._is_paused = False
        self._wake()

    def stats(self) -> Mapping[str, Any]:
        with self._changed:
            return {
                "running": self._running,
                "waiting": 0,
                "finished": self._finished,
                "tokens": self._tokens,
                "paused": self._is_paused,
                "version": self._version.n,
                "threads": 0,
                "rss_bytes": rss_bytes(),
            }

    # --- for tests of interruption ---

    def hold(self, num_tokens: int) -> None:
        """Stop every request as soon as it has ``num_tokens`` tokens, until ``release``."""
        with self._changed:
            self._hold_at = num_tokens

    def release(self) -> None:
        """Let held requests go on."""
        with self._changed:
            self._hold_at = None
        self._wake()

    def wait_held(self, count: int, timeout_s: float = 10.0) -> None:
        """Block this thread until ``count`` requests stand at a token border.

        Raises:
            TimeoutError: fewer do.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._open_holds()) >= count, timeout_s):
                raise TimeoutError(
                    f"{len(self._open_holds())} of {count} requests held after {timeout_s} s"
                )

    # --- playing ---

    def _accept(self, req: LLMRequest) -> _Run:
        options, config, length = self._options, req.gconfig, len(req.input_ids)
        with self._changed:
            self._refuse_if_ended()
            if not self._is_started:
                raise EngineError("the scripted backend is not started; call start() first")
        self._refuse_options(config)
        for name in ("raw_logprobs", "top_logprobs", "prompt_logprobs"):
            if getattr(req, name):
                raise ConfigError(
                    f"request {req.rid}: {name}={getattr(req, name)!r}, but the scripted backend "
                    "computes no probabilities; leave it out"
                )
        limit = length + config.max_new_tokens
        for name, bound in (("max_tokens", config.max_tokens), ("context", options.max_context)):
            if bound is not None and length + 1 > bound:
                raise DataError(
                    f"request {req.rid}: a prompt of {length} tokens and one new token exceed "
                    f"{name} ({bound}); shorten the prompt"
                )
            limit = min(limit, bound or limit)
        if length == 0:
            raise DataError(f"request {req.rid}: input_ids is empty; add a BOS token")
        ends = frozenset(config.stop_token_ids)
        return _Run(
            request=req,
            completion=self._completion(req),
            limit=limit - length,
            stop_ids=ends if config.ignore_eos else ends | {options.eos_id},
            stop_strings=StopStrings(options.decoder, config.stop)
            if config.stop and options.decoder is not None
            else None,
            started=options.clock.now(),
        )

    def _refuse_options(self, config: GenerationConfig) -> None:
        neutral = GenerationConfig()
        refused = UNHONOURED | self._options.refuse
        if self._options.decoder is None:
            refused |= {"stop"}
        for name in sorted(refused):
            value = getattr(config, name)
            if value != getattr(neutral, name):
                raise ConfigError(
                    f"gconfig.{name}: got {value!r}, which the scripted backend cannot honour; "
                    f"leave it at {getattr(neutral, name)!r}"
                )

    def _completion(self, req: LLMRequest) -> Completion:
        if callable(self._script):
            return self._script(req.input_ids, req.gconfig.seed)
        if req.input_ids not in self._script:
            raise DataError(
                f"request {req.rid}: the script has no completion for prompt {req.input_ids}"
            )
        return self._script[req.input_ids]

    def _latency_s(self, req: LLMRequest) -> float:
        latency_s = self._options.latency_s
        return latency_s(req) if callable(latency_s) else latency_s

    def _advance(self, run: _Run) -> Future[None] | None:
        """Make one token, or return what to wait for at a token border."""
        with self._changed:
            self._refuse_if_ended()
            made = len(run.ids)
            if self._is_paused or (self._hold_at is not None and made >= self._hold_at):
                held: Future[None] = Future()
                self._held.append(held)
                self._changed.notify_all()
                return held
            if made == len(run.completion):
                run.reason = "stop"
                return None
            token = run.completion[made]
            logprob = self._options.logprob
            run.ids.append(token)
            run.logprobs.append(logprob(self._version.n) if callable(logprob) else logprob)
            run.versions.append(self._version.n)
            run.times.append(self._options.clock.now())
            self._tokens += 1
        if run.request.on_tokens is not None:
            run.request.on_tokens(run.ids[-1:], run.logprobs[-1:], run.versions[-1:])
        run.reason = self._reason(run, token)
        return None

    def _reason(self, run: _Run, token: int) -> StopReason | None:
        if token in run.stop_ids:
            return "stop"
        if run.stop_strings is not None and run.stop_strings.push(token):
            return "stop"
        return "length" if len(run.ids) == run.limit else None

    def _response(self, run: _Run) -> LLMResponse:
        assert run.reason is not None
        ids, times = run.ids, run.times
        return LLMResponse(
            input_tokens=list(run.request.input_ids),
            output_tokens=ids,
            output_logprobs=run.logprobs,
            output_versions=run.versions,
            stop_reason=run.reason,
            latency=self._options.clock.now() - run.started,
            ttft=times[0] - run.started if times else 0.0,
            itl=[after - before for before, after in pairwise(times)],
            text=self._text(run),
        )

    def _text(self, run: _Run) -> str | None:
        if self._options.decoder is None:
            return None
        if run.ids and run.ids[-1] in run.stop_ids:
            return self._options.decoder.decode(run.ids[:-1], skip_special_tokens=True)
        if run.stop_strings is not None and run.reason == "stop":
            return run.stop_strings.text
        return self._options.decoder.decode(run.ids, skip_special_tokens=True)

    def _commit(self, published: Published) -> Future[None]:
        committed: Future[None] = Future()
        if self._options.param_specs is not None:
            check_manifest(published.manifest, self._options.param_specs)
        with open_published(published), self._changed:
            self._version = WeightVersion(
                published.manifest.incarnation, published.manifest.version
            )
        committed.set_result(None)
        return committed

    def _open_holds(self) -> list[Future[None]]:
        return [future for future in self._held if not future.cancelled()]

    def _wake(self) -> None:
        with self._changed:
            held, self._held = self._held, []
        for future in held:
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def _refuse_if_ended(self) -> None:
        if self._ended is not None:
            raise EngineError(self._ended)
