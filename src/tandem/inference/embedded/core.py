"""The synchronous heart of the embedded engine: one packed forward pass a step.

Requests join and leave between two steps (the token border), and so do new weights. Threads,
futures and processes belong to the backends around it. From prompt to token: ``Scheduler.admit``,
``plan_pass``, ``Runner.run``, ``Sampler.sample``, ``Lanes.append``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from tandem.errors import EngineError
from tandem.inference.embedded.lanes import Lanes
from tandem.inference.embedded.linears import PackedLinears, can_pack
from tandem.inference.embedded.plan import Plan, plan_pass
from tandem.inference.embedded.requests import ModelLimits, accept
from tandem.inference.embedded.responses import respond
from tandem.inference.embedded.runner import Output, Runner
from tandem.inference.embedded.sampler import Drawn, History, Sampler
from tandem.inference.embedded.scheduler import Scheduler
from tandem.inference.embedded.sharing import PrefixSharing
from tandem.inference.embedded.weights import ModelWeights, WeightSet
from tandem.models.cache import KVCache, num_blocks
from tandem.types import LLMRequest, LLMResponse, StopReason, WeightVersion

Outcome = LLMResponse | Exception
KEPT_CACHE_BYTES = 1 << 28
"""An idle engine keeps rows up to this size: fresh memory costs as much as several steps."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one request, a response or the error that failed it."""

    ticket: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class CoreOptions:
    """Sizes in tokens. ``is_fast``: packed linears and fused attention, whose bits are not those of
    training."""

    max_batch_size: int
    cache_tokens: int = 1 << 20
    prefix_cache_tokens: int = 1 << 16
    max_tokens_per_pass: int = 2048
    recompute_on_update: bool = True
    is_fast: bool = False
    records_decoding: bool = True


@dataclass(slots=True)
class Counters:
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    preempted: int = 0
    tokens: int = 0
    prefill_tokens: int = 0
    steps: int = 0
    stale_kv_tokens: int = 0
    """Tokens whose keys and values were partly made under older weights (``kv_on_update=keep``)."""


