"""What a request is answered with, from its row or from the queue."""

from __future__ import annotations

import numpy as np

from tandem.inference.embedded.lanes import Made
from tandem.inference.embedded.requests import Job, ModelLimits
from tandem.types import LLMResponse, StopReason


def respond(
    job: Job, made: Made | None, reason: StopReason, limits: ModelLimits, now: float
) -> LLMResponse:
    """The response of ``job``, which ended ``now`` with what it has ``made`` (``None``: nothing).

    A stop token stays in the ids and is cut from the text, a stop string likewise.
    """
    request = job.request
    ids = [] if made is None else made.tokens.tolist()
    times = np.zeros(0) if made is None else made.times
    raw = [] if made is None else made.raw_logprobs.tolist()
    return LLMResponse(
        input_tokens=list(request.input_ids),
        output_tokens=ids,
        output_logprobs=[] if made is None else made.logprobs.tolist(),
        output_versions=[] if made is None else made.versions.tolist(),
        stop_reason=reason,
        latency=now - job.submitted,
        ttft=float(times[0]) - job.submitted if ids else 0.0,
        itl=np.diff(times).tolist(),
        text=_text(job, ids, reason, limits),
        raw_logprobs=raw if request.raw_logprobs else None,
        top_logprobs=list(job.top_logprobs) if request.top_logprobs else None,
        prompt_logprobs=list(job.prompt_logprobs) if request.prompt_logprobs else None,
    )


def _text(job: Job, ids: list[int], reason: StopReason, limits: ModelLimits) -> str | None:
    if limits.decoder is None:
        return None
    if reason == "stop":
        if ids[-1] in job.sampling.stop_ids:
            ids = ids[:-1]
        elif job.stop_strings is not None:
            return job.stop_strings.text
    return limits.decoder.decode(ids, skip_special_tokens=True)
