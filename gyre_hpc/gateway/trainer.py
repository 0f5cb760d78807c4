"""The API for whoever trains: executions to record, their ends, the weight version, pauses (docs/gateway.md).

Invariants: only the bearer of the gateway's secret is heard (bearer.py, errors too); what is answered is durable; every call may be
repeated: a group that is given by its number is made once. Nothing of a call's content passes here but by `tree`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from pydantic import Field

from gyre_hpc.errors import ConfigError
from gyre_hpc.executions.kinds import KINDS, Told
from gyre_hpc.gateway.bearer import Bearer, Body, Handler, Refused, json_answer, number, read_body
from gyre_hpc.gateway.declared import Declared
from gyre_hpc.gateway.main import MODEL_NAME, Parts
from trees.export import as_dict
from trees.records import Group
from trees.store import StoreReader

PREFIX = "/api"


class _NewGroup(Body):
    task: str = Field(min_length=1)
    size: int = Field(default=1, ge=1, le=10_000)
    group: int | None = Field(default=None, ge=0)
    harness: str = "command"
    instruction: str = ""
    max_tokens: int | None = Field(default=None, ge=1)
    stable: bool = True


class _End(Body):
    score: float = Field(default=0.0, ge=0.0, le=1.0)
    valid: bool = True
    reason: str = Field(default="finished", min_length=1)
    detail: str = ""


class _Version(Body):
    version: int = Field(ge=0, lt=1 << 31)


class _Pause(Body):
    deadline: float = Field(default=60.0, gt=0.0)


class _Resume(Body):
    version: int | None = Field(default=None, ge=0, lt=1 << 31)


class TrainerApi:
    """`url()`: http://host:port of the gateway; `servers`: how many are upstream; `window`: tokens."""

    def __init__(self, parts: Parts, declared: Declared, url: Callable[[], str], servers: int, window: int, trees: Path) -> None:
        self._parts, self._declared, self._url = parts, declared, url
        self._servers, self._window, self._trees = servers, window, trees
        self._bearer = Bearer(declared.secret("api"))
        self._paused = False
        self._turn = asyncio.Lock()
        """Pauses and resumptions are carried out one after the other."""

    def routes(self) -> list[web.RouteDef]:
        """All routes; /health alone needs no secret."""
        table: list[tuple[Callable[..., web.RouteDef], str, Handler]] = [
            (web.post, "/groups", self.begin),
            (web.get, "/executions", self.listing),
            (web.get, "/executions/{id}", self.show),
            (web.get, "/executions/{id}/tree", self.tree),
            (web.post, "/executions/{id}/end", self.end),
            (web.post, "/version", self.version),
            (web.post, "/pause", self.pause),
            (web.post, "/resume", self.resume),
            (web.get, "/status", self.status),
        ]
        return [web.get("/health", self.health), *(method(PREFIX + path, self._bearer.guarded(h)) for method, path, h in table)]

    def stop(self) -> None:
        """Nothing here waits for anything."""

    async def begin(self, request: web.Request) -> web.Response:
        """A group of executions, with all that a harness needs to be recorded."""
        body = await read_body(request, _NewGroup)
        if body.harness not in KINDS:
            raise Refused(400, f"harness {body.harness!r} is not one of {', '.join(KINDS)}")
        return json_answer(await self.make_group(body.task, body.size, body.group, lambda item: self._execution(item, body)))

    async def make_group(
        self, task: str, size: int, group: int | None, describe: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> dict[str, Any]:
        """Make a group, or find the one that was made under this number. Raises Conflict: it was made of something else."""
        ledger = self._parts.ledger
        if group is None:
            group = ledger.next_group
        known = ledger.group(group)
        version = known.version if known else self._declared.version
        ledger.dispatch([Group(group, task, size, version, 0)])
        items = ledger.begin(group, "api")
        await self._parts.durable()
        return {"group": group, "version": version, "executions": [describe(item) for item in items]}

    def _execution(self, item: dict[str, Any], body: _NewGroup) -> dict[str, Any]:
        url = f"{self._url()}/x/{item['secret']}"
        told = Told(url, item["secret"], MODEL_NAME, self._window, body.max_tokens or self._window // 4, body.instruction, body.stable)
        launch = KINDS[body.harness].launch(told)
        return {
            "execution": item["execution"],
            "index": item["index"],
            "secret": item["secret"],
            "anthropic_base_url": url,
            "openai_base_url": f"{url}/v1",
            "model": MODEL_NAME,
            "launch": {"harness": body.harness, "argv": list(launch.argv), "env": dict(launch.env), "files": dict(launch.files)},
        }

    async def listing(self, request: web.Request) -> web.Response:
        wanted = request.query.get("state", "live")
        if wanted not in ("live", "ended", "all"):
            raise Refused(400, f"state={wanted}: live, ended or all")
        return json_answer([self._row(row) for row in self._parts.ledger.rows() if wanted in ("all", row["state"])])

    async def show(self, request: web.Request) -> web.Response:
        execution = number(request, "id")
        for row in self._parts.ledger.rows():
            if row["execution"] == execution:
                return json_answer(self._row(row))
        raise Refused(404, f"there is no execution {execution}")

    def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        if row["state"] != "live":
            return row
        calls, tokens = self._parts.recorder.usage(row["execution"])
        return {**row, "calls": calls, "tokens": tokens}

    async def tree(self, request: web.Request) -> web.Response:
        """The whole tree of one execution as `gyre trees export` writes it."""
        execution = number(request, "id")
        await self._parts.durable()
        return json_answer(await asyncio.to_thread(self._read, execution))

    def _read(self, execution: int) -> dict[str, Any]:
        with StoreReader(self._trees) as reader:
            try:
                return as_dict(reader.tree(execution), reader.groups())
            except KeyError:
                raise Refused(404, f"there is no execution {execution}") from None

    async def end(self, request: web.Request) -> web.Response:
        """Ends an execution; one that made no call leaves nothing to learn from and is invalid."""
        execution, body = number(request, "id"), await read_body(request, _End)
        return json_answer(await self.finish(execution, body.reason, body.score, body.valid, body.detail))

    async def finish(self, execution: int, reason: str, score: float, valid: bool, detail: str = "") -> dict[str, Any]:
        """See `end`. KeyError: there is no such execution."""
        parts = self._parts
        seconds = parts.ledger.age(execution)
        calls, tokens = await parts.recorder.finish(execution)
        parts.router.forget(execution)
        valid = valid and calls > 0
        detail = detail if calls else detail or "it made no model call"
        taken = parts.ledger.end(execution, reason, score if valid else 0.0, valid, seconds, detail, calls, tokens)
        await parts.durable()
        return {"accepted": taken, "valid": valid, "calls": calls, "tokens": tokens}

    async def version(self, request: web.Request) -> web.Response:
        body = await read_body(request, _Version)
        self._declared.declare(body.version)
        return json_answer({"version": body.version})

    async def pause(self, request: web.Request) -> web.Response:
        """Nothing of ours runs on any server when this is answered; calls wait, with pings, and keep their tokens."""
        body = await read_body(request, _Pause)
        async with self._turn:
            self._paused = True
            closed: list[Awaitable[dict[str, float]]] = [self._parts.router.close(n, body.deadline) for n in range(self._servers)]
            try:
                counts = await asyncio.gather(*closed)
            except TimeoutError as error:
                raise Refused(504, str(error)) from None
        return json_answer({"held": int(sum(c["held"] + c["moved"] for c in counts)), "seconds": max(c["seconds"] for c in counts)})

    async def resume(self, request: web.Request) -> web.Response:
        body = await read_body(request, _Resume)
        async with self._turn:
            if body.version is not None:
                self._declared.declare(body.version)
            for server in range(self._servers):
                self._parts.router.open(server)
            self._paused = False
        return json_answer({"version": self._declared.version})

    async def status(self, request: web.Request) -> web.Response:
        return json_answer(self.counts())

    def counts(self) -> dict[str, Any]:
        """What is true now."""
        return {**self._parts.router.counts(), **self._parts.ledger.counts(), "version": self._declared.version, "paused": self._paused}

    async def health(self, request: web.Request) -> web.Response:
        return json_answer({"ok": True})


def known_harness(name: str) -> str:
    """Raises ConfigError."""
    if name not in KINDS:
        raise ConfigError(f"--harness {name}", f"one of {', '.join(KINDS)}")
    return name
