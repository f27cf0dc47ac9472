"""What a chat template does to conversations, found out by rendering some.

Every check uses the functions that a run uses. What a template may do and a run copes with is a
warning, what would make a run learn or stop wrongly an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tandem.data.text import Message, encode, render_chat
from tandem.data.turns import continue_chat
from tandem.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Level = Literal["ok", "warning", "error"]

_WHERE = "template"
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a town.",
            "parameters": {
                "type": "object",
                "properties": {"town": {"type": "string", "description": "its name"}},
                "required": ["town"],
            },
        },
    }
]
_CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "oslo"}}\n</tool_call>'


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    level: Level
    text: str


def lint_template(tokenizer: PreTrainedTokenizerBase) -> list[Finding]:
    """Check generation prompt, ends of turns, BOS, prefix extension and a round trip of a tool."""
    if not tokenizer.chat_template:
        return [Finding("template", "error", "the tokenizer has no chat template")]
    findings: list[Finding] = []
    for name, check in _CHECKS.items():
        try:
            findings += [Finding(name, *found) for found in check(tokenizer)]
        except (DataError, ConfigError) as error:
            findings.append(Finding(name, "error", str(error)))
    return findings


_Found = Iterator[tuple[Level, str]]


def _said(*contents: str) -> list[Message]:
    """User and assistant in turns, the user first."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], *, prompt: bool, **options: Any
) -> str:
    return render_chat(tokenizer, messages, _WHERE, generation_prompt=prompt, **options)


def _generation_prompt(tokenizer: PreTrainedTokenizerBase) -> _Found:
    without = _render(tokenizer, _said("hello"), prompt=False)
    prompt = _render(tokenizer, _said("hello"), prompt=True)
    if not prompt.startswith(without):
        yield "error", "the prompt for generation does not begin with the messages before it"
    elif prompt == without:
        yield (
            "warning",
            "add_generation_prompt adds nothing: the model has to begin its turn by itself",
        )
    else:
        yield "ok", f"generation begins after {prompt[len(without) :]!r}"
    after = _render(tokenizer, _said("hello", "good day"), prompt=False)
    if not after.startswith(prompt):
        yield (
            "error",
            "messages[1]: the assistant's turn is not rendered after the prompt that asks for it, "
            f"which ends in {prompt[-30:]!r}; supervised training would see other text than "
            "generation",
        )


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> _Found:
    prompt = _render(tokenizer, _said("hello"), prompt=True)
    after = _render(tokenizer, _said("hello", "good day"), prompt=False)
    if not after.startswith(prompt):
        return  # said by the check of the generation prompt
    _, found, end = after[len(prompt) :].rpartition("good day")
    ids = encode(tokenizer, end, _WHERE) if found else ()
    if not found:
        yield "error", "messages[1]: what the assistant says is not in the rendered text"
    elif tokenizer.eos_token_id in ids:
        yield "ok", f"a turn ends in {end!r}, which has the tokenizer's eos_token"
    else:
        yield (
            "warning",
            f"a turn ends in {end!r}, which has no {tokenizer.eos_token!r}; set the tokenizer's "
            "eos_token or generation.stop_token_ids, or the model will go on after its turn",
        )


def _one_bos(tokenizer: PreTrainedTokenizerBase) -> _Found:
    bos = tokenizer.bos_token_id
    text = _render(tokenizer, _said("hello"), prompt=True)
    ids = list(encode(tokenizer, text, _WHERE))
    if bos is None:
        yield "ok", "the tokenizer has no BOS token"
    elif ids[:2] == [bos, bos]:
        yield "error", "the template writes two BOS tokens"
    elif ids[:1] != [bos]:
        yield "ok", "a rendered chat begins without BOS"
    elif tokenizer(text)["input_ids"][:2] == [bos, bos]:
        yield "ok", "the template writes BOS; a tokenizer that adds its own would double it"
    else:
        yield "ok", "a rendered chat begins with one BOS"


def _system(tokenizer: PreTrainedTokenizerBase) -> _Found:
    messages: list[Message] = [{"role": "system", "content": "be brief"}, *_said("hello")]
    if "be brief" in _render(tokenizer, messages, prompt=True):
        yield "ok", "system messages are shown"
    else:
        yield "warning", "messages[0]: a system message is not shown"


def _extension(tokenizer: PreTrainedTokenizerBase) -> _Found:
    talk = ("one", "first", "two", "second", "three")
    yield from _follow(tokenizer, _said(*talk), "plain turns")
    thought = ("one", "<think>\nhm\n</think>\n\nfirst", "two", "<think>\nha\n</think>\n\nsecond")
    yield from _follow(tokenizer, _said(*thought, "three"), "turns with thoughts")


def _follow(tokenizer: PreTrainedTokenizerBase, messages: list[Message], what: str) -> _Found:
    rewritten = []
    for index in range(1, len(messages) - 1, 2):
        seen = _render(tokenizer, messages[:index], prompt=True)
        spoken, new = messages[index]["content"], messages[index + 1 : index + 2]
        after = continue_chat(tokenizer, messages[:index], seen, spoken, new, _WHERE)
        if after.rewrites:
            rewritten.append(f"messages[{index}]")
    if rewritten:
        yield (
            "warning",
            f"{what}: the next prompt does not extend {' and '.join(rewritten)} as generated; such "
            "trajectories are split into several rows",
        )
    else:
        yield "ok", f"{what}: each prompt extends the one before"


def _tool_round_trip(tokenizer: PreTrainedTokenizerBase) -> _Found:
    asked = _said("how is the weather?")
    seen = _render(tokenizer, asked, prompt=True, tools=_TOOLS)
    if "weather" not in seen.replace("how is the weather?", ""):
        yield "warning", "tools are not shown: a prompt has to describe them itself"
    answer: Message = {
        "role": "tool",
        "name": "weather",
        "tool_call_id": "abcdef123",
        "content": "rain tomorrow",
    }
    try:
        after = continue_chat(tokenizer, asked, seen, _CALL, [answer], _WHERE, tools=_TOOLS)
    except DataError as error:
        yield "error", f"messages[2]: a tool's answer is refused: {error}"
        return
    if "rain tomorrow" not in after.text:
        yield "error", "messages[2]: a tool's answer is not in the rendered text"
    elif after.rewrites:
        yield "warning", "messages[1]: a turn with a call is rewritten once its answer follows"
    else:
        yield "ok", "a call and its answer extend the prompt"


_CHECKS: dict[str, Callable[[PreTrainedTokenizerBase], _Found]] = {
    "generation prompt": _generation_prompt,
    "end of turn": _end_of_turn,
    "bos": _one_bos,
    "system message": _system,
    "prefix extension": _extension,
    "tool round trip": _tool_round_trip,
}
