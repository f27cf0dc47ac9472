"""Loss per token of models on the held-out demonstrations of a supervised recipe.

python benchmarks/heldout_loss.py gsm8k-sft models/smollm2-135m-instruct outputs/gsm8k-sft/model \\
    --set eval.data.path=test.jsonl sft.data.path=train.jsonl --json loss.json

The demonstrations are the rows of the recipe's ``eval.data``, cut as those of ``sft`` are.
"""

from __future__ import annotations

from typing import Any

from machine import parser, report

from tandem import load_config
from tandem.config import SFTConfig, resolve_recipe
from tandem.trainers.run import set_threads
from tandem.trainers.sft import SFTStage


def heldout_loss(config: SFTConfig, model_dir: str) -> dict[str, Any]:
    """Mean negative log-likelihood of a target token, and how many there were."""
    if config.eval.data is None:
        raise SystemExit("eval.data: got null; say what to measure on")
    stage_config = config.sft.model_copy(update={"data": config.eval.data})
    stage = SFTStage(stage_config, model_dir, seed=config.run.seed)
    total, num_tokens = 0.0, 0
    try:
        for rows in stage.data.batches(stage.config.batch_size, epochs=1):
            batch = stage.make_batch(rows)
            count = int(batch["loss_mask"].sum())
            total += stage.engine.eval_batch(batch, stage.loss) * count
            num_tokens += count
    finally:
        stage.close()
    return {"loss_per_token": total / num_tokens, "tokens": num_tokens, "rows": len(stage.data)}


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("recipe")
    arguments.add_argument("models", nargs="+", help="Hugging Face directories")
    arguments.add_argument("--set", nargs="*", default=[], help="section.key=value overrides")
    options = arguments.parse_args()
    config = load_config(resolve_recipe(options.recipe), options.set)
    set_threads(config)
    losses = {path: heldout_loss(config, path) for path in options.models}
    report({"recipe": options.recipe, "overrides": options.set, "models": losses}, options.json)


if __name__ == "__main__":
    main()
