"""The HTTP side of the gateway: harness routes, one for each dialect, and whatever else is mounted beside them.

Invariants:
- a harness is never refused because an engine is busy, moving or away: headers go out at once and pings follow until tokens come;
- an answer that breaks is broken visibly (a reset connection, behind the dialect's error event where that helps), never a clean early end;
- the execution is told by its secret: `/x/<secret>/...`, or `x-api-key` / `Authorization: Bearer` on the bare paths; a wrong one is
  answered with 401, one of an execution that is over with 410, both with `x-should-retry: false`, by which official SDKs stop;
- a client that goes away cancels its call (when nobody else follows it), not the handlers of the control API, which shield themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

import orjson
from aiohttp import web

from gyre_hpc.gateway.admission import Over
from gyre_hpc.gateway.calls import BadRequest, CallFailed, CallStream, Spent
from gyre_hpc.gateway.dialects import anthropic, chat, responses
from gyre_hpc.gateway.dialects.dialect import Answer, Dialect, parse_body, sayable
from gyre_hpc.gateway.recorder import Recorder

log = logging.getLogger(__name__)
MAX_BODY = 256 << 20
"""Bytes of a request's body, where the configuration says nothing else."""
PING_SECONDS = 5.0
SILENT_PINGS = 12
"""Pings for which a plain answer waits with its headers. A failure before them is a status that clients repeat by; Claude Code takes one
behind them as final, and drops a request without a first byte after 361 s."""
DIALECTS: tuple[Dialect, ...] = (anthropic.Messages(), chat.ChatCompletions(), responses.Responses())
"""The first one words the errors of all other paths."""
FINAL = (401, 410, 413)
"""Statuses after which the same request can never succeed."""
_BROKEN = web.RequestKey("broken", bool)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Executions(Protocol):
    """Who may call: the ledger."""

    def execution_of(self, secret: str) -> int | None:
        """The live execution with this secret. Raises Over."""
        ...


class HarnessApi:
    """Handlers for harnesses. `model`: the name that answers carry when the harness names none; `ping`: seconds between pings."""

    def __init__(self, recorder: Recorder, executions: Executions, model: str, ping: float = PING_SECONDS) -> None:
        self._recorder = recorder
        self._executions = executions
        self._model = model
        self._ping = ping
        self.answers: Counter[str] = Counter()
        """What harnesses got so far: HTTP status -> times; `reset`: answers that were broken off; `left`: the harness went away first."""

    def routes(self) -> list[web.RouteDef]:
        """All harness routes, with and without the secret in the path."""
        routes: list[web.RouteDef] = []
        for prefix in ("/x/{secret}", ""):
            routes += [web.post(prefix + dialect.path, self._handler(dialect)) for dialect in DIALECTS]
            routes += [
                web.post(f"{prefix}/v1/messages/count_tokens", self.count_tokens),
                web.get(f"{prefix}/v1/models", self.models),
                web.get(f"{prefix}/v1/models/{{model}}", self.model),
            ]
        return [*routes, web.route("*", "/{path:.*}", self.probe)]

    def _handler(self, dialect: Dialect) -> Handler:
        async def call(request: web.Request) -> web.StreamResponse:
            """One model call."""
            execution = self._execution(request)
            asked = dialect.ask(await request.read(), request.headers, self._model, self._recorder.memory(execution))
            stream = self._recorder.open(execution, asked.call)
            stream.follow()
            try:
                if asked.stream:
                    return await self._streamed(request, stream, asked.answer)
                return await self._plain(request, stream, asked.answer)
            finally:
                stream.leave()

        return call

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        """The length of a prompt, counted with the policy's own tokenizer."""
        execution = self._execution(request)
        body = parse_body(await request.read())
        conversation = sayable(lambda: anthropic.conversation_of(body))
        return _json({"input_tokens": await self._recorder.count(execution, conversation)})

    async def models(self, request: web.Request) -> web.StreamResponse:
        """The one model that there is."""
        self._execution(request)
        page = {"has_more": False, "first_id": self._model, "last_id": self._model}
        return _json({"object": "list", "data": [_model_entry(self._model)], **page})

    async def model(self, request: web.Request) -> web.StreamResponse:
        """Any name is the policy: harnesses name other models for their background calls."""
        self._execution(request)
        return _json(_model_entry(request.match_info["model"]))

    async def probe(self, request: web.Request) -> web.StreamResponse:
        """HEAD of anything: yes, we are here. Everything else is not."""
        if request.method != "HEAD":
            raise web.HTTPNotFound(text=f"no such path: {request.method} {request.path}")
        return web.Response()

    async def _streamed(self, request: web.Request, stream: CallStream, answer: Answer) -> web.StreamResponse:
        events = await stream.after(0, self._ping)  # refusals come before the headers
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        seen = 0
        try:
            while True:
                await response.write(answer.encode(events) if events else answer.ping())
                seen += len(events)
                if stream.done and stream.error is None and seen == len(stream.events):
                    break
                events = await stream.after(seen, self._ping)
        except (CallFailed, BadRequest) as error:
            if told := answer.broken(str(error), isinstance(error, BadRequest)):
                await response.write(told)
            _reset(request)
            return response
        await response.write_eof()
        return response

    async def _plain(self, request: web.Request, stream: CallStream, answer: Answer) -> web.StreamResponse:
        """One JSON body. When it takes very long, white space, which JSON allows in front, keeps the connection alive."""
        deadline = asyncio.get_running_loop().time() + SILENT_PINGS * self._ping
        response: web.StreamResponse | None = None
        seen = 0
        try:
            while not stream.done or stream.error is not None:
                left = deadline - asyncio.get_running_loop().time()
                seen += len(await stream.after(seen, max(0.0, left)))
                if asyncio.get_running_loop().time() >= deadline and not stream.done:
                    response = await _keep_alive(request, response)
                    deadline += self._ping
        except (CallFailed, BadRequest):
            if response is None:
                raise
            _reset(request)
            return response
        body = answer.whole(stream.events)
        if response is None:
            return web.Response(body=body, content_type="application/json")
        await response.write(body)
        await response.write_eof()
        return response

    def _execution(self, request: web.Request) -> int:
        secret = request.match_info.get("secret") or request.headers.get("x-api-key") or ""
        if not secret:
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            secret = token.strip() if scheme.lower() == "bearer" else ""
        try:
            execution = self._executions.execution_of(secret) if secret else None
        except Over as error:
            raise web.HTTPGone(text=str(error)) from None
        if execution is None:
            raise web.HTTPUnauthorized(text="no live execution has this key")
        return execution


