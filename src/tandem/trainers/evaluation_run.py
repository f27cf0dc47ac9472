"""``tandem eval``: measure a model that is not being trained."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

from tandem.config import EvalRunConfig, RLConfig, RolloutConfig, Root, SFTConfig
from tandem.errors import ConfigError
from tandem.models.loading import context_length, load_tokenizer, resolve_model
from tandem.rollout import open_inference_engine
from tandem.trainers.evaluate import HeldOut
from tandem.trainers.run import set_threads


def run_eval(config: Root) -> dict[str, Any]:
    """Complete and score the held-out prompts of ``config`` with its model.

    Returns ``avg@k``, ``pass@j`` and ``maj@k`` with ``k = eval.samples``, their 95 % intervals
    under the same names with ``_low`` and ``_high``, and what else was counted.

    Raises:
        ConfigError: the configuration has no ``eval.data``, or its model has yet to be made.
        DataError: the data cannot be used.
    """
    if not isinstance(config, RLConfig | SFTConfig | EvalRunConfig):
        raise ConfigError(
            "kind: got a run on pairs, allowed: sft, rl, eval; 'tandem eval' generates, while a "
            "run on pairs measures its held-out pairs itself (eval.data; see summary.json). Its "
            "model: tandem eval MODEL_DIR --data DATA --reward NAME"
        )
    if config.eval.data is None:
        raise ConfigError("eval.data: got null; say what to evaluate on, e.g. eval.data.source")
    if config.model.tiny is not None:
        raise ConfigError("model.path: give the directory of the model to evaluate")
    set_threads(config)
    seed = config.run.seed
    path = resolve_model(config.model, seed=seed, workdir=Path(config.run.output_dir))
    tokenizer = load_tokenizer(config.model.tokenizer_path or path)
    rollout = _rollout(config)
    context = min(context_length(path), config.inference.max_context or context_length(path))
    held_out = HeldOut(
        config.eval,
        rollout,
        tokenizer,
        max_prompt_tokens=_prompt_limit(rollout, context),
        max_tokens=context,
        seed=seed,
    )
    engine = open_inference_engine(
        config.inference,
        rollout,
        model_path=path,
        tokenizer=tokenizer,
        incarnation=uuid.uuid4().hex[:12],
        seed=seed,
        tokenizer_path=config.model.tokenizer_path,
    )
    try:
        started = time.monotonic()
        result = held_out.evaluate(engine)
        wall_s = time.monotonic() - started
    finally:
        engine.destroy()
    return {**result.values(), "wall_s": wall_s, "model": path}


def _rollout(config: RLConfig | SFTConfig | EvalRunConfig) -> RolloutConfig:
    """What rollouts of this evaluation are: those of the run, drawn as ``eval`` says."""
    base = RolloutConfig(reward=config.reward) if isinstance(config, SFTConfig) else config.rollout
    return base.model_copy(update={"generation": config.eval.decoding})


def _prompt_limit(rollout: RolloutConfig, context: int) -> int:
    limit = rollout.max_prompt_tokens or context - 1
    if limit >= context:
        raise ConfigError(
            f"rollout.max_prompt_tokens: got {limit}, allowed: 1 to {context - 1}; the context has "
            f"{context}"
        )
    return limit
