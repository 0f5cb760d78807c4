"""One node's supervisor: takes executions from the gateway and runs each to its verdict.

    GYRE_RUNTIME=RUN/runtime/attempt-001/runtime.json python -m gyre_hpc.executions.supervisor --node NAME

An execution: workspace -> harness in a box, within its budgets -> score -> durable at the gateway -> workspace released.
Invariants: every execution taken is answered by exactly one `end` or `lost`, or by none because this process stops (the ledger then has it
as lost with the node); what is retried, graded and rewarded is the table in endings.py and nothing else; nothing that was started here
outlives this process, however it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import resource
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from gyre_hpc.config import Config
from gyre_hpc.configfile import load
from gyre_hpc.errors import ExitCode, GyreError
from gyre_hpc.executions import endings, programs, sandbox, scoring, warden, workspace
from gyre_hpc.executions.control import Control, Work
from gyre_hpc.executions.endings import Ending
from gyre_hpc.executions.program import MODEL, Program
from gyre_hpc.executions.relay import local_socket
from gyre_hpc.executions.scratch import scratch
from gyre_hpc.failure import as_failure, record_failure
from gyre_hpc.paths import RunPaths
from gyre_hpc.runtime import Runtime
from gyre_hpc.tasks import harbor

_POLL = 20.0
"""Seconds that the gateway may hold a question for work."""
_LOOK = 1.0
"""Seconds between two looks at the size of a workspace."""
_START = 0.03
"""Seconds that a start counts as going on after its box is set up: about what an interpreter needs to come up."""
_SEEN = 10.0
"""Seconds that a task's folder, written on the first node, may take to be seen here."""


@dataclass(frozen=True)
class Outcome:
    """How one execution ended. `score` counts only when `valid`."""

    ending: Ending
    score: float = 0.0
    valid: bool = False
    detail: str = ""


class Supervisor:
    """Runs executions on one node, up to `harness.slots_per_node` at once."""

    def __init__(self, config: Config, run: RunPaths, attempt: int, node: str, control: Control, program: Program, socket: Path) -> None:
        self._config = config
        self._run = run
        self._attempt = attempt
        self._node = node
        self._control = control
        self._program = program
        self._socket = socket
        self._host = sandbox.detect()
        self._starts = asyncio.Semaphore(config.harness.starts_at_once)
        self._live: dict[int, asyncio.Task[None]] = {}
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(self) -> None:
        """Take work until cancelled. Raises what made an execution impossible to report (the gateway is gone)."""
        slots = self._config.harness.slots_per_node
        try:
            while True:
                free = slots - len(self._live)
                if free > 0:
                    asking = asyncio.ensure_future(self._control.work(self._node, free, _POLL, list(self._live)))
                    await self._first(asking)
                    for work in await asking:
                        self._begin(work)
                else:
                    await self._first(*self._live.values())
        finally:
            left = list(self._live.values())
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _first(self, *waited: asyncio.Future[Any]) -> None:
        """Until one of them is done. Raises at once what broke the supervisor."""
        try:
            await asyncio.wait([self._broken, *waited], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            for future in waited:
                future.cancel()
            raise
        if self._broken.done():
            for future in waited:
                future.cancel()
            self._broken.result()

    def _begin(self, work: Work) -> None:
        if work.execution in self._live:  # the gateway repeated itself
            return
        task = asyncio.get_running_loop().create_task(self._one(work))
        self._live[work.execution] = task
        task.add_done_callback(lambda done: self._ended(work.execution, done))

    def _ended(self, execution: int, task: asyncio.Task[None]) -> None:
        del self._live[execution]
        if not task.cancelled() and (error := task.exception()) is not None and not self._broken.done():
            self._broken.set_exception(error)

    async def _one(self, work: Work) -> None:
        """Run one execution and tell the gateway."""
        began = time.monotonic()
        folder = workspace.folder_of(self._run.workspaces, self._attempt, work.execution)
        try:
            async with asyncio.timeout(self._config.harness.overall_timeout):
                outcome = await self._execute(work, folder)
        except TimeoutError:
            outcome = Outcome(Ending.OVERALL, detail=f"{self._config.harness.overall_timeout:g} s")
        except GyreError as error:
            outcome = Outcome(Ending.SANDBOX, detail=error.line)
        seconds = time.monotonic() - began
        if endings.TABLE[outcome.ending].retry in (endings.Budget.SETUP, endings.Budget.AGENT):
            print(f"execution {work.execution} lost: {outcome.ending} {outcome.detail}", flush=True)
            await self._control.lost(work.execution, outcome.ending, outcome.detail)
        else:
            await self._control.end(work.execution, outcome.ending, outcome.score, outcome.valid, seconds, outcome.detail)
        if not self._config.harness.keep_workspaces:
            try:
                await asyncio.to_thread(workspace.remove, folder.root)
            except GyreError as error:  # garbage, not a reason to stop
                print(error.line, flush=True)

    async def _execute(self, work: Work, folder: workspace.Folder) -> Outcome:
        task = await _seen(work.task)
        async with self._starts:
            await asyncio.to_thread(workspace.prepare, folder, task.environment, scoring.caps_of(self._config.harness))
            running = self._start(work, folder, task.instruction)
            try:
                await asyncio.shield(running.set_up)
                await asyncio.sleep(_START)
            except asyncio.CancelledError:
                running.kill()
                await running.wait(60.0)
                raise
        ending = await self._agent(running, folder, min(self._config.harness.timeout, task.agent_timeout))
        detail = "" if ending is Ending.FINISHED else _last_line(folder.log)
        if not endings.TABLE[ending].grade:
            return Outcome(ending, detail=detail)
        verdict = await scoring.score(task, folder, self._config)
        if not verdict.valid:
            return Outcome(Ending.VERIFIER, detail=f"{verdict.reason} {verdict.detail}".strip())
        return Outcome(ending, verdict.score, endings.TABLE[ending].valid, detail)

    def _start(self, work: Work, folder: workspace.Folder, instruction: str) -> sandbox.Running:
        start = self._program.start(self._socket, work.secret, work.seed, MODEL, instruction)
        limits = self._program.limits(scoring.limits_of(self._config.harness))
        box = sandbox.Box(folder.work.resolve(), mounts=start.mounts, env=start.env, limits=limits)
        with open(folder.log, "wb") as output:
            return sandbox.start(self._host, box, start.argv, output)

    async def _agent(self, running: sandbox.Running, folder: workspace.Folder, budget: float) -> Ending:
        """Wait for the harness within its budget, and for its workspace and its output to stay within their limits."""
        over = False

        async def look() -> None:
            nonlocal over
            while not over:
                await asyncio.sleep(_LOOK)
                over = await asyncio.to_thread(_outgrown, folder, scoring.caps_of(self._config.harness))
            running.kill()

        looking = asyncio.get_running_loop().create_task(look())
        try:
            ended = await running.wait(budget)
        finally:
            looking.cancel()
        return endings.of_exit(ended, bundled=self._program.bundled, over_disk=over)


@functools.lru_cache(maxsize=1024)
def _task(path: str) -> harbor.Task:
    """A group's executions share one task; its folder does not change."""
    return harbor.load(Path(path))


async def _seen(path: str) -> harbor.Task:
    """The task in this folder, which the first node wrote: a network file system may show it late. GyreError if it is not there in time."""
    until = time.monotonic() + _SEEN
    if not Path(path).is_dir():
        print(f"waiting for task {path} to be seen on this node, {_SEEN:.0f} s", flush=True)
    while not Path(path).is_dir() and time.monotonic() < until:
        await asyncio.sleep(0.1)
    return _task(path)


def _outgrown(folder: workspace.Folder, caps: workspace.Caps) -> bool:
    """Whether the workspace holds more than it may, or the program printed more: the rlimit of one file is far higher for real clients."""
    return workspace.usage(folder.work, caps).over or folder.log.stat().st_size > caps.size


def _last_line(log: Path) -> str:
    """The end of what the harness printed: why it stopped, in its own words."""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 500))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")


