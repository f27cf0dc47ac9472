"""The gateway, spoken to by the real client and by hand: answers, refusals, and what is kept."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from tandem.inference.scripted import ScriptedBackend, ScriptedOptions
from tandem.models.tiny import character_tokenizer
from tandem.serve import Gateway, Session, strict
from tandem.serve import http as serve_http
from tandem.types import GenerationConfig, LLMRequest
from tests.rollout.doubles import GatedBackend, make_engine

ALPHABET = "".join(map(chr, range(32, 127))) + "\n"
TEMPLATE = (
    "{% if tools %}T{{ tools | length }} {% endif %}"
    "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


def tokenizer_with(template: str | None = TEMPLATE) -> Any:
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.chat_template = template
    return tokenizer


TOKENIZER = tokenizer_with()
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return found


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@dataclass
class Bed:
    session: Session
    backend: GatedBackend
    client: openai.OpenAI
    base_url: str

    def chat(self, *messages: Any, **options: Any) -> Any:
        return self.client.chat.completions.create(model="m", messages=list(messages), **options)

    def prompts(self) -> list[str]:
        return [TOKENIZER.decode(req.input_ids) for req in self.backend.requests]

    def post(self, body: Any, path: str = "chat/completions", **options: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.session.key}"} | options.pop("headers", {})
        return httpx.post(f"{self.base_url}/{path}", content=content, headers=headers, **options)


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    made = Gateway()
    yield made
    made.close()


@pytest.fixture
def bed(gateway: Gateway) -> Iterator[Callable[..., Bed]]:
    made: list[tuple[Any, Bed]] = []

    def make(*turns: str, template: str | None = TEMPLATE, **settings: Any) -> Bed:
        def script(req: LLMRequest) -> list[int]:
            number, index = map(int, req.rid.split(".")[-2:])
            text = turns[min(number, len(turns) - 1)]
            return ids(text.split("|")[index % len(text.split("|"))])

        backend = GatedBackend(script)
        engine = make_engine(backend)
        session = Session(
            engine,
            tokenizer_with(template),
            settings.pop("generation", GenerationConfig(max_new_tokens=200)),
            "0.0.0",
            lambda number, index: 1000 * number + index,
            **settings,
        )
        base_url = gateway.open(session)
        client = openai.OpenAI(base_url=base_url, api_key=session.key or "none", max_retries=0)
        made.append((engine, Bed(session, backend, client, base_url)))
        return made[-1][1]

    yield make
    for engine, item in made:
        item.client.close()
        gateway.end(item.session)
        engine.destroy()


def row_texts(session: Session) -> list[tuple[str, str]]:
    """Each row's text, and of it what is trained."""
    return [
        (
            TOKENIZER.decode(row.ids),
            TOKENIZER.decode([i for i, on in zip(row.ids, row.loss_mask, strict=True) if on]),
        )
        for row in session.tree.rows()
    ]


# --- answers --------------------------------------------------------------------------------------


def test_two_turns_make_one_row_of_the_very_ids_that_were_sampled(bed: Any) -> None:
    b = bed("hi<eos>", "bye<eos>")
    first = b.chat(user("q"))
    assert first.choices[0].message.content == "hi"
    assert first.choices[0].finish_reason == "stop"
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (7, 3)
    b.chat(user("q"), first.choices[0].message, user("r"))
    assert b.prompts() == ["[u]q[a]", "[u]q[a]hi<eos>[u]r[a]"]
    assert row_texts(b.session) == [("[u]q[a]hi<eos>[u]r[a]bye<eos>", "hi<eos>bye<eos>")]
    (row,) = b.session.tree.rows()
    assert row.turn_ids == [0] * 10 + [1] * 11
    assert row.logprobs[7] == -0.5
    assert row.versions[6:8] == [-1, 0]


