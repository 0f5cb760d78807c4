"""Parent of a foreign client in a box: gives it a TCP port for the gateway's unix socket, files in its HOME, and takes its exit code.

    GYRE_FORWARD='{"port": N, "socket": PATH, "files": {...}}' python forward.pyc PROGRAM ARGUMENT...

A box has no network but its own loopback, and real clients speak TCP only. Invariants: bytes are neither read nor changed, but for where an
answer ends; the port listens before the client starts; an answer that breaks off reaches the client as a reset (a unix socket has none: its
break looks like an end, and clients commit what ends); the client's signals and exit code pass through, 128 + signal when it was killed.
Standard library only; one thread for each direction of a connection (a client has a handful).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import sys
import threading
import time

_PIECE = 1 << 16
_END = b"0\r\n\r\n"
"""The last chunk of a chunked body."""
_BEGIN = b"HTTP/1."
_PAUSE = 0.2
_RESET = struct.pack("ii", 1, 0)


class Connection:
    """One connection of the client, joined to one of the gateway's."""

    def __init__(self, client: socket.socket, gateway: socket.socket) -> None:
        self._client = client
        self._gateway = gateway
        self._broken = False

    def serve(self) -> None:
        """Until both sides are done."""
        answers = threading.Thread(target=self._answers, daemon=True)
        try:
            answers.start()
        except RuntimeError:  # the box has no more threads
            self._broken = True
        else:
            self._requests()
            answers.join()
        if self._broken:
            self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._client.close()
        self._gateway.close()

    def _requests(self) -> None:
        try:
            while piece := self._client.recv(_PIECE):
                self._gateway.sendall(piece)
            self._gateway.shutdown(socket.SHUT_WR)
        except OSError:
            _hang_up(self._gateway, socket.SHUT_RDWR)

    def _answers(self) -> None:
        """Answers come one after the other; whether the last one was whole is told by its framing."""
        tail, chunked = b"", False
        head: bytes | None = b""
        """Of the answer that begins, until it is whole: it may come in pieces."""
        try:
            while piece := self._gateway.recv(_PIECE):
                if head is None and _BEGIN.startswith(piece[: len(_BEGIN)]) and (tail == _END or not chunked):
                    head = b""
                if head is not None:
                    head += piece
                    first, blank, _ = head.partition(b"\r\n\r\n")
                    chunked, tail = b"\r\ntransfer-encoding: chunked" in first.lower(), b""
                    head = None if blank or len(head) > _PIECE else head
                tail = (tail + piece)[-len(_END) :]
                self._client.sendall(piece)
            self._broken = chunked and tail != _END
        except OSError:
            self._broken = True
        if self._broken:
            _hang_up(self._client, socket.SHUT_RD)
            _hang_up(self._gateway, socket.SHUT_RDWR)
        else:
            _hang_up(self._client, socket.SHUT_WR)


def _hang_up(side: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):  # it is gone already
        side.shutdown(how)


def _join(client: socket.socket, path: str) -> None:
    """Serve a connection in threads of its own. OSError, RuntimeError: it can't be."""
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    gateway = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        gateway.connect(path)
        threading.Thread(target=Connection(client, gateway).serve, daemon=True).start()
    except BaseException:
        gateway.close()
        raise


def listen(port: int, path: str) -> None:
    """Serve connections to 127.0.0.1:port in threads of their own."""
    server = socket.create_server(("127.0.0.1", port), backlog=128)

    def accept() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError as error:  # out of descriptors: the client holds them, and may let some go
                print(f"forwarder: {error.strerror}", file=sys.stderr, flush=True)
                time.sleep(_PAUSE)
                continue
            try:
                _join(client, path)
            except (OSError, RuntimeError) as error:  # no gateway; or no more descriptors, or threads: another time there may be
                print(f"forwarder: {error}", file=sys.stderr, flush=True)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                client.close()

    threading.Thread(target=accept, daemon=True).start()


def write_files(home: str, files: dict[str, str]) -> None:
    """`files`: path below `home` -> text."""
    for name, text in files.items():
        path = os.path.join(home, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


def run(argv: list[str]) -> int:
    """Start the client and wait for it; its exit code."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GYRE_")}
    try:
        # Python ignores these two, and a child would go on ignoring them: no `... | head` in the box would end as it should.
        pid = os.posix_spawnp(argv[0], argv, env, setsigdef=[signal.SIGPIPE, signal.SIGXFSZ])
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: os.kill(pid, got))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


def main() -> int:
    spec = json.loads(os.environ["GYRE_FORWARD"])
    write_files(os.environ["HOME"], spec["files"])
    listen(spec["port"], spec["socket"])
    return run(sys.argv[1:])


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
