"""Tool use: a multi-turn conversation in which the environment runs what the model calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from tandem.data.prompts import Overlong
from tandem.errors import ConfigError
from tandem.rollout.environments import Environment, Step
from tandem.rollout.multi_turn import MultiTurnWorkflow
from tandem.rollout.scoring import Reward
from tandem.rollout.tool_calls import ToolFormat, parse_tool_calls
from tandem.rollout.tools import ToolRegistry, load_tools
from tandem.types import GenerationConfig, StopReason

_SLACK_S = 5.0
"""Between the deadline of a turn's calls, which run at once, and that of the turn."""


class ToolEnvironment(Environment):
    """Answers every call of a turn with a ``tool`` message; a turn without calls is the last."""

    keeps_special_tokens: ClassVar[bool] = True

    def __init__(
        self, registry: ToolRegistry, *, format: ToolFormat = "auto", max_calls: int = 16
    ) -> None:
        self._registry = registry
        self._format = format
        self._max_calls = max_calls
        self.stop_reason: StopReason | None = None

    async def reset(self, seed: int, data: Mapping[str, Any]) -> None:
        self.stop_reason = None

    async def step(self, action: str) -> Step:
        calls = parse_tool_calls(action, self._format).calls
        self.stop_reason = "tool_calls" if calls else None
        if not calls:
            return "", None, True
        answers = await self._registry.run(calls[: self._max_calls])
        answers += [f"error: at most {self._max_calls} calls in one turn"] * max(
            0, len(calls) - self._max_calls
        )
        messages = [
            {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": answer}
            for call, answer in zip(calls, answers, strict=True)
        ]
        return messages, None, False


def tool_use(
    reward: Reward | Callable[..., Any],
    generation: GenerationConfig,
    tokenizer: Any,
    *,
    tools: str | Sequence[Any],
    tool_format: ToolFormat = "auto",
    tool_timeout_s: float = 10.0,
    max_result_chars: int = 4000,
    max_calls_per_turn: int = 16,
    max_turns: int = 8,
    scored_by: Literal["environment", "reward", "both"] = "reward",
    group_size: int = 1,
    min_group_size: int = 1,
    seed: int = 0,
    max_prompt_tokens: int | None = None,
    overlong_prompt: Overlong = "error",
) -> MultiTurnWorkflow:
    """The workflow ``tool_use``: the model may call ``tools`` in up to ``max_turns`` turns.

    ``tools`` are functions, or names of them (``path/file.py:name``); a chat template is given
    their schemas. Calls of one turn run at once, each for at most ``tool_timeout_s``; errors are
    returned to the model as text. The reward function scores the last turn.

    Raises:
        ConfigError: a tool has no schema, or a setting is out of range.
    """
    if tool_format not in ("auto", "hermes", "llama", "mistral", "json"):
        raise ConfigError(
            f"tool_format: got {tool_format!r}, allowed: auto, hermes, llama, mistral, json"
        )
    if max_calls_per_turn < 1:
        raise ConfigError(f"max_calls_per_turn: got {max_calls_per_turn}, allowed: an integer >= 1")
    registry = ToolRegistry(
        load_tools(tools), timeout_s=tool_timeout_s, max_result_chars=max_result_chars
    )
    return MultiTurnWorkflow(
        reward=reward,
        generation=generation,
        tokenizer=tokenizer,
        group_size=group_size,
        min_group_size=min_group_size,
        seed=seed,
        max_prompt_tokens=max_prompt_tokens,
        overlong_prompt=overlong_prompt,
        environment=partial(
            ToolEnvironment, registry, format=tool_format, max_calls=max_calls_per_turn
        ),
        max_turns=max_turns,
        scored_by=scored_by,
        step_timeout_s=tool_timeout_s + _SLACK_S,
        tools=registry.schemas,
    )
