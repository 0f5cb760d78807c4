"""Waiting for a child and calling it: every way to fail is an EngineFault that says where to look."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from gyre_hpc import processes
from gyre_hpc.engines import control
from gyre_hpc.engines.protocol import EngineFault


def start(program: str, log: Path) -> tuple[control.Child, int]:
    read, write = os.pipe()
    process = processes.spawn([sys.executable, "-c", program.replace("FD", str(write))], log, pass_fds=(write,))
    os.close(write)
    return control.Child(process, log), read


def test_devices_are_numbered_inside_what_the_environment_allows() -> None:
    assert control.visible_devices((), {"CUDA_VISIBLE_DEVICES": "4,5"}) == {}
    assert control.visible_devices((0, 1), {}) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert control.visible_devices((1,), {"CUDA_VISIBLE_DEVICES": "4,GPU-ab"}) == {"CUDA_VISIBLE_DEVICES": "GPU-ab"}


def test_a_held_port_is_its_program_s_and_nobody_else_s() -> None:
    """A real server that binds it late: tests/engines/test_vllm_engine.py."""
    held = control.hold_port("127.0.0.1")
    place = held.getsockname()
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(place)
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(place)
        server.listen()
        held.close()
        socket.create_connection(place, 10.0).close()
        server.accept()[0].close()


def test_first_line_is_awaited(tmp_path: Path) -> None:
    child, read = start(
        "import os, time; os.write(FD, b'http://h'); time.sleep(0.1); os.write(FD, b'ere\\n'); time.sleep(60)", tmp_path / "log"
    )
    assert control.read_line(read, child, 10.0) == "http://here"
    assert child.alive()
    child.stop(1.0)
    assert not child.alive()


def test_a_child_that_ends_first_is_quoted(tmp_path: Path) -> None:
    child, read = start("raise SystemExit('no such device')", tmp_path / "log")
    with pytest.raises(EngineFault, match=r"ended with status 1: no such device \(.*log\)"):
        control.read_line(read, child, 10.0)


def test_a_child_that_says_nothing_is_not_awaited_for_ever(tmp_path: Path) -> None:
    child, read = start("import time; time.sleep(60)", tmp_path / "log")
    with pytest.raises(EngineFault, match="not ready within 0 s"):
        control.read_line(read, child, 0.1)
    child.stop(1.0)


@pytest.fixture
def url() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(404 if self.path == "/missing" else 200)
            if self.path == "/half":
                self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"" if self.path == "/empty" else json.dumps({"got": json.loads(body)}).encode())

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_calls_ignore_proxies_and_name_what_failed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert control.call(f"{url}/x", 5.0, {"a": 1}) == {"got": {"a": 1}}
    assert control.call(f"{url}/empty", 5.0, {}) is None
    with pytest.raises(EngineFault, match="404 to missing"):
        control.call(f"{url}/missing", 5.0, {})
    with pytest.raises(EngineFault, match=r"did not answer half: IncompleteRead"):
        control.call(f"{url}/half", 5.0, {})
    with pytest.raises(EngineFault, match="did not answer pause"):
        control.call("http://127.0.0.1:9/pause", 1.0)
