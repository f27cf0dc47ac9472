"""A model learns to look something up with a tool, then to say what it found.

    python examples/tool_agent.py                     # prepare, then train as an agent
    python examples/tool_agent.py workflow=tool_use   # the same task, the tool run by Tandem
    python examples/tool_agent.py prepare             # only write the model and the data

It writes a tiny model with a chat template, demonstrations of which most look up the first letter
of the key only, prompts, and others for evaluation; the recipe ``agent`` and
``examples/tool_use.yaml`` train on them:

    tandem rl agent

The agent is any program that speaks OpenAI's API: it needs ``pip install openai``.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

from tandem import load_config, run_rl
from tandem.config import TinyModelConfig

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = {"agent": "recipes/agent.yaml", "tool_use": "examples/tool_use.yaml"}
LETTERS = "abcdefghijklmnopqrstuvwxyz"
HELD_OUT = 60
"""Of the 650 keys, how many no demonstration and no prompt of training has."""
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


def get(key: str) -> str:
    """What belongs to a key.

    Args:
        key: two letters
    """
    return hashlib.sha256(key.encode()).hexdigest()[:2]


def score(
    prompt: Any, completion: str, prompt_ids: Any, completion_ids: Any, answer: str, **row: Any
) -> float:
    """1 for the right last word; looking up the right key is worth half."""
    called = any(f'"{row["key"]}"' in turn for turn in row["turns"][:-1])
    return 0.5 * called + 0.5 * (called and completion == answer)


async def agent(base_url: str, api_key: str, data: Mapping[str, Any]) -> None:
    """Two turns of a conversation in which the model may call ``get``."""
    import openai

    parameters = {"type": "object", "properties": {"key": {"type": "string"}}}
    tool: Any = {"type": "function", "function": {"name": "get", "parameters": parameters}}
    messages: list[Any] = list(data["prompt"])
    # Nothing is encrypted on the loopback interface; reading certificates takes longer than a turn.
    http = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
        for _ in range(2):
            answer = await client.chat.completions.create(
                model="policy", messages=messages, tools=[tool]
            )
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                asked = json.loads(call.function.arguments)
                found = get(str(asked.get("key", "")))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})


def prepare(folder: Path, seed: int = 0) -> None:
    """Write the model and the data into ``folder``, unless they are there."""
    from tandem.models.tiny import character_tokenizer, save_tiny_model

    if (folder / "prompts.jsonl").exists():
        return
    alphabet = "".join(map(chr, range(32, 127)))
    config = TinyModelConfig(
        alphabet=alphabet, hidden_size=96, num_layers=2, intermediate_size=256, max_position=96
    )
    model = save_tiny_model(config, folder / "model", seed=seed)
    tokenizer = character_tokenizer(alphabet, max_length=96)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    generator = random.Random(seed)
    keys = ["".join(pair) for pair in permutations(LETTERS, 2)]
    generator.shuffle(keys)
    heldout, trained = keys[:HELD_OUT], keys[HELD_OUT:]
    drawn = generator.choices(trained, k=8000)
    write(folder / "demonstrations.jsonl", [demonstration(key, generator) for key in drawn])
    write(folder / "heldout.jsonl", [problem(key) for key in heldout])
    write(folder / "prompts.jsonl", [problem(key) for key in trained])


def problem(key: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": key}], "key": key, "answer": get(key)}


def demonstration(key: str, generator: random.Random) -> dict[str, Any]:
    """A conversation in which, more often than not, the second letter is forgotten."""
    used = key if generator.random() < 0.4 else key[:1]
    call = json.dumps({"name": "get", "arguments": {"key": used}}, separators=(",", ":"))
    said = (
        ("user", key),
        ("assistant", call),
        ("tool", get(used)),
        ("assistant", get(used)),
    )
    return {"messages": [{"role": role, "content": content} for role, content in said]}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(arguments: list[str]) -> None:
    name = next((o.split("=")[1] for o in arguments if o.startswith("workflow=")), "agent")
    overrides = [o for o in arguments if not o.startswith("workflow=") and o != "prepare"]
    config = load_config(ROOT / CONFIGS[name], overrides)
    assert config.model.path is not None
    prepare(Path(config.model.path).parent)
    if "prepare" in arguments:
        return
    summary = run_rl(config)
    print(f"model: {summary['model_dir']}")


if __name__ == "__main__":
    main(sys.argv[1:])
