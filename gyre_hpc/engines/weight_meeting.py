"""Who takes part in a broadcast of weights, and the lines on which the sender leads them: TCP beside the collective, which has no words.

A member (a worker of an engine) connects to the core's leader and says one line {secret, version, engine, worker, ...} (`Member`). From
then on the leader asks and the member answers, one JSON line each: {do: enter | start | update | finish, ...} -> {} or {failed: why}; the
last word is the leader's, {do: end, why} ("" where all went well).
Invariants: a member that dies, or whose sender does, is known by its line at once, whatever the collective's own time-outs are; while a
member works nothing is said to it but the end, so anything that can be read from its line then means: leave the collective; an engine takes
part with all of its workers or with none; the door is closed when those who came are led, a later one is refused at once; a stranger, who
does not know the secret, keeps nobody waiting: all who are at the door are listened to at once, each for `_GREETING` seconds altogether.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import logging
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

log = logging.getLogger(__name__)

_LONGEST_GREETING = 1 << 14
_GREETING = 5.0
"""Seconds for whoever comes to say who it is, however slowly it speaks."""
_GUESTS = 256
"""As many may be at the door; then who has been there longest goes. A member says who it is as soon as it is connected."""
_LOOK = 0.1
"""Seconds between two looks whether anybody wants us to stop."""
_LAST_WORD = 1.0
"""Seconds for a member to take the end from us; it hears the line close as well."""
_LOOPBACK = "127.0.0.1"


class Lost(Exception):
    """A member died, failed or was late, or the offer was withdrawn: the collective can't be finished with everybody."""


@dataclass(frozen=True)
class Member:
    """One worker of an engine, as it introduces itself."""

    engine: str
    """Of this process and no other: a new one that takes its place has another."""
    worker: int
    """Its number in the engine, from 0, as the engine's own backend counts."""
    workers: int
    backends: tuple[str, ...]
    seconds: float
    """As long as it stays."""
    device: str = ""
    """Of an accelerator, the same for all processes on it and for no other; "" on a CPU."""
    held: tuple[str, ...] = ()
    """Groups of earlier broadcasts that it is still in."""


class Line:
    """To one member. Not thread-safe, but `over` may come from anywhere."""

    def __init__(self, connection: socket.socket, member: Member) -> None:
        self.member = member
        self.end = time.monotonic() + member.seconds
        self.ours: str = connection.getsockname()[0]
        """Our address, as this member reaches it."""
        self.theirs: str = connection.getpeername()[0]
        self.done = False
        """Whether it has the weights whole."""
        self.connection = connection
        self._told = False
        self._answers = connection.makefile("rb")

    def say(self, message: dict[str, Any]) -> None:
        """Raises OSError."""
        self.connection.settimeout(max(_LOOK, self.end - time.monotonic()))
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        """An answer that begins to arrive. Raises OSError, ValueError."""
        self.connection.settimeout(max(_LOOK, self.end - time.monotonic()))
        line = self._answers.readline()
        if not line.endswith(b"\n"):
            raise ConnectionError("it is gone")
        answer = json.loads(line)
        if not isinstance(answer, dict):
            raise ValueError(f"it answered {answer!r}")
        return answer

    def speaks(self) -> bool:
        """Whether there is something to be heard, or the end of the line."""
        return bool(speaking([self.connection], 0.0))

    def over(self, why: str) -> None:
        """The last word, once; a member that is gone does not hear it."""
        if self._told:
            return
        self._told = True
        with contextlib.suppress(OSError):
            self.connection.settimeout(_LAST_WORD)
            self.connection.sendall(json.dumps({"do": "end", "why": why}).encode() + b"\n")
            self.connection.shutdown(socket.SHUT_WR)
        self._answers.close()
        self.connection.close()


