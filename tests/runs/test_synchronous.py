"""``max_staleness: 0`` is the synchronous loop: the same numbers as a loop written down by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem.models.loading import resolve_model
from tandem.rollout import open_inference_engine
from tandem.trainers import run_rl
from tandem.trainers.publish import publish_weights, release_weights
from tandem.trainers.rl import open_task
from tandem.trainers.rl_learner import open_learner
from tandem.trainers.run import seed_generators
from tests.runs.conftest import TINY, Bed, Problems, metrics, rl_settings

REWARD = """
def thirds(prompt, completion, prompt_ids, completion_ids, **row):
    return sum(completion_ids) % 3 / 2
"""
COMPARED = ("actor/loss", "actor/grad_norm", "reward/mean", "perf/num_tokens")


def by_hand(config: Any, folder: Path) -> list[dict[str, float]]:
    """Generate a batch, learn from it, publish; nothing runs beside anything."""
    model_path = resolve_model(config.model, seed=config.run.seed, workdir=folder)
    task = open_task(config, model_path)
    config, found = task.config, []
    seed_generators(config.run.seed)
    with open_learner(config, model_path) as learner:
        engine = open_inference_engine(
            config.inference,
            config.rollout,
            model_path=model_path,
            tokenizer=task.tokenizer,
            incarnation="by-hand",
            seed=config.run.seed,
        )
        try:
            for step in range(config.steps):
                size = config.rollout.batch_size
                positions = range(step * size, (step + 1) * size)
                prompts = [task.prompts.prompt(0, position) for position in positions]
                batch = engine.rollout_batch(prompts, task.workflow)
                found.append(learner.learn(batch))
                publish_weights(
                    learner.policy,
                    engine,
                    version=step + 1,
                    incarnation="by-hand",
                    config=config.inference,
                )
        finally:
            engine.destroy()
            release_weights("by-hand")
    return found


def test_staleness_zero_gives_the_losses_of_a_synchronous_loop(
    tmp_path: Path, problems: Problems
) -> None:
    (tmp_path / "rewards.py").write_text(REWARD)
    settings = rl_settings(problems, {"tiny": TINY})
    settings["inference"]["backend"] = "scripted"
    settings["rollout"]["reward"]["name"] = f"{tmp_path / 'rewards.py'}:thirds"
    settings["steps"] = 4
    del settings["eval"]
    config = Bed(tmp_path, settings).config()
    expected = by_hand(config, tmp_path)
    run_rl(config)
    received = [row for row in metrics(tmp_path / "run") if row["step"] >= 1]
    assert len(received) == len(expected) == 4
    assert any(row["actor/loss"] != 0 for row in received)
    for row, by_loop in zip(received, expected, strict=True):
        assert [row[name] for name in COMPARED] == [by_loop[name] for name in COMPARED]
