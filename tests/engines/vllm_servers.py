"""Real vLLM servers of one small model for tests of hand-overs, and how to stop, freeze and kill them."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from gyre_hpc.engines.factory import start_engine
from gyre_hpc.engines.protocol import EngineServer, EngineSpec
from tests.engines.models import save_random, small_config

WINDOW = 2048


def small_model(path: Path, seed: int) -> Path:
    """Its greedy choices are far from ties."""
    return save_random(path, seed, small_config(max_position_embeddings=WINDOW))


@dataclass
class Servers:
    """All that hand over to one another; logs beside the model."""

    model: Path
    _started: list[tuple[ThreadPoolExecutor, EngineServer]] = field(default_factory=list)

    def start(self, *names: str) -> list[EngineServer]:
        """These at the same time, each from a thread of its own: the kernel ties a server's life to the thread that started it."""
        given: dict[str, object] = {"kv_gib": 1, "num_gpu_blocks_override": 400}
        logs = [self.model.parent / f"{name}.log" for name in names]
        specs = [EngineSpec("vllm", self.model, 0, 8, WINDOW, log, options=given, handover="nixl") for log in logs]
        pools = [ThreadPoolExecutor(1) for _ in specs]
        begun = [pool.submit(start_engine, spec, 600.0) for pool, spec in zip(pools, specs, strict=True)]
        for pool, future in zip(pools, begun, strict=True):
            if future.exception() is None:
                self._started.append((pool, future.result()))
        return [future.result() for future in begun]

    def stop(self) -> None:
        """All that are left, at the same time."""
        ending = [(pool, pool.submit(engine.stop)) for pool, engine in self._started]
        for pool, ended in ending:
            ended.result()
            pool.shutdown()


def processes_of(engine: EngineServer) -> list[psutil.Process]:
    """The server, its engine core and its workers."""
    server = psutil.Process(engine.pid)
    return [server, *server.children(recursive=True)]


def freeze(engine: EngineServer) -> None:
    for process in processes_of(engine):
        process.send_signal(signal.SIGSTOP)


def thaw(engine: EngineServer) -> None:
    for process in processes_of(engine):
        process.send_signal(signal.SIGCONT)


def kill(engine: EngineServer) -> None:
    """As when its node dies: kill -9 of every process at once."""
    processes = processes_of(engine)
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    psutil.wait_procs(processes, timeout=30)
