"""Tools: schemas from functions, calls in every format, errors as text, the workflow."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from tandem.errors import ConfigError
from tandem.rollout.tool_calls import parse_tool_calls
from tandem.rollout.tool_use import tool_use
from tandem.rollout.tools import Tool, ToolRegistry, load_tools
from tandem.rollout.workflow import load_workflow
from tandem.types import GenerationConfig, LLMRequest
from tests.data.chat import with_template
from tests.rollout.doubles import GatedBackend, make_engine


def add(a: int, b: int = 2) -> int:
    """Add two numbers,
    exactly.

    Args:
        a: the first number
        b (int): the second one

    Returns:
        Their sum.
    """
    return a + b


def pick(kind: Literal["x", "y"], items: list[str], limit: float | None = None) -> dict[str, Any]:
    return {"kind": kind, "é": items, "limit": limit}


async def slow() -> str:
    await asyncio.Event().wait()
    return "never"


def fail(text: str) -> str:
    raise ValueError(text)


# --- schemas --------------------------------------------------------------------------------------


def test_a_schema_comes_from_hints_and_docstring() -> None:
    assert Tool.of(add).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers, exactly.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first number"},
                    "b": {"type": "integer", "description": "the second one", "default": 2},
                },
                "required": ["a"],
            },
        },
    }


def test_choices_lists_and_optional_values_have_schemas() -> None:
    properties = Tool.of(pick).schema["function"]["parameters"]["properties"]
    assert properties["kind"] == {"type": "string", "enum": ["x", "y"]}
    assert properties["items"] == {"type": "array", "items": {"type": "string"}}
    assert properties["limit"]["anyOf"] == [{"type": "number"}, {"type": "null"}]


def test_an_argument_called_title_keeps_its_name() -> None:
    def find(title: str) -> str:
        return title

    assert "title" in Tool.of(find).schema["function"]["parameters"]["properties"]


def test_functions_without_a_schema_are_refused() -> None:
    def untyped(a) -> None: ...  # type: ignore[no-untyped-def]

    def variadic(*values: int) -> None: ...

    def thread(a: threading.Thread) -> None: ...

    for function, message in ((untyped, "no type hint"), (variadic, "by name"), (thread, "schema")):
        with pytest.raises(ConfigError, match=message):
            Tool.of(function)
    with pytest.raises(ConfigError, match="two tools"):
        ToolRegistry([add, add])
    with pytest.raises(ConfigError, match="no tools"):
        ToolRegistry([])
    with pytest.raises(ConfigError, match="allowed: functions"):
        load_tools([3])


# --- formats --------------------------------------------------------------------------------------

ONE = {"name": "add", "arguments": {"a": 1}}
TWO = {"name": "pick", "arguments": {"kind": "x"}}
FORMATS = {
    "hermes": "hm <tool_call>\n" + json.dumps(ONE) + "\n</tool_call>\n<tool_call>"
    '{"name": "pick", "arguments": "{\\"kind\\": \\"x\\"}"}</tool_call>',
    "llama": 'hm <|python_tag|>{"name": "add", "parameters": {"a": 1}}; ' + json.dumps(TWO),
    "mistral": f"hm [TOOL_CALLS]{json.dumps([ONE, TWO])}",
    "mistral named": 'hm [TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]pick[ARGS]{"kind": "x"}',
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_named", [True, False])
def test_two_calls_in_every_format(name: str, is_named: bool) -> None:
    format = name.split()[0] if is_named else "auto"
    turn = parse_tool_calls(FORMATS[name], format)  # type: ignore[arg-type]
    assert turn.content == "hm"
    assert [(call.name, call.arguments, call.error) for call in turn.calls] == [
        ("add", {"a": 1}, None),
        ("pick", {"kind": "x"}, None),
    ]
    ids = [call.id for call in turn.calls]
    assert len(set(ids)) == 2
    assert all(len(i) == 9 and i.isalnum() for i in ids)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (json.dumps(ONE), 1),
        (json.dumps([ONE, TWO]), 2),
        (f"```json\n{json.dumps(ONE)}\n```", 1),
        ('{"name": "add", "parameters": {"a": 1}}', 1),
        ('{"answer": 3}', 0),
        ("[1, 2]", 0),
        ("The answer is {3}.", 0),
        ("{3}", 0),
        ("", 0),
    ],
)
def test_json_alone_is_a_call_only_when_it_looks_like_one(text: str, count: int) -> None:
    turn = parse_tool_calls(text)
    assert len(turn.calls) == count
    assert turn.content == ("" if count else text)


def test_a_bare_llama_object_is_a_call() -> None:
    text = '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {}}'
    assert len(parse_tool_calls(text, "llama").calls) == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"name": "add", "arguments": {"a": 1}', "not JSON"),
        ('{"name": "add", "arguments": [1]}', "are an object"),
        ('{"arguments": {}}', "a name"),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN"),
        ("", "empty"),
        ('{"name": "add"} and more', "follows"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_broken_call_is_an_error_that_can_be_told(body: str, message: str) -> None:
    (call,) = parse_tool_calls(f"<tool_call>{body}</tool_call>").calls
    assert call.error is not None
    assert message in call.error


def test_a_call_cut_off_by_the_length_limit_is_told_too() -> None:
    (call,) = parse_tool_calls('<tool_call>{"name": "ad').calls
    assert call.error is not None


# --- running --------------------------------------------------------------------------------------


def answers(text: str, *functions: Any, **settings: Any) -> list[str]:
    registry = ToolRegistry(functions or (add, pick, fail, slow), **settings)
    return asyncio.run(registry.run(parse_tool_calls(text).calls))


def test_results_and_every_kind_of_error_are_text_in_order() -> None:
    calls = [
        {"name": "add", "arguments": {"a": 1, "b": "5"}},
        {"name": "pick", "arguments": {"kind": "x", "items": ["ü"]}},
        {"name": "nothing", "arguments": {}},
        {"name": "add", "arguments": {"a": "one", "c": 3}},
        {"name": "fail", "arguments": {"text": "no luck"}},
        {"name": "slow", "arguments": {}},
    ]
    found = answers(json.dumps(calls), timeout_s=0.05)
    assert found[0] == "6"
    assert json.loads(found[1]) == {"kind": "x", "é": ["ü"], "limit": None}
    assert "ü" in found[1]
    assert found[2] == "error: there is no tool 'nothing'; tools: add, pick, fail, slow"
    assert found[3].startswith("error: add: a: Input should be a valid integer")
    assert "c: Extra inputs are not permitted" in found[3]
    assert found[4] == "error: ValueError: no luck"
    assert found[5] == "error: slow did not end within 0.05 s"


def test_long_results_are_cut_and_say_so() -> None:
    def flood() -> str:
        return "x" * 50

    (found,) = answers('{"name": "flood"}', flood, max_result_chars=10)
    assert found == "xxxxxxxxxx... (50 characters, cut)"


def test_a_result_that_is_no_json_is_an_error() -> None:
    def thing() -> object:
        return object()

    assert answers('{"name": "thing"}', thing)[0].startswith("error: TypeError")


# --- the workflow ---------------------------------------------------------------------------------

TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t['function']['name'] }} {% endfor %}"
    "{{ '\\n' }}{% endif %}"
    "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


def tokenizer_with_braces() -> Any:
    from tandem.models.tiny import character_tokenizer

    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


TOKENIZER = tokenizer_with_braces()


@pytest.fixture
def run() -> Iterator[Any]:
    engines = []

    def start(turns: list[str], **settings: Any) -> tuple[GatedBackend, Any]:
        def script(req: LLMRequest) -> list[int]:
            text = turns[int(req.rid.rsplit(".", 1)[1])]
            found: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
            return found

        backend = GatedBackend(script)
        engines.append(make_engine(backend))
        workflow = tool_use(
            settings.pop("reward", lambda *_, **__: 1.0),
            GenerationConfig(max_new_tokens=200),
            TOKENIZER,
            tools=[add],
            **settings,
        )
        prompt = [{"role": "user", "content": "q"}]
        return backend, engines[-1].rollout_batch([{"prompt": prompt}], workflow)

    yield start
    for engine in engines:
        engine.destroy()


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def test_tools_are_shown_called_and_answered_until_a_turn_has_no_call(run: Any) -> None:
    seen = []

    def reward(prompt: Any, completion: str, p: Any, c: Any, **data: Any) -> float:
        seen.append((completion, data["stop_reasons"]))
        return 1.0

    backend, (row,) = run([f"{CALL}{CALL}<eos>", "3<eos>"], reward=reward)
    first, second = (TOKENIZER.decode(req.input_ids) for req in backend.requests)
    assert first == "add \n[u]q<eos>[a]"
    assert second == f"{first}{CALL}{CALL}<eos>[t]3<eos>[t]3<eos>[a]"
    assert TOKENIZER.decode(row["input_ids"][row["loss_mask"]]) == f"{CALL}{CALL}<eos>3<eos>"
    assert seen == [("3", ["tool_calls", "stop"])]
    assert not bool(row["truncated"])


def test_a_broken_call_is_answered_and_the_model_may_try_again(run: Any) -> None:
    backend, (row,) = run(["<tool_call>{</tool_call><eos>", "ok<eos>"])
    answer = TOKENIZER.decode(backend.requests[1].input_ids).split("[t]")[1]
    assert answer.startswith("error: the call is not JSON: ")
    assert float(row["rewards"]) == 1.0


def test_more_calls_than_allowed_are_errors(run: Any) -> None:
    backend, _ = run([f"{CALL}{CALL}<eos>", "ok<eos>"], max_calls_per_turn=1)
    second = TOKENIZER.decode(backend.requests[1].input_ids)
    assert "[t]3<eos>[t]error: at most 1 calls in one turn<eos>" in second


def test_the_last_turn_allowed_is_truncated_when_it_still_calls(run: Any) -> None:
    _, (row,) = run([f"{CALL}<eos>"] * 2, max_turns=2)
    assert bool(row["truncated"])


def test_tool_use_is_found_by_its_name_with_tools_of_a_file(tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text(
        "def double(x: int) -> int:\n    return 2 * x\nALL = [double]"
    )
    made: Any = load_workflow(
        "tool_use",
        reward=lambda *_: 1.0,
        generation=GenerationConfig(),
        tokenizer=with_template(TEMPLATE),
        tools=f"{tmp_path}/mine.py:ALL",
    )
    assert made.tools[0]["function"]["name"] == "double"
    with pytest.raises(ConfigError, match="tool_format"):
        tool_use(lambda *_: 1.0, GenerationConfig(), None, tools=[add], tool_format="x")  # type: ignore[arg-type]


def test_a_workflow_that_does_not_exist_names_those_that_do() -> None:
    with pytest.raises(ConfigError, match="agent, multi_turn, single_turn, tool_use"):
        load_workflow("multiturn")