def test_a_client_may_send_its_copy_of_a_message_back(bed: Any) -> None:
    b = bed("hi<eos>")
    message = b.chat(user("q")).choices[0].message
    for copied in (message.model_dump(), {"role": "assistant", "content": "hi"}):
        b.chat(user("q"), copied, user("r"))
    assert b.prompts()[1:] == ["[u]q[a]hi<eos>[u]r[a]"] * 2
    assert [trained for _, trained in row_texts(b.session)] == ["hi<eos>hi<eos>", "hi<eos>"]


def test_a_changed_history_begins_a_row_of_its_own(bed: Any) -> None:
    b = bed("hi<eos>", "bye<eos>")
    b.chat(user("q"))
    b.chat(user("q"), {"role": "assistant", "content": "HI"}, user("r"))
    assert row_texts(b.session) == [
        ("[u]q[a]hi<eos>", "hi<eos>"),
        ("[u]q[a]HI<eos>[u]r[a]bye<eos>", "bye<eos>"),
    ]


def test_a_template_that_rewrites_history_begins_a_row_of_its_own(bed: Any) -> None:
    rewriting = TEMPLATE.replace(
        "{{ m['content'] }}",
        "{{ m['content'] if m['role'] == 'user' else m['content'].split('#')[-1] }}",
    )
    b = bed("why#yes<eos>", "b<eos>", template=rewriting)
    first = b.chat(user("q")).choices[0].message
    b.chat(user("q"), first, user("r"))
    assert row_texts(b.session) == [
        ("[u]q[a]why#yes<eos>", "why#yes<eos>"),
        ("[u]q[a]yes<eos>[u]r[a]b<eos>", "b<eos>"),
    ]
    assert b.session.tree.num_splits == 1


def test_several_samples_are_branches_and_each_token_is_trained_once(bed: Any) -> None:
    b = bed("a<eos>", "x<eos>|y<eos>")
    first = b.chat(user("q")).choices[0].message
    second = b.chat(user("q"), first, user("r"), n=2)
    assert [choice.message.content for choice in second.choices] == ["x", "y"]
    assert [trained for _, trained in row_texts(b.session)] == ["a<eos>x<eos>", "y<eos>"]
    seeds = [req.gconfig.seed for req in b.backend.requests]
    assert seeds == [0, 1000, 1001]


def test_a_seed_of_the_client_gives_each_sample_its_own(bed: Any) -> None:
    b = bed("x<eos>|y<eos>|z<eos>|w<eos>")
    for _ in range(2):
        b.chat(user("q"), n=4, seed=7)
    seeds = [req.gconfig.seed for req in b.backend.requests]
    assert len(set(seeds[:4])) == 4
    assert sorted(seeds[:4]) == sorted(seeds[4:])


def test_tools_calls_and_their_answers_extend_the_row(bed: Any) -> None:
    b = bed(f"hm {CALL}<eos>", "2<eos>")
    first = b.chat(user("q"), tools=[TOOL])
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "hm"
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    answer = {"role": "tool", "tool_call_id": call.id, "content": "2"}
    b.chat(user("q"), choice.message, answer, tools=[TOOL])
    assert b.prompts()[1] == f"T1 [u]q[a]hm {CALL}<eos>[t]2[a]"
    ((_, trained),) = row_texts(b.session)
    assert trained == f"hm {CALL}<eos>2<eos>"


def test_a_broken_call_is_text_and_no_tools_are_no_calls(bed: Any) -> None:
    b = bed("<tool_call>{</tool_call><eos>", f"{CALL}<eos>", f"{CALL}<eos>")
    broken = b.chat(user("q"), tools=[TOOL]).choices[0]
    assert broken.message.content == "<tool_call>{</tool_call>"
    assert broken.message.tool_calls is None
    assert b.chat(user("q")).choices[0].message.content == CALL
    assert b.chat(user("q"), tools=[TOOL], tool_choice="none").choices[0].finish_reason == "stop"


