"""The gateway: a loopback HTTP server, in a thread of its own, that gives each episode a key.

    agent (anywhere)                 gateway thread                   engine
    ----------------                 --------------                   ------
    POST .../chat/completions  --->  checks, renders, asks       ---> agenerate: waits while paused,
    waits for the answer       <---  remembers ids, answers      <--- goes on under new weights

What a request means is in ``session``; nothing here knows tokens.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from tandem.errors import EngineError, TandemError
from tandem.serve.answers import Answer, Head
from tandem.serve.http import DeadlineProtocol
from tandem.serve.protocol import ChatRequest, CompletionRequest
from tandem.serve.session import Session
from tandem.serve.streaming import HEARTBEAT_S, AnswerStream
from tandem.serve.strict import RequestError, parse, read_body

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from starlette.types import Receive, Scope, Send

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 32 << 10
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 20.0


class Gateway:
    """Serves sessions at ``http://127.0.0.1:PORT/e/ID/v1``; ``default`` also at ``/v1``.

    Started at the first ``open``; ``close`` ends it, and ``open`` starts another. Thread-safe.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._host = host
        self._asked_port = self._port = port
        self._sessions: dict[str, Session] = {}
        self._default: Session | None = None
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """``http://HOST:PORT``; starts the server."""
        with self._lock:
            self._start()
            return f"http://{self._host}:{self._port}"

    def open(self, session: Session) -> str:
        """Serve ``session``; returns its base URL."""
        address = self.address
        self._sessions[session.id] = session
        return f"{address}/e/{session.id}/v1"

    def serve_as_default(self, session: Session) -> str:
        """Serve ``session`` without a name in the URL; an empty key lets everyone in."""
        self._default = session
        return f"{self.address}/v1"

    def end(self, session: Session) -> None:
        """Refuse further requests of ``session`` and cancel those under way."""
        session.is_closed = True
        self._sessions.pop(session.id, None)
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(session.close)

    def close(self) -> None:
        """End the server, every request and every connection. Idempotent."""
        with self._lock:
            server, thread = self._server, self._thread
            self._server = self._thread = None
        if server is None or thread is None:
            return
        default, self._default = self._default, None
        for session in (*self._sessions.values(), *(() if default is None else (default,))):
            self.end(session)
        server.should_exit = server.force_exit = True
        thread.join(STOP_TIMEOUT_S)
        if thread.is_alive():
            raise EngineError(f"gateway: the server did not end within {STOP_TIMEOUT_S:g} s")

    def _start(self) -> None:
        if self._thread is not None:
            return
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self._host, self._asked_port))
        except OSError as error:
            listener.close()
            raise EngineError(
                f"gateway: cannot listen on {self._host}:{self._asked_port}: {error}"
            ) from None
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app(),
            http=DeadlineProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(self._server, listener, started), daemon=True
        )
        self._thread.name = "tandem-gateway"
        self._thread.start()
        if not started.wait(START_TIMEOUT_S):
            raise EngineError(f"gateway: the server did not start within {START_TIMEOUT_S:g} s")

    def _run(self, server: _Server, listener: socket.socket, started: threading.Event) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._loop.call_soon(started.set)
            await server.serve(sockets=[listener])
            for connection in list(server.server_state.connections):
                connection.transport.abort()

        try:
            asyncio.run(serve())
        finally:
            listener.close()

    # --- requests ---------------------------------------------------------------------------------

    def _app(self) -> FastAPI:
        app = FastAPI(
            docs_url=None,
            redoc_url=None,
            openapi_url=None,
            exception_handlers={HTTPException: _no_such_address},
        )
        for prefix in ("/e/{session_id}/v1", "/v1"):
            app.add_api_route(
                f"{prefix}/chat/completions", self._chat, methods=["POST"], response_model=None
            )
            app.add_api_route(
                f"{prefix}/completions", self._complete, methods=["POST"], response_model=None
            )
            app.add_api_route(
                f"{prefix}/models", self._models, methods=["GET"], response_model=None
            )
        app.add_api_route("/health", self._health, methods=["GET"], response_model=None)
        return app

    async def _health(self) -> Response:
        return JSONResponse({"status": "ok"})

    async def _models(self, request: Request) -> Response:
        try:
            session = self._session(request)
        except RequestError as error:
            return _refusal(error)
        model = {
            "id": session.model or "policy",
            "object": "model",
            "created": 0,
            "owned_by": "tandem",
        }
        version = session.engine.get_version()
        return JSONResponse({"object": "list", "data": [{**model, "version": version}]})

    async def _chat(self, request: Request) -> Response:
        return await self._serve(request, ChatRequest, Session.chat, is_chat=True)

    async def _complete(self, request: Request) -> Response:
        return await self._serve(request, CompletionRequest, Session.complete, is_chat=False)

    async def _serve(
        self,
        request: Request,
        model: type[Any],
        answer: Callable[..., Coroutine[Any, Any, Answer]],
        *,
        is_chat: bool,
    ) -> Response:
        try:
            session = self._session(request)
            asked = parse(model, await read_body(request))
            session.check_model(asked.model)
            wants_logprobs = asked.logprobs is not None and asked.logprobs is not False
            head = Head(asked.model, is_chat, wants_logprobs)
            if not asked.stream:
                work = _begun(answer(session, asked, head))
                return JSONResponse((await _or_gone(request, work)).whole())
            texts = session.texts(asked)
            stream = AnswerStream(head, session.tokenizer, texts, include_usage=asked.include_usage)
            work = _begun(answer(session, asked, head, stream.hear))
            return await _streamed(request, work, stream)
        except RequestError as error:
            return _refusal(error)

    def _session(self, request: Request) -> Session:
        session_id = request.path_params.get("session_id")
        session = self._default if session_id is None else self._sessions.get(session_id)
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        key = session.key if session is not None else secrets.token_hex(16)
        is_right = not key or secrets.compare_digest(given.encode(), key.encode())
        if session is None or session.is_closed or not is_right:
            raise RequestError(401, "no such episode, or a wrong key", code="invalid_api_key")
        return session


