"""Checks of outputs, elementwise, against the plain model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tandem.testing.conformance.batches import take
from tandem.testing.conformance.bench import Bench, largest
from tandem.testing.conformance.figure import Figure, Part, count


def logprobs(bench: Bench) -> Figure:
    """Log-probability of every token at its row's temperature."""
    bench.needs_type("language_model", "log-probabilities")
    return _against_plain(bench, "train_logprobs")


def entropy(bench: Bench) -> Figure:
    bench.needs_type("language_model", "entropy")
    return _against_plain(bench, "entropy")


def values(bench: Bench) -> Figure:
    """Value of the state before every token, and of the state after the last one."""
    bench.needs_type("value_model", "values")
    return [*_against_plain(bench, "values"), *_against_plain(bench, "bootstrap_values")]


def scores(bench: Bench) -> Figure:
    """Score of the last token of every row, not shifted."""
    bench.needs_type("reward_model", "scores")
    return _against_plain(bench, "scores")


def hook(bench: Bench) -> Figure:
    """Logits as ``post_hook`` gets them: shifted, divided by the temperature, in row order."""
    bench.needs_type("language_model", "logits")
    with bench.engine(microbatch_size=1) as engine, torch.no_grad():
        mine = bench.shard_rows(engine, bench.rows)
        rows = take(bench.rows, mine)

        def last_token(logits: Tensor, microbatch: Any) -> Tensor:
            last = microbatch["attention_mask"].sum(1) - 1
            return logits[torch.arange(len(last), device=last.device), last]

        found = engine.forward(rows, post_hook=last_token).cpu()
        logits = bench.plain().logits(rows)
    before_last = rows["attention_mask"].sum(1) - 2
    expected = logits[torch.arange(len(mine)), before_last.clamp(min=0)]
    expected[before_last < 0] = 0.0
    # Rounding of logits grows with their size, that of log-probabilities does not.
    scale = max(1.0, float(expected.abs().max()))
    tolerance = bench.subject.tolerance.output
    return [Part("logits of last tokens", largest(found, expected) / scale, tolerance)]


def scoring_calls(bench: Bench) -> Figure:
    """``infer_batch`` and ``eval_batch`` give what ``forward`` and the training pass give."""
    with bench.engine() as engine:
        batch = bench.shard(engine, bench.batch)
        forward = engine.forward(batch)[bench.subject.output]
        inferred = engine.infer_batch(batch)
        trained = engine.forward_backward_batch(batch, bench.case.loss_fn, return_outputs=True)
        evaluated = engine.eval_batch(batch, bench.case.loss_fn)
    output = bench.subject.output
    tolerance = bench.subject.tolerance
    expected = bench.expected().loss
    scale = max(1.0, abs(expected))
    attached = [
        name
        for result in (inferred, trained)
        for name, value in result.outputs.items()
        if value.requires_grad
    ]
    return [
        bench.output_part("infer_batch", inferred.outputs[output], forward),
        bench.output_part("outputs of training", trained.outputs[output], forward),
        Part("eval_batch", abs(evaluated - expected) / scale, tolerance.loss),
        count("outputs are detached", attached),
    ]


def no_dropout(bench: Bench) -> Figure:
    """Scoring runs every module in evaluation mode, training every module in training mode."""
    with bench.engine(dropout=bench.subject.lora) as engine:
        batch = bench.shard(engine, bench.batch)
        seen: dict[str, set[bool]] = {}

        def record(label: str) -> list[Any]:
            def note(module: Any, *_: Any) -> None:
                seen.setdefault(label, set()).add(module.training)

            modules = list(engine.model.modules())
            return [module.register_forward_pre_hook(note) for module in modules]

        calls = {
            "forward": lambda: engine.forward(batch),
            "infer_batch": lambda: engine.infer_batch(batch),
            "eval_batch": lambda: engine.eval_batch(batch, bench.case.loss_fn),
            "training": lambda: engine.forward_backward_batch(batch, bench.case.loss_fn),
        }
        for label, call in calls.items():
            hooks = record(label)
            call()
            for handle in hooks:
                handle.remove()
        with engine.train_mode():
            first = engine.forward(batch)[bench.subject.output]
            second = engine.forward(batch)[bench.subject.output]
    wrong = [
        f"{label} ran modules in mode {sorted(modes)}"
        for label, modes in seen.items()
        if modes != {label == "training"}
    ]
    return [
        count("modules in the right mode", wrong),
        Part("two scorings in train_mode", largest(first, second), 0.0),
    ]


def _against_plain(bench: Bench, name: str) -> Figure:
    with torch.no_grad():
        truth = bench.plain().outputs(bench.rows)[name]
    with bench.engine() as engine:
        mine = bench.shard_rows(engine, bench.rows)
        found = engine.forward(take(bench.rows, mine))[name]
    return [bench.output_part(name, found, truth[torch.tensor(mine)])]
