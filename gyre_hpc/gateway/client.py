"""The controller's and the driver's side of the control API: blocking calls, safe from several threads (a connection for each).

Invariant: every call may be repeated at the gateway, so one whose connection broke is repeated until its deadline; then it is Resumable.
What the gateway refuses is a GyreError at once.
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from gyre_hpc.errors import GyreError, Resumable

log = logging.getLogger(__name__)

_ANSWER = 30.0
"""Seconds that an answer may take on top of what the call itself waits for."""
_PAUSE = 0.2


class PhaseFailed(Exception):
    """A phase of a transfer did not succeed within its deadline, and has to be undone."""


class ControlClient:
    """`url` "http://host:port"; `deadline`: seconds that the gateway may be out of reach."""

    def __init__(self, url: str, secret: str, deadline: float) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"gateway url {url!r}: need http://host:port")
        self._host, self._port = parts.hostname, parts.port or 80
        self._headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
        self._deadline = deadline
        self._local = threading.local()

    # -- groups and executions ----------------------------------------------------------------------------------------------------

    def dispatch(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Dispatch groups [{group, task, size, version, burst}]; durable when this returns."""
        self._post("/control/groups", {"groups": [dict(group) for group in groups]})

    def changes(self, after: int, wait: float = 0.0) -> tuple[int, list[dict[str, Any]]]:
        """(next, changes later than `after`), waiting up to `wait` seconds for one."""
        answer = self._post("/control/changes", {"after": after, "wait": wait}, wait)
        return answer["next"], answer["changes"]

    def ledger(self, first: int = 0) -> dict[str, Any]:
        """{groups: [{group, task, size, version, burst, valid, ends, live}], next, first_execution}, from group `first` on."""
        answer: dict[str, Any] = self._post("/control/ledger", {"first": first})
        return answer

    def node_gone(self, node: str) -> list[int]:
        """Every execution of this node is lost; which those were."""
        lost: list[int] = self._post(f"/control/nodes/{node}/gone", {})["lost"]
        return lost

    # -- routes -------------------------------------------------------------------------------------------------------------------

    def set_route(self, cell: int, address: Mapping[str, Any] | None, engine: int = 0) -> None:
        """The engine of a cell (fields of EngineAddress), closed at first; None: it has none any more."""
        self._post("/control/routes", {"cell": cell, "engine": engine, "address": dict(address) if address is not None else None})

    def open_route(self, cell: int) -> None:
        """New and held calls may go there."""
        self._post(f"/control/routes/{cell}/open", {})

    def close_route(self, cell: int, deadline: float, hand_over: bool = True) -> dict[str, Any]:
        """Returns {moved, held, seconds, handover?} when nothing of ours runs there any more.

        `hand_over` False: no KV is moved, for the weights change.
        """
        body = {"deadline": deadline, "hand_over": hand_over}
        answer: dict[str, Any] = self._post(f"/control/routes/{cell}/close", body, deadline)
        return answer

    def close_routes(self, cells: Sequence[int], deadline: float) -> dict[str, Any]:
        """Of all these cells together, for new weights: nothing moves from one to the other. Returns {moved, held, seconds}."""
        answer: dict[str, Any] = self._post("/control/routes/close", {"cells": list(cells), "deadline": deadline}, deadline)
        return answer

    def phase(self, cell: int, phase: str, deadline: float, undo: bool = False) -> dict[str, Any]:
        """One phase of a cell's way out of rollout (gateway/leaving.py), or its undo. Raises PhaseFailed, whose undo is what follows."""
        answer: dict[str, Any] = self._post(f"/control/routes/{cell}/phase", {"phase": phase, "deadline": deadline, "undo": undo}, deadline)
        return answer

    def status(self) -> dict[str, Any]:
        """Counts of executions, calls and tokens."""
        answer: dict[str, Any] = self._request("GET", "/control/status", None, 0.0)
        return answer

    # -- inside -------------------------------------------------------------------------------------------------------------------

    def _post(self, path: str, body: Mapping[str, Any], wait: float = 0.0) -> Any:
        return self._request("POST", path, json.dumps(body).encode(), wait)

    def _request(self, method: str, path: str, body: bytes | None, wait: float) -> Any:
        until = time.monotonic() + self._deadline
        told = False
        while True:
            try:
                return self._once(method, path, body, wait + _ANSWER)
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                left = until - time.monotonic()
                why = f"{type(error).__name__} {error}".strip()
                if left <= 0:
                    raise Resumable(f"gateway {path}: out of reach for {self._deadline:g} s ({why})", "the same command resumes") from None
                if not told and left < self._deadline / 2:
                    told = True
                    log.warning("waiting for the gateway (%s): %s", path, why)
                time.sleep(min(_PAUSE, left))

    def _once(self, method: str, path: str, body: bytes | None, timeout: float) -> Any:
        connection = self._connection(timeout)
        connection.request(method, path, body, self._headers)
        response = connection.getresponse()
        data = response.read()
        if response.status == 200:
            return json.loads(data)
        line = _line(data)
        if response.status == 409 and path.endswith("/phase"):
            raise PhaseFailed(line)
        if response.status in (503, 504):
            raise Resumable(f"gateway {path}: {line}", "see the gateway's log; the same command resumes")
        raise GyreError(f"gateway {path}: HTTP {response.status} {line}", "a mistake of ours: see the gateway's log")

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        connection.timeout = timeout
        if connection.sock is not None:
            connection.sock.settimeout(timeout)
        return connection

    def _drop(self) -> None:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
            self._local.connection = None


def _line(data: bytes) -> str:
    """The error of an answer: our own form, or that of the harness side."""
    try:
        error = json.loads(data)["error"]
    except (ValueError, KeyError, TypeError):
        return " ".join(data.decode(errors="replace").split())[:300]
    return str(error.get("message", error) if isinstance(error, dict) else error)
