"""A reward and a workflow of your own, for the quickstart task of spelling words backward.

    python examples/custom_reward.py
    python examples/custom_reward.py steps=20

or, from the command line and without a line of training code:

    tandem quickstart rollout.reward.name=examples/custom_reward.py:letters_in_place
    tandem quickstart rollout.workflow=examples/custom_reward.py:ShortAnswers
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from tandem import InferenceEngine, SingleTurnWorkflow, load_config, run_rl
from tandem.config import resolve_recipe


def letters_in_place(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    answer: str,
    **row: Any,
) -> float:
    """The share of letters in the right place. The columns of the row come by name."""
    right = sum(a == b for a, b in zip(completion, answer, strict=False))
    return right / max(len(completion), len(answer))


class ShortAnswers(SingleTurnWorkflow):
    """One turn with a bonus for answers of the right length.

    A workflow turns one prompt into the rows of one episode; returning None rejects it.
    """

    async def arun_episode(
        self, engine: InferenceEngine, data: Mapping[str, Any]
    ) -> TensorDict | None:
        rows = await super().arun_episode(engine, data)
        if rows is None:
            return None
        # One sampled token a letter, and one that ends the answer.
        is_right_length = rows["loss_mask"].sum(-1) == len(data["answer"]) + 1
        rows["rewards"] = rows["rewards"] + 0.1 * is_right_length
        return rows


def main(overrides: list[str]) -> None:
    here = Path(__file__).resolve()
    config = load_config(
        resolve_recipe("quickstart"),
        [
            "run.name=custom-reward",
            f"rollout.reward.name={here}:letters_in_place",
            f"rollout.workflow={here}:ShortAnswers",
            # Accuracy stays what it was: only a completion that is all right counts.
            "eval.reward.name=exact_match",
            *overrides,
        ],
    )
    summary = run_rl(config)
    print(f"accuracy before: {summary['accuracy_before']:.3f}")
    print(f"accuracy after:  {summary['accuracy_after']:.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
