"""The synchronous heart of the embedded engine: one packed forward pass a step.

Requests join and leave between two steps (the token border), and so do new weights. Threads,
futures and processes belong to the backends around it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.errors import EngineError
from tandem.inference.embedded.lanes import Lanes
from tandem.inference.embedded.requests import Job, ModelLimits, accept
from tandem.inference.embedded.sampler import History, Sampler
from tandem.models.cache import CacheContext, KVCache, PrefillGroup
from tandem.types import LLMRequest, LLMResponse, ParamSpec, StopReason, WeightVersion

Outcome = LLMResponse | Exception
MIN_TOKENS = 16
"""A forward pass has at least this many tokens: below, the matrix products of a token depend on how
many others share the pass."""
MAX_PREFILL_TOKENS = 8192
KEPT_CACHE_BYTES = 1 << 28
"""An idle engine keeps a cache up to this size: fresh memory costs as much as several steps."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one request, a response or the error that failed it."""

    ticket: int
    outcome: Outcome


@dataclass(slots=True)
class Counters:
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    tokens: int = 0
    prefill_tokens: int = 0
    steps: int = 0
    stale_kv_tokens: int = 0
    """Tokens whose keys and values were partly made under older weights (``kv_on_update=keep``)."""


@dataclass(slots=True)
class _Pass:
    """One forward pass being laid out: prefill groups and the token positions whose logits count.

    ``logit_rows[i]`` are the lanes that take their next token from ``logit_index[i]``.
    """

    tokens: list[npt.NDArray[np.int64]] = field(default_factory=list)
    positions: list[npt.NDArray[np.int64]] = field(default_factory=list)
    groups: list[PrefillGroup] = field(default_factory=list)
    logit_index: list[int] = field(default_factory=list)
    logit_rows: list[list[int]] = field(default_factory=list)
    num_decode: int = 0
    num_tokens: int = 0