class _Guest:
    """Somebody who came, and what it has said so far."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.said, self.until = connection, bytearray(), time.monotonic() + _GREETING

    def listen(self) -> bytes | None:
        """Its whole greeting, None while it goes on. Raises OSError, ValueError."""
        try:
            heard = self.connection.recv(_LONGEST_GREETING)
        except BlockingIOError:
            return None
        self.said += heard
        if self.said.endswith(b"\n"):
            return bytes(self.said)
        if not heard or len(self.said) > _LONGEST_GREETING:
            raise ValueError("it said nothing" if not self.said else "it did not say who it is")
        return None


class Meeting:
    """Where members come before a broadcast of one version; `source`: "host:port/secret", to be given to them."""

    def __init__(self, host: str, version: int) -> None:
        """Listens when it returns. Raises OSError."""
        self._version, self._secret = version, secrets.token_urlsafe(16)
        self._listener = socket.create_server((host if host == _LOOPBACK else "", 0), backlog=1024)
        self._listener.setblocking(False)
        self._guests: list[_Guest] = []
        self.source = f"{host}:{self._listener.getsockname()[1]}/{self._secret}"

    def gather(self, engines: int, patience: float, stopped: threading.Event, seconds: float = float("inf")) -> list[Line]:
        """The lines to all workers of the engines that came, in order of (engine, worker).

        Waits until `engines` are there with all of their workers, at most `patience` seconds after the first has come, and `seconds`
        altogether, or until `stopped`.
        """
        lines: list[Line] = []
        last = time.monotonic() + seconds
        try:
            while len(_whole(lines)) < engines and time.monotonic() < last and not stopped.is_set():
                for line in self._come():
                    lines.append(line)
                    last = min(last, time.monotonic() + patience)
        finally:
            self.close()
        whole = _whole(lines)
        there = []
        for line in sorted(lines, key=lambda line: (line.member.engine, line.member.worker)):
            if line.member.engine in whole and not line.speaks():
                there.append(line)
            else:
                line.over("not all workers of its engine came in time")
        found = _whole(there)
        for line in there:
            if line.member.engine not in found:
                line.over("another worker of its engine left")
        return [line for line in there if line.member.engine in found]

    def close(self) -> None:
        """Nobody comes in any more."""
        self._listener.close()
        for guest in self._guests:
            guest.connection.close()
        self._guests = []

    def _come(self) -> list[Line]:
        """Those who have said by now that they are members; waits for a moment."""
        speak = speaking([self._listener, *(guest.connection for guest in self._guests)], _LOOK)
        if self._listener in speak:
            self._open()
        members = [line for guest in list(self._guests) if guest.connection in speak and (line := self._listen(guest)) is not None]
        now = time.monotonic()
        for guest in [guest for guest in self._guests if now > guest.until] + self._guests[: max(0, len(self._guests) - _GUESTS)]:
            self._turn_away(guest, "it takes too long to say who it is")
        return members

    def _open(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # it has gone again
            return
        except OSError as error:
            log.warning("a member of the broadcast of version %d could not be accepted: %s", self._version, error)
            time.sleep(_LOOK)
            return
        connection.setblocking(False)
        self._guests.append(_Guest(connection))

    def _listen(self, guest: _Guest) -> Line | None:
        try:
            greeting = guest.listen()
            if greeting is None:
                return None
            member = self._member(json.loads(greeting))
            line = Line(guest.connection, member)
        except (OSError, ValueError, TypeError, KeyError) as error:
            self._turn_away(guest, str(error))
            return None
        self._guests.remove(guest)
        return line

    def _turn_away(self, guest: _Guest, why: str) -> None:
        if guest in self._guests:
            log.warning("somebody was turned away from the broadcast of version %d: %s", self._version, why)
            self._guests.remove(guest)
            guest.connection.close()

    def _member(self, told: Any) -> Member:
        if not isinstance(told, dict) or not hmac.compare_digest(str(told.pop("secret", None)).encode(), self._secret.encode()):
            raise ValueError("it does not know the secret")
        if (version := told.pop("version", None)) != self._version:
            raise ValueError(f"it wants version {version!r}")
        return Member(**{**told, "backends": tuple(told["backends"]), "held": tuple(told["held"])})


def greeting(secret: str, version: int, member: Member) -> bytes:
    """What a member says first."""
    return json.dumps({"secret": secret, "version": version, **asdict(member)}).encode() + b"\n"


def speaking(connections: Sequence[socket.socket], seconds: float) -> list[socket.socket]:
    """Those with something to be heard, or at their end, as soon as there are any. Raises ValueError for a closed one."""
    poll, by_number = select.poll(), {}  # select itself takes no descriptor beyond 1023
    for connection in connections:
        by_number[connection.fileno()] = connection
        poll.register(connection, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(seconds * 1000.0)]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _whole(lines: Sequence[Line]) -> set[str]:
    """Engines all of whose workers are among these."""
    came: dict[str, set[int]] = {}
    for line in lines:
        came.setdefault(line.member.engine, set()).add(line.member.worker)
    return {line.member.engine for line in lines if len(came[line.member.engine]) == line.member.workers}


class Circle:
    """The members of one collective, asked as one: what vLLM's trainer side calls a `VLLMWeightSyncClient`.

    Every call returns when all have answered; it raises Lost, and calls `abort` before, when one can't, or `stopped` is set.
    """

    def __init__(self, lines: Sequence[Line], backend: str, group: str, stopped: threading.Event) -> None:
        self.lines, self.backend, self.group = lines, backend, group
        self.address = next((line.ours for line in lines if not _is_loopback(line.ours)), lines[0].ours)
        """The leader's, for all members: that by which those of its own node came may lead nowhere from another."""
        self.end = min(line.end for line in lines)
        self.abort: Callable[[], None] = lambda: None
        """Gets our own side out of the collective."""
        self._stopped = stopped
        self._why = ""

    def leave(self, why: str) -> None:
        """From another thread: our own side is out of the collective, so that nobody can go on; a call that waits raises Lost."""
        self._why = why

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Each joins the group with a rank of its own; vLLM adds a worker's number to the offset that it is told."""
        offset = init_info.get("rank_offset")
        messages = []
        for rank, line in enumerate(self.lines, 1):
            info = init_info if offset is None else {**init_info, "rank_offset": rank - line.member.worker}
            address = self.address if _is_loopback(line.theirs) else line.theirs
            messages.append({"do": "enter", "backend": self.backend, "group": self.group, "info": info, "address": address})
        self._ask(messages)

    def start_weight_update(self) -> None:
        """From here on until it has finished a member may be half new."""
        self._all({"do": "start", "backend": self.backend})

    def update_weights(self, update_info: Any) -> None:
        """They receive; runs beside the broadcast."""
        self._all({"do": "update", "info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """They have it whole. Who answers this is done, whatever becomes of the others."""
        self._all({"do": "finish"})

    def _all(self, message: dict[str, Any]) -> None:
        self._ask([message] * len(self.lines))

    def _ask(self, messages: Sequence[dict[str, Any]]) -> None:
        try:
            for line, message in zip(self.lines, messages, strict=True):
                self._of(line, lambda line=line, message=message: line.say(message))  # type: ignore[misc]
            waiting = list(self.lines)
            while waiting:
                if self._stopped.is_set():
                    raise Lost("the offer was withdrawn")
                if self._why:
                    raise Lost(self._why)
                if time.monotonic() > self.end:
                    raise Lost(f"{len(waiting)} of {len(self.lines)} were late, {waiting[0].member.engine} among them")
                speak = speaking([line.connection for line in waiting], _LOOK)
                for line in [line for line in waiting if line.connection in speak]:
                    answer = self._of(line, line.hear)
                    if answer.get("failed"):
                        raise Lost(f"{line.member.engine}: {answer['failed']}")
                    waiting.remove(line)
                    line.done = messages[0]["do"] == "finish"
        except Lost:
            self.abort()
            raise

    def _of(self, line: Line, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except (OSError, ValueError) as error:
            raise Lost(f"{line.member.engine} was lost: {error or type(error).__name__}") from error
