"""The gateway process: the one writer of RUN/trees, the ledger, the router, and the HTTP server in front of them.

    GYRE_SECRET=... python -m gyre_hpc.gateway.main --run-dir RUN --attempt N

Invariants: `gateway.json` appears when both listeners answer; SIGTERM or SIGINT ends it in order (calls broken visibly and recorded,
commit, seal, close) with exit code 0, SIGTERM not before the driver has no more time to give: a scheduler sends it to all processes, and
the controller still has a transfer to end and a step to save (gyre_hpc/stopfile.py); a store or an event log that can't be written fails
every call, and the process ends with exit code 75 and one line, leaving what was durable. Executions that were live stay without an end:
the next attempt has them as lost and tries again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import hashlib
import json
import logging
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import uvloop
from aiohttp import web

from gyre_hpc.config import Config
from gyre_hpc.configfile import load
from gyre_hpc.errors import ExitCode, GyreError, Resumable
from gyre_hpc.events import EventLog, read_events
from gyre_hpc.failure import as_failure, record_failure
from gyre_hpc.gateway.app import HarnessApi, build_app
from gyre_hpc.gateway.control import ControlApi
from gyre_hpc.gateway.ledger import Ledger
from gyre_hpc.gateway.pump import EventPump
from gyre_hpc.gateway.recorder import Recorder, RecorderSettings
from gyre_hpc.gateway.redact import log_to
from gyre_hpc.gateway.router import Router
from gyre_hpc.gateway.text.parsers import Parsers, make_parsers
from gyre_hpc.gateway.text.template import TurnRenderer
from gyre_hpc.model import model_directory
from gyre_hpc.paths import RunPaths
from gyre_hpc.runtime import SECRET_VARIABLE, Address, write_address
from gyre_hpc.stopfile import Grace
from trees.errors import Damaged, StoreError
from trees.store import StoreReader, StoreWriter

log = logging.getLogger(__name__)
MODEL_NAME = "policy"
SEAL_LOOK = 1.0
"""Seconds between two looks whether it is time to seal."""
LAST_WORDS = 0.3
"""Seconds in which clients may still be told of a store that failed."""
TERM_LOOK = 0.2
"""Seconds between two looks, after a SIGTERM, whether it is time to end."""
SUN_PATH = 100
"""Bytes that the path of a unix socket may safely have (the kernel's limit is 108)."""
EVERYWHERE = "0.0.0.0"


class Api(Protocol):
    """What is mounted beside the harness routes."""

    def routes(self) -> list[web.RouteDef]: ...
    def stop(self) -> None: ...


@dataclass(frozen=True)
class Parts:
    """What a gateway is made of."""

    store: StoreWriter
    recorder: Recorder
    router: Router
    ledger: Ledger

    async def durable(self) -> bool:
        """All that the ledger did so far is on the disk, then told; whether that was news to readers of the changes."""
        mark = self.ledger.changes.mark()
        await self.recorder.committer.commit()
        return self.ledger.changes.publish(mark)


class Gateway:
    """One attempt's gateway. `run` serves until a signal or a failure.

    The methods `_make_*`, `_take_over`, `_begun`, `_chores` and `_ending` are where standalone.py differs.
    """

    def __init__(self, paths: RunPaths, attempt: int, config: Config, secret: str, host: str | None = None) -> None:
        self.paths = paths
        self.attempt = attempt
        self.config = config
        self._secret = secret
        self._host = host or config.gateway.host
        self._stop = asyncio.Event()
        self._fatal: Exception | None = None
        self._grace = self._make_grace()
        self._looking: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Serve. Returns after a stop that was asked for; raises Resumable when the record can't be written any more."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._stop.set)
        loop.add_signal_handler(signal.SIGTERM, self._on_term)
        directory = model_directory(self.config)
        renderer = TurnRenderer(directory)
        parsers = make_parsers(self.config.model.tool_parser, self.config.model.reasoning_parser, directory)
        store = StoreWriter(self.paths.trees, {"run": str(self.paths.root), "seed": self.config.run.seed}, take_over=self.attempt > 1)

        def failed(error: Exception) -> None:
            loop.call_soon_threadsafe(self._on_fatal, error)

        pump = EventPump(EventLog(self.paths.events), failed)
        try:
            await self._serve(store, pump, renderer, parsers)
        finally:
            pump.close()
            self._close(store)
        if self._fatal is not None:
            raise stopped_by(self._fatal)

    async def _serve(self, store: StoreWriter, pump: EventPump, renderer: TurnRenderer, parsers: Parsers) -> None:
        def on_fork(fields: dict[str, Any]) -> None:
            pump.emit("warning.fork", fields)

        router = await self._make_router(renderer)
        recorder = Recorder(store, renderer, router, settings_of(self.config), self._on_fatal, on_fork, parsers)
        parts = Parts(store, recorder, router, self._make_ledger(store, pump))
        await self._recover(parts)
        api = self._make_api(parts)
        harness = HarnessApi(recorder, parts.ledger, MODEL_NAME, self.config.gateway.ping)
        app = build_app(harness, api.routes(), self.config.gateway.max_body_mb << 20)
        async with contextlib.aclosing(router), listening(app, self._host, self.config.gateway.port, self.paths.root) as address:
            log.info("listening on %s and %s", address.url, address.socket)
            await self._begun(parts, address)
            beside = [asyncio.create_task(chore) for chore in (self._seal_now_and_then(store, parts.ledger), *self._chores(parts))]
            try:
                await self._stop.wait()
                await asyncio.sleep(LAST_WORDS if self._fatal else 0.0)
            finally:
                log.info("answers to harnesses until the stop: %s", json.dumps(dict(sorted(harness.answers.items()))))
                api.stop()
                for chore in beside:
                    chore.cancel()
                await asyncio.wait(beside)
                if self._fatal is None:
                    await self._ending(parts)
                await recorder.close()
                await router.aclose()
        if self._fatal is None:
            await asyncio.to_thread(store.seal)

    def _make_grace(self) -> Grace | None:
        """Who is asked whether SIGTERM ends it; None: it does."""
        return Grace(self.paths.runtime(self.attempt), "gateway")

    async def _make_router(self, renderer: TurnRenderer) -> Router:
        return Router()

    def _make_ledger(self, store: StoreWriter, pump: EventPump) -> Ledger:
        return Ledger(store, pump.emit, self.config.gateway.retries, self.config.run.seed)

    def _make_api(self, parts: Parts) -> Api:
        return ControlApi(parts.ledger, parts.router, parts.recorder, self._secret, parts.recorder.committer.commit)

    def _take_over(self, kept: StoreReader, told: list[int], parts: Parts) -> None:
        """What the last gateway left: executions that were live are lost."""
        lost = parts.ledger.recover(kept, told)
        log.info("recovered %s; %d executions were live and are tried again", parts.ledger.counts(), len(lost))

    async def _begun(self, parts: Parts, address: Address) -> None:
        """It listens."""
        write_address(self.paths.runtime(self.attempt), address)

    def _chores(self, parts: Parts) -> list[Coroutine[Any, Any, None]]:
        """What goes on beside it until it stops."""
        return []

    async def _ending(self, parts: Parts) -> None:
        """It was asked to stop, and calls may be in flight."""

    async def _recover(self, parts: Parts) -> None:
        told = [int(event["execution"]) for event in read_events(self.paths.events) if event["kind"] == "execution.end"]
        with StoreReader(self.paths.trees) as kept:
            over = kept.ends()
            gone = sorted(execution for execution in set(told) if execution not in over and execution not in kept.lost)
            if gone:  # an end is in the trees before it is told: somebody took them away, and ids would be given a second time
                raise GyreError(
                    f"{self.paths.trees} lacks {len(gone)} executions that events.jsonl tells of, the first is {gone[0]}",
                    "restore trees/ from a copy, or set run.dir to a new folder",
                )
            self._take_over(kept, told, parts)
        await parts.durable()

    async def _seal_now_and_then(self, store: StoreWriter, ledger: Ledger) -> None:
        sealed = _over(ledger)
        while True:
            await asyncio.sleep(SEAL_LOOK)
            now = _over(ledger)
            if now - sealed < self.config.gateway.seal_every:
                continue
            sealed = now
            try:
                paths = await asyncio.to_thread(store.seal)
            except (OSError, StoreError) as error:
                self._on_fatal(error)
                return
            log.info("sealed into %s", ", ".join(path.name for path in paths))

    def _close(self, store: StoreWriter) -> None:
        try:
            store.close()
        except (OSError, StoreError) as error:
            if self._fatal is None:
                raise stopped_by(error) from None
            log.warning("closing the store: %s", error)

    def stop(self) -> None:
        """End in order, as if a signal had come."""
        self._stop.set()

    def _on_term(self) -> None:
        """At the signal, and as long as somebody may still need us."""
        if self._stop.is_set():
            return
        if self._grace is None or self._grace.over():
            self._stop.set()
            return
        if self._looking is None:
            log.info("SIGTERM: passed on to the driver; the gateway goes on until the driver ends it or its time is over")
        else:
            self._looking.cancel()
        self._looking = asyncio.get_running_loop().call_later(TERM_LOOK, self._on_term)

    def _on_fatal(self, error: Exception) -> None:
        if self._fatal is None:
            log.error("the record can't be written: %s", error)
            self._fatal = error
            self._stop.set()


def settings_of(config: Config) -> RecorderSettings:
    """How calls of this run are sampled and limited."""
    sampling, window = config.rollout, config.model.window
    calls, tokens = config.gateway.max_calls, config.gateway.max_tokens
    return RecorderSettings(config.run.seed, window, sampling.temperature, sampling.top_p, sampling.top_k, calls, tokens)


def stopped_by(error: Exception) -> GyreError:
    """What the user hears of a store or an event log that failed. Resumable, but for damage: that stays until the file is restored."""
    if isinstance(error, Damaged):
        return GyreError(error.what, error.remedy)
    if isinstance(error, StoreError):
        return Resumable(error.what, error.remedy)
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return Resumable(f"the run's record can't be written: {error.strerror}{where}", "make room in the run directory and start again")
    return Resumable(f"the run's record can't be written: {error}", "see gateway.log; the same command resumes")


@contextlib.asynccontextmanager
async def listening(app: web.Application, host: str, port: int, root: Path) -> AsyncIterator[Address]:
    """Serve on TCP (`host` 127.0.0.1: this node only; any other name: on all interfaces, advertised by that name) and on a unix socket."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, keepalive_timeout=600.0, shutdown_timeout=1.0)
    await runner.setup()
    local = host in ("127.0.0.1", "localhost", "::1")
    with socket_folder(root) as folder:
        path = folder / "gateway.sock"
        try:
            try:
                await web.TCPSite(runner, host if local else EVERYWHERE, port, backlog=1024).start()
            except OSError as error:
                raise GyreError(
                    f"gateway.host = {host}, gateway.port = {port}: {error.strerror}", "choose another, or port 0 for any"
                ) from None
            bound = runner.addresses[0][1]
            await web.UnixSite(runner, str(path), backlog=1024).start()
            yield Address(f"http://{host}:{bound}", str(path), os.getpid())
        finally:
            await runner.cleanup()


@contextlib.contextmanager
def socket_folder(root: Path) -> Iterator[Path]:
    """A private folder with a short path; what a killed gateway of the same run left is removed."""
    prefix = f"gyre-{os.getuid()}-{hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:10]}-"
    base = Path(tempfile.gettempdir())
    if len(str(base)) + len(prefix) + 30 > SUN_PATH:
        base = Path("/tmp")
    for stale in base.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m gyre_hpc.gateway.main", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--host", help="name of this node for the others; overrides gateway.host")
    arguments = parser.parse_args(argv)
    with log_to(logging.StreamHandler()):
        return _main(RunPaths(arguments.run_dir), arguments.attempt, arguments.host)


def _main(paths: RunPaths, attempt: int, host: str | None) -> int:
    folder = paths.runtime(attempt)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        secret = os.environ.get(SECRET_VARIABLE, "")
        if not secret:
            raise GyreError(f"{SECRET_VARIABLE} is not set", "this program is started by `gyre run`")
        config = load(paths.config)
        prepare_process()
        uvloop.run(_run(paths, attempt, config, secret, host))
    except Exception as raised:
        error = stopped_by(raised) if isinstance(raised, StoreError) else raised
        if not isinstance(error, GyreError):
            log.exception("the gateway ends")
        failure = as_failure("gateway", error)
        record_failure(folder, failure)
        print(failure.error().line, file=sys.stderr, flush=True)
        return failure.exit_code
    return int(ExitCode.DONE)


async def _run(paths: RunPaths, attempt: int, config: Config, secret: str, host: str | None) -> None:
    await Gateway(paths, attempt, config, secret, host).run()


def prepare_process() -> None:
    """Room for a connection per execution, and no long pauses for garbage."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    gc.freeze()


def _over(ledger: Ledger) -> int:
    counts = ledger.counts()
    return counts["finished"] + counts["lost"]


if __name__ == "__main__":
    sys.exit(main())
