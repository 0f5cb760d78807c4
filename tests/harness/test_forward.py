"""The parent of a foreign client, as a real process: TCP to the unix socket and back, ends and breaks told apart, files, codes, signals."""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import termios
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from gyre_hpc import harness
from gyre_hpc.harness.forward import Connection
from tests.ports import free_port

PROGRAM = Path(harness.__file__).parent / "forward.py"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def forwarded(folder: Path, port: int, script: str, files: dict[str, str] | None = None) -> asyncio.subprocess.Process:
    """The forwarder with a small Python program as its client."""
    spec = {"port": port, "socket": str(folder / "g.sock"), "files": files or {}}
    env = {**os.environ, "HOME": str(folder / "home"), "GYRE_FORWARD": json.dumps(spec)}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(PROGRAM), sys.executable, "-c", script, str(port)), env=env, stdout=asyncio.subprocess.PIPE
    )


@contextlib.asynccontextmanager
async def gateway(folder: Path, serve: Serve) -> AsyncIterator[None]:
    server = await asyncio.start_unix_server(serve, folder / "g.sock")
    try:
        yield
    finally:
        server.close()


CLIENT = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as s:
    got = b""
    try:
        s.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
        while piece := s.recv(1 << 16):
            got += piece
        print(len(got), "end")
    except (ConnectionResetError, BrokenPipeError):
        print(len(got), "reset")
"""


OUT_OF_BOTH = """
import errno, importlib.util, os, socket, threading
found = importlib.util.spec_from_file_location("forward", {program!r})
forward = importlib.util.module_from_spec(found)
found.loader.exec_module(forward)
forward.listen({port}, {path!r})
faults = ["descriptors", "threads", "one thread", ""]
start, Socket = threading.Thread.start, socket.socket

def begin(thread):
    if faults[0] == "threads" or (faults[0] == "one thread" and thread._target.__name__ == "_answers"):
        raise RuntimeError("no more threads")
    start(thread)

def made(family=socket.AF_INET, *rest, **more):
    if faults[0] == "descriptors" and family == socket.AF_UNIX:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return Socket(family, *rest, **more)

threading.Thread.start, forward.socket.socket = begin, made
while faults:
    exec({client!r})
    faults.pop(0)
"""


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (CHUNKED + b"0\r\n\r\n", "end"),
        (CHUNKED, "reset"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", "end"),
    ],
)
async def test_an_answer_that_breaks_off_is_a_reset(tmp_path: Path, answer: bytes, told: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for at in range(0, len(answer), 7):
            writer.write(answer[at : at + 7])
            await writer.drain()
        writer.close()

    async with gateway(tmp_path, serve):
        process = await forwarded(tmp_path, free_port(), CLIENT)
        output, _ = await asyncio.wait_for(process.communicate(), 20)
    assert output.decode().split()[1] == told
    assert process.returncode == 0


@pytest.mark.parametrize(
    "pieces",
    [
        [CHUNKED[:1], CHUNKED[1:9], CHUNKED[9:30], CHUNKED[30:]],
        [CHUNKED, b"9\r\n", b"HTTP/1.1 \r\n"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", CHUNKED],
        [CHUNKED + b"0\r\n\r\n", CHUNKED],
    ],
)
def test_a_break_is_told_however_the_answers_come_in_pieces(pieces: list[bytes]) -> None:
    gateway, ours = socket.socketpair()
    client, other = socket.create_server(("127.0.0.1", 0)), socket.socket()
    other.connect(client.getsockname())
    accepted, _ = client.accept()
    client.close()
    connection = Connection(accepted, ours)
    feeding = threading.Thread(target=_feed, args=(gateway, ours, pieces))
    feeding.start()
    connection.serve()
    feeding.join()
    with other, pytest.raises(ConnectionResetError):
        list(iter(lambda: other.recv(1 << 16), b""))


def _feed(gateway: socket.socket, read: socket.socket, pieces: list[bytes]) -> None:
    """Each piece once the one before was taken."""
    for piece in pieces:
        gateway.sendall(piece)
        while array.array("i", fcntl.ioctl(read, termios.FIONREAD, bytes(4)))[0]:
            time.sleep(0.001)
    gateway.close()


async def test_a_forwarder_out_of_threads_or_descriptors_goes_on(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED + b"0\r\n\r\n")
        writer.close()

    port = free_port()
    script = OUT_OF_BOTH.format(program=str(PROGRAM), port=port, path=str(tmp_path / "g.sock"), client=CLIENT)
    async with gateway(tmp_path, serve):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", script, str(port)), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        output, errors = await asyncio.wait_for(process.communicate(), 30)
    told = [line.split()[-1] for line in output.decode().splitlines()]
    assert told == ["reset", "reset", "reset", "end"], errors.decode()
    assert "no more threads" in errors.decode()
    assert "Too many open files" in errors.decode()


async def test_much_in_both_directions(tmp_path: Path) -> None:
    script = """