class EmbeddedCore:
    """Continuous batching over one model. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        model: PreTrainedModel,
        limits: ModelLimits,
        version: WeightVersion,
        options: CoreOptions,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model.eval()
        self.limits = limits
        self.version = version
        self.counters = Counters()
        self.is_paused = False
        self._options = options
        self._clock = clock
        self._arrivals = 0
        self._scheduler = Scheduler(
            max_rows=options.max_batch_size, capacity=num_blocks(options.cache_tokens)
        )
        self._lanes = Lanes()
        self._cache = KVCache(model.dtype)
        self._sharing = PrefixSharing(self._cache, num_blocks(options.prefix_cache_tokens))
        packs = options.is_fast and can_pack(model)
        packed = PackedLinears(model) if packs else None
        self.weights = ModelWeights(model, packed, version)
        self._runner = Runner(
            model,
            self._cache,
            packed,
            is_fast=options.is_fast,
            records=options.records_decoding,
        )
        self._sampler: Sampler | None = None
        self._sampled = 0
        self._watched: list[int] = []
        self._streamed: list[int] = []

    # --- requests ---

    def add(self, ticket: int, request: LLMRequest) -> None:
        """Queue a request under a ticket that the caller chose.

        Raises:
            ConfigError, DataError: the request cannot be served; nothing else is affected.
        """
        now = self._clock()
        self._scheduler.add(accept(ticket, request, self.limits, now=now, arrival=self._arrivals))
        self._arrivals += 1

    @torch.inference_mode()
    def abort(self, tickets: set[int]) -> list[Finished]:
        """End requests now; what they made so far is in their responses."""
        done = [
            Finished(
                item.job.ticket, respond(item.job, item.made, "abort", self.limits, self._clock())
            )
            for item in self._scheduler.remove(tickets)
        ]
        rows = [row for row, job in enumerate(self._lanes.jobs) if job.ticket in tickets]
        done += [Finished(self._lanes.jobs[r].ticket, self._respond(r, "abort")) for r in rows]
        self._leave(rows)
        self.counters.aborted += len(done)
        return done

    def abort_all(self) -> list[Finished]:
        running = [job.ticket for job in self._lanes.jobs]
        return self.abort({*running, *self._scheduler.tickets})

    def pause(self) -> None:
        """Make ``step`` do nothing; running requests stay as they are."""
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    @property
    def num_running(self) -> int:
        return len(self._lanes)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler)

    @property
    def has_work(self) -> bool:
        return not self.is_paused and bool(len(self._scheduler) or self._lanes.jobs)

    @property
    def cache_bytes(self) -> int:
        return self._cache.size_bytes + self._sharing.size_bytes

    @property
    def shared_tokens(self) -> int:
        """Prompt tokens taken from the prefix store instead of being computed."""
        return self._sharing.loaded_tokens

    @property
    def num_recorded(self) -> int:
        """Kinds of decoding passes that run recorded; 0 in the beginning, or if none can."""
        recorded = self._runner.recorded
        return 0 if recorded is None else recorded.num_recorded

    def check(self) -> None:
        """Assert that every block of the cache is accounted for."""
        self._scheduler.check(self._lanes)
        self._sharing.check(self._lanes)

    # --- weights ---

    def exchange(self, new: WeightSet) -> WeightSet:
        """Serve ``new`` from here on; returns what served before, to be released."""
        old = self.weights.exchange(new)
        self.set_version(new.version)
        return old

    def set_version(self, version: WeightVersion) -> None:
        """Name the weights that serve from here on; caches of older ones go as configured."""
        self.version = version
        self._sharing.invalidate()
        for row, job in enumerate(self._lanes.jobs):
            if not self._options.recompute_on_update:
                job.is_mixed = bool(job.is_mixed or self._lanes.cached[row] > 0)
            elif job.needs_prompt_logprobs:
                job.prompt_logprobs.clear()
        if self._options.recompute_on_update:
            self._lanes.cached[:] = 0
            self._sampler = None

    # --- one token for every running request ---

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Admit waiting requests, run one forward pass, and return the requests that ended."""
        if not self.has_work:
            return []
        lanes = self._lanes
        self._make_room()
        self._cache.reserve(lanes.lengths)
        self._arrange()
        plan = plan_pass(lanes, self._options.max_tokens_per_pass)
        output = self._runner.run(lanes, plan)
        self._note_progress(plan, output)
        self.counters.steps += 1
        if not plan.num_sampled:
            return []
        drawn = self._sample(plan, output)
        lanes.append(drawn, self.version.n, self._clock())
        if self._streamed:
            self._tell(drawn)
        return self._collect(drawn, plan.num_decode)

    def _arrange(self) -> None:
        """Give rows that all decode the order in which they lie, where one attention call serves
        them: nothing has to be gathered for it then."""
        order = self._cache.order
        if len(self._cache.shelves) == 1 and order != list(range(len(order))):
            lanes = self._lanes
            if (lanes.cached == lanes.lengths - 1).all():
                self._order(order)

    def _order(self, rows: Sequence[int]) -> None:
        """Row ``rows[i]`` is row i from here on, the others are gone."""
        self._cache.keep(rows)
        self._lanes.keep(rows)
        self._sampler = None

    def _make_room(self) -> None:
        """Give every row the blocks it needs, by sending the last ones back, or else admit more."""
        lanes = self._lanes
        preempted = self._scheduler.grow(lanes)
        if preempted:
            self._send_back(preempted)
            assert not self._scheduler.grow(lanes)
            return
        first = len(lanes)
        if self._scheduler.admit(lanes):
            self._sampler = None
            self._cache.reserve(lanes.lengths)
            self._sharing.load(lanes, first, self.version)

    def _send_back(self, rows: list[int]) -> None:
        """Queue running requests again; what they have cached is computed anew later."""
        lanes = self._lanes
        self._sharing.file(lanes, rows, self.version)
        for job in (lanes.jobs[row] for row in rows):
            job.is_mixed = False
            if job.needs_prompt_logprobs:
                job.prompt_logprobs.clear()
        self._scheduler.preempt(lanes, rows)
        self.counters.preempted += len(rows)
        self._leave(rows)

    def _note_progress(self, plan: Plan, output: Output) -> None:
        for chunk in plan.chunks:
            self._lanes.cached[chunk.row] = chunk.stop
            self.counters.prefill_tokens += chunk.stop - chunk.start
        for row, logprobs in output.prompt_logprobs.items():
            known = self._lanes.jobs[row].prompt_logprobs
            known.extend(logprobs if known else [0.0, *logprobs])

    def _sample(self, plan: Plan, output: Output) -> Drawn:
        lanes, n = self._lanes, plan.num_sampled
        if self._sampler is None or self._sampled != n:
            jobs = lanes.jobs[:n]
            self._sampler = Sampler([job.sampling for job in jobs], self.model.device)
            self._watched = [row for row, job in enumerate(jobs) if job.stop_strings is not None]
            self._streamed = [r for r, job in enumerate(jobs) if job.request.on_tokens is not None]
            self._sampled = n
        history = History(lanes.tokens[:n], lanes.prompt_lengths[:n], lanes.lengths[:n])
        drawn = self._sampler.sample(output.logits, history)
        for row, alternatives in drawn.top.items():
            lanes.jobs[row].top_logprobs.append(alternatives)
        self.counters.tokens += n
        self.counters.stale_kv_tokens += sum(job.is_mixed for job in lanes.jobs[:n])
        return drawn

    def _tell(self, drawn: Drawn) -> None:
        """Hand the new tokens of those who listen out; broken ones end their request."""
        for row in self._streamed:
            on_tokens = self._lanes.jobs[row].request.on_tokens
            logprob = float(drawn.logprobs[row])
            if on_tokens is not None and np.isfinite(logprob):
                on_tokens([int(drawn.ids[row])], [logprob], [self.version.n])

    def _collect(self, drawn: Drawn, first_new: int) -> list[Finished]:
        """Find who ended; rows from ``first_new`` on have just completed their prompts."""
        lanes, ids, n = self._lanes, drawn.ids, len(drawn.ids)
        broken = ~np.isfinite(drawn.logprobs)
        self._sharing.file(lanes, np.flatnonzero(~broken[first_new:]) + first_new, self.version)
        stopped = (lanes.stop_ids[:n] == ids[:, None]).any(axis=1)
        for row in self._watched:
            job = lanes.jobs[row]
            if job.stop_strings is not None and not stopped[row]:
                made = int(lanes.lengths[row]) - job.prompt_length
                armed = made >= job.request.gconfig.min_new_tokens
                stopped[row] = job.stop_strings.push(int(ids[row]), armed=armed)
        ended = broken | stopped | (lanes.lengths[:n] >= lanes.limits[:n])
        if not ended.any():
            return []
        rows = np.flatnonzero(ended).tolist()
        done = []
        for row in rows:
            outcome = (
                self._broken(row)
                if broken[row]
                else self._respond(row, "stop" if stopped[row] else "length")
            )
            done.append(Finished(lanes.jobs[row].ticket, outcome))
        self.counters.failed += int(broken.sum())
        self.counters.finished += len(rows) - int(broken.sum())
        self._sharing.file(lanes, np.flatnonzero(ended & ~broken), self.version)
        self._cache.clear_rows(np.flatnonzero(broken).tolist())
        self._leave(rows)
        return done

    def _broken(self, row: int) -> EngineError:
        return EngineError(
            f"request {self._lanes.jobs[row].request.rid}: the model's logits are not finite under "
            f"weights {self.version.n}; check the last weight update for NaN"
        )

    def _respond(self, row: int, reason: StopReason) -> LLMResponse:
        job, made = self._lanes.jobs[row], self._lanes.made(row)
        return respond(job, made, reason, self.limits, self._clock())

    def _leave(self, rows: Sequence[int]) -> None:
        """Remove rows; the others keep their order."""
        if not rows:
            return
        lanes, gone = self._lanes, set(rows)
        self._scheduler.release(lanes, list(rows))
        self._sharing.release(lanes.jobs[row] for row in rows)
        self._order([row for row in range(len(lanes)) if row not in gone])
        is_idle = not lanes.jobs and not len(self._scheduler)
        if is_idle and self._cache.size_bytes > KEPT_CACHE_BYTES:
            self._cache.drop()
