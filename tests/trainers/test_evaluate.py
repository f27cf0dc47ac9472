"""The evaluation of a run, against an engine whose episodes are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from tandem.config import DataConfig, EvalConfig, RewardConfig
from tandem.data.batch import collate
from tandem.errors import RolloutError
from tandem.models.loading import load_tokenizer
from tandem.trainers.evaluate import HeldOut


class Engine:
    """Every prompt is answered rightly, but for the last, whose reward fails."""

    def __init__(self, num_prompts: int) -> None:
        self.num_prompts = num_prompts
        self.sizes: list[int] = []

    def rollout_batch(self, prompts: Any, workflow: Any) -> TensorDict:
        self.sizes.append(len(prompts))
        good = [p for p in prompts if p.position < self.num_prompts - 1]
        if not good:
            raise RolloutError("no episode ended well")
        return collate(
            [
                {
                    "input_ids": torch.tensor([5, 6]),
                    "loss_mask": torch.tensor([False, True]),
                    "rewards": 1.0,
                    "episode_ids": prompt.episode_id,
                }
                for prompt in good
            ]
        )


def test_a_failed_sample_counts_as_wrong_wherever_the_parts_end(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"question": str(n), "answer": "1"}) + "\n" for n in range(7))
    )
    held_out = HeldOut(
        EvalConfig(data=DataConfig(source="jsonl", path=str(path)), batch_size=3),
        RewardConfig(name="exact_match"),
        load_tokenizer(str(tiny_model_dir)),
        max_prompt_tokens=8,
        seed=0,
    )
    engine: Any = Engine(7)
    result = held_out.evaluate(engine)
    assert engine.sizes == [3, 2, 2]
    assert result.accuracy == 6 / 7
    assert result.num_failed == 1