def test_logprobs_ids_and_versions_are_told_when_asked_for(bed: Any) -> None:
    b = bed("hi<eos>")
    choice = b.chat(user("q"), logprobs=True, extra_body={"return_token_ids": True}).choices[0]
    assert [(t.token, t.logprob) for t in choice.logprobs.content] == [
        ("h", -0.5),
        ("i", -0.5),
        ("<eos>", -0.5),
    ]
    assert choice.token_ids == ids("hi<eos>")
    assert choice.prompt_token_ids == ids("[u]q[a]")
    assert choice.token_versions == [0, 0, 0]
    assert b.chat(user("q")).choices[0].logprobs is None


def test_a_stream_is_the_same_text_calls_and_reason(bed: Any) -> None:
    b = bed("hi there<eos>", f"hm {CALL}<eos>", "bye<eos>")
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(b.chat(user("q"), **options))
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == "hi there"
    assert len(pieces) > 5
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == 9
    chunks = list(b.chat(user("q"), stream=True, tools=[TOOL]))
    pieces = [c.choices[0].delta.content or "" for c in chunks]
    assert "".join(pieces) == "hm"
    calls = [c.choices[0].delta.tool_calls for c in chunks if c.choices[0].delta.tool_calls]
    assert calls[0][0].function.name == "add"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    # What was streamed can be gone on from, like any answer.
    said = {"role": "assistant", "content": "hm", "tool_calls": [calls[0][0].model_dump()]}
    said["tool_calls"][0].pop("index")
    answer = {"role": "tool", "tool_call_id": calls[0][0].id, "content": "2"}
    list(b.chat(user("q"), said, answer, tools=[TOOL], stream=True))
    assert row_texts(b.session)[-1][1] == f"hm {CALL}<eos>bye<eos>"


def test_pieces_are_sent_while_tokens_come_and_an_update_does_not_break_them(bed: Any) -> None:
    b = bed("abcdef<eos>")
    allowed = 2
    b.backend.allow(lambda req, made: made < allowed)
    stream = b.chat(user("q"), stream=True, logprobs=True)
    events = iter(stream)
    assert next(events).choices[0].delta.role == "assistant"
    assert [next(events).choices[0].delta.content for _ in range(2)] == ["a", "b"]
    b.backend.wait_held(1)
    b.backend.pause_generation()
    b.backend.commit(1)
    b.backend.resume_generation()
    allowed = 4
    b.backend.allow(lambda req, made: made < allowed)
    assert [next(events).choices[0].delta.content for _ in range(2)] == ["c", "d"]
    b.backend.allow(lambda req, made: True)
    rest = list(events)
    assert [c.choices[0].delta.content for c in rest] == ["e", "f", None]
    assert [t.token for t in rest[-1].choices[0].logprobs.content] == ["<eos>"]
    (row,) = b.session.tree.rows()
    assert row.versions[-7:] == [0, 0, 1, 1, 1, 1, 1]
    assert row.ids[-7:] == ids("abcdef<eos>")


def test_every_token_of_a_stream_has_one_logprob(bed: Any) -> None:
    b = bed("ab<eos>|c<eos>")
    chunks = list(b.chat(user("q"), stream=True, logprobs=True, n=2))
    for index, expected in enumerate((["a", "b", "<eos>"], ["c", "<eos>"])):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        told = [t for c in mine if c.logprobs for t in c.logprobs.content]
        assert [t.token for t in told] == expected
        assert [t.logprob for t in told] == [-0.5] * len(expected)
        assert "".join(c.delta.content or "" for c in mine) == "".join(expected[:-1])
        assert [c.finish_reason for c in mine][-1] == "stop"


def test_a_text_completion_streams_too(bed: Any) -> None:
    b = bed("bc<eos>", template=None)
    chunks = list(b.client.completions.create(model="m", prompt="a", stream=True, logprobs=1))
    assert [c.choices[0].text for c in chunks] == ["b", "c", ""]
    assert [c.choices[0].logprobs.tokens for c in chunks] == [["b"], ["c"], ["<eos>"]]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_an_error_before_the_first_token_of_a_stream_has_its_status(bed: Any) -> None:
    b = bed("hi<eos>")
    with pytest.raises(openai.BadRequestError, match="no token for"):
        b.chat(user("\u00fc"), stream=True)
    b.backend.close()
    with pytest.raises(openai.InternalServerError, match="EngineError"):
        b.chat(user("q"), stream=True)


