"""Where the time of one RL step goes: every part alone, on one thread, in this process.

    taskset -c 1 python benchmarks/rl_step.py --json rl_step.json
    python benchmarks/rl_step.py --model models/some-model --rows 64 --prompt 30 --new 30 --bfloat16

Parts: scoring the batch (prox), one ``train_batch``, publishing a version to a generation engine,
rolling out a batch of episodes, decoding the same requests without the executor, rewards. The
yardsticks are plain ``transformers`` code on the same rows: a padded training step (rows of nearly
one length: no packing beats it), and the bare forward pass of a decoding step.

Times are of the wall clock and, where a part runs on this process alone, of its processor
(``cpu_ms``), which other programs on the machine disturb less.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from machine import parser, report
from tensordict import TensorDict
from timing import Timing, measure, ratio, summary, take_turns
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from tandem.config import InferenceConfig, RLConfig, load_config, resolve_recipe
from tandem.data.prompts import PromptSource, open_prompts
from tandem.inference.embedded.build import build_core
from tandem.models.cache import CacheContext, KVCache
from tandem.models.loading import load_tokenizer, resolve_model
from tandem.rollout import EmbeddedInferenceEngine, SingleTurnWorkflow, load_reward
from tandem.train import EngineRegistry
from tandem.trainers.publish import publish_weights
from tandem.trainers.rl_batch import build_objective, minibatches, prepare_batch, score
from tandem.types import GenerationConfig, LLMRequest

# --- the trainer's side -------------------------------------------------------------------------


def open_trainer(config: RLConfig, model_path: str) -> Any:
    engine = EngineRegistry.new(
        "language_model", "local", config=config.train, model_path=model_path, seed=0
    )
    engine.initialize()
    return engine


def plain_step(model_path: str, batch: TensorDict, *, bfloat16: bool) -> Callable[[], None]:
    """A training step as one would write it by hand: rows padded on the right, AdamW."""
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation="sdpa"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    ids, trained = batch["input_ids"], batch["loss_mask"]
    target = trained[:, 1:]
    old, advantage = batch["prox_logprobs"][trained], batch["advantages"][trained]

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            logits = model.lm_head(hidden[:, :-1][target])
        logprobs = -cross_entropy(logits.float(), ids[:, 1:][target], reduction="none")
        ratio = (logprobs - old).exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        (-surrogate.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def measure_training(
    config: RLConfig, model_path: str, batch: TensorDict, repeats: int
) -> dict[str, Any]:
    trainer = open_trainer(config, model_path)
    prepared, _ = prepare_batch(batch, trainer, config.algorithm, reference=None)
    (minibatch,) = minibatches(prepared, config.algorithm)
    objective = build_objective(config.algorithm)
    plain = plain_step(model_path, prepared, bfloat16=config.train.dtype == "bfloat16")
    times = take_turns(
        {"ours": lambda: trainer.train_batch(minibatch, objective), "plain": plain}, repeats
    )
    ours = summary(times["ours"])
    tokens = int(batch["attention_mask"].sum())
    figures = {
        "tokens": tokens,
        "prox": measure(lambda: score(batch, trainer), repeats),
        "prepare_batch": measure(
            lambda: prepare_batch(batch, trainer, config.algorithm, reference=None), repeats
        ),
        "train_batch": ours,
        "plain_step": summary(times["plain"]),
        "train_batch_over_plain": ratio(times["ours"], times["plain"]),
        "train_tokens_per_s": round(1e3 * tokens / ours["cpu_ms"]),
    }
    trainer.destroy()
    return figures


# --- the generator's side -----------------------------------------------------------------------


@contextmanager
def open_rollout(
    config: RLConfig, inference: InferenceConfig, model_path: str
) -> Iterator[EmbeddedInferenceEngine]:
    engine = EmbeddedInferenceEngine(
        inference, config.rollout, model_path=model_path, incarnation="benchmark"
    )
    engine.initialize()
    try:
        yield engine
    finally:
        engine.destroy()


def decode(core: Any, requests: list[LLMRequest]) -> None:
    for ticket, request in enumerate(requests):
        core.add(ticket, request)
    while core.has_work:
        core.step()


@torch.inference_mode()
def bare_decode_pass(model: Any, num_rows: int, length: int) -> Callable[[], None]:
    """The forward pass of one decoding step and nothing else."""
    cache = KVCache()
    cache.reserve([length + 1] * num_rows)
    positions = torch.full((num_rows,), length)
    ids = torch.ones(1, num_rows, dtype=torch.int64)

    @torch.inference_mode()
    def step() -> None:
        context = CacheContext(cache, positions=positions.numpy())
        model(input_ids=ids, position_ids=positions[None], use_cache=False, ctx=context)

    return step


def measure_generation(
    inference: InferenceConfig, model_path: str, requests: list[LLMRequest], repeats: int
) -> dict[str, Any]:
    core = build_core(inference, model_path, "benchmark")
    whole = measure(lambda: decode(core, requests), repeats)
    core.counters.steps = core.counters.tokens = 0
    decode(core, requests)
    num_tokens, num_steps = core.counters.tokens, core.counters.steps
    length = len(requests[0].input_ids) + requests[0].gconfig.max_new_tokens // 2
    rows = min(len(requests), inference.max_batch_size)
    bare = measure(bare_decode_pass(core.model, rows, length), repeats)
    return {
        "decode": whole | {"tokens": num_tokens, "steps": num_steps},
        "decode_tokens_per_s": round(1e3 * num_tokens / whole["cpu_ms"]),
        "bare_pass_of_one_step": bare,
        "step_over_bare_pass": round(whole["cpu_ms"] / num_steps / bare["cpu_ms"], 3),
    }


def measure_rewards(config: RLConfig, prompts: PromptSource, repeats: int) -> Timing:
    reward = load_reward(config.rollout.reward)
    data = prompts.all()[: config.rollout.batch_size]

    async def score_all() -> None:
        await asyncio.gather(
            *(
                reward.score(
                    prompt=prompt.data["prompt"],
                    completion="abcdef",
                    prompt_ids=prompt.data["prompt_ids"],
                    completion_ids=(5, 6, 7, 8, 9, 10),
                    data=prompt.data,
                )
                for prompt in data
                for _ in range(config.rollout.group_size)
            )
        )

    return measure(lambda: asyncio.run(score_all()), repeats)


# --- putting it together ------------------------------------------------------------------------


def measure_quickstart(scratch: Path, repeats: int, parts: list[str]) -> dict[str, Any]:
    config = load_config(resolve_recipe("quickstart"))
    assert isinstance(config, RLConfig)
    config = config.model_copy(
        update={"inference": config.inference.model_copy(update={"mode": "inprocess"})}
    )
    model_path = resolve_model(config.model, seed=0, workdir=scratch)
    tokenizer = load_tokenizer(model_path)
    prompts = open_prompts(config.data, tokenizer, seed=0)
    generation = GenerationConfig(max_new_tokens=9)
    workflow = SingleTurnWorkflow(
        reward=load_reward(config.rollout.reward),
        generation=generation,
        tokenizer=tokenizer,
        group_size=config.rollout.group_size,
    )
    data = prompts.all()[: config.rollout.batch_size]
    requests = [
        LLMRequest(f"{i}.{k}", tuple(prompt.data["prompt_ids"]), generation.new(seed=8 * i + k))
        for i, prompt in enumerate(data)
        for k in range(config.rollout.group_size)
    ]
    figures: dict[str, Any] = {}
    with open_rollout(config, config.inference, model_path) as engine:
        batch = engine.rollout_batch(data, workflow)
        if "rollout" in parts:
            figures["rollout"] = measure(lambda: engine.rollout_batch(data, workflow), repeats)
    if "train" in parts:
        figures |= measure_training(config, model_path, batch, repeats)
    if "publish" in parts:
        figures["publish"] = measure_publish(config, model_path, repeats)
    if "generate" in parts:
        figures |= measure_generation(config.inference, model_path, requests, repeats)
    if "reward" in parts:
        figures["rewards"] = measure_rewards(config, prompts, repeats)
    return figures


def measure_publish(config: RLConfig, model_path: str, repeats: int) -> Timing:
    """Through shared memory, as to a child process, into an idle engine of this process."""
    inference = config.inference.model_copy(update={"transport": "shared_memory"})
    trainer = open_trainer(config, model_path)
    with open_rollout(config, inference, model_path) as engine:

        def publish() -> None:
            version = trainer.get_version() + 1
            publish_weights(
                trainer, engine, version=version, incarnation="benchmark", config=inference
            )

        timing = measure(publish, repeats)
    trainer.destroy()
    return timing


def synthetic_batch(num_rows: int, num_prompt: int, num_new: int, vocab_size: int) -> TensorDict:
    shape = (num_rows, num_prompt + num_new)
    generator = torch.Generator().manual_seed(0)
    is_new = torch.arange(shape[1]).expand(shape) >= num_prompt
    return TensorDict(
        {
            "input_ids": torch.randint(vocab_size, shape, generator=generator),
            "attention_mask": torch.ones(shape, dtype=torch.bool),
            "loss_mask": is_new,
            "logprobs": torch.zeros(shape),
            "versions": torch.zeros(shape, dtype=torch.int64).where(is_new, -1),
            "temperature": torch.ones(num_rows),
            "rewards": torch.rand(num_rows, generator=generator),
            "truncated": torch.zeros(num_rows, dtype=torch.bool),
            "group_ids": torch.arange(num_rows) // 8,
            "sample_ids": torch.arange(num_rows),
            "episode_ids": torch.arange(num_rows) // 8,
            "attempt": torch.zeros(num_rows, dtype=torch.int64),
        },
        batch_size=[num_rows],
    )


def measure_model(options: Any) -> dict[str, Any]:
    """Another model, on synthetic tokens: training and decoding alone."""
    dtype = "bfloat16" if options.bfloat16 else "float32"
    config = load_config(
        resolve_recipe("quickstart"),
        [f"train.dtype={dtype}", "train.lr=1e-6", f"inference.dtype={dtype}"],
    )
    assert isinstance(config, RLConfig)
    config = config.model_copy(update={"warmup": None})
    tokenizer = load_tokenizer(options.model)
    batch = synthetic_batch(options.rows, options.prompt, options.new, len(tokenizer))
    generation = GenerationConfig(max_new_tokens=options.new, ignore_eos=True)
    requests = [
        LLMRequest(str(i), tuple(row[: options.prompt].tolist()), generation.new(seed=i))
        for i, row in enumerate(batch["input_ids"])
    ]
    figures: dict[str, Any] = {}
    if "train" in options.parts:
        figures |= measure_training(config, options.model, batch, options.repeats)
    if "generate" in options.parts:
        figures |= measure_generation(config.inference, options.model, requests, options.repeats)
    return figures


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--repeats", type=int, default=7)
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument(
        "--parts", nargs="+", default=["rollout", "train", "publish", "generate", "reward"]
    )
    arguments.add_argument("--model", help="a model directory instead of the quickstart's model")
    arguments.add_argument("--rows", type=int, default=64)
    arguments.add_argument("--prompt", type=int, default=30)
    arguments.add_argument("--new", type=int, default=30)
    arguments.add_argument("--bfloat16", action="store_true")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    if options.model:
        figures = measure_model(options)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            figures = measure_quickstart(Path(scratch), options.repeats, options.parts)
    report({"threads": options.threads, **figures}, options.json)


if __name__ == "__main__":
    main()