async def run(node: str, runtime: Runtime) -> None:
    """Serve until SIGTERM. Raises GyreError."""
    paths = RunPaths(runtime.run_dir)
    config = load(paths.config)
    _raise_descriptor_limit()
    swept = workspace.sweep(paths.workspaces, runtime.attempt)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(warden.guard())
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        socket = await stack.enter_async_context(local_socket(Path(runtime.gateway_socket), runtime.gateway_url))
        folder = stack.enter_context(scratch(paths.root, node))
        control = Control(session, runtime.gateway_url, runtime.secret, config.deadlines.start)
        program = programs.build(folder, config, paths.root)
        version = await program.check(folder)
        supervisor = Supervisor(config, paths, runtime.attempt, node, control, program, socket)
        limits = " ".join(f"{name}={by}" for name, by in sandbox.detect().enforced.items())
        print(f"supervisor {node}: harness {config.harness.kind}, version {version}", flush=True)
        print(f"supervisor {node}: {config.harness.slots_per_node} slots, limits by {limits}, socket {socket}, {swept} swept", flush=True)
        serving = asyncio.ensure_future(supervisor.serve())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        if (boxes := sandbox.detect().cgroup) is not None:
            boxes.tidy()
    print(f"supervisor {node}: stopped", flush=True)


def _raise_descriptor_limit() -> None:
    """Every execution takes a few descriptors here, and two for each connection through a relay."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gyre_hpc.executions.supervisor")
    parser.add_argument("--node", required=True, help="this node's name")
    node = parser.parse_args().node
    runtime = None
    try:
        runtime = Runtime.from_environment()
        asyncio.run(run(node, runtime))
    except Exception as error:
        failure = as_failure(f"supervisor-{node}", error)
        if runtime is not None:
            record_failure(RunPaths(runtime.run_dir).runtime(runtime.attempt), failure)
        print(f"supervisor {node}: {failure.what}; {failure.remedy}", file=sys.stderr, flush=True)
        if not isinstance(error, GyreError):
            raise
        return failure.exit_code
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