def build_app(harness: HarnessApi, more: Iterable[web.AbstractRouteDef] = (), max_body: int = MAX_BODY) -> web.Application:
    """The application: harness routes, and `more` (the control API), under the same error handling; `max_body`: bytes of a request."""
    own = harness.routes()
    handlers = frozenset(route.handler for route in own)

    @web.middleware
    async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.match_info.handler not in handlers:
            return await _answered(request, handler)
        told = "left"
        try:
            response = await _answered(request, handler)
            told = "reset" if request.get(_BROKEN) else str(response.status)
        finally:
            harness.answers[told] += 1
        return response

    app = web.Application(client_max_size=max_body, middlewares=[counted])
    app.add_routes([*more, *own])
    return app


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure becomes an error body of the dialect."""
    cause: Exception
    try:
        return await handler(request)
    except BadRequest as error:
        status, text, cause = 400, str(error), error
    except RecursionError as error:
        status, text, cause = 400, "the body is nested too deeply", error
    except CallFailed as error:
        status, text, cause = 500, str(error), error
    except web.RequestPayloadError as error:
        status, text, cause = 400, f"the body is not what its headers say: {' '.join(str(error).split())}", error
    except web.HTTPRequestEntityTooLarge as error:
        status, text, cause = 413, f"the body is larger than gateway.max_body_mb allows ({error.text})", error
    except web.HTTPException as error:
        status, text, cause = error.status, error.text or error.reason, error
    except (ConnectionResetError, asyncio.CancelledError):
        raise
    except Exception as error:
        resource = request.match_info.route.resource  # not the path: it holds the execution's secret
        log.exception("%s %s", request.method, resource.canonical if resource else "?")
        status, text, cause = 500, f"{type(error).__name__}: {error}", error
    spoken = next((dialect for dialect in DIALECTS if request.path.endswith(dialect.path)), DIALECTS[0])
    status = spoken.spent if isinstance(cause, Spent) else status
    headers = {"x-should-retry": "false"} if status in FINAL or isinstance(cause, Spent) else None
    return web.Response(status=status, body=spoken.error_body(status, text, cause), content_type="application/json", headers=headers)


async def _keep_alive(request: web.Request, response: web.StreamResponse | None) -> web.StreamResponse:
    if response is None:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
    await response.write(b" ")
    return response


def _model_entry(name: str) -> dict[str, object]:
    """One form for the clients of all dialects: each skips the keys that it doesn't know."""
    return {**anthropic.model_entry(name), "object": "model", "created": 0, "owned_by": "gyre_hpc"}


def _reset(request: web.Request) -> None:
    """Break the connection so that no client takes what it has for a whole answer."""
    request[_BROKEN] = True
    if request.transport is not None:
        request.transport.abort()


def _json(value: object) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")