def test_an_error_in_a_stream_ends_it_with_its_reason(bed: Any) -> None:
    b = bed("hi<eos>")
    b.backend.allow(lambda req, made: made < 1)
    events = iter(b.chat(user("q"), stream=True))
    next(events)
    b.backend.wait_held(1)
    b.backend.close()
    with pytest.raises(openai.APIError, match="EngineError"):
        list(events)
    assert b.session.tree.rows() == []


def test_a_client_that_leaves_a_stream_ends_its_request(bed: Any) -> None:
    b = bed("hi<eos>")
    b.backend.allow(lambda req, made: made < 1)
    stream = b.chat(user("q"), stream=True)
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 10
    while not b.backend.aborted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert b.backend.aborted == ["0.0.0.0.0"]
    assert b.session.tree.rows() == []


def test_text_completions_go_on_from_the_ids_they_begin_with(bed: Any) -> None:
    b = bed("b", "d<eos>", template=None, generation=GenerationConfig(max_new_tokens=1))
    first = b.client.completions.create(model="m", prompt="a", logprobs=1)
    assert first.choices[0].text == "b"
    assert first.choices[0].finish_reason == "length"
    assert first.choices[0].logprobs.token_logprobs == [-0.5]
    b.client.completions.create(model="m", prompt="abc")
    b.client.completions.create(model="m", prompt=ids("zz"))
    # Text that begins as an answer to ids did is no continuation of it.
    b.client.completions.create(model="m", prompt="d!")
    assert row_texts(b.session) == [("abcd", "bd"), ("zzd", "d"), ("d!d", "d")]


def test_requests_wait_while_generation_is_paused_and_carry_both_versions(bed: Any) -> None:
    import threading

    b = bed("abcd<eos>")
    b.backend.allow(lambda req, made: made < 2)
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(b.chat(user("q"))))
    asking.start()
    b.backend.wait_held(1)
    b.backend.pause_generation()
    b.backend.commit(1)
    b.backend.resume_generation()
    b.backend.allow(lambda req, made: True)
    asking.join(20)
    assert found[0].choices[0].message.content == "abcd"
    (row,) = b.session.tree.rows()
    assert row.versions[-5:] == [0, 0, 1, 1, 1]


# --- refusals -------------------------------------------------------------------------------------

GOOD = {"model": "m", "messages": [{"role": "user", "content": "q"}]}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperatur": 1}, "temperatur"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 10**30}, "n"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": -5}, "max_completion_tokens"),
        ({"temperature": 0.2}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "q"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "q", "x": 1}]}, "messages.0.x"),
        ({"messages": [{"role": "assistant", "content": "q"}]}, "messages"),
        ({"model": 3}, "model"),
        ({"stop": [""]}, "stop"),
    ],
)
def test_a_field_that_is_not_right_is_named(bed: Any, change: Any, param: str) -> None:
    b = bed("hi<eos>")
    response = b.post(GOOD | change)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)
    assert not b.backend.requests


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"model": "m", "model": "m", "messages": [{"role": "user", "content": "q"}]}',
        b'{"model": "m", "temperature": NaN, "messages": [{"role": "user", "content": "q"}]}',
        b'{"model": "m", "temperature": 1e999, "messages": [{"role": "user", "content": "q"}]}',
        b"[" * 100_000,
        b'{"n": ' + b"9" * 10_000 + b"}",
    ],
)
def test_a_body_that_is_no_plain_json_is_refused(bed: Any, body: bytes) -> None:
    assert bed("hi<eos>").post(body).status_code == 400


def test_sampling_of_the_client_is_replaced_only_when_configured(bed: Any) -> None:
    b = bed("hi<eos>", sampling="replaced")
    b.chat(user("q"), temperature=0.2, top_p=0.5)
    assert b.backend.requests[0].gconfig.temperature == 1.0
    assert b.backend.requests[0].gconfig.top_p == 1.0


