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
from gyre_hpc.errors import ConfigError


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


def test_a_command_line_that_is_refused_is_a_mistake_in_the_configuration(tmp_path: Path) -> None:
    child, read = start("import argparse; argparse.ArgumentParser('vllm').parse_args(['--device=tpu'])", tmp_path / "log")
    with pytest.raises(
        ConfigError, match=r"rollout\.options: the engine refuses its command line: vllm: error: unrecognized arguments: --dev"
    ):
        control.read_line(read, child, 10.0)


def test_a_value_that_is_refused_is_one_as_well(tmp_path: Path) -> None:
    child, read = start(f"import sys; print({PYDANTIC!r}, file=sys.stderr); sys.exit(1)", tmp_path / "log")
    with pytest.raises(ConfigError, match=r"refuses its command line: pydantic.*Unknown quantization method: foo\."):
        control.read_line(read, child, 10.0)


def test_one_that_was_killed_has_refused_nothing(tmp_path: Path) -> None:
    """Its log may tell of somebody's request that made no sense."""
    child, read = start(f"import os, sys; print({PYDANTIC!r}, file=sys.stderr, flush=True); os.kill(os.getpid(), 9)", tmp_path / "log")
    with pytest.raises(EngineFault, match="ended with status -9"):
        control.read_line(read, child, 10.0)


VLLM = """(EngineCore_DP0 pid=71) ERROR 11-30 12:00:01 [core.py:708] Traceback (most recent call last):
(EngineCore_DP0 pid=71) ERROR 11-30 12:00:01 [core.py:708]   File "core.py", line 1, in run
(EngineCore_DP0 pid=71) ERROR 11-30 12:00:01 [core.py:708] ValueError: No room for {} blocks
(EngineCore_DP0 pid=71) Process EngineCore_DP0:
(APIServer pid=70) Traceback (most recent call last):
(APIServer pid=70)     raise RuntimeError("Engine core initialization failed. "
(APIServer pid=70) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP0': 1}
(APIServer pid=70) INFO 11-30 12:00:02 [launcher.py:1] bye
"""
PYDANTIC = """Traceback (most recent call last):
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, Unknown quantization method: foo. [type=value_error, input_value=ArgsKwargs((), {'model':...}), input_type=ArgsKwargs]
    For further information visit https://errors.pydantic.dev/2.12/v/value_error
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (VLLM, "ValueError: No room for {} blocks"),
        (
            PYDANTIC,
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig Value error, Unknown quantization method",
        ),
        ("ImportError: x\nusage: vllm [-h]\nvllm: error: argument --dtype: invalid choice: 'x'\n", "vllm: error: argument --dtype"),
        ("loading\nSegmentation fault\n\n", "Segmentation fault"),
        ("RuntimeError: Expected one of cpu, cuda\n", "RuntimeError: Expected one of cpu, cuda"),
    ],
)
def test_the_cause_is_quoted_not_its_echoes(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "log").write_text(text)
    told = control.last_line(tmp_path / "log")
    assert told.startswith(words)
    assert told.endswith(f"({tmp_path / 'log'})")


def test_a_log_without_a_word_is_named(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\n")
    assert control.last_line(tmp_path / "log") == f"see {tmp_path / 'log'}"


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
