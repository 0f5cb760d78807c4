"""What the handles of all engine processes share: waiting for readiness, and blocking calls to the process's HTTP control side."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import re
import select
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gyre_hpc import processes
from gyre_hpc.engines.protocol import EngineFault
from gyre_hpc.errors import ConfigError

log = logging.getLogger(__name__)

UNSUPPORTED = 3
"""Exit status of an engine process that would compute this model wrongly: trying again is useless."""
USAGE = 2
"""Exit status of a program that does not know its command line."""
_REFUSAL = "ValidationError: "
"""With it vLLM ends at values that it knows and does not take."""
_END = 1 << 16
"""Bytes at the end of a log in which the cause is looked for: vLLM writes a traceback a process."""
_MOST = 500
_PREFIX = re.compile(r"^\(\w+ pid=\d+\) ?(?:[A-Z]+ [\d-]+ [\d:.]+ \[[^\]]*\] ?)?")
"""What vLLM's processes put before each line."""
_ECHO = re.compile(r"[Ss]ee root cause above|Engine core initialization failed|[Ff]or further information visit|^\s*\^+$")
_EXCEPTION = re.compile(r"(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Fault|Interrupt): \S")
# engines are on our own nodes: a proxy from the environment must not see them
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_BROKEN = (OSError, http.client.HTTPException, ValueError)
"""URLError and time-outs are OSErrors; an engine that dies in the middle of an answer leaves the others: half a body, half a JSON value."""


def text(url: str, deadline: float) -> str:
    """One blocking GET of a text. Raises EngineFault."""
    try:
        with _opener.open(url, timeout=max(deadline, 0.01)) as response:
            body: bytes = response.read()
    except _BROKEN as error:
        raise EngineFault(f"engine did not answer {url.rsplit('/', 1)[-1]}: {error}") from error
    return body.decode(errors="replace")


class Child:
    """An engine's process and its log."""

    def __init__(self, process: subprocess.Popen[bytes], log_file: Path) -> None:
        self._process = process
        self.log_file = log_file
        self.pid = process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def check(self) -> None:
        """Raises EngineFault with what its log says if the process has ended, ConfigError if the model or an option is to blame."""
        status = self._process.poll()
        if status == UNSUPPORTED:
            raise ConfigError(f"model.path: this engine can't serve it: {last_line(self.log_file)}", "use rollout.engine = vllm")
        if status is not None:
            words = last_line(self.log_file)
            # one that a signal killed has refused nothing, whatever its log told before
            if status == USAGE or (status > 0 and _REFUSAL in words):
                raise ConfigError(f"rollout.options: the engine refuses its command line: {words}", "mend that option, or leave it out")
            raise EngineFault(f"engine process {self.pid} ended with status {status}: {words}")

    def stop(self, grace: float) -> None:
        """End it and its group; what a dead process left behind gets no grace, nobody is there to end it in order."""
        processes.stop(self._process, grace if self.alive() else 0.0)


def hold_port(host: str) -> socket.socket:
    """A socket at a free port (`getsockname`), kept from all others until it is closed. It does not listen, so that a program which is told
    the port may take it meanwhile, a while after its start: one that sets SO_REUSEADDR before it binds, as vLLM and ZeroMQ do."""
    held = socket.socket()
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
    except BaseException:
        held.close()
        raise
    return held


def visible_devices(devices: Sequence[int], env: Mapping[str, str]) -> dict[str, str]:
    """What makes an engine see only these accelerators; they are numbered inside what `env` allows already."""
    if not devices:
        return {}
    allowed = [name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    names = [allowed[d] if d < len(allowed) else str(d) for d in devices] if allowed else [str(d) for d in devices]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)}


def last_line(path: Path) -> str:
    """Why a process ended, in the words of its log: the last exception that is no echo of another, else the last line with text."""
    with contextlib.suppress(OSError):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _END))
            text = file.read().decode(errors="replace")
        lines = [line for line in (_PREFIX.sub("", line).rstrip() for line in text.splitlines()) if line and not _ECHO.search(line)]
        if lines:
            return f"{_cause(lines)[:_MOST]} ({path})"
    return f"see {path}"


def _cause(lines: Sequence[str]) -> str:
    """A usage error is the last line; a traceback's end may have much behind it, and goes on where its next line is indented."""
    if ": error: " in lines[-1]:
        return lines[-1].strip()
    for number in range(len(lines) - 1, -1, -1):
        if _EXCEPTION.match(lines[number]):
            more = lines[number + 1 : number + 2]
            return " ".join(line.strip() for line in [lines[number], *(line for line in more if line.startswith(" "))])
    return lines[-1].strip()


def read_line(fd: int, child: Child, deadline: float) -> str:
    """The first line that the child writes to a pipe; closes it. Raises EngineFault when it ends first or the deadline passes."""
    end = time.monotonic() + deadline
    with open(fd, "rb", buffering=0) as pipe:
        data = b""
        while not data.endswith(b"\n"):
            left = end - time.monotonic()
            if left <= 0:
                raise EngineFault(f"engine process {child.pid} not ready within {deadline:.0f} s")
            if select.select([pipe], [], [], min(left, 1.0))[0]:
                got = os.read(pipe.fileno(), 4096)
                if not got:
                    time.sleep(0.05)  # the pipe closes a moment before the exit status is there
                    child.check()
                    raise EngineFault(f"engine process {child.pid} closed its readiness pipe")
                data += got
    return data.decode().strip()


def call(
    url: str, deadline: float, body: Mapping[str, Any] | None = None, method: str = "POST", headers: Mapping[str, str] | None = None
) -> Any:
    """One blocking JSON call; an empty answer is None. Raises EngineFault: refused, gone, or later than `deadline` seconds."""
    data = json.dumps(body).encode() if body is not None else b"" if method == "POST" else None
    request = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": "application/json", **(headers or {})})
    name = url.rsplit("/", 1)[-1]
    try:
        with _opener.open(request, timeout=max(deadline, 0.01)) as response:
            text = response.read()
            return json.loads(text) if text.strip() else None
    except urllib.error.HTTPError as error:
        with contextlib.suppress(*_BROKEN):
            reason = error.read()[:300].decode(errors="replace")
            raise EngineFault(f"engine answered {error.code} to {name}: {reason}") from error
        raise EngineFault(f"engine answered {error.code} to {name}") from error
    except _BROKEN as error:
        raise EngineFault(f"engine did not answer {name}: {error}") from error