def test_a_wrong_key_or_episode_is_told_nothing(bed: Any, gateway: Gateway) -> None:
    b = bed("hi<eos>")
    for headers in ({"Authorization": "Bearer x"}, {"Authorization": "é".encode()}, {}):
        assert b.post(GOOD, headers=headers or {"Authorization": ""}).status_code == 401
    url = f"{gateway.address}/e/none/v1/chat/completions"
    assert httpx.post(url, json=GOOD).status_code == 401
    assert httpx.post(f"{gateway.address}/v1/chat/completions", json=GOOD).status_code == 401
    gateway.end(b.session)
    assert b.post(GOOD).status_code == 401


def test_other_addresses_do_not_exist(bed: Any, gateway: Gateway) -> None:
    for path in ("/docs", "/openapi.json", "/", "/e/x/v1/files"):
        response = httpx.get(gateway.address + path)
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "invalid_request_error"
    wrong_method = httpx.get(f"{gateway.address}/v1/chat/completions")
    assert wrong_method.status_code == 405
    assert "Method Not Allowed" in wrong_method.json()["error"]["message"]
    assert httpx.get(gateway.address + "/health").json() == {"status": "ok"}


def test_a_body_that_is_too_large_is_refused_early(
    bed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strict, "MAX_BODY_BYTES", 1000)
    b = bed("hi<eos>")
    assert b.post(GOOD | {"user": "x" * 2000}).status_code == 413

    def chunks() -> Iterator[bytes]:
        yield b"x" * 600
        yield b"x" * 600

    headers = {"Authorization": f"Bearer {b.session.key}"}
    response = httpx.post(f"{b.base_url}/completions", content=chunks(), headers=headers)
    assert response.status_code == 413


def connect(gateway: Gateway) -> socket.socket:
    host, port = gateway.address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 10)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/models HTTP/1.1\r\nHost: x\r\n"])
def test_half_a_header_does_not_hold_a_connection(
    bed: Any, gateway: Gateway, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(serve_http, "HEADER_TIMEOUT_S", 0.1)
    bed("hi<eos>")
    with connect(gateway) as client:
        client.sendall(sent)
        started = time.monotonic()
        assert client.recv(100) == b""
        assert time.monotonic() - started < 5


def test_half_a_body_does_not_hold_a_connection(
    bed: Any, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strict, "BODY_TIMEOUT_S", 0.1)
    b = bed("hi<eos>")
    path = b.base_url.removeprefix(gateway.address)
    with connect(gateway) as client:
        client.sendall(
            f"POST {path}/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
            f"Authorization: Bearer {b.session.key}\r\n\r\n{{".encode()
        )
        assert b" 408 " in client.recv(1000)


def test_headers_that_are_too_large_are_refused(bed: Any, gateway: Gateway) -> None:
    bed("hi<eos>")
    with connect(gateway) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100_000)
        assert b" 400 " in client.recv(1000)


# --- ends -----------------------------------------------------------------------------------------


def test_a_client_that_goes_away_ends_its_request_and_leaves_no_row(bed: Any) -> None:
    b = bed("hi<eos>")
    b.backend.allow(lambda req, made: False)
    with pytest.raises(openai.APITimeoutError):
        b.chat(user("q"), timeout=0.2)
    deadline = time.monotonic() + 10
    while not b.backend.aborted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert b.backend.aborted == ["0.0.0.0.0"]
    assert b.session.tree.rows() == []


def test_an_episode_that_ends_cancels_its_requests(bed: Any, gateway: Gateway) -> None:
    import threading

    b = bed("hi<eos>")
    b.backend.allow(lambda req, made: False)
    found: list[Any] = []

    def ask() -> None:
        try:
            b.chat(user("q"))
        except openai.APIStatusError as error:
            found.append(error.status_code)

    asking = threading.Thread(target=ask)
    asking.start()
    b.backend.wait_held(1)
    gateway.end(b.session)
    asking.join(20)
    assert found == [410]


