"""A worker's part in a broadcast of weights: it comes to the meeting, does what the leader says, and leaves when there is a reason to.

Invariants: `attend` returns when this worker has the version whole, and raises NotReceived otherwise, at the latest when its time is over
and the collective has let go of it; a thread looks at the line while the worker is inside the collective, and takes it out when the leader
says the end, or dies, or time is over. Whether what the worker computes with is still whole then, only its receiver knows.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from gyre_hpc.engines.protocol import NotReceived
from gyre_hpc.engines.weight_meeting import Member, greeting, speaking

log = logging.getLogger(__name__)

SCHEME = "broadcast:"
"""Begins a source that is a meeting (others are streams, weight_stream.py)."""
_LOOK = 0.05
"""Seconds between two looks at the line while the worker is busy."""
_LEAVE = 5.0
"""Seconds for the look-out to end after the worker came back; one that is stuck in the abort of a communicator is left behind."""


class Receiver(Protocol):
    """What takes part for one worker. All but `abort` are called by one thread, in this order; raising anything ends the broadcast."""

    def member(self, engine: str, seconds: float) -> Member: ...

    def enter(self, backend: str, group: str, info: dict[str, Any], address: str) -> None:
        """Join a group, in place of an earlier one of this backend; `address`: ours, as the others reach us."""
        ...

    def start(self, backend: str) -> None:
        """Weights will come over this backend's group."""
        ...

    def update(self, info: dict[str, Any]) -> None:
        """Receive what `info` names, inside the collective."""
        ...

    def finish(self) -> None:
        """All is there: what was received is the model."""
        ...

    def abort(self) -> None:
        """From another thread: get whoever is inside the collective out of it. The group is of no use any more."""
        ...


def attend(source: str, version: int, seconds: float, engine: str, receiver: Receiver) -> None:
    """Take part; this worker has `version` when it returns. Raises NotReceived.

    `source`: where the meeting is, "broadcast:host:port/secret"; `engine`: a name that is this engine process's alone.
    """
    end = time.monotonic() + seconds
    place, _, secret = source.removeprefix(SCHEME).rpartition("/")
    host, _, port = place.rpartition(":")
    finished = False
    try:
        with socket.create_connection((host, int(port)), timeout=max(0.1, seconds)) as line, line.makefile("rb") as told:
            line.sendall(greeting(secret, version, receiver.member(engine, seconds)))
            while (message := _next(line, told, end))["do"] != "end":
                failed, taken_out = _obey(receiver, message, line, end)
                line.settimeout(_LEAVE)
                if failed:
                    with contextlib.suppress(OSError):  # the leader may be gone, or have closed the line behind its last word
                        line.sendall(json.dumps({"failed": failed}).encode() + b"\n")
                    raise NotReceived(_why(line, told) if taken_out else failed)
                finished = message["do"] == "finish"
                line.sendall(b"{}\n")
    except (OSError, ValueError, KeyError) as error:
        if not finished:  # else it has all, and only the leader's last word was lost
            raise NotReceived(f"version {version} from {place} was not broadcast whole: {error or type(error).__name__}") from error
        return
    if not finished:  # else it has all, whatever became of the others; that it has may not have reached the leader
        raise NotReceived(f"version {version} from {place}: {message['why'] or 'the meeting was over'}")


def _next(line: socket.socket, told: Any, end: float) -> dict[str, Any]:
    """What the leader says next. Raises OSError, ValueError."""
    line.settimeout(max(0.1, end - time.monotonic()))
    raw = told.readline()
    if not raw.endswith(b"\n"):
        raise ConnectionError("the sender is gone")
    message: dict[str, Any] = json.loads(raw)
    return message


def _obey(receiver: Receiver, message: dict[str, Any], line: socket.socket, end: float) -> tuple[str, bool]:
    """Do it: (what went wrong, whether we were taken out of it). The group is left where anything did."""
    what = message.get("do")
    with _lookout(line, end, receiver.abort) as left:
        try:
            _follow(receiver, message)
        except Exception as error:  # whatever it is, the leader and the engine's owner are to know, and files are next
            log.warning("a broadcast of weights, %s: %s: %s", what, type(error).__name__, error)
            log.debug("as it was", exc_info=True)
            receiver.abort()
            return f"{what}: {type(error).__name__}: {error}", left()
    return (f"{what}: taken out of the collective", True) if left() else ("", False)


def _why(line: socket.socket, told: Any) -> str:
    """The leader's last word, that took us out of the collective; or that there was none."""
    if not speaking([line], 0.0):
        return "time was over"
    return str(_next(line, told, time.monotonic() + _LEAVE).get("why"))


def _follow(receiver: Receiver, message: dict[str, Any]) -> None:
    match message["do"]:
        case "enter":
            receiver.enter(message["backend"], message["group"], message["info"], message["address"])
        case "start":
            receiver.start(message["backend"])
        case "update":
            receiver.update(message["info"])
        case "finish":
            receiver.finish()
        case other:
            raise ValueError(f"the leader said {other!r}")


@contextmanager
def _lookout(line: socket.socket, end: float, abort: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Calls `abort` when anything comes over the line, or time is over. Yields: whether it did."""
    back, aborted = threading.Event(), threading.Event()

    def look() -> None:
        while not back.wait(_LOOK):
            if time.monotonic() > end or speaking([line], 0.0):
                aborted.set()
                abort()
                return

    thread = threading.Thread(target=look, name="weights-lookout", daemon=True)
    thread.start()
    try:
        yield aborted.is_set
    finally:
        back.set()
        thread.join(_LEAVE)
