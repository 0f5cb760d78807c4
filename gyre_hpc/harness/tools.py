"""The tools of the bundled harness: `bash` and `write_file`, in the current folder.

Invariants: a tool answers (text, exit code) whatever the model asked for; its output is cut in the middle to `limit` characters; when a
command times out its whole process group is killed. Standard library only, and little of it: see main.py.
"""

from __future__ import annotations

import os
import select
import time

_KILL = 9
_PAUSE = 0.005
_LOOK = 3600.0  # poll takes no more than 2**31 ms, `harness.tool_timeout` may be more
_DEFAULT = (13, 25)
"""SIGPIPE and SIGXFSZ: Python ignores them, and an ignored signal stays ignored in what it starts."""
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "USER", "PYTHONNOUSERSITE", "PYTHONDONTWRITEBYTECODE")


def run(name: str, arguments: dict[str, object], limit: int, timeout: float) -> tuple[str, int]:
    """Do one tool call. Returns what it printed, cut, and its exit code."""
    if name == "bash" and isinstance(arguments.get("command"), str):
        output, code = bash(str(arguments["command"]), 8 * limit, timeout)
    elif name == "write_file" and isinstance(arguments.get("path"), str) and isinstance(arguments.get("content"), str):
        output, code = write_file(str(arguments["path"]), str(arguments["content"]))
    elif name in ("bash", "write_file"):
        output, code = f"{name}: wrong arguments", 2
    else:
        output, code = f"no tool {name}", 2
    return cut(output, limit), code


def bash(command: str, limit: int, timeout: float) -> tuple[str, int]:
    """Run a command by bash in a session of its own; stdout and stderr together, at most `limit` bytes from each end."""
    read, write = os.pipe()
    nothing = (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0)
    outputs = [(os.POSIX_SPAWN_DUP2, write, 1), (os.POSIX_SPAWN_DUP2, write, 2)]
    environment = {key: value for key, value in os.environ.items() if key in _KEPT}
    try:
        argv = ["bash", "--norc", "--noprofile", "-c", command.replace("\0", "")]
        pid = os.posix_spawn("/bin/bash", argv, environment, file_actions=[nothing, *outputs], setpgroup=0, setsigdef=_DEFAULT)
    except OSError as error:
        os.close(read)
        return f"bash can't be started: {error.strerror}", 126
    finally:
        os.close(write)
    try:
        return _collect(pid, read, limit, timeout)
    finally:
        os.close(read)


def write_file(path: str, content: str) -> tuple[str, int]:
    """Create or replace a file, with the folders above it."""
    try:
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(path, "w", encoding="utf-8", errors="replace") as file:
            file.write(content)
    except (OSError, ValueError) as error:
        return f"write_file: {getattr(error, 'strerror', None) or error}", 1
    return "", 0


def cut(text: str, limit: int) -> str:
    """At most `limit` characters of a text, from both ends."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters cut]\n{text[-half:]}"


def _collect(pid: int, read: int, limit: int, timeout: float) -> tuple[str, int]:
    """Read until the command itself is over (background children may keep the pipe open), or kill its group at the deadline."""
    poll = select.poll()
    child = _handle(pid)
    poll.register(read, select.POLLIN)
    if child is not None:
        poll.register(child, select.POLLIN)
    head, tail = b"", b""
    deadline = time.monotonic() + timeout
    over = timed_out = False
    after = 64  # reads once the command is over: a child in the background may write for ever
    try:
        while True:
            left = 0.0 if over else max(0.0, deadline - time.monotonic())
            ready = [fd for fd, _ in poll.poll(min(left, _LOOK if child is not None else _PAUSE) * 1000)]
            if read in ready and after:
                after -= over
                data = os.read(read, 65536)
                if data:
                    room = limit - len(head)
                    head, tail = head + data[:room], (tail + data[room:])[-limit:]
                else:
                    poll.unregister(read)
            elif over:
                break
            over = over or (child in ready if child is not None else _exited(pid))
            if not over and time.monotonic() >= deadline:
                timed_out = over = True
                os.killpg(pid, _KILL)
    finally:
        if child is not None:
            os.close(child)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = (head + tail).decode("utf-8", errors="replace")
    if timed_out:
        return f"{text}\ntimed out after {timeout:g} s", 124
    return text, code if code >= 0 else 128 - code


def _handle(pid: int) -> int | None:
    """A pidfd; None on kernels before 5.3, where the child is looked at every few milliseconds."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def _exited(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