def test_an_engine_that_fails_is_a_503_with_its_reason(bed: Any) -> None:
    b = bed("hi<eos>")
    b.backend.close()
    response = b.post(GOOD)
    assert response.status_code == 503
    assert "EngineError" in response.json()["error"]["message"]


def test_a_prompt_that_has_no_tokens_is_the_clients_mistake(bed: Any) -> None:
    response = bed("hi<eos>").post({"model": "m", "messages": [user("ü")]})
    assert response.status_code == 400
    assert "no token for" in response.json()["error"]["message"]


def test_a_prompt_beyond_the_context_is_the_clients_mistake(gateway: Gateway) -> None:
    backend = ScriptedBackend(
        lambda prompt, seed: ids("hi<eos>"), options=ScriptedOptions(max_context=10, eos_id=2)
    )
    engine = make_engine(backend)  # type: ignore[arg-type]
    session = Session(engine, TOKENIZER, GenerationConfig(), "0", lambda number, index: None)
    client = openai.OpenAI(base_url=gateway.open(session), api_key=session.key, max_retries=0)
    ask = client.chat.completions.create
    for options in ({}, {"stream": True}):
        with pytest.raises(openai.BadRequestError, match="exceed context"):
            ask(model="m", messages=[user("long" * 9)], **options)  # type: ignore[call-overload]
    assert ask(model="m", messages=[user("q")]).choices[0].message.content == "hi"  # type: ignore[list-item]
    client.close()
    gateway.end(session)
    engine.destroy()


def test_another_model_is_not_found_where_the_name_matters(bed: Any) -> None:
    b = bed("hi<eos>", model="policy")
    with pytest.raises(openai.NotFoundError, match="allowed: policy") as caught:
        b.chat(user("q"))
    assert caught.value.code == "model_not_found"
    assert b.post(GOOD | {"model": "policy"}).status_code == 200


def test_plain_serving_needs_no_key_and_remembers_nothing(bed: Any, gateway: Gateway) -> None:
    b = bed("hi<eos>", keeps=False, key="", sampling="free")
    url = gateway.serve_as_default(b.session)
    client = openai.OpenAI(base_url=url, api_key="any", max_retries=0)
    completion = client.chat.completions.create(model="m", messages=[user("q")])  # type: ignore[list-item]
    assert completion.choices[0].message.content == "hi"
    client.chat.completions.create(model="m", messages=[user("q")], temperature=0.2)  # type: ignore[list-item]
    assert [req.gconfig.temperature for req in b.backend.requests] == [1.0, 0.2]
    assert b.session.tree.rows() == []
    assert [model.id for model in client.models.list()] == ["policy"]
    client.close()


def test_a_gateway_that_is_closed_leaves_no_connection_request_or_thread(bed: Any) -> None:
    import threading

    b = bed("hi<eos>")
    b.backend.allow(lambda req, made: req.rid.split(".")[-2] == "0")
    gateway = Gateway()
    url = gateway.open(b.session)
    client = openai.OpenAI(base_url=url, api_key=b.session.key, max_retries=0)
    ask = client.chat.completions.create
    ask(model="m", messages=[user("q")])  # type: ignore[list-item]
    failed: list[Exception] = []

    def asking() -> None:
        try:
            ask(model="m", messages=[user("q")])  # type: ignore[list-item]
        except openai.APIError as error:
            failed.append(error)

    thread = threading.Thread(target=asking)
    address = gateway.address.removeprefix("http://").split(":")
    with connect(gateway) as idle:
        thread.start()
        b.backend.wait_held(1)
        gateway.close()
        assert idle.recv(1) == b""
    thread.join(20)
    assert len(failed) == 1
    assert b.backend.aborted == ["0.0.0.1.0"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address[0], int(address[1])), 10)
    gateway.close()
    # The next session starts another server.
    other = gateway.open(b.session)
    assert httpx.get(other.split("/e/")[0] + "/health").status_code == 200
    gateway.close()
    client.close()
