"""The supervisor's side of the gateway's control API (docs/architecture.md).

Invariant: `end` and `lost` return only when the gateway has made them durable; both are idempotent there, so a call that broke is simply
repeated, until its deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from gyre_hpc.errors import GyreError, Resumable

_PAUSE = 0.5


@dataclass(frozen=True)
class Work:
    """One execution to run. `task`: folder of the task; `secret`: its identity at the gateway."""

    execution: int
    group: int
    index: int
    attempt: int
    task: str
    secret: str
    seed: int
    retries_left: int


class Control:
    """A client of one gateway. `deadline`: seconds that it may be out of reach before the node gives up."""

    def __init__(self, session: aiohttp.ClientSession, url: str, secret: str, deadline: float) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {secret}"}
        self._deadline = deadline

    async def work(self, node: str, slots: int, wait: float, have: Sequence[int]) -> list[Work]:
        """Up to `slots` executions to start now; held by the gateway for at most `wait` seconds while there is none.

        `have`: the live ones of this node, so that the gateway can repeat an answer that never arrived.
        """
        answer = await self._post("/control/work", {"node": node, "slots": slots, "wait": wait, "have": list(have)}, wait + 30.0)
        return [Work(**{name: item[name] for name in Work.__dataclass_fields__}) for item in answer]

    async def end(self, execution: int, reason: str, score: float, valid: bool, seconds: float, detail: str) -> None:
        """The execution is over for good."""
        body = {"reason": reason, "score": score, "valid": valid, "seconds": round(seconds, 3), "detail": detail}
        await self._post(f"/control/executions/{execution}/end", body, 30.0)

    async def lost(self, execution: int, reason: str, detail: str) -> None:
        """Not the harness's fault: the gateway has it tried again while its budget lasts."""
        await self._post(f"/control/executions/{execution}/lost", {"reason": reason, "detail": detail}, 30.0)

    async def _post(self, path: str, body: dict[str, Any], timeout: float) -> Any:
        """Raises Resumable when the gateway stays out of reach, GyreError when it refuses."""
        until = time.monotonic() + self._deadline
        said = False
        while True:
            try:
                limit = aiohttp.ClientTimeout(total=timeout)
                async with self._session.post(self._url + path, json=body, headers=self._headers, timeout=limit) as answer:
                    if answer.status == 200:
                        return await answer.json()
                    text = (await answer.text())[:300]
                    if answer.status < 500:
                        raise GyreError(f"gateway {path}: HTTP {answer.status} {text}", "a mistake of ours: see the gateway's log")
                    why = f"HTTP {answer.status} {text}"
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                why = f"{type(error).__name__} {error}"
            if time.monotonic() > until:
                raise Resumable(f"gateway {path}: out of reach for {self._deadline:g} s ({why})", "the same command resumes")
            if not said and time.monotonic() > until - self._deadline / 2:
                said = True
                print(f"waiting for the gateway ({path}): {why}", flush=True)
            await asyncio.sleep(_PAUSE)
