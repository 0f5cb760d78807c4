"""JSON over HTTP for whoever holds a secret: what the control API and the trainers' API have in common.

Invariants: only the bearer of the secret is heard, compared in constant time; a request once begun goes on to its end even if the client
goes away; errors are JSON, {"error": one line}: 400 malformed, 401, 404 unknown, 409 contradicts what is known, 410 too far behind, 503 the
record can't be written, 504 not in time.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
from collections.abc import Awaitable, Callable
from typing import TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError

from gyre_hpc.gateway.calls import CallFailed
from gyre_hpc.gateway.changes import TooFarBehind
from gyre_hpc.gateway.ledger import Conflict
from trees.errors import StoreError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Body(BaseModel):
    """A request's body; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


B = TypeVar("B", bound=Body)


class Refused(Exception):
    """Answered with this status and line."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status = status


class Bearer:
    """Guards handlers with one secret."""

    def __init__(self, secret: str) -> None:
        self._secret = f"Bearer {secret}".encode()
        self._running: set[asyncio.Future[web.StreamResponse]] = set()

    def guarded(self, handler: Handler) -> Handler:
        """The handler for those who have the secret; what it raises becomes an answer."""

        async def answer(request: web.Request) -> web.StreamResponse:
            if not hmac.compare_digest(request.headers.get("Authorization", "").encode(errors="replace"), self._secret):
                return error_answer(401, "this needs the run's secret")
            try:
                return await handler(request)
            except Refused as error:
                return error_answer(error.status, str(error))
            except KeyError as error:
                return error_answer(404, str(error.args[0]))
            except (Conflict, ValueError) as error:
                return error_answer(409, str(error))
            except TooFarBehind as error:
                return error_answer(410, str(error))
            except (CallFailed, OSError, StoreError) as error:
                return error_answer(503, str(error))

        @functools.wraps(handler)
        async def guarded(request: web.Request) -> web.StreamResponse:
            task = asyncio.ensure_future(answer(request))
            self._running.add(task)  # a loop's own hold on a task is weak
            task.add_done_callback(self._running.discard)
            return await asyncio.shield(task)

        return guarded


async def read_body(request: web.Request, kind: type[B]) -> B:
    """The body of a request. Raises Refused."""
    raw = await request.read()
    try:
        return kind.model_validate_json(raw or b"{}")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Refused(400, f"{request.path}: {where}: {first['msg']}") from None


def number(request: web.Request, name: str) -> int:
    """A number in the path. Raises Refused."""
    text = request.match_info[name]
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise Refused(404, f"{name} {text!r} is not a number")
    return int(text)


def json_answer(value: object) -> web.Response:
    """200 with this value."""
    options = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
    return web.Response(body=orjson.dumps(value, option=options), content_type="application/json")


def error_answer(status: int, line: str) -> web.Response:
    """An error of ours."""
    return web.Response(status=status, body=orjson.dumps({"error": line}), content_type="application/json")
