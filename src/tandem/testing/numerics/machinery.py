"""Checks of what moves the tensors: the next-token shift, packing, balancing, staleness."""

from __future__ import annotations

from typing import Any

import torch

from tandem.data.packing import (
    balanced_sizes,
    cut_microbatches,
    first_fit_decreasing,
    karmarkar_karp,
    pack,
)
from tandem.errors import DataError
from tandem.rollout.staleness import StalenessLedger, capacity_at_version
from tandem.testing.numerics.case import Case, Results
from tandem.types import EpisodeState


def check_alignment(case: Case) -> Results:
    """Which hidden states score the response, with the mask on the scored token itself."""
    ids = case.ints("input_ids")[None]
    trained = (torch.arange(ids.shape[1]) >= case.inputs["prompt_len"])[None]
    packed = pack(ids, torch.ones_like(trained), predict_BT=trained)
    predicting = torch.zeros(ids.shape[1], dtype=torch.int64)
    predicting[packed.sources] = 1
    return {
        "logit_rows_for_response": packed.sources,
        "scored_tokens": packed.targets,
        "response_len": len(packed.targets),
        "predict_next_mask": predicting,
        "current_token_mask": trained[0],
    }


def check_karmarkar_karp(case: Case) -> Results:
    lengths, k = case.inputs["lengths"], case.params["k"]
    parts = karmarkar_karp(lengths, k)
    every_index_once = sorted(i for part in parts for i in part) == list(range(len(lengths)))
    none_empty = all(parts) or len(lengths) < k
    sums = sorted((sum(lengths[i] for i in part) for part in parts), reverse=True)
    if not (every_index_once and none_empty):
        return {}
    return {
        "kk_sums_desc": sums,
        "spread": sums[0] - sums[-1],
        "optimal_max": _optimal_max(lengths, k),
    }


def _optimal_max(lengths: list[int], k: int) -> int:
    """Smallest possible largest sum, by exhaustion: the yardstick, not the library."""
    reachable = {(0,) * k}
    for length in lengths:
        reachable = {
            tuple(sorted([*sums[:i], sums[i] + length, *sums[i + 1 :]]))
            for sums in reachable
            for i in range(k)
        }
    return min(max(sums) for sums in reachable)


def check_packing(case: Case) -> Results:
    if "n" in case:
        return {"sizes": balanced_sizes(case.inputs["n"], case.inputs.get("k") or case.params["k"])}
    lengths = case.inputs["lengths"]
    cap = case.inputs.get("cap") or case.params["cap"]
    if max(lengths) > cap:
        return {"ok": _too_long(lengths, cap)}
    bins = first_fit_decreasing(lengths, cap)
    loads = sorted((sum(lengths[i] for i in part) for part in bins), reverse=True)
    cut = cut_microbatches(lengths, max_tokens=cap)
    if any(sum(lengths[i] for i in part) > cap for part in cut):
        return {}
    return {
        "lower_bound": -(-sum(lengths) // cap),
        "ffd_bins": len(bins),
        "ffd_loads_desc": loads,
    }


def _too_long(lengths: list[int], cap: int) -> list[str]:
    """The two legal answers of the case; the first is ours, and is returned only if it holds."""
    try:
        cut_microbatches(lengths, max_tokens=cap)
    except DataError as error:
        if str(max(lengths)) in str(error):
            return [f"error naming length {max(lengths)}", "bin alone"]
    return []


def check_staleness(case: Case) -> Results:
    if "rows" in case:
        return {"capacity": [_capacity(row) for row in case.inputs["rows"]]}
    if "events" in case:
        return _after_events(case)
    eta, batch_size = case.inputs["eta"], case.inputs["B"]
    if "version" not in case:
        return {"max_lag": _largest_lag(eta, batch_size)}
    version = case.inputs["version"]
    row = dict(case.inputs) | {"running": 0}
    return {
        "capacity": _capacity(row | {"accepted": version * batch_size}),
        "wrong_if_accepted_zero": _capacity(row | {"accepted": 0}),
    }


def _capacity(row: dict[str, Any]) -> int:
    return capacity_at_version(
        row["max_concurrent"],
        row["eta"],
        row["B"],
        version=row["version"],
        running=row["running"],
        accepted=row["accepted"],
    )


def _after_events(case: Case) -> Results:
    ledger = _ledger(case.inputs["eta"], case.inputs["B"], case.inputs["max_concurrent"])
    episode = 0
    running: list[int] = []
    for event in case.inputs["events"].split(";"):
        verb, count = event.split()
        for _ in range(int(count)):
            if verb == "submit":
                ledger.submit(episode)
                ledger.start(episode, case.inputs["version"])
                running.append(episode)
                episode += 1
            elif verb == "accept":
                ledger.finish(running.pop(0), case.inputs["version"], case.inputs["version"])
            elif verb == "reject":
                ledger.close(running.pop(0), EpisodeState.REJECTED)
            else:
                ledger.close(running.pop(0), EpisodeState.FAILED)
    counts = ledger.counts()
    after = {
        "accepted": ledger.accepted,
        "running": counts["running"],
        "rejected": counts["rejected"] + counts["failed"],
    }
    return {"after": after, "capacity": ledger.capacity()}


def _largest_lag(eta: int, batch_size: int, num_steps: int = 20) -> int:
    """Run the loop with instant generation, the pipeline full at all times; the oldest token seen
    when a batch is handed over."""
    ledger = _ledger(eta, batch_size, max_concurrent=10**6)
    born: dict[int, int] = {}
    lag = 0
    for version in range(num_steps):
        for _ in range(ledger.capacity()):
            episode = len(born)
            born[episode] = version
            ledger.submit(episode)
            ledger.start(episode, version)
            ledger.finish(episode, version, version)
        batch = ledger.select(batch_size, version)
        assert batch is not None, "a full pipeline has a batch"
        lag = max(lag, *(version - born[episode] for episode in batch))
        ledger.hand_over(batch)
        ledger.consume()
    return lag


def _ledger(eta: int, batch_size: int, max_concurrent: int) -> StalenessLedger:
    return StalenessLedger(max_concurrent=max_concurrent, max_staleness=eta, batch_size=batch_size)
