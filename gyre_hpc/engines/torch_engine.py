"""The torch engine seen from outside: its process handle (for the cell's leader) and its client (for the gateway).

Exactness: greedy and sampled calls alike continue on another torch engine with the tokens that they would have had (up to rounding, see
`sampling`), for every draw depends on (seed, index) alone.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from gyre_hpc import processes
from gyre_hpc.engines import control, frames
from gyre_hpc.engines.options import torch_options
from gyre_hpc.engines.prompt import request_json
from gyre_hpc.engines.protocol import (
    EngineAddress,
    EngineFault,
    EngineSpec,
    GenerateRequest,
    Holding,
    NotReceived,
    RequestRefused,
)
from gyre_hpc.engines.streaming import Question, Reader, StreamingClient, session
from gyre_hpc.errors import ConfigError

log = logging.getLogger(__name__)

_SILENCE = 30.0
"""Seconds without even a blank line after which an engine counts as gone (it sends one every 5 s)."""
_GRACE = 2.0


class TorchEngine:
    """An `EngineServer`. Options: flush (tokens a chunk), prefill (tokens a pass), prefix_mb, rows (calls at once), device."""

    def __init__(self, spec: EngineSpec, deadline: float) -> None:
        """Starts the process and waits until it serves. Raises EngineFault, ConfigError."""
        began = time.monotonic()
        read, write = os.pipe()
        try:
            process = processes.spawn(_command(spec, write), spec.log, _environment(spec), pass_fds=(write,))
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        self._child = control.Child(process, spec.log)
        self.pid = self._child.pid
        try:
            url = control.read_line(read, self._child, deadline)
        except BaseException:
            self.stop()
            raise
        self._holding = Holding(rows_of(spec) * spec.window, rows_of(spec))
        self.address = EngineAddress("torch", url, spec.capacity or self._holding.executions, spec.window)
        log.info("torch engine %d ready in %.1f s", self.pid, time.monotonic() - began)

    def alive(self) -> bool:
        return self._child.alive()

    def holding(self, deadline: float) -> Holding:
        """Its rows; KV of each grows to the window as it is needed."""
        return self._holding

    def health(self, deadline: float) -> dict[str, Any]:
        """What the process says of itself: version, paused, released, active, waiting, tokens, prefix_hits, slot_bytes, prefix_bytes."""
        self._child.check()
        health: dict[str, Any] = control.call(f"{self.address.url}/health", deadline, method="GET")
        return health

    def pause(self, deadline: float) -> None:
        self._post("pause", deadline)

    def resume(self, deadline: float) -> None:
        self._post("resume", deadline)

    def update_weights(self, model: Path, version: int, deadline: float) -> None:
        self._load("update_weights", model, version, deadline)

    def receive_weights(self, source: str, version: int, deadline: float) -> None:
        failed = self._post("receive", deadline, source=source, version=version, seconds=deadline / 2).get("failed")
        if failed:
            raise NotReceived(f"engine {self.pid}: {failed}")
        self._require(version, deadline)

    def release(self, deadline: float) -> None:
        self._post("release", deadline)

    def restore(self, model: Path, version: int, deadline: float) -> None:
        self._load("restore", model, version, deadline)

    def logprobs(self, tokens: Sequence[int], deadline: float) -> list[float]:
        return [float(value) for value in self._post("score", deadline, tokens=list(tokens))["logprobs"]]

    def stop(self) -> None:
        self._child.stop(_GRACE)

    def _post(self, name: str, deadline: float, **body: object) -> Any:
        self._child.check()
        return control.call(f"{self.address.url}/{name}", deadline, body)

    def _load(self, name: str, model: Path, version: int, deadline: float) -> None:
        self._post(name, deadline, model=str(model.resolve()), version=version)
        self._require(version, deadline)

    def _require(self, version: int, deadline: float) -> None:
        have = self.health(deadline)
        if have["version"] != version or have["released"]:
            raise EngineFault(f"engine {self.pid} has version {have['version']} after loading version {version}")


class TorchClient(StreamingClient):
    """An `EngineClient`."""

    def __init__(self, address: EngineAddress) -> None:
        super().__init__(f"{address.url}/generate", "the engine", session(60.0, _SILENCE, {"Accept": frames.MEDIA}))

    def _question(self, request: GenerateRequest) -> Question:
        return Question(request_body(request), _reader)

    def _refusal(self, status: int, reason: str) -> Exception:
        return (RequestRefused if status == 400 else EngineFault)(f"engine answered {status}: {reason}")


def _reader(response: aiohttp.ClientResponse) -> Reader:
    """Of frames. Raises EngineFault where the answer has none."""
    if response.headers.get("Content-Type") != frames.MEDIA:
        raise EngineFault(f"engine answered with {response.headers.get('Content-Type')}, not with frames")
    return frames.Frames()


def request_body(request: GenerateRequest) -> bytes:
    """The body of the server's `POST /generate`."""
    s = request.sampling
    sampling = {
        "max_tokens": s.max_tokens,
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k,
        "seed": s.seed,
        "stop": s.stop,
    }
    return request_json("prompt", request.prompt, {"request_id": request.request_id, "position": request.position, "sampling": sampling})


def rows_of(spec: EngineSpec) -> int:
    """Calls that it computes at once. Raises ConfigError when nobody says."""
    rows = int(torch_options(spec.options)["rows"]) or spec.capacity
    if rows < 1:
        raise ConfigError("rollout.capacity = 0 without rollout.options.rows", "the torch engine holds what it is told: set one of them")
    return rows


def _command(spec: EngineSpec, ready: int) -> list[str]:
    options = torch_options(spec.options)
    if not (spec.model / "config.json").is_file():
        raise ConfigError(f"model {spec.model}: no config.json there", "give the directory of a Hugging Face causal LM")
    options["rows"] = rows_of(spec)
    options["device"] = options["device"] or "auto"
    fixed = {
        "model": spec.model.resolve(),
        "host": spec.host,
        "ready-fd": ready,
        "dtype": spec.dtype,
        "version": spec.version,
        "window": spec.window,
        "threads": spec.threads,
    }
    pairs = {**fixed, **{name.replace("_", "-"): value for name, value in options.items()}}
    return processes.python("gyre_hpc.engines.torch_main", *(f"--{name}={value}" for name, value in pairs.items()))


def _environment(spec: EngineSpec) -> dict[str, str]:
    devices = control.visible_devices(spec.devices, os.environ)
    ours = {"OMP_NUM_THREADS": str(spec.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return processes.child_environment({**devices, **ours})