import socket, sys, threading
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as s:
    threading.Thread(target=lambda: (s.sendall(b"x" * 3000000), s.shutdown(socket.SHUT_WR))).start()
    print(sum(len(p) for p in iter(lambda: s.recv(65536), b"")))
"""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
        writer.close()

    async with gateway(tmp_path, serve):
        process = await forwarded(tmp_path, free_port(), script)
        output, _ = await asyncio.wait_for(process.communicate(), 30)
    assert output.split() == [b"3000000"]


async def test_a_client_that_goes_away_closes_the_gateways_side(tmp_path: Path) -> None:
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        gone.set()

    script = """
import socket, sys, time
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
s.sendall(b"x")
s.close()
time.sleep(30)
"""
    async with gateway(tmp_path, serve):
        process = await forwarded(tmp_path, free_port(), script)
        await asyncio.wait_for(gone.wait(), 20)
        process.terminate()
        assert await process.wait() == 128 + signal.SIGTERM


async def test_no_gateway_is_a_reset(tmp_path: Path) -> None:
    process = await forwarded(tmp_path, free_port(), CLIENT)
    output, _ = await asyncio.wait_for(process.communicate(), 20)
    assert output.split() == [b"0", b"reset"]


async def test_files_environment_and_exit_code(tmp_path: Path) -> None:
    script = (
        "import os, sys; print([n for n in os.environ if n.startswith('GYRE_')], open(os.environ['HOME'] + '/.a/b').read()); sys.exit(7)"
    )
    process = await forwarded(tmp_path, free_port(), script, {".a/b": "né"})
    output, _ = await asyncio.wait_for(process.communicate(), 20)
    assert output.decode().split() == ["[]", "né"]
    assert process.returncode == 7


async def test_signals_pass(tmp_path: Path) -> None:
    process = await forwarded(tmp_path, free_port(), "import time; print('up', flush=True); time.sleep(60)")
    assert process.stdout is not None
    await asyncio.wait_for(process.stdout.readline(), 20)
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 20) == 128 + signal.SIGTERM


async def test_a_client_does_not_ignore_what_python_ignores(tmp_path: Path) -> None:
    spec = {"port": free_port(), "socket": "/none", "files": {}}
    env = {**os.environ, "HOME": str(tmp_path), "GYRE_FORWARD": json.dumps(spec)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(PROGRAM), "grep", "SigIgn", "/proc/self/status"), env=env, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(process.communicate(), 20)
    ignored = int(output.split()[1], 16)
    assert not [number for number in (signal.SIGPIPE, signal.SIGXFSZ) if ignored >> (number - 1) & 1]


async def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    spec = {"port": free_port(), "socket": "/none", "files": {}}
    env = {**os.environ, "HOME": str(tmp_path), "GYRE_FORWARD": json.dumps(spec)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", str(PROGRAM), "/no/such/program", env=env, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 127
    assert errors.decode() == "/no/such/program: No such file or directory\n"