class EmbeddedCore:
    """Continuous batching over one model. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        model: PreTrainedModel,
        limits: ModelLimits,
        version: WeightVersion,
        *,
        max_batch_size: int,
        recompute_on_update: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model.eval()
        self.limits = limits
        self.version = version
        self.counters = Counters()
        self.is_paused = False
        self._device: torch.device = model.device
        self._max_batch_size = max_batch_size
        self._recompute = recompute_on_update
        self._clock = clock
        self._waiting: deque[Job] = deque()
        self._lanes = Lanes()
        self._cache = KVCache()
        self._sampler: Sampler | None = None
        self._kept_from_older: set[int] = set()
        self._params = dict(model.named_parameters())

    # --- requests ---

    def add(self, ticket: int, request: LLMRequest) -> None:
        """Queue a request under a ticket that the caller chose.

        Raises:
            ConfigError, DataError: the request cannot be served; nothing else is affected.
        """
        self._waiting.append(accept(ticket, request, self.limits, self._clock()))

    @torch.inference_mode()
    def abort(self, tickets: set[int]) -> list[Finished]:
        """End requests now; what they made so far is in their responses."""
        kept = deque(job for job in self._waiting if job.ticket not in tickets)
        done = [
            Finished(job.ticket, self._unstarted(job))
            for job in self._waiting
            if job.ticket in tickets
        ]
        self._waiting = kept
        rows = [row for row, job in enumerate(self._lanes.jobs) if job.ticket in tickets]
        done += [Finished(self._lanes.jobs[r].ticket, self._response(r, "abort")) for r in rows]
        self._leave(rows)
        self.counters.aborted += len(done)
        return done

    def abort_all(self) -> list[Finished]:
        jobs = [*self._lanes.jobs, *self._waiting]
        return self.abort({job.ticket for job in jobs})

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
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return not self.is_paused and bool(self._waiting or self._lanes.jobs)

    @property
    def cache_bytes(self) -> int:
        return self._cache.size_bytes

    # --- weights ---

    def param_specs(self) -> list[ParamSpec]:
        """Every tensor of the model under its name on disk, tied weights once."""
        return [
            ParamSpec(name, tuple(item.shape), str(item.dtype).removeprefix("torch."))
            for name, item in self._params.items()
        ]

    def parameters(self) -> Mapping[str, Tensor]:
        """The live tensors, to be written between two steps and followed by ``set_version``."""
        return self._params

    def set_version(self, version: WeightVersion) -> None:
        """Name the weights that serve from here on; caches of older ones go as configured."""
        self.version = version
        if self._recompute:
            self._lanes.cached[:] = 0
        else:
            self._kept_from_older = {job.ticket for job in self._lanes.jobs}

    # --- one token for every running request ---

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Admit waiting requests, run one forward pass, and return the requests that ended."""
        if not self.has_work:
            return []
        self._admit()
        lanes = self._lanes
        self._cache.reserve(len(lanes), int(lanes.lengths.max()))
        logits = self._forward()
        if self._sampler is None:
            self._sampler = Sampler([job.sampling for job in lanes.jobs], self._device)
        history = History(lanes.tokens, lanes.prompt_lengths, lanes.lengths)
        ids, logprobs = self._sampler.sample(logits, history)
        lanes.append(ids, logprobs, self.version.n, self._clock())
        self.counters.steps += 1
        self.counters.tokens += len(lanes)
        if self._kept_from_older:
            self.counters.stale_kv_tokens += sum(
                job.ticket in self._kept_from_older for job in lanes.jobs
            )
        return self._collect(ids, logprobs)

    def _admit(self) -> None:
        room = self._max_batch_size - len(self._lanes)
        jobs = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        if jobs:
            self._lanes.add(jobs)
            self._sampler = None

    def _collect(
        self, ids: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]
    ) -> list[Finished]:
        lanes = self._lanes
        broken = ~np.isfinite(logprobs)
        stopped = (lanes.stop_ids == ids[:, None]).any(axis=1)
        for row, job in enumerate(lanes.jobs):
            if job.stop_strings is not None and not stopped[row]:
                made = int(lanes.lengths[row]) - job.prompt_length
                armed = made >= job.request.gconfig.min_new_tokens
                stopped[row] = job.stop_strings.push(int(ids[row]), armed=armed)
        rows = np.flatnonzero(broken | stopped | (lanes.lengths >= lanes.limits)).tolist()
        done = []
        for row in rows:
            job = lanes.jobs[row]
            outcome: Outcome
            if broken[row]:
                outcome = EngineError(
                    f"request {job.request.rid}: the model's logits are not finite under weights "
                    f"{self.version.n}; check the last weight update for NaN"
                )
                self.counters.failed += 1
            else:
                outcome = self._response(row, "stop" if stopped[row] else "length")
                self.counters.finished += 1
            done.append(Finished(job.ticket, outcome))
        self._cache.clear_rows(np.flatnonzero(broken).tolist())
        self._leave(rows)
        return done

    def _leave(self, rows: list[int]) -> None:
        if not rows:
            return
        self._kept_from_older -= {self._lanes.jobs[row].ticket for row in rows}
        sources, targets = self._lanes.remove(rows)
        if sources:
            self._cache.move(sources, targets)
        self._sampler = None
        if not self._lanes.jobs and not self._waiting and self.cache_bytes > KEPT_CACHE_BYTES:
            self._cache.drop()

    # --- the forward pass ---

    def _forward(self) -> Tensor:
        """Logits ``[n, V]`` in fp32 of the next token of every lane."""
        pieces = [self._run(item) for item in self._layout()]
        rows = [lane for _, lanes in pieces for lane in lanes]
        if len(pieces) == 1 and rows == list(range(len(rows))):
            return pieces[0][0]
        order = np.argsort(np.array(rows))
        return torch.cat([logits for logits, _ in pieces])[torch.from_numpy(order)]

    def _layout(self) -> list[_Pass]:
        """Continued lanes first (they are a prefix of the rows), then whole sequences by length."""
        lanes = self._lanes
        num_decode = int((lanes.cached > 0).sum())
        current = _Pass(num_decode=num_decode, num_tokens=num_decode)
        passes = [current]
        if num_decode:
            rows, last = np.arange(num_decode), lanes.lengths[:num_decode] - 1
            current.tokens.append(lanes.tokens[rows, last])
            current.positions.append(last)
            current.logit_index.extend(range(num_decode))
            current.logit_rows.extend([row] for row in range(num_decode))
        by_length: dict[int, dict[bytes, list[int]]] = {}
        for row in range(num_decode, len(lanes)):
            length = int(lanes.lengths[row])
            same = by_length.setdefault(length, {})
            same.setdefault(lanes.tokens[row, :length].tobytes(), []).append(row)
        for length in sorted(by_length):
            sharing = list(by_length[length].values())
            while sharing:
                room = (MAX_PREFILL_TOKENS - current.num_tokens) // length
                if room < 1 and current.num_tokens:
                    current = _Pass()
                    passes.append(current)
                    continue
                taken, sharing = sharing[: max(1, room)], sharing[max(1, room) :]
                self._place(current, length, taken)
        return passes

    def _place(self, current: _Pass, length: int, sharing: list[list[int]]) -> None:
        """Add a group of ``len(sharing)`` sequences, each for all the lanes of its list."""
        rows = [lane for lanes in sharing for lane in lanes]
        sources = [i for i, lanes in enumerate(sharing) for _ in lanes]
        current.groups.append(
            PrefillGroup(
                current.num_tokens,
                length,
                len(sharing),
                torch.tensor(rows, device=self._device),
                torch.tensor(sources, device=self._device),
            )
        )
        firsts = [lanes[0] for lanes in sharing]
        current.tokens.append(self._lanes.tokens[firsts, :length].reshape(-1))
        current.positions.append(np.tile(np.arange(length), len(sharing)))
        for i, lanes in enumerate(sharing):
            current.logit_index.append(current.num_tokens + (i + 1) * length - 1)
            current.logit_rows.append(lanes)
        current.num_tokens += length * len(sharing)
        self.counters.prefill_tokens += length * len(sharing)

    def _run(self, item: _Pass) -> tuple[Tensor, list[int]]:
        filler = np.zeros(max(0, MIN_TOKENS - item.num_tokens), dtype=np.int64)
        tokens = np.concatenate([*item.tokens, filler])
        positions = np.concatenate([*item.positions, filler])
        positions_N = torch.from_numpy(positions).to(self._device)
        last = int(positions[: item.num_decode].max()) if item.num_decode else 0
        index = item.logit_index + item.logit_index[-1:] * (MIN_TOKENS - len(item.logit_index))
        logits = self.model(
            input_ids=torch.from_numpy(tokens).to(self._device)[None],
            position_ids=positions_N[None],
            use_cache=False,
            logits_to_keep=torch.tensor(index, device=self._device),
            ctx=CacheContext(
                self._cache,
                positions=positions_N[: item.num_decode],
                max_position=last,
                groups=item.groups,
            ),
        ).logits[0]
        lanes = [lane for rows in item.logit_rows for lane in rows]
        repeats = [i for i, rows in enumerate(item.logit_rows) for _ in rows]
        if repeats == list(range(logits.shape[0])):
            return logits.float(), lanes
        return logits[torch.tensor(repeats, device=self._device)].float(), lanes

    # --- responses ---

    def _response(self, row: int, reason: StopReason) -> LLMResponse:
        lanes, job = self._lanes, self._lanes.jobs[row]
        made = slice(job.prompt_length, int(lanes.lengths[row]))
        ids = lanes.tokens[row, made].tolist()
        times = lanes.times[row, made]
        return LLMResponse(
            input_tokens=list(job.request.input_ids),
            output_tokens=ids,
            output_logprobs=lanes.logprobs[row, made].tolist(),
            output_versions=lanes.versions[row, made].tolist(),
            stop_reason=reason,
            latency=self._clock() - job.submitted,
            ttft=float(times[0]) - job.submitted if ids else 0.0,
            itl=np.diff(times).tolist(),
            text=self._text(job, ids, reason),
        )

    def _text(self, job: Job, ids: list[int], reason: StopReason) -> str | None:
        """The completion without its stop token or stop string."""
        if self.limits.decoder is None:
            return None
        if reason == "stop":
            if ids[-1] in job.sampling.stop_ids:
                ids = ids[:-1]
            elif job.stop_strings is not None:
                return job.stop_strings.text
        return self.limits.decoder.decode(ids, skip_special_tokens=True)

    def _unstarted(self, job: Job) -> LLMResponse:
        return LLMResponse(
            input_tokens=list(job.request.input_ids),
            output_tokens=[],
            output_logprobs=[],
            output_versions=[],
            stop_reason="abort",
            latency=self._clock() - job.submitted,
            text=None if self.limits.decoder is None else "",
        )