class _Server(uvicorn.Server):
    """Signals are the main thread's matter."""

    def capture_signals(self) -> Any:
        return nullcontext()


class _Streaming(StreamingResponse):
    """However sending ends, and even if it never begins, the work ends with it."""

    def __init__(self, stream: AnswerStream, work: asyncio.Future[Answer]) -> None:
        super().__init__(stream.events(work), media_type="text/event-stream")
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._work.cancel()


def _begun(answer: Coroutine[Any, Any, Answer]) -> asyncio.Future[Answer]:
    """An answer in the making. Its error may find nobody left to hear it."""
    work = asyncio.ensure_future(_answered(answer))
    work.add_done_callback(lambda done: done.cancelled() or done.exception())
    return work


async def _answered(answer: Coroutine[Any, Any, Answer]) -> Answer:
    """Errors of the engine as answers; anything else is a bug and is logged."""
    try:
        return await answer
    except TandemError as error:
        raise RequestError(503, f"{type(error).__name__}: {error}") from error
    except (RequestError, asyncio.CancelledError):
        raise
    except Exception as error:
        log.exception("gateway: a request failed")
        raise RequestError(500, f"{type(error).__name__}: {error}") from error


async def _streamed(
    request: Request, work: asyncio.Future[Answer], stream: AnswerStream
) -> Response:
    """A stream that begins with the first token; an error before it is an answer of its own."""
    try:
        await _until(request, work, stream.begun, timeout_s=HEARTBEAT_S)
        if work.done():
            work.result()
    except BaseException:
        work.cancel()
        raise
    return _Streaming(stream, work)


async def _or_gone(request: Request, work: asyncio.Future[Answer]) -> Answer:
    """The answer, unless the client goes away first: then the work is cancelled."""
    try:
        await _until(request, work)
        return work.result()
    finally:
        work.cancel()


async def _until(
    request: Request, *events: asyncio.Future[Any], timeout_s: float | None = None
) -> None:
    """Wait for the first of ``events``.

    Raises:
        RequestError: the client went away before.
    """
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        waited: set[asyncio.Future[Any]] = {gone, *events}
        await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if gone.done() and not any(event.done() for event in events):
            raise RequestError(499, "the client went away")
    finally:
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _no_such_address(request: Request, error: Exception) -> Response:
    """What is not found or not allowed, as OpenAI's clients read it."""
    assert isinstance(error, HTTPException)
    said = f"{request.method} {request.url.path}: {error.detail}"
    return _refusal(RequestError(error.status_code, said))


def _refusal(error: RequestError) -> Response:
    return JSONResponse(error.body(), status_code=error.status)
