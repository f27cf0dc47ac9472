"""``tandem eval``: measure a model that is not being trained."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

from tandem.config import RLConfig, RolloutConfig, Root, SFTConfig
from tandem.errors import ConfigError
from tandem.models.loading import context_length, load_tokenizer, resolve_model
from tandem.rollout import open_inference_engine
from tandem.trainers.evaluate import HeldOut
from tandem.trainers.run import set_threads


def run_eval(config: Root) -> dict[str, Any]:
    """Complete and score the held-out prompts of ``config`` with its model.

    Returns ``avg@k`` and ``pass@k`` with ``k = eval.samples``, and what else was counted.

    Raises:
        ConfigError: the configuration has no ``eval.data``, or its model has yet to be made.
        DataError: the data cannot be used.
    """
    if not isinstance(config, RLConfig | SFTConfig):
        raise ConfigError(
            "kind: got a run on pairs, allowed: sft, rl; 'tandem eval' generates, while a run on "
            "pairs measures its held-out pairs itself (eval.data; see summary.json)"
        )
    if config.eval.data is None:
        raise ConfigError("eval.data: got null; say what to evaluate on, e.g. eval.data.source")
    if config.model.tiny is not None:
        raise ConfigError("model.path: give the directory of the model to evaluate")
    set_threads(config)
    seed = config.run.seed
    path = resolve_model(config.model, seed=seed, workdir=Path(config.run.output_dir))
    reward = config.rollout.reward if isinstance(config, RLConfig) else config.reward
    tokenizer = load_tokenizer(config.model.tokenizer_path or path)
    held_out = HeldOut(
        config.eval, reward, tokenizer, max_prompt_tokens=context_length(path) - 1, seed=seed
    )
    engine = open_inference_engine(
        config.inference,
        RolloutConfig(generation=config.eval.generation),
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
    k = config.eval.samples
    return {
        f"avg@{k}": result.accuracy,
        f"pass@{k}": result.pass_at_k,
        "reward_mean": result.reward_mean,
        "response_length": result.response_length,
        "num_prompts": result.num_prompts,
        "num_failed": result.num_failed,
        "wall_s": wall_s,
        "model": path,
    }
